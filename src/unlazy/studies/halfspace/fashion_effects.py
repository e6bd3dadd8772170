"""Rows of the Fashion-MNIST study: numbers on easy against hard classes, and the effect of labels against that of images.

The two members of a pair have the same images and the same start, with easy and hard classes exchanged. Half the sum of their
easy-hard gaps is the effect of the labels, half the difference is the effect of the images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.store import Run
from unlazy.studies.table import Rows

CLASSES = 10
MIDDLE_ACCURACY = 0.72  # test accuracy on the easy classes at the paper's middle point
LEARNED_SHARE = 0.8  # a half counts as learned at this share of its final accuracy
HALVES = ("easy", "hard")
KERNELS = ("overlap", "tangent")
MOMENTS = ("start", "middle", "end")
CURVES = ("test_accuracy", "test_accuracy_hard_gates", "test_paths", "test_log_paths")
Array = NDArray[np.float64]


@dataclass(frozen=True)
class ClassSeries:
    """The measurements of one stack, class by class: T measurements, S members, 10 classes.

    ``members``: labels and seed of each. ``easy [S, 10]``: the classes that are easy for it.
    ``arrays``: the curves ``[T, S, 10]``; ``train_accuracy [1, S, 10]`` at the end; ``tangent_diagonal [K, S, 10]`` and
    KERNEL_contrast, KERNEL_spread ``[K, S]`` at the K measurements with kernels; the class-averaged kernels ``[3, S, 10, 10]``
    at the start, at each member's middle point (NaN: never reached) and at the end.
    """

    members: Sequence[Mapping[str, Any]]
    easy: NDArray[np.bool_]
    steps_per_epoch: int
    steps: NDArray[np.int64]
    kernel_steps: NDArray[np.int64]
    arrays: Mapping[str, Array]

    @property
    def epochs(self) -> Array:
        """Epochs ``[T]`` of the measurements; those in the middle of an epoch are fractions."""
        return _round_to_float32(self.steps / self.steps_per_epoch)

    def members_with(self, labels: str) -> list[int]:
        """Indices of the members that learn these labels, in order of seed."""
        return [index for index, member in enumerate(self.members) if member["labels"] == labels]

    def means_by_half(self, name: str) -> Array:
        """Mean of a quantity over the easy and over the hard classes of every member, ``[2, T, S]``."""
        return np.stack([mean_over(inside, self.arrays[name]) for inside in (self.easy, ~self.easy)])

    def has_reached_middle(self) -> NDArray[np.bool_]:
        """Whether the test accuracy on the easy classes is at least 72 %, ``[T, S]``."""
        return self.means_by_half("test_accuracy")[0] >= MIDDLE_ACCURACY

    def moments(self) -> dict[str, NDArray[np.int64]]:
        """Index of the measurement at each named moment, per member; -1 if never reached. ``first`` is the end of epoch 1."""
        reached, every = self.has_reached_middle(), np.ones(len(self.members), dtype=int)
        middle = np.where(reached.any(0), reached.argmax(0), -1)
        first = np.flatnonzero(self.epochs >= 1)[0]
        return {"start": 0 * every, "middle": middle, "first": first * every, "end": (len(self.steps) - 1) * every}

    def first_epoch_when(self, reached: NDArray[np.bool_]) -> Array:
        """First epoch at which each column of ``[..., T, S]`` is true, possibly a fraction; infinity if never."""
        return np.where(reached.any(-2), self.epochs[reached.argmax(-2)], np.inf)

    def at_all_steps(self, values: Array) -> Array:
        """Values ``[K, S, ...]`` of the measurements with kernels as ``[T, S, ...]``; NaN where no kernel was measured."""
        full = np.full((len(self.steps), *values.shape[1:]), np.nan)
        full[np.isin(self.steps, self.kernel_steps)] = values
        return full


def read_series(
    run: Run, members: Sequence[Mapping[str, Any]], easy: NDArray[np.bool_], steps_per_epoch: int
) -> ClassSeries:
    """Read the measurements of a finished run."""
    steps, kernel_steps = run.array_steps(CURVES[0]), run.array_steps(KERNELS[0])
    arrays = {name: _read_arrays(run, name, steps) for name in CURVES}
    arrays["train_accuracy"] = _read_arrays(run, "train_accuracy", steps[-1:])
    arrays["tangent_diagonal"] = _read_arrays(run, "tangent_diagonal", kernel_steps)
    series = ClassSeries(members, easy, steps_per_epoch, np.array(steps), np.array(kernel_steps), arrays)
    moments = series.moments()
    for name in KERNELS:
        kernels = _read_arrays(run, name, kernel_steps)  # [K, S, 10, 10]
        arrays[f"{name}_contrast"] = _round_to_float32(block_contrast(kernels, easy))
        arrays[f"{name}_spread"] = _round_to_float32(relative_half_range(kernels))
        by_entry = np.moveaxis(series.at_all_steps(kernels), (0, 1), (-2, -1))
        arrays[name] = np.stack([np.moveaxis(_values_at(by_entry, moments[at]), -1, 0) for at in MOMENTS])
    return series


def _read_arrays(run: Run, name: str, steps: Sequence[int]) -> Array:
    return _round_to_float32(np.array([run.array(name, step) for step in steps]))


def _round_to_float32(values: Array) -> Array:
    """Round to 32 bits, as the numbers behind the committed tables were."""
    return values.astype(np.float32).astype(np.float64)


def _values_at(curve: Array, places: NDArray[np.int64]) -> Array:
    """The values of curves ``[..., T, S]`` at one measurement per member; NaN where its index is negative."""
    return np.where(places < 0, np.nan, curve[..., places, np.arange(len(places))])


# --- class-averaged kernels ----------------------------------------------------------------------------------


def mean_over(chosen: NDArray[np.bool_], values: Array, axes: int | tuple[int, ...] = -1) -> Array:
    """Mean of the chosen entries over the last axes, such as the classes of a half or pairs of classes."""
    return np.divide(np.where(chosen, values, 0.0).sum(axes), chosen.sum(axes))


def block_contrast(kernel: Array, easy: NDArray[np.bool_]) -> Array:
    """How clearly a class-averaged kernel ``[..., 10, 10]`` has two blocks: 0 for none, about 1 for two separate blocks.

    The mean over pairs of different classes of one half, less the mean over pairs across the halves, over the mean diagonal.
    """
    same, pairs = easy[..., :, None] == easy[..., None, :], (-2, -1)
    inside = mean_over(same & ~np.eye(CLASSES, dtype=bool), kernel, pairs)
    return np.divide(inside - mean_over(~same, kernel, pairs), np.diagonal(kernel, axis1=-2, axis2=-1).mean(-1))


def relative_half_range(kernel: Array) -> Array:
    """Half the range of the entries of a kernel over their mean: 0 for a constant kernel."""
    return np.divide(np.ptp(kernel, axis=(-2, -1)), 2 * kernel.mean((-2, -1)))


def easy_part_of_diagonal(kernel: Array, easy: NDArray[np.bool_]) -> Array:
    """What part of the diagonal, scaled to sum to 100, the easy classes have; the paper's heat map has 72.9 in mid-training."""
    diagonal = np.diagonal(kernel, axis1=-2, axis2=-1)
    return np.divide(100 * np.where(easy, diagonal, 0.0).sum(-1), diagonal.sum(-1))


# --- easy against hard ---------------------------------------------------------------------------------------


def add_halves(rows: Rows, series: ClassSeries) -> None:
    """Add numbers of every member at the named moments, and times. A time that was never reached is infinite."""
    members = series.members
    by_half = {name: series.means_by_half(name) for name in CURVES[:2]}
    by_kernel = {
        what: np.stack([series.at_all_steps(series.arrays[f"{kernel}_{what}"]) for kernel in KERNELS])
        for what in ("contrast", "spread")
    }
    (easy, hard), (log_easy, log_hard) = (series.means_by_half(name) for name in ("test_paths", "test_log_paths"))
    diagonal_easy, diagonal_hard = series.means_by_half("tangent_diagonal")
    ratio = diagonal_easy / diagonal_hard  # at the start it only shows the size of the inputs
    log_ratio = np.log1p(easy) - np.log1p(hard)
    whole = {
        "allocation": log_ratio,
        "allocation_of_logs": log_easy - log_hard,
        "tangent_ratio": series.at_all_steps(ratio),
        "tangent_gain": series.at_all_steps(ratio / ratio[0]),
    }
    for at, places in series.moments().items():
        for curves, axis in ((by_half, {"half": HALVES}), (by_kernel, {"kernel": KERNELS}), (whole, {})):
            found = {name: _values_at(curve, places) for name, curve in curves.items()}
            rows.add_all(found, **axis, members=members, at=at)
    trained = series.means_by_half("train_accuracy")[:, -1]
    rows.add("train_accuracy", trained, half=HALVES, members=members, at="end")
    for at, kernel in zip(MOMENTS, series.arrays["tangent"], strict=True):
        rows.add("tangent_easy_sum", easy_part_of_diagonal(kernel, series.easy), members=members, at=at)
    later, accuracy = log_ratio[series.epochs >= 1], by_half["test_accuracy"]
    over_time = {
        "allocation_least": later.min(0),
        "allocation_share": (later > 0).mean(0),
        "epochs_to_middle": series.first_epoch_when(series.has_reached_middle()),
        "epochs": np.full(len(members), series.epochs[-1]),
    }
    rows.add_all(over_time, members=members)
    learned = series.first_epoch_when(accuracy >= LEARNED_SHARE * accuracy[:, -1:])
    rows.add("epochs_to_learn", learned, half=HALVES, members=members)


# --- labels against images -----------------------------------------------------------------------------------


def pairs_of(series: ClassSeries) -> list[tuple[int, int]]:
    """Pairs of members with the same start and with easy and hard classes exchanged."""
    kinds = ("split", "mirror") if series.members_with("split") else ("modified", "swapped")
    return list(zip(*(series.members_with(kind) for kind in kinds), strict=True))


def label_and_image_effects(series: ClassSeries, name: str = "test_paths") -> dict[str, Array]:
    """Effects of labels and of images on the log of a quantity, mean over classes, ``[T, pairs]``.

    ``label_effect``: a class when its labels are easy less the same class when they are hard. ``image_effect``: the rest of the
    easy-hard gap, which is due to the images of each half.
    """
    first, second = (list(members) for members in zip(*pairs_of(series), strict=True))
    sign, logs = np.where(series.easy[first], 1.0, -1.0), _log_values(series, name)
    combined = {"label_effect": logs[:, first] - logs[:, second], "image_effect": logs[:, first] + logs[:, second]}
    return {effect: (sign * values).mean(-1) for effect, values in combined.items()}


def log_path_gap(series: ClassSeries, labels: str) -> Array:
    """Mean log of the active paths on classes 0 to 4 less that on classes 5 to 9, whichever are easy, ``[T, seeds]``."""
    first_half = np.arange(CLASSES) < CLASSES // 2
    logs = _log_values(series, "test_paths")[:, series.members_with(labels)]
    return np.subtract(logs[..., first_half].mean(-1), logs[..., ~first_half].mean(-1))


def _log_values(series: ClassSeries, name: str) -> Array:
    """Logarithm of a quantity by measurement, member and class; zero counts as the least positive number."""
    return np.log(np.maximum(series.arrays[name], np.finfo(np.float64).tiny))


def add_effects(rows: Rows, series: ClassSeries) -> None:
    """Add effects of labels and of images, one number per pair.

    Column ``effect_on``: on the active paths, or on the tangent diagonal relative to its start.
    """
    first_members = [first for first, _ in pairs_of(series)]
    seeds = [series.members[first]["seed"] for first in first_members]
    on_paths, on_tangent = label_and_image_effects(series), label_and_image_effects(series, "tangent_diagonal")
    for name in on_paths:
        curves = np.stack([on_paths[name], series.at_all_steps(on_tangent[name] - on_tangent[name][0])])
        for at, places in series.moments().items():
            found = _values_at(curves, places[first_members])
            rows.add(name, found, effect_on=("paths", "tangent"), seed=seeds, at=at)
    if series.members_with("split"):
        made = np.stack([_contrast_made_by_labels(series, kernel) for kernel in KERNELS])
        rows.add("contrast_by_labels", made, kernel=KERNELS, seed=seeds, at="end")
    if series.members_with("original"):
        for labels in ("modified", "noise"):
            change = log_path_gap(series, labels) - log_path_gap(series, "original")
            for at in ("first", "end"):
                found = _values_at(change, series.moments()[at][: len(seeds)])
                rows.add("gap_less_original", found, seed=seeds, labels=labels, at=at)


def _contrast_made_by_labels(series: ClassSeries, name: str) -> Array:
    """Per pair: the block contrast at the end by its own split, less the mean contrast by that split of all other members.

    NaN if there is only one pair.
    """
    last, easy, pairs = series.arrays[name][-1], series.easy, pairs_of(series)
    by_split = np.array([block_contrast(last, easy[first]) for first, _ in pairs])  # [pairs, S]
    made = []
    for row, pair in enumerate(pairs):
        strangers = [member for member in range(len(easy)) if member not in pair]
        others = by_split[row, strangers].mean() if strangers else np.nan
        made.append(by_split[row, list(pair)].mean() - others)
    return np.array(made)


# --- what figures draw ---------------------------------------------------------------------------------------


def add_curves(rows: Rows, series: ClassSeries) -> None:
    """Add curves by step: easy and hard classes under the modified labels, and the gap of paths under three labellings."""
    modified, steps = series.members_with("modified"), series.steps.tolist()
    members = [series.members[member] for member in modified]
    for name, at in (
        ("test_paths", steps),
        ("tangent_diagonal", series.kernel_steps.tolist()),
        ("test_accuracy", steps),
    ):
        rows.add(name, series.means_by_half(name)[..., modified], half=HALVES, at=at, members=members)
    for labels in ("modified", "original", "swapped"):
        members = [series.members[member] for member in series.members_with(labels)]
        rows.add("gap", log_path_gap(series, labels), at=steps, members=members)


def add_class_kernels(rows: Rows, series: ClassSeries) -> None:
    """Add the class-averaged kernels under the modified labels, scaled to a diagonal that sums to 100; upper triangle only."""
    modified = series.members_with("modified")
    members = [series.members[member] for member in modified]
    row, column = np.triu_indices(CLASSES)
    entries = [{"row": one, "column": other} for one, other in zip(row.tolist(), column.tolist(), strict=True)]
    for name in KERNELS:
        kernels = series.arrays[name][:, modified]
        scaled = 100 * kernels / np.trace(kernels, axis1=-2, axis2=-1)[..., None, None]
        rows.add("class_kernel", scaled[..., row, column], at=MOMENTS, members=members, entry=entries, kernel=name)
