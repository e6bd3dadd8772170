"""A study is data: what varies, how one case is measured, what is claimed, what is drawn. The engine runs all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, make_dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from unlazy import plots
from unlazy.claims.claim import Claim, Quantity
from unlazy.runtime import InputError, require, short_hash
from unlazy.studies.table import DIGITS, Row, Rows, Table, as_text

SCALES = ("smoke", "desk", "paper")
Settings = Any  # a frozen dataclass that each study defines, or that is made from its dictionary of settings
Case = Any  # likewise: the plain settings of one measurement
CaseProgress = Callable[[int, int], None]
"""Called while a case is measured, with how many steps are done and how many there are."""


@dataclass(frozen=True)
class Work:
    """Where and how a case is measured.

    ``runs``: the study's folder for run folders. ``data``: the folder of data sets. ``progress(done, total)``: to be called now
    and then during a long measurement.
    """

    study: str
    scale: str
    runs: Path
    device: str = "cpu"
    data: Path | None = None
    progress: CaseProgress = field(default=lambda done, total: None, repr=False)

    def stage(self, number: int, of: int) -> Work:
        """The same work for stage ``number`` (from 0) of a case that has ``of`` stages: it reports its share of the whole."""
        return replace(self, progress=lambda done, total: self.progress(number * total + done, of * total))


@dataclass(frozen=True)
class Results:
    """A measured study at one scale, from which figures are drawn. ``folder``: where its table and arrays lie."""

    study: Study
    scale: str
    settings: Settings
    seeds: tuple[int, ...]
    table: Table
    work: Work
    folder: Path

    def cases(self) -> list[Case]:
        """Every case declared at this scale."""
        return self.study.cases(self.settings, self.seeds)


@dataclass(frozen=True)
class Figure:
    """A figure: its file name, its title in reports, and the function that draws it.

    ``caption``: by default the docstring of that function. ``from_runs``: it reads run folders, so it can only be drawn where
    these are.
    """

    name: str
    title: str
    draw: Callable[[Results], plots.Figure]
    caption: str = ""
    from_runs: bool = False

    def __post_init__(self) -> None:
        if not self.caption:
            object.__setattr__(self, "caption", " ".join((self.draw.__doc__ or "").split()))


@dataclass(frozen=True)
class Study:
    """What a study declares.

    ``scales``: settings by scale, as frozen dataclasses or plain dictionaries. ``seeds``: the number of seeds of each scale;
    seeds count from 0. ``measure(case, work)`` returns the rows of one case; trainings go to run folders under ``work.runs``,
    from which an interrupted measurement resumes. ``varies``: what differs from case to case, values by name; a case then has
    one value of each, a seed, and the settings. Where a plain grid is not enough, ``cases(settings, seeds)`` lists the cases:
    frozen dataclasses of plain values, whose fields ``columns`` (and ``seed``, if they have one) are columns of the table.
    ``needs_gpu``: scales that two CPU cores cannot measure. ``digits``: significant digits of a value in the table.
    """

    name: str
    paper: str
    scales: Mapping[str, Settings]
    seeds: Mapping[str, int]
    measure: Callable[[Case, Work], Rows | Iterable[Row]]
    cases: Callable[[Settings, Sequence[int]], list[Case]] = field(default=None)  # type: ignore[assignment]
    varies: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    figures: tuple[Figure, ...] = ()
    needs_gpu: tuple[str, ...] = ()
    digits: int = DIGITS

    def __post_init__(self) -> None:
        require(set(self.scales) <= set(SCALES), f"scales are among {', '.join(SCALES)}; got {', '.join(self.scales)}.")
        require(set(self.scales) == set(self.seeds), f"study {self.name}: scales and seeds must name the same scales.")
        from_dictionaries = {
            scale: _as_dataclass("Settings", {**entry, **{name: tuple(axis) for name, axis in self.varies.items()}})
            for scale, entry in self.scales.items()
            if isinstance(entry, Mapping)
        }
        object.__setattr__(self, "scales", {**self.scales, **from_dictionaries})
        if getattr(self, "cases") is None:  # noqa: B009
            object.__setattr__(self, "cases", partial(_grid_cases, tuple(self.varies)))
            object.__setattr__(self, "columns", (*self.columns, *self.varies))
        known = {figure.name for figure in self.figures}
        for claim in self.claims:
            exists = claim.figure is None or claim.figure in known
            require(exists, f"claim {claim.id} names the figure {claim.figure!r}; there are {', '.join(known)}.")

    def settings(self, scale: str, changes: Mapping[str, Any] | None = None) -> Settings:
        """The settings of a scale, with some fields changed."""
        found = self.scales.get(_check_scale(scale))
        if found is None:
            raise InputError(f"study {self.name} has no {scale} scale; it has {', '.join(self.scales)}.")
        unknown = sorted(set(changes or {}) - {one.name for one in fields(found)})
        known = ", ".join(one.name for one in fields(found))
        require(not unknown, f"study {self.name} has no setting {', '.join(unknown)}; there are seed, {known}.")
        return replace(found, **(changes or {}))

    def seeds_of(self, scale: str) -> tuple[int, ...]:
        """The declared seeds of a scale."""
        return tuple(range(self.seeds[_check_scale(scale)]))

    def case_columns(self, case: Case) -> dict[str, str]:
        """The columns of the table that identify a case within a scale, as texts: its fields, or those of its settings."""
        found = {}
        for name in (*self.columns, "seed"):
            holder = case if hasattr(case, name) else getattr(case, "settings", None)
            if hasattr(holder, name):
                found[name] = as_text(getattr(holder, name))
        return found

    def label(self, case: Case) -> str:
        """The name of a case in files and progress reports."""
        return label_from_columns(self.case_columns(case))

    def case_id(self, case: Case) -> str:
        """Hash of the study's name and the settings of a case."""
        require(is_dataclass(case), f"a case is a frozen dataclass of plain settings, got {case!r}.")
        return short_hash([self.name, as_json_values(asdict(case))])

    def rule_hash(self, claim: Claim, cases: Sequence[Case], seeds: Sequence[int]) -> str:
        """Hash of what a claim means at a scale: parts, thresholds, seeds, and the settings of the cases it reads."""
        read = [self.case_id(case) for case in cases if any(self._reads(one, case) for one in claim.quantities())]
        return short_hash([claim.meaning(), sorted(read), list(seeds)])

    def _reads(self, quantity: Quantity, case: Case) -> bool:
        """Whether a quantity may be among the rows of a case."""
        own = self.case_columns(case)
        return all(own.get(name, as_text(value)) == as_text(value) for name, value in quantity.where.items())


@dataclass(frozen=True)
class SeedCase:
    """A case that is one seed under the settings of the scale."""

    seed: int
    settings: Settings


def one_case_per_seed(settings: Settings, seeds: Sequence[int]) -> list[Case]:
    """The cases of a study in which only the seed varies."""
    return [SeedCase(seed, settings) for seed in seeds]


def make_cases(places: Iterable[Mapping[str, Any]], settings: Settings, without: Sequence[str] = ()) -> list[Case]:
    """One case for each of ``places`` (what varies, by name), with the settings' other fields, except those in ``without``.

    >>> settings = Work("s", "desk", Path("r"))
    >>> make_cases([{"arm": "relu", "seed": 0}], settings, without=("study", "runs", "data", "progress"))
    [Case(arm='relu', seed=0, scale='desk', device='cpu')]
    """
    others = {one.name: getattr(settings, one.name) for one in fields(settings) if one.name not in without}
    return [_as_dataclass("Case", {**place, **{n: v for n, v in others.items() if n not in place}}) for place in places]


def _grid_cases(varied: tuple[str, ...], settings: Settings, seeds: Sequence[int]) -> list[Case]:
    """Every combination of the values of the varied settings, with every seed."""
    axes = [getattr(settings, name) for name in varied]
    places = [dict(zip(varied, place, strict=True)) | {"seed": seed} for place in product(*axes) for seed in seeds]
    return make_cases(places, settings, without=varied)


def _as_dataclass(name: str, values: Mapping[str, Any]) -> Any:
    """An instance of a new frozen dataclass with these fields."""
    return make_dataclass(name, values, frozen=True)(**values)


def label_from_columns(columns: Mapping[str, str]) -> str:
    """The columns of a case as one word that can be a file name."""
    return "-".join(text for text in columns.values() if text).replace("/", "_").replace(" ", "_")


def _check_scale(scale: str) -> str:
    """The scale, if there is one of this name."""
    require(scale in SCALES, f"scale must be one of {', '.join(SCALES)}; got {scale!r}.")
    return scale


def as_json_values(value: Any) -> Any:
    """Settings as the values that JSON has: tuples become lists, and what JSON does not know becomes text."""
    return json.loads(json.dumps(value, default=str))


def require_at_least_one(settings: Any, *names: str) -> None:
    """Raise unless each of these settings is at least 1."""
    for name in names:
        require(getattr(settings, name) >= 1, f"{name} must be at least 1, got {getattr(settings, name)!r}.")


def require_known(what: str, entries: Iterable[str], known: Iterable[str]) -> None:
    """Raise unless every entry is a known name; the message lists the known ones."""
    unknown = [entry for entry in entries if entry not in known]
    require(not unknown, f"unknown {what}: {', '.join(unknown)}; there are {', '.join(known)}.")
