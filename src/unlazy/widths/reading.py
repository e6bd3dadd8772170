"""From sizes at several widths m to exponents, a reading, the layers that deviate, and multipliers for maximal updates.

Theory (Yang and Hu 2021; m = width, rates constant in m unless a parametrisation says otherwise). With z = W h a layer's
output and g = df/dz its backward signal, one step of gradient descent at rate r changes z at a fixed input by r g <h, h>,
under Adam by about r sign(g) |h|_1. Exponents of m follow:

                        start of z, f    g       own change of z (first, hidden), of f    total change of f
    standard, SGD       0, 0             -1/2    -1/2, +1/2; +1                            +1
    standard, Adam      0, 0             -1/2    0, +1; +1                                 +3/2 (the hidden layers', along g)
    NTK, both           0, 0             -1/2    -1/2, -1/2; 0                             0
    maximal update      0, -1/2          -1      0, 0; 0                                   0
    mean field (deep)   below 0, below 0         0, 0; 0                                   0

All exponents are multiples of 1/2, so an exponent is taken for the theory's if it is within ``BORDER``, half of that spacing. The
border was set before anything was measured.

The tangent kernel of an NTK network changes by m^-1 in one step where the activation is smooth: the readout's part is
<phi(z), phi(z')>/m, and of its change 2/m sum phi phi' dz every term has size m^-1/2 and a random sign (dz is along the
readout's weights), so that m^(1/2) m^(-1/2) / m remains. With ReLU the parts of the earlier layers change by m^-3/4: about
m m^(-1/2) gates flip, with random signs, so that m^(1/4) / m remains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unlazy.claims.rule import interval
from unlazy.widths.measure import NETWORK, Sizes

BORDER = 0.25
READINGS = ("NTK-like", "maximal-update-like", "mean-field", "blowing up", "dying", "cannot tell")
ROLES = ("first", "hidden", "readout", "fixed")
Key = tuple[str, str, int]


def width_exponents(widths: ArrayLike, sizes: ArrayLike) -> NDArray[np.float64]:
    """The slope of log size against log width, for each column (seed) of ``sizes [widths, seeds]``.

    NaN where a size is 0 or missing; infinity where the size at the largest width is infinite.

    >>> width_exponents([16, 64], [[4.0], [2.0]]).round(6)
    array([-0.5])
    """
    x, sizes = np.log(np.asarray(widths, dtype=float)), np.asarray(sizes, dtype=float)
    centred = x - x.mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = np.asarray(centred @ np.log(sizes) / (centred @ centred))
    return np.where(np.isinf(sizes[-1]), np.inf, np.where(np.isfinite(slopes), slopes, np.nan))


@dataclass(frozen=True)
class Exponent:
    """An exponent against width: median over seeds, its interval, and every seed's.

    ``after``: how many updates had been done. ``layer``: a layer, a parameter (of ``own_update``), or ``(network)``.
    """

    quantity: str
    layer: str
    after: int
    value: float
    low: float
    high: float
    by_seed: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def fit_exponents(widths: Sequence[int], sizes: Mapping[int, Sequence[Sizes]]) -> dict[Key, Exponent]:
    """The exponent of everything that was measured at every width; ``sizes``: those of each width, one for each seed."""
    known = set.intersection(*(set(one.values) for column in sizes.values() for one in column))
    found: dict[Key, Exponent] = {}
    for key in (key for key in sizes[widths[0]][0].values if key in known):
        values = np.array([[one.values[key] for one in sizes[width]] for width in widths])
        slopes = width_exponents(np.array(widths), values)
        whole = slopes[~np.isnan(slopes)]
        middle = float(np.median(whole)) if len(whole) else math.nan
        found[key] = Exponent(*key, middle, *interval(slopes), tuple(float(slope) for slope in slopes))
    return found


def layer_roles(narrow: Sizes, wide: Sizes) -> dict[str, str]:
    """The role of each layer: what enters and what leaves it grows with the width (``hidden``), one of both, or none."""
    names = {(False, True): "first", (True, True): "hidden", (True, False): "readout", (False, False): "fixed"}
    return {
        layer: names[wide.entering[layer] > narrow.entering[layer], wide.leaving[layer] > narrow.leaving[layer]]
        for layer in narrow.layers
    }


@dataclass(frozen=True)
class Deviation:
    """A layer that does not scale as the others: at its ``start`` or by its own ``update``, and by which exponent."""

    layer: str
    what: str
    exponent: Exponent
    expected: float

    def __str__(self) -> str:
        sizes = {"start": "output over input at the start", "update": "change by its own parameters"}
        return f"{self.layer}: {sizes[self.what]} goes as width^{self.exponent}, expected {self.expected:+.1f}"


@dataclass(frozen=True)
class Multiplier:
    """A factor (width / base)^exponent on a parameter's ``rate`` or ``start``; ``measured``: the exponent behind it."""

    parameter: str
    what: str
    exponent: float
    measured: Exponent


class Reader:
    """Reads exponents: the network's word, the layers that deviate, multipliers."""

    def __init__(self, exponents: Mapping[Key, Exponent], narrow: Sizes, wide: Sizes, steps: int) -> None:
        self.exponents, self.narrow, self.steps = exponents, narrow, steps
        self.roles = layer_roles(narrow, wide)
        self.features = [layer for layer, role in self.roles.items() if role in ("first", "hidden")]
        self.growing = {name for name, shape in narrow.shapes.items() if shape != wide.shapes.get(name)}

    def value(self, quantity: str, layer: str, after: int) -> float:
        """An exponent; NaN where there is none."""
        found = self.exponents.get((quantity, layer, after))
        return math.nan if found is None else found.value

    def reading(self) -> str:
        """One of ``READINGS``.

        *Blowing up*: a start or a change, after one or after all steps, grows with the width. *Dying*: the change of the function
        vanishes. Otherwise the last layer with growing output decides: *NTK-like* if its change vanishes beside its size, else
        *maximal-update-like*, or *mean-field* if outputs of layers vanish at the start.
        """
        moves = [self.value("output_update", NETWORK, after) for after in (1, self.steps)]
        sizes = [self.value("output", NETWORK, 0), *moves]
        sizes += [self.value("activation", layer, 0) for layer in self.features]
        sizes += [self.value("update", layer, after) for layer in self.features for after in (1, self.steps)]
        if any(size > BORDER for size in sizes):
            return "blowing up"
        if not self.features or all(math.isnan(move) for move in moves):
            return "cannot tell"
        if all(move < -BORDER for move in moves if not math.isnan(move)):
            return "dying"
        last = self.features[-1]
        share = self.value("update", last, self.steps) - self.value("activation", last, self.steps)
        if math.isnan(share):
            return "cannot tell"
        if share < -BORDER:
            return "NTK-like"
        vanish = any(self.value("activation", layer, 0) < -BORDER for layer in self.features)
        return "mean-field" if vanish else "maximal-update-like"

    def deviations(self) -> list[Deviation]:
        """The layers that deviate from the reading; of a network that blows up or dies, from the nearer one of the two limits.

        If a layer's start deviates, only starts are named: changes of other layers may be its consequence.
        """
        word, starts = self.reading(), self._deviating_starts()
        if starts and word != "mean-field":
            return starts
        if word == "NTK-like":
            return self._deviating_updates(-0.5)
        if word in ("maximal-update-like", "mean-field"):
            return self._deviating_updates(0.0)
        return min((self._deviating_updates(expected) for expected in (0.0, -0.5)), key=len)

    def _deviating_starts(self) -> list[Deviation]:
        """Layers whose output at the start grows or vanishes with the width, and whose input does not."""
        found = []
        for layer in self.features:
            size, gain = (self.value(quantity, layer, 0) for quantity in ("activation", "gain"))
            if abs(size) > BORDER and abs(gain) > BORDER and size * gain > 0:
                found.append(Deviation(layer, "start", self.exponents["gain", layer, 0], 0.0))
        for layer, role in self.roles.items():
            if role == "readout" and min(self.value(q, layer, 0) for q in ("activation", "gain")) > BORDER:
                found.append(Deviation(layer, "start", self.exponents["gain", layer, 0], 0.0))
        return found

    def _deviating_updates(self, features: float) -> list[Deviation]:
        """Layers whose own update deviates; ``features``: the exponent expected of layers with growing output."""
        found = []
        for layer, role in self.roles.items():
            wanted = features if layer in self.features else 0.0
            exponent = self._own(layer, wanted)
            if exponent is not None:
                off = exponent.value - wanted
                if off > BORDER or (off < -BORDER and role != "fixed"):
                    found.append(Deviation(layer, "update", exponent, wanted))
        return found

    def _own(self, name: str, wanted: float) -> Exponent | None:
        """The exponent of an own update, after one step or after all: the one nearer to ``wanted``, so that both must deviate.

        A network that blows up is read after its first step, if something moved there: all that follows is a consequence.
        """
        both = [self.exponents.get(("own_update", name, after)) for after in (1, self.steps)]
        moved = [one for one in both if one is not None and not math.isnan(one.value)]
        if not moved or self.reading() == "blowing up":
            return moved[0] if moved else None
        return min(moved, key=lambda one: abs(one.value - wanted))

    def multipliers(self, powers: Mapping[str, float]) -> tuple[list[Multiplier], list[str]]:
        """What would make the network maximal-update: factors on starts and rates, and notes.

        Output weights: f must start at m^-1/2. Rates: every own update must have exponent 0; under an optimiser whose
        updates follow the gradient's size (power 1), smaller output weights make the updates of earlier layers smaller, and the
        rate makes up for it. A network that is maximal-update-like needs other rates only in layers that deviate.
        """
        word = self.reading()
        wrong = [one for one in self._deviating_starts() if one.layer in self.features]
        if wrong and word != "mean-field":
            by = [self._start_multipliers(one.layer, "gain", -_half(one.exponent.value)) for one in wrong]
            note = "Starts of layers must be mended first; then check again for the rates."
            return [one for some in by for one in some], [note]
        done = word in ("maximal-update-like", "mean-field")
        chosen = {one.layer for one in self.deviations()} if done else set(self.narrow.layers)
        known = [power for power in powers.values() if not math.isnan(power)]
        usual = float(np.median(known)) if known else 1.0
        found: list[Multiplier] = []
        shrunk = 0.0  # exponent of all factors on readouts behind the layer
        for layer in reversed(self.narrow.layers):
            for parameter in (name for name, owner in self.narrow.layer_of.items() if owner == layer):
                exponent = self._own(parameter, 0.0)
                if layer not in chosen or exponent is None or not math.isfinite(exponent.value):
                    continue
                power = powers.get(parameter, math.nan)
                rate = -_half(exponent.value) - round(usual if math.isnan(power) else power) * shrunk
                if rate:
                    found.append(Multiplier(parameter, "rate", rate, exponent))
            size = self.value("activation", layer, 0)
            if not done and self.roles[layer] == "readout" and size > -0.5 + BORDER:
                found += self._start_multipliers(layer, "activation", -_half(size + 0.5))
                shrunk -= _half(size + 0.5)
        return found[::-1], []

    def _start_multipliers(self, layer: str, measured_as: str, exponent: float) -> list[Multiplier]:
        """Multipliers of the start of those parameters of a layer that grow with the width."""
        names = [name for name, owner in self.narrow.layer_of.items() if owner == layer and name in self.growing]
        measured = self.exponents[measured_as, layer, 0]
        return [Multiplier(name, "start", exponent, measured) for name in names if exponent]

    def near_border(self) -> list[str]:
        """A sentence if intervals of exponents that decide the reading contain a border."""
        keys = [("output_update", NETWORK, after) for after in (1, self.steps)]
        keys += [("update", layer, after) for layer in self.features for after in (1, self.steps)]
        found = [self.exponents[key] for key in keys if key in self.exponents]
        close = [one for one in found if any(one.low < border < one.high for border in (-BORDER, BORDER))]
        if not close:
            return []
        some = "; ".join(f"{one.quantity} of {one.layer} after {one.after}: {one}" for one in close[:2])
        return [
            f"{len(close)} of the {len(found)} exponents behind the reading have intervals that contain {BORDER:+} or "
            f"{-BORDER:+} ({some}): more seeds, widths or samples would tell."
        ]


def _half(value: float) -> float:
    """The nearest multiple of 1/2: the theory's exponents are such."""
    return float(np.round(2 * value) / 2) + 0.0


def as_row(exponent: Exponent) -> dict[str, Any]:
    """An exponent as plain JSON values."""
    numbers = {"exponent": exponent.value, "low": exponent.low, "high": exponent.high}
    plain = {name: float(f"{value:.4g}") if math.isfinite(value) else str(value) for name, value in numbers.items()}
    return {"layer": exponent.layer, "quantity": exponent.quantity, "after": exponent.after, **plain}
