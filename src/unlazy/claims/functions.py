"""Functions for ``Part(by=...)``: from quantities of each seed to one number per seed."""

from __future__ import annotations

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
