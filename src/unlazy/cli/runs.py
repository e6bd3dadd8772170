"""``unlazy runs``: prints the list of runs, one run, and a comparison of two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import typer

from unlazy.runtime import StoreError
from unlazy.store import Run, find_runs

CELL = 30  # width of a setting in a comparison, in characters
LONGEST_NAME = 256  # of a file; asking for a longer one is an error


def print_list(root: Path, study: str | None, state: str | None, as_json: bool) -> None:
    """Print one line per run, oldest first; damaged folders go to stderr."""
    runs, broken = find_runs(root)
    rows = []
    for run in runs:
        try:
            rows.append(run_row(run))
        except StoreError as error:
            broken.append(error)
    every = len(rows)
    rows = [row for row in rows if study in (None, row["study"]) and state in (None, row["state"])]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    elif every and not rows:
        typer.echo(f"none of the {every} runs below {root} is of that study and state.")
    elif not rows and not broken:
        typer.echo(
            f"no runs below {root}; `unlazy reproduce circle` makes some, and so does a Scope around your own loop."
        )
    else:
        typer.echo(f"{'id':12}  {'state':11}  {'members':>7}  {'step':>8}  {'loss':>9}  {'study':10}  folder")
        for row in rows:
            loss = "" if row["loss"] is None else f"{row['loss']:.3g}"
            typer.echo(
                f"{row['id']:12}  {row['state']:11}  {row['members']:7d}  {row['step']:8d}  {loss:>9}  "
                f"{row['study'] or '':10}  {row['folder']}"
            )
    for damage in broken:
        typer.echo(f"damaged: {damage}", err=True)


def find_run(name: str, root: Path) -> Run:
    """The run in the folder ``name``, or the only one below ``root`` whose id begins with ``name``."""
    if "/" in name or (len(name) < LONGEST_NAME and Path(name).exists()):
        return Run(name)
    found = [run for run in find_runs(root)[0] if run.id.startswith(name)]
    if len(found) != 1:
        many = f"{len(found)} runs below {root} have ids that begin with {name!r}"
        raise StoreError(f"{name} is not a run folder, and {many}. `unlazy runs --root {root}` lists them.")
    return found[0]


def print_run(run: Run) -> None:
    """Print state and versions of a run, and the last value of every scalar (median over members)."""
    for name, value in run_row(run).items():
        if value is not None:
            typer.echo(f"{name:12} {value}")
    for name in ("unlazy", "torch", "threads", "dtype", "started"):
        typer.echo(f"{name:12} {run.header['provenance'].get(name, 'unknown')}")
    for name, value in last_medians(run).items():
        typer.echo(f"{name:20} {value:.6g}")


def print_comparison(a: Run, b: Run) -> None:
    """Print the settings that differ, then the last value of every common scalar (median over members)."""
    typer.echo(f"{'':32} {a.folder.name:>{CELL}} {b.folder.name:>{CELL}}")
    flat_a, flat_b = (flatten_settings(run.header["recipe"]) for run in (a, b))
    for side, run in ((flat_a, a), (flat_b, b)):  # one line per setting of the members, not one per member
        for key in [key for key in side if key.startswith("members[")]:
            del side[key]
        for name in ("seed", "lr", "beta"):
            values = {str(member.get(name)) for member in run.members}
            side[f"members.{name}"] = values.pop() if len(values) == 1 else f"{len(values)} values"
    for key in sorted(flat_a.keys() | flat_b.keys()):
        left, right = flat_a.get(key, "-"), flat_b.get(key, "-")
        if left != right and not key.startswith("measures"):
            left, right = shorten_pair(left, right)
            typer.echo(f"{key:32} {left:>{CELL}} {right:>{CELL}}")
    medians_a, medians_b = last_medians(a), last_medians(b)
    for name in sorted(medians_a.keys() & medians_b.keys()):
        typer.echo(f"{name:32} {medians_a[name]:{CELL}.6g} {medians_b[name]:{CELL}.6g}")


def shorten_pair(left: Any, right: Any) -> tuple[str, str]:
    """Two different values, each cut to ``CELL`` characters around the first place where they differ."""
    texts = [" ".join(str(value).split()) for value in (left, right)]
    first = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    start = first - CELL // 3 if first >= CELL - 2 else 0
    parts = [f"…{text[start:]}" if start else text for text in texts]
    short = [text if len(text) <= CELL else f"{text[: CELL - 1]}…" for text in parts]
    return short[0], short[1]


def run_row(run: Run) -> dict[str, Any]:
    """The columns of one run in the list."""
    status = run.status()
    return {
        "id": run.id,
        "state": status["state"],
        "members": len(run.members),
        "step": max([status["step"], *(line.step for line in run.lines)]),
        "loss": last_medians(run).get("loss"),
        "study": run.header["study"],
        "scale": run.header["scale"],
        "folder": str(run.folder),
        "error": status["error"],
    }


def last_medians(run: Run) -> dict[str, float]:
    """Median over members of each scalar in the last measurement that has it."""
    latest: dict[str, list[float | None]] = {}
    for line in run.lines:
        latest |= line.scalars
    numbers = {name: np.array(values, dtype=np.float64) for name, values in latest.items()}
    return {name: float(np.nanmedian(values)) for name, values in numbers.items() if not np.isnan(values).all()}


def flatten_settings(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings as ``a.b.c: value``."""
    if isinstance(value, Mapping):
        pairs = [flatten_settings(inner, f"{prefix}.{key}" if prefix else str(key)) for key, inner in value.items()]
    elif isinstance(value, list) and value and isinstance(value[0], Mapping | list):
        pairs = [flatten_settings(inner, f"{prefix}[{index}]") for index, inner in enumerate(value)]
    else:
        return {prefix: value}
    return {key: inner for pair in pairs for key, inner in pair.items()}
