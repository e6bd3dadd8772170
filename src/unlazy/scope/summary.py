"""Summary of a training for the verdict: its measures and their curves, its losses, its twin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.scope.history import History
from unlazy.scope.layer_table import LayerTable, layer_table
from unlazy.scope.samples import Samples, find_samples

RESTS_ON = "linearisation_error"
"""The measure that the estimate of the gap rests on."""
MEASURES = {
    RESTS_ON: "distance from the network's tangent at the start, relative to the distance gone",
    "tangent_distance": "1 - cosine between the tangent kernels at the start and now",
    "tangent_change": "relative change of the trace-normalised tangent kernel",
    "gate_flips": "share of gates that opened or closed",
    "alignment_gain": "gain of centred alignment between tangent kernel and targets",
    "parameter_motion": "distance of the parameters from their start, relative to their size there",
}
"""What a verdict shows; only the first one decides."""
TWIN_NUMBERS = {"gap": "twin_gap", "twin_loss": "twin_loss", "loss": "twin_network_loss", "simulated": "twin_simulated"}
"""Names in a history of what a trained or simulated twin gave."""
RESAMPLES = 200


@dataclass(frozen=True)
class TwinSummary:
    """What the twin itself gave: the ``gap`` by step, and the losses of network and twin at the end, on the same samples."""

    gap: Mapping[int, float]
    loss: float
    twin_loss: float
    simulated: bool = False


@dataclass(frozen=True)
class TrainingSummary:
    """What was measured over a training, ready to be judged.

    ``measures``: values at the last measurement. ``interval``: of the linearisation error, 95 % over resampled samples.
    ``losses``: first, lowest, last. ``curves``: measures by step. ``twin``: where a twin was trained or simulated.
    ``layers`` and ``samples_found``: by layer, and samples that stand out.
    """

    measures: Mapping[str, float]
    losses: tuple[float, float, float] | None
    samples: int
    measurements: int
    interval: tuple[float, float] | None = None
    curves: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    twin: TwinSummary | None = None
    layers: LayerTable | None = None
    samples_found: Samples | None = None

    @property
    def last_step(self) -> int:
        """The last step at which the linearisation was measured."""
        return max(self.curves.get(RESTS_ON, {}), default=0)


def summarise(history: History) -> TrainingSummary:
    """Summarise a scope's history as of its last measurement."""
    curves = {name: curve for name in MEASURES if (curve := _measure_by_step(history, name))}
    losses = list(history.scalars.get("loss", {}).values())
    outputs = history.array("output")
    last = {name: curve[max(curve)] for name, curve in curves.items() if max(curve) > 0 or len(history.steps) == 1}
    twin, notes = _twin(history), tuple(history.notes)
    seen = max(curves.get(RESTS_ON, {}), default=0)
    if twin is not None and max(twin.gap) < seen:
        notes += (
            f"the twin was trained up to step {max(twin.gap)} only, so the word about step {seen} rests on the estimate",
        )
        twin = None
    return TrainingSummary(
        {name: value for name, value in last.items() if math.isfinite(value)},
        (losses[0], float(np.nanmin(losses)), losses[-1]) if losses and np.isfinite(losses[0]) else None,
        0 if outputs is None else len(outputs),
        len(history.steps),
        _resample_error(history),
        curves,
        group_view(history),
        dict(history.left_out),
        notes,
        twin,
        layer_table(history),
        find_samples(history),
    )


def _twin(history: History) -> TwinSummary | None:
    gap = {step: value for step, value in history.scalars.get(TWIN_NUMBERS["gap"], {}).items() if math.isfinite(value)}
    if not gap:
        return None
    loss, twin_loss, simulated = (history.last(TWIN_NUMBERS[name]) for name in ("loss", "twin_loss", "simulated"))
    return TwinSummary(gap, _or_nan(loss), _or_nan(twin_loss), bool(simulated))


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


# --- groups --------------------------------------------------------------------------------------------------


def group_view(history: History) -> dict[str, dict[str, float]]:
    """Each group's share of the samples, of kernel mass and of active paths, at the first and at the last measurement.

    ``share``: of the samples; ``kernel_share``: of the samples that the kernel was computed on, where those are fewer.
    ``mass``: of the kernel's trace; a group with more mass than samples gets more than its share of training.
    ``paths``: mean logarithm of the number of active paths, minus the mean over all samples.
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
            about |= _first_and_last(name, history, key)
        for end in ("first", "last"):
            mine, all_samples = (getattr(history, end)(name) for name in (f"paths_{group}", "paths"))
            if mine is not None and all_samples is not None:
                about[f"paths_{end}"] = mine - all_samples
        about |= _first_and_last("loss", history, f"loss_{group}")
        view[group] = about
    return view


def _first_and_last(name: str, history: History, key: str) -> dict[str, float]:
    """``NAME_first`` and ``NAME_last`` of one number; empty where it was not measured."""
    first, last = history.first(key), history.last(key)
    return {} if first is None or last is None else {f"{name}_first": first, f"{name}_last": last}


def _measure_by_step(history: History, name: str) -> dict[int, float]:
    """The values of one measure at every step it was taken; ``alignment_gain`` counts from the start."""
    if name != "alignment_gain":
        return dict(history.scalars.get(name, {}))
    found = history.scalars.get("tangent_alignment", {})
    start = found[min(found)] if found else 0.0
    return {step: value - start for step, value in found.items()}


# --- resampling ----------------------------------------------------------------------------------------------


def _resample_error(history: History) -> tuple[float, float] | None:
    """95 % interval of the linearisation error over resampled probe samples; ``None`` where arrays are missing."""
    value = history.last(RESTS_ON)
    first, linear = history.array("output", first=True), history.array("linear")
    step = max(history.arrays.get("linear", {}), default=-1)
    last = history.arrays.get("output", {}).get(step)  # outputs may have been measured again later
    if not value or first is None or last is None or linear is None:
        return None  # 0: nothing moved beyond rounding, and resampling would compare rounding with rounding
    missed, went = _row_norms_squared(last - linear), _row_norms_squared(last - first)
    taken = np.isfinite(missed)  # only a part of the samples may have been measured
    missed, went, n = missed[taken], went[taken], int(taken.sum())
    if n == 0 or not math.isclose(math.sqrt(missed.sum() / max(went.sum(), 1e-300)), value, rel_tol=0.01):
        return None  # of a network with batch-norm the outputs were taken with other statistics
    counts = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.sqrt((counts @ missed) / (counts @ went))
    values = values[np.isfinite(values)]
    if len(values) < RESAMPLES / 2:
        return None
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def _row_norms_squared(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Squared norm of each row."""
    return np.square(np.asarray(rows, dtype=np.float64)).reshape(len(rows), -1).sum(1)
