"""The MLP of a pre-norm block, gated or plain, as two GEMMs, with norm, activation and residual in their epilogues.

The gated one is an operator of its own (csrc/bindings/operators.cpp). The plain one is an autograd function over the operators of its two layers,
so that its backward can form the activation's gradient in the epilogue of the product with w_down.
"""
from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from coda.ops._common import (
    as_rows,
    cast_for_autocast,
    check_activation,
    check_devices,
    check_floating,
    check_matrix,
    check_optional_tensor,
    check_tensor,
    check_vector,
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
from coda.ops.linear import ACTIVATIONS, linear_statistics
from coda.ops.norm import NormStats, check_norm, norm_gradient, norm_statistics
from coda.ops.norm_linear import layer_act_gradient

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
    gated: bool = True,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    norm: str = "rms",
    norm_bias: Tensor | None = None,
) -> Tensor:
    """residual + (act(gate) * up) w_down^T  with  [gate | up] = RMSNorm(x; norm_weight) w_gate_up^T, or with gated=False
    residual + act(norm(x) w_up^T + up_bias) w_down^T + down_bias.

    Differentiable in every tensor argument, once. Under torch.no_grad(), or if nothing requires grad, nothing is stored for a backward.
    Forward values do not depend on that.

    Args:
        x: [..., D]; float32, float64, bfloat16 or float16.
        w_gate_up: [2F, D], gate rows first, or a pair (gate, up) of [F, D] each; dtype and device of x. With gated=False w_up, [F, D].
        w_down: [D_out, F].
        norm_weight: [D], dtype of x or, beside 16 bits, float32. None: no norm, of either kind.
        eps: of the norm.
        residual: [..., D_out]. None: nothing is added. It may be x itself.
        activation: of the gate: "silu" (SwiGLU), "gelu" (GEGLU, erf) or "gelu_tanh" (Shazeer, GLU Variants Improve Transformer,
            arXiv:2002.05202); with gated=False also "relu" or "relu2" (its square).
        gated: False for two layers with an activation between them, as in GPT-2, BERT or ViT. The rest is for these alone:
        up_bias: [F]. down_bias: [D_out]. norm: "rms" or "layer". norm_bias: [D] in x's dtype or, beside 16 bits, float32, for "layer".

    Returns:
        [..., D_out] in x's dtype. Inside an autocast region all tensors but norm_weight, norm_bias and residual are cast to its dtype first, and
        the result has the residual's dtype if that is wider.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, device or shape; it is named, with what was expected.
        NotImplementedError: when a second derivative is asked for.

    The norm is deferred: rstd * ((x * norm_weight) W^T), with rstd applied to the accumulators (programs/glu.hpp and activation.hpp in csrc); for a
    LayerNorm, and for what that costs in accuracy, see `coda.norm_linear`.
    """
    options = dict(activation=activation, gated=gated, up_bias=up_bias, down_bias=down_bias, norm=norm, norm_bias=norm_bias)
    return _mlp(x, w_gate_up, w_down, norm_weight=norm_weight, eps=eps, residual=residual, **options)[0]


def mlp_residual(
    x: Tensor,
    w_gate_up: Tensor | Sequence[Tensor],
    w_down: Tensor,
    *,
    next_norm_weight: Tensor | None = None,
    **options: Any,
) -> Any:
    """x + fused_mlp_forward(x, ...), as a link of a chain of blocks: takes the statistics of x as stats if there are any (see `linear_residual`) and,
    with next_norm_weight (and next_eps, and next_norm if the MLP is not gated), returns (output, statistics of the output)."""
    out, following = _mlp(x, w_gate_up, w_down, residual=x, next_norm_weight=next_norm_weight, **options)
    return out if next_norm_weight is None else (out, following)


def _mlp(
    x,
    w_gate_up,
    w_down,
    *,
    norm_weight,
    eps,
    residual,
    activation="silu",
    gated=True,
    up_bias=None,
    down_bias=None,
    norm="rms",
    norm_bias=None,
    stats=None,
    next_norm_weight=None,
    next_eps=1e-6,
    next_norm="rms",
):
    """(the output, its statistics for next_norm_weight or None)"""
    check_tensor("x", x)
    w_gate_up, w_up = split_pair("w_gate_up", w_gate_up) if gated else (check_tensor("w_gate_up", w_gate_up), None)
    check_tensor("w_down", w_down)
    if w_down.dim() != 2:
        raise ValueError(f"w_down has shape {list(w_down.shape)}, expected 2 dimensions (D, F)")
    optional = dict(norm_weight=norm_weight, residual=residual, up_bias=up_bias, down_bias=down_bias, norm_bias=norm_bias)
    for name, t in optional.items():
        check_optional_tensor(name, t)
    _check_kinds(gated, norm, next_norm, norm_weight is not None or stats is not None, up_bias, down_bias, norm_bias)
    check_activation(activation, GATES if gated else ACTIVATIONS)
    check_devices(x, **named_pair("w_gate_up", w_gate_up, w_up), w_down=w_down, **optional)
    if stats is not None:
        stats.check(x, norm_weight, eps, norm)
    given = x
    x, w_gate_up, w_up, w_down, up_bias, down_bias = cast_for_autocast(x, x, w_gate_up, w_up, w_down, up_bias, down_bias)
    rows = as_rows(x)
    shape = (*x.shape[:-1], w_down.shape[0])
    if residual is not None and residual.shape != shape:
        raise ValueError(f"residual has shape {list(residual.shape)}, expected {list(shape)} (the shape of the output)")
    inside, after = split_residual(x, residual)
    # Then its gradient joins that of the norm in one epilogue.
    residual_is_x = inside is given and x is given
    h, rstd = (None, None) if stats is None or x is not given else stats.rows
    mean = None if rstd is None or stats.mean is None else stats.mean.reshape(-1)
    added = None if inside is None or residual_is_x else as_rows(inside)
    next_inside = next_norm_weight is not None and after is None
    if gated:
        out, _, _, *following = torch.ops.coda.fused_mlp(
            rows,
            h,
            rstd,
            w_gate_up,
            w_up,
            w_down,
            norm_weight,
            added,
            residual_is_x,
            next_norm_weight.detach() if next_inside else None,
            activation,
            eps,
            next_eps,
            next_inside,
            needs_grad(x, w_gate_up, w_up, w_down, norm_weight),
        )
    else:
        _check_plain(rows, w_gate_up, up_bias, w_down, down_bias, norm_weight, norm_bias, inside, next_norm_weight)
        if rstd is None and (norm_weight is not None or stats is not None):
            h, rstd, mean = norm_statistics(rows, norm_weight, eps, norm)
        arguments = rows, h, rstd, mean, norm_weight, norm_bias, w_gate_up, up_bias, w_down, down_bias, added, residual_is_x
        next_arguments = (next_norm_weight.detach(), next_eps, next_norm) if next_inside else None
        # The operator behind the activation has its own gradient, which is enough if nothing before it wants one.
        plain = _PlainMlp.apply if needs_grad(rows, norm_weight, norm_bias, w_gate_up, up_bias) else _plain_mlp
        out, *following = plain(*arguments, activation, next_arguments)
    out = out.view(shape)
    out = out if after is None else out + after
    if next_norm_weight is None:
        return out, None
    if not next_inside:
        following = norm_statistics(as_rows(out.detach()), next_norm_weight.detach(), next_eps, next_norm)
    next_h, next_rstd, *means = following
    next_mean = means[0].view(shape[:-1]) if next_norm == "layer" else None
    return out, NormStats.make(out, next_h.view(shape), next_rstd.view(shape[:-1]), next_norm_weight, next_eps, next_mean)


def _check_kinds(gated, norm, next_norm, has_norm, up_bias, down_bias, norm_bias) -> None:
    for name, kind in (("norm", norm), ("next_norm", next_norm)):
        check_norm(name, kind)
        if gated and kind != "rms":
            raise ValueError(f"{name} is {kind!r}, expected 'rms' with gated=True")
    for name, t in (("up_bias", up_bias), ("down_bias", down_bias), ("norm_bias", norm_bias)):
        if gated and t is not None:
            raise ValueError(f"{name} is a tensor, expected None with gated=True")
    if norm_bias is not None and (norm == "rms" or not has_norm):
        raise ValueError(f"norm_bias is a tensor, expected None {'with norm ' + repr(norm) if norm == 'rms' else 'without norm_weight'}")


def _check_plain(rows, w_up, up_bias, w_down, down_bias, norm_weight, norm_bias, residual, next_norm_weight) -> None:
    """Before anything runs, and under the names of the public function: the operators know these by others."""
    check_floating("x", rows)
    check_matrix("w_gate_up", w_up, rows)
    check_matrix("w_down", w_down, w_up.t(), "w_gate_up^T")
    check_vector("up_bias", up_bias, w_up.shape[0], rows)
    check_vector("down_bias", down_bias, w_down.shape[0], rows)
    check_vector("norm_weight", norm_weight, w_up.shape[1], rows, torch.float32)
    check_vector("norm_bias", norm_bias, w_up.shape[1], rows, torch.float32)
    check_vector("next_norm_weight", next_norm_weight, w_down.shape[0], rows, torch.float32)
    if residual is not None and residual.dtype != rows.dtype:
        raise TypeError(f"residual has dtype {residual.dtype}, expected {rows.dtype} as x")


def _plain_up(x, h, rstd, mean, norm_weight, norm_bias, w_up, up_bias, act, save) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(the activation, the pre-activation if `save`, u and v of a LayerNorm (programs/norm.hpp in csrc))"""
    h = x if h is None else h
    if mean is not None:
        return torch.ops.coda.layer_act(h, rstd, mean, w_up, up_bias, norm_weight, norm_bias, act, save)
    return *torch.ops.coda.rstd_act(h, rstd, w_up, up_bias, act, save), None, None


def _plain_down(y, w_down, down_bias, residual, following) -> tuple:
    """(the output,), with its statistics behind it if a norm follows."""
    if following is None:
        return (torch.ops.coda.linear(y, w_down, down_bias, residual),)
    return tuple(linear_statistics(y, w_down, down_bias, residual, *following))


def _plain_mlp(x, h, rstd, mean, norm_weight, norm_bias, w_up, up_bias, w_down, down_bias, residual, residual_is_x, act, following):
    y = _plain_up(x, h, rstd, mean, norm_weight, norm_bias, w_up, up_bias, act, False)[0]
    return _plain_down(y, w_down, down_bias, x if residual_is_x else residual, following)


class _PlainMlp(torch.autograd.Function):
    """`_plain_mlp` with its gradient. The activation is not kept: its gradient's epilogue makes it again for that of w_down."""

    @staticmethod
    def forward(ctx: Any, x, h, rstd, mean, norm_weight, norm_bias, w_up, up_bias, w_down, down_bias, residual, residual_is_x, act, following):
        y, z, u, v = _plain_up(x, h, rstd, mean, norm_weight, norm_bias, w_up, up_bias, act, True)
        out, *statistics = _plain_down(y, w_down, down_bias, x if residual_is_x else residual, following)
        need_x, _, _, _, need_norm, _, need_w = ctx.needs_input_grad[:7]
        ctx.save_for_backward(x if need_x or need_norm or need_w else None, rstd, mean, norm_weight, norm_bias, w_up, up_bias, w_down, z, u, v)
        ctx.act, ctx.residual_is_x = act, residual_is_x
        ctx.set_materialize_grads(False)
        if statistics:
            ctx.mark_non_differentiable(*statistics)
        return out, *statistics

    @staticmethod
    def backward(ctx: Any, dout, *_: Any):
        if dout is None:
            return (None,) * 14
        x, rstd, mean, norm_weight, norm_bias, w_up, up_bias, w_down, z, u, v = ctx.saved_tensors
        need_x, _, _, _, need_norm, need_norm_bias, need_w, need_up_bias, need_down, need_down_bias, need_residual = ctx.needs_input_grad[:11]
        incoming, dnorm_bias = dout if ctx.residual_is_x else None, None
        if mean is None:
            dz, y, correction, dup_bias = torch.ops.coda.dact(dout, w_down, z, rstd, up_bias, ctx.act, w_up.shape[1], need_down)
            correction, dup_bias = None if rstd is None else correction, dup_bias if need_up_bias else None
            dx, dnorm, dw = norm_gradient(dz, correction, x, norm_weight, (w_up,), incoming, need_x, need_norm, (need_w,))
        else:
            needs = need_x, need_norm, need_norm_bias, need_w, need_up_bias
            (dx, dnorm, dnorm_bias, dw, dup_bias), y = layer_act_gradient(
                dout, w_down, x, rstd, mean, norm_weight, norm_bias, w_up, up_bias, z, u, v, ctx.act, incoming, needs, need_down
            )
        ddown = weight_gradient(w_down, dout.t(), y) if need_down else None
        gradients = dx, dnorm, dnorm_bias, dw, dup_bias, ddown
        depends = dout, x, norm_weight, norm_bias, w_up, up_bias, w_down
        dx, dnorm, dnorm_bias, dw, dup_bias, ddown = once("coda.fused_mlp_forward", gradients, *depends)
        ddown_bias = dout.sum(0) if need_down_bias else None
        return dx, None, None, None, dnorm, dnorm_bias, dw, dup_bias, ddown, ddown_bias, (dout if need_residual else None), None, None, None


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
        if x is not None:
            parts, wanted = ((w_gate_up,), (need_gate,)) if w_up is None else ((w_gate_up, w_up), (need_gate, need_up))
            correction = None if rstd is None else correction
            dx, dnorm, dgate, *more = norm_gradient(dz, correction, x, norm_weight, parts, incoming, need_x, need_norm, wanted)
            dup = more[0] if more else None
        dx, dgate, dup, ddown, dnorm = once("coda.fused_mlp_forward", (dx, dgate, dup, ddown, dnorm), dout, x, w_gate_up, w_up, w_down, norm_weight)
    return dx, None, None, dgate, dup, ddown, dnorm, (dout if need_residual else None), None, None, None, None, None, None, None


torch.library.register_autograd("coda::fused_mlp", _backward, setup_context=_setup)
for _op in ("rstd_glu", "dglu"):
    no_second_derivative(f"coda::{_op}", "coda.fused_mlp_forward")
