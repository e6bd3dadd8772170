"""The verdict of a run: every measure of its evidence between its two thresholds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unlazy import plots
from unlazy.store import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_verdict(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Every measure between its two thresholds: lazy left of 0, rich right of 1, with its interval."""
    import json

    found = json.loads((run.folder / "verdict.json").read_text())
    rows = [row for row in found["evidence"] if None not in (row["value"], row["lazy_below"], row["rich_above"])]
    figure, axes = plots.grid(1, 1, (6.4, 0.34 * len(rows) + 1.1))
    axes[0, 0].axvspan(-3, 0, color=plots.COLOURS["blue"], alpha=0.12)
    axes[0, 0].axvspan(1, 4, color=plots.COLOURS["orange"], alpha=0.12)
    for place, row in enumerate(reversed(rows)):
        low, high = row["lazy_below"], row["rich_above"]
        ends = [(value - low) / (high - low) for value in (row["value"], *(row.get("interval") or ()))]
        axes[0, 0].plot(np.clip(ends[1:], -2.9, 3.9), [place] * len(ends[1:]), color=plots.COLOURS["grey"], linewidth=2)
        axes[0, 0].plot(np.clip(ends[0], -2.9, 3.9), place, "o", color=plots.COLOURS["black"], markersize=5)
        axes[0, 0].text(4.1, place, f"{row['value']:.3g}  {row['says']}", va="center", fontsize=8)
    axes[0, 0].set_yticks(range(len(rows)), [row["measure"].replace("_", " ") for row in reversed(rows)])
    axes[0, 0].set(xlim=(-3, 4), title=f"verdict: {found['label']}")
    axes[0, 0].set_xticks([-1.5, 0.5, 2.5], ["lazy", "between the thresholds", "rich"])
    return figure
