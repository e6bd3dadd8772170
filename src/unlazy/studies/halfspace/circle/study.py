"""The circle study end to end: train, measure, judge, draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from unlazy.studies.halfspace.circle.claims import claims
from unlazy.studies.halfspace.circle.figures import draw
from unlazy.studies.halfspace.circle.measure import measure
from unlazy.studies.halfspace.circle.settings import SCALES, Settings, stacks
from unlazy.studies.halfspace.circle.train import run
from unlazy.studies.registry import settings_of
from unlazy.studies.results import common_provenance, save, table_of

Progress = Callable[[str, int, int], None]


def settings_for(scale: str, seeds: int | None) -> Settings:
    """The settings of a scale, with another number of seeds if one is given."""
    return settings_of(SCALES, scale, seeds)


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Train what is missing under ``runs``, then write ``results/circle/SCALE.json`` and its figures."""
    settings = settings_for(scale, seeds)
    trained = run(
        settings,
        runs / "circle",
        scale,
        workers=workers,
        progress=lambda done, total: progress("epochs", done, total),
    )
    provenance = common_provenance([run.header["provenance"] for run in trained.values()])
    table = table_of("circle", scale, settings.to_dict(), provenance) | {"stacks": {}}
    for number, stack in enumerate(stacks(settings), 1):
        table["stacks"][stack.key] = measure(stack, trained[stack.key])
        progress("measuring", number, len(trained))
    table["claims"] = claims(table)
    progress("drawing", 0, 1)
    save(results, table, draw(settings, trained))
    progress("drawing", 1, 1)
    return table
