"""Both theorems against direct minimisation, and on digits (L1-L3, L5, L7).

Nothing is trained by gradient descent. The direct minimisation is a quasi-Newton search that knows nothing of the theorems.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.kernels.regression import kernel_regression
from unlazy.models.build import build
from unlazy.models.spec import Init, relu_spec
from unlazy.runtime import stream
from unlazy.studies.study import Figure, Results, SeedCase, Study, Work, one_case_per_seed
from unlazy.studies.table import Rows
from unlazy.studies.trainings import twos_and_threes
from unlazy.theory.adaptive_solutions import AlternatingSearch, factor_update, solve_structured, solve_unstructured
from unlazy.theory.penalties import Power
from unlazy.theory.tangent_layers import gram_of, tangent_layers

# --- settings and cases --------------------------------------------------------------------------------------

# images: digits 2 and 3, half of them to fit, half to test on; width: units of both hidden layers; rounds: the most rounds of
# a search; starts: how many starts the search has that is not convex
SCALES = {
    "smoke": {"images": 24, "width": 8, "rounds": 10, "starts": 2},
    "desk": {"images": 120, "width": 32, "rounds": 60, "starts": 4},
    "paper": {"images": 250, "width": 64, "rounds": 200, "starts": 4},
}
SQUARE = Power(2)
FLIPPED = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # shares of labels with the wrong sign: ever harder targets
HIDDEN = (1, 2)  # hidden layers of the networks


# --- measuring -----------------------------------------------------------------------------------------------


def measure(case: SeedCase, work: Work) -> Rows:
    """Check both theorems on small random problems, then solve for a network's tangent features on digits."""
    rows = Rows()
    _check_theorems(case.seed, rows)
    _measure_digits(case, rows)
    return rows


def _check_theorems(seed: int, rows: Rows) -> None:
    """Add how far the value of each theorem's formula is from the minimum that a direct search finds, relative."""
    features, y = _random_normal(seed, "features", 4, 9), 2 * _random_normal(seed, "targets", 4)
    update = 1.5 * _random_normal(seed, "update", 3, 4)
    formulas = solve_unstructured(features @ features.T, y, SQUARE).value, factor_update(update, SQUARE, SQUARE).cost
    searches = least_over_transformations(features, y, seed), least_over_factors(update, seed)
    misses = [abs(search / formula - 1) for search, formula in zip(searches, formulas, strict=True)]
    rows.add("distance_from_search", misses, theorem=[1, 2])


def _random_normal(seed: int, name: str, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=stream(seed, "adaptive", name), dtype=torch.float64)


def _measure_digits(case: SeedCase, rows: Rows) -> None:
    """Solve for a network's tangent features on digits 2 (-1) and 3 (+1); half of the images are fitted, the others are new.

    The column ``factors`` is the number of transformations of a layer; with 0 features are fixed and the solution is the
    min-norm one.
    """
    settings, seed = case.settings, case.seed
    x, y = twos_and_threes("digits", settings.images, torch.float64)
    half = len(x) // 2
    spec = relu_spec(x.shape[1], 1, width=settings.width, depth=2, init=Init("he"))
    net = build(spec, seed=seed, dtype=torch.float64)
    with torch.no_grad():
        start = net(x)[:, 0]
    rest = (y - start)[:half]
    layers = tangent_layers(net, x)
    kernel = gram_of(layers)
    fitted, cross = kernel[:half, :half], kernel[half:, :half]

    free = solve_unstructured(fitted, rest, SQUARE)
    plain = free.predict(cross)
    adapted, adapted_cross = free.kernel(fitted, free.fitted), free.kernel(cross, plain, free.fitted)
    new = kernel_regression(adapted, rest[:, None], adapted_cross)[:, 0]
    rows.add("function_change", float((new - plain).norm() / plain.norm()))

    shown, search = tangent_layers(net, x[:half]), AlternatingSearch(rounds=settings.rounds, tolerance=1e-9)
    several = replace(search, starts=settings.starts, seed=seed)
    fixed = solve_structured(shown, rest)
    one = solve_structured(shown, rest, left=SQUARE, search=search)
    two = solve_structured(shown, rest, left=SQUARE, right=SQUARE, search=several)
    for factors, found in enumerate((fixed, one, two)):
        ranks = [layer.effective_rank() for layer in found.layers[:-1]]
        rows.add("effective_rank", ranks, factors=factors, layer=HIDDEN)
    for factors, found in ((0, fixed), (2, two)):
        missed = (found.predict(layers) + start).sign()[half:] != y[half:]
        rows.add("error", float(missed.double().mean()), factors=factors)
    ends = [series[-1] for series in two.objectives]
    rows.add("duality_gap", float(one.gap or 0.0) / one.objective, factors=1)
    rows.add_all({"stationarity": two.stationarity, "starts_apart": max(ends) / min(ends) - 1}, factors=2)
    rises = [float(np.diff(series).max(initial=0.0)) for found in (one, two) for series in found.objectives]
    rows.add("largest_rise_of_objective", max(rises))
    _measure_harder_targets(fitted, rest, y[:half], seed, rows)


def _measure_harder_targets(kernel: Tensor, rest: Tensor, y: Tensor, seed: int, rows: Rows) -> None:
    """Add the size ||beta|| and the stretch s of the solutions as ever more labels get the wrong sign."""
    order = torch.randperm(len(y), generator=stream(seed, "flipped"))
    found = []
    for share in FLIPPED:
        targets, chosen = rest.clone(), order[: int(share * len(y))]
        targets[chosen] -= 2 * y[chosen]
        found.append(solve_unstructured(kernel, targets, SQUARE))
    sizes, stretches = [one.size for one in found], [one.stretch for one in found]
    rows.add_all({"size": sizes, "stretch": stretches}, turned=FLIPPED)
    rows.add("least_rise_of_stretch", least_rise(sizes, stretches))


def least_rise(sizes: list[float], stretches: list[float]) -> float:
    """The least difference of neighbouring stretches, in order of size."""
    return float(np.diff(np.array(stretches)[np.argsort(sizes)]).min())


# --- direct minimisation -------------------------------------------------------------------------------------

SEARCHES = 3  # each from its own start; the best is used


def distance_from_identity(matrix: Float[Tensor, "m m"]) -> Tensor:
    """The penalty sum (sigma - 1)^2 over the singular values of a matrix."""
    return (torch.linalg.svdvals(matrix) - 1).square().sum()


def least_over_transformations(features: Float[Tensor, "n p"], y: Float[Tensor, "n"], seed: int) -> float:
    """min over M of ||theta||^2 + sum (sigma(M) - 1)^2, with theta the least-norm interpolant for that M."""

    def cost(matrix: Tensor) -> Tensor:
        moved = features @ matrix
        return y @ torch.linalg.solve(moved @ moved.T, y) + distance_from_identity(matrix)

    return _search_minimum(cost, features.shape[1:], seed)


def least_over_factors(update: Float[Tensor, "m d"], seed: int) -> float:
    """min over M_1, M_2 of ||M_1^-1 B M_2^-1||^2 + sum (sigma - 1)^2 of both, for a given B."""

    def cost(left: Tensor, right: Tensor) -> Tensor:
        theta = torch.linalg.solve(left, torch.linalg.solve(right, update, left=False))
        return theta.square().sum() + distance_from_identity(left) + distance_from_identity(right)

    return _search_minimum(cost, update.shape, seed)


def _search_minimum(cost: Callable[..., Tensor], sizes: Sequence[int], seed: int) -> float:
    """The least cost over square matrices of these sizes, searched from near the identities."""
    from scipy.optimize import minimize

    def value_and_gradient(flat: Any) -> tuple[float, Any]:
        numbers = torch.tensor(flat, dtype=torch.float64).requires_grad_()
        parts = numbers.split([size**2 for size in sizes])
        value = cost(*(part.reshape(size, size) for part, size in zip(parts, sizes, strict=True)))
        (slope,) = torch.autograd.grad(value, numbers)
        return float(value.detach()), slope.numpy()

    start = torch.cat([torch.eye(size, dtype=torch.float64).flatten() for size in sizes])
    found, options = [], {"gtol": 1e-8, "maxiter": 3000}
    for number in range(SEARCHES):
        noise = torch.randn(len(start), generator=stream(seed, "direct", number), dtype=torch.float64)
        result = minimize(value_and_gradient, (start + 0.2 * noise).numpy(), jac=True, method="BFGS", options=options)
        found.append(float(result.fun))
    return min(found)


# --- claims --------------------------------------------------------------------------------------------------

Vector = NDArray[np.float64]
EQUAL, UNCHANGED, LOWER, NEVER_FALLS = 1e-6, 1e-6, 1.0, -1e-12
MATCHES = "formula against direct minimisation, relative"
FIXED, ONE_SIDED, ADAPTED = (
    tuple(Quantity("effective_rank", factors=factors, layer=layer) for layer in HIDDEN) for factors in range(3)
)


def worst_ratio(first: Vector, second: Vector, first_before: Vector, second_before: Vector) -> Vector:
    """The larger of two layers' ratios."""
    return np.maximum(first / first_before, second / second_before)


def mean_of_two(first: Vector, second: Vector) -> Vector:
    """The mean of two numbers, seed by seed."""
    return (first + second) / 2


CLAIMS = (
    Claim(
        "L1",
        says=(
            "Minimising jointly over the coefficients and an unrestricted linear transformation of the tangent "
            "features, with a spectral penalty on the latter, has the closed-form optimum made of the min-norm "
            "solution and one stretched direction."
        ),
        where="Thm 1",
        paper="equality",
        parts=[Part(MATCHES, Quantity("distance_from_search", theorem=1), below=EQUAL, identity=True)],
    ),
    Claim(
        "L2",
        says=(
            "Adapting the tangent features by an unrestricted linear transformation leaves the fitted function "
            "equal to the min-norm fit with the original features."
        ),
        where="Thm 1",
        paper="exact",
        parts=[
            Part(
                "change of the function on new digits, relative",
                Quantity("function_change"),
                below=UNCHANGED,
                identity=True,
            )
        ],
    ),
    Claim(
        "L3",
        says=(
            "With one left and one right transformation per layer the joint cost of a given update matrix, "
            "minimised over all its factorisations, equals an effective penalty summed over its singular values, "
            "and the optimal transformations follow from its singular vectors."
        ),
        where="Thm 2",
        paper="equality (for fixed update matrices)",
        parts=[Part(MATCHES, Quantity("distance_from_search", theorem=2), below=EQUAL, identity=True)],
        shows=[
            Shown("relative duality gap, one square factor a layer, digits", Quantity("duality_gap")),
            Shown("unexplained share of the gradient, two factors, digits", Quantity("stationarity")),
            Shown("worst over best of several starts, minus 1, two factors, digits", Quantity("starts_apart")),
            Shown("largest rise of the objective in the search", Quantity("largest_rise_of_objective")),
        ],
    ),
    Claim(
        "L5",
        says=(
            "The update matrices of the structured adaptive solution have a lower effective rank than those of "
            "the min-norm tangent solution."
        ),
        where="abstract",
        paper="approximately low rank; no number",
        figure="ranks",
        parts=[
            Part("effective rank, adapted over min-norm, worst layer", (*ADAPTED, *FIXED), by=worst_ratio, below=LOWER)
        ],
        shows=[
            Shown("with one square factor a layer instead of two, worst layer", (*ONE_SIDED, *FIXED), by=worst_ratio),
            Shown("effective rank, min-norm, mean over hidden layers", FIXED, by=mean_of_two),
            Shown("effective rank, adapted, mean over hidden layers", ADAPTED, by=mean_of_two),
            Shown("error on new digits, min-norm", Quantity("error", factors=0)),
            Shown("error on new digits, adapted", Quantity("error", factors=2)),
        ],
    ),
    Claim(
        "L7",
        says=(
            "The stretch s of the adapted direction, and with it the label-kernel term added to the kernel, never "
            "falls as the norm of the min-norm solution grows."
        ),
        where="Thm 1",
        paper="monotone",
        figure="difficulty",
        parts=[Part("least rise of s as ||beta|| grows", Quantity("least_rise_of_stretch"), above=NEVER_FALLS)],
        shows=[
            Shown(f"stretch with {share:.0%} of the labels turned", Quantity("stretch", turned=share))
            for share in FLIPPED
        ],
    ),
)


# --- figures -------------------------------------------------------------------------------------------------


def ranks_figure(results: Results) -> plots.Figure:
    """Effective rank of each hidden layer's update, with fixed features, one and two factors a layer; a line a seed."""
    figure, ((axis,),) = plots.grid(1, 1, (3.6, 2.8))
    for layer, style in zip(HIDDEN, ("-", "--"), strict=True):
        places, lines = results.table.series("effective_rank", over="factors", layer=layer)
        axis.plot(places, lines, style, color=plots.COLOURS["grey"], linewidth=0.6, alpha=0.6)
        middle = {"marker": "o", "color": plots.COLOURS["blue"], "label": f"hidden layer {layer}"}
        axis.plot(places, np.median(lines, 1), style, **middle)
    axis.set_xticks(places, ["min-norm\n(fixed features)", "one factor\na layer", "two factors\na layer"])
    axis.set(title="adaptation makes updates low rank", ylabel="effective rank of the update", ylim=(0, None))
    axis.legend()
    return figure


def difficulty_figure(results: Results) -> plots.Figure:
    """Stretch of the fitted direction against the norm of the min-norm solution, as labels are turned; a line a seed."""
    figure, ((axis,),) = plots.grid(1, 1, (3.6, 2.8))
    sizes, stretches = (results.table.series(name, over="turned")[1] for name in ("size", "stretch"))
    axis.plot(sizes, stretches, "o-", markersize=3, linewidth=0.8, color=plots.COLOURS["orange"], alpha=0.7)
    axis.set(title="stretch while 0 to 50 % of labels are turned", xlabel="norm of the min-norm solution")
    axis.set_ylabel("stretch s of the fitted direction")
    return figure


STUDY = Study(
    name="adaptive",
    paper="tangent",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 10, "paper": 20},
    cases=one_case_per_seed,
    measure=measure,
    claims=CLAIMS,
    figures=(
        Figure("ranks", "Adaptation makes updates low rank", ranks_figure),
        Figure("difficulty", "Harder targets are stretched more", difficulty_figure),
    ),
)
