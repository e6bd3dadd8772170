"""Calibration: trains networks beside their linearised twins, fits the verdict's thresholds, scores them on unseen ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unlazy.claims.verdict import Row
from unlazy.scope.readings import Readings
from unlazy.scope.thresholds import FILE, Thresholds
from unlazy.scope.verdict import judge
from unlazy.store import write_file
from unlazy.studies.registry import settings_of
from unlazy.studies.results import Progress, Table, common_provenance, conclude, plain, table_of
from unlazy.studies.scope.calibration.cells import measure_cell
from unlazy.studies.scope.calibration.figures import figures
from unlazy.studies.scope.calibration.fitting import alone, fit_thresholds, score, told, truth
from unlazy.studies.scope.calibration.settings import FITTED, LAZY_GAP, RICH_GAP, SCALES, SCORED, Cell
from unlazy.studies.scope.calibration.widths import exponents, measure_widths
from unlazy.training.sweep import sweep

NAME = "calibration"
ROLES = ("fit", "score", "between")
ORDER = ("lazy", "mixed", "rich")
REPOSITORY = FILE.parents[3] / "results"


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Measure what is missing, fit, score, draw. In a checkout the paper scale renews the package's thresholds."""
    settings = settings_of(SCALES, scale, seeds)
    folder, cells = runs / NAME / "cells", list(settings.cells())
    done = 0

    def tick() -> None:
        nonlocal done
        done = min(done + 1, len(cells))
        progress("trainings and their linearised twins", done, len(cells))

    sweep(measure_cell, [(cell, folder) for cell in cells], workers, tick)
    rows = [row_of(cell, measure_cell(cell, folder)) for cell in cells]
    progress("kernel movement against width", 0, 1)
    widths = measure_widths(settings, folder)
    progress("kernel movement against width", 1, 1)
    made_by = [row.pop("provenance") for row in rows]
    table = table_of(NAME, scale, asdict(settings), common_provenance([*made_by, widths.pop("provenance")]))
    table |= {"words": {"lazy_gap": LAZY_GAP, "rich_gap": RICH_GAP}, "fitted": FITTED, "scored": SCORED}
    table |= {"rows": rows, "widths": widths | fitted_exponents(widths)}
    table |= judged(rows, scale)
    conclude(table, claims, figures, results, progress)
    text = thresholds_text(table)
    if text is not None:
        write_file(results / NAME / "thresholds.json", text)
        if scale == "paper" and results.resolve() == REPOSITORY.resolve():
            write_file(FILE, text)
    return table


def claims(table: Mapping[str, Any]) -> list[Row]:
    """None: the papers have no numbered claim about verdicts."""
    return []


def row_of(cell: Cell, measured: Mapping[str, Any]) -> dict[str, Any]:
    """What the table keeps of a cell, with five digits; curves stay in the run."""
    kept = dict(measured["readings"], curves={}, groups={})
    row = {name: measured[name] for name in ("gap", "size", "linearised_loss", "learning_rate")}
    row |= {"cell": cell.to_dict(), "role": cell.role, "readings": kept}
    return {**plain(row), "provenance": measured["provenance"]}


def judged(rows: Sequence[Mapping[str, Any]], scale: str) -> Table:
    """Thresholds and scores; empty where the cells are too few to fit anything."""
    fitted = {truth(row) for row in told(rows, "fit")}
    if len(told(rows, "fit")) < 4 or not {"lazy", "rich"} <= fitted:
        return {"thresholds": None, "scores": {}, "alone": {}, "alpha_sweep": [], "other_way_round": None}
    limits = fit_thresholds(rows, scale)
    by_role = {role: [row for row in rows if row["role"] == role] for role in ROLES}
    exchanged = {"fit": "score", "score": "fit", "between": "between"}
    turned = [{**row, "role": exchanged[row["role"]]} for row in rows]
    back = None
    if {"lazy", "rich"} <= {truth(row) for row in told(turned, "fit")}:
        back = score([row for row in turned if row["role"] == "score"], fit_thresholds(turned, scale))
    return {
        "thresholds": limits.to_dict(),
        "scores": {role: score(some, limits) for role, some in by_role.items() if some},
        "alone": {role: alone(told(some), limits) for role, some in by_role.items() if some},
        "alpha_sweep": alpha_sweep(rows, limits),
        "other_way_round": back,
    }


def alpha_sweep(rows: Sequence[Mapping[str, Any]], limits: Thresholds) -> list[dict[str, Any]]:
    """Verdicts against the output scale, and whether they only ever go from rich to lazy as it grows."""
    sweeps: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        cell = row["cell"]
        if cell["alpha"] is not None:
            sweeps.setdefault((cell["net"], cell["data"], cell["seed"]), []).append(row)
    found = []
    for (net, data, seed), some in sweeps.items():
        ordered = sorted(some, key=lambda row: float(row["cell"]["alpha"]))
        labels = [judge(Readings.from_dict(row["readings"]), limits).label for row in ordered]
        ranks = [ORDER.index(label) for label in labels if label in ORDER]
        gaps = [row["gap"] for row in ordered]
        found.append(
            {
                "net": net,
                "data": data,
                "seed": seed,
                "role": ordered[0]["role"],
                "alphas": [row["cell"]["alpha"] for row in ordered],
                "gaps": gaps,
                "labels": labels,
                "truths": [truth(row) for row in ordered],
                "monotone": ranks == sorted(ranks, reverse=True),
                "rich_to_lazy": bool(ranks) and ranks[0] == 2 and ranks[-1] == 0,
            }
        )
    return found


def fitted_exponents(widths: Mapping[str, Any]) -> dict[str, Any]:
    """By parametrisation and kind of movement."""
    kinds = ("change", "distance")
    fits = {name: {kind: exponents(widths["widths"], widths[name][kind]) for kind in kinds} for name in ("ntk", "mup")}
    return {"exponents": fits}


def thresholds_text(table: Mapping[str, Any]) -> bytes | None:
    """The thresholds file that a table gives."""
    if table["thresholds"] is None:
        return None
    return (json.dumps(table["thresholds"], indent=2) + "\n").encode()
