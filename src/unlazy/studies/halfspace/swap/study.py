"""The swap study end to end: train, swap, train on, measure, judge, draw."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from unlazy.studies.halfspace.swap.claims import claims
from unlazy.studies.halfspace.swap.figures import draw
from unlazy.studies.halfspace.swap.measure import key, measure, run
from unlazy.studies.halfspace.swap.settings import SCALES
from unlazy.studies.registry import settings_of
from unlazy.studies.results import Progress, conclude, provenance_of, table_of


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Train what is missing under ``runs``, then write ``results/swap/SCALE.json`` and its figures."""
    settings = settings_of(SCALES, scale, seeds)
    first, second = run(settings, runs / "swap", scale, workers=workers, progress=partial(progress, "trainings"))
    table = table_of("swap", scale, settings.to_dict(), provenance_of([*first.values(), *second.values()]))
    table["stacks"] = {
        (name := key(preset, arm)): measure(settings, first[f"first-{name}"], second[f"second-{name}"])
        for preset in settings.presets
        for arm in settings.arms
    }
    return conclude(table, claims, lambda _: draw(settings, first, second), results, progress)
