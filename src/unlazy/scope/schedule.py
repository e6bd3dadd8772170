"""When to measure: at fixed steps decided before training, or paced by change and kept within a budget of time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
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


@dataclass
class Paced:
    """Geometric early, then by change: gaps grow while little happens and shrink while much does.

    Up to ``early`` steps each gap is a fixed share of the steps done. Later a change above ``much`` since the last measurement
    halves the gap, one below ``little`` doubles it: at least one measurement an octave, and gaps of at least ``finest`` of the
    steps done, so that a noisy training does not fill the disk.

    >>> pace = Paced()
    >>> seen = []
    >>> for step in range(60):
    ...     if pace.due(step):
    ...         seen.append(step)
    ...         pace.measured(step, change=0.0)
    >>> seen
    [0, 1, 2, 3, 4, 5, 7, 9, 12, 15, 19, 24, 30, 38, 48]
    """

    early: int = 64
    growth: float = 0.25
    little: float = 0.01
    much: float = 0.1
    finest: float = 0.02
    due_at: int = 0
    gap: float = 1.0

    def due(self, step: int) -> bool:
        """Whether enough steps have passed."""
        return step >= self.due_at

    def measured(self, step: int, change: float) -> None:
        """A measurement was taken; ``change``: how much moved since the one before, 1 = as much as there is."""
        geometric = max(1.0, math.ceil(self.growth * step))
        if step <= self.early:
            self.gap = geometric
        elif change > self.much:
            self.gap = max(1.0, self.gap / 2)
        elif change < self.little:
            self.gap = 2 * self.gap
        self.gap = min(max(self.gap, self.finest * step), max(1.0, float(step)))
        self.due_at = step + max(1, round(self.gap))


UNSEEN = 0.9  # of the budget is planned with: looking also leaves cold caches behind, which no clock of ours sees


@dataclass
class Budget:
    """How much of the training time may be spent on looking, and what each look will cost, known from its past.

    ``share`` of the training time so far, but never less than ``grace`` seconds in all, so that short trainings are seen too.
    Enough is kept back for the measurement at the end. Where the number of steps is known, half of what the rest of training
    will allow may be spent ahead: the beginning is where most happens.
    """

    share: float
    grace: float = 1.0
    costs: dict[str, float] = field(default_factory=dict)
    spent: float = 0.0
    ahead: float = 0.5

    def __post_init__(self) -> None:
        good = self.share > 0 and self.grace >= 0
        require(good, f"budget must be a positive share of training time, such as 0.05, got {self.share!r}.")
        require(
            self.share <= 1 or math.isinf(self.share),
            f"budget={self.share:g} is {self.share:g} times the training time; say 0.05 for 5 %, float('inf') for no limit.",
        )

    def learn(self, name: str, seconds: float) -> None:
        """Remember what a look cost: rises count at once, falls slowly."""
        self.costs[name] = max(seconds, 0.5 * (self.costs.get(name, seconds) + seconds))

    def predict(self, names: Iterable[str]) -> float:
        return sum(self.costs.get(name, 0.0) for name in names)

    def earned(self, trained: float, to_come: float = 0.0) -> float:
        """Seconds that the training time pays for."""
        return UNSEEN * self.share * (trained + self.ahead * to_come)

    def allowed(self, trained: float, to_come: float = 0.0) -> float:
        """Seconds that may have been spent by now."""
        return max(self.grace, self.earned(trained, to_come))

    def affords(
        self, names: Iterable[str], trained: float, *, kept_back: float, to_come: float = 0.0, part: float = 1.0
    ) -> bool:
        """Whether these looks fit into ``part`` of what is allowed, with ``kept_back`` seconds for the end."""
        return self.spent + self.predict(names) + kept_back <= part * self.allowed(trained, to_come)


LIGHT = 0.3  # share of the budget that light measurements may use up on their own: the others must get their turn

GRACE_STEPS = 1000  # that geometric gaps should reach where the grace pays for few measurements
FIRST, ENOUGH = 2, 5  # these steps are seen in any case where the grace pays for so many measurements
FAR = 10_000  # steps that the grace should last for where nobody said how many there will be; later, as far again


@dataclass
class Planner:
    """Which looks are due now: all of them, only the light ones, or none. ``steps``: how long training will be, if known.

    As long as the grace pays, what is left of it is spread geometrically over the steps to come, so that a short training is seen
    to its end and not only in its first steps. Whatever training time itself pays for is taken when it is due.
    """

    budget: Budget
    light: frozenset[str]
    full: Paced = field(default_factory=Paced)
    quick: Paced = field(default_factory=Paced)
    skipped: int = 0
    steps: int | None = None
    seen: int = 0  # the last step at which everything was looked at

    def spread_grace(self, cost: float) -> None:
        """Widen the first gaps where the grace pays for few measurements: they should not all go to the first steps.

        Geometric steps that reach ``GRACE_STEPS`` with what it pays for, but at least one measurement an octave.
        """
        if not math.isfinite(self.budget.share):
            return
        affordable = max(1.0, self.budget.grace / max(cost, 1e-9))
        self.full.growth = min(max(self.full.growth, GRACE_STEPS ** (1 / affordable) - 1), 1.0)

    def due(self, step: int, looks: Iterable[str], trained: float, to_come: float = 0.0) -> list[str]:
        """The looks to take at this step, all or the light ones, within the budget."""
        everything = self.full.due(step)
        if not everything and not self.quick.due(step):
            return []
        names = [*looks, "writing"]
        last = self.budget.predict(names)
        if everything and not self.budget.affords(names, trained, kept_back=last, to_come=to_come):
            self._wait(step, last, trained)
        elif everything and not self._spared(step, last, trained, to_come):
            return names[:-1]
        if self.quick.due(step):
            light = [name for name in names if name in self.light]
            with_writing = [*light, "writing"]
            if light and self.budget.affords(with_writing, trained, kept_back=last, to_come=to_come, part=LIGHT):
                return light
            self.quick.due_at = step + max(1, round(0.05 * step))
        return []

    def measured(self, step: int, names: Iterable[str], change: float) -> None:
        """What was taken, and how much had changed."""
        self.quick.measured(step, change)
        if not set(names) <= self.light:
            self.full.measured(step, change)
            self.seen = step

    def _spared(self, step: int, cost: float, trained: float, to_come: float) -> bool:
        """Whether the grace that would pay for this look is better kept for later."""
        budget = self.budget
        if cost <= 0 or budget.spent + 2 * cost <= budget.earned(trained, to_come):
            return False
        if step <= FIRST and budget.grace >= ENOUGH * cost:
            return False
        here, end = max(1, self.seen), FAR if self.steps is None else self.steps
        end = end if here < end else here * FAR
        others = max(0, math.floor((budget.grace - budget.spent) / cost) - 1)  # besides the one at the end
        return step < round(here * (end / here) ** (1 / (others + 1)))

    def _wait(self, step: int, cost: float, trained: float) -> None:
        """Too early: come back when the training time that pays for it should have passed."""
        self.skipped += 1
        missing = (self.budget.spent + 2 * cost) / (UNSEEN * self.budget.share) - trained
        per_step = trained / step if step else 0.0
        steps = math.ceil(missing / per_step) if per_step > 0 and math.isfinite(missing) else 1
        self.full.due_at = step + min(max(1, steps), max(1, round(self.full.growth * step)))
