"""What the Fashion-MNIST study trains: two networks, five variants, three scales. Parameters live here and nowhere else.

The paper gives the images, the sizes, Adam, its rate and the nets; batch 32 and 30 epochs follow from the names of its result
files. It says nothing of biases. Its one surviving heat map does: before training all class means of the tangent kernel lie
within a percent of each other, which PyTorch's default biases give (their own gradients are the same for all images) and
networks without biases miss by far. So ``main`` has biases, and ``bias-free``, the networks of the theory, stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from unlazy.data.images import load_images
from unlazy.data.relabelled import Relabelling, random_splits
from unlazy.models.gates import SoftGate
from unlazy.models.spec import NetSpec, relu_spec
from unlazy.runtime import UnlazyError, require
from unlazy.scope.schedule import Fixed
from unlazy.studies.settings import all_known, at_least_one, plain_settings
from unlazy.training.ensemble import Member
from unlazy.training.fit import Recipe

CLASSES = 10
FIRST_HALF, SECOND_HALF = (0, 1, 2, 3, 4), (5, 6, 7, 8, 9)  # clothes; shoes, bag and shirt
NETS = {"relu": "ReLU net", "pwc": "DLGN, constant experts, beta 4"}
FIRST_LOOK, LOOKS_PER_OCTAVE = 16, 3  # steps of the first epoch at which to look
WHOLE_EPOCHS = (*range(1, 11), 15, 20, 25, 30)


@dataclass(frozen=True)
class Task:
    """What one member of a stack learns: which classes are easy, and where the groups of the others come from.

    ``labels``: ``modified`` (first half easy), ``swapped`` (second half easy), ``noise`` (modified, but groups by lot: the hard
    half cannot be learned), ``original`` (all classes keep their labels; ``easy`` then only names the half to compare),
    ``split`` and ``mirror`` (a random half easy, and its complement).
    """

    labels: str
    easy: tuple[int, ...]
    seed: int

    @property
    def cut(self) -> str:
        return "random" if self.labels == "noise" else "k-means"

    def relabelling(self) -> Relabelling:
        return Relabelling(tuple(range(CLASSES)) if self.labels == "original" else self.easy, seed=self.seed)


@dataclass(frozen=True)
class Variant:
    """One way to train both networks. ``tasks``: kinds of labels, each with every seed; none: random splits in pairs."""

    label: str
    tasks: tuple[str, ...] = ("modified", "swapped")
    nets: tuple[str, ...] = tuple(NETS)
    biases: bool = True
    standardised: bool = False
    constant_input: str = "one"


VARIANTS = {
    "main": Variant("main set-up", tasks=("modified", "swapped", "original", "noise")),
    "bias-free": Variant("no biases", biases=False),
    "standardised": Variant("standardised inputs", standardised=True),
    # The all-ones value input of the paper: its weights move 784 times as fast under Adam as the single constant's do.
    "ones": Variant("all-ones value input", nets=("pwc",), constant_input="ones"),
    "splits": Variant("random splits", tasks=()),
}


@dataclass(frozen=True)
class Settings:
    """One scale of the study."""

    data: str
    images: int
    test_images: int
    seeds: int
    epochs: int
    splits: int
    split_epochs: int
    kernel_images: int = 50  # of every class, from the test images
    restarts: int = 10
    width: int = 128
    depth: int = 5
    batch: int = 32
    lr: float = 2e-4
    beta: float = 4.0
    variants: tuple[str, ...] = tuple(VARIANTS)

    def __post_init__(self) -> None:
        at_least_one(self, "images", "test_images", "seeds", "epochs", "split_epochs", "kernel_images", "restarts")
        require(self.splits >= 2, "at least two splits are needed: each is compared with the others.")
        all_known("variants", self.variants, VARIANTS)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return plain_settings(self)


SCALES = {
    # seconds: digits, shapes and plumbing only
    "smoke": Settings(
        "digits",
        images=400,
        test_images=200,
        seeds=2,
        epochs=2,
        splits=2,
        split_epochs=1,
        kernel_images=4,
        restarts=1,
        width=12,
        depth=3,
        lr=3e-3,
    ),
    # under two minutes on two cores: too few images, epochs and seeds to judge anything
    "desk": Settings(
        "fashion-mnist",
        images=6000,
        test_images=1000,
        seeds=3,
        epochs=3,
        splits=3,
        split_epochs=2,
        kernel_images=20,
        restarts=2,
        variants=("main", "bias-free", "splits"),
    ),
    # the paper's size, ten seeds instead of three: minutes on one GPU, most of a day on a CPU
    "paper": Settings("fashion-mnist", 60_000, 10_000, seeds=10, epochs=30, splits=20, split_epochs=10),
}


def available(settings: Settings) -> Settings:
    """The same settings, with digits in place of images that are not on this machine."""
    try:
        load_images(settings.data, "test")
    except UnlazyError:
        train, test = (len(load_images("digits", split)) for split in ("train", "test"))
        return replace(
            settings, data="digits", images=min(train, settings.images), test_images=min(test, settings.test_images)
        )
    return settings


@dataclass(frozen=True)
class Stack:
    """One training of the study: all tasks and seeds of one network under one variant."""

    variant: str
    net: str
    settings: Settings

    @property
    def key(self) -> str:
        return f"{self.variant}-{self.net}"

    @property
    def epochs(self) -> int:
        return self.settings.epochs if VARIANTS[self.variant].tasks else self.settings.split_epochs

    def tasks(self) -> list[Task]:
        """What each member learns, in order. A seed starts all its tasks from the same numbers, in the same batch order."""
        kinds = VARIANTS[self.variant].tasks
        if not kinds:
            splits = random_splits(self.settings.splits, CLASSES)
            pairs = [
                (Task("split", easy, seed), Task("mirror", _others(easy), seed)) for seed, easy in enumerate(splits)
            ]
            return [task for pair in pairs for task in pair]
        easy = {kind: SECOND_HALF if kind == "swapped" else FIRST_HALF for kind in kinds}
        return [Task(kind, easy[kind], seed) for kind in kinds for seed in range(self.settings.seeds)]

    def recipe(self, inputs: int, device: str = "cpu") -> Recipe:
        variant, settings = VARIANTS[self.variant], self.settings
        sizes: dict[str, Any] = {"width": settings.width, "depth": settings.depth}
        biases: dict[str, Any] = {"gate_bias": variant.biases, "value_bias": variant.biases}
        if self.net == "relu":
            spec = relu_spec(inputs, CLASSES, **sizes, **biases)
        else:
            spec = NetSpec(
                inputs,
                CLASSES,
                experts="constant",
                constant_input=variant.constant_input,
                gate=SoftGate(settings.beta),
                **sizes,
                **biases,
            )
        members = tuple(Member(task.seed, settings.lr) for task in self.tasks())
        return Recipe(
            spec,
            members,
            epochs=self.epochs,
            batch=settings.batch,
            loss="cross-entropy",
            device=device,
            checkpoint_epochs=10,
        )

    def looks(self, unit: int) -> Fixed:
        """When to measure: often in the first epoch of ``unit`` steps, then after whole epochs."""
        early, exponent = {0}, 0
        while (step := round(FIRST_LOOK * 2 ** (exponent / LOOKS_PER_OCTAVE))) < unit:
            early.add(step)
            exponent += 1
        return Fixed.at(early | {epoch * unit for epoch in WHOLE_EPOCHS if epoch <= self.epochs} | {self.epochs * unit})


def stacks(settings: Settings) -> list[Stack]:
    """Everything the study trains at one scale."""
    return [Stack(name, net, settings) for name in settings.variants for net in VARIANTS[name].nets]


def _others(easy: Sequence[int]) -> tuple[int, ...]:
    return tuple(c for c in range(CLASSES) if c not in easy)
