"""One tile of a Gram matrix on disk: the job it belongs to, how its block is computed, where it is stored, its checksum.

The matrix is a Zarr array (:class:`GramFile`); ``file @ v`` and ``file.operator()`` work with it tile by tile.
:func:`compute_tile` writes the block of a tile as a chunk of the array (for a symmetric matrix also the mirrored block), then a
receipt with the checksums of these chunks. A tile is missing if it has no receipt, or if a checksum does not match. Missing tiles
are NaN in the array; after a crash only they are computed again.
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
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

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
)
from unlazy.kernels.gram_operator import GramOperator
from unlazy.kernels.overlap import layer_overlap_engine, overlap_engine
from unlazy.kernels.tangent_engine import RuleMismatch, TangentKernel
from unlazy.runtime import InputError, StoreError, canonical_json, code_sha256, provenance, require
from unlazy.store import write_file

KERNELS = ("tangent", "overlap", "layer-overlap")
RECEIPTS = "receipts"


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

    def __post_init__(self) -> None:
        require(self.kernel in KERNELS, f"kernel must be one of {', '.join(KERNELS)}; got {self.kernel!r}.")
        refuse_stack(self.model)

    def identity(self) -> dict[str, Any]:
        """What the numbers depend on: code, kernel, options, and checksums of weights and data."""
        data = [self.x] if self.x2 is None else [self.x, self.x2]
        return {
            "kernel": self.kernel,
            "options": json.loads(json.dumps(dict(self.options), sort_keys=True, default=str)),
            "model": _content_checksum([type(self.model).__qualname__, repr(self.model)], self.model.state_dict()),
            "data": [_content_checksum([], inputs) for inputs in data],
            "code": code_sha256(),
        }

    def engine(self) -> Kernel:
        """The kernel in the form that the Gram engine takes (:class:`Kernel`)."""
        with explain_input_errors(self.model, self.x, self.x2):
            if self.kernel == "tangent":
                return TangentKernel(self.model, self.x, self.x2, memory=self.memory, **self.options)
            if self.kernel == "overlap":
                return overlap_engine(self.model, self.x, **self.options)
            return layer_overlap_engine(self.model, self.x, self.x2, **self.options)


def _content_checksum(words: Sequence[str], tensors: Any) -> str:
    """SHA-256 of ``words`` and of every tensor in a tree: its path in the tree, type, shape and bytes."""
    digest = hashlib.sha256("\0".join(words).encode())
    for path, leaf in pytree.tree_flatten_with_path(tensors)[0]:
        digest.update(f"{pytree.keystr(path)} {getattr(leaf, 'dtype', type(leaf))} ".encode())
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)} ".encode())
            digest.update(leaf.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if leaf.numel() else b"")
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


class TileComputer:
    """Computes blocks of a job, with a cache of features as large as the job's memory allows."""

    def __init__(self, job: GramJob, kernel: Kernel, tile: int) -> None:
        self.job, self.kernel = job, kernel
        self.ready = kernel.ready if isinstance(kernel, TangentKernel) else nullcontext
        free = int(USABLE * parse_memory(job.memory, kernel.device)) - kernel.work_bytes
        self.cache = FeatureCache(
            kernel.features, job.x, job.x2, tile, max(2, cached_parts_beside_block(kernel, tile, free))
        )

    def block(self, place: Place) -> Tensor:
        """The block of one tile, ``[*tail, rows, columns]``."""
        shape = (*self.kernel.tail, *self.cache.tile_shape(place))
        out = torch.empty(shape, dtype=self.kernel.dtype, device=self.kernel.device)
        with explain_input_errors(self.job.model, self.job.x, self.job.x2), self.ready():
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
            self._array = zarr.open_array(self.path, mode="r+")
            self.about: dict[str, Any] = dict(self._array.attrs["unlazy"])
        except (FileNotFoundError, KeyError, ValueError) as error:
            raise InputError(f"{self.path} is no Gram matrix that unlazy wrote.") from error
        self.recompute: Callable[[Place], None] | None = None  # writes a tile anew, where model and data are at hand
        self._checked: set[Place] = set()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self._array.shape)

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
        """The finished matrix as a Zarr array, to be read in parts: ``numpy.asarray(file.array()[:100])``."""
        absent = [place for place in self.places() if not self.has_receipt(place)]
        require(not absent, f"{self.path}: {len(absent)} tiles are still to be computed; run the same command again.")
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
        if place not in self._checked:
            if not self._is_complete(place):
                if self.recompute is None:
                    raise StoreError(
                        f"{self.path}: tile {place} is damaged, its checksum does not match. Call gram_file with the same "
                        "model and data: it computes that tile again."
                    )
                self.recompute(place)
            self._checked.add(place)
        return np.asarray(self._array[self._slices(place)])

    def write(self, place: Place, block: Tensor, seconds: float) -> None:
        """Write a tile and its mirror image, then the receipt."""
        chunks = {at: values.cpu().contiguous().numpy() for at, values in self._with_mirror(place, block)}
        try:
            for at, values in chunks.items():
                self._array[self._slices(at)] = values
        except OSError as error:
            raise StoreError(
                f"could not write {self.path}: {error.strerror or error}. Make room and run the same again."
            ) from error
        receipt = {
            "checksums": {f"{at[0]}-{at[1]}": tile_checksum(values) for at, values in chunks.items()},
            "seconds": round(seconds, 4),
            "by": f"{platform.node()} {os.getpid()}",
        }
        write_file(self._receipt_path(place), canonical_json(receipt).encode())

    def has_receipt(self, place: Place) -> bool:
        """Whether a receipt says that the tile was written; its checksums are not compared."""
        return self._receipt_path(place).exists()

    def receipts(self) -> dict[Place, dict[str, Any]]:
        """The receipts by tile: checksums, seconds, and host and process that computed the tile."""
        found = {place: self._read_receipt(place) for place in self.places()}
        return {place: receipt for place, receipt in found.items() if receipt is not None}

    def _with_mirror(self, place: Place, block: Tensor) -> list[tuple[Place, Tensor]]:
        if not self.is_symmetric or place[0] == place[1]:
            return [(place, block)]
        mirrored = block.mT if block.ndim == 2 else block.transpose(0, 1).mT
        return [(place, block), (place[::-1], mirrored)]

    def _slices(self, place: Place) -> tuple[Any, ...]:
        return (..., *(slice(i * self.tile, (i + 1) * self.tile) for i in place))

    def _receipt_path(self, place: Place) -> Path:
        return self.path / RECEIPTS / f"{place[0]}-{place[1]}.json"

    def _read_receipt(self, place: Place) -> dict[str, Any] | None:
        with suppress(FileNotFoundError, json.JSONDecodeError):
            return dict(json.loads(self._receipt_path(place).read_text()))
        return None

    def _is_complete(self, place: Place) -> bool:
        receipt = self._read_receipt(place)
        if receipt is None:
            return False
        for name, checksum in receipt["checksums"].items():
            down, _, across = name.partition("-")
            try:
                values = np.asarray(self._array[self._slices((int(down), int(across)))])
            except (OSError, ValueError):  # a chunk of the wrong length
                return False
            if tile_checksum(values) != checksum:
                return False
        return True


def tile_checksum(values: np.ndarray) -> str:
    """SHA-256 of the numbers of a tile."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def open_or_create(path: str | Path, job: GramJob, plan: Plan, kernel: Kernel) -> GramFile:
    """The file of this job: a new one, or the one at ``path`` if it belongs to the same job; else raises ``InputError``."""
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
    """Create the array under a temporary name and move it to ``path``. If another process was quicker, its file stays."""
    temporary = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.new")
    dtype = str(kernel.dtype).removeprefix("torch.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _zarr().create_array(
            temporary,
            shape=(*kernel.tail, plan.rows, plan.columns),
            chunks=(*kernel.tail, plan.tile, plan.tile),
            dtype=dtype,
            compressors=None,  # mantissas do not compress
            fill_value=float("nan"),
            attributes={"unlazy": {"job": identity, "provenance": provenance(dtype, kernel.device.type)}},
        )
        (temporary / RECEIPTS).mkdir()
        temporary.rename(path)
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


def compute_tile(computer: TileComputer, file: GramFile, place: Place) -> None:
    """Compute one tile and write it to the file, with its receipt."""
    started = time.perf_counter()
    try:
        block = computer.block(place)
    except RuleMismatch as error:
        raise InputError(
            "a layer is not called by every sample alike, so the fast rules do not fit; pass method='loop'."
        ) from error
    file.write(place, block, time.perf_counter() - started)
