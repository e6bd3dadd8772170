"""What the tests of the mechanism studies share: a smoke run, the committed table, tables with some numbers changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from repository import RESULTS
from unlazy.claims.rule import judge_claim, judge_part
from unlazy.studies.engine import Reproduction, reproduce
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.study import Results, Study
from unlazy.studies.table import Table

COMMITTED = RESULTS


def run_smoke(study: Study, folder: Path) -> tuple[Results, Reproduction]:
    """The study at smoke scale, measured, judged and drawn below a folder."""
    request = Request(study.name, "smoke", folder / "runs", folder / "results")
    made = reproduce(request, ExecutionOptions(), progress=lambda *_: None)
    assert not made.failed
    assert not made.not_drawn
    return results_of(request), made


def results_of(request: Request) -> Results:
    table = Table.read(request.folder / "table.csv")
    return request.with_table(table)


def committed_results(study: Study) -> Results:
    """The committed paper scale."""
    return results_of(Request(study.name, "paper", Path("no-runs"), COMMITTED))


def changed(table: Table, value: Any, **where: Any) -> Table:
    """The table with this number (or these numbers) in the rows with these columns; at least one row must be there."""
    places = Table(table.columns, np.arange(len(table))).where(**where).values.astype(int)
    assert len(places) > 0, where
    values = table.values.copy()
    values[places] = value
    return Table(table.columns, values)


def judged(study: Study, table: Table, seeds: Sequence[int]) -> Mapping[str, Any]:
    """The row of the study's only claim."""
    (claim,) = study.claims
    return judge_claim(claim, table, seeds)


def parts_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Verdicts of parts and controls by name."""
    return {part["name"]: part["verdict"] for part in (*row["parts"], *row["controls"])}


def check_committed(study: Study) -> None:
    """The committed verdicts follow from the committed table, and every declared part has numbers."""
    results = committed_results(study)
    row = judged(study, results.table, results.seeds)
    (kept,) = json.loads((results.folder / "results.json").read_text())["claims"]
    assert [row["parts"], row["controls"]] == [kept["parts"], kept["controls"]]
    assert {*parts_of(row).values()}.isdisjoint({"not measured", "provisional"})


def check_missing_numbers_help_nobody(study: Study, table: Table, seeds: Sequence[int]) -> None:
    """Without any one quantity, arm, preset, or the first seed, no part agrees with more seeds, none holds that did not."""
    (claim,) = study.claims
    parts = (*claim.parts, *claim.controls)
    drops = [{column: name} for column in ("quantity", "arm", "preset") for name in table.unique(column)]
    before = [judge_part(part, table, seeds) for part in parts]
    for drop in [*drops, {"seed": seeds[0]}]:
        left = table.without(**drop)
        for part, one in zip(parts, before, strict=True):
            other = judge_part(part, left, seeds)
            assert other["agree"] <= one["agree"], (drop, part.says)
            assert other["verdict"] != "holds" or one["verdict"] == "holds", (drop, part.says)
