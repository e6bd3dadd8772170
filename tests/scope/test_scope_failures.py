"""The scope never gets in the way of training: errors, full disks, broken sinks, and what it says of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scope_nets
from scope_nets import loop, told
from unlazy import InputError, Run, Scope

ALWAYS = float("inf")


def test_a_scope_that_fails_says_so_once_and_goes_silent(mlp, tmp_path: Path) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), tmp_path / "run", budget=ALWAYS)
    net[6] = nn.Linear(10, 5).double()  # surgery: nothing compares any more
    with pytest.warns(UserWarning, match="training goes on. InputError: parameters were replaced") as caught:
        told(scope, range(1, 6))
    assert len(caught) == 1
    assert Run(tmp_path / "run").status()["state"] == "failed"
    scope.finish()
    assert "Error" in repr(scope)


def test_a_strict_scope_raises(mlp) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    net[6] = nn.Linear(10, 5).double()
    with pytest.raises(InputError, match="parameters were replaced or removed since the scope was made"):
        scope.step(1)
    with pytest.raises(InputError, match="number of updates"):
        scope.step(-1)


def test_a_full_disk_does_not_end_training(mlp, tmp_path: Path, monkeypatch) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), tmp_path / "run", budget=ALWAYS)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unlazy.store._write_all", full)
    with pytest.warns(UserWarning, match="No space left"):
        loop(net, x, y, scope, range(1, 4))
    monkeypatch.undo()
    assert [line.step for line in Run(tmp_path / "run").lines] == [0]


def test_numbers_that_are_none_are_recorded_as_such(mlp, tmp_path: Path) -> None:
    net, x, y = mlp
    with Scope(net, (x, y), tmp_path / "run", budget=ALWAYS, strict=True) as scope:
        scope.step(1)
        with torch.no_grad():
            net[0].weight[0, 0] = float("nan")
        scope.step(2, batch_loss=float("nan"))
    last = Run(tmp_path / "run").lines[-1]
    assert last.step == 2
    assert last.scalars["loss"] == [None]
    assert last.scalars["batch_loss"] == [None]
    assert "tangent_distance" not in last.scalars
    assert math.isnan(scope.history.last("loss") or 0.0)


def test_an_exception_in_the_loop_passes_and_closes_the_run(mlp, tmp_path: Path) -> None:
    net, x, y = mlp
    with pytest.raises(KeyError), Scope(net, (x, y), tmp_path / "run", budget=ALWAYS) as scope:
        loop(net, x, y, scope, range(1, 4))
        raise KeyError("mine")
    run = Run(tmp_path / "run")
    assert run.status()["state"] == "failed"
    assert "mine" in run.status()["error"]
    assert run.lines[-1].step == 3


def test_sinks_get_every_number_and_a_broken_one_is_dropped(mlp) -> None:
    net, x, y = mlp

    class Sink:
        def __init__(self) -> None:
            self.rows: list[tuple[int, dict[str, float]]] = []
            self.closed = 0

        def write(self, step: int, scalars: dict[str, float]) -> None:
            self.rows.append((step, scalars))

        def close(self) -> None:
            self.closed += 1

    def broken(step: int, scalars: dict[str, float]) -> None:
        if step == 1:
            raise ConnectionError("gone")

    sink, plain = Sink(), []
    scope = Scope(
        net, (x, y), budget=ALWAYS, sinks=[sink, broken, lambda step, scalars: plain.append(step)], strict=True
    )
    with pytest.warns(UserWarning, match="gets nothing more") as caught:
        told(scope, range(1, 3), batch_loss=2.0)
    assert len(caught) == 1
    scope.finish()
    scope.finish()
    assert [step for step, _ in sink.rows] == plain == [0, 1, 2]
    assert sink.rows[1][1]["batch_loss"] == 2.0
    assert {"loss", "tangent_distance"} <= sink.rows[1][1].keys()
    assert sink.closed == 1


def test_the_report_says_what_looking_cost_in_plain_words(mlp) -> None:
    """A short training spends within the time that is always allowed; a share of next to nothing would say nothing."""
    net, x, y = mlp
    scope = Scope(net, (x, y), strict=True)
    loop(net, x, y, scope, range(1, 30))
    scope.finish()
    session = scope._session
    session.budget.spent, session.training_seconds = 0.1, 0.05
    assert "Measuring took 0.10 s beside 0.05 s of training (up to 0.11 s in all is always allowed)" in scope.report()
    session.training_seconds = 10.0
    assert "Measuring took 0.10 s beside 10.00 s of training (up to one second in all is always" in scope.report()
    assert "%" not in scope.report()
    session.budget.spent, session.training_seconds = 3.0, 100.0
    assert "Measuring took 3.00 s beside 100.00 s of training, 3.0 % of it" in scope.report()
    reasons = scope.verdict().reasons
    assert all(reason in scope.report() for reason in reasons)


def test_report_and_notebook_view(mlp) -> None:
    net, x, y = scope_nets.build("gelu")
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    loop(net, x, y, scope, range(1, 4))
    text = scope.report()
    assert "steps 0 to 3, 4 measurements" in text
    assert "tangent_distance" in text
    assert "no gate_flips" in text
    assert "gelu has no hard gate" in text
    assert text.startswith(f"Verdict: {scope.verdict().label}. ")
    assert scope._repr_html_().count("do not decide") == 1
    assert "of training" in text


def test_a_verdict_rests_on_the_last_step_and_is_written_at_the_end(mlp, tmp_path: Path) -> None:
    net, x, y = mlp
    with Scope(net, (x, y), tmp_path / "run", budget=1e-9, strict=True) as scope:
        scope._session.budget.grace = 0.0
        loop(net, x, y, scope, range(1, 8))
        assert scope.history.steps == [0]
        early = scope.verdict().to_dict()
        assert scope.history.steps == [0, 7]
        loop(net, x, y, scope, range(8, 12))
    written = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert written == json.loads(json.dumps(scope.verdict().to_dict())) != early
    assert written["label"] in ("lazy", "rich", "mixed", "cannot tell")
    assert "<" in scope._repr_html_()
