"""What every study leaves behind: one table with settings, provenance and judged claims, and figures beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unlazy import plots, runtime
from unlazy.store import write_file

Table = dict[str, Any]


def save(results: Path, table: Table, figures: Mapping[str, Any]) -> Table:
    """Write ``results/STUDY/SCALE.json`` and ``results/STUDY/SCALE/FIGURE.png|pdf``; returns the table."""
    folder = results / table["study"]
    write_file(folder / f"{table['scale']}.json", (json.dumps(table, allow_nan=False) + "\n").encode())
    for name, figure in figures.items():
        plots.save(figure, folder / table["scale"] / name)
    return table


def table_of(study: str, scale: str, settings: Mapping[str, Any], provenance: Mapping[str, Any]) -> Table:
    """The frame of a result table; the study adds its measurements and ``claims``."""
    made_by = dict(provenance)
    made_by.setdefault("judged_by_code", runtime.code_sha256())
    return {"study": study, "scale": scale, "settings": dict(settings), "provenance": made_by}


def common_provenance(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What made a set of runs: shared facts once, facts that differ as a sorted list, the earliest start."""
    merged: dict[str, Any] = {"started": min(run["started"] for run in runs)}
    for key in runs[0].keys() - {"started"}:
        values = sorted({run[key] for run in runs}, key=str)
        merged[key] = values[0] if len(values) == 1 else values
    return dict(sorted(merged.items()))
