"""The shape of a decoder, checked once so that the modules need not check it again."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and constants of a `Decoder`.

    vocab_size      number of token ids
    dim             width D of the residual stream
    num_layers      number of transformer blocks
    num_heads       query heads
    num_kv_heads    key and value heads, a divisor of num_heads; None: num_heads (no grouping)
    head_dim        width of one head, even; None: dim // num_heads
    ffn_dim         width F of the feed-forward layer, of the gate and of the up projection each
    rope_theta      base of the rotary frequencies
    rotary_dim      how many columns of a head turn, even; None: head_dim; 0: no rotary embedding
    qkv_bias        a bias on the query, key and value projection
    qk_norm         an RMSNorm of each head of the queries and keys, before they turn
    o_bias          a bias on the output projection of attention
    mlp             "gated", or "plain": one up projection and no gate
    mlp_bias        a bias on both projections of a plain feed-forward layer
    activation      of the gate: "silu" (SwiGLU), "gelu" or "gelu_tanh"; of a plain layer also "relu" or "relu2" (its square)
    norm            "rms" (nn.RMSNorm) or "layer" (nn.LayerNorm)
    norm_eps        epsilon of every norm
    max_seq_len     longest sequence that `Decoder.forward` accepts
    tie_embeddings  use the embedding matrix as the output head too

    Raises ValueError, naming the field, its value and what was expected. All fields are keyword arguments.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    ffn_dim: int
    rope_theta: float = 10000.0
    rotary_dim: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    o_bias: bool = False
    mlp: str = "gated"
    mlp_bias: bool = False
    activation: str = "silu"
    norm: str = "rms"
    norm_eps: float = 1e-6
    max_seq_len: int = 2048
    tie_embeddings: bool = True

    def __post_init__(self):
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "ffn_dim", "max_seq_len"):
            self._require_positive_int(name)

        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        self._require_positive_int("num_kv_heads")
        if self.num_heads % self.num_kv_heads:
            self._fail("num_kv_heads", f"a divisor of num_heads = {self.num_heads}")

        if self.head_dim is None:
            if self.dim % self.num_heads:
                self._fail("dim", f"a multiple of num_heads = {self.num_heads}, or an explicit head_dim")
            object.__setattr__(self, "head_dim", self.dim // self.num_heads)
        self._require_positive_int("head_dim")
        if self.head_dim % 2:
            self._fail("head_dim", "an even number, since rotary embedding turns its two halves against each other")

        if self.rotary_dim is None:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        if self.rotary_dim != 0 or isinstance(self.rotary_dim, bool):
            self._require_positive_int("rotary_dim")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            self._fail("rotary_dim", f"an even number, at most head_dim = {self.head_dim}")
        for name, choices in (("mlp", ("gated", "plain")), ("norm", ("rms", "layer"))):
            if getattr(self, name) not in choices:
                self._fail(name, " or ".join(map(repr, choices)))
        if self.mlp == "gated" and self.activation not in ("silu", "gelu", "gelu_tanh"):
            self._fail("activation", "'silu', 'gelu' or 'gelu_tanh'")
        if self.activation not in ("relu", "relu2", "silu", "gelu", "gelu_tanh"):
            self._fail("activation", "'relu', 'relu2', 'silu', 'gelu' or 'gelu_tanh'")
        if self.mlp == "gated" and self.mlp_bias is True:
            self._fail("mlp_bias", "False with mlp = 'gated'")

        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (is_number and math.isfinite(value) and value > 0):
                self._fail(name, "a positive finite number")
        for name in ("qkv_bias", "qk_norm", "o_bias", "mlp_bias", "tie_embeddings"):
            if not isinstance(getattr(self, name), bool):
                self._fail(name, "True or False")

    def _require_positive_int(self, name):
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self._fail(name, "a positive integer")

    def _fail(self, name, expected):
        raise ValueError(f"DecoderConfig.{name} is {getattr(self, name)!r}, expected {expected}.")
