"""Findings: what a study found, in words, written for one table.

Findings are a Markdown file beside the table. Its first line has the hash of the table it was written for; then comes a section
for each claim. Numbers are filled in from the table: ``{{loss, at=3, arm=pwc}}`` is the median over seeds, ``{{least loss,
...}}`` and ``{{greatest loss, ...}}`` are the extremes, ``{{low loss, ...}}`` and ``{{high loss, ...}}`` the ends of the 95 %
interval of the median. When the table changes, the sentences stay and are marked stale until somebody has read them again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.claims.rule import interval, median_of
from unlazy.runtime import InputError, UnlazyError
from unlazy.store import write_file
from unlazy.studies.table import Table

FINDINGS_FILE = "findings.md"
STAMP = re.compile(r"<!-- written for table ([0-9a-f]+) -->\n?")
PLACEHOLDER = re.compile(r"\{\{(.*?)\}\}", re.S)
STATISTICS: dict[str, Callable[[NDArray[np.float64]], Any]] = {
    "median": median_of,
    "least": np.nanmin,
    "greatest": np.nanmax,
    "low": lambda values: interval(values)[0],
    "high": lambda values: interval(values)[1],
}


@dataclass(frozen=True)
class Finding:
    """One section: its sentences, and whether the table has changed since somebody accepted them."""

    text: str
    stale: bool


def read_findings(path: Path, table: Table) -> Mapping[str, Finding]:
    """The sections of a findings file by claim, with their numbers filled in; empty where there is no file."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    stamp = STAMP.match(text)
    stale = stamp is None or not table.sha256.startswith(stamp[1])
    sections = re.split(r"^## +(\S+).*$", STAMP.sub("", text, count=1), flags=re.M)[1:]
    found = {}
    for name, body in zip(sections[::2], sections[1::2], strict=True):
        words = PLACEHOLDER.sub(lambda match: _fill_in(match[1], table), body)
        found[name] = Finding(" ".join(words.split()), stale)
    return found


def stamp_findings(path: Path, table: Table) -> None:
    """Write the hash of the table into the findings: somebody has read them beside this table."""
    if not path.exists():
        raise InputError(f"there are no findings in {path}; write a section `## CLAIM` a claim.")
    text = STAMP.sub("", path.read_text(encoding="utf-8"), count=1)
    write_file(path, f"<!-- written for table {table.sha256[:16]} -->\n{text}".encode())


def _fill_in(placeholder: str, table: Table) -> str:
    """The number for ``[statistic] quantity, column=value, ...``; a dash where the table has no such number."""
    name, *conditions = (word.strip() for word in " ".join(placeholder.split()).split(","))
    statistic, _, rest = name.partition(" ")
    compute, quantity = (STATISTICS[statistic], rest) if statistic in STATISTICS else (median_of, name)
    where: dict[str, Any] = dict(condition.split("=", 1) for condition in conditions)
    try:
        values = table.select(quantity, **where)
    except UnlazyError as error:
        raise InputError(f"findings ask for {{{{{placeholder}}}}}: {error}") from error
    return f"{float(compute(values)):.3g}" if np.isfinite(values).any() else "–"
