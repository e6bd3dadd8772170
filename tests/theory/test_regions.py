"""Regions by their boundaries: against dense sampling, exact arithmetic, closed forms and Figure 1."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

import cases
from unlazy import InputError, Unsupported, build, half_spaces
from unlazy.models.build import build_stack
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec, relu_spec
from unlazy.probes.paths import count_cells, count_path_regions
from unlazy.studies.halfspace import theorems_identities as examples
from unlazy.theory.arrangement import PLANE, Box, line_cells, plane_cells
from unlazy.theory.enumerate import active_paths, paths_of
from unlazy.theory.regions import (
    Pieces,
    circle_pieces,
    count_path_parts,
    gate_functions,
    line_pieces,
    path_pieces,
    path_polyhedron,
)

NO_BIAS = {"gate_bias": False, "value_bias": False}
NETS = {
    "relu": relu_spec(2, width=4, depth=3),
    "relu-no-bias": relu_spec(2, width=4, depth=3, **NO_BIAS),
    "dlgn": NetSpec(2, width=4, depth=3),
    "dlgn-no-bias": NetSpec(2, width=4, depth=3, **NO_BIAS),
    "relu-wide": relu_spec(2, width=16, depth=5),
    "dlgn-wide": NetSpec(2, width=16, depth=5),
}


def net_of(name: str, seed: int = 0) -> GatedNet:
    return build(NETS[name], seed=seed, dtype=torch.float64)


def on_circle(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def patterns(gates: list[Tensor]) -> set[tuple[bool, ...]]:
    return {tuple(row) for row in torch.cat(list(gates), dim=1).tolist()}


# --- the circle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NETS)
def test_gates_on_the_circle_are_those_of_the_piece(name: str, seed: int) -> None:
    """20 000 samples: each has exactly the gates of the piece it falls into, and every longer piece is met."""
    net, n = net_of(name, seed), 20_000
    pieces = circle_pieces(net)
    angle = pieces.starts[0] + 2 * math.pi * (torch.arange(n, dtype=torch.float64) + 0.5) / n
    where = torch.searchsorted(pieces.ends, angle)
    sampled = net.gates(on_circle(angle)).hard()
    for exact, seen in zip(pieces.gates, sampled, strict=True):
        assert torch.equal(exact[where], seen)
    lengths = pieces.ends - pieces.starts
    assert float(lengths.sum()) == pytest.approx(2 * math.pi)
    assert torch.equal(pieces.starts[1:], pieces.ends[:-1])
    assert set(where.tolist()) >= set((lengths > 2 * math.pi / n).nonzero()[:, 0].tolist())
    assert count_cells(sampled) <= count_cells(pieces.gates)
    if lengths.min() > 2 * math.pi / n:
        assert count_cells(sampled) == count_cells(pieces.gates)
        assert count_path_regions(sampled) == count_path_regions(pieces.gates)
    changes = [(before != after).any(1) for before, after in ((layer.roll(1, 0), layer) for layer in pieces.gates)]
    assert torch.stack(changes).any(0).all()  # no cut without a change


@pytest.mark.parametrize("seed", range(5))
def test_a_bias_free_dlgn_has_two_cells_for_every_unit(seed: int) -> None:
    net = build(NetSpec(2, width=7, depth=3, **NO_BIAS), seed=seed, dtype=torch.float64)
    pieces = circle_pieces(net)
    assert count_cells(pieces.gates) == len(pieces.starts) == 2 * 21
    assert count_path_parts(pieces).max() == 1  # convex cones meet the circle in one arc


@pytest.mark.parametrize("name", ["relu", "relu-no-bias", "dlgn", "dlgn-no-bias"])
def test_parts_of_all_paths_equal_those_of_each(name: str) -> None:
    for seed in range(6):
        pieces = circle_pieces(net_of(name, seed))
        parts = count_path_parts(pieces)
        for path in itertools.product(range(4), repeat=3):
            assert parts[path] == len(path_pieces(pieces, path))
        assert (parts > 0).sum() == count_path_regions(pieces.gates)


def test_parts_are_where_the_path_is_active() -> None:
    """Sampled runs of activity, joined across the end of the sample, are the exact intervals."""
    n, several = 5000, 0
    for seed in range(4):
        net = net_of("relu-no-bias", seed)
        pieces, paths = circle_pieces(net), paths_of(net)
        angle = 2 * math.pi * (torch.arange(n, dtype=torch.float64) + 0.5) / n
        active = active_paths(net, on_circle(angle), paths)
        for column, path in enumerate(paths.tolist()):
            parts = path_pieces(pieces, path)
            inside = torch.zeros(n, dtype=torch.bool)
            for low, high in parts:
                assert high - low > 0
                inside |= (angle - low) % (2 * math.pi) < high - low
            assert torch.equal(inside, active[:, column])
            several += len(parts) > 1
    assert several > 0


def test_a_net_that_is_open_or_closed_all_around() -> None:
    net = build(relu_spec(2, width=2, depth=2), dtype=torch.float64)
    with torch.no_grad():
        for layer in net.value_layers:
            layer.weight.mul_(0.01)
            layer.bias.copy_(torch.tensor([1.0, -1.0]))
    pieces = circle_pieces(net)
    assert len(pieces.starts) == 1
    assert count_path_parts(pieces).tolist() == [[1, 0], [0, 0]]
    assert path_pieces(pieces, (0, 0)) == [(0.0, 2 * math.pi)]


def test_boundaries_that_coincide_make_no_slivers() -> None:
    """One unit a layer, no biases: all boundaries are one line, and each gate is open on one of its two sides."""
    for seed in range(8):
        net = build(NetSpec(2, width=1, depth=4, **NO_BIAS), seed=seed, dtype=torch.float64)
        assert len(circle_pieces(net).starts) == 2
        assert count_cells(plane_cells(net)) == 2


# --- lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gating", ["own", "linear"])
def test_gates_on_a_line_are_those_of_the_piece(gating: str) -> None:
    spec = relu_spec(4, width=5, depth=3) if gating == "own" else NetSpec(4, width=5, depth=3)
    net = build(spec, seed=3, dtype=torch.float64)
    origin, direction = torch.tensor([0.3, -0.2, 0.1, 0.7]).double(), torch.tensor([1.0, 2.0, -1.0, 0.5]).double()
    s = torch.linspace(-40, 40, 16_001, dtype=torch.float64)
    sampled = net.gates(origin + s[:, None] * direction).hard()
    everywhere = line_pieces(net, origin.tolist(), direction.tolist())
    where = torch.searchsorted(everywhere.ends, s)
    assert all(torch.equal(exact[where], seen) for exact, seen in zip(everywhere.gates, sampled, strict=True))
    assert everywhere.starts[0] == -math.inf
    assert everywhere.ends[-1] == math.inf
    some = line_pieces(net, origin.tolist(), direction.tolist(), low=-1.0, high=2.0)
    assert (float(some.starts[0]), float(some.ends[-1])) == (-1.0, 2.0)
    assert patterns(some.gates) <= patterns(everywhere.gates)
    inner = (everywhere.ends > -1) & (everywhere.starts < 2)
    assert len(some.starts) == int(inner.sum())


# --- Figure 1 --------------------------------------------------------------------------------------


def test_figure_1_left_one_path_on_two_intervals() -> None:
    net = examples.two_part_net()
    pieces = line_pieces(net, [0.0], [1.0])
    assert path_pieces(pieces, examples.TWO_PART_PATH) == [(0.5, 1.5), (2.5, 3.5)]
    assert count_path_parts(pieces)[examples.TWO_PART_PATH] == 2
    x = torch.linspace(-2, 6, 8001, dtype=torch.float64)
    active = active_paths(net, x[:, None], torch.tensor([examples.TWO_PART_PATH]))[:, 0]
    inside = ((x > 0.5) & (x < 1.5)) | ((x > 2.5) & (x < 3.5))
    near_an_end = torch.stack([(x - end).abs() < 1e-9 for end in (0.5, 1.5, 2.5, 3.5)]).any(0)
    assert torch.equal(active[~near_an_end], inside[~near_an_end])


@pytest.mark.parametrize("size", [1.0, 0.1, 1e-6, 1e-15])
def test_figure_1_right_half_plane_or_quadrant(size: float) -> None:
    x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    path, right, top = torch.tensor([examples.JUMPING_PATH]), x[:, 0] > 0, x[:, 1] > 0
    for eps, region, arc in ((size, right, (-0.5, 0.5)), (-size, right & top, (0.0, 0.5))):
        net = examples.jumping_net(eps)
        assert torch.equal(active_paths(net, x, path)[:, 0], region)
        (part,) = path_pieces(circle_pieces(net), examples.JUMPING_PATH)
        assert part == pytest.approx((arc[0] * math.pi, arc[1] * math.pi))
    for eps in (size / 2, -size / 2):
        linear = examples.jumping_net(eps, linear_gates=True)
        assert torch.equal(active_paths(linear, x, path)[:, 0], right & top)


# --- polyhedra -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dlgn", "dlgn-no-bias"])
def test_path_regions_of_a_dlgn_are_their_polyhedra(name: str) -> None:
    net = net_of(name, seed=2)
    x = 2 * torch.randn(500, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    paths = paths_of(net)
    active = active_paths(net, x, paths)
    assert 0.05 < active.double().mean() < 0.95
    for column, path in enumerate(paths.tolist()):
        assert torch.equal(path_polyhedron(net, path).contains(x), active[:, column])


def test_half_spaces_are_products_of_matrices() -> None:
    net, spaces = net_of("dlgn", seed=1), half_spaces(net_of("dlgn", seed=1))
    for layer, functions in enumerate(gate_functions(net)):
        assert np.allclose(functions[:, 1:], spaces.normals[layer], rtol=1e-12)
        assert np.allclose(functions[:, 0], spaces.offsets[layer], rtol=1e-12)


def test_what_has_no_flat_boundaries_is_refused() -> None:
    with pytest.raises(Unsupported, match="not half-spaces"):
        path_polyhedron(net_of("relu"), (0, 0, 0))
    with pytest.raises(InputError, match="one of 4 units in each of 3 layers"):
        path_polyhedron(net_of("dlgn"), (0, 4, 0))
    for name in ("quadratic", "linear"):
        with pytest.raises(Unsupported, match="hyperplanes"):
            circle_pieces(cases.net(name))
    with pytest.raises(Unsupported, match="curved"):
        circle_pieces(cases.net("swish"))
    assert circle_pieces(cases.net("swish").hard()).closed
    with pytest.raises(InputError, match="one network at a time"):
        circle_pieces(build_stack(NETS["dlgn"], [0, 1]))
    with pytest.raises(InputError, match="3 inputs"):
        circle_pieces(build(NetSpec(3)))
    with pytest.raises(InputError, match="a direction of 2 numbers"):
        line_pieces(net_of("dlgn"), [0.0, 0.0], [0.0, 0.0])
    with pytest.raises(InputError, match="more than 8"):
        count_path_parts(circle_pieces(net_of("dlgn")), most=8)


# --- the plane -------------------------------------------------------------------------------------


def exact_count(lines: list[tuple[int, int, int]], box: Box = PLANE) -> int:
    """Cells of lines a x + b y + c = 0 inside an open box, in whole-number arithmetic: 1 + lines + sum over crossings of
    (lines through it - 1), counting distinct lines that enter the box and crossings inside it (Euler's formula)."""
    whole = {min((a, b, c), (-a, -b, -c)) for a, b, c in (_lowest(line) for line in lines) if (a, b) != (0, 0)}
    entering = [line for line in whole if _enters(line, box)]
    through: dict[tuple[Fraction, Fraction], set[int]] = {}
    for (i, (a, b, c)), (j, (p, q, r)) in itertools.combinations(enumerate(entering), 2):
        if a * q != b * p:
            where = Fraction(b * r - c * q, a * q - b * p), Fraction(c * p - a * r, a * q - b * p)
            if all(low < value < high for value, (low, high) in zip(where, box, strict=True)):
                through.setdefault(where, set()).update((i, j))
    return 1 + len(entering) + sum(len(found) - 1 for found in through.values())


def _lowest(line: tuple[int, int, int]) -> tuple[int, int, int]:
    shared = math.gcd(*line) or 1
    return line[0] // shared, line[1] // shared, line[2] // shared


def _enters(line: tuple[int, int, int], box: Box) -> bool:
    if math.isinf(box[0][0]):
        return True
    corners = [line[0] * Fraction(x) + line[1] * Fraction(y) + line[2] for x in box[0] for y in box[1]]
    return min(corners) < 0 < max(corners)


SPECIAL = {
    "nothing": [],
    "three through a point": [(1, 0, 0), (0, 1, 0), (1, 1, 0)],
    "parallel and crossed": [(1, 0, 0), (1, 0, -1), (-2, 0, 4), (0, 1, 0)],
    "the same line, other sides and scales": [(1, 1, 1), (-1, -1, -1), (3, 3, 3), (1, -1, 0)],
    "a normal of zero": [(0, 0, 1), (0, 0, -1), (1, 0, 0)],
    "on the edge of the box": [(1, 0, -3), (0, 1, 3), (1, 1, 0)],
    "through a corner of the box": [(1, 1, -6), (1, -1, 0)],
}


@pytest.mark.parametrize("box", [PLANE, ((-3.0, 3.0), (-3.0, 3.0)), ((0.5, 2.0), (-1.0, 0.25))])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_positions(name: str, box: Box) -> None:
    lines = SPECIAL[name]
    numbers = np.array(lines, dtype=np.float64).reshape(-1, 3)
    assert len(line_cells(numbers[:, :2], numbers[:, 2], box)) == exact_count(lines, box)


@pytest.mark.parametrize("seed", range(20))
def test_random_whole_number_lines(seed: int) -> None:
    """Small whole numbers: plenty of parallel, repeated and concurrent lines."""
    random = np.random.default_rng(seed)
    numbers = random.integers(-3, 4, (int(random.integers(1, 25)), 3))
    lines = [tuple(int(entry) for entry in row) for row in numbers]
    for box in (PLANE, ((-2.0, 2.0), (-1.0, 3.0))):
        found = line_cells(numbers[:, :2].astype(float), numbers[:, 2].astype(float), box)
        assert len(found) == exact_count(lines, box)
        points = random.uniform(-2, 2, (2000, 2)) + np.array([0, 1])
        sides = points @ numbers[:, :2].T + numbers[:, 2]
        clear = (np.abs(sides[:, (numbers[:, :2] != 0).any(1)]) > 1e-9).all(1)
        assert clear.sum() > 1000
        assert {tuple(row) for row in sides[clear] >= 0} <= {tuple(row) for row in found}


def test_cells_of_a_dlgn_in_the_plane() -> None:
    net = net_of("dlgn-wide", seed=1)
    found = plane_cells(net)
    assert count_cells(found) == len(found[0]) == 1 + 80 + 80 * 79 // 2
    assert count_cells(plane_cells(build(NetSpec(2, **NO_BIAS), dtype=torch.float64))) == 160
    small = net_of("dlgn", seed=3)
    everything, box = patterns(plane_cells(small)), ((-1.0, 2.0), (-2.0, 1.0))
    inside = patterns(plane_cells(small, box=box))
    grid = torch.cartesian_prod(*(torch.linspace(*side, 702, dtype=torch.float64)[1:-1] for side in box))
    seen = patterns(small.gates(grid).hard())
    assert seen <= inside <= everything
    assert len(inside) - len(seen) <= 2  # a cell or two may be finer than the grid
    assert len(inside) < len(everything) == 1 + 12 + 12 * 11 // 2


def test_cells_in_a_slice_of_more_dimensions() -> None:
    net = build(NetSpec(5, width=4, depth=2), seed=0, dtype=torch.float64)
    random = torch.Generator().manual_seed(4)
    origin, axes = torch.randn(5, generator=random).double(), torch.randn(2, 5, generator=random).double()
    found = plane_cells(net, origin=origin.tolist(), axes=axes.tolist())
    assert count_cells(found) == 1 + 8 + 8 * 7 // 2
    points = origin + 5 * torch.randn(4000, 2, generator=random).double() @ axes
    assert patterns(net.gates(points).hard()) <= patterns(found)
    assert count_path_regions(net.gates(points).hard()) <= count_path_regions(found)
    with pytest.raises(InputError, match="say which plane"):
        plane_cells(net)
    with pytest.raises(InputError, match="not parallel"):
        plane_cells(net, axes=[[1.0, 0, 0, 0, 0], [2.0, 0, 0, 0, 0]])
    with pytest.raises(InputError, match="low < high"):
        plane_cells(net_of("dlgn"), box=((1.0, 1.0), (0.0, 1.0)))


def test_the_circle_sees_what_the_plane_holds() -> None:
    """Bias-free: cells are cones, so circle and plane have the same patterns and the same path regions."""
    for seed in range(4):
        net = net_of("dlgn-no-bias", seed)
        pieces: Pieces = circle_pieces(net)
        assert patterns(pieces.gates) == patterns(plane_cells(net))
