import itertools

import pytest
import torch

import coda
from tests.ops.cases import ACTIVATIONS, Case, compare, new, raises, sixteen_on_cuda
from tests.reference import error


def inputs(m, k, n, dtype, device, bias=True, residual=True):
    t = lambda *s, scale=1.0: new(*s, dtype=dtype, device=device, scale=scale)
    return [t(m, k), t(n, k, scale=max(k, 1) ** -0.5), t(n) if bias else None, t(m, n) if residual else None]


def eager(x, w, b, r, activation=None):
    out = ACTIVATIONS[activation](x @ w.t() if b is None else x @ w.t() + b)
    return out if r is None else out + r


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("m, k, n", [(33, 40, 72), (1, 64, 128), (129, 72, 136), (1, 105, 107), (2, 3, 4), (5, 8, 12), (4, 24, 70)])
@pytest.mark.parametrize("bias, residual", list(itertools.product([False, True], repeat=2)))
def test_against_float64(device, dtype, m, k, n, bias, residual):
    tensors = {k: t for k, t in zip(("x", "w", "b", "r"), inputs(m, k, n, dtype, device, bias, residual)) if t is not None}
    case = Case(lambda x, w, b=None, r=None: coda.linear(x, w, b, residual=r), lambda x, w, b=None, r=None: eager(x, w, b, r), None)
    compare(case, tensors, 1.2)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activation_then_residual(device, activation):
    dtype = sixteen_on_cuda(device, torch.float64)
    values = inputs(9, 16, 24, dtype, device)
    out = coda.linear(*values[:3], residual=values[3], activation=activation)
    exact = eager(*(t.double() for t in values), activation)
    torch.testing.assert_close(out.double(), exact, rtol=3e-2, atol=3e-2)


def test_bias_lands_in_its_column_once(device):
    dtype = sixteen_on_cuda(device)
    bias = torch.arange(72, device=device, dtype=dtype)
    x, w = torch.zeros(3, 16, device=device, dtype=dtype), torch.zeros(72, 16, device=device, dtype=dtype)
    assert torch.equal(coda.linear(x, w, bias), bias.expand(3, 72))
    assert torch.equal(coda.linear(x, w, bias, residual=bias.expand(3, 72)), 2 * bias.expand(3, 72))


@pytest.mark.parametrize("alpha, beta", [(1, 1), (1, 0), (2, 0.5), (0, 1)])
@pytest.mark.parametrize("layout", ["tn", "nn", "nt", "tt"])
def test_gemm_coefficients_and_layouts(device, alpha, beta, layout):
    dtype = sixteen_on_cuda(device, torch.float64)
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
    dtype = sixteen_on_cuda(device)
    for m, k, n in ((0, 16, 8), (3, 0, 8), (3, 16, 0)):
        values = [t.requires_grad_() for t in inputs(m, k, n, dtype, device)]
        out = coda.linear(*values[:3], residual=values[3])
        assert out.shape == (m, n)
        out.sum().backward()
        assert all(t.grad is not None and t.grad.shape == t.shape for t in values)
        if k == 0:
            torch.testing.assert_close(out, values[2] + values[3])


def test_leading_dimensions_and_transposed_views(device):
    dtype = sixteen_on_cuda(device)
    y = torch.randn(4, 6, 64, device=device, dtype=dtype)
    w = torch.randn(32, 64, device=device, dtype=dtype)
    x = y.transpose(0, 1)
    torch.testing.assert_close(coda.linear(x, w), coda.linear(x.contiguous(), w))
    assert coda.linear(x[0, 0], w).shape == (32,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, dtype):
    x, w, b, r = (t.requires_grad_() for t in inputs(9, 16, 24, torch.float32, device))
    with torch.autocast(device, dtype):
        out, stream = coda.linear(x, w, b), coda.linear(x, w, b, residual=r)
        inner = coda.linear(x, w, b, residual=r.to(dtype))
    assert out.dtype == inner.dtype == dtype and stream.dtype == torch.float32
    torch.testing.assert_close(stream, out + r)
    stream.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in (x, w, b, r))


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
    raises(error, words, coda.linear, values.pop("x"), values.pop("weight"), values.pop("bias"), **values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("m, k, n", [(33, 40, 72), (1, 64, 128), (129, 72, 1032), (5, 7, 13), (0, 8, 8), (3, 0, 8)])
@pytest.mark.parametrize("weight", ["same", "float32"])
def test_statistics_of_the_sum(device, dtype, m, k, n, weight, poisoned_memory):
    """They are a function of the sum as it is stored, and the sum is the same without them."""
    x, w, b, r = inputs(m, k, n, dtype, device)
    g = torch.rand(n, dtype=torch.float64).to(dtype if weight == "same" or dtype == torch.float64 else torch.float32).to(device)
    out, stats = coda.linear_residual(x, w, r, bias=b, next_norm_weight=g, eps=1e-4)
    assert out.shape == stats.h.shape == (m, n) and stats.rstd.shape == (m,)
    assert stats.rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and stats.h.dtype == dtype
    assert error(stats.rstd, (out.double().square().mean(-1) + 1e-4).rsqrt()) < (1e-12 if dtype == torch.float64 else 1e-6)
    assert error(stats.h, out.double() * g.double()) <= torch.finfo(dtype).eps
    torch.testing.assert_close(out, coda.linear_residual(x, w, r, bias=b))
    torch.testing.assert_close(out, coda.linear(x, w, b, residual=r))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("m, k, n", [(33, 40, 72), (1, 64, 128), (129, 72, 1032), (5, 7, 13), (0, 8, 8), (3, 0, 8)])
@pytest.mark.parametrize("mean", [0, 10])
def test_layer_statistics_of_the_sum(device, dtype, m, k, n, mean, poisoned_memory):
    x, w, b, r = inputs(m, k, n, dtype, device)
    r += mean
    g = torch.rand(n, dtype=torch.float64).to(dtype).to(device)
    out, stats = coda.linear_residual(x, w, r, bias=b, next_norm_weight=g, eps=1e-4, next_norm="layer")
    wide = out.double()
    assert stats.mean.shape == stats.rstd.shape == (m,) and stats.mean.dtype == stats.rstd.dtype
    limit = 1e-12 if dtype == torch.float64 else 1e-6
    variance = (wide - wide.mean(-1, keepdim=True)).square().mean(-1)
    assert error(stats.rstd, (variance + 1e-4).rsqrt()) < limit * (1 + mean**2 / 4)
    assert (stats.mean - wide.mean(-1)).norm() <= limit * wide.square().mean(-1).sqrt().norm()
    assert error(stats.h, wide * g.double()) <= torch.finfo(dtype).eps
    torch.testing.assert_close(out, coda.linear_residual(x, w, r, bias=b))


def test_a_constant_row_has_no_variance(device):
    """Where the difference that makes it might be negative."""
    dtype = sixteen_on_cuda(device)
    r = torch.tensor([[3.140625], [1000.0], [0.1]], device=device).to(dtype).expand(3, 520)
    x, w = torch.zeros(3, 8, device=device, dtype=dtype), torch.zeros(520, 8, device=device, dtype=dtype)
    _, stats = coda.linear_residual(x, w, r, next_norm_weight=torch.ones_like(w[:, 0]), eps=1e-2, next_norm="layer")
    torch.testing.assert_close(stats.mean, r[:, 0].float())
    limit = 520**0.5 * 2.0**-23 * r[:, 0].float().square()  # of a sum in float32
    assert ((stats.rstd**-2 - 1e-2).abs() <= limit + 1e-6).all()


def test_statistics_in_autocast(device):
    """The sum with an fp32 residual is formed after the product, and so are its statistics."""
    x, w, b, r = inputs(9, 16, 24, torch.float32, device)
    g = torch.rand(24).to(device)
    with torch.autocast(device, torch.bfloat16):
        out, stats = coda.linear_residual(x, w, r, bias=b, next_norm_weight=g)
        layer, of_layer = coda.linear_residual(x, w, r, bias=b, next_norm_weight=g, next_norm="layer")
        narrow, of_narrow = coda.linear_residual(x, w, r.bfloat16(), bias=b, next_norm_weight=g)
    assert out.dtype == stats.h.dtype == torch.float32 and narrow.dtype == of_narrow.h.dtype == torch.bfloat16
    assert error(of_layer.rstd, (layer.double().var(-1, correction=0) + 1e-6).rsqrt()) < 1e-6
    of_layer.check(layer, g, 1e-6, "layer")
    for total, s in ((out, stats), (narrow, of_narrow)):
        assert error(s.rstd, (total.double().square().mean(-1) + 1e-6).rsqrt()) < 1e-6
        s.check(total, g, 1e-6)


def test_no_gradient_through_statistics():
    x, w, b, r = (t.requires_grad_() for t in inputs(3, 4, 5, torch.float64, "cpu"))
    g = torch.rand(5, dtype=torch.float64, requires_grad=True)
    _, stats = coda.linear_residual(x, w, r, bias=b, next_norm_weight=g)
    assert not stats.h.requires_grad and not stats.rstd.requires_grad


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(a=None), TypeError, "a is NoneType"),
        (dict(a=torch.ones(()), residual=torch.ones(5)), ValueError, "a has shape []"),
        (dict(a=torch.ones(3, 4, dtype=torch.int64)), TypeError, "a has dtype Long"),
        (dict(weight=None), TypeError, "weight is NoneType"),
        (dict(weight=torch.ones(5)), ValueError, "weight has shape [5], expected 2 dimensions"),
        (dict(weight=torch.ones(5, 7)), ValueError, "weight has shape [5, 7], expected 4 columns"),
        (dict(residual=None), TypeError, "residual is NoneType"),
        (dict(residual=torch.ones(3, 4)), ValueError, "residual has shape [3, 4], expected [3, 5]"),
        (dict(residual=torch.ones(3, 5, dtype=torch.float64)), TypeError, "residual has dtype Double, expected Float"),
        (dict(residual=torch.ones(3, 5, device="meta")), ValueError, "residual is on meta"),
        (dict(bias=torch.ones(4)), ValueError, "bias has shape [4], expected [5]"),
        (dict(next_norm="batch"), ValueError, "next_norm is 'batch', expected one of 'rms', 'layer'"),
        (dict(next_norm="layer", next_norm_weight=torch.ones(4)), ValueError, "next_norm_weight has shape [4], expected [5]"),
        (dict(next_norm="layer", bias=torch.ones(4)), ValueError, "bias has shape [4], expected [5]"),
        (dict(next_norm_weight=1), TypeError, "next_norm_weight is int"),
        (dict(next_norm_weight=torch.ones(4)), ValueError, "next_norm_weight has shape [4], expected [5]"),
        (dict(next_norm_weight=torch.ones(5, dtype=torch.float64)), TypeError, "next_norm_weight has dtype Double"),
    ],
)
def test_bad_arguments_with_statistics(change, error, words):
    good = dict(a=torch.ones(3, 4), weight=torch.ones(5, 4), residual=torch.ones(3, 5), bias=torch.ones(5), next_norm_weight=torch.ones(5))
    raises(error, words, coda.linear_residual, **(good | change))
