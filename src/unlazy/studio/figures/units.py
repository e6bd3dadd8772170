"""Units: all neurons on a plane, one unit at a step, and one unit over training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unlazy import plots
from unlazy.store import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_neurons(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Neurons as points of a plane: multidimensional scaling of the cosine distances of their weights."""
    from unlazy.studio.neuron_layout import layouts_of_run
    from unlazy.studio.run_reader import open_run_folder

    found = layouts_of_run(open_run_folder(run.folder), names[0], member)
    frame = max((place for place, at in enumerate(found.steps) if at <= step), default=0)
    figure, axes = plots.grid(1, 1, (4.2, 4.0))
    axes[0, 0].scatter(*found.points[frame].T, s=9, color=plots.COLOURS["blue"], alpha=0.7, linewidths=0)
    axes[0, 0].set(
        aspect="equal", xticks=[], yticks=[], title=f"{names[0]}, step {found.steps[frame]}: cosine distances"
    )
    return figure


def draw_unit(run: Run, names: tuple[str, ...], step: int, member: int, layer: int, unit: int) -> Figure:
    """One half-space or neuron at a step: its border in the plane, its weights as an image, or its largest coordinates."""
    from unlazy.studio.probe_set import probe_set_of
    from unlazy.studio.run_reader import open_run_folder
    from unlazy.studio.units import unit_history

    reader = open_run_folder(run.folder)
    found, shape = unit_history(reader, names[0], member, layer, unit), probe_set_of(reader).image_shape
    now = max((place for place, at in enumerate(found.steps) if at <= step), default=0)
    vector = found.vectors[now]
    title = f"{names[0]}: layer {layer + 1}, unit {unit + 1}, step {found.steps[now]}"
    if shape and int(np.prod(shape)) == len(vector):
        figure, axes = plots.grid(1, 2, (3.0, 3.0))
        for axis, place in zip(axes[0], (now, 0), strict=True):
            picture = found.vectors[place].reshape(shape).mean(0)
            top = np.abs(picture).max() or 1
            axis.imshow(picture, cmap="PuOr_r", vmin=-top, vmax=top)
            axis.set(xticks=[], yticks=[], title=f"step {found.steps[place]}")
    elif len(vector) == 2 and found.offsets is not None:
        figure, axes = plots.grid(1, 1, (4.0, 4.0))
        angle = np.linspace(0, 2 * np.pi, 361)
        circle = np.stack([np.cos(angle), np.sin(angle)], 1)
        open_here = circle @ vector + found.offsets[now] >= 0
        axes[0, 0].plot(*circle.T, color=plots.COLOURS["grey"], linewidth=0.8)
        axes[0, 0].plot(*np.where(open_here[:, None], circle, np.nan).T, color=plots.COLOURS["blue"], linewidth=4)
        for place in range(max(0, now - 7), now + 1):
            normal, length = found.vectors[place], np.hypot(*found.vectors[place]) or 1.0
            foot, along = -found.offsets[place] * normal / length**2, np.array([-normal[1], normal[0]]) / length
            ends = np.stack([foot - 4 * along, foot + 4 * along])
            axes[0, 0].plot(*ends.T, color=plots.COLOURS["black"], alpha=1 if place == now else 0.15, linewidth=1.2)
        axes[0, 0].set(aspect="equal", xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), title=title)
    else:
        figure, axes = plots.grid(1, 1, (4.4, 3.6))
        largest = np.argsort(-np.abs(vector))[:16][::-1]
        axes[0, 0].barh(range(len(largest)), vector[largest], color=plots.COLOURS["blue"])
        axes[0, 0].set_yticks(range(len(largest)), [f"x{place}" for place in largest])
        axes[0, 0].set_title(title)
    return figure


def draw_unit_curves(
    run: Run, names: tuple[str, ...], step: int, member: int, layer: int, unit: int, what: str
) -> Figure:
    """One half-space or neuron over training: how far it turned, how long it is, or on which samples it is open."""
    from unlazy.studio.run_reader import open_run_folder
    from unlazy.studio.units import unit_curves

    figure, axes = plots.grid(1, 1, (5.2, 3.2))
    steps, lines = unit_curves(open_run_folder(run.folder), names[0], member, layer, unit, what)
    for (name, values), colour in zip(lines.items(), list(plots.COLOURS) * len(lines), strict=False):
        axes[0, 0].plot(steps, values, label=name, color=plots.COLOURS[colour])
    axes[0, 0].axvline(step, color=plots.COLOURS["grey"], linewidth=0.8)
    axes[0, 0].set_xscale("symlog", linthresh=1)
    axes[0, 0].set(xlabel="step", title=f"{what}: {names[0]}, layer {layer + 1}, unit {unit + 1}")
    axes[0, 0].set_xlim(left=0)
    axes[0, 0].legend()
    return figure
