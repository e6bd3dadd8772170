"""Features finished, end to end: train, copy, retrain, measure, judge, draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from unlazy.store import Run
from unlazy.studies.halfspace.finished.claims import claims
from unlazy.studies.halfspace.finished.figures import draw
from unlazy.studies.halfspace.finished.measure import measure
from unlazy.studies.halfspace.finished.settings import SCALES, STUDY, Copies, Settings, all_copies, networks
from unlazy.studies.halfspace.moments import train_all
from unlazy.studies.registry import settings_of
from unlazy.studies.results import common_provenance, save, table_of
from unlazy.training.sweep import sweep

Progress = Callable[[str, int, int], None]


def settings_for(scale: str, seeds: int | None) -> Settings:
    """The settings of a scale, with another number of seeds if one is given."""
    return settings_of(SCALES, scale, seeds)


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Train what is missing under ``runs``, then write ``results/features-finished/SCALE.json`` and its figures."""
    settings = settings_for(scale, seeds)
    trained = train_all(networks(settings), runs, scale, workers, progress)
    todo = all_copies(settings)

    def tick() -> None:
        progress("retraining", sum((copies.folder(runs) / "status.json").exists() for copies in todo), len(todo))

    sweep(Copies.retrain, [(copies, runs, scale) for copies in todo], workers, tick)
    headers = [run.header["provenance"] for run in trained.values()]
    headers += [Run(copies.folder(runs)).header["provenance"] for copies in todo]
    table = table_of(STUDY, scale, settings.to_dict(), common_provenance(headers)) | {"copies": {}}
    for number, copies in enumerate(todo, 1):
        table["copies"][copies.key] = measure(copies, runs)
        progress("measuring", number, len(todo))
    table["claims"] = claims(table)
    save(results, table, draw(table))
    return table
