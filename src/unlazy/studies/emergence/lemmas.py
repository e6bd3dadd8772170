"""Lemmas 4, 5 and 6 and the first gradient, on networks of the paper's size and exactly on small ones (claims B1 to B4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from unlazy import plots
from unlazy.claims.verdict import Part, Row, summary
from unlazy.data.patterns import Patterns
from unlazy.models.truncated import TruncatedNet, smoothed_slope
from unlazy.studies.emergence.common import Job, Size, Values, column, first_steps, run_jobs
from unlazy.studies.registry import settings_of
from unlazy.studies.results import Progress, conclude, judged_row, table_of
from unlazy.theory.emergence import Decomposition, decompose, explicit_network, lemma4_facts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXACT = 1e-10  # B1, B2: equality within float64
NEARLY_EQUAL = 0.1  # B3: relevant components within 10 % of their mean
MUCH_SMALLER = 0.1  # B3: irrelevant ones below a tenth of it
LEMMA4_RELEVANT = (1, 3, 5, 7, 9)


@dataclass(frozen=True)
class Settings(Size):
    """``exact_patterns``: how many patterns the twin has whose population is listed."""

    exact_patterns: int = 14
    formula_rows: int = 2000


SCALES = {
    "smoke": Settings(
        seeds=2, inputs=40, patterns=20, relevant=3, pairs=20, samples=500, exact_patterns=8, formula_rows=50
    ),
    "desk": Settings(seeds=10, samples=10_000),
    "paper": Settings(seeds=10),
}


# --- measuring ---------------------------------------------------------------------------------------


def lemmas(settings: Settings, seed: int) -> Values:
    """Everything of one seed."""
    patterns = settings.data(seed)
    sample, inside = patterns.draw(settings.samples), patterns.is_relevant()
    schedule = settings.schedule(patterns, steps=0)
    nets = first_steps(settings.start(patterns, seed), schedule, sample)
    values = _explicit(settings, seed) | _first_gradient(settings, patterns, nets[0])
    strength = patterns.gamma / patterns.deviation
    for number in (1, 2):
        values |= _told(decompose(nets[number - 1], sample, inside, schedule[number - 1].noise), number, strength)
    return values | _exactly(settings, seed)


def _explicit(settings: Settings, seed: int) -> Values:
    """Lemma 4 at this study's size and on every hidden vector of smaller ones: the worst of each promise."""
    worst: dict[str, float] = {}
    distributions = [Patterns(10, 10, k, mixture=mix, seed=seed) for k in LEMMA4_RELEVANT for mix in (0.2, 0.5, 0.9)]
    facts = [lemma4_facts(explicit_network(one), one.population()) for one in distributions]
    large = settings.data(seed)
    facts.append(lemma4_facts(explicit_network(large), large.draw(settings.tests, "test")))
    for row in facts:
        worst = {name: max(value, worst.get(name, 0.0)) for name, value in row.items()}
    return {f"lemma4_{name}": value for name, value in worst.items()}


def _first_gradient(settings: Settings, patterns: Patterns, net: TruncatedNet) -> Values:
    """The output at step 0, and automatic differentiation against -a_i E[y x sigma'(<w_i, x> + b_i)]."""
    sample, noise = patterns.draw(settings.formula_rows), settings.schedule(patterns)[0].noise
    leaf = net.w.clone().requires_grad_()
    output = TruncatedNet(leaf, net.b, net.a)(sample.phi, noise)
    loss = (1 - sample.y * output).clamp_min(0).mean()
    (automatic,) = torch.autograd.grad(loss, [leaf])
    slopes = smoothed_slope(sample.phi @ net.w.T + net.b, noise)
    formula = -net.a[:, None] * torch.einsum("n,nd,nu->ud", sample.y, sample.phi, slopes) / len(sample)
    return {
        "start_output": float(net(sample.phi).abs().max()),
        "formula_error": float((automatic - formula).abs().max() / formula.abs().max()),
    }


def _told(found: Decomposition, number: int, strength: float) -> Values:
    """Medians over neurons, and the worst neuron."""
    return {
        f"ratio_{number}": float(found.ratio.median()),
        f"ratio_worst_{number}": float(found.ratio.max()),
        f"floor_{number}": float(found.floor.median()),
        f"unevenness_{number}": float(found.unevenness.median()),
        f"beta_{number}": float((found.signal / strength).median()),
        f"beta_least_{number}": float((found.signal / strength).min()),
    }


def _exactly(settings: Settings, seed: int) -> Values:
    """The ratios of both steps on the whole population of a smaller twin: no sampling anywhere."""
    size = settings.exact_patterns
    patterns = Patterns(size, size, settings.relevant, seed=seed)
    people, inside = patterns.population(), patterns.is_relevant()
    schedule = settings.schedule(patterns, steps=0)
    nets = first_steps(settings.start(patterns, seed), schedule, people)
    first = decompose(nets[0], people, inside, schedule[0].noise, sampled=False)
    second = decompose(nets[1], people, inside, schedule[1].noise, sampled=False)
    return {
        "exact_ratio_1": float(first.ratio.median()),
        "exact_ratio_2": float(second.ratio.median()),
        "exact_unevenness_1": float(first.unevenness.median()),
    }


# --- judging -----------------------------------------------------------------------------------------


def claims(table: Mapping[str, Any]) -> list[Row]:
    """One row per claim, from the measured table alone."""
    rows = table["seeds"]

    def part(name: str, what: str, side: str, threshold: float) -> Part:
        return Part(what, side, threshold, "", column(rows, name))

    lemma4 = [
        part("lemma4_error", "largest difference of output and label", "<", EXACT),
        part("lemma4_loss", "hinge loss", "<", EXACT),
        part("lemma4_outer", "largest outer weight, in units of 32k", "<", 1 + 1e-12),
        part("lemma4_bias_low", "1/(32k) over the least bias", "<", 1 + 1e-12),
        part("lemma4_bias_high", "largest bias, in units of 1/2", "<", 1 + 1e-12),
        part("lemma4_inside", "largest pre-activation of a neuron", "<", 1 + 1e-12),
    ]
    start = [
        part("start_output", "largest output at step 0", "<", 1e-300),
        part("formula_error", "formula against automatic differentiation, relative", "<", EXACT),
    ]
    lemma5 = [
        part("unevenness_1", "largest deviation of a relevant component from their mean, relative", "<", NEARLY_EQUAL),
        part("ratio_1", "largest irrelevant component over the mean relevant one", "<", MUCH_SMALLER),
    ]
    first, second = column(rows, "ratio_1"), column(rows, "ratio_2")
    exact = column(rows, "exact_ratio_2") / column(rows, "exact_ratio_1")
    lemma6 = [
        Part("noise-to-signal ratio, step 2 over step 1", "<", 1, "times", second / first),
        Part("the same on a whole population of fewer patterns", "<", 1, "times", exact),
    ]

    def controls(*pairs: tuple[str, str]) -> list[Row]:
        return [summary(what, column(rows, name)) for name, what in pairs]

    return [
        judged_row(
            table,
            "B1",
            lemma4,
            why="The construction is exact for k = 1 to 9, three mixtures and the paper's size.",
        ),
        judged_row(
            table,
            "B2",
            start,
            why="Mirrored neurons cancel to the last bit; the formula is that of automatic differentiation.",
        ),
        judged_row(
            table,
            "B3",
            lemma5,
            why="Median over neurons. What remains outside the relevant patterns is mostly the sampling error of the gradient.",
            figure="components",
            controls=controls(
                ("beta_1", "beta: mean relevant component over gamma / sigma~, median neuron"),
                ("beta_least_1", "the same, least neuron"),
                ("floor_1", "sampling floor of the ratio"),
                ("ratio_worst_1", "ratio of the worst neuron"),
                ("exact_ratio_1", "ratio on a whole population of fewer patterns"),
                ("exact_unevenness_1", "unevenness there"),
            ),
        ),
        judged_row(
            table,
            "B4",
            lemma6,
            why="On a sample both ratios stand on the sampling floor, so the fall seen there is one of sampling errors. Without "
            "sampling, on a smaller population, it is the lemma's own: after step 1 the weights are so short that the slope of a "
            "neuron is the same for every input, and nothing irrelevant is left.",
            figure="components",
            controls=controls(
                ("ratio_1", "ratio at step 1"),
                ("ratio_2", "ratio at step 2"),
                ("floor_1", "sampling floor at step 1"),
                ("floor_2", "sampling floor at step 2"),
                ("exact_ratio_1", "ratio at step 1, whole population of fewer patterns"),
                ("exact_ratio_2", "ratio at step 2, whole population of fewer patterns"),
            ),
        ),
    ]


# --- drawing -----------------------------------------------------------------------------------------


def components_figure(settings: Settings) -> Figure:
    """T of seed 0 over all patterns and neurons, at steps 1 and 2, in units of gamma / sigma~."""
    patterns = settings.data(0)
    sample, inside = patterns.draw(settings.samples), patterns.is_relevant()
    schedule = settings.schedule(patterns, steps=0)
    nets = first_steps(settings.start(patterns, 0), schedule, sample)
    order = torch.cat([torch.nonzero(inside)[:, 0], torch.nonzero(~inside)[:, 0]])
    figure, axes = plots.grid(1, 2, (4.6, 3.2), sharey=True)
    for axis, net, phase, number in zip(axes[0], nets, schedule, (1, 2), strict=False):
        found = decompose(net, sample, inside, phase.noise)
        values = (found.components * patterns.deviation / patterns.gamma)[:, order].numpy()
        low, middle, high = np.quantile(values, [0.05, 0.5, 0.95], axis=0)
        place = np.arange(len(order))
        for mask, colour, label in (
            (place < patterns.relevant, "red", "relevant"),
            (place >= patterns.relevant, "grey", "other"),
        ):
            spread = np.stack([middle - low, high - middle])[:, mask]
            marks = {"fmt": "o", "markersize": 3, "elinewidth": 0.8, "color": plots.COLOURS[colour]}
            axis.errorbar(place[mask], middle[mask], spread, label=f"{label} patterns", **marks)
        ratio, floor = float(found.ratio.median()), float(found.floor.median())
        axis.set(title=f"step {number}: noise/signal {ratio:.3f} (floor {floor:.3f})", xlabel="pattern, relevant first")
    axes[0, 0].set_ylabel("T in units of gamma / sigma~\n(median and 90 % of neurons)")
    axes[0, 1].legend()
    return figure


# --- the study ---------------------------------------------------------------------------------------


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Measure what is missing under ``runs``, then write ``results/lemmas/SCALE.json`` and its figure."""
    settings = settings_of(SCALES, scale, seeds)
    jobs = [Job(lemmas, settings, {"seed": seed}, runs / "lemmas") for seed in range(settings.seeds)]
    values, made_by = run_jobs(jobs, workers, progress)
    table = table_of("lemmas", scale, settings.to_dict(), made_by) | {"seeds": values}
    return conclude(table, claims, lambda _: {"components": components_figure(settings)}, results, progress)
