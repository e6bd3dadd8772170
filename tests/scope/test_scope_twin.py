"""The twin of a watched network: beside the training, afterwards, simulated; and what the verdict then says."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unlazy.runtime import InputError, Unsupported
from unlazy.scope.history import History
from unlazy.scope.scope import Scope
from unlazy.scope.summary import TwinSummary
from unlazy.scope.verdict import judge
from unlazy.store import Run
from unlazy.training.twin import linearised_twin

STEPS, RATE = 25, 0.3


class InDict(nn.Module):
    """Returns its logits in a dict, as Hugging Face models do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.model(x)}


def setting(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, tuple[Tensor, Tensor], list[Tensor]]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 2))
    x, new = torch.randn(96, 4), torch.randn(64, 4)
    y, other = ((part[:, 0] * part[:, 1] > 0).long() for part in (x, new))
    return net, x, y, (new, other), [torch.randperm(96)[:32] for _ in range(STEPS)]


def train(net: nn.Module, scope: Scope | None, twin=None, momentum: float = 0.0) -> None:  # type: ignore[no-untyped-def]
    _, x, y, _, order = setting()
    optimiser = twin.optimiser if twin is not None else torch.optim.SGD(net.parameters(), RATE, momentum=momentum)
    for step, rows in enumerate(order, 1):
        optimiser.zero_grad()
        out = net(x[rows])
        F.cross_entropy(out["logits"] if isinstance(out, dict) else out, y[rows]).backward()
        optimiser.step()
        if twin is not None:
            twin.step(x[rows], y[rows])
        if scope is not None:
            scope.step(step)


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_verdict_quotes_a_twin_trained_beside(wrapped: bool, tmp_path: Path) -> None:
    net, x, y, held, _ = setting()
    alone = copy.deepcopy(net)
    watched = InDict(net) if wrapped else net
    scope = Scope(watched, (x, y), tmp_path / "run", budget=math.inf, strict=True)
    twin = scope.twin(torch.optim.SGD(watched.parameters(), RATE), F.cross_entropy, held=held)
    train(watched, scope, twin)
    verdict = scope.verdict()
    scope.finish()
    train(alone, None)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), alone.parameters(), strict=True))
    last = twin.curve[-1]
    assert last.step == STEPS
    assert verdict.gap == last.gap
    assert verdict.twin is not None
    assert set(verdict.twin.gap) == {point.step for point in twin.curve}
    assert len(twin.curve) > 5
    with torch.no_grad():
        assert last.loss == pytest.approx(float(F.cross_entropy(net(held[0]), held[1])), rel=1e-5)
    assert f"linearised at its start, with the same optimiser, batches and steps, is at {last.twin_loss:.3g}" in str(
        verdict
    )
    written = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert written["twin"]["twin_loss"] == pytest.approx(last.twin_loss)
    again = judge(History.from_run(Run(tmp_path / "run")))
    assert (again.label, again.gap) == (verdict.label, pytest.approx(verdict.gap))


def test_a_twin_trained_afterwards_gives_the_same_gap_and_tells_its_price() -> None:
    net, x, y, held, order = setting()
    other = copy.deepcopy(net)
    beside = Scope(net, (x, y), budget=math.inf, strict=True)
    train(net, beside, beside.twin(torch.optim.SGD(net.parameters(), RATE), F.cross_entropy, held=held))
    late, told = Scope(other, (x, y), strict=True), list[str]()
    train(other, late)
    before = [p.detach().clone() for p in other.parameters()]
    late.twin(
        lambda parameters: torch.optim.SGD(parameters, RATE),
        F.cross_entropy,
        held=held,
        batches=[(x[rows], y[rows]) for rows in order],
        say=told.append,
    )
    assert late.verdict().gap == pytest.approx(beside.verdict().gap, rel=1e-4)
    assert f"{STEPS} steps of the twin take about" in told[0]
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_simulated_twin_is_near_the_trained_one(momentum: float) -> None:
    net, x, y, held, order = setting()
    scope = Scope(net, (x, y), strict=True)
    train(net, scope, momentum=momentum)
    scope.simulate_twin((x, y), F.cross_entropy, [RATE] * STEPS, momentum=momentum, batches=order, held=held)
    simulated = scope.verdict()
    scope.twin(
        lambda parameters: torch.optim.SGD(parameters, RATE, momentum=momentum),
        F.cross_entropy,
        held=held,
        batches=[(x[rows], y[rows]) for rows in order],
        say=lambda text: None,
    )
    trained = scope.verdict()
    assert simulated.gap == pytest.approx(trained.gap, rel=1e-3)
    assert simulated.twin is not None
    assert trained.twin is not None
    assert (simulated.twin.simulated, trained.twin.simulated) == (True, False)
    assert simulated.twin.twin_loss == pytest.approx(trained.twin.twin_loss, rel=1e-4)
    assert "would be at about" in simulated.gap_text()


def test_a_finished_run_gets_its_twin_and_a_new_verdict(tmp_path: Path) -> None:
    net, x, y, held, order = setting()
    with Scope(net, (x, y), tmp_path / "run", strict=True) as scope:
        train(net, scope)
    estimated = json.loads((tmp_path / "run" / "verdict.json").read_text())
    options = {"held": held, "batches": [(x[rows], y[rows]) for rows in order], "say": lambda text: None}
    twin = scope.twin(lambda parameters: torch.optim.SGD(parameters, RATE), F.cross_entropy, **options)
    written = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert estimated["twin"] is None
    assert scope.verdict().gap == written["gap"] == judge(Run(tmp_path / "run")).gap == twin.curve[-1].gap
    assert Run(tmp_path / "run").status()["state"] == "finished"
    with torch.no_grad():
        net[0].weight.add_(1.0)
    with pytest.raises(InputError, match="was trained on after the scope had finished"):
        scope.twin(lambda parameters: torch.optim.SGD(parameters, RATE), F.cross_entropy, **options)


def test_layers_that_are_set_free_later_train_from_then_on_in_the_twin() -> None:
    """Beside and afterwards alike, and as a linear model whose first layer has a learning rate of zero at first."""
    _, x, y, held, order = setting()
    batches, free = [(x[rows], y[rows]) for rows in order], 10

    def trained(beside: bool) -> TwinSummary | None:
        net = setting()[0]
        net[0].requires_grad_(False)
        optimiser = torch.optim.SGD(net.parameters(), RATE)
        scope = Scope(net, (x, y), budget=math.inf, strict=True)
        twin = scope.twin(optimiser, F.cross_entropy, held=held) if beside else None
        for step, (some, targets) in enumerate(batches, 1):
            net[0].requires_grad_(step > free)
            optimiser.zero_grad()
            F.cross_entropy(net(some), targets).backward()
            optimiser.step()
            if twin is not None:
                twin.step(some, targets)
            scope.step(step)
        if twin is None:
            make = lambda parameters: torch.optim.SGD(parameters, RATE)  # noqa: E731
            scope.twin(make, F.cross_entropy, held=held, batches=batches, say=lambda text: None)
        return scope.verdict().twin

    net = setting()[0]
    groups = [{"params": list(net[0].parameters()), "lr": 0.0}, {"params": list(net[2].parameters()), "lr": RATE}]
    optimiser = torch.optim.SGD(groups)
    twin = linearised_twin(net, optimiser, F.cross_entropy, held=held)
    for step, (some, targets) in enumerate(batches, 1):
        optimiser.param_groups[0]["lr"] = RATE if step > free else 0.0
        twin.step(some, targets)
    with torch.no_grad():
        expected = float(F.cross_entropy(twin(held[0]), held[1]))
    for beside in (True, False):
        found = trained(beside)
        assert found is not None
        assert found.twin_loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("beside", [True, False])
def test_a_language_model_has_a_twin(beside: bool) -> None:
    """All positions count, with the loss that training uses."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 7))
    start = copy.deepcopy(net)
    x = torch.randint(7, (48, 5))
    y = (x + 1) % 7

    def loss(out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), targets.flatten())

    optimiser = torch.optim.SGD(net.parameters(), RATE)
    scope = Scope(net, (x, y), budget=math.inf, strict=True)
    twin = scope.twin(optimiser, loss) if beside else None
    for step in range(1, STEPS + 1):
        optimiser.zero_grad()
        loss(net(x), y).backward()
        optimiser.step()
        if twin is not None:
            twin.step(x, y)
        scope.step(step)
    if twin is None:
        make = lambda parameters: torch.optim.SGD(parameters, RATE)  # noqa: E731
        scope.twin(make, loss, batches=[(x, y)] * STEPS, say=lambda text: None)
    plain = linearised_twin(start, torch.optim.SGD(start.parameters(), RATE), loss, held=(x, y))
    plain.train([(x, y)] * STEPS)
    assert scope.verdict().gap == pytest.approx(plain.compare(net).gap, rel=1e-4)


def test_the_twin_of_batch_norm_does_not_depend_on_the_mode_afterwards() -> None:
    _, x, y, held, order = setting()
    batches, gaps = [(x[rows], y[rows]) for rows in order], []
    for evaluate in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 2))
        scope = Scope(net, (x, y), strict=True)
        train(net, scope)
        net.train(not evaluate)
        make = lambda parameters: torch.optim.SGD(parameters, RATE)  # noqa: E731
        scope.twin(make, F.cross_entropy, held=held, batches=batches, say=lambda text: None)
        gaps.append(scope.verdict().gap)
        assert any("batch-norm normalises by the batch" in note for note in scope.verdict().notes)
    assert gaps[0] == gaps[1]


def test_what_has_no_twin_is_refused_with_a_way_out() -> None:
    net, x, y, _, _ = setting()
    scope = Scope(net, (x, y), strict=True)
    train(net, scope)
    optimiser = torch.optim.SGD(net.parameters(), RATE)
    with pytest.raises(InputError, match="before the first step; afterwards give batches="):
        scope.twin(optimiser, F.cross_entropy)
    with pytest.raises(InputError, match="give batches= to train the twin afterwards"):
        scope.twin(lambda parameters: torch.optim.SGD(parameters, RATE), F.cross_entropy)
    with pytest.raises(InputError, match="beyond the largest stable one"):
        scope.simulate_twin((x, y), F.cross_entropy, [1e4] * STEPS)
    scope.finish()
    with pytest.raises(InputError, match="before the first step"):
        scope.twin(optimiser, F.cross_entropy)
    normalised = nn.Sequential(net, nn.BatchNorm1d(2))
    watched = Scope(normalised, (x, y), strict=True)
    with pytest.raises(Unsupported, match="Train the twin"):
        watched.simulate_twin((x, y), F.cross_entropy, [0.1])
