"""How numbers of paths pass through the layers of a network: a forward pass with every weight replaced by one.

A *state* holds, for the units of one layer and a block of pairs of inputs, how many common active paths end there:
``[*axes, a, b]``, axes as in one sample. Where the number is the same all along an axis, or where only the sum along it will be
needed, that axis has length 1; see :func:`sum_axes`. So a plain convolutional net needs one number per position and
no channels, and a dense layer a single number.

Every operation has three methods: ``shape`` of its output; ``input_axes_to_sum``, the axes of its inputs of which it needs only
sums, given those of its output; and ``carry``, which gives the numbers of paths at its output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]
Axes = frozenset[int]
NONE: Axes = frozenset()


def sum_axes(state: Tensor, axes: Axes, shape: Shape) -> Tensor:
    """The sum over ``axes`` of a state of ``shape``, kept with length 1: a shared number counts for each unit."""
    for axis in sorted(axes):
        if state.shape[axis] != 1:
            state = state.sum(axis, keepdim=True, dtype=state.dtype)
        elif shape[axis] != 1:
            state = state * shape[axis]
    return state


def expand_axes(state: Tensor, axes: Axes, shape: Shape) -> Tensor:
    """The same state with one number per unit along ``axes`` (a view)."""
    sizes = [shape[axis] if axis in axes else -1 for axis in range(len(shape))]
    return state.expand(*sizes, -1, -1)


@dataclass(frozen=True)
class Operation:
    """Base of all: states pass unchanged, as they do through dropout or a scaling of each unit."""

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of the output for one sample, from the shapes of the inputs."""
        return shapes[0]

    def input_axes_to_sum(self, wanted: Axes, shapes: Sequence[Shape]) -> list[Axes]:
        """For each input, the axes of which only sums are needed if only sums over ``wanted`` are needed of the output."""
        return [wanted] * len(shapes)

    def carry(self, states: Sequence[Tensor | None], wanted: Axes, shapes: Sequence[Shape]) -> Tensor | None:
        """Numbers of paths at the output, summed over ``wanted``.

        ``states``: those at the inputs, summed over ``input_axes_to_sum``; ``None`` where there are no paths.
        """
        return states[0]


@dataclass(frozen=True)
class Source(Operation):
    """The input (``raw``), where paths begin; or numbers that do not depend on the input."""

    size: Shape
    raw: bool

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return self.size


@dataclass(frozen=True)
class Opaque(Operation):
    """An operation without a rule. If the output depends on it, an error is raised with ``why`` and ``remedy``."""

    size: Shape
    why: str
    remedy: str

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return self.size


@dataclass(frozen=True)
class Gate(Operation):
    """Units that are open or closed. Which are open depends on the input, so the caller multiplies by their number."""

    def input_axes_to_sum(self, wanted: Axes, shapes: Sequence[Shape]) -> list[Axes]:
        return [NONE]


@dataclass(frozen=True)
class Scale(Operation):
    """One weight per unit (batch-norm, a constant factor), perhaps with a constant added."""

    biased: bool


@dataclass(frozen=True)
class Mix(Operation):
    """Weights from every unit along an axis (of the same group) to each of ``out`` new ones: all get the same number."""

    axis: int
    out: int
    groups: int
    biased: bool

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (*shapes[0][: self.axis], self.out, *shapes[0][self.axis + 1 :])

    def input_axes_to_sum(self, wanted: Axes, shapes: Sequence[Shape]) -> list[Axes]:
        return [(wanted | {self.axis}) if self.groups == 1 else (wanted - {self.axis})]

    def carry(self, states: Sequence[Tensor | None], wanted: Axes, shapes: Sequence[Shape]) -> Tensor | None:
        state = states[0]
        if state is None:
            return None
        if self.groups > 1:
            each = shapes[0][self.axis] // self.groups
            if state.shape[self.axis] == 1:
                state = state * each
            else:
                state = state.unflatten(self.axis, (self.groups, each)).sum(self.axis + 1, dtype=state.dtype)
                state = state.repeat_interleave(self.out // self.groups, self.axis)
        return sum_axes(state, wanted & {self.axis}, self.shape(shapes))


@dataclass(frozen=True)
class EdgeRange:
    """Edges from units ``source, source + source_step, ...`` to units ``target, target + target_step, ...`` of an axis."""

    target: int
    target_step: int
    source: int
    source_step: int
    count: int

    def slices(self) -> tuple[slice, slice]:
        """Target units and source units, as slices of the axis."""
        return (
            slice(self.target, self.target + (self.count - 1) * self.target_step + 1, self.target_step),
            slice(self.source, self.source + (self.count - 1) * self.source_step + 1, self.source_step),
        )


@dataclass(frozen=True)
class AxisMap:
    """How the units of one axis reach those of the new axis of length ``size``; one entry of ``taps`` per filter tap."""

    axis: int
    size: int
    taps: tuple[tuple[EdgeRange, ...], ...]


def axis_map(axis: int, size: int, taps: Sequence[Sequence[tuple[int, int]]]) -> AxisMap:
    """An :class:`AxisMap` from (target, source) pairs for each tap; pairs at equal distances become one range."""
    return AxisMap(axis, size, tuple(tuple(_edge_ranges(list(tap))) for tap in taps))


def _edge_ranges(pairs: list[tuple[int, int]]) -> list[EdgeRange]:
    runs: list[EdgeRange] = []
    while pairs:
        count, steps = 1, (1, 1)
        if len(pairs) > 1:
            steps = (pairs[1][0] - pairs[0][0], pairs[1][1] - pairs[0][1])
            if min(steps) > 0:
                while count < len(pairs) and pairs[count] == (
                    pairs[0][0] + count * steps[0],
                    pairs[0][1] + count * steps[1],
                ):
                    count += 1
        runs.append(EdgeRange(pairs[0][0], max(1, steps[0]), pairs[0][1], max(1, steps[1]), count))
        pairs = pairs[count:]
    return runs


def _sum_taps(state: Tensor, way: AxisMap, taps: Sequence[Sequence[EdgeRange]]) -> Tensor:
    """Numbers of paths along one axis of windows: the sum over taps."""
    sizes = list(state.shape)
    sizes[way.axis] = way.size
    before = (slice(None),) * way.axis
    runs = sorted(itertools.chain.from_iterable(taps), key=lambda run: -run.count)
    if runs and runs[0].count == way.size:
        made = state[(*before, runs.pop(0).slices()[1])].clone(memory_format=torch.contiguous_format)
    else:
        made = state.new_zeros(sizes)
    for run in runs:
        target, source = run.slices()
        made[(*before, target)] += state[(*before, source)]
    return made


@dataclass(frozen=True)
class Window(Operation):
    """Windows along some axes: the positions of a convolution, average pooling (``pooled``), slices, padding.

    Windows of several axes are windows along one after the other.
    """

    maps: tuple[AxisMap, ...]
    pooled: bool

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        sizes = list(shapes[0])
        for way in self.maps:
            sizes[way.axis] = way.size
        return tuple(sizes)

    def input_axes_to_sum(self, wanted: Axes, shapes: Sequence[Shape]) -> list[Axes]:
        return [wanted - {way.axis for way in self.maps}]

    def carry(self, states: Sequence[Tensor | None], wanted: Axes, shapes: Sequence[Shape]) -> Tensor | None:
        state = states[0]
        if state is None:
            return None
        for way in self.maps:
            state = _sum_taps(expand_axes(state, frozenset({way.axis}), shapes[0]), way, way.taps)
        return sum_axes(state, wanted & {way.axis for way in self.maps}, self.shape(shapes))


@dataclass(frozen=True)
class Unfold(Operation):
    """Every tap of a window on a new first axis, so that a gate can choose among them (max-pooling)."""

    maps: tuple[AxisMap, ...]

    def taps(self) -> list[tuple[tuple[EdgeRange, ...], ...]]:
        """All combinations of one tap for each axis."""
        return list(itertools.product(*(way.taps for way in self.maps)))

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (len(self.taps()), *Window(self.maps, pooled=False).shape(shapes))

    def input_axes_to_sum(self, wanted: Axes, shapes: Sequence[Shape]) -> list[Axes]:
        return [NONE]

    def carry(self, states: Sequence[Tensor | None], wanted: Axes, shapes: Sequence[Shape]) -> Tensor | None:
        if states[0] is None:
            return None
        whole = expand_axes(states[0], frozenset(way.axis for way in self.maps), shapes[0])
        pieces = []
        for taps in self.taps():
            state = whole
            for way, runs in zip(self.maps, taps, strict=True):
                state = _sum_taps(state, way, [runs])
            pieces.append(state)
        return sum_axes(torch.stack(pieces), wanted, self.shape(shapes))


@dataclass(frozen=True)
class Total(Operation):
    """A sum or mean over whole axes."""

    axes: Axes
    keep: bool

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        sizes = enumerate(shapes[0])
        return tuple(1 if axis in self.axes else size for axis, size in sizes if self.keep or axis not in self.axes)

    def input_axes_to_sum(self, wanted: Axes, shapes: Sequence[Shape]) -> list[Axes]:
        left = [axis for axis in range(len(shapes[0])) if self.keep or axis not in self.axes]
        return [self.axes | {left[axis] for axis in wanted}]

    def carry(self, states: Sequence[Tensor | None], wanted: Axes, shapes: Sequence[Shape]) -> Tensor | None:
        state = states[0]
        return state if state is None or self.keep else state.squeeze(tuple(self.axes))


@dataclass(frozen=True)
class Add(Operation):
    """Two branches meet, unit by unit; an identity skip is an edge. Shapes may broadcast."""

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*shapes, strict=True))

    def input_axes_to_sum(self, wanted: Axes, shapes: Sequence[Shape]) -> list[Axes]:
        out = self.shape(shapes)
        return [frozenset(axis for axis in wanted if shape[axis] == out[axis]) for shape in shapes]

    def carry(self, states: Sequence[Tensor | None], wanted: Axes, shapes: Sequence[Shape]) -> Tensor | None:
        out, asked = self.shape(shapes), self.input_axes_to_sum(wanted, shapes)
        total: Tensor | None = None
        for state, already in zip(states, asked, strict=True):
            if state is not None:
                state = sum_axes(state, wanted - already, out)
                total = state if total is None else total + state
        return total


@dataclass(frozen=True)
class Join(Operation):
    """Branches side by side along an axis."""

    axis: int

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        total = sum(shape[self.axis] for shape in shapes)
        return (*shapes[0][: self.axis], total, *shapes[0][self.axis + 1 :])

    def carry(self, states: Sequence[Tensor | None], wanted: Axes, shapes: Sequence[Shape]) -> Tensor | None:
        some = [state for state in states if state is not None]
        if not some:
            return None
        if self.axis in wanted:
            return sum(some[1:], some[0])
        common = torch.broadcast_shapes(
            *(tuple(1 if axis == self.axis else s for axis, s in enumerate(state.shape)) for state in some)
        )
        pieces = []
        for state, shape in zip(states, shapes, strict=True):
            sizes = (*common[: self.axis], shape[self.axis], *common[self.axis + 1 :])
            pieces.append(some[0].new_zeros(1).expand(sizes) if state is None else state.expand(sizes))
        kind = max((piece.dtype for piece in pieces), key=lambda dtype: dtype.itemsize)
        return torch.cat([piece.to(kind) for piece in pieces], self.axis)


@dataclass(frozen=True)
class Permute(Operation):
    """Axes in another order."""

    order: tuple[int, ...]

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return tuple(shapes[0][axis] for axis in self.order)

    def input_axes_to_sum(self, wanted: Axes, shapes: Sequence[Shape]) -> list[Axes]:
        return [frozenset(self.order[axis] for axis in wanted)]

    def carry(self, states: Sequence[Tensor | None], wanted: Axes, shapes: Sequence[Shape]) -> Tensor | None:
        state, pairs = states[0], len(self.order)
        return None if state is None else state.permute(*self.order, pairs, pairs + 1)


@dataclass(frozen=True)
class Reshape(Operation):
    """The same units in the same order under other axes (flatten, view)."""

    target: Shape

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return self.target

    def input_axes_to_sum(self, wanted: Axes, shapes: Sequence[Shape]) -> list[Axes]:
        asked: set[int] = set()
        for old, new in regroup_axes(shapes[0], self.target):
            if set(new) <= wanted:
                asked |= set(old)
        return [frozenset(asked)]

    def carry(self, states: Sequence[Tensor | None], wanted: Axes, shapes: Sequence[Shape]) -> Tensor | None:
        state = states[0]
        if state is None:
            return None
        (already,) = self.input_axes_to_sum(wanted, shapes)
        detailed, sizes, left = set[int](), [1] * len(self.target), set(wanted)
        for old, new in regroup_axes(shapes[0], self.target):
            if already >= set(old) and set(new) <= wanted:
                left -= set(new)
            elif any(state.shape[axis] != 1 for axis in old):
                detailed |= set(old)
                for axis in new:
                    sizes[axis] = self.target[axis]
        state = expand_axes(state, frozenset(detailed), shapes[0]).reshape(*sizes, *state.shape[-2:])
        return sum_axes(state, frozenset(left), self.target)


def regroup_axes(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Smallest groups of axes that hold the same units before and after."""
    if 0 in old or 0 in new:
        return [(list(range(len(old))), list(range(len(new))))]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [i][: len(old) - i], [j][: len(new) - j]
        i, j = i + len(left), j + len(right)
        while math.prod(old[k] for k in left) != math.prod(new[k] for k in right):
            if math.prod(old[k] for k in left) < math.prod(new[k] for k in right):
                left.append(i)
                i += 1
            else:
                right.append(j)
                j += 1
        groups.append((left, right))
    return groups
