"""The one place where `coda.nn` chooses between coda's operators and plain torch.

"coda" calls the public operators; "eager" is the reference: the same formulas in separate torch operations on the same
parameters. Only work with an epilogue is listed here. The head, with nothing around it, is a bare GEMM in either case and
stays `F.linear`.

A `next_norm` (an nn.RMSNorm) asks for the statistics of the result that this norm will need; "eager" has none.
"""

import torch
import torch.nn.functional as F

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


def norm_qkv_rope(backend, x, norm_weight, eps, w_qkv, bias, rope, heads, stats):
    """(x, q, k, v) with [q | k | v] = RMSNorm(x) w_qkv^T + b, q and k turned. heads: (num_heads, num_kv_heads, head_dim). rope: (cos, sin) from
    `rope_tables`, [T, rotary_dim / 2] or [B, T, rotary_dim / 2]. stats: of x, or None."""
    num_heads, num_kv_heads, head_dim = heads
    cos, sin = rope
    if backend == "coda":
        positions = None
        if cos.dim() == 3:  # a table row for each token
            positions = torch.arange(cos.shape[0] * cos.shape[1], device=x.device).view(cos.shape[:2])
            cos, sin = cos.flatten(0, 1), sin.flatten(0, 1)
        return coda.norm_linear_rope(
            x,
            norm_weight,
            w_qkv,
            cos,
            sin,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bias=bias,
            positions=positions,
            eps=eps,
            stats=stats,
        )
    qkv = F.linear(rms_norm(x, norm_weight, eps), w_qkv, bias).unflatten(-1, (-1, head_dim))
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=-2)
    return x, rotate(q, cos, sin), rotate(k, cos, sin), v


def rotate(x, cos, sin):
    """Rotary embedding of x [B, T, H, d]: (a, b) -> (a cos - b sin, a sin + b cos), a and b the halves of the first 2 cos.shape[-1] of d."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turning, rest = x.tensor_split((2 * cos.shape[-1],), dim=-1)
    a, b = turning.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat(((a * cos - b * sin).to(x.dtype), (a * sin + b * cos).to(x.dtype), rest), dim=-1)


_GATES = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda t: F.gelu(t, approximate="tanh")}


def norm_mlp(backend, x, w_gate_up, w_down, *, norm_weight, eps, residual, activation, stats, next_norm):
    """(residual + (act(gate) * up) w_down^T, statistics for next_norm or None), [gate | up] = RMSNorm(x; norm_weight) w_gate_up^T."""
    if backend == "coda":
        options = dict(norm_weight=norm_weight, eps=eps, activation=activation)
        if residual is not x:
            return coda.fused_mlp_forward(x, w_gate_up, w_down, residual=residual, **options), None
        following = {} if next_norm is None else dict(next_norm_weight=next_norm.weight, next_eps=next_norm.eps)
        out = mlp_residual(x, w_gate_up, w_down, stats=stats, **options, **following)
        return out if following else (out, None)
    gate, up = F.linear(rms_norm(x, norm_weight, eps), w_gate_up).chunk(2, dim=-1)
    out = F.linear(_GATES[activation](gate) * up, w_down)
    return (out if residual is None else residual + out), None


def linear(backend, x, weight, *, residual, next_norm):
    """(x weight^T + residual, statistics for next_norm or None)."""
    if backend == "coda":
        if residual is not None and next_norm is not None:
            return coda.linear_residual(x, weight, residual, next_norm_weight=next_norm.weight, eps=next_norm.eps)
        return coda.linear(x, weight, residual=residual), None
    out = F.linear(x, weight)
    return (out if residual is None else residual + out), None
