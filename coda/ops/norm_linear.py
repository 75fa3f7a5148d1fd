"""A linear layer behind an RMSNorm or a LayerNorm: the norm's scale, the bias, the activation or the rotary embedding run in the product's epilogue.

The functions return x itself beside the result. Used from then on instead of x, it brings the gradient of the residual stream to the place
where the norm's gradient is formed, and the two are added in one epilogue. They are autograd functions rather than torch operators because an
operator may not return one of its inputs.
"""
from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from coda.ops._common import (
    cast_for_autocast,
    check_activation,
    check_devices,
    check_optional_tensor,
    check_pair,
    check_tensor,
    check_weights,
    fake,
    joined,
    named_pair,
    needs_grad,
    no_second_derivative,
    once,
    split_pair,
    statistics_dtype,
)
from coda.ops.linear import ACTIVATIONS
from coda.ops.norm import LayerNorm, NormStats, check_norm, layer_gradient, norm_gradient, norm_statistics

_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
_PLAIN = {None: "identity"} | {name: name for name in ACTIVATIONS}


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    activation: str | None = None,
    stats: NormStats | None = None,
    norm_bias: Tensor | None = None,
    norm: str = "rms",
) -> tuple[Tensor, Tensor]:
    """(x, y) with y = act(RMSNorm(x; norm_weight) W^T + b), or LayerNorm(x; norm_weight, norm_bias) in its place.

    Args:
        x: [..., D]; float32, float64, bfloat16 or float16.
        norm_weight: [D] in x's dtype or, beside 16 bits, float32. None: a norm without a weight.
        weight: [N, D]; for a gated activation [2F, D], gate rows first, or a pair (gate, up) of [F, D] each. bias: [N]; none for a gated one.
        eps: of the norm.
        activation: None, "relu", "relu2" (its square), "silu", "gelu" (erf), "gelu_tanh", or gated: "swiglu", "geglu", "geglu_tanh".
        stats: the statistics that came with x from `coda.linear_residual`. None: they are computed here, in a pass over x.
        norm: "rms" or "layer". norm_bias: [D] in x's dtype or, beside 16 bits, float32, for "layer".

    Returns:
        x, and y [..., N] (gated: [..., F]), in x's dtype. Use the returned x, not the argument, for the residual stream: its gradient is then added
        inside the epilogue that forms the gradient of the norm. Differentiable once in x, norm_weight, norm_bias, weight and bias.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, device or shape, or stats of another tensor, kind of norm, norm weight or eps.
        NotImplementedError: when a second derivative is asked for.

    The norm is deferred: rstd ((x norm_weight) W^T) (programs/norm.hpp in csrc; Zhang and Sennrich, arXiv:1910.07467), for a LayerNorm
    rstd ((x norm_weight) W^T - mean u) + v with u = W norm_weight and v = W norm_bias + b in float32 (Ba, Kiros and Hinton, arXiv:1607.06450).
    There x norm_weight is rounded before the mean is taken out: beside a LayerNorm that is rounded after, the product's input is off by about
    sqrt(1 + (mean / deviation)^2) times as much, and y and the gradients by up to that: in bfloat16 with a mean of ten deviations, y by four
    times as much. A gated activation, whose epilogue has no such term,
    reads a LayerNorm that a pass over x has written.
    """
    check_activation(activation, [*_PLAIN, *_GATED])
    gated = activation in _GATED
    w, w_up = split_pair("weight", weight) if gated else (check_tensor("weight", weight), None)
    if gated and bias is not None:
        raise ValueError(f"bias is a tensor, expected None with activation {activation!r}")
    options = dict(norm_bias=norm_bias, norm=norm, defer=not gated)
    given, x, (w, *up, bias), rows, h, rstd, mean = _prepare(x, norm_weight, eps, stats, **options, **named_pair("weight", w, w_up), bias=bias)
    w_up = up[0] if up else None
    if gated:
        check_pair("weight", w, w_up)
    out_features = w.shape[0] if not gated or w_up is not None else w.shape[0] // 2
    act = _GATED[activation] if gated else _PLAIN[activation]
    norm_weight = None if rstd is None else norm_weight  # else the rows are normalised
    wanted = needs_grad(rows, norm_weight, norm_bias, w, w_up, bias)
    if mean is not None and wanted:
        passed, y = _LayerLinear.apply(rows, h, rstd, mean, norm_weight, norm_bias, w, bias, act)
    elif mean is not None:
        passed, y = rows, torch.ops.coda.layer_act(rows if h is None else h, rstd, mean, w, bias, norm_weight, norm_bias, act, False)[0]
    elif wanted:
        passed, y = _NormLinear.apply(rows, h, rstd, norm_weight, w, w_up, bias, act, gated)
    else:
        passed, y = rows, _forward(rows if h is None else h, rstd, w, w_up, bias, act, gated, False)[0]
    return _passed(given, x, None if rstd is None else passed), y.view(*x.shape[:-1], out_features)


def norm_linear_rope(
    x: Tensor,
    norm_weight: Tensor | None,
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
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    qk_norm_eps: float | None = None,
    eps: float = 1e-6,
    stats: NormStats | None = None,
    norm_bias: Tensor | None = None,
    norm: str = "rms",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, q, k, v) with [q | k | v] = RMSNorm(x; norm_weight) w_qkv^T + b, or LayerNorm(x; norm_weight, norm_bias), q and k turned by their positions;
    before that each of their heads has an RMSNorm of its own if q_norm_weight and k_norm_weight are given (QK-norm).

    Args:
        x: [B, T, D]; float32, float64, bfloat16 or float16.
        norm_weight: [D] in x's dtype or, beside 16 bits, float32. None: a norm without a weight.
        w_qkv: [(num_heads + 2 num_kv_heads) head_dim, D]: the heads of q, then of k, then of v; or three tensors, which are copied behind each
            other for the product. bias: [(num_heads + 2 num_kv_heads) head_dim], or three tensors.
        cos, sin: [P, rotary_dim / 2] in x's dtype or, beside 16 bits, float32, a row for each position; rotary_dim <= head_dim, the columns beyond it do
            not turn.
        positions: int64 or int32, [T] or [B, T], the row of the tables for each token, each in [0, P). None: 0 .. T-1.
        interleaved: pairs are columns (2c, 2c+1) of a head instead of (c, c + rotary_dim / 2).
        q_norm_weight, k_norm_weight: [head_dim], both of x's dtype or both float32; both or neither. qk_norm_eps: of these norms; None: eps.
        eps, stats, norm, norm_bias: as in `norm_linear`; a LayerNorm is written by a pass over x.

    Returns:
        x (see `norm_linear`); q [B, T, num_heads, head_dim], k and v [B, T, num_kv_heads, head_dim]: views of one buffer, in x's dtype.
        Differentiable once in x, the weights and biases, not in cos and sin.

    Raises:
        As `norm_linear`. Positions outside the tables are not checked on a GPU: that would wait for the device.

    (Su et al., RoFormer, arXiv:2104.09864; Henry et al., Query-Key Normalization, arXiv:2010.04245; programs/rope.hpp in csrc.)
    """
    check_tensor("x", x)
    if x.dim() != 3:
        raise ValueError(f"x has shape {list(x.shape)}, expected 3 dimensions (B, T, D)")
    weights, bias = split_qkv(w_qkv, bias, (num_heads, num_kv_heads), head_dim)
    options = dict(norm_bias=norm_bias, norm=norm, defer=False, public="coda.norm_linear_rope")
    given, x, (*parts, bias), rows, h, rstd, _ = _prepare(x, norm_weight, eps, stats, **options, **weights, bias=bias)
    norm_weight = None if rstd is None else norm_weight
    rope = rope_arguments(x, parts, cos, sin, num_heads, num_kv_heads, head_dim, positions, interleaved)
    norms = check_head_norms(x, q_norm_weight, k_norm_weight)
    norm_numbers = eps if qk_norm_eps is None else qk_norm_eps, num_heads * head_dim
    heads = (num_heads, num_kv_heads)
    if needs_grad(rows, norm_weight, *parts, bias, *norms):
        # Dynamo loses the gradients of outputs that are views of one buffer (torch 2.11), so it gets the buffer.
        split = not torch.compiler.is_compiling()
        passed, *out = _NormRope.apply(rows, h, rstd, norm_weight, bias, *norms, norm_numbers, rope, heads, tuple(x.shape[:2]), split, *parts)
        q, k, v = out if split else split_heads(out[0], heads, head_dim, x.shape[:2])
    else:
        passed, qkv = rows, rope_forward(rows if h is None else h, rstd, joined(parts), bias, norms, norm_numbers, rope, False)[0]
        q, k, v = split_heads(qkv, heads, head_dim, x.shape[:2])
    return _passed(given, x, None if rstd is None else passed), q, k, v


def split_qkv(w_qkv, bias, heads, head_dim) -> tuple[dict[str, Tensor], Tensor | None]:
    """(name -> weight, the one or the three; the bias as one tensor)"""

    def checked(name, t):
        if isinstance(t, Tensor) or t is None:
            return t
        if not isinstance(t, (tuple, list)) or len(t) != 3:
            raise TypeError(f"{name} is {type(t).__name__}, expected a tensor or three of them, (q, k, v)")
        rows = [n * head_dim if isinstance(n, int) and isinstance(head_dim, int) else None for n in (heads[0], heads[1], heads[1])]
        for i, part in enumerate(t):
            check_tensor(f"{name}[{i}]", part)
            if part.dim() == 0 or rows[i] is not None and part.shape[0] != rows[i]:
                raise ValueError(f"{name}[{i}] has shape {list(part.shape)}, expected {rows[i]} rows, the heads of {'qkv'[i]} times head_dim")
        return tuple(t)

    w_qkv, bias = checked("w_qkv", w_qkv), checked("bias", bias)
    if isinstance(bias, tuple):
        if any(b.dim() != 1 or b.dtype != bias[0].dtype or b.device != bias[0].device for b in bias):
            raise ValueError("bias is a triple of tensors of different kinds, expected three vectors of one dtype and device")
        bias = torch.cat(bias)
    if isinstance(w_qkv, tuple):
        return {f"w_qkv[{i}]": w for i, w in enumerate(w_qkv)}, bias
    return {"w_qkv": check_tensor("w_qkv", w_qkv)}, bias


def check_head_norms(x: Tensor, q_norm_weight: Tensor | None, k_norm_weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    norms = {"q_norm_weight": check_optional_tensor("q_norm_weight", q_norm_weight), "k_norm_weight": check_optional_tensor("k_norm_weight", k_norm_weight)}
    check_devices(x, **norms)
    for name, t in norms.items():
        if t is None and any(other is not None for other in norms.values()):
            raise ValueError(f"{name} is None, expected a tensor [head_dim] as its companion is")
    return q_norm_weight, k_norm_weight


def rope_forward(h, rstd, w, bias, norms, norm_numbers, rope, save) -> tuple[Tensor, Tensor | None]:
    """(the columns of q, k and v, those of q and k before their norm or None): without a norm the backward needs no such thing."""
    if norms[0] is None:
        return torch.ops.coda.rstd_rope(h, rstd, w, bias, *rope), None
    return torch.ops.coda.rstd_qknorm_rope(h, rstd, w, bias, *norms, *norm_numbers, *rope, save)


def rope_arguments(x, parts, cos, sin, num_heads, num_kv_heads, head_dim, positions, interleaved) -> tuple:
    """What the rope operators take behind the bias, checked."""
    for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}, expected a positive integer")
    check_devices(x, cos=check_tensor("cos", cos), sin=check_tensor("sin", sin), positions=check_optional_tensor("positions", positions))
    rows = (num_heads + 2 * num_kv_heads) * head_dim
    if len(parts) == 1 and (parts[0].dim() != 2 or parts[0].shape[0] != rows):
        raise ValueError(f"w_qkv has shape {list(parts[0].shape)}, expected {rows} rows, (num_heads + 2 num_kv_heads) head_dim")
    length = x.shape[-2] if x.dim() > 1 else 1
    if positions is not None:
        if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise TypeError(f"positions has dtype {positions.dtype}, expected int64 or int32")
        if positions.shape not in ((length,), x.shape[:-1]):
            raise ValueError(f"positions has shape {list(positions.shape)}, expected [{length}] or {list(x.shape[:-1])}")
        if positions.dtype not in (torch.int64, torch.int32):
            positions = positions.long()
        if positions.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling():
            low, high = positions.min().item(), positions.max().item()
            if low < 0 or high >= cos.shape[0]:
                raise ValueError(f"positions has values from {low} to {high}, expected 0 to {cos.shape[0] - 1} (the rows of cos)")
        positions = positions.expand(x.shape[:-1]).reshape(-1)
    return cos.detach(), sin.detach(), positions, max(length, 1), head_dim, (num_heads + num_kv_heads) * head_dim, interleaved


def split_heads(qkv: Tensor, heads: tuple[int, int], head_dim: int, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [*shape, heads, head_dim] as views of qkv [M, columns]."""
    all_heads = qkv.view(*shape, heads[0] + 2 * heads[1], head_dim)
    return (
        all_heads.narrow(-2, 0, heads[0]),
        all_heads.narrow(-2, heads[0], heads[1]),
        all_heads.narrow(-2, heads[0] + heads[1], heads[1]),
    )


def _prepare(x, norm_weight, eps, stats, *, norm_bias, norm, defer, public="coda.norm_linear", **others):
    """Checks, casts for autocast, and statistics: (x as given, x, others, rows of x, h or None without a norm weight, rstd, mean of a LayerNorm).
    Without `defer` a LayerNorm is done here: rows are normalised, and there is neither h nor rstd."""
    check_norm("norm", norm)
    check_tensor("x", x)
    check_optional_tensor("norm_weight", norm_weight)
    check_optional_tensor("norm_bias", norm_bias)
    if norm == "rms" and norm_bias is not None:
        raise ValueError("norm_bias is a tensor, expected None with norm 'rms'")
    for name, t in others.items():
        check_optional_tensor(name, t)
    check_devices(x, norm_weight=norm_weight, norm_bias=norm_bias, **others)
    if stats is not None:
        if not isinstance(stats, NormStats):
            raise TypeError(f"stats is {type(stats).__name__}, expected the coda.NormStats that came with x")
        stats.check(x, norm_weight, eps, norm)
    given = x
    x, *cast = cast_for_autocast(x, x, *others.values())
    rows = check_weights("x", x, **dict(zip(others, cast)))
    if norm == "layer" and not defer:
        return given, x, cast, LayerNorm.apply(public, rows, norm_weight, norm_bias, eps), None, None, None
    if stats is not None and x is given:
        h, rstd = stats.rows
        mean = None if stats.mean is None else stats.mean.reshape(-1)
    else:
        h, rstd, mean = norm_statistics(rows, norm_weight, eps, norm)
    return given, x, cast, rows, h, rstd, mean


def _passed(given: Tensor, x: Tensor, rows: Tensor | None) -> Tensor:
    """The x to return: what went through the function, unless it had to be cast or nothing did."""
    return rows.view(x.shape) if x is given and rows is not None else given


def _forward(h, rstd, w, w_up, bias, act, gated, save):
    if gated:
        return torch.ops.coda.rstd_glu(h, rstd, w, w_up, act, save)
    return torch.ops.coda.rstd_act(h, rstd, w, bias, act, save)


def _pass_through(ctx: Any, x: Tensor) -> Tensor:
    """The x that an autograd function returns; gradients that do not come stay None."""
    ctx.set_materialize_grads(False)
    passed = x.view_as(x)
    if not ctx.needs_input_grad[0]:
        ctx.mark_non_differentiable(passed)
    return passed


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, h, rstd, norm_weight, w, w_up, bias, act, gated):
        y, z = _forward(x if h is None else h, rstd, w, w_up, bias, act, gated, True)
        plain = act == "identity" and not gated
        ctx.save_for_backward(x, rstd, norm_weight, w, w_up, bias, y if plain else z)
        ctx.act, ctx.gated, ctx.plain = act, gated, plain
        passed = _pass_through(ctx, x)
        return passed, y

    @staticmethod
    def backward(ctx: Any, incoming, dy):
        x, rstd, norm_weight, w, w_up, bias, z = ctx.saved_tensors
        need_x, _, _, need_norm, need_w, need_up, need_bias = ctx.needs_input_grad[:7]
        if dy is None:
            return incoming, *[None] * 8
        width, dbias = x.shape[1], None
        if ctx.plain and dy.shape[1] == 0:
            dz, correction, dbias = dy, rstd.new_zeros(rstd.shape), dy.new_zeros((0,))
        elif ctx.plain:  # a rotation of nothing
            as_heads = lambda t: t.view(1, t.shape[0], 1, t.shape[1])
            none = dy.new_empty((x.shape[0], 0)), dy.new_empty((x.shape[0], 0))
            dy = dy.contiguous()
            empty = dy.new_empty((1, x.shape[0], 0, dy.shape[1]))
            dz, correction, dbias = torch.ops.coda.rope_backward(
                as_heads(dy), empty, empty, z, rstd, bias, *none, None, max(x.shape[0], 1), max(dy.shape[1], 1), 0, False, width
            )
        elif ctx.gated:
            dz, _, correction = torch.ops.coda.dglu(dy, None, z, rstd, ctx.act, width, False)
        else:
            dz, _, correction, dbias = torch.ops.coda.dact(dy, None, z, rstd, bias, ctx.act, width, False)
        correction = None if rstd is None else correction
        parts, wanted = ((w,), (need_w,)) if w_up is None else ((w, w_up), (need_w, need_up))
        dx, dnorm, dw, *more = norm_gradient(dz, correction, x, norm_weight, parts, incoming, need_x, need_norm, wanted)
        dup = more[0] if more else None
        dbias = dbias if need_bias else None
        dx, dnorm, dw, dup, dbias = once("coda.norm_linear", (dx, dnorm, dw, dup, dbias), dy, incoming, x, norm_weight, w, w_up, bias)
        return dx, None, None, dnorm, dw, dup, dbias, None, None


class _LayerLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, h, rstd, mean, norm_weight, norm_bias, w, bias, act):
        y, z, u, v = torch.ops.coda.layer_act(x if h is None else h, rstd, mean, w, bias, norm_weight, norm_bias, act, True)
        ctx.save_for_backward(x, rstd, mean, norm_weight, norm_bias, w, bias, y if act == "identity" else z, u, v)
        ctx.act = act
        passed = _pass_through(ctx, x)
        return passed, y

    @staticmethod
    def backward(ctx: Any, incoming, dy):
        x, rstd, mean, norm_weight, norm_bias, w, bias, z, u, v = ctx.saved_tensors
        need_x, _, _, _, need_norm, need_norm_bias, need_w, need_bias = ctx.needs_input_grad[:8]
        if dy is None:
            return incoming, *[None] * 8
        needs = need_x, need_norm, need_norm_bias, need_w, need_bias
        gradients, _ = layer_act_gradient(dy, None, x, rstd, mean, norm_weight, norm_bias, w, bias, z, u, v, ctx.act, incoming, needs, False)
        dx, dnorm, dnorm_bias, dw, dbias = once("coda.norm_linear", gradients, dy, incoming, x, norm_weight, norm_bias, w, bias)
        return dx, None, None, None, dnorm, dnorm_bias, dw, dbias, None


def layer_act_gradient(dy, w_down, x, rstd, mean, norm_weight, norm_bias, w, bias, z, u, v, act, incoming, needs, want_value):
    """The gradients of (x, norm_weight, norm_bias, w, bias) behind act(LayerNorm(x) W^T + b), those that `needs` asks for, from dy w_down, or dy
    without w_down, and what `layer_act` left; and the activation, if wanted. incoming: as in `norm_gradient`."""
    need_x, need_norm, need_norm_bias, need_w, need_bias = needs
    want_sums = need_bias or need_norm_bias
    dz, value, correction, offset, dv = torch.ops.coda.dact_layer(dy, w_down, z, rstd, u, v, act, w.shape[1], want_value, want_sums)
    dx, dnorm, dw = layer_gradient(
        dz, correction, offset, x, norm_weight, norm_bias, rstd, mean, w, incoming, need_x, need_norm, need_w
    )
    dnorm_bias = torch.mv(w.t().to(dv.dtype), dv).to(norm_bias.dtype) if need_norm_bias else None
    dbias = dv.to(bias.dtype) if need_bias else None
    return (dx, dnorm, dnorm_bias, dw, dbias), value


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, h, rstd, norm_weight, bias, q_norm, k_norm, norm_numbers, rope, heads, shape, split, *parts):
        qkv, product = rope_forward(x if h is None else h, rstd, joined(parts), bias, (q_norm, k_norm), norm_numbers, rope, True)
        cos, sin, positions, *ctx.numbers = rope
        ctx.save_for_backward(x, rstd, norm_weight, bias, q_norm, k_norm, product, qkv, cos, sin, positions, *parts)
        ctx.norm_numbers, ctx.heads, ctx.shape, ctx.split = norm_numbers, heads, shape, split
        passed = _pass_through(ctx, x)
        return passed, *(split_heads(qkv, heads, rope[4], shape) if split else (qkv,))

    @staticmethod
    def backward(ctx: Any, incoming, *gradients):
        x, rstd, norm_weight, bias, q_norm, k_norm, product, qkv, cos, sin, positions, *parts = ctx.saved_tensors
        need_x, _, _, need_norm, need_bias, need_q, need_k = ctx.needs_input_grad[:7]
        need_parts = ctx.needs_input_grad[12:]
        if all(g is None for g in gradients):
            return incoming, *[None] * (11 + len(parts))
        head_dim = ctx.numbers[1]
        given = gradients if ctx.split else split_heads(gradients[0].contiguous(), ctx.heads, head_dim, ctx.shape)
        counts = ctx.heads[0], ctx.heads[1], ctx.heads[1]
        heads = [qkv.new_zeros((*ctx.shape, n, head_dim)) if g is None else g for g, n in zip(given, counts)]
        rope = cos, sin, positions, *ctx.numbers, x.shape[1]
        dq_norm = dk_norm = None
        if q_norm is None:
            dz, correction, dbias = torch.ops.coda.rope_backward(*heads, qkv, rstd, bias, *rope)
        else:
            dz, correction, dbias, dq_norm, dk_norm = torch.ops.coda.qknorm_rope_backward(
                *heads, product, qkv, rstd, bias, q_norm, k_norm, *ctx.norm_numbers, *rope
            )
        correction = None if rstd is None else correction
        dx, dnorm, *dparts = norm_gradient(dz, correction, x, norm_weight, parts, incoming, need_x, need_norm, need_parts)
        small = (t if wanted else None for t, wanted in ((dbias, need_bias), (dq_norm, need_q), (dk_norm, need_k)))
        depends = *gradients, incoming, x, norm_weight, bias, q_norm, k_norm, *parts
        dx, dnorm, dbias, dq_norm, dk_norm, *dparts = once("coda.norm_linear_rope", (dx, dnorm, *small, *dparts), *depends)
        return dx, None, None, dnorm, dbias, dq_norm, dk_norm, *[None] * 5, *dparts


@fake("coda::rstd_act")
def _(h, rstd, weight, bias, activation, store_preactivation):
    store = store_preactivation and activation != "identity"
    return h.new_empty((h.shape[0], weight.shape[0])), h.new_empty((h.shape[0], weight.shape[0]) if store else (0,))


@fake("coda::layer_act")
def _(h, rstd, mean, weight, bias, norm_weight, norm_bias, activation, store_preactivation):
    store = store_preactivation and activation != "identity"
    vectors = (h.new_empty((weight.shape[0],), dtype=statistics_dtype(h)) for _ in range(2))
    return h.new_empty((h.shape[0], weight.shape[0])), h.new_empty((h.shape[0], weight.shape[0]) if store else (0,)), *vectors


@fake("coda::dact_layer")
def _(dy, w_down, preactivation, rstd, u, v, activation, width, want_value, want_dbias):
    shape, statistics = preactivation.shape, dict(dtype=statistics_dtype(dy))
    return (
        dy.new_empty(shape),
        dy.new_empty(shape if want_value else (0,)),
        *(dy.new_empty((shape[0],), **statistics) for _ in range(2)),
        dy.new_empty((shape[1],) if want_dbias else (0,), **statistics),
    )


@fake("coda::dact")
def _(dy, w_down, preactivation, rstd, bias, activation, width, want_value):
    shape = preactivation.shape
    return (
        dy.new_empty(shape),
        dy.new_empty(shape if want_value else (0,)),
        dy.new_empty((shape[0],), dtype=statistics_dtype(dy)),
        dy.new_empty((shape[1],) if bias is not None else (0,)),
    )


@fake("coda::rstd_rope")
def _(h, rstd, weight, bias, cos, sin, positions, period, head_dim, columns, interleaved):
    return h.new_empty((h.shape[0], weight.shape[0]))


@fake("coda::rope_backward")
def _(dq, dk, dv, y, rstd, bias, cos, sin, positions, period, head_dim, columns, interleaved, width):
    return (
        y.new_empty((y.shape[0], y.shape[1])),
        y.new_empty((y.shape[0],), dtype=statistics_dtype(y)),
        y.new_empty((y.shape[1],) if bias is not None else (0,)),
    )


@fake("coda::rstd_qknorm_rope")
def _(h, rstd, weight, bias, q_norm, k_norm, norm_eps, query_columns, cos, sin, positions, period, head_dim, columns, interleaved, store_product):
    return h.new_empty((h.shape[0], weight.shape[0])), h.new_empty((h.shape[0], columns) if store_product else (0,))


@fake("coda::qknorm_rope_backward")
def _(dq, dk, dv, product, y, rstd, bias, q_norm, k_norm, norm_eps, query_columns, cos, sin, positions, period, head_dim, columns, interleaved, width):
    return (
        y.new_empty((y.shape[0], y.shape[1])),
        y.new_empty((y.shape[0],), dtype=statistics_dtype(y)),
        y.new_empty((y.shape[1],) if bias is not None else (0,)),
        q_norm.new_empty((head_dim,)),
        k_norm.new_empty((head_dim,)),
    )


_OPERATORS = "rstd_act", "dact", "layer_act", "dact_layer", "rstd_rope", "rope_backward", "rstd_qknorm_rope", "qknorm_rope_backward", "norm_backward"
for _op in _OPERATORS:
    no_second_derivative(f"coda::{_op}", "coda.norm_linear")
