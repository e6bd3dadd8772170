"""Printing and moving data files: what there is, whether it is whole, how it gets here."""

from __future__ import annotations

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from unlazy.cli.progress import reporting
from unlazy.data.fetch import fetch
from unlazy.data.files import Check, bring_in, check_source, overall, remedies
from unlazy.data.sources import SOURCES, find_source
from unlazy.runtime import require

NOT_WHOLE = 1  # exit code: something is damaged or missing; 2 is for mistakes


def print_list(folder: Path, as_json: bool) -> None:
    """One line a data set: its state, the megabytes of its files, and where they are or how to get them."""
    rows = [_describe(name, folder) for name in SOURCES]
    installed = find_spec("sklearn") is not None
    where = "comes with scikit-learn" if installed else "pip install scikit-learn"
    rows.append({"name": "digits", "state": "present" if installed else "missing", "bytes": 0, "where": where})
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    typer.echo(f"{'name':14}  {'state':10}  {'size':>9}  where")
    for row in rows:
        typer.echo(f"{row['name']:14}  {row['state']:10}  {_size(row['bytes']):>9}  {row['where']}")
    typer.echo(f"\ndata folder: {folder} (UNLAZY_DATA names another)")


def _describe(name: str, folder: Path) -> dict[str, Any]:
    source = SOURCES[name]
    checks = check_source(source, folder)
    state = overall(checks)
    where = str(folder / source.folder) if state == "present" else " or ".join(remedies(source, folder))
    return {"name": name, "state": state, "bytes": sum(file.size for file in source.files), "where": where}


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count else ""


def fetch_one(name: str, folder: Path) -> None:
    """Download what is missing or damaged of one data set."""
    source = find_source(name)
    with reporting() as report:
        new = fetch(source, folder, report, say=lambda line: typer.echo(line, err=True))
    for path in new:
        typer.echo(f"fetched  {path}")
    typer.echo(f"{name} is whole in {folder / source.folder}{'' if new else '; there was nothing to fetch'}.")


def verify(name: str | None, folder: Path) -> None:
    """Hold every file against its checksum: those of one data set, or of all that are there at least in part."""
    if name:
        checks = check_source(find_source(name), folder)
    else:
        surveys = [check_source(source, folder) for source in SOURCES.values()]
        checks = [check for survey in surveys if overall(survey) != "missing" for check in survey]
        require(bool(checks), f"there are no data files in {folder}; `unlazy data fetch NAME` brings some.")
    for check in checks:
        _print_check(check)
    counts = Counter(check.state for check in checks)
    typer.echo(", ".join(f"{counts[state]} {state}" for state in ("present", "missing", "damaged")))
    if counts["present"] < len(checks):
        raise typer.Exit(NOT_WHOLE)


def _print_check(check: Check) -> None:
    typer.echo(f"{check.state:8}  {check.path}")
    if check.state == "present":
        typer.echo(f"          {check.found}")
    else:
        typer.echo(f"          expected {check.expected}\n          found    {check.found}")


def take_from(origin: Path, folder: Path) -> None:
    """Copy the standard files found below a folder to their places; say what each one is and what is still missing."""
    arrivals = bring_in(origin, folder)
    for arrival in arrivals:
        typer.echo(f"{arrival.outcome:13}  {arrival.source or '':13}  {arrival.path}")
        if arrival.outcome == "damaged":
            typer.echo(f"               expected {arrival.expected}\n               found    {arrival.found}")
    for name in {arrival.source: None for arrival in arrivals if arrival.source}:
        checks = check_source(SOURCES[name], folder)
        absent = [check.path.name for check in checks if check.state != "present"]
        what = (
            f"is {overall(checks)}: {', '.join(absent)} did not come"
            if absent
            else f"is whole in {checks[0].path.parent}"
        )
        typer.echo(f"{name} {what}.")
    if any(arrival.outcome == "damaged" for arrival in arrivals):
        raise typer.Exit(NOT_WHOLE)
