"""Labels exchanged in mid-training: what continues, what is measured, and verdicts that can flip."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from unlazy.claims.rule import judge_claim
from unlazy.studies.engine import reproduce
from unlazy.studies.halfspace.swap_images import HALVES, STUDY, easy_less_hard, training_of
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.study import Work
from unlazy.studies.table import Table

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def request_(tmp_path_factory: pytest.TempPathFactory) -> Request:
    folder = tmp_path_factory.mktemp("swap-images")
    request = Request("swap-images", "smoke", folder / "runs", folder / "results")
    done = reproduce(request, ExecutionOptions(), progress=lambda *_: None)
    assert (done.failed, done.not_drawn) == ({}, {})
    return request


def test_the_exchange_continues_from_where_the_first_training_was(request_: Request) -> None:
    """Paths know no labels: those at the exchange are the same in both runs, and their ratio has the other sign."""
    case = STUDY.cases(request_.settings, (0, 1))[0]
    work = Work("swap-images", "smoke", request_.runs / "swap-images")
    first = training_of(case, work).run(work)
    second = training_of(case, work, first).run(work)
    unit = len(training_of(case, work).data) // case.batch + 1
    assert np.allclose(first.array("test_paths", case.before * unit), second.array("test_paths", 0))
    one, other = easy_less_hard(case, first, "test_paths"), easy_less_hard(case, second, "test_paths", exchanged=True)
    assert np.allclose(other[0], -one[case.before])
    assert not np.allclose(other[-1], other[0])


def test_both_halves_are_easy_once(tmp_path: Path) -> None:
    case = STUDY.cases(STUDY.settings("smoke"), (0, 1))[0]
    data = training_of(case, Work("swap-images", "smoke", tmp_path)).data
    labels = data.y.argmax(-1).numpy()  # [members, n]
    classes = np.argmax(np.stack([inside.numpy() for inside in data.groups.values()]), axis=0)
    for row, easy in enumerate(half for half in HALVES for _ in case.seeds):
        kept = np.isin(classes, easy)
        assert (labels[row, kept] == classes[kept]).all()
        assert (labels[row, ~kept] == classes[~kept]).mean() < 0.5


@pytest.mark.parametrize(("paths", "swap", "verdict"), [(0.1, 0.8, "holds"), (-0.1, 0.7, "fails")])
def test_verdicts_can_flip(paths: float, swap: float, verdict: str) -> None:
    (claim,), seeds = STUDY.claims, STUDY.seeds_of("desk")
    rows = [
        {"net": net, "training": training, "seed": seed, "at": "end", "quantity": quantity, "value": value}
        for net in ("relu", "pwc")
        for seed in seeds
        for training, quantity, value in (
            ("swap", "allocation", paths),
            ("swap", "accuracy", swap),
            ("scratch", "accuracy", 0.8),
        )
    ]
    assert judge_claim(claim, Table.from_rows(rows), seeds)["verdict"] == verdict
