"""Verdicts follow the rule; a falsified table flips them; the committed scorecard is current."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unlazy.claims.catalogue import CATALOGUE, by_id
from unlazy.claims.scorecard import load_results, number_text, scorecard, to_markdown
from unlazy.claims.verdict import Part, claim_row, combine, interval
from unlazy.studies.halfspace.circle.claims import claims
from unlazy.studies.halfspace.circle.pilot import compare
from unlazy.studies.halfspace.circle.pilot import to_markdown as to_table
from unlazy.studies.registry import SCALES, find_studies

ROOT = Path(__file__).parent.parent
PAPER = ROOT / "results" / "circle" / "paper.json"


def part(values: list[float], side: str = ">", threshold: float = 0.0, horizon: float = np.inf) -> dict[str, Any]:
    return Part("a part", side, threshold, "", np.array(values, dtype=float), horizon).judge()


def test_catalogue_has_every_claim_once() -> None:
    wanted = [f"C{i}" for i in range(1, 30)] + [f"F{i}" for i in range(1, 7)]
    wanted += [f"B{i}" for i in range(1, 13)] + [f"L{i}" for i in range(1, 12)]
    assert [claim.id for claim in CATALOGUE] == wanted
    assert by_id("C7").study == "circle"
    with pytest.raises(KeyError, match="C99"):
        by_id("C99")


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "holds"),
        ([-1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "holds"),  # nine of ten
        ([-1, -1, 3, 4, 5, 6, 7, 8, 9, 10], "partly"),  # eight of ten
        ([-9, -9, -9, -9, -9, 6, 7, 8, 9, 10, 11], "partly"),
        ([-1] * 6 + [1] * 4, "fails"),
        ([1, 2], "holds"),  # few seeds: least to greatest
        ([0.0] * 10, "fails"),  # on the threshold is not past it
    ],
)
def test_the_rule(values: list[float], verdict: str) -> None:
    assert part(values)["verdict"] == verdict
    assert part([-v for v in values], side="<")["verdict"] == verdict


def test_times_that_were_not_seen_are_censored() -> None:
    never = float("inf")
    assert part([never] * 10, ">", 2000, horizon=8000)["verdict"] == "holds"
    assert part([never] * 10, ">", 2000, horizon=300)["verdict"] == "censored"
    assert part([50.0] * 9 + [never], "<", 400, horizon=300)["verdict"] == "holds"
    assert part([50.0] * 8 + [never] * 2, "<", 400, horizon=300)["verdict"] == "censored"
    assert part([50.0] * 6 + [never] * 4, ">", 2000, horizon=300)["verdict"] == "fails"  # most were seen to be fast
    row = part([never] * 10, ">", 2000, horizon=8000)
    assert row["value"] is None
    assert row["agree"] == 10
    assert number_text(row["value"], row["interval"], "epochs") == "never [never, never] epochs"


def test_parts_combine() -> None:
    assert combine(["holds", "holds"]) == "holds"
    assert combine(["holds", "censored"]) == "partly"
    assert combine(["fails", "censored"]) == "fails"
    assert combine(["fails", "partly", "censored"]) == "partly"
    assert combine(["fails", "fails"]) == "fails"
    assert combine(["censored"]) == "cannot tell"
    assert combine(["fails", "partly"]) == "partly"


def test_interval_covers_the_median() -> None:
    """Over many samples of 15 normal numbers the 95 % interval holds the true median about 95 % of the time."""
    random = np.random.default_rng(1)
    inside = [low <= 0 <= high for low, high in (interval(random.normal(size=15)) for _ in range(200))]
    assert 0.90 <= np.mean(inside) <= 0.99


# --- the circle's claims ---------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "epochs_to_reach": 50.0,
    "epochs_top": 3.0,
    "epochs_bottom": 200.0,
    "loss_3": 0.25,
    "overlap_cosine_3_200": 0.95,
    "overlap_cosine_0_3": 0.3,
    "overlap_cosine_0_200": 0.3,
    "artefact_rms_end": 0.2,
    "artefact_rms_200": 0.01,
}
PREFIXES = {"allocation": 1.0, "tangent_change": 0.9, "near_top_30": 0.8, "axial": 0.9}
BAD = {
    "C7": {"epochs_to_reach": None},
    "C8": {"epochs_to_reach": 50.0},
    "C9": {"allocation_3": -1.0, "allocation_plateau": -1.0, "loss_3": 0.5},
    "C10": {"overlap_cosine_3_200": 0.0, "allocation_200": -1.0},
    "C11": {"tangent_change_3": 0.1, "tangent_change_200": 0.1},
    "C12": {"epochs_top": 90.0, "epochs_bottom": 2.0},
    "C13": {"artefact_rms_end": 0.0},
    "C14": {"near_top_30_200": 0.05},
    "C15": {"axial_200": 0.0},
}


def rewritten(table: dict[str, Any], change: Callable[[str, str], Any]) -> dict[str, Any]:
    """A copy of a results table with other numbers; ``change(stack, name)`` gives the number or ``...`` to keep it."""
    table = copy.deepcopy(table)
    for key, stack in table["stacks"].items():
        for name, values in stack["values"].items():
            new = change(key, name)
            if new is not ...:
                stack["values"][name] = [[new] * len(v) if isinstance(v, list) else new for v in values]
    return table


def ideal(stack: str, name: str) -> Any:
    if stack.endswith("frozen") and name == "epochs_to_reach":
        return None
    if name in ("near_top_30_0", "axial_0", "allocation_0"):
        return 0.1
    return GOOD.get(name, next((value for prefix, value in PREFIXES.items() if name.startswith(prefix)), ...))


def deepest(table: dict[str, Any]) -> dict[str, Any]:
    """Clustering and turning must grow from layer to layer in the ideal table."""
    for stack in table["stacks"].values():
        for name in {"axial_200", "near_top_30_200"} & stack["values"].keys():
            stack["values"][name] = [np.linspace(0.2, 0.9, len(v)).tolist() for v in stack["values"][name]]
    return table


def verdicts(table: dict[str, Any]) -> dict[str, str]:
    return {row["id"]: row["verdict"] for row in claims(table)}


@pytest.fixture(scope="module")
def paper() -> dict[str, Any]:
    return json.loads(PAPER.read_text())


def test_an_ideal_table_makes_every_claim_hold(paper: dict[str, Any]) -> None:
    assert set(verdicts(deepest(rewritten(paper, ideal))).values()) == {"holds"}


@pytest.mark.parametrize("claim", BAD)
def test_a_falsified_table_flips_the_verdict(paper: dict[str, Any], claim: str) -> None:
    wrong = BAD[claim]
    table = deepest(rewritten(paper, ideal))
    found = verdicts(rewritten(table, lambda stack, name: wrong.get(name, ...)))
    assert found[claim] == "fails"


def test_committed_rows_follow_from_the_committed_table(paper: dict[str, Any]) -> None:
    assert claims(paper) == paper["claims"]


def test_scorecard_has_all_rows_and_the_highest_scale_wins() -> None:
    rows = scorecard(load_results(ROOT / "results"))
    assert [row["id"] for row in rows] == [claim.id for claim in CATALOGUE]
    assert {row["scale"] for row in rows if row["study"] == "circle"} == {"paper"}
    keys = (
        "id paper where statement paper_value study scale verdict value unit interval seeds agree rule settings parts"
    )
    for row in rows:
        assert set((keys + " controls why run figure command provenance").split()) == set(row)
    weak = copy.deepcopy([r for r in load_results(ROOT / "results") if r["scale"] == "paper"])
    for table in weak:
        table["scale"] = "smoke"
    assert {row["verdict"] for row in scorecard(weak)} == {"not run yet"}


TABLES = [path for path in sorted((ROOT / "results").glob("*/*.json")) if path.stem in SCALES]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_committed_verdicts_are_those_of_the_committed_rules(path: Path) -> None:
    """Judged again from the measured numbers beside them: nobody edited a verdict, no rule changed unseen."""
    table = json.loads(path.read_text())
    (entry,) = find_studies(table["study"])
    assert json.loads(json.dumps(entry.load().claims(table))) == table["claims"]


def test_a_scale_that_judges_nothing_cannot_tell() -> None:
    row = claim_row("C7", [], scale="smoke", settings={}, provenance={}, why="")
    assert row["verdict"] == "cannot tell"


def test_scorecard_page_is_current() -> None:
    wanted = to_markdown(scorecard(load_results(ROOT / "results")))
    assert (ROOT / "docs" / "scorecard.md").read_text() == wanted, "run `make docs`"


def test_figures_named_by_claims_exist() -> None:
    for row in scorecard(load_results(ROOT / "results")):
        if row["figure"]:
            assert (ROOT / row["figure"]).is_file(), row["figure"]


def test_we_agree_with_the_prototype(paper: dict[str, Any]) -> None:
    """Means at the pilot preset lie within two of the prototype's standard deviations, and the page says so."""
    rows = compare(paper)
    assert len(rows) >= 50
    assert max(row["deviations"] for row in rows) < 2
    assert (ROOT / "docs" / "circle_pilot.md").read_text() == to_table(rows), "run `make docs`"
