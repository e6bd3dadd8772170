"""A half-space network as what it is: a sum over paths of gates times experts, in plain NumPy.

    f(x) = intercept + sum over paths p of  1[x lies in every half-space of p] * expert_p(x)

A path passes one unit of every layer of one member. Its expert is the product of the weights along it (times the first layer's
linear function of x, with linear experts). Predictions and explanations both come from this class, so that they cannot differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import require

Array = NDArray[np.float64]
ROWS_IN_CACHE = 768  # rows predicted at a time
WIDE = 32  # columns from which half-spaces are first evaluated in float32
MOST_LISTED = 1_000_000  # active paths that are listed one by one


@dataclass(frozen=True)
class ActivePath:
    """One active path: its member, its unit in every layer, and what it adds to the score."""

    member: int
    units: tuple[int, ...]
    contribution: float


@dataclass(frozen=True)
class _Turned:
    """The numbers of a sum over paths, laid out for prediction: half-spaces of all layers and members one below the other."""

    normals: Array  # [half-spaces, d + 1]: normals and offsets
    first: Array | None  # [members, units, units]: experts and first link in one
    readout: Array  # [members * units, outputs]

    def contains(self, x: Array) -> NDArray[np.bool_]:
        """Which half-spaces hold which rows: ``[half-spaces, n]`` for ``x [d + 1, n]`` whose last row is 1."""
        return self._contains_wide(x) if len(x) > WIDE else np.asarray(self.normals @ x >= 0)

    @cached_property
    def _small(self) -> tuple[Array, Array, NDArray[np.float32]]:
        """Weights of the columns ``[d, 1]``; lengths of the normals divided by them; unit normals in float32."""
        normals = self.normals[:, :-1]
        weights = np.sqrt(np.square(normals).mean(0))
        weights = np.where(weights > 0, weights, 1.0)
        lengths = np.linalg.norm(normals / weights, axis=1, keepdims=True)
        lengths = np.where(lengths > 0, lengths, 1.0)
        return weights[:, None], lengths, (normals / weights / lengths).astype(np.float32)

    def _contains_wide(self, x: Array) -> NDArray[np.bool_]:
        """In float32, around the first row; in float64 where the error bound of that leaves the side open.

        A product of d terms in float32 is off by at most d + 4 roundings of the product of lengths (and of the offset).
        """
        weights, lengths, normals = self._small
        centre = x[:, :1]
        columns = np.ones((x.shape[1], len(x)), dtype=np.float32).T
        rows = columns[:-1]
        np.subtract(x[:-1], centre[:-1], out=rows, casting="same_kind")
        rows *= weights.astype(np.float32)
        offsets = (self.normals @ centre) / lengths
        reach = np.concatenate([normals, offsets.astype(np.float32)], axis=1) @ columns
        longest = math.sqrt(float(np.einsum("dn,dn->n", rows, rows).max())) + float(np.abs(offsets).max())
        error = (len(x) + 4) * float(np.finfo(np.float32).eps) * longest
        if not math.isfinite(error):
            return np.asarray(self.normals @ x >= 0)
        inside = reach >= 0
        unsure = np.flatnonzero(np.abs(reach, out=reach) <= np.float32(error))
        if len(unsure):
            spaces, numbers = np.divmod(unsure, x.shape[1])
            inside[spaces, numbers] = (self.normals[spaces] * x[:, numbers].T).sum(1) >= 0
        return inside


@dataclass(frozen=True)
class PathSum:
    """The numbers of a fitted network, in the units of the raw columns.

    Unit i of layer l of member s is open where ``normals[s, l, i] . x + offsets[s, l, i] >= 0``. ``experts [s, i]`` (and
    ``expert_normals [s, i, d]`` of linear experts): the first value layer. ``links [s, l, to, from]``: the value layers after it.
    ``beta``: the slope of soft gates, which are no half-spaces; ``None`` for hard ones.
    """

    normals: Array  # [members, layers, units, d]
    offsets: Array  # [members, layers, units]
    experts: Array  # [members, units]
    expert_normals: Array | None  # [members, units, d]
    links: Array  # [members, layers - 1, units, units]
    readout: Array  # [members, outputs, units]
    intercept: Array  # [outputs]
    beta: float | None = None

    @property
    def members(self) -> int:
        """How many networks are summed."""
        return len(self.normals)

    @property
    def layers(self) -> int:
        """Gated layers of each network."""
        return int(self.normals.shape[1])

    @property
    def units(self) -> int:
        """Units of each layer."""
        return int(self.normals.shape[2])

    def arrays(self) -> dict[str, Array]:
        """All arrays by name; the inverse of ``PathSum(**arrays)``."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "beta"}
        return {name: array for name, array in found.items() if array is not None}

    @classmethod
    def from_arrays(cls, arrays: dict[str, Any], beta: float | None) -> PathSum:
        """The inverse of :meth:`arrays`."""
        return cls(**{"expert_normals": None, **arrays}, beta=beta)

    # --- the function --------------------------------------------------------------------------------------

    def __call__(self, x: Array) -> Array:
        """Scores ``[n, outputs]``."""
        blocks = np.array_split(x, max(1, math.ceil(len(x) / ROWS_IN_CACHE)))
        if self.beta is not None:
            return np.concatenate([self._score(self.gates(block), block) for block in blocks])
        return np.concatenate([self._hard_score(block) for block in blocks])

    def _hard_score(self, x: Array) -> Array:
        """:meth:`_score` in half its time: laid out ``[units, rows]``, all half-spaces in one product, gates as booleans."""
        own = self._turned
        is_open = own.contains(_with_ones(x).T).reshape(self.layers, self.members, self.units, len(x))
        h: Array
        if own.first is None:
            h = self._first_values(x).transpose(0, 2, 1) * is_open[0]
        else:
            h = np.matmul(own.first, is_open[0].astype(np.float64))
            if self.layers > 1:
                np.multiply(h, is_open[1], out=h)
        for layer in range(1 if own.first is None else 2, self.layers):
            h = np.matmul(self.links[:, layer - 1], h)
            np.multiply(h, is_open[layer], out=h)
        return np.asarray(h.reshape(-1, len(x)).T @ own.readout + self.intercept)

    @cached_property
    def _turned(self) -> _Turned:
        """The numbers as :meth:`_hard_score` needs them, laid out once; so the arrays must not be changed after a prediction."""
        both = np.concatenate([self.normals, self.offsets[..., None]], axis=-1)
        normals = np.ascontiguousarray(both.transpose(1, 0, 2, 3)).reshape(-1, both.shape[-1])
        readout = self.readout.transpose(0, 2, 1).reshape(-1, len(self.intercept))
        first = None
        if self.expert_normals is None and self.layers > 1:
            first = self.links[:, 0] * self.experts[:, None, :]  # constant experts go into the first link
        return _Turned(normals, first, np.ascontiguousarray(readout))

    def pre_activations(self, x: Array) -> Array:
        """``normals . x + offsets``, ``[layers, members, n, units]``: positive inside a half-space."""
        reach = self._turned.normals @ _with_ones(x).T
        return reach.reshape(self.layers, self.members, self.units, len(x)).transpose(0, 1, 3, 2)

    def gates(self, x: Array) -> Array:
        """0 or 1 (between them for soft gates) for every unit, ``[layers, members, n, units]``."""
        q = self.pre_activations(x)
        return (q >= 0).astype(np.float64) if self.beta is None else 1 / (1 + np.exp(-self.beta * q))

    def _first_values(self, x: Array) -> Array:
        """The first value layer before its gates, ``[members, n or 1, units]``."""
        constant = self.experts[:, None, :]
        return constant if self.expert_normals is None else x @ self.expert_normals.transpose(0, 2, 1) + constant

    def _score(self, gates: Array, x: Array, *, absolute: bool = False) -> Array:
        """The sum over paths under these gates; ``absolute``: of the absolute values of their contributions."""
        change = np.abs if absolute else np.asarray
        h = gates[0] * change(self._first_values(x))
        for layer in range(1, self.layers):
            h = gates[layer] * (h @ change(self.links[:, layer - 1]).transpose(0, 2, 1))
        total: Array = (h @ change(self.readout).transpose(0, 2, 1)).sum(0)
        return total if absolute else total + self.intercept

    # --- explanations --------------------------------------------------------------------------------------

    def require_half_spaces(self) -> None:
        """Raise if the gates are soft: their network is not a sum over polyhedra."""
        require(
            self.beta is None,
            "soft gates are no half-spaces, so there is nothing exact to explain; fit with gate='hard'.",
        )

    def absolute_sum(self, x: Array) -> Array:
        """Sum of the sizes of the contributions of all active paths, ``[n, outputs]``: what shares of an explanation refer to."""
        self.require_half_spaces()
        return self._score(self.gates(x), x, absolute=True)

    def unit_contributions(self, x: Array, output: int) -> Array:
        """What all active paths through each unit add to one score together, ``[n, members, layers, units]``.

        Exact, in one pass forward and one backward: (sum over the paths up to the unit) times (sum over those after it). Within a
        layer the units' contributions add up to the score less the intercept.
        """
        self.require_half_spaces()
        gates = self.gates(x)
        forward = [gates[0] * self._first_values(x)]
        for layer in range(1, self.layers):
            forward.append(gates[layer] * (forward[-1] @ self.links[:, layer - 1].transpose(0, 2, 1)))
        backward = [np.broadcast_to(self.readout[:, output, None, :], forward[-1].shape)]
        for layer in reversed(range(1, self.layers)):
            backward.append((gates[layer] * backward[-1]) @ self.links[:, layer - 1])
        both = [ahead * behind for ahead, behind in zip(forward, reversed(backward), strict=True)]
        return np.stack(both, axis=2).transpose(1, 0, 2, 3)

    def count_active(self, x: Array) -> Array:
        """How many paths are active on each row."""
        self.require_half_spaces()
        return self.gates(x).sum(-1).prod(0).sum(0)

    def largest_paths(self, x: Array, output: int, top: int) -> list[ActivePath]:
        """The ``top`` active paths of one row ``[d]`` that contribute most to one score in size, largest first.

        Exact for any number of paths: the best ``top`` ways to reach each unit are kept layer by layer, because a path's
        contribution is a product along it.
        """
        self.require_half_spaces()
        row = x[None]
        gates, first = self.gates(row)[:, :, 0], self._first_values(row)[:, 0]
        values = (gates[0] * first)[:, :, None]  # [members, units, kept]
        back: list[NDArray[np.int64]] = []
        for layer in range(1, self.layers):
            reach = values[:, None] * self.links[:, layer - 1, :, :, None]  # [members, to, from, kept]
            reach = (gates[layer][:, :, None, None] * reach).reshape(self.members, self.units, -1)
            chosen = _largest(reach, top)
            values = np.take_along_axis(reach, chosen, -1)
            back.append(chosen)
        ends = (values * self.readout[:, output, :, None]).reshape(-1)
        widths = [1, *(chosen.shape[-1] for chosen in back)][
            : len(back)
        ]  # how many ways to each unit a layer chose from
        found = []
        for end in _largest(ends, top):
            if ends[end] == 0:
                break
            member, unit, kept = np.unravel_index(end, values.shape)
            units = [int(unit)]
            for chosen, width in zip(reversed(back), reversed(widths), strict=True):
                unit, kept = divmod(int(chosen[member, unit, kept]), width)
                units.append(int(unit))
            found.append(ActivePath(int(member), tuple(reversed(units)), float(ends[end])))
        return found

    def all_paths(self, x: Array, output: int) -> list[ActivePath]:
        """Every active path of one row ``[d]``, largest contribution in size first."""
        count = int(self.count_active(x[None])[0])
        require(
            count <= MOST_LISTED, f"{count} active paths are more than {MOST_LISTED}; ask for the largest, top=100."
        )
        gates, first = self.gates(x[None])[:, :, 0].astype(bool), self._first_values(x[None])[:, 0]
        found = []
        for member in range(self.members):
            ways: list[tuple[tuple[int, ...], Any]] = [
                ((int(unit),), first[member, unit]) for unit in np.flatnonzero(gates[0, member])
            ]
            for layer in range(1, self.layers):
                link, open_units = self.links[member, layer - 1], np.flatnonzero(gates[layer, member])
                ways = [((*units, int(to)), value * link[to, units[-1]]) for units, value in ways for to in open_units]
            weights = self.readout[member, output]
            found += [ActivePath(member, units, float(value * weights[units[-1]])) for units, value in ways]
        return sorted(found, key=lambda path: -abs(path.contribution))

    def is_active(self, member: int, units: tuple[int, ...], gates: Array) -> NDArray[np.bool_]:
        """On which samples a path is active, given the gates of all units."""
        return np.logical_and.reduce([gates[layer, member, :, unit] > 0 for layer, unit in enumerate(units)])


def _with_ones(x: Array) -> Array:
    """The rows with a last column of 1."""
    found = np.empty((len(x), x.shape[1] + 1))
    found[:, :-1], found[:, -1] = x, 1.0
    return found


def _largest(values: Array, top: int) -> NDArray[np.int64]:
    """Indices of the ``top`` largest absolute values along the last axis, largest first; ties by index."""
    return np.argsort(-np.abs(values), axis=-1, kind="stable")[..., :top]
