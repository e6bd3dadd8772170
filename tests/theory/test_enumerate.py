"""Path sums, hidden sums, active sets and free experts by walking every path; the mean kernel of random values."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import cases
from unlazy import InputError, build, overlap_kernel, path_count, tangent_kernel
from unlazy.kernels.regression import kernel_regression
from unlazy.models.build import build_stack
from unlazy.models.gates import HardGate, SoftGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec, relu_spec
from unlazy.theory.enumerate import (
    CONSTANT,
    active_paths,
    bias_paths_of,
    fit_free_experts,
    hidden_sum,
    path_experts,
    path_gates,
    path_sum,
    paths_of,
)
from unlazy.theory.value_kernel import draw_value_kernels, expected_value_kernel

BIASED = [name for name, spec in cases.SPECS.items() if spec.value_bias and spec.init.scheme == "torch"]  # he: 0


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-12, atol=1e-14)


# --- Theorems 1 and 2 ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", cases.SPECS)
def test_a_network_is_the_sum_over_its_paths(name: str, seed: int) -> None:
    net, x = cases.net(name, seed), cases.points(name)
    close(path_sum(net, x), net(x))


@pytest.mark.parametrize(("width", "depth"), [(1, 4), (2, 4), (4, 2), (4, 4)])
def test_other_sizes(width: int, depth: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for spec in (relu_spec(3, 2, width=width, depth=depth), NetSpec(3, gate=HardGate(None), width=width, depth=depth)):
        net = build(spec, seed=7, dtype=torch.float64)
        close(path_sum(net, x), net(x))


@pytest.mark.parametrize("name", cases.SPECS)
def test_hidden_units_are_sums_over_partial_paths(name: str) -> None:
    net, x = cases.net(name, seed=2), cases.points(name)
    states = [x]
    for number, (layer, gate) in enumerate(zip(net.value_layers, net.gates(x), strict=True), 1):
        states.append(gate * layer(states))
        close(hidden_sum(net, x, number), states[-1])
    with pytest.raises(InputError, match=f"1 to {number} layers"):
        hidden_sum(net, x, 0)


@pytest.mark.parametrize("name", BIASED)
def test_bias_paths_are_needed(name: str) -> None:
    net, x = cases.net(name), cases.points(name)
    paths = paths_of(net)
    without = torch.einsum("np,npo->no", path_gates(list(net.gates(x)), paths), path_experts(net, x, paths))
    assert (without - net(x)).abs().max() > 1e-3


def test_experts_are_products_of_weights() -> None:
    net, x = cases.net("relu"), cases.points("relu")
    first, second, third = net.value_layers
    weight, bias, one = net.readout.weight, net.readout.bias, x.new_ones(len(x))
    rest = second.weight[0, 2] * third.weight[1, 0]
    by_hand = {
        ((2, 0, 1), 0): x @ first.weight[2] * rest,
        ((2, 0, 1), 1): one * first.bias[2] * rest,
        ((CONSTANT, 0, 1), 2): one * second.bias[0] * third.weight[1, 0],
        ((CONSTANT, CONSTANT, 1), 3): one * third.bias[1],
    }
    paths, enters = zip(*by_hand, ((CONSTANT,) * 3, 4), strict=True)
    experts = path_experts(net, x, torch.tensor(paths), torch.tensor(enters))
    for column, value in enumerate(by_hand.values()):
        close(experts[:, column], value[:, None] * weight[:, 1])
    close(experts[:, -1], bias.expand(len(x), 2))


def test_constant_experts_ignore_the_input() -> None:
    net, x = cases.net("pwc-no-bias"), cases.points("pwc-no-bias")
    experts = path_experts(net, x, torch.tensor([[1, 2, 0]]))
    first, second, third = (layer.weight for layer in net.value_layers)
    close(experts[:, 0, 0], (first[1].sum() * second[2, 1] * third[0, 2] * net.readout.weight[0, 0]).expand(len(x)))


def test_soft_gates_of_a_path_multiply() -> None:
    net, x = cases.net("dlgn"), cases.points("dlgn")
    q = net.pre_activations(x)
    wanted = torch.sigmoid(4 * q[0][:, 2]) * torch.sigmoid(4 * q[1][:, 0]) * torch.sigmoid(4 * q[2][:, 1])
    close(path_gates(list(net.gates(x)), torch.tensor([[2, 0, 1]]))[:, 0], wanted)


# --- paths -----------------------------------------------------------------------------------------


def test_every_path_is_listed_once() -> None:
    net = cases.net("relu")
    assert paths_of(net).tolist() == [list(units) for units in itertools.product(range(3), repeat=3)]
    assert paths_of(net, length=1).tolist() == [[0], [1], [2]]
    paths, enters = bias_paths_of(net)
    assert len({tuple(path) for path in paths.tolist()}) == len(paths) == 27 + 9 + 3 + 1
    for path, enter in zip(paths.tolist(), enters.tolist(), strict=True):
        assert path[: enter - 1] == [CONSTANT] * (enter - 1)
        assert CONSTANT not in path[enter - 1 :]


def test_active_bias_paths_are_counted_layer_by_layer() -> None:
    """A constant node below every layer: c_l = (open units of layer l) * (c_{l-1} + 1), and one for the output's bias."""
    net, x = cases.net("relu", seed=2), cases.points("relu", n=20)
    count = torch.zeros(20, dtype=torch.int64)
    for layer in net.gates(x).hard():
        count = layer.sum(1) * (count + 1)
    assert torch.equal(active_paths(net, x, bias_paths_of(net)[0]).sum(1), count + 1)


def test_too_many_paths_are_refused() -> None:
    net, x = build(relu_spec(2, width=16, depth=5)), torch.zeros(1, 2)
    with pytest.raises(InputError, match=r"1048576 paths are too many .* \(at most 65536\)"):
        path_sum(net, x)
    with pytest.raises(InputError, match="1 to 5 layers"):
        paths_of(net, length=6)
    with pytest.raises(InputError, match="one network at a time"):
        paths_of(build_stack(relu_spec(2, width=2, depth=2), [0, 1]))
    assert path_experts(net, x, torch.tensor([[15, 0, 3, 2, 1]])).shape == (1, 1, 1)  # chosen ones are welcome


# --- active sets, overlap --------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.SPECS)
def test_overlap_is_the_number_of_common_active_paths(name: str) -> None:
    net, x = cases.net(name, seed=4), cases.points(name, n=20)
    active = active_paths(net, x, paths_of(net))
    assert torch.equal(overlap_kernel(net, x), active.double() @ active.double().T)
    assert torch.equal(path_count(net, x), active.sum(1).double())


def test_active_paths_are_those_whose_units_are_all_open() -> None:
    net, x = cases.net("relu-no-bias", seed=1), cases.points("relu-no-bias", n=9)
    opened, paths = net.gates(x).hard(), paths_of(net)
    active = active_paths(net, x, paths)
    assert active.any()
    for row in range(9):
        for column, path in enumerate(paths.tolist()):
            assert active[row, column] == all(bool(layer[row, i]) for layer, i in zip(opened, path, strict=True))


@pytest.mark.parametrize("name", cases.SPECS)
def test_overlap_with_bias_paths_counts_those_too(name: str) -> None:
    net, x = cases.net(name, seed=2), cases.points(name, n=12)
    active = active_paths(net, x, paths_of(net)).double()
    wanted = active @ active.T
    if net.settings.value_bias:
        active = active_paths(net, x, bias_paths_of(net)[0]).double()
        wanted += active @ active.T
    assert torch.equal(overlap_kernel(net, x, bias_paths=True), wanted)


@pytest.mark.parametrize("seed", range(5))
def test_open_units_at_antipodes_add_up_to_the_width(seed: int) -> None:
    spec = NetSpec(3, width=6, depth=4, gate_bias=False)
    net = build(spec, seed=seed, dtype=torch.float64)
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for here, there in zip(net.gates(x).hard(), net.gates(-x).hard(), strict=True):
        assert (here.sum(1) + there.sum(1) == 6).all()


# --- free experts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("name", ["dlgn-hard", "pwc-no-bias", "relu"])
def test_free_experts_are_kernel_regression_with_the_overlap_kernel(name: str, ridge: float) -> None:
    net, new = cases.net(name, seed=3), cases.points(name, n=15, seed=9)
    x, paths = cases.points(name, n=40), paths_of(net)
    _, first = torch.unique(torch.cat(net.gates(x).hard(), dim=1), dim=0, return_inverse=True)
    x = x[[int((first == cell).nonzero()[0, 0]) for cell in first.unique()]]
    x = x[path_count(net, x) > 0]
    if ridge == 0:  # as many points as have independent features
        rank = [int(torch.linalg.matrix_rank(overlap_kernel(net, x[:n]))) for n in range(1, len(x) + 1)]
        x = x[[n for n in range(len(x)) if rank[n] > (rank[n - 1] if n else 0)]]
    y = torch.randn(len(x), 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    features = active_paths(net, x, paths).double()
    found = fit_free_experts(features, y, active_paths(net, new, paths).double(), ridge)
    wanted = kernel_regression(overlap_kernel(net, x), y, overlap_kernel(net, new, x), ridge)
    assert len(x) >= 3
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    if ridge == 0:
        torch.testing.assert_close(fit_free_experts(features, y, features), y, rtol=1e-9, atol=1e-10)


# --- the mean kernel of random values --------------------------------------------------------------


def signed_values(net: GatedNet, deviation: float) -> GatedNet:
    """Every choice of signs for the value weights, all of size ``deviation``: mean 0, variance s^2, nothing left to chance."""
    sizes = [(name, p.shape) for name, p in net.branch("value")]
    total = sum(shape.numel() for _, shape in sizes)
    stack = build_stack(net.settings, [0] * 2**total, dtype=torch.float64)
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=total)), dtype=torch.float64)
    numbers = dict(stack.named_parameters())
    with torch.no_grad():
        for name, gate in net.branch("gate"):
            numbers[name].copy_(gate)
        for (name, shape), part in zip(sizes, signs.split([shape.numel() for _, shape in sizes], dim=1), strict=True):
            numbers[name].copy_(deviation * part.reshape(-1, *shape))
    return stack


@pytest.mark.parametrize(
    "choices",
    [
        {"inputs": 2, "width": 2, "depth": 1},
        {"inputs": 1, "width": 2, "depth": 2},
        {"inputs": 2, "width": 2, "depth": 1, "outputs": 2},
        {"inputs": 2, "width": 2, "depth": 2, "experts": "constant"},
        {"inputs": 3, "width": 2, "depth": 1, "experts": "constant", "constant_input": "one"},
    ],
)
def test_mean_value_kernel_is_the_law_exactly(choices: dict) -> None:
    net = build(NetSpec(gate=HardGate(None), value_bias=False, **choices), seed=1, dtype=torch.float64)
    x = torch.randn(6, choices["inputs"], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean = tangent_kernel(signed_values(net, 0.7), x, parameters="value").mean(0)
    assert mean.abs().max() > 0.1
    close(mean, expected_value_kernel(net, x, 0.7))


def test_drawn_value_kernels_average_to_the_law() -> None:
    """Soft-gated networks are taken with their hard gates; draws belong to the seed, not to the batch they came in."""
    net = build(NetSpec(2, gate=SoftGate(4.0), width=3, depth=2, value_bias=False), seed=5, dtype=torch.float64)
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn, wanted = draw_value_kernels(net, x, 0.5, 2000), expected_value_kernel(net, x, 0.5)
    trace = drawn.diagonal(dim1=1, dim2=2).sum(1)
    error = float(trace.std() / math.sqrt(len(trace)))
    assert error < 0.1 * float(wanted.trace())
    assert abs(float(trace.mean() - wanted.trace())) < 4 * error
    assert torch.equal(draw_value_kernels(net, x, 0.5, 70, at_once=7), drawn[:70])
    assert not torch.equal(draw_value_kernels(net, x, 0.5, 70, seed=1), drawn[:70])


def test_the_law_needs_a_gating_network() -> None:
    with pytest.raises(InputError, match="gating network"):
        expected_value_kernel(cases.net("relu-no-bias"), cases.points("relu-no-bias"), 1.0)
