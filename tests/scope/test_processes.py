"""Two real processes that train together: a scope changes no bit, one process measures, and nothing hangs when one dies."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unlazy.runtime import InputError
from unlazy.scope.processes import check_sharding
from unlazy.store import Run

SCRIPT = Path(__file__).parents[1] / "support" / "two_processes.py"
SECONDS = 180  # a process that takes longer hangs; alone on a machine each takes 5 s


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def run_by_torchrun(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Run two processes with ``torchrun``; returns what each of them found."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(SCRIPT), kind, str(folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]


def run_two(kind: str, folder: Path) -> list[tuple[int, str]]:
    """Run two processes that nobody looks after; returns how each of them ended, and what it wrote to stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), kind, str(folder)],
            env={**shared, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The same training with and without a scope, under data parallelism and FSDP2, by both processes."""
    folder = tmp_path_factory.mktemp("together")
    return folder, run_by_torchrun("together", folder)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_no_bit_of_the_training_changes(together, kind: str) -> None:
    for found in together[1]:
        watched, plain = found[kind], found[f"{kind} without"]
        assert watched["steps"] == plain["steps"]
        assert torch.equal(watched["random"], plain["random"])
        assert len(watched["values"]) == len(plain["values"]) > 6
        assert all(torch.equal(a, b) for a, b in zip(watched["values"], plain["values"], strict=True))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_first_process_measures_and_writes_and_the_second_has_the_same_methods(together, kind: str) -> None:
    folder, (first, second) = together
    run = Run(folder / kind)
    assert run.status()["state"] == "finished"
    steps = run.array_steps("tangent")
    assert (steps[0], steps[-1]) == (0, first[kind]["steps"])
    assert len(steps) >= 5
    assert first[kind]["left_out"] == {}
    assert second[kind]["scalars"] == {}
    assert "another process measures" in second[kind]["said"]


def test_a_sharded_model_gives_the_numbers_of_the_whole_one(together) -> None:
    """Forward mode, gates, kernels and buffers: all of them, since the first process measures a plain copy."""
    ddp, fsdp = (together[1][0][kind]["scalars"] for kind in ("ddp", "fsdp"))
    assert ddp.keys() == fsdp.keys()
    assert {"linearisation_error", "tangent_distance", "gate_flips", "loss"} <= ddp.keys()
    for name in ddp.keys() - {"overhead"}:
        assert list(ddp[name]) == list(fsdp[name])
        a, b = (torch.tensor(list(scalars[name].values())) for scalars in (ddp, fsdp))
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.adapters
def test_accelerate_is_measured_on_the_first_process_and_no_bit_changes(tmp_path: Path) -> None:
    first, second = run_by_torchrun("accelerate", tmp_path)
    for found in (first, second):
        watched, plain = found["accelerate"]["values"], found["accelerate without"]["values"]
        assert all(torch.equal(a, b) for a, b in zip(watched, plain, strict=True))
    assert len(Run(tmp_path / "accelerate").array_steps("tangent")) >= 5
    assert second["accelerate"]["scalars"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp dies", "fsdp dies"])
def test_a_process_that_dies_leaves_a_readable_run(tmp_path: Path, kind: str) -> None:
    (first, said), (second, _) = run_two(kind, tmp_path)
    assert (first, second) == (1, 3), said  # the training's own collective fails
    run = Run(tmp_path / kind)
    assert run.status()["state"] == "failed"
    assert 5 <= run.lines[-1].step <= 6


@pytest.mark.slow
def test_a_process_that_dies_before_a_measurement_is_not_waited_for_long(tmp_path: Path) -> None:
    (first, said), (second, _) = run_two("fsdp late", tmp_path)
    assert (first, second) == (1, 3), said
    assert "not all processes came to a measurement within 2 s" in said
    assert Run(tmp_path / "fsdp late").status()["state"] == "failed"


def test_steps_reported_by_one_process_only_stop_the_scope_and_not_the_training(tmp_path: Path) -> None:
    """``if rank == 0: scope.step(step)`` would leave the first process alone in a collective."""
    (first, said), (second, other) = run_two("fsdp alone", tmp_path)
    assert (first, second) == (0, 0), said + other
    assert "call scope.step and scope.finish on every process" in said
    found = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False)["fsdp alone"] for rank in (0, 1)]
    assert [one["steps"] for one in found] == [12, 12]
    assert Run(tmp_path / "fsdp alone").lines[-1].step == 0


def test_other_ways_to_shard_are_refused_with_a_remedy() -> None:
    class FullyShardedDataParallel(nn.Sequential):
        pass

    with pytest.raises(InputError, match="fully_shard instead"):
        check_sharding(nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2))))
