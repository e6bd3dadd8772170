"""Runs with damaged files: every command answers, or says in our words what is wrong; one sick run never hides the others."""

from __future__ import annotations

import random
import shutil
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import unlazy as ul
from damage import damage
from repository import ROOT
from unlazy.cli.app import app

KEPT = ROOT / "tests" / "store" / "runs_of_0_1.tar.gz"
COMMANDS = (
    *("runs list {root}", "runs list {root} --json", "runs list {root} --state finished", "runs show {run}"),
    *("runs show {run} --json", "runs compare {run} {other}", "runs tag {run} mine", "runs note {run} words"),
    *("report {run} -o {root}/page.html", "report {run} {other} -o {root}/both.html"),
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    with tarfile.open(KEPT) as archive:
        archive.extractall(folder, filter="data")
    return folder


def try_commands(good: Path, folder: Path, seed: int, count: int = 4) -> list[str]:
    """Damage a copy of the runs, call some commands; what ended in an error that is not ours."""
    chance, root = random.Random(seed), folder / f"case{seed}"
    shutil.copytree(good, root)
    names = sorted(path.name for path in good.iterdir())
    run, other = root / chance.choice(names), root / chance.choice(names)
    done, failed = damage(run, chance), []
    for command in chance.sample(COMMANDS, count):
        answer = CliRunner().invoke(app, command.format(root=root, run=run, other=other).split())
        if not (answer.exception is None or isinstance(answer.exception, SystemExit | ul.UnlazyError)):
            failed.append(f"{seed}: {done}: {command}: {answer.exception!r}")
    shutil.rmtree(root)
    return failed


@pytest.mark.parametrize("begin", range(0, 60, 20))
def test_damaged_runs_are_told_in_our_words(good: Path, tmp_path: Path, begin: int) -> None:
    assert [told for seed in range(begin, begin + 20) for told in try_commands(good, tmp_path, seed)] == []


def test_one_sick_run_does_not_hide_the_others(good: Path, tmp_path: Path) -> None:
    for seed in range(30):
        root = tmp_path / f"case{seed}"
        shutil.copytree(good, root)
        damage(root / "scope", random.Random(seed))
        answer = CliRunner().invoke(app, ["runs", "list", str(root)])
        assert "fit" in answer.output, f"{seed}: {answer.output}"
