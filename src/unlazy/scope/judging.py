"""From a history to a verdict, and a verdict onto paper."""

from __future__ import annotations

import json
from pathlib import Path

from unlazy.scope.history import History
from unlazy.scope.verdict import Verdict, judge
from unlazy.store import write_file


def verdict_of(history: History) -> Verdict:
    """Lazy, rich, mixed or cannot tell, with the evidence."""
    return judge(history)


def write_verdict(folder: Path, verdict: Verdict) -> None:
    """``verdict.json`` of a run folder, replaced."""
    write_file(folder / "verdict.json", (json.dumps(verdict.to_dict(), indent=1) + "\n").encode())
