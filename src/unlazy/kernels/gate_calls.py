"""Gates of foreign modules: every ReLU-like call of a forward pass, module or function, without touching the module."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from unlazy.kernels.capture import Inputs, call_model, check_numbers, evaluation_mode, sample_count
from unlazy.runtime import Unsupported

Bound = float | int | Tensor

RELU = {"relu", "relu_"}
MAX_POOLS = {"max_pool1d", "max_pool2d", "max_pool3d"}
CLAMP = {"clamp", "clamp_", "clip", "clip_"}
NO_HARD_GATE = {
    "leaky_relu", "leaky_relu_", "prelu", "rrelu", "rrelu_", "gelu", "silu", "elu", "elu_", "selu", "selu_", "celu",
    "celu_", "softplus", "mish", "hardswish", "hardsigmoid", "logsigmoid", "softsign", "softshrink", "hardshrink",
    "tanhshrink", "tanh", "tanh_", "sigmoid", "sigmoid_", "glu", "maximum", "minimum",
}  # fmt: skip

LARGER = {"max", "min", "fmax", "fmin"}
COMPARISONS = {"gt", "ge", "lt", "le", "greater", "less", "greater_equal", "less_equal", "heaviside"}


@dataclass(frozen=True)
class GateCall:
    """One ReLU-like call: ``block.relu#2`` is the second call made by module ``block.relu``.

    ``open``: on the linear part, strictly between ``low`` and ``high``; closed on both constant branches.
    """

    name: str
    pre: Tensor
    open: Tensor
    low: Bound
    high: Bound

    @property
    def is_tied(self) -> Tensor:
        """Which units lie exactly on the border of their gate. They count as closed."""
        return (self.pre == self.low) | (self.pre == self.high)


def record(model: nn.Module, x: Inputs) -> list[GateCall]:
    """All gates of one forward pass in evaluation mode, in order.

    Raises ``Unsupported`` for activations without a hard gate, and for comparisons that may be a gate written by hand: such a
    gate would be missing in the list.
    """
    check_numbers(model, x)
    watch = _GateRecorder(sample_count(x))
    watch.run(model, x)
    if not watch.calls:
        raise no_gates_error(model)
    return watch.calls


def record_ties(model: nn.Module, x: Inputs) -> dict[str, Tensor]:
    """Units on the border of their gate, and cells of max-pools whose maximum is reached twice: numbers ``[n]`` by name."""
    check_numbers(model, x)
    watch = _GateRecorder(sample_count(x), pools=True)
    watch.run(model, x)
    return {gate.name: gate.is_tied.flatten(1).sum(1) for gate in watch.calls} | watch.pool_ties


def no_gates_error(model: nn.Module) -> Unsupported:
    """The error for a model without ReLU-like gates."""
    return Unsupported(type(model).__name__, "it has no ReLU-like gates", "Use a network with ReLU activations.")


def no_hard_gate_error(where: str, name: str) -> Unsupported:
    """The error for an activation function without a hard gate."""
    return Unsupported(
        where,
        f"{name.rstrip('_')} has no hard gate",
        "Replace it by ReLU, or use the sign of its pre-activation explicitly.",
    )


def linear_range(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Bound, Bound] | None:
    """The two bounds between which a ReLU-like function is linear; ``None`` for any other function."""
    given = partial(get_argument, arguments, options)
    if name in RELU:
        return 0, math.inf
    if name == "relu6":
        return 0, 6
    if name in ("hardtanh", "hardtanh_"):
        return given(1, "min_val", default=-1.0), given(2, "max_val", default=1.0)
    if name in CLAMP:
        return given(1, "min", default=-math.inf), given(2, "max", default=math.inf)
    if name in ("clamp_min", "clamp_min_"):
        return given(1, "min", default=-math.inf), math.inf
    if name in ("clamp_max", "clamp_max_"):
        return -math.inf, given(1, "max", default=math.inf)
    if name in ("threshold", "threshold_"):
        return given(1, "threshold", default=0), math.inf
    return None


def get_argument(
    arguments: tuple[Any, ...], options: dict[str, Any], position: int, *names: str, default: Any = None
) -> Any:
    """An argument of a call by position or by any of its names; ``None`` counts as not given."""
    value = arguments[position] if len(arguments) > position else None
    for name in names:
        value = options.get(name, value)
    return default if value is None else value


def per_axis(value: Any, count: int) -> tuple[int, ...]:
    """A tuple with one number for each axis, from a single number or a sequence."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def is_between(pre: Tensor, low: Bound, high: Bound) -> Tensor:
    """Which pre-activations lie strictly between the bounds: the open units."""
    is_open = pre > low
    return is_open if isinstance(high, float) and high == math.inf else is_open & (pre < high)


class FunctionWatch(TorchFunctionMode):
    """Intercepts every torch function that a forward pass calls. Subclasses define :meth:`intercept`."""

    def __init__(self) -> None:
        super().__init__()
        self._stack: list[str] = []
        self._counts: dict[str, int] = {}

    def run(self, model: nn.Module, x: Inputs) -> Tensor:
        """The module's output ``[n, outputs]``, in evaluation mode."""
        scripted = next((name for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
        if scripted is not None:
            raise Unsupported(scripted or "the model", "compiled code cannot be followed", "Use the original module.")
        with evaluation_mode(model), torch.no_grad(), _track_module_names(model, self._stack), self:
            return call_model(model, x)

    def intercept(self, name: str, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Called in place of the function; calls the function and returns its result."""
        raise NotImplementedError

    def current_module(self) -> str:
        """The module whose code is running."""
        return self._stack[-1] if self._stack and self._stack[-1] else "the model"

    def next_name(self) -> str:
        """The current module with the number of its call, such as ``block.relu#2``."""
        name = self.current_module()
        self._counts[name] = self._counts.get(name, 0) + 1
        return f"{name}#{self._counts[name]}"

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        return self.intercept(function_name(function), function, arguments, options or {})


def function_name(function: Any) -> str:
    """``add`` for torch.add and Tensor.add, ``shape.__get__`` for a property."""
    full = resolve_name(function) or getattr(function, "__name__", str(function))
    parts = full.split(".")
    return ".".join(parts[-2:]) if parts[-1] == "__get__" else parts[-1]


class _GateRecorder(FunctionWatch):
    """Collects the gates of a forward pass, and ties of max-pools if ``pools``."""

    def __init__(self, n: int, *, pools: bool = False) -> None:
        super().__init__()
        self.n, self.calls = n, list[GateCall]()
        self.pools, self.pool_ties = pools, dict[str, Tensor]()

    def intercept(self, name: str, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the function; keep its gate if it is ReLU-like."""
        if name in NO_HARD_GATE:
            raise no_hard_gate_error(self.current_module(), name)
        if self._is_handwritten_gate(name, arguments, options):
            raise Unsupported(
                self.current_module(),
                f"{name} of numbers may be a gate written by hand",
                "Write it as torch.relu or clamp.",
            )
        found = linear_range(name, arguments, options)
        if found is not None:
            pre = get_argument(arguments, options, 0, "input", "self").detach().clone()
            self.calls.append(GateCall(self.next_name(), pre, is_between(pre, *found), *found))
        result = function(*arguments, **options)
        if self.pools and name in MAX_POOLS and isinstance(result, Tensor):
            self.pool_ties[self.next_name()] = _count_tied_maxima(result, arguments, options)
        return result

    def _is_handwritten_gate(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether a call may be a gate: the larger of two tensors, or a comparison of numbers of each sample."""
        first = get_argument(arguments, options, 0, "input", "self")
        if name in LARGER:
            return isinstance(get_argument(arguments, options, 1, "other"), Tensor)
        real = isinstance(first, Tensor) and first.is_floating_point() and first.ndim > 1
        return name in COMPARISONS and real and len(first) == self.n and not isinstance(first, nn.Parameter)


def _count_tied_maxima(result: Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Cells ``[n]`` of a max-pool whose maximum several positions share; maxima of 0 are closed units and do not matter."""
    given, axes = partial(get_argument, arguments, options), result.ndim - 2
    kernel = per_axis(given(1, "kernel_size"), axes)
    stride = per_axis(given(2, "stride") or kernel, axes)
    padding, dilation = (per_axis(given(p, n, default=d), axes) for p, n, d in ((3, "padding", 0), (4, "dilation", 1)))
    room = [
        (p, p + s + k) for p, s, k in zip(padding, stride, kernel, strict=True)
    ]  # enough for a last, partial window
    windows = F.pad(given(0, "input"), [side for sides in reversed(room) for side in sides], value=-math.inf)
    for i in range(axes):
        reach = dilation[i] * (kernel[i] - 1) + 1
        windows = windows.unfold(2 + i, reach, stride[i]).narrow(2 + i, 0, result.shape[2 + i])[..., :: dilation[i]]
    maxima = result.reshape(*result.shape, *(1,) * axes)
    shared = (windows == maxima).flatten(2 + axes).sum(-1) > 1
    return (shared & (result != 0)).flatten(1).sum(1)


@contextmanager
def _track_module_names(model: nn.Module, stack: list[str]) -> Iterator[None]:
    """Keep the names of the modules being called on ``stack``, the innermost last."""
    handles = []

    def leave(*_: Any) -> None:
        stack.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
