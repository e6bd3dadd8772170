"""``unlazy demo``, ``reproduce`` and ``claims``: runs studies and prints their plans, verdicts and parts."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from unlazy.cli.progress import report_progress
from unlazy.runtime import InputError, require
from unlazy.studies.engine import Reproduction, previous_seconds, read_saved_case, reproduce, select_cases
from unlazy.studies.findings import FINDINGS_FILE, stamp_findings
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.table import Table

MOST_LINES = 10  # of failed cases and the like


def make_request(
    reference: str,
    scale: str,
    runs: Path,
    results: Path,
    seeds: int | None,
    sets: Sequence[str],
    device: str,
    data: Path | None,
) -> Request:
    """The request that the options of the command line describe."""
    for folder in (runs, results):
        require(not folder.exists() or folder.is_dir(), f"{folder} is a file; a folder is needed. Choose another name.")
    require(data is None or data.is_dir(), f"--data {data} is not a folder; it holds data sets such as mnist/.")
    _check_device(device)
    request = Request(reference, scale, runs, results, device=device, data=data)
    present = request.study.settings(scale)
    known = {one.name: getattr(present, one.name) for one in fields(present)}
    changes: dict[str, Any] = {}
    sweep: dict[str, tuple[Any, ...]] = {}
    chosen = None if seeds is None else tuple(range(_check_seed_count(seeds)))
    for entry in sets:
        name, _, text = entry.partition("=")
        require(bool(text), f"--set takes NAME=VALUE, such as seed=0..99 or width=32; got {entry!r}.")
        if name == "seed":
            require(seeds is None, f"--seeds {seeds} and --set {entry} both choose seeds; give one of them.")
            chosen = parse_seeds(text)
        elif name not in known and isinstance(known.get(f"{name}s"), tuple):  # beta=4,10 where the setting is betas
            changes[f"{name}s"] = parse_setting(text, known[f"{name}s"], name)
        elif name in known and not isinstance(known[name], tuple) and ("," in text or _is_range(text)):
            sweep[name] = parse_sweep(text, known[name], name)
        else:
            changes[name] = parse_setting(text, known.get(name), name)
    return Request(reference, scale, runs, results, chosen, changes, device, data, sweep)


def _check_device(device: str) -> None:
    require(
        device == "cpu" or re.fullmatch(r"cuda(:\d+)?", device) is not None, f"--device is cpu or cuda, got {device}."
    )
    if device != "cpu":
        import torch

        require(torch.cuda.is_available(), f"--device {device}: this machine has no GPU that PyTorch can use.")


def _check_seed_count(seeds: int) -> int:
    require(seeds >= 1, f"seeds must be at least 1, got {seeds}.")
    return seeds


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds from ``0..9``, ``3``, ``0,2,5`` or a mixture.

    >>> parse_seeds("0..3,7")
    (0, 1, 2, 3, 7)
    """
    found: list[int] = []
    try:
        for word in text.split(","):
            first, _, last = word.partition("..")
            found += range(int(first), int(last or first) + 1)
    except ValueError:
        raise InputError(f"seeds are numbers such as 0..99 or 0,3,5; got {text!r}.") from None
    require(bool(found) and min(found) >= 0, f"seeds are whole numbers from 0 up, got {text!r}.")
    return tuple(dict.fromkeys(found))


def parse_setting(text: str, like: Any, name: str = "setting") -> Any:
    """Parse a value of the same type as the present one (``like``); several values are separated by commas.

    >>> parse_setting("32", 16), parse_setting("author", ("author", "pilot")), parse_setting("1e-3", 0.1)
    (32, ('author',), 0.001)
    """
    if isinstance(like, tuple):
        return tuple(parse_setting(word, like[0] if like else "", name) for word in text.split(",") if word)
    if isinstance(like, str):
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise InputError(f"{name} takes a value like {like!r}, got {text!r}.") from None
    if isinstance(like, float) and type(value) is int:
        value = float(value)
    fits = like is None or type(value) is type(like)
    require(fits, f"{name} takes a value like {like!r}, got {text!r}.")
    return value


def _is_range(text: str) -> bool:
    return re.fullmatch(r"-?\d+\.\.-?\d+", text) is not None


def parse_sweep(text: str, like: Any, name: str = "setting") -> tuple[Any, ...]:
    """Parse several values of a setting that takes one, such as ``4,10,30`` or ``2..5``.

    >>> parse_sweep("4,10,30", 4.0), parse_sweep("2..4", 1)
    ((4.0, 10.0, 30.0), (2, 3, 4))
    """
    found: list[Any] = []
    for word in text.split(","):
        first, _, last = word.partition("..") if _is_range(word) else (word, "", "")
        words = [str(number) for number in range(int(first), int(last) + 1)] if last else [word]
        found += [parse_setting(one, like, name) for one in words]
    require(bool(found) and "" not in found, f"{name} takes values like {like!r}, separated by commas; got {text!r}.")
    return tuple(dict.fromkeys(found))


def run_study(request: Request, how: ExecutionOptions, *, measure: bool = True, judge: bool = True) -> Reproduction:
    """Run a study and print what failed. Without ``only``, measures nothing where the scale needs a GPU and none is chosen."""
    study = request.study
    if measure and not how.only and request.scale in study.needs_gpu and not request.device.startswith("cuda"):
        typer.echo(
            f"note: the {request.scale} scale of {study.name} needs a GPU (--device cuda; or --only with cases that a CPU can "
            "measure); what its table holds is judged.",
            err=True,
        )
        measure = False
    with report_progress() as report:
        found = reproduce(request, how, progress=report, measure=measure, judge=judge)
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)
    for words, entries in (("failed", found.failed), ("left out", found.without_data), ("not drawn", found.not_drawn)):
        for name, why in list(entries.items())[:MOST_LINES]:
            typer.echo(f"{words}: {name}: {why}", err=True)
        if len(entries) > MOST_LINES:
            typer.echo(f"{words}: {len(entries) - MOST_LINES} more", err=True)
    if found.failed:
        typer.echo(f"{len(found.failed)} cases failed; the same command tries them again, and no others.", err=True)
    if found.not_started:
        typer.echo(
            f"{len(found.not_started)} cases were not started for lack of time; run the same command again to continue.",
            err=True,
        )
    return found


def write_demo_page(path: Path, request: Request) -> Path:
    """Write the page of ``unlazy demo`` from the measured circle study; returns its path."""
    from unlazy.studies.halfspace import circle_story
    from unlazy.studio.report import write_study_report

    results = json.loads((request.folder / "results.json").read_text())
    table = Table.read(request.folder / "table.csv")
    write_study_report(
        path,
        request,
        title=circle_story.TITLE,
        lead=circle_story.LEAD,
        scenes=circle_story.scenes(request.cases, request.work.runs),
        story=circle_story.story(results, table),
    )
    return path


def print_plan(request: Request, how: ExecutionOptions) -> None:
    """Print which cases would be measured, and how long they took before."""
    cases, before = select_cases(request, how.only), previous_seconds(request)
    missing = [case for case in cases if read_saved_case(request, case) is None]
    labels = [request.study.label(case) for case in missing]
    known = [before[label] for label in labels if label in before] or list(before.values())
    typer.echo(
        f"{request.study.name}, {request.scale}: {len(cases)} cases, {len(cases) - len(missing)} of them measured"
    )
    if known:
        seconds = sum(known) / len(known) * len(missing) / max(1, how.workers)
        typer.echo(f"about {seconds:.0f} s with {how.workers} workers, from the times of {len(known)} cases")
    elif missing:
        typer.echo("no case has been timed yet: run some with --only or --seconds to know")
    for label in labels:
        typer.echo(f"  {label}" + (f"  ({before[label]:.0f} s before)" if label in before else ""))


def accept_findings(request: Request) -> None:
    """Mark the findings as written for the current table."""
    stamp_findings(request.folder / FINDINGS_FILE, Table.read(request.folder / "table.csv"))


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def print_rows(rows: Sequence[Mapping[str, Any]], *, as_json: bool = False, one_line: bool = False) -> None:
    """Print judged claims as a table, or as JSON. ``one_line``: one line per claim, long texts are cut short."""
    if as_json:
        typer.echo(json.dumps(list(rows), indent=1))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as Lines

    from unlazy.claims.scorecard import caveats_text, ours_text, seeds_text, survives_text, verdict_text

    console = Console(width=None if sys.stdout.isatty() else 160)
    titles = ("claim", "statement", "paper", "ours (median, 95 %)", "seeds", "replicates", "survives")
    lines = Lines(*titles, box=None, pad_edge=False)
    for row in rows:
        caveats, words = caveats_text(row), (row["statement"], row["paper_value"])
        if one_line:
            words = (_cut(words[0], max(20, console.width - 118)), _cut(words[1], 22))
        mark = "" if not caveats else " †" if one_line else f" ({caveats})"
        texts = (ours_text(row), seeds_text(row), verdict_text(row) + mark, survives_text(row))
        lines.add_row(row["id"], *map(escape, (*words, *texts)))
    console.print(lines)


def _cut(text: str, most: int) -> str:
    """The text, with an ellipsis where it is longer than ``most`` letters."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def print_parts(rows: Sequence[Mapping[str, Any]], *, shows: bool = True) -> None:
    """Print one line per part, control and (unless ``shows`` is false) number shown beside them."""
    from unlazy.claims.scorecard import number_text

    for row in rows:
        for kind, entries in (
            ("part", row["parts"]),
            ("control", row["controls"]),
            ("shown", row["shows"] if shows else ()),
        ):
            for one in entries:
                number = number_text(one)
                rule = f" {one['rule']}, {one['agree']}/{one['seeds']} seeds: {one['verdict']}" if "rule" in one else ""
                typer.echo(f"  {row['id']} {kind:8} {one['name']}: {number}{rule}")


def print_summaries(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print five lines per paper: which of its claims replicate, and which do not."""
    from unlazy.claims.scorecard import PAPERS, summary_lines

    for paper, title in PAPERS.items():
        chosen = [row for row in rows if row["paper"] == paper]
        if chosen:
            typer.echo(f"\n{title}")
            for words, names in summary_lines(chosen):
                typer.echo(f"  {words:38} {', '.join(names) or 'none'}")
