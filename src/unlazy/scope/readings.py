"""The numbers a verdict rests on: each measure at the end of training with its interval over the probe's samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy.kernels.compare import centered_alignment
from unlazy.scope.history import History

MEASURES = {
    "linearisation_error": "distance from the network's tangent at the start, relative to the distance gone",
    "tangent_distance": "1 - cosine between the tangent kernels at the start and now",
    "tangent_change": "relative change of the trace-normalised tangent kernel",
    "gate_flips": "share of gates that opened or closed",
    "alignment_gain": "gain of centred alignment between tangent kernel and targets",
    "parameter_motion": "distance of the parameters from their start, relative to their size there",
}
"""What a verdict looks at, and what each one is."""
RESAMPLES = 200
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Reading:
    """A measure at the last measurement; ``interval``: 95 %, over resampled probe samples, where there are rows to resample."""

    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Readings:
    """What was measured, ready to be judged. ``losses``: first, lowest and last; ``curves``: measures by step."""

    measures: Mapping[str, Reading]
    losses: tuple[float, float, float] | None
    samples: int
    measurements: int
    curves: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the inverse of ``from_dict``."""
        return {
            "measures": {name: [one.value, one.interval and list(one.interval)] for name, one in self.measures.items()},
            "losses": None if self.losses is None else [one if math.isfinite(one) else None for one in self.losses],
            "samples": self.samples,
            "measurements": self.measurements,
            "curves": {name: list(map(list, curve.items())) for name, curve in self.curves.items()},
            "groups": {name: dict(about) for name, about in self.groups.items()},
            "left_out": dict(self.left_out),
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Readings:
        measures = {
            name: Reading(value, None if interval is None else (interval[0], interval[1]))
            for name, (value, interval) in plain["measures"].items()
        }
        losses = plain["losses"] and tuple(math.nan if one is None else one for one in plain["losses"])
        curves = {name: {int(step): value for step, value in curve} for name, curve in plain["curves"].items()}
        rest = {name: plain[name] for name in ("samples", "measurements", "groups", "left_out")}
        return cls(measures, losses, curves=curves, notes=tuple(plain.get("notes", ())), **rest)


def readings(history: History) -> Readings:
    """Read a scope's history at its last measurement."""
    found = {name: reading for name in MEASURES if (reading := _READERS[name](history)) is not None}
    losses = list(history.scalars.get("loss", {}).values())
    outputs = history.array("output")
    return Readings(
        {name: reading for name, reading in found.items() if np.isfinite(reading.value)},
        (losses[0], float(np.nanmin(losses)), losses[-1]) if losses and np.isfinite(losses[0]) else None,
        0 if outputs is None else len(outputs),
        len(history.steps),
        {name: curve for name in MEASURES if (curve := _curve(history, name))},
        group_view(history),
        dict(history.left_out),
        tuple(history.notes),
    )


# --- groups --------------------------------------------------------------------------------------------------


def group_view(history: History) -> dict[str, dict[str, float]]:
    """Each group's share of the samples, of kernel mass and of active paths, at the first and at the last measurement.

    A share of the mass beside the share of the samples (``kernel_share``: of those the kernel was taken on, where not all) says
    who gets the attention of training. ``paths``: mean logarithm of the number of active paths, against all samples' mean.
    """
    everyone = {number for inside in history.groups.values() for number in inside}
    samples = len(everyone) if history.targets is None else len(history.targets)
    rows = set(history.rows.get("tangent", ()))
    view: dict[str, dict[str, float]] = {}
    for group, inside in history.groups.items():
        about = {"share": len(inside) / samples}
        if rows:
            about["kernel_share"] = len(rows.intersection(inside)) / len(rows)
        for name, key in (("mass", f"tangent_mass_{group}"), ("alignment", f"alignment_{group}")):
            about |= _both_ends(name, history, key)
        for end in ("first", "last"):
            mine, all_samples = (getattr(history, end)(name) for name in (f"paths_{group}", "paths"))
            if mine is not None and all_samples is not None:
                about[f"paths_{end}"] = mine - all_samples
        about |= _both_ends("loss", history, f"loss_{group}")
        view[group] = about
    return view


def _both_ends(name: str, history: History, key: str) -> dict[str, float]:
    first, last = history.first(key), history.last(key)
    return {} if first is None or last is None else {f"{name}_first": first, f"{name}_last": last}


# --- one reader per measure ----------------------------------------------------------------------------------


def _linearisation_error(history: History) -> Reading | None:
    value = history.last("linearisation_error")
    if value is None:
        return None
    first, linear = history.array("output", first=True), history.array("linear")
    step = max(history.arrays.get("linear", {}), default=None)
    last = history.arrays.get("output", {}).get(-1 if step is None else step)  # outputs may have been seen later again
    if value == 0 or first is None or last is None or linear is None:
        return Reading(value)  # 0: nothing moved beyond rounding, and resampling would compare rounding with rounding
    missed, went = _squares(last - linear), _squares(last - first)
    taken = np.isfinite(missed)  # the look may have taken only a part of the samples
    missed, went = missed[taken], went[taken]
    return Reading(value, _interval(len(went), lambda counts: np.sqrt((counts @ missed) / (counts @ went))))


def _tangent_distance(history: History) -> Reading | None:
    return _kernel_reading(history, "tangent_distance", _distances)


def _tangent_change(history: History) -> Reading | None:
    return _kernel_reading(history, "tangent_change", _changes)


def _gate_flips(history: History) -> Reading | None:
    value, each = history.last("gate_flips"), history.array("flips")
    if value is None:
        return None
    return Reading(value, None if each is None else _interval(len(each), lambda counts: counts @ each / len(each)))


def _alignment_gain(history: History) -> Reading | None:
    first, last = history.first("tangent_alignment"), history.last("tangent_alignment")
    if first is None or last is None:
        return None
    start, end, targets = history.array("tangent", first=True), history.array("tangent"), _targets(history)
    if start is None or end is None or targets is None or len(end) != len(targets):
        return Reading(last - first)
    n = len(targets)
    gain = _gain(start, end, targets, np.arange(n))
    random = np.random.default_rng(0)
    gains = np.array([_gain(start, end, targets, random.integers(0, n, n)) for _ in range(RESAMPLES // 2)])
    gains = gains[np.isfinite(gains)]
    if len(gains) < RESAMPLES / 4:
        return Reading(last - first)
    low, high = np.quantile(gains, (0.025, 0.975)) - gain + (last - first)
    return Reading(last - first, (float(low), float(high)))


def _targets(history: History) -> NDArray[np.float64] | None:
    """Columns of the samples the kernel was taken on; groups are classes where a history has no targets."""
    if history.targets is not None:
        rows = history.rows.get("tangent")
        return np.asarray(history.targets if rows is None else history.targets[rows], dtype=np.float64)
    n = sum(len(inside) for inside in history.groups.values())
    classes = np.zeros((n, len(history.groups)))
    for column, inside in enumerate(history.groups.values()):
        classes[[number for number in inside if number < n], column] = 1
    return classes if classes.shape[1] > 1 and bool((classes.sum(1) == 1).all()) else None


def _gain(start: NDArray[Any], end: NDArray[Any], columns: NDArray[Any], rows: NDArray[Any]) -> float:
    targets = torch.from_numpy(columns[rows])
    kernels = (torch.from_numpy(np.asarray(kernel, dtype=np.float64)[np.ix_(rows, rows)]) for kernel in (start, end))
    before, after = (float(centered_alignment(kernel, targets)) for kernel in kernels)
    return after - before


def _parameter_motion(history: History) -> Reading | None:
    value = history.last("parameter_motion")
    return None if value is None else Reading(value)


_READERS: dict[str, Callable[[History], Reading | None]] = {
    "linearisation_error": _linearisation_error,
    "tangent_distance": _tangent_distance,
    "tangent_change": _tangent_change,
    "gate_flips": _gate_flips,
    "alignment_gain": _alignment_gain,
    "parameter_motion": _parameter_motion,
}


def _curve(history: History, name: str) -> dict[int, float]:
    if name != "alignment_gain":
        return dict(history.scalars.get(name, {}))
    found = history.scalars.get("tangent_alignment", {})
    start = found[min(found)] if found else 0.0
    return {step: value - start for step, value in found.items()}


# --- resampling ----------------------------------------------------------------------------------------------


def _interval(n: int, statistic: Callable[[Vector], Vector]) -> tuple[float, float] | None:
    """95 % of a statistic of how often each of ``n`` samples was drawn, ``[resamples, n]``."""
    if n == 0:
        return None
    counts = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(counts)
    values = values[np.isfinite(values)]
    if len(values) < RESAMPLES / 2:
        return None
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


Moments = Callable[[Vector, NDArray[np.float64], NDArray[np.float64]], Vector]


def _kernel_reading(history: History, name: str, statistic: Moments) -> Reading | None:
    value, start, end = history.last(name), history.array("tangent", first=True), history.array("tangent")
    if value is None:
        return None
    if start is None or end is None:
        return Reading(value)
    before, after = np.asarray(start, dtype=np.float64), np.asarray(end, dtype=np.float64)
    return Reading(value, _interval(len(after), lambda counts: statistic(counts, before, after)))


def _distances(counts: Vector, before: NDArray[np.float64], after: NDArray[np.float64]) -> Vector:
    both, old, new = (_summed(counts, product) for product in (before * after, before**2, after**2))
    return np.maximum(1 - both / np.sqrt(old * new), 0)


def _changes(counts: Vector, before: NDArray[np.float64], after: NDArray[np.float64]) -> Vector:
    both, old, new = (_summed(counts, product) for product in (before * after, before**2, after**2))
    ratio = (counts @ before.diagonal()) / (counts @ after.diagonal())
    return np.sqrt(np.maximum(ratio**2 * new - 2 * ratio * both + old, 0) / old)


def _summed(counts: Vector, entries: NDArray[np.float64]) -> Vector:
    """Sum over pairs of drawn samples; a sample meets itself as often as it was drawn, not squared."""
    pairs = ((counts @ entries) * counts).sum(1)
    return pairs - (counts**2 - counts) @ entries.diagonal()


def _squares(rows: NDArray[Any]) -> NDArray[np.float64]:
    return np.square(np.asarray(rows, dtype=np.float64)).reshape(len(rows), -1).sum(1)
