"""The swap study end to end: train, swap, train on, measure, judge, draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from unlazy.studies.halfspace.swap.claims import claims
from unlazy.studies.halfspace.swap.figures import draw
from unlazy.studies.halfspace.swap.measure import key, measure, run
from unlazy.studies.halfspace.swap.settings import SCALES, Settings
from unlazy.studies.registry import settings_of
from unlazy.studies.results import common_provenance, save, table_of

Progress = Callable[[str, int, int], None]


def settings_for(scale: str, seeds: int | None) -> Settings:
    """The settings of a scale, with another number of seeds if one is given."""
    return settings_of(SCALES, scale, seeds)


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Train what is missing under ``runs``, then write ``results/swap/SCALE.json`` and its figures."""
    settings = settings_for(scale, seeds)
    first, second = run(
        settings,
        runs / "swap",
        scale,
        workers=workers,
        progress=lambda done, total: progress("trainings", done, total),
    )
    provenance = common_provenance([one.header["provenance"] for one in (*first.values(), *second.values())])
    table = table_of("swap", scale, settings.to_dict(), provenance)
    table["stacks"] = {
        (name := key(preset, arm)): measure(settings, first[f"first-{name}"], second[f"second-{name}"])
        for preset in settings.presets
        for arm in settings.arms
    }
    table["claims"] = claims(table)
    progress("drawing", 0, 1)
    save(results, table, draw(settings, first, second))
    progress("drawing", 1, 1)
    return table
