"""Where the weight vectors point after 0, 1 and 2 steps, and what a classifier makes of them (Figure 2; claims B5, B6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from unlazy import plots
from unlazy.claims.verdict import Part, Row, summary
from unlazy.data.patterns import Patterns, PatternSample
from unlazy.models.truncated import Phase, TruncatedNet, train
from unlazy.runtime import stream
from unlazy.studies.emergence.common import Job, Size, Values, accuracy, column, first_steps, run_jobs
from unlazy.studies.registry import settings_of
from unlazy.studies.results import Progress, conclude, judged_row, table_of
from unlazy.theory.emergence import star_cosines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALIGNED = 0.99  # B5
NEAR_CHANCE = 0.55  # B6: "about 52 %"
NEAR_PERFECT = 0.99  # B6


@dataclass(frozen=True)
class Settings(Size):
    """``fewer``: smaller samples, as controls; ``readout_*``: the classifier on fixed neurons; ``readout_early``: one that has
    fewer steps, as a control."""

    fewer: tuple[int, ...] = (1_000, 5_000)
    readout_steps: int = 2_008  # the paper's T = m^(4/3), as for the network itself
    readout_early: int = 600
    readout_batch: int = 250
    readout_rate: float = 0.1
    shown: int = 60


SCALES = {
    "smoke": Settings(
        seeds=2,
        inputs=40,
        patterns=20,
        relevant=3,
        pairs=20,
        samples=500,
        tests=200,
        fewer=(100,),
        readout_steps=20,
        readout_early=10,
        readout_batch=50,
        shown=10,
    ),
    "desk": Settings(seeds=5, samples=10_000, fewer=(1_000,)),
    "paper": Settings(seeds=10),
}


# --- measuring ---------------------------------------------------------------------------------------


def weights(settings: Settings, seed: int) -> Values:
    """Cosines to the nearer star after every step, and classifiers on the neurons of steps 1 and 2."""
    patterns = settings.data(seed)
    sample, test = patterns.draw(settings.samples), patterns.draw(settings.tests, "test")
    nets = first_steps(settings.start(patterns, seed), settings.schedule(patterns), sample)
    values: Values = {}
    for number, net in enumerate(nets):
        values |= _cosines(net, patterns, f"step_{number}")
    values |= {f"norm_{number}": float(nets[number].w.norm(dim=1).median()) for number in (1, 2)}
    tests = {"raw_1": nets[1], "raw_2": nets[2], "scaled_1": _stretched(nets[1], patterns)}
    values |= {name: _readout(settings, net, sample, test, seed) for name, net in tests.items()}
    values["early_2"] = _readout(replace(settings, readout_steps=settings.readout_early), nets[2], sample, test, seed)
    for count in settings.fewer:
        part = sample.take(slice(count))
        values |= _cosines(first_steps(nets[0], settings.schedule(patterns), part)[2], patterns, f"fewer_{count}")
    flat = settings.data(seed, structured=False)
    blind = flat.draw(min(settings.samples, 10_000))
    values |= _cosines(first_steps(settings.start(flat, seed), settings.schedule(flat), blind)[2], flat, "unstructured")
    return values


def _cosines(net: TruncatedNet, patterns: Patterns, name: str) -> Values:
    found = star_cosines(net, patterns.is_relevant()).abs()
    return {f"{name}_least": float(found.min()), f"{name}_median": float(found.median())}


def _stretched(net: TruncatedNet, patterns: Patterns) -> TruncatedNet:
    """The same directions at unit length, with biases spread over the range of <w, x>."""
    reach = 0.5 * patterns.relevant**0.5 / patterns.deviation  # half the range of <star, x>
    unit = net.w / net.w.norm(dim=1, keepdim=True).clamp_min(1e-300)
    generator = stream(patterns.seed, "stretched biases")
    spread = 2 * torch.rand(net.units, generator=generator, dtype=torch.float64) - 1
    return TruncatedNet(unit, spread * reach, net.a)


def _readout(settings: Settings, net: TruncatedNet, sample: PatternSample, test: PatternSample, seed: int) -> float:
    """Test accuracy of outer weights trained from zero on these neurons, which stay as they are."""
    fixed = TruncatedNet(net.w, net.b, torch.zeros_like(net.a))  # float64: lengths of 1e-10 beside biases of 1e-2
    weights = torch.full((settings.readout_batch,), 1 / settings.readout_batch, dtype=torch.float64)

    def batches(step: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.randint(0, len(sample), (settings.readout_batch,), generator=stream(seed, "readout", step))
        return sample.phi[rows], sample.y[rows], weights

    phase = Phase(settings.readout_steps, 0.0, outer_rate=settings.readout_rate)
    return accuracy(train(fixed, (phase,), batches)(test.phi), test.y)


# --- judging -----------------------------------------------------------------------------------------


def claims(table: Mapping[str, Any]) -> list[Row]:
    """B5 and B6, from the measured table alone."""
    rows = table["seeds"]

    def control(name: str, what: str) -> Row:
        return summary(what, column(rows, name))

    aligned = [Part("least absolute cosine of a neuron after step 2", ">", ALIGNED, "", column(rows, "step_2_least"))]
    steps = [
        control(f"step_{t}_{which}", f"{which} absolute cosine, step {t}")
        for t in (0, 1, 2)
        for which in ("least", "median")
    ]
    fewer = [
        control(f"fewer_{count}_least", f"least absolute cosine after step 2, {count} samples")
        for count in table["settings"]["fewer"]
    ]
    blind = [control("unstructured_median", "median absolute cosine after step 2, unstructured data")]
    readouts = [
        Part("accuracy of a classifier on the neurons of step 1", "<", NEAR_CHANCE, "", column(rows, "raw_1")),
        Part("accuracy of a classifier on the neurons of step 2", ">", NEAR_PERFECT, "", column(rows, "raw_2")),
    ]
    explained = [
        control("scaled_1", "step-1 directions stretched to unit length, biases spread over their range: accuracy"),
        control("early_2", f"step-2 neurons, {table['settings']['readout_early']} steps of the readout: accuracy"),
        control("norm_1", "median length of a weight vector, step 1"),
        control("norm_2", "median length of a weight vector, step 2"),
    ]
    return [
        judged_row(
            table,
            "B5",
            aligned,
            why="The second step points every neuron along the sum of the relevant patterns, up to its sampling error.",
            controls=steps + fewer + blind,
            figure="embedding",
        ),
        judged_row(
            table,
            "B6",
            readouts,
            why="After step 1 the directions are nearly right already, but the paper's tiny first rate leaves very short "
            "weights: a neuron is a constant set by its bias, and a classifier on it is blind. One control stretches the same "
            "directions. What step-2 neurons say of the counts is ill conditioned: a readout that stops early can "
            "miss one (the first run of this study stopped at 600 steps, now a control, and came out partly).",
            controls=explained,
            figure="embedding",
        ),
    ]


# --- drawing -----------------------------------------------------------------------------------------


def embedding(units: Float[Tensor, "n D"]) -> NDArray[np.float64]:
    """Classical multidimensional scaling (MDS) of unit vectors to two dimensions: distances squared are 2 (1 - cosine)."""
    cosines = (units @ units.T).numpy()
    centred = cosines - cosines.mean(0) - cosines.mean(1)[:, None] + cosines.mean()
    values, vectors = np.linalg.eigh(centred)
    return np.asarray(vectors[:, -2:] * np.sqrt(np.maximum(values[-2:], 0)))


def embedding_figure(settings: Settings) -> Figure:
    """Seed 0: some neurons of steps 0, 1, 2 and the two stars in one embedding, one panel a step."""
    patterns = settings.data(0)
    nets = first_steps(settings.start(patterns, 0), settings.schedule(patterns), patterns.draw(settings.samples))
    star = patterns.is_relevant().to(torch.float64) / patterns.relevant**0.5
    half = settings.shown // 2
    shown = torch.cat([torch.arange(half), settings.pairs + torch.arange(half)])
    weights = [net.w[shown] / net.w[shown].norm(dim=1, keepdim=True) for net in nets]
    places = embedding(torch.cat([*weights, star[None], -star[None]]))[:, ::-1]
    figure, axes = plots.grid(1, 3, (3.2, 3.4), sharex=True, sharey=True)
    hollow = {"markersize": 22, "markerfacecolor": "none", "markeredgewidth": 1.5}
    for number, axis in enumerate(axes[0]):
        least = float(star_cosines(nets[number], patterns.is_relevant()).abs().min())
        here = places[number * len(shown) : (number + 1) * len(shown)]
        axis.plot(*here.T, "o", color=plots.COLOURS["blue"], alpha=0.5, markersize=4, label="weight vectors")
        axis.plot(*places[-2:].T, "*", color=plots.COLOURS["red"], label="the two effective features", **hollow)
        axis.set(title=f"step {number}: least |cosine| {least:.3f}", xticks=[], yticks=[])
        axis.margins(0.15, 0.3)
    plots.legend_below(axes[0, 1])
    return figure


# --- the study ---------------------------------------------------------------------------------------


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Measure what is missing under ``runs``, then write ``results/weights/SCALE.json`` and its figure."""
    settings = settings_of(SCALES, scale, seeds)
    jobs = [Job(weights, settings, {"seed": seed}, runs / "weights") for seed in range(settings.seeds)]
    values, made_by = run_jobs(jobs, workers, progress)
    table = table_of("weights", scale, settings.to_dict(), made_by) | {"seeds": values}
    return conclude(table, claims, lambda _: {"embedding": embedding_figure(settings)}, results, progress)
