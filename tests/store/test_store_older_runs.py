"""Runs that version 0.1 wrote: they open, list, judge, draw, resume as then."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import unlazy as ul
from unlazy.cli.app import app
from unlazy.scope.history import History

KEPT = (
    Path(__file__).parent / "runs_of_0_1.tar.gz"
)  # written by 0.1 of 2026-11-16: a scope of 8 steps, a stack of two members

STEPS = [0, 1, 2, 3, 4, 5, 7, 8]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    with tarfile.open(KEPT) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def old_network() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(16, 3)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), x, (x[:, 0] > 0).long()


def test_they_open(runs: Path) -> None:
    found, broken = ul.find_runs(runs)
    assert broken == []
    assert {run.folder.name for run in found} == {"scope", "fit"}
    scope = ul.Run(runs / "scope")
    assert scope.status()["state"] == "finished"
    assert scope.scalars("linearisation_error")[0].tolist() == STEPS
    assert scope.array("output", 8).shape == (1, 16, 2)
    step, tensors = ul.Run(runs / "fit").last_checkpoint() or (0, {})
    assert step == 4
    assert all(np.isfinite(tensor).all() for tensor in tensors.values())


def test_they_are_judged_and_drawn(runs: Path) -> None:
    verdict = ul.judge(ul.Run(runs / "scope"))
    assert verdict.label in ("lazy", "mixed", "rich", "cannot tell")
    (rests_on,) = [one for one in verdict.evidence if one.measure == "linearisation_error"]
    assert rests_on.value == pytest.approx(ul.Run(runs / "scope").scalars("linearisation_error")[1][-1, 0], rel=0.1)
    assert History.from_run(ul.Run(runs / "scope")).steps == STEPS
    ul.Run(runs / "fit").plot()
    answer = CliRunner().invoke(app, ["runs", str(runs)])
    assert answer.exit_code == 0, answer.output
    assert answer.output.count("finished") == 2
    page = runs / "page.html"
    assert CliRunner().invoke(app, ["report", str(runs / "scope"), "-o", str(page)]).exit_code == 0
    assert page.stat().st_size > 1000


def test_a_scope_goes_on_where_the_old_one_ended(runs: Path) -> None:
    net, x, y = old_network()
    optimiser = torch.optim.SGD(net.parameters(), 0.5)
    for _ in range(8):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    scope = ul.Scope(net, (x, y), runs / "scope", budget=float("inf"))
    optimiser.step()
    scope.step(9)
    scope.finish()
    assert ul.Run(runs / "scope").scalars("loss")[0].tolist() == [*STEPS, 9]
