"""Quadratic against linear gates: sizes match, kernels are the kernels, and falsified tables flip the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from repository import RESULTS
from unlazy import plots
from unlazy.claims.rule import judge_claim
from unlazy.data.dataset import Dataset
from unlazy.data.files import DataMissing
from unlazy.kernels.compare import kernel_distance, relative_change
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build, build_stack
from unlazy.models.spec import NetSpec
from unlazy.runtime import InputError
from unlazy.store import Run
from unlazy.studies.engine import reproduce
from unlazy.studies.halfspace import quadratic as study
from unlazy.studies.halfspace.quadratic import (
    CLAIMS,
    GATINGS,
    NETWORK_BY_RULE,
    SCALES,
    SIZE_TOLERANCE,
    STUDY,
    count_parameters,
    kernels_one_by_one,
    match_sizes,
    training_of,
)
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.study import Results, Work
from unlazy.studies.table import Table

PAPER = RESULTS / "quadratic" / "paper"
SEEDS = STUDY.seeds_of("paper")


def declared(scale: str, **columns: Any) -> Any:
    """The one case with these columns."""
    found = STUDY.cases(SCALES[scale], STUDY.seeds_of(scale))
    (case,) = [case for case in found if all(getattr(case, name) == value for name, value in columns.items())]
    return case


def network(scale: str, **columns: Any) -> NetSpec:
    return training_of(declared(scale, **columns)).recipe.model


def count(spec: NetSpec) -> int:
    """By the formula: matrices, biases, and rank-one squares with strength and offset for every unit."""
    m, d, biases = spec.width, spec.inputs, int(spec.gate_bias)
    between = (spec.depth - 1) * m * m
    gates = m * d + between + biases * spec.depth * m
    start = {"ones": d, "one": 1}[spec.constant_input] if spec.experts == "constant" else d
    values = m * start + between + biases * spec.depth * m + spec.outputs * (m + biases)
    squares = spec.depth * m * spec.quadratic_rank * (d + 1) + spec.depth * m if spec.gating == "quadratic" else 0
    return gates + values + squares


@pytest.mark.parametrize("rule", NETWORK_BY_RULE)
def test_sizes_match_within_two_percent(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def blank(task: str, n: int, tests: int, folder: Path | None = None) -> tuple[Dataset, Dataset]:
        data = Dataset(
            task, torch.zeros(40, {"digits": 64, "relabelled-fashion": 784}[task]), torch.eye(10).repeat(4, 1)
        )
        return data, data

    monkeypatch.setattr(study, "image_datasets", blank)
    for task in study.TASKS:
        linear, quadratic = (network("paper", task=task, rule=rule, gating=gating) for gating in GATINGS)
        assert (linear.gating, quadratic.gating) == GATINGS
        assert abs(count(quadratic) / count(linear) - 1) <= SIZE_TOLERANCE
        assert (count_parameters(linear), count_parameters(quadratic)) == (count(linear), count(quadratic))
        same = replace(quadratic, gating="linear", width=linear.width)
        assert same == linear  # nothing else differs


def test_the_nearest_size_is_taken() -> None:
    both = match_sizes(NetSpec(64, 10, width=64, depth=3, experts="constant", constant_input="one"))
    linear, quadratic = both["linear"], both["quadratic"]
    off = [abs(count(replace(quadratic, width=w)) - count(linear)) for w in range(1, 65)]
    assert off[quadratic.width - 1] == min(off)


def test_sizes_that_cannot_match_are_refused() -> None:
    with pytest.raises(InputError, match="larger width"):
        match_sizes(NetSpec(784, 10, width=2, depth=3, experts="constant"))


def test_quadratic_gates_are_not_half_spaces() -> None:
    """Along a line through the origin a rank-one quadratic gate may open, close and open again; a linear one may not."""
    linear, quadratic = (network("paper", task="pilot", rule="hard", gating=gating) for gating in GATINGS)
    t = torch.linspace(-40, 40, 801)[:, None]
    changes = {}
    for spec in (linear, quadratic):
        most = 0
        for seed in range(5):
            x = t * torch.tensor([[0.6, 0.8]])
            gates = torch.cat(build(spec, seed=seed).gates(x).hard(), dim=-1)
            most = max(most, int((gates[1:] != gates[:-1]).sum(0).max()))
        changes[spec.gating] = most
    assert changes["linear"] <= 1
    assert changes["quadratic"] == 2


def test_kernels_of_members_are_those_of_the_stack() -> None:
    net = build_stack(NetSpec(3, 2, gating="quadratic", width=4, depth=2), [0, 1, 2], dtype=torch.float64)
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = kernels_one_by_one(net, Dataset("mine", x, torch.zeros(6, 2, dtype=torch.float64)))
    torch.testing.assert_close(found["tangent"], tangent_kernel(net, x), rtol=1e-9, atol=1e-12)
    assert found["overlap"].shape == (3, 6, 6)


def test_a_case_without_its_images_says_so(tmp_path: Path) -> None:
    case = declared("paper", task="relabelled-fashion", rule="soft", gating="linear")
    with pytest.raises(DataMissing, match="fashion"):
        study.measure(case, Work("quadratic", "paper", tmp_path, data=tmp_path))


def test_image_tasks_have_fewer_seeds() -> None:
    assert declared("paper", task="author", rule="soft", gating="linear").seeds == tuple(range(20))
    assert declared("paper", task="digits", rule="soft", gating="linear").seeds == tuple(range(10))


def test_relabelled_images_keep_easy_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    from unlazy.data.images import load_images

    monkeypatch.setitem(study.IMAGE_TASKS, "relabelled-fashion", "digits")
    data, tests = study.image_datasets("relabelled-fashion", 400, 100)
    plain, unseen = (load_images("digits", split).labels[:n] for split, n in (("train", 400), ("test", 100)))
    for made, labels in ((data, plain), (tests, unseen)):
        new, easy = made.y.argmax(1), labels < 5
        assert torch.equal(new[easy], labels[easy])
        assert (new[~easy] >= 5).all()
        assert (new[~easy] != labels[~easy]).float().mean() > 0.3


# --- verdicts ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paper() -> Table:
    return Table.read(PAPER / "table.csv")


def made(paper: Table, loss: float, accuracy: float) -> Table:
    """The committed table, but linear gates end at 0.01 and 0.9, quadratic ones at this loss and test accuracy."""
    ends = {("loss", "linear"): 0.01, ("accuracy", "linear"): 0.9}
    ends |= {("loss", "quadratic"): loss, ("accuracy", "quadratic"): accuracy}
    rows = [
        {**row, "value": ends[row["quantity"], row["gating"]]} if row["quantity"] in ("loss", "accuracy") else row
        for row in paper.where(at="end").rows()
    ]
    return Table.from_rows(rows, digits=17)


def judged(table: Table) -> tuple[str, str]:
    row = judge_claim(CLAIMS[0], table, SEEDS)
    return row["verdict"], row["survives"]


def test_the_verdict_follows_the_numbers(paper: Table) -> None:
    assert judged(made(paper, 0.002, 0.95)) == ("holds", "holds")
    assert judged(made(paper, 0.02, 0.85)) == ("fails", "fails")
    assert judged(made(paper, 0.02, 0.95)) == ("2 of 3 parts", "2 of 5 parts")
    assert judged(made(paper, 0.01, 0.9)) == ("fails", "fails")  # equal is not higher


def test_a_falsified_table_flips_a_part(paper: Table) -> None:
    """Exchange the gates of the relabelled images: what lost now wins."""
    exchange = {"linear": "quadratic", "quadratic": "linear"}
    rows = [
        {**row, "gating": exchange[row["gating"]]} if row["task"] == "relabelled-fashion" else row
        for row in paper.rows()
    ]
    for table, verdict in ((paper, "fails"), (Table.from_rows(rows, digits=17), "holds")):
        row = judge_claim(CLAIMS[0], table, SEEDS)
        found = {part["verdict"] for part in (*row["parts"], *row["controls"]) if "relabelled" in part["name"]}
        assert found == {verdict}


def test_gates_made_hard_do_not_judge(paper: Table) -> None:
    table = made(paper, 0.002, 0.95)
    hard = [
        {**row, "value": 0.5} if row["quantity"] == "loss_hard_gates" or row.get("gates") == "hard" else row
        for row in table.rows()
    ]
    assert judged(Table.from_rows(hard, digits=17)) == ("holds", "holds")


def test_gain_is_decades_of_loss_or_accuracy() -> None:
    assert study.decades_below(np.array([0.1]), np.array([0.001])) == pytest.approx(2.0)
    (first, second), *_ = study.gain("digits", "soft")
    assert (first.where["gating"], second.where["gating"]) == ("quadratic", "linear")
    (first, second), *_ = study.gain("author", "soft", made_hard=True)
    assert (first.name, first.where["gating"], second.where["gating"]) == ("loss_hard_gates", "linear", "quadratic")


def test_missing_tasks_are_not_measured(paper: Table) -> None:
    row = judge_claim(CLAIMS[0], paper.without(task="relabelled-fashion"), SEEDS)
    found = {part["verdict"] for part in (*row["parts"], *row["controls"]) if "relabelled" in part["name"]}
    assert found == {"not measured"}


# --- the study ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Results:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("quadratic")
    request = Request("quadratic", "smoke", folder / "runs", folder / "results")
    found = reproduce(request, ExecutionOptions(), progress=lambda *_: None)
    assert (found.failed, found.not_drawn) == ({}, {})
    table = Table.read(request.folder / "table.csv")
    return request.with_table(table)


def test_every_network_is_measured_and_every_figure_drawn(smoke: Results) -> None:
    for case in smoke.cases():
        rows = smoke.table.where(**STUDY.case_columns(case))
        assert rows.unique("seed") == ["0", "1"]
        assert rows.select("parameters").tolist() == [count_parameters(training_of(case).recipe.model)] * 2
    for figure in STUDY.figures:
        assert (smoke.folder / f"{figure.name}.png").is_file()


@pytest.mark.parametrize("task", ["pilot", "digits"])
def test_kernels_are_compared_with_their_start(smoke: Results, task: str) -> None:
    case = declared("smoke", task=task, rule="soft", gating="quadratic")
    plan = training_of(case)
    run = Run(plan.folder(smoke.work.runs))
    table = smoke.table.where(**STUDY.case_columns(case), kernel="tangent")
    steps = run.array_steps("tangent")
    epochs, moved = table.series("distance_from_start")
    assert epochs.tolist() == [step // plan.recipe.steps_per_epoch(len(plan.data)) for step in steps]
    first, last = (torch.from_numpy(run.array("tangent", step)).double() for step in (steps[0], steps[-1]))
    assert moved[0] == pytest.approx([0, 0], abs=1e-6)
    assert moved[-1] == pytest.approx(kernel_distance(last, first).tolist(), rel=1e-3, abs=1e-6)
    assert np.array_equal(moved[-1], table.select("distance_from_start", "end"))
    assert table.select("change_from_start", "end") == pytest.approx(relative_change(last, first).tolist(), rel=1e-3)


def test_figures_draw_what_was_measured(smoke: Results) -> None:
    with plots.style():
        drawn = {figure.name: figure.draw(smoke) for figure in STUDY.figures}
    dots = [line for line in drawn["gain"].axes[0].get_lines() if line.get_marker() == "o"]
    linear, quadratic = (smoke.table.select("loss", "end", task="pilot", rule="soft", gating=g) for g in GATINGS)
    assert np.allclose(dots[0].get_ydata(), np.log10(linear / quadratic))
    lines = {line.get_label(): line for line in drawn["learning"].axes[1].get_lines()}
    own = {"task": "digits", "rule": "hard", "gating": "quadratic", "split": "test", "gates": "as trained"}
    wanted = [np.median(smoke.table.select("accuracy", epoch, **own)) for epoch in (0, 1)]
    assert np.allclose(lines["quadratic, hard gates"].get_ydata(), wanted)
