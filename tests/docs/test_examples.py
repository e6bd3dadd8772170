"""The examples run as they stand, stay short, and say what their first lines promise."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from repository import ROOT
from unlazy.store import Run
from unlazy.studies.engine import reproduce
from unlazy.studies.registry import load_study
from unlazy.studies.request import ExecutionOptions, Request

FOLDER = ROOT / "examples"
STUDY = FOLDER / "own_study.py"
OWN_PACKAGE = {"language_model": pytest.mark.adapters, "sequence_classification": pytest.mark.adapters}
EXAMPLES = [
    pytest.param(path, marks=OWN_PACKAGE.get(path.stem, ())) for path in sorted(FOLDER.glob("*.py")) if path != STUDY
]
LABELS = {"lazy", "rich", "mixed", "cannot tell"}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:::transformers", "ignore:::torch.utils.data")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_is_short_and_leaves_a_run(path: Path, tmp_path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60
    verdict = load(path).main(steps=40, run=str(tmp_path / "run"))
    run = Run(tmp_path / "run")
    assert verdict.label in LABELS
    assert run.status()["state"] == "finished"
    assert run.array_steps("tangent")[0] == 0
    assert run.array_steps("tangent")[-1] == 40


def test_a_claim_of_ones_own_is_measured_judged_and_drawn(tmp_path: Path) -> None:
    assert len([line for line in STUDY.read_text().splitlines() if line.strip()]) < 50
    request = Request(str(STUDY), "smoke", tmp_path / "runs", tmp_path / "results")
    found = reproduce(request, ExecutionOptions(), progress=lambda *_: None)
    assert found.failed == found.not_drawn == {}
    assert [row["id"] for row in found.results["claims"]] == ["W1"]
    assert (found.folder / "motion.png").exists()
    assert load_study(str(STUDY)).seeds["desk"] >= 3


@pytest.mark.slow
def test_scaling_the_output_makes_the_digits_lazy() -> None:
    digits = load(FOLDER / "digits.py")
    assert digits.main(1.0).label in ("rich", "mixed")  # a linearised twin, trained by itself, puts it between the two
    assert digits.main(100.0).label == "lazy"
