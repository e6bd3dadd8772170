"""Neurons on a plane: multidimensional scaling of cosine distances, step by step, without jumps.

Majorisation places the points so that their distances come near 1 - cos between weight directions (each iteration lowers the
stress). Every step starts from the layout of the step before and is rotated onto it, so that a point moves only when its
neuron does.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import StoreError
from unlazy.studio.answers import NotFound
from unlazy.studio.run_reader import RunReader, even_indices

MOST_SHOWN = 1000
FIRST_ITERATIONS = 60
OPERATIONS = 4e8  # pairs times iterations, summed over all steps but the first: a few seconds

Points = NDArray[np.float64]


def cosine_distances(vectors: NDArray[Any]) -> NDArray[np.float64]:
    """1 - cos of all pairs of rows; a zero row has distance 1 from all others."""
    finite = np.where(np.isfinite(vectors), vectors, 0).astype(np.float64)
    length = np.linalg.norm(finite, axis=1, keepdims=True)
    unit = finite / np.where(length > 0, length, 1)
    distance = np.clip(1 - unit @ unit.T, 0, 2)
    np.fill_diagonal(distance, 0)
    return distance


def _plane_distances(points: Points) -> NDArray[np.float64]:
    """Euclidean distances of all pairs of points."""
    square = (points**2).sum(1)
    return np.sqrt(np.maximum(square[:, None] + square[None] - 2 * points @ points.T, 0))


def stress(points: Points, distance: NDArray[np.float64]) -> float:
    """Sum over pairs of (drawn distance - wanted distance)^2."""
    return float(((_plane_distances(points) - distance) ** 2).sum() / 2)


def classical_scaling(distance: NDArray[np.float64]) -> Points:
    """Classical scaling: points along the two leading directions of the doubly centred squared distances."""
    inner = -0.5 * distance**2
    inner = inner - inner.mean(0) - inner.mean(1)[:, None] + inner.mean()
    block = np.ones((len(inner), 2))
    block[:, 1] = np.arange(len(inner)) % 2 * 2 - 1
    block = inner @ block + 1e-9 * np.stack([np.arange(len(inner)), np.arange(len(inner))[::-1] ** 2], 1)
    for _ in range(30):  # block power iteration: cheaper than a full decomposition
        block, _ = np.linalg.qr(inner @ block)
    values, turn = np.linalg.eigh(block.T @ inner @ block)
    return np.asarray((block @ turn)[:, ::-1] * np.sqrt(np.maximum(values[::-1], 0)))


def majorise(points: Points, distance: NDArray[np.float64], iterations: int) -> Points:
    """Apply ``iterations`` Guttman transforms to a layout; none of them raises the stress."""
    for _ in range(iterations):
        drawn = _plane_distances(points)
        ratio = np.divide(distance, drawn, out=np.zeros_like(distance), where=drawn > 1e-12)
        points = (ratio.sum(1)[:, None] * points - ratio @ points) / len(points)
    return points


def rotate_onto(points: Points, target: Points) -> Points:
    """Centre ``points`` and rotate or reflect them so that they lie as near ``target`` as possible."""
    centred, goal = points - points.mean(0), target - target.mean(0)
    left, _, right = np.linalg.svd(centred.T @ goal)
    return np.asarray(centred @ (left @ right))


def layout_frames(frames: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Lay out the rows of every frame; returns points ``[T, units, 2]``. Each frame starts from the one before."""
    units = len(frames[0])
    later = int(np.clip(OPERATIONS / max(1, units**2 * (len(frames) - 1)), 3, FIRST_ITERATIONS))
    drawn: list[Points] = []
    for vectors in frames:
        distance = cosine_distances(vectors)
        if not drawn or np.ptp(drawn[-1]) < 1e-9:  # all points coincide: start anew
            points = majorise(classical_scaling(distance), distance, FIRST_ITERATIONS)
            drawn.append(points - points.mean(0))
        else:
            drawn.append(rotate_onto(majorise(drawn[-1], distance, later), drawn[-1]))
    return np.stack(drawn).astype(np.float32)


@dataclass(frozen=True)
class NeuronLayouts:
    """Neurons as points of a plane: ``points [T, shown, 2]`` at ``steps``; ``shown``: which of the ``units`` are drawn."""

    steps: list[int]
    units: int
    shown: NDArray[np.int64]
    points: NDArray[np.float32]
    problems: list[str]


def layouts_of_run(reader: RunReader, quantity: str, member: int) -> NeuronLayouts:
    """Neurons on a plane at every step, without jumps; units beyond the first thousand are thinned even_indices."""
    frames: list[NDArray[Any]] = []
    steps, problems = [], []
    for step in reader.thin_steps(quantity, member):
        try:
            values = reader.find_array(quantity, step, member).read()
            frame = values.reshape(-1, values.shape[-1])
            if not frames or frame.shape == frames[0].shape:
                frames.append(frame)
                steps.append(step)
        except (StoreError, ValueError, IndexError) as error:
            problems.append(str(error))
    if not frames or len(frames[0]) < 2:
        raise NotFound(f"{quantity} of {reader.key} cannot be drawn as points. {' '.join(problems)}".strip())
    shown = even_indices(len(frames[0]), MOST_SHOWN)
    return NeuronLayouts(steps, len(frames[0]), shown, layout_frames([frame[shown] for frame in frames]), problems)


def layouts_json(reader: RunReader, quantity: str, member: int) -> dict[str, Any]:
    """The layouts of a run as JSON; points as base64 of little-endian float32."""
    found = layouts_of_run(reader, quantity, member)
    return {
        "steps": found.steps,
        "units": found.units,
        "shown": found.shown.tolist(),
        "points": base64.b64encode(found.points.astype("<f4").tobytes()).decode(),
        "problems": found.problems,
    }
