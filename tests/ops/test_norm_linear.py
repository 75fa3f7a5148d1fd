"""coda.norm_linear; what it shares with the other functions is in test_differentiable.py."""
import itertools

import pytest
import torch

import coda
from coda.ops.mlp import mlp_residual
from tests.ops.cases import raises, sixteen_on_cuda
from tests.reference import assert_no_worse, error


def chained(dtype=torch.float32, device="cpu", n=8, eps=1e-6):
    """(x, its statistics, norm weight, weight of the next layer)."""
    g = 1 + 0.2 * torch.randn(n, device=device)
    a, w, r = (torch.randn(4, 8, device=device).to(dtype) for _ in range(3))
    w = torch.randn(n, 8, device=device).to(dtype)
    x, stats = coda.linear_residual(a, w, r, next_norm_weight=g.to(dtype), eps=eps)
    return x, stats, stats.norm_weight, torch.randn(6, n, device=device).to(dtype)


def test_statistics_are_used_and_right(device):
    """A pass over x could not know that h was replaced."""
    x, stats, g, w = chained(sixteen_on_cuda(device), device)
    exact = (x.double().square().mean(-1) + 1e-6).rsqrt()
    assert error(stats.rstd, exact) < 1e-6 and error(stats.h, x.double() * g.double()) < 2.0**-8
    expected = coda.norm_linear(x, g, w)[1]
    torch.testing.assert_close(coda.norm_linear(x, g, w, stats=stats)[1], expected, rtol=2e-2 if device == "cuda" else 1e-6, atol=1e-6)
    stats.h.zero_()
    assert not coda.norm_linear(x, g, w, stats=stats)[1].any()


def test_statistics_of_something_else_are_refused():
    for function in (lambda x, g, w, **k: coda.norm_linear(x, g, w, **k), lambda x, g, w, **k: coda.norm_linear(x.requires_grad_(), g, w, **k)):
        x, stats, g, w = chained()
        raises(ValueError, "stats were made for another tensor", function, x.clone(), g, w, stats=stats)
        raises(ValueError, "stats were made with another norm weight", function, x, g.clone(), w, stats=stats)
        raises(ValueError, "stats were made with another norm weight", function, x, None, w, stats=stats)
        raises(ValueError, "stats were made with eps 1e-06, expected 1e-05", function, x, g, w, stats=stats, eps=1e-5)
        raises(TypeError, "stats is Tensor, expected the coda.NormStats", function, x, g, w, stats=stats.rstd)
    x, stats, g, w = chained()
    x.add_(1)
    raises(ValueError, "stats are of an earlier state of x", coda.norm_linear, x, g, w, stats=stats)
    x, stats, g, w = chained()
    g.add_(1)  # h holds the old weight
    raises(ValueError, "stats", coda.norm_linear, x, g, w, stats=stats)


def test_statistics_of_the_other_kind_of_norm_are_refused():
    g, w = torch.ones(8), torch.ones(6, 8)
    for made, used in (("rms", "layer"), ("layer", "rms")):
        x, stats = coda.linear_residual(torch.ones(4, 8), torch.ones(8, 8), torch.ones(4, 8), next_norm_weight=g, next_norm=made)
        assert stats.norm == made
        for activation in (None, "swiglu"):
            coda.norm_linear(x, g, w, stats=stats, norm=made, activation=activation)
            words = f"stats were made for {'an RMSNorm' if made == 'rms' else 'a LayerNorm'}, expected those for"
            raises(ValueError, words, coda.norm_linear, x, g, w, stats=stats, norm=used, activation=activation)
    raises(ValueError, "stats were made for a LayerNorm", mlp_residual, x, torch.ones(12, 8), torch.ones(8, 6), norm_weight=g, eps=1e-6, stats=stats)


def test_layer_statistics_are_used_and_right(device):
    dtype = sixteen_on_cuda(device)
    a, w, r = (torch.randn(*s, device=device).to(dtype) for s in ((5, 8), (16, 8), (5, 16)))
    g, b, head = (torch.randn(*s, device=device).to(dtype) for s in ((16,), (16,), (6, 16)))
    x, stats = coda.linear_residual(a, w, r, next_norm_weight=g, next_norm="layer")
    options = dict(norm="layer", norm_bias=b)
    expected = coda.norm_linear(x, g, head, **options)[1]
    loose = dict(rtol=2e-2, atol=2e-2) if device == "cuda" else dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(coda.norm_linear(x, g, head, stats=stats, **options)[1], expected, **loose)
    stats.mean.add_(1)
    assert (coda.norm_linear(x, g, head, stats=stats, **options)[1] - expected).abs().max() > 0.1


@pytest.mark.parametrize("from_epilogue", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ratio", [0, 1, 3, 10])
def test_rows_with_a_large_mean(device, dtype, ratio, from_epilogue):
    """Values and gradients stay within sqrt(1 + ratio^2) of eager's error, and within the roundings of the variance if the epilogue made it."""
    m, d, n = 64, 256, 136
    new = lambda *s, scale=1.0: (torch.randn(*s, dtype=torch.float64) * scale).to(dtype).to(device)
    x, g, b, w, c = ratio + new(m, d), 1 + new(d, scale=0.2), new(d, scale=0.5), new(n, d, scale=d**-0.5), new(n)
    dy, incoming = new(m, n), new(m, d)
    zero = torch.zeros(m, 8, device=device, dtype=dtype), torch.zeros(d, 8, device=device, dtype=dtype)

    def ours(x, g, b, w, c):
        stats = None
        if from_epilogue:
            x, stats = coda.linear_residual(*zero, x, next_norm_weight=g, eps=1e-5, next_norm="layer")
        return coda.norm_linear(x, g, w, c, eps=1e-5, activation="gelu", norm="layer", norm_bias=b, stats=stats)

    def formula(x, g, b, w, c):
        return x * 1, torch.nn.functional.gelu(torch.nn.functional.linear(torch.nn.functional.layer_norm(x, (d,), g, b, 1e-5), w, c))

    def values(function, kind):
        leaves = [t.to(kind).requires_grad_() for t in (x.detach(), g, b, w, c)]
        outputs = function(*leaves)
        return [outputs[1].detach(), *torch.autograd.grad(outputs, leaves, [incoming.to(kind), dy.to(kind)])]

    names = ("y", "gradient of x", "gradient of norm_weight", "gradient of norm_bias", "gradient of weight", "gradient of bias")
    for name, a, e, exact in zip(names, values(ours, dtype), values(formula, dtype), values(formula, torch.float64)):
        if dtype in (torch.float32, torch.float64):
            # In wide types eager's own error is that of a sum or two; what the variance loses is what it can be held to.
            assert error(a, exact) < torch.finfo(dtype).eps * (16 + 4 * ratio**2), name
        else:
            assert_no_worse(name, a, e, exact, 1.25 * (1 + ratio**2) ** 0.5)


def test_layer_norm_without_parameters(device):
    dtype = sixteen_on_cuda(device, torch.float64)
    x, w = (torch.randn(*s, device=device, dtype=torch.float64).to(dtype).requires_grad_() for s in ((5, 16), (6, 16)))
    _, y = coda.norm_linear(x, None, w, norm="layer", eps=1e-5)
    exact = torch.nn.functional.linear(torch.nn.functional.layer_norm(x.double(), (16,), eps=1e-5), w.double())
    grad = torch.randn_like(y)
    loose = 2e-2 if device == "cuda" else 1e-12
    assert error(y.detach(), exact.detach()) < loose
    for a, b in zip(torch.autograd.grad(y, (x, w), grad), torch.autograd.grad(exact, (x, w), grad.double())):
        assert error(a, b.double()) < loose


def test_weight_alone_wants_a_gradient(device):
    """Then no epilogue makes what the weight gradient reads."""
    dtype = sixteen_on_cuda(device)
    x, w, g, b = (torch.randn(*s, device=device).to(dtype) for s in ((5, 16), (6, 16), (16,), (16,)))
    dy = torch.randn(5, 6, device=device).to(dtype)
    for norm_weight, norm_bias in ((g, b), (g, None), (None, b), (None, None)):
        w.requires_grad_()
        (dw,) = torch.autograd.grad(coda.norm_linear(x, norm_weight, w, norm="layer", norm_bias=norm_bias)[1], w, dy)
        x.requires_grad_()
        both = torch.autograd.grad(coda.norm_linear(x, norm_weight, w, norm="layer", norm_bias=norm_bias)[1], (x, w), dy)[1]
        x.requires_grad_(False)
        torch.testing.assert_close(dw, both, rtol=2e-2 if device == "cuda" else 1e-5, atol=1e-2 if device == "cuda" else 1e-5)


def test_statistics_serve_several_layers_and_inference(device):
    x, stats, g, w = chained(sixteen_on_cuda(device), device)
    first = [coda.norm_linear(x, g, w, activation=a, stats=stats)[1] for a in (None, "silu")]
    with torch.inference_mode():
        assert all(torch.equal(coda.norm_linear(x, g, w, activation=a, stats=stats)[1], f) for a, f in zip((None, "silu"), first))
        fresh, stats = coda.linear_residual(x, torch.eye(8, device=device, dtype=x.dtype), x, next_norm_weight=g)
        coda.norm_linear(fresh, g, w, stats=stats)


def test_returned_x_is_the_argument(device):
    x, _, g, w = chained(sixteen_on_cuda(device), device)
    for leaf in (x, x.clone().requires_grad_(), x.t().contiguous().t()):
        passed, _ = coda.norm_linear(leaf, g, w)
        assert torch.equal(passed, leaf) and passed.data_ptr() == leaf.data_ptr()


def test_empty_widths(device):
    dtype = sixteen_on_cuda(device)
    x = torch.randn(3, 8, device=device, dtype=dtype).requires_grad_()
    for activation, norm in itertools.product((None, "gelu", "swiglu"), ("rms", "layer")):
        w = torch.zeros(0, 8, device=device, dtype=dtype).requires_grad_()
        passed, y = coda.norm_linear(x, None, w, activation=activation, norm=norm)
        assert y.shape == (3, 0)
        dx, dw = torch.autograd.grad((passed.sum(), y.sum()), (x, w))
        assert (dx == 1).all() and dw.shape == w.shape


GOOD = dict(x=(4, 8), norm_weight=(8,), weight=(6, 8), bias=(6,))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(x=None), TypeError, "x is NoneType"),
        (dict(x=torch.ones(4, 8, dtype=torch.int32)), TypeError, "x has dtype torch.int32"),
        (dict(x=torch.ones(())), ValueError, "x has shape []"),
        (dict(norm_weight=1.0), TypeError, "norm_weight is float"),
        (dict(norm_weight=torch.ones(7)), ValueError, "norm_weight has shape [7], expected [8]"),
        (dict(norm_weight=torch.ones(8, dtype=torch.float64)), TypeError, "norm_weight has dtype Double"),
        (dict(weight=None), TypeError, "weight is NoneType"),
        (dict(weight=torch.ones(())), ValueError, "weight has shape []"),
        (dict(weight=torch.ones(8)), ValueError, "weight has shape [8]"),
        (dict(weight=torch.ones(6, 7)), ValueError, "weight has shape [6, 7], expected 8 columns"),
        (dict(weight=torch.ones(6, 8, dtype=torch.bfloat16)), TypeError, "weight has dtype torch.bfloat16, expected torch.float32"),
        (dict(weight=torch.ones(6, 8, device="meta")), ValueError, "weight is on meta, expected cpu"),
        (dict(weight=(torch.ones(6, 8),) * 2), TypeError, "weight is tuple"),
        (dict(bias=torch.ones(5)), ValueError, "bias has shape [5], expected [6]"),
        (dict(bias=torch.ones(6, dtype=torch.float64)), TypeError, "bias has dtype Double"),
        (dict(bias=0), TypeError, "bias is int"),
        (dict(activation="swish"), ValueError, "activation is 'swish', expected one of None, 'relu'"),
        (dict(activation="swiglu"), ValueError, "bias is a tensor, expected None"),
        (dict(activation="swiglu", bias=None, weight=torch.ones(5, 8)), ValueError, "weight has shape [5, 8], expected an even number of rows"),
        (dict(activation="geglu", bias=None, weight=torch.ones(6, 7)), ValueError, "weight has shape [6, 7]"),
        (dict(activation="geglu", bias=None, weight=(torch.ones(6, 8), torch.ones(5, 8))), ValueError, "weight[1] has shape [5, 8]"),
        (dict(activation="geglu", bias=None, weight=(torch.ones(6, 8), None)), TypeError, "weight[1] is NoneType"),
        (dict(activation="geglu", bias=None, weight=(torch.ones(6, 8), torch.ones(6, 8, device="meta"))), ValueError, "weight[1] is on meta"),
        (dict(activation="geglu", bias=None, weight=[torch.ones(6, 8)] * 3), TypeError, "weight is list"),
        (dict(stats=1), TypeError, "stats is int"),
        (dict(norm="batch"), ValueError, "norm is 'batch', expected one of 'rms', 'layer'"),
        (dict(norm=None), ValueError, "norm is None, expected one of 'rms', 'layer'"),
        (dict(norm_bias=torch.ones(8)), ValueError, "norm_bias is a tensor, expected None with norm 'rms'"),
        (dict(norm="layer", norm_bias=1.0), TypeError, "norm_bias is float"),
        (dict(norm="layer", norm_bias=torch.ones(7)), ValueError, "norm_bias has shape [7], expected [8]"),
        (dict(norm="layer", norm_bias=torch.ones(8, dtype=torch.float64)), TypeError, "norm_bias has dtype Double"),
        (dict(norm="layer", norm_bias=torch.ones(8, device="meta")), ValueError, "norm_bias is on meta, expected cpu"),
        (dict(norm="layer", norm_weight=torch.ones(7)), ValueError, "norm_weight has shape [7], expected [8]"),
        (dict(norm="layer", weight=torch.ones(6, 7)), ValueError, "weight has shape [6, 7], expected 8 columns"),
        (dict(norm="layer", bias=torch.ones(5)), ValueError, "bias has shape [5], expected [6]"),
        (dict(norm="layer", bias=torch.ones(6, dtype=torch.float64)), TypeError, "bias has dtype Double"),
        (dict(norm="layer", activation="swiglu"), ValueError, "bias is a tensor, expected None"),
        (dict(norm="layer", activation="swiglu", bias=None, norm_bias=torch.ones(7)), ValueError, "norm_bias has shape [7], expected [8]"),
    ],
)
def test_bad_arguments(change, error, words, grad):
    values = {k: torch.ones(s) for k, s in GOOD.items()} | change
    if grad:
        values = {k: v.requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in values.items()}
    raises(error, words, coda.norm_linear, values.pop("x"), values.pop("norm_weight"), values.pop("weight"), **values)
