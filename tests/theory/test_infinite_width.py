"""Closed forms of unbounded width: against integrals, identities, and finite networks that approach them at the known rate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unlazy import InputError, Unsupported, overlap_kernel, tangent_kernel
from unlazy.kernels.overlap import neural_path_kernel
from unlazy.models.build import build_stack
from unlazy.models.gates import HardGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import Init, NetSpec, relu_spec
from unlazy.runtime import stream
from unlazy.theory.infinite_width import (
    Variances,
    nngp_kernel,
    ntk_limit,
    overlap_limit,
    starting_variances,
    value_kernel_limit,
)

UNEVEN = Variances((1.5, 2.2, 1.8), (0.3, 0.2, 0.4))


def points(n: int = 3, d: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- against integrals and identities ------------------------------------------------------------------------


def gaussian_means(covariance: Tensor) -> tuple[float, float]:
    """E[relu(u) relu(v)] and P(u > 0, v > 0) by quadrature over the angle, piece by piece between the kinks."""
    factor = np.linalg.cholesky(covariance.numpy())
    kinks = [math.atan2(*row[::-1]) + side * math.pi / 2 for row in factor for side in (-1, 1)]
    edges = np.sort(np.mod([*kinks, 0.0], 2 * math.pi))
    edges = np.append(edges, edges[0] + 2 * math.pi)
    nodes, weights = np.polynomial.legendre.leggauss(40)
    product = both = 0.0
    for low, high in itertools.pairwise(edges):
        t = low + (high - low) * (nodes + 1) / 2
        u, v = factor @ np.stack([np.cos(t), np.sin(t)])
        scale = (high - low) / 2 / (2 * math.pi)
        product += scale * weights @ (np.maximum(u, 0) * np.maximum(v, 0)) * 2  # E[r^2] = 2
        both += scale * weights @ ((u > 0) & (v > 0))
    return product, both


@pytest.mark.parametrize("biases", [(0.0, 0.0), (0.3, 0.7)])
def test_one_hidden_layer_equals_its_integrals(biases: tuple[float, float]) -> None:
    x, law = points(4), Variances((1.3, 0.9), biases)
    first = law.weights[0] * x @ x.T / 4 + law.biases[0]
    for i, j in [(0, 1), (0, 2), (1, 2), (3, 0)]:
        product, both = gaussian_means(first[[i, j]][:, [i, j]])
        output = 0.9 * product + law.biases[1]
        close(nngp_kernel(x, variances=law)[i, j], torch.tensor(output, dtype=torch.float64))
        tangent = output + 0.9 * both * float(first[i, j])
        close(ntk_limit(x, variances=law)[i, j], torch.tensor(tangent, dtype=torch.float64))
        close(ntk_limit(x, variances=law, parametrisation="standard")[i, j], torch.tensor(product, dtype=torch.float64))
        share = overlap_limit(x, depth=1, gates=Variances((1.3,), biases[:1]))[i, j]
        close(share, torch.tensor(both, dtype=torch.float64))


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(0, 10**6))
def test_diagonals_in_closed_form(depth: int, seed: int) -> None:
    """Variance 2 keeps the size: S_L(x, x) = 2 |x|^2 / d in every layer, and each layer adds that to the tangent kernel."""
    x = points(seed=seed)
    size, law = 2 * x.square().sum(1) / 4, Variances.equal(depth + 1)
    close(nngp_kernel(x, variances=law).diagonal(), size)
    close(ntk_limit(x, variances=law).diagonal(), (depth + 1) * size)
    close(ntk_limit(x, variances=law, parametrisation="standard").diagonal(), depth * size / 2)
    close(overlap_limit(x, depth=depth).diagonal(), torch.full((3,), 0.5**depth, dtype=torch.float64))


@settings(max_examples=25)
@given(st.integers(1, 4), st.floats(1e-3, 1e3), st.integers(0, 10**6))
def test_without_biases_kernels_scale_with_each_input(depth: int, factor: float, seed: int) -> None:
    x, law = points(seed=seed), Variances.equal(depth + 1)
    scales = torch.tensor([1.0, factor, 1.0], dtype=torch.float64)
    for kernel in (nngp_kernel, ntk_limit):
        close(kernel(scales[:, None] * x, variances=law), scales * scales[:, None] * kernel(x, variances=law), 1e-9)
    close(overlap_limit(scales[:, None] * x, depth=depth), overlap_limit(x, depth=depth), 1e-9)


@pytest.mark.parametrize("law", [Variances.equal(4), UNEVEN], ids=["he", "uneven"])
def test_kernels_are_symmetric_positive_and_agree_across_sets(law: Variances) -> None:
    x = torch.cat([points(6), -points(2), torch.zeros(1, 4, dtype=torch.float64), points(1)])  # opposite, zero, equal
    depth = len(law.weights) - 1
    kernels = [
        lambda *sets: nngp_kernel(*sets, variances=law),
        lambda *sets: ntk_limit(*sets, variances=law),
        lambda *sets: ntk_limit(*sets, variances=law, parametrisation="standard"),
        lambda *sets: overlap_limit(*sets, depth=depth),
        lambda *sets: value_kernel_limit(*sets, values=law),
        lambda *sets: value_kernel_limit(*sets, values=law, experts="constant", parametrisation="standard"),
    ]
    for kernel in kernels:
        own = kernel(x)
        assert torch.isfinite(own).all()
        close(own, own.T)
        assert torch.linalg.eigvalsh(own).min() > -1e-7  # equal points: angles below 1e-8 are blurred
        close(kernel(x[:4], x[2:]), own[:4, 2:], 1e-7)


def test_no_angle_is_lost_on_the_diagonal() -> None:
    """1 - cos is 0 there, not 1e-16: its square root would show in the eighth digit, and more with every layer."""
    x = points(200, 7)
    assert (overlap_limit(x, depth=5).diagonal() == 0.5**5).all()
    close(ntk_limit(x, variances=Variances.equal(20)).diagonal(), 20 * 2 * x.square().sum(1) / 7, 1e-14)


def test_at_zero_a_linear_gate_is_open_and_a_relu_closed() -> None:
    x = torch.cat([torch.zeros(1, 4, dtype=torch.float64), points(1)])
    half, law = 0.5**2, Variances.equal(3)
    close(overlap_limit(x, depth=2), torch.tensor([[1.0, half], [half, half]], dtype=torch.float64))
    assert (ntk_limit(x, variances=law)[0] == 0).all()
    spec = NetSpec(4, width=400, depth=2, gate_bias=False, init=Init("he"))
    finite = overlap_kernel(build_stack(spec, range(4), dtype=torch.float64), x).mean(0) / 400**2
    torch.testing.assert_close(finite, overlap_limit(x, depth=2), rtol=0, atol=0.02)


def test_value_kernel_is_the_path_law_with_the_limiting_overlap() -> None:
    """H = <x, x'> Lambda, times L prod(weights) / d / width^depth; the same from the finite formula."""
    x, values = points(5), Variances((0.7, 1.1, 1.9, 0.4), (0.0,) * 4)
    law = 4 * math.prod(values.weights) * overlap_limit(x, depth=3)
    close(value_kernel_limit(x, values=values), law * (x @ x.T) / 4)
    close(value_kernel_limit(x, values=values, experts="constant"), law)
    spec = NetSpec(4, width=600, depth=3, gate_bias=False, value_bias=False, init=Init("he"), gate=HardGate(None))
    finite = neural_path_kernel(build_stack(spec, range(5), dtype=torch.float64), x).mean(0) / 600**3
    torch.testing.assert_close(
        4 * math.prod(values.weights) * finite / 4, value_kernel_limit(x, values=values), rtol=0, atol=0.02
    )


# --- which network a formula is the limit of -----------------------------------------------------------------


SPECS = {
    "relu-he": relu_spec(5, width=40, depth=3, init=Init("he", 1.5)),
    "relu-torch": relu_spec(5, width=40, depth=3, init=Init("torch", 2.0)),
    "relu-torch-no-bias": relu_spec(5, width=40, depth=3, value_bias=False),
    "dlgn-he": NetSpec(5, width=40, depth=2, init=Init("he")),
    "dlgn-torch": NetSpec(5, width=40, depth=2),
    "ones": NetSpec(5, width=40, depth=2, experts="constant"),
    "one": NetSpec(5, width=40, depth=2, experts="constant", constant_input="one"),
    "linear": NetSpec(5, width=40, depth=2, gating="open", gate=HardGate(None), init=Init("he")),
}


@pytest.mark.parametrize("name", SPECS)
def test_stated_variances_are_those_of_the_drawn_numbers(name: str) -> None:
    """Measured over many networks; later biases of the torch scheme fall with the width, so their limit is 0."""
    spec = SPECS[name]
    net = build_stack(spec, range(400), dtype=torch.float64)
    branches = {"value": [*net.value_layers, net.readout]}
    if spec.gating == "linear":
        branches["gate"] = list(net.gate_layers)
    for branch, layers in branches.items():
        law = starting_variances(spec, branch)
        assert len(layers) == len(law.weights)
        for index, (layer, weight, bias) in enumerate(zip(layers, law.weights, law.biases, strict=True)):
            measured = float(layer.weight.detach().square().mean()) * layer.weight.shape[-1]
            assert measured == pytest.approx(weight, rel=0.05)
            if layer.bias is not None:
                vanishing = spec.init.scale**2 / (3 * 40) if index and spec.init.scheme == "torch" else 0.0
                assert float(layer.bias.detach().square().mean()) == pytest.approx(bias + vanishing, rel=0.1)


@pytest.mark.parametrize("init", [Init("he"), Init("torch", 1.5)], ids=["he", "torch"])
def test_our_relu_networks_tend_to_the_stated_limit(init: Init) -> None:
    """Drawn by the package itself, biases and all, with many inputs: the shares that grow with the width."""
    spec, x = relu_spec(64, width=256, depth=2, init=init), points(3, 64)
    stack, growing = build_stack(spec, range(100), dtype=torch.float64), ["value_layers.1.weight", "readout.weight"]
    limit = ntk_limit(x, variances=starting_variances(spec), parametrisation="standard")
    found = tangent_kernel(stack, x, parameters=growing) / 256
    error = found.std(0) / 100**0.5
    assert ((found.mean(0) - limit).abs() <= 5 * error).all()
    assert float((error / limit).max()) < 0.05  # the test can tell a wrong variance
    rest = tangent_kernel(stack, x) / 256 - found  # the first matrix and the biases: of order d / m
    assert 0 < float(rest.mean(0).diagonal().max() / limit.diagonal().max()) < 64 / 256


def test_a_uniform_first_layer_is_the_one_exception() -> None:
    """Two inputs at 30 degrees in the plane: a uniform square favours them, the next layers see Gaussians again."""
    x = torch.tensor([[1.0, 0.0], [math.cos(math.pi / 6), 0.5]], dtype=torch.float64)
    spec = NetSpec(2, width=800, depth=3, gate_bias=False)
    gates = build_stack(spec, range(30), dtype=torch.float64).gates(x).hard()
    shares = [float((gate[:, 0] & gate[:, 1]).double().mean()) for gate in gates]
    square = 0.5 - math.tan(math.pi / 6) / 8  # the half square less a triangle
    gaussian = float(overlap_limit(x, depth=1)[0, 1])
    assert gaussian == pytest.approx(5 / 12)
    assert shares[0] == pytest.approx(square, abs=0.006)
    assert abs(square - gaussian) > 0.01
    assert shares[1] == pytest.approx(gaussian, abs=0.008)
    assert shares[2] == pytest.approx(gaussian, abs=0.008)


# --- finite networks approach the limit at the known rate ----------------------------------------------------


def drawn(spec: NetSpec, members: int, laws: dict[str, Variances], seed: int) -> tuple[GatedNet, dict[str, float]]:
    """A stack of Gaussian draws with the given variances (all from one stream), and the variance of each parameter."""
    net = build_stack(spec, [0], dtype=torch.float64)
    random, variances = stream(seed, "limit", spec.width), {}
    for branch, layers in {"gate": net.gate_layers, "value": [*net.value_layers, net.readout]}.items():
        for index, layer in enumerate(layers):
            law = laws[branch]
            for kind, variance in (
                ("weight", law.weights[index] / layer.weight.shape[-1]),
                ("bias", law.biases[index]),
            ):
                parameter = getattr(layer, kind)
                if parameter is not None:
                    shape = (members, *parameter.shape[1:])
                    numbers = torch.randn(shape, generator=random, dtype=torch.float64)
                    parameter.data = math.sqrt(variance) * numbers
                    name = next(key for key, value in net.named_parameters() if value is parameter)
                    variances[name] = variance
    return net, variances


def in_chunks(members: int, size: int = 2000) -> list[int]:
    return [min(size, members - start) for start in range(0, members, size)]


Kernel = Callable[[int, int, int, Tensor], Tensor]


def relu_standard(width: int, members: int, seed: int, x: Tensor) -> Tensor:
    spec = relu_spec(4, width=width, depth=2, value_bias=False, init=Init("he"))
    law = {"value": starting_variances(spec), "gate": Variances.equal(2)}
    parts = [drawn(spec, size, law, seed + i)[0] for i, size in enumerate(in_chunks(members))]
    return torch.cat([tangent_kernel(net, x) for net in parts]) / width


def relu_ntk(width: int, members: int, seed: int, x: Tensor) -> Tensor:
    """Parameters of variance 1: the gradient by each is that by the drawn one times its standard deviation."""
    spec = relu_spec(4, width=width, depth=2)
    kernels = []
    for i, size in enumerate(in_chunks(members)):
        net, variances = drawn(spec, size, {"value": UNEVEN, "gate": Variances.equal(2)}, seed + i)
        kernels.append(sum(value * tangent_kernel(net, x, parameters=[name]) for name, value in variances.items()))
    return torch.cat(kernels)


def relu_outputs(width: int, members: int, seed: int, x: Tensor) -> Tensor:
    """E[f f' | last hidden layer]: its activations' product, which is the readout's share of the tangent kernel."""
    spec = relu_spec(4, width=width, depth=2)
    law = {"value": UNEVEN, "gate": Variances.equal(2)}
    parts = [drawn(spec, size, law, seed + i)[0] for i, size in enumerate(in_chunks(members))]
    kernels = [tangent_kernel(net, x, parameters=["readout.weight"]) for net in parts]
    return UNEVEN.weights[-1] * torch.cat(kernels) / width + UNEVEN.biases[-1]


GATED = {"gate": Variances((1.0, 0.8), (0.5, 0.3)), "value": Variances((1.5, 2.2, 1.8), (0.0, 0.0, 0.0))}


def dlgn_overlap(width: int, members: int, seed: int, x: Tensor) -> Tensor:
    spec = NetSpec(4, width=width, depth=2, gate=HardGate(None), value_bias=False)
    parts = [drawn(spec, size, GATED, seed + i)[0] for i, size in enumerate(in_chunks(members))]
    return torch.cat([overlap_kernel(net, x) for net in parts]) / width**2


def dlgn_values(width: int, members: int, seed: int, x: Tensor) -> Tensor:
    spec = NetSpec(4, width=width, depth=2, gate=HardGate(None), value_bias=False)
    parts = [drawn(spec, size, GATED, seed + i)[0] for i, size in enumerate(in_chunks(members))]
    return torch.cat([tangent_kernel(net, x, parameters="value") for net in parts]) / width


LIMITS = {
    relu_standard: lambda x: ntk_limit(x, variances=Variances.equal(3), parametrisation="standard"),
    relu_ntk: lambda x: ntk_limit(x, variances=UNEVEN),
    relu_outputs: lambda x: nngp_kernel(x, variances=UNEVEN),
    dlgn_overlap: lambda x: overlap_limit(x, depth=2, gates=GATED["gate"]),
    dlgn_values: lambda x: value_kernel_limit(
        x, values=GATED["value"], gates=GATED["gate"], parametrisation="standard"
    ),
}


def slope(widths: list[int], values: list[float]) -> float:
    return float(np.polyfit(np.log(widths), np.log(values), 1)[0])


RISING = [  # widths and draws chosen so that chance is well below the deviation itself
    (relu_standard, [4, 8, 16, 32], 8000),
    (dlgn_values, [4, 8, 16, 32], 8000),
    pytest.param(relu_outputs, [4, 8, 16, 32], 200_000, marks=pytest.mark.slow),
    pytest.param(dlgn_overlap, [2, 4, 8, 16], 400_000, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kernel", "widths", "draws"), RISING)
def test_the_mean_is_off_by_one_over_the_width(kernel: Kernel, widths: list[int], draws: int) -> None:
    x = points()
    deviations = [float((kernel(width, draws, 0, x).mean(0) - LIMITS[kernel](x)).norm()) for width in widths]
    assert slope(widths, deviations) == pytest.approx(-1, abs=0.15)


@pytest.mark.parametrize("kernel", LIMITS)
def test_one_draw_is_off_by_one_over_the_root_of_the_width(kernel: Kernel) -> None:
    x, widths = points(), [32, 64, 128, 256]
    found = [kernel(width, 120, 0, x) for width in widths]
    spreads = [float(draws.std(0).norm()) for draws in found]
    assert slope(widths, spreads) == pytest.approx(-0.5, abs=0.1)
    limit, error = LIMITS[kernel](x), found[-1].std(0) / 120**0.5
    assert ((found[-1].mean(0) - limit).abs() <= 4 * error + limit.norm() / 256).all()  # chance, and order 1/m
    assert float(limit.abs().max()) > 15 * float(error.max())  # the test can tell a wrong constant


# --- what is refused -----------------------------------------------------------------------------------------


def test_what_has_no_limit_says_why() -> None:
    x = points()
    with pytest.raises(InputError, match="at least 0"):
        Variances((1.0, -1.0), (0.0, 0.0))
    with pytest.raises(InputError, match="bias variance per layer"):
        Variances((1.0, 1.0), (0.0,))
    with pytest.raises(InputError, match="parametrisation"):
        ntk_limit(x, variances=Variances.equal(2), parametrisation="mu")
    with pytest.raises(InputError, match="no width"):
        ntk_limit(x, variances=Variances.equal(1), parametrisation="standard")
    with pytest.raises(InputError, match="columns"):
        nngp_kernel(x, points(d=5), variances=Variances.equal(2))
    with pytest.raises(InputError, match="gating layers"):
        overlap_limit(x, depth=3, gates=Variances.equal(2))
    with pytest.raises(InputError, match="hidden layer"):
        value_kernel_limit(x, values=Variances.equal(1))
    with pytest.raises(InputError, match="experts"):
        value_kernel_limit(x, values=Variances.equal(2), experts="square")
    with pytest.raises(Unsupported, match="own"):
        starting_variances(relu_spec(2), "gate")
