"""The accuracy tables as figures: what was measured beside what the paper has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unlazy import plots
from unlazy.studies.halfspace.tables.claims import FIGURE_OF, Table
from unlazy.studies.halfspace.tables.settings import MODELS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = {  # test accuracy in percent by (data, layout, model); the paper's gated networks are soft
    ("cifar-10", "conv", "relu"): 72.17,
    ("cifar-10", "conv", "dlgn"): 73.2,
    ("cifar-10", "conv", "pwc"): 72.2,
    ("cifar-10", "conv", "dln"): 40.79,
    ("cifar-10", "resnet-34", "relu"): 91.0,
    ("cifar-10", "resnet-34", "dlgn"): 86.0,
    ("cifar-10", "resnet-110", "relu"): 94.0,
    ("cifar-10", "resnet-110", "dlgn"): 89.0,
    ("cifar-100", "resnet-34", "relu"): 56.68,
    ("cifar-100", "resnet-34", "dlgn"): 51.6,
    ("cifar-100", "resnet-110", "relu"): 73.0,
    ("cifar-100", "resnet-110", "dlgn"): 67.0,
}
BARS = (
    ("train_as_trained", "train", "grey"),
    ("test_as_trained", "test, as trained", "blue"),
    ("test_hard_gates", "test, hard gates", "orange"),
)


def draw(results: Mapping[str, Any]) -> dict[str, Figure]:
    """The figure of a table by file name."""
    places = sorted({(cell["data"], cell["layout"]) for cell in results["cells"]}, key=_order)
    with plots.style():
        return {FIGURE_OF[results["study"]]: accuracies(results, places)}


def accuracies(results: Mapping[str, Any], places: Sequence[tuple[str, str]]) -> Figure:
    """One panel for each data set and layout, bars for models, a diamond where the paper has a number."""
    models = [model for model in MODELS if any(cell["model"] == model for cell in results["cells"])]
    models = [model for model in models if model != "relu-wide"]
    columns = min(2, len(places))
    figure, axes = plots.grid(-(-len(places) // columns), columns, (max(4.6, 1.0 * len(models)), 3.1), sharey=True)
    for axis, (data, layout) in zip(axes.flat, places, strict=False):
        _panel(axis, Table(results), data, layout, models)
    for axis in axes.flat[len(places) :]:
        axis.set_axis_off()
    for row in axes:
        row[0].set_ylabel("accuracy, %")
    figure.legend(handles=_key(), loc="outside lower center", ncols=4)
    return figure


def _key() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    diamond = Line2D([], [], color=plots.COLOURS["red"], marker="D", markersize=5, linestyle="")
    diamond.set_label("the paper, test")
    return [*(Patch(color=plots.COLOURS[colour], label=said) for _, said, colour in BARS), diamond]


def _panel(axis: Any, table: Table, data: str, layout: str, models: Sequence[str]) -> None:
    """Bars are medians over seeds, each seed a dot; their numbers stand at their feet, the paper's under the names."""
    for shift, (name, _, colour) in zip((-0.27, 0.0, 0.27), BARS, strict=True):
        for place, model in enumerate(models):
            if name == "test_hard_gates" and model not in ("dlgn", "pwc"):
                continue  # the same number twice
            values = table.percent([model], name, data=data, layout=layout)[0]
            if np.isnan(values).all():
                continue
            middle = float(np.median(values))
            axis.bar(place + shift, middle, 0.25, color=plots.COLOURS[colour])
            if len(values) > 1:
                axis.plot([place + shift] * len(values), values, "o", markersize=2, color=plots.COLOURS["black"])
            text = axis.text(place + shift, 2, f"{middle:.1f}", ha="center", va="bottom", fontsize=7, rotation=90)
            text.set_color("black" if colour == "orange" else "white")
    names = []
    for place, model in enumerate(models):
        theirs = PAPER.get((data, layout, model))
        names.append(_wrapped(MODELS[model]) + ("" if theirs is None else f"\n(paper: {theirs:g})"))
        if theirs is not None:
            axis.plot(place, theirs, "D", color=plots.COLOURS["red"], markersize=6, markeredgecolor="white")
    axis.set_xticks(range(len(models)), names, fontsize=7)
    axis.set(ylim=(0, 104), xlim=(-0.6, len(models) - 0.4), title=f"{data}, {layout}")
    axis.set_yticks(range(0, 101, 20))


def _wrapped(text: str) -> str:
    return text.replace(", ", ",\n").replace("linear model on ", "linear on\n").replace("ridge on the ", "ridge on\n")


def _order(place: tuple[str, str]) -> tuple[int, str, str]:
    data, layout = place
    return len(data), data, {"resnet-34": "a", "resnet-110": "b"}.get(layout, layout)
