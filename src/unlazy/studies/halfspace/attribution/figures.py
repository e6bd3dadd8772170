"""The split of the kernel's change as bars: gates alone, weights alone, and what needs both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from unlazy import plots
from unlazy.claims.verdict import interval
from unlazy.studies.halfspace.moments import ARMS, numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = (
    ("gates_alone", "blue", "gates moved alone"),
    ("weights_alone", "orange", "weights moved alone"),
    ("interaction", "grey", "only when both move"),
)
TITLES = {
    "plateau": "from the start to the plateau",
    "200": "from the start to epoch 200",
    "end": "from the start to the end",
}


def shares(results: Mapping[str, Any]) -> Figure:
    """Mean shares as bars that add up to one; the diamond is the gates' share in the symmetric split."""
    settings = results["settings"]
    presets, arms = settings["presets"], settings["arms"]
    some = next(iter(results["networks"].values()))["values"]
    moments = [moment for moment in TITLES if f"gates_{moment}" in some]
    figure, axes = plots.grid(len(presets), len(moments), (3.2, 0.9 + 0.28 * len(arms)), sharex=True, sharey=True)
    for row, preset in enumerate(presets):
        for column, moment in enumerate(moments):
            axis = axes[row, column]
            for place, arm in enumerate(arms):
                _bar(axis, place, results["networks"][f"{preset}-{arm}"], moment)
            axis.axvline(0.5, color=plots.COLOURS["black"], linestyle=":", linewidth=0.8)
            axis.set_yticks(range(len(arms)), [ARMS[arm].label for arm in arms])
            axis.set(ylim=(len(arms) - 0.5, -0.5), title=TITLES[moment] if row == 0 else "")
        axes[row, 0].set_ylabel(f"{preset} preset")
    for axis in axes[-1]:
        axis.set_xlabel("share of the kernel's change")
    drawn = dict(zip(*reversed(axes[0, 0].get_legend_handles_labels()), strict=True))
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=2)
    return figure


def _bar(axis: Any, place: int, entry: Mapping[str, Any], moment: str) -> None:
    """Positive shares to the right of zero, negative ones to the left; means add up, medians would not."""
    symmetric = numbers(entry, f"gates_{moment}")
    if np.isnan(symmetric).all():
        return
    ends = {True: 0.0, False: 0.0}
    for name, colour, label in PARTS:
        value = float(np.nanmean(numbers(entry, f"{name}_{moment}")))
        axis.barh(place, value, 0.6, left=ends[value >= 0], color=plots.COLOURS[colour], alpha=0.75, label=label)
        ends[value >= 0] += value
    low, high = interval(symmetric)
    middle = float(np.nanmedian(symmetric))
    axis.errorbar(
        middle,
        place,
        xerr=[[max(0.0, middle - low)], [max(0.0, high - middle)]],
        fmt="D",
        markersize=4,
        color=plots.COLOURS["black"],
        label="gates, symmetric split (median, 95 %)",
    )


def draw(results: Mapping[str, Any]) -> dict[str, Figure]:
    """All figures of the study by file name."""
    with plots.style():
        return {"shares": shares(results)}
