"""The overlap kernel as a kernel for the Gram engine: gates of all samples, held small, and blocks of pairs of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.kernels.binary import Bits
from unlazy.kernels.capture import Inputs, sample_count, take_samples
from unlazy.kernels.paths.count import Common, Program, power_of_two
from unlazy.kernels.paths.operations import Source
from unlazy.kernels.tiling import cut_tiles
from unlazy.runtime import InputError, require

NUMBERS = {"cpu": 2**18}  # in the widest state of one block of pairs: what stays in the cache
NUMBERS_ELSEWHERE = 2**26  # what keeps a device busy
WIDTH = 16  # pairs side by side, even where the states of fewer would fit the cache
RECORDED = 2**28  # bytes of activations that one recording pass may hold
MORE_THAN_HELD = "there are more paths than the result can hold; ask for logarithms: log=True."


@dataclass(frozen=True)
class Values:
    """Numbers ``[*p, n, k]``, used like :class:`~unlazy.kernels.binary.Bits`: sums of products in place of common places."""

    held: Tensor

    @staticmethod
    def join(parts: Sequence[Values]) -> Values:
        """The rows of all parts, one after the other."""
        return Values(torch.cat([part.held for part in parts], dim=-2))

    def take_rows(self, rows: slice) -> Values:
        """Some of the rows."""
        return Values(self.held[..., rows, :])

    def count_common(self, other: Values) -> Tensor:
        """Sums of products of two rows, for every pair of rows."""
        return self.held @ other.held.mT


Features = dict[int, Any]  # node -> Bits or Values of all samples


class OverlapKernel:
    """Common active paths as a kernel for the Gram engine: features are open gates, a block is one run of the program.

    ``opens(x)`` gives, for every gate of the graph, which units are open ``[n, *shape]`` (and every input's numbers, if the
    program computes products).
    """

    tail: tuple[int, ...] = ()

    def __init__(
        self,
        program: Program,
        opens: Callable[[Inputs], dict[int, Tensor]],
        *,
        log: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        require(dtype in (torch.float32, torch.float64), f"dtype must be float32 or float64, got {dtype}.")
        self.program, self.opens, self.log = program, opens, log
        self.dtype, self.device = dtype, device
        self.numbers = NUMBERS.get(device.type, NUMBERS_ELSEWHERE)
        activations = 8 * sum(math.prod(shape) for shape in program.shapes)
        self.chunk = max(1, min(1024, RECORDED // max(1, activations)))
        self.feature_bytes = sum(self._bytes(index) for index in program.contracted)
        states = max(self.numbers, WIDTH * program.numbers)
        self.work_bytes = self.chunk * activations + 8 * 6 * states
        self.best_tile = 2048
        bits, gates = max(program.bits.values(), default=0.0), len(program.graph.gates())
        self.may_overflow = bits >= math.log2(torch.finfo(dtype).max)
        held = "with powers of two" if program.scaled else f"below 2^{bits:.0f}"
        self.methods: tuple[str, ...] = (f"paths: {gates} gates, {program.numbers} numbers a pair, {held}",)

    def _bytes(self, index: int) -> int:
        """Bytes a sample of the gates, or numbers, of one node."""
        axes, shape = self.program.contracted[index], self.program.shapes[index]
        apart = math.prod(size for axis, size in enumerate(shape) if axis not in axes)
        places = math.prod(shape[axis] for axis in axes)
        if isinstance(self.program.graph.nodes[index].operation, Source):
            return 8 * apart * places
        return Bits.row_bytes(apart, places, len(axes) < len(shape), self.device.type)

    def features(self, x: Inputs) -> Features:
        """Open units of every gate, packed."""
        parts: dict[int, list[Any]] = {index: [] for index in self.program.contracted}
        for start in range(0, sample_count(x), self.chunk):
            for index, held in self._gate_bits(take_samples(x, slice(start, start + self.chunk))).items():
                parts[index].append(held)
        return {index: _join_parts(parts.pop(index)) for index in list(parts)}

    def _gate_bits(self, x: Inputs) -> Features:
        found = self.opens(x)
        return {index: self._as_rows(index, found[index]) for index in self.program.contracted}

    def _as_rows(self, index: int, found: Tensor) -> Bits | Values:
        """``[n, *shape]`` as rows of the units that are counted together, once for each of the others."""
        axes = self.program.contracted[index]
        apart = [1 + axis for axis in range(found.ndim - 1) if axis not in axes]
        ordered = found.permute(*apart, 0, *(1 + axis for axis in sorted(axes)))
        rows = ordered.flatten(len(apart) + 1) if axes else ordered.unsqueeze(-1)
        return Bits.from_rows(rows) if rows.dtype == torch.bool else Values(rows.double())

    def block(self, out: Tensor, a: Features, b: Features, *, same: bool) -> None:
        """Fill ``out [n, m]`` with small blocks of pairs; of a symmetric one the upper half, mirrored."""
        pairs = self.numbers // self.program.numbers
        width = max(WIDTH, math.isqrt(pairs))
        height = max(1, pairs // width)
        for rows, columns in cut_tiles(out.shape[0], out.shape[1], height, width, symmetric=same):
            tile = out[rows, columns]
            tile.copy_(self._path_numbers(partial(self._common_units, _take_rows(a, rows), _take_rows(b, columns))))
            beyond = slice(max(columns.start, rows.stop), columns.stop)
            if same and beyond.start < beyond.stop:
                out[beyond, rows] = out[rows, beyond].T

    def diagonal(self, x: Inputs) -> Float[Tensor, " n"]:
        """Paths of single inputs: pairs with an input on which everything is open."""
        counts = []
        size = max(1, min(self.chunk, self.numbers // self.program.numbers))
        for start in range(0, sample_count(x), size):
            part = take_samples(x, slice(start, start + size))
            found = self._path_numbers(partial(self._open_counts, self._gate_bits(part)))
            counts.append(found[:, 0].to(self.dtype).expand(sample_count(part)))
        return torch.cat(counts)

    def _common_units(self, a: Features, b: Features, index: int) -> Tensor:
        return self._with_gate_axes(index, a[index].count_common(b[index]))

    def _open_counts(self, a: Features, index: int) -> Tensor:
        return self._with_gate_axes(index, a[index].count_open())

    def _with_gate_axes(self, index: int, counts: Tensor) -> Tensor:
        """Counts ``[*apart, a, b]`` under the axes of their gate."""
        axes = self.program.contracted[index]
        sizes = [1 if axis in axes else size for axis, size in enumerate(self.program.shapes[index])]
        return counts.reshape(*sizes, *counts.shape[-2:])

    def _path_numbers(self, common: Common) -> Tensor:
        """Numbers of paths ``[a, b]`` in any type, or their natural logarithms."""
        value, shift = self.program.paths(common)
        if self.log:
            logs = value.double().log()
            return logs if shift is None else logs + shift.double() * math.log(2)
        value = value if shift is None else value * power_of_two(shift)
        if self.may_overflow and not bool(value.to(self.dtype).isfinite().all()):
            raise InputError(MORE_THAN_HELD)
        return value


def _join_parts(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else type(parts[0]).join(parts)


def _take_rows(features: Features, rows: slice) -> Features:
    return {index: bits.take_rows(rows) for index, bits in features.items()}
