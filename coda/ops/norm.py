"""RMSNorm and LayerNorm as side information of a tensor."""
from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from coda.ops._common import (
    as_rows,
    check_devices,
    check_optional_tensor,
    check_tensor,
    fake,
    joined,
    no_second_derivative,
    once,
    part_gradients,
    statistics_dtype,
    weight_gradient,
)

NORMS = {"rms": "an RMSNorm", "layer": "a LayerNorm"}


def check_norm(name: str, norm: str) -> None:
    if norm not in NORMS:
        raise ValueError(f"{name} is {norm!r}, expected one of {', '.join(map(repr, NORMS))}")


@dataclasses.dataclass(frozen=True)
class NormStats:
    """What the epilogue that made a tensor x left for the norm that follows: h = x * norm_weight and rstd = rsqrt(mean(x^2) + eps); for a LayerNorm
    the mean of each row, and rstd = rsqrt(variance(x) + eps).

    Side information without a gradient: whoever uses it differentiates the whole norm (coda.norm_linear). It belongs to one tensor, one kind of
    norm, one norm weight and one eps; `check` raises for any other.
    """

    h: Tensor
    rstd: Tensor
    of: Tensor
    norm_weight: Tensor | None
    eps: float
    versions: tuple[int, int]
    mean: Tensor | None = None  # of a LayerNorm

    @classmethod
    def make(
        cls, of: Tensor, h: Tensor, rstd: Tensor, norm_weight: Tensor | None, eps: float, mean: Tensor | None = None
    ) -> "NormStats":
        return cls(h, rstd, of, norm_weight, eps, (_version(of), _version(norm_weight)), mean)

    @property
    def norm(self) -> str:
        return "rms" if self.mean is None else "layer"

    def check(self, x: Tensor, norm_weight: Tensor | None, eps: float, norm: str = "rms") -> None:
        """Raises ValueError unless these are the statistics of x, as it is now, for that norm."""
        if x is not self.of:
            raise ValueError("stats were made for another tensor than x, expected those that came with x itself")
        if norm != self.norm:
            raise ValueError(f"stats were made for {NORMS[self.norm]}, expected those for {NORMS[norm]}, made with next_norm={norm!r}")
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
        norm_weight: [D], dtype of x or, beside 16 bits, float32. None: h is x itself.
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


def norm_gradient(dz, correction, x, norm_weight, parts, incoming, need_x, need_norm, need_parts):
    """(dx, dnorm_weight, *dparts) of rstd (x norm_weight) W^T from dz, the gradient of the product before it is scaled, and the correction
    rstd^2 S / D (programs/norm.hpp in csrc); dx with the gradient `incoming` on the residual stream added. The rows of W are those of the weights
    `parts`, behind each other. Without a correction there is no norm."""
    dx = dnorm = h = None
    if correction is None:
        if need_x:
            dx = torch.ops.coda.gemm(dz, joined(parts), None, incoming)
    elif need_x or need_norm:
        want_h = any(need_parts) and norm_weight is not None
        pair = parts if len(parts) == 2 else (joined(parts), None)  # the operator reads a pair in place if it lies so
        dx, h, dnorm = torch.ops.coda.norm_backward(dz, *pair, x, norm_weight, correction, incoming, want_h, need_norm)
        dx, h, dnorm = (t if wanted else None for t, wanted in ((dx, need_x), (h, want_h), (dnorm, need_norm)))
    if not any(need_parts):
        return dx, dnorm, *[None] * len(parts)
    if h is None:
        h = x if norm_weight is None else torch.ops.coda.rms_norm_stats(x, norm_weight, 0.0)[0]
    return dx, dnorm, *part_gradients(parts, need_parts, dz, h)


def norm_statistics(rows: Tensor, norm_weight: Tensor | None, eps: float, norm: str) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """(h or None without a norm weight, rstd, mean of a LayerNorm) of rows [M, D], in a pass over them; nothing is recorded."""
    with torch.no_grad():
        if norm == "layer":
            h, rstd, mean = torch.ops.coda.layer_norm_stats(rows, norm_weight, None, eps, False)
        else:
            h, rstd, mean = *torch.ops.coda.rms_norm_stats(rows, norm_weight, eps), None
    return (None if norm_weight is None else h), rstd, mean


def layer_gradient(dz, correction, offset, x, norm_weight, norm_bias, rstd, mean, w, incoming, need_x, need_norm, need_w):
    """`norm_gradient` for a LayerNorm. What the weight gradient reads is (x - mean) norm_weight + norm_bias / rstd (programs/norm.hpp in csrc)."""
    dx = dnorm = dw = h = None
    if need_x or need_norm:
        dx, h, dnorm = torch.ops.coda.layer_norm_backward(
            dz, w, x, norm_weight, norm_bias, rstd, mean, correction, offset, incoming, need_w, need_norm
        )
        dx, dnorm = (t if wanted else None for t, wanted in ((dx, need_x), (dnorm, need_norm)))
    elif need_w:
        h = x.to(rstd.dtype) - mean.unsqueeze(1)
        h = h if norm_weight is None else h * norm_weight
        h = (h if norm_bias is None else h + norm_bias / rstd.unsqueeze(1)).to(x.dtype)
    if need_w:
        dw = weight_gradient(w, dz.t(), h)
    return dx, dnorm, dw


class LayerNorm(torch.autograd.Function):
    """LayerNorm(x) of rows, rounded once: for products whose epilogue has no room for the mean."""

    @staticmethod
    def forward(ctx: Any, public, x, norm_weight, norm_bias, eps):
        h, rstd, mean = torch.ops.coda.layer_norm_stats(x, norm_weight, norm_bias, eps, True)
        ctx.save_for_backward(x, norm_weight, norm_bias, rstd, mean)
        ctx.public = public
        return h

    @staticmethod
    def backward(ctx: Any, dh):
        x, norm_weight, norm_bias, rstd, mean = ctx.saved_tensors
        _, need_x, need_norm, need_norm_bias, _ = ctx.needs_input_grad
        wide, dx, dnorm = dh.to(rstd.dtype), None, None
        n = (x.to(rstd.dtype) - mean.unsqueeze(1)) * rstd.unsqueeze(1)
        if need_x:
            dn = wide if norm_weight is None else wide * norm_weight
            dx = (rstd.unsqueeze(1) * (dn - dn.mean(1, keepdim=True) - n * (dn * n).mean(1, keepdim=True))).to(x.dtype)
        if need_norm:
            dnorm = (wide * n).sum(0).to(norm_weight.dtype)
        dnorm_bias = wide.sum(0).to(norm_bias.dtype) if need_norm_bias else None
        return None, *once(ctx.public, (dx, dnorm, dnorm_bias), dh, x, norm_weight, norm_bias), None


@fake("coda::layer_norm_stats")
def _(x, norm_weight, norm_bias, eps, normalised):
    h = x.new_empty((x.shape[0], x.shape[1]) if normalised or norm_weight is not None else (0,))
    return h, *(x.new_empty((x.shape[0],), dtype=statistics_dtype(x)) for _ in range(2))


@fake("coda::layer_norm_backward")
def _(dz, weight, x, norm_weight, norm_bias, rstd, mean, correction, offset, incoming, want_h, want_dnorm):
    norm = x if norm_weight is None else norm_weight
    return x.new_empty((x.shape[0], x.shape[1])), x.new_empty(x.shape if want_h else (0,)), norm.new_empty((x.shape[1],) if want_dnorm else (0,))


for _op in ("layer_norm_stats", "layer_norm_backward"):
    no_second_derivative(f"coda::{_op}", "coda.norm_linear")


@fake("coda::norm_backward")
def _(dz, weight, w_up, x, norm_weight, correction, incoming, want_h, want_dnorm):
    norm = x if norm_weight is None else norm_weight
    return x.new_empty((x.shape[0], x.shape[1])), x.new_empty(x.shape if want_h else (0,)), norm.new_empty((x.shape[1],) if want_dnorm else (0,))
