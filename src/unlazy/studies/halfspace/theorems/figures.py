"""The theorems study's figures: Figure 1's two examples, the identities, regions over training, the law of the value kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from unlazy import plots
from unlazy.studies.halfspace.theorems.claims import EXACT, REGRESSION
from unlazy.studies.halfspace.theorems.settings import ARMS, KINDS
from unlazy.theory import examples
from unlazy.theory.enumerate import active_paths
from unlazy.theory.regions import line_pieces, path_pieces

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Table = Mapping[str, Any]
COLOURS = {"relu": "black", "pwc": "blue"}
SHOWN_EPS = 0.05
FLOOR = 1e-17  # where an error of exactly zero is drawn


def fig01_examples(table: Table) -> Figure:
    """Left: a ReLU path region in two parts. Middle: one that jumps, and the DLGN that does not. Right: by how much."""
    figure, axes = plots.grid(2, 4, (2.5, 2.1), gridspec_kw={"width_ratios": [1.7, 1, 1, 1.2]})
    whole = axes[0, 0].get_gridspec()
    for axis in (*axes[:, 0], *axes[:, 3]):
        axis.remove()
    _zigzag(figure.add_subplot(whole[:, 0]))
    jump = figure.add_subplot(whole[:, 3])
    for row, (linear_gates, label) in enumerate(((False, "ReLU net"), (True, "DLGN, same weights"))):
        colour = plots.COLOURS["blue" if linear_gates else "red"]
        for column, value in enumerate((-SHOWN_EPS, SHOWN_EPS), 1):
            _jumping_region(axes[row, column], value, linear_gates, colour)
        axes[row, 1].set_ylabel(label)
        shares = table["examples"]["jump_dlgn" if linear_gates else "jump_relu"]
        jump.plot(table["examples"]["steps"], shares, "o-", markersize=4, color=colour, label=label)
    for column, value in enumerate((-SHOWN_EPS, SHOWN_EPS), 1):
        axes[0, column].set_title(f"eps = {value:g}")
    jump.set(xscale="log", ylim=(-0.02, 0.32), xlabel="eps", title="circle gained from -eps to eps")
    jump.set_xticks([1e-12, 1e-8, 1e-4, 1e-1])
    jump.minorticks_off()
    jump.legend(loc="center")
    return figure


def _zigzag(axis: Axes) -> None:
    net = examples.two_part_net()
    x = torch.linspace(-0.4, 4.1, 1001, dtype=torch.float64)
    q = net.pre_activations(x[:, None])[1][:, examples.TWO_PART_PATH[1]].detach()
    axis.plot(x, q, color=plots.COLOURS["black"])
    axis.axhline(0, color=plots.COLOURS["grey"], linewidth=0.7)
    parts = path_pieces(line_pieces(net, [0.0], [1.0]), examples.TWO_PART_PATH)
    for low, high in parts:
        axis.axvspan(low, high, color=plots.COLOURS["red"], alpha=0.3, linewidth=0)
        axis.text((low + high) / 2, -0.56, f"[{low:g}, {high:g}]", ha="center")
    axis.set(xlabel="x", ylabel="what unit 1 of layer 2 sees", xticks=range(5), yticks=[-0.5, 0, 0.5])
    axis.set_title("ReLU net: one path, active on two intervals")


def _jumping_region(axis: Axes, eps: float, linear_gates: bool, colour: str) -> None:
    """The path's region as the network itself sees it, on a fine grid of cell centres."""
    ticks = (torch.arange(200, dtype=torch.float64) + 0.5) / 100 - 1
    x = torch.cartesian_prod(ticks, ticks).flip(1)
    path = torch.tensor([examples.JUMPING_PATH])
    inside = active_paths(examples.jumping_net(eps, linear_gates=linear_gates), x, path).reshape(200, 200)
    axis.contourf(ticks, ticks, inside.double(), levels=[0.5, 1.5], colors=[colour], alpha=0.4)
    axis.axhline(0, color=plots.COLOURS["grey"], linewidth=0.7)
    axis.axvline(0, color=plots.COLOURS["grey"], linewidth=0.7)
    axis.set(aspect="equal", xlim=(-1, 1), ylim=(-1, 1), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def identities(table: Table) -> Figure:
    """Every exact statement on every random network: how far off, relative, beside what is allowed."""
    rows = [("path_sum", kind, f"paths = output: {label}") for kind, label in KINDS.items()]
    rows += [("overlap", kind, f"overlap: {KINDS[kind]}") for kind in ("relu", "dlgn")]
    rows += [("ridgeless", kind, f"free experts = kernel, no ridge: {KINDS[kind]}") for kind in ("relu", "dlgn")]
    rows += [("ridge", kind, f"free experts = kernel, ridge: {KINDS[kind]}") for kind in ("relu", "dlgn")]
    figure, axes = plots.grid(1, 1, (7.5, 0.3 * len(rows) + 0.7))
    axis = axes[0, 0]
    for row, (quantity, kind, _) in enumerate(rows):
        values = np.maximum(np.array(table["networks"][f"{quantity}_{kind}"]), FLOOR)
        heights = row + np.linspace(-0.25, 0.25, len(values))
        axis.plot(values, heights, ".", markersize=4, alpha=0.6, color=plots.COLOURS["blue"])
        allowed = REGRESSION if quantity.startswith("ridge") else EXACT
        axis.plot([allowed] * 2, [row - 0.4, row + 0.4], color=plots.COLOURS["red"])
    axis.set_yticks(range(len(rows)), [label for _, _, label in rows])
    axis.set(xscale="log", xlim=(FLOOR / 2, 1e-9), ylim=(len(rows) - 0.5, -0.5), xlabel="relative error in float64")
    axis.set_xticks([FLOOR, 1e-16, 1e-14, 1e-12, 1e-10], ["0", "1e-16", "1e-14", "1e-12", "1e-10"])
    axis.set_title("one dot a network; red: allowed")
    return figure


def regions_over_training(table: Table) -> Figure:
    """Cells, path regions and how many of these fall apart, counted exactly on the circle."""
    columns = {
        "cells": "activation patterns on the circle",
        "path_regions": "share of paths active somewhere",
        "split": "share of path regions in several parts",
    }
    presets = table["settings"]["presets"]
    figure, axes = plots.grid(len(presets), len(columns), (3.6, 2.9), sharex=True)
    for row, preset in enumerate(presets):
        for column, (name, title) in enumerate(columns.items()):
            _over_training(axes[row, column], table, preset, name)
            axes[row, column].set_title(title if row == 0 else "")
        axes[row, 0].set_ylabel(f"{preset} preset")
        axes[row, 0].legend()
    for axis in axes[-1]:
        axis.set_xlabel("epoch")
    return figure


def _over_training(axis: Axes, table: Table, preset: str, name: str) -> None:
    for arm, colour in COLOURS.items():
        found = table["regions"][f"{preset}-{arm}"]
        if name not in found["values"]:
            words = "not counted: with biases,\nparts of the circle are\nnot parts of the plane"
            axis.text(0.5, 0.5, words, ha="center", va="center", color=plots.COLOURS["grey"], transform=axis.transAxes)
            axis.axis("off")
            return
        epochs = np.maximum(np.array(found["epochs"], dtype=float), 0.5)
        label = ARMS[arm]
        plots.band(axis, epochs, np.array(found["values"][name]), label, colour, marker="o", markersize=3)
        if name == "cells":
            seen = np.median(np.array(found["values"]["cells_seen"]), axis=1)
            axis.plot(epochs, seen, ":", color=plots.COLOURS[colour], label=f"{label}, seen by the data")
    axis.set(xscale="log", ylim=(-0.02 if name == "split" else 0, None))
    axis.set_xticks([0.5, 3, 10, 30, 100], ["0", "3", "10", "30", "100"])
    axis.minorticks_off()


def value_kernel_law(table: Table) -> Figure:
    """Averaged over fresh values, the value kernel is the law; at trained values it is not."""
    law = table["law"]
    values = {name: np.array(rows) for name, rows in law["values"].items()}  # [epochs, members]
    figure, axes = plots.grid(1, 3, (3.5, 3.1))
    places = np.arange(len(law["epochs"]))
    spread = np.linspace(-0.25, 0.25, values["ratio"].shape[1])
    ratio, entry, cosine = axes[0]
    for place in places:
        ratio.errorbar(
            place + spread,
            values["ratio"][place],
            2 * values["error"][place],
            fmt=".",
            color=plots.COLOURS["blue"],
            linewidth=0.8,
        )
    ratio.axhline(1, color=plots.COLOURS["grey"], linewidth=0.8)
    ratio.set(title="averaged trace over the law", ylabel="ratio, ± 2 standard errors", ylim=(0.5, 1.5))
    exact, averaged = np.array(law["entries"]["exact"]), np.array(law["entries"]["averaged"])
    entry.plot(exact, averaged, ".", markersize=3, alpha=0.5, color=plots.COLOURS["blue"])
    entry.plot([0, exact.max()], [0, exact.max()], color=plots.COLOURS["grey"], linewidth=0.8)
    entry.set(xlabel="law", ylabel=f"average over {law['draws']} draws")
    entry.set_title(f"entries, seed 0, gates of epoch {law['epochs'][-1]}")
    for name, colour, label in (
        ("cosine_mean", "blue", "fresh values"),
        ("cosine_trained", "red", "the network's own values"),
    ):
        plots.band(cosine, places, values[name], label, colour, marker="o", markersize=4)
    cosine.set(title="cosine with the law", ylim=(0, 1.05))
    cosine.legend(loc="lower left")
    for axis in (ratio, cosine):
        axis.set_xticks(places, [str(epoch) for epoch in law["epochs"]])
        axis.set_xlabel("gates of epoch")
    return figure


FIGURES: dict[str, tuple[str, str, Callable[[Table], Figure]]] = {
    "fig01_examples": (
        "Path regions of ReLU nets can be in pieces, and can jump (Figure 1)",
        "Left: one path of a ReLU net on the line, active on two separate intervals. Middle: the region of one path in the "
        "plane just below and just above eps = 0, for a ReLU net and for the DLGN whose gates have the same weights. Right: "
        "how much of the circle the region gains between -eps and eps.",
        fig01_examples,
    ),
    "identities": (
        "Exact means exact",
        "Relative error of every identity on every random network, in float64; zero is drawn at the left edge.",
        identities,
    ),
    "regions_over_training": (
        "Regions over training, counted exactly",
        "Median and middle half of the seeds. Dotted: what the data points see. Without biases (pilot) a DLGN always has two "
        "cells for every unit, and path regions in one part.",
        regions_over_training,
    ),
    "value_kernel_law": (
        "The tangent kernel of the values, averaged over values",
        "Gates from several epochs of training, values drawn afresh: the mean kernel is L s^(2(L-1)) times the neural path "
        "kernel. At the network's own values it departs from that law as training goes on.",
        value_kernel_law,
    ),
}
"""File name: title, caption, the function that draws it."""


def draw(table: Table) -> dict[str, Figure]:
    """All figures of the study by file name, from its table alone."""
    with plots.style():
        return {name: maker(table) for name, (_, _, maker) in FIGURES.items()}
