"""The failure studies end to end: train, measure, judge, draw."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from unlazy.runtime import require
from unlazy.studies.halfspace.failures import frequency, small_data, xor
from unlazy.studies.halfspace.failures.claims import claims
from unlazy.studies.halfspace.failures.figures import draw
from unlazy.studies.halfspace.failures.settings import FOREST, SCALES, Settings
from unlazy.studies.registry import check_scale
from unlazy.studies.results import Progress, conclude, provenance_of, table_of
from unlazy.studies.trainings import train_all


def settings_for(scale: str, seeds: int | None) -> Settings:
    """The settings of a scale, with another number of seeds (for small data: of draws) if one is given."""
    settings = SCALES[check_scale(scale)]
    if seeds is None:
        return settings
    require(seeds >= 1, f"seeds must be at least 1, got {seeds}.")
    return Settings(
        replace(settings.frequency, seeds=seeds),
        replace(settings.interactions, seeds=seeds),
        replace(settings.small_data, draws=seeds, seeds=1),
    )


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Train what is missing under ``runs``, then write ``results/failures/SCALE.json`` and its figures."""
    settings = settings_for(scale, seeds)
    circles, interactions, few = settings.frequency, settings.interactions, settings.small_data
    trainings = frequency.trainings(circles) + xor.trainings(interactions) + small_data.trainings(few)
    counted = partial(progress, "trainings")
    trained = train_all(trainings, runs / "failures", "failures", scale, workers=workers, progress=counted)
    table = table_of("failures", scale, settings.to_dict(), provenance_of(trained.values()))
    table["frequency"] = {
        (name := frequency.key(preset, width, arm)): frequency.measure(circles, preset, width, arm, trained[name])
        for preset in circles.presets
        for width in circles.widths
        for arm in circles.arms
    }
    table["xor"] = {
        (name := xor.key(law, n, kind)): xor.measure(interactions, trained[name])
        for law, n in interactions.problems
        for kind in interactions.kinds
    }
    for number, (law, n) in enumerate(interactions.problems, 1):
        table["xor"][xor.key(law, n, FOREST)] = xor.forest(interactions, law, n)
        progress("forests", number, len(interactions.problems))
    table["small_data"] = small_data.measure(few, trained)
    table["left_out"] = small_data.left_out(few)
    return conclude(table, claims, draw, results, progress)
