"""coda.norm_linear_rope; what it shares with the other functions is in test_differentiable.py."""
import pytest
import torch

import coda
from tests.ops.cases import new, norm, raises, rotate, sixteen_on_cuda, tables
from tests.reference import assert_no_worse

HEADS = dict(num_heads=3, num_kv_heads=1)


def arguments(dtype, device, head_dim=8, rotary_dim=8, batch=2, length=5, d=16, positions=20):
    t = lambda *shape, scale=1.0: new(*shape, dtype=dtype, device=device, scale=scale)
    x = t(batch, length, d)
    return [x, 1 + 0.2 * t(d), t(5 * head_dim, d, scale=d**-0.5), *tables(positions, rotary_dim // 2, x)]


def reference(x, norm_weight, w, cos, sin, rows, head_dim, interleaved=False):
    qkv = torch.nn.functional.linear(norm(x, norm_weight), w).unflatten(-1, (-1, head_dim))
    q, k, v = qkv.split((3, 1, 1), -2)
    return rotate(q, cos[rows], sin[rows], interleaved), rotate(k, cos[rows], sin[rows], interleaved), v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim, rotary_dim", [(32, 32), (64, 32), (64, 64), (128, 64), (128, 128), (48, 32), (40, 24), (16, 0)])
@pytest.mark.parametrize("narrow", [False, True])
def test_heads_and_tables(device, dtype, head_dim, rotary_dim, interleaved, narrow):
    x, g, w, cos, sin = arguments(dtype, device, head_dim, rotary_dim, 2, 9)
    if narrow:
        cos, sin = cos.to(dtype), sin.to(dtype)
    rows = torch.arange(18, device=device).view(2, 9).flip(1)
    ours = coda.norm_linear_rope(x, g, w, cos, sin, head_dim=head_dim, positions=rows, interleaved=interleaved, **HEADS)[1:]
    assert not coda.backend_of_last_call().startswith("eager:") or dtype == torch.float32
    eager = reference(x, g, w, cos, sin, rows, head_dim, interleaved)
    exact = reference(*(t.double() for t in (x, g, w, cos, sin)), rows, head_dim, interleaved)
    for name, a, b, c in zip("qkv", ours, eager, exact):
        assert_no_worse(name, a, b, c)


def test_positions(device):
    """Every way to say where the tokens are; none is the same as 0 .. T-1."""
    x, g, w, cos, sin = arguments(sixteen_on_cuda(device), device)
    call = lambda positions, x=x: coda.norm_linear_rope(x, g, w, cos, sin, head_dim=8, positions=positions, **HEADS)[1:]
    rows = torch.arange(5, device=device)
    expected = call(None)
    for positions in (rows, rows.int(), rows.short(), rows.expand(2, 5), rows.int().expand(2, 5), torch.stack((rows, rows), 1)[:, 0]):
        assert all(torch.equal(a, b) for a, b in zip(call(positions), expected))
    moved = torch.stack((rows + 3, rows.flip(0)))
    for i in range(2):
        for a, b in zip(call(moved), call(moved[i], x[i : i + 1])):
            torch.testing.assert_close(a[i : i + 1], b)  # not the same bits: another M may be another kernel
    assert not torch.equal(call(rows + 3)[0], expected[0]) and torch.equal(call(rows + 3)[2], expected[2])


def test_tables_are_constants():
    x, g, w, cos, sin = arguments(torch.float32, "cpu")
    cos.requires_grad_()
    assert not any(t.requires_grad for t in coda.norm_linear_rope(x, g, w, cos, sin, head_dim=8, **HEADS))
    q = coda.norm_linear_rope(x.requires_grad_(), g, w, cos, sin, head_dim=8, **HEADS)[1]
    assert torch.autograd.grad(q.sum(), (x, cos), allow_unused=True)[1] is None


def test_outputs_are_views_of_one_buffer(device):
    x, *others = arguments(sixteen_on_cuda(device), device)
    _, q, k, v = coda.norm_linear_rope(x, *others, head_dim=8, **HEADS)
    assert q.shape == (2, 5, 3, 8) and k.shape == v.shape == (2, 5, 1, 8)
    assert k.data_ptr() - q.data_ptr() == 24 * q.element_size() and q.stride() == k.stride() == v.stride() == (200, 40, 8, 1)


def test_gradients_of_any_strides(device):
    """Attention hands back heads before tokens, or k and v expanded."""
    dtype = sixteen_on_cuda(device)
    values = arguments(dtype, device)
    x, g, w = (t.requires_grad_() for t in values[:3])
    outputs = coda.norm_linear_rope(x, g, w, *values[3:], head_dim=8, **HEADS)[1:]
    gradients = [new(*o.shape, dtype=dtype, device=device) for o in outputs]
    run = lambda incoming: torch.autograd.grad(outputs, (x, g, w), incoming, retain_graph=True)
    expected = run(gradients)
    moved = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in gradients]
    columns = [t.transpose(1, 3).contiguous().transpose(1, 3) for t in gradients]
    for strided in (moved, columns):
        assert all(torch.equal(a, b) for a, b in zip(run(strided), expected))
    zeros = [torch.zeros_like(gradients[0]), gradients[1], torch.zeros_like(gradients[2])]
    only_k = torch.autograd.grad(outputs[1], (x, g, w), gradients[1], retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(run(zeros), only_k))


def test_tables_may_be_strided(device):
    x, g, w, cos, sin = arguments(sixteen_on_cuda(device), device)
    expected = coda.norm_linear_rope(x, g, w, cos, sin, head_dim=8, **HEADS)
    both = torch.stack((cos, sin), -1)
    for c, s in ((both[..., 0], both[..., 1]), (cos.t().contiguous().t(), sin.t().contiguous().t()), torch.cat((cos, sin), 1).chunk(2, 1)):
        assert all(torch.equal(a, b) for a, b in zip(coda.norm_linear_rope(x, g, w, c, s, head_dim=8, **HEADS), expected))


GOOD = dict(x=(2, 5, 8), norm_weight=(8,), w_qkv=(20, 8), cos=(6, 2), sin=(6, 2), bias=(20,))
OPTIONS = dict(num_heads=3, num_kv_heads=1, head_dim=4)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(x=None), TypeError, "x is NoneType"),
        (dict(x=torch.ones(5, 8)), ValueError, "x has shape [5, 8], expected 3 dimensions"),
        (dict(norm_weight=torch.ones(7)), ValueError, "norm_weight has shape [7], expected [8]"),
        (dict(w_qkv=None), TypeError, "w_qkv is NoneType"),
        (dict(w_qkv=torch.ones(21, 8)), ValueError, "w_qkv has shape [21, 8], expected 20 rows"),
        (dict(w_qkv=torch.ones(20, 7)), ValueError, "w_qkv has shape [20, 7], expected 8 columns"),
        (dict(w_qkv=torch.ones(20, 8, dtype=torch.float64)), TypeError, "w_qkv has dtype torch.float64"),
        (dict(w_qkv=torch.ones(20, 8, device="meta")), ValueError, "w_qkv is on meta"),
        (dict(bias=torch.ones(19)), ValueError, "bias has shape [19], expected [20]"),
        (dict(w_qkv=(torch.ones(20, 8),)), TypeError, "w_qkv is tuple, expected a tensor or three of them"),
        (dict(w_qkv=(torch.ones(12, 8), torch.ones(4, 8), None)), TypeError, "w_qkv[2] is NoneType"),
        (dict(w_qkv=(torch.ones(12, 8), torch.ones(5, 8), torch.ones(4, 8))), ValueError, "w_qkv[1] has shape [5, 8], expected 4 rows"),
        (dict(w_qkv=(torch.ones(12, 8), torch.ones(4, 7), torch.ones(4, 8))), ValueError, "w_qkv[1] has shape [4, 7], expected 8 columns"),
        (dict(bias=(torch.ones(12), torch.ones(4), torch.ones(3))), ValueError, "bias[2] has shape [3], expected 4 rows"),
        (dict(bias=(torch.ones(12), torch.ones(4), torch.ones(4, 1))), ValueError, "bias is a triple of tensors of different kinds"),
        (dict(q_norm_weight=torch.ones(4)), ValueError, "k_norm_weight is None, expected a tensor"),
        (dict(q_norm_weight=torch.ones(4), k_norm_weight=2.0), TypeError, "k_norm_weight is float"),
        (dict(q_norm_weight=torch.ones(4), k_norm_weight=torch.ones(3)), ValueError, "k_norm_weight has shape [3], expected [4]"),
        (dict(q_norm_weight=torch.ones(4), k_norm_weight=torch.ones(4, dtype=torch.bfloat16)), TypeError, "k_norm_weight has dtype"),
        (dict(cos=None), TypeError, "cos is NoneType"),
        (dict(cos=torch.ones(())), ValueError, "cos has shape []"),
        (dict(cos=torch.ones(6)), ValueError, "cos has shape [6], expected 2 dimensions"),
        (dict(cos=torch.ones(6, 3), sin=torch.ones(6, 3)), ValueError, "cos has shape [6, 3], expected at most head_dim / 2"),
        (dict(cos=torch.ones(4, 2), sin=torch.ones(4, 2)), ValueError, "cos has 4 rows"),
        (dict(cos=torch.ones(6, 2, dtype=torch.float64)), TypeError, "cos has dtype Double"),
        (dict(sin=torch.ones(5, 2)), ValueError, "sin has shape [5, 2], expected [6, 2]"),
        (dict(sin=torch.ones(6, 2, dtype=torch.bfloat16)), TypeError, "sin has dtype BFloat16"),
        (dict(sin=torch.ones(6, 2, device="meta")), ValueError, "sin is on meta"),
        (dict(positions=[0, 1, 2, 3, 4]), TypeError, "positions is list"),
        (dict(positions=torch.zeros(5)), TypeError, "positions has dtype torch.float32"),
        (dict(positions=torch.zeros(4, dtype=torch.int64)), ValueError, "positions has shape [4], expected [5] or [2, 5]"),
        (dict(positions=torch.full((5,), 6)), ValueError, "positions has values from 6 to 6, expected 0 to 5"),
        (dict(positions=torch.full((5,), -1)), ValueError, "positions has values from -1 to -1"),
        (dict(num_heads=0), ValueError, "num_heads is 0"),
        (dict(num_kv_heads=1.0), ValueError, "num_kv_heads is 1.0"),
        (dict(head_dim=None), ValueError, "head_dim is None"),
        (dict(stats=1), TypeError, "stats is int"),
    ],
)
def test_bad_arguments(change, error, words, grad):
    values = {k: torch.ones(s) for k, s in GOOD.items()} | OPTIONS | change
    for name in ("x", "w_qkv") if grad else ():
        if isinstance(values[name], torch.Tensor):
            values[name].requires_grad_()
    raises(error, words, coda.norm_linear_rope, *(values.pop(k) for k in ("x", "norm_weight", "w_qkv", "cos", "sin")), **values)
