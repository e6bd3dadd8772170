"""What the studies of the emergence paper share: sizes, the first two steps, accuracy, ridge regression."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.data.patterns import Patterns, PatternSample
from unlazy.models.truncated import Phase, TruncatedNet, in_span, mirrored_start, paper_schedule, train
from unlazy.studies.study import Case, require_at_least_one

STRUCTURED_GAMMA = 0.25  # gamma of structured parity data; without structure, rates and starts are set for it


@dataclass(frozen=True)
class Size:
    """The sizes of data and network. In the paper's letters: d inputs, D patterns, k of them relevant, m pairs of neurons."""

    inputs: int = 500
    patterns: int = 100
    relevant: int = 5
    pairs: int = 300
    samples: int = 50_000
    tests: int = 5_000

    def __post_init__(self) -> None:
        require_at_least_one(
            self, *(field.name for field in fields(self) if isinstance(getattr(self, field.name), int))
        )


def patterns_of(case: Case, structured: bool = True) -> Patterns:
    """The data distribution of a case; its seed draws the dictionary of patterns and the relevant ones."""
    make = Patterns if structured else Patterns.unstructured
    return make(case.inputs, case.patterns, case.relevant, seed=case.seed)


def start_network(pairs: int, patterns: Patterns) -> TruncatedNet:
    """The paper's mirrored start: drawn in input space, then written in pattern coordinates, which changes no output."""
    k, deviation, seed = patterns.relevant, patterns.deviation, patterns.seed
    gamma = schedule_gamma(patterns)
    net = mirrored_start(patterns.inputs, pairs, relevant=k, gamma=gamma, deviation=deviation, seed=seed)
    return in_span(net, patterns.dictionary())


def schedule_gamma(patterns: Patterns) -> float:
    """The gamma for which start and rates are set: that of the data, and of structured parity where there is no structure."""
    return patterns.gamma if patterns.structured else STRUCTURED_GAMMA


def training_phases(pairs: int, patterns: Patterns, **options: Any) -> tuple[Phase, Phase, Phase]:
    """The paper's phases of training for these data; ``options`` as in ``paper_schedule``."""
    k, deviation = patterns.relevant, patterns.deviation
    return paper_schedule(pairs, relevant=k, gamma=schedule_gamma(patterns), deviation=deviation, **options)


def networks_of_first_steps(pairs: int, patterns: Patterns, sample: PatternSample) -> list[TruncatedNet]:
    """The networks after 0, 1 and 2 full-gradient steps on a sample."""
    nets: list[TruncatedNet] = []
    rows = (sample.phi, sample.y, sample.weights)
    phases = training_phases(pairs, patterns)[:2]
    train(start_network(pairs, patterns), phases, lambda _: rows, lambda _, net: nets.append(net))
    return nets


def star_direction(patterns: Patterns) -> Float[Tensor, " D"]:
    """The unit vector along the sum of the relevant patterns, in pattern coordinates."""
    return patterns.is_relevant().to(torch.float64) / patterns.relevant**0.5


def accuracy(output: torch.Tensor, y: torch.Tensor) -> float:
    """Share of rows whose output has the sign of the label; an output of zero counts half."""
    right = (torch.sign(output) * y).to(torch.float64)
    return float((right + 1).mean() / 2)


def solve_ridge(gram: Float[Tensor, "m m"], target: Float[Tensor, " m"], shift: float) -> Float[Tensor, " m"]:
    """(gram + shift I)^-1 target."""
    shifted = gram.clone()
    shifted.diagonal().add_(shift)
    return torch.cholesky_solve(target[:, None], torch.linalg.cholesky(shifted))[:, 0]
