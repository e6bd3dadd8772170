"""The studies of the adaptive tangent paper: they run small, and a falsified table flips each verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from repository import ROOT
from unlazy import InputError
from unlazy.claims.rule import judge_claim
from unlazy.kernels.averaged_tangents import member_states
from unlazy.models.build import build
from unlazy.store import Run
from unlazy.studies.engine import reproduce
from unlazy.studies.registry import load_study
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.study import Work
from unlazy.studies.table import Table, as_text
from unlazy.studies.tangent.adaptive import least_over_factors, least_over_transformations, least_rise
from unlazy.studies.tangent.label_alignment import (
    MOMENTUM,
    RATE,
    STUDY,
    NetworkStack,
    measure,
    near_over_far,
    rank_correlation,
    smooth_targets,
    train,
    train_epoch,
)
from unlazy.studies.trainings import seeds_in_recipe, twos_and_threes
from unlazy.training.ensemble import Member, batch_order


def quiet(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total, what


STUDIES = [
    ("penalties", {"L4", "L11"}, {"figure-2", "exponents"}),
    ("adaptive", {"L1", "L2", "L3", "L5", "L7"}, {"ranks", "difficulty"}),
    ("label-alignment", {"L6", "L8", "L9"}, {"figure-1", "figure-3", "linearisation"}),
]


@pytest.mark.parametrize(("name", "ids", "figures"), STUDIES, ids=[name for name, _, _ in STUDIES])
def test_smoke_scale_runs_draws_and_has_every_declared_number(
    name: str, ids: set[str], figures: set[str], tmp_path: Path
) -> None:
    request = Request(name, "smoke", tmp_path / "runs", tmp_path / "results")
    found = reproduce(request, ExecutionOptions(), progress=quiet)
    assert not found.failed
    assert not found.not_drawn
    assert {row["id"] for row in found.results["claims"]} == ids
    assert {path.stem for path in found.folder.glob("*.png")} == figures
    table = Table.read(found.folder / "table.csv")
    for claim in request.study.claims:
        for part in claim.parts:
            assert np.isfinite(part.values(table, request.declared_seeds)).all(), part.says


# --- verdicts ----------------------------------------------------------------------------------------


def committed(study: str, scale: str = "paper") -> Table:
    return Table.read(ROOT / "results" / study / scale / "table.csv")


def changed(table: Table, value: float, **where: Any) -> Table:
    """The same rows with another value where the columns are these."""
    wanted = {name: as_text(entry) for name, entry in where.items()}
    rows = [{**row, "value": value} if wanted.items() <= row.items() else row for row in table.rows()]
    assert any(row["value"] == value for row in rows), "nothing was changed"
    return Table.from_rows(rows, digits=17)


def verdicts(study: str, table: Table, scale: str = "paper") -> dict[str, list[str]]:
    """Verdicts of the parts, by claim."""
    found = load_study(study)
    rows = [judge_claim(claim, table, found.seeds_of(scale)) for claim in found.claims]
    return {row["id"]: [part["verdict"] for part in row["parts"]] for row in rows}


FALSIFIED: list[tuple[str, str, int, float, dict[str, Any]]] = [
    ("penalties", "L4", 0, 0.1, {"quantity": "distance_from_square"}),
    ("penalties", "L4", 1, 2.1, {"quantity": "growth_exponent"}),
    ("penalties", "L4", 2, 0.01, {"quantity": "distance_from_figure", "seed": 4}),
    ("penalties", "L11", 0, 0.01, {"quantity": "distance_from_prediction", "powers": "1+4"}),
    ("adaptive", "L1", 0, 1e-5, {"quantity": "distance_from_search", "theorem": 1}),
    ("adaptive", "L2", 0, 1e-3, {"quantity": "function_change"}),
    ("adaptive", "L3", 0, 1e-5, {"quantity": "distance_from_search", "theorem": 2}),
    ("adaptive", "L5", 0, 99.0, {"quantity": "effective_rank", "factors": 2, "layer": 2}),
    ("adaptive", "L7", 0, -0.1, {"quantity": "least_rise_of_stretch"}),
    ("label-alignment", "L6", 0, 0.1, {"quantity": "similarity", "task": "sign", "kernel": "line"}),
    ("label-alignment", "L8", 0, 0.9, {"quantity": "near_over_far", "task": "sign", "kernel": "line", "nearest": 0.1}),
    ("label-alignment", "L8", 1, 0.2, {"quantity": "rank_correlation", "task": "sign"}),
    ("label-alignment", "L9", 0, 1.0, {"quantity": "signal_to_noise", "task": "smooth", "features": "mean"}),
    ("label-alignment", "L9", 1, 1.0, {"quantity": "signal_to_noise", "task": "sign", "features": "mean"}),
]


@pytest.mark.parametrize(("study", "claim", "part", "value", "where"), FALSIFIED)
def test_a_falsified_table_flips_one_part(
    study: str, claim: str, part: int, value: float, where: dict[str, Any]
) -> None:
    """The committed table holds everywhere; a quantity changed, the part that reads it fails, and nothing else does."""
    table = committed(study)
    expected = verdicts(study, table)
    assert {verdict for parts in expected.values() for verdict in parts} == {"holds"}
    expected[claim][part] = "fails"
    assert verdicts(study, changed(table, value, **where)) == expected


def test_one_seed_of_five_is_not_ninety_per_cent() -> None:
    one = changed(committed("label-alignment"), 0.1, quantity="similarity", task="sign", kernel="line", seed=3)
    assert verdicts("label-alignment", one)["L6"] == ["cannot tell"]


@pytest.mark.parametrize("study", ["adaptive", "label-alignment"])
def test_the_desk_scale_holds_as_well(study: str) -> None:
    found = verdicts(study, committed(study, "desk"), "desk")
    assert {verdict for parts in found.values() for verdict in parts} == {"holds"}


@pytest.mark.parametrize(("study", "name"), [("penalties", "figure-2"), ("adaptive", "ranks")])
def test_figures_show_the_table(study: str, name: str) -> None:
    """A line of a figure moves with the rows it is drawn from."""
    request = Request(study, "paper", ROOT / "none", ROOT / "results")

    def highest(table: Table) -> float:
        results = request.with_table(table)
        (figure,) = [figure for figure in request.study.figures if figure.name == name]
        lines = figure.draw(results).axes[-1].get_lines()
        return max(float(np.max(np.asarray(line.get_ydata()))) for line in lines)

    table = committed(study)
    where = {"penalties": {"quantity": "effective", "v": 5}, "adaptive": {"quantity": "effective_rank", "factors": 1}}
    assert highest(table) < 99
    assert highest(changed(table, 99.0, **where[study])) == 99


# --- parts -------------------------------------------------------------------------------------------


def test_direct_searches_know_the_easy_answers() -> None:
    """Nothing to learn costs nothing; one row and one entry have the closed form z^3 (z - 1) = v^2."""
    from unlazy.theory.penalties import Power, effective_penalty

    assert least_over_factors(torch.zeros(2, 2, dtype=torch.float64), 0) == pytest.approx(0, abs=1e-9)
    row = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    wanted = float(effective_penalty(Power(2), torch.tensor(3.0, dtype=torch.float64)))
    assert least_over_transformations(row, torch.tensor([3.0], dtype=torch.float64), 0) == pytest.approx(
        wanted, rel=1e-7
    )


def test_the_least_rise_is_taken_in_order_of_size() -> None:
    assert least_rise([1.0, 3.0, 2.0], [1.1, 1.4, 1.2]) == pytest.approx(0.1)
    assert least_rise([1.0, 3.0, 2.0], [1.1, 1.2, 1.3]) == pytest.approx(-0.1)


def test_near_over_far_and_rank_correlation_by_hand() -> None:
    distance = np.arange(10.0)
    diagonal = np.array([6.0, 9, 9, 9, 9, 2, 2, 2, 2, 2])
    assert near_over_far(diagonal, distance) == 3
    assert near_over_far(diagonal, distance, 0.5) == 4.2
    assert rank_correlation(-(distance**3), distance) == pytest.approx(-1)


SIZES = {"images": 30, "looked_at": 10, "width": 6, "epochs": 3, "readout_epochs": 3, "batch": 8, "points": 4}
SMALL = STUDY.settings("smoke", SIZES)


def networks(**changes: int) -> NetworkStack:
    (found,) = STUDY.cases(STUDY.settings("smoke", {**SIZES, **changes}), (0, 1))
    assert isinstance(found, NetworkStack)
    return found


def work(folder: Path, **options: Any) -> Work:
    return Work("label-alignment", "smoke", folder, **options)


def test_images_are_centred_unit_twos_and_threes() -> None:
    x, labels = twos_and_threes(SMALL.data, SMALL.images)
    assert torch.allclose(x.mean(1), torch.zeros(30), atol=1e-6)
    assert torch.allclose(x.norm(dim=1), torch.ones(30), atol=1e-5)
    assert set(labels.tolist()) == {-1.0, 1.0}
    with pytest.raises(InputError, match="twos and threes"):
        twos_and_threes("digits", 9999)
    with pytest.raises(InputError, match="looked at"):
        networks(images=10, looked_at=11)


def test_a_stack_gives_each_member_what_it_gets_alone() -> None:
    """Every member against plain SGD with momentum on its own batches."""
    x, labels = twos_and_threes(SMALL.data, SMALL.images)
    targets = labels[None, :, None].expand(2, -1, -1)
    start = torch.randn(2, x.shape[1], 1, generator=torch.Generator().manual_seed(0)) / 8
    together = start.clone().requires_grad_()
    stack = torch.optim.SGD([together], momentum=MOMENTUM)
    for epoch in range(SMALL.epochs):
        stack.param_groups[0]["lr"] = 0.1 / (1 + epoch)
        members = [Member(4, RATE), Member(5, RATE)]
        train_epoch(stack, lambda some: x[some] @ together, targets, members, SMALL.batch, epoch)
    for member, seed in enumerate((4, 5)):
        weights = start[member].clone().requires_grad_()
        sgd = torch.optim.SGD([weights], lr=0.1, momentum=MOMENTUM)
        for epoch in range(SMALL.epochs):
            sgd.param_groups[0]["lr"] = 0.1 / (1 + epoch)
            for some in batch_order([Member(seed, RATE)], epoch, 30)[0].split(SMALL.batch):
                sgd.zero_grad()
                (x[some] @ weights - labels[some, None]).square().mean().backward()
                sgd.step()
        assert torch.allclose(together[member], weights, atol=1e-5)


def test_runs_are_kept_and_targets_differ_by_seed(tmp_path: Path) -> None:
    run = train(networks(), work(tmp_path))
    assert run.status()["state"] == "finished"
    smooth = run.array("smooth", 0)
    assert smooth.shape == (2, 30, 1)
    assert not np.allclose(smooth[0], smooth[1])
    x, labels = twos_and_threes(SMALL.data, SMALL.images)
    assert np.allclose(smooth, smooth_targets(SMALL, x, labels, [0, 1]).numpy(), atol=1e-6)
    start, end = run.checkpoint(0), run.checkpoint(SMALL.epochs)
    first = "model/value_layers.0.weight"
    assert np.array_equal(start[first][0], start[first][2])  # the same start for both tasks of a seed
    assert not np.array_equal(end[first][0], end[first][2])
    net = build(networks().spec(x.shape[1]))
    for member, target in enumerate(np.concatenate([smooth, np.sign(smooth)])):
        net.load_state_dict(member_states([end], member)[0])
        missed = (net(x).detach().numpy() - target) ** 2
        assert run.scalars("loss")[1][-1][member] == pytest.approx(missed.mean(), rel=1e-4)
    before = (run.folder / "metrics.jsonl").read_bytes()
    assert train(networks(), work(tmp_path)).id == run.id
    assert (Run(run.folder).folder / "metrics.jsonl").read_bytes() == before


def test_a_training_cut_off_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Killed after its third epoch, once with and once without a checkpoint there to go on from."""

    class KilledError(Exception):
        pass

    case = networks(epochs=6)
    assert case.trajectory() == [0, 1, 2, 4, 6]
    whole = train(case, work(tmp_path / "whole"))
    for last in (2, 3):

        def kill(done: int, total: int, last: int = last) -> None:
            if done == last + 1:
                raise KilledError

        with pytest.raises(KilledError):
            train(case, work(tmp_path / str(last), progress=kill))
        seen: list[int] = []
        going_on = work(tmp_path / str(last), progress=lambda done, total, seen=seen: seen.append(done))
        resumed = train(case, going_on)
        assert seen[0] == 3  # epochs 1 and 2 are kept, 3 is not
        for epoch in case.trajectory():
            before, after = whole.checkpoint(epoch), resumed.checkpoint(epoch)
            assert all(np.array_equal(before[name], after[name]) for name in before)
        assert [line.scalars for line in whole.lines] == [line.scalars for line in resumed.lines]


def test_trajectory_kernel_is_measured_beside_the_line(tmp_path: Path) -> None:
    table = Table.from_rows(measure(networks(points=48), work(tmp_path)).entries)
    for task in ("smooth", "sign"):
        assert min(table.select("way_over_line", task=task)) >= 1  # no way is shorter than the straight one
        assert max(table.select("kernels_agree", task=task)) <= 1 + 1e-6
        along, single = (
            table.select("signal_to_noise", task=task, features=name) for name in ("trajectory", "best single")
        )
        assert (along - single).min() > 10


def test_other_seeds_are_another_run(tmp_path: Path) -> None:
    assert seeds_in_recipe((0, 1)) == 2  # as in run folders of earlier versions
    assert seeds_in_recipe((1, 0)) == [1, 0]
    assert networks().folder(work(tmp_path)) != NetworkStack((5, 6), SMALL).folder(work(tmp_path))
