"""Pattern data of the emergence paper: an input is a sum of hidden patterns; the count of relevant ones decides the label.

    x~ = M phi~,    y = +1 if sum over A of phi~ is in P, else -1,    x = (x~ - E x~) / sigma~

M has orthonormal columns (the D patterns), phi~ in {0, 1}^D says which are present, A holds the k relevant ones, and
sigma~^2 = sum_i Var(x~_i) is the *total* variance, one number (25 for 100 fair patterns).

*Structured* data: with probability ``mixture`` the k relevant indicators are independent fair coins, else all equal (all ones or
all zeros, a coin decides); the others are independent with Pr[phi~ = 1] = ``background``. The paper writes p_o for both
probabilities; they are two things. *Unstructured* data: all D indicators are independent fair coins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from unlazy.data.dataset import Dataset
from unlazy.runtime import require, stream

ENUMERABLE = 16
"""Up to so many patterns the 2^D hidden vectors are listed one by one."""


def parity_rule(relevant: int) -> tuple[int, ...]:
    """Label +1 when an odd number of relevant patterns is present."""
    return tuple(range(1, relevant + 1, 2))


def majority_rule(relevant: int) -> tuple[int, ...]:
    """Label +1 when more than half of the relevant patterns are present."""
    return tuple(range(relevant // 2 + 1, relevant + 1))


def interval_rule(low: int, high: int) -> tuple[int, ...]:
    """Label +1 when the number of relevant patterns present is from ``low`` to ``high``, both included."""
    require(low <= high, f"an interval goes from low to high, got {low} to {high}.")
    return tuple(range(low, high + 1))


@dataclass(frozen=True)
class PatternSample:
    """Hidden indicators with their labels, normalised coordinates and probabilities (equal ones for a drawn sample).

    ``phi [n, D]`` are the coordinates of x in the dictionary: x = M phi, so every inner product is that of x.
    """

    indicators: Bool[Tensor, "n D"]
    y: Float64[Tensor, " n"]
    phi: Float64[Tensor, "n D"]
    weights: Float64[Tensor, " n"]
    uniform: Bool[Tensor, " n"]  # the relevant patterns were fair coins; all False where that is not known

    def __len__(self) -> int:
        return int(self.y.shape[0])

    def take(self, rows: Tensor | slice) -> PatternSample:
        """Some of the rows, weighted so that they sum to one again."""
        weights = self.weights[rows]
        parts = (self.indicators[rows], self.y[rows], self.phi[rows], weights / weights.sum(), self.uniform[rows])
        return PatternSample(*parts)


@dataclass(frozen=True)
class Patterns:
    """A distribution of pattern data. ``rule=None`` is parity; ``seed`` draws the dictionary and the relevant set.

    >>> Patterns().gamma, Patterns().deviation
    (0.25, 5.0)
    """

    inputs: int = 500
    patterns: int = 100
    relevant: int = 5
    rule: tuple[int, ...] | None = None
    structured: bool = True
    mixture: float = 0.5
    background: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        d, size, k = self.inputs, self.patterns, self.relevant
        require(k >= 1, f"at least one pattern must be relevant, got k={k}.")
        require(
            k <= size, f"k={k} relevant patterns of D={size}: there cannot be more relevant patterns than patterns."
        )
        require(d >= size, f"d={d} < D={size}: a dictionary of D orthonormal patterns needs at least D inputs.")
        outside = [count for count in self.counts if not 0 <= count <= k]
        require(not outside, f"P holds {outside}, but between 0 and k={k} relevant patterns are present.")
        for name in ("mixture", "background"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name} is a probability, got {value!r}.")
        if not self.structured:
            coins = self.mixture == 1 and self.background == 0.5
            require(
                coins, "unstructured data are fair coins: mixture=1, background=0.5 (or call Patterns.unstructured)."
            )
            return
        even_parity = k % 2 == 0 and self.counts == parity_rule(k)
        require(
            not even_parity,
            f"k={k} is even: all ones and all zeros would have the same parity, so no pattern would tell the label (gamma = 0). "
            "Take an odd k, or unstructured data.",
        )
        require(
            0 < self.background <= 0.5, f"A2 asks for a background probability in (0, 1/2], got {self.background!r}."
        )
        share = self.positive_share
        require(abs(share - 0.5) < 1e-12, f"A0 asks for Pr[y=+1] = 1/2; this rule and mixture give {share:.4g}.")
        require(
            self.gamma > 1e-12,
            f"A1 asks for gamma > 0; this rule and mixture give {self.gamma:.4g}: patterns tell nothing.",
        )

    @classmethod
    def unstructured(cls, inputs: int = 500, patterns: int = 100, relevant: int = 5, **rest: Any) -> Patterns:
        """All D patterns independent fair coins (A1')."""
        return cls(inputs, patterns, relevant, structured=False, mixture=1.0, background=0.5, **rest)

    # --- exact properties of the distribution ---------------------------------------------------------------------

    @property
    def counts(self) -> tuple[int, ...]:
        """The rule set P, sorted."""
        return tuple(sorted(set(parity_rule(self.relevant) if self.rule is None else self.rule)))

    def count_law(self) -> list[float]:
        """Pr[c relevant patterns are present] for c = 0 .. k."""
        k = self.relevant
        law = [self.mixture * math.comb(k, count) / 2**k for count in range(k + 1)]
        law[0] += (1 - self.mixture) / 2
        law[k] += (1 - self.mixture) / 2
        return law

    @property
    def positive_share(self) -> float:
        """Pr[y = +1]."""
        law = self.count_law()
        return math.fsum(law[count] for count in self.counts)

    @property
    def gamma(self) -> float:
        """E[y phi~_i] - E[y] E[phi~_i], the same for every relevant pattern."""
        inside, law, k = set(self.counts), self.count_law(), self.relevant
        joint = math.fsum((1 if count in inside else -1) * share * count / k for count, share in enumerate(law))
        return joint - (2 * self.positive_share - 1) / 2

    @property
    def deviation(self) -> float:
        """sigma~: the square root of the total variance."""
        rest = self.patterns - self.relevant
        return math.sqrt(self.relevant / 4 + rest * self.background * (1 - self.background))

    @property
    def background_variance(self) -> float:
        """sigma_phi^2: variance of one normalised pattern outside A."""
        return self.background * (1 - self.background) / self.deviation**2

    def relevant_set(self) -> Int64[Tensor, " k"]:
        """A: which patterns count, sorted."""
        return torch.randperm(self.patterns, generator=stream(self.seed, "relevant"))[: self.relevant].sort().values

    def is_relevant(self) -> Bool[Tensor, " D"]:
        """Which of the D patterns are relevant (in A), as a mask."""
        mask = torch.zeros(self.patterns, dtype=torch.bool)
        mask[self.relevant_set()] = True
        return mask

    def means(self) -> Float64[Tensor, " D"]:
        """E phi~: the probability of every pattern."""
        fair = torch.full((self.patterns,), 0.5, dtype=torch.float64)
        return torch.where(self.is_relevant(), fair, torch.full_like(fair, self.background))

    def dictionary(self) -> Float64[Tensor, "d D"]:
        """M: an orthonormal basis of a random subspace (QR of a Gaussian matrix)."""
        generator = stream(self.seed, "dictionary")
        gaussian = torch.randn(self.inputs, self.patterns, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(gaussian).Q

    # --- samples -----------------------------------------------------------------------------------

    def draw(self, n: int, part: str = "train") -> PatternSample:
        """``n`` independent inputs; other names of ``part`` are other samples of the same distribution."""
        require(n >= 1, f"a sample has at least one input, got n={n}.")
        generator = stream(self.seed, "patterns", part)
        present = torch.rand(n, self.patterns, generator=generator, dtype=torch.float64) < self.means()
        uniform = torch.rand(n, generator=generator, dtype=torch.float64) < self.mixture
        coin = torch.rand(n, 1, generator=generator, dtype=torch.float64) < 0.5
        relevant = self.relevant_set()
        present[:, relevant] = torch.where(uniform[:, None], present[:, relevant], coin)
        weights = torch.full((n,), 1 / n, dtype=torch.float64)
        return PatternSample(present, self.label(present), self.normalise(present), weights, uniform)

    def population(self) -> PatternSample:
        """Every hidden vector with its probability: expectations without sampling, for at most 16 patterns."""
        size = self.patterns
        require(size <= ENUMERABLE, f"2^{size} hidden vectors are too many to list; at most D={ENUMERABLE} patterns.")
        present = (torch.arange(2**size)[:, None] >> torch.arange(size)) & 1 == 1
        relevant = self.is_relevant()
        rates = self.means()
        background = torch.where(present, rates, 1 - rates)
        count = present[:, relevant].sum(1)
        ends = ((count == 0) | (count == self.relevant)).to(torch.float64)
        inside = self.mixture / 2**self.relevant + (1 - self.mixture) / 2 * ends
        weights = inside * background[:, ~relevant].prod(1)
        unknown = torch.zeros(2**size, dtype=torch.bool)
        return PatternSample(present, self.label(present), self.normalise(present), weights, unknown)

    def label(self, indicators: Bool[Tensor, "n D"]) -> Float64[Tensor, " n"]:
        """+1 where the count of relevant patterns is in P, else -1."""
        table = -torch.ones(self.relevant + 1, dtype=torch.float64)
        table[list(self.counts)] = 1
        return table[indicators[:, self.relevant_set()].sum(1)]

    def normalise(self, indicators: Bool[Tensor, "n D"]) -> Float64[Tensor, "n D"]:
        """phi = (phi~ - E phi~) / sigma~, with the distribution's own moments."""
        return (indicators.to(torch.float64) - self.means()) / self.deviation

    def dataset(self, n: int, part: str = "train", dtype: torch.dtype = torch.float64) -> Dataset:
        """Inputs x = M phi ``[n, d]`` with labels -1 and +1; groups ``uniform`` (fair coins) and ``equal``."""
        sample = self.draw(n, part)
        x = sample.phi @ self.dictionary().T
        groups = {"uniform": sample.uniform, "equal": ~sample.uniform}
        options = asdict(self) | {"n": n, "part": part}
        return Dataset("patterns", x.to(dtype), sample.y[:, None].to(dtype), groups, options)


# --- checking the assumptions ------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A number measured on a sample, with a normal 95 % interval."""

    value: float
    low: float
    high: float

    def contains(self, expected: float) -> bool:
        """Whether a number lies in the interval."""
        return self.low <= expected <= self.high


def check_assumptions(
    indicators: Bool[Tensor, "n D"], y: Float64[Tensor, " labels"], relevant: Int64[Tensor, " k"] | Bool[Tensor, " D"]
) -> Mapping[str, Any]:
    """A0, A1 and A2 measured on a sample, for the given set A: numbers of patterns, or a mask.

    ``positive``: Pr[y = +1] (A0). ``gamma``: one estimate per relevant pattern (A1); ``gamma_mean`` of them all.
    ``background``: the rate of the other patterns together. As largest standardised deviations (z): ``gamma_spread`` of one
    gamma from their mean, ``worst_rate`` of one background rate from the common one, ``worst_correlation`` of a background
    pattern with any other pattern from zero, ``worst_label`` of one with the label from zero. Chance alone
    stays under ``limit`` with probability 0.95 for that many comparisons (Bonferroni). Verdicts: ``a0``, ``a1``, ``a2``.
    """
    n, size = indicators.shape
    require(n >= 30, f"intervals need at least 30 samples, got {n}.")
    require(len(y) == n, f"{n} rows of indicators but {len(y)} labels.")
    require(bool((y.abs() == 1).all()), "labels are -1 and +1; gamma of other numbers would be another gamma.")
    if relevant.dtype == torch.bool:
        require(len(relevant) == size, f"a mask of A has one entry for each of {size} patterns, got {len(relevant)}.")
        relevant = relevant.nonzero()[:, 0]
    require(len(set(relevant.tolist())) == len(relevant), f"A holds every pattern once, got {relevant.tolist()}.")
    known = len(relevant) >= 1 and int(relevant.min()) >= 0 and int(relevant.max()) < size
    require(known, f"A holds numbers of patterns from 0 to {size - 1}, at least one; got {relevant.tolist()}.")
    inside = torch.zeros(size, dtype=torch.bool)
    inside[relevant] = True
    values = indicators.to(torch.float64)
    centred_y = y - y.mean()
    products = centred_y[:, None] * (values - values.mean(0))
    gammas = [_mean_estimate(products[:, index]) for index in relevant.tolist()]
    positive = _mean_estimate((y > 0).to(torch.float64))
    gamma_mean = _mean_estimate(products[:, inside].mean(1))
    gamma_spread = _largest_z(products[:, inside] - products[:, inside].mean(1, keepdim=True))
    outside = values[:, ~inside]
    rest = outside.shape[1]
    scales = {"gamma_spread": len(gammas)}
    worst: dict[str, float] = {"gamma_spread": gamma_spread}
    if rest:
        standard = _standardise(values)
        correlation = (standard.T @ standard / n).abs() * math.sqrt(n)
        correlation.fill_diagonal_(0)
        worst["worst_rate"] = _largest_z(outside - outside.mean(1, keepdim=True))
        worst["worst_correlation"] = float(correlation[~inside].max())
        worst["worst_label"] = _largest_z(products[:, ~inside])
        scales |= {"worst_rate": rest, "worst_correlation": rest * size, "worst_label": rest}
    limits = {name: _chance_limit(count) for name, count in scales.items()}
    within = {name: worst[name] <= limits[name] for name in worst}
    background = _mean_estimate(outside.mean(1)) if rest else None
    a2 = all(within[name] for name in worst if name != "gamma_spread") and (background is None or background.low <= 0.5)
    return {
        "positive": positive,
        "gamma": gammas,
        "gamma_mean": gamma_mean,
        "background": background,
        **worst,
        "limit": limits,
        "a0": positive.contains(0.5),
        "a1": all(gamma.low > 0 for gamma in gammas) and within["gamma_spread"],
        "a2": a2,
    }


def _mean_estimate(values: Float64[Tensor, " n"]) -> Estimate:
    """The mean with its normal 95 % interval."""
    mean, half = float(values.mean()), 1.959964 * float(values.std()) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def _standardise(values: Float64[Tensor, "n D"]) -> Float64[Tensor, "n D"]:
    return (values - values.mean(0)) / values.std(0).clamp_min(1e-300)


def _largest_z(values: Float64[Tensor, "n D"]) -> float:
    """How far the mean of a column is from zero, in its own standard errors: the largest over columns."""
    errors = values.std(0) / math.sqrt(len(values))
    return float((values.mean(0).abs() / errors.clamp_min(1e-300)).max())


def _chance_limit(comparisons: int) -> float:
    """The size under which that many normal z stay together with probability 0.95 (Bonferroni)."""
    normal = torch.distributions.Normal(0.0, 1.0)
    return float(normal.icdf(torch.tensor(1 - 0.025 / max(comparisons, 1), dtype=torch.float64)))
