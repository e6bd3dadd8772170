"""Does noise to signal fall from the first gradient to the second, and up to which first rate? (Lemma 6; B4).

Lemma 6 leaves the first rate open ("small"). At the theoretical rate the weights after step 1 are so short that what the lemma
bounds is zero to rounding in the population, and sampling error in a sample (study `lemmas`). So the first rate is scanned, on a
whole population of fewer patterns, where nothing is sampled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.claims.functions import ratio
from unlazy.data.patterns import Patterns
from unlazy.models.truncated import gradients, step
from unlazy.studies.emergence.common import start_network, training_phases
from unlazy.studies.study import Case, Figure, Results, Study, Work
from unlazy.studies.table import Rows
from unlazy.theory.emergence import decompose

FIRST_RATES = (1e4, 1e6, 1e8, 1e9, 1e10)  # in units of the theoretical first rate
SCALES = {
    "smoke": {"patterns": 8, "relevant": 3, "pairs": 20},
    "desk": {"patterns": 12, "relevant": 5, "pairs": 300},
    "paper": {"patterns": 12, "relevant": 5, "pairs": 300},
}


def measure(case: Case, work: Work) -> Rows:
    """Noise to signal of both gradients (median neuron) for every first rate.

    ``spread``: how far the pre-activations of a neuron spread over the population after step 1, in units of the smoothing noise
    of step 2. ``output``: the largest output after step 1; up to 1 every input still pulls, as the lemma has it.
    """
    rows, patterns = Rows(), Patterns(case.patterns, case.patterns, case.relevant, seed=case.seed)
    everyone, inside = patterns.population(), patterns.is_relevant()
    start, (first, second, _) = start_network(case.pairs, patterns), training_phases(case.pairs, patterns)
    rows.add("ratio", decompose(start, everyone, inside, first.noise, sampled=False).ratio.median(), at=1)
    found = gradients(start, everyone.phi, everyone.y, everyone.weights, first.noise)
    for factor in FIRST_RATES:
        net = step(start, found, replace(first, rate=factor * first.rate))
        components = decompose(net, everyone, inside, second.noise, sampled=False)
        reached = everyone.phi @ net.w.T
        variance = everyone.weights @ reached.square() - (everyone.weights @ reached).square()
        numbers = {
            "ratio": components.ratio.median(),
            "spread": variance.clamp_min(0).sqrt().median() / second.noise,
            "output": net(everyone.phi, second.noise).abs().max(),
        }
        rows.add_all(numbers, at=2, first_rate=f"{factor:.0e}")
    return rows


# --- claims ------------------------------------------------------------------------------------------

WHERE_ALL_PULL = (1e4, 1e6, 1e8)  # first rates after which outputs are expected to stay below 1
FALLS: dict[str, Any] = {"by": ratio, "below": 1, "unit": "times"}
SPREAD = "spread of pre-activations after step 1, in units of the smoothing noise"


def after(quantity: str, factor: float) -> Quantity:
    """A number after step 1 at this first rate."""
    return Quantity(quantity, 2, first_rate=f"{factor:.0e}")


def falls_at(factor: float) -> Part:
    """Lemma 6 at a first rate: the ratio falls."""
    both = after("ratio", factor), Quantity("ratio", 1)
    return Part(f"first rate x {factor:.0e}: noise to signal, step 2 over step 1", both, **FALLS)


CLAIMS = (
    Claim(
        "B4",
        says=(
            "The ratio of the largest gradient component along an irrelevant pattern to the mean component along "
            "the relevant ones is smaller in the second step than in the first."
        ),
        where="Lemma 6",
        paper="strictly smaller",
        figure="first-rates",
        parts=[falls_at(factor) for factor in WHERE_ALL_PULL],
        controls=[falls_at(factor) for factor in FIRST_RATES if factor not in WHERE_ALL_PULL],
        shows=[
            Shown("ratio at step 1", Quantity("ratio", 1)),
            *(
                Shown(f"first rate x {factor:.0e}: {words}", after(quantity, factor))
                for factor in FIRST_RATES
                for quantity, words in (
                    ("ratio", "ratio at step 2"),
                    ("spread", SPREAD),
                    ("output", "largest output after step 1"),
                )
            ),
        ],
    ),
)


# --- figure ------------------------------------------------------------------------------------------


def first_rates_figure(results: Results) -> plots.Figure:
    """Noise to signal of the second gradient against the first rate, median and middle half of the seeds; dashed: of the first
    gradient; dotted: where outputs after step 1 pass 1 and inputs begin to stop pulling."""
    table = results.table
    figure, axes = plots.grid(1, 1, (4.6, 3.4))
    axis = axes[0, 0]
    values, outputs = (
        np.array([table.select(name, 2, first_rate=f"{factor:.0e}") for factor in FIRST_RATES])
        for name in ("ratio", "output")
    )
    seen = np.isfinite(values).any(axis=1)
    plots.draw_band(axis, np.array(FIRST_RATES)[seen], values[seen], "step 2", "blue", marker="o", markersize=3)
    axis.axhline(float(np.median(table.select("ratio", 1))), color=plots.COLOURS["red"], linestyle="--", label="step 1")
    pulling = 10 ** np.interp(0.0, np.log10(np.median(outputs, axis=1)), np.log10(FIRST_RATES))
    axis.axvline(pulling, color=plots.COLOURS["grey"], linestyle=":", label="outputs pass 1")
    axis.set(xscale="log", yscale="log", xlabel="first rate, in units of the theoretical one", ylabel="noise to signal")
    plots.legend_below(axis, 3)
    return figure


STUDY = Study(
    name="first-rate",
    paper="emergence",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 10, "paper": 10},
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("first-rates", "Lemma 6 over the first rate", first_rates_figure),),
)
