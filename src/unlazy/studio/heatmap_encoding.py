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
class MapFacts:
    """What the colour scale needs to know of one heat map."""

    unit: float
    diagonal: NDArray[np.float64]  # in units
    largest: float  # of the absolute values, in units
    high: float
    low: float


@dataclass(frozen=True)
class Scale:
    """The colour scale: how values become bytes."""

    top: float
    signed: bool
    clipped: bool  # whether some value lies beyond the top


def is_kernel(quantity: str) -> bool:
    """Whether a quantity is a kernel, which is shown over its mean diagonal."""
    return quantity.endswith(KERNELS)


def zero_nonfinite(values: NDArray[Any]) -> NDArray[Any]:
    """Replace entries that are not finite by zero; returns ``values`` itself where all are finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = values.sum(dtype=np.float64)
    return values if np.isfinite(total) else np.where(np.isfinite(values), values, 0)


def map_facts(quantity: str, values: NDArray[Any]) -> MapFacts:
    """Unit, diagonal and extremes of a heat map; entries that are not finite count as zero."""
    finite = zero_nonfinite(values)
    diagonal = np.diagonal(finite).astype(np.float64)
    mean = float(diagonal.mean()) if is_kernel(quantity) and len(diagonal) else 1.0
    unit = mean if np.isfinite(mean) and mean > 0 else 1.0
    high, low = float(finite.max(initial=0)) / unit, float(finite.min(initial=0)) / unit
    return MapFacts(unit, diagonal / unit, max(high, -low), high, low)


def common_scale(quantity: str, seen: Sequence[MapFacts]) -> Scale:
    """One scale for all the given heat maps."""
    largest = max((entry.largest for entry in seen), default=0.0)
    top = 0.0
    if is_kernel(quantity) and seen:
        share = next((share for name, share in QUANTILES.items() if quantity.endswith(name)), 1.0)
        top = float(np.quantile(np.abs(np.concatenate([entry.diagonal for entry in seen])), share))
    top = top or largest or 1.0
    high, low = max((entry.high for entry in seen), default=0.0), min((entry.low for entry in seen), default=0.0)
    return Scale(top, low < -SIGNED_FROM * high, largest > top)


def encode(values: NDArray[Any], unit: float, scale: Scale) -> NDArray[np.uint8]:
    """The bytes of a heat map (formula above); entries that are not finite are drawn as zero."""
    finite = zero_nonfinite(values).astype(np.float64) / unit
    level = np.sqrt(np.minimum(np.abs(finite) / scale.top, 1))
    code = 128 + 127 * np.sign(finite) * level if scale.signed else 255 * level
    return np.rint(code).astype(np.uint8)


def average_blocks(values: NDArray[Any], most: int = LARGEST_SIDE) -> tuple[NDArray[Any], int]:
    """Average blocks so that at most ``most`` rows and columns remain; returns the averages and the side of a block."""
    stride = -(-max(values.shape) // most)
    if stride <= 1:
        return values, 1
    finite = zero_nonfinite(values).astype(np.float64)
    for axis in (0, 1):
        starts = np.arange(0, finite.shape[axis], stride)
        sizes = np.diff(np.append(starts, finite.shape[axis]))
        finite = np.add.reduceat(finite, starts, axis=axis) / (sizes[:, None] if axis == 0 else sizes)
    return finite, stride
