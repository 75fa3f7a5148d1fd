import os
import pathlib
import re
import subprocess
import sys

import pytest
from stubs import write_cutlass, write_toolkit

from build_support import settings
from build_support.settings import ROOT, Arch, BuildError, Torch, available_memory, job_count, make_plan, parse_archs

CUDA_TORCH = Torch("2.11.0+cu130", "13.0")
CPU_TORCH = Torch("2.13.0+cpu", None)


# TORCH_CUDA_ARCH_LIST


@pytest.mark.parametrize(
    "text, names, ptx",
    [
        (None, ["8.0", "8.6", "9.0a"], []),
        ("", ["8.0", "8.6", "9.0a"], []),
        ("9.0", ["9.0a"], []),
        ("9.0a", ["9.0a"], []),
        ("9.0+PTX", ["9.0a"], ["9.0"]),
        ("12.0;8.0;9.0a", ["8.0", "9.0a", "12.0"], []),
        ("8.0 9.0", ["8.0", "9.0a"], []),
        ("8.0, 9.0;", ["8.0", "9.0a"], []),
        ("9.0;9.0a", ["9.0a"], []),
        ("7.5 8.0 12.0+PTX 12.0", ["7.5", "8.0", "12.0"], ["12.0"]),
    ],
)
def test_archs(text, names, ptx):
    archs = parse_archs(text)
    assert [a.name for a in archs] == names
    assert [a.capability for a in archs if a.ptx] == ptx


@pytest.mark.parametrize("text", ["Hopper", "9", "90", "sm_90", "9.0b", "9.0+ptx9", "8.0:9.0"])
def test_archs_rejects(text):
    with pytest.raises(BuildError, match="TORCH_CUDA_ARCH_LIST"):
        parse_archs(text)


def test_gencode():
    assert Arch("8.0").gencode == ["-gencode=arch=compute_80,code=sm_80"]
    assert Arch("12.0", ptx=True).gencode == ["-gencode=arch=compute_120,code=sm_120", "-gencode=arch=compute_120,code=compute_120"]


# What the kernels of an architecture are compiled to, by TORCH_CUDA_ARCH_LIST and CODA_FORCE_ARCH: compute capabilities, and PTX.
@pytest.mark.parametrize(
    "text, forced, code",
    [
        (None, None, {"sm80": "8.0 8.6 8.0+PTX 9.0 few rows", "sm90": "9.0"}),
        ("8.0;8.6;9.0", "", {"sm80": "8.0 8.6 8.0+PTX 9.0 few rows", "sm90": "9.0"}),
        ("9.0", None, {"sm80": "9.0 few rows", "sm90": "9.0"}),
        ("8.0", None, {"sm80": "8.0 8.0+PTX"}),
        ("8.9", None, {"sm80": "8.6 8.0+PTX"}),
        ("8.6;8.9;12.0", None, {"sm80": "8.6 12.0 8.0+PTX"}),
        ("7.5", None, {}),
        ("9.0", "sm80", {"sm80": "9.0 8.0+PTX"}),
        (None, "sm90", {"sm90": "9.0"}),
    ],
)
def test_kernel_code(text, forced, code):
    environ = {} if forced is None else {"CODA_FORCE_ARCH": forced}
    found = settings.select_code(environ, parse_archs(text))
    assert {arch: " ".join(c.capability + "+PTX" * c.ptx + " few rows" * c.few_rows for c in codes) for arch, codes in found.items()} == code
    assert {k.arch for k in settings.select_kernels({}, found)} == set(code)


def test_kernel_gencode():
    flags = lambda text: {arch: " ".join(settings.kernel_gencode(code)) for arch, code in settings.select_code({}, parse_archs(text)).items()}
    assert flags("9.0") == {"sm90": "-gencode=arch=compute_90a,code=sm_90a", "sm80": "-gencode=arch=compute_90,code=sm_90"}
    assert flags("8.6") == {"sm80": "-gencode=arch=compute_86,code=sm_86 -gencode=arch=compute_80,code=compute_80"}


def test_an_unknown_architecture_is_refused():
    with pytest.raises(BuildError, match="CODA_FORCE_ARCH=sm70 is none of sm80, sm90"):
        settings.select_code({"CODA_FORCE_ARCH": "sm70"}, parse_archs(None))


def test_every_arch_of_the_manifest_can_be_compiled():
    assert {k.arch for k in settings.manifest.manifest()} == set(settings.manifest.CODE) == set(settings.select_code({}, parse_archs(None)))


# MAX_JOBS


def fake_machine(root: pathlib.Path, available: int, limit: str = "max", used: int = 0) -> int:
    (root / "proc").mkdir()
    (root / "proc" / "meminfo").write_text(f"MemTotal: {2 * available // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n")
    group = root / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(limit)
    (group / "memory.current").write_text(str(used))
    (group / "memory.stat").write_text("anon 5\ninactive_file 1000\n")
    return available_memory(root)


def test_jobs_of_an_8_gib_machine(tmp_path):
    memory = fake_machine(tmp_path, 8 * settings.GIB)
    assert memory == 8 * settings.GIB
    assert 1 <= job_count({}, cores=64, memory=memory) <= 2


def test_jobs_in_a_container(tmp_path):
    memory = fake_machine(tmp_path, 512 * settings.GIB, limit=str(16 * settings.GIB), used=4 * settings.GIB)
    assert memory == 12 * settings.GIB + 1000  # cached files give way
    assert job_count({}, cores=64, memory=memory) == 2


def test_jobs():
    assert job_count({}, cores=4, memory=512 * settings.GIB) == 4
    assert job_count({}, cores=4, memory=settings.GIB) == 1
    assert job_count({"MAX_JOBS": "7"}, cores=1, memory=settings.GIB) == 7
    assert job_count({}) >= 1
    for wrong in ("0", "-1", "many"):
        with pytest.raises(BuildError, match="MAX_JOBS"):
            job_count({"MAX_JOBS": wrong})


def test_memory_unknown(tmp_path):
    assert available_memory(tmp_path) is None


# The plan


@pytest.fixture
def environ(toolkit, cutlass_path, monkeypatch):
    """A machine that has everything."""
    monkeypatch.setattr(settings, "gpu_visible", lambda: True)
    return {"CUDA_HOME": str(toolkit), "CUTLASS_PATH": str(cutlass_path)}


def test_auto_with_everything(environ):
    plan = make_plan(environ, CUDA_TORCH)
    assert plan.cuda and plan.missing == ""
    assert plan.toolkit.release == "13.0" and plan.cutlass.version == "4.2.0"
    assert plan.kernels == settings.manifest.manifest()
    assert plan.summary.startswith("coda: CPU and CUDA back ends")


def test_off(environ):
    assert not make_plan({**environ, "CODA_CUDA": "0"}, CUDA_TORCH).cuda


# What a machine may lack: how to take it away (the result is the torch there), the reason given, and the tag that the Makefile reads.
def no_torch(environ, monkeypatch, folder):
    return None


def cpu_torch(environ, monkeypatch, folder):
    return CPU_TORCH


def no_nvcc(environ, monkeypatch, folder):
    environ["CUDA_HOME"] = str(folder / "nowhere")
    return CUDA_TORCH


def other_cuda(environ, monkeypatch, folder):
    environ["CUDA_HOME"] = str(write_toolkit(folder / "12", "12.8"))
    return CUDA_TORCH


def no_cutlass(environ, monkeypatch, folder):
    environ["CUTLASS_PATH"] = str(folder / "nowhere")
    return CUDA_TORCH


def other_cutlass(environ, monkeypatch, folder):
    environ["CUTLASS_PATH"] = str(write_cutlass(folder / "other", "4.3.1"))
    return CUDA_TORCH


def no_gpu(environ, monkeypatch, folder):
    monkeypatch.setattr(settings, "gpu_visible", lambda: False)
    return CUDA_TORCH


LACKS = [
    (no_torch, "torch is not installed", "torch"),
    (cpu_torch, "torch 2.13.0[+]cpu is built without CUDA", "torch"),
    (no_nvcc, "nvcc was not found: CUDA_HOME=.*nowhere", "nvcc"),
    (other_cuda, "is CUDA 12.8, but torch .* CUDA 13.0", "version"),
    (no_cutlass, "CUTLASS_PATH=.*nowhere has no cutlass/version.h", "cutlass"),
    (other_cutlass, "is CUTLASS 4.3.1, .* for 4.2.0", "cutlass-version"),
    (no_gpu, "No NVIDIA GPU", "gpu"),
]


@pytest.mark.parametrize("take_away, reason, missing", LACKS)
def test_auto_falls_back_with_a_reason(take_away, reason, missing, environ, monkeypatch, tmp_path):
    plan = make_plan(environ, take_away(environ, monkeypatch, tmp_path))
    assert not plan.cuda and plan.missing == missing
    assert re.search(reason, plan.reason)
    assert "\n" not in plan.summary


@pytest.mark.parametrize("take_away, reason, missing", LACKS[:-1])
def test_on_demand_names_what_is_missing(take_away, reason, missing, environ, monkeypatch, tmp_path):
    torch = take_away(environ, monkeypatch, tmp_path)
    with pytest.raises(BuildError, match=f"CODA_CUDA=1: .*{reason}") as e:
        make_plan({**environ, "CODA_CUDA": "1"}, torch)
    assert e.value.missing == missing and "\n" not in str(e.value)


def test_on_demand_needs_no_gpu(environ, monkeypatch):
    monkeypatch.setattr(settings, "gpu_visible", lambda: False)
    assert make_plan({**environ, "CODA_CUDA": "1"}, CUDA_TORCH).cuda


def test_unknown_mode(environ):
    with pytest.raises(BuildError, match="CODA_CUDA=yes"):
        make_plan({**environ, "CODA_CUDA": "yes"}, CUDA_TORCH)


def test_programs(environ):
    plan = make_plan({**environ, "CODA_PROGRAMS": "rstd_swiglu, dswiglu"}, CUDA_TORCH)
    assert set(plan.programs) == {"rstd_swiglu", "dswiglu"}
    with pytest.raises(BuildError, match="unknown program 'swiglu'.*rstd_swiglu") as e:
        make_plan({**environ, "CODA_PROGRAMS": "swiglu"}, CUDA_TORCH)
    assert "\n" not in str(e.value)


def test_arch_without_kernels(environ):
    plan = make_plan({**environ, "TORCH_CUDA_ARCH_LIST": "7.5"}, CUDA_TORCH)
    assert plan.cuda and not plan.kernels
    (note,) = plan.notes()
    assert "no GEMM kernels exist for 7.5" in note
    assert not make_plan(environ, CUDA_TORCH).notes()


def test_nvcc_search(tmp_path):
    first, second = write_toolkit(tmp_path / "a"), write_toolkit(tmp_path / "b")
    both = {"CUDA_HOME": str(first), "PATH": str(second / "bin")}
    assert settings.find_nvcc(both) == first / "bin" / "nvcc"
    assert settings.find_nvcc({"PATH": str(second / "bin")}) == second / "bin" / "nvcc"
    assert settings.find_nvcc({"PATH": str(tmp_path)}, default=second) == second / "bin" / "nvcc"
    with pytest.raises(BuildError, match="nvcc was not found"):
        settings.find_nvcc({"PATH": str(tmp_path)}, default=tmp_path)


def test_wheel_libraries(tmp_path):
    for folder in ("nvidia/cu13/include", "nvidia/cublas/include", "nvidia/cudnn/include"):
        (tmp_path / folder).mkdir(parents=True)
    assert settings.wheel_libraries("13.0", [str(tmp_path)]) == [tmp_path / "nvidia" / "cu13"]
    assert tmp_path / "nvidia" / "cublas" in settings.wheel_libraries("12.8", [str(tmp_path)])


# The command line


def run(*arguments, **environ):
    return subprocess.run(
        [sys.executable, "-m", "build_support", *arguments], cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True
    )


def test_plan_without_nvcc_is_no_traceback(tmp_path):
    done = run("plan", CODA_CUDA="auto", CUDA_HOME=str(tmp_path))
    assert done.returncode == 0 and "CPU back end only" in done.stdout and done.stderr == ""


def test_errors_are_one_line(tmp_path):
    for environ in ({"CODA_CUDA": "1", "CUDA_HOME": str(tmp_path)}, {"CODA_PROGRAMS": "nothing"}, {"CODA_CUDA": "maybe"}):
        done = run("plan", **environ)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith("coda: ") and done.stderr.count("\n") == 1
