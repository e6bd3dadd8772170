"""What moves the tangent kernel: the gates, the weights, or both? (C28).

The kernel of the value parameters is built with the gates of one moment and the weights of another. Its change since the start
is then split into a share of the gates and a share of the weights. Since gates and weights act together, there are three such
splits: the gates move first, the gates move last, or the mean of the two (symmetric), which is judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.claims.rule import interval
from unlazy.kernels.change_attribution import attribute_change, change_shares
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.net import GatedNet
from unlazy.studies.halfspace.circle_checkpoints import (
    SMALL_STARTS,
    STUDIED,
    CircleNetworks,
    NetworkSettings,
    cases_for_every_network,
    plateau_epochs,
    preset_panels,
    stack_at,
)
from unlazy.studies.halfspace.circle_networks import ARMS, PRESETS, network_label
from unlazy.studies.study import Figure, Results, Study, Work
from unlazy.studies.table import Rows

# --- what varies ---------------------------------------------------------------------------------------------

VALUE, UNBIASED, HARD, WHOLE = "value", "value without biases", "value with hard gates", "whole"  # kernels
PLATEAU, LATE_EPOCH, END = "plateau", 200, "end"  # moments
KERNEL_STRIDE = 5  # kernels are built on every fifth sample

SCALES = {  # the networks are those of the study features-finished, which shares their runs
    # seconds: shows that the study runs; no claim is judged
    "smoke": NetworkSettings(epochs=4, width=4, depth=3, presets=("author",), arms=("pwc", "relu")),
    # under a minute on two cores
    "desk": NetworkSettings(epochs=200, arms=("pwc", "relu", "pwc-large", "relu-large")),
    "paper": NetworkSettings(epochs=600),
}


def measured_moments(epochs: int) -> dict[str | int, str]:
    """The moments of a training in words: the plateau near 0.25, epoch 200 if training goes beyond it, and the end."""
    later: dict[str | int, str] = {LATE_EPOCH: f"epoch {LATE_EPOCH}"} if epochs > LATE_EPOCH else {}
    return {PLATEAU: "the plateau", **later, END: "the end"}


# --- how a case is measured ----------------------------------------------------------------------------------


def measure(case: CircleNetworks, work: Work) -> Rows:
    """Shares of gates and weights in the change since the start, by moment and kernel.

    The shares are those of :class:`unlazy.kernels.change_attribution.ChangeShares`. Column ``kernel``: the kernel of the value
    parameters with gates as trained; the same without bias parameters (a readout bias alone adds one to every entry); the same
    with hard gates; and the whole tangent kernel of a DLGN, split between the parameters of its gating network and its experts.
    """
    run, rows = case.train(work), Rows()
    x, start = case.data().x[::KERNEL_STRIDE].double(), stack_at(case, run, 0).double()
    epochs: dict[Any, Any] = {PLATEAU: plateau_epochs(case, run), LATE_EPOCH: LATE_EPOCH, END: case.epochs}
    for moment in measured_moments(case.epochs):
        later = stack_at(case, run, epochs[moment]).double()
        for kernel, found in _shares_by_kernel(start, later, x).items():
            reached = np.isfinite(epochs[moment])
            shares = {name: np.where(reached, value.numpy(), np.nan) for name, value in found.items()}
            rows.add_all(shares, seed=case.seeds, at=moment, kernel=kernel)
    return rows


def _shares_by_kernel(start: GatedNet, later: GatedNet, x: Tensor) -> dict[str, dict[str, Tensor]]:
    """Shares by kernel. Networks without biases have no ``UNBIASED``, ReLU networks no ``HARD`` and no ``WHOLE``."""
    found = {VALUE: dict(vars(attribute_change(start, later, x)))}
    if start.settings.value_bias:
        found[UNBIASED] = {"gates": attribute_change(start, later, x, biases=False).gates}
    if start.settings.gating == "linear":
        found[HARD] = {"gates": attribute_change(start, later, x, hard=True).gates}
        nets = (start, _combine(start, later), _combine(later, start), later)
        found[WHOLE] = {"gates": change_shares(*(tangent_kernel(net, x) for net in nets)).gates}
    return found


def _combine(values_of: GatedNet, gates_of: GatedNet) -> GatedNet:
    """A network with the experts of one network and the gates of another."""
    experts, gates = (values_of.value_layers, values_of.readout), (gates_of.quadratic, gates_of.member_beta)
    return GatedNet(values_of.settings, gates_of.gate_layers, *experts, *gates)


# --- what is claimed -----------------------------------------------------------------------------------------

MOST = 0.5  # "most of the change"
JUDGED_MOMENTS = (PLATEAU, END)
SHOWN_SHARES = (
    ("gates_alone", VALUE, "share of moving the gates alone"),
    ("weights_alone", VALUE, "share of moving the weights alone"),
    ("interaction", VALUE, "share that needs both"),
    ("change", VALUE, "relative change of the kernel"),
    ("gates", UNBIASED, "share of the gates, bias parameters left out"),
    ("gates", HARD, "share of the gates, hard gates"),
    ("gates", WHOLE, "share of the gating network in the whole tangent kernel's change"),
)


def share_quantity(quantity: str, moment: str | int, preset: str, arm: str, kernel: str = VALUE) -> Quantity:
    """A share in the change of a kernel, as claims ask for it."""
    return Quantity(quantity, moment, preset=preset, arm=arm, kernel=kernel)


def parts(preset: str) -> list[Part]:
    """Two parts for each arm with a small start: at the plateau and at the end."""
    found = []
    for arm, moment in product(SMALL_STARTS, JUDGED_MOMENTS):
        words = f"{network_label(preset, arm)}, at the {moment}: share of the gates in the kernel's change"
        found.append(Part(words, share_quantity("gates", moment, preset, arm), above=MOST))
    return found


def rest_of(share: NDArray[Any]) -> NDArray[Any]:
    """One less a share: the share of the gates when they move last, after the weights."""
    return np.asarray(1 - share)


def shown_beside_c28() -> Iterator[Shown]:
    """The share of the gates for large starts and at epoch 200, and the other shares at the judged moments."""
    for preset, arm in product(PRESETS, STUDIED):
        without = {UNBIASED} if not PRESETS[preset].biases else set()
        without |= {HARD, WHOLE} if ARMS[arm].gating == "own" else set()
        for moment, words in measured_moments(LATE_EPOCH + 1).items():
            name = f"{network_label(preset, arm)}, at {words}"
            if arm not in SMALL_STARTS or moment not in JUDGED_MOMENTS:
                yield Shown(f"{name}: share of the gates", share_quantity("gates", moment, preset, arm))
            for quantity, kernel, what in SHOWN_SHARES if moment in JUDGED_MOMENTS else ():
                if kernel not in without:
                    yield Shown(f"{name}: {what}", share_quantity(quantity, moment, preset, arm, kernel))
            if moment in JUDGED_MOMENTS:
                weights = share_quantity("weights_alone", moment, preset, arm)
                yield Shown(f"{name}: share of the gates when they move last", weights, by=rest_of)


CLAIMS = (
    Claim(
        "C28",
        says=(
            "Most of the change of the tangent kernel during training is due to the moving gates, that is to the "
            "moving regions of active paths, and not to the changing weights on the paths."
        ),
        where="hypothesis",
        paper="hypothesis; no number",
        figure="shares",
        parts=parts("author"),
        controls=parts("pilot"),
        shows=[*shown_beside_c28()],
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------

BARS = (
    ("gates_alone", "blue", "gates moved alone"),
    ("weights_alone", "orange", "weights moved alone"),
    ("interaction", "grey", "only when both move"),
)


def draw_shares(results: Results) -> plots.Figure:
    """Shares in the value kernel's change (means). Diamonds: the gates' share when what needs both is split evenly."""
    arms = results.settings.arms
    titles = {at: f"from the start to {words}" for at, words in measured_moments(results.settings.epochs).items()}
    size = (3.2, 0.9 + 0.28 * len(arms))
    figure, axes = preset_panels(results, titles, size, "share of the kernel's change")
    for (preset, moment), axis in axes.items():
        for place, arm in enumerate(arms):
            _draw_shares_of_arm(axis, place, results, share_quantity("gates", moment, preset, arm))
        axis.axvline(0.5, color=plots.COLOURS["black"], linestyle=":", linewidth=0.8)
        axis.set_yticks(range(len(arms)), [ARMS[arm].label for arm in arms])
        axis.set_ylim(len(arms) - 0.5, -0.5)
    plots.shared_legend(figure, 2)
    return figure


def _draw_shares_of_arm(axis: Any, place: int, results: Results, gates: Quantity) -> None:
    """The bar of one arm: positive shares to the right of zero, negative ones to the left. Means add up, medians do not."""
    symmetric = gates.select(results.table, results.seeds)
    if np.isnan(symmetric).all():
        return
    ends = {True: 0.0, False: 0.0}
    for name, colour, label in BARS:
        value = float(np.nanmean(Quantity(name, gates.at, **gates.where).select(results.table, results.seeds)))
        axis.barh(place, value, 0.6, left=ends[value >= 0], color=plots.COLOURS[colour], alpha=0.75, label=label)
        ends[value >= 0] += value
    (low, high), middle = interval(symmetric), float(np.nanmedian(symmetric))
    around = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
    style = {"fmt": "D", "markersize": 4, "color": plots.COLOURS["black"]}
    axis.errorbar(middle, place, xerr=around, label="gates, symmetric split (median, 95 %)", **style)


STUDY = Study(
    name="kernel-attribution",
    paper="half-space",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 10, "paper": 20},
    columns=("preset", "arm"),
    cases=partial(cases_for_every_network, CircleNetworks),
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("shares", "What moves the tangent kernel", draw_shares),),
)
