"""Statistical queries: answers against direct averages, the adversary against brute force, gradient descent as a client."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from unlazy.data.patterns import Patterns
from unlazy.models.truncated import mirrored_start, paper_schedule, train
from unlazy.runtime import InputError, stream
from unlazy.theory.queries import AdversarialOracle, BatchOracle, HonestOracle, NoisyOracle, descend, find_relevant

STRUCTURED = Patterns(inputs=12, patterns=12, relevant=5, seed=2)


def random_query(seed: int, columns: int = 3):
    """Values in [-1, 1] looked up by (hidden vector, label)."""

    def query(present: Tensor, y: Tensor) -> Tensor:
        size = present.shape[1]
        table = 2 * torch.rand(2, 2**size, columns, generator=stream(seed, "query"), dtype=torch.float64) - 1
        index = (present.long() << torch.arange(size)).sum(1)
        return table[(y > 0).long(), index]

    return query


def test_answers_and_the_counter() -> None:
    people = STRUCTURED.population()
    honest, noisy = HonestOracle(people), NoisyOracle(people, 0.1)
    query = random_query(0)
    exact = (people.weights[:, None] * query(people.indicators, people.y)).sum(0)
    assert torch.allclose(honest.ask(query), exact, atol=1e-14)
    errors = torch.stack([noisy.ask(query) - exact for _ in range(200)])
    assert errors.abs().max() <= 0.1
    assert errors.abs().max() > 0.09
    assert (honest.asked, noisy.asked) == (3, 600)
    with pytest.raises(InputError, match=r"values in \[-1, 1\]"):
        honest.ask(lambda present, y: 2 * y[:, None])


@pytest.mark.parametrize("seed", range(5))
def test_one_query_per_pattern_finds_the_relevant_set(seed: int) -> None:
    patterns = Patterns(seed=seed)  # D = 100, k = 5, gamma = 1/4
    noisy = NoisyOracle(patterns.draw(4000), 0.15, seed)
    assert torch.equal(find_relevant(noisy, 100, 5), patterns.relevant_set())
    assert noisy.asked == 100
    blind = Patterns.unstructured(12, 12, 5, seed=seed)
    answers = HonestOracle(blind.population())
    for index in range(12):
        told = answers.ask(lambda present, y, i=index: (y * (2 * present[:, i].double() - 1))[:, None])
        assert abs(told.item()) < 1e-14  # single patterns say nothing


def test_the_adversary_against_brute_force() -> None:
    """For each set of k patterns: is the coin's answer within the tolerance of that set's own average?"""
    size, k, tolerance = 7, 3, 0.1
    oracle = AdversarialOracle(size, k, tolerance)
    possible = set(itertools.combinations(range(size), k))
    present = oracle.people.indicators
    for number in range(12):
        query = random_query(number, 1)
        plus = torch.ones(2**size, dtype=torch.float64)
        coin = (query(present, plus) + query(present, -plus)).mean().item() / 2
        for chosen in list(possible):
            odd = present[:, list(chosen)].sum(1) % 2 == 1
            own = query(present, torch.where(odd, 1.0, -1.0).to(torch.float64)).mean().item()
            if abs(own - coin) > tolerance:
                possible.discard(chosen)
        assert oracle.ask(query).item() == pytest.approx(coin, abs=1e-12)
        assert oracle.consistent == len(possible)
        found = {tuple(torch.nonzero(row)[:, 0].tolist()) for row in oracle.candidates()}
        assert found == possible
    assert 0 < len(possible) < math.comb(size, k)


def test_each_query_rules_out_at_most_one_over_tolerance_squared() -> None:
    oracle = AdversarialOracle(12, 5, 0.2)
    for number in range(6):
        before = oracle.consistent
        # the most damaging query a learner without knowledge can ask: the label times a parity
        oracle.ask(lambda present, y, s=number: (y * (1 - 2 * (present[:, s : s + 5].sum(1) % 2)))[:, None].double())
        assert before - oracle.consistent == 1
    assert oracle.consistent == math.comb(12, 5) - 6
    find_relevant(oracle, 12, 5)
    assert oracle.consistent == math.comb(12, 5) - 6  # D single-pattern queries tell nothing


def test_a_cornered_adversary_tells_the_truth() -> None:
    oracle = AdversarialOracle(4, 1, 0.3)

    def one(index: int):
        return lambda present, y: (y * (2 * present[:, index].double() - 1))[:, None]

    answers = [oracle.ask(one(index)).item() for index in range(4)]
    assert answers == pytest.approx([0, 0, 0, 1])  # only the last is left: y = 2 phi - 1
    assert oracle.consistent == 1
    assert oracle.candidates().tolist() == [[False, False, False, True]]
    assert oracle.ask(one(0)).item() == pytest.approx(0)


def test_a_settled_adversary_still_counts_what_agrees_with_every_answer() -> None:
    """Cornered by a query that shifts two sets alike: both agree with the truth it then tells, until one does not."""
    size, k, tolerance = 6, 2, 0.3
    oracle = AdversarialOracle(size, k, tolerance)
    sets = list(itertools.combinations(range(size), k))
    present = oracle.people.indicators

    def parity(chosen: tuple[int, ...]) -> Tensor:
        return torch.where(present[:, list(chosen)].sum(1) % 2 == 1, 1.0, -1.0).to(torch.float64)

    def about(*weighted: tuple[tuple[int, ...], float]):
        return lambda _, y: (y * sum(share * parity(chosen) for chosen, share in weighted))[:, None]

    asked = [about((chosen, 1.0)) for chosen in sets[2:]]  # one set at a time crossed out: two are left
    asked += [about((sets[0], 0.5), (sets[1], 0.5)), about((sets[0], 0.25), (sets[1], 0.5)), about((sets[1], 1.0))]
    left = []
    answers: list[float] = []
    for query in asked:
        answers.append(oracle.ask(query).item())
        agree = [
            chosen
            for chosen in sets
            if all(
                abs(query(present, parity(chosen)).mean().item() - answer) <= tolerance + 1e-12
                for query, answer in zip(asked, answers, strict=False)
            )
        ]
        found = [tuple(torch.nonzero(row)[:, 0].tolist()) for row in oracle.candidates()]
        assert sorted(found) == agree
        left.append(oracle.consistent)
    assert left[-4:] == [2, 2, 2, 1]
    assert answers[-3:] == pytest.approx([0.5, 0.25, 0.0])


# --- descent as a client ---------------------------------------------------------------------------


def setting(patterns: Patterns, pairs: int):
    facts = {"relevant": patterns.relevant, "gamma": 0.25, "deviation": patterns.deviation}
    return mirrored_start(patterns.patterns, pairs, **facts), paper_schedule(pairs, **facts, steps=3)


def test_descent_through_an_honest_oracle_is_descent() -> None:
    patterns = Patterns(inputs=8, patterns=8, relevant=3)
    people = patterns.population()
    net, schedule = setting(patterns, 4)
    oracle = HonestOracle(people)
    asked = descend(oracle, net, schedule, patterns)
    direct = train(net, schedule, lambda _: (people.phi, people.y, people.weights))
    assert torch.allclose(asked.w, direct.w, atol=1e-13)
    assert torch.allclose(asked.a, direct.a, atol=1e-14)
    assert oracle.asked == 5 * 8 * (8 + 2)  # steps x units x (D + 2)


def test_phases_with_an_outer_rate_are_followed_as_in_training() -> None:
    patterns = Patterns(inputs=8, patterns=8, relevant=3)
    people = patterns.population()
    net, _ = setting(patterns, 4)
    facts = {"relevant": 3, "gamma": 0.25, "deviation": patterns.deviation}
    schedule = paper_schedule(4, **facts, steps=6, outer_rate=0.2)
    asked = descend(HonestOracle(people), net, schedule, patterns)
    direct = train(net, schedule, lambda _: (people.phi, people.y, people.weights))
    assert torch.allclose(asked.a, direct.a, atol=1e-9)
    assert torch.allclose(asked.w, direct.w, atol=1e-11)


def test_what_no_oracle_answers_is_refused() -> None:
    patterns = Patterns(inputs=8, patterns=8, relevant=3)
    oracle = HonestOracle(patterns.population())
    for ask, reason in (
        (lambda: oracle.ask(lambda present, y: y), r"one column a function, \[n, q\]; got shape \(256,\)"),
        (lambda: find_relevant(oracle, 8, 9), "k=9 relevant patterns of D=8"),
        (lambda: BatchOracle(patterns, 0, 10), "a batch has rows"),
        (lambda: AdversarialOracle(20, 5, 0.1), "too many to list"),
        (lambda: AdversarialOracle(8, 3, 0.0), "no room to lie"),
        (lambda: HonestOracle(patterns.population(), -0.1), "at least 0"),
    ):
        with pytest.raises(InputError, match=reason):
            ask()
    assert oracle.asked == 0


def test_mini_batches_are_an_oracle_with_tolerance() -> None:
    patterns = Patterns(inputs=8, patterns=8, relevant=3)
    net, schedule = setting(patterns, 4)
    oracle = BatchOracle(patterns, 400, queries=8 * 10)
    exact = HonestOracle(patterns.population())
    query = random_query(1, 80)
    assert (oracle.ask(query) - exact.ask(query)).abs().max() < oracle.tolerance
    assert 80 * 2 * math.exp(-400 * oracle.tolerance**2 / 2) == pytest.approx(0.05)  # Hoeffding, values in [-1, 1]
    assert not torch.equal(oracle.ask(query), oracle.ask(query))  # fresh batches
    trained = descend(oracle, net, schedule[:2], patterns)
    inside = patterns.is_relevant().to(torch.float64)
    cosine = (trained.w @ inside).abs() / trained.w.norm(dim=1) / math.sqrt(3)
    assert cosine.median() > 0.9


def test_descent_learns_nothing_from_the_adversary() -> None:
    """Two steps of descent through the adversary leave nearly every relevant set possible."""
    patterns = Patterns.unstructured(10, 10, 5)
    net, schedule = setting(patterns, 3)
    oracle = AdversarialOracle(10, 5, 0.05)
    descend(oracle, net, schedule[:2], patterns)
    assert oracle.asked == 2 * 6 * 12
    assert oracle.settled is None
    assert oracle.consistent > 0.9 * math.comb(10, 5)
