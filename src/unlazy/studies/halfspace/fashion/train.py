"""Training the Fashion-MNIST study: every stack into its own run folder, resumable, on any device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unlazy.data.dataset import Dataset
from unlazy.data.images import Images, load_images
from unlazy.data.relabelled import Cut, Groups, cut_classes, relabel
from unlazy.models.net import GatedNet
from unlazy.probes.classes import class_curves, class_kernels
from unlazy.runtime import require, short_hash
from unlazy.scope.schedule import Fixed
from unlazy.scope.scope import Measure
from unlazy.store import Run
from unlazy.studies.halfspace.fashion.settings import VARIANTS, Settings, Stack, stacks
from unlazy.studies.trainings import steps_done
from unlazy.training.fit import Progress, fit
from unlazy.training.sweep import sweep


@dataclass(frozen=True)
class Pictures:
    """The images of one scale, and the groups of their classes under every cut."""

    train: Images
    test: Images
    groups: Mapping[str, Groups]

    @classmethod
    def load(cls, settings: Settings, groups: Mapping[str, Groups] | None = None, *, workers: int = 1) -> Pictures:
        """The first images of each split. ``groups``: as an earlier call cut them; else the classes are cut now."""
        train = load_images(settings.data, "train").take(slice(settings.images))
        test = load_images(settings.data, "test").take(slice(settings.test_images))
        there, wanted = (len(train), len(test)), (settings.images, settings.test_images)
        require(there == wanted, f"{settings.data} has {there} training and test images, {wanted} are wanted.")
        if groups is None:
            cuts = (Cut(restarts=settings.restarts), Cut(how="random"))
            groups = {cut.how: cut_classes(train, test, cut, workers=workers) for cut in cuts}
        return cls(train, test, groups)

    def datasets(self, stack: Stack) -> tuple[Dataset, Dataset]:
        """Training and test images with the labels of every member; the groups are the original classes."""
        return self._dataset(stack, self.train, "train"), self._dataset(stack, self.test, "test")

    def _dataset(self, stack: Stack, images: Images, split: str) -> Dataset:
        tasks = stack.tasks()
        labelled = [relabel(images, getattr(self.groups[task.cut], split), task.relabelling()) for task in tasks]
        groups = {name: images.labels == label for label, name in enumerate(images.classes)}
        options = {"split": split, "standardised": VARIANTS[stack.variant].standardised}
        options["tasks"] = [[task.labels, list(task.easy), task.seed] for task in tasks]
        x = images.flat(VARIANTS[stack.variant].standardised)
        return Dataset(images.name, x, torch.stack([one.one_hot() for one in labelled]), groups, options)


@dataclass(frozen=True)
class Job:
    """One stack, the run folder that belongs to its recipe, and the groups of its images (so that nobody cuts twice)."""

    stack: Stack
    folder: Path
    groups: Mapping[str, Groups]
    device: str

    def train(self, scale: str) -> None:
        """From wherever the run stands to its end."""
        pictures = Pictures.load(self.stack.settings, self.groups)
        data, looks = _prepared(self.stack, pictures)
        recipe = self.stack.recipe(data.x.shape[1], self.device)
        fit(recipe, data, looks, self.folder, study="fashion", scale=scale)

    def epochs_done(self) -> int:
        unit = -(-self.stack.settings.images // self.stack.settings.batch)
        return steps_done(self.folder) // unit

    def cost(self) -> float:
        """A rough guess of its time; a step costs much the same with few members and with many."""
        return self.stack.epochs * (1.0 if self.stack.net == "relu" else 1.5)


def jobs(settings: Settings, folder: Path, device: str = "cpu", *, workers: int = 1) -> list[Job]:
    """Every stack with its folder, ``VARIANT-NET-ID``: other settings have another id and never collide."""
    pictures, found = Pictures.load(settings, workers=workers), []
    for stack in stacks(settings):
        data, looks = _prepared(stack, pictures)
        run_id = short_hash(stack.recipe(data.x.shape[1], device).to_dict(data, looks))
        found.append(Job(stack, folder / f"{stack.key}-{run_id}", pictures.groups, device))
    return found


def run(
    settings: Settings,
    folder: Path,
    scale: str,
    *,
    device: str = "cpu",
    workers: int = 1,
    progress: Progress | None = None,
) -> dict[str, Run]:
    """Train (or go on training, or just open) every stack; returns the runs by key.

    ``progress(done, total)`` counts epochs over all stacks.
    """
    found = jobs(settings, folder, device, workers=workers)
    todo = sorted(found, key=Job.cost, reverse=True)  # long ones first: no worker idles at the end
    total = sum(job.stack.epochs for job in todo)

    def tick() -> None:
        if progress is not None:
            progress(sum(job.epochs_done() for job in todo), total)

    sweep(Job.train, [(job, scale) for job in todo], workers, tick)
    return {job.stack.key: Run(job.folder) for job in found}


def _prepared(stack: Stack, pictures: Pictures) -> tuple[Dataset, list[Measure]]:
    """Training data, and what is measured when: test images often, training images at the end, kernels often but for splits."""
    data, test = pictures.datasets(stack)
    unit = stack.recipe(data.x.shape[1]).steps_per_epoch(len(data))
    looks, ends = stack.looks(unit), Fixed.at((0, stack.epochs * unit))
    pictured = first_of_each(test, stack.settings.kernel_images)
    return data, [
        Measure(on_test, looks, test),
        Measure(on_train, Fixed.at({stack.epochs * unit})),
        Measure(class_kernels, looks if VARIANTS[stack.variant].tasks else ends, pictured),
    ]


def first_of_each(test: Dataset, count: int) -> Dataset:
    """The first ``count`` images of every class, class by class."""
    return test.take(torch.cat([inside.nonzero()[:count, 0] for inside in test.groups.values()]))


def on_test(model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
    """Class curves of the test images."""
    return {f"test_{name}": value for name, value in class_curves(model, batch).items()}


def on_train(model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
    """Accuracies on the training images."""
    seen = class_curves(model, batch)
    return {f"train_{name}": seen[name] for name in ("accuracy", "accuracy_hard_gates")}
