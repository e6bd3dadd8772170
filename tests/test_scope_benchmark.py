"""The benchmark of what looking costs: bits that differ are seen, rows of several processes stand side by side."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

PATH = Path(__file__).parent.parent / "benchmarks" / "scope.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scope_benchmark", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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
