"""Features finished, end to end: train, copy, retrain, measure, judge, draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unlazy.store import Run
from unlazy.studies.halfspace.finished.claims import claims
from unlazy.studies.halfspace.finished.figures import draw
from unlazy.studies.halfspace.finished.measure import measure
from unlazy.studies.halfspace.finished.settings import SCALES, STUDY, Copies, all_copies
from unlazy.studies.halfspace.moments import begun, train_all
from unlazy.studies.registry import settings_of
from unlazy.studies.results import Progress, conclude, provenance_of, table_of
from unlazy.training.sweep import sweep


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Train what is missing under ``runs``, then write ``results/features-finished/SCALE.json`` and its figures."""
    settings = settings_of(SCALES, scale, seeds)
    trained = train_all(settings.networks(), runs, scale, workers, progress)
    todo = all_copies(settings)
    folders = [copies.folder(runs) for copies in todo]
    jobs = [(copies, runs, scale) for copies in todo]
    sweep(Copies.retrain, jobs, workers, lambda: progress("retraining", begun(folders), len(todo)))
    made_by = provenance_of([*trained.values(), *map(Run, folders)])
    table = table_of(STUDY, scale, settings.to_dict(), made_by) | {"copies": {}}
    for number, copies in enumerate(todo, 1):
        table["copies"][copies.key] = measure(copies, runs)
        progress("measuring", number, len(todo))
    return conclude(table, claims, draw, results, progress)
