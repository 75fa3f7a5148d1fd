"""The one place where `coda.nn` chooses between coda's operators and plain torch.

"coda" calls the public operators; "eager" is the reference: the same formulas in separate torch operations on the same
parameters. Only work with an epilogue is listed here. A projection with nothing around it (qkv, the head) is a bare
GEMM in either case and stays `F.linear`.
"""

import torch.nn.functional as F

import coda

BACKENDS = ("coda", "eager")


def check_backend(backend):
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(map(repr, BACKENDS))}.")
    return backend


def rms_norm(x, weight, eps):
    """RMSNorm(x; weight) over the last dimension, in x's dtype."""
    # Under autocast the residual stream may be narrower than the parameters, and torch's fused kernel wants one dtype.
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def norm_mlp(backend, x, w_gate_up, w_down, *, norm_weight, eps, residual):
    """residual + (silu(gate) * up) w_down^T with [gate | up] = RMSNorm(x; norm_weight) w_gate_up^T."""
    if backend == "coda":
        return coda.fused_mlp_forward(x, w_gate_up, w_down, norm_weight=norm_weight, eps=eps, residual=residual)
    gate, up = F.linear(rms_norm(x, norm_weight, eps), w_gate_up).chunk(2, dim=-1)
    out = F.linear(F.silu(gate) * up, w_down)
    return out if residual is None else residual + out


def linear(backend, x, weight, *, residual):
    """x weight^T + residual."""
    if backend == "coda":
        return coda.linear(x, weight, residual=residual)
    out = F.linear(x, weight)
    return out if residual is None else residual + out
