"""What all operators share: argument handling, autocast, and the rule that second derivatives are an error."""
from __future__ import annotations

from typing import Any, Callable

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


def cast_for_autocast(like: Tensor, *tensors: Tensor | None) -> list[Tensor | None]:
    """Inside an autocast region, casts fp32, bf16 and fp16 tensors to its dtype, as torch's own linear does."""
    kind = like.device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    eligible = (torch.float32, torch.bfloat16, torch.float16)
    return [t.to(dtype) if t is not None and t.dtype in eligible else t for t in tensors]


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def or_none(t: Tensor) -> Tensor | None:
    """Operators return an empty tensor where there is nothing: schemas have no optional results."""
    return t if t.numel() else None


def no_second_derivative(op: str, public: str) -> None:
    """Differentiating `op`, a backward formula, raises; without this torch would go on with zeros."""

    def raise_error(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(f"{public} has no second derivative: its backward cannot be differentiated (create_graph=True)")

    torch.library.register_autograd(op, raise_error)


def fake(op: str) -> Callable:
    return torch.library.register_fake(op)
