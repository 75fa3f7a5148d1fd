"""What all operators share: argument handling, autocast, and the rule that second derivatives are an error."""
from __future__ import annotations

from typing import Any, Callable, NoReturn, Sequence

import torch
from torch import Tensor

from coda import _extension as _extension  # registers the operators


def check_tensor(name: str, value: Any) -> Tensor:
    """Raises TypeError unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {type(value).__name__}, expected a torch.Tensor")
    return value


def check_optional_tensor(name: str, value: Any) -> Tensor | None:
    return None if value is None else check_tensor(name, value)


def check_devices(x: Tensor, **others: Tensor | None) -> None:
    """The dispatcher would answer some mixtures of devices without asking our checks."""
    for name, t in others.items():
        if t is not None and t.device != x.device:
            raise ValueError(f"{name} is on {t.device}, expected {x.device} as x")


def as_rows(t: Tensor, name: str = "x") -> Tensor:
    """[..., D] as [M, D]; a view where the strides allow it, and well defined for D = 0."""
    if t.dim() == 0:
        raise ValueError(f"{name} has shape [], expected at least one dimension")
    return t.unsqueeze(0) if t.dim() == 1 else t.flatten(0, -2)


def check_floating(name: str, t: Tensor) -> None:
    if t.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise TypeError(f"{name} has dtype {t.dtype}, expected float32, float64, bfloat16 or float16")


def check_matrix(name: str, w: Tensor, x: Tensor, x_name: str = "x") -> None:
    """Raises unless w is [out, width of x] in x's dtype. For functions whose operators know the weight by another name."""
    if w.dim() != 2:
        raise ValueError(f"{name} has shape {list(w.shape)}, expected 2 dimensions (out, in)")
    if x.dim() and w.shape[1] != x.shape[-1]:
        raise ValueError(f"{name} has shape {list(w.shape)}, expected {x.shape[-1]} columns as {x_name} has")
    if w.dtype != x.dtype:
        raise TypeError(f"{name} has dtype {w.dtype}, expected {x.dtype} as {x_name}")


def split_pair(name: str, w: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """(w, None) for one tensor [gate; up], (gate, up) for a pair."""
    if isinstance(w, Tensor):
        return w, None
    if not isinstance(w, (tuple, list)) or len(w) != 2:
        raise TypeError(f"{name} is {type(w).__name__}, expected a tensor [2F, D] or a pair (gate, up) of tensors [F, D]")
    gate, up = (check_tensor(f"{name}[{i}]", t) for i, t in enumerate(w))
    return gate, up


def named_pair(name: str, gate: Tensor, up: Tensor | None) -> dict[str, Tensor]:
    """What `split_pair` gave, under the names that its caller knows."""
    return {name: gate} if up is None else {f"{name}[0]": gate, f"{name}[1]": up}


def check_weights(x_name: str, x: Tensor, **weights: Tensor | None) -> Tensor:
    """x as rows, after checks of its dtype and of every weight (a bias is left to the operator)."""
    check_floating(x_name, x)
    rows = as_rows(x, x_name)
    for name, w in weights.items():
        if name != "bias" and w is not None:
            check_matrix(name, w, x, x_name)
    return rows


def check_vector(name: str, t: Tensor | None, size: int, x: Tensor, *wider: torch.dtype) -> None:
    """Raises unless t is absent, or [size] in x's dtype or one of `wider`. For functions whose operators know it by another name."""
    if t is None:
        return
    if t.dtype not in (x.dtype, *wider):
        raise TypeError(f"{name} has dtype {t.dtype}, expected {' or '.join(map(str, dict.fromkeys((x.dtype, *wider))))}")
    if t.shape != (size,):
        raise ValueError(f"{name} has shape {list(t.shape)}, expected [{size}]")


def check_pair(name: str, gate: Tensor, up: Tensor | None) -> None:
    """Raises unless [gate; up], or the two of them, have halves of equal shape."""
    if up is None and gate.shape[0] % 2:
        raise ValueError(f"{name} has shape {list(gate.shape)}, expected an even number of rows, [gate; up]")
    if up is not None and up.shape != gate.shape:
        raise ValueError(f"{name}[1] has shape {list(up.shape)}, expected {list(gate.shape)}, the shape of {name}[0]")


def cast_for_autocast(like: Tensor, *tensors: Tensor | None) -> list[Tensor | None]:
    """Inside an autocast region, casts fp32, bf16 and fp16 tensors to its dtype, as torch's own linear does.

    Not for residuals: a sum takes the wider dtype in an autocast region, so an fp32 residual stream stays fp32 (see `split_residual`).
    """
    kind = like.device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    eligible = (torch.float32, torch.bfloat16, torch.float16)
    return [t.to(dtype) if t is not None and t.dtype in eligible else t for t in tensors]


def split_residual(x: Tensor, residual: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(what the epilogue adds, what is added after it): inside autocast a residual of another dtype cannot go into the epilogue."""
    if residual is not None and residual.dtype != x.dtype and torch.is_autocast_enabled(x.device.type):
        return None, residual
    return residual, None


def needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def weight_gradient(weight: Tensor, dy_t: Tensor, x: Tensor) -> Tensor | None:
    """dy_t x, the gradient of `weight`: returned in its dtype, or, if the weight has a float32 attribute main_grad, added to that (one rounding
    less a step, for gradient accumulation); then autograd gets none. Sets grad_added_to_main_grad where the training loop keeps such a flag."""
    total = main_grad(weight)
    if total is None:
        return torch.ops.coda.gemm(dy_t, x)
    torch.ops.coda.gemm_accumulate_(total, dy_t, x)
    mark_added_to_main_grad(weight)
    return None


def part_gradients(parts: Sequence[Tensor], wanted: Sequence[bool], dz: Tensor, x: Tensor) -> list[Tensor | None]:
    """The gradients of weights whose rows follow each other in one product, dz [M, all rows], x [M, D]: in one product where that is possible."""
    sizes = [w.shape[0] for w in parts]
    if sum(wanted) > 1 and all(main_grad(w) is None for w in parts):
        together = torch.ops.coda.gemm(dz.t(), x).split(sizes)
        return [g if wants else None for g, wants in zip(together, wanted)]
    columns = dz.split(sizes, 1)
    return [weight_gradient(w, d.t(), x) if wants else None for w, d, wants in zip(parts, columns, wanted)]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The weights of one product, behind each other."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def main_grad(weight: Tensor | None) -> Tensor | None:
    total = getattr(weight, "main_grad", None)
    if total is not None and (total.dtype != torch.float32 or total.shape != weight.shape or total.device != weight.device):
        raise ValueError(
            f"main_grad of a weight of shape {list(weight.shape)} has dtype {total.dtype}, shape {list(total.shape)} and device {total.device}, "
            f"expected float32, the weight's shape and {weight.device}"
        )
    return total


def mark_added_to_main_grad(weight: Tensor) -> None:
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True


def refuse_grad(public: str, instead: str, **tensors: Tensor | None) -> None:
    """For raw forward programs, which record nothing for a backward."""
    for name, t in tensors.items():
        if needs_grad(t):
            raise ValueError(f"{name} requires grad, and {public} has no backward; use {instead}, or call it under torch.no_grad()")


def check_activation(activation: str | None, choices: Sequence[str | None]) -> None:
    if activation not in choices:
        raise ValueError(f"activation is {activation!r}, expected one of {', '.join(map(repr, choices))}")


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _raise_second_derivative(public: str) -> NoReturn:
    raise NotImplementedError(f"{public} has no second derivative: its backward cannot be differentiated (create_graph=True)")


def no_second_derivative(op: str, public: str) -> None:
    """Differentiating `op`, a backward formula, raises; without this torch would go on with zeros."""
    torch.library.register_autograd(op, lambda ctx, *grads: _raise_second_derivative(public))


class _SecondDerivative(torch.autograd.Function):
    """A gradient as it is, tied to all that it depends on, so that differentiating it by any of them is an error."""

    @staticmethod
    def forward(ctx: Any, public: str, gradient: Tensor, *depends_on: Tensor | None) -> Tensor:
        ctx.public = public
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        _raise_second_derivative(ctx.public)


def once(public: str, gradients: tuple, *depends_on: Tensor | None) -> tuple:
    """The gradients of an autograd function, which may be differentiated no further: `no_second_derivative` for what is no operator."""
    if not torch.is_grad_enabled():
        return gradients
    return tuple(None if g is None else _SecondDerivative.apply(public, g, *depends_on) for g in gradients)


def fake(op: str) -> Callable:
    return torch.library.register_fake(op)
