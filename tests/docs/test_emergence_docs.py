"""The page on the emergence paper: its code runs and gives the numbers that stand beside it."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from repository import DOCS

PAGE = DOCS / "explanation" / "emergence.md"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
            exec(compile(block, str(PAGE), "exec"), found)
    return found


def test_any_two_layers_are_decomposed(names) -> None:
    found = names["found"]
    assert found.components.shape == (30, 40)
    assert (found.ratio / found.floor).median() < 2


def test_one_broken_assumption_at_a_time(names) -> None:
    outcomes = names["outcomes"]
    assert {name: kept for name, (kept, _) in outcomes.items()} == {
        "as drawn": [True, True, True],
        "fewer": [False, True, True],
        "uneven": [True, False, True],
        "twins": [True, True, False],
        "leaning": [True, True, False],
    }
    least = {name: cosine for name, (_, cosine) in outcomes.items()}
    for name in ("as drawn", "fewer", "twins"):
        assert least[name] == pytest.approx(0.999, abs=6e-4)
    assert least["leaning"] == pytest.approx(math.sqrt(5 / 6), abs=0.005)
    assert least["uneven"] == pytest.approx(1 / math.sqrt(5), abs=0.06)


def test_queries_find_the_set_where_there_is_structure_and_nothing_where_there_is_none(names) -> None:
    assert names["right"]
    assert names["oracle"].asked == 100
    assert names["adversary"].asked == 270
    assert names["adversary"].consistent == math.comb(14, 7) == 3432
