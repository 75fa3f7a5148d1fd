"""The layers of a decoder block. Each owns its norm, and takes the residual so that the add joins its last GEMM.

The Linear and RMSNorm submodules hold parameters under their usual names; their own forward is not called, so forward
hooks on them do not fire.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .backends import check_backend, linear, norm_mlp, norm_plain_mlp, norm_qkv, norm_qkv_rope


def make_norm(kind, dim, eps):
    if kind not in ("rms", "layer"):
        raise ValueError(f"norm is {kind!r}, expected 'rms' or 'layer'.")
    return (nn.RMSNorm if kind == "rms" else nn.LayerNorm)(dim, eps=eps)


class MLP(nn.Module):
    """Pre-norm feed-forward layer, gated or plain.

        forward(x, residual) = residual + (act(gate) * up) W_down^T,  [gate | up] = norm(x) W_gate_up^T
        forward(x, residual) = residual + act(norm(x) W_up^T + b_up) W_down^T + b_down,  with gated=False

    Parameters, D = dim and F = ffn_dim:
        norm.weight           [D]; norm.bias [D] with norm="layer"
        gate_up_proj.weight   [2F, D], the gate's F rows first; or up_proj.weight [F, D]
        down_proj.weight      [D, F]
        up_proj.bias, down_proj.bias   [F], [D], with gated=False and bias=True

    activation: "silu" (SwiGLU), "gelu" or "gelu_tanh"; with gated=False also "relu" or "relu2" (its square). norm: "rms" (nn.RMSNorm) or "layer"
    (nn.LayerNorm). backend="eager" computes the same with plain torch operations. Raises ValueError for a bias of a gated layer.
    """

    def __init__(self, dim, ffn_dim, eps=1e-6, *, activation="silu", gated=True, bias=False, norm="rms", backend="coda"):
        super().__init__()
        if gated and bias:
            raise ValueError("bias is True, expected False for a gated layer.")
        self.backend = check_backend(backend)
        self.activation = activation
        self.gated = gated
        self.norm = make_norm(norm, dim, eps)
        if gated:
            self.gate_up_proj = nn.Linear(dim, 2 * ffn_dim, bias=False)
        else:
            self.up_proj = nn.Linear(dim, ffn_dim, bias=bias)
        self.down_proj = nn.Linear(ffn_dim, dim, bias=bias)

    @property
    def deferred_norm(self):
        """The norm whose statistics this layer takes; None if it has no use for them."""
        return None if self.gated and isinstance(self.norm, nn.LayerNorm) else self.norm

    def forward(self, x, residual=None):
        """x, residual: [..., D]. Returns [..., D]. A block passes its input as both."""
        return self.chained(x, residual)[0]

    def chained(self, x, residual, stats=None, next_norm=None):
        """(forward(x, residual), its statistics for next_norm or None). stats: of x for this layer's norm, or None."""
        options = dict(norm=self.norm, residual=residual, activation=self.activation, stats=stats, next_norm=next_norm)
        if self.gated:
            return norm_mlp(self.backend, x, self.gate_up_proj.weight, self.down_proj.weight, **options)
        weights = self.up_proj.weight, self.up_proj.bias, self.down_proj.weight, self.down_proj.bias
        return norm_plain_mlp(self.backend, x, *weights, **options)


class Attention(nn.Module):
    """Pre-norm causal self-attention with rotary embedding and grouped key and value heads.

        forward(x, residual) = residual + softmax(q k^T / sqrt(d), causal) v W_o^T + b_o,  [q | k | v] = norm(x) W_qkv^T + b

    with the first rotary_dim columns of each head of q and k rotated by position (0: none), with qk_norm=True behind an RMSNorm of each; query head h attends with key head h // (H / H_kv).

    Parameters, D = dim, H = num_heads, H_kv = num_kv_heads, d = head_dim:
        norm.weight       [D]; norm.bias [D] with norm="layer"
        qkv_proj.weight   [(H + 2 H_kv) d, D]: all query heads, then all key heads, then all value heads
        qkv_proj.bias     [(H + 2 H_kv) d], with qkv_bias=True
        q_norm.weight, k_norm.weight    [d], with qk_norm=True
        o_proj.weight     [D, H d]
        o_proj.bias       [D], with o_bias=True

    norm: "rms" (nn.RMSNorm) or "layer" (nn.LayerNorm). backend="eager" computes the same with plain torch operations.
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
        qk_norm=False,
        o_bias=False,
        eps=1e-6,
        norm="rms",
        backend="coda",
    ):
        super().__init__()
        self.backend = check_backend(backend)
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.rotary_dim = self.head_dim if rotary_dim is None else rotary_dim
        self.rope_theta = rope_theta
        self.norm = make_norm(norm, dim, eps)
        self.qkv_proj = nn.Linear(dim, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, bias=qkv_bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=eps) if qk_norm else None
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, dim, bias=o_bias)

    @property
    def deferred_norm(self):
        """The norm whose statistics this layer takes; None if it has no use for them."""
        plain = self.rotary_dim == 0 and self.q_norm is None
        return None if isinstance(self.norm, nn.LayerNorm) and not plain else self.norm

    def forward(self, x, residual=None, *, positions=None, rope=None):
        """x, residual: [B, T, D]. Returns [B, T, D]. A block passes its input as both.

        positions: integers [T] or [B, T] for the rotation, default 0 .. T-1. They do not change the mask: token t
        attends to tokens 0 .. t of its row. rope: the result of `rope_tables`, from a caller that has it already.
        """
        return self.chained(x, residual, positions=positions, rope=rope)[0]

    def chained(self, x, residual, stats=None, next_norm=None, *, positions=None, rope=None):
        """(forward(x, residual), its statistics for next_norm or None). stats: of x for this layer's norm, or None."""
        batch, length, _ = x.shape
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        arguments = self.backend, x, self.norm, self.qkv_proj.weight, self.qkv_proj.bias
        if self.rotary_dim == 0 and self.q_norm is None:
            passed, q, k, v = norm_qkv(*arguments, heads, stats)
        else:
            if rope is None:
                rope = rope_tables(positions, self.rotary_dim, self.rope_theta, like=x)
            passed, q, k, v = norm_qkv_rope(*arguments, (self.q_norm, self.k_norm), rope, heads, stats)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        grouped = self.num_kv_heads != self.num_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        out = out.transpose(1, 2).reshape(batch, length, self.num_heads * self.head_dim)
        residual = passed if residual is x else residual
        return linear(self.backend, out, self.o_proj.weight, self.o_proj.bias, residual=residual, next_norm=next_norm)


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
            qk_norm=config.qk_norm,
            o_bias=config.o_bias,
            eps=config.norm_eps,
            norm=config.norm,
            backend=backend,
        )
        self.mlp = MLP(
            config.dim,
            config.ffn_dim,
            config.norm_eps,
            activation=config.activation,
            gated=config.mlp == "gated",
            bias=config.mlp_bias,
            norm=config.norm,
            backend=backend,
        )

    def forward(self, x, *, positions=None, rope=None, stats=None, next_norm=None):
        """x: [B, T, D]. Returns [B, T, D]; with next_norm (the norm that reads the result: `Attention.deferred_norm` of the next block) a pair of it
        and its statistics, which the next block takes as stats. positions and rope as in `Attention.forward`."""
        x, middle = self.attention.chained(x, x, stats, self.mlp.deferred_norm, positions=positions, rope=rope)
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
