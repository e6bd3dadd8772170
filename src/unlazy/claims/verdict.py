"""How a claim is judged. The rule stands in code before the run; nothing here knows any study.

*holds*: at least 90 % of the seeds are on the claimed side of the threshold and the 95 % interval of the median
lies wholly there. *partly*: the median is on that side. *fails*: it is not. *censored*: training was too short to
tell. A claim whose parts agree has their verdict; otherwise it is partly true. A censored part keeps a claim from
holding, but not from failing where all that can be told fails; where all parts are censored, or the scale is too small for
any, the verdict is *cannot tell*. *not run yet*: nobody measured it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unlazy.claims.catalogue import by_id
from unlazy.runtime import require

AGREE_SHARE = 0.9
RESAMPLES = 2000
UNJUDGED = ("cannot tell", "not run yet")
Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One judged statement about per-seed numbers: ``value > threshold`` or ``value < threshold``."""

    name: str
    side: str
    threshold: float
    unit: str
    values: NDArray[np.float64]
    horizon: float | NDArray[np.float64] = np.inf  # for times: how long was looked (infinity in values: not within it)

    def __post_init__(self) -> None:
        require(self.side in (">", "<"), f"side must be '>' or '<', got {self.side!r}.")

    def judge(self) -> Row:
        """The part as a plain row, with its verdict."""
        agrees = self.values > self.threshold if self.side == ">" else self.values < self.threshold
        unknown = np.isnan(self.values) | (np.isinf(self.values) & (self.horizon < self.threshold))
        low, high = interval(self.values)
        clear = low > self.threshold if self.side == ">" else high < self.threshold
        median = _median(self.values)
        leans = median > self.threshold if self.side == ">" else median < self.threshold
        enough = agrees[~unknown].sum() >= AGREE_SHARE * len(self.values)
        refuted = (~agrees & ~unknown).sum() > len(self.values) / 2
        if unknown.any() and not enough and not refuted:
            verdict = "censored"
        elif enough and clear:
            verdict = "holds"
        else:
            verdict = "partly" if leans else "fails"
        return {
            "name": self.name,
            "verdict": verdict,
            "value": _plain(median),
            "interval": [_plain(low), _plain(high)],
            "unit": self.unit,
            "seeds": len(self.values),
            "agree": int(agrees[~unknown].sum()),
            "rule": f"{self.side} {self.threshold:g}",
            "horizon": _plain(float(np.min(self.horizon))),
        }


def interval(values: ArrayLike) -> tuple[float, float]:
    """95 % bootstrap interval of the median (2000 resamples, fixed seed); least and greatest under 5 values."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[~np.isnan(numbers)]
    if len(numbers) == 0:
        return np.nan, np.nan
    if len(numbers) < 5:
        return float(numbers.min()), float(numbers.max())
    picks = np.random.default_rng(0).integers(0, len(numbers), (RESAMPLES, len(numbers)))
    medians = np.sort(_medians(numbers[picks]))
    return float(medians[int(0.025 * RESAMPLES)]), float(medians[int(0.975 * RESAMPLES)])


def summary(name: str, values: ArrayLike, unit: str = "") -> Row:
    """A control: median, interval and seeds, with no verdict."""
    low, high = interval(values)
    numbers = np.asarray(values, dtype=np.float64)
    return {
        "name": name,
        "value": _plain(_median(numbers)),
        "interval": [_plain(low), _plain(high)],
        "unit": unit,
        "seeds": int((~np.isnan(numbers)).sum()),
    }


def combine(verdicts: Sequence[str]) -> str:
    """One verdict from those of the parts: unanimous, or partly; all censored: cannot tell."""
    votes = set(verdicts)
    if votes == {"censored"}:
        return "cannot tell"
    if votes - {"censored"} == {"fails"}:
        return "fails"
    return votes.pop() if len(votes) == 1 else "partly"


def claim_row(
    claim_id: str,
    parts: Sequence[Part],
    *,
    scale: str,
    settings: Mapping[str, Any],
    provenance: Mapping[str, Any],
    why: str,
    controls: Sequence[Row] = (),
    figure: str | None = None,
    run: str | None = None,
    untold: str | None = None,
) -> Row:
    """The scorecard row of a judged claim; the first part gives the headline number.

    ``untold``: why nothing can be told, where that is not the length of the training.
    """
    claim = by_id(claim_id)
    if not parts:
        small = f"The {scale} scale is too short or too small to tell."
        return empty_row(claim_id) | {"verdict": "cannot tell", "scale": scale, "why": small}
    judged = [part.judge() for part in parts]
    head = judged[0]
    verdict = combine([part["verdict"] for part in judged])
    if verdict == "cannot tell":
        why = untold or f"The {scale} scale stops before this can be told."
    return {
        **_claim_fields(claim_id),
        "scale": scale,
        "verdict": verdict,
        **{key: head[key] for key in ("value", "unit", "interval", "seeds", "agree")},
        "rule": f"{head['name']}: {head['rule']} {head['unit']}".strip(),
        "settings": dict(settings),
        "parts": judged,
        "controls": list(controls),
        "why": why,
        "run": run,
        "figure": figure,
        "command": f"unlazy reproduce {claim.study} --scale {scale}",
        "provenance": dict(provenance),
    }


def empty_row(claim_id: str) -> Row:
    """The row of a claim nobody has measured yet."""
    nothing = ("value", "unit", "interval", "seeds", "agree", "rule", "settings", "run", "figure", "provenance")
    return {
        **_claim_fields(claim_id),
        "scale": None,
        "verdict": "not run yet",
        **dict.fromkeys(nothing),
        "parts": [],
        "controls": [],
        "why": "No study measures it yet.",
        "command": None,
    }


def _claim_fields(claim_id: str) -> Row:
    claim = by_id(claim_id)
    return {name: getattr(claim, name) for name in ("id", "paper", "where", "statement", "paper_value", "study")}


def _median(values: NDArray[np.float64]) -> float:
    """Median of what is a number; infinity counts as one."""
    numbers = values[~np.isnan(values)]
    return float(_medians(numbers[None])[0]) if len(numbers) else float("nan")


def _medians(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Median of each row (numpy's own warns and gives nan where infinity is among the middle two)."""
    ordered, length = np.sort(rows, axis=1), rows.shape[1]
    return (ordered[:, (length - 1) // 2] + ordered[:, length // 2]) / 2


def _plain(number: float) -> float | None:
    return float(f"{number:.6g}") if np.isfinite(number) else None
