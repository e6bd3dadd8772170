"""Average gradient outer products against autograd sample by sample, and the ansatz on a task whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cases
import zoo
from unlazy import InputError, Unsupported
from unlazy.kernels.agop import agop, feature_ansatz, layer_agops
from unlazy.kernels.capture import call_model, sample_count, take_samples
from unlazy.models.build import build, build_stack
from unlazy.models.dense_layers import Affine, ConstantAffine
from unlazy.models.gates import HardGate
from unlazy.models.spec import Init, NetSpec, relu_spec

CHAINS = ["mlp", "inplace_mlp", "late_inplace_mlp", "scalar_output", "keyword_call", "weight_norm"]
REAL_INPUTS = [
    name for name in zoo.ZOO if isinstance(zoo.build(name)[1], Tensor) and zoo.build(name)[1].is_floating_point()
]
SOFT = [
    name for name, spec in cases.SPECS.items() if not isinstance(spec.gate, HardGate) or spec.gating in ("own", "open")
]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


# --- the function's own inputs -------------------------------------------------------------------------------


def slow_agop(model: nn.Module, x: Tensor) -> Tensor:
    total = 0
    for sample in x:
        entered = sample[None].clone().requires_grad_(True)
        for value in model(entered.clone()).reshape(-1):
            (gradient,) = torch.autograd.grad(value, entered, retain_graph=True)
            total = total + gradient.reshape(-1, 1) @ gradient.reshape(1, -1)
    return total / len(x)


@pytest.mark.parametrize("name", REAL_INPUTS)
def test_agop_equals_a_jacobian_per_sample(name: str) -> None:
    model, x = zoo.build(name)
    close(agop(model, x), slow_agop(model, x))


@pytest.mark.parametrize("name", SOFT)
def test_agop_of_our_networks(name: str) -> None:
    net, x = cases.net(name), cases.points(name)
    close(agop(net, x), slow_agop(net, x))


@pytest.mark.parametrize("gate", [HardGate(4.0), HardGate(None)])
def test_hard_gates_leave_the_gradient_of_the_experts(gate: HardGate) -> None:
    """Gates do not move with the input: finite differences agree, the soft backward does not."""
    net = build(NetSpec(3, 2, width=4, depth=2, gate=gate), dtype=torch.float64)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steps = 1e-6 * torch.eye(3, dtype=torch.float64)
    with torch.no_grad():
        jacobians = torch.stack([(net(x + step) - net(x - step)) / 2e-6 for step in steps], dim=-1)  # [n, outputs, d]
    expected = torch.einsum("noi,noj->ij", jacobians, jacobians) / 6
    torch.testing.assert_close(agop(net, x), expected, rtol=1e-6, atol=1e-8)


def test_piecewise_constant_networks_have_no_input_gradient() -> None:
    for gate in (HardGate(4.0), HardGate(None)):
        net = build(NetSpec(2, experts="constant", gate=gate, width=3, depth=2), dtype=torch.float64)
        with pytest.raises(Unsupported, match="identically 0"):
            agop(net, torch.ones(4, 2, dtype=torch.float64))
        assert list(layer_agops(net, torch.ones(4, 2, dtype=torch.float64))) == ["value_layers.1", "readout"]
    soft = build(NetSpec(2, experts="constant", width=3, depth=2), dtype=torch.float64)
    assert float(agop(soft, torch.ones(4, 2, dtype=torch.float64)).abs().max()) > 0


def test_turned_inputs_turn_the_agop() -> None:
    model, x = zoo.build("mlp")
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).Q
    turned = nn.Sequential(nn.Linear(4, 4, bias=False).double(), model)
    turned[0].weight.data = turn
    close(agop(turned, x @ turn), turn.T @ agop(model, x) @ turn)
    close(agop(model, x[[3, 1, 4, 0, 2]]), agop(model, x))
    scaled = nn.Sequential(model, nn.Linear(3, 3, bias=False).double())
    scaled[1].weight.data = -3 * torch.eye(3, dtype=torch.float64)
    close(agop(scaled, x), 9 * agop(model, x))


def test_many_samples_are_the_mean_of_parts() -> None:
    """More than one backward pass takes at once."""
    model, _ = zoo.build("mlp")
    x = torch.randn(600, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = [agop(model, part) for part in x.split(200)]
    close(agop(model, x), torch.stack(parts).mean(0))
    layers = [layer_agops(model, part)["2"] for part in x.split(200)]
    close(layer_agops(model, x)["2"], torch.stack(layers).mean(0))


# --- what each layer reads -----------------------------------------------------------------------------------


def readable(model: nn.Module) -> dict[str, nn.Module]:
    kinds = (nn.Linear, nn.Conv2d, Affine)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, kinds) and not isinstance(module, ConstantAffine)
    }


def weight_matrix(module: nn.Module) -> Tensor:
    weight = module.weight.detach()
    if not isinstance(module, nn.Conv2d):
        return weight
    size = module.out_channels // module.groups, module.in_channels // module.groups
    whole = weight.new_zeros(module.out_channels, module.in_channels, *module.kernel_size)
    for group in range(module.groups):
        rows, columns = (slice(group * s, (group + 1) * s) for s in size)
        whole[rows, columns] = weight[rows]
    return whole.flatten(1)


def slow_layer_agop(model: nn.Module, x, module: nn.Module) -> Tensor | None:
    """Adds zeros to what one layer reads (a convolution: to its patches) and differentiates by them, sample by sample."""
    total, probes = None, []

    def put(layer: nn.Module, arguments: tuple, options: dict, output: Tensor) -> Tensor:
        first = arguments[0] if arguments else options["input"]
        first = first[-1] if isinstance(layer, Affine) else first
        if isinstance(layer, nn.Conv2d):
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            padded = F.pad(first, layer._reversed_padding_repeated_twice, mode=mode)
            first = F.unfold(padded, layer.kernel_size, layer.dilation, 0, layer.stride).mT  # [1, positions, in]
        probe = torch.zeros_like(first, requires_grad=True)
        probes.append(probe)
        extra = probe @ weight_matrix(layer).T
        return output + (extra.mT.reshape(output.shape) if isinstance(layer, nn.Conv2d) else extra)

    handle = module.register_forward_hook(put, with_kwargs=True)
    for i in range(sample_count(x)):
        probes.clear()
        for value in call_model(model, take_samples(x, slice(i, i + 1)))[0]:
            for gradient in torch.autograd.grad(value, probes, retain_graph=True, allow_unused=True) if probes else []:
                if gradient is not None:
                    rows = gradient.reshape(-1, gradient.shape[-1])
                    total = (0 if total is None else total) + rows.T @ rows / sample_count(x)
    handle.remove()
    return total


LAYERED = [name for name in zoo.ZOO if readable(zoo.build(name)[0])]


@pytest.mark.parametrize("name", LAYERED)
def test_layer_agops_equal_gradients_by_what_layers_read(name: str) -> None:
    model, x = zoo.build(name)
    found = layer_agops(model, x)
    expected = {key: slow_layer_agop(model, x, module) for key, module in readable(model).items()}
    expected = {key: value for key, value in expected.items() if value is not None}
    checked = {key: value for key, value in found.items() if key in readable(model)}
    assert checked.keys() == expected.keys()
    for key, value in expected.items():
        close(checked[key], value)


@pytest.mark.parametrize("name", SOFT)
def test_layer_agops_of_our_networks(name: str) -> None:
    net, x = cases.net(name), cases.points(name)
    expected = {key: slow_layer_agop(net, x, module) for key, module in readable(net).items()}
    found = layer_agops(net, x)
    assert found.keys() == {key for key, value in expected.items() if value is not None}
    for key, value in found.items():
        close(value, expected[key])


@pytest.mark.parametrize("name", CHAINS)
def test_the_first_layer_of_a_chain_reads_the_input(name: str) -> None:
    model, x = zoo.build(name)
    close(next(iter(layer_agops(model, x).values())), agop(model, x))


def test_a_model_that_works_in_place_leaves_the_inputs_alone() -> None:
    model, x = nn.Sequential(nn.ReLU(inplace=True), *zoo.build("mlp")[0]), zoo.build("mlp")[1]
    before = x.clone()
    close(agop(model, x), slow_agop(model, before))
    assert torch.equal(x, before)


def test_looking_leaves_nothing_behind() -> None:
    model, x = zoo.build("mlp")
    model.train()
    model[0].weight.requires_grad_(False)
    before, state = x.clone(), torch.get_rng_state()
    feature_ansatz(model, x)
    agop(model, x)
    assert model.training
    assert [p.requires_grad for p in model.parameters()] == [False] + [True] * 5
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(x, before)
    assert not x.requires_grad
    assert torch.equal(state, torch.get_rng_state())


# --- the ansatz ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_ansatz_is_the_correlation_of_entries(power: float) -> None:
    model, x = zoo.build("mlp")
    for name, product in layer_agops(model, x).items():
        weight = model.get_submodule(name).weight.detach()
        values, vectors = torch.linalg.eigh(product)
        other = vectors @ torch.diag(values.clamp(min=0) ** power) @ vectors.T
        entries = torch.stack([(weight.T @ weight).flatten(), other.flatten()])
        found = feature_ansatz(model, x, power=power)[name]
        assert found.correlation == pytest.approx(float(torch.corrcoef(entries)[0, 1]), abs=1e-9)
        assert found.cosine == pytest.approx(float(F.cosine_similarity(*entries, dim=0)), abs=1e-9)


def test_the_last_layer_agrees_whatever_was_learned() -> None:
    for name in ("mlp", "conv2d", "residual"):
        model, x = zoo.build(name)
        last = list(feature_ansatz(model, x).values())[-1]
        assert last.correlation == pytest.approx(1, abs=1e-9)
        assert last.cosine == pytest.approx(1, abs=1e-9)
    net, x = cases.net("dlgn"), cases.points("dlgn")
    assert feature_ansatz(net, x)["readout"].correlation == pytest.approx(1, abs=1e-9)


def test_ansatz_is_blind_to_the_scale_of_the_output() -> None:
    model, x = zoo.build("mlp")
    before = feature_ansatz(model, x, power=0.5)["0"]
    with torch.no_grad():
        model[4].weight *= 7
    after = feature_ansatz(model, x, power=0.5)["0"]
    assert after.correlation == pytest.approx(before.correlation, abs=1e-9)
    assert after.cosine == pytest.approx(before.cosine, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_ansatz_comes_true_as_a_network_learns_a_single_direction(seed: int) -> None:
    """y = |<w, x>| from a small start: the first layer's W^T W and the AGOP both turn to w w^T."""
    random = torch.Generator().manual_seed(seed)
    x, direction = torch.randn(400, 10, generator=random), torch.randn(10, generator=random)
    direction /= direction.norm()
    y = (x @ direction).abs()[:, None] - math.sqrt(2 / math.pi)
    net = build(relu_spec(10, width=32, depth=2, init=Init("torch", 0.3)), seed=seed)
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    before = feature_ansatz(net, x)["value_layers.0"]
    for _ in range(600):
        adam.zero_grad()
        (net(x) - y).square().mean().backward()
        adam.step()
    after, product = feature_ansatz(net, x)["value_layers.0"], agop(net, x)
    assert float(direction @ product @ direction / product.trace()) > 0.99
    assert before.correlation < 0.75
    assert after.correlation > 0.9
    assert after.cosine > before.cosine


# --- what is refused -----------------------------------------------------------------------------------------


def test_what_cannot_be_computed_says_why() -> None:
    model, x = zoo.build("mlp")
    with pytest.raises(InputError, match="power"):
        feature_ansatz(model, x, power=0.0)
    with pytest.raises(InputError, match="real numbers"):
        agop(*zoo.build("embedding"))
    with pytest.raises(InputError, match="no samples"):
        layer_agops(model, x[:0])
    with pytest.raises(Unsupported, match="no dense or convolutional layer"):
        layer_agops(nn.Tanh(), x)
    stack = build_stack(cases.SPECS["relu"], [0, 1], dtype=torch.float64)
    with pytest.raises(Unsupported, match="member"):
        agop(stack, cases.points("relu"))


def test_samples_that_share_a_call_are_told_apart() -> None:
    """A layer applied to a learned token as long as the batch: one gradient for all samples would be their sum."""
    torch.manual_seed(0)
    model = zoo.Shared().double()
    model.token.data = torch.randn(1, 4, dtype=torch.float64)
    for n in (1, 2, 3):
        x = torch.randn(n, 4, dtype=torch.float64)
        close(layer_agops(model, x)["layer"], slow_layer_agop(model, x, model.layer))
