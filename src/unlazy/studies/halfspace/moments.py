"""Networks on the circle, kept at many moments of their training: what the studies of mechanisms look back at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy.data.dataset import Dataset
from unlazy.data.synthetic import Circle
from unlazy.models.net import GatedNet
from unlazy.models.spec import Init, NetSpec, relu_spec
from unlazy.probes import standard
from unlazy.runtime import require, short_hash
from unlazy.scope.schedule import Fixed
from unlazy.scope.scope import Measure
from unlazy.store import Run
from unlazy.studies.halfspace.circle.measure import PLATEAU
from unlazy.studies.halfspace.circle.settings import ARMS as CIRCLE_ARMS
from unlazy.studies.halfspace.circle.settings import PRESETS, Arm
from unlazy.training.ensemble import Member, stack_of
from unlazy.training.fit import Recipe, fit
from unlazy.training.sweep import sweep

FOLDER = "circle-moments"  # below the runs; studies that ask for the same networks share them
KEPT_PER_OCTAVE = 6  # kept epochs grow by about an eighth: early phases are met closely, late ones cheaply
TIMES = ("epochs", "time")  # quantities whose names begin so are times
PAPER_EPOCHS = (0, 1, 3, 10, 30, 100, 200)

ARMS = {name: CIRCLE_ARMS[name] for name in ("pwc", "dlgn", "relu", "pwc-large", "relu-large", "pwc-equal")} | {
    "dlgn-large": Arm("DLGN, linear experts, large start", experts="linear", start="he"),
    "relu-equal": Arm(
        "control: ReLU net, equal halves", gating="own", experts="linear", slopes=False, equal_halves=True
    ),
}


@dataclass(frozen=True)
class Nets:
    """All seeds of one arm under one preset, at the preset's own slope: one stack, trained once."""

    preset: str
    arm: str
    seeds: int
    epochs: int
    width: int = 16
    depth: int = 5
    batch: int = 32

    def __post_init__(self) -> None:
        for name, known in (("preset", PRESETS), ("arm", ARMS)):
            value = getattr(self, name)
            require(value in known, f"unknown {name} {value!r}; there are {', '.join(known)}.")
        for name in ("seeds", "epochs"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)!r}.")

    @property
    def key(self) -> str:
        return f"{self.preset}-{self.arm}"

    @property
    def label(self) -> str:
        """What tables and figures call it."""
        beta = self.beta
        return f"{self.preset}, {ARMS[self.arm].label}" + ("" if beta is None else f", beta {beta:g}")

    @property
    def beta(self) -> float | None:
        return PRESETS[self.preset].beta if ARMS[self.arm].slopes else None

    @property
    def lr(self) -> float:
        return PRESETS[self.preset].lr

    def circle(self) -> Circle:
        circle = PRESETS[self.preset].circle
        return replace(circle, top=circle.bottom) if ARMS[self.arm].equal_halves else circle

    def data(self) -> Dataset:
        return self.circle().dataset()

    def unit(self) -> int:
        """Updates in an epoch."""
        return -(-self.circle().n // self.batch)

    def spec(self) -> NetSpec:
        arm, biases = ARMS[self.arm], PRESETS[self.preset].biases
        choices: dict[str, Any] = {
            "width": self.width,
            "depth": self.depth,
            "gate_bias": biases,
            "value_bias": biases,
            "init": Init(arm.start),
        }
        if arm.gating == "own":
            return relu_spec(2, **choices)
        return NetSpec(2, experts=arm.experts, gate=arm.gate(), **choices)

    def recipe(self) -> Recipe:
        members = tuple(Member(seed, self.lr, self.beta) for seed in range(self.seeds))
        return Recipe(
            self.spec(),
            members,
            epochs=self.epochs,
            batch=self.batch,
            checkpoint_epochs=self.epochs,
            checkpoints_at=tuple(self.kept()),
        )

    def kept(self) -> list[int]:
        """Epochs whose networks are kept: close together early, and the paper's."""
        growing = Fixed.growing(self.epochs, KEPT_PER_OCTAVE).steps
        return sorted(growing | {epoch for epoch in PAPER_EPOCHS if epoch <= self.epochs})

    def measures(self) -> list[Measure]:
        unit = self.unit()
        return [Measure(standard.curves, Fixed.at(range(0, self.epochs * unit + 1, unit)))]

    def folder(self, runs: Path) -> Path:
        return runs / FOLDER / f"{self.key}-{short_hash(self.recipe().to_dict(self.data(), self.measures()))}"

    def train(self, runs: Path, scale: str) -> None:
        """From wherever the run stands to its end."""
        fit(self.recipe(), self.data(), self.measures(), self.folder(runs), study=FOLDER, scale=scale)


def train_all(
    nets: Sequence[Nets], runs: Path, scale: str, workers: int, progress: Callable[[str, int, int], None]
) -> dict[str, Run]:
    """Train what is missing; the runs by key."""

    def tick() -> None:
        progress("networks", sum((one.folder(runs) / "status.json").exists() for one in nets), len(nets))

    sweep(Nets.train, [(one, runs, scale) for one in nets], workers, tick)
    return {one.key: Run(one.folder(runs)) for one in nets}


def curve(nets: Nets, run: Run, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Epochs ``[T]`` and values ``[T, seeds]`` of one recorded curve."""
    steps, values = run.scalars(name)
    return steps // nets.unit(), values


def plateau_epochs(nets: Nets, run: Run) -> list[int | None]:
    """For each seed the first kept epoch at which the loss is down to the plateau near 0.25 (``None``: never)."""
    epochs, loss = curve(nets, run, "loss")
    kept = np.isin(epochs, nets.kept())
    found = loss[kept] <= PLATEAU
    return [int(epochs[kept][column.argmax()]) if column.any() else None for column in found.T]


def plain(values: Any) -> list[Any]:
    """Numbers for a result table, five digits; ``None`` = never, or not a number."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim > 1:
        return [plain(row) for row in array]
    return [float(f"{number:.5g}") if np.isfinite(number) else None for number in array]


def numbers(entry: Mapping[str, Any], name: str) -> NDArray[np.float64]:
    """One quantity of a table's entry, a number per seed; a missing time means never, any other missing number nan."""
    found = np.array(entry["values"][name], dtype=np.float64)
    return np.where(np.isnan(found), np.inf, found) if name.startswith(TIMES) else found


def stack_at(nets: Nets, run: Run, epochs: int | Sequence[int]) -> GatedNet:
    """The networks as they were at a kept epoch, or each at its own."""
    moments = [epochs] * nets.seeds if isinstance(epochs, int) else list(epochs)
    kept = {epoch: run.checkpoint(epoch * nets.unit()) for epoch in set(moments)}
    net = stack_of(nets.spec(), nets.recipe().members, torch.float32)
    numbers = {
        name: torch.stack([torch.from_numpy(kept[epoch][f"model/{name}"][seed]) for seed, epoch in enumerate(moments)])
        for name in net.state_dict()
    }
    net.load_state_dict(numbers)
    return net
