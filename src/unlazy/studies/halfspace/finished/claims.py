"""Claim C27, judged on a results table. The threshold was fixed before the runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.claims.verdict import Part, Row, summary
from unlazy.studies.halfspace.finished.settings import END, PLATEAU, is_large
from unlazy.studies.halfspace.moments import numbers
from unlazy.studies.results import judged_row

AS_GOOD = 2.0  # plateau gates "reach what the end's reach": with at most twice the loss
LEARNED = 0.01  # the paper's "learned": losses below it count as equal


def claims(results: Mapping[str, Any]) -> list[Row]:
    """The one row of this study, from the measured table alone."""
    parts, controls = [], []
    for entry in results["copies"].values():
        label, behind = entry["label"], loss_ratio(entry, PLATEAU)
        if entry["kind"] == "as trained" and not is_large(entry["arm"]) and results["scale"] != "smoke":
            what = "loss of fresh experts under plateau gates over that under the last gates"
            parts.append(Part(f"{label}: {what}", "<", AS_GOOD, "times", behind))
        else:
            controls.append(summary(f"{label}: plateau gates over last gates", behind, "times"))
        controls += _controls(entry)
    why = (
        "Gates are finished while the hard half is learned, not at the plateau: in the author's preset those copied there serve "
        "fresh experts only a little better than random ones, and tens of epochs pass until they serve as well as the last. With "
        "the steep gates of the pilot's preset they come nearer, and are finished soon after. The pilot's ReLU nets lean the "
        "claim's way for another reason: even their first gates serve as well as the last. So do, nearly, the first gates of "
        "most networks with a large start. Losses below 0.01 count as 0.01."
    )
    return [judged_row(results, "C27", parts, why=why, controls=controls, figure="copies")]


def loss_ratio(entry: Mapping[str, Any], moment: str, quantity: str = "retrained") -> NDArray[np.float64]:
    """Loss with the features of a moment over that with those of the end, both at least 0.01, seed by seed."""
    early, last = (np.maximum(numbers(entry, f"{quantity}_{name}"), LEARNED) for name in (moment, END))
    return early / last


def _controls(entry: Mapping[str, Any]) -> list[Row]:
    label = entry["label"]
    found = [summary(f"{label}: gates of the start over last gates", loss_ratio(entry, "0"), "times")]
    for name, kernel in (("overlap", "overlap"), ("tangent", "tangent")):
        ratio = loss_ratio(entry, PLATEAU, name)
        found.append(summary(f"{label}: regression with the {kernel} kernel, plateau over end", ratio, "times"))
    finished, plateau = numbers(entry, "time_finished"), numbers(entry, "time_plateau")
    found.append(summary(f"{label}: gates as good as the last ones from", finished, "epochs"))
    found.append(summary(f"{label}: plateau reached", plateau, "epochs"))
    for moment in (PLATEAU, END):
        slow = numbers(entry, f"epochs_to_learn_{moment}")
        slow = np.where(np.isinf(plateau) & (moment == PLATEAU), np.nan, slow)
        found.append(summary(f"{label}: fresh experts to 0.01, gates of the {moment}", slow, "epochs"))
        found.append(summary(f"{label}: fresh experts, gates of the {moment}", numbers(entry, f"retrained_{moment}")))
    return found
