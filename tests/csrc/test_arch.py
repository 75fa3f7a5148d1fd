"""Which kernels of this build a device of some compute capability would run; needs no such device."""
import pytest

import coda
from build_support.settings import manifest
from coda import _C

KERNELS = {k["key"]: k for k in coda.info()["kernels"]}
ARCHS = {k["arch"] for k in KERNELS.values()}
PROBLEMS = list(dict.fromkeys((k.program, k.layout, k.dtype) for k in manifest.manifest()))
built = pytest.mark.skipif(not KERNELS, reason="this build holds no kernels")
everything = pytest.mark.skipif(ARCHS != {"sm80", "sm90"} or {k.key for k in manifest.manifest()} != set(KERNELS), reason="this build does not hold all kernels")


@everything
@pytest.mark.parametrize("capability, arch", [((8, 0), "sm80"), ((8, 6), "sm80"), ((8, 9), "sm80"), ((9, 0), "sm90"), ((10, 0), "sm80"), ((12, 0), "sm80")])
def test_every_program_has_a_kernel(capability, arch, monkeypatch):
    monkeypatch.delenv("CODA_FORCE_ARCH", raising=False)
    assert _C.arch_for(*capability) == (arch, "")
    for program, layout, dtype in PROBLEMS:
        for m, n, k in ((16384, 8192, 2048), (8, 128, 64)):
            key = _C.kernel_for(*capability, program, layout, dtype, m, n, k, rotary_dim=64, head_dim=64)
            assert (KERNELS[key]["arch"] == arch or (m == 8 and KERNELS[key]["few_rows"])) and key.startswith(f"{program}_{layout}_{dtype}_")


@everything
def test_few_rows(monkeypatch):
    monkeypatch.delenv("CODA_FORCE_ARCH", raising=False)
    for program, layout, dtype in PROBLEMS:
        keys = {m: _C.kernel_for(9, 0, program, layout, dtype, m, 4096, 14336, rotary_dim=64, head_dim=64) for m in (16, 16384)}
        assert KERNELS[keys[16384]]["arch"] == "sm90"
        assert KERNELS[keys[16]]["few_rows"] != program.startswith(("lse_select", "dlogits")), keys


@built
def test_a_device_that_is_too_old(monkeypatch):
    monkeypatch.delenv("CODA_FORCE_ARCH", raising=False)
    arch, why = _C.arch_for(7, 5)
    assert arch is None and why.startswith("no kernels were built for compute capability 7.5, there are some for ")
    with pytest.raises(ValueError, match="no kernels were built for compute capability 7.5"):
        _C.kernel_for(7, 5, "plain", "tn", "bf16", 128, 128, 64)


@everything
def test_a_forced_architecture(monkeypatch):
    monkeypatch.setenv("CODA_FORCE_ARCH", "sm80")
    assert _C.arch_for(9, 0) == ("sm80", "")
    assert _C.kernel_for(9, 0, "plain", "tn", "bf16", 128, 128, 64).endswith("_sm80")
    monkeypatch.setenv("CODA_FORCE_ARCH", "sm90")
    assert _C.arch_for(8, 0) == (None, "CODA_FORCE_ARCH=sm90 leaves no kernels for compute capability 8.0")
