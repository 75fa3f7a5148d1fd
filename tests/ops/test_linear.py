import itertools

import pytest
import torch
import torch.nn.functional as F

import coda
from tests.reference import assert_no_worse

ACTIVATIONS = {None: lambda t: t, "relu": F.relu, "silu": F.silu, "gelu": F.gelu}


def inputs(m, k, n, dtype, device, bias=True, residual=True):
    new = lambda *s, scale=1.0: (torch.randn(*s, device=device, dtype=torch.float64) * scale).to(dtype)
    return [new(m, k), new(n, k, scale=max(k, 1) ** -0.5), new(n) if bias else None, new(m, n) if residual else None]


def leaves(values, dtype=None):
    return [None if t is None else t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for t in values]


def eager(x, w, b, r, activation=None):
    out = ACTIVATIONS[activation](x @ w.t() if b is None else x @ w.t() + b)
    return out if r is None else out + r


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("m, k, n", [(33, 40, 72), (1, 64, 128), (129, 72, 136), (1, 105, 107), (2, 3, 4), (5, 8, 12), (4, 24, 70)])
@pytest.mark.parametrize("bias, residual", list(itertools.product([False, True], repeat=2)))
def test_against_float64(device, dtype, m, k, n, bias, residual):
    values = inputs(m, k, n, dtype, device, bias, residual)
    a, b, c = leaves(values), leaves(values), leaves(values, torch.float64)
    grad = torch.randn(m, n, device=device).to(dtype)
    out, ref, exact = coda.linear(a[0], a[1], a[2], residual=a[3]), eager(*b), eager(*c)
    out.backward(grad), ref.backward(grad), exact.backward(grad.double())
    assert_no_worse("output", out, ref, exact, 1.2)
    for name, s, t, u in zip("x weight bias residual".split(), a, b, c):
        if s is not None:
            assert_no_worse(name, s.grad, t.grad, u.grad, 1.2)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activation_then_residual(device, activation):
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    values = inputs(9, 16, 24, dtype, device)
    out = coda.linear(*values[:3], residual=values[3], activation=activation)
    exact = eager(*(t.double() for t in values), activation)
    torch.testing.assert_close(out.double(), exact, rtol=3e-2, atol=3e-2)


def test_bias_lands_in_its_column_once(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    bias = torch.arange(72, device=device, dtype=dtype)
    x, w = torch.zeros(3, 16, device=device, dtype=dtype), torch.zeros(72, 16, device=device, dtype=dtype)
    assert torch.equal(coda.linear(x, w, bias), bias.expand(3, 72))
    assert torch.equal(coda.linear(x, w, bias, residual=bias.expand(3, 72)), 2 * bias.expand(3, 72))


@pytest.mark.parametrize("alpha, beta", [(1, 1), (1, 0), (2, 0.5), (0, 1)])
@pytest.mark.parametrize("layout", ["tn", "nn", "nt", "tt"])
def test_gemm_coefficients_and_layouts(device, alpha, beta, layout):
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    a, b = torch.randn(40, 56, device=device, dtype=dtype), torch.randn(56, 72, device=device, dtype=dtype)
    source, bias = torch.randn(40, 72, device=device, dtype=dtype), torch.randn(72, device=device, dtype=dtype)
    a = a.t().contiguous().t() if layout[0] == "n" and layout == "nt" or layout == "tt" else a
    b = b if layout in ("nn", "nt") else b.t().contiguous().t()
    out = torch.ops.coda.gemm(a, b, bias, source, alpha, beta)
    exact = alpha * (a.double() @ b.double()) + beta * source.double() + bias.double()
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=2e-2)
    out = torch.ops.coda.gemm(a, b, None, None, alpha)
    torch.testing.assert_close(out.double(), alpha * (a.double() @ b.double()), rtol=1e-2, atol=2e-2)


def test_empty(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for m, k, n in ((0, 16, 8), (3, 0, 8), (3, 16, 0)):
        values = leaves(inputs(m, k, n, dtype, device))
        out = coda.linear(*values[:3], residual=values[3])
        assert out.shape == (m, n)
        out.sum().backward()
        assert all(t.grad is not None and t.grad.shape == t.shape for t in values)
        if k == 0:
            torch.testing.assert_close(out, values[2] + values[3])


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=4)))
def test_gradcheck_every_subset(wanted):
    torch.manual_seed(0)
    values = [t.requires_grad_(w) for t, w in zip(inputs(3, 4, 5, torch.float64, "cpu"), wanted)]
    wants = [t for t, w in zip(values, wanted) if w]
    if wants:
        assert torch.autograd.gradcheck(lambda *_: coda.linear(*values[:3], residual=values[3]), wants)
    else:
        assert not coda.linear(*values[:3], residual=values[3]).requires_grad


def test_leading_dimensions_and_transposed_views(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    y = torch.randn(4, 6, 64, device=device, dtype=dtype)
    w = torch.randn(32, 64, device=device, dtype=dtype)
    x = y.transpose(0, 1)
    torch.testing.assert_close(coda.linear(x, w), coda.linear(x.contiguous(), w))
    assert coda.linear(x[0, 0], w).shape == (32,)


def test_opcheck_and_compile(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    values = leaves(inputs(8, 16, 24, dtype, device))
    torch.library.opcheck(torch.ops.coda.linear.default, tuple(values))
    torch.library.opcheck(torch.ops.coda.linear.default, (*values[:2], None, None))
    with torch.no_grad():
        plain = [t.detach() for t in values]
    torch.library.opcheck(
        torch.ops.coda.gemm.default, (plain[0], plain[1].t(), plain[2], plain[3], 1.5, 0.5),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
    torch._dynamo.reset()
    f = torch.compile(lambda x, w, b, r: coda.linear(x, w, b, residual=r), fullgraph=True, backend="aot_eager")
    assert torch.equal(f(*plain), coda.linear(*plain[:3], residual=plain[3]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, dtype):
    x, w, b, r = leaves(inputs(9, 16, 24, torch.float32, device))
    with torch.autocast(device, dtype):
        out, stream = coda.linear(x, w, b), coda.linear(x, w, b, residual=r)
        inner = coda.linear(x, w, b, residual=r.to(dtype))
    assert out.dtype == inner.dtype == dtype and stream.dtype == torch.float32
    torch.testing.assert_close(stream, out + r)
    stream.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in (x, w, b, r))


def test_second_derivative_is_an_error():
    x, w = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(coda.linear(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        dx.sum().backward()


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(x=None), TypeError, "x is NoneType"),
        (dict(weight=torch.ones(5, 7)), ValueError, "weight has shape [5, 7], expected 4 columns"),
        (dict(weight=torch.ones(5, 4, dtype=torch.float64)), TypeError, "weight has dtype Double, expected Float"),
        (dict(bias=torch.ones(4)), ValueError, "bias has shape [4], expected [5]"),
        (dict(residual=torch.ones(3, 4)), ValueError, "residual has shape [3, 4], expected [3, 5]"),
        (dict(activation="swish"), ValueError, "activation is 'swish', expected one of None, 'relu'"),
        (dict(bias=torch.ones(5, device="meta")), ValueError, "bias is on meta, expected cpu"),
    ],
)
def test_bad_arguments(change, error, words):
    values = dict(x=torch.ones(3, 4), weight=torch.ones(5, 4), bias=torch.ones(5), residual=torch.ones(3, 5)) | change
    with pytest.raises(error) as e:
        coda.linear(values.pop("x"), values.pop("weight"), values.pop("bias"), **values)
    assert words in str(e.value), e.value
