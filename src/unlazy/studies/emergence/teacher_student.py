"""A student of images mixed with noise: which part does it learn? (Figure 4; B12).

The teacher is trained on images. A student of the same layout is trained on other images and as many injected inputs, all
labelled by the teacher. Measured is how often it agrees with the teacher on new images and on new injected inputs. Injected are
Gaussian noise, in which no features could emerge, or images of another data set, in which they could.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.claims.functions import difference
from unlazy.data.images import load_images
from unlazy.runtime import stream
from unlazy.studies.study import Case, Figure, Results, Study, Work, make_cases, require_at_least_one, require_known
from unlazy.studies.table import Rows

INJECTED = {"digits": (), "mnist": ("fashion-mnist",), "cifar-10": ("cifar-100",)}
"""The image sets to inject, besides Gaussian noise."""
MOST_SEEDS = {"cifar-10": 5}  # the convolutional networks of coloured images take longer


@dataclass(frozen=True)
class Settings:
    """``samples``: images for the teacher, other images for the student, and injected inputs, so many of each. ``hidden``: units
    for grey images; ``channels``: of the first convolution for coloured ones. Training is by Adam on the cross-entropy."""

    images: tuple[str, ...] = ("mnist", "cifar-10")
    samples: int = 2_000
    tests: int = 1_000
    hidden: int = 9
    channels: int = 16
    epochs: int = 10
    batch: int = 64
    rate: float = 2e-3

    def __post_init__(self) -> None:
        require_at_least_one(self, "samples", "tests", "hidden", "channels", "epochs", "batch")
        require_known("images", self.images, INJECTED)


SCALES = {
    "smoke": Settings(images=("digits",), samples=100, tests=100, epochs=2),
    "desk": Settings(samples=1_000),
    "paper": Settings(),
}


def cases(settings: Settings, seeds: Sequence[int]) -> list[Case]:
    """Every image set with everything that is injected into it, with every seed; coloured images with fewer seeds."""
    places = [
        {"images": images, "injected": kind, "seed": seed}
        for images in settings.images
        for kind in ("noise", *INJECTED[images])
        for seed in seeds[: MOST_SEEDS.get(images)]
    ]
    return make_cases(places, settings)


# --- inputs ------------------------------------------------------------------------------------------

Pictures = Float[Tensor, "n c h w"]


@cache
def load_pictures(name: str, split: str) -> tuple[Pictures, Int64[Tensor, " n"]]:
    """Standardised images with their classes; coloured ones are averaged over two by two pixels, to save time."""
    images = load_images(name, split)
    x = images.floats(standardise=True)
    return (F.avg_pool2d(x, 2) if x.shape[1] > 1 else x), images.labels


def injected_inputs(kind: str, like: Pictures, count: int, seed: int, part: str) -> Float[Tensor, "m c h w"]:
    """Inputs that only the teacher labels: Gaussian noise with the mean and deviation of the images, or images of another set."""
    if kind == "noise":
        noise = torch.randn(count, *like.shape[1:], generator=stream(seed, "injected", part))
        return noise * like.std() + like.mean()
    x, _ = load_pictures(kind, "train" if part == "train" else "test")
    return x[torch.randperm(len(x), generator=stream(seed, "injected", kind, part))[:count]]


def build_network(case: Case, like: Pictures, classes: int, who: str) -> nn.Module:
    """A new network: two layers with few hidden units, as in the paper; for coloured pictures two strided convolutions."""
    channels, height, width = like.shape[1:]
    c = case.channels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(case.seed, "network", who).initial_seed())
        if channels == 1:
            hidden = nn.Linear(height * width, case.hidden)
            return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(case.hidden, classes))
        first = nn.Conv2d(channels, c, 3, stride=2, padding=1)
        second = nn.Conv2d(c, 2 * c, 3, stride=2, padding=1)
        readout = nn.Linear(2 * c * -(-height // 4) * -(-width // 4), classes)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), readout)


# --- learning ----------------------------------------------------------------------------------------

WatchedParts = dict[str, tuple[Float[Tensor, "t c h w"], Int64[Tensor, " t"]]]


def train_network(
    net: nn.Module, x: Pictures, labels: Int64[Tensor, " n"], case: Case, watch: WatchedParts, epochs: int
) -> dict[str, list[float]]:
    """Train by Adam; returns, for each named part of ``watch`` (inputs and labels), the agreement with its labels by epoch."""
    optimiser = torch.optim.Adam(net.parameters(), lr=case.rate)
    curves: dict[str, list[float]] = {name: [] for name in watch}
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=stream(case.seed, "epoch", epoch))
        for rows in order.split(case.batch):
            optimiser.zero_grad()
            F.cross_entropy(net(x[rows]), labels[rows]).backward()
            optimiser.step()
        for name, (points, wanted) in watch.items():
            curves[name].append(float((predicted_classes(net, points) == wanted).double().mean()))
    return curves


def predicted_classes(net: nn.Module, x: Pictures) -> Int64[Tensor, " n"]:
    """The class the network gives every input."""
    with torch.no_grad():
        return torch.cat([net(rows).argmax(1) for rows in x.split(1000)])


def measure(case: Case, work: Work) -> Rows:
    """Train a teacher, its student on the mixture, and a network on the teacher's labels of images alone; measure agreements."""
    seed, rows = case.seed, Rows()
    x, y = load_pictures(case.images, "train")
    test_x, test_y = (values[: case.tests] for values in load_pictures(case.images, "test"))
    order = torch.randperm(len(x), generator=stream(seed, "lesson", case.images))
    own, others = order[: case.samples], order[case.samples : 2 * case.samples]
    classes = int(y.max()) + 1

    teacher = build_network(case, x, classes, "teacher")
    truth = train_network(teacher, x[own], y[own], case, {"truth": (test_x, test_y)}, case.epochs)["truth"]
    parts = {"images": test_x, "injected": injected_inputs(case.injected, x[own], case.tests, seed, "test")}
    watch = {name: (points, predicted_classes(teacher, points)) for name, points in parts.items()}
    mixture = torch.cat([x[others], injected_inputs(case.injected, x[own], len(others), seed, "train")])
    student, other = (build_network(case, x, classes, "student") for _ in range(2))
    curves = train_network(student, mixture, predicted_classes(teacher, mixture), case, watch, case.epochs)
    alone, as_many_updates = {"images": watch["images"]}, 2 * case.epochs
    direct = train_network(other, x[others], predicted_classes(teacher, x[others]), case, alone, as_many_updates)[
        "images"
    ]

    epochs = [*range(1, case.epochs + 1), "end"]
    for part, curve in curves.items():
        labels = watch[part][1]
        most_common = float(labels.bincount().max()) / len(labels)  # what guessing one class would agree with
        rows.add("agreement", [*curve, curve[-1]], trained_on="mixture", part=part, at=epochs)
        rows.add("most_common", most_common, part=part)
        rows.add("skill", (curve[-1] - most_common) / max(1 - most_common, 1e-9), part=part)
    whole = sum(curve[-1] for curve in curves.values()) / 2
    rows.add("agreement", whole, trained_on="mixture", part="whole", at="end")
    rows.add("agreement", [*direct[1::2], direct[-1]], trained_on="images", part="images", at=epochs)
    rows.add("teacher_accuracy", truth[-1])
    return rows


# --- claims ------------------------------------------------------------------------------------------

IMAGES = ("mnist", "cifar-10")


def agreement(images: str, kind: str, part: str, trained_on: str = "mixture") -> Quantity:
    """Agreement with the teacher at the end of training."""
    return Quantity("agreement", "end", images=images, injected=kind, part=part, trained_on=trained_on)


def ordering_parts(images: str) -> list[Part]:
    """Two parts: noise is learned less well than images, and images alone are learned better than the mixture."""
    image, noise, whole = (agreement(images, "noise", part) for part in ("images", "injected", "whole"))
    alone = agreement(images, "noise", "images", trained_on="images")
    rule: dict[str, Any] = {"by": difference, "above": 0, "unit": "agreement", "seeds": MOST_SEEDS.get(images)}
    return [
        Part(f"{images}: image part less noise part", (image, noise), **rule),
        Part(f"{images}: images alone less the whole mixture", (alone, whole), **rule),
    ]


def shown_numbers(images: str, kind: str) -> list[Shown]:
    """Numbers that help to read the verdict on one mixture."""
    what, where = f"{images} with {kind}", {"images": images, "injected": kind}
    guess, skill = (Quantity(name, part="injected", **where) for name in ("most_common", "skill"))
    alone = agreement(images, kind, "images", trained_on="images")
    return [
        Shown(f"{what}: image part", agreement(images, kind, "images"), unit="agreement"),
        Shown(f"{what}: injected part", agreement(images, kind, "injected"), unit="agreement"),
        Shown(f"{what}: most common answer of the teacher to injected inputs", guess),
        Shown(f"{what}: skill beyond that answer, injected part", skill),
        Shown(f"{what}: network on the teacher's labels of images alone", alone, unit="agreement"),
        Shown(f"{what}: the teacher's own test accuracy", Quantity("teacher_accuracy", **where)),
    ]


CLAIMS = (
    Claim(
        "B12",
        says=(
            "A student trained on teacher-labelled natural images mixed with Gaussian noise learns the noise part "
            "worse than the image part, and the whole worse than a network trained on the images alone."
        ),
        where="Fig. 4",
        paper="ordering; strong on CIFAR-10 and SVHN, weak on MNIST",
        figure="lessons",
        parts=[part for images in IMAGES for part in ordering_parts(images)],
        shows=[
            shown for images in IMAGES for kind in ("noise", *INJECTED[images]) for shown in shown_numbers(images, kind)
        ],
    ),
)


# --- figure ------------------------------------------------------------------------------------------


def lessons_figure(results: Results) -> plots.Figure:
    """Agreement with the teacher on fresh inputs over training, median and middle half of the seeds."""
    table = results.table
    mixtures = [(images, kind) for images in table.unique("images") for kind in table.unique("injected", images=images)]
    figure, axes = plots.grid(1, len(mixtures), (max(3.1, 5.5 / len(mixtures)), 3.2), sharey=True)
    for axis, (images, kind) in zip(axes[0], mixtures, strict=True):
        for trained_on, part, label, colour in (
            ("images", "images", "trained on images alone: images", "grey"),
            ("mixture", "images", "trained on the mixture: images", "blue"),
            ("mixture", "injected", "trained on the mixture: injected inputs", "red"),
        ):
            where: Any = {"images": images, "injected": kind, "part": part, "trained_on": trained_on}
            plots.draw_band(axis, *table.series("agreement", **where), label, colour)
        guess = float(np.median(table.select("most_common", images=images, injected=kind, part="injected")))
        axis.axhline(guess, color=plots.COLOURS["red"], linestyle=":", label="teacher's most common answer to these")
        axis.set(title=f"{images} with {'Gaussian noise' if kind == 'noise' else kind}", xlabel="epoch")
    axes[0, 0].set_ylabel("agreement with the teacher")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


STUDY = Study(
    name="teacher-student",
    paper="emergence",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 3, "paper": 10},
    columns=("images", "injected"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("lessons", "What a student learns from a mixture (Figure 4)", lessons_figure),),
)
