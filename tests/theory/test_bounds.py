"""Lemma 4's network, the decompositions of Lemmas 5 and 6, and the three theorems as calculators."""

from __future__ import annotations

import math

import pytest
import torch

from unlazy.data.patterns import Patterns, interval_rule, majority_rule
from unlazy.models.truncated import gradients, mirrored_start, paper_schedule, smoothed_slope, train
from unlazy.runtime import InputError, stream
from unlazy.theory.bounds import fixed_feature_bound, learning_conditions, least_learnable_relevant, query_bound
from unlazy.theory.emergence import (
    Decomposition,
    decompose,
    expected_largest,
    explicit_network,
    lemma4_facts,
    pattern_components,
    star_cosines,
)

SMALL = {"inputs": 10, "patterns": 8, "relevant": 3}
PATTERNS = Patterns(inputs=14, patterns=10, relevant=3, background=0.3)
FACTS = {"relevant": 3, "gamma": PATTERNS.gamma, "deviation": PATTERNS.deviation}


# --- Lemma 4 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "patterns",
    [
        Patterns(**SMALL),
        Patterns(**SMALL, mixture=0.3, background=0.2, seed=3),
        Patterns(inputs=12, patterns=12, relevant=7),
        Patterns(**SMALL, rule=majority_rule(3), mixture=1.0),
        Patterns.unstructured(**SMALL, rule=interval_rule(1, 2)),
        Patterns.unstructured(8, 8, 4),
        Patterns.unstructured(8, 8, 1),
        Patterns.unstructured(8, 8, 8, rule=(0, 8)),
    ],
    ids=str,
)
def test_the_explicit_network_says_every_label(patterns: Patterns) -> None:
    net, people = explicit_network(patterns), patterns.population()
    facts = lemma4_facts(net, people)
    assert net.units == 3 * (patterns.relevant + 1)
    assert facts["error"] < 1e-12
    assert facts["loss"] < 1e-12
    assert max(facts["outer"], facts["bias_high"], facts["inside"]) <= 1
    if patterns.relevant % 2:  # mu_A is a half-integer
        assert facts["bias_low"] <= 1
    net.a[:3] *= -1  # the tent at count zero, upside down
    assert lemma4_facts(net, people)["loss"] == pytest.approx(2 * patterns.count_law()[0], abs=1e-12)


def test_the_explicit_network_on_inputs() -> None:
    patterns = Patterns()
    data, net = patterns.dataset(300), explicit_network(patterns)
    seen = type(net)(net.w @ patterns.dictionary().T, net.b, net.a)(data.x)
    assert torch.allclose(seen, data.y[:, 0], atol=1e-11)


# --- Lemmas 5 and 6 --------------------------------------------------------------------------------


def test_components_of_the_first_step_one_at_a_time() -> None:
    people, net = PATTERNS.population(), mirrored_start(10, 3, **FACTS)
    found = decompose(net, people, PATTERNS.is_relevant(), 0.2, sampled=False)
    for i in range(0, net.units, 2):
        slopes = [smoothed_slope(net.w[i] @ phi + net.b[i], 0.2).item() for phi in people.phi]
        for j in range(10):
            rows = zip(people.weights.tolist(), people.y.tolist(), people.phi[:, j].tolist(), slopes, strict=True)
            by_hand = math.fsum(weight * y * coordinate * slope for weight, y, coordinate, slope in rows)
            assert found.components[i, j].item() == pytest.approx(by_hand, abs=1e-14)
    assert torch.count_nonzero(found.errors) == 0
    assert torch.count_nonzero(found.floor) == 0


def test_the_gradient_is_the_sum_of_its_components_at_any_step() -> None:
    people, dictionary = PATTERNS.population(), PATTERNS.dictionary()
    x, rows = people.phi @ dictionary.T, (people.y, people.weights)
    net = mirrored_start(14, 6, **FACTS)
    for steps in ((1, 0, 0), (1, 1, 0), (1, 1, 30)):
        schedule = paper_schedule(6, **FACTS, steps=30, outer_rate=0.3)
        trained = train(net, tuple(p for p, n in zip(schedule, steps, strict=True) if n), lambda _: (x, *rows))
        short = type(net)(trained.w @ dictionary, trained.b, trained.a)
        direct = decompose(short, people, PATTERNS.is_relevant(), 0.1, sampled=False).components
        found = gradients(trained, x, *rows, 0.1).w
        assert torch.allclose(pattern_components(found, trained.a, dictionary), direct, atol=1e-13)
    with pytest.raises(InputError, match="outer weight 0"):
        pattern_components(found, torch.zeros(12, dtype=torch.float64))


def test_lemma_6_on_the_population() -> None:
    """Exactly, without sampling: relevant components stand out, and the second step is cleaner than the first."""
    patterns = Patterns(inputs=14, patterns=14, relevant=5)
    facts = {"relevant": 5, "gamma": patterns.gamma, "deviation": patterns.deviation}
    people, inside = patterns.population(), patterns.is_relevant()
    net = mirrored_start(14, 20, **facts)
    schedule = paper_schedule(20, **facts, steps=0)
    rows = (people.phi, people.y, people.weights)
    after = train(net, schedule[:1], lambda _: rows)
    first = decompose(net, people, inside, schedule[0].noise, sampled=False)
    second = decompose(after, people, inside, schedule[1].noise, sampled=False)
    assert second.ratio.max() < first.ratio.median()
    strongest = patterns.gamma / patterns.deviation  # beta = 1
    assert second.signal.max().item() <= strongest * (1 + 1e-9)
    assert star_cosines(train(after, schedule[1:2], lambda _: rows), inside).abs().min() > 0.999


def test_the_floor_is_what_sampling_alone_gives() -> None:
    """Errors against the spread over fresh samples; and the floor falls like one over the root of n."""
    net, inside = mirrored_start(10, 2, **FACTS), PATTERNS.is_relevant()
    many = [decompose(net, PATTERNS.draw(500, f"try {t}"), inside, 0.2) for t in range(200)]
    spread = torch.stack([one.components for one in many]).std(0)
    stated = torch.stack([one.errors for one in many]).mean(0)
    assert ((stated / spread - 1).abs() < 0.25).all()
    small, large = (decompose(net, PATTERNS.draw(n), inside, 0.2).floor.median() for n in (1000, 16000))
    assert (small / large).item() == pytest.approx(4, rel=0.25)


def test_a_decomposition_by_hand() -> None:
    """Two neurons, the second with its signal the other way round; patterns 0, 2 and 4 are relevant."""
    components = torch.tensor([[4.0, 1.0, 6.0, -2.0, 5.0], [-3.5, 0.5, -1.0, 0.1, -1.5]], dtype=torch.float64)
    errors = torch.tensor([[9.0, 3.0, 9.0, 4.0, 9.0], [9.0, 0.0, 9.0, 0.0, 9.0]], dtype=torch.float64)
    found = Decomposition(components, errors, torch.tensor([True, False, True, False, True]))
    assert found.signal.tolist() == [5, -2]
    assert found.unevenness.tolist() == pytest.approx([1 / 5, 3 / 4])
    assert found.noise.tolist() == [2, 0.5]
    assert found.ratio.tolist() == pytest.approx([2 / 5, 1 / 4])
    largest = 2 / math.sqrt(math.pi)  # of two normals, in size
    assert found.floor.tolist() == pytest.approx([largest * math.sqrt(12.5) / 5, 0], rel=1e-6)


@pytest.mark.parametrize("count", [1, 2, 95])
def test_expected_largest_against_draws(count: int) -> None:
    draws = torch.randn(100_000, count, generator=stream(0, "largest"), dtype=torch.float64).abs().amax(1)
    assert expected_largest(count) == pytest.approx(draws.mean().item(), abs=5 * draws.std().item() / math.sqrt(1e5))
    assert expected_largest(1) == pytest.approx(math.sqrt(2 / math.pi), abs=1e-6)


# --- theorems --------------------------------------------------------------------------------------


def test_theorem_1_says_which_conditions_fail_at_the_papers_size() -> None:
    setting = {"patterns": 100, "relevant": 5, "background": 0.5, "gamma": 0.25, "error": 0.01}
    rows = learning_conditions(pairs=300, **setting)
    assert [row.holds for row in rows] == [True, False, False, True]
    assert rows[2].needed == pytest.approx(5**12 * 1000)
    assert rows[1].needed == pytest.approx(math.log(100 * 300 / (0.05 * 0.25)) ** 2)
    assert rows[0].needed == 0.25
    kind = {"width_constant": 1e-10, "relevant_constant": 1e-3}
    assert all(row.holds for row in learning_conditions(pairs=300, **setting, **kind))
    with pytest.raises(InputError, match=r"error lies in"):
        learning_conditions(pairs=300, **(setting | {"error": 0.0}))
    with pytest.raises(InputError, match="at least one pair"):
        learning_conditions(pairs=0, **setting)


def test_theorem_2_binds_where_it_says() -> None:
    bound = fixed_feature_bound(features=600, norm=10, patterns=176, relevant=11)
    assert bound.binds
    assert bound.value == pytest.approx(0.5 * (1 - math.sqrt(1200) * 10 / 2048))
    paper = fixed_feature_bound(features=600, norm=1, patterns=100, relevant=5)
    assert paper.value < 0
    assert not paper.binds
    for k, reason in ((3, "not above 3"), (13, "exceeds D/16"), (10, "even")):
        broken = fixed_feature_bound(features=1, norm=0.1, patterns=176, relevant=k)
        assert not broken.binds
        assert any(reason in text for text in broken.broken)


def test_theorem_3_counts() -> None:
    bound = query_bound(100, 5)
    assert round(bound.least) == 211
    assert bound.rules_out(100, 0.01)
    assert not bound.rules_out(300, 0.01)
    assert not bound.rules_out(100, 0.001)
    assert query_bound(6, 2).error == pytest.approx(0.5 - 15**-3, rel=1e-12)
    assert query_bound(6, 2).least == pytest.approx(0.5 * 15 ** (1 / 3), rel=1e-12)
    assert query_bound(40_000, 2_000).least == math.inf  # C(D, k) is beyond every float; the bound still stands
    with pytest.raises(InputError, match="tolerance above 0"):
        bound.rules_out(1, 0.0)


def test_theorem_1_can_first_be_met_at_some_twenty_thousand_relevant_patterns() -> None:
    """The least k meets all conditions with its own D and m, and the one below does not, whatever D and m."""
    k = least_learnable_relevant(error=0.1)
    for relevant, met in ((k, True), (k - 1, False)):
        pairs = math.ceil(relevant**12 / 0.1**1.5) + 1
        facts = {"patterns": 2 * relevant**2, "pairs": pairs, "background": 0.5, "gamma": 0.25, "error": 0.1}
        conditions = learning_conditions(relevant=relevant, **facts)  # type: ignore[arg-type]
        assert all(condition.holds for condition in conditions) == met
        assert min(condition.slack for condition in conditions) == pytest.approx(1, rel=1e-3)
    assert least_learnable_relevant(error=0.5) < k  # a larger error needs fewer neurons


def test_slack_is_the_largest_constant_that_still_holds() -> None:
    facts = {"patterns": 100, "relevant": 5, "pairs": 300, "background": 0.5, "gamma": 0.25, "error": 0.1}
    slack = learning_conditions(**facts)[1].slack  # type: ignore[arg-type]
    for factor, holds in ((0.99, True), (1.01, False)):
        assert learning_conditions(**facts, relevant_constant=factor * slack)[1].holds == holds  # type: ignore[arg-type]
