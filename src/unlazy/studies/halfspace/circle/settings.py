"""What the circle study trains: two presets, nine arms, three scales. Parameters live here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from unlazy.data.synthetic import CIRCLE_PRESETS, Circle
from unlazy.models.gates import GateRule, HardGate, SoftGate
from unlazy.models.spec import Init, NetSpec, relu_spec
from unlazy.studies.settings import all_known, at_least_one, plain_settings
from unlazy.training.ensemble import Member
from unlazy.training.fit import Recipe


@dataclass(frozen=True)
class Preset:
    """A published or piloted set-up of the circle experiment."""

    circle: Circle
    lr: float
    biases: bool
    beta: float


PRESETS = {
    # The first author's notebooks: 1 and 9 half cycles, Adam 3e-3, biases everywhere, beta 4.
    "author": Preset(CIRCLE_PRESETS["author"], lr=3e-3, biases=True, beta=4.0),
    # Harder target, no biases, nearly hard gates: sin 2t against sin 16t, Adam 1e-3, beta 30.
    "pilot": Preset(CIRCLE_PRESETS["pilot"], lr=1e-3, biases=False, beta=30.0),
}


@dataclass(frozen=True)
class Arm:
    """One kind of network in the study. ``slopes``: whether its gates have a beta (else ReLU or fixed hard gates)."""

    label: str
    gating: str = "linear"
    experts: str = "constant"
    rule: str = "soft"
    train_gates: bool = True
    start: str = "torch"
    slopes: bool = True
    equal_halves: bool = False

    def gate(self) -> GateRule:
        if self.rule == "soft":
            return SoftGate()
        return HardGate(10.0 if self.train_gates else None)

    def circle(self, preset: Preset) -> Circle:
        """The preset's circle, or the one whose halves are both as hard as its bottom half."""
        return replace(preset.circle, top=preset.circle.bottom) if self.equal_halves else preset.circle

    def spec(self, preset: Preset, width: int, depth: int) -> NetSpec:
        """The network of this arm under a preset."""
        choices: dict[str, Any] = {
            "width": width,
            "depth": depth,
            "gate_bias": preset.biases,
            "value_bias": preset.biases,
            "init": Init(self.start),
        }
        if self.gating == "own":
            return relu_spec(2, **choices)
        return NetSpec(2, experts=self.experts, gate=self.gate(), train_gates=self.train_gates, **choices)


ARMS = {
    "relu": Arm("ReLU net", gating="own", experts="linear", slopes=False),
    "dlgn": Arm("DLGN, linear experts", experts="linear"),
    "pwc": Arm("DLGN, constant experts"),
    "pwc-frozen": Arm("frozen gates, soft", train_gates=False),
    "pwc-frozen-hard": Arm("frozen gates, hard", rule="hard", train_gates=False, slopes=False),
    "pwc-hard": Arm("trained hard gates", rule="hard", slopes=False),
    "pwc-equal": Arm("control: equal halves", equal_halves=True),
    "relu-large": Arm("ReLU net, large start", gating="own", experts="linear", start="he", slopes=False),
    "pwc-large": Arm("DLGN, large start", start="he"),
}


def own_beta(preset: str, arm: str) -> float | None:
    """The slope at which an arm is shown and judged: the preset's own, if its gates have one."""
    return PRESETS[preset].beta if ARMS[arm].slopes else None


def beta_words(beta: float | None) -> str:
    """What a slope adds to a network's name."""
    return "" if beta is None else f", beta {beta:g}"


@dataclass(frozen=True)
class Settings:
    """One scale of the study."""

    seeds: int
    epochs: int
    frozen_epochs: int
    width: int = 16
    depth: int = 5
    betas: tuple[float, ...] = (4.0, 10.0, 30.0)
    presets: tuple[str, ...] = ("author", "pilot")
    arms: tuple[str, ...] = tuple(ARMS)
    all_betas: tuple[str, ...] = ("dlgn", "pwc", "pwc-frozen", "pwc-equal", "pwc-large")
    kernel_stride: int = 5
    scene_frames_per_octave: int = 5
    batch: int = 32

    def __post_init__(self) -> None:
        at_least_one(self, "seeds", "epochs", "frozen_epochs", "kernel_stride")
        all_known("presets", self.presets, PRESETS)
        all_known("arms", self.arms, ARMS)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return plain_settings(self)


SCALES = {
    # seconds: shapes and plumbing only, no claim is judged from it
    "smoke": Settings(
        seeds=2,
        epochs=4,
        frozen_epochs=4,
        width=4,
        depth=3,
        betas=(4.0,),
        presets=("author",),
        arms=("relu", "pwc", "pwc-frozen", "pwc-equal"),
        scene_frames_per_octave=1,
    ),
    # about a minute on two cores; claims that need more epochs are censored
    "desk": Settings(
        seeds=10,
        epochs=200,
        frozen_epochs=200,
        arms=tuple(arm for arm in ARMS if arm not in ("dlgn", "relu-large")),
        all_betas=("pwc", "pwc-frozen"),
    ),
    # the paper's lengths
    "paper": Settings(seeds=20, epochs=600, frozen_epochs=8000),
}


@dataclass(frozen=True)
class Stack:
    """One training of the study: all seeds and slopes of one arm under one preset."""

    preset: str
    arm: str
    settings: Settings

    @property
    def key(self) -> str:
        return f"{self.preset}-{self.arm}"

    @property
    def epochs(self) -> int:
        return self.settings.epochs if ARMS[self.arm].train_gates else self.settings.frozen_epochs

    def circle(self) -> Circle:
        return ARMS[self.arm].circle(PRESETS[self.preset])

    def betas(self) -> tuple[float | None, ...]:
        preset, arm = PRESETS[self.preset], ARMS[self.arm]
        if not arm.slopes:
            return (None,)
        return self.settings.betas if self.arm in self.settings.all_betas else (preset.beta,)

    def recipe(self) -> Recipe:
        preset, arm = PRESETS[self.preset], ARMS[self.arm]
        members = tuple(Member(seed, preset.lr, beta) for beta in self.betas() for seed in range(self.settings.seeds))
        return Recipe(
            arm.spec(preset, self.settings.width, self.settings.depth),
            members,
            epochs=self.epochs,
            batch=self.settings.batch,
            checkpoint_epochs=50 if arm.train_gates else 250,
        )


def stacks(settings: Settings) -> list[Stack]:
    """Everything the study trains at one scale."""
    return [Stack(preset, arm, settings) for preset in settings.presets for arm in settings.arms]
