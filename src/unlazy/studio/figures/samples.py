"""Numbers per sample: active paths, outputs and margins, of one run or two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unlazy import plots
from unlazy.store import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_per_sample(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Numbers per sample, in the order of the samples: the first stored step in grey, ``step`` in blue, targets in black."""
    from unlazy.studio.figures.strips import path_counts
    from unlazy.studio.probe_set import probe_set_of
    from unlazy.studio.run_reader import open_run_folder

    figure, axes = plots.grid(1, 1, (5.2, 3.2))
    target = probe_set_of(open_run_folder(run.folder)).y
    if names[0].endswith("output") and target is not None and target.size == run.array(names[0], step)[member].size:
        axes[0, 0].plot(target, color=plots.COLOURS["black"], linewidth=0.9, linestyle=":")
        axes[0, 0].plot([], [], color=plots.COLOURS["black"], linestyle=":", label="target")
    for at, colour in {run.array_steps(names[0])[0]: "grey", step: "blue"}.items():
        values = path_counts(run, names[0], run.array(names[0], at)[member])
        axes[0, 0].plot(values, color=plots.COLOURS[colour], linewidth=1.2)
        axes[0, 0].plot([], [], color=plots.COLOURS[colour], label=f"step {at}")
    axes[0, 0].set(xlabel="sample", ylabel=names[0], title=names[0])
    axes[0, 0].legend()
    return figure


def draw_path_strips(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Active paths: a dot per sample, a column per group or class, a bar at the median."""
    from unlazy.studio.figures.strips import add_strips, path_counts, sample_groups
    from unlazy.studio.probe_set import probe_set_of
    from unlazy.studio.run_reader import open_run_folder

    reader = open_run_folder(run.folder)
    counts = path_counts(run, names[0], reader.find_array(names[0], step, member).read())
    figure, axes = plots.grid(1, 1, (5.2, 3.2))
    add_strips(axes[0, 0], counts, sample_groups(probe_set_of(reader), len(counts)))
    axes[0, 0].set_yscale("symlog", linthresh=1)
    axes[0, 0].set(ylabel="active paths", title=f"{names[0]}, step {step}")
    return figure


def draw_margins(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Margins (output of the right class minus the largest other): a dot per sample, a column per group or class."""
    from unlazy.studio.figures.strips import add_strips, sample_groups
    from unlazy.studio.probe_set import probe_set_of
    from unlazy.studio.run_reader import open_run_folder

    reader = open_run_folder(run.folder)
    probe_set = probe_set_of(reader)
    margins = probe_set.margins(reader.find_array(names[0], step, member).read())
    figure, axes = plots.grid(1, 1, (5.2, 3.2))
    axes[0, 0].axhline(0, color=plots.COLOURS["grey"], linewidth=0.8)
    assert margins is not None, f"{run.folder} has no classes"
    add_strips(axes[0, 0], margins, sample_groups(probe_set, len(margins)))
    title = f"{names[0]}, step {step}: right for {(margins > 0).sum()} of {len(margins)}"
    axes[0, 0].set(ylabel="right output minus the best other", title=title)
    return figure


def draw_output_against_target(run: Run, names: tuple[str, ...], step: int, member: int) -> Figure:
    """Outputs against their targets: a dot per sample and output; dots on the line are right."""
    from unlazy.studio.probe_set import probe_set_of
    from unlazy.studio.run_reader import open_run_folder

    reader = open_run_folder(run.folder)
    target = np.asarray(probe_set_of(reader).y, float).ravel()
    output = reader.find_array(names[0], step, member).read().ravel()
    figure, axes = plots.grid(1, 1, (4.0, 4.0))
    ends = [target.min(), target.max()]
    axes[0, 0].plot(ends, ends, color=plots.COLOURS["grey"], linewidth=0.8)
    axes[0, 0].scatter(target, output, s=9, color=plots.COLOURS["blue"], alpha=0.6, linewidths=0)
    axes[0, 0].set(xlabel="target", ylabel=names[0], title=f"{names[0]}, step {step}")
    return figure


def draw_two_per_sample(
    run: Run, names: tuple[str, ...], step: int, member: int, other: str, step2: int, member2: int
) -> Figure:
    """The same numbers per sample of two runs, in the order of the samples."""
    from unlazy.studio.figures.strips import path_counts
    from unlazy.studio.run_reader import open_run_folder

    figure, axes = plots.grid(1, 1, (5.2, 3.2))
    for folder, at, place, label, colour in (
        (run.folder, step, member, "first", "blue"),
        (other, step2, member2, "second", "orange"),
    ):
        values = path_counts(Run(folder), names[0], open_run_folder(folder).find_array(names[0], at, place).read())
        axes[0, 0].plot(values, color=plots.COLOURS[colour], linewidth=1.2)
        axes[0, 0].plot([], [], color=plots.COLOURS[colour], label=f"{label}, step {at}")
    axes[0, 0].set(xlabel="sample", ylabel=names[0], title=names[0])
    axes[0, 0].legend()
    return figure


def draw_two_margins(
    run: Run, names: tuple[str, ...], step: int, member: int, other: str, step2: int, member2: int
) -> Figure:
    """Margins of two runs (output of the right class minus the largest other), side by side in each group or class."""
    from unlazy.studio.figures.strips import add_strips, sample_groups
    from unlazy.studio.probe_set import probe_set_of
    from unlazy.studio.run_reader import open_run_folder

    figure, axes = plots.grid(1, 1, (6.4, 3.2))
    axes[0, 0].axhline(0, color=plots.COLOURS["grey"], linewidth=0.8)
    pairs = ((run.folder, step, member, "first", "blue"), (other, step2, member2, "second", "orange"))
    found = []
    for folder, at, place, _, _ in pairs:
        reader = open_run_folder(folder)
        margins = probe_set_of(reader).margins(reader.find_array(names[0], at, place).read())
        assert margins is not None, f"{folder} has no classes"
        found.append((margins, sample_groups(probe_set_of(reader), len(margins))))
    columns = list(dict.fromkeys(name for _, bands in found for name in bands))
    for part, ((margins, bands), (_, at, _, label, colour)) in enumerate(zip(found, pairs, strict=True)):
        bands = {name: bands.get(name, []) for name in columns}
        add_strips(axes[0, 0], margins, bands, colour, part, len(pairs))
        axes[0, 0].plot([], [], color=plots.COLOURS[colour], label=f"{label}, step {at}")
    axes[0, 0].set(ylabel="right output minus the best other", title=names[0])
    axes[0, 0].legend()
    return figure
