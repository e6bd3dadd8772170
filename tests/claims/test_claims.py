"""Verdicts follow the rule, missing numbers never help, and what is committed is what the committed tables give."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repository import ROOT
from unlazy.claims.claim import Claim, Part, Quantity, function_meaning
from unlazy.claims.functions import difference, ratio
from unlazy.claims.rule import LOST, OUTCOMES, combine, interval, judge_claim, judge_part, outcomes, part_verdict
from unlazy.claims.scorecard import load_results, number_text, scorecard, summary_lines
from unlazy.runtime import InputError
from unlazy.studies.engine import judge_study
from unlazy.studies.findings import read_findings
from unlazy.studies.registry import find_studies, load_study, studies
from unlazy.studies.request import Request
from unlazy.studies.study import SCALES
from unlazy.studies.table import Column, Table

RESULTS = ROOT / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("*/*/results.json"))
NEVER = float("inf")


def table_of(values: list[float], quantity: str = "a", **columns: Any) -> list[dict[str, Any]]:
    return [{"seed": seed, "quantity": quantity, "value": value, **columns} for seed, value in enumerate(values)]


def verdict(values: list[float], horizon: float | None = None, seeds: int | None = None, **rule: Any) -> str:
    rows = table_of(values)
    within = None
    if horizon is not None:
        rows += table_of([horizon] * len(values), "looked")
        within = Quantity("looked")
    part = Part("a part", Quantity("a"), within=within, **(rule or {"above": 0}))
    claim = Claim("X1", says="", where="", paper="", parts=[part])
    return judge_claim(claim, Table.from_rows(rows), range(seeds or len(values)))["parts"][0]["verdict"]


# --- the rule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "holds"),
        ([-1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "holds"),  # nine of ten
        ([-1, -1, 3, 4, 5, 6, 7, 8, 9, 10], "cannot tell"),  # eight of ten: the seeds disagree
        ([-1] * 6 + [1] * 4, "fails"),
        ([-1] * 5 + [1] * 5, "fails"),
        ([1, 2], "provisional"),
        ([-1, -2], "provisional"),
        ([1, 2, 3], "holds"),
        ([1, 2, -3], "cannot tell"),
        ([0.0] * 10, "fails"),  # on the threshold is not past it
        ([float("nan")] * 10, "not measured"),
        ([1.0] * 8 + [float("nan")] * 2, "not measured"),  # the missing two decide
        ([1.0] * 9 + [float("nan")], "holds"),  # whatever the missing one would be
        ([-1.0] * 5 + [float("nan")] * 5, "fails"),
    ],
)
def test_the_rule(values: list[float], expected: str) -> None:
    assert verdict(values) == expected
    assert verdict([-v for v in values], below=0) == expected


def test_a_declared_seed_without_a_row_counts_as_missing() -> None:
    assert verdict([1.0] * 8, seeds=10) == "not measured"
    assert verdict([1.0] * 9, seeds=10) == "holds"
    assert verdict([1.0] * 2, seeds=10) == "provisional"


def test_an_identity_holds_only_if_every_case_does() -> None:
    assert verdict([1.0] * 99 + [-1.0], above=0, identity=True) == "fails"
    assert verdict([1.0], above=0, identity=True) == "holds"


def test_never_satisfies_nothing_by_itself() -> None:
    assert verdict([NEVER] * 10, above=5) == "not measured"
    assert verdict([NEVER] * 10, horizon=8000, above=2000) == "holds"  # it was looked for longer than that
    assert verdict([NEVER] * 10, horizon=300, above=2000) == "censored"
    assert verdict([NEVER] * 10, horizon=float("nan"), above=2000) == "censored"
    assert verdict([50.0] * 9 + [NEVER], horizon=300, below=400) == "holds"
    assert verdict([50.0] * 8 + [NEVER] * 2, horizon=300, below=400) == "censored"
    assert verdict([NEVER] * 10, horizon=400, below=400) == "fails"


def test_a_number_that_is_missing_is_no_time_that_was_never_reached() -> None:
    row = {"value": None, "interval": [None, None], "unit": "epochs", "seeds": 5, "missing": 0}
    assert number_text(row) == "never reached"
    assert number_text(row | {"missing": 5}) == "– [–, –] epochs"


@given(st.lists(st.sampled_from("pfm"), min_size=1, max_size=12), st.data())
def test_removing_a_seed_never_moves_a_part_toward_holding(seeds: list[str], data: st.DataObject) -> None:
    def judged(marks: list[str]) -> str:
        passed, missing = (np.array([mark == which for mark in marks]) for which in "pm")
        return part_verdict(passed, missing, np.zeros(len(marks), dtype=bool), identity=False)

    removed = data.draw(st.integers(0, len(seeds) - 1))
    fewer = [*seeds[:removed], "m", *seeds[removed + 1 :]]
    assert not (judged(fewer) == "holds" and judged(seeds) != "holds")


def test_parts_combine() -> None:
    assert combine(["holds", "holds"]) == ("holds", "holds")
    assert combine(["holds", "censored"]) == ("part", "1 of 2 parts")
    assert combine(["fails", "censored"]) == ("fails", "fails")
    assert combine(["provisional", "not measured"]) == ("undecided", "not measured")
    assert combine(["cannot tell"]) == ("undecided", "cannot tell")


def test_interval_covers_the_median() -> None:
    """Over many samples of 15 normal numbers the 95 % interval holds the true median about 95 % of the time."""
    random = np.random.default_rng(1)
    inside = [low <= 0 <= high for low, high in (interval(random.normal(size=15)) for _ in range(200))]
    assert 0.90 <= np.mean(inside) <= 0.99


def test_a_claim_needs_parts_and_a_part_one_side() -> None:
    with pytest.raises(InputError, match="declares no part"):
        Claim("X1", says="", where="", paper="", parts=[])
    with pytest.raises(InputError, match="only one of them"):
        Part("x", Quantity("a"), above=0, below=1)
    pair = Quantity("a"), Quantity("b")
    with pytest.raises(InputError, match="no function by="):
        Part("x", pair, above=0)
    for function in (np.subtract, lambda one, other: one - other):
        with pytest.raises(InputError, match="a function defined with def"):
            Part("x", pair, by=function, above=0)
    with pytest.raises(InputError, match="by= takes 2 quantities, and within= gives it 1"):
        Part("x", pair, by=difference, above=0, within=Quantity("c"))


def test_a_function_of_a_part_cannot_hide_a_gap() -> None:
    """Whatever ``by`` makes of NaN and infinity: a seed that lacks a number, or never reached a time, does not pass."""

    def greater_known(one, other):
        return np.fmax(one, other)

    def mean_of_all(one, other):
        return np.mean([one, other])

    def broken(one):
        return one

    def judged(by: Any, ones: list[float], others: list[float], **rule: Any) -> dict[str, Any]:
        part = Part("both", (Quantity("a"), Quantity("b")), by=by, **rule)
        table = Table.from_rows(table_of(ones) + table_of(others, "b"))
        return judge_part(part, table, range(len(ones)))

    assert judged(greater_known, [1.0] * 4, [2.0] * 4, above=0)["verdict"] == "holds"
    row = judged(greater_known, [1.0] * 4, [float("nan")] * 4, above=0)
    assert (row["verdict"], row["missing"]) == ("not measured", 4)
    row = judged(ratio, [1.0] * 4, [NEVER] * 4, below=0.5)  # 1 / infinity is 0, and 0 is below 0.5
    assert (row["verdict"], row["missing"]) == ("not measured", 4)
    with pytest.raises(InputError, match=r"'both': its function must return one number per seed, \(4,\)"):
        judged(mean_of_all, [1.0] * 4, [2.0] * 4, above=0)
    with pytest.raises(InputError, match=r"'both': its function broken raised TypeError"):
        judged(broken, [1.0] * 4, [2.0] * 4, above=0)


def test_the_meaning_of_a_rule_is_not_its_source_text() -> None:
    def subtract(one, other):
        """Words."""
        return one - other  # a remark

    def subtract_otherwise(one, other):
        return one - 2 * other

    first = function_meaning(subtract)

    def subtract(one, other):
        return (one - other)  # fmt: skip

    assert function_meaning(subtract) == first
    assert function_meaning(subtract_otherwise)[1:] != first[1:]

    def scaled_by(factor):
        def scale(one):
            return factor * subtract(one, 1)

        return scale

    assert function_meaning(scaled_by(2)) == function_meaning(scaled_by(2))
    assert function_meaning(scaled_by(2)) != function_meaning(scaled_by(3))  # what it uses belongs to the rule
    with pytest.raises(InputError, match="factor is list"):
        function_meaning(scaled_by([2]))

    def ratio(narrow, wide):
        return sum(narrow / step for step in (wide, 2 * wide))

    alone = function_meaning(ratio)
    with mock.patch.dict(
        globals(), {"narrow": Quantity("a"), "wide": [3], "step": [4]}
    ):  # names of arguments and loops
        assert function_meaning(ratio) == alone

    part = Part("x", (Quantity("a"), Quantity("b")), by=difference, above=0)
    again = Part("other words", (Quantity("a"), Quantity("b")), by=difference, above=0, unit="m")
    assert part.meaning() == again.meaning()
    assert part.meaning() != Part("x", (Quantity("a"), Quantity("b")), by=difference, above=0.1).meaning()


def test_seeds_of_a_part_pass_fail_or_are_missing() -> None:
    part = Part("x", Quantity("a"), above=1)
    passed, missing, censored = outcomes(part, np.array([2.0, 1.0, np.nan, np.inf, -np.inf]), None)
    assert passed.tolist() == [True, False, False, False, False]
    assert missing.tolist() == [False, False, True, True, True]
    assert not censored.any()


# --- what is committed -------------------------------------------------------------------------------------


def committed(folder: Path) -> tuple[Request, Table, list[dict[str, Any]], dict[str, Any]]:
    kept = json.loads((folder / "results.json").read_text())
    request = Request(kept["study"], kept["scale"], ROOT / "runs", RESULTS, seeds=tuple(kept["seeds"]))
    cases = json.loads((folder / "cases.json").read_text())
    return request, Table.read(folder / "table.csv"), cases, kept


def test_every_claim_of_the_papers_is_declared_once() -> None:
    followed_up = {"C16", "C27", "C29", "F4", "F6"}  # by a claim of our own: C16b, ...
    first = [f"C{i}" for i in range(1, 30)] + [f"F{i}" for i in range(1, 7)]
    wanted = [name for one in first for name in ((one, f"{one}b") if one in followed_up else (one,))]
    wanted += [f"B{i}" for i in range(1, 14)] + [f"L{i}" for i in range(1, 12)]
    wanted += [f"A{i}" for i in range(1, 10)] + [f"E{i}" for i in range(1, 5)]  # ours: of the advice, of the estimators
    wanted += [f"X{i}" for i in (*range(1, 6), *range(10, 16), *range(20, 31))]  # ours: beyond the papers
    declared = [claim.id for entry in studies() for claim in load_study(entry.name).claims]
    assert sorted(declared) == sorted(wanted)
    assert [row["id"] for row in scorecard(load_results(RESULTS))] == wanted


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_committed_rows_are_what_the_committed_table_gives(folder: Path) -> None:
    request, table, cases, kept = committed(folder)
    assert kept["table_sha256"] == table.sha256
    assert judge_study(request, table, cases) == kept
    assert {one["id"] for one in cases} <= {request.study.case_id(case) for case in request.cases}


@pytest.mark.parametrize("most", [8, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_removing_numbers_never_improves_a_verdict(folder: Path, most: int | None) -> None:
    """Any quantity, moment, case or seed taken away: no claim moves toward holding, nor from failing to undecided."""
    request, table, _, kept = committed(folder)
    before = {row["id"]: row for row in kept["claims"]}
    for removed, rest, claims in _removals(request, table, most):
        for claim in claims:
            row = judge_claim(_without_shows(claim), rest, request.declared_seeds, before[claim.id])
            require_no_better(before[claim.id], row, removed)


def require_no_better(before: dict[str, Any], after: dict[str, Any], removed: str) -> None:
    """Neither of a claim's two verdicts has moved towards holding, and no more of its parts hold than did before."""
    for outcome, parts in (("outcome", "parts"), ("survives_outcome", "controls")):
        if before[parts]:
            place = before["id"], parts, removed
            assert OUTCOMES.index(after[outcome]) <= OUTCOMES.index(before[outcome]), place
            held = [{part["name"] for part in row[parts] if part["verdict"] == "holds"} for row in (after, before)]
            assert held[0] <= held[1], place


def _without_shows(claim: Claim) -> Claim:
    about = {name: getattr(claim, name) for name in ("says", "where", "paper", "parts", "controls")}
    return Claim(claim.id, **about)


def _removals(request: Request, table: Table, most: int | None) -> Iterator[tuple[str, Table, list[Claim]]]:
    """Tables without something, and the claims that read it: a quantity, also at one moment or of one arm; a seed; a case.

    ``most``: how many of each kind (``None``: all of them). Last come random halves of the rows.
    """
    claims = list(request.study.claims)
    read = sorted({one.name for claim in claims for one in claim.quantities()})
    small = table.where(quantity=read)

    def some(entries: Iterable[Any]) -> list[Any]:
        found = list(dict.fromkeys(entries))
        return found[:: max(1, len(found) // most)] if most else found

    def readers(quantity: str) -> list[Claim]:
        return [claim for claim in claims if quantity in {one.name for one in claim.quantities()}]

    for quantity in read:
        yield f"quantity {quantity}", small.without(quantity=quantity), readers(quantity)
    for one in some(one for claim in claims for one in claim.quantities()):
        where = one.where if one.at is None else {**one.where, "at": one.at}
        yield f"{one}", small.without(quantity=one.name, **where), readers(one.name)
    for seed in some(small.unique("seed")):
        yield f"seed {seed}", small.without(seed=seed), claims
    for case in some(tuple(request.study.case_columns(case).items()) for case in request.cases):
        yield f"case {case}", small.without(**dict(case)), claims
    random = np.random.default_rng(0)
    for share in (0.03, 0.1, 0.5) if claims else ():
        kept = random.random(len(small)) >= share
        columns = {name: Column(column.words, column.codes[kept]) for name, column in small.columns.items()}
        yield f"{share:.0%} of all rows", Table(columns, small.values[kept]), claims


def test_removing_twice_is_no_better_than_removing_once() -> None:
    """What failed and lost its numbers stays failed, also when more is lost, and also when the parts are worded anew."""
    request, table, _, kept = committed(RESULTS / "spectral-bias" / "paper")
    (claim,) = request.study.claims
    (before,) = kept["claims"]
    assert before["outcome"] == "fails"
    parts, controls = ([replace(part, says=f"{n}") for n, part in enumerate(c)] for c in (claim.parts, claim.controls))
    reworded = Claim(claim.id, says="", where="", paper="", parts=parts, controls=controls)
    assert reworded.meaning() == claim.meaning()
    for rest in (table.without(seed=0), table.without(quantity="time"), table.without(quantity=["time", "head_start"])):
        after = judge_claim(reworded, rest, request.declared_seeds, before)
        assert [part["verdict"] for part in after["parts"]] == [part["verdict"] for part in before["parts"]]
        before = after


def test_what_failed_stays_failed_without_its_numbers_until_the_rule_changes() -> None:
    claim = Claim("X1", says="", where="", paper="", parts=[Part("a part", Quantity("a"), above=0)])
    before = judge_claim(claim, Table.from_rows(table_of([-1.0] * 5)), range(5))
    assert before["verdict"] == "fails"
    nothing = Table.from_rows(table_of([1.0] * 5, "other"))
    assert judge_claim(claim, nothing, range(5))["verdict"] == "not measured"
    after = judge_claim(claim, nothing, range(5), before)
    assert (after["verdict"], after["parts"][0]["note"]) == ("fails", LOST)
    measured_again = judge_claim(claim, Table.from_rows(table_of([1.0] * 5)), range(5), after)
    assert measured_again["verdict"] == "holds"


def test_a_swapped_table_marks_its_sentences_stale(tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "circle" / "paper", tmp_path / "circle" / "paper")
    path = tmp_path / "circle" / "paper" / "table.csv"
    text = path.read_text().replace("epochs_top,", "epochs_x,").replace("epochs_bottom,", "epochs_top,")
    path.write_text(text.replace("epochs_x,", "epochs_bottom,"))
    cases = json.loads((path.parent / "cases.json").read_text())
    found = judge_study(Request("circle", "paper", tmp_path, tmp_path), Table.read(path), cases)
    row = next(row for row in found["claims"] if row["id"] == "C12")
    assert row["stale"]
    assert row["outcome"] in ("fails", "part")
    assert {part["verdict"] for part in row["parts"]} == {"fails"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_findings_are_written_for_the_committed_table(folder: Path) -> None:
    request, table, _, _ = committed(folder)
    found = read_findings(folder / "findings.md", table)
    assert set(found) >= {claim.id for claim in request.study.claims}
    assert not any(one.stale for one in found.values())
    assert not any("{{" in one.text for one in found.values())


def test_claims_whose_rule_is_younger_than_their_data_say_so() -> None:
    marked = {row["id"] for row in scorecard(load_results(RESULTS)) if row["rule_record"]["after_data"]}
    assert marked >= {"C20", "C22", "C23", "C25", "F2", "F3", "B6", "C14"}


def test_the_highest_scale_wins_and_smoke_judges_nothing() -> None:
    def result(scale: str, words: str) -> dict[str, Any]:
        return {"study": "s", "scale": scale, "claims": [{"id": "C9", "verdict": words}]}

    assert scorecard([result("smoke", "a"), result("desk", "b"), result("paper", "c")])[0]["verdict"] == "c"
    assert scorecard([result("desk", "b")])[0]["verdict"] == "b"


def test_every_claim_of_a_paper_stands_in_one_of_its_five_lines() -> None:
    rows = scorecard(load_results(RESULTS))
    for paper in {row["paper"] for row in rows}:
        own = [row for row in rows if row["paper"] == paper]
        listed = [name for _, names in summary_lines(own) for name in names]
        assert sorted(listed) == sorted(row["id"] for row in own)
        assert len(summary_lines(own)) == 5


def test_figures_named_by_claims_exist() -> None:
    for row in scorecard(load_results(RESULTS)):
        if row["figure"] is not None:
            assert (ROOT / row["figure"]).exists(), row["figure"]


def test_a_misspelt_study_gets_a_hint() -> None:
    with pytest.raises(InputError, match="did you mean circle"):
        find_studies("cirle")
    assert set(SCALES) == {"smoke", "desk", "paper"}


# --- the circle's claims ---------------------------------------------------------------------------------

GOOD: dict[tuple[str, str], float] = {
    ("epochs_to_reach", ""): 50.0,
    ("epochs_top", ""): 3.0,
    ("epochs_bottom", ""): 200.0,
    ("loss", "3"): 0.25,
    ("overlap_cosine", "3-200"): 0.95,
    ("overlap_cosine", "0-3"): 0.3,
    ("overlap_cosine", "0-200"): 0.3,
    ("artefact_rms", "8000"): 0.2,
    ("artefact_rms", "200"): 0.01,
    ("near_top_30", "0"): 0.1,
    ("axial", "0"): 0.1,
}
PREFIXES = {"allocation": 1.0, "tangent_change": 0.9, "near_top_30": 0.8, "axial": 0.9}
BAD: dict[str, dict[tuple[str, str], float]] = {
    "C7": {("epochs_to_reach", ""): NEVER},
    "C8": {("epochs_to_reach", ""): 50.0},
    "C9": {("allocation", "3"): -1.0, ("allocation", "plateau"): -1.0, ("loss", "3"): 0.5},
    "C10": {("overlap_cosine", "3-200"): 0.0, ("allocation", "200"): -1.0},
    "C11": {("tangent_change", "3"): 0.1, ("tangent_change", "200"): 0.1},
    "C12": {("epochs_top", ""): 90.0, ("epochs_bottom", ""): 2.0},
    "C13": {("artefact_rms", "8000"): 0.0},
    "C14": {("near_top_30", "200"): 0.05},
    "C15": {("axial", "200"): 0.0},
}


def changed(table: Table, wanted: dict[tuple[str, str], float]) -> Table:
    """A copy of a table with other numbers, by quantity and moment."""
    values = table.values.copy()
    quantity, at = table.columns["quantity"], table.columns["at"]
    for (name, moment), value in wanted.items():
        values[quantity.matches({name}) & at.matches({moment})] = value
    return Table(table.columns, values)


@pytest.fixture(scope="module")
def ideal_circle() -> Table:
    """Five seeds with numbers as the paper would have them: turning and clustering grow from layer to layer."""
    whole = Table.read(RESULTS / "circle" / "paper" / "table.csv").where(seed=list(range(5)))
    prefixed = {(name, at): value for name, value in PREFIXES.items() for at in whole.unique("at", quantity=name)}
    table = changed(whole, prefixed | GOOD)
    layers = np.array([float(text or 5) for text in table.columns["layer"].texts()])
    table.values *= np.where(table.columns["quantity"].matches({"near_top_30", "axial"}), layers / 5, 1)
    frozen = table.columns["arm"].matches({"pwc-frozen"}) & table.columns["quantity"].matches({"epochs_to_reach"})
    table.values[frozen] = NEVER
    return table


def circle_outcomes(table: Table) -> dict[str, set[str]]:
    judged = [judge_claim(_without_shows(claim), table, range(5)) for claim in load_study("circle").claims]
    return {row["id"]: {row["outcome"], row["survives_outcome"]} for row in judged}


def test_an_ideal_table_makes_every_claim_hold(ideal_circle: Table) -> None:
    assert set().union(*circle_outcomes(ideal_circle).values()) == {"holds"}


@pytest.mark.parametrize("claim", BAD)
def test_a_falsified_table_flips_the_verdict(ideal_circle: Table, claim: str) -> None:
    assert circle_outcomes(changed(ideal_circle, BAD[claim]))[claim] == {"fails"}
