"""What the engine is asked for: a study at a scale, where its files lie, and how its cases are run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from unlazy.runtime import InputError
from unlazy.studies.registry import load_study
from unlazy.studies.sources import sources_sha256
from unlazy.studies.study import Case, Results, Settings, Study, Work
from unlazy.studies.table import Table


@dataclass(frozen=True)
class Request:
    """Which study at which scale, with which changed settings, and where its runs, results and data sets lie.

    ``reference``: the name of a study of this package, or the path of a Python file. ``seeds``: ``None`` for the study's own.
    """

    reference: str
    scale: str
    runs: Path
    results: Path
    seeds: tuple[int, ...] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    data: Path | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields only, not the loaded study: another process loads it itself."""
        return Request, tuple(getattr(self, one.name) for one in fields(self))

    @cached_property
    def study(self) -> Study:
        """The study, imported when it is first needed."""
        return load_study(self.reference)

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
        found = self.study.cases(self.settings, self.declared_seeds)
        labels = [self.study.label(case) for case in found]
        if len(set(labels)) < len(labels):
            double = sorted({label for label in labels if labels.count(label) > 1})
            raise InputError(f"study {self.study.name}: several cases are {', '.join(double[:3])}; add to its columns.")
        return found

    @property
    def folder(self) -> Path:
        """Where the results of this scale lie."""
        return self.results / self.study.name / self.scale

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
        return sources_sha256(module, str(sys.modules[module].__file__))

    def with_table(self, table: Table) -> Results:
        """The study with its table, as figures take it."""
        return Results(self.study, self.scale, self.settings, self.declared_seeds, table, self.work, self.folder)


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
