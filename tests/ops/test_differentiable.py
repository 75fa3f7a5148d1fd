"""What every differentiable function promises, asked of all of them (cases.py)."""
import itertools

import pytest
import torch

import coda
from tests.ops.cases import CASES, KINDS, SIXTEEN, as_tuple, compare, kernels_of_this_gpu, leaves, results, sixteen_on_cuda, subsets, views
from tests.reference import error

# The deferred norm stores rstd dy in the dtype, which eager does not; where eager has but two other roundings on the way to a gradient, that
# makes sqrt(3/2) of its error.
ROUNDINGS = 1.25


@pytest.mark.parametrize("dtype", [*SIXTEEN, torch.float32], ids=str)
@pytest.mark.parametrize("m, d, n", [(34, 40, 72), (1, 64, 128)])
@pytest.mark.parametrize("name", CASES)
def test_against_float64(device, name, m, d, n, dtype, poisoned_memory):
    back_ends = compare(CASES[name], CASES[name].tensors(m, d, n, dtype, device), ROUNDINGS if m > 1 else 2)
    expected = "cpu" if device == "cpu" else kernels_of_this_gpu() if dtype in SIXTEEN else "eager:"
    assert all(b.startswith(expected) for b in back_ends), back_ends


@pytest.mark.parametrize("name", KINDS)
def test_odd_widths(device, name):
    """No multiple of 8 anywhere: padded, never refused."""
    forward, _ = compare(CASES[name], CASES[name].tensors(37, 7, 13, torch.bfloat16, device), factor=2)
    assert not forward.startswith("eager:")


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].shapes(1, 1, 1).get("w_qkv", (0,))[0] < 100])
def test_gradcheck_every_subset(name):
    torch.manual_seed(0)
    case = CASES[name]
    tensors = case.tensors(2, 3, 2, torch.float64, "cpu")
    for wanted in subsets(tensors):
        values = leaves(tensors, wanted=wanted)
        differentiable = [i for i, o in enumerate(as_tuple(case.function(**values))) if o.requires_grad]
        if not wanted:
            assert not differentiable
            continue

        def function(*t):
            outputs = as_tuple(case.function(**(values | dict(zip(wanted, t)))))
            return tuple(outputs[i] for i in differentiable)

        # Element by element once; of the other subsets, random directions.
        assert torch.autograd.gradcheck(function, [values[k] for k in wanted], fast_mode=len(wanted) < len(tensors)), wanted


@pytest.mark.parametrize("left_out", ["norm_weight", "norm_bias", "bias", "b_down", "residual", "given"])
@pytest.mark.parametrize("name", KINDS)
def test_without_an_optional_tensor(device, name, left_out):
    case = CASES[name]
    tensors = case.tensors(34, 40, 72, sixteen_on_cuda(device), device)
    needed = {"linear_residual": "residual", "mlp-plain-layer-residual-is-x": "norm_weight"}.get(name)
    if left_out not in tensors or name.endswith("chain") or left_out == needed:
        pytest.skip("not optional here")
    tensors.pop(left_out)
    compare(case, tensors, ROUNDINGS)


@pytest.mark.parametrize("name", [n for n in KINDS if "norm_weight" in CASES[n].shapes(1, 1, 1)])
def test_float32_norm_weight(device, name):
    case = CASES[name]
    tensors = case.tensors(34, 40, 72, torch.bfloat16, device)
    for key in {"norm_weight", "norm_bias"} & set(tensors):
        tensors[key] = tensors[key].float() + 2.0**-12  # no bf16 number
    compare(case, tensors, ROUNDINGS)


@pytest.mark.parametrize("name", CASES)
def test_no_tokens(device, name):
    case = CASES[name]
    tensors = leaves(case.tensors(0, 16, 24, sixteen_on_cuda(device), device))
    outputs, _, gradients = results(case.function, tensors)
    assert [o.shape for o in outputs] == [o.shape for o in as_tuple(case.reference(**tensors))]
    assert all(g.shape == tensors[k].shape and not g.any() for k, g in gradients.items())


@pytest.mark.parametrize("name", KINDS)
def test_any_strides(device, name):
    """Arguments and incoming gradients may lie in memory in any way."""
    case = CASES[name]
    dtype = sixteen_on_cuda(device, torch.float64)
    tensors = case.tensors(6, 16, 24, dtype, device)
    outputs, gradients, expected = results(case.function, leaves(tensors))

    def check(what, values, incoming):
        got = results(case.function, values, incoming)
        loose = dict(rtol=2e-2, atol=2e-2) if device == "cuda" else {}
        for a, b in zip((*got[0], *got[2].values()), (*outputs, *expected.values())):
            torch.testing.assert_close(a, b, msg=lambda m: f"{what}: {m}", **loose)

    for changed in tensors:
        for what, view in views(tensors[changed]):
            check(f"{changed}: {what}", {k: t.detach().requires_grad_() for k, t in (tensors | {changed: view}).items()}, gradients)
    for i in range(len(gradients)):
        for what, view in views(gradients[i]):
            check(f"gradient {i}: {what}", leaves(tensors), [*gradients[:i], view, *gradients[i + 1 :]])


@pytest.mark.parametrize("name", KINDS)
def test_expanded_gradient(device, name):
    """`.sum().backward()` sends a gradient of stride 0."""
    case = CASES[name]
    tensors = case.tensors(6, 16, 24, sixteen_on_cuda(device), device)
    ones = [torch.ones_like(o) for o in as_tuple(case.function(**tensors))]
    _, _, dense = results(case.function, leaves(tensors), ones)
    _, _, expanded = results(case.function, leaves(tensors), [torch.ones((), dtype=o.dtype, device=device).expand(o.shape) for o in ones])
    assert all(torch.equal(dense[k], expanded[k]) for k in dense)


@pytest.mark.parametrize("name", KINDS)
def test_leading_dimensions(device, name):
    case = CASES[name]
    tensors = case.tensors(6, 16, 24, sixteen_on_cuda(device), device)
    flat, gradients, expected = results(case.function, leaves(tensors))
    if name.startswith("rope") or flat[0].shape[0] == 1:
        pytest.skip("takes [B, T, D]" if name.startswith("rope") else "a scalar")
    split = {k: t.view(2, 3, -1) if t.shape[0] == 6 else t for k, t in tensors.items()}
    outputs, _, got = results(case.function, leaves(split), [g.view(2, 3, *g.shape[1:]) for g in gradients])
    assert all(a.shape[:2] == (2, 3) and torch.equal(a.flatten(0, 1), b) for a, b in zip(outputs, flat))
    assert all(torch.equal(got[k].view(expected[k].shape), expected[k]) for k in got)
    one = {k: t[0] if t.shape[0] == 6 else t for k, t in tensors.items()}
    assert all(o.shape == f.shape[1:] for o, f in zip(results(case.function, leaves(one))[0], flat))


@pytest.mark.parametrize("name", KINDS)
def test_some_outputs_unused(device, name):
    case = CASES[name]
    dtype = sixteen_on_cuda(device, torch.float64)
    tensors = case.tensors(6, 16, 24, dtype, device)
    count = len(as_tuple(case.function(**tensors)))
    for used in subsets(range(count))[1:]:
        pair = []
        for function, kind in ((case.function, dtype), (case.reference, torch.float64)):
            values = leaves(tensors, kind)
            outputs = as_tuple(function(**values))
            loss = sum((outputs[i].double() * torch.linspace(-1, 1, outputs[i].numel(), device=device).view(outputs[i].shape)).sum() for i in used)
            pair.append(torch.autograd.grad(loss, list(values.values()), allow_unused=True))
        for key, a, b in zip(tensors, *pair):
            a, b = (torch.zeros_like(tensors[key]).double() if g is None else g.double() for g in (a, b))
            assert (a - b).norm() <= (2e-2 if device == "cuda" else 1e-12) * b.norm(), (used, key)


@pytest.mark.parametrize("name", KINDS)
def test_second_backward_of_a_retained_graph(device, name):
    case = CASES[name]
    values = leaves(case.tensors(6, 16, 24, sixteen_on_cuda(device), device))
    outputs = as_tuple(case.function(**values))
    gradients = [torch.randn_like(o) for o in outputs]
    first, second = (torch.autograd.grad(outputs, list(values.values()), gradients, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("loss", [lambda o: o.square().sum(), lambda o: o.sum()], ids=["square", "sum"])
@pytest.mark.parametrize("name", KINDS)
def test_second_derivative_is_right_or_an_error(name, loss):
    """A term that is missing from a sum of first and second derivatives would show nowhere else."""
    torch.manual_seed(0)
    case = CASES[name]
    tensors = case.tensors(4, 8, 8, torch.float64, "cpu")

    def sums(function, of, by):
        values = leaves(tensors)
        (first,) = torch.autograd.grad(sum(map(loss, as_tuple(function(**values)))), values[of], create_graph=True)
        return torch.autograd.grad(first.square().sum() + values[by].sum(), values[by])[0]

    silent, raised = [], 0
    for of, by in itertools.product(tensors, tensors):
        try:
            found = sums(case.function, of, by)
        except (NotImplementedError, RuntimeError) as e:
            assert "second derivative" in str(e) or "differentiate twice" in str(e)
            raised += 1
        else:
            if error(found, sums(case.reference, of, by)) > 1e-6:
                silent.append((of, by))
    assert raised and not silent, f"wrong second derivatives (of the gradient of, by): {silent}"


@pytest.mark.parametrize("name", KINDS)
def test_same_values_whether_or_not_grad_is_needed(device, name):
    case = CASES[name]
    tensors = case.tensors(34, 40, 72, torch.bfloat16, device)
    expected = results(case.function, leaves(tensors))[0]
    for wanted in subsets(tensors):
        outputs = as_tuple(case.function(**leaves(tensors, wanted=wanted)))
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected)), wanted
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs = as_tuple(case.function(**leaves(tensors)))
            assert all(torch.equal(a, b) for a, b in zip(outputs, expected)) and not outputs[-1].requires_grad, mode
    values = leaves(tensors)
    checkpointed = torch.utils.checkpoint.checkpoint(lambda *t: case.function(**dict(zip(values, t))), *values.values(), use_reentrant=False)
    gradients = results(lambda **_: checkpointed, values)[2]
    again = results(case.function, leaves(tensors))[2]
    assert all(torch.equal(gradients[k], again[k]) for k in again)


@pytest.mark.parametrize("name", KINDS)
def test_bitwise_repeatable(device, name, poisoned_memory):
    case = CASES[name]
    tensors = case.tensors(130, 72, 136, torch.bfloat16, device)
    first = results(case.function, leaves(tensors))
    for _ in range(20 if device == "cuda" else 3):
        again = results(case.function, leaves(tensors))
        assert all(torch.equal(a, b) for a, b in zip((*first[0], *first[2].values()), (*again[0], *again[2].values())))


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_autocast(device, name, dtype):
    """An fp32 residual stream stays fp32, and so do a loss and its statistics; all else is in autocast's dtype. Gradients are those of the fp32
    leaves."""
    case = CASES[name]
    tensors = case.tensors(34, 40, 72, torch.float32, device)
    values = leaves(tensors)
    with torch.autocast(device, dtype):
        outputs = as_tuple(case.function(**values))
    has_stream = any(k in tensors for k in ("residual", "given")) or name.endswith("residual-is-x")
    is_loss = name.startswith("cross_entropy")
    assert outputs[0].dtype == (torch.float32 if has_stream or is_loss or len(outputs) > 1 else dtype)
    assert all(o.dtype == (torch.float32 if is_loss and o.dim() == 1 else dtype) for o in outputs[1:])
    _, gradients, got = results(lambda **_: outputs, values)
    wide, _, expected = results(case.reference, leaves(tensors, torch.float64), gradients)
    limit = 2e-2 if dtype == torch.bfloat16 else 3e-3
    assert all(error(o.detach(), e) < limit for o, e in zip(outputs, wide))
    assert all(g.dtype == torch.float32 and error(g, expected[k]) < 2 * limit for k, g in got.items())


@pytest.mark.parametrize(
    "name",
    [
        "rope",
        "rope-layer",
        "rope-qk-norm",
        "norm_linear-swiglu-pair",
        "norm_linear-layer-swiglu",
        "mlp-plain-gelu_tanh",
        "mlp-plain-layer-residual-is-x",
        "chain",
        "layer-chain",
        "plain-chain",
        "cross_entropy",
        "cross_entropy-mean",
        "cross_entropy-kept",
        "cross_entropy-none-kept",
        "cross_entropy-lse",
    ],
)
def test_compile_fullgraph(device, name):
    case = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(case.function, fullgraph=True, backend="aot_eager")
    tensors = case.tensors(6, 16, 24, sixteen_on_cuda(device), device)
    expected, gradients, wanted = results(case.function, leaves(tensors))
    outputs, _, got = results(compiled, leaves(tensors), gradients)
    # On a GPU the library may take another kernel for operands that lie elsewhere.
    same = torch.equal if device == "cpu" else lambda a, b: error(a, b.double()) < 2.0**-8
    assert all(same(a, b) for a, b in zip(outputs, expected)) and all(same(got[k], wanted[k]) for k in wanted)
    with torch.no_grad():
        assert all(same(a, b) for a, b in zip(as_tuple(compiled(**tensors)), expected))


@pytest.mark.parametrize("name", [n for n in KINDS if n.startswith(("norm_linear", "rope"))])
def test_x_that_wants_no_gradient_stays_so(name):
    tensors = CASES[name].tensors(4, 8, 8, torch.float32, "cpu")
    x, *others = CASES[name].function(**leaves(tensors, wanted=[k for k in tensors if k != "x"]))
    assert all(o.requires_grad for o in others) and not x.requires_grad


@pytest.mark.parametrize("name", KINDS)
def test_main_grad(device, name):
    """A weight with a float32 main_grad has its gradient added there."""
    case = CASES[name]
    tensors = case.tensors(34, 40, 72, torch.bfloat16, device)
    weights = [k for k in tensors if k.startswith("w")]
    _, gradients, exact = results(case.reference, leaves(tensors, torch.float64))
    plain = results(case.function, leaves(tensors), gradients)[2]
    values = leaves(tensors)
    for k in weights:
        values[k].main_grad = torch.ones_like(values[k], dtype=torch.float32)
    outputs = as_tuple(case.function(**values))
    torch.autograd.backward(outputs, [g.to(o.dtype) for g, o in zip(gradients, outputs)])
    for k, t in values.items():
        if k in weights:
            assert t.grad is None and error(t.main_grad - 1, exact[k]) < max(error(plain[k], exact[k]), 1e-5)
        else:
            assert torch.equal(t.grad, plain[k])
