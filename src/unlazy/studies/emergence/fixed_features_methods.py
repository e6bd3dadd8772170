"""Methods with fixed features: ridge regression and descent on random neurons or the linearised network, readouts in a ball."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.data.patterns import Patterns, PatternSample
from unlazy.models.truncated import Adam, TruncatedNet, smoothed_slope
from unlazy.runtime import require, stream
from unlazy.studies.emergence.common import STRUCTURED_GAMMA, accuracy, solve_ridge
from unlazy.theory.truncated_limit import truncated_kernel_limit

RIDGES = (0.1, 1.0, 10.0, 100.0, 1e3, 1e4)
"""Ridges tried, in units of the mean eigenvalue of the kernel."""

Matrix = Float[Tensor, "_ _"]
Vector = Float[Tensor, " _"]
Batches = Callable[[int], tuple[Matrix, Vector]]


# --- ridge regression, its ridge chosen on validation rows ----------------------------------------------------


Ridge = Callable[[Matrix, Matrix, Matrix, Vector, Vector], tuple[Vector, float]]
"""Takes features (or kernels) of training, validation and test rows, and the labels of the first two; returns test outputs and
the ridge that was chosen."""


def ridge_on_features(
    train: Float[Tensor, "n m"],
    validation: Float[Tensor, "v m"],
    test: Float[Tensor, "t m"],
    y: Float[Tensor, " n"],
    validation_y: Float[Tensor, " v"],
) -> tuple[Float[Tensor, " t"], float]:
    """Ridge regression of labels on features, centred on the training rows; solves for whichever Gram matrix is smaller."""
    mean, offset = train.mean(0), y.mean()
    centred, target = train - mean, y - offset
    n, count = centred.shape
    primal = count <= n
    gram = centred.T @ centred if primal else centred @ centred.T

    def outputs(ridge: float) -> tuple[Vector, Vector]:
        solved = solve_ridge(gram, centred.T @ target if primal else target, ridge * float(gram.trace()) / n)
        readout = solved if primal else centred.T @ solved
        return (validation - mean) @ readout + offset, (test - mean) @ readout + offset

    return choose_ridge(outputs, validation_y)


def ridge_on_kernel(
    train: Float[Tensor, "n n"],
    validation: Float[Tensor, "v n"],
    test: Float[Tensor, "t n"],
    y: Float[Tensor, " n"],
    validation_y: Float[Tensor, " v"],
) -> tuple[Float[Tensor, " t"], float]:
    """Kernel ridge regression of labels."""

    def outputs(ridge: float) -> tuple[Vector, Vector]:
        coefficients = solve_ridge(train, y, ridge * float(train.trace()) / len(train))
        return validation @ coefficients, test @ coefficients

    return choose_ridge(outputs, validation_y)


def choose_ridge(outputs: Callable[[float], tuple[Vector, Vector]], y: Float[Tensor, " v"]) -> tuple[Vector, float]:
    """Test outputs for the ridge with the best accuracy on the validation rows, whose labels are ``y``; and that ridge.

    ``outputs(ridge)`` returns the validation and the test outputs.
    """
    tried = [(*outputs(ridge), ridge) for ridge in RIDGES]
    _, output, ridge = max(tried, key=lambda fit: accuracy(fit[0], y))
    return output, ridge


# --- features ----------------------------------------------------------------------------------------


def linearised_kernel(
    net: TruncatedNet, phi: Float[Tensor, "n D"], other: Float[Tensor, "m D"]
) -> Float[Tensor, "n m"]:
    """The tangent kernel of the network by all its parameters: sum_i s_i s_i' + a_i^2 s'_i s'_i' (<x, x'> + 1)."""
    slopes = [smoothed_slope(net.pre_activations(points), 0.0) * net.a for points in (phi, other)]
    return net.neurons(phi) @ net.neurons(other).T + (slopes[0] @ slopes[1].T) * (phi @ other.T + 1)


def infinite_width_kernel(
    patterns: Patterns, phi: Float[Tensor, "n D"], other: Float[Tensor, "m D"], at_once: int = 1000
) -> Float[Tensor, "n m"]:
    """The tangent kernel of the paper's start, divided by the number of neurons as it goes to infinity; in float32."""
    k = patterns.relevant
    outer = patterns.deviation**2 / (STRUCTURED_GAMMA * k**2)
    variances = {"weight_variance": 1 / k**2, "bias_variance": 1 / k**4, "outer_variance": outer**2}
    return torch.cat([truncated_kernel_limit(rows, other, **variances).float() for rows in phi.split(at_once)])


def random_neurons(size: int, count: int, relevant: int, seed: int = 0) -> Callable[[Matrix], Matrix]:
    """The map to truncated-ReLU neurons that are drawn like those of the start; values in [0, 1]."""
    generator = stream(seed, "random neurons")
    w = torch.randn(count, size, generator=generator) / relevant
    b = torch.randn(count, generator=generator) / relevant**2
    return lambda phi: torch.addmm(b.to(phi.dtype), phi, w.T.to(phi.dtype)).clamp_(0, 1)


def random_cosines(size: int, count: int, seed: int = 0) -> Callable[[Matrix], Matrix]:
    """The map to features cos(<w, x> + c), with Gaussian w and c uniform on the circle; values in [-1, 1]."""
    generator = stream(seed, "random cosines")
    w = 3 * torch.randn(count, size, generator=generator)
    turn = 2 * math.pi * torch.rand(count, generator=generator)
    return lambda phi: torch.addmm(turn.to(phi.dtype), phi, w.T.to(phi.dtype)).cos_()


# --- the same models trained step by step, for the curves --------------------------------------------


def descend_linearised(
    net: TruncatedNet, batches: Batches, steps: int, rate: float, *, outer_only: bool = False
) -> Iterator[Callable[[Matrix], Vector]]:
    """Outputs of the network linearised at ``net`` after 0, 1, 2, .. steps of Adam on the hinge loss.

    ``outer_only``: only outer weights are trained, which makes the neurons random features. The rate falls evenly to zero.
    """
    thetas = [torch.zeros_like(value) for value in (net.w, net.b, net.a)]
    adams = [Adam(theta) for theta in thetas]

    def slopes_at(phi: Float[Tensor, "n D"]) -> Float[Tensor, "n units"]:
        return smoothed_slope(net.pre_activations(phi), 0.0) * net.a

    def output(phi: Float[Tensor, "n D"]) -> Float[Tensor, " n"]:
        by_outer = net.neurons(phi) @ thetas[2]
        return by_outer if outer_only else by_outer + (slopes_at(phi) * (phi @ thetas[0].T + thetas[1])).sum(1)

    yield output
    for number in range(1, steps + 1):
        phi, y = batches(number)
        pull = torch.where(y * output(phi) < 1, -y, torch.zeros_like(y)) / len(y)
        now = rate * (1 - (number - 1) / steps)
        if not outer_only:
            pulled = slopes_at(phi) * pull[:, None]
            thetas[0] = thetas[0] + adams[0].move(pulled.T @ phi, now)
            thetas[1] = thetas[1] + adams[1].move(pulled.sum(0), now)
        thetas[2] = thetas[2] + adams[2].move(net.neurons(phi).T @ pull, now)
        yield output


def descend_in_function_space(
    kernel: Float[Tensor, "n n"], y: Float[Tensor, " n"], batches: Callable[[int], Tensor], steps: int
) -> Iterator[Float[Tensor, " n"]]:
    """Coefficients c of f = K c after 0, 1, 2, .. steps of gradient descent on the hinge loss, for a kernel of infinite width.

    The rate begins at one over the largest eigenvalue of K / n and falls evenly to zero. ``batches(t)`` gives the rows of step t.
    """
    n = len(y)
    direction = torch.ones(n, dtype=kernel.dtype)
    for _ in range(20):
        direction = kernel @ (direction / direction.norm()) / n
    rate, coefficients = 1 / float(direction.norm()), torch.zeros_like(direction)
    yield coefficients
    for number in range(1, steps + 1):
        rows = batches(number)
        pulled = rows[y[rows] * (kernel[rows] @ coefficients) < 1]
        coefficients.index_add_(0, pulled, rate * (1 - (number - 1) / steps) / len(rows) * y[pulled])
        yield coefficients


# --- an ordinary network beside them ------------------------------------------------------------------


def scaled_inputs(patterns: Patterns, sample: PatternSample) -> Float[Tensor, "n D"]:
    """The inputs in pattern coordinates, scaled so that a fair pattern is -1 or 1; in float32."""
    return (2 * patterns.deviation * sample.phi).float()


def train_ordinary_network(
    patterns: Patterns, width: int, steps: int, batch: int, rate: float = 1e-3
) -> Iterator[tuple[int, nn.Module]]:
    """Yield the step and the network after 0, 1, 2, .. steps of Adam on the hinge loss, each with ``batch`` new samples.

    One hidden layer of ReLU units from PyTorch's default start.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(patterns.seed, "ordinary network").initial_seed())
        net = nn.Sequential(nn.Linear(patterns.patterns, width), nn.ReLU(), nn.Linear(width, 1))
    optimiser = torch.optim.Adam(net.parameters(), lr=rate)
    yield 0, net
    for step in range(1, steps + 1):
        drawn = patterns.draw(batch, f"ordinary {step}")
        loss = (1 - drawn.y.float() * net(scaled_inputs(patterns, drawn))[:, 0]).clamp_min(0).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        yield step, net


# --- the least hinge loss inside a ball --------------------------------------------------------------


@dataclass(frozen=True)
class BallFit:
    """The least hinge loss of a readout with norm at most B: the loss ``reached``, and the lower bound ``certified`` by a dual
    point."""

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
