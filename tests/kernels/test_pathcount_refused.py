"""What path counting knows under many names, what it refuses by name, and that it changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unlazy import Unsupported
from unlazy.kernels.gate_calls import function_name, record
from unlazy.kernels.overlap import overlap_kernel, path_count
from unlazy.kernels.paths.trace import RULES
from unlazy.kernels.paths.walks import active_paths


@pytest.mark.parametrize("space", [torch, F, Tensor])
def test_a_function_is_known_under_each_of_its_names(space: Any) -> None:
    """Torch has many doors to one function, and its own idea of what that is called."""
    found = 0
    for name, rule in RULES.items():
        function = getattr(space, name, None)
        if callable(function):
            assert RULES.get(function_name(function)) is rule, name
            found += 1
    assert found > 10


class Made(nn.Module):
    """A small network with anything in the middle."""

    def __init__(self, middle: Any) -> None:
        super().__init__()
        self.a, self.middle, self.b = nn.Linear(4, 4), middle, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(torch.relu(self.a(x))))


def overwritten(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, :2] = h[:, :2]
    return out


def overwritten_view(h: Tensor) -> Tensor:
    out = torch.zeros(len(h), 4)
    out[:, :2].copy_(h[:, :2])
    return out


def changed_behind(h: Tensor) -> Tensor:
    h[:, :2].mul_(2.0)
    return h


REFUSED = {
    "layer_norm": nn.LayerNorm(4),
    "softmax": lambda h: h.softmax(-1),
    "squared": lambda h: h * h,
    "divided": lambda h: 1 / (h + 1),
    "normalised": lambda h: h / h.sum(1, keepdim=True),
    "attention": lambda h: h @ (h.mT @ h),
    "sorted": lambda h: h.sort(1)[0],
    "largest": lambda h: torch.maximum(h, h.flip(1)),
    "mean of samples": lambda h: h - h.mean(0, keepdim=True),
    "mask": lambda h: torch.where(h > 1, h, 0.0),
    "chosen samples": lambda h: h[torch.arange(len(h))],
    "samples moved": lambda h: h.reshape(-1, 2, len(h)).mean(1).reshape(len(h), -1).repeat(1, 2),
    "value": lambda h: h * float(h.max()),
    "branch": lambda h: h if bool(h.sum() > 0) else -h,
    "overwritten": overwritten,
    "overwritten view": overwritten_view,
    "changed behind": changed_behind,
    "batch statistics": nn.BatchNorm1d(4, track_running_stats=False),
    "gelu": nn.GELU(),
    "whole product": lambda h: torch.einsum("ni,ij->nj", h, torch.eye(4)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused_by_name(name: str) -> None:
    torch.manual_seed(0)
    model = Made(REFUSED[name])
    with pytest.raises(Unsupported) as caught:
        overlap_kernel(model, torch.randn(4, 4))
    assert caught.value.module in ("middle", "the model", "b")
    assert caught.value.remedy


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_compiled_code_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.trace(nn.ReLU(), torch.zeros(1, 2)), nn.ReLU())
    with pytest.raises(Unsupported, match=r"^1: compiled"):
        overlap_kernel(model, torch.zeros(1, 2))


def test_ways_that_depend_on_the_input_are_refused() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.calls = nn.Linear(2, 3), nn.Linear(3, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            h = torch.relu(self.a(x))
            return h.sum(1) if self.calls < 2 else torch.relu(self.b(h)).sum(1)

    with pytest.raises(Unsupported, match="depend on the input"):
        overlap_kernel(Fickle(), torch.randn(3, 2))


def test_what_does_not_reach_the_output_does_not_matter() -> None:
    class Monitored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            self.entropy = h.softmax(1).log().sum()
            torch.relu(h - 1)
            return self.b(h)

    torch.manual_seed(0)
    model, x = Monitored(), torch.randn(4, 2)
    (first, _) = record(model, x)
    assert torch.equal(overlap_kernel(model, x), (first.open.double() @ first.open.double().T))


def test_counting_changes_nothing() -> None:
    model = nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 1)
    )
    x = torch.randn(5, 3)
    before, state = x.clone(), {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    overlap_kernel(model, x)
    path_count(model, x)
    active_paths(model, x[:1])
    assert torch.equal(x, before)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
