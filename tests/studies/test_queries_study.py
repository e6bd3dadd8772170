"""The study of Theorem 3: its learners against brute force, and the budget they keep."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from unlazy.claims.rule import judge_claim
from unlazy.data.patterns import Patterns
from unlazy.models.truncated import train
from unlazy.studies.emergence import first_rate, queries
from unlazy.studies.emergence.common import start_network, training_phases
from unlazy.studies.study import Work
from unlazy.studies.table import Table
from unlazy.theory.bounds import query_bound
from unlazy.theory.emergence import decompose
from unlazy.theory.queries import AdversarialOracle


def test_a_vote_is_the_sign_of_a_sum_of_parities() -> None:
    present = Patterns.unstructured(4, 4, 2).population().indicators
    sets = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]) == 1
    y = torch.linspace(-1, 1, len(present), dtype=torch.float64)
    found = queries.label_times_vote(present, y, sets=sets)
    for row, label, value in zip(present.tolist(), y.tolist(), found[:, 0].tolist(), strict=True):
        parities = [1 if (row[a] + row[b]) % 2 else -1 for a, b in ((0, 1), (1, 2), (2, 3))]
        assert value == pytest.approx(label * math.copysign(1, sum(parities)))


@pytest.mark.parametrize("learner", queries.LEARNERS)
def test_learners_stay_below_the_bound_and_below_parseval(learner: str) -> None:
    least = query_bound(12, 6).least
    share, asked = queries.share_left(learner, 12, seed=3)
    assert asked == math.ceil(least - 1)
    ruled_out = (1 - share) * math.comb(12, 6)
    assert ruled_out <= asked * least**2
    wanted = {"patterns": 0, "parities": asked}  # a parity of six says nothing of one pattern; one query, one set
    assert ruled_out == pytest.approx(wanted.get(learner, ruled_out), abs=1e-9)
    if learner == "sums":
        assert ruled_out > 5 * asked


def test_every_set_in_a_vote_is_ruled_out() -> None:
    """The number of parities in a vote is chosen so that each has a correlation with it above the tolerance."""
    tolerance = 0.15
    oracle = AdversarialOracle(12, 6, tolerance)
    before = oracle.consistent
    oracle.ask(next(islice(queries.ask_sums(oracle, tolerance, 0), 1)))
    assert before - oracle.consistent >= 0.9 * math.floor(0.6 * 2 / (math.pi * tolerance**2))


def test_the_set_is_found_with_more_queries() -> None:
    assert query_bound(8, 4).least < queries.queries_to_find(8, seed=1) <= math.comb(8, 4)


def test_the_claim_flips() -> None:
    (claim,) = queries.CLAIMS
    rows = [
        {"quantity": "least_share_left", "learner": name, "seed": seed, "value": 0.9}
        for name in queries.LEARNERS
        for seed in range(10)
    ]
    judged = judge_claim(claim, Table.from_rows(rows), range(10))
    assert judged["verdict"] == "holds"
    rows[-1] = {**rows[-1], "value": 0.4}  # one random case is enough
    judged = judge_claim(claim, Table.from_rows(rows), range(10))
    assert judged["verdict"] == "2 of 3 parts"


def test_the_scan_takes_the_steps_of_the_training_at_another_first_rate() -> None:
    (case,) = first_rate.STUDY.cases(first_rate.STUDY.settings("smoke"), [0])
    table = Table.from_rows(first_rate.measure(case, Work("first-rate", "smoke", Path())).entries, digits=17)
    patterns = Patterns(case.patterns, case.patterns, case.relevant, seed=0)
    everyone = patterns.population()
    first, second, _ = training_phases(case.pairs, patterns)
    for factor in first_rate.FIRST_RATES:
        faster = replace(first, rate=factor * first.rate)
        rows = (everyone.phi, everyone.y, everyone.weights)
        net = train(start_network(case.pairs, patterns), (faster,), lambda _, rows=rows: rows)
        found = decompose(net, everyone, patterns.is_relevant(), second.noise, sampled=False)
        kept = table.select("ratio", 2, first_rate=f"{factor:.0e}")
        assert kept == pytest.approx([float(found.ratio.median())], rel=1e-6, nan_ok=True)
