"""Do the weights of a small network on two classes of images gather into two directions within the first steps?

Digits 0 and 1 of MNIST (Figure 3; claim B11), and beside them the first two classes of CIFAR-10.
"""

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
from unlazy.runtime import require, stream
from unlazy.studies.emergence.common import Job, Size, Values, accuracy, column, left_out, run_jobs
from unlazy.studies.registry import settings_of
from unlazy.studies.results import Progress, conclude, judged_row, table_of

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

    images: tuple[str, ...] = ("mnist", "cifar-10")
    samples: int = 1_000
    tests: int = 500
    pairs: int = 25
    rate: float = 1.0
    steps: int = 20
    looks: tuple[int, ...] = (0, 1, 2, 5, 10, 20)


SCALES = {
    "smoke": Settings(seeds=2, images=("digits",), samples=100, tests=50, pairs=5, steps=4, looks=(0, 1, 4)),
    "desk": Settings(seeds=5),
    "paper": Settings(seeds=10),
}


@cache
def two_classes(
    settings: Settings, name: str, split: str, count: int
) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
    """Images of classes 0 (-1) and 1 (+1), centred and divided by the total standard deviation of the training rows used."""
    rows = {"train": settings.samples, "test": count}
    parts = {}
    for part in ("train", split):
        images = load_images(name, part)
        images = images.take(torch.nonzero(images.labels < 2)[: rows[part], 0])
        parts[part] = (images.flat().to(torch.float64), 2 * images.labels.to(torch.float64) - 1)
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


def clusters(settings: Settings, images: str, start: str, labels: str, seed: int) -> Values:
    """One training; ``labels="shuffled"`` is the control that has the same images and nothing to learn."""
    x, y = two_classes(settings, images, "train", settings.samples)
    if labels == "shuffled":
        y = y[torch.randperm(len(y), generator=stream(seed, "shuffled labels"))]
    rows = (x, y, torch.full_like(y, 1 / len(y)))
    values: Values = {}

    def watch(step: int, net: TruncatedNet) -> None:
        if step in settings.looks:
            gathered, smaller, cosines = gathering(net.w)
            values[f"gathered_{step}"], values[f"smaller_{step}"] = gathered, smaller
            values[f"middle_{step}"] = float(cosines.abs().median())
            values[f"cosines_{step}"] = [round(value, 4) for value in cosines.tolist()]

    net = plain_start(x.shape[1], 2 * settings.pairs, STARTS[start], seed)
    net = train(net, (Phase(settings.steps, settings.rate),), lambda _: rows, watch)
    test_x, test_y = two_classes(settings, images, "test", settings.tests)
    return values | {"accuracy": accuracy(net(test_x), test_y)}


# --- judging and drawing -----------------------------------------------------------------------------


def claims(table: Mapping[str, Any]) -> list[Row]:
    """B11 for both starts on the first image set, from the measured table alone; other image sets beside it."""
    last, judged = table["settings"]["looks"][-1], table["settings"]["images"][0]
    parts, controls = [], []
    for images in table["images"]:
        for start in STARTS:
            rows, shuffled = (table["images"][images][f"{start}_{labels}"] for labels in ("true", "shuffled"))
            what = f"{images}, {start} start, step {last}"
            near, side = column(rows, f"gathered_{last}"), column(rows, f"smaller_{last}")
            names = (f"{what}: share near the axis", f"{what}: share on its emptier side")
            if images == judged:
                parts.append(Part(names[0], ">", GATHERED, "", near))
                parts.append(Part(names[1], ">", BOTH_SIDES, "", side))
            else:
                controls += [summary(names[0], near), summary(names[1], side)]
            controls += [
                summary(f"{images}, {start} start: share near the axis at step 0", column(rows, "gathered_0")),
                summary(f"{what}, shuffled labels: share near the axis", column(shuffled, f"gathered_{last}")),
                summary(f"{what}: median cosine with the axis, in size", column(rows, f"middle_{last}")),
                summary(f"{images}, {start} start: test accuracy", column(rows, "accuracy")),
            ]
    why = (
        "Full-gradient descent on the hinge loss, 50 neurons. The paper does not say how long the starting weights are, so two "
        "lengths are judged: gathering means that the gradients of the first steps outweigh the start."
    )
    return [judged_row(table, "B11", parts, why=why, controls=controls, figure="cosines")]


def cosines_figure(table: Mapping[str, Any]) -> Figure:
    """Histograms of the cosines with the common axis, all seeds: one row an image set and start, one column a step."""
    looks = table["settings"]["looks"]
    shown = [looks[0], looks[len(looks) // 2], looks[-1]]
    lines = [(images, start) for images in table["images"] for start in STARTS]
    figure, axes = plots.grid(len(lines), len(shown), (2.9, 1.7), sharex=True, sharey=True)
    edges = np.linspace(-1, 1, 41).tolist()
    for line, (images, start) in zip(axes, lines, strict=True):
        for axis, step in zip(line, shown, strict=True):
            for labels, colour in (("shuffled", "orange"), ("true", "blue")):
                rows = table["images"][images][f"{start}_{labels}"]
                values = np.concatenate([row[f"cosines_{step}"] for row in rows])
                share = np.full(len(values), 1 / len(values))
                style = {"color": plots.COLOURS[colour], "alpha": 0.55, "label": f"{labels} labels"}
                axis.hist(values, edges, weights=share, **style)
            axis.set_title(f"{images}, {start} start, step {step}")
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
    without = left_out(settings.images, progress)
    names = [
        (images, start, labels)
        for images in settings.images
        if images not in without
        for start in STARTS
        for labels in ("true", "shuffled")
    ]
    require(bool(names), "none of the image sets is here; `unlazy data` says how to bring them in.")
    jobs = [
        Job(clusters, settings, {"images": images, "start": start, "labels": labels, "seed": seed}, runs / "clusters")
        for images, start, labels in names
        for seed in range(settings.seeds)
    ]
    values, made_by = run_jobs(jobs, workers, progress)
    table = table_of("clusters", scale, settings.to_dict(), made_by) | {"left_out": without, "images": {}}
    for number, (images, start, labels) in enumerate(names):
        rows = values[number * settings.seeds : (number + 1) * settings.seeds]
        table["images"].setdefault(images, {})[f"{start}_{labels}"] = rows
    return conclude(table, claims, lambda table: {"cosines": cosines_figure(table)}, results, progress)
