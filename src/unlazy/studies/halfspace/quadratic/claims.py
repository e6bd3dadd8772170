"""Claim F4, judged on a results table. The threshold is no difference at all; it was fixed before the runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.claims.verdict import Part, Row, summary
from unlazy.studies.halfspace.quadratic.measure import key
from unlazy.studies.halfspace.quadratic.settings import GATINGS, RULES, Pictures, gate_words
from unlazy.studies.results import judged_row, numbers

Table = Mapping[str, Any]
WHY = (
    "On the circle quadratic gates mostly reach a lower loss (by a factor of about one and a half in the median), "
    "except as trained hard gates on the pilot's target; on digits they gain about a point or less, and not in nine of "
    "ten seeds. On relabelled Fashion-MNIST they lose about four points in every seed: a square in 784 inputs is so "
    "dear that the net has 21 units a layer instead of 64, and it fits its training images less well too. The pilot's "
    "preset has no biases, but the offset that belongs to a quadratic gate is one."
)


def claims(table: Table) -> list[Row]:
    """The row of F4, from the measured table alone."""
    parts, controls = [], []
    for task, rule in pairs(table):
        linear, quadratic = (table["stacks"][key(task, rule, gating)] for gating in GATINGS)
        name = stack_name(table, task, rule)
        gained = gain(linear, quadratic)
        parts.append(Part(f"{name}: {gain_words(linear)}", ">", 0, gain_unit(linear), gained))
        controls += _controls(name, rule, linear, quadratic)
    return [judged_row(table, "F4", parts, why=WHY, controls=controls, figure="gain")]


def pairs(table: Table) -> list[tuple[str, str]]:
    """Every task and gate rule that was trained."""
    tasks = [*table["settings"]["circles"]["presets"], *(name for name, _ in table["settings"]["pictures"]["tasks"])]
    return [(task, rule) for task in tasks if task not in table["left_out"] for rule in RULES]


def stack_name(table: Table, task: str, rule: str) -> str:
    pictures = table["settings"]["pictures"]
    return f"{task}, {gate_words(task, rule, Pictures(**pictures | {'tasks': ()}))}"


def is_circle(stack: Mapping[str, Any]) -> bool:
    return "loss" in stack["values"]


def gain_words(stack: Mapping[str, Any]) -> str:
    if is_circle(stack):
        return "how far the end loss of quadratic gates lies below that of linear ones"
    return "test accuracy of quadratic gates less that of linear ones"


def gain_unit(stack: Mapping[str, Any]) -> str:
    return "decades" if is_circle(stack) else ""


def gain(linear: Mapping[str, Any], quadratic: Mapping[str, Any], hard: bool = False) -> NDArray[np.float64]:
    """What quadratic gates gain, seed by seed: decades of loss, or test accuracy; as trained, or with gates made hard."""
    if is_circle(linear):
        name = "loss_hard_gates" if hard else "loss"
        return np.log10(_get(linear, name) / _get(quadratic, name))
    name = "test_hard_gates" if hard else "test_as_trained"
    return _get(quadratic, name) - _get(linear, name)


def _controls(name: str, rule: str, linear: Mapping[str, Any], quadratic: Mapping[str, Any]) -> list[Row]:
    found = []
    if rule == "soft":
        made_hard = f"{name}: the same with gates made hard after training"
        found.append(summary(made_hard, gain(linear, quadratic, hard=True), gain_unit(linear)))
    words = (
        {
            "loss": "end loss",
            "cell_floor": "least loss its hard cells allow",
            "allocation": "log ratio of paths top/bottom",
        }
        if is_circle(linear)
        else {"test_as_trained": "test accuracy", "train_as_trained": "training accuracy"}
    )
    for gating, stack in zip(GATINGS, (linear, quadratic), strict=True):
        size = f"{gating}, width {stack['width']}, {stack['parameters']} parameters"
        found += [summary(f"{name}, {size}: {said}", _get(stack, value)) for value, said in words.items()]
        tangent = (
            "tangent kernel" if rule == "soft" else "tangent kernel of the experts"
        )  # hard gates have no derivative
        for kernel, said in (("overlap", "overlap kernel"), ("tangent", tangent)):
            moved = numbers(stack["dynamics"][f"{kernel}_distance"])[-1]
            found.append(summary(f"{name}, {size}: {said}, 1 - cosine to the start", moved))
            changed = numbers(stack["dynamics"][f"{kernel}_change"])[-1]
            found.append(summary(f"{name}, {size}: {said}, relative change from the start", changed))
    return found


def _get(stack: Mapping[str, Any], name: str) -> NDArray[np.float64]:
    return numbers(stack["values"][name])
