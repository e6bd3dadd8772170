"""The Fashion-MNIST study end to end: train, measure, judge, draw.

Training at paper scale wants a GPU, judging and drawing do not. Where they are different machines, run

    python -m unlazy.studies.halfspace.fashion.study --scale paper --device cuda --workers 4 --runs RUNS --results RESULTS

on the first (it needs neither matplotlib nor the command line's packages) and bring ``RESULTS/fashion/paper-measured.npz``, a few
megabytes, to the results folder of the second: ``reproduce("paper", ...)`` takes it up instead of training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unlazy import runtime
from unlazy.studies.halfspace.fashion.claims import claims
from unlazy.studies.halfspace.fashion.figures import draw
from unlazy.studies.halfspace.fashion.measure import values
from unlazy.studies.halfspace.fashion.series import Measured, collect
from unlazy.studies.halfspace.fashion.settings import SCALES, Settings, available, stacks
from unlazy.studies.halfspace.fashion.train import run
from unlazy.studies.registry import settings_of
from unlazy.studies.results import Progress, conclude, provenance_of, table_of


def settings_for(scale: str, seeds: int | None) -> Settings:
    """The settings of a scale, with another number of seeds if one is given; desk makes do with digits."""
    settings = settings_of(SCALES, scale, seeds)
    return available(settings) if scale == "desk" else settings


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Train what is missing under ``runs``, then write ``results/fashion/SCALE.json`` and its figures.

    Measurements of the same settings at ``results/fashion/SCALE-measured.npz`` are taken up instead of training.
    """
    settings = settings_for(scale, seeds)
    measured = _kept(results, scale, settings)
    if measured is None:
        device = "cuda" if scale == "paper" and torch.cuda.is_available() else "cpu"
        measured = run_and_measure(settings, scale, runs, device=device, workers=workers, progress=progress)
    table = table_of("fashion", scale, measured.settings, measured.provenance)
    table["stacks"] = {key: values(series) for key, series in measured.series.items()}
    return conclude(table, claims, lambda _: draw(measured), results, progress)


def run_and_measure(
    settings: Settings, scale: str, runs: Path, *, device: str = "cpu", workers: int = 1, progress: Progress
) -> Measured:
    """Train every stack (or go on, or just open it) and read off what claims and figures need."""
    counted = partial(progress, "epochs")
    trained = run(settings, runs / "fashion", scale, device=device, workers=workers, progress=counted)
    series = {}
    for number, stack in enumerate(stacks(settings), 1):
        series[stack.key] = collect(stack, trained[stack.key])
        progress("measuring", number, len(trained))
    return Measured(scale, settings.to_dict(), provenance_of(trained.values()), series)


def measured_file(results: Path, scale: str) -> Path:
    """Where measurements are kept that were made elsewhere."""
    return results / "fashion" / f"{scale}-measured.npz"


def _kept(results: Path, scale: str, settings: Settings) -> Measured | None:
    path = measured_file(results, scale)
    if not path.exists():
        return None
    measured = Measured.load(path)
    return measured if measured.settings == settings.to_dict() else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure only, and keep the measurements for ``reproduce``."""
    parser = argparse.ArgumentParser(
        description="Train and measure the Fashion-MNIST study; judge and draw it elsewhere."
    )
    parser.add_argument("--scale", default="paper", choices=list(SCALES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1, help="stacks trained at once")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--runs", type=Path, default=runtime.runs_folder())
    parser.add_argument("--results", type=Path, default=Path("results"))
    chosen = parser.parse_args(arguments)
    measured = run_and_measure(
        settings_for(chosen.scale, chosen.seeds),
        chosen.scale,
        chosen.runs,
        device=chosen.device,
        workers=chosen.workers,
        progress=_teller(),
    )
    path = measured_file(chosen.results, chosen.scale)
    measured.save(path)
    sys.stdout.write(f"kept in {path}\n")


def _teller() -> Progress:
    """Writes a line whenever something has moved on."""
    told: dict[str, int] = {}

    def tell(what: str, done: int, total: int) -> None:
        if told.get(what) != done:
            told[what] = done
            sys.stdout.write(f"{what} {done}/{total}\n")
            sys.stdout.flush()

    return tell


if __name__ == "__main__":
    main()
