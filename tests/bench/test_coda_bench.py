"""The microbenchmark's command line, and on a GPU its results. CODA_BENCH names the binary, default build/bench/coda_bench."""
from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("CODA_BENCH") or ROOT / "build" / "bench" / "coda_bench")
SWEEPS = sorted((ROOT / "bench" / "sweeps").glob("*.txt"))
PROGRAMS = (
    "plain",
    "plain_residual",
    "rstd_swiglu",
    "rstd_swiglu_preactivation",
    "dswiglu",
    "rstd_geglu",
    "rstd_geglu_preactivation",
    "dgeglu",
    "rstd_act",
    "dact",
    "dact_layer",
    "rstd",
    "residual_sqsum",
    "norm_backward",
    "residual_moments",
    "layer_norm_backward",
    "rstd_rope",
    "rstd_rope_adjacent",
    "rstd_qknorm_rope",
    "lse_select",
    "lse_select_logits",
    "lse_select_exponentials",
    "lse_select_general",
    "lse_select_general_logits",
    "lse_select_general_exponentials",
    "dlogits",
    "dlogits_general",
)
HALVES = ("rstd_swiglu", "rstd_swiglu_preactivation", "rstd_geglu", "rstd_geglu_preactivation")
SMALL = ("-m", "264", "-n", "520", "-k", "192")
SMALL_HEADS = ("-m", "264", "-n", "1152", "-k", "192")  # whole heads of any width that kernels are built for


def small(program: str) -> tuple[str, ...]:
    return SMALL_HEADS if "rope" in program else SMALL


def program_of(key: str) -> str:
    return re.split(r"_(?:tn|nn|nt)_", key)[0]


pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built (cmake -S . -B build/bench; or set CODA_BENCH)")


def bench(*args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    command = [str(BINARY), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | (env or {}))


def refused(*args: object, env: dict[str, str] | None = None) -> str:
    """The one sentence with which a command line is refused."""
    done = bench(*args, env=env)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.fullmatch(r"coda_bench: .+\n", done.stderr), done.stderr
    return done.stderr


def keys() -> list[str]:
    done = bench("--list")
    assert done.returncode == 0, done.stderr
    return [line.split()[0] for line in done.stdout.splitlines()[1:-1]]


# --- without a GPU ------------------------------------------------------------------------------------------------------------------
def test_help_names_every_program_and_explains_n():
    done = bench("--help")
    assert done.returncode == 0 and done.stderr == ""
    for name in (*PROGRAMS, "--sweep", "--json", "--all-kernels", "--head-dim"):
        assert name in done.stdout
    assert "2F columns" in done.stdout and "2 M N_gemm K" in done.stdout
    assert bench("-h").stdout == done.stdout


def test_every_program_of_the_manifest_is_known():
    listed = subprocess.run([sys.executable, ROOT / "csrc" / "kernels.py", "--list"], capture_output=True, text=True, check=True)
    assert {program_of(key) for key in listed.stdout.split()} == set(PROGRAMS)


def test_list_has_a_row_for_each_kernel():
    lines = bench("--list").stdout.splitlines()
    assert lines[0].split() == ["kernel", "tile", "cluster", "stages", "shared", "memory", "threads"]
    assert lines[-1] == f"{len(lines) - 2} kernels"
    for line in lines[1:-1]:
        key, tile, cluster, stages, memory, threads = line.split()
        assert f"_{tile}_{cluster}_" in key
        assert int(stages) >= 2 and 0 < int(memory) <= 227 * 1024 and int(threads) % 128 == 0


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--frobnicate"], "unknown option --frobnicate; known are --program, -m"),
        (["-z"], "unknown option -z; known are"),
        (["--program", "nonesuch"], "unknown program 'nonesuch'; known are " + ", ".join(PROGRAMS)),
        (["--kernel", "nonesuch", *SMALL], "unknown kernel 'nonesuch'; known are "),
        (["--program", "plain", "--layout", "tt", *SMALL], "unknown layout 'tt'; known are tn, nn, nt"),
        (["--program", "plain", "--dtype", "fp8", *SMALL], "unknown dtype 'fp8'; known are bf16, fp16"),
        (["--raster", "k"], "unknown raster 'k'; known are m, n"),
        (["--program"], "--program needs a value"),
        (["-m"], "-m needs a value"),
        (["-m", "12a"], "-m takes a whole number"),
        (["-m", "0"], "-m takes a whole number"),
        (["--rounds", "-1"], "--rounds takes a whole number"),
        (["--program", "plain"], "-m, -n and -k are all needed"),
        (["--head-dim", "4"], "--head-dim takes a whole number from 8 to 1024, not '4'"),
        (["--program", "rstd_rope", "--head-dim", "20", *SMALL], "--head-dim takes a multiple of 8, not 20"),
        (["--program", "rstd_rope_adjacent", *SMALL], "-n 520 is no whole number of heads of --head-dim 64"),
        (SMALL, "--program is missing; known are plain"),
        (["plain", *SMALL], "unexpected argument 'plain'"),
        (["--sweep", "no/such/file"], "cannot read the sweep file no/such/file"),
    ],
)
def test_wrong_command_lines(args, what):
    assert what in refused(*args)


def test_a_forced_kernel_must_run_the_program():
    key = keys()[0]
    other = next(p for p in PROGRAMS if p != program_of(key))
    assert f"the kernel {key} runs " in refused("--kernel", key, "--program", other, *SMALL)
    assert "exclude each other" in refused("--kernel", key, "--all-kernels", *SMALL)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("# nothing\n\n", "holds no case"),
        ("# a comment\n--program plain -m 8 -n 8 -k 8 # another\n--program nonesuch\n", ":3: unknown program"),
        ("--program plain -m 8 -n 8 -k 8 --json x\n", ":1: --json holds for the whole run"),
        ("--program plain -m 8 -n 8\n", ":1: -m, -n and -k are all needed"),
    ],
)
def test_wrong_sweeps(tmp_path, text, what):
    path = tmp_path / "sweep.txt"
    path.write_text(text)
    assert what in refused("--sweep", path)


def test_without_a_gpu():
    env = {"CUDA_VISIBLE_DEVICES": ""}
    assert "no CUDA device" in refused("--program", "plain", *SMALL, env=env)
    # The shipped sweeps are read before a device is looked for.
    assert SWEEPS
    for path in SWEEPS:
        assert "no CUDA device" in refused("--sweep", path, env=env), path


# --- with a GPU ---------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def gpu() -> None:
    if not keys():
        pytest.skip("no kernels were built")
    done = bench("--kernel", keys()[0], "--rounds", 0, *small(program_of(keys()[0])))
    if done.returncode == 2 and ("no CUDA device" in done.stderr or "was built for" in done.stderr):
        pytest.skip(done.stderr.strip())


def built(program: str, dtype: str) -> list[str]:
    return [key for key in keys() if re.match(rf"{program}_(tn|nn|nt)_{dtype}_", key)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_results(gpu, tmp_path, program, dtype):
    if not built(program, dtype):
        pytest.skip(f"no kernel of {program} for {dtype} was built")
    path = tmp_path / "out.json"
    done = bench("--program", program, "--dtype", dtype, *small(program), "--rounds", 3, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["device"]["arch"].startswith("sm") and "--program" in report["command"]
    (result,) = report["results"]
    assert result["program"] == program and result["dtype"] == dtype and result["kernel"] in keys()
    assert result["n_gemm"] == result["n"] * (2 if program in HALVES else 1)
    assert result.get("head_dim") == (64 if "rope" in program else None)
    assert result["passed"] and result["reproducible"] and result["not_finite"] == 0 and result["overrun"] == 0
    for name, error in result["errors"].items():
        assert 0 < error <= result["bounds"][name]
    assert result["input_sets"] >= 2  # a few MB fit in any L2
    assert len(result["rounds_ms"]) == len(result["cublaslt"]["rounds_ms"]) == 3
    flops = 2 * 264 * result["n_gemm"] * 192
    assert result["tflops"] == pytest.approx(flops / result["ms"] / 1e9, rel=1e-6)
    assert 0 < result["cublaslt"]["error"] <= max(result["bounds"].values()) and result["cublaslt"]["ms"] > 0 and result["ratio"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rotary_kernels_get_the_heads_they_were_built_for(gpu, tmp_path, dtype):
    kernels = built("rstd_rope", dtype)
    if not kernels:
        pytest.skip(f"no kernel of rstd_rope for {dtype} was built")
    path = tmp_path / "out.json"
    for key in kernels:
        done = bench("--kernel", key, *SMALL_HEADS, "--rounds", 0, "--json", path)
        assert done.returncode == 0, done.stdout + done.stderr
        (result,) = json.loads(path.read_text())["results"]
        assert result["passed"] and key.endswith(f"_r{result['head_dim']}")
    assert "another rotary dimension" in refused("--kernel", kernels[0], "--head-dim", 96, *SMALL_HEADS)


@pytest.mark.gpu
@pytest.mark.parametrize("raster", ["m", "n"])
def test_every_kernel_with_forced_schedule(gpu, tmp_path, raster):
    path = tmp_path / "out.json"
    program = next((p for p in map(program_of, keys()) if p != "rstd_rope"), None)  # each of its kernels has heads of its own
    if program is None:
        pytest.skip("only kernels of rstd_rope were built")
    first = next(key for key in keys() if program_of(key) == program)
    layout, dtype = first[len(program) + 1 :].split("_")[:2]
    args = ("--program", program, "--layout", layout, "--dtype", dtype, "--all-kernels", "--rounds", 0, "--swizzle", 2, "--raster", raster)
    done = bench(*args, *small(program), "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())["results"]
    assert [r["kernel"] for r in results] == [key for key in keys() if key.startswith(f"{program}_{layout}_{dtype}_")]
    assert all(r["swizzle"] == 2 and r["raster"] == raster and "ms" not in r for r in results)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_shapes_at_the_edges(gpu, dtype):
    done = bench("--sweep", ROOT / "bench" / "sweeps" / "edges.txt", "--dtype", dtype, "--skip-missing")
    if "no kernel was built for any of the cases" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
def test_the_same_seed_gives_the_same_errors(gpu, tmp_path):
    def errors(seed: int) -> dict[str, float]:
        path = tmp_path / f"{seed}.json"
        assert bench("--kernel", keys()[0], *small(program_of(keys()[0])), "--rounds", 0, "--seed", seed, "--json", path).returncode == 0
        return json.loads(path.read_text())["results"][0]["errors"]

    assert errors(1) == errors(1) != errors(2)


@pytest.mark.gpu
def test_shapes_that_no_kernel_takes(gpu):
    n, k = (1152, 12) if program_of(keys()[0]).startswith("rstd_rope") else (12, 64)
    assert "no kernel for" in refused("--kernel", keys()[0], "-m", 16, "-n", n, "-k", k)


@pytest.mark.gpu
def test_an_unwritable_report_is_refused_before_the_run(gpu, tmp_path):
    assert "cannot write" in refused("--kernel", keys()[0], *small(program_of(keys()[0])), "--json", tmp_path / "no" / "folder" / "out.json")
