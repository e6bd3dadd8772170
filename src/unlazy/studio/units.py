"""One half-space or neuron over training: where it points, how far it turned, on which samples it is open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.studio.answers import BadRequest, NotHere
from unlazy.studio.openrun import OpenRun
from unlazy.studio.probe import inputs_of, probe_of

WHAT = ("turned", "length", "open")
BIASES = "neuron_biases"  # beside ``neurons`` and ``neuron_norms``: the half-spaces of a first layer


def kept_as(opened: OpenRun, member: int) -> str | None:
    """The name under which a run keeps half-spaces: of all layers, or of the first one; ``None`` where it keeps none."""
    return next((name for name in ("normals", BIASES) if opened.steps(name, member)), None)


def half_spaces_at(
    opened: OpenRun, kept: str, step: int, member: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Normals ``[layers, units, d]`` and offsets ``[layers, units]`` at a step, under either name."""

    def read(name: str) -> NDArray[np.float64]:
        return opened.stored(name, step, member).read().astype(np.float64)

    if kept == BIASES:
        return (read("neurons") * read("neuron_norms")[:, None])[None], read(BIASES)[None]
    normals, offsets = read(kept), kept.replace("normals", "offsets")
    return normals, read(offsets) if step in opened.steps(offsets, member) else np.zeros(normals.shape[:-1])


@dataclass(frozen=True)
class Story:
    """A unit at every stored step: ``vectors [T, d]`` and, for half-spaces, ``offsets [T]``.

    Vectors of neurons are directions, or the weights themselves where biases say on which half-space a neuron is open.
    """

    steps: list[int]
    vectors: NDArray[np.float64]
    offsets: NDArray[np.float64] | None


def story(opened: OpenRun, quantity: str, member: int, layer: int, unit: int) -> Story:
    """One unit of ``normals [layers, width, d]`` or of ``neurons [units, d]`` (layer 0)."""
    steps = opened.steps(quantity, member)
    if not steps:
        raise NotHere(f"{opened.key} has no {quantity!r}.")
    vectors = []
    for step in steps:
        values = opened.stored(quantity, step, member).read()
        layered = values if values.ndim == 3 else values[None]
        if layered.ndim != 3 or layer >= layered.shape[0] or unit >= layered.shape[1]:
            raise NotHere(f"{quantity} of {opened.key} has no unit {unit} in layer {layer}.")
        vectors.append(layered[layer, unit].astype(np.float64))
    offsets = None
    if quantity == "normals" and opened.steps("offsets", member) == steps:
        offsets = np.array([opened.stored("offsets", step, member).read()[layer, unit] for step in steps], np.float64)
    if quantity == "neurons" and opened.steps(BIASES, member) == opened.steps("neuron_norms", member) == steps:
        norms, offsets = (
            np.array([opened.stored(name, step, member).read()[unit] for step in steps], np.float64)
            for name in ("neuron_norms", BIASES)
        )
        return Story(steps, np.stack(vectors) * norms[:, None], offsets)
    return Story(steps, np.stack(vectors), offsets)


def degrees_turned(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """The angle of every row to the first; 0 where one of them vanishes."""
    length = np.linalg.norm(vectors, axis=1)
    size = length * length[0]
    cosine = np.divide(vectors @ vectors[0], size, out=np.ones_like(size), where=size > 0)
    return np.asarray(np.degrees(np.arccos(np.clip(cosine, -1, 1))))


def curves_of(
    opened: OpenRun, quantity: str, member: int, layer: int, unit: int, what: str
) -> tuple[list[int], dict[str, NDArray[np.float64]]]:
    """``turned``: degrees since the start; ``length``: norm and offset; ``open``: share of each group on the open side."""
    found = story(opened, quantity, member, layer, unit)
    if what == "turned":
        return found.steps, {"turned": degrees_turned(found.vectors)}
    if what == "length":
        lines = {"length": _lengths(opened, quantity, member, unit, found)}
        return found.steps, lines if found.offsets is None else lines | {"offset": found.offsets}
    if what != "open":
        raise BadRequest(f"of a unit there are {', '.join(WHAT)}, not {what!r}.")
    points = _points(opened)
    if points is None or points.shape[1] != found.vectors.shape[1]:
        raise NotHere(f"the inputs of {opened.key} are not stored; nobody can say where a unit is open.")
    offsets = 0.0 if found.offsets is None else found.offsets
    is_open = points @ found.vectors.T + offsets >= 0  # [n, T]
    groups = probe_of(opened).groups or _classes(probe_of(opened).labels()) or {"all": list(range(len(points)))}
    return found.steps, {name: is_open[places].mean(0) for name, places in groups.items()}


def _classes(labels: list[int] | None) -> dict[str, list[int]]:
    """The samples of each class, at most a dozen of them."""
    found: dict[str, list[int]] = {}
    for place, label in enumerate(labels or []):
        found.setdefault(str(label), []).append(place)
    return dict(sorted(found.items(), key=lambda entry: int(entry[0]))[:12])


def _lengths(opened: OpenRun, quantity: str, member: int, unit: int, found: Story) -> NDArray[np.float64]:
    """Norms of a unit; neurons may be kept as directions, with their norms beside them."""
    if quantity == "neurons" and opened.steps("neuron_norms", member) == found.steps:
        return np.array([opened.stored("neuron_norms", step, member).read()[unit] for step in found.steps], np.float64)
    return np.asarray(np.linalg.norm(found.vectors, axis=1))


def _points(opened: OpenRun) -> NDArray[Any] | None:
    inputs = inputs_of(opened)
    return None if inputs is None else inputs.reshape(len(inputs), -1).astype(np.float64)
