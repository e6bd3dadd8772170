"""Gram matrices on disk, as Zarr arrays: larger than memory, computed by one process or by many, resumed after a crash.

How a tile is stored and checked: ``gram_tiles``. How tiles are computed by a Dask cluster: ``gram_cluster``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from unlazy.kernels.capture import Inputs, sample_count
from unlazy.kernels.gram import Kernel, Plan, Progress, plan_gram
from unlazy.kernels.gram_cluster import compute_on_cluster
from unlazy.kernels.gram_tiles import GramFile, GramJob, TileComputer, compute_tile, open_or_create
from unlazy.kernels.gram_workers import Devices
from unlazy.runtime import require

if TYPE_CHECKING:
    from distributed import Client


def gram_file(
    path: str | Path,
    model: nn.Module,
    x: Inputs,
    x2: Inputs | None = None,
    *,
    kernel: str = "tangent",
    tile: int | None = None,
    memory: str | int | None = None,
    shard: tuple[int, int] = (0, 1),
    client: Client | None = None,
    devices: Devices = None,
    progress: Progress | None = None,
    **options: Any,
) -> GramFile:
    """Compute a kernel into a Zarr array at ``path``, tile by tile. Tiles in the file are kept: call it again after a crash.

    ``kernel``: ``"tangent"``, ``"overlap"`` or ``"layer-overlap"``, with the options of those functions. ``shard=(i, n)``: only
    the i-th of n shares of the tiles, for job arrays without a cluster (all on one file system). ``client``: a
    ``distributed.Client`` whose workers see the same file system; workers may come, go and die. ``memory``: of each process.
    ``tile``: samples a side, else planned. ``devices``: one for each worker of this process, such as ``["cpu", "cpu"]``; they
    share the features. Default: as many workers on the CPU as torch has threads.
    """
    number, shards = shard
    require(0 <= number < shards, f"shard (i, n) means 0 <= i < n, got {shard}.")
    require(client is None or devices is None, "client and devices both say who computes the tiles; give one of them.")
    job = GramJob(kernel, model, x, x2, options, memory, devices)
    engine = job.engine()
    file = open_or_create(path, job, plan_file(job, engine, tile), engine)
    places = file.places()
    share = set(places[number * len(places) // shards : (number + 1) * len(places) // shards])
    computer = TileComputer(job, engine, file.tile)
    todo = computer.cache.order_tiles([place for place in file.missing_places() if place in share])
    count = _progress_counter(progress, len(share), len(share) - len(todo))
    if client is not None:
        compute_on_cluster(client, job, file, todo, count)
    else:
        for place in todo:
            compute_tile(computer, file, place)
            count()
    file.recompute = lambda place: compute_tile(TileComputer(job, engine, file.tile), file, place)
    return file


def plan_file(job: GramJob, engine: Kernel, tile: int | None = None) -> Plan:
    """What ``gram_file`` would do: tiles and memory."""
    rows, columns = sample_count(job.x), None if job.x2 is None else sample_count(job.x2)
    return plan_gram(engine, rows, columns, job.memory, held=False, tile=tile)


def _progress_counter(progress: Progress | None, total: int, done: int) -> Callable[[], None]:
    """A function to call after each tile; it reports ``progress(done, total)``."""

    def count() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return count
