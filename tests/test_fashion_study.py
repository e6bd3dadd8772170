"""The Fashion-MNIST study at smoke scale, its measures against slow twins, and its verdicts on both sides of every threshold."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unlazy import InputError, plots
from unlazy.data.dataset import Dataset
from unlazy.data.relabelled import Relabelling
from unlazy.kernels.overlap import overlap_kernel, path_count
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build_stack, member
from unlazy.models.gates import HardGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec, relu_spec
from unlazy.probes import classes
from unlazy.runtime import StoreError, Unsupported
from unlazy.store import Run
from unlazy.studies.halfspace.fashion import figures, study, train
from unlazy.studies.halfspace.fashion.claims import claims
from unlazy.studies.halfspace.fashion.measure import gap, image_effect, label_effect, pair_effects, values
from unlazy.studies.halfspace.fashion.series import Measured, Series, collect, contrast, easy_sum, spread
from unlazy.studies.halfspace.fashion.settings import NETS, SCALES, Settings, Stack, Task, available, stacks

SMOKE = SCALES["smoke"]
NO_STEPS = lambda *_: None  # noqa: E731


# --- probes by class -------------------------------------------------------------------------------


def small_stack(kind: str, seeds: int = 3) -> GatedNet:
    specs = {
        "relu": relu_spec(6, 4, width=5, depth=3),
        "relu-bias-free": relu_spec(6, 4, width=5, depth=3, gate_bias=False, value_bias=False),
        "pwc-one": NetSpec(6, 4, width=5, depth=3, experts="constant", constant_input="one"),
        "pwc-ones": NetSpec(6, 4, width=5, depth=3, experts="constant"),
        "frozen": NetSpec(6, 4, width=5, depth=2, train_gates=False),
    }
    return build_stack(specs[kind], list(range(seeds)), dtype=torch.float64)


def small_batch(members: int = 3, n: int = 23) -> Dataset:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=random, dtype=torch.float64)
    label = torch.arange(n) % 3
    y = torch.nn.functional.one_hot(torch.randint(4, (members, n), generator=random), 4).double()
    return Dataset("small", x, y, {str(c): label == c for c in range(3)})


KINDS = ["relu", "relu-bias-free", "pwc-one", "pwc-ones", "frozen"]


@pytest.mark.parametrize("kind", KINDS)
def test_dense_tangent_kernel_is_the_tangent_kernel(kind: str) -> None:
    stack, x = small_stack(kind), small_batch().x
    fast = classes.dense_tangent_kernel(stack, x)
    for index in range(3):
        slow = tangent_kernel(member(stack, index), x, method="loop")
        torch.testing.assert_close(fast[index], slow, rtol=1e-12, atol=1e-14)
    assert not fast.requires_grad
    assert all(parameter.grad is None for parameter in stack.parameters())


def test_dense_tangent_kernel_refuses_what_it_cannot_do() -> None:
    for choices in ({"gating": "quadratic"}, {"gate": HardGate(4.0)}):
        stack = build_stack(NetSpec(6, 4, width=3, depth=2, **choices), [0])
        with pytest.raises(Unsupported, match="tangent_kernel"):
            classes.dense_tangent_kernel(stack, torch.randn(3, 6))


@pytest.mark.parametrize("kind", KINDS)
def test_class_kernels_are_block_means(kind: str) -> None:
    stack, batch = small_stack(kind), small_batch()
    found = classes.class_kernels(stack, batch)
    rows = [inside.nonzero()[:, 0].tolist() for inside in batch.groups.values()]
    for index in range(3):
        one = member(stack, index)
        whole = {"overlap": overlap_kernel(one, batch.x), "tangent": tangent_kernel(one, batch.x, method="loop")}
        for name, kernel in whole.items():
            for a in range(3):
                for b in range(3):
                    mean = np.mean([float(kernel[i, j]) for i in rows[a] for j in rows[b]])
                    assert float(found[name][index, a, b]) == pytest.approx(mean, rel=1e-10)
        for a in range(3):
            mean = np.mean([float(whole["tangent"][i, i]) for i in rows[a]])
            assert float(found["tangent_diagonal"][index, a]) == pytest.approx(mean, rel=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_class_curves_count_image_by_image(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, batch = small_stack(kind), small_batch()
    monkeypatch.setattr(classes, "CHUNK", 7)  # several parts, the last one short
    found = classes.class_curves(stack, batch)
    for index in range(3):
        one, hard = member(stack, index), member(stack, index).hard()
        for row, inside in enumerate(batch.groups.values()):
            x, wanted = batch.x[inside], batch.y[index, inside].argmax(-1)
            for name, net in (("accuracy", one), ("accuracy_hard_gates", hard)):
                right = [bool(net(x[i : i + 1]).argmax() == wanted[i]) for i in range(len(x))]
                assert float(found[name][index, row]) == pytest.approx(np.mean(right))
            paths = path_count(one, x)
            assert float(found["paths"][index, row]) == pytest.approx(float(paths.mean()))
            assert float(found["log_paths"][index, row]) == pytest.approx(float((1 + paths).log().mean()))


def test_classes_without_images_are_refused() -> None:
    batch = small_batch()
    lost = replace(batch, groups={"nobody": torch.zeros(23, dtype=torch.bool)})
    with pytest.raises(InputError, match="nobody"):
        classes.class_curves(small_stack("relu"), lost)
    with pytest.raises(InputError, match="groups"):
        classes.class_kernels(small_stack("relu"), replace(batch, groups={}))


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


# --- settings and data -----------------------------------------------------------------------------


def test_paper_scale_is_the_papers() -> None:
    settings = SCALES["paper"]
    recipe = Stack("main", "pwc", settings).recipe(784)
    assert (recipe.epochs, recipe.batch, recipe.loss, recipe.members[0].lr) == (30, 32, "cross-entropy", 2e-4)
    assert (recipe.model.width, recipe.model.depth, recipe.model.outputs, recipe.model.gate.beta) == (128, 5, 10, 4.0)
    assert recipe.steps_per_epoch(settings.images) == 1875
    assert settings.splits >= 20
    assert settings.kernel_images == 50
    steps = Stack("main", "pwc", settings).looks(1875).steps
    assert {0, 1875, 30 * 1875} <= steps
    assert sum(0 < step <= 1875 for step in steps) >= 12
    assert len(steps) <= 40


def test_tasks_come_in_pairs_of_one_start() -> None:
    for stack in stacks(SCALES["paper"]):
        tasks = stack.tasks()
        kinds = ("split", "mirror") if stack.variant == "splits" else ("modified", "swapped")
        first, second = ([task for task in tasks if task.labels == kind] for kind in kinds)
        assert [task.seed for task in first] == [task.seed for task in second]
        for one, other in zip(first, second, strict=True):
            assert set(one.easy) | set(other.easy) == set(range(10))
            assert other.relabelling() == one.relabelling().swapped(10)
    assert Task("original", (0, 1, 2, 3, 4), 3).relabelling() == Relabelling(tuple(range(10)), seed=3)


def test_desk_makes_do_with_digits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setenv("UNLAZY_DATA", str(tmp_path))
    settings = available(SCALES["desk"])
    assert (settings.data, settings.images, settings.test_images) == ("digits", 1437, 360)
    with pytest.raises(InputError, match="1437"):
        train.Pictures.load(replace(settings, images=2000))


def test_bad_settings_are_refused() -> None:
    with pytest.raises(InputError, match="standardised"):
        replace(SMOKE, variants=("nothing",))
    with pytest.raises(InputError, match="splits"):
        replace(SMOKE, splits=1)
    with pytest.raises(InputError, match="epochs"):
        replace(SMOKE, epochs=0)


# --- the study end to end --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Measured]:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("fashion")
    table = study.reproduce("smoke", runs=folder / "runs", results=folder, progress=NO_STEPS)
    measured = study.run_and_measure(SMOKE, "smoke", folder / "runs", progress=NO_STEPS)  # opens what is finished
    return folder, table, measured


def test_results_hold_every_stack_and_claim(smoke) -> None:
    folder, table, measured = smoke
    assert json.loads((folder / "fashion" / "smoke.json").read_text()) == table
    assert set(table["stacks"]) == {stack.key for stack in stacks(SMOKE)} == set(measured.series)
    assert [(row["id"], row["verdict"]) for row in table["claims"]] == [(f"C{i}", "not run yet") for i in range(16, 20)]
    assert all((folder / "fashion" / "smoke" / f"{name}.png").exists() for name in figures.FIGURES)


def test_members_learn_their_own_labels_on_the_same_images(smoke) -> None:
    pictures = train.Pictures.load(SMOKE)
    stack = Stack("main", "relu", SMOKE)
    data, test = pictures.datasets(stack)
    assert data.y.shape == (8, 400, 10)
    for split, images, made in (("train", pictures.train, data), ("test", pictures.test, test)):
        for index, task in enumerate(stack.tasks()):
            groups = getattr(pictures.groups["random" if task.labels == "noise" else "k-means"], split)
            table = task.relabelling().table(10, 5)
            for row in range(0, len(images), 17):
                old = int(images.labels[row])
                new = old if task.labels == "original" or old in task.easy else int(table[old, groups[row]])
                assert made.y[index, row].tolist() == [float(label == new) for label in range(10)]
        assert [int(inside.sum()) for inside in made.groups.values()] == torch.bincount(images.labels).tolist()
    shown = train.first_of_each(test, 4)
    assert len(shown) == 40
    assert torch.equal(shown.x[8:12], test.x[pictures.test.labels == 2][:4])


def test_every_task_of_a_seed_starts_alike(smoke) -> None:
    series = smoke[2].series["main-pwc"]
    for name in ("test_paths", "tangent_diagonal"):
        start = series.arrays[name][0]
        for kind in ("swapped", "original", "noise"):
            assert np.array_equal(start[series.of("modified")], start[series.of(kind)])
        assert not np.array_equal(start[series.of("modified")[0]], start[series.of("modified")[1]])


def test_series_hold_what_the_run_recorded(smoke) -> None:
    folder, stack = smoke[0], Stack("main", "relu", SMOKE)
    (job,) = [job for job in train.jobs(SMOKE, folder / "runs" / "fashion") if job.stack == stack]
    run = Run(job.folder)
    series = collect(stack, run)
    assert series.epochs.tolist() == [0.0, 1.0, 2.0]
    assert np.allclose(series.arrays["test_accuracy"][1], run.array("test_accuracy", 13), rtol=1e-6)
    assert np.allclose(series.arrays["train_accuracy"][0], run.array("train_accuracy", 26), rtol=1e-6)
    assert np.allclose(series.arrays["overlap"][2], run.array("overlap", 26), rtol=1e-6)
    assert np.allclose(series.arrays["tangent_contrast"][1], contrast(run.array("tangent", 13), series.easy), rtol=1e-5)
    middles = series.middle()
    for index, look in enumerate(middles):
        kept = series.arrays["tangent"][1, index]
        assert (
            np.isnan(kept).all()
            if look is None
            else np.allclose(kept, run.array("tangent", 13 * look)[index], rtol=1e-6)
        )


def test_measurements_travel_without_the_runs(smoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, table, measured = smoke
    measured.save(study.measured_file(tmp_path, "smoke"))
    monkeypatch.setattr(study, "run", None)  # nothing is trained
    monkeypatch.setattr(study, "draw", lambda _: {})
    again = study.reproduce("smoke", runs=tmp_path / "nowhere", results=tmp_path, progress=NO_STEPS)
    assert again["stacks"] == table["stacks"]
    assert again["provenance"] == table["provenance"]
    assert study.measured_file(tmp_path, "smoke").stat().st_size < 10**6
    with pytest.raises(TypeError):  # other settings: the file does not count
        study.reproduce("smoke", runs=tmp_path / "nowhere", results=tmp_path, seeds=3, progress=NO_STEPS)
    study.measured_file(tmp_path, "smoke").write_bytes(b"PK\x03\x04 not an archive")
    with pytest.raises(StoreError, match="damaged"):
        study.reproduce("smoke", runs=tmp_path / "nowhere", results=tmp_path, progress=NO_STEPS)


def test_training_alone_leaves_the_compact_file(smoke, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, table, _ = smoke
    arguments = ["--scale", "smoke", "--device", "cpu", "--runs", str(folder / "runs"), "--results", str(tmp_path)]
    study.main(arguments)
    kept = Measured.load(tmp_path / "fashion" / "smoke-measured.npz")
    assert {key: values(series) for key, series in kept.series.items()} == table["stacks"]
    assert "measuring 9/9" in capsys.readouterr().out


# --- figures: read back what they draw -------------------------------------------------------------


def test_halves_figure_draws_the_medians(smoke) -> None:
    measured = smoke[2]
    with plots.style():
        axes = figures.halves(measured).axes
    series = measured.series["main-relu"]
    mine = series.of("modified")
    for axis, name in zip(axes[:3], ("test_paths", "tangent_diagonal", "test_accuracy"), strict=True):
        for line, whole in zip(axis.get_lines()[:2], series.halves(name), strict=True):
            curve = whole[:, mine] / (whole[0, mine] if name == "tangent_diagonal" else 1)
            assert np.allclose(line.get_ydata(), np.median(curve, axis=1))


def test_kernel_figure_draws_means_with_a_diagonal_of_one_hundred(smoke) -> None:
    measured = smoke[2]
    with plots.style():
        axes = figures.kernels(measured).axes
    series = measured.series["main-relu"]
    kernel = series.arrays["overlap"][0, series.of("modified")]
    wanted = np.mean([100 * one / np.trace(one) for one in kernel], axis=0)
    assert np.allclose(axes[0].get_images()[0].get_array(), wanted)
    assert axes[0].get_title(loc="left").startswith("start")


def test_label_figure_draws_every_pair(smoke) -> None:
    measured = smoke[2]
    with plots.style():
        axes = figures.labels_or_images(measured).axes
    curves = {line.get_label(): line.get_ydata() for line in axes[0].get_lines()}
    assert np.allclose(curves["second half easy"], np.median(gap(measured.series["main-relu"], "swapped"), axis=1))
    dots = [line.get_ydata() for line in axes[2].get_lines() if line.get_marker() == "o" and len(line.get_ydata())]
    effects = [
        np.sort(label_effect(measured.series[f"{name}-relu"])[-1])
        for name in ("main", "bias-free", "standardised", "splits")
    ]
    assert all(any(len(d) == len(e) and np.allclose(d, e) for d in dots) for e in effects)


# --- verdicts --------------------------------------------------------------------------------------

GOOD: dict[str, float] = {
    "allocation_least": 0.1,
    "allocation_middle": 0.1,
    "allocation_end": 0.1,
    "tangent_gain_middle": 1.5,
    "tangent_gain_end": 1.2,
    "accuracy_easy_middle": 0.73,
    "accuracy_easy_end": 0.85,
    "accuracy_hard_middle": 0.3,
    "epochs_easy": 0.1,
    "epochs_hard": 1.0,
    "tangent_spread_start": 0.006,
    "overlap_spread_start": 0.006,
    "tangent_contrast_start": 0.0,
    "tangent_contrast_middle": 0.3,
    "tangent_contrast_end": 0.2,
    "overlap_contrast_start": 0.0,
    "overlap_contrast_middle": 0.3,
    "overlap_contrast_end": 0.2,
}
BAD = {
    "C16": {"allocation_least": -0.01, "allocation_middle": -0.01, "allocation_end": -0.01},
    "C17": {"tangent_gain_middle": 0.99, "tangent_gain_end": 0.99},
    "C18": {"accuracy_easy_middle": 0.67, "accuracy_hard_middle": 0.51, "epochs_hard": 0.09},
    "C19": {
        "tangent_spread_start": 0.021,
        "overlap_spread_start": 0.021,
        "tangent_contrast_middle": 0.09,
        "tangent_contrast_end": 0.09,
        "overlap_contrast_middle": 0.09,
        "overlap_contrast_end": 0.09,
    },
}


def table_with(smoke_table: dict[str, Any], changes: dict[str, float], **settings: Any) -> dict[str, Any]:
    """The smoke table in the size of the paper, with chosen numbers in the main stacks."""
    table = copy.deepcopy(smoke_table)
    table["scale"] = settings.pop("scale", "paper")
    table["settings"] |= {"data": "fashion-mnist", "images": 60_000} | settings
    for net in NETS:
        stack = table["stacks"][f"main-{net}"]
        for name, value in (GOOD | changes).items():
            stack["values"][name] = [value] * len(stack["members"])
    return table


def verdicts(table: dict[str, Any]) -> dict[str, str]:
    return {row["id"]: row["verdict"] for row in claims(table)}


def test_claims_hold_when_every_part_does(smoke) -> None:
    assert set(verdicts(table_with(smoke[1], {})).values()) == {"holds"}


@pytest.mark.parametrize(("claim", "name"), [(claim, name) for claim, bad in BAD.items() for name in bad])
def test_one_part_on_the_wrong_side_leaves_a_claim_partly_true(smoke, claim: str, name: str) -> None:
    found = verdicts(table_with(smoke[1], {name: BAD[claim][name]}))
    assert found.pop(claim) == "partly"
    assert set(found.values()) == {"holds"}


@pytest.mark.parametrize("claim", BAD)
def test_all_parts_on_the_wrong_side_make_a_claim_fail(smoke, claim: str) -> None:
    found = verdicts(table_with(smoke[1], BAD[claim]))
    assert found.pop(claim) == "fails"
    assert set(found.values()) == {"holds"}


def test_one_network_alone_is_not_enough(smoke) -> None:
    table = table_with(smoke[1], {})
    stack = table["stacks"]["main-relu"]
    for name, value in BAD["C16"].items():
        stack["values"][name] = [value] * len(stack["members"])
    assert verdicts(table)["C16"] == "partly"


def test_only_members_with_modified_labels_are_judged(smoke) -> None:
    table = table_with(smoke[1], {})
    for net in NETS:
        stack = table["stacks"][f"main-{net}"]
        for row, one in enumerate(stack["members"]):
            if one["labels"] != "modified":
                for name, value in {k: v for bad in BAD.values() for k, v in bad.items()}.items():
                    stack["values"][name][row] = value
    assert set(verdicts(table).values()) == {"holds"}


@pytest.mark.parametrize("change", [{"scale": "desk"}, {"images": 6000}, {"data": "digits"}])
def test_smaller_studies_judge_nothing(smoke, change: dict[str, Any]) -> None:
    assert set(verdicts(table_with(smoke[1], {}, **change)).values()) == {"not run yet"}


def test_a_middle_point_never_reached_is_censored(smoke) -> None:
    table = table_with(smoke[1], {})
    for net in NETS:
        values_of = table["stacks"][f"main-{net}"]["values"]
        for name in ("accuracy_easy_middle", "accuracy_hard_middle", "allocation_middle"):
            values_of[name] = [None] * len(values_of[name])
    rows = {row["id"]: row for row in claims(table)}
    assert rows["C16"]["verdict"] == "partly"
    assert [part["verdict"] for part in rows["C18"]["parts"]] == ["censored"] * 4 + ["holds"] * 2


def test_the_reason_follows_the_label_effect(smoke) -> None:
    for effect, word in ((0.2, "more paths"), (-0.2, "fewer paths"), (0.0, "no separable difference")):
        table = table_with(smoke[1], {})
        for net in NETS:
            table["stacks"][f"main-{net}"]["pairs"]["paths_label_end"] = [effect, effect]
        row = next(row for row in claims(table) if row["id"] == "C16")
        assert f"ReLU net {word}, {effect:.3f}" in row["why"]
        control = [one for one in row["controls"] if one["name"].startswith("ReLU net: label effect at the end")]
        assert control[0]["value"] == pytest.approx(effect)


def test_settings_survive_json() -> None:
    for settings in SCALES.values():
        plain = json.loads(json.dumps(settings.to_dict()))
        assert Settings(**{name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}) == settings
