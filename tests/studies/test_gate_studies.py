"""Studies about gates: planted labels, matched on-rates, aligned units, transplanted gates, and verdicts that can flip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unlazy.claims.rule import judge_claim
from unlazy.kernels.gated import net_gates
from unlazy.models.build import build
from unlazy.models.gates import HardGate
from unlazy.models.spec import ImageSpec, NetSpec
from unlazy.studies.beyond import ladder, transplant
from unlazy.studies.beyond.gate_networks import (
    accuracy_under_donor,
    align_units,
    gating_state,
    match_on_rates,
    on_rates,
    train_task,
    unit_groups,
    untrained_gates,
)
from unlazy.studies.beyond.gate_tasks import (
    CIFAR_10,
    FASHION,
    NESTED,
    SMOKE_TASKS,
    load_task,
    planted_data,
    relu_of_equal_parameters,
)
from unlazy.studies.engine import reproduce
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.study import Study, Work
from unlazy.studies.table import Table

pytest.importorskip("sklearn")
SPECS = {
    "dense": NetSpec(64, 10, width=6, depth=4, gate=HardGate(4.0)),
    "residual": ImageSpec((3, 4), (1, 1), channels=1, gate=HardGate(1.0), even_gates=True),
}


def pictures(spec: NetSpec | ImageSpec, n: int = 60) -> torch.Tensor:
    shape = (n, 64) if isinstance(spec, NetSpec) else (n, 1, 8, 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def work_in(folder: Path) -> Work:
    return Work("ladder", "smoke", folder)


# --- both studies run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ladder", "transplant"])
def test_a_study_measures_judges_and_draws(name: str, tmp_path: Path) -> None:
    request = Request(name, "smoke", tmp_path / "runs", tmp_path / "results")
    done = reproduce(request, ExecutionOptions(), progress=lambda *_: None)
    assert (done.failed, done.not_drawn) == ({}, {})
    table = Table.read(request.folder / "table.csv")
    if name == "transplant":
        assert set(table.unique("donor")) >= {*transplant.DONORS, transplant.KEPT, transplant.ALIGNED}
        return
    bends = {gates: table.select("bends", task=NESTED, gates=gates, rule="hard") for gates in (ladder.NONE, ladder.ALL)}
    assert (bends[ladder.NONE] == 0).all()  # a half-space is crossed once on a straight way
    assert (bends[ladder.ALL] > 0).any()
    same = [
        table.select(
            "accuracy", task=task, gates=gates, rule="hard", values=ladder.TOGETHER, split="test", gate_values="hard"
        )
        for task in (FASHION, NESTED)
        for gates in (ladder.NONE, ladder.LAST)
    ]
    assert np.array_equal(same[0], same[1])  # the last layer's ReLU feeds nothing
    assert np.array_equal(same[2], same[3])


# --- tasks -----------------------------------------------------------------------------------------------------


def test_planted_labels_are_halves_and_belong_to_the_teacher() -> None:
    flat, nested = (planted_data(SMOKE_TASKS[name], (0, 1)) for name in ("half-spaces", NESTED))
    for data in (flat, nested):
        assert (data.train.y.sum(1)[:, 0] - 100).abs().max() <= 1
        assert not torch.equal(data.train.y[0], data.train.y[1])
    assert torch.equal(flat.train.x, nested.train.x)
    assert not torch.equal(flat.train.y, nested.train.y)


def test_equal_parameters_are_nearly_equal() -> None:
    for spec in SPECS.values():
        counts = [sum(p.numel() for p in build(one).parameters()) for one in (spec, relu_of_equal_parameters(spec))]
        assert abs(counts[0] - counts[1]) < 0.12 * counts[0]


def test_names_of_layers() -> None:
    assert [ladder.layers_of(name, 17) for name in (ladder.FIRST, ladder.MIDDLE)] == [(1,), (9,)]
    assert ladder.layers_of(ladder.HALF, 17) == tuple(range(1, 10))
    assert ladder.layers_of(ladder.LAST_HALF, 17) == tuple(range(10, 18))
    assert ladder.layers_of(ladder.ALL, 5) == (1, 2, 3, 4, 5)


# --- gates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_random_gates_are_open_as_often_as_asked(spec: NetSpec | ImageSpec) -> None:
    x = pictures(spec)
    net = untrained_gates(spec, 5, x)
    random = torch.Generator().manual_seed(1)
    wanted = [torch.rand(len(rate), generator=random, dtype=torch.float64) for rate in on_rates(net, x)]
    wanted[0][0], wanted[-1][-1] = 0.0, 1.0
    match_on_rates(net, x, wanted)
    for found, rate in zip(on_rates(net, x), wanted, strict=True):
        assert (found - rate).abs().max() <= 0.5 / len(x) + 1e-6


def test_layers_of_one_residual_stream_are_one_group() -> None:
    groups = unit_groups(ImageSpec((4, 4, 8), (2, 1, 1), channels=1))
    assert sorted(groups) == sorted([[0, 2, 4], [6], [8], [1], [3], [5], [7]])
    assert unit_groups(SPECS["dense"]) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_alignment_finds_a_permutation(spec: NetSpec | ImageSpec) -> None:
    """Their gates are mine with units in another order within each group: the order that is found undoes it."""
    x = pictures(spec)
    net = untrained_gates(spec, 5, x)
    mine, groups = net_gates(net, x), unit_groups(spec)
    theirs = list(mine)
    for number, group in enumerate(groups):
        order = torch.randperm(mine[group[0]].shape[1], generator=torch.Generator().manual_seed(number))
        for layer in group:
            theirs[layer] = mine[layer][:, order]
    orders = align_units(mine, theirs, groups)
    for layer, order in enumerate(orders):
        assert torch.equal(theirs[layer][:, order], mine[layer])
    labels = torch.nn.functional.one_hot(net(x).argmax(1), 10)
    assert accuracy_under_donor(net, net, x, labels) == pytest.approx(100.0)


@pytest.mark.parametrize("task", [FASHION, CIFAR_10])
def test_transplanted_gates_are_the_donor_s_and_stay(task: str, tmp_path: Path) -> None:
    """Fresh values under a ReLU network's gates: after training, the gates are still exactly those of the ReLU network."""
    setup, seeds = SMOKE_TASKS[task], (0, 1)
    data = load_task(setup, seeds, work_in(tmp_path))
    spec = setup.spec(data)
    relu = train_task("relu", setup, spec.relu(), data, seeds, work_in(tmp_path))
    layers = tuple(range(1, spec.gated_layers + 1))
    donors = [gating_state(net) for net in relu.nets]
    recipient = replace(spec, nonlinear_gate_layers=layers)
    fresh = train_task("fresh", setup, recipient, data, (10, 11), work_in(tmp_path), donors)
    x = data.test_inputs(50)
    for mine, theirs in zip(fresh.nets, relu.nets, strict=True):
        for one, other in zip(net_gates(mine, x), net_gates(theirs, x), strict=True):
            assert (one == other).double().mean() > 0.999  # a pre-activation of exactly 0 is open here and closed there
        pairs = zip(mine.value_layers.parameters(), theirs.value_layers.parameters(), strict=True)
        assert any(not torch.equal(one, other) for one, other in pairs)
    again = train_task("fresh", setup, recipient, data, (10, 11), work_in(tmp_path), donors)
    assert np.array_equal(again.test, fresh.test)  # from the run folders


# --- verdicts --------------------------------------------------------------------------------------------------


def judged(study: Study, claim: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = [one for one in study.claims if one.id == claim]
    return judge_claim(found, Table.from_rows(rows), study.seeds_of("desk"))


@pytest.mark.parametrize(("nested", "verdict"), [(3.0, "holds"), (0.5, "1 of 2 parts")])
def test_the_verdict_on_planted_data_can_flip(nested: float, verdict: str) -> None:
    gains = {"half-spaces": 0.2, NESTED: nested}
    rows = [
        {
            "task": task,
            "gates": gates,
            "rule": "hard",
            "values": ladder.TOGETHER,
            "split": "test",
            "gate_values": "hard",
        }
        | {"seed": seed, "quantity": "accuracy", "value": 70 + (gain if gates == ladder.ALL else 0)}
        for task, gain in gains.items()
        for gates in (ladder.NONE, ladder.ALL)
        for seed in range(5)
    ]
    assert judged(ladder.STUDY, "X3", rows)["verdict"] == verdict


@pytest.mark.parametrize(("share", "verdict"), [(0.9, "holds"), (0.2, "fails")])
def test_the_verdict_on_another_seed_can_flip(share: float, verdict: str) -> None:
    rows = [
        {"task": task, "donor": transplant.OTHER_SEED, "seed": seed, "quantity": "share", "value": share}
        for task in transplant.MAIN
        for seed in range(5)
    ]
    assert judged(transplant.STUDY, "X11", rows)["verdict"] == verdict


def test_a_share_of_no_gap_is_no_number() -> None:
    found = transplant.share_between(np.array([81.0, 82.0]), np.array([80.0, 80.0]), np.array([80.5, 84.0]))
    assert np.isnan(found[0])
    assert found[1] == 0.5
    assert np.isnan(ladder.share_of_gap(np.array([81.0]), np.array([80.0]), np.array([79.0]))).all()
