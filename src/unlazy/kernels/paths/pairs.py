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
from unlazy.kernels.capture import Inputs, samples, take
from unlazy.kernels.paths.count import Common, Program, power
from unlazy.kernels.paths.operations import Source
from unlazy.kernels.tiles import tiles
from unlazy.runtime import InputError, require

NUMBERS = {"cpu": 2**18}  # in the widest state of one block of pairs: what stays in the cache
NUMBERS_ELSEWHERE = 2**26  # what keeps a device busy
WIDTH = 16  # pairs side by side, even where the states of fewer would fit the cache
RECORDED = 2**28  # bytes of activations that one recording pass may hold
MORE_THAN_HELD = "there are more paths than the result can hold; ask for logarithms: log=True."


@dataclass(frozen=True)
class Values:
    """Numbers ``[*p, n, k]`` in the place of bits: their products are summed."""

    held: Tensor

    @staticmethod
    def join(parts: Sequence[Values]) -> Values:
        return Values(torch.cat([part.held for part in parts], dim=-2))

    def part(self, rows: slice) -> Values:
        return Values(self.held[..., rows, :])

    def common(self, other: Values) -> Tensor:
        return self.held @ other.held.mT


Features = dict[int, Any]  # node -> Bits or Values of all samples


class OverlapKernel:
    """Common active paths as a kernel for the Gram engine: features are open gates, a block is one run of the program.

    ``opens(x)`` gives, for every gate of the graph, what is open ``[n, *shape]`` (and for every input its numbers, where the
    program asks for products).
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
        """What the gates, or numbers, of one node take per sample."""
        axes, shape = self.program.contracted[index], self.program.shapes[index]
        apart = math.prod(size for axis, size in enumerate(shape) if axis not in axes)
        places = math.prod(shape[axis] for axis in axes)
        if isinstance(self.program.graph.nodes[index].operation, Source):
            return 8 * apart * places
        return Bits.row_bytes(apart, places, len(axes) < len(shape), self.device.type)

    def features(self, x: Inputs) -> Features:
        parts: dict[int, list[Any]] = {index: [] for index in self.program.contracted}
        for start in range(0, samples(x), self.chunk):
            for index, held in self._held(take(x, slice(start, start + self.chunk))).items():
                parts[index].append(held)
        return {index: _joined(parts.pop(index)) for index in list(parts)}

    def _held(self, x: Inputs) -> Features:
        found = self.opens(x)
        return {index: self._laid_out(index, found[index]) for index in self.program.contracted}

    def _laid_out(self, index: int, found: Tensor) -> Bits | Values:
        """``[n, *shape]`` as rows of the units that are counted together, once for each of the others."""
        axes = self.program.contracted[index]
        apart = [1 + axis for axis in range(found.ndim - 1) if axis not in axes]
        ordered = found.permute(*apart, 0, *(1 + axis for axis in sorted(axes)))
        rows = ordered.flatten(len(apart) + 1) if axes else ordered.unsqueeze(-1)
        return Bits.hold(rows) if rows.dtype == torch.bool else Values(rows.double())

    def block(self, out: Tensor, a: Features, b: Features, *, same: bool) -> None:
        """Fill ``out [n, m]`` with small blocks of pairs; of a symmetric one the upper half, mirrored."""
        pairs = self.numbers // self.program.numbers
        width = max(WIDTH, math.isqrt(pairs))
        height = max(1, pairs // width)
        for rows, columns in tiles(out.shape[0], out.shape[1], height, width, symmetric=same):
            tile = out[rows, columns]
            tile.copy_(self._numbers(partial(self._pairs, _part(a, rows), _part(b, columns))))
            beyond = slice(max(columns.start, rows.stop), columns.stop)
            if same and beyond.start < beyond.stop:
                out[beyond, rows] = out[rows, beyond].T

    def diagonal(self, x: Inputs) -> Float[Tensor, " n"]:
        """Paths of single inputs: pairs with an input on which everything is open."""
        counts = []
        size = max(1, min(self.chunk, self.numbers // self.program.numbers))
        for start in range(0, samples(x), size):
            part = take(x, slice(start, start + size))
            found = self._numbers(partial(self._singles, self._held(part)))
            counts.append(found[:, 0].to(self.dtype).expand(samples(part)))
        return torch.cat(counts)

    def _pairs(self, a: Features, b: Features, index: int) -> Tensor:
        return self._shaped(index, a[index].common(b[index]))

    def _singles(self, a: Features, index: int) -> Tensor:
        return self._shaped(index, a[index].counts())

    def _shaped(self, index: int, counts: Tensor) -> Tensor:
        """Counts ``[*apart, a, b]`` under the axes of their gate."""
        axes = self.program.contracted[index]
        sizes = [1 if axis in axes else size for axis, size in enumerate(self.program.shapes[index])]
        return counts.reshape(*sizes, *counts.shape[-2:])

    def _numbers(self, common: Common) -> Tensor:
        """Numbers of paths ``[a, b]`` in any type, or their natural logarithms."""
        value, shift = self.program.paths(common)
        if self.log:
            logs = value.double().log()
            return logs if shift is None else logs + shift.double() * math.log(2)
        value = value if shift is None else value * power(shift)
        if self.may_overflow and not bool(value.to(self.dtype).isfinite().all()):
            raise InputError(MORE_THAN_HELD)
        return value


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else type(parts[0]).join(parts)


def _part(features: Features, rows: slice) -> Features:
    return {index: bits.part(rows) for index, bits in features.items()}
