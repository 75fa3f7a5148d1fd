"""The formulas that tests compare with, in plain torch, and the yardstick.

The yardstick: our error against float64, from the stored inputs, is at most that of the same formula in the same dtype in torch.
"""
import torch
import torch.nn.functional as F


def mlp(x, w_gate_up, w_down, norm_weight=None, residual=None, eps=1e-6):
    """residual + (silu(gate) * up) w_down^T, step by step in x's dtype."""
    if isinstance(w_gate_up, (tuple, list)):
        w_gate_up = torch.cat(tuple(w_gate_up))
    n = x if norm_weight is None else F.rms_norm(x, x.shape[-1:], norm_weight.to(x.dtype), eps)
    gate, up = (n @ w_gate_up.t()).chunk(2, -1)
    out = (F.silu(gate) * up) @ w_down.t()
    return out if residual is None else residual + out


def mlp_inputs(m, d, f, dtype, device, *, norm=True, residual=True, pair=False, scale=1.0):
    """Random (x, w_gate_up, w_down, norm_weight, residual) of sensible magnitudes; norm_weight and residual may be None."""
    new = lambda *shape, s=1.0: (torch.randn(*shape, device=device, dtype=torch.float64) * s).to(dtype)
    w = new(2 * f, d, s=scale * max(d, 1) ** -0.5)
    return (
        new(m, d),
        tuple(t.clone() for t in w.chunk(2)) if pair else w,
        new(d, f, s=max(f, 1) ** -0.5),
        1 + 0.2 * new(d) if norm else None,
        new(m, d) if residual else None,
    )


def map_tensors(f, values):
    return tuple(
        None if v is None else tuple(f(t) for t in v) if isinstance(v, (tuple, list)) else f(v) for v in values
    )


def flat(values):
    return [t for v in values if v is not None for t in (v if isinstance(v, (tuple, list)) else (v,))]


def leaf_copy(values, dtype=None):
    return map_tensors(lambda t: t.detach().to(dtype or t.dtype, copy=True).requires_grad_(), values)


def error(value, exact):
    """Relative Frobenius error; inf if value is not finite where exact is."""
    if value.shape != exact.shape:
        return float("inf")
    if value.numel() == 0:
        return 0.0
    difference = (value.double() - exact).norm() / exact.norm().clamp_min(1e-300)
    return difference.item() if difference.isfinite() else float("inf")


def assert_no_worse(name, ours, eager, exact, factor=1.0):
    """Our error is at most `factor` times eager's, but for the scatter of an error measured on few elements.

    Below half a step of the dtype nothing is asked.
    """
    floor = {torch.float64: 1e-14, torch.float32: 1e-6}.get(ours.dtype, torch.finfo(ours.dtype).eps / 4)
    a, b = error(ours, exact), error(eager, exact)
    independent = max(ours.shape, default=1)  # a gradient of one token is an outer product: its elements share their errors
    scatter = 1 + 3 * max(independent, 1) ** -0.5
    assert a <= max(factor * scatter * b, floor), f"{name}: error {a:.3e}, eager's is {b:.3e}"
