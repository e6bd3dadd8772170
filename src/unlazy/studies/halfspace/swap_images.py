"""Easy and hard labels of Fashion-MNIST change places in mid-training: do the paths follow? (F6b).

As in the study ``swap``, on images. Half of the classes keep their labels, those of the other half are drawn by lot, which is the
manipulation under which paths gather on the easy half (C16b). Then the halves exchange their roles. Every seed is trained with
either half easy first, and numbers are means over the two, so that the images cancel. Control: networks that have the later
labels from the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.claims.functions import ratio
from unlazy.data.dataset import Dataset
from unlazy.data.images import load_images
from unlazy.data.relabelling import redraw_labels
from unlazy.models.gates import SoftGate
from unlazy.models.spec import NetSpec, relu_spec
from unlazy.store import Run
from unlazy.studies.halfspace.fashion import FIRST_HALF, SECOND_HALF, on_test
from unlazy.studies.halfspace.fashion_effects import CLASSES, mean_over
from unlazy.studies.study import Case, Figure, Results, Settings, Study, Work, make_cases
from unlazy.studies.table import Rows
from unlazy.studies.trainings import Training
from unlazy.training.ensemble import Member
from unlazy.training.fit import Recipe
from unlazy.training.recorder import FixedSteps, Measure

# --- what varies ---------------------------------------------------------------------------------------------

NETS = {"relu": "ReLU net", "pwc": "DLGN"}
HALVES = (FIRST_HALF, SECOND_HALF)
SHARED: dict[str, Any] = {"nets": tuple(NETS), "batch": 32, "depth": 5, "beta": 4.0}
SCALES: dict[str, dict[str, Any]] = {
    # seconds, on digits: shows that the study runs; no claim is judged
    "smoke": {"data": "digits", "images": 300, "test_images": 200, "before": 1, "epochs": 2, "width": 8, "lr": 3e-3},
    # three minutes on one core
    "desk": {
        "data": "fashion-mnist",
        "images": 6000,
        "test_images": 1000,
        "before": 4,
        "epochs": 8,
        "width": 128,
        "lr": 2e-4,
    },
}


def cases(settings: Settings, seeds: Sequence[int]) -> list[Case]:
    """One case for each network, with all seeds as one stack."""
    return make_cases([{"net": net, "seeds": tuple(seeds)} for net in settings.nets], settings, without=("nets",))


def recipe_of(case: Case, inputs: int) -> Recipe:
    """The network and how it is trained: every seed with either half easy."""
    sizes: dict[str, Any] = {"width": case.width, "depth": case.depth}
    if case.net == "relu":
        spec = relu_spec(inputs, CLASSES, **sizes)
    else:
        spec = NetSpec(inputs, CLASSES, experts="constant", constant_input="one", gate=SoftGate(case.beta), **sizes)
    members = tuple(Member(seed, case.lr) for _ in HALVES for seed in case.seeds)
    keep = {"checkpoint_epochs": case.epochs, "checkpoints_at": (case.before,)}
    return Recipe(spec, members, case.epochs, case.batch, "cross-entropy", **keep)


def training_of(case: Case, work: Work, after: Run | None = None) -> Training:
    """From the start with the first or second half easy; or ``after`` a run, from its epoch ``before``, with halves exchanged."""
    halves = HALVES if after is None else HALVES[::-1]
    train, test = (labelled_images(case, split, halves, work) for split in ("train", "test"))
    recipe = recipe_of(case, train.x.shape[1])
    unit = recipe.steps_per_epoch(len(train))
    measures = (Measure(on_test, FixedSteps.at(range(0, case.epochs * unit + 1, unit)), test),)
    if after is None:
        return Training(f"first-{case.net}", recipe, train, measures)
    start = {name: values for name, values in after.checkpoint(case.before * unit).items() if name != "random/order"}
    return Training(f"second-{case.net}", recipe, train, measures, start, after.id)


def labelled_images(case: Case, split: str, halves: Sequence[tuple[int, ...]], work: Work) -> Dataset:
    """Images of a split; one half of the members has the first of ``halves`` easy, the other half the second."""
    images = load_images(case.data, split, work.data)
    images = images.take(slice(case.images if split == "train" else case.test_images))
    hard = {easy: tuple(label for label in range(CLASSES) if label not in easy) for easy in halves}
    labels = [redraw_labels(images, hard[easy], 1.0, seed).one_hot() for easy in halves for seed in case.seeds]
    groups = {name: images.labels == label for label, name in enumerate(images.classes)}
    options = {"split": split, "easy": [list(easy) for easy in halves], "seeds": list(case.seeds)}
    return Dataset(images.name, images.flat(), torch.stack(labels), groups, options)


# --- how a case is measured ----------------------------------------------------------------------------------

BEFORE, SWAP, SCRATCH = "before", "swap", "scratch"  # column `training`


def measure(case: Case, work: Work) -> Rows:
    """Active paths and test accuracy by epoch: up to the exchange, after it, and with the later labels from the start.

    ``allocation``: mean log of the active paths on the classes that are easy after the exchange, less that on the others.
    ``accuracy``: on the classes that are easy after the exchange, against the labels that hold then.
    """
    first = training_of(case, work).run(work.stage(0, 2))
    second = training_of(case, work, first).run(work.stage(1, 2))
    rows = Rows()
    found = {
        SCRATCH: (easy_less_hard(case, first, "test_paths"), on_easy(case, first)),
        SWAP: (easy_less_hard(case, second, "test_paths", exchanged=True), on_easy(case, second, exchanged=True)),
    }
    for training, (allocation, accuracy) in found.items():
        for name, values in (("allocation", allocation), ("accuracy", accuracy)):
            rows.add(name, values, at=list(range(case.epochs + 1)), training=training, seed=case.seeds)
            rows.add(name, values[-1], at="end", training=training, seed=case.seeds)
    earlier = -found[SCRATCH][0][: case.before + 1]  # what is easy later is hard before
    rows.add(
        "allocation",
        earlier,
        at=[epoch - case.before for epoch in range(case.before + 1)],
        training=BEFORE,
        seed=case.seeds,
    )
    rows.add("allocation", earlier[-1], at="end", training=BEFORE, seed=case.seeds)
    return rows


def _halves(case: Case, run: Run, name: str, exchanged: bool) -> NDArray[np.float64]:
    """Means of a quantity (of paths: of their logarithm) over easy and over hard classes and both stacks, ``[2, T, seeds]``."""
    steps = run.array_steps(name)
    values = np.array([run.array(name, step) for step in steps], dtype=np.float64)
    if name == "test_paths":
        values = np.log(np.maximum(values, np.finfo(np.float64).tiny))
    values = values.reshape(len(steps), len(HALVES), len(case.seeds), CLASSES)
    halves = HALVES[::-1] if exchanged else HALVES
    easy = np.array([[label in half for label in range(CLASSES)] for half in halves])[:, None]  # [2, 1, classes]
    return np.stack([mean_over(inside, values).mean(1) for inside in (easy, ~easy)])


def easy_less_hard(case: Case, run: Run, name: str, exchanged: bool = False) -> NDArray[np.float64]:
    """A quantity on the easy less that on the hard classes, mean over both choices of the easy half, ``[T, seeds]``."""
    easy, hard = _halves(case, run, name, exchanged)
    return np.asarray(easy - hard)


def on_easy(case: Case, run: Run, exchanged: bool = False) -> NDArray[np.float64]:
    """Test accuracy on the easy classes, mean over both choices of the easy half, ``[T, seeds]``."""
    return np.asarray(_halves(case, run, "test_accuracy", exchanged)[0])


# --- what is claimed -----------------------------------------------------------------------------------------

RECOVERED = 0.95  # of the accuracy that networks with the later labels from the start reach


def parts() -> Iterator[Part]:
    """Two parts for each network: paths on the newly easy classes, and accuracy there."""
    for net, name in NETS.items():
        paths = Quantity("allocation", "end", net=net, training=SWAP)
        yield Part(f"{name}: paths on newly easy over newly hard classes at the end", paths, above=0, unit="log ratio")
        both = tuple(Quantity("accuracy", "end", net=net, training=training) for training in (SWAP, SCRATCH))
        yield Part(f"{name}: accuracy on newly easy classes, over that from the start", both, by=ratio, above=RECOVERED)


def shown() -> Iterator[Shown]:
    """Path ratios before the exchange and of the control; accuracies."""
    for net, name in NETS.items():
        for training, words in ((BEFORE, "just before the exchange"), (SCRATCH, "later labels from the start")):
            one = Quantity("allocation", "end", net=net, training=training)
            yield Shown(f"{name}: paths on the same classes, {words}", one, unit="log ratio")
        for training in (SWAP, SCRATCH):
            one = Quantity("accuracy", "end", net=net, training=training)
            yield Shown(f"{name}: accuracy on those classes, {training}", one)


CLAIMS = (
    Claim(
        "F6b",
        says=(
            "When easy and hard labels of Fashion-MNIST are exchanged in mid-training, the active paths move to the newly easy "
            "classes, and accuracy there recovers."
        ),
        where="published summary, check 1, on images",
        paper="check proposed; no number",
        figure="paths",
        parts=[*parts()],
        shows=[*shown()],
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------

LINES = {BEFORE: ("black", "before"), SCRATCH: ("orange", "these labels from the start"), SWAP: ("blue", "exchanged")}


def draw_paths(results: Results) -> plots.Figure:
    """Log ratio of active paths, classes that are easy after the exchange over the others; median and middle half of the seeds.
    Epoch 0 is the exchange, or the start of the control.
    """
    figure, axes = plots.grid(1, len(results.settings.nets), (3.4, 2.7), sharey=True)
    for axis, net in zip(axes[0], results.settings.nets, strict=True):
        for training, (colour, label) in LINES.items():
            epochs, values = results.table.series("allocation", net=net, training=training)
            plots.draw_band(axis, epochs, values, label, colour, marker="o", markersize=3)
        axis.axhline(0, color=plots.COLOURS["grey"], linewidth=0.7)
        axis.set(title=NETS[net], xlabel="epochs after the exchange")
    axes[0, 0].set_ylabel("log paths, new easy less hard")
    plots.shared_legend(figure, 3)
    return figure


STUDY = Study(
    name="swap-images",
    paper="half-space",
    scales={scale: SHARED | sizes for scale, sizes in SCALES.items()},
    seeds={"smoke": 2, "desk": 4},
    columns=("net",),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("paths", "Active paths before and after the exchange", draw_paths),),
)
