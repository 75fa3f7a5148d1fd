"""The raw forward programs: one GEMM and its epilogue each, nothing recorded for a backward."""
from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from coda.ops._common import (
    as_rows,
    check_activation,
    check_devices,
    check_optional_tensor,
    check_pair,
    check_tensor,
    check_weights,
    joined,
    named_pair,
    refuse_grad,
    split_pair,
)
from coda.ops.mlp import GATES
from coda.ops.norm_linear import check_head_norms, rope_arguments, rope_forward, split_heads, split_qkv


def linear_residual_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor | None, eps: float = 1e-6, *, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(residual_out, h, rstd): residual_out = residual + x W^T + b, h = residual_out * norm_weight, rstd = rsqrt(mean(residual_out^2) + eps).

    Args:
        x: [..., K]; float32, float64, bfloat16 or float16. weight: [N, K]. residual: [..., N]. bias: [N].
        norm_weight: [N] in x's dtype or, beside 16 bits, float32. None: h is residual_out.

    Returns:
        residual_out and h [..., N] in x's dtype; rstd [...] in float32 (float64 for float64).

    Raises:
        TypeError, ValueError: an argument of another type, dtype, device or shape, or one that requires grad (use `coda.linear_residual`).
    """
    named = {"weight": weight, "residual": residual}
    for name, t in {"x": x, **named}.items():
        check_tensor(name, t)
    optional = {"norm_weight": check_optional_tensor("norm_weight", norm_weight), "bias": check_optional_tensor("bias", bias)}
    check_devices(x, **named, **optional)
    refuse_grad("coda.linear_residual_rms_norm", "coda.linear_residual", x=x, **named, **optional)
    if residual.dim() == 0 or weight.dim() != 2 or residual.shape != (*x.shape[:-1], weight.shape[0]):
        raise ValueError(f"residual has shape {list(residual.shape)}, expected that of the output, with weight of shape {list(weight.shape)}")
    out, h, rstd = torch.ops.coda.linear_residual(as_rows(x), weight, bias, as_rows(residual), norm_weight, eps)
    out = out.view(residual.shape)
    return out, (out if norm_weight is None else h.view(residual.shape)), rstd.view(residual.shape[:-1])


def rms_linear(h: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rstd (h W^T) + b, the product behind a deferred norm; (h, rstd) from `coda.rms_norm_stats` or `coda.linear_residual_rms_norm`.

    Args:
        h: [..., D]; float32, float64, bfloat16 or float16. rstd: [...] in float32 (float64 for float64). weight: [N, D]. bias: [N].

    Returns:
        [..., N] in h's dtype.

    Raises:
        TypeError, ValueError: as `coda.linear_residual_rms_norm`; the differentiable function is `coda.norm_linear`.
    """
    rows, rstd_rows = _deferred("coda.rms_linear", h, rstd, weight=check_tensor("weight", weight), bias=check_optional_tensor("bias", bias))
    return torch.ops.coda.rstd_act(rows, rstd_rows, weight, bias, "identity", False)[0].view(*h.shape[:-1], weight.shape[0])


def rms_linear_swiglu(h: Tensor, rstd: Tensor, w_gate_up: Tensor | tuple[Tensor, Tensor], *, activation: str = "silu") -> Tensor:
    """act(gate) * up with [gate | up] = rstd (h w_gate_up^T).

    Args:
        h, rstd: as `coda.rms_linear`. w_gate_up: [2F, D], gate rows first, or a pair (gate, up) of [F, D] each.
        activation: "silu", "gelu" (erf) or "gelu_tanh".

    Returns:
        [..., F] in h's dtype.

    Raises:
        TypeError, ValueError: as `coda.linear_residual_rms_norm`; the differentiable function is `coda.norm_linear`.
    """
    check_activation(activation, GATES)
    w, w_up = split_pair("w_gate_up", w_gate_up)
    rows, rstd_rows = _deferred("coda.rms_linear_swiglu", h, rstd, **named_pair("w_gate_up", w, w_up))
    check_pair("w_gate_up", w, w_up)
    out = torch.ops.coda.rstd_glu(rows, rstd_rows, w, w_up, activation, False)[0]
    return out.view(*h.shape[:-1], out.shape[1])


def rms_linear_rope(
    h: Tensor,
    rstd: Tensor,
    w_qkv: Tensor | Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    bias: Tensor | Sequence[Tensor] | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    qk_norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) with [q | k | v] = rstd (h w_qkv^T) + b, q and k turned by their positions.

    Args:
        h, rstd: as `coda.rms_linear`, with h [..., T, D]. The other arguments as `coda.norm_linear_rope`.
        rotary_dim: how many columns of a head turn; None: twice the width of cos.

    Returns:
        q [..., T, num_heads, head_dim], k and v [..., T, num_kv_heads, head_dim]: views of one buffer, in h's dtype.

    Raises:
        TypeError, ValueError: as `coda.linear_residual_rms_norm`; the differentiable function is `coda.norm_linear_rope`.
    """
    weights, bias = split_qkv(w_qkv, bias, (num_heads, num_kv_heads), head_dim)
    rows, rstd_rows = _deferred("coda.rms_linear_rope", h, rstd, **weights, bias=check_optional_tensor("bias", bias))
    refuse_grad("coda.rms_linear_rope", "coda.norm_linear_rope, which takes the tables as constants", cos=check_tensor("cos", cos), sin=check_tensor("sin", sin))
    parts = list(weights.values())
    rope = rope_arguments(h, parts, cos, sin, num_heads, num_kv_heads, head_dim, positions, interleaved)
    if rotary_dim is not None and rotary_dim != 2 * cos.shape[-1]:
        raise ValueError(f"rotary_dim is {rotary_dim!r}, expected {2 * cos.shape[-1]}, twice the width of cos")
    norms = check_head_norms(h, q_norm_weight, k_norm_weight)
    refuse_grad("coda.rms_linear_rope", "coda.norm_linear_rope", q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    qkv, _ = rope_forward(rows, rstd_rows, joined(parts), bias, norms, (qk_norm_eps, num_heads * head_dim), rope, False)
    return split_heads(qkv, (num_heads, num_kv_heads), head_dim, h.shape[:-1])


def _deferred(public: str, h: Tensor, rstd: Tensor, **others: Tensor | None) -> tuple[Tensor, Tensor]:
    check_tensor("h", h)
    check_tensor("rstd", rstd)
    check_devices(h, rstd=rstd, **others)
    instead = "coda.norm_linear_rope" if public.endswith("rope") else "coda.norm_linear"
    refuse_grad(public, instead, h=h, rstd=rstd, **others)
    rows = check_weights("h", h, **others)
    if rstd.shape != h.shape[:-1]:
        raise ValueError(f"rstd has shape {list(rstd.shape)}, expected {list(h.shape[:-1])} (one value a row of h)")
    return rows, rstd.reshape(-1)
