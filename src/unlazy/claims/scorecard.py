"""The scorecard: one row per claim of all studies, read from the result files, and the texts of its columns."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Context
from pathlib import Path
from typing import Any

from unlazy.claims.rule import NO_CONTROLS
from unlazy.runtime import StoreError

Row = dict[str, Any]
SCALE_ORDER = ("smoke", "desk", "paper")
MARKS = {"holds": "●", "part": "◐", "undecided": "◌", "fails": "✕", NO_CONTROLS: " "}
PAPERS = {
    "half-space": "Half-space feature learning",
    "emergence": "Feature learning: emergence from inputs",
    "tangent": "An adaptive tangent feature perspective",
    "estimators": "Our own: estimators for tables",
    "beyond": "Our own: beyond the papers",
}
LETTERS = "CFBL"  # half-space (C, F), emergence (B), tangent (L); others come last
AFTER_DATA = "rule written after a first measurement"


def results_folder() -> Path:
    """``results`` in the current folder, else the copy shipped with the package, else that of the checkout."""
    own, shipped = Path("results"), shipped_results()
    return own if own.is_dir() or shipped is None else shipped


def shipped_results() -> Path | None:
    """The results that came with the package or lie in its checkout; ``None`` if there are none."""
    package = Path(__file__).parent.parent
    return next((place / "results" for place in (package, package.parent.parent) if (place / "results").is_dir()), None)


def load_results(folder: Path) -> list[dict[str, Any]]:
    """All ``STUDY/SCALE/results.json`` files, lowest scale first."""
    found = []
    for path in sorted(folder.glob("*/*/results.json")):
        try:
            result = json.loads(path.read_text())
            found.append((SCALE_ORDER.index(result["scale"]), path.parent.parent.name, result))
            assert isinstance(result["claims"], list)
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise StoreError(f"{path} is not a result file ({error!r}); run its study again.") from error
    return [result for _, _, result in sorted(found, key=lambda entry: entry[:2])]


def scorecard(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for every judged claim, from the highest scale; a smoke result never replaces another."""
    judged: dict[tuple[str, str], Row] = {}
    for result in results:
        for row in result["claims"]:
            key = result["study"], row["id"]  # two studies may use the same claim id
            if result["scale"] != "smoke" or key not in judged:
                about = {name: result.get(name) for name in ("settings", "provenance", "table_sha256")}
                judged[key] = {**row, **about}
    return [judged[key] for key in sorted(judged, key=lambda key: (claim_order(key[1]), key[0]))]


def claim_order(name: str) -> tuple[int, str, int, str]:
    """Sort key: C1, C2, ..., C10, ..., C16, C16b, ..., F1, ..., B1, ..., L1, then all other ids."""
    letters, digits, rest = re.match(r"(\D*)(\d*)(.*)", name).groups()  # type: ignore[union-attr]
    known = LETTERS.index(letters) if letters and letters in LETTERS else len(LETTERS)
    return known, letters, int(digits or 0), rest


def three_digits(number: float) -> str:
    """A number with three digits, rounded half away from zero, as on the page.

    >>> three_digits(0.5625), three_digits(-0.5625), three_digits(1.65e-16), three_digits(131.4)
    ('0.563', '-0.563', '1.65e-16', '131')
    """
    rounded = Context(prec=3, rounding=ROUND_HALF_UP).create_decimal_from_float(number)
    return f"{float(rounded):.3g}"


def number_text(shown: Mapping[str, Any]) -> str:
    """``1.3 [1.1, 1.5] epochs``, from the row of a part or shown number. "never" stands for infinity, a dash for no number.

    >>> number_text({"value": 7, "interval": [6, None], "unit": "epochs", "seeds": 5})
    '7 [6, never] epochs'
    >>> number_text({"value": None, "interval": [None, None], "unit": "times", "seeds": 5})
    'never reached'
    """
    measured = shown["seeds"] > shown.get("missing", 0)
    gap = "never" if measured else "–"  # JSON has no infinity: of a measured part, a number that is not there is one
    numbers = (shown["value"], *shown["interval"])
    if measured and all(number is None for number in numbers):
        return "never reached"
    middle, low, high = (gap if number is None else three_digits(number) for number in numbers)
    return f"{middle} [{low}, {high}] {shown['unit'] or ''}".strip()


def ours_text(row: Mapping[str, Any]) -> str:
    """The number of a claim's first part as text; empty where it was not measured."""
    head = row["parts"][0] if row["parts"] else None
    return "" if head is None or head["missing"] == head["seeds"] else number_text(head)


def seeds_text(row: Mapping[str, Any]) -> str:
    """How many of the declared seeds pass the first part, as ``9/10``; for an identity its random cases."""
    if not row["parts"]:
        return ""
    return f"{row['agree']}/{row['seeds']}" + (" cases" if row["identity"] else "")


def verdict_text(row: Mapping[str, Any]) -> str:
    """The verdict of the replication with its mark."""
    return f"{MARKS[row['outcome']]} {row['verdict']}"


def caveats_text(row: Mapping[str, Any]) -> str:
    """Warnings about a row: its rule was written after the data, or its findings are stale."""
    late = bool(row["rule_record"] and row["rule_record"]["after_data"])
    return "; ".join(words for words, holds in ((AFTER_DATA, late), ("findings stale", row["stale"])) if holds)


def survives_text(row: Mapping[str, Any]) -> str:
    """The verdict of the controls with its mark."""
    return f"{MARKS[row['survives_outcome']]} {row['survives']}".strip()


def is_exact(row: Mapping[str, Any]) -> bool:
    """Whether all parts of a claim are identities, checked on random cases."""
    return bool(row["parts"]) and all(part["identity"] for part in row["parts"])


def summary_lines(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """The claims of a paper by outcome: five titles, each with its claim ids."""

    def ids(outcome: str, *, exact: bool | None = None) -> list[str]:
        return [row["id"] for row in rows if row["outcome"] == outcome and exact in (None, is_exact(row))]

    return [
        ("Exactly true, checked on random cases", ids("holds", exact=True)),
        ("Replicates", ids("holds", exact=False)),
        ("Replicates in part", ids("part")),
        ("Does not replicate", ids("fails")),
        ("Undecided", ids("undecided")),
    ]
