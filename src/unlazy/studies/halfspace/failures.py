"""Where DLGNs are said to fail: fast targets, exclusive-or, small data, with ReLU nets beside them (F1-F3).

A published summary of the half-space paper names three failures of DLGNs and gives no set-up and no number. F1 and F3 are judged
against ReLU nets of the same width, depth and training: a failure of DLGNs is one that ReLU nets do not have as much. F2 is
judged for DLGNs alone, with ReLU nets and a random forest shown beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown, Vector
from unlazy.claims.functions import difference, ratio
from unlazy.data.circle import Circle
from unlazy.data.dataset import Dataset
from unlazy.data.images import load_images
from unlazy.data.interactions import Interaction
from unlazy.kernels.overlap import hard_gates
from unlazy.models.net import GatedNet
from unlazy.probes import standard
from unlazy.probes.paths import cell_floor, count_cells
from unlazy.runtime import Unsupported, stream
from unlazy.studies.halfspace.circle_networks import ARMS, PRESETS, beta_suffix, preset_beta
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
    stack_targets,
)
from unlazy.training.ensemble import Member
from unlazy.training.fit import Recipe
from unlazy.training.recorder import FixedSteps, Measure

Where = dict[str, Any]

# --- what varies ---------------------------------------------------------------------------------------------

FREQUENCY, INTERACTIONS, SMALL_DATA = "frequency", "interactions", "small data"  # the experiments
FOREST = "random forest"
NETWORKS = {
    "dlgn": "DLGN, linear experts",
    "pwc": "DLGN, constant experts",
    "pwc-hard": "DLGN, trained hard gates",
    "quadratic": "quadratic gates",
    "relu": "ReLU net",
    FOREST: FOREST,
}
"""Learners of the two classification experiments. The experiment with fast targets has three arms of the circle study."""


@dataclass(frozen=True)
class Frequency:
    """F1: the circle with ever faster bottom halves, at several widths. ``frequencies``: in half cycles, slowest first."""

    epochs: int
    frequencies: tuple[float, ...] = (2.0, 8.0, 16.0, 24.0, 32.0, 48.0)
    widths: tuple[int, ...] = (8, 16, 32)
    depth: int = 5
    presets: tuple[str, ...] = ("author", "pilot")
    networks: tuple[str, ...] = ("pwc", "pwc-hard", "relu")
    batch: int = 32


@dataclass(frozen=True)
class Interactions:
    """F2: the exclusive-or of several of 20 inputs. ``orders``: of how many; ``problems``: law of the inputs, training samples.

    All problems are trained for the same number of updates. Problems with 4000 samples are judged; the other one shows what fewer
    samples change.
    """

    updates: int
    problems: tuple[tuple[str, int], ...] = (("signs", 4000), ("gaussian", 4000), ("signs", 1000))
    orders: tuple[int, ...] = (2, 3, 4, 5)
    networks: tuple[str, ...] = ("dlgn", "pwc", "pwc-hard", "quadratic", "relu")
    inputs: int = 20
    tests: int = 2000
    width: int = 64
    depth: int = 3
    beta: float = 4.0
    lr: float = 1e-3
    batch: int = 100
    trees: int = 100


@dataclass(frozen=True)
class SmallData:
    """F3: few to many images, trained for the same number of updates or for ``least_epochs``, whichever is more.

    ``starts``: how many seeds share one draw of training images; larger sets of a draw contain the smaller ones. ``sizes``: image
    data sets by name, each with its numbers of training images, fewest first.
    """

    starts: int
    updates: int
    least_epochs: int
    sizes: tuple[tuple[str, tuple[int, ...]], ...]
    tests: int = 2000
    widths: tuple[int, ...] = (16, 64)
    networks: tuple[str, ...] = ("pwc", "dlgn", "relu")
    depth: int = 3
    beta: float = 4.0
    lr: float = 1e-3
    batch: int = 32


@dataclass(frozen=True)
class Settings:
    """One scale of the study."""

    frequency: Frequency
    interactions: Interactions
    small_data: SmallData


SCALES = {
    # seconds: shows that the study runs; no claim is judged
    "smoke": Settings(
        Frequency(epochs=2, frequencies=(2.0, 16.0), widths=(4,), depth=2, presets=("pilot",)),
        Interactions(updates=6, problems=(("signs", 60), ("gaussian", 40)), orders=(2, 3), tests=50, width=8, trees=5),
        SmallData(starts=1, updates=4, least_epochs=1, sizes=(("digits", (20, 60)),), tests=50, widths=(8,)),
    ),
    # a few minutes on two cores
    "desk": Settings(
        Frequency(epochs=100, frequencies=(2.0, 8.0, 16.0, 48.0), widths=(8, 16)),
        Interactions(updates=600, problems=(("signs", 4000),), networks=("dlgn", "pwc", "relu"), width=32),
        SmallData(1, updates=300, least_epochs=5, sizes=(("digits", (50, 200, 1400)),), networks=("pwc", "relu")),
    ),
    "paper": Settings(
        Frequency(epochs=250),
        Interactions(updates=1600),
        SmallData(
            starts=2,
            updates=1000,
            least_epochs=20,
            sizes=(("digits", (50, 100, 200, 400, 800, 1400)), ("fashion-mnist", (50, 500, 5000))),
        ),
    ),
}


# --- cases ---------------------------------------------------------------------------------------------------


def combine_columns(experiment: str, **axes: Sequence[Any]) -> list[Where]:
    """Columns of an experiment in every combination of these values."""
    return [{"experiment": experiment, **dict(zip(axes, place, strict=True))} for place in product(*axes.values())]


def cases(settings: Settings, seeds: Sequence[int]) -> list[Case]:
    """One case for every network of the three experiments, with all its seeds; on small data, with the seeds of one draw."""
    fast, xor, few, stack = settings.frequency, settings.interactions, settings.small_data, tuple(seeds)
    circles = combine_columns(FREQUENCY, preset=fast.presets, width=fast.widths, network=fast.networks, seeds=[stack])
    samples = [{"law": law, "samples": samples, "seeds": stack} for law, samples in xor.problems]
    networks = [{**one, **place} for one in samples for place in combine_columns(INTERACTIONS, network=xor.networks)]
    forests = [{**one, **place} for one in samples for place in combine_columns(INTERACTIONS, network=[FOREST])]
    draws = sorted({seed // few.starts for seed in seeds})
    images = [
        {**place, "seeds": tuple(seed for seed in seeds if seed // few.starts == place["draw"])}
        for name, sizes in few.sizes
        for place in combine_columns(
            SMALL_DATA, images=[name], samples=sizes, draw=draws, width=few.widths, network=few.networks
        )
    ]
    return [
        *make_cases(circles, fast, without=("presets", "widths", "networks")),
        *make_cases(networks, xor, without=("problems", "networks", "trees")),
        *make_cases(forests, xor, without=("problems", "networks", "updates", "width", "depth", "beta", "lr", "batch")),
        *make_cases(images, few, without=("starts", "sizes", "widths", "networks")),
    ]


def measure(case: Case, work: Work) -> Rows:
    """Train the networks of the case, or its forests, and measure them."""
    if case.experiment == FREQUENCY:
        return measure_fast_targets(case, work)
    if case.network == FOREST:
        return measure_forests(case, work)
    return measure_classifiers(case, work)


# --- how F1 is measured: fast targets ------------------------------------------------------------------------

FITTED = 0.05  # a tenth of the loss before training


def circles_by_frequency(case: Case) -> list[Circle]:
    """The circle of the preset with each of the frequencies on its bottom half."""
    return [replace(PRESETS[case.preset].circle, bottom=frequency) for frequency in case.frequencies]


def fast_target_training(case: Case) -> Training:
    """All frequencies and seeds of one network as members of one stack; each member has its own targets."""
    preset, beta = PRESETS[case.preset], preset_beta(case.preset, case.network)
    spec = ARMS[case.network].spec(preset, case.width, case.depth)
    members = tuple(Member(seed, preset.lr, beta) for _ in case.frequencies for seed in case.seeds)
    recipe = Recipe(spec, members, case.epochs, case.batch, checkpoint_epochs=50)
    data = stack_targets([circle.dataset() for circle in circles_by_frequency(case) for _ in case.seeds])
    unit = recipe.steps_per_epoch(len(data))
    end = case.epochs * unit
    measures = (
        Measure(standard.curves, FixedSteps.at({0, case.epochs // 2 * unit, end})),
        Measure(own_floors, FixedSteps.at({0, end})),
    )
    return Training(f"frequency-{case.preset}-{case.width}-{case.network}", recipe, data, measures)


def measure_fast_targets(case: Case, work: Work) -> Rows:
    """Losses at every frequency, the least loss that the trained cells allow, and the least loss of any half-spaces."""
    run, rows = fast_target_training(case).run(work), Rows()
    members = [{"half_cycles": frequency, "seed": seed} for frequency in case.frequencies for seed in case.seeds]
    ends = {name: final_values(run, name) for name in ("loss", "loss_bottom", "loss_hard_gates", "cells", "cell_floor")}
    rows.add_all(ends, members=members, at="end")
    rows.add("loss", run.scalars("loss")[1][-2], members=members, at="half time")
    rows.add("cell_floor", run.scalars("cell_floor")[1][0], members=members, at=0)
    loss = ends["loss"].reshape(len(case.frequencies), len(case.seeds))
    rows.add("fastest_fitted", fastest_fitted(loss, case.frequencies), seed=case.seeds)
    if case.network != "relu":
        units, biases = case.depth * case.width, PRESETS[case.preset].biases
        floors = [ideal_floor(circle.dataset(), units, biases) for circle in circles_by_frequency(case)]
        rows.add("ideal_floor", np.repeat(floors, len(case.seeds)), members=members)
    return rows


def own_floors(model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
    """Number of cells with samples, and the least loss of constant experts on them (affine ones for ReLU), member by member."""
    x = None if model.settings.experts == "constant" else batch.x
    per_member = list(zip(*hard_gates(model, batch.x), strict=True))
    floors = [cell_floor(layers, y, x) for layers, y in zip(per_member, batch.y, strict=True)]
    found = torch.tensor([count_cells(layers) for layers in per_member], dtype=torch.float64)
    return {"cells": found, "cell_floor": torch.stack(floors)}


def fastest_fitted(loss: Vector, frequencies: Sequence[float]) -> Vector:
    """Per seed of ``loss [frequency, seed]`` the highest frequency that is fitted with all lower ones; 0 if none is."""
    fitted = np.logical_and.accumulate(loss < FITTED, axis=0)
    found: Vector = np.array([0.0, *frequencies])[fitted.sum(0)]
    return found


def ideal_floor(data: Dataset, units: int, biases: bool) -> float:
    """Least loss of constant experts on any placement of ``units`` half-spaces: no network of that size can do better.

    Without biases every boundary passes through the centre and cuts each half of the circle once: at most ``units + 1`` pieces on
    either half. With biases a boundary cuts the circle in at most two places.
    """
    y = data.y[:, 0].double().numpy()
    if biases:
        return least_error_of_pieces(y, 2 * units + 1) / len(y)
    halves = [y[data.groups[half].numpy()] for half in ("top", "bottom")]
    return sum(least_error_of_pieces(half, units + 1) for half in halves) / len(y)


def least_error_of_pieces(y: Vector, pieces: int) -> float:
    """Least sum of squared errors of any function with at most ``pieces`` constant pieces on points in this order.

    Exact, by dynamic programming over the place of the last cut.
    """
    n = len(y)
    if pieces >= n:
        return 0.0
    sums, squares = (np.concatenate([[0.0], np.cumsum(values)]) for values in (y, y * y))
    count = np.arange(n + 1)[None] - np.arange(n + 1)[:, None]  # samples from row to column
    with np.errstate(divide="ignore", invalid="ignore"):
        error = (squares[None] - squares[:, None]) - (sums[None] - sums[:, None]) ** 2 / count
    error = np.where(count > 0, error, np.inf)
    best = error[0]
    for _ in range(pieces - 1):
        best = np.minimum(best, (best[:, None] + error).min(0))
    return max(float(best[n]), 0.0)


# --- how F2 and F3 are measured: the exclusive-or of several inputs, small data ------------------------------


def members_of(case: Case) -> list[Where]:
    """Columns of every member of a case. The seed also draws the inputs of which an exclusive-or is taken."""
    if case.experiment == SMALL_DATA:
        return [{"seed": seed} for seed in case.seeds]
    return [{"order": order, "seed": seed} for order in case.orders for seed in case.seeds]


def xor_datasets(case: Case, split: str) -> list[Dataset]:
    """The exclusive-or that each member learns; all members have the same inputs."""
    n = case.samples if split == "train" else case.tests
    return [
        Interaction(n, case.inputs, one["order"], case.law, choice=one["seed"]).dataset(split)
        for one in members_of(case)
    ]


def image_datasets(case: Case, folder: Path | None) -> list[Dataset]:
    """Training set (the first ``samples`` images of the case's draw) and test set."""
    train, test = (load_images(case.images, split, folder) for split in ("train", "test"))
    order = torch.randperm(len(train), generator=stream(case.draw, "small data", case.images))
    return [flat_dataset(one, case.images) for one in (train.take(order[: case.samples]), test.take(slice(case.tests)))]


def classifier_training(case: Case, folder: Path | None = None) -> Training:
    """The stack of a case: every order and seed on an exclusive-or, every seed of a draw on images."""
    epochs = -(-case.updates // -(-case.samples // case.batch))
    if case.experiment == INTERACTIONS:
        key, at = f"xor-{case.law}-{case.samples}-{case.network}", {0, epochs // 2, epochs}
        data = [stack_targets(xor_datasets(case, split)) for split in ("train", "test")]
    else:
        key = f"small-{case.images}-{case.samples}-{case.draw}-{case.width}-{case.network}"
        epochs = max(epochs, case.least_epochs)
        data, at = image_datasets(case, folder), {epochs}
    model = classifier(case.network, data[0], case.beta, width=case.width, depth=case.depth)
    members = [Member(one["seed"], case.lr) for one in members_of(case)]
    return classification(key, model, members, epochs, case.batch, data, at)


def measure_classifiers(case: Case, work: Work) -> Rows:
    """Accuracies at the end, and on an exclusive-or at half time."""
    run, rows, members = classifier_training(case, work.data).run(work), Rows(), members_of(case)
    add_accuracies(rows, run, members=members)
    if case.experiment == INTERACTIONS:
        half_time = run.scalars("test_as_trained")[1][-2]
        rows.add("accuracy", half_time, split="test", gates=AS_TRAINED, at="half time", members=members)
    return rows


def measure_forests(case: Case, work: Work) -> Rows:
    """Accuracies of random forests, which use no gradients and split along the axes only."""
    try:
        from sklearn.ensemble import RandomForestClassifier
    except ImportError:
        raise Unsupported(FOREST, "scikit-learn is not installed", "pip install scikit-learn.") from None
    rows, members = Rows(), members_of(case)
    trains, tests = (xor_datasets(case, split) for split in ("train", "test"))
    for number, (member, train, test) in enumerate(zip(members, trains, tests, strict=True)):
        work.progress(number, len(members))
        forest = RandomForestClassifier(case.trees, random_state=member["seed"], n_jobs=1)
        forest.fit(train.x.numpy(), train.y.argmax(-1).numpy())
        for split, data in (("train", train), ("test", test)):
            right = forest.predict(data.x.numpy()) == data.y.argmax(-1).numpy()
            rows.add("accuracy", right.mean(), split=split, gates=AS_TRAINED, at="end", **member)
    return rows


# --- what is claimed -----------------------------------------------------------------------------------------

JUDGED_ORDERS = (3, 4, 5)  # F2: what "several coordinates" means
LEARNED = 0.75  # F2: an accuracy half way from chance to perfect
JUDGED_PROBLEMS = (("signs", 4000), ("gaussian", 4000))  # F2: the other problem is only shown
MUCH_WORSE = 2.0  # F1: a failure of DLGNs leaves at least twice the loss of a ReLU net
LARGER_GAP = 0.05  # F3: a failure of DLGNs is a gap at least five points larger than that of a ReLU net

PAPER: Settings = SCALES["paper"]
SLOWEST, FASTEST = PAPER.frequency.frequencies[0], PAPER.frequency.frequencies[-1]
FEWEST_AND_MOST = {images: (sizes[0], sizes[-1]) for images, sizes in PAPER.small_data.sizes}  # fewest and most images
SOFT_DLGNS = ("dlgn", "pwc")  # with the soft gates of the paper; hard gates are a control
DLGNS = (*SOFT_DLGNS, "pwc-hard")
Declared = TypeVar("Declared", Part, Shown)


def declare_for_each(declare: Callable[[Where], Iterable[Declared]], wheres: Iterable[Where]) -> list[Declared]:
    """The parts or shown numbers that ``declare`` yields for each of these networks."""
    return [one for where in wheres for one in declare(where)]


def without_verdict(parts: Iterable[Part]) -> list[Shown]:
    """The numbers of these parts, shown and not judged."""
    return [Shown(part.says, part.of, part.by, part.unit) for part in parts]


def share_between(upper: Vector, lower: Vector, whole: Vector) -> Vector:
    """The difference of two numbers as a share of a third."""
    return (upper - lower) / whole


def ratio_of_gaps(train: Vector, test: Vector, other_train: Vector, other_test: Vector) -> Vector:
    """One gap between training and test accuracy over another."""
    return (train - test) / (other_train - other_test)


def gap_beyond(train: Vector, test: Vector, other_train: Vector, other_test: Vector) -> Vector:
    """One gap between training and test accuracy less another."""
    return (train - test) - (other_train - other_test)


def networks_on_circles(presets: Sequence[str], networks: Sequence[str]) -> list[Where]:
    """Networks of every width on the circles of some presets."""
    return combine_columns(FREQUENCY, preset=presets, width=PAPER.frequency.widths, network=networks)


def circle_label(where: Where) -> str:
    """The name of networks on circles in parts and shown numbers."""
    preset, network = where["preset"], where["network"]
    return f"{preset}, width {where['width']}, {ARMS[network].label}{beta_suffix(preset_beta(preset, network))}"


def losses_of_f1(where: Where) -> tuple[Quantity, Quantity]:
    """Losses at the end on the fastest and on the slowest target."""
    fast, slow = (Quantity("loss", "end", half_cycles=speed, **where) for speed in (FASTEST, SLOWEST))
    return fast, slow


def parts_of_f1(where: Where) -> Iterator[Part]:
    """One part: on the fastest target the loss is much larger than that of a ReLU net of the same width."""
    both = tuple(losses_of_f1({**where, "network": network})[0] for network in (where["network"], "relu"))
    words = f"{circle_label(where)}: loss at {FASTEST:g} half cycles over that of a ReLU net"
    yield Part(words, both, by=ratio, above=MUCH_WORSE, unit="times")


def shown_beside_f1(where: Where) -> Iterator[Shown]:
    """How fast a target is fitted, whether training was done, and what the cells allow."""
    name, network, at_high = circle_label(where), where["network"], f"{FASTEST:g} half cycles"
    fast: Where = {**where, "half_cycles": FASTEST}
    loss, floor, hard = (Quantity(one, "end", **fast) for one in ("loss", "cell_floor", "loss_hard_gates"))
    for speed, one in zip((FASTEST, SLOWEST), losses_of_f1(where), strict=True):
        yield Shown(f"{name}: loss at {speed:g} half cycles", one)
    words = f"{name}: fastest target it fits (loss below {FITTED:g})"
    yield Shown(words, Quantity("fastest_fitted", **where), unit="half cycles")
    halves = (Quantity("loss", "half time", **fast), loss)
    yield Shown(f"{name}: loss at half time / at the end, {at_high}", halves, by=ratio, unit="times")
    if network != "relu":
        yield Shown(f"{name}: least loss its hard cells allow, {at_high}", floor)
        yield Shown(f"{name}: loss with hard gates, {at_high}", hard)
    if network == "pwc-hard":  # its loss: too few cells, cells in the wrong place, experts that fall short
        words, ideal = f"{name}: share of the loss at {FASTEST:g} that", Quantity("ideal_floor", **fast)
        yield Shown(f"{words} no placing of its half-spaces can remove", (ideal, loss), by=ratio)
        yield Shown(f"{words} better placed half-spaces could remove", (floor, ideal, loss), by=share_between)
        yield Shown(f"{words} better experts on the same cells could remove", (loss, floor, loss), by=share_between)


def networks_on_xor(samples: Iterable[tuple[str, int]], networks: Sequence[str], orders: Sequence[int]) -> list[Where]:
    """Networks on the exclusive-or of several numbers of inputs."""
    shared = {"network": networks, "order": orders}
    return [where for law, n in samples for where in combine_columns(INTERACTIONS, law=[law], samples=[n], **shared)]


def xor_label(where: Where) -> str:
    """The name of networks on an exclusive-or in parts and shown numbers."""
    return f"{where['law']}, n = {where['samples']}, {NETWORKS[where['network']]}, exclusive-or of {where['order']}"


def accuracy_quantity(where: Where, split: str, gates: str = AS_TRAINED) -> Quantity:
    """The accuracy of networks at the end of training, as claims ask for it."""
    return Quantity("accuracy", "end", split=split, gates=gates, **where)


def parts_of_f2(where: Where) -> Iterator[Part]:
    """One part: the exclusive-or is not learned."""
    yield Part(f"{xor_label(where)}: test accuracy", accuracy_quantity(where, "test"), below=LEARNED)


def shown_beside_f2(where: Where) -> Iterator[Shown]:
    """How much better ReLU is where a DLGN is judged, test accuracies elsewhere, and accuracies with hard gates."""
    name, network, test = xor_label(where), where["network"], accuracy_quantity(where, "test")
    if network in DLGNS and (where["law"], where["samples"]) in JUDGED_PROBLEMS and where["order"] in JUDGED_ORDERS:
        relu = accuracy_quantity({**where, "network": "relu"}, "test")
        yield Shown(f"{name}: test accuracy of the ReLU net less its own", (relu, test), by=difference)
    else:
        yield from without_verdict(parts_of_f2(where))
    if network not in ("relu", FOREST):
        yield Shown(f"{name}: test accuracy with hard gates", accuracy_quantity(where, "test", HARD))


def networks_on_images(networks: Sequence[str]) -> list[Where]:
    """Networks of every width on every data set."""
    return combine_columns(SMALL_DATA, images=tuple(FEWEST_AND_MOST), width=PAPER.small_data.widths, network=networks)


def images_label(where: Where) -> str:
    """The name of networks on images in parts and shown numbers."""
    return f"{where['images']}, width {where['width']}, {NETWORKS[where['network']]}"


def train_and_test_accuracy(where: Where, samples: int) -> tuple[Quantity, Quantity]:
    """Training and test accuracy with this number of training images."""
    own = {**where, "samples": samples}
    return accuracy_quantity(own, "train"), accuracy_quantity(own, "test")


def parts_of_f3(where: Where) -> Iterator[Part]:
    """One part: with the fewest images the gap between training and test accuracy is larger than that of a ReLU net."""
    few = FEWEST_AND_MOST[where["images"]][0]
    both = (*train_and_test_accuracy(where, few), *train_and_test_accuracy({**where, "network": "relu"}, few))
    words = f"{images_label(where)}: training less test accuracy, less that of a ReLU net, n = {few}"
    yield Part(words, both, by=gap_beyond, above=LARGER_GAP)


def shown_beside_f3(where: Where) -> Iterator[Shown]:
    """The gap with the fewest images, how far it closes with many, how much larger than that of ReLU it then is; accuracies."""
    name, (few, many) = images_label(where), FEWEST_AND_MOST[where["images"]]
    gap, later = train_and_test_accuracy(where, few), train_and_test_accuracy(where, many)
    yield Shown(f"{name}: training less test accuracy, n = {few}", gap, by=difference)
    yield Shown(f"{name}: that gap at n = {many} over it at n = {few}", (*later, *gap), by=ratio_of_gaps, unit="times")
    if where["network"] != "relu":
        beside = (*later, *train_and_test_accuracy({**where, "network": "relu"}, many))
        yield Shown(f"{name}: its gap less that of the ReLU net, n = {many}", beside, by=gap_beyond)
    for samples, accuracies in ((few, gap), (many, later)):
        yield Shown(f"{name}: test accuracy, n = {samples}", accuracies[1])


CLAIMS = (
    Claim(
        "F1",
        says=(
            "At a fixed width a DLGN fails to fit the circle target once the frequency on its fast half is high, where a ReLU "
            "net of the same width does much better."
        ),
        where="published summary",
        paper="named as a failure; no number",
        figure="frequency",
        parts=declare_for_each(parts_of_f1, networks_on_circles(["author"], ["pwc"])),
        controls=declare_for_each(
            parts_of_f1,
            [*networks_on_circles(["author"], ["pwc-hard"]), *networks_on_circles(["pilot"], ["pwc", "pwc-hard"])],
        ),
        shows=declare_for_each(shown_beside_f1, networks_on_circles(PAPER.frequency.presets, PAPER.frequency.networks)),
    ),
    Claim(
        "F2",
        says=(
            "A DLGN fails on labels that depend on a strongly non-linear interaction of inputs, such as the "
            "exclusive-or of several coordinates."
        ),
        where="published summary",
        paper="named as a failure; no number",
        figure="interactions",
        parts=declare_for_each(parts_of_f2, networks_on_xor(JUDGED_PROBLEMS, SOFT_DLGNS, JUDGED_ORDERS)),
        controls=declare_for_each(parts_of_f2, networks_on_xor(JUDGED_PROBLEMS, ["pwc-hard"], JUDGED_ORDERS)),
        shows=declare_for_each(
            shown_beside_f2,
            networks_on_xor(
                PAPER.interactions.problems, (*PAPER.interactions.networks, FOREST), PAPER.interactions.orders
            ),
        ),
    ),
    Claim(
        "F3",
        says=(
            "A DLGN overfits small data sets: with few examples its gap between training and test accuracy is larger than that "
            "of a ReLU net of the same layout."
        ),
        where="published summary",
        paper="named as a failure; no number",
        figure="small_data",
        parts=declare_for_each(parts_of_f3, networks_on_images(["pwc", "dlgn"])),
        shows=declare_for_each(shown_beside_f3, networks_on_images(PAPER.small_data.networks)),
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------

COLOURS = {"dlgn": "sky", "pwc": "blue", "pwc-hard": "green", "quadratic": "orange", "relu": "black", FOREST: "red"}
DOTS: dict[str, Any] = {"marker": "o", "markersize": 3}


def draw_frequencies(results: Results) -> plots.Figure:
    """Loss at the end against the frequency of the circle's fast half, median and middle half of the seeds. Below the grey line
    a target counts as fitted. Dashed and dotted: the least loss of the trained cells, and of as many half-spaces placed at
    best.
    """
    settings: Frequency = results.settings.frequency
    speeds = settings.frequencies
    figure, axes = plots.grid(len(settings.presets), len(settings.widths), (3.4, 2.9), sharex=True, sharey=True)
    for axis, (preset, width) in zip(axes.flat, product(settings.presets, settings.widths), strict=True):
        for network in settings.networks:
            own = {"preset": preset, "width": width, "network": network}
            _draw_losses(axis, results.table.where(experiment=FREQUENCY, **own), network)
        axis.axhline(FITTED, color=plots.COLOURS["grey"], linewidth=0.7)
        axis.set(xscale="log", yscale="log", ylim=(1e-5, 1), title=f"{preset} preset, width {width}")
        axis.set_xticks(speeds, [f"{speed:g}" for speed in speeds], minor=False)
        axis.minorticks_off()
    for axis in axes[:, 0]:
        axis.set_ylabel("mean squared error at the end")
    for axis in axes[-1]:
        axis.set_xlabel("half cycles on the fast half")
    plots.shared_legend(figure, 3)
    return figure


def _draw_losses(axis: plots.Axes, table: Table, network: str) -> None:
    """The loss of a network against frequency; for hard gates also the least loss of its cells and of any half-spaces."""
    colour = COLOURS[network]
    plots.draw_band(axis, *table.series("loss", over="half_cycles", at="end"), ARMS[network].label, colour, **DOTS)
    if network == "pwc-hard":
        for floor, at, style, shade, width, label in (
            ("cell_floor", "end", "--", colour, 1.0, "least loss of its cells"),
            ("ideal_floor", "", ":", "red", 1.5, "the same, half-spaces placed at best"),
        ):
            speeds, values = table.series(floor, over="half_cycles", at=at)
            middle = np.median(values, axis=1)
            axis.plot(speeds, middle, style, color=plots.COLOURS[shade], linewidth=width, label=label)


def draw_interactions(results: Results) -> plots.Figure:
    """Test accuracy against the number of inputs that decide together, median and middle half of the seeds."""
    settings: Interactions = results.settings.interactions
    figure, axes = plots.grid(1, len(settings.problems), (3.4, 3.2), sharey=True)
    networks = [*settings.networks, FOREST]
    for axis, (law, samples) in zip(axes[0], settings.problems, strict=True):
        part = results.table.where(experiment=INTERACTIONS, law=law, samples=samples, split="test", gates=AS_TRAINED)
        for place, network in enumerate(networks):
            orders, values = part.series("accuracy", over="order", at="end", network=network)
            shifted = orders + 0.05 * (place - (len(networks) - 1) / 2)  # so that equal lines stay visible
            plots.draw_band(axis, shifted, values, NETWORKS[network], COLOURS[network], **DOTS)
        axis.axhline(0.5, color=plots.COLOURS["grey"], linewidth=0.7)
        inputs = {"signs": "inputs -1 or 1", "gaussian": "normal inputs"}[law]
        axis.set(title=f"{inputs}, {samples} samples", xlabel="inputs in the exclusive-or")
        axis.set(xticks=settings.orders, ylim=(0.45, 1.02))
    axes[0, 0].set_ylabel("test accuracy")
    plots.shared_legend(figure, 3)
    return figure


def draw_small_data(results: Results) -> plots.Figure:
    """Test accuracy, and training less test accuracy, against the number of training images."""
    settings: SmallData = results.settings.small_data
    sizes, columns = dict(settings.sizes), list(product(results.table.unique("images"), settings.widths))
    figure, axes = plots.grid(2, len(columns), (3.2, 2.4), sharey="row", sharex="col")
    for (upper, lower), (images, width) in zip(axes.T, columns, strict=True):
        part = results.table.where(images=images, width=width, gates=AS_TRAINED, at="end")
        for network in settings.networks:
            (n, train), (_, test) = (
                part.series("accuracy", over="samples", split=split, network=network) for split in ("train", "test")
            )
            for axis, values in ((upper, test), (lower, train - test)):
                plots.draw_band(axis, n, values, NETWORKS[network], COLOURS[network], **DOTS)
        upper.set_title(f"{images}, width {width}")
        lower.set(xscale="log", xlabel="training images")
        lower.set_xticks(sizes[images], [str(n) for n in sizes[images]])
        lower.minorticks_off()
    axes[0, 0].set_ylabel("test accuracy")
    axes[1, 0].set(ylabel="training less test accuracy", ylim=(0, None))
    plots.shared_legend(figure, len(settings.networks))
    return figure


STUDY = Study(
    name="failures",
    paper="half-space",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 5, "paper": 10},
    columns=("experiment", "preset", "law", "images", "samples", "network", "width", "draw"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(
        Figure("frequency", "How fast a target can be followed", draw_frequencies),
        Figure("interactions", "The exclusive-or of several inputs", draw_interactions),
        Figure("small_data", "Few images, large gap", draw_small_data),
    ),
)
