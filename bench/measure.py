"""Times the GEMM programs against torch.mm of the same operands, alternating in one process. Needs an SM90 GPU.

    python bench/measure.py --out bench/results/programs.json            the kernels that dispatch picks
    python bench/measure.py --mlp --out bench/results/mlp.json           the whole MLP beside eager and torch.compile
    python bench/measure.py --all-kernels --schedules                    every kernel and scheduler setting, for tuning

The bare GEMM and all candidates run in turn, a burst each, round after round, the first one changing; a ratio is the median over the rounds of (candidate / bare GEMM of
the same round). Inputs are normal random numbers, the card is warmed first.
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import json
import pathlib
import statistics
import subprocess
import sys

import torch
import torch.nn.functional as F
from triton.testing import do_bench

import coda
from coda._extension import _C, force_kernel

SHAPES = {"1b": (2048, 8192), "8b": (4096, 14336)}  # D, F
M = 16384


def milliseconds(f, rep: int) -> float:
    return do_bench(f, warmup=10, rep=rep, return_mode="median")


def problems(name: str, dtype: torch.dtype) -> dict:
    """program -> (candidate, bare GEMM)."""
    d, f = SHAPES[name]
    rnd = lambda *s, scale=1.0: torch.randn(*s, device="cuda", dtype=dtype) * scale
    x, w, w_down, z = rnd(M, d), rnd(2 * f, d, scale=d**-0.5), rnd(d, f, scale=f**-0.5), rnd(M, 2 * f)
    y, res, r = rnd(M, f), rnd(M, d), torch.rand(M, device="cuda") + 0.5
    z_out, y_out, x_out = torch.empty_like(z), torch.empty_like(y), torch.empty_like(x)
    dw_out = torch.empty_like(w)
    ops = torch.ops.coda
    gate_up = lambda: torch.mm(x, w.t(), out=z_out)
    down = lambda: torch.mm(y, w_down.t(), out=x_out)
    return {
        "rstd_swiglu_preactivation": (lambda: ops.rstd_swiglu(x, r, w, None, True), gate_up),
        "rstd_swiglu": (lambda: ops.rstd_swiglu(x, r, w, None, False), gate_up),
        "dswiglu": (lambda: ops.dswiglu(x, w_down, z, r), lambda: torch.mm(x, w_down, out=y_out)),
        "plain_residual": (lambda: ops.gemm(y, w_down.t(), None, res), down),
        "plain:tn gate-up": (lambda: ops.gemm(x, w.t()), gate_up),
        "plain:tn down": (lambda: ops.gemm(y, w_down.t()), down),
        "plain:nn gate-up dgrad": (lambda: ops.gemm(z, w), lambda: torch.mm(z, w, out=x_out)),
        "plain:nt gate-up wgrad": (lambda: ops.gemm(z.t(), x), lambda: torch.mm(z.t(), x, out=dw_out)),
    }


def one_program(shape: str, name: str, candidate, bare, args: argparse.Namespace) -> list[dict]:
    """Every setting of one program and the bare GEMM in turn, round after round."""
    program, _, rest = name.partition(":")
    keys = [None]
    if args.all_kernels or program == "plain":
        layout = rest[:2] if rest else {"dswiglu": "nn"}.get(program, "tn")
        keys = [k["key"] for k in _C.kernels() if (k["program"], k["layout"], k["dtype"]) == (program, layout, args.dtype)]
    schedules = [(s, r) for s in (1, 2, 4, 8) for r in (1, 2)] if args.schedules else [(0, 0)]
    settings = [(key, *schedule) for key in keys for schedule in schedules]
    times: dict = {setting: [] for setting in settings}
    bare_times, backends = [], {}

    def time_bare() -> None:
        bare_times.append(milliseconds(bare, args.rep))

    def time_candidate(setting: tuple) -> None:
        key, swizzle, raster = setting
        with force_kernel(key) if key else contextlib.nullcontext():
            _C.force_schedule(swizzle, raster)
            times[setting].append(milliseconds(candidate, args.rep))
            backends[setting] = coda.backend_of_last_call()
            _C.force_schedule(0, 0)

    # What runs after an idle moment or a cooler burst looks faster, so everybody takes every place in turn.
    turns = [time_bare, *(functools.partial(time_candidate, setting) for setting in settings)]
    for i in range(args.rounds):
        for turn in turns[i % len(turns) :] + turns[: i % len(turns)]:
            turn()
    rows = []
    mm = statistics.median(bare_times)
    for (key, swizzle, raster), t in times.items():
        ms, ratio = statistics.median(t), statistics.median(c / b for c, b in zip(t, bare_times))
        backend = backends[key, swizzle, raster]
        rows.append({"shape": shape, "program": name, "backend": backend, "swizzle": swizzle, "raster": raster, "ms": ms, "torch_mm_ms": mm, "ratio": ratio})
    rows.sort(key=lambda row: row["ratio"])
    for row in rows[: 6 if args.schedules else None]:
        print("{shape} {program:26s} {ms:8.4f} ms  mm {torch_mm_ms:8.4f}  ratio {ratio:.4f}  swizzle {swizzle} raster {raster}  {backend}".format(**row), flush=True)
    return rows


def whole_mlp(name: str, dtype: torch.dtype, rounds: int, rep: int) -> list[dict]:
    """norm + MLP + residual, forward and forward + backward: CODA, torch eager, torch.compile and the bare GEMMs, in turn."""
    d, f = SHAPES[name]
    rnd = lambda *s, scale=1.0: (torch.randn(*s, device="cuda", dtype=dtype) * scale).requires_grad_()
    x, w, w_down, g = rnd(M, d), rnd(2 * f, d, scale=d**-0.5), rnd(d, f, scale=f**-0.5), rnd(d)
    leaves, grad = (x, w, w_down, g), torch.randn(M, d, device="cuda", dtype=dtype)

    def eager(x, w, w_down, g):
        gate, up = F.linear(F.rms_norm(x, (d,), g, 1e-6), w).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, w_down)

    functions = {"coda": lambda *t: coda.fused_mlp_forward(*t[:3], norm_weight=t[3], residual=t[0]), "eager": eager, "compile": torch.compile(eager)}

    def forward(function):
        with torch.no_grad():
            function(*leaves)

    with torch.no_grad():
        z, y = torch.randn(M, 2 * f, device="cuda", dtype=dtype), torch.randn(M, f, device="cuda", dtype=dtype)

    @torch.no_grad()
    def gemms(backward: bool) -> None:
        torch.mm(x, w.t()), torch.mm(y, w_down.t())
        if backward:
            torch.mm(grad, w_down), torch.mm(grad.t(), y), torch.mm(z, w), torch.mm(z.t(), x)

    rows = []
    for what, run, bare in (
        ("mlp forward", forward, lambda: gemms(False)),
        ("mlp forward + backward", lambda function: torch.autograd.grad(function(*leaves), leaves, grad), lambda: gemms(True)),
    ):
        candidates = {n: (lambda function=function: run(function)) for n, function in functions.items()} | {"bare GEMMs": bare}
        times = {n: [] for n in candidates}
        for _ in range(rounds):
            for n, candidate in candidates.items():
                times[n].append(milliseconds(candidate, rep))
        medians = {n: statistics.median(t) for n, t in times.items()}
        rows.append({"shape": name, "program": what, **{f"{n} ms": t for n, t in medians.items()}})
        print(f"{name} {what:28s} " + "  ".join(f"{n} {t:.4f} ms" for n, t in medians.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="1b,8b")
    parser.add_argument("--programs", default="", help="comma-separated beginnings of program names, default all")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rep", type=int, default=60, help="milliseconds a burst")
    parser.add_argument("--mlp", action="store_true", help="the whole MLP instead, beside eager and torch.compile")
    parser.add_argument("--all-kernels", action="store_true")
    parser.add_argument("--schedules", action="store_true", help="also every swizzle and raster order")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    a = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    do_bench(lambda: a @ a, warmup=1000, rep=500)

    rows = []
    for shape in args.shapes.split(","):
        if args.mlp:
            rows += whole_mlp(shape, dtype, args.rounds, args.rep)
            continue
        for name, (candidate, bare) in problems(shape, dtype).items():
            if not args.programs or name.startswith(tuple(args.programs.split(","))):
                rows += one_program(shape, name, candidate, bare, args)
    if args.out:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip()
        args.out.write_text(json.dumps({"card": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__, "commit": commit,
                                        "command": " ".join(["python", *sys.argv]), "tokens": M, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
