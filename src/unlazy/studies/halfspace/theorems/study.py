"""The theorems study end to end: random networks, trained ones, worked examples; judge, draw."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

from unlazy.store import Run
from unlazy.studies.halfspace.theorems.claims import claims
from unlazy.studies.halfspace.theorems.figures import draw
from unlazy.studies.halfspace.theorems.measure import (
    law,
    law_on_random_networks,
    random_networks,
    regions,
    worked_examples,
)
from unlazy.studies.halfspace.theorems.settings import LAW_STACK, SCALES, Settings
from unlazy.studies.halfspace.theorems.train import train
from unlazy.studies.registry import settings_of
from unlazy.studies.results import Progress, conclude, plain, provenance_of, table_of


def settings_for(scale: str, seeds: int | None) -> Settings:
    """The settings of a scale; ``seeds`` sets the number of random networks of each size and of trainings."""
    return settings_of(SCALES, scale, seeds, "seeds", "trained")


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Train what is missing under ``runs``, then write ``results/theorems/SCALE.json`` and its figures."""
    settings = settings_for(scale, seeds)
    jobs = train(settings, runs / "theorems", scale, workers=workers, progress=partial(progress, "epochs"))
    looks, counter = len(jobs) * len(settings.looks) + len(settings.law_epochs), itertools.count(1)

    def looked() -> None:
        progress("measuring", next(counter), looks)

    table = table_of("theorems", scale, settings.to_dict(), provenance_of(Run(job.folder) for job in jobs))
    table["networks"] = random_networks(settings, partial(progress, "random networks"))
    table["examples"] = worked_examples(settings)
    table["regions"] = {job.stack.key: regions(job, looked) for job in jobs}
    (bias_free,) = [job for job in jobs if job.stack.key == LAW_STACK]
    table["law"] = {"stack": LAW_STACK} | law(bias_free, settings, looked)
    table["law_networks"] = law_on_random_networks(settings)
    return conclude(plain(table, digits=6), claims, draw, results, progress)
