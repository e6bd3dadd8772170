"""Cutting a matrix of pairs into tiles; of a symmetric one only those that hold the diagonal and what is above it."""

from __future__ import annotations

from collections.abc import Iterator

Tile = tuple[slice, slice]  # rows, columns


def tiles(n: int, m: int, height: int, width: int, *, symmetric: bool, least: int | None = None) -> Iterator[Tile]:
    """Rows and columns of every tile. ``least``: the side of the squares on the diagonal, where pairs are computed twice."""
    if symmetric:
        yield from _upper_tiles(0, n, height, width, max(128, height // 4) if least is None else least)
    else:
        yield from _cut(slice(0, n), slice(0, m), height, width)


def _upper_tiles(start: int, stop: int, height: int, width: int, least: int) -> Iterator[Tile]:
    """Halved along the diagonal until blocks are small."""
    if stop - start <= least:
        for top in range(start, stop, height):
            yield from _cut(slice(top, min(top + height, stop)), slice(top, stop), height, width)
        return
    middle = start + -(-(stop - start) // (2 * least)) * least
    yield from _upper_tiles(start, middle, height, width, least)
    yield from _cut(slice(start, middle), slice(middle, stop), height, width)
    yield from _upper_tiles(middle, stop, height, width, least)


def _cut(rows: slice, columns: slice, height: int, width: int) -> Iterator[Tile]:
    for top in range(rows.start, rows.stop, height):
        for left in range(columns.start, columns.stop, width):
            yield slice(top, min(top + height, rows.stop)), slice(left, min(left + width, columns.stop))
