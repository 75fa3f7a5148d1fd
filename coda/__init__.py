"""CODA: the work around a Transformer's matrix products, done inside their epilogues.

>>> y = coda.fused_mlp_forward(x, w_gate_up, w_down, norm_weight=g, residual=x)

See ARCHITECTURE.md for how a call travels from here to a kernel.
"""
from coda._extension import backend_of_last_call, info
from coda.ops.cross_entropy import VocabularyShard, linear_cross_entropy, linear_log_prob
from coda.ops.linear import linear, linear_residual
from coda.ops.mlp import fused_mlp_forward
from coda.ops.norm import NormStats, rms_norm_stats
from coda.ops.norm_linear import norm_linear, norm_linear_rope
from coda.ops.raw import linear_residual_rms_norm, rms_linear, rms_linear_rope, rms_linear_swiglu

from coda import nn  # noqa: E402  its modules call the functions above

__version__ = "0.1.0"
__all__ = [
    "NormStats",
    "VocabularyShard",
    "backend_of_last_call",
    "fused_mlp_forward",
    "info",
    "linear",
    "linear_cross_entropy",
    "linear_log_prob",
    "linear_residual",
    "linear_residual_rms_norm",
    "nn",
    "norm_linear",
    "norm_linear_rope",
    "rms_linear",
    "rms_linear_rope",
    "rms_linear_swiglu",
    "rms_norm_stats",
]
