"""Half-spaces, cells, floors: closed forms and properties."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import cases
from unlazy import InputError
from unlazy.data.circle import Circle
from unlazy.models.build import build_stack
from unlazy.models.gates import HardGate
from unlazy.models.spec import NetSpec
from unlazy.probes import standard
from unlazy.probes.halfspaces import HalfSpaces, axial_resultant, share_matching_group, share_near_direction
from unlazy.probes.paths import allocation, cell_floor, cell_numbers, count_cells, count_path_regions
from unlazy.training.ensemble import Member, MemberAdam, build_member_stack


def directions(*degrees: float) -> torch.Tensor:
    angle = torch.tensor([math.radians(d) for d in degrees], dtype=torch.float64)
    return torch.stack([torch.cos(angle), torch.sin(angle)], dim=-1)


TOP = torch.tensor([0.0, 1.0])


def test_share_near_counts_angles() -> None:
    normals = directions(90, 119, 121, 61, 59, -90)
    assert float(share_near_direction(normals, TOP, 30)) == pytest.approx(3 / 6)
    assert float(share_near_direction(7 * normals, TOP, 180)) == 1.0
    spread = directions(*torch.arange(0.5, 360, 1).tolist())
    assert float(share_near_direction(spread, TOP, 30)) == pytest.approx(60 / 360)


def test_axial_resultant_ignores_sides_and_sees_axes() -> None:
    assert float(axial_resultant(directions(30, 210, 30))) == pytest.approx(1.0)
    assert float(axial_resultant(directions(0, 90))) == pytest.approx(0.0, abs=1e-12)
    assert float(axial_resultant(directions(0, 45))) == pytest.approx(math.cos(math.radians(45)))


def test_share_like_sees_offsets_where_normals_do_not() -> None:
    data = Circle(n=100, offset=0.5).dataset(torch.float64)
    normals = directions(90, 90, 90, -90)[None]
    offsets = torch.tensor([[0.0, 2.0, -0.1, 0.0]], dtype=torch.float64)  # the half, everything, nearly the half, below
    assert share_matching_group(HalfSpaces(normals, offsets), data.x, data.groups["top"]).tolist() == [0.5]


def test_allocation_is_a_log_ratio() -> None:
    top, bottom = torch.tensor([1e6, 0.0], dtype=torch.float64), torch.tensor([1e3, 0.0], dtype=torch.float64)
    assert allocation(top, bottom).tolist() == pytest.approx([math.log(1000), 0.0], abs=1e-3)


def test_cells_group_equal_patterns() -> None:
    first = torch.tensor([[1, 0], [1, 0], [0, 1], [1, 0]], dtype=torch.bool)
    second = torch.tensor([[1], [1], [1], [0]], dtype=torch.bool)
    index = cell_numbers([first, second])
    assert index[0] == index[1]
    assert len({int(i) for i in index}) == 3 == count_cells([first, second])
    with pytest.raises(InputError, match="one network at a time"):
        count_cells([first[None]])


def test_path_regions_equal_enumeration() -> None:
    gates = cases.net("pwc", seed=3).gates(cases.points("pwc", n=30)).hard()
    paths = itertools.product(*(range(layer.shape[1]) for layer in gates))
    slow = sum(
        any(all(bool(layer[i, unit]) for layer, unit in zip(gates, path, strict=True)) for i in range(30))
        for path in paths
    )
    assert count_path_regions(gates) == slow
    with pytest.raises(InputError, match="more than"):
        count_path_regions(gates, most=5)


def test_cell_floor_is_the_best_constant_or_affine_fit_per_cell() -> None:
    x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    right = [x >= 0]
    y = torch.where(x >= 0, 2 * x + 1, -x)
    assert float(cell_floor(right, y, x)) == pytest.approx(0.0, abs=1e-20)
    means = torch.where(x >= 0, y[x >= 0].mean(), y[x < 0].mean())
    assert float(cell_floor(right, y)) == pytest.approx(float((y - means).square().mean()))
    everything = [torch.ones(20, 1, dtype=torch.bool)]
    assert float(cell_floor(everything, y)) == pytest.approx(float(y.var(correction=0)))


def test_floors_bound_what_hard_gates_can_learn() -> None:
    """cell floor <= free path values <= the loss of a trained network with the same hard gates."""
    data = Circle(n=60, bottom=5.0).dataset(torch.float64)
    spec = NetSpec(2, experts="constant", gate=HardGate(None), train_gates=False, width=4, depth=2)
    members = [Member(seed, 1e-2) for seed in range(4)]
    net = build_member_stack(spec, members, torch.float64)
    adam = MemberAdam(net, [member.lr for member in members])
    for _ in range(400):
        adam.minimise((net(data.x) - data.y).square().mean((-2, -1)))
    measured = standard.floors(net, data)
    loss = standard.curves(net, data)["loss"]
    assert (measured["cell_floor"] <= measured["free_paths_loss"] + 1e-12).all()
    assert (measured["free_paths_loss"] <= loss + 1e-9).all()
    assert (loss < 1.5 * measured["cell_floor"] + 0.02).all()  # the bound is nearly reached, not vacuous


def test_probes_of_a_stack_are_those_of_its_members() -> None:
    data = Circle(n=30).dataset(torch.float64)
    stack = build_stack(cases.SPECS["pwc"], [0, 1], [4.0, 30.0], dtype=torch.float64)
    from unlazy.models.build import member

    for probe in (standard.curves, standard.kernels, standard.portrait, standard.floors):
        together = probe(stack, data)
        for i in range(2):
            for name, value in probe(member(stack, i), data).items():
                torch.testing.assert_close(together[name][i], value, rtol=1e-6, atol=1e-9)
