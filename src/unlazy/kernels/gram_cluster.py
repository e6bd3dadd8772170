"""Tiles of a Gram matrix computed by the workers of a Dask cluster.

Model and data are sent to every worker once. A task computes one tile, writes it to the file that all machines share, and
returns the place of the tile. The client releases the task at once, so a worker that dies later takes no finished work with it.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unlazy import runtime
from unlazy.kernels.gram import FREE_SHARE, Place
from unlazy.kernels.gram_identity import different_parts
from unlazy.kernels.gram_tiles import GramFile, GramJob, TileComputer, compute_tile
from unlazy.runtime import InputError, UnlazyError, require

if TYPE_CHECKING:
    from distributed import Client, Future

AHEAD = 2  # tasks at the cluster per thread of its workers
PATIENCE = 60  # seconds for the first worker to join
TRIES = 4  # of a tile whose workers die

_OPEN: dict[str, tuple[TileComputer, GramFile]] = {}  # in the process of a worker: the open job
_ONE_AT_A_TIME = threading.Lock()


def compute_on_cluster(
    client: Client, job: GramJob, file: GramFile, places: Sequence[Place], done: Callable[[], None]
) -> None:
    """Compute these tiles on the cluster; ``done`` is called after each. Raises the error of a tile that fails.

    A tile whose worker dies is tried again, ``TRIES`` times in all.
    """
    from distributed import as_completed

    if not places:
        return
    waiting, tries = deque(places), Counter[Place]()
    running: dict[Future, Place] = {}
    shared = _send_job(client, job)
    finished = as_completed()

    def submit() -> None:
        """Send tiles until the cluster has ``AHEAD`` tasks a thread."""
        while waiting and len(running) < AHEAD * max(1, sum(client.nthreads().values())):
            place = waiting.popleft()
            where = str(file.path), file.tile, file.about["job"]
            future = client.submit(compute_tile_on_worker, shared, *where, place, pure=False)
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
                    shared = _send_job(client, job)
                waiting.append(place)
            future.release()
            submit()
    finally:
        client.cancel(list(running))
    unseen = [place for place in places if not file.has_receipt(place)]
    require(not unseen, f"workers wrote {len(unseen)} tiles where this machine does not see them: share the folder.")


def _send_job(client: Client, job: GramJob) -> Future:
    """Send the job to all workers; a worker that joins later gets it from another one."""
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


def compute_tile_on_worker(job: GramJob, path: str, tile: int, identity: dict[str, Any], place: Place) -> Place:
    """Compute one tile in the process of a Dask worker: one at a time, with as many threads as the worker has."""
    from distributed import get_worker

    worker = get_worker()
    limit = worker.memory_manager.memory_limit  # a machine's memory is shared by its workers
    if job.memory is None and limit:
        job = replace(job, memory=int(FREE_SHARE * limit))
    with _ONE_AT_A_TIME, runtime.threads(worker.state.nthreads):
        compute_tile(*_open_job(job, path, tile, identity), place)
    return place


def _open_job(job: GramJob, path: str, tile: int, identity: dict[str, Any]) -> tuple[TileComputer, GramFile]:
    """The job in this process, opened at its first tile; a job of another file is closed."""
    key = f"{path} {tile} {runtime.short_hash(identity)}"
    if key not in _OPEN:
        _OPEN.clear()
        file = GramFile(path)
        same = (file.tile, file.about["job"]) == (tile, identity)
        require(same, f"{path} on this worker is the file of another job: share the folder.")
        own = replace(job, model=copy.deepcopy(job.model))  # others may fetch the job while this one works on it
        engine = own.engine()
        differs = different_parts(identity, own.identity(engine))
        require(
            not differs, f"the model on this worker is another one (other {', '.join(differs)}): install the same code."
        )
        _OPEN[key] = TileComputer(own, engine, tile), file
    return _OPEN[key]
