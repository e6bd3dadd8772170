"""Explicit network, first gradient, and what each step says of each pattern (Lemmas 4 and 5; B1-B3).

The gradients are measured on samples at the paper's size, and exactly, on all inputs that a smaller number of patterns allows
(the whole population). Lemma 6 has a study of its own, `first-rate`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.data.patterns import Patterns, PatternSample
from unlazy.models.truncated import TruncatedNet, smoothed_slope
from unlazy.studies.emergence.common import Size, networks_of_first_steps, patterns_of, start_network, training_phases
from unlazy.studies.study import Case, Figure, Results, Study, Work
from unlazy.studies.table import Rows
from unlazy.theory.emergence import Decomposition, decompose, explicit_network, lemma4_facts


@dataclass(frozen=True)
class Settings(Size):
    """``exact_patterns``: how many patterns there are where the whole population is used. ``formula_rows``: samples for B2."""

    exact_patterns: int = 14
    formula_rows: int = 2000


SCALES = {
    "smoke": Settings(inputs=40, patterns=20, relevant=3, pairs=20, samples=500, exact_patterns=8, formula_rows=50),
    "desk": Settings(samples=10_000),
    "paper": Settings(),
}


# --- measuring ---------------------------------------------------------------------------------------

SAMPLE, POPULATION = "sample", "population"
LEMMA4_RELEVANT = (1, 3, 5, 7, 9)


def measure(case: Case, work: Work) -> Rows:
    """Checks Lemma 4 and the first gradient, and measures the components of both gradients, sampled and on a whole population."""
    rows, patterns = Rows(), patterns_of(case)
    rows.add_all(check_lemma4(case, patterns))
    rows.add_all(check_first_gradient(case, patterns))
    strength = patterns.gamma / patterns.deviation
    for step, found in decompose_steps(case, patterns, patterns.draw(case.samples)).items():
        components = {
            "ratio": found.ratio.median(),
            "ratio_greatest": found.ratio.max(),
            "floor": found.floor.median(),
            "unevenness": found.unevenness.median(),
            "beta": (found.signal / strength).median(),
            "beta_least": (found.signal / strength).min(),
        }
        rows.add_all(components, data=SAMPLE, at=step)
    few = Patterns(case.exact_patterns, case.exact_patterns, case.relevant, seed=case.seed)
    for step, found in decompose_steps(case, few, few.population(), sampled=False).items():
        medians = {"ratio": found.ratio.median(), "unevenness": found.unevenness.median()}
        rows.add_all(medians, data=POPULATION, at=step)
    return rows


def decompose_steps(
    case: Case, patterns: Patterns, sample: PatternSample, sampled: bool = True
) -> dict[int, Decomposition]:
    """The gradients of steps 1 and 2 by pattern; ``sampled=False``: the sample is the whole population."""
    nets, phases = networks_of_first_steps(case.pairs, patterns, sample), training_phases(case.pairs, patterns)
    inside = patterns.is_relevant()
    return {step: decompose(nets[step - 1], sample, inside, phases[step - 1].noise, sampled=sampled) for step in (1, 2)}


def check_lemma4(case: Case, patterns: Patterns) -> dict[str, float]:
    """How far Lemma 4 is missed, at this study's size and on smaller whole populations: the worst number of each statement."""
    small = [Patterns(10, 10, k, mixture=mix, seed=case.seed) for k in LEMMA4_RELEVANT for mix in (0.2, 0.5, 0.9)]
    facts = [lemma4_facts(explicit_network(one), one.population()) for one in small]
    facts.append(lemma4_facts(explicit_network(patterns), patterns.draw(case.tests, "test")))
    return {f"lemma4_{name}": max(row[name] for row in facts) for name in facts[0]}


def check_first_gradient(case: Case, patterns: Patterns) -> dict[str, float]:
    """The output at step 0, and how far automatic differentiation is from -a_i E[y x sigma'(<w_i, x> + b_i)]."""
    net, noise = start_network(case.pairs, patterns), training_phases(case.pairs, patterns)[0].noise
    sample, leaf = patterns.draw(case.formula_rows), net.w.clone().requires_grad_()
    output = TruncatedNet(leaf, net.b, net.a)(sample.phi, noise)
    loss = (1 - sample.y * output).clamp_min(0).mean()
    (automatic,) = torch.autograd.grad(loss, [leaf])
    slopes = smoothed_slope(sample.phi @ net.w.T + net.b, noise)
    formula = -net.a[:, None] * torch.einsum("n,nd,nu->ud", sample.y, sample.phi, slopes) / len(sample)
    return {
        "start_output": float(net(sample.phi).abs().max()),
        "formula_error": float((automatic - formula).abs().max() / formula.abs().max()),
    }


# --- claims ------------------------------------------------------------------------------------------

EXACT = 1e-10  # B1, B2: equality within float64
AT_MOST_ONE = 1 + 1e-12  # B1: bounds that the construction may reach
NO_OUTPUT = 1e-300  # B2: exactly zero
NEARLY_EQUAL = 0.1  # B3: relevant components within 10 % of their mean
MUCH_SMALLER = 0.1  # B3: irrelevant ones below a tenth of it


def exact_part(quantity: str, says: str, below: float) -> Part:
    """An exact statement, checked on one random case a seed."""
    return Part(says, Quantity(quantity), below=below, identity=True)


def of_step(quantity: str, step: int, data: str = SAMPLE) -> Quantity:
    """A number about the components of the gradient of a step."""
    return Quantity(quantity, step, data=data)


CLAIMS = (
    Claim(
        "B1",
        says=(
            "For pattern data whose label depends on the number of relevant patterns among k, an explicit two-"
            "layer network of 3(k+1) truncated-ReLU neurons, all along the sum of the relevant patterns, has zero "
            "hinge loss with outer weights of at most 32k and biases between 1/(32k) and 1/2 in size."
        ),
        where="Lemma 4",
        paper="exact",
        parts=[
            exact_part("lemma4_error", "largest difference of output and label", EXACT),
            exact_part("lemma4_loss", "hinge loss", EXACT),
            exact_part("lemma4_outer", "largest outer weight, in units of 32k", AT_MOST_ONE),
            exact_part("lemma4_bias_low", "1/(32k) over the least bias", AT_MOST_ONE),
            exact_part("lemma4_bias_high", "largest bias, in units of 1/2", AT_MOST_ONE),
            exact_part("lemma4_inside", "largest pre-activation of a neuron", AT_MOST_ONE),
        ],
    ),
    Claim(
        "B2",
        says=(
            "With the mirrored initialisation the network is zero everywhere, and the first gradient of each "
            "neuron is minus its outer weight times the mean of label times input times activation slope."
        ),
        where="Sec. 5",
        paper="exact",
        parts=[
            exact_part("start_output", "largest output at step 0", NO_OUTPUT),
            exact_part("formula_error", "formula against automatic differentiation, relative", EXACT),
        ],
    ),
    Claim(
        "B3",
        says=(
            "The first gradient step has nearly equal components along all relevant patterns and much smaller "
            "ones along the others."
        ),
        where="Lemma 5",
        paper="about beta gamma / sigma~ inside, much smaller outside",
        figure="components",
        parts=[
            Part(
                "largest deviation of a relevant component from their mean, relative",
                of_step("unevenness", 1),
                below=NEARLY_EQUAL,
            ),
            Part("largest irrelevant component over the mean relevant one", of_step("ratio", 1), below=MUCH_SMALLER),
        ],
        shows=[
            Shown("beta: mean relevant component over gamma / sigma~, median neuron", of_step("beta", 1)),
            Shown("the same, least neuron", of_step("beta_least", 1)),
            Shown("sampling floor of the ratio", of_step("floor", 1)),
            Shown("ratio of the worst neuron", of_step("ratio_greatest", 1)),
            Shown("ratio on a whole population of fewer patterns", of_step("ratio", 1, POPULATION)),
            Shown("unevenness there", of_step("unevenness", 1, POPULATION)),
        ],
    ),
)


# --- drawing -----------------------------------------------------------------------------------------


def components_figure(results: Results) -> plots.Figure:
    """Components T of seed 0 over all patterns at steps 1 and 2, median and 90 % of neurons."""
    case = results.cases()[0]
    patterns = patterns_of(case)
    order = (~patterns.is_relevant()).int().argsort(stable=True)
    place = np.arange(len(order))
    figure, axes = plots.grid(1, 2, (4.6, 3.2), sharey=True)
    steps = decompose_steps(case, patterns, patterns.draw(case.samples))
    for axis, (number, found) in zip(axes[0], steps.items(), strict=True):
        values = (found.components * patterns.deviation / patterns.gamma)[:, order].numpy()
        low, middle, high = np.quantile(values, [0.05, 0.5, 0.95], axis=0)
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


STUDY = Study(
    name="lemmas",
    digits=17,  # exact identities are compared with 1 + 1e-12
    paper="emergence",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 10, "paper": 10},
    measure=measure,
    claims=CLAIMS,
    figures=(
        Figure("components", "What the first two gradients say of each pattern (Lemmas 5, 6)", components_figure),
    ),
)
