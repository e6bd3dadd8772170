"""Half-spaces: as discs, as borders in the plane of inputs, and as images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unlazy import plots
from unlazy.store import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_half_spaces(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Every half-space of the plane as a disc, one row per layer, filled where the gate is open."""
    from unlazy.studio.run_reader import open_run_folder
    from unlazy.studio.units import half_spaces_at

    normals, offsets = half_spaces_at(open_run_folder(run.folder), names[0], step, member)
    layers, units = offsets.shape
    figure, axes = plots.grid(1, 1, (0.55 * units + 1, 0.62 * layers + 0.6))
    plots.draw_half_planes(axes[0, 0], normals, offsets)
    axes[0, 0].set_title(f"half-spaces, step {step}")
    return figure


def draw_inputs(run: Run, names: tuple[str, ...], step: int, member: int, layer: int) -> Figure:
    """The samples in the plane of inputs, the borders of one layer's gates, and the output as background if it is stored."""
    from unlazy.studio.probe_set import inputs_of, probe_set_of
    from unlazy.studio.run_reader import open_run_folder
    from unlazy.studio.units import half_spaces_at

    reader = open_run_folder(run.folder)
    probe_set = probe_set_of(reader)
    points = np.asarray(inputs_of(reader)).reshape(-1, 2)
    extent = 1.15 * float(np.abs(points).max())
    figure, axes = plots.grid(1, 1, (4.4, 4.4))
    if "grid_output" in names:
        extent = float(run.header["recipe"]["grid"]["extent"])
        side = int(run.header["recipe"]["grid"]["size"])
        output = reader.find_array("grid_output", step, member).read().reshape(side, side)
        box = (-extent, extent, -extent, extent)
        axes[0, 0].imshow(output, origin="lower", extent=box, cmap="RdBu_r", vmin=-1, vmax=1, alpha=0.6)
    quantity = next((name for name in names if name != "grid_output"), None)
    if quantity is not None:
        normals, offsets = half_spaces_at(reader, quantity, step, member)
        for normal, offset in zip(normals[layer], offsets[layer], strict=True):
            length = np.hypot(*normal) or 1.0
            foot, along = -offset * normal / length**2, np.array([-normal[1], normal[0]]) / length
            ends = np.stack([foot - 3 * extent * along, foot + 3 * extent * along])
            axes[0, 0].plot(*ends.T, color=plots.COLOURS["grey"], linewidth=0.8)
            axes[0, 0].plot(*np.stack([foot, foot + 0.06 * extent * normal / length]).T, color=plots.COLOURS["black"])
    high = None if probe_set.y is None else probe_set.y[:, 0] > probe_set.y[:, 0].mean()
    colour = plots.COLOURS["blue"] if high is None else np.where(high, plots.COLOURS["blue"], plots.COLOURS["orange"])
    axes[0, 0].scatter(*points.T, s=8, c=colour, linewidths=0)
    title = f"inputs, step {step}" if quantity is None else f"half-spaces of layer {layer + 1}, step {step}"
    axes[0, 0].set(aspect="equal", xlim=(-extent, extent), ylim=(-extent, extent), title=title)
    return figure


def draw_normal_images(run: Run, names: tuple[str, ...], step: int, member: int, layer: int) -> Figure:
    """The normals of one layer's half-spaces as images: orange pixels open the gate, purple ones close it."""
    from unlazy.studio.probe_set import probe_set_of
    from unlazy.studio.run_reader import open_run_folder

    reader = open_run_folder(run.folder)
    normals = reader.find_array(names[0], step, member).read()[layer][:100]
    shape = probe_set_of(reader).image_shape or [1, 1, normals.shape[-1]]
    columns = int(np.ceil(np.sqrt(len(normals))))
    rows = -(-len(normals) // columns)
    figure, axes = plots.grid(rows, columns, (0.7, 0.7))
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, normal in zip(axes.flat, normals, strict=False):
        picture = normal.reshape(shape).mean(0)
        top = np.abs(picture).max() or 1
        axis.imshow(picture, cmap="PuOr_r", vmin=-top, vmax=top)
    figure.suptitle(f"half-spaces of layer {layer + 1}, step {step}")
    return figure
