"""Claim F6, judged on a results table. Thresholds were fixed before the runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.claims.verdict import Part, Row, summary
from unlazy.studies.halfspace.circle.settings import ARMS, beta_words, own_beta
from unlazy.studies.halfspace.swap.measure import LEVELS, key
from unlazy.studies.halfspace.swap.settings import FROZEN, TRAINED
from unlazy.studies.results import judged_row, numbers

Table = Mapping[str, Any]
WHY = (
    "The loss follows and the paths do not. The new slow half is fitted within a few epochs, and most networks with "
    "trained gates come back to their old loss (the pilot's ReLU nets do not, and end up worse than from a fresh "
    "start). But the active paths go on favouring the half that was slow at first, in nearly every ReLU net and nearly "
    "every network with soft gates, while networks that see the swapped target from the start favour its slow half as "
    "clearly: the preference is made in the first epochs and then stays. Frozen gates come back to their own level in "
    "three to five of ten seeds, at the author's beta 4 in all of them; that level is far above what trained gates "
    "reach, so coming back to it is no feat."
)


def claims(table: Table) -> list[Row]:
    """The row of F6, from the measured table alone.

    Trained gates: more active paths on the new slow half at the end, and the loss back at its own level from before the
    swap within as many epochs as came before it. Frozen gates: the loss not back within that time; their paths cannot move.
    """
    settings = table["settings"]
    before, after = settings["before"], settings["after"]
    parts, controls = [], []
    for preset in settings["presets"]:
        for arm in settings["arms"]:
            name, values = stack_name(preset, arm), _values(table, preset, arm)
            back = values["epochs_recover"]
            if arm in TRAINED:
                words = f"{name}: log ratio of active paths, new slow half / new fast half, at the end"
                parts.append(Part(words, ">", 0, "log ratio", -values["allocation_end"]))
                words = f"{name}: until the loss is back at its level before the swap"
                parts.append(Part(words, "<", before + 1, "epochs", back, after))
            elif arm in FROZEN:
                words = f"{name}: until the loss is back at its level before the swap"
                parts.append(Part(words, ">", before, "epochs", back, after))
            controls += _controls(name, arm, values)
    return [judged_row(table, "F6", parts, why=WHY, controls=controls, figure="paths")]


def _controls(name: str, arm: str, values: Mapping[str, NDArray[np.float64]]) -> list[Row]:
    rows = {
        "level": ("loss before the swap", ""),
        "loss_end": ("loss at the end, swapped", ""),
        "loss_end_stay": ("loss at the end of the same continuation without the swap", ""),
        "loss_end_scratch": ("loss at the end, swapped target from the start", ""),
        "epochs_level_scratch": ("swapped target from the start, until that same level", "epochs"),
        "epochs_new_slow_half": (f"until the new slow half is below {LEVELS[0]:g}", "epochs"),
        "epochs_new_fast_half": (f"until the new fast half is below {LEVELS[0]:g}", "epochs"),
        **{f"epochs_swap_{level:g}": (f"until the loss is below {level:g}, swapped", "epochs") for level in LEVELS},
        **{
            f"epochs_scratch_{level:g}": (f"until the loss is below {level:g}, swapped target from the start", "epochs")
            for level in LEVELS
        },
    }
    if arm in TRAINED:
        rows |= {
            "epochs_paths_turn": ("until the new slow half has more active paths", "epochs"),
            "allocation_before": ("log ratio of active paths top/bottom before the swap", "log ratio"),
            "allocation_end_stay": ("the same at the end without the swap", "log ratio"),
            "allocation_end_scratch": ("the same at the end, swapped target from the start", "log ratio"),
        }
    return [summary(f"{name}: {words}", values[value], unit) for value, (words, unit) in rows.items()]


def stack_name(preset: str, arm: str) -> str:
    return f"{preset}, {ARMS[arm].label}{beta_words(own_beta(preset, arm))}"


def _values(table: Table, preset: str, arm: str) -> dict[str, NDArray[np.float64]]:
    """Per seed; a time that was not reached is infinite."""
    found = {name: numbers(value) for name, value in table["stacks"][key(preset, arm)]["values"].items()}
    return {
        name: np.where(np.isnan(value), np.inf, value) if name.startswith("epochs") else value
        for name, value in found.items()
    }
