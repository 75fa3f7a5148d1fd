"""Llama-style decoder modules on top of coda's operators.

Parameters keep the layout of `torch.nn.Linear`, [out, in], with the pieces of a joint projection concatenated,
[gate | up] and [q | k | v]; nothing is packed or permuted, so a state_dict loads and saves as it is.
"""

from .config import DecoderConfig
from .decoder import Decoder
from .layers import MLP, Attention, TransformerBlock
from .loss import LinearCrossEntropy

__all__ = ["MLP", "Attention", "Decoder", "DecoderConfig", "LinearCrossEntropy", "TransformerBlock"]
