"""The figures of the zoo: accuracy and recovery against samples for every kind of data, and the phase diagram of patterns."""

from __future__ import annotations

from collections.abc import Mapping
from math import comb
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unlazy import plots
from unlazy.studies.emergence.zoo.measure import ANIMALS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEARNERS = {
    "network": ("ReLU network", "blue", "o-"),
    "dlgn": ("DLGN", "purple", "s-"),
    "machine": ("feature machine (RFM)", "green", "D-"),
    "linearised": ("linearised network", "orange", "^--"),
    "laplace": ("Laplace kernel", "red", "v--"),
    "kernel": ("tuned kernel (Laplace or Gaussian)", "grey", "X--"),
}
"""Name, colour and line of every learner; full lines learn features, broken ones have them fixed."""
PHASE_TITLES = {
    "network": "ReLU network",
    "machine": "feature machine\n(RFM)",
    "linearised": "linearised\nnetwork",
    "laplace": "Laplace kernel",
}
PHASES = tuple(PHASE_TITLES)


def draw(table: Mapping[str, Any]) -> dict[str, Figure]:
    """All figures by name."""
    with plots.style():
        return {
            "zoo": zoo_figure(table, "accuracy", "test accuracy"),
            "recovered": zoo_figure(table, "recovered", "hidden subspace found"),
            "phases": phases_figure(table),
        }


def grid_of(table: Mapping[str, Any], animal: str, what: str) -> NDArray[np.float64]:
    """One number of every cell of one kind of data, ``[sizes, seeds]``."""
    rows = table["animals"][animal]
    return np.array([[cell[what] for cell in cells] for cells in rows], dtype=np.float64)


def zoo_figure(table: Mapping[str, Any], what: str, label: str) -> Figure:
    """One number against samples, one panel a kind of data: medians, and all seeds as a band."""
    sizes = table["settings"]["sizes"]
    figure, axes = plots.grid(2, 4, (2.7, 2.3), sharex=True, sharey=True)
    panels = list(axes.flat)
    for axis, name in zip(panels, table["animals"], strict=False):
        for learner, (title, colour, line) in LEARNERS.items():
            values = grid_of(table, name, f"{learner}_{what}")
            shade = plots.COLOURS[colour]
            axis.plot(sizes, np.median(values, 1), line, color=shade, label=title, markersize=4, linewidth=1.4)
            axis.fill_between(sizes, values.min(1), values.max(1), color=shade, alpha=0.1, linewidth=0)
        if what == "accuracy":
            axis.axhline(0.9, color=plots.COLOURS["grey"], linestyle=":", linewidth=1)
        if what == "recovered" and everything_counts(name):
            axis.text(0.5, 0.5, "every input counts:\nnothing to find", ha="center", transform=axis.transAxes)
        axis.set(title=name, xscale="log")
        axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axis.minorticks_off()
        axis.tick_params(labelbottom=True)
    for axis in panels[len(table["animals"]) :]:
        axis.set_axis_off()
    panels[-1].legend(*panels[0].get_legend_handles_labels(), loc="center", frameon=False)
    for axis in panels[3:7]:
        axis.set_xlabel("samples")
    for line in axes:
        line[0].set_ylabel(label)
    axes[0, 0].set_ylim((0.45, 1.02) if what == "accuracy" else (-0.02, 1.04))
    return figure


def everything_counts(name: str) -> bool:
    """Is the hidden subspace all in which inputs vary?"""
    data = ANIMALS[name]
    return data.kind == "hierarchy" and 2**data.order == data.tokens


def counting(order: int, gamma: float) -> float:
    """The accuracy of the best threshold on the count of relevant patterns, a linear rule; labels are its parity.

    >>> counting(5, 0.25) == 27 / 32
    True
    """
    coins = [(1 - 2 * gamma) * comb(order, count) / 2**order for count in range(order + 1)]
    mass = [chance + (gamma if count in (0, order) else 0) for count, chance in enumerate(coins)]
    signed = np.array([chance if count % 2 else -chance for count, chance in enumerate(mass)])
    above = [signed[cut:].sum() - signed[:cut].sum() for cut in range(order + 2)]
    return float((1 + np.abs(above).max()) / 2)


def phases_figure(table: Mapping[str, Any]) -> Figure:
    """Structured patterns: mean accuracy over gamma and samples; one column a number of relevant patterns, one row a learner.

    The last row is the best linear rule: what can be had without learning features.
    """
    settings = table["settings"]
    orders, gammas, sizes = (settings[f"phase_{name}"] for name in ("orders", "gammas", "sizes"))
    figure, axes = plots.grid(len(PHASES) + 1, len(orders), (2.9, 1.45), sharex=True, sharey=True)
    for line, learner in zip(axes, (*PHASES, None), strict=True):
        for axis, order in zip(line, orders, strict=True):
            if learner is None:
                values = np.array([[counting(order, gamma)] * len(sizes) for gamma in gammas])
            else:
                cells, what = table["phases"][str(order)], f"{learner}_accuracy"
                values = np.array([[np.mean([one[what] for one in cell]) for cell in row] for row in cells])
            image = axis.imshow(values, vmin=0.5, vmax=1, cmap="cividis", origin="lower", aspect="auto")
            for place, value in np.ndenumerate(values):
                shade = "black" if value > 0.75 else "white"
                axis.text(place[1], place[0], f"{value:.2f}", ha="center", va="center", color=shade, fontsize=8)
            axis.set_xticks(range(len(sizes)), [f"{size:g}" for size in sizes])
            axis.set_yticks(range(len(gammas)), [f"{gamma:g}" for gamma in gammas])
            axis.tick_params(length=0)
        title = "best threshold on\nthe count (linear)" if learner is None else PHASE_TITLES[learner]
        line[0].set_ylabel(f"{title}\n\ngamma", fontsize=9)
    for axis, order in zip(axes[0], orders, strict=True):
        axis.set_title(f"parity of k = {order} patterns")
    for axis in axes[-1]:
        axis.set_xlabel("samples")
    figure.colorbar(image, ax=axes, label="test accuracy", shrink=0.5)
    return figure
