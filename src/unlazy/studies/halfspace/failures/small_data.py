"""F3: the gap between training and test accuracy, from a few dozen images to thousands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy.data.dataset import Dataset
from unlazy.data.files import state_of
from unlazy.data.images import Images, load_images
from unlazy.runtime import stream
from unlazy.scope.schedule import Fixed
from unlazy.scope.scope import Measure
from unlazy.store import Run
from unlazy.studies.halfspace.failures.settings import SmallData, classifier
from unlazy.studies.results import plain
from unlazy.studies.trainings import ACCURACIES, Training, accuracy_on_test_data, accuracy_on_training_data, last
from unlazy.training.ensemble import Member
from unlazy.training.fit import Recipe


@dataclass(frozen=True)
class Case:
    """One stack: a kind and width of network on the first ``n`` images of one draw."""

    images: str
    n: int
    draw: int
    width: int
    kind: str

    @property
    def key(self) -> str:
        return f"small-{self.images}-{self.n}-{self.draw}-{self.width}-{self.kind}"


def left_out(settings: SmallData) -> dict[str, str]:
    """Image sets that cannot be used here, and why."""
    missing = [name for name, _ in settings.sizes if state_of(name) != "present"]
    return dict.fromkeys(missing, "its files are not in the data folder")


def cases(settings: SmallData) -> Iterator[Case]:
    """Every stack of the experiment whose images are there."""
    without = left_out(settings)
    for images, sizes in settings.sizes:
        if images in without:
            continue
        for n in sizes:
            for draw in range(settings.draws):
                for width in settings.widths:
                    for kind in settings.kinds:
                        yield Case(images, n, draw, width, kind)


def trainings(settings: SmallData) -> list[Training]:
    """One stack per case; its members are the starts of that draw."""
    found = list(cases(settings))
    names = {case.images for case in found}
    pictures = {(name, split): load_images(name, split) for name in names for split in ("train", "test")}
    tests = {name: as_data(pictures[name, "test"], torch.arange(settings.tests)) for name in names}
    return [_training(settings, case, pictures[case.images, "train"], tests[case.images]) for case in found]


def _training(settings: SmallData, case: Case, pictures: Images, tests: Dataset) -> Training:
    rows = torch.randperm(len(pictures), generator=stream(case.draw, "small data", case.images))[: case.n]
    data = as_data(pictures, rows)
    spec = classifier(case.kind, data.x.shape[1], data.y.shape[1], case.width, settings.depth, settings.beta)
    seeds = range(case.draw * settings.seeds, (case.draw + 1) * settings.seeds)
    members = tuple(Member(seed, settings.lr) for seed in seeds)
    unit = -(-case.n // settings.batch)
    epochs = max(-(-settings.updates // unit), settings.least_epochs)
    recipe = Recipe(spec, members, epochs, settings.batch, "cross-entropy", checkpoint_epochs=epochs)
    end = Fixed.at({epochs * unit})
    measures = (Measure(accuracy_on_training_data, end), Measure(accuracy_on_test_data, end, tests))
    return Training(case.key, recipe, data, measures)


def as_data(pictures: Images, rows: torch.Tensor) -> Dataset:
    """Some of the images as standardised rows with one-hot classes."""
    chosen = pictures.take(rows[rows < len(pictures)])
    return Dataset(pictures.name, chosen.flat(standardise=True), chosen.one_hot(), {}, {"split": pictures.split})


def measure(settings: SmallData, runs: Mapping[str, Run]) -> dict[str, Any]:
    """``values[images][kind-width][name][size][draw and seed]``."""
    by_stack: dict[str, dict[str, dict[str, list[NDArray[np.float64]]]]] = {}
    for images, sizes in settings.sizes:
        if images in left_out(settings):
            continue
        by_stack[images] = {}
        for kind in settings.kinds:
            for width in settings.widths:
                rows: dict[str, list[NDArray[np.float64]]] = {name: [] for name in ACCURACIES}
                for n in sizes:
                    found = [runs[Case(images, n, draw, width, kind).key] for draw in range(settings.draws)]
                    for name, row in rows.items():
                        row.append(np.concatenate([last(run, name) for run in found]))
                by_stack[images][f"{kind}-{width}"] = rows
    return {
        images: {stack: {name: plain(np.array(row)) for name, row in rows.items()} for stack, rows in stacks.items()}
        for images, stacks in by_stack.items()
    }
