"""Linear layers with bias and residual in the epilogue."""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coda.ops._common import (
    as_rows,
    cast_for_autocast,
    check_devices,
    check_optional_tensor,
    check_tensor,
    fake,
    no_second_derivative,
    split_residual,
)

_ACTIVATIONS = {None: None, "relu": F.relu, "silu": F.silu, "gelu": F.gelu}


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, residual: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """act(x W^T + b) + residual, differentiable in every tensor.

    Args:
        x: [..., K]; float32, float64, bfloat16 or float16.
        weight: [N, K] as in torch.nn.Linear, dtype and device of x (inside autocast, of any of these dtypes).
        bias: [N]. residual: [..., N], added in the epilogue of the product.
        activation: None, "relu", "silu" or "gelu" (erf), applied before the residual.

    Returns:
        [..., N] in x's dtype (inside autocast, its dtype, or the residual's if that is wider); the products are summed in float32 and rounded once.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, device or shape; it is named, with what was expected.
    """
    check_tensor("x", x)
    check_tensor("weight", weight)
    check_optional_tensor("bias", bias)
    check_optional_tensor("residual", residual)
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {', '.join(map(repr, _ACTIVATIONS))}")
    check_devices(x, weight=weight, bias=bias, residual=residual)
    x, weight, bias = cast_for_autocast(x, x, weight, bias)
    rows = as_rows(x)
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {list(weight.shape)}, expected 2 dimensions (out, in)")
    if residual is not None and residual.shape != (*x.shape[:-1], weight.shape[0]):
        raise ValueError(f"residual has shape {list(residual.shape)}, expected {[*x.shape[:-1], weight.shape[0]]} (the shape of the output)")
    inside, after = split_residual(x, residual)
    act = _ACTIVATIONS[activation]
    if act is not None:
        inside, after = None, residual
    out = torch.ops.coda.linear(rows, weight, bias, None if inside is None else as_rows(inside)).view(*x.shape[:-1], weight.shape[0])
    out = out if act is None else act(out)
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
    ctx.save_for_backward(x if need_weight else None, weight if need_x else None)


def _backward(ctx: Any, dy: Tensor) -> tuple:
    x, weight = ctx.saved_tensors
    need_x, need_weight, need_bias, need_residual = ctx.needs_input_grad
    return (
        torch.ops.coda.gemm(dy, weight) if need_x else None,
        torch.ops.coda.gemm(dy.t(), x) if need_weight else None,
        dy.sum(0) if need_bias else None,
        dy if need_residual else None,
    )


torch.library.register_autograd("coda::linear", _backward, setup_context=_setup)
no_second_derivative("coda::gemm", "coda.linear")
