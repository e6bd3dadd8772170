"""Weights gather on the sum of relevant patterns in two steps (Figure 2; claims B5, B6).

Measured are the cosine of every neuron with the sum of the relevant patterns (the star) after 0, 1 and 2 full-gradient steps, and
the accuracy of a classifier trained on these neurons.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.data.patterns import Patterns, PatternSample
from unlazy.models.truncated import Phase, TruncatedNet, train
from unlazy.runtime import stream
from unlazy.studies.emergence.common import Size, accuracy, networks_of_first_steps, patterns_of, star_direction
from unlazy.studies.study import Case, Figure, Results, Study, Work
from unlazy.studies.table import Rows
from unlazy.theory.emergence import star_cosines


@dataclass(frozen=True)
class Settings(Size):
    """``fewer``: smaller samples, as controls. ``readout_*``: the training of the classifier on fixed neurons; ``readout_early``:
    the smaller number of steps of a control. ``shown``: how many neurons the figure shows."""

    fewer: tuple[int, ...] = (1_000, 5_000)
    readout_steps: int = 2_008  # the paper's T = m^(4/3), as for the network itself
    readout_early: int = 600
    readout_batch: int = 250
    readout_rate: float = 0.1
    shown: int = 60


SMALL = {"inputs": 40, "patterns": 20, "relevant": 3, "pairs": 20, "samples": 500, "tests": 200, "shown": 10}
SCALES = {
    "smoke": Settings(**SMALL, fewer=(100,), readout_steps=20, readout_early=10, readout_batch=50),
    "desk": Settings(samples=10_000, fewer=(1_000,)),
    "paper": Settings(),
}


# --- measuring ---------------------------------------------------------------------------------------

MAIN = "main"  # the variant of the paper; the others are controls


def measure(case: Case, work: Work) -> Rows:
    """Absolute cosines with the star after every step, and the accuracy of classifiers on the neurons of steps 1 and 2."""
    rows, patterns, flat = Rows(), patterns_of(case), patterns_of(case, structured=False)
    sample, test = patterns.draw(case.samples), patterns.draw(case.tests, "test")
    nets = networks_of_first_steps(case.pairs, patterns, sample)
    for step, net in enumerate(nets):
        rows.add_all(summarise_cosines(net, patterns), at=step, variant=MAIN)
    for step in (1, 2):
        rows.add("norm", nets[step].w.norm(dim=1).median(), at=step, variant=MAIN)
    for variant, step, net, steps in (
        (MAIN, 1, nets[1], case.readout_steps),
        (MAIN, 2, nets[2], case.readout_steps),
        ("stretched", 1, stretch_to_unit_length(nets[1], patterns), case.readout_steps),
        ("early", 2, nets[2], case.readout_early),
    ):
        rows.add("readout", readout_accuracy(case, net, sample, test, steps), at=step, variant=variant)
    for count in case.fewer:
        _, _, second = networks_of_first_steps(case.pairs, patterns, sample.take(slice(count)))
        rows.add_all(summarise_cosines(second, patterns), at=2, variant=f"{count} samples")
    _, _, second = networks_of_first_steps(case.pairs, flat, flat.draw(min(case.samples, 10_000)))
    rows.add_all(summarise_cosines(second, flat), at=2, variant="unstructured")
    return rows


def summarise_cosines(net: TruncatedNet, patterns: Patterns) -> dict[str, float]:
    """The least and the median absolute cosine of a neuron with the sum of the relevant patterns."""
    found = star_cosines(net, patterns.is_relevant()).abs()
    return {"cosine_least": float(found.min()), "cosine_median": float(found.median())}


def stretch_to_unit_length(net: TruncatedNet, patterns: Patterns) -> TruncatedNet:
    """The same directions at unit length, with random biases over the range of <w, x>."""
    reach = 0.5 * patterns.relevant**0.5 / patterns.deviation  # half the range of <star, x>
    unit = net.w / net.w.norm(dim=1, keepdim=True).clamp_min(1e-300)
    generator = stream(patterns.seed, "stretched biases")
    spread = 2 * torch.rand(net.units, generator=generator, dtype=torch.float64) - 1
    return TruncatedNet(unit, spread * reach, net.a)


def readout_accuracy(case: Case, net: TruncatedNet, sample: PatternSample, test: PatternSample, steps: int) -> float:
    """Test accuracy of outer weights that are trained from zero; the neurons are fixed."""
    fixed = TruncatedNet(net.w, net.b, torch.zeros_like(net.a))  # float64: lengths of 1e-10 beside biases of 1e-2
    weights = torch.full((case.readout_batch,), 1 / case.readout_batch, dtype=torch.float64)

    def batches(step: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.randint(0, len(sample), (case.readout_batch,), generator=stream(case.seed, "readout", step))
        return sample.phi[rows], sample.y[rows], weights

    phase = Phase(steps, 0.0, outer_rate=case.readout_rate)
    return accuracy(train(fixed, (phase,), batches)(test.phi), test.y)


# --- claims ------------------------------------------------------------------------------------------

ALIGNED = 0.99  # B5
NEAR_CHANCE = 0.55  # B6: "about 52 %"
NEAR_PERFECT = 0.99  # B6


def after_step(quantity: str, step: int, variant: str = MAIN) -> Quantity:
    """A quantity of the network after a gradient step."""
    return Quantity(quantity, step, variant=variant)


CLAIMS = (
    Claim(
        "B5",
        says=(
            "After two gradient steps on structured parity data the weight vector of every neuron has an absolute "
            "cosine above 0.99 with the sum of the relevant patterns."
        ),
        where="Fig. 2",
        paper="above 0.99",
        figure="embedding",
        parts=[Part("least absolute cosine of a neuron after step 2", after_step("cosine_least", 2), above=ALIGNED)],
        shows=[
            *(
                Shown(f"{which} absolute cosine, step {step}", after_step(f"cosine_{which}", step))
                for step in (0, 1, 2)
                for which in ("least", "median")
            ),
            *(
                Shown(
                    f"least absolute cosine after step 2, {count} samples",
                    after_step("cosine_least", 2, f"{count} samples"),
                )
                for count in (1_000, 5_000)
            ),
            Shown(
                "median absolute cosine after step 2, unstructured data", after_step("cosine_median", 2, "unstructured")
            ),
        ],
    ),
    Claim(
        "B6",
        says=(
            "A classifier trained on the neurons after one step is near chance on structured parity data, and one "
            "trained on the neurons after two steps is near perfect."
        ),
        where="Sec. 6",
        paper="about 52 / about 100 % test",
        figure="embedding",
        parts=[
            Part("accuracy of a classifier on the neurons of step 1", after_step("readout", 1), below=NEAR_CHANCE),
            Part("accuracy of a classifier on the neurons of step 2", after_step("readout", 2), above=NEAR_PERFECT),
        ],
        shows=[
            Shown(
                "step-1 directions stretched to unit length, biases spread over their range: accuracy",
                after_step("readout", 1, "stretched"),
            ),
            Shown("step-2 neurons, 600 steps of the readout: accuracy", after_step("readout", 2, "early")),
            Shown("median length of a weight vector, step 1", after_step("norm", 1)),
            Shown("median length of a weight vector, step 2", after_step("norm", 2)),
        ],
    ),
)


# --- drawing -----------------------------------------------------------------------------------------


def embed_in_plane(units: Float[Tensor, "n D"]) -> NDArray[np.float64]:
    """Classical multidimensional scaling (MDS) of unit vectors to two dimensions: distances squared are 2 (1 - cosine)."""
    cosines = (units @ units.T).numpy()
    centred = cosines - cosines.mean(0) - cosines.mean(1)[:, None] + cosines.mean()
    values, vectors = np.linalg.eigh(centred)
    return np.asarray(vectors[:, -2:] * np.sqrt(np.maximum(values[-2:], 0)))


def embedding_figure(results: Results) -> plots.Figure:
    """Weight vectors and the two effective features, embedded by multidimensional scaling, after 0, 1 and 2 steps."""
    case = results.cases()[0]
    patterns = patterns_of(case)
    nets = networks_of_first_steps(case.pairs, patterns, patterns.draw(case.samples))
    star = star_direction(patterns)
    half = torch.arange(case.shown // 2)
    shown = torch.cat([half, case.pairs + half])
    weights = [net.w[shown] / net.w[shown].norm(dim=1, keepdim=True) for net in nets]
    places = embed_in_plane(torch.cat([*weights, star[None], -star[None]]))[:, ::-1]
    figure, axes = plots.grid(1, 3, (3.2, 3.4), sharex=True, sharey=True)
    hollow = {"markersize": 22, "markerfacecolor": "none", "markeredgewidth": 1.5}
    for number, axis in enumerate(axes[0]):
        least = summarise_cosines(nets[number], patterns)["cosine_least"]
        here = places[number * len(shown) : (number + 1) * len(shown)]
        axis.plot(*here.T, "o", color=plots.COLOURS["blue"], alpha=0.5, markersize=4, label="weight vectors")
        axis.plot(*places[-2:].T, "*", color=plots.COLOURS["red"], label="the two effective features", **hollow)
        axis.set(title=f"step {number}: least |cosine| {least:.3f}", xticks=[], yticks=[])
        axis.margins(0.15, 0.3)
    plots.legend_below(axes[0, 1])
    return figure


STUDY = Study(
    name="weights",
    paper="emergence",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 5, "paper": 10},
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("embedding", "Weights gather in two steps (Figure 2)", embedding_figure),),
)
