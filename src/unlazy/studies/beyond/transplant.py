"""Whose gates are they? Gates of many donors, frozen, under fresh values: whose share of the test accuracy is it (X10 to X15).

A network is trained. Its gating network, or that of a donor, is then frozen in a new network, whose values are drawn anew and
trained. The floor is a gating network that was never trained, with each unit open as often as the trained one (*random*); the
ceiling are the network's own gates at the end of training. The share of a donor is its place between the two. Donors: the
network's own start and its gates after a quarter of training, another seed, another task (other pictures and classes), the same
pictures with labels drawn by lot, and a ReLU network, whose gates are those of an all-non-linear gating network with its weights.

Where the values are kept instead, another seed's units mean other things: they are first aligned, one order for every residual
stream, by how often two units are open together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown, Vector
from unlazy.claims.functions import difference
from unlazy.claims.rule import interval
from unlazy.kernels.gated import net_gates
from unlazy.studies.beyond.gate_networks import (
    GateState,
    Net,
    accuracy_under_donor,
    align_units,
    gating_state,
    match_on_rates,
    on_rates,
    train_task,
    unit_groups,
    untrained_gates,
)
from unlazy.studies.beyond.gate_tasks import (
    CIFAR_10,
    CIFAR_100,
    DESK_TASKS,
    FASHION,
    PAPER_TASKS,
    SMOKE_TASKS,
    Spec,
    Task,
    TaskData,
    load_task,
)
from unlazy.studies.study import Figure, Results, Study, Work
from unlazy.studies.table import Rows

# --- what varies ---------------------------------------------------------------------------------------------

RANDOM, START, QUARTER, OWN = (
    "random with matched on-rates",
    "own at the start",
    "own after a quarter",
    "own at the end",
)
OTHER_SEED, OTHER_TASK, SHUFFLED, RELU = "another seed", "another task", "shuffled labels", "ReLU network"
DONORS = (RANDOM, START, QUARTER, OWN, OTHER_SEED, OTHER_TASK, SHUFFLED, RELU)  # column `donor`
TRAINED = "trained with its gates"
KEPT, ALIGNED = (
    "kept values, units as they are",
    "kept values, units aligned",
)  # donors of values that are not trained again
FRESH_SEED, RANDOM_SEED = 1000, 2000  # added to the seed of fresh values, and of gates that are never trained
ALIGNED_ON = 200  # training samples
TASKS = (FASHION, CIFAR_10, CIFAR_100)


@dataclass(frozen=True)
class Settings:
    """One scale. ``residual_seeds``: residual networks have the first so many seeds. ``samples``: training samples on which
    on-rates are matched."""

    tasks: tuple[tuple[str, Task], ...]
    residual_seeds: int = 3
    samples: int = 1000


def _own_tasks(tasks: dict[str, Task]) -> tuple[tuple[str, Task], ...]:
    return tuple((name, task) for name, task in tasks.items() if name in TASKS)


SCALES = {
    # seconds, on digits: shows that the study runs; no claim is judged
    "smoke": Settings(_own_tasks({name: replace(task, epochs=4) for name, task in SMOKE_TASKS.items()}), samples=100),
    # ten minutes on one core
    "desk": Settings(_own_tasks(DESK_TASKS)),
    # ResNet-18 on both CIFAR sets: hours on one GPU
    "paper": Settings(_own_tasks(PAPER_TASKS)),
}


@dataclass(frozen=True)
class TransplantCase:
    """All donors of one task, with all its seeds."""

    task: str
    seeds: tuple[int, ...]
    setup: Task
    samples: int


def cases(settings: Settings, seeds: Sequence[int]) -> list[TransplantCase]:
    """One case for each task."""
    few = tuple(seeds)[: settings.residual_seeds]
    return [
        TransplantCase(name, tuple(seeds) if task.is_dense else few, task, settings.samples)
        for name, task in settings.tasks
    ]


# --- how a case is measured ----------------------------------------------------------------------------------


def measure(case: TransplantCase, work: Work) -> Rows:
    """Test accuracy, in percent, of fresh values under the gates of each donor, and its share between floor and ceiling.

    ``share``: (donor - random) / (own at the end - random); no number where floor and ceiling differ by less than a point.
    """
    seeds, rows, stages = list(case.seeds), Rows(), 4 + len(DONORS)
    data = load_task(case.setup, seeds, work)
    spec = case.setup.spec(data)
    key = case.task
    own = train_task(f"{key}-own", case.setup, spec, data, seeds, work.stage(0, stages))
    others = {
        OTHER_TASK: _train_elsewhere(case, work.stage(1, stages), other=True),
        SHUFFLED: _train_elsewhere(case, work.stage(2, stages), shuffle=True),
        RELU: train_task(f"{key}-relu", case.setup, spec.relu(), data, seeds, work.stage(3, stages)).nets,
    }
    donors = {OWN: own.nets, QUARTER: own.quarters[1], OTHER_SEED: [*own.nets[1:], own.nets[0]], **others}
    donors |= untrained_donors(case, work, spec, data, own.nets)
    rows.add("accuracy", own.test, donor=TRAINED, seed=seeds)
    again = [seed + FRESH_SEED for seed in seeds]
    found = {}
    for number, donor in enumerate(DONORS):
        gates: list[GateState] = [gating_state(net) for net in donors[donor]]
        layers = tuple(range(1, spec.gated_layers + 1)) if donor == RELU else ()
        recipient = replace(spec, nonlinear_gate_layers=layers)
        name = f"{key}-under-{donor}".replace(" ", "-")
        stage = work.stage(4 + number, stages)
        found[donor] = train_task(name, case.setup, recipient, data, again, stage, gates).test
        rows.add("accuracy", found[donor], donor=donor, seed=seeds)
    for donor, accuracy in found.items():
        rows.add("share", share_between(accuracy, found[RANDOM], found[OWN]), donor=donor, seed=seeds)
    for donor, accuracies in kept_values(case, work, data, own.nets).items():
        rows.add("accuracy", accuracies, donor=donor, seed=seeds)
    return rows


def share_between(some: Vector, floor: Vector, ceiling: Vector) -> Vector:
    """(some - floor) / (ceiling - floor); NaN where these differ by less than ``CLEAR`` points."""
    gap = ceiling - floor
    return np.where(gap >= CLEAR, (some - floor) / np.where(gap >= CLEAR, gap, 1.0), np.nan)


def _train_elsewhere(case: TransplantCase, work: Work, **choices: Any) -> list[Net]:
    """Networks of the same layout and recipe on the other task, or on labels drawn by lot."""
    data = load_task(case.setup, case.seeds, work, **choices)
    name = f"{case.task}-{'other' if choices.get('other') else 'shuffled'}"
    return train_task(name, case.setup, case.setup.spec(data), data, case.seeds, work).nets


def untrained_donors(
    case: TransplantCase, work: Work, spec: Spec, data: TaskData, own: Sequence[Net]
) -> dict[str, list[Net]]:
    """The start of each network, and gates of another draw whose units are open as often as those of the trained network."""
    x = data.train_inputs(case.samples).to(work.device)
    start = [untrained_gates(spec, seed, x) for seed in case.seeds]
    random = [untrained_gates(spec, seed + RANDOM_SEED, x) for seed in case.seeds]
    for net, trained in zip(random, own, strict=True):
        match_on_rates(net, x, on_rates(trained.to(work.device), x))
    return {START: start, RANDOM: random}


def kept_values(case: TransplantCase, work: Work, data: TaskData, nets: Sequence[Net]) -> dict[str, list[float]]:
    """Test accuracy of each network's own values under the gates of the next seed, with its units as they are and aligned."""
    x, test = (
        some.to(work.device) for some in (data.train_inputs(ALIGNED_ON), data.test_inputs(case.setup.test_images))
    )
    found: dict[str, list[float]] = {KEPT: [], ALIGNED: []}
    for place, net in enumerate(nets):
        labels = data.test_labels(case.setup.test_images, place).to(work.device)
        other = nets[(place + 1) % len(nets)].to(work.device)
        mine, theirs = net_gates(net.to(work.device), x), net_gates(other, x)
        orders = align_units(mine, theirs, unit_groups(net.settings))
        found[KEPT].append(accuracy_under_donor(net, other, test, labels))
        found[ALIGNED].append(accuracy_under_donor(net, other, test, labels, orders))
    return found


# --- what is claimed -----------------------------------------------------------------------------------------

CLEAR = 1.0  # point: what counts as a difference, and the least gap of which shares are computed
MOST, HALF = 0.75, 0.5  # shares
POINTS = "points"
RESIDUAL = (CIFAR_10, CIFAR_100)


def seeds_of(task: str) -> int | None:
    """How many seeds are declared for a task; ``None``: all."""
    return SCALES["desk"].residual_seeds if task in RESIDUAL else None


def accuracy(task: str, donor: str) -> Quantity:
    """Test accuracy under the gates of a donor, in percent."""
    return Quantity("accuracy", task=task, donor=donor)


def gain_part(task: str, high: str, low: str, **bound: Any) -> Part:
    """Accuracy under the gates of one donor less that under those of another."""
    both = accuracy(task, high), accuracy(task, low)
    return Part(f"{task}: {high} less {low}", both, by=difference, unit=POINTS, seeds=seeds_of(task), **bound)


def share_part(task: str, donor: str, **bound: Any) -> Part:
    """The share of a donor between floor and ceiling."""
    one = Quantity("share", task=task, donor=donor)
    return Part(f"{task}: share of {donor}", one, seeds=seeds_of(task), **bound)


def shown() -> Iterator[Shown]:
    """Accuracy and share of every donor on every task."""
    for task in TASKS:
        for donor in (TRAINED, *DONORS, KEPT, ALIGNED):
            yield Shown(f"{task}, {donor}", accuracy(task, donor), unit="%", seeds=seeds_of(task))
        for donor in DONORS:
            one = Quantity("share", task=task, donor=donor)
            yield Shown(f"{task}, {donor}: share", one, seeds=seeds_of(task))


def parts_on(tasks: Sequence[str], make: Any) -> list[Part]:
    """The parts that ``make`` gives for these tasks."""
    return [part for task in tasks for part in make(task)]


WHERE, PAPER = "open question of the half-space paper", "no number"
MAIN = (FASHION, CIFAR_10)  # dense and residual; CIFAR-100 is the control, on a GPU only
CLAIMS = (
    Claim(
        "X10",
        says="Learned gates carry test accuracy: fresh values on a network's own gates beat random gates by over a point.",
        where=WHERE,
        paper=PAPER,
        figure="shares",
        parts=parts_on(MAIN, lambda task: [gain_part(task, OWN, RANDOM, above=CLEAR)]),
        controls=parts_on((CIFAR_100,), lambda task: [gain_part(task, OWN, RANDOM, above=CLEAR)]),
        shows=[*shown()],
    ),
    Claim(
        "X11",
        says="Gates belong to the task, not to the seed: those of another seed are worth three quarters or more of one's own.",
        where=WHERE,
        paper=PAPER,
        figure="shares",
        parts=parts_on(MAIN, lambda task: [share_part(task, OTHER_SEED, above=MOST)]),
        controls=parts_on((CIFAR_100,), lambda task: [share_part(task, OTHER_SEED, above=MOST)]),
    ),
    Claim(
        "X12",
        says="Gates learned from another task or from labels drawn by lot are worth less than half of one's own.",
        where=WHERE,
        paper=PAPER,
        figure="shares",
        parts=parts_on(MAIN, lambda task: [share_part(task, donor, below=HALF) for donor in (OTHER_TASK, SHUFFLED)]),
        controls=parts_on(
            (CIFAR_100,), lambda task: [share_part(task, donor, below=HALF) for donor in (OTHER_TASK, SHUFFLED)]
        ),
    ),
    Claim(
        "X13",
        says="The gates of a ReLU network are worth more to fresh values than those that a half-space network learned itself.",
        where=WHERE,
        paper=PAPER,
        figure="shares",
        parts=parts_on(MAIN, lambda task: [gain_part(task, RELU, OWN, above=0)]),
        controls=parts_on((CIFAR_100,), lambda task: [gain_part(task, RELU, OWN, above=0)]),
    ),
    Claim(
        "X14",
        says="Gates are learned early: after a quarter of training they are worth three quarters or more of those at the end.",
        where=WHERE,
        paper=PAPER,
        figure="shares",
        parts=parts_on(MAIN, lambda task: [share_part(task, QUARTER, above=MOST)]),
        controls=parts_on((CIFAR_100,), lambda task: [share_part(task, QUARTER, above=MOST)]),
    ),
    Claim(
        "X15",
        says="Another seed's gates fit kept values better once its units are aligned, by over a point.",
        where=WHERE,
        paper=PAPER,
        figure="shares",
        parts=parts_on(MAIN, lambda task: [gain_part(task, ALIGNED, KEPT, above=CLEAR)]),
        controls=parts_on((CIFAR_100,), lambda task: [gain_part(task, ALIGNED, KEPT, above=CLEAR)]),
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------


def draw_shares(results: Results) -> plots.Figure:
    """Test accuracy under the gates of each donor, medians with 95 % intervals of them (least and greatest for fewer than five
    seeds). Filled: fresh values; empty: kept values. Lines: floor (random gates with matched on-rates) and ceiling (own gates).
    """
    order = (*DONORS, KEPT, ALIGNED)
    figure, axes = plots.grid(1, len(results.settings.tasks), (4.2, 3.0), sharey=True)
    for axis, (task, _) in zip(axes[0], results.settings.tasks, strict=True):
        for place, donor in enumerate(order):
            values = results.table.select("accuracy", task=task, donor=donor)
            middle, (low, high) = float(np.median(values)), interval(values)
            face = "white" if donor in (KEPT, ALIGNED) else plots.COLOURS["blue"]
            around = [[middle - low], [high - middle]]
            axis.errorbar(
                middle, place, xerr=around, fmt="o", markersize=5, color=plots.COLOURS["blue"], markerfacecolor=face
            )
            if donor in (RANDOM, OWN):
                axis.axvline(middle, color=plots.COLOURS["grey"], linestyle="--", linewidth=1)
        axis.set(title=task, xlabel="test accuracy, %", yticks=range(len(order)), yticklabels=order)
    axes[0, 0].invert_yaxis()
    return figure


STUDY = Study(
    name="transplant",
    paper="beyond",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 5, "paper": 3},
    columns=("task",),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("shares", "Test accuracy under the gates of each donor", draw_shares),),
    needs_gpu=("paper",),
)
