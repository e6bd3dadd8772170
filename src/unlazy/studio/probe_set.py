"""The probe set of a run: the samples it was measured on, read from the run or generated again from its header."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import StoreError
from unlazy.studio.run_reader import RunReader

IMAGE_SHAPES = {"mnist": [1, 28, 28], "fashion": [1, 28, 28], "cifar": [3, 32, 32], "digits": [1, 8, 8]}
MOST_CLASSES = 100


@dataclass(frozen=True)
class ProbeSet:
    """Samples, targets and groups, as far as the run tells. ``generated``: arrays that the run does not store itself."""

    kind: str = "unknown"
    n: int | None = None
    samples: int | None = None  # of the training set
    image_shape: list[int] | None = None
    frequencies: dict[str, float] | None = None
    groups: dict[str, list[int]] = field(default_factory=dict)
    y: NDArray[np.float64] | None = None  # [n, outputs]
    has_class_numbers: bool = False  # y was stored as integers: each is the index of an output
    rows: dict[str, list[int]] = field(default_factory=dict)  # of kernels over only some of the samples
    generated: dict[str, NDArray[Any]] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def labels(self) -> list[int] | None:
        """Class number of every sample; ``None`` where the targets are no classes. Classes -1 and 1 become 0 and 1."""
        if self.y is None:
            return None
        y = self.y
        if y.shape[1] > 1:
            hot = np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all()
            return [int(label) for label in y.argmax(1)] if hot else None
        values = np.unique(y)
        if not np.isfinite(y).all() or (values != np.rint(values)).any():
            return None
        if len(values) > MOST_CLASSES and not self.has_class_numbers:
            return None
        named = y[:, 0] if values.min(initial=0) >= 0 else np.searchsorted(values, y[:, 0])
        return [int(label) for label in named]

    def margins(self, output: NDArray[Any]) -> NDArray[np.float64] | None:
        """Output of the right class minus the largest other output, per sample; ``None`` where there are no classes."""
        labels = self.labels()
        if labels is None or output.ndim != 2 or output.shape[1] < 2 or len(labels) != len(output):
            return None
        if max(labels, default=0) >= output.shape[1]:
            return None
        values, right = output.astype(np.float64), (np.arange(len(output)), labels)
        own = values[right]
        values[right] = -np.inf
        return np.asarray(own - values.max(1))

    def rows_of_kernel(self, rows: int, name: str | None = None) -> list[int] | None:
        """The sample of every row of a kernel over fewer samples: as the run says, else every k-th sample if that fits."""
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
        """The targets ``[rows, outputs]`` of the rows of a kernel; class numbers become one-hot."""
        labels = self.labels() if self.has_class_numbers else None
        y = self.y if labels is None else (np.array(labels)[:, None] == np.unique(labels)).astype(np.float64)
        if y is None or rows == len(y):
            return y
        picked = self.rows_of_kernel(rows, name)
        return None if picked is None else y[picked]

    def to_json(self, reader: RunReader, maps: list[str]) -> dict[str, Any]:
        """The probe set as JSON for the page, without its arrays."""
        rows = None
        for name in maps:
            steps = reader.steps(name, reader.scene_member)
            if rows is None and steps and name in ("overlap", "tangent"):
                rows = reader.find_array(name, steps[0], reader.scene_member or 0).shape()[0][-1]
        return {
            "kind": self.kind,
            "n": self.n,
            "image_shape": self.image_shape,
            "groups": self.groups,
            "labels": self.labels(),
            "frequencies": self.frequencies,
            "picked": None if rows is None else self.rows_of_kernel(rows),
            "rows": self.rows,
            "texts": list(self.texts) or None,
        }


def probe_set_of(reader: RunReader) -> ProbeSet:
    """The probe set of a run; computed once per reader."""
    if "probe" not in reader.cache:
        reader.cache["probe"] = _load_probe_set(reader)
    known: ProbeSet = reader.cache["probe"]
    return known


def inputs_of(reader: RunReader) -> NDArray[Any] | None:
    """The inputs of the probe set ``[n, ...]``, stored or generated; ``None`` where a run stores none."""
    generated = probe_set_of(reader).generated.get("probe_x")
    if generated is None and reader.steps("probe_x"):
        return reader.find_array("probe_x", reader.steps("probe_x")[0], 0).read()
    return generated


def _load_probe_set(reader: RunReader) -> ProbeSet:
    data, recipe = reader.header.get("data"), reader.header["recipe"]
    scope = recipe.get("scope") if isinstance(recipe, Mapping) else None
    scope = scope if isinstance(scope, Mapping) else {}
    try:
        if "probe_x" in reader.by_step:
            return _stored_probe_set(reader, scope, data)
        if isinstance(data, Mapping) and data.get("name") == "circle":
            return _circle_probe_set(data.get("options"))
        return _probe_set_without_inputs(reader, scope, data)
    except (StoreError, ValueError, TypeError, KeyError) as error:
        return ProbeSet(problems=(f"The probe set of this run cannot be shown: {error}",))


def _probe_set_without_inputs(reader: RunReader, scope: Mapping[str, Any], data: Any) -> ProbeSet:
    """A probe set whose inputs are not stored (tokens, several arguments, large images): groups and targets alone."""
    name = str(data.get("name", "")) if isinstance(data, Mapping) else ""
    shape = next((shape for word, shape in IMAGE_SHAPES.items() if word in name), None)
    shape = shape if shape and _input_size(reader) in (None, int(np.prod(shape))) else None
    kind = "image" if shape else str(scope.get("probe_kind") or "unknown")
    y, has_class_numbers = _stored_targets(reader)
    return ProbeSet(
        kind,
        None if y is None else len(y),
        image_shape=shape,
        groups=_index_lists(scope.get("groups")),
        y=y,
        has_class_numbers=has_class_numbers,
        rows=_index_lists(scope.get("rows")),
        texts=_stored_texts(reader),
    )


def _stored_texts(reader: RunReader) -> tuple[str, ...]:
    """The texts of the samples, which a scope keeps as UTF-8 bytes filled with zeros; none where there are none."""
    if "probe_text" not in reader.by_step:
        return ()
    stored = reader.find_array("probe_text", reader.steps("probe_text")[0], 0).read()
    return tuple(bytes(row).rstrip(b"\0").decode("utf-8", "replace") for row in stored.astype(np.uint8))


def _stored_targets(reader: RunReader, samples: int | None = None) -> tuple[NDArray[np.float64] | None, bool]:
    """Targets ``[n, outputs]`` and whether they were stored as integers; ``None`` if the run has no targets."""
    if "probe_y" not in reader.by_step:
        return None, False
    y = reader.find_array("probe_y", reader.steps("probe_y")[0], 0).read()
    has_class_numbers = y.dtype.kind in "biu" and y.size == len(y)
    return y.astype(np.float64).reshape(samples or len(y), -1), has_class_numbers


def _circle_probe_set(options: Any) -> ProbeSet:
    from unlazy.data.circle import Circle

    circle = Circle(**(options if isinstance(options, Mapping) else {}))
    data = circle.dataset()
    groups = {name: np.flatnonzero(inside.numpy()).tolist() for name, inside in data.groups.items()}
    generated = {"probe_x": data.x.numpy(), "probe_y": data.y.numpy()}
    frequencies = {"top": circle.top, "bottom": circle.bottom}
    y = data.y.numpy().astype(np.float64)
    return ProbeSet("circle", circle.n, circle.n, None, frequencies, groups, y, generated=generated)


def _stored_probe_set(reader: RunReader, scope: Mapping[str, Any], data: Any) -> ProbeSet:
    x = reader.find_array("probe_x", reader.steps("probe_x")[0], 0).read()
    y, has_class_numbers = _stored_targets(reader, len(x))
    circle = isinstance(data, Mapping) and data.get("name") == "circle"
    guessed = "image" if x.ndim == 4 else "vectors"
    plane = math.prod(x.shape[1:]) == 2  # two numbers per sample are a point of the plane, whatever the shape
    kind = "circle" if circle else "points2d" if plane else str(scope.get("probe_kind") or guessed)
    image = scope.get("image_shape") or (list(x.shape[1:]) if x.ndim == 4 else None)
    options = data.get("options") if isinstance(data, Mapping) else None
    frequencies = None
    if circle and isinstance(options, Mapping):
        frequencies = {name: float(options[name]) for name in ("top", "bottom") if name in options}
    groups = _index_lists(scope.get("groups"))
    if circle and not groups and x.shape[1:] == (2,):
        top = x[:, 1] >= 0
        groups = {"top": np.flatnonzero(top).tolist(), "bottom": np.flatnonzero(~top).tolist()}
    samples = len(x) if reader.header.get("kind") != "scope" else None
    shape, rows = list(image) if image else None, _index_lists(scope.get("rows"))
    texts = _stored_texts(reader)
    return ProbeSet(kind, len(x), samples, shape, frequencies, groups, y, has_class_numbers, rows, texts=texts)


def _index_lists(value: Any) -> dict[str, list[int]]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): [int(place) for place in places] for name, places in value.items() if isinstance(places, list)}


def _input_size(reader: RunReader) -> int | None:
    model = reader.header.get("model")
    inputs = model.get("in") if isinstance(model, Mapping) else None
    return inputs if isinstance(inputs, int) else None
