"""A kernel on disk as an operator: products, eigenpairs, ridge regression and alignment from its tiles, within a memory cap."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.kernels.gram import Place, TooLittleMemory, all_places, parse_memory, size_text
from unlazy.kernels.krylov import Samples
from unlazy.kernels.linear_operator import KernelOperator

HELD_TILES = 4  # at once while a tile is read and multiplied: as read, in float64, in the order of rows, and a copy


class GramOperator(KernelOperator):
    """Made by ``GramFile.operator``. Every product reads the tiles once; as many as fit into the memory are kept.

    ``read(place)`` gives the checked block of a tile, ``[rows, columns]`` or ``[k, k, rows, columns]``. A kernel with a matrix
    for every pair has a row for every output of every sample, sample by sample.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        tile: int,
        read: Callable[[Place], np.ndarray],
        *,
        dtype: torch.dtype,
        symmetric: bool,
        memory: str | int | None,
    ) -> None:
        self.outputs = shape[0] if len(shape) == 4 else 1
        self.shape = (shape[-2] * self.outputs, shape[-1] * self.outputs)
        self.dtype, self.device, self.symmetric = dtype, torch.device("cpu"), symmetric
        self.budget, self._read, self._tile = parse_memory(memory), read, tile
        self._places = all_places(shape[-2], shape[-1], tile, symmetric=symmetric)
        self._kept: dict[Place, Tensor] = {}
        self._trace: float | None = None
        tile_bytes = 8 * (min(tile, max(shape[-2:])) * self.outputs) ** 2
        if HELD_TILES * tile_bytes > self.budget:
            raise TooLittleMemory(
                f"{size_text(self.budget)} is too small: a tile takes {size_text(tile_bytes)} in float64, and {HELD_TILES} times "
                "that is needed. Give more memory, or write the file with a smaller tile."
            )
        self._room = (self.budget // 2) // tile_bytes - HELD_TILES // 2  # the other half is for vectors

    def _blocks(self) -> Iterator[tuple[Place, slice, slice, Float[Tensor, "r c"]]]:
        """Every tile as a matrix in float64, with its rows and columns."""
        side = self._tile * self.outputs
        for place in self._places:
            rows, columns = (slice(at * side, (at + 1) * side) for at in place)
            yield place, rows, columns, self._block(place)

    def _block(self, place: Place) -> Float[Tensor, "r c"]:
        if place in self._kept:
            return self._kept[place]
        block = torch.from_numpy(self._read(place))
        if block.ndim == 4:
            block = block.permute(2, 0, 3, 1).flatten(2).flatten(0, 1)
        block = block.double()
        if len(self._kept) < self._room:
            self._kept[place] = block
        return block

    def multiply(self, columns: Float[Tensor, "m c"]) -> Float[Tensor, "n c"]:
        """K times columns, in float64; of a symmetric kernel tiles above the diagonal are read once and used twice."""
        result = columns.new_zeros(self.shape[0], columns.shape[1])
        for place, down, across, block in self._blocks():
            result[down] += block @ columns[across]
            if self.symmetric and place[0] != place[1]:
                result[across] += block.mT @ columns[down]
        return result

    def diagonal_sum(self) -> float:
        """The trace of K, from the tiles on its diagonal."""
        self._check_symmetric()
        if self._trace is None:
            self._trace = sum(float(self._block(place).trace()) for place in self._places if place[0] == place[1])
        return self._trace

    def _moments(self, rank: int, probes: int, seed: int) -> tuple[Samples, None]:
        """Traces of K and K^2, exact: one pass over the tiles takes less than one probe."""
        self._check_symmetric()
        squares = sum(
            float(block.square().sum()) * (1 if place[0] == place[1] else 2) for place, _, _, block in self._blocks()
        )
        known = torch.tensor([self.diagonal_sum(), squares], dtype=torch.float64)
        return Samples(known, known.new_zeros(2, 0)), None
