"""The examples run as they stand, stay short, and say what their first lines promise."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from unlazy.store import Run

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
LABELS = {"lazy", "rich", "mixed", "cannot tell"}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_is_short_and_leaves_a_run(path: Path, tmp_path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60
    verdict = load(path).main(steps=40, run=str(tmp_path / "run"))
    run = Run(tmp_path / "run")
    assert verdict.label in LABELS
    assert run.status()["state"] == "finished"
    assert run.array_steps("tangent")[0] == 0
    assert run.array_steps("tangent")[-1] == 40


@pytest.mark.slow
def test_scaling_the_output_makes_the_digits_lazy() -> None:
    digits = load(EXAMPLES[[path.stem for path in EXAMPLES].index("digits")])
    assert digits.main(1.0).label in ("rich", "mixed")  # a linearised twin, trained by itself, puts it between the two
    assert digits.main(100.0).label == "lazy"
