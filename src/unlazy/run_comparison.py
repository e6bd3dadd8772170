"""Several runs side by side: their verdicts, the settings that differ, their last numbers, their curves."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unlazy.curves import Series, plot_curves
from unlazy.run_card import describe_run
from unlazy.runtime import framework, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NO_SETTINGS = ("measures", "scope.notes", "scope.rows", "scope.waiting")  # in a recipe, but found by measuring
CELL = 30  # largest width of a value in a comparison, in characters
ALWAYS_SHOWN = ("state", "verdict", "gap")
FACTS = (*ALWAYS_SHOWN, "model", "tags", "notes", "seed")  # the others are shown where they differ


@dataclass(frozen=True)
class RunComparison:
    """Rows of a table with one column a run: ``facts``, ``settings`` that differ, and ``last`` values (median over members).

    ``names``: labels of the runs. ``series``: by label, the function that returns a number's curve.
    """

    names: tuple[str, ...]
    facts: Mapping[str, list[Any]]
    settings: Mapping[str, list[Any]]
    last: Mapping[str, list[float | None]]
    series: Mapping[str, Series]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: ``{runs, facts, settings, last}``; a list holds one value a run, ``None`` where a run has none."""
        return {"runs": list(self.names), "facts": self.facts, "settings": self.settings, "last": self.last}

    def to_frame(self) -> Any:
        """A pandas table: one row a run, one column a fact, setting or number."""
        pandas = framework("pandas", "pandas")
        names = pandas.Index(self.names, name="run")
        return pandas.DataFrame({**self.facts, **self.settings, **self.last}, index=names)

    def plot(self, panel: str | None = None, *, ax: Axes | None = None) -> Figure:
        """The curves of all runs in one figure; see :meth:`unlazy.Run.plot`."""
        return plot_curves(self.series, panel, ax=ax)

    def rows(self) -> list[tuple[str, list[str]]]:
        """Name and short texts of every line."""
        facts = [(name, [_text(value) for value in values]) for name, values in self.facts.items()]
        settings = [(name, shorten_values(["-" if v is None else v for v in vs])) for name, vs in self.settings.items()]
        return [*facts, *settings, *((name, [_text(value) for value in values]) for name, values in self.last.items())]

    def __str__(self) -> str:
        rows = self.rows()
        heads = shorten_values(self.names)
        wide = [min(CELL, max(len(head), *(len(row[1][i]) for row in rows))) for i, head in enumerate(heads)]
        label = max(len(name) for name, _ in rows)
        lines = [("", heads), *rows]
        return "\n".join(
            f"{name:{label}} " + " ".join(f"{_cut(text):>{width}}" for text, width in zip(texts, wide, strict=True))
            for name, texts in lines
        )

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.names)
        body = "".join(
            f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{html.escape(text)}</td>' for text in texts)}</tr>"
            for name, texts in self.rows()
        )
        return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"


def compare(runs: Sequence[Any]) -> RunComparison:
    """The comparison of open runs; labels are folder names, with as many parents as it takes to tell them apart."""
    require(len(runs) > 0, "name at least one run to compare.")
    names = _labels([run.folder.parts for run in runs])
    described = [describe_run(run, latest_scalars(run)) | {"state": run.status()["state"]} for run in runs]
    facts = {name: [one[name] for one in described] for name in FACTS}
    facts["tags"] = [", ".join(tags) for tags in facts["tags"]]
    facts = {
        name: values
        for name, values in facts.items()
        if name in ALWAYS_SHOWN or any(value != values[0] for value in values)
    }
    flat = [_settings(run) for run in runs]
    keys = sorted({key for one in flat for key in one if not key.startswith(NO_SETTINGS)})
    settings = {key: [one.get(key) for one in flat] for key in keys}
    medians = [last_medians(run) for run in runs]
    numbers = sorted(set.union(*(set(one) for one in medians)))
    common = [name for name in numbers if all(name in one for one in medians)]
    return RunComparison(
        names=tuple(names),
        facts=facts,
        settings={key: values for key, values in settings.items() if any(value != values[0] for value in values)},
        last={name: [one.get(name) for one in medians] for name in common},
        series={name: run.curve for name, run in zip(names, runs, strict=True)},
    )


def _settings(run: Any) -> dict[str, Any]:
    """The flat settings of a run; one line per setting of the members, not one per member."""
    flat = {**flatten_settings(run.header["recipe"]), **flatten_settings(run.header.get("config") or {}, "config")}
    flat = {key: value for key, value in flat.items() if not key.startswith("members[")}
    for name in ("seed", "lr", "beta"):
        values = {str(member.get(name)) for member in run.members}
        flat[f"members.{name}"] = values.pop() if len(values) == 1 else f"{len(values)} values"
    return flat


def _labels(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """The shortest ends of the paths that differ; a path that comes twice gets a number."""
    for parts in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-parts:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return [name if names.count(name) == 1 else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)]


def latest_scalars(run: Any) -> dict[str, list[float | None]]:
    """Every scalar in the last measurement that has it."""
    latest: dict[str, list[float | None]] = {}
    for line in run.lines:
        latest |= line.scalars
    return latest


def last_medians(run: Any) -> dict[str, float]:
    """Median over members of each scalar in the last measurement that has it."""
    numbers = {name: np.array(values, dtype=np.float64) for name, values in latest_scalars(run).items()}
    return {name: float(np.nanmedian(values)) for name, values in numbers.items() if not np.isnan(values).all()}


def flatten_settings(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings as ``a.b.c: value``."""
    if isinstance(value, Mapping):
        pairs = [flatten_settings(inner, f"{prefix}.{key}" if prefix else str(key)) for key, inner in value.items()]
    elif isinstance(value, list) and value and isinstance(value[0], Mapping | list):
        pairs = [flatten_settings(inner, f"{prefix}[{index}]") for index, inner in enumerate(value)]
    else:
        return {prefix: value}
    return {key: inner for pair in pairs for key, inner in pair.items()}


def shorten_values(values: Sequence[Any]) -> list[str]:
    """Different values, each cut to ``CELL`` characters around the first place where some of them differ."""
    texts = [" ".join(str(value).split()) for value in values]
    columns = zip(*texts, strict=False)
    first = next((i for i, letters in enumerate(columns) if len(set(letters)) > 1), min(map(len, texts)))
    start = first - CELL // 3 if first >= CELL - 2 else 0
    return [_cut(f"…{text[start:]}" if start else text) for text in texts]


def _cut(text: str) -> str:
    return text if len(text) <= CELL else f"{text[: CELL - 1]}…"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None or value == "" else _cut(" ".join(str(value).split()))
