"""The cells that lines cut a plane into, exactly and in any position: parallel, repeated and concurrent lines included.

Every cell but a lone one has an edge. So walk each line from crossing to crossing: on an edge all other lines have a
definite side, and the line itself has two; these are the patterns of the two cells that share the edge.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unlazy.models.net import GatedNet
from unlazy.runtime import require
from unlazy.theory.regions import RESOLUTION, gate_functions, inner_point

Box = tuple[tuple[float, float], tuple[float, float]]
PLANE: Box = ((-math.inf, math.inf), (-math.inf, math.inf))


def plane_cells(
    net: GatedNet,
    *,
    box: Box | None = None,
    origin: Sequence[float] | None = None,
    axes: Sequence[Sequence[float]] | None = None,
) -> list[Tensor]:
    """The gates of every cell of a linearly gated network in a plane, ``[cells, units]`` per layer.

    The plane is ``origin + a axes[0] + b axes[1]`` (default: the input plane itself), ``box`` the open rectangle of (a, b)
    looked at (default: everything). Each cell is one row, so ``count_cells`` and ``count_path_regions`` of the result are exact.
    """
    inputs = net.settings.inputs
    require(axes is not None or inputs == 2, f"with {inputs} inputs, say which plane: give two axes.")
    directions = np.asarray(np.eye(2) if axes is None else axes, dtype=np.float64)
    base = np.zeros(inputs) if origin is None else np.asarray(origin, dtype=np.float64)
    require(
        directions.shape == (2, inputs) and int(np.linalg.matrix_rank(directions)) == 2 and base.shape == (inputs,),
        f"a plane needs an origin of {inputs} numbers and two axes that are not parallel.",
    )
    functions = np.concatenate(gate_functions(net))  # [layers * units, 1 + d]
    offsets, normals = functions[:, 0] + functions[:, 1:] @ base, functions[:, 1:] @ directions.T
    patterns = line_cells(normals, offsets, PLANE if box is None else box)
    return list(torch.from_numpy(patterns).split(net.settings.width, dim=1))


def line_cells(normals: NDArray[np.float64], offsets: NDArray[np.float64], box: Box = PLANE) -> NDArray[np.bool_]:
    """On which side of every line (normal . p + offset >= 0) each cell lies, ``[cells, lines]``; cells with an interior."""
    require(all(low < high for low, high in box), f"a box is two intervals (low, high) with low < high, got {box}.")
    drawn = np.hypot(*normals.T) > 0  # a normal of zero draws no line: open or closed everywhere
    lines = _drop_repeated_lines(normals[drawn], offsets[drawn])
    of_line = np.full(len(offsets), -1)
    of_line[drawn] = lines.of_row
    found = []
    for index, normal in enumerate(lines.normals):
        sides = _sides(normals, offsets, _edge_points(lines, index, box))
        mine = of_line == index
        for positive in (True, False):
            sides[:, mine] = (normals[mine] @ normal > 0) == positive
            found.append(sides.copy())
    if not any(len(sides) for sides in found):
        lone = np.array([[inner_point(*interval) for interval in box]])
        return _sides(normals, offsets, lone)
    return np.unique(np.concatenate(found), axis=0)


@dataclass(frozen=True)
class _Lines:
    normals: NDArray[np.float64]  # [lines, 2], length 1
    offsets: NDArray[np.float64]  # [lines]
    of_row: NDArray[np.int64]  # which line each given row is


def _drop_repeated_lines(normals: NDArray[np.float64], offsets: NDArray[np.float64]) -> _Lines:
    """The same line given twice, whatever its side and scale, counts once."""
    length = np.hypot(*normals.T)
    normals, offsets = normals / length[:, None], offsets / length
    found: list[int] = []
    of_row = np.empty(len(offsets), dtype=np.int64)
    for row in range(len(offsets)):
        side = np.sign(normals[found] @ normals[row])
        apart = np.hypot(*(normals[found] * side[:, None] - normals[row]).T) + np.abs(
            offsets[found] * side - offsets[row]
        )
        near = np.flatnonzero(apart <= RESOLUTION * (1 + abs(offsets[row])))
        of_row[row] = near[0] if len(near) else len(found)
        if not len(near):
            found.append(row)
    return _Lines(normals[found], offsets[found], of_row)


def _edge_points(lines: _Lines, index: int, box: Box) -> NDArray[np.float64]:
    """A point on every edge of one line inside the box, ``[edges, 2]``; none where the line misses it."""
    normal, along = lines.normals[index], np.array([-lines.normals[index, 1], lines.normals[index, 0]])
    foot = -lines.offsets[index] * normal
    low, high = _range_inside_box(foot, along, box)
    if high - low <= RESOLUTION:
        return np.empty((0, 2))
    slope = lines.normals @ along
    crossing = np.abs(slope) > RESOLUTION
    places = -(lines.normals @ foot + lines.offsets)[crossing] / slope[crossing]
    places = np.sort(places[(places > low) & (places < high)])
    apart = RESOLUTION * (1 + np.abs(places))
    places = places[np.diff(places, prepend=-math.inf) > apart]
    places = places[(places - low > RESOLUTION) & (high - places > RESOLUTION)]
    borders = [low, *places.tolist(), high]
    middles = np.array([inner_point(*edge) for edge in itertools.pairwise(borders)])
    return foot + middles[:, None] * along


def _range_inside_box(foot: NDArray[np.float64], along: NDArray[np.float64], box: Box) -> tuple[float, float]:
    """For which s the point foot + s along lies in the box."""
    low, high = -math.inf, math.inf
    for axis, (least, most) in enumerate(box):
        if abs(along[axis]) <= RESOLUTION:
            if not least < foot[axis] < most:
                return 0.0, 0.0
            continue
        ends = sorted(((least - foot[axis]) / along[axis], (most - foot[axis]) / along[axis]))
        low, high = max(low, ends[0]), min(high, ends[1])
    return low, high


def _sides(
    normals: NDArray[np.float64], offsets: NDArray[np.float64], points: NDArray[np.float64]
) -> NDArray[np.bool_]:
    return points @ normals.T + offsets >= 0
