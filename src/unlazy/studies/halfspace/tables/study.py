"""Both tables end to end: run cells, judge, draw.

The cells of the paper's size want a GPU, judging and drawing do not. Where they are different machines, run

    python -m unlazy.studies.halfspace.tables.study --table 2 --device cuda --data DATA --results RESULTS --seconds 600

on the first as often as you like (it needs neither matplotlib nor the command line's packages, and skips the cells that
``RESULTS/table2/paper-measured.json`` already has; with ``--runs`` a killed training goes on from its last state), and bring
that file to the results folder of the second: ``reproduce("paper", ...)`` judges what is there. Cells that have not been run
leave their claims open.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unlazy.data.images import load_images
from unlazy.runtime import InputError, require
from unlazy.studies.halfspace.tables.claims import claims
from unlazy.studies.halfspace.tables.dynamics import do_all, dynamics_of, fixed_images
from unlazy.studies.halfspace.tables.figures import draw, normals
from unlazy.studies.halfspace.tables.settings import SCALES, Settings, available
from unlazy.studies.halfspace.tables.train import load, not_kept, run
from unlazy.studies.registry import check_scale
from unlazy.studies.results import Progress, common_provenance, conclude, table_of


def settings_for(
    scale: str, table: int, seeds: int | None = None, epochs: int | None = None, folder: Path | None = None
) -> Settings:
    """The settings of a scale, with other numbers of seeds or epochs if given; desk makes do with digits."""
    settings = SCALES[check_scale(scale), table]
    if scale == "desk":
        settings = available(settings, folder)
    if seeds is not None:
        settings = replace(settings, seeds=seeds)
    if epochs is not None:
        require(epochs >= 1, f"epochs must be at least 1, got {epochs}.")
        settings = replace(settings, epochs=dict.fromkeys(settings.layouts, epochs))
    return settings


def reproduce_table(
    table: int,
    scale: str,
    *,
    runs: Path,
    results: Path,
    seeds: int | None = None,
    workers: int = 1,
    progress: Progress,
) -> dict[str, Any]:
    """Run what is missing (at paper scale only on a GPU), then write ``results/tableN/SCALE.json`` and its figure.

    At paper scale the cells kept in ``results/tableN/paper-measured.json`` are judged, however many there are.
    """
    settings = settings_for(scale, table, seeds)
    path = measured_file(results if scale == "paper" else runs, table, scale)
    if scale == "paper" and path.exists():
        cells = load(path)["cells"]
    elif scale == "paper" and not torch.cuda.is_available():
        raise InputError(
            f"the paper scale of table {table} wants a GPU; run it on one and bring the measured cells to {path}."
        )
    else:
        device = "cuda" if scale == "paper" else "cpu"
        counted = partial(progress, "networks")
        cells = run(settings, path, scale, device=device, runs=runs / settings.study, progress=counted)
    made_by = common_provenance([cell["provenance"] for cell in cells])
    made = table_of(settings.study, scale, settings.to_dict(), made_by) | {"cells": cells}
    if table == 1:
        made["dynamics"] = followed(settings, scale, runs / settings.study, results / settings.study, workers)
        made["cooled"] = kept_table(results / settings.study / f"{scale}-cooled.json")
    kept = results / settings.study / f"{scale}-normals.npz"
    return conclude(made, claims, lambda table: draw(table) | _normals(settings.study, kept), results, progress)


def _normals(study: str, kept: Path) -> dict[str, Any]:
    """The figure of half-space normals, where they were kept."""
    if not kept.exists():
        return {}
    with np.load(kept) as pictures:
        return {f"{study}_normals": normals(dict(pictures))}


def followed(settings: Settings, scale: str, runs: Path, results: Path, workers: int) -> dict[str, Any] | None:
    """Kernels along training: at paper scale as measured before, else from the run folders; none where there are neither."""
    kept = results / f"{scale}-dynamics.json"
    if scale == "paper":
        return kept_table(kept)
    folders = sorted(path.parent for path in runs.glob("*/run.json"))
    images = fixed_images(load_images(settings.data[0]).take(slice(settings.images)), settings.kernel_images)
    do_all(folders, images, workers)
    return dynamics_of(folders, images)


def changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """The same settings but for some, given as plain JSON values."""
    unknown = sorted(set(changes) - {field.name for field in fields(Settings)})
    require(not unknown, f"unknown settings: {', '.join(unknown)}.")
    made: dict[str, Any] = {name: tuple(new) if isinstance(new, list) else new for name, new in changes.items()}
    return replace(settings, **made)


def kept_table(path: Path) -> dict[str, Any] | None:
    """What was measured by a call of its own; none where it was not."""
    return dict(json.loads(path.read_text())) if path.exists() else None


def measured_file(folder: Path, table: int, scale: str) -> Path:
    """Where measured cells are kept."""
    return folder / f"table{table}" / f"{scale}-measured.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run cells only, and keep them for ``reproduce``."""
    parser = argparse.ArgumentParser(description="Run cells of Table 1 or 2; judge and draw them elsewhere.")
    parser.add_argument("--table", type=int, required=True, choices=(1, 2))
    parser.add_argument("--scale", default="paper", choices=("smoke", "desk", "paper"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, default=None, help="folder of the data sets")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument(
        "--runs", type=Path, default=None, help="folder of run folders, from which a killed call goes on"
    )
    parser.add_argument("--weights", type=Path, default=None, help="keep trained networks here")
    parser.add_argument(
        "--settings", type=Path, default=None, help="JSON file of settings to change, such as lr, looks or hard_beta"
    )
    parser.add_argument("--seconds", type=float, default=None, help="start no cell that would end later than this")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--epochs", type=int, default=None, help="of every network, in place of the scale's")
    parser.add_argument(
        "--only", default="", help="words among data, layout, model, recipe, seed; commas between, | for alternatives"
    )
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel by itself")
    chosen = parser.parse_args(arguments)
    path = measured_file(chosen.results, chosen.table, chosen.scale)
    settings = settings_for(chosen.scale, chosen.table, chosen.seeds, chosen.epochs, chosen.data)
    if chosen.settings is not None:
        settings = changed(settings, json.loads(chosen.settings.read_text()))
    cells = run(
        settings,
        path,
        chosen.scale,
        device=chosen.device,
        data=chosen.data,
        runs=chosen.runs,
        weights=chosen.weights,
        seconds=chosen.seconds,
        only=chosen.only,
        graphs=not chosen.no_graphs,
        tell=_tell,
        follow=_tell,
    )
    _tell(f"{len(cells)} cells kept in {path}")
    missing = not_kept(settings, cells, chosen.only, chosen.data)
    if missing and chosen.seconds is None:
        raise SystemExit(f"not kept: {', '.join(missing)}.")


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
