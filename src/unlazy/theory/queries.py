"""Learning from statistical queries: an oracle tells averages of bounded functions of (input, label), up to a tolerance.

On structured data D queries, one per pattern, find the relevant set. On unstructured parity data every answer can be
"as if the label were a coin" and still be within the tolerance for nearly all relevant sets: one query h rules out a set A
only if the Fourier coefficient of (h(., +1) - h(., -1)) / 2 at A exceeds the tolerance, which at most 1/tau^2 sets do (Parseval).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from unlazy.data.patterns import Patterns, PatternSample
from unlazy.models.truncated import (
    Gradients,
    Phase,
    TruncatedNet,
    smoothed_neuron,
    smoothed_slope,
    train_with_gradients,
)
from unlazy.runtime import require, stream

Query = Callable[[Bool[Tensor, "n D"], Float64[Tensor, " n"]], Float64[Tensor, "..."]]
"""q functions of (indicators, labels) at once, ``[n, q]``, with values in [-1, 1]."""


class Oracle:
    """Answers averages over a distribution and counts how many it was asked for."""

    def __init__(self, tolerance: float) -> None:
        require(tolerance >= 0, f"a tolerance is at least 0, got {tolerance!r}.")
        self.tolerance, self.asked = tolerance, 0

    def ask(self, query: Query) -> Float64[Tensor, " q"]:
        """The averages of q functions, each within the tolerance."""
        answers = self._answer(query)
        self.asked += len(answers)
        return answers

    def _answer(self, query: Query) -> Float64[Tensor, " q"]:
        raise NotImplementedError


class HonestOracle(Oracle):
    """Averages over the rows it holds: the whole population (exact), or a sample of it."""

    def __init__(self, rows: PatternSample, tolerance: float = 0.0) -> None:
        super().__init__(tolerance)
        self.rows = rows

    def _answer(self, query: Query) -> Float64[Tensor, " q"]:
        return self.rows.weights @ _require_bounded_values(query(self.rows.indicators, self.rows.y))


class NoisyOracle(HonestOracle):
    """Honest averages plus an error drawn evenly from [-tolerance, tolerance]."""

    def __init__(self, rows: PatternSample, tolerance: float, seed: int = 0) -> None:
        super().__init__(rows, tolerance)
        self.generator = stream(seed, "noisy oracle")

    def _answer(self, query: Query) -> Float64[Tensor, " q"]:
        honest = super()._answer(query)
        errors = 2 * torch.rand(honest.shape, generator=self.generator, dtype=torch.float64) - 1
        return honest + self.tolerance * errors


class BatchOracle(Oracle):
    """Every call is answered from a fresh mini-batch: what stochastic gradient descent sees.

    ``tolerance`` holds for all of ``queries`` answers together with probability 0.95 (Hoeffding).
    """

    def __init__(self, patterns: Patterns, batch: int, queries: int) -> None:
        require(batch >= 1 and queries >= 1, f"a batch has rows and is asked something; got {batch} and {queries}.")
        super().__init__(math.sqrt(2 * math.log(2 * queries / 0.05) / batch))
        self.patterns, self.batch, self.calls = patterns, batch, 0

    def _answer(self, query: Query) -> Float64[Tensor, " q"]:
        rows = self.patterns.draw(self.batch, f"batch {self.calls}")
        self.calls += 1
        return rows.weights @ _require_bounded_values(query(rows.indicators, rows.y))


class AdversarialOracle(Oracle):
    """Unstructured parity data whose relevant set is not decided yet: says as little as the tolerance allows.

    It answers as if labels were fair coins, and crosses out every set of k patterns for which that is off by more than the
    tolerance. ``consistent`` counts the sets left, exactly. Only when nothing would be left does it settle on a set and tell
    the truth about it from then on; other sets stay possible as long as that truth is within the tolerance of theirs.
    """

    def __init__(self, patterns: int, relevant: int, tolerance: float) -> None:
        super().__init__(tolerance)
        require(tolerance > 0, "an adversary without tolerance has no room to lie; give a tolerance above 0.")
        self.people = Patterns.unstructured(patterns, patterns, relevant).population()
        bits = self.people.indicators.sum(1)
        self.possible: Bool[Tensor, " sets"] = bits == relevant  # a set of patterns is its own indicator vector
        self.settled: int | None = None

    @property
    def consistent(self) -> int:
        """How many relevant sets agree with every answer so far."""
        return int(self.possible.sum())

    def candidates(self) -> Bool[Tensor, "sets D"]:
        """Those sets as masks."""
        return self.people.indicators[self.possible]

    def _answer(self, query: Query) -> Float64[Tensor, " q"]:
        present = self.people.indicators
        plus = torch.ones(len(present), dtype=torch.float64)
        high, low = _require_bounded_values(query(present, plus)), _require_bounded_values(query(present, -plus))
        blind = (high + low).mean(0) / 2
        shift = -_walsh((high - low) / 2)  # the label is -(-1)^count
        return torch.stack([self._answer_one(blind[i], shift[:, i]) for i in range(len(blind))])

    def _answer_one(self, blind: Tensor, shift: Float64[Tensor, " sets"]) -> Tensor:
        if self.settled is None:
            left = self.possible & (shift.abs() <= self.tolerance)
            if bool(left.any()):
                self.possible = left
                return blind
            self.settled = int(torch.nonzero(self.possible)[0])
        truth = shift[self.settled]
        self.possible = self.possible & ((shift - truth).abs() <= self.tolerance)
        return blind + truth


def _walsh(values: Float64[Tensor, "n q"]) -> Float64[Tensor, "n q"]:
    """Mean over phi of values(phi) (-1)^(number of ones of phi inside A), for every set A, by the fast transform."""
    size = values.shape[0]
    result, span = values.clone(), 1
    while span < size:
        pairs = result.reshape(size // (2 * span), 2, span, -1)
        result = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(size, -1)
        span *= 2
    return result / size


def _require_bounded_values(values: Float64[Tensor, "..."]) -> Float64[Tensor, "n q"]:
    require(values.ndim == 2, f"a query returns one column a function, [n, q]; got shape {tuple(values.shape)}.")
    largest = float(values.abs().max())
    require(
        largest <= 1 + 1e-12, f"statistical queries have values in [-1, 1]; this one reaches {largest:.3g}: scale it."
    )
    return values


# --- clients -----------------------------------------------------------------------------------------


def find_relevant(oracle: Oracle, patterns: int, relevant: int) -> Int64[Tensor, " k"]:
    """One query per pattern, y (2 phi~_i - 1): the k largest answers. Right on structured data when tolerance < gamma."""
    require(1 <= relevant <= patterns, f"k={relevant} relevant patterns of D={patterns}: k lies in [1, D].")
    answers = [oracle.ask(_query_one_pattern(index)) for index in range(patterns)]
    return torch.cat(answers).topk(relevant).indices.sort().values


def _query_one_pattern(index: int) -> Query:
    return lambda present, y: (y * (2 * present[:, index].to(torch.float64) - 1))[:, None]


def descend(oracle: Oracle, net: TruncatedNet, schedule: tuple[Phase, ...], patterns: Patterns) -> TruncatedNet:
    """Gradient descent as a client: every component of every gradient is one query, scaled into [-1, 1].

    With a ``BatchOracle`` this is mini-batch SGD, or Adam on the outer weights where a phase says so. Each step asks
    units x (D + 2) queries.
    """
    return train_with_gradients(
        net, schedule, lambda _, net, noise: _gradients_from_oracle(oracle, net, noise, patterns)
    )


def _gradients_from_oracle(oracle: Oracle, net: TruncatedNet, noise: float, patterns: Patterns) -> Gradients:
    units, size = net.w.shape

    def query(present: Bool[Tensor, "n D"], y: Float64[Tensor, " n"]) -> Float64[Tensor, "n q"]:
        phi = patterns.normalise(present)  # entries at most 1 / sigma~ in size
        z = net.pre_activations(phi)
        neurons = smoothed_neuron(z, noise)
        pull = torch.where(y * net.read(neurons) < 1, -y, torch.zeros_like(y))
        slopes = smoothed_slope(z, noise) * pull[:, None]
        along = slopes[:, :, None] * phi[:, None, :] * patterns.deviation
        return torch.cat([along.flatten(1), slopes, neurons * pull[:, None]], 1)

    answers = oracle.ask(query)
    w, b, a = answers.split([units * size, units, units])
    w = w.reshape(units, size) / patterns.deviation
    return Gradients(net.a[:, None] * w, net.a * b, a, float("nan"))
