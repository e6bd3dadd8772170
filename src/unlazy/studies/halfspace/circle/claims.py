"""Claims C7 to C15 of the half-space paper, judged on a results table. Thresholds were fixed before the runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.claims.verdict import Part, Row, summary
from unlazy.studies.halfspace.circle.measure import select
from unlazy.studies.halfspace.circle.settings import ARMS, PRESETS, beta_words, own_beta
from unlazy.studies.results import judged_row

WITHIN_EPOCHS = 400  # C7: "about 200 epochs", read as: within twice that
SLOW_EPOCHS = 2000  # C8
LOSS_BAND = 0.05  # C9: 0.25 give or take
MOVED = 0.5  # C11: changed by half its own size
FEW_EPOCHS, MANY_EPOCHS = 10, 100  # C12
VISIBLE = 0.01  # C13: one hundredth of the target's amplitude
MOST = 0.5  # C14
CHANCE_30 = 30 / 180


@dataclass(frozen=True)
class Table:
    """The results of one scale, with short ways to ask for numbers."""

    results: Mapping[str, Any]

    @property
    def presets(self) -> list[str]:
        return list(self.results["settings"]["presets"])

    def has(self, preset: str, arm: str, name: str) -> bool:
        stack = self.results["stacks"].get(f"{preset}-{arm}")
        return stack is not None and name in stack["values"]

    def get(self, preset: str, arm: str, name: str, beta: float | None = None) -> NDArray[np.float64]:
        return select(self.results["stacks"][f"{preset}-{arm}"], name, beta)

    def horizon(self, preset: str, arm: str) -> int:
        return int(self.results["stacks"][f"{preset}-{arm}"]["epochs"])

    def betas(self, preset: str, arm: str) -> list[float | None]:
        members = self.results["stacks"][f"{preset}-{arm}"]["members"]
        return sorted({member["beta"] for member in members}, key=lambda beta: (beta is None, beta or 0))


def claims(results: Mapping[str, Any]) -> list[Row]:
    """One row per claim, from the measured table alone."""
    table = Table(results)
    judges = (_c7, _c8, _c9, _c10, _c11, _c12, _c13, _c14, _c15)
    return [judge(table) for judge in judges]


def _name(preset: str, arm: str, beta: float | None = None, what: str = "") -> str:
    return f"{preset}, {ARMS[arm].label}{beta_words(beta)}" + (f": {what}" if what else "")


def _judged(table: Table, arms: tuple[str, ...], name: str) -> Iterator[tuple[str, str, float | None]]:
    """Every preset and arm that has this quantity, with the slope it is judged at."""
    for preset in table.presets:
        for arm in arms:
            if table.has(preset, arm, name):
                yield preset, arm, own_beta(preset, arm)


def _parts(
    table: Table, arms: tuple[str, ...], name: str, side: str, threshold: float, unit: str, what: str = ""
) -> list[Part]:
    """The same test for every preset and arm at the preset's own slope."""
    found = []
    for preset, arm, beta in _judged(table, arms, name):
        values = table.get(preset, arm, name, beta)
        horizon = table.horizon(preset, arm) if name.startswith("epochs") else np.inf
        found.append(Part(_name(preset, arm, beta, what), side, threshold, unit, values, horizon))
    return found


def _controls(table: Table, arms: tuple[str, ...], name: str, unit: str, what: str) -> list[Row]:
    """Medians of a quantity for every preset, arm and slope, without verdict."""
    return [
        summary(_name(preset, arm, beta, what), table.get(preset, arm, name, beta), unit)
        for preset, arm, _ in _judged(table, arms, name)
        for beta in table.betas(preset, arm)
    ]


TRAINED = ("pwc", "relu")


def _c7(table: Table) -> Row:
    parts = _parts(table, TRAINED, "epochs_to_reach", "<", WITHIN_EPOCHS, "epochs", "to loss 0.01")
    arms = ("dlgn", "pwc", "pwc-large", "relu-large")
    controls = _controls(table, arms, "epochs_to_reach", "epochs", "to loss 0.01")
    controls += _controls(table, ("pwc-hard",), "loss_end", "", "loss at the end")
    controls += _controls(table, ("pwc", "dlgn"), "loss_hard_gates_end", "", "loss at the end, gates made hard")
    why = (
        "With soft gates the judged DLGNs get there in a third of the paper's 200 epochs, the steeper the gate the sooner; some "
        "ReLU nets stall on a plateau, and so do DLGNs with beta 4 on the pilot's harder target. Truly hard gates end near 0.01 "
        "or above: see the least loss their cells allow, and the loss of soft-trained nets when their gates are made hard."
    )
    return judged_row(table.results, "C7", parts, why=why, controls=controls, figure="fig02_loss")


def _c8(table: Table) -> Row:
    parts = _parts(table, ("pwc-frozen",), "epochs_to_reach", ">", SLOW_EPOCHS, "epochs", "to loss 0.01")
    for preset, arm, beta in _judged(table, ("pwc-frozen",), "epochs_to_reach"):
        frozen, trained = (table.get(preset, one, "epochs_to_reach", beta) for one in (arm, "pwc"))
        with np.errstate(invalid="ignore"):
            slower = frozen / trained  # never/never = nan: that pair says nothing
        name = _name(preset, arm, beta, "times slower than trained gates, same seed")
        parts.append(Part(name, ">", 10, "times", slower, table.horizon(preset, arm) / trained))
    controls = _controls(table, ("pwc-frozen",), "epochs_to_reach", "epochs", "to loss 0.01")
    controls += _controls(table, ("pwc-frozen", "pwc-frozen-hard"), "loss_end", "", "loss at the end")
    controls += _controls(table, ("pwc-frozen-hard",), "cell_floor_end", "", "least loss its cells allow")
    why = (
        "It holds for the smooth gate of the published code, and the gap shrinks with the slope: on the author's target frozen "
        "gates at beta 30 are slower than trained ones, but by less than ten times in most seeds; on the pilot's target they "
        "stay more than ten times slower. Frozen hard gates stop at the least loss that constants on their cells allow: a "
        "limit of capacity, not of speed."
    )
    return judged_row(table.results, "C8", parts, why=why, controls=controls, figure="fig02_loss")


def _c9(table: Table) -> Row:
    parts = _parts(table, TRAINED, "allocation_3", ">", 0, "log ratio", "paths top/bottom at epoch 3")
    parts += _parts(table, TRAINED, "allocation_plateau", ">", 0, "log ratio", "paths top/bottom at the 0.25 plateau")
    for preset, arm, beta in _judged(table, TRAINED, "loss_3"):
        gap = np.abs(table.get(preset, arm, "loss_3", beta) - 0.25)
        parts.append(Part(_name(preset, arm, beta, "distance of the epoch-3 loss from 0.25"), "<", LOSS_BAND, "", gap))
    controls = _controls(table, ("pwc", "relu"), "allocation_0", "log ratio", "before training")
    controls += _controls(table, ("pwc-equal",), "allocation_plateau", "log ratio", "equal halves, at the plateau")
    controls += _controls(table, ("pwc-equal",), "allocation_200", "log ratio", "equal halves, epoch 200")
    controls += _controls(table, ("pwc-large", "relu-large"), "allocation_plateau", "log ratio", "large start")
    controls += _controls(table, ("pwc-hard",), "allocation_plateau", "log ratio", "hard gates")
    why = (
        "At the plateau the easy half has about twice as many active paths or more, in the median, for DLGNs in every set-up "
        "with a small start; epoch 3 is that plateau only with the author's learning rate ('clearly' is not tested beyond a "
        "ratio above one). With a large start there is no preference. Equal halves: little or none where the network learns "
        "at all; at beta 4 it does not, so that control says nothing."
    )
    return judged_row(table.results, "C9", parts, why=why, controls=controls, figure="fig03_overlap")


def _c10(table: Table) -> Row:
    parts = []
    for preset, arm, beta in _judged(table, TRAINED, "overlap_cosine_3_200"):
        kept, start, whole = (
            table.get(preset, arm, f"overlap_cosine_{pair}", beta) for pair in ("3_200", "0_3", "0_200")
        )
        name = _name(preset, arm, beta, "cosine of epochs 3 and 200, less the larger cosine to the start")
        parts.append(Part(name, ">", 0, "", kept - np.maximum(start, whole)))
    parts += _parts(table, TRAINED, "allocation_200", ">", 0, "log ratio", "paths top/bottom at epoch 200")
    controls = _controls(table, TRAINED, "overlap_cosine_3_200", "", "cosine of epochs 3 and 200")
    controls += _controls(table, TRAINED, "overlap_cosine_0_200", "", "cosine of epochs 0 and 200")
    controls += _controls(table, TRAINED, "overlap_cosine_0_3", "", "cosine of epochs 0 and 3")
    why = (
        "For DLGNs the kernel of epoch 3 resembles that of epoch 200 more than the start in most seeds of both presets, and the "
        "preference for the easy half keeps its sign while it shrinks. ReLU nets: half of the author's seeds, and hardly any of "
        "the pilot's, which have barely begun to learn by epoch 3."
    )
    return judged_row(table.results, "C10", parts, why=why, controls=controls, figure="fig03_overlap")


def _c11(table: Table) -> Row:
    parts = _parts(table, TRAINED, "tangent_change_3", ">", MOVED, "", "relative change at epoch 3")
    parts += _parts(table, TRAINED, "tangent_change_200", ">", MOVED, "", "relative change at epoch 200")
    controls = _controls(table, TRAINED, "tangent_distance_3", "", "1 - cosine at epoch 3")
    controls += _controls(table, TRAINED, "tangent_distance_200", "", "1 - cosine at epoch 200")
    controls += _controls(table, ("pwc-frozen", "pwc-large", "relu-large"), "tangent_change_3", "", "change at epoch 3")
    for epoch in (0, 3, 10, 30, 100, 200):
        name = f"tangent_top_share_{epoch}"
        controls += _controls(table, TRAINED, name, "", f"trace share of the top half, epoch {epoch}")
    why = (
        "The tangent kernel moves by more than half its size within three epochs in DLGNs, and in most ReLU nets. In DLGNs its "
        "mass goes to the easy half and then to the hard half, while the preference of the paths shrinks but keeps its sign. It "
        "moves less with frozen gates, and as much with a large start, where the overlap kernel barely moves: moving paths "
        "alone do not explain it."
    )
    return judged_row(table.results, "C11", parts, why=why, controls=controls, figure="fig04_tangent")


def _c12(table: Table) -> Row:
    parts = _parts(table, TRAINED, "epochs_top", "<", FEW_EPOCHS + 1, "epochs", "top half to 0.05")
    parts += _parts(table, TRAINED, "epochs_bottom", ">", MANY_EPOCHS, "epochs", "bottom half to 0.05")
    controls = []
    for preset, arm, beta in _judged(table, (*TRAINED, "pwc-equal"), "epochs_top"):
        top, bottom = (table.get(preset, arm, f"epochs_{half}", beta) for half in ("top", "bottom"))
        with np.errstate(invalid="ignore"):
            controls.append(summary(_name(preset, arm, beta, "bottom / top, same seed"), bottom / top, "times"))
    controls += _controls(table, ("pwc", "dlgn", "pwc-large"), "epochs_bottom", "epochs", "bottom half to 0.05")
    why = (
        "The slow half is always fitted first, within a few epochs. Whether the fast half needs more than 100 depends on the "
        "slope, the start and the target. The order also holds with a large start and with frozen gates, so it is no evidence "
        "of feature learning by itself."
    )
    return judged_row(table.results, "C12", parts, why=why, controls=controls, figure="fig05_functions")


def _c13(table: Table) -> Row:
    parts = []
    for preset, arm, beta in _judged(table, ("pwc-frozen",), "artefact_rms_end"):
        frozen = table.get(preset, arm, "artefact_rms_end", beta)
        name = _name(preset, arm, beta, "fast residual on the top half at the end")
        parts.append(Part(name, ">", VISIBLE, "rms", frozen))
        if table.has(preset, "pwc", "artefact_rms_200"):
            ratio = frozen / table.get(preset, "pwc", "artefact_rms_200", beta)
            name = _name(preset, arm, beta, "the same over that of trained gates at epoch 200")
            parts.append(Part(name, ">", 1, "times", ratio))
    if table.results["settings"]["frozen_epochs"] < 8000:  # nothing is known yet: every seed counts as unseen
        parts = [replace(part, values=np.full_like(part.values, np.inf), horizon=0.0) for part in parts]
    controls = _controls(table, ("pwc-frozen", "pwc-frozen-hard"), "artefact_rms_end", "rms", "at the end")
    controls += _controls(table, ("pwc",), "artefact_rms_200", "rms", "epoch 200")
    why = (
        "Ripples of more than four half cycles remain on the easy half under frozen gates, more than under trained gates at "
        "epoch 200. A likely reason, not tested here: the same few gates must serve both halves."
    )
    return judged_row(table.results, "C13", parts, why=why, controls=controls, figure="fig05_functions")


def _c14(table: Table) -> Row:
    parts, controls = [], []
    for preset in table.presets:
        for arm in ("pwc", "pwc-large", "pwc-hard"):
            if not table.has(preset, arm, "near_top_30_200"):
                continue
            for beta in table.betas(preset, arm):
                shares = table.get(preset, arm, "near_top_30_200", beta)  # [seeds, layers]
                last = shares[:, -1]
                if arm == "pwc" and beta == PRESETS[preset].beta:
                    name = _name(preset, arm, beta, "share of last-layer normals within 30 degrees of the top")
                    parts.append(Part(name, ">", MOST, "", last))
                    change = last - table.get(preset, arm, "near_top_30_0", beta)[:, -1]
                    parts.append(Part(_name(preset, arm, beta, "its change from the start"), ">", 0, "", change))
                    name = _name(preset, arm, beta, "that share, less the first layer's")
                    parts.append(Part(name, ">", 0, "", last - shares[:, 0]))
                else:
                    controls.append(summary(_name(preset, arm, beta, "last layer, within 30 degrees"), last))
            beta = table.betas(preset, arm)[0] if arm != "pwc" else PRESETS[preset].beta
            for name, layer, what in (
                ("near_top_45_200", -1, "last layer, within 45 degrees (chance 0.25)"),
                ("like_top_half_200", -1, "last layer, open on about the top half"),
                ("near_top_30_200", 0, "first layer, within 30 degrees"),
            ):
                shares = table.get(preset, arm, name, beta)[:, layer]
                controls.append(summary(_name(preset, arm, beta, what), shares))
    why = (
        f"Chance is {CHANCE_30:.2f}. With smooth gates most last-layer half-spaces point to the top and nearly all of the others "
        "to the bottom; fewer point to the top at beta 30 and with hard gates, about chance with a large start. The first "
        "layer's share stays near chance. With biases many of them hold the whole circle: being the top half is rarer."
    )
    return judged_row(table.results, "C14", parts, why=why, controls=controls, figure="fig06_half_spaces")


def _c15(table: Table) -> Row:
    parts, controls = [], []
    for preset, arm, beta in _judged(table, ("pwc", "pwc-equal"), "axial_200"):
        start, trained = (table.get(preset, arm, f"axial_{epoch}", beta) for epoch in (0, 200))  # [seeds, layers]
        change = trained - start
        if arm == "pwc":
            name = _name(preset, arm, beta, "change of the last layer's axial resultant")
            parts.append(Part(name, ">", 0, "", change[:, -1]))
            name = _name(preset, arm, beta, "that change, less the first layer's")
            parts.append(Part(name, ">", 0, "", change[:, -1] - change[:, 0]))
            for layer in range(change.shape[1]):
                name = _name(preset, arm, beta, f"layer {layer + 1}")
                controls.append(summary(f"{name} before training", start[:, layer]))
                controls.append(summary(f"{name} at epoch 200", trained[:, layer]))
        else:
            controls.append(summary(_name(preset, arm, beta, "change of the last layer"), change[:, -1]))
    why = (
        "Judged as the change from the same network's start, because products of random matrices cluster with depth by "
        "themselves. Clear in the author's preset, unclear in the pilot's. With equal halves the last layer clusters too (at "
        "beta 4 without learning anything): clustering as such needs no easy half."
    )
    return judged_row(table.results, "C15", parts, why=why, controls=controls, figure="fig09_10_layers")
