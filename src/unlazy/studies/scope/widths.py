"""Kernel movement against width: NTK and maximal-update parametrisations of one ReLU network."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from unlazy import plots
from unlazy.claims.rule import interval
from unlazy.data.patterns import Patterns
from unlazy.kernels.compare import kernel_distance
from unlazy.models.build import build_stack
from unlazy.models.net import GatedNet
from unlazy.models.spec import Init, relu_spec
from unlazy.probes.classes import dense_tangent_kernel
from unlazy.studies.study import Case, Figure, Results, Study, Work
from unlazy.studies.table import Rows

INPUTS, SAMPLES, DEPTH, RATE = 64, 64, 2, 0.3


def measure(case: Case, work: Work) -> Rows:
    """How far gradient descent on squared errors moves the tangent kernel at each width, and the final losses, for all seeds."""
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


def width_exponents(widths: ArrayLike, movement: ArrayLike) -> NDArray[np.float64]:
    """The slope of log movement against log width, for each seed."""
    x, y = np.log(np.asarray(widths, dtype=float)), np.log(np.asarray(movement, dtype=float))
    centred = x - x.mean()
    return np.asarray(centred @ y / (centred @ centred))


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


PAPER: dict[str, Any] = {"widths": (32, 64, 128, 256, 512), "networks": 10, "steps": 200}
STUDY = Study(
    name="widths",
    paper="scope",
    scales={"smoke": {"widths": (16, 64), "networks": 2, "steps": 10}, "paper": PAPER},
    seeds={"smoke": 1, "paper": 1},
    varies={"parametrisation": ("ntk", "mup")},
    measure=measure,
    figures=(Figure("widths", "Kernel movement against width", draw_widths),),
)
