"""The smallest change of a row that changes a classifier's decision, with a proven lower bound of its size.

The decision is constant on every cell of the half-spaces. The straight way to a cell crosses each hyperplane at most once, so the
cells form a graph in which one step crosses one more hyperplane. Cells are visited in the order of their distance; the first one
with another decision is the nearest. If the search ends early, the distance of the next cell is a lower bound. A second bound
needs no search: within a radius only the hyperplanes that are nearer can be crossed, and interval arithmetic over the paths
bounds what their gates can do.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.estimators.path_sum import Array, PathSum
from unlazy.runtime import require

DIRECTIONS = 256  # random directions in which a first flip is sought
MARGIN = 1e-9  # how far inside a cell the returned row lies, in standard deviations
EQUAL = 1e-6  # relative difference of distance and bound below which the answer counts as exact


@dataclass(frozen=True)
class Flip:
    """The nearest row with another decision that was found.

    ``change [d]``: what to add to the row, in raw units. ``decision``: the class after it. ``distance``: the length of the change
    in standard deviations of the columns. No row nearer than ``lower_bound`` has another decision; ``exact``: the two agree.
    Where no other decision was found, ``change`` and ``decision`` are ``None`` and ``distance`` is infinite. ``searched``: cells
    whose distance was computed.
    """

    change: Array | None
    decision: Any
    distance: float
    lower_bound: float
    exact: bool
    searched: int


class _Cells:
    """The half-spaces around one row, in coordinates whose origin is the row and whose unit is a standard deviation."""

    def __init__(self, model: PathSum, row: Array, deviations: Array) -> None:
        self.model = model
        shape = (model.layers, model.members, model.units)
        normals = (model.normals * deviations).transpose(1, 0, 2, 3).reshape(-1, len(row))
        reach = model.pre_activations(row[None])[:, :, 0].reshape(-1)
        lengths = np.linalg.norm(normals, axis=1)
        self.crossable = np.flatnonzero(lengths > 0)
        scale = lengths[self.crossable]
        self.normals, self.reach = normals[self.crossable] / scale[:, None], reach[self.crossable] / scale
        self.open = reach >= 0
        self.signs = np.where(self.open[self.crossable], 1.0, -1.0)
        self.shape = shape
        self.start = self.decide(np.zeros((1, len(self.crossable)), dtype=bool))[0]

    def decide(self, crossed: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The decisions in cells, given by which hyperplanes ``[cells, hyperplanes]`` lie between them and the row."""
        gates = np.tile(self.open, (len(crossed), 1))
        gates[:, self.crossable] ^= crossed
        layered = gates.reshape(len(crossed), *self.shape).transpose(1, 2, 0, 3).astype(np.float64)
        scores = self.model._score(layered, np.zeros((len(crossed), 0)))
        return decisions(scores)

    def crossed_at(self, places: Array) -> NDArray[np.bool_]:
        """Which hyperplanes lie between the row and these places ``[n, d]``."""
        return (places @ self.normals.T + self.reach >= 0) != (self.signs > 0)

    def nearest_point(self, crossed: NDArray[np.bool_], margin: float = 0.0) -> Array | None:
        """The place of a cell that is nearest to the row, ``None`` if the cell is empty.

        Least-distance programming (Lawson and Hanson): minimise |z| subject to G z >= g through non-negative least squares.
        """
        from scipy.optimize import nnls

        signs = np.where(crossed, -self.signs, self.signs)
        matrix = np.concatenate([(signs[:, None] * self.normals).T, (margin - signs * self.reach)[None]])
        goal = np.zeros(len(matrix))
        goal[-1] = 1
        weights, length = nnls(matrix, goal, maxiter=20 * matrix.shape[1])
        if length < 1e-9:
            return None
        rest = matrix @ weights - goal
        return np.asarray(-rest[:-1] / rest[-1])

    def first_flip(self, direction: Array) -> Array | None:
        """A place in the first cell along a ray in which the decision differs; ``None`` if there is none."""
        slopes = self.normals @ direction
        with np.errstate(divide="ignore", invalid="ignore"):
            times = -self.reach / slopes
        times = np.sort(times[np.isfinite(times) & (times > 0)])
        if not len(times):
            return None
        middles = np.concatenate([(times[1:] + times[:-1]) / 2, [times[-1] * 2 + 1]])
        places = middles[:, None] * direction
        differs = self.decide(self.crossed_at(places)) != self.start
        return places[int(differs.argmax())] if differs.any() else None

    def interval_bound(self) -> float:
        """A distance within which the decision cannot change: the largest at which interval arithmetic over the paths says so."""
        distances = np.abs(self.reach)
        order = np.sort(distances)
        low, high = 0, len(order)  # certified below order[low - 1] .. not certified with order[high] crossed
        while low < high:
            middle = (low + high) // 2
            if self._certain(distances <= order[middle]):
                low = middle + 1
            else:
                high = middle
        return float(order[low]) if low < len(order) else float("inf")

    def _certain(self, free: NDArray[np.bool_]) -> bool:
        """Whether the decision is the same for all values of these gates."""
        least, most = self.open.astype(np.float64), self.open.astype(np.float64)
        least[self.crossable[free]], most[self.crossable[free]] = 0.0, 1.0
        least, most = least.reshape(self.shape), most.reshape(self.shape)
        model = self.model
        low = high = model.experts
        for layer in range(model.layers):
            if layer:
                up, down = np.maximum(model.links[:, layer - 1], 0), np.minimum(model.links[:, layer - 1], 0)
                low, high = (
                    np.einsum("sij,sj->si", up, low) + np.einsum("sij,sj->si", down, high),
                    np.einsum("sij,sj->si", up, high) + np.einsum("sij,sj->si", down, low),
                )
            low, high = (
                np.where(low < 0, most[layer], least[layer]) * low,
                np.where(high > 0, most[layer], least[layer]) * high,
            )
        start, outputs = int(self.start), len(model.intercept)
        if outputs == 1:
            readout, intercept = model.readout * (1 if start else -1), model.intercept * (1 if start else -1)
        else:
            others = [number for number in range(outputs) if number != start]
            readout = model.readout[:, [start]] - model.readout[:, others]
            intercept = model.intercept[start] - model.intercept[others]
        up, down = np.maximum(readout, 0), np.minimum(readout, 0)
        worst = np.einsum("sku,su->k", up, low) + np.einsum("sku,su->k", down, high) + intercept
        return bool((worst > 0).all())


def decisions(scores: Array) -> NDArray[np.int64]:
    """The numbers of the classes that scores ``[n, outputs]`` decide for."""
    return (scores[:, 0] > 0).astype(np.int64) if scores.shape[1] == 1 else scores.argmax(1)


def nearest_flip(model: PathSum, row: Array, deviations: Array, cells: int) -> Flip:
    """See :class:`Flip`; ``decision`` is the number of the class. At most ``cells`` cells are searched."""
    require(cells >= 1, f"cells must be at least 1, got {cells!r}.")
    require(
        model.expert_normals is None, "nearest_flip needs experts='constant', whose decision is constant on a cell."
    )
    around = _Cells(model, row, deviations)
    best, length = _descend(around)
    searched, reached = 0, float("inf")
    for reached, crossed, place in itertools.islice(_by_distance(around, length), cells + 1):
        if searched == cells or reached >= length:
            break
        searched += 1
        if crossed is None or place is None:
            continue
        if around.decide(crossed[None])[0] != around.start:
            inside = around.nearest_point(crossed, MARGIN)
            if inside is not None:
                best, length = inside, float(np.linalg.norm(place))
                break
    else:
        reached = length  # every cell that is nearer was searched
    bound = min(max(min(reached, length), around.interval_bound()), length)
    if best is None:
        return Flip(None, None, float("inf"), bound, bound == float("inf"), searched)
    decision = int(around.decide(around.crossed_at(best[None]))[0])
    return Flip(best * deviations, decision, length, bound, length - bound <= EQUAL * max(1.0, length), searched)


def _descend(around: _Cells) -> tuple[Array | None, float]:
    """A place with another decision and its distance, by search along rays: an upper bound for the search over cells."""
    random = np.random.default_rng(0).normal(size=(DIRECTIONS, around.normals.shape[1]))
    rays = np.concatenate([random / np.linalg.norm(random, axis=1, keepdims=True), around.normals, -around.normals])
    found = [place for place in map(around.first_flip, rays) if place is not None]
    best, length = None, float("inf")
    for place in sorted(found, key=np.linalg.norm)[:4]:
        at: Array | None = place
        while at is not None:
            crossed = around.crossed_at(at[None])[0]
            near, inside = around.nearest_point(crossed), around.nearest_point(crossed, MARGIN)
            if near is None or inside is None or np.linalg.norm(near) >= length * (1 - 1e-12):
                break
            best, length = inside, float(np.linalg.norm(near))
            at = around.first_flip(inside)
    return best, length


Visit = tuple[float, NDArray[np.bool_] | None, Array | None]


def _by_distance(around: _Cells, limit: float) -> Iterator[Visit]:
    """Cells in the order of their distance, up to ``limit``, each as (distance, crossed hyperplanes, nearest place).

    A step that found a cell empty, or farther than its bound, gives the bound alone: it costs as much as a visit.
    """
    distances, count = np.abs(around.reach), len(around.reach)
    ticket = itertools.count()
    queue: list[tuple[float, int, frozenset[int], Array | None]] = [(0.0, next(ticket), frozenset(), None)]
    known = {frozenset[int]()}
    while queue:
        bound, _, cell, place = heapq.heappop(queue)
        crossed = np.zeros(count, dtype=bool)
        crossed[list(cell)] = True
        if place is None:
            place = around.nearest_point(crossed)
            distance = bound if place is None else max(bound, float(np.linalg.norm(place)))
            if place is None or distance > bound + 1e-12:
                yield bound, None, None
                if place is not None and distance < limit:
                    heapq.heappush(queue, (distance, next(ticket), cell, place))
                continue
        yield bound, crossed, place
        for one in np.flatnonzero((distances < limit) & ~crossed):
            child = cell | {int(one)}
            if child not in known:
                known.add(child)
                heapq.heappush(queue, (max(bound, float(distances[one])), next(ticket), child, None))
