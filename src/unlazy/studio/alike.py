"""Whether two runs were measured on the same samples: what a difference of kernels and a mark on both mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import StoreError
from unlazy.studio.openrun import OpenRun
from unlazy.studio.probe import inputs_of, probe_of

NO_NAMES = ("", "probe")  # a scope's data has no name of its own


@dataclass(frozen=True)
class Alike:
    """``same``: whether row i of one kernel is the sample of row i of the other; ``None`` where the runs do not tell."""

    same: bool | None
    why: str


def alike(first: OpenRun, second: OpenRun, quantity: str) -> Alike:
    """What two runs tell of the samples of a kernel: by their inputs where both keep them, else by their data's fingerprints."""
    if first.folder == second.folder:
        return Alike(True, "Both are members of one run, measured on the same samples.")
    sizes = [_size(run, quantity) for run in (first, second)]
    if sizes[0] != sizes[1]:
        return Alike(False, f"One kernel is over {sizes[0]} samples, the other over {sizes[1]}.")
    inputs = [_inputs(run, quantity, sizes[0]) for run in (first, second)]
    if inputs[0] is not None and inputs[1] is not None:
        return _by_inputs(inputs[0], inputs[1])
    return _by_fingerprint(_Told.of(first, quantity), _Told.of(second, quantity))


@dataclass(frozen=True)
class Matched:
    """``same``: whether two runs hold the same samples; ``None`` where they do not tell.

    ``order``: for every sample of the first run its number in the second; ``None`` where the numbers are the same.
    """

    same: bool | None
    order: list[int] | None
    why: str


def matched(first: OpenRun, second: OpenRun) -> Matched:
    """Which samples of two runs are the same ones, so that a mark stands for one sample in both."""
    if first.folder == second.folder:
        return Matched(True, None, "Both are members of one run, over the same samples.")
    other = Matched(False, None, "The two runs hold different samples: a mark belongs to its own run.")
    inputs = [None if x is None else x.astype(np.float32) for x in map(inputs_of, (first, second))]
    if inputs[0] is not None and inputs[1] is not None:
        order = _order(inputs[0], inputs[1])
        if order is None:
            return other
        if order == sorted(order):
            return Matched(True, None, "Both runs hold the same samples: they keep the same inputs.")
        return Matched(True, order, "Both runs hold the same samples, in another order: a mark follows its sample.")
    sizes = {size for size in (probe_of(first).n, probe_of(second).n) if size is not None}
    told = _by_fingerprint(_Told.of(first, "probe_x"), _Told.of(second, "probe_x"))
    if told.same is False or len(sizes) > 1:
        return other
    if told.same:
        return Matched(True, None, "Both runs hold the same samples: their data have the same fingerprint.")
    return Matched(None, None, "The runs do not say whether they hold the same samples: a mark is a number in both.")


def _order(first: NDArray[np.float32], second: NDArray[np.float32]) -> list[int] | None:
    """The place in ``second`` of every row of ``first``, equal rows in turn; ``None`` unless both hold the same rows."""
    if first.shape != second.shape:
        return None
    places: dict[bytes, list[int]] = {}
    for place, row in enumerate(second + 0.0):  # so that -0 is 0
        places.setdefault(row.tobytes(), []).append(place)
    order = []
    for row in first + 0.0:
        waiting = places.get(row.tobytes())
        if not waiting:
            return None
        order.append(waiting.pop(0))
    return order


def _size(opened: OpenRun, quantity: str) -> int:
    steps = opened.steps(quantity, opened.own_member)
    if not steps:
        raise StoreError(f"{opened.key} has no {quantity!r}.")
    shape, _ = opened.stored(quantity, steps[0], opened.own_member or 0).shape()
    return shape[-1]


def _inputs(opened: OpenRun, quantity: str, size: int) -> NDArray[np.float32] | None:
    """The input of every row, as far as the run keeps inputs and says which rows they are."""
    x, probe = inputs_of(opened), probe_of(opened)
    if x is None:
        return None
    rows = None if len(x) == size and quantity not in probe.rows else probe.picked(size, quantity)
    if rows is None and len(x) != size:
        return None
    return (x if rows is None else x[rows]).astype(np.float32)


def _by_inputs(first: NDArray[np.float32], second: NDArray[np.float32]) -> Alike:
    if first.shape != second.shape:
        shapes = " and ".join(" x ".join(map(str, one.shape[1:])) for one in (first, second))
        return Alike(False, f"The two runs were measured on different samples: their inputs are {shapes} numbers.")
    differing = int((first != second).reshape(len(first), -1).any(1).sum())
    if differing == 0:
        return Alike(True, "Both kernels are over the same samples: the runs keep the same inputs.")
    turned = _order(first, second) is not None
    on = "the same samples in another order" if turned else "different samples"
    return Alike(
        False,
        f"The two runs were measured on {on}: {differing} of {len(first)} rows have other inputs, "
        "so entry by entry there is nothing to subtract.",
    )


@dataclass(frozen=True)
class _Told:
    """What a header says of the samples of a kernel."""

    name: str
    fingerprint: str | None
    rows: tuple[int, ...]
    batches: frozenset[str]  # fingerprints of samples that some measures were given instead of the data

    @classmethod
    def of(cls, opened: OpenRun, quantity: str) -> _Told:
        data, recipe = opened.header.get("data"), opened.header.get("recipe")
        data = data if isinstance(data, Mapping) else {}
        measures = recipe.get("measures") if isinstance(recipe, Mapping) else None
        named: list[Any] = measures if isinstance(measures, list) else []
        batches = frozenset(str(one["batch"]) for one in named if isinstance(one, Mapping) and one.get("batch"))
        fingerprint = data.get("fingerprint")
        return cls(
            str(data.get("name") or ""),
            str(fingerprint) if fingerprint else None,
            tuple(probe_of(opened).rows.get(quantity, ())),
            batches,
        )


def _by_fingerprint(first: _Told, second: _Told) -> Alike:
    known = first.fingerprint is not None and second.fingerprint is not None
    equal = known and first.fingerprint == second.fingerprint
    if equal and first.batches == second.batches:
        if first.rows != second.rows:
            return Alike(False, "The two runs were measured on different rows of the same data.")
        return Alike(True, "Both kernels are over the same samples: the runs' data have the same fingerprint.")
    if not equal and first.name != second.name and {first.name, second.name}.isdisjoint(NO_NAMES):
        return Alike(False, f"The two runs were measured on different data: {first.name} and {second.name}.")
    if not known:
        return Alike(
            None,
            "The runs do not say on which samples they were measured. Unless these are the same, in the same order, this "
            "difference means nothing.",
        )
    if not equal and not first.batches & second.batches:
        return Alike(
            False,
            "The two runs were measured on different data: inputs, targets or both differ, and no inputs are kept that "
            "would show the same samples.",
        )
    return Alike(
        None,
        "The runs were measured on several sets of samples, not all of them the same, and do not say which kernel belongs to "
        "which. Unless both used the same one, this difference means nothing.",
    )
