"""Names of panels, as figure and code links write them, and what each draws.

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

from unlazy.studio.alike import alike
from unlazy.studio.answers import BadRequest, NotHere
from unlazy.studio.figures import OF_FOLDERS, Request, kind_of
from unlazy.studio.openrun import OpenRun
from unlazy.studio.probe import probe_of
from unlazy.studio.units import BIASES, WHAT, kept_as

NUMBERS = ("step", "member", "layer", "unit", "member2")
ALIGNED = ("overlap", "tangent")


def shown_step(opened: OpenRun, quantity: str, step: int | None, member: int) -> int:
    """The stored step that stands at ``step``: the last before it, else the first; without ``step`` the last of all."""
    steps = opened.steps(quantity, member)
    if not steps:
        raise NotHere(f"{opened.key} has no panel or array {quantity!r}.")
    return steps[-1] if step is None else max((at for at in steps if at <= step), default=steps[0])


def check_alike(opened: OpenRun, other: OpenRun, quantity: str) -> None:
    """Kernels over different samples are not subtracted, whoever asks."""
    told = alike(opened, other, quantity)
    if told.same is False:
        raise BadRequest(told.why)


def request(opened: OpenRun, panel: str, given: Mapping[str, int], other: OpenRun | None) -> Request:
    """A panel's name with its step, member and whatever else it needs, as names and places in the run folder."""
    member, step = given.get("member", 0), given.get("step")
    names = _scalars(opened, panel)
    if names and other is None:
        return Request("curves", names, 0, member)
    if other is not None:
        return _of_two(opened, other, panel, given, names)
    kind, _, quantity = panel.partition("-")
    if kind in ("unit", *WHAT) and quantity in ("normals", "neurons"):
        return _of_unit(opened, kind, quantity, given)
    if panel == "verdict":
        if not (opened.folder / "verdict.json").is_file():
            raise NotHere(f"{opened.key} has no verdict; a Scope writes one when it ends.")
        return Request("verdict", ("verdict",), step or 0, member)
    if panel in ("alignment", "spectra"):
        kernels = tuple(name for name in ALIGNED if opened.steps(name, member))
        kind = "alignment" if panel == "alignment" else "spectrum"
        return Request(kind, kernels, shown_step(opened, kernels[0] if kernels else panel, step, member), member)
    if kind in ("spectrum", "map") and quantity:
        drawn = "neurons" if kind == "map" else "spectrum"
        return Request(drawn, (quantity,), shown_step(opened, quantity, step, member), member)
    if kind == "array" and quantity:
        return _of_array(opened, quantity, step, member)
    if panel == "halfspaces":
        return _inputs(opened, given)
    if panel == "units" and kept_as(opened, member) == BIASES:
        return Request("half_spaces", (BIASES,), shown_step(opened, BIASES, step, member), member)
    return _of_array(opened, "normals" if panel == "units" else panel, step, member)


def _scalars(opened: OpenRun, panel: str) -> tuple[str, ...]:
    """The scalars that a name stands for: itself, a list with commas, or all losses."""
    there = {name for line in opened.lines for name in line.scalars}
    if panel == "losses":
        found = tuple(sorted(name for name in there if name.startswith("loss")))
        if not found:
            raise NotHere(f"{opened.key} has no losses.")
        return found
    wanted = (panel,) if panel in there else tuple(panel.split(","))
    return wanted if set(wanted) <= there else ()


def _of_array(opened: OpenRun, quantity: str, step: int | None, member: int) -> Request:
    at = shown_step(opened, quantity, step, member)
    values = opened.stored(quantity, at, member).read()
    name, index = opened.source(quantity, at, member)
    kind = _of_samples(opened, quantity, values) or kind_of(quantity, values.shape)
    if kind not in OF_FOLDERS:
        return Request(kind, (quantity,), at, member)
    return Request(kind, (name,), at, index if opened.stored(quantity, at, member).shape()[0][0] > 1 else 0)


def _of_samples(opened: OpenRun, quantity: str, values: NDArray[Any]) -> str | None:
    """Outputs and paths as the page draws them: margins of classes, numbers against their targets, columns of dots."""
    probe = probe_of(opened)
    if quantity == "paths" and values.ndim == 1 and probe.kind != "circle":
        return "strips"
    if quantity != "output":
        return None
    if probe.margins(values) is not None:
        return "margins"
    real = probe.y is not None and probe.labels() is None and probe.y.size == values.size
    return "against" if real and probe.kind != "circle" else None


def _of_unit(opened: OpenRun, kind: str, quantity: str, given: Mapping[str, int]) -> Request:
    member = given.get("member", 0)
    step = shown_step(opened, quantity, given.get("step"), member)
    more: dict[str, int | str] = {"layer": given.get("layer", 0), "unit": given.get("unit", 0)}
    if kind == "unit":
        return Request("unit", (quantity,), step, member, more)
    return Request("unit_curves", (quantity,), step, member, more | {"what": kind})


def _inputs(opened: OpenRun, given: Mapping[str, int]) -> Request:
    member, probe = given.get("member", 0), probe_of(opened)
    if opened.steps("normals", member) and probe.kind not in ("circle", "points2d"):
        step = shown_step(opened, "normals", given.get("step"), member)
        if probe.image_shape is None:
            return Request("neurons", ("normals",), step, member)
        return Request("pictures", ("normals",), step, member, {"layer": given.get("layer", 0)})
    made = probe.made.get("probe_x")
    if made is None and not opened.steps("probe_x"):
        raise NotHere(f"{opened.key} keeps no inputs (probe_x): there is no plane to draw.")
    shape = opened.stored("probe_x", opened.steps("probe_x")[0], 0).shape()[0][1:] if made is None else made.shape
    if math.prod(shape[1:]) != 2:
        raise NotHere(f"the inputs of {opened.key} are {' x '.join(map(str, shape))}, not points of a plane.")
    kept = kept_as(opened, member)
    grid = ("grid_output",) if opened.steps("grid_output", member) else ()
    names = grid if kept is None else (kept, *grid)
    last = max(opened.steps(names[0], member), default=0) if names else 0
    step = shown_step(opened, names[0], given.get("step"), member) if names else given.get("step", last)
    return Request("inputs", names, step, member, {"layer": given.get("layer", 0)})


def _of_two(opened: OpenRun, other: OpenRun, panel: str, given: Mapping[str, int], names: tuple[str, ...]) -> Request:
    member, member2 = given.get("member", 0), given.get("member2", 0)
    more: dict[str, int | str] = {"other": str(other.folder), "step2": 0, "member2": member2}
    if names:
        if not _scalars(other, panel):
            raise NotHere(f"{other.key} has no {panel!r}.")
        return Request("two_curves", names, given.get("step", 0), member, more)
    quantity = panel.removeprefix("difference-").removeprefix("array-")
    step = shown_step(opened, quantity, given.get("step"), member)
    more["step2"] = shown_step(other, quantity, given.get("step"), member2)
    if not panel.startswith("difference-"):
        places = ((opened, step, member), (other, int(more["step2"]), member2))
        classes = quantity == "output" and all(
            probe_of(run).margins(run.stored(quantity, at, place).read()) is not None for run, at, place in places
        )
        return Request("two_margins" if classes else "two_along", (quantity,), step, member, more)
    shapes = [
        run.stored(quantity, at, place).shape()[0][1:]
        for run, at, place in ((opened, step, member), (other, int(more["step2"]), member2))
    ]
    if shapes[0] != shapes[1] or len(shapes[0]) != 2:
        raise BadRequest(f"{shapes[0]} and {shapes[1]} have different sizes and cannot be subtracted.")
    check_alike(opened, other, quantity)
    return Request("difference", (quantity,), step, member, more)
