"""Tiles of a Gram matrix computed by the workers of a Dask cluster.

Model and data are sent to every worker once, with the code of the user's own classes. A task computes one tile. A worker that
sees the file writes the tile there. One that does not (another host, no common folder) returns the numbers, and the client writes
them. The client releases the task at once, so a worker that dies later takes no finished work with it.
"""

from __future__ import annotations

import math
import pickle
import site
import sys
import sysconfig
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import nn

from unlazy import runtime
from unlazy.kernels.capture import Inputs
from unlazy.kernels.gram import FREE_SHARE, Place
from unlazy.kernels.gram_identity import different_parts
from unlazy.kernels.gram_tiles import GramFile, GramJob, TileComputer, compute_block, compute_tile, this_process
from unlazy.runtime import InputError, UnlazyError, require

if TYPE_CHECKING:
    from distributed import Client, Future

AHEAD = 2  # tasks at the cluster per thread of its workers
PATIENCE = 60  # seconds for the first worker to join
GROUPS = 2  # squares of tiles for every worker, so that all end at about the same time
TRIES = 4  # of a tile whose workers die

IMPORTABLE = "Code that the model imports must be importable there: install it on every worker."

_OPEN: dict[str, TileComputer] = {}  # in the process of a worker: the open job
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class FileAddress:
    """Where the client has the file of a job, and how a worker recognises it: by a file of that name inside."""

    path: str
    tile: int
    identity: dict[str, Any]
    mark: str


def compute_on_cluster(
    client: Client, job: GramJob, file: GramFile, places: Sequence[Place], done: Callable[[], None]
) -> None:
    """Compute these tiles on the cluster; ``done`` is called after each. Raises the error of a tile that fails.

    A tile whose worker dies is tried again, ``TRIES`` times in all.
    """
    if not places:
        return
    file.drop_receipts(places)  # of damaged tiles: from here on a receipt means that a worker wrote it
    with _marked(file) as mark:
        address = FileAddress(str(file.path), file.tile, file.about["job"], mark)
        _compute(client, job, file, places, done, address)
    unseen = [place for place in places if not file.has_receipt(place)]
    require(not unseen, f"workers wrote {len(unseen)} tiles where this machine does not see them: share the folder.")


@contextmanager
def _marked(file: GramFile) -> Iterator[str]:
    """The name of a new file inside the file's folder: a worker that finds it shares the folder with the client."""
    mark = f".client-{uuid.uuid4().hex}"
    (file.path / mark).touch()
    try:
        yield mark
    finally:
        (file.path / mark).unlink(missing_ok=True)


def _compute(
    client: Client,
    job: GramJob,
    file: GramFile,
    places: Sequence[Place],
    done: Callable[[], None],
    address: FileAddress,
) -> None:
    from distributed import as_completed

    waiting, tries = TileQueue(square_groups(places, len(client.nthreads()))), Counter[Place]()
    running: dict[Future, tuple[Place, str]] = {}
    busy = Counter[str]()
    shared = _send_job(client, job)
    finished = as_completed()

    def submit() -> None:
        """Send tiles until every worker has ``AHEAD`` tasks a thread."""
        for worker, threads in client.nthreads().items():
            while busy[worker] < AHEAD * threads and (place := waiting.take(worker)) is not None:
                near = {"workers": [worker], "allow_other_workers": True}
                future = client.submit(compute_tile_on_worker, shared, address, place, pure=False, **near)
                running[future] = place, worker
                busy[worker] += 1
                finished.add(future)

    submit()
    try:
        for future in finished:
            place, worker = running.pop(future)
            busy[worker] -= 1
            if future.status == "finished" and _store_result(future, file, place):
                done()
            else:
                tries[place] += 1
                error = future.exception() if future.status == "error" else None
                if error is not None and not _worker_died(error):
                    raise error
                if tries[place] == TRIES:
                    raise UnlazyError(f"tile {place} was lost with its worker {TRIES} times; is its memory too small?")
                if future.status != "error":  # the job itself may be lost with the last worker that held it
                    shared = _send_job(client, job)
                waiting.put_back(place)
            future.release()
            submit()
    finally:
        client.cancel(list(running))


class TileQueue:
    """Tiles that wait, in groups. A worker takes one group after the other; at the end it helps with the largest one left."""

    def __init__(self, groups: Sequence[Sequence[Place]]) -> None:
        self._free = deque(deque(group) for group in groups)
        self._taken: dict[str, deque[Place]] = {}

    def take(self, worker: str) -> Place | None:
        """The next tile for a worker, or ``None``."""
        if not self._taken.get(worker) and self._free:
            self._taken[worker] = self._free.popleft()
        if self._taken.get(worker):
            return self._taken[worker].popleft()
        largest = max(self._taken.values(), key=len, default=None)
        return largest.pop() if largest else None

    def put_back(self, place: Place) -> None:
        """Let a tile wait again: its worker died."""
        self._free.append(deque([place]))


def square_groups(places: Sequence[Place], workers: int) -> list[list[Place]]:
    """The tiles in square groups, several a worker: the tiles of a square need the features of few samples."""
    bands = (
        math.ceil(math.sqrt(2 * GROUPS * workers)) if workers > 1 else 1
    )  # half of the squares of a symmetric matrix
    side = -(-(1 + max((max(place) for place in places), default=0)) // bands)
    groups: dict[Place, list[Place]] = {}
    for place in places:
        groups.setdefault((place[0] // side, place[1] // side), []).append(place)
    return list(groups.values())


def _store_result(future: Future, file: GramFile, place: Place) -> bool:
    """Whether a finished tile is in the file now: its worker wrote it, or sent its numbers. ``False``: both were lost with it."""
    from distributed import CancelledError

    if file.has_receipt(place):
        return True
    try:
        made: Block | None = future.result()
    except (CancelledError, OSError):
        return False
    if made is not None:
        file.write(place, torch.from_numpy(made.numbers), made.seconds, by=made.by)
    return True


def _send_job(client: Client, job: GramJob) -> Future:
    """Send the job to all workers; a worker that joins later gets it from another one."""
    try:
        client.wait_for_workers(1, timeout=PATIENCE)
    except TimeoutError as error:
        raise InputError(f"no worker joined the cluster within {PATIENCE} s.") from error
    try:
        return client.scatter(pack_job(job), broadcast=True, hash=False)
    except Exception as error:
        raise InputError(f"the model did not reach the workers ({error}). {IMPORTABLE}") from error


# --- the code of the user's own classes --------------------------------------------------------------------


@dataclass(frozen=True)
class PackedJob:
    """A job on its way to workers: the data as they are, the rest pickled with the code of the user's own classes."""

    pickled: bytes
    x: Inputs
    x2: Inputs | None

    def unpack(self) -> GramJob:
        """The job, with a model of its own: others may fetch this while one works on it."""
        try:
            job: GramJob = pickle.loads(self.pickled)
        except (ImportError, AttributeError) as error:
            raise InputError(f"the model did not reach this worker ({error}). {IMPORTABLE}") from error
        return replace(job, x=self.x, x2=self.x2)


def pack_job(job: GramJob) -> PackedJob:
    """The job with the code of classes that are not installed, so that a worker needs no copy of the user's files."""
    import cloudpickle  # comes with Dask

    modules = _own_modules(job.model)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled = cloudpickle.dumps(replace(job, x=None, x2=None))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    return PackedJob(pickled, job.x, job.x2)


def _own_modules(model: nn.Module) -> list[ModuleType]:
    """The user's own modules that the model's classes come from, and those loaded from the same folders."""
    names = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    folders = {_folder(module) for name in names if _is_own(module := sys.modules.get(name))}
    return [module for module in list(sys.modules.values()) if _is_own(module) and _folder(module) in folders]


def _folder(module: ModuleType) -> Path:
    return Path(str(module.__file__)).parent


def _is_own(module: object) -> TypeGuard[ModuleType]:
    """Whether this is a module in a file of the user's, not an installed one, that a pickle can name."""
    if not isinstance(module, ModuleType) or module.__name__ == "__main__":  # that one is pickled by value anyway
        return False
    path: Any = getattr(module, "__file__", None)
    if path is None:
        return False
    installed: list[str | Path] = [
        *site.getsitepackages(),
        site.getusersitepackages(),
        sysconfig.get_path("stdlib"),
        Path(__file__).parents[1],
    ]
    return not any(Path(path).resolve().is_relative_to(Path(root).resolve()) for root in installed)


def _worker_died(error: BaseException) -> bool:
    from distributed import KilledWorker

    return isinstance(error, KilledWorker)


@dataclass(frozen=True)
class Block:
    """The numbers of a tile, from a worker that does not see the file."""

    numbers: np.ndarray
    seconds: float
    by: str


def compute_tile_on_worker(packed: PackedJob, address: FileAddress, place: Place) -> Block | None:
    """Compute one tile in the process of a Dask worker: one at a time, with as many threads as the worker has.

    Writes it to the file if this worker sees it, and returns ``None``; else returns the numbers.
    """
    from distributed import get_worker

    worker = get_worker()
    with _ONE_AT_A_TIME, runtime.threads(worker.state.nthreads):
        computer = _open_job(packed, address, worker.memory_manager.memory_limit)
        file = _shared_file(address)
        if file is not None:
            compute_tile(computer, file, place)
            return None
        started = time.perf_counter()
        numbers = compute_block(computer, place).cpu().contiguous().numpy()
        return Block(numbers, time.perf_counter() - started, this_process())


def _shared_file(address: FileAddress) -> GramFile | None:
    """The client's file, if this worker sees it; ``None`` on a host without that folder."""
    try:
        (Path(address.path) / address.mark).read_bytes()
    except OSError:
        return None
    return GramFile(address.path)


def _open_job(packed: PackedJob, address: FileAddress, limit: int | None) -> TileComputer:
    """The job in this process, opened at its first tile; a job of another file is closed."""
    key = f"{address.path} {address.tile} {runtime.short_hash(address.identity)}"
    if key not in _OPEN:
        _OPEN.clear()
        job = packed.unpack()
        if job.memory is None and limit:  # a machine's memory is shared by its workers
            job = replace(job, memory=int(FREE_SHARE * limit))
        engine = job.engine()
        differs = different_parts(address.identity, job.identity(engine))
        require(
            not differs, f"the model on this worker is another one (other {', '.join(differs)}): install the same code."
        )
        _OPEN[key] = TileComputer(job, engine, address.tile)
    return _OPEN[key]
