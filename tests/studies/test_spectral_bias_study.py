"""The linearised network: its flow, its Adam, its lead; a study whose verdict can flip."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import mechanisms
from unlazy import InputError, Member, build
from unlazy.kernels import reference
from unlazy.kernels.compare import regression_loss
from unlazy.kernels.flow import kernel_flow
from unlazy.kernels.tangent import tangent_features
from unlazy.runtime import stream
from unlazy.store import Run
from unlazy.studies.halfspace.circle_checkpoints import CircleNetworks, first_time
from unlazy.studies.halfspace.spectral_bias import (
    FLOW_TIMES,
    LEVELS,
    STUDY,
    build_start,
    flow_curves,
    head_start,
    lead_share,
    linearised_run,
    losses_by_half,
    train_linearised,
    value_when_first,
)
from unlazy.studies.study import Results, Work
from unlazy.studies.table import Table

RANDOM = torch.Generator().manual_seed(0)
ROWS = torch.randn(2, 7, 5, generator=RANDOM, dtype=torch.float64)
KERNEL = ROWS @ ROWS.mT
Y = torch.randn(7, 2, generator=RANDOM, dtype=torch.float64)
START = torch.randn(2, 7, 2, generator=RANDOM, dtype=torch.float64)


# --- the flow ----------------------------------------------------------------------------------------


def test_flow_is_the_matrix_exponential() -> None:
    flow = kernel_flow(KERNEL, Y, START, [0.0, 0.3, 4.0])
    for index, time in enumerate((0.0, 0.3, 4.0)):
        wanted = Y + torch.linalg.matrix_exp(-2 * time * KERNEL / 14) @ (START - Y)
        assert torch.allclose(flow[index], wanted, atol=1e-10)


def test_flow_is_the_limit_of_small_gradient_steps() -> None:
    """A linear model trained by gradient descent with ever smaller steps."""
    weights, rate = torch.zeros(5, 2, dtype=torch.float64), 1e-4
    for _ in range(5000):
        weights = weights - rate * 2 / 14 * ROWS[0].T @ (ROWS[0] @ weights - Y)
    flow = kernel_flow(KERNEL[0], Y, 0 * Y, [5000 * rate])
    assert torch.allclose(flow[0], ROWS[0] @ weights, atol=1e-4)


def test_flow_ends_where_regression_does() -> None:
    late = kernel_flow(KERNEL, Y, 0 * START, [1e9])[0]
    assert torch.allclose((late - Y).square().mean((1, 2)), regression_loss(KERNEL, Y), atol=1e-8)
    with pytest.raises(InputError, match="at least 0"):
        kernel_flow(KERNEL, Y, START, [-1.0])


# --- the linearised network --------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["relu", "pwc"])
def test_linearised_training_is_adam_on_the_first_order_expansion(arm: str) -> None:
    """Against PyTorch's Adam and autograd on f_0 + J delta, J row by row, three epochs in float64."""
    nets = CircleNetworks("author", arm, (0,), 3, width=4, depth=2)
    data, member = nets.data().to(torch.float64), Member(0, 1e-2, nets.training().recipe.members[0].beta)
    net = build_start(nets, member).double()
    start = net(data.x)[:, 0].detach()
    outputs = train_linearised(tangent_features(net, data.x)[:, 0], start, data, member, epochs=3, batch=32)

    jacobian = reference.tangent_features(net, data.x)[:, 0].detach()
    delta = torch.zeros(jacobian.shape[1], dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([delta], 1e-2)
    for epoch in range(3):
        for some in torch.randperm(len(data), generator=stream(0, "order", epoch)).split(32):
            adam.zero_grad()
            (start[some] + jacobian[some] @ delta - data.y[some, 0]).square().mean().backward()
            adam.step()
    assert torch.allclose(outputs[-1], (start + jacobian @ delta).detach(), atol=1e-10)
    assert torch.equal(outputs[0], start)
    assert float((outputs[-1] - start).abs().max()) > 0.1


def test_one_linearisation_is_watched_longer() -> None:
    declared = STUDY.cases(STUDY.settings("paper"), [0])
    assert {(case.preset, case.arm) for case in declared if case.longer != 1} == {("pilot", "relu")}
    (one,) = [case for case in declared if case.longer != 1]
    assert one.linearised_recipe()["linearised"]["epochs"] == 4 * one.epochs


def test_losses_by_half() -> None:
    data = CircleNetworks("author", "relu", (0,), 1).data()
    outputs = torch.stack([torch.zeros(500), torch.where(data.groups["top"], data.y[:, 0], 0.0)])
    losses = losses_by_half(outputs, data)
    assert losses["loss"].tolist() == pytest.approx([0.5, 0.25], abs=0.01)
    assert losses["loss_top"].tolist() == pytest.approx([0.5, 0.0], abs=0.01)
    assert losses["loss_bottom"].tolist() == pytest.approx([0.5, 0.5], abs=0.01)


def test_the_flow_of_a_network_begins_at_it_and_falls() -> None:
    nets = CircleNetworks("author", "relu", (0, 1), 1, width=4, depth=2)
    curves = flow_curves(nets)
    assert curves["loss"].shape == (len(FLOW_TIMES), 2)
    data = nets.data()
    for seed, member in enumerate(nets.training().recipe.members):
        own = (build_start(nets, member)(data.x) - data.y).square().mean().detach()
        slow = float(curves["loss"][0, seed])
        assert 0.9 * float(own) < slow < float(own)  # a hundredth of a decay time has passed
    assert (np.diff(curves["loss"], axis=0) <= 1e-12).all()


def test_starts_are_those_of_the_trained_networks() -> None:
    nets = CircleNetworks("pilot", "pwc", (0, 1), 1, width=4, depth=2)
    for member in nets.training().recipe.members:
        wanted = build(replace(nets.spec(), gate=replace(nets.spec().gate, beta=30.0)), seed=member.seed)
        assert torch.equal(build_start(nets, member)(nets.data().x), wanted(nets.data().x))


# --- the lead ----------------------------------------------------------------------------------------

TIMES = np.array([0.0, 1.0, 2.0, 5.0])
TOP = np.array([[0.5, 0.5, 0.5], [0.04, 0.3, 0.4], [0.01, 0.04, 0.4], [0.06, 0.01, 0.4]])
BOTTOM = np.array([[0.5, 0.5, 0.5], [0.5, 0.275, 0.4], [0.5, 0.05, 0.4], [0.04, 0.04, 0.01]])


def test_times_and_values_are_those_of_first_crossings() -> None:
    assert first_time(TIMES, TOP < 0.05).tolist() == [1, 2, np.inf]
    assert first_time(TIMES, BOTTOM < 0.05).tolist() == [5, 5, 5]
    found = value_when_first(BOTTOM, TOP < 0.05)
    assert found[:2].tolist() == [0.5, 0.05]
    assert np.isnan(found[2])


def test_head_start_runs_from_none_to_all() -> None:
    found = head_start(TOP, BOTTOM)
    assert found[:2].tolist() == [1, 0]
    assert np.isnan(found[2])
    half_way = head_start(np.array([[0.5], [0.04]]), np.array([[0.45], [0.25]]))
    assert half_way.tolist() == pytest.approx([0.5])


def test_lead_is_the_log_of_the_ratio_of_times() -> None:
    top, bottom = np.array([2.0, 2.0, np.inf]), np.array([8.0, np.inf, np.inf])
    own_top, own_bottom = np.full(3, 2.0), np.full(3, 32.0)
    share = lead_share(top, bottom, own_top, own_bottom)
    assert share[0] == pytest.approx(0.5)
    assert np.isinf(share[1])
    assert np.isnan(share[2])


def test_learners_that_fit_nothing_say_nothing() -> None:
    """Absence is claimed: neither an endless lead of the network nor a top half never fitted may count as a small share."""
    two, never = np.full(2, 2.0), np.full(2, np.inf)
    missing = np.full(2, np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        for times in ((two, two, two, never), (never, two, two, two * 9), (two, two, never, never)):
            assert np.isnan(lead_share(*times)).all()
        for place in range(4):
            times = [two, two * 3, two, two * 9]
            times[place] = missing
            assert np.isnan(lead_share(*times)).all()


# --- the study ---------------------------------------------------------------------------------------

AUTHOR_PWC = {"preset": "author", "arm": "pwc"}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Results:
    results, made = mechanisms.run_smoke(STUDY, tmp_path_factory.mktemp("spectral"))
    assert [row["verdict"] for row in made.results["claims"]] == ["cannot tell"]
    return results


@pytest.fixture(scope="module")
def paper() -> Results:
    return mechanisms.committed_results(STUDY)


def test_smoke_measures_and_draws_everything(smoke: Results) -> None:
    assert smoke.table.unique("arm") == ["pwc", "relu", "pwc-equal"]
    assert smoke.table.unique("learner", arm="relu") == ["network", "linearised", "flow"]
    assert [float(level) for level in smoke.table.unique("level")] == list(LEVELS)
    for name in ("lead", "halves"):
        assert (smoke.folder / f"{name}.png").exists()


def test_finished_linearisations_stay_and_cut_off_ones_begin_again(smoke: Results) -> None:
    case = smoke.cases()[0]
    work = Work(STUDY.name, "smoke", smoke.work.runs)
    folder = case.linearised_folder(work)
    before = (folder / "metrics.jsonl").read_bytes()
    linearised_run(case, work)
    assert (folder / "metrics.jsonl").read_bytes() == before
    wanted = Run(folder).scalars("loss_top")[1]
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"state": "running"}))
    (folder / "metrics.jsonl").write_bytes(before[: len(before) // 2])
    linearised_run(case, work)
    assert np.array_equal(Run(folder).scalars("loss_top")[1], wanted)
    assert len(wanted) == case.epochs + 1


def table_with(table: Table, network: tuple[float, float], other: tuple[float, float], head: float) -> Table:
    """Times to fit (top, bottom) of the author's DLGNs and of their linearisations, whose head start is ``head``."""
    spread = np.linspace(0.99, 1.01, 20)
    for learner, times, start in (("network", network, 1.0), ("linearised", other, head)):
        where = {**AUTHOR_PWC, "learner": learner}
        for half, time in zip(("top", "bottom"), times, strict=True):
            table = mechanisms.changed(table, time * spread, quantity="time", half=half, **where)
        table = mechanisms.changed(table, start * spread, quantity="head_start", **where)
    return table


def first_parts(table: Table, seeds: tuple[int, ...]) -> list[str]:
    """Verdicts of head start and lead of the author's DLGNs."""
    row = mechanisms.judged(STUDY, table, seeds)
    assert row["id"] == "C29"
    return [part["verdict"] for part in row["parts"][:2]]


def test_a_falsified_table_flips_the_parts(paper: Results) -> None:
    """The network fits the bottom half 50 times later; its linearisation 2 times later, or as much later."""
    assert first_parts(paper.table, paper.seeds) == ["fails", "fails"]
    assert first_parts(table_with(paper.table, (2, 100), (10, 20), 0.1), paper.seeds) == ["holds", "holds"]
    assert first_parts(table_with(paper.table, (2, 100), (2, 100), 1.0), paper.seeds) == ["fails", "fails"]


def test_a_bottom_half_never_fitted_counts_as_later_than_the_end_of_training(paper: Results) -> None:
    """Infinite lead: refuted once it has lasted longer than half the network's (in logarithms), unknown before."""
    never = np.inf
    assert first_parts(table_with(paper.table, (2, 100), (10, never), 1.0), paper.seeds) == ["fails", "fails"]
    assert first_parts(table_with(paper.table, (2, 100), (300, never), 1.0), paper.seeds) == ["fails", "censored"]
    unfitted = table_with(paper.table, (2, 100), (never, never), 1.0)
    assert first_parts(unfitted, paper.seeds)[1] in ("censored", "not measured")
    unlearned = table_with(paper.table, (2, never), (10, 20), 0.1)
    assert first_parts(unlearned, paper.seeds)[1] in ("censored", "not measured")


def test_author_is_judged_pilot_is_control_the_rest_is_shown() -> None:
    (claim,) = STUDY.claims
    assert [part.says.split(",")[0] for part in claim.parts] == ["author"] * 6
    assert [part.says.split(",")[0] for part in claim.controls] == ["pilot"] * 6
    judged = " ".join(part.says for part in (*claim.parts, *claim.controls))
    shown = " ".join(one.says for one in claim.shows)
    for words in ("equal halves", "large start", "first tangent kernel's flow"):
        assert words not in judged
        assert words in shown


def test_the_figure_draws_the_median_loss_left(smoke: Results) -> None:
    table = smoke.table
    for seed, left, reached in ((0, 0.5, 10), (1, 0.3, 12)):
        for place, level in enumerate(LEVELS):
            where = {"arm": "relu", "learner": "network", "seed": seed, "level": level}
            table = mechanisms.changed(table, left if place < reached else np.nan, quantity="bottom_loss", **where)
    axis = STUDY.figures[0].draw(replace(smoke, table=table)).axes[1]
    line = next(line for line in axis.get_lines() if line.get_label() == "network")
    assert np.allclose(line.get_xdata(), LEVELS[:12])
    assert np.allclose(line.get_ydata(), [0.4] * 10 + [0.3] * 2)


def test_committed_verdicts_follow_from_the_committed_table(paper: Results) -> None:
    mechanisms.check_committed(STUDY)


def test_missing_numbers_never_make_absence_hold(paper: Results) -> None:
    """As it is, and where the claim held: the linearisation has a tenth of the lead."""
    mechanisms.check_missing_numbers_help_nobody(STUDY, paper.table, paper.seeds)
    mechanisms.check_missing_numbers_help_nobody(STUDY, table_with(paper.table, (2, 100), (10, 20), 0.1), paper.seeds)
