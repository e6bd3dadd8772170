"""The exact statements of the half-space paper: the error of each identity on one network whose paths can all be enumerated.

Errors are relative to the size of the compared numbers. The two networks of the paper's Figure 1 and their numbers are here, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unlazy.kernels.overlap import overlap_kernel, path_count
from unlazy.kernels.regression import kernel_regression
from unlazy.models.build import build
from unlazy.models.gates import HardGate, SoftGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec, deep_linear_spec, relu_spec
from unlazy.runtime import stream
from unlazy.theory.enumerate import active_paths, fit_free_experts, hidden_sum, path_gates, path_sum, paths_of
from unlazy.theory.regions import circle_pieces, gate_functions, line_pieces, path_pieces, path_polyhedron
from unlazy.theory.value_kernel import draw_value_kernels, expected_value_kernel

STEPS = (1e-1, 1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12)  # relative sizes of parameter changes
SMALL_STEP = 1e-9
RIDGE = 1e-3
INDEPENDENT = 0.05  # a point is independent of others if this share of its path features is orthogonal to theirs

# --- the networks of Figure 1 ---------------------------------------------------------------------------------
# The paper draws the regions only. The weights here are our own choice of networks with such regions.

TWO_PART_PATH = (0, 0)
JUMPING_PATH = (0, 0)
Numbers = Sequence[float] | Sequence[Sequence[float]]


def two_part_net() -> GatedNet:
    """One input. The path through the first unit of both layers is active on [0.5, 1.5] and on [2.5, 3.5].

    Unit 1 of layer 2 sees the zigzag relu(x) - 2 relu(x - 1) + 2 relu(x - 2) - 2 relu(x - 3) - 1/2; the other units of
    layer 2 are never open. (Figure 1, left.)
    """
    numbers: dict[str, Numbers] = {
        "value_layers.0.weight": [[1.0]] * 4,
        "value_layers.0.bias": [0.0, -1.0, -2.0, -3.0],
        "value_layers.1.weight": [[1.0, -2.0, 2.0, -2.0], *[[0.0] * 4] * 3],
        "value_layers.1.bias": [-0.5, -1.0, -1.0, -1.0],
        "readout.weight": [[1.0] * 4],
        "readout.bias": [0.0],
    }
    return _network_with_weights(relu_spec(1, width=4, depth=2), numbers)


def jumping_net(eps: float, *, linear_gates: bool = False) -> GatedNet:
    """Two inputs. The path through the first unit of both layers is active on the right half-plane for eps > 0, on the first
    quadrant for eps <= 0, however small eps is. (Figure 1, right.)

    Layer 1 is relu(x1), relu(x2), relu(-x2); unit 1 of layer 2 sees relu(x2) + eps relu(-x2). ``linear_gates``: the DLGN
    whose gating network has the same weights; its half-space there is (1 - eps) x2 >= 0 and does not jump.
    """
    spec = relu_spec(2, width=3, depth=2, gate_bias=False, value_bias=False)
    if linear_gates:
        spec = replace(spec, gating="linear")
    first, second = [[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], [[0.0, 1.0, eps], *[[0.0] * 3] * 2]
    numbers: dict[str, Numbers] = {"readout.weight": [[1.0] * 3]}
    for branch in ("gate_layers", "value_layers") if linear_gates else ("value_layers",):
        numbers |= {f"{branch}.0.weight": first, f"{branch}.1.weight": second}
    return _network_with_weights(spec, numbers)


def _network_with_weights(spec: NetSpec, numbers: Mapping[str, Numbers]) -> GatedNet:
    """A float64 network of this spec with the given parameters."""
    net = build(spec, dtype=torch.float64)
    net.load_state_dict({name: torch.tensor(entries, dtype=torch.float64) for name, entries in numbers.items()})
    return net


# --- random networks -----------------------------------------------------------------------------------------

KINDS = {
    "relu": "ReLU net",
    "relu-biases": "ReLU net with biases",
    "dlgn": "DLGN, linear experts",
    "dlgn-biases": "DLGN, linear experts, with biases",
    "dlgn-soft": "DLGN, linear experts, soft gates",
    "pwc": "DLGN, constant experts",
    "pwc-biases": "DLGN, constant experts, with biases",
    "linear": "deep linear net",
}


class Size(NamedTuple):
    """Inputs, units per layer, gated layers."""

    inputs: int
    width: int
    depth: int

    def __str__(self) -> str:
        return f"{self.inputs}x{self.width}x{self.depth}"


SIZES = (Size(2, 2, 2), Size(2, 3, 3), Size(3, 4, 2), Size(5, 2, 4), Size(2, 4, 4))


def random_spec(kind: str, size: Size) -> NetSpec:
    """The architecture of a kind and size. Gates are hard unless the kind ends in ``-soft``; ``-biases`` adds biases."""
    inputs, width, depth = size
    biases = kind.endswith("-biases")
    sizes: dict[str, Any] = {"width": width, "depth": depth, "gate_bias": biases, "value_bias": biases}
    if kind.startswith("relu"):
        return relu_spec(inputs, **sizes)
    if kind == "linear":
        return deep_linear_spec(inputs, **sizes)
    experts = "constant" if kind.startswith("pwc") else "linear"
    return NetSpec(inputs, experts=experts, gate=SoftGate() if kind.endswith("-soft") else HardGate(None), **sizes)


def random_points(size: Size, seed: int, n: int) -> Tensor:
    """Normally distributed inputs for networks of a size."""
    return torch.randn(n, size[0], generator=stream(seed, "points", *size), dtype=torch.float64)


def random_network(kind: str, size: Size, seed: int, x: Tensor) -> GatedNet:
    """The first random network with an active path at a quarter of these points; without active paths identities say 0 = 0."""
    for attempt in itertools.count():
        net = build(random_spec(kind, size), seed=seed + 1_000_000 * attempt, dtype=torch.float64)
        if (path_count(net, x) > 0).double().mean() >= 0.25:
            break
    return net


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest wanted value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


# --- Theorems 1 and 2, overlap -------------------------------------------------------------------------------


def path_sum_error(net: GatedNet, x: Tensor) -> float:
    """Error of the sum over paths of gate times expert as the output of the network."""
    return relative_error(path_sum(net, x), net(x).detach())


def hidden_sum_error(net: GatedNet, x: Tensor) -> float:
    """Largest error of the sum over partial paths as the value of a hidden unit."""
    worst, states = 0.0, [x]
    with torch.no_grad():
        for number, (layer, gate) in enumerate(zip(net.value_layers, net.gates(x), strict=True), 1):
            states.append(gate * layer(states))
            worst = max(worst, relative_error(hidden_sum(net, x, number), states[-1]))
    return worst


def overlap_error(net: GatedNet, x: Tensor) -> float:
    """Error of the overlap kernel, a product over layers, against counting common active paths one by one."""
    active = active_paths(net, x, paths_of(net)).double()
    return relative_error(overlap_kernel(net, x), active @ active.T)


def antipodal_error(net: GatedNet, x: Tensor) -> float:
    """In every layer of a DLGN without biases the units open at x and at -x add up to the width; the largest departure."""
    both = zip(net.gates(x).hard(), net.gates(-x).hard(), strict=True)
    return max(float((here.sum(1) + there.sum(1) - net.settings.width).abs().max()) for here, there in both)


# --- path regions --------------------------------------------------------------------------------------------


def polyhedron_mismatch(net: GatedNet, x: Tensor) -> float:
    """Share of points and paths for which lying in the path's polyhedron differs from the path being active."""
    paths = paths_of(net)
    inside = torch.stack([path_polyhedron(net, path).contains(x) for path in paths.tolist()], dim=1)
    return float((inside != active_paths(net, x, paths)).double().mean())


def segments_leaving(net: GatedNet, x: Tensor) -> float:
    """Share of segments between two points of a path's region that leave it at a quarter, a half or three quarters."""
    paths = paths_of(net)
    active = active_paths(net, x, paths)
    first, second = torch.triu_indices(len(x), len(x), offset=1)
    ends_inside = active[first] & active[second]  # [pairs, paths]
    stays = torch.ones_like(ends_inside)
    for share in (0.25, 0.5, 0.75):
        stays &= active_paths(net, (1 - share) * x[first] + share * x[second], paths)
    return float((ends_inside & ~stays).sum() / ends_inside.sum().clamp(min=1))


def split_share(parts: NDArray[np.int16]) -> float:
    """Share of the non-empty path regions that have several parts; ``parts``: the number of parts of each region."""
    return float((parts > 1).sum() / max(1, (parts > 0).sum()))


def example_parts() -> list[float]:
    """End points of the path region of Figure 1, left, in order."""
    pieces = line_pieces(two_part_net(), [0.0], [1.0])
    return [end for part in path_pieces(pieces, TWO_PART_PATH) for end in part]


def example_jump(eps: float, *, linear_gates: bool) -> float:
    """The share of the circle by which the path region of Figure 1, right, differs between eps and -eps."""
    there, back = (
        path_pieces(circle_pieces(jumping_net(value, linear_gates=linear_gates)), JUMPING_PATH) for value in (eps, -eps)
    )
    return abs(sum(b - a for a, b in there) - sum(b - a for a, b in back)) / (2 * math.pi)


def move_weights(net: GatedNet, step: float, seed: int) -> GatedNet:
    """A copy with each weight matrix moved in a random direction by ``step`` times its own spectral norm."""
    copy = build(net.settings, dtype=torch.float64)
    with torch.no_grad():
        for (name, weight), (_, other) in zip(net.named_parameters(), copy.named_parameters(), strict=True):
            direction = torch.randn(weight.shape, generator=stream(seed, "step", name), dtype=torch.float64)
            size = torch.linalg.matrix_norm(weight, 2) / torch.linalg.matrix_norm(direction, 2)
            other.copy_(weight + step * size * direction)
    return copy


def normal_movement(net: GatedNet, seed: int) -> float:
    """How far half-space normals move when weights move, over the largest movement that continuity allows.

    A normal in layer l is a row of a product of l matrices. If each matrix moves by a relative step e, the normal moves by at
    most ((1 + e)^l - 1) times the product of their norms.
    """
    start = gate_functions(net)
    norms = [float(torch.linalg.matrix_norm(weight.detach(), 2)) for _, weight in net.branch("gate")]
    worst = 0.0
    for step in STEPS:
        for number, (before, after) in enumerate(
            zip(start, gate_functions(move_weights(net, step, seed)), strict=True), 1
        ):
            most = math.expm1(number * math.log1p(step)) * math.prod(norms[:number])
            worst = max(worst, float(np.linalg.norm(after - before, axis=1).max()) / most)
    return worst


def region_change(net: GatedNet, seed: int) -> float:
    """Largest change of any path region's share of the circle when every weight matrix moves by a billionth of its norm."""
    before, after = (
        (pieces.ends - pieces.starts) @ path_gates(pieces.gates, paths_of(net)) / (2 * math.pi)
        for pieces in map(circle_pieces, (net, move_weights(net, SMALL_STEP, seed)))
    )
    return float((before - after).abs().max())


# --- patterns ------------------------------------------------------------------------------------------------


def compatible_patterns(size: Size) -> NDArray[np.bool_]:
    """Whether a path is active under each of the 2^(m depth) activation patterns, ``[paths, patterns]``.

    Pattern number p has the units open whose bits are set in p.
    """
    _, width, depth = size
    bits = (np.arange(2 ** (width * depth))[:, None] >> np.arange(width * depth)) & 1
    opened = bits.astype(bool).reshape(-1, depth, width)
    paths = itertools.product(range(width), repeat=depth)
    return np.stack([np.logical_and.reduce([opened[:, layer, i] for layer, i in enumerate(path)]) for path in paths])


def pattern_count_error(size: Size) -> float:
    """Relative error of 2^((m-1) depth) as the number of patterns under which a path is active; the worst path."""
    wanted = 2 ** ((size[1] - 1) * size[2])
    return float(np.abs(compatible_patterns(size).sum(1) - wanted).max() / wanted)


def pattern_mismatch(net: GatedNet, x: Tensor, compatible: NDArray[np.bool_]) -> float:
    """Share of points and paths for which the path is active but the point's pattern is not one of the path's, or vice versa."""
    pattern = torch.cat(net.gates(x).hard(), dim=1).numpy()
    number = pattern @ (1 << np.arange(pattern.shape[1]))
    active = active_paths(net, x, paths_of(net)).numpy()
    return float((active != compatible[:, number].T).mean())


# --- frozen gates, free experts ------------------------------------------------------------------------------


def regression_errors(net: GatedNet, x: Tensor, new: Tensor, seed: int) -> dict[str, float]:
    """Difference at new points of least squares with one constant per path and kernel regression with the overlap kernel.

    With a ridge on all points; without a ridge on points with independent path features. Relative to the largest target.
    """
    paths = paths_of(net)
    features, new_features = (active_paths(net, points, paths).double() for points in (x, new))
    y = torch.randn(len(x), 1, generator=stream(seed, "targets"), dtype=torch.float64)
    every, independent = torch.arange(len(x)), independent_rows(features)
    found = {}
    for name, rows, ridge in (("ridge_error", every, RIDGE), ("ridgeless_error", independent, 0.0)):
        by_paths = fit_free_experts(features[rows], y[rows], new_features, ridge)
        kernel, new_kernel = overlap_kernel(net, x[rows]), overlap_kernel(net, new, x[rows])
        by_kernel = kernel_regression(kernel, y[rows], new_kernel, ridge=ridge)
        found[name] = float((by_kernel - by_paths).abs().max() / y.abs().max())
    return found


def independent_rows(features: Tensor) -> Tensor:
    """Indices of rows that are not nearly linear combinations of the rows chosen before them."""
    chosen: list[int] = []
    basis = features.new_zeros(0, features.shape[1])
    for row, feature in enumerate(features):
        rest = feature - basis.T @ (basis @ feature)
        if rest.norm() > INDEPENDENT * feature.norm():
            chosen.append(row)
            basis = torch.cat([basis, rest[None] / rest.norm()])
    return torch.tensor(chosen, dtype=torch.int64)


# --- the law of the value kernel -----------------------------------------------------------------------------


def sample_value_kernels(net: GatedNet, x: Tensor, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """Value kernels for fresh value weights of variance 1/width, and their exact mean."""
    deviation = net.settings.width**-0.5
    return draw_value_kernels(net, x, deviation, draws, seed), expected_value_kernel(net, x, deviation)


def mean_trace_ratio(drawn: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Mean and standard error over draws of the trace, relative to its exact mean."""
    ratios = drawn.diagonal(dim1=1, dim2=2).sum(1) / wanted.diagonal().sum()
    return float(ratios.mean()), float(ratios.std() / len(ratios) ** 0.5)
