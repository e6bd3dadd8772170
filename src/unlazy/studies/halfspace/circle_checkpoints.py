"""Networks of the circle study with checkpoints at many epochs, for the studies that ask how they learn.

Studies that need the same networks share their runs in the folder ``circle-moments``: whichever study comes first trains them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy import plots
from unlazy.data.dataset import Dataset
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec
from unlazy.probes import standard
from unlazy.store import Run
from unlazy.studies.halfspace.circle_networks import ARMS, PLATEAU, PRESETS, preset_beta
from unlazy.studies.study import Results, Work, require_at_least_one, require_known
from unlazy.studies.trainings import Training
from unlazy.training.ensemble import Member, build_member_stack
from unlazy.training.fit import Recipe
from unlazy.training.recorder import FixedSteps, Measure

# --- what varies ---------------------------------------------------------------------------------------------

FOLDER = "circle-moments"
CHECKPOINTS_PER_OCTAVE = 6  # each checkpointed epoch is about an eighth later than the one before
PAPER_EPOCHS = (0, 1, 3, 10, 30, 100, 200)
SMALL_STARTS = ("pwc", "dlgn", "relu")  # arms with torch's small start, which the claims are about
STUDIED = (*SMALL_STARTS, "pwc-large", "dlgn-large", "relu-large")


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """The networks of a study: every arm under every preset, all of one size and trained for the same number of epochs."""

    epochs: int
    width: int = 16
    depth: int = 5
    presets: tuple[str, ...] = ("author", "pilot")
    arms: tuple[str, ...] = STUDIED

    def __post_init__(self) -> None:
        require_at_least_one(self, "epochs")
        require_known("presets", self.presets, PRESETS)
        require_known("arms", self.arms, ARMS)


def cases_for_every_network(kind: type[Any], settings: NetworkSettings, seeds: Sequence[int]) -> list[Any]:
    """A case of the class ``kind`` for every arm under every preset; its other fields are those of the settings."""
    names = {one.name for one in fields(kind)} & {one.name for one in fields(settings)}
    chosen = {name: getattr(settings, name) for name in names} | {"seeds": tuple(seeds)}
    return [kind(preset=preset, arm=arm, **chosen) for preset, arm in product(settings.presets, settings.arms)]


@dataclass(frozen=True)
class CircleNetworks:
    """All seeds of one arm under one preset, at the preset's beta, trained as one stack."""

    preset: str
    arm: str
    seeds: tuple[int, ...]
    epochs: int
    width: int = 16
    depth: int = 5
    batch: int = 32

    def data(self) -> Dataset:
        """The samples that the networks learn."""
        return ARMS[self.arm].circle(PRESETS[self.preset]).dataset()

    def steps_per_epoch(self) -> int:
        """Optimiser steps in one epoch."""
        return -(-len(self.data()) // self.batch)

    def spec(self) -> NetSpec:
        """The architecture of one network."""
        return ARMS[self.arm].spec(PRESETS[self.preset], self.width, self.depth)

    def checkpointed_epochs(self) -> list[int]:
        """Epochs with a checkpoint: close together early, far apart late, and those of the paper's figures."""
        growing = FixedSteps.growing(self.epochs, CHECKPOINTS_PER_OCTAVE).steps
        return sorted(growing | {epoch for epoch in PAPER_EPOCHS if epoch <= self.epochs})

    def training(self) -> Training:
        """The training of the stack; losses and active paths are measured after every epoch."""
        lr, beta, unit = PRESETS[self.preset].lr, preset_beta(self.preset, self.arm), self.steps_per_epoch()
        recipe = Recipe(
            self.spec(),
            tuple(Member(seed, lr, beta) for seed in self.seeds),
            epochs=self.epochs,
            batch=self.batch,
            checkpoint_epochs=self.epochs,
            checkpoints_at=tuple(self.checkpointed_epochs()),
        )
        every_epoch = FixedSteps.at(range(0, self.epochs * unit + 1, unit))
        return Training(f"{self.preset}-{self.arm}", recipe, self.data(), (Measure(standard.curves, every_epoch),))

    def folder(self, work: Work) -> Path:
        """The run folder, which studies share."""
        return self.training().folder(work.runs.parent / FOLDER)

    def train(self, work: Work) -> Run:
        """The finished run; training resumes from its last checkpoint."""
        return self.training().run(replace(work, study=FOLDER, runs=work.runs.parent / FOLDER))


# --- what is read from a run ---------------------------------------------------------------------------------


def read_curve(nets: CircleNetworks, run: Run, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Epochs ``[T]`` and values ``[T, seeds]`` of a scalar that was measured along the run."""
    steps, values = run.scalars(name)
    return steps // nets.steps_per_epoch(), values


def first_time(times: NDArray[Any], reached: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The first time at which each column ``[times, seeds]`` is true; infinity if never."""
    return np.where(reached.any(0), times[reached.argmax(0)], np.inf)


def plateau_epochs(nets: CircleNetworks, run: Run) -> NDArray[np.float64]:
    """For each seed the first checkpointed epoch at which the loss is down to the plateau near 0.25; infinity if never."""
    epochs, loss = read_curve(nets, run, "loss")
    saved = np.isin(epochs, nets.checkpointed_epochs())
    return first_time(epochs[saved], loss[saved] <= PLATEAU)


def stack_at(nets: CircleNetworks, run: Run, epochs: float | Sequence[float] | NDArray[np.float64]) -> GatedNet:
    """The networks as they were at a checkpointed epoch, or each seed at its own epoch. An infinite epoch means the last."""
    moments = np.minimum(np.broadcast_to(epochs, len(nets.seeds)), nets.epochs).astype(int).tolist()
    checkpoints = {epoch: run.checkpoint(epoch * nets.steps_per_epoch()) for epoch in set(moments)}
    net = build_member_stack(nets.spec(), nets.training().recipe.members, torch.float32)
    parameters = {
        name: torch.stack(
            [torch.from_numpy(checkpoints[epoch][f"model/{name}"][row]) for row, epoch in enumerate(moments)]
        )
        for name in net.state_dict()
    }
    net.load_state_dict(parameters)
    return net


# --- what is drawn -------------------------------------------------------------------------------------------


def preset_panels(
    results: Results, titles: Mapping[Any, str], size: tuple[float, float], xlabel: str, ylabel: str = "", **share: Any
) -> tuple[plots.Figure, dict[tuple[str, Any], plots.Axes]]:
    """A figure with one row of panels per preset and one column per title; axes by (preset, key of the title)."""
    presets = results.settings.presets
    figure, axes = plots.grid(len(presets), len(titles), size, **{"sharex": True, "sharey": True, **share})
    for column, title in enumerate(titles.values()):
        axes[0, column].set_title(title)
        axes[-1, column].set_xlabel(xlabel)
    for row, preset in enumerate(presets):
        axes[row, 0].set_ylabel(f"{preset} preset\n{ylabel}".strip())
    return figure, dict(zip(product(presets, titles), axes.flat, strict=True))
