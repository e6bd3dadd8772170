"""Borders along curves are where half-spaces end; distances to jumps are those of a slow search; trees jump at their splits."""

from __future__ import annotations

import math

import pytest
import torch

from unlazy.data.oblique_tree import ObliqueTree
from unlazy.models.build import build, build_stack
from unlazy.models.spec import NetSpec
from unlazy.probes.borders import Curves, border_crossings, mean_on_borders, random_rotation
from unlazy.probes.halfspaces import half_spaces
from unlazy.runtime import InputError, stream


def circle(points: int, jumps: list[int]) -> Curves:
    angle = 2 * math.pi * (torch.arange(points, dtype=torch.float64) + 0.5) / points
    marked = torch.zeros(1, points, dtype=torch.bool)
    marked[0, jumps] = True
    return Curves(torch.stack([angle.cos(), angle.sin()], 1)[None], marked, 2 * math.pi / points, closed=True)


def test_crossings_on_the_circle_are_the_ends_of_half_planes() -> None:
    curves = circle(3600, [0])
    net = build(NetSpec(2, width=6, depth=2), dtype=torch.float64)
    spaces = half_spaces(net)
    with torch.no_grad():
        crossed = [border_crossings(q, curves) for q in net.pre_activations(curves.x[0])]
    for layer in range(2):
        for unit in range(6):
            normal, offset = spaces.normals[layer, unit], float(spaces.offsets[layer, unit])
            found = crossed[layer][0, :, unit].nonzero()[:, 0]
            size, towards = float(normal.norm()), math.atan2(*normal.flip(0).tolist())
            if abs(offset) >= size:
                assert len(found) == 0
                continue
            half = math.acos(-offset / size)
            wanted = sorted((towards + side * half) % (2 * math.pi) for side in (-1, 1))
            # step t lies between the points t and t + 1, at the angle of t + 1 without the half step
            angles = sorted(float(step + 1) * curves.step % (2 * math.pi) for step in found)
            assert angles == pytest.approx(wanted, abs=curves.step)


@pytest.mark.parametrize("closed", [True, False])
def test_distances_are_those_of_a_slow_search(closed: bool) -> None:
    steps = 12
    jumps = torch.zeros(2, steps, dtype=torch.bool)
    jumps[0, [2, 9]] = True
    jumps[1, 0] = True
    curves = Curves(torch.zeros(2, steps + (not closed), 3), jumps, 0.5, closed)
    for curve in range(2):
        places = jumps[curve].nonzero()[:, 0].tolist()
        for step in range(steps):
            ways = [abs(step - place) for place in places]
            ways += [steps - way for way in ways] if closed else []
            assert curves.distance()[curve, step] == 0.5 * min(ways)


def test_means_count_crossings_and_weights() -> None:
    crossed = torch.zeros(2, 1, 4, 2, dtype=torch.bool)
    crossed[0, 0, 1, 0] = crossed[0, 0, 3, 1] = True
    numbers = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    found = mean_on_borders(crossed, numbers)
    assert found[0] == 2
    assert found[1].isnan()  # a network without borders has no mean
    assert mean_on_borders(crossed[:1], numbers, torch.tensor([[3.0, 1.0]]))[0] == 1.5


def test_gates_at_their_start_are_at_chance() -> None:
    """Starting weights have no direction of their own: over many networks, borders are at a jump as often as rotated ones."""
    curves = circle(500, [100, 250])
    net = build_stack(NetSpec(2, width=16, depth=1), range(60), dtype=torch.float64)
    near = (curves.distance() < 0.3).double()

    def share(x: torch.Tensor) -> float:
        with torch.no_grad():
            return float(mean_on_borders(border_crossings(net.pre_activations(x)[0], curves), near).nanmean())

    turned = [share(curves.x[0] @ random_rotation(2, stream(turn)).T) for turn in range(20)]
    assert share(curves.x[0]) == pytest.approx(sum(turned) / 20, rel=0.1)


def test_curves_need_a_jump() -> None:
    with pytest.raises(InputError, match="needs a jump"):
        circle(10, [])


def test_rotations_keep_lengths() -> None:
    rotation = random_rotation(5, stream(0))
    assert torch.allclose(rotation @ rotation.T, torch.eye(5, dtype=torch.float64), atol=1e-12)


def test_a_tree_jumps_only_at_its_splits() -> None:
    tree = ObliqueTree(inputs=3, levels=3, seed=2)
    normals, thresholds = tree.splits()
    x = tree.draw(4000)
    labels = tree.labels(x)
    assert set(labels.tolist()) == {-1.0, 1.0}
    margins = (x @ normals.T - thresholds).abs().min(1).values
    moved = x + 1e-4 * torch.randn(x.shape, generator=stream(1), dtype=torch.float64)
    changed = tree.labels(moved) != labels
    assert changed.any()
    assert margins[changed].max() < 1e-3

    def leaf(point: torch.Tensor) -> float:
        node = 0
        for _ in range(3):
            node = 2 * node + 1 + int(point @ normals[node] >= thresholds[node])
        return -1.0 if node % 2 else 1.0

    assert [leaf(point) for point in x[:50]] == labels[:50].tolist()
