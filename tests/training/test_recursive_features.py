"""Recursive feature machines against slow twins: kernels by loops, gradients by autograd; hidden directions are found."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from unlazy.data.planted import Planted, subspace_overlap
from unlazy.runtime import InputError, stream
from unlazy.training.recursive_features import (
    laplace_kernel,
    recursive_features,
    top_directions,
    typical_distance,
)


def normal(*shape: int, key: str = "x") -> torch.Tensor:
    return torch.randn(*shape, generator=stream(0, key), dtype=torch.float64)


def some_metric(size: int) -> torch.Tensor:
    root = normal(size, size, key="metric")
    return root @ root.T


def test_kernel_is_that_of_the_definition() -> None:
    x, z, metric = normal(5, 3), normal(4, 3, key="z"), some_metric(3)
    found = laplace_kernel(x, z, metric, 1.7)
    for i in range(5):
        for j in range(4):
            step = x[i] - z[j]
            assert found[i, j].item() == pytest.approx(math.exp(-math.sqrt(step @ metric @ step) / 1.7), rel=1e-9)


def test_round_zero_is_kernel_ridge_regression() -> None:
    x, y, new = normal(20, 4), normal(20, 2, key="y"), normal(6, 4, key="new")
    (machine,) = recursive_features(x, y, rounds=0, width=2.0, ridge=0.1)
    kernel = torch.exp(-torch.cdist(x, x) / 2)
    wanted = torch.exp(-torch.cdist(new, x) / 2) @ torch.linalg.solve(kernel + 0.1 * torch.eye(20), y)
    assert torch.allclose(machine(new), wanted, atol=1e-10)


def test_agop_is_the_product_of_automatic_gradients() -> None:
    x, y, new = normal(15, 3), normal(15, 2, key="y"), normal(7, 3, key="new")
    machine = list(recursive_features(x, y, rounds=2, width=1.5, ridge=0.01))[-1]
    total = torch.zeros(3, 3, dtype=torch.float64)
    for point in new:

        def function(at: torch.Tensor) -> torch.Tensor:
            steps = at - machine.points
            lengths = ((steps @ machine.metric) * steps).sum(1).sqrt()
            return torch.exp(-lengths / 1.5) @ machine.coefficients

        jacobian = torch.autograd.functional.jacobian(function, point)
        total += jacobian.T @ jacobian
    assert torch.allclose(machine.agop(new), total / 7, atol=1e-10)


def test_each_metric_is_the_agop_of_the_round_before() -> None:
    x, y = normal(30, 4), torch.sign(normal(30, 4)[:, :1])
    machines = list(recursive_features(x, y, rounds=2))
    for before, after in itertools.pairwise(machines):
        product = before.agop(x)
        assert torch.allclose(after.metric, product * 4 / product.trace(), atol=1e-12)
        assert after.metric.trace().item() == pytest.approx(4)
    assert torch.equal(machines[0].metric, torch.eye(4, dtype=torch.float64))


def test_a_point_of_the_machine_adds_no_pull_there() -> None:
    """At a training point the kernel has a kink; its two sides cancel, so nothing may blow up."""
    x, y = normal(10, 3), normal(10, 1, key="y")
    machine = next(iter(recursive_features(x, y, rounds=0)))
    assert bool(torch.isfinite(machine.agop(x)).all())
    nearby = machine.agop(x + 1e-3 * normal(10, 3, key="shift"))
    assert not torch.allclose(machine.agop(x), nearby, rtol=1e-6)


def test_it_finds_what_a_fixed_kernel_does_not() -> None:
    """A single index in 15 dimensions from 400 samples: three rounds find it, and accuracy follows."""
    data = Planted("single-index", 15, 1)
    (x, y), (test_x, test_y) = data.draw(400), data.draw(1000, "test")
    machines = list(recursive_features(x, y[:, None], rounds=3))
    right = [float((torch.sign(machine(test_x)[:, 0]) == test_y).double().mean()) for machine in machines]
    found = [subspace_overlap(top_directions(machine.agop(x), 1), data.directions()) for machine in machines]
    assert found[-1] > 0.95
    assert right[-1] > right[0] + 0.1


def test_top_directions_are_ordered_and_orthonormal() -> None:
    basis = torch.linalg.qr(normal(5, 5)).Q
    metric = (basis * torch.tensor([1.0, 5.0, 3.0, 2.0, 4.0], dtype=torch.float64)) @ basis.T
    found = top_directions(metric, 2)
    assert (found[:, 0] @ basis[:, 1]).abs().item() == pytest.approx(1)
    assert (found[:, 1] @ basis[:, 4]).abs().item() == pytest.approx(1)


def test_typical_distance_is_that_of_pairs() -> None:
    x = normal(200, 6)
    pairs = torch.cdist(x, x).square().sum() / 200**2
    assert typical_distance(x) == pytest.approx(math.sqrt(pairs))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"y": normal(9, 1)}, "10 inputs but 9 targets"),
        ({"rounds": -1}, "rounds must be at least 0"),
        ({"ridge": 0.0}, "ridge must be positive"),
        ({"width": 0.0}, "width of the kernel"),
        ({"y": torch.zeros(10, 1, dtype=torch.float64)}, "the fitted function is constant"),
    ],
)
def test_bad_arguments_are_refused_with_the_reason(arguments, reason) -> None:
    given = {"y": normal(10, 1)} | arguments
    with pytest.raises(InputError, match=reason):
        list(recursive_features(normal(10, 2), **given))
    with pytest.raises(InputError, match="directions can be asked for"):
        top_directions(torch.eye(3), 4)
