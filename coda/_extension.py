"""Loads the compiled extension, and says what it holds."""
from __future__ import annotations

import contextlib
import json
from typing import Any, Iterator

import torch

try:
    from coda import _C
except ImportError as e:
    raise ImportError(
        f"coda's compiled extension cannot be loaded with torch {torch.__version__} ({e}); "
        "build it for this interpreter and this torch with: pip install --no-build-isolation ."
    ) from e

_build: dict[str, Any] = json.loads(_C.build_info())


def _release(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


# A torch of another minor release has another C++ interface: calls would fail in odd places, so say it here.
if _release(_build["torch"]) != _release(torch.__version__):
    raise ImportError(
        f"coda was built for torch {_build['torch']} and cannot run with torch {torch.__version__}; "
        "rebuild it with: pip install --no-build-isolation --force-reinstall --no-deps ."
    )


def info() -> dict[str, Any]:
    """What was built, what is used, and why.

    Keys: ``version``, ``torch``, ``cuda`` and ``cutlass`` (versions, None without kernels), ``archs`` (compute capabilities with
    kernels), ``programs``, ``cuda_reason`` (why kernels were built, or not), ``kernels`` (one dict each: key, tile, cluster, stages,
    shared memory in bytes, threads), and ``backend``, one sentence on what a call will use on this machine.
    """
    return {**_build, "kernels": _C.kernels(), "backend": _backend()}


def _backend() -> str:
    if not _build.get("cuda"):
        return f"CPU back end: {_build.get('cuda_reason', 'built without CUDA')}"
    if not torch.cuda.is_available():
        return "CPU back end: the kernels are built, but torch sees no GPU"
    arch, why = _C.arch_for(*torch.cuda.get_device_capability())
    if arch is None:
        return f"torch operators on the GPU: {why}"
    return f"{arch.upper()} kernels on {torch.cuda.get_device_name()}; tensors on the CPU use the CPU back end"


def backend_of_last_call() -> str:
    """What ran the last operator of this process, forward or backward.

    ``"cpu"``; ``"sm90:<key>+<key>..."`` or ``"sm80:..."`` with the kernels in order (``<key> in 4 parts`` where K was split; ``library`` is torch's own GEMM,
    used where no program is involved and it measured faster); or ``"eager:<reason>"`` where no kernel exists, which ``CODA_STRICT=1`` turns into an error.
    """
    return _C.last_call()


@contextlib.contextmanager
def force_kernel(key: str) -> Iterator[None]:
    """Makes the program of kernel `key` use that kernel inside the block, for tests and tuning. Not thread-safe."""
    known = {k["key"]: k["program"] for k in _C.kernels()}
    if key not in known:
        import difflib

        near = difflib.get_close_matches(key, known, n=3) or sorted(known)
        raise ValueError(f"no kernel {key!r} was built, the nearest are: {', '.join(near) or 'none'}")
    _C.force_kernel(known[key], key)
    try:
        yield
    finally:
        _C.force_kernel(known[key], "")
