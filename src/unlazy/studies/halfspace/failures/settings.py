"""What the failure studies train: three experiments, three scales. Parameters live here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unlazy.models.gates import HardGate, SoftGate
from unlazy.models.spec import NetSpec, relu_spec
from unlazy.runtime import require
from unlazy.studies.halfspace.circle.settings import ARMS, PRESETS
from unlazy.studies.settings import all_known, at_least_one, plain_settings

FREQUENCY_ARMS = ("pwc", "pwc-hard", "relu")  # of the circle study
KINDS = {
    "dlgn": "DLGN, linear experts",
    "pwc": "DLGN, constant experts",
    "pwc-hard": "DLGN, trained hard gates",
    "quadratic": "quadratic gates",
    "relu": "ReLU net",
}
"""The networks of the two classification experiments, by their short names."""
DLGN_KINDS = ("dlgn", "pwc", "pwc-hard")
FOREST = "random forest"


def classifier(kind: str, inputs: int, classes: int, width: int, depth: int, beta: float) -> NetSpec:
    """A network of one of the ``KINDS``, with biases and torch's default start."""
    require(kind in KINDS, f"kind must be one of {', '.join(KINDS)}; got {kind!r}.")
    if kind == "relu":
        return relu_spec(inputs, classes, width=width, depth=depth)
    return NetSpec(
        inputs,
        classes,
        width=width,
        depth=depth,
        gating="quadratic" if kind == "quadratic" else "linear",
        experts="linear" if kind in ("dlgn", "quadratic") else "constant",
        gate=HardGate(beta) if kind == "pwc-hard" else SoftGate(beta),
        constant_input="one",
    )


@dataclass(frozen=True)
class Frequency:
    """F1: the circle with ever faster bottom halves (half cycles), at several widths, beside what the cells allow."""

    seeds: int
    epochs: int
    frequencies: tuple[float, ...] = (2.0, 8.0, 16.0, 24.0, 32.0, 48.0)
    widths: tuple[int, ...] = (8, 16, 32)
    depth: int = 5
    presets: tuple[str, ...] = ("author", "pilot")
    arms: tuple[str, ...] = FREQUENCY_ARMS
    batch: int = 32

    def __post_init__(self) -> None:
        at_least_one(self, "seeds", "epochs", "depth", "batch")
        all_known("presets", self.presets, PRESETS)
        all_known("arms", self.arms, ARMS)
        require(
            list(self.frequencies) == sorted(self.frequencies), "frequencies must stand in order, the lowest first."
        )


@dataclass(frozen=True)
class Interactions:
    """F2: the exclusive-or of ``orders`` of 20 inputs. ``problems``: law of the inputs and number of training samples.

    All problems are trained for the same number of updates. Those with the most samples are judged, the others show what
    fewer samples change.
    """

    seeds: int
    updates: int
    problems: tuple[tuple[str, int], ...] = (("signs", 4000), ("gaussian", 4000), ("signs", 1000))
    orders: tuple[int, ...] = (2, 3, 4, 5)
    kinds: tuple[str, ...] = tuple(KINDS)
    inputs: int = 20
    tests: int = 2000
    width: int = 64
    depth: int = 3
    beta: float = 4.0
    lr: float = 1e-3
    batch: int = 100
    trees: int = 100

    def __post_init__(self) -> None:
        at_least_one(self, "seeds", "updates", "tests", "width", "depth", "batch", "trees")
        all_known("kinds", self.kinds, KINDS)
        require(max(self.orders) <= self.inputs, f"an order is at most the number of inputs, {self.inputs}.")


@dataclass(frozen=True)
class SmallData:
    """F3: images, few to many. Every size is trained for the same number of updates or ``least_epochs`` if that is more.

    ``draws`` training sets of every size, each with ``seeds`` starts; larger sets of one draw hold the smaller ones.
    ``sizes``: names of image data sets and how many of their images; a set whose files are missing is left out, and the
    results say so.
    """

    draws: int
    seeds: int
    updates: int
    least_epochs: int
    sizes: tuple[tuple[str, tuple[int, ...]], ...]
    tests: int = 2000
    widths: tuple[int, ...] = (16, 64)
    kinds: tuple[str, ...] = ("pwc", "dlgn", "relu")
    depth: int = 3
    beta: float = 4.0
    lr: float = 1e-3
    batch: int = 32

    def __post_init__(self) -> None:
        at_least_one(self, "draws", "seeds", "updates", "least_epochs", "tests", "depth", "batch")
        all_known("kinds", self.kinds, KINDS)
        for images, sizes in self.sizes:
            require(list(sizes) == sorted(sizes), f"sizes of {images} must stand in order, the smallest first.")


@dataclass(frozen=True)
class Settings:
    """One scale of the study."""

    frequency: Frequency
    interactions: Interactions
    small_data: SmallData

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return plain_settings(self)


SCALES = {
    # seconds: shapes and plumbing only, no claim is judged from it
    "smoke": Settings(
        Frequency(seeds=2, epochs=2, frequencies=(2.0, 16.0), widths=(4,), depth=2, presets=("pilot",)),
        Interactions(
            seeds=2, updates=6, problems=(("signs", 60), ("gaussian", 40)), orders=(2, 3), tests=50, width=8, trees=5
        ),
        SmallData(draws=2, seeds=1, updates=4, least_epochs=1, sizes=(("digits", (20, 60)),), tests=50, widths=(8,)),
    ),
    # under two minutes on two cores
    "desk": Settings(
        Frequency(seeds=5, epochs=100, frequencies=(2.0, 8.0, 16.0, 48.0), widths=(8, 16)),
        Interactions(seeds=5, updates=600, problems=(("signs", 2000),), kinds=("dlgn", "pwc", "relu"), width=32),
        SmallData(
            draws=5, seeds=1, updates=300, least_epochs=5, sizes=(("digits", (50, 200, 1400)),), kinds=("pwc", "relu")
        ),
    ),
    "paper": Settings(
        Frequency(seeds=10, epochs=250),
        Interactions(seeds=10, updates=1600),
        SmallData(
            draws=5,
            seeds=2,
            updates=1000,
            least_epochs=20,
            sizes=(("digits", (50, 100, 200, 400, 800, 1400)), ("fashion-mnist", (50, 500, 5000))),
        ),
    ),
}
