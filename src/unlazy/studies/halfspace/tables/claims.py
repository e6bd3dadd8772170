"""Claims C20 to C25 and F5 of the half-space paper, judged on measured cells. Thresholds were fixed before the runs.

They count only at the paper's size: all of CIFAR. Networks are compared where they share data, layout, recipe, epochs and seed.
The paper's gated networks are soft, so these are judged; the same networks with hard gates, and those trained with hard gates,
are the controls. Accuracies are those after the last epoch. C20, C22 and C25 compare to about a point, so they are
told only where training is done: where the ReLU network of the same length fits its training images, or where the accuracy
that is compared stands still in every network of the comparison, neither rising nor shaking. A constant rate may never let it:
then the same networks are compared after a few epochs at a tenth of the rate, if it stands still there. C23 is told only where
the linear model is at its best: where a ridge smaller than the chosen one was tried. (These bars were set after runs had ended
below them: that against shaking, and the way around it, after 350 epochs at rate 1e-3 in which gated networks jumped by up to
four points between looks, and before any network had been cooled.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.claims.verdict import Part, Row, summary
from unlazy.studies.halfspace.tables.settings import MODELS
from unlazy.studies.results import judged_row

FULL_SIZE = 50_000
TRAINED = 90.0  # C20, C22, C25: % of its training images that the ReLU network must fit; the paper's fits 96
STILL = 0.5  # points by which the last third of a training may raise an accuracy that stands still
ABOUT_A_POINT = 1.5  # C20, C22, C25: "about one point", read as up to one and a half
FAR_BEHIND = 10.0  # C21, C23: points; the paper's deep linear network is 31 behind
FIVE_TO_SIX = (3.5, 7.5)  # C24: "about five to six points", read as one and a half more or less
GATED = ("relu", "dlgn", "pwc")
UNFITTED = (
    f"Not judged: the ReLU network does not fit {TRAINED:g} % of its training images, and what is compared does not stand still "
    f"in the last third of training (less than {STILL:g} points up, less than {ABOUT_A_POINT:g} between looks)."
)
LEAST_RIDGE = "Not judged: the linear model chose the smallest ridge on its list, and may do better with a smaller one."
FIGURE_OF = {"table1": "table1_accuracies", "table2": "table2_accuracies"}
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """The cells of one table, with short ways to ask for numbers."""

    results: Mapping[str, Any]

    def judged(self) -> bool:
        """Whether these results have the size that the claims speak of."""
        settings = self.results["settings"]
        real = all(str(name).startswith("cifar") for name in settings["data"])
        return self.results["scale"] == "paper" and settings["images"] == FULL_SIZE and real

    def cells(
        self, data: str, layout: str, model: str, recipe: str = "main"
    ) -> dict[tuple[int, int], Mapping[str, Any]]:
        """Cells by (epochs, seed)."""
        wanted = {"data": data, "layout": layout, "model": model, "recipe": recipe}
        return {
            (cell["epochs"], cell["seed"]): cell
            for cell in self.results["cells"]
            if all(cell[name] == value for name, value in wanted.items())
        }

    def of_length(self, epochs: int) -> Table:
        """The networks that were trained for so many epochs."""
        return Table({**self.results, "cells": [cell for cell in self.results["cells"] if cell["epochs"] == epochs]})

    def compared(self, models: Sequence[str], *, data: str, layout: str, recipe: str) -> list[list[Mapping[str, Any]]]:
        """Per seed the cells of all models, at the longest training that all of them had and where they share seeds.

        Linear models are not trained by epochs and go with any.
        """
        found = [self.cells(data, layout, model, recipe) for model in models]
        trained = [set(cells) for cells in found if any(epochs > 0 for epochs, _ in cells)]
        shared = set.intersection(*(trained or map(set, found))) if all(found) else set()
        longest = max((length for length, _ in shared), default=0)
        columns = [
            [cells.get((epochs, seed), cells.get((0, seed))) for cells in found]
            for epochs, seed in sorted(shared)
            if epochs == longest
        ]
        return [[cell for cell in column if cell is not None] for column in columns if None not in column]

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

    def length(self, models: Sequence[str], **place: str) -> str:
        """How many seeds and epochs stand behind a comparison of trained networks, in words."""
        epochs = self.together(models, "epochs", **place)
        if np.isnan(epochs).any():
            return "not run"
        return run_in_words(epochs.shape[1], epochs.max())

    def ended(self, models: Sequence[str], name: str = "test_as_trained") -> Array:
        """``[models, seeds]``: an accuracy of Table 1's networks in percent, once training is done; nan where it is not.

        It is done where the ReLU network, first of the models, fits its images, or where the accuracy stands still in all of
        them; else the cooled networks are taken, where it stands still in these.
        """
        constant = self.percent(models, name)
        cells = self.compared(models, data="cifar-10", layout="conv", recipe="main")
        fits = bool((self.percent(models, "train_as_trained")[0] >= TRAINED).all())
        if fits or _all_stand_still(cells, name):
            return constant
        cooled = self.cooled(cells)
        if _all_stand_still(cooled, name):
            return 100 * np.array([[net["after"][name] for net in column] for column in cooled]).T
        return np.full_like(constant, np.nan)

    def cooled(self, cells: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[Mapping[str, Any]]]:
        """What became of these cells after some epochs at a tenth of the rate; empty unless it is known of all of them."""
        networks = (self.results.get("cooled") or {}).get("networks", [])
        known = {(net["model"], net["epochs_before"], net["seed"]): net for net in networks}
        keys = [[(cell["model"], cell["epochs"], cell["seed"]) for cell in column] for column in cells]
        if not all(key in known for column in keys for key in column):
            return []
        return [[known[key] for key in column] for column in keys]

    def best_ridge(self, model: str) -> bool:
        """Whether no linear model chose the least ridge there was, so that a smaller one could have done better."""
        found = self.cells("cifar-10", "conv", model).values()
        return not any(cell.get("ridge_at_its_least", _least(cell)) for cell in found)

    def percent(self, models: Sequence[str], name: str = "test_as_trained", **place: str) -> Array:
        """The same for accuracies, in percent."""
        return 100 * self.together(models, name, **place)


def run_in_words(seeds: int, epochs: float) -> str:
    """How often and how long networks were trained."""
    return f"{seeds} seed{'s' if seeds > 1 else ''}, {int(epochs)} epochs"


def claims(results: Mapping[str, Any]) -> list[Row]:
    """One row per claim of this table, from the measured cells alone."""
    table = Table(results)
    judges = (_c20, _c21, _c22, _c23, _c25, _f5) if results["study"] == "table1" else (_c24,)
    return [judge(table) for judge in judges]


def _row(table: Table, claim: str, parts: list[Part], why: str, controls: list[Row], untold: str = "") -> Row:
    """``untold``: why the numbers cannot be judged, where they cannot."""
    judged, figure = parts if table.judged() else [], FIGURE_OF[table.results["study"]]
    return judged_row(
        table.results, claim, judged, why=why, controls=controls, figure=figure, untold=f"{untold} {why}".strip()
    )


def _all_stand_still(columns: Sequence[Sequence[Mapping[str, Any]]], name: str) -> bool:
    return bool(columns) and all(_stands_still(cell, name) for column in columns for cell in column)


def _stands_still(cell: Mapping[str, Any], name: str) -> bool:
    """Whether the last third of a training raised its best accuracy by less than ``STILL`` points, and every look in it saw the
    same accuracy to about a point."""
    turn = 2 / 3 * cell["epochs"]
    looks = [(look["epoch"], 100 * look[name]) for look in cell.get("curve", ()) if look.get(name) is not None]
    before = [value for epoch, value in looks if epoch <= turn]
    after = [value for epoch, value in looks if epoch > turn]
    if not before or not after:
        return False
    return max(after) - max(before) < STILL and max(after) - min(after) < ABOUT_A_POINT


def _least(cell: Mapping[str, Any]) -> bool:
    """The same from the list of ridges alone, for cells that do not say it."""
    tried = [float(ridge) for ridge in cell.get("held_out_by_ridge", ())]
    return bool(tried) and float(cell["ridge"]) == min(tried)


def _said(values: Array, digits: int = 1, unit: str = "") -> str:
    """The median as text."""
    known = values[np.isfinite(values)]
    return f"{np.median(known):.{digits}f}{unit}" if len(known) else "not measured"


def _accuracies(table: Table, models: Sequence[str], **place: str) -> list[Row]:
    """Train and test accuracy of models, as trained and with hard gates, each by itself."""
    rows = []
    where = ", ".join(place.values())
    for model in models:
        for name, said in (
            ("test_as_trained", "test as trained"),
            ("test_hard_gates", "test with hard gates"),
            ("train_as_trained", "train as trained"),
            ("best_test", "test at its best epoch"),
        ):
            values = table.percent([model], name, **place)[0]
            if np.isfinite(values).any():
                rows.append(summary(f"{MODELS[model]}{', ' + where if where else ''}: {said}", values, "%"))
    return rows


def _cooled(table: Table) -> tuple[str, list[Row]]:
    """What the networks become where their rate falls to a tenth at the end: in words, and as controls. A rate kept high shakes
    them, and after which epoch one looks decides about points."""
    networks = (table.results.get("cooled") or {}).get("networks", [])
    rows, said = [], []
    for model in GATED:
        own = [net for net in networks if net["model"] == model]
        if own:
            train, test = (
                np.array([100 * net["after"][name] for net in own]) for name in ("train_as_trained", "test_as_trained")
            )
            rows += [
                summary(f"{MODELS[model]}, then {own[0]['epochs']} epochs at a tenth of the rate: {name}", values, "%")
                for name, values in (("train as trained", train), ("test as trained", test))
            ]
            said.append(f"{MODELS[model]} {_said(test)} % (training {_said(train)} %)")
    words = f" After {networks[0]['epochs']} more epochs at a tenth of the rate: {', '.join(said)}." if said else ""
    return words, rows


def _c20(table: Table) -> Row:
    three, ended = table.percent(GATED), table.ended(GATED)
    parts = [
        Part("largest difference of the three in test accuracy", "<", ABOUT_A_POINT, "points", np.ptp(ended, axis=0))
    ]
    hard = table.percent(("dlgn", "pwc"), "test_hard_gates")
    why = (
        f"Test accuracy of ReLU, DLGN and DLGN-PWC: {', '.join(_said(row) for row in three)} %. With its gates made hard after "
        f"training the DLGN has {_said(hard[0])} % and the DLGN-PWC {_said(hard[1])} %. Run: {table.length(GATED)}; training "
        f"accuracy then {', '.join(_said(row) for row in table.percent(GATED, 'train_as_trained'))} % (the paper: 96, 85, 85 %)."
    )
    words, cooled = _cooled(table)
    controls = [*_accuracies(table, (*GATED, "dlgn-hard", "pwc-hard")), *cooled]
    return _row(table, "C20", parts, why + words, controls, UNFITTED)


def _far_above(table: Table, linear: str, words: str) -> list[Part]:
    """How far each of the three lies above a linear model in test accuracy."""
    pairs = {model: table.percent((model, linear)) for model in GATED}
    return [
        Part(f"{MODELS[model]} above {words} in test accuracy", ">", FAR_BEHIND, "points", own - other)
        for model, (own, other) in pairs.items()
    ]


def _c21(table: Table) -> Row:
    parts = _far_above(table, "dln", "deep linear")
    why = (
        f"Test accuracy of the deep linear network: {_said(table.percent(('dln',))[0])} %. Run: "
        f"{table.length((*GATED, 'dln'))}."
    )
    return _row(table, "C21", parts, why, _accuracies(table, ("dln",)))


def _c22(table: Table) -> Row:
    both = ("relu", "dlgn")
    relu, dlgn = table.percent(both, "train_as_trained")
    tests = table.percent(both)
    trains_ended, tests_ended = table.ended(both, "train_as_trained"), table.ended(both)
    parts = [
        Part("ReLU above DLGN in training accuracy", ">", 0, "points", trains_ended[0] - trains_ended[1]),
        Part(
            "difference of the two in test accuracy",
            "<",
            ABOUT_A_POINT,
            "points",
            np.abs(tests_ended[0] - tests_ended[1]),
        ),
    ]
    moving = [part.name for part in parts if np.isnan(part.values).all()]
    why = (
        f"Training accuracy: ReLU {_said(relu)} %, DLGN {_said(dlgn)} %; test accuracy {_said(tests[0])} and "
        f"{_said(tests[1])} %. Run: {table.length(both)}; the paper trained until the training accuracy stood still."
        f"{_cooled(table)[0]}"
    )
    if len(moving) == 1:
        why += f" Not judged, because it still rises or shakes: {moving[0]}."
    return _row(table, "C22", parts, why, _accuracies(table, ("relu", "dlgn", "pwc")), UNFITTED)


def _c23(table: Table) -> Row:
    parts = _far_above(table, "tangent", "the linear model")
    if not table.best_ridge("tangent"):
        parts = [replace(part, values=np.full_like(part.values, np.nan)) for part in parts]
    why = (
        f"Test accuracy of ridge least squares on the tangent features of the untrained ReLU network: "
        f"{_said(table.percent(('relu', 'tangent'))[1], unit=' %')}; with the trace kernel "
        f"{_said(table.percent(('relu', 'trace'))[1], unit=' %')}. The others: {table.length(GATED)}."
    )
    return _row(table, "C23", parts, why, _accuracies(table, ("tangent", "trace")), LEAST_RIDGE)


def _c25(table: Table) -> Row:
    _, linear, constant = table.percent(GATED)
    ended = table.ended(GATED)
    parts = [Part("difference in test accuracy", "<", ABOUT_A_POINT, "points", np.abs(ended[1] - ended[2]))]
    hard = table.percent(("dlgn-hard", "pwc-hard"))
    controls = [summary("difference, both trained with hard gates", np.abs(hard[0] - hard[1]), "points")]
    why = (
        f"Linear experts {_said(linear, unit=' %')}, constant experts {_said(constant, unit=' %')}; trained with hard gates "
        f"{_said(hard[0], unit=' %')} and {_said(hard[1], unit=' %')}. Run: {table.length(GATED)}.{_cooled(table)[0]}"
    )
    return _row(table, "C25", parts, why, controls, UNFITTED)


def _f5(table: Table) -> Row:
    place = {"recipe": "cost"}
    parts, controls = [], []
    measures = (
        ("seconds_per_epoch", "training time", False),
        ("peak_megabytes", "training memory", False),
        ("images_per_second", "inference time", True),
    )
    for name, said, inverse in measures:
        relu, dlgn = table.together(("relu", "dlgn"), name, **place)
        times = relu / dlgn if inverse else dlgn / relu
        parts.append(Part(f"DLGN over ReLU in {said}", ">", 1, "times", times))
        for model in ("pwc", "dlgn-hard", "relu-wide"):
            relu, other = table.together(("relu", model), name, **place)
            controls.append(
                summary(f"{MODELS[model]} over ReLU in {said}", relu / other if inverse else other / relu, "times")
            )
        controls.append(summary(f"ReLU: {name.replace('_', ' ')}", table.together(("relu",), name, **place)[0]))
    controls += [
        summary(f"{MODELS[model]}: parameters", table.together((model,), "parameters", **place)[0])
        for model in ("relu", "dlgn", "pwc", "relu-wide")
    ]
    ratios = ", ".join(f"{part.name.removeprefix('DLGN over ReLU in ')} {_said(part.values, 2)}" for part in parts)
    why = f"Times the ReLU network of the same layout: {ratios}. A ReLU network of equal parameter count is among the controls."
    return _row(table, "F5", parts, why, controls)


def _c24(table: Table) -> Row:
    parts, controls, said = [], [], []
    for data in ("cifar-10", "cifar-100"):
        for layout in ("resnet-34", "resnet-110"):
            place = {"data": data, "layout": layout}
            relu, dlgn = table.percent(("relu", "dlgn"), **place)
            name = f"ReLU above DLGN in test accuracy, {data}, {layout}"
            parts.append(Part(name, ">", FIVE_TO_SIX[0], "points", relu - dlgn))
            parts.append(Part(name, "<", FIVE_TO_SIX[1], "points", relu - dlgn))
            own, after = table.percent(("relu", "dlgn"), "test_hard_gates", **place)
            controls.append(
                summary(f"{data}, {layout}: ReLU above soft DLGN made hard after training", own - after, "points")
            )
            for model in ("dlgn-hard", "pwc-hard"):
                top, other = table.percent(("relu", model), **place)
                controls.append(summary(f"{data}, {layout}: ReLU above {MODELS[model]}", top - other, "points"))
            for recipe in ("main", "plain"):
                controls += _accuracies(table, ("relu", "dlgn", "dlgn-hard", "pwc-hard"), **place, recipe=recipe)
            own, trained_hard = table.percent(("relu", "dlgn-hard"), **place)
            compared = (
                (relu, f"DLGN {_said(dlgn)} % ({_said(after)} % with hard gates)", "dlgn"),
                (own, f"DLGN trained hard {_said(trained_hard)} %", "dlgn-hard"),
            )
            told = [
                f"ReLU {_said(twin)} %, {words} ({table.length(('relu', model), **place)})"
                for twin, words, model in compared
                if np.isfinite(twin).any()
            ]
            said.append(f"{data}, {layout}: {'; '.join(told) or 'not run'}")
    return _row(table, "C24", parts, ". ".join(said) + ".", controls)
