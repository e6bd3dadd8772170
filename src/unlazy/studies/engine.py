"""The engine: measures the cases of a study, keeps their numbers, judges its claims, draws its figures.

``unlazy reproduce NAME`` makes a :class:`~unlazy.studies.request.Request` and calls :func:`reproduce`. Its steps:

1. ``record_rules``: the rule of every claim is written down, before any case is measured.
2. ``measure_study``: every case without saved numbers is measured, in processes of its own or on a cluster. A case's rows are
   saved as soon as it is done, so that an interrupted call resumes there.
3. ``assemble_table``: the rows of all cases become one table.
4. ``judge_study``: each part of each claim reads its numbers from the table and gets a verdict.
5. ``draw_study``: the figures are drawn from the table.

RUNS/STUDY/measured/LABEL-ID.json      one measured case: its rows and what it was computed with
RESULTS/STUDY/SCALE/table.csv          all rows of the scale
                    cases.json         settings, provenance and seconds of every case
                    results.json       the judged claims
                    rules.json         which rule each claim had, and since when
                    findings.md        what was found, in words
                    FIGURE.png, .pdf   the figures
"""

from __future__ import annotations

import glob
import json
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from unlazy import plots, runtime
from unlazy.claims.claim import quantities_of
from unlazy.claims.nearest import nearest
from unlazy.claims.rule import judge_claim
from unlazy.data.files import DataMissing
from unlazy.runtime import InputError, StoreError, UnlazyError, require, threads
from unlazy.store import write_file
from unlazy.studies.findings import FINDINGS_FILE, read_findings
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.rules import RULES_FILE, RuleBook, RuleEntry
from unlazy.studies.runner import Outcome, Task, run_tasks
from unlazy.studies.sources import commit_facts, merge_provenance
from unlazy.studies.study import Case, CaseProgress, as_json_values, label_from_columns
from unlazy.studies.table import Rows, Table

FORMAT = 2
Progress = Callable[[str, int, int], None]
"""Called with what is going on, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class Reproduction:
    """The judged claims of a call and their folder; then what did not work, reasons by name.

    ``failed``: cases that raised an error. ``without_data``: cases whose data set is not on this machine. ``not_started``: cases
    for which there was no time. ``not_drawn``: figures that raised an error.
    """

    results: dict[str, Any]
    folder: Path
    failed: Mapping[str, str] = field(default_factory=dict)
    without_data: Mapping[str, str] = field(default_factory=dict)
    not_started: tuple[str, ...] = ()
    not_drawn: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def reproduce(
    request: Request, options: ExecutionOptions, *, progress: Progress, measure: bool = True, judge: bool = True
) -> Reproduction:
    """Measure what is missing, write the table, judge and draw. Without ``measure``, judge the table in the results folder.

    A sweep is measured only: claims are declared for the study's own settings.
    """
    _check_same_study(request)
    judge = judge and not request.sweep
    outcome = measure_study(request, options, progress) if measure else Outcome()
    errors = {name: _describe_error(error) for name, error in outcome.failed.items()}
    without_data = {name: why for name, why in errors.items() if isinstance(outcome.failed[name], DataMissing)}
    failed = {name: why for name, why in errors.items() if name not in without_data}
    table, cases = assemble_table(request) if measure else read_table(request)
    if not cases:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(errors.items())[:3])
        if outcome.not_started:
            reasons = f"--seconds {options.seconds:g} is too short for one of its cases."
        elif outcome.done and not reasons:
            reasons = "Its source changed while it ran; run it again."
        raise InputError(f"study {request.study.name} has no measured case at scale {request.scale}. {reasons}".strip())
    notes = []
    if measure:
        before = len(_read_cases(request))
        if len(cases) < before:
            notes.append(f"{request.folder} had {before} measured cases and has {len(cases)} now.")
        table.write(request.folder / "table.csv")
        write_file(request.folder / "cases.json", (json.dumps(cases, indent=1) + "\n").encode())
        names = [] if request.sweep else [claim.id for claim in request.study.claims]
        RuleBook.read(request.folder / RULES_FILE).with_first_measurement(names, _now()).write()
    if not judge:
        return Reproduction({}, request.folder, failed, without_data, tuple(outcome.not_started))
    if request.study.claims:
        record_rules(request)
    results = judge_study(request, table, cases)
    write_file(request.folder / "results.json", (json.dumps(results, indent=1, allow_nan=False) + "\n").encode())
    not_drawn = draw_study(request, table, progress)
    if len(cases) == len(request.cases):
        notes += describe_unknown_quantities(request, table)
    left = tuple(outcome.not_started)
    return Reproduction(results, request.folder, failed, without_data, left, not_drawn, tuple(notes))


def _check_same_study(request: Request) -> None:
    """Raise if the results folder belongs to another file whose study has the same name."""
    path = request.folder / "results.json"
    owner = json.loads(path.read_text()).get("file") if path.exists() else request.own_file
    require(
        owner == request.own_file,
        f"{request.folder} holds results of {owner or 'a study of this package'}; give the study another name, or --results.",
    )


def _describe_error(error: BaseException) -> str:
    """Its type, message and notes in one line."""
    return " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def _error_place(error: BaseException) -> str:
    """The file and line that raised an error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"({Path(last.filename).name}, line {last.lineno})"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# --- before measuring: the rules -----------------------------------------------------------------------------


def record_rules(request: Request) -> None:
    """Write down which rule each claim has, and which seeds have numbers already."""
    study = request.study
    rules = {claim.id: study.rule_hash(claim, request.cases, request.declared_seeds) for claim in study.claims}
    RuleBook.read(request.folder / RULES_FILE).with_rules(rules, _measured_seeds(request), _now()).write()


def _measured_seeds(request: Request) -> set[int]:
    """Seeds that have numbers already, in the results or among the saved cases of this scale."""
    seeds: set[str] = set()
    path = request.folder / "table.csv"
    if path.exists():
        seeds |= set(Table.read(path).unique("seed"))
    for case in request.cases:
        if request.case_file(case).exists():
            seeds |= set(re.findall(r"\d+", request.study.case_columns(case).get("seed", "")))
    return {int(seed) for seed in seeds if seed.isdigit()}


# --- measuring -----------------------------------------------------------------------------------------------


def measure_study(request: Request, options: ExecutionOptions, progress: Progress) -> Outcome:
    """Measure the selected cases that have no saved numbers; the rules are recorded before the first of them starts."""
    study = request.study
    selected = select_cases(request, options.only)
    missing = {study.label(case): case for case in selected if read_saved_case(request, case) is None}
    if not request.sweep:
        record_rules(request)
    before = previous_seconds(request)
    tasks = [Task(name, (request, study.case_id(case)), before.get(name)) for name, case in missing.items()]

    def report(outcome: Outcome) -> None:
        ended = len(selected) - len(missing) + len(outcome.done) + len(outcome.failed)
        running = sum(_read_progress(request, case) for name, case in missing.items() if name not in outcome.done)
        progress(f"{len(selected)} cases, percent", round(100 * (ended + running) / len(selected)), 100)

    def save(name: str, found: dict[str, Any]) -> None:
        if options.cluster is not None:  # its workers may have disks of their own
            _save_case(request.case_file(missing[name]), found)

    return run_tasks(
        measure_case,
        tasks,
        workers=options.workers,
        cluster=options.cluster,
        retries=options.retries,
        seconds=options.seconds,
        on_report=report,
        on_done=save,
    )


def select_cases(request: Request, only: str) -> list[Case]:
    """Cases whose columns, joined by commas, match a pattern such as ``resnet-34,*``; it may match some columns in a row."""

    def matches(case: Case) -> bool:
        columns = ",".join(request.study.case_columns(case).values())
        return any(fnmatch(columns, pattern) for pattern in (only, f"*,{only}", f"{only},*", f"*,{only},*"))

    found = [case for case in request.cases if not only or matches(case)]
    known = "; ".join(",".join(request.study.case_columns(case).values()) for case in request.cases[:4])
    require(bool(found), f"no case matches {only!r}; cases are {known}; ...")
    return found


def measure_case(request: Request, case_id: str) -> dict[str, Any]:
    """Measure one case and save its rows; where the same code has saved them already, return those. Runs in any process."""
    (case,) = [case for case in request.cases if request.study.case_id(case) == case_id]
    saved = read_saved_case(request, case)
    if saved is not None:
        return saved
    path = request.case_file(case)
    provenance = _provenance(request)
    began = time.perf_counter()
    with threads(1):
        work = replace(request.work, progress=_progress_writer(path.with_suffix(".progress")))
        try:
            rows = request.study.measure(case, work)
        except Exception as error:
            if not isinstance(
                error, UnlazyError
            ):  # of a process, an error comes back with its notes, without its lines
                error.add_note(_error_place(error))
            raise
    if rows is None:
        raise InputError(f"measure of study {request.study.name} returned nothing; it returns Rows.")
    columns = request.study.case_columns(case)
    entries = rows.entries if isinstance(rows, Rows) else rows
    table = Table.from_rows([{**columns, **row} for row in entries], tuple(columns), request.study.digits)
    measured = {
        "format": FORMAT,
        "case": as_json_values(asdict(case)),
        "columns": columns,
        "provenance": provenance | {"seconds": round(time.perf_counter() - began, 2)},
        "rows": table.to_bytes().decode(),
    }
    _save_case(path, measured)
    path.with_suffix(".progress").unlink(missing_ok=True)
    return measured


def _save_case(path: Path, measured: Mapping[str, Any]) -> None:
    """Write what was measured of a case, and delete what a killed process left of an earlier try."""
    write_file(path, (json.dumps(measured) + "\n").encode())
    for unfinished in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        unfinished.unlink(missing_ok=True)


def read_saved_case(request: Request, case: Case) -> dict[str, Any] | None:
    """What an earlier call saved of a case; ``None`` if nothing, or if other code measured it."""
    path = request.case_file(case)
    if not path.exists():
        return None
    try:
        saved: dict[str, Any] = json.loads(path.read_text())
        same = saved["format"] == FORMAT and saved["provenance"]["sources_sha256"] == request.sources_hash()
    except (ValueError, KeyError) as error:
        raise StoreError(f"{path} is damaged ({error}); delete it, and the case is measured again.") from error
    return saved if same else None


def _provenance(request: Request) -> dict[str, Any]:
    """What a case is computed with: versions, machine, start, commit, and the hash of the code."""
    facts = runtime.provenance("", request.device)
    del facts["dtype"]
    return {**facts, **commit_facts(), "sources_sha256": request.sources_hash()}


def _progress_writer(path: Path) -> CaseProgress:
    """A function that writes the share of a case that is done to a file, at most twice a second."""
    last = 0.0

    def write_progress(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > 0.5:
            last = time.monotonic()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{done / max(total, 1):.4f}")

    return write_progress


def _read_progress(request: Request, case: Case) -> float:
    """The share of a running case that is done, from the file that :func:`_progress_writer` writes."""
    file = request.case_file(case).with_suffix(".progress")
    try:
        return min(1.0, float(file.read_text())) if file.exists() else 0.0
    except (OSError, ValueError):
        return 0.0


def previous_seconds(request: Request) -> dict[str, float]:
    """How long each case took before, by label, from the results folder."""
    seconds = {
        label_from_columns(one["columns"]): one["provenance"].get("seconds") for one in _read_cases(request).values()
    }
    return {label: number for label, number in seconds.items() if number is not None}


# --- the table -----------------------------------------------------------------------------------------------


def read_table(request: Request) -> tuple[Table, list[dict[str, Any]]]:
    """The table of the results folder and what is known of its cases; where there is none, that of the saved cases."""
    path = request.folder / "table.csv"
    return (Table.read(path), list(_read_cases(request).values())) if path.exists() else assemble_table(request)


def assemble_table(request: Request) -> tuple[Table, list[dict[str, Any]]]:
    """The rows of all declared cases: of those saved here, else of the same case in the results folder."""
    earlier_cases, path = _read_cases(request), request.folder / "table.csv"
    earlier_table = Table.read(path) if path.exists() else None
    rows: list[dict[str, Any]] = []
    cases = []
    names = {name for case in request.cases for name in request.study.case_columns(case)} - {"seed"}
    for case in request.cases:
        saved = read_saved_case(request, case)
        case_id = request.study.case_id(case)
        if saved is not None:
            table = Table.parse(saved["rows"])
            about = {"id": case_id, **{key: saved[key] for key in ("case", "columns", "provenance")}}
        elif case_id in earlier_cases and earlier_table is not None:
            about = earlier_cases[case_id]
            table = earlier_table.where(
                **(dict.fromkeys(names, "") | about["columns"])
            )  # columns of other cases are empty
        else:
            continue
        cases.append(about)
        rows += table.rows()
    return Table.from_rows(rows, first=request.study.columns, digits=17), cases


def _read_cases(request: Request) -> dict[str, dict[str, Any]]:
    """The entries of ``cases.json`` in the results folder, by case id."""
    path = request.folder / "cases.json"
    return {one["id"]: one for one in json.loads(path.read_text())} if path.exists() else {}


# --- judging -------------------------------------------------------------------------------------------------


def judge_study(request: Request, table: Table, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of ``results.json``: the judged claims with their findings, and what the table was made of."""
    study, scale = request.study, request.scale
    findings = read_findings(request.folder / FINDINGS_FILE, table)
    book, earlier = RuleBook.read(request.folder / RULES_FILE), _read_judged_claims(request)
    rows = []
    for claim in study.claims:
        rule = study.rule_hash(claim, request.cases, request.declared_seeds)
        before = earlier.get(claim.id)
        same_rule = before is not None and before.get("rule_sha256") == rule
        row = judge_claim(claim, table, request.declared_seeds, before if same_rule else None)
        if scale == "smoke":  # takes seconds: it shows that a study runs, and judges nothing
            row |= {"verdict": "cannot tell", "outcome": "undecided", "parts": [], "controls": []}
            row |= {"survives": "cannot tell", "survives_outcome": "undecided"}
        finding = findings.get(claim.id)
        rows.append(
            {
                **row,
                "paper": study.paper,
                "study": study.name,
                "scale": scale,
                "why": "" if finding is None else finding.text,
                "stale": finding is not None and finding.stale,
                "figure": claim.figure and f"results/{study.name}/{scale}/{claim.figure}.png",
                "command": f"unlazy reproduce {request.own_file or study.name} --scale {scale}",
                "rule_sha256": rule,
                "rule_record": _describe_rule(book.claims.get(claim.id), request.declared_seeds),
            }
        )
    return {
        "format": FORMAT,
        "study": study.name,
        "file": request.own_file,
        "paper": study.paper,
        "scale": scale,
        "settings": as_json_values(asdict(request.settings)),
        "seeds": list(request.declared_seeds),
        "table_sha256": table.sha256,
        "declared_cases": len(request.cases),
        "measured_cases": len(cases),
        "provenance": merge_provenance([one["provenance"] for one in cases]),
        "claims": rows,
    }


def _read_judged_claims(request: Request) -> dict[str, dict[str, Any]]:
    """The claims of ``results.json`` in the results folder, by claim: what failed there stays failed."""
    path = request.folder / "results.json"
    return {row["id"]: row for row in json.loads(path.read_text())["claims"]} if path.exists() else {}


def _describe_rule(entry: RuleEntry | None, seeds: Sequence[int]) -> dict[str, Any] | None:
    """When a claim's rule was recorded, and whether some of these seeds had been measured before."""
    if entry is None:
        return None
    after = {"after_data": entry.after_data(seeds)}
    return {"recorded": entry.recorded, "first_measured": entry.first_measured, "note": entry.note, **after}


def describe_unknown_quantities(request: Request, table: Table) -> list[str]:
    """A sentence for every quantity or column that a claim reads and the table does not have: probably a misspelt name."""
    known, sentences = table.unique("quantity"), []
    for claim in request.study.claims:
        shown = [quantity for one in claim.shows for quantity in quantities_of(one)]
        for quantity in dict.fromkeys(claim.quantities() + shown):
            columns = [name for name in quantity.where if name not in table.columns]
            if quantity.name not in known:
                meant = nearest(quantity.name, known)
                hint = f"did you mean {meant}?" if meant else f"there are {', '.join(known)}."
                asks = f"claim {claim.id} asks for the quantity {quantity.name!r}"
                sentences.append(f"{asks}, which no case measured; {hint}")
            elif columns:
                asks = f"claim {claim.id} asks for the columns {', '.join(columns)}"
                sentences.append(f"{asks}, which the table does not have.")
    return list(dict.fromkeys(sentences))


# --- drawing -------------------------------------------------------------------------------------------------


def draw_study(request: Request, table: Table, progress: Progress) -> dict[str, str]:
    """Draw every figure that can be drawn; return the errors of the others by name."""
    not_drawn = {}
    for number, figure in enumerate(request.study.figures, 1):
        try:
            with plots.style():
                plots.save_figure(figure.draw(request.with_table(table)), request.folder / figure.name)
        except Exception as error:  # whatever a study's own function raises: its verdicts are written all the same
            error.add_note(_error_place(error))
            not_drawn[figure.name] = _describe_error(error)
        progress("figures", number, len(request.study.figures))
    return not_drawn
