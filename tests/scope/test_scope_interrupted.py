"""Ctrl-C inside a scope: the run is interrupted, not failed, keeps its verdict, and resumes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unlazy import Run, Scope
from unlazy.cli.runs import run_row
from unlazy.scope import session as sessions
from unlazy.scope.session import Session

ALWAYS = float("inf")
X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 2


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def train(net: nn.Module, scope: Scope, steps: range) -> None:
    for step in steps:
        update(net)
        scope.step(step)


def update(net: nn.Module) -> None:
    net.zero_grad()
    F.cross_entropy(net(X), Y).backward()
    with torch.no_grad():
        for p in net.parameters():
            p.sub_(0.5 * p.grad)


def verdict_of(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "verdict.json").read_bytes())
    return found


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_keeps_the_verdict_and_measures_the_last_step(tmp_path: Path, stop: type[BaseException]) -> None:
    net, seldom = network(), 1e-9
    scope = Scope(net, (X, Y), tmp_path, budget=seldom, strict=True)
    scope._session.budget.grace = 0.0  # type: ignore[union-attr]
    with pytest.raises(stop), scope:
        train(net, scope, range(1, 31))
        raise stop
    run = Run(tmp_path)
    assert run.status() == {"state": "interrupted", "step": 30, "error": stop.__name__}
    assert run.lines[-1].step == 30
    assert F.cross_entropy(net(X), Y).item() == pytest.approx(run.scalars("loss")[1][-1, 0], rel=1e-5)
    assert verdict_of(tmp_path)["label"] == scope.verdict().label
    assert run_row(run)["state"] == "interrupted"


def test_a_step_that_was_cut_in_two_is_not_measured(tmp_path: Path) -> None:
    net = network()
    scope = Scope(net, (X, Y), tmp_path, budget=1e-9, strict=True)
    scope._session.budget.grace = 0.0  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt), scope:
        train(net, scope, range(1, 31))
        with torch.no_grad():
            next(net.parameters()).add_(100.0)  # the first half of an update
        raise KeyboardInterrupt
    run = Run(tmp_path)
    assert run.lines[-1].step < 30
    assert run.scalars("parameter_motion")[1].max() < 10
    assert run.status()["state"] == "interrupted"
    assert (tmp_path / "verdict.json").exists()


@pytest.fixture
def usual_interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, whatever a framework has set before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_interrupts")
def test_a_real_signal_in_the_middle_of_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    measure = Session._write
    with pytest.raises(KeyboardInterrupt), Scope(net, (X, Y), tmp_path, budget=ALWAYS, strict=True) as scope:
        train(net, scope, range(1, 5))

        def interrupted(*arguments: object, **more: object) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            measure(*arguments, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(Session, "_write", interrupted)
        train(net, scope, range(5, 9))
    run = Run(tmp_path)
    assert run.status()["state"] == "interrupted"
    assert [line.step for line in run.lines if "loss" in line.scalars] == [0, 1, 2, 3, 4]
    assert verdict_of(tmp_path)["label"] in ("lazy", "mixed", "rich", "cannot tell")


def test_an_interrupted_run_resumes_and_finishes(tmp_path: Path) -> None:
    net = network()
    with pytest.raises(KeyboardInterrupt), Scope(net, (X, Y), tmp_path, budget=ALWAYS, strict=True) as scope:
        train(net, scope, range(1, 6))
        raise KeyboardInterrupt
    with Scope(net, (X, Y), tmp_path, budget=ALWAYS, strict=True) as scope:
        train(net, scope, range(6, 10))
    run = Run(tmp_path)
    assert run.status()["state"] == "finished"
    steps = list(run.scalars("loss")[0])
    assert steps[:6] == list(range(6))
    assert steps[-1] == 9


def test_a_twin_trained_after_ctrl_c_leaves_the_run_interrupted(tmp_path: Path) -> None:
    net = network()
    with pytest.raises(KeyboardInterrupt), Scope(net, (X, Y), tmp_path, budget=ALWAYS, strict=True) as scope:
        train(net, scope, range(1, 6))
        raise KeyboardInterrupt
    scope.twin(lambda p: torch.optim.SGD(p, 0.5), F.cross_entropy, batches=[(X, Y)] * 5, say=lambda _: None)
    assert Run(tmp_path).status()["state"] == "interrupted"
    assert verdict_of(tmp_path)["twin"] is not None


def test_a_run_has_its_verdict_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    monkeypatch.setattr(sessions, "VERDICT_SECONDS", 0.0)
    with Scope(net, (X, Y), tmp_path, budget=ALWAYS, strict=True) as scope:
        train(net, scope, range(1, 6))
        assert Run(tmp_path).status()["state"] == "running"
        early = verdict_of(tmp_path)
        assert early["label"] == scope.verdict().label
        train(net, scope, range(6, 60))
    assert verdict_of(tmp_path)["gap"] != early["gap"]


def test_a_short_training_is_judged_at_its_end_alone(tmp_path: Path) -> None:
    net = network()
    with Scope(net, (X, Y), tmp_path, budget=ALWAYS, strict=True) as scope:
        train(net, scope, range(1, 6))
        assert not (tmp_path / "verdict.json").exists()
    assert (tmp_path / "verdict.json").exists()


def test_a_session_that_python_ends_with_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unlazy.scope import scope as module

    net = network()
    scope = Scope(net, (X, Y), tmp_path, budget=ALWAYS, strict=True)
    train(net, scope, range(1, 4))
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt(), raising=False)
    monkeypatch.delattr(sys, "ps1", raising=False)
    monkeypatch.setattr(module, "_python_is_ending", type("Set", (), {"is_set": staticmethod(lambda: True)}))
    module._finish_session(scope._session)  # type: ignore[arg-type]
    assert Run(tmp_path).status()["state"] == "interrupted"
