"""Numbers of common active paths beyond float64: logarithms, against whole numbers of any length."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from unlazy import InputError
from unlazy.kernels.gate_calls import record
from unlazy.kernels.overlap import overlap_kernel, path_count


def deep(kind: str, depth: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 90), nn.Linear(90, 1)
            self.middle = nn.ModuleList(nn.Linear(90, 90, bias=False) for _ in range(depth))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            for layer in self.middle:
                new = torch.relu(layer(x) * 6**0.5)
                x = x + 0.1 * new if kind == "residual" else new
            return self.last(x)

    return Deep().double(), torch.randn(3, 4, dtype=torch.float64)


def whole_logarithms(model: nn.Module, x: Tensor, kind: str, biases: tuple[bool, bool] = (False, False)) -> Tensor:
    """Counts of any length, unit by unit, in Python's whole numbers. ``biases``: of the first and of the last layer."""
    gates = [gate.open.tolist() for gate in record(model, x)]
    logarithms = torch.empty(len(x), len(x), dtype=torch.float64)
    for i in range(len(x)):
        for j in range(len(x)):
            first, *later = [[a and b for a, b in zip(gate[i], gate[j], strict=True)] for gate in gates]
            paths = [(1 + biases[0]) * unit_open for unit_open in first]
            for layer in later:
                total = sum(paths)
                new = [total * unit_open for unit_open in layer]
                paths = [a + b for a, b in zip(paths, new, strict=True)] if kind == "residual" else new
            total = sum(paths) + biases[1]
            shift = max(0, total.bit_length() - 60)
            logarithms[i, j] = math.log(total >> shift) + shift * math.log(2) if total else -math.inf
    return logarithms


@pytest.mark.parametrize("kind", ["chain", "residual"])
def test_logarithms_survive_two_hundred_layers(kind: str) -> None:
    model, x = deep(kind, 200)
    slow = whole_logarithms(model, x, kind)
    assert slow.max() > math.log(torch.finfo(torch.float64).max)
    logs = overlap_kernel(model, x, log=True)
    torch.testing.assert_close(logs, slow, rtol=0, atol=2e-12 * float(slow.max()))
    torch.testing.assert_close(path_count(model, x, log=True), slow.diagonal(), rtol=0, atol=2e-12 * float(slow.max()))
    with pytest.raises(InputError, match="log=True"):
        overlap_kernel(model, x)
    with_biases = overlap_kernel(model, x, log=True, bias_paths=True)
    wanted = whole_logarithms(model, x, kind, (True, True))
    torch.testing.assert_close(with_biases, wanted, rtol=0, atol=2e-12 * float(slow.max()))


def test_small_counts_stay_whole_where_large_ones_are_possible() -> None:
    """So deep that numbers are carried with powers of two, yet with one open unit a layer."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(2, 40), nn.ReLU()]
    for _ in range(200):
        layers += [nn.Linear(40, 40), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(40, 1)).double()
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight.data.zero_()
            layer.bias.data[: layer.out_features] = -1.0
            layer.bias.data[:1] = 1.0
    model[0].bias.data[:3] = 1.0
    x = torch.randn(3, 2, dtype=torch.float64)
    assert torch.equal(overlap_kernel(model, x), torch.full((3, 3), 3.0, dtype=torch.float64))
    assert torch.equal(overlap_kernel(model, x, log=True), torch.full((3, 3), math.log(3.0), dtype=torch.float64))


def test_paths_may_begin_anew_where_a_deep_net_was_closed() -> None:
    """Far more than float64 holds arrives at a layer that is closed; what begins at biases after it is counted exactly."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.closing = nn.Linear(2, 200), nn.Linear(200, 200), nn.Linear(200, 200)
            self.one, self.last = nn.Linear(200, 2), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            for _ in range(280):
                x = torch.relu(self.again(x))
            return self.last(torch.relu(self.one(torch.relu(self.closing(x)))))

    model = Deep().double()
    for parameter in model.parameters():
        parameter.data.fill_(1.0 if parameter.ndim == 1 else 0.0)
    x = torch.randn(2, 2, dtype=torch.float64)
    assert overlap_kernel(model, x, log=True, bias_paths=True).min() > 2000 * math.log(2)
    model.closing.bias.data.fill_(-1.0)
    model.one.bias.data[1] = -1.0
    assert torch.equal(overlap_kernel(model, x), torch.zeros(2, 2, dtype=torch.float64))
    assert torch.equal(overlap_kernel(model, x, bias_paths=True), torch.full((2, 2), 2.0, dtype=torch.float64))


def test_no_common_path_has_no_logarithm() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    model[0].weight.data, model[0].bias.data = torch.tensor([[1.0], [-1.0]]), torch.zeros(2)
    kernel = overlap_kernel(model, torch.tensor([[1.0], [-1.0]]), log=True)
    assert torch.equal(kernel, torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]], dtype=torch.float64))


def test_single_precision_results_do_not_overflow_unseen() -> None:
    model, x = deep("chain", 30)
    assert overlap_kernel(model, x).max() > torch.finfo(torch.float32).max
    with pytest.raises(InputError, match="log=True"):
        overlap_kernel(model, x, dtype=torch.float32)
