"""Curves over training: scalars of one run or two, eigenvalues of kernels, alignment with the targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unlazy import plots
from unlazy.store import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_curves(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Scalars over training: one member as a line, all members as a band."""
    figure, axes = plots.grid(1, 1, (5.2, 3.4))
    axis = axes[0, 0]
    for name, colour in zip(names, list(plots.COLOURS) * len(names), strict=False):
        steps, values = run.scalars(name)
        if values.shape[1] > 1:
            plots.draw_band(axis, steps, values, f"{name}, all members", colour, linewidth=0.8, linestyle=":")
        axis.plot(steps, values[:, min(member, values.shape[1] - 1)], label=name, color=plots.COLOURS[colour])
    positive = all((run.scalars(name)[1] > 0).all() for name in names)
    axis.set(xlabel="step", yscale="log" if positive else "linear", title=", ".join(names))
    if names[0].startswith("paths") and run.header.get("kind") == "scope":
        axis.set(yscale="linear", ylabel="mean of ln(1 + active paths)")
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlim(left=0)
    axis.legend()
    return figure


def draw_two_curves(
    run: Run, names: tuple[str, ...], step: int, member: int, other: str, step2: int, member2: int
) -> Figure:
    """The same scalar of two runs over training."""
    figure, axes = plots.grid(1, 1, (5.2, 3.2))
    for found, place, label, colour in ((run, member, "first", "blue"), (Run(other), member2, "second", "orange")):
        steps, values = found.scalars(names[0])
        axes[0, 0].plot(steps, values[:, min(place, values.shape[1] - 1)], label=label, color=plots.COLOURS[colour])
    axes[0, 0].axvline(step, color=plots.COLOURS["grey"], linewidth=0.8)
    axes[0, 0].set_xscale("symlog", linthresh=1)
    axes[0, 0].set(xlabel="step", title=names[0])
    axes[0, 0].set_xlim(left=0)
    axes[0, 0].legend()
    return figure


def draw_spectrum(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Leading eigenvalues of kernels over their traces: dashed at the first stored step, solid at ``step``."""
    from unlazy.studio.run_reader import open_run_folder
    from unlazy.studio.spectra import spectra

    figure, axes = plots.grid(1, 1, (4.6, 3.4))
    for name, colour in zip(names, ["green", "purple", "blue", "orange"] * len(names), strict=False):
        steps, values = spectra(open_run_folder(run.folder), name, member)
        now = max((place for place, at in enumerate(steps) if at <= step), default=0)
        for place, style, label in ((0, "--", None), (now, ".-", f"{name}, step {steps[now]}")):
            shown = np.where(values[place] > 1e-6, values[place], np.nan)
            rank = np.arange(1, len(shown) + 1)
            axes[0, 0].loglog(rank, shown, style, color=plots.COLOURS[colour], label=label, linewidth=1)
    axes[0, 0].set(xlabel="rank", ylabel="eigenvalue / trace", title="spectra; dashed: before training")
    axes[0, 0].legend()
    return figure


def draw_alignment(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Cosine between each kernel and the kernel of the targets, both centred, over training."""
    from unlazy.studio.run_reader import open_run_folder
    from unlazy.studio.spectra import alignments

    figure, axes = plots.grid(1, 1, (5.2, 3.2))
    for name, colour in zip(names, ["green", "purple", "blue", "orange"] * len(names), strict=False):
        steps, values = alignments(open_run_folder(run.folder), name, member)
        axes[0, 0].plot(steps, values, label=name, color=plots.COLOURS[colour])
    axes[0, 0].axvline(step, color=plots.COLOURS["grey"], linewidth=0.8)
    axes[0, 0].set_xscale("symlog", linthresh=1)
    axes[0, 0].set(xlabel="step", ylabel="alignment", title="centred alignment with the targets")
    axes[0, 0].set_xlim(left=0)
    axes[0, 0].legend()
    return figure
