"""What the theorems study looks at: random networks small enough to walk every path, and trained ones to count regions of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from unlazy.models.gates import HardGate, SoftGate
from unlazy.models.spec import NetSpec, deep_linear_spec, relu_spec
from unlazy.runtime import require
from unlazy.studies.halfspace.circle.settings import Settings as CircleSettings
from unlazy.studies.halfspace.circle.settings import Stack
from unlazy.studies.settings import at_least_one, plain_settings
from unlazy.training.fit import Recipe

Size = tuple[int, int, int]  # inputs, units per layer, gated layers

ARMS = {"relu": "ReLU net", "pwc": "DLGN"}
LAW_STACK = "pilot-pwc"  # bias-free, as the law of the value kernel asks
KINDS = {
    "relu": "ReLU net",
    "relu-biases": "ReLU net with biases",
    "dlgn": "DLGN, linear experts",
    "dlgn-biases": "DLGN, linear experts, with biases",
    "dlgn-soft": "DLGN, linear experts, soft gates",
    "pwc": "DLGN, constant experts",
    "pwc-biases": "DLGN, constant experts, with biases",
    "linear": "deep linear net",
}


def stack_name(key: str) -> str:
    """``pilot-pwc`` in words."""
    preset, arm = key.split("-")
    return f"{preset} preset, {ARMS[arm]}"


def random_spec(kind: str, size: Size) -> NetSpec:
    """A network of one kind and size; gates are hard unless its name says otherwise, biases absent unless it says so."""
    inputs, width, depth = size
    biases = kind.endswith("-biases")
    sizes: dict[str, Any] = {"width": width, "depth": depth, "gate_bias": biases, "value_bias": biases}
    if kind.startswith("relu"):
        return relu_spec(inputs, **sizes)
    if kind == "linear":
        return deep_linear_spec(inputs, **sizes)
    experts = "constant" if kind.startswith("pwc") else "linear"
    return NetSpec(inputs, experts=experts, gate=SoftGate() if kind.endswith("-soft") else HardGate(None), **sizes)


@dataclass(frozen=True)
class Settings:
    """One scale of the study."""

    seeds: int  # random networks of every kind and size
    trained: int  # trainings per preset and arm
    epochs: int
    looks: tuple[int, ...]  # epochs at which regions are counted
    law_epochs: tuple[int, ...]
    draws: int  # fresh value weights per network
    width: int = 16
    depth: int = 5
    sizes: tuple[Size, ...] = ((2, 2, 2), (2, 3, 3), (3, 4, 2), (5, 2, 4), (2, 4, 4))
    points: int = 48
    law_points: int = 32
    presets: tuple[str, ...] = ("author", "pilot")

    def __post_init__(self) -> None:
        at_least_one(self, "seeds", "trained", "epochs", "draws", "points", "law_points")
        late = [epoch for epoch in (*self.looks, *self.law_epochs) if not 0 <= epoch <= self.epochs]
        require(not late, f"looks lie between epochs 0 and {self.epochs}, not at {late}.")
        require(set(self.law_epochs) <= set(self.looks), "law_epochs must be among looks.")
        wide = [size for size in self.sizes if size[1] * size[2] > 16]
        require(not wide, f"patterns are listed for at most 16 units in all, not for {wide}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return plain_settings(self)

    def stacks(self) -> list[Stack]:
        """The trainings, with the circle study's recipes: ReLU nets and constant-expert DLGNs at the preset's slope."""
        circle = CircleSettings(
            self.trained, self.epochs, 1, self.width, self.depth, presets=self.presets, all_betas=()
        )
        return [Stack(preset, arm, circle) for preset in self.presets for arm in ARMS]

    def recipe(self, stack: Stack) -> Recipe:
        return replace(stack.recipe(), checkpoint_epochs=self.epochs, checkpoints_at=self.looks)


SCALES = {
    # seconds: plumbing only, no claim is judged from it
    "smoke": Settings(
        seeds=2,
        trained=2,
        epochs=3,
        looks=(0, 3),
        law_epochs=(0, 3),
        draws=8,
        width=4,
        depth=3,
        sizes=((2, 2, 2), (3, 3, 2)),
        points=12,
        law_points=6,
    ),
    # under a minute on two cores
    "desk": Settings(
        seeds=10,
        trained=3,
        epochs=100,
        looks=(0, 3, 10, 30, 100),
        law_epochs=(0, 3, 30, 100),
        draws=64,
        sizes=((2, 2, 2), (2, 3, 3), (3, 4, 2)),
    ),
    "paper": Settings(
        seeds=20, trained=10, epochs=200, looks=(0, 3, 10, 30, 100, 200), law_epochs=(0, 3, 30, 200), draws=256
    ),
}
