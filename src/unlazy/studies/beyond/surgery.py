"""Training that knows its paths: do replaced gates, loss weights or gate rates rescue bad seeds? (X20-X23).

The half-space paper asks for a method that allocates paths better than gradient descent. On the circle with sin 2t on the top
half and sin 24t on the bottom half, many seeds of a DLGN never reach a loss of 0.01. All arms of a seed share start and batch
order, so that seeds are paired. Replaced gates are judged against no replacement, random aim, more steps, and as many gates from
the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.claims.functions import difference, more_seeds, paired_p_value
from unlazy.data.circle import Circle
from unlazy.kernels.overlap import path_count
from unlazy.models.gates import SoftGate
from unlazy.models.spec import NetSpec
from unlazy.probes.paths import allocation
from unlazy.studies.study import Figure, Results, Study, Work, require_at_least_one, require_known
from unlazy.studies.table import Rows
from unlazy.training.ensemble import Member, MemberAdam, batch_order, build_member_stack
from unlazy.training.path_optimiser import PathOptimiser, SurgerySchedule

# --- what varies ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way to train. ``longer`` and ``wider`` multiply the epochs and the width."""

    label: str
    surgery: bool = False
    aim: str = "residual"
    spare: str = "lesser"
    weight_power: float = 0.0
    gate_rate: float = 1.0
    longer: float = 1.0
    wider: float = 1.0


ARMS = {
    "none": Arm("plain Adam"),
    "surgery": Arm("surgery, aimed at the residual", surgery=True),
    "random": Arm("surgery, random aim", surgery=True, aim="random"),
    "both": Arm("surgery on both of a pair, aimed at the residual", surgery=True, spare="both"),
    "both-random": Arm("surgery on both of a pair, random aim", surgery=True, spare="both", aim="random"),
    "longer": Arm("half as many steps again", longer=1.5),
    "wider": Arm("width 24: all gates that surgery ever tries, from the start", wider=1.5),
    "weights": Arm("loss weights paths^-1/2", weight_power=0.5),
    "rate-3": Arm("gates learn 3 times as fast", gate_rate=3.0),
    "rate-third": Arm("gates learn a third as fast", gate_rate=1 / 3),
}


@dataclass(frozen=True)
class Settings:
    """One scale. ``every``: epochs from one surgery to the next, up to two thirds of the training."""

    epochs: int
    width: int = 16
    depth: int = 5
    n: int = 512
    bottom: float = 24.0
    every: int = 10
    arms: tuple[str, ...] = tuple(ARMS)

    def __post_init__(self) -> None:
        require_at_least_one(self, "epochs", "width", "depth", "every")
        require_known("arms", self.arms, ARMS)


@dataclass(frozen=True)
class Stack:
    """One case: all seeds of one arm."""

    arm: str
    seeds: tuple[int, ...]
    epochs: int
    width: int
    depth: int
    n: int
    bottom: float
    every: int


def cases(settings: Settings, seeds: Sequence[int]) -> list[Stack]:
    """Every arm, with its own number of epochs and width."""
    return [
        Stack(
            arm=name,
            seeds=tuple(seeds),
            epochs=round(settings.epochs * ARMS[name].longer),
            width=round(settings.width * ARMS[name].wider),
            depth=settings.depth,
            n=settings.n,
            bottom=settings.bottom,
            every=settings.every,
        )
        for name in settings.arms
    ]


SCALES = {
    "smoke": Settings(epochs=6, width=4, depth=2, n=64, every=2, arms=("none", "surgery", "weights")),
    # three minutes on one core
    "desk": Settings(epochs=300),
}

# --- how a case is measured ----------------------------------------------------------------------------------

RATE, BETA, BATCH, GATES = 1e-3, 30.0, 32, 2
LEARNED = 0.01  # as in the circle study
DECAY_FROM, DECAY = 0.7, 0.2  # the rate falls to a fifth after 70 % of the epochs
LAST_SURGERY = 2 / 3


def measure(case: Stack, work: Work) -> Rows:
    """Train all seeds. ``epochs_to_reach``: the first epoch with a loss below 0.01; ``reached``: 1 if there was one."""
    arm = ARMS[case.arm]
    data = Circle(n=case.n, top=2.0, bottom=case.bottom, offset=0.5).dataset()
    members = [Member(seed, RATE) for seed in case.seeds]
    biases = {"gate_bias": False, "value_bias": False}
    sizes = {"width": case.width, "depth": case.depth}
    spec = NetSpec(2, experts="constant", gate=SoftGate(BETA), **sizes, **biases)  # type: ignore[arg-type]
    net = build_member_stack(spec, members, torch.float32)
    adam, steps = MemberAdam(net, [RATE] * len(members)), -(-case.n // BATCH)
    schedule = SurgerySchedule(
        every=case.every * steps,
        last=int(LAST_SURGERY * case.epochs) * steps,
        gates=GATES,
        fade=steps,
        aim=arm.aim,
        spare=arm.spare,
    )
    optimiser = PathOptimiser(
        net,
        adam,
        data.x,
        data.y,
        surgery=schedule if arm.surgery else None,
        weight_power=arm.weight_power,
        gate_rate=arm.gate_rate,
        seeds=case.seeds,
    )
    first = np.full(len(members), np.inf)
    for epoch in range(case.epochs):
        if epoch == int(DECAY_FROM * case.epochs):
            adam.lr = adam.lr * DECAY
        for some in batch_order(members, epoch, case.n).split(BATCH, dim=1):
            x, y = data.x[some], data.y[some]
            errors = (net(x) - y).square().mean(-1)
            optimiser.step((optimiser.sample_weights(x) * errors).mean(-1))
        with torch.no_grad():
            loss = (net(data.x) - data.y).square().mean((-2, -1)).double().numpy()
        first = np.where((loss < LEARNED) & np.isinf(first), epoch + 1, first)
        work.progress(epoch + 1, case.epochs)
    rows, seed = Rows(), list(case.seeds)
    with torch.no_grad():
        hard = (net.hard()(data.x) - data.y).square().mean((-2, -1)).double().numpy()
        paths = path_count(net, data.x)
        on_top, below = (paths[:, inside].mean(-1) for inside in data.groups.values())
    replaced = [sum(o.what == "replaced" and o.unit.member == m for o in optimiser.log) for m in range(len(members))]
    rows.add_all(
        {
            "reached": np.isfinite(first).astype(float),
            "epochs_to_reach": first,
            "loss": loss,
            "loss_hard_gates": hard,
            "allocation": allocation(on_top, below).numpy(),
            "replaced": np.array(replaced, dtype=float),
            "parameters": np.full(len(members), sum(p[0].numel() for p in net.parameters()), dtype=float),
        },
        seed=seed,
    )
    moved = max((one.moved for one in optimiser.log), default=0.0)
    rows.add("moved", [moved] * len(members), seed=seed)
    return rows


# --- what is claimed -----------------------------------------------------------------------------------------

SURE, LIKELY = 0.01, 0.05  # p of the one-sided exact McNemar test over 60 paired seeds


def pair(arm: str, other: str) -> tuple[Quantity, Quantity]:
    """Whether the seeds of two arms reached the target."""
    return Quantity("reached", arm=arm), Quantity("reached", arm=other)


def better(arm: str, other: str, below: float = LIKELY) -> Part:
    """More seeds reach the target in the first arm than in the second."""
    words = f"{ARMS[arm].label}, against {ARMS[other].label}: p that seeds reach loss 0.01 as often"
    return Part(words, pair(arm, other), paired_p_value, below=below)


def shown_arms(*arms: str) -> list[Shown]:
    """The end loss of each arm, and how many more of the seeds than plain Adam reached the target."""
    found = []
    for arm in arms:
        found.append(Shown(f"{ARMS[arm].label}: loss at the end", Quantity("loss", arm=arm)))
        found.append(Shown(f"{ARMS[arm].label}: the same, gates made hard", Quantity("loss_hard_gates", arm=arm)))
        if arm != "none":
            words = f"{ARMS[arm].label}: seeds that reach the target beyond plain Adam's"
            found.append(Shown(words, pair(arm, "none"), more_seeds, unit="seeds"))
            losses = Quantity("loss", arm="none"), Quantity("loss", arm=arm)
            found.append(Shown(f"{ARMS[arm].label}: plain Adam's loss minus its own, same seed", losses, difference))
    return found


ABOUT: dict[str, Any] = {"where": "named future work", "paper": "our question; no number", "figure": "arms"}
CLAIMS = (
    Claim(
        "X20",
        says=(
            "Replacing gates that are like another gate by gates aimed at the residual, without changing the function, makes "
            "more seeds learn the circle with sin 24t, and more steps or more gates from the start do not do the same."
        ),
        parts=[
            Part(
                "seeds of 60 that reach loss 0.01 with surgery, beyond those without",
                pair("surgery", "none"),
                more_seeds,
                above=5,
                unit="seeds",
            ),
            better("surgery", "none", SURE),
        ],
        controls=[better("surgery", "longer"), better("surgery", "wider"), better("both", "none", SURE)],
        shows=shown_arms("none", "surgery", "both", "longer", "wider"),
        **ABOUT,
    ),
    Claim(
        "X21",
        says="The aim at the residual matters: with the same surgery at random samples fewer seeds learn the circle.",
        parts=[better("both", "both-random")],
        controls=[better("surgery", "random")],
        shows=shown_arms("random", "both-random"),
        **ABOUT,
    ),
    Claim(
        "X22",
        says="Loss weights proportional to paths^-1/2 make more seeds learn the circle.",
        parts=[better("weights", "none")],
        shows=shown_arms("weights"),
        **ABOUT,
    ),
    Claim(
        "X23",
        says="A learning rate of its own for gates, 3 times as high or a third, makes more seeds learn the circle.",
        parts=[better("rate-3", "none"), better("rate-third", "none")],
        shows=shown_arms("rate-3", "rate-third"),
        **ABOUT,
    ),
)

# --- what is drawn -------------------------------------------------------------------------------------------


def draw_arms(results: Results) -> plots.Figure:
    """Left: share of the seeds whose loss falls below 0.01, with 95 % intervals. Right: the loss of every seed at the end."""
    figure, axes = plots.grid(1, 2, (4.5, 3.2))
    arms = list(results.settings.arms)
    for place, arm in enumerate(arms):
        reached = results.table.select("reached", arm=arm)
        low, high = share_interval(int(reached.sum()), len(reached))
        axes[0, 0].plot([low, high], [place, place], color=plots.COLOURS["grey"])
        axes[0, 0].plot([reached.mean()], [place], "o", color=plots.COLOURS["blue"])
        losses = results.table.select("loss", arm=arm)
        axes[0, 1].plot(losses, np.full(len(losses), place), "|", color=plots.COLOURS["blue"], alpha=0.6)
    axes[0, 0].set_yticks(range(len(arms)), [ARMS[arm].label for arm in arms])
    axes[0, 1].set_yticks(range(len(arms)), [""] * len(arms))
    axes[0, 1].axvline(LEARNED, color=plots.COLOURS["grey"], linestyle=":")
    axes[0, 1].set_xscale("log")
    axes[0, 0].set_xlabel("share of seeds that reach loss 0.01")
    axes[0, 1].set_xlabel("loss at the end")
    for axis in axes[0]:
        axis.invert_yaxis()
    return figure


def share_interval(count: int, of: int) -> tuple[float, float]:
    """95 % Wilson interval of a share.

    >>> [round(end, 3) for end in share_interval(19, 20)]
    [0.764, 0.991]
    """
    z = 1.959964
    centre, spread = count / of + z**2 / (2 * of), z * np.sqrt(count * (of - count) / of**3 + z**2 / (4 * of**2))
    return float((centre - spread) / (1 + z**2 / of)), float((centre + spread) / (1 + z**2 / of))


STUDY = Study(
    name="surgery",
    paper="beyond",
    scales=SCALES,
    seeds={"smoke": 3, "desk": 60},
    columns=("arm",),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("arms", "Seeds that learn the circle, by how they are trained", draw_arms),),
)
