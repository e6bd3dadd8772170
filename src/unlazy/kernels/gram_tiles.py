"""One tile of a Gram matrix on disk: the job it belongs to, how its block is computed, where it is stored, its checksum.

The matrix is a Zarr array (:class:`GramFile`); ``file @ v`` and ``file.operator()`` work with it tile by tile.
:func:`compute_tile` writes the block of a tile as a chunk of the array (for a symmetric matrix also the mirrored block), then a
receipt that names the job, the tile and the checksums of these chunks. A tile is missing if it has no receipt, the receipt of
another job or tile, or a checksum that does not match. Missing tiles are NaN in the array; after a crash only they are computed
again. Every chunk also ends with a CRC-32C (a codec of the Zarr format), so that any reader of the format notices a flipped bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unlazy.kernels.capture import Inputs, explain_input_errors
from unlazy.kernels.gated import refuse_stack
from unlazy.kernels.gram import (
    USABLE,
    FeatureCache,
    Kernel,
    Place,
    Plan,
    all_places,
    cached_parts_beside_block,
    parse_memory,
    ready_context,
)
from unlazy.kernels.gram_identity import different_parts, job_identity
from unlazy.kernels.gram_operator import GramOperator
from unlazy.kernels.gram_workers import Devices, split_kernel
from unlazy.kernels.overlap import layer_overlap_engine, overlap_engine
from unlazy.kernels.tangent_engine import RuleMismatch, TangentKernel
from unlazy.runtime import InputError, StoreError, canonical_json, provenance, require, short_hash
from unlazy.store import flush_folder, write_file

KERNELS = ("tangent", "overlap", "layer-overlap")
RECEIPTS = "receipts"
REPAIR = "Call gram_file with the same model and data: it computes that tile again."
FORMAT = 2  # 1: receipts without job and tile, chunks without checksums of their own


# --- what is computed --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GramJob:
    """A kernel of a model on data: everything a process needs to compute any tile of the matrix."""

    kernel: str
    model: nn.Module
    x: Inputs
    x2: Inputs | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    memory: str | int | None = None  # of one process
    devices: Devices = None  # of its workers

    def __post_init__(self) -> None:
        require(self.kernel in KERNELS, f"kernel must be one of {', '.join(KERNELS)}; got {self.kernel!r}.")
        refuse_stack(self.model)

    def identity(self, engine: Kernel) -> dict[str, Any]:
        """What the numbers depend on; see :mod:`unlazy.kernels.gram_identity`."""
        with explain_input_errors(self.model, self.x, self.x2):
            return job_identity(self.kernel, self.model, self.data, self.options, engine)

    @property
    def data(self) -> list[Inputs]:
        """The rows, and the columns of a cross kernel."""
        return [self.x] if self.x2 is None else [self.x, self.x2]

    def engine(self) -> Kernel:
        """The kernel in the form that the Gram engine takes (:class:`Kernel`)."""
        with explain_input_errors(self.model, self.x, self.x2):
            return split_kernel(self._make_engine, self.model, self.x, self.x2, self.memory, self.devices)

    def _make_engine(self, model: nn.Module, x: Inputs, x2: Inputs | None, memory: str | int | None) -> Kernel:
        if self.kernel == "tangent":
            return TangentKernel(model, x, x2, memory=memory, **self.options)
        if self.kernel == "overlap":
            return overlap_engine(model, x, **self.options)
        return layer_overlap_engine(model, x, x2, **self.options)


class TileComputer:
    """Computes blocks of a job, with a cache of features as large as the job's memory allows."""

    def __init__(self, job: GramJob, kernel: Kernel, tile: int) -> None:
        self.job, self.kernel = job, kernel
        free = int(USABLE * parse_memory(job.memory, kernel.device)) - kernel.work_bytes
        self.cache = FeatureCache(
            kernel.features, job.x, job.x2, tile, max(2, cached_parts_beside_block(kernel, tile, free))
        )

    def block(self, place: Place) -> Tensor:
        """The block of one tile, ``[*tail, rows, columns]``."""
        shape = (*self.kernel.tail, *self.cache.tile_shape(place))
        out = torch.empty(shape, dtype=self.kernel.dtype, device=self.kernel.device)
        with explain_input_errors(self.job.model, self.job.x, self.job.x2), ready_context(self.kernel):
            left, right, same = self.cache.pair(place)
            self.kernel.block(out, left, right, same=same)
        return out


# --- the file ----------------------------------------------------------------------------------------------


class GramFile:
    """A Gram matrix on disk, finished or not: ``[n, m]``, or ``[k, k, n, m]`` where every pair has a matrix of outputs."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        zarr = _zarr()
        try:
            with zarr.config.set({"array.write_empty_chunks": True}):  # a tile of NaN is a tile, not a missing one
                self._array = zarr.open_array(self.path, mode="r+")
            self.about: dict[str, Any] = dict(self._array.attrs["unlazy"])
        except (FileNotFoundError, KeyError, ValueError) as error:
            raise InputError(f"{self.path} is no Gram matrix that unlazy wrote.") from error
        self.recompute: Callable[[Place], None] | None = None  # writes a tile anew, where model and data are at hand
        self._checked: set[Place] = set()
        self._job = short_hash(self.about["job"])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self._array.shape)

    @property
    def format(self) -> int:
        """Version of the file: what its receipts name."""
        return int(self.about.get("format", 1))

    @property
    def tile(self) -> int:
        """Samples on a side of a tile."""
        return int(self._array.chunks[-1])

    @property
    def is_symmetric(self) -> bool:
        """Whether rows and columns are the same samples; then only tiles on and above the diagonal are computed."""
        return len(self.about["job"]["data"]) == 1

    def places(self) -> list[Place]:
        """All tiles, row by row; of a symmetric matrix those on and above the diagonal."""
        rows, columns = self.shape[-2:]
        return all_places(rows, columns, self.tile, symmetric=self.is_symmetric)

    def missing_places(self) -> list[Place]:
        """Tiles that are still to be computed: those without a receipt, or with a checksum that does not match."""
        return [place for place in self.places() if not self._is_complete(place)]

    def array(self) -> Any:
        """The finished matrix as a Zarr array, to be read in parts: ``numpy.asarray(file.array()[:100])``.

        Raises ``StoreError`` if a chunk is not on disk. Reading a chunk with a flipped bit raises zarr's ``ValueError``.
        """
        absent = [place for place in self.places() if not self.has_receipt(place)]
        require(not absent, f"{self.path}: {len(absent)} tiles are still to be computed; run the same command again.")
        lost = [place for place in self.places() if not self._has_chunks(place)]
        if lost:
            raise StoreError(
                f"{self.path}: the numbers of {len(lost)} tiles are not on disk, such as {lost[0]}. {REPAIR}"
            )
        return _zarr().open_array(self.path, mode="r")

    def operator(self, memory: str | int | None = None) -> GramOperator:
        """The finished matrix as an operator: ``@``, ``top_eigenpairs``, ``fit_ridge``, ``alignment``, ``trace`` and more.

        Tiles are read one after the other within ``memory`` (``"2GB"``, default half of what is free). The first time a tile is
        read its checksum is compared. A damaged tile is computed again if this file comes from ``gram_file``; else it raises
        ``StoreError``.
        """
        self.array()  # raises if tiles are missing
        dtype = getattr(torch, str(self._array.dtype))
        return GramOperator(
            self.shape, self.tile, self.read_tile, dtype=dtype, symmetric=self.is_symmetric, memory=memory
        )

    def __matmul__(self, v: Tensor | np.ndarray) -> Tensor | np.ndarray:
        """K v for a vector or columns, tile by tile; ``operator`` for more products, or a memory cap."""
        return self.operator() @ v

    def read_tile(self, place: Place) -> np.ndarray:
        """The block of a tile, with its checksum compared the first time; see :meth:`operator`."""
        if place in self._checked and self._has_chunks(place):
            with suppress(ValueError):  # of the checksum that every chunk ends with: damaged since then
                return self._read(place)
        if not self._is_complete(place):
            if self.recompute is None:
                raise StoreError(f"{self.path}: tile {place} is damaged, its checksum does not match. {REPAIR}")
            self.recompute(place)
        self._checked.add(place)
        return self._read(place)

    def _read(self, at: Place) -> np.ndarray:
        return np.asarray(self._array[self._slices(at)])

    def write(self, place: Place, block: Tensor, seconds: float, by: str | None = None) -> None:
        """Write a tile and its mirror image, then the receipt; each is on disk before the next begins.

        ``by``: host and process that computed it, if it was not this one.
        """
        chunks = {at: values.cpu().contiguous().numpy() for at, values in self._with_mirror(place, block)}
        try:
            for at, values in chunks.items():
                self._array[self._slices(at)] = values
                _flush_chunk(self._chunk_path(at), self.path)
        except OSError as error:
            raise StoreError(
                f"could not write {self.path}: {error.strerror or error}. Make room and run the same again."
            ) from error
        receipt = {
            "job": self._job,
            "tile": list(place),
            "checksums": {_chunk_name(at): tile_checksum(values) for at, values in chunks.items()},
            "seconds": round(seconds, 4),
            "by": by or this_process(),
        }
        write_file(self._receipt_path(place), canonical_json(receipt).encode())

    def has_receipt(self, place: Place) -> bool:
        """Whether a receipt says that the tile was written; its checksums are not compared."""
        return self._receipt_path(place).exists()

    def drop_receipts(self, places: Iterable[Place]) -> None:
        """Delete the receipts of these tiles, so that they count as missing."""
        for place in places:
            self._receipt_path(place).unlink(missing_ok=True)

    def receipts(self) -> dict[Place, dict[str, Any]]:
        """The receipts by tile: checksums, seconds, and host and process that computed the tile."""
        found = {place: self._read_receipt(place) for place in self.places()}
        return {place: receipt for place, receipt in found.items() if receipt is not None}

    def _with_mirror(self, place: Place, block: Tensor) -> list[tuple[Place, Tensor]]:
        mirrored = block.mT if block.ndim == 2 else block.transpose(0, 1).mT
        return list(zip(self._chunk_places(place), (block, mirrored), strict=False))

    def _chunk_places(self, place: Place) -> list[Place]:
        """Where the chunks of a tile lie: its own place, and in a symmetric matrix its mirror image."""
        return [place, place[::-1]] if self.is_symmetric and place[0] != place[1] else [place]

    def _chunk_path(self, at: Place) -> Path:
        leading = (0,) * (len(self.shape) - 2)  # one chunk holds all outputs
        return self.path / self._array.metadata.encode_chunk_key((*leading, *at))

    def _has_chunks(self, place: Place) -> bool:
        return all(self._chunk_path(at).exists() for at in self._chunk_places(place))

    def _slices(self, place: Place) -> tuple[Any, ...]:
        return (..., *(slice(i * self.tile, (i + 1) * self.tile) for i in place))

    def _receipt_path(self, place: Place) -> Path:
        return self.path / RECEIPTS / f"{place[0]}-{place[1]}.json"

    def _read_receipt(self, place: Place) -> dict[str, Any] | None:
        """The receipt of a tile; ``None`` if there is none, or if it is damaged or of another job or tile."""
        try:
            receipt = json.loads(self._receipt_path(place).read_text())
            names = set(receipt["checksums"])
            mine = (receipt["job"], receipt["tile"]) == (self._job, list(place)) if self.format > 1 else True
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return receipt if mine and names == {_chunk_name(at) for at in self._chunk_places(place)} else None

    def _is_complete(self, place: Place) -> bool:
        receipt = self._read_receipt(place)
        if receipt is None or not self._has_chunks(place):
            return False
        for at in self._chunk_places(place):
            try:
                values = self._read(at)
            except (OSError, ValueError):  # a chunk of the wrong length, or with a flipped bit
                return False
            if tile_checksum(values) != receipt["checksums"][_chunk_name(at)]:
                return False
        return True


def _chunk_name(at: Place) -> str:
    return f"{at[0]}-{at[1]}"


def _flush_chunk(path: Path, root: Path) -> None:
    """Flush a chunk and the folders down to it to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    for folder in path.parents[: len(path.relative_to(root).parts)]:
        flush_folder(folder)


def tile_checksum(values: np.ndarray) -> str:
    """SHA-256 of the numbers of a tile."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def open_or_create(path: str | Path, job: GramJob, plan: Plan, kernel: Kernel) -> GramFile:
    """The file of this job: a new one, or the one at ``path`` if it belongs to the same job; else raises ``InputError``."""
    path, identity = Path(path).absolute(), job.identity(kernel)
    if not path.exists():
        _create(path, identity, plan, kernel)
    found = GramFile(path)
    differs = different_parts(found.about["job"], identity)
    if differs:
        raise InputError(
            f"{path} was begun for another kernel (other {', '.join(differs)}){_explain_difference(differs)}; "
            "choose another path or delete it."
        )
    return found


def _explain_difference(differs: Sequence[str]) -> str:
    """In words, where the names of what differs do not say it."""
    if set(differs) <= {"source", "function"}:
        return ": the weights are the same, but the code of the model was changed, so tiles of two functions would be mixed"
    return ""


def _create(path: Path, identity: Mapping[str, Any], plan: Plan, kernel: Kernel) -> None:
    """Create the array under a temporary name and move it to ``path``. If another process was quicker, its file stays."""
    temporary = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.new")
    dtype = str(kernel.dtype).removeprefix("torch.")
    about = {"format": FORMAT, "job": identity, "provenance": provenance(dtype, kernel.device.type)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _zarr().create_array(
            temporary,
            shape=(*kernel.tail, plan.rows, plan.columns),
            chunks=(*kernel.tail, plan.tile, plan.tile),
            dtype=dtype,
            compressors=[{"name": "crc32c"}],  # no compression: mantissas do not compress
            fill_value=float("nan"),
            attributes={"unlazy": about},
        )
        (temporary / RECEIPTS).mkdir()
        temporary.rename(path)
        flush_folder(path.parent)
    except OSError as error:
        if not path.exists():
            raise StoreError(f"could not make {path}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise InputError("Gram matrices on disk need zarr: pip install 'unlazy[cluster]'.") from error
    return zarr


def this_process() -> str:
    """Host and process, as receipts name them."""
    return f"{platform.node()} {os.getpid()}"


def compute_tile(computer: TileComputer, file: GramFile, place: Place) -> None:
    """Compute one tile and write it to the file, with its receipt."""
    started = time.perf_counter()
    block = compute_block(computer, place)
    file.write(place, block, time.perf_counter() - started)


def compute_block(computer: TileComputer, place: Place) -> Tensor:
    """The block of one tile. Raises ``InputError`` if the rules of the layers do not fit its samples."""
    try:
        return computer.block(place)
    except RuleMismatch as error:
        raise InputError(
            "a layer is not called by every sample alike, so the fast rules do not fit; pass method='loop'."
        ) from error
