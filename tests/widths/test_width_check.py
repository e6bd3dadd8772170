"""The width check: closed forms in float64, exponents of theory, layers scaled wrongly on purpose, advice that is followed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import unlazy as ul
from repository import ROOT
from unlazy.runtime import InputError
from unlazy.studies.scope.width_networks import (
    NETWORKS,
    OPTIMISERS,
    PARAMETRISATIONS,
    READINGS,
    WITHIN,
    check_network,
    known_exponent,
)
from unlazy.studies.table import Table
from unlazy.widths.check import WIDTHS, WidthCheck
from unlazy.widths.measure import NETWORK
from unlazy.widths.reading import width_exponents

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(48, 8, generator=RANDOM)
Y = (X @ torch.randn(8, 3, generator=RANDOM) / 2).relu()
Make = Callable[[int], nn.Module]


# --- a closed form ---------------------------------------------------------------------------------------------


class Pairs(nn.Module):
    """f(x) = multiplier v . W x, units in pairs (w, v), (w, -v), rows of W repeated: f = 0, sums over units are exact in m."""

    def __init__(self, width: int, multiplier: float, readout: float) -> None:
        super().__init__()
        self.multiplier = multiplier
        self.first = nn.Linear(3, width, bias=False, dtype=torch.float64)
        self.second = nn.Linear(width, 1, bias=False, dtype=torch.float64)
        rows = torch.tensor([[1.0, 0.5, 0], [0, 1, -1], [0.3, 0, 1], [-1, 1, 0]], dtype=torch.float64)
        self.first.weight.data = rows.repeat(width // 4, 1)
        self.second.weight.data = readout * torch.tensor([1.0, -1]).double().repeat_interleave(width // 2)[None]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.multiplier * self.second(self.first(x))
        return out


# parametrisation: multiplier, size of the readout's weights, rate; exponents of first and second own update, kernels, changes
PAIRS: dict[str, tuple[Any, dict[str, float]]] = {
    "ntk": (
        lambda m: (m**-0.5, 1.0, 0.1),
        {
            "own first": -0.5,
            "own second": 0,
            "kernel first": 0,
            "kernel second": 0,
            "change first": -1,
            "change second": -1,
        },
    ),
    "mup": (
        lambda m: (1 / m, 1.0, 0.1 * m),
        {
            "own first": 0,
            "own second": 0,
            "kernel first": -1,
            "kernel second": -1,
            "change first": 0,
            "change second": 0,
        },
    ),
    "standard": (
        lambda m: (1.0, m**-0.5, 1e-3),
        {
            "own first": -0.5,
            "own second": 1,
            "kernel first": 0,
            "kernel second": 1,
            "change first": 1,
            "change second": -1,
        },
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_one_step_of_a_linear_network_has_the_closed_form(name: str) -> None:
    """One step: dh = -r v sum_p e_p <x_p, x>, dv = -r sum_p e_p h(x_p), with e = -2 y / n and multipliers around them."""
    settings, expected = PAIRS[name]
    x, y = X[:, :3].double(), Y[:, :1].double()

    def rate(model: nn.Module, width: int) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), settings(width)[2])

    found = ul.width_check(lambda m: Pairs(m, *settings(m)[:2]), (8, 32, 128), (x, y), optimiser=rate, steps=1, seeds=1)
    short = {"own": ("own_update", 1), "kernel": ("kernel", 0), "change": ("kernel_change", 1)}
    for words, exponent in expected.items():
        (quantity, after), layer = short[words.split()[0]], words.split()[1]
        assert found.exponents[quantity, layer, after].value == pytest.approx(exponent, abs=1e-6), words
    errors = -2 * y / len(x)
    for place, width in enumerate(found.widths):
        multiplier, readout, step = settings(width)
        own = step * multiplier * readout * (x @ x.T @ errors).square().mean().sqrt()
        assert found.measured("own_update", "first", 1)[place, 0] == pytest.approx(float(own), rel=1e-9)
        h = x @ Pairs(width, multiplier, readout).first.weight.detach().T
        change = step * multiplier**2 * (h @ h.T @ errors).square().mean().sqrt()
        assert found.measured("own_update", "second", 1)[place, 0] == pytest.approx(float(change), rel=1e-9)


# --- exponents that theory gives -------------------------------------------------------------------------------


def differences(found: dict[tuple[str, str, int], float], parametrisation: str, optimiser: str) -> dict[Any, float]:
    """Measured minus known exponent, of all that are declared."""
    known = {
        key: known_exponent(parametrisation, optimiser, key[1], key[0])
        for key in found
        if key[2] == (0 if key[0] in ("activation", "kernel", "output") else 1)
    }
    return {key: found[key] - wanted for key, wanted in known.items() if wanted is not None}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_reading_of_dense_networks(parametrisation: str, optimiser: str) -> None:
    found = check_network("dense", parametrisation, optimiser, WIDTHS, 3, 5, kernels=False)
    assert found.reading == READINGS[parametrisation]
    values = {key: one.value for key, one in found.exponents.items() if key[1] in (*found.layers, NETWORK)}
    own = {key: off for key, off in differences(values, parametrisation, optimiser).items() if key[0] == "own_update"}
    assert len(own) == 4
    assert max(map(abs, own.values())) < 0.25  # three seeds; the committed study has five and is held to 0.15
    assert (found.deviations == []) == (parametrisation != "standard")


def test_known_exponents_of_the_committed_study() -> None:
    """Medians of five seeds: all 150 of dense and convolutional networks are within 0.15 of theory, in every parametrisation.

    The transformer misses this bound at widths 32 to 256: 21 of its 156 exponents, 18 of them under SGD, lie below theory. This
    is a known failure, so the test holds the number, and that every reading is right.
    """
    table = Table.read(ROOT / "results" / "widths" / "paper" / "table.csv").where(network=list(NETWORKS))
    assert len(table.where(quantity="reading_is_known").values) == 18
    assert set(table.where(quantity="reading_is_known").values) == {1.0}
    seen, missed = 0, []
    for network in NETWORKS:
        for parametrisation in PARAMETRISATIONS:
            for optimiser in OPTIMISERS:
                here = table.where(
                    quantity="exponent", network=network, parametrisation=parametrisation, optimiser=optimiser
                )
                by_key: dict[Any, list[float]] = {}
                for row in here.rows():
                    by_key.setdefault((row["measure"], row["layer"], int(row["after"])), []).append(row["value"])
                medians = {key: float(np.median(values)) for key, values in by_key.items()}
                off = differences(medians, parametrisation, optimiser)
                assert {len(values) for values in by_key.values()} == {5}
                assert len(off) > 10
                beyond = {key: round(value, 2) for key, value in off.items() if abs(value) > WITHIN}
                assert beyond == {} or network == "transformer", (network, parametrisation, optimiser)
                missed += list(beyond.values())
                seen += len(off)
    assert (seen, len(missed)) == (306, 21)
    assert -0.35 < min(missed) <= max(missed) < 0


def test_exponents_of_power_laws_and_of_what_is_none() -> None:
    sizes = np.array([16.0, 64.0, 256.0])
    columns = np.stack([3 * sizes**-0.5, np.zeros(3), [1, 2, np.inf]], axis=1)
    np.testing.assert_allclose(width_exponents(sizes, columns), [-0.5, np.nan, np.inf])


# --- networks of plain torch -----------------------------------------------------------------------------------


def mlp(width: int) -> nn.Sequential:
    """A standard network, its readout at the start as small as torch draws it."""
    layers = [nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)]
    return nn.Sequential(*layers)


def follow_advice(found: WidthCheck, make: Make, rate: float, kind: Any) -> tuple[Make, Any]:
    """The same networks with the start and the rates that the check advises."""

    def advised(width: int) -> nn.Module:
        model, factors = make(width), found.start_multipliers(width)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter *= factors[name]
        return model

    def optimiser(model: nn.Module, width: int) -> torch.optim.Optimizer:
        rates = found.rate_multipliers(width)
        return kind([{"params": [p], "lr": rate * rates[name]} for name, p in model.named_parameters()])

    return advised, optimiser


@pytest.mark.parametrize(("kind", "rate"), [(torch.optim.SGD, 1e-3), (torch.optim.Adam, 1e-4)])
def test_a_standard_network_with_the_advised_multipliers_is_maximal_update(kind: Any, rate: float) -> None:
    found = ul.width_check(mlp, WIDTHS, (X, Y), optimiser=lambda p: kind(p, rate), kernels=False)
    assert found.reading == "blowing up"
    table = {(one.parameter, one.what): one.exponent for one in found.multipliers}
    # Yang et al. 2022, Table 3
    weights = {"0.weight": 1.0, "2.weight": 0.0, "4.weight": -1.0} if kind is torch.optim.SGD else {}
    weights = weights or {"0.weight": 0.0, "2.weight": -1.0, "4.weight": -1.0}
    assert {name: table.get((name, "rate"), 0.0) for name in weights} == weights
    assert table["4.weight", "start"] == -0.5
    make, optimiser = follow_advice(found, mlp, 10 * rate, kind)
    after = ul.width_check(make, WIDTHS, (X, Y), optimiser=optimiser, kernels=False)
    assert (after.reading, after.deviations, after.multipliers) == ("maximal-update-like", [], [])


class Attention(nn.Module):
    """A transformer in plain torch, scaled by hand: readout divided by the width, attention by the width, starts 1/fan_in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down, self.head = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Linear(width, 3, bias=False),
        )
        for layer in (self.query, self.key, self.value, self.up, self.down):
            nn.init.normal_(layer.weight, std=width**-0.5)
        nn.init.normal_(self.head.weight)
        self.width = width

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.embedding(tokens)
        read = self.norm(state)
        weights = (self.query(read) @ self.key(read).mT / self.width).softmax(-1)
        state = state + weights @ self.value(read)
        state = state + self.down(torch.relu(self.up(state)))
        out: Tensor = self.head(state.mean(1)) / self.width
        return out


def hand_made_rates(model: nn.Module, width: int, wrong: str = "") -> torch.optim.Optimizer:
    """Adam with rate/width for weights of two growing axes; the layer ``wrong`` keeps the plain rate."""
    groups = []
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim == 2 and min(parameter.shape) == width and not name.startswith(wrong or "none")
        groups.append({"params": [parameter], "lr": 0.01 * (32 / width if matrix else 1)})
    return torch.optim.Adam(groups)


TOKENS = torch.randint(10, (48, 5), generator=RANDOM)
WORDS = (TOKENS, torch.randn(10, 3, generator=RANDOM)[TOKENS].mean(1).relu())


def test_a_transformer_scaled_by_hand_is_maximal_update() -> None:
    found = ul.width_check(Attention, (32, 64, 128), WORDS, optimiser=hand_made_rates, kernels=False)
    assert (found.reading, found.deviations) == ("maximal-update-like", [])
    assert found.reader.roles["embedding"] == "first"
    assert found.reader.roles["head"] == "readout"
    sizes = (found.measured("activation", "head", 0), found.measured("output", NETWORK, 0))
    np.testing.assert_allclose(*sizes, rtol=1e-5)  # the factor 1/width that the model puts on it belongs to the layer


@pytest.mark.parametrize("wrong", ["up", "value"])
def test_a_layer_with_a_wrong_rate_is_named(wrong: str) -> None:
    found = ul.width_check(
        Attention,
        (32, 64, 128),
        WORDS,
        optimiser=lambda model, width: hand_made_rates(model, width, wrong),
        kernels=False,
    )
    assert {one.layer for one in found.deviations} == {wrong}
    assert found.deviations[0].exponent.value == pytest.approx(1, abs=0.15)
    assert found.rate_multipliers(64)[f"{wrong}.weight"] == pytest.approx(0.5)
    assert wrong in str(found)


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_layer_with_a_wrong_start_is_named(wrong: int) -> None:
    def make(width: int) -> nn.Module:
        model = mlp(width)
        model[wrong].weight.data *= math.sqrt(width)
        return model

    found = ul.width_check(make, (64, 128, 256), (X, Y), optimiser=lambda p: torch.optim.Adam(p, 1e-5), kernels=False)
    assert found.reading == "blowing up"
    assert [(one.layer, one.what) for one in found.deviations] == [(str(wrong), "start")]
    assert found.start_multipliers(256)[f"{wrong}.weight"] == pytest.approx(0.5)


def test_mean_field_dying_and_overflow() -> None:
    def mean_field(width: int) -> nn.Module:
        model = mlp(width)
        for layer in (2, 4):
            nn.init.normal_(model[layer].weight, std=1 / width)
            nn.init.zeros_(model[layer].bias)
        return model

    def rates(model: nn.Module, width: int) -> torch.optim.Optimizer:
        reads = [(p, p.ndim == 2 and p.shape[1] == width) for p in model.parameters()]
        return torch.optim.Adam([{"params": [p], "lr": 0.64 / width if scaled else 0.01} for p, scaled in reads])

    check = {"steps": 10, "kernels": False}
    assert ul.width_check(mean_field, (64, 128, 256), (X, Y), optimiser=rates, **check).reading == "mean-field"

    def slow(model: nn.Module, width: int) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 10 / width**2)

    assert ul.width_check(mlp, (64, 128, 256), (X, Y), optimiser=slow, **check).reading == "dying"
    broken = ul.width_check(mlp, (64, 256), (X, Y), optimiser=lambda p: torch.optim.SGD(p, 1e6), **check)
    assert broken.reading == "blowing up"
    still = ul.width_check(mlp, (64, 256), (X, Y), optimiser=lambda p: torch.optim.SGD(p, 0.0), **check)
    assert still.reading == "cannot tell"


# --- manners ---------------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """Convolutions with batch-norm and dropout; returns a dictionary."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, width, 3), nn.BatchNorm2d(width)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.drop(torch.relu_(self.norm(self.conv(x)))).mean((2, 3)))}


def test_batch_norm_dropout_dictionaries_and_classes() -> None:
    images, classes = torch.randn(24, 1, 6, 6, generator=RANDOM), torch.arange(24) % 3
    before = torch.get_rng_state()
    found = ul.width_check(Pooled, (8, 32), (images, classes), steps=2, seeds=2)
    assert torch.equal(before, torch.get_rng_state())
    assert found.layers == ["conv", "norm", "head"]
    assert found.exponents["activation", "norm", 0].value == pytest.approx(0, abs=1e-3)
    assert ("kernel_change", "conv", 2) in found.exponents
    assert set(found.rate_multipliers(16)) == {name for name, _ in Pooled(8).named_parameters()}


def test_the_same_seeds_give_the_same_numbers_and_a_loss_of_ones_own_is_used() -> None:
    options: dict[str, Any] = {"steps": 2, "seeds": 1, "kernels": False}
    first, second = (ul.width_check(mlp, (16, 32), (X, Y), **options) for _ in range(2))
    assert first.to_dict() == second.to_dict()
    seen: list[tuple[int, ...]] = []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        seen.append(tuple(out.shape))
        return (out - y).abs().sum(1)

    ul.width_check(mlp, (16, 32), (X, Y), loss=loss, **options)
    assert set(seen) == {(48, 3)}


def test_what_cannot_be_checked_is_refused() -> None:
    def deeper(width: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(width)))

    with pytest.raises(InputError, match="matched by name"):
        ul.width_check(deeper, (1, 2), (X, X))
    with pytest.raises(InputError, match="equal shapes"):
        ul.width_check(lambda width: nn.Linear(8, 3), (1, 2), (X, Y))
    with pytest.raises(InputError, match="at least two different"):
        ul.width_check(mlp, (16,), (X, Y))
    with pytest.raises(InputError, match="probe= is missing"):
        ul.width_check(mlp)
    with pytest.raises(InputError, match="of 3 arguments"):
        ul.width_check(mlp, (16, 32), (X, Y), optimiser=lambda a, b, c: torch.optim.SGD(a, 0.1))


def test_the_figure_shows_what_was_measured() -> None:
    found = ul.width_check(mlp, (16, 32), (X, Y), steps=2, seeds=2)
    figure = found.figure()
    assert len(figure.axes) == 4
    line = figure.axes[1].get_lines()[0]
    np.testing.assert_allclose(line.get_ydata(), np.median(found.measured("update", "0", 2), axis=1))
    assert f"{found.exponents['update', '0', 2].value:+.2f}" in line.get_label()
    axes = found.draw("own_update", 1)
    assert found.draw("own_update", 1, ax=axes) is axes
    with pytest.raises(InputError, match="is not measured"):
        found.draw("speed")
