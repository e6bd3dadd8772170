"""Path sums, overlap, path regions and frozen gates, exactly (Figure 1; claims C1-C6, C26).

Every exact statement is checked on random networks that are small enough to enumerate all paths; regions are also counted on
trained networks. Seed ``n`` in the table is the number of a random case: with five sizes, network ``n`` has size ``n % 5`` and is
drawn from seed ``n // 5``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unlazy import plots
from unlazy.claims.claim import Claim, Function, Part, Quantity, Shown
from unlazy.kernels.compare import kernel_distance
from unlazy.kernels.overlap import hard_gates
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import member
from unlazy.models.net import GatedNet
from unlazy.plots import COLOURS
from unlazy.probes.paths import count_cells
from unlazy.store import Run
from unlazy.studies.halfspace import theorems_identities as identities
from unlazy.studies.halfspace.circle_checkpoints import CircleNetworks, stack_at
from unlazy.studies.halfspace.circle_networks import PRESETS
from unlazy.studies.halfspace.path_drawing import draw_four_paths
from unlazy.studies.halfspace.theorems_identities import (
    KINDS,
    SIZES,
    STEPS,
    Size,
    mean_trace_ratio,
    sample_value_kernels,
)
from unlazy.studies.study import Case, Figure, Results, Study, Work, make_cases
from unlazy.studies.table import Rows, Table
from unlazy.theory.enumerate import active_paths
from unlazy.theory.regions import circle_pieces, count_path_parts

# --- what varies ---------------------------------------------------------------------------------------------

ARMS = {"relu": "ReLU net", "pwc": "DLGN"}
LAW_STACK = ("pilot", "pwc")  # the law of the value kernel is about networks without biases
REGION_EPOCHS = (0, 3, 10, 30, 100, 200)  # and the last epoch
LAW_EPOCHS = (0, 3, 30)  # and the last epoch


@dataclass(frozen=True)
class Settings:
    """One scale. ``trainings``: seeds of each preset and arm. ``sizes``, ``points``: of the random networks.

    ``draws``: of fresh value weights for each trained network; each of the ``law_networks`` random networks has four times as
    many.
    """

    trainings: int = 10
    epochs: int = 200
    law_networks: int = 20
    draws: int = 256
    width: int = 16
    depth: int = 5
    sizes: tuple[Size, ...] = SIZES
    points: int = 48
    law_points: int = 32


SMALL: dict[str, Any] = {"width": 4, "depth": 3, "points": 12, "law_points": 6, "sizes": (Size(2, 2, 2), Size(3, 3, 2))}
SCALES = {
    "smoke": Settings(trainings=2, epochs=3, law_networks=2, draws=8, **SMALL),  # seconds: no claim is judged from it
    "desk": Settings(
        trainings=3, epochs=100, law_networks=10, draws=64, sizes=SIZES[:3]
    ),  # under a minute on two cores
    "paper": Settings(),
}


def cases(settings: Settings, seeds: Sequence[int]) -> list[Case]:
    """Random networks of each size, random networks with fresh value weights, worked examples, and trained networks."""
    places: list[dict[str, Any]] = []
    for place, size in enumerate(settings.sizes):
        numbers = tuple(number for number in seeds if number % len(settings.sizes) == place)
        places.append({"subject": "random networks", "size": size, "numbers": numbers})
    places.append({"subject": "fresh value weights", "numbers": tuple(seeds[: settings.law_networks])})
    places.append({"subject": "worked examples", "seed": seeds[0]})
    trained = {"subject": "trained networks", "seeds": tuple(seeds[: settings.trainings])}
    places += [{**trained, "preset": preset, "arm": arm} for preset in PRESETS for arm in ARMS]
    return make_cases(places, settings)


# --- how a case is measured ----------------------------------------------------------------------------------

COUNTED_KINDS = ("relu", "relu-biases", "dlgn", "dlgn-biases")


def measure(case: Case, work: Work) -> Rows:
    """The rows of a case, by what it is about."""
    measures = {
        "random networks": measure_identities,
        "fresh value weights": measure_fresh_values,
        "worked examples": measure_examples,
        "trained networks": measure_trained,
    }
    return measures[case.subject](case, work)


def measure_identities(case: Case, work: Work) -> Rows:
    """Errors of every identity on random networks of every kind, all of one size."""
    rows, compatible = Rows(), identities.compatible_patterns(case.size)
    for done, number in enumerate(case.numbers, 1):
        seed = number // len(case.sizes)
        x, new = (identities.random_points(case.size, seed + shift, case.points) for shift in (0, 10_000))
        for kind in KINDS:
            net = identities.random_network(kind, case.size, seed, x)
            found = {"path_sum_error": identities.path_sum_error(net, x)}
            found["hidden_sum_error"] = identities.hidden_sum_error(net, x)
            if kind in COUNTED_KINDS:
                found["overlap_error"] = identities.overlap_error(net, x)
                found["pattern_mismatch"] = identities.pattern_mismatch(net, x, compatible)
                found["segments_leaving"] = identities.segments_leaving(net, x)
                found |= identities.regression_errors(net, x, new, seed)
            if kind in ("dlgn", "dlgn-biases"):
                found["polyhedron_mismatch"] = identities.polyhedron_mismatch(net, x)
            if kind == "dlgn":
                found["antipodal_error"] = identities.antipodal_error(net, x)
                found["normal_movement"] = identities.normal_movement(net, seed)
            if kind in ("relu", "dlgn") and case.size.inputs == 2:
                found["split_share"] = identities.split_share(count_path_parts(circle_pieces(net)))
                found["region_change"] = identities.region_change(net, seed)
            rows.add_all(found, kind=kind, seed=number)
        work.progress(done, len(case.numbers))
    return rows


def measure_fresh_values(case: Case, work: Work) -> Rows:
    """Distance of the value kernel, averaged over fresh value weights, from its law, in standard errors."""
    rows = Rows()
    for kind in ("dlgn", "pwc"):
        for number in case.numbers:
            size = case.sizes[number % len(case.sizes)]
            x = identities.random_points(size, number, 6)
            net = identities.random_network(kind, size, number, x)
            ratio, error = mean_trace_ratio(*sample_value_kernels(net, x, 4 * case.draws, number))
            rows.add("law_score", (ratio - 1) / error, kind=kind, seed=number)
    return rows


def measure_examples(case: Case, work: Work) -> Rows:
    """The two examples of Figure 1, and the numbers of patterns counted one by one."""
    rows, ends = Rows(), identities.example_parts()
    rows.add("parts", len(ends) / 2)
    rows.add("end", ends, place=range(1, len(ends) + 1))
    for step in STEPS:
        for kind in ("relu", "dlgn"):
            rows.add("jump", identities.example_jump(step, linear_gates=kind == "dlgn"), kind=kind, step=step)
    for size in SIZES:
        rows.add("pattern_count_error", identities.pattern_count_error(size), size=str(size))
    return rows


def measure_trained(case: Case, work: Work) -> Rows:
    """Networks of the circle study at the preset's beta: exact counts of regions on the circle, and those with data points."""
    nets, rows = CircleNetworks(case.preset, case.arm, case.seeds, case.epochs, case.width, case.depth), Rows()
    run, x = nets.train(work), PRESETS[case.preset].circle.dataset(torch.float64).x
    for epoch in measured_epochs(REGION_EPOCHS, case.epochs):
        for seed, net in zip(case.seeds, load_members_at(nets, run, epoch), strict=True):
            rows.add_all(count_regions(net, x), seed=seed, at=epoch)
    if (case.preset, case.arm) == LAW_STACK:
        _measure_law(case, nets, run, x[:: -(-len(x) // case.law_points)], rows)
    return rows


def _measure_law(case: Case, nets: CircleNetworks, run: Run, x: Tensor, rows: Rows) -> None:
    """The value kernel averaged over fresh value weights beside its exact mean, with the gates of several epochs."""
    for epoch in measured_epochs(LAW_EPOCHS, case.epochs):
        for seed, net in zip(case.seeds, load_members_at(nets, run, epoch), strict=True):
            drawn, wanted = sample_value_kernels(net, x, case.draws, seed + 1_000_000 * epoch)
            ratio, error = mean_trace_ratio(drawn, wanted)
            trained = tangent_kernel(net.hard(), x, parameters="value")
            found = {
                "trace_ratio": ratio,
                "trace_ratio_error": error,
                "cosine_averaged": 1 - float(kernel_distance(drawn.mean(0), wanted)),
                "cosine_trained": 1 - float(kernel_distance(trained, wanted)),
            }
            rows.add_all(found, seed=seed, at=epoch)
            if seed == case.seeds[0] and epoch == case.epochs:
                upper = torch.triu_indices(*wanted.shape).unbind()
                entries = {"entry_averaged": drawn.mean(0)[upper], "entry_law": wanted[upper]}
                rows.add_all(entries, seed=seed, at=epoch, entry=range(len(upper[0])))


def measured_epochs(usual: Sequence[int], last: int) -> list[int]:
    """The usual epochs before the last one, and the last one."""
    return [*(epoch for epoch in usual if epoch < last), last]


def load_members_at(nets: CircleNetworks, run: Run, epoch: int) -> list[GatedNet]:
    """The networks as they were after an epoch, one by one, in float64 so that regions can be counted exactly."""
    stack = stack_at(nets, run, epoch).double()
    return [member(stack, index) for index in range(len(nets.seeds))]


def count_regions(net: GatedNet, x: Tensor) -> dict[str, float]:
    """Numbers of regions of a network.

    ``cells``: activation patterns that occur on the circle; ``cells_seen``: those at the points ``x``. ``active_paths_share``:
    share of paths that are active somewhere on the circle. ``split_share``: share of these whose region has several parts; only
    for networks without biases, whose parts of the circle are parts of the plane.
    """
    pieces = circle_pieces(net)
    parts = count_path_parts(pieces)
    found = {
        "cells": float(count_cells(pieces.gates)),
        "cells_seen": float(count_cells(hard_gates(net, x))),
        "active_paths_share": float((parts > 0).mean()),
    }
    return found if net.settings.value_bias else found | {"split_share": identities.split_share(parts)}


# --- what is claimed -----------------------------------------------------------------------------------------

EXACT = 1e-12  # largest relative error of sums over paths in float64; also for shares of exceptions, which must be zero
REGRESSION = 1e-10  # C26: least squares with a condition number of about 1e5 loses five digits
VISIBLE_JUMP = 0.2  # C5: share of the circle; from half-plane to quadrant it is a quarter
CONTINUOUS = 1.01  # C5: movement over the largest that continuity allows, with a hundredth for rounding
LAST_EPOCH = 200
Vector = NDArray[Any]


def worst(*columns: Vector) -> Vector:
    """The greatest of all numbers; NaN if one is missing."""
    return np.max(columns, keepdims=True).reshape(1)


def one_after_the_other(*columns: Vector) -> Vector:
    """All numbers of all columns as one column."""
    return np.concatenate(columns)


def distance_from_the_ends(parts: Vector, *ends: Vector) -> Vector:
    """How far each end of the region is from the paper's; if there are not two parts, by how many their number is wrong."""
    return np.where(parts == 2, np.abs(np.concatenate(ends) - [0.5, 1.5, 2.5, 3.5]), np.abs(parts - 2))


def of_random_networks(quantity: str, kind: str) -> Quantity:
    """A quantity of the random networks of a kind."""
    return Quantity(quantity, subject="random networks", kind=kind)


def of_trained_networks(quantity: str, preset: str, arm: str, at: int) -> Quantity:
    """A quantity of trained networks after an epoch."""
    return Quantity(quantity, at, subject="trained networks", preset=preset, arm=arm)


def of_examples(quantity: str, **where: Any) -> Quantity:
    """A quantity of the worked examples."""
    return Quantity(quantity, subject="worked examples", **where)


def parts_by_kind(quantity: str, kinds: Sequence[str], what: str, below: float = EXACT) -> list[Part]:
    """The same part for each of these kinds of random networks."""
    return [
        Part(f"{KINDS[kind]}: {what}", of_random_networks(quantity, kind), below=below, identity=True) for kind in kinds
    ]


def parts_by_kind_and_worst(
    quantity: str, kinds: Sequence[str], what: str, below: float = EXACT, beside: Sequence[str] = ()
) -> list[Part]:
    """The same part for each kind, and one for the worst network of all kinds, including those in ``beside``.

    An exact claim has no exceptions, so the worst network must pass, too.
    """
    of = tuple(of_random_networks(quantity, kind) for kind in (*beside, *kinds))
    worst_one = Part(f"the worst network of all: {what}", of, by=worst, below=below, identity=True)
    return [*parts_by_kind(quantity, kinds, what, below), worst_one]


def example_part(says: str, *of: Quantity, by: Function = one_after_the_other, **rule: Any) -> Part:
    """A part about a worked example, which has one seed."""
    return Part(says, of, by=by, seeds=1, identity=True, **rule)


def shown_by_kind(quantity: str, kinds: Sequence[str], what: str, unit: str = "") -> list[Shown]:
    """A quantity of each of these kinds of random networks."""
    return [Shown(f"{KINDS[kind]}: {what}", of_random_networks(quantity, kind), unit=unit) for kind in kinds]


def shown_of_trained(
    quantity: str, what: str, at: int = LAST_EPOCH, presets: Sequence[str] = tuple(PRESETS)
) -> list[Shown]:
    """A quantity of the trained networks of every preset and arm."""
    return [
        Shown(f"{preset} preset, {label}, epoch {at}: {what}", of_trained_networks(quantity, preset, arm, at))
        for preset in presets
        for arm, label in ARMS.items()
    ]


BIAS_FREE, WITH_BIASES = ("relu", "dlgn"), ("relu-biases", "dlgn-biases")
EXPERTS = ("dlgn", "pwc", "linear")
AS_OUTPUT = "sum over paths against the output, relative error"
AS_HIDDEN = "partial paths against every hidden unit"
AS_COUNTED = "product over layers against counting common paths one by one, relative error"
ANTIPODAL = "open at x plus open at -x, less the width: largest departure in any layer"
LEAVING = "segments inside a path region at both ends that leave it"
POLYHEDRON = "points where region and polyhedron differ"
SPLIT = "path regions in several parts, in the plane"
MOVEMENT = "movement of half-space normals over the most that continuity allows, for relative steps 0.1 to 1e-12"
CHANGE = "largest change of any path region's share of the circle under a relative step of 1e-9"
PATTERNS = "points where being active differs from having one of these patterns"
REGRESSIONS = "least squares on paths against kernel regression, at new points, over the largest target"
LAW_NUMBERS = {
    "trace_ratio": "gates of epoch {}: averaged value kernel over that law",
    "cosine_trained": "epoch {}: cosine of the value kernel at the trained values with that law",
}

CLAIMS = (
    Claim(
        "C1",
        says=(
            "The output of a ReLU network without biases equals the sum, over all paths through its hidden units, "
            "of the product of the gates on the path times the linear function given by the weights on the path."
        ),
        where="Thm 1",
        paper="exact",
        figure="identities",
        parts=parts_by_kind_and_worst("path_sum_error", ["relu"], AS_OUTPUT),
        shows=[
            *shown_by_kind("path_sum_error", ["relu-biases"], f"{AS_OUTPUT} (bias paths included)"),
            *shown_by_kind("hidden_sum_error", ["relu", "relu-biases"], AS_HIDDEN),
        ],
    ),
    Claim(
        "C2",
        says=(
            "The output of a deep linearly gated network (DLGN), with linear or with constant experts, and that "
            "of a deep linear network equal the same kind of sum over paths of gate times expert."
        ),
        where="Thm 2",
        paper="exact",
        figure="identities",
        parts=parts_by_kind_and_worst("path_sum_error", EXPERTS, AS_OUTPUT),
        shows=[
            *shown_by_kind("path_sum_error", ["dlgn-biases", "pwc-biases"], f"{AS_OUTPUT} (bias paths included)"),
            *shown_by_kind(
                "path_sum_error", ["dlgn-soft"], f"{AS_OUTPUT} (the gate of a path is a product of sigmoids)"
            ),
            *shown_by_kind("hidden_sum_error", EXPERTS, AS_HIDDEN),
        ],
    ),
    Claim(
        "C3",
        says=(
            "For ReLU networks and DLGNs the number of paths active on both of two inputs equals the product over "
            "layers of the number of units open on both."
        ),
        where="Sec. 3.2",
        paper="exact",
        figure="identities",
        parts=parts_by_kind("overlap_error", BIAS_FREE, AS_COUNTED),
        controls=parts_by_kind_and_worst("overlap_error", WITH_BIASES, AS_COUNTED, beside=BIAS_FREE),
        shows=shown_by_kind("antipodal_error", ["dlgn"], ANTIPODAL, unit="units"),
    ),
    Claim(
        "C4",
        says=(
            "The set of inputs on which a path is active is always convex in a DLGN, but can fall into several "
            "separate pieces in a ReLU network."
        ),
        where="Sec. 2, Fig. 1 left",
        paper="always convex; ReLU example [0.5, 1.5] and [2.5, 3.5]",
        figure="fig01_examples",
        parts=[
            *parts_by_kind("segments_leaving", ["dlgn"], LEAVING),
            *parts_by_kind("polyhedron_mismatch", ["dlgn"], POLYHEDRON),
            example_part("ReLU example: parts of its path region", of_examples("parts"), above=1, unit="parts"),
            example_part(
                "ReLU example: distance of its ends from 0.5, 1.5, 2.5, 3.5",
                of_examples("parts"),
                *(of_examples("end", place=place) for place in (1, 2, 3, 4)),
                by=distance_from_the_ends,
                below=EXACT,
            ),
        ],
        controls=[
            *parts_by_kind_and_worst("segments_leaving", ["dlgn-biases"], LEAVING, beside=["dlgn"]),
            *parts_by_kind_and_worst("polyhedron_mismatch", ["dlgn-biases"], POLYHEDRON, beside=["dlgn"]),
        ],
        shows=[
            *shown_by_kind(
                "segments_leaving", ["relu", "relu-biases"], "segments that leave the region between their ends"
            ),
            *shown_by_kind("split_share", BIAS_FREE, SPLIT),
            *shown_of_trained("split_share", SPLIT, 0, ["pilot"]),
            *shown_of_trained("split_share", SPLIT, LAST_EPOCH, ["pilot"]),
        ],
    ),
    Claim(
        "C5",
        says=(
            "An arbitrarily small change of the parameters can make the active region of a path jump in a ReLU "
            "network, whereas the half-space normals of a DLGN move continuously with the parameters."
        ),
        where="Fig. 1 right",
        paper="constructed example: half-plane to quadrant",
        figure="fig01_examples",
        parts=[
            example_part(
                "ReLU example: share of the circle by which the region differs between eps and -eps, for eps 0.1 to 1e-12",
                *(of_examples("jump", kind="relu", step=step) for step in STEPS),
                above=VISIBLE_JUMP,
            ),
            *parts_by_kind_and_worst("normal_movement", ["dlgn"], MOVEMENT, CONTINUOUS),
        ],
        shows=[
            Shown(
                "the example's weights as a DLGN: the same share",
                tuple(of_examples("jump", kind="dlgn", step=step) for step in STEPS),
                by=one_after_the_other,
                seeds=1,
            ),
            *shown_by_kind("region_change", ["dlgn", "relu"], CHANGE),
        ],
    ),
    Claim(
        "C6",
        says=(
            "The active region of one path is a union of exactly 2^((m-1)(L-1)) regions of constant activation "
            "pattern, some of them possibly empty, for L-1 hidden layers of m units."
        ),
        where="Sec. 3.1",
        paper="exact count 2^((m-1)(L-1))",
        figure="regions_over_training",
        parts=[
            example_part(
                "patterns that leave a path open, counted one by one, against 2^((m-1)(L-1)), relative error, by size",
                *(of_examples("pattern_count_error", size=str(size)) for size in SIZES),
                below=EXACT,
            ),
            *parts_by_kind("pattern_mismatch", BIAS_FREE, PATTERNS),
        ],
        controls=parts_by_kind_and_worst("pattern_mismatch", WITH_BIASES, PATTERNS, beside=BIAS_FREE),
        shows=[
            *shown_of_trained("cells", "activation patterns that occur on the circle"),
            *shown_of_trained("active_paths_share", "share of the paths that are active somewhere on it"),
        ],
    ),
    Claim(
        "C26",
        says=(
            "With frozen gates and one free constant per path, least squares on the path features and kernel "
            "regression with the overlap kernel give the same predictions."
        ),
        where="Sec. 3.2",
        paper="exact",
        figure="value_kernel_law",
        parts=[
            *parts_by_kind_and_worst("ridge_error", BIAS_FREE[::-1], f"{REGRESSIONS}, with a ridge", REGRESSION),
            *parts_by_kind_and_worst("ridgeless_error", BIAS_FREE[::-1], f"{REGRESSIONS}, without", REGRESSION),
        ],
        shows=[
            *shown_by_kind("ridge_error", WITH_BIASES[::-1], f"{REGRESSIONS}, with a ridge"),
            *(
                Shown(
                    f"{KINDS[kind]}: value kernel averaged over fresh values, distance from L s^(2(L-1)) H",
                    Quantity("law_score", subject="fresh value weights", kind=kind),
                    unit="standard errors",
                )
                for kind in ("dlgn", "pwc")
            ),
            *(
                Shown(f"pilot preset, DLGN, {what.format(epoch)}", of_trained_networks(quantity, *LAW_STACK, epoch))
                for epoch in (0, LAST_EPOCH)
                for quantity, what in LAW_NUMBERS.items()
            ),
        ],
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------

ARM_COLOURS = {"relu": "black", "pwc": "blue"}
SHOWN_EPS = 0.05
FLOOR = 1e-17  # where an error of exactly zero is drawn


def draw_examples(results: Results) -> plots.Figure:
    """Left: one path of a ReLU net, active on two intervals. Middle: the region of one path just below and above eps = 0, for a
    ReLU net and a DLGN of the same weights. Right: how much of the circle it gains from -eps to eps.
    """
    figure, axes = plots.grid(2, 4, (2.5, 2.1), gridspec_kw={"width_ratios": [1.7, 1, 1, 1.2]})
    whole = axes[0, 0].get_gridspec()
    for axis in (*axes[:, 0], *axes[:, 3]):
        axis.remove()
    _draw_two_part_region(figure.add_subplot(whole[:, 0]), results.table.series("end", over="place")[1][:, 0])
    jump = figure.add_subplot(whole[:, 3])
    for row, (kind, label) in enumerate((("relu", "ReLU net"), ("dlgn", "DLGN, same weights"))):
        colour = COLOURS["blue" if kind == "dlgn" else "red"]
        for column, value in enumerate((-SHOWN_EPS, SHOWN_EPS), 1):
            _draw_jumping_region(axes[row, column], value, kind == "dlgn", colour)
            axes[row, column].set_title(f"eps = {value:g}" if row == 0 else "")
        axes[row, 1].set_ylabel(label)
        steps, shares = results.table.series("jump", over="step", kind=kind)
        jump.plot(steps, shares[:, 0], "o-", markersize=4, color=colour, label=label)
    jump.set(xscale="log", ylim=(-0.02, 0.32), xlabel="eps", title="circle gained from -eps to eps")
    jump.set_xticks([1e-12, 1e-8, 1e-4, 1e-1])
    jump.minorticks_off()
    jump.legend(loc="center")
    return figure


def _draw_two_part_region(axis: plots.Axes, ends: Vector) -> None:
    """The pre-activation of the example's unit, and the region of the path, which has these ends."""
    x = torch.linspace(-0.4, 4.1, 1001, dtype=torch.float64)
    q = identities.two_part_net().pre_activations(x[:, None])[1][:, identities.TWO_PART_PATH[1]].detach()
    axis.plot(x, q, color=COLOURS["black"])
    axis.axhline(0, color=COLOURS["grey"], linewidth=0.7)
    for low, high in ends.reshape(-1, 2):
        axis.axvspan(low, high, color=COLOURS["red"], alpha=0.3, linewidth=0)
        axis.text((low + high) / 2, -0.56, f"[{low:g}, {high:g}]", ha="center")
    axis.set(xlabel="x", ylabel="what unit 1 of layer 2 sees", xticks=range(5), yticks=[-0.5, 0, 0.5])
    axis.set_title("ReLU net: one path, active on two intervals")


def _draw_jumping_region(axis: plots.Axes, eps: float, linear_gates: bool, colour: str) -> None:
    """The region of the example's path, computed by the network itself on a fine grid."""
    ticks = (torch.arange(200, dtype=torch.float64) + 0.5) / 100 - 1
    x = torch.cartesian_prod(ticks, ticks).flip(1)
    path = torch.tensor([identities.JUMPING_PATH])
    inside = active_paths(identities.jumping_net(eps, linear_gates=linear_gates), x, path).reshape(200, 200)
    axis.contourf(ticks, ticks, inside.double(), levels=[0.5, 1.5], colors=[colour], alpha=0.4)
    axis.axhline(0, color=COLOURS["grey"], linewidth=0.7)
    axis.axvline(0, color=COLOURS["grey"], linewidth=0.7)
    axis.set(aspect="equal", xlim=(-1, 1), ylim=(-1, 1), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def draw_identities(results: Results) -> plots.Figure:
    """Relative error of every identity on every random network, in float64; zero is drawn at the left edge."""
    rows = [("path_sum_error", kind, f"paths = output: {label}") for kind, label in KINDS.items()]
    rows += [("overlap_error", kind, f"overlap: {KINDS[kind]}") for kind in BIAS_FREE]
    rows += [("ridgeless_error", kind, f"free experts = kernel, no ridge: {KINDS[kind]}") for kind in BIAS_FREE]
    rows += [("ridge_error", kind, f"free experts = kernel, ridge: {KINDS[kind]}") for kind in BIAS_FREE]
    figure, axes = plots.grid(1, 1, (7.5, 0.3 * len(rows) + 0.7))
    axis = axes[0, 0]
    for row, (quantity, kind, _) in enumerate(rows):
        values = np.maximum(results.table.select(quantity, kind=kind), FLOOR)
        heights = row + np.linspace(-0.25, 0.25, len(values))
        axis.plot(values, heights, ".", markersize=4, alpha=0.6, color=COLOURS["blue"])
        allowed = REGRESSION if quantity.startswith("ridge") else EXACT
        axis.plot([allowed] * 2, [row - 0.4, row + 0.4], color=COLOURS["red"])
    axis.set_yticks(range(len(rows)), [label for _, _, label in rows])
    axis.set(xscale="log", xlim=(FLOOR / 2, 1e-9), ylim=(len(rows) - 0.5, -0.5), xlabel="relative error in float64")
    axis.set_xticks([FLOOR, 1e-16, 1e-14, 1e-12, 1e-10], ["0", "1e-16", "1e-14", "1e-12", "1e-10"])
    axis.set_title("one dot a network; red: allowed")
    return figure


def draw_regions_over_training(results: Results) -> plots.Figure:
    """Median and middle half of the seeds. Dotted: what the data points see. Without biases (pilot) a DLGN always has two cells
    for every unit, and path regions in one part.
    """
    columns = {
        "cells": "activation patterns on the circle",
        "active_paths_share": "share of paths active somewhere",
        "split_share": "share of path regions in several parts",
    }
    figure, axes = plots.grid(len(PRESETS), len(columns), (3.6, 2.9), sharex=True)
    for row, preset in enumerate(PRESETS):
        for column, (name, title) in enumerate(columns.items()):
            _draw_over_training(axes[row, column], results.table, preset, name)
            axes[row, column].set_title(title if row == 0 else "")
        axes[row, 0].set_ylabel(f"{preset} preset")
        axes[row, 0].legend()
    for axis in axes[-1]:
        axis.set_xlabel("epoch")
    return figure


def _draw_over_training(axis: plots.Axes, table: Table, preset: str, name: str) -> None:
    """One quantity over epochs for both arms of a preset; a note if it was not counted."""
    for arm, colour in ARM_COLOURS.items():
        epochs, values = table.series(name, preset=preset, arm=arm)
        if len(epochs) == 0:
            words = "not counted: with biases,\nparts of the circle are\nnot parts of the plane"
            axis.text(0.5, 0.5, words, ha="center", va="center", color=COLOURS["grey"], transform=axis.transAxes)
            axis.axis("off")
            return
        epochs = np.maximum(epochs, 0.5)
        plots.draw_band(axis, epochs, values, ARMS[arm], colour, marker="o", markersize=3)
        if name == "cells":
            with_data = np.median(table.series("cells_seen", preset=preset, arm=arm)[1], axis=1)
            axis.plot(epochs, with_data, ":", color=COLOURS[colour], label=f"{ARMS[arm]}, seen by the data")
    axis.set(xscale="log", ylim=(-0.02 if name == "split_share" else 0, None))
    axis.set_xticks([0.5, 3, 10, 30, 100], ["0", "3", "10", "30", "100"])
    axis.minorticks_off()


def draw_value_kernel_law(results: Results) -> plots.Figure:
    """Gates of several epochs: the mean kernel over fresh values, and the kernel at the network's own values, beside the law
    L s^(2(L-1)) times the neural path kernel.
    """
    table = results.table
    epochs, ratios = table.series("trace_ratio")
    errors = table.series("trace_ratio_error")[1]
    figure, axes = plots.grid(1, 3, (3.5, 3.1))
    places = np.arange(len(epochs))
    spread = np.linspace(-0.25, 0.25, ratios.shape[1])
    ratio, entry, cosine = axes[0]
    for place in places:
        ratio.errorbar(place + spread, ratios[place], 2 * errors[place], fmt=".", color=COLOURS["blue"], linewidth=0.8)
    ratio.axhline(1, color=COLOURS["grey"], linewidth=0.8)
    ratio.set(title="averaged trace over the law", ylabel="ratio, ± 2 standard errors", ylim=(0.5, 1.5))
    law, averaged = (table.where(quantity=name).values for name in ("entry_law", "entry_averaged"))
    entry.plot(law, averaged, ".", markersize=3, alpha=0.5, color=COLOURS["blue"])
    entry.plot([0, law.max()], [0, law.max()], color=COLOURS["grey"], linewidth=0.8)
    entry.set(xlabel="law", ylabel=f"average over {results.settings.draws} draws")
    entry.set_title(f"entries, seed 0, gates of epoch {epochs[-1]:g}")
    for name, colour, label in (
        ("cosine_averaged", "blue", "fresh values"),
        ("cosine_trained", "red", "the network's own values"),
    ):
        plots.draw_band(cosine, places, table.series(name)[1], label, colour, marker="o", markersize=4)
    cosine.set(title="cosine with the law", ylim=(0, 1.05))
    cosine.legend(loc="lower left")
    for axis in (ratio, cosine):
        axis.set_xticks(places, [f"{epoch:g}" for epoch in epochs])
        axis.set_xlabel("gates of epoch")
    return figure


STUDY = Study(
    name="theorems",
    paper="half-space",
    scales=SCALES,
    seeds={"smoke": 4, "desk": 30, "paper": 100},
    columns=("subject", "size", "preset", "arm"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(
        Figure("fig01_examples", "Path regions of ReLU nets can be in pieces, and can jump (Figure 1)", draw_examples),
        Figure("fig08_paths", "Four paths and their regions (after Figure 8)", draw_four_paths),
        Figure("identities", "Exact means exact", draw_identities),
        Figure("regions_over_training", "Regions over training, counted exactly", draw_regions_over_training),
        Figure("value_kernel_law", "The tangent kernel of the values, averaged over values", draw_value_kernel_law),
    ),
)
