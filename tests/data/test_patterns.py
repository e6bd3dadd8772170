"""Pattern data: exact moments against enumeration and samples, impossible settings refused, assumptions checked."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from unlazy.data.patterns import Patterns, check_assumptions, interval_rule, majority_rule, parity_rule
from unlazy.runtime import InputError, stream

SMALL = {"inputs": 9, "patterns": 7, "relevant": 3}
SETTINGS = [
    Patterns(**SMALL),
    Patterns(**SMALL, mixture=0.3, background=0.2),
    Patterns(**SMALL, rule=majority_rule(3), mixture=1.0, background=0.4),
    Patterns(**SMALL, rule=interval_rule(2, 3), mixture=0.7),
    Patterns.unstructured(**SMALL),
    Patterns.unstructured(**SMALL, rule=(0, 3)),
]


def slow_label(present: list[int], relevant: list[int], rule: tuple[int, ...]) -> int:
    return 1 if sum(present[i] for i in relevant) in rule else -1


@pytest.mark.parametrize("patterns", SETTINGS, ids=str)
def test_population_matches_the_definition_one_vector_at_a_time(patterns: Patterns) -> None:
    """Probabilities, labels, gamma, sigma~ from loops over {0, 1}^D; nothing shared with the code under test."""
    people = patterns.population()
    relevant = patterns.relevant_set().tolist()
    share: dict[tuple[int, ...], float] = {}
    for vector in itertools.product((0, 1), repeat=7):
        rest = 1.0
        for i in set(range(7)) - set(relevant):
            rest *= patterns.background if vector[i] else 1 - patterns.background
        inside = [vector[i] for i in relevant]
        equal = 0.5 if len(set(inside)) == 1 else 0.0
        share[vector] = rest * (patterns.mixture / 8 + (1 - patterns.mixture) * equal)
    assert people.weights.sum().item() == pytest.approx(1)
    mean, joint = [0.0] * 7, [0.0] * 7
    positive = mean_y = 0.0
    for row in range(128):
        vector = tuple(int(bit) for bit in people.indicators[row])
        label = slow_label(list(vector), relevant, patterns.counts)
        assert people.weights[row].item() == pytest.approx(share[vector], abs=1e-15)
        assert people.y[row].item() == label
        positive += share[vector] * (label == 1)
        mean_y += share[vector] * label
        for i in range(7):
            mean[i] += share[vector] * vector[i]
            joint[i] += share[vector] * vector[i] * label
    assert patterns.positive_share == pytest.approx(positive)
    assert patterns.means().tolist() == pytest.approx(mean)
    for i in range(7):
        expected = patterns.gamma if i in relevant else 0.0
        assert joint[i] - mean_y * mean[i] == pytest.approx(expected, abs=1e-12)
    variance = sum(m * (1 - m) for m in mean)
    assert patterns.deviation**2 == pytest.approx(variance)
    centred = people.weights @ people.phi
    assert centred.abs().max().item() < 1e-15
    assert (people.weights @ people.phi.square()).sum().item() == pytest.approx(1)


def test_the_papers_setting() -> None:
    patterns = Patterns()
    assert (patterns.gamma, patterns.deviation, patterns.background_variance) == (0.25, 5.0, 0.01)
    assert Patterns(mixture=0.2).gamma == pytest.approx(0.4)  # (1 - mixture) / 2
    assert parity_rule(5) == (1, 3, 5)
    assert majority_rule(5) == (3, 4, 5)


def test_dictionary_and_inputs() -> None:
    patterns = Patterns(inputs=30, patterns=20, relevant=5, background=0.3, seed=4)
    dictionary = patterns.dictionary()
    assert torch.allclose(dictionary.T @ dictionary, torch.eye(20, dtype=torch.float64), atol=1e-13)
    data, sample = patterns.dataset(4000), patterns.draw(4000)
    assert torch.allclose(data.x @ dictionary, sample.phi)
    assert data.x.var(0).sum().item() == pytest.approx(1, abs=0.03)  # total variance is one
    assert torch.equal(data.y[:, 0], sample.y)
    relevant = patterns.relevant_set()
    equal = sample.indicators[~sample.uniform][:, relevant].to(torch.float64)
    assert bool(((equal.mean(1) == 0) | (equal.mean(1) == 1)).all())
    mixed = sample.indicators[sample.uniform][:, relevant].sum(1)
    assert bool(((mixed > 0) & (mixed < 5)).any())
    assert abs(sample.uniform.to(torch.float64).mean().item() - 0.5) < 0.04
    assert not torch.equal(patterns.draw(50, "test").indicators, sample.indicators[:50])
    assert torch.equal(patterns.draw(4000).indicators, sample.indicators)
    assert data.describe()["options"]["seed"] == 4


def test_another_seed_is_another_relevant_set() -> None:
    sets = {tuple(Patterns(seed=seed).relevant_set().tolist()) for seed in range(8)}
    assert len(sets) == 8


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"patterns": 4, "relevant": 5}, "more relevant patterns than patterns"),
        ({"relevant": 0}, "at least one pattern"),
        ({"relevant": 4}, "k=4 is even"),
        ({"rule": (1, 6)}, r"P holds \[6\]"),
        ({"rule": (-1,)}, r"P holds \[-1\]"),
        ({"inputs": 99}, "d=99 < D=100"),
        ({"mixture": 1.2}, "mixture is a probability"),
        ({"background": 0.7}, "background probability in"),
        ({"mixture": 1.0}, "gamma > 0"),
        ({"rule": (0, 1, 2, 3)}, "A0 asks"),
        ({"structured": False}, "fair coins"),
        ({"relevant": 4, "rule": (0, 2, 4)}, "A0 asks"),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(settings, reason) -> None:
    with pytest.raises(InputError, match=reason):
        Patterns(**settings)


def test_even_parity_is_legal_without_structure() -> None:
    assert Patterns.unstructured(relevant=4).gamma == pytest.approx(0, abs=1e-15)


def test_too_many_to_list() -> None:
    with pytest.raises(InputError, match="too many to list"):
        Patterns().population()


def test_checker_accepts_what_holds_and_names_what_does_not() -> None:
    found = []
    for seed in range(20):
        patterns = Patterns(inputs=20, patterns=20, relevant=5, background=0.3, seed=seed)
        sample = patterns.draw(4000)
        report = check_assumptions(sample.indicators, sample.y, patterns.relevant_set())
        found.append([report[name] for name in ("a0", "a1", "a2")] + [report["gamma_mean"].contains(0.25)])
        wrong = (patterns.relevant_set() + 1) % 20
        assert not check_assumptions(sample.indicators, sample.y, wrong)["a2"]
    accepted = torch.tensor(found, dtype=torch.float64).mean(0)
    assert accepted.min().item() >= 0.8  # each is a 95 % statement

    patterns = Patterns(inputs=20, patterns=20, relevant=5)
    sample, relevant = patterns.draw(4000), patterns.relevant_set()
    skewed = torch.where(torch.rand(4000) < 0.2, 1.0, sample.y)
    assert not check_assumptions(sample.indicators, skewed.to(torch.float64), relevant)["a0"]
    copied = sample.indicators.clone()
    first, second = torch.nonzero(~patterns.is_relevant())[:2, 0].tolist()
    copied[:2000, first] = copied[:2000, second]
    assert not check_assumptions(copied, sample.y, relevant)["a2"]
    flat = Patterns.unstructured(20, 20, 5)
    coins = flat.draw(4000)
    assert not check_assumptions(coins.indicators, coins.y, flat.relevant_set())["a1"]


def test_checker_names_uneven_gammas_rates_and_dependence_on_the_relevant_ones() -> None:
    """One assumption broken at a time, the others left alone."""
    patterns = Patterns(inputs=20, patterns=20, relevant=5)
    sample, relevant = patterns.draw(8000), patterns.relevant_set()
    outside = torch.nonzero(~patterns.is_relevant())[:, 0]
    coins = torch.rand(8000, generator=stream(0, "coins"), dtype=torch.float64)

    def verdicts(indicators: Tensor) -> list[bool]:
        report = check_assumptions(indicators, sample.y, relevant)
        return [report[name] for name in ("a0", "a1", "a2")]

    assert verdicts(sample.indicators) == [True, True, True]
    weaker = sample.indicators.clone()
    weaker[:, relevant[0]] = torch.where(coins < 0.3, coins < 0.15, weaker[:, relevant[0]])  # 70 % of gamma is left
    assert verdicts(weaker) == [True, False, True]
    rarer = sample.indicators.clone()
    rarer[:, outside[0]] &= coins < 0.8  # rate 0.4, independent still
    assert verdicts(rarer) == [True, True, False]
    commoner = sample.indicators.clone()
    commoner[:, outside] |= torch.rand(8000, len(outside), generator=stream(0, "more")) < 0.2  # all alike: rate 0.6
    assert verdicts(commoner) == [True, True, False]
    leaning = sample.indicators.clone()
    leaning[:, outside[3]] = torch.where(coins < 0.1, leaning[:, relevant[2]], leaning[:, outside[3]])
    assert verdicts(leaning) == [True, True, False]


def test_checker_refuses_what_it_cannot_measure() -> None:
    patterns = Patterns(inputs=20, patterns=20, relevant=5)
    sample, relevant = patterns.draw(100), patterns.relevant_set()
    for indicators, y, chosen, reason in (
        (sample.indicators[:20], sample.y[:20], relevant, "at least 30 samples"),
        (sample.indicators, sample.y[:50], relevant, "100 rows of indicators but 50 labels"),
        (sample.indicators, (sample.y + 1) / 2, relevant, "labels are -1 and \\+1"),
        (sample.indicators, sample.y, relevant + 20, "from 0 to 19"),
        (sample.indicators, sample.y, relevant[:0], "at least one"),
    ):
        with pytest.raises(InputError, match=reason):
            check_assumptions(indicators, y, chosen)


def test_intervals_of_the_checker_hold_the_truth_as_often_as_they_say() -> None:
    patterns = Patterns(inputs=8, patterns=8, relevant=3, background=0.3)
    truths = {"positive": 0.5, "gamma_mean": patterns.gamma, "background": 0.3}
    hits = dict.fromkeys(truths, 0)
    for number in range(600):
        sample = patterns.draw(400, f"try {number}")
        report = check_assumptions(sample.indicators, sample.y, patterns.relevant_set())
        for name, truth in truths.items():
            hits[name] += report[name].contains(truth)
    for name, count in hits.items():
        assert 0.92 <= count / 600 <= 0.98, (name, count)
