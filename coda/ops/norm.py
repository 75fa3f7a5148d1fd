"""RMSNorm as side information of a tensor."""
from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from coda.ops._common import as_rows, check_devices, check_optional_tensor, check_tensor, fake, statistics_dtype, weight_gradient


@dataclasses.dataclass(frozen=True)
class NormStats:
    """What the epilogue that made a tensor x left for the norm that follows: h = x * norm_weight and rstd = rsqrt(mean(x^2) + eps).

    Side information without a gradient: whoever uses it differentiates the whole norm (coda.norm_linear). It belongs to one tensor, one norm
    weight and one eps; `check` raises for any other.
    """

    h: Tensor
    rstd: Tensor
    of: Tensor
    norm_weight: Tensor | None
    eps: float
    versions: tuple[int, int]

    @classmethod
    def make(cls, of: Tensor, h: Tensor, rstd: Tensor, norm_weight: Tensor | None, eps: float) -> "NormStats":
        return cls(h, rstd, of, norm_weight, eps, (_version(of), _version(norm_weight)))

    def check(self, x: Tensor, norm_weight: Tensor | None, eps: float) -> None:
        """Raises ValueError unless these are the statistics of x, as it is now, for that norm."""
        if x is not self.of:
            raise ValueError("stats were made for another tensor than x, expected those that came with x itself")
        if norm_weight is not self.norm_weight:
            raise ValueError("stats were made with another norm weight than norm_weight, expected the next_norm_weight of the call that made them")
        if eps != self.eps:
            raise ValueError(f"stats were made with eps {self.eps}, expected {eps}")
        if self.versions != (_version(x), _version(norm_weight)):
            raise ValueError("stats are of an earlier state of x or norm_weight, which was changed in place since")

    @property
    def rows(self) -> tuple[Tensor | None, Tensor]:
        """(h [M, D] or None without a norm weight, rstd [M]), for the operators."""
        return (None if self.norm_weight is None else as_rows(self.h)), self.rstd.reshape(-1)


def _version(t: Tensor | None) -> int:
    return 0 if t is None or torch.compiler.is_compiling() or t.is_inference() else t._version


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


def norm_gradient(dz, correction, x, norm_weight, w, w_up, incoming, need_x, need_norm, need_w):
    """(dx, dnorm_weight, dw) of rstd (x norm_weight) W^T from dz, the gradient of the product before it is scaled, and the correction
    rstd^2 S / D (programs/norm.hpp in csrc); dx with the gradient `incoming` on the residual stream added. dw is that of [w; w_up]."""
    dx = dnorm = dw = h = None
    if need_x or need_norm:
        want_h = need_w and norm_weight is not None
        dx, h, dnorm = torch.ops.coda.norm_backward(dz, w, w_up, x, norm_weight, correction, incoming, want_h, need_norm)
        dx, h, dnorm = (t if wanted else None for t, wanted in ((dx, need_x), (h, want_h), (dnorm, need_norm)))
    if need_w:
        if h is None:
            h = x if norm_weight is None else torch.ops.coda.rms_norm_stats(x, norm_weight, 0.0)[0]
        dw = torch.ops.coda.gemm(dz.t(), h) if w_up is not None else weight_gradient(w, dz.t(), h)
    return dx, dnorm, dw


@fake("coda::norm_backward")
def _(dz, weight, w_up, x, norm_weight, correction, incoming, want_h, want_dnorm):
    norm = x if norm_weight is None else norm_weight
    return x.new_empty((x.shape[0], x.shape[1])), x.new_empty(x.shape if want_h else (0,)), norm.new_empty((x.shape[1],) if want_dnorm else (0,))
