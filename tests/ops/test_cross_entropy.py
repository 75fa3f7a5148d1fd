"""coda.linear_cross_entropy and coda.linear_log_prob: what they promise beyond every differentiable function (test_differentiable.py)."""
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import coda
from coda.ops import cross_entropy as module
from coda.ops.cross_entropy import CHUNK_BYTES, chunk_rows
from tests.ops.cases import Case, compare, cross_entropy, leaves, new, norm, raises, results, sixteen_on_cuda, targets
from tests.reference import assert_no_worse, error

OPTIONS = {
    "plain": {},
    "smoothing": dict(label_smoothing=0.1),
    "z": dict(z_loss=1e-2),
    "softcap": dict(softcap=3.0),
    "all": dict(label_smoothing=0.1, z_loss=1e-2, softcap=3.0),
}


def inputs(m, d, v, dtype, device, **also):
    """x, weight, and of bias and norm_weight those that are True in `also`."""
    t = dict(x=new(m, d, dtype=dtype, device=device), weight=new(v, d, dtype=dtype, device=device, scale=3 * max(d, 1) ** -0.5))
    if also.get("bias"):
        t["bias"] = new(v, dtype=dtype, device=device)
    if also.get("norm_weight"):
        t["norm_weight"] = 1 + new(d, dtype=dtype, device=device, scale=0.2)
    return t


def case(m, v, rows=None, **options):
    """The loss of each token, in chunks of `rows`."""

    def function(x, weight, bias=None, norm_weight=None):
        chunk = {} if rows is None else dict(chunk_bytes=rows * v * x.element_size())
        target = targets(x, v)
        return coda.linear_cross_entropy(x, weight, target, bias=bias, norm_weight=norm_weight, reduction="none", **chunk, **options)

    def reference(x, weight, bias=None, norm_weight=None):
        logits = F.linear(x if norm_weight is None else norm(x, norm_weight), weight, bias)
        return cross_entropy(logits, targets(x, v), reduction="none", **options)

    return Case(function, reference, None)


def gradients_of(tensors, target, upstream=1.0, **options):
    """(loss, the gradient of each tensor) with the upstream gradient `upstream`."""
    values = leaves(tensors)
    loss = coda.linear_cross_entropy(**values, target=target, **options)
    return loss.detach(), dict(zip(values, torch.autograd.grad(loss, list(values.values()), torch.full_like(loss, upstream))))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("v", [5, 70, 1000, 32000])
def test_against_float64(device, v, dtype, options):
    """Never worse than eager with logits in float32, for any number of rows in a chunk."""
    m = 40 if v < 32000 else 12
    tensors = inputs(m, 24, v, dtype, device, bias=v == 70, norm_weight=v == 1000)
    for rows in (7, m):
        compare(case(m, v, rows, **OPTIONS[options]), tensors, 1.25 if v == 1000 else 1.1)  # the norm: test_differentiable.py


@pytest.mark.parametrize("v", [65537, 128256, 152064, 262144])
def test_large_vocabularies(device, v):
    tensors = inputs(12, 8, v, torch.bfloat16, device)
    compare(case(12, v, 5), tensors, 1.1)
    last = torch.arange(v - 12, v, device=device)
    loss, found = gradients_of(tensors, last)
    torch.testing.assert_close(loss, F.cross_entropy(tensors["x"].float() @ tensors["weight"].float().t(), last))
    assert found["weight"][-12:].any(1).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("v, norm_weight, options", [(70, False, "plain"), (1000, False, "plain"), *[(70, True, name) for name in OPTIONS]])
def test_gradients_formed_in_the_forward(device, reduction, dtype, v, norm_weight, options):
    tensors = inputs(60, 24, v, dtype, device, bias=True, norm_weight=norm_weight)
    target = targets(tensors["x"], v)

    def reference(x, weight, bias, norm_weight=None):
        logits = F.linear(x if norm_weight is None else norm(x, norm_weight), weight, bias)
        return cross_entropy(logits, target, reduction=reduction, **OPTIONS[options])

    ones = [torch.ones((), device=device)]
    _, _, eager = results(reference, leaves(tensors), ones)
    (loss,), _, exact = results(reference, leaves(tensors, torch.float64), ones)
    for rows in (1, 7, 60):
        chunk_bytes = rows * v * tensors["x"].element_size()
        ours, found = gradients_of(tensors, target, reduction=reduction, chunk_bytes=chunk_bytes, **OPTIONS[options])
        assert ours.dtype == torch.float32 and abs(ours.item() / loss.item() - 1) < (1e-5 if dtype == torch.float32 else 2e-3)
        for name in tensors:
            assert_no_worse(f"gradient of {name}, {rows} rows", found[name], eager[name], exact[name], 1.25 if norm_weight else 1.1)


def with_float32_logits(x, weight, target, scale):
    """(loss of each row, gradients of its sum times scale) of torch operations on logits in float32 from 16-bit operands. The gradient of the logits is
    rounded for its products, as it must be for operands in 16 bits."""
    logits = (x.float() @ weight.float().t()).requires_grad_()
    loss = F.cross_entropy(logits, target, reduction="none")
    dz = torch.autograd.grad(loss.sum() * scale, logits)[0].to(x.dtype).float()
    return loss.detach(), dict(x=(dz @ weight.float()).to(x.dtype), weight=(dz.t() @ x.float()).to(x.dtype))


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("v, deviation", [(5, 3.0), (70, 3.0), (1000, 10.0), (4100, 1.0)])
def test_against_logits_in_float32(device, v, deviation, dtype, reduction):
    """Whatever a chunk hands on in 16 bits instead of its logits must cost no more than rounding the gradient does."""
    tensors = dict(x=new(160, 64, dtype=dtype, device=device), weight=new(v, 64, dtype=dtype, device=device, scale=deviation / 8))
    target = torch.arange(160, device=device) * 7 % v
    values = leaves(tensors, torch.float64)
    exact_loss = F.cross_entropy(values["x"] @ values["weight"].t(), target, reduction="none")
    exact = dict(zip(values, torch.autograd.grad(exact_loss.sum(), list(values.values()))))
    loss, eager = with_float32_logits(**tensors, target=target, scale=1.0)
    for rows in (50, 160):
        _, found = gradients_of(tensors, target, reduction=reduction, chunk_bytes=rows * v * 2)
        for k in tensors:
            # On a GPU torch's library may round the parts of a product that it splits along K: sqrt(2) of the error of one rounding.
            assert_no_worse(f"gradient of {k}, {rows} rows", found[k], eager[k], exact[k], *([1.5] if device != "cpu" else []))
    ours = coda.linear_cross_entropy(**tensors, target=target, reduction="none")
    assert_no_worse("loss", ours, loss, exact_loss.detach())


@pytest.mark.parametrize("upstream", [1.0, 0.3])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_second_backward_finds_what_the_first_found(device, chunked, upstream):
    """Gradients that the forward formed are scaled in their own memory, unless another backward may come."""
    tensors = inputs(60, 24, 70, sixteen_on_cuda(device), device, bias=True, norm_weight=True)
    target, chunk_bytes = targets(tensors["x"], 70), 7 * 70 * 2 if chunked else None
    values = leaves(tensors)
    loss = coda.linear_cross_entropy(**values, target=target, chunk_bytes=chunk_bytes)
    backward = lambda **options: torch.autograd.grad(loss, list(values.values()), torch.full_like(loss, upstream), **options)
    kept = [g.clone() for g in backward(retain_graph=True)]
    again, last = backward(retain_graph=True), backward()
    for gradients in again, last:
        for a, b in zip(kept, gradients):
            assert torch.equal(a, b)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("v", [5, 70, 2056, 4103])
def test_gradient_of_kept_logits(device, v, dtype, softcap):
    """Of rows that begin anywhere, with a gradient that arrives at them, against float64."""
    m = 35
    logits, incoming = new(m, v + 3, dtype=dtype, device=device)[:, 3:], new(v, m, dtype=dtype, device=device).t()
    bias, rstd = new(v, dtype=dtype, device=device), torch.rand(m, device=device) + 0.5
    bias[1], logits[:, 1] = -math.inf, -math.inf
    incoming[:, 1] = 0
    target = torch.arange(m, device=device) * 7 % (v + 2) - 1  # -1 and v are no columns
    factors, wide = torch.randn(3, m, device=device), logits.double()
    z = wide if softcap == 0 else softcap * torch.tanh(wide / softcap)
    lse = torch.logsumexp(z, 1)
    chosen = torch.arange(v, device=device) == target.unsqueeze(1)
    by_softmax, by_all, by_target = (f.double().unsqueeze(1) for f in factors)
    g = (by_softmax * torch.exp(z - lse.unsqueeze(1)) - by_all - by_target * chosen) * (1 if softcap == 0 else 1 - (z / softcap) ** 2)
    column = torch.ones(v, dtype=torch.bool, device=device)
    column[1] = False  # by_all has no limit there
    for arriving, b in ((incoming, bias), (None, None)):
        total = g if arriving is None else g + arriving.double()
        y = wide if b is None else wide - b.double()
        dz, dot, dbias = torch.ops.coda.logit_gradient(logits, arriving, target, lse.float(), factors, rstd, b, softcap, True, b is not None)
        step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}[dtype]
        torch.testing.assert_close(dz[:, :v][:, column].double(), (rstd.double().unsqueeze(1) * total)[:, column], rtol=step, atol=1e-5)
        torch.testing.assert_close(dbias[column].double(), total.sum(0)[column], rtol=1e-4, atol=1e-4)
        if b is not None:
            terms = (total * y)[:, column]
            torch.testing.assert_close(dot.double(), terms.sum(1), rtol=0, atol=1e-5 * terms.abs().sum(1).max().item())


@pytest.mark.parametrize("count", [1, 7, 1003, 2**20 + 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scaling(device, dtype, count):
    for given in new(count, dtype=dtype, device=device), new(count, dtype=torch.float32, device=device):
        for factor in 1.0, 0.3:
            factor = torch.tensor(factor, device=device)
            expected = (given.float() * factor).to(dtype)
            assert torch.equal(torch.ops.coda.scaled(given, factor, dtype), expected)
            if given.dtype == dtype:
                torch.ops.coda.scale_(given, factor)
                assert torch.equal(given, expected)
    with pytest.raises(ValueError, match=r"factor has dtype .*expected one number in"):
        torch.ops.coda.scaled(given, factor.to(torch.float64), dtype)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_column_is_left(device, reduction):
    """As in torch: lse is -inf, the loss NaN."""
    tensors = inputs(3, 8, 70, sixteen_on_cuda(device), device) | dict(bias=torch.full((70,), -math.inf, device=device).to(sixteen_on_cuda(device)))
    target = torch.tensor([0, 5, -100], device=device)
    loss, lse = coda.linear_cross_entropy(**tensors, target=target, reduction=reduction, return_lse=True)
    assert (lse == -math.inf).all() and loss.view(-1)[:2].isnan().all() and (reduction == "mean" or loss[2] == 0)


def test_label_out_of_range_on_a_gpu(device):
    if device == "cpu":
        pytest.skip("an IndexError there")
    tensors = inputs(3, 8, 70, torch.bfloat16, device)
    loss = coda.linear_cross_entropy(**tensors, target=torch.tensor([3, 70, -1], device=device), reduction="none")
    assert loss.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_same_as_torch(reduction, label_smoothing):
    tensors = leaves(inputs(12, 8, 70, torch.float64, "cpu", bias=True))
    target = targets(tensors["x"], 70)
    options = dict(reduction=reduction, label_smoothing=label_smoothing)
    expected = F.cross_entropy(F.linear(tensors["x"], tensors["weight"], tensors["bias"]), target, **options)
    found = coda.linear_cross_entropy(**tensors, target=target, **options)
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(loss.sum(), list(tensors.values())) for loss in (found, expected))):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS)
def test_chunks_do_not_matter(device, reduction, options):
    dtype = sixteen_on_cuda(device, torch.float64)
    tensors = inputs(23, 8, 70, dtype, device, bias=True, norm_weight=True)
    target = targets(tensors["x"], 70)
    runs = []
    for rows in (1, 7, 23):
        loss, gradients = gradients_of(tensors, target, reduction=reduction, chunk_bytes=rows * 70 * dtype.itemsize, **OPTIONS[options])
        runs.append((loss, *gradients.values()))
    loose = dict(rtol=2e-2, atol=2e-2) if device == "cuda" else dict(rtol=1e-12, atol=1e-12)
    for other in runs[1:]:
        for a, b in zip(runs[0], other):
            torch.testing.assert_close(a, b, **loose)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_weight_gradient_is_summed_in_float32(device, reduction):
    """Many tokens a class, in many chunks: rounding after each would show."""
    tensors = inputs(2048, 16, 32, torch.bfloat16, device)
    target = torch.arange(2048, device=device) % 32
    values = leaves(tensors, torch.float64)
    exact = torch.autograd.grad(F.cross_entropy(values["x"] @ values["weight"].t(), target), values["weight"])[0]
    values = leaves(tensors)
    eager = torch.autograd.grad(F.cross_entropy((values["x"] @ values["weight"].t()).float(), target), values["weight"])[0]
    upstream = 1.0 if reduction == "mean" else 2.0**-11
    _, found = gradients_of(tensors, target, upstream, reduction=reduction, chunk_bytes=4 * 32 * 2)
    assert_no_worse("gradient of weight", found["weight"], eager, exact, 1.1)
    values = leaves(tensors)
    values["weight"].main_grad = torch.zeros_like(values["weight"], dtype=torch.float32)
    loss = coda.linear_cross_entropy(**values, target=target, reduction=reduction, chunk_bytes=4 * 32 * 2)
    loss.backward(torch.full_like(loss, upstream))
    assert error(values["weight"].main_grad, exact) < error(found["weight"], exact)


def test_float16_gradients_do_not_underflow(device):
    """1 / count times a small probability is none of float16's numbers: the factor that autograd brings, a loss scale, comes in time."""
    tensors = inputs(2048, 16, 512, torch.float16, device)
    target = torch.arange(2048, device=device) % 512
    _, found = gradients_of(tensors, target, 2.0**16)
    values = leaves(tensors, torch.float64)
    exact = torch.autograd.grad(F.cross_entropy(values["x"] @ values["weight"].t(), target) * 2.0**16, list(values.values()))
    assert all(error(found[k], e) < 1e-3 for k, e in zip(values, exact))


def test_float16_gradients_do_not_overflow(device):
    """A sum over tokens that only their number makes small."""
    tensors = dict(x=torch.full((4096, 8), 40.0, device=device).half(), weight=torch.zeros(5, 8, device=device).half())
    for chunk_bytes in (2**20, 2**10):
        _, found = gradients_of(tensors, torch.zeros(4096, dtype=torch.int64, device=device), chunk_bytes=chunk_bytes)
        expected = torch.tensor([-32.0, 8, 8, 8, 8], device=device).half().unsqueeze(1).expand(5, 8)
        torch.testing.assert_close(found["weight"], expected)


# Ignored rows


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("reduction, expected", [("mean", math.nan), ("sum", 0.0), ("none", 0.0)])
@pytest.mark.parametrize("tokens", [3, 0])
def test_no_row_counts(device, reduction, expected, dtype, tokens, poisoned_memory):
    tensors = inputs(tokens, 8, 5, sixteen_on_cuda(device), device, bias=True, norm_weight=True)
    target = torch.full((tokens,), -100, dtype=dtype, device=device)
    for options in (dict(), OPTIONS["all"], dict(chunk_bytes=1)):
        loss, gradients = gradients_of(tensors, target, reduction=reduction, **options)
        assert loss.shape == ((tokens,) if reduction == "none" else ())
        torch.testing.assert_close(loss, torch.full_like(loss, expected), equal_nan=True)
        assert all(g.shape == tensors[k].shape and not g.any() for k, g in gradients.items())


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 4, 7])
def test_rows_that_do_not_count(device, ignore_index, poisoned_memory):
    tensors = inputs(6, 8, 5, sixteen_on_cuda(device, torch.float64), device)
    target = torch.tensor([1, ignore_index, 2, ignore_index, 3, ignore_index], device=device)
    loss, gradients = gradients_of(tensors, target, ignore_index=ignore_index)
    only, of_only = gradients_of(tensors | dict(x=tensors["x"][::2]), target[::2], ignore_index=ignore_index)
    torch.testing.assert_close(loss, only)
    torch.testing.assert_close(gradients["x"][::2], of_only["x"])
    torch.testing.assert_close(gradients["weight"], of_only["weight"])
    assert not gradients["x"][1::2].any()
    each = coda.linear_cross_entropy(**tensors, target=target, ignore_index=ignore_index, reduction="none", z_loss=0.1, label_smoothing=0.1)
    assert each.shape == (6,) and not each[1::2].any() and each[::2].all()


def test_infinite_logits_of_rows_that_do_not_count(device):
    """Nothing of an ignored row gets into a gradient of weight."""
    tensors = inputs(4, 8, 5, sixteen_on_cuda(device), device)
    target = torch.tensor([1, -100, 2, 3], device=device)
    expected = gradients_of(tensors, target)
    tensors["x"][1] = 1e4
    found = gradients_of(tensors, target)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1]["weight"], expected[1]["weight"])


# Values


def logits_as_inputs(rows, dtype, device):
    """x, weight whose product is `rows`, exactly."""
    logits = torch.tensor(rows, dtype=dtype, device=device)
    return dict(x=torch.eye(len(rows), dtype=dtype, device=device), weight=logits.t().contiguous())


def test_softcap(device):
    tensors = logits_as_inputs([[100.0, 0.0, -3.0]], torch.float32, device)
    capped = 5 * torch.tanh(torch.tensor([[100.0, 0.0, -3.0]]) / 5)
    for label in range(3):
        target = torch.tensor([label], device=device)
        found = coda.linear_cross_entropy(**tensors, target=target, softcap=5.0)
        torch.testing.assert_close(found.cpu(), F.cross_entropy(capped, target.cpu()))


@pytest.mark.parametrize("rows", [[[0.0, -60000.0]], [[3e4, -3e4]], [[-3e4, 3e4]]])
def test_wide_logits_in_float16(device, rows):
    tensors = logits_as_inputs(rows, torch.float16, device)
    for label in (0, 1):
        target = torch.tensor([label], device=device)
        loss, gradients = gradients_of(tensors, target)
        torch.testing.assert_close(loss.cpu(), F.cross_entropy(torch.tensor(rows), target.cpu()))
        assert all(g.isfinite().all() for g in gradients.values())


def test_z_loss_is_added_only_when_asked_for(device):
    tensors = inputs(6, 8, 5, torch.float32, device)
    target = torch.tensor([1, -100, 2, -100, 3, -100], device=device)
    plain, lse = coda.linear_cross_entropy(**tensors, target=target, return_lse=True)
    torch.testing.assert_close(plain, F.cross_entropy(tensors["x"] @ tensors["weight"].t(), target))
    with_z = coda.linear_cross_entropy(**tensors, target=target, z_loss=1e-2)
    torch.testing.assert_close(with_z, plain + 1e-2 * lse[::2].square().mean())


def test_a_ramp_as_bias(device):
    dtype = sixteen_on_cuda(device)
    tensors = inputs(9, 8, 70, dtype, device) | dict(bias=torch.linspace(0, 20, 70, device=device).to(dtype))
    target = targets(tensors["x"], 70)
    loss = coda.linear_cross_entropy(**tensors, target=target, reduction="none")
    assert (loss >= 0).all()
    compare(case(9, 70), tensors, 1.25)


@pytest.mark.parametrize("norm_weight", [False, True])
def test_columns_that_the_bias_takes_away(device, norm_weight):
    """As if they were not there."""
    tensors = inputs(6, 8, 12, sixteen_on_cuda(device, torch.float64), device, bias=True, norm_weight=norm_weight)
    target = torch.arange(6, device=device)
    few = {k: t[:9] if k in ("weight", "bias") else t for k, t in tensors.items()}
    tensors["bias"][9:] = -math.inf
    loose = dict(rtol=2e-2, atol=2e-2) if device == "cuda" else {}
    (loss, found), (expected_loss, expected) = gradients_of(tensors, target), gradients_of(few, target)
    torch.testing.assert_close(loss, expected_loss, **loose)
    for k in tensors:
        torch.testing.assert_close(found[k][:9] if k in ("weight", "bias") else found[k], expected[k], **loose)


# Outputs


def test_logits_and_lse(device):
    dtype = sixteen_on_cuda(device)
    tensors = leaves(inputs(12, 8, 70, dtype, device, bias=True))
    target = targets(tensors["x"], 70).view(3, 4)
    x = tensors["x"].view(3, 4, 8)
    options = dict(bias=tensors["bias"], softcap=3.0)
    loss, logits, lse = coda.linear_cross_entropy(x, tensors["weight"], target, keep_logits=True, return_lse=True, **options)
    assert logits.shape == (3, 4, 70) and logits.dtype == dtype and lse.shape == (3, 4) and lse.dtype == loss.dtype == torch.float32
    kept = logits.detach().clone()
    torch.testing.assert_close(kept, F.linear(x, tensors["weight"], tensors["bias"]).detach())
    torch.testing.assert_close(lse, (3 * torch.tanh(kept.float() / 3)).logsumexp(-1), rtol=1e-2, atol=1e-2)
    loss.backward()
    assert torch.equal(logits, kept), "the logits were changed"
    assert torch.equal(loss, coda.linear_cross_entropy(x, tensors["weight"], target, **options))
    assert torch.equal(lse, coda.linear_cross_entropy(x, tensors["weight"], target, return_lse=True, **options)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [dict(), dict(softcap=3.0)])
def test_log_probabilities_are_those_of_training(device, dtype, options):
    tensors = inputs(34, 24, 70, dtype, device, bias=True, norm_weight=True)
    target = targets(tensors["x"], 70)
    trained = coda.linear_cross_entropy(**leaves(tensors), target=target, reduction="none", **options)
    for function in (leaves, lambda t: t):
        found = coda.linear_log_prob(**function(tensors), target=target, **options)
        assert torch.equal(found, -trained) and (found <= 0).all()
    with torch.inference_mode():
        assert torch.equal(coda.linear_log_prob(**tensors, target=target, **options), -trained)
    values = leaves(tensors)
    ratio = torch.exp(coda.linear_log_prob(**values, target=target, **options) - found)
    assert torch.equal(ratio, torch.ones_like(ratio))
    ratio.sum().backward()
    assert all(t.grad.any() for t in values.values())


def test_one_token_without_dimensions(device):
    tensors = inputs(1, 8, 70, sixteen_on_cuda(device), device, bias=True)
    target = torch.tensor([7], device=device)
    options = dict(reduction="none", keep_logits=True, return_lse=True)
    many = coda.linear_cross_entropy(**tensors, target=target, **options)
    one = coda.linear_cross_entropy(**(tensors | dict(x=tensors["x"][0])), target=target[0], **options)
    assert [t.shape for t in one] == [(), (70,), ()] and all(torch.equal(a, b[0]) for a, b in zip(one, many))


def test_no_width(device):
    """The logits are the bias."""
    tensors = inputs(3, 0, 5, sixteen_on_cuda(device), device, bias=True)
    target = torch.tensor([1, 2, -100], device=device)
    loss, gradients = gradients_of(tensors, target)
    torch.testing.assert_close(loss, F.cross_entropy(tensors["bias"].float().expand(3, 5), target))
    assert gradients["bias"].all() and gradients["x"].shape == (3, 0) and gradients["weight"].shape == (5, 0)


# Autograd


@pytest.mark.parametrize("upstream", [0.0, 1 / 3, -2.0, 1e6])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_any_scalar_comes_back(upstream, reduction):
    tensors = inputs(12, 8, 70, torch.float64, "cpu", bias=True, norm_weight=True)
    target = targets(tensors["x"], 70)
    _, ones = gradients_of(tensors, target, reduction=reduction)
    _, found = gradients_of(tensors, target, upstream, reduction=reduction)
    for k in tensors:
        torch.testing.assert_close(found[k], upstream * ones[k])


def test_the_scalar_is_not_rounded(device):
    """1/3 in 16 bits would be off by the same for every element."""
    tensors = inputs(12, 8, 70, torch.bfloat16, device)
    target = targets(tensors["x"], 70)
    _, ones = gradients_of(tensors, target)
    _, found = gradients_of(tensors, target, 1 / 3)
    third = torch.full((1,), 1 / 3, device=device)
    assert all(torch.equal(found[k], (ones[k].float() * third).bfloat16()) for k in tensors)


def test_second_backward_with_another_scalar(device):
    values = leaves(inputs(12, 8, 70, sixteen_on_cuda(device), device, bias=True))
    loss = coda.linear_cross_entropy(**values, target=targets(values["x"], 70))
    first, second, third = (torch.autograd.grad(loss * s, list(values.values()), retain_graph=True) for s in (1, 2, 1))
    assert all(torch.equal(2 * a, b) and torch.equal(a, c) for a, b, c in zip(first, second, third))


def test_main_grad_of_chunks(device):
    values = leaves(inputs(12, 8, 70, torch.bfloat16, device))
    weight, target = values["weight"], targets(values["x"], 70)
    _, plain = gradients_of({k: t.detach() for k, t in values.items()}, target)
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight, dtype=torch.float32), False
    loss = coda.linear_cross_entropy(**values, target=target, chunk_bytes=5 * 70 * 2)
    assert torch.equal(weight.main_grad, torch.ones_like(weight.main_grad)), "nothing is added before the backward"
    for times in (1, 2):
        loss.backward(retain_graph=True)
        torch.testing.assert_close(weight.main_grad, 1 + times * plain["weight"].float(), rtol=2**-8, atol=1e-3)
    assert weight.grad is None and weight.grad_added_to_main_grad


class Calls(TorchDispatchMode):
    """The products that run, and the most elements of any tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.namespace == "coda" and func._opname in ("lse_select", "exponentials_into_", "dlogits", "gemm", "gemm_accumulate_", "norm_backward")
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.dim() > 0 and 0 not in t.stride():
                self.largest = max(self.largest, t.numel())
        return out


@pytest.mark.parametrize("norm_weight", [False, True])
@pytest.mark.parametrize(
    "reduction, wanted, forward, backward",
    [
        ("mean", (), 1, 0),
        ("mean", ("x", "weight", "bias"), 3, 0),
        ("sum", ("weight",), 2, 0),
        ("sum", ("x",), 2, 0),
        ("mean", ("bias",), 1, 0),
        ("none", (), 1, 0),
        ("none", ("x", "weight", "bias"), 1, 3),
        ("none", ("x",), 1, 2),
        ("none", ("weight",), 1, 2),
    ],
)
def test_number_of_products(reduction, wanted, forward, backward, norm_weight):
    tensors = inputs(12, 8, 70, torch.bfloat16, "cpu", bias=True, norm_weight=norm_weight)
    values = leaves(tensors, wanted=wanted)
    with Calls() as calls:
        loss = coda.linear_cross_entropy(**values, target=targets(values["x"], 70), reduction=reduction)
    assert calls.products == forward and loss.requires_grad == bool(wanted)
    if wanted:
        with Calls() as calls:
            loss.sum().backward()
        assert calls.products == backward
    assert all((t.grad is not None) == (k in wanted) for k, t in values.items())
    with torch.no_grad(), Calls() as calls:
        coda.linear_cross_entropy(**leaves(tensors), target=targets(values["x"], 70), reduction=reduction)
    assert calls.products == 1


def test_keeping_the_logits_saves_a_product():
    values = leaves(inputs(12, 8, 70, torch.bfloat16, "cpu"))
    with Calls() as calls:
        coda.linear_cross_entropy(**values, target=targets(values["x"], 70), reduction="none", keep_logits=True)[0].sum().backward()
    assert calls.products == 3


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("wanted", [(), ("x", "weight", "bias", "norm_weight")])
def test_all_logits_are_never_held(reduction, wanted):
    m, d, v, rows = 64, 8, 1000, 4
    values = leaves(inputs(m, d, v, torch.bfloat16, "cpu", bias=True, norm_weight=True), wanted=wanted)
    with Calls() as calls:
        loss = coda.linear_cross_entropy(**values, target=targets(values["x"], v), reduction=reduction, chunk_bytes=rows * v * 2, **OPTIONS["all"])
        if wanted:
            loss.sum().backward()
    assert calls.largest == max(rows * v, v * d) if wanted else calls.largest < rows * v


@pytest.mark.parametrize("m, chunks", [(20, 1), (21, 6)])
def test_all_tokens_at_once_where_that_takes_less_memory(monkeypatch, m, chunks):
    """Chunks of 4 rows, and a float32 sum that is as large as 16 more."""
    monkeypatch.setattr(coda.ops.cross_entropy, "CHUNK_BYTES", 4 * 100 * 2)
    values = leaves(inputs(m, 8, 100, torch.bfloat16, "cpu"))
    with Calls() as calls:
        coda.linear_cross_entropy(**values, target=targets(values["x"], 100)).backward()
    assert calls.products == 3 * chunks


@pytest.mark.parametrize("classes, d, tokens", [(1003, 32, 40), (1000, 32, 64), (4096, 16, 100), (520, 64, 1000), (5000, 8, 11)])
def test_places_within_the_gradient(monkeypatch, classes, d, tokens):
    """No product of a block writes where exponentials of its own block or of a later one lie."""
    monkeypatch.setattr(module, "_LEAD", 64)
    dweight = torch.empty(classes, d, dtype=torch.bfloat16)
    places = module._places_within(dweight, tokens)
    assert [s.start for s, _ in places] == [0, *[s.stop for s, _ in places[:-1]]] and places[-1][0].stop == classes
    extent = lambda t: (t.data_ptr(), t.data_ptr() + t.nbytes)
    free = 64
    for i, (s, place) in enumerate(places):
        begin, end = extent(place)
        assert place.is_contiguous() and place.shape == (tokens, -(-(s.stop - s.start) // 8) * 8) and begin % 16 == 0
        if i < len(places) - 1:
            assert begin == dweight[free].data_ptr() and end <= extent(dweight)[1] and (s.stop - s.start) % 64 == 0 and s.stop <= free
            free += -(-place.numel() // d)
    assert place.untyped_storage().data_ptr() != dweight.untyped_storage().data_ptr()
    logits = 2 * tokens * classes
    assert place.nbytes <= logits - dweight.nbytes + 2 * (64 * d + 64 * tokens + 8 * tokens)


@pytest.mark.parametrize("tokens, d, v", [(60, 24, 1003), (300, 32, 2000)])
@pytest.mark.parametrize("norm_weight, bias, options", [(False, False, "plain"), (True, True, "plain"), (True, False, "z"), (False, True, "softcap"), (True, False, "smoothing")])
def test_exponentials_within_the_gradient(device, monkeypatch, tokens, d, v, norm_weight, bias, options, poisoned_memory):
    tensors = inputs(tokens, d, v, torch.bfloat16, device, bias=bias, norm_weight=norm_weight)
    target = targets(tensors["x"], v)
    target[1], target[2] = 64, v - 1  # the first class of the second block, the last of the last
    run = lambda **others: gradients_of(tensors, target, **OPTIONS[options], **others)
    calls = []
    form = module._form_within_gradient
    monkeypatch.setattr(module, "_form_within_gradient", lambda *a: calls.append(a) or form(*a))
    separate, others = run()
    assert not calls
    monkeypatch.setattr(module, "_LEAD", 64)
    loss, found = run()
    assert len(calls) == 1
    torch.testing.assert_close(loss, separate)

    def reference(x, weight, bias=None, norm_weight=None):
        logits = F.linear(x if norm_weight is None else norm(x, norm_weight), weight, bias)
        return cross_entropy(logits, target, **OPTIONS[options])

    ones = [torch.ones((), device=device)]
    _, _, eager = results(reference, leaves(tensors), ones)
    _, _, exact = results(reference, leaves(tensors, torch.float64), ones)
    for name in tensors:
        assert_no_worse(f"gradient of {name}", found[name], eager[name], exact[name], 1.25 if norm_weight else 1.1)
    again = run()[1]
    assert all(torch.equal(found[name], again[name]) for name in tensors)
    for name in ("x", "weight"):
        one = gradients_of({name: tensors[name]}, target, **{k: t for k, t in tensors.items() if k != name}, **OPTIONS[options])[1]
        torch.testing.assert_close(one[name], found[name], rtol=2e-2, atol=1e-4)
    assert len(calls) == 3  # not for x alone


@pytest.mark.gpu
def test_memory_of_exponentials_within_the_gradient():
    tokens, d, v = 1024, 512, 128256
    values = leaves(inputs(tokens, d, v, torch.bfloat16, "cuda"))
    target = targets(values["x"], v)
    loss = coda.linear_cross_entropy(**values, target=target)
    torch.autograd.grad(loss, list(values.values()))
    del loss
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = torch.autograd.grad(coda.linear_cross_entropy(**values, target=target), list(values.values()))
    extra = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in found)
    assert extra < 0.6 * 2 * tokens * v  # half of the logits, and their references


def test_rows_of_a_chunk():
    """Whole tiles of rows, but at least one row."""
    assert CHUNK_BYTES == 2**29 and chunk_rows(CHUNK_BYTES, 128256, 2) == 2048 and chunk_rows(CHUNK_BYTES, 2**20, 2) == 256
    assert chunk_rows(1, 128256, 2) == 1 and chunk_rows(100 * 70 * 2, 70, 2) == 100 and chunk_rows(10, 0, 2) == 5


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_tied_embedding(device, reduction):
    dtype = sixteen_on_cuda(device, torch.float64)
    table = new(70, 8, dtype=dtype, device=device)
    tokens = torch.arange(12, device=device) * 5 % 70
    found, expected = [], []
    for into, separate in ((found, False), (expected, True)):
        embedding = table.clone().requires_grad_()
        head = table.clone().requires_grad_() if separate else embedding
        coda.linear_cross_entropy(F.embedding(tokens, embedding), head, tokens.roll(1), reduction=reduction).sum().backward()
        into.append(embedding.grad + head.grad if separate else embedding.grad)
    torch.testing.assert_close(found[0], expected[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_in_autocast(device, dtype, use_reentrant):
    tensors = inputs(12, 8, 70, torch.float32, device, bias=True, norm_weight=True)
    target = targets(tensors["x"], 70)

    def function(x, weight, bias, norm_weight):
        return coda.linear_cross_entropy(x, weight, target, bias=bias, norm_weight=norm_weight)

    runs = []
    for call in (function, lambda *t: torch.utils.checkpoint.checkpoint(function, *t, use_reentrant=use_reentrant)):
        values = leaves(tensors)
        with torch.autocast(device, dtype):
            loss = call(*values.values())
        assert loss.dtype == torch.float32
        loss.backward()
        runs.append([loss.detach(), *(t.grad for t in values.values())])
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(*runs))


@pytest.mark.parametrize("kind", [torch.no_grad, torch.enable_grad])
def test_compiled_with_ignored_rows(device, kind):
    torch._dynamo.reset()
    tensors = inputs(64, 16, 128, sixteen_on_cuda(device), device)
    target = targets(tensors["x"], 128)
    function = lambda x, weight: coda.linear_cross_entropy(x, weight, target, chunk_bytes=24 * 128 * 4)
    with kind():
        found = torch.compile(function, fullgraph=True, backend="aot_eager")(**leaves(tensors))
        torch.testing.assert_close(found, function(**tensors))


def test_one_graph_for_any_number_of_tokens(device):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(coda.linear_cross_entropy, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (5, 9, 130):
        tensors = inputs(m, 16, 24, sixteen_on_cuda(device), device)
        target = targets(tensors["x"], 24)
        values = leaves(tensors)
        loss = compiled(**values, target=target)
        expected_loss, expected = gradients_of(tensors, target)
        torch.testing.assert_close(loss, expected_loss)
        for a, b in zip(torch.autograd.grad(loss, list(values.values())), expected.values()):
            torch.testing.assert_close(a, b, **(dict(rtol=2e-2, atol=2e-2) if device == "cuda" else {}))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_with_the_statistics_of_the_sum_before(device):
    dtype = sixteen_on_cuda(device, torch.float64)
    shapes = dict(a=(6, 16), w=(8, 16), residual=(6, 8), norm_weight=(8,), weight=(70, 8))
    tensors = {k: new(*shape, dtype=dtype, device=device) for k, shape in shapes.items()}
    target = torch.arange(6, device=device)

    def loss(a, w, residual, norm_weight, weight, with_stats=True, reduction="mean"):
        x, stats = coda.linear_residual(a, w, residual, next_norm_weight=norm_weight)
        return coda.linear_cross_entropy(x, weight, target, norm_weight=norm_weight, stats=stats if with_stats else None, reduction=reduction)

    for reduction in ("mean", "none"):
        runs = [results(lambda **t: loss(**t, with_stats=s, reduction=reduction), leaves(tensors)) for s in (True, False)]
        for a, b in zip((*runs[0][0], *runs[0][2].values()), (*runs[1][0], *runs[1][2].values())):
            torch.testing.assert_close(a, b)
    x, stats = coda.linear_residual(*(tensors[k] for k in ("a", "w", "residual")), next_norm_weight=tensors["norm_weight"])
    arguments = tensors["weight"], target
    for function in (coda.linear_cross_entropy, coda.linear_log_prob):
        raises(ValueError, "another tensor than x", function, x.clone(), *arguments, norm_weight=tensors["norm_weight"], stats=stats)
        raises(ValueError, "another norm weight", function, x, *arguments, stats=stats)
        raises(TypeError, "stats is int", function, x, *arguments, stats=1)


# Arguments


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("label", [5, -1, 2**20])
def test_label_out_of_range(dtype, label):
    tensors = inputs(3, 8, 5, torch.float32, "cpu")
    target = torch.tensor([1, label, -100], dtype=dtype)
    for function in (coda.linear_cross_entropy, coda.linear_log_prob):
        raises(IndexError, f"target has the value {label}, expected 0 to 4", function, **tensors, target=target)


@pytest.mark.parametrize(
    "change, kind, words",
    [
        (dict(x=None), TypeError, "x is NoneType"),
        (dict(x=torch.ones(3, 4, dtype=torch.int64)), TypeError, "x has dtype torch.int64"),
        (dict(x=torch.ones(())), ValueError, "x has shape []"),
        (dict(weight=torch.ones(5, 7)), ValueError, "weight has shape [5, 7], expected 4 columns"),
        (dict(weight=torch.ones(5, 4, dtype=torch.float64)), TypeError, "weight has dtype torch.float64, expected torch.float32"),
        (dict(weight=torch.ones(0, 4)), ValueError, "weight has shape [0, 4], expected at least one row"),
        (dict(target=None), TypeError, "target is NoneType"),
        (dict(target=torch.zeros(3)), TypeError, "target has dtype torch.float32, expected int64 or int32"),
        (dict(target=torch.zeros(4, dtype=torch.int64)), ValueError, "target has shape [4], expected [3]"),
        (dict(target=torch.zeros(3, dtype=torch.int64, device="meta")), ValueError, "target is on meta, expected cpu"),
        (dict(bias=torch.ones(4)), ValueError, "bias has shape [4], expected [5]"),
        (dict(bias=torch.ones(5, dtype=torch.float64)), TypeError, "bias has dtype torch.float64"),
        (dict(norm_weight=torch.ones(5)), ValueError, "norm_weight has shape [5], expected [4]"),
        (dict(norm_weight=torch.ones(4, dtype=torch.float16)), TypeError, "norm_weight has dtype torch.float16"),
        (dict(ignore_index=1.5), TypeError, "ignore_index is 1.5, expected an integer"),
        (dict(reduction="batch"), ValueError, "reduction is 'batch', expected one of 'mean', 'sum', 'none'"),
        (dict(label_smoothing=1.5), ValueError, "label_smoothing is 1.5, expected a number from 0 to 1"),
        (dict(label_smoothing=None), ValueError, "label_smoothing is None"),
        (dict(z_loss=-1), ValueError, "z_loss is -1, expected a finite number, 0 or more"),
        (dict(softcap=0.0), ValueError, "softcap is 0.0, expected None or a positive finite number"),
        (dict(softcap=math.nan), ValueError, "softcap is nan"),
        (dict(chunk_bytes=0), ValueError, "chunk_bytes is 0, expected None or a positive number of bytes"),
    ],
)
def test_bad_arguments(change, kind, words):
    good = dict(x=torch.ones(3, 4), weight=torch.ones(5, 4), target=torch.zeros(3, dtype=torch.int64), bias=torch.ones(5), norm_weight=torch.ones(4))
    raises(kind, words, coda.linear_cross_entropy, **(good | change))
