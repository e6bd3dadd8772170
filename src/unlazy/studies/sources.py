"""What a number was computed with: the commit, whether the checkout had changes, the source files behind a study, the machine."""

from __future__ import annotations

import ast
import hashlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from unlazy import runtime

ROOT = Path(runtime.__file__).parent
COMPUTING_FOLDERS = ("data", "models", "kernels", "probes", "theory", "training", "scope", "estimators", "studies")
NOT_MEASURING = ("unlazy.studies.engine", "unlazy.studies.runner", "unlazy.studies.findings", "unlazy.studies.rules")


@cache
def sources_sha256(module: str, path: str) -> str:
    """SHA-256 over the source of a study and of all modules it computes with, imported directly or by one of them.

    Modules that draw, judge or store are left out: they change no measured number.
    """
    seen, waiting = {module: Path(path).read_bytes()}, list(_computing_imports(Path(path).read_bytes()))
    while waiting:
        name = waiting.pop()
        file = ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py")
        if name not in seen and file.is_file():
            seen[name] = file.read_bytes()
            waiting += _computing_imports(seen[name])
    digest = hashlib.sha256()
    for name in sorted(seen):
        digest.update(name.encode() + b"\0" + seen[name] + b"\0")
    return digest.hexdigest()


def _computing_imports(source: bytes) -> Iterator[str]:
    """The computing modules of this package that a source file imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            inside = node.module.removeprefix("unlazy.")
            if inside != node.module and inside.startswith(COMPUTING_FOLDERS) and node.module not in NOT_MEASURING:
                yield node.module


@cache
def commit_facts() -> dict[str, Any]:
    """The commit of this package's checkout, and whether its source is unchanged since; empty outside of a checkout."""
    try:
        found = _git("rev-parse", "HEAD").strip()
        changed = _git("status", "--porcelain", "--", str(ROOT)).strip()
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": found, "clean": not changed}


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout


def merge_provenance(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The provenance of several cases as one: shared facts once, facts that differ as a sorted list, the earliest start."""
    if not cases:
        return {}
    merged: dict[str, Any] = {"started": min(facts["started"] for facts in cases if "started" in facts)}
    for key in sorted({key for facts in cases for key in facts} - {"started", "seconds"}):
        values = sorted({str(facts.get(key)) for facts in cases})
        merged[key] = cases[0].get(key) if len(values) == 1 else values
    return dict(sorted(merged.items()))
