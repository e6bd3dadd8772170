"""Recursive feature machines: kernel ridge regression whose metric learns from the function it fitted.

    K_M(x, z) = exp(-|x - z|_M / width),    |u|_M^2 = u^T M u
    repeat:   alpha = (K_M + ridge I)^-1 y,     M = (1/n) sum_i grad f(x_i) grad f(x_i)^T   of  f = K_M(., X) alpha

M starts as the identity, so that the machine of round 0 is an ordinary Laplace kernel: features fixed in advance. Every
later round stretches the inputs along the directions in which the function before it changed: the average gradient outer
product (AGOP) as feature learning without a network (Radhakrishnan, Beaglehole, Pandit, Belkin).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.runtime import require


@dataclass(frozen=True)
class FeatureMachine:
    """A fitted kernel machine: f(x) = sum_i coefficients_i K_M(x, points_i)."""

    points: Float[Tensor, "n d"]
    coefficients: Float[Tensor, "n o"]
    metric: Float[Tensor, "d d"]
    width: float

    def __call__(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "m o"]:
        return laplace_kernel(x.to(self.points), self.points, self.metric, self.width) @ self.coefficients

    def agop(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "d d"]:
        """(1/m) sum over rows and outputs of grad f grad f^T; a row that is a point of the machine leaves that point out.

        ``grad f(x) = -(1/width) sum_i c_i K(x, x_i) / |x - x_i|_M  M (x - x_i)``: one product of matrices for each output.
        """
        x = x.to(self.points)
        lengths = _metric_distances(x, self.points, self.metric)
        pulls = torch.where(lengths > 0, (-lengths / self.width).exp() / lengths, torch.zeros_like(lengths))
        total = torch.zeros_like(self.metric)
        for coefficients in self.coefficients.T:
            weights = pulls * coefficients
            rows = (x * weights.sum(1, keepdim=True) - weights @ self.points) @ self.metric / self.width
            total += rows.T @ rows
        return total / len(x)


def laplace_kernel(
    x: Float[Tensor, "n d"], z: Float[Tensor, "m d"], metric: Float[Tensor, "d d"], width: float
) -> Float[Tensor, "n m"]:
    """``exp(-|x - z|_M / width)``.

    >>> laplace_kernel(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), torch.eye(2), 5.0).item() == torch.tensor(-1.0).exp().item()
    True
    """
    return (-_metric_distances(x, z, metric) / width).exp()


def recursive_features(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m o"],
    *,
    rounds: int = 5,
    width: float | None = None,
    ridge: float = 1e-3,
) -> Iterator[FeatureMachine]:
    """The machines of rounds 0 .. ``rounds``; the first is a plain Laplace kernel.

    The metric is kept at trace d, so that ``width`` (default: the typical distance of two rows in the plain metric) means the
    same in every round. Computed in float64: in a learned metric rows that differ elsewhere nearly coincide.
    """
    require(len(x) == len(y), f"{len(x)} inputs but {len(y)} targets.")
    require(len(x) >= 2, "a recursive feature machine needs at least two points.")
    require(rounds >= 0, f"rounds must be at least 0, got {rounds!r}.")
    require(ridge > 0, f"the ridge must be positive, got {ridge!r}: with 0 repeated inputs cannot be fitted.")
    x, y, size = x.double(), y.double(), x.shape[1]
    width = typical_distance(x) if width is None else width
    require(width > 0, f"the width of the kernel must be positive, got {width!r}.")
    metric = torch.eye(size, dtype=x.dtype)
    for number in range(rounds + 1):
        kernel = laplace_kernel(x, x, metric, width)
        kernel.diagonal().add_(ridge)
        coefficients = torch.cholesky_solve(y, torch.linalg.cholesky(kernel))
        machine = FeatureMachine(x, coefficients, metric, width)
        yield machine
        if number < rounds:
            product = machine.agop(x)
            trace = float(product.trace())
            require(trace > 0, "the fitted function is constant: its gradients name no direction.")
            metric = product * (size / trace)


def typical_distance(x: Float[Tensor, "n d"]) -> float:
    """Root of the mean squared distance of two rows."""
    return float((2 * (x - x.mean(0)).square().sum(1).mean()).sqrt())


def top_directions(metric: Float[Tensor, "d d"], count: int) -> Float[Tensor, "d count"]:
    """The eigenvectors of the largest eigenvalues, largest first."""
    require(1 <= count <= len(metric), f"between 1 and {len(metric)} directions can be asked for, got {count}.")
    return torch.linalg.eigh(metric).eigenvectors[:, -count:].flip(1)


def _metric_distances(x: Tensor, z: Tensor, metric: Tensor) -> Float[Tensor, "n m"]:
    """|x - z|_M through a square root of M: distances cannot come out negative."""
    values, vectors = torch.linalg.eigh(metric)
    root = vectors * values.clamp_min(0).sqrt()
    return torch.cdist(x @ root, z @ root)
