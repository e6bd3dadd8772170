"""The Fashion-MNIST study at smoke scale, its figures, and its verdicts on both sides of every threshold."""

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
from unlazy.data.relabelled import Relabelling
from unlazy.runtime import StoreError
from unlazy.store import Run
from unlazy.studies.halfspace.fashion import figures, study, train
from unlazy.studies.halfspace.fashion.claims import claims
from unlazy.studies.halfspace.fashion.measure import gap, label_effect, values
from unlazy.studies.halfspace.fashion.series import Measured, collect, contrast
from unlazy.studies.halfspace.fashion.settings import NETS, SCALES, Settings, Stack, Task, available, stacks

SMOKE = SCALES["smoke"]
NO_STEPS = lambda *_: None  # noqa: E731


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
    assert [(row["id"], row["verdict"]) for row in table["claims"]] == [(f"C{i}", "cannot tell") for i in range(16, 20)]
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
    assert set(verdicts(table_with(smoke[1], {}, **change)).values()) == {"cannot tell"}


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
