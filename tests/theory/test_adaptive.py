"""Adaptive tangent features: both theorems against direct minimisation, certificates, refusals, real networks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from unlazy import DLGN, HardGate, InputError
from unlazy.kernels.tangent import tangent_kernel
from unlazy.theory.adaptive_model import AdaptiveTangents
from unlazy.theory.adaptive_solutions import AlternatingSearch, factor_update, solve_structured, solve_unstructured
from unlazy.theory.penalties import Penalty, Power, circled_plus, effective_penalty, optimal_stretch
from unlazy.theory.tangent_layers import ExplicitLayer, FactoredLayer, Stretch, gram_of, tangent_layers

SQUARE, ABSOLUTE = Power(2), Power(1)


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(outputs: int = 1) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    for number, parameter in enumerate(net.parameters()):
        parameter.data = draws(*parameter.shape, seed=number) / parameter.shape[-1] ** 0.5
    return net


NET, X, Y = network(), draws(6, 4, seed=50), 2 * draws(6, seed=51)
LAYERS = tangent_layers(NET, X)
FEATURES, TARGETS = draws(4, 9), 2 * draws(4, seed=1)


# --- Theorem 1 ---------------------------------------------------------------------------------------


def spectral(matrix: Tensor, penalty: Penalty) -> Tensor:
    """omega summed over all singular values; a value below 1 pays as its distance from 1, as (z - 1)^2 does."""
    sizes = torch.linalg.svdvals(matrix)
    return (sizes - 1).abs().pow(penalty.exponent).sum()  # type: ignore[attr-defined]


def theta_of(matrix: Tensor) -> Tensor:
    """The least-norm theta that interpolates with given M."""
    return torch.linalg.lstsq(FEATURES @ matrix, TARGETS[:, None], driver="gelsd").solution[:, 0]


def test_unstructured_solution_attains_its_value() -> None:
    for penalty in (SQUARE, ABSOLUTE, Power(0.5)):
        found = solve_unstructured(FEATURES @ FEATURES.T, TARGETS, penalty)
        matrix, theta = found.factors(FEATURES)
        assert torch.allclose(FEATURES @ matrix @ theta, TARGETS, atol=1e-10)
        paid = float(theta.square().sum() + spectral(matrix, penalty))
        assert paid == pytest.approx(found.value, abs=1e-9)
        assert torch.allclose(matrix @ theta, torch.linalg.pinv(FEATURES) @ TARGETS, atol=1e-10)  # L2: the min-norm fit
        adapted = FEATURES @ matrix @ matrix.T @ FEATURES.T
        assert torch.allclose(found.kernel(FEATURES @ FEATURES.T, found.fitted), adapted, atol=1e-9)


@pytest.mark.slow
def test_unstructured_value_is_the_direct_minimum() -> None:
    """A quasi-Newton search over all M, theta eliminated: it knows nothing of the theorem."""
    from scipy.optimize import minimize

    found = solve_unstructured(FEATURES @ FEATURES.T, TARGETS, SQUARE)

    def cost(flat: object) -> tuple[float, object]:
        matrix = torch.tensor(flat, dtype=torch.float64).reshape(9, 9).requires_grad_()
        moved = FEATURES @ matrix
        value = TARGETS @ torch.linalg.solve(moved @ moved.T, TARGETS) + spectral(matrix, SQUARE)
        (slope,) = torch.autograd.grad(value, matrix)
        return float(value.detach()), slope.flatten().numpy()

    best = min(
        (minimize(cost, (torch.eye(9, dtype=torch.float64) + 0.3 * draws(9, 9, seed=s)).flatten().numpy(), jac=True,
                  method="BFGS", options={"maxiter": 5000, "gtol": 1e-9}) for s in range(3)),
        key=lambda result: result.fun,
    )  # fmt: skip
    assert best.fun == pytest.approx(found.value, rel=1e-6)
    matrix = torch.tensor(best.x).reshape(9, 9)
    ours, _ = found.factors(FEATURES)
    assert torch.allclose(matrix @ matrix.T, ours @ ours.T, atol=1e-3)


def test_no_small_move_of_m_is_cheaper() -> None:
    found = solve_unstructured(FEATURES @ FEATURES.T, TARGETS, SQUARE)
    matrix, _ = found.factors(FEATURES)
    for seed in range(20):
        moved = matrix + 0.02 * draws(9, 9, seed=seed)
        assert float(theta_of(moved).square().sum() + spectral(moved, SQUARE)) > found.value


@pytest.mark.parametrize("penalty", [SQUARE, ABSOLUTE])
def test_unstructured_ridge_is_stationary_and_best(penalty: Penalty) -> None:
    kernel, ridge = FEATURES @ FEATURES.T, 0.7
    found = solve_unstructured(kernel, TARGETS, penalty, ridge)
    strength = ridge / found.stretch**2
    wanted = torch.linalg.solve(kernel + strength * torch.eye(4, dtype=torch.float64), TARGETS)
    assert torch.allclose(found.weights, wanted, rtol=1e-5)
    for other in (0.0, 0.3 * strength, 0.9 * strength, 1.1 * strength, 3 * strength):
        weights = torch.linalg.solve(kernel + other * torch.eye(4, dtype=torch.float64), TARGETS)
        size = (weights @ kernel @ weights).sqrt()
        cost = effective_penalty(penalty, size) + (kernel @ weights - TARGETS).square().sum() / ridge
        assert float(cost) > found.value


def test_stretch_grows_with_difficulty() -> None:
    kernel = FEATURES @ FEATURES.T
    found = [solve_unstructured(kernel, scale * TARGETS, SQUARE) for scale in (0.0, 0.1, 1.0, 3.0, 30.0)]
    stretches = [one.stretch for one in found]
    assert stretches == sorted(stretches)
    assert stretches[0] == 1
    assert torch.equal(found[0].kernel(kernel, found[0].fitted), kernel)


# --- Theorem 2 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [(SQUARE, SQUARE), (SQUARE, ABSOLUTE), (SQUARE, None), (None, Power(3))])
def test_refactoring_reproduces_the_update_at_the_effective_penalty(pair: tuple[Penalty | None, ...]) -> None:
    update = 2 * draws(3, 4)
    found = factor_update(update, *pair)
    left = torch.eye(3, dtype=torch.float64) if found.left is None else found.left.matrix()
    right = torch.eye(4, dtype=torch.float64) if found.right is None else found.right.matrix()
    assert torch.allclose(left @ found.theta @ right, update, atol=1e-10)
    present = [penalty for penalty in pair if penalty is not None]
    wanted = effective_penalty(circled_plus(*present), torch.linalg.svdvals(update)).sum()
    paid = found.theta.square().sum()
    for penalty, matrix in zip(pair, (left, right), strict=True):
        paid = paid + (0 if penalty is None else spectral(matrix, penalty))
    assert found.cost == pytest.approx(float(wanted), abs=1e-9)
    assert float(paid) == pytest.approx(float(wanted), abs=1e-9)


@pytest.mark.slow
def test_refactoring_is_the_direct_minimum() -> None:
    """L3 by a search over both factors that knows nothing of singular values of B."""
    from scipy.optimize import minimize

    update = 1.5 * draws(3, 4, seed=3)
    found = factor_update(update, SQUARE, SQUARE)

    def cost(flat: object) -> tuple[float, object]:
        numbers = torch.tensor(flat, dtype=torch.float64).requires_grad_()
        left, right = numbers[:9].reshape(3, 3), numbers[9:].reshape(4, 4)
        theta = torch.linalg.solve(left, torch.linalg.solve(right, update, left=False))
        value = theta.square().sum() + spectral(left, SQUARE) + spectral(right, SQUARE)
        (slope,) = torch.autograd.grad(value, numbers)
        return float(value.detach()), slope.numpy()

    start = torch.cat([torch.eye(3).flatten(), torch.eye(4).flatten()]).double()
    tries = [
        minimize(cost, (start + 0.1 * draws(25, seed=s)).numpy(), jac=True, method="BFGS", options={"gtol": 1e-9})
        for s in range(4)
    ]
    best = min(tries, key=lambda result: result.fun)
    assert best.fun == pytest.approx(found.cost, rel=1e-6)
    left = torch.tensor(best.x[:9]).reshape(3, 3)
    assert found.left is not None
    assert torch.allclose(left @ left.T, found.left.matrix() @ found.left.matrix(), atol=1e-3)


@pytest.mark.parametrize("ridge", [0.0, 0.2])
def test_convex_penalty_closes_its_gap(ridge: float) -> None:
    found = solve_structured(LAYERS, Y, left=SQUARE, ridge=ridge, search=AlternatingSearch(tolerance=1e-13))
    assert found.gap is not None
    assert -1e-8 * found.objective <= found.gap <= 1e-7 * found.objective
    assert found.stationarity < 1e-4
    rough = solve_structured(LAYERS, Y, left=SQUARE, ridge=ridge, search=AlternatingSearch(rounds=3))
    assert rough.gap is not None
    assert rough.gap >= rough.objective - found.objective - 1e-9  # a bound, however early it is asked for


@pytest.mark.parametrize("ridge", [0.0, 0.2])
def test_objective_never_increases_and_ends_stationary(ridge: float) -> None:
    found = solve_structured(LAYERS, Y, left=SQUARE, right=ABSOLUTE, ridge=ridge, search=AlternatingSearch(starts=2))
    for series in found.objectives:
        assert max(b - a for a, b in pairwise(series)) <= 1e-10 * series[0]
    assert found.gap is None
    assert found.stationarity < 1e-3
    assert found.objective == min(series[-1] for series in found.objectives)
    if ridge == 0:
        assert found.residual < 1e-9
        assert torch.allclose(found.predict(LAYERS), Y, atol=1e-8)


@pytest.mark.slow
def test_structured_solution_is_the_direct_minimum() -> None:
    """A quasi-Newton search over updates B = min-norm + null space, on the convex problem."""
    from scipy.optimize import minimize

    layer = FactoredLayer(("w",), draws(5, 3, seed=7), draws(5, 4, seed=8))
    y = 2 * draws(5, seed=9)
    found = solve_structured([layer], y, left=SQUARE, search=AlternatingSearch(rounds=5000, tolerance=1e-15))
    rows = torch.einsum("rm,rd->rmd", layer.left, layer.right).flatten(1)
    null = torch.linalg.svd(rows)[2][5:]
    base = torch.linalg.pinv(rows) @ y

    def cost(flat: object) -> tuple[float, object]:
        numbers = torch.tensor(flat, dtype=torch.float64).requires_grad_()
        update = (base + numbers @ null).reshape(3, 4)
        value = effective_penalty(SQUARE, torch.linalg.svdvals(update)).sum()
        (slope,) = torch.autograd.grad(value, numbers)
        return float(value.detach()), slope.numpy()

    best = minimize(cost, torch.zeros(len(null)).double().numpy(), jac=True, method="BFGS", options={"gtol": 1e-9})
    assert found.objective == pytest.approx(best.fun, rel=1e-6)


def test_updates_are_closer_to_low_rank_than_min_norm() -> None:
    plain = solve_structured(LAYERS, Y)
    adapted = solve_structured(LAYERS, Y, left=SQUARE, right=SQUARE)
    assert plain.gap is not None
    assert abs(plain.gap) < 1e-9 * plain.objective
    for before, after in zip(plain.layers[:2], adapted.layers[:2], strict=True):
        assert after.effective_rank() < before.effective_rank()


def test_adapted_kernel_is_that_of_transformed_features() -> None:
    found = solve_structured(LAYERS, Y, left=SQUARE, right=SQUARE)
    wanted = torch.zeros(6, 6, dtype=torch.float64)
    for layer, one in zip(LAYERS, found.layers, strict=True):
        assert isinstance(layer, FactoredLayer)
        assert one.left is not None
        assert one.right is not None
        rows = torch.einsum("rm,rd->rmd", layer.left, layer.right)
        moved = (one.left.matrix().T @ rows @ one.right.matrix().T).flatten(1)
        wanted += moved @ moved.T
    assert torch.allclose(found.kernel(LAYERS), wanted, rtol=1e-10)


# --- features of networks ----------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 3])
def test_layers_are_the_tangent_kernel(outputs: int) -> None:
    net = network(outputs)
    full = tangent_kernel(net, X, outputs="full").transpose(1, 2).flatten(2).flatten(0, 1)
    layers = tangent_layers(net, X)
    assert all(isinstance(layer, FactoredLayer) for layer in layers)
    assert torch.allclose(gram_of(layers), full, rtol=1e-10)
    explicit = [
        ExplicitLayer(layer.names, torch.einsum("rm,rd->rmd", layer.left, layer.right))
        for layer in layers
        if isinstance(layer, FactoredLayer)
    ]
    bent = Stretch(torch.linalg.qr(draws(6, 2))[0], torch.tensor([2.0, 3.0], dtype=torch.float64))
    assert torch.allclose(
        layers[0].stretch(bent, None).gram(layers[0]),  # type: ignore[arg-type]
        explicit[0].stretch(bent, None).gram(explicit[0]),
    )


def test_convolutions_and_norms_go_as_matrices_of_their_own() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 1)).double()
    x, y = draws(5, 1, 3, 3), draws(5, 1, seed=2)
    shapes = {layer.names: layer.shape for layer in tangent_layers(net, x)}
    assert shapes[("0.weight",)] == (2, 4)
    assert shapes[("0.bias",)] == (2, 1)
    assert shapes[("4.weight", "4.bias")] == (1, 9)
    assert torch.allclose(gram_of(tangent_layers(net, x)), tangent_kernel(net, x), rtol=1e-8)
    assert torch.allclose(AdaptiveTangents(net).fit(x, y).predict(x), y, atol=1e-8)


def test_estimator_fixed_is_kernel_regression_and_free_predicts_the_same() -> None:
    new, y = draws(4, 4, seed=70), Y[:, None]
    fixed = AdaptiveTangents(NET, left=None, right=None).fit(X, y).predict(new)
    with torch.no_grad():
        kernel, cross = tangent_kernel(NET, X), tangent_kernel(NET, new, X)
        wanted = NET(new) + cross @ torch.linalg.solve(kernel, y - NET(X))
    assert torch.allclose(fixed, wanted, atol=1e-8)
    free = AdaptiveTangents(NET, structure="free").fit(X, y)
    assert torch.allclose(free.predict(new), wanted, atol=1e-8)
    assert torch.allclose(AdaptiveTangents(NET, search=AlternatingSearch(rounds=20)).fit(X, y).predict(X), y, atol=1e-8)
    assert not torch.allclose(
        AdaptiveTangents(NET, search=AlternatingSearch(rounds=20)).fit(X, y).predict(new), wanted, atol=1e-3
    )
    with torch.no_grad():
        change, rest = wanted - NET(new), y - NET(X)
    size = float((rest.T @ torch.linalg.solve(kernel, rest)).sqrt())
    s = float(optimal_stretch(SQUARE, torch.tensor(size, dtype=torch.float64)))
    plain = tangent_kernel(NET, new)
    assert torch.allclose(free.kernel(new), plain + (s**2 - 1) / size**2 * change @ change.T, rtol=1e-6)
    assert torch.allclose(free.bending(new), free.kernel(new).diagonal() / plain.diagonal())


def test_a_column_of_targets_may_be_a_vector() -> None:
    column, vector = (
        AdaptiveTangents(NET, search=AlternatingSearch(rounds=5)).fit(X, y).predict(X) for y in (Y[:, None], Y)
    )
    assert torch.equal(column, vector)


def test_several_outputs_and_several_chunks() -> None:
    net, y = network(3), draws(6, 3, seed=4)
    model = AdaptiveTangents(net).fit(X, y)
    many = X.repeat(200, 1)
    assert torch.allclose(model.predict(many), y.repeat(200, 1), atol=1e-7)
    assert model.bending(X).shape == (6,)


def test_hard_gates_use_the_value_parameters_exactly() -> None:
    net = DLGN(4, 1, width=5, depth=2, gate=HardGate()).double()
    y = draws(5, 1)
    assert torch.allclose(
        AdaptiveTangents(net, parameters="value", search=AlternatingSearch(rounds=5)).fit(X[:5], y).predict(X[:5]),
        y,
        atol=1e-7,
    )


# --- refusals ----------------------------------------------------------------------------------------


def test_infeasible_targets_are_refused_with_the_reason_and_ridge_helps() -> None:
    twice = torch.cat([X, X[:1]])
    bad, good = torch.cat([Y, Y[:1] + 1])[:, None], torch.cat([Y, Y[:1]])[:, None]
    with pytest.raises(InputError, match=r"rank 6.*ridge"):
        AdaptiveTangents(NET).fit(twice, bad)
    assert torch.allclose(
        AdaptiveTangents(NET, search=AlternatingSearch(rounds=5)).fit(twice, good).predict(twice), good, atol=1e-7
    )
    assert (
        AdaptiveTangents(NET, ridge=0.1, search=AlternatingSearch(rounds=5))
        .fit(twice, bad)
        .predict(twice)
        .isfinite()
        .all()
    )
    with pytest.raises(InputError, match="ridge"):
        solve_unstructured(torch.ones(2, 2, dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(InputError, match="Theorem 2"):
        solve_structured(LAYERS, Y, left=Power(0.5))
    with pytest.raises(InputError, match="structure"):
        AdaptiveTangents(NET, structure="kron")
    with pytest.raises(InputError, match="do not fit"):
        AdaptiveTangents(NET).fit(X, draws(6, 2))
    with pytest.raises(InputError, match="do not fit"):
        AdaptiveTangents(network(3)).fit(X, Y)
    with pytest.raises(InputError, match="fit"):
        AdaptiveTangents(NET).predict(X)
    with pytest.raises(InputError, match="ridge"):
        AdaptiveTangents(NET, ridge=-1.0).fit(X, Y[:, None])
    with pytest.raises(InputError, match="NaN"):
        solve_unstructured(torch.eye(2).double(), torch.tensor([1.0, float("nan")]).double())
    with pytest.raises(InputError, match="starts"):
        AlternatingSearch(starts=0)
