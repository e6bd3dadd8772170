"""Kernels of gated networks of images: paths against walks, hard gates as constants, in every tool that differentiates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from unlazy.kernels.agop import agop
from unlazy.kernels.averaged_tangents import ParameterPath, averaged_tangents
from unlazy.kernels.overlap import gate_ties, layer_overlap, neural_path_kernel, overlap_kernel, path_count
from unlazy.kernels.paths.walks import active_paths
from unlazy.kernels.reference import overlap_kernel as walked
from unlazy.kernels.tangent import tangent_features, tangent_kernel
from unlazy.models.build import build
from unlazy.models.gates import HardGate
from unlazy.models.image_net import GatedImageNet
from unlazy.models.spec import ImageSpec
from unlazy.runtime import InputError, Unsupported
from unlazy.training.linearised import linearise

HARD = ImageSpec((2, 3), (1, 1), channels=1, classes=3, gate=HardGate(4.0))


def pictures(n: int, side: int = 6) -> Tensor:
    return torch.randn(n, 1, side, side, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def made(spec: ImageSpec, seed: int = 2) -> GatedImageNet:
    """With running statistics that are not those of the start."""
    net = build(spec, seed=seed).double()
    net.train()(pictures(8))
    return net


# --- paths -----------------------------------------------------------------------------------------


LAYOUTS = {
    "plain": ImageSpec((3, 4, 2), channels=1, dense=6),
    "residual": ImageSpec((2, 3), (2, 1), channels=1, dense=5),
    "gated-dense": ImageSpec((2, 2), channels=1, dense=3, gated_dense=True, batch_norm=False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_gates_count_as_the_relus_that_made_them(layout: str) -> None:
    """The gates of a ReLU network, written into a linearly gated one of the same values, open the same paths."""
    relu, x = made(LAYOUTS[layout].relu()).eval(), pictures(4)

    class Same(GatedImageNet):
        def gates(self, x: Tensor) -> object:
            return relu.gates(x)

    linear = made(replace(LAYOUTS[layout], gate=HardGate(4.0)))
    same = Same(linear.settings, linear.gate_layers, linear.value_layers, linear.readout)
    wanted = overlap_kernel(relu, x)
    assert len(wanted.unique()) > 4
    assert torch.equal(overlap_kernel(same, x), wanted)
    assert torch.equal(path_count(same, x), wanted.diagonal())
    torch.testing.assert_close(overlap_kernel(same, x, log=True), wanted.log())
    assert torch.equal(overlap_kernel(same, x[:2], x[1:]), wanted[:2, 1:])
    assert torch.equal(layer_overlap(same, x), layer_overlap(relu, x))


def walked_one_by_one(spec: ImageSpec, gates: list[torch.Tensor]) -> int:
    """Paths of one picture of a small residual network, each walked by itself, back from the last layer."""

    def back(layer: int, channel: int, row: int, column: int) -> int:
        if not gates[layer][channel, row, column]:
            return 0
        if layer == 0:
            return 1
        before = gates[layer - 1]
        stride = before.shape[1] // gates[layer].shape[1]
        found = 0
        for down, right in np.ndindex(3, 3):
            i, j = stride * row + down - 1, stride * column + right - 1
            if 0 <= i < before.shape[1] and 0 <= j < before.shape[2]:
                found += sum(back(layer - 1, other, i, j) for other in range(len(before)))
        if layer % 2 == 0:
            older = gates[layer - 2]
            if older.shape == gates[layer].shape:
                found += back(layer - 2, channel, row, column)
            else:
                step = older.shape[1] // gates[layer].shape[1]
                found += sum(back(layer - 2, other, step * row, step * column) for other in range(len(older)))
        return found

    return sum(back(len(gates) - 1, *unit) for unit in np.ndindex(*gates[-1].shape))


@pytest.mark.parametrize("experts", ["linear", "constant"])
def test_paths_of_linearly_gated_residual_networks_are_walked_one_by_one(experts: str) -> None:
    spec = ImageSpec((1, 2), (1, 1), channels=1, gate=HardGate(4.0), experts=experts)
    net, x = made(spec, seed=5), pictures(3, 4)
    counts, both = path_count(net, x), overlap_kernel(net, x)
    assert net.training  # counted in evaluation mode, and left as it was
    hard = net.eval().gates(x).hard()
    wanted = [walked_one_by_one(spec, [gate[row] for gate in hard]) for row in range(3)]
    assert len(set(wanted)) == 3
    assert counts.tolist() == wanted
    assert both[0, 1] == walked_one_by_one(spec, [gate[0] & gate[1] for gate in hard])
    assert torch.equal(both, both.T)
    linear = made(replace(spec, experts="linear").deep_linear())
    assert len(path_count(linear, x).unique()) == 1  # every path is open on every picture


def test_paths_through_whole_windows_are_those_of_a_dense_network() -> None:
    small = made(ImageSpec((2, 2), channels=1, batch_norm=False, gate=HardGate(4.0)))
    x = pictures(3, 2)  # every window covers the whole picture: a dense network of channels times positions
    gates = [gate.flatten(1) for gate in small.gates(x).hard()]
    torch.testing.assert_close(overlap_kernel(small, x), walked(gates))


def test_what_is_not_offered_is_refused_with_a_remedy() -> None:
    net = made(HARD)
    with pytest.raises(Unsupported, match="path_count"):
        active_paths(net, pictures(1))
    with pytest.raises(Unsupported, match="bias"):
        neural_path_kernel(net, pictures(3))
    with pytest.raises(InputError, match="gated network"):
        tangent_kernel(torch.nn.Linear(2, 1), torch.randn(3, 2), parameters="gate")


def test_ties_are_counted_in_evaluation_mode() -> None:
    net, x = made(replace(HARD, batch_norm=False)), pictures(3)
    assert all(int(layer.sum()) == 0 for layer in gate_ties(net, x).values())
    with torch.no_grad():
        net.gate_layers[1].conv.weight.zero_()
        net.gate_layers[1].conv.bias.zero_()
    ties = gate_ties(net, x)
    assert ties["layer 2"].tolist() == [2 * 36] * 3
    assert int(ties["layer 1"].sum()) == 0


# --- derivatives -----------------------------------------------------------------------------------


def jacobian_of_values(net: GatedImageNet, x: Tensor) -> Tensor:
    """Rows ``[n, o, p]`` of the value parameters, the gates held at what they are: the derivative of the function."""
    net = net.eval()
    values = [parameter for _, parameter in net.branch("value")]
    rows = []
    for picture in x.split(1):
        out = net.value(picture, [gate.double() for gate in net.gates(picture).hard()])[0]
        found = [torch.autograd.grad(o, values, retain_graph=True) for o in out]
        rows.append(torch.stack([torch.cat([part.flatten() for part in parts]) for parts in found]))
    return torch.stack(rows)


@pytest.mark.parametrize("experts", ["linear", "constant"])
def test_hard_gates_are_constants_to_the_tangent_kernel(experts: str) -> None:
    net, x = made(replace(HARD, experts=experts)), pictures(5)
    exact, through, of_values, of_gates = (
        tangent_kernel(net, x, **options)
        for options in ({}, {"surrogate": True}, {"parameters": "value"}, {"parameters": "gate"})
    )
    rows = jacobian_of_values(net, x)
    torch.testing.assert_close(exact, torch.einsum("iop,jop->ij", rows, rows), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(of_values, exact, rtol=1e-10, atol=1e-12)
    assert float((through - exact).norm() / exact.norm()) > 0.01
    assert float(of_gates.abs().max()) == 0
    features = tangent_features(net, x)
    torch.testing.assert_close(torch.einsum("iop,jop->ij", features, features), exact, rtol=1e-10, atol=1e-12)


def test_a_linearised_network_moves_its_values_only() -> None:
    net, x = made(HARD), pictures(4)
    flat = linearise(net)
    assert {name.split(".")[0] for name in flat.names} == {"value_layers", "readout"}
    rows = jacobian_of_values(net, x)
    with torch.no_grad():
        flat.displacement.copy_(torch.randn(flat.displacement.shape, generator=torch.Generator().manual_seed(3)))
        moved = rows @ flat.displacement
        torch.testing.assert_close(flat(x), net(x) + moved, rtol=1e-9, atol=1e-10)


def test_gradients_by_pixels_leave_the_gates_alone() -> None:
    net, x = made(HARD).eval(), pictures(4)
    total = 0
    for picture in x.split(1):
        gates = [gate.double() for gate in net.gates(picture).hard()]
        entered = picture.clone().requires_grad_()
        rows = torch.stack(
            [torch.autograd.grad(o, entered, retain_graph=True)[0].flatten() for o in net.value(entered, gates)[0]]
        )
        total = total + rows.T @ rows / len(x)
    torch.testing.assert_close(agop(net, x), total, rtol=1e-10, atol=1e-12)
    with pytest.raises(Unsupported, match="piecewise constant"):
        agop(made(replace(HARD, experts="constant")), x)


def test_no_mean_of_gradients_where_hard_gates_moved() -> None:
    first, last = made(HARD, seed=1).eval(), made(HARD, seed=2).eval()
    last.load_state_dict(
        {
            name: value if name in dict(last.named_parameters()) else first.state_dict()[name]
            for name, value in last.state_dict().items()
        }
    )
    with pytest.raises(Unsupported, match="hard gates moved"):
        averaged_tangents(first, ParameterPath([first.state_dict(), last.state_dict()]), pictures(3))
