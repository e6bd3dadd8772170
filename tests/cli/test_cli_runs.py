"""``unlazy runs`` on a sweep of scopes: columns, widths, verdicts, labels, deletion, JSON."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner, Result

from unlazy import InputError, Run, Scope
from unlazy.cli.app import app
from unlazy.cli.runs import list_lines, print_list, run_row
from unlazy.cli.table import fit_table

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] * X[:, 1] > 0).long()
RATES = (0.001, 1.0)


def invoke(*words: object, given: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], input=given)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ in their rate, and a third that broke down."""
    root = tmp_path_factory.mktemp("runs")
    for rate in RATES:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
        folder = root / "sweep" / f"lr-{rate}"
        with Scope(net, (X, Y), folder, config={"lr": rate, "width": 32}, tags=["sweep"], budget=float("inf")) as scope:
            optimiser = torch.optim.SGD(net.parameters(), rate)
            for step in range(1, 41):
                optimiser.zero_grad()
                F.cross_entropy(net(X), Y).backward()
                optimiser.step()
                scope.step(step)
    shutil.copytree(folder, root / "broken")
    with (root / "broken" / "metrics.jsonl").open("a") as file:
        line = {"step": 41, "time": 0.0, "scalars": {"loss": [None]}, "arrays": {}, "checkpoint": None}
        file.write(json.dumps(line) + "\n")
    return root


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs"


def folder_of(root: Path, rate: float) -> Path:
    return root / "sweep" / f"lr-{rate}"


def test_the_list_shows_verdict_gap_and_settings(runs: Path) -> None:
    usual = invoke("runs", "--root", runs).stdout.splitlines()[0].split()
    assert "lr" in usual  # settings that differ are columns without being asked for
    assert "width" not in usual
    lines = invoke("runs", "--root", runs, "--columns", "lr,width").stdout.splitlines()
    assert lines[0].split() == ["id", "state", "step", "loss", "verdict", "gap", "lr", "width", "tags", "folder"]
    for rate in RATES:
        verdict = json.loads((folder_of(runs, rate) / "verdict.json").read_text())
        [line] = [line for line in lines if line.endswith(f"lr-{rate}")]
        assert f"  {verdict['label']} " in line
        assert f"{verdict['gap']:.3g}" in line.split()
        assert line.split()[-4:-2] == [f"{rate:.4g}", "32"]
    [broken] = [line for line in lines if line.endswith("broken")]
    assert "nan" in broken.split()


def test_a_setting_that_no_run_has(runs: Path) -> None:
    with pytest.raises(InputError, match="no run has a setting depth; settings: lr, width"):
        print_list(runs, None, None, False, ["depth"])


def test_a_folder_may_be_named_with_and_without_options(runs: Path) -> None:
    listed = [
        invoke("runs", "--root", runs / "sweep", "--json"),
        invoke("runs", runs / "sweep", "--json"),
        invoke("runs", "--json", runs / "sweep"),
        invoke("runs", "list", runs / "sweep", "--json"),
    ]
    assert {answer.exit_code for answer in listed} == {0}
    assert len({answer.stdout for answer in listed}) == 1
    rows = json.loads(listed[0].stdout)
    assert [row["config"]["lr"] for row in rows] == list(RATES)
    assert json.loads(invoke("runs", runs, "--tag", "other", "--json").stdout) == []
    wrong = invoke("runs", "shwo", "x")
    assert wrong.exit_code != 0
    unknown = invoke("runs", "shwo")
    assert isinstance(unknown.exception, InputError)
    assert "shwo is not a folder" in str(unknown.exception)
    assert "show" in str(unknown.exception)


def test_states_can_be_chosen(runs: Path) -> None:
    status = folder_of(runs, RATES[0]) / "status.json"
    status.write_text('{"state": "interrupted", "step": 40, "error": "KeyboardInterrupt"}')
    [row] = json.loads(invoke("runs", runs, "--state", "interrupted", "--json").stdout)
    assert row["folder"] == str(status.parent)
    assert "is one of running" in str(invoke("runs", runs, "--state", "diverged").exception)


def test_rows_hold_what_the_page_is_promised(runs: Path) -> None:
    row = run_row(Run(folder_of(runs, RATES[1])))
    assert row["config"] == {"lr": 1.0, "width": 32}
    assert (row["tags"], row["notes"], row["seed"]) == (["sweep"], "", 0)
    assert row["model"] == "Sequential, 2 layers, 290 parameters"
    assert row["broke_down"] is False
    assert {"word", "first", "last", "until"} == set(row["phases"][0])
    assert run_row(Run(runs / "broken"))["broke_down"] is True
    assert run_row(Run(runs / "broken"))["state"] == "finished"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 140, 200])
def test_the_list_fits_the_terminal(runs: Path, width: int) -> None:
    rows = [run_row(Run(folder_of(runs, rate))) for rate in RATES]
    lines = list_lines(rows, ["lr"], width)
    assert max(map(len, lines)) <= width
    assert all(line.startswith(row["id"]) for line, row in zip(lines[1:], rows, strict=True))
    if width >= 80:
        assert {"verdict", "lr"} <= set(lines[0].split())
        assert all(line.endswith(f"lr-{rate}") for line, rate in zip(lines[1:], RATES, strict=True))
    whole = list_lines(rows, ["lr"], None)
    assert all(line.endswith(row["folder"]) for line, row in zip(whole[1:], rows, strict=True))


def test_a_table_loses_the_cut_column_first_and_then_columns_in_order() -> None:
    rows = [{"a": "1" * 10, "b": "2" * 10, "path": "x/" * 20}]
    named = ["a", "b", "path"]
    assert fit_table(named, rows, 64, droppable=["b"], cut="path")[1] == f"{'1' * 10}  {'2' * 10}  {'x/' * 20}"
    assert fit_table(named, rows, 44, droppable=["b"], cut="path")[1].split()[:2] == ["1" * 10, "2" * 10]
    assert fit_table(named, rows, 30, droppable=["b"], cut="path")[0] == "a           path"


def test_show_prints_the_verdict_in_words(runs: Path) -> None:
    folder = folder_of(runs, RATES[1])
    verdict = json.loads((folder / "verdict.json").read_text())
    text = invoke("runs", "show", folder).stdout
    assert f"Verdict: {verdict['label']}. {verdict['words']['meaning']}" in text
    assert "config.lr" in text
    shown = json.loads(invoke("runs", "show", folder, "--json").stdout)
    assert shown["verdict"] == verdict
    assert shown["last"]["loss"] == Run(folder).scalars("loss")[1][-1, 0]
    assert "broke down" in invoke("runs", "show", runs / "broken").stdout


def test_compare_takes_any_number_of_runs(runs: Path) -> None:
    folders = [folder_of(runs, RATES[0]), folder_of(runs, RATES[1]), runs / "broken"]
    rows = {line.split()[0]: line.split()[1:] for line in invoke("runs", "compare", *folders).stdout.splitlines()[1:]}
    labels = [json.loads((folder / "verdict.json").read_text())["label"] for folder in folders]
    assert " ".join(rows["verdict"]) == " ".join(labels)
    assert rows["config.lr"] == ["0.001", "1.0", "1.0"]
    assert "config.width" not in rows
    assert "scope.notes" not in rows
    told = json.loads(invoke("runs", "compare", *folders, "--json").stdout)
    assert told["runs"] == ["lr-0.001", "lr-1.0", "broken"]
    assert told["facts"]["verdict"] == labels
    assert told["settings"]["config.lr"] == [0.001, 1.0, 1.0]


def test_tags_and_notes_from_the_command_line(runs: Path) -> None:
    run = Run(folder_of(runs, RATES[0]))
    assert invoke("runs", "tag", run.id, "best", "paper", "--root", runs).exit_code == 0
    assert run.labels["tags"] == ["sweep", "best", "paper"]
    assert invoke("runs", "tag", run.folder, "sweep", "--remove").exit_code == 0
    assert invoke("runs", "note", run.folder, "the one to keep").exit_code == 0
    assert run.labels == {"tags": ["best", "paper"], "notes": "the one to keep"}
    assert "has no tag sweep" in str(invoke("runs", "tag", run.folder, "sweep", "--remove").exception)
    [row] = json.loads(invoke("runs", runs, "--tag", "best", "--json").stdout)
    assert row["notes"] == "the one to keep"


def test_delete_asks_first_and_deletes_runs_alone(runs: Path) -> None:
    folder = folder_of(runs, RATES[0])
    assert "nothing was deleted" in invoke("runs", "delete", folder, given="n\n").stdout
    assert Run(folder).lines
    assert invoke("runs", "delete", folder, given="y\n").exit_code == 0
    assert not folder.exists()
    (runs / "broken" / "mine.txt").write_text("keep me")
    assert "mine.txt" in invoke("runs", "delete", runs / "broken", "--yes").stdout
    assert [path.name for path in (runs / "broken").iterdir()] == ["mine.txt"]
    assert "is not a run" in str(invoke("runs", "delete", runs, "--yes").exception)
    (runs / "link").symlink_to(folder_of(runs, RATES[1]))
    assert "link" in str(invoke("runs", "delete", runs / "link", "--yes").exception)
    assert Run(folder_of(runs, RATES[1])).lines


@pytest.mark.parametrize("words", [["studies"], ["data"], ["data", "list"]])
def test_every_listing_speaks_json(words: list[str]) -> None:
    rows = json.loads(invoke(*words, "--json").stdout)
    assert rows
    assert all("name" in row for row in rows)


def test_a_report_into_a_folder_that_is_not_there(runs: Path, tmp_path: Path) -> None:
    answer = invoke("report", folder_of(runs, RATES[0]), "-o", tmp_path / "missing" / "page.html")
    assert isinstance(answer.exception, InputError)
    assert "missing is not a folder" in str(answer.exception)
    assert not (tmp_path / "missing").exists()


def test_shells_complete_commands() -> None:
    assert "--install-completion" in invoke("--help").stdout


def test_a_terminal_gets_a_width_and_a_pipe_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from unlazy.cli.runs import terminal_width

    monkeypatch.setenv("COLUMNS", "77")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert terminal_width() == 77
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert terminal_width() is None
