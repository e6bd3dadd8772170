"""The emergence paper's lemmas on networks one can hold: the explicit solution, and what a gradient says of each pattern."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from unlazy.data.patterns import Patterns, PatternSample
from unlazy.models.truncated import BLOCK, TruncatedNet, smoothed_neuron, smoothed_slope
from unlazy.runtime import require

# --- Lemma 4 -----------------------------------------------------------------------------------------


def explicit_network(patterns: Patterns) -> TruncatedNet:
    """Lemma 4: 3(k+1) neurons along the sum of the relevant patterns with g(x) = y exactly, in pattern coordinates.

    Every neuron sees z = (c - mu_A) / (4k), with c relevant patterns present and mu_A expected. For each count p three neurons
    make a tent of height y_p around z_p, narrow enough to miss its neighbours. Multiply ``w`` by the dictionary for inputs x.
    """
    k = patterns.relevant
    expected = float(patterns.means()[patterns.relevant_set()].sum())
    direction = patterns.is_relevant().to(torch.float64) * patterns.deviation / (4 * k)
    width = 1 / (16 * k)
    biases, outer = [], []
    for count in range(k + 1):
        centre = (count - expected) / (4 * k)
        height = (1 if count in patterns.counts else -1) / width
        biases += [-centre + width, -centre, -centre - width]
        outer += [height, -2 * height, height]
    rows = [torch.tensor(values, dtype=torch.float64) for values in (biases, outer)]
    return TruncatedNet(direction.expand(3 * (k + 1), -1).clone(), *rows)


def lemma4_facts(net: TruncatedNet, sample: PatternSample) -> dict[str, float]:
    """What Lemma 4 promises, measured: loss, largest error, and sizes in units of the stated bounds (all at most 1).

    ``outer``: max abs(a) / 32k; ``bias_low``: (1/32k) / min abs(b); ``bias_high``: max abs(b) / (1/2); ``inside``: the largest
    abs(<w, x> + b).
    """
    k = net.units // 3 - 1
    output = net(sample.phi)
    return {
        "loss": float(sample.weights @ (1 - sample.y * output).clamp_min(0)),
        "error": float((output - sample.y).abs().max()),
        "outer": float(net.a.abs().max()) / (32 * k),
        "bias_low": 1 / (32 * k) / max(float(net.b.abs().min()), 1e-300),
        "bias_high": 2 * float(net.b.abs().max()),
        "inside": float(net.pre_activations(sample.phi).abs().max()),
    }


# --- Lemmas 5 and 6 ----------------------------------------------------------------------------------


def pattern_components(
    weight_gradient: Float[Tensor, "units d"],
    outer: Float[Tensor, " units"],
    dictionary: Float[Tensor, "d D"] | None = None,
) -> Float[Tensor, "units D"]:
    """T of any two-layer network: its weight gradient is -a_i sum_j M_j T_ij. ``dictionary=None``: already in coordinates."""
    require(bool((outer != 0).all()), "a neuron with outer weight 0 has no gradient to decompose; leave it out.")
    along = weight_gradient if dictionary is None else weight_gradient @ dictionary
    return -along / outer[:, None]


@dataclass(frozen=True)
class Decomposition:
    """T_ij = E[y phi_j sigma'(..)] of every neuron and pattern, with its standard error on the sample (0: population)."""

    components: Float64[Tensor, "units D"]
    errors: Float64[Tensor, "units D"]
    relevant: Bool[Tensor, " D"]

    @property
    def signal(self) -> Float64[Tensor, " units"]:
        """Mean of T over the relevant patterns."""
        return self.components[:, self.relevant].mean(1)

    @property
    def unevenness(self) -> Float64[Tensor, " units"]:
        """Largest relative deviation of a relevant component from their mean."""
        inside = self.components[:, self.relevant]
        return (inside - self.signal[:, None]).abs().amax(1) / self.signal.abs()

    @property
    def noise(self) -> Float64[Tensor, " units"]:
        """Largest size of T over the other patterns."""
        return self.components[:, ~self.relevant].abs().amax(1)

    @property
    def ratio(self) -> Float64[Tensor, " units"]:
        """Noise to signal: noise / abs(signal)."""
        return self.noise / self.signal.abs()

    @property
    def floor(self) -> Float64[Tensor, " units"]:
        """What the ratio would be if every irrelevant T were zero: the expected largest of D - k sampling errors, by the signal.

        Falls like 1/sqrt(n); 0 for the population.
        """
        rest = int((~self.relevant).sum())
        return expected_largest(rest) * self.errors[:, ~self.relevant].square().mean(1).sqrt() / self.signal.abs()


def decompose(
    net: TruncatedNet, sample: PatternSample, relevant: Bool[Tensor, " D"], noise: float = 0.0, *, sampled: bool = True
) -> Decomposition:
    """T of a truncated network at whatever step it is, over the rows that still pull (y g < 1).

    ``sampled=False``: the rows are the whole population, so there is no sampling error.
    """
    first = torch.zeros(net.units, sample.phi.shape[1], dtype=torch.float64)
    second = torch.zeros_like(first)
    for rows in torch.arange(len(sample)).split(BLOCK):
        phi, y, weights = sample.phi[rows], sample.y[rows], sample.weights[rows]
        z = net.pre_activations(phi)
        pulls = (y * net.read(smoothed_neuron(z, noise)) < 1).to(torch.float64)
        slopes = smoothed_slope(z, noise) * (pulls * y)[:, None]
        first += (slopes * weights[:, None]).T @ phi
        second += (slopes.square() * weights[:, None]).T @ phi.square()
    count = 1 / float(sample.weights.square().sum())
    errors = ((second - first.square()).clamp_min(0) / count).sqrt() if sampled else torch.zeros_like(first)
    return Decomposition(first, errors, relevant)


def expected_largest(count: int) -> float:
    """E max abs(xi_j) of ``count`` independent standard normals, by integrating its tail."""
    require(count >= 1, f"the largest of {count} numbers does not exist.")
    grid = torch.linspace(0, 12, 24001, dtype=torch.float64)
    below = torch.erf(grid / math.sqrt(2)) ** count
    return float(torch.trapezoid(1 - below, grid))


def star_cosines(net: TruncatedNet, relevant: Bool[Tensor, " D"]) -> Float64[Tensor, " units"]:
    """Cosine of every neuron with the sum of the relevant patterns, in pattern coordinates; 0 for a dead neuron."""
    star = relevant.to(net.w.dtype) / math.sqrt(int(relevant.sum()))
    return (net.w @ star / net.w.norm(dim=1).clamp_min(1e-300)).to(torch.float64)
