"""The raw forward programs of coda, and the operators of torch.ops.coda that the backward formulas are made of."""
import pytest
import torch
import torch.nn.functional as F

import coda
from tests.ops.cases import ACTIVATIONS, GATES, SIXTEEN, head_norm, new, raises, rotate, sixteen_on_cuda, tables
from tests.reference import assert_no_worse, error

ops = torch.ops.coda
DTYPES = [*SIXTEEN, torch.float32]
SHAPES = [(33, 40, 72), (1, 64, 128), (5, 7, 14), (200, 1032, 40)]


def step(dtype):
    return max(torch.finfo(dtype).eps, 2e-6)


def deferred(m, d, dtype, device):
    """(x, norm weight, h, rstd)."""
    x, g = new(m, d, dtype=dtype, device=device), 1 + new(d, dtype=dtype, device=device, scale=0.2)
    return x, g, *coda.rms_norm_stats(x, g)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m, d, n", SHAPES)
def test_forward_programs(device, dtype, m, d, n, poisoned_memory):
    """Against the norm and the layer behind it."""
    x, g, h, rstd = deferred(m, d, dtype, device)
    w, b = new(n, d, dtype=dtype, device=device, scale=d**-0.5), new(n, dtype=dtype, device=device)

    def check(name, ours, function):
        eager, exact = function(x, g, w, b), function(*(t.double() for t in (x, g, w, b)))
        assert_no_worse(name, ours, eager, exact, 1.2)

    norm = lambda x, g: F.rms_norm(x, (d,), g, 1e-6)
    check("rms_linear", coda.rms_linear(h, rstd, w, b), lambda x, g, w, b: F.linear(norm(x, g), w, b))
    for activation, f in GATES.items():
        gated = lambda x, g, w, b: f((z := F.linear(norm(x, g), w))[:, : n // 2]) * z[:, n // 2 :]
        one = coda.rms_linear_swiglu(h, rstd, w, activation=activation)
        check(activation, one, gated)
        pair = tuple(t.clone() for t in w.chunk(2))
        torch.testing.assert_close(coda.rms_linear_swiglu(h, rstd, pair, activation=activation), one)
    residual = new(m, n, dtype=dtype, device=device)
    for weight in (None, new(n, dtype=dtype, device=device), new(n, dtype=torch.float32, device=device)):
        out, next_h, next_rstd = coda.linear_residual_rms_norm(x, w, residual, weight, 1e-5, bias=b)
        check("residual", out, lambda x, g, w, b: residual.to(x.dtype) + F.linear(x, w, b))
        assert error(next_rstd, (out.double().square().mean(-1) + 1e-5).rsqrt()) < 1e-6
        assert next_h is out if weight is None else error(next_h, out.double() * weight.double()) <= step(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_program(device, interleaved):
    dtype = sixteen_on_cuda(device)
    x, g, h, rstd = deferred(10, 16, dtype, device)
    w, b = new(40, 16, dtype=dtype, device=device), new(40, dtype=dtype, device=device)
    cos, sin = tables(9, 2, x)
    options = dict(num_heads=3, num_kv_heads=1, head_dim=8, bias=b, interleaved=interleaved)
    expected = coda.norm_linear_rope(x.view(2, 5, 16), g, w, cos, sin, **options)[1:]
    q, k, v = coda.rms_linear_rope(h.view(2, 5, 16), rstd.view(2, 5), w, cos, sin, rotary_dim=4, **options)
    assert all(torch.equal(a, c) for a, c in zip((q, k, v), expected))
    deep = coda.rms_linear_rope(h.view(2, 1, 5, 16), rstd.view(2, 1, 5), w, cos, sin, positions=torch.arange(5, device=device), **options)
    assert deep[0].shape == (2, 1, 5, 3, 8) and torch.equal(deep[0].squeeze(1), q)


def programs(device="cpu"):
    """name -> (function, good arguments)."""
    t = lambda *shape: torch.ones(*shape, device=device)
    deferred = dict(h=t(3, 8), rstd=t(3))
    angles = dict(cos=t(3, 2), sin=t(3, 2), num_heads=1, num_kv_heads=1, head_dim=4)
    return {
        "residual": (coda.linear_residual_rms_norm, dict(x=t(3, 8), weight=t(6, 8), residual=t(3, 6), norm_weight=t(6), bias=t(6))),
        "linear": (coda.rms_linear, deferred | dict(weight=t(6, 8), bias=t(6))),
        "swiglu": (coda.rms_linear_swiglu, deferred | dict(w_gate_up=t(6, 8))),
        "swiglu-pair": (coda.rms_linear_swiglu, deferred | dict(w_gate_up=(t(6, 8), t(6, 8)))),
        "rope": (coda.rms_linear_rope, deferred | dict(w_qkv=t(12, 8), bias=t(12)) | angles),
    }


@pytest.mark.parametrize("name", programs())
def test_no_backward(name):
    """A tensor that requires grad is refused, unless no gradient is recorded."""
    function, good = programs()[name]
    for argument, value in good.items():
        if isinstance(value, tuple):
            changed, word = (value[0], value[1].clone().requires_grad_()), f"{argument}[1] requires grad"
        elif isinstance(value, torch.Tensor):
            changed, word = value.clone().requires_grad_(), f"{argument} requires grad"
        else:
            continue
        raises(ValueError, word, function, **(good | {argument: changed}))
        with torch.no_grad():
            function(**(good | {argument: changed}))


@pytest.mark.parametrize("name", programs())
def test_wrong_types(name):
    function, good = programs()[name]
    for argument, value in good.items():
        if isinstance(value, int):
            continue
        label = f"{argument}[0]" if isinstance(value, tuple) else argument
        put = lambda t: good | {argument: (t, value[1]) if isinstance(value, tuple) else t}
        optional = argument in ("bias", "norm_weight")
        one = value[0] if isinstance(value, tuple) else value
        raises(TypeError, f"{label} is ", function, **put("a"))
        if not optional:
            raises(TypeError, f"{label} is NoneType", function, **put(None))
        raises(ValueError, f"{label} is on meta" if argument not in ("x", "h") else " is on cpu, expected meta", function, **put(one.to("meta")))
        # A mistake in x or h may as well be one in all the others.
        words = label + " has dtype" if argument not in ("x", "h") else "has dtype"
        raises(TypeError, words, function, **put(one.double()))
        raises(TypeError, words, function, **put(one.long()))


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("residual", dict(x=torch.ones(()), residual=torch.ones(6)), "x has shape []"),
        ("residual", dict(x=torch.ones(3, 7)), "weight has shape [6, 8], expected 7 columns"),
        ("residual", dict(weight=torch.ones(6)), "weight of shape [6]"),
        ("residual", dict(residual=torch.ones(3, 5)), "residual has shape [3, 5]"),
        ("residual", dict(norm_weight=torch.ones(5)), "norm_weight has shape [5], expected [6]"),
        ("residual", dict(bias=torch.ones(5)), "bias has shape [5], expected [6]"),
        ("linear", dict(h=torch.ones(())), "h has shape []"),
        ("linear", dict(rstd=torch.ones(3, 1)), "rstd has shape [3, 1], expected [3]"),
        ("linear", dict(weight=torch.ones(6, 7)), "weight has shape [6, 7], expected 8 columns"),
        ("linear", dict(bias=torch.ones(7)), "bias has shape [7], expected [6]"),
        ("swiglu", dict(w_gate_up=torch.ones(5, 8)), "w_gate_up has shape [5, 8]"),
        ("swiglu", dict(activation="relu"), "activation is 'relu', expected one of 'silu'"),
        ("swiglu-pair", dict(w_gate_up=(torch.ones(6, 8), torch.ones(5, 8))), "w_gate_up[1] has shape [5, 8], expected [6, 8]"),
        ("rope", dict(w_qkv=torch.ones(11, 8)), "w_qkv has shape [11, 8], expected 12 rows"),
        ("rope", dict(w_qkv=torch.ones(12, 7)), "w_qkv has shape [12, 7], expected 8 columns"),
        ("rope", dict(cos=torch.ones(3, 3), sin=torch.ones(3, 3)), "cos has shape [3, 3]"),
        ("rope", dict(rotary_dim=2), "rotary_dim is 2, expected 4"),
        ("rope", dict(positions=torch.full((3,), 3)), "positions has values from 3 to 3, expected 0 to 2"),
    ],
)
def test_wrong_shapes(name, change, words):
    function, good = programs()[name]
    raises(ValueError, words, function, **(good | change))


def check(outputs, exact, dtype):
    """Against float64; an fp32 sum may be off by what cancelled in it."""
    for i, (value, wanted) in enumerate(zip(outputs, exact)):
        if wanted is None:
            continue
        wanted, size = wanted if isinstance(wanted, tuple) else (wanted, wanted)
        off = (value.double() - wanted).norm().item()
        assert value.shape == wanted.shape and off <= step(value.dtype) * wanted.norm().item() + 4e-6 * size.norm().item(), f"output {i}: {off}"


sums = lambda terms, dim: (terms.sum(dim), terms.abs().sum(dim))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m, d, n", SHAPES)
@pytest.mark.parametrize("product", [True, False], ids=["product", "none"])
def test_activation_gradients(device, dtype, m, d, n, product, poisoned_memory):
    """dglu and dact; without w_down there is no product, and a row kernel runs."""
    t = lambda *shape, scale=1.0: new(*shape, dtype=dtype, device=device, scale=scale)
    dy, w = (t(m, d), t(d, n, scale=d**-0.5)) if product else (t(m, n), None)
    acc, rstd, b = dy.double() @ w.double() if product else dy.double(), torch.rand(m, device=device) + 0.5, t(n)
    glu, z1, z2 = {k: (lambda z, f=f: f(z[:, :n]) * z[:, n:]) for k, f in GATES.items()}, t(m, n), t(m, 2 * n)
    for gated, functions in ((True, glu), (False, ACTIVATIONS)):
        for i, (kind, function) in enumerate(functions.items()):
            z = (z2 if gated else z1).double().requires_grad_()
            value = function(z)
            (dz,) = torch.autograd.grad(value, z, acc)
            bias, scale = (None if gated or i % 2 else b), (None if i == 1 else rstd)
            rows = (dz * (z - (0 if bias is None else bias.double()))).detach() / 11
            wide = 1 if scale is None else scale.double().unsqueeze(1)
            exact = [dz * wide, value.detach(), sums(rows * wide**2, 1), None if bias is None else sums(dz, 0)]
            rest = (z2, scale, kind, 11) if gated else (z1, scale, bias, kind or "identity", 11)
            call = ops.dglu if gated else ops.dact
            outputs = call(dy, w, *rest, True)
            check(outputs, exact, dtype)
            without = call(dy, w, *rest, False)
            assert without[1].numel() == 0 and all(torch.equal(a, c) for j, (a, c) in enumerate(zip(outputs, without)) if j != 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m, d, n", SHAPES)
def test_norm_backward(device, dtype, m, d, n, poisoned_memory):
    t = lambda *shape, scale=1.0: new(*shape, dtype=dtype, device=device, scale=scale)
    dz, w, x, g, incoming = t(m, n), t(n, d, scale=n**-0.5), t(m, d), t(d), t(m, d)
    correction = torch.randn(m, device=device)
    dn, wide = dz.double() @ w.double(), x.double()
    pair = [h.clone() for h in w.chunk(2)]
    for weights in ((w, None), pair):
        for norm_weight, i, want in ((g, incoming, True), (g.float() + 2.0**-13, None, True), (g, None, False), (None, incoming, False)):
            gamma = 1 if norm_weight is None else norm_weight.double()
            dx = gamma * dn - correction.double().unsqueeze(1) * wide + (0 if i is None else i.double())
            outputs = ops.norm_backward(dz, *weights, x, norm_weight, correction, i, want, want)
            check(outputs, [dx, wide * gamma if want else None, sums(dn * wide, 0) if want else None], dtype)
            again = ops.norm_backward(dz, *weights, x, norm_weight, correction, i, want, want)
            assert all(torch.equal(a, c) for a, c in zip(outputs, again))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim, rotary_dim", [(64, 64), (128, 64), (32, 32), (10, 4), (16, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_rope_backward(device, dtype, head_dim, rotary_dim, interleaved, bias, poisoned_memory):
    batch, length, heads = 3, 11, (3, 2, 2)
    t = lambda *shape: new(*shape, dtype=dtype, device=device)
    m, n, turned = batch * length, sum(heads) * head_dim, (heads[0] + heads[1]) * head_dim
    y, rstd, b = t(m, n), torch.rand(m, device=device) + 0.5, t(n) if bias else None
    cos, sin = tables(40, rotary_dim // 2, y)
    at = torch.arange(m, device=device) * 7 % 40
    gradients = [t(batch, h, length, head_dim).transpose(1, 2) for h in heads]
    for positions, scale in ((at, rstd), (at.int(), None), (None, rstd)):
        rows = torch.arange(m, device=device) % length if positions is None else at
        dy = torch.cat([g.double().reshape(m, -1) for g in gradients], 1)
        turning, still = dy[:, :turned].view(m, -1, head_dim), dy[:, turned:]
        dz = torch.cat((rotate(turning, cos[rows].double(), -sin[rows].double(), interleaved).reshape(m, -1), still), 1)
        wide = 1 if scale is None else scale.double().unsqueeze(1)
        terms = torch.cat((dy * y.double(), torch.zeros_like(dy) if b is None else -dz * b.double()), 1) / 5
        outputs = ops.rope_backward(*gradients, y, scale, b, cos, sin, positions, length, head_dim, turned, interleaved, 5)
        exact = [dz * wide, sums(terms * wide**2, 1), None]
        check(outputs, exact, dtype)
        if bias:
            check(outputs[2:], [sums(dz, 0)], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim, rotary_dim", [(128, 128), (64, 64), (256, 64), (32, 32), (520, 40), (10, 4), (16, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_qknorm_rope_backward(device, dtype, head_dim, rotary_dim, interleaved, bias, poisoned_memory):
    batch, length, heads, eps = 3, 11, (3, 2, 2), 1e-2
    t = lambda *shape: new(*shape, dtype=dtype, device=device)
    m, n, turned = batch * length, sum(heads) * head_dim, (heads[0] + heads[1]) * head_dim
    product, y, rstd, b = t(m, turned), t(m, n), torch.rand(m, device=device) + 0.5, t(n) if bias else None
    cos, sin = tables(40, rotary_dim // 2, y)
    at = torch.arange(m, device=device) * 7 % 40
    gradients = [t(batch, h, length, head_dim).transpose(1, 2) for h in heads]
    for positions, scale, narrow in ((at, rstd, True), (at.int(), None, False), (None, rstd, True)):
        rows = torch.arange(m, device=device) % length if positions is None else at
        norms = [(1 + t(head_dim) / 4).to(dtype if narrow else torch.float32) for _ in range(2)]
        z, q_norm, k_norm = (v.double().requires_grad_() for v in (product, *norms))
        q, k = z.view(m, -1, head_dim).split(heads[:2], 1)
        normed = torch.cat((head_norm(q, q_norm, eps), head_norm(k, k_norm, eps)), 1)
        dy = [g.double().reshape(m, -1, head_dim) for g in gradients]
        out = rotate(normed, cos[rows].double(), sin[rows].double(), interleaved)
        dproduct, dq_norm, dk_norm = torch.autograd.grad(out, (z, q_norm, k_norm), torch.cat(dy[:2], 1))
        dz, stored = torch.cat((dproduct, dy[2].flatten(1)), 1), torch.cat((product.double(), y[:, turned:].double()), 1)
        wide = 1 if scale is None else scale.double().unsqueeze(1)
        terms = torch.cat((dz * stored, torch.zeros_like(dz) if b is None else -dz * b.double()), 1) / 5
        arguments = (*gradients, product, y, scale, b, *norms, eps, heads[0] * head_dim, cos, sin, positions, length, head_dim, turned, interleaved, 5)
        outputs = ops.qknorm_rope_backward(*arguments)
        # The weights' gradients are sums of many terms that cancel, in any order.
        terms_of_norms = (dq_norm, dq_norm.abs() + heads[0] * m**0.5), (dk_norm, dk_norm.abs() + heads[1] * m**0.5)
        check(outputs, [dz * wide, sums(terms * wide**2, 1), sums(dz, 0) if bias else None, *terms_of_norms], dtype)
        assert all(torch.equal(a, c) for a, c in zip(outputs, ops.qknorm_rope_backward(*arguments)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemm_accumulate(device, dtype):
    """One rounding, to fp32, whatever is added to."""
    a, b = new(40, 56, dtype=dtype, device=device), new(56, 72, dtype=dtype, device=device)
    for x, y in ((a, b), (a.t().contiguous().t(), b), (a, b.t().contiguous().t())):
        total = torch.full((40, 72), 3.0, device=device)
        assert ops.gemm_accumulate_(total, x, y) is None
        assert error(total, 3 + a.double() @ b.double()) < 2e-6
    for shape in ((0, 5, 7), (4, 0, 7), (4, 5, 0)):
        total = torch.ones(shape[0], shape[2], device=device)
        ops.gemm_accumulate_(total, a.new_zeros(shape[:2]), a.new_zeros(shape[1:]))
        assert (total == 1).all()
    raises(TypeError, "out has dtype", ops.gemm_accumulate_, torch.ones(40, 72, device=device).to(torch.bfloat16), a, b)
    raises(ValueError, "out has shape [40, 71], expected [40, 72]", ops.gemm_accumulate_, torch.ones(40, 71, device=device), a, b)


def test_sums_do_not_depend_on_the_number_of_threads():
    dy, z, b = (new(*shape, dtype=torch.float32, device="cpu") for shape in ((500, 300), (500, 300), (300,)))
    x, w, g, c = new(500, 40, dtype=torch.float32, device="cpu"), torch.ones(300, 40), torch.rand(40), torch.rand(500)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append([*ops.dact(dy, None, z, None, b, "gelu", 300, True), ops.norm_backward(dy.sign(), w, None, x, g, c, None, True, True)[2]])
    torch.set_num_threads(1)
    assert all(torch.equal(a, c) for other in found[1:] for a, c in zip(found[0], other))


@pytest.mark.gpu
def test_more_than_2_31_elements():
    m, d = 524296, 4096
    x = torch.zeros(m, d, device="cuda", dtype=torch.bfloat16)
    dz = torch.zeros(m, 8, device="cuda", dtype=torch.bfloat16)
    x[-2:], dz[-2:] = torch.randn(2, d, device="cuda"), torch.randn(2, 8, device="cuda")
    w, g = torch.randn(8, d, device="cuda").bfloat16(), torch.rand(d, device="cuda").bfloat16()
    dx, h, dg = ops.norm_backward(dz, w, None, x, g, torch.zeros(m, device="cuda"), None, True, True)
    dn = dz[-2:].double() @ w.double()
    assert error(dx[-2:], dn * g.double()) < 2.0**-8 and error(h[-2:], x[-2:].double() * g.double()) < 2.0**-8
    assert error(dg, (dn * x[-2:].double()).sum(0)) < 2.0**-8
    assert not dx[:-2].any() and not h[:-2].any()
