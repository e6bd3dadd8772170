"""Quadratic against linear gates on CIFAR-10, with the same number of parameters, at a small size (F4b).

As the image tasks of the study ``quadratic``: dense networks with constant experts on standardised pixels. Every gate of every
layer has a square in 3072 inputs, so that the quadratic network is a quarter as wide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.claims.functions import difference
from unlazy.data.images import load_images
from unlazy.studies.halfspace.quadratic import GATINGS, NETWORK_BY_RULE, count_parameters, match_sizes
from unlazy.studies.study import Case, Figure, Results, Settings, Study, Work, make_cases
from unlazy.studies.table import Rows
from unlazy.studies.trainings import AS_TRAINED, Training, add_accuracies, classification, classifier, flat_dataset
from unlazy.training.ensemble import Member

# --- what varies ---------------------------------------------------------------------------------------------

SHARED: dict[str, Any] = {"rules": tuple(NETWORK_BY_RULE), "gatings": GATINGS, "depth": 3, "beta": 4.0, "lr": 1e-3}
SCALES: dict[str, dict[str, Any]] = {
    # seconds, on digits: shows that the study runs; no claim is judged
    "smoke": {"data": "digits", "images": 200, "tests": 100, "epochs": 2, "width": 12, "batch": 32},
    # three minutes on one core
    "desk": {"data": "cifar-10", "images": 4000, "tests": 2000, "epochs": 15, "width": 64, "batch": 32},
}


def cases(settings: Settings, seeds: Sequence[int]) -> list[Case]:
    """One case for every gate rule and gating, with all its seeds."""
    places = [{"rule": r, "gating": g, "seeds": tuple(seeds)} for r in settings.rules for g in settings.gatings]
    return make_cases(places, settings, without=("rules", "gatings"))


def training_of(case: Case, folder: Path | None) -> Training:
    """The stack of a case; accuracies are measured after every epoch."""
    data = [
        flat_dataset(load_images(case.data, split, folder).take(slice(count)), case.data)
        for split, count in (("train", case.images), ("test", case.tests))
    ]
    linear = classifier(NETWORK_BY_RULE[case.rule], data[0], case.beta, width=case.width, depth=case.depth)
    members = [Member(seed, case.lr) for seed in case.seeds]
    model, every_epoch = match_sizes(linear)[case.gating], range(case.epochs + 1)
    return classification(f"{case.rule}-{case.gating}", model, members, case.epochs, case.batch, data, every_epoch)


# --- how a case is measured ----------------------------------------------------------------------------------


def measure(case: Case, work: Work) -> Rows:
    """Width, parameters, and accuracies: of test images by epoch, of both splits at the end."""
    training = training_of(case, work.data)
    run, rows, spec = training.run(work), Rows(), training.recipe.model
    for name, size in (("width", spec.width), ("parameters", count_parameters(spec))):
        rows.add(name, [size] * len(case.seeds), seed=case.seeds)
    steps, right = run.scalars("test_as_trained")
    epochs = steps // training.recipe.steps_per_epoch(len(training.data))
    rows.add("accuracy", right, at=epochs, split="test", gates=AS_TRAINED, seed=case.seeds)
    add_accuracies(rows, run, seed=case.seeds)
    return rows


# --- what is claimed -----------------------------------------------------------------------------------------


def accuracy(rule: str, gating: str, split: str = "test") -> Quantity:
    """An accuracy at the end, as claims ask for it."""
    return Quantity("accuracy", "end", rule=rule, gating=gating, split=split, gates=AS_TRAINED)


def part(rule: str) -> Part:
    """Quadratic gates are more accurate on test images."""
    both = accuracy(rule, "quadratic"), accuracy(rule, "linear")
    return Part(f"{rule} gates: test accuracy of quadratic less that of linear gates", both, by=difference, above=0)


def shown() -> Iterator[Shown]:
    """Sizes and accuracies of both kinds of gates."""
    for rule in NETWORK_BY_RULE:
        for gating in GATINGS:
            name, where = f"{rule} gates, {gating}", {"rule": rule, "gating": gating}
            yield Shown(f"{name}: width", Quantity("width", **where))
            yield Shown(f"{name}: parameters", Quantity("parameters", **where))
            for split in ("test", "train"):
                yield Shown(f"{name}: {split} accuracy", accuracy(rule, gating, split))


CLAIMS = (
    Claim(
        "F4b",
        says="On CIFAR-10, with the same number of parameters, quadratic gates reach a higher test accuracy than linear gates.",
        where="published summary, experiment 3, on CIFAR-10",
        paper="comparison proposed; no number",
        figure="accuracy",
        parts=[part("soft")],
        controls=[part("hard")],
        shows=[*shown()],
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------


def draw_accuracy(results: Results) -> plots.Figure:
    """Test accuracy over epochs, median and middle half of the seeds."""
    figure, axes = plots.grid(1, len(results.settings.rules), (3.2, 2.6), sharey=True)
    for axis, rule in zip(axes[0], results.settings.rules, strict=True):
        for gating, colour in zip(GATINGS, ("blue", "orange"), strict=True):
            where = {"rule": rule, "gating": gating, "split": "test", "gates": AS_TRAINED}
            epochs, values = results.table.series("accuracy", **where)
            width = int(np.median(results.table.select("width", rule=rule, gating=gating)))
            plots.draw_band(axis, epochs, values, f"{gating} gates, width {width}", colour)
        axis.set(title=f"{rule} gates", xlabel="epoch")
        axis.legend(loc="lower right")
    axes[0, 0].set_ylabel("test accuracy")
    return figure


STUDY = Study(
    name="quadratic-cifar",
    paper="half-space",
    scales={scale: SHARED | sizes for scale, sizes in SCALES.items()},
    seeds={"smoke": 2, "desk": 5},
    columns=("rule", "gating"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("accuracy", "Quadratic and linear gates on CIFAR-10", draw_accuracy),),
)
