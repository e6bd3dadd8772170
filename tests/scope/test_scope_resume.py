"""A scope's run folder: killed, resumed, taken over, forgotten."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import scope_nets
from repository import ROOT, SUPPORT
from scope_nets import loop
from unlazy import Run, Scope
from unlazy.scope import run_folder as run_folders
from unlazy.scope.history import History

ALWAYS = float("inf")


SCRIPT = """
import sys, time
sys.path[:0] = [{tests!r}]
import torch, scope_nets
import torch.nn.functional as F
from unlazy import Scope
torch.set_num_threads(1)
net, x, y = scope_nets.build("mlp")
net.eval()
optimiser = torch.optim.SGD(net.parameters(), 0.1)
scope = Scope(net, (x, y), sys.argv[1], budget=float("inf"), strict=True)
print("begun", flush=True)
for step in range(1, int(sys.argv[2]) + 1):
    optimiser.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimiser.step()
    scope.step(step)
    print(step, len(scope.history.steps), flush=True)
{end}
"""


def process(folder: Path, steps: int, end: str = "") -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    code = SCRIPT.format(tests=str(SUPPORT), end=end)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder), str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def kill_at(folder: Path, step: int, delay: float) -> int:
    """Kill a training a moment after it has told of a step; how many measurements it had told of."""
    running = process(folder, 100_000)
    assert running.stdout is not None
    for line in running.stdout:
        if line.split()[0] == str(step):
            told_of = int(line.split()[1])
            break
    time.sleep(delay)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    return told_of


def check_whole(folder: Path, at_least: int) -> Run:
    run = Run(folder)
    assert run.status()["state"] == "interrupted"
    assert len({line.step for line in run.lines}) >= at_least
    for line in run.lines:
        for name in line.arrays:
            assert run.array(name, line.step).shape[0] == 1
    assert History.from_run(run).first("tangent_distance") == pytest.approx(0, abs=1e-12)
    return run


def test_a_killed_run_shows_everything_up_to_its_last_measurement(tmp_path: Path) -> None:
    told_of = kill_at(tmp_path / "run", 9, 0.013)
    assert told_of > 5
    check_whole(tmp_path / "run", told_of)


@pytest.mark.slow
def test_a_run_killed_again_and_again_loses_nothing(tmp_path: Path) -> None:
    seen: list[int] = []
    for step, delay in ((3, 0.0), (8, 0.002), (14, 0.005), (20, 0.02), (27, 0.001)):
        kill_at(tmp_path / "run", step, delay)
        steps = [line.step for line in check_whole(tmp_path / "run", len(seen)).lines]
        assert steps[: len(seen)] == seen
        assert steps == sorted(set(steps))
        seen = steps
    assert seen[-1] >= 20


def test_a_scope_goes_on_where_a_killed_one_stopped(tmp_path: Path) -> None:
    """Distances still refer to the start of training, steps are not repeated, nothing already seen is lost."""
    net, x, y = scope_nets.build("mlp")
    net.eval()
    whole = Scope(net, (x, y), tmp_path / "whole", budget=ALWAYS, strict=True)
    loop(net, x, y, whole, range(1, 13))
    whole.finish()

    net, x, y = scope_nets.build("mlp")
    net.eval()
    first = Scope(net, (x, y), tmp_path / "run", budget=ALWAYS, strict=True)
    loop(net, x, y, first, range(1, 6))
    first._session.scope_writer.__exit__(None, None, None)  # the lock is freed as by a kill; nothing is finished
    first._session.finished = True
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "scal')
    before = Run(tmp_path / "run").lines
    second = Scope(net, (x, y), tmp_path / "run", budget=ALWAYS, strict=True)
    second.step(4)
    second.step(5)
    loop(net, x, y, second, range(6, 13))
    second.finish()
    run, reference = Run(tmp_path / "run"), Run(tmp_path / "whole")
    assert [line.step for line in run.lines[: len(before)]] == [line.step for line in before]
    steps = [line.step for line in run.lines]
    assert len(set(steps)) == len(steps)
    assert steps[-1] == 12
    for name in (
        "tangent_distance",
        "overlap_distance",
        "parameter_motion",
        "linearisation_error",
        "gate_flips",
        "loss",
    ):
        (_, mine), (_, expected) = run.scalars(name), reference.scalars(name)
        assert mine[-1, 0] == pytest.approx(expected[-1, 0], rel=1e-4, abs=1e-7), name
        assert expected[-1, 0] > 1e-4
    assert run.status()["state"] == "finished"


def test_a_finished_run_can_be_continued(mlp, tmp_path: Path) -> None:
    net, x, y = mlp
    for steps in (range(1, 4), range(4, 7)):
        with Scope(net, (x, y), tmp_path / "run", budget=ALWAYS, strict=True) as scope:
            loop(net, x, y, scope, steps)
    assert list(scope.history.scalars["loss"]) == [0, 1, 2, 3, 4, 5, 6]
    assert Run(tmp_path / "run").status() == {"state": "finished", "step": 6, "error": None}


def test_a_start_too_large_to_keep_leaves_its_measures_out(mlp, tmp_path: Path, monkeypatch) -> None:
    net, x, y = mlp
    monkeypatch.setattr(run_folders, "START_BYTES", 10)
    Scope(net, (x, y), tmp_path / "run", strict=True).finish()
    scope = Scope(net, (x, y), tmp_path / "run", budget=ALWAYS, strict=True)
    loop(net, x, y, scope, range(1, 3))
    assert "too large to keep" in scope.history.left_out["parameter_motion"]
    assert scope.history.last("tangent_distance") > 0
    assert list(scope.history.scalars["parameter_motion"]) == [0]


def test_a_second_scope_on_an_open_folder_takes_it_over(mlp, tmp_path: Path) -> None:
    """As when a cell of a notebook is run again."""
    net, x, y = mlp
    first = Scope(net, (x, y), tmp_path / "run", budget=ALWAYS, strict=True)
    loop(net, x, y, first, range(1, 4))
    second = Scope(net, (x, y), tmp_path / "run", budget=ALWAYS, strict=True)
    loop(net, x, y, second, range(4, 6))
    second.finish()
    assert list(Run(tmp_path / "run").scalars("loss")[0]) == [0, 1, 2, 3, 4, 5]


def test_a_scope_nobody_holds_finishes_itself(mlp, tmp_path: Path) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), tmp_path / "run", budget=1e-9, strict=True)
    scope._session.budget.grace = 0.0
    loop(net, x, y, scope, range(1, 20))
    del scope
    gc.collect()
    run = Run(tmp_path / "run")
    assert run.status()["state"] == "finished"
    assert run.lines[-1].step == 19


@pytest.mark.parametrize(
    ("end", "state", "code"),
    [
        ("", "finished", 0),
        ("raise SystemError('mine')", "failed", 1),
        ("raise KeyboardInterrupt", "interrupted", None),  # its exit code depends on the version of Python
    ],
)
def test_python_may_end_without_a_word(tmp_path: Path, end: str, state: str, code: int | None) -> None:
    running = process(tmp_path / "run", 3, end)
    running.communicate(timeout=120)
    assert running.returncode == code if code is not None else running.returncode != 0
    run = Run(tmp_path / "run")
    assert run.status()["state"] == state
    assert run.lines[-1].step == 3
    if state == "failed":
        assert "mine" in run.status()["error"]
