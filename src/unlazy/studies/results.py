"""What every study leaves behind: one table with settings, provenance and judged claims, and figures beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy import plots, runtime
from unlazy.claims.catalogue import by_id
from unlazy.claims.verdict import Part, Row, claim_row
from unlazy.store import Run, write_file

Table = dict[str, Any]
Progress = Callable[[str, int, int], None]
"""Told what is going on, how much of it is done, and how much there is."""


def save(results: Path, table: Table, figures: Mapping[str, Any]) -> Table:
    """Write ``results/STUDY/SCALE.json`` and ``results/STUDY/SCALE/FIGURE.png|pdf``; returns the table."""
    folder = results / table["study"]
    write_file(folder / f"{table['scale']}.json", (json.dumps(table, allow_nan=False) + "\n").encode())
    for name, figure in figures.items():
        plots.save(figure, folder / table["scale"] / name)
    return table


def conclude(
    table: Table,
    claims: Callable[[Table], list[Row]],
    draw: Callable[[Table], Mapping[str, Any]],
    results: Path,
    progress: Progress,
) -> Table:
    """How a study ends: its claims judged from the measured table, its figures drawn, both saved; returns the table."""
    table["claims"] = claims(table)
    progress("drawing", 0, 1)
    with plots.style():
        save(results, table, draw(table))
    progress("drawing", 1, 1)
    return table


def table_of(study: str, scale: str, settings: Mapping[str, Any], provenance: Mapping[str, Any]) -> Table:
    """The frame of a result table; the study adds its measurements and ``claims``."""
    made_by = dict(provenance)
    made_by.setdefault("judged_by_code", runtime.code_sha256())
    return {"study": study, "scale": scale, "settings": dict(settings), "provenance": made_by}


def judged_row(
    table: Mapping[str, Any],
    claim: str,
    parts: Sequence[Part],
    *,
    why: str,
    controls: Sequence[Row] = (),
    figure: str | None = None,
    untold: str | None = None,
) -> Row:
    """The scorecard row of a claim from a study's table; ``figure`` is its name there. The smoke scale judges nothing."""
    scale = table["scale"]
    return claim_row(
        claim,
        [] if scale == "smoke" else parts,
        scale=scale,
        settings=table["settings"],
        provenance=table["provenance"],
        why=why,
        controls=controls,
        figure=figure and f"results/{by_id(claim).study}/{scale}/{figure}.png",
        untold=untold,
    )


def common_provenance(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What made a set of runs: shared facts once, facts that differ as a sorted list, the earliest start."""
    merged: dict[str, Any] = {"started": min(run["started"] for run in runs)}
    for key in runs[0].keys() - {"started"}:
        values = sorted({run[key] for run in runs}, key=str)
        merged[key] = values[0] if len(values) == 1 else values
    return dict(sorted(merged.items()))


def provenance_of(runs: Iterable[Run]) -> dict[str, Any]:
    """The same of recorded runs."""
    return common_provenance([run.header["provenance"] for run in runs])


def plain(entry: Any, digits: int = 5) -> Any:
    """Numbers as JSON with a few digits, however nested; ``None`` where there is no number."""
    if isinstance(entry, np.ndarray):
        return plain(entry.astype(np.float64).tolist(), digits)
    if isinstance(entry, Mapping):
        return {name: plain(value, digits) for name, value in entry.items()}
    if isinstance(entry, list | tuple):
        return [plain(value, digits) for value in entry]
    if isinstance(entry, float):
        return float(f"{entry:.{digits}g}") if np.isfinite(entry) else None
    return entry


def numbers(values: Any) -> NDArray[np.float64]:
    """The inverse of :func:`plain` for an array: ``None`` becomes not-a-number."""
    return np.array(values, dtype=np.float64)
