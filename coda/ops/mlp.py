"""The gated MLP of a pre-norm block as two GEMMs, with norm, activation and residual in their epilogues."""
from __future__ import annotations

from typing import Any, Sequence

import torch
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
    statistics_dtype,
)


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
        activation: "silu" (SwiGLU: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202).

    Returns:
        [..., D_out] in x's dtype. Inside an autocast region all tensors but norm_weight and residual are cast to its dtype first, and the
        result has the residual's dtype if that is wider.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, device or shape; it is named, with what was expected.
        NotImplementedError: when a second derivative is asked for.

    The norm is deferred: rstd * ((x * norm_weight) W^T), with rstd applied to the accumulators (programs/swiglu.hpp in csrc).
    """
    check_tensor("x", x)
    w_up = None
    if not isinstance(w_gate_up, Tensor):
        if not isinstance(w_gate_up, (tuple, list)) or len(w_gate_up) != 2:
            raise TypeError(f"w_gate_up is {type(w_gate_up).__name__}, expected a tensor [2F, D] or a pair (gate, up) of tensors [F, D]")
        w_gate_up, w_up = (check_tensor(f"w_gate_up[{i}]", w) for i, w in enumerate(w_gate_up))
    check_tensor("w_down", w_down)
    if w_down.dim() != 2:
        raise ValueError(f"w_down has shape {list(w_down.shape)}, expected 2 dimensions (D, F)")
    check_optional_tensor("norm_weight", norm_weight)
    check_optional_tensor("residual", residual)
    if activation != "silu":
        raise ValueError(f"activation is {activation!r}, expected 'silu'")
    pair = {"w_gate_up": w_gate_up} if w_up is None else {"w_gate_up[0]": w_gate_up, "w_gate_up[1]": w_up}
    check_devices(x, **pair, w_down=w_down, norm_weight=norm_weight, residual=residual)
    x, w_gate_up, w_up, w_down = cast_for_autocast(x, x, w_gate_up, w_up, w_down)
    rows = as_rows(x)
    shape = (*x.shape[:-1], w_down.shape[0])
    if residual is not None and residual.shape != shape:
        raise ValueError(f"residual has shape {list(residual.shape)}, expected {list(shape)} (the shape of the output)")
    inside, after = split_residual(x, residual)
    tensors = (x, w_gate_up, w_up, w_down, norm_weight)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    out = torch.ops.coda.fused_mlp(
        rows,
        w_gate_up,
        w_up,
        w_down,
        norm_weight,
        None if inside is None else as_rows(inside),
        eps,
        save,
    )[0]
    out = out.view(shape)
    return out if after is None else out + after


@fake("coda::fused_mlp")
def _(x, w_gate_up, w_up, w_down, norm_weight, residual, eps, save):
    m, d = x.shape
    f = w_gate_up.shape[0] // 2 if w_up is None else w_gate_up.shape[0]
    keep = save and norm_weight is not None
    return (
        x.new_empty((m, w_down.shape[0])),
        x.new_empty((m, d) if keep else (0,)),
        x.new_empty((m,) if keep else (0,), dtype=statistics_dtype(x)),
        x.new_empty((m, 2 * f) if save else (0,)),
    )


@fake("coda::fused_mlp_backward")
def _(dout, x, h, rstd, preactivation, w_gate_up, w_up, w_down, norm_weight, wanted):
    rows = w_gate_up.shape[0] * (1 if w_up is None else 2)
    norm = x if norm_weight is None else norm_weight
    return (
        x.new_empty((x.shape[0], x.shape[1]) if wanted[0] else (0,)),
        x.new_empty((rows, x.shape[1]) if wanted[1] else (0,)),
        x.new_empty((w_down.shape[0], w_down.shape[1]) if wanted[2] else (0,)),
        norm.new_empty((norm.shape[0],) if wanted[3] and norm_weight is not None else (0,)),
    )


@fake("coda::rstd_swiglu")
def _(h, rstd, w_gate_up, w_up, store_preactivation):
    f = w_gate_up.shape[0] // 2 if w_up is None else w_gate_up.shape[0]
    return h.new_empty((h.shape[0], f)), h.new_empty((h.shape[0], 2 * f) if store_preactivation else (0,))


@fake("coda::dswiglu")
def _(dy, w_down, preactivation, rstd):
    m, f = dy.shape[0], w_down.shape[1]
    return dy.new_empty((m, 2 * f)), dy.new_empty((m, f)), dy.new_empty((m,), dtype=statistics_dtype(dy))


@fake("coda::norm_backward")
def _(dn, x, norm_weight, rstd, row_dot):
    return dn.new_empty((dn.shape[0], dn.shape[1])), norm_weight.new_empty((norm_weight.shape[0],))


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, w_gate_up, w_up, w_down, norm_weight, _, _, save = inputs
    _, h, rstd, preactivation = output
    ctx.mark_non_differentiable(h, rstd, preactivation)
    ctx.set_materialize_grads(False)
    if not save:  # only the residual asks for a gradient
        return
    need_x, need_gate, need_up, need_down, need_norm = ctx.needs_input_grad[:5]
    normed = norm_weight is not None
    ctx.save_for_backward(
        x if not normed or need_x or need_norm else None,
        h if normed and (need_gate or need_up) else None,
        rstd if normed else None,
        preactivation,
        w_gate_up,
        w_up,
        w_down,
        norm_weight,
    )


def _backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple:
    need_x, need_gate, need_up, need_down, need_norm, need_residual = ctx.needs_input_grad[:6]
    dx = dgate = dup = ddown = dnorm = None
    if dout is not None and (need_x or need_gate or need_up or need_down or need_norm):
        x, h, rstd, preactivation, w_gate_up, w_up, w_down, norm_weight = ctx.saved_tensors
        wanted = [need_x, need_gate or need_up, need_down, need_norm]
        # What was not saved is not read beyond its shape and dtype.
        x = next(t for t in (x, h, dout) if t is not None)
        h = x if h is None else h
        dx, dw, ddown, dnorm = torch.ops.coda.fused_mlp_backward(
            dout, x, h, rstd, preactivation, w_gate_up, w_up, w_down, norm_weight, wanted
        )
        dx, ddown, dnorm = (t if needed else None for t, needed in ((dx, need_x), (ddown, need_down), (dnorm, need_norm)))
        if need_gate or need_up:
            f = preactivation.shape[1] // 2
            dgate, dup = (dw, None) if w_up is None else (dw[:f] if need_gate else None, dw[f:] if need_up else None)
    return dx, dgate, dup, ddown, dnorm, (dout if need_residual else None), None, None


torch.library.register_autograd("coda::fused_mlp", _backward, setup_context=_setup)
no_second_derivative("coda::fused_mlp_backward", "coda.fused_mlp_forward")
