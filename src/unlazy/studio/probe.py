"""The points a run was measured on: stored with it, or made again from the words in its header."""

from __future__ import annotations

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
    made: dict[str, NDArray[Any]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def labels(self) -> list[int] | None:
        """Class indices, where the targets are classes."""
        if self.y is None:
            return None
        y = self.y
        if y.shape[1] > 1:
            hot = np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all()
            return [int(label) for label in y.argmax(1)] if hot else None
        values = np.unique(y)
        if len(values) > MOST_CLASSES or not np.isfinite(y).all() or (values != np.rint(values)).any():
            return None
        return [int(label) for label in np.searchsorted(values, y[:, 0])]

    def picked(self, rows: int) -> list[int] | None:
        """Which of the n points the rows of a smaller kernel are: every so-and-so-many-th, if that fits."""
        if self.n is None or rows >= self.n or rows < 2:
            return None
        for stride in {self.n // rows, -(-self.n // rows)}:
            if len(range(0, self.n, stride)) == rows:
                return list(range(0, self.n, stride))
        return None

    def targets(self, rows: int) -> NDArray[np.float64] | None:
        """The targets of the rows of a kernel."""
        if self.y is None:
            return None
        if rows == len(self.y):
            return self.y
        picked = self.picked(rows)
        return None if picked is None else self.y[picked]

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
        }


def probe_of(opened: OpenRun) -> Probe:
    """What is known of the points of a run; kept with the opened run."""
    if "probe" not in opened.memory:
        opened.memory["probe"] = _probe_of(opened)
    known: Probe = opened.memory["probe"]
    return known


def _probe_of(opened: OpenRun) -> Probe:
    data, recipe = opened.header.get("data"), opened.header["recipe"]
    scope = recipe.get("scope") if isinstance(recipe, Mapping) else None
    try:
        if "probe_x" in opened.by_step:
            return _stored_probe(opened, scope if isinstance(scope, Mapping) else {}, data)
        if isinstance(data, Mapping) and data.get("name") == "circle":
            return _circle(data.get("options"))
    except (StoreError, ValueError, TypeError, KeyError) as error:
        return Probe(problems=(f"The points of this run cannot be shown: {error}",))
    name = str(data.get("name", "")) if isinstance(data, Mapping) else ""
    shape = next((shape for word, shape in IMAGE_SHAPES.items() if word in name), None)
    shape = shape if shape and _inputs(opened) in (None, int(np.prod(shape))) else None
    kind = "image" if shape else str((scope or {}).get("probe_kind") or "unknown")
    return Probe(kind, image_shape=shape, groups=_groups((scope or {}).get("groups")))


def _circle(options: Any) -> Probe:
    from unlazy.data.synthetic import Circle

    circle = Circle(**(options if isinstance(options, Mapping) else {}))
    data = circle.dataset()
    groups = {name: np.flatnonzero(inside.numpy()).tolist() for name, inside in data.groups.items()}
    made = {"probe_x": data.x.numpy(), "probe_y": data.y.numpy()}
    frequencies = {"top": circle.top, "bottom": circle.bottom}
    y = data.y.numpy().astype(np.float64)
    return Probe("circle", circle.n, circle.n, None, frequencies, groups, y, made)


def _stored_probe(opened: OpenRun, scope: Mapping[str, Any], data: Any) -> Probe:
    x = opened.stored("probe_x", opened.steps("probe_x")[0], 0).read()
    y = None
    if "probe_y" in opened.by_step:
        y = opened.stored("probe_y", opened.steps("probe_y")[0], 0).read().astype(np.float64).reshape(len(x), -1)
    circle = isinstance(data, Mapping) and data.get("name") == "circle"
    guessed = "points2d" if x.shape[1:] == (2,) else "image" if x.ndim == 4 else "vectors"
    kind = "circle" if circle else str(scope.get("probe_kind") or guessed)
    image = scope.get("image_shape") or (list(x.shape[1:]) if x.ndim == 4 else None)
    options = data.get("options") if isinstance(data, Mapping) else None
    frequencies = None
    if circle and isinstance(options, Mapping):
        frequencies = {name: float(options[name]) for name in ("top", "bottom") if name in options}
    groups = _groups(scope.get("groups"))
    if circle and not groups and x.shape[1:] == (2,):
        top = x[:, 1] >= 0
        groups = {"top": np.flatnonzero(top).tolist(), "bottom": np.flatnonzero(~top).tolist()}
    samples = len(x) if opened.header.get("kind") != "scope" else None
    return Probe(kind, len(x), samples, list(image) if image else None, frequencies, groups, y)


def _groups(value: Any) -> dict[str, list[int]]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): [int(place) for place in places] for name, places in value.items() if isinstance(places, list)}


def _inputs(opened: OpenRun) -> int | None:
    model = opened.header.get("model")
    inputs = model.get("in") if isinstance(model, Mapping) else None
    return inputs if isinstance(inputs, int) else None
