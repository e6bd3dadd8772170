"""The Fashion-MNIST study's figures: Figures 7, 11, 12 and 13 to 16 of the paper, and what is labels and what is images."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from unlazy import plots
from unlazy.claims.verdict import interval
from unlazy.data.images import FASHION_CLASSES
from unlazy.studies.halfspace.fashion.measure import gap, pair_effects
from unlazy.studies.halfspace.fashion.series import KERNELS, MIDDLE, MOMENTS, Array, Measured, Series
from unlazy.studies.halfspace.fashion.settings import NETS, VARIANTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HALVES = (("easy", "blue"), ("hard", "red"))
COLUMNS = (
    ("test_paths", "mean active paths"),
    ("tangent_diagonal", "tangent diagonal / its start"),
    ("test_accuracy", "test accuracy"),
)


def halves(measured: Measured) -> Figure:
    figure, axes = plots.grid(len(NETS), len(COLUMNS), (3.6, 2.8), sharex=True)
    for row, net in enumerate(NETS):
        series = measured.series[f"main-{net}"]
        members = series.of("modified")
        for axis, (name, title) in zip(axes[row], COLUMNS, strict=True):
            epochs = series.kernel_epochs if name == "tangent_diagonal" else series.epochs
            for (which, colour), values in zip(HALVES, series.halves(name), strict=True):
                shown = values[:, members] / (values[0, members] if name == "tangent_diagonal" else 1)
                plots.band(axis, _from_half_a_look(epochs), shown, f"{which} classes", colour)
            _mark_middle(axis, series, members)
            axis.set_title(title)
        _in_powers_of_ten(axes[row, 0])
        axes[row, 1].set(yscale="log")
        axes[row, 2].set(ylim=(0, 1))
        axes[row, 2].axhline(MIDDLE, color=plots.COLOURS["grey"], linestyle=":", linewidth=0.8)
        axes[row, 0].set_ylabel(NETS[net].replace(", ", ",\n", 1))
    for axis in axes[-1]:
        _epoch_axis(axis)
    axes[0, 2].legend(loc="upper left")
    return figure


def kernels(measured: Measured) -> Figure:
    rows = [(net, kernel) for net in NETS for kernel in KERNELS]
    figure, axes = plots.grid(len(rows), len(MOMENTS), (2.9, 2.6))
    names = _class_names(measured)
    for row, (net, kernel) in enumerate(rows):
        series = measured.series[f"main-{net}"]
        shown = [_mean_kernel(series, kernel, moment) for moment in range(len(MOMENTS))]
        top = max(float(np.quantile(values.diagonal(), 0.9)) for values in shown if values is not None)
        image: Any = None
        for axis, values, moment in zip(axes[row], shown, MOMENTS, strict=True):
            if values is None:
                axis.text(
                    0.5, 0.5, f"easy classes\nnever at {MIDDLE:.0%}", ha="center", va="center", transform=axis.transAxes
                )
                axis.set_axis_off()
                continue
            image = plots.kernel(axis, values, top)
            axis.set_xticks(range(10), names if row == len(rows) - 1 else [""] * 10, rotation=90, fontsize=7)
            axis.set_yticks(range(10), names if moment == "start" else [""] * 10, rotation=0, fontsize=7)
            axis.set_title(f"{moment}: {values.min():.2f} to {values.max():.2f}")
        axes[row, 0].set_ylabel(f"{NETS[net].split(',')[0]}: {kernel}")
        figure.colorbar(image, ax=axes[row, :].tolist(), shrink=0.8, extend="both")
    return figure


def labels_or_images(measured: Measured) -> Figure:
    figure, axes = plots.grid(2, len(NETS), (5.0, 3.1), sharey="row")
    lines = (
        ("modified", "blue", "first half easy"),
        ("original", "black", "original labels"),
        ("swapped", "red", "second half easy"),
    )
    for column, net in enumerate(NETS):
        series = measured.series[f"main-{net}"]
        for labels, colour, said in lines:
            plots.band(axes[0, column], _from_half_a_look(series.epochs), gap(series, labels), said, colour)
        axes[0, column].axhline(0, color=plots.COLOURS["grey"], linewidth=0.7)
        _epoch_axis(axes[0, column])
        axes[0, column].set_title(NETS[net])
        _effects_panel(measured, net, axes[1, column])
    axes[0, 0].set_ylabel("paths, first half over second\n(log ratio)")
    axes[0, 0].legend(loc="best")
    axes[1, 0].set_ylabel("paths of a class, easy over hard\n(log ratio)")
    axes[1, 0].legend(loc="best")
    return figure


def _effects_panel(measured: Measured, net: str, axis: Any) -> None:
    """Label effects by variant: every pair a dot, the median and its interval beside them."""
    shown = [name for name in VARIANTS if f"{name}-{net}" in measured.series]
    for shift, moment, colour in ((-0.2, "middle", "sky"), (0.2, "end", "blue")):
        for place, name in enumerate(shown):
            effects = pair_effects(measured.series[f"{name}-{net}"])[f"paths_label_{moment}"]
            effects = np.sort(effects[np.isfinite(effects)])
            if not len(effects):
                continue
            axis.plot(
                place + shift + np.linspace(-0.12, 0.06, len(effects)),
                effects,
                "o",
                markersize=3,
                color=plots.COLOURS[colour],
            )
            (low, high), median = interval(effects), float(np.median(effects))
            axis.errorbar(
                place + shift + 0.12,
                median,
                [[median - low], [high - median]],
                fmt="D",
                markersize=4,
                color=plots.COLOURS["black"],
            )
        axis.plot([], [], "o", color=plots.COLOURS[colour], markersize=3, label=f"at the {moment}")
    axis.axhline(0, color=plots.COLOURS["grey"], linewidth=0.7)
    axis.set_xticks(range(len(shown)), [VARIANTS[name].label.replace(" ", "\n", 1) for name in shown], fontsize=7)
    axis.set_xlim(-0.5, len(shown) - 0.5)


def _mean_kernel(series: Series, kernel: str, moment: int) -> Array | None:
    """Mean over seeds of the class-averaged kernels, each with a diagonal that sums to 100."""
    kept = series.arrays[kernel][moment, series.of("modified")]
    kept = kept[np.isfinite(kept).all((1, 2))]
    if not len(kept):
        return None
    scaled: Array = 100 * kept / np.trace(kept, axis1=1, axis2=2)[:, None, None]
    return scaled.mean(0)


def _in_powers_of_ten(axis: Any) -> None:
    """Ticks from zero as multiples of a power of ten that the title names."""
    power = int(np.floor(np.log10(axis.get_ylim()[1])))
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value / 10**power:g}")
    axis.set_title(f"{axis.get_title(loc='left')}, in $10^{{{power}}}$")


def _mark_middle(axis: Any, series: Series, members: list[int]) -> None:
    """A dotted line at the median of the seeds' middle points."""
    reached = [look for look in (series.middle()[member] for member in members) if look is not None]
    if reached:
        axis.axvline(
            float(np.median(series.epochs[reached])), color=plots.COLOURS["grey"], linestyle=":", linewidth=0.8
        )


def _epoch_axis(axis: Any) -> None:
    axis.set(xscale="log", xlabel="epoch")
    axis.xaxis.set_minor_formatter("")


def _from_half_a_look(epochs: Array) -> Array:
    """The start has no place on a logarithmic axis: put it at half the first look."""
    return np.maximum(epochs, epochs[1] / 2)


def _class_names(measured: Measured) -> list[str]:
    return (
        list(FASHION_CLASSES) if measured.settings["data"] == "fashion-mnist" else [str(digit) for digit in range(10)]
    )


FIGURES: dict[str, tuple[str, str, Callable[[Measured], Figure]]] = {
    "fig07_11_12_halves": (
        "Paths, tangent diagonal and accuracy on easy and hard classes (Figures 7, 11, 12)",
        "Modified labels, test images, median and middle half of the seeds. Dotted: the middle point, where the easy classes "
        "reach 72 %. The tangent diagonal is divided by its value at the start, which stands at the left edge.",
        halves,
    ),
    "fig13_16_kernels": (
        "Class-averaged kernels at the start, in the middle, at the end (Figures 13 to 16)",
        "Mean over seeds; diagonals sum to 100, easy classes come first. Titles give the range of the entries: before training "
        "the tangent kernel is nearly constant because the gradients of biases are the same for all images.",
        kernels,
    ),
    "labels_or_images": (
        "Do labels steer the paths, or do images?",
        "Top: active paths on the first half of the classes over the second, under three labellings. Were it the labels, the "
        "lines would part around zero. Bottom: log ratio of a class's paths when its labels are easy to when they are hard, with "
        "images and starts held fixed; every dot a pair of trainings, diamonds the median with its 95 % interval.",
        labels_or_images,
    ),
}
"""File name: title, caption, the function that draws it."""


def draw(measured: Measured) -> dict[str, Figure]:
    """All figures of the study by file name."""
    with plots.style():
        return {name: maker(measured) for name, (_, _, maker) in FIGURES.items()}
