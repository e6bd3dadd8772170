"""Neurons on a plane: multidimensional scaling of cosine distances, step by step, without jumps.

Distances 1 - cos between weight directions are drawn as well as a plane allows by majorisation (each iteration lowers
the stress). A step starts from the layout of the step before and is turned onto it, so that a point moves only when its
neuron does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_SHOWN = 1000
FIRST_ITERATIONS = 60
OPERATIONS = 4e8  # pairs times iterations over all later steps: a few seconds

Points = NDArray[np.float64]


def cosine_distances(vectors: NDArray[Any]) -> NDArray[np.float64]:
    """1 - cos of all pairs of rows; a row without a direction stands at distance 1 from all others."""
    finite = np.where(np.isfinite(vectors), vectors, 0).astype(np.float64)
    length = np.linalg.norm(finite, axis=1, keepdims=True)
    unit = finite / np.where(length > 0, length, 1)
    distance = np.clip(1 - unit @ unit.T, 0, 2)
    np.fill_diagonal(distance, 0)
    return distance


def plane_distances(points: Points) -> NDArray[np.float64]:
    square = (points**2).sum(1)
    return np.sqrt(np.maximum(square[:, None] + square[None] - 2 * points @ points.T, 0))


def stress(points: Points, distance: NDArray[np.float64]) -> float:
    """Sum over pairs of (drawn distance - wanted distance)^2."""
    return float(((plane_distances(points) - distance) ** 2).sum() / 2)


def classical(distance: NDArray[np.float64]) -> Points:
    """The classical start: the two leading directions of the doubly centred squared distances."""
    inner = -0.5 * distance**2
    inner = inner - inner.mean(0) - inner.mean(1)[:, None] + inner.mean()
    block = np.ones((len(inner), 2))
    block[:, 1] = np.arange(len(inner)) % 2 * 2 - 1
    block = inner @ block + 1e-9 * np.stack([np.arange(len(inner)), np.arange(len(inner))[::-1] ** 2], 1)
    for _ in range(30):  # block power iteration: no full decomposition for a start
        block, _ = np.linalg.qr(inner @ block)
    values, turn = np.linalg.eigh(block.T @ inner @ block)
    return np.asarray((block @ turn)[:, ::-1] * np.sqrt(np.maximum(values[::-1], 0)))


def majorise(points: Points, distance: NDArray[np.float64], iterations: int) -> Points:
    """The layout after so many Guttman transforms; the stress never grows."""
    for _ in range(iterations):
        drawn = plane_distances(points)
        ratio = np.divide(distance, drawn, out=np.zeros_like(distance), where=drawn > 1e-12)
        points = (ratio.sum(1)[:, None] * points - ratio @ points) / len(points)
    return points


def turn_onto(points: Points, target: Points) -> Points:
    """Centre ``points`` and rotate or reflect them so that they lie as near ``target`` as possible."""
    centred, goal = points - points.mean(0), target - target.mean(0)
    left, _, right = np.linalg.svd(centred.T @ goal)
    return np.asarray(centred @ (left @ right))


def layout(frames: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Points ``[T, units, 2]`` of the rows of every frame."""
    units = len(frames[0])
    later = int(np.clip(OPERATIONS / max(1, units**2 * (len(frames) - 1)), 3, FIRST_ITERATIONS))
    drawn: list[Points] = []
    for vectors in frames:
        distance = cosine_distances(vectors)
        if not drawn or np.ptp(drawn[-1]) < 1e-9:  # a layout that fell into one point has nothing to start from
            points = majorise(classical(distance), distance, FIRST_ITERATIONS)
            drawn.append(points - points.mean(0))
        else:
            drawn.append(turn_onto(majorise(drawn[-1], distance, later), drawn[-1]))
    return np.stack(drawn).astype(np.float32)


def evenly(count: int, most: int) -> NDArray[np.int64]:
    """At most ``most`` of ``count`` places, spread evenly, first and last among them."""
    return np.unique(np.rint(np.linspace(0, count - 1, min(count, most))).astype(np.int64))
