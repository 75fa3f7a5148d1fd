"""Forces every compiled kernel, so that none is reached only by a lucky shape."""
import pytest
import torch
import torch.nn.functional as F

import coda
from coda._extension import force_kernel
from tests.reference import error

KERNELS = {k["key"]: k for k in coda.info()["kernels"]}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# A stored number is off by 2^-8 (2^-11) of itself at most; few numbers can come near that, the root mean square of many does not.
STEP = {"bf16": 2.0**-8, "fp16": 2.0**-11}
SHAPES = [(1000, 1192, 520), (1, 8, 8), (127, 264, 64), (129, 136, 8), (256, 512, 1032), (16, 2056, 72)]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not KERNELS, reason="this build holds no kernels")]


def new(*shape, dtype, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def bound(value, dtype):
    return 1e-5 if value.dtype == torch.float32 else STEP[dtype] * (1 if value.numel() < 1000 else 0.5)


def run(kernel, m, n, k, dtype):
    """The outputs of the kernel, and their exact values."""
    program, layout = kernel["program"], kernel["layout"]
    ops = torch.ops.coda
    rstd = torch.rand(m, device="cuda") + 0.5
    if program.startswith("rstd_swiglu"):
        h, w = new(m, k, dtype=dtype), new(2 * n, k, dtype=dtype, scale=k**-0.5)
        z = (h.double() @ w.double().t()) * rstd.double().unsqueeze(1)
        gate, up = z.chunk(2, 1)
        store = program.endswith("preactivation")
        call = lambda: ops.rstd_swiglu(h, rstd, w, None, store)[: 2 if store else 1]
        return call, [F.silu(gate) * up, z][: 2 if store else 1]
    if program == "dswiglu":
        dy, w, z = new(m, k, dtype=dtype), new(k, n, dtype=dtype, scale=k**-0.5), new(m, 2 * n, dtype=dtype)
        acc, (gate, up) = dy.double() @ w.double(), z.double().chunk(2, 1)
        s = torch.sigmoid(gate)
        dgate, dup = acc * up * s * (1 + gate * (1 - s)), acc * gate * s
        dz = torch.cat((dgate, dup), 1) * rstd.double().unsqueeze(1)
        return lambda: ops.dswiglu(dy, w, z, rstd), [dz, gate * s * up, (dgate * gate + dup * up).sum(1)]
    a = new(k, m, dtype=dtype).t() if layout == "nt" else new(m, k, dtype=dtype)
    b = new(n, k, dtype=dtype, scale=k**-0.5).t() if layout == "tn" else new(k, n, dtype=dtype, scale=k**-0.5)
    bias = new(n, dtype=dtype)
    source = new(m, n, dtype=dtype) if program == "plain_residual" else None
    exact = 1.5 * (a.double() @ b.double()) + bias.double()
    return lambda: (ops.gemm(a, b, bias, source, 1.5, 0.5),), [exact if source is None else exact + 0.5 * source.double()]


@pytest.mark.parametrize("m, n, k", SHAPES)
@pytest.mark.parametrize("key", list(KERNELS))
def test_forced(key, m, n, k, poisoned_memory):
    torch.manual_seed(0)
    kernel = KERNELS[key]
    if kernel["layout"] == "nt":
        m = (m + 7) // 8 * 8
    call, exact = run(kernel, m, n, k, DTYPES[kernel["dtype"]])
    with force_kernel(key):
        first = call()
        assert key in coda.backend_of_last_call()
        for value, wanted in zip(first, exact):
            assert error(value, wanted) < bound(value, kernel["dtype"])
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(call(), first))


@pytest.mark.parametrize("k", [8, 16, 64])
@pytest.mark.parametrize("key", list(KERNELS))
def test_short_k_repeats(key, k, poisoned_memory):
    """Few mainloop steps make the epilogue wait for nothing: a buffer reused too early would show here."""
    torch.manual_seed(0)
    kernel = KERNELS[key]
    call, exact = run(kernel, 2048, 2048, k, DTYPES[kernel["dtype"]])
    with force_kernel(key):
        first = call()
        for value, wanted in zip(first, exact):
            assert error(value, wanted) < bound(value, kernel["dtype"])
        for _ in range(50):
            assert all(torch.equal(a, b) for a, b in zip(call(), first))


def test_unknown_kernel_names_near_misses():
    with pytest.raises(ValueError, match="the nearest are: rstd_swiglu"):
        with force_kernel("rstd_swiglu_tn_bf16_128x128x64_9x9_pingpong"):
            pass


def test_registry_fits_the_card():
    for k in KERNELS.values():
        assert k["shared_memory"] <= 232448 and k["stages"] >= 3, k
