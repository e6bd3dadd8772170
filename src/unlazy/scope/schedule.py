"""When to measure: paced by change, and kept within a budget of time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from unlazy.runtime import require


@dataclass
class Pace:
    """Gaps between measurements: geometric early, then by change. They grow while little changes and shrink while much does.

    Up to ``early`` steps each gap is a fixed share of the steps done. Later a change above ``much`` since the last measurement
    halves the gap, one below ``little`` doubles it: at least one measurement an octave, and gaps of at least ``finest`` of the
    steps done, so that a noisy training does not fill the disk.

    >>> pace = Pace()
    >>> steps = []
    >>> for step in range(60):
    ...     if pace.is_due(step):
    ...         steps.append(step)
    ...         pace.note_measured(step, change=0.0)
    >>> steps
    [0, 1, 2, 3, 4, 5, 7, 9, 12, 15, 19, 24, 30, 38, 48]
    """

    early: int = 64
    growth: float = 0.25
    little: float = 0.01
    much: float = 0.1
    finest: float = 0.02
    due_at: int = 0
    gap: float = 1.0

    def is_due(self, step: int) -> bool:
        """Whether enough steps have passed since the last measurement."""
        return step >= self.due_at

    def note_measured(self, step: int, change: float) -> None:
        """Plan the next measurement; ``change``: the largest relative change since the one before, 1 for all of it."""
        geometric = max(1.0, math.ceil(self.growth * step))
        if step <= self.early:
            self.gap = geometric
        elif change > self.much:
            self.gap = max(1.0, self.gap / 2)
        elif change < self.little:
            self.gap = 2 * self.gap
        self.gap = min(max(self.gap, self.finest * step), max(1.0, float(step)))
        self.due_at = step + max(1, round(self.gap))


PLANNED_SHARE = 0.9  # of the budget: measuring also empties caches, which slows training in a way that is not timed
GRACE_SECONDS, GRACE_SHARE = (
    0.1,
    0.2,
)  # what a short training pays for measuring: this much, and this share of its length


@dataclass
class Budget:
    """How much of the training time may be spent on measuring, and what each measure will cost, known from its past.

    ``share`` of the training time so far, but more in a short training, so that it is measured too: a tenth of a second and a
    fifth of its length, at most ``grace`` seconds in all. Enough is kept back for the measurement at the end. If the number of
    steps is known, the share ``ahead`` of what the rest of training will allow may be spent before: most happens at the start.
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
        """Note what a measure cost: an increase counts at once, a decrease slowly."""
        self.costs[name] = max(seconds, 0.5 * (self.costs.get(name, seconds) + seconds))

    def predict(self, names: Iterable[str]) -> float:
        """Seconds that these measures will take."""
        return sum(self.costs.get(name, 0.0) for name in names)

    def seconds_earned(self, trained: float, to_come: float = 0.0) -> float:
        """Seconds that the training time pays for."""
        return PLANNED_SHARE * self.share * (trained + self.ahead * to_come)

    def grace_of(self, seconds: float) -> float:
        """Seconds that a training of this length may spend on measuring, however small its share.

        >>> budget = Budget(0.05)
        >>> [round(budget.grace_of(length), 2) for length in (0, 0.5, 2, 10)]
        [0.1, 0.2, 0.5, 1.0]
        """
        return min(self.grace, GRACE_SECONDS + GRACE_SHARE * seconds)

    def seconds_allowed(self, trained: float, to_come: float = 0.0) -> float:
        """Seconds that may have been spent by now."""
        return max(self.grace_of(trained + to_come), self.seconds_earned(trained, to_come))

    def affords(
        self, names: Iterable[str], trained: float, *, kept_back: float, to_come: float = 0.0, part: float = 1.0
    ) -> bool:
        """Whether these measures fit into ``part`` of what is allowed, with ``kept_back`` seconds for the end."""
        return self.spent + self.predict(names) + kept_back <= part * self.seconds_allowed(trained, to_come)


LIGHT = 0.3  # share of the budget that light measurements may use, so that enough is left for full ones

GRACE_STEPS = 1000  # steps that geometric gaps should reach if the grace pays for few measurements
FULL_MEASUREMENTS = 8  # that should fit the budget; where they do not, so many light ones come before full ones
FIRST, ENOUGH = 2, 5  # steps that are always measured, if the grace pays for so many measurements
FAR = (
    10_000  # steps that the grace should last for if the number of steps is not known; after that, as many times again
)


@dataclass
class Planner:
    """Which measures are due now: all of them, only the light ones, or none. ``steps``: how many training takes, if known.

    As long as the grace pays, what is left of it is spread geometrically over the steps to come, so that a short training is
    measured to its end and not only in its first steps. Whatever training time itself pays for is measured when it is due.
    Where ``FULL_MEASUREMENTS`` full ones cost more than is allowed, as many light ones come first, and nothing is saved for full
    ones until they are done.
    """

    budget: Budget
    light: frozenset[str]
    full: Pace = field(default_factory=Pace)
    quick: Pace = field(default_factory=Pace)
    skipped: int = 0
    steps: int | None = None
    last_full: int = 0  # the last step at which everything was measured
    last_light: int = 0  # the last step at which anything was measured
    light_done: int = 0  # measurements after the start

    def spread_grace(self, cost: float) -> None:
        """Widen the first gaps if the grace pays for few measurements: they should not all go to the first steps.

        The gaps are geometric and reach ``GRACE_STEPS`` with what it pays for, but at least one measurement an octave.
        """
        if not math.isfinite(self.budget.share):
            return
        affordable = max(1.0, self.budget.grace / max(cost, 1e-9))
        self.full.growth = min(max(self.full.growth, GRACE_STEPS ** (1 / affordable) - 1), 1.0)

    def due(self, step: int, measures: Iterable[str], trained: float, to_come: float = 0.0) -> list[str]:
        """The measures to take at this step: all, the light ones, or none.

        ``trained`` and ``to_come``: seconds of training so far and, if known, still to come.
        """
        everything = self.full.is_due(step)
        if not everything and not self.quick.is_due(step):
            return []
        names = [*measures, "writing"]
        last = self.budget.predict(names)
        light = [name for name in names if name in self.light]
        lights_first = bool(light) and self._come_lights_first(last, trained, to_come)
        if everything and (lights_first or not self.budget.affords(names, trained, kept_back=last, to_come=to_come)):
            self._postpone(step, last, trained)
        elif everything and not self._should_save_grace(step, last, trained, to_come, self.last_full):
            return names[:-1]
        if self.quick.is_due(step):
            with_writing = [*light, "writing"]
            cost = self.budget.predict(with_writing)
            kept_back, part = (cost, 1.0) if lights_first else (last, LIGHT)
            if (
                light
                and self.budget.affords(with_writing, trained, kept_back=kept_back, to_come=to_come, part=part)
                and not (lights_first and self._should_save_grace(step, cost, trained, to_come, self.last_light))
            ):
                return light
            self.quick.due_at = step + max(1, round(0.05 * step))
        return []

    def note_measured(self, step: int, names: Iterable[str], change: float) -> None:
        """Note which measures were taken, and how much had changed."""
        self.quick.note_measured(step, change)
        self.last_light, self.light_done = step, self.light_done + (step > 0)
        if not set(names) <= self.light:
            self.full.note_measured(step, change)
            self.last_full = step

    def _come_lights_first(self, cost: float, trained: float, to_come: float) -> bool:
        """Whether enough full measurements, of this cost, do not fit what is allowed, and light ones are still too few."""
        allowed = self.budget.seconds_allowed(trained, to_come)
        if to_come <= 0:  # nobody knows yet how long the training is
            allowed = max(self.budget.grace, allowed)
        return self.light_done < FULL_MEASUREMENTS and FULL_MEASUREMENTS * cost > allowed

    def _should_save_grace(self, step: int, cost: float, trained: float, to_come: float, last: int) -> bool:
        """Whether the grace that would pay for this measurement is better kept for later; ``last``: step of the one before."""
        budget, grace = self.budget, self.budget.grace_of(trained + to_come)
        if cost <= 0 or budget.spent + 2 * cost <= budget.seconds_earned(trained, to_come):
            return False
        if step <= FIRST and grace >= ENOUGH * cost:
            return False
        here, end = max(1, last), FAR if self.steps is None else self.steps
        end = end if here < end else here * FAR
        others = max(0, math.floor((grace - budget.spent) / cost) - 1)  # besides the one at the end
        return step < round(here * (end / here) ** (1 / (others + 1)))

    def _postpone(self, step: int, cost: float, trained: float) -> None:
        """Put the full measurement off until the training time that pays for it should have passed."""
        self.skipped += 1
        missing = (self.budget.spent + 2 * cost) / (PLANNED_SHARE * self.budget.share) - trained
        per_step = trained / step if step else 0.0
        steps = math.ceil(missing / per_step) if per_step > 0 and math.isfinite(missing) else 1
        self.full.due_at = step + min(max(1, steps), max(1, round(self.full.growth * step)))
