"""Predictions of gates: the derivation against autograd, extremal vectors against a scan of the circle."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unlazy.models.build import build
from unlazy.models.gates import SoftGate
from unlazy.models.spec import NetSpec
from unlazy.runtime import stream
from unlazy.studies.beyond import gate_prediction as study
from unlazy.studies.study import Work


def case(**changes: object) -> study.Stack:
    return replace(study.Stack("circle", "dlgn", "small", (0, 1), 10, 60, 6, 3), **changes)  # type: ignore[arg-type]


def first_gate_gradient(experts: str, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, residuals, and minus the gradient by the weights of first-layer gates, of a network with small gates."""
    random = stream(3)
    x = torch.randn(50, 7, generator=random, dtype=torch.float64)
    y = torch.randn(50, 1, generator=random, dtype=torch.float64)
    spec = NetSpec(7, experts=experts, width=6, depth=3, gate=SoftGate(4.0), gate_bias=False, value_bias=False)
    net = build(spec, dtype=torch.float64)
    with torch.no_grad():
        for _, parameter in net.branch("gate"):
            parameter.mul_(scale)
    out = net(x)
    ((y - out).square().mean() / 2).backward()
    gradient = net.gate_layers[0].weight.grad
    assert isinstance(gradient, torch.Tensor)
    return x, (y - out).detach()[:, 0], -gradient


def test_small_gates_of_constant_experts_move_along_one_line() -> None:
    x, residual, force = first_gate_gradient("constant", 1e-4)
    s = x.T @ residual / len(x)
    cosine = force @ s / (force.norm(dim=1) * s.norm())
    assert torch.allclose(cosine.abs(), torch.ones(6, dtype=torch.float64), atol=1e-6)
    assert len(cosine.sign().unique()) == 2  # with both signs
    large = first_gate_gradient("constant", 3.0)[2]
    assert (large @ s / (large.norm(dim=1) * s.norm())).abs().min() < 0.99  # the assumption of small gates is needed


def test_small_gates_of_linear_experts_move_in_the_image_of_m() -> None:
    """-gradient = M B: the rank of the forces is that of B, and M^-1 force does not depend on the targets' residual."""
    x, residual, force = first_gate_gradient("linear", 1e-4)
    m = x.T @ (residual[:, None] * x) / len(x)
    carried = torch.linalg.solve(m, force.T)  # B, up to beta / 4
    spec = NetSpec(7, experts="linear", width=6, depth=3, gate=SoftGate(4.0), gate_bias=False, value_bias=False)
    net = build(spec, dtype=torch.float64)
    # what flows through gates of the first layer when all gates are one half: 4 A . x / beta is its derivative by the gate
    half = [torch.full((7, 6), 0.5, dtype=torch.float64) for _ in range(3)]
    half[0].requires_grad_()
    (through,) = torch.autograd.grad(net.value(torch.eye(7, dtype=torch.float64), half).sum(), half[0])
    cosine = (through * carried).sum(0) / (through.norm(dim=0) * carried.norm(dim=0))
    assert cosine.min() > 0.99  # gates of later layers add terms of the size of small gate weights


def test_extremal_vectors_are_the_peaks_of_a_scan() -> None:
    random = stream(5)
    x = torch.randn(40, 2, generator=random, dtype=torch.float64)
    y = torch.randn(40, generator=random, dtype=torch.float64).sign()
    angle = torch.linspace(0, 2 * math.pi, 20001, dtype=torch.float64)[:-1]
    w = torch.stack([angle.cos(), angle.sin()], 1)
    height = ((w @ x.T).clamp_min(0) * y).mean(1)
    peaks = w[(height > height.roll(1)) & (height >= height.roll(-1)) & (height > 1e-9)]
    found = study.extremal_vectors(x, y)
    assert (found @ peaks.T).max(1).values.min() > 0.999
    assert (peaks @ found.T).max(1).values.min() > 0.99  # none is missed, but for those next to a higher one


def test_the_prediction_of_the_circle_is_its_top() -> None:
    data = study.load_data(case(), Work("gate-prediction", "smoke", Path()))
    s = study.predictions(data, "dlgn")["derived"][0]
    assert abs(float(s[1])) > 0.99
    assert data.x.mean(0).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("count", "dimensions", "wanted"), [(1, 2, 2 / math.pi), (1, 100, math.sqrt(2 / math.pi / 100))]
)
def test_chance_is_that_of_random_directions(count: int, dimensions: int, wanted: float) -> None:
    assert study.random_cosine(count, dimensions, "dlgn") == pytest.approx(wanted, rel=0.05)
    assert study.random_cosine(count, dimensions, "relu") == pytest.approx(0, abs=0.02)


def test_rows_hold_both_moments(tmp_path: Path) -> None:
    for network in study.NETWORKS:
        rows = study.measure(case(network=network, steps=3), Work("gate-prediction", "smoke", tmp_path)).entries
        places = {(row["at"], row["prediction"]) for row in rows if row["quantity"] == "excess"}
        assert places == {(at, p) for at in ("early", "end") for p in ("derived", "mean", "component", "extremal")}
