"""The lead without a clock (how much of the bottom half is left when the top half has come to a loss), and over epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unlazy import plots
from unlazy.store import Run
from unlazy.studies.halfspace.moments import ARMS, Nets, curve, numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("network", "blue", "network", {}),
    ("linearised", "red", "linearised at its start, same Adam", {"linestyle": "--"}),
    ("flow", "orange", "gradient flow of its first tangent kernel", {"linestyle": ":"}),
)


def lead(results: Mapping[str, Any]) -> Figure:
    """Bottom half's loss against the top half's, a column per kind of network, a row per preset."""
    settings, levels = results["settings"], np.array(results["levels"])
    presets, arms = settings["presets"], settings["arms"]
    figure, axes = plots.grid(len(presets), len(arms), (2.3, 2.4), sharex=True, sharey=True)
    for row, preset in enumerate(presets):
        for column, arm in enumerate(arms):
            axis, entry = axes[row, column], results["networks"][f"{preset}-{arm}"]
            for learner, colour, label, look in LOOKS:
                values = numbers(entry, f"bottom_at_{learner}").T  # [levels, seeds]
                reached = np.isfinite(values).mean(1) >= 0.5  # a median of the few seeds that got there would mislead
                if reached.sum() > 1:
                    plots.band(axis, levels[reached], values[reached], label, colour, **look)
            if not axis.get_lines():
                axis.text(0.05, 0.35, "too few seeds learn\nanything here", ha="center", fontsize=8)
            axis.plot(levels, levels, color=plots.COLOURS["grey"], linewidth=0.7, label="no lead: both halves alike")
            axis.axvline(0.05, color=plots.COLOURS["grey"], linewidth=0.5, linestyle="-.")
            axis.set(xscale="log", xlim=(0.5, 0.005), ylim=(0, 0.65))
            if row == 0:
                axis.set_title(_title(arm))
        axes[row, 0].set_ylabel(f"{preset} preset\nloss on the bottom half")
    for axis in axes[-1]:
        axis.set_xlabel("loss on the top half, falling")
        axis.set_xticks([0.5, 0.05, 0.005], ["0.5", "0.05", "0.005"])
        axis.minorticks_off()
    drawn: dict[str, Any] = {}
    for axis in axes.flat:
        drawn |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=2)
    return figure


def halves(nets: Sequence[Nets], trained: Mapping[str, Run], linear: Mapping[str, Run]) -> Figure:
    """Loss on each half over epochs, for the network and for its linearisation."""
    presets = list(dict.fromkeys(one.preset for one in nets))
    arms = list(dict.fromkeys(one.arm for one in nets if not ARMS[one.arm].equal_halves))
    figure, axes = plots.grid(len(presets), len(arms), (2.6, 2.4), sharex=True, sharey=True)
    for one in nets:
        if one.arm not in arms:
            continue
        axis = axes[presets.index(one.preset), arms.index(one.arm)]
        for runs, who, colour in ((trained, "network", "blue"), (linear, "linearised", "red")):
            for half, look in (("top", "-"), ("bottom", "--")):
                epochs, values = curve(one, runs[one.key], f"loss_{half}")
                plots.band(axis, np.maximum(epochs, 0.5), values, f"{who}, {half} half", colour, linestyle=look)
        axis.axhline(0.05, color=plots.COLOURS["grey"], linewidth=0.5, linestyle="-.")
        axis.set(xscale="log", yscale="log", ylim=(5e-4, 1))
    for column, arm in enumerate(arms):
        axes[0, column].set_title(_title(arm))
        axes[-1, column].set_xlabel("epoch")
    for row, preset in enumerate(presets):
        axes[row, 0].set_ylabel(f"{preset} preset\nmean squared error")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4 if len(arms) > 2 else 2)
    return figure


def _title(arm: str) -> str:
    return ARMS[arm].label.replace(": ", ":\n").replace(", ", ",\n", 1)


def draw(
    results: Mapping[str, Any], nets: Sequence[Nets], trained: Mapping[str, Run], linear: Mapping[str, Run]
) -> dict[str, Figure]:
    """All figures of the study by file name."""
    with plots.style():
        return {"lead": lead(results), "halves": halves(nets, trained, linear)}
