"""Claims F1, F2 and F3, judged on a results table. Thresholds were fixed before the runs of the desk and paper scales; those
of F2 and F3 after trial runs of two or three seeds, made to learn how long training takes, had been seen.

The statements name failures of DLGNs. Each is judged as it stands; ReLU nets (and a forest) under the same conditions are
controls and say whether a failure belongs to DLGNs in particular.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.claims.verdict import Part, Row, summary
from unlazy.studies.halfspace.circle.settings import ARMS, beta_words, own_beta
from unlazy.studies.halfspace.failures import frequency, xor
from unlazy.studies.halfspace.failures.settings import DLGN_KINDS, FOREST, KINDS
from unlazy.studies.results import judged_row, numbers

FITTED = 0.05  # F1: a tenth of the loss before training
STRONG = 3  # F2: "several" coordinates are at least this many
LEARNED = 0.75  # F2: half way from chance to perfect
LARGE_GAP = 0.1  # F3: ten points
CLOSED = 0.5  # F3: half of the gap at the smallest size
JUDGED_ARMS = ("pwc", "pwc-hard")

Table = Mapping[str, Any]


def claims(table: Table) -> list[Row]:
    """One row per claim, from the measured table alone."""
    return [_f1(table), _f2(table), _f3(table)]


# --- F1: frequency -------------------------------------------------------------------------------


def _f1(table: Table) -> Row:
    settings = table["settings"]["frequency"]
    low, high = settings["frequencies"][0], settings["frequencies"][-1]
    parts, controls = [], []
    for preset, width, arm in _circles(settings):
        name = circle_name(preset, width, arm)
        values = _values(table, preset, width, arm)
        if arm in JUDGED_ARMS:
            parts.append(Part(f"{name}: loss at {high:g} half cycles", ">", FITTED, "", values["loss"][-1]))
            parts.append(Part(f"{name}: loss at {low:g} half cycles", "<", FITTED, "", values["loss"][0]))
        else:
            controls.append(summary(f"{name}: loss at {high:g} half cycles", values["loss"][-1]))
            controls.append(summary(f"{name}: loss at {low:g} half cycles", values["loss"][0]))
        followed = reach(values["loss"], settings["frequencies"])
        controls.append(summary(f"{name}: fastest target it fits (loss below {FITTED:g})", followed, "half cycles"))
        slack = values["loss_half_time"][-1] / values["loss"][-1]
        controls.append(summary(f"{name}: loss at half time / at the end, {high:g} half cycles", slack, "times"))
        if arm != "relu":
            floor = values["cell_floor"][-1]
            controls.append(summary(f"{name}: least loss its hard cells allow, {high:g} half cycles", floor))
            hard = values["loss_hard_gates"][-1]
            controls.append(summary(f"{name}: loss with hard gates, {high:g} half cycles", hard))
        if arm == "pwc-hard":
            controls += _shares(table, preset, width, high)
    why = (
        "At 48 half cycles little or nothing of the fast half is learned, at any width. It is no failure of DLGNs in "
        "particular: ReLU nets of the same width follow no faster targets, and often only slower ones. Nor is it mainly "
        "a matter of capacity: as many half-spaces, placed at best, would leave at most an eighth of that loss (a third "
        "at width 8 without biases). The half-spaces stand in the wrong places and, in wide nets, the experts also fall "
        "short of what their cells allow. The loss fell by less than a fifth in the second half of training; much "
        "longer training was not tried."
    )
    return judged_row(table, "F1", parts, why=why, controls=controls, figure="frequency")


def reach(loss: NDArray[np.float64], frequencies: Sequence[float]) -> NDArray[np.float64]:
    """The highest frequency up to which every one is fitted, per seed of ``loss [frequency, seed]``; 0 if none is."""
    fitted = np.logical_and.accumulate(loss < FITTED, axis=0)
    steps = np.array([0.0, *frequencies])
    return steps[fitted.sum(0)]


def _shares(table: Table, preset: str, width: int, high: float) -> list[Row]:
    """What the end loss of trained hard gates is made of: too few cells, cells in the wrong place, experts that fall short."""
    stack = table["frequency"][frequency.key(preset, width, "pwc-hard")]
    loss, floor = (numbers(stack["values"][name])[-1] for name in ("loss", "cell_floor"))
    ideal = stack["ideal_floor"][-1]
    name = circle_name(preset, width, "pwc-hard")
    parts = {
        "no placing of its half-spaces can remove": ideal / loss,
        "better placed half-spaces could remove": (floor - ideal) / loss,
        "better experts on the same cells could remove": (loss - floor) / loss,
    }
    return [summary(f"{name}: share of the loss at {high:g} that {what}", share) for what, share in parts.items()]


def _circles(settings: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    return [(p, width, arm) for p in settings["presets"] for width in settings["widths"] for arm in settings["arms"]]


def circle_name(preset: str, width: int, arm: str) -> str:
    return f"{preset}, width {width}, {ARMS[arm].label}{beta_words(own_beta(preset, arm))}"


def _values(table: Table, preset: str, width: int, arm: str) -> dict[str, NDArray[np.float64]]:
    values = table["frequency"][frequency.key(preset, width, arm)]["values"]
    return {name: numbers(value) for name, value in values.items()}


# --- F2: interactions ----------------------------------------------------------------------------


def _f2(table: Table) -> Row:
    settings = table["settings"]["interactions"]
    most = max(n for _, n in settings["problems"])
    parts, controls = [], []
    for law, n in settings["problems"]:
        relu = numbers(table["xor"][xor.key(law, n, "relu")]["values"]["test_as_trained"])
        for kind in (*settings["kinds"], FOREST):
            values = table["xor"][xor.key(law, n, kind)]["values"]
            accuracy = numbers(values["test_as_trained"])
            for place, order in enumerate(settings["orders"]):
                name = f"{law}, n = {n}, {KINDS.get(kind, kind)}, exclusive-or of {order}"
                if kind in DLGN_KINDS and n == most and order >= STRONG:
                    parts.append(Part(f"{name}: test accuracy", "<", LEARNED, "", accuracy[place]))
                    less = relu[place] - accuracy[place]
                    controls.append(summary(f"{name}: test accuracy of the ReLU net less its own", less))
                else:
                    controls.append(summary(f"{name}: test accuracy", accuracy[place]))
                if "test_hard_gates" in values and kind != "relu":
                    hard = numbers(values["test_hard_gates"])[place]
                    controls.append(summary(f"{name}: test accuracy with hard gates", hard))
    why = (
        "With inputs of -1 and 1 and 4000 samples DLGNs learn the exclusive-or of up to five of twenty inputs, and so "
        "do ReLU nets; with 1000 samples DLGNs with constant experts learn that of four, ReLU nets mostly do not. With "
        "normal inputs DLGNs learn three, while four and five stay at chance, for ReLU nets, quadratic gates and the "
        "forest alike although the networks fit their training samples: where DLGNs fail, all the others fail too."
    )
    return judged_row(table, "F2", parts, why=why, controls=controls, figure="interactions")


# --- F3: small data ------------------------------------------------------------------------------


def _f3(table: Table) -> Row:
    settings = table["settings"]["small_data"]
    sizes = dict(settings["sizes"])
    parts, controls = [], []
    for images, stacks in table["small_data"].items():
        few, many = sizes[images][0], sizes[images][-1]
        for width in settings["widths"]:
            relu = gap(stacks[f"relu-{width}"])
            for kind in settings["kinds"]:
                found = gap(stacks[f"{kind}-{width}"])
                name = f"{images}, width {width}, {KINDS[kind]}"
                at_few = (f"{name}: training less test accuracy, n = {few}", found[0])
                kept = (f"{name}: that gap at n = {many} over it at n = {few}", found[-1] / found[0])
                if kind in DLGN_KINDS:
                    parts.append(Part(at_few[0], ">", LARGE_GAP, "", at_few[1]))
                    parts.append(Part(kept[0], "<", CLOSED, "times", kept[1]))
                    for place, n in ((0, few), (-1, many)):
                        more = found[place] - relu[place]
                        controls.append(summary(f"{name}: its gap less that of the ReLU net, n = {n}", more))
                else:
                    controls += [summary(*at_few), summary(*kept, "times")]
                test = numbers(stacks[f"{kind}-{width}"]["test_as_trained"])
                controls.append(summary(f"{name}: test accuracy, n = {few}", test[0]))
                controls.append(summary(f"{name}: test accuracy, n = {many}", test[-1]))
    why = (
        "True, and no failure of DLGNs in particular: ReLU nets of the same layout have the same gap to within a few "
        "points, at every size. On digits the training sets are fitted at every size, so the gap closes because test "
        "accuracy rises. With 5000 images of Fashion-MNIST the networks reach 0.91 to 0.96 on their training images in "
        "twenty epochs, which closes a part of it. The seeds are two starts on each of five draws."
    )
    return judged_row(table, "F3", parts, why=why, controls=controls, figure="small_data")


def gap(stack: Mapping[str, Any]) -> NDArray[np.float64]:
    """Training less test accuracy, as trained, ``[size, seed]``."""
    return numbers(stack["train_as_trained"]) - numbers(stack["test_as_trained"])
