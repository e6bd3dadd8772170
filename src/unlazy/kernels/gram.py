"""Gram matrices tile by tile: plan first, then run. Knows no kernel by name.

A kernel offers ``features(x)`` (a set of per-sample tensors), ``block(out, a, b, same)`` (fills a tile with the pairs of
two sets of features) and its costs; the plan picks tiles that fit the memory given.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from unlazy.kernels.capture import Inputs, samples
from unlazy.kernels.panels import Panels, all_places, count
from unlazy.runtime import InputError, require

FREE_SHARE = 0.5  # of the free memory, by default
DEVICE_SHARE = 0.85  # of a graphics card's free memory, which nobody else waits for
USABLE = 0.9  # of what is allowed: allocators round up and keep some back
SMALL_TILE = 64  # samples a side; features are made again rather than paired in smaller tiles
GOOD_ROOM = 3  # parts at hand where not all fit, two rows and a column: larger tiles or larger panels would cost more
Progress = Callable[[int, int], None]


@runtime_checkable
class Kernel(Protocol):
    """What the engine asks of a kernel."""

    tail: tuple[int, ...]  # () for a number per pair, (k, k) for a matrix per pair
    dtype: torch.dtype
    device: torch.device
    feature_bytes: int  # held per sample
    work_bytes: int  # needed to make the features, whatever the number of samples
    best_tile: int  # samples a side; larger tiles leave the cache, smaller ones waste calls
    methods: tuple[str, ...]  # one line each, for the plan

    def features(self, x: Inputs) -> Any: ...

    def block(self, out: Tensor, a: Any, b: Any, *, same: bool) -> None: ...


@dataclass(frozen=True)
class Plan:
    """How a Gram matrix will be computed. ``room``: of how many parts of one tile's side features are held; see ``Panels``."""

    rows: int
    columns: int
    symmetric: bool
    tile: int
    room: int
    result_bytes: int
    peak_bytes: int
    budget_bytes: int
    methods: tuple[str, ...]

    @property
    def tiles(self) -> int:
        return len(all_places(self.rows, self.columns, self.tile, symmetric=self.symmetric))

    @property
    def keep(self) -> bool:
        """Whether features of all samples are held, so that none is made twice."""
        return self.room >= parts_of(self.rows, self.columns, self.tile, symmetric=self.symmetric)

    def __str__(self) -> str:
        shape = "symmetric" if self.symmetric else "cross"
        again = f"features of {(self.room - 1) * self.tile} rows at a time, columns made again for each"
        result = f"result {_size(self.result_bytes)}" if self.result_bytes else "result elsewhere"
        lines = [
            f"{self.rows} x {self.columns} {shape}, {self.tiles} tiles of {self.tile}, "
            f"{'features kept' if self.keep else again}",
            f"memory: {result}, peak {_size(self.peak_bytes)} of {_size(self.budget_bytes)} allowed",
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
    """Choose tiles. ``columns=None``: symmetric; ``held=False``: the result stands elsewhere, on a disk say; ``tile``: at most
    so many samples a side, in place of what suits the kernel.

    Raises where not even one sample at a time fits.
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

    def room(size: int) -> int:
        parts = parts_of(rows, width, size, symmetric=symmetric)
        return parts if all_fit(size) else room_beside_block(kernel, size, free)

    def largest(enough: Callable[[int], bool], least: int) -> int | None:
        """The best tile, made smaller until it is small enough or as small as it may be."""
        size = most
        while size > least and not enough(size):
            smaller = size * 7 // 8
            size = max(least, smaller if smaller < 16 else smaller // 8 * 8)
        return size if enough(size) else None

    size = (
        largest(all_fit, min(SMALL_TILE, most))
        or largest(lambda size: room(size) >= GOOD_ROOM, 1)
        or largest(lambda size: room(size) >= 2, 1)
    )
    if size is None:
        least = result + kernel.work_bytes + 2 * kernel.feature_bytes + block_bytes(kernel, 1)
        raise InputError(
            f"{_size(budget)} is too small: the result alone takes {_size(result)}, and one tile brings it to "
            f"{_size(least)}. Give more memory, fewer samples, or outputs='trace'."
        )
    features = min(room(size) * size * kernel.feature_bytes, all_features)
    peak = result + kernel.work_bytes + features + block_bytes(kernel, size)
    return Plan(rows, width, symmetric, size, room(size), result, peak, budget, kernel.methods)


def parts_of(rows: int, columns: int, tile: int, *, symmetric: bool) -> int:
    """How many parts the samples are cut into."""
    return count(rows, tile) + (0 if symmetric else count(columns, tile))


def block_bytes(kernel: Kernel, tile: int) -> int:
    """What a tile takes, with what is needed to fill it."""
    item = torch.finfo(kernel.dtype).bits // 8
    return tile * tile * item * (math.prod(kernel.tail) + 3)


def room_beside_block(kernel: Kernel, tile: int, free: int) -> int:
    """Features of how many parts fit into so many bytes, beside one tile."""
    return max(0, free - block_bytes(kernel, tile)) // max(1, tile * kernel.feature_bytes)


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
    plan = plan_gram(kernel, samples(x), None if x2 is None else samples(x2), memory, held=in_memory)
    result = out
    if result is None:
        result = empty_result((*kernel.tail, plan.rows, plan.columns), kernel.dtype, kernel.device)
    else:
        expected = (*kernel.tail, plan.rows, plan.columns)
        require(tuple(out.shape) == expected, f"out must have shape {expected}, got {tuple(out.shape)}.")
    panels = Panels(kernel.features, x, x2, plan.tile, max(2, plan.room))
    places = all_places(plan.rows, plan.columns, plan.tile, symmetric=plan.symmetric)
    for done, place in enumerate(panels.in_order(places), start=1):
        height, width = panels.shape(place)
        rows, columns = (
            slice(at * plan.tile, at * plan.tile + side) for at, side in zip(place, (height, width), strict=True)
        )
        if in_place:
            block = result[..., rows, columns]  # a view: filled in place
        else:
            block = torch.empty((*kernel.tail, height, width), dtype=kernel.dtype, device=kernel.device)
        left, right, same = panels.pair(place)
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
    """Room for a result, not yet filled. On the processor numpy gives it, in huge pages where the system has them: touching
    fresh memory then takes a quarter of the time.
    """
    if device.type != "cpu" or dtype not in (torch.float32, torch.float64):
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(shape, dtype=np.float32 if dtype == torch.float32 else np.float64))


# --- memory ----------------------------------------------------------------------------------------------


def parse_memory(memory: str | int | None, device: torch.device | None = None) -> int:
    """Bytes from ``"2GB"``, ``"512 MiB"``, a number, or a share of what is free where the result will stand."""
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
    """Bytes the machine could still give."""
    information = Path("/proc/meminfo")
    if information.exists():
        found = re.search(r"MemAvailable:\s+(\d+) kB", information.read_text())
        if found:
            return 1024 * int(found[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count = count / 1000  # type: ignore[assignment]
    return f"{count:.3g} TB"
