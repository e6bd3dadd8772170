"""Smooth or sharp: do the borders of gates settle at the jumps of the target, or where it is smooth? (X24-X26).

Two targets with known jumps. ``circle``: sin t on the top half, a square wave of five half cycles on the bottom half, six jumps;
as a control the same with a sine in place of the square wave (``wave``), whose zeros stand where the square wave jumps. ``tree``:
an oblique decision tree of seven splits in four dimensions. Borders are found as changes of sign of a gate's pre-activation along
curves: the circle, or random segments. Chance: the same gates behind a random rotation of the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.claims.functions import difference
from unlazy.data.circle import Circle
from unlazy.data.dataset import Dataset
from unlazy.data.oblique_tree import ObliqueTree
from unlazy.kernels.overlap import path_count
from unlazy.models.gates import HardGate, SoftGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec, relu_spec
from unlazy.probes.borders import Curves, border_crossings, mean_on_borders, random_rotation
from unlazy.probes.paths import allocation
from unlazy.runtime import stream
from unlazy.studies.study import Figure, Results, Study, Work, require_at_least_one, require_known
from unlazy.studies.table import Rows
from unlazy.training.ensemble import Member, MemberAdam, batch_order, build_member_stack
from unlazy.training.surgery import path_mass

# --- what varies ---------------------------------------------------------------------------------------------

NETWORKS = {
    "dlgn": "DLGN, constant experts, beta 4",
    "dlgn-30": "DLGN, constant experts, beta 30",
    "dlgn-hard": "DLGN, constant experts, hard gates",
    "dlgn-linear": "DLGN, linear experts, beta 4",
    "relu": "ReLU net",
}
TARGETS = {"circle": "square wave", "wave": "control: sine with the same zeros", "tree": "oblique tree"}
HALF_CYCLES = 5


@dataclass(frozen=True)
class Settings:
    """One scale. ``moments``: epochs at which borders are measured, the last one is the end of training."""

    moments: tuple[int, ...]
    n: int = 500
    width: int = 16
    depth: int = 5
    rotations: int = 8
    networks: tuple[str, ...] = tuple(NETWORKS)
    targets: tuple[str, ...] = tuple(TARGETS)

    def __post_init__(self) -> None:
        require_at_least_one(self, "n", "width", "depth", "rotations")
        require_known("networks", self.networks, NETWORKS)
        require_known("targets", self.targets, TARGETS)


@dataclass(frozen=True)
class Stack:
    """One case: all seeds of one network on one target."""

    target: str
    network: str
    seeds: tuple[int, ...]
    moments: tuple[int, ...]
    n: int
    width: int
    depth: int
    rotations: int


def cases(settings: Settings, seeds: Sequence[int]) -> list[Stack]:
    """Every network on every target."""
    sizes = settings.n, settings.width, settings.depth, settings.rotations
    places = product(settings.targets, settings.networks)
    return [Stack(*place, tuple(seeds), settings.moments, *sizes) for place in places]


SCALES = {
    "smoke": Settings(moments=(0, 2), n=60, width=4, depth=2, rotations=2, networks=("dlgn", "relu")),
    # three minutes on one core
    "desk": Settings(moments=(0, 3, 10, 30, 100, 200)),
}

# --- data and curves -----------------------------------------------------------------------------------------

FINE = 2000  # points of the circle on which borders are found
SEGMENTS, POINTS, REACH = 150, 121, 6.0  # straight, each around a random input, 0.05 a step
TREE = ObliqueTree()


def make_target(case: Stack) -> tuple[Dataset, Curves]:
    """The samples, and the curves along which borders are found."""
    if case.target == "tree":
        return TREE.dataset(4 * case.n), tree_curves(TREE)
    circle = Circle(n=case.n, top=1.0, bottom=HALF_CYCLES, offset=0.5)
    data, fine = circle.dataset(), replace(circle, n=FINE)
    jumps = torch.zeros(1, FINE, dtype=torch.bool)
    places = FINE // 2 + torch.arange(HALF_CYCLES + 1) * (FINE // 2) // HALF_CYCLES - 1
    jumps[0, places] = True  # the step from the last point before an angle to the first one after it
    curves = Curves(fine.dataset(torch.float64).x[None], jumps, 2 * math.pi / FINE, closed=True)
    if case.target == "wave":
        return data, curves
    below = data.groups["bottom"][:, None]
    return replace(data, name="square-wave", y=torch.where(below, data.y.sign(), data.y)), curves


def tree_curves(tree: ObliqueTree) -> Curves:
    """Random segments that cross at least one jump of the tree's label."""
    start, direction = tree.draw(4 * SEGMENTS, "starts"), tree.draw(4 * SEGMENTS, "directions")
    direction = direction / direction.norm(dim=1, keepdim=True)
    along = torch.linspace(-REACH / 2, REACH / 2, POINTS, dtype=torch.float64)
    x = start[:, None] + along[:, None] * direction[:, None]  # [curves, points, d]
    labels = tree.labels(x.flatten(0, 1)).reshape(x.shape[:2])
    jumps = labels[:, 1:] != labels[:, :-1]
    crossing = jumps.any(1)
    return Curves(x[crossing][:SEGMENTS], jumps[crossing][:SEGMENTS], REACH / (POINTS - 1))


def network_spec(case: Stack, inputs: int) -> NetSpec:
    """The network of a case, with biases and PyTorch's default start."""
    sizes: dict[str, Any] = {"width": case.width, "depth": case.depth}
    if case.network == "relu":
        return relu_spec(inputs, **sizes)
    experts = "linear" if case.network == "dlgn-linear" else "constant"
    gate = HardGate(10.0) if case.network == "dlgn-hard" else SoftGate(30.0 if case.network == "dlgn-30" else 4.0)
    return NetSpec(inputs, experts=experts, gate=gate, constant_input="one", **sizes)


# --- how a case is measured ----------------------------------------------------------------------------------

RATE, BATCH = 3e-3, 32  # those of the author's circle
NEAR = 0.1  # a border within this distance of a jump is at the jump; inputs have a size of about 1


def measure(case: Stack, work: Work) -> Rows:
    """Train all seeds and measure their borders at the moments of the case.

    ``distance``: mean over all border crossings of the distance to the nearest jump, divided by that of chance. ``at_jumps``: the
    share of crossings within 0.1 of a jump, divided by that of chance. ``smooth_share``: share of the crossings on the top half
    of the circle. ``by_mass``: crossings count by what flows through their unit. ``layer``: all, or one.
    """
    data, curves = make_target(case)
    members = [Member(seed, RATE) for seed in case.seeds]
    net = build_member_stack(network_spec(case, data.x.shape[1]), members, torch.float32)
    adam, rows = MemberAdam(net, [RATE] * len(members)), Rows()
    for epoch in range(case.moments[-1] + 1):
        if epoch in case.moments:
            add_borders(rows, case, net, data, curves, epoch)
        if epoch < case.moments[-1]:
            for some in batch_order(members, epoch, len(data)).split(BATCH, dim=1):
                adam.minimise((net(data.x[some]) - data.y[some]).square().mean((-2, -1)))
        work.progress(epoch, case.moments[-1])
    return rows


def add_borders(rows: Rows, case: Stack, net: GatedNet, data: Dataset, curves: Curves, epoch: int) -> None:
    """Add the rows of one moment."""
    where: dict[str, Any] = {"seed": list(case.seeds), "at": "end" if epoch == case.moments[-1] else epoch}
    distance = curves.distance()
    numbers = {"distance": distance, "at_jumps": (distance <= NEAR).double()}
    crossed = crossings_by_layer(net, curves, None)
    rotations = [
        random_rotation(curves.x.shape[-1], stream(turn, "rotation", case.target)) for turn in range(case.rotations)
    ]
    turned = [crossings_by_layer(net, curves, rotation) for rotation in rotations]
    masses = path_mass(net, data.x)
    layers: dict[str, list[int]] = {"all": list(range(case.depth))} | {str(n + 1): [n] for n in range(case.depth)}
    for layer, chosen in layers.items():
        weights = {"": None, "_by_mass": torch.cat([masses[n] for n in chosen], -1)}
        for (name, values), (suffix, weight) in product(numbers.items(), weights.items()):
            own = mean_on_borders(torch.cat([crossed[n] for n in chosen], -1), values, weight)
            by_chance = [mean_on_borders(torch.cat([each[n] for n in chosen], -1), values, weight) for each in turned]
            chance = torch.stack(by_chance).nanmean(0)
            rows.add(name + suffix, (own / torch.where(chance > 0, chance, torch.nan)).numpy(), layer=layer, **where)
    with torch.no_grad():
        rows.add("loss", (net(data.x) - data.y).square().mean((-2, -1)).double().numpy(), **where)
    if case.target != "tree":
        on_top = (torch.arange(FINE) < FINE // 2).double()[None]
        rows.add("smooth_share", mean_on_borders(torch.cat(crossed, -1), on_top).numpy(), **where)
        paths = path_count(net, data.x)
        top, bottom = (paths[:, inside].mean(-1) for inside in data.groups.values())
        rows.add("allocation", allocation(top, bottom).numpy(), **where)


def crossings_by_layer(net: GatedNet, curves: Curves, rotation: Tensor | None) -> list[Tensor]:
    """Border crossings of every layer along the curves, seen behind a rotation of the inputs if one is given."""
    x = curves.x.flatten(0, 1)
    x = x if rotation is None else x @ rotation.T
    with torch.no_grad():
        return [border_crossings(q.double(), curves) for q in net.pre_activations(x.float())]


# --- what is claimed -----------------------------------------------------------------------------------------

MORE, JUDGED = 1.25, "dlgn"  # a quarter more borders at jumps than chance


def at_jumps(target: str, network: str, at: int | str = "end", suffix: str = "") -> Quantity:
    """Borders at jumps against chance, over all layers."""
    return Quantity(f"at_jumps{suffix}", at, target=target, network=network, layer="all")


def settles(target: str, network: str) -> Iterator[Part]:
    """Borders are at jumps more often than chance, and more often than at the start."""
    name = f"{TARGETS[target]}, {NETWORKS[network]}: borders within 0.1 of a jump"
    yield Part(f"{name}, over chance", at_jumps(target, network), above=MORE, unit="times")
    change = at_jumps(target, network), at_jumps(target, network, 0)
    yield Part(f"{name}, over chance, minus that at the start", change, difference, above=0)


def beyond_wave(network: str) -> Part:
    """Borders gather at jumps more than at the zeros of a smooth wave at the same places."""
    both = at_jumps("circle", network), at_jumps("wave", network)
    words = f"{NETWORKS[network]}: borders at jumps over chance, minus those at the zeros of a smooth wave"
    return Part(words, both, difference, above=0)


def shown_borders(target: str) -> Iterator[Shown]:
    """Mean distance to jumps, counts by mass, and layers, of every network."""
    for network, label in NETWORKS.items():
        where = {"target": target, "network": network, "layer": "all"}
        yield Shown(f"{label}: mean distance to a jump over chance, start", Quantity("distance", 0, **where))
        yield Shown(f"{label}: mean distance to a jump over chance, end", Quantity("distance", "end", **where))
        yield Shown(f"{label}: at jumps over chance, start", at_jumps(target, network, 0))
        yield Shown(f"{label}: at jumps over chance, end", at_jumps(target, network))
        yield Shown(f"{label}: the same, by mass", at_jumps(target, network, suffix="_by_mass"))
        yield Shown(f"{label}: loss at the end", Quantity("loss", "end", target=target, network=network))


def sides(network: str) -> Iterator[Part]:
    """More paths on the smooth half, more borders on the sharp half."""
    where = {"target": "circle", "network": network}
    name = NETWORKS[network]
    yield Part(f"{name}: log paths smooth/sharp half", Quantity("allocation", "end", **where), above=0)
    yield Part(f"{name}: share of borders on the smooth half", Quantity("smooth_share", "end", **where), below=0.5)


OTHERS = tuple(name for name in NETWORKS if name != JUDGED)
ABOUT: dict[str, Any] = {"where": "open question", "paper": "our question; no number", "figure": "borders"}
CLAIMS = (
    Claim(
        "X24",
        says="On a circle with a square wave, the borders of gates settle at the jumps of the target.",
        parts=[*settles("circle", JUDGED), *settles("circle", "relu")],
        controls=[
            *(part for network in OTHERS if network != "relu" for part in settles("circle", network)),
            *(beyond_wave(network) for network in (JUDGED, "relu")),
        ],
        shows=[*shown_borders("circle"), *shown_borders("wave")],
        **ABOUT,
    ),
    Claim(
        "X25",
        says="On an oblique decision tree, the borders of gates settle at the splits where the label jumps.",
        parts=[*settles("tree", JUDGED), *settles("tree", "relu")],
        controls=[part for network in OTHERS if network != "relu" for part in settles("tree", network)],
        shows=[*shown_borders("tree")],
        **ABOUT,
    ),
    Claim(
        "X26",
        says="Paths go to the smooth half of the circle and borders to the half with jumps.",
        parts=[*sides(JUDGED)],
        controls=[part for network in OTHERS for part in sides(network)],
        shows=[
            Shown(f"{NETWORKS[network]}: share of borders on the smooth half, start",
                  Quantity("smooth_share", 0, target="circle", network=network))
            for network in NETWORKS
        ],
        **ABOUT,
    ),
)  # fmt: skip

# --- what is drawn -------------------------------------------------------------------------------------------


def draw_borders(results: Results) -> plots.Figure:
    """Borders within 0.1 of a jump, over chance (dotted: 1), against epochs; median and middle half of the seeds."""
    targets, networks = results.settings.targets, results.settings.networks
    figure, axes = plots.grid(1, len(targets), (3.2, 2.6))
    last = results.settings.moments[-1]
    for axis, target in zip(axes[0], targets, strict=True):
        for network, colour in zip(networks, ("blue", "green", "orange", "purple", "red"), strict=False):
            where = {"target": target, "network": network, "layer": "all"}
            values = [
                results.table.select("at_jumps", "end" if moment == last else moment, **where)
                for moment in results.settings.moments
            ]
            plots.draw_band(axis, np.array(results.settings.moments) + 1.0, np.array(values), NETWORKS[network], colour)
        axis.axhline(1, color=plots.COLOURS["grey"], linestyle=":", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_title(TARGETS[target])
        axis.set_xlabel("epoch + 1")
    axes[0, 0].set_ylabel("borders at jumps / chance")
    plots.shared_legend(figure, 3)
    return figure


STUDY = Study(
    name="gate-borders",
    paper="beyond",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 10},
    columns=("target", "network"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("borders", "Borders of gates at jumps of the target", draw_borders),),
)
