"""Cutting a matrix of pairs into tiles; for a symmetric matrix only tiles on and above the diagonal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

Tile = tuple[slice, slice]  # rows, columns


@dataclass(frozen=True)
class Band:
    """Equal tiles in a row along the diagonal, for one batched product: tile i is the first one moved by i steps."""

    rows: slice
    columns: slice
    count: int = 1
    step: int = 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tiles, their height, their width."""
        return self.count, self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def is_on_diagonal(self) -> bool:
        """Whether rows and columns are the same samples."""
        return self.rows == self.columns

    def tiles(self) -> Iterator[Tile]:
        """Rows and columns of every tile of the band."""
        for move in range(0, self.count * self.step, self.step):
            yield (
                slice(self.rows.start + move, self.rows.stop + move),
                slice(self.columns.start + move, self.columns.stop + move),
            )

    def rows_of(self, samples: Tensor) -> Tensor:
        """The samples ``[n, d]`` of the rows of every tile: ``[tiles, height, d]``, a view."""
        down, right = samples.stride()
        start, (count, height, _) = samples.storage_offset() + down * self.rows.start, self.shape
        return samples.as_strided((count, height, samples.shape[1]), (self.step * down, down, right), start)

    def columns_of(self, samples: Tensor) -> Tensor:
        """The samples of the columns of every tile, transposed: ``[tiles, d, width]``, a view."""
        return self.mirror().rows_of(samples).mT

    def pairs_of(self, out: Tensor) -> Tensor:
        """The tiles of a matrix of pairs ``[..., n, m]``: ``[..., tiles, height, width]``, a view."""
        first = out[..., self.rows, self.columns]
        *batch, down, right = first.stride()
        shape = (*first.shape[:-2], *self.shape)
        return first.as_strided(shape, (*batch, self.step * (down + right), down, right), first.storage_offset())

    def mirror(self) -> Band:
        """The tiles on the other side of the diagonal."""
        return Band(self.columns, self.rows, self.count, self.step)


def cut_bands(n: int, m: int, side: int, *, symmetric: bool, least: int) -> list[Band]:
    """A matrix of pairs cut into bands of equal tiles; the tiles of a band together are no larger than ``side`` squared.

    A symmetric matrix is halved again and again, until squares of side ``least`` are left on the diagonal.
    """
    if not symmetric:
        return [Band(*tile) for tile in _cut_rectangle(slice(0, n), slice(0, m), side, side)]
    found = [*_bands_along_diagonal(slice(0, least), slice(0, least), n // least, least, side)]
    if n % least:
        found.append(Band(slice(n - n % least, n), slice(n - n % least, n)))
    width = least
    while width < n:
        rows, columns, step = slice(0, width), slice(width, 2 * width), 2 * width
        found += _bands_along_diagonal(rows, columns, n // step, step, side)
        start = n // step * step
        if n > start + width:
            found += [
                Band(*tile) for tile in _cut_rectangle(slice(start, start + width), slice(start + width, n), side, side)
            ]
        width = step
    return found


def _bands_along_diagonal(rows: slice, columns: slice, count: int, step: int, side: int) -> Iterator[Band]:
    """``count`` tiles along the diagonal in bands of a bounded size; tiles larger than that are cut."""
    height, width = rows.stop - rows.start, columns.stop - columns.start
    together = max(1, side * side // (height * width))
    for first in range(0, count, together):
        moved, beside = (slice(part.start + first * step, part.stop + first * step) for part in (rows, columns))
        if max(height, width) > side:
            yield from (Band(*tile) for tile in _cut_rectangle(moved, beside, side, side))
        else:
            yield Band(moved, beside, min(together, count - first), step)


def cut_tiles(n: int, m: int, height: int, width: int, *, symmetric: bool, least: int | None = None) -> Iterator[Tile]:
    """Rows and columns of every tile. ``least``: the side of the squares on the diagonal, where pairs are computed twice."""
    if symmetric:
        yield from _upper_tiles(0, n, height, width, max(128, height // 4) if least is None else least)
    else:
        yield from _cut_rectangle(slice(0, n), slice(0, m), height, width)


def _upper_tiles(start: int, stop: int, height: int, width: int, least: int) -> Iterator[Tile]:
    """Tiles above the diagonal: the square is halved until blocks have a side of at most ``least``."""
    if stop - start <= least:
        for top in range(start, stop, height):
            yield from _cut_rectangle(slice(top, min(top + height, stop)), slice(top, stop), height, width)
        return
    middle = start + -(-(stop - start) // (2 * least)) * least
    yield from _upper_tiles(start, middle, height, width, least)
    yield from _cut_rectangle(slice(start, middle), slice(middle, stop), height, width)
    yield from _upper_tiles(middle, stop, height, width, least)


def _cut_rectangle(rows: slice, columns: slice, height: int, width: int) -> Iterator[Tile]:
    for top in range(rows.start, rows.stop, height):
        for left in range(columns.start, columns.stop, width):
            yield slice(top, min(top + height, rows.stop)), slice(left, min(left + width, columns.stop))
