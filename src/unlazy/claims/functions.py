"""Functions for ``Part(by=...)``: from quantities of each seed to one number per seed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[Any]


def difference(one: Vector, other: Vector) -> Vector:
    """The first minus the second, seed by seed."""
    return one - other


def distance(one: Vector, other: Vector) -> Vector:
    """The absolute difference, seed by seed."""
    return np.abs(one - other)


def ratio(one: Vector, other: Vector) -> Vector:
    """The first divided by the second, seed by seed; infinity over infinity is NaN."""
    return one / other


def more_seeds(one: Vector, other: Vector) -> Vector:
    """How many more seeds have 1 in the first than in the second (0 or 1 a seed), repeated for every seed.

    A seed without one of its numbers counts against the first.
    """
    return np.full(len(one), float((one == 1).sum() - (other != 0).sum()))


def paired_p_value(one: Vector, other: Vector) -> Vector:
    """p of the one-sided exact McNemar test (sign test) that the first exceeds the second, repeated for every seed.

    Only seeds that differ count. A seed without one of its numbers counts against the first.
    """
    wins, losses = int((one > other).sum()), int((~(one >= other)).sum())
    both = wins + losses
    tail = sum(math.comb(both, count) for count in range(wins, both + 1)) / 2**both
    return np.full(len(one), tail)
