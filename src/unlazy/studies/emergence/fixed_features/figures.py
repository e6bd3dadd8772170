"""The figures of the fixed-features study: accuracy against steps, and the loss where the bound binds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from unlazy import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES = (
    ("network", "network, features learned", "blue"),
    ("linearised", "its linearisation (NTK)", "orange"),
    ("random", "random features", "green"),
)


def draw(table: Mapping[str, Any]) -> dict[str, Figure]:
    """All figures by name."""
    with plots.style():
        return {"glance": glance_figure(table), "accuracy": accuracy_figure(table), "bound": bound_figure(table)}


def glance_figure(table: Mapping[str, Any]) -> Figure:
    """Every method at its best, one dot a seed: inputs with structure on the left, without on the right."""
    settings = table["settings"]
    lines = [
        ("network", "accuracy", "network", "blue"),
        ("machine", "machine", "recursive feature machine", "green"),
        ("wide", "wide", f"{settings['wide']:,} random features", "orange"),
        *(("fixed", f"random_{width}", f"{width:,} random features", "orange") for width in settings["widths"]),
        ("fixed", "random", f"{settings['pairs']} random features", "orange"),
        ("infinite", "infinite", "infinite-width NTK", "orange"),
        ("fixed", "linearised", "linearised network (NTK)", "orange"),
        ("machine", "laplace", "Laplace kernel", "orange"),
    ]
    figure, axes = plots.grid(1, 2, (4.6, 3.2), sharex=True, sharey=True)
    for axis, kind in zip(axes[0], ("structured", "unstructured"), strict=True):
        for place, (group, name, _, colour) in enumerate(lines):
            values = np.array([row[name] for row in table[f"{group}_{kind}"]])
            spread = np.linspace(-0.15, 0.15, len(values)) if len(values) > 1 else np.zeros(1)
            axis.plot(values, place + spread, "o", color=plots.COLOURS[colour], markersize=3.5, alpha=0.6)
            axis.text(1.045, place, f"{np.median(values):.3f}", va="center", fontsize=8)
        axis.axvline(0.5, color=plots.COLOURS["grey"], linestyle=":")
        axis.set(xlim=(0.45, 1.03), xlabel="test accuracy", title=f"{kind} inputs")
    counting = float(np.median([row["counting"] for row in table["network_structured"]]))
    axes[0, 0].axvline(counting, color=plots.COLOURS["red"], linestyle="--", linewidth=1)
    axes[0, 0].annotate(
        "counting,\na linear rule",
        (counting, 0.5),
        xytext=(5, 0),
        textcoords="offset points",
        color=plots.COLOURS["red"],
        fontsize=8,
        va="center",
    )
    axes[0, 0].set_yticks(range(len(lines)), [label for _, _, label, _ in lines])
    axes[0, 0].invert_yaxis()
    return figure


def accuracy_figure(table: Mapping[str, Any]) -> Figure:
    """Test accuracy against steps on both kinds of data, with the best tuned fixed features as a line."""
    figure, axes = plots.grid(1, 2, (4.6, 3.6), sharey=True)
    for axis, kind in zip(axes[0], ("structured", "unstructured"), strict=True):
        rows = table[f"network_{kind}"]
        for name, label, colour in CURVES:
            curves = np.array([row["curves"][name] for row in rows if row["curves"][name]])
            plots.band(axis, curves[0, :, 0], curves[:, :, 1].T, label, colour)
        curves = np.array([row["curve"] for row in table[f"infinite_{kind}"] if row["curve"]])
        plots.band(axis, curves[0, :, 0], curves[:, :, 1].T, "infinite-width NTK", "purple")
        wide = float(np.median([row["wide"] for row in table[f"wide_{kind}"]]))
        label = f"{table['settings']['wide']} random features, tuned ridge: {wide:.3f}"
        axis.axhline(wide, color=plots.COLOURS["red"], linestyle="--", label=label)
        axis.axhline(0.5, color=plots.COLOURS["grey"], linestyle=":")
        axis.set(xlabel="step", title=f"{kind} inputs", ylim=(0.45, 1.02))
        plots.legend_below(axis, 1)
    axes[0, 0].set_ylabel("test accuracy")
    return figure


def bound_figure(table: Mapping[str, Any]) -> Figure:
    """Hinge loss over the ball for every relevant set, above the bound; the trained network below it."""
    figure, axes = plots.grid(1, 1, (5.2, 3.4))
    axis, rows = axes[0, 0], table["ball"]
    place = np.arange(1, len(rows) + 1)
    for name, colour, mark in (("neurons", "green", "o"), ("cosines", "orange", "s")):
        values = [row[f"certified_{name}"] for row in rows]
        label = f"random {name}, certified least loss"
        axis.plot(place, values, mark, color=plots.COLOURS[colour], label=label, markersize=4)
    learned = [row["network_hinge"] for row in table["bound_network"]]
    axis.plot(place[: len(learned)], learned, "*", color=plots.COLOURS["blue"], label="trained network", markersize=9)
    bound = rows[0]["bound"]
    axis.axhline(bound, color=plots.COLOURS["red"], label=f"Theorem 2: {bound:.3f}")
    axis.set(xlabel="relevant set", ylabel="hinge loss", ylim=(0, 1.05), xticks=place[::3])
    axis.set_title("no readout of fixed features falls below the bound")
    plots.legend_below(axis)
    return figure
