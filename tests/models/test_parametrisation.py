"""Parametrisations: same function at the start, and what stays the same when the width grows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from unlazy import InputError, build, tangent_kernel
from unlazy.kernels.reference import tangent_kernel as slow_tangent_kernel
from unlazy.models.build import build_stack, member, to_standard_parametrisation
from unlazy.models.gates import HardGate, SoftGate
from unlazy.models.net import GatedNet
from unlazy.models.parametrisation import PARAMETRISATIONS
from unlazy.models.spec import Init, NetSpec, relu_spec
from unlazy.probes.classes import dense_tangent_kernel
from unlazy.runtime import short_hash, stream
from unlazy.theory.enumerate import path_sum
from unlazy.theory.regions import path_polyhedron
from unlazy.training.ensemble import MemberAdam

HE = Init("he")
KINDS = {
    "relu": relu_spec(5, 2, width=7, depth=3, init=HE),
    "dlgn": NetSpec(5, 2, width=7, depth=2, gate=SoftGate(4.0)),
    "pwc": NetSpec(5, 2, width=7, depth=2, experts="constant", gate=SoftGate(4.0)),
    "pwc-one": NetSpec(5, 2, width=7, depth=2, experts="constant", constant_input="one", gate=HardGate(None)),
    "shallow": relu_spec(5, 2, width=7, depth=1),
    "no-biases": relu_spec(5, 2, width=7, depth=2, value_bias=False),
}


def points(n: int = 6, d: int = 5) -> Tensor:
    return torch.randn(n, d, generator=stream(0, "points", d), dtype=torch.float64)


def as_(spec: NetSpec, parametrisation: str, width: int | None = None) -> NetSpec:
    plain = spec.to_dict() | {"parametrisation": parametrisation}
    return NetSpec.from_dict(plain | ({} if width is None else {"width": width}))


def test_a_standard_spec_is_what_it_was() -> None:
    """Ids of runs made before there was a choice: the hash of the spec, and the drawn numbers."""
    spec = relu_spec(2, width=16)
    assert "parametrisation" not in spec.to_dict()
    assert short_hash(spec.to_dict()) == "a6786a3dab3b"
    assert [name for name, _ in build(spec).named_parameters()][:2] == ["value_layers.0.weight", "value_layers.0.bias"]
    drawn = torch.rand(16, 2, generator=stream(3, "init", "value.0.weight"), dtype=torch.float64)
    expected = ((2 * drawn - 1) / math.sqrt(2)).float()
    assert torch.equal(build(spec, seed=3).value_layers[0].weight, expected)


def test_mean_field_is_another_word() -> None:
    spec = relu_spec(2, parametrisation="mean-field")
    assert spec.parametrisation == spec.to_dict()["parametrisation"] == "mup"
    assert NetSpec.from_dict(spec.to_dict()) == spec


def test_unknown_and_impossible_choices() -> None:
    with pytest.raises(InputError, match="standard, ntk, mup"):
        relu_spec(2, parametrisation="lazy")
    with pytest.raises(InputError, match="quadratic gates"):
        NetSpec(2, gating="quadratic", parametrisation="ntk")
    with pytest.raises(InputError, match="sgd, adam"):
        build(relu_spec(2)).rate_multipliers("lion")


@pytest.mark.parametrize("name", KINDS)
def test_ntk_starts_as_the_standard_network_and_mup_with_a_smaller_readout(name: str) -> None:
    spec, x = KINDS[name], points()
    standard, ntk, mup = (build(as_(spec, p), seed=4, dtype=torch.float64) for p in ("standard", "ntk", "mup"))
    torch.testing.assert_close(ntk(x), standard(x), rtol=1e-12, atol=1e-13)
    for mine, theirs in zip(
        (*mup.gate_layers, *mup.value_layers), (*standard.gate_layers, *standard.value_layers), strict=True
    ):
        torch.testing.assert_close(mine.weight, theirs.weight, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(mup.readout.weight, standard.readout.weight / math.sqrt(7), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("parametrisation", ["ntk", "mup"])
@pytest.mark.parametrize("name", KINDS)
def test_the_standard_copy_computes_the_same(name: str, parametrisation: str) -> None:
    net, x = build(as_(KINDS[name], parametrisation), seed=1, dtype=torch.float64), points()
    plain = to_standard_parametrisation(net)
    assert plain.settings.parametrisation == "standard"
    torch.testing.assert_close(plain(x), net(x), rtol=1e-12, atol=1e-13)
    stack = build_stack(as_(KINDS[name], parametrisation), [1, 2], dtype=torch.float64)
    torch.testing.assert_close(to_standard_parametrisation(stack)(x), stack(x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("parametrisation", ["ntk", "mup"])
@pytest.mark.parametrize("name", KINDS)
def test_members_of_a_stack_are_single_networks(name: str, parametrisation: str) -> None:
    spec, x = as_(KINDS[name], parametrisation), points()
    stack = build_stack(spec, [3, 8], dtype=torch.float64)
    assert stack.members == 2
    for index, seed in enumerate((3, 8)):
        torch.testing.assert_close(
            stack(x)[index], build(spec, seed=seed, dtype=torch.float64)(x), rtol=1e-12, atol=1e-13
        )
        assert torch.equal(member(stack, index)(x), build(spec, seed=seed, dtype=torch.float64)(x))


@pytest.mark.parametrize("parametrisation", ["ntk", "mup"])
@pytest.mark.parametrize("name", ["relu", "dlgn", "pwc", "no-biases"])
def test_kernels_see_the_multipliers(name: str, parametrisation: str) -> None:
    """The fast kernels against one backward pass per sample, and against effective gradients times squared multipliers."""
    net, x = build(as_(KINDS[name], parametrisation), seed=1, dtype=torch.float64), points()
    exact = slow_tangent_kernel(net, x).diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(tangent_kernel(net, x), exact, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(dense_tangent_kernel(net, x), exact, rtol=1e-10, atol=1e-12)
    plain = to_standard_parametrisation(net)
    weighted = torch.zeros_like(exact)
    for key, parameter in plain.named_parameters():
        layer, kind = key.rsplit(".", 1)
        scaling = net.get_submodule(layer).scaling
        by = scaling.after * (scaling.before if kind == "weight" else 1.0)
        weighted += by**2 * tangent_kernel(plain, x, parameters=[key])
        assert parameter.shape == net.get_submodule(layer).inner.get_parameter(kind).shape
    torch.testing.assert_close(weighted, exact, rtol=1e-10, atol=1e-12)


# --- what does not depend on the width -------------------------------------------------------------------------

WIDTHS = (32, 96, 288)


def wide(kind: str, parametrisation: str, width: int, seeds: int = 24, outputs: int = 1) -> GatedNet:
    if kind == "relu":
        spec = relu_spec(5, outputs, depth=3, init=HE)
    else:
        spec = NetSpec(5, outputs, depth=3, gate=SoftGate(4.0), init=HE)
    return build_stack(as_(spec, parametrisation, width), list(range(seeds)), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["relu", "dlgn"])
def test_forward_variance_of_an_ntk_network_does_not_depend_on_the_width(kind: str) -> None:
    x = points(40)
    for parametrisation, expected in (("ntk", 0.0), ("mup", -1.0)):
        nets = [wide(kind, parametrisation, width, outputs=64) for width in WIDTHS]
        variances = [float(net(x).detach().square().mean()) for net in nets]
        assert abs(exponent(variances) - expected) < 0.15, (parametrisation, variances)


@pytest.mark.parametrize("kind", ["relu", "dlgn"])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_one_step_changes_the_function_alike_at_every_width(kind: str, optimiser: str) -> None:
    """Under mup and ntk; under the standard parametrisation the change grows with the width."""
    for parametrisation in ("mup", "ntk"):
        changes = [step_change(wide(kind, parametrisation, width), optimiser)[0] for width in WIDTHS]
        assert abs(exponent(changes)) < 0.15, (parametrisation, changes)
    assert exponent([step_change(wide(kind, "standard", width), optimiser)[0] for width in WIDTHS]) > 0.35


@pytest.mark.parametrize("kind", ["relu", "dlgn"])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_hidden_units_move_under_mup_and_stand_still_under_ntk(kind: str, optimiser: str) -> None:
    hidden = {p: [step_change(wide(kind, p, width), optimiser)[1] for width in WIDTHS] for p in ("mup", "ntk")}
    assert abs(exponent(hidden["mup"])) < 0.15, hidden
    assert -0.65 < exponent(hidden["ntk"]) < -0.35, hidden


def step_change(net: GatedNet, optimiser: str) -> tuple[float, float]:
    """Root mean square change of the output, and of the last layer's pre-activations, in one small step."""
    x = points(20)
    y = x[:, :1].sin()
    before, hidden = net(x).detach(), net.pre_activations(x)[-1].detach()
    loss = (net(x) - y).square().mean((-2, -1)).sum()
    parameters = dict(net.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    rates = net.rate_multipliers(optimiser)
    with torch.no_grad():
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            move = gradient if optimiser == "sgd" else gradient.sign()
            parameter -= 1e-4 * rates[name] * move
        change = (net(x) - before).square().mean().sqrt()
        moved = (net.pre_activations(x)[-1] - hidden).square().mean().sqrt()
    return float(change), float(moved)


def exponent(values: list[float]) -> float:
    """Slope of log value against log width."""
    log_width = torch.tensor(WIDTHS).double().log()
    log_value = torch.tensor(values).double().log()
    centred = log_width - log_width.mean()
    return float((centred * log_value).sum() / centred.square().sum())


# --- what else reads a network's numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_the_sum_over_paths_is_the_network_in_every_parametrisation(parametrisation: str) -> None:
    net = build(NetSpec(2, width=3, depth=2, parametrisation=parametrisation), seed=1, dtype=torch.float64)
    x = torch.randn(9, 2, generator=stream(5, "paths"), dtype=torch.float64)
    torch.testing.assert_close(path_sum(net, x), net(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("parametrisation", ["ntk", "mup"])
def test_path_regions_hold_the_same_points_in_every_parametrisation(parametrisation: str) -> None:
    net = build(NetSpec(2, width=3, depth=2, parametrisation=parametrisation), seed=1, dtype=torch.float64)
    x = torch.randn(200, 2, generator=stream(5, "regions"), dtype=torch.float64)
    first, second = (layer.bool() for layer in net.gates(x).hard())
    inside = path_polyhedron(net, (0, 1)).contains(x)
    assert torch.equal(inside, first[:, 0] & second[:, 1])
    assert 0 < inside.sum() < 200


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_a_stack_under_our_adam_moves_like_single_networks_under_torch_with_their_rates(parametrisation: str) -> None:
    spec = NetSpec(2, width=8, depth=2, parametrisation=parametrisation)
    rates = [1e-2, 3e-2]
    stack = build_stack(spec, [0, 1], dtype=torch.float64)
    singles = [member(stack, index) for index in range(2)]
    x = torch.randn(16, 2, generator=stream(7, "adam"), dtype=torch.float64)
    ours = MemberAdam(stack, rates)
    theirs = [torch.optim.Adam(one.parameter_groups(lr, "adam")) for one, lr in zip(singles, rates, strict=True)]
    for _ in range(20):
        ours.minimise((stack(x) - 1).square().mean((-2, -1)))
        for one, optimiser in zip(singles, theirs, strict=True):
            optimiser.zero_grad()
            (one(x) - 1).square().mean().backward()
            optimiser.step()
    for index, one in enumerate(singles):
        torch.testing.assert_close(member(stack, index)(x), one(x), rtol=1e-9, atol=1e-10)
