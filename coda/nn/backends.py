"""The one place where `coda.nn` chooses between coda's operators and plain torch.

"coda" calls the public operators; "eager" is the reference: the same formulas in separate torch operations on the same
parameters. Only work with an epilogue is listed here. The head without a loss has nothing around it: it is a bare GEMM in
either case and stays `F.linear`.

A norm is a module, nn.RMSNorm or nn.LayerNorm. A `next_norm` asks for the statistics of the result that this norm will need; "eager" has none.
"""

import torch
import torch.nn.functional as F
from torch import nn

import coda
from coda.ops.mlp import mlp_residual

BACKENDS = ("coda", "eager")


def check_backend(backend):
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(map(repr, BACKENDS))}.")
    return backend


def rms_norm(x, weight, eps):
    """RMSNorm(x; weight) over the last dimension, in x's dtype."""
    # Under autocast the residual stream may be narrower than the parameters, and torch's fused kernel wants one dtype.
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def apply_norm(norm, x):
    """norm(x) in x's dtype."""
    if isinstance(norm, nn.RMSNorm):
        return rms_norm(x, norm.weight, norm.eps)
    return F.layer_norm(x, norm.weight.shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)


def kind_of(norm):
    return "rms" if isinstance(norm, nn.RMSNorm) else "layer"


def norm_options(norm):
    """What coda's functions take beside the norm's weight."""
    return dict(eps=norm.eps) | ({} if kind_of(norm) == "rms" else dict(norm="layer", norm_bias=norm.bias))


def norm_qkv(backend, x, norm, w_qkv, bias, heads, stats):
    """(x, q, k, v) with [q | k | v] = norm(x) w_qkv^T + b. heads, stats: as in `norm_qkv_rope`."""
    num_heads, num_kv_heads, head_dim = heads
    if backend == "coda":
        x, qkv = coda.norm_linear(x, norm.weight, w_qkv, bias, stats=stats, **norm_options(norm))
    else:
        qkv = F.linear(apply_norm(norm, x), w_qkv, bias)
    return x, *qkv.unflatten(-1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=-2)


def norm_qkv_rope(backend, x, norm, w_qkv, bias, head_norms, rope, heads, stats):
    """`norm_qkv` with q and k turned, after the norms of their heads if there are any. heads: (num_heads, num_kv_heads, head_dim). head_norms: two
    nn.RMSNorm, or (None, None). rope: (cos, sin) from `rope_tables`, [T, rotary_dim / 2] or [B, T, rotary_dim / 2]. stats: of x, or None."""
    num_heads, num_kv_heads, head_dim = heads
    cos, sin = rope
    if backend == "coda":
        positions = None
        if cos.dim() == 3:  # a table row for each token
            positions = torch.arange(cos.shape[0] * cos.shape[1], device=x.device).view(cos.shape[:2])
            cos, sin = cos.flatten(0, 1), sin.flatten(0, 1)
        q_norm, k_norm = head_norms
        qk_norm = {} if q_norm is None else dict(q_norm_weight=q_norm.weight, k_norm_weight=k_norm.weight, qk_norm_eps=q_norm.eps)
        return coda.norm_linear_rope(
            x,
            norm.weight,
            w_qkv,
            cos,
            sin,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bias=bias,
            positions=positions,
            stats=stats,
            **norm_options(norm),
            **qk_norm,
        )
    x, q, k, v = norm_qkv(backend, x, norm, w_qkv, bias, heads, stats)
    q, k = (t if n is None else apply_norm(n, t) for t, n in zip((q, k), head_norms))
    return x, rotate(q, cos, sin), rotate(k, cos, sin), v


def rotate(x, cos, sin):
    """Rotary embedding of x [B, T, H, d]: (a, b) -> (a cos - b sin, a sin + b cos), a and b the halves of the first 2 cos.shape[-1] of d."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turning, rest = x.tensor_split((2 * cos.shape[-1],), dim=-1)
    a, b = turning.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat(((a * cos - b * sin).to(x.dtype), (a * sin + b * cos).to(x.dtype), rest), dim=-1)


_GATES = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda t: F.gelu(t, approximate="tanh")}
_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
GATES = tuple(_GATES)
_ACTIVATIONS = {"relu": F.relu, "relu2": lambda t: F.relu(t).square()} | _GATES


def norm_mlp(backend, x, w_gate_up, w_down, *, norm, residual, activation, stats, next_norm):
    """(residual + (act(gate) * up) w_down^T, statistics for next_norm or None), [gate | up] = norm(x) w_gate_up^T."""
    if backend == "coda" and any(n is not None and kind_of(n) != "rms" for n in (norm, next_norm)):
        passed, y = coda.norm_linear(x, norm.weight, w_gate_up, activation=_GATED[activation], stats=stats, **norm_options(norm))
        return linear("coda", y, w_down, residual=passed if residual is x else residual, next_norm=next_norm)
    if backend == "coda":
        return _fused_mlp(x, w_gate_up, w_down, norm, residual, stats, next_norm, activation=activation)
    gate, up = F.linear(apply_norm(norm, x), w_gate_up).chunk(2, dim=-1)
    out = F.linear(_GATES[activation](gate) * up, w_down)
    return (out if residual is None else residual + out), None


def norm_plain_mlp(backend, x, w_up, up_bias, w_down, down_bias, *, norm, residual, activation, stats, next_norm):
    """(residual + act(norm(x) w_up^T + up_bias) w_down^T + down_bias, statistics for next_norm or None)."""
    if backend == "coda":
        options = dict(activation=activation, gated=False, up_bias=up_bias, down_bias=down_bias)
        return _fused_mlp(x, w_up, w_down, norm, residual, stats, next_norm, **options)
    out = F.linear(_ACTIVATIONS[activation](F.linear(apply_norm(norm, x), w_up, up_bias)), w_down, down_bias)
    return (out if residual is None else residual + out), None


def _fused_mlp(x, w_up, w_down, norm, residual, stats, next_norm, **options):
    options |= dict(norm_weight=norm.weight, **norm_options(norm))
    if residual is not x:
        return coda.fused_mlp_forward(x, w_up, w_down, residual=residual, **options), None
    following = {} if next_norm is None else dict(next_norm_weight=next_norm.weight, next_eps=next_norm.eps, next_norm=kind_of(next_norm))
    out = mlp_residual(x, w_up, w_down, stats=stats, **options, **following)
    return out if following else (out, None)


def linear(backend, x, weight, bias=None, *, residual, next_norm):
    """(x weight^T + bias + residual, statistics for next_norm or None)."""
    if backend == "coda":
        if residual is not None and next_norm is not None:
            options = dict(next_norm_weight=next_norm.weight, eps=next_norm.eps, next_norm=kind_of(next_norm))
            return coda.linear_residual(x, weight, residual, bias=bias, **options)
        return coda.linear(x, weight, bias, residual=residual), None
    out = F.linear(x, weight, bias)
    return (out if residual is None else residual + out), None


def norm_head_loss(backend, x, norm, weight, targets, stats):
    """The mean cross-entropy of norm(x) weight^T [B, T, V] with targets, a scalar in fp32 (fp64). stats: of x for an nn.RMSNorm, or None."""
    if backend == "coda":
        if kind_of(norm) == "rms":
            return coda.linear_cross_entropy(x, weight, targets, norm_weight=norm.weight, eps=norm.eps, stats=stats)
        return coda.linear_cross_entropy(apply_norm(norm, x), weight, targets)
    logits = F.linear(apply_norm(norm, x), weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
