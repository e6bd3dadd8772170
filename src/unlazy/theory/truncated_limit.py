"""The emergence paper's network at its start, with unboundedly many neurons: its tangent kernel in closed form and one integral.

Neurons s(<w, x> + b) with Gaussian w and b see two inputs as a pair (u, v) of correlated Gaussians, and the tangent kernel by
all parameters, divided by the number of neurons, tends to

    E[s(u) s(v)] + Var(a) E[s'(u) s'(v)] (<x, x'> + 1).

Given u, v is Gaussian again, so the inner mean is that of a smoothed neuron, which has a closed form; the outer one is an
integral over one variable.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from unlazy.models.truncated import smoothed_neuron, smoothed_slope
from unlazy.runtime import require

CELLS = 4000
"""Cells of the outer integral over [0, 1], and as many of its tail beyond 1."""
STEPS = 2**21
"""Inner products are told apart to this part of their range."""
AT_MOST = 5_000
"""Different inner products for which the integral is taken."""


def pair_moments(
    left: Float64[Tensor, " p"], right: Float64[Tensor, " p"], across: Float64[Tensor, " p"]
) -> tuple[Float64[Tensor, " p"], Float64[Tensor, " p"]]:
    """E[s(u) s(v)] and E[s'(u) s'(v)] for Gaussians of variances ``left``, ``right`` and covariance ``across``; s is truncated.

    s(u) is 1 beyond 1: that tail is a probability of the pair, folded in as the mean of s(v) over u > 1.
    """
    require(bool((left > 0).all()) and bool((right > 0).all()), "a neuron without variance sees no input.")
    neurons, slopes = [], []
    middles = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    for first, second, shared in zip(left.tolist(), right.tolist(), across.tolist(), strict=True):
        rest = math.sqrt(max(second - shared**2 / first, 0.0))
        reach = max(9 * math.sqrt(first) - 1, 0.0)
        means = []
        top = min(1.0, 9 * math.sqrt(first))  # where a narrow Gaussian has ended
        for u, cell in ((top * middles, top / CELLS), (1 + reach * middles, reach / CELLS)):
            density = torch.exp(-u.square() / (2 * first)) * (cell / math.sqrt(2 * math.pi * first))
            partner = shared / first * u
            neuron = density * u.clamp(max=1) * smoothed_neuron(partner, rest)
            means.append((float(neuron.sum()), float((density * smoothed_slope(partner, rest)).sum())))
        neurons.append(means[0][0] + means[1][0])
        slopes.append(means[0][1])  # beyond 1 the slope is 0
    return torch.tensor(neurons, dtype=torch.float64), torch.tensor(slopes, dtype=torch.float64)


def truncated_kernel_limit(
    x: Float[Tensor, "n d"],
    other: Float[Tensor, "m d"],
    *,
    weight_variance: float,
    bias_variance: float,
    outer_variance: float,
) -> Float64[Tensor, "n m"]:
    """The tangent kernel of unboundedly many truncated neurons, per neuron, for w ~ N(0, weight_variance I) and so on.

    All inputs must be equally long, as those of fair patterns are (background 1/2): the kernel is then a function of the inner
    product, which takes D + 1 different values there, and only so many integrals are needed.
    """
    for name, value in (("weight", weight_variance), ("outer", outer_variance)):
        require(value > 0, f"the {name} variance must be positive, got {value!r}.")
    require(bias_variance >= 0, f"a variance is at least 0, got {bias_variance!r}.")
    x, other = x.double(), other.double()
    squares = torch.cat([points.square().sum(1) for points in (x, other)])
    length = float(squares.mean())
    require(
        float((squares - length).abs().max()) <= 1e-6 * length,
        "the inputs have different lengths: take patterns with background=0.5, or divide each input by its length.",
    )
    step = 2 * length / STEPS  # both ends, same and opposite inputs, are met exactly
    place = ((x @ other.T + length) / step).round().long().clamp(0, STEPS)
    met = torch.bincount(place.flatten(), minlength=STEPS + 1).nonzero()[:, 0]
    require(
        len(met) <= AT_MOST, f"{len(met)} different inner products are too many integrals; at most {AT_MOST} are taken."
    )
    products = met.to(torch.float64) * step - length
    variance = torch.full_like(products, weight_variance * length + bias_variance)
    neurons, slopes = pair_moments(variance, variance, weight_variance * products + bias_variance)
    table = torch.zeros(STEPS + 1, dtype=torch.float64)
    table[met] = neurons + outer_variance * slopes * (products + 1)
    return table[place]
