"""When to measure: a fixed set of steps, decided before training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from unlazy.runtime import require


@dataclass(frozen=True)
class Fixed:
    """Measure at these steps and no others."""

    steps: frozenset[int]

    @classmethod
    def at(cls, steps: Iterable[int]) -> Fixed:
        return cls(frozenset(steps))

    @classmethod
    def thinning(cls, last: int, dense: int, stride: int, unit: int = 1) -> Fixed:
        """Every ``unit`` steps up to ``dense``, then every ``stride`` steps, and the last one.

        >>> sorted(Fixed.thinning(last=10, dense=3, stride=4).steps)
        [0, 1, 2, 3, 4, 8, 10]
        """
        require(unit >= 1 and stride >= 1 and last >= 0, "unit and stride must be at least 1, last at least 0.")
        early, late = range(0, min(dense, last) + 1, unit), range(0, last + 1, stride)
        return cls(frozenset(early) | frozenset(step for step in late if step > dense) | {last})

    @classmethod
    def growing(cls, last: int, per_octave: int = 4, unit: int = 1) -> Fixed:
        """0, ``unit``, then ever wider gaps: about ``per_octave`` measurements each time training doubles."""
        require(per_octave >= 1, f"per_octave must be at least 1, got {per_octave!r}.")
        exponent, steps = 0, {0, last}
        while (step := unit * round(2 ** (exponent / per_octave))) <= last:
            steps.add(step)
            exponent += 1
        return cls(frozenset(steps))

    def __or__(self, other: Fixed) -> Fixed:
        return Fixed(self.steps | other.steps)

    def due(self, step: int) -> bool:
        """Whether to measure now."""
        return step in self.steps

    def describe(self) -> list[Any]:
        """A short plain form for a run's recipe."""
        return sorted(self.steps)
