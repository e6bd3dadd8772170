"""The truncated network: smoothed neurons against Monte Carlo and derivatives, gradients against autograd, exact zeros."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from unlazy.data.patterns import Patterns
from unlazy.models.truncated import (
    Phase,
    TruncatedNet,
    gradients,
    hinge_loss,
    in_span,
    mirrored_start,
    paper_schedule,
    smoothed_neuron,
    smoothed_slope,
    step,
    train,
)
from unlazy.runtime import InputError, stream

PATTERNS = Patterns(inputs=14, patterns=9, relevant=3, mixture=0.4, background=0.3)
POPULATION = PATTERNS.population()
ROWS = (POPULATION.phi, POPULATION.y, POPULATION.weights)
FACTS = {"relevant": 3, "gamma": PATTERNS.gamma, "deviation": PATTERNS.deviation}


def random_net(units: int = 8, inputs: int = 9, seed: int = 0) -> TruncatedNet:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    generator = stream(seed, "test")
    return TruncatedNet(normal(units, inputs), 0.3 * normal(units), normal(units))


# --- smoothed neurons ------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.05, 0.3, 1.0])
def test_smoothed_neurons_equal_monte_carlo(noise: float) -> None:
    draws = torch.randn(400_000, generator=stream(1, "xi"), dtype=torch.float64)
    for z in (-0.7, -0.1, 0.0, 0.4, 1.0, 1.3):
        noisy = z + noise * draws
        said, slope = noisy.clamp(0, 1), ((noisy > 0) & (noisy < 1)).to(torch.float64)
        for seen, closed in ((said, smoothed_neuron), (slope, smoothed_slope)):
            value = closed(torch.tensor([z], dtype=torch.float64), noise).item()
            assert abs(value - seen.mean().item()) < 5 * seen.std().item() / math.sqrt(len(draws)) + 1e-5


@pytest.mark.parametrize("noise", [0.02, 0.2, 2.0])
def test_the_slope_is_the_derivative_of_the_neuron(noise: float) -> None:
    z = torch.linspace(-2, 3, 201, dtype=torch.float64)
    width = 1e-5 * noise
    rise = (smoothed_neuron(z + width, noise) - smoothed_neuron(z - width, noise)) / (2 * width)
    assert torch.allclose(rise, smoothed_slope(z, noise), atol=3e-9)


def test_little_noise_is_no_noise_away_from_the_kinks() -> None:
    z = torch.tensor([-0.5, 0.2, 0.7, 1.5], dtype=torch.float64)
    assert torch.allclose(smoothed_neuron(z, 1e-4), z.clamp(0, 1), atol=1e-12)
    assert smoothed_neuron(z, 0.0).tolist() == [0, 0.2, 0.7, 1]
    assert smoothed_slope(z, 0.0).tolist() == smoothed_slope(z, 1e-4).tolist() == [0, 1, 1, 0]


# --- start and gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "pairs", "rows"), [(9, 4, 512), (100, 37, 333), (500, 300, 200), (3, 1, 5)])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_start_is_zero_to_the_last_bit(inputs: int, pairs: int, rows: int, noise: float) -> None:
    net = mirrored_start(inputs, pairs, relevant=5, gamma=0.25, deviation=5.0, seed=2)
    x = torch.randn(rows, inputs, generator=stream(0, "x"), dtype=torch.float64)
    assert torch.count_nonzero(net(x, noise)) == 0
    assert torch.count_nonzero(net.neurons(x, noise)) > 0


def test_the_start_has_the_papers_spread() -> None:
    net = mirrored_start(50, 4000, relevant=5, gamma=0.25, deviation=5.0)
    assert net.w.std().item() == pytest.approx(1 / 5, rel=0.02)
    assert net.b.std().item() == pytest.approx(1 / 25, rel=0.04)
    assert net.a.std().item() == pytest.approx(25 / (0.25 * 25), rel=0.04)
    assert torch.equal(net.a[:4000], -net.a[4000:])


def slow_loss(net: TruncatedNet, noise: float) -> torch.Tensor:
    """The loss written out for autograd, neuron by neuron."""
    x, y, weights = ROWS
    output = torch.zeros(len(y), dtype=torch.float64)
    for i in range(net.units):
        z = x @ net.w[i] + net.b[i]
        if noise:
            normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)

            def positive(u: torch.Tensor, normal=normal) -> torch.Tensor:
                return u * normal.cdf(u / noise) + noise * normal.log_prob(u / noise).exp()

            said = positive(z) - positive(z - 1)
        else:
            said = torch.clamp(z, 0, 1)
        output = output + net.a[i] * said
    return (weights * torch.clamp(1 - y * output, min=0)).sum()


@pytest.mark.parametrize("units", [1, 7, 8])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_gradients_equal_autograd(noise: float, units: int) -> None:
    net = random_net(units)
    leaves = [value.clone().requires_grad_() for value in (net.w, net.b, net.a)]
    loss = slow_loss(TruncatedNet(*leaves), noise)
    expected = torch.autograd.grad(loss, leaves)
    found = gradients(net, *ROWS, noise)
    assert found.loss == pytest.approx(loss.item(), rel=1e-13)
    assert hinge_loss(net, *ROWS, noise) == pytest.approx(loss.item(), rel=1e-13)
    for seen, wanted in zip((found.w, found.b, found.a), expected, strict=True):
        assert torch.allclose(seen, wanted, atol=1e-13)


def test_many_rows_are_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gradients(random_net(), *ROWS, 0.2)
    monkeypatch.setattr("unlazy.models.truncated.BLOCK", 100)
    parts = gradients(random_net(), *ROWS, 0.2)
    assert torch.allclose(whole.w, parts.w, atol=1e-14)
    assert torch.allclose(whole.a, parts.a, atol=1e-14)
    assert whole.loss == pytest.approx(parts.loss, rel=1e-13)


def test_the_first_gradient_formula() -> None:
    """-a_i E[y x sigma'(<w_i, x> + b_i)], one row and one neuron at a time."""
    net = mirrored_start(9, 5, **FACTS)
    found, noise = gradients(net, *ROWS, 0.15), 0.15
    for i in range(net.units):
        expected = torch.zeros(9, dtype=torch.float64)
        for x, y, weight in zip(*ROWS, strict=True):
            expected -= net.a[i] * weight * y * smoothed_slope(net.w[i] @ x + net.b[i], noise) * x
        assert torch.allclose(found.w[i], expected, atol=1e-16, rtol=1e-12)
    assert found.loss == pytest.approx(1, abs=1e-14)  # g = 0: every row is at distance one from its margin


def test_pattern_coordinates_change_nothing() -> None:
    """Training on x = M phi and on phi gives the same network, seen through the dictionary, from step 1 on."""
    dictionary = PATTERNS.dictionary()
    x = POPULATION.phi @ dictionary.T
    net = mirrored_start(14, 6, **FACTS)
    schedule = paper_schedule(6, **FACTS, steps=5)
    long = train(net, schedule, lambda _: (x, *ROWS[1:]))
    short = train(in_span(net, dictionary), schedule, lambda _: ROWS)
    assert torch.allclose(long.w, short.w @ dictionary.T, atol=1e-12)
    assert torch.allclose(long.a, short.a, atol=1e-13)
    assert torch.allclose(long(x), short(POPULATION.phi), atol=1e-12)


# --- schedule --------------------------------------------------------------------------------------


def test_the_papers_schedule() -> None:
    first, second, third = paper_schedule(300, relevant=5, gamma=0.25, deviation=5.0)
    assert first.rate == pytest.approx(0.25**2 * 5 / (5 * 300**3))
    assert first.noise == second.noise == pytest.approx(5**-1.5)
    assert first.penalties == (pytest.approx(1 / (2 * first.rate)), 0)
    assert second.penalties == (0.5, 0.5)
    assert third.steps == round(300 ** (4 / 3))
    assert third.rate * third.steps == pytest.approx(25 / 300 ** (1 / 3), rel=1e-3)
    assert third.noise == 0
    assert third.penalties == (0, 0)


def test_a_forgetting_step_keeps_nothing() -> None:
    net = random_net()
    found = gradients(net, *ROWS, 0.1)
    after = step(net, found, Phase(1, 0.3, keep_weights=0.0, keep_outer=0.0))
    assert torch.equal(after.w, -0.3 * found.w)
    assert torch.equal(after.a, -0.3 * found.a)
    assert torch.equal(after.b, net.b - 0.3 * found.b)
    penalised = step(net, found, Phase(1, 0.3, keep_weights=0.7, keep_outer=0.4))
    assert torch.allclose(
        penalised.w, net.w - 0.3 * (found.w + 2 * Phase(1, 0.3, keep_weights=0.7).penalties[0] * net.w)
    )


def test_outer_weights_under_adam_follow_torch() -> None:
    """The third phase with an outer rate against torch.optim.Adam on the same gradients; the rest moves plainly."""
    net, phase = random_net(), Phase(12, 0.01, outer_rate=0.2)
    leaf = net.a.clone().requires_grad_()
    optimiser = torch.optim.Adam([leaf], lr=0.2)
    w, b = net.w, net.b
    for number in range(12):
        optimiser.param_groups[0]["lr"] = 0.2 * (1 - number / 12)
        found = gradients(TruncatedNet(w, b, leaf.detach()), *ROWS)
        w, b = w - 0.01 * found.w, b - 0.01 * found.b
        leaf.grad = found.a
        optimiser.step()
    after = train(net, (phase,), lambda _: ROWS)
    for seen, wanted in ((after.a, leaf.detach()), (after.w, w), (after.b, b)):
        assert torch.allclose(seen, wanted, atol=1e-9)


def test_training_watches_every_step_and_lowers_the_loss() -> None:
    """Population descent on majority data, which two steps of features and a short third phase separate."""
    seen: list[tuple[int, float]] = []
    asked: list[int] = []

    def rows(t: int) -> Any:
        asked.append(t)
        return ROWS

    net = train(
        mirrored_start(9, 40, **FACTS),
        paper_schedule(40, **FACTS, steps=60, rate_factor=3),
        rows,
        lambda t, now: seen.append((t, hinge_loss(now, *ROWS))),
    )
    assert [t for t, _ in seen] == [0, *asked] == list(range(63))
    assert seen[0][1] == pytest.approx(1, abs=1e-14)
    assert hinge_loss(net, *ROWS) < 0.7


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: mirrored_start(3, 0, **FACTS), "at least one pair"),
        (lambda: mirrored_start(3, 2, relevant=3, gamma=0.0, deviation=1.0), "must be positive"),
        (lambda: paper_schedule(3, relevant=3, gamma=0.0, deviation=1.0), "must be positive"),
        (lambda: Phase(1, -1.0), "rate >= 0"),
        (lambda: Phase(1, 0.0, keep_outer=0.5), "a penalty needs"),
        (lambda: Phase(1, 1.0, outer_rate=0.0), "outer_rate is above 0"),
        (lambda: Phase(1, 1.0, noise=-1), "standard deviation"),
        (lambda: Phase(1, 1.0, keep_outer=2), "share in"),
    ],
)
def test_impossible_settings_are_refused(make, reason) -> None:
    with pytest.raises(InputError, match=reason):
        make()
