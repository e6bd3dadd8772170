"""Direct minimisation of the joint problems by a quasi-Newton search that knows nothing of the theorems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.runtime import stream

STARTS = 3


def distance_from_identity(matrix: Float[Tensor, "m m"]) -> Tensor:
    """sum (sigma - 1)^2."""
    return (torch.linalg.svdvals(matrix) - 1).square().sum()


def least_over_transformations(features: Float[Tensor, "n p"], y: Float[Tensor, "n"], seed: int) -> float:
    """min over M of ||theta||^2 + sum (sigma(M) - 1)^2, with theta the least-norm interpolant for that M."""
    size = features.shape[1]

    def cost(numbers: Tensor) -> Tensor:
        matrix = numbers.reshape(size, size)
        moved = features @ matrix
        return y @ torch.linalg.solve(moved @ moved.T, y) + distance_from_identity(matrix)

    return _least(cost, torch.eye(size, dtype=torch.float64).flatten(), seed)


def least_over_factors(update: Float[Tensor, "m d"], seed: int) -> float:
    """min over M_1, M_2 of ||M_1^-1 B M_2^-1||^2 + sum (sigma - 1)^2 of both, for a given B."""
    m, d = update.shape

    def cost(numbers: Tensor) -> Tensor:
        left, right = numbers[: m * m].reshape(m, m), numbers[m * m :].reshape(d, d)
        theta = torch.linalg.solve(left, torch.linalg.solve(right, update, left=False))
        return theta.square().sum() + distance_from_identity(left) + distance_from_identity(right)

    start = torch.cat([torch.eye(size, dtype=torch.float64).flatten() for size in (m, d)])
    return _least(cost, start, seed)


def _least(cost: Callable[[Tensor], Tensor], start: Tensor, seed: int) -> float:
    from scipy.optimize import minimize

    def with_slope(flat: Any) -> tuple[float, Any]:
        numbers = torch.tensor(flat, dtype=torch.float64).requires_grad_()
        value = cost(numbers)
        (slope,) = torch.autograd.grad(value, numbers)
        return float(value.detach()), slope.numpy()

    found = []
    for number in range(STARTS):
        noise = torch.randn(len(start), generator=stream(seed, "direct", number), dtype=torch.float64)
        options = {"gtol": 1e-8, "maxiter": 3000}
        result = minimize(with_slope, (start + 0.2 * noise).numpy(), jac=True, method="BFGS", options=options)
        found.append(float(result.fun))
    return min(found)
