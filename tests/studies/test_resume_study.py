"""A whole study, killed at random moments and started again: the same files, bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-c", "from unlazy.cli.app import main; main()"]
COMMAND += ["reproduce", "circle", "--scale", "smoke", "--workers", "2", "--runs", "runs", "--results", "results"]


def start(folder: Path) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(COMMAND, cwd=folder, stdout=log, stderr=log, start_new_session=True)


def run_to_the_end(folder: Path) -> None:
    assert start(folder).wait(timeout=300) == 0, (folder / "log.txt").read_text()


def count_files(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


def kill_when_there_are(folder: Path, files: int) -> bool:
    """Start the command, kill it (and nothing but it) once it has written so many files; False if it ended before."""
    with start(folder) as process:
        while process.poll() is None and count_files(folder / "runs") < files:
            time.sleep(0.002)
        process.kill()
        return process.wait() == -signal.SIGKILL


def bits(folder: Path) -> dict:
    """Everything below ``runs`` but times and provenance, and the result table without its provenance."""
    found: dict = {}
    for path in (folder / "runs").rglob("*"):
        if path.is_file() and path.suffix != ".progress":
            found[str(path.relative_to(folder))] = path.read_bytes()
    for name in [name for name in found if name.endswith("run.json")]:
        found[name] = {key: value for key, value in json.loads(found[name]).items() if key != "provenance"}
    for name in [name for name in found if name.endswith("metrics.jsonl")]:
        lines = [json.loads(line) for line in found[name].splitlines()]
        found[name] = [{key: value for key, value in line.items() if key != "time"} for line in lines]
    for name in [name for name in found if "/measured/" in name]:
        found[name] = {key: value for key, value in json.loads(found[name]).items() if key != "provenance"}
    results = folder / "results" / "circle" / "smoke"
    claims = json.loads((results / "results.json").read_text())["claims"]
    for claim in claims:
        claim.pop("rule_record")  # dates
    return found | {"table": (results / "table.csv").read_bytes(), "claims": claims}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("whole")
    run_to_the_end(folder)
    return bits(folder)


def test_the_undisturbed_study_has_arrays_checkpoints_and_claims(whole):
    assert sum(name.endswith(".npy") for name in whole) > 100
    assert sum(name.endswith(".safetensors") for name in whole) >= 8
    assert whole["claims"]
    assert whole["table"]


@pytest.mark.parametrize("seed", range(4))
def test_a_study_killed_at_random_moments_ends_with_the_same_bits(tmp_path, whole, seed):
    """Killed twice, with more files the second time, then left alone."""
    total = sum(name.startswith("runs/") for name in whole)
    choose = random.Random(seed)
    first = choose.randint(1, total // 2)
    second = choose.randint(first + 1, total - 1)
    assert kill_when_there_are(tmp_path, first)
    kill_when_there_are(tmp_path, second)
    run_to_the_end(tmp_path)
    found = bits(tmp_path)
    assert found.keys() == whole.keys()
    assert [name for name in whole if found[name] != whole[name]] == []
