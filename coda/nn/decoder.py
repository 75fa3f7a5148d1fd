"""The decoder: embedding, blocks, final norm, head."""

import torch
import torch.nn.functional as F
from torch import nn

from .backends import apply_norm, check_backend, kind_of, norm_head_loss
from .layers import TransformerBlock, make_norm, rope_tables

INIT_STD = 0.02


class Decoder(nn.Module):
    """Llama-style decoder.

    config: `DecoderConfig`.
    backend: "coda", or "eager" for the reference, the same formulas in plain torch. Both have the same parameters, the
    same state_dict and, from the same seed, the same initial values.

    After construction on the meta device, call `to_empty(device=...)` and then `reset_parameters()`, or load a
    state_dict.
    """

    def __init__(self, config, *, backend="coda"):
        super().__init__()
        self.config = config
        self.backend = check_backend(backend)
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(TransformerBlock(config, backend=backend) for _ in range(config.num_layers))
        self.norm = make_norm(config.norm, config.dim, config.norm_eps)
        # A tied head reads the embedding where it is used; a second reference to it as a parameter of its own would
        # come apart in to_empty() and appear twice in the state_dict.
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        """Norm weights 1; biases 0; matrices normal with standard deviation 0.02, divided by sqrt(2 num_layers) for those that
        write to the residual stream, so that its variance at the end does not grow with depth."""
        residual_std = INIT_STD / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                (nn.init.zeros_ if name.endswith("bias") else nn.init.ones_)(parameter)
            else:
                writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if writes_residual else INIT_STD)

    def forward(self, tokens, targets=None, *, positions=None):
        """Logits, or the loss when targets are given.

        tokens: integers [B, T], T <= config.max_seq_len.
        targets: int64 [B, T], the token that should follow each position; -100 leaves a position out.
        positions: integers [T] or [B, T] for the rotary embedding, default 0 .. T-1; see `Attention.forward`.

        Returns the logits [B, T, vocab_size], or the mean cross-entropy in nats per token, a scalar in fp32 (in fp64
        for an fp64 model). Raises ValueError for tokens of another shape or dtype or longer than max_seq_len.
        """
        self._check_tokens(tokens)
        x = self.embedding(tokens)
        rope = rope_tables(positions, self.config.rotary_dim, self.config.rope_theta, like=x)
        stats = None
        last_norm = self.norm if targets is not None and kind_of(self.norm) == "rms" else None
        for block, next_norm in zip(self.blocks, [*(b.attention.deferred_norm for b in self.blocks[1:]), last_norm]):
            if next_norm is None:
                x, stats = block(x, rope=rope, stats=stats), None
            else:
                x, stats = block(x, rope=rope, stats=stats, next_norm=next_norm)
        head = self.embedding.weight if self.head is None else self.head.weight
        if targets is None:
            return F.linear(apply_norm(self.norm, x), head)
        return norm_head_loss(self.backend, x, self.norm, head, targets, stats)

    def _check_tokens(self, tokens):
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(
                f"tokens has shape {tuple(tokens.shape)} and dtype {tokens.dtype}, expected integers of shape [B, T]."
            )
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"tokens has {tokens.shape[1]} positions, expected at most max_seq_len = {self.config.max_seq_len}."
            )

    @torch.no_grad()
    def generate(self, tokens, n, temperature=1.0, top_k=None, generator=None):
        """Appends n sampled tokens to each row of tokens, integers [B, T] with T >= 1. Returns [B, T + n].

        temperature: divides the logits; 0 takes the most likely token. top_k: sample among the k most likely tokens
        only. generator: a torch.Generator on the device of tokens, for a repeatable result.

        Each token costs one forward over the last max_seq_len tokens; there is no key-value cache.
        """
        if tokens.dim() != 2 or tokens.shape[1] < 1:
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}, expected [B, T] with at least one token a row.")
        if n < 0:
            raise ValueError(f"n is {n}, expected a number of tokens, 0 or more.")
        if temperature < 0:
            raise ValueError(f"temperature is {temperature}, expected 0 or more.")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}, expected None or 1 or more.")
        for _ in range(n):
            logits = self(tokens[:, -self.config.max_seq_len :])[:, -1].float()
            if temperature == 0:
                following = logits.argmax(dim=-1, keepdim=True)
            else:
                logits = logits / temperature
                if top_k is not None and top_k < logits.shape[-1]:
                    kth_largest = logits.topk(top_k, dim=-1).values[:, -1:]
                    logits = logits.masked_fill(logits < kth_largest, float("-inf"))
                following = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
            tokens = torch.cat((tokens, following.to(tokens.dtype)), dim=1)
        return tokens
