"""The surgery study: its paired test is the exact one, missing seeds never help, and arms of a seed share their start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from unlazy.claims.functions import more_seeds, paired_p_value
from unlazy.studies.beyond import surgery
from unlazy.studies.study import Work


def test_the_paired_p_value_is_that_of_the_exact_sign_test() -> None:
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(0)
    for _ in range(20):
        one, other = random.integers(0, 2, (2, 60)).astype(float)
        wins, losses = int((one > other).sum()), int((one < other).sum())
        wanted = stats.binomtest(wins, wins + losses, alternative="greater").pvalue
        assert paired_p_value(one, other) == pytest.approx(np.full(60, wanted))
    assert paired_p_value(np.ones(5), np.ones(5))[0] == 1  # no seed differs: nothing is shown


def test_a_missing_seed_counts_against_the_first_arm() -> None:
    one, other = np.array([1.0, 1, 1, 1, 0, 1]), np.array([0.0, 0, 0, 1, 1, 0])
    for seed in range(6):
        for arm in (0, 1):
            arms = [one.copy(), other.copy()]
            arms[arm][seed] = np.nan
            assert paired_p_value(*arms)[0] >= paired_p_value(one, other)[0]
            assert more_seeds(*arms)[0] <= more_seeds(one, other)[0]


def test_arms_differ_only_in_what_they_name(tmp_path: Path) -> None:
    """A surgery that never comes due leaves plain Adam's numbers; one that does replaces gates and moves no output by itself."""
    settings = surgery.STUDY.settings("smoke")
    work = Work("surgery", "smoke", tmp_path)
    table = {}
    for case in surgery.cases(settings, (0, 1)):
        rows = surgery.measure(case, work).entries
        table[case.arm] = {(row["quantity"], row["seed"]): row["value"] for row in rows}
    assert table["none"]["replaced", 0] == 0
    assert table["surgery"]["replaced", 0] == 4  # two gates after epochs 2 and 4
    assert table["surgery"]["moved", 0] < 1e-4  # float32
    assert table["none"]["loss", 0] != table["surgery"]["loss", 0]
    late = surgery.measure(surgery.Stack("surgery", (0, 1), 6, 4, 2, 64, 24.0, every=7), work).entries
    found = {(row["quantity"], row["seed"]): row["value"] for row in late}
    assert found["loss", 1] == table["none"]["loss", 1]
