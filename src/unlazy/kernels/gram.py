"""Gram matrices tile by tile: plan first, then run. Knows no kernel by name.

A kernel offers ``features(x)`` (a set of per-sample tensors), ``block(out, a, b, same)`` (fills a tile with the pairs of
two sets of features) and its costs; the plan picks tiles that fit the memory given.
"""

from __future__ import annotations

import math
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from unlazy.kernels.capture import Inputs, sample_count, take_samples
from unlazy.runtime import InputError, require

FREE_SHARE = 0.5  # of the free memory, by default
DEVICE_SHARE = 0.85  # of a graphics card's free memory, which nobody else waits for
USABLE = 0.9  # of what is allowed: allocators round up and keep some back
SMALL_TILE = 64  # samples a side; features are made again rather than paired in smaller tiles
GOOD_ROOM = 3  # parts at hand where not all fit, two rows and a column: larger tiles or larger panels would cost more
Progress = Callable[[int, int], None]  # called with tiles done and tiles in all
Place = tuple[int, int]  # of a tile: row and column, counted in tiles
PartKey = tuple[bool, int]  # of a part: whether it belongs to the rows, and its number


class TooLittleMemory(InputError):  # noqa: N818
    """A kernel needs more memory than it may take. Raised before anything large is allocated."""


@runtime_checkable
class Kernel(Protocol):
    """What the Gram engine needs from a kernel."""

    tail: tuple[int, ...]  # () for a number per pair, (k, k) for a matrix per pair
    dtype: torch.dtype
    device: torch.device
    feature_bytes: int  # held per sample
    work_bytes: int  # needed to make the features, whatever the number of samples
    best_tile: int  # samples a side; larger tiles leave the cache, smaller ones waste calls
    methods: tuple[str, ...]  # one line each, for the plan

    def features(self, x: Inputs) -> Any:
        """What the kernel needs to know of each sample."""
        ...

    def block(self, out: Tensor, a: Any, b: Any, *, same: bool) -> None:
        """Fill ``out`` with the kernel of two sets of features; ``same``: both are one set."""
        ...


def ready_context(kernel: Kernel) -> AbstractContextManager[None]:
    """The context in which a kernel makes features and fills blocks, if it needs one."""
    ready: Callable[[], AbstractContextManager[None]] = getattr(kernel, "ready", nullcontext)
    return ready()


@dataclass(frozen=True)
class Plan:
    """How a Gram matrix will be computed. ``cached_parts``: see :class:`FeatureCache`."""

    rows: int
    columns: int
    symmetric: bool
    tile: int
    cached_parts: int
    result_bytes: int
    peak_bytes: int
    budget_bytes: int
    methods: tuple[str, ...]

    @property
    def tiles(self) -> int:
        """How many tiles are computed."""
        return len(all_places(self.rows, self.columns, self.tile, symmetric=self.symmetric))

    @property
    def caches_all(self) -> bool:
        """Whether features of all samples are held, so that none is computed twice."""
        return self.cached_parts >= total_parts(self.rows, self.columns, self.tile, symmetric=self.symmetric)

    def __str__(self) -> str:
        shape = "symmetric" if self.symmetric else "cross"
        again = f"features of {(self.cached_parts - 1) * self.tile} rows at a time, columns made again for each"
        result = f"result {size_text(self.result_bytes)}" if self.result_bytes else "result elsewhere"
        lines = [
            f"{self.rows} x {self.columns} {shape}, {self.tiles} tiles of {self.tile}, "
            f"{'features kept' if self.caches_all else again}",
            f"memory: {result}, peak {size_text(self.peak_bytes)} of {size_text(self.budget_bytes)} allowed",
        ]
        return "\n".join([*lines, *(f"  {line}" for line in self.methods)])


def plan_gram(
    kernel: Kernel,
    rows: int,
    columns: int | None,
    memory: str | int | None = None,
    *,
    held: bool = True,
    tile: int | None = None,
) -> Plan:
    """Choose the tile size and the size of the feature cache that fit the memory.

    ``columns=None``: symmetric. ``held=False``: the result is not in memory, but on disk for example. ``tile``: at most so many
    samples on a side, instead of the kernel's ``best_tile``. Raises ``TooLittleMemory`` if not even one sample at a time fits.
    """
    require(tile is None or tile >= 1, f"a tile has at least one sample a side, got {tile}.")
    budget, best = parse_memory(memory, kernel.device), tile or kernel.best_tile
    symmetric, width = columns is None, rows if columns is None else columns
    item = torch.finfo(kernel.dtype).bits // 8
    result = rows * width * item * math.prod(kernel.tail) if held else 0
    free = int(USABLE * budget) - result - kernel.work_bytes
    most = min(best, max(rows, width))
    all_features = (rows if symmetric else rows + width) * kernel.feature_bytes

    def all_fit(size: int) -> bool:
        return all_features + block_bytes(kernel, size) <= free

    def cached_parts(size: int) -> int:
        parts = total_parts(rows, width, size, symmetric=symmetric)
        return parts if all_fit(size) else cached_parts_beside_block(kernel, size, free)

    def largest(enough: Callable[[int], bool], least: int) -> int | None:
        """The best tile, made smaller until it is small enough or as small as it may be."""
        size = most
        while size > least and not enough(size):
            smaller = size * 7 // 8
            size = max(least, smaller if smaller < 16 else smaller // 8 * 8)
        return size if enough(size) else None

    size = (
        largest(all_fit, min(SMALL_TILE, most))
        or largest(lambda size: cached_parts(size) >= GOOD_ROOM, 1)
        or largest(lambda size: cached_parts(size) >= 2, 1)
    )
    if size is None:
        least = result + kernel.work_bytes + 2 * kernel.feature_bytes + block_bytes(kernel, 1)
        raise TooLittleMemory(
            f"{size_text(budget)} is too small: the result alone takes {size_text(result)}, and one tile brings it to "
            f"{size_text(least)}. Give more memory, fewer samples, or outputs='trace'."
        )
    features = min(cached_parts(size) * size * kernel.feature_bytes, all_features)
    peak = result + kernel.work_bytes + features + block_bytes(kernel, size)
    return Plan(rows, width, symmetric, size, cached_parts(size), result, peak, budget, kernel.methods)


def total_parts(rows: int, columns: int, tile: int, *, symmetric: bool) -> int:
    """How many parts the samples of rows and columns are cut into; rows alone for a symmetric matrix."""
    return count_parts(rows, tile) + (0 if symmetric else count_parts(columns, tile))


def block_bytes(kernel: Kernel, tile: int) -> int:
    """Bytes of a tile and of the temporaries that fill it."""
    item = torch.finfo(kernel.dtype).bits // 8
    return tile * tile * item * (math.prod(kernel.tail) + 3)


def cached_parts_beside_block(kernel: Kernel, tile: int, free: int) -> int:
    """How many parts' features fit into ``free`` bytes together with one tile."""
    return max(0, free - block_bytes(kernel, tile)) // max(1, tile * kernel.feature_bytes)


class FeatureCache:
    """Features of parts of ``x``, and of ``x2`` for a cross kernel; of at most ``capacity`` parts at a time.

    A part is as many samples as a tile has on a side. Features of all parts are kept if they fit. Otherwise features of a
    *panel* of rows are kept while the columns come one at a time: features of a column are then computed once a panel, not
    once a row.
    """

    def __init__(
        self, features: Callable[[Inputs], Any], x: Inputs, x2: Inputs | None, tile: int, capacity: int
    ) -> None:
        require(capacity >= 2, f"a tile pairs two parts, so room for two is the least; got {capacity}.")
        self.features, self.x, self.x2, self.tile = features, x, x2, tile
        parts = sum(count_parts(sample_count(data), tile) for data in (x, x2) if data is not None)
        self.all_fit = capacity >= parts
        self.panel = parts if self.all_fit else capacity - 1  # rows; one more part is a column
        self._rows: OrderedDict[PartKey, Any] = OrderedDict()
        self._last_column: tuple[PartKey, Any] | None = None

    def order_tiles(self, places: Sequence[Place]) -> list[Place]:
        """The tiles in the order that computes features least often: panel by panel, and in a panel column by column."""
        return sorted(places, key=lambda place: (place[0] // self.panel, place[1], place[0]))

    def pair(self, place: Place) -> tuple[Any, Any, bool]:
        """Features of a tile's rows and columns, and whether they are the same ones. Delete them before the next pair."""
        symmetric = self.x2 is None
        left = self._row(place[0])
        same = symmetric and place[0] == place[1]
        return left, left if same else self._column((symmetric, place[1])), same

    def tile_shape(self, place: Place) -> tuple[int, int]:
        """Height and width of a tile."""
        columns = self.x if self.x2 is None else self.x2
        height, width = (
            min(self.tile, sample_count(data) - at * self.tile)
            for data, at in zip((self.x, columns), place, strict=True)
        )
        return height, width

    def _row(self, number: int) -> Any:
        key = True, number
        if key not in self._rows:
            while len(self._rows) >= self.panel:
                self._rows.popitem(last=False)
            self._rows[key] = self._compute(key)
        self._rows.move_to_end(key)
        return self._rows[key]

    def _column(self, key: PartKey) -> Any:
        if key in self._rows:
            return self._rows[key]
        if self.all_fit:
            self._rows[key] = self._compute(key)
            return self._rows[key]
        if self._last_column is None or self._last_column[0] != key:
            self._last_column = None  # frees its memory first
            self._last_column = key, self._compute(key)
        return self._last_column[1]

    def _compute(self, key: PartKey) -> Any:
        if self._last_column is not None and self._last_column[0] == key:
            return self._last_column[1]
        is_row, number = key
        data = self.x if is_row else self.x2
        return self.features(take_samples(data, slice(number * self.tile, (number + 1) * self.tile)))


def count_parts(length: int, tile: int) -> int:
    """How many parts of a tile's side ``length`` samples are cut into."""
    return -(-length // tile)


def all_places(rows: int, columns: int, tile: int, *, symmetric: bool) -> list[Place]:
    """Every tile, row by row; of a symmetric matrix those on and above the diagonal."""
    down, across = count_parts(rows, tile), count_parts(columns, tile)
    return [(i, j) for i in range(down) for j in range(i if symmetric else 0, across)]


def gram(
    kernel: Kernel,
    x: Inputs,
    x2: Inputs | None = None,
    *,
    memory: str | int | None = None,
    out: Any = None,
    progress: Progress | None = None,
) -> Tensor | Any:
    """The Gram matrix ``[n, m, *tail]``, by the plan. ``out``: anything that takes slices, filled tile by tile."""
    in_memory = out is None or isinstance(out, Tensor)
    in_place = out is None or (isinstance(out, Tensor) and (out.dtype, out.device) == (kernel.dtype, kernel.device))
    plan = plan_gram(kernel, sample_count(x), None if x2 is None else sample_count(x2), memory, held=in_memory)
    result = out
    if result is None:
        result = empty_result((*kernel.tail, plan.rows, plan.columns), kernel.dtype, kernel.device)
    else:
        expected = (*kernel.tail, plan.rows, plan.columns)
        require(tuple(out.shape) == expected, f"out must have shape {expected}, got {tuple(out.shape)}.")
    cache = FeatureCache(kernel.features, x, x2, plan.tile, max(2, plan.cached_parts))
    places = all_places(plan.rows, plan.columns, plan.tile, symmetric=plan.symmetric)
    for done, place in enumerate(cache.order_tiles(places), start=1):
        height, width = cache.tile_shape(place)
        rows, columns = (
            slice(at * plan.tile, at * plan.tile + side) for at, side in zip(place, (height, width), strict=True)
        )
        if in_place:
            block = result[..., rows, columns]  # a view: filled in place
        else:
            block = torch.empty((*kernel.tail, height, width), dtype=kernel.dtype, device=kernel.device)
        left, right, same = cache.pair(place)
        kernel.block(block, left, right, same=same)
        del left, right  # before others take their place
        if not in_place:
            result[..., rows, columns] = block
        if plan.symmetric and not same:
            result[..., columns, rows] = block.mT if not kernel.tail else block.transpose(0, 1).mT
        if progress is not None:
            progress(done, len(places))
    return result.permute(2, 3, 0, 1) if kernel.tail and isinstance(result, Tensor) else result


def empty_result(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor for a result. On the CPU numpy allocates it, in huge pages where the system has them: the first access
    then takes a quarter of the time.
    """
    if device.type != "cpu" or dtype not in (torch.float32, torch.float64):
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(shape, dtype=np.float32 if dtype == torch.float32 else np.float64))


# --- memory ----------------------------------------------------------------------------------------------


def parse_memory(memory: str | int | None, device: torch.device | None = None) -> int:
    """Bytes from ``"2GB"``, ``"512 MiB"`` or a number; ``None``: a share of the memory that is free on ``device``."""
    if memory is None:
        if device is not None and device.type == "cuda":
            return int(DEVICE_SHARE * torch.cuda.mem_get_info(device)[0])
        return int(FREE_SHARE * free_memory())
    if isinstance(memory, int | float):
        require(0 < memory < math.inf, f"memory must be positive, got {memory}.")
        return int(memory)
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([KMGT]?)(i?)B?\s*", memory, re.I)
    if match is None:
        raise InputError(f"memory is a number of bytes or a text such as '2GB' or '512MiB', got {memory!r}.")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))


def free_memory() -> int:
    """Bytes of memory that are free on this machine."""
    information = Path("/proc/meminfo")
    if information.exists():
        found = re.search(r"MemAvailable:\s+(\d+) kB", information.read_text())
        if found:
            return 1024 * int(found[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def size_text(count: int) -> str:
    """Bytes for a reader, such as ``2.4 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count = count / 1000  # type: ignore[assignment]
    return f"{count:.3g} TB"
