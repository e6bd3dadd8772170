"""The exact statements, measured on random networks: how far each identity is off, relative to what it is about."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unlazy.kernels.overlap import overlap_kernel, path_count
from unlazy.kernels.regression import kernel_regression
from unlazy.models.build import build
from unlazy.models.net import GatedNet
from unlazy.runtime import stream
from unlazy.studies.halfspace.theorems.settings import Size, random_spec
from unlazy.theory import examples
from unlazy.theory.enumerate import active_paths, fit_free_experts, hidden_sum, path_gates, path_sum, paths_of
from unlazy.theory.regions import (
    circle_pieces,
    count_path_parts,
    gate_functions,
    line_pieces,
    path_pieces,
    path_polyhedron,
)

ALIVE = 0.25
RIDGE = 1e-3
INDEPENDENT = 0.05  # a training point counts as new when this share of its path features is
STEPS = (1e-1, 1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12)  # relative sizes of parameter changes
SMALL_STEP = 1e-9


def random_points(size: Size, seed: int, n: int) -> Tensor:
    return torch.randn(n, size[0], generator=stream(seed, "points", *size), dtype=torch.float64)


def random_network(kind: str, size: Size, seed: int, x: Tensor) -> GatedNet:
    """The first draw with an active path on a quarter of these points: of a dead network every identity says 0 = 0."""
    for attempt in itertools.count():
        net = build(random_spec(kind, size), seed=seed + 1_000_000 * attempt, dtype=torch.float64)
        if (path_count(net, x) > 0).double().mean() >= ALIVE:
            break
    return net


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest wanted value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


# --- Theorems 1 and 2, overlap ---------------------------------------------------------------------


def path_sum_error(net: GatedNet, x: Tensor) -> float:
    """Sum over paths of gate times expert against the network's output."""
    return relative_error(path_sum(net, x), net(x).detach())


def lemma_error(net: GatedNet, x: Tensor) -> float:
    """Sum over partial paths against every hidden unit."""
    worst, states = 0.0, [x]
    with torch.no_grad():
        for number, (layer, gate) in enumerate(zip(net.value_layers, net.gates(x), strict=True), 1):
            states.append(gate * layer(states))
            worst = max(worst, relative_error(hidden_sum(net, x, number), states[-1]))
    return worst


def overlap_error(net: GatedNet, x: Tensor) -> float:
    """Product over layers against counting common active paths one by one."""
    active = active_paths(net, x, paths_of(net)).double()
    return relative_error(overlap_kernel(net, x), active @ active.T)


def antipodal_error(net: GatedNet, x: Tensor) -> float:
    """Units open at x and units open at -x add up to the width in every layer of a bias-free DLGN; largest departure."""
    both = zip(net.gates(x).hard(), net.gates(-x).hard(), strict=True)
    return max(float((here.sum(1) + there.sum(1) - net.settings.width).abs().max()) for here, there in both)


# --- path regions ----------------------------------------------------------------------------------


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


def split_share(net: GatedNet) -> float:
    """Share of the non-empty path regions on the circle that lie on it in several parts."""
    parts = count_path_parts(circle_pieces(net))
    return float((parts > 1).sum() / max(1, (parts > 0).sum()))


def example_parts() -> list[float]:
    """End points of the region of Figure 1, left, in order."""
    pieces = line_pieces(examples.two_part_net(), [0.0], [1.0])
    return [end for part in path_pieces(pieces, examples.TWO_PART_PATH) for end in part]


def example_jump(eps: float, *, linear_gates: bool) -> float:
    """By how much of the circle the region of Figure 1, right, differs between eps and -eps (one of the two holds the other)."""
    there, back = (
        path_pieces(circle_pieces(examples.jumping_net(value, linear_gates=linear_gates)), examples.JUMPING_PATH)
        for value in (eps, -eps)
    )
    return abs(sum(b - a for a, b in there) - sum(b - a for a, b in back)) / (2 * math.pi)


def moved(net: GatedNet, step: float, seed: int) -> GatedNet:
    """A copy whose weights went ``step`` times their own size in a random direction, matrix by matrix (spectral norms)."""
    copy = build(net.spec(), dtype=torch.float64)
    with torch.no_grad():
        for (name, weight), (_, other) in zip(net.named_parameters(), copy.named_parameters(), strict=True):
            direction = torch.randn(weight.shape, generator=stream(seed, "step", name), dtype=torch.float64)
            size = torch.linalg.matrix_norm(weight, 2) / torch.linalg.matrix_norm(direction, 2)
            other.copy_(weight + step * size * direction)
    return copy


def normal_movement(net: GatedNet, seed: int) -> float:
    """How far half-space normals move, over the most that continuity allows: a normal is a row of a product of l matrices, so
    matrices that move by a relative step e move it by at most ((1 + e)^l - 1) times the product of their norms."""
    start = gate_functions(net)
    norms = [float(torch.linalg.matrix_norm(weight.detach(), 2)) for _, weight in net.branch("gate")]
    worst = 0.0
    for step in STEPS:
        for number, (before, after) in enumerate(zip(start, gate_functions(moved(net, step, seed)), strict=True), 1):
            most = math.expm1(number * math.log1p(step)) * math.prod(norms[:number])
            worst = max(worst, float(np.linalg.norm(after - before, axis=1).max()) / most)
    return worst


def region_change(net: GatedNet, seed: int) -> float:
    """Largest change of any path region's share of the circle when every weight matrix moves by a billionth of its size."""
    shares = [_circle_shares(version) for version in (net, moved(net, SMALL_STEP, seed))]
    return float((shares[0] - shares[1]).abs().max())


def _circle_shares(net: GatedNet) -> Tensor:
    pieces = circle_pieces(net)
    return (pieces.ends - pieces.starts) @ path_gates(pieces.gates, paths_of(net)) / (2 * math.pi)


# --- patterns --------------------------------------------------------------------------------------


def compatible_patterns(size: Size) -> NDArray[np.bool_]:
    """Which of all 2^(m depth) activation patterns leave each path open, ``[paths, patterns]``; pattern p has the bits of p."""
    _, width, depth = size
    bits = (np.arange(2 ** (width * depth))[:, None] >> np.arange(width * depth)) & 1
    opened = bits.astype(bool).reshape(-1, depth, width)
    paths = itertools.product(range(width), repeat=depth)
    return np.stack([np.logical_and.reduce([opened[:, layer, i] for layer, i in enumerate(path)]) for path in paths])


def pattern_count_error(size: Size) -> float:
    """Patterns compatible with a path, counted one by one, against 2^((m-1) depth); worst path, relative."""
    wanted = 2 ** ((size[1] - 1) * size[2])
    return float(np.abs(compatible_patterns(size).sum(1) - wanted).max() / wanted)


def union_mismatch(net: GatedNet, x: Tensor, compatible: NDArray[np.bool_]) -> float:
    """Share of points and paths for which being active differs from the point's pattern being among the path's patterns."""
    pattern = torch.cat(net.gates(x).hard(), dim=1).numpy()
    number = pattern @ (1 << np.arange(pattern.shape[1]))
    active = active_paths(net, x, paths_of(net)).numpy()
    return float((active != compatible[:, number].T).mean())


# --- frozen gates, free experts --------------------------------------------------------------------


def regression_errors(net: GatedNet, x: Tensor, new: Tensor, seed: int) -> tuple[float, float]:
    """Least squares with one constant per path against kernel regression with the overlap kernel, at new points,
    relative to the largest target.

    With a ridge on all points; then without one, on points whose path features are independent.
    """
    paths = paths_of(net)
    features, new_features = (active_paths(net, points, paths).double() for points in (x, new))
    y = torch.randn(len(x), 1, generator=stream(seed, "targets"), dtype=torch.float64)
    errors = []
    for rows, ridge in ((torch.arange(len(x)), RIDGE), (independent_rows(features), 0.0)):
        by_paths = fit_free_experts(features[rows], y[rows], new_features, ridge)
        by_kernel = kernel_regression(
            overlap_kernel(net, x[rows]), y[rows], overlap_kernel(net, new, x[rows]), ridge=ridge
        )
        errors.append(float((by_kernel - by_paths).abs().max() / y.abs().max()))
    return errors[0], errors[1]


def independent_rows(features: Tensor) -> Tensor:
    """Rows that are not nearly combinations of the rows kept before them."""
    kept: list[int] = []
    basis = features.new_zeros(0, features.shape[1])
    for row, feature in enumerate(features):
        rest = feature - basis.T @ (basis @ feature)
        if rest.norm() > INDEPENDENT * feature.norm():
            kept.append(row)
            basis = torch.cat([basis, rest[None] / rest.norm()])
    return torch.tensor(kept, dtype=torch.int64)
