"""The circle study end to end: train, measure, judge, draw."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from unlazy.studies.halfspace.circle.claims import claims
from unlazy.studies.halfspace.circle.figures import draw
from unlazy.studies.halfspace.circle.measure import measure
from unlazy.studies.halfspace.circle.settings import SCALES, stacks
from unlazy.studies.halfspace.circle.train import run
from unlazy.studies.registry import settings_of
from unlazy.studies.results import Progress, conclude, provenance_of, table_of


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Train what is missing under ``runs``, then write ``results/circle/SCALE.json`` and its figures."""
    settings = settings_of(SCALES, scale, seeds)
    trained = run(settings, runs / "circle", scale, workers=workers, progress=partial(progress, "epochs"))
    table = table_of("circle", scale, settings.to_dict(), provenance_of(trained.values())) | {"stacks": {}}
    for number, stack in enumerate(stacks(settings), 1):
        table["stacks"][stack.key] = measure(stack, trained[stack.key])
        progress("measuring", number, len(trained))
    return conclude(table, claims, lambda _: draw(settings, trained), results, progress)
