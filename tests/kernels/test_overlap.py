"""Gates and path counts of foreign networks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cases
from unlazy import InputError, Unsupported, overlap_kernel, path_count, record
from unlazy.kernels import reference
from unlazy.kernels.overlap import hard_gates, layer_overlap, overlap_from_gates, plan_overlap
from unlazy.models.build import build_stack, member


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(F.relu(self.a(x)))))


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 1)
    )


X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def test_overlap_of_a_foreign_chain_counts_its_paths() -> None:
    model = chain()
    first = model[0](X) > 0
    second = model[3](torch.relu(model[0](X))) > 0
    slow = reference.overlap_kernel([first, second])
    assert torch.equal(overlap_kernel(model, X), slow)
    assert torch.equal(layer_overlap(model, X), slow)
    assert torch.equal(path_count(model, X), slow.diagonal())
    assert torch.equal(overlap_kernel(model, X[:2], X[2:]), slow[:2, 2:])
    assert model.training


def test_functions_are_found_as_well_as_modules() -> None:
    torch.manual_seed(0)
    model = Functional()
    names = [gate.name for gate in record(model, X)]
    assert names == ["the model#1", "the model#2"]
    assert [gate.name for gate in record(chain(), X)] == ["1#1", "4#1"]
    assert torch.equal(overlap_kernel(model, X), reference.overlap_kernel([gate.open for gate in record(model, X)]))


def test_our_relu_net_and_its_twin_in_torch_agree() -> None:
    net, x = cases.net("relu"), cases.points("relu")
    assert torch.equal(overlap_kernel(cases.as_torch(net), x), overlap_kernel(net, x))


def test_truncated_gates_are_closed_on_both_branches() -> None:
    x = torch.tensor([[-2.0], [-0.5], [0.5], [3.0], [7.0]])

    class Function(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu6(x)

    class Clamp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clamp(min=0, max=5)

    for module, wanted in (
        (Clamp(), [False, False, True, True, False]),
        (Function(), [False, False, True, True, False]),
        (nn.ReLU6(), [False, False, True, True, False]),
        (nn.Hardtanh(), [False, True, True, False, False]),
        (nn.Hardtanh(0.0, 5.0), [False, False, True, True, False]),
    ):
        (gate,) = record(module, x)
        assert gate.open[:, 0].tolist() == wanted


def test_a_reused_relu_is_named_by_its_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.act = nn.Linear(3, 3), nn.Linear(3, 3), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.b(self.act(self.a(x))))

    assert [gate.name for gate in record(Twice(), X)] == ["act#1", "act#2"]


@pytest.mark.parametrize("activation", [nn.GELU(), nn.LeakyReLU(), nn.SiLU(), nn.Tanh()])
def test_soft_activations_are_refused_by_name(activation: nn.Module) -> None:
    with pytest.raises(Unsupported, match=r"^1: .*no hard gate"):
        record(nn.Sequential(nn.Linear(3, 2), activation), X)


def test_gates_of_more_than_a_chain_are_no_plain_product() -> None:
    class Residual(Functional):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            return self.c(torch.relu(self.b(h + h.flip(1))))

    with pytest.raises(Unsupported, match="not one unit per layer"):
        hard_gates(Residual(), X)
    image = torch.randn(2, 1, 4, 4)
    convolution = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))
    with pytest.raises(Unsupported, match="not one unit per layer"):
        hard_gates(convolution, image)
    linear = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 4), nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1))
    with pytest.raises(Unsupported, match="3 reads units without a gate"):
        hard_gates(linear, X)
    with pytest.raises(Unsupported, match="no ReLU-like gates"):
        overlap_kernel(nn.Linear(3, 1), X)
    assert [gate.shape for gate in hard_gates(chain(), X)] == [(6, 4), (6, 5)]


def test_layer_overlap_treats_positions_as_units() -> None:
    image = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 3, 3), nn.ReLU(), nn.GroupNorm(1, 3)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 1))
    gates = [gate.open.flatten(1).double() for gate in record(model, image)]
    product = (gates[0] @ gates[0].T) * (gates[1] @ gates[1].T)
    assert torch.equal(layer_overlap(model, image), product)
    assert torch.equal(layer_overlap(model, image[:2], image[2:]), product[:2, 2:])
    torch.testing.assert_close(layer_overlap(model, image, log=True), product.log(), rtol=1e-14, atol=0)
    single = torch.zeros(5, 5)
    assert layer_overlap(model, image, out=single) is single
    assert torch.equal(single, product.float())


def test_fast_products_count_exactly() -> None:
    """More samples than a tile, wide layers: equal to integer arithmetic, entry by entry."""
    random = torch.Generator().manual_seed(0)
    gates = [torch.rand(1500, 700, generator=random) < 0.5 for _ in range(3)]
    whole = torch.ones(1500, 1500, dtype=torch.int64)
    for gate in gates:
        whole *= gate.long() @ gate.long().T
    assert torch.equal(overlap_from_gates(gates, gates).long(), whole)
    single = overlap_from_gates(gates, gates, dtype=torch.float32)
    assert single.dtype == torch.float32
    assert torch.equal(single, whole.float())


@pytest.mark.parametrize("name", ["dlgn", "pwc-no-bias", "relu"])
@pytest.mark.parametrize("bias_paths", [False, True])
def test_a_stack_counts_like_its_members(name: str, bias_paths: bool) -> None:
    stack = build_stack(cases.SPECS[name], range(3), dtype=torch.float64)
    x = cases.points(name)
    for log in (False, True):
        together = overlap_kernel(stack, x, bias_paths=bias_paths, log=log)
        counts = path_count(stack, x, bias_paths=bias_paths, log=log)
        for index in range(3):
            alone = overlap_kernel(member(stack, index), x, bias_paths=bias_paths, log=log)
            torch.testing.assert_close(together[index], alone, rtol=1e-14, atol=1e-14)
            torch.testing.assert_close(counts[index], alone.diagonal(), rtol=1e-14, atol=1e-14)
    across = overlap_kernel(stack, x[:2], x[2:], bias_paths=bias_paths)
    assert torch.equal(across, overlap_kernel(stack, x, bias_paths=bias_paths)[:, :2, 2:])


def test_a_stack_refuses_what_it_would_ignore() -> None:
    stack = build_stack(cases.SPECS["dlgn"], range(2), dtype=torch.float64)
    x = cases.points("dlgn")
    for option in ({"output": 1}, {"memory": "1GB"}, {"out": torch.zeros(2, 7, 7)}):
        with pytest.raises(InputError, match="single networks"):
            overlap_kernel(stack, x, **option)
    with pytest.raises(Unsupported, match="member"):
        plan_overlap(stack, x)


def test_the_plan_says_what_a_pair_costs() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))
    plan = plan_overlap(model, torch.zeros(5, 1, 6, 6))
    assert plan.symmetric
    assert plan.methods == (f"paths: 2 gates, 16 numbers a pair, below 2^{math.log2(4 * 9 * 2 * 4):.0f}",)
    assert plan.result_bytes == 8 * 25
