"""Tasks of the studies about gates: data, a layout and a recipe; labels planted by random networks whose gates are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unlazy.data.dataset import Dataset
from unlazy.data.images import Images, load_images
from unlazy.data.relabelling import redraw_labels
from unlazy.models.build import build
from unlazy.models.gates import HardGate
from unlazy.models.spec import ImageSpec, Init, NetSpec
from unlazy.runtime import stream
from unlazy.studies.halfspace.image_networks import relu_of_equal_size
from unlazy.studies.study import Work, require_at_least_one
from unlazy.studies.trainings import flat_dataset

Spec = NetSpec | ImageSpec
PLANTED = "planted"
CLASSES_OF_TEACHER = 2


@dataclass(frozen=True)
class Task:
    """Data, a layout and a recipe. ``widths`` and ``blocks`` as in :class:`ImageSpec`; without blocks the network is dense, with
    ``depth`` layers of ``widths[0]`` units.

    ``halve``: pictures are averaged over 2 x 2 pixels. ``teacher``: of planted data, the non-linear layers of the gating network
    whose labels are learned, and ``teacher_width`` its width. ``other``: the data set of another task on inputs of the same size.
    ``beta``: the slope of hard gates in the backward pass.
    """

    data: str
    images: int
    test_images: int
    widths: tuple[int, ...]
    epochs: int
    batch: int
    lr: float
    blocks: tuple[int, ...] = ()
    depth: int = 5
    beta: float = 4.0
    halve: bool = False
    augment: bool = False
    teacher: tuple[int, ...] = ()
    teacher_width: int = 16
    inputs: int = 16
    other: str = ""

    def __post_init__(self) -> None:
        require_at_least_one(self, "images", "test_images", "epochs", "batch", "depth")

    @property
    def is_dense(self) -> bool:
        """Whether its networks are dense."""
        return not self.blocks

    @property
    def gated_layers(self) -> int:
        """How many gated layers its networks have."""
        return self.depth if self.is_dense else 1 + 2 * sum(self.blocks)

    def spec(self, data: TaskData, **choices: Any) -> Spec:
        """A network with linear gates for this task, with some settings changed."""
        made: Spec
        if self.is_dense:
            sizes: dict[str, Any] = {"width": self.widths[0], "depth": self.depth}
            made = NetSpec(data.inputs, data.classes, gate=HardGate(self.beta), **sizes)
        else:
            sizes = {"channels": data.inputs, "classes": data.classes, "even_gates": True}
            made = ImageSpec(self.widths, self.blocks, gate=HardGate(self.beta), **sizes)
        return replace(made, **choices)


def relu_of_equal_parameters(spec: Spec) -> Spec:
    """The ReLU network of this depth whose number of parameters is nearest to that of the gated network."""
    if isinstance(spec, ImageSpec):
        return relu_of_equal_size(spec)
    wanted = _count_parameters(spec)
    wider = [replace(spec.relu(), width=width) for width in range(spec.width, 2 * spec.width + 1)]
    return min(wider, key=lambda one: abs(_count_parameters(one) - wanted))


@cache
def _count_parameters(spec: NetSpec) -> int:
    return sum(parameter.numel() for parameter in build(spec).parameters())


# --- data ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskData:
    """Samples to train on and to judge on, as data sets (dense networks) or as pictures. ``inputs``: columns or channels."""

    train: Dataset | Images
    test: Dataset | Images
    inputs: int
    classes: int

    def test_inputs(self, count: int) -> Tensor:
        """The first test samples as networks see them."""
        return _inputs(self.test)[:count]

    def train_inputs(self, count: int) -> Tensor:
        """The first training samples as networks see them."""
        return _inputs(self.train)[:count]

    def test_labels(self, count: int, place: int) -> Tensor:
        """One-hot labels of the first test samples; planted data have others for every seed, by its ``place`` in the stack."""
        if isinstance(self.test, Images):
            return self.test.one_hot()[:count]
        return self.test.y[place, :count] if self.test.y.ndim == 3 else self.test.y[:count]


def _inputs(some: Dataset | Images) -> Tensor:
    return some.floats(standardise=True) if isinstance(some, Images) else some.x


def load_task(task: Task, seeds: Sequence[int], work: Work, *, other: bool = False, shuffle: bool = False) -> TaskData:
    """The data of a task. ``other``: of its other task. ``shuffle``: training labels are drawn by lot."""
    if task.data == PLANTED:
        return planted_data(task, seeds)
    train, test = (_load_pictures(task, other, split, work.data) for split in ("train", "test"))
    if shuffle:
        train = redraw_labels(train, range(len(train.classes)), 1.0)
    classes = len(train.classes)
    if not task.is_dense:
        return TaskData(train, test, int(train.pixels.shape[1]), classes)
    both = [replace(flat_dataset(some, some.name), options={"shuffled": shuffle}) for some in (train, test)]
    return TaskData(both[0], both[1], int(both[0].x.shape[1]), classes)


def _load_pictures(task: Task, other: bool, split: str, folder: Path | None) -> Images:
    images = load_images(task.other if other else task.data, split, folder)
    images = images.take(slice(task.images if split == "train" else task.test_images))
    if task.halve:
        small = F.avg_pool2d(images.pixels.float(), 2).round().to(torch.uint8)
        images = replace(images, pixels=small)
    return images


def planted_data(task: Task, seeds: Sequence[int]) -> TaskData:
    """Gaussian inputs; the labels of each seed say on which side of its median a random gated network of its own lies.

    The teacher's gates are hard, and its gating network has ReLUs behind the layers ``task.teacher``: without any, half-spaces
    made the labels.
    """
    samples = {
        part: torch.randn(count, task.inputs, generator=stream(0, "inputs", part), dtype=torch.float64)
        for part, count in (("train", task.images), ("test", task.test_images))
    }
    choices: dict[str, Any] = {"width": task.teacher_width, "depth": task.depth, "init": Init("he")}
    spec = NetSpec(task.inputs, gate=HardGate(None), nonlinear_gate_layers=task.teacher, **choices)
    labels: dict[str, list[Tensor]] = {part: [] for part in samples}
    for seed in seeds:
        teacher = build(spec, seed=10_000 + seed, dtype=torch.float64)
        with torch.no_grad():
            outputs = {part: teacher(x)[:, 0] for part, x in samples.items()}
        above = {part: (some >= outputs["train"].median()).long() for part, some in outputs.items()}
        for part, classes in above.items():
            labels[part].append(F.one_hot(classes, CLASSES_OF_TEACHER).float())
    options = {"teacher": list(task.teacher), "seeds": list(seeds)}
    sets = [
        Dataset("planted", x.float(), torch.stack(labels[part]), {}, options | {"part": part})
        for part, x in samples.items()
    ]
    return TaskData(sets[0], sets[1], task.inputs, CLASSES_OF_TEACHER)


# --- the tasks of each scale -----------------------------------------------------------------------------------

CIFAR_10, CIFAR_100, FASHION, FLAT, NESTED = "cifar-10", "cifar-100", "fashion-mnist", "half-spaces", "nested"
RESIDUAL, DENSE, TEACHERS = (CIFAR_10, CIFAR_100), (FASHION,), (FLAT, NESTED)
RESNET_18: dict[str, Any] = {
    "images": 50_000,
    "test_images": 10_000,
    "widths": (64, 128, 256, 512),
    "blocks": (2, 2, 2, 2),
    "epochs": 16,
    "batch": 512,
    "lr": 0.3,
    "beta": 1.0,
    "augment": True,
}
SMALL_RESIDUAL: dict[str, Any] = {
    "images": 4000,
    "test_images": 2000,
    "widths": (8, 16),
    "blocks": (1, 1),
    "epochs": 8,
    "batch": 64,
    "lr": 0.1,
    "beta": 1.0,
    "halve": True,
}
DENSE_SIZES: dict[str, Any] = {
    "images": 4000,
    "test_images": 2000,
    "widths": (64,),
    "epochs": 20,
    "batch": 64,
    "lr": 1e-3,
}
TEACHER_SIZES = DENSE_SIZES | {"images": 8000, "widths": (32,), "epochs": 40, "inputs": 8}
ALL_OF_FIVE = (1, 2, 3, 4, 5)
DESK_TASKS = {
    CIFAR_10: Task("cifar-10", other="cifar-100", **SMALL_RESIDUAL),
    FASHION: Task("fashion-mnist", other="mnist", **DENSE_SIZES),
    FLAT: Task(PLANTED, **TEACHER_SIZES),
    NESTED: Task(PLANTED, teacher=ALL_OF_FIVE, **TEACHER_SIZES),
}
PAPER_TASKS = {
    CIFAR_100: Task("cifar-100", other="cifar-10", **RESNET_18),
    CIFAR_10: Task("cifar-10", other="cifar-100", **RESNET_18),
    **{name: task for name, task in DESK_TASKS.items() if task.is_dense},
}
TINY: dict[str, Any] = {"images": 200, "test_images": 100, "epochs": 1, "batch": 50}
SMOKE_TASKS = {
    CIFAR_10: Task("digits", other="digits", widths=(2, 4), blocks=(1, 1), lr=0.1, beta=1.0, **TINY),
    FASHION: Task("digits", other="digits", widths=(8,), lr=1e-3, **TINY),
    FLAT: Task(PLANTED, widths=(4,), lr=1e-3, **TINY),
    NESTED: Task(PLANTED, teacher=ALL_OF_FIVE, widths=(4,), lr=1e-3, **TINY),
}
