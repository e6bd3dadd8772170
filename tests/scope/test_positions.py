"""Models that answer at every position: the loss counts all targets that are not ignored, other measures read a part."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unlazy.kernels.capture import call_model
from unlazy.runtime import InputError, stream
from unlazy.scope.positions import IGNORED, MOST_OUTPUTS, PositionOutputs, read_positions
from unlazy.scope.probe_set import parse_probe_set
from unlazy.scope.scope import Scope
from unlazy.store import Run

N, LENGTH = 40, 6


class NextToken(nn.Module):
    """Answers at every position from the token there and the mean of those before it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(classes, 12), nn.Linear(12, classes)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        seen = self.embed(tokens)
        past = seen.cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        return {"logits": self.head(torch.tanh(seen + past))}


def sequences(classes: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(classes, (N, LENGTH), generator=stream(0, "positions"))
    targets = (tokens + 1) % classes
    targets[:, -1] = IGNORED
    targets[::3, 3:] = IGNORED
    return tokens, targets


@pytest.mark.parametrize("classes", [5, 300])
def test_the_loss_is_that_of_all_targets_that_count(classes: int, tmp_path) -> None:
    model, (tokens, targets) = NextToken(classes).double(), sequences(classes)
    early = torch.zeros(N, LENGTH, dtype=torch.bool)
    early[:, :2] = True
    first = torch.arange(N) < 20
    options = {"groups": {"early": early, "first": first}, "budget": float("inf"), "views": ("tangents",)}
    optimiser = torch.optim.SGD(model.parameters(), 1.0)
    with Scope(model, (tokens, targets), tmp_path / "run", strict=True, **options) as scope:
        for step in range(1, 4):
            optimiser.zero_grad()
            F.cross_entropy(model(tokens)["logits"].flatten(0, 1), targets.flatten(), ignore_index=IGNORED).backward()
            optimiser.step()
            scope.step(step)
    logits = model(tokens)["logits"].detach()

    def expected(inside: Tensor) -> float:
        picked = targets.where(inside, torch.tensor(IGNORED))
        return float(F.cross_entropy(logits.flatten(0, 1), picked.flatten(), ignore_index=IGNORED))

    last = scope.history.last
    everywhere = torch.ones(N, LENGTH, dtype=torch.bool)
    assert last("loss") == pytest.approx(expected(everywhere))
    assert last("loss_early") == pytest.approx(expected(early))
    assert last("loss_first") == pytest.approx(expected(first[:, None] & everywhere))
    counted = targets != IGNORED
    assert last("accuracy") == pytest.approx(float((logits.argmax(2) == targets)[counted].double().mean()))
    assert {"linearisation_error", "tangent_distance", "tangent_alignment"} <= scope.history.scalars.keys()
    output = scope.history.array("output")
    assert output is not None
    assert output.shape[1] <= MOST_OUTPUTS
    assert Run(tmp_path / "run").status()["state"] == "finished"


def test_outputs_are_the_logits_at_positions_that_count() -> None:
    model, (tokens, targets) = NextToken(5), sequences(5)
    seen, probe = read_positions(model, parse_probe_set((tokens, targets)), 0)
    assert isinstance(seen, PositionOutputs)
    counted = (targets != IGNORED)[:, :-1]
    twin = model(tokens)["logits"][:, :-1] * counted[:, :, None]
    torch.testing.assert_close(call_model(seen, probe.x), twin.flatten(1))
    hot = F.one_hot(targets[:, :-1].clamp(min=0), 5) * counted[:, :, None]
    assert probe.columns is not None
    torch.testing.assert_close(probe.columns, hot.flatten(1).float())
    other = tokens.clone()
    other[::3, 3:] = 0  # tokens at ignored positions do not reach what is measured
    torch.testing.assert_close(call_model(seen, {**probe.x, "x": other}), twin.flatten(1))


def test_random_combinations_keep_inner_products_on_average() -> None:
    counted, logits = torch.ones(4, 1, dtype=torch.bool), torch.randn(4, 1, 200, dtype=torch.float64)
    exact, total = logits[:, 0] @ logits[:, 0].T, torch.zeros(4, 4, dtype=torch.float64)
    draws = 400
    for seed in range(draws):
        out = PositionOutputs(nn.Identity(), lambda out: out, counted, 200, seed).reduce(logits, counted)
        total += out @ out.T / draws
    assert float((total - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda y: y[:, :-1], "answers at 6 positions"),
        (lambda y: y + 3, "class numbers run from"),
        (lambda y: torch.full_like(y, IGNORED), "none counts"),
    ],
)
def test_targets_that_do_not_fit_are_refused(change, says: str) -> None:
    tokens, targets = sequences(5)
    with pytest.raises(InputError, match=says):
        Scope(NextToken(5), (tokens, change(targets)))
