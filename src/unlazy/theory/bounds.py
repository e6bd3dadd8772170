"""The emergence paper's three theorems as functions: what they ask, what they say, and where they say nothing.

Constants hidden in Omega are arguments and 1 unless given: with other constants other settings bind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from unlazy.runtime import require


@dataclass(frozen=True)
class Condition:
    """One inequality of a theorem: ``given >= needed``."""

    statement: str
    given: float
    needed: float

    @property
    def holds(self) -> bool:
        """Whether what is given reaches what is needed."""
        return self.given >= self.needed

    @property
    def slack(self) -> float:
        """The largest factor on the hidden constant with which the condition would still hold."""
        return self.given / self.needed


def learning_conditions(
    *,
    patterns: int,
    relevant: int,
    pairs: int,
    background: float,
    gamma: float,
    error: float,
    failure: float = 0.05,
    background_constant: float = 1.0,
    relevant_constant: float = 1.0,
    width_constant: float = 1.0,
) -> tuple[Condition, ...]:
    """Theorem 1: if all hold, training reaches hinge loss ``error`` with probability 1 - ``failure`` within m^(4/3) steps.

    p_o >= c k^2 / D,   k >= c log^2(D m / (failure gamma)),   m >= c k^12 / error^(3/2),   m >= D.

    >>> [c.holds for c in learning_conditions(patterns=100, relevant=5, pairs=300, background=0.5, gamma=0.25, error=0.1)]
    [True, False, False, True]
    """
    for name, value in (("error", error), ("failure", failure), ("gamma", gamma), ("background", background)):
        require(0 < value <= 1, f"{name} lies in (0, 1], got {value!r}.")
    require(1 <= relevant <= patterns, f"k={relevant} relevant patterns of D={patterns}: k lies in [1, D].")
    require(pairs >= 1, f"at least one pair of neurons is needed, got m={pairs}.")
    k, log = relevant, math.log(patterns * pairs / (failure * gamma))
    return (
        Condition("p_o >= c k^2 / D", background, background_constant * k**2 / patterns),
        Condition("k >= c log^2(D m / (delta gamma))", k, relevant_constant * log**2),
        Condition("m >= c k^12 / eps^(3/2)", pairs, width_constant * k**12 / error**1.5),
        Condition("m >= D", pairs, patterns),
    )


def least_learnable_relevant(*, error: float = 0.1, failure: float = 0.05, gamma: float = 0.25) -> int:
    """The least k for which Theorem 1's conditions can be met at all, with hidden constants 1 and the least D and m.

    p_o <= 1/2 makes D at least 2 k^2, and m is at least k^12 / error^(3/2); the condition on k then decides.

    >>> least_learnable_relevant()
    22069
    """

    def is_met(k: int) -> bool:
        facts = {"patterns": 2 * k**2, "relevant": k, "pairs": math.ceil(k**12 / error**1.5) + 1, "background": 0.5}
        conditions = learning_conditions(**facts, gamma=gamma, error=error, failure=failure)
        return all(condition.holds for condition in conditions)

    high = 2
    while not is_met(high):
        high *= 2
    low = high // 2  # k grows faster than its condition from here on
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_met(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class FixedFeatureBound:
    """Theorem 2 at one setting: no readout of these features has a smaller hinge loss on every relevant set."""

    value: float
    broken: tuple[str, ...]

    @property
    def binds(self) -> bool:
        """Whether it says anything: its conditions hold and it is above zero."""
        return not self.broken and self.value > 0


def fixed_feature_bound(
    *, features: int, norm: float, patterns: int, relevant: int, mixture: float = 0.5
) -> FixedFeatureBound:
    """Theorem 2: for N data-independent features in [-1, 1] and readouts of norm at most B, some structured parity data have

        hinge loss >= p_o (1 - sqrt(2N) B / 2^k)    for every readout,    if 3 < k <= D/16 and k is odd,

    p_o being the share of inputs without structure (``mixture``).

    >>> round(fixed_feature_bound(features=600, norm=10, patterns=176, relevant=11).value, 3)
    0.415
    """
    require(features >= 1 and norm >= 0, f"N >= 1 features and a norm B >= 0 are needed, got {features} and {norm}.")
    require(0 <= mixture <= 1, f"mixture is a probability, got {mixture!r}.")
    k = relevant
    conditions = (
        (k > 3, f"k={k} is not above 3"),
        (k <= patterns / 16, f"k={k} exceeds D/16={patterns / 16:g}"),
        (k % 2 == 1, f"k={k} is even"),
    )
    value = mixture * (1 - math.sqrt(2 * features) * norm / 2**k)
    return FixedFeatureBound(value, tuple(reason for holds, reason in conditions if not holds))


@dataclass(frozen=True)
class QueryBound:
    """Theorem 3 at one (D, k): learners with error below ``error`` need ``least`` queries, or 1/tolerance that large."""

    least: float
    error: float

    def rules_out(self, queries: int, tolerance: float) -> bool:
        """Whether no algorithm with so many queries of this tolerance can learn."""
        require(tolerance > 0, f"a statistical query has a tolerance above 0, got {tolerance!r}.")
        return queries < self.least and 1 / tolerance < self.least


def query_bound(patterns: int, relevant: int) -> QueryBound:
    """Theorem 3: on unstructured data error below 1/2 - C(D,k)^-3 takes (1/2) C(D,k)^(1/3) queries, or 1/tau at least that.

    >>> round(query_bound(100, 5).least)
    211
    """
    require(1 <= relevant <= patterns, f"k={relevant} relevant patterns of D={patterns}: k lies in [1, D].")
    sets = math.log(math.comb(patterns, relevant))  # of a whole number, however large
    least = 0.5 * math.exp(sets / 3) if sets / 3 < 700 else math.inf
    return QueryBound(least, 0.5 - math.exp(-3 * sets))
