"""Where gates are constant, exactly: along a curve by walking from boundary to boundary, and path by path.

On a piece of a curve on which no earlier gate changes, the next pre-activations are affine functions of x whose coefficients
are known, so the points at which they cross zero are known in closed form. Cutting there, layer after layer, gives every
region that the curve meets; nothing is sampled. (``arrangement`` does the same for a plane.)

Regions with an interior are meant: a pattern that occurs at single points only is not seen, and boundaries closer together
than ``RESOLUTION`` count as one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor, nn

from unlazy.models.dense_layers import effective_weights
from unlazy.models.gates import HardGate
from unlazy.models.net import GatedNet
from unlazy.runtime import InputError, Unsupported, require

RESOLUTION = 1e-9
MOST_PATHS = 2**24
Affine = NDArray[np.float64]  # [units, 1 + d]: offset and normal of functions of x


# --- half-spaces -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Polyhedron:
    """{x : normals x + offsets >= 0}, an intersection of half-spaces: convex."""

    normals: Float[Tensor, "faces d"]
    offsets: Float[Tensor, " faces"]

    def contains(self, x: Float[Tensor, "n d"]) -> Bool[Tensor, " n"]:
        """Which points lie in it, its faces included."""
        return (x.to(self.normals) @ self.normals.T + self.offsets >= 0).all(1)


def path_polyhedron(net: GatedNet, path: Sequence[int]) -> Polyhedron:
    """A_pi of a linearly gated network: one half-space for every unit on the path (half-space paper, Section 2)."""
    require(
        len(path) == net.settings.depth and all(0 <= unit < net.settings.width for unit in path),
        f"a path names one of {net.settings.width} units in each of {net.settings.depth} layers, got {tuple(path)}.",
    )
    faces = torch.from_numpy(np.stack([layer[unit] for layer, unit in zip(gate_functions(net), path, strict=True)]))
    return Polyhedron(faces[:, 1:].clone(), faces[:, 0].clone())


def gate_functions(net: GatedNet) -> list[Affine]:
    """Offset and normal of every unit's half-space, layer by layer, as the product of the gating matrices."""
    _require_flat_gates(net)
    if not net.settings.has_half_space_gates:
        raise Unsupported(
            f"GatedNet({net.settings.gating_words})",
            "its gates are not half-spaces of the input",
            "circle_pieces and line_pieces cut a curve for ReLU networks and non-linear gating networks too.",
        )
    state, found = _identity(net), []
    for layer in net.gate_layers:
        state = _apply_layer(layer, state)
        found.append(state)
    return found


# --- curves ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pieces:
    """A curve cut where a gate changes. Piece k runs from ``starts[k]`` to ``ends[k]``; ``gates``: ``[pieces, units]`` per layer.

    One piece per row, so what counts patterns or paths of a sample (``count_cells``, ``count_path_regions``) is exact here.
    """

    starts: Float[Tensor, " pieces"]
    ends: Float[Tensor, " pieces"]
    gates: list[Tensor]
    closed: bool  # whether the last piece meets the first


def circle_pieces(net: GatedNet) -> Pieces:
    """The unit circle of the plane by angle, piece by piece, in order."""
    require(net.settings.inputs == 2, f"the circle lies in the plane; this network has {net.settings.inputs} inputs.")
    return _walk(net, _Circle())


def line_pieces(
    net: GatedNet,
    origin: Sequence[float],
    direction: Sequence[float],
    low: float = -math.inf,
    high: float = math.inf,
) -> Pieces:
    """The line ``origin + s direction``, low < s < high, piece by piece, in order."""
    inputs = net.settings.inputs
    require(
        len(origin) == len(direction) == inputs and any(direction) and low < high,
        f"a line needs a point and a direction of {inputs} numbers, and low < high.",
    )
    return _walk(net, _Line(np.array([1.0, *origin]), np.array([0.0, *direction]), low, high))


def path_pieces(pieces: Pieces, path: Sequence[int]) -> list[tuple[float, float]]:
    """The connected parts of A_pi on the curve, as intervals of its parameter (parts that touch count as one)."""
    open_ = torch.stack([layer[:, unit] for layer, unit in zip(pieces.gates, path, strict=True)]).all(0).tolist()
    starts, ends = pieces.starts.tolist(), pieces.ends.tolist()
    parts: list[tuple[float, float]] = []
    for index, inside in enumerate(open_):
        if inside and index and open_[index - 1]:
            parts[-1] = (parts[-1][0], ends[index])
        elif inside:
            parts.append((starts[index], ends[index]))
    if pieces.closed and len(parts) > 1 and open_[0] and open_[-1]:
        parts[0] = (parts.pop()[0] - (ends[-1] - starts[0]), parts[0][1])
    return parts


def count_path_parts(pieces: Pieces, most: int = MOST_PATHS) -> NDArray[np.int16]:
    """In how many connected parts each path's region meets the curve, ``[units, ..., units]``, one axis a layer; 0 = empty.

    A part begins where a path opens: at the first layer whose unit is newly open, with the units before it open on both
    sides of the boundary. So every boundary touches few paths only.
    """
    gates = [layer.numpy() for layer in pieces.gates]
    sizes = [layer.shape[1] for layer in gates]
    require(math.prod(sizes) <= most, f"{math.prod(sizes)} paths are more than {most}; count a smaller network.")
    counts = np.zeros(sizes, dtype=np.int16)
    if pieces.closed:
        counts[np.ix_(*(layer.all(0) for layer in gates))] = 1  # open all around: no beginning
    for index in range(len(pieces.starts)):
        now = [layer[index] for layer in gates]
        before = [layer[index - 1] if index or pieces.closed else np.zeros_like(layer[0]) for layer in gates]
        for layer in range(len(gates)):
            kept = [a & b for a, b in zip(before[:layer], now[:layer], strict=True)]
            counts[np.ix_(*kept, now[layer] & ~before[layer], *now[layer + 1 :])] += 1
    return counts


# --- walking ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Circle:
    """Affine functions of x are sinusoids here. ``at``: (1, x) at a place; ``zeros``: where any of them crosses zero."""

    start: float = 0.0
    end: float = 2 * math.pi
    closed: bool = True

    def at(self, s: float) -> NDArray[np.float64]:
        return np.array([1.0, math.cos(s), math.sin(s)])

    def zeros(self, q: Affine) -> NDArray[np.float64]:
        """|v| cos(s - angle of v) = -c."""
        length = np.hypot(q[:, 1], q[:, 2])
        q, length = q[length > np.abs(q[:, 0])], length[length > np.abs(q[:, 0])]
        centre = np.arctan2(q[:, 2], q[:, 1])
        reach = np.arctan2(np.sqrt((length - q[:, 0]) * (length + q[:, 0])), -q[:, 0])
        return np.concatenate([centre - reach, centre + reach])


@dataclass(frozen=True)
class _Line:
    """The same for a line, ``(1, x) = origin + s direction``."""

    origin: NDArray[np.float64]
    direction: NDArray[np.float64]
    start: float
    end: float
    closed: bool = False

    def at(self, s: float) -> NDArray[np.float64]:
        return self.origin + s * self.direction

    def zeros(self, q: Affine) -> NDArray[np.float64]:
        slope = q @ self.direction
        return -(q @ self.origin)[slope != 0] / slope[slope != 0]


_Curve = _Circle | _Line


def _walk(net: GatedNet, curve: _Curve) -> Pieces:
    _require_flat_gates(net)
    own = net.settings.gating == "own"
    pieces: list[tuple[float, float, Affine, list[NDArray[np.bool_]]]] = [(curve.start, curve.end, _identity(net), [])]
    for number, layer in enumerate(net.value_layers if own else net.gate_layers, start=1):
        rectified, finer = own or number in net.settings.nonlinear_gate_layers, []
        for start, end, state, gates in pieces:
            q = _apply_layer(layer, state)
            for left, right in _cut(curve, start, end, curve.zeros(q)):
                at_middle = q @ curve.at(inner_point(left, right))
                open_ = at_middle > 0 if own else at_middle >= 0
                finer.append((left, right, q * open_[:, None] if rectified else q, [*gates, open_]))
        pieces = finer
    starts, ends, _, patterns = zip(*pieces, strict=True)
    stacked = [torch.from_numpy(np.stack(layer)) for layer in zip(*patterns, strict=True)]
    float64 = torch.float64
    return Pieces(torch.tensor(starts, dtype=float64), torch.tensor(ends, dtype=float64), stacked, curve.closed)


def _cut(curve: _Curve, start: float, end: float, zeros: NDArray[np.float64]) -> list[tuple[float, float]]:
    """The parts of one piece between these zeros; a whole circle is cut open at the first of them."""
    whole_circle = curve.closed and end - start == curve.end - curve.start
    if curve.closed:
        zeros = start + (zeros - start) % (2 * math.pi)
    zeros = np.sort(zeros)
    if not whole_circle:
        zeros = zeros[(zeros - start > RESOLUTION) & (end - zeros > RESOLUTION)]
    kept = zeros[np.diff(zeros, prepend=-math.inf) > RESOLUTION]
    if len(kept) == 0:
        return [(start, end)]
    if whole_circle:
        if len(kept) > 1 and kept[0] + 2 * math.pi - kept[-1] <= RESOLUTION:
            kept = kept[:-1]
        borders = [*kept.tolist(), float(kept[0]) + 2 * math.pi]
    else:
        borders = [start, *kept.tolist(), end]
    return list(itertools.pairwise(borders))


def inner_point(left: float, right: float) -> float:
    """The middle of an interval, or a point inside an unbounded one."""
    if math.isinf(left) and math.isinf(right):
        return 0.0
    if math.isinf(left) or math.isinf(right):
        return right - 1 if math.isinf(left) else left + 1
    return (left + right) / 2


def _apply_layer(layer: nn.Module, state: Affine) -> Affine:
    """A layer applied to affine functions of x."""
    weight, bias = effective_weights(layer)
    q: Affine = weight.double().numpy() @ state
    if bias is not None:
        q[:, 0] += bias.double().numpy()
    return q


def _identity(net: GatedNet) -> Affine:
    return np.eye(net.settings.inputs, 1 + net.settings.inputs, k=1)


def _require_flat_gates(net: GatedNet) -> None:
    if net.members is not None:
        raise InputError("regions are found for one network at a time; take one with member(stack, index).")
    settings = net.settings
    if settings.gating not in ("own", "linear"):
        raise Unsupported(
            f"GatedNet(gating={settings.gating!r})",
            "its gates do not change on hyperplanes",
            "Use gating='own' or 'linear'.",
        )
    if settings.gating == "own" and not isinstance(settings.gate, HardGate):
        raise Unsupported(
            "GatedNet(gating='own')", "soft gates of its own make it curved, not piecewise affine", "Use net.hard()."
        )
