"""How non-linear must a gate be? Gating networks with a ReLU behind some layers, from none (half-spaces) to all (X1 to X5).

A gate of the half-space paper is a half-space of the input, because its gating network is linear. Here a ReLU follows chosen
layers inside the gating network (``nonlinear_gate_layers``): none, the first k, one alone. Lines beside them: the ReLU network
of the same size, the one with as many parameters, and a ReLU network whose gates pass the same surrogate gradient ("tied": the
gating branch is the value branch). To separate where gates look from how they are trained, gates are also frozen after training
and given fresh values (column ``values``).

Planted data tell the truth: labels made by a random network whose gates are half-spaces, or nested (a ReLU behind every layer).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown, Vector
from unlazy.claims.functions import difference
from unlazy.claims.rule import interval
from unlazy.kernels.compare import centered_alignment
from unlazy.kernels.gated import net_gates
from unlazy.kernels.overlap import overlap_kernel
from unlazy.models.gate_reach import gate_reach
from unlazy.models.gates import SoftGate
from unlazy.models.spec import ImageSpec
from unlazy.probes.paths import count_cells
from unlazy.studies.beyond.gate_networks import Net, gating_state, train_task
from unlazy.studies.beyond.gate_tasks import (
    DENSE,
    DESK_TASKS,
    FLAT,
    NESTED,
    PAPER_TASKS,
    PLANTED,
    RESIDUAL,
    SMOKE_TASKS,
    TEACHERS,
    Spec,
    Task,
    TaskData,
    load_task,
    relu_of_equal_parameters,
)
from unlazy.studies.study import Figure, Results, Study, Work, require_known
from unlazy.studies.table import Rows
from unlazy.studies.trainings import AS_TRAINED, HARD

# --- what varies ---------------------------------------------------------------------------------------------

NONE, FIRST, HALF, ALL = "none", "first layer", "first half", "all"  # column `gates`
MIDDLE, BEFORE, AFTER, LAST_HALF, LAST = "middle layer", "before middle", "after middle", "last half", "last layer"
RELU, TIED, WIDE = "relu", "relu with surrogate gradient", "relu of equal parameters"
RUNGS = (NONE, FIRST, HALF, ALL)
SINGLE = (FIRST, BEFORE, MIDDLE, AFTER)
NETWORKS = (*RUNGS, "first quarter", BEFORE, MIDDLE, AFTER, LAST_HALF, RELU, TIED, WIDE)
WITH_FRESH_VALUES = (NONE, ALL, RELU)
TOGETHER, FRESH = "together", "fresh"  # column `values`
HARD_RULE, SOFT_RULE = "hard", "soft"  # column `rule`
FRESH_SEED = 1000  # added to the seed of fresh values


def layers_of(gates: str, count: int) -> tuple[int, ...]:
    """The non-linear layers that a name means in a network of ``count`` gated layers.

    >>> [layers_of(name, 17) for name in (MIDDLE, BEFORE, AFTER, LAST)], layers_of(HALF, 5)
    ([(9,), (8,), (10,), (17,)], (1, 2, 3))
    """
    middle = (count + 1) // 2
    first = {NONE: 0, FIRST: 1, "first quarter": (count + 3) // 4, HALF: middle, ALL: count}
    if gates in first:
        return tuple(range(1, first[gates] + 1))
    if gates == LAST_HALF:
        return tuple(range(middle + 1, count + 1))
    return ({MIDDLE: middle, BEFORE: middle - 1, AFTER: middle + 1, LAST: count}[gates],)


@dataclass(frozen=True)
class Settings:
    """One scale. ``residual_seeds``: residual networks have the first so many seeds. ``probe``: test samples whose overlap kernel
    and regions are measured."""

    tasks: tuple[tuple[str, Task], ...]
    networks: tuple[str, ...] = NETWORKS
    residual_seeds: int = 3
    probe: int = 200

    def __post_init__(self) -> None:
        require_known("networks", self.networks, (*NETWORKS, LAST))


SCALES = {
    # seconds, on digits: shows that the study runs; no claim is judged
    "smoke": Settings(tuple(SMOKE_TASKS.items()), networks=(*NETWORKS, LAST), probe=20),
    # a quarter of an hour on one core; the last layer alone is left out, because its ReLU feeds nothing
    "desk": Settings(tuple(DESK_TASKS.items())),
    # ResNet-18 on both CIFAR sets: hours on one GPU
    "paper": Settings(tuple(PAPER_TASKS.items())),
}


@dataclass(frozen=True)
class LadderCase:
    """One kind of gates on one task, with all its seeds."""

    task: str
    gates: str
    rule: str
    seeds: tuple[int, ...]
    setup: Task
    probe: int


def cases(settings: Settings, seeds: Sequence[int]) -> list[LadderCase]:
    """Every kind of gates on every task with hard gates; on planted data the ends of the ladder also with soft ones."""
    found = []
    for name, task in settings.tasks:
        own = tuple(seeds) if task.is_dense else tuple(seeds)[: settings.residual_seeds]
        soft = [(gates, SOFT_RULE) for gates in (NONE, ALL) if task.data == PLANTED]
        kinds = [*((gates, HARD_RULE) for gates in settings.networks), *soft]
        found += [LadderCase(name, gates, rule, own, task, settings.probe) for gates, rule in kinds]
    return found


def spec_of(case: LadderCase, data: TaskData) -> Spec:
    """The network of a case."""
    base = case.setup.spec(data)
    if case.gates == RELU:
        return base.relu()
    if case.gates == WIDE:
        return relu_of_equal_parameters(base)
    if case.gates == TIED:
        return replace(base.relu(), gate=base.gate)
    layers = layers_of(case.gates, base.gated_layers)
    if case.rule == SOFT_RULE:
        assert not isinstance(base, ImageSpec)
        return replace(base, gate=SoftGate(case.setup.beta), nonlinear_gate_layers=layers)
    return replace(base, nonlinear_gate_layers=layers)


# --- how a case is measured ----------------------------------------------------------------------------------

SEGMENTS, POINTS = 32, 17


def measure(case: LadderCase, work: Work) -> Rows:
    """Accuracies in percent, and what the gates look like on test samples.

    ``alignment``: of the overlap kernel with the labels, both centred. ``log10_paths``: mean over samples. ``on_rate``: share of
    open gates. ``cells``: different activation patterns over samples. ``crossings``: gate changes on the straight way between two
    test samples, per gate. ``bends``: the share of gates that change on it more than once, among those that change; a half-space
    never does. ``reading_gates``, ``after_gates``: the share of gates that read a ReLU of the gating network, and that come
    after one.
    """
    data = load_task(case.setup, case.seeds, work)
    spec = spec_of(case, data)
    fresh = case.gates in WITH_FRESH_VALUES and case.rule == HARD_RULE
    key = f"{case.task}-{case.gates}-{case.rule}".replace(" ", "-")
    trained = train_task(key, case.setup, spec, data, case.seeds, work.stage(0, 2 if fresh else 1))
    rows, seeds = Rows(), list(case.seeds)
    rows.add("accuracy", trained.test, split="test", gate_values=HARD, values=TOGETHER, seed=seeds)
    rows.add(
        "accuracy", trained.accuracies["train_hard_gates"], split="train", gate_values=HARD, values=TOGETHER, seed=seeds
    )
    rows.add(
        "accuracy",
        trained.accuracies["test_as_trained"],
        split="test",
        gate_values=AS_TRAINED,
        values=TOGETHER,
        seed=seeds,
    )
    rows.add("parameters", [sum(p.numel() for p in trained.nets[0].parameters())] * len(seeds), seed=seeds)
    x = data.test_inputs(case.probe).to(work.device)
    for place, (seed, net) in enumerate(zip(seeds, trained.nets, strict=True)):
        labels = data.test_labels(case.probe, place).to(work.device)
        rows.add_all(describe_gates(net.to(work.device), x, labels), seed=seed)
    if fresh:
        layers = ALL if case.gates == RELU else case.gates
        frozen = spec_of(replace(case, gates=layers), data)
        donors = [gating_state(net.cpu()) for net in trained.nets]
        again = [seed + FRESH_SEED for seed in seeds]
        other = train_task(f"{key}-fresh", case.setup, frozen, data, again, work.stage(1, 2), donors)
        rows.add("accuracy", other.test, split="test", gate_values=HARD, values=FRESH, seed=seeds)
        rows.add(
            "accuracy", other.accuracies["train_hard_gates"], split="train", gate_values=HARD, values=FRESH, seed=seeds
        )
    return rows


def describe_gates(net: Net, x: Tensor, labels: Tensor) -> dict[str, float]:
    """Overlap kernel, regions and reach of the gates of one network; see :func:`measure`."""
    kernel = overlap_kernel(net.hard(), x).cpu()
    gates = [layer.flatten(1) for layer in net_gates(net, x)]
    paths = kernel.diagonal()
    reach = gate_reach(net, x)
    changes = gate_changes(net, x)
    changed = int((changes >= 1).sum())
    return {
        "alignment": float(centered_alignment(kernel, labels.double().cpu())),
        "log10_paths": float(paths[paths > 0].log10().mean()),
        "on_rate": float(torch.cat(gates, 1).double().mean()),
        "cells": count_cells(gates),
        "crossings": float(changes.double().mean()),
        "bends": float((changes >= 2).sum()) / changed if changed else float("nan"),
        "reading_gates": reach.reading_gates / reach.gates,
        "after_gates": reach.after_gates / reach.gates,
    }


def gate_changes(net: Net, x: Tensor) -> Tensor:
    """How often each gate changes on the way from one sample to another, at ``POINTS`` places, ``[segments, gates]``."""
    count = min(SEGMENTS, len(x) // 2)
    here, there = x[:count], x[count : 2 * count]
    before: Tensor | None = None
    changes: Any = 0
    for share in torch.linspace(0, 1, POINTS):
        point = (1 - share) * here + share * there
        now = torch.cat([layer.flatten(1) for layer in net_gates(net, point)], 1)
        if before is not None:
            changes = changes + (now != before).long()
        before = now
    return torch.as_tensor(changes)


# --- what is claimed -----------------------------------------------------------------------------------------

CLEAR = 1.0  # point: what counts as a gain, and the least gap of which shares are computed
LARGE_SHARE, NEARLY_ALL = 0.25, 0.75
POINTS_UNIT = "points"


def accuracy(task: str, gates: str, values: str = TOGETHER, rule: str = HARD_RULE) -> Quantity:
    """Test accuracy with hard gates, in percent."""
    where = {"task": task, "gates": gates, "rule": rule, "values": values}
    return Quantity("accuracy", split="test", gate_values=HARD, **where)


def seeds_of(task: str) -> int | None:
    """How many seeds are declared for a task; ``None``: all."""
    return SCALES["desk"].residual_seeds if task in RESIDUAL else None


def share_of_gap(some: Vector, low: Vector, high: Vector) -> Vector:
    """Which share of the gap from ``low`` to ``high`` is closed; NaN where the gap is below ``CLEAR``."""
    gap = high - low
    return np.where(gap >= CLEAR, (some - low) / np.where(gap >= CLEAR, gap, 1.0), np.nan)


def above_neighbours(some: Vector, before: Vector, after: Vector) -> Vector:
    """The first less the mean of the other two."""
    return some - (before + after) / 2


def gain_part(task: str, high: str = ALL, low: str = NONE, rule: str = HARD_RULE, **bound: Any) -> Part:
    """Accuracy of one kind of gates less that of another."""
    words = f"{task}: {high} less {low}" + (", soft gates in training" if rule == SOFT_RULE else "")
    both = accuracy(task, high, rule=rule), accuracy(task, low, rule=rule)
    return Part(words, both, by=difference, unit=POINTS_UNIT, seeds=seeds_of(task), **bound)


def share_parts(task: str) -> Iterator[Part]:
    """One layer in the middle against the gap to ReLU; half the layers against what all close."""
    ends = accuracy(task, NONE), accuracy(task, RELU)
    words = f"{task}: share of the gap to ReLU that one middle layer closes"
    yield Part(words, (accuracy(task, MIDDLE), *ends), by=share_of_gap, above=LARGE_SHARE, seeds=seeds_of(task))
    ends = accuracy(task, NONE), accuracy(task, ALL)
    words = f"{task}: share of what all layers gain that the first half gains"
    yield Part(words, (accuracy(task, HALF), *ends), by=share_of_gap, above=NEARLY_ALL, seeds=seeds_of(task))


def training_parts(task: str) -> Iterator[Part]:
    """Fresh values on a ReLU network's gates: above gates trained beside their values, and as good as the ReLU network."""
    fresh = accuracy(task, RELU, FRESH)
    words = f"{task}: fresh values on frozen ReLU gates less all-non-linear gates trained with their values"
    pair = fresh, accuracy(task, ALL)
    yield Part(words, pair, by=difference, above=0, unit=POINTS_UNIT, seeds=seeds_of(task))
    words = f"{task}: ReLU network less fresh values on its frozen gates"
    pair = accuracy(task, RELU), fresh
    yield Part(words, pair, by=difference, below=CLEAR, unit=POINTS_UNIT, seeds=seeds_of(task))


def middle_part(task: str) -> Part:
    """The middle layer alone against the layers beside it alone."""
    three = tuple(accuracy(task, gates) for gates in (MIDDLE, BEFORE, AFTER))
    words = f"{task}: middle layer alone less the mean of the layers beside it alone"
    return Part(words, three, by=above_neighbours, above=0, unit=POINTS_UNIT, seeds=seeds_of(task))


def shown_accuracies(tasks: Sequence[str], networks: Sequence[str]) -> Iterator[Shown]:
    """Accuracies of these networks on these tasks, with fresh values where there are some."""
    for task in tasks:
        for gates in networks:
            yield Shown(f"{task}, {gates}", accuracy(task, gates), unit="%", seeds=seeds_of(task))
            if gates in WITH_FRESH_VALUES:
                one = accuracy(task, gates, FRESH)
                yield Shown(f"{task}, {gates}, gates frozen, fresh values", one, unit="%", seeds=seeds_of(task))


def shown_gates(tasks: Sequence[str]) -> Iterator[Shown]:
    """Overlap kernel and regions along the ladder."""
    for task in tasks:
        for gates in (*RUNGS, MIDDLE, RELU):
            for name in ("alignment", "bends", "crossings", "log10_paths", "on_rate", "reading_gates", "after_gates"):
                one = Quantity(name, task=task, gates=gates, rule=HARD_RULE)
                yield Shown(f"{task}, {gates}: {name}", one, seeds=seeds_of(task))


WHERE, PAPER = "open question of the half-space paper", "no number; a pilot on CIFAR-100 with ResNet-18"
CLAIMS = (
    Claim(
        "X1",
        says="Non-linear gates classify better than half-spaces: the all-non-linear end of the ladder lies above the linear one.",
        where=WHERE,
        paper=PAPER,
        figure="ladder",
        parts=[gain_part(task, above=CLEAR) for task in RESIDUAL],
        controls=[gain_part(task, above=CLEAR) for task in DENSE],
        shows=[*shown_accuracies((*RESIDUAL, *DENSE), NETWORKS)],
    ),
    Claim(
        "X2",
        says=(
            "One non-linear layer in the middle closes a quarter or more of the gap between half-space gates and ReLU, and half "
            "of the layers close three quarters or more of what all layers close."
        ),
        where=WHERE,
        paper=PAPER,
        figure="ladder",
        parts=[part for task in RESIDUAL for part in share_parts(task)],
        controls=[part for task in (*DENSE, NESTED) for part in share_parts(task)],
    ),
    Claim(
        "X3",
        says=(
            "Where the truth is known the ladder finds it: non-linear gate layers gain less than a point where half-spaces made "
            "the labels, and more than a point where nested gates did."
        ),
        where="planted labels",
        paper="no number",
        figure="ladder",
        parts=[gain_part(FLAT, below=CLEAR), gain_part(NESTED, above=CLEAR)],
        controls=[gain_part(FLAT, rule=SOFT_RULE, below=CLEAR), gain_part(NESTED, rule=SOFT_RULE, above=CLEAR)],
        shows=[*shown_accuracies(TEACHERS, NETWORKS), *shown_gates((*RESIDUAL, *DENSE, *TEACHERS))],
    ),
    Claim(
        "X4",
        says=(
            "All-non-linear gates lack against ReLU because of how they are trained, not of where they look: fresh values on the "
            "frozen gates of a ReLU network beat gates trained beside their values, and lose less than a point to that network."
        ),
        where=WHERE,
        paper="pilot: 2.5 points lack on CIFAR-100",
        figure="training",
        parts=[part for task in RESIDUAL for part in training_parts(task)],
        controls=[part for task in (*DENSE, *TEACHERS) for part in training_parts(task)],
        shows=[Shown(f"{task}: {TIED}", accuracy(task, TIED), unit="%") for task in (*DENSE, *TEACHERS)],
    ),
    Claim(
        "X5",
        says="A single ReLU on the residual stream (the middle layer) helps more than one inside a block (the layers beside it).",
        where=WHERE,
        paper="pilot: the middle layer alone, 4.9 points; no neighbour was measured",
        figure="singles",
        parts=[middle_part(task) for task in RESIDUAL],
        shows=[
            Shown(f"{task}, {gates} alone", accuracy(task, gates), unit="%", seeds=seeds_of(task))
            for task in (*RESIDUAL, *DENSE, *TEACHERS)
            for gates in SINGLE
        ],
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------

LINES = {RELU: ("black", "ReLU network"), WIDE: ("grey", "ReLU, equal parameters"), NONE: ("blue", "half-spaces")}


def _summary(results: Results, task: str, gates: str, values: str = TOGETHER) -> tuple[float, float, float]:
    """Median and interval of the test accuracies of one kind of gates."""
    where: dict[str, Any] = {"task": task, "gates": gates, "rule": HARD_RULE, "values": values}
    found = results.table.select("accuracy", split="test", gate_values=HARD, **where)
    low, high = interval(found)
    return float(np.median(found)), low, high


def draw_ladder(results: Results) -> plots.Figure:
    """Test accuracy against the number k of non-linear gate layers (the first k), medians with 95 % intervals of them (least
    and greatest for fewer than five seeds). Lines: the ReLU network, the one with as many parameters, half-spaces. Squares: the
    last half of the layers, diamonds: the middle layer alone.
    """
    figure, axes = plots.grid(1, len(results.settings.tasks), (3.0, 2.8))
    for axis, (name, task) in zip(axes[0], results.settings.tasks, strict=True):
        first = (NONE, FIRST, "first quarter", HALF, ALL)
        rungs = {len(layers_of(gates, task.gated_layers)): gates for gates in first}
        for gates, (colour, label) in LINES.items():
            middle, low, high = _summary(results, name, gates)
            axis.axhline(middle, color=plots.COLOURS[colour], linewidth=1, linestyle="--", label=label)
            axis.axhspan(low, high, color=plots.COLOURS[colour], alpha=0.12, linewidth=0)
        groups = (("o-", "orange", "first k layers", rungs), ("s", "green", LAST_HALF, _by_count(task, LAST_HALF)))
        for style, colour, label, places in (*groups, ("D", "red", f"{MIDDLE} alone", _by_count(task, MIDDLE))):
            middle, low, high = np.array([_summary(results, name, gates) for gates in places.values()]).T
            around = [middle - low, high - middle]
            axis.errorbar(
                list(places), middle, around, fmt=style, color=plots.COLOURS[colour], markersize=4, label=label
            )
        axis.set(title=name, xlabel="non-linear gate layers")
    axes[0, 0].set_ylabel("test accuracy, %")
    plots.shared_legend(figure, 3)
    return figure


def _by_count(task: Task, gates: str) -> dict[int, str]:
    return {len(layers_of(gates, task.gated_layers)): gates}


def draw_training(results: Results) -> plots.Figure:
    """Test accuracy of values trained with their gates and of fresh values on the same gates, frozen. Medians with intervals."""
    figure, axes = plots.grid(1, len(results.settings.tasks), (3.0, 2.8))
    for axis, (name, _) in zip(axes[0], results.settings.tasks, strict=True):
        for values, colour, shift in ((TOGETHER, "blue", -0.1), (FRESH, "orange", 0.1)):
            middle, low, high = np.array([_summary(results, name, gates, values) for gates in WITH_FRESH_VALUES]).T
            places = np.arange(len(middle)) + shift
            around = [middle - low, high - middle]
            axis.errorbar(
                places, middle, around, fmt="o", color=plots.COLOURS[colour], label=f"values trained {values}"
            )
        axis.set(
            title=name, xticks=range(len(WITH_FRESH_VALUES)), xticklabels=["half-spaces", "all non-linear", "ReLU"]
        )
    axes[0, 0].set_ylabel("test accuracy, %")
    plots.shared_legend(figure, 2)
    return figure


def draw_singles(results: Results) -> plots.Figure:
    """Test accuracy with one non-linear gate layer, by its number, medians with intervals; the line is that of half-spaces."""
    figure, axes = plots.grid(1, len(results.settings.tasks), (3.0, 2.8))
    for axis, (name, task) in zip(axes[0], results.settings.tasks, strict=True):
        middle, low, high = np.array([_summary(results, name, gates) for gates in SINGLE]).T
        places = [layers_of(gates, task.gated_layers)[0] for gates in SINGLE]
        axis.errorbar(places, middle, [middle - low, high - middle], fmt="o", color=plots.COLOURS["red"])
        axis.axhline(_summary(results, name, NONE)[0], color=plots.COLOURS["blue"], linestyle="--", linewidth=1)
        axis.set(title=name, xlabel="the one non-linear layer")
    axes[0, 0].set_ylabel("test accuracy, %")
    return figure


STUDY = Study(
    name="ladder",
    paper="beyond",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 5, "paper": 3},
    columns=("task", "gates", "rule"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(
        Figure("ladder", "Accuracy against the number of non-linear gate layers", draw_ladder),
        Figure("training", "Gates trained with their values, and frozen under fresh ones", draw_training),
        Figure("singles", "One non-linear gate layer", draw_singles),
    ),
    needs_gpu=("paper",),
)
