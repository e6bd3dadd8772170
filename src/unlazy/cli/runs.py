"""``unlazy runs``: prints the list of runs, one run, or several side by side; changes labels, deletes runs."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from unlazy.cli.table import fit_table
from unlazy.run_card import describe_run, read_verdict
from unlazy.run_comparison import last_medians, latest_scalars
from unlazy.runtime import StoreError, require
from unlazy.store import Run, find_runs

LONGEST_NAME = 256  # of a file; asking for a longer one is an error
NUMBERS = ("members", "step", "loss", "gap")
ALWAYS_SHOWN = ("id", "state", "step", "folder")
MOST_SETTINGS = 4  # that are columns of a list unless some are chosen


def print_list(
    root: Path, study: str | None, state: str | None, as_json: bool, columns: Sequence[str] = (), tag: str | None = None
) -> None:
    """Print one line per run, oldest first; damaged folders go to stderr.

    ``columns``: settings to show; by default the first few that differ between the runs.
    """
    runs, broken = find_runs(root)
    rows = []
    for run in runs:
        try:
            rows.append(run_row(run))
        except StoreError as error:
            broken.append(error)
    every = len(rows)
    _check_columns(columns, rows)
    wanted = {"study": study, "state": state}
    rows = [row for row in rows if all(value in (None, row[name]) for name, value in wanted.items())]
    rows = [row for row in rows if tag is None or tag in row["tags"]]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    elif every and not rows:
        choice = "study and state" if tag is None else "study, state and tag"
        typer.echo(f"none of the {every} runs below {root} is of that {choice}.")
    elif not rows and not broken:
        typer.echo(
            f"no runs below {root}; `unlazy reproduce circle` makes some, and so does a Scope around your own loop."
        )
    else:
        for line in list_lines(rows, columns or differing_settings(rows)[:MOST_SETTINGS], terminal_width()):
            typer.echo(line)
    for damage in broken:
        typer.echo(f"damaged: {damage}", err=True)


def differing_settings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of settings with more than one value, those that most runs have first.

    >>> differing_settings([{"config": {"lr": 1, "depth": 2}}, {"config": {"lr": 3, "depth": 2}}])
    ['lr']
    """
    values: dict[str, list[str]] = {}
    for row in rows:
        for name, value in row["config"].items():
            values.setdefault(name, []).append(str(value))
    return sorted((name for name in values if len(set(values[name])) > 1), key=lambda name: -len(values[name]))


def terminal_width() -> int | None:
    """Columns of the terminal; ``None`` if the output goes to a file or another program, which gets whole lines."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def list_lines(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], width: int | None) -> list[str]:
    """The table of runs: only columns that some run has a value for; narrow terminals lose the least important ones."""
    texts = [_row_texts(row, columns) for row in rows]
    names = ["id", "state", "members", "step", "loss", "verdict", "gap", *columns, "study", "tags", "folder"]
    kept = [
        name
        for name in names
        if name in (*ALWAYS_SHOWN, *columns)
        or (name == "members" and any(row["members"] != 1 for row in rows))
        or (name != "members" and any(text[name] for text in texts))
    ]
    droppable = ["study", "tags", "members", "loss", "step", *reversed(columns)]
    return fit_table(kept, texts, width, right=(*NUMBERS, *columns), droppable=droppable, cut="folder")


def _row_texts(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, str]:
    texts = {name: _text(row[name]) for name in ("id", "state", "members", "step", "verdict", "study", "folder")}
    texts |= {name: "" if row[name] is None else f"{row[name]:.3g}" for name in ("loss", "gap")}
    if row["broke_down"]:
        texts["loss"] = "nan"
    texts["tags"] = ", ".join(row["tags"])
    return texts | {name: _text(row["config"].get(name)) for name in columns}


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _check_columns(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``InputError`` if no run has a setting of that name."""
    known = dict.fromkeys(name for row in rows for name in row["config"])
    unknown = [name for name in columns if rows and name not in known]
    listed = ", ".join(known) or "none: Scope(..., config={...}) keeps them"
    require(not unknown, f"no run has a setting {', '.join(unknown)}; settings: {listed}.")


def find_run(name: str, root: Path) -> Run:
    """The run in the folder ``name``, or the only one below ``root`` whose id begins with ``name``."""
    if "/" in name or (len(name) < LONGEST_NAME and Path(name).exists()):
        return Run(name)
    found = [run for run in find_runs(root)[0] if run.id.startswith(name)]
    if len(found) != 1:
        many = f"{len(found)} runs below {root} have ids that begin with {name!r}"
        raise StoreError(f"{name} is not a run folder, and {many}. `unlazy runs --root {root}` lists them.")
    return found[0]


def print_run(run: Run, as_json: bool = False) -> None:
    """Print what a run is, its verdict, its versions, and the last value of every scalar (median over members)."""
    row, verdict, last = run_row(run), read_verdict(run.folder), last_medians(run)
    if as_json:
        typer.echo(
            json.dumps(row | {"verdict": verdict, "provenance": run.header["provenance"], "last": last}, indent=1)
        )
        return
    for name, value in row.items():
        if name not in ("config", "phases", "git", "broke_down", "reason") and value not in (None, "", []):
            typer.echo(f"{name:12} {', '.join(value) if isinstance(value, list) else _text(value)}")
    if row["broke_down"]:
        typer.echo(f"{'loss':12} is not a finite number any more: the training broke down")
    for name, value in row["config"].items():
        typer.echo(f"config.{name:20} {value}")
    if row["git"]:
        dirty = " with changes that are not committed" if row["git"].get("dirty") else ""
        typer.echo(f"{'commit':12} {row['git'].get('commit')}{dirty}")
    for name in ("unlazy", "torch", "threads", "dtype", "started"):
        typer.echo(f"{name:12} {run.header['provenance'].get(name, 'unknown')}")
    for name, number in last.items():
        typer.echo(f"{name:20} {number:.6g}")
    for sentence in _verdict_sentences(verdict):
        typer.echo(sentence)


def _verdict_sentences(verdict: Mapping[str, Any] | None) -> list[str]:
    """The verdict in words, as the scope wrote them."""
    if verdict is None or not isinstance(verdict.get("words"), Mapping):
        return []
    words = verdict["words"]
    said = [f"\nVerdict: {verdict.get('label')}. {words.get('meaning', '')}", *verdict.get("reasons", ())]
    return [*said, *(words[topic] for topic in ("gap", "when", "layers", "advice") if words.get(topic))]


def print_comparison(runs: Sequence[Run], as_json: bool = False) -> None:
    """Print verdicts, the settings that differ, and the last value of every common scalar (median over members)."""
    comparison = Run.compare(runs)
    typer.echo(json.dumps(comparison.to_dict(), indent=1) if as_json else str(comparison))


def run_row(run: Run) -> dict[str, Any]:
    """The columns of one run in the list, as plain JSON values."""
    status, latest = run.status(), latest_scalars(run)
    loss = last_medians(run).get("loss")
    return {
        "id": run.id,
        "state": status["state"],
        "members": len(run.members),
        "step": max([status["step"], *(line.step for line in run.lines)]),
        "loss": loss if loss is not None and math.isfinite(loss) else None,
        "study": run.header["study"],
        "scale": run.header["scale"],
        "folder": str(run.folder),
        "error": status["error"],
        **describe_run(run, latest),
    }


def change_labels(
    run: Run, *, tags: Sequence[str] | None = None, notes: str | None = None, remove: bool = False
) -> None:
    """Add or remove tags, or replace the notes, and print what the run has now."""
    now = run.labels["tags"]
    if tags is not None:
        unknown = [tag for tag in tags if remove and tag not in now]
        require(not unknown, f"{run.folder} has no tag {', '.join(unknown)}; tags: {', '.join(now) or 'none'}.")
        tags = [tag for tag in now if tag not in tags] if remove else [*now, *tags]
    labels = run.set_labels(tags=tags, notes=notes)
    typer.echo(f"{run.folder}: tags {', '.join(labels['tags']) or 'none'}; notes {labels['notes'] or 'none'}")


def delete_run(run: Run, *, ask: bool) -> None:
    """Delete one run, after a question unless ``ask`` is false."""
    row = run_row(run)
    size = sum(path.stat().st_size for path in run.folder.rglob("*") if path.is_file() and not path.is_symlink())
    words = f"{run.folder} ({row['state']}, step {row['step']}, {size / 1e6:.1f} MB)"
    if ask and not typer.confirm(f"Delete {words}? This cannot be undone."):
        typer.echo("nothing was deleted.")
        return
    left = run.delete()
    typer.echo(f"deleted {words}")
    if left:
        typer.echo(f"kept what unlazy did not write: {', '.join(path.name for path in left)}")
