"""The figures of the failure studies, drawn from the results table alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from unlazy import plots
from unlazy.studies.halfspace.circle.settings import ARMS
from unlazy.studies.halfspace.failures import frequency as circles
from unlazy.studies.halfspace.failures import xor
from unlazy.studies.halfspace.failures.claims import FITTED, gap
from unlazy.studies.halfspace.failures.settings import FOREST, KINDS
from unlazy.studies.results import numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Table = Mapping[str, Any]
ARM_COLOURS = {"pwc": "blue", "pwc-hard": "green", "relu": "black"}
KIND_COLOURS = {
    "dlgn": "sky",
    "pwc": "blue",
    "pwc-hard": "green",
    "quadratic": "orange",
    "relu": "black",
    FOREST: "red",
}


def frequency(table: Table) -> Figure:
    settings = table["settings"]["frequency"]
    presets, widths, speeds = settings["presets"], settings["widths"], settings["frequencies"]
    figure, axes = plots.grid(len(presets), len(widths), (3.4, 2.9), sharex=True, sharey=True)
    for row, preset in enumerate(presets):
        for column, width in enumerate(widths):
            axis = axes[row, column]
            for arm in settings["arms"]:
                stack = table["frequency"][circles.key(preset, width, arm)]
                values = {name: numbers(value) for name, value in stack["values"].items()}
                colour = ARM_COLOURS[arm]
                plots.band(axis, speeds, values["loss"], ARMS[arm].label, colour, marker="o", markersize=3)
                if arm == "pwc-hard":
                    middle = np.median(values["cell_floor"], axis=1)
                    axis.plot(
                        speeds,
                        middle,
                        "--",
                        color=plots.COLOURS[colour],
                        linewidth=1,
                        label="least loss of its cells",
                    )
                    axis.plot(
                        speeds,
                        stack["ideal_floor"],
                        ":",
                        color=plots.COLOURS["red"],
                        linewidth=1.5,
                        label="the same, half-spaces placed at best",
                    )
            axis.axhline(FITTED, color=plots.COLOURS["grey"], linewidth=0.7)
            axis.set(xscale="log", yscale="log", ylim=(1e-5, 1), title=f"{preset} preset, width {width}")
            axis.set_xticks(speeds, [f"{speed:g}" for speed in speeds], minor=False)
            axis.minorticks_off()
        axes[row, 0].set_ylabel("mean squared error at the end")
    for axis in axes[-1]:
        axis.set_xlabel("half cycles on the fast half")
    _legend(figure, axes[0, 0], 3)
    return figure


def interactions(table: Table) -> Figure:
    settings = table["settings"]["interactions"]
    problems, orders = settings["problems"], settings["orders"]
    figure, axes = plots.grid(1, len(problems), (3.4, 3.2), sharey=True)
    kinds = [*settings["kinds"], FOREST]
    for axis, (law, n) in zip(axes[0], problems, strict=True):
        for place, kind in enumerate(kinds):
            accuracy = numbers(table["xor"][xor.key(law, n, kind)]["values"]["test_as_trained"])
            shifted = np.array(orders) + 0.05 * (place - (len(kinds) - 1) / 2)  # so that equal lines stay visible
            plots.band(axis, shifted, accuracy, KINDS.get(kind, kind), KIND_COLOURS[kind], marker="o", markersize=3)
        axis.axhline(0.5, color=plots.COLOURS["grey"], linewidth=0.7)
        inputs = {"signs": "inputs -1 or 1", "gaussian": "normal inputs"}[law]
        axis.set(title=f"{inputs}, {n} samples", xlabel="inputs in the exclusive-or", xticks=orders, ylim=(0.45, 1.02))
    axes[0, 0].set_ylabel("test accuracy")
    _legend(figure, axes[0, 0], 3)
    return figure


def small_data(table: Table) -> Figure:
    settings = table["settings"]["small_data"]
    sizes = dict(settings["sizes"])
    columns = [(images, width) for images in table["small_data"] for width in settings["widths"]]
    figure, axes = plots.grid(2, len(columns), (3.2, 2.4), sharey="row", sharex="col")
    for column, (images, width) in enumerate(columns):
        for kind in settings["kinds"]:
            stack = table["small_data"][images][f"{kind}-{width}"]
            line: dict[str, Any] = {"marker": "o", "markersize": 3}
            test = numbers(stack["test_as_trained"])
            plots.band(axes[0, column], sizes[images], test, KINDS[kind], KIND_COLOURS[kind], **line)
            plots.band(axes[1, column], sizes[images], gap(stack), KINDS[kind], KIND_COLOURS[kind], **line)
        axes[0, column].set_title(f"{images}, width {width}")
        axes[1, column].set(xscale="log", xlabel="training images")
        axes[1, column].set_xticks(sizes[images], [str(n) for n in sizes[images]])
        axes[1, column].minorticks_off()
    axes[0, 0].set_ylabel("test accuracy")
    axes[1, 0].set(ylabel="training less test accuracy", ylim=(0, None))
    _legend(figure, axes[0, 0], len(settings["kinds"]))
    return figure


def _legend(figure: Figure, axis: Axes, columns: int) -> None:
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=columns)


FIGURES = {"frequency": frequency, "interactions": interactions, "small_data": small_data}
"""File name: the function that draws it."""


def draw(table: Table) -> dict[str, Figure]:
    """All figures of the study by file name."""
    with plots.style():
        return {name: maker(table) for name, maker in FIGURES.items()}
