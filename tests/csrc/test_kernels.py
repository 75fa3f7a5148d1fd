"""Forces every compiled kernel, so that none is reached only by a lucky shape, and compares with float64.

A value that is a function of a stored one (h and rstd of a residual sum, for example) is compared with that function of what was stored.
"""
import math
import os
import threading

import pytest
import torch

import coda
from build_support.settings import manifest
from coda import _C
from coda._extension import force_kernel
from tests.ops.cases import ACTIVATIONS, GATES, rotate

KERNELS = {k["key"]: k for k in coda.info()["kernels"]}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# A stored number is off by 2^-8 (2^-11) of itself at most; few numbers can come near that, the root mean square of many does not.
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHAPES = [(1000, 1192, 520), (1, 8, 8), (127, 264, 64), (129, 136, 8), (256, 512, 1032), (16, 2056, 72)]
EPS = 1e-5
ops = torch.ops.coda


class Problem:
    """Random operands of an M x N x K product for one kernel."""

    def __init__(self, program, layout, dtype, m, n, k, turn, device):
        self.m, self.n, self.k, self.dtype, self.device, self.program, self.turn = m, n, k, dtype, device, program, turn
        if program.endswith(("_rope", "_rope_adjacent")):
            parts = max(n // self.turn, 1) | m % 2  # an odd number ends inside a tile
            self.n = n = parts * self.turn
            self.wide_head = next(f for f in (2, 3, 1) if parts % f == 0) * self.turn
        self.a = self.new(k, m).t() if layout == "nt" else self.new(m, k)
        self.b = self.new(n, k, scale=k**-0.5).t() if layout == "tn" else self.new(k, n, scale=k**-0.5)
        self.rstd = torch.rand(m, device=device) + 0.5

    def new(self, *shape, scale=1.0):
        return (torch.randn(*shape, device=self.device) * scale).to(self.dtype)

    @property
    def product(self):
        return self.a.double() @ self.b.double()

    @property
    def scaled(self):
        return self.product * self.rstd.double().unsqueeze(1)


def sums(terms, dim):
    """A sum of many terms, and the size of the terms: what cancels in a sum leaves their rounding behind."""
    return terms.sum(dim), terms.abs().sum(dim)


def correction(p, row_terms, width):
    factor = p.rstd.double().square() / width
    return sums(row_terms * factor.unsqueeze(1), 1)


# For each program, its calls on a problem: (function, exact), exact(outputs) being their exact values, None for one that is not to be looked at.


def plain(p):
    bias, source = p.new(p.n), p.new(p.m, p.n) if p.program == "plain_residual" else None
    exact = 1.5 * p.product + bias.double() + (0 if source is None else 0.5 * source.double())
    yield lambda: (ops.gemm(p.a, p.b, bias, source, 1.5, 0.5),), lambda out: [exact]


def rstd(p):
    for bias in (p.new(p.n), None):
        exact = p.scaled + (0 if bias is None else bias.double())
        yield lambda: ops.rstd_act(p.a, p.rstd, p.b.t(), bias, "identity", False)[:1], lambda out: [exact]


def rstd_act(p):
    bias = p.new(p.n)
    for kind, store, b in (("relu", True, bias), ("relu2", False, bias), ("silu", True, None), ("gelu", False, None), ("gelu_tanh", True, bias)):
        z = p.scaled + (0 if b is None else b.double())
        exact = [ACTIVATIONS[kind](z), z][: 1 + store]
        yield lambda: ops.rstd_act(p.a, p.rstd, p.b.t(), b, kind, store)[: 1 + store], lambda out: exact
    # Behind a LayerNorm: rstd (acc - mean u) + v.
    mean, gamma, beta, w = torch.randn(p.m, device=p.device), p.new(p.k).float() + 2.0**-13, p.new(p.k), p.b.t().double()
    for kind, store, g, b, c in (("gelu_tanh", True, gamma, beta, bias), ("identity", True, gamma.to(p.dtype), None, bias), ("silu", False, None, beta, None)):
        u, v = w.sum(1) if g is None else w @ g.double(), (0 if b is None else w @ b.double()) + (0 if c is None else c.double())
        z = p.scaled - (p.rstd * mean).double().unsqueeze(1) * u + v
        exact = [ACTIVATIONS[None if kind == "identity" else kind](z), z if store and kind != "identity" else None, u, v + torch.zeros_like(u)]
        yield lambda: ops.layer_act(p.a, p.rstd, mean, p.b.t(), c, g, b, kind, store), lambda out: exact


def gates_of(program):
    return ("silu",) if "swiglu" in program else ("gelu", "gelu_tanh")


def rstd_glu(p):
    w, store = torch.cat((p.b.t(), p.new(p.n, p.k, scale=p.k**-0.5))), p.program.endswith("preactivation")
    z = (p.a.double() @ w.double().t()) * p.rstd.double().unsqueeze(1)
    gate, up = z.chunk(2, 1)
    for kind in gates_of(p.program):
        exact = [GATES[kind](gate) * up, z][: 1 + store]
        yield lambda: ops.rstd_glu(p.a, p.rstd, w, None, kind, store)[: 1 + store], lambda out: exact


def activation_gradient(function, z, gradient):
    """(value, dz) in float64."""
    z = z.double().requires_grad_()
    value = function(z)
    return value.detach(), torch.autograd.grad(value, z, gradient)[0]


def dglu(p):
    z = p.new(p.m, 2 * p.n)
    for kind in gates_of(p.program):
        value, dz = activation_gradient(lambda t: GATES[kind](t[:, : p.n]) * t[:, p.n :], z, p.product)
        exact = [dz * p.rstd.double().unsqueeze(1), value, correction(p, dz * z.double(), 3 * p.n)]
        yield lambda: ops.dglu(p.a, p.b, z, p.rstd, kind, 3 * p.n, True), lambda out: exact


def dact(p):
    z, bias = p.new(p.m, p.n), p.new(p.n)
    for kind, b in (("relu", bias), ("relu2", None), ("silu", bias), ("gelu", None), ("gelu_tanh", bias), ("identity", bias)):
        value, dz = activation_gradient(ACTIVATIONS[None if kind == "identity" else kind], z, p.product)
        unbiased = z.double() - (0 if b is None else b.double())
        exact = [dz * p.rstd.double().unsqueeze(1), value, correction(p, dz * unbiased, p.n), None if b is None else sums(dz, 0)]
        yield lambda: ops.dact(p.a, p.b, z, p.rstd, b, kind, p.n, True), lambda out: exact


def dact_layer(p):
    z, u, v = p.new(p.m, p.n), torch.randn(p.n, device=p.device), torch.randn(p.n, device=p.device)
    scale = p.rstd.double() / p.n
    for kind, want in (("relu", True), ("silu", False), ("gelu", True), ("gelu_tanh", True), ("identity", True)):
        value, dz = activation_gradient(ACTIVATIONS[None if kind == "identity" else kind], z, p.product)
        row_dot, offset = correction(p, dz * (z.double() - v.double()), p.n), sums(-dz * u.double() * scale.unsqueeze(1), 1)
        exact = [dz * p.rstd.double().unsqueeze(1), value if want else None, row_dot, offset, sums(dz, 0) if want else None]
        yield lambda: ops.dact_layer(p.a, p.b, z, p.rstd, u, v, kind, p.n, want, want), lambda out: exact


def residual_sqsum(p):
    bias, residual, gamma = p.new(p.n), p.new(p.m, p.n), p.new(p.n).float() + 2.0**-13
    for b, g in ((bias, gamma), (None, gamma.to(p.dtype)), (bias, None)):
        exact = p.product + residual.double() + (0 if b is None else b.double())

        def values(out):
            stored = out[0].double()
            return [exact, None if g is None else stored * g.double(), (stored.square().mean(1) + EPS).rsqrt()]

        yield lambda: ops.linear_residual(p.a, p.b.t(), b, residual, g, EPS), values


def residual_moments(p):
    bias, residual, gamma = p.new(p.n), p.new(p.m, p.n), p.new(p.n).float() + 2.0**-13
    for b, g in ((bias, gamma), (None, gamma.to(p.dtype)), (bias, None)):
        exact = p.product + residual.double() + (0 if b is None else b.double())

        def values(out):
            stored = out[0].double()
            rstd = (stored.var(1, correction=0) + EPS).rsqrt()
            return [exact, None if g is None else stored * g.double(), rstd, sums(stored / p.n, 1)]

        yield lambda: ops.linear_residual_moments(p.a, p.b.t(), b, residual, g, EPS), values


def layer_norm_backward(p):
    x, gamma, beta, incoming = p.new(p.m, p.n), p.new(p.n), p.new(p.n), p.new(p.m, p.n)
    correction, offset, mean = (torch.randn(p.m, device=p.device) for _ in range(3))
    column = lambda t: t.double().unsqueeze(1)
    dn, centred = p.product, x.double() - column(mean)
    for g, b, i, want in ((gamma, beta, incoming, True), (gamma.float() + 2.0**-13, beta.float(), None, True), (gamma, None, None, False), (None, beta, incoming, True)):
        dx = dn * (1 if g is None else g.double()) - column(correction) * centred + column(offset) + (0 if i is None else i.double())
        h = centred * (1 if g is None else g.double()) + (0 if b is None else b.double() / column(p.rstd))
        want_norm = want and g is not None
        exact = [dx, h if want else None, sums(dn * centred, 0) if want_norm else None]
        yield lambda: ops.layer_norm_backward(p.a, p.b, x, g, b, p.rstd, mean, correction, offset, i, want, want_norm), lambda out: exact


def norm_backward(p):
    x, gamma, correction, incoming = p.new(p.m, p.n), p.new(p.n), torch.randn(p.m, device=p.device), p.new(p.m, p.n)
    dn, wide = p.product, x.double()
    for g, i, want in ((gamma, incoming, True), (gamma.float() + 2.0**-13, None, True), (gamma, None, False), (None, incoming, False)):
        dx = dn * (1 if g is None else g.double()) - correction.double().unsqueeze(1) * wide + (0 if i is None else i.double())
        exact = [dx, wide * g.double() if want else None, sums(dn * wide, 0) if want else None]
        yield lambda: ops.norm_backward(p.a, p.b, None, x, g, correction, i, want, want), lambda out: exact


def rstd_rope(p):
    adjacent, rows = p.program == "rstd_rope_adjacent", 500
    angle = torch.rand(rows, p.turn // 2, device=p.device) * 6
    tables = angle.cos(), angle.sin()
    narrow = [t.to(p.dtype) for t in tables]
    bias, positions = p.new(p.n), torch.randint(0, rows, (p.m,), device=p.device)
    for head_dim, given, (cos, sin), b, still in (
        (p.turn, positions, tables, bias, 1),
        (p.turn, positions.int(), narrow, None, 0),
        (p.wide_head, None, tables, bias, 0),  # a part of each head turns
        (p.wide_head, positions, narrow, bias, p.n // p.wide_head),  # no head turns
    ):
        columns = p.n - still * head_dim
        at = torch.arange(p.m, device=p.device) % 300 if given is None else positions
        z = (p.scaled + (0 if b is None else b.double())).view(p.m, -1, head_dim)
        turning = z[:, : columns // head_dim]
        exact = torch.cat((rotate(turning, cos[at].double(), sin[at].double(), adjacent), z[:, columns // head_dim :]), 1).view(p.m, p.n)
        call = lambda: (ops.rstd_rope(p.a, p.rstd, p.b.t(), b, cos, sin, given, 300, head_dim, columns, adjacent),)
        yield call, lambda out: [exact]


def rstd_qknorm_rope(p):
    rows, head_dim, heads = 500, p.turn, p.n // p.turn
    angle = torch.rand(rows, head_dim // 2, device=p.device) * 6
    tables = angle.cos(), angle.sin()
    narrow = [t.to(p.dtype) for t in tables]
    bias, positions = p.new(p.n), torch.randint(0, rows, (p.m,), device=p.device)
    norms = [1 + p.new(head_dim) / 4, 1 - p.new(head_dim) / 4]
    queries = (heads + 1) // 2
    for given, (cos, sin), b, still, store, gammas in (
        (positions, tables, bias, 1, True, norms),
        (None, narrow, None, 0, True, [g.float() + 2.0**-13 for g in norms]),
        (positions.int(), tables, None, heads // 4, False, norms),
    ):
        still = min(still, heads - queries)
        columns = (heads - still) * head_dim
        at = torch.arange(p.m, device=p.device) % 300 if given is None else positions
        product = p.scaled + (0 if b is None else b.double())

        def values(out):
            # The norm is of what is stored, or would be.
            z = (out[1] if store and still == 0 else product.to(p.dtype)).double().view(p.m, -1, head_dim)
            gamma = torch.stack([gammas[0 if h < queries else 1] for h in range(heads - still)]).double()
            turning = z[:, : heads - still]
            normed = turning * (turning.square().mean(-1, keepdim=True) + EPS).rsqrt() * gamma
            turned = rotate(normed, cos[at].double(), sin[at].double())
            exact = torch.cat((turned, product.view(z.shape)[:, heads - still :]), 1).view(p.m, p.n)
            return [exact, product[:, :columns]][: 1 + store]

        rope = cos, sin, given, 300, head_dim, columns, False
        call = lambda: ops.rstd_qknorm_rope(p.a, p.rstd, p.b.t(), b, *gammas, EPS, queries * head_dim, *rope, store)[: 1 + store]
        yield call, values


def rows_of_head(p):
    """(weight, bias, cap, target, exact values) of heads with and without a norm, a bias, a cap, and whole tiles."""
    bias = p.new(p.n)
    for rstd, b, cap, ragged in ((p.rstd, bias, 0.0, 0), (None, None, 0.0, 3), (p.rstd, bias, 2.0, 5), (p.rstd, None, 0.0, 1)):
        v = max(p.n - ragged, 1)
        w, b = p.b.t()[:v], None if b is None else b[:v].clone()
        target = torch.randint(-1, v + 1, (p.m,), device=p.device)  # some are no column
        y = p.product[:, :v] * (1 if rstd is None else rstd.double().unsqueeze(1))
        if b is not None and v > 2:
            b[v // 2] = -math.inf
        logits = y + (0 if b is None else b.double())
        z = cap * torch.tanh(logits / cap) if cap else logits
        yield rstd, w, b, cap, target, y, logits, z, 1 - (z / cap).square() if cap else torch.ones_like(z)


def factors_of(p):
    factors = torch.randn(3, p.m, device=p.device)
    factors[1] *= 1e-3
    return factors


def exponential_sums(terms, dim):
    """`sums` of terms with a factor exp(z), of which an error of z is a relative one."""
    exact, size = sums(terms, dim)
    return exact, 5 * size


def logit_gradients(p, factors, target, lse, z, y, slope, rstd):
    """Exact dz, its row dot and its sum over rows, the last two with the size of their terms."""
    columns = torch.arange(z.shape[1], device=p.device)
    by_softmax, by_all, by_target = factors.double().unsqueeze(2)
    g = (by_softmax * torch.exp(z - lse.unsqueeze(1)) - by_all - by_target * (columns == target.unsqueeze(1))) * slope
    dz = g * (1 if rstd is None else rstd.double().unsqueeze(1))
    few = STEP[p.dtype] / 2 / 2e-6  # the targets make up most of dz: one number a row, of which the rounding errors do not average out
    return (dz, few * dz), exponential_sums(g * y, 1), exponential_sums(g, 0)


def lse_select(p):
    general, store = "_general" in p.program, p.program.replace("_general", "").removeprefix("lse_select").removeprefix("_") or "none"
    factors = factors_of(p)
    for i, (rstd, w, b, cap, target, y, logits, z, slope) in enumerate(rows_of_head(p)):
        if not general and (b is not None or cap):
            continue
        v, q, dots, totals = w.shape[0], y * slope, i != 1 and store == "exponentials", general and b is None
        inside = (target >= 0) & (target < v)
        index = target.clamp(0, v - 1).unsqueeze(1)
        lse = torch.logsumexp(z, 1)
        share = torch.exp(z - lse.unsqueeze(1))
        logit_store = p.new(p.m, -(-v // 8) * 8).fill_(math.nan)
        references = torch.full((p.m, -(-v // 64)), math.nan, device=p.device)
        workspace = torch.full((5 * p.m * -(-v // 128),), math.nan, device=p.device) if i % 2 else None
        exponentials = lambda: ops.exponentials_into_(logit_store, references, workspace, p.a, rstd, w, b, target, cap, dots, totals, 10**6)
        by_all = torch.stack((factors[0], factors[1] * (cap == 0), factors[2]))

        def call():
            others = []
            if store == "exponentials":
                statistics = exponentials()
                exponent = references.double().repeat_interleave(64, 1)[:, :v] - 15 - statistics[:1].t().double() * math.log2(math.e)
                others = [(logit_store.view(torch.float16)[:, :v].double() * torch.exp2(exponent)).nan_to_num(0)]
                dbias = ops.exponential_gradient_(logit_store, references, statistics, by_all, target, rstd, v, cap, True)
                others += [logit_store[:, :v].clone(), dbias]
                assert torch.equal(exponentials().nan_to_num(7), statistics.nan_to_num(7))
            else:
                statistics, stored = ops.lse_select(p.a, rstd, w, b, target, cap, totals, store == "logits", 10**6)
                others = [stored[:, :v].nan_to_num(neginf=0)] if store == "logits" else []
            assert statistics[1:3, ~inside].isnan().all()
            picked = statistics[1:3].masked_fill(~inside, 0).nan_to_num(neginf=0)
            return statistics[0], picked[0], picked[1], statistics[3], statistics[4], statistics[5], *others

        def values(_):
            picked = [(t.gather(1, index).squeeze(1) * inside, t.abs().amax(1)) for t in (z.nan_to_num(neginf=0), q)]
            exact = [(lse, z.nan_to_num(neginf=0).abs().amax(1)), *picked]
            exact.append(exponential_sums(share * q, 1) if dots or totals else torch.zeros_like(lse))
            exact += [sums(z, 1), sums(q, 1)] if totals else [torch.zeros_like(lse)] * 2
            if store == "logits":
                exact.append(logits.nan_to_num(neginf=0))
            if store == "exponentials":
                dz, _, dbias = logit_gradients(p, by_all, target, lse, z, y, slope, rstd)
                exact += [(share, 200 * share), dz, (dbias[0], 20 * dbias[1])]  # an exponential is rounded to fp16
            return exact

        yield call, values


def dlogits(p):
    factors = factors_of(p)
    for rstd, w, b, cap, target, y, _, z, slope in rows_of_head(p):
        if (b is not None or cap > 0) != (p.program == "dlogits_general"):
            continue
        lse = torch.logsumexp(z, 1)
        exact = logit_gradients(p, factors, target, lse, z, y, slope, rstd)

        def call():
            dz, dot, dbias = ops.dlogits(p.a, rstd, w, b, target, lse.float(), factors, cap, b is not None)
            return dz[:, : w.shape[0]], dot, *([dbias] if b is not None else [])

        yield call, lambda _: exact


PROGRAMS = {
    "plain": plain,
    "plain_residual": plain,
    "rstd": rstd,
    "rstd_act": rstd_act,
    "dact": dact,
    "dact_layer": dact_layer,
    "residual_sqsum": residual_sqsum,
    "norm_backward": norm_backward,
    "residual_moments": residual_moments,
    "layer_norm_backward": layer_norm_backward,
    "rstd_rope": rstd_rope,
    "rstd_rope_adjacent": rstd_rope,
    "rstd_qknorm_rope": rstd_qknorm_rope,
    **{f"lse_select{general}{stored}": lse_select for general in ("", "_general") for stored in ("", "_logits", "_exponentials")},
    "dlogits": dlogits,
    "dlogits_general": dlogits,
    **{f"rstd_{unit}{suffix}": rstd_glu for unit in ("swiglu", "geglu") for suffix in ("", "_preactivation")},
    **{f"d{unit}": dglu for unit in ("swiglu", "geglu")},
}


def check(outputs, exact):
    for i, (value, wanted) in enumerate(zip(outputs, exact)):
        if wanted is None:
            continue
        wanted, size = wanted if isinstance(wanted, tuple) else (wanted, torch.zeros(()))
        step = STEP.get(value.dtype, 1e-5) * (1 if value.numel() < 1000 or value.dtype not in STEP else 0.5)
        limit = step * wanted.norm().item() + 2e-6 * size.norm().item()
        off = (value.double() - wanted).norm().item()
        assert value.shape == wanted.shape and off <= limit, f"output {i} is off by {off:.3e}, expected {limit:.3e}"


def turns(kernel):
    """The rotary widths to run a kernel with: the one that it was built for, or all that it takes."""
    if kernel["program"] not in ("rstd_rope", "rstd_qknorm_rope"):
        return [64]
    if kernel.get("heads_within"):
        return [w for w in (16, 32, 64, 128, 256) if kernel["heads_within"] % w == 0]
    return [int(kernel["key"].rsplit("_r", 1)[1])]


def run(kernel, m, n, k, repeats, device="cuda"):
    """Every call of the kernel's program: right, and the same bits each time. Yields after the first run of each."""
    for turn in turns(kernel):
        problem = Problem(kernel["program"], kernel["layout"], DTYPES[kernel["dtype"]], m, n, k, turn, device)
        for call, exact in PROGRAMS[kernel["program"]](problem):
            first = call()
            yield
            check(first, exact(first))
            for _ in range(repeats):
                assert all(torch.equal(a, b) for a, b in zip(call(), first))


def test_every_program_is_here():
    assert {k.program for k in manifest.manifest()} == set(PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_cpu_back_end(program, poisoned_memory):
    torch.manual_seed(0)
    kernel = next(k for k in manifest.manifest() if k.program == program)
    fields = dict(key=kernel.key, program=program, layout=kernel.layout, dtype=kernel.dtype)
    for _ in run(fields, 33, 136, 72, 1, device="cpu"):
        assert coda.backend_of_last_call() == "cpu"


gpu = [pytest.mark.gpu, pytest.mark.skipif(not KERNELS, reason="this build holds no kernels")]
on_gpu = lambda test: gpu[0](gpu[1](test))


@on_gpu
@pytest.mark.parametrize("m, n, k", SHAPES)
@pytest.mark.parametrize("key", list(KERNELS))
def test_forced(key, m, n, k, poisoned_memory):
    torch.manual_seed(0)
    if KERNELS[key]["layout"] == "nt":
        m = (m + 7) // 8 * 8
    with force_kernel(key):
        for _ in run(KERNELS[key], m, n, k, 20):
            assert key in coda.backend_of_last_call()


@on_gpu
@pytest.mark.parametrize("k", [8, 16, 64])
@pytest.mark.parametrize("key", list(KERNELS))
def test_short_k_repeats(key, k, poisoned_memory):
    """Few mainloop steps make the epilogue wait for nothing: a buffer reused too early would show here."""
    torch.manual_seed(0)
    with force_kernel(key):
        for _ in run(KERNELS[key], 2048, 2048, k, 50):
            assert key in coda.backend_of_last_call()


@on_gpu
@pytest.mark.parametrize("splits", [2, 3, 16])
@pytest.mark.parametrize("key", [key for key, kernel in KERNELS.items() if kernel["splits"]])
def test_split_k(key, splits, poisoned_memory):
    torch.manual_seed(0)
    _C.force_schedule(0, 0, splits)
    try:
        with force_kernel(key):
            for m, n, k in ((264, 392, 4104), (8, 8, 40), (1024, 1024, 16384)):
                for _ in run(KERNELS[key], m, n, k, 20):
                    assert f"{key} in " in coda.backend_of_last_call()
    finally:
        _C.force_schedule(0, 0)


@on_gpu
def test_dispatch_splits_k(poisoned_memory):
    arch, _ = _C.arch_for(*torch.cuda.get_device_capability())
    kernel = next((k for k in KERNELS.values() if (k["program"], k["layout"], k["arch"]) == ("plain", "nt", arch)), None)
    if kernel is None:
        pytest.skip("this build holds no plain product")
    few_rows = any(k["few_rows"] for k in KERNELS.values()) and not os.environ.get("CODA_FORCE_ARCH")
    for m, n, k, parts in ((512, 512, 16384, arch == "sm80" or few_rows), (4096, 4096, 2048, False)):
        for _ in run(kernel, m, n, k, 1):
            assert (" parts" in coda.backend_of_last_call()) == parts


@on_gpu
def test_a_thread_that_has_not_used_the_device():
    """Autograd's threads, for one: the driver's function behind TMA descriptors makes no context, as the runtime's functions do."""
    a, w = (torch.randn(256, 256, device="cuda").to(torch.bfloat16) for _ in range(2))
    call = lambda: ops.rstd_act(a, None, w, w[0], "gelu", False)[0]
    expected, found = call().clone(), []  # what is freed here serves the thread, so that nothing but the kernel touches the device there
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(found[0], expected)


@on_gpu
def test_unknown_kernel_names_near_misses():
    with pytest.raises(ValueError, match="the nearest are: rstd_swiglu"):
        with force_kernel("rstd_swiglu_tn_bf16_128x128x64_9x9_pingpong"):
            pass


@on_gpu
def test_registry_fits_the_card():
    for k in KERNELS.values():
        assert k["shared_memory"] <= {"sm90": 232448, "sm80": 101376}[k["arch"]] and k["stages"] >= 3, k  # 8.6 and 8.9 have 99 KB
