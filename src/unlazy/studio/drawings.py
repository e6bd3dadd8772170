"""Every panel of one run as a drawing: small functions whose source is the code link of the panel.

Each takes the run, the names of what is drawn, a step and a member, and stands on its own when it is pasted elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unlazy import plots
from unlazy.store import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curves(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Scalars over training: one member bold, all members as a band."""
    figure, axes = plots.grid(1, 1, (5.2, 3.4))
    axis = axes[0, 0]
    for name, colour in zip(names, list(plots.COLOURS) * len(names), strict=False):
        steps, values = run.scalars(name)
        if values.shape[1] > 1:
            plots.band(axis, steps, values, f"{name}, all members", colour, linewidth=0.8, linestyle=":")
        axis.plot(steps, values[:, min(member, values.shape[1] - 1)], label=name, color=plots.COLOURS[colour])
    positive = all((run.scalars(name)[1] > 0).all() for name in names)
    axis.set(xlabel="step", yscale="log" if positive else "linear", title=", ".join(names))
    if names[0].startswith("paths") and run.header.get("kind") == "scope":
        axis.set(yscale="linear", ylabel="mean of ln(1 + active paths)")
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlim(left=0)
    axis.legend()
    return figure


def heat_map(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """A kernel, trace-normalised; any other table as it is."""
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


def spectrum(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Leading eigenvalues of kernels over their traces, at the first stored step (dashed) and at this one."""
    from unlazy.studio.analysis import spectra
    from unlazy.studio.openrun import open_folder

    figure, axes = plots.grid(1, 1, (4.6, 3.4))
    for name, colour in zip(names, ["green", "purple", "blue", "orange"] * len(names), strict=False):
        steps, values = spectra(open_folder(run.folder), name, member)
        now = max((place for place, at in enumerate(steps) if at <= step), default=0)
        for place, look, label in ((0, "--", None), (now, ".-", f"{name}, step {steps[now]}")):
            shown = np.where(values[place] > 1e-6, values[place], np.nan)
            rank = np.arange(1, len(shown) + 1)
            axes[0, 0].loglog(rank, shown, look, color=plots.COLOURS[colour], label=label, linewidth=1)
    axes[0, 0].set(xlabel="rank", ylabel="eigenvalue / trace", title="spectra; dashed: before training")
    axes[0, 0].legend()
    return figure


def alignment(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Cosine between each kernel and the kernel of the targets, both centred, over training."""
    from unlazy.studio.analysis import alignments
    from unlazy.studio.openrun import open_folder

    figure, axes = plots.grid(1, 1, (5.2, 3.2))
    for name, colour in zip(names, ["green", "purple", "blue", "orange"] * len(names), strict=False):
        steps, values = alignments(open_folder(run.folder), name, member)
        axes[0, 0].plot(steps, values, label=name, color=plots.COLOURS[colour])
    axes[0, 0].axvline(step, color=plots.COLOURS["grey"], linewidth=0.8)
    axes[0, 0].set_xscale("symlog", linthresh=1)
    axes[0, 0].set(xlabel="step", ylabel="alignment", title="centred alignment with the targets")
    axes[0, 0].set_xlim(left=0)
    axes[0, 0].legend()
    return figure


def half_spaces(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Every half-space of the plane, one row a layer: filled where the unit is open."""
    from unlazy.studio.openrun import open_folder
    from unlazy.studio.units import half_spaces_at

    normals, offsets = half_spaces_at(open_folder(run.folder), names[0], step, member)
    layers, units = offsets.shape
    figure, axes = plots.grid(1, 1, (0.55 * units + 1, 0.62 * layers + 0.6))
    plots.half_planes(axes[0, 0], normals, offsets)
    axes[0, 0].set_title(f"half-spaces, step {step}")
    return figure


def along(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """A number (or a few) per sample, in the order of the samples; the first stored step in grey, targets in black."""
    from unlazy.studio.openrun import open_folder
    from unlazy.studio.probe import probe_of
    from unlazy.studio.samples import counts_of

    figure, axes = plots.grid(1, 1, (5.2, 3.2))
    target = probe_of(open_folder(run.folder)).y
    if names[0].endswith("output") and target is not None and target.size == run.array(names[0], step)[member].size:
        axes[0, 0].plot(target, color=plots.COLOURS["black"], linewidth=0.9, linestyle=":")
        axes[0, 0].plot([], [], color=plots.COLOURS["black"], linestyle=":", label="target")
    for at, colour in {run.array_steps(names[0])[0]: "grey", step: "blue"}.items():
        values = counts_of(run, names[0], run.array(names[0], at)[member])
        axes[0, 0].plot(values, color=plots.COLOURS[colour], linewidth=1.2)
        axes[0, 0].plot([], [], color=plots.COLOURS[colour], label=f"step {at}")
    axes[0, 0].set(xlabel="sample", ylabel=names[0], title=names[0])
    axes[0, 0].legend()
    return figure


def strips(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Active paths: a dot per sample, a column per class or group, a bar at the median."""
    from unlazy.studio.openrun import open_folder
    from unlazy.studio.probe import probe_of
    from unlazy.studio.samples import bands_of, counts_of, draw_strips

    opened = open_folder(run.folder)
    counts = counts_of(run, names[0], opened.stored(names[0], step, member).read())
    figure, axes = plots.grid(1, 1, (5.2, 3.2))
    draw_strips(axes[0, 0], counts, bands_of(probe_of(opened), len(counts)))
    axes[0, 0].set_yscale("symlog", linthresh=1)
    axes[0, 0].set(ylabel="active paths", title=f"{names[0]}, step {step}")
    return figure


def margins(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """How far the right output is ahead of the best other: a dot per sample, a column per class or group, a bar at the median."""
    from unlazy.studio.openrun import open_folder
    from unlazy.studio.probe import probe_of
    from unlazy.studio.samples import bands_of, draw_strips

    opened = open_folder(run.folder)
    probe = probe_of(opened)
    ahead = probe.margins(opened.stored(names[0], step, member).read())
    figure, axes = plots.grid(1, 1, (5.2, 3.2))
    axes[0, 0].axhline(0, color=plots.COLOURS["grey"], linewidth=0.8)
    assert ahead is not None, f"{run.folder} has no classes"
    draw_strips(axes[0, 0], ahead, bands_of(probe, len(ahead)))
    title = f"{names[0]}, step {step}: right for {(ahead > 0).sum()} of {len(ahead)}"
    axes[0, 0].set(ylabel="right output minus the best other", title=title)
    return figure


def against(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """What the network says against what it should say: a dot per sample and output; on the line it is right."""
    from unlazy.studio.openrun import open_folder
    from unlazy.studio.probe import probe_of

    opened = open_folder(run.folder)
    target = np.asarray(probe_of(opened).y, float).ravel()
    output = opened.stored(names[0], step, member).read().ravel()
    figure, axes = plots.grid(1, 1, (4.0, 4.0))
    ends = [target.min(), target.max()]
    axes[0, 0].plot(ends, ends, color=plots.COLOURS["grey"], linewidth=0.8)
    axes[0, 0].scatter(target, output, s=9, color=plots.COLOURS["blue"], alpha=0.6, linewidths=0)
    axes[0, 0].set(xlabel="target", ylabel=names[0], title=f"{names[0]}, step {step}")
    return figure


def neurons(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Directions on a plane: multidimensional scaling of cosine distances, each step turned onto the one before."""
    from unlazy.studio.analysis import layouts
    from unlazy.studio.openrun import open_folder

    found = layouts(open_folder(run.folder), names[0], member)
    frame = max((place for place, at in enumerate(found.steps) if at <= step), default=0)
    figure, axes = plots.grid(1, 1, (4.2, 4.0))
    axes[0, 0].scatter(*found.points[frame].T, s=9, color=plots.COLOURS["blue"], alpha=0.7, linewidths=0)
    axes[0, 0].set(
        aspect="equal", xticks=[], yticks=[], title=f"{names[0]}, step {found.steps[frame]}: cosine distances"
    )
    return figure


def table(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Any other array as a picture of its rows."""
    values = run.array(names[0], step)[member]
    figure, axes = plots.grid(1, 1, (5.0, 3.6))
    image = axes[0, 0].imshow(
        values.reshape(values.shape[0], -1), aspect="auto", interpolation="nearest", cmap="cividis"
    )
    axes[0, 0].set_title(f"{names[0]}, step {step}")
    figure.colorbar(image, ax=axes[0, 0], shrink=0.85)
    return figure


def inputs(run: Run, names: tuple[str, ...], step: int, member: int, layer: int) -> Figure:
    """The samples in the plane of inputs, the output behind them where it was stored, and the borders of one layer's gates."""
    from unlazy.studio.openrun import open_folder
    from unlazy.studio.probe import inputs_of, probe_of
    from unlazy.studio.units import half_spaces_at

    opened = open_folder(run.folder)
    probe = probe_of(opened)
    points = np.asarray(inputs_of(opened)).reshape(-1, 2)
    extent = 1.15 * float(np.abs(points).max())
    figure, axes = plots.grid(1, 1, (4.4, 4.4))
    if "grid_output" in names:
        extent = float(run.header["recipe"]["grid"]["extent"])
        side = int(run.header["recipe"]["grid"]["size"])
        output = opened.stored("grid_output", step, member).read().reshape(side, side)
        box = (-extent, extent, -extent, extent)
        axes[0, 0].imshow(output, origin="lower", extent=box, cmap="RdBu_r", vmin=-1, vmax=1, alpha=0.6)
    kept = next((name for name in names if name != "grid_output"), None)
    if kept is not None:
        normals, offsets = half_spaces_at(opened, kept, step, member)
        for normal, offset in zip(normals[layer], offsets[layer], strict=True):
            length = np.hypot(*normal) or 1.0
            foot, along = -offset * normal / length**2, np.array([-normal[1], normal[0]]) / length
            ends = np.stack([foot - 3 * extent * along, foot + 3 * extent * along])
            axes[0, 0].plot(*ends.T, color=plots.COLOURS["grey"], linewidth=0.8)
            axes[0, 0].plot(*np.stack([foot, foot + 0.06 * extent * normal / length]).T, color=plots.COLOURS["black"])
    high = None if probe.y is None else probe.y[:, 0] > probe.y[:, 0].mean()
    colour = plots.COLOURS["blue"] if high is None else np.where(high, plots.COLOURS["blue"], plots.COLOURS["orange"])
    axes[0, 0].scatter(*points.T, s=8, c=colour, linewidths=0)
    title = f"inputs, step {step}" if kept is None else f"half-spaces of layer {layer + 1}, step {step}"
    axes[0, 0].set(aspect="equal", xlim=(-extent, extent), ylim=(-extent, extent), title=title)
    return figure


def pictures(run: Run, names: tuple[str, ...], step: int, member: int, layer: int) -> Figure:
    """The normals of one layer's half-spaces as pictures: orange opens the gate, purple closes it."""
    from unlazy.studio.openrun import open_folder
    from unlazy.studio.probe import probe_of

    opened = open_folder(run.folder)
    normals = opened.stored(names[0], step, member).read()[layer][:100]
    shape = probe_of(opened).image_shape or [1, 1, normals.shape[-1]]
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


def verdict(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
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


def difference(
    run: Run, names: tuple[str, ...], step: int, member: int, other: str, step2: int, member2: int
) -> Figure:
    """A kernel of one run minus that of another, each over its mean diagonal."""
    from unlazy.studio.openrun import open_folder

    pairs = ((open_folder(run.folder), step, member), (open_folder(other), step2, member2))
    first, second = (opened.stored(names[0], at, place).read().astype(float) for opened, at, place in pairs)
    values = first / (np.diagonal(first).mean() or 1) - second / (np.diagonal(second).mean() or 1)
    figure, axes = plots.grid(1, 1, (4.4, 3.8))
    top = np.nanmax(np.abs(values)) or 1
    image = axes[0, 0].imshow(values, interpolation="nearest", cmap="RdBu_r", vmin=-top, vmax=top)
    axes[0, 0].set_title(f"{names[0]}: first (step {step}) minus second (step {step2})")
    figure.colorbar(image, ax=axes[0, 0], shrink=0.85)
    return figure


def two_curves(
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


def two_along(run: Run, names: tuple[str, ...], step: int, member: int, other: str, step2: int, member2: int) -> Figure:
    """The same numbers per sample of two runs, in the order of the samples."""
    from unlazy.studio.openrun import open_folder
    from unlazy.studio.samples import counts_of

    figure, axes = plots.grid(1, 1, (5.2, 3.2))
    for folder, at, place, label, colour in (
        (run.folder, step, member, "first", "blue"),
        (other, step2, member2, "second", "orange"),
    ):
        values = counts_of(Run(folder), names[0], open_folder(folder).stored(names[0], at, place).read())
        axes[0, 0].plot(values, color=plots.COLOURS[colour], linewidth=1.2)
        axes[0, 0].plot([], [], color=plots.COLOURS[colour], label=f"{label}, step {at}")
    axes[0, 0].set(xlabel="sample", ylabel=names[0], title=names[0])
    axes[0, 0].legend()
    return figure


def two_margins(
    run: Run, names: tuple[str, ...], step: int, member: int, other: str, step2: int, member2: int
) -> Figure:
    """Margins of two runs side by side in each class or group: how far the right output is ahead of the best other."""
    from unlazy.studio.openrun import open_folder
    from unlazy.studio.probe import probe_of
    from unlazy.studio.samples import bands_of, draw_strips

    figure, axes = plots.grid(1, 1, (6.4, 3.2))
    axes[0, 0].axhline(0, color=plots.COLOURS["grey"], linewidth=0.8)
    pairs = ((run.folder, step, member, "first", "blue"), (other, step2, member2, "second", "orange"))
    found = []
    for folder, at, place, _, _ in pairs:
        opened = open_folder(folder)
        ahead = probe_of(opened).margins(opened.stored(names[0], at, place).read())
        assert ahead is not None, f"{folder} has no classes"
        found.append((ahead, bands_of(probe_of(opened), len(ahead))))
    columns = list(dict.fromkeys(name for _, bands in found for name in bands))
    for part, ((ahead, bands), (_, at, _, label, colour)) in enumerate(zip(found, pairs, strict=True)):
        bands = {name: bands.get(name, []) for name in columns}
        draw_strips(axes[0, 0], ahead, bands, colour, part, len(pairs))
        axes[0, 0].plot([], [], color=plots.COLOURS[colour], label=f"{label}, step {at}")
    axes[0, 0].set(ylabel="right output minus the best other", title=names[0])
    axes[0, 0].legend()
    return figure


def unit(run: Run, names: tuple[str, ...], step: int, member: int, layer: int, unit: int) -> Figure:
    """One half-space or neuron at a step: its border in the plane, its picture, or its largest coordinates."""
    from unlazy.studio.openrun import open_folder
    from unlazy.studio.probe import probe_of
    from unlazy.studio.units import story

    opened = open_folder(run.folder)
    found, shape = story(opened, names[0], member, layer, unit), probe_of(opened).image_shape
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


def unit_curves(run: Run, names: tuple[str, ...], step: int, member: int, layer: int, unit: int, what: str) -> Figure:
    """One half-space or neuron over training: how far it turned, how long it is, or on which samples it is open."""
    from unlazy.studio.openrun import open_folder
    from unlazy.studio.units import curves_of

    figure, axes = plots.grid(1, 1, (5.2, 3.2))
    steps, lines = curves_of(open_folder(run.folder), names[0], member, layer, unit, what)
    for (name, values), colour in zip(lines.items(), list(plots.COLOURS) * len(lines), strict=False):
        axes[0, 0].plot(steps, values, label=name, color=plots.COLOURS[colour])
    axes[0, 0].axvline(step, color=plots.COLOURS["grey"], linewidth=0.8)
    axes[0, 0].set_xscale("symlog", linthresh=1)
    axes[0, 0].set(xlabel="step", title=f"{what}: {names[0]}, layer {layer + 1}, unit {unit + 1}")
    axes[0, 0].set_xlim(left=0)
    axes[0, 0].legend()
    return figure
