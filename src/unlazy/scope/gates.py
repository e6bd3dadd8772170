"""Gates of a watched network: which are open on a set of samples."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from unlazy.kernels.capture import Inputs, call, evaluating, samples, take
from unlazy.kernels.gated import Gated, gates_of
from unlazy.kernels.record import Watch, argument, borders, record
from unlazy.runtime import Unsupported

RECORDED = 64  # samples whose gates are recorded at a time


def open_gates(model: nn.Module, x: Inputs) -> list[Bool[Tensor, "n units"]]:
    """Open or closed, for every gate that depends on a trained parameter: one that cannot move says nothing about learning."""
    if isinstance(model, Gated):
        return [layer.flatten(1) for layer in gates_of(model, x)]
    parts = [
        [gate.open.flatten(1) for gate in record(model, take(x, slice(start, start + RECORDED)))]
        for start in range(0, samples(x), RECORDED)
    ]
    moved = _Dependence().of(model, take(x, slice(0, 2)))
    gates = [torch.cat(layer) for layer, trained in zip(zip(*parts, strict=True), moved, strict=True) if trained]
    if not gates:
        raise Unsupported(type(model).__name__, "none of its gates depends on a trained parameter", "Nothing to do.")
    return gates


class _Dependence(Watch):
    """Sees for every gate, in the order of ``record``, whether its input depends on a parameter that requires gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def of(self, model: nn.Module, x: Inputs) -> list[bool]:
        with evaluating(model), torch.enable_grad(), self:
            call(model, x)
        return self.found

    def seen(self, name: str, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if borders(name, arguments, options) is not None:
            self.found.append(bool(argument(arguments, options, 0, "input", "self").requires_grad))
        return function(*arguments, **options)
