"""The linearised network: its flow, its Adam, its lead; a study whose verdict can flip."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unlazy import InputError, Member, build
from unlazy.kernels import reference
from unlazy.kernels.compare import regression_loss
from unlazy.kernels.flow import kernel_flow
from unlazy.kernels.tangent import tangent_features
from unlazy.runtime import stream
from unlazy.store import Run
from unlazy.studies.halfspace.moments import Nets
from unlazy.studies.halfspace.spectral import figures
from unlazy.studies.halfspace.spectral.linear import (
    FLOW_TIMES,
    flow_curves,
    linear_epochs,
    linearised_folder,
    linearised_run,
    losses_by_half,
    start_of,
    train_linearised,
)
from unlazy.studies.halfspace.spectral.study import (
    LEVELS,
    SCALES,
    at_first,
    claims,
    first_time,
    head_start,
    lead,
    reproduce,
)

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
    nets = Nets("author", arm, 1, 3, width=4, depth=2)
    data, member = nets.data().to(torch.float64), Member(0, 1e-2, nets.beta)
    net = start_of(nets, member).double()
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
    assert linear_epochs(Nets("pilot", "relu", 1, 10)) == 40
    assert linear_epochs(Nets("author", "relu", 1, 10)) == 10


def test_losses_by_half() -> None:
    data = Nets("author", "relu", 1, 1).data()
    outputs = torch.stack([torch.zeros(500), torch.where(data.groups["top"], data.y[:, 0], 0.0)])
    losses = losses_by_half(outputs, data)
    assert losses["loss"].tolist() == pytest.approx([0.5, 0.25], abs=0.01)
    assert losses["loss_top"].tolist() == pytest.approx([0.5, 0.0], abs=0.01)
    assert losses["loss_bottom"].tolist() == pytest.approx([0.5, 0.5], abs=0.01)


def test_the_flow_of_a_network_begins_at_it_and_falls() -> None:
    nets = Nets("author", "relu", 2, 1, width=4, depth=2)
    curves = flow_curves(nets)
    assert curves["loss"].shape == (len(FLOW_TIMES), 2)
    data = nets.data()
    for seed, member in enumerate(nets.recipe().members):
        own = (start_of(nets, member)(data.x) - data.y).square().mean().detach()
        slow = float(curves["loss"][0, seed])
        assert 0.9 * float(own) < slow < float(own)  # a hundredth of a decay time has passed
    assert (np.diff(curves["loss"], axis=0) <= 1e-12).all()


def test_starts_are_those_of_the_trained_networks() -> None:
    nets = Nets("pilot", "pwc", 2, 1, width=4, depth=2)
    for member in nets.recipe().members:
        wanted = build(replace(nets.spec(), gate=replace(nets.spec().gate, beta=30.0)), seed=member.seed)
        assert torch.equal(start_of(nets, member)(nets.data().x), wanted(nets.data().x))


# --- the lead ----------------------------------------------------------------------------------------

TIMES = np.array([0.0, 1.0, 2.0, 5.0])
TOP = np.array([[0.5, 0.5, 0.5], [0.04, 0.3, 0.4], [0.01, 0.04, 0.4], [0.06, 0.01, 0.4]])
BOTTOM = np.array([[0.5, 0.5, 0.5], [0.5, 0.275, 0.4], [0.5, 0.05, 0.4], [0.04, 0.04, 0.01]])


def test_times_and_values_are_those_of_first_crossings() -> None:
    assert first_time(TIMES, TOP < 0.05).tolist() == [1, 2, np.inf]
    assert first_time(TIMES, BOTTOM < 0.05).tolist() == [5, 5, 5]
    found = at_first(BOTTOM, TOP < 0.05)
    assert found[:2].tolist() == [0.5, 0.05]
    assert np.isnan(found[2])


def test_head_start_runs_from_none_to_all() -> None:
    found = head_start(TOP, BOTTOM)
    assert found[:2].tolist() == [1, 0]
    assert np.isnan(found[2])
    half_way = head_start(np.array([[0.5], [0.04]]), np.array([[0.45], [0.25]]))
    assert half_way.tolist() == pytest.approx([0.5])


# --- the study ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("spectral")
    return folder, reproduce("smoke", runs=folder / "runs", results=folder, progress=lambda *_: None)


def test_smoke_measures_everything_and_judges_nothing(smoke: tuple[Path, dict[str, Any]]) -> None:
    folder, table = smoke
    assert json.loads((folder / "spectral-bias" / "smoke.json").read_text()) == table
    assert list(table["networks"]) == ["author-pwc", "author-relu", "author-pwc-equal"]
    assert [row["verdict"] for row in table["claims"]] == ["cannot tell"]
    for name in ("lead", "halves"):
        assert (folder / "spectral-bias" / "smoke" / f"{name}.png").exists()


def test_finished_linearisations_stay_and_cut_off_ones_begin_again(smoke: tuple[Path, dict[str, Any]]) -> None:
    runs, nets = smoke[0] / "runs", SCALES["smoke"].networks()[0]
    folder = linearised_folder(nets, runs)
    before = (folder / "metrics.jsonl").read_bytes()
    linearised_run(nets, runs, "smoke")
    assert (folder / "metrics.jsonl").read_bytes() == before
    wanted = Run(folder).scalars("loss_top")[1]
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"state": "running"}))
    (folder / "metrics.jsonl").write_bytes(before[: len(before) // 2])
    linearised_run(nets, runs, "smoke")
    assert np.array_equal(Run(folder).scalars("loss_top")[1], wanted)
    assert len(wanted) == nets.epochs + 1


def entry_with(network: tuple[float, float], other: tuple[float | None, float | None], head: float) -> dict[str, Any]:
    """Times to fit (top, bottom) of the network and of both linear learners, whose head start is ``head``."""
    spread = np.linspace(0.99, 1.01, 10)
    values: dict[str, Any] = {}
    for learner, (top, bottom) in {"network": network, "linearised": other, "flow": other}.items():
        values[f"time_top_{learner}"] = [None] * 10 if top is None else list(top * spread)
        values[f"time_bottom_{learner}"] = [None] * 10 if bottom is None else list(bottom * spread)
        values[f"head_start_{learner}"] = list((1.0 if learner == "network" else head) * spread)
        values |= {f"{name}_{learner}": [0.1] * 10 for name in ("bottom_share", "left_bottom", "left_top")}
    horizons = {"network": 600.0, "linearised": 600.0, "flow": 1e10}
    return {"label": "a network", "arm": "pwc", "horizons": horizons, "values": values}


def judged(entry: dict[str, Any], scale: str = "paper") -> dict[str, Any]:
    table = {"scale": scale, "settings": {}, "provenance": {}, "networks": {"author-pwc": entry}}
    (row,) = claims(table)
    assert row["id"] == "C29"
    return row


def test_a_falsified_table_flips_the_verdict() -> None:
    """The network fits the bottom half 50 times later; its linearisation 2 times later, or as much later."""
    assert judged(entry_with((2, 100), (10, 20), 0.1))["verdict"] == "holds"
    assert judged(entry_with((2, 100), (2, 100), 1.0))["verdict"] == "fails"
    assert judged(entry_with((2, 100), (10, 20), 0.1), "smoke")["verdict"] == "cannot tell"


def test_a_bottom_half_never_fitted_counts_as_far_as_one_has_looked() -> None:
    """Infinite lead: refuted once it has lasted longer than half the network's (in logarithms), unknown before."""
    assert [part["verdict"] for part in judged(entry_with((2, 100), (10, None), 1.0))["parts"]] == ["fails", "fails"]
    assert [part["verdict"] for part in judged(entry_with((2, 100), (300, None), 1.0))["parts"]] == [
        "fails",
        "censored",
    ]
    assert [part["verdict"] for part in judged(entry_with((2, 100), (None, None), 1.0))["parts"]][1] == "censored"
    unlearned = entry_with((2, 100), (10, 20), 0.1)
    unlearned["values"]["time_bottom_network"] = [None] * 10
    assert judged(unlearned)["parts"][1]["verdict"] == "censored"


def test_lead_is_the_log_of_the_ratio_of_times() -> None:
    entry = entry_with((2, 100), (10, None), 1.0)
    assert np.allclose(lead(entry, "network"), np.log(50))
    assert np.isinf(lead(entry, "linearised")).all()
    assert np.allclose(lead(entry, "linearised", 600.0)[0], np.log(600 / 9.9))


def test_equal_halves_and_large_starts_are_controls() -> None:
    for arm in ("pwc-equal", "pwc-large"):
        assert judged(entry_with((2, 100), (2, 100), 1.0) | {"arm": arm})["parts"] == []


def test_the_figure_draws_the_median_loss_left(smoke: tuple[Path, dict[str, Any]]) -> None:
    table = json.loads(json.dumps(smoke[1]))
    values = table["networks"]["author-relu"]["values"]
    values["bottom_at_network"] = [[0.5] * 10 + [None] * 15, [0.3] * 12 + [None] * 13]
    axis = figures.lead(table).axes[1]
    line = next(line for line in axis.get_lines() if line.get_label() == "network")
    assert np.allclose(line.get_xdata(), LEVELS[:12])
    assert np.allclose(line.get_ydata(), [0.4] * 10 + [0.3] * 2)


def test_committed_rows_follow_from_the_committed_table() -> None:
    table = json.loads((Path(__file__).parent.parent / "results" / "spectral-bias" / "paper.json").read_text())
    assert claims(table) == table["claims"]
