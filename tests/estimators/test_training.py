"""The written-out training step, against autograd and torch's AdamW in float64."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import unlazy as ul
from unlazy.estimators.trainer import FIRST_DECAY, SECOND_DECAY, Trainer, named_settings

ROWS, COLUMNS = 30, 4
BETAS = (FIRST_DECAY, SECOND_DECAY)


def trainer(loss: str, outputs: int, **settings: Any) -> Trainer:
    """A small stack in float64."""
    estimator = ul.HalfSpaceClassifier(width=5, members=3, **settings)
    return Trainer(named_settings(estimator), COLUMNS, outputs, loss, 7, ROWS)


def sample(loss: str, outputs: int) -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(0)
    x, weights = generator.normal(size=(ROWS, COLUMNS)), generator.uniform(0.5, 2, size=ROWS)
    if loss == "squared":
        return x, generator.normal(size=(ROWS, outputs)), weights
    labels = generator.integers(max(2, outputs), size=ROWS)
    return x, np.eye(outputs)[labels] if outputs > 1 else labels[:, None].astype(float), weights


def slow_loss(loss: str, out: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean over rows, summed over members; ``out [members, n, outputs]``."""
    if loss == "squared":
        each = (out - y).square().mean(-1)
    elif y.shape[1] == 1:
        each = F.binary_cross_entropy_with_logits(out, y.expand_as(out), reduction="none")[..., 0]
    else:
        each = torch.stack([F.cross_entropy(one, y.argmax(1), reduction="none") for one in out])
    return (each * weights / weights.mean()).mean(-1).sum()


LOSSES = [("squared", 1), ("squared", 2), ("cross-entropy", 1), ("cross-entropy", 3)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("gate", ["hard", "soft"])
@pytest.mark.parametrize("experts", ["constant", "linear"])
@pytest.mark.parametrize(("loss", "outputs"), LOSSES)
def test_steps_are_those_of_autograd_and_adamw(loss: str, outputs: int, experts: str, gate: str, depth: int) -> None:
    fast, slow = (trainer(loss, outputs, experts=experts, gate=gate, depth=depth) for _ in range(2))
    x, y, weights = sample(loss, outputs)
    fast.train(x, y, weights, epochs=3, decay=False)
    net = slow.net
    rates = {"lr": slow.settings.learning_rate, "weight_decay": slow.settings.weight_decay}
    optimiser = torch.optim.AdamW(net.parameters(), betas=BETAS, **rates)
    curve = []
    for _ in range(3):
        optimiser.zero_grad()
        total = slow_loss(loss, net(torch.from_numpy(x)), torch.from_numpy(y), torch.from_numpy(weights))
        total.backward()
        optimiser.step()
        curve.append(float(total.detach()) / 3)
    assert fast.curve == pytest.approx(curve, rel=1e-12)
    for one, two in zip(fast.net.parameters(), net.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-10)


def test_batches_of_unequal_size_and_the_decay_of_the_rate() -> None:
    """Batches by hand: the same order of rows, sizes that differ by one, a rate that falls along a half cosine."""
    fast, slow = (trainer("squared", 1, batch_size=ROWS) for _ in range(2))
    x, y, weights = sample("squared", 1)
    for one in (fast, slow):
        object.__setattr__(one.settings, "batch_size", 8)  # in float64 all the same
    fast.train(x, y, weights, epochs=2)
    net, rate = slow.net, slow.settings.learning_rate
    optimiser = torch.optim.AdamW(net.parameters(), betas=BETAS, weight_decay=slow.settings.weight_decay)
    step = 0
    for epoch in range(2):
        order = torch.randperm(ROWS, generator=ul.runtime.stream(7, "order", epoch))
        for batch in order.tensor_split(4):
            optimiser.param_groups[0]["lr"] = rate * 0.5 * (1 + np.cos(np.pi * step / 8))
            some_x, some_y = torch.from_numpy(x)[batch], torch.from_numpy(y)[batch]
            some_weights = torch.from_numpy(weights / weights.mean())[batch]
            optimiser.zero_grad()
            ((net(some_x) - some_y).square().mean(-1) * some_weights).mean(-1).sum().backward()
            optimiser.step()
            step += 1
    for one, two in zip(fast.net.parameters(), net.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-10)


def test_a_pickled_training_goes_on_with_the_same_bits() -> None:
    x, y = sample("cross-entropy", 1)[:2]
    one = ul.HalfSpaceClassifier(width=5, members=2, random_state=0).partial_fit(x, y[:, 0], classes=[0, 1])
    two = pickle.loads(pickle.dumps(one))
    assert len(pickle.dumps(one)) < 60_000
    for each in (one, two):
        each.partial_fit(x, y[:, 0])
    assert one.decision_function(x).tobytes() == two.decision_function(x).tobytes()
