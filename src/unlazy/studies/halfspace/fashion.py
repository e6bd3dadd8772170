"""Do paths gather on easily labelled classes of Fashion-MNIST, or on certain images? (Figures 7, 11-16; C16-C19).

Five classes keep their labels (easy), the other five are cut into groups with shuffled labels (hard). The claims are about
networks trained on these labels. Networks with easy and hard classes exchanged show whether the *labels* are the reason.

The paper gives the images, the sizes, Adam, its rate and the nets; batch 32 and 30 epochs follow from the names of its result
files. It does not say whether the nets have biases, but its one surviving heat map does: before training all class means of the
tangent kernel lie within a percent of each other. Nets with PyTorch's default biases show this, because the gradients of biases
are the same for all images; nets without biases do not. So the variant ``main`` has biases, and ``bias-free`` has the networks of
the theory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unlazy import plots
from unlazy.claims.claim import Claim, Function, Part, Quantity, Shown
from unlazy.claims.functions import difference, ratio
from unlazy.claims.rule import interval
from unlazy.data.dataset import Dataset
from unlazy.data.images import FASHION_CLASSES, Images, load_images
from unlazy.data.relabelling import Cut, Groups, Relabelling, cut_classes, random_splits, relabel
from unlazy.models.gates import SoftGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec, relu_spec
from unlazy.probes.classes import class_curves, class_kernels
from unlazy.runtime import require
from unlazy.studies.halfspace.fashion_effects import (
    CLASSES,
    HALVES,
    KERNELS,
    MIDDLE_ACCURACY,
    MOMENTS,
    Array,
    add_class_kernels,
    add_curves,
    add_effects,
    add_halves,
    read_series,
)
from unlazy.studies.study import Figure, Results, Study, Work, require_at_least_one, require_known
from unlazy.studies.table import Rows, Table
from unlazy.studies.trainings import Training
from unlazy.training.ensemble import Member
from unlazy.training.fit import Recipe
from unlazy.training.recorder import FixedSteps, Measure

# --- what varies ---------------------------------------------------------------------------------------------

FIRST_HALF, SECOND_HALF = (0, 1, 2, 3, 4), (5, 6, 7, 8, 9)  # clothes; shoes, bag and shirt
NETS = {"relu": "ReLU net", "pwc": "DLGN, constant experts, beta 4"}
LABELLED_SEEDS = 10  # at most, for all variants but the random splits


@dataclass(frozen=True)
class Variant:
    """One way to train the networks. ``labels``: kinds of labels, see :class:`Task`; every seed is trained on each."""

    label: str
    labels: tuple[str, ...] = ("modified", "swapped")
    nets: tuple[str, ...] = tuple(NETS)
    biases: bool = True
    standardised: bool = False
    constant_input: str = "one"

    @property
    def seeds(self) -> int | None:
        """The largest number of seeds; ``None``: as many as the scale has."""
        return None if "split" in self.labels else LABELLED_SEEDS


VARIANTS = {
    "main": Variant("main set-up", labels=("modified", "swapped", "original", "noise")),
    "bias-free": Variant("no biases", biases=False),
    "standardised": Variant("standardised inputs", standardised=True),
    # The all-ones value input of the paper: under Adam its 784 weights move the value 784 times as fast as one constant does.
    "ones": Variant("all-ones value input", nets=("pwc",), constant_input="ones"),
    "splits": Variant("random splits", labels=("split", "mirror")),
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """Images and networks of a scale. ``kernel_images``: how many test images of each class the kernels are computed on."""

    data: str = "fashion-mnist"
    images: int
    test_images: int
    kernel_images: int = 50
    restarts: int = 10
    width: int = 128
    depth: int = 5
    batch: int = 32
    lr: float = 2e-4
    beta: float = 4.0


@dataclass(frozen=True, kw_only=True)
class Settings(Size):
    """One scale of the study. ``split_epochs``: epochs of the variant with random splits."""

    epochs: int
    split_epochs: int
    variants: tuple[str, ...] = tuple(VARIANTS)

    def __post_init__(self) -> None:
        require_at_least_one(self, "images", "test_images", "epochs", "split_epochs", "kernel_images", "restarts")
        require_known("variants", self.variants, VARIANTS)


SCALES = {
    # seconds, on digits: shows that the study runs; no claim is judged
    "smoke": Settings(
        data="digits",
        images=400,
        test_images=200,
        epochs=2,
        split_epochs=1,
        kernel_images=4,
        restarts=1,
        width=12,
        depth=3,
        lr=3e-3,
    ),
    # under two minutes on two cores: too few images, epochs and seeds to judge anything
    "desk": Settings(
        images=6000,
        test_images=1000,
        epochs=3,
        split_epochs=2,
        kernel_images=20,
        restarts=2,
        variants=("main", "bias-free", "splits"),
    ),
    # the paper's size, ten seeds instead of three: minutes on one GPU, most of a day on a CPU
    "paper": Settings(images=60_000, test_images=10_000, epochs=30, split_epochs=10),
}


# --- cases ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What one member of a stack learns: which classes are easy, and how the hard classes are cut into groups.

    ``labels``: ``modified`` (first half easy), ``swapped`` (second half easy), ``noise`` (as modified, but the groups are random,
    so that the hard half cannot be learned), ``original`` (all classes keep their labels; ``easy`` only names a half),
    ``split`` and ``mirror`` (a random half easy, and its complement).
    """

    labels: str
    easy: tuple[int, ...]
    seed: int

    @property
    def cut(self) -> str:
        """How the hard classes are cut into groups."""
        return "random" if self.labels == "noise" else "k-means"

    def relabelling(self) -> Relabelling:
        """Which classes keep their labels, and the seed of the shuffled ones."""
        return Relabelling(tuple(range(CLASSES)) if self.labels == "original" else self.easy, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class Stack(Size):
    """One case: all labels and seeds of one network under one variant."""

    variant: str
    net: str
    seeds: tuple[int, ...]
    epochs: int

    def tasks(self) -> list[Task]:
        """What each member learns. All tasks of a seed start from the same parameters and see batches in the same order."""
        kinds = VARIANTS[self.variant].labels
        if "split" not in kinds:
            easy = {kind: SECOND_HALF if kind == "swapped" else FIRST_HALF for kind in kinds}
            return [Task(kind, easy[kind], seed) for kind in kinds for seed in self.seeds]
        splits, found = random_splits(max(self.seeds) + 1, CLASSES), []
        for seed in self.seeds:
            others = tuple(label for label in range(CLASSES) if label not in splits[seed])
            found += [Task("split", splits[seed], seed), Task("mirror", others, seed)]
        return found

    def steps_per_epoch(self) -> int:
        """Optimiser steps in one epoch."""
        return -(-self.images // self.batch)

    def recipe(self, inputs: int, device: str = "cpu") -> Recipe:
        """The network and how it is trained; ``inputs``: pixels of an image."""
        variant = VARIANTS[self.variant]
        biases = {"gate_bias": variant.biases, "value_bias": variant.biases}
        choices: dict[str, Any] = {"width": self.width, "depth": self.depth, **biases}
        if self.net == "relu":
            spec = relu_spec(inputs, CLASSES, **choices)
        else:
            choices |= {"constant_input": variant.constant_input, "gate": SoftGate(self.beta)}
            spec = NetSpec(inputs, CLASSES, experts="constant", **choices)
        return Recipe(
            spec,
            tuple(Member(task.seed, self.lr) for task in self.tasks()),
            epochs=self.epochs,
            batch=self.batch,
            loss="cross-entropy",
            device=device,
            checkpoint_epochs=10,
        )

    def measured_steps(self) -> FixedSteps:
        """When to measure: in the first epoch three times per doubling of the steps, later after whole epochs."""
        unit = self.steps_per_epoch()
        early = {step for step in (round(16 * 2 ** (third / 3)) for third in range(60)) if step < unit}
        whole = {epoch * unit for epoch in (*range(1, 11), 15, 20, 25, 30) if epoch <= self.epochs}
        return FixedSteps.at({0, self.epochs * unit} | early | whole)

    def training(self, work: Work) -> Training:
        """Test images and kernels are measured often, training images at the end; random splits have fewer kernels."""
        images = load_grouped_images(self.data, self.images, self.test_images, self.restarts, work.data)
        data, test = (images.dataset(self, split) for split in ("train", "test"))
        often, last = self.measured_steps(), self.epochs * self.steps_per_epoch()
        kernels = FixedSteps.at((0, last)) if self.variant == "splits" else often
        measures = (
            Measure(on_test, often, test),
            Measure(on_train, FixedSteps.at({last})),
            Measure(class_kernels, kernels, first_of_each_class(test, self.kernel_images)),
        )
        return Training(f"{self.variant}-{self.net}", self.recipe(data.x.shape[1], work.device), data, measures)


def cases(settings: Settings, seeds: Sequence[int]) -> list[Stack]:
    """One case for every network under every variant; only random splits have more than ten seeds."""
    sizes = {one.name: getattr(settings, one.name) for one in fields(Size)}
    return [
        Stack(
            variant=name,
            net=net,
            seeds=tuple(seeds[: VARIANTS[name].seeds]),
            epochs=settings.split_epochs if name == "splits" else settings.epochs,
            **sizes,
        )
        for name in settings.variants
        for net in VARIANTS[name].nets
    ]


# --- images --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupedImages:
    """The images of one scale, and the groups into which each kind of cut divides their classes."""

    train: Images
    test: Images
    groups: Mapping[str, Groups]

    def dataset(self, stack: Stack, split: str) -> Dataset:
        """Training or test images with the labels of every member. The data set's groups are the original classes."""
        images, tasks, standardised = getattr(self, split), stack.tasks(), VARIANTS[stack.variant].standardised
        labelled = [relabel(images, getattr(self.groups[task.cut], split), task.relabelling()) for task in tasks]
        groups = {name: images.labels == label for label, name in enumerate(images.classes)}
        options: dict[str, Any] = {"split": split, "standardised": standardised}
        options["tasks"] = [[task.labels, list(task.easy), task.seed] for task in tasks]
        y = torch.stack([one.one_hot() for one in labelled])
        return Dataset(images.name, images.flat(standardised), y, groups, options)


@cache
def load_grouped_images(
    data: str, images: int, test_images: int, restarts: int, folder: Path | None = None
) -> GroupedImages:
    """The first images of each split, with every class cut into groups."""
    train = load_images(data, "train", folder).take(slice(images))
    test = load_images(data, "test", folder).take(slice(test_images))
    found, wanted = (len(train), len(test)), (images, test_images)
    require(found == wanted, f"{data} has {found} training and test images, {wanted} are wanted.")
    cuts = (Cut(restarts=restarts), Cut(how="random"))
    return GroupedImages(train, test, {cut.how: cut_classes(train, test, cut) for cut in cuts})


def first_of_each_class(test: Dataset, count: int) -> Dataset:
    """The first ``count`` images of every class, class by class."""
    return test.take(torch.cat([inside.nonzero()[:count, 0] for inside in test.groups.values()]))


# --- how a case is measured ----------------------------------------------------------------------------------


def on_test(model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
    """Class curves of the test images."""
    return {f"test_{name}": value for name, value in class_curves(model, batch).items()}


def on_train(model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
    """Accuracies on the training images."""
    curves = class_curves(model, batch)
    return {f"train_{name}": curves[name] for name in ("accuracy", "accuracy_hard_gates")}


def measure(stack: Stack, work: Work) -> Rows:
    """Train the stack to its end; measure easy against hard classes, label effects and, for the main variant, curves."""
    tasks, rows = stack.tasks(), Rows()
    members = [{"labels": task.labels, "seed": task.seed} for task in tasks]
    easy = np.array([[c in task.easy for c in range(CLASSES)] for task in tasks])
    series = read_series(stack.training(work).run(work), members, easy, stack.steps_per_epoch())
    add_halves(rows, series)
    add_effects(rows, series)
    if stack.variant == "main":
        add_curves(rows, series)
        add_class_kernels(rows, series)
    return rows


# --- what is claimed -----------------------------------------------------------------------------------------

NEAR_END = 0.8  # C18: "near its final value"; in the paper 72 of 85 %, which is 0.85
UNLEARNED = 0.5  # C18: "mostly unlearned", read as: most hard images are still wrong
NEARLY_CONSTANT = 0.02  # C19: "below about 1 %", read as: within twice that
BLOCKS_VISIBLE = 0.1  # C19: growth of the block contrast, in units of the mean diagonal

JUDGED: dict[str, Any] = {"variant": "main", "labels": "modified", "images": 60_000}  # at the paper scale alone
MIDDLE_POINT, END, BEFORE = ("middle", "at the middle point"), ("end", "at the end"), ("start", "before training")
LOG_RATIO, TIMES = "log ratio", "times"
ONLY_IN_MAIN = ("original",)  # labels that only the main variant has: they select that variant
PAIRS = ("modified", "split")  # labels of the first member of a pair


def parts(what: str, *of: Quantity, by: Function | None = None, **rule: Any) -> list[Part]:
    """The same part for both networks of the main variant, on the modified labels; ``rule`` as in :class:`Part`."""
    found = []
    for net, label in NETS.items():
        placed = tuple(Quantity(one.name, one.at, net=net, **JUDGED, **one.where) for one in of)
        found.append(Part(f"{label}: {what}", placed if by else placed[0], by, seeds=LABELLED_SEEDS, **rule))
    return found


def shown_numbers(what: str, of: Quantity, unit: str = "", among: Sequence[str] = ()) -> Iterator[Shown]:
    """A quantity of every network of the variants that have certain labels: those of ``among``, or the quantity's own."""
    for labels in among or (of.where["labels"],):
        for name, variant in VARIANTS.items():
            for net in variant.nets if labels in variant.labels else ():
                label = NETS[net] if name == "main" else f"{NETS[net]}, {variant.label}"
                quantity = Quantity(of.name, of.at, variant=name, net=net, **of.where)
                yield Shown(f"{label}: {what}", quantity, unit=unit, seeds=variant.seeds)


def shown_beside_c16() -> Iterator[Shown]:
    """Effects of labels and of images on the active paths, and the allocation under other labels."""
    for moment, when in (MIDDLE_POINT, ("first", "after epoch 1"), END):
        of_labels, of_images = (Quantity(f"{one}_effect", moment, effect_on="paths") for one in ("label", "image"))
        yield from shown_numbers(f"label effect {when}: the same class easy over hard", of_labels, LOG_RATIO, PAIRS)
        yield from shown_numbers(f"image effect {when}", of_images, LOG_RATIO, PAIRS[:1])
    for what, name, moment, labels in (
        ("easy and hard swapped, at the end", "allocation", "end", "swapped"),
        ("original labels, clothes over the rest", "allocation", "end", "original"),
        ("hard labels by lot, at the end", "allocation", "end", "noise"),
        ("before training", "allocation", "start", "modified"),
        ("at the end", "allocation", "end", "modified"),
        ("at the end, means of logs", "allocation_of_logs", "end", "modified"),
    ):
        yield from shown_numbers(what, Quantity(name, moment, labels=labels), LOG_RATIO)
    share = Quantity("allocation_share", labels="modified")
    yield from shown_numbers("share of looks from epoch 1 with more on easy", share)
    for labels, said in (("modified", "modified"), ("noise", "hard labels by lot")):
        change = Quantity("gap_less_original", "end", labels=labels)
        yield from shown_numbers(f"{said}, less original labels", change, LOG_RATIO, ONLY_IN_MAIN)


def shown_beside_c17() -> Iterator[Shown]:
    """The tangent diagonal on easy and hard classes under other labels, and effects of labels and of images on it."""
    part = "easy classes' part of the class-averaged diagonal {}, of 100 (paper, ReLU, middle: 72.9)"
    for moment, when in (BEFORE, MIDDLE_POINT, END):
        yield from shown_numbers(f"easy over hard {when}", Quantity("tangent_ratio", moment, labels="modified"), TIMES)
        yield from shown_numbers(part.format(when), Quantity("tangent_easy_sum", moment, labels="modified"))
    for moment, when in (MIDDLE_POINT, END):
        for labels, said in (
            ("swapped", "easy and hard swapped"),
            ("original", "original labels, clothes over the rest"),
        ):
            yield from shown_numbers(f"{said}, {when}", Quantity("tangent_gain", moment, labels=labels), TIMES)
    for one, among in (("label", PAIRS), ("image", PAIRS[:1])):
        effect = Quantity(f"{one}_effect", "end", effect_on="tangent")
        yield from shown_numbers(f"{one} effect at the end", effect, LOG_RATIO, among)


def shown_beside_c18() -> Iterator[Shown]:
    """When the middle point is reached, and accuracies on both halves under all labels."""
    middle = Quantity("epochs_to_middle", labels="modified")
    yield from shown_numbers("middle point (easy test accuracy 72 %)", middle, "epochs")
    for labels, said in (("modified", ""), ("swapped", "swapped, "), ("noise", "hard labels by lot, ")):
        for half in HALVES:
            for moment, when in (("middle", "test at the middle point"), ("end", "test_as_trained at the end")):
                yield from shown_numbers(
                    f"{said}{half} {when}", Quantity("test_accuracy", moment, half=half, labels=labels)
                )
    for half in HALVES:
        for name, said in (("test_accuracy_hard_gates", "test_hard_gates"), ("train_accuracy", "train")):
            yield from shown_numbers(f"{half} {said} at the end", Quantity(name, "end", half=half, labels="modified"))
    for half, said in zip(HALVES, ("clothes", "the rest"), strict=True):
        accuracy = Quantity("test_accuracy", "end", half=half, labels="original")
        yield from shown_numbers(f"original labels, {said}, test at the end", accuracy)


def parts_of_c19(kernel: str) -> list[Part]:
    """The block contrast of a kernel has grown at the middle point and at the end."""
    start = Quantity("contrast", "start", kernel=kernel)
    found = []
    for moment, when in (MIDDLE_POINT, END):
        grown = Quantity("contrast", moment, kernel=kernel), start
        found += parts(
            f"{kernel} kernel, growth of the block contrast {when}", *grown, by=difference, above=BLOCKS_VISIBLE
        )
    return found


def shown_beside_c19(kernel: str) -> Iterator[Shown]:
    """The block contrast of a kernel under all labels, its spread before training, and the contrast that labels make."""
    for what, name, moment, labels, among in (
        ("block contrast at the middle point", "contrast", "middle", "modified", ONLY_IN_MAIN),
        ("block contrast at the end", "contrast", "end", "modified", ONLY_IN_MAIN),
        ("block contrast at the end, original labels", "contrast", "end", "original", ()),
        ("block contrast at the end, easy and hard swapped", "contrast", "end", "swapped", ()),
        ("block contrast before training", "contrast", "start", "modified", ()),
        ("half range of the class means before training", "spread", "start", "modified", ()),
    ):
        yield from shown_numbers(
            f"{kernel} kernel, {what}", Quantity(name, moment, kernel=kernel, labels=labels), "", among
        )
    made = Quantity("contrast_by_labels", "end", kernel=kernel)
    yield from shown_numbers(f"{kernel} kernel, block contrast that the labels of a split make", made, "", PAIRS[1:])


GAIN = "mean tangent diagonal, easy over hard, relative to the start"
HARD_AT_MIDDLE = Quantity("test_accuracy", "middle", half="hard")
CONSTANT = "kernel, half range of the class means over their mean, before training"

CLAIMS = (
    Claim(
        "C16",
        says=(
            "On Fashion-MNIST with five classes kept (easy) and five split into groups with random labels (hard), "
            "a DLGN and a ReLU network have more active paths on the easy than on the hard images throughout "
            "training."
        ),
        where="Figs 7, 11, 12",
        paper="easy / hard ratio above 1 for both networks",
        figure="labels_or_images",
        parts=[
            part
            for what, of in (
                ("least log ratio of mean active paths, easy over hard, epochs 1 to 30", Quantity("allocation_least")),
                ("at the middle point", Quantity("allocation", "middle")),
                ("at the end", Quantity("allocation", "end")),
            )
            for part in parts(what, of, above=0, unit=LOG_RATIO)
        ],
        shows=[*shown_beside_c16()],
    ),
    Claim(
        "C17",
        says=(
            "On the same relabelled Fashion-MNIST the mean diagonal of the tangent kernel becomes larger on the "
            "easy images than on the hard ones."
        ),
        where="Fig. 7 middle",
        paper="ratio above 1 (2.7 for ReLU in mid-training)",
        figure="fig07_11_12_halves",
        parts=[
            *parts(f"{GAIN}, at the middle point", Quantity("tangent_gain", "middle"), above=1, unit=TIMES),
            *parts(f"{GAIN}, at the end", Quantity("tangent_gain", "end"), above=1, unit=TIMES),
        ],
        shows=[*shown_beside_c17()],
    ),
    Claim(
        "C18",
        says=(
            "On the same relabelled Fashion-MNIST the accuracy on the easy classes rises first: it is near its "
            "final value while the hard classes are still mostly unlearned."
        ),
        where="Sec. 5.1, appendix",
        paper="easy about 72 % in mid-training, about 85 % at the end",
        figure="fig07_11_12_halves",
        parts=[
            *parts(
                "easy test accuracy at the middle point, as a share of its end value",
                *(Quantity("test_accuracy", moment, half="easy") for moment in ("middle", "end")),
                by=ratio,
                above=NEAR_END,
            ),
            *parts("hard test accuracy at the middle point", HARD_AT_MIDDLE, below=UNLEARNED),
            *parts(
                "time to 80 % of the final accuracy, hard over easy",
                *(Quantity("epochs_to_learn", half=half) for half in ("hard", "easy")),
                by=ratio,
                above=1,
                unit=TIMES,
            ),
        ],
        shows=[*shown_beside_c18()],
    ),
    Claim(
        "C19",
        says=(
            "On the same relabelled Fashion-MNIST the class-averaged kernels are nearly constant at "
            "initialisation and show blocks of easy and hard classes later in training."
        ),
        where="Figs 13-16",
        paper="initial spread below about 1 %, blocks later",
        figure="fig13_16_kernels",
        parts=[
            *parts(f"tangent {CONSTANT}", Quantity("spread", "start", kernel="tangent"), below=NEARLY_CONSTANT),
            *parts(f"overlap {CONSTANT}", Quantity("spread", "start", kernel="overlap"), below=NEARLY_CONSTANT),
            *parts_of_c19("tangent"),
            *parts_of_c19("overlap"),
        ],
        shows=[*shown_beside_c19("tangent"), *shown_beside_c19("overlap")],
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------

PANELS = (
    ("test_paths", "mean active paths"),
    ("tangent_diagonal", "tangent diagonal / its start"),
    ("test_accuracy", "test accuracy"),
)


def draw_halves(results: Results) -> plots.Figure:
    """Modified labels, test images, median and middle half of the seeds. Dotted: the middle point, where the easy classes reach
    72 %. The tangent diagonal is divided by its value at the start, which stands at the left edge.
    """
    figure, axes = plots.grid(len(NETS), len(PANELS), (3.6, 2.8), sharex=True)
    dotted: dict[str, Any] = {"color": plots.COLOURS["grey"], "linestyle": ":", "linewidth": 0.8}
    for line, (net, label) in zip(axes, NETS.items(), strict=True):
        where: dict[str, Any] = {"variant": "main", "net": net, "labels": "modified"}
        times = results.table.select("epochs_to_middle", **where)
        for axis, (name, title) in zip(line, PANELS, strict=True):
            for half, colour in zip(HALVES, ("blue", "red"), strict=True):
                epochs, values = _read_curve(results, name, half=half, **where)
                shown = values / (values[0] if name == "tangent_diagonal" else 1)
                plots.draw_band(axis, epochs, shown, f"{half} classes", colour)
            if np.isfinite(times).any():
                axis.axvline(float(np.median(times[np.isfinite(times)])), **dotted)
            axis.set_title(title)
        _tick_in_powers_of_ten(line[0])
        line[0].set_ylabel(label.replace(", ", ",\n", 1))
        line[1].set(yscale="log")
        line[2].set(ylim=(0, 1))
        line[2].axhline(MIDDLE_ACCURACY, **dotted)
    for axis in axes[-1]:
        _set_epoch_axis(axis)
    axes[0, 2].legend(loc="upper left")
    return figure


def draw_kernels(results: Results) -> plots.Figure:
    """Mean over seeds; diagonals sum to 100, easy classes come first. Titles give the range of the entries."""
    rows = [(net, kernel) for net in NETS for kernel in KERNELS]
    figure, axes = plots.grid(len(rows), len(MOMENTS), (2.9, 2.6))
    names = FASHION_CLASSES if results.settings.data == "fashion-mnist" else tuple(map(str, range(CLASSES)))
    for line, (net, kernel) in zip(axes, rows, strict=True):
        shown = [mean_kernel(results.table, net, kernel, moment) for moment in MOMENTS]
        top = max(float(np.quantile(values.diagonal(), 0.9)) for values in shown if values is not None)
        for axis, values, moment in zip(line, shown, MOMENTS, strict=True):
            if values is None:
                never = f"easy classes\nnever at {MIDDLE_ACCURACY:.0%}"
                axis.text(0.5, 0.5, never, ha="center", va="center", transform=axis.transAxes)
                axis.set_axis_off()
                continue
            image = plots.draw_heat_map(axis, values, top)
            axis.set_xticks(range(10), names if (net, kernel) == rows[-1] else [""] * 10, rotation=90, fontsize=7)
            axis.set_yticks(range(10), names if moment == "start" else [""] * 10, rotation=0, fontsize=7)
            axis.set_title(f"{moment}: {values.min():.2f} to {values.max():.2f}")
        line[0].set_ylabel(f"{NETS[net].split(',')[0]}: {kernel}")
        figure.colorbar(image, ax=line.tolist(), shrink=0.8, extend="both")
    return figure


def mean_kernel(table: Table, net: str, kernel: str, moment: str) -> Array | None:
    """Mean over seeds of the class-averaged kernels, whose diagonals sum to 100; ``None`` if no seed reached the moment."""
    part = table.where(quantity="class_kernel", variant="main", net=net, kernel=kernel, at=moment)
    if not np.isfinite(part.values).any():
        return None
    mean = np.zeros((CLASSES, CLASSES))
    for row, column in zip(*np.triu_indices(CLASSES), strict=True):
        mean[row, column] = mean[column, row] = np.nanmean(part.select("class_kernel", row=row, column=column))
    return mean


def draw_labels_or_images(results: Results) -> plots.Figure:
    """Top: active paths on the first half of the classes over the second, under three labellings. Were it the labels, the lines
    would part around zero. Bottom: log ratio of a class's paths when its labels are easy to when they are hard, with images
    and starts held fixed; every dot a pair of trainings, diamonds the median with its 95 % interval.
    """
    figure, axes = plots.grid(2, len(NETS), (5.0, 3.1), sharey="row")
    for (gaps, effects), (net, label) in zip(axes.T, NETS.items(), strict=True):
        for labels, colour, said in (
            ("modified", "blue", "first half easy"),
            ("original", "black", "original labels"),
            ("swapped", "red", "second half easy"),
        ):
            plots.draw_band(gaps, *_read_curve(results, "gap", variant="main", net=net, labels=labels), said, colour)
        _set_epoch_axis(gaps)
        gaps.set_title(label)
        _draw_label_effects(results, net, effects)
    for axis, words in zip(
        axes[:, 0], ("paths, first half over second", "paths of a class, easy over hard"), strict=True
    ):
        axis.set_ylabel(f"{words}\n(log ratio)")
        axis.legend(loc="best")
    for axis in axes.flat:
        axis.axhline(0, color=plots.COLOURS["grey"], linewidth=0.7)
    return figure


def _draw_label_effects(results: Results, net: str, axis: Any) -> None:
    """Label effects by variant: a dot for every pair, a diamond for the median with its interval."""
    shown = [case.variant for case in results.cases() if case.net == net]
    for shift, moment, colour in ((-0.2, "middle", "sky"), (0.2, "end", "blue")):
        style: dict[str, Any] = {"markersize": 3, "color": plots.COLOURS[colour]}
        for place, name in enumerate(shown):
            found = results.table.select("label_effect", moment, effect_on="paths", variant=name, net=net)
            found = np.sort(found[np.isfinite(found)])
            if len(found):
                axis.plot(place + shift + np.linspace(-0.12, 0.06, len(found)), found, "o", **style)
                (low, high), median = interval(found), float(np.median(found))
                reach = [[median - low], [high - median]]
                axis.errorbar(place + shift + 0.12, median, reach, fmt="D", markersize=4, color=plots.COLOURS["black"])
        axis.plot([], [], "o", label=f"at the {moment}", **style)
    axis.set_xticks(range(len(shown)), [VARIANTS[name].label.replace(" ", "\n", 1) for name in shown], fontsize=7)
    axis.set_xlim(-0.5, len(shown) - 0.5)


def _read_curve(results: Results, name: str, **where: Any) -> tuple[Array, Array]:
    """Epochs ``[T]`` and values ``[T, seeds]``. For logarithmic axes the start is placed at half the next epoch."""
    steps, values = results.table.series(name, **where)
    epochs = steps / -(-results.settings.images // results.settings.batch)
    return np.maximum(epochs, epochs[1] / 2), values


def _tick_in_powers_of_ten(axis: Any) -> None:
    """Start the axis at zero and write its ticks as multiples of a power of ten, which the title names."""
    power = int(np.floor(np.log10(axis.get_ylim()[1])))
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value / 10**power:g}")
    axis.set_title(f"{axis.get_title(loc='left')}, in $10^{{{power}}}$")


def _set_epoch_axis(axis: Any) -> None:
    """A logarithmic axis of epochs without minor labels."""
    axis.set(xscale="log", xlabel="epoch")
    axis.xaxis.set_minor_formatter("")


FIGURES = (
    Figure(
        "fig07_11_12_halves",
        "Paths, tangent diagonal and accuracy on easy and hard classes (Figures 7, 11, 12)",
        draw_halves,
    ),
    Figure(
        "fig13_16_kernels",
        "Class-averaged kernels at the start, in the middle, at the end (Figures 13 to 16)",
        draw_kernels,
    ),
    Figure("labels_or_images", "Do labels steer the paths, or do images?", draw_labels_or_images),
)


STUDY = Study(
    name="fashion",
    paper="half-space",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 3, "paper": 20},
    columns=("variant", "net", "images"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=FIGURES,
    needs_gpu=("paper",),
)
