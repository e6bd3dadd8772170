"""Do the weights of a small network on two digits gather into two directions within the first steps? (Figure 3; claim B11)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unlazy import plots
from unlazy.claims.verdict import Part, Row, summary
from unlazy.data.images import load_images
from unlazy.models.truncated import Phase, TruncatedNet, train
from unlazy.runtime import stream
from unlazy.studies.emergence.common import Job, Progress, Size, Values, accuracy, column, run_jobs
from unlazy.studies.registry import settings_of
from unlazy.studies.results import judged_row, save, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLOSE = 0.9  # a weight vector belongs to a cluster when its cosine with the axis exceeds this
GATHERED = 0.9  # B11: nearly all of them do
BOTH_SIDES = 0.1  # B11: and neither side of the axis is empty
STARTS = {"small": 0.01, "default": 3**-0.5}
"""Typical length of a starting weight vector; ``default`` is PyTorch's own."""


@dataclass(frozen=True)
class Settings(Size):
    """``steps`` of full-gradient descent at ``rate`` on the hinge loss; ``looks``: after which steps weights are examined."""

    images: str = "mnist"
    samples: int = 1_000
    tests: int = 500
    pairs: int = 25
    rate: float = 1.0
    steps: int = 20
    looks: tuple[int, ...] = (0, 1, 2, 5, 10, 20)


SCALES = {
    "smoke": Settings(seeds=2, images="digits", samples=100, tests=50, pairs=5, steps=4, looks=(0, 1, 4)),
    "desk": Settings(seeds=5),
    "paper": Settings(seeds=10),
}


@cache
def two_digits(settings: Settings, split: str, count: int) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
    """Images of 0 (-1) and 1 (+1), centred and divided by the total standard deviation of the training rows used."""
    rows = {"train": settings.samples, "test": count}
    parts = {}
    for name in ("train", split):
        images = load_images(settings.images, name)
        images = images.take(torch.nonzero(images.labels < 2)[: rows[name], 0])
        parts[name] = (images.flat().to(torch.float64), 2 * images.labels.to(torch.float64) - 1)
    mean = parts["train"][0].mean(0)
    total = float((parts["train"][0] - mean).square().sum(1).mean().sqrt())
    x, y = parts[split]
    return (x - mean) / total, y


def plain_start(inputs: int, units: int, length: float, seed: int) -> TruncatedNet:
    """Independent Gaussian weights of about this length, no biases, outer weights of about 1 / sqrt(units)."""
    generator = stream(seed, "plain start")
    w = torch.randn(units, inputs, generator=generator, dtype=torch.float64) * length / inputs**0.5
    a = torch.randn(units, generator=generator, dtype=torch.float64) / units**0.5
    return TruncatedNet(w, torch.zeros(units, dtype=torch.float64), a)


def gathering(w: Float[Tensor, "units d"]) -> tuple[float, float, Float[Tensor, " units"]]:
    """Share of directions within the cosine ``CLOSE`` of their common axis, share on its emptier side, and all cosines."""
    units = w / w.norm(dim=1, keepdim=True).clamp_min(1e-300)
    cosines = units @ torch.linalg.svd(units, full_matrices=False).Vh[0]
    close = cosines[cosines.abs() > CLOSE]
    smaller = float((close > 0).sum().minimum((close < 0).sum())) / len(cosines)
    return len(close) / len(cosines), smaller, cosines


def clusters(settings: Settings, start: str, labels: str, seed: int) -> Values:
    """One training; ``labels="shuffled"`` is the control that has the same images and nothing to learn."""
    x, y = two_digits(settings, "train", settings.samples)
    if labels == "shuffled":
        y = y[torch.randperm(len(y), generator=stream(seed, "shuffled labels"))]
    rows = (x, y, torch.full_like(y, 1 / len(y)))
    values: Values = {}

    def watch(step: int, net: TruncatedNet) -> None:
        if step in settings.looks:
            gathered, smaller, cosines = gathering(net.w)
            values[f"gathered_{step}"], values[f"smaller_{step}"] = gathered, smaller
            values[f"cosines_{step}"] = [round(value, 4) for value in cosines.tolist()]

    net = plain_start(x.shape[1], 2 * settings.pairs, STARTS[start], seed)
    net = train(net, (Phase(settings.steps, settings.rate),), lambda _: rows, watch)
    test_x, test_y = two_digits(settings, "test", settings.tests)
    return values | {"accuracy": accuracy(net(test_x), test_y)}


# --- judging and drawing -----------------------------------------------------------------------------


def claims(table: Mapping[str, Any]) -> list[Row]:
    """B11 for both starts, from the measured table alone."""
    last = table["settings"]["looks"][-1]
    parts, controls = [], []
    for start in STARTS:
        rows = table[f"{start}_true"]
        what = f"{start} start, step {last}"
        parts.append(Part(f"{what}: share near the axis", ">", GATHERED, "", column(rows, f"gathered_{last}")))
        parts.append(Part(f"{what}: share on its emptier side", ">", BOTH_SIDES, "", column(rows, f"smaller_{last}")))
        controls.append(summary(f"{start} start: share near the axis at step 0", column(rows, "gathered_0")))
        shuffled = column(table[f"{start}_shuffled"], f"gathered_{last}")
        controls.append(summary(f"{start} start, shuffled labels, step {last}: share near the axis", shuffled))
        controls.append(summary(f"{start} start: test accuracy", column(rows, "accuracy")))
    why = (
        "Full-gradient descent on the hinge loss, 50 neurons. The paper does not say how long the starting weights are, so two "
        "lengths are judged: gathering means that the gradients of the first steps outweigh the start."
    )
    return [
        judged_row(
            table,
            "B11",
            parts,
            why=why,
            controls=controls,
            figure="cosines",
        )
    ]


def cosines_figure(table: Mapping[str, Any]) -> Figure:
    """Histograms of the cosines with the common axis, all seeds: one row a start, one column a step."""
    looks = table["settings"]["looks"]
    shown = [looks[0], looks[len(looks) // 2], looks[-1]]
    figure, axes = plots.grid(len(STARTS), len(shown), (2.8, 2.0), sharex=True, sharey=True)
    edges = np.linspace(-1, 1, 41).tolist()
    for line, start in zip(axes, STARTS, strict=True):
        for axis, step in zip(line, shown, strict=True):
            for labels, colour in (("shuffled", "orange"), ("true", "blue")):
                values = np.concatenate([row[f"cosines_{step}"] for row in table[f"{start}_{labels}"]])
                share = np.full(len(values), 1 / len(values))
                axis.hist(
                    values, edges, weights=share, color=plots.COLOURS[colour], alpha=0.55, label=f"{labels} labels"
                )
            axis.set_title(f"{start} start, step {step}")
        line[0].set_ylabel("share of neurons")
    for axis in axes[-1]:
        axis.set_xlabel("cosine with the axis")
    axes[0, 0].legend(loc="upper left")
    return figure


# --- the study ---------------------------------------------------------------------------------------


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Measure what is missing under ``runs``, then write ``results/clusters/SCALE.json`` and its figure."""
    settings = settings_of(SCALES, scale, seeds)
    names = [(start, labels) for start in STARTS for labels in ("true", "shuffled")]
    jobs = [
        Job(clusters, settings, {"start": start, "labels": labels, "seed": seed}, runs / "clusters")
        for start, labels in names
        for seed in range(settings.seeds)
    ]
    values, made_by = run_jobs(jobs, workers, progress)
    table = table_of("clusters", scale, settings.to_dict(), made_by)
    for number, (start, labels) in enumerate(names):
        table[f"{start}_{labels}"] = values[number * settings.seeds : (number + 1) * settings.seeds]
    table["claims"] = claims(table)
    progress("drawing", 0, 1)
    with plots.style():
        save(results, table, {"cosines": cosines_figure(table)})
    progress("drawing", 1, 1)
    return table
