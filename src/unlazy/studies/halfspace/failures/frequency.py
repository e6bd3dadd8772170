"""F1: how fast a target a DLGN can follow, and what stops it: too few cells, badly placed cells, or untrained experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unlazy.data.dataset import Dataset
from unlazy.data.synthetic import Circle
from unlazy.kernels.overlap import hard_gates
from unlazy.models.net import GatedNet
from unlazy.probes import standard
from unlazy.probes.paths import cell_floor, count_cells
from unlazy.scope.schedule import Fixed
from unlazy.scope.scope import Measure
from unlazy.store import Run
from unlazy.studies.halfspace.circle.settings import PRESETS, Stack
from unlazy.studies.halfspace.circle.settings import Settings as CircleSettings
from unlazy.studies.halfspace.failures.settings import Frequency
from unlazy.studies.results import plain
from unlazy.studies.trainings import Training, last, side_by_side


def trainings(settings: Frequency) -> list[Training]:
    """One stack per preset, width and arm: all frequencies and seeds train together on the same points."""
    return [
        _training(settings, preset, width, arm)
        for preset in settings.presets
        for width in settings.widths
        for arm in settings.arms
    ]


def key(preset: str, width: int, arm: str) -> str:
    return f"frequency-{preset}-{width}-{arm}"


def _training(settings: Frequency, preset: str, width: int, arm: str) -> Training:
    alone = Stack(
        preset,
        arm,
        CircleSettings(settings.seeds, settings.epochs, settings.epochs, width, settings.depth, all_betas=()),
    ).recipe()
    recipe = replace(alone, members=alone.members * len(settings.frequencies), batch=settings.batch)
    data = side_by_side([circle.dataset() for circle in circles(settings, preset) for _ in range(settings.seeds)])
    unit = recipe.steps_per_epoch(len(data))
    end = settings.epochs * unit
    measures = (
        Measure(standard.curves, Fixed.at({0, settings.epochs // 2 * unit, end})),
        Measure(own_floors, Fixed.at({0, end})),
    )
    return Training(key(preset, width, arm), recipe, data, measures)


def circles(settings: Frequency, preset: str) -> list[Circle]:
    """The preset's circle at every frequency of its bottom half."""
    return [replace(PRESETS[preset].circle, bottom=frequency) for frequency in settings.frequencies]


def own_floors(model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
    """Cells met and the least loss they allow, each member against its own targets (affine on cells for a ReLU net)."""
    x = None if model.settings.experts == "constant" else batch.x
    per_member = list(zip(*hard_gates(model, batch.x), strict=True))
    floors = [cell_floor(layers, y, x) for layers, y in zip(per_member, batch.y, strict=True)]
    found = torch.tensor([count_cells(layers) for layers in per_member], dtype=torch.float64)
    return {"cells": found, "cell_floor": torch.stack(floors)}


def measure(settings: Frequency, preset: str, width: int, arm: str, run: Run) -> dict[str, Any]:
    """``values[name][frequency][seed]``, and for constant experts ``ideal_floor[frequency]``."""
    values = {
        "loss": last(run, "loss"),
        "loss_bottom": last(run, "loss_bottom"),
        "loss_hard_gates": last(run, "loss_hard_gates"),
        "loss_half_time": run.scalars("loss")[1][-2],
        "cell_floor_start": run.scalars("cell_floor")[1][0],
        "cell_floor": last(run, "cell_floor"),
        "cells": last(run, "cells"),
    }
    shape = (len(settings.frequencies), settings.seeds)
    table: dict[str, Any] = {
        "run": run.id,
        "values": {name: plain(value.reshape(shape)) for name, value in values.items()},
    }
    if arm != "relu":
        table["ideal_floor"] = [
            ideal_floor(circle.dataset(), settings.depth * width, PRESETS[preset].biases)
            for circle in circles(settings, preset)
        ]
    return table


def ideal_floor(data: Dataset, units: int, biases: bool) -> float:
    """Least loss of constant experts if ``units`` half-spaces could be placed at will: no network can do better.

    Without biases every boundary passes through the middle and cuts each half once: at most ``units + 1`` pieces on either
    half, wherever the boundaries turn. With biases a boundary cuts the circle twice at most, anywhere.
    """
    y = data.y[:, 0].double().numpy()
    if biases:
        return float(f"{least_error(y, 2 * units + 1) / len(y):.5g}")
    halves = [y[data.groups[half].numpy()] for half in ("top", "bottom")]
    return float(f"{sum(least_error(half, units + 1) for half in halves) / len(y):.5g}")


def least_error(y: NDArray[np.float64], pieces: int) -> float:
    """Least sum of squared errors of any function with at most ``pieces`` constant pieces on points in this order.

    Dynamic programme over the place of the last cut: exact.
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
