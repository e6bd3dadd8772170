"""Class-averaged kernels as numbers, and what labels do and what images do, on planted series."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from unlazy.studies.halfspace.fashion.measure import gap, image_effect, label_effect, pair_effects, values
from unlazy.studies.halfspace.fashion.series import Series, contrast, easy_sum, spread
from unlazy.studies.halfspace.fashion.settings import Task

# --- class-averaged kernels as numbers -------------------------------------------------------------

EASY = np.arange(10) < 5


def test_contrast_of_known_blocks() -> None:
    blocks = np.where(EASY[:, None] == EASY[None], 0.75, 0.25) + 0.25 * np.eye(10)
    assert contrast(blocks[None], EASY) == pytest.approx([0.5])  # (0.75 - 0.25) / 1
    assert contrast(7 * blocks[None], EASY) == pytest.approx([0.5])
    assert contrast(np.ones((1, 10, 10)), EASY) == pytest.approx([0])
    assert contrast(np.eye(10)[None], EASY) == pytest.approx([0])  # ten blocks of one class are not two of five
    other = np.arange(10) % 2 == 0
    within = [blocks[a, b] for a in range(10) for b in range(10) if a != b and other[a] == other[b]]
    across = [blocks[a, b] for a in range(10) for b in range(10) if other[a] != other[b]]
    assert contrast(np.stack([blocks, blocks]), np.stack([EASY, other])) == pytest.approx(
        [0.5, np.mean(within) - np.mean(across)]
    )


def test_spread_and_easy_sum_of_the_published_heat_map() -> None:
    start = np.full((10, 10), 9.99)
    start[0, 0], start[5, 5] = 10.05, 9.93
    assert spread(start[None]) == pytest.approx([0.06 / start.mean()])
    middle = np.diag([15.65, 23.58, 11.79, 11.03, 10.86, 4.84, 6.72, 7.00, 4.70, 3.82])
    assert easy_sum(middle[None], EASY) == pytest.approx([72.9], abs=0.05)


# --- what labels do and what images do -------------------------------------------------------------


def planted(label: float, image: float, splits: bool = False, looks: int = 4) -> Series:
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
    growth = np.arange(looks)[:, None, None] / (looks - 1)
    logs = 20 + own + growth * dose[:, None] * np.where(members, label, -label)
    accuracy = np.where(members, 0.9, 0.6) * growth + 0.1
    kernel = np.tile(np.eye(10), (looks, len(tasks), 1, 1))
    kernel[-1] += 0.3 * (members[:, :, None] == members[:, None, :])
    arrays = {
        "test_accuracy": accuracy,
        "test_accuracy_hard_gates": accuracy / 2,
        "test_paths": np.exp(logs),
        "test_log_paths": logs,
        "train_accuracy": accuracy[-1:],
        "train_accuracy_hard_gates": accuracy[-1:] / 2,
        "tangent_diagonal": np.exp(logs / 4),
    }
    for name in ("overlap", "tangent"):
        arrays[name] = kernel[[0, 1, -1]]
        arrays[f"{name}_contrast"], arrays[f"{name}_spread"] = contrast(kernel, members), spread(kernel)
    epochs = np.arange(looks, dtype=float)
    return Series("run", tuple(tasks), epochs, epochs, arrays)


def test_planted_effects_are_told_apart() -> None:
    series = planted(label=0.3, image=-0.7)
    assert label_effect(series)[0] == pytest.approx([0, 0, 0], abs=1e-12)
    assert label_effect(series)[-1] == pytest.approx([0.6] * 3)  # easy at +0.3, hard at -0.3
    assert image_effect(series)[-1] == pytest.approx([-1.4] * 3)
    easy_less_hard = {kind: gap(series, kind)[-1] for kind in ("modified", "swapped")}
    assert label_effect(series)[-1] == pytest.approx((easy_less_hard["modified"] - easy_less_hard["swapped"]) / 2)
    found = pair_effects(series)
    assert found["paths_modified_less_original_end"] == pytest.approx([0.6] * 3)
    assert found["paths_noise_less_original_end"] == pytest.approx([1.2] * 3)
    assert found["tangent_label_end"] == pytest.approx([0.15] * 3)
    assert found["tangent_image_end"] == pytest.approx([0] * 3, abs=1e-12)  # relative to the start


def test_random_splits_show_the_same_effect_whatever_the_images() -> None:
    series = planted(label=0.3, image=-0.7, splits=True)
    assert label_effect(series)[-1] == pytest.approx([0.6] * 3)
    made = pair_effects(series)["overlap_blocks_label_end"]
    own, last = 0.3 / 1.3, series.arrays["overlap"][-1]
    for pair in range(3):
        strangers = [contrast(last[m : m + 1], series.easy[2 * pair])[0] for m in range(6) if m // 2 != pair]
        assert made[pair] == pytest.approx(own - np.mean(strangers))
        assert made[pair] > 0.1


def test_values_stand_at_their_moments() -> None:
    series = planted(label=0.3, image=0.1)
    table = values(series)["values"]
    rows = range(3)  # modified
    assert [table["accuracy_easy_start"][r] for r in rows] == pytest.approx([0.1] * 3)
    assert [table["epochs_middle"][r] for r in rows] == [3.0] * 3  # 0.1, 0.4, 0.7, 1.0: first at 0.72 or more
    assert [table["accuracy_hard_middle"][r] for r in rows] == pytest.approx([0.7] * 3)
    assert [table["accuracy_hard_first"][r] for r in rows] == pytest.approx([0.3] * 3)
    ratio = np.log(series.arrays["test_paths"][1:, 0, :5].mean(1) / series.arrays["test_paths"][1:, 0, 5:].mean(1))
    assert table["allocation_least"][0] == pytest.approx(ratio.min(), rel=1e-5)
    assert table["allocation_end"][0] == pytest.approx(ratio[-1], rel=1e-5)
    diagonal = series.arrays["tangent_diagonal"][:, 0]
    gains = (diagonal[:, :5].mean(1) / diagonal[:, 5:].mean(1)) / (diagonal[0, :5].mean() / diagonal[0, 5:].mean())
    assert table["tangent_gain_end"][0] == pytest.approx(gains[-1], rel=1e-5)
    assert table["tangent_gain_start"][0] == 1.0
    never = replace(series, arrays={**series.arrays, "test_accuracy": 0.5 * series.arrays["test_accuracy"]})
    assert values(never)["values"]["epochs_middle"][0] is None
    assert values(never)["values"]["allocation_middle"][0] is None
