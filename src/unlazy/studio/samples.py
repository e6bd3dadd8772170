"""One number per sample, drawn in a column per class or group, as the page does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unlazy import plots
from unlazy.store import Run
from unlazy.studio.probe import Probe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BANDS = 24  # more columns than this nobody can read
GOLDEN = 0.6180339887


def counts_of(run: Run, name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Active paths as counts, where a scope kept ln(1 + count); anything else as it is."""
    return np.expm1(values) if name == "paths" and run.header.get("kind") == "scope" else values


def bands_of(probe: Probe, samples: int) -> dict[str, list[int]]:
    """Named columns: groups, else classes, else one for all."""
    if probe.groups and len(probe.groups) <= MOST_BANDS:
        return probe.groups
    labels = probe.labels() or []
    named = sorted(set(labels))
    if not 0 < len(named) <= MOST_BANDS:
        return {"all": list(range(samples))}
    return {str(label): [place for place, own in enumerate(labels) if own == label] for label in named}


def draw_strips(
    axis: Axes,
    values: NDArray[Any],
    bands: dict[str, list[int]],
    colour: str | None = None,
    part: int = 0,
    parts: int = 1,
) -> None:
    """A dot per sample and a bar at the median of each column; ``part`` of ``parts`` side by side in a column."""
    width = 0.8 / parts
    colours = list(plots.COLOURS)
    for place, samples in enumerate(bands.values()):
        own = values[samples]
        own = own[np.isfinite(own)]
        shade = plots.COLOURS[colour or colours[place % len(colours)]]
        middle = place - 0.4 + (part + 0.5) * width
        spread = (np.arange(len(own)) * GOLDEN) % 1 - 0.5
        axis.scatter(middle + 0.9 * width * spread, own, s=7, color=shade, alpha=0.5, linewidths=0)
        if len(own):
            axis.hlines(np.median(own), middle - width / 2, middle + width / 2, color=shade, linewidth=2)
    axis.set_xticks(range(len(bands)), list(bands))
