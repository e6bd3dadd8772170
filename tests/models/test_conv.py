"""Convolutional and residual gated networks: one function however it is computed, gates that are half-spaces, sums over paths."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from unlazy.models.build import build
from unlazy.models.folding import fold_batch_norm, half_space_normals
from unlazy.models.gate_product import multiply_by_gate
from unlazy.models.gates import HardGate, SoftGate
from unlazy.models.image_layers import ConvLayer
from unlazy.models.image_net import GatedImageNet
from unlazy.models.spec import ImageSpec, Init, conv_spec, resnet34_spec, resnet110_spec
from unlazy.runtime import InputError, Unsupported

PLAIN = ImageSpec((3, 4), channels=2, classes=3)
RESIDUAL = ImageSpec((3, 4), (1, 2), channels=2, classes=3)
DENSE = ImageSpec((3, 4), channels=2, classes=3, dense=5, gated_dense=True, batch_norm=False)
LAYOUTS = {"plain": PLAIN, "residual": RESIDUAL, "gated-dense": DENSE}


def specs() -> dict[str, ImageSpec]:
    """Every layout with every model."""
    made = {}
    for name, base in LAYOUTS.items():
        made[f"{name}-relu"], made[f"{name}-dln"] = base.relu(), base.deep_linear()
        for gate in (SoftGate(4.0), HardGate(4.0)):
            for experts in ("linear", "constant"):
                kind = "soft" if isinstance(gate, SoftGate) else "hard"
                made[f"{name}-{kind}-{experts}"] = replace(base, gate=gate, experts=experts)
    return made


SPECS = specs()


def pictures(n: int = 5, channels: int = 2, size: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lived(spec: ImageSpec, seed: int = 0) -> GatedImageNet:
    """A network in float64 whose batch-norms have seen something, and whose scales and shifts are not 1 and 0."""
    net = build(spec, seed=seed).double()
    random = torch.Generator().manual_seed(9)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5, generator=random)
            module.bias.data.normal_(generator=random)
    for number in range(3):
        net(pictures(8, spec.channels, seed=number))
    return net.eval()


# --- one function ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("training", [False, True])
def test_forward_is_value_under_gates(name: str, training: bool) -> None:
    net, x = lived(SPECS[name]).train(training), pictures()
    gates = net.gates(x)
    assert len(gates) == net.depth
    torch.testing.assert_close(net(x), net.value(x, list(gates)), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in SPECS if "dln" not in name])
def test_gates_depend_on_pictures_and_hard_gates_are_their_signs(name: str) -> None:
    net, x = lived(SPECS[name]), pictures()
    assert not torch.equal(net.gates(x)[0][0], net.gates(x)[0][1])
    for hard, own in zip(net.hard().gates(x), net.gates(x).hard(), strict=True):
        assert torch.equal(hard.bool(), own)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hard_shares_parameters_and_is_the_limit_of_soft(layout: str) -> None:
    net, x = lived(replace(LAYOUTS[layout], gate=SoftGate(1e9))), pictures()
    hard = net.hard()
    assert all(a is b for a, b in zip(net.parameters(), hard.parameters(), strict=True))
    assert not hard.training
    torch.testing.assert_close(net(x), hard(x), rtol=1e-9, atol=1e-12)
    gentle = lived(LAYOUTS[layout])
    assert not torch.allclose(gentle(x), gentle.hard()(x))


@pytest.mark.parametrize("rule", [HardGate(3.0), HardGate(None), SoftGate(2.0)])
@pytest.mark.parametrize("rows", [4, 1])
def test_product_and_its_gradients_are_those_of_the_rule(rule: HardGate | SoftGate, rows: int) -> None:
    random = torch.Generator().manual_seed(1)
    q = torch.randn(4, 3, 2, 2, generator=random, dtype=torch.float64, requires_grad=True)
    v = torch.randn(rows, 3, 2, 2, generator=random, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 3, 2, 2, generator=random, dtype=torch.float64)
    found = torch.autograd.grad((weights * multiply_by_gate(rule, q, v)).sum(), (q, v), allow_unused=True)
    wanted = torch.autograd.grad((weights * (rule(q) * v)).sum(), (q, v), allow_unused=True)
    torch.testing.assert_close(multiply_by_gate(rule, q, v), rule(q) * v)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_constant_experts_see_pictures_through_gates_only(layout: str) -> None:
    net, x = lived(replace(LAYOUTS[layout], experts="constant")), pictures()
    gates = list(net.gates(x))
    torch.testing.assert_close(net.value(x, gates), net.value(pictures(seed=5), gates))
    linear = lived(LAYOUTS[layout])
    assert not torch.allclose(linear.value(x, gates), linear.value(pictures(seed=5), gates))
    first = net.value_layers[0]
    assert isinstance(first, ConvLayer)
    assert isinstance(first.norm, nn.Identity)


# --- half-spaces -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_folding_keeps_the_function_and_every_gate(name: str) -> None:
    net, x = lived(SPECS[name]), pictures(40)
    folded = fold_batch_norm(net)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    torch.testing.assert_close(folded(x), net(x), rtol=1e-10, atol=1e-12)
    for mine, theirs in zip(folded.gates(x).hard(), net.gates(x).hard(), strict=True):
        assert torch.equal(mine, theirs)
    if net.settings.batch_norm:
        assert any(isinstance(module, nn.BatchNorm2d) for module in net.modules())  # the network itself is as it was


@pytest.mark.parametrize("layout", LAYOUTS)
def test_normals_give_exactly_the_gates(layout: str) -> None:
    net, x = lived(LAYOUTS[layout]), pictures(30)
    for layer, inside in enumerate(net.gates(x).hard()):
        units = list(itertools.product(*map(range, inside.shape[1:])))
        normals, offsets = half_space_normals(net, layer, units, (6, 6))
        heights = torch.einsum("kchw,nchw->nk", normals, x) + offsets
        assert torch.equal(heights >= 0, inside.flatten(1))
        torch.testing.assert_close(heights, net.pre_activations(x)[layer].flatten(1), rtol=1e-10, atol=1e-12)


def test_normals_of_the_first_layer_are_the_filters() -> None:
    net = lived(replace(PLAIN, batch_norm=False))
    normals, offsets = half_space_normals(net, 0, [(1, 2, 3)], (6, 6))
    conv = net.gate_layers[0].conv
    wanted = torch.zeros(2, 6, 6, dtype=torch.float64)
    wanted[:, 1:4, 2:5] = conv.weight[1].detach()
    torch.testing.assert_close(normals[0], wanted)
    torch.testing.assert_close(offsets[0], conv.bias[1].detach())


def test_normals_refuse_what_has_none() -> None:
    with pytest.raises(Unsupported, match="half-spaces"):
        half_space_normals(lived(PLAIN.relu()), 0, [(0, 0, 0)])
    with pytest.raises(InputError, match="units of shape"):
        half_space_normals(lived(PLAIN), 0, [(3, 0, 0)], (6, 6))
    with pytest.raises(InputError, match="gated layers 0 to 1"):
        half_space_normals(lived(PLAIN), 2, [(0, 0, 0)], (6, 6))


# --- paths -----------------------------------------------------------------------------------------


def matrix(layer: nn.Module, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """An affine map as a matrix [out, in] and a shift, found by trying every input."""
    size = int(torch.tensor(shape).prod())
    tried = torch.cat([torch.zeros(1, size), torch.eye(size)]).double().reshape(-1, *shape)
    out = layer(tried).detach()
    shift = out[0].flatten()
    return (out[1:].flatten(1) - shift).T, shift, tuple(out.shape[1:])


def path_total(net: GatedImageNet, x: Tensor) -> Tensor:
    """The output on one picture as a sum over walks, each walked by itself, from a picture or a bias to an output."""
    gates = [gate[0].detach().flatten() for gate in net.gates(x[None])]
    folded, shape = fold_batch_norm(net), tuple(x.shape)
    edges, shifts = [], []
    older, current = shape, shape
    for layer in folded.value_layers:
        assert isinstance(layer, ConvLayer)
        straight, shift, after = matrix(layer.conv, current)
        skip = None
        if layer.shortcut is not None:
            skip, extra, _ = matrix(layer.shortcut, older)
            shift = shift + extra
        edges.append((straight, skip))
        shifts.append(shift)
        older, current = current, after
    readout, last_shift, _ = matrix(folded.readout, current)
    start = torch.ones_like(x).flatten() if net.settings.experts == "constant" else x.flatten()

    def walk(layer: int, unit: int, carried: float) -> list[float]:
        """What each walk that ends at this unit carries on; layers count from 0, the picture is layer -1."""
        if layer < 0:
            return [carried * float(start[unit])]
        carried *= float(gates[layer][unit])
        if carried == 0:
            return []
        straight, skip = edges[layer]
        walks = [carried * float(shifts[layer][unit])]
        for back, weights in ((1, straight), (2, skip)):
            if weights is not None:
                for before in weights[unit].nonzero()[:, 0].tolist():
                    walks += walk(layer - back, before, carried * float(weights[unit, before]))
        return walks

    totals = []
    for output in range(net.settings.classes):
        walks = [float(last_shift[output])]
        for unit in range(readout.shape[1]):
            walks += walk(net.depth - 1, unit, float(readout[output, unit]))
        totals.append(sum(walks))
    return torch.tensor(totals, dtype=torch.float64)


@pytest.mark.parametrize("blocks", [(), (1,)])
@pytest.mark.parametrize("model", ["relu", "dlgn-soft", "dlgn-hard", "pwc", "dln"])
def test_output_is_the_sum_over_walks(blocks: tuple[int, ...], model: str) -> None:
    base = ImageSpec((2,) if blocks else (2, 2), blocks, channels=1, classes=2)
    spec = {
        "relu": base.relu(),
        "dlgn-soft": base,
        "dlgn-hard": replace(base, gate=HardGate(4.0)),
        "pwc": replace(base, experts="constant", gate=HardGate(4.0)),
        "dln": base.deep_linear(),
    }[model]
    net, x = lived(spec), pictures(2, 1, 3 if not blocks else 2)
    for row in range(2):
        torch.testing.assert_close(path_total(net, x[row]), net(x)[row].detach(), rtol=1e-10, atol=1e-12)


# --- sizes, starts, specs --------------------------------------------------------------------------


def count(spec: ImageSpec) -> int:
    return sum(parameter.numel() for parameter in build(spec).parameters())


def test_sizes_of_the_papers_networks() -> None:
    conv = (3 * 26 + 4 * 26 * 26) * 9 + 5 * 26
    head = 26 * 64 + 64 + 64 * 10 + 10
    assert count(conv_spec().relu()) == conv + head == 27_546
    assert count(conv_spec()) == 2 * conv + head
    blocks = (3, 4, 6, 3)
    assert (
        count(resnet34_spec().relu()) == 21_282_122
    )  # the usual ResNet-34 with a 3 x 3 first convolution and 10 classes
    assert build(resnet34_spec(width=1 / 16)).depth == 1 + 2 * sum(blocks)
    deep = build(resnet110_spec(classes=100).relu())
    assert deep.depth == 109  # the 110th layer is the output
    assert deep(torch.zeros(1, 3, 32, 32)).shape == (1, 100)
    assert [layer.conv.out_channels for layer in deep.value_layers][::36] == [16, 16, 32, 64]
    assert resnet110_spec(width=2.0).widths == (32, 64, 128)


def test_starts_belong_to_the_seed_and_leave_the_rest_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (build(RESIDUAL, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert all(not torch.equal(a, c) for a, _, c in pairs if a.ndim > 1)
    soft, hard = build(RESIDUAL), build(replace(RESIDUAL, gate=HardGate(4.0)))
    assert all(torch.equal(a, b) for a, b in zip(soft.parameters(), hard.parameters(), strict=True))


def test_start_sizes() -> None:
    wide = ImageSpec((64, 256), channels=3)
    net = build(wide)
    value, gate = (net.get_parameter(f"{branch}_layers.1.conv.weight").detach() for branch in ("value", "gate"))
    assert float(value.std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert float(gate.std()) == pytest.approx((1 / (64 * 9)) ** 0.5, rel=0.02)
    small = build(replace(wide, init=Init("torch"))).get_parameter("value_layers.1.conv.weight").detach()
    assert float(small.abs().max()) == pytest.approx((64 * 9) ** -0.5, rel=1e-3)


@pytest.mark.parametrize("name", SPECS)
def test_specs_survive_json(name: str) -> None:
    spec = SPECS[name]
    assert ImageSpec.from_dict(spec.to_dict()) == spec
    assert build(spec.to_dict()).spec() == spec.to_dict()


def test_branches_part_the_parameters() -> None:
    net = build(RESIDUAL)
    names = [name for branch in ("gate", "value") for name, _ in net.branch(branch)]
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())
    assert {name.split(".")[0] for name, _ in net.branch("gate")} == {"gate_layers"}


def test_wrong_specs_and_pictures_are_refused() -> None:
    for wrong, said in (
        ({"gating": "own", "experts": "constant", "gate": HardGate(None)}, "not see the input"),
        ({"gating": "own"}, "trains no gate"),
        ({"blocks": (1, 2)}, "as many entries"),
        ({"gated_dense": True}, "dense layer"),
        ({"gating": "quadratic"}, "gating must be"),
        ({"classes": 0}, "at least 1"),
    ):
        with pytest.raises(InputError, match=said):
            ImageSpec((3,), **wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown entries"):
        ImageSpec.from_dict({"widths": [3], "colour": 1})
    net = build(PLAIN)
    with pytest.raises(InputError, match="expected images"):
        net(torch.zeros(1, 3, 6, 6))
    with pytest.raises(InputError, match="2 layers of gates"):
        net.value(torch.zeros(1, 2, 6, 6), [])
