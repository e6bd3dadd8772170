"""Heat maps: a kernel, the difference of two kernels, or any other array as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unlazy import plots
from unlazy.store import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_heat_map(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """A heat map of a square array; kernels are divided by their mean diagonal."""
    name = names[0]
    values = run.array(name, step)[member].astype(float)
    diagonal = np.diagonal(values).mean()
    if name.endswith(("overlap", "tangent", "kernel")) and diagonal > 0:
        values = values / diagonal
    figure, axes = plots.grid(1, 1, (4.4, 3.8))
    signed = np.nanmin(values) < -1e-3 * np.nanmax(values)
    top = np.nanmax(np.abs(values))
    colours = {"cmap": "RdBu_r", "vmin": -top, "vmax": top} if signed else {"cmap": "cividis", "vmin": 0, "vmax": top}
    image = axes[0, 0].imshow(values, interpolation="nearest", **colours)
    axes[0, 0].set_title(f"{name}, step {step}")
    figure.colorbar(image, ax=axes[0, 0], shrink=0.85)
    return figure


def draw_difference(
    run: Run, names: tuple[str, ...], step: int, member: int, other: str, step2: int, member2: int
) -> Figure:
    """A heat map of a kernel of one run minus that of another, each over its mean diagonal."""
    from unlazy.studio.run_reader import open_run_folder

    pairs = ((open_run_folder(run.folder), step, member), (open_run_folder(other), step2, member2))
    first, second = (reader.find_array(names[0], at, place).read().astype(float) for reader, at, place in pairs)
    values = first / (np.diagonal(first).mean() or 1) - second / (np.diagonal(second).mean() or 1)
    figure, axes = plots.grid(1, 1, (4.4, 3.8))
    top = np.nanmax(np.abs(values)) or 1
    image = axes[0, 0].imshow(values, interpolation="nearest", cmap="RdBu_r", vmin=-top, vmax=top)
    axes[0, 0].set_title(f"{names[0]}: first (step {step}) minus second (step {step2})")
    figure.colorbar(image, ax=axes[0, 0], shrink=0.85)
    return figure


def draw_table(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """A heat map of any other array, one row per entry of its first axis."""
    values = run.array(names[0], step)[member]
    figure, axes = plots.grid(1, 1, (5.0, 3.6))
    image = axes[0, 0].imshow(
        values.reshape(values.shape[0], -1), aspect="auto", interpolation="nearest", cmap="cividis"
    )
    axes[0, 0].set_title(f"{names[0]}, step {step}")
    figure.colorbar(image, ax=axes[0, 0], shrink=0.85)
    return figure
