"""The figures of the swap study: loss and preference of the active paths around the swap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unlazy import plots
from unlazy.store import Run
from unlazy.studies.halfspace.circle.settings import ARMS
from unlazy.studies.halfspace.swap.measure import curves, favour, key, level_before
from unlazy.studies.halfspace.swap.settings import TRAINED, Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = Mapping[str, Run]
THINNED = 2  # epochs between drawn points
LINES = {
    "stay": ("grey", "no swap"),
    "scratch": ("orange", "swapped target from the start"),
    "swap": ("blue", "swapped"),
}


def loss(settings: Settings, first: Runs, second: Runs) -> Figure:
    """Loss before and after the swap, beside both controls."""
    presets, arms = settings.presets, settings.arms
    figure, axes = plots.grid(len(presets), len(arms), (2.5, 2.6), sharex=True, sharey="row")
    for row, preset in enumerate(presets):
        for axis, arm in zip(axes[row], arms, strict=True):
            found = curves(settings, *_pair(first, second, preset, arm), "loss")
            _around_the_swap(axis, settings, found)
            level = np.median(level_before(found["before"]))
            axis.axhline(level, color=plots.COLOURS["black"], linewidth=0.7, linestyle=":", label="its level before")
            axis.set(yscale="log", title=ARMS[arm].label)
        axes[row, 0].set_ylabel(f"{preset} preset\nmean squared error")
    _finish(figure, axes)
    return figure


def paths(settings: Settings, first: Runs, second: Runs) -> Figure:
    """Which half has more active paths, before and after the swap."""
    arms = [arm for arm in settings.arms if arm in TRAINED]
    figure, axes = plots.grid(len(settings.presets), len(arms), (2.9, 2.6), sharex=True, sharey="row")
    for row, preset in enumerate(settings.presets):
        for axis, arm in zip(axes[row], arms, strict=True):
            _around_the_swap(axis, settings, favour(settings, *_pair(first, second, preset, arm)))
            axis.axhline(0, color=plots.COLOURS["grey"], linewidth=0.7)
            axis.set(title=ARMS[arm].label)
        axes[row, 0].set_ylabel(f"{preset} preset\nlog ratio of paths, top / bottom")
    _finish(figure, axes)
    return figure


def _around_the_swap(axis: Axes, settings: Settings, found: Mapping[str, NDArray[Any]]) -> None:
    """Time 0 is the swap; training from the start is drawn as if it had begun there."""
    _band(axis, np.arange(-settings.before, 1), found["before"], "before", "black")
    for name, (colour, label) in LINES.items():
        _band(axis, np.arange(settings.after + 1), found[name], label, colour)
    axis.axvline(0, color=plots.COLOURS["red"], linewidth=0.7)


def _band(axis: Axes, epochs: NDArray[Any], values: NDArray[Any], label: str, colour: str) -> None:
    plots.band(axis, epochs[::THINNED], values[::THINNED], label, colour, linewidth=1)


def _finish(figure: Figure, axes: NDArray[Any]) -> None:
    for axis in axes[-1]:
        axis.set_xlabel("epochs after the swap")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)


def _pair(first: Runs, second: Runs, preset: str, arm: str) -> tuple[Run, Run]:
    return first[f"first-{key(preset, arm)}"], second[f"second-{key(preset, arm)}"]


FIGURES = {"loss": loss, "paths": paths}
"""File name: the function that draws it."""


def draw(settings: Settings, first: Runs, second: Runs) -> dict[str, Figure]:
    """All figures of the study by file name."""
    with plots.style():
        return {name: maker(settings, first, second) for name, maker in FIGURES.items()}
