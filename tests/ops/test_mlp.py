import itertools

import pytest
import torch
import torch.nn.functional as F

import coda
from coda import _C
from coda.ops.mlp import mlp_residual
from tests.ops import cases
from tests.ops.cases import CASES, SIXTEEN, leaves, raises, results, sixteen_on_cuda
from tests.reference import error, flat, leaf_copy, mlp, mlp_inputs

CPU_ONLY = (torch.float32, torch.float64)


def call(inputs, **options):
    x, w_gate_up, w_down, norm_weight, residual = inputs
    return coda.fused_mlp_forward(x, w_gate_up, w_down, norm_weight=norm_weight, residual=residual, **options)


def compare(inputs, factor=1.0):
    """Output and every gradient against float64. Returns the back ends of the forward and of the backward's last product."""
    names = ("x", "w_gate_up", "w_down", "norm_weight", "residual")
    tensors = {k: t for k, t in zip(names, inputs) if t is not None}
    if isinstance(tensors["w_gate_up"], tuple):
        tensors["w_gate_up"], tensors["w_up"] = tensors["w_gate_up"]

    def of(function):
        def named(w_gate_up, w_up=None, norm_weight=None, residual=None, *, x, w_down):
            return function((x, w_gate_up if w_up is None else (w_gate_up, w_up), w_down, norm_weight, residual))

        return named

    return cases.compare(cases.Case(of(call), of(lambda t: mlp(*t)), None), tensors, factor)


@pytest.mark.parametrize("dtype", SIXTEEN + CPU_ONLY, ids=str)
@pytest.mark.parametrize("m, d, f", [(33, 40, 72), (1, 64, 128)])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("norm, residual", [(True, True), (False, False), (True, False), (False, True)])
def test_against_float64(device, dtype, m, d, f, pair, norm, residual):
    forward, backward = compare(mlp_inputs(m, d, f, dtype, device, norm=norm, residual=residual, pair=pair))
    if device == "cpu":
        assert forward == backward == "cpu"
    elif dtype in SIXTEEN:
        kernels = cases.kernels_of_this_gpu()
        assert forward.startswith(kernels) and "rstd_swiglu_preactivation" in forward and backward.startswith(kernels)
    else:
        assert forward.startswith("eager:") and backward.startswith("eager:")


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 7, 127, 129, 1000])
@pytest.mark.parametrize("f", [1192, 8192])
@pytest.mark.parametrize("d", [520, 2048])
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_ragged_shapes(m, f, d, dtype, poisoned_memory):
    torch.manual_seed(0)
    compare(mlp_inputs(m, d, f, dtype, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("d, f", [(2048, 8192), (4096, 14336)], ids=["1b", "8b"])
def test_llama_shapes(d, f):
    torch.manual_seed(0)
    compare(mlp_inputs(16384, d, f, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("m, d, f", [(5, 7, 12), (3, 20, 13), (17, 33, 65), (2, 8, 3), (4, 1, 1)])
def test_odd_widths(device, m, d, f):
    """Widths that are no multiple of 8: padded, never refused."""
    # A norm over one value has a gradient of zero, which no sum of rounded terms can hit.
    forward, _ = compare(mlp_inputs(m, d, f, torch.bfloat16, device, norm=d > 1), factor=1.5)
    assert not forward.startswith("eager:")


@pytest.mark.parametrize("m, d, f", [(0, 16, 24), (3, 16, 0), (3, 0, 8)])
def test_empty(device, m, d, f):
    inputs = leaf_copy(mlp_inputs(m, d, f, sixteen_on_cuda(device), device))
    out = call(inputs)
    assert out.shape == (m, d) and out.grad_fn is not None
    out.sum().backward()
    for t in flat(inputs):
        assert t.grad is not None and t.grad.shape == t.shape
        if m == 0:
            assert not t.grad.any()
    if f == 0:
        assert torch.equal(out, inputs[4])


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 0, 3), (1, 2, 1, 4)])
def test_leading_dimensions(device, lead):
    dtype = sixteen_on_cuda(device)
    x, w, w_down, g, _ = mlp_inputs(1, 16, 24, dtype, device)
    x = torch.randn(*lead, 16, device=device, dtype=dtype)
    out = coda.fused_mlp_forward(x, w, w_down, norm_weight=g, residual=x)
    assert out.shape == x.shape and out.is_contiguous()
    rows = x.reshape(-1, 16)
    assert torch.equal(out.reshape(-1, 16), coda.fused_mlp_forward(rows, w, w_down, norm_weight=g, residual=rows))


def test_expanded_norm_weight(device):
    dtype = sixteen_on_cuda(device)
    inputs = mlp_inputs(9, 16, 24, dtype, device)
    one = torch.full((1,), 1.5, device=device, dtype=dtype)
    a = coda.fused_mlp_forward(*inputs[:3], norm_weight=one.expand(16))
    assert torch.equal(a, coda.fused_mlp_forward(*inputs[:3], norm_weight=one.repeat(16)))


def test_same_parameter_as_gate_and_up(device):
    dtype = sixteen_on_cuda(device, torch.float64)
    x, (w, _), w_down, g, _ = leaf_copy(mlp_inputs(8, 16, 24, dtype, device, pair=True))
    coda.fused_mlp_forward(x, (w, w), w_down, norm_weight=g).sum().backward()
    y, v, v_down, h = (t.detach().double().requires_grad_() for t in (x, w, w_down, g))
    mlp(y, (v, v), v_down, h).sum().backward()
    torch.testing.assert_close(w.grad.double(), v.grad, rtol=3e-2 if device == "cuda" else 1e-9, atol=3e-2 if device == "cuda" else 1e-9)


def test_gate_and_up_in_any_memory_order(device):
    """Adjacent, separate in either order, and overlapping in one buffer: the order of addresses must not matter."""
    dtype = torch.bfloat16
    x, w, w_down, g, _ = mlp_inputs(16, 32, 40, dtype, device)
    expected = coda.fused_mlp_forward(x, w, w_down, norm_weight=g)
    gate, up = w.chunk(2)
    swapped = torch.cat((up, gate))
    buffer = torch.zeros(200, 32, dtype=dtype, device=device)
    buffer[10:50], buffer[150:190] = gate, up
    for pair in ((gate, up), (gate.clone(), up.clone()), (swapped[40:], swapped[:40]), (buffer[10:50], buffer[150:190])):
        assert torch.equal(coda.fused_mlp_forward(x, pair, w_down, norm_weight=g), expected)


def _saved(f):
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(tuple(t.shape)) or t, lambda t: t):
        f()
    return sizes


def test_what_is_saved():
    m, d, f = 6, 8, 16
    x, w, w_down, g, r = mlp_inputs(m, d, f, torch.float32, "cpu")
    leaves = [t.requires_grad_() for t in (x, w, w_down, g, r)]
    sizes = _saved(lambda: call(leaves))
    assert sizes.count((m, 2 * f)) == 1 and sizes.count((m, d)) == 1 and sizes.count((m,)) == 1  # pre-activation; x; rstd
    with torch.no_grad():
        assert _saved(lambda: call(leaves)) == []
    x.requires_grad_(False), g.requires_grad_(False), w.requires_grad_(False)
    assert (m, d) not in _saved(lambda: call(leaves)), "x is not needed for the gradient of w_down"
    w_down.requires_grad_(False)
    assert _saved(lambda: call(leaves)) == [], "only the residual wants a gradient"


PLAIN = ("mlp-plain-residual-is-x", "mlp-plain-layer-residual-is-x")


@pytest.mark.parametrize("name", PLAIN)
def test_what_the_plain_one_saves(name):
    m, d, f = 6, 8, 16
    layer = "layer" in name
    tensors = CASES[name].tensors(m, d, f, torch.float32, "cpu")

    def saved(*wanted):
        values = leaves(tensors, wanted=wanted)
        return _saved(lambda: CASES[name].function(**values))

    everything = saved(*tensors)
    assert everything.count((m, f)) == 1 and everything.count((m, d)) == 1 and everything.count((m,)) == 1 + layer  # z; x; rstd, mean
    assert everything.count((f,)) == 1 + 2 * layer  # the bias; u and v
    assert (m, d) not in saved("bias"), "x is not needed for the gradient of the bias"
    down = saved("w_down", "b_down")
    assert (m, d) not in down and down.count((m, f)) == 1, "the activation is enough for w_down"
    assert saved("b_down") == saved() == []
    with torch.no_grad():
        assert saved(*tensors) == []


@pytest.mark.parametrize("name", PLAIN)
def test_launches_of_the_plain_one(device, name):
    """Backward: four products, of which two have an epilogue, the finaliser of row sums, and the sums for the bias and for the norm's weight. For w_down
    alone one product."""
    tensors = CASES[name].tensors(40, 64, 72, sixteen_on_cuda(device), device)
    for wanted, count in ((list(tensors), 4 + 3), (["w_down", "b_down"], 1)):
        values = leaves(tensors, wanted=wanted)
        out = CASES[name].function(**values)
        before = _C.launch_count()
        torch.autograd.grad(out, [values[k] for k in wanted], torch.randn_like(out))
        assert _C.launch_count() - before == count


@pytest.mark.parametrize("name", ["mlp-plain-relu2", "mlp-plain-layer-gelu"])
def test_every_subset_has_the_same_gradients(device, name):
    """Whatever else wants a gradient."""
    case = CASES[name]
    tensors = case.tensors(6, 16, 24, sixteen_on_cuda(device, torch.float64), device)
    _, gradients, expected = results(case.function, leaves(tensors))
    for size in range(1, len(tensors)):
        for wanted in itertools.combinations(tensors, size):
            _, _, got = results(case.function, leaves(tensors, wanted=wanted), gradients)
            assert set(got) == set(wanted)
            for k, g in got.items():
                # Alone, w_down reads the activation as the forward had it, not made again from the rounded pre-activation.
                assert error(g, expected[k].double()) < (2e-2 if device == "cuda" else 1e-12), (k, wanted)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("m, d, f", [(0, 16, 24), (3, 16, 0), (3, 0, 8)])
def test_plain_and_empty(device, m, d, f, kind):
    name = f"mlp-plain-{'layer-' * (kind == 'layer')}gelu"
    tensors = leaves(CASES[name].tensors(m, d, f, sixteen_on_cuda(device), device))
    out = CASES[name].function(**tensors)
    assert out.shape == (m, d)
    out.sum().backward()
    assert all(t.grad is not None and t.grad.shape == t.shape for t in tensors.values())
    if f == 0:
        torch.testing.assert_close(out, tensors["given"] + tensors["b_down"])


@pytest.mark.parametrize("name", PLAIN)
def test_plain_compiles_for_any_number_of_tokens(device, name):
    torch._dynamo.reset()
    compiled = torch.compile(CASES[name].function, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (8, 12, 20):
        tensors = CASES[name].tensors(m, 16, 24, sixteen_on_cuda(device), device)
        (expected,), gradients, wanted = results(CASES[name].function, leaves(tensors))
        (out,), _, got = results(compiled, leaves(tensors), gradients)
        # On a GPU the library may take another kernel for operands that lie elsewhere.
        same = torch.equal if device == "cpu" else lambda a, b: error(a, b.double()) < 2.0**-8
        assert same(out, expected) and all(same(got[k], wanted[k]) for k in wanted)


def test_plain_to_another_width(device):
    """Without a norm, into an output of another width than x."""
    dtype = sixteen_on_cuda(device, torch.float64)
    t = leaves({k: cases.new(*s, dtype=dtype, device=device) for k, s in dict(x=(2, 3, 8), w=(24, 8), bias=(24,), w_down=(16, 24), r=(2, 3, 16)).items()})
    case = cases.Case(
        lambda x, w, bias, w_down, r: coda.fused_mlp_forward(x, w, w_down, gated=False, up_bias=bias, residual=r, activation="gelu", norm="layer"),
        lambda x, w, bias, w_down, r: r + F.linear(F.gelu(F.linear(x, w, bias)), w_down),
        None,
    )
    cases.compare(case, t, 1.25)


def test_large_gates_stay_finite(device):
    dtype = sixteen_on_cuda(device)
    x, w, w_down, _, _ = leaf_copy(mlp_inputs(16, 16, 32, dtype, device, norm=False, residual=False, scale=4000.0))
    out = coda.fused_mlp_forward(x, w, w_down)
    out.sum().backward()
    assert all(t.isfinite().all() for t in (out, x.grad, w.grad, w_down.grad))


def test_nan_stays_in_its_row(device):
    dtype = sixteen_on_cuda(device)
    x, w, w_down, g, _ = mlp_inputs(40, 64, 96, dtype, device)
    clean = coda.fused_mlp_forward(x, w, w_down, norm_weight=g)
    x[17, 3] = float("nan")
    out = coda.fused_mlp_forward(x, w, w_down, norm_weight=g)
    assert out[17].isnan().all()
    others = [i for i in range(40) if i != 17]
    assert torch.equal(out[others], clean[others])


def test_constant_weights_cannot_hide_the_order(device):
    """Rows of gate and up carry their own index, so that a permutation of features or of [gate; up] shows."""
    dtype = sixteen_on_cuda(device)
    f = 64
    x = torch.ones(2, 8, device=device, dtype=dtype)
    w = torch.zeros(2 * f, 8, device=device, dtype=dtype)
    w[:f, 0] = torch.arange(f, device=device, dtype=dtype) / 16
    w[f:, 0] = torch.arange(f, device=device, dtype=dtype).flip(0) / 8
    out = coda.fused_mlp_forward(x, w, torch.eye(f, device=device, dtype=dtype)[:, :])
    gate, up = w[:f, 0].double(), w[f:, 0].double()
    torch.testing.assert_close(out[0].double(), F.silu(gate) * up, rtol=1e-2 if device == "cuda" else 1e-6, atol=1e-6)


def test_compile_fullgraph(device):
    dtype = sixteen_on_cuda(device)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: call(t), fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (8, 12, 20):
        inputs = leaf_copy(mlp_inputs(m, 16, 24, dtype, device))
        again = leaf_copy(inputs)
        a, b = compiled(*inputs), call(again)
        assert torch.equal(a, b)
        a.sum().backward(), b.sum().backward()
        assert all(torch.equal(s.grad, t.grad) for s, t in zip(flat(inputs), flat(again)))


GOOD = dict(x=(4, 8), w_gate_up=(12, 8), w_down=(8, 6), norm_weight=(8,), residual=(4, 8))


@pytest.mark.parametrize(
    "name, bad, exception, words",
    [
        ("x", None, TypeError, "x is NoneType, expected a torch.Tensor"),
        ("x", torch.ones(4, 8, dtype=torch.int32), TypeError, "x has dtype Int, expected float32"),
        ("x", torch.ones(()), ValueError, "x has shape []"),
        ("w_gate_up", None, TypeError, "w_gate_up is NoneType, expected a tensor"),
        ("w_gate_up", [torch.ones(6, 8)] * 3, TypeError, "w_gate_up is list, expected a tensor"),
        ("w_gate_up", torch.ones(12, 7), ValueError, "w_gate_up has shape [12, 7], expected 8 columns"),
        ("w_gate_up", torch.ones(11, 8), ValueError, "w_gate_up has shape [11, 8], expected an even number of rows"),
        ("w_gate_up", torch.ones(12), ValueError, "w_gate_up has shape [12], expected 2 dimensions"),
        ("w_gate_up", torch.ones(12, 8, dtype=torch.bfloat16), TypeError, "w_gate_up has dtype BFloat16, expected Float"),
        ("w_gate_up", (torch.ones(6, 8), torch.ones(5, 8)), ValueError, "w_gate_up[1] has shape [5, 8], expected [6, 8]"),
        ("w_gate_up", torch.ones(12, 8, device="meta"), ValueError, "w_gate_up is on meta, expected cpu"),
        ("w_down", torch.ones(8, 5), ValueError, "w_down has shape [8, 5], expected 6 columns"),
        ("w_down", torch.ones(8), ValueError, "w_down has shape [8], expected 2 dimensions"),
        ("norm_weight", torch.ones(7), ValueError, "norm_weight has shape [7], expected [8]"),
        ("norm_weight", torch.ones(8, dtype=torch.float64), TypeError, "norm_weight has dtype Double, expected Float"),
        ("norm_weight", 1.0, TypeError, "norm_weight is float, expected a torch.Tensor"),
        ("residual", torch.ones(4, 7), ValueError, "residual has shape [4, 7], expected [4, 8]"),
        ("residual", torch.ones(1, 8), ValueError, "residual has shape [1, 8], expected [4, 8]"),
        ("residual", torch.ones(4, 8, dtype=torch.float64), TypeError, "residual has dtype Double, expected Float"),
        ("activation", "tanh", ValueError, "activation is 'tanh', expected one of 'silu'"),
        ("activation", "relu2", ValueError, "activation is 'relu2', expected one of 'silu'"),
    ],
)
def test_bad_arguments(name, bad, exception, words):
    values = {k: torch.ones(s) for k, s in GOOD.items()} | {name: bad}
    raises(exception, words, coda.fused_mlp_forward, values.pop("x"), values.pop("w_gate_up"), values.pop("w_down"), **values)


PLAIN_GOOD = GOOD | dict(w_gate_up=(6, 8), up_bias=(6,), down_bias=(8,), norm_bias=(8,))


@pytest.mark.parametrize(
    "changes, exception, words",
    [
        (dict(x=torch.ones(4, 8, dtype=torch.int32)), TypeError, "x has dtype torch.int32, expected float32"),
        (dict(w_gate_up=(torch.ones(6, 8), torch.ones(6, 8))), TypeError, "w_gate_up is tuple, expected a torch.Tensor"),
        (dict(w_gate_up=torch.ones(6, 7)), ValueError, "w_gate_up has shape [6, 7], expected 8 columns"),
        (dict(w_gate_up=torch.ones(6)), ValueError, "w_gate_up has shape [6], expected 2 dimensions"),
        (dict(w_gate_up=torch.ones(6, 8, dtype=torch.float64)), TypeError, "w_gate_up has dtype torch.float64, expected torch.float32"),
        (dict(w_down=torch.ones(8, 5)), ValueError, "w_down has shape [8, 5], expected 6 columns"),
        (dict(w_down=torch.ones(8, 6, dtype=torch.float16)), TypeError, "w_down has dtype torch.float16, expected torch.float32"),
        (dict(up_bias=torch.ones(5)), ValueError, "up_bias has shape [5], expected [6]"),
        (dict(up_bias=torch.ones(6, device="meta")), ValueError, "up_bias is on meta, expected cpu"),
        (dict(down_bias=torch.ones(6)), ValueError, "down_bias has shape [6], expected [8]"),
        (dict(down_bias=torch.ones(8, dtype=torch.float64)), TypeError, "down_bias has dtype torch.float64, expected torch.float32"),
        (dict(down_bias=1.0), TypeError, "down_bias is float, expected a torch.Tensor"),
        (dict(norm_weight=torch.ones(7)), ValueError, "norm_weight has shape [7], expected [8]"),
        (dict(norm_bias=torch.ones(7)), ValueError, "norm_bias has shape [7], expected [8]"),
        (dict(norm_bias=torch.ones(8, dtype=torch.bfloat16)), TypeError, "norm_bias has dtype torch.bfloat16, expected torch.float32"),
        (dict(norm_weight=None), ValueError, "norm_bias is a tensor, expected None without norm_weight"),
        (dict(norm="rms"), ValueError, "norm_bias is a tensor, expected None with norm 'rms'"),
        (dict(norm="batch"), ValueError, "norm is 'batch', expected one of 'rms', 'layer'"),
        (dict(residual=torch.ones(4, 7)), ValueError, "residual has shape [4, 7], expected [4, 8]"),
        (dict(residual=torch.ones(4, 8, dtype=torch.float64)), TypeError, "residual has dtype torch.float64, expected torch.float32"),
        (dict(activation="swiglu"), ValueError, "activation is 'swiglu', expected one of 'relu'"),
        (dict(gated=True), ValueError, "norm is 'layer', expected 'rms' with gated=True"),
        (dict(gated=True, norm="rms"), ValueError, "up_bias is a tensor, expected None with gated=True"),
        (dict(gated=True, norm="rms", up_bias=None), ValueError, "down_bias is a tensor, expected None with gated=True"),
        (dict(gated=True, norm="rms", up_bias=None, down_bias=None), ValueError, "norm_bias is a tensor, expected None with gated=True"),
    ],
)
def test_bad_arguments_of_the_plain_one(changes, exception, words):
    """Each raises before anything runs."""
    values = {k: torch.ones(s) for k, s in PLAIN_GOOD.items()} | dict(norm="layer", gated=False)
    call = lambda **t: coda.fused_mlp_forward(t.pop("x"), t.pop("w_gate_up"), t.pop("w_down"), **t)
    call(**values)
    before = _C.launch_count()
    raises(exception, words, call, **(values | changes))
    assert _C.launch_count() == before


@pytest.mark.parametrize("kind, following", [("rms", "rms"), ("rms", "layer"), ("layer", "rms"), ("layer", "layer")])
def test_statistics_of_the_plain_one(device, kind, following):
    x, w, w_down, g, _ = mlp_inputs(6, 16, 24, sixteen_on_cuda(device), device)
    w, r, next_g = w[:24], torch.randn_like(x), torch.rand_like(g)
    x, stats = coda.linear_residual(x, torch.eye(16, device=device, dtype=x.dtype), r, next_norm_weight=g, next_norm=kind)
    options = dict(gated=False, norm=kind, activation="gelu")
    link = lambda **changes: mlp_residual(x, w, w_down, **(dict(norm_weight=g, eps=1e-6, stats=stats, **options) | changes))
    out, of_out = link(next_norm_weight=next_g, next_eps=1e-3, next_norm=following)
    torch.testing.assert_close(out, coda.fused_mlp_forward(x, w, w_down, norm_weight=g, residual=x, **options))
    of_out.check(out, next_g, 1e-3, following)
    wide = out.double()
    variance = wide.square().mean(-1) if following == "rms" else wide.var(-1, correction=0)
    assert error(of_out.rstd, (variance + 1e-3).rsqrt()) < 1e-5
    assert of_out.mean is None if following == "rms" else error(of_out.mean, wide.mean(-1)) < 1e-5
    other = "layer" if kind == "rms" else "rms"
    raises(ValueError, f"expected those for {'a LayerNorm' if other == 'layer' else 'an RMSNorm'}", link, norm=other)
    raises(ValueError, "stats were made with another norm weight", link, norm_weight=g.clone())
    raises(ValueError, "next_norm is 'layer', expected 'rms' with gated=True", link, gated=True, norm="rms", next_norm="layer")


def test_statistics(device):
    """A link of a chain uses those of its input, refuses those of another, and makes those of its output."""
    x, w, w_down, g, _ = mlp_inputs(6, 16, 24, sixteen_on_cuda(device), device)
    r, next_g = torch.randn_like(x), torch.rand_like(g)
    x, stats = coda.linear_residual(x, torch.eye(16, device=device, dtype=x.dtype), r, next_norm_weight=g)
    link = lambda x, g, eps=1e-6: mlp_residual(x, w, w_down, norm_weight=g, eps=eps, stats=stats, next_norm_weight=next_g, next_eps=1e-3)
    out, of_out = link(x, g)
    torch.testing.assert_close(out, coda.fused_mlp_forward(x, w, w_down, norm_weight=g, residual=x))
    of_out.check(out, next_g, 1e-3)
    assert error(of_out.rstd, (out.double().square().mean(-1) + 1e-3).rsqrt()) < 1e-6
    assert error(of_out.h, out.double() * next_g.double()) < 2.0**-8
    raises(ValueError, "stats were made for another tensor", link, x.clone(), g)
    raises(ValueError, "stats were made with another norm weight", link, x, g.clone())
    raises(ValueError, "stats were made with eps", link, x, g, 1e-5)
    x.add_(1)
    raises(ValueError, "stats are of an earlier state of x", link, x, g)


@pytest.mark.gpu
def test_mixed_devices():
    values = {k: torch.ones(s, device="cuda", dtype=torch.bfloat16) for k, s in GOOD.items()}
    values["w_down"] = values["w_down"].cpu()
    with pytest.raises(ValueError, match="w_down is on cpu, expected cuda:0"):
        coda.fused_mlp_forward(values.pop("x"), values.pop("w_gate_up"), values.pop("w_down"), **values)


@pytest.mark.gpu
def test_strict_mode_refuses_eager(monkeypatch):
    monkeypatch.setenv("CODA_STRICT", "1")
    x, w, w_down, g, _ = mlp_inputs(4, 8, 8, torch.float32, "cuda")
    with pytest.raises(RuntimeError, match="CODA_STRICT=1"):
        coda.fused_mlp_forward(x, w, w_down, norm_weight=g)
    call(mlp_inputs(4, 8, 8, torch.bfloat16, "cuda"))


@pytest.mark.gpu
def test_cuda_graph_and_side_stream():
    torch.manual_seed(0)
    inputs = mlp_inputs(200, 128, 256, torch.bfloat16, "cuda")
    expected = call(inputs)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch.equal(call(inputs), expected)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(inputs)
    inputs[0].copy_(torch.randn_like(inputs[0]))
    graph.replay()
    assert torch.equal(out, call(inputs))
