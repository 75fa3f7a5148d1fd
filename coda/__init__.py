"""CODA: the work around a Transformer's matrix products, done inside their epilogues.

>>> y = coda.fused_mlp_forward(x, w_gate_up, w_down, norm_weight=g, residual=x)

See ARCHITECTURE.md for how a call travels from here to a kernel.
"""
from coda._extension import backend_of_last_call, info
from coda.ops.linear import linear
from coda.ops.mlp import fused_mlp_forward
from coda.ops.norm import rms_norm_stats

from coda import nn  # noqa: E402  its modules call the functions above

__version__ = "0.1.0"
__all__ = ["backend_of_last_call", "fused_mlp_forward", "info", "linear", "nn", "rms_norm_stats"]
