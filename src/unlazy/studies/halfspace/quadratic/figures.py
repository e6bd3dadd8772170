"""The figures of the quadratic-gate study, drawn from the results table alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from unlazy import plots
from unlazy.studies.halfspace.quadratic.claims import gain, is_circle, pairs
from unlazy.studies.halfspace.quadratic.measure import key
from unlazy.studies.halfspace.quadratic.settings import GATINGS, RULES
from unlazy.studies.results import numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Table = Mapping[str, Any]
COLOURS = {"linear": "blue", "quadratic": "orange"}
LINES = {"soft": "-", "hard": "--"}


def learning(table: Table) -> Figure:
    """Loss (circles) and test accuracy (images) over training."""
    tasks = _tasks(table)
    figure, axes = plots.grid(1, len(tasks), (3.3, 3.0))
    for axis, task in zip(axes[0], tasks, strict=True):
        for rule in RULES:
            for gating in GATINGS:
                stack = table["stacks"][key(task, rule, gating)]
                epochs = np.maximum(np.array(stack["curve"]["epochs"]), 0.5)
                values = numbers(stack["curve"]["values"])
                plots.band(axis, epochs, values, _label(rule, gating), COLOURS[gating], linestyle=LINES[rule])
        circle = is_circle(table["stacks"][key(task, "soft", "linear")])
        axis.set(xscale="log", xlabel="epoch", title=_title(table, task))
        axis.set(**({"yscale": "log", "ylabel": "mean squared error"} if circle else {"ylabel": "test accuracy"}))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def gains(table: Table) -> Figure:
    """What quadratic gates gain over linear ones, seed by seed."""
    tasks = _tasks(table)
    figure, axes = plots.grid(1, len(tasks), (2.5, 3.0))
    for axis, task in zip(axes[0], tasks, strict=True):
        kinds = [("soft", False, "soft"), ("soft", True, "soft,\nmade hard"), ("hard", False, "hard")]
        for place, (rule, hard, _) in enumerate(kinds):
            linear, quadratic = (table["stacks"][key(task, rule, gating)] for gating in GATINGS)
            values = gain(linear, quadratic, hard)
            spread = place + np.linspace(-0.2, 0.2, len(values))
            axis.plot(spread, values, "o", color=plots.COLOURS["orange"], markersize=4, alpha=0.6)
            axis.plot([place - 0.3, place + 0.3], [np.median(values)] * 2, color=plots.COLOURS["black"], linewidth=1.5)
        axis.axhline(0, color=plots.COLOURS["grey"], linewidth=0.7)
        axis.set_xticks(range(len(kinds)), [words for _, _, words in kinds])
        circle = is_circle(table["stacks"][key(task, "soft", "linear")])
        axis.set(title=task, ylabel="decades of loss gained" if circle else "test accuracy gained")
    return figure


def dynamics(table: Table) -> Figure:
    """How far the overlap and the tangent kernel move from their start."""
    tasks = _tasks(table)
    figure, axes = plots.grid(2, len(tasks), (3.3, 2.3), sharex="col", sharey=True)
    for column, task in enumerate(tasks):
        for row, kernel in enumerate(("overlap", "tangent")):
            for rule in RULES:
                for gating in GATINGS:
                    moved = table["stacks"][key(task, rule, gating)]["dynamics"]
                    epochs = np.maximum(np.array(moved["epochs"]), 0.5)
                    values = numbers(moved[f"{kernel}_distance"])
                    line: dict[str, Any] = {"linestyle": LINES[rule], "marker": "o", "markersize": 3}
                    plots.band(axes[row, column], epochs, values, _label(rule, gating), COLOURS[gating], **line)
        axes[0, column].set_title(task)
        axes[1, column].set(xscale="log", xlabel="epoch", ylim=(0, 1))
    for row, kernel in enumerate(("overlap", "tangent")):
        axes[row, 0].set_ylabel(f"{kernel} kernel:\n1 - cosine to its start")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _tasks(table: Table) -> list[str]:
    return list(dict.fromkeys(task for task, _ in pairs(table)))


def _label(rule: str, gating: str) -> str:
    return f"{gating}, {rule} gates"


def _title(table: Table, task: str) -> str:
    linear, quadratic = (table["stacks"][key(task, "soft", gating)] for gating in GATINGS)
    return f"{task}\nwidth {linear['width']} linear, {quadratic['width']} quadratic"


FIGURES = {"gain": gains, "learning": learning, "dynamics": dynamics}
"""File name: the function that draws it."""


def draw(table: Table) -> dict[str, Figure]:
    """All figures of the study by file name."""
    with plots.style():
        return {name: maker(table) for name, maker in FIGURES.items()}
