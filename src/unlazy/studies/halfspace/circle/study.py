"""The circle study end to end: train, measure, judge, draw."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from unlazy import plots, runtime
from unlazy.runtime import require
from unlazy.store import write_file
from unlazy.studies.halfspace.circle.claims import claims
from unlazy.studies.halfspace.circle.figures import draw
from unlazy.studies.halfspace.circle.measure import measure
from unlazy.studies.halfspace.circle.settings import SCALES, Settings, stacks
from unlazy.studies.halfspace.circle.train import run
from unlazy.studies.registry import check_scale

Progress = Callable[[str, int, int], None]


def settings_for(scale: str, seeds: int | None) -> Settings:
    """The settings of a scale, with another number of seeds if one is given."""
    settings = SCALES[check_scale(scale)]
    if seeds is None:
        return settings
    require(seeds >= 1, f"seeds must be at least 1, got {seeds}.")
    return replace(settings, seeds=seeds)


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
    table: dict[str, Any] = {
        "study": "circle",
        "scale": scale,
        "settings": settings.to_dict(),
        "provenance": common_provenance([run.header["provenance"] for run in trained.values()]),
        "stacks": {},
    }
    for number, stack in enumerate(stacks(settings), 1):
        table["stacks"][stack.key] = measure(stack, trained[stack.key])
        progress("measuring", number, len(trained))
    table["claims"] = claims(table)
    write_file(results / "circle" / f"{scale}.json", (json.dumps(table, allow_nan=False) + "\n").encode())
    figures = draw(settings, trained)
    for number, (name, figure) in enumerate(figures.items(), 1):
        plots.save(figure, results / "circle" / scale / name)
        progress("drawing", number, len(figures))
    return table


def common_provenance(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What made a set of runs: shared facts once, facts that differ as a sorted list, the earliest start."""
    merged: dict[str, Any] = {"started": min(run["started"] for run in runs)}
    for key in runs[0].keys() - {"started"}:
        values = sorted({run[key] for run in runs}, key=str)
        merged[key] = values[0] if len(values) == 1 else values
    return dict(sorted(merged.items())) | {"judged_by_code": runtime.code_sha256()}
