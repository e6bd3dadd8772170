"""Strip plots: a dot per sample in a column per group, and how samples are grouped and counted for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unlazy import plots
from unlazy.store import Run
from unlazy.studio.probe_set import ProbeSet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_GROUPS = 24  # more columns than this cannot be read
GOLDEN = 0.6180339887  # spreads the dots of a column evenly


def path_counts(run: Run, name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Active paths as counts, where a scope stored ln(1 + count); other values unchanged."""
    return np.expm1(values) if name == "paths" and run.header.get("kind") == "scope" else values


def sample_groups(probe_set: ProbeSet, samples: int) -> dict[str, list[int]]:
    """The samples of every group of a probe set, else of every class, else all samples."""
    if probe_set.groups and len(probe_set.groups) <= MOST_GROUPS:
        return probe_set.groups
    labels = probe_set.labels() or []
    named = sorted(set(labels))
    if not 0 < len(named) <= MOST_GROUPS:
        return {"all": list(range(samples))}
    return {str(label): [place for place, own in enumerate(labels) if own == label] for label in named}


def add_strips(
    axis: Axes,
    values: NDArray[Any],
    groups: dict[str, list[int]],
    colour: str | None = None,
    part: int = 0,
    parts: int = 1,
) -> None:
    """Add a dot per sample and a bar at the median, in a column per group; ``part`` of ``parts`` stand side by side."""
    width = 0.8 / parts
    colours = list(plots.COLOURS)
    for place, samples in enumerate(groups.values()):
        own = values[samples]
        own = own[np.isfinite(own)]
        shade = plots.COLOURS[colour or colours[place % len(colours)]]
        middle = place - 0.4 + (part + 0.5) * width
        spread = (np.arange(len(own)) * GOLDEN) % 1 - 0.5
        axis.scatter(middle + 0.9 * width * spread, own, s=7, color=shade, alpha=0.5, linewidths=0)
        if len(own):
            axis.hlines(np.median(own), middle - width / 2, middle + width / 2, color=shade, linewidth=2)
    axis.set_xticks(range(len(groups)), list(groups))
