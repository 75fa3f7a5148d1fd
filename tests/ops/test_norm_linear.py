"""coda.norm_linear; what it shares with the other functions is in test_differentiable.py."""
import pytest
import torch

import coda
from tests.ops.cases import raises, sixteen_on_cuda
from tests.reference import error


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
    for activation in (None, "gelu", "swiglu"):
        w = torch.zeros(0, 8, device=device, dtype=dtype).requires_grad_()
        passed, y = coda.norm_linear(x, None, w, activation=activation)
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
    ],
)
def test_bad_arguments(change, error, words, grad):
    values = {k: torch.ones(s) for k, s in GOOD.items()} | change
    if grad:
        values = {k: v.requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in values.items()}
    raises(error, words, coda.norm_linear, values.pop("x"), values.pop("norm_weight"), values.pop("weight"), **values)
