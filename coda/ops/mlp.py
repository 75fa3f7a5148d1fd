"""The gated MLP of a pre-norm block as two GEMMs, with norm, activation and residual in their epilogues."""
from __future__ import annotations

from typing import Any, Sequence

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
    named_pair,
    needs_grad,
    no_second_derivative,
    once,
    split_pair,
    split_residual,
    statistics_dtype,
    weight_gradient,
)
from coda.ops.norm import NormStats, norm_gradient

GATES = ("silu", "gelu", "gelu_tanh")


def fused_mlp_forward(
    x: Tensor,
    w_gate_up: Tensor | Sequence[Tensor],
    w_down: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """residual + (act(gate) * up) w_down^T  with  [gate | up] = RMSNorm(x; norm_weight) w_gate_up^T.

    Differentiable in every tensor argument, once. Under torch.no_grad(), or if nothing requires grad, nothing is stored for a backward.
    Forward values do not depend on that.

    Args:
        x: [..., D]; float32, float64, bfloat16 or float16.
        w_gate_up: [2F, D], gate rows first, or a pair (gate, up) of [F, D] each; dtype and device of x.
        w_down: [D_out, F].
        norm_weight: [D], dtype of x or float32. None: no norm.
        eps: of the norm.
        residual: [..., D_out]. None: nothing is added. It may be x itself.
        activation: of the gate: "silu" (SwiGLU), "gelu" (GEGLU, erf) or "gelu_tanh" (Shazeer, GLU Variants Improve Transformer,
            arXiv:2002.05202).

    Returns:
        [..., D_out] in x's dtype. Inside an autocast region all tensors but norm_weight and residual are cast to its dtype first, and the
        result has the residual's dtype if that is wider.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, device or shape; it is named, with what was expected.
        NotImplementedError: when a second derivative is asked for.

    The norm is deferred: rstd * ((x * norm_weight) W^T), with rstd applied to the accumulators (programs/glu.hpp in csrc).
    """
    return _mlp(x, w_gate_up, w_down, norm_weight=norm_weight, eps=eps, residual=residual, activation=activation)[0]


def mlp_residual(
    x: Tensor,
    w_gate_up: Tensor | Sequence[Tensor],
    w_down: Tensor,
    *,
    next_norm_weight: Tensor | None = None,
    **options: Any,
) -> Any:
    """x + fused_mlp_forward(x, ...), as a link of a chain of blocks: takes the statistics of x as stats if there are any (see `linear_residual`) and,
    with next_norm_weight (and next_eps), returns (output, statistics of the output)."""
    out, following = _mlp(x, w_gate_up, w_down, residual=x, next_norm_weight=next_norm_weight, **options)
    return out if next_norm_weight is None else (out, following)


def _mlp(x, w_gate_up, w_down, *, norm_weight, eps, residual, activation="silu", stats=None, next_norm_weight=None, next_eps=1e-6):
    """(the output, its statistics for next_norm_weight or None)"""
    check_tensor("x", x)
    w_gate_up, w_up = split_pair("w_gate_up", w_gate_up)
    check_tensor("w_down", w_down)
    if w_down.dim() != 2:
        raise ValueError(f"w_down has shape {list(w_down.shape)}, expected 2 dimensions (D, F)")
    check_optional_tensor("norm_weight", norm_weight)
    check_optional_tensor("residual", residual)
    check_activation(activation, GATES)
    check_devices(x, **named_pair("w_gate_up", w_gate_up, w_up), w_down=w_down, norm_weight=norm_weight, residual=residual)
    if stats is not None:
        stats.check(x, norm_weight, eps)
    given = x
    x, w_gate_up, w_up, w_down = cast_for_autocast(x, x, w_gate_up, w_up, w_down)
    rows = as_rows(x)
    shape = (*x.shape[:-1], w_down.shape[0])
    if residual is not None and residual.shape != shape:
        raise ValueError(f"residual has shape {list(residual.shape)}, expected {list(shape)} (the shape of the output)")
    inside, after = split_residual(x, residual)
    # Then its gradient joins that of the norm in one epilogue.
    residual_is_x = inside is given and x is given
    h, rstd = (None, None) if stats is None or x is not given else stats.rows
    next_inside = next_norm_weight is not None and after is None
    out, _, _, next_h, next_rstd = torch.ops.coda.fused_mlp(
        rows,
        h,
        rstd,
        w_gate_up,
        w_up,
        w_down,
        norm_weight,
        None if inside is None or residual_is_x else as_rows(inside),
        residual_is_x,
        next_norm_weight.detach() if next_inside else None,
        activation,
        eps,
        next_eps,
        next_inside,
        needs_grad(x, w_gate_up, w_up, w_down, norm_weight),
    )
    out = out.view(shape)
    out = out if after is None else out + after
    if next_norm_weight is None:
        return out, None
    if not next_inside:
        next_h, next_rstd = torch.ops.coda.rms_norm_stats(as_rows(out.detach()), next_norm_weight.detach(), next_eps)
    return out, NormStats.make(out, next_h.view(shape), next_rstd.view(shape[:-1]), next_norm_weight, next_eps)


@fake("coda::fused_mlp")
def _(
    x, stats_h, stats_rstd, w_gate_up, w_up, w_down, norm_weight, residual, residual_is_x, next_norm_weight, activation, eps, next_eps, next_stats, save
):
    m = x.shape[0]
    f = w_gate_up.shape[0] // 2 if w_up is None else w_gate_up.shape[0]
    normed = norm_weight is not None and stats_rstd is None
    out = x.new_empty((m, w_down.shape[0]))
    return (
        out,
        x.new_empty((m,) if save and normed else (0,), dtype=statistics_dtype(x)),
        x.new_empty((m, 2 * f) if save else (0,)),
        x.new_empty(out.shape if next_norm_weight is not None and next_stats else (0,)),
        x.new_empty((m,) if next_stats else (0,), dtype=statistics_dtype(x)),
    )


@fake("coda::rstd_glu")
def _(h, rstd, w_gate_up, w_up, activation, store_preactivation):
    f = w_gate_up.shape[0] // 2 if w_up is None else w_gate_up.shape[0]
    return h.new_empty((h.shape[0], f)), h.new_empty((h.shape[0], 2 * f) if store_preactivation else (0,))


@fake("coda::dglu")
def _(dy, w_down, preactivation, rstd, activation, width, want_value):
    m, f = dy.shape[0], preactivation.shape[1] // 2
    return dy.new_empty((m, 2 * f)), dy.new_empty((m, f) if want_value else (0,)), dy.new_empty((m,), dtype=statistics_dtype(dy))


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, _, stats_rstd, w_gate_up, w_up, w_down, norm_weight, _, residual_is_x, _, activation, _, _, _, save = inputs
    _, rstd, preactivation, next_h, next_rstd = output
    ctx.mark_non_differentiable(rstd, preactivation, next_h, next_rstd)
    ctx.set_materialize_grads(False)
    ctx.residual_is_x, ctx.activation, ctx.saved = residual_is_x, activation, save
    if not save:  # only the residual asks for a gradient
        return
    normed = norm_weight is not None or stats_rstd is not None
    ctx.width = w_gate_up.shape[1]
    need_x, _, _, need_gate, need_up, _, need_norm = ctx.needs_input_grad[:7]
    ctx.save_for_backward(x if need_x or need_gate or need_up or need_norm else None, (rstd if stats_rstd is None else stats_rstd) if normed else None, preactivation, w_gate_up, w_up, w_down, norm_weight)


def _backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple:
    need_x, _, _, need_gate, need_up, need_down, need_norm, need_residual = ctx.needs_input_grad[:8]
    dx = dgate = dup = ddown = dnorm = None
    if dout is not None and ctx.saved:
        x, rstd, preactivation, w_gate_up, w_up, w_down, norm_weight = ctx.saved_tensors
        # With the recomputed product for the down projection's weight.
        dz, product, correction = torch.ops.coda.dglu(dout, w_down, preactivation, rstd, ctx.activation, ctx.width, need_down)
        if need_down:
            ddown = weight_gradient(w_down, dout.t(), product)
        incoming = dout if ctx.residual_is_x else None
        if x is None:
            pass
        elif rstd is not None:
            dx, dnorm, dgate = norm_gradient(
                dz, correction, x, norm_weight, w_gate_up, w_up, incoming, need_x, need_norm, need_gate or need_up
            )
        else:
            w = w_gate_up if w_up is None else torch.cat((w_gate_up, w_up))
            dx = torch.ops.coda.gemm(dz, w, None, incoming) if need_x else None
            if need_gate or need_up:
                dgate = weight_gradient(w_gate_up, dz.t(), x) if w_up is None else torch.ops.coda.gemm(dz.t(), x)
        if w_up is not None and dgate is not None:
            f = w_gate_up.shape[0]
            dgate, dup = (dgate[:f] if need_gate else None), (dgate[f:] if need_up else None)
        dx, dgate, dup, ddown, dnorm = once("coda.fused_mlp_forward", (dx, dgate, dup, ddown, dnorm), dout, x, w_gate_up, w_up, w_down, norm_weight)
    return dx, None, None, dgate, dup, ddown, dnorm, (dout if need_residual else None), None, None, None, None, None, None, None


torch.library.register_autograd("coda::fused_mlp", _backward, setup_context=_setup)
for _op in ("rstd_glu", "dglu"):
    no_second_derivative(f"coda::{_op}", "coda.fused_mlp_forward")
