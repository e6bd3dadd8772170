"""Linear models on tangent features that are transformed while the model is fitted (adaptive tangent paper, Theorems 1, 2).

Joint problem: min ||theta||^2 + sum omega(singular values of M) subject to <phi(x_i), M theta> = y_i, where y is what is left
to learn, targets minus f_0. Without structure (Theorem 1) the solution is the min-norm fit with one stretched direction. With
a left and a right transformation for each layer (Theorem 2) the update of each layer costs an effective penalty on its
singular values. It is found by two alternating steps that never increase the objective: interpolate with the transformed
features, then factor the updates anew.

``ridge`` > 0 replaces the constraint by ||<phi, M theta> - y||^2 / ridge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.kernels.compare import effective_rank
from unlazy.runtime import InputError, require, stream
from unlazy.theory.penalties import (
    Penalty,
    Power,
    circled_plus,
    conjugate,
    effective_penalty,
    effective_slope,
    factor_stretches,
    is_convex,
    optimal_stretch,
)
from unlazy.theory.tangent_layers import Layer, Matrix, Rows, Stretch, gram_of

FEASIBLE = 1e-8
GRID = 401
Kernel = Float[Tensor, "rows rows"]


class Constraints:
    """The constraints <features, update> = y of a set of rows; raises ``InputError`` if no update fulfils them.

    ``vectors`` and ``values``: eigenvectors and eigenvalues of the kernel that are not zero to rounding.
    """

    def __init__(self, kernel: Kernel, y: Rows, ridge: float) -> None:
        require(ridge >= 0, f"ridge must be at least 0, got {ridge!r}.")
        require(kernel.shape == (len(y), len(y)), f"{len(y)} targets do not fit a kernel {tuple(kernel.shape)}.")
        good = bool(torch.isfinite(kernel).all() & torch.isfinite(y).all())
        require(good, "features or targets hold NaN or infinity; clean them first.")
        values, vectors = torch.linalg.eigh(kernel)
        kept = values > len(y) * torch.finfo(kernel.dtype).eps * values[-1].clamp(min=0)
        self.kernel, self.y, self.ridge, self.rank = kernel, y, ridge, int(kept.sum())
        self.values, self.vectors = values[kept], vectors[:, kept]
        outside = float((y - self.vectors @ (self.vectors.T @ y)).norm())
        if ridge == 0 and outside > FEASIBLE * float(y.norm()):
            raise InputError(
                f"no update interpolates: the features of {len(y)} rows have rank {self.rank}, and {outside:.3g} of the "
                f"targets' norm {float(y.norm()):.3g} lies outside their range. Give ridge > 0, or more features."
            )

    def solve(self, kernel: Kernel) -> Rows:
        """Weights of the rows, (K + ridge)^(-1) y, for a transformed kernel K, inside the range of the original features."""
        basis = None if self.ridge > 0 or self.rank == len(self.y) else self.vectors
        inner = kernel if basis is None else basis.T @ kernel @ basis
        target = self.y if basis is None else basis.T @ self.y
        inner = inner + self.ridge * torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
        factor, failed = torch.linalg.cholesky_ex(inner)
        if int(failed):
            raise InputError("the transformed features are dependent to rounding; give ridge > 0.")
        weights = torch.cholesky_solve(target[:, None], factor)
        weights = weights + torch.cholesky_solve(target[:, None] - inner @ weights, factor)  # one round of refinement
        return weights[:, 0] if basis is None else basis @ weights[:, 0]


# --- Theorem 1 -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnstructuredSolution:
    """The solution of Theorem 1: the rows' ``weights``, ``fitted`` values, ``size`` ||beta||, ``stretch`` s, the objective."""

    weights: Rows
    fitted: Rows
    size: float
    stretch: float
    value: float

    def predict(self, cross: Float[Tensor, "m rows"]) -> Float[Tensor, "m"]:
        """f - f_0 at new rows, from the original kernel between new and fitted rows."""
        return cross @ self.weights

    def kernel(
        self, kernel: Float[Tensor, "m m2"], change: Float[Tensor, "m"], change2: Float[Tensor, "m2"] | None = None
    ) -> Float[Tensor, "m m2"]:
        """K + (s^2 - 1) f f^T / ||beta||^2: the original kernel plus a label kernel of the learned change f."""
        second = change if change2 is None else change2
        return kernel + self._label_kernel_weight() * torch.outer(change, second)

    def diagonal_gain(self, change: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
        """(s^2 - 1) f^2 / ||beta||^2: what the diagonal of the kernel gains where the learned change is f."""
        return self._label_kernel_weight() * change.square()

    def _label_kernel_weight(self) -> float:
        """(s^2 - 1) / ||beta||^2."""
        return (self.stretch**2 - 1) / self.size**2 if self.size > 0 else 0.0

    def factors(self, features: Float[Tensor, "rows p"]) -> tuple[Float[Tensor, "p p"], Float[Tensor, "p"]]:
        """M = I + (s - 1) beta beta^T / ||beta||^2 and theta = beta / s, for features small enough to write down."""
        beta = features.T @ self.weights
        direction = (beta / self.size if self.size > 0 else beta)[:, None]
        values = torch.tensor([self.stretch], dtype=beta.dtype, device=beta.device)
        return Stretch(direction, values).matrix(), beta / self.stretch


def solve_unstructured(
    kernel: Kernel, y: Rows, penalty: Penalty | None = None, ridge: float = 0.0
) -> UnstructuredSolution:
    """Theorem 1 in closed form, from the tangent kernel alone: beta is the min-norm fit, s = argmin omega(z) + ||beta||^2 / z^2.

    With a ridge the fit is a ridge fit of strength ridge / s^2; s depends on the fit in turn, and the best pair is returned.
    """
    penalty = penalty or Power(2)
    given = Constraints(kernel, y, ridge)
    inside, values = given.vectors.T @ y, given.values

    def norm_at(strength: Tensor) -> Tensor:
        return (inside.square() * values / (values + strength[:, None]) ** 2).sum(1).sqrt()

    strength = torch.zeros(1, dtype=y.dtype, device=y.device)
    if ridge > 0:
        strength = _best_strength(ridge, norm_at, inside, values, float(y.square().sum()), penalty)
    weights = given.vectors @ (inside / (values + strength))
    size = norm_at(strength)
    fitted = kernel @ weights
    value = effective_penalty(penalty, size)
    if ridge > 0:
        value = value + (fitted - y).square().sum() / ridge
    return UnstructuredSolution(weights, fitted, float(size), float(optimal_stretch(penalty, size)), float(value))


def _best_strength(
    ridge: float, norm_at: Callable[[Tensor], Tensor], inside: Tensor, values: Tensor, total: float, penalty: Penalty
) -> Float[Tensor, "1"]:
    """The strength in [ridge / s^2, ridge] whose ridge fit costs least: a grid, then finer grids around its best."""
    zero = torch.zeros(1, dtype=inside.dtype, device=inside.device)
    most = optimal_stretch(penalty, norm_at(zero))
    low, high = float(torch.log(ridge / most**2)), float(torch.log(torch.tensor(ridge)))
    outside = total - float(inside.square().sum())
    best = zero
    for _ in range(6):
        strengths = torch.linspace(low, high, GRID, dtype=inside.dtype, device=inside.device).exp()
        missing = (inside.square() * (strengths[:, None] / (values + strengths[:, None])) ** 2).sum(1) + outside
        costs = effective_penalty(penalty, norm_at(strengths)) + missing / ridge
        number = int(costs.argmin())
        best = strengths[number : number + 1]
        low = float(strengths[max(number - 2, 0)].log())
        high = float(strengths[min(number + 2, GRID - 1)].log())
    return best


# --- Theorem 2 -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FactoredUpdate:
    """One layer's update B = M_1 Theta M_2 in its cheapest factors; ``None`` stands for the identity."""

    update: Matrix
    left: Stretch | None
    right: Stretch | None
    theta: Matrix
    cost: float

    def effective_rank(self) -> float:
        """Entropy rank of the update: of the spectrum of B B^T."""
        small = self.update if self.update.shape[0] <= self.update.shape[1] else self.update.T
        return float(effective_rank(small @ small.T))


@dataclass(frozen=True)
class StructuredSolution:
    """The solution of Theorem 2, the best of all starts.

    ``objectives``: one falling series a start. ``gap``: objective minus a proven lower bound, where the effective penalty is
    convex. ``stationarity``: the share of the objective's gradient that is no combination of the constraints.
    """

    layers: list[FactoredUpdate]
    weights: Rows
    objective: float
    objectives: list[list[float]]
    stationarity: float
    gap: float | None
    residual: float

    def predict(self, layers: Sequence[Layer]) -> Rows:
        """f - f_0 at the rows of ``layers``."""
        parts = [layer.apply(found.update) for layer, found in zip(layers, self.layers, strict=True)]
        return torch.stack(parts).sum(0)

    def adapt_features(self, layers: Sequence[Layer]) -> list[Layer]:
        """The transformed features M_1^T X M_2^T of any rows."""
        return [layer.stretch(found.left, found.right) for layer, found in zip(layers, self.layers, strict=True)]

    def kernel(self, layers: Sequence[Layer], others: Sequence[Layer] | None = None) -> Float[Tensor, "rows rows2"]:
        """The adapted kernel: inner products of M_1^T X M_2^T."""
        return gram_of(self.adapt_features(layers), None if others is None else self.adapt_features(others))


@dataclass(frozen=True)
class AlternatingSearch:
    """Settings of the search: at most ``rounds``; stop when the objective falls by less than the share ``tolerance``.

    More than one of ``starts`` helps only where the effective penalty is not convex; ``seed`` draws the further ones.
    """

    rounds: int = 500
    tolerance: float = 1e-10
    starts: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rounds", "starts"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, f"{name} must be a whole number >= 1, got {value!r}.")
        require(self.tolerance >= 0, f"tolerance must be at least 0, got {self.tolerance!r}.")


def factor_update(update: Matrix, left: Penalty | None, right: Penalty | None) -> FactoredUpdate:
    """The cheapest M_1, Theta, M_2 with M_1 Theta M_2 = update: the inner problem of Theorem 2, solved by an SVD.

    Singular vectors of the update are stretched; the stretches of each singular value minimise
    omega_1(z_1) + omega_2(z_2) + v^2 / (z_1 z_2)^2.
    """
    present = [penalty for penalty in (left, right) if penalty is not None]
    u, sizes, v = torch.linalg.svd(update, full_matrices=False)
    if not present:
        return FactoredUpdate(update, None, None, update, float(sizes.square().sum()))
    shares = list(factor_stretches(present, sizes))
    total = torch.stack(shares).prod(0)
    cost = float(
        sum(penalty(z).sum() for penalty, z in zip(present, shares, strict=True)) + (sizes / total).square().sum()
    )
    first = Stretch(u, shares.pop(0)) if left is not None else None
    second = Stretch(v.mT, shares.pop(0)) if right is not None else None
    return FactoredUpdate(update, first, second, (u * (sizes / total)) @ v, cost)


def solve_structured(
    layers: Sequence[Layer],
    y: Rows,
    *,
    left: Penalty | None = None,
    right: Penalty | None = None,
    ridge: float = 0.0,
    search: AlternatingSearch | None = None,
) -> StructuredSolution:
    """Theorem 2: minimise sum over layers and singular values v of omega~(v) subject to the fit, by two alternating steps.

    One step interpolates with the transformed features, the other factors the updates anew; none increases the objective.
    ``left`` and ``right`` are the penalties omega_1, omega_2 of the two sides of every layer, ``None`` keeps a side fixed.

    With neither the result is the min-norm (or ridge) solution. Nothing larger than rows x rows or one layer is ever formed.
    """
    search = search or AlternatingSearch()
    for penalty in (left, right):
        if penalty is not None and not penalty.convex_in_log:
            raise InputError(
                f"penalty {penalty.name}: u -> omega(e^u) must be convex for Theorem 2; the theorem without structure takes it."
            )
    original = gram_of(layers)
    given = Constraints(original, y, ridge)
    tries = [_alternate(layers, given, left, right, search, number) for number in range(search.starts)]
    found, weights, _ = min(tries, key=lambda one: one[2][-1])
    fitted = torch.stack([layer.apply(one.update) for layer, one in zip(layers, found, strict=True)]).sum(0)
    objective = min(one[2][-1] for one in tries)
    return StructuredSolution(
        found,
        weights,
        objective,
        [one[2] for one in tries],
        _stationarity(layers, given, found, fitted, left, right),
        _duality_gap(layers, given, weights, objective, left, right),
        float((fitted - y).norm() / y.norm().clamp(min=1e-300)),
    )


def _alternate(
    layers: Sequence[Layer],
    given: Constraints,
    left: Penalty | None,
    right: Penalty | None,
    search: AlternatingSearch,
    number: int,
) -> tuple[list[FactoredUpdate], Rows, list[float]]:
    """One search: factored updates, rows' weights and the series of objectives."""
    weights = given.solve(given.kernel)
    found = [factor_update(layer.combine(weights), left, right) for layer in layers]
    if number > 0:
        found = [_draw_other_start(one, left, right, search.seed, number, place) for place, one in enumerate(found)]
    series: list[float] = []
    for _ in range(search.rounds):
        adapted = [layer.stretch(one.left, one.right) for layer, one in zip(layers, found, strict=True)]
        weights = given.solve(gram_of(adapted))
        found = [
            factor_update(_update_from_theta(layer.combine(weights), one), left, right)
            for layer, one in zip(adapted, found, strict=True)
        ]
        series.append(_objective(layers, given, found))
        if len(series) > 1 and series[-2] - series[-1] <= search.tolerance * abs(series[-1]):
            break
    return found, weights, series


def _update_from_theta(theta: Matrix, one: FactoredUpdate) -> Matrix:
    """B = M_1 Theta M_2 from Theta, a combination of transformed features (both M are symmetric)."""
    update = theta if one.right is None else one.right(theta)
    return update if one.left is None else one.left(update.mT).mT


def _draw_other_start(
    one: FactoredUpdate, left: Penalty | None, right: Penalty | None, seed: int, number: int, place: int
) -> FactoredUpdate:
    """Another start: factors of the min-norm update plus noise of three times its norm."""
    random = torch.randn(one.update.shape, generator=stream(seed, "start", number, place), dtype=torch.float64)
    noise = random.to(one.update) * (3 * one.update.norm() / random.norm())
    return factor_update(one.update + noise, left, right)


def _objective(layers: Sequence[Layer], given: Constraints, found: Sequence[FactoredUpdate]) -> float:
    """The cost of all factors, plus the squared residual over the ridge."""
    cost = sum(one.cost for one in found)
    if given.ridge == 0:
        return cost
    fitted = torch.stack([layer.apply(one.update) for layer, one in zip(layers, found, strict=True)]).sum(0)
    return cost + float((fitted - given.y).square().sum()) / given.ridge


def _penalty_gradient(update: Matrix, penalty: Penalty | None) -> Matrix:
    """The gradient of the effective penalty summed over singular values; smooth, because its slope at 0 is 0."""
    if penalty is None:
        return 2 * update
    u, sizes, v = torch.linalg.svd(update, full_matrices=False)
    return (u * effective_slope(penalty, sizes)) @ v


def _joint_penalty(left: Penalty | None, right: Penalty | None) -> Penalty | None:
    """omega_1 (+) omega_2 of the sides that are not fixed."""
    present = [penalty for penalty in (left, right) if penalty is not None]
    return circled_plus(*present) if present else None


def _stationarity(
    layers: Sequence[Layer],
    given: Constraints,
    found: Sequence[FactoredUpdate],
    fitted: Rows,
    left: Penalty | None,
    right: Penalty | None,
) -> float:
    """||gradient - nearest combination of the rows|| / ||gradient||; with a ridge the residual gives the combination."""
    slopes = [_penalty_gradient(one.update, _joint_penalty(left, right)) for one in found]
    if given.ridge > 0:
        multipliers = 2 / given.ridge * (given.y - fitted)
    else:
        along = torch.stack([layer.apply(slope) for layer, slope in zip(layers, slopes, strict=True)]).sum(0)
        multipliers = given.vectors @ ((given.vectors.T @ along) / given.values)
    missed = sum(
        float((slope - layer.combine(multipliers)).square().sum()) for layer, slope in zip(layers, slopes, strict=True)
    )
    size = sum(float(slope.square().sum()) for slope in slopes)
    return float((missed / max(size, 1e-300)) ** 0.5)


def _duality_gap(
    layers: Sequence[Layer],
    given: Constraints,
    weights: Rows,
    objective: float,
    left: Penalty | None,
    right: Penalty | None,
) -> float | None:
    """Objective minus the dual value of the last multipliers, shrunk until they are feasible.

    ``None`` where the effective penalty is not convex: the dual value is no lower bound then.
    """
    penalty = _joint_penalty(left, right)
    if penalty is not None and not is_convex(penalty):
        return None
    multipliers = 2 * weights
    sizes = torch.cat([torch.linalg.svdvals(layer.combine(multipliers)) for layer in layers])
    best = -float("inf")
    for shrink in (1.0, 1 - 1e-12, 1 - 1e-10, 1 - 1e-8, 1 - 1e-6, 1 - 1e-4, 1 - 1e-2, 0.9, 0.5, 0.0):
        scaled = shrink * sizes
        price = scaled.square().sum() / 4 if penalty is None else conjugate(penalty, scaled).sum()
        linear = shrink * (multipliers @ given.y) - given.ridge / 4 * shrink**2 * multipliers.square().sum()
        best = max(best, float(linear - price))
    return objective - best
