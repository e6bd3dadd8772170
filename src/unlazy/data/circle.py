"""The circle of the half-space paper: an easy half and a hard half."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

from unlazy.data.dataset import Dataset
from unlazy.runtime import require


@dataclass(frozen=True)
class Circle:
    """Points x = (cos t, sin t) with a slow sine on the top half and a fast one on the bottom half.

        y(t) = sin(top t)                          0 <= t < pi        ("easy")
        y(t) = sin(top pi + bottom (t - pi))       pi <= t < 2 pi     ("hard")

    ``top`` and ``bottom`` count half cycles: ``top=1`` is one bump on the top half. ``offset`` shifts the
    equispaced angles by that share of a step (0.5 keeps points off the axis between the halves).

    >>> len(Circle(n=8).dataset())
    8
    """

    n: int = 500
    top: float = 1.0
    bottom: float = 9.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        require(isinstance(self.n, int) and self.n >= 2, f"the circle needs at least 2 points, got n={self.n!r}.")
        for name in ("top", "bottom"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"{name} must be a number of half cycles >= 0, got {value!r}.")
        require(0 <= self.offset < 1, f"offset is a share of a step in [0, 1), got {self.offset!r}.")

    def angles(self) -> torch.Tensor:
        """t_j = 2 pi (j + offset) / n, float64 ``[n]``."""
        return 2 * math.pi * (torch.arange(self.n, dtype=torch.float64) + self.offset) / self.n

    def dataset(self, dtype: torch.dtype = torch.float32) -> Dataset:
        """The points in order of angle, with groups ``top`` and ``bottom``."""
        t = self.angles()
        is_top = t < math.pi
        y = torch.where(is_top, torch.sin(self.top * t), torch.sin(self.top * math.pi + self.bottom * (t - math.pi)))
        x = torch.stack([torch.cos(t), torch.sin(t)], dim=1)
        groups = {"top": is_top, "bottom": ~is_top}
        return Dataset("circle", x.to(dtype), y[:, None].to(dtype), groups, asdict(self))


CIRCLE_PRESETS = {
    "author": Circle(n=500, top=1.0, bottom=9.0),
    "pilot": Circle(n=512, top=2.0, bottom=16.0, offset=0.5),
}
"""``author``: the set-up found in the first author's notebooks. ``pilot``: a harder one (sin 2t, sin 16t)."""
