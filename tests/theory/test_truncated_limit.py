"""The start of the emergence paper's network with unboundedly many neurons: moments against plain integrals and wide networks."""

from __future__ import annotations

import math

import pytest
import torch

from unlazy.data.patterns import Patterns
from unlazy.models.truncated import mirrored_start
from unlazy.runtime import InputError, stream
from unlazy.studies.emergence.fixed_features_methods import linearised_kernel
from unlazy.theory.truncated_limit import pair_moments, truncated_kernel_limit


@pytest.mark.parametrize(("left", "right", "across"), [(0.5, 0.8, 0.3), (0.04, 0.04, -0.02), (2.0, 3.0, 0.0)])
def test_moments_are_those_of_a_plain_double_integral(left: float, right: float, across: float) -> None:
    grid = torch.linspace(-9, 9, 3001, dtype=torch.float64)
    u, v = grid * math.sqrt(left), grid * math.sqrt(right)
    r = across / math.sqrt(left * right)
    a, b = grid[:, None], grid[None]
    density = torch.exp(-(a * a - 2 * r * a * b + b * b) / (2 * (1 - r * r))) / (2 * math.pi * math.sqrt(1 - r * r))
    cell = (grid[1] - grid[0]) ** 2
    neuron = (density * u.clamp(0, 1)[:, None] * v.clamp(0, 1)[None]).sum() * cell
    slopes = [((z > 0) & (z < 1)).to(torch.float64) for z in (u, v)]
    slope = (density * slopes[0][:, None] * slopes[1][None]).sum() * cell
    found = pair_moments(*(torch.tensor([value], dtype=torch.float64) for value in (left, right, across)))
    assert found[0].item() == pytest.approx(neuron.item(), rel=1e-3)
    assert found[1].item() == pytest.approx(slope.item(), rel=2e-2)  # the slope jumps inside cells of the plain sum


def test_the_same_input_twice_is_one_neuron_squared() -> None:
    variance = torch.tensor([0.3], dtype=torch.float64)
    neuron, slope = pair_moments(variance, variance, variance)
    grid = torch.linspace(0, 1, 200_001, dtype=torch.float64)
    density = torch.exp(-grid.square() / 0.6) / math.sqrt(0.6 * math.pi)
    above = 0.5 * math.erfc(1 / math.sqrt(0.6))
    assert neuron.item() == pytest.approx(float(torch.trapezoid(density * grid.square(), grid)) + above, rel=1e-6)
    assert slope.item() == pytest.approx(float(torch.trapezoid(density, grid)), rel=1e-6)


def test_wide_networks_tend_to_it() -> None:
    """The kernel of finitely many neurons, divided by them, comes within 3 %, and nearer when there are more."""
    patterns = Patterns(inputs=16, patterns=16, relevant=3)
    phi = patterns.draw(12).phi
    outer = patterns.deviation**2 / (0.25 * 9)
    limit = truncated_kernel_limit(phi, phi[:5], weight_variance=1 / 9, bias_variance=1 / 81, outer_variance=outer**2)
    errors = []
    for pairs in (500, 50_000):
        net = mirrored_start(16, pairs, relevant=3, gamma=0.25, deviation=patterns.deviation)
        kernel = linearised_kernel(net, phi, phi[:5]) / net.units
        errors.append(float((kernel - limit).norm() / limit.norm()))
    assert errors[1] < 0.03
    assert errors[1] < errors[0] / 2


def test_it_is_a_kernel() -> None:
    phi = Patterns(inputs=16, patterns=16, relevant=3).draw(60).phi
    kernel = truncated_kernel_limit(phi, phi, weight_variance=0.5, bias_variance=0.0, outer_variance=2.0)
    assert torch.equal(kernel, kernel.T)
    assert torch.linalg.eigvalsh(kernel).min() > -1e-9


def test_what_cannot_be_is_refused() -> None:
    good = {"weight_variance": 1.0, "bias_variance": 0.1, "outer_variance": 1.0}
    x = torch.randn(4, 3, generator=stream(0, "x"), dtype=torch.float64)
    with pytest.raises(InputError, match="different lengths"):
        truncated_kernel_limit(x, x, **good)
    x = x / x.norm(dim=1, keepdim=True)
    assert truncated_kernel_limit(x, x, **good).shape == (4, 4)
    for name in ("weight_variance", "outer_variance"):
        with pytest.raises(InputError, match="must be positive"):
            truncated_kernel_limit(x, x, **(good | {name: 0.0}))
    with pytest.raises(InputError, match="at least 0"):
        truncated_kernel_limit(x, x, **(good | {"bias_variance": -1.0}))
    many = torch.randn(200, 3, generator=stream(0, "many"), dtype=torch.float64)
    with pytest.raises(InputError, match="too many integrals"):
        truncated_kernel_limit(many / many.norm(dim=1, keepdim=True), many / many.norm(dim=1, keepdim=True), **good)
    zero = torch.zeros(1, dtype=torch.float64)
    with pytest.raises(InputError, match="without variance"):
        pair_moments(zero, zero, zero)
