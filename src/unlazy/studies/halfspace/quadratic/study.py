"""The quadratic-gate study end to end: train, measure, judge, draw."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from unlazy.runtime import require
from unlazy.studies.halfspace.quadratic.claims import claims
from unlazy.studies.halfspace.quadratic.figures import draw
from unlazy.studies.halfspace.quadratic.measure import left_out, measure, trainings
from unlazy.studies.halfspace.quadratic.settings import SCALES, Settings
from unlazy.studies.registry import check_scale
from unlazy.studies.results import Progress, conclude, provenance_of, table_of
from unlazy.studies.trainings import train_all


def settings_for(scale: str, seeds: int | None) -> Settings:
    """The settings of a scale, with another number of seeds if one is given."""
    settings = SCALES[check_scale(scale)]
    if seeds is None:
        return settings
    require(seeds >= 1, f"seeds must be at least 1, got {seeds}.")
    return Settings(replace(settings.circles, seeds=seeds), replace(settings.pictures, seeds=seeds))


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Train what is missing under ``runs``, then write ``results/quadratic/SCALE.json`` and its figures."""
    settings = settings_for(scale, seeds)
    planned = trainings(settings)
    counted = partial(progress, "trainings")
    trained = train_all(planned, runs / "quadratic", "quadratic", scale, workers=workers, progress=counted)
    table = table_of("quadratic", scale, settings.to_dict(), provenance_of(trained.values()))
    table["left_out"] = left_out(settings)
    table["stacks"] = {training.key: measure(training, trained[training.key]) for training in planned}
    return conclude(table, claims, draw, results, progress)
