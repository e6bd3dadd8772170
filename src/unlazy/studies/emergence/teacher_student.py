"""A student learns from a teacher on images mixed with injected inputs: which part does it learn? (Figure 4; claim B12)

The teacher is trained on images. A student of the same layout is trained on as many other images and injected inputs, all
labelled by the teacher, and asked how often it agrees with the teacher on fresh images and on fresh injected inputs. Gaussian
noise has nothing that could make features emerge; images of another data set do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from unlazy import plots
from unlazy.claims.verdict import Part, Row, summary
from unlazy.data.images import load_images
from unlazy.runtime import require, stream
from unlazy.studies.emergence.common import Job, Values, column, left_out, run_jobs
from unlazy.studies.registry import settings_of
from unlazy.studies.results import Progress, conclude, judged_row, table_of
from unlazy.studies.settings import at_least_one, plain_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INJECTED = {"digits": (), "mnist": ("fashion-mnist",), "cifar-10": ("cifar-100",)}
"""Other images to inject, besides Gaussian noise."""
COLOURED = ("cifar-10",)
SIDE = 16
"""Pictures wider than that many pixels by half or more are averaged two by two, to save time."""


@dataclass(frozen=True)
class Settings:
    """``samples`` images for the teacher, as many others for the student and as many injected inputs; Adam on cross-entropy.

    ``coloured_seeds``: at most so many seeds for the convolutional networks of coloured images, which take longer.
    """

    seeds: int
    coloured_seeds: int = 5
    images: tuple[str, ...] = ("mnist", "cifar-10")
    samples: int = 2_000
    tests: int = 1_000
    hidden: int = 9
    channels: int = 16
    epochs: int = 10
    batch: int = 64
    rate: float = 2e-3

    def __post_init__(self) -> None:
        at_least_one(self, "seeds", "coloured_seeds", "samples", "tests", "hidden", "channels", "epochs", "batch")
        unknown = sorted(set(self.images) - set(INJECTED))
        require(not unknown, f"there is no set-up for {', '.join(unknown)}; there is for {', '.join(INJECTED)}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return plain_settings(self)

    def seeds_on(self, images: str) -> int:
        """How many seeds these images get."""
        return min(self.seeds, self.coloured_seeds) if images in COLOURED else self.seeds


SCALES = {
    "smoke": Settings(seeds=2, images=("digits",), samples=100, tests=100, epochs=2),
    "desk": Settings(seeds=3, samples=1_000),
    "paper": Settings(seeds=10),
}


# --- inputs ------------------------------------------------------------------------------------------

Pictures = Float[Tensor, "n c h w"]


@cache
def pictures(name: str, split: str) -> tuple[Pictures, Int64[Tensor, " n"]]:
    """Standardised images, at most about 16 pixels wide where there are colours, with their classes."""
    images = load_images(name, split)
    x = images.floats(standardise=True)
    coloured = x.shape[1] > 1 and x.shape[-1] >= 1.5 * SIDE
    return (F.avg_pool2d(x, 2) if coloured else x), images.labels


def injected(kind: str, like: Pictures, count: int, seed: int, part: str) -> Float[Tensor, "m c h w"]:
    """Inputs without a label of their own: standard Gaussian noise of the images' deviation, or images of another data set."""
    if kind == "noise":
        noise = torch.randn(count, *like.shape[1:], generator=stream(seed, "injected", part))
        return noise * like.std() + like.mean()
    x, _ = pictures(kind, "train" if part == "train" else "test")
    return x[torch.randperm(len(x), generator=stream(seed, "injected", kind, part))[:count]]


def network(settings: Settings, like: Pictures, classes: int, seed: int, who: str) -> nn.Module:
    """Grey pictures: two layers, few hidden units, as in the paper. Colours: two strided convolutions and a readout."""
    channels, height, width = like.shape[1:]
    c = settings.channels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(seed, "network", who).initial_seed())
        if channels == 1:
            return nn.Sequential(
                nn.Flatten(), nn.Linear(height * width, settings.hidden), nn.ReLU(), nn.Linear(settings.hidden, classes)
            )
        return nn.Sequential(
            nn.Conv2d(channels, c, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(c, 2 * c, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * c * -(-height // 4) * -(-width // 4), classes),
        )


# --- learning ----------------------------------------------------------------------------------------

Watch = dict[str, tuple[Float[Tensor, "t c h w"], Int64[Tensor, " t"]]]


def learn(
    net: nn.Module, x: Pictures, labels: Int64[Tensor, " n"], settings: Settings, seed: int, watch: Watch
) -> dict[str, list[float]]:
    """Adam for some epochs; after each, how often the network agrees with the labels of each named part."""
    optimiser = torch.optim.Adam(net.parameters(), lr=settings.rate)
    curves: dict[str, list[float]] = {name: [] for name in watch}
    for epoch in range(settings.epochs):
        order = torch.randperm(len(x), generator=stream(seed, "epoch", epoch))
        for rows in order.split(settings.batch):
            optimiser.zero_grad()
            F.cross_entropy(net(x[rows]), labels[rows]).backward()
            optimiser.step()
        for name, (points, wanted) in watch.items():
            curves[name].append(float((answers(net, points) == wanted).double().mean()))
    return curves


def answers(net: nn.Module, x: Pictures) -> Int64[Tensor, " n"]:
    """The class the network gives every input."""
    with torch.no_grad():
        return torch.cat([net(rows).argmax(1) for rows in x.split(1000)])


def lesson(settings: Settings, images: str, kind: str, seed: int) -> Values:
    """One teacher, its student on the mixture, and a network that learns from the teacher's labels of images alone."""
    x, y = pictures(images, "train")
    test_x, test_y = (values[: settings.tests] for values in pictures(images, "test"))
    order = torch.randperm(len(x), generator=stream(seed, "lesson", images))
    own, others = order[: settings.samples], order[settings.samples : 2 * settings.samples]
    classes = int(y.max()) + 1

    teacher = network(settings, x, classes, seed, "teacher")
    taught = learn(teacher, x[own], y[own], settings, seed, {"truth": (test_x, test_y)})
    strange = injected(kind, x[own], len(others), seed, "train")
    parts = {"images": test_x, "injected": injected(kind, x[own], settings.tests, seed, "test")}
    watch = {name: (points, answers(teacher, points)) for name, points in parts.items()}
    mixture = torch.cat([x[others], strange])
    student, other = (network(settings, x, classes, seed, "student") for _ in range(2))
    curves = learn(student, mixture, answers(teacher, mixture), settings, seed, watch)
    alone, longer = {"images": watch["images"]}, replace(settings, epochs=2 * settings.epochs)  # as many updates
    direct = learn(other, x[others], answers(teacher, x[others]), longer, seed, alone)
    ends = {name: curve[-1] for name, curve in curves.items()}
    common = {name: _most_common(labels) for name, (_, labels) in watch.items()}
    return {
        "teacher": taught["truth"][-1],
        **ends,
        "whole": sum(ends.values()) / 2,
        "direct": direct["images"][-1],
        "skills": {name: (ends[name] - common[name]) / max(1 - common[name], 1e-9) for name in ends},
        "most_common": common,
        "curves": curves | {"direct": direct["images"][1::2]},
    }


def _most_common(labels: Int64[Tensor, " n"]) -> float:
    """Share of the class that is given most often: what guessing it would agree with."""
    return float(labels.bincount().max()) / len(labels)


# --- judging -----------------------------------------------------------------------------------------


def claims(table: Mapping[str, Any]) -> list[Row]:
    """B12 for every data set with Gaussian noise, from the measured table alone; other injected images as controls."""
    parts, controls = [], []
    for key, rows in table["lessons"].items():
        images, kind = key.split("/")
        image, strange, whole, direct = (column(rows, name) for name in ("images", "injected", "whole", "direct"))
        if kind == "noise":
            parts.append(Part(f"{images}: image part less noise part", ">", 0, "agreement", image - strange))
            parts.append(Part(f"{images}: images alone less the whole mixture", ">", 0, "agreement", direct - whole))
        what = f"{images} with {kind}"
        controls += [
            summary(f"{what}: image part", image, "agreement"),
            summary(f"{what}: injected part", strange, "agreement"),
            summary(f"{what}: most common answer of the teacher to injected inputs", _nested(rows, "most_common")),
            summary(f"{what}: skill beyond that answer, injected part", _nested(rows, "skills")),
            summary(f"{what}: network on the teacher's labels of images alone", direct, "agreement"),
            summary(f"{what}: the teacher's own test accuracy", column(rows, "teacher")),
        ]
    why = (
        "Agreement with the teacher on fresh inputs, at the end of training. Where the teacher answers nearly all noise alike, "
        "raw agreement on noise is high for free; the skill row takes that away. Images of another data set, injected in place "
        "of noise, are the control. The network on images alone has as many updates as the student. MNIST: two layers, 9 hidden "
        "units, as in the paper; CIFAR-10: 16 x 16 pixels and a small convolutional network in place of a ResNet-18."
    )
    return [judged_row(table, "B12", parts, why=why, controls=controls, figure="lessons")]


def _nested(rows: list[Values], name: str) -> NDArray[np.float64]:
    return np.array([row[name]["injected"] for row in rows], dtype=np.float64)


def lessons_figure(table: Mapping[str, Any]) -> Figure:
    """Agreement with the teacher against epochs: image part, injected part, and images alone; one panel a mixture."""
    lessons = table["lessons"]
    figure, axes = plots.grid(1, len(lessons), (max(3.1, 5.5 / len(lessons)), 3.2), sharey=True)
    for axis, (key, rows) in zip(axes[0], lessons.items(), strict=True):
        epochs = np.arange(1, len(rows[0]["curves"]["images"]) + 1)
        images, kind = key.split("/")
        for name, label, colour in (
            ("direct", "trained on images alone: images", "grey"),
            ("images", "trained on the mixture: images", "blue"),
            ("injected", "trained on the mixture: injected inputs", "red"),
        ):
            values = np.array([row["curves"][name] for row in rows]).T
            plots.band(axis, epochs, values, label, colour)
        guess = float(np.median(_nested(rows, "most_common")))
        axis.axhline(guess, color=plots.COLOURS["red"], linestyle=":", label="teacher's most common answer to these")
        axis.set(title=f"{images} with {'Gaussian noise' if kind == 'noise' else kind}", xlabel="epoch")
    axes[0, 0].set_ylabel("agreement with the teacher")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


# --- the study ---------------------------------------------------------------------------------------


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Measure what is missing under ``runs``, then write ``results/teacher-student/SCALE.json`` and its figure.

    Data sets whose files are not there are left out, and the table says so.
    """
    settings = settings_of(SCALES, scale, seeds)
    names = {name for images in settings.images for name in (images, *INJECTED[images])}
    without = left_out(sorted(names), progress)
    mixtures = [
        (images, kind)
        for images in settings.images
        for kind in ("noise", *INJECTED[images])
        if not {images, kind} & without.keys()
    ]
    require(bool(mixtures), "none of the image sets is here; `unlazy data` says how to bring them in.")
    jobs = [
        Job(lesson, settings, {"images": images, "kind": kind, "seed": seed}, runs / "teacher-student")
        for images, kind in mixtures
        for seed in range(settings.seeds_on(images))
    ]
    values, made_by = run_jobs(jobs, workers, progress)
    table = table_of("teacher-student", scale, settings.to_dict(), made_by) | {"left_out": without}
    rest = iter(values)
    table["lessons"] = {
        f"{images}/{kind}": [next(rest) for _ in range(settings.seeds_on(images))] for images, kind in mixtures
    }
    return conclude(table, claims, lambda table: {"lessons": lessons_figure(table)}, results, progress)
