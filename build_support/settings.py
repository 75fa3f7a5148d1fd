"""What to build. Everything is read from the environment and the machine here, and nowhere else:

    CODA_CUDA               auto (default), 0 or 1: whether the CUDA kernels are built
    CODA_PROGRAMS           comma-separated programs of csrc/kernels.py, for a shorter build; default all
    TORCH_CUDA_ARCH_LIST    such as "9.0" or "8.0;9.0a"; default: 8.0, 8.6 and 9.0
    CODA_FORCE_ARCH         sm80 or sm90: kernels of this architecture only. sm80 with 9.0 in the list: compiled for Hopper too, for tests there
    MAX_JOBS                compiler processes at a time
    CUDA_HOME, CUDA_PATH    the CUDA toolkit
    CUTLASS_PATH            see third_party/README.md
"""
from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
from types import ModuleType
from typing import Iterable, Mapping

ROOT = pathlib.Path(__file__).resolve().parent.parent
GIB = 1 << 30
MEMORY_PER_JOB = 5 * GIB  # about what one file takes to compile; the largest peak at 4.4, for some seconds


class BuildError(Exception):
    """One sentence for the user, who gets no traceback. `missing` is the piece, for CODA_CUDA=auto and the Makefile."""

    def __init__(self, message: str, missing: str = "") -> None:
        super().__init__(message)
        self.missing = missing


def _load(name: str, file: str) -> ModuleType:
    """csrc and third_party hold C++ first, so they are no Python packages."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, ROOT / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


manifest = _load("coda_manifest", "csrc/kernels.py")
cutlass = _load("coda_cutlass", "third_party/cutlass.py")


# Architectures


@dataclasses.dataclass(frozen=True)
class Arch:
    """One entry of TORCH_CUDA_ARCH_LIST."""

    capability: str  # such as 9.0
    ptx: bool = False

    @property
    def target(self) -> str | None:
        """The architecture of the manifest that it runs, None when there is none."""
        if self.capability == "9.0":
            return "sm90"
        return None if _order(self)[0] < 8 else "sm80"

    @property
    def name(self) -> str:
        return "9.0a" if self.target == "sm90" else self.capability

    @property
    def gencode(self) -> list[str]:
        """For code that runs anywhere, such as csrc/reduce."""
        return [_gencode(self.capability)] + ([_gencode(self.capability, ptx=True)] if self.ptx else [])


def _gencode(capability: str, ptx: bool = False) -> str:
    number = capability.replace(".", "")
    return f"-gencode=arch=compute_{number},code={'compute' if ptx else 'sm'}_{number}"


def kernel_code(arch: str, archs: Iterable[Arch]) -> list:
    """What the kernels of one architecture of the manifest are compiled to, for the entries of TORCH_CUDA_ARCH_LIST that run them."""
    if arch == "sm90":
        return list(manifest.CODE["sm90"])
    # 8.7 and 8.9 run the code for 8.6, and whatever is newer than 8.0 can compile its PTX.
    capabilities = ["8.6" if a.capability in ("8.7", "8.9") else a.capability for a in archs]
    return [manifest.Code(arch, c) for c in dict.fromkeys(capabilities)] + [manifest.Code(arch, "8.0", ptx=True)]


def compiled(kernel, code: Iterable) -> list:
    """What of `code`, that of its architecture, a kernel is compiled to."""
    return [c for c in code if kernel.few_rows or not c.few_rows]


def kernel_gencode(code: Iterable) -> list[str]:
    # wgmma and TMA multicast need the `a` feature set.
    return [_gencode(f"{c.capability}a" if c.arch == "sm90" else c.capability, c.ptx) for c in code]


def parse_archs(text: str | None) -> list[Arch]:
    """TORCH_CUDA_ARCH_LIST, separated by ';', ',' or spaces. Sorted, each once; those that kernels exist for when there is no list."""
    entries = re.split(r"[;,\s]+", (text or "").strip(";, \t\n"))
    if entries == [""]:
        return [Arch(c.capability) for c in (*manifest.CODE["sm80"], *manifest.CODE["sm90"]) if not c.ptx]
    archs: dict[str, Arch] = {}
    for entry in entries:
        match = re.fullmatch(r"(\d+\.\d)[af]?(\+PTX)?", entry, re.IGNORECASE)
        if not match:
            raise BuildError(f"TORCH_CUDA_ARCH_LIST has {entry!r}; write compute capabilities such as 9.0, 9.0a or 8.0+PTX.")
        known = archs.get(match[1])
        archs[match[1]] = Arch(match[1], ptx=bool(match[2]) or bool(known and known.ptx))
    return sorted(archs.values(), key=_order)


def _order(arch: Arch) -> tuple[int, ...]:
    return tuple(map(int, arch.capability.split(".")))


# Jobs


def available_memory(root: pathlib.Path = pathlib.Path("/")) -> int | None:
    """Bytes that the machine, or the container's limit if that is less, has left. None when unknown."""
    found = []
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
        if match:
            found.append(int(match[1]) * 1024)
    except OSError:
        pass
    for group, limit, used in (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")):
        folder = root / "sys/fs/cgroup" / group
        try:
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            cache = re.search(r"^(?:total_)?inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
        except (OSError, ValueError):  # no such control group, or no limit
            continue
        found.append(left + (int(cache[1]) if cache else 0))  # the kernel drops cached files before it refuses memory
    return max(0, min(found)) if found else None


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def job_count(environ: Mapping[str, str], cores: int | None = None, memory: int | None = None) -> int:
    """MAX_JOBS, else as many compilers as there are cores and memory for."""
    given = environ.get("MAX_JOBS")
    if given:
        if not re.fullmatch(r"[1-9]\d*", given):
            raise BuildError(f"MAX_JOBS={given} is not a positive number.")
        return int(given)
    cores = available_cores() if cores is None else cores
    memory = available_memory() if memory is None else memory
    return max(1, cores if memory is None else min(cores, memory // MEMORY_PER_JOB))


# Tools


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def find_ninja(environ: Mapping[str, str]) -> str | None:
    """The executable of the `ninja` package, whether or not its environment is activated, or the one on PATH."""
    try:
        files = importlib.metadata.files("ninja") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "ninja" and os.access(file.locate(), os.X_OK):
            return str(pathlib.Path(file.locate()).resolve())
    return shutil.which("ninja", path=environ.get("PATH"))


def gpu_visible() -> bool:
    """Whether there is an NVIDIA GPU. CUDA is not initialised: that would take seconds, and fails in a forked or locked-down build."""
    if any(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        return True
    return "GPU " in (_output(["nvidia-smi", "-L"]) or "")


@dataclasses.dataclass(frozen=True)
class Toolkit:
    nvcc: pathlib.Path
    release: str  # such as 13.0
    include: pathlib.Path
    cudart: pathlib.Path | None

    @property
    def major(self) -> str:
        return self.release.split(".")[0]


def find_nvcc(environ: Mapping[str, str], default: pathlib.Path = pathlib.Path("/usr/local/cuda")) -> pathlib.Path:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(variable):
            nvcc = pathlib.Path(environ[variable], "bin", "nvcc")
            if not nvcc.is_file():
                raise BuildError(f"nvcc was not found: {variable}={environ[variable]} has no bin/nvcc.", "nvcc")
            return nvcc
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    if on_path:
        return pathlib.Path(on_path)
    if (default / "bin" / "nvcc").is_file():
        return default / "bin" / "nvcc"
    raise BuildError(f"nvcc was not found in CUDA_HOME, on PATH or in {default}.", "nvcc")


def find_toolkit(environ: Mapping[str, str]) -> Toolkit:
    nvcc = find_nvcc(environ)
    release = re.search(r"release (\d+\.\d+)", _output([str(nvcc), "--version"]) or "")
    if not release:
        raise BuildError(f"{nvcc} --version does not name a release.", "nvcc")
    # nvcc on PATH may be a link or a script somewhere else than the toolkit, so ask it.
    top = re.search(r"^#\$ TOP=(.+)$", _output([str(nvcc), "--dryrun", "-E", "-x", "cu", os.devnull]) or "", re.MULTILINE)
    root = pathlib.Path(top[1].strip() if top else nvcc.resolve().parent.parent).resolve()
    if (root / "bin" / "nvcc").is_file():
        nvcc = root / "bin" / "nvcc"
    # By file name, since the toolkit in a Python environment has no unversioned link.
    folders = [root / "lib64", root / "lib", root / "targets" / f"{os.uname().machine}-linux" / "lib"]
    libraries = [library for folder in folders for library in sorted(folder.glob("libcudart.so*"))]
    return Toolkit(nvcc, release[1], root / "include", libraries[0] if libraries else None)


def wheel_libraries(release: str, path: Iterable[str] | None = None) -> list[pathlib.Path]:
    """Folders with include and lib of the CUDA libraries (cuBLAS...) that torch's dependencies install. A toolkit may lack them."""
    found: list[pathlib.Path] = []
    for entry in sys.path if path is None else path:
        nvidia = pathlib.Path(entry or ".") / "nvidia"
        # One folder for all since CUDA 13, one for each library before.
        folders = [nvidia / f"cu{release.split('.')[0]}"] if int(release.split(".")[0]) >= 13 else sorted(nvidia.glob("cu*"))
        found += [f for f in folders if (f / "include").is_dir() and f not in found]
    return found


@dataclasses.dataclass(frozen=True)
class Torch:
    version: str
    cuda: str | None


def installed_torch() -> Torch | None:
    """Without importing it, which takes seconds."""
    spec = importlib.util.find_spec("torch")
    file = pathlib.Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    if not file or not file.is_file():
        return None
    names: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return Torch(str(names["__version__"]), names.get("cuda"))


# The plan


@dataclasses.dataclass
class Plan:
    cuda: bool
    reason: str  # one sentence: why the CUDA kernels are built, or are not
    missing: str = ""  # torch, nvcc, version, gpu or cutlass; what kept CODA_CUDA=auto from building them
    toolkit: Toolkit | None = None
    cutlass: object | None = None
    archs: list[Arch] = dataclasses.field(default_factory=list)
    kernels: list = dataclasses.field(default_factory=list)
    code: dict[str, list] = dataclasses.field(default_factory=dict)  # of each architecture of the manifest, see kernel_code

    @property
    def programs(self) -> list[str]:
        return list(dict.fromkeys(k.program for k in self.kernels))

    @property
    def summary(self) -> str:
        if not self.cuda:
            return f"coda: CPU back end only. {self.reason}"
        archs = ", ".join(a.name for a in self.archs)
        return f"coda: CPU and CUDA back ends, {len(self.kernels)} kernels for {archs}. {self.reason}"

    def notes(self) -> list[str]:
        without = [a.name for a in self.archs if a.target is None]
        if not without:
            return []
        names = ", ".join(without)
        return [f"coda: note: no GEMM kernels exist for {names} (only for 8.0 and newer); the reductions are compiled for it all the same."]


def find_tools(environ: Mapping[str, str]) -> tuple[Toolkit, object]:
    """nvcc and CUTLASS: all that the kernels need. Raises BuildError."""
    return find_toolkit(environ), _find_cutlass(environ)


def _find_cutlass(environ: Mapping[str, str]) -> object:
    try:
        return cutlass.find(environ)
    except cutlass.CutlassMissing as e:
        raise BuildError(str(e), "cutlass") from None
    except cutlass.CutlassError as e:
        raise BuildError(str(e), "cutlass-version") from None


def select_code(environ: Mapping[str, str], archs: Iterable[Arch]) -> dict[str, list]:
    """The architectures of the manifest to build, and what each is compiled to."""
    forced, archs = environ.get("CODA_FORCE_ARCH") or None, list(archs)
    if forced not in (None, *manifest.CODE):
        raise BuildError(f"CODA_FORCE_ARCH={forced} is none of {', '.join(sorted(manifest.CODE))}.")
    # Only when told to, an SM90 device gets machine code for all kernels of another architecture.
    runs = lambda a, arch: a.target == arch or (a.target == "sm90" and arch == forced)
    wanted = {arch: [a for a in archs if runs(a, arch)] for arch in manifest.CODE if forced in (None, arch)}
    code = {arch: kernel_code(arch, entries) for arch, entries in wanted.items() if entries}
    if forced is None and "sm90" in code:  # where SM80's kernels for few rows compete with its own, see csrc/coda/dispatch.hpp
        code.setdefault("sm80", []).append(manifest.Code("sm80", "9.0", few_rows=True))
    return code


def select_kernels(environ: Mapping[str, str], code: Mapping[str, list]) -> list:
    try:
        return [k for k in manifest.select(manifest.manifest(), environ.get("CODA_PROGRAMS")) if compiled(k, code.get(k.arch, ()))]
    except ValueError as e:
        raise BuildError(f"CODA_PROGRAMS: {e}.") from None


def make_plan(environ: Mapping[str, str], torch: Torch | None) -> Plan:
    """What setup.py builds. Raises BuildError for a setting that makes no sense, and for what CODA_CUDA=1 lacks."""
    mode = environ.get("CODA_CUDA") or "auto"
    if mode not in ("auto", "0", "1"):
        raise BuildError(f"CODA_CUDA={mode} is none of auto, 0 and 1.")
    archs = parse_archs(environ.get("TORCH_CUDA_ARCH_LIST"))
    code = select_code(environ, archs)
    kernels = select_kernels(environ, code)
    if mode == "0":
        return Plan(False, "CODA_CUDA=0 leaves the CUDA kernels out.")
    try:
        if torch is None:
            raise BuildError("torch is not installed.", "torch")
        if torch.cuda is None:
            raise BuildError(f"torch {torch.version} is built without CUDA.", "torch")
        toolkit = find_toolkit(environ)
        if toolkit.major != torch.cuda.split(".")[0]:
            message = f"{toolkit.nvcc} is CUDA {toolkit.release}, but torch {torch.version} is built with CUDA {torch.cuda}."
            raise BuildError(message, "version")
        if mode == "auto" and not gpu_visible():
            raise BuildError("No NVIDIA GPU is visible (CODA_CUDA=1 builds the CUDA kernels all the same).", "gpu")
        headers = _find_cutlass(environ)
    except BuildError as e:
        if mode == "1":
            raise BuildError(f"CODA_CUDA=1: {e}", e.missing) from None
        return Plan(False, str(e), e.missing)
    why = "CODA_CUDA=1 asks for them." if mode == "1" else "A GPU, a matching nvcc and CUTLASS were found."
    return Plan(True, why, "", toolkit, headers, archs, kernels, code)
