"""From measured cells to thresholds, and from thresholds to a score. The rules stand here; nothing is set by hand.

Only cells with role ``fit`` are looked at by :func:`fit_thresholds`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import InputError, require
from unlazy.scope.readings import MEASURES, Readings
from unlazy.scope.thresholds import LEAST, LEAST_GAP, MOST_GAP, Threshold, Thresholds
from unlazy.scope.verdict import LABELS, LEAST_FALL, judge
from unlazy.studies.scope.calibration.settings import FITTED, LAZY_GAP, RICH_GAP, SCORED

Row = Mapping[str, Any]
USELESS = 1.0  # a measure whose estimates of the gap are off by more than a factor e is left aside
LEAST_SPREAD = 0.05
MARGINS = tuple(round(0.01 * step, 2) for step in range(61))
MOST_SILENCE = 0.15  # share of fitted cells on which the verdict may keep silent
ENOUGH = 0.95  # accuracy on the fitted cells for which the margin is not made wider
ROOM = 1.25  # measures of a new run may scatter this much more than those of nearly all fitted cells


def truth(row: Row) -> str:
    """Lazy, mixed or rich by the gap; "untrained" where the loss did not fall, "broken" where a training broke down."""
    losses = row["readings"]["losses"]
    if row["gap"] is None or losses is None or losses[2] is None:
        return "broken"
    first, lowest, _ = losses
    if lowest > first - LEAST_FALL * abs(first):
        return "untrained"
    return "lazy" if row["gap"] < LAZY_GAP else "rich" if row["gap"] > RICH_GAP else "mixed"


def told(rows: Sequence[Row], role: str | None = None) -> list[Row]:
    """Cells whose truth is one of the three words."""
    return [row for row in rows if role in (None, row["role"]) and truth(row) in LABELS]


def fit_thresholds(rows: Sequence[Row], scale: str) -> Thresholds:
    """Thresholds of every measure that is good for something, the margin, and the limit of disagreement."""
    cells = told(rows, "fit")
    require(len(cells) >= 4, f"{len(cells)} cells to fit thresholds on; at least 4 are needed.")
    measures: dict[str, Threshold] = {}
    for name in MEASURES:
        found = _fit_one(name, cells)
        if found is not None:
            measures[name] = found
    if not measures:
        raise InputError("no measure tells lazy from rich on these cells.")
    source = _source(rows, cells, scale)
    unbound = Thresholds(measures, LAZY_GAP, RICH_GAP, 0.0, 0.0, math.inf, source)
    guesses = np.array([unbound.pooled({n: one[0] for n, one in row["readings"]["measures"].items()}) for row in cells])
    gaps = np.log(np.clip([row["gap"] for row in cells], LEAST_GAP, MOST_GAP))
    spread = _rounded(float(np.sqrt(np.mean((guesses[:, 0] - gaps) ** 2))))
    limit = _rounded(max(ROOM * float(np.quantile(guesses[:, 1], 0.975)), LEAST_SPREAD))
    return _widest(cells, replace(unbound, spread=spread, disagreement=limit))


def _fit_one(name: str, cells: Sequence[Row]) -> Threshold | None:
    """The two values with the least total error: how far (in log gap) cells on the wrong side are from the border."""
    having = [row for row in cells if name in row["readings"]["measures"]]
    if len(having) < 4:
        return None
    values = np.log(np.maximum([row["readings"]["measures"][name][0] for row in having], LEAST))
    gaps = np.log(np.clip([row["gap"] for row in having], LEAST_GAP, MOST_GAP))
    low, high = (_border(values, gaps, math.log(border)) for border in (LAZY_GAP, RICH_GAP))
    if low is None or high is None or high - low < 1e-6:
        return None
    limit = Threshold(_rounded(math.exp(low)), _rounded(math.exp(high)), 1.0)
    guesses = np.array([limit.log_gap(math.exp(value), LAZY_GAP, RICH_GAP) for value in values])
    spread = max(float(np.sqrt(np.mean((guesses - gaps) ** 2))), LEAST_SPREAD)
    return None if spread > USELESS else Threshold(limit.lazy_below, limit.rich_above, _rounded(spread))


def _border(values: NDArray[np.float64], gaps: NDArray[np.float64], border: float) -> float | None:
    """The cut of ``values`` that best tells gaps below ``border`` from those above; the middle of the best stretch."""
    above = gaps > border
    if above.all() or not above.any():
        return None
    ordered = np.unique(values)
    cuts = (ordered[1:] + ordered[:-1]) / 2
    costs = [float(np.abs(gaps - border)[(values > cut) != above].sum()) for cut in cuts]
    best = int(np.argmin(costs))
    return float(cuts[best])


def _widest(cells: Sequence[Row], limits: Thresholds) -> Thresholds:
    """The least margin that is enough on the fitted cells, or the widest that does not silence too many of them."""
    chosen = limits
    for margin in MARGINS:
        wider = replace(limits, margin=margin)
        result = score(cells, wider)
        if result["silent_share"] > MOST_SILENCE:
            break
        chosen = wider
        if result["accuracy"] is not None and result["accuracy"] >= ENOUGH:
            break
    return chosen


def verdicts(rows: Sequence[Row], limits: Thresholds) -> list[str]:
    """The label of every cell."""
    return [judge(Readings.from_dict(row["readings"]), limits).label for row in rows]


def score(rows: Sequence[Row], limits: Thresholds) -> dict[str, Any]:
    """Accuracy over the cells the verdict speaks on, how often it is silent, and truth against verdict."""
    labels, truths = verdicts(rows, limits), [truth(row) for row in rows]
    confusion = {
        right: {
            label: sum(t == right and given == label for t, given in zip(truths, labels, strict=True))
            for label in LABELS
        }
        for right in ("lazy", "mixed", "rich", "untrained", "broken")
    }
    pairs = [(t, given) for t, given in zip(truths, labels, strict=True) if t in LABELS]
    spoken = [(t, given) for t, given in pairs if given != "cannot tell"]
    swapped = sum({t, given} == {"lazy", "rich"} for t, given in spoken)
    return {
        "cells": len(pairs),
        "accuracy": sum(t == given for t, given in spoken) / len(spoken) if spoken else None,
        "silent_share": 1 - len(spoken) / len(pairs) if pairs else 0.0,
        "lazy_for_rich": swapped,
        "confusion": confusion,
    }


def alone(rows: Sequence[Row], limits: Thresholds) -> dict[str, float]:
    """How often each measure by itself says the right word, its value against its two thresholds."""
    found = {}
    for name, limit in limits.measures.items():
        having = [
            (truth(row), row["readings"]["measures"][name][0]) for row in rows if name in row["readings"]["measures"]
        ]
        says = ["lazy" if v < limit.lazy_below else "rich" if v > limit.rich_above else "mixed" for _, v in having]
        found[name] = sum(right == said for (right, _), said in zip(having, says, strict=True)) / max(1, len(having))
    return found


def _source(rows: Sequence[Row], cells: Sequence[Row], scale: str) -> dict[str, Any]:
    nets, sets = (" and ".join(names) for names in FITTED)
    return {
        "study": "calibration",
        "scale": scale,
        "fitted": {"networks": list(FITTED[0]), "data": list(FITTED[1]), "cells": len(cells)},
        "scored": {"networks": list(SCORED[0]), "data": list(SCORED[1]), "cells": len(told(rows, "score"))},
        "text": f"fitted on {len(cells)} trainings ({nets} on {sets}) of the calibration study, scale {scale}",
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
