"""From which step do the gates' kernels serve as well on test images as the trained network? (C27b).

C27 copies gates on the circle and measures training loss. Here the question is put to *test* accuracy on images: at several
steps of training, kernel regression with the overlap kernel and with the neural path kernel of that step is fitted to the
network's own training images. The paper gives no number for either; both claims are our reading of its thesis that features
are learned early. Two CPU cores allow 2000 training images; the ridge is chosen on a fifth of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.claims.functions import difference
from unlazy.data.dataset import Dataset
from unlazy.data.images import load_images
from unlazy.kernels.overlap import hard_gates
from unlazy.kernels.regression import kernel_regression
from unlazy.models.net import GatedNet
from unlazy.studies.study import Case, Figure, Results, Settings, Study, Work, make_cases
from unlazy.studies.table import Rows
from unlazy.studies.trainings import Training, accuracy_on_test_data, classifier, flat_dataset
from unlazy.training.ensemble import Member
from unlazy.training.fit import Recipe
from unlazy.training.recorder import FixedSteps, Measure

# --- what varies ---------------------------------------------------------------------------------------------

NETS = {"relu": "ReLU net", "pwc": "DLGN, constant experts"}
KERNELS = {"overlap": "overlap kernel", "path": "neural path kernel"}
OWN_KERNEL = {"relu": "path", "pwc": "overlap"}
"""The kernel of free path values of each network: its experts are linear in the input, or constant."""
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)  # relative to the mean diagonal
VALIDATION = 5  # one training image of five chooses the ridge
EARLY_SHARE = 10  # "early": a tenth of the training

SCALES: dict[str, dict[str, Any]] = {
    # seconds: shows that the study runs; no claim is judged
    "smoke": {"data": ("digits",), "images": 200, "test_images": 100, "epochs": 4, "width": 12, "depth": 2, "lr": 1e-2},
    # ten minutes on one core
    "desk": {
        "data": ("fashion-mnist", "cifar-10"),
        "images": 2000,
        "test_images": 2000,
        "epochs": 50,
        "width": 128,
        "depth": 5,
        "lr": 2e-4,
    },
}
SHARED = {"nets": tuple(NETS), "batch": 32, "beta": 4.0}


def cases(settings: Settings, seeds: Sequence[int]) -> list[Case]:
    """One case for every network on every data set, with all seeds as one stack."""
    places = [{"data": data, "net": net, "seeds": tuple(seeds)} for data in settings.data for net in settings.nets]
    return make_cases(places, settings, without=("nets",))


def training_of(case: Case, folder: Path | None) -> Training:
    """The stack of a case; kernels are measured at the start, then about three times per tenfold training time."""
    train, test = (
        flat_dataset(load_images(case.data, split, folder).take(slice(count)), case.data)
        for split, count in (("train", case.images), ("test", case.test_images))
    )
    model = classifier(case.net, train, case.beta, width=case.width, depth=case.depth)
    members = tuple(Member(seed, case.lr) for seed in case.seeds)
    recipe = Recipe(model, members, case.epochs, case.batch, "cross-entropy", checkpoint_epochs=case.epochs)
    steps = FixedSteps.at(measured_steps(case.epochs * recipe.steps_per_epoch(len(train))))
    measures = (
        Measure(accuracy_on_test_data, steps, test),
        Measure(kernel_accuracies, steps, join_splits(train, test)),
    )
    return Training(f"{case.data}-{case.net}", recipe, train, measures)


def measured_steps(last: int) -> list[int]:
    """Step 0, the last step, and steps between them that grow by the square root of ten.

    >>> measured_steps(3150)
    [0, 10, 32, 100, 315, 996, 3150]
    """
    return sorted({0, *(round(last / 10 ** (half / 2)) for half in range(6))})


def join_splits(train: Dataset, test: Dataset) -> Dataset:
    """Training and test images as one data set with two groups."""
    x, y = torch.cat([train.x, test.x]), torch.cat([train.y, test.y])
    is_train = torch.arange(len(x)) < len(train)
    return Dataset(train.name, x, y, {"train": is_train, "test": ~is_train}, {"split": "both"})


# --- how a case is measured ----------------------------------------------------------------------------------


def kernel_accuracies(model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
    """Test accuracy of regression with the hard gates' kernels, member by member: ``kernel_overlap`` and ``kernel_path``."""
    train = batch.groups["train"]
    inner = (batch.x[train] @ batch.x.mT).double()
    found: dict[str, list[float]] = {name: [] for name in KERNELS}
    for gates in zip(*hard_gates(model, batch.x), strict=True):
        overlap = overlap_with_training(gates, train)
        for name, kernel in (("overlap", overlap), ("path", overlap * inner)):
            found[name].append(regression_accuracy(kernel, batch.y, train))
    return {f"kernel_{name}": torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def overlap_with_training(gates: Sequence[Tensor], train: Tensor) -> Float[Tensor, "n all"]:
    """Common active paths of every training image with every image, over all paths: a product over layers, at most 1."""
    kernel = torch.ones((), dtype=torch.float64)
    for layer in gates:
        open_units = layer.float()
        kernel = kernel * (open_units[train] @ open_units.mT).double() / layer.shape[-1]
    return kernel


def regression_accuracy(kernel: Float[Tensor, "n all"], y: Tensor, train: Tensor) -> float:
    """Share of right test images. The ridge is the one of ``RIDGES`` that is best on every fifth training image."""
    own, cross, targets = kernel[:, train], kernel[:, ~train].mT, y[train].double()
    held_out = torch.arange(len(own)) % VALIDATION == 0
    inside, beside = own[~held_out][:, ~held_out], own[held_out][:, ~held_out]

    def held_out_accuracy(ridge: float) -> float:
        guess = kernel_regression(inside, targets[~held_out], beside, ridge)
        return float((guess.argmax(1) == targets[held_out].argmax(1)).double().mean())

    best = max(RIDGES, key=held_out_accuracy)
    guess = kernel_regression(own, targets, cross, best)
    return float((guess.argmax(1) == y[~train].argmax(1)).double().mean())


def measure(case: Case, work: Work) -> Rows:
    """Test accuracies of the network and of regression with its kernels, by step and at the named moments.

    ``share_to_reach``: the share of the training from which regression stays within a point of the trained network; infinite if
    it never does. ``linear``: regression on the pixels alone, which no gate has touched.
    """
    training = training_of(case, work.data)
    run, rows, seeds = training.run(work), Rows(), list(case.seeds)
    steps, network = run.scalars("test_as_trained")
    for learner, curve in {"network": network, **{name: run.scalars(f"kernel_{name}")[1] for name in KERNELS}}.items():
        rows.add("accuracy", curve, at=steps, learner=learner, seed=seeds)
        early = int(np.flatnonzero(steps >= round(steps[-1] / EARLY_SHARE))[0])
        for at, index in (("start", 0), ("early", early), ("end", -1)):
            rows.add("accuracy", curve[index], at=at, learner=learner, seed=seeds)
        if learner in KERNELS:
            reached = share_to_reach(steps, curve, network[-1])
            rows.add_all({"share_to_reach": reached, "share_watched": np.ones(len(seeds))}, learner=learner, seed=seeds)
    both = training.measures[1].batch
    assert both is not None
    train = both.groups["train"]
    alone = regression_accuracy((both.x[train] @ both.x.mT).double(), both.y, train)
    rows.add("accuracy", [alone] * len(seeds), at="end", learner="linear", seed=seeds)
    return rows


def share_to_reach(steps: NDArray[Any], curve: NDArray[Any], network: NDArray[Any]) -> NDArray[np.float64]:
    """The first share of the training from which a curve ``[T, seeds]`` stays within a point of a number; infinite if never."""
    good = curve >= network - ONE_POINT
    stays = np.logical_and.accumulate(good[::-1], axis=0)[::-1]
    return np.where(stays.any(0), steps[stays.argmax(0)] / steps[-1], np.inf)


# --- what is claimed -----------------------------------------------------------------------------------------

ONE_POINT = 0.01
DATA = tuple(SCALES["desk"]["data"])
WITHIN_EARLY = 0.101  # a tenth of the training, rounded to a step


def parts(kernel_of: Mapping[str, str]) -> Iterator[Part]:
    """Two parts for each network and data set: the trained network is reached early; the early kernel is as good as the last."""
    for data in DATA:
        for net, kernel in kernel_of.items():
            where: dict[str, Any] = {"data": data, "net": net, "learner": kernel}
            name = f"{data}, {NETS[net]}, {KERNELS[kernel]}"
            reached, watched = (Quantity(one, **where) for one in ("share_to_reach", "share_watched"))
            words = f"{name}: share of training until regression reaches the trained network"
            yield Part(words, reached, below=WITHIN_EARLY, within=watched)
            last, early = (Quantity("accuracy", at, **where) for at in ("end", "early"))
            words = f"{name}: test accuracy with the last kernel less that at a tenth of training"
            yield Part(words, (last, early), by=difference, below=ONE_POINT)


def shown() -> Iterator[Shown]:
    """Test accuracies of the networks and of every kernel at the start, early, and at the end."""
    for data in DATA:
        for net, words in NETS.items():
            where = {"data": data, "net": net}
            yield Shown(f"{data}, {words}: trained network", Quantity("accuracy", "end", learner="network", **where))
            yield Shown(f"{data}, {words}: pixels alone", Quantity("accuracy", "end", learner="linear", **where))
            for kernel, name in KERNELS.items():
                for at in ("start", "early", "end"):
                    one = Quantity("accuracy", at, learner=kernel, **where)
                    yield Shown(f"{data}, {words}: {name}, {at}", one)


CLAIMS = (
    Claim(
        "C27b",
        says=(
            "The features are finished early, on test images: kernel regression with the gates of a tenth of the training is as "
            "accurate as with the last gates, and as accurate as the trained network."
        ),
        where="thesis",
        paper="our reading; no number",
        figure="accuracy_over_time",
        parts=[*parts(OWN_KERNEL)],
        controls=[*parts({"relu": "overlap", "pwc": "path"})],
        shows=[*shown()],
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------

LINES = {"network": ("black", "the network"), "overlap": ("blue", "overlap kernel"), "path": ("orange", "path kernel")}


def draw_accuracy(results: Results) -> plots.Figure:
    """Test accuracy of the network at each step, and of kernel regression with its gates of that step on the same training
    images; median and middle half of the seeds. Step 0 stands at the left edge. Dotted: the trained network; grey: regression on
    pixels alone.
    """
    settings = results.settings
    figure, axes = plots.grid(len(settings.data), len(settings.nets), (3.4, 2.7), sharex=True, sharey="row")
    for line, data in zip(axes, settings.data, strict=True):
        for axis, net in zip(line, settings.nets, strict=True):
            where = {"data": data, "net": net}
            for learner, (colour, label) in LINES.items():
                steps, values = results.table.series("accuracy", learner=learner, **where)
                plots.draw_band(axis, np.maximum(steps, 3), values, label, colour, marker="o", markersize=3)
            last = float(np.median(results.table.select("accuracy", "end", learner="network", **where)))
            axis.axhline(last, color=plots.COLOURS["black"], linestyle=":", linewidth=0.8)
            pixels = float(np.median(results.table.select("accuracy", "end", learner="linear", **where)))
            axis.axhline(pixels, color=plots.COLOURS["grey"], linewidth=0.8, label="pixels alone")
            axis.set(xscale="log", title=f"{data}, {NETS[net]}", xlabel="step")
        line[0].set_ylabel("test accuracy")
    plots.shared_legend(figure, 4)
    return figure


STUDY = Study(
    name="kernels-over-time",
    paper="half-space",
    scales={scale: SHARED | sizes for scale, sizes in SCALES.items()},
    seeds={"smoke": 2, "desk": 3},
    columns=("data", "net"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("accuracy_over_time", "Test accuracy of the gates' kernels over training", draw_accuracy),),
)
