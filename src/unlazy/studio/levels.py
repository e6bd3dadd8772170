"""Heat maps as bytes: one scale for a whole training, so that frames can be compared by eye.

    level = sqrt(min(|K| / unit / top, 1))        a square root, because the entries span orders of magnitude
    unsigned: byte = rint(255 level)              signed: byte = rint(128 + 127 sign(K) level)

``unit`` is the mean diagonal for kernels (they are shown trace-normalised) and 1 for anything else. ``top`` is a quantile
of the diagonals, over all steps or of one: less than 1 for tangent kernels, so that one spike does not darken a training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_SIDE = 1000
KERNELS = ("overlap", "tangent", "kernel")
QUANTILES = {"tangent": 0.98}
SIGNED_FROM = 1e-3  # a map counts as signed when its least entry is below minus this share of its largest


@dataclass(frozen=True)
class Facts:
    """What the scale needs to know of one map."""

    unit: float
    diagonal: NDArray[np.float64]  # in units
    largest: float  # of the absolute values, in units
    high: float
    low: float


@dataclass(frozen=True)
class Scale:
    """How values become levels."""

    top: float
    signed: bool
    clipped: bool  # whether some value lies beyond the top


def is_kernel(quantity: str) -> bool:
    """Whether a map is symmetric by its nature and shown trace-normalised."""
    return quantity.endswith(KERNELS)


def zeroed(values: NDArray[Any]) -> NDArray[Any]:
    """The same numbers with zeros where they are not finite; without a copy where all are."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = values.sum(dtype=np.float64)
    return values if np.isfinite(total) else np.where(np.isfinite(values), values, 0)


def facts(quantity: str, values: NDArray[Any]) -> Facts:
    """What there is to know of a map; entries that are not finite count as zero."""
    finite = zeroed(values)
    diagonal = np.diagonal(finite).astype(np.float64)
    mean = float(diagonal.mean()) if is_kernel(quantity) and len(diagonal) else 1.0
    unit = mean if np.isfinite(mean) and mean > 0 else 1.0
    high, low = float(finite.max(initial=0)) / unit, float(finite.min(initial=0)) / unit
    return Facts(unit, diagonal / unit, max(high, -low), high, low)


def scale_of(quantity: str, seen: Sequence[Facts]) -> Scale:
    """One scale for all the given maps."""
    largest = max((entry.largest for entry in seen), default=0.0)
    top = 0.0
    if is_kernel(quantity) and seen:
        share = next((share for name, share in QUANTILES.items() if quantity.endswith(name)), 1.0)
        top = float(np.quantile(np.abs(np.concatenate([entry.diagonal for entry in seen])), share))
    top = top or largest or 1.0
    high, low = max((entry.high for entry in seen), default=0.0), min((entry.low for entry in seen), default=0.0)
    return Scale(top, low < -SIGNED_FROM * high, largest > top)


def levels(values: NDArray[Any], unit: float, scale: Scale) -> NDArray[np.uint8]:
    """The bytes of a map; what is not finite is drawn as zero."""
    finite = zeroed(values).astype(np.float64) / unit
    level = np.sqrt(np.minimum(np.abs(finite) / scale.top, 1))
    code = 128 + 127 * np.sign(finite) * level if scale.signed else 255 * level
    return np.rint(code).astype(np.uint8)


def coarse(values: NDArray[Any], most: int = LARGEST_SIDE) -> tuple[NDArray[Any], int]:
    """Block averages of a map with more than ``most`` rows or columns, and the side of a block."""
    stride = -(-max(values.shape) // most)
    if stride <= 1:
        return values, 1
    finite = zeroed(values).astype(np.float64)
    for axis in (0, 1):
        starts = np.arange(0, finite.shape[axis], stride)
        sizes = np.diff(np.append(starts, finite.shape[axis]))
        finite = np.add.reduceat(finite, starts, axis=axis) / (sizes[:, None] if axis == 0 else sizes)
    return finite, stride
