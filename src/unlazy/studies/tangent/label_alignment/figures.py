"""Figures 1 and 3, and how well each point of the line explains the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from unlazy import plots
from unlazy.studies.tangent.label_alignment.train import TASKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {"smooth": "trained on y", "sign": "trained on sign(y)"}
COLOUR = {"smooth": "blue", "sign": "red"}


def draw(table: Mapping[str, Any], shown: Mapping[str, Any]) -> dict[str, Figure]:
    """All figures, by name."""
    with plots.style():
        return {"figure-1": kernels(table, shown), "figure-3": difficulty(shown), "linearisation": linearisation(shown)}


def kernels(table: Mapping[str, Any], shown: Mapping[str, Any]) -> Figure:
    """Averaged kernels of the first seed, images ordered by y, and the similarities of all seeds."""
    figure, axes = plots.grid(1, 3, (3.0, 2.9))
    for axis, task in zip(axes[0], TASKS, strict=False):
        kernel = shown[task]["kernel"]
        image = axis.imshow(kernel, cmap="cividis", vmin=0, vmax=np.quantile(kernel, 0.99), interpolation="nearest")
        zero = float(np.searchsorted(shown[task]["smooth"], 0)) - 0.5
        axis.axhline(zero, color="white", linewidth=0.5)
        axis.axvline(zero, color="white", linewidth=0.5)
        similarity = table["values"][f"similarity_{task}"][0]
        axis.set(
            title=f"{TITLES[task]}: similarity {similarity:.2f}", xticks=[], yticks=[], xlabel="images in order of y"
        )
        figure.colorbar(image, ax=axis, shrink=0.75)
    last = axes[0, 2]
    pairs = np.array([table["values"][f"similarity_{task}"] for task in TASKS])
    last.plot([0, 1], pairs, "o-", color=plots.COLOURS["grey"], linewidth=0.8, markersize=4, label="our seeds")
    last.plot([0, 1], [0.17, 0.40], "D--", color=plots.COLOURS["orange"], label="paper")
    last.set_xticks([0, 1], [TITLES[task] for task in TASKS])
    last.set(title="similarity to the label kernel", xlim=(-0.3, 1.3), ylim=(0, None))
    handles, labels = last.get_legend_handles_labels()
    last.legend(handles[-2:], labels[-2:])
    return figure


def difficulty(shown: Mapping[str, Any]) -> Figure:
    """Outputs (left) and the diagonal of the averaged kernel (right) against y, first seed."""
    figure, axes = plots.grid(1, 2, (3.4, 2.8))
    for task in TASKS:
        one = shown[task]
        dots = {"linestyle": "none", "marker": ".", "markersize": 3, "color": plots.COLOURS[COLOUR[task]]}
        axes[0, 0].plot(one["smooth"], one["end"], label=TITLES[task], **dots)
        axes[0, 1].plot(one["smooth"], one["diagonal"], label=TITLES[task], **dots)
    for axis in axes[0]:
        axis.axvline(0, color=plots.COLOURS["grey"], linewidth=0.6)
        axis.set_xlabel("smooth target y")
    axes[0, 0].set(title="what the networks give", ylabel="output")
    axes[0, 1].set(title="where the kernel bends", ylabel="diagonal of the averaged kernel", ylim=(0, None))
    axes[0, 0].legend(markerscale=3)
    return figure


def linearisation(shown: Mapping[str, Any]) -> Figure:
    """Signal-to-noise ratio of a linear model of training, for the features of each point of the line and for their mean."""
    figure, axes = plots.grid(1, 1, (4.6, 3.4))
    axis = axes[0, 0]
    for task in TASKS:
        one, colour = shown[task], plots.COLOURS[COLOUR[task]]
        points = np.linspace(0, 1, len(one["single"]))
        axis.plot(points, one["single"], color=colour, label=f"{TITLES[task]}: one point")
        axis.axhline(one["mean"], color=colour, linestyle="--", label=f"{TITLES[task]}: mean of the line")
    axis.set(
        title="how linear is training in these features?",
        xlabel="point on the line from start (0) to end (1)",
        ylabel="signal to noise of the end, dB",
        ylim=(0, None),
    )
    plots.legend_below(axis)
    return figure
