"""Numbers of paths through a graph of units, for blocks of pairs of inputs: exact, in bounded memory.

What does not depend on the inputs is computed once, in a :class:`Program`: where paths begin, along which axes only sums are
needed, and how large every number can get, which decides the type that holds it exactly. Numbers that may exceed float64 are
kept with a power of two for each pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unlazy.kernels.paths.operations import NONE, Axes, Gate, Mix, Scale, Source, sum_axes
from unlazy.kernels.paths.unit_graph import Graph, Node
from unlazy.runtime import InputError, require

Common = Callable[[int], Tensor]  # gate -> units open on both inputs, [*axes, a, b]
EXACT = {torch.int32: 30, torch.float32: 24, torch.float64: math.inf}  # bits of whole numbers that a type surely holds
TOP = 900  # numbers are kept below 2^TOP times what one layer can add
ROOM = 1000  # bits that float64 is trusted with


class Program:
    """Counts paths of a graph to one output, with or without paths that begin at biases.

    ``products``: a path begins at an input node and is worth the product of the two inputs there (neural path kernel).
    """

    def __init__(
        self,
        graph: Graph,
        *,
        bias_paths: bool = False,
        output: int | None = None,
        products: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.graph, self.products, self.output = graph, products, output
        self.shapes = [node.shape for node in graph.nodes]
        self.last_use = {i: index for index, node in enumerate(graph.nodes) for i in node.inputs}
        self.wanted = self._axes_to_sum()
        self.starts: dict[int, Tensor] = {}
        self.bits: dict[int, float] = {}
        self.contracted: dict[int, Axes] = {}
        self.numbers = 1
        self.scaled = True
        self.reached = self._begin(bias_paths)
        self._settle()
        self.starts = {index: start.to(device) for index, start in self.starts.items()}
        self.reached = None if self.reached is None else self.reached.to(device)

    def _axes_to_sum(self) -> list[Axes]:
        """For every node, the axes along which all nodes that read it need only sums."""
        wanted: dict[int, Axes] = {len(self.shapes) - 1: NONE}
        for index in reversed(range(len(self.shapes))):
            node = self.graph.nodes[index]
            asked = node.operation.input_axes_to_sum(wanted[index], [self.shapes[i] for i in node.inputs])
            for i, axes in zip(node.inputs, asked, strict=True):
                wanted[i] = wanted.get(i, axes) & axes
        return [wanted[index] for index in range(len(self.shapes))]

    def _begin(self, bias_paths: bool) -> Tensor | None:
        """Set ``starts``, the units where paths begin. Returns which outputs read the input directly, with no unit between."""
        raw: list[Tensor | None] = []
        for index, node in enumerate(self.graph.nodes):
            operation, one = node.operation, torch.ones((1,) * (len(node.shape) + 2), dtype=torch.float64)
            if isinstance(operation, Source):
                here = one if operation.raw and not self.products else None
                constant = not operation.raw
            else:
                here = self._reads_input(index, raw)
                constant = isinstance(operation, Mix | Scale) and operation.biased
            begins = [one] if bias_paths and constant else []
            if here is not None and isinstance(operation, Mix | Gate):
                begins.append(here)
                here = None
            if begins:
                self.starts[index] = sum(begins[1:], begins[0])
            raw.append(here)
        return raw[-1]

    def _reads_input(self, index: int, raw: list[Tensor | None]) -> Tensor | None:
        """1 where a node reads the input itself, 0 elsewhere."""
        node = self.graph.nodes[index]
        shapes = [self.shapes[i] for i in node.inputs]
        states = []
        for i, axes, shape in zip(node.inputs, node.operation.input_axes_to_sum(NONE, shapes), shapes, strict=True):
            state = raw[i]
            states.append(None if state is None else sum_axes(state, axes, shape))
        found = node.operation.carry(states, NONE, shapes)
        return None if found is None else _merge_equal((found > 0).double())

    def _settle(self) -> None:
        """One pass with every gate open: which axes gates can sum at once, and how many paths there are at most."""

        def all_open(index: int) -> Tensor:
            axes, shape = self.contracted[index], self.shapes[index]
            sizes = [1 if axis in axes else size for axis, size in enumerate(shape)]
            open_units = float(math.prod(shape[axis] for axis in axes))
            return torch.full((*sizes, 1, 1), open_units, dtype=torch.float64)

        self._arrive(*self._run_graph(all_open, settling=True))
        self.scaled = not self.products and max(self.bits.values(), default=0.0) > ROOM

    def paths(self, common: Common) -> tuple[Tensor, Tensor | None]:
        """Numbers of common paths ``[a, b]`` to the output, and the power of two they are to be multiplied by, if any."""
        return self._arrive(*self._run_graph(common, settling=False))

    def _run_graph(self, common: Common, *, settling: bool) -> tuple[Tensor | None, Tensor | None]:
        """Numbers of paths at the last node, and their power of two. ``settling``: the first pass, with every gate open."""
        held: dict[int, tuple[Tensor | None, Tensor | None]] = {}
        for index, node in enumerate(self.graph.nodes):
            states, shift = self._read_inputs(index, held)
            start = self.starts.get(index)
            if isinstance(node.operation, Gate):
                made = self._apply_gate(index, _add_starts(states[0], start, shift), common, settling)
            elif isinstance(node.operation, Source) and node.operation.raw and self.products:
                self.contracted[index] = self.wanted[index]
                made = common(index)
            else:
                made = None
                if states:
                    made = node.operation.carry(states, self.wanted[index], [self.shapes[i] for i in node.inputs])
                if start is not None:
                    made = _add_starts(made, sum_axes(start, self.wanted[index], node.shape), shift)
            if self.scaled:
                made, shift = _lower(made, shift)
            held[index] = made, shift
            if settling and made is not None:
                self._note_size(index, made, shift)
            for i in node.inputs:
                if self.last_use[i] == index:
                    held.pop(i, None)
        return held[len(self.shapes) - 1]

    def _read_inputs(
        self, index: int, held: dict[int, tuple[Tensor | None, Tensor | None]]
    ) -> tuple[list[Any], Tensor | None]:
        """The inputs of a node: summed over the axes it needs sums of, in a type that holds its result, with one power of two."""
        node = self.graph.nodes[index]
        shapes = [self.shapes[i] for i in node.inputs]
        asked = node.operation.input_axes_to_sum(self.wanted[index], shapes)
        states: list[Tensor | None] = []
        for i, axes, shape in zip(node.inputs, asked, shapes, strict=True):
            state = held[i][0]
            if state is not None:
                if self.bits.get(index, math.inf) > EXACT[state.dtype]:
                    state = state.double()
                state = sum_axes(state, axes - self.wanted[i], shape)
            states.append(state)
        shifts = [held[i][1] for i in node.inputs]
        known = [shift for shift in shifts if shift is not None]
        if not known:
            return states, None
        top = known[0]
        for other in known[1:]:
            top = torch.maximum(top, other)
        aligned = [
            state if shift is None else _divide_by_power(state, top - shift, whole=True)
            for state, shift in zip(states, shifts, strict=True)
        ]
        return aligned, top

    def _apply_gate(self, index: int, total: Tensor | None, common: Common, settling: bool) -> Tensor | None:
        """Paths that end in open units: numbers of open units, where all of them share a number of paths."""
        if total is None:
            return None
        if settling:
            uniform = {axis for axis in range(len(self.shapes[index])) if total.shape[axis] == 1}
            self.contracted[index] = self.wanted[index] & uniform
        made = _multiply(common(index), total, math.inf if self.scaled else self.bits[index])
        if settling:
            self.numbers = max(self.numbers, math.prod(made.shape[:-2]))
        return sum_axes(made, self.wanted[index] - self.contracted[index], self.shapes[index])

    def _arrive(self, value: Tensor | None, shift: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The numbers of paths at the output that was asked for."""
        shape = self.shapes[-1]
        value = _add_starts(value, self.reached, shift)
        if value is None:
            return torch.zeros(1, 1, dtype=torch.float64), shift
        size = value.shape[0]
        if self.output is None:
            require(
                size == 1,
                f"the {shape[0]} outputs are reached by different paths; choose one of them: output=0, for example.",
            )
            return value[0], shift
        check_output(self.output, shape[0])
        return value[self.output if size > 1 else 0], shift

    def _note_size(self, index: int, value: Tensor, shift: Tensor | None) -> None:
        largest = float(value.max())
        lift = 0.0 if shift is None else float(shift.max())
        self.bits[index] = math.inf if self.products else (math.log2(largest) + lift if largest > 0 else 0.0)
        self.numbers = max(self.numbers, math.prod(value.shape[:-2]))


def check_output(output: int | None, count: int) -> None:
    """Raise ``InputError`` if the network has no such output."""
    require(output is None or 0 <= output < count, f"output must be between 0 and {count - 1}, got {output}.")


# --- whole numbers under a power of two ----------------------------------------------------------------------


def _merge_equal(state: Tensor) -> Tensor:
    """Length 1 along every axis where all numbers agree."""
    for axis in range(state.ndim - 2):
        first = state.narrow(axis, 0, 1)
        if bool((state == first).all()):
            state = first
    return state


def _multiply(common: Tensor, total: Tensor, bits: float) -> Tensor:
    """Open units times paths, in the smallest type that holds the result; ``common`` is used up."""
    if common.dtype == torch.int32 and bits <= EXACT[torch.int32]:
        kind = torch.int32
    else:
        kind = torch.float32 if bits <= EXACT[torch.float32] else torch.float64
    return common.to(kind).mul_(total.to(kind))


def _add_starts(total: Tensor | None, start: Tensor | None, shift: Tensor | None) -> Tensor | None:
    """Paths that arrive plus paths that begin here."""
    if start is None or total is None:
        return total if start is None else _divide_by_power(start, shift, whole=True)
    added = _divide_by_power(start, shift)
    assert added is not None
    made = total + added.to(total.dtype)
    if shift is not None and bool(((made == 0) & (start > 0)).any()):
        raise _too_far_apart_error()
    return made


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, exact; 0 below what float64 holds."""
    made = ((exponent.clamp(-1022, 1023) + 1023) << 52).view(torch.float64)
    return torch.where(exponent < -1022, 0.0, made)


def _divide_by_power(state: Tensor | None, shift: Tensor | None, *, whole: bool = False) -> Tensor | None:
    """``state / 2^shift``. ``whole``: nothing may vanish or lose digits."""
    if state is None or shift is None:
        return state
    made = state * power_of_two(-shift)
    if whole and bool(((state != 0) & (made < torch.finfo(torch.float64).tiny)).any()):
        raise _too_far_apart_error()
    return made


def _too_far_apart_error() -> InputError:
    return InputError("numbers of paths in one layer lie further apart than float64 reaches, even as logarithms.")


def _lower(value: Tensor | None, shift: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The same numbers, with powers of two such that the largest number of every pair is below 2^TOP."""
    if value is None:
        return None, None
    largest = value.reshape(-1, *value.shape[-2:]).amax(0)
    excess = (torch.frexp(largest)[1].long() - TOP).clamp(min=0)
    before = torch.zeros_like(excess) if shift is None else torch.where(largest > 0, shift, 0)
    lowered = _divide_by_power(value, excess, whole=True) if bool(excess.any()) else value
    return lowered, before + excess


def chain_graph(widths: Sequence[int], *, biased: bool, outputs: int = 1) -> Graph:
    """Gated dense layers, one after the other, and a linear one at the end."""
    nodes = [Node(Source((1,), raw=True), (), (1,), "input")]
    for layer, width in enumerate(widths):
        nodes.append(Node(Mix(0, width, 1, biased), (len(nodes) - 1,), (width,), f"layer {layer + 1}"))
        nodes.append(Node(Gate(), (len(nodes) - 1,), (width,), f"layer {layer + 1}"))
    nodes.append(Node(Mix(0, outputs, 1, biased), (len(nodes) - 1,), (outputs,), "output"))
    return Graph(tuple(nodes))
