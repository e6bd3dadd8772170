"""Kernel attribution, end to end: gates of one moment with weights of another, the change of the kernel split between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unlazy.claims.verdict import Part, Row, summary
from unlazy.kernels.replay import ChangeShares, attribute_change, change_shares, gated_value_kernel
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.net import GatedNet
from unlazy.store import Run
from unlazy.studies.halfspace.attribution.figures import draw
from unlazy.studies.halfspace.moments import ARMS, Nets, Networks, numbers, plateau_epochs, stack_at, train_all
from unlazy.studies.registry import settings_of
from unlazy.studies.results import Progress, conclude, judged_row, plain, provenance_of, table_of

STUDY = "kernel-attribution"
MOST = 0.5  # "most of the change"
MOMENTS = {"plateau": "at the plateau", "200": "at epoch 200", "end": "at the end"}
JUDGED = ("plateau", "end")


@dataclass(frozen=True)
class Settings(Networks):
    """One scale of the study. The networks are those of the study of finished features, where both are run."""

    arms: tuple[str, ...] = ("pwc", "dlgn", "relu", "pwc-large", "dlgn-large", "relu-large")
    kernel_stride: int = 5

    def moments(self) -> list[str]:
        """The plateau near 0.25, epoch 200 where training goes beyond it, and the end."""
        return ["plateau", *(["200"] if self.epochs > 200 else []), "end"]


SCALES = {
    # seconds: shapes and plumbing only, no claim is judged from it
    "smoke": Settings(seeds=2, epochs=4, width=4, depth=3, presets=("author",), arms=("pwc", "relu"), kernel_stride=25),
    # under a minute on two cores
    "desk": Settings(seeds=10, epochs=200, arms=("pwc", "relu", "pwc-large", "relu-large")),
    "paper": Settings(seeds=20, epochs=600),
}


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Train what is missing under ``runs``, then write ``results/kernel-attribution/SCALE.json`` and its figures."""
    settings = settings_of(SCALES, scale, seeds)
    trained = train_all(settings.networks(), runs, scale, workers, progress)
    table = table_of(STUDY, scale, settings.to_dict(), provenance_of(trained.values())) | {"networks": {}}
    for number, nets in enumerate(settings.networks(), 1):
        table["networks"][nets.key] = measure(nets, trained[nets.key], settings)
        progress("measuring", number, len(trained))
    return conclude(table, claims, draw, results, progress)


# --- measuring -----------------------------------------------------------------------------------


def measure(nets: Nets, run: Run, settings: Settings) -> dict[str, Any]:
    """``{run, label, preset, arm, seeds, values}``; values by ``QUANTITY_MOMENT``, one per seed.

    Quantities: the fields of ``ChangeShares`` for the kernel of the value parameters, with gates as trained. The gates' share
    of the symmetric split again with hard gates (``hard_gates``), without the bias parameters (``unbiased_gates``: a readout
    bias alone adds one to every entry), and for the whole tangent kernel of a DLGN, split between the parameters of its gating
    network and of its experts (``whole_gates``). ``value_share``: the value parameters' part of the whole kernel's trace.
    """
    x = nets.data().x[:: settings.kernel_stride].double()
    plateau, start = plateau_epochs(nets, run), stack_at(nets, run, 0).double()
    values: dict[str, NDArray[np.float64]] = {}
    for moment in settings.moments():
        later = stack_at(nets, run, _epochs(moment, plateau, nets.epochs)).double()
        split = attribute_change(start, later, x)
        found = {field.name: getattr(split, field.name) for field in fields(ChangeShares)}
        if nets.spec().value_bias:
            found["unbiased_gates"] = attribute_change(start, later, x, biases=False).gates
        if nets.spec().gating == "linear":
            found |= {"hard_gates": attribute_change(start, later, x, hard=True).gates, **_whole(start, later, x)}
        seen = np.array([moment != "plateau" or epoch is not None for epoch in plateau])
        values |= {f"{name}_{moment}": np.where(seen, value.numpy(), np.nan) for name, value in found.items()}
    return {
        "run": run.id,
        "label": nets.label,
        "preset": nets.preset,
        "arm": nets.arm,
        "seeds": nets.seeds,
        "values": {name: plain(value) for name, value in values.items()},
    }


def _epochs(moment: str, plateau: Sequence[int | None], last: int) -> int | list[int]:
    """The epochs of a moment; a seed that never came down to the plateau is taken at the end, and not counted."""
    if moment == "plateau":
        return [last if epoch is None else epoch for epoch in plateau]
    return last if moment == "end" else int(moment)


def _whole(start: GatedNet, later: GatedNet, x: Tensor) -> dict[str, Tensor]:
    """The whole tangent kernel of a DLGN, split between gating network and experts by exchanging one of them."""
    nets = (start, _mixed(start, later), _mixed(later, start), later)
    kernels = [tangent_kernel(net, x) for net in nets]
    shares = change_shares(kernels[0], kernels[1], kernels[2], kernels[3])
    trace = kernels[3].diagonal(dim1=-2, dim2=-1).sum(-1)
    of_values = gated_value_kernel(later, [gate.detach() for gate in later.gates(x)], x)
    return {"whole_gates": shares.gates, "value_share": of_values.diagonal(dim1=-2, dim2=-1).sum(-1) / trace}


def _mixed(values_of: GatedNet, gates_of: GatedNet) -> GatedNet:
    """A network with the experts of one and the gating network of the other."""
    return GatedNet(
        values_of.settings,
        gates_of.gate_layers,
        values_of.value_layers,
        values_of.readout,
        gates_of.quadratic,
        gates_of.member_beta,
    )


# --- judging -------------------------------------------------------------------------------------


def claims(results: Mapping[str, Any]) -> list[Row]:
    """Claim C28, from the measured table alone."""
    parts: list[Part] = []
    controls: list[Row] = []
    for entry in results["networks"].values():
        for moment in MOMENTS:
            if f"gates_{moment}" not in entry["values"]:
                continue
            name, share = f"{entry['label']}, {MOMENTS[moment]}", numbers(entry, f"gates_{moment}")
            if ARMS[entry["arm"]].start == "torch" and moment in JUDGED and results["scale"] != "smoke":
                parts.append(Part(f"{name}: share of the gates in the kernel's change", ">", MOST, "", share))
            else:
                controls.append(summary(f"{name}: share of the gates", share))
            for quantity, words in CONTROLS.items():
                if moment in JUDGED and f"{quantity}_{moment}" in entry["values"]:
                    controls.append(summary(f"{name}: {words}", numbers(entry, f"{quantity}_{moment}")))
    why = (
        "Up to the plateau the gates account for a little more than half of the change in DLGNs, more without biases or with a "
        "large start; by the end the weights on the paths mostly account for as much or more (not in the author's DLGNs with a "
        "large start), and in ReLU nets with a small start they do throughout. With biases and a small start most of the change"
        " needs both: the first kernel is little more than the constant that a readout bias adds, and neither gates nor weights"
        " alone lift the rest above it."
    )
    return [judged_row(results, "C28", parts, why=why, controls=controls, figure="shares")]


CONTROLS = {
    "gates_alone": "share of moving the gates alone",
    "weights_alone": "share of moving the weights alone",
    "interaction": "share that needs both",
    "change": "relative change of the kernel",
    "unbiased_gates": "share of the gates, bias parameters left out",
    "hard_gates": "share of the gates, hard gates",
    "whole_gates": "share of the gating network in the whole tangent kernel's change",
}
