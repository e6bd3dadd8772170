"""The linearised twin, trained and simulated, against plain gradient descent on an explicit Jacobian in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import unlazy as ul
from unlazy.runtime import InputError, Unsupported
from unlazy.training.twin import SimulatedTwin, largest_curvature, linearised_twin, simulate_twin

DOUBLE = torch.float64
SGD: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum with decay": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1),
}
OPTIMISERS = SGD | {
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.5),
}


def data(n: int = 24) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    return x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], 1)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def batches(x: Tensor, y: Tensor, steps: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(2)
    return [torch.randperm(len(x), generator=random)[:8] for _ in range(steps)]


def obvious_twin(
    model: nn.Module,
    make: Callable[..., torch.optim.Optimizer],
    x: Tensor,
    y: Tensor,
    order: list[Tensor],
    rate_of: Callable[[int], float] = lambda step: 1.0,
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
) -> Tensor:
    """Outputs at x of the linear model f_0 + J (theta - theta_0), its theta trained by the optimiser itself."""
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    jacobian = jacrev(lambda at: functional_call(model, at, (x,)))(start)
    with torch.no_grad():
        first = model(x)
    theta = {name: p.clone().requires_grad_(True) for name, p in start.items()}
    optimiser = make(list(theta.values()))
    largest = optimiser.param_groups[0]["lr"]

    def outputs() -> Tensor:
        moved = [torch.einsum("no...,...->no", jacobian[n].flatten(2), (theta[n] - start[n]).flatten()) for n in theta]
        return first + torch.stack(moved).sum(0)

    for step, rows in enumerate(order):
        optimiser.param_groups[0]["lr"] = largest * rate_of(step)
        optimiser.zero_grad()
        loss(outputs()[rows], y[rows]).backward()
        optimiser.step()
    return outputs().detach()


@pytest.mark.parametrize("name", OPTIMISERS)
def test_the_twin_is_the_linear_model_trained_alike(name: str) -> None:
    (x, y), model = data(), network()
    expected = obvious_twin(model, OPTIMISERS[name], x, y, batches(x, y, 30), lambda step: 1 / (1 + step))
    optimiser = OPTIMISERS[name](model.parameters())
    twin = linearised_twin(model, optimiser, F.mse_loss, held=(x, y))
    largest = optimiser.param_groups[0]["lr"]
    with torch.no_grad():
        start = model(x)
    for step, rows in enumerate(batches(x, y, 30)):
        optimiser.param_groups[0]["lr"] = largest / (1 + step)
        optimiser.zero_grad()
        F.mse_loss(model(x[rows]), y[rows]).backward()
        optimiser.step()
        twin.step(x[rows], y[rows])
    point = twin.compare()
    torch.testing.assert_close(twin(x).detach(), expected, rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        after = model(x)
    assert point.gap == pytest.approx(float((after - expected).norm() / (after - start).norm()), rel=1e-8)
    assert point.loss == pytest.approx(float(F.mse_loss(after, y)), rel=1e-9)
    assert point.twin_loss == pytest.approx(float(F.mse_loss(expected, y)), rel=1e-9)
    assert 0.001 < point.gap < 2


def test_training_beside_the_twin_leaves_the_network_as_it_was() -> None:
    (x, y), trained = data(), []
    for with_twin in (True, False):
        model = network()
        optimiser = torch.optim.Adam(model.parameters(), 0.01)
        twin = linearised_twin(model, optimiser, F.mse_loss, held=x) if with_twin else None
        for _ in range(5):
            optimiser.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimiser.step()
            if twin is not None:
                twin.step(x, y)
                twin.price(x, y)
                assert math.isnan(twin.compare().loss)  # no targets were given
        trained.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_a_twin_trained_afterwards_is_the_one_trained_beside() -> None:
    (x, y), model = data(), network()
    late, order = copy.deepcopy(model), batches(x, y, 12)
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 12)
    beside = ul.linearised_twin(model, optimiser, F.mse_loss, held=x)
    for rows in order:
        optimiser.zero_grad()
        F.mse_loss(model(x[rows]), y[rows]).backward()
        optimiser.step()
        beside.step(x[rows], y[rows])
        scheduler.step()
    again = torch.optim.SGD(late.parameters(), 0.1, momentum=0.9)
    after = ul.linearised_twin(late, again, F.mse_loss, held=x)
    after.train(((x[r], y[r]) for r in order), scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(again, 12))
    assert after.compare(model).gap == pytest.approx(beside.compare().gap, rel=1e-9)
    assert all(torch.equal(a, b) for a, b in zip(late.parameters(), network().parameters(), strict=True))


def test_layers_that_are_not_linearised_train_as_they_are() -> None:
    """The readout is linear in its own weights: linearising it alone changes nothing, so network and twin stay together."""
    (x, y), model = data(), network()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    readout = linearised_twin(model, optimiser, F.mse_loss, held=x, linear=["2.bias"])
    body = linearised_twin(model, optimiser, F.mse_loss, held=x, linear=["0.*"])
    for _ in range(20):
        optimiser.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimiser.step()
        readout.step(x, y)
        body.step(x, y)
    assert readout.compare().gap < 1e-10
    assert body.compare().gap > 1e-4


def test_batch_norm_in_training_mode_normalises_by_the_batch_on_both_sides() -> None:
    (x, y), model = data(), nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    model[0].requires_grad_(False)  # linear in what is left to train: the gap is 0 if both sides normalise alike
    model[1].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    optimiser = torch.optim.SGD(model[2].parameters(), 0.1)
    twin = linearised_twin(model, optimiser, F.mse_loss, held=x)
    for _ in range(10):
        optimiser.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimiser.step()
        twin.step(x, y)
    assert twin.compare().gap < 1e-10
    assert "batch-norm" in twin.notes[0]
    assert model[1].running_mean is not None


@pytest.mark.parametrize("name", SGD)
def test_the_simulated_twin_is_the_trained_one(name: str) -> None:
    (x, y), model, order = data(), network(), batches(*data(), 30)
    held = x + 0.1
    every = torch.cat([x, held])
    targets = torch.cat([y, y])
    expected = obvious_twin(model, SGD[name], every, targets, order)
    group = SGD[name](model.parameters()).param_groups[0]
    found = simulate_twin(
        model,
        (x, y),
        F.mse_loss,
        held=held,
        rates=[group["lr"]] * 30,
        momentum=group["momentum"],
        decay=group["weight_decay"],
        batches=order,
    )
    torch.testing.assert_close(found.outputs[-1], expected[len(x) :], rtol=1e-8, atol=1e-10)
    assert found.losses[-1] == pytest.approx(float(F.mse_loss(expected[: len(x)], y)), rel=1e-8)


def test_in_real_time_the_simulated_twin_follows_small_steps() -> None:
    (x, y), model = data(), network()

    def simulated(rate: float, momentum: float = 0.0) -> SimulatedTwin:
        return simulate_twin(model, (x, y), F.mse_loss, held=x, rates=[rate] * 400, momentum=momentum)

    everything = [torch.arange(len(x))] * 400
    expected = obvious_twin(model, lambda p: torch.optim.SGD(p, 0.01), x, y, everything)
    with torch.no_grad():
        went = (expected - model(x)).norm()
    found = simulated(0.01)
    assert float((found.outputs[-1] - expected).norm() / went) < 0.01
    assert float((simulated(0.001, 0.9).outputs[-1] - expected).norm() / went) < 0.02
    assert found.defensible
    assert not simulated(100.0).defensible


def test_a_simulated_flow_follows_a_start_that_is_sure_and_wrong() -> None:
    """There the loss has no curvature at first, and much later; steps that suit the start would jump over everything."""
    (x, _), model = data(), network()
    with torch.no_grad():
        model[2].weight.mul_(30)
    y = model(x).argmin(1)
    rates = [0.002] * 300
    everything = [torch.arange(len(x))] * len(rates)
    expected = obvious_twin(model, lambda p: torch.optim.SGD(p, rates[0]), x, y, everything, loss=F.cross_entropy)
    found = simulate_twin(model, (x, y), F.cross_entropy, held=x, rates=rates)
    with torch.no_grad():
        went = (expected - model(x)).norm()
    assert float((found.outputs[-1] - expected).norm() / went) < 0.02


def test_a_simulated_twin_of_a_loss_without_curvature() -> None:
    (x, y), model = data(), network()
    order = [torch.arange(len(x))] * 20
    found = simulate_twin(model, (x, y), F.l1_loss, held=x, rates=[0.01] * 20, batches=order)
    expected = obvious_twin(model, lambda p: torch.optim.SGD(p, 0.01), x, y, order, loss=F.l1_loss)
    torch.testing.assert_close(found.outputs[-1], expected, rtol=1e-8, atol=1e-10)
    assert simulate_twin(model, (x, y), F.l1_loss, held=x, rates=[0.01] * 20).outputs.isfinite().all()


def test_largest_curvature_is_the_top_eigenvalue() -> None:
    (x, y), model = data(), network()
    twin = linearised_twin(model, torch.optim.SGD(model.parameters(), 0.1), F.mse_loss, held=x)
    rows = torch.cat([part for _, part in twin.jacobian.rows(x)]).flatten(0, 1)
    expected = float(torch.linalg.eigvalsh(rows.T @ rows * 2 / y.numel())[-1])
    assert largest_curvature(twin.jacobian, x, y, F.mse_loss, 200) == pytest.approx(expected, rel=1e-6)


def test_what_a_twin_cannot_follow_is_refused() -> None:
    (x, _), model = data(), network()
    with pytest.raises(Unsupported, match="LBFGS"):
        linearised_twin(model, torch.optim.LBFGS(model.parameters()), F.mse_loss, held=x)
    with pytest.raises(InputError, match="make the twin from the model"):
        linearised_twin(model, torch.optim.SGD(network().parameters(), 0.1), F.mse_loss, held=x)
    normalised = nn.Sequential(model, nn.BatchNorm1d(2).double())
    with pytest.raises(Unsupported, match="Train the twin"):
        simulate_twin(normalised, (x, x), F.mse_loss, held=x, rates=[0.1])
