"""Four paths through one small DLGN and their regions in the plane: our own drawing for the paper's Figure 8.

Of that figure only the caption is known to us, so the network and its paths are ours.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy import plots
from unlazy.kernels.overlap import hard_gates
from unlazy.models.build import build
from unlazy.models.gates import HardGate
from unlazy.models.spec import Init, NetSpec
from unlazy.plots import COLOURS
from unlazy.studies.study import Results

WIDTH, DEPTH, SEED, SCALE = 4, 3, 13, 3.0  # a start at which several paths have regions with three sides
REACH, PIXELS = 2.0, 201  # the drawn square is [-2, 2]^2
SHOWN_SHARE = 0.02  # of the square: least that a gate of a drawn path cuts off
PATH_COLOURS = ("blue", "orange", "green", "red")
Path = tuple[int, ...]


def open_gates() -> list[NDArray[np.bool_]]:
    """For every layer of the drawn network, where each unit's gate is open: ``[units, pixels, pixels]``."""
    side = torch.linspace(-REACH, REACH, PIXELS)
    points = torch.stack([*torch.meshgrid(side, side, indexing="xy")], dim=-1).reshape(-1, 2)
    spec = NetSpec(2, width=WIDTH, depth=DEPTH, experts="constant", gate=HardGate(4.0), init=Init("torch", SCALE))
    net = build(spec, seed=SEED)
    return [layer.mT.reshape(WIDTH, PIXELS, PIXELS).numpy() for layer in hard_gates(net, points)]


def path_region(gates: list[NDArray[np.bool_]], path: Path) -> NDArray[np.bool_]:
    """Where all gates of a path are open, ``[pixels, pixels]``."""
    return np.asarray(np.logical_and.reduce([layer[unit] for layer, unit in zip(gates, path, strict=True)]))


def choose_paths(gates: list[NDArray[np.bool_]]) -> list[Path]:
    """Four paths, largest region first: every gate cuts something off, and no two paths share more than one unit."""
    every = [path for path in product(range(WIDTH), repeat=DEPTH) if least_cut(gates, path) > SHOWN_SHARE]
    chosen: list[Path] = []
    for path in sorted(every, key=lambda path: -path_region(gates, path).mean()):
        if all(sum(one == other for one, other in zip(path, earlier, strict=True)) <= 1 for earlier in chosen):
            chosen.append(path)
    return chosen[: len(PATH_COLOURS)]


def least_cut(gates: list[NDArray[np.bool_]], path: Path) -> float:
    """The least share of the square that one of the path's gates alone cuts off; 0 if the path has no region there."""
    region = float(path_region(gates, path).mean())
    others = [[*range(layer), *range(layer + 1, DEPTH)] for layer in range(DEPTH)]
    without = [path_region([gates[i] for i in kept], tuple(path[i] for i in kept)) for kept in others]
    return min(float(wider.mean()) - region for wider in without) if region > 0 else 0.0


def draw_four_paths(results: Results) -> plots.Figure:
    """Our own drawing: of the paper's Figure 8 only the caption is known to us. One DLGN with two inputs and three layers of four
    units, at its random start. Above: a path takes one unit of every layer. Below: each of its gates is open on one side of a
    line (grey), and the path is active where all three are open: a convex region.
    """
    gates = open_gates()
    figure, axes = plots.grid(2, len(PATH_COLOURS), (2.2, 2.2))
    for (graph, plane), path, name in zip(axes.T, choose_paths(gates), PATH_COLOURS, strict=True):
        _draw_graph(graph, path, COLOURS[name])
        sides = np.linspace(-REACH, REACH, PIXELS)
        plane.contourf(sides, sides, path_region(gates, path), levels=[0.5, 1.5], colors=[COLOURS[name]], alpha=0.6)
        for layer, unit in zip(gates, path, strict=True):
            plane.contour(sides, sides, layer[unit], levels=[0.5], colors=[COLOURS["grey"]], linewidths=0.8)
        plane.set(aspect="equal", xlim=(-REACH, REACH), ylim=(-REACH, REACH), xticks=[-2, 0, 2], yticks=[-2, 0, 2])
        graph.set_title("units " + ", ".join(str(unit + 1) for unit in path))
    axes[1, 0].set_ylabel("second input")
    for axis in axes[1]:
        axis.set_xlabel("first input")
    return figure


def _draw_graph(axis: plots.Axes, path: Path, colour: str) -> None:
    """The units of the network as dots, with every edge between layers; those of the path in colour."""
    places = [(layer, WIDTH - unit) for layer in range(1, DEPTH + 1) for unit in range(WIDTH)]
    for (one, top), (other, bottom) in product(places, places):
        if other == one + 1:
            axis.plot([one, other], [top, bottom], color=COLOURS["grey"], linewidth=0.3)
    middle = (WIDTH + 1) / 2
    line = [(0, middle), *((layer, WIDTH - unit) for layer, unit in enumerate(path, 1)), (DEPTH + 1, middle)]
    axis.plot(*zip(*places, strict=True), "o", color="white", markeredgecolor=COLOURS["grey"], markersize=7)
    axis.plot(*zip(*line, strict=True), "-o", color=colour, linewidth=2, markersize=7)
    axis.text(-0.15, middle, "x", ha="right", va="center")
    axis.set_axis_off()
