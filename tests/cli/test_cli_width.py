"""``unlazy width``: a function in a file, its probe beside it, text, JSON and a figure."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unlazy.cli.app import app
from unlazy.runtime import InputError

MINE = """
import torch
from torch import nn

def make_model(width):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

def probe():
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return x, x[:, :2].relu()

def rates(model, width):
    return torch.optim.SGD(model.parameters(), 0.1 / width)
"""


def invoke(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "scaled.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "scaled", raising=False)
    return tmp_path


def test_a_model_of_a_file_is_checked_and_drawn(folder: Path) -> None:
    words = ("width", "scaled:make_model", "--widths", "16,32,64", "--steps", "2", "--seeds", "2")
    assert "blowing up" in invoke(*words, "--rate", "0.001")
    found = json.loads(invoke(*words, "--json", "--figure", "out.png", "--optimiser", "scaled:rates"))
    assert (found["widths"], found["seeds"], found["steps"]) == ([16, 32, 64], 2, 2)
    assert {row["layer"] for row in found["exponents"]} >= {"0", "2", "4", "(network)"}
    assert (folder / "out.png").stat().st_size > 1000


def test_names_that_are_wrong_are_explained(folder: Path) -> None:
    for words, expected in (
        (("scaled",), "must be module:name"),
        (("scaled:nothing",), "mine:Net means"),
        (("scaled:make_model", "--widths", "a,b"), "whole numbers"),
        (("scaled:make_model", "--optimiser", "newton"), "sgd, adam, adamw"),
        (("scaled:make_model", "--figure", "a.jpg"), ".png or .pdf"),
    ):
        with pytest.raises(InputError, match=expected):
            invoke("width", *words)
