"""One half-space or neuron over training: where it points, how far it turned, on which samples it is open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.studio.answers import BadRequest, NotFound
from unlazy.studio.probe_set import inputs_of, probe_set_of
from unlazy.studio.run_reader import RunReader

CURVE_KINDS = ("turned", "length", "open")
BIASES = "neuron_biases"  # with ``neurons`` and ``neuron_norms``: the half-spaces of the first layer


def half_space_quantity(reader: RunReader, member: int) -> str | None:
    """The array that holds half-spaces: ``normals`` (all layers) or ``neuron_biases`` (first layer); ``None`` without any."""
    return next((name for name in ("normals", BIASES) if reader.steps(name, member)), None)


def half_spaces_at(
    reader: RunReader, quantity: str, step: int, member: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Normals ``[layers, units, d]`` and offsets ``[layers, units]`` at a step; ``quantity``: see ``half_space_quantity``."""

    def read(name: str) -> NDArray[np.float64]:
        return reader.find_array(name, step, member).read().astype(np.float64)

    if quantity == BIASES:
        return (read("neurons") * read("neuron_norms")[:, None])[None], read(BIASES)[None]
    normals, offsets = read(quantity), quantity.replace("normals", "offsets")
    return normals, read(offsets) if step in reader.steps(offsets, member) else np.zeros(normals.shape[:-1])


@dataclass(frozen=True)
class UnitHistory:
    """A unit at every stored step: ``vectors [T, d]`` and, for half-spaces, ``offsets [T]``.

    Vectors of neurons are unit directions; where biases are stored too, they are the weights themselves.
    """

    steps: list[int]
    vectors: NDArray[np.float64]
    offsets: NDArray[np.float64] | None


def unit_history(reader: RunReader, quantity: str, member: int, layer: int, unit: int) -> UnitHistory:
    """Read one unit of ``normals [layers, width, d]`` or of ``neurons [units, d]`` (layer 0) at every stored step."""
    steps = reader.steps(quantity, member)
    if not steps:
        raise NotFound(f"{reader.key} has no {quantity!r}.")
    vectors = []
    for step in steps:
        values = reader.find_array(quantity, step, member).read()
        layered = values if values.ndim == 3 else values[None]
        if layered.ndim != 3 or layer >= layered.shape[0] or unit >= layered.shape[1]:
            raise NotFound(f"{quantity} of {reader.key} has no unit {unit} in layer {layer}.")
        vectors.append(layered[layer, unit].astype(np.float64))
    offsets = None
    if quantity == "normals" and reader.steps("offsets", member) == steps:
        offsets = np.array(
            [reader.find_array("offsets", step, member).read()[layer, unit] for step in steps], np.float64
        )
    if quantity == "neurons" and reader.steps(BIASES, member) == reader.steps("neuron_norms", member) == steps:
        norms, offsets = (
            np.array([reader.find_array(name, step, member).read()[unit] for step in steps], np.float64)
            for name in ("neuron_norms", BIASES)
        )
        return UnitHistory(steps, np.stack(vectors) * norms[:, None], offsets)
    return UnitHistory(steps, np.stack(vectors), offsets)


def degrees_turned(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """The angle in degrees of every row to the first; 0 where a row is zero."""
    length = np.linalg.norm(vectors, axis=1)
    size = length * length[0]
    cosine = np.divide(vectors @ vectors[0], size, out=np.ones_like(size), where=size > 0)
    return np.asarray(np.degrees(np.arccos(np.clip(cosine, -1, 1))))


def unit_curves(
    reader: RunReader, quantity: str, member: int, layer: int, unit: int, what: str
) -> tuple[list[int], dict[str, NDArray[np.float64]]]:
    """Steps and curves of one unit. ``what``: ``turned`` (degrees since the start), ``length`` (norm and offset), or
    ``open`` (share of each group on the open side).
    """
    found = unit_history(reader, quantity, member, layer, unit)
    if what == "turned":
        return found.steps, {"turned": degrees_turned(found.vectors)}
    if what == "length":
        lines = {"length": _lengths(reader, quantity, member, unit, found)}
        return found.steps, lines if found.offsets is None else lines | {"offset": found.offsets}
    if what != "open":
        raise BadRequest(f"the curves of a unit are {', '.join(CURVE_KINDS)}, not {what!r}.")
    points = _flat_inputs(reader)
    if points is None or points.shape[1] != found.vectors.shape[1]:
        raise NotFound(f"the inputs of {reader.key} are not stored, so it is unknown on which samples a unit is open.")
    offsets = 0.0 if found.offsets is None else found.offsets
    is_open = points @ found.vectors.T + offsets >= 0  # [n, T]
    groups = (
        probe_set_of(reader).groups
        or _samples_by_class(probe_set_of(reader).labels())
        or {"all": list(range(len(points)))}
    )
    return found.steps, {name: is_open[places].mean(0) for name, places in groups.items()}


def _samples_by_class(labels: list[int] | None) -> dict[str, list[int]]:
    """The samples of each of the first twelve classes."""
    found: dict[str, list[int]] = {}
    for place, label in enumerate(labels or []):
        found.setdefault(str(label), []).append(place)
    return dict(sorted(found.items(), key=lambda entry: int(entry[0]))[:12])


def _lengths(reader: RunReader, quantity: str, member: int, unit: int, found: UnitHistory) -> NDArray[np.float64]:
    """The norm of a unit at every step; neurons stored as directions have their norms in ``neuron_norms``."""
    if quantity == "neurons" and reader.steps("neuron_norms", member) == found.steps:
        return np.array(
            [reader.find_array("neuron_norms", step, member).read()[unit] for step in found.steps], np.float64
        )
    return np.asarray(np.linalg.norm(found.vectors, axis=1))


def _flat_inputs(reader: RunReader) -> NDArray[Any] | None:
    inputs = inputs_of(reader)
    return None if inputs is None else inputs.reshape(len(inputs), -1).astype(np.float64)
