"""A run knows what it is: settings, model, commit, versions, seed, and an id of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from unlazy import InputError, Run, Scope, StoreError
from unlazy.scope.run_origin import MOST_SETTINGS, changed_fields, flatten_config, git_state, summarise_model

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 2


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def write(folder: Path, **options: object) -> Run:
    Scope(network(), (X, Y), folder, views=("tangents",), strict=True, **options).finish()  # type: ignore[arg-type]
    return Run(folder)


def without_new_fields(folder: Path) -> None:
    """Make the folder what version 0.1 wrote: its id is the hash of the identity, and nothing says what the run is."""
    header = json.loads((folder / "run.json").read_text())
    header["id"] = header.pop("identity")
    for name in ("config", "summary"):
        del header[name]
    for name in ("git", "versions", "seed"):
        del header["provenance"][name]
    (folder / "run.json").write_text(json.dumps(header))
    (folder / "labels.json").unlink(missing_ok=True)


def test_a_run_keeps_what_it_is_told_and_finds_the_rest(tmp_path: Path) -> None:
    run = write(tmp_path / "a", config={"lr": 0.1, "model": {"width": 8}}, tags=["sweep", " sweep "], notes="first try")
    assert run.header["config"] == {"lr": 0.1, "model.width": 8}
    assert run.labels == {"tags": ["sweep"], "notes": "first try"}
    assert run.header["summary"] == "Sequential, 2 layers, 74 parameters"
    assert run.header["provenance"]["seed"] == 0
    assert run.header["provenance"]["versions"]["torch"] == torch.__version__


def test_runs_of_one_network_have_ids_of_their_own(tmp_path: Path) -> None:
    runs = [write(tmp_path / name, config={"lr": lr}) for name, lr in (("a", 0.1), ("b", 0.2), ("c", 0.1))]
    assert len({run.id for run in runs}) == 3
    assert len({run.header["identity"] for run in runs}) == 1


def test_a_resumed_run_keeps_its_id_its_settings_and_its_labels(tmp_path: Path) -> None:
    before = write(tmp_path / "a", config={"lr": 0.1}, tags=["old"])
    before.set_labels(tags=["mine"])
    after = write(tmp_path / "a", config={"lr": 0.3}, tags=["new"])  # from the last weights of a finished run
    assert after.id == before.id
    assert after.header == before.header
    assert after.labels["tags"] == ["mine"]
    anew = write(tmp_path / "a", config={"lr": 0.3}, tags=["new"], overwrite=True)
    assert anew.id != before.id
    assert anew.header["config"] == {"lr": 0.3}
    assert anew.labels["tags"] == ["new"]


def test_a_folder_of_version_0_1_opens_and_resumes(tmp_path: Path) -> None:
    write(tmp_path / "a", config={"lr": 0.1}, tags=["x"])
    without_new_fields(tmp_path / "a")
    old = Run(tmp_path / "a")
    assert old.labels == {"tags": [], "notes": ""}
    resumed = write(tmp_path / "a", config={"lr": 0.1})
    assert resumed.id == old.id
    wider = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2))
    with pytest.raises(StoreError, match="another scope"):
        Scope(wider, (X, Y), tmp_path / "a", views=("tangents",))


@dataclass
class Settings:
    rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    inner: dict[str, int] = field(default_factory=dict)


def test_settings_become_plain_and_flat() -> None:
    given = {
        "a": np.float32(0.5),
        "b": torch.tensor(3),
        "c": float("nan"),
        "d": {"e": None, "f": {"g": True}},
        "h": nn.ReLU,
        "i": [1, 2],
        "long": "x" * 1000,
        7: "seven",
    }
    flat = flatten_config(given)
    assert flat == {
        **{"a": 0.5, "b": 3, "c": "nan", "d.e": None, "d.f.g": True, "h": "ReLU", "i": "[1, 2]"},
        **{"long": "x" * 200, "7": "seven"},
    }
    assert type(flat["a"]) is float
    assert type(flat["d.f.g"]) is bool
    assert json.loads(json.dumps(flat, allow_nan=False)) == flat
    assert flatten_config(argparse.Namespace(lr=1)) == {"lr": 1}
    assert flatten_config(Settings(inner={"k": 1})) == {"rate": 0.1, "betas": "(0.9, 0.95)", "inner.k": 1}
    assert len(flatten_config({str(i): i for i in range(1000)})) == MOST_SETTINGS
    with pytest.raises(InputError, match="config must be a dict"):
        flatten_config("lr=1")


@pytest.mark.parametrize("name", ["hub_token", "wandb.api_key", "PASSWORD", "client-secret", "apikey"])
def test_secrets_are_left_out(name: str) -> None:
    assert flatten_config({name: "hf_very_secret", "tokens": 3, "key": "a"}) == {"tokens": 3, "key": "a"}


def test_fields_that_differ_from_their_defaults() -> None:
    assert changed_fields(Settings()) == {}
    assert changed_fields(Settings(rate=0.2)) == {"rate": 0.2}
    assert changed_fields(Settings(), ("rate", "absent")) == {"rate": 0.1}


def test_a_summary_counts_what_trains() -> None:
    net = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))
    assert summarise_model(net) == "Sequential, 2 layers, 1.01M parameters"
    net[0].requires_grad_(False)
    assert summarise_model(net) == "Sequential, 2 layers, 1.01M parameters (10k trained)"


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    answer = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return answer.stdout.strip()


def test_the_commit_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert git_state(str(tmp_path)) is None
    git(tmp_path, "init", "-q")
    assert git_state(str(tmp_path)) is None  # no commit yet
    (tmp_path / "train.py").write_text("1")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "data.bin").write_text("not tracked")
    assert git_state(str(tmp_path)) == {"commit": commit, "dirty": False}
    (tmp_path / "train.py").write_text("2")
    assert git_state(str(tmp_path)) == {"commit": commit, "dirty": True}
    monkeypatch.chdir(tmp_path)
    assert write(tmp_path / "runs" / "a").header["provenance"]["git"] == {"commit": commit, "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert git_state(str(tmp_path)) is None  # git is not installed
