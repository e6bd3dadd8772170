"""Does a fixed kernel learn the easy half first as well? (C29).

Three learners start from the same parameters: the network; the network linearised at its start, trained with the same Adam on
the same batches; and gradient flow with the tangent kernel of the start. A half of the circle counts as fitted at loss 0.05.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from unlazy import plots, runtime
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.claims.functions import ratio
from unlazy.data.dataset import Dataset
from unlazy.kernels.flow import kernel_flow
from unlazy.kernels.tangent import tangent_features
from unlazy.models.build import build
from unlazy.models.net import GatedNet
from unlazy.runtime import short_hash
from unlazy.store import Run
from unlazy.studies.halfspace.circle_checkpoints import (
    SMALL_STARTS,
    CircleNetworks,
    NetworkSettings,
    cases_for_every_network,
    first_time,
    preset_panels,
    read_curve,
)
from unlazy.studies.halfspace.circle_networks import ARMS, HALF_FITTED, PRESETS, network_label
from unlazy.studies.study import Figure, Results, Study, Work
from unlazy.studies.table import Rows
from unlazy.studies.trainings import is_finished, open_run
from unlazy.training.ensemble import Member, MemberAdam, batch_order

Values = NDArray[np.float64]
Curves = Mapping[str, Values]

# --- what varies ---------------------------------------------------------------------------------------------

STUDIED = (*SMALL_STARTS, "pwc-large", "relu-large", "pwc-equal", "relu-equal")
LEARNERS = {
    "network": "network",
    "linearised": "linearisation trained with the same Adam",
    "flow": "first tangent kernel's flow",
}
LEVELS = tuple(float(level) for level in np.round(np.geomspace(0.5, 0.005, 25), 5))  # of the top half's loss
FLOW_TIMES = np.logspace(-2, 10, 241)  # one unit of time: the top eigenvector of the kernel decays by a factor e
# This linearisation needs hundreds of epochs for the top half alone: trained as long as its network, it decides nothing.
TIMES_LONGER = {("pilot", "relu"): 4}

SCALES = {
    # seconds: shows that the study runs; no claim is judged
    "smoke": NetworkSettings(epochs=4, width=4, depth=3, presets=("author",), arms=("pwc", "relu", "pwc-equal")),
    # under two minutes on two cores
    "desk": NetworkSettings(epochs=200, arms=("pwc", "relu", "pwc-equal")),
    "paper": NetworkSettings(epochs=600, arms=STUDIED),
}


@dataclass(frozen=True)
class NetworksAndLinearisations(CircleNetworks):
    """One case: a stack of networks and their linearisations, which are trained ``longer`` times as long."""

    longer: int = 1

    def linearised_recipe(self) -> dict[str, Any]:
        """Everything that decides the numbers of the linearisations, as plain values."""
        training = self.training()
        same = replace(training.recipe, epochs=self.epochs * self.longer)
        return {"linearised": same.to_dict(training.data, training.measures)}

    def linearised_folder(self, work: Work) -> Path:
        """The run folder of the linearisations."""
        return work.runs / f"{self.preset}-{self.arm}-linearised-{short_hash(self.linearised_recipe())}"


def cases(settings: NetworkSettings, seeds: Sequence[int]) -> list[NetworksAndLinearisations]:
    """One case for every arm under every preset."""
    found = cases_for_every_network(NetworksAndLinearisations, settings, seeds)
    return [replace(case, longer=TIMES_LONGER.get((case.preset, case.arm), 1)) for case in found]


# --- the learners with a fixed kernel ------------------------------------------------------------------------


def build_start(nets: CircleNetworks, member: Member) -> GatedNet:
    """One network before training."""
    spec = nets.spec()
    return build(spec if member.beta is None else spec.with_beta(member.beta), seed=member.seed)


def train_linearised(
    features: Float[Tensor, "n p"],
    start: Float[Tensor, " n"],
    data: Dataset,
    member: Member,
    epochs: int,
    batch: int,
) -> Float[Tensor, "times n"]:
    """Train the linearisation f = f_0 + features . change with the Adam and the batches of the network.

    Returns the outputs before training and after every epoch. Seeds are trained one by one, so that the features of a seed stay
    in the processor's cache.
    """
    change, mean, square = (torch.zeros_like(features[0]) for _ in range(3))
    decay, square_decay = MemberAdam.decay, MemberAdam.square_decay
    missing, outputs, step = data.y[:, 0] - start, [start], 0
    for epoch in range(epochs):
        for some in batch_order([member], epoch, len(data))[0].split(batch):
            rows, step = features[some], step + 1
            gradient = rows.T @ (rows @ change - missing[some]) * (2 / len(some))
            mean.lerp_(gradient, 1 - decay)
            square.mul_(square_decay).addcmul_(gradient, gradient, value=1 - square_decay)
            root = square.sqrt().div_((1 - square_decay**step) ** 0.5).add_(MemberAdam.epsilon)
            change.addcdiv_(mean, root, value=-member.lr / (1 - decay**step))
        outputs.append(start + features @ change)
    return torch.stack(outputs)


def losses_by_half(outputs: Float[Tensor, "*times n"], data: Dataset) -> Mapping[str, Float[Tensor, "*times"]]:
    """``loss``, ``loss_top`` and ``loss_bottom``: mean squared errors of outputs on all points and on each half."""
    error = (outputs - data.y[:, 0]).square()
    halves = {f"loss_{half}": error[..., inside].mean(-1) for half, inside in data.groups.items()}
    return {"loss": error.mean(-1)} | halves


def linearised_run(case: NetworksAndLinearisations, work: Work) -> Run:
    """Train the linearisation of every seed and write its losses to a run; a finished run is returned as it is."""
    folder, recipe, data, curves = case.linearised_folder(work), case.training().recipe, case.data(), list[Curves]()
    if is_finished(folder):
        return Run(folder)
    about = {"recipe": case.linearised_recipe(), "model": recipe.model.to_dict(), "data": data.describe()}
    on_cpu = replace(work, device="cpu")  # whatever the other trainings use
    with runtime.threads(recipe.threads), open_run(folder, on_cpu, recipe.members, **about) as writer:
        for done, member in enumerate(recipe.members):
            work.progress(done, len(recipe.members))
            net = build_start(case, member)
            features, start = tangent_features(net, data.x)[:, 0], net(data.x)[:, 0].detach()
            outputs = train_linearised(features, start, data, member, case.epochs * case.longer, case.batch)
            curves.append({name: loss.double().numpy() for name, loss in losses_by_half(outputs, data).items()})
        for epoch in range(case.epochs * case.longer + 1):
            losses = {name: np.array([curve[name][epoch] for curve in curves]) for name in curves[0]}
            writer.record(epoch * case.steps_per_epoch(), losses)
        writer.finish()
    return Run(folder)


def flow_curves(nets: CircleNetworks) -> Curves:
    """Losses ``[times, seeds]`` under gradient flow with the tangent kernel of the start, at ``FLOW_TIMES``."""
    data, losses = nets.data().to(torch.float64), list[Mapping[str, Tensor]]()
    for member in nets.training().recipe.members:
        net = build_start(nets, member).double()
        rows = tangent_features(net, data.x)[:, 0]
        kernel = rows @ rows.T
        scaled = kernel * (len(data) / 2 / torch.linalg.eigvalsh(kernel)[-1])
        outputs = kernel_flow(scaled, data.y, net(data.x).detach(), FLOW_TIMES.tolist())
        losses.append(losses_by_half(outputs[..., 0], data))
    return {name: torch.stack([one[name] for one in losses], dim=1).numpy() for name in losses[0]}


# --- how a case is measured ----------------------------------------------------------------------------------


def measure(case: NetworksAndLinearisations, work: Work) -> Rows:
    """How far the top half is ahead of the bottom half, for each learner.

    ``time``: when the loss of a half first falls below 0.05, in epochs (the flow has units of its own). ``time_watched``: how
    long the learner was trained. ``head_start``: how much of the bottom half is still to be learned when the top half is fitted.
    ``loss``: of each half at the end. ``bottom_loss``: the loss of the bottom half when that of the top half first reaches each
    of ``LEVELS``.
    """
    runs = {"network": case.train(work.stage(0, 2)), "linearised": linearised_run(case, work.stage(1, 2))}
    flow, halves, rows = flow_curves(case), ("loss_top", "loss_bottom"), Rows()
    learners: dict[str, tuple[NDArray[Any], ...]] = {
        learner: (read_curve(case, run, "loss")[0], *(run.scalars(name)[1] for name in halves))
        for learner, run in runs.items()
    }
    learners["flow"] = (FLOW_TIMES, *(flow[name] for name in halves))
    for learner, (times, top, bottom) in learners.items():
        where: dict[str, Any] = {"learner": learner, "seed": case.seeds}
        rows.add("time_watched", np.full(len(case.seeds), times[-1]), **where)
        for half, losses in (("top", top), ("bottom", bottom)):
            rows.add("time", first_time(times, losses < HALF_FITTED), half=half, **where)
            rows.add("loss", losses[-1], half=half, at="end", **where)
        rows.add("head_start", head_start(top, bottom), **where)
        left = np.stack([value_when_first(bottom, top <= level) for level in LEVELS])  # [levels, seeds]
        rows.add("bottom_loss", left, level=LEVELS, **where)
    return rows


def value_when_first(series: Values, reached: NDArray[np.bool_]) -> Values:
    """The value of each seed when its column of ``reached`` is first true; NaN if that never happens."""
    values = series[reached.argmax(0), np.arange(series.shape[1])]
    return np.where(reached.any(0), values, np.nan)


def head_start(top: Values, bottom: Values) -> Values:
    """How much of the bottom half is still to be learned when the top half is fitted (loss 0.05).

    (bottom - 0.05) / (bottom at the start - 0.05) at that moment: 1 if the bottom half is where it began, 0 if it is fitted, too.
    NaN if the top half is never fitted.
    """
    then = value_when_first(bottom, top < HALF_FITTED)
    return (then - HALF_FITTED) / (bottom[0] - HALF_FITTED)


# --- what is claimed -----------------------------------------------------------------------------------------

SMALLER_LEAD = 0.5  # "does not show the same lead", read as: shows less than half of it


def lead_share(
    top: NDArray[Any], bottom: NDArray[Any], own_top: NDArray[Any], own_bottom: NDArray[Any]
) -> NDArray[Any]:
    """The lead of a learner, log(time to fit the bottom half / the top half), as a share of the network's own lead.

    NaN if the learner never fits the top half, or if the network does not fit both halves: an infinite lead of the network would
    make every other lead small.
    """
    lead = np.log(bottom / np.where(np.isfinite(top), top, np.nan))
    own = np.log(own_bottom / np.where(np.isfinite(own_top), own_top, np.nan))
    return lead / np.where(np.isfinite(own), own, np.nan)


def bottom_time_over_top_time(bottom: NDArray[Any], top: NDArray[Any]) -> NDArray[Any]:
    """Time to fit the bottom half over time to fit the top half; NaN if the top half is never fitted."""
    return bottom / np.where(np.isfinite(top), top, np.nan)


def shares_of_lead(preset: str, arm: str, learner: str) -> list[dict[str, Any]]:
    """Fields of two parts or shown numbers: the head start and the lead of a learner, as shares of the network's own."""
    name = f"{network_label(preset, arm)}: {{}} of its {LEARNERS[learner]}, as a share of its own"
    where, own = ({"preset": preset, "arm": arm, "learner": who} for who in (learner, "network"))
    times = tuple(Quantity("time", half=half, **one) for one in (where, own) for half in ("top", "bottom"))
    starts = (Quantity("head_start", **where), Quantity("head_start", **own))
    words = "head start of the top half", "lead (log of time to fit bottom / top)"
    return [
        {"says": name.format(words[0]), "of": starts, "by": ratio},
        {"says": name.format(words[1]), "of": times, "by": lead_share, "unit": "times"},
    ]


def parts(preset: str) -> list[Part]:
    """Two parts for each arm with a small start: head start and lead of its linearisation.

    A bottom half that was not fitted within the training counts as fitted later than its end (``within``).
    """
    found = []
    for arm in SMALL_STARTS:
        start, lead = shares_of_lead(preset, arm, "linearised")
        top, _, *own = lead["of"]
        watched = Quantity("time_watched", preset=preset, arm=arm, learner="linearised")
        found.append(Part(**start, below=SMALLER_LEAD))
        found.append(Part(**lead, below=SMALLER_LEAD, within=(top, watched, *own)))
    return found


def shown_beside_c29() -> Iterator[Shown]:
    """Head start and lead of the flow for the judged arms, then the numbers of every network and learner."""
    for preset, arm in product(PRESETS, STUDIED):
        if arm in SMALL_STARTS:
            for one in shares_of_lead(preset, arm, "flow"):
                yield Shown(**one)
            words = f"{network_label(preset, arm)}: time to fit the top half, linearisation over network"
            who = ("linearised", "network")
            slow, own = (Quantity("time", half="top", preset=preset, arm=arm, learner=learner) for learner in who)
            yield Shown(words, (slow, own), by=ratio, unit="times")
        for learner, words in LEARNERS.items():
            name, where = f"{network_label(preset, arm)}, {words}", {"preset": preset, "arm": arm, "learner": learner}
            times = (Quantity("time", half="bottom", **where), Quantity("time", half="top", **where))
            yield Shown(f"{name}: head start of the top half", Quantity("head_start", **where))
            yield Shown(f"{name}: time to fit bottom / top", times, by=bottom_time_over_top_time, unit="times")
            yield Shown(f"{name}: bottom loss at the end", Quantity("loss", "end", half="bottom", **where))


CLAIMS = (
    Claim(
        "C29",
        says=(
            "That the slow half of the circle target is learned first is not just the spectral bias of a fixed "
            "kernel: the network linearised at initialisation does not show the same lead."
        ),
        where="text on the circle",
        paper="implied; no number",
        figure="lead",
        parts=parts("author"),
        controls=parts("pilot"),
        shows=[*shown_beside_c29()],
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------

LINE_STYLES: tuple[tuple[str, str, str, str], ...] = (
    ("network", "blue", "network", "-"),
    ("linearised", "red", "linearised at its start, same Adam", "--"),
    ("flow", "orange", "gradient flow of its first tangent kernel", ":"),
)


def arm_titles(arms: Sequence[str]) -> dict[str, str]:
    """Labels of arms, broken into lines."""
    return {arm: ARMS[arm].label.replace(": ", ":\n").replace(", ", ",\n", 1) for arm in arms}


def draw_lead(results: Results) -> plots.Figure:
    """Loss on the bottom half when the top half has come down to a loss; median and middle half of the seeds."""
    levels, titles = np.array(LEVELS), arm_titles(results.settings.arms)
    labels = ("loss on the top half, falling", "loss on the bottom half")
    figure, axes = preset_panels(results, titles, (2.3, 2.4), *labels)
    for (preset, arm), axis in axes.items():
        for learner, colour, label, stroke in LINE_STYLES:
            where: dict[str, Any] = {"preset": preset, "arm": arm, "learner": learner, "seeds": results.seeds}
            values = np.stack([results.table.select("bottom_loss", level=level, **where) for level in LEVELS])
            reached = np.isfinite(values).mean(1) >= 0.5  # a median of the few seeds that got there would mislead
            if reached.sum() > 1:
                plots.draw_band(axis, levels[reached], values[reached], label, colour, linestyle=stroke)
        if not axis.get_lines():
            axis.text(0.05, 0.35, "too few seeds learn\nanything here", ha="center", fontsize=8)
        axis.plot(levels, levels, color=plots.COLOURS["grey"], linewidth=0.7, label="no lead: both halves alike")
        axis.axvline(0.05, color=plots.COLOURS["grey"], linewidth=0.5, linestyle="-.")
        axis.set(xscale="log", xlim=(0.5, 0.005), ylim=(0, 0.65))
    for axis in axes.values():
        axis.set_xticks([0.5, 0.05, 0.005], ["0.5", "0.05", "0.005"])
        axis.minorticks_off()
    plots.shared_legend(figure, 2)
    return figure


def draw_halves(results: Results) -> plots.Figure:
    """Loss on each half over epochs, for the network and its linearisation; median and middle half of the seeds."""
    titles = arm_titles([arm for arm in results.settings.arms if not ARMS[arm].equal_halves])
    figure, axes = preset_panels(results, titles, (2.6, 2.4), "epoch", "mean squared error")
    for case in results.cases():
        if case.arm not in titles:
            continue
        axis = axes[case.preset, case.arm]
        folders = (case.folder(results.work), case.linearised_folder(results.work))
        for folder, who, colour in zip(folders, ("network", "linearised"), ("blue", "red"), strict=True):
            for half, stroke in (("top", "-"), ("bottom", "--")):
                epochs, values = read_curve(case, Run(folder), f"loss_{half}")
                plots.draw_band(axis, np.maximum(epochs, 0.5), values, f"{who}, {half} half", colour, linestyle=stroke)
        axis.axhline(0.05, color=plots.COLOURS["grey"], linewidth=0.5, linestyle="-.")
        axis.set(xscale="log", yscale="log", ylim=(5e-4, 1))
    plots.shared_legend(figure, 4 if len(titles) > 2 else 2)
    return figure


STUDY = Study(
    name="spectral-bias",
    paper="half-space",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 10, "paper": 20},
    columns=("preset", "arm"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(
        Figure("lead", "The lead of the easy half without a clock", draw_lead),
        Figure("halves", "Both halves over time", draw_halves, from_runs=True),
    ),
)
