"""Solvers for a symmetric positive semi-definite operator that is known by its products alone.

An operator is a function that takes columns ``[n, c]`` in float64 and returns their products; many columns at once cost less than
one by one. None of these functions forms the matrix, and all vectors are in float64 whatever the operator computes in.

* :func:`conjugate_gradients` solves linear systems, with :class:`Nystrom` or any other preconditioner.
* :func:`largest_eigenpairs` finds the top of the spectrum, with a residual for every pair.
* :func:`estimate_moments` and :func:`estimate_function` estimate traces of powers and of functions, with standard errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.runtime import require, stream

Multiply = Callable[[Tensor], Tensor]  # columns [n, c] in float64 to columns [n, c] in float64
RESTARTS = 5  # of conjugate gradients whose own residual has drifted from the true one


# --- linear systems ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Solution:
    """Columns that solve a linear system. ``residual``: the true relative residual of each, |b - A x| / |b|."""

    columns: Float[Tensor, "n c"]
    iterations: int
    residual: Float[Tensor, "c"]


def conjugate_gradients(
    multiply: Multiply,
    b: Float[Tensor, "n c"],
    *,
    precondition: Multiply | None = None,
    tolerance: float = 1e-6,
    steps: int = 1000,
) -> Solution:
    """x with A x = b for every column of b, by preconditioned conjugate gradients.

    Each column takes its own steps and leaves when its residual is small enough; the others share the products. The residual that
    is returned is computed anew from x, and the iteration starts again from x if the two differ.
    """
    norms = b.norm(dim=0)
    solution = torch.zeros_like(b)
    residual = b.clone()
    iterations, best = 0, torch.full_like(norms, torch.inf)
    for _ in range(RESTARTS):
        left = residual.norm(dim=0) / norms.clamp(min=torch.finfo(b.dtype).tiny)
        todo = (left > tolerance) & (left < 0.5 * best)  # a column that no longer improves is at its rounding
        best = torch.minimum(best, left)
        if not bool(todo.any()) or iterations >= steps:
            break
        part, used = _cg_run(multiply, residual[:, todo], precondition, tolerance * norms[todo], steps - iterations)
        iterations += used
        solution[:, todo] += part
        residual[:, todo] = b[:, todo] - multiply(solution[:, todo])
    left = residual.norm(dim=0) / norms.clamp(min=torch.finfo(b.dtype).tiny)
    return Solution(solution, iterations, left)


def _cg_run(
    multiply: Multiply, b: Tensor, precondition: Multiply | None, small: Tensor, steps: int
) -> tuple[Tensor, int]:
    """One run from zero until every column's own residual norm is at most ``small``; the solution and the iterations."""
    solution, residual = torch.zeros_like(b), b.clone()
    direction = precondition(residual) if precondition else residual.clone()
    product = (residual * direction).sum(0)
    active = residual.norm(dim=0) > small
    for number in range(steps):
        if not bool(active.any()):
            return solution, number
        own = direction[:, active]
        moved = multiply(own)
        length = product[active] / (own * moved).sum(0)
        usable = torch.isfinite(length) & (length > 0)
        length = torch.where(usable, length, 0.0)
        solution[:, active] += length * own
        residual[:, active] -= length * moved
        better = precondition(residual[:, active]) if precondition else residual[:, active]
        following = (residual[:, active] * better).sum(0)
        direction[:, active] = better + following / product[active] * own
        product[active] = following
        going = active.clone()
        going[active] = usable & (residual[:, active].norm(dim=0) > small[active])
        active = going
    return solution, steps


class Nystrom:
    """Preconditioner from a random sketch: top eigenvalues of A + shift are brought down to the level of the rest.

    A is approximated by U diag(l) U^T of rank r from r products with random columns; the inverse of the preconditioner is
    (l_r + shift) U (diag(l) + shift)^(-1) U^T + (I - U U^T). (Frangella, Tropp and Udell, 2023.)
    """

    def __init__(
        self, multiply: Multiply, n: int, rank: int, shift: float, *, seed: int = 0, rounding: float = 2.0**-52
    ) -> None:
        rank = min(rank, n)
        random = stream(seed, "nystrom")
        test = torch.linalg.qr(torch.randn(n, rank, generator=random, dtype=torch.float64)).Q
        moved = multiply(test)
        test = test.to(moved.device)
        lift = n**0.5 * rounding * float(moved.norm())  # keeps the small matrix positive definite under rounding
        for _ in range(8):
            factor, failed = torch.linalg.cholesky_ex(test.mT @ moved + lift * torch.eye(rank).to(moved))
            if not int(failed):
                break
            lift *= 10
        else:
            require(False, "the operator is not positive semi-definite: its sketch has negative eigenvalues.")
        thin = torch.linalg.solve_triangular(factor, (moved + lift * test).mT, upper=False).mT
        vectors, sizes, _ = torch.linalg.svd(thin, full_matrices=False)
        self.vectors, self.values = vectors, (sizes.square() - lift).clamp(min=0)
        self.weights = (self.values[-1] + shift) / (self.values + shift) - 1

    def __call__(self, columns: Tensor) -> Tensor:
        """The preconditioner's inverse times columns."""
        return columns + self.vectors @ (self.weights[:, None] * (self.vectors.mT @ columns))


# --- eigenpairs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Eigenpairs:
    """The largest eigenvalues, largest first, with their vectors as columns.

    ``residuals``: |A v - l v| for each pair. Some eigenvalue of A lies within it of l, and l is off by at most its square over
    the distance to the other eigenvalues. ``products``: columns that were multiplied. ``converged``: residuals are small enough.
    """

    values: Float[Tensor, "k"]
    vectors: Float[Tensor, "n k"]
    residuals: Float[Tensor, "k"]
    products: int
    converged: bool


def largest_eigenpairs(
    multiply: Multiply,
    n: int,
    count: int,
    *,
    tolerance: float = 1e-8,
    block: int | None = None,
    basis: int | None = None,
    rounds: int = 300,
    rounding: float = 2.0**-52,
    seed: int = 0,
    device: torch.device | None = None,
) -> Eigenpairs:
    """The ``count`` largest eigenpairs, by block Lanczos with full re-orthogonalisation and thick restarts.

    Stops when every residual is at most ``tolerance`` times its eigenvalue, or at the rounding of the products: ``rounding`` is
    their relative precision. ``block``: columns a product. ``basis``: columns held, twice (they and their products); the best
    ones are kept when it is full.
    """
    require(1 <= count <= n, f"there are {n} eigenvalues, so 1 to {n} can be asked for; got {count}.")
    block = min(n, block or max(4, min(16, count)))
    basis = min(n, max(basis or 3 * count + 4 * block, count + 3 * block))
    random = stream(seed, "eigenpairs")
    start = torch.randn(n, block, generator=random, dtype=torch.float64)
    held = moved = torch.empty(n, 0, dtype=torch.float64, device=device)
    fresh = torch.linalg.qr(start.to(held)).Q
    products = 0
    for _ in range(rounds):
        products += fresh.shape[1]
        held, moved = torch.cat([held, fresh], dim=1), torch.cat([moved, multiply(fresh)], dim=1)
        small = held.mT @ moved
        values, turn = torch.linalg.eigh((small + small.mT) / 2)
        values, turn = values.flip(0), turn.flip(1)
        top, wanted = values[:count], turn[:, :count]
        vectors = held @ wanted
        sizes = (moved @ wanted - vectors * top).norm(dim=0)
        whole = held.shape[1] == n  # the basis spans everything: what is left of the residuals is rounding
        small_enough = torch.maximum(tolerance * top, 10 * rounding * top[:1])
        done = whole or (len(top) == count and bool((sizes <= small_enough).all()))
        if done:
            break
        fresh = _next_block(held, moved[:, -fresh.shape[1] :], min(block, n - held.shape[1]), random)
        if held.shape[1] + fresh.shape[1] > basis:  # thick restart: the next block stays orthogonal to what is kept
            kept = turn[:, : count + block]
            held, moved = held @ kept, moved @ kept
    return Eigenpairs(top, vectors, sizes, products, done)


def _next_block(held: Tensor, moved: Tensor, size: int, random: torch.Generator) -> Tensor:
    """At most ``size`` orthonormal columns: what products ``moved`` have outside the span of ``held``, else random ones."""
    picked = moved[:, :size]
    for _ in range(3):  # twice is enough unless columns nearly coincide
        picked = picked / picked.norm(dim=0).clamp(min=torch.finfo(torch.float64).tiny)
        picked = picked - held @ (held.mT @ picked)
        picked, upper = torch.linalg.qr(picked)
        weak = upper.diagonal().abs() < 1e-12
        if bool(weak.any()):  # the space is exhausted in these directions
            picked[:, weak] = torch.randn(len(held), int(weak.sum()), generator=random, dtype=torch.float64).to(held)
    return picked


# --- traces by random probes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """A trace as a part that is known, and one estimate of the rest by each probe: ``known + mean(rest)``."""

    known: Float[Tensor, "f"]
    rest: Float[Tensor, "f probes"]

    def combine(self, function: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        """A smooth function of the traces and its standard error, by the jackknife over probes."""
        count = self.rest.shape[1]
        if not count:  # all of it is known
            return float(function(self.known)), 0.0
        value = float(function(self.known + self.rest.mean(1)))
        if count < 2:
            return value, float("inf")
        without = (self.rest.sum(1, keepdim=True) - self.rest) / (count - 1)
        each = torch.stack([function(self.known + column) for column in without.mT])
        return value, float(((count - 1) / count * (each - each.mean()).square().sum()).sqrt())


def draw_starts(
    multiply: Multiply, n: int, rank: int, probes: int, seed: int
) -> tuple[Float[Tensor, "n r"], Float[Tensor, "n s"]]:
    """Orthonormal columns near the top of the spectrum, and random signs outside their span: the two parts of Hutch++.

    For any A, trace f(A) = sum of q^T f(A) q over the first + the mean of g^T f(A) g over the second.
    """
    require(probes >= 2, f"a standard error needs at least 2 probes, got {probes}.")
    random = stream(seed, "probes")
    rank = min(rank, n // 2)
    signs = torch.randint(0, 2, (n, probes), generator=random).double() * 2 - 1
    sketch = torch.randn(n, rank, generator=random, dtype=torch.float64)
    top = torch.linalg.qr(multiply(sketch)).Q if rank else sketch
    signs = signs.to(top.device)
    return top, signs - top @ (top.mT @ signs)


def estimate_moments(multiply: Multiply, n: int, *, rank: int, probes: int, seed: int = 0) -> Samples:
    """Traces of A and A^2 (the squared Frobenius norm), by Hutch++: ``rank + probes`` products after ``rank`` for the sketch."""
    top, outside = draw_starts(multiply, n, rank, probes, seed)
    moved = multiply(torch.cat([top, outside], dim=1))
    forms = torch.stack([(torch.cat([top, outside], dim=1) * moved).sum(0), moved.square().sum(0)])
    r = top.shape[1]
    return Samples(forms[:, :r].sum(1), forms[:, r:])


def estimate_function(
    multiply: Multiply,
    n: int,
    functions: Callable[[Tensor], Tensor],
    *,
    rank: int,
    probes: int,
    steps: int,
    at_once: int | None = None,
    seed: int = 0,
) -> tuple[Samples, Samples]:
    """Traces of functions of A, ``functions(eigenvalues) [...] -> [f, ...]``, by stochastic Lanczos quadrature.

    Hutch++ for functions: ``steps`` products for each of ``rank + probes`` columns, ``at_once`` of them together. Two results:
    with all steps, and with three quarters of them; their difference shows what further steps would change.
    """
    top, outside = draw_starts(multiply, n, rank, probes, seed)
    r = top.shape[1]
    starts = torch.cat([top, outside], dim=1)
    found = [lanczos(multiply, some, min(steps, n)) for some in starts.split(at_once or starts.shape[1], dim=1)]
    alpha, beta = (torch.cat(parts) for parts in zip(*found, strict=True))
    sizes = starts.square().sum(0)

    def samples(used: int) -> Samples:
        matrix = torch.diag_embed(alpha[:, :used])
        matrix = matrix + torch.diag_embed(beta[:, : used - 1], 1) + torch.diag_embed(beta[:, : used - 1], -1)
        nodes, vectors = torch.linalg.eigh(matrix)
        weights = vectors[:, 0].square()  # of the Gauss quadrature
        forms = (functions(nodes.clamp(min=0)) * weights).sum(-1) * sizes
        return Samples(forms[:, :r].sum(1), forms[:, r:])

    return samples(alpha.shape[1]), samples(max(1, 3 * alpha.shape[1] // 4))


def lanczos(
    multiply: Multiply, starts: Float[Tensor, "n c"], steps: int
) -> tuple[Float[Tensor, "c m"], Float[Tensor, "c m_1"]]:
    """Diagonals and off-diagonals of the tridiagonal matrix of each start, with full re-orthogonalisation.

    Holds ``steps`` vectors a start. A start whose space is exhausted goes on with zeros.
    """
    sizes = starts.norm(dim=0)
    scale = sizes.clamp(min=torch.finfo(torch.float64).tiny)
    vectors = [starts / scale]
    alphas, betas = [], []
    largest = torch.zeros_like(sizes)
    for number in range(steps):
        moved = multiply(vectors[-1])
        alphas.append((moved * vectors[-1]).sum(0))
        for _ in range(2):
            for other in vectors:
                moved = moved - (other * moved).sum(0) * other
        if number + 1 == steps:
            break
        size = moved.norm(dim=0)
        largest = torch.maximum(largest, alphas[-1].abs() + size)
        going = size > 1e-13 * largest
        betas.append(torch.where(going, size, 0.0))
        vectors.append(torch.where(going, moved / size.clamp(min=torch.finfo(torch.float64).tiny), 0.0))
    empty = sizes.new_zeros(len(sizes), 0)
    return torch.stack(alphas, 1), torch.stack(betas, 1) if betas else empty
