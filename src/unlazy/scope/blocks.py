"""The layers of a watched network in forward order, in at most ``MOST_BLOCKS`` blocks: what measures by layer are taken of.

A layer is a module that holds trained parameters itself; a parameter that several modules share belongs to the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from unlazy.kernels.capture import Inputs, call_model, evaluation_mode
from unlazy.kernels.gate_calls import FunctionWatch, get_argument, linear_range

MOST_BLOCKS = 16
PARAMETRIZATIONS = ".parametrizations."  # torch puts the parameters of a parametrised module below it


@dataclass(frozen=True)
class Block:
    """A layer, or several that follow each other: its name, the names of its ``layers`` and of their ``parameters``."""

    name: str
    layers: tuple[str, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Blocks:
    """All blocks in forward order. ``gate_layers``: for every gate that trains, in order, the layer that ran before it."""

    blocks: tuple[Block, ...]
    gate_layers: tuple[str, ...] = ()
    _of_layer: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_of_layer", {layer: block.name for block in self.blocks for layer in block.layers})

    def sum_by_block(self, parts: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The sum of each block's parts, given by layer, in forward order; parts of no layer are left out."""
        found: dict[str, Tensor] = {}
        for layer, part in parts:
            block = self._of_layer.get(layer_of(f"{layer}."))
            if block is not None:
                found[block] = found[block] + part if block in found else part
        return {block.name: found[block.name] for block in self.blocks if block.name in found}


def layer_of(parameter: str) -> str:
    """The name of the module that holds a parameter."""
    holder, _, inside = parameter.partition(PARAMETRIZATIONS)
    return holder if inside else parameter.rpartition(".")[0]


def find_blocks(model: nn.Module, few: Inputs, trained: Iterable[str], user_name: Callable[[str], str] = str) -> Blocks:
    """The blocks of the parameters ``trained``. ``few``: samples that pass the model once, to see the order of its layers.

    ``user_name``: how the user calls a module. A layer that is never called itself comes behind the module that holds it.
    """
    parameters: dict[str, list[str]] = {}
    for name in trained:
        parameters.setdefault(layer_of(name), []).append(name)
    watch = _ForwardOrder(parameters)
    try:
        watch.find(model, few)
    except Exception:  # a model that cannot be watched keeps the order in which its layers were made
        watch = _ForwardOrder(())
    layers = sorted(
        parameters, key=lambda layer: watch.place(layer)
    )  # stable: else in the order in which they were made
    groups = [[layer] for layer in layers] if len(layers) <= MOST_BLOCKS else _split_evenly(layers, MOST_BLOCKS)
    blocks = []
    for group in groups:
        names = tuple(user_name(layer) for layer in group)
        shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        blocks.append(Block(shown or "the model", names, tuple(name for layer in group for name in parameters[layer])))
    return Blocks(tuple(blocks), tuple(user_name(layer) for layer in watch.gates))


def _split_evenly(layers: Sequence[str], count: int) -> list[list[str]]:
    ends = [round(number * len(layers) / count) for number in range(count + 1)]
    return [list(layers[first:last]) for first, last in pairwise(ends)]


class _ForwardOrder(FunctionWatch):
    """Notes when every module is first called, and which layer was the last to finish before each gate that trains."""

    def __init__(self, layers: Iterable[str]) -> None:
        super().__init__()
        self.layers, self.calls, self.gates = set(layers), dict[str, int](), list[str]()
        self._last = ""

    def place(self, layer: str) -> int:
        """The number of the call of a layer, or of the nearest module around it that was called."""
        while layer not in self.calls and layer:
            layer = layer.rpartition(".")[0]
        return self.calls.get(layer, -1)

    def find(self, model: nn.Module, few: Inputs) -> None:
        """Run the model once with hooks, which are removed again."""
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                began = module.register_forward_pre_hook(partial(self._note_call, name))
                hooks.callback(began.remove)
                if name in self.layers:
                    hooks.callback(module.register_forward_hook(partial(self._note_end, name)).remove)
            with evaluation_mode(model), torch.enable_grad(), self:
                call_model(model, few)

    def _note_call(self, name: str, *_: Any) -> None:
        self.calls.setdefault(name, len(self.calls))

    def _note_end(self, name: str, *_: Any) -> None:
        self._last = name

    def intercept(self, name: str, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        is_gate = self._last and linear_range(name, arguments, options) is not None
        if is_gate and get_argument(arguments, options, 0, "input", "self").requires_grad:
            self.gates.append(self._last)
        return function(*arguments, **options)
