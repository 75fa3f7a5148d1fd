"""Linear layers with bias and residual in the epilogue."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coda.ops._common import (
    as_rows,
    cast_for_autocast,
    check_activation,
    check_devices,
    check_optional_tensor,
    check_tensor,
    fake,
    needs_grad,
    no_second_derivative,
    once,
    split_residual,
    statistics_dtype,
    weight_gradient,
)
from coda.ops.norm import NormStats, check_norm, norm_statistics

ACTIVATIONS = ("relu", "relu2", "silu", "gelu", "gelu_tanh")


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, residual: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """act(x W^T + b) + residual, differentiable in every tensor.

    Args:
        x: [..., K]; float32, float64, bfloat16 or float16.
        weight: [N, K] as in torch.nn.Linear, dtype and device of x (inside autocast, of any of these dtypes).
        bias: [N]. residual: [..., N], added in the epilogue of the product.
        activation: None, "relu", "relu2" (its square), "silu", "gelu" (erf) or "gelu_tanh", applied before the residual.

    Returns:
        [..., N] in x's dtype (inside autocast, its dtype, or the residual's if that is wider); the products are summed in float32 and rounded once.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, device or shape; it is named, with what was expected.
    """
    check_tensor("x", x)
    check_tensor("weight", weight)
    check_optional_tensor("bias", bias)
    check_optional_tensor("residual", residual)
    check_activation(activation, (None, *ACTIVATIONS))
    check_devices(x, weight=weight, bias=bias, residual=residual)
    x, weight, bias = cast_for_autocast(x, x, weight, bias)
    rows = as_rows(x)
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {list(weight.shape)}, expected 2 dimensions (out, in)")
    if residual is not None and residual.shape != (*x.shape[:-1], weight.shape[0]):
        raise ValueError(f"residual has shape {list(residual.shape)}, expected {[*x.shape[:-1], weight.shape[0]]} (the shape of the output)")
    inside, after = split_residual(x, residual)
    if activation is not None:
        inside, after = None, residual
    shape = (*x.shape[:-1], weight.shape[0])
    if activation is None:
        out = torch.ops.coda.linear(rows, weight, bias, None if inside is None else as_rows(inside))
    elif needs_grad(x, weight, bias):
        out = _Activated.apply(rows, weight, bias, activation)
    else:
        out = torch.ops.coda.rstd_act(rows, None, weight, bias, activation, False)[0]
    out = out.view(shape)
    return out if after is None else out + after


@fake("coda::linear")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@fake("coda::gemm")
def _(a: Tensor, b: Tensor, bias: Tensor | None = None, source: Tensor | None = None, alpha: float = 1, beta: float = 1) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias, _ = inputs
    need_x, need_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if need_weight else None, weight if need_x or need_weight else None)


def _backward(ctx: Any, dy: Tensor) -> tuple:
    x, weight = ctx.saved_tensors
    need_x, need_weight, need_bias, need_residual = ctx.needs_input_grad
    return (
        torch.ops.coda.gemm(dy, weight) if need_x else None,
        weight_gradient(weight, dy.t(), x) if need_weight else None,
        dy.sum(0) if need_bias else None,
        dy if need_residual else None,
    )


torch.library.register_autograd("coda::linear", _backward, setup_context=_setup)
no_second_derivative("coda::gemm", "coda.linear")


@fake("coda::gemm_accumulate_")
def _(out: Tensor, a: Tensor, b: Tensor, add: bool = True) -> None:
    return None


class _Activated(torch.autograd.Function):
    """act(x W^T + b), the pre-activation kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, activation):
        y, z = torch.ops.coda.rstd_act(x, None, weight, bias, activation, True)
        ctx.save_for_backward(x, weight, bias, z)
        ctx.activation = activation
        return y

    @staticmethod
    def backward(ctx: Any, dy):
        x, weight, bias, z = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dz, _, _, dbias = torch.ops.coda.dact(dy, None, z, None, bias, ctx.activation, 1, False)
        dx = torch.ops.coda.gemm(dz, weight) if need_x else None
        dw = weight_gradient(weight, dz.t(), x) if need_weight else None
        return *once("coda.linear", (dx, dw, dbias if need_bias else None), dy, x, weight, bias), None


def linear_residual(
    a: Tensor,
    weight: Tensor,
    residual: Tensor,
    *,
    bias: Tensor | None = None,
    next_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    next_norm: str = "rms",
) -> Tensor | tuple[Tensor, NormStats]:
    """residual + a W^T + b, and with next_norm_weight what the norm that follows needs, from the same epilogue.

    Args:
        a: [..., K]; float32, float64, bfloat16 or float16. weight: [N, K]. residual: [..., N]. bias: [N]. All of one dtype and device (inside
            autocast, of any of these dtypes).
        next_norm_weight: [N], the weight of the norm that reads the result, in its dtype or, beside 16 bits, float32; eps of that norm.
        next_norm: "rms" or "layer", the kind of that norm.

    Returns:
        The sum [..., N], in a's dtype; with next_norm_weight a pair of it and a `NormStats`, to be handed to `coda.norm_linear` as stats beside
        the sum itself. Differentiable in a, weight, residual and bias. The gradient of the statistics is formed by whoever uses them, so they
        count for nothing here. Inside autocast a residual of another dtype than the product's is added after it.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, device or shape; it is named, with what was expected.

    The squares are summed over the values as stored: rstd = rsqrt(mean(sum^2) + eps) is a function of the returned tensor alone. So are mean and
    rstd for a LayerNorm, whose variance is the mean of the squares less the square of the mean, in float32: where the mean is c deviations
    from 0, rstd is off by about c^2 of float32's roundings.
    """
    check_norm("next_norm", next_norm)
    check_tensor("a", a)
    check_tensor("weight", weight)
    check_tensor("residual", residual)
    check_optional_tensor("bias", bias)
    check_optional_tensor("next_norm_weight", next_norm_weight)
    check_devices(a, weight=weight, residual=residual, bias=bias, next_norm_weight=next_norm_weight)
    a, weight, bias = cast_for_autocast(a, a, weight, bias)
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {list(weight.shape)}, expected 2 dimensions (out, in)")
    rows = as_rows(a, "a")
    shape = (*a.shape[:-1], weight.shape[0])
    if residual.shape != shape:
        raise ValueError(f"residual has shape {list(residual.shape)}, expected {list(shape)} (the shape of the output)")
    if next_norm_weight is None:
        return linear(a, weight, bias, residual=residual)
    inside, after = split_residual(a, residual)
    if after is not None:
        out = torch.ops.coda.linear(rows, weight, bias, None).view(shape) + after
        h, rstd, mean = norm_statistics(as_rows(out.detach()), next_norm_weight.detach(), eps, next_norm)
    else:
        out, h, rstd, *rest = linear_statistics(rows, weight, bias, as_rows(residual), next_norm_weight.detach(), eps, next_norm)
        out, mean = out.view(shape), rest[0] if rest else None
    mean = None if mean is None else mean.view(shape[:-1])
    return out, NormStats.make(out, h.view(shape), rstd.view(shape[:-1]), next_norm_weight, eps, mean)


def linear_statistics(a, weight, bias, residual, norm_weight, eps, norm) -> tuple:
    """(the sum, h, rstd) of rows, with the mean behind them if the norm that follows is a LayerNorm."""
    operator = torch.ops.coda.linear_residual_moments if norm == "layer" else torch.ops.coda.linear_residual
    return operator(a, weight, bias, residual, norm_weight, eps)


@fake("coda::linear_residual")
def _(a, weight, bias, residual, next_norm_weight, eps):
    out = a.new_empty((a.shape[0], weight.shape[0]))
    h = a.new_empty((0,) if next_norm_weight is None else out.shape)
    return out, h, a.new_empty((a.shape[0],), dtype=statistics_dtype(a))


@fake("coda::linear_residual_moments")
def _(a, weight, bias, residual, next_norm_weight, eps):
    out = a.new_empty((a.shape[0], weight.shape[0]))
    h = a.new_empty((0,) if next_norm_weight is None else out.shape)
    return out, h, *(a.new_empty((a.shape[0],), dtype=statistics_dtype(a)) for _ in range(2))


def _residual_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    a, weight = inputs[:2]
    need_a, need_weight = ctx.needs_input_grad[:2]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a if need_weight else None, weight if need_a or need_weight else None)


def _residual_backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple:
    if dy is None:
        return (None,) * 6
    a, weight = ctx.saved_tensors
    need_a, need_weight, need_bias, need_residual = ctx.needs_input_grad[:4]
    return (
        torch.ops.coda.gemm(dy, weight) if need_a else None,
        weight_gradient(weight, dy.t(), a) if need_weight else None,
        dy.sum(0) if need_bias else None,
        dy if need_residual else None,
        None,
        None,
    )


for _op in ("linear_residual", "linear_residual_moments"):
    torch.library.register_autograd(f"coda::{_op}", _residual_backward, setup_context=_residual_setup)
