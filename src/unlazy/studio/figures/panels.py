"""Turns the name of a panel, as figure and code links write it, into a request for a figure.

loss, loss,loss_top, losses     curves of scalars            overlap, output, ...    an array, drawn by its shape
array-QUANTITY                  an array, where a scalar has the same name
spectra, spectrum-MAP           eigenvalues                  alignment               kernels against the targets
halfspaces                      inputs and borders           units                   every half-space as a disc
map-QUANTITY                    units on a plane             verdict                 lazy or rich, with the evidence
unit-QUANTITY                   one unit (layer, unit)       turned-, length-, open-QUANTITY    its course
difference-MAP, and a scalar or an array together with ``other``: two runs
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from unlazy.studio.answers import BadRequest, NotFound
from unlazy.studio.figures.render import READ_BY_STORED_NAME, FigureRequest, kind_of_array
from unlazy.studio.probe_set import probe_set_of
from unlazy.studio.run_reader import RunReader
from unlazy.studio.same_samples import compare_kernel_samples
from unlazy.studio.units import BIASES, CURVE_KINDS, half_space_quantity

NUMBER_PARAMETERS = ("step", "member", "layer", "unit", "member2")
ALIGNED_KERNELS = ("overlap", "tangent")


def shown_step(reader: RunReader, quantity: str, step: int | None, member: int) -> int:
    """The last stored step up to ``step``, else the first; the last of all where ``step`` is ``None``."""
    steps = reader.steps(quantity, member)
    if not steps:
        raise NotFound(f"{reader.key} has no panel or array {quantity!r}.")
    return steps[-1] if step is None else max((at for at in steps if at <= step), default=steps[0])


def check_same_samples(reader: RunReader, other: RunReader, quantity: str) -> None:
    """Raise ``BadRequest`` if a kernel of two runs is over different samples."""
    found = compare_kernel_samples(reader, other, quantity)
    if found.same is False:
        raise BadRequest(found.why)


def figure_request(reader: RunReader, panel: str, given: Mapping[str, int], other: RunReader | None) -> FigureRequest:
    """The figure that a panel stands for. ``given``: numbers from its address, such as step; ``other``: a second run."""
    member, step = given.get("member", 0), given.get("step")
    names = _scalars(reader, panel)
    if names and other is None:
        return FigureRequest("curves", names, 0, member)
    if other is not None:
        return _comparison_request(reader, other, panel, given, names)
    kind, _, quantity = panel.partition("-")
    if kind in ("unit", *CURVE_KINDS) and quantity in ("normals", "neurons"):
        return _unit_request(reader, kind, quantity, given)
    if panel == "verdict":
        if not (reader.folder / "verdict.json").is_file():
            raise NotFound(f"{reader.key} has no verdict; a Scope writes one when it ends.")
        return FigureRequest("verdict", ("verdict",), step or 0, member)
    if panel in ("alignment", "spectra"):
        kernels = tuple(name for name in ALIGNED_KERNELS if reader.steps(name, member))
        kind = "alignment" if panel == "alignment" else "spectrum"
        return FigureRequest(kind, kernels, shown_step(reader, kernels[0] if kernels else panel, step, member), member)
    if kind in ("spectrum", "map") and quantity:
        drawn = "neurons" if kind == "map" else "spectrum"
        return FigureRequest(drawn, (quantity,), shown_step(reader, quantity, step, member), member)
    if kind == "array" and quantity:
        return _array_request(reader, quantity, step, member)
    if panel == "halfspaces":
        return _inputs_request(reader, given)
    if panel == "units" and half_space_quantity(reader, member) == BIASES:
        return FigureRequest("half_spaces", (BIASES,), shown_step(reader, BIASES, step, member), member)
    return _array_request(reader, "normals" if panel == "units" else panel, step, member)


def _scalars(reader: RunReader, panel: str) -> tuple[str, ...]:
    """The scalars that a panel's name stands for: one, several with commas between, or all losses; empty if none."""
    there = {name for line in reader.lines for name in line.scalars}
    if panel == "losses":
        found = tuple(sorted(name for name in there if name.startswith("loss")))
        if not found:
            raise NotFound(f"{reader.key} has no losses.")
        return found
    wanted = (panel,) if panel in there else tuple(panel.split(","))
    return wanted if set(wanted) <= there else ()


def _array_request(reader: RunReader, quantity: str, step: int | None, member: int) -> FigureRequest:
    at = shown_step(reader, quantity, step, member)
    values = reader.find_array(quantity, at, member).read()
    name, index = reader.locate(quantity, at, member)
    kind = _sample_figure_kind(reader, quantity, values) or kind_of_array(quantity, values.shape)
    if kind not in READ_BY_STORED_NAME:
        return FigureRequest(kind, (quantity,), at, member)
    return FigureRequest(kind, (name,), at, index if reader.find_array(quantity, at, member).shape()[0][0] > 1 else 0)


def _sample_figure_kind(reader: RunReader, quantity: str, values: NDArray[Any]) -> str | None:
    """The kind of figure for outputs and active paths, as the page draws them; ``None`` for other arrays."""
    probe_set = probe_set_of(reader)
    if quantity == "paths" and values.ndim == 1 and probe_set.kind != "circle":
        return "path_strips"
    if quantity != "output":
        return None
    if probe_set.margins(values) is not None:
        return "margins"
    real = probe_set.y is not None and probe_set.labels() is None and probe_set.y.size == values.size
    return "output_against_target" if real and probe_set.kind != "circle" else None


def _unit_request(reader: RunReader, kind: str, quantity: str, given: Mapping[str, int]) -> FigureRequest:
    member = given.get("member", 0)
    step = shown_step(reader, quantity, given.get("step"), member)
    more: dict[str, int | str] = {"layer": given.get("layer", 0), "unit": given.get("unit", 0)}
    if kind == "unit":
        return FigureRequest("unit", (quantity,), step, member, more)
    return FigureRequest("unit_curves", (quantity,), step, member, more | {"what": kind})


def _inputs_request(reader: RunReader, given: Mapping[str, int]) -> FigureRequest:
    member, probe_set = given.get("member", 0), probe_set_of(reader)
    if reader.steps("normals", member) and probe_set.kind not in ("circle", "points2d"):
        step = shown_step(reader, "normals", given.get("step"), member)
        if probe_set.image_shape is None:
            return FigureRequest("neurons", ("normals",), step, member)
        return FigureRequest("normal_images", ("normals",), step, member, {"layer": given.get("layer", 0)})
    made = probe_set.generated.get("probe_x")
    if made is None and not reader.steps("probe_x"):
        raise NotFound(f"{reader.key} keeps no inputs (probe_x): there is no plane to draw.")
    shape = reader.find_array("probe_x", reader.steps("probe_x")[0], 0).shape()[0][1:] if made is None else made.shape
    if math.prod(shape[1:]) != 2:
        raise NotFound(f"the inputs of {reader.key} are {' x '.join(map(str, shape))}, not points of a plane.")
    half_spaces = half_space_quantity(reader, member)
    grid = ("grid_output",) if reader.steps("grid_output", member) else ()
    names = grid if half_spaces is None else (half_spaces, *grid)
    last = max(reader.steps(names[0], member), default=0) if names else 0
    step = shown_step(reader, names[0], given.get("step"), member) if names else given.get("step", last)
    return FigureRequest("inputs", names, step, member, {"layer": given.get("layer", 0)})


def _comparison_request(
    reader: RunReader, other: RunReader, panel: str, given: Mapping[str, int], names: tuple[str, ...]
) -> FigureRequest:
    member, member2 = given.get("member", 0), given.get("member2", 0)
    more: dict[str, int | str] = {"other": str(other.folder), "step2": 0, "member2": member2}
    if names:
        if not _scalars(other, panel):
            raise NotFound(f"{other.key} has no {panel!r}.")
        return FigureRequest("two_curves", names, given.get("step", 0), member, more)
    quantity = panel.removeprefix("difference-").removeprefix("array-")
    step = shown_step(reader, quantity, given.get("step"), member)
    more["step2"] = shown_step(other, quantity, given.get("step"), member2)
    if not panel.startswith("difference-"):
        places = ((reader, step, member), (other, int(more["step2"]), member2))
        classes = quantity == "output" and all(
            probe_set_of(run).margins(run.find_array(quantity, at, place).read()) is not None
            for run, at, place in places
        )
        return FigureRequest("two_margins" if classes else "two_per_sample", (quantity,), step, member, more)
    shapes = [
        run.find_array(quantity, at, place).shape()[0][1:]
        for run, at, place in ((reader, step, member), (other, int(more["step2"]), member2))
    ]
    if shapes[0] != shapes[1] or len(shapes[0]) != 2:
        raise BadRequest(f"{shapes[0]} and {shapes[1]} have different sizes and cannot be subtracted.")
    check_same_samples(reader, other, quantity)
    return FigureRequest("difference", (quantity,), step, member, more)
