"""What the page is promised of every run: verdict, settings, labels, state; also of runs that version 0.1 wrote."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from store_runs import small_run
from unlazy import Run, Scope
from unlazy.studio.run_facts import run_facts
from unlazy.studio.run_index import RunIndex

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 2
PROMISED = {"config", "tags", "notes", "gap", "phases", "state", "broke_down", "git", "seed", "model"}


def train(folder: Path, rate: float = 0.5, **options: object) -> None:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimiser = torch.optim.SGD(net.parameters(), rate)
    with Scope(net, (X, Y), folder, budget=float("inf"), **options) as scope:  # type: ignore[arg-type]
        for step in range(1, 9):
            optimiser.zero_grad()
            F.cross_entropy(net(X), Y).backward()
            optimiser.step()
            scope.step(step)


def test_cards_and_facts_hold_what_is_promised(tmp_path: Path) -> None:
    train(tmp_path / "a", config={"lr": 0.5, "wide": True}, tags=["x"], notes="n")
    index = RunIndex(tmp_path)
    card, facts = index.card("a"), run_facts(index.open("a"))
    verdict = json.loads((tmp_path / "a" / "verdict.json").read_text())
    assert card.keys() >= PROMISED | {"verdict"}
    assert {name: facts[name] for name in PROMISED} == {name: card[name] for name in PROMISED}
    assert facts["verdict"] == verdict
    assert (card["verdict"], card["gap"], card["phases"]) == (verdict["label"], verdict["gap"], verdict["phases"])
    assert (card["config"], card["tags"], card["notes"]) == ({"lr": 0.5, "wide": True}, ["x"], "n")
    assert (card["seed"], card["state"], card["broke_down"]) == (7, "finished", False)
    json.dumps([card, facts], allow_nan=False)


def test_labels_that_change_are_seen(tmp_path: Path) -> None:
    train(tmp_path / "a")
    index = RunIndex(tmp_path)
    assert index.card("a")["tags"] == []
    Run(tmp_path / "a").set_labels(tags=["best"], notes="keep")
    assert (index.card("a")["tags"], index.card("a")["notes"]) == (["best"], "keep")
    assert run_facts(index.open("a"))["tags"] == ["best"]


def test_a_training_that_broke_down_is_finished_and_says_so(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(tmp_path / "a", rate=1e30)
    card = RunIndex(tmp_path).card("a")
    assert card["broke_down"] is True
    assert card["state"] == "finished"


def test_runs_of_version_0_1_and_of_studies_have_empty_fields(tmp_path: Path) -> None:
    train(tmp_path / "old", config={"lr": 1}, tags=["x"])
    header = json.loads((tmp_path / "old" / "run.json").read_text())
    header["id"] = header.pop("identity")
    for name in ("config", "summary"):
        del header[name]
    for name in ("git", "versions", "seed"):
        del header["provenance"][name]
    (tmp_path / "old" / "run.json").write_text(json.dumps(header))
    (tmp_path / "old" / "labels.json").unlink()
    small_run(tmp_path / "study")
    index = RunIndex(tmp_path)
    cards, broken = index.cards()
    assert broken == []
    for card in cards:
        assert (card["config"], card["tags"], card["notes"], card["git"], card["seed"]) == ({}, [], "", None, None)
        assert run_facts(index.open(card["key"])).keys() >= PROMISED
    by_key = {card["key"]: card for card in cards}
    assert by_key["old"]["model"] == "Sequential"
    assert by_key["old"]["verdict"] is not None
    assert (by_key["study"]["verdict"], by_key["study"]["gap"], by_key["study"]["phases"]) == (None, None, [])


def test_a_seed_that_a_page_cannot_read_exactly_is_left_out(tmp_path: Path) -> None:
    small_run(tmp_path / "a")
    header = json.loads((tmp_path / "a" / "run.json").read_text())
    header["provenance"]["seed"] = 2**60 + 1
    (tmp_path / "a" / "run.json").write_text(json.dumps(header))
    assert RunIndex(tmp_path).card("a")["seed"] is None
