"""The circle study's figures, one function each: Figures 2, 3, 4, 5, 6, 9 and 10 of the paper, and the controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy import plots
from unlazy.kernels.compare import trace_normalise
from unlazy.probes.paths import allocation
from unlazy.store import Run
from unlazy.studies.halfspace.circle.settings import ARMS, PRESETS, Settings, Stack, beta_words, own_beta
from unlazy.studies.halfspace.circle.train import scene_member

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Source:
    """The runs of one scale, with short ways to ask for curves and arrays."""

    settings: Settings
    runs: Mapping[str, Run]

    def stack(self, preset: str, arm: str) -> Stack:
        return Stack(preset, arm, self.settings)

    def has(self, preset: str, arm: str) -> bool:
        return f"{preset}-{arm}" in self.runs

    def unit(self, preset: str, arm: str) -> int:
        stack = self.stack(preset, arm)
        return stack.recipe().steps_per_epoch(stack.circle().n)

    def curve(
        self, preset: str, arm: str, name: str, beta: float | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Epochs ``[T]`` and values ``[T, seeds]`` of the members with this slope."""
        run = self.runs[f"{preset}-{arm}"]
        steps, values = run.scalars(name)
        chosen = [beta is None or member["beta"] == beta for member in run.members]
        return steps / self.unit(preset, arm), values[:, chosen]

    def shown(self, preset: str, arm: str, quantity: str, epoch: int | None) -> tuple[int, NDArray[Any]] | None:
        """Seed 0 at the preset's slope: ``(epoch, array)`` at ``epoch`` (``None``: the last), if it was stored."""
        if not self.has(preset, arm):
            return None
        run, unit = self.runs[f"{preset}-{arm}"], self.unit(preset, arm)
        steps = run.array_steps(quantity)
        step = steps[-1] if epoch is None else epoch * unit
        if step not in steps:
            return None
        return step // unit, run.array(quantity, step)[scene_member(self.stack(preset, arm))]


def loss(source: Source) -> Figure:
    presets = source.settings.presets
    figure, axes = plots.grid(1, len(presets), (5.2, 4.0), sharey=True)
    for axis, preset in zip(axes[0], presets, strict=True):
        lines = [("relu", None, "black"), ("pwc", PRESETS[preset].beta, "blue")]
        frozen = source.stack(preset, "pwc-frozen").betas() if source.has(preset, "pwc-frozen") else ()
        lines += [
            ("pwc-frozen", beta, colour) for beta, colour in zip(frozen, ("red", "orange", "purple"), strict=False)
        ]
        lines += [("pwc-frozen-hard", None, "green")]
        for arm, beta, colour in lines:
            if source.has(preset, arm):
                epochs, values = source.curve(preset, arm, "loss", beta)
                label = ARMS[arm].label + beta_words(beta)
                plots.band(axis, np.maximum(epochs, 0.5), values, label, colour)
        axis.axhline(0.01, color=plots.COLOURS["grey"], linestyle=":")
        axis.set(xscale="log", yscale="log", xlabel="epoch", title=f"{preset} preset")
        plots.legend_below(axis)
    axes[0, 0].set_ylabel("mean squared error")
    return figure


def overlap(source: Source) -> Figure:
    return _kernels(source, "overlap")


def tangent(source: Source) -> Figure:
    return _kernels(source, "tangent")


def _kernels(source: Source, quantity: str) -> Figure:
    rows = [(p, arm) for p in source.settings.presets for arm in ("relu", "pwc") if source.has(p, arm)]
    epochs = [epoch for epoch in (0, 3, 30, 200) if source.shown(*rows[0], quantity, epoch) is not None]
    figure, axes = plots.grid(len(rows), len(epochs), (2.3, 2.4))
    for row, (preset, arm) in enumerate(rows):
        shown = [source.shown(preset, arm, quantity, epoch) for epoch in epochs]
        kernels = [trace_normalise(torch.from_numpy(found[1]).double()).numpy() for found in shown if found]
        top = float(np.quantile([k.diagonal() for k in kernels], 0.98))  # one scale per row; late spikes clip
        for column, (epoch, values) in enumerate(zip(epochs, kernels, strict=True)):
            image = plots.kernel(axes[row, column], values, top)
            axes[row, column].set_title(f"epoch {epoch}")
        axes[row, 0].set_ylabel(f"{preset}\n{ARMS[arm].label}")
        figure.colorbar(image, ax=axes[row, :].tolist(), shrink=0.8)
    return figure


def functions(source: Source) -> Figure:
    presets = source.settings.presets
    columns = [("pwc", 3), ("pwc", 200), ("pwc-frozen", 200), ("pwc-frozen", source.settings.frozen_epochs)]
    columns = [c for c in dict.fromkeys(columns) if source.shown(presets[0], c[0], "output", c[1]) is not None]
    figure, axes = plots.grid(len(presets), len(columns), (3.2, 2.2), sharex=True, sharey=True)
    for row, preset in enumerate(presets):
        data = source.stack(preset, "pwc").circle()
        angle, target = data.angles().numpy(), data.dataset().y[:, 0].numpy()
        for column, (arm, epoch) in enumerate(columns):
            axis, found = axes[row, column], source.shown(preset, arm, "output", epoch)
            if found is None:
                continue
            axis.plot(angle, target, color=plots.COLOURS["grey"], linewidth=1)
            axis.plot(angle, found[1], color=plots.COLOURS["blue" if arm == "pwc" else "red"], linewidth=1.2)
            axis.axvline(np.pi, color=plots.COLOURS["grey"], linewidth=0.5)
            beta = PRESETS[preset].beta
            axis.set_title(f"{'trained' if arm == 'pwc' else 'frozen'} gates, beta {beta:g}, epoch {found[0]}")
            axis.set_ylim(-1.5, 1.5)
        axes[row, 0].set_ylabel(preset)
    for axis in axes[-1]:
        axis.set_xticks([0, np.pi, 2 * np.pi], ["0", "π", "2π"])
    return figure


def half_spaces(source: Source) -> Figure:
    columns = [(p, beta) for p in source.settings.presets for beta in source.stack(p, "pwc").betas()]
    figure, axes = plots.grid(1, len(columns), (2.3, 3.0), by_hand=True, subplot_kw={"projection": "polar"})
    edges = np.linspace(-np.pi, np.pi, 25)
    for axis, (preset, beta) in zip(axes[0], columns, strict=True):
        run = source.runs[f"{preset}-pwc"]
        chosen = [member["beta"] == beta for member in run.members]
        steps, unit = run.array_steps("normals"), source.unit(preset, "pwc")
        last = 200 * unit if 200 * unit in steps else steps[-1]
        for step, colour, label in ((0, "grey", "start"), (last, "blue", f"epoch {last // unit}")):
            normals = run.array("normals", step)[chosen][:, -1].reshape(-1, 2)
            angle = np.arctan2(normals[:, 1], normals[:, 0])
            share = np.histogram(angle, edges)[0] / len(angle)
            axis.bar(
                edges[:-1], share, np.diff(edges), align="edge", alpha=0.5, color=plots.COLOURS[colour], label=label
            )
        axis.plot(
            np.linspace(0, 2 * np.pi, 100), np.full(100, 1 / 24), "--", color=plots.COLOURS["black"], linewidth=0.7
        )
        axis.text(0.5, 1.25, f"{preset}, beta {beta:g}", transform=axis.transAxes, ha="center")
        axis.grid(alpha=0.3)
        axis.set(xticks=[0, np.pi / 2, np.pi, 3 * np.pi / 2], xticklabels=["", "easy", "", "hard"], yticklabels=[])
    figure.subplots_adjust(left=0.02, right=0.98, bottom=0.2, top=0.78)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=2)
    return figure


def layers(source: Source) -> Figure:
    preset = source.settings.presets[0]
    figure, axes = plots.grid(2, 1, (0.56 * source.settings.width + 0.8, 0.56 * source.settings.depth + 0.3))
    for axis, epoch, colour in zip(axes[:, 0], (0, None), ("grey", "blue"), strict=True):
        normals, offsets = (source.shown(preset, "pwc", name, epoch) for name in ("normals", "offsets"))
        if normals is not None and offsets is not None:
            plots.half_planes(axis, normals[1], offsets[1], colour)
            axis.set_title(f"epoch {normals[0]}")
    return figure


def controls(source: Source) -> Figure:
    presets = source.settings.presets
    figure, axes = plots.grid(len(presets), 3, (4.2, 3.6))
    for row, preset in enumerate(presets):
        _allocation_panel(source, preset, axes[row, 0])
        _trace_share_panel(source, preset, axes[row, 1])
        _floor_panel(source, preset, axes[row, 2])
        axes[row, 0].set_title(f"{preset}: preference for the easy half")
    return figure


def _allocation_panel(source: Source, preset: str, axis: Any) -> None:
    lines = (("pwc", "blue"), ("relu", "black"), ("pwc-large", "orange"), ("pwc-hard", "green"), ("pwc-equal", "red"))
    for arm, colour in lines:
        if source.has(preset, arm):
            beta = own_beta(preset, arm)
            epochs, top = source.curve(preset, arm, "paths_top", beta)
            bottom = source.curve(preset, arm, "paths_bottom", beta)[1]
            values = allocation(torch.from_numpy(top), torch.from_numpy(bottom)).numpy()
            plots.band(axis, np.maximum(epochs, 0.5), values, ARMS[arm].label, colour)
    axis.axhline(0, color=plots.COLOURS["grey"], linewidth=0.7)
    axis.set(xscale="log", xlabel="epoch", ylabel="log ratio of active paths")
    plots.legend_below(axis)


def _trace_share_panel(source: Source, preset: str, axis: Any) -> None:
    for arm, colour in (("pwc", "blue"), ("relu", "black"), ("pwc-large", "orange"), ("pwc-frozen", "red")):
        if not source.has(preset, arm):
            continue
        run, unit, beta = source.runs[f"{preset}-{arm}"], source.unit(preset, arm), own_beta(preset, arm)
        chosen = [beta is None or member["beta"] == beta for member in run.members]
        steps = [step for step in run.array_steps("tangent") if step <= source.settings.epochs * unit]
        diagonals = [np.diagonal(run.array("tangent", step)[chosen], axis1=1, axis2=2) for step in steps]
        share = np.array([d[:, : d.shape[1] // 2].sum(1) / d.sum(1) for d in diagonals])
        plots.band(
            axis, np.maximum(np.array(steps) / unit, 0.5), share, ARMS[arm].label, colour, marker="o", markersize=3
        )
    axis.axhline(0.5, color=plots.COLOURS["grey"], linewidth=0.7)
    axis.set(xscale="log", ylim=(0, 1), xlabel="epoch", title="tangent trace on the easy half")
    plots.legend_below(axis)


def _floor_panel(source: Source, preset: str, axis: Any) -> None:
    arms = [arm for arm in ("pwc", "pwc-hard", "pwc-frozen", "pwc-frozen-hard") if source.has(preset, arm)]
    marks = (
        ("loss", "blue", "o", "as trained"),
        ("loss_hard_gates", "red", "s", "with hard gates"),
        ("cell_floor", "black", "_", "least loss of its hard cells"),
    )
    for name, colour, marker, label in marks:
        for place, arm in enumerate(arms):
            values = source.curve(preset, arm, name, own_beta(preset, arm))[1][-1]
            spread = place + np.linspace(-0.2, 0.2, len(values))
            axis.plot(
                spread,
                values,
                marker,
                color=plots.COLOURS[colour],
                markersize=4,
                alpha=0.7,
                label=label if place == 0 else None,
            )
    axis.set(yscale="log", title="loss at the end, by seed")
    axis.set_xticks(range(len(arms)), [ARMS[arm].label.replace(", ", ",\n") for arm in arms], fontsize=7)
    plots.legend_below(axis, columns=3)


FIGURES: dict[str, tuple[str, str, Callable[[Source], Figure]]] = {
    "fig02_loss": (
        "Trained gates learn, frozen gates stall (Figure 2)",
        "Loss over training, median and middle half of the seeds. Dotted: the loss that counts as learned. "
        "Frozen gates are slow when soft and smooth; hard ones stop at a floor.",
        loss,
    ),
    "fig03_overlap": (
        "Paths gather on the easy half (Figure 3)",
        "Overlap kernel, trace-normalised, seed 0: common active paths of pairs of points in order of angle, "
        "the easy (top) half first.",
        overlap,
    ),
    "fig04_tangent": (
        "The tangent kernel does not stand still (Figure 4)",
        "Tangent kernel, trace-normalised, seed 0. Its mass moves to the easy half, then to the hard half.",
        tangent,
    ),
    "fig05_functions": (
        "The easy half first (Figure 5)",
        "Target (grey) and network, seed 0, for trained and for frozen gates.",
        functions,
    ),
    "fig06_half_spaces": (
        "Where last-layer half-spaces point (Figure 6)",
        "Share of last-layer normals per direction, all seeds, before training and after; up is the easy half. "
        "Dashed: no preference.",
        half_spaces,
    ),
    "fig09_10_layers": (
        "Every half-space, layer by layer (Figures 9 and 10)",
        "The part of the input disc on which each unit is open, seed 0, before and after training.",
        layers,
    ),
    "controls": (
        "What the paper's figures need beside them",
        "Left: preference for the easy half under other starts, hard gates and equal halves. Middle: share of "
        "the tangent kernel's trace on the easy half. Right: losses beside the least loss the hard cells allow.",
        controls,
    ),
}
"""File name: title, caption, the function that draws it."""


def draw(settings: Settings, runs: Mapping[str, Run]) -> dict[str, Figure]:
    """All figures of the study by file name."""
    source = Source(settings, runs)
    with plots.style():
        return {name: maker(source) for name, (_, _, maker) in FIGURES.items()}
