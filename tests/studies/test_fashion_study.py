"""The Fashion-MNIST study at smoke scale, its figures, and its verdicts on both sides of every threshold."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from repository import RESULTS
from unlazy import InputError, plots
from unlazy.claims.rule import judge_claim
from unlazy.data.files import DataMissing
from unlazy.data.relabelling import Relabelling
from unlazy.store import Run
from unlazy.studies.engine import Reproduction, reproduce
from unlazy.studies.halfspace import fashion
from unlazy.studies.halfspace.fashion import NETS, SCALES, STUDY, Stack, Task, load_grouped_images
from unlazy.studies.halfspace.fashion_effects import (
    ClassSeries,
    block_contrast,
    label_and_image_effects,
    log_path_gap,
    read_series,
)
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.study import Results, Work
from unlazy.studies.table import Table

SMOKE = SCALES["smoke"]
COMMITTED = RESULTS / "fashion" / "paper" / "table.csv"


def stack(scale: str, variant: str, net: str) -> Stack:
    found = STUDY.cases(SCALES[scale], STUDY.seeds_of(scale))
    return next(case for case in found if (case.variant, case.net) == (variant, net))


def series_of(case: Stack, work: Work) -> ClassSeries:
    """The series of a finished run."""
    members = [{"labels": task.labels, "seed": task.seed} for task in case.tasks()]
    easy = np.array([[c in task.easy for c in range(10)] for task in case.tasks()])
    return read_series(Run(case.training(work).folder(work.runs)), members, easy, case.steps_per_epoch())


# --- settings and data -----------------------------------------------------------------------------


def test_paper_scale_is_the_papers() -> None:
    main = stack("paper", "main", "pwc")
    recipe = main.recipe(784)
    assert (recipe.epochs, recipe.batch, recipe.loss, recipe.members[0].lr) == (30, 32, "cross-entropy", 2e-4)
    assert (recipe.model.width, recipe.model.depth, recipe.model.outputs, recipe.model.gate.beta) == (128, 5, 10, 4.0)
    assert recipe.steps_per_epoch(main.images) == main.steps_per_epoch() == 1875
    assert len(stack("paper", "splits", "relu").seeds) >= 20
    assert len(main.seeds) == 10
    assert main.kernel_images == 50
    steps = main.measured_steps().steps
    assert {0, 1875, 30 * 1875} <= steps
    assert sum(0 < step <= 1875 for step in steps) >= 12
    assert len(steps) <= 40


def test_tasks_come_in_pairs_of_one_start() -> None:
    for case in STUDY.cases(SCALES["paper"], STUDY.seeds_of("paper")):
        tasks = case.tasks()
        kinds = ("split", "mirror") if case.variant == "splits" else ("modified", "swapped")
        first, second = ([task for task in tasks if task.labels == kind] for kind in kinds)
        assert [task.seed for task in first] == [task.seed for task in second] == list(case.seeds)
        for one, other in zip(first, second, strict=True):
            assert set(one.easy) | set(other.easy) == set(range(10))
            assert other.relabelling() == one.relabelling().swap(10)
    assert Task("original", (0, 1, 2, 3, 4), 3).relabelling() == Relabelling(tuple(range(10)), seed=3)


def test_a_seed_has_the_same_split_whichever_seeds_are_run() -> None:
    many = {task.seed: task.easy for task in stack("paper", "splits", "relu").tasks() if task.labels == "split"}
    few = replace(stack("paper", "splits", "relu"), seeds=(3, 11)).tasks()
    assert [task.easy for task in few if task.labels == "split"] == [many[3], many[11]]


def test_missing_images_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="fashion-mnist"):
        load_grouped_images("fashion-mnist", 100, 100, 1, tmp_path)
    pytest.importorskip("sklearn")
    with pytest.raises(InputError, match="1437"):
        load_grouped_images("digits", 2000, 100, 1)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(InputError, match="standardised"):
        replace(SMOKE, variants=("nothing",))
    with pytest.raises(InputError, match="epochs"):
        replace(SMOKE, epochs=0)


# --- the study end to end --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Request, Reproduction, Results]:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("fashion")
    request = Request("fashion", "smoke", folder / "runs", folder / "results")
    done = reproduce(request, ExecutionOptions(), progress=lambda *_: None)
    return request, done, request.with_table(Table.read(request.folder / "table.csv"))


def test_results_hold_every_stack_and_claim(smoke) -> None:
    request, done, results = smoke
    assert not done.failed
    assert not done.not_drawn
    measured = {(row["variant"], row["net"]) for row in results.table.rows()}
    assert measured == {(case.variant, case.net) for case in request.cases}
    assert len(measured) == 9
    found = [(row["id"], row["verdict"]) for row in done.results["claims"]]
    assert found == [(f"C{number}", "cannot tell") for number in range(16, 20)]
    assert all((done.folder / f"{figure.name}.png").exists() for figure in STUDY.figures)


def test_members_learn_their_own_labels_on_the_same_images() -> None:
    pytest.importorskip("sklearn")
    case = stack("smoke", "main", "relu")
    pictures = load_grouped_images(case.data, case.images, case.test_images, case.restarts)
    data, test = pictures.dataset(case, "train"), pictures.dataset(case, "test")
    assert data.y.shape == (8, 400, 10)
    for split, images, made in (("train", pictures.train, data), ("test", pictures.test, test)):
        for index, task in enumerate(case.tasks()):
            groups = getattr(pictures.groups["random" if task.labels == "noise" else "k-means"], split)
            table = task.relabelling().table(10, 5)
            for row in range(0, len(images), 17):
                old = int(images.labels[row])
                new = old if task.labels == "original" or old in task.easy else int(table[old, groups[row]])
                assert made.y[index, row].tolist() == [float(label == new) for label in range(10)]
        assert [int(inside.sum()) for inside in made.groups.values()] == torch.bincount(images.labels).tolist()
    shown = fashion.first_of_each_class(test, 4)
    assert len(shown) == 40
    assert torch.equal(shown.x[8:12], test.x[pictures.test.labels == 2][:4])


def test_every_task_of_a_seed_starts_alike(smoke) -> None:
    series = series_of(stack("smoke", "main", "pwc"), smoke[0].work)
    for name in ("test_paths", "tangent_diagonal"):
        start = series.arrays[name][0]
        for kind in ("swapped", "original", "noise"):
            assert np.array_equal(start[series.members_with("modified")], start[series.members_with(kind)])
        assert not np.array_equal(start[series.members_with("modified")[0]], start[series.members_with("modified")[1]])


def test_series_hold_the_measurements_of_the_run(smoke) -> None:
    case, work = stack("smoke", "main", "relu"), smoke[0].work
    run, series = Run(case.training(work).folder(work.runs)), series_of(case, work)
    assert series.epochs.tolist() == [0.0, 1.0, 2.0]
    assert np.allclose(series.arrays["test_accuracy"][1], run.array("test_accuracy", 13), rtol=1e-6)
    assert np.allclose(series.arrays["train_accuracy"][0], run.array("train_accuracy", 26), rtol=1e-6)
    assert np.allclose(series.arrays["overlap"][2], run.array("overlap", 26), rtol=1e-6)
    assert np.allclose(
        series.arrays["tangent_contrast"][1], block_contrast(run.array("tangent", 13), series.easy), rtol=1e-5
    )
    for index, place in enumerate(series.moments()["middle"].tolist()):
        stored = series.arrays["tangent"][1, index]
        if place < 0:
            assert np.isnan(stored).all()
        else:
            assert np.allclose(stored, run.array("tangent", 13 * place)[index], rtol=1e-6)


def test_settings_of_a_case_are_those_that_decide_its_numbers() -> None:
    names = {one.name for one in fields(Stack)}
    assert "variants" not in names
    one = STUDY.case_id(stack("smoke", "main", "relu"))
    fewer = STUDY.cases(replace(SMOKE, variants=("main",)), STUDY.seeds_of("smoke"))
    assert STUDY.case_id(fewer[0]) == one


# --- figures: read back what they draw -------------------------------------------------------------


def test_halves_figure_draws_the_medians(smoke) -> None:
    with plots.style():
        axes = fashion.draw_halves(smoke[2]).axes
    series = series_of(stack("smoke", "main", "relu"), smoke[0].work)
    mine = series.members_with("modified")
    for axis, name in zip(axes[:3], ("test_paths", "tangent_diagonal", "test_accuracy"), strict=True):
        for line, whole in zip(axis.get_lines()[:2], series.means_by_half(name), strict=True):
            curve = whole[:, mine] / (whole[0, mine] if name == "tangent_diagonal" else 1)
            assert np.allclose(line.get_xdata(), [0.5, 1, 2])
            assert np.allclose(line.get_ydata(), np.median(curve, axis=1))


def test_kernel_figure_draws_means_with_a_diagonal_of_one_hundred(smoke) -> None:
    with plots.style():
        axes = fashion.draw_kernels(smoke[2]).axes
    series = series_of(stack("smoke", "main", "relu"), smoke[0].work)
    kernel = series.arrays["overlap"][0, series.members_with("modified")]
    wanted = np.mean([100 * one / np.trace(one) for one in kernel], axis=0)
    drawn = axes[0].get_images()[0].get_array()
    assert np.allclose(drawn, wanted)
    assert np.trace(drawn) == pytest.approx(100)
    assert axes[0].get_title(loc="left").startswith("start")


def test_kernels_of_a_moment_nobody_reached_are_none() -> None:
    rows = [{"variant": "main", "net": "relu", "kernel": "tangent", "at": "middle", "seed": 0, "row": 0, "column": 0}]
    table = Table.from_rows([{**row, "quantity": "class_kernel", "value": None} for row in rows])
    assert fashion.mean_kernel(table, "relu", "tangent", "middle") is None


def test_label_figure_draws_every_pair(smoke) -> None:
    with plots.style():
        axes = fashion.draw_labels_or_images(smoke[2]).axes
    work = smoke[0].work
    curves = {line.get_label(): line.get_ydata() for line in axes[0].get_lines()}
    main = series_of(stack("smoke", "main", "relu"), work)
    assert np.allclose(curves["second half easy"], np.median(log_path_gap(main, "swapped"), axis=1))
    dots = [line.get_ydata() for line in axes[2].get_lines() if line.get_marker() == "o" and len(line.get_ydata())]
    for name in ("main", "bias-free", "standardised", "splits"):
        pairs = np.sort(label_and_image_effects(series_of(stack("smoke", name, "relu"), work))["label_effect"][-1])
        assert any(len(drawn) == len(pairs) and np.allclose(drawn, pairs) for drawn in dots)


# --- verdicts --------------------------------------------------------------------------------------

Asked = tuple[tuple[str, str], ...]


def asked(quantity: str, **columns: str) -> Asked:
    return (("quantity", quantity), *columns.items())


GOOD: dict[Asked, float] = {
    asked("allocation_least"): 0.1,
    asked("allocation", at="middle"): 0.1,
    asked("allocation", at="end"): 0.1,
    asked("tangent_gain", at="middle"): 1.5,
    asked("tangent_gain", at="end"): 1.2,
    asked("test_accuracy", half="easy", at="middle"): 0.73,
    asked("test_accuracy", half="easy", at="end"): 0.85,
    asked("test_accuracy", half="hard", at="middle"): 0.3,
    asked("epochs_to_learn", half="easy"): 0.1,
    asked("epochs_to_learn", half="hard"): 1.0,
    **{asked("spread", kernel=kernel, at="start"): 0.006 for kernel in ("tangent", "overlap")},
    **{
        asked("contrast", kernel=kernel, at=at): value
        for kernel in ("tangent", "overlap")
        for at, value in (("start", 0.0), ("middle", 0.3), ("end", 0.2))
    },
}
BAD: dict[str, dict[Asked, float]] = {
    "C16": {
        asked("allocation_least"): -0.01,
        asked("allocation", at="middle"): -0.01,
        asked("allocation", at="end"): -0.01,
    },
    "C17": {asked("tangent_gain", at="middle"): 0.99, asked("tangent_gain", at="end"): 0.99},
    "C18": {
        asked("test_accuracy", half="easy", at="middle"): 0.67,
        asked("test_accuracy", half="hard", at="middle"): 0.51,
        asked("epochs_to_learn", half="hard"): 0.09,
    },
    "C19": {
        **{asked("spread", kernel=kernel, at="start"): 0.021 for kernel in ("tangent", "overlap")},
        **{
            asked("contrast", kernel=kernel, at=at): 0.09
            for kernel in ("tangent", "overlap")
            for at in ("middle", "end")
        },
    },
}
ALL_BAD = {one: value for bad in BAD.values() for one, value in bad.items()}


@pytest.fixture(scope="module")
def committed() -> Table:
    return Table.read(COMMITTED)


@pytest.fixture(scope="module")
def judged(committed: Table) -> Table:
    """The rows that parts read, under all four labellings: no curves and no kernels."""
    names = [dict(one)["quantity"] for one in GOOD]
    return committed.where(variant="main", quantity=names, at=["", "start", "middle", "end"])


def changed(table: Table, numbers: dict[Asked, float], **where: Any) -> Table:
    """The table with these numbers in the main stacks, on the modified labels if no others are named."""
    rows = list(table.rows())
    for one, value in numbers.items():
        columns = {"variant": "main", "labels": "modified", **dict(one), **where}
        chosen = [row for row in rows if all(row.get(name) == wanted for name, wanted in columns.items())]
        assert chosen
        for row in chosen:
            row["value"] = value
    return Table.from_rows(rows, digits=17)


def verdicts(table: Table, scale: str = "paper") -> dict[str, str]:
    return {claim.id: judge_claim(claim, table, STUDY.seeds_of(scale))["verdict"] for claim in STUDY.claims}


def test_claims_hold_when_every_part_does(judged: Table) -> None:
    assert set(verdicts(changed(judged, GOOD)).values()) == {"holds"}
    assert set(verdicts(judged).values()) != {"holds"}


@pytest.mark.parametrize(("claim", "one"), [(claim, one) for claim, bad in BAD.items() for one in bad])
def test_one_quantity_on_the_wrong_side_costs_a_claim_the_parts_of_both_networks(
    judged: Table, claim: str, one: Asked
) -> None:
    found = verdicts(changed(judged, GOOD | {one: BAD[claim][one]}))
    count = len(next(entry for entry in STUDY.claims if entry.id == claim).parts)
    assert found.pop(claim) == f"{count - 2} of {count} parts"
    assert set(found.values()) == {"holds"}


@pytest.mark.parametrize("claim", BAD)
def test_all_parts_on_the_wrong_side_make_a_claim_fail(judged: Table, claim: str) -> None:
    found = verdicts(changed(judged, GOOD | BAD[claim]))
    assert found.pop(claim) == "fails"
    assert set(found.values()) == {"holds"}


def test_one_network_alone_is_not_enough(judged: Table) -> None:
    table = changed(changed(judged, GOOD), BAD["C16"], net="relu")
    assert verdicts(table)["C16"] == "3 of 6 parts"


def test_only_members_with_modified_labels_are_judged(judged: Table) -> None:
    table = changed(judged, GOOD)
    for labels in ("swapped", "original", "noise"):
        table = changed(table, ALL_BAD, labels=labels)
    assert set(verdicts(table).values()) == {"holds"}


def test_smaller_studies_judge_nothing(judged: Table) -> None:
    table = changed(Table.from_rows([row | {"images": 6000} for row in judged.rows()]), GOOD)
    assert set(verdicts(table).values()) == {"not measured"}


def test_a_middle_point_never_reached_decides_nothing(judged: Table) -> None:
    never = {one: float("nan") for one in GOOD if dict(one).get("at") == "middle"}
    table = changed(judged, GOOD | never)
    claim = next(claim for claim in STUDY.claims if claim.id == "C18")
    parts = judge_claim(claim, table, STUDY.seeds_of("paper"))["parts"]
    assert [part["verdict"] for part in parts] == ["not measured"] * 4 + ["holds"] * 2
    assert verdicts(table)["C16"] == "4 of 6 parts"


def test_random_splits_are_shown_with_all_their_seeds(committed: Table) -> None:
    claim = next(claim for claim in STUDY.claims if claim.id == "C16")
    shows = {row["name"]: row for row in judge_claim(claim, committed, STUDY.seeds_of("paper"))["shows"]}
    words = "label effect at the end: the same class easy over hard"
    assert shows[f"{NETS['relu']}, random splits: {words}"]["seeds"] == 20
    assert shows[f"{NETS['relu']}: {words}"]["seeds"] == 10


def test_every_declared_number_is_in_the_committed_table(committed: Table) -> None:
    for claim in STUDY.claims:
        row = judge_claim(claim, committed, STUDY.seeds_of("paper"))
        assert all(part["missing"] == 0 for part in row["parts"])
        assert len(row["shows"]) == len(claim.shows)
