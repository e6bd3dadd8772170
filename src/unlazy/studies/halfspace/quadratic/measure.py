"""Training the quadratic-gate study, and the numbers that its claim and figures speak of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unlazy.data.dataset import Dataset
from unlazy.data.files import state_of
from unlazy.data.images import Images, load_images
from unlazy.data.relabelled import Cut, Relabelling, cut_classes, relabel
from unlazy.kernels.compare import kernel_distance, relative_change
from unlazy.kernels.overlap import overlap_kernel
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import member
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec
from unlazy.probes import standard
from unlazy.probes.paths import allocation
from unlazy.scope.schedule import Fixed
from unlazy.scope.scope import Measure
from unlazy.store import Run
from unlazy.studies.halfspace.circle.settings import PRESETS
from unlazy.studies.halfspace.quadratic.settings import (
    GATINGS,
    IMAGE_TASKS,
    RULES,
    Circles,
    Settings,
    circle_recipe,
    parameters,
    picture_recipe,
)
from unlazy.studies.results import plain
from unlazy.studies.trainings import ACCURACIES, Training, accuracy_on_test_data, accuracy_on_training_data, last

KERNEL_EPOCHS = (0, 1, 3, 10, 30, 100)


def left_out(settings: Settings) -> dict[str, str]:
    """Image tasks that cannot be done here, and why."""
    sources = {task: IMAGE_TASKS[task] for task, _ in settings.pictures.tasks}
    return {
        task: f"the files of {images} are not in the data folder"
        for task, images in sources.items()
        if state_of(images) != "present"
    }


def key(task: str, rule: str, gating: str) -> str:
    return f"{task}-{rule}-{gating}"


def trainings(settings: Settings) -> list[Training]:
    """One stack of all seeds per task, gate rule and gating."""
    return [*_circle_trainings(settings.circles), *_picture_trainings(settings)]


def _circle_trainings(circles: Circles) -> Iterator[Training]:
    for preset in circles.presets:
        data = PRESETS[preset].circle.dataset()
        coarse = data.take(slice(None, None, circles.kernel_stride))
        for rule in RULES:
            for gating in GATINGS:
                recipe = circle_recipe(circles, preset, rule, gating)
                unit = recipe.steps_per_epoch(len(data))
                end = circles.epochs * unit
                measures = (
                    Measure(standard.curves, Fixed.growing(end, unit=unit)),
                    Measure(standard.kernels, _moments(circles.epochs, unit), coarse),
                    Measure(standard.floors, Fixed.at({0, end})),
                )
                yield Training(key(preset, rule, gating), recipe, data, measures)


def _picture_trainings(settings: Settings) -> Iterator[Training]:
    pictures, without = settings.pictures, left_out(settings)
    for task, n in pictures.tasks:
        if task in without:
            continue
        data, tests = image_data(task, n, pictures.tests)
        few = tests.take(slice(pictures.kernel_images))
        for rule in RULES:
            for gating in GATINGS:
                recipe = picture_recipe(pictures, data.x.shape[1], data.y.shape[1], rule, gating)
                unit = recipe.steps_per_epoch(len(data))
                every = Fixed.at(range(0, pictures.epochs * unit + 1, unit))
                measures = (
                    Measure(accuracy_on_training_data, every),
                    Measure(accuracy_on_test_data, every, tests),
                    Measure(kernels_one_by_one, _moments(pictures.epochs, unit), few),
                )
                yield Training(key(task, rule, gating), recipe, data, measures)


def _moments(epochs: int, unit: int) -> Fixed:
    return Fixed.at({epoch * unit for epoch in KERNEL_EPOCHS if epoch <= epochs} | {epochs * unit})


def image_data(task: str, n: int, tests: int) -> tuple[Dataset, Dataset]:
    """The first ``n`` training and ``tests`` test images, standardised, with one-hot labels."""
    source = IMAGE_TASKS[task]
    train, test = load_images(source).take(slice(n)), load_images(source, "test").take(slice(tests))
    if task != source:
        groups = cut_classes(train, test, Cut())
        train, test = (relabel(part, own, Relabelling()) for part, own in ((train, groups.train), (test, groups.test)))
    return _as_data(task, train), _as_data(task, test)


def _as_data(task: str, images: Images) -> Dataset:
    return Dataset(task, images.flat(standardise=True), images.one_hot(), {}, {"split": images.split})


def kernels_one_by_one(model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
    """Overlap and tangent kernel member by member: a stack would hold the gradients of all of them at once."""
    tangent = [tangent_kernel(member(model, index), batch.x) for index in range(model.members or 0)]
    return {"overlap": overlap_kernel(model, batch.x).float(), "tangent": torch.stack(tangent)}


def measure(training: Training, run: Run) -> dict[str, Any]:
    """``{run, width, parameters, epochs, values}``; values per seed, and ``dynamics`` per moment and seed."""
    unit = training.recipe.steps_per_epoch(len(training.data))
    spec: NetSpec = training.recipe.model
    values = _circle_values(run) if training.data.name == "circle" else _picture_values(run)
    return {
        "run": run.id,
        "width": spec.width,
        "parameters": parameters(spec),
        "values": {name: plain(value) for name, value in values.items()},
        "dynamics": _dynamics(run, unit),
        "curve": _curve(run, unit, "loss" if training.data.name == "circle" else "test_as_trained"),
    }


def _circle_values(run: Run) -> dict[str, NDArray[np.float64]]:
    names = ("loss", "loss_hard_gates", "cells", "cell_floor")
    top, bottom = (torch.from_numpy(last(run, f"paths_{half}")) for half in ("top", "bottom"))
    return {name: last(run, name) for name in names} | {"allocation": allocation(top, bottom).numpy()}


def _picture_values(run: Run) -> dict[str, NDArray[np.float64]]:
    return {name: last(run, name) for name in ACCURACIES}


def _dynamics(run: Run, unit: int) -> dict[str, Any]:
    """Distance of both kernels from the start (1 - cosine, and relative change) at every recorded epoch."""
    steps = run.array_steps("overlap")
    found: dict[str, Any] = {"epochs": [step // unit for step in steps]}
    for name in ("overlap", "tangent"):
        start, *later = [torch.from_numpy(run.array(name, step)).double() for step in steps]
        for how, compare in (("distance", kernel_distance), ("change", relative_change)):
            moved = [compare(start, start), *(compare(kernel, start) for kernel in later)]
            found[f"{name}_{how}"] = plain(torch.stack(moved).clamp(min=0).numpy())
    return found


def _curve(run: Run, unit: int, name: str) -> dict[str, Any]:
    steps, values = run.scalars(name)
    return {"epochs": (steps // unit).tolist(), "values": plain(values)}
