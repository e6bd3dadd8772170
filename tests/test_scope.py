"""The scope around a training loop: what it keeps, when it looks, what it costs, and that it never gets in the way."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scope_nets
from unlazy import InputError, Run, Scope, StoreError, build_stack, kernel_distance, tangent_kernel
from unlazy.data.dataset import Dataset
from unlazy.models.spec import relu_spec
from unlazy.scope import session as sessions
from unlazy.scope.history import History
from unlazy.scope.schedule import UNSEEN, Budget, Paced, Planner
from unlazy.store import Writer

HERE = Path(__file__).parent
ALWAYS = float("inf")


def loop(net: nn.Module, x: Any, y: Tensor, scope: Scope | None, steps: range, pause: float = 0.0) -> None:
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for step in steps:
        optimiser.zero_grad()
        loss = F.cross_entropy(scope_nets.scores(scope_nets.called(net, x)), y)
        loss.backward()
        optimiser.step()
        time.sleep(pause)
        if scope is not None:
            scope.step(step, batch_loss=loss)


def told(scope: Scope, steps: range, **scalars: float) -> None:
    for step in steps:
        scope.step(step, **scalars)


@pytest.fixture
def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    return scope_nets.build("mlp")


# --- what is kept --------------------------------------------------------------------------------------------


def test_a_run_holds_what_the_contract_says(mlp, tmp_path: Path) -> None:
    net, x, y = mlp
    with Scope(net, (x, y), tmp_path / "run", budget=ALWAYS, strict=True) as scope:
        loop(net, x, y, scope, range(1, 11))
    run = Run(tmp_path / "run")
    assert run.header["kind"] == "scope"
    assert run.status() == {"state": "finished", "step": 10, "error": None}
    about = run.header["recipe"]["scope"]
    assert about["views"] == ["paths", "tangents", "neurons"]
    assert about["layers"] == ["0", "3", "6"]
    assert about["groups"]["1"] == list(range(1, 30, 3))
    assert about["left_out"] == {}
    assert (about["probe_kind"], about["image_shape"], about["budget"]) == ("vectors", None, None)
    every = {"loss", "accuracy", "parameter_motion", "linearisation_error", "gate_flips", "paths", "agop_correlation"}
    for kernel in ("tangent", "overlap"):
        every |= {f"{kernel}_distance", f"{kernel}_velocity", f"{kernel}_alignment", f"{kernel}_rank"}
    every |= {
        "tangent_change",
        "overhead",
        "batch_loss",
        "loss_0",
        "paths_1",
        "tangent_mass_2",
        "alignment_0",
        "alignment@3",
    }
    last = run.lines[-1]
    assert last.step == 10
    assert every <= last.scalars.keys()
    shapes = {name: run.array(name, 10).shape for name in last.arrays}
    assert shapes["tangent"] == shapes["overlap"] == (1, 30, 30)
    assert shapes["output"] == shapes["linear"] == (1, 30, 3)
    assert (shapes["paths"], shapes["neurons"], shapes["neuron_norms"]) == ((1, 30), (1, 12, 5), (1, 12))
    assert np.array_equal(run.array("probe_x", 0)[0], x.float().numpy())
    assert run.array("probe_y", 0)[0].tolist() == y.tolist()
    assert run.array_steps("probe_x") == [0]
    now = tangent_kernel(net.eval(), x)
    assert np.allclose(run.array("tangent", 10)[0], now.numpy(), rtol=1e-5)
    distance = kernel_distance(now, torch.from_numpy(run.array("tangent", 0)[0]).double())
    assert run.scalars("tangent_distance")[1][-1, 0] == pytest.approx(float(distance), abs=1e-9)
    again = History.of_run(run)
    assert again.scalars.keys() == scope.history.scalars.keys()
    assert again.last("loss") == scope.history.last("loss")


def test_memory_only_keeps_every_array(mlp) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    loop(net, x, y, scope, range(1, 5))
    assert list(scope.history.arrays["tangent"]) == [0, 1, 2, 3, 4]
    assert scope.history.array("tangent", first=True) is scope.history.arrays["tangent"][0]


def test_steps_before_and_after_the_update(mlp, tmp_path: Path) -> None:
    """Loops that tell before their update, after it counting from 1, and after it counting from 0 all mean the same."""
    states = {}
    for style in ("before", "from one", "from zero"):
        net, x, y = scope_nets.build("mlp")
        net.eval()
        scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
        optimiser = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(4):
            if style == "before":
                scope.step(step, note=step)
            optimiser.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimiser.step()
            if style != "before":
                scope.step(step + (style == "from one"), note=step)
        states[style] = scope.history.scalars["loss"]
        steps = [0, 1, 2, 3] if style == "before" else [0, 1, 2, 3, 4]
        assert list(states[style]) == steps, style
        assert list(scope.history.scalars["note"]) == (steps if style == "before" else steps[1:])
    assert states["from one"] == states["from zero"]
    assert states["from one"] | states["before"] == states["from one"]


def test_the_users_numbers_stand_beside_the_scopes(mlp) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    scope.step(1, loss=torch.tensor(7.0, requires_grad=True), rate=3)
    assert scope.history.last("train_loss") == 7.0
    assert scope.history.last("rate") == 3.0
    assert scope.history.last("loss") != 7.0


def test_first_and_last_step_are_always_measured(mlp, tmp_path: Path) -> None:
    net, x, y = mlp
    with Scope(net, (x, y), tmp_path / "run", budget=1e-9, strict=True) as scope:
        scope._session.budget.grace = 0.0
        loop(net, x, y, scope, range(1, 30))
    assert list(scope.history.scalars["tangent_distance"]) == [0, 29]
    assert [line.step for line in Run(tmp_path / "run").lines] == [0, 29]
    assert scope.overhead()["skipped"] >= 1


def test_views_are_chosen(mlp) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), views=("neurons",), strict=True)
    assert {"neurons", "loss"} <= scope.history.arrays.keys() | scope.history.scalars.keys()
    assert not any("tangent" in name or "paths" in name for name in scope.history.scalars)
    with pytest.raises(InputError, match="views are among"):
        Scope(net, (x, y), views=("dreams",))


def test_a_data_set_brings_its_groups(tmp_path: Path) -> None:
    x = torch.randn(12, 2)
    data = Dataset("halves", x, x[:, :1], groups={"left": x[:, 0] < 0, "right": x[:, 0] >= 0})
    scope = Scope(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), data, tmp_path / "run", strict=True)
    assert {"loss_left", "paths_right", "tangent_mass_left"} <= scope.history.scalars.keys()
    assert Run(tmp_path / "run").header["recipe"]["scope"]["probe_kind"] == "points2d"


# --- clear words at construction -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda net, x, y: Scope(net, (x, y), budget=0.0), "budget must be a positive share"),
        (lambda net, x, y: Scope(net.requires_grad_(False), (x, y)), "no trainable parameters"),
        (lambda net, x, y: Scope(nn.LazyLinear(3), (x, y)), "call the model once"),
        (lambda net, x, y: Scope(nn.LSTM(5, 3), (x[:, None], y)), "say which tensor counts|one row of scores"),
        (lambda net, x, y: Scope(net, (x, y), measures=[]), "run folder"),
        (lambda net, x, y: Scope(build_stack(relu_spec(5, 3, width=4, depth=1), [0, 1]), (x, y)), "stack"),
        (lambda net, x, y: Scope(net, (x, y), output=lambda out: 3), "must return a tensor"),
        (lambda net, x, y: Scope(net, (x, y), output=lambda out: out.argmax(1)), "real numbers"),
        (lambda net, x, y: Scope(net, (x, y), output=lambda out: out.mean(0)), "one row per sample"),
    ],
)
def test_what_cannot_be_watched_is_refused_before_training(mlp, make, says: str) -> None:
    net, x, y = mlp
    with pytest.raises(InputError, match=says):
        make(net, x, y)


def test_a_folder_of_another_scope_is_refused(mlp, tmp_path: Path) -> None:
    net, x, y = mlp
    Scope(net, (x, y), tmp_path / "run", strict=True).finish()
    with pytest.raises(StoreError, match="another model, probe set or choice of views"):
        Scope(net, (x[:20], y[:20]), tmp_path / "run")
    with pytest.raises(StoreError, match="not a run and not empty"):
        Scope(net, (x, y), HERE)


def test_a_probe_in_another_precision_is_brought_to_the_model(mlp) -> None:
    net, x, y = mlp
    scope = Scope(net, (x.float(), y), strict=True)
    assert scope.history.array("output").dtype == np.float64


def test_a_model_that_moves_is_followed(mlp) -> None:
    """Another precision stands for another device, which not every machine has."""
    net, x, y = mlp
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    loop(net, x, y, scope, range(1, 3))
    net.float()
    scope.step(3)
    assert list(scope.history.scalars["linearisation_error"]) == [0, 1, 2, 3]
    assert scope.history.array("output").dtype == np.float32
    assert scope.history.last("tangent_distance") == pytest.approx(
        scope.history.scalars["tangent_distance"][2], abs=1e-4
    )


# --- never in the way ----------------------------------------------------------------------------------------


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
    with pytest.raises(InputError, match="parameters were replaced since the scope was made"):
        scope.step(1)
    with pytest.raises(InputError, match="number of updates"):
        scope.step(-1)


def test_a_full_disk_does_not_end_training(mlp, tmp_path: Path, monkeypatch) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), tmp_path / "run", budget=ALWAYS)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unlazy.store._put", full)
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


def test_report_and_notebook_view(mlp) -> None:
    net, x, y = scope_nets.build("gelu")
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    loop(net, x, y, scope, range(1, 4))
    text = scope.report()
    assert "steps 0 to 3, 4 measurements" in text
    assert "tangent_distance" in text
    assert "no gate_flips" in text
    assert "gelu has no hard gate" in text
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


# --- time ----------------------------------------------------------------------------------------------------


def test_gaps_follow_change() -> None:
    def seen(change: float, last: int = 4000) -> list[int]:
        pace, steps = Paced(), []
        for step in range(last):
            if pace.due(step):
                steps.append(step)
                pace.measured(step, change)
        return steps

    calm, lively, steady = seen(0.0), seen(1.0), seen(0.05)
    assert calm[:6] == lively[:6] == [0, 1, 2, 3, 4, 5]
    assert len(calm) < len(steady) < len(lively)
    assert all(b <= 2 * max(a, 1) + 1 for a, b in itertools.pairwise(calm))  # at least one an octave


@pytest.mark.parametrize("cost", [0.001, 0.05, 0.5, 3.0])
@pytest.mark.parametrize("second_per_step", [0.001, 0.1])
def test_the_planner_keeps_the_budget_at_every_moment(cost: float, second_per_step: float) -> None:
    """A simulated training: what was spent never exceeds what is allowed, and the last measurement still fits."""
    budget = Budget(0.05, grace=1.0, costs={"cheap": cost / 50, "dear": cost, "writing": cost / 100})
    planner = Planner(budget, frozenset({"cheap"}))
    planner.measured(0, ["cheap", "dear"], 1.0)
    whole, full = budget.predict(["cheap", "dear", "writing"]), 0
    trained = 0.0
    for step in range(1, round(200 / second_per_step)):
        trained += second_per_step
        names = planner.due(step, ["cheap", "dear"], trained)
        if names:
            budget.spent += budget.predict([*names, "writing"])
            full += "dear" in names
            planner.measured(step, names, 0.5)
        assert budget.spent + min(whole, 1.0) <= max(1.0, 0.05 * trained) + 1e-9
    possible = int(UNSEEN * 10 / whole)
    assert full >= min(12, possible - 1)
    if full > 12:
        assert budget.spent > 0.5 * 10 or cost < 0.01  # what there was to spend was spent, unless nothing was due


def test_known_steps_allow_an_earlier_look() -> None:
    budget = Budget(0.05, grace=0.0, costs={"dear": 1.0})
    assert not budget.affords(["dear"], 10.0, kept_back=1.0)
    assert budget.affords(["dear"], 10.0, kept_back=1.0, to_come=100.0)


def test_it_says_what_looking_cost(mlp) -> None:
    net, x, y = mlp
    with Scope(net, (x, y), budget=0.05, strict=True) as scope:
        loop(net, x, y, scope, range(1, 126), pause=0.002)
    cost = scope.overhead()
    assert cost["seconds_training"] > 125 * 0.002
    assert cost["seconds_measuring"] > 0
    assert cost["share"] == pytest.approx(cost["seconds_measuring"] / cost["seconds_training"])
    assert cost["seconds_at_construction"] > 0
    assert cost["measurements"] == len(scope.history.scalars["loss"]) >= 3
    assert scope.history.steps[-1] == 125


def test_paused_time_is_no_training_time(mlp) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), strict=True)
    began = time.perf_counter()
    with scope.paused():
        time.sleep(0.2)
    scope.step(1)
    assert scope.overhead()["seconds_training"] <= time.perf_counter() - began - 0.2


def test_nothing_is_looked_at_when_nothing_is_due(mlp, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), budget=1e-9, strict=True)
    scope._session.budget.grace = 0.0
    scope.step(1)
    seen = len(scope.history.steps)
    monkeypatch.setattr(net, "forward", lambda *_: pytest.fail("the network was called"))
    for step in range(2, 2002):
        scope.step(step, loss=0.0)
    assert len(scope.history.steps) == seen
    monkeypatch.undo()


# --- the store: killed, resumed, forgotten -------------------------------------------------------------------

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
    environment = os.environ | {"PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": "1"}
    code = SCRIPT.format(tests=str(HERE), end=end)
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
    assert History.of_run(run).first("tangent_distance") == pytest.approx(0, abs=1e-12)
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
    first._session.keeper.__exit__(None, None, None)  # the lock is freed as by a kill; nothing is finished
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
    monkeypatch.setattr(sessions, "START_BYTES", 10)
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


@pytest.mark.parametrize(("end", "state", "code"), [("", "finished", 0), ("raise SystemError('mine')", "failed", 1)])
def test_python_may_end_without_a_word(tmp_path: Path, end: str, state: str, code: int) -> None:
    running = process(tmp_path / "run", 3, end)
    running.communicate(timeout=120)
    assert running.returncode == code
    run = Run(tmp_path / "run")
    assert run.status()["state"] == state
    assert run.lines[-1].step == 3
    if state == "failed":
        assert "mine" in run.status()["error"]


def test_named_measures_write_to_the_writer_of_a_training(mlp, tmp_path: Path) -> None:
    net, x, y = mlp
    with pytest.raises(InputError, match="give its Writer"):
        Scope(net, (x, y.double()), tmp_path / "a", measures=[])
    header = {
        "kind": "train",
        "study": None,
        "scale": None,
        "recipe": {},
        "members": [{}],
        "provenance": {"started": ""},
    }
    with Writer(tmp_path / "b", header) as writer, pytest.raises(InputError, match="give a folder"):
        Scope(net, (x, y), writer)
