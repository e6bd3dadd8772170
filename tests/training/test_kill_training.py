"""Pulling the plug: a training killed at any write goes on to the same bits; a sweep leaves no process behind."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from repository import SUPPORT
from unlazy.store import Run

DRIVER = SUPPORT / "kill_driver.py"
HOWS = ("before", "half", "after")


# --- trainings -----------------------------------------------------------------------------------


def drive(folder: Path, plans: list[dict]) -> list[dict]:
    """Carry out the plans below ``folder``, each in a process of its own."""
    command = [sys.executable, str(DRIVER), "train", str(folder)]
    done = subprocess.run(command, input=json.dumps(plans), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def plan(folder: str, at: int | None = None, how: str = "half") -> dict:
    return {"folder": folder, "at": at, "how": how}


def contents(folder: Path) -> dict:
    """All a run holds, by path; without times and provenance."""
    found: dict = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found["run.json"] = {key: value for key, value in json.loads(found["run.json"]).items() if key != "provenance"}
    lines = [json.loads(line) for line in found["metrics.jsonl"].splitlines()]
    found["metrics.jsonl"] = [{key: value for key, value in line.items() if key != "time"} for line in lines]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[dict, int]:
    """The undisturbed training, and how many writes it takes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    [ended] = drive(folder, [plan("run")])
    return contents(folder / "run"), ended["writes"]


def check_readable(folder: Path, whole: dict) -> None:
    """A cut-off run opens; everything it names loads; its lines are the first lines of the whole run."""
    if not (folder / "run.json").exists():
        return
    run = Run(folder)
    assert len(run.lines) <= len(whole["metrics.jsonl"])
    for line, expected in zip(run.lines, whole["metrics.jsonl"], strict=False):
        assert (line.step, line.scalars) == (expected["step"], expected["scalars"])
        for quantity in line.arrays:
            assert run.array(quantity, line.step).shape[0] == 3
    checkpoints = [line["step"] for line in whole["metrics.jsonl"][: len(run.lines)] if line["checkpoint"]]
    last = run.last_checkpoint()
    assert (last and last[0]) == (checkpoints[-1] if checkpoints else None)
    if (folder / "status.json").exists():
        assert run.status()["state"] in ("interrupted", "finished")


def check_kills(folder: Path, kills: list[dict], whole: dict) -> None:
    assert [ended["killed"] for ended in drive(folder, kills)] == [True] * len(kills)
    for kill in kills:
        check_readable(folder / kill["folder"], whole)
    ended = drive(folder, [plan(kill["folder"]) for kill in kills])
    assert not any(end["killed"] for end in ended)
    for kill in kills:
        assert contents(folder / kill["folder"]) == whole, kill


def test_the_undisturbed_training_has_what_a_kill_could_spoil(whole):
    found, writes = whole
    assert [line["step"] for line in found["metrics.jsonl"] if line["checkpoint"]] == [0, 6, 12, 18]
    assert {name.split("/")[1] for name in found if name.startswith("arrays/")} >= {"overlap", "tangent", "normals"}
    assert json.loads(found["status.json"]) == {"state": "finished", "step": 18, "error": None}
    assert 30 < writes < 255


def test_a_training_killed_at_random_writes_ends_with_the_same_bits(tmp_path, whole):
    found, writes = whole
    points = [(at, how) for at in range(1, writes + 1) for how in HOWS]
    chosen = random.Random(24).sample(points, 21)
    chosen += [(1, "half"), (2, "before"), (writes, "half")]  # the header, the first status, the last status
    check_kills(tmp_path, [plan(f"{how}-{at}", at, how) for at, how in sorted(set(chosen))], found)


@pytest.mark.slow
def test_a_training_killed_at_every_write_ends_with_the_same_bits(tmp_path, whole):
    found, writes = whole
    check_kills(tmp_path, [plan(f"{how}-{at}", at, how) for at in range(1, writes + 1) for how in HOWS], found)


def test_a_training_killed_again_and_again_ends_with_the_same_bits(tmp_path, whole):
    found, writes = whole
    choose = random.Random(7)
    kills = [plan("run", choose.randint(1, writes // 3), choose.choice(HOWS)) for _ in range(12)]
    drive(tmp_path, [*kills, plan("run")])
    assert contents(tmp_path / "run") == found


# --- sweeps --------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    """Whether a process still runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited too long: {what}"
        time.sleep(0.02)


def sweep(folder: Path, *jobs: str) -> list[str]:
    return [sys.executable, str(DRIVER), "sweep", str(folder), *jobs]


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and PR_SET_PDEATHSIG")


@linux_only
def test_errors_arrive_as_they_were_and_cost_only_their_own_task(tmp_path):
    command = sweep(tmp_path, "store_error", "short-1", "unsupported", "plain_error", "short-2")
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    failed = {
        "store_error": ["StoreError", "the shelf is broken."],
        "unsupported": ["Unsupported", "net.pool: it has no gates. Use ReLU."],
        "plain_error": ["KeyError", "('nobody', 'plain_error')"],
    }
    assert json.loads(done.stdout) == {"done": ["short-1", "short-2"], "failed": failed}


@linux_only
def test_a_killed_worker_does_not_stop_the_tasks_that_wait(tmp_path):
    command = sweep(tmp_path, "killed-1", "killed-2", "short-1", "short-2", "short-3")
    done = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert "short-3" in done["done"]
    assert {"killed-1", "killed-2"} <= set(done["failed"])
    assert all("a worker was killed" in message for _, message in done["failed"].values())


def killed_with_its_parent(folder: Path, pattern: str) -> None:
    """Start a sweep of two endless jobs, wait for its workers to announce themselves, kill the parent, look."""
    with subprocess.Popen(sweep(folder, "forever-1", "forever-2"), stderr=subprocess.DEVNULL) as parent:
        try:
            wait_until(lambda: len(list(folder.glob(pattern))) == 2, "two workers")
            workers = [int(path.read_text()) for path in folder.glob(pattern)]
            assert all(map(alive, workers))
        finally:
            parent.kill()
    try:
        wait_until(lambda: not any(map(alive, workers)), "the workers end", seconds=20)
    finally:
        for worker in filter(alive, workers):
            os.kill(worker, signal.SIGKILL)


@linux_only
@pytest.mark.slow
def test_killing_the_parent_of_a_sweep_ends_its_workers(tmp_path):
    killed_with_its_parent(tmp_path, "forever-?")


@linux_only
@pytest.mark.slow
def test_killing_the_parent_of_a_sweep_ends_workers_that_are_still_starting(tmp_path):
    (tmp_path / "wait-for-my-end").touch()
    killed_with_its_parent(tmp_path, "late-*")
