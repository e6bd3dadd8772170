"""Stacks to train, in run folders of their own: what the studies of the published summary share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unlazy.data.dataset import Dataset
from unlazy.models.net import GatedNet
from unlazy.runtime import require, short_hash
from unlazy.scope.scope import Measure
from unlazy.store import Run
from unlazy.training.fit import Progress, Recipe, fit
from unlazy.training.sweep import sweep

Numbers = Mapping[str, NDArray[Any]]
ACCURACIES = ("train_as_trained", "train_hard_gates", "test_as_trained", "test_hard_gates")


@dataclass(frozen=True)
class Training:
    """One stack with its data and measures. ``start``: numbers to begin with; ``after``: the id of the run they are from."""

    key: str
    recipe: Recipe
    data: Dataset
    measures: tuple[Measure, ...]
    start: Numbers | None = field(default=None, repr=False)
    after: str | None = None

    def __post_init__(self) -> None:
        require((self.start is None) == (self.after is None), "a start needs the id of the run it was taken from.")

    def folder(self, root: Path) -> Path:
        """``KEY-ID``: other settings have another id and never collide."""
        decides = self.recipe.to_dict(self.data, self.measures)
        if self.after is not None:
            decides["after"] = self.after
        return root / f"{self.key}-{short_hash(decides)}"

    def train(self, root: Path, study: str, scale: str) -> None:
        """From wherever the run stands to its end."""
        folder = self.folder(root)
        fit(self.recipe, self.data, self.measures, folder, start=self.start, study=study, scale=scale)


def train_all(
    trainings: Sequence[Training], root: Path, study: str, scale: str, *, workers: int, progress: Progress
) -> dict[str, Run]:
    """Train (or go on training, or just open) every stack; ``progress(done, total)`` counts finished ones."""
    folders = {training.key: training.folder(root) for training in trainings}
    require(len(folders) == len(trainings), "two trainings have the same key.")
    done: set[Path] = set()

    def tick() -> None:
        done.update(folder for folder in folders.values() if folder not in done and is_finished(folder))
        progress(len(done), len(trainings))

    sweep(Training.train, [(training, root, study, scale) for training in trainings], workers, tick)
    return {key: Run(folder) for key, folder in folders.items()}


def is_finished(folder: Path) -> bool:
    """Whether a run folder holds a whole training."""
    return (folder / "status.json").exists() and Run(folder).status()["state"] == "finished"


def steps_done(folder: Path) -> int:
    """How far the training in a run folder has come."""
    return int(Run(folder).status()["step"]) if (folder / "status.json").exists() else 0


def side_by_side(sets: Sequence[Dataset]) -> Dataset:
    """Data sets that differ in their targets alone, as one whose members have targets of their own, ``y [S, n, o]``."""
    first = sets[0]
    require(all(torch.equal(one.x, first.x) for one in sets), "only data sets with the same inputs go side by side.")
    options = {"members": [dict(one.options) for one in sets]}
    return replace(first, y=torch.stack([one.y for one in sets]), options=options)


def accuracy_on_training_data(model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
    """Share of right classes on the samples that are trained on, as trained and with hard gates."""
    return _accuracies("train", model, batch)


def accuracy_on_test_data(model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
    """The same on samples that were kept apart."""
    return _accuracies("test", model, batch)


def _accuracies(split: str, model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
    with torch.no_grad():
        gates, wanted = model.gates(batch.x), batch.y.argmax(-1)
        outputs = {"as_trained": model.value(batch.x, gates), "hard_gates": model.value(batch.x, gates.hard())}
    return {f"{split}_{name}": (out.argmax(-1) == wanted).double().mean(-1) for name, out in outputs.items()}


def last(run: Run, name: str) -> NDArray[np.float64]:
    """A scalar at the end of training, one number per member."""
    return run.scalars(name)[1][-1]
