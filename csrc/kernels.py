"""The manifest: which kernels exist, and the sources that instantiate them, small files with a few kernels each.

setup.py and CMakeLists.txt both read it, so that the extension and the microbenchmark hold the same kernels. It needs nothing but
the standard library. From a shell:

    python csrc/kernels.py --list                                       what would be built
    python csrc/kernels.py --out DIR [--arch sm90] [--programs a,b]     write the sources, print their paths
"""
from __future__ import annotations

import argparse
import dataclasses
import pathlib
from typing import ClassVar, Iterable

DTYPES = {
    "sm90": {"bf16": "cutlass::bfloat16_t", "fp16": "cutlass::half_t"},
    "sm80": {"bf16": "sm80::bf16", "fp16": "sm80::fp16"},
}
RASTER = {"m": 1, "n": 2}  # GemmArguments::raster
LAYOUTS = {"tn": "kTN", "nn": "kNN", "nt": "kNT"}  # coda::sm90::Layout, coda::sm80::Layout; registry.h says what they mean


@dataclasses.dataclass(frozen=True)
class Config:
    """One tile configuration of an SM90 kernel, see csrc/sm90/config.hpp.

    rate is the relative speed of a full wave, measured on large problems with 1.0 for the fastest configuration of the program: dispatch
    takes the configuration with the least (waves x tile area / rate), so small problems get small tiles. min_k: from this K on the rate holds; for
    a shorter one the configuration is slow.
    """

    arch: ClassVar[str] = "sm90"
    few_rows: ClassVar[bool] = False
    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    schedule: str
    epilogue_n: int = 32
    stages_load: int = 4
    stages_store: int = 2
    subtiles_per_store: int = 1
    raster: str = "n"
    rate: float = 1.0
    min_k: int = 0
    tag: str = ""  # tells apart configurations that differ in the epilogue only

    @property
    def name(self) -> str:
        tile = "x".join(map(str, self.tile))
        return f"{tile}_{self.cluster[0]}x{self.cluster[1]}_{self.schedule}" + (f"_{self.tag}" if self.tag else "")

    @property
    def cpp(self) -> str:
        numbers = ", ".join(map(str, (*self.tile, *self.cluster)))
        schedule = {"pingpong": "kPingpong", "cooperative": "kCooperative"}[self.schedule]
        return (
            f"coda::sm90::Config<{numbers}, coda::sm90::Schedule::{schedule}, {self.epilogue_n}, {self.stages_load}, "
            f"{self.stages_store}, {self.subtiles_per_store}>"
        )

    @property
    def order(self) -> str:
        """The template arguments for the order of tiles."""
        return str(RASTER[self.raster])


@dataclasses.dataclass(frozen=True)
class Sm80Config:
    """One tile configuration of an SM80 kernel, see csrc/sm80/config.hpp. swizzle: tiles of a band. rate as in Config."""

    arch: ClassVar[str] = "sm80"
    tile: tuple[int, int, int]
    warps: tuple[int, int]
    stages: int
    blocks: int  # a multiprocessor
    swizzle: int = 8
    raster: str = "m"
    rate: float = 1.0
    min_k: int = 0
    splits: bool = False  # there is code to split K

    @property
    def few_rows(self) -> bool:
        """For products of few rows, as when a model generates text: they read weights, which no tensor core makes faster, with all multiprocessors.
        Better at that than any kernel of SM90, so it is compiled for that too."""
        return self.splits and self.tile[0] <= 64

    @property
    def name(self) -> str:
        return f"{'x'.join(map(str, self.tile))}_{self.stages}_sm80"

    @property
    def cpp(self) -> str:
        return f"coda::sm80::Config<{', '.join(map(str, (*self.tile, *self.warps, self.stages, self.blocks)))}, {str(self.splits).lower()}>"

    @property
    def order(self) -> str:
        return f"{self.swizzle}, {RASTER[self.raster]}"


@dataclasses.dataclass(frozen=True)
class Kernel:
    program: str
    cpp: str  # the program's type
    header: str  # where it is defined, relative to csrc
    layout: str
    dtype: str
    config: Config | Sm80Config

    @property
    def arch(self) -> str:
        return self.config.arch

    @property
    def few_rows(self) -> bool:
        return self.config.few_rows

    @property
    def key(self) -> str:
        return f"{self.program}_{self.layout}_{self.dtype}_{self.config.name}"

    @property
    def source(self) -> str:
        """The stem of the file that instantiates it, together with all kernels of its family that have the same layout and tile configuration: most
        of a compilation goes into CUTLASS's templates, which such kernels share, so that a second one is almost free."""
        return f"{pathlib.PurePath(self.header).stem}_{self.layout}_{self.config.name}"

    @property
    def definition(self) -> str:
        arguments = f"{self.cpp}, {self.config.cpp}, {DTYPES[self.arch][self.dtype]}, {self.arch}::Layout::{LAYOUTS[self.layout]}, {self.config.order}"
        few_rows = ", true" if self.few_rows else ""
        return f"""extern KernelInfo const {self.key};
KernelInfo const {self.key} = {self.arch}::describe<{arguments}>(
    "{self.key}", "{self.program}", "{self.layout}", "{self.dtype}", {self.config.rate}, {self.config.min_k}{few_rows});
"""


# The configurations for SM90, with the reason for each. All have a K tile of 64: 128 bytes, the widest swizzle that TMA and wgmma share. The ratios
# are times over torch.mm's at M = 16384 and the shapes of the presets 1b and 8b of coda/bench.py, from bench/results/programs.json and
# tuning.json; they repeat to a few per cent.
#
# Pingpong hides the epilogue of one tile under the products of the next, so it pays where the epilogue is long. At these sizes the tensor cores
# are busy 98 % of the time and the card's power limit sets the clock, so what saves energy saves time: fewer bytes from memory and the
# second-level cache, by clusters that share a load and by raster orders that keep operands near.

# 192 columns are 192 accumulators a thread, the most that leaves room for an epilogue without spilling; the wide tile saves loads of A.
#   rstd_swiglu_preactivation   128x192 (0.99, 0.99)   128x128 (0.97, 1.01)   128x192 cluster 2x1, subtile 64 (0.96, 1.01)
#   rstd_swiglu                 128x192 (0.98, 0.99)   128x128 (0.95, 0.99)
PINGPONG_192 = Config((128, 192, 64), (1, 1), "pingpong", epilogue_n=32, stages_load=2, stages_store=2)
# Tile loads and a second tile store with subtiles of 32 do not fit beside 192 accumulators, they spill: residual_sqsum with 128x192 takes 1.2 to 1.8.
#   residual_sqsum, out-projection (1.04 to 1.09, 0.97 to 1.04), down-projection (1.03 to 1.07, 1.01 to 1.04); cluster 1x1 the same to noise
#   norm_backward, gate-up (1.04 to 1.08, 1.03 to 1.07); clusters 4x1 and 2x2 take 2 to 5 % longer
PINGPONG_128 = Config((128, 128, 64), (2, 1), "pingpong", epilogue_n=32, stages_load=4, stages_store=2, rate=0.97)
# One tile of loads leaves room for four of stores, of which two share a fence: out-projection (1.03 to 1.04, 0.96 to 0.97) against (1.04 to 1.06, 0.98),
# down-projection (0.99 to 1.00, 0.98 to 1.01) against (1.00, 0.99). For norm_backward that is no better (1.01 to 1.02, 1.05 to 1.07) against (1.04, 1.03 to 1.06).
RESIDUAL_128 = dataclasses.replace(PINGPONG_128, stages_store=4, subtiles_per_store=2)
# Gated units: at K = 2048 the two are as fast with pauses, back to back 128x128 is (0.97) against (1.00); from 3072 on 128x192 takes 0.98 to 1.00, back to
# back 1.02, where 128x128 takes 1.01 to 1.03 and 1.05.
PINGPONG_192_LONG = dataclasses.replace(PINGPONG_192, min_k=3072)
# One output tensor and a short epilogue: the largest tile wins on large products. Residual: (1.050, 1.007), 128x128 (1.001, 1.028).
COOPERATIVE_256 = Config((128, 256, 64), (2, 1), "cooperative", epilogue_n=32, stages_load=4, stages_store=2, raster="m")
# With tile loads the largest tile is better for long products where launches follow each other back to back, as in training: the card then has less
# power than in measurements with pauses, and what counts is the energy of the mainloop. It reads a third less from the second-level cache than 128x128
# and half from memory, where blocks that drift apart along K read again what others have read. Against 128x128, with torch.mm at 1 (tuning.json, runs 6 to 8):
#   norm_backward, gate-up: 1b (1.06 to 1.09 against 1.08 to 1.14), 8b (1.03 against 1.05 to 1.12); qkv: 1b (1.31 against 1.18), 8b (1.15 against 1.09)
#   residual_sqsum, down-projection: 1b (1.08 against 1.07 to 1.13), 8b (1.03 to 1.06 against 1.05 to 1.10)
# Worse than that: 64x256 pingpong, 256x128 and 128x192 cooperative, a subtile of 32 with one of stores. Blocks that wait for the slowest halve
# norm_backward's reads from memory once more, 8.7 GB to 4.5 GB at 8b, and save 1 % of its time.
COOPERATIVE_256_LOADS = dataclasses.replace(COOPERATIVE_256, epilogue_n=16, stages_load=2, min_k=12288, tag="e16")
# Five tiles of memory traffic in one epilogue (gate, up; dgate, dup, product): (1.02 to 1.06, 1.04 to 1.07), with CUTLASS's loops (1.09 to 1.13, 1.04 to 1.08).
# Others, no better: a cluster of two (1.09, 1.07); four of loads (1.05, 1.08); four of stores (1.09, 1.08), that share fences by two (1.09, 1.08; 1.15, 1.06
# with a cluster); one of loads and a sixth mainloop stage (1.15 to 1.18, 1.04 to 1.07). (bench/results/tuning.json, runs 13 to 15.)
DSWIGLU_128 = Config((128, 128, 64), (1, 1), "pingpong", epilogue_n=32, stages_load=2, stages_store=2, rate=0.97)
# 192 accumulators leave room for a subtile of 16 columns, and four of them share a fence. With pauses it is as fast (1.07 to 1.08, 1.02 to 1.05), back to
# back faster for long products: (1.12, 1.10) against (1.11, 1.13). residual_sqsum and norm_backward are slower with it (1.15 to 1.33, 1.02 to 1.11).
DSWIGLU_192 = Config((128, 192, 64), (2, 1), "pingpong", epilogue_n=16, stages_load=4, stages_store=8, subtiles_per_store=4, min_k=3072, tag="e16")
# Beside the gradient of an activation with several kinds, sums of rows and of columns, 128 accumulators leave few registers. 64x128 and 128x128
# (bench/results/tuning.json, runs 11 and 14):
#   dact (1.22, 1.30), (1.24, 1.07), without a cluster (1.21, 1.18)   dact_layer (1.89, 1.41), (3.37, 1.93), cooperative (1.89, 1.45); 128x64 (1.98, 1.56)
DACT_64 = Config((64, 128, 64), (2, 1), "pingpong", epilogue_n=32, stages_load=4, stages_store=2, rate=0.95)
DACT_128 = dataclasses.replace(PINGPONG_128, stages_load=2, min_k=3072)
# Rotate-half: the subtile is as wide as the part of a head that turns (layouts.hpp), so there is a configuration for each width. 128x192 with a
# subtile of 64 spills: it takes 1.3 times as long at 1b.
ROPE_32 = Config((128, 128, 64), (2, 1), "pingpong", epilogue_n=32, stages_store=2, tag="r32")
ROPE_64 = Config((128, 128, 64), (2, 1), "pingpong", epilogue_n=64, stages_store=2, tag="r64")
ROPE_128 = Config((128, 128, 64), (2, 1), "pingpong", epilogue_n=128, stages_store=2, tag="r128")

# Neighbours turn in a subtile of any width. Each waits once for its tables: (1.34, 1.08) with a wide one, (1.51, 1.04) with a narrow one; 128x192 spills (1.67, 1.11;
# bench/results/tuning.json, run 11).
ROPE_ADJACENT_64 = dataclasses.replace(PINGPONG_128, epilogue_n=64, tag="e64")
ROPE_ADJACENT_32 = dataclasses.replace(PINGPONG_128, rate=1.0, min_k=3072)

# Its operand from the left is the wide one (twice the feed-forward width), so tiles of one column follow each other: (1.019, 1.019) for gate-up
# against (1.042, 1.049) the other way (bench/results/tuning.json).
NORM_BACKWARD_128 = dataclasses.replace(PINGPONG_128, raster="m")

# A subtile is a group of columns that have a reference (sinks.hpp): there are few steps from subtile to subtile, and few maxima to find, with wide ones.
# 8192 tokens, launches of 2048, 128256 classes, over torch.mm's time (bench/results/tuning.json, runs 9 and 10):
#   lse_select_exponentials, subtiles of 64: 128x192 (1.00, 1.01), 128x128 (1.05, 1.05); 128x128 with subtiles of 32 (1.22, 1.05)
#   lse_select: 128x192 (0.99, 1.00), 128x128 (1.01, 1.03)
# 192 columns take all registers, so a bias, a cap and totals are left to programs of their own; with them 128x192 spills (lse_select 1.98, 1.37). dlogits
# with 128x192 would spill, too.
SOFTMAX_128 = dataclasses.replace(PINGPONG_128, epilogue_n=64)
SOFTMAX_192 = Config((128, 192, 64), (2, 1), "pingpong", epilogue_n=64)

# The configurations for SM80, measured on 9.0 only (bench/results/sm80.json: times over the best plain SM80 kernel's). A warp's tile is 64 x 64, the largest
# whose accumulators leave room for two sets of fragments. Two blocks of 128 x 128 on a multiprocessor: the epilogue of one runs under the products of the
# other, and on 8.6, whose shared memory takes one of them, there is less to hide. One of 128 x 256 loads a quarter less, but most of its epilogue is
# exposed. 128x128 and 128x256, (1b, 8b):
#   norm_backward, gate-up (1.09, -), (1.06, -); qkv (1.13, -), (1.14, -)    residual_sqsum, out (1.16, 1.10), (1.16, 1.04); down (1.06, 1.05), (1.04, 1.05)
#   rstd_swiglu_preactivation (1.01, 1.07), (1.03, 1.03)    rstd_rope (1.13, 1.07), (1.15, 1.10)    dswiglu (1.18, -), (1.26, -)
# Small products get a tile for more multiprocessors. For the plain product 256x128 and 128x128x64 with three stages are no better. The best of nine
# configurations of CUTLASS 2.x's device::Gemm takes 1.247, 2.625, 1.936 and 4.417 ms for down and gate-up at 1b, qkv and down at 8b; 128x256 with bands along N
# takes 1.236, 2.624, 1.923 and 4.350, along M 1.235, 2.701, 1.948 and 4.483. CUTLASS 3.x's collective takes 1.320 and 3.021 for the first two.
SQUARE = Sm80Config((128, 128, 32), (2, 2), stages=4, blocks=2, rate=0.97)
WIDE = Sm80Config((128, 256, 32), (2, 4), stages=4, blocks=1, min_k=6144)
WIDE_FROM_4096 = dataclasses.replace(WIDE, min_k=4096)
# It splits K, too: with few tokens there are fewer tiles than multiprocessors, and what counts is how many of them read the weights.
SMALL = Sm80Config((64, 128, 32), (2, 2), stages=4, blocks=3, rate=0.8, splits=True)


def manifest() -> list[Kernel]:
    """Every kernel of the project, in the order in which dispatch breaks ties."""
    rows: list[Kernel] = []

    def add(program: str, cpp: str, header: str, layouts: Iterable[str], configs: Iterable[Config]) -> None:
        rows.extend(Kernel(program, cpp, header, layout, dtype, c) for layout in layouts for dtype in ("bf16", "fp16") for c in configs)

    plain = "programs/plain.hpp"
    # Most calls without a program go to torch's library, so one configuration has to do for what is rare.
    add("plain", "Plain", plain, ("tn",), (COOPERATIVE_256, PINGPONG_128))
    add("plain", "Plain", plain, ("nn", "nt"), (COOPERATIVE_256,))
    add("plain_residual", "PlainResidual", plain, ("tn",), (COOPERATIVE_256, PINGPONG_128))
    add("plain_residual", "PlainResidual", plain, ("nn", "nt"), (PINGPONG_128,))
    glu = "programs/glu.hpp"
    add("rstd_swiglu", "RstdGlu<Silu>", glu, ("tn",), (PINGPONG_192_LONG, PINGPONG_128))
    add("rstd_swiglu_preactivation", "RstdGluPreactivation<Silu>", glu, ("tn",), (PINGPONG_192_LONG, PINGPONG_128))
    add("dswiglu", "DGlu<Silu>", glu, ("nn",), (DSWIGLU_128, DSWIGLU_192))
    add("rstd_geglu", "RstdGlu<Gelu>", glu, ("tn",), (PINGPONG_128,))
    add("rstd_geglu_preactivation", "RstdGluPreactivation<Gelu>", glu, ("tn",), (PINGPONG_128,))
    add("dgeglu", "DGlu<Gelu>", glu, ("nn",), (DSWIGLU_128,))
    activation = "programs/activation.hpp"
    add("rstd_act", "RstdAct", activation, ("tn",), (PINGPONG_128,))
    add("dact", "DAct", activation, ("nn",), (DACT_64, DACT_128))
    add("dact_layer", "DActLayer", activation, ("nn",), (DACT_64,))
    norm = "programs/norm.hpp"
    add("rstd", "RstdLinear", norm, ("tn",), (PINGPONG_192, PINGPONG_128))
    add("residual_sqsum", "ResidualSqsum", norm, ("tn",), (RESIDUAL_128, COOPERATIVE_256_LOADS))
    add("norm_backward", "NormBackward", norm, ("nn",), (NORM_BACKWARD_128, COOPERATIVE_256_LOADS))
    add("residual_moments", "ResidualMoments", norm, ("tn",), (RESIDUAL_128,))
    add("layer_norm_backward", "LayerNormBackward", norm, ("nn",), (PINGPONG_128,))
    rope = "programs/rope.hpp"
    add("rstd_rope", "RstdRope<Pairing::kHeadHalves>", rope, ("tn",), (ROPE_32, ROPE_64, ROPE_128))
    add("rstd_qknorm_rope", "RstdQkNormRope", rope, ("tn",), (ROPE_64, ROPE_128))
    add("rstd_rope_adjacent", "RstdRope<Pairing::kAdjacent>", rope, ("tn",), (ROPE_ADJACENT_64, ROPE_ADJACENT_32))
    loss = "programs/loss.hpp"
    # Of three that differ in what they store each has the same one configuration: then the loss has the same bits whatever is stored beside.
    for suffix in ("", "_logits", "_exponentials"):
        stored = suffix.title().replace("_", "")
        add(f"lse_select{suffix}", f"LseSelect{stored}", loss, ("tn",), (SOFTMAX_192,))
        add(f"lse_select_general{suffix}", f"LseSelectGeneral{stored}", loss, ("tn",), (SOFTMAX_128,))
    add("dlogits", "DLogits", loss, ("tn",), (PINGPONG_128,))
    add("dlogits_general", "DLogitsGeneral", loss, ("tn",), (PINGPONG_128,))
    # Every one of them for SM80 too. The statistics of the loss have tiles of one width, whose rows are summed in the same order: the same bits again.
    for program, cpp, header, layout in dict.fromkeys((k.program, k.cpp, k.header, k.layout) for k in rows):
        configs = SQUARE, WIDE_FROM_4096 if program in ("residual_sqsum", "rstd_swiglu", "rstd_swiglu_preactivation") else WIDE, SMALL
        if header == loss:
            # A vocabulary has tiles enough, and the bits of a loss must not depend on how many tokens there are.
            small = dataclasses.replace(SMALL, splits=False)
            configs = (SQUARE, small) if program.startswith("lse_select") else (SQUARE, WIDE, small)
        if program == "plain":
            # Gradients of small weights are short in M and N and as long as there are tokens in K. Nothing is fused to them.
            configs = tuple(dataclasses.replace(c, splits=True) for c in (SQUARE, dataclasses.replace(WIDE, raster="n"), SMALL))
        add(program, cpp, header, (layout,), configs)
    keys = [k.key for k in rows]
    assert len(set(keys)) == len(keys), "two kernels of the manifest share a key"
    return rows


def select(kernels: Iterable[Kernel], programs: str | None) -> list[Kernel]:
    """The kernels of the comma-separated programs, all of them for None. Raises ValueError for an unknown name."""
    kernels = list(kernels)
    if not programs:
        return kernels
    wanted = [p.strip() for p in programs.split(",") if p.strip()]
    known = sorted({k.program for k in kernels})
    for name in wanted:
        if name not in known:
            raise ValueError(f"unknown program {name!r}; the manifest has {', '.join(known)}")
    return [k for k in kernels if k.program in wanted]


@dataclasses.dataclass(frozen=True)
class Code:
    """What the kernels of an architecture are compiled to."""

    arch: str
    capability: str  # such as 8.6
    ptx: bool = False
    few_rows: bool = False  # none but the kernels for few rows, beside those of another architecture


# By default, and in the microbenchmark. wgmma and TMA multicast need the `a` feature set, whose code runs on this very architecture alone. Of SM80's
# kernels the PTX serves all newer devices that have none of their own.
CODE = {"sm90": (Code("sm90", "9.0"),), "sm80": (Code("sm80", "8.0"), Code("sm80", "8.6"), Code("sm80", "8.0", ptx=True))}


def registry_source(kernels: Iterable[Kernel], code: Iterable[Code] = ()) -> str:
    """The table behind coda::kernel_table()."""
    keys, code = [k.key for k in kernels], list(code)
    declarations = "".join(f"extern KernelInfo const {key};\n" for key in keys)
    entries = "".join(f"    &{key},\n" for key in keys)
    table = f"static KernelInfo const* const table[] = {{\n{entries}}};\n" if keys else ""
    entries = "".join(f'    {{"{c.arch}", {c.capability.replace(".", "")}, {str(c.ptx).lower()}, {str(c.few_rows).lower()}}},\n' for c in code)
    table += f"static CodeInfo const code[] = {{\n{entries}}};\n" if code else ""
    body = f"{{{'table' if keys else 'nullptr'}, {len(keys)}, {'code' if code else 'nullptr'}, {len(code)}}}"
    return f"""// Generated by csrc/kernels.py.
#include "coda/registry.h"
namespace coda {{
{declarations}{table}KernelTable kernel_table() {{ return {body}; }}
}}  // namespace coda
"""


def source_text(kernels: list[Kernel]) -> str:
    """The file of kernels that share one."""
    return f"""// Generated by csrc/kernels.py.
#include "{kernels[0].header}"
#include "{kernels[0].arch}/gemm.hpp"
namespace coda {{
{"".join(k.definition for k in kernels)}}}  // namespace coda
"""


def write_sources(out: pathlib.Path, kernels: Iterable[Kernel], code: Iterable[Code] = ()) -> list[pathlib.Path]:
    """Writes the .cu files that hold `kernels` and registry.cpp, which lists these kernels, into `out`. Files that would not change keep their time
    stamp; a .cu file holds all its kernels whatever the selection, so that another selection does not change it."""
    kernels = list(kernels)
    out.mkdir(parents=True, exist_ok=True)
    sources: dict[str, list[Kernel]] = {k.source: [] for k in kernels}
    for k in manifest():
        if k.source in sources:
            sources[k.source].append(k)
    files = {out / f"{name}.cu": source_text(held) for name, held in sources.items()} | {out / "registry.cpp": registry_source(kernels, code)}
    for path, text in files.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for stale in out.glob("*.cu"):
        if stale not in files:
            stale.unlink()
    return list(files)


def main() -> None:
    parser = argparse.ArgumentParser(description="List the kernels of the manifest, or write their sources.")
    parser.add_argument("--list", action="store_true", help="print the keys")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the generated sources")
    parser.add_argument("--programs", help="comma-separated programs, default all")
    parser.add_argument("--arch", choices=sorted(DTYPES), help="the kernels of this architecture, default all")
    args = parser.parse_args()
    try:
        kernels = [k for k in select(manifest(), args.programs) if args.arch in (None, k.arch)]
    except ValueError as e:
        parser.error(str(e))
    if args.list or not args.out:
        print("\n".join(k.key for k in kernels))
    if args.out:
        code = [c for arch, codes in CODE.items() if args.arch in (None, arch) for c in codes]
        print("\n".join(map(str, write_sources(args.out, kernels, code))))


if __name__ == "__main__":
    main()
