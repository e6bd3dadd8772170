"""The zoo end to end: every kind of data, every size, every seed; samples to 90 %; two figures. It judges no claim of a paper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unlazy.claims.verdict import Row, summary
from unlazy.studies.emergence.common import Job, Values, run_jobs
from unlazy.studies.emergence.zoo.figures import LEARNERS, draw, grid_of
from unlazy.studies.emergence.zoo.measure import ANIMALS, SCALES, Settings, animal, phase, relevant
from unlazy.studies.emergence.zoo.tuned import kernel
from unlazy.studies.registry import settings_of
from unlazy.studies.results import Progress, conclude, table_of

ENOUGH = 0.9  # the accuracy whose cost in samples is asked for


def seeds_of(settings: Settings, name: str) -> int:
    """How many seeds this kind of data has."""
    return settings.seeds + (settings.hierarchy_seeds if ANIMALS[name].kind == "hierarchy" else 0)


def jobs(settings: Settings, folder: Path) -> list[Job]:
    """Every cell: kinds of data, first for the learners, then for the tuned kernel; the phase diagram; ``relevant``."""
    cells = [
        Job(measure, settings, {"name": name, "n": n, "seed": seed}, folder)
        for measure in (animal, kernel)
        for name in ANIMALS
        for n in settings.sizes
        for seed in range(seeds_of(settings, name))
    ]
    cells += [
        Job(phase, settings, {"order": order, "gamma": gamma, "n": n, "seed": seed}, folder)
        for order in settings.phase_orders
        for gamma in settings.phase_gammas
        for n in settings.phase_sizes
        for seed in range(settings.phase_seeds)
    ]
    cells += [
        Job(relevant, settings, {"n": settings.sizes[-1], "seed": seed}, folder) for seed in range(settings.seeds)
    ]
    return cells


def arranged(settings: Settings, values: list[Values]) -> dict[str, Any]:
    """``animals[name][size][seed]``, ``phases[k][gamma][size][seed]`` and ``relevant[seed]``, in the order of the jobs."""
    rest = iter(values)

    def take(count: int) -> list[Values]:
        return [next(rest) for _ in range(count)]

    learned, tuned = (
        {name: [take(seeds_of(settings, name)) for _ in settings.sizes] for name in ANIMALS} for _ in range(2)
    )
    animals = {
        name: [
            [one | other for one, other in zip(*pair, strict=True)]
            for pair in zip(learned[name], tuned[name], strict=True)
        ]
        for name in ANIMALS
    }
    phases = {
        str(order): [[take(settings.phase_seeds) for _ in settings.phase_sizes] for _ in settings.phase_gammas]
        for order in settings.phase_orders
    }
    return {"animals": animals, "phases": phases, "relevant": list(rest)}


def samples_needed(table: Mapping[str, Any], name: str, learner: str) -> list[float | None]:
    """Per seed the least size tried from which on the test accuracy stays at 90 % or more; None: none of them."""
    reached = grid_of(table, name, f"{learner}_accuracy") >= ENOUGH
    stays = np.logical_and.accumulate(reached[::-1], axis=0)[::-1]
    sizes = table["settings"]["sizes"]
    return [float(sizes[int(column.argmax())]) if column.any() else None for column in stays.T]


def overview(table: Mapping[str, Any]) -> dict[str, dict[str, Row]]:
    """By kind of data and learner: samples to 90 % per seed, accuracy and share of the subspace found at the largest size."""
    found: dict[str, dict[str, Row]] = {}
    for name in table["animals"]:
        found[name] = {}
        for learner in LEARNERS:
            best, part = (grid_of(table, name, f"{learner}_{what}")[-1] for what in ("accuracy", "recovered"))
            found[name][learner] = {
                "samples_to_90": samples_needed(table, name, learner),
                "accuracy": summary("test accuracy at the largest size", best),
                "recovered": summary("hidden subspace found at the largest size", part),
            }
    return found


def claims(table: Mapping[str, Any]) -> list[Row]:
    """None: the papers have no numbered claim about the zoo."""
    return []


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Measure what is missing under ``runs``, then write ``results/zoo/SCALE.json`` and its figures."""
    settings = settings_of(SCALES, scale, seeds)
    values, made_by = run_jobs(jobs(settings, runs / "zoo"), workers, progress)
    table = table_of("zoo", scale, settings.to_dict(), made_by) | arranged(settings, values)
    table["overview"] = overview(table)
    return conclude(table, claims, draw, results, progress)
