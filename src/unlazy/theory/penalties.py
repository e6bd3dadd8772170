"""Penalties on feature transformations, and the effective penalties on updates that they imply (adaptive tangent paper).

A transformation with singular values z costs sum omega(z), with omega(1) = 0 and omega increasing on [1, inf). Once the
transformation is optimised, an update of size v costs the effective penalty; two factors share a stretch by the operator (+)::

    effective(v)             = min over z >= 1 of   omega(z) + v^2 / z^2
    (omega_1 (+) omega_2)(v) = min over 1 <= z <= v of   omega_1(z) + omega_2(v / z)

In log coordinates (z = e^u) the operator is an infimal convolution, so both problems are one search over a *price*: every
factor stretches until its marginal cost z omega'(z) reaches the price, and at the optimum the price is 2 v^2 / z^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.runtime import InputError, require

BISECTIONS = 64  # brackets, all under 100 wide in logarithms, then have the width of a rounding error
NEWTON_STEPS = 16
LARGEST_LOG_STRETCH = 40.0  # larger stretches than e^40 change no effective penalty
WALL = 1e-13  # distance kept, in logarithms, from where a penalty becomes infinite: rounding must not lead beyond
SMALLEST = 1e-100  # stands for 0 where a logarithm is taken
GRID = 4001
FAR = (1e11, 1e13)  # sizes between which growth exponents are measured
Values = Float[Tensor, "*v"]


@runtime_checkable
class Penalty(Protocol):
    """omega on stretches z >= 1, with the properties that the search needs."""

    @property
    def name(self) -> str:
        """A short formula, for error messages and legends."""
        ...

    @property
    def convex_in_log(self) -> bool:
        """Whether u -> omega(e^u) is convex on u >= 0, which Theorem 2 assumes."""
        ...

    @property
    def growth(self) -> float | None:
        """r, where omega grows like z^r; ``None`` if unknown."""
        ...

    def __call__(self, z: Values) -> Values: ...

    def largest_stretch(self, price: Values) -> Values:
        """The largest stretch whose marginal cost z omega'(z) is at most the price."""
        ...


@dataclass(frozen=True)
class Power:
    """omega(z) = (z - 1)^exponent: 2 and 1 are the paper's omega_1 and omega_2.

    >>> float(Power(2)(torch.tensor(3.0)))
    4.0
    """

    exponent: float = 2.0

    def __post_init__(self) -> None:
        require(0 < self.exponent < float("inf"), f"the exponent must be positive, got {self.exponent!r}.")

    @property
    def name(self) -> str:
        """``|z - 1|^exponent``."""
        return f"|z - 1|^{self.exponent:g}"

    @property
    def convex_in_log(self) -> bool:
        """Whether the exponent is at least 1."""
        return self.exponent >= 1

    @property
    def growth(self) -> float | None:
        """The exponent."""
        return float(self.exponent)

    def __call__(self, z: Values) -> Values:
        return (z - 1).clamp(min=0) ** self.exponent

    def largest_stretch(self, price: Values) -> Values:
        """z with r z (z - 1)^(r - 1) = price: closed forms for r = 1 and 2, Newton steps for other r > 1."""
        if self.exponent == 1:
            return price.clamp(min=1)
        if self.exponent == 2:
            return 0.5 + 0.5 * (1 + 2 * price).sqrt()
        if self.exponent > 1:
            return 1 + self._log_excess(price.clamp(min=SMALLEST).log()).exp()
        raise InputError(f"penalty {self.name} is not convex in log z: its marginal cost has no inverse.")

    def _log_excess(self, log_price: Tensor) -> Tensor:
        """t = log(z - 1), the root of log r + log(1 + e^t) + (r - 1) t = log price, by Newton steps (convex in t)."""
        t = (log_price - math.log(self.exponent)) / (self.exponent - 1)
        for _ in range(NEWTON_STEPS):
            excess = (
                math.log(self.exponent) + torch.logaddexp(t, torch.zeros_like(t)) + (self.exponent - 1) * t - log_price
            )
            t = t - excess / (torch.sigmoid(t) + self.exponent - 1)
        return t


@dataclass(frozen=True)
class Custom:
    """Any penalty, given as an elementwise torch function of z >= 1; it is checked on a grid of stretches.

    Its derivative comes from autograd. It may be infinite from some stretch on, by overflow or to forbid larger ones.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    growth: float | None = None

    def __post_init__(self) -> None:
        u = torch.linspace(0, LARGEST_LOG_STRETCH / 4, GRID, dtype=torch.float64)
        values = self.function(u.exp())
        require(values.shape == u.shape, f"penalty {self.name}: one value per stretch is expected, got {values.shape}.")
        require(
            not bool(values.isnan().any()), f"penalty {self.name} is not a number at some stretches from 1 to e^10."
        )
        require(abs(float(values[0])) <= 1e-12, f"penalty {self.name} must be 0 at z = 1, it is {float(values[0]):g}.")
        rises = bool((values[1:] * (1 + 1e-12) >= values[:-1]).all()) and float(values[1:].min()) > 0
        require(rises, f"penalty {self.name} must be positive and increasing above z = 1, its only minimum.")

    @cached_property
    def convex_in_log(self) -> bool:
        """Whether no second difference of omega(e^u) on the grid is negative."""
        u = torch.linspace(0, LARGEST_LOG_STRETCH / 4, GRID, dtype=torch.float64)
        values = self.function(u.exp())
        values = values[values.isfinite()]  # omega increases, so only the last values can be infinite
        bends = values[2:] - 2 * values[1:-1] + values[:-2]
        return bool((bends >= -1e-12 * values[2:].abs().clamp(min=1)).all())

    def __call__(self, z: Values) -> Values:
        return self.function(z)

    def largest_stretch(self, price: Values) -> Values:
        """By bisection over log z; stays below stretches that cost infinity."""
        low, high = torch.zeros_like(price), torch.full_like(price, LARGEST_LOG_STRETCH)
        low, high = _bisect(lambda u: self._marginal(u.exp()) > price, low, high)
        walled = self.function(high.exp()).isinf()
        return torch.where(walled, (low - WALL).clamp(min=0), low).exp()

    def _marginal(self, z: Tensor) -> Tensor:
        """z omega'(z), infinite where omega is."""
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            values = self.function(z)
            (slope,) = torch.autograd.grad(values.sum(), z)
        return torch.where(values.isinf(), torch.inf, z.detach() * slope)


@dataclass(frozen=True)
class Product:
    """omega_1 (+) omega_2 (+) ...: the least cost of a stretch that several factors share, one with each penalty."""

    factors: tuple[Penalty, ...]

    def __post_init__(self) -> None:
        require(len(self.factors) >= 1, "a product needs at least one factor.")
        for factor in self.factors:
            require(
                factor.convex_in_log,
                f"penalty {factor.name}: u -> omega(e^u) is not convex, so factors do not share a stretch by price; "
                "Theorem 2 does not cover it.",
            )

    @property
    def name(self) -> str:
        """The names of the factors, joined by (+)."""
        return " (+) ".join(factor.name for factor in self.factors)

    @property
    def convex_in_log(self) -> bool:
        """True: an infimal convolution of convex functions is convex."""
        return True

    @property
    def growth(self) -> float | None:
        """r with 1/r = sum of the factors' 1/r."""
        rates = [factor.growth for factor in self.factors]
        known = [1 / rate for rate in rates if rate is not None]
        return 1 / sum(known) if len(known) == len(rates) else None

    def largest_stretch(self, price: Values) -> Values:
        """The product of the factors' own largest stretches at that price."""
        return torch.stack([factor.largest_stretch(price) for factor in self.factors]).prod(0)

    def split_stretch(self, z: Values) -> Float[Tensor, "k *v"]:
        """The stretches of the factors, with product z, that cost least."""
        log_z = z.clamp(min=1).log()
        low = torch.full_like(log_z, -2 * LARGEST_LOG_STRETCH)
        high = torch.full_like(log_z, 2 * LARGEST_LOG_STRETCH)
        low, high = _bisect(lambda price: self.largest_stretch(price.exp()).log() > log_z, low, high)
        return _share_remainder(self.log_stretches(low), self.log_stretches(high), log_z).exp()

    def __call__(self, z: Values) -> Values:
        shares = self.split_stretch(z)
        return torch.stack([factor(share) for factor, share in zip(self.factors, shares, strict=True)]).sum(0)

    def log_stretches(self, log_price: Values) -> Float[Tensor, "k *v"]:
        """log z of every factor at a log price."""
        return torch.stack([factor.largest_stretch(log_price.exp()).log() for factor in self.factors])


def circled_plus(*penalties: Penalty) -> Penalty:
    """omega_1 (+) omega_2 (+) ...: the penalty of a product of transformations; one penalty alone is returned unchanged."""
    return penalties[0] if len(penalties) == 1 else Product(tuple(penalties))


def optimal_stretch(penalty: Penalty, v: Values) -> Values:
    """s(v) = argmin over z >= 1 of omega(z) + v^2 / z^2 (the smallest where several are optimal), computed in float64."""
    _check_sizes(v)
    if v.dtype != torch.float64:  # sixth powers of v overflow float32 from v = 10^6 on
        return optimal_stretch(penalty, v.double()).to(v)
    closed = _closed_form_stretch(penalty, v)
    if closed is not None:
        return closed
    return search_stretch(penalty, v)


def search_stretch(penalty: Penalty, v: Values) -> Values:
    """``optimal_stretch`` without closed forms."""
    if not penalty.convex_in_log:
        return _grid_search(penalty, v)
    low, high, log_z = _bracket_price(penalty, v)
    ends = [penalty.largest_stretch(price.exp()).log() for price in (low, high)]
    return torch.minimum(torch.maximum(log_z, ends[0]), ends[1]).clamp(min=0).exp()


def factor_stretches(factors: Sequence[Penalty], v: Values) -> Float[Tensor, "k *v"]:
    """The minimisers (z_1, ..., z_k) of sum omega_i(z_i) + v^2 / (z_1 ... z_k)^2."""
    if len(factors) == 1:
        return optimal_stretch(factors[0], v)[None]
    _check_sizes(v)
    if v.dtype != torch.float64:
        return factor_stretches(factors, v.double()).to(v)
    product = Product(tuple(factors))
    low, high, log_z = _bracket_price(product, v)
    return _share_remainder(product.log_stretches(low), product.log_stretches(high), log_z).exp()


def _bracket_price(penalty: Penalty, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Neighbouring log prices between which the marginal gain 2 v^2 / z^2 lies, and the log z that belongs to it."""
    target = (2 * v.clamp(min=SMALLEST) ** 2).log()  # at the optimum log price + 2 log z equals this
    farthest = penalty.largest_stretch(target.exp()).log().clamp(max=LARGEST_LOG_STRETCH)
    low, high = _bisect(
        lambda p: p + 2 * penalty.largest_stretch(p.exp()).log() > target, target - 2 * farthest - 1e-9, target
    )
    return low, high, (target - (low + high) / 2) / 2


def effective_penalty(penalty: Penalty, v: Values) -> Values:
    """omega~(v) = min over z >= 1 of omega(z) + v^2 / z^2, for sizes v >= 0 of any shape.

    Differentiable once, with the exact derivative 2 v / s(v)^2. For several factors give ``circled_plus(...)``.

    >>> round(float(effective_penalty(Power(2), torch.tensor(1.0, dtype=torch.float64))), 5)
    0.6695
    """
    return _EffectivePenalty.apply(v, penalty)


def effective_slope(penalty: Penalty, v: Values) -> Values:
    """d omega~ / dv = 2 v / s(v)^2."""
    return 2 * v / optimal_stretch(penalty, v) ** 2


def is_convex(penalty: Penalty) -> bool:
    """Whether the effective penalty is convex: its slope never falls from 0 to 10^6 (checked on a fine grid)."""
    v = torch.logspace(-3, 6, GRID, dtype=torch.float64)
    return bool((effective_slope(penalty, v).diff() >= -1e-9).all())


def conjugate(penalty: Penalty, c: Values) -> Values:
    """max over v >= 0 of c v - omega~(v), for a convex effective penalty; infinite where no slope is as large as c."""
    require(is_convex(penalty), f"the effective penalty of {penalty.name} is not convex: no duality gap belongs to it.")
    low, high = torch.full_like(c, -40.0), torch.full_like(c, 30.0)
    beyond = c >= effective_slope(penalty, high.exp())
    low, high = _bisect(lambda log_v: effective_slope(penalty, log_v.exp()) > c, low, high)
    v = ((low + high) / 2).exp()
    return torch.where(beyond, torch.inf, (c * v - effective_penalty(penalty, v)).clamp(min=0))


def predicted_exponent(penalty: Penalty) -> float:
    """q with 1/q = 1/2 + 1/r: the effective penalty of omega ~ z^r grows like v^q."""
    if penalty.growth is None:
        raise InputError(f"the growth of penalty {penalty.name} is unknown; give Custom(..., growth=r).")
    return 1 / (0.5 + 1 / penalty.growth)


def fitted_exponent(penalty: Penalty) -> float:
    """The slope of log omega~ against log v at large v."""
    ends = effective_penalty(penalty, torch.tensor(FAR, dtype=torch.float64)).log()
    return float((ends[1] - ends[0]) / torch.tensor(FAR[1] / FAR[0], dtype=torch.float64).log())


class _EffectivePenalty(torch.autograd.Function):
    """The minimum over z, with its derivative by the envelope theorem; a second derivative raises an error."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, penalty: Penalty) -> Tensor:
        z = optimal_stretch(penalty, v.double())
        ctx.save_for_backward(v, z)
        return (penalty(z) + (v / z) ** 2).to(v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None]:
        v, z = ctx.saved_tensors
        return (weights * 2 * v / z**2).to(v), None


# --- closed forms ----------------------------------------------------------------------------------


def _closed_form_stretch(penalty: Penalty, v: Tensor) -> Tensor | None:
    """s(v) for k factors |z - 1| (each has z^(2k+1) = 2 v^2) and for one square (z^3 (z - 1) = v^2); ``None`` otherwise."""
    if penalty == Power(2):
        return _quartic_root(v)
    factors = penalty.factors if isinstance(penalty, Product) else (penalty,)
    if all(factor == Power(1) for factor in factors):
        k = len(factors)
        return (2 * v**2).clamp(min=1) ** (k / (2 * k + 1))
    return None


def _quartic_root(v: Tensor) -> Tensor:
    """The root z >= 1 of z^4 - z^3 = v^2, by Ferrari's formula, written without differences of nearly equal numbers."""
    square = v.clamp(min=1e-30) ** 2
    half, third = square / 2, 4 * square / 3
    t = (half + (half**2 + third**3).sqrt()) ** (1 / 3)
    y = square / (t**2 + third + (third / t) ** 2)  # minus the real root of the resolvent cubic
    root = (y**3 / (4 * square)).sqrt()
    return (0.25 + root / 2 + (0.75 - root**2 + 0.25 / root).sqrt() / 2).clamp(min=1)


# --- searching -------------------------------------------------------------------------------------


def _check_sizes(v: Tensor) -> None:
    """Raise ``InputError`` unless all sizes are finite and at least 0."""
    good = bool((torch.isfinite(v) & (v >= 0)).all())
    require(good, "sizes must be finite and at least 0 (singular values, norms).")


def _bisect(above: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Bisect brackets to rounding; ``above`` is false at low and true at high."""
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        up = above(middle)
        low, high = torch.where(up, low, middle), torch.where(up, middle, high)
    return low, high


def _share_remainder(first: Tensor, last: Tensor, total: Tensor) -> Tensor:
    """Points between ``first`` and ``last`` whose sum over factors is ``total``.

    Where a marginal cost is flat, a factor's stretch jumps with the price; each factor then takes a proportional part of the
    missing sum.
    """
    room = (last - first).sum(0)
    missing = (total - first.sum(0)) / torch.where(room > 0, room, 1)
    return (first + missing.clamp(0, 1) * (last - first)).clamp(min=0)


def _grid_search(penalty: Penalty, v: Tensor) -> Tensor:
    """s(v) of a penalty without convexity: the best stretch of a grid, refined around it."""
    u = torch.linspace(0, LARGEST_LOG_STRETCH, GRID, dtype=v.dtype, device=v.device)

    def cost(log_z: Tensor) -> Tensor:
        return penalty(log_z.exp()) + v[..., None] ** 2 * (-2 * log_z).exp()

    best = u[cost(u.expand(*v.shape, -1)).argmin(-1)][..., None]
    step = u[1]
    for _ in range(60):
        near = (best + step * torch.linspace(-1, 1, 5, dtype=v.dtype, device=v.device)).clamp(min=0)
        best = near.gather(-1, cost(near).argmin(-1, keepdim=True))
        step = step / 2
    return best[..., 0].exp()
