"""What adaptation makes of a penalty (Figure 2; L4, L11).

Nothing is random and nothing is trained: a case is a penalty, and its number stands in the column ``seed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import torch

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.studies.study import Figure, Results, Settings, Study, Work
from unlazy.studies.table import Rows
from unlazy.theory.penalties import Penalty, Power, circled_plus, effective_penalty, fitted_exponent, predicted_exponent

# --- settings and cases --------------------------------------------------------------------------------------

POWERS = {
    "smoke": (1.0, 1.5, 2.0),
    "desk": (1.0, 1.5, 2.0, 3.0),
    "paper": (1.0, 1.25, 1.5, 2.0, 3.0, 4.0),
}
"""Exponents of the penalties on which L11 is checked, each alone and every pair."""
PUBLISHED = {
    (2.0,): (0.66950, 1.86862, 6.24653),
    (1.0,): (0.88988, 2.00000, 4.52605),
    (2.0, 1.0): (0.66900, 1.53938, 3.36743),
}
"""Values read from Figure 2: exponents of its three penalties, and the effective penalties at the sizes ``SIZES_READ``."""
SIZES_READ = (1.0, 2.0, 5.0)
FIGURE_2, GROWTH = "figure-2", "growth"  # questions: the values of the figure, or the exponent of growth
CURVE = np.linspace(0, 5, 101)
SMALL, LARGE = 1e-2, 1e3


@dataclass(frozen=True)
class PenaltyCase:
    """One case: the question, the exponents of the penalty's factors, and the number of the penalty."""

    question: str
    exponents: tuple[float, ...]
    number: int

    @property
    def powers(self) -> str:
        """The exponents as the table has them, such as ``2+1``."""
        return "+".join(f"{exponent:g}" for exponent in self.exponents)

    @cached_property
    def penalty(self) -> Penalty:
        """The penalty of one factor, or the joint one of several."""
        one = [Power(exponent) for exponent in self.exponents]
        return one[0] if len(one) == 1 else circled_plus(*one)


def growth_cases(powers: Sequence[float]) -> list[PenaltyCase]:
    """Every exponent alone, then every pair."""
    chosen = [exponents for count in (1, 2) for exponents in combinations_with_replacement(powers, count)]
    return [PenaltyCase(GROWTH, exponents, number) for number, exponents in enumerate(chosen)]


def cases(settings: Settings, seeds: Sequence[int]) -> list[PenaltyCase]:
    """The penalties of Figure 2, and those for L11 whose number is among the seeds."""
    shown = [PenaltyCase(FIGURE_2, exponents, number) for number, exponents in enumerate(PUBLISHED)]
    return shown + [case for case in growth_cases(settings.powers) if case.number in seeds]


# --- measuring -----------------------------------------------------------------------------------------------


def measure(case: PenaltyCase, work: Work) -> Rows:
    """The growth exponent and its prediction, or all that Figure 2 says of a penalty.

    The nine published values have the seeds 0 to 8.
    """
    rows, fitted = Rows(seed=case.number), fitted_exponent(case.penalty)
    if case.question == GROWTH:
        predicted = predicted_exponent(case.penalty)
        rows.add_all({"predicted": predicted, "fitted": fitted, "distance_from_prediction": abs(fitted - predicted)})
        return rows

    def effective(v: object) -> torch.Tensor:
        return effective_penalty(case.penalty, torch.as_tensor(v, dtype=torch.float64))

    rows.add("penalty", case.penalty(torch.as_tensor(1 + CURVE)), v=CURVE.round(2))
    rows.add("effective", effective(CURVE), v=CURVE.round(2))
    published = torch.tensor(PUBLISHED[case.exponents], dtype=torch.float64)
    for place, miss in enumerate((effective(SIZES_READ) - published).abs().tolist()):
        seed = case.number * len(SIZES_READ) + place
        rows.add("distance_from_figure", miss, v=SIZES_READ[place], seed=seed)
    rows.add("distance_from_square", abs(float(effective(SMALL)) / SMALL**2 - 1), v=SMALL)
    rows.add("over_square", float(effective(LARGE)) / LARGE**2, v=LARGE)
    rows.add("growth_exponent", fitted)
    return rows


# --- claims --------------------------------------------------------------------------------------------------

AGREES, LIKE_SQUARE, SLOWER, EXPONENT = 1e-5, 1e-3, 2.0, 5e-3


def figure_2_part(says: str, quantity: str, below: float, values: int = 1) -> Part:
    """A statement about the penalties of Figure 2. ``values``: how many numbers each of them has."""
    seeds = values * len(PUBLISHED)
    return Part(says, Quantity(quantity, question=FIGURE_2), below=below, seeds=seeds, identity=True)


CLAIMS = (
    Claim(
        "L4",
        says=(
            "The effective penalties that adaptation induces behave like v^2 near zero and grow more slowly than "
            "v^2 for large v."
        ),
        where="Fig. 2",
        paper="0.670 / 0.890 / 0.669 at v = 1, 6.247 / 4.526 / 3.367 at v = 5",
        figure="figure-2",
        parts=[
            figure_2_part("distance from v^2 near zero, relative", "distance_from_square", LIKE_SQUARE),
            figure_2_part("growth exponent for large v", "growth_exponent", SLOWER),
            figure_2_part("distance from the values of Figure 2", "distance_from_figure", AGREES, len(SIZES_READ)),
        ],
        shows=[
            Shown(
                f"effective penalty over v^2 at v = {LARGE:g}",
                Quantity("over_square", question=FIGURE_2, v=LARGE),
                seeds=len(PUBLISHED),
            )
        ],
    ),
    Claim(
        "L11",
        says=(
            "If the penalties on the factors of the feature transformation grow like powers r_1, r_2, ..., the "
            "effective penalty grows like v^q with 1/q = 1/2 + (1/r_1 + 1/r_2 + ...)."
        ),
        where="derived (for Props 3, 4 and Lemma 5)",
        paper="q = 1, 2/3 and 1/2 for the three penalties of Fig. 2",
        figure="exponents",
        parts=[
            Part(
                "distance of fitted from predicted exponent",
                Quantity("distance_from_prediction", question=GROWTH),
                below=EXPONENT,
                identity=True,
            )
        ],
        shows=[
            Shown(
                f"{case.penalty.name}: fitted, predicted {predicted_exponent(case.penalty):.4g}",
                Quantity("fitted", question=GROWTH, powers=case.powers),
            )
            for case in growth_cases(POWERS["paper"])
        ],
    ),
)


# --- figures -------------------------------------------------------------------------------------------------

LINES = (("square", "blue"), ("absolute", "orange"), ("square (+) absolute", "green"))


def penalties_figure(results: Results) -> plots.Figure:
    """Left: penalties on a stretch. Right: the effective penalty on an update; dots are the published values."""
    figure, ((left, right),) = plots.grid(1, 2, (3.4, 2.8))
    shown = [case for case in results.cases() if case.question == FIGURE_2]
    for case, (name, colour_name) in zip(shown, LINES, strict=True):
        where: dict[str, Any] = {"over": "v", "question": FIGURE_2, "powers": case.powers}
        v, penalty = results.table.series("penalty", **where)
        _, effective = results.table.series("effective", **where)
        colour = plots.COLOURS[colour_name]
        left.plot(1 + v, penalty, color=colour, label=name)
        right.plot(v, effective, color=colour, label=name)
        right.plot(SIZES_READ, PUBLISHED[case.exponents], "o", markersize=3.5, color=colour)
    right.plot(v, v**2, "--", color=plots.COLOURS["grey"], linewidth=1, label="v^2: no adaptation")
    left.set(title="penalty on a stretch z", xlabel="z", ylim=(0, 8))
    right.set(title="effective penalty on an update of size v", xlabel="v (dots: published figure)", ylim=(0, 8))
    right.legend()
    return figure


def exponents_figure(results: Results) -> plots.Figure:
    """Growth exponents fitted far out, beside the predicted ones; every dot is a penalty or a pair of them."""
    figure, ((axis,),) = plots.grid(1, 1, (3.4, 3.2))
    predicted, fitted = (results.table.select(name, question=GROWTH) for name in ("predicted", "fitted"))
    axis.axline((0.5, 0.5), slope=1, color=plots.COLOURS["grey"], linewidth=0.8)
    axis.plot(predicted, fitted, "o", markersize=4, color=plots.COLOURS["blue"])
    axis.set(title="growth of effective penalties", xlabel="predicted: 1 / (1/2 + sum of 1/r)", ylabel="fitted far out")
    return figure


STUDY = Study(
    name="penalties",
    paper="tangent",
    scales={scale: {"powers": powers} for scale, powers in POWERS.items()},
    seeds={scale: len(growth_cases(powers)) for scale, powers in POWERS.items()},
    columns=("question", "powers"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(
        Figure("figure-2", "Penalties and what adaptation makes of them (Figure 2)", penalties_figure),
        Figure("exponents", "How fast effective penalties grow", exponents_figure),
    ),
)
