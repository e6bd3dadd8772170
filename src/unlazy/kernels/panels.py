"""Which features are at hand while the tiles of a Gram matrix are paired.

Samples are cut into parts of one tile's side. Features of all parts are kept if there is room; else those of a *panel* of rows
are, while the columns pass by one at a time: a column is then made once for all rows of the panel, not once for each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from unlazy.kernels.capture import Inputs, samples, take
from unlazy.runtime import require

Place = tuple[int, int]  # of a tile, counted in tiles
Key = tuple[bool, int]  # of a part: whether it belongs to the rows, and its number


class Panels:
    """Features of parts of ``x``, and of ``x2`` for a cross kernel; never of more than ``room`` parts at a time."""

    def __init__(self, features: Callable[[Inputs], Any], x: Inputs, x2: Inputs | None, tile: int, room: int) -> None:
        require(room >= 2, f"a tile pairs two parts, so room for two is the least; got {room}.")
        self.features, self.x, self.x2, self.tile = features, x, x2, tile
        parts = sum(count(samples(data), tile) for data in (x, x2) if data is not None)
        self.all_fit = room >= parts
        self.panel = parts if self.all_fit else room - 1  # rows; the last place is the column's
        self.kept: OrderedDict[Key, Any] = OrderedDict()
        self.passing: tuple[Key, Any] | None = None

    def in_order(self, places: Sequence[Place]) -> list[Place]:
        """Panel by panel, and in a panel column by column."""
        return sorted(places, key=lambda place: (place[0] // self.panel, place[1], place[0]))

    def pair(self, place: Place) -> tuple[Any, Any, bool]:
        """Features of a tile's rows and columns, and whether they are the same ones. Let go of them before the next pair."""
        symmetric = self.x2 is None
        left = self._row(place[0])
        same = symmetric and place[0] == place[1]
        return left, left if same else self._column((symmetric, place[1])), same

    def shape(self, place: Place) -> tuple[int, int]:
        """Height and width of a tile."""
        columns = self.x if self.x2 is None else self.x2
        height, width = (
            min(self.tile, samples(data) - at * self.tile) for data, at in zip((self.x, columns), place, strict=True)
        )
        return height, width

    def _row(self, number: int) -> Any:
        key = True, number
        if key not in self.kept:
            while len(self.kept) >= self.panel:
                self.kept.popitem(last=False)
            self.kept[key] = self._made(key)
        self.kept.move_to_end(key)
        return self.kept[key]

    def _column(self, key: Key) -> Any:
        if key in self.kept:
            return self.kept[key]
        if self.all_fit:
            self.kept[key] = self._made(key)
            return self.kept[key]
        if self.passing is None or self.passing[0] != key:
            self.passing = None  # before its place is taken
            self.passing = key, self._made(key)
        return self.passing[1]

    def _made(self, key: Key) -> Any:
        if self.passing is not None and self.passing[0] == key:
            return self.passing[1]
        of_rows, number = key
        data = self.x if of_rows else self.x2
        return self.features(take(data, slice(number * self.tile, (number + 1) * self.tile)))


def count(length: int, tile: int) -> int:
    """How many parts so many samples have."""
    return -(-length // tile)


def all_places(rows: int, columns: int, tile: int, *, symmetric: bool) -> list[Place]:
    """Every tile, row by row; of a symmetric matrix those on and above the diagonal."""
    down, across = count(rows, tile), count(columns, tile)
    return [(i, j) for i in range(down) for j in range(i if symmetric else 0, across)]
