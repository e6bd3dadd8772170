"""Gates of foreign modules: every ReLU-like call of a forward pass, module or function, without touching the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from unlazy.kernels.capture import Inputs, call, check_inputs, evaluating
from unlazy.runtime import Unsupported


@dataclass(frozen=True)
class GateCall:
    """One ReLU-like call: ``block.relu#2`` is the second call made by module ``block.relu``; ``open`` = linear part."""

    name: str
    pre: Tensor
    open: Tensor


def _above_zero(pre: Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    return pre > 0


def _between(low: float, high: float) -> Callable[[Tensor, tuple[Any, ...], dict[str, Any]], Tensor]:
    def is_open(pre: Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        values = dict(zip(("min_val", "max_val"), arguments[1:], strict=False)) | options
        return (pre > values.get("min_val", low)) & (pre < values.get("max_val", high))

    return is_open


def _clamped(pre: Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Open strictly between the bounds given."""
    bounds = dict(zip(("min", "max"), arguments[1:], strict=False)) | options
    low, high = bounds.get("min"), bounds.get("max")
    is_open = torch.ones_like(pre, dtype=torch.bool)
    is_open = is_open if low is None else is_open & (pre > low)
    return is_open if high is None else is_open & (pre < high)


# A unit is open on the linear part of its activation; a truncated one is closed on both constant branches.
HARD_GATES = {
    F.relu: _above_zero,
    F.relu_: _above_zero,
    torch.relu: _above_zero,
    torch.relu_: _above_zero,
    Tensor.relu: _above_zero,
    Tensor.relu_: _above_zero,
    F.relu6: lambda pre, arguments, options: (pre > 0) & (pre < 6),
    F.hardtanh: _between(-1.0, 1.0),
    F.hardtanh_: _between(-1.0, 1.0),
    torch.clamp: _clamped,
    Tensor.clamp: _clamped,
    Tensor.clamp_: _clamped,
    torch.clamp_min: _clamped,
    Tensor.clamp_min: _clamped,
    F.threshold: lambda pre, arguments, options: pre > (options.get("threshold", arguments[1] if arguments[1:] else 0)),
}
NO_HARD_GATE = {
    F.leaky_relu, F.leaky_relu_, F.gelu, F.silu, F.elu, F.elu_, F.selu, F.celu, F.softplus, F.mish, F.prelu,
    F.hardswish, F.logsigmoid, F.softsign, F.tanhshrink, torch.tanh, torch.sigmoid, Tensor.tanh, Tensor.sigmoid,
    F.tanh, F.sigmoid, torch.prelu, F.glu, torch.maximum,
}  # fmt: skip
# What may stand between gates in a plain dense chain without changing which paths there are.
PLAIN = {F.linear, torch.flatten, Tensor.flatten, Tensor.reshape, Tensor.view, F.dropout, F.batch_norm}


def record(model: nn.Module, x: Inputs) -> list[GateCall]:
    """All gates of one forward pass in evaluation mode, in order. Raises for activations that have no hard gate."""
    return Recording(model, x).calls


class Recording:
    """One recorded forward pass: its gates, and the other functions that acted on tensors."""

    def __init__(self, model: nn.Module, x: Inputs) -> None:
        check_inputs(x)
        self.calls: list[GateCall] = []
        self.others: set[str] = set()
        with evaluating(model), torch.no_grad(), _named(model) as stack:
            self._stack, self._counts = stack, dict[str, int]()
            with _Watch(self):
                call(model, x)
        if not self.calls:
            raise Unsupported(type(model).__name__, "it has no ReLU-like gates", "Use a network with ReLU activations.")

    def note(self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if function in HARD_GATES:
            pre = (arguments[0] if arguments else options["input"]).detach().clone()
            self.calls.append(GateCall(self._next_name(), pre, HARD_GATES[function](pre, arguments, options)))
        elif function in NO_HARD_GATE:
            raise Unsupported(
                self._where(),
                f"{function.__name__} has no hard gate",
                "Replace it by ReLU, or use the sign of its pre-activation explicitly.",
            )
        elif function not in PLAIN:
            name = resolve_name(function) or getattr(function, "__name__", str(function))
            if "__get__" not in name and not name.endswith((".size", ".dim", ".__len__")):
                self.others.add(name)

    def _where(self) -> str:
        return self._stack[-1] if self._stack and self._stack[-1] else "the model"

    def _next_name(self) -> str:
        name = self._where()
        self._counts[name] = self._counts.get(name, 0) + 1
        return f"{name}#{self._counts[name]}"


class _Watch(TorchFunctionMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        self.recording.note(function, arguments, options or {})
        return function(*arguments, **(options or {}))


@contextmanager
def _named(model: nn.Module) -> Iterator[list[str]]:
    """A stack of the names of the modules being called."""
    stack: list[str] = []
    handles = []

    def leave(*_: Any) -> None:
        stack.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()
