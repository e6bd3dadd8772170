"""Do the samples that the first tangent kernel would fit soon get the active paths? (C29b).

C29 finds that the linearised network learns the slow half of the circle first, as the network does. If the fixed kernel
also decides *where* the network puts its paths, then what that kernel leaves unfitted predicts, sample by sample, where
active paths are gained: many where little is left. The flow of the first tangent kernel is stopped when its loss reaches
the network's plateau (0.27).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.kernels.flow import kernel_flow
from unlazy.kernels.overlap import hard_gates, path_count_from_gates
from unlazy.kernels.tangent import tangent_features
from unlazy.models.net import GatedNet
from unlazy.studies.halfspace.circle_checkpoints import (
    SMALL_STARTS,
    CircleNetworks,
    NetworkSettings,
    cases_for_every_network,
    plateau_epochs,
    preset_panels,
    stack_at,
)
from unlazy.studies.halfspace.circle_networks import ARMS, PRESETS, network_label
from unlazy.studies.halfspace.circle_networks import PLATEAU as PLATEAU_LOSS
from unlazy.studies.halfspace.spectral_bias import FLOW_TIMES, build_start
from unlazy.studies.ranks import rank_correlation
from unlazy.studies.study import Figure, Results, Study, Work
from unlazy.studies.table import Rows

Array = NDArray[np.float64]

# --- what varies ---------------------------------------------------------------------------------------------

PLATEAU, END = "plateau", "end"
MOMENTS = (PLATEAU, END)
WINDOW = 25  # samples over which a smoothed residual is averaged: a twentieth of the circle
DRAWN_STRIDE = 5  # every fifth sample is kept for the figure

SCALES = {
    # seconds: shows that the study runs; no claim is judged
    "smoke": NetworkSettings(epochs=4, width=4, depth=3, presets=("author",), arms=("pwc", "relu")),
    # two minutes on one core
    "desk": NetworkSettings(epochs=200, arms=SMALL_STARTS),
}


# --- how a case is measured ----------------------------------------------------------------------------------


def measure(case: CircleNetworks, work: Work) -> Rows:
    """Minus the rank correlation, over samples, of the kernel's residual and the gain in log active paths since the start.

    ``prediction`` by moment: over the whole circle, and the mean of that within each half (column ``over``). ``residual``: the
    size of the residual of each sample, or its root mean square over 25 neighbours (``smooth``). ``by_half``: the same with the
    half alone in place of the residual, that is, knowing only which half is slow. ``left``: the residual and ``gain`` of some
    samples, for the figure.
    """
    run, rows, data = case.train(work), Rows(), case.data()
    halves = [inside.numpy() for inside in data.groups.values()]
    left = np.stack([kernel_residual(case, member) for member in range(len(case.seeds))])
    kinds = {"plain": left, "smooth": smooth_around(left)}
    start = log_paths(stack_at(case, run, 0), data.x)
    epochs = {PLATEAU: plateau_epochs(case, run), END: np.full(len(case.seeds), float(case.epochs))}
    on_top = np.asarray(halves[0], dtype=np.float64)
    for moment, when in epochs.items():
        gain = log_paths(stack_at(case, run, when), data.x) - start
        gain[~np.isfinite(when)] = np.nan
        for kind, values in kinds.items():
            add = partial(rows.add, "prediction", at=moment, residual=kind, seed=case.seeds)
            add([prediction(one, paths) for one, paths in zip(values, gain, strict=True)], over="circle")
            within = [
                [prediction(one[half], paths[half]) for half in halves] for one, paths in zip(values, gain, strict=True)
            ]
            add(np.mean(within, axis=1), over="halves")
        rows.add("by_half", [prediction(-on_top, paths) for paths in gain], at=moment, seed=case.seeds)
        places = list(range(0, len(data), DRAWN_STRIDE))
        rows.add("gain", gain[:, places].T, at=moment, sample=places, seed=case.seeds)
    rows.add("left", left[:, places].T, sample=places, seed=case.seeds)
    return rows


def prediction(left: Array, gain: Array) -> float:
    """Minus the rank correlation: 1 where every sample with less residual gains more paths. NaN if the gain is unknown."""
    return float("nan") if np.isnan(gain).any() else -rank_correlation(left, gain)


def kernel_residual(nets: CircleNetworks, member: int) -> Array:
    """Size of the error of each sample when the flow of the first tangent kernel has its loss down to the plateau's."""
    data = nets.data().to(torch.float64)
    net = build_start(nets, nets.training().recipe.members[member]).double()
    rows = tangent_features(net, data.x)[:, 0]
    kernel = rows @ rows.T
    scaled = kernel * (len(data) / 2 / torch.linalg.eigvalsh(kernel)[-1])
    outputs = kernel_flow(scaled, data.y, net(data.x).detach(), FLOW_TIMES.tolist())
    errors = (outputs - data.y)[..., 0].abs()  # [times, n]
    reached = (errors.square().mean(1) <= PLATEAU_LOSS).nonzero()
    return np.asarray(errors[int(reached[0]) if len(reached) else -1].numpy())


def smooth_around(values: Array) -> Array:
    """Root mean square over ``WINDOW`` neighbours on the circle, along the last axis."""
    shifts = range(-(WINDOW // 2), WINDOW // 2 + 1)
    return np.sqrt(np.mean([np.roll(values, shift, axis=-1) ** 2 for shift in shifts], axis=0))


def log_paths(net: GatedNet, x: torch.Tensor) -> Array:
    """log(1 + active paths) of every sample, ``[seeds, n]``."""
    return np.asarray(path_count_from_gates(hard_gates(net, x)).log1p().numpy())


# --- what is claimed -----------------------------------------------------------------------------------------

CLEAR = {"circle": 0.5, "halves": 0.3}  # a rank correlation that counts as a prediction
WORDS = {"circle": "over the whole circle", "halves": "within each half"}


def predicted(preset: str, arm: str, moment: str, over: str, residual: str) -> Quantity:
    """The prediction of one network, as claims ask for it."""
    return Quantity("prediction", moment, preset=preset, arm=arm, over=over, residual=residual)


def parts(preset: str) -> Iterator[Part]:
    """For each arm with a small start: at the plateau and at the end, over the circle and within its halves."""
    for arm, moment, (over, words) in product(SMALL_STARTS, MOMENTS, WORDS.items()):
        name = (
            f"{network_label(preset, arm)}, at the {moment}: minus the rank correlation of residual and gain in paths"
        )
        yield Part(f"{name}, {words}", predicted(preset, arm, moment, over, "plain"), above=CLEAR[over])


def shown() -> Iterator[Shown]:
    """The same with smoothed residuals, and what the half alone predicts."""
    for preset, arm, moment in product(PRESETS, SMALL_STARTS, MOMENTS):
        name = f"{network_label(preset, arm)}, at the {moment}"
        for over, words in WORDS.items():
            yield Shown(f"{name}: smoothed residual, {words}", predicted(preset, arm, moment, over, "smooth"))
        yield Shown(f"{name}: the half alone", Quantity("by_half", moment, preset=preset, arm=arm))


CLAIMS = (
    Claim(
        "C29b",
        says=(
            "The residual under the first tangent kernel predicts which samples get the active paths: those that the fixed "
            "kernel would have fitted when its loss reaches the plateau."
        ),
        where="question that C29 leaves",
        paper="our question; no number",
        figure="residual_and_paths",
        parts=[*parts("author")],
        controls=[*parts("pilot")],
        shows=[*shown()],
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------


def draw_residuals(results: Results) -> plots.Figure:
    """Along the circle, median and middle half of the seeds: what the first tangent kernel leaves unfitted (red), and the gain in
    log active paths since the start, at the plateau (blue) and at the end (green). Left of the dotted line: the slow half.
    """
    titles = {arm: ARMS[arm].label for arm in results.settings.arms}
    figure, axes = preset_panels(results, titles, (2.8, 2.3), "share of the circle", "residual; gain in log paths")
    for (preset, arm), axis in axes.items():
        where = {"preset": preset, "arm": arm}
        samples, left = results.table.series("left", over="sample", **where)
        places = samples / (samples[-1] + DRAWN_STRIDE)
        plots.draw_band(axis, places, left, "residual of the first tangent kernel", "red")
        for moment, colour in ((PLATEAU, "blue"), (END, "green")):
            gain = results.table.series("gain", over="sample", at=moment, **where)[1]
            if np.isfinite(gain).any():
                plots.draw_band(axis, places, gain[:, np.isfinite(gain[0])], f"gain in log paths, {moment}", colour)
        axis.axvline(0.5, color=plots.COLOURS["grey"], linestyle=":", linewidth=0.8)
    plots.shared_legend(figure, 3)
    return figure


STUDY = Study(
    name="residual-paths",
    paper="half-space",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 20},
    columns=("preset", "arm"),
    cases=partial(cases_for_every_network, CircleNetworks),
    measure=measure,
    claims=CLAIMS,
    figures=(
        Figure("residual_and_paths", "Where the first kernel is early, and where paths are gained", draw_residuals),
    ),
)
