"""The layers of a decoder block. Each owns its norm, and takes the residual so that the add joins its last GEMM.

The Linear and RMSNorm submodules hold parameters under their usual names; their own forward is not called, so forward
hooks on them do not fire.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .backends import check_backend, linear, norm_mlp, norm_qkv_rope


class MLP(nn.Module):
    """Pre-norm gated feed-forward layer.

        forward(x, residual) = residual + (act(gate) * up) W_down^T,  [gate | up] = RMSNorm(x) W_gate_up^T

    Parameters, D = dim and F = ffn_dim:
        norm.weight           [D]
        gate_up_proj.weight   [2F, D], the gate's F rows first
        down_proj.weight      [D, F]

    activation: "silu" (SwiGLU), "gelu" or "gelu_tanh". backend="eager" computes the same with plain torch operations.
    """

    def __init__(self, dim, ffn_dim, eps=1e-6, *, activation="silu", backend="coda"):
        super().__init__()
        self.backend = check_backend(backend)
        self.activation = activation
        self.norm = nn.RMSNorm(dim, eps=eps)
        self.gate_up_proj = nn.Linear(dim, 2 * ffn_dim, bias=False)
        self.down_proj = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x, residual=None):
        """x, residual: [..., D]. Returns [..., D]. A block passes its input as both."""
        return self.chained(x, residual)[0]

    def chained(self, x, residual, stats=None, next_norm=None):
        """(forward(x, residual), its statistics for next_norm or None). stats: of x for this layer's norm, or None."""
        return norm_mlp(
            self.backend,
            x,
            self.gate_up_proj.weight,
            self.down_proj.weight,
            norm_weight=self.norm.weight,
            eps=self.norm.eps,
            residual=residual,
            activation=self.activation,
            stats=stats,
            next_norm=next_norm,
        )


class Attention(nn.Module):
    """Pre-norm causal self-attention with rotary embedding and grouped key and value heads.

        forward(x, residual) = residual + softmax(q k^T / sqrt(d), causal) v W_o^T,  [q | k | v] = RMSNorm(x) W_qkv^T + b

    with the first rotary_dim columns of each head of q and k rotated by position; query head h attends with key head h // (H / H_kv).

    Parameters, D = dim, H = num_heads, H_kv = num_kv_heads, d = head_dim:
        norm.weight       [D]
        qkv_proj.weight   [(H + 2 H_kv) d, D]: all query heads, then all key heads, then all value heads
        qkv_proj.bias     [(H + 2 H_kv) d], with qkv_bias=True
        o_proj.weight     [D, H d]

    backend="eager" computes the same with plain torch operations.
    """

    def __init__(
        self,
        dim,
        num_heads,
        num_kv_heads=None,
        head_dim=None,
        *,
        rope_theta=10000.0,
        rotary_dim=None,
        qkv_bias=False,
        eps=1e-6,
        backend="coda",
    ):
        super().__init__()
        self.backend = check_backend(backend)
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.rotary_dim = self.head_dim if rotary_dim is None else rotary_dim
        self.rope_theta = rope_theta
        self.norm = nn.RMSNorm(dim, eps=eps)
        self.qkv_proj = nn.Linear(dim, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, dim, bias=False)

    def forward(self, x, residual=None, *, positions=None, rope=None):
        """x, residual: [B, T, D]. Returns [B, T, D]. A block passes its input as both.

        positions: integers [T] or [B, T] for the rotation, default 0 .. T-1. They do not change the mask: token t
        attends to tokens 0 .. t of its row. rope: the result of `rope_tables`, from a caller that has it already.
        """
        return self.chained(x, residual, positions=positions, rope=rope)[0]

    def chained(self, x, residual, stats=None, next_norm=None, *, positions=None, rope=None):
        """(forward(x, residual), its statistics for next_norm or None). stats: of x for this layer's norm, or None."""
        batch, length, _ = x.shape
        if rope is None:
            rope = rope_tables(positions, self.rotary_dim, self.rope_theta, like=x)
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        passed, q, k, v = norm_qkv_rope(
            self.backend, x, self.norm.weight, self.norm.eps, self.qkv_proj.weight, self.qkv_proj.bias, rope, heads, stats
        )
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        grouped = self.num_kv_heads != self.num_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        out = out.transpose(1, 2).reshape(batch, length, self.num_heads * self.head_dim)
        return linear(self.backend, out, self.o_proj.weight, residual=passed if residual is x else residual, next_norm=next_norm)


class TransformerBlock(nn.Module):
    """x + Attention(x), then x + MLP(x), both pre-norm. config: `DecoderConfig`.

    Blocks chain: given the statistics of x from the block before and the norm that follows, nothing runs between the products of a block but
    attention and the finalisers of partial sums (see `forward`).
    """

    def __init__(self, config, *, backend="coda"):
        super().__init__()
        self.attention = Attention(
            config.dim,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            rope_theta=config.rope_theta,
            rotary_dim=config.rotary_dim,
            qkv_bias=config.qkv_bias,
            eps=config.norm_eps,
            backend=backend,
        )
        self.mlp = MLP(config.dim, config.ffn_dim, config.norm_eps, activation=config.activation, backend=backend)

    def forward(self, x, *, positions=None, rope=None, stats=None, next_norm=None):
        """x: [B, T, D]. Returns [B, T, D]; with next_norm (the nn.RMSNorm that reads the result) a pair of it and its statistics, which the next
        block takes as stats. positions and rope as in `Attention.forward`."""
        x, middle = self.attention.chained(x, x, stats, self.mlp.norm, positions=positions, rope=rope)
        x, last = self.mlp.chained(x, x, middle, next_norm)
        return x if next_norm is None else (x, last)


def rope_tables(positions, rotary_dim, theta, like):
    """cos and sin of position * theta^(-2i / rotary_dim), i < rotary_dim / 2.

    positions: integers [T] or [B, T], or None for 0 .. T-1. like: a tensor [B, T, ...] that gives T, device and dtype.
    Returns two tensors [T, rotary_dim / 2] or [B, T, rotary_dim / 2], in fp32, or fp64 for an fp64 `like`.

    The tables are made where they are needed instead of being kept as buffers: a buffer would be rounded by
    `model.to(torch.bfloat16)` and lost by `to_empty`. The angle is formed in fp64, since in fp32 it is off by 1e-3 rad
    from position 10^4 on.
    """
    batch, length = like.shape[:2]
    if positions is None:
        positions = torch.arange(length, device=like.device)
    elif positions.is_floating_point() or positions.shape not in ((length,), (batch, length)):
        raise ValueError(
            f"positions has shape {tuple(positions.shape)} and dtype {positions.dtype}, "
            f"expected integers of shape ({length},) or ({batch}, {length})."
        )
    exponent = torch.arange(0, rotary_dim, 2, device=like.device, dtype=torch.float64) / -rotary_dim
    angle = positions.to(torch.float64).unsqueeze(-1) * theta**exponent
    dtype = torch.promote_types(like.dtype, torch.float32)
    return angle.cos().to(dtype), angle.sin().to(dtype)
