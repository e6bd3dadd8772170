"""Fixed and adaptive tangent features and the network, on small training sets (Figure 4 of arXiv v2; L10).

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
from unlazy.studies.tangent.sample_size_networks import KINDS, Layout, ModelCase, Task, best_epoch, train

# --- settings and cases --------------------------------------------------------------------------------------


DENSE = Layout((1, 28, 28), (), (128, 128, 128, 128))
CONVOLUTIONAL = Layout((3, 32, 32), (16, 32, 64, 128), (128, 128))
MNIST = Task("mnist", DENSE, "sgd", (125, 250, 500, 1000, 2000, 4000, 8000), 10_000)
CIFAR_10 = Task("cifar-10", CONVOLUTIONAL, "adam", (125, 250, 500, 1000), 2000, seeds=5)
SMOKE = (
    Task("digits", Layout((1, 8, 8), (), (8, 8)), "sgd", (20, 40), 60),
    Task("digits", Layout((1, 8, 8), (4, 4), (8,)), "adam", (20,), 60),
)
DESK = (Task("mnist", DENSE, "sgd", (125, 500), 2000), Task("cifar-10", CONVOLUTIONAL, "adam", (125,), 500))
# tasks at paper scale reach the largest size of the claim, and beyond it on MNIST, which needs a GPU; CIFAR-10 with half the
# seeds and a fifth of the test images takes two cores an hour; epochs: the most epochs of a training
SCALES = {
    "smoke": {"tasks": SMOKE, "epochs": 3},
    "desk": {"tasks": DESK, "epochs": 200},
    "paper": {"tasks": (MNIST, CIFAR_10), "epochs": 1000},
}


def cases(settings: Settings, seeds: Sequence[int]) -> list[ModelCase]:
    """Every kind of model on every task."""
    require_at_least_one(settings, "epochs")
    tasks, epochs = settings.tasks, settings.epochs
    return [ModelCase(task, kind, tuple(seeds[: task.seeds]), epochs) for task in tasks for kind in KINDS]


# --- measuring -----------------------------------------------------------------------------------------------

SMALL = 1000  # images: the largest training set that counts as small


def measure(case: ModelCase, work: Work) -> Rows:
    """Test errors for every size, and their geometric mean over the small sizes of the scale.

    ``epoch_chosen_on``: the test images that choose the epoch. With *same*, as published, the error is on these images; with
    *other* one half of the test images chooses the epoch and the error is on the other half.
    """
    rows, small = Rows(), []
    for place, size in enumerate(case.task.sizes):
        work.progress(place, len(case.task.sizes))
        same, other, epochs = np.array(errors_by_seed(train(case, size, work))).T
        rows.add("error", [same, other], size=size, epoch_chosen_on=["same", "other"], seed=case.seeds)
        rows.add("best_epoch", epochs, size=size, seed=case.seeds)
        if size <= SMALL:
            small.append(same)
    if small:
        rows.add("error_on_small_sets", np.exp(np.log(small).mean(0)), seed=case.seeds)
    return rows


def errors_by_seed(run: Run) -> list[tuple[float, float, float]]:
    """For each seed: the error at its best test epoch, the error with the epoch chosen on the other half, and that best epoch."""
    found = []
    for series in run.array("errors", run.array_steps("errors")[-1]):  # [epochs, 2]
        whole = series.mean(1)
        best, other = best_epoch(whole)[0], best_epoch(series[:, 0])[0]
        found.append((float(whole[best]), float(series[other, 1]), float(best + 1)))
    return found


# --- claims --------------------------------------------------------------------------------------------------

BETTER, FAR_BEHIND = 1.0, 1.25  # thresholds of ratios of errors
PUBLISHED = {
    "mnist-sgd": {125: (0.187, 0.140, 0.067), 1000: (0.122, 0.099, 0.032), 8000: (0.083, 0.073, 0.020)},
    "cifar-10-adam": {125: (0.697, 0.613, 0.543), 1000: (0.595, 0.521, 0.301)},
}
"""Errors read from the published figure, within 0.005: fixed, adaptive, full."""


def l10_parts(task: Task) -> list[Part]:
    """The parts of L10 on one task: ratios of the errors of two models, over all small training sets of a seed."""
    words = f"{task}, up to {SMALL} images"
    fixed, adaptive, full = (Quantity("error_on_small_sets", task=str(task), kind=kind) for kind in KINDS)
    rule: dict[str, Any] = {"by": ratio, "unit": "times", "seeds": task.seeds}
    return [
        Part(f"{words}: errors of fixed over adaptive features", (fixed, adaptive), above=BETTER, **rule),
        Part(f"{words}: errors of adaptive features over the network", (adaptive, full), above=FAR_BEHIND, **rule),
    ]


def l10_shown(task: Task) -> Iterator[Shown]:
    """The error of every kind of model for every size, with the published one in words."""
    for size in task.sizes:
        published = PUBLISHED[str(task)].get(size)
        for place, kind in enumerate(KINDS):
            paper = "" if published is None else f" (paper: {published[place]:.3f})"
            for chosen, words in (("same", paper), ("other", ", epoch chosen on other images")):
                error = Quantity("error", task=str(task), kind=kind, size=size, epoch_chosen_on=chosen)
                yield Shown(f"{task}, {size} images: error, {kind}{words}", error)


CLAIMS = (
    Claim(
        "L10",
        says=(
            "On small training sets from MNIST and CIFAR-10 a linearised network with adaptive features has a "
            "lower test error than one with fixed features, and both stay far behind the full network."
        ),
        where="Fig. 4 (arXiv v2)",
        paper="error at n = 125: MNIST 0.187 / 0.140 / 0.067, CIFAR-10 0.697 / 0.613 / 0.543",
        figure="errors",
        parts=[*l10_parts(MNIST), *l10_parts(CIFAR_10)],
        shows=[*l10_shown(MNIST), *l10_shown(CIFAR_10)],
    ),
)


# --- figure --------------------------------------------------------------------------------------------------

COLOUR = {"fixed": "grey", "adaptive": "orange", "full": "blue"}
LABEL = {"fixed": "fixed tangent features", "adaptive": "adaptive tangent features", "full": "the network"}


def errors_figure(results: Results) -> plots.Figure:
    """Test error against the size of the training set, median and middle half of the seeds; diamonds: published."""
    tasks = results.table.unique("task")
    figure, axes = plots.grid(1, len(tasks), (3.6, 3.0))
    for axis, task in zip(axes[0], tasks, strict=True):
        published = PUBLISHED.get(task, {})
        for place, kind in enumerate(KINDS):
            where: dict[str, Any] = {"task": task, "kind": kind, "epoch_chosen_on": "same"}
            sizes, values = results.table.series("error", over="size", **where)  # [sizes, seeds]
            plots.draw_band(axis, sizes, values, LABEL[kind], COLOUR[kind], marker="o", markersize=3)
            hollow = {"markersize": 4, "markerfacecolor": "none", "color": plots.COLOURS[COLOUR[kind]]}
            axis.plot(list(published), [found[place] for found in published.values()], "D", **hollow)
        title = task.rpartition("-")[0]
        axis.set(xscale="log", yscale="log", title=title, xlabel="training images", ylabel="test error")
        marks = sorted({*sizes.astype(int).tolist(), *published})  # numbers as they are, not as powers of ten
        axis.set_xticks(marks, [str(mark) for mark in marks])
        axis.minorticks_off()
        low, high = axis.get_ylim()
        marks = [mark for mark in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9) if low <= mark <= high]
        axis.set_yticks(marks, [f"{mark:g}" for mark in marks])
    axes[0, 0].plot([], [], "D", markersize=4, markerfacecolor="none", color=plots.COLOURS["black"], label="published")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


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
