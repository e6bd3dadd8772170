"""The study in two pictures: what gates of each moment are good for, and when they are finished."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unlazy import plots
from unlazy.studies.halfspace.finished.settings import END, PLATEAU
from unlazy.studies.halfspace.moments import ARMS, numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST = 0.5  # where epoch 0 stands on a logarithmic axis
TICKS, TICK_NAMES = [FIRST, 1, 3, 10, 30, 100, 200, 600], ["0", "1", "3", "10", "30", "100", "", "600"]
LINES = (
    ("network", "black", "the network itself, then", {"linestyle": ":"}),
    ("retrained", "blue", "fresh experts under its gates of then", {"marker": "o", "markersize": 3}),
    ("free_paths", "green", "regression on its active paths", {"linestyle": "--"}),
    ("tangent", "orange", "regression on its tangents", {"linestyle": "--"}),
)


def copies(results: Mapping[str, Any]) -> Figure:
    """Loss against copy time, a column per kind of network, a row per preset."""
    settings = results["settings"]
    presets, arms = settings["presets"], settings["arms"]
    figure, axes = plots.grid(len(presets), len(arms), (2.5, 2.5), sharex=True, sharey=True)
    for row, preset in enumerate(presets):
        for column, arm in enumerate(arms):
            axis, entry = axes[row, column], results["copies"][f"{preset}-{arm}"]
            epochs = np.maximum([*settings["copied"], settings["epochs"]], FIRST)
            for quantity, colour, label, look in LINES:
                plots.band(axis, epochs, over_time(entry, settings["copied"], quantity), label, colour, **look)
            hard = results["copies"].get(f"{preset}-{arm}-hard")
            if hard is not None:
                values = over_time(hard, settings["copied"], "retrained")
                plots.band(axis, epochs, values, "fresh experts, gates made hard", "red", marker="s", markersize=3)
            _mark_plateau(axis, numbers(entry, "time_plateau"))
            axis.axhline(0.01, color=plots.COLOURS["grey"], linewidth=0.6)
            axis.set(xscale="log", yscale="log", ylim=(1e-4, 0.7))
            if row == 0:
                axis.set_title(ARMS[arm].label.replace(", large", ",\nlarge").replace(", linear", ",\nlinear"))
        axes[row, 0].set_ylabel(f"{preset} preset\nmean squared error")
    for axis in axes[-1]:
        axis.set_xlabel("copied at epoch")
        axis.set_xticks(TICKS, TICK_NAMES)
        axis.minorticks_off()
    drawn: dict[str, Any] = {}
    for axis in axes.flat:
        drawn |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=2 if len(arms) < 4 else 3)
    return figure


def finished(results: Mapping[str, Any]) -> Figure:
    """Per seed: the plateau, and the moment from which copied gates serve as well as the last ones."""
    entries = list(results["copies"].values())
    figure, axes = plots.grid(1, 1, (8.4, 1.2 + 0.28 * len(entries)))
    axis = axes[0, 0]
    for place, entry in enumerate(entries):
        for name, colour, marker, label in (
            ("time_plateau", "black", "|", "loss down to the plateau near 0.25"),
            ("time_finished", "blue", "o", "gates as good as the last ones"),
        ):
            times = np.maximum(np.where(np.isinf(numbers(entry, name)), np.nan, numbers(entry, name)), FIRST)
            height = place + np.linspace(-0.25, 0.25, len(times))
            axis.plot(
                times,
                height,
                marker,
                color=plots.COLOURS[colour],
                alpha=0.5,
                markersize=5,
                label=label if not place else None,
            )
    axis.set_yticks(range(len(entries)), [entry["label"] for entry in entries])
    axis.set(xscale="log", xlabel="epoch, one mark per seed", ylim=(len(entries) - 0.5, -0.5))
    axis.set_xticks(TICKS, TICK_NAMES)
    axis.minorticks_off()
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def over_time(entry: Mapping[str, Any], copied: list[int], quantity: str) -> NDArray[np.float64]:
    """``[copies, seeds]`` over the copied epochs and the end."""
    return np.stack([numbers(entry, f"{quantity}_{name}") for name in (*copied, END)])


def _mark_plateau(axis: Any, times: NDArray[np.float64]) -> None:
    if np.isfinite(times).any():
        middle = float(np.median(times[np.isfinite(times)]))
        axis.axvline(middle, color=plots.COLOURS["purple"], linewidth=1, label=f"{PLATEAU} near 0.25 (median)")


def draw(results: Mapping[str, Any]) -> dict[str, Figure]:
    """All figures of the study by file name."""
    with plots.style():
        return {"copies": copies(results), "finished": finished(results)}
