"""Tiles of a Gram matrix over the workers of a Dask cluster.

Model and data travel to every worker once. A task computes one tile, writes it to the file that all machines see, and returns
nothing but its place; the client lets go of it at once, so that a worker that dies later takes no finished work with it.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unlazy import runtime
from unlazy.kernels.filed import GramFile, Job, Tiles, compute
from unlazy.kernels.gram import FREE_SHARE
from unlazy.kernels.panels import Place
from unlazy.runtime import InputError, UnlazyError, require

if TYPE_CHECKING:
    from distributed import Client, Future

AHEAD = 2  # tasks at the cluster per thread of its workers
PATIENCE = 60  # seconds for the first worker to join
TRIES = 4  # of a tile whose workers die

_OPEN: dict[str, tuple[Tiles, GramFile]] = {}  # in a worker's process: the job it is at
_ONE_AT_A_TIME = threading.Lock()


def spread(client: Client, job: Job, file: GramFile, places: Sequence[Place], done: Callable[[], None]) -> None:
    """Compute these tiles on the cluster; raises what a tile raises, and says which tiles kill their workers."""
    from distributed import as_completed

    if not places:
        return
    waiting, tries = deque(places), Counter[Place]()
    running: dict[Future, Place] = {}
    shared = _share(client, job)
    finished = as_completed()

    def submit() -> None:
        while waiting and len(running) < AHEAD * max(1, sum(client.nthreads().values())):
            place = waiting.popleft()
            where = str(file.path), file.tile, file.about["job"]
            future = client.submit(tile_on_worker, shared, *where, place, pure=False)
            running[future] = place
            finished.add(future)

    submit()
    try:
        for future in finished:
            place = running.pop(future)
            if future.status == "finished":
                done()
            else:
                tries[place] += 1
                error = future.exception() if future.status == "error" else None
                if error is not None and not _worker_died(error):
                    raise error
                if tries[place] == TRIES:
                    raise UnlazyError(f"tile {place} was lost with its worker {TRIES} times; is its memory too small?")
                if future.status != "error":  # the job itself was lost with the last worker that held it
                    shared = _share(client, job)
                waiting.append(place)
            future.release()
            submit()
    finally:
        client.cancel(list(running))
    unseen = [place for place in places if not file.has_receipt(place)]
    require(not unseen, f"workers wrote {len(unseen)} tiles where this machine does not see them: share the folder.")


def _share(client: Client, job: Job) -> Future:
    """The job at every worker there is; one that comes later fetches it from another."""
    try:
        client.wait_for_workers(1, timeout=PATIENCE)
    except TimeoutError as error:
        raise InputError(f"no worker joined the cluster within {PATIENCE} s.") from error
    try:
        return client.scatter(job, broadcast=True, hash=False)
    except Exception as error:
        raise InputError(
            f"the model did not reach the workers ({error}). Its code must be importable there: install it on every worker."
        ) from error


def _worker_died(error: BaseException) -> bool:
    from distributed import KilledWorker

    return isinstance(error, KilledWorker)


def tile_on_worker(job: Job, path: str, tile: int, identity: dict[str, Any], place: Place) -> Place:
    """One tile at a time in a process, with as many threads as its worker has."""
    from distributed import get_worker

    worker = get_worker()
    limit = worker.memory_manager.memory_limit  # a machine's memory is shared by its workers
    if job.memory is None and limit:
        job = replace(job, memory=int(FREE_SHARE * limit))
    with _ONE_AT_A_TIME, runtime.threads(worker.state.nthreads):
        compute(*_opened(job, path, tile, identity), place)
    return place


def _opened(job: Job, path: str, tile: int, identity: dict[str, Any]) -> tuple[Tiles, GramFile]:
    """The job of this process, opened once; an earlier one is forgotten."""
    key = f"{path} {tile} {runtime.short_hash(identity)}"
    if key not in _OPEN:
        _OPEN.clear()
        file = GramFile(path)
        same = (file.tile, file.about["job"]) == (tile, identity)
        require(same, f"{path} on this worker is the file of another job: share the folder.")
        own = replace(job, model=copy.deepcopy(job.model))  # others may fetch the job while this one works on it
        _OPEN[key] = Tiles(own, own.engine(), tile), file
    return _OPEN[key]
