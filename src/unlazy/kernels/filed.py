"""Gram matrices on disk, as Zarr arrays: larger than memory, computed by one process or by many, and never begun anew.

A tile is a task of its own. It writes its block (of a symmetric matrix also the mirrored one) as chunks of the array, then a
receipt with their checksums. Whoever comes next, after a crash or on another machine, computes the tiles that have no
receipt, or one that their chunks do not bear out, and nothing else. Tiles that are missing read as NaN.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unlazy.kernels.capture import Inputs, explained, samples
from unlazy.kernels.engine import RulesBroke, TangentKernel
from unlazy.kernels.gated import refuse_stack
from unlazy.kernels.gram import USABLE, Kernel, Plan, parse_memory, plan_gram, room_beside_block
from unlazy.kernels.overlap import layer_overlap_engine, overlap_engine
from unlazy.kernels.panels import Panels, Place, all_places
from unlazy.runtime import InputError, StoreError, canonical_json, code_sha256, provenance, require
from unlazy.store import write_file

if TYPE_CHECKING:
    from distributed import Client

Progress = Callable[[int, int], None]
KERNELS = ("tangent", "overlap", "layer-overlap")
RECEIPTS = "receipts"


# --- what is computed --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A kernel of a model on data: all that anyone needs to compute any tile of it."""

    kernel: str
    model: nn.Module
    x: Inputs
    x2: Inputs | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    memory: str | int | None = None  # of one process

    def __post_init__(self) -> None:
        require(self.kernel in KERNELS, f"kernel must be one of {', '.join(KERNELS)}; got {self.kernel!r}.")
        refuse_stack(self.model)

    def identity(self) -> dict[str, Any]:
        """What decides the numbers: code, kernel, options, and checksums of weights and data."""
        data = [self.x] if self.x2 is None else [self.x, self.x2]
        return {
            "kernel": self.kernel,
            "options": json.loads(json.dumps(dict(self.options), sort_keys=True, default=str)),
            "model": _checksum([type(self.model).__qualname__, repr(self.model)], self.model.state_dict()),
            "data": [_checksum([], one) for one in data],
            "code": code_sha256(),
        }

    def engine(self) -> Kernel:
        """The kernel as the Gram engine wants it."""
        with explained(self.model, self.x, self.x2):
            if self.kernel == "tangent":
                return TangentKernel(self.model, self.x, self.x2, memory=self.memory, **self.options)
            if self.kernel == "overlap":
                return overlap_engine(self.model, self.x, **self.options)
            return layer_overlap_engine(self.model, self.x, self.x2, **self.options)


def _checksum(words: Sequence[str], tensors: Any) -> str:
    """SHA-256 of words and of every tensor in a tree: its place, kind and bytes."""
    digest = hashlib.sha256("\0".join(words).encode())
    for path, leaf in pytree.tree_flatten_with_path(tensors)[0]:
        digest.update(f"{pytree.keystr(path)} {getattr(leaf, 'dtype', type(leaf))} ".encode())
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)} ".encode())
            digest.update(leaf.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if leaf.numel() else b"")
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


class Tiles:
    """Makes blocks of a job, with features at hand for as many parts as its memory allows."""

    def __init__(self, job: Job, kernel: Kernel, tile: int) -> None:
        self.job, self.kernel = job, kernel
        self.ready = kernel.ready if isinstance(kernel, TangentKernel) else nullcontext
        free = int(USABLE * parse_memory(job.memory, kernel.device)) - kernel.work_bytes
        self.panels = Panels(kernel.features, job.x, job.x2, tile, max(2, room_beside_block(kernel, tile, free)))

    def block(self, place: Place) -> Tensor:
        """``[*tail, rows, columns]``."""
        shape = (*self.kernel.tail, *self.panels.shape(place))
        out = torch.empty(shape, dtype=self.kernel.dtype, device=self.kernel.device)
        with explained(self.job.model, self.job.x, self.job.x2), self.ready():
            left, right, same = self.panels.pair(place)
            self.kernel.block(out, left, right, same=same)
        return out


# --- the file ----------------------------------------------------------------------------------------------


class GramFile:
    """A Gram matrix on disk, finished or not: ``[n, m]``, or ``[k, k, n, m]`` where every pair has a matrix of outputs."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        zarr = _zarr()
        try:
            self._array = zarr.open_array(self.path, mode="r+")
            self.about: dict[str, Any] = dict(self._array.attrs["unlazy"])
        except (FileNotFoundError, KeyError, ValueError) as error:
            raise InputError(f"{self.path} is no Gram matrix that unlazy wrote.") from error

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._array.shape)

    @property
    def tile(self) -> int:
        return int(self._array.chunks[-1])

    @property
    def symmetric(self) -> bool:
        return len(self.about["job"]["data"]) == 1

    def places(self) -> list[Place]:
        """All tiles, row by row; of a symmetric matrix those on and above the diagonal."""
        rows, columns = self.shape[-2:]
        return all_places(rows, columns, self.tile, symmetric=self.symmetric)

    def missing(self) -> list[Place]:
        """Tiles that are still to be computed: no receipt, or chunks that are not what it says."""
        return [place for place in self.places() if not self._is_there(place)]

    def array(self) -> Any:
        """The finished matrix as a Zarr array, read part by part: ``numpy.asarray(file.array()[:100])``."""
        absent = [place for place in self.places() if not self.has_receipt(place)]
        require(not absent, f"{self.path}: {len(absent)} tiles are still to be computed; run the same command again.")
        return _zarr().open_array(self.path, mode="r")

    def write(self, place: Place, block: Tensor, seconds: float) -> None:
        """A tile and its mirror image, then the receipt."""
        kept = {at: values.cpu().contiguous().numpy() for at, values in self._with_mirror(place, block)}
        try:
            for at, values in kept.items():
                self._array[self._part(at)] = values
        except OSError as error:
            raise StoreError(
                f"could not write {self.path}: {error.strerror or error}. Make room and run the same again."
            ) from error
        receipt = {
            "checksums": {f"{at[0]}-{at[1]}": _bytes_checksum(values) for at, values in kept.items()},
            "seconds": round(seconds, 4),
            "by": f"{platform.node()} {os.getpid()}",
        }
        write_file(self._receipt(place), canonical_json(receipt).encode())

    def has_receipt(self, place: Place) -> bool:
        """Whether somebody says that the tile is there."""
        return self._receipt(place).exists()

    def receipts(self) -> dict[Place, dict[str, Any]]:
        """Who computed which tile, and in how many seconds."""
        found = {place: self._told(place) for place in self.places()}
        return {place: told for place, told in found.items() if told is not None}

    def _with_mirror(self, place: Place, block: Tensor) -> list[tuple[Place, Tensor]]:
        if not self.symmetric or place[0] == place[1]:
            return [(place, block)]
        mirrored = block.mT if block.ndim == 2 else block.transpose(0, 1).mT
        return [(place, block), (place[::-1], mirrored)]

    def _part(self, place: Place) -> tuple[Any, ...]:
        return (..., *(slice(i * self.tile, (i + 1) * self.tile) for i in place))

    def _receipt(self, place: Place) -> Path:
        return self.path / RECEIPTS / f"{place[0]}-{place[1]}.json"

    def _told(self, place: Place) -> dict[str, Any] | None:
        with suppress(FileNotFoundError, json.JSONDecodeError):
            return dict(json.loads(self._receipt(place).read_text()))
        return None

    def _is_there(self, place: Place) -> bool:
        told = self._told(place)
        if told is None:
            return False
        for name, checksum in told["checksums"].items():
            down, _, across = name.partition("-")
            try:
                values = np.asarray(self._array[self._part((int(down), int(across)))])
            except (OSError, ValueError):  # a chunk of the wrong length
                return False
            if _bytes_checksum(values) != checksum:
                return False
        return True


def _bytes_checksum(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def begin(path: str | Path, job: Job, plan: Plan, kernel: Kernel) -> GramFile:
    """The file of this job: a new one, or the one that is there if it was begun for the same job."""
    path, identity = Path(path).absolute(), job.identity()
    if not path.exists():
        _create(path, identity, plan, kernel)
    found = GramFile(path)
    differs = [name for name, value in identity.items() if found.about["job"].get(name) != value]
    if differs:
        raise InputError(
            f"{path} was begun for another kernel (other {', '.join(differs)}); choose another path or delete it."
        )
    return found


def _create(path: Path, identity: Mapping[str, Any], plan: Plan, kernel: Kernel) -> None:
    """Made beside its place and moved there whole; where another process was quicker, its file stays."""
    made = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.new")
    dtype = str(kernel.dtype).removeprefix("torch.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _zarr().create_array(
            made,
            shape=(*kernel.tail, plan.rows, plan.columns),
            chunks=(*kernel.tail, plan.tile, plan.tile),
            dtype=dtype,
            compressors=None,  # mantissas do not compress
            fill_value=float("nan"),
            attributes={"unlazy": {"job": identity, "provenance": provenance(dtype, kernel.device.type)}},
        )
        (made / RECEIPTS).mkdir()
        made.rename(path)
    except OSError as error:
        if not path.exists():
            raise StoreError(f"could not make {path}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise InputError("Gram matrices on disk need zarr: pip install 'unlazy[cluster]'.") from error
    return zarr


# --- computing it ------------------------------------------------------------------------------------------


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
    progress: Progress | None = None,
    **options: Any,
) -> GramFile:
    """A kernel into a Zarr array at ``path``, tile by tile; what is there already is kept, so call it again after a crash.

    ``kernel``: ``"tangent"``, ``"overlap"`` or ``"layer-overlap"``, with the options of those functions. ``shard=(i, n)``: only
    the i-th of n shares of the tiles, for job arrays without a cluster (all on one file system). ``client``: a
    ``distributed.Client`` whose workers see the same file system; workers may come, go and die. ``memory``: of each process.
    ``tile``: samples a side, else planned.
    """
    number, shards = shard
    require(0 <= number < shards, f"shard (i, n) means 0 <= i < n, got {shard}.")
    job = Job(kernel, model, x, x2, options, memory)
    engine = job.engine()
    file = begin(path, job, plan_file(job, engine, tile), engine)
    places = file.places()
    share = set(places[number * len(places) // shards : (number + 1) * len(places) // shards])
    tiles = Tiles(job, engine, file.tile)
    todo = tiles.panels.in_order([place for place in file.missing() if place in share])
    told = _counting(progress, len(share), len(share) - len(todo))
    if client is not None:
        from unlazy.kernels.cluster import spread

        spread(client, job, file, todo, told)
    else:
        for place in todo:
            compute(tiles, file, place)
            told()
    return file


def plan_file(job: Job, engine: Kernel, tile: int | None = None) -> Plan:
    """What ``gram_file`` would do."""
    rows, columns = samples(job.x), None if job.x2 is None else samples(job.x2)
    return plan_gram(engine, rows, columns, job.memory, held=False, tile=tile)


def compute(tiles: Tiles, file: GramFile, place: Place) -> None:
    """One tile, from the samples to its receipt."""
    started = time.perf_counter()
    try:
        block = tiles.block(place)
    except RulesBroke as error:
        raise InputError(
            "a layer is not called by every sample alike, so the fast rules do not fit; pass method='loop'."
        ) from error
    file.write(place, block, time.perf_counter() - started)


def _counting(progress: Progress | None, total: int, done: int) -> Callable[[], None]:
    def told() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return told
