"""RMSNorm as side information of a tensor."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coda.ops._common import as_rows, check_devices, check_optional_tensor, check_tensor, fake, statistics_dtype


def rms_norm_stats(x: Tensor, norm_weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The two halves of a deferred RMSNorm, in one pass over x:

        h = x * norm_weight,   rstd = rsqrt(mean(x^2, -1) + eps)

    so that RMSNorm(x; norm_weight) W^T = rstd * (h W^T).

    Args:
        x: [..., D]; float32, float64, bfloat16 or float16.
        norm_weight: [D], dtype of x or float32. None: h is x itself.
        eps: added to the mean of squares.

    Returns:
        h: [..., D] in x's dtype; rstd: [...] in float32 (float64 for float64 x). Sums are taken in that dtype: rows of magnitude above
        1.8e19 overflow to rstd = 0, as in torch.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, device or shape.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    check_tensor("x", x)
    check_optional_tensor("norm_weight", norm_weight)
    check_devices(x, norm_weight=norm_weight)
    h, rstd = torch.ops.coda.rms_norm_stats(as_rows(x), norm_weight, eps)
    return (x if norm_weight is None else h.view(x.shape)), rstd.view(x.shape[:-1])


@fake("coda::rms_norm_stats")
def _(x: Tensor, norm_weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    h = x.new_empty((0,) if norm_weight is None else (x.shape[0], x.shape[1]))
    return h, x.new_empty((x.shape[0],), dtype=statistics_dtype(x))


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, norm_weight, _ = inputs
    ctx.save_for_backward(x, norm_weight, output[1])


def _backward(ctx: Any, dh: Tensor | None, drstd: Tensor | None) -> tuple:
    x, norm_weight, rstd = ctx.saved_tensors
    wide = x.to(rstd.dtype)
    dx = dweight = None
    if norm_weight is not None and dh is not None:
        if ctx.needs_input_grad[0]:
            dx = dh.to(rstd.dtype) * norm_weight
        if ctx.needs_input_grad[1]:
            dweight = (dh.to(rstd.dtype) * wide).sum(0).to(norm_weight.dtype)
    if drstd is not None and ctx.needs_input_grad[0]:
        through_rstd = wide * (drstd * rstd**3 / -x.shape[1]).unsqueeze(1)
        dx = through_rstd if dx is None else dx + through_rstd
    return (None if dx is None else dx.to(x.dtype)), dweight, None


torch.library.register_autograd("coda::rms_norm_stats", _backward, setup_context=_setup)
