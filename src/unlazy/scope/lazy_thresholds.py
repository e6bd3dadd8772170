"""From the linearisation error to the gap: the calibrated curve and its errors, read from ``lazy_thresholds.json``.

The calibration study fits that file to trainings whose linearised twin was trained as well; nobody edits it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from unlazy.runtime import StoreError, require

FILE = Path(__file__).with_name("lazy_thresholds.json")
FORMAT = 2
LEAST_GAP, MOST_GAP = 0.001, 2.0  # estimates end here: beyond them nothing was calibrated
WORDS = ("lazy", "mixed", "rich")


@dataclass(frozen=True)
class Thresholds:
    """The gap that a linearisation error stands for, the borders of the words, and how far estimates are off.

    ``errors`` and ``gaps``: points of the curve, between which it is straight in logarithms. ``margin``: estimates within this
    factor of a border get no word. ``estimates``, ``lowest`` and ``highest``: at an estimate, the range of true gap / estimate.
    """

    errors: tuple[float, ...]
    gaps: tuple[float, ...]
    lazy_gap: float
    rich_gap: float
    margin: float
    estimates: tuple[float, ...]
    lowest: tuple[float, ...]
    highest: tuple[float, ...]
    source: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name in ("errors", "gaps", "estimates"):
            grows = list(getattr(self, name)) == sorted(set(getattr(self, name)))
            require(grows, f"{name} must grow, got {getattr(self, name)}.")
        require(self.margin >= 1, f"margin is a factor of at least 1, got {self.margin}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the inverse of ``from_dict``."""
        return dict(json.loads(json.dumps(asdict(self) | {"format": FORMAT})))

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Thresholds:
        """The inverse of ``to_dict``."""
        require(plain.get("format") == FORMAT, f"thresholds of format {FORMAT} expected, got {plain.get('format')!r}.")
        values: dict[str, Any] = {
            name: tuple(one) if isinstance(one, list) else one for name, one in plain.items() if name != "format"
        }
        return cls(**values)

    def gap(self, error: float) -> float:
        """The gap that this linearisation error stands for."""
        found = _interpolate(error, self.errors, self.gaps)
        return min(max(found, LEAST_GAP), MOST_GAP)

    def error_at(self, gap: float) -> float:
        """The linearisation error that stands for this gap."""
        return _interpolate(gap, self.gaps, self.errors)

    def gap_range(self, gap: float) -> tuple[float, float]:
        """The range in which the true gap lies for an estimate. It reaches down to 0 where the estimate is at the lower end."""
        at = min(max(gap, self.estimates[0]), self.estimates[-1])
        low, high = (gap * _interpolate(at, self.estimates, side) for side in (self.lowest, self.highest))
        return (0.0 if low <= 2 * LEAST_GAP else low), high

    def word(self, gap: float) -> str:
        """Lazy, mixed or rich."""
        return "lazy" if gap < self.lazy_gap else "rich" if gap > self.rich_gap else "mixed"

    def words_near(self, gap: float, factor: float) -> list[str]:
        """The words from gap / factor to gap times factor: one, or two if a border lies between."""
        return list(dict.fromkeys(self.word(end) for end in (gap / factor, gap, gap * factor)))


def _interpolate(value: float, places: Sequence[float], heights: Sequence[float]) -> float:
    """The straight line through the nearest two points, in logarithms; beyond the ends it goes on."""
    at = math.log(max(value, 1e-12))
    last = max(1, min(len(places) - 1, sum(place <= value for place in places)))
    (a, b), (u, v) = (tuple(math.log(one) for one in side[last - 1 : last + 1]) for side in (places, heights))
    return math.exp(u + (v - u) * (at - a) / (b - a))


@cache
def load_thresholds() -> Thresholds:
    """The calibrated thresholds, as shipped."""
    try:
        return Thresholds.from_dict(json.loads(FILE.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{FILE.name} is missing or damaged ({error}); install unlazy again, or see docs/explanation/laziness.md."
        ) from error
