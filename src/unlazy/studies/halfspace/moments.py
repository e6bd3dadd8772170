"""Networks on the circle, kept at many moments of their training: what the studies of mechanisms look back at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy.data.dataset import Dataset
from unlazy.data.synthetic import Circle
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec
from unlazy.probes import standard
from unlazy.runtime import require, short_hash
from unlazy.scope.schedule import Fixed
from unlazy.scope.scope import Measure
from unlazy.store import Run
from unlazy.studies.halfspace.circle.measure import PLATEAU
from unlazy.studies.halfspace.circle.settings import ARMS as CIRCLE_ARMS
from unlazy.studies.halfspace.circle.settings import PRESETS, Arm, beta_words
from unlazy.studies.results import Progress
from unlazy.studies.settings import at_least_one, plain_settings
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
        at_least_one(self, "seeds", "epochs")

    @property
    def key(self) -> str:
        return f"{self.preset}-{self.arm}"

    @property
    def label(self) -> str:
        """What tables and figures call it."""
        return f"{self.preset}, {ARMS[self.arm].label}{beta_words(self.beta)}"

    @property
    def beta(self) -> float | None:
        return PRESETS[self.preset].beta if ARMS[self.arm].slopes else None

    @property
    def lr(self) -> float:
        return PRESETS[self.preset].lr

    def circle(self) -> Circle:
        return ARMS[self.arm].circle(PRESETS[self.preset])

    def data(self) -> Dataset:
        return self.circle().dataset()

    def unit(self) -> int:
        """Updates in an epoch."""
        return -(-self.circle().n // self.batch)

    def spec(self) -> NetSpec:
        return ARMS[self.arm].spec(PRESETS[self.preset], self.width, self.depth)

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


@dataclass(frozen=True)
class Networks:
    """What the settings of these studies begin with: every arm under every preset, all of one size."""

    seeds: int
    epochs: int
    width: int = 16
    depth: int = 5
    presets: tuple[str, ...] = ("author", "pilot")
    arms: tuple[str, ...] = tuple(ARMS)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return plain_settings(self)

    def networks(self) -> list[Nets]:
        """What is trained, or found trained by another study."""
        sizes = (self.seeds, self.epochs, self.width, self.depth)
        return [Nets(preset, arm, *sizes) for preset in self.presets for arm in self.arms]


def train_all(nets: Sequence[Nets], runs: Path, scale: str, workers: int, progress: Progress) -> dict[str, Run]:
    """Train what is missing; the runs by key."""
    folders = {one.key: one.folder(runs) for one in nets}
    jobs = [(one, runs, scale) for one in nets]
    sweep(Nets.train, jobs, workers, lambda: progress("networks", begun(folders.values()), len(nets)))
    return {key: Run(folder) for key, folder in folders.items()}


def begun(folders: Iterable[Path]) -> int:
    """How many of these run folders hold anything yet."""
    return sum((folder / "status.json").exists() for folder in folders)


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
