"""Class-averaged kernels as numbers, and what labels do and what images do, on planted series."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from unlazy.studies.halfspace.fashion import Task
from unlazy.studies.halfspace.fashion_effects import (
    ClassSeries,
    add_effects,
    add_halves,
    block_contrast,
    easy_part_of_diagonal,
    label_and_image_effects,
    log_path_gap,
    relative_half_range,
)
from unlazy.studies.table import Rows, Table

# --- class-averaged kernels as numbers -------------------------------------------------------------

EASY = np.arange(10) < 5


def test_contrast_of_known_blocks() -> None:
    blocks = np.where(EASY[:, None] == EASY[None], 0.75, 0.25) + 0.25 * np.eye(10)
    assert block_contrast(blocks[None], EASY) == pytest.approx([0.5])  # (0.75 - 0.25) / 1
    assert block_contrast(7 * blocks[None], EASY) == pytest.approx([0.5])
    assert block_contrast(np.ones((1, 10, 10)), EASY) == pytest.approx([0])
    assert block_contrast(np.eye(10)[None], EASY) == pytest.approx([0])  # ten blocks of one class are not two of five
    other = np.arange(10) % 2 == 0
    within = [blocks[a, b] for a in range(10) for b in range(10) if a != b and other[a] == other[b]]
    across = [blocks[a, b] for a in range(10) for b in range(10) if other[a] != other[b]]
    assert block_contrast(np.stack([blocks, blocks]), np.stack([EASY, other])) == pytest.approx(
        [0.5, np.mean(within) - np.mean(across)]
    )


def test_spread_and_easy_sum_of_the_published_heat_map() -> None:
    start = np.full((10, 10), 9.99)
    start[0, 0], start[5, 5] = 10.05, 9.93
    assert relative_half_range(start[None]) == pytest.approx([0.06 / start.mean()])
    middle = np.diag([15.65, 23.58, 11.79, 11.03, 10.86, 4.84, 6.72, 7.00, 4.70, 3.82])
    assert easy_part_of_diagonal(middle[None], EASY) == pytest.approx([72.9], abs=0.05)


# --- what labels do and what images do -------------------------------------------------------------


def planted(label: float, image: float, splits: bool = False, measurements: int = 4) -> ClassSeries:
    """Series whose log paths are an image part of each class, plus a label part where the class is easy for the member."""
    random = np.random.default_rng(0)
    if splits:
        halves = [(0, 1, 2, 3, 4), (0, 2, 4, 6, 8), (1, 2, 5, 6, 9)]
        pairs = [(Task("split", h, s), Task("mirror", tuple(set(range(10)) - set(h)), s)) for s, h in enumerate(halves)]
        tasks = [task for pair in pairs for task in pair]
    else:
        easy = {
            "modified": (0, 1, 2, 3, 4),
            "swapped": (5, 6, 7, 8, 9),
            "original": (0, 1, 2, 3, 4),
            "noise": (0, 1, 2, 3, 4),
        }
        tasks = [Task(kind, easy[kind], seed) for kind in easy for seed in range(3)]
    members = np.array([[c in task.easy for c in range(10)] for task in tasks])
    dose = np.array([{"original": 0.0, "noise": 2.0}.get(task.labels, 1.0) for task in tasks])
    own = random.normal(size=(3, 10))[[task.seed for task in tasks]]  # the same for all members of one start
    own = own - own.mean(1, keepdims=True)
    own = own + np.where(
        EASY, image - own[:, EASY].mean(1, keepdims=True), -image - own[:, ~EASY].mean(1, keepdims=True)
    )
    growth = np.arange(measurements)[:, None, None] / (measurements - 1)
    logs = 20 + own + growth * dose[:, None] * np.where(members, label, -label)
    accuracy = np.where(members, 0.9, 0.6) * growth + 0.1
    kernel = np.tile(np.eye(10), (measurements, len(tasks), 1, 1))
    kernel[-1] += 0.3 * (members[:, :, None] == members[:, None, :])
    arrays = {
        "test_accuracy": accuracy,
        "test_accuracy_hard_gates": accuracy / 2,
        "test_paths": np.exp(logs),
        "test_log_paths": logs,
        "train_accuracy": accuracy[-1:],
        "tangent_diagonal": np.exp(logs / 4),
    }
    for name in ("overlap", "tangent"):
        arrays[name] = kernel[[0, 1, -1]]
        arrays[f"{name}_contrast"], arrays[f"{name}_spread"] = (
            block_contrast(kernel, members),
            relative_half_range(kernel),
        )
    steps = 7 * np.arange(measurements)
    return ClassSeries([{"labels": task.labels, "seed": task.seed} for task in tasks], members, 7, steps, steps, arrays)


def table_of(series: ClassSeries) -> Table:
    """Every number of planted series, not rounded."""
    rows = Rows()
    add_halves(rows, series)
    add_effects(rows, series)
    return Table.from_rows(rows.entries, digits=17)


def test_planted_label_and_image_effects_are_separated() -> None:
    series = planted(label=0.3, image=-0.7)
    label_effect, image_effect = label_and_image_effects(series).values()
    assert label_effect[0] == pytest.approx([0, 0, 0], abs=1e-12)
    assert label_effect[-1] == pytest.approx([0.6] * 3)  # easy at +0.3, hard at -0.3
    assert image_effect[-1] == pytest.approx([-1.4] * 3)
    easy_less_hard = {kind: log_path_gap(series, kind)[-1] for kind in ("modified", "swapped")}
    assert label_effect[-1] == pytest.approx((easy_less_hard["modified"] - easy_less_hard["swapped"]) / 2)
    table = table_of(series)
    assert table.select("gap_less_original", "end", labels="modified") == pytest.approx([0.6] * 3)
    assert table.select("gap_less_original", "end", labels="noise") == pytest.approx([1.2] * 3)
    assert table.select("label_effect", "end", effect_on="paths") == pytest.approx([0.6] * 3)
    assert table.select("label_effect", "first", effect_on="paths") == pytest.approx([0.2] * 3)
    assert table.select("label_effect", "end", effect_on="tangent") == pytest.approx([0.15] * 3)
    tangent = table.select("image_effect", "end", effect_on="tangent")
    assert tangent == pytest.approx([0] * 3, abs=1e-12)  # relative to the start


def test_random_splits_show_the_same_effect_whatever_the_images() -> None:
    series = planted(label=0.3, image=-0.7, splits=True)
    assert label_and_image_effects(series)["label_effect"][-1] == pytest.approx([0.6] * 3)
    made = table_of(series).select("contrast_by_labels", "end", kernel="overlap")
    own, last = 0.3 / 1.3, series.arrays["overlap"][-1]
    for pair in range(3):
        strangers = [block_contrast(last[m : m + 1], series.easy[2 * pair])[0] for m in range(6) if m // 2 != pair]
        assert made[pair] == pytest.approx(own - np.mean(strangers))
        assert made[pair] > 0.1


def test_one_split_alone_has_no_strangers_to_compare_with() -> None:
    series = planted(label=0.3, image=-0.7, splits=True)
    arrays = {name: values[:, :2] for name, values in series.arrays.items()}
    alone = replace(series, members=series.members[:2], easy=series.easy[:2], arrays=arrays)
    assert np.isnan(table_of(alone).select("contrast_by_labels", "end", kernel="overlap")).all()


def test_numbers_stand_at_their_moments() -> None:
    series = planted(label=0.3, image=0.1)
    table = table_of(series).where(labels="modified")
    assert table.select("test_accuracy", "start", half="easy") == pytest.approx([0.1] * 3)
    assert table.select("epochs_to_middle").tolist() == [3.0] * 3  # 0.1, 0.4, 0.7, 1.0: first at 0.72 or more
    assert table.select("test_accuracy", "middle", half="hard") == pytest.approx([0.7] * 3)
    assert table.select("test_accuracy", "first", half="hard") == pytest.approx([0.3] * 3)
    assert table.select("epochs_to_learn", half="easy").tolist() == [3.0] * 3  # 80 % of 1.0
    assert table.select("epochs").tolist() == [3.0] * 3
    paths = series.arrays["test_paths"][1:, 0]
    ratio = np.log1p(paths[:, :5].mean(1)) - np.log1p(paths[:, 5:].mean(1))
    assert table.select("allocation_least")[0] == pytest.approx(ratio.min())
    assert table.select("allocation", "end")[0] == pytest.approx(ratio[-1])
    diagonal = series.arrays["tangent_diagonal"][:, 0]
    gains = (diagonal[:, :5].mean(1) / diagonal[:, 5:].mean(1)) / (diagonal[0, :5].mean() / diagonal[0, 5:].mean())
    assert table.select("tangent_gain", "end")[0] == pytest.approx(gains[-1])
    assert table.select("tangent_gain", "start")[0] == 1.0


def test_a_middle_point_never_reached_is_infinitely_late() -> None:
    series = planted(label=0.3, image=0.1)
    slow = replace(series, arrays={**series.arrays, "test_accuracy": 0.5 * series.arrays["test_accuracy"]})
    table = table_of(slow).where(labels="modified")
    assert np.isposinf(table.select("epochs_to_middle")).all()
    assert np.isnan(table.select("allocation", "middle")).all()
    assert np.isfinite(table.select("allocation", "end")).all()


def test_kernels_are_missing_at_moments_without_them() -> None:
    series = planted(label=0.3, image=0.1)
    by_kernel = ("tangent_diagonal", "overlap_contrast", "overlap_spread", "tangent_contrast", "tangent_spread")
    ends = {name: values[[0, -1]] if name in by_kernel else values for name, values in series.arrays.items()}
    table = table_of(replace(series, kernel_steps=series.steps[[0, -1]], arrays=ends)).where(labels="modified")
    assert np.isnan(table.select("contrast", "first", kernel="overlap")).all()
    whole = table_of(series).where(labels="modified").select("contrast", "end", kernel="overlap")
    assert table.select("contrast", "end", kernel="overlap") == pytest.approx(whole)
