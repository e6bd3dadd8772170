"""Training the swap study in two parts, and the times at which loss and paths follow the target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy.probes import standard
from unlazy.probes.paths import allocation
from unlazy.scope.schedule import Fixed
from unlazy.scope.scope import Measure
from unlazy.store import Run
from unlazy.studies.halfspace.circle.settings import PRESETS
from unlazy.studies.halfspace.swap.settings import Settings, swapped
from unlazy.studies.results import plain
from unlazy.studies.trainings import Training, side_by_side, train_all
from unlazy.training.fit import Progress, Recipe

LEVEL_EPOCHS = 10  # the level before the swap is the median loss of so many epochs
LEVELS = (0.05, 0.01)  # a tenth of the loss before training, and the paper's "learned"
Array = NDArray[np.float64]


def key(preset: str, arm: str) -> str:
    return f"{preset}-{arm}"


def first_trainings(settings: Settings) -> list[Training]:
    """From the start: members on the target (they will be swapped), then members on the swapped target (control)."""
    found = []
    for preset in settings.presets:
        data = PRESETS[preset].circle.dataset()
        both = side_by_side([data] * settings.seeds + [swapped(data)] * settings.seeds)
        for arm in settings.arms:
            recipe = settings.recipe(preset, arm)
            found.append(
                Training(f"first-{key(preset, arm)}", recipe, both, _curves(settings.after, len(data), recipe))
            )
    return found


def second_trainings(settings: Settings, first: Mapping[str, Run]) -> list[Training]:
    """From epoch ``before`` of the first part, optimiser and all: swapped members, then members that stay (control)."""
    found = []
    for preset in settings.presets:
        data = PRESETS[preset].circle.dataset()
        both = side_by_side([swapped(data)] * settings.seeds + [data] * settings.seeds)
        for arm in settings.arms:
            recipe, run = settings.recipe(preset, arm), first[f"first-{key(preset, arm)}"]
            kept = run.checkpoint(settings.before * recipe.steps_per_epoch(len(data)))
            found.append(
                Training(
                    f"second-{key(preset, arm)}",
                    recipe,
                    both,
                    _curves(settings.after, len(data), recipe),
                    start=twice(kept, settings.seeds),
                    after=run.id,
                )
            )
    return found


def _curves(epochs: int, n: int, recipe: Recipe) -> tuple[Measure, ...]:
    unit = recipe.steps_per_epoch(n)
    return (Measure(standard.curves, Fixed.at(range(0, epochs * unit + 1, unit))),)


def twice(checkpoint: Mapping[str, NDArray[Any]], seeds: int) -> dict[str, NDArray[Any]]:
    """The first ``seeds`` members of a checkpoint, two times over; the count of updates is shared by all."""
    shared = {"optim/steps", "random/order"}
    doubled = {name: np.concatenate([a[:seeds]] * 2) for name, a in checkpoint.items() if name not in shared}
    return doubled | {"optim/steps": checkpoint["optim/steps"]}


def run(
    settings: Settings, folder: Path, scale: str, *, workers: int = 1, progress: Progress
) -> tuple[dict[str, Run], dict[str, Run]]:
    """Both parts, trained (or continued, or just opened)."""
    half = len(settings.presets) * len(settings.arms)
    options: dict[str, Any] = {"study": "swap", "scale": scale, "workers": workers}
    first = train_all(first_trainings(settings), folder, progress=lambda done, _: progress(done, 2 * half), **options)
    second = train_all(
        second_trainings(settings, first), folder, progress=lambda done, _: progress(half + done, 2 * half), **options
    )
    return first, second


def curves(settings: Settings, first: Run, second: Run, name: str) -> dict[str, Array]:
    """One scalar per epoch and seed, ``[epochs + 1, seeds]``: before the swap, after it, and both controls."""
    seeds = settings.seeds
    one, two = (run.scalars(name)[1] for run in (first, second))
    return {
        "before": one[: settings.before + 1, :seeds],
        "scratch": one[:, seeds:],
        "swap": two[:, :seeds],
        "stay": two[:, seeds:],
    }


def favour(settings: Settings, first: Run, second: Run) -> dict[str, Array]:
    """log of (active paths on the top half / on the bottom half); the swap makes the bottom half the slow one."""
    top, bottom = (curves(settings, first, second, f"paths_{half}") for half in ("top", "bottom"))
    return {name: allocation(torch.from_numpy(top[name]), torch.from_numpy(bottom[name])).numpy() for name in top}


def measure(settings: Settings, first: Run, second: Run) -> dict[str, Any]:
    """``values[name][seed]``; times in epochs after the swap (or after the start), ``None`` = not within ``after``."""
    loss, paths = curves(settings, first, second, "loss"), favour(settings, first, second)
    top, bottom = (curves(settings, first, second, f"loss_{half}")["swap"] for half in ("top", "bottom"))
    level = level_before(loss["before"])
    values = {
        "level": level,
        "loss_swap": loss["swap"][0],
        "loss_end": loss["swap"][-1],
        "loss_end_stay": loss["stay"][-1],
        "loss_end_scratch": loss["scratch"][-1],
        "epochs_recover": first_epoch(loss["swap"] <= level),
        "epochs_level_scratch": first_epoch(loss["scratch"] <= level),
        "epochs_new_slow_half": first_epoch(bottom < LEVELS[0]),
        "epochs_new_fast_half": first_epoch(top < LEVELS[0]),
        "allocation_before": paths["before"][-1],
        "allocation_end": paths["swap"][-1],
        "allocation_end_stay": paths["stay"][-1],
        "allocation_end_scratch": paths["scratch"][-1],
        "epochs_paths_turn": first_epoch(paths["swap"] < 0),
    }
    for reached in LEVELS:
        values[f"epochs_swap_{reached:g}"] = first_epoch(loss["swap"] < reached)
        values[f"epochs_scratch_{reached:g}"] = first_epoch(loss["scratch"] < reached)
    return {"runs": [first.id, second.id], "values": {name: plain(value) for name, value in values.items()}}


def level_before(loss: Array) -> Array:
    """The loss of each seed before the swap, ``loss [epochs + 1, seeds]``: it jumps too much to take one epoch's."""
    return np.asarray(np.median(loss[-LEVEL_EPOCHS:], axis=0))


def first_epoch(reached: NDArray[np.bool_]) -> Array:
    """The first row at which each column is true; infinity if never."""
    return np.where(reached.any(0), reached.argmax(0), np.inf).astype(np.float64)
