"""Fixed and adaptive tangent features and the network, on few training images (Figure 4 of arXiv v2; L10).

The figure has two readings. *Redrawn*: its axis counts images per epoch; the authors' public script (dlej/adaptive-feature-
perspective, ``run_experiment.py``) shuffles all training images anew for every epoch and takes the first n. *Fixed*: its axis
counts the images of one training set. Both are measured with the start, rates and stopping rule of that script. Whether it made
the figure is for the authors to say.

The paper's size wants a GPU: ``unlazy reproduce sample-size --device cuda``. Runs made there are found on any other machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.claims.functions import ratio
from unlazy.store import Run
from unlazy.studies.study import Figure, Results, Settings, Study, Work, require_at_least_one
from unlazy.studies.table import Rows
from unlazy.studies.tangent.sample_size_networks import (
    KINDS,
    PATIENCE,
    Layout,
    ModelCase,
    ScriptTask,
    Task,
    best_epoch,
    train,
)

# --- settings and cases --------------------------------------------------------------------------------------


DENSE = Layout((1, 28, 28), (), (128, 128, 128, 128))
CONVOLUTIONAL = Layout((3, 32, 32), (16, 32, 64, 128), (128, 128))
MNIST = Task("mnist", DENSE, "sgd", (125, 250, 500, 1000, 2000, 4000, 8000), 10_000)
CIFAR_10 = Task("cifar-10", CONVOLUTIONAL, "adam", (125, 250, 500, 1000), 2000, seeds=5)
SMALL = 1000  # images: the largest number that counts as small
SMALL_SIZES = (125, 1000)  # the small ones at which the published figure can be read
# both readings of the figure, every size a task of its own, so that it can be measured alone. Larger fixed sets: MNIST, CIFAR_10
MNIST_REDRAWN = {size: ScriptTask("mnist", DENSE, "sgd", (size,), 2000) for size in SMALL_SIZES}
CIFAR_10_REDRAWN = {125: ScriptTask("cifar-10", CONVOLUTIONAL, "adam", (125,), 1000, seeds=5)}
MNIST_FIXED = {125: ScriptTask("mnist", DENSE, "sgd", (125,), 2000, redrawn=False)}
CIFAR_10_FIXED = {125: ScriptTask("cifar-10", CONVOLUTIONAL, "adam", (125,), 1000, seeds=5, redrawn=False)}
READINGS = tuple(
    task for tasks in (MNIST_REDRAWN, MNIST_FIXED, CIFAR_10_REDRAWN, CIFAR_10_FIXED) for task in tasks.values()
)
SMOKE = (
    ScriptTask("digits", Layout((1, 8, 8), (), (8, 8)), "sgd", (20,), 60),
    Task("digits", Layout((1, 8, 8), (), (8, 8)), "sgd", (20, 40), 60),
    Task("digits", Layout((1, 8, 8), (4, 4), (8,)), "adam", (20,), 60),
)
DESK = (MNIST_REDRAWN[125], MNIST_FIXED[125])
# tasks at paper scale: both readings of the figure, with fewer test images than the script has, so that two cores measure
# MNIST in half an hour; then fixed sets from another start, on MNIST beyond the largest size of the claim, which needs a GPU.
# epochs: the most epochs of a training
SCALES = {
    "smoke": {"tasks": SMOKE, "epochs": 3},
    "desk": {"tasks": DESK, "epochs": 200},
    "paper": {"tasks": (*READINGS, MNIST, CIFAR_10), "epochs": 1000},
}


def cases(settings: Settings, seeds: Sequence[int]) -> list[ModelCase]:
    """Every kind of model on every task."""
    require_at_least_one(settings, "epochs")
    tasks, epochs = settings.tasks, settings.epochs
    return [ModelCase(task, kind, tuple(seeds[: task.seeds]), epochs) for task in tasks for kind in KINDS]


# --- measuring -----------------------------------------------------------------------------------------------

SAME, OTHER, NOTHING = "same", "other", "nothing"
"""How an epoch was chosen. *same*, as in the script: the best epoch on the test images on which the error is measured. *other*:
the best epoch on one half of the test images; the error is measured on the other half. *nothing*: the last epoch, at which the
stopping rule ended the training."""


def measure(case: ModelCase, work: Work) -> Rows:
    """Test errors for every size, and their geometric mean over the small sizes of the scale.

    ``distance_to_published``: the mean over sizes of abs(ln(error / published error)), where the figure gives one.
    """
    rows, small, distances = Rows(), [], []
    published = PUBLISHED.get(case.task.data, {})
    for place, size in enumerate(case.task.sizes):
        work.progress(place, len(case.task.sizes))
        same, other, last, epochs = np.array(errors_by_seed(train(case, size, work))).T
        rows.add("error", [same, other, last], size=size, epoch_chosen_on=[SAME, OTHER, NOTHING], seed=case.seeds)
        rows.add("best_epoch", epochs, size=size, seed=case.seeds)
        if size <= SMALL:
            small.append((same, last))
        if size in published:
            distances.append(np.abs(np.log(same / published[size][KINDS.index(case.kind)])))
    if small:
        means = np.exp(np.log(small).mean(0))
        rows.add("error_on_small_sets", means[0], seed=case.seeds)
        rows.add("last_error_on_small_sets", means[1], seed=case.seeds)
    if distances:
        rows.add("distance_to_published", np.mean(distances, 0), seed=case.seeds)
    return rows


def errors_by_seed(run: Run) -> list[tuple[float, float, float, float]]:
    """For each seed: the errors with its epoch chosen on the same, on other and on no test images, and the best epoch."""
    found = []
    for series in run.array("errors", run.array_steps("errors")[-1]):  # [epochs, 2]
        whole = series.mean(1)
        (best, is_over), other = best_epoch(whole), best_epoch(series[:, 0])[0]
        last = best + PATIENCE if is_over else len(whole) - 1
        found.append((float(whole[best]), float(series[other, 1]), float(whole[last]), float(best + 1)))
    return found


# --- claims --------------------------------------------------------------------------------------------------

BETTER, FAR_BEHIND = 1.0, 1.25  # thresholds of ratios of errors
PUBLISHED = {
    "mnist": {125: (0.187, 0.140, 0.067), 1000: (0.122, 0.099, 0.032), 8000: (0.083, 0.073, 0.020)},
    "cifar-10": {125: (0.697, 0.613, 0.543), 1000: (0.595, 0.521, 0.301)},
}
"""Errors read from the published figure, within 0.005: fixed, adaptive, full."""
WORDS = {"redrawn": "redrawn every epoch", "fixed": "one fixed set", "": "one fixed set, start N(0, 2 / fan-in)"}


def reading_of(task: Task) -> str:
    """Which reading of the figure a task is: redrawn, fixed, or empty for fixed sets from the other start."""
    if not isinstance(task, ScriptTask):
        return ""
    return "redrawn" if task.redrawn else "fixed"


def task_words(task: Task) -> str:
    """A task in words: its data, how its images are drawn, and how many."""
    small = ", ".join(str(size) for size in task.sizes if size <= SMALL)
    return f"{task.data}, {small} images, {WORDS[reading_of(task)]}"


def l10_parts(task: Task, *, last: bool = False) -> list[Part]:
    """The parts of L10 on one task: ratios of the errors of two models, over all small sizes of a seed.

    ``last``: errors at the last epoch, not at the best one on the test images.
    """
    words = task_words(task) + (", last epoch" if last else "")
    quantity = "last_error_on_small_sets" if last else "error_on_small_sets"
    fixed, adaptive, full = (Quantity(quantity, task=str(task), kind=kind) for kind in KINDS)
    rule: dict[str, Any] = {"by": ratio, "unit": "times", "seeds": task.seeds}
    return [
        Part(f"{words}: errors of fixed over adaptive features", (fixed, adaptive), above=BETTER, **rule),
        Part(f"{words}: errors of adaptive features over the network", (adaptive, full), above=FAR_BEHIND, **rule),
    ]


def l10_shown(task: Task) -> Iterator[Shown]:
    """The error of every kind of model for every size, with the published one in words."""
    words = f"{task.data}, {WORDS[reading_of(task)]}"
    for size in task.sizes:
        published = PUBLISHED[task.data].get(size)
        for place, kind in enumerate(KINDS):
            paper = "" if published is None else f" (paper: {published[place]:.3f})"
            for chosen, how in ((SAME, paper), (OTHER, ", epoch chosen on other images"), (NOTHING, ", last epoch")):
                error = Quantity("error", task=str(task), kind=kind, size=size, epoch_chosen_on=chosen)
                yield Shown(f"{words}, {size} images: error, {kind}{how}", error)
    if isinstance(task, ScriptTask):
        for kind in KINDS:
            distance = Quantity("distance_to_published", task=str(task), kind=kind)
            yield Shown(f"{task_words(task)}: abs(ln(ours / published)), {kind}", distance)


CLAIMS = (
    Claim(
        "L10",
        says=(
            "With few training images from MNIST and CIFAR-10 a linearised network with adaptive features has a "
            "lower test error than one with fixed features, and both stay far behind the full network."
        ),
        where="Fig. 4 (arXiv v2)",
        paper="error at n = 125: MNIST 0.187 / 0.140 / 0.067, CIFAR-10 0.697 / 0.613 / 0.543",
        figure="errors",
        parts=[part for task in (*MNIST_REDRAWN.values(), *CIFAR_10_REDRAWN.values()) for part in l10_parts(task)],
        controls=[
            *(
                part
                for task in (*MNIST_FIXED.values(), *CIFAR_10_FIXED.values(), MNIST, CIFAR_10)
                for part in l10_parts(task)
            ),
            *(part for task in (*MNIST_REDRAWN.values(), *MNIST_FIXED.values()) for part in l10_parts(task, last=True)),
        ],
        shows=[shown for task in (*READINGS, MNIST, CIFAR_10) for shown in l10_shown(task)],
    ),
)


# --- figure --------------------------------------------------------------------------------------------------

COLOUR = {"fixed": "grey", "adaptive": "orange", "full": "blue"}
LABEL = {"fixed": "fixed tangent features", "adaptive": "adaptive tangent features", "full": "the network"}


LINE = {"redrawn": "-", "fixed": "--", "": ":"}
MARK = {"redrawn": "o", "fixed": "s", "": "."}


def errors_figure(results: Results) -> plots.Figure:
    """Test error at the best test epoch, median and middle half of the seeds. Full lines: n images redrawn every epoch; broken:
    one fixed set of n images; dotted: fixed sets from another start. Diamonds: published."""
    measured = results.table.unique("task")
    tasks = [task for task in results.settings.tasks if str(task) in measured]
    panels = list(dict.fromkeys((task.data, task.optimiser) for task in tasks))
    figure, axes = plots.grid(1, len(panels), (3.8, 3.4))
    for axis, panel in zip(axes[0], panels, strict=True):
        draw_errors(axis, results, panel[0], [task for task in tasks if (task.data, task.optimiser) == panel])
    for kind in KINDS:
        axes[0, 0].plot([], [], "-", color=plots.COLOURS[COLOUR[kind]], label=LABEL[kind])
    for reading, line in LINE.items():
        style: dict[str, Any] = {"linestyle": line, "marker": MARK[reading], "color": plots.COLOURS["black"]}
        axes[0, 0].plot([], [], markersize=4, label=WORDS[reading], **style)
    axes[0, 0].plot([], [], "D", markersize=4, markerfacecolor="none", color=plots.COLOURS["black"], label="published")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def draw_errors(axis: plots.Axes, results: Results, data: str, tasks: Sequence[Task]) -> None:
    """One panel: these tasks of a data set, and what was published."""
    published, marks = PUBLISHED.get(data, {}), set(PUBLISHED.get(data, {}))
    for reading, line in LINE.items():
        names = [str(task) for task in tasks if reading_of(task) == reading]
        for kind in results.table.unique("kind", task=names):
            where: dict[str, Any] = {"task": names, "kind": kind, "epoch_chosen_on": SAME}
            sizes, values = results.table.series("error", over="size", **where)  # [sizes, seeds]
            style: dict[str, Any] = {"linestyle": line, "marker": MARK[reading], "markersize": 4}
            plots.draw_band(axis, sizes, values, "", COLOUR[kind], **style)
            marks |= set(sizes.astype(int).tolist())
    for place, kind in enumerate(KINDS):
        hollow: dict[str, Any] = {"markersize": 4, "markerfacecolor": "none", "color": plots.COLOURS[COLOUR[kind]]}
        axis.plot(list(published), [found[place] for found in published.values()], "D", **hollow)
    axis.set(xscale="log", yscale="log", title=data, xlabel="training images n", ylabel="test error")
    axis.set_xticks(sorted(marks), [str(mark) for mark in sorted(marks)])  # numbers as they are, not as powers of ten
    axis.minorticks_off()
    low, high = axis.get_ylim()
    heights = [height for height in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9) if low <= height <= high]
    axis.set_yticks(heights, [f"{height:g}" for height in heights])


STUDY = Study(
    name="sample-size",
    paper="tangent",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 5, "paper": 10},
    columns=("task", "kind"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("errors", "Small training sets (Figure 4 of arXiv v2)", errors_figure),),
    needs_gpu=("paper",),
)
