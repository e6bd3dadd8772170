"""Methods with fixed features: ridge regression on random neurons or on the linearised network, readouts inside a ball."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.data.patterns import Patterns
from unlazy.models.truncated import Adam, TruncatedNet, smoothed_slope
from unlazy.runtime import require, stream
from unlazy.studies.emergence.common import STRUCTURED_GAMMA, accuracy
from unlazy.theory.truncated_limit import truncated_kernel_limit

RIDGES = (0.1, 1.0, 10.0, 100.0, 1e3, 1e4)
"""Ridges tried, in units of the mean eigenvalue of the kernel."""

Matrix = Float[Tensor, "n m"]
Vector = Float[Tensor, " n"]
Batches = Callable[[int], tuple[Matrix, Vector]]
Watch = Callable[[int, Callable[[Matrix], Vector]], None]


# --- ridge regression, tuned on rows of their own ----------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Labels of the three parts of the data."""

    train: Float[Tensor, " n"]
    validation: Float[Tensor, " v"]
    test: Float[Tensor, " t"]


@dataclass(frozen=True)
class Fit:
    """Test outputs of the ridge that was best on the validation rows."""

    output: Float[Tensor, " t"]
    ridge: float
    test: float


def ridge_on_features(
    train: Float[Tensor, "n m"], validation: Float[Tensor, "v m"], test: Float[Tensor, "t m"], y: Split
) -> Fit:
    """Ridge regression of labels on features, centred on the training rows; through whichever matrix is smaller."""
    mean = train.mean(0)
    centred = train - mean
    n, count = centred.shape
    target = y.train - y.train.mean()
    primal = count <= n
    gram = centred.T @ centred if primal else centred @ centred.T
    fits = []
    for ridge in RIDGES:
        if primal:
            readout = _solve(gram, centred.T @ target, ridge * float(gram.trace()) / n)
        else:
            readout = centred.T @ _solve(gram, target, ridge * float(gram.trace()) / n)
        outputs = [(part - mean) @ readout + y.train.mean() for part in (validation, test)]
        fits.append((accuracy(outputs[0], y.validation), Fit(outputs[1], ridge, accuracy(outputs[1], y.test))))
    return max(fits, key=lambda fit: fit[0])[1]


def ridge_on_kernel(
    train: Float[Tensor, "n n"], validation: Float[Tensor, "v n"], test: Float[Tensor, "t n"], y: Split
) -> Fit:
    """Kernel ridge regression of labels."""
    fits = []
    for ridge in RIDGES:
        coefficients = _solve(train, y.train, ridge * float(train.trace()) / len(train))
        guess, output = validation @ coefficients, test @ coefficients
        fits.append((accuracy(guess, y.validation), Fit(output, ridge, accuracy(output, y.test))))
    return max(fits, key=lambda fit: fit[0])[1]


def _solve(gram: Float[Tensor, "m m"], target: Float[Tensor, " m"], shift: float) -> Float[Tensor, " m"]:
    shifted = gram.clone()
    shifted.diagonal().add_(shift)
    return torch.cholesky_solve(target[:, None], torch.linalg.cholesky(shifted))[:, 0]


# --- features ----------------------------------------------------------------------------------------


def linearised_kernel(
    net: TruncatedNet, phi: Float[Tensor, "n D"], other: Float[Tensor, "m D"]
) -> Float[Tensor, "n m"]:
    """The tangent kernel of the network by all its parameters: sum_i s_i s_i' + a_i^2 s'_i s'_i' (<x, x'> + 1)."""
    slopes = [smoothed_slope(net.before(points), 0.0) * net.a for points in (phi, other)]
    return net.neurons(phi) @ net.neurons(other).T + (slopes[0] @ slopes[1].T) * (phi @ other.T + 1)


def infinite_kernel(
    patterns: Patterns, phi: Float[Tensor, "n D"], other: Float[Tensor, "m D"], at_once: int = 1000
) -> Float[Tensor, "n m"]:
    """The tangent kernel of the paper's start with unboundedly many neurons, per neuron, in float32."""
    k = patterns.relevant
    outer = patterns.deviation**2 / (STRUCTURED_GAMMA * k**2)
    variances = {"weight_variance": 1 / k**2, "bias_variance": 1 / k**4, "outer_variance": outer**2}
    return torch.cat([truncated_kernel_limit(rows, other, **variances).float() for rows in phi.split(at_once)])


def random_neurons(size: int, count: int, relevant: int, seed: int = 0) -> Callable[[Matrix], Matrix]:
    """Truncated-ReLU neurons with the start's law; values in [0, 1]."""
    generator = stream(seed, "random neurons")
    w = torch.randn(count, size, generator=generator) / relevant
    b = torch.randn(count, generator=generator) / relevant**2
    return lambda phi: torch.addmm(b.to(phi.dtype), phi, w.T.to(phi.dtype)).clamp_(0, 1)


def random_cosines(size: int, count: int, seed: int = 0) -> Callable[[Matrix], Matrix]:
    """cos(<w, x> + c) with Gaussian w of size about 1 along unit inputs and c even on a circle; values in [-1, 1]."""
    generator = stream(seed, "random cosines")
    w = 3 * torch.randn(count, size, generator=generator)
    turn = 2 * math.pi * torch.rand(count, generator=generator)
    return lambda phi: torch.addmm(turn.to(phi.dtype), phi, w.T.to(phi.dtype)).cos_()


# --- the same readouts trained step by step, for the curves ------------------------------------------


def descend_linearised(
    net: TruncatedNet, batches: Batches, steps: int, rate: float, watch: Watch, *, outer_only: bool = False
) -> None:
    """Adam on the hinge loss of the network linearised at ``net``; ``outer_only``: random features.

    ``watch(t, f)`` sees the function after step t.
    """
    thetas = [torch.zeros_like(value) for value in (net.w, net.b, net.a)]
    adams = [Adam(theta) for theta in thetas]

    def parts(
        phi: Float[Tensor, "n D"],
    ) -> tuple[Float[Tensor, "n units"], Float[Tensor, "n units"], Float[Tensor, " n"]]:
        neurons = net.neurons(phi)
        if outer_only:
            return neurons, neurons, neurons @ thetas[2]
        slopes = smoothed_slope(net.before(phi), 0.0) * net.a
        return neurons, slopes, neurons @ thetas[2] + (slopes * (phi @ thetas[0].T + thetas[1])).sum(1)

    watch(0, lambda phi: parts(phi)[2])
    for number in range(1, steps + 1):
        phi, y = batches(number)
        neurons, slopes, output = parts(phi)
        pull = torch.where(y * output < 1, -y, torch.zeros_like(y)) / len(y)
        now = rate * (1 - (number - 1) / steps)
        thetas[2] = thetas[2] + adams[2].move(neurons.T @ pull, now)
        if not outer_only:
            pulled = slopes * pull[:, None]
            thetas[0] = thetas[0] + adams[0].move(pulled.T @ phi, now)
            thetas[1] = thetas[1] + adams[1].move(pulled.sum(0), now)
        watch(number, lambda phi: parts(phi)[2])


def descend_in_function_space(
    kernel: Float[Tensor, "n n"],
    y: Float[Tensor, " n"],
    batches: Callable[[int], Tensor],
    steps: int,
    watch: Callable[[int, Tensor], None],
) -> None:
    """Gradient descent on the hinge loss of f = K coefficients, where parameters are too many to name.

    The rate begins at one over the largest eigenvalue of K / n and falls evenly to zero. ``batches(t)`` gives the rows of step t.
    """
    n = len(y)
    direction = torch.ones(n, dtype=kernel.dtype)
    for _ in range(20):
        direction = kernel @ (direction / direction.norm()) / n
    rate, coefficients = 1 / float(direction.norm()), torch.zeros_like(direction)
    watch(0, coefficients)
    for number in range(1, steps + 1):
        rows = batches(number)
        pulled = rows[y[rows] * (kernel[rows] @ coefficients) < 1]
        coefficients.index_add_(0, pulled, rate * (1 - (number - 1) / steps) / len(rows) * y[pulled])
        watch(number, coefficients)


# --- the least hinge loss inside a ball --------------------------------------------------------------


@dataclass(frozen=True)
class BallFit:
    """The least hinge loss of a readout with norm at most B: reached, and certified from below by a dual point."""

    reached: float
    certified: float


def least_hinge_in_ball(
    features: Float[Tensor, "n m"], y: Float[Tensor, " n"], norm: float, *, steps: int = 400, smoothing: float = 0.05
) -> BallFit:
    """Accelerated projected descent on the smoothed hinge loss over readouts of norm at most ``norm``.

    For every alpha in [0, 1]^n no such readout has a loss below mean(alpha) - norm |mean(alpha y psi)|: this certifies.
    """
    require(norm > 0, f"the ball needs a radius above 0, got {norm!r}.")
    n, count = features.shape
    signed = features * y[:, None]
    direction = torch.ones(count, dtype=features.dtype)
    for _ in range(30):
        direction = signed.T @ (signed @ (direction / direction.norm())) / n
    rate = smoothing / (1.1 * float(direction.norm()))
    point = previous = torch.zeros(count, dtype=features.dtype)
    certified, momentum = -math.inf, 1.0
    for _ in range(steps):
        margin = 1 - signed @ point
        alpha = (margin / smoothing).clamp(0, 1)
        pull = signed.T @ alpha / n
        certified = max(certified, float(alpha.mean() - norm * pull.norm()))
        moved = point + rate * pull
        moved = moved * min(1.0, norm / max(float(moved.norm()), 1e-30))
        following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        point = moved + (momentum - 1) / following * (moved - previous)
        previous, momentum = moved, following
    reached = float((1 - signed @ previous).clamp_min(0).mean())
    return BallFit(reached, certified)
