"""Do weights on MNIST 0/1, and on CIFAR-10, gather into two directions? (Figure 3; B11).

A small network learns two classes of images by full-gradient descent. There are two clusters if nearly all weight vectors lie
near one axis within the first steps, some on either side of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.data.images import load_images
from unlazy.models.truncated import Phase, TruncatedNet, train
from unlazy.runtime import stream
from unlazy.studies.emergence.common import accuracy
from unlazy.studies.study import Case, Figure, Results, Study, Work, make_cases, require_at_least_one
from unlazy.studies.table import Rows

STARTS = {"small": 0.01, "default": 3**-0.5}
"""Typical length of a starting weight vector; ``default`` is PyTorch's own."""


@dataclass(frozen=True)
class Settings:
    """``steps`` of full-gradient descent at ``rate`` on the hinge loss; ``looks``: after which steps weights are measured."""

    images: tuple[str, ...] = ("mnist", "cifar-10")
    samples: int = 1_000
    tests: int = 500
    pairs: int = 25
    rate: float = 1.0
    steps: int = 20
    looks: tuple[int, ...] = (0, 1, 2, 5, 10, 20)

    def __post_init__(self) -> None:
        require_at_least_one(self, "samples", "tests", "pairs", "steps")


SCALES = {
    "smoke": Settings(images=("digits",), samples=100, tests=50, pairs=5, steps=4, looks=(0, 1, 4)),
    "desk": Settings(),
    "paper": Settings(),
}


def cases(settings: Settings, seeds: Sequence[int]) -> list[Case]:
    """Every image set, start and kind of labels with every seed. With shuffled labels there is nothing to learn: a control."""
    varied = product(settings.images, STARTS, ("true", "shuffled"), seeds)
    names = ("images", "start", "labels", "seed")
    return make_cases([dict(zip(names, place, strict=True)) for place in varied], settings)


# --- measuring ---------------------------------------------------------------------------------------

CLOSE = 0.9  # a weight vector belongs to a cluster when its cosine with the axis exceeds this


@cache
def load_two_classes(
    name: str, split: str, samples: int, count: int
) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
    """Images of classes 0 (-1) and 1 (+1), centred and divided by the total standard deviation of the training rows used.

    ``samples``: how many training rows are used; ``count``: how many rows of the test split.
    """
    rows = {"train": samples, "test": count}
    parts = {}
    for part in ("train", split):
        images = load_images(name, part)
        images = images.take(torch.nonzero(images.labels < 2)[: rows[part], 0])
        parts[part] = (images.flat().to(torch.float64), 2 * images.labels.to(torch.float64) - 1)
    mean = parts["train"][0].mean(0)
    total = float((parts["train"][0] - mean).square().sum(1).mean().sqrt())
    x, y = parts[split]
    return (x - mean) / total, y


def gaussian_start(inputs: int, units: int, length: float, seed: int) -> TruncatedNet:
    """Independent Gaussian weights of about this length, no biases, outer weights of about 1 / sqrt(units)."""
    generator = stream(seed, "plain start")
    w = torch.randn(units, inputs, generator=generator, dtype=torch.float64) * length / inputs**0.5
    a = torch.randn(units, generator=generator, dtype=torch.float64) / units**0.5
    return TruncatedNet(w, torch.zeros(units, dtype=torch.float64), a)


def axis_concentration(w: Float[Tensor, "units d"]) -> tuple[float, float, Float[Tensor, " units"]]:
    """How far weight vectors gather on one axis, the leading singular vector of their directions.

    Returns the share of them with a cosine above ``CLOSE`` in size, the share on the axis' emptier side, and all cosines.
    """
    units = w / w.norm(dim=1, keepdim=True).clamp_min(1e-300)
    cosines = units @ torch.linalg.svd(units, full_matrices=False).Vh[0]
    close = cosines[cosines.abs() > CLOSE]
    smaller = float((close > 0).sum().minimum((close < 0).sum())) / len(cosines)
    return len(close) / len(cosines), smaller, cosines


def measure(case: Case, work: Work) -> Rows:
    """One training: how near the weight vectors are to a common axis after some steps, and the test accuracy at the end."""
    found = Rows()
    x, y = load_two_classes(case.images, "train", case.samples, case.tests)
    if case.labels == "shuffled":
        y = y[torch.randperm(len(y), generator=stream(case.seed, "shuffled labels"))]
    rows = (x, y, torch.full_like(y, 1 / len(y)))

    def watch(step: int, net: TruncatedNet) -> None:
        if step in case.looks:
            gathered, smaller, cosines = axis_concentration(net.w)
            shares = {"near_axis": gathered, "emptier_side": smaller, "cosine_median": float(cosines.abs().median())}
            found.add_all(shares, at=step)
            found.add("cosine", [round(value, 4) for value in cosines.tolist()], neuron=range(len(cosines)), at=step)

    net = gaussian_start(x.shape[1], 2 * case.pairs, STARTS[case.start], case.seed)
    net = train(net, (Phase(case.steps, case.rate),), lambda _: rows, watch)
    test_x, test_y = load_two_classes(case.images, "test", case.samples, case.tests)
    found.add("accuracy", accuracy(net(test_x), test_y), at="end")
    return found


# --- claims ------------------------------------------------------------------------------------------

GATHERED = 0.9  # B11: nearly all weight vectors are near the axis
BOTH_SIDES = 0.1  # B11: and neither side of it is empty
LAST = 20  # the last measured step


def quantity_of(quantity: str, at: int | str, images: str, start: str, labels: str = "true") -> Quantity:
    """A quantity of the trainings on these images, from this start, with these labels."""
    return Quantity(quantity, at, images=images, start=start, labels=labels)


def share_at_end(what: str, images: str, start: str) -> tuple[str, Quantity]:
    """A share of the weight vectors at the last step, as a sentence and a quantity."""
    words = {"near_axis": "share near the axis", "emptier_side": "share on its emptier side"}[what]
    return f"{images}, {start} start, step {LAST}: {words}", quantity_of(what, LAST, images, start)


def shown_numbers(images: str, start: str) -> list[Shown]:
    """Numbers that help to read the verdict on these images from this start."""
    what, shuffled = f"{images}, {start} start", quantity_of("near_axis", LAST, images, start, "shuffled")
    return [
        Shown(f"{what}: share near the axis at step 0", quantity_of("near_axis", 0, images, start)),
        Shown(f"{what}, step {LAST}, shuffled labels: share near the axis", shuffled),
        Shown(
            f"{what}, step {LAST}: median cosine with the axis, in size",
            quantity_of("cosine_median", LAST, images, start),
        ),
        Shown(f"{what}: test accuracy", quantity_of("accuracy", "end", images, start)),
    ]


CLAIMS = (
    Claim(
        "B11",
        says=(
            "The first-layer weights of a two-layer network trained to tell MNIST digits 0 and 1 apart gather "
            "into two clusters of direction within the first steps."
        ),
        where="Fig. 3",
        paper="two clusters; no number",
        figure="cosines",
        parts=[
            Part(*share_at_end(what, "mnist", start), above=least)
            for start in STARTS  # the paper does not say how long its start is
            for what, least in (("near_axis", GATHERED), ("emptier_side", BOTH_SIDES))
        ],
        shows=[
            *(shown for start in STARTS for shown in shown_numbers("mnist", start)),
            *(
                Shown(*share_at_end(what, "cifar-10", start))
                for start in STARTS
                for what in ("near_axis", "emptier_side")
            ),
            *(shown for start in STARTS for shown in shown_numbers("cifar-10", start)),
        ],
    ),
)


# --- figure ------------------------------------------------------------------------------------------


def cosines_figure(results: Results) -> plots.Figure:
    """Cosines of weight vectors with their common axis over the first steps, with true and with shuffled labels."""
    table, looks = results.table.where(quantity="cosine"), results.settings.looks
    shown = [looks[0], looks[len(looks) // 2], looks[-1]]
    lines = [(images, start) for images in table.unique("images") for start in STARTS]
    figure, axes = plots.grid(len(lines), len(shown), (2.9, 1.7), sharex=True, sharey=True)
    edges = np.linspace(-1, 1, 41).tolist()
    for line, (images, start) in zip(axes, lines, strict=True):
        for axis, step in zip(line, shown, strict=True):
            for labels, colour in (("shuffled", "orange"), ("true", "blue")):
                values = table.where(images=images, start=start, labels=labels, at=step).values
                share = np.full(len(values), 1 / len(values))
                style = {"color": plots.COLOURS[colour], "alpha": 0.55, "label": f"{labels} labels"}
                axis.hist(values, edges, weights=share, **style)
            axis.set_title(f"{images}, {start} start, step {step}")
        line[0].set_ylabel("share of neurons")
    for axis in axes[-1]:
        axis.set_xlabel("cosine with the axis")
    axes[0, 0].legend(loc="upper left")
    return figure


STUDY = Study(
    name="clusters",
    paper="emergence",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 5, "paper": 10},
    columns=("images", "start", "labels"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("cosines", "Do weight vectors gather on one axis? (Figure 3)", cosines_figure),),
)
