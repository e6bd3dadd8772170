"""Parametrisations of convolutional networks: one function at the start, and what stays the same when the widths grow."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from unlazy import InputError, overlap_kernel, tangent_kernel
from unlazy.kernels.reference import tangent_kernel as slow_tangent_kernel
from unlazy.models.build import build, to_standard_parametrisation
from unlazy.models.folding import fold_batch_norm, half_space_normals
from unlazy.models.gates import SoftGate
from unlazy.models.image_layers import ScaledLayer, without_multipliers
from unlazy.models.image_net import GatedImageNet
from unlazy.models.parametrisation import Scaling
from unlazy.models.spec import ImageSpec, Init, conv_spec
from unlazy.runtime import short_hash, stream

BASE = ImageSpec((3, 5), channels=2, classes=3, batch_norm=False)
KINDS = {
    "relu": BASE.relu(),
    "soft": replace(BASE, gate=SoftGate(4.0), init=Init("torch")),
    "constant": replace(BASE, experts="constant"),
    "dense": replace(BASE, dense=4),
    "gated-dense": replace(BASE, dense=4, gated_dense=True),
    "residual": replace(BASE, blocks=(1, 1)).relu(),
    "batch-norm": replace(BASE, blocks=(1, 1), batch_norm=True),
}
OTHERS = ("ntk", "mup")


def pictures(n: int = 4, size: int = 6) -> Tensor:
    return torch.randn(n, 2, size, size, generator=stream(0, "pictures", n), dtype=torch.float64)


def lived(name: str, parametrisation: str) -> GatedImageNet:
    """A network in float64 whose batch-norms have seen something."""
    net = build(replace(KINDS[name], parametrisation=parametrisation), seed=1).double()
    net(pictures(9))
    return net.eval()


# --- one function ------------------------------------------------------------------------------------------------


def test_a_standard_network_is_what_it_was() -> None:
    """Ids of runs made before there was a choice, and their names."""
    assert "parametrisation" not in conv_spec().to_dict()
    assert short_hash(conv_spec().to_dict()) == "c65fbc3f0d3a"
    assert [name for name, _ in build(BASE).named_parameters()][:2] == [
        "gate_layers.0.conv.weight",
        "gate_layers.0.conv.bias",
    ]


def test_the_choice_is_kept_by_its_own_name() -> None:
    spec = replace(BASE, parametrisation="mean-field")
    assert spec.parametrisation == spec.to_dict()["parametrisation"] == "mup"
    assert ImageSpec.from_dict(spec.to_dict()) == spec
    assert build(spec.to_dict()).spec() == spec.to_dict()
    with pytest.raises(InputError, match="standard, ntk, mup"):
        replace(BASE, parametrisation="lazy")


@pytest.mark.parametrize("name", KINDS)
def test_ntk_starts_as_the_standard_network_and_mup_with_a_smaller_readout(name: str) -> None:
    standard, ntk, mup = (lived(name, parametrisation) for parametrisation in ("standard", *OTHERS))
    x = pictures()
    torch.testing.assert_close(ntk(x), standard(x), rtol=1e-5, atol=1e-5)
    plain, reads = to_standard_parametrisation(mup).state_dict(), 5 if KINDS[name].dense is None else 4
    for key, value in standard.state_dict().items():
        by = 1 / math.sqrt(reads) if key == "readout.output.weight" else 1.0
        torch.testing.assert_close(plain[key].double(), by * value.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parametrisation", OTHERS)
@pytest.mark.parametrize("name", KINDS)
def test_effective_weights_compute_the_same_and_so_do_folded_ones(name: str, parametrisation: str) -> None:
    net, x = lived(name, parametrisation), pictures(12)
    plain = to_standard_parametrisation(net)
    assert not any(isinstance(module, ScaledLayer) for module in plain.modules())
    for made in (plain, fold_batch_norm(net)):
        torch.testing.assert_close(made(x), net(x), rtol=1e-10, atol=1e-12)
        for mine, theirs in zip(made.gates(x).hard(), net.gates(x).hard(), strict=True):
            assert torch.equal(mine, theirs)
    torch.testing.assert_close(plain.train()(x), net.train()(x), rtol=1e-10, atol=1e-12)


def test_half_spaces_are_those_of_the_effective_weights() -> None:
    net, x = lived("batch-norm", "mup"), pictures(12)
    normals, offsets = half_space_normals(net, 2, [(1, 2, 3)], (6, 6))
    heights = torch.einsum("kchw,nchw->nk", normals, x) + offsets
    torch.testing.assert_close(heights[:, 0], net.pre_activations(x)[2][:, 1, 2, 3], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("parametrisation", OTHERS)
@pytest.mark.parametrize("name", ["relu", "soft", "dense", "batch-norm"])
def test_kernels_see_the_multipliers(name: str, parametrisation: str) -> None:
    """One backward pass per sample; and gradients by effective weights, times squared multipliers."""
    net, x = lived(name, parametrisation), pictures()
    exact = slow_tangent_kernel(net, x).diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(tangent_kernel(net, x), exact, rtol=1e-9, atol=1e-11)
    plain, weighted = to_standard_parametrisation(net), torch.zeros_like(exact)
    for key, _ in plain.named_parameters():
        module, part = net.get_submodule(key.rpartition(".")[0]), key.rpartition(".")[2]
        by = 1.0
        if isinstance(module, ScaledLayer):
            by = module.scaling.after * (module.scaling.before if part == "weight" else 1.0)
        weighted += by**2 * tangent_kernel(plain, x, parameters=[key])
    torch.testing.assert_close(weighted, exact, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("parametrisation", OTHERS)
@pytest.mark.parametrize("name", ["relu", "residual"])
def test_multipliers_are_no_nodes_of_paths(name: str, parametrisation: str) -> None:
    standard, other = lived(name, "standard"), lived(name, parametrisation)
    x = pictures()
    assert torch.equal(overlap_kernel(other, x), overlap_kernel(to_standard_parametrisation(other), x))
    if parametrisation == "ntk":
        assert torch.equal(overlap_kernel(other, x), overlap_kernel(standard, x))


def test_multipliers_follow_the_widths_a_layer_reads_and_makes() -> None:
    """3 channels, then 5, then 4 dense units, on pictures with 2; filters have 9 places."""
    base = replace(BASE, blocks=(1, 1), batch_norm=True, dense=4)
    mup, ntk = (build(replace(base, parametrisation=name)) for name in ("mup", "ntk"))
    expected = {  # W / w and b / c squared under mup, one over W / w squared under ntk
        "value_layers.0.conv": (3, 3, 2 * 9),
        "value_layers.0.norm": (3, 3, None),
        "value_layers.1.conv": (1, 3, 3 * 9),
        "value_layers.3.conv": (5 / 3, 5, 3 * 9),
        "value_layers.4.shortcut.0": (5 / 3, 5, 3),
        "readout.dense": (4 / 5, 4, 5),
        "readout.output": (1 / 4, 1, 4),
    }
    for name, (weight, bias, fan_in) in expected.items():
        scaling = without_multipliers(mup.get_submodule(name))[1]
        assert ((scaling.before * scaling.after) ** 2, scaling.after**2) == pytest.approx((weight, bias)), name
        inner, scaling = without_multipliers(ntk.get_submodule(name))
        assert scaling == (Scaling() if fan_in is None else Scaling(before=1 / math.sqrt(fan_in))), name
        assert (inner is ntk.get_submodule(name)) == (fan_in is None)


def test_rates_are_roots_of_the_widths_a_parameter_has() -> None:
    """Filters, pictures, classes and positions are no widths."""
    net = build(replace(BASE, blocks=(1, 1), batch_norm=True, dense=4, parametrisation="mup"))
    rates = net.rate_multipliers("adam")
    expected = {
        "value_layers.0.conv.inner.weight": 3,
        "value_layers.0.norm.inner.bias": 3,
        "value_layers.1.conv.inner.weight": 3 * 3,
        "value_layers.3.conv.inner.weight": 3 * 5,
        "value_layers.4.shortcut.0.inner.weight": 3 * 5,
        "value_layers.4.shortcut.1.inner.weight": 5,
        "readout.dense.inner.weight": 5 * 4,
        "readout.dense.inner.bias": 4,
        "readout.output.inner.weight": 4,
        "readout.output.inner.bias": 1,
    }
    assert {name: rates[name] ** -2 for name in expected} == pytest.approx(expected)
    assert set(net.rate_multipliers("sgd").values()) == {1.0}
    groups = net.parameter_groups(0.1, "adam")
    assert [group["lr"] for group in groups] == pytest.approx([0.1 * rate for rate in rates.values()])


# --- what does not depend on the width ---------------------------------------------------------------------------

WIDTHS = (8, 24, 72)


def wide(kind: str, parametrisation: str, width: int, seed: int) -> GatedImageNet:
    """Channels that grow from stage to stage, so that layers read and make different widths."""
    norm = kind == "batch-norm"
    spec = ImageSpec((width, 2 * width), (1, 1) if norm else (), channels=2, classes=1, batch_norm=norm)
    spec = spec if kind == "dlgn" else spec.relu()
    return build(replace(spec, parametrisation=parametrisation), seed=seed).double()


def step_change(kind: str, parametrisation: str, width: int, optimiser: str) -> tuple[float, float]:
    """Root mean square change of the output, and of the last layer's pre-activations, in one small step, over seeds."""
    x, changes = pictures(10, 5), []
    y = x.mean((1, 2, 3))[:, None]
    for seed in range(6):
        net = wide(kind, parametrisation, width, seed)
        out, hidden = net(x), net.pre_activations(x)[-1].detach()
        gradients = torch.autograd.grad((out - y - 1).square().mean(), list(net.parameters()))
        rates = net.rate_multipliers(optimiser)
        with torch.no_grad():
            for (name, parameter), gradient in zip(net.named_parameters(), gradients, strict=True):
                parameter -= 1e-5 * rates[name] * (gradient if optimiser == "sgd" else gradient.sign())
            moved = net.pre_activations(x)[-1] - hidden
            changes.append(((net(x) - out).square().mean(), moved.square().mean()))
    means = torch.tensor(changes).mean(0).sqrt()
    return float(means[0]), float(means[1])


def exponent(values: list[float]) -> float:
    """Slope of log value against log width."""
    log_width, log_value = (torch.tensor(numbers).double().log() for numbers in (WIDTHS, values))
    centred = log_width - log_width.mean()
    return float((centred * log_value).sum() / centred.square().sum())


@pytest.mark.parametrize("kind", ["relu", "dlgn", "batch-norm"])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_one_step_moves_output_and_features_as_each_parametrisation_says(kind: str, optimiser: str) -> None:
    """Outputs move alike at every width under ntk and mup; features do under mup, and stand still under ntk."""
    found = {
        name: [step_change(kind, name, width, optimiser) for width in WIDTHS] for name in ("standard", "ntk", "mup")
    }
    outputs = {name: exponent([row[0] for row in rows]) for name, rows in found.items()}
    hidden = {name: exponent([row[1] for row in rows]) for name, rows in found.items()}
    assert abs(outputs["ntk"]) < 0.2, outputs
    assert abs(outputs["mup"]) < 0.2, outputs
    assert outputs["standard"] > 0.35, outputs
    assert abs(hidden["mup"]) < 0.2, hidden
    assert -0.7 < hidden["ntk"] < -0.3, hidden


def test_batch_norms_start_as_usual_in_every_parametrisation() -> None:
    for parametrisation in OTHERS:
        plain = to_standard_parametrisation(build(replace(KINDS["batch-norm"], parametrisation=parametrisation)))
        for module in plain.modules():
            if isinstance(module, nn.BatchNorm2d):
                torch.testing.assert_close(module.weight, torch.ones_like(module.weight))
                assert not module.bias.any()
