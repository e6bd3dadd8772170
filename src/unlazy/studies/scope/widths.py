"""Kernel movement against width in two parametrisations; and the width check on networks whose exponents are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from unlazy import plots
from unlazy.claims.rule import interval
from unlazy.data.patterns import Patterns
from unlazy.kernels.compare import kernel_distance
from unlazy.models.build import build_stack
from unlazy.models.net import GatedNet
from unlazy.models.spec import Init, relu_spec
from unlazy.probes.classes import dense_tangent_kernel
from unlazy.studies.scope.width_networks import (
    NETWORKS,
    OPTIMISERS,
    PARAMETRISATIONS,
    WITHIN,
    known_exponent,
    measure_check,
)
from unlazy.studies.study import Case, Figure, Results, Settings, Study, Work, make_cases
from unlazy.studies.table import Rows
from unlazy.widths.reading import width_exponents

INPUTS, SAMPLES, DEPTH, RATE = 64, 64, 2, 0.3


def measure(case: Case, work: Work) -> Rows:
    """How far gradient descent on squared errors moves the tangent kernel at each width, and the final losses, for all seeds.

    Cases with a ``network`` run the width check instead.
    """
    if hasattr(case, "network"):
        return measure_check(case)
    rows, data = Rows(), Patterns(inputs=INPUTS, patterns=32, relevant=3).dataset(576)
    x, y = data.x.double(), data.y.double()
    x, y = (x / x.square().mean().sqrt())[:SAMPLES], y[:SAMPLES]
    top = torch.linalg.eigvalsh(dense_tangent_kernel(_build_stack(case, case.widths[0]), x))[:, -1].mean()
    rate = RATE / (2 * float(top) / SAMPLES)  # over the curvature of the narrowest networks; the same at every width
    for width in case.widths:
        net = _build_stack(case, width)
        start = dense_tangent_kernel(net, x)
        optimiser = torch.optim.SGD(net.parameter_groups(rate, "sgd"))
        for _ in range(case.steps):
            optimiser.zero_grad()
            (net(x) - y).square().mean((-2, -1)).sum().backward()
            optimiser.step()
        end = dense_tangent_kernel(net, x)
        with torch.no_grad():
            losses = (net(x) - y).square().mean((-2, -1))
        change = torch.linalg.matrix_norm(end - start) / torch.linalg.matrix_norm(start)
        found = {"kernel_change": change, "kernel_distance": kernel_distance(end, start), "final_loss": losses}
        rows.add_all(found, units=width, seed=range(case.networks))
    return rows


def _build_stack(case: Case, width: int) -> GatedNet:
    spec = relu_spec(INPUTS, 1, width=width, depth=DEPTH, init=Init("he"), parametrisation=case.parametrisation)
    return build_stack(spec, range(case.networks), dtype=torch.float64)


def list_cases(settings: Settings, seeds: Sequence[int]) -> list[Case]:
    """A case for each parametrisation whose kernel movement is measured, and one for each network that is checked."""
    axes = ("parametrisation", "check_widths", "check_seeds", "check_steps", "check_networks")
    moved = [{"parametrisation": name, "seed": seed} for name in settings.parametrisation for seed in seeds]
    checked = [
        {
            **{"network": network, "parametrisation": parametrisation, "optimiser": optimiser, "seed": seed},
            **{"widths": settings.check_widths, "networks": settings.check_seeds, "steps": settings.check_steps},
        }
        for network in settings.check_networks
        for parametrisation in PARAMETRISATIONS
        for optimiser in OPTIMISERS
        for seed in seeds
    ]
    return make_cases([*moved, *checked], settings, without=axes)


def draw_widths(results: Results) -> plots.Figure:
    """Relative change of the tangent kernel, median and middle half of the seeds, with fitted exponents."""
    figure, axes = plots.grid(1, 1, (4.6, 3.4))
    panel = axes[0, 0]
    for name, words, colour in (("ntk", "NTK", "blue"), ("mup", "maximal update", "red")):
        units, movement = results.table.series("kernel_change", over="units", parametrisation=name)
        slopes = width_exponents(units, movement)
        low, high = interval(slopes)
        label = f"{words}: exponent {np.median(slopes):.2f} [{low:.2f}, {high:.2f}]"
        plots.draw_band(panel, units, movement, label, colour, marker="o", markersize=4)
    panel.set(xscale="log", yscale="log", xlabel="width", ylabel="relative change of the tangent kernel")
    panel.set_xticks(units, [f"{width:g}" for width in units])
    panel.minorticks_off()
    plots.legend_below(panel, columns=1)
    return figure


def draw_known(results: Results) -> plots.Figure:
    """Exponents that the width check measured, against those that theory gives; the band is the bound, 0.15."""
    figure, axes = plots.grid(1, 1, (4.6, 4.2))
    panel, table = axes[0, 0], results.table
    colours = ("blue", "red", "green")
    for network, colour in zip(NETWORKS, colours, strict=True):
        expected, measured = [], []
        for row in table.where(quantity="exponent", network=network).rows():
            wanted = known_exponent(row["parametrisation"], row["optimiser"], row["layer"], row["measure"])
            if wanted is not None and row["after"] in ("0", "1"):
                expected.append(wanted)
                measured.append(row["value"])
        shift = 0.04 * (colours.index(colour) - 1)
        panel.plot(np.array(expected) + shift, measured, ".", color=plots.COLOURS[colour], alpha=0.4, label=network)
    ends = np.array([-1.2, 1.7])
    panel.fill_between(ends, ends - WITHIN, ends + WITHIN, color=plots.COLOURS["grey"], alpha=0.2, linewidth=0)
    panel.set(xlabel="exponent in theory", ylabel="exponent measured, each seed")
    plots.legend_below(panel, columns=3)
    return figure


PAPER: dict[str, Any] = {
    **{"widths": (32, 64, 128, 256, 512), "networks": 10, "steps": 200, "parametrisation": ("ntk", "mup")},
    **{"check_widths": (64, 128, 256, 512), "check_seeds": 5, "check_steps": 10, "check_networks": NETWORKS},
}
SMOKE: dict[str, Any] = {
    **{"widths": (16, 64), "networks": 2, "steps": 10, "parametrisation": ("ntk", "mup")},
    **{"check_widths": (16, 32), "check_seeds": 1, "check_steps": 2, "check_networks": ("dense",)},
}
STUDY = Study(
    name="widths",
    paper="scope",
    scales={"smoke": SMOKE, "paper": PAPER},
    seeds={"smoke": 1, "paper": 1},
    cases=list_cases,
    columns=("network", "parametrisation", "optimiser"),
    measure=measure,
    figures=(
        Figure("widths", "Kernel movement against width", draw_widths),
        Figure("known_exponents", "The width check against exponents that theory gives", draw_known),
    ),
)
