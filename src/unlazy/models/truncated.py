"""The emergence paper's network: 2m truncated-ReLU neurons, hinge loss, and its gradients by hand, in float64.

    g(x) = sum_i a_i sigma(<w_i, x> + b_i),    sigma(z) = min(1, max(z, 0)),    loss = E max(1 - y g(x), 0)

*Smoothed* neurons average sigma over Gaussian noise of deviation s inside them; with Phi and phi the normal
distribution and density:

    E sigma(z + s xi)  = F(z) - F(z - 1),   F(u) = u Phi(u / s) + s phi(u / s)
    E sigma'(z + s xi) = Phi((1 - z) / s) - Phi(-z / s)

Gradients are taken over weighted rows, so that a sample, a mini-batch and the whole population are one code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.runtime import require, stream

Inputs = Float[Tensor, "n d"]
Labels = Float[Tensor, " n"]
BLOCK = 2048
"""Rows taken at a time: their neurons stay in the processor's cache."""


def smoothed_neuron(z: Float[Tensor, "*shape"], noise: float) -> Float[Tensor, "*shape"]:
    """E sigma(z + noise xi); with ``noise=0`` the truncated ReLU itself."""
    if noise == 0:
        return z.clamp(0, 1)
    return _mean_positive_part(z, noise) - _mean_positive_part(z - 1, noise)


def smoothed_slope(z: Float[Tensor, "*shape"], noise: float) -> Float[Tensor, "*shape"]:
    """E sigma'(z + noise xi); with ``noise=0`` one on the open interval (0, 1) and zero elsewhere."""
    if noise == 0:
        return ((z > 0) & (z < 1)).to(z.dtype)
    return torch.special.ndtr((1 - z) / noise) - torch.special.ndtr(-z / noise)


def _mean_positive_part(u: Tensor, noise: float) -> Tensor:
    """F(u): the positive part of u + noise xi, on average."""
    ratio = u / noise
    density = torch.exp(-ratio.square() / 2) / math.sqrt(2 * math.pi)
    return u * torch.special.ndtr(ratio) + noise * density


@dataclass(frozen=True)
class TruncatedNet:
    """Neurons w_i, b_i with outer weights a_i; at the start the second half of them mirrors the first."""

    w: Float[Tensor, "units d"]
    b: Float[Tensor, " units"]
    a: Float[Tensor, " units"]

    @property
    def units(self) -> int:
        """Number of neurons."""
        return int(self.w.shape[0])

    def to(self, dtype: torch.dtype) -> TruncatedNet:
        """The same network in another precision."""
        return TruncatedNet(self.w.to(dtype), self.b.to(dtype), self.a.to(dtype))

    def pre_activations(self, x: Inputs) -> Float[Tensor, "n units"]:
        """<w_i, x> + b_i. Mirrored halves are computed alike, so equal weights give equal bits."""
        half = self.units // 2
        return torch.cat([x @ w.clone().T for w in self.w.split(max(half, 1))], dim=1) + self.b

    def neurons(self, x: Inputs, noise: float = 0.0) -> Float[Tensor, "n units"]:
        """The output of each neuron, smoothed or not."""
        return smoothed_neuron(self.pre_activations(x), noise)

    def __call__(self, x: Inputs, noise: float = 0.0) -> Labels:
        """g(x). Mirrored neurons are added first: at the start their sum is exactly zero."""
        return self.read(self.neurons(x, noise))

    def read(self, neurons: Float[Tensor, "n units"]) -> Labels:
        """g from the outputs of the neurons."""
        half = self.units // 2
        parts = neurons * self.a
        return (parts[:, :half] + parts[:, half : 2 * half]).sum(1) + parts[:, 2 * half :].sum(1)


def mirrored_start(
    inputs: int, pairs: int, *, relevant: int, gamma: float, deviation: float, seed: int = 0
) -> TruncatedNet:
    """The paper's start: w ~ N(0, 1/k^2), b ~ N(0, 1/k^4), a ~ N(0, (sigma~^2 / (gamma k^2))^2); copies with -a."""
    require(pairs >= 1, f"at least one pair of neurons is needed, got m={pairs}.")
    require(gamma > 0, f"the start's outer weights are divided by gamma, which must be positive; got {gamma}.")
    generator = stream(seed, "mirrored start")

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    w, b = normal(pairs, inputs) / relevant, normal(pairs) / relevant**2
    a = normal(pairs) * deviation**2 / (gamma * relevant**2)
    return TruncatedNet(torch.cat([w, w]), torch.cat([b, b]), torch.cat([a, -a]))


def in_span(net: TruncatedNet, dictionary: Float[Tensor, "d D"]) -> TruncatedNet:
    """The network read in pattern coordinates: x = M phi gives <w, x> = <M^T w, phi>, and every gradient alike."""
    return TruncatedNet(net.w @ dictionary, net.b, net.a)


# --- loss and gradients ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gradients:
    """Of the mean hinge loss, with the loss itself."""

    w: Float[Tensor, "units d"]
    b: Float[Tensor, " units"]
    a: Float[Tensor, " units"]
    loss: float


def hinge_loss(net: TruncatedNet, x: Inputs, y: Labels, weights: Labels, noise: float = 0.0) -> float:
    """E max(1 - y g, 0) over the weighted rows."""
    return float(weights @ (1 - y * net(x, noise)).clamp_min(0))


def gradients(net: TruncatedNet, x: Inputs, y: Labels, weights: Labels, noise: float = 0.0) -> Gradients:
    """Exact derivatives of the mean hinge loss; a row exactly on the margin counts as right."""
    sums = [torch.zeros_like(net.w), torch.zeros_like(net.b), torch.zeros_like(net.a)]
    loss = 0.0
    for rows in zip(x.split(BLOCK), y.split(BLOCK), weights.split(BLOCK), strict=True):
        *parts, part_loss = _block_sums(net, *rows, noise)
        for total, part in zip(sums, parts, strict=True):
            total += part
        loss += part_loss
    w, b, a = sums
    return Gradients(net.a[:, None] * w, net.a * b, a, loss)


def _block_sums(
    net: TruncatedNet, x: Inputs, y: Labels, weights: Labels, noise: float
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Sums of pull x slope x input, pull x slope, pull x neuron, and loss over some rows."""
    z = net.pre_activations(x)
    neurons = smoothed_neuron(z, noise)
    margin = 1 - y * net.read(neurons)
    pull = torch.where(margin > 0, -y * weights, torch.zeros_like(y))
    slopes = smoothed_slope(z, noise) * pull[:, None]
    return slopes.T @ x, slopes.sum(0), neurons.T @ pull, float(weights @ margin.clamp_min(0))


# --- the three-phase schedule ------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """Steps of one kind: parameters become keep x old - rate x gradient.

    The penalty lambda of the paper is (1 - keep) / (2 rate); keep = 0 forgets the old value, exactly. With ``outer_rate`` the
    outer weights follow Adam instead, at a rate that falls evenly to zero over the phase.
    """

    steps: int
    rate: float
    noise: float = 0.0
    keep_weights: float = 1.0
    keep_outer: float = 1.0
    outer_rate: float | None = None

    def __post_init__(self) -> None:
        require(self.outer_rate is None or self.outer_rate > 0, f"outer_rate is above 0, got {self.outer_rate!r}.")
        require(self.steps >= 0 and self.rate >= 0, f"a phase has steps >= 0 and a rate >= 0, got {self!r}.")
        forgets = min(self.keep_weights, self.keep_outer) < 1
        require(self.rate > 0 or not forgets, "a penalty needs a rate above 0.")
        require(self.noise >= 0, f"noise is a standard deviation, got {self.noise!r}.")
        for name in ("keep_weights", "keep_outer"):
            require(0 <= getattr(self, name) <= 1, f"{name} is a share in [0, 1], got {getattr(self, name)!r}.")

    @property
    def penalties(self) -> tuple[float, float]:
        """(lambda_w, lambda_a)."""
        if self.rate == 0:
            return 0.0, 0.0
        return (1 - self.keep_weights) / (2 * self.rate), (1 - self.keep_outer) / (2 * self.rate)


def paper_schedule(
    pairs: int,
    *,
    relevant: int,
    gamma: float,
    deviation: float,
    steps: int | None = None,
    rate_factor: float = 1.0,
    outer_rate: float | None = None,
) -> tuple[Phase, Phase, Phase]:
    """Two forgetting steps, then the long third phase: T = m^(4/3) steps of size k^2 / (T m^(1/3)), without penalty.

    ``steps`` and ``rate_factor`` change the length of the third phase and the constant the paper leaves open in its rate.
    ``outer_rate`` (see ``Phase``) is our addition: at m = 300 the paper's own third phase moves the outer weights too little.
    """
    require(gamma > 0, f"the first rate is proportional to gamma^2, which must be positive; got gamma={gamma}.")
    k, horizon = relevant, pairs ** (4 / 3)
    noise = k**-1.5
    first = gamma**2 * deviation / (k * pairs**3)
    last = rate_factor * k**2 / (horizon * pairs ** (1 / 3))
    return (
        Phase(1, first, noise, keep_weights=0.0),
        Phase(1, 1.0, noise, keep_weights=0.0, keep_outer=0.0),
        Phase(round(horizon) if steps is None else steps, last, outer_rate=outer_rate),
    )


def step(net: TruncatedNet, found: Gradients, phase: Phase) -> TruncatedNet:
    """One step of gradient descent on loss and penalties; biases are not penalised."""
    return TruncatedNet(
        phase.keep_weights * net.w - phase.rate * found.w,
        net.b - phase.rate * found.b,
        phase.keep_outer * net.a - phase.rate * found.a,
    )


class Adam:
    """Adam's running moments for one tensor."""

    def __init__(self, like: Float[Tensor, "*shape"]) -> None:
        self.first, self.second, self.seen = torch.zeros_like(like), torch.zeros_like(like), 0

    def move(self, gradient: Float[Tensor, "*shape"], rate: float) -> Float[Tensor, "*shape"]:
        """What to add to the tensor."""
        self.seen += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient.square()
        size = (self.second / (1 - 0.999**self.seen)).sqrt() + 1e-8
        return -rate * self.first / (1 - 0.9**self.seen) / size


Batches = Callable[[int], tuple[Inputs, Labels, Labels]]


def train(
    net: TruncatedNet,
    schedule: tuple[Phase, ...],
    batches: Batches,
    watch: Callable[[int, TruncatedNet], None] | None = None,
) -> TruncatedNet:
    """Follow the schedule. ``batches(t)`` gives the rows (inputs, labels, weights) of step t = 1, 2, ..; ``watch(t, net)`` sees
    the network before the first step (t = 0) and after every one."""
    return train_with_gradients(net, schedule, lambda t, net, noise: gradients(net, *batches(t), noise), watch)


def train_with_gradients(
    net: TruncatedNet,
    schedule: tuple[Phase, ...],
    found_at: Callable[[int, TruncatedNet, float], Gradients],
    watch: Callable[[int, TruncatedNet], None] | None = None,
) -> TruncatedNet:
    """Like :func:`train`, with gradients from ``found_at(t, net, noise)``."""
    if watch is not None:
        watch(0, net)
    done = 0
    for phase in schedule:
        adam = Adam(net.a)
        for number in range(phase.steps):
            done += 1
            found = found_at(done, net, phase.noise)
            after = step(net, found, phase)
            if phase.outer_rate is not None:
                rate = phase.outer_rate * (1 - number / phase.steps)
                after = replace(after, a=net.a + adam.move(found.a, rate))
            net = after
            if watch is not None:
                watch(done, net)
    return net
