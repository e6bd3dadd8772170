"""Quadratic against linear gates at the same number of parameters (F4).

A published summary of the half-space paper proposes the comparison and gives no number. Both kinds of gates are trained on the
circle and on images, as soft gates and as hard gates. Widths are chosen so that the numbers of parameters differ by at most 2 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unlazy import plots
from unlazy.claims.claim import Claim, Function, Part, Quantity, Shown, Vector
from unlazy.claims.functions import difference
from unlazy.data.dataset import Dataset
from unlazy.data.images import load_images
from unlazy.data.relabelling import Cut, Relabelling, cut_classes, relabel
from unlazy.kernels.compare import kernel_distance, relative_change
from unlazy.kernels.overlap import overlap_kernel
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build, member
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec
from unlazy.probes import standard
from unlazy.probes.paths import allocation
from unlazy.runtime import InputError
from unlazy.studies.halfspace.circle_networks import ARMS, PRESETS, preset_beta
from unlazy.studies.study import Case, Figure, Results, Study, Work, make_cases
from unlazy.studies.table import Rows, Table
from unlazy.studies.trainings import (
    AS_TRAINED,
    HARD,
    Training,
    add_accuracies,
    classification,
    classifier,
    final_values,
    flat_dataset,
)
from unlazy.training.ensemble import Member
from unlazy.training.fit import Recipe
from unlazy.training.recorder import FixedSteps, Measure

# --- what varies ---------------------------------------------------------------------------------------------

GATINGS = ("linear", "quadratic")
NETWORK_BY_RULE = {"soft": "pwc", "hard": "pwc-hard"}
"""The linearly gated network of each gate rule; its experts are constant."""
IMAGE_TASKS = {"digits": "digits", "relabelled-fashion": "fashion-mnist"}
"""The data set of each image task. Relabelled: half of the classes are cut into groups with shuffled labels."""
IMAGE_SEEDS = 10  # at most, for image tasks, which take longer
SIZE_TOLERANCE = 0.02  # largest relative difference of the numbers of parameters
WIDEST = 1.25  # by how much the linear net may be widened to find a quadratic net of its size


@dataclass(frozen=True)
class CircleTasks:
    """The circle of the half-space paper, under both presets. ``width`` is that of the linear net before sizes are matched."""

    epochs: int
    presets: tuple[str, ...] = ("author", "pilot")
    width: int = 16
    depth: int = 5
    kernel_stride: int = 5
    batch: int = 32


@dataclass(frozen=True)
class ImageTasks:
    """Image classification: standardised pixels, cross-entropy, constant experts."""

    epochs: int
    tasks: tuple[tuple[str, int], ...]  # task, number of training images
    tests: int = 2000
    width: int = 64
    depth: int = 3
    beta: float = 4.0
    lr: float = 1e-3
    batch: int = 32
    kernel_images: int = 40


@dataclass(frozen=True)
class Settings:
    """One scale of the study."""

    circles: CircleTasks
    pictures: ImageTasks


SCALES = {
    # seconds: shows that the study runs; no claim is judged
    "smoke": Settings(
        CircleTasks(epochs=3, presets=("pilot",), width=18, depth=2, kernel_stride=16),
        ImageTasks(epochs=1, tasks=(("digits", 60),), tests=60, width=12, depth=2, kernel_images=6),
    ),
    # a few minutes on two cores
    "desk": Settings(
        CircleTasks(epochs=100),
        ImageTasks(epochs=6, tasks=(("digits", 1400),), width=32, kernel_images=20),
    ),
    "paper": Settings(
        CircleTasks(epochs=300),
        ImageTasks(epochs=15, tasks=(("digits", 1400), ("relabelled-fashion", 4000))),
    ),
}


# --- networks of the same size -------------------------------------------------------------------------------


@cache
def count_parameters(spec: NetSpec) -> int:
    """The number of trained parameters."""
    return sum(parameter.numel() for parameter in build(spec).parameters())


def match_sizes(linear: NetSpec) -> dict[str, NetSpec]:
    """A linearly and a quadratically gated network whose numbers of parameters differ by at most ``SIZE_TOLERANCE``.

    The linear net has the width of ``linear``, or the next larger one at which a quadratic net of nearly its size exists.
    """
    for width in range(linear.width, int(WIDEST * linear.width) + 1):
        wide = replace(linear, width=width)
        count = count_parameters(wide)
        others = [replace(wide, gating="quadratic", width=narrower) for narrower in range(width, 0, -1)]
        nearest = min(others, key=lambda other: abs(count_parameters(other) - count))
        if abs(count_parameters(nearest) - count) <= SIZE_TOLERANCE * count:
            return {"linear": wide, "quadratic": nearest}
    raise InputError(
        f"no quadratic net comes within {SIZE_TOLERANCE:.0%} of a linear one of width {linear.width} to {width}; "
        "choose a larger width."
    )


# --- cases ---------------------------------------------------------------------------------------------------

KERNEL_EPOCHS = (0, 1, 3, 10, 30, 100)


def is_circle(task: str) -> bool:
    """Whether a task is a preset of the circle study; otherwise it is an image task."""
    return task in PRESETS


def cases(settings: Settings, seeds: Sequence[int]) -> list[Case]:
    """One case for every task, gate rule and gating, with all its seeds. Widths are those before sizes are matched."""
    circles, pictures, few = settings.circles, settings.pictures, tuple(seeds[:IMAGE_SEEDS])
    tasks = [{"task": task, "seeds": tuple(seeds)} for task in circles.presets]
    image_tasks = [{"task": task, "samples": samples, "seeds": few} for task, samples in pictures.tasks]
    kinds = [{"rule": rule, "gating": gating} for rule in NETWORK_BY_RULE for gating in GATINGS]
    return [
        *make_cases([{**task, **kind} for task in tasks for kind in kinds], circles, without=("presets",)),
        *make_cases([{**task, **kind} for task in image_tasks for kind in kinds], pictures, without=("tasks",)),
    ]


def training_of(case: Case, folder: Path | None = None) -> Training:
    """The training of a case: all seeds of one gate rule and gating on one task, with kernels at a few epochs."""
    key, network = f"{case.task}-{case.rule}-{case.gating}", NETWORK_BY_RULE[case.rule]
    if is_circle(case.task):
        preset = PRESETS[case.task]
        data = preset.circle.dataset()
        spec = match_sizes(ARMS[network].spec(preset, case.width, case.depth))[case.gating]
        members = tuple(Member(seed, preset.lr, preset_beta(case.task, network)) for seed in case.seeds)
        recipe = Recipe(spec, members, case.epochs, case.batch, checkpoint_epochs=case.epochs)
        unit = recipe.steps_per_epoch(len(data))
        end = case.epochs * unit
        measures = (
            Measure(standard.curves, FixedSteps.growing(end, unit=unit)),
            Measure(standard.kernels, kernel_steps(case, unit), data.take(slice(None, None, case.kernel_stride))),
            Measure(standard.floors, FixedSteps.at({0, end})),
        )
        return Training(key, recipe, data, measures)
    data, tests = image_datasets(case.task, case.samples, case.tests, folder)
    linear = classifier(network, data, case.beta, width=case.width, depth=case.depth)
    members = tuple(Member(seed, case.lr) for seed in case.seeds)
    every_epoch = range(case.epochs + 1)
    accuracies = classification(
        key, match_sizes(linear)[case.gating], members, case.epochs, case.batch, (data, tests), every_epoch
    )
    moments = kernel_steps(case, accuracies.recipe.steps_per_epoch(len(data)))
    kernels = Measure(kernels_one_by_one, moments, tests.take(slice(case.kernel_images)))
    return replace(accuracies, measures=(*accuracies.measures, kernels))


def kernel_steps(case: Case, steps_per_epoch: int) -> FixedSteps:
    """When kernels are measured: at ``KERNEL_EPOCHS`` and at the end."""
    return FixedSteps.at({epoch * steps_per_epoch for epoch in (*KERNEL_EPOCHS, case.epochs) if epoch <= case.epochs})


def image_datasets(task: str, n: int, tests: int, folder: Path | None = None) -> tuple[Dataset, Dataset]:
    """Training set of the first ``n`` images and test set of ``tests`` images, standardised, with one-hot labels."""
    source = IMAGE_TASKS[task]
    train, test = load_images(source, "train", folder).take(slice(n)), load_images(source, "test", folder)
    test = test.take(slice(tests))
    if task != source:
        groups = cut_classes(train, test, Cut())
        train, test = (relabel(part, own, Relabelling()) for part, own in ((train, groups.train), (test, groups.test)))
    return flat_dataset(train, task), flat_dataset(test, task)


# --- how a case is measured ----------------------------------------------------------------------------------

KERNELS = ("overlap", "tangent")
COMPARISONS = {"distance_from_start": kernel_distance, "change_from_start": relative_change}


def measure(case: Case, work: Work) -> Rows:
    """Size, loss or accuracy, and the distance of both kernels from their start (1 - cosine, and relative change)."""
    training = training_of(case, work.data)
    run, rows, spec = training.run(work), Rows(), training.recipe.model
    unit = training.recipe.steps_per_epoch(len(training.data))
    for name, size in (("width", spec.width), ("parameters", count_parameters(spec))):
        rows.add(name, [size] * len(case.seeds), seed=case.seeds)
    if is_circle(case.task):
        steps, loss = run.scalars("loss")
        rows.add("loss", loss, at=steps // unit, seed=case.seeds)
        top, bottom = (torch.from_numpy(final_values(run, f"paths_{half}")) for half in ("top", "bottom"))
        ends = {name: final_values(run, name) for name in ("loss", "loss_hard_gates", "cells", "cell_floor")}
        rows.add_all(ends | {"allocation": allocation(top, bottom).numpy()}, at="end", seed=case.seeds)
    else:
        steps, right = run.scalars("test_as_trained")
        rows.add("accuracy", right, at=steps // unit, seed=case.seeds, split="test", gates=AS_TRAINED)
        add_accuracies(rows, run, seed=case.seeds)
    moments = run.array_steps("overlap")
    for kernel in KERNELS:
        found = [torch.from_numpy(run.array(kernel, step)).double() for step in moments]
        for name, compare in COMPARISONS.items():
            moved = torch.stack([compare(one, found[0]) for one in found]).clamp(min=0).numpy()
            rows.add(name, moved, at=[step // unit for step in moments], seed=case.seeds, kernel=kernel)
            rows.add(name, moved[-1], at="end", seed=case.seeds, kernel=kernel)
    return rows


def kernels_one_by_one(model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
    """Overlap and tangent kernels; the latter member by member, because a stack needs memory for all gradients at once."""
    tangent = [tangent_kernel(member(model, index), batch.x) for index in range(model.members or 0)]
    return {"overlap": overlap_kernel(model, batch.x).float(), "tangent": torch.stack(tangent)}


# --- what is claimed -----------------------------------------------------------------------------------------

TASKS = ("author", "pilot", *IMAGE_TASKS)


def decades_below(linear: Vector, quadratic: Vector) -> Vector:
    """How far the loss of quadratic gates lies below that of linear gates, in powers of ten."""
    return np.log10(linear / quadratic)


def stack_label(task: str, rule: str) -> str:
    """The name of a task with its gate rule in parts and shown numbers."""
    beta = PRESETS[task].beta if is_circle(task) else SCALES["paper"].pictures.beta
    return f"{task}, hard gates" if rule == "hard" else f"{task}, soft gates, beta {beta:g}"


def gain(task: str, rule: str, made_hard: bool = False) -> tuple[tuple[Quantity, Quantity], Function, str]:
    """Quantities, function and unit of what quadratic gates gain: decades of loss on circles, test accuracy on images."""
    linear, quadratic = ({"task": task, "rule": rule, "gating": gating} for gating in GATINGS)
    if is_circle(task):
        loss = "loss_hard_gates" if made_hard else "loss"
        return (Quantity(loss, "end", **linear), Quantity(loss, "end", **quadratic)), decades_below, "decades"
    test = {"split": "test", "gates": HARD if made_hard else AS_TRAINED}
    both = Quantity("accuracy", "end", **quadratic, **test), Quantity("accuracy", "end", **linear, **test)
    return both, difference, ""


def part_of_f4(task: str, rule: str) -> Part:
    """One part: quadratic gates end with a lower loss, or a higher accuracy, than linear gates."""
    right = "test accuracy of quadratic gates less that of linear ones"
    loss = "how far the end loss of quadratic gates lies below that of linear ones"
    words, seeds = (loss, None) if is_circle(task) else (right, IMAGE_SEEDS)
    return Part(f"{stack_label(task, rule)}: {words}", *gain(task, rule), above=0, seeds=seeds)


def shown_beside_f4(task: str, rule: str) -> Iterator[Shown]:
    """The gain with gates made hard; size, loss or accuracy, and movement of the kernels for both kinds of gates."""
    if rule == "soft":
        words = f"{stack_label(task, rule)}: the same with gates made hard after training"
        yield Shown(words, *gain(task, rule, made_hard=True))
    tangent = "tangent kernel" if rule == "soft" else "tangent kernel of the experts"  # hard gates have no derivative
    for gating in GATINGS:
        where = {"task": task, "rule": rule, "gating": gating}
        found = {"width": Quantity("width", **where), "parameters": Quantity("parameters", **where)}
        if is_circle(task):
            found["end loss"] = Quantity("loss", "end", **where)
            found["least loss its hard cells allow"] = Quantity("cell_floor", "end", **where)
            found["log ratio of paths top/bottom"] = Quantity("allocation", "end", **where)
        else:
            for split, said in (("test", "test accuracy"), ("train", "training accuracy")):
                found[said] = Quantity("accuracy", "end", split=split, gates=AS_TRAINED, **where)
        for kernel, said in (("overlap", "overlap kernel"), ("tangent", tangent)):
            moved, changed = (Quantity(one, "end", kernel=kernel, **where) for one in COMPARISONS)
            found |= {f"{said}, 1 - cosine to the start": moved, f"{said}, relative change from the start": changed}
        for said, quantity in found.items():
            yield Shown(f"{stack_label(task, rule)}, {gating}: {said}", quantity)


CLAIMS = (
    Claim(
        "F4",
        says=(
            "With the same number of parameters, gates that are quadratic in the input reach a higher accuracy "
            "than linear gates."
        ),
        where="published summary, experiment 3",
        paper="comparison proposed; no number",
        figure="gain",
        parts=[part_of_f4(task, "soft") for task in ("author", *IMAGE_TASKS)],
        controls=[part_of_f4("pilot", "soft"), *(part_of_f4(task, "hard") for task in TASKS)],
        shows=[shown for task in TASKS for rule in NETWORK_BY_RULE for shown in shown_beside_f4(task, rule)],
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------

COLOURS = {"linear": "blue", "quadratic": "orange"}
LINES = {"soft": "-", "hard": "--"}


def _draw_bands(axis: plots.Axes, table: Table, quantity: str, **line: Any) -> None:
    """A quantity over epochs: one band per gate rule and gating."""
    for rule, gating in product(NETWORK_BY_RULE, GATINGS):
        epochs, values = table.where(rule=rule, gating=gating).series(quantity)
        style = {"linestyle": LINES[rule], **line}
        plots.draw_band(axis, np.maximum(epochs, 0.5), values, f"{gating}, {rule} gates", COLOURS[gating], **style)


def draw_learning(results: Results) -> plots.Figure:
    """Loss on the circle and test accuracy on images, median and middle half of the seeds."""
    tasks = results.table.unique("task")
    figure, axes = plots.grid(1, len(tasks), (3.3, 3.0))
    for axis, task in zip(axes[0], tasks, strict=True):
        table = results.table.where(task=task)
        linear, quadratic = (table.select("width", rule="soft", gating=gating)[0] for gating in GATINGS)
        axis.set(xscale="log", xlabel="epoch", title=f"{task}\nwidth {linear:g} linear, {quadratic:g} quadratic")
        if is_circle(task):
            _draw_bands(axis, table, "loss")
            axis.set(yscale="log", ylabel="mean squared error")
        else:
            _draw_bands(axis, table.where(split="test", gates=AS_TRAINED), "accuracy")
            axis.set_ylabel("test accuracy")
    plots.shared_legend(figure, 4)
    return figure


def draw_gain(results: Results) -> plots.Figure:
    """Decades of loss (circles) or test accuracy (images) gained over linear gates, seed by seed; bars: medians."""
    tasks = results.table.unique("task")
    figure, axes = plots.grid(1, len(tasks), (2.5, 3.0))
    kinds = [("soft", False, "soft"), ("soft", True, "soft,\nmade hard"), ("hard", False, "hard")]
    for axis, task in zip(axes[0], tasks, strict=True):
        for place, (rule, made_hard, _) in enumerate(kinds):
            values = Shown("gain", *gain(task, rule, made_hard)).values(results.table, results.seeds)
            values = values[~np.isnan(values)]
            spread = place + np.linspace(-0.2, 0.2, len(values))
            axis.plot(spread, values, "o", color=plots.COLOURS["orange"], markersize=4, alpha=0.6)
            axis.plot([place - 0.3, place + 0.3], [np.median(values)] * 2, color=plots.COLOURS["black"], linewidth=1.5)
        axis.axhline(0, color=plots.COLOURS["grey"], linewidth=0.7)
        axis.set_xticks(range(len(kinds)), [words for _, _, words in kinds])
        axis.set(title=task, ylabel="decades of loss gained" if is_circle(task) else "test accuracy gained")
    return figure


def draw_kernel_distances(results: Results) -> plots.Figure:
    """Distance (1 - cosine) of the overlap and the tangent kernel from their start, median and middle half of the seeds."""
    tasks = results.table.unique("task")
    figure, axes = plots.grid(len(KERNELS), len(tasks), (3.3, 2.3), sharex="col", sharey=True)
    for axis, (kernel, task) in zip(axes.flat, product(KERNELS, tasks), strict=True):
        part = results.table.where(task=task, kernel=kernel)
        _draw_bands(axis, part, "distance_from_start", marker="o", markersize=3)
    for (upper, lower), task in zip(axes.T, tasks, strict=True):
        upper.set_title(task)
        lower.set(xscale="log", xlabel="epoch", ylim=(0, 1))
    for axis, kernel in zip(axes[:, 0], KERNELS, strict=True):
        axis.set_ylabel(f"{kernel} kernel:\n1 - cosine to its start")
    plots.shared_legend(figure, 4)
    return figure


STUDY = Study(
    name="quadratic",
    paper="half-space",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 10, "paper": 20},
    columns=("task", "rule", "gating"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(
        Figure("gain", "What quadratic gates gain", draw_gain),
        Figure("learning", "Quadratic and linear gates over training", draw_learning),
        Figure("dynamics", "How far the kernels move", draw_kernel_distances),
    ),
)
