"""Which samples of the probe set are easy, hard, moved far, or tied to each other: from the last measurement."""

from __future__ import annotations

import html
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.scope.history import History

SHOWN = 5
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class SampleValue:
    """A sample of the probe set by its number, and the number that it was picked for."""

    sample: int
    value: float


@dataclass(frozen=True)
class SamplePair:
    """Two samples, and K_ij over the mean K_ii: how strongly a step on one moves the other, relative to itself."""

    first: int
    second: int
    value: float


@dataclass(frozen=True)
class Samples:
    """The samples that stand out, the most extreme first; empty where the measure is missing.

    ``easiest`` and ``hardest``: by their loss now. ``moved``: by the distance of their outputs from the start, relative to the
    mean over samples. ``influential``: by the sum of |K_ij| over all other samples j, relative to the mean over samples, with K
    the tangent kernel now. ``pairs``: the two different samples with the largest |K_ij|.
    """

    easiest: tuple[SampleValue, ...] = ()
    hardest: tuple[SampleValue, ...] = ()
    moved: tuple[SampleValue, ...] = ()
    influential: tuple[SampleValue, ...] = ()
    pairs: tuple[SamplePair, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(json.loads(json.dumps(asdict(self))))

    def text(self) -> str:
        """One line about the hardest and the easiest samples; "" where there are none."""
        parts = []
        if self.hardest:
            parts.append(f"hardest {_list(self.hardest[:3])} (loss {self.hardest[0].value:.2g})")
        if self.easiest:
            parts.append(f"easiest {_list(self.easiest[:3])} (loss {self.easiest[0].value:.2g})")
        return f"Samples by number: {'; '.join(parts)}; scope.samples() has more." if parts else ""

    def __str__(self) -> str:
        return "\n".join(f"{name:<12} {text}" for name, text in self._lines()) or "No sample was measured yet."

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{name}</th><td>{html.escape(text)}</td></tr>" for name, text in self._lines())
        return f"<table>{rows}</table>"

    def _lines(self) -> list[tuple[str, str]]:
        lines = []
        for name in ("easiest", "hardest", "moved", "influential"):
            found = getattr(self, name)
            if found:
                lines.append((name, ", ".join(f"{one.sample} ({one.value:.2g})" for one in found)))
        if self.pairs:
            lines.append(("pairs", ", ".join(f"{one.first} and {one.second} ({one.value:.2g})" for one in self.pairs)))
        return lines


def find_samples(history: History) -> Samples | None:
    """The samples of a history that stand out at its last measurement; ``None`` where nothing was measured by sample."""
    losses, first, last = history.array("sample_loss"), history.array("output", first=True), history.array("output")
    found: dict[str, Any] = {}
    if losses is not None and len(losses) > 1:
        found["easiest"], found["hardest"] = _largest(-losses, losses), _largest(losses, losses)
    if first is not None and last is not None and len(history.arrays["output"]) > 1:
        moves = np.sqrt(np.square(np.asarray(last, np.float64) - first).reshape(len(last), -1).sum(1))
        if moves.mean() > 0:
            found["moved"] = _largest(moves / moves.mean(), moves / moves.mean())
    kernel = history.array("tangent")
    if kernel is not None and len(kernel) > 1 and np.isfinite(kernel).all() and np.trace(kernel) > 0:
        found |= _ties(np.asarray(kernel, np.float64), list(history.rows.get("tangent", range(len(kernel)))))
    return Samples(**found) if found else None


def _ties(kernel: Vector, numbers: list[int]) -> dict[str, Any]:
    """Influential samples and close pairs of a tangent kernel. ``numbers``: of its samples in the probe set."""
    others = np.abs(kernel - np.diag(kernel.diagonal()))
    sums = others.sum(1)
    found: dict[str, Any] = {}
    if sums.mean() > 0:
        found["influential"] = tuple(
            SampleValue(numbers[one.sample], one.value) for one in _largest(sums / sums.mean(), sums / sums.mean())
        )
    upper = np.triu(others, 1)
    best = np.argsort(-upper, axis=None, kind="stable")[:SHOWN]
    mean = kernel.diagonal().mean()
    places = [divmod(int(place), len(kernel)) for place in best]
    found["pairs"] = tuple(SamplePair(numbers[i], numbers[j], float(kernel[i, j] / mean)) for i, j in places if j > i)
    return found


def _largest(keys: NDArray[Any], values: NDArray[Any]) -> tuple[SampleValue, ...]:
    """The samples with the largest keys, with their values; those that are not finite are left out."""
    order = [int(place) for place in np.argsort(-np.where(np.isfinite(keys), keys, -np.inf), kind="stable")]
    return tuple(SampleValue(place, float(values[place]) + 0.0) for place in order[:SHOWN] if np.isfinite(keys[place]))


def _list(found: tuple[SampleValue, ...]) -> str:
    return ", ".join(str(one.sample) for one in found)
