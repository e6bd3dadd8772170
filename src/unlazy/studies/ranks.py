"""Spearman's rank correlation, with ties."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman's rank correlation of two lists of numbers; equal numbers share their mean rank. NaN if a list is constant.

    >>> rank_correlation([1, 2, 3], [10, 40, 90]), rank_correlation([1, 2, 3], [3, 2, 1])
    (1.0, -1.0)
    """
    one, other = (mean_ranks(np.asarray(values, dtype=np.float64)) for values in (first, second))
    one, other = one - one.mean(), other - other.mean()
    size = float(np.sqrt((one @ one) * (other @ other)))
    return float(one @ other) / size if size > 0 else float("nan")


def mean_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rank of each number, from 0; equal numbers share the mean of their ranks."""
    ordered = np.sort(values)
    first, last = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return np.asarray((first + last - 1) / 2)
