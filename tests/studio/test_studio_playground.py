"""The playground: settings with limits, frames slow enough to watch, one child at a time that never outlives its server."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unlazy import Run
from unlazy.runtime import InputError
from unlazy.studio import playground_child
from unlazy.studio.api import StudioApi
from unlazy.studio.playground import MOST_RUNS, Playground
from unlazy.studio.playground_child import (
    DATA,
    MODELS,
    PlaySettings,
    is_frame_step,
    make_data,
    make_spec,
    output_grid,
    train,
)
from unlazy.studio.run_index import PLAYGROUND, RunIndex


def gone(pid: int, seconds: float = 10) -> bool:
    """Whether a process has ended within a while."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("data", DATA)
def test_every_choice_trains_into_a_run_the_page_can_show(tmp_path, monkeypatch, model, data):
    monkeypatch.setattr(playground_child, "FRAMES_PER_SECOND", 10**6)
    folder = tmp_path / "run"
    train(PlaySettings(model=model, data=data, width=4, depth=2), folder, steps=6)
    run = Run(folder)
    assert run.status()["state"] == "finished"
    assert run.array_steps("grid_output") == list(range(7))
    assert run.array("grid_output", 6).shape == (1, 48 * 48)
    facts = json.loads(StudioApi(RunIndex(tmp_path)).answer(["run", "run"], {}).body)
    assert facts["probe"]["kind"] == ("circle" if data == "circle" else "points2d")
    assert facts["problems"] == []
    assert ("normals" in facts["arrays"]) == (model != "relu")
    assert facts["steps_per_epoch"] == 8
    assert sorted(place for group in facts["probe"]["groups"].values() for place in group) == list(range(240))
    if data != "circle":
        assert sorted(set(facts["probe"]["labels"])) == [0, 1]


def test_training_lowers_the_loss_and_is_the_same_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(playground_child, "FRAMES_PER_SECOND", 10**6)
    losses = []
    for name in ("a", "b"):
        train(PlaySettings(width=8, depth=2, learning_rate=0.03), tmp_path / name, steps=90)
        losses.append(Run(tmp_path / name).scalars("loss")[1][:, 0])
    assert np.array_equal(*losses)
    assert losses[0][-1] < 0.7 * losses[0][0]


def test_the_picture_is_the_network_on_a_grid(tmp_path, monkeypatch):
    monkeypatch.setattr(playground_child, "FRAMES_PER_SECOND", 10**6)
    play = PlaySettings(width=3, depth=1, seed=5)
    train(play, tmp_path / "run", steps=1)
    from unlazy import build

    net = build(make_spec(play), seed=5)
    points = output_grid()
    with torch.no_grad():
        wanted = torch.stack([net(point[None])[0, 0] for point in points[::97]])
    assert np.allclose(Run(tmp_path / "run").array("grid_output", 0)[0, ::97], wanted.numpy(), atol=1e-6)
    assert points[0].tolist() == [-1.5, -1.5]
    assert points[47].tolist() == [1.5, -1.5]


def test_frames_come_no_faster_than_the_eye(tmp_path):
    start = time.monotonic()
    train(PlaySettings(width=2, depth=1), tmp_path / "run", steps=9)
    assert time.monotonic() - start >= 9 / playground_child.FRAMES_PER_SECOND


def test_time_ends_a_training(tmp_path, monkeypatch):
    monkeypatch.setattr(playground_child, "FRAMES_PER_SECOND", 10**6)
    train(PlaySettings(width=2, depth=1), tmp_path / "run", seconds=0.2)
    run = Run(tmp_path / "run")
    assert run.status()["state"] == "finished"
    assert run.lines[-1].step < playground_child.STEPS


@given(step=st.integers(0, 20_000))
def test_frames_thin_out_but_never_far(step):
    ahead = next(later for later in range(step + 1, step + 200) if is_frame_step(later))
    assert ahead - step <= 100
    assert step > 50 or is_frame_step(step)


def test_points_are_where_they_should_be():
    for data in DATA:
        made = make_data(PlaySettings(data=data))
        assert len(made) == 240
        assert made.x.abs().max() < 1.5
        assert sum(int(inside.sum()) for inside in made.groups.values()) == 240
    xor = make_data(PlaySettings(data="xor"))
    assert (torch.sign(xor.x[:, 0] * xor.x[:, 1]) == xor.y[:, 0]).float().mean() > 0.95
    moons = make_data(PlaySettings(data="moons", seed=1))
    assert not torch.equal(moons.x, make_data(PlaySettings(data="moons", seed=2)).x)


@pytest.mark.parametrize(
    "bad",
    [
        {"width": 0},
        {"width": 65},
        {"width": 2.0},
        {"depth": 9},
        {"beta": float("inf")},
        {"learning_rate": 0},
        {"frequencies": [1, 2, 3]},
        {"frequencies": [1, 99]},
        {"gate": "open"},
        {"seed": True},
    ],
)
def test_settings_have_limits(bad):
    with pytest.raises(InputError, match=next(iter(bad)).rstrip("ies")):
        PlaySettings.from_json(bad)


# --- the child process ---------------------------------------------------------------------------------


@pytest.fixture
def playground():
    made = Playground()
    yield made
    made.close()


def test_one_child_at_a_time_in_limits_and_none_left(playground):
    first = playground.start(PlaySettings(width=2, depth=1))
    old = playground._process.pid
    limits = Path(f"/proc/{old}/limits").read_text()
    assert f"{playground_child.MEMORY}" in limits
    assert int(Path(f"/proc/{old}/stat").read_text().rpartition(")")[2].split()[16]) >= 10  # nice
    run_index = RunIndex(playground.root.parent / "nothing-here", playground.root)
    assert playground.current_run() == first
    assert run_index.card(first)["state"] == "running"
    second = playground.start(PlaySettings(width=3, depth=1, model="relu"))
    assert gone(old)
    assert playground.current_run() == second != first
    assert second.startswith(f"{PLAYGROUND}/relu-circle-")
    assert run_index.card(first)["state"] == "interrupted"
    new = playground._process.pid
    playground.stop()
    assert gone(new)
    assert playground.current_run() is None
    playground.close()
    assert not playground.root.exists()


def test_a_child_that_cannot_start_is_told(playground, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Exception, match="could not start"):
        playground.start(PlaySettings())


def test_a_waiting_child_takes_the_start_and_ends_with_the_playground(playground):
    playground.prepare()
    first = playground._waiting
    playground.prepare()
    assert playground._waiting is first  # one, however often the page is opened
    key = playground.start(PlaySettings(width=2, depth=1))
    assert playground._process is first  # it need not import torch again
    assert playground.current_run() == key
    second = playground._waiting
    assert second.pid != first.pid  # ready for the next start
    playground.stop()
    assert gone(first.pid)
    assert second.poll() is None
    assert RunIndex(playground.root).cards()[1] == []
    assert len(RunIndex(playground.root).cards()[0]) == 1  # what a child did to get warm is not listed
    playground.close()
    assert gone(second.pid)
    with pytest.raises(Exception, match="closed"):
        playground.prepare()


@pytest.mark.parametrize("runs", [MOST_RUNS, MOST_RUNS + 3])
def test_old_runs_and_logs_are_deleted(playground, runs):
    for number in range(runs):
        (playground.root / f"old-{number}").mkdir()
    for number in range(MOST_RUNS + 1):
        (playground.root / f"child-{number}.log").touch()
    playground._delete_old()
    assert len(list(playground.root.iterdir())) == 2 * MOST_RUNS


def test_a_child_goes_when_its_server_is_killed(tmp_path):
    code = (
        "from unlazy.studio.playground import Playground\n"
        "from unlazy.studio.playground_child import PlaySettings\n"
        "import time\n"
        "p = Playground()\n"
        "p.start(PlaySettings(width=2, depth=1))\n"
        "print(p._process.pid, p.root, flush=True)\n"
        "time.sleep(60)\n"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid, root = server.stdout.readline().split()
    server.kill()
    server.wait()
    server.stdout.close()
    assert gone(int(pid))
    for path in sorted(Path(root).rglob("*"), reverse=True):  # a killed server cannot tidy up
        path.unlink() if path.is_file() else path.rmdir()
    Path(root).rmdir()
