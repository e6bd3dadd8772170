"""Measured cells side by side: which networks may be compared, over which seeds, and whether their training is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import require

FULL_SIZE = 50_000
TRAINED = 90.0  # % of its training images that the ReLU network must fit; the paper's fits 96
STILL = 0.5  # points by which the last third of a training may raise an accuracy that stands still
SHAKEN = 1.5  # points by which accuracies of that third may differ
UNTRAINED = (0, 0.0)  # epochs and rate of a linear model
Array = NDArray[np.float64]
Cell = Mapping[str, Any]
Training = tuple[int, float]  # epochs and rate


@dataclass(frozen=True)
class Ended:
    """Accuracies ``[models, seeds]`` in percent once training is done, nan where it is not; in words how they were had."""

    values: Array
    how: str = ""


@dataclass(frozen=True)
class Table:
    """The cells of one table, with short ways to ask for numbers."""

    results: Mapping[str, Any]

    def judged(self) -> bool:
        """Whether these results have the size that the claims speak of."""
        settings = self.results["settings"]
        real = all(str(name).startswith("cifar") for name in settings["data"])
        return self.results["scale"] == "paper" and settings["images"] == FULL_SIZE and real

    # --- cells and trainings ---------------------------------------------------------------------

    def training_of(self, cell: Cell) -> Training:
        """Epochs and rate; cells that do not say their rate had that of the settings."""
        if cell["epochs"] == 0:
            return UNTRAINED
        return int(cell["epochs"]), float(cell.get("training", self.results["settings"])["lr"])

    def cells(self, data: str, layout: str, model: str, recipe: str = "main") -> dict[tuple[Training, int], Cell]:
        """Cells by training and seed."""
        wanted = {"data": data, "layout": layout, "model": model, "recipe": recipe}
        found: dict[tuple[Training, int], Cell] = {}
        for cell in self.results["cells"]:
            if all(cell[name] == value for name, value in wanted.items()):
                key = self.training_of(cell), cell["seed"]
                require(key not in found, f"two cells of {model} on {data}, {layout}, {recipe}, {key}.")
                found[key] = cell
        return found

    def of_training(self, training: Training) -> Table:
        """The networks that were trained like this, and linear models."""
        own = [cell for cell in self.results["cells"] if self.training_of(cell) in (training, UNTRAINED)]
        return Table({**self.results, "cells": own})

    def compared(self, models: Sequence[str], *, data: str, layout: str, recipe: str) -> list[list[Cell]]:
        """Per seed the cells of all models, at the longest training that all of them had and where they share seeds.

        Linear models are not trained by epochs and go with any.
        """
        found = [self.cells(data, layout, model, recipe) for model in models]
        trained = [set(cells) for cells in found if any(training != UNTRAINED for training, _ in cells)]
        shared = set.intersection(*(trained or map(set, found))) if all(found) else set()
        longest = max((training for training, _ in shared), default=UNTRAINED)
        columns = [
            [cells.get((training, seed), cells.get((UNTRAINED, seed))) for cells in found]
            for training, seed in sorted(shared)
            if training == longest
        ]
        return [[cell for cell in column if cell is not None] for column in columns if None not in column]

    # --- numbers ---------------------------------------------------------------------------------

    def together(
        self, models: Sequence[str], name: str, *, data: str = "cifar-10", layout: str = "conv", recipe: str = "main"
    ) -> Array:
        """``[models, seeds]``: a number of every compared cell. One column of nan where nothing is there."""
        cells = self.compared(models, data=data, layout=layout, recipe=recipe)
        columns = [
            [float(cell[name]) for cell in column]
            for column in cells
            if all(cell.get(name) is not None for cell in column)
        ]
        return np.array(columns).T if columns else np.full((len(models), 1), np.nan)

    def percent(self, models: Sequence[str], name: str = "test_as_trained", **place: str) -> Array:
        """The same for accuracies, in percent."""
        return 100 * self.together(models, name, **place)

    def length(
        self, models: Sequence[str], *, data: str = "cifar-10", layout: str = "conv", recipe: str = "main"
    ) -> str:
        """How many seeds and epochs stand behind a comparison of trained networks, in words, and the rate where it is unusual."""
        cells = self.compared(models, data=data, layout=layout, recipe=recipe)
        if not cells:
            return "not run"
        training = max(self.training_of(cell) for cell in cells[0])
        return run_in_words(len(cells), training, usual=float(self.results["settings"]["lr"]))

    # --- is training done? -----------------------------------------------------------------------

    def ended(self, models: Sequence[str], name: str = "test_as_trained") -> Ended:
        """An accuracy of Table 1's networks once training is done.

        It is done where the ReLU network, first of the models, fits its images, or where the accuracy stands still in all of
        them; else the cooled networks are taken, where it stands still in these.
        """
        constant = self.percent(models, name)
        cells = self.compared(models, data="cifar-10", layout="conv", recipe="main")
        if bool((self.percent(models, "train_as_trained")[0] >= TRAINED).all()):
            return Ended(constant)
        if _all_stand_still(cells, name):
            return Ended(constant)
        cooled = self.cooled(cells)
        if not _all_stand_still(cooled, name):
            return Ended(np.full_like(constant, np.nan))
        after = 100 * np.array([[net["after"][name] for net in column] for column in cooled]).T
        most = max(_rise_and_range(net, name)[0] for column in cooled for net in column)
        how = (
            f"Judged on the networks at a tenth of the rate, because before they do not stand still; in the last third of these "
            f"epochs none rose by more than {max(most, 0):.2f} points ({STILL:g} are allowed)."
        )
        return Ended(after, how)

    def cooled(self, cells: Sequence[Sequence[Cell]]) -> list[list[Cell]]:
        """What became of these cells after some epochs at a tenth of the rate; empty unless it is known of all of them."""
        networks = (self.results.get("cooled") or {}).get("networks", [])
        known = {(net["model"], (net["epochs_before"], net["rate_before"]), net["seed"]): net for net in networks}
        keys = [[(cell["model"], self.training_of(cell), cell["seed"]) for cell in column] for column in cells]
        if not all(key in known for column in keys for key in column):
            return []
        return [[known[key] for key in column] for column in keys]

    # --- linear models ---------------------------------------------------------------------------

    def best_ridge(self, model: str) -> bool:
        """Whether no linear model chose the least ridge on the list, so that a smaller one could have done better."""
        found = self.cells("cifar-10", "conv", model).values()
        return not any(cell.get("ridge_at_its_least", _least_solved(cell)) for cell in found)

    def least_solved(self, model: str) -> bool:
        """Whether a linear model chose the least ridge that can be solved in float64."""
        return any(_least_solved(cell) for cell in self.cells("cifar-10", "conv", model).values())


def run_in_words(seeds: int, training: Training, usual: float | None = None) -> str:
    """How often and how long networks were trained, and at which rate, unless that is the usual one."""
    epochs, rate = training
    said = f"{seeds} seed{'s' if seeds > 1 else ''}, {epochs} epochs"
    return said if rate == usual else f"{said}, rate {rate:g}"


def _all_stand_still(columns: Sequence[Sequence[Cell]], name: str) -> bool:
    return bool(columns) and all(_stands_still(cell, name) for column in columns for cell in column)


def _stands_still(cell: Cell, name: str) -> bool:
    """Whether the last third of a training raised its best accuracy by less than ``STILL`` points, and every look in it saw the
    same accuracy to about a point."""
    rise, spread = _rise_and_range(cell, name)
    return rise < STILL and spread < SHAKEN


def _rise_and_range(cell: Cell, name: str) -> tuple[float, float]:
    """Points by which the last third of a training raised its best accuracy, and by which its looks differ; inf if unknown."""
    turn = 2 / 3 * cell["epochs"]
    curve = cell.get("curve", ())
    if name == "train_as_trained":  # the last look is at all training images, those before at a few of them
        curve = [look | {name: look.get("probe_as_trained", look.get(name))} for look in curve]
    looks = [(look["epoch"], 100 * look[name]) for look in curve if look.get(name) is not None]
    before = [value for epoch, value in looks if epoch <= turn]
    after = [value for epoch, value in looks if epoch > turn]
    if not before or not after:
        return float("inf"), float("inf")
    return max(after) - max(before), max(after) - min(after)


def _least_solved(cell: Cell) -> bool:
    tried = [float(ridge) for ridge in cell.get("held_out_by_ridge", ())]
    return bool(tried) and float(cell["ridge"]) == min(tried)
