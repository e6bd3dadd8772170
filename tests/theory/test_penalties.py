"""Effective penalties: against closed forms, brute force, and the laws they must obey."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unlazy import InputError
from unlazy.theory.penalties import (
    Custom,
    Penalty,
    Power,
    Product,
    circled_plus,
    conjugate,
    effective_penalty,
    effective_slope,
    factor_stretches,
    fitted_exponent,
    is_convex,
    optimal_stretch,
    predicted_exponent,
    search_stretch,
)

SQUARE, ABSOLUTE = Power(2), Power(1)
BOTH = circled_plus(SQUARE, ABSOLUTE)
SIZES = torch.cat([torch.zeros(1, dtype=torch.float64), torch.logspace(-4, 4, 81, dtype=torch.float64)])
SQUARE_AS_CUSTOM = Custom("square", lambda z: (z - 1) ** 2, growth=2)
ABSOLUTE_AS_CUSTOM = Custom("absolute", lambda z: (z - 1).abs(), growth=1)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def brute(factors: list[Penalty], v: float, upto: float = 6.0, points: int = 3001) -> float:
    """The minimum over a fine grid of all stretches."""
    z = torch.linspace(1, upto, points, dtype=torch.float64)
    costs = [factor(z) for factor in factors]
    if len(factors) == 1:
        return float((costs[0] + v**2 / z**2).min())
    return float((costs[0][:, None] + costs[1] + v**2 / (z[:, None] * z) ** 2).min())


@pytest.mark.parametrize(
    ("penalty", "values"),
    [
        (SQUARE, (0.66950, 1.86862, 6.24653)),
        (ABSOLUTE, (0.88988, 2.00000, 4.52605)),
        (BOTH, (0.66900, 1.53938, 3.36743)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_values_of_figure_2(penalty: Penalty, values: tuple[float, ...]) -> None:
    found = effective_penalty(penalty, numbers(1, 2, 5))
    assert torch.allclose(found, numbers(*values), rtol=0, atol=1e-5)


def test_absolute_value_has_its_closed_form() -> None:
    wanted = torch.where(SIZES <= 0.5**0.5, SIZES**2, 3 * 2 ** (-2 / 3) * SIZES ** (2 / 3) - 1)
    for penalty in (ABSOLUTE, ABSOLUTE_AS_CUSTOM):
        assert torch.allclose(effective_penalty(penalty, SIZES), wanted, rtol=1e-10, atol=1e-10)


def test_square_solves_its_quartic() -> None:
    for z in (optimal_stretch(SQUARE, SIZES), search_stretch(SQUARE, SIZES), optimal_stretch(SQUARE_AS_CUSTOM, SIZES)):
        assert torch.allclose(z**3 * (z - 1), SIZES**2, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_equal_absolute_factors_have_a_closed_form(count: int) -> None:
    penalty = Product((ABSOLUTE,) * count)
    each = (2 * SIZES**2).clamp(min=1) ** (1 / (2 * count + 1))
    wanted = count * (each - 1) + SIZES**2 / each ** (2 * count)
    for z in (optimal_stretch(penalty, SIZES), search_stretch(penalty, SIZES)):
        assert torch.allclose(z, each**count, rtol=1e-10)
    assert torch.allclose(effective_penalty(penalty, SIZES), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pair", [(SQUARE, SQUARE), (SQUARE, ABSOLUTE), (Power(3), Power(1.5)), (Power(0.5),)])
def test_no_stretch_on_a_grid_is_cheaper(pair: tuple[Penalty, ...]) -> None:
    for v in (0.3, 1.0, 4.0):
        found = float(effective_penalty(circled_plus(*pair), numbers(v)))
        best = brute(list(pair), v)
        assert best - 1e-5 <= found <= best + 1e-12


def test_operator_is_the_cheapest_split_and_associative() -> None:
    z = numbers(1, 1.2, 2, 7)
    first = torch.linspace(0, 1, 4001, dtype=torch.float64)[:, None] * z.log()
    grid = (SQUARE(first.exp()) + ABSOLUTE((z.log() - first).exp())).amin(0)
    assert torch.all(BOTH(z) <= grid + 1e-12)
    assert torch.allclose(BOTH(z), grid, atol=1e-5)
    nested = circled_plus(circled_plus(SQUARE, ABSOLUTE), Power(3))
    flat = circled_plus(SQUARE, ABSOLUTE, Power(3))
    assert torch.allclose(nested(z), flat(z), rtol=1e-10, atol=1e-10)
    assert torch.allclose(circled_plus(SQUARE_AS_CUSTOM, ABSOLUTE_AS_CUSTOM)(z), BOTH(z), rtol=1e-10, atol=1e-10)


def test_factors_share_a_stretch_where_prices_are_flat() -> None:
    """omega = log z has the same marginal cost everywhere: the stretch jumps with the price."""
    log = Custom("log", lambda z: z.log())
    assert torch.allclose(optimal_stretch(log, SIZES), (2 * SIZES**2).clamp(min=1).sqrt(), rtol=1e-10)
    z = factor_stretches([log, log], numbers(5))
    assert torch.allclose(z.prod(0), numbers(50).sqrt(), rtol=1e-9)


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (lambda z: torch.expm1(z - 1), 12.0),  # beyond all numbers from z = 710 on
        (lambda z: 1 / (3 - z).clamp(min=0) - 0.5, 3.0),  # no stretch beyond 3
        (lambda z: torch.where(z < 2, (z - 1) ** 2, torch.inf), 2.0),
    ],
)
def test_penalties_that_end_at_some_stretch(function: Callable[[Tensor], Tensor], most: float) -> None:
    penalty, v = Custom("wall", function), numbers(0.0, 0.2, 1.0, 4.0, 1e3)
    z = torch.linspace(1, most, 400_001, dtype=torch.float64)[:-1]
    wanted = torch.stack([(function(z) + (one / z) ** 2).min() for one in v])
    found = effective_penalty(penalty, v)
    assert torch.all(found <= wanted * (1 + 1e-10) + 1e-14)
    assert torch.allclose(found, wanted, rtol=1e-5)
    both = effective_penalty(circled_plus(penalty, SQUARE), v)
    assert torch.all(both <= torch.minimum(found, effective_penalty(SQUARE, v)) * (1 + 1e-10) + 1e-14)


@settings(max_examples=15)
@given(st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.0]), min_size=1, max_size=3), st.floats(0, 50))
def test_laws(exponents: list[float], v: float) -> None:
    factors = [Power(exponent) for exponent in exponents]
    penalty, size = circled_plus(*factors), numbers(v)
    z = factor_stretches(factors, size)
    total = sum(factor(share) for factor, share in zip(factors, z, strict=True)) + size**2 / z.prod(0) ** 2
    found = effective_penalty(penalty, size)
    assert torch.all(z >= 1)
    assert torch.allclose(total, found, rtol=1e-10, atol=1e-12)
    assert float(found) <= v**2 * (1 + 1e-12)
    near = (z * (1 + 1e-3 * torch.linspace(-1, 1, 7, dtype=torch.float64))).clamp(min=1)  # moved together
    moved = sum(factor(share) for factor, share in zip(factors, near, strict=True)) + size**2 / near.prod(0) ** 2
    assert torch.all(moved >= found - 1e-10 * (1 + found))


@pytest.mark.parametrize("penalty", [SQUARE, ABSOLUTE, BOTH, circled_plus(SQUARE, SQUARE)])
def test_like_the_square_near_zero_and_concave_in_the_square(penalty: Penalty) -> None:
    small = numbers(1e-3, 1e-2)
    assert torch.allclose(effective_penalty(penalty, small) / small**2, torch.ones_like(small), atol=1e-3)
    u = torch.linspace(0.01, 50, 500, dtype=torch.float64)
    bends = effective_penalty(penalty, u.sqrt()).diff().diff()
    assert bends.max() <= 1e-10
    assert torch.all(optimal_stretch(penalty, SIZES).diff() >= -1e-12)


def test_gradient_is_exact_once_and_refused_twice() -> None:
    v = numbers(0.2, 1, 3).requires_grad_()
    for penalty in (SQUARE, BOTH, Power(1.5)):
        assert torch.autograd.gradcheck(lambda x, p=penalty: effective_penalty(p, x), (v,), atol=1e-7)
        assert torch.allclose(
            torch.autograd.grad(effective_penalty(penalty, v).sum(), v)[0], effective_slope(penalty, v.detach())
        )
    (slope,) = torch.autograd.grad(effective_penalty(SQUARE, v).sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(slope.sum(), v)


@pytest.mark.parametrize("exponents", [(0.5,), (1,), (2,), (4,), (2, 2), (1, 2), (2, 4)])
def test_single_precision_is_right_from_the_smallest_to_the_largest_sizes(exponents: tuple[float, ...]) -> None:
    penalty, v = circled_plus(*map(Power, exponents)), torch.logspace(-12, 12, 49, dtype=torch.float64)
    single, double = effective_penalty(penalty, v.float()), effective_penalty(penalty, v)
    assert single.dtype == torch.float32
    assert torch.allclose(single.double(), double, rtol=1e-6, atol=0)


def test_any_shape_and_single_precision() -> None:
    v = torch.rand(3, 4, 2)
    found = effective_penalty(BOTH, v)
    assert found.shape == v.shape
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), effective_penalty(BOTH, v.double()), atol=1e-5)


@pytest.mark.parametrize(
    ("penalty", "exponent"),
    [(SQUARE, 1), (ABSOLUTE, 2 / 3), (BOTH, 1 / 2), (circled_plus(SQUARE, SQUARE), 2 / 3), (Power(0.5), 0.4)],
)
def test_growth_exponents(penalty: Penalty, exponent: float) -> None:
    assert predicted_exponent(penalty) == pytest.approx(exponent)
    assert fitted_exponent(penalty) == pytest.approx(exponent, abs=2e-3)


def test_convexity_and_conjugate() -> None:
    assert is_convex(SQUARE)
    assert is_convex(Power(3))
    assert not is_convex(ABSOLUTE)
    assert not is_convex(circled_plus(SQUARE, SQUARE))
    c, v = numbers(0, 0.5, 1, 1.5), torch.linspace(0, 40, 400_001, dtype=torch.float64)
    wanted = (c[:, None] * v - effective_penalty(SQUARE, v)).amax(1)
    assert torch.allclose(conjugate(SQUARE, c), wanted, atol=1e-6)
    assert torch.isinf(conjugate(SQUARE, numbers(2.0))).all()
    with pytest.raises(InputError, match="not convex"):
        conjugate(BOTH, c)


def test_penalties_that_break_the_assumptions_are_refused() -> None:
    with pytest.raises(InputError, match="0 at z = 1"):
        Custom("shifted", lambda z: z)
    with pytest.raises(InputError, match="increasing"):
        Custom("hill", lambda z: torch.sin(z - 1).abs())
    with pytest.raises(InputError, match="not a number"):
        Custom("root", lambda z: (z - 1) * (5 - z).sqrt())
    with pytest.raises(InputError, match="Theorem 2"):
        circled_plus(Power(0.5), SQUARE)
    with pytest.raises(InputError, match="positive"):
        Power(0)
    with pytest.raises(InputError, match="at least 0"):
        optimal_stretch(SQUARE, numbers(-1))
    with pytest.raises(InputError, match="growth"):
        predicted_exponent(Custom("unknown", lambda z: (z - 1) ** 2))
