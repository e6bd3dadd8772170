"""Statistical queries without structure: how many relevant sets are left when the bound of Theorem 3 is used up? (B13).

The learner asks for averages of bounded functions of (input, label). The oracle is an adversary: it answers as if labels were
coins wherever the tolerance allows it, and counts exactly which relevant sets its answers still allow. Three learners spend the
queries that Theorem 3 calls too few, at the tolerance it calls too large. The strongest, *sums*, asks for the majority vote of
as many parities as the tolerance lets count at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.data.patterns import Patterns
from unlazy.runtime import stream
from unlazy.studies.study import Case, Figure, Results, Study, Work
from unlazy.studies.table import Rows
from unlazy.theory.bounds import query_bound
from unlazy.theory.queries import AdversarialOracle, NoisyOracle, Query, find_relevant

SMOKE, FULL = (6, 8), (8, 10, 12, 14, 16)
SCALES = {
    "smoke": {"sizes": SMOKE, "search": 6, "samples": 2_000},
    "desk": {"sizes": FULL[:4], "search": 12, "samples": 4_000},
    "paper": {"sizes": FULL, "search": 12, "samples": 4_000},
}
"""``sizes``: numbers of patterns D, of which k = D/2 are relevant. ``search``: the D at which *sums* goes on until it has found
the set. ``samples``: those of the structured data of the paper's size."""
TOLERANCE = 0.15  # of the queries on structured data

# --- learners ----------------------------------------------------------------------------------------


def ask_patterns(oracle: AdversarialOracle, tolerance: float, seed: int) -> Iterator[Query]:
    """The label times one pattern after another, in random order."""
    size = oracle.people.indicators.shape[1]
    while True:
        for index in torch.randperm(size, generator=stream(seed, "one pattern")).tolist():
            yield partial(label_times_vote, sets=torch.nn.functional.one_hot(torch.tensor([index]), size) == 1)


def ask_parities(oracle: AdversarialOracle, tolerance: float, seed: int) -> Iterator[Query]:
    """The label times the parity of one set after another, of those still possible."""
    yield from ask_votes(oracle, 1, seed)


def ask_sums(oracle: AdversarialOracle, tolerance: float, seed: int) -> Iterator[Query]:
    """The label times the majority vote of as many parities as have a correlation with it above the tolerance.

    The vote of N independent coins has a correlation of about sqrt(2 / (pi N)) with each of them; 0.6 leaves room for chance.
    """
    yield from ask_votes(oracle, max(1, math.floor(0.6 * 2 / (math.pi * tolerance**2))), seed)


def ask_votes(oracle: AdversarialOracle, count: int, seed: int) -> Iterator[Query]:
    """The label times the majority vote of the parities of ``count`` random sets still possible (at most half of these)."""
    draws = stream(seed, "votes")
    while True:
        possible = oracle.candidates()
        voters = max(1, min(count, len(possible) // 2))  # a vote of all would tell none of them apart
        chosen = possible[torch.randperm(len(possible), generator=draws)[:voters]]
        yield partial(label_times_vote, sets=chosen)


def label_times_vote(
    present: Bool[Tensor, "n D"], y: Float64[Tensor, " n"], *, sets: Bool[Tensor, "N D"]
) -> Float64[Tensor, "n 1"]:
    """The label times the majority vote of the parities of these sets (1: odd); 0 at a tie."""
    odd = (present.double() @ sets.double().T) % 2
    return (y * torch.sign((2 * odd - 1).sum(1)))[:, None]


LEARNERS: dict[str, Callable[[AdversarialOracle, float, int], Iterator[Query]]] = {
    "patterns": ask_patterns,
    "parities": ask_parities,
    "sums": ask_sums,
}

# --- measuring ---------------------------------------------------------------------------------------


def measure(case: Case, work: Work) -> Rows:
    """The share of relevant sets left to each learner for every D, its least over D, and what it takes to find the set."""
    rows = Rows()
    least = dict.fromkeys(LEARNERS, 1.0)
    for size in case.sizes:
        for name in LEARNERS:
            share, asked = share_left(name, size, case.seed)
            rows.add_all({"share_left": share, "asked": asked}, learner=name, patterns=size)
            least[name] = min(least[name], share)
    for name, share in least.items():
        rows.add("least_share_left", share, learner=name)
    rows.add("queries_to_find", queries_to_find(case.search, case.seed), patterns=case.search)
    patterns = Patterns(seed=case.seed)
    oracle = NoisyOracle(patterns.draw(case.samples), TOLERANCE, seed=case.seed)
    found = find_relevant(oracle, patterns.patterns, patterns.relevant)
    rows.add("found_with_structure", float(torch.equal(found, patterns.relevant_set())))
    least_queries = query_bound(patterns.patterns, patterns.relevant).least
    rows.add("asked_over_bound", oracle.asked / least_queries)
    return rows


def share_left(learner: str, size: int, seed: int) -> tuple[float, int]:
    """The share of relevant sets that all answers allow after fewer queries than Theorem 3 asks for, and their number."""
    least = query_bound(size, size // 2).least
    tolerance = 1.000001 / least  # 1 / tolerance is just below what the theorem asks for
    oracle = AdversarialOracle(size, size // 2, tolerance)
    all_sets = oracle.consistent
    queries = LEARNERS[learner](oracle, tolerance, seed)
    while oracle.asked + 1 < least:
        oracle.ask(next(queries))
    return oracle.consistent / all_sets, oracle.asked


def queries_to_find(size: int, seed: int) -> int:
    """How many queries *sums* needs at that tolerance until one set is left."""
    tolerance = 1.000001 / query_bound(size, size // 2).least
    oracle = AdversarialOracle(size, size // 2, tolerance)
    queries = ask_sums(oracle, tolerance, seed)
    while oracle.consistent > 1:
        oracle.ask(next(queries))
    return oracle.asked


# --- claims ------------------------------------------------------------------------------------------

MOST = 0.5  # B13: more than half of the sets are left


def left(learner: str) -> Quantity:
    """The least share of sets left to a learner, over all numbers of patterns."""
    return Quantity("least_share_left", learner=learner)


def left_at(learner: str, size: int) -> Quantity:
    """The share of sets left to a learner at one number of patterns."""
    return Quantity("share_left", learner=learner, patterns=size)


CLAIMS = (
    Claim(
        "B13",
        says=(
            "Without structure in the inputs no algorithm that asks statistical queries learns the parity of k of D "
            "patterns with fewer than C(D,k)^(1/3) / 2 queries of a tolerance above the reciprocal of that number."
        ),
        where="Thm 3",
        paper="211 queries, or a tolerance below 1/211, at D = 100, k = 5",
        figure="left",
        parts=[
            Part(f"learner {name}: share of relevant sets left, least D", left(name), above=MOST, identity=True)
            for name in LEARNERS
        ],
        controls=[
            Part(
                "with structure (D = 100, k = 5): 100 queries of tolerance 0.15 find the set",
                Quantity("found_with_structure"),
                above=0.5,
                identity=True,
            )
        ],
        shows=[
            *(
                Shown(f"D = {size}, k = {size // 2}, learner {name}: share left", left_at(name, size))
                for size in FULL
                for name in LEARNERS
            ),
            Shown(
                "D = 12, k = 6: queries until the learner sums has found the set",
                Quantity("queries_to_find", patterns=12),
            ),
            Shown("with structure: queries asked over the bound without it", Quantity("asked_over_bound")),
        ],
    ),
)


# --- figure ------------------------------------------------------------------------------------------


def left_figure(results: Results) -> plots.Figure:
    """Share of relevant sets that the answers still allow once Theorem 3's queries are spent, against the number of patterns;
    the dashed line is what no learner can get below: one query rules out at most 1 / tolerance^2 sets."""
    figure, axes = plots.grid(1, 1, (4.6, 3.4))
    axis = axes[0, 0]
    for name, colour in zip(LEARNERS, ("grey", "orange", "blue"), strict=True):
        sizes, values = results.table.series("share_left", over="patterns", learner=name)
        plots.draw_band(axis, sizes, values, f"learner {name}", colour, marker="o", markersize=3)
    least = np.array([query_bound(int(size), int(size) // 2).least for size in sizes])
    sets = np.array([math.comb(int(size), int(size) // 2) for size in sizes])
    ruled_out = np.ceil(least - 1) * least**2 / sets
    axis.plot(sizes, 1 - ruled_out, "--", color=plots.COLOURS["red"], label="least possible (Parseval)")
    axis.set(xlabel="patterns D (k = D/2 relevant)", ylabel="share of relevant sets left", ylim=(0, 1.05))
    plots.legend_below(axis)
    return figure


STUDY = Study(
    name="queries",
    paper="emergence",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 10, "paper": 10},
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("left", "What is left after the queries of Theorem 3", left_figure),),
)
