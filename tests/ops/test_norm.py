import math

import pytest
import torch

import coda
from tests.ops.cases import sixteen_on_cuda


def exact(x, g, eps=1e-6):
    wide = x.double()
    return wide * (1 if g is None else g.double()), (wide.square().mean(-1) + eps).rsqrt()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("m, d", [(1, 8), (7, 13), (33, 264), (5, 3584), (3, 8192), (1000, 520)])
@pytest.mark.parametrize("weight", ["none", "same", "float32"])
def test_statistics(device, dtype, m, d, weight, poisoned_memory):
    if weight == "float32" and dtype == torch.float64:
        pytest.skip("a float32 weight goes with 16-bit activations")
    x = torch.randn(m, d, device=device, dtype=torch.float64).to(dtype)
    g = None if weight == "none" else torch.rand(d, device=device).to(torch.float32 if weight == "float32" else dtype)
    h, rstd = coda.rms_norm_stats(x, g)
    eh, er = exact(x, g)
    assert rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(rstd.double(), er, rtol=1e-6 if dtype != torch.float64 else 1e-13, atol=0)
    assert torch.equal(h, x) if g is None else torch.equal(h, eh.to(dtype)) or (h.double() - eh).abs().max() <= eh.abs().max() * torch.finfo(dtype).eps


def test_eps_is_inside_the_root(device):
    dtype = sixteen_on_cuda(device)
    x = torch.full((2, 64), 2.0**-10, device=device, dtype=dtype)
    _, rstd = coda.rms_norm_stats(x, eps=2.0**-20)
    torch.testing.assert_close(rstd * x[:, 0].float(), torch.full((2,), math.sqrt(0.5), device=device))


def test_large_rows_of_fp16_do_not_overflow(device):
    x = torch.full((2, 4096), 300.0, device=device, dtype=torch.float16)
    torch.testing.assert_close(coda.rms_norm_stats(x)[1], torch.full((2,), 1 / 300, device=device))


def test_an_outlier_counts(device):
    x = torch.full((1, 4096), 0.1, device=device, dtype=torch.bfloat16)
    x[0, 7] = 2000
    torch.testing.assert_close(coda.rms_norm_stats(x)[1].double(), exact(x, None)[1], rtol=1e-6, atol=0)


def test_views(device):
    dtype = torch.bfloat16
    base = torch.randn(64, 32, device=device, dtype=dtype)
    g = torch.rand(64, device=device).to(dtype)
    for view in (base.t(), torch.randn(6, 200, device=device, dtype=dtype)[:, 3:67], torch.randn(2, 5, 64, device=device, dtype=dtype).transpose(0, 1)):
        for a, b in zip(coda.rms_norm_stats(view, g), coda.rms_norm_stats(view.contiguous(), g)):
            assert torch.equal(a, b)


def test_gradcheck():
    torch.manual_seed(0)
    x, g = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.rand(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(coda.rms_norm_stats, (x, g))
    assert torch.autograd.gradcheck(lambda t: coda.rms_norm_stats(t), (x,))
    assert torch.autograd.gradcheck(lambda t: coda.rms_norm_stats(t, g.detach())[0], (x,))
    assert torch.autograd.gradcheck(lambda t: coda.rms_norm_stats(t, g.detach())[1], (x,))


@pytest.mark.gpu
def test_more_than_2_31_elements():
    m, d = 524296, 4096
    x = torch.zeros(m, d, device="cuda", dtype=torch.bfloat16)
    x[-2:] = torch.randn(2, d, device="cuda")
    g = torch.rand(d, device="cuda").bfloat16()
    h, rstd = coda.rms_norm_stats(x, g)
    eh, er = exact(x[-2:], g)
    torch.testing.assert_close(h[-2:].double(), eh, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(rstd[-2:].double(), er, rtol=1e-6, atol=0)
    assert not h[:-2].any()
