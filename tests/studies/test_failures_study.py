"""The failure studies: stacks are their members, floors are floors, and falsified tables flip the verdicts."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from repository import RESULTS
from unlazy import plots
from unlazy.claims.rule import judge_claim
from unlazy.data.circle import CIRCLE_PRESETS, Circle
from unlazy.data.dataset import Dataset
from unlazy.data.files import DataMissing
from unlazy.kernels.overlap import hard_gates
from unlazy.models.build import build, build_stack
from unlazy.models.gates import HardGate
from unlazy.models.spec import NetSpec, relu_spec
from unlazy.probes import standard
from unlazy.probes.paths import cell_floor
from unlazy.runtime import InputError
from unlazy.studies.engine import reproduce
from unlazy.studies.halfspace import failures as study
from unlazy.studies.halfspace.failures import (
    CLAIMS,
    FOREST,
    FREQUENCY,
    INTERACTIONS,
    SCALES,
    SMALL_DATA,
    STUDY,
    classifier_training,
    fast_target_training,
)
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.study import Results, Work
from unlazy.studies.table import Table
from unlazy.studies.trainings import accuracy_on_test_data, classifier, stack_targets
from unlazy.training.fit import fit

SMOKE = SCALES["smoke"]
PAPER = RESULTS / "failures" / "paper"


def declared(experiment: str, scale: str = "smoke", **columns: Any) -> list[Any]:
    """Cases of one experiment, with these values in these fields."""
    wanted = {"experiment": experiment, **columns}
    found = STUDY.cases(SCALES[scale], STUDY.seeds_of(scale))
    return [case for case in found if all(getattr(case, name) == value for name, value in wanted.items())]


# --- stacks ------------------------------------------------------------------------------------------


def test_side_by_side_keeps_targets_apart() -> None:
    slow, fast = (Circle(n=8, bottom=bottom).dataset() for bottom in (2.0, 5.0))
    both = stack_targets([slow, fast])
    assert torch.equal(both.y[0], slow.y)
    assert torch.equal(both.y[1], fast.y)
    with pytest.raises(InputError, match="same inputs"):
        stack_targets([slow, Circle(n=8, offset=0.5).dataset()])


def test_a_frequency_trains_as_it_would_alone(tmp_path: Path) -> None:
    """Seed 1 at 16 half cycles inside the stack of all frequencies, against a stack of that frequency only."""
    together = fast_target_training(declared(FREQUENCY, network="pwc")[0])
    run = together.run(Work("failures", "smoke", tmp_path))
    data = replace(CIRCLE_PRESETS["pilot"], bottom=16.0).dataset()
    alone = replace(together.recipe, members=together.recipe.members[1:2])
    solo = fit(alone, data, [replace(together.measures[0], probe=standard.curves)], tmp_path / "alone")
    assert together.recipe.members[3] == alone.members[0]
    assert run.scalars("loss")[1][-1, 3] == pytest.approx(solo.scalars("loss")[1][-1, 0], rel=1e-4)
    assert run.scalars("loss")[1][-1, 1] != pytest.approx(solo.scalars("loss")[1][-1, 0], rel=1e-2)


def test_a_start_needs_its_origin_and_has_a_folder_of_its_own(tmp_path: Path) -> None:
    plan = fast_target_training(declared(FREQUENCY)[0])
    with pytest.raises(InputError, match="id of the run"):
        replace(plan, start={})
    begun = replace(plan, start={}, after="abc")
    assert len({plan.folder(tmp_path), begun.folder(tmp_path), replace(begun, after="abd").folder(tmp_path)}) == 3


def test_accuracy_counts_right_classes() -> None:
    net = build_stack(NetSpec(3, 4, width=5, depth=2), [0, 1], dtype=torch.float64)
    x = torch.randn(30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 4, (2, 30), generator=torch.Generator().manual_seed(1))
    found = accuracy_on_test_data(net, Dataset("mine", x, torch.nn.functional.one_hot(labels, 4).double()))
    for member in range(2):
        for name, model in (("test_as_trained", net), ("test_hard_gates", net.hard())):
            right = sum(int(model(x)[member, i].argmax() == labels[member, i]) for i in range(30))
            assert float(found[name][member]) == pytest.approx(right / 30)


# --- F1: floors --------------------------------------------------------------------------------------


def test_least_error_against_all_cuts() -> None:
    random = np.random.default_rng(0)
    for n in (1, 4, 7):
        y = random.normal(size=n)
        for pieces in range(1, n + 2):
            tried = []
            for count in range(min(pieces, n)):
                for cuts in combinations(range(1, n), count):
                    parts = np.split(y, cuts)
                    tried.append(sum(((part - part.mean()) ** 2).sum() for part in parts))
            assert study.least_error_of_pieces(y, pieces) == pytest.approx(min(tried), abs=1e-12)


@pytest.mark.parametrize("biases", [False, True])
def test_no_cells_beat_the_ideal_floor(biases: bool) -> None:
    """Whatever half-spaces a network has, constants on its cells lose at least as much as the best placing of as many."""
    data = Circle(n=60, top=2.0, bottom=7.0, offset=0.5).dataset(torch.float64)
    ideal = study.ideal_floor(data, 6, biases)
    assert ideal > 0
    found = []
    for seed in range(30):
        spec = NetSpec(2, width=3, depth=2, experts="constant", gate_bias=biases, value_bias=biases)
        found.append(float(cell_floor(hard_gates(build(spec, seed=seed, dtype=torch.float64), data.x), data.y)))
    assert min(found) >= ideal
    assert min(found) < 20 * ideal + 0.1  # and it is not far from what networks have


def test_ideal_floor_in_closed_form() -> None:
    """One boundary cuts sin 2t into its two bumps on either half: 1/2 - (2/pi)^2 is left."""
    data = Circle(n=2000, top=2.0, bottom=2.0, offset=0.5).dataset(torch.float64)
    assert study.ideal_floor(data, 1, False) == pytest.approx(0.5 - (2 / np.pi) ** 2, rel=1e-4)


def test_ideal_floor_falls_with_units_and_biases() -> None:
    data = replace(CIRCLE_PRESETS["pilot"], n=64).dataset()
    floors = [study.ideal_floor(data, units, False) for units in (1, 4, 16, 64)]
    assert floors == sorted(floors, reverse=True)
    assert floors[-1] == 0
    # with biases all boundaries may go where they are needed
    assert study.ideal_floor(data, 8, True) < study.ideal_floor(data, 8, False)


@pytest.mark.parametrize("spec", [NetSpec(2, width=4, depth=2, experts="constant"), relu_spec(2, width=4, depth=2)])
def test_own_floors_are_those_of_each_target(spec: NetSpec) -> None:
    sets = [Circle(n=40, bottom=bottom).dataset(torch.float64) for bottom in (2.0, 9.0)]
    net = build_stack(spec, [0, 1], dtype=torch.float64)
    found = study.own_floors(net, stack_targets(sets))
    for member, data in enumerate(sets):
        single = standard.floors(net, data)
        for name in ("cells", "cell_floor"):
            assert float(found[name][member]) == pytest.approx(float(single[name][member]), abs=1e-12)


def test_the_fastest_fitted_target_is_the_last_of_an_unbroken_row() -> None:
    loss = np.array([[0.01, 0.2, 0.01], [0.01, 0.01, 0.01], [0.3, 0.01, 0.01]])
    assert study.fastest_fitted(loss, [2.0, 8.0, 16.0]).tolist() == [8.0, 0.0, 16.0]


# --- F2, F3: data ------------------------------------------------------------------------------------


def test_every_member_has_its_own_exclusive_or() -> None:
    case = declared(INTERACTIONS, law="signs", network="dlgn")[0]
    plan, settings = classifier_training(case), SMOKE.interactions
    members = [(order, seed) for order in settings.orders for seed in (0, 1)]
    assert [m.seed for m in plan.recipe.members] == [seed for _, seed in members]
    for (order, _), options, y in zip(members, plan.data.options["members"], plan.data.y, strict=True):
        assert (options["order"], len(options["relevant"])) == (order, order)
        sign = plan.data.x[:, options["relevant"]].prod(1)
        assert torch.equal(y.argmax(-1), (sign > 0).long())
    tests = plan.measures[1].batch
    assert tests is not None
    assert [o["relevant"] for o in tests.options["members"]] == [o["relevant"] for o in plan.data.options["members"]]
    assert (len(plan.data), len(tests)) == (60, settings.tests)


def test_every_size_has_as_many_updates() -> None:
    case = replace(declared(INTERACTIONS, "paper", network="relu")[0], seeds=(0,), orders=(2,), tests=10)
    for n in (100, 1000, 4000):
        recipe = classifier_training(replace(case, samples=n)).recipe
        assert recipe.epochs * recipe.steps_per_epoch(n) == SCALES["paper"].interactions.updates


def test_a_forest_finds_one_input_and_not_the_exclusive_or_of_many(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    first = declared(INTERACTIONS, law="signs", network=FOREST)[0]
    case = replace(first, samples=300, seeds=(0,), orders=(1, 6), tests=300, trees=20)
    table = Table.from_rows(study.measure(case, Work("failures", "smoke", tmp_path)).entries)
    assert table.select("accuracy", split="test", order=1)[0] > 0.95
    assert table.select("accuracy", split="test", order=6)[0] < 0.65


def test_larger_sets_of_a_draw_hold_the_smaller() -> None:
    pytest.importorskip("sklearn")
    plans = {(case.samples, case.draw): classifier_training(case) for case in declared(SMALL_DATA, network="pwc")}
    few, many, other = (plans[key].data.x for key in ((20, 0), (60, 0), (20, 1)))
    assert torch.equal(few, many[:20])
    assert not torch.equal(few, other)
    unseen = plans[20, 0].measures[1].batch
    assert unseen is not None
    assert not any((row == many).all(1).any() for row in unseen.x)


def test_seeds_share_a_draw_two_by_two() -> None:
    cases = declared(SMALL_DATA, "paper", images="digits", samples=50, width=16, network="pwc")
    assert [(case.draw, case.seeds) for case in cases] == [(draw, (2 * draw, 2 * draw + 1)) for draw in range(5)]


def test_a_case_without_its_images_says_so(tmp_path: Path) -> None:
    case = declared(SMALL_DATA, "paper", images="fashion-mnist")[0]
    with pytest.raises(DataMissing, match="fashion"):
        study.measure(case, Work("failures", "paper", tmp_path, data=tmp_path))


def test_classifiers_are_what_their_names_say() -> None:
    data = Dataset("mine", torch.zeros(6, 5), torch.zeros(6, 3))
    made = {
        kind: classifier(kind, data, 4.0, width=4, depth=2) for kind in ("dlgn", "pwc", "pwc-hard", "quadratic", "relu")
    }
    assert {kind: (spec.gating, spec.experts) for kind, spec in made.items()} == {
        "dlgn": ("linear", "linear"),
        "pwc": ("linear", "constant"),
        "pwc-hard": ("linear", "constant"),
        "quadratic": ("quadratic", "linear"),
        "relu": ("own", "linear"),
    }
    assert all((spec.inputs, spec.outputs, spec.width, spec.depth) == (5, 3, 4, 2) for spec in made.values())
    assert made["pwc-hard"].gate == HardGate(4.0)
    with pytest.raises(KeyError, match="tree"):
        classifier("tree", data, 4.0, width=4, depth=2)


# --- verdicts ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paper() -> Table:
    return Table.read(PAPER / "table.csv")


def changed(table: Table, value: float, **where: Any) -> Table:
    """The table with another value in the rows with these columns."""
    rows = [{**row, "value": value} for row in table.where(**where).rows()]
    assert rows
    return Table.from_rows([*table.without(**where).rows(), *rows], digits=17)


def judged(table: Table, claim: str) -> dict[str, Any]:
    (found,) = [one for one in CLAIMS if one.id == claim]
    return judge_claim(found, table, STUDY.seeds_of("paper"))


def verdicts(table: Table, claim: str, words: str = "") -> set[str]:
    """The verdicts of the parts and controls whose names have these words."""
    row = judged(table, claim)
    return {part["verdict"] for part in (*row["parts"], *row["controls"]) if words in part["name"]}


XOR_TESTS = {"experiment": "interactions", "split": "test", "gates": "as trained", "at": "end"}
FEW_TESTS = {"experiment": "small data", "gates": "as trained", "at": "end"}


@pytest.mark.parametrize(("relu", "verdict"), [(0.1, "holds"), (0.13, "fails")])
def test_f1_holds_only_where_relu_does_much_better(paper: Table, relu: float, verdict: str) -> None:
    assert verdicts(paper, "F1") == {"fails"}
    losses = {"experiment": "frequency", "quantity": "loss", "at": "end", "half_cycles": 48}
    made = changed(paper, 0.24, **losses, network=["pwc", "pwc-hard"])
    assert verdicts(changed(made, relu, **losses, network="relu"), "F1") == {verdict}


def test_networks_that_learn_the_exclusive_or_refute_f2(paper: Table) -> None:
    learned = changed(paper, 0.76, **XOR_TESTS)
    assert (judged(learned, "F2")["verdict"], judged(learned, "F2")["survives"]) == ("fails", "fails")
    one = {"law": "signs", "samples": 4000, "network": "dlgn", "order": 3}
    assert judged(changed(learned, 0.74, **XOR_TESTS, **one), "F2")["verdict"] == "1 of 12 parts"
    assert verdicts(changed(paper, 0.74, **XOR_TESTS), "F2") == {"holds"}


def test_networks_beside_dlgns_do_not_judge_f2(paper: Table) -> None:
    other = changed(paper, 0.99, **XOR_TESTS, network=["relu", FOREST, "quadratic"])
    other = changed(other, 0.01, **XOR_TESTS, samples=1000)
    before, after = judged(paper, "F2"), judged(other, "F2")
    assert [before[key] for key in ("parts", "controls")] == [after[key] for key in ("parts", "controls")]


@pytest.mark.parametrize(("relu", "verdict"), [(0.2, "holds"), (0.26, "fails"), (0.3, "fails")])
def test_the_gap_beyond_relu_decides_f3(paper: Table, relu: float, verdict: str) -> None:
    assert judged(paper, "F3")["verdict"] == "fails"
    made = changed(paper, 1.0, **FEW_TESTS, split="train")
    made = changed(made, 1 - 0.3, **FEW_TESTS, split="test", samples=50)
    made = changed(made, 1 - relu, **FEW_TESTS, split="test", samples=50, network="relu")
    assert verdicts(made, "F3") == {verdict}


def test_missing_networks_are_not_measured(paper: Table) -> None:
    assert verdicts(paper.without(preset="author", width=16), "F1", "author, width 16") == {"not measured"}
    assert verdicts(paper.without(images="fashion-mnist"), "F3", "fashion-mnist") == {"not measured"}


def test_shares_of_the_loss_add_up(paper: Table) -> None:
    (claim,) = [one for one in CLAIMS if one.id == "F1"]
    words = "author, width 16, trained hard gates: share"
    shares = [shown.values(paper, range(10)) for shown in claim.shows if words in shown.says]
    assert len(shares) == 3
    assert np.sum(shares, axis=0) == pytest.approx(np.ones(10))


# --- the study ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Results:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("failures")
    request = Request("failures", "smoke", folder / "runs", folder / "results")
    made = reproduce(request, ExecutionOptions(), progress=lambda *_: None)
    assert (made.failed, made.not_drawn) == ({}, {})
    table = Table.read(request.folder / "table.csv")
    return request.with_table(table)


def test_every_network_is_measured_and_every_figure_drawn(smoke: Results) -> None:
    assert smoke.table.unique("experiment") == ["frequency", "interactions", "small data"]
    for case in smoke.cases():
        rows = smoke.table.where(**STUDY.case_columns(case))
        assert {int(seed) for seed in rows.unique("seed")} == set(case.seeds)
        assert np.isfinite(rows.values).all()
    for figure in STUDY.figures:
        assert (smoke.folder / f"{figure.name}.png").is_file()


def test_trained_hard_gates_stay_above_both_floors(smoke: Results) -> None:
    table = smoke.table.where(network="pwc-hard", experiment="frequency")
    loss, floor, hard = (
        table.series(name, over="half_cycles", at="end")[1] for name in ("loss", "cell_floor", "loss_hard_gates")
    )
    ideal = table.series("ideal_floor", over="half_cycles")[1]
    assert (loss >= floor * (1 - 1e-4)).all()
    assert (floor >= ideal * (1 - 1e-4)).all()
    assert np.array_equal(loss, hard)


def test_figures_draw_what_was_measured(smoke: Results) -> None:
    with plots.style():
        drawn = {figure.name: figure.draw(smoke) for figure in STUDY.figures}
    lines = {line.get_label(): line for line in drawn["frequency"].axes[0].get_lines()}
    for label, quantity, at, network in (
        ("ReLU net", "loss", "end", "relu"),
        ("the same, half-spaces placed at best", "ideal_floor", None, "pwc-hard"),
    ):
        where = {"experiment": "frequency", "network": network}
        wanted = [np.median(smoke.table.select(quantity, at, half_cycles=speed, **where)) for speed in (2, 16)]
        assert np.allclose(lines[label].get_ydata(), wanted)
    lines = {line.get_label(): line for line in drawn["interactions"].axes[0].get_lines()}
    forest = {**XOR_TESTS, "law": "signs", "network": FOREST}
    wanted = [np.median(smoke.table.select("accuracy", order=order, **forest)) for order in (2, 3)]
    assert np.allclose(lines[FOREST].get_ydata(), wanted)
    lines = {line.get_label(): line for line in drawn["small_data"].axes[1].get_lines()}
    splits = [
        [smoke.table.select("accuracy", **FEW_TESTS, network="relu", samples=n, split=split) for n in (20, 60)]
        for split in ("train", "test")
    ]
    assert np.allclose(lines["ReLU net"].get_ydata(), np.median(np.subtract(*splits), axis=1))
