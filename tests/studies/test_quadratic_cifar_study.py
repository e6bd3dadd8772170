"""Quadratic gates on CIFAR-10: networks of one size, a study that runs, verdicts that can flip."""

from __future__ import annotations

import pytest

from unlazy.claims.rule import judge_claim
from unlazy.studies.engine import reproduce
from unlazy.studies.halfspace.quadratic_cifar import STUDY
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.table import Table


def test_networks_have_one_size_and_the_study_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("quadratic-cifar")
    request = Request("quadratic-cifar", "smoke", folder / "runs", folder / "results")
    done = reproduce(request, ExecutionOptions(), progress=lambda *_: None)
    assert (done.failed, done.not_drawn) == ({}, {})
    table = Table.read(request.folder / "table.csv")
    for rule in ("soft", "hard"):
        linear, quadratic = (table.select("parameters", rule=rule, gating=one)[0] for one in ("linear", "quadratic"))
        assert quadratic == pytest.approx(linear, rel=0.02)


@pytest.mark.parametrize(("quadratic", "verdict"), [(0.41, "holds"), (0.39, "fails")])
def test_verdicts_can_flip(quadratic: float, verdict: str) -> None:
    (claim,), seeds = STUDY.claims, STUDY.seeds_of("desk")
    place = {"at": "end", "split": "test", "gates": "as trained", "quantity": "accuracy"}
    rows = [
        {"rule": rule, "gating": gating, "seed": seed, "value": value, **place}
        for rule in ("soft", "hard")
        for gating, value in (("linear", 0.4), ("quadratic", quadratic))
        for seed in seeds
    ]
    row = judge_claim(claim, Table.from_rows(rows), seeds)
    assert (row["verdict"], row["survives"]) == (verdict, verdict)
