"""The points a run was measured on: stored with it, or made again from the words in its header."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import StoreError
from unlazy.studio.openrun import OpenRun

IMAGE_SHAPES = {"mnist": [1, 28, 28], "fashion": [1, 28, 28], "cifar": [3, 32, 32], "digits": [1, 8, 8]}
MOST_CLASSES = 100


@dataclass(frozen=True)
class Probe:
    """Points, targets and groups, as far as they are known. ``made``: arrays that the run does not hold itself."""

    kind: str = "unknown"
    n: int | None = None
    samples: int | None = None  # of the training set
    image_shape: list[int] | None = None
    frequencies: dict[str, float] | None = None
    groups: dict[str, list[int]] = field(default_factory=dict)
    y: NDArray[np.float64] | None = None  # [n, outputs]
    numbered: bool = False  # y was stored as whole numbers: each is the number of an output
    rows: dict[str, list[int]] = field(default_factory=dict)  # of kernels that saw only some of the points
    made: dict[str, NDArray[Any]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def labels(self) -> list[int] | None:
        """Class numbers, where the targets are classes; below zero (-1 and 1, say) they are counted instead."""
        if self.y is None:
            return None
        y = self.y
        if y.shape[1] > 1:
            hot = np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all()
            return [int(label) for label in y.argmax(1)] if hot else None
        values = np.unique(y)
        if not np.isfinite(y).all() or (values != np.rint(values)).any():
            return None
        if len(values) > MOST_CLASSES and not self.numbered:
            return None
        named = y[:, 0] if values.min(initial=0) >= 0 else np.searchsorted(values, y[:, 0])
        return [int(label) for label in named]

    def margins(self, output: NDArray[Any]) -> NDArray[np.float64] | None:
        """How far the right output of each sample is ahead of the best other; ``None`` where that means nothing."""
        labels = self.labels()
        if labels is None or output.ndim != 2 or output.shape[1] < 2 or len(labels) != len(output):
            return None
        if max(labels, default=0) >= output.shape[1]:
            return None
        values, right = output.astype(np.float64), (np.arange(len(output)), labels)
        own = values[right]
        values[right] = -np.inf
        return np.asarray(own - values.max(1))

    def picked(self, rows: int, name: str | None = None) -> list[int] | None:
        """Which points the rows of a smaller kernel are: as the run says, else every so-and-so-many-th, if that fits."""
        own = self.rows.get(name or "", [])
        if own and len(own) == rows and min(own) >= 0 and max(own) < (self.n or 0):
            return own
        if self.n is None or rows >= self.n or rows < 2:
            return None
        for stride in {self.n // rows, -(-self.n // rows)}:
            if len(range(0, self.n, stride)) == rows:
                return list(range(0, self.n, stride))
        return None

    def targets(self, rows: int, name: str | None = None) -> NDArray[np.float64] | None:
        """The targets of the rows of a kernel; class numbers one-hot, because no class is larger than another."""
        labels = self.labels() if self.numbered else None
        y = self.y if labels is None else (np.array(labels)[:, None] == np.unique(labels)).astype(np.float64)
        if y is None or rows == len(y):
            return y
        picked = self.picked(rows, name)
        return None if picked is None else y[picked]

    def facts(self, opened: OpenRun, maps: list[str]) -> dict[str, Any]:
        """The JSON form."""
        rows = None
        for name in maps:
            steps = opened.steps(name, opened.own_member)
            if rows is None and steps and name in ("overlap", "tangent"):
                rows = opened.stored(name, steps[0], opened.own_member or 0).shape()[0][-1]
        return {
            "kind": self.kind,
            "n": self.n,
            "image_shape": self.image_shape,
            "groups": self.groups,
            "labels": self.labels(),
            "frequencies": self.frequencies,
            "picked": None if rows is None else self.picked(rows),
            "rows": self.rows,
        }


def probe_of(opened: OpenRun) -> Probe:
    """What is known of the points of a run; kept with the opened run."""
    if "probe" not in opened.memory:
        opened.memory["probe"] = _probe_of(opened)
    known: Probe = opened.memory["probe"]
    return known


def inputs_of(opened: OpenRun) -> NDArray[Any] | None:
    """The inputs of the points, ``[n, ...]``, stored or made again; ``None`` where a run keeps none."""
    made = probe_of(opened).made.get("probe_x")
    if made is None and opened.steps("probe_x"):
        return opened.stored("probe_x", opened.steps("probe_x")[0], 0).read()
    return made


def _probe_of(opened: OpenRun) -> Probe:
    data, recipe = opened.header.get("data"), opened.header["recipe"]
    scope = recipe.get("scope") if isinstance(recipe, Mapping) else None
    scope = scope if isinstance(scope, Mapping) else {}
    try:
        if "probe_x" in opened.by_step:
            return _stored_probe(opened, scope, data)
        if isinstance(data, Mapping) and data.get("name") == "circle":
            return _circle(data.get("options"))
        return _targets_alone(opened, scope, data)
    except (StoreError, ValueError, TypeError, KeyError) as error:
        return Probe(problems=(f"The points of this run cannot be shown: {error}",))


def _targets_alone(opened: OpenRun, scope: Mapping[str, Any], data: Any) -> Probe:
    """Inputs that are no one table of numbers (tokens, several arguments, large pictures): what else is known of them."""
    name = str(data.get("name", "")) if isinstance(data, Mapping) else ""
    shape = next((shape for word, shape in IMAGE_SHAPES.items() if word in name), None)
    shape = shape if shape and _inputs(opened) in (None, int(np.prod(shape))) else None
    kind = "image" if shape else str(scope.get("probe_kind") or "unknown")
    y, numbered = _stored_targets(opened)
    return Probe(
        kind,
        None if y is None else len(y),
        image_shape=shape,
        groups=_lists(scope.get("groups")),
        y=y,
        numbered=numbered,
        rows=_lists(scope.get("rows")),
    )


def _stored_targets(opened: OpenRun, samples: int | None = None) -> tuple[NDArray[np.float64] | None, bool]:
    """Targets ``[n, outputs]`` as far as a run holds them, and whether they are whole numbers."""
    if "probe_y" not in opened.by_step:
        return None, False
    y = opened.stored("probe_y", opened.steps("probe_y")[0], 0).read()
    numbered = y.dtype.kind in "biu" and y.size == len(y)
    return y.astype(np.float64).reshape(samples or len(y), -1), numbered


def _circle(options: Any) -> Probe:
    from unlazy.data.synthetic import Circle

    circle = Circle(**(options if isinstance(options, Mapping) else {}))
    data = circle.dataset()
    groups = {name: np.flatnonzero(inside.numpy()).tolist() for name, inside in data.groups.items()}
    made = {"probe_x": data.x.numpy(), "probe_y": data.y.numpy()}
    frequencies = {"top": circle.top, "bottom": circle.bottom}
    y = data.y.numpy().astype(np.float64)
    return Probe("circle", circle.n, circle.n, None, frequencies, groups, y, made=made)


def _stored_probe(opened: OpenRun, scope: Mapping[str, Any], data: Any) -> Probe:
    x = opened.stored("probe_x", opened.steps("probe_x")[0], 0).read()
    y, numbered = _stored_targets(opened, len(x))
    circle = isinstance(data, Mapping) and data.get("name") == "circle"
    guessed = "image" if x.ndim == 4 else "vectors"
    plane = math.prod(x.shape[1:]) == 2  # two numbers are a point, however they are wrapped
    kind = "circle" if circle else "points2d" if plane else str(scope.get("probe_kind") or guessed)
    image = scope.get("image_shape") or (list(x.shape[1:]) if x.ndim == 4 else None)
    options = data.get("options") if isinstance(data, Mapping) else None
    frequencies = None
    if circle and isinstance(options, Mapping):
        frequencies = {name: float(options[name]) for name in ("top", "bottom") if name in options}
    groups = _lists(scope.get("groups"))
    if circle and not groups and x.shape[1:] == (2,):
        top = x[:, 1] >= 0
        groups = {"top": np.flatnonzero(top).tolist(), "bottom": np.flatnonzero(~top).tolist()}
    samples = len(x) if opened.header.get("kind") != "scope" else None
    shape, rows = list(image) if image else None, _lists(scope.get("rows"))
    return Probe(kind, len(x), samples, shape, frequencies, groups, y, numbered, rows)


def _lists(value: Any) -> dict[str, list[int]]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): [int(place) for place in places] for name, places in value.items() if isinstance(places, list)}


def _inputs(opened: OpenRun) -> int | None:
    model = opened.header.get("model")
    inputs = model.get("in") if isinstance(model, Mapping) else None
    return inputs if isinstance(inputs, int) else None
