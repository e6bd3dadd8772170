"""The benchmark of what measuring costs: bits that differ are found, rows of several processes stand side by side."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from process_memory import ENVIRONMENT
from repository import ROOT


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load("scope")


def tiny() -> tuple[nn.Module, Tensor, Tensor]:
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    return net, torch.randn(200, 5), torch.arange(200) % 3


def test_both_trainings_end_on_the_same_bits(bench: ModuleType) -> None:
    case = replace(bench.CASES["mlp"], make=tiny, steps=40)
    row = bench.compare(case)
    assert row["bit_identical"]
    assert row["first_and_last"]
    assert row["measurements"] >= 2
    moved = bench.moved_after(case, "cpu")
    assert moved["bit_identical"]
    assert moved["last_measured"] == moved["steps"]
    assert moved["largest_relative_difference"] < 1e-5
    assert moved["numbers"] > 10


def test_one_bit_is_enough(bench: ModuleType) -> None:
    case = replace(bench.CASES["mlp"], make=tiny)
    first, second = bench.Training(case, "cpu"), bench.Training(case, "cpu")
    for training in (first, second):
        training.advance(3)
    assert bench._same(first, second)
    with torch.no_grad():
        weight = next(second.net.parameters())
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
    assert not bench._same(first, second)
    third = bench.Training(case, "cpu")
    third.advance(3)
    third.random = [state.flip(0) for state in third.random]
    assert not bench._same(first, third)


def test_differences_are_relative_and_absence_is_infinite(bench: ModuleType) -> None:
    assert bench._apart(2.0, 1.0) == 0.5
    assert bench._apart(0.0, 0.0) == bench._apart(float("nan"), float("nan")) == 0.0
    assert bench._apart(None, 1.0) == float("inf")


def test_rows_stand_side_by_side(bench: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "new" / "scope.json"
    for name in ("mlp", "resnet", "mlp"):
        bench.keep(path, name, {"steps": len(name)}, "cpu")
    kept = json.loads(path.read_text())
    assert kept["rows"] == {"mlp": {"steps": 3}, "resnet": {"steps": 6}}
    assert kept["provenance"]["device"] == "cpu"
    assert [file.name for file in path.parent.iterdir()] == ["scope.json"]


def test_length_follows_the_clock(bench: ModuleType) -> None:
    case = bench.lasting(replace(bench.CASES["mlp"], make=tiny), "cpu", 0.5)
    assert case.steps % bench.BLOCK == 0
    assert case.steps >= bench.BLOCK


def run_large_models(*options: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "large_models.py"), "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["vit_b", "resnet50", "gpt2"])
def test_large_models_run_tiny(name: str) -> None:
    alone, scope = (load("large_models").train(name, "cpu", 8, True, watched) for watched in (False, True))
    assert scope["parameters"] == alone["parameters"]
    assert scope["measurements"]["linearisation_error"] >= 2
    json.dumps([alone, scope])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_transformer_of_25_million_parameters_takes_a_third_more_at_most(tmp_path: Path) -> None:
    """Memory beyond what training takes, the processor time before the first step, and the number that verdicts rest on."""
    run_large_models("--models", "transformer", "--steps", "8", "--out", str(tmp_path / "found.json"))
    rows = json.loads((tmp_path / "found.json").read_text())["models"]["transformer"]
    alone, scope = rows["alone"], rows["scope"]
    assert scope["parameters"] > 25e6
    training = (
        alone["peak_bytes"] + 4 * alone["parameters"]
    )  # gradients, state of the optimiser, activations; parameters
    assert scope["peak_bytes"] - alone["peak_bytes"] <= training / 3
    assert scope["construction_processor_seconds"] <= 6
    count = scope["measurements"]["linearisation_error"]
    assert count >= 2
    assert count >= 8 or any("full measurement" in note and ": each takes" in note for note in scope["notes"])
