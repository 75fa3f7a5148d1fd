import itertools

import pytest
import torch
import torch.nn.functional as F

import coda
from tests.reference import assert_no_worse, flat, leaf_copy, map_tensors, mlp, mlp_inputs

SIXTEEN = (torch.bfloat16, torch.float16)
CPU_ONLY = (torch.float32, torch.float64)


def call(inputs, **options):
    x, w_gate_up, w_down, norm_weight, residual = inputs
    return coda.fused_mlp_forward(x, w_gate_up, w_down, norm_weight=norm_weight, residual=residual, **options)


def compare(inputs, factor=1.0):
    """Output and every gradient against float64, with the eager sequence as the yardstick. Returns (forward, backward) back ends."""
    ours, eager, exact = leaf_copy(inputs), leaf_copy(inputs), leaf_copy(inputs, torch.float64)
    before = [t.detach().clone() for t in flat(ours)]
    out = call(ours)
    forward = coda.backend_of_last_call()
    grad = torch.randn_like(out)
    grad_before = grad.clone()
    out.backward(grad)
    backward = coda.backend_of_last_call()
    eager_out, exact_out = mlp(*eager), mlp(*exact)
    eager_out.backward(grad)
    exact_out.backward(grad.double())
    assert out.dtype == inputs[0].dtype
    assert_no_worse("output", out, eager_out, exact_out, factor)
    for i, (a, b, c) in enumerate(zip(flat(ours), flat(eager), flat(exact))):
        assert a.grad.dtype == a.dtype
        assert_no_worse(f"gradient of argument {i}", a.grad, b.grad, c.grad, factor)
    assert all(torch.equal(a.detach(), b) for a, b in zip(flat(ours), before)) and torch.equal(grad, grad_before), "an input was changed"
    return forward, backward


@pytest.mark.parametrize("dtype", SIXTEEN + CPU_ONLY, ids=str)
@pytest.mark.parametrize("m, d, f", [(33, 40, 72), (1, 64, 128), (127, 136, 264)])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("norm, residual", [(True, True), (False, False), (True, False), (False, True)])
def test_against_float64(device, dtype, m, d, f, pair, norm, residual):
    forward, backward = compare(mlp_inputs(m, d, f, dtype, device, norm=norm, residual=residual, pair=pair))
    if device == "cpu":
        assert forward == backward == "cpu"
    elif dtype in SIXTEEN:
        assert forward.startswith("sm90:") and "rstd_swiglu_preactivation" in forward and "dswiglu" in backward
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
    inputs = leaf_copy(mlp_inputs(m, d, f, torch.float32 if device == "cpu" else torch.bfloat16, device))
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
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, w, w_down, g, _ = mlp_inputs(1, 16, 24, dtype, device)
    x = torch.randn(*lead, 16, device=device, dtype=dtype)
    out = coda.fused_mlp_forward(x, w, w_down, norm_weight=g, residual=x)
    assert out.shape == x.shape and out.is_contiguous()
    rows = x.reshape(-1, 16)
    assert torch.equal(out.reshape(-1, 16), coda.fused_mlp_forward(rows, w, w_down, norm_weight=g, residual=rows))


def _views(t):
    """The same values in other memory: (what, view)."""
    m, n = t.shape
    wide = t.new_zeros(m, 3 * n + 8)
    wide[:, 8 : 8 + n] = t
    yield "columns of a wider tensor", wide[:, 8 : 8 + n]
    odd = t.new_zeros(m * n + 1)
    odd[1:] = t.reshape(-1)
    yield "odd storage offset", odd[1:].view(m, n)
    yield "transposed", t.t().contiguous().t()
    yield "every second column", torch.stack((t, t), -1).reshape(m, 2 * n)[:, ::2]
    short = t.new_zeros(m, n + 1)
    short[:, :n] = t
    yield "odd row stride", short[:, :n]


@pytest.mark.parametrize("which", range(5), ids=["x", "w_gate_up", "w_down", "residual", "grad"])
def test_strided_views(device, which):
    dtype = torch.bfloat16
    inputs = list(mlp_inputs(24, 40, 48, dtype, device))
    grad = torch.randn(24, 40, device=device, dtype=dtype)
    position = [0, 1, 2, 4, None][which]

    def run(values, g):
        leaves = [None if v is None else v.detach().requires_grad_() for v in values]
        out = call(leaves)
        out.backward(g)
        return [out.detach()] + [t.grad for t in leaves if t is not None]

    expected = run(inputs, grad)
    for what, view in _views(grad if position is None else inputs[position]):
        values = list(inputs)
        if position is not None:
            values[position] = view
        got = run(values, view if position is None else grad)
        for a, b in zip(got, expected):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2, msg=lambda m: f"{what}: {m}")


def test_expanded_gradient_and_vectors(device):
    """`.sum().backward()` sends a stride-0 gradient; an expanded norm weight has stride 0 too."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = leaf_copy(mlp_inputs(9, 16, 24, dtype, device))
    call(inputs).sum().backward()
    again = leaf_copy(inputs)
    call(again).backward(torch.ones(9, 16, device=device, dtype=dtype))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(flat(inputs), flat(again)))
    one = torch.full((1,), 1.5, device=device, dtype=dtype)
    a = coda.fused_mlp_forward(*inputs[:3], norm_weight=one.expand(16))
    assert torch.equal(a, coda.fused_mlp_forward(*inputs[:3], norm_weight=one.repeat(16)))


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=5)), ids=lambda w: "".join("01"[b] for b in w))
@pytest.mark.parametrize("pair", [False, True])
def test_gradcheck_every_subset(wanted, pair):
    torch.manual_seed(0)
    inputs = mlp_inputs(3, 4, 5, torch.float64, "cpu", pair=pair)
    names = ["x", "w_gate_up", "w_down", "norm_weight", "residual"]
    tensors = [
        tuple(t.requires_grad_(w) for t in v) if isinstance(v, tuple) else v.requires_grad_(w) for v, w in zip(inputs, wanted)
    ]
    out = call(tensors)
    assert out.requires_grad == any(wanted)
    if not any(wanted):
        return
    grads = torch.autograd.grad(out.sum(), flat([t for t, w in zip(tensors, wanted) if w]))
    assert all(g is not None for g in grads), names
    leaves = flat([t for t, w in zip(tensors, wanted) if w])

    def f(*_):
        return call(tensors)

    assert torch.autograd.gradcheck(f, leaves)


def test_one_of_a_pair_frozen():
    torch.manual_seed(0)
    x, (gate, up), w_down, g, _ = mlp_inputs(3, 4, 5, torch.float64, "cpu", pair=True)
    up.requires_grad_()
    assert torch.autograd.gradcheck(lambda u: coda.fused_mlp_forward(x, (gate, u), w_down, norm_weight=g), (up,))


def test_same_parameter_as_gate_and_up(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
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


def test_bitwise_repeatable(device, poisoned_memory):
    dtype = torch.bfloat16
    inputs = leaf_copy(mlp_inputs(300, 264, 520, dtype, device))
    grad = torch.randn(300, 264, device=device, dtype=dtype)
    first = None
    for _ in range(20):
        out = call(inputs)
        result = [out.detach(), *torch.autograd.grad(out, flat(inputs), grad)]
        first = first or result
        assert all(torch.equal(a, b) for a, b in zip(result, first))


def test_same_value_with_and_without_grad(device):
    dtype = torch.bfloat16
    inputs = leaf_copy(mlp_inputs(40, 64, 96, dtype, device))
    with_grad = call(inputs).detach()
    with torch.no_grad():
        assert torch.equal(call(inputs), with_grad)
    with torch.inference_mode():
        assert torch.equal(call(inputs), with_grad)
    checkpointed = torch.utils.checkpoint.checkpoint(lambda *t: call(t), *inputs, use_reentrant=False)
    assert torch.equal(checkpointed, with_grad)
    checkpointed.sum().backward()
    grads = [t.grad for t in flat(inputs)]
    again = leaf_copy(inputs)
    call(again).sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(grads, flat(again)))


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
    assert sizes.count((m, 2 * f)) == 1 and sizes.count((m, d)) == 2 and sizes.count((m,)) == 1  # pre-activation; x and h; rstd
    with torch.no_grad():
        assert _saved(lambda: call(leaves)) == []
    x.requires_grad_(False), g.requires_grad_(False), w.requires_grad_(False)
    assert (m, d) not in _saved(lambda: call(leaves)), "neither x nor h is needed for the gradient of w_down"
    w_down.requires_grad_(False)
    assert _saved(lambda: call(leaves)) == [], "only the residual wants a gradient"


def test_large_gates_stay_finite(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, w, w_down, _, _ = leaf_copy(mlp_inputs(16, 16, 32, dtype, device, norm=False, residual=False, scale=4000.0))
    out = coda.fused_mlp_forward(x, w, w_down)
    out.sum().backward()
    assert all(t.isfinite().all() for t in (out, x.grad, w.grad, w_down.grad))


def test_nan_stays_in_its_row(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, w, w_down, g, _ = mlp_inputs(40, 64, 96, dtype, device)
    clean = coda.fused_mlp_forward(x, w, w_down, norm_weight=g)
    x[17, 3] = float("nan")
    out = coda.fused_mlp_forward(x, w, w_down, norm_weight=g)
    assert out[17].isnan().all()
    others = [i for i in range(40) if i != 17]
    assert torch.equal(out[others], clean[others])


def test_constant_weights_cannot_hide_the_order(device):
    """Rows of gate and up carry their own index, so that a permutation of features or of [gate; up] shows."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    f = 64
    x = torch.ones(2, 8, device=device, dtype=dtype)
    w = torch.zeros(2 * f, 8, device=device, dtype=dtype)
    w[:f, 0] = torch.arange(f, device=device, dtype=dtype) / 16
    w[f:, 0] = torch.arange(f, device=device, dtype=dtype).flip(0) / 8
    out = coda.fused_mlp_forward(x, w, torch.eye(f, device=device, dtype=dtype)[:, :])
    gate, up = w[:f, 0].double(), w[f:, 0].double()
    torch.testing.assert_close(out[0].double(), F.silu(gate) * up, rtol=1e-2 if device == "cuda" else 1e-6, atol=1e-6)


def test_fp32_norm_weight(device):
    x, w, w_down, _, r = mlp_inputs(24, 40, 48, torch.bfloat16, device)
    g = (1 + torch.rand(40, device=device)).requires_grad_()
    out = coda.fused_mlp_forward(x, w, w_down, norm_weight=g, residual=r)
    assert not coda.backend_of_last_call().startswith("eager")
    out.sum().backward()
    exact_g = g.detach().double().requires_grad_()
    exact = mlp(*(t.double() for t in (x, w, w_down)), exact_g, r.double())
    exact.sum().backward()
    assert g.grad.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=5e-2)
    assert (g.grad.double() - exact_g.grad).norm() < 2e-2 * exact_g.grad.norm()


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_autocast(device, dtype):
    inputs = leaf_copy(mlp_inputs(24, 40, 48, torch.float32, device))
    with torch.autocast(device, dtype):
        out = call(inputs)
        without = call((*inputs[:4], None))
        narrow = map_tensors(lambda t: t.detach().to(dtype), inputs[:4])
        expected = mlp(*narrow) + inputs[4].detach()
    assert without.dtype == dtype and out.dtype == torch.float32, "an fp32 residual stream stays fp32"
    assert torch.equal(out, without + inputs[4])
    torch.testing.assert_close(out.float(), expected.float(), rtol=5e-2, atol=5e-2)
    out.float().sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in flat(inputs))


@pytest.mark.parametrize("pair", [False, True])
def test_opcheck(device, pair):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, w, w_down, g, r = leaf_copy(mlp_inputs(8, 16, 24, dtype, device, pair=pair))
    gate, up = w if pair else (w, None)
    ops = torch.ops.coda
    torch.library.opcheck(ops.fused_mlp.default, (x, gate, up, w_down, g, r, 1e-6, True))
    torch.library.opcheck(ops.fused_mlp.default, (x, gate, up, w_down, None, None, 1e-6, True))
    with torch.no_grad():
        _, h, rstd, z = ops.fused_mlp(x, gate, up, w_down, g, r, 1e-6, True)
        plain = [t.detach() if t is not None else None for t in (x, h, rstd, z, gate, up, w_down, g)]
    raw = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    dout = torch.randn_like(plain[0])
    torch.library.opcheck(ops.fused_mlp_backward.default, (dout, *plain, [True, True, True, True]), test_utils=raw)
    torch.library.opcheck(ops.fused_mlp_backward.default, (dout, *plain, [False, True, False, False]), test_utils=raw)
    torch.library.opcheck(ops.rstd_swiglu.default, (plain[1], plain[2], plain[4], plain[5], True), test_utils=raw)
    torch.library.opcheck(ops.rstd_swiglu.default, (plain[1], None, plain[4], plain[5], False), test_utils=raw)
    torch.library.opcheck(ops.dswiglu.default, (dout, plain[6], plain[3], plain[2]), test_utils=raw)


def test_compile_fullgraph(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: call(t), fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (8, 12, 20):
        inputs = leaf_copy(mlp_inputs(m, 16, 24, dtype, device))
        again = leaf_copy(inputs)
        a, b = compiled(*inputs), call(again)
        assert torch.equal(a, b)
        a.sum().backward(), b.sum().backward()
        assert all(torch.equal(s.grad, t.grad) for s, t in zip(flat(inputs), flat(again)))


def test_second_derivative_is_an_error(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    x, w, w_down, g, _ = leaf_copy(mlp_inputs(4, 8, 8, dtype, device))
    (dx,) = torch.autograd.grad(coda.fused_mlp_forward(x, w, w_down, norm_weight=g).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        dx.sum().backward()


GOOD = dict(x=(4, 8), w_gate_up=(12, 8), w_down=(8, 6), norm_weight=(8,), residual=(4, 8))


@pytest.mark.parametrize(
    "name, bad, error, words",
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
        ("activation", "tanh", ValueError, "activation is 'tanh', expected 'silu'"),
    ],
)
def test_bad_arguments(name, bad, error, words):
    values = {k: torch.ones(s) for k, s in GOOD.items()} | {name: bad}
    with pytest.raises(error) as e:
        coda.fused_mlp_forward(values.pop("x"), values.pop("w_gate_up"), values.pop("w_down"), **values)
    message = str(e.value)
    assert words in message and "\n" not in message.strip(), message


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
