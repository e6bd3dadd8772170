"""A half-space network as what it is: a sum over paths of gates times experts, in plain NumPy.

    f(x) = intercept + sum over paths p of  1[x lies in every half-space of p] * expert_p(x)

A path passes one unit of every layer of one member. Its expert is the product of the weights along it (times the first layer's
linear function of x, with linear experts). Predictions and explanations both come from this class, so that they cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import require

Array = NDArray[np.float64]
ROWS_IN_CACHE = 512  # rows predicted at a time
MOST_LISTED = 1_000_000  # active paths that are listed one by one


@dataclass(frozen=True)
class ActivePath:
    """One active path: its member, its unit in every layer, and what it adds to the score."""

    member: int
    units: tuple[int, ...]
    contribution: float


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
        blocks = [x[first : first + ROWS_IN_CACHE] for first in range(0, max(len(x), 1), ROWS_IN_CACHE)]
        if self.beta is not None:
            return np.concatenate([self._score(self.gates(block), block) for block in blocks])
        return np.concatenate([self._hard_score(block) for block in blocks])

    def _hard_score(self, x: Array) -> Array:
        """:meth:`_score` without an array of gates: closed units are multiplied by 0 in place."""
        h = np.empty((self.members, len(x), self.units))
        h[:] = self._first_values(x)
        for layer in range(self.layers):
            if layer:
                h = h @ self.links[:, layer - 1].transpose(0, 2, 1)
            reach = x @ self.normals[:, layer].transpose(0, 2, 1)
            np.multiply(h, reach >= -self.offsets[:, layer, None], out=h)  # reach + offset >= 0, also after rounding
        return np.asarray((h @ self.readout.transpose(0, 2, 1)).sum(0) + self.intercept)

    def pre_activations(self, x: Array) -> Array:
        """``normals . x + offsets``, ``[layers, members, n, units]``: positive inside a half-space."""
        return np.asarray(x @ self.normals.transpose(1, 0, 3, 2) + self.offsets.transpose(1, 0, 2)[:, :, None])

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


def _largest(values: Array, top: int) -> NDArray[np.int64]:
    """Indices of the ``top`` largest absolute values along the last axis, largest first; ties by index."""
    return np.argsort(-np.abs(values), axis=-1, kind="stable")[..., :top]
