"""Spectra of a run's kernels and their alignment with the targets, at every stored step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import StoreError
from unlazy.studio.answers import BadRequest
from unlazy.studio.probe_set import probe_set_of
from unlazy.studio.result_cache import ResultCache
from unlazy.studio.run_reader import MOST_STEPS, RunReader, StoredArray, even_indices

MOST_POINTS = 600  # rows of a kernel whose eigenvalues are computed; larger kernels are thinned
OPERATIONS = 4e9  # MOST_POINTS cubed, summed over the steps of a spectrum: about a second
EIGENVALUES = 50


def _kernels(
    reader: RunReader, quantity: str, member: int
) -> Iterator[tuple[int, StoredArray, NDArray[np.float64], NDArray[np.float64] | None]]:
    """Yield step, file, kernel and targets, at as many steps as ``OPERATIONS`` allows; large kernels are thinned."""
    side = min(MOST_POINTS, _kernel_size(reader, quantity, member))
    for step in reader.thin_steps(quantity, member, most=int(np.clip(OPERATIONS / side**3, 2, MOST_STEPS))):
        try:
            stored = reader.find_array(quantity, step, member)
            kernel = stored.read()
        except (StoreError, ValueError):
            continue  # the run page names files that cannot be read
        if kernel.ndim != 2 or kernel.shape[0] != kernel.shape[1]:
            raise BadRequest(f"{quantity} is not square; it has no spectrum.")
        rows = even_indices(len(kernel), MOST_POINTS)
        targets = probe_set_of(reader).targets(len(kernel), quantity)
        thinned = kernel[np.ix_(rows, rows)].astype(np.float64)
        yield step, stored, thinned, None if targets is None else targets[rows]


def spectrum_json(reader: RunReader, quantity: str, member: int, cache: ResultCache) -> dict[str, Any]:
    """Leading eigenvalues over the trace and alignment with the targets at every step, as JSON.

    ``cache``: eigenvalues by file, so that an unchanged file is decomposed once.
    """
    steps, values, alignment = [], [], []
    for step, stored, kernel, targets in _kernels(reader, quantity, member):
        try:
            values.append(cache(stored.stamp(), partial(eigenvalues, kernel)))
        except np.linalg.LinAlgError:
            continue
        alignment.append(None if targets is None else centred_alignment(kernel, targets))
        steps.append(step)
    aligned = alignment if any(value is not None for value in alignment) else None
    return {"steps": steps, "values": values, "alignment": aligned}


def spectra(reader: RunReader, quantity: str, member: int) -> tuple[list[int], NDArray[np.float64]]:
    """Steps ``[T]`` and leading eigenvalues over the trace ``[T, rank]`` of a kernel."""
    found = spectrum_json(reader, quantity, member, ResultCache(1))
    return found["steps"], np.array(found["values"], np.float64)


def alignments(reader: RunReader, quantity: str, member: int) -> tuple[list[int], list[float | None]]:
    """Steps and centred alignment of a kernel with the targets; computes no eigenvalues."""
    found = [
        (step, None if targets is None else centred_alignment(kernel, targets))
        for step, _, kernel, targets in _kernels(reader, quantity, member)
    ]
    return [step for step, _ in found], [value for _, value in found]


def _kernel_size(reader: RunReader, quantity: str, member: int) -> int:
    """Number of rows of a kernel, from the header of its last file; ``MOST_POINTS`` if that cannot be read."""
    last = reader.thin_steps(quantity, member)[-1]
    try:
        shape, _ = reader.find_array(quantity, last, member).shape()
    except StoreError:
        return MOST_POINTS
    return max(1, shape[-1]) if shape else 1


def eigenvalues(kernel: NDArray[np.float64]) -> list[float]:
    """The leading eigenvalues of a kernel over its trace, largest first."""
    finite = np.where(np.isfinite(kernel), kernel, 0)
    values = np.linalg.eigvalsh((finite + finite.T) / 2)[::-1][:EIGENVALUES]
    trace = float(np.trace(finite))
    return [float(f"{value:.6g}") for value in values / (trace if trace > 0 else 1.0)]


def centred_alignment(kernel: NDArray[np.float64], targets: NDArray[np.float64]) -> float | None:
    """Cosine between the centred kernel and the centred kernel of the targets."""
    finite = np.where(np.isfinite(kernel), kernel, 0)
    centred = finite - finite.mean(0) - finite.mean(1)[:, None] + finite.mean()
    y = targets - targets.mean(0)
    norm = float(np.linalg.norm(centred) * np.linalg.norm(y.T @ y))
    return float(np.einsum("ij,io,jo->", centred, y, y)) / norm if norm > 0 else None
