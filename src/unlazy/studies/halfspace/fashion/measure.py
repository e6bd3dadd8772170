"""The values that claims speak of: halves at named moments, times, and what the labels do with the images held fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.studies.halfspace.fashion.series import KERNELS, MIDDLE, MOMENTS, Array, Series, contrast, easy_sum

CLOSE = 0.8  # a half counts as learned at this share of its final accuracy


def values(series: Series) -> dict[str, Any]:
    """``{run, members, epochs, values: {name: per member}, pairs: {name: per pair}}``; ``None``: never, or not measured."""
    found = _at_moments(series) | _over_time(series)
    return {
        "run": series.run,
        "members": [{"labels": task.labels, "easy": list(task.easy), "seed": task.seed} for task in series.tasks],
        "epochs": float(series.epochs[-1]),
        "values": {name: _plain(value) for name, value in found.items()},
        "pairs": {name: _plain(value) for name, value in pair_effects(series).items()},
    }


def looks(series: Series) -> dict[str, list[int | None]]:
    """Per member the number of the look at each named moment; ``first`` is the end of epoch 1."""
    members, last = len(series.tasks), len(series.epochs) - 1
    first = int(np.flatnonzero(series.epochs >= 1)[0])
    return {"start": [0] * members, "middle": series.middle(), "first": [first] * members, "end": [last] * members}


def _at_moments(series: Series) -> dict[str, Array]:
    """Halves and their ratios at the start, in the middle, after epoch 1 and at the end."""
    easy, hard = series.halves("test_paths")
    log_easy, log_hard = series.halves("test_log_paths")
    curves = {
        "accuracy_easy": series.halves("test_accuracy")[0],
        "accuracy_hard": series.halves("test_accuracy")[1],
        "hard_gates_easy": series.halves("test_accuracy_hard_gates")[0],
        "hard_gates_hard": series.halves("test_accuracy_hard_gates")[1],
        "allocation": np.log1p(easy) - np.log1p(hard),
        "allocation_of_logs": log_easy - log_hard,
    }
    curves |= {name: _on_looks(series, curve) for name, curve in _tangent_ratios(series).items()}
    for kernel in KERNELS:
        for what in ("contrast", "spread"):
            curves[f"{kernel}_{what}"] = _on_looks(series, series.arrays[f"{kernel}_{what}"])
    found = {
        f"{name}_{moment}": _pick(curve, chosen)
        for name, curve in curves.items()
        for moment, chosen in looks(series).items()
    }
    for which, values in zip(("easy", "hard"), series.halves("train_accuracy"), strict=True):
        found[f"train_{which}_end"] = values[-1]
    for row, moment in enumerate(MOMENTS):
        found[f"tangent_easy_sum_{moment}"] = easy_sum(series.arrays["tangent"][row], series.easy)
    return found


def _tangent_ratios(series: Series) -> dict[str, Array]:
    """Easy over hard, as it is and relative to the start (where it only shows the size of the inputs)."""
    easy, hard = series.halves("tangent_diagonal")
    return {"tangent_ratio": easy / hard, "tangent_gain": (easy / hard) / (easy[0] / hard[0])}


def _over_time(series: Series) -> dict[str, Array]:
    easy, hard = series.halves("test_paths")
    later = series.epochs >= 1
    favour = (np.log1p(easy) - np.log1p(hard))[later]
    accuracy = dict(zip(("easy", "hard"), series.halves("test_accuracy"), strict=True))
    times = {f"epochs_{name}": _times(series, curve >= CLOSE * curve[-1]) for name, curve in accuracy.items()}
    return {
        "epochs_middle": _times(series, accuracy["easy"] >= MIDDLE),
        "allocation_least": favour.min(0),
        "allocation_share": (favour > 0).mean(0),
        **times,
    }


def _times(series: Series, reached: NDArray[np.bool_]) -> Array:
    """First epoch (a fraction within the first) at which each member's column is true."""
    found: Array = np.where(reached.any(0), series.epochs[reached.argmax(0)], np.inf)
    return found


def _on_looks(series: Series, curve: Array) -> Array:
    """A curve over kernel looks on all looks; NaN where no kernel was taken."""
    full = np.full((len(series.epochs), curve.shape[1]), np.nan)
    full[np.isin(series.epochs, series.kernel_epochs)] = curve
    return full


def _pick(curve: Array, chosen: Sequence[int | None]) -> Array:
    return np.array([np.nan if look is None else curve[look, member] for member, look in enumerate(chosen)])


# --- what the labels do, with the images held fixed ----------------------------------------------


def pairs_of(series: Series) -> list[tuple[int, int]]:
    """Members of one start that have easy and hard classes exchanged."""
    kinds = ("split", "mirror") if series.of("split") else ("modified", "swapped")
    return list(zip(*(series.of(kind) for kind in kinds), strict=True))


def label_effect(series: Series, name: str = "test_paths") -> Array:
    """log of a class's quantity when its labels are easy over that when they are hard, mean over classes, ``[T, pairs]``.

    The two members of a pair see the same images from the same start; all that differs is which classes are easy. Equals
    half the sum of the two members' easy-hard gaps; half their difference is :func:`image_effect`.
    """
    sign, first, second = _signed(series, name)
    effect: Array = (sign * (first - second)).mean(-1)
    return effect


def image_effect(series: Series, name: str = "test_paths") -> Array:
    """What is left of the easy-hard gap when the label effect is taken out: the half's own images, ``[T, pairs]``."""
    sign, first, second = _signed(series, name)
    effect: Array = (sign * (first + second)).mean(-1)
    return effect


def gap(series: Series, labels: str, name: str = "test_paths") -> Array:
    """Mean log of a quantity on the first half of the classes less that on the second, whoever is easy, ``[T, seeds]``."""
    logs, first_half = _logs(series, name)[:, series.of(labels)], np.arange(10) < 5
    result: Array = logs[..., first_half].mean(-1) - logs[..., ~first_half].mean(-1)
    return result


def _signed(series: Series, name: str) -> tuple[Array, Array, Array]:
    """+1 on classes that are easy for the first member of each pair, -1 elsewhere; and the logs of both members."""
    first, second = (list(members) for members in zip(*pairs_of(series), strict=True))
    logs = _logs(series, name)
    return np.where(series.easy[first], 1.0, -1.0), logs[:, first], logs[:, second]


def _logs(series: Series, name: str) -> Array:
    logs: Array = np.log(np.maximum(series.arrays[name], np.finfo(np.float64).tiny))
    return logs


def pair_effects(series: Series) -> dict[str, Array]:
    """Label and image effects on paths and on the tangent diagonal (relative to the start) at the named moments."""
    first_members = [first for first, _ in pairs_of(series)]
    found = {}
    for quantity, name in (("paths", "test_paths"), ("tangent", "tangent_diagonal")):
        for kind, effect in (("label", label_effect(series, name)), ("image", image_effect(series, name))):
            curve = effect if quantity == "paths" else _on_looks(series, effect - effect[0])
            for moment, chosen in looks(series).items():
                found[f"{quantity}_{kind}_{moment}"] = _pick(curve, [chosen[member] for member in first_members])
    if series.of("split"):
        found |= {f"{name}_blocks_label_end": _made_blocks(series, name) for name in KERNELS}
    if series.of("original"):
        for kind in ("modified", "noise"):
            change = gap(series, kind) - gap(series, "original")
            found |= {
                f"paths_{kind}_less_original_{moment}": change[row]
                for moment, row in (("first", _row(series, 1)), ("end", -1))
            }
    return found


def _row(series: Series, epoch: float) -> int:
    return int(np.flatnonzero(series.epochs >= epoch)[0])


def _made_blocks(series: Series, name: str) -> Array:
    """Block contrast at the end by a pair's own split, less the mean by the same split of kernels that never saw it."""
    last, easy, pairs = series.arrays[name][-1], series.easy, pairs_of(series)
    by_split = np.array([contrast(last, easy[first]) for first, _ in pairs])  # [pairs, S]
    made = []
    for row, pair in enumerate(pairs):
        strangers = [member for member in range(len(easy)) if member not in pair]
        made.append(by_split[row, list(pair)].mean() - by_split[row, strangers].mean())
    return np.array(made)


def _plain(value: Array) -> list[float | None]:
    return [float(f"{number:.6g}") if np.isfinite(number) else None for number in value]


def column(table: Mapping[str, Any], name: str, labels: str) -> Array:
    """One value of the members with these labels, in order of seed; a time never reached is infinite."""
    rows = [v for member, v in zip(table["members"], table["values"][name], strict=True) if member["labels"] == labels]
    chosen = np.array(rows, dtype=np.float64)
    return np.where(np.isnan(chosen), np.inf, chosen) if name.startswith("epochs") else chosen


def pair_column(table: Mapping[str, Any], name: str) -> Array:
    """One value per pair, in order of seed."""
    return np.array(table["pairs"][name], dtype=np.float64)
