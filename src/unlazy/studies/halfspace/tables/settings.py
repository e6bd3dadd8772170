"""What the two accuracy tables train: cells, recipes and three scales. Parameters live here and nowhere else.

The paper gives layouts and, for its first table, Adam at 2e-4; it gives no recipe for the second. Two deviations, named:

* Table 1 has batches of 128 at 4e-4 (the rate follows the square root of the batch) where the group's code has 32 at 2e-4: small
  batches are bound by launching kernels. Gates are soft, as published; hard-trained ones stand beside them.
* Table 2 has one modern recipe for all networks alike: SGD, one cycle, flips and crops, smoothed labels; ``plain`` is without the
  last three. How the gradient reaches hard gates (``hard_beta``, ``even_gates``) was chosen on held-out training images of a
  smaller network; see the campaign.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from unlazy.data.images import load_images
from unlazy.models.conv import ImageSpec, build_images, conv_spec
from unlazy.models.gates import HardGate, SoftGate
from unlazy.models.resnet import resnet34_spec, resnet110_spec
from unlazy.runtime import UnlazyError, require, short_hash
from unlazy.studies.settings import at_least_one, plain_settings
from unlazy.training.images import ImageRecipe

MODELS = {
    "relu": "ReLU",
    "dlgn": "DLGN, soft gates",
    "pwc": "DLGN-PWC, soft gates",
    "dln": "deep linear",
    "dlgn-hard": "DLGN, hard gates",
    "pwc-hard": "DLGN-PWC, hard gates",
    "relu-wide": "ReLU, as many parameters as the DLGN",
    "tangent": "linear model on tangent features",
    "trace": "ridge on the trace kernel",
}
LINEAR_MODELS = ("tangent", "trace")
LAYOUTS = ("conv", "resnet-34", "resnet-110")
RIDGES = tuple(10.0**-power for power in range(13, 2, -1))  # of linear models, relative to the mean diagonal
HELD_OUT = 0.1  # of the training images, to choose the ridge


@dataclass(frozen=True)
class Settings:
    """One scale of one table."""

    table: int
    data: tuple[str, ...]
    layouts: tuple[str, ...]
    models: tuple[str, ...]
    epochs: dict[str, int]  # by layout
    seeds: int = 3
    images: int = 50_000
    test_images: int = 10_000
    batch: int = 512
    lr: float = 0.3
    augment: bool = True
    beta: float = 4.0  # of soft gates
    hard_beta: float = 4.0  # of the backward pass of hard gates
    even_gates: bool = False  # hard gates only
    gate_lr: float = 1.0  # hard gates only
    width: float = 1.0  # factor on the channels
    residual: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # channels and blocks in place of the two ResNets
    cost_epochs: int = 3
    precision: str = "float32"  # Table 1, on a GPU; "bfloat16" halves the traffic that binds such small networks
    looks: tuple[int, ...] = ()  # Table 1: epochs at which networks are kept, for their kernels
    kernel_images: int = 50  # of every class
    extra_recipes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.table in (1, 2), f"there are tables 1 and 2, got {self.table!r}.")
        unknown = [name for name in self.models if name not in MODELS] + [x for x in self.layouts if x not in LAYOUTS]
        require(not unknown, f"unknown models or layouts: {', '.join(unknown)}.")
        require(all(layout in self.epochs for layout in self.layouts), "epochs must name every layout.")
        at_least_one(self, "seeds", "images", "test_images", "batch")

    @property
    def study(self) -> str:
        return f"table{self.table}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return plain_settings(self)


TABLE1_MODELS = ("relu", "dlgn", "pwc", "dln", "tangent", "dlgn-hard", "pwc-hard", "trace", "relu-wide")
TABLE2_MODELS = ("relu", "dlgn-hard", "dlgn", "pwc-hard")
BOTH = ("resnet-34", "resnet-110")

SCALES = {
    # seconds: digits, shapes and plumbing only
    ("smoke", 1): Settings(
        1,
        ("digits",),
        ("conv",),
        TABLE1_MODELS,
        {"conv": 2},
        seeds=1,
        images=300,
        test_images=100,
        batch=32,
        lr=3e-3,
        width=0.25,
        cost_epochs=1,
        looks=(1,),
        kernel_images=2,
    ),
    ("smoke", 2): Settings(
        2,
        ("digits",),
        ("resnet-34",),
        TABLE2_MODELS,
        {"resnet-34": 2},
        seeds=1,
        images=300,
        test_images=100,
        batch=50,
        lr=0.05,
        augment=False,
        residual=((4, 8), (1, 1)),
    ),
    # minutes on two cores: too few images and epochs to judge anything
    ("desk", 1): Settings(
        1,
        ("cifar-10",),
        ("conv",),
        ("relu", "dlgn", "pwc", "dln", "trace"),
        {"conv": 3},
        seeds=1,
        images=1500,
        test_images=1000,
        batch=32,
        lr=1e-3,
        width=0.5,
        cost_epochs=1,
        looks=(1,),
        kernel_images=3,
    ),
    ("desk", 2): Settings(
        2,
        ("cifar-10",),
        ("resnet-34",),
        TABLE2_MODELS,
        {"resnet-34": 3},
        seeds=1,
        images=1500,
        test_images=1000,
        batch=64,
        lr=0.1,
        augment=False,
        residual=((8, 16), (1, 1)),
    ),
    # the paper's data and layouts: minutes on one GPU
    ("paper", 1): Settings(
        1,
        ("cifar-10",),
        ("conv",),
        TABLE1_MODELS,
        {"conv": 100},
        batch=128,
        lr=4e-4,
        looks=(1, 2, 3, 5, 8, 13, 21, 34, 55, 80),
    ),
    ("paper", 2): Settings(
        2,
        ("cifar-10", "cifar-100"),
        BOTH,
        TABLE2_MODELS,
        {"resnet-34": 20, "resnet-110": 10},
        hard_beta=1.0,
        even_gates=True,
        extra_recipes=("plain",),
    ),
}


def available(settings: Settings, folder: Path | None = None) -> Settings:
    """The same settings, with digits in place of pictures that are not on this machine."""
    try:
        for name in settings.data:
            load_images(name, "test", folder)
    except UnlazyError:
        return replace(settings, data=("digits",), images=1200, test_images=300)
    return settings


# --- cells ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One number of a table: a model of a layout on data, under a recipe, from a seed."""

    data: str
    layout: str
    model: str
    recipe: str
    seed: int
    settings: Settings

    @property
    def epochs(self) -> int:
        return self.settings.cost_epochs if self.recipe == "cost" else self.settings.epochs[self.layout]

    def describe(self) -> dict[str, Any]:
        """What identifies the cell in a file."""
        return {
            "data": self.data,
            "layout": self.layout,
            "model": self.model,
            "recipe": self.recipe,
            "seed": self.seed,
            "epochs": 0 if self.model in LINEAR_MODELS else self.epochs,
        }

    def key(self, channels: int, classes: int) -> str:
        """Hash of everything that decides the result but the machine."""
        sizes = [self.settings.images, self.settings.test_images]
        spec = self.spec(channels, classes).to_dict()
        how = {"ridges": list(RIDGES)} if self.model in LINEAR_MODELS else self.training().to_dict()
        return short_hash([self.describe(), spec, how, sizes])

    def spec(self, channels: int, classes: int) -> ImageSpec:
        """The network; linear models stand on the untrained ReLU network."""
        base = layout_spec(self.settings, self.layout, channels, classes)
        if self.model.endswith("hard"):
            hard = model_spec(base, self.model, self.settings.hard_beta)
            return replace(hard, even_gates=self.settings.even_gates)
        return model_spec(base, self.model, self.settings.beta)

    def training(self) -> ImageRecipe:
        settings = self.settings
        if settings.table == 1:
            return ImageRecipe(
                self.epochs,
                batch=settings.batch,
                optimiser="adam",
                lr=settings.lr,
                weight_decay=0.0,
                schedule="constant",
                smoothing=0.0,
                augment=False,
                standardise=False,
                precision=settings.precision,
                train_probe=min(10_000, settings.images),
            )
        main = ImageRecipe(
            self.epochs,
            batch=settings.batch,
            lr=settings.lr,
            augment=settings.augment,
            gate_lr=settings.gate_lr if self.model.endswith("hard") else 1.0,
            train_probe=min(10_000, settings.images),
        )
        return replace(main, augment=False, smoothing=0.0) if self.recipe == "plain" else main

    def in_stack(self) -> bool:
        """Whether this network is small enough to be trained together with others."""
        return self.layout == "conv" and self.recipe == "main" and self.model not in LINEAR_MODELS


def layout_spec(settings: Settings, layout: str, channels: int, classes: int) -> ImageSpec:
    """The linearly gated network of a layout."""
    if layout == "conv":
        return conv_spec(max(2, round(26 * settings.width)), channels=channels, classes=classes)
    if settings.residual is not None:
        widths, blocks = settings.residual
        return ImageSpec(tuple(widths), tuple(blocks), channels=channels, classes=classes)
    make = resnet34_spec if layout == "resnet-34" else resnet110_spec
    return make(classes, width=settings.width, channels=channels)


def model_spec(base: ImageSpec, model: str, beta: float) -> ImageSpec:
    """One of the models on a layout."""
    if model in ("relu", *LINEAR_MODELS):
        return base.relu()
    if model == "dln":
        return base.deep_linear()
    if model == "relu-wide":
        return matched_relu(base)
    experts = "constant" if model.startswith("pwc") else "linear"
    return replace(base, experts=experts, gate=HardGate(beta) if model.endswith("hard") else SoftGate(beta))


@cache
def matched_relu(base: ImageSpec) -> ImageSpec:
    """The ReLU network of this depth whose parameters come nearest in number to those of the linearly gated one."""
    wanted = parameters(base)
    own = base.relu()
    candidates = [
        replace(own, widths=tuple(round(width * (1 + extra / 50)) for width in base.widths)) for extra in range(51)
    ]
    return min(candidates, key=lambda spec: abs(parameters(spec) - wanted))


def parameters(spec: ImageSpec) -> int:
    """How many numbers a network trains."""
    return sum(parameter.numel() for parameter in build_images(spec).parameters())


def cells(settings: Settings) -> list[Cell]:
    """Every cell in the order of its weight: one seed of all first, then costs, other recipes, more seeds."""
    main, later = [], []
    for seed in range(settings.seeds):
        for data in settings.data if settings.table == 1 else ():
            main += [Cell(data, "conv", model, "main", seed, settings) for model in settings.models]
        for data in settings.data if settings.table == 2 else ():
            for layout in settings.layouts:
                main += [Cell(data, layout, model, "main", seed, settings) for model in settings.models]
    if settings.table == 1:
        costed = [model for model in ("relu", "dlgn", "pwc", "dlgn-hard", "relu-wide") if model in settings.models]
        main = [cell for cell in main if cell.model != "relu-wide"]
        later += [Cell(settings.data[0], "conv", model, "cost", 0, settings) for model in costed]
    for recipe in settings.extra_recipes:
        for data in settings.data:
            for layout in settings.layouts:
                later += [Cell(data, layout, model, recipe, 0, settings) for model in settings.models]
    first = [cell for cell in main if cell.seed == 0]
    return first + later + [cell for cell in main if cell.seed > 0]


PLANNED = {  # seconds an epoch on one H200, before anything was measured: ReLU, gated
    "conv": (0.25, 0.4),
    "resnet-34": (1.5, 3.5),
    "resnet-110": (1.3, 3.0),
}


def planned_seconds(cell: Cell) -> float:
    """A guess at what a cell costs on one H200 at paper size, for planning alone."""
    if cell.model in LINEAR_MODELS:
        return 60.0
    simple, double = PLANNED[cell.layout]
    return 5 + cell.epochs * (simple if cell.model in ("relu", "dln", "relu-wide") else double)
