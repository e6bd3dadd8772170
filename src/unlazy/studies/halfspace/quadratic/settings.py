"""What the quadratic-gate study trains: circles and images, two gate rules, two gatings of matched size, three scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from unlazy.models.build import build
from unlazy.models.gates import GateRule, HardGate, SoftGate
from unlazy.models.spec import NetSpec
from unlazy.runtime import InputError, require
from unlazy.studies.halfspace.circle.settings import PRESETS, Stack
from unlazy.studies.halfspace.circle.settings import Settings as CircleSettings
from unlazy.studies.settings import all_known, plain_settings
from unlazy.training.ensemble import Member
from unlazy.training.fit import Recipe

GATINGS = ("linear", "quadratic")
RULES = ("soft", "hard")
IMAGE_TASKS = {"digits": "digits", "relabelled-fashion": "fashion-mnist"}
"""Image tasks, and the images they are made of. Relabelled: half of the classes are cut into groups with shuffled labels."""
MISMATCH = 0.02  # most difference of the numbers of parameters
WIDER = 1.25  # the linear net may grow by this factor to meet a quadratic one


@dataclass(frozen=True)
class Circles:
    """The circle of the half-space paper, under both presets; the sizes are those of the linear net."""

    seeds: int
    epochs: int
    presets: tuple[str, ...] = ("author", "pilot")
    width: int = 16
    depth: int = 5
    kernel_stride: int = 5


@dataclass(frozen=True)
class Pictures:
    """Image classification: standardised pixels, cross-entropy, constant experts."""

    seeds: int
    epochs: int
    tasks: tuple[tuple[str, int], ...]  # with the number of training images
    tests: int = 2000
    width: int = 64
    depth: int = 3
    beta: float = 4.0
    lr: float = 1e-3
    batch: int = 32
    kernel_images: int = 40

    def __post_init__(self) -> None:
        all_known("tasks", [name for name, _ in self.tasks], IMAGE_TASKS)


@dataclass(frozen=True)
class Settings:
    """One scale of the study."""

    circles: Circles
    pictures: Pictures

    def __post_init__(self) -> None:
        for part in (self.circles, self.pictures):
            require(part.seeds >= 1 and part.epochs >= 1, "seeds and epochs must be at least 1.")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return plain_settings(self)


SCALES = {
    # seconds: shapes and plumbing only, no claim is judged from it
    "smoke": Settings(
        Circles(seeds=2, epochs=3, presets=("pilot",), width=18, depth=2, kernel_stride=16),
        Pictures(seeds=2, epochs=1, tasks=(("digits", 60),), tests=60, width=12, depth=2, kernel_images=6),
    ),
    # under two minutes on two cores
    "desk": Settings(
        Circles(seeds=10, epochs=100),
        Pictures(seeds=5, epochs=6, tasks=(("digits", 1400),), width=32, kernel_images=20),
    ),
    "paper": Settings(
        Circles(seeds=20, epochs=300),
        Pictures(seeds=10, epochs=15, tasks=(("digits", 1400), ("relabelled-fashion", 4000))),
    ),
}


@cache
def parameters(spec: NetSpec) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in build(spec).parameters())


def matched(linear: NetSpec) -> dict[str, NetSpec]:
    """A linearly and a quadratically gated network with numbers of parameters within ``MISMATCH`` of each other.

    The linear net has the width of ``linear``, or the next larger one at which a quadratic net of nearly its size exists.
    """
    for width in range(linear.width, int(WIDER * linear.width) + 1):
        wide = replace(linear, width=width)
        count, others = parameters(wide), _smaller(wide)
        nearest = min(others, key=lambda other: abs(parameters(other) - count))
        if abs(parameters(nearest) - count) <= MISMATCH * count:
            return {"linear": wide, "quadratic": nearest}
    raise InputError(
        f"no quadratic net comes within {MISMATCH:.0%} of a linear one of width {linear.width} to {width}; "
        "choose a larger width."
    )


def _smaller(wide: NetSpec) -> list[NetSpec]:
    """Quadratically gated networks of the same and lesser width, down to the first that has fewer parameters."""
    found: list[NetSpec] = []
    for width in range(wide.width, 0, -1):
        found.append(replace(wide, gating="quadratic", width=width))
        if parameters(found[-1]) < parameters(wide):
            break
    return found


def circle_recipe(circles: Circles, preset: str, rule: str, gating: str) -> Recipe:
    """Constant experts under a preset; the circle study's recipe but for the gates."""
    arm = "pwc" if rule == "soft" else "pwc-hard"
    sizes = CircleSettings(circles.seeds, circles.epochs, circles.epochs, circles.width, circles.depth, all_betas=())
    recipe = Stack(preset, arm, sizes).recipe()
    return replace(recipe, model=matched(recipe.model)[gating], checkpoint_epochs=circles.epochs)


def picture_recipe(pictures: Pictures, inputs: int, classes: int, rule: str, gating: str) -> Recipe:
    """Constant experts on flat images."""
    gate: GateRule = SoftGate(pictures.beta) if rule == "soft" else HardGate(pictures.beta)
    linear = NetSpec(
        inputs,
        classes,
        width=pictures.width,
        depth=pictures.depth,
        experts="constant",
        constant_input="one",
        gate=gate,
    )
    members = tuple(Member(seed, pictures.lr) for seed in range(pictures.seeds))
    return Recipe(
        matched(linear)[gating],
        members,
        epochs=pictures.epochs,
        batch=pictures.batch,
        loss="cross-entropy",
        checkpoint_epochs=pictures.epochs,
    )


def gate_words(task: str, rule: str, pictures: Pictures) -> str:
    """How the gates of a task are made, in words."""
    if rule == "hard":
        return "hard gates"
    beta = PRESETS[task].beta if task in PRESETS else pictures.beta
    return f"soft gates, beta {beta:g}"
