"""The figures of the zoo: accuracy and recovery against samples for every kind of data, and the phase diagram of patterns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unlazy import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEARNERS = {
    "network": ("ReLU network", "blue", "o-"),
    "dlgn": ("DLGN", "purple", "s-"),
    "machine": ("feature machine (RFM)", "green", "D-"),
    "linearised": ("linearised network", "orange", "^--"),
    "laplace": ("Laplace kernel", "red", "v--"),
    "kernel": ("tuned kernel", "grey", "x--"),
}
"""Name, colour and line of every learner; full lines learn features, broken ones have them fixed."""
PHASES = ("network", "machine", "linearised", "laplace")


def draw(table: Mapping[str, Any]) -> dict[str, Figure]:
    """All figures by name."""
    with plots.style():
        return {"zoo": zoo_figure(table), "phases": phases_figure(table)}


def grid_of(table: Mapping[str, Any], animal: str, what: str) -> NDArray[np.float64]:
    """One number of every cell of one kind of data, ``[sizes, seeds]``."""
    rows = table["animals"][animal]
    return np.array([[cell[what] for cell in cells] for cells in rows], dtype=np.float64)


def zoo_figure(table: Mapping[str, Any]) -> Figure:
    """One column a kind of data: accuracy above, share of the hidden subspace found below."""
    sizes = table["settings"]["sizes"]
    names = list(table["animals"])
    figure, axes = plots.grid(2, len(names), (2.05, 2.3), sharex=True, sharey="row")
    for column, name in zip(axes.T, names, strict=True):
        for axis, what in zip(column, ("accuracy", "recovered"), strict=True):
            for learner, (label, colour, line) in LEARNERS.items():
                values = grid_of(table, name, f"{learner}_{what}")
                axis.plot(sizes, np.median(values, 1), line, color=plots.COLOURS[colour], label=label, markersize=3.5)
                low, high = values.min(1), values.max(1)
                axis.fill_between(sizes, low, high, color=plots.COLOURS[colour], alpha=0.12, linewidth=0)
        column[0].axhline(0.9, color=plots.COLOURS["grey"], linestyle=":", linewidth=1)
        column[0].set_title(name.replace(" of ", "\nof "))
        column[1].set(xscale="log", xlabel="samples")
        column[1].set_xticks(sizes[::2], [f"{size:g}" for size in sizes[::2]])
        column[1].minorticks_off()
    axes[0, 0].set(ylabel="test accuracy", ylim=(0.45, 1.02))
    axes[1, 0].set(ylabel="hidden subspace found", ylim=(-0.02, 1.02))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(LEARNERS))
    return figure


def phases_figure(table: Mapping[str, Any]) -> Figure:
    """Structured patterns: mean accuracy over gamma and samples; one row a learner, one column a number of relevant patterns."""
    settings = table["settings"]
    orders, gammas, sizes = (settings[f"phase_{name}"] for name in ("orders", "gammas", "sizes"))
    figure, axes = plots.grid(len(PHASES), len(orders), (2.8, 1.9), sharex=True, sharey=True)
    for line, learner in zip(axes, PHASES, strict=True):
        for axis, order in zip(line, orders, strict=True):
            cells = table["phases"][str(order)]
            values = np.array(
                [[np.mean([one[f"{learner}_accuracy"] for one in cell]) for cell in row] for row in cells]
            )
            image = axis.imshow(values, vmin=0.5, vmax=1, cmap="cividis", origin="lower", aspect="auto")
            for place, value in np.ndenumerate(values):
                shade = "black" if value > 0.75 else "white"
                axis.text(place[1], place[0], f"{value:.2f}", ha="center", va="center", color=shade, fontsize=8)
            axis.set_xticks(range(len(sizes)), [f"{size:g}" for size in sizes])
            axis.set_yticks(range(len(gammas)), [f"{gamma:g}" for gamma in gammas])
        line[0].set_ylabel(f"{LEARNERS[learner][0]}\ngamma")
    for axis, order in zip(axes[0], orders, strict=True):
        axis.set_title(f"k = {order}")
    for axis in axes[-1]:
        axis.set_xlabel("samples")
    figure.colorbar(image, ax=axes, label="test accuracy", shrink=0.5)
    return figure
