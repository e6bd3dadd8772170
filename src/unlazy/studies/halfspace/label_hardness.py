"""How many paths easy classes have, against how hard the other classes turn out to be: a dose-response (C16b).

C16 compares one way of making half of the classes hard, and in our reconstruction that half ends as well learned as the easy
one. Here the labels are made hard in five doses: the hard classes are cut into 5 or 25 clusters with shuffled labels, or a
quarter, half or all of their labels are drawn by lot. Every network is trained twice from the same start, with easy and hard
classes exchanged, and numbers are means over the two, so that they are due to the labels and not to the images. At dose zero
both networks are the same and every number is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.data.dataset import Dataset
from unlazy.data.images import Images, load_images
from unlazy.data.relabelling import Cut, Groups, Relabelling, cut_classes, redraw_labels, relabel
from unlazy.models.gates import SoftGate
from unlazy.models.spec import Init, NetSpec, relu_spec
from unlazy.store import Run
from unlazy.studies.halfspace.fashion import FIRST_HALF, SECOND_HALF, on_test, on_train
from unlazy.studies.halfspace.fashion_effects import CLASSES, mean_over
from unlazy.studies.ranks import rank_correlation
from unlazy.studies.study import Figure, Results, Study, Work, require_at_least_one, require_known
from unlazy.studies.table import Rows
from unlazy.studies.trainings import Training
from unlazy.training.ensemble import Member
from unlazy.training.fit import Recipe
from unlazy.training.recorder import FixedSteps, Measure

Array = NDArray[np.float64]

# --- what varies ---------------------------------------------------------------------------------------------

NETS = {"relu": "ReLU net", "pwc": "DLGN"}
EASY_HALVES = (FIRST_HALF, SECOND_HALF)


@dataclass(frozen=True)
class Dose:
    """How the labels of the hard classes are made hard: shuffled labels of clusters, or a share drawn by lot."""

    clusters: int = 1
    share: float = 0.0


DOSES = {
    "5 clusters": Dose(clusters=5),  # the paper's number
    "25 clusters": Dose(clusters=25),
    "quarter by lot": Dose(share=0.25),
    "half by lot": Dose(share=0.5),
    "all by lot": Dose(share=1.0),
}


@dataclass(frozen=True)
class Setup:
    """One kind of network on one data set. ``longer``: how many times as long it is trained as the paper's set-up."""

    label: str
    data: str = "fashion-mnist"
    width: int = 128
    start: str = "torch"
    beta: float = 4.0
    nets: tuple[str, ...] = tuple(NETS)
    longer: int = 1


SETUPS = {
    "paper": Setup("width 128, small start, beta 4"),
    "large start": Setup("large start", start="he"),
    "steep": Setup("beta 30", beta=30.0, nets=("pwc",)),
    "narrow": Setup("width 32, five times as long", width=32, longer=5),
    "cifar-10": Setup("CIFAR-10, width 32, twice as long", data="cifar-10", width=32, longer=2),
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """Images and training of a scale. ``data``: another data set than the set-up's, ``width``: another width."""

    images: int
    test_images: int
    epochs: int
    data: str | None = None
    width: int | None = None
    depth: int = 5
    batch: int = 32
    lr: float = 2e-4
    restarts: int = 3


@dataclass(frozen=True, kw_only=True)
class Settings(Size):
    """One scale of the study."""

    setups: tuple[str, ...] = tuple(SETUPS)

    def __post_init__(self) -> None:
        require_at_least_one(self, "images", "test_images", "epochs")
        require_known("setups", self.setups, SETUPS)


SCALES = {
    # seconds, on digits: shows that the study runs; no claim is judged
    "smoke": Settings(
        images=600, test_images=200, epochs=1, data="digits", width=8, depth=2, lr=3e-3, setups=("paper", "steep")
    ),
    # a quarter of an hour on one core; the first 6000 images of each data set
    "desk": Settings(images=6000, test_images=1000, epochs=8),
}


# --- cases ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DoseStack(Size):
    """One case: all doses, both choices of the easy half, and all seeds of one network, trained as one stack."""

    setup: str
    net: str
    seeds: tuple[int, ...]

    def members(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Dose, easy classes and seed of every member; all members of a seed have the same start and batches."""
        return [(dose, easy, seed) for dose in DOSES for easy in EASY_HALVES for seed in self.seeds]

    def steps_per_epoch(self) -> int:
        """Optimiser steps in one epoch."""
        return -(-self.images // self.batch)

    def recipe(self, inputs: int) -> Recipe:
        """The network and how it is trained; ``inputs``: numbers in an image."""
        setup = SETUPS[self.setup]
        choices: dict[str, Any] = {"width": self.width or setup.width, "depth": self.depth, "init": Init(setup.start)}
        if self.net == "relu":
            spec = relu_spec(inputs, CLASSES, **choices)
        else:
            gate = SoftGate(setup.beta)
            spec = NetSpec(inputs, CLASSES, experts="constant", constant_input="one", gate=gate, **choices)
        members = tuple(Member(seed, self.lr) for _, _, seed in self.members())
        epochs = self.epochs * setup.longer
        return Recipe(spec, members, epochs, self.batch, "cross-entropy", checkpoint_epochs=epochs)

    def training(self, work: Work) -> Training:
        """Test images are measured before training and each time it doubles, training images at the end."""
        images = load_clustered_images(self, work.data)
        train, test = (self.dataset(images, split) for split in ("train", "test"))
        recipe = self.recipe(train.x.shape[1])
        last = recipe.epochs * self.steps_per_epoch()
        often = FixedSteps.at({0, last, *(last >> halvings for halvings in range(1, 6))})
        measures = (Measure(on_test, often, test), Measure(on_train, FixedSteps.at({last})))
        return Training(f"{self.setup}-{self.net}".replace(" ", "-"), recipe, train, measures)

    def dataset(self, images: ClusteredImages, split: str) -> Dataset:
        """Training or test images with the labels of every member. The data set's groups are the original classes."""
        own: Images = getattr(images, split)
        labels = [images.labelled(split, *member).one_hot() for member in self.members()]
        groups = {name: own.labels == label for label, name in enumerate(own.classes)}
        options = {"split": split, "members": [[dose, list(easy), seed] for dose, easy, seed in self.members()]}
        return Dataset(own.name, own.flat(), torch.stack(labels), groups, options)


def cases(settings: Settings, seeds: Sequence[int]) -> list[DoseStack]:
    """One case for every network of every set-up."""
    sizes = {one.name: getattr(settings, one.name) for one in fields(Size)}
    places = [(setup, net) for setup in settings.setups for net in SETUPS[setup].nets]
    return [DoseStack(setup=setup, net=net, seeds=tuple(seeds), **sizes) for setup, net in places]


# --- images --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusteredImages:
    """Images and the clusters of every class, by their number."""

    train: Images
    test: Images
    groups: dict[int, Groups]

    def labelled(self, split: str, dose: str, easy: tuple[int, ...], seed: int) -> Images:
        """The images of a split with the labels of a dose."""
        images, relabelling, chosen = getattr(self, split), Relabelling(easy, seed=seed), DOSES[dose]
        if chosen.share:
            return redraw_labels(images, relabelling.hard(CLASSES), chosen.share, seed)
        return relabel(images, getattr(self.groups[chosen.clusters], split), relabelling, chosen.clusters)


def load_clustered_images(size: DoseStack, folder: Path | None) -> ClusteredImages:
    """The first images of each split of a case's data set, with every class cut into clusters."""
    return _load(size.data or SETUPS[size.setup].data, size.images, size.test_images, size.restarts, folder)


@cache
def _load(data: str, images: int, test_images: int, restarts: int, folder: Path | None) -> ClusteredImages:
    train = load_images(data, "train", folder).take(slice(images))
    test = load_images(data, "test", folder).take(slice(test_images))
    counts = sorted({dose.clusters for dose in DOSES.values() if not dose.share})
    cuts = {count: cut_classes(train, test, Cut(groups=count, restarts=restarts)) for count in counts}
    return ClusteredImages(train, test, cuts)


# --- how a case is measured ----------------------------------------------------------------------------------


def measure(case: DoseStack, work: Work) -> Rows:
    """Allocation of paths and hardness, by dose and step; both are means over the two choices of the easy half.

    ``allocation``: mean log of the active paths on the easy classes less that on the hard ones. ``hardness``: test accuracy
    on the easy classes less that on the hard ones, each against the labels that the network was given. ``accuracy``: of each
    half at the end. ``rank_correlation``: of allocation and hardness over the doses at the end, and over doses and all
    measurements after the start (``at=all``).
    """
    run, rows = case.training(work).run(work), Rows()
    steps = run.array_steps("test_accuracy")
    seeds, doses = list(case.seeds), list(DOSES)
    paths = read_halves(case, run, "test_paths", steps, logs=True)  # easy and hard: [2, T, doses, seeds]
    accuracy = read_halves(case, run, "test_accuracy", steps)
    allocation, hardness = (values[0] - values[1] for values in (paths, accuracy))
    for name, values in (("allocation", allocation), ("hardness", hardness)):
        rows.add(name, values, at=steps, dose=doses, seed=seeds)
        rows.add(name, values[-1], at="end", dose=doses, seed=seeds)
    rows.add("accuracy", accuracy[:, -1], half=("easy", "hard"), split="test", dose=doses, seed=seeds)
    trained = read_halves(case, run, "train_accuracy", steps[-1:])[:, -1]
    rows.add("accuracy", trained, half=("easy", "hard"), split="train", dose=doses, seed=seeds)
    for at, first in (("end", len(steps) - 1), ("all", 1)):
        found = [
            rank_correlation(allocation[first:, :, s].ravel(), hardness[first:, :, s].ravel())
            for s in range(len(seeds))
        ]
        rows.add("rank_correlation", found, at=at, seed=seeds)
    return rows


def read_halves(case: DoseStack, run: Run, name: str, steps: Sequence[int], logs: bool = False) -> Array:
    """Means over the easy and over the hard classes of a quantity, or of its logarithm, ``[2, T, doses, seeds]``.

    Means over the two choices of the easy half.
    """
    values = np.array([run.array(name, step) for step in steps], dtype=np.float64)  # [T, members, classes]
    if logs:
        values = np.log(np.maximum(values, np.finfo(np.float64).tiny))
    easy = np.array([[label in classes for label in range(CLASSES)] for _, classes, _ in case.members()])
    halves = np.stack([mean_over(inside, values) for inside in (easy, ~easy)])
    return halves.reshape(2, len(steps), len(DOSES), len(EASY_HALVES), len(case.seeds)).mean(3)


# --- what is claimed -----------------------------------------------------------------------------------------

CLEAR = 0.5  # a rank correlation that counts as a dose-response
FULL_DOSE, PAPER_DOSE = "all by lot", "5 clusters"
LOG_RATIO = "log ratio"


def label(setup: str, net: str) -> str:
    """The name of a network in parts and shown numbers."""
    return f"{NETS[net]}, {SETUPS[setup].label}"


def parts(setup: str) -> Iterator[Part]:
    """Three parts for each network: paths at the full dose; the order of the doses at the end; that of all moments."""
    for net in SETUPS[setup].nets:
        where, name = {"setup": setup, "net": net}, label(setup, net)
        full = Quantity("allocation", "end", dose=FULL_DOSE, **where)
        yield Part(f"{name}: paths on easy over hard classes, all hard labels by lot", full, above=0, unit=LOG_RATIO)
        words = f"{name}: rank correlation of allocation and hardness"
        yield Part(f"{words} over doses, at the end", Quantity("rank_correlation", "end", **where), above=CLEAR)
        yield Part(f"{words} over doses and moments", Quantity("rank_correlation", "all", **where), above=CLEAR)


def shown() -> Iterator[Shown]:
    """Allocation and hardness of every network at every dose."""
    for setup, choice in SETUPS.items():
        for net in choice.nets:
            for dose in DOSES:
                name, where = f"{label(setup, net)}, {dose}", {"setup": setup, "net": net, "dose": dose}
                yield Shown(f"{name}: paths on easy over hard", Quantity("allocation", "end", **where), unit=LOG_RATIO)
                yield Shown(f"{name}: hardness reached", Quantity("hardness", "end", **where))


CLAIMS = (
    Claim(
        "C16b",
        says=(
            "The harder the labels of half of the classes turn out (test accuracy on the easy less that on the hard half), the "
            "more active paths the easy half has, with the images held fixed by exchanging the halves."
        ),
        where="what Figs 7, 11, 12 suggest",
        paper="our reading; no number",
        figure="doses",
        parts=[*parts("paper")],
        controls=[part for setup in SETUPS if setup != "paper" for part in parts(setup)],
        shows=[*shown()],
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------

COLOURS = dict(zip(DOSES, ("blue", "sky", "green", "orange", "red"), strict=True))


def draw_doses(results: Results) -> plots.Figure:
    """Log ratio of active paths, easy over hard classes, against how much harder the hard classes are at that moment (test
    accuracy on easy less hard). One line a dose, from the first measurement after the start to the end (large dots); medians
    over seeds, bars from the least to the greatest seed. Every number is the mean of two networks with the halves exchanged;
    dose zero is the origin.
    """
    setups = results.settings.setups
    figure, axes = plots.grid(len(NETS), len(setups), (2.9, 2.7), sharex=True)
    for row, net in enumerate(NETS):
        for axis, setup in zip(axes[row], setups, strict=True):
            axis.set_title(label(setup, net).replace(", ", ",\n", 1), fontsize=8)
            axis.axhline(0, color=plots.COLOURS["grey"], linewidth=0.7)
            if net not in SETUPS[setup].nets:
                axis.set_axis_off()
                continue
            for dose, colour in COLOURS.items():
                where = {"setup": setup, "net": net, "dose": dose}
                _, height = results.table.series("allocation", seeds=results.seeds, **where)
                _, place = results.table.series("hardness", seeds=results.seeds, **where)
                x, y = np.median(place, axis=1)[1:], np.median(height, axis=1)[1:]
                axis.plot(x, y, "-", color=plots.COLOURS[colour], linewidth=1, marker=".", markersize=3, label=dose)
                around = [[y[-1] - height[-1].min()], [height[-1].max() - y[-1]]]
                axis.errorbar(x[-1], y[-1], yerr=around, fmt="o", markersize=5, color=plots.COLOURS[colour])
    for axis in axes[-1]:
        axis.set_xlabel("accuracy, easy less hard")
    for line in axes:
        line[0].set_ylabel("log paths, easy less hard")
    plots.shared_legend(figure, len(DOSES))
    return figure


STUDY = Study(
    name="label-hardness",
    paper="half-space",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 4},
    columns=("setup", "net"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("doses", "Active paths against the hardness reached", draw_doses),),
)
