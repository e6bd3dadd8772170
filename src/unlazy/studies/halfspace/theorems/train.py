"""Training the networks whose regions are counted: circle recipes, one run folder each, resumable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from unlazy.models.build import member
from unlazy.models.net import GatedNet
from unlazy.probes import standard
from unlazy.runtime import short_hash
from unlazy.scope.schedule import Fixed
from unlazy.scope.scope import Measure
from unlazy.store import Run
from unlazy.studies.halfspace.circle.settings import Stack
from unlazy.studies.halfspace.theorems.settings import Settings
from unlazy.studies.trainings import steps_done
from unlazy.training.ensemble import stack_of
from unlazy.training.fit import Progress, fit
from unlazy.training.sweep import sweep


@dataclass(frozen=True)
class Job:
    """One stack and the run folder that belongs to its recipe."""

    stack: Stack
    settings: Settings
    folder: Path

    @property
    def unit(self) -> int:
        return self.settings.recipe(self.stack).steps_per_epoch(self.stack.circle().n)

    def train(self, scale: str) -> None:
        """From wherever the run stands to its end."""
        data = self.stack.circle().dataset()
        fit(self.settings.recipe(self.stack), data, self.measures(), self.folder, study="theorems", scale=scale)

    def measures(self) -> list[Measure]:
        return [Measure(standard.curves, Fixed.at(epoch * self.unit for epoch in self.settings.looks))]

    def networks(self, epoch: int) -> list[GatedNet]:
        """Every member as it was after an epoch, in float64: its regions are those of its exact numbers."""
        recipe = self.settings.recipe(self.stack)
        together = stack_of(recipe.model, recipe.members, torch.float64)
        arrays = Run(self.folder).checkpoint(epoch * self.unit)
        numbers = {name.removeprefix("model/"): array for name, array in arrays.items() if name.startswith("model/")}
        together.load_state_dict({name: torch.from_numpy(array).double() for name, array in numbers.items()})
        return [member(together, index) for index in range(len(recipe.members))]


def jobs(settings: Settings, folder: Path) -> list[Job]:
    """Every stack with its folder, ``PRESET-ARM-ID``."""
    found = []
    for stack in settings.stacks():
        job = Job(stack, settings, folder)
        run_id = short_hash(settings.recipe(stack).to_dict(stack.circle().dataset(), job.measures()))
        found.append(Job(stack, settings, folder / f"{stack.key}-{run_id}"))
    return found


def train(
    settings: Settings, folder: Path, scale: str, *, workers: int = 1, progress: Progress | None = None
) -> list[Job]:
    """Train (or go on training, or just open) every stack."""
    todo = jobs(settings, folder)

    def tick() -> None:
        if progress is not None:
            progress(sum(steps_done(job.folder) // job.unit for job in todo), settings.epochs * len(todo))

    sweep(Job.train, [(job, scale) for job in todo], workers, tick)
    return todo
