"""Times every program beside torch. CODA_FORCE_ARCH=sm80 measures the SM80 kernels on a Hopper GPU.

    python -m coda.bench                                        every program at the presets 1b and 8b
    python -m coda.bench --presets 70b --programs dswiglu       some of them
    python -m coda.bench --tokens 1,256,1024                    with other numbers of tokens
    python -m coda.bench --whole --out FILE                     MLP and block, forward and backward
    python -m coda.bench --head                                 the head and its loss, with the memory that they take
    python -m coda.bench --all-kernels --schedules              every kernel and scheduler setting, for tuning
    python -m coda.bench --sustained --rep 300                  launches back to back, without pauses

Each program runs in turn with the bare GEMM of the same operands (torch.mm), the eager sequence that it replaces, and torch.compile of that
sequence. What counts is the ratio to torch.mm: the median over the rounds of (candidate / torch.mm of the same round). Inputs are normal random
numbers. The card's power limit sets the speed of all of them, and what ran just before decides how much of the budget is left: so every burst is
warmed up by its own kernel, and each round has a random order of its own. With a fixed order each candidate would keep its predecessor for ever,
which shifts ratios by 5 %.

Between two launches the second-level cache is cleared, a pause in which the card saves power that the launch then has. A training step has no such
pauses: with --sustained launches follow each other, at the lower clock that the card can hold, where a kernel's energy decides. Ratios to
torch.mm are then up to 0.1 larger for short products, and kernels may change places.
"""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import random
import statistics
import subprocess
import sys
from typing import Any, Callable

import torch
import torch.nn.functional as F

import coda
from coda import _C
from coda._extension import force_kernel

TOKENS = 16384
HEAD_TOKENS = 8192


@dataclasses.dataclass(frozen=True)
class Preset:
    dim: int
    ffn_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int = 128256

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


PRESETS = {"1b": Preset(2048, 8192, 32, 8, 64), "8b": Preset(4096, 14336, 32, 8, 128), "70b": Preset(8192, 28672, 64, 8, 128)}


@dataclasses.dataclass(frozen=True)
class Problem:
    program: str  # as in coda.info()
    what: str
    layout: str
    ours: Callable[[], Any]
    bare: Callable[[], Any]
    eager: Callable[..., Any] | None = None
    operands: tuple = ()


def rnd(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype)


def problems(preset: Preset, dtype: torch.dtype, m: int, device: str = "cuda") -> list[Problem]:
    """Every program of a block at the place where a block uses it."""
    ops, d, f = torch.ops.coda, preset.dim, preset.ffn_dim
    new = lambda *s, scale=1.0: rnd(*s, scale=scale, dtype=dtype, device=device)
    x, res, g = new(m, d), new(m, d), new(d)
    w, w_down, w_qkv, w_o = new(2 * f, d, scale=d**-0.5), new(d, f, scale=f**-0.5), new(preset.qkv, d, scale=d**-0.5), new(d, d, scale=d**-0.5)
    y, z, dz_qkv = new(m, f), new(m, 2 * f), new(m, preset.qkv)
    rstd, correction = torch.rand(m, device=device) + 0.5, torch.randn(m, device=device) * 0.1
    mean, u = torch.randn(m, device=device), torch.randn(f, device=device)
    angle = torch.rand(m, preset.head_dim // 2, device=device) * 6
    cos, sin = angle.cos(), angle.sin()
    queries, g_head = preset.heads * preset.head_dim, new(preset.head_dim)
    turning = (preset.heads + preset.kv_heads) * preset.head_dim
    wide, one, qkv = torch.empty_like(z), torch.empty_like(x), torch.empty_like(dz_qkv)
    narrow, dw = torch.empty_like(y), torch.empty_like(w)
    norm = lambda x, g: F.rms_norm(x, (d,), g, 1e-6)
    # The head sees a chunk of tokens at a time.
    chunk = x[:2048]
    head, labels = new(preset.vocabulary, d, scale=d**-0.5), torch.arange(chunk.shape[0], device=device) * 31 % preset.vocabulary
    logits, lse, factors = new(chunk.shape[0], preset.vocabulary), torch.full((chunk.shape[0],), 12.0, device=device), torch.ones(3, chunk.shape[0], device=device)
    references = torch.empty(chunk.shape[0], -(-preset.vocabulary // 64), device=device)
    select = lambda want_logits, cap=0.0: ops.lse_select(chunk, None, head, None, labels, cap, False, want_logits, chunk.shape[0])
    exponentials = lambda cap=0.0: ops.exponentials_into_(logits, references, None, chunk, None, head, None, labels, cap, False, False, chunk.shape[0])
    chunk_logits = lambda: torch.mm(chunk, head.t(), out=logits)
    loss = lambda x, w, t: F.cross_entropy(F.linear(x, w).float(), t, reduction="none")

    def swiglu(x, g, w):
        gate, up = F.linear(norm(x, g), w).chunk(2, -1)
        return F.silu(gate) * up

    def turned(heads, y, cos, sin):
        a, b = heads.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((torch.cat((a * c - b * s, a * s + b * c), -1).flatten(1).to(y.dtype), y[:, turning:]), 1)

    def rope(x, g, w, cos, sin):
        y = F.linear(norm(x, g), w)
        return turned(y[:, :turning].unflatten(1, (-1, preset.head_dim)).float(), y, cos, sin)

    def qknorm_rope(x, g, w, g_head, cos, sin):
        y = F.linear(norm(x, g), w)
        heads = y[:, :turning].unflatten(1, (-1, preset.head_dim))
        return turned(F.rms_norm(heads, (preset.head_dim,), g_head, 1e-6).float(), y, cos, sin)

    def dswiglu(dy, w, z):
        gate, up = z.chunk(2, 1)
        acc, s = (dy @ w).float(), torch.sigmoid(gate.float())
        dz = torch.cat((acc * up * s * (1 + gate * (1 - s)), acc * gate * s), 1)
        return dz.to(z.dtype), (gate * s * up).to(z.dtype), (dz * z).sum(1)

    def residual_norm(a, w, x, g):
        out = x + F.linear(a, w)
        return out, norm(out, g)

    def norm_backward(dz, w, x, g, c, incoming):
        dn = (dz @ w).float()
        return (incoming + dn * g - x * c[:, None]).to(x.dtype), x * g, (dn * x).sum(0)

    gate_up = lambda: torch.mm(x, w.t(), out=wide)
    return [
        Problem("rstd_swiglu_preactivation", "gate-up", "tn", lambda: ops.rstd_glu(x, rstd, w, None, "silu", True), gate_up, swiglu, (x, g, w)),
        Problem("rstd_swiglu", "gate-up", "tn", lambda: ops.rstd_glu(x, rstd, w, None, "silu", False), gate_up, swiglu, (x, g, w)),
        Problem("rstd_geglu", "gate-up", "tn", lambda: ops.rstd_glu(x, rstd, w, None, "gelu_tanh", False), gate_up),
        Problem("rstd_geglu_preactivation", "gate-up", "tn", lambda: ops.rstd_glu(x, rstd, w, None, "gelu_tanh", True), gate_up),
        Problem("rstd_act", "up", "tn", lambda: ops.rstd_act(x, rstd, w[:f], None, "gelu_tanh", True), lambda: torch.mm(x, w[:f].t(), out=narrow)),
        Problem("rstd_rope", "qkv", "tn", lambda: ops.rstd_rope(x, rstd, w_qkv, None, cos, sin, None, m, preset.head_dim, turning, False),
                lambda: torch.mm(x, w_qkv.t(), out=qkv), rope, (x, g, w_qkv, cos, sin)),
        Problem("rstd_rope_adjacent", "qkv", "tn", lambda: ops.rstd_rope(x, rstd, w_qkv, None, cos, sin, None, m, preset.head_dim, turning, True),
                lambda: torch.mm(x, w_qkv.t(), out=qkv)),
        Problem("rstd_qknorm_rope", "qkv", "tn",
                lambda: ops.rstd_qknorm_rope(x, rstd, w_qkv, None, g_head, g_head, 1e-6, queries, cos, sin, None, m, preset.head_dim, turning, False, True),
                lambda: torch.mm(x, w_qkv.t(), out=qkv), qknorm_rope, (x, g, w_qkv, g_head, cos, sin)),
        Problem("rstd", "qkv", "tn", lambda: ops.rstd_act(x, rstd, w_qkv, None, "identity", False), lambda: torch.mm(x, w_qkv.t(), out=qkv)),
        Problem("residual_sqsum", "out-proj", "tn", lambda: ops.linear_residual(x, w_o, None, res, g, 1e-6), lambda: torch.mm(x, w_o.t(), out=one),
                residual_norm, (x, w_o, res, g)),
        Problem("residual_sqsum", "down-proj", "tn", lambda: ops.linear_residual(y, w_down, None, res, g, 1e-6),
                lambda: torch.mm(y, w_down.t(), out=one), residual_norm, (y, w_down, res, g)),
        Problem("plain_residual", "down-proj", "tn", lambda: ops.gemm(y, w_down.t(), None, res), lambda: torch.mm(y, w_down.t(), out=one),
                lambda a, w, x: x + F.linear(a, w), (y, w_down, res)),
        Problem("dswiglu", "down-proj dgrad", "nn", lambda: ops.dglu(x, w_down, z, rstd, "silu", d, True), lambda: torch.mm(x, w_down, out=narrow),
                dswiglu, (x, w_down, z)),
        Problem("dgeglu", "down-proj dgrad", "nn", lambda: ops.dglu(x, w_down, z, rstd, "gelu_tanh", d, True), lambda: torch.mm(x, w_down, out=narrow)),
        Problem("dact", "down-proj dgrad", "nn", lambda: ops.dact(x, w_down, y, rstd, None, "gelu_tanh", d, True),
                lambda: torch.mm(x, w_down, out=narrow)),
        Problem("norm_backward", "gate-up dgrad", "nn", lambda: ops.norm_backward(z, w, None, x, g, correction, res, True, True),
                lambda: torch.mm(z, w, out=one), norm_backward, (z, w, x, g, correction, res)),
        Problem("norm_backward", "qkv dgrad", "nn", lambda: ops.norm_backward(dz_qkv, w_qkv, None, x, g, correction, res, True, True),
                lambda: torch.mm(dz_qkv, w_qkv, out=one), norm_backward, (dz_qkv, w_qkv, x, g, correction, res)),
        Problem("residual_moments", "out-proj", "tn", lambda: ops.linear_residual_moments(x, w_o, None, res, g, 1e-6), lambda: torch.mm(x, w_o.t(), out=one)),
        Problem("dact_layer", "down-proj dgrad", "nn", lambda: ops.dact_layer(x, w_down, y, rstd, u, u, "gelu_tanh", d, True, True),
                lambda: torch.mm(x, w_down, out=narrow)),
        Problem("layer_norm_backward", "gate-up dgrad", "nn",
                lambda: ops.layer_norm_backward(z, w, x, g, g, rstd, mean, correction, correction, res, True, True), lambda: torch.mm(z, w, out=one)),
        Problem("lse_select", "head", "tn", lambda: select(False), chunk_logits, loss, (chunk, head, labels)),
        Problem("lse_select_logits", "head", "tn", lambda: select(True), chunk_logits),
        Problem("lse_select_exponentials", "head", "tn", exponentials, chunk_logits),
        Problem("lse_select_general", "head, softcap", "tn", lambda: select(False, 30.0), chunk_logits),
        Problem("lse_select_general_logits", "head, softcap", "tn", lambda: select(True, 30.0), chunk_logits),
        Problem("lse_select_general_exponentials", "head, softcap", "tn", lambda: exponentials(30.0), chunk_logits),
        Problem("dlogits", "head", "tn", lambda: ops.dlogits(chunk, None, head, None, labels, lse, factors, 0.0, False), chunk_logits),
        Problem("dlogits_general", "head, softcap", "tn", lambda: ops.dlogits(chunk, None, head, None, labels, lse, factors, 30.0, False), chunk_logits),
        Problem("plain", "gate-up", "tn", lambda: ops.gemm(x, w.t()), gate_up),
        Problem("plain", "gate-up dgrad", "nn", lambda: ops.gemm(z, w), lambda: torch.mm(z, w, out=one)),
        Problem("plain", "gate-up wgrad", "nt", lambda: ops.gemm(z.t(), x), lambda: torch.mm(z.t(), x, out=dw)),
    ]


def whole(preset: Preset, dtype: torch.dtype, m: int) -> list[tuple[str, dict[str, Callable[[], Any]]]]:
    """norm + MLP + residual, and a block of 2 x m/2 tokens: CODA, eager, torch.compile, and the sum of the bare products (and attention)."""
    from coda.nn import DecoderConfig, TransformerBlock

    d, f = preset.dim, preset.ffn_dim
    leaf = lambda *s, scale=1.0: rnd(*s, scale=scale, dtype=dtype).requires_grad_()
    x, w, w_down, g = leaf(m, d), leaf(2 * f, d, scale=d**-0.5), leaf(d, f, scale=f**-0.5), leaf(d)
    leaves, grad = (x, w, w_down, g), rnd(m, d, dtype=dtype)

    def mlp(x, w, w_down, g):
        gate, up = F.linear(F.rms_norm(x, (d,), g, 1e-6), w).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, w_down)

    ours = lambda x, w, w_down, g: coda.fused_mlp_forward(x, w, w_down, norm_weight=g, residual=x)
    z, y = rnd(m, 2 * f, dtype=dtype), rnd(m, f, dtype=dtype)

    @torch.no_grad()
    def mlp_products(backward: bool) -> None:
        torch.mm(x, w.t()), torch.mm(y, w_down.t())
        if backward:
            torch.mm(grad, w_down), torch.mm(grad.t(), y), torch.mm(z, w), torch.mm(z.t(), x)

    @torch.no_grad()
    def forward(function):
        function(*leaves)

    both = lambda function: torch.autograd.grad(function(*leaves), leaves, grad)
    functions = {"coda": ours, "eager": mlp, "compile": torch.compile(mlp)}
    rows = [
        ("mlp forward", {n: (lambda fn=fn: forward(fn)) for n, fn in functions.items()} | {"products": lambda: mlp_products(False)}),
        ("mlp forward + backward", {n: (lambda fn=fn: both(fn)) for n, fn in functions.items()} | {"products": lambda: mlp_products(True)}),
    ]

    config = DecoderConfig(vocab_size=8, dim=d, num_layers=2, num_heads=preset.heads, num_kv_heads=preset.kv_heads, head_dim=preset.head_dim, ffn_dim=f,
                           rope_theta=500000.0)
    blocks = {name: TransformerBlock(config, backend=name).to("cuda", dtype) for name in ("coda", "eager")}
    blocks["eager"].load_state_dict(blocks["coda"].state_dict())
    tokens, grad3 = rnd(2, m // 2, d, dtype=dtype).requires_grad_(), rnd(2, m // 2, d, dtype=dtype)
    from coda.nn.layers import rope_tables

    tables = rope_tables(None, config.rotary_dim, config.rope_theta, like=tokens)
    following = torch.nn.RMSNorm(d, eps=config.norm_eps).to("cuda", dtype)
    first = coda.NormStats.make(tokens, *coda.rms_norm_stats(tokens.detach(), blocks["coda"].attention.norm.weight.detach(), config.norm_eps),
                                blocks["coda"].attention.norm.weight, config.norm_eps)
    compiled = torch.compile(blocks["eager"])
    runs = {  # a middle block: its statistics come from the block before, and it makes those of the next one
        "coda": (lambda: blocks["coda"](tokens, rope=tables, stats=first, next_norm=following)[0], list(blocks["coda"].parameters())),
        "eager": (lambda: blocks["eager"](tokens, rope=tables), list(blocks["eager"].parameters())),
        "compile": (lambda: compiled(tokens, rope=tables), list(blocks["eager"].parameters())),
    }
    heads = lambda n: rnd(2, n, m // 2, preset.head_dim, dtype=dtype).requires_grad_()
    q, k, v, w_qkv, w_o = heads(preset.heads), heads(preset.kv_heads), heads(preset.kv_heads), rnd(preset.qkv, d, dtype=dtype), rnd(d, d, dtype=dtype)
    dqkv = rnd(m, preset.qkv, dtype=dtype)

    def block_products() -> None:
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(a, (q, k, v), a.detach())
        with torch.no_grad():
            flat = x.detach()
            torch.mm(flat, w_qkv.t()), torch.mm(flat, w_o.t()), torch.mm(flat, w_o), torch.mm(flat.t(), flat), torch.mm(dqkv, w_qkv), torch.mm(dqkv.t(), flat)
        mlp_products(True)

    rows.append(("block forward + backward",
                 {n: (lambda run=run, p=p: torch.autograd.grad(run(), [tokens, *p], grad3)) for n, (run, p) in runs.items()} | {"products": block_products}))
    return rows


def head(preset: Preset, dtype: torch.dtype, m: int) -> list[tuple[str, dict[str, Callable[[], Any]]]]:
    """The head and the loss of m tokens: CODA, torch.compile of both with the logits held, Liger's where it is installed, and the bare products."""
    d, v = preset.dim, preset.vocabulary
    leaf = lambda *s, scale=1.0: rnd(*s, scale=scale, dtype=dtype).requires_grad_()
    x, w, target = leaf(m, d), leaf(v, d, scale=d**-0.5), torch.randint(v, (m,), device="cuda")
    summed = w.detach().clone().requires_grad_()
    summed.main_grad = torch.zeros_like(summed, dtype=torch.float32)
    with torch.no_grad():
        logits, dx, dw = rnd(m, v, dtype=dtype), torch.empty_like(x), torch.empty_like(w)

    @torch.no_grad()
    def products(forward: int, backward: int) -> None:
        for _ in range(forward):
            torch.mm(x, w.t(), out=logits)
        for _ in range(backward):
            torch.mm(logits, w, out=dx), torch.mm(logits.t(), x, out=dw)

    @torch.no_grad()
    def forward() -> None:
        coda.linear_cross_entropy(x, w, target)

    losses = {
        "coda": (coda.linear_cross_entropy, w),
        "coda_main_grad": (coda.linear_cross_entropy, summed),
        "compile": (torch.compile(lambda x, w, t: F.cross_entropy(F.linear(x, w).float(), t)), w),
    }
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        losses["liger"] = lambda x, w, t: liger(w, x, t), w
    each, weight_of_each = (lambda x, w, t: coda.linear_cross_entropy(x, w, t, reduction="none")), torch.rand(m, device="cuda")
    gradients = lambda function, w, grad=None: torch.autograd.grad(function(x, w, target), (x, w), grad, allow_unused=True)
    return [
        ("head forward", {"coda": forward, "products": lambda: products(1, 0)}),
        ("head forward + backward, mean",
         {n: (lambda f=f, w=w: gradients(f, w)) for n, (f, w) in losses.items()} | {"products": lambda: products(1, 1)}),
        ("head forward + backward, none",
         {n: (lambda w=w: gradients(each, w, weight_of_each)) for n, w in (("coda", w), ("coda_main_grad", summed))} | {"products": lambda: products(2, 1)}),
    ]


def memory(f: Callable[[], Any]) -> int:
    """MiB that a call takes beyond what was there and what it returns."""
    f()  # what a compiler allocates once
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = f()
    torch.cuda.synchronize()
    held = sum(t.untyped_storage().nbytes() for t in kept or () if t is not None)
    return (torch.cuda.max_memory_allocated() - before - held) >> 20


def milliseconds(f: Callable[[], Any], rep: int, sustained: bool = False) -> float:
    """Of one call, from a burst of `rep` milliseconds: the median of calls with pauses, or the mean of calls back to back."""
    from triton.testing import do_bench

    if not sustained:
        return do_bench(f, warmup=15, rep=rep, return_mode="median")
    one = do_bench(f, warmup=1, rep=1)
    calls = max(3, int(rep / one))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(calls // 3):
        f()
    begin.record()
    for _ in range(calls):
        f()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def in_random_turns(candidates: list[Callable[[], None]], rounds: int, seed: int = 0) -> None:
    order = random.Random(seed)
    for _ in range(rounds):
        for turn in order.sample(candidates, len(candidates)):
            turn()


def measure_program(preset: str, tokens: int, problem: Problem, args: argparse.Namespace) -> list[dict]:
    keys: list[str | None] = [None]
    if args.all_kernels or problem.program == "plain":
        arch, _ = _C.arch_for(*torch.cuda.get_device_capability())
        wanted = (arch, problem.program, problem.layout, args.dtype)
        keys = [k["key"] for k in _C.kernels() if (arch if k["few_rows"] else k["arch"], k["program"], k["layout"], k["dtype"]) == wanted]
        if arch == "sm90" and problem.program in ("rstd_rope", "rstd_qknorm_rope"):
            keys = [key for key in keys if key.endswith((f"_r{PRESETS[preset].head_dim}", "_sm80"))]  # the others are for other heads
    schedules = [(s, r) for s in (1, 2, 4, 8) for r in (1, 2)] if args.schedules else [(0, 0)]
    settings = [(key, *schedule) for key in keys for schedule in schedules]
    times: dict[Any, list[float]] = {setting: [] for setting in settings}
    backends: dict[Any, str] = {}
    times["torch.mm"] = []
    others = {}
    if problem.eager is not None and not args.all_kernels:
        compiled = torch.compile(problem.eager)
        others = {"eager": lambda: problem.eager(*problem.operands), "compile": lambda: compiled(*problem.operands)}
        times |= {name: [] for name in others}

    def ours(setting: tuple) -> None:
        key, swizzle, raster = setting
        with force_kernel(key) if key else contextlib.nullcontext():
            _C.force_schedule(swizzle, raster)
            times[setting].append(milliseconds(problem.ours, args.rep, args.sustained))
            backends[setting] = coda.backend_of_last_call()
            _C.force_schedule(0, 0)

    turns = [lambda s=s: ours(s) for s in settings]
    turns += [lambda n=n, f=f: times[n].append(milliseconds(f, args.rep, args.sustained)) for n, f in {"torch.mm": problem.bare, **others}.items()]
    with torch.no_grad():
        in_random_turns(turns, args.rounds)
    mm = times["torch.mm"]
    rows = []
    for setting in settings:
        _, swizzle, raster = setting
        row = {"preset": preset, "tokens": tokens, "program": problem.program, "what": problem.what, "backend": backends[setting]}
        row |= {"swizzle": swizzle, "raster": raster}
        row["ms"], row["torch_mm_ms"] = statistics.median(times[setting]), statistics.median(mm)
        row["ratio"] = statistics.median(c / b for c, b in zip(times[setting], mm))
        rows.append(row | {f"{n}_ms": statistics.median(times[n]) for n in others})
    rows.sort(key=lambda row: row["ratio"])
    for row in rows[: 6 if args.schedules else None]:
        extra = "".join(f"  {n} {row[f'{n}_ms']:8.4f}" for n in others) or "  "
        extra += f"  swizzle {row['swizzle']} raster {row['raster']}  {row['backend']}" if args.all_kernels or args.schedules else ""
        print(f"{preset:4s}{tokens:6d}  {row['program']:26s}{row['what']:17s}{row['ms']:8.4f} ms  mm {row['torch_mm_ms']:8.4f}  ratio {row['ratio']:.4f}{extra}", flush=True)
    return rows


def measure_whole(name: str, tokens: int, what: str, candidates: dict[str, Callable[[], Any]], args: argparse.Namespace) -> dict:
    taken = {f"{n}_mib": memory(f) for n, f in candidates.items() if n != "products"} if args.head else {}
    times: dict[str, list[float]] = {n: [] for n in candidates}
    in_random_turns([lambda n=n, f=f: times[n].append(milliseconds(f, args.rep, args.sustained)) for n, f in candidates.items()], args.rounds)
    medians = {n: statistics.median(t) for n, t in times.items()}
    print(f"{name:4s}{tokens:6d}  {what:28s}" + "  ".join(f"{n} {t:.4f} ms" for n, t in medians.items()) + "".join(f"  {n} {m}" for n, m in taken.items()), flush=True)
    return {"preset": name, "tokens": tokens, "what": what, **{f"{n}_ms": t for n, t in medians.items()}, **taken}


def environment() -> dict[str, Any]:
    run = lambda *command: subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {
        "card": torch.cuda.get_device_name(),
        "driver": run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "commit": run("git", "rev-parse", "HEAD") or None,
        "command": "python -m coda.bench " + " ".join(sys.argv[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m coda.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="1b,8b", help=f"comma-separated, of {', '.join(PRESETS)}")
    parser.add_argument("--programs", default="", help="comma-separated names, default all")
    parser.add_argument("--tokens", default="", help=f"comma-separated numbers, default {TOKENS}, {HEAD_TOKENS} with --head; even with --whole")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rep", type=int, default=25, help="milliseconds a burst")
    parser.add_argument("--whole", action="store_true", help="MLP and block instead of single programs")
    parser.add_argument("--head", action="store_true", help="the head and its loss instead of single programs")
    parser.add_argument("--sustained", action="store_true", help="launches back to back")
    parser.add_argument("--all-kernels", action="store_true")
    parser.add_argument("--schedules", action="store_true", help="also every swizzle and raster order")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the results")
    args = parser.parse_args()
    tokens = args.tokens.split(",") if args.tokens else [str(HEAD_TOKENS if args.head else TOKENS)]
    for m in tokens:
        if not m.isdecimal() or int(m) < 1 or (args.whole and int(m) % 2):
            parser.error(f"--tokens has {m or 'nothing'}, expected {'even' if args.whole else 'positive'} numbers")
    if not torch.cuda.is_available() or _C.arch_for(*torch.cuda.get_device_capability())[0] is None:
        parser.error(f"this needs a GPU that kernels were built for ({coda.info()['backend']})")
    wanted = [p for p in args.programs.split(",") if p]
    unknown = [p for p in wanted if p not in {k["program"] for k in _C.kernels()}]
    if unknown:
        parser.error(f"--programs has {', '.join(unknown)}, expected some of {', '.join(sorted({k['program'] for k in _C.kernels()}))}")
    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    rows = []
    for name in args.presets.split(","):
        if name not in PRESETS:
            parser.error(f"--presets has {name}, expected some of {', '.join(PRESETS)}")
        for m in map(int, tokens):
            if args.whole or args.head:
                for what, candidates in (head if args.head else whole)(PRESETS[name], dtype, m):
                    rows.append(measure_whole(name, m, what, candidates, args))
                    torch._dynamo.reset()
                continue
            for problem in problems(PRESETS[name], dtype, m):
                if not wanted or problem.program in wanted:
                    rows += measure_program(name, m, problem, args)
                    torch._dynamo.reset()
    if args.out:
        args.out.write_text(json.dumps(environment() | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
