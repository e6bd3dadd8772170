"""Compares the probe sets of two runs: whether two kernels may be subtracted, and which samples are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import StoreError, short_hash
from unlazy.studio.probe_set import inputs_of, probe_set_of
from unlazy.studio.run_reader import RunReader

NO_NAMES = ("", "probe")  # data of a scope has no name


@dataclass(frozen=True)
class KernelSamples:
    """``same``: whether row i of two kernels is the same sample; ``None`` where the runs do not tell. ``why``: a sentence."""

    same: bool | None
    why: str


def compare_kernel_samples(first: RunReader, second: RunReader, quantity: str) -> KernelSamples:
    """Whether a kernel of two runs is over the same samples: by stored inputs if both have them, else by data fingerprints."""
    if first.folder == second.folder:
        return KernelSamples(True, "Both are members of one run, measured on the same samples.")
    sizes = [_kernel_size(run, quantity) for run in (first, second)]
    if sizes[0] != sizes[1]:
        return KernelSamples(False, f"One kernel is over {sizes[0]} samples, the other over {sizes[1]}.")
    inputs = [_kernel_inputs(run, quantity, sizes[0]) for run in (first, second)]
    if inputs[0] is not None and inputs[1] is not None:
        return _compare_inputs(inputs[0], inputs[1])
    return _compare_fingerprints(_SampleFacts.from_header(first, quantity), _SampleFacts.from_header(second, quantity))


@dataclass(frozen=True)
class SampleMatch:
    """``same``: whether two runs have the same samples; ``None`` where they do not tell.

    ``order``: for every sample of the first run its index in the second; ``None`` where the indices are equal.
    """

    same: bool | None
    order: list[int] | None
    why: str


def match_samples(first: RunReader, second: RunReader) -> SampleMatch:
    """Match the samples of two runs by their inputs, else by data fingerprints; marks on the page use the order."""
    if first.folder == second.folder:
        return SampleMatch(True, None, "Both are members of one run, over the same samples.")
    other = SampleMatch(False, None, "The two runs have different samples: a mark belongs to its own run.")
    inputs = [None if x is None else x.astype(np.float32) for x in map(inputs_of, (first, second))]
    if inputs[0] is not None and inputs[1] is not None:
        order = _matching_order(inputs[0], inputs[1])
        if order is None:
            return other
        if order == sorted(order):
            return SampleMatch(True, None, "Both runs have the same samples: they store the same inputs.")
        return SampleMatch(True, order, "Both runs have the same samples, in another order: a mark follows its sample.")
    sizes = {size for size in (probe_set_of(first).n, probe_set_of(second).n) if size is not None}
    found = _compare_fingerprints(
        _SampleFacts.from_header(first, "probe_x"), _SampleFacts.from_header(second, "probe_x")
    )
    if found.same is False or len(sizes) > 1:
        return other
    if found.same:
        return SampleMatch(True, None, "Both runs have the same samples: their data have the same fingerprint.")
    return SampleMatch(
        None, None, "The runs do not say whether they have the same samples: a mark has the same index in both."
    )


def sample_identity(reader: RunReader, maps: Sequence[str]) -> str:
    """A hash of everything that decides a comparison of samples: two runs with one hash compare alike with any third."""
    inputs = inputs_of(reader)
    known = [
        None
        if inputs is None
        else [list(inputs.shape), hashlib.sha256((inputs.astype(np.float32) + 0.0).tobytes()).hexdigest()],
        probe_set_of(reader).n,
        [[name, _kernel_size(reader, name)] for name in maps],
        [repr(_SampleFacts.from_header(reader, name)) for name in ("probe_x", *maps)],
    ]
    return short_hash(known)


def _matching_order(first: NDArray[np.float32], second: NDArray[np.float32]) -> list[int] | None:
    """The index in ``second`` of every row of ``first``, equal rows in turn; ``None`` unless both have the same rows."""
    if first.shape != second.shape:
        return None
    places: dict[bytes, list[int]] = {}
    for place, row in enumerate(second + 0.0):  # turns -0 into 0
        places.setdefault(row.tobytes(), []).append(place)
    order = []
    for row in first + 0.0:
        waiting = places.get(row.tobytes())
        if not waiting:
            return None
        order.append(waiting.pop(0))
    return order


def _kernel_size(reader: RunReader, quantity: str) -> int:
    steps = reader.steps(quantity, reader.scene_member)
    if not steps:
        raise StoreError(f"{reader.key} has no {quantity!r}.")
    shape, _ = reader.find_array(quantity, steps[0], reader.scene_member or 0).shape()
    return shape[-1]


def _kernel_inputs(reader: RunReader, quantity: str, size: int) -> NDArray[np.float32] | None:
    """The input of every row of a kernel; ``None`` where the run does not store inputs or does not say which rows they are."""
    x, probe_set = inputs_of(reader), probe_set_of(reader)
    if x is None:
        return None
    rows = None if len(x) == size and quantity not in probe_set.rows else probe_set.rows_of_kernel(size, quantity)
    if rows is None and len(x) != size:
        return None
    return (x if rows is None else x[rows]).astype(np.float32)


def _compare_inputs(first: NDArray[np.float32], second: NDArray[np.float32]) -> KernelSamples:
    if first.shape != second.shape:
        shapes = " and ".join(" x ".join(map(str, one.shape[1:])) for one in (first, second))
        return KernelSamples(
            False, f"The two runs were measured on different samples: their inputs are {shapes} numbers."
        )
    differing = int((first != second).reshape(len(first), -1).any(1).sum())
    if differing == 0:
        return KernelSamples(True, "Both kernels are over the same samples: the runs store the same inputs.")
    reordered = _matching_order(first, second) is not None
    on = "the same samples in another order" if reordered else "different samples"
    return KernelSamples(
        False,
        f"The two runs were measured on {on}: {differing} of {len(first)} rows have other inputs, "
        "so that the kernels cannot be subtracted entry by entry.",
    )


@dataclass(frozen=True)
class _SampleFacts:
    """What the header of a run says about the samples of a kernel."""

    name: str
    fingerprint: str | None
    rows: tuple[int, ...]
    batches: tuple[str, ...]  # fingerprints of samples that some measures were given instead of the data

    @classmethod
    def from_header(cls, reader: RunReader, quantity: str) -> _SampleFacts:
        """Read name, fingerprint, rows and batches from the header of a run."""
        data, recipe = reader.header.get("data"), reader.header.get("recipe")
        data = data if isinstance(data, Mapping) else {}
        measures = recipe.get("measures") if isinstance(recipe, Mapping) else None
        named: list[Any] = measures if isinstance(measures, list) else []
        batches = sorted({str(one["batch"]) for one in named if isinstance(one, Mapping) and one.get("batch")})
        fingerprint = data.get("fingerprint")
        return cls(
            str(data.get("name") or ""),
            str(fingerprint) if fingerprint else None,
            tuple(probe_set_of(reader).rows.get(quantity, ())),
            tuple(batches),
        )


def _compare_fingerprints(first: _SampleFacts, second: _SampleFacts) -> KernelSamples:
    known = first.fingerprint is not None and second.fingerprint is not None
    equal = known and first.fingerprint == second.fingerprint
    if equal and first.batches == second.batches:
        if first.rows != second.rows:
            return KernelSamples(False, "The two runs were measured on different rows of the same data.")
        return KernelSamples(True, "Both kernels are over the same samples: the runs' data have the same fingerprint.")
    if not equal and first.name != second.name and {first.name, second.name}.isdisjoint(NO_NAMES):
        return KernelSamples(False, f"The two runs were measured on different data: {first.name} and {second.name}.")
    if not known:
        return KernelSamples(
            None,
            "The runs do not say on which samples they were measured. Unless these are the same, in the same order, this "
            "difference means nothing.",
        )
    if not equal and set(first.batches).isdisjoint(second.batches):
        return KernelSamples(
            False,
            "The two runs were measured on different data: inputs, targets or both differ, and the runs do not store "
            "inputs that would show the same samples.",
        )
    return KernelSamples(
        None,
        "The runs were measured on several sets of samples, not all of them the same, and do not say which kernel belongs to "
        "which. Unless both used the same one, this difference means nothing.",
    )
