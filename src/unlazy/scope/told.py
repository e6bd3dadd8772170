"""What a training loop tells a scope: a number of updates, and numbers of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unlazy.runtime import require


def whole(step: Any) -> int:
    """A number of updates: an int, or what numpy, torch or a careless division make of one."""
    try:
        number = -1.0 if isinstance(step, str) else float(step)
    except (TypeError, ValueError, RuntimeError):
        number = -1.0
    require(number >= 0 and number.is_integer(), f"step is the number of updates done, got {step!r}.")
    return int(number)


def detached(value: Any) -> Any:
    """A number that does not keep a graph alive."""
    return value.detach() if isinstance(value, Tensor) else value


def as_number(value: Any) -> float | None:
    """The mean of what the user gave, or ``None`` where it is not numbers."""
    try:
        return float(torch.as_tensor(value).detach().double().mean())
    except (TypeError, ValueError, RuntimeError):
        return None
