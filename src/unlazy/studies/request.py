"""What the engine is asked for: a study at a scale, where its files lie, and how its cases are run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from unlazy.runtime import InputError, short_hash
from unlazy.store import write_file
from unlazy.studies.registry import load_study
from unlazy.studies.sources import sources_sha256
from unlazy.studies.study import Case, Results, Settings, Study, Work
from unlazy.studies.table import Table


@dataclass(frozen=True)
class Request:
    """Which study at which scale, with which changed settings, and where its runs, results and data sets lie.

    ``reference``: the name of a study of this package, or the path of a Python file. ``seeds``: ``None`` for the study's own.
    ``sweep``: settings with several values each; every combination is measured, and they become columns of one table.
    """

    reference: str
    scale: str
    runs: Path
    results: Path
    seeds: tuple[int, ...] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    data: Path | None = None
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields, not the loaded study: another process loads it itself. A study of the user's own goes as its text,
        since another host may not have the file.
        """
        source = None if self.own_file is None else Path(self.reference).read_text()
        return _restore_request, (source, *(getattr(self, one.name) for one in fields(self)))

    @cached_property
    def study(self) -> Study:
        """The study, imported when it is first needed. The settings of a sweep are columns of its table."""
        found = load_study(self.reference)
        return replace(found, columns=(*found.columns, *(name for name in self.sweep if name not in found.columns)))

    @property
    def own_file(self) -> str | None:
        """The name of the file that the study is in; ``None`` for a study of this package."""
        return Path(self.reference).name if self.reference.endswith(".py") else None

    @cached_property
    def settings(self) -> Settings:
        """The settings of the scale, with the changes."""
        return self.study.settings(self.scale, self.changes)

    @cached_property
    def declared_seeds(self) -> tuple[int, ...]:
        """The seeds that verdicts need numbers of."""
        return self.study.seeds_of(self.scale) if self.seeds is None else self.seeds

    @cached_property
    def cases(self) -> list[Case]:
        """Every declared case. Raises ``InputError`` if two cases have the same columns in the table."""
        combinations = [dict(zip(self.sweep, values, strict=True)) for values in product(*self.sweep.values())]
        swept = [self.study.settings(self.scale, {**self.changes, **values}) for values in combinations]
        found = [case for settings in swept for case in self.study.cases(settings, self.declared_seeds)]
        labels = [self.study.label(case) for case in found]
        for name in self.sweep:
            if any(name not in self.study.case_columns(case) for case in found):
                raise InputError(f"study {self.study.name} has cases that do not depend on {name}; it cannot be swept.")
        if len(set(labels)) < len(labels):
            double = sorted({label for label in labels if labels.count(label) > 1})
            raise InputError(f"study {self.study.name}: several cases are {', '.join(double[:3])}; add to its columns.")
        return found

    @property
    def folder(self) -> Path:
        """Where the results of this scale lie."""
        by = f"-by-{'-'.join(self.sweep)}" if self.sweep else ""
        return self.results / self.study.name / f"{self.scale}{by}"

    @property
    def work(self) -> Work:
        """What ``measure`` is given beside a case."""
        return Work(self.study.name, self.scale, self.runs / self.study.name, self.device, self.data)

    def case_file(self, case: Case) -> Path:
        """The file in which the rows of a measured case are saved."""
        name = f"{self.study.label(case) or 'case'}-{self.study.case_id(case)}"
        return self.runs / self.study.name / "measured" / f"{name}.json"

    def sources_hash(self) -> str:
        """Hash of the code that measures: saved numbers of other code are not used."""
        module = self.study.measure.__module__
        name = module if self.own_file is None else self.own_file  # a module's name would tell where the file lies
        return sources_sha256(name, str(sys.modules[module].__file__))

    def with_table(self, table: Table) -> Results:
        """The study with its table, as figures take it."""
        return Results(self.study, self.scale, self.settings, self.declared_seeds, table, self.work, self.folder)


def _restore_request(source: str | None, reference: str, *others: Any) -> Request:
    """A request in another process; if that host has no such file with that text, the study is loaded from a copy."""
    path = Path(reference)
    if source is not None and not _has_text(path, source):
        folder = Path(tempfile.gettempdir()) / f"unlazy-study-{short_hash(source)}"
        reference = str(folder / path.name)
        if not _has_text(Path(reference), source):
            write_file(Path(reference), source.encode())
    return Request(reference, *others)


def _has_text(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False


@dataclass(frozen=True)
class ExecutionOptions:
    """How cases are run: in how many processes or on which Dask cluster, how often a failed case is tried again, for how long.

    ``seconds``: no case starts that would end later than this. ``only``: a pattern for the columns of the cases to run.
    """

    workers: int = 1
    cluster: str | None = None
    retries: int = 0
    seconds: float | None = None
    only: str = ""
