"""Where the borders of gates run along curves through input space, and how near they are to given places on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unlazy.runtime import require


@dataclass(frozen=True)
class Curves:
    """Curves of points ``x``, their steps of equal length ``step``, and the steps on which the target jumps.

    ``closed``: the last point is followed by the first. A curve has as many steps as points if it is closed, else one less.
    """

    x: Float[Tensor, "curves points d"]
    jumps: Bool[Tensor, "curves steps"]
    step: float
    closed: bool = False

    def __post_init__(self) -> None:
        steps = self.x.shape[1] - (not self.closed)
        shape = (self.x.shape[0], steps)
        require(tuple(self.jumps.shape) == shape, f"jumps must be {shape}, got {tuple(self.jumps.shape)}.")
        require(bool(self.jumps.any(1).all()), "every curve needs a jump to measure a distance from.")

    def distance(self) -> Float[Tensor, "curves steps"]:
        """From the middle of every step, along its curve, to the middle of the nearest step with a jump."""
        places = torch.arange(self.jumps.shape[1], dtype=torch.float64)
        apart = (places[:, None] - places).abs()
        if self.closed:
            apart = torch.minimum(apart, len(places) - apart)
        far = torch.where(self.jumps[:, None, :], apart, torch.inf)  # [curves, steps, steps]
        return self.step * far.amin(-1)


def border_crossings(
    q: Float[Tensor, "*members samples units"], curves: Curves
) -> Bool[Tensor, "*members curves steps units"]:
    """On which steps of the curves the pre-activations of each unit change their sign; ``q`` at ``curves.x.flatten(0, 1)``."""
    open_ = (q >= 0).unflatten(-2, curves.x.shape[:2])
    after = open_.roll(-1, -2)
    crossed = open_ != after
    return crossed if curves.closed else crossed[..., :-1, :]


def mean_on_borders(
    crossed: Bool[Tensor, "*members curves steps units"],
    numbers: Float[Tensor, "curves steps"],
    weights: Float[Tensor, "*members units"] | None = None,
) -> Float[Tensor, "*members"]:
    """Mean over all border crossings of a number that each step has; NaN without a crossing.

    ``weights``: how much the crossings of each unit count.
    """
    counts = crossed.to(numbers)
    if weights is not None:
        counts = counts * weights[..., None, None, :].to(numbers)
    return (counts * numbers[..., None]).sum((-3, -2, -1)) / counts.sum((-3, -2, -1))


def random_rotation(dimensions: int, random: torch.Generator) -> Float[Tensor, "d d"]:
    """A rotation or reflection, uniform over all of them."""
    q, r = torch.linalg.qr(torch.randn(dimensions, dimensions, generator=random, dtype=torch.float64))
    return q * r.diagonal().sign()
