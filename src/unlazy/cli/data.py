"""``unlazy data``: lists, downloads, checks and copies data files."""

from __future__ import annotations

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from unlazy.cli.progress import report_progress
from unlazy.data.fetch import fetch
from unlazy.data.files import FileCheck, check_source, combined_state, fetch_commands, import_files
from unlazy.data.sources import SOURCES, find_source
from unlazy.runtime import require

INCOMPLETE = 1  # exit code: a file is damaged or missing; 2 means a wrong command


def print_list(folder: Path, as_json: bool) -> None:
    """Print one line per data set: its state, the megabytes of its files, and where they are or how to get them."""
    rows = [_describe(name, folder) for name in SOURCES]
    installed = find_spec("sklearn") is not None
    where = "comes with scikit-learn" if installed else "pip install scikit-learn"
    rows.append({"name": "digits", "state": "present" if installed else "missing", "bytes": 0, "where": where})
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    typer.echo(f"{'name':14}  {'state':10}  {'size':>9}  where")
    for row in rows:
        typer.echo(f"{row['name']:14}  {row['state']:10}  {_size_text(row['bytes']):>9}  {row['where']}")
    typer.echo(f"\ndata folder: {folder} (UNLAZY_DATA names another)")


def _describe(name: str, folder: Path) -> dict[str, Any]:
    source = SOURCES[name]
    checks = check_source(source, folder)
    state = combined_state(checks)
    where = str(folder / source.folder) if state == "present" else " or ".join(fetch_commands(source, folder))
    return {"name": name, "state": state, "bytes": sum(file.size for file in source.files), "where": where}


def _size_text(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count else ""


def fetch_data_set(name: str, folder: Path) -> None:
    """Download the files of a data set that are missing or damaged."""
    source = find_source(name)
    with report_progress() as report:
        new = fetch(source, folder, report, say=lambda line: typer.echo(line, err=True))
    for path in new:
        typer.echo(f"fetched  {path}")
    typer.echo(f"{name} is complete in {folder / source.folder}{'' if new else '; there was nothing to fetch'}.")


def verify(name: str | None, folder: Path) -> None:
    """Check the files of one data set against their checksums, or those of all data sets that have files."""
    if name:
        checks = check_source(find_source(name), folder)
    else:
        surveys = [check_source(source, folder) for source in SOURCES.values()]
        checks = [check for survey in surveys if combined_state(survey) != "missing" for check in survey]
        require(bool(checks), f"there are no data files in {folder}; `unlazy data fetch NAME` brings some.")
    for check in checks:
        _print_check(check)
    counts = Counter(check.state for check in checks)
    typer.echo(", ".join(f"{counts[state]} {state}" for state in ("present", "missing", "damaged")))
    if counts["present"] < len(checks):
        raise typer.Exit(INCOMPLETE)


def _print_check(check: FileCheck) -> None:
    typer.echo(f"{check.state:8}  {check.path}")
    if check.state == "present":
        typer.echo(f"          {check.found}")
    else:
        typer.echo(f"          expected {check.expected}\n          found    {check.found}")


def copy_from(origin: Path, folder: Path) -> None:
    """Copy the standard data files found below ``origin`` into the data folder; print each file and what is still missing."""
    imported = import_files(origin, folder)
    for file in imported:
        typer.echo(f"{file.outcome:13}  {file.source or '':13}  {file.path}")
        if file.outcome == "damaged":
            typer.echo(f"               expected {file.expected}\n               found    {file.found}")
    for name in {file.source: None for file in imported if file.source}:
        checks = check_source(SOURCES[name], folder)
        absent = [check.path.name for check in checks if check.state != "present"]
        what = (
            f"is {combined_state(checks)}: {', '.join(absent)} not found"
            if absent
            else f"is complete in {checks[0].path.parent}"
        )
        typer.echo(f"{name} {what}.")
    if any(file.outcome == "damaged" for file in imported):
        raise typer.Exit(INCOMPLETE)
