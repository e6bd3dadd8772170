"""Draws a panel as PNG, SVG or PDF, and writes the Python code that draws it.

That code is the source of the function which drew the figure, so that the two cannot differ. Every drawing function takes the
run, the names of its quantities, a step and a member; it imports what it needs inside, so that it runs when pasted elsewhere.
"""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unlazy import plots
from unlazy.store import Run
from unlazy.studio.figures import curves, half_spaces, heat_map, samples, units, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = {"png": "image/png", "svg": "image/svg+xml", "pdf": "application/pdf"}


@dataclass(frozen=True)
class FigureRequest:
    """What to draw: the kind of figure, the stored quantities, a step, a member, and further arguments (``more``)."""

    kind: str
    names: tuple[str, ...]
    step: int
    member: int
    more: Mapping[str, int | str] = field(default_factory=dict)


def kind_of_array(quantity: str, shape: tuple[int, ...]) -> str:
    """The kind of figure that shows an array of one member, by its name and shape."""
    name = quantity.removeprefix("scene_")
    if name == "normals" and len(shape) == 3 and shape[-1] == 2:
        return "half_spaces"
    if name in ("neurons", "normals"):
        return "neurons"
    if len(shape) == 2 and shape[0] == shape[1]:
        return "heat_map"
    return "per_sample" if len(shape) == 1 or (len(shape) == 2 and shape[1] <= 10) else "table"


DRAWINGS: dict[str, Callable[..., Any]] = {
    "curves": curves.draw_curves,
    "two_curves": curves.draw_two_curves,
    "spectrum": curves.draw_spectrum,
    "alignment": curves.draw_alignment,
    "heat_map": heat_map.draw_heat_map,
    "difference": heat_map.draw_difference,
    "table": heat_map.draw_table,
    "half_spaces": half_spaces.draw_half_spaces,
    "inputs": half_spaces.draw_inputs,
    "normal_images": half_spaces.draw_normal_images,
    "neurons": units.draw_neurons,
    "unit": units.draw_unit,
    "unit_curves": units.draw_unit_curves,
    "per_sample": samples.draw_per_sample,
    "path_strips": samples.draw_path_strips,
    "margins": samples.draw_margins,
    "output_against_target": samples.draw_output_against_target,
    "two_per_sample": samples.draw_two_per_sample,
    "two_margins": samples.draw_two_margins,
    "verdict": verdict.draw_verdict,
}
# these read the run folder themselves, so that they need the stored name of an array
READ_BY_STORED_NAME = {
    "curves",
    "heat_map",
    "per_sample",
    "table",
}


def draw(run: Run, request: FigureRequest) -> Figure:
    """Draw a panel as a matplotlib figure."""
    with plots.style():
        figure: Figure = DRAWINGS[request.kind](run, request.names, request.step, request.member, **request.more)
    return figure


def render(figure: Figure, form: str) -> bytes:
    """The figure as PNG, SVG or PDF; equal figures give equal bytes."""
    import matplotlib

    no_dates = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    metadata = no_dates.get(form, {"CreationDate": None, "Producer": None, "Creator": None})
    buffer = io.BytesIO()
    with plots.style(), matplotlib.rc_context({"svg.hashsalt": "unlazy", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=form, metadata=metadata)
    return buffer.getvalue()


def code(folder: Path, request: FigureRequest) -> str:
    """A Python script that draws the panel from the run folder and saves it as PNG in the current folder."""
    drawing = DRAWINGS[request.kind]
    source = re.sub(r"\) -> Figure:", "):", inspect.getsource(drawing), count=1)
    name = f"{request.names[0] if len(request.names) == 1 else request.kind}-{request.step}"
    arguments = {"step": request.step, "member": request.member, **request.more}
    text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return (
        "import numpy as np\n\nfrom unlazy import plots\nfrom unlazy.store import Run\n\n\n"
        f"{source}\n\n"
        f"run = Run({str(folder)!r})\n"
        "with plots.style():\n"
        f"    figure = {drawing.__name__}(run, {request.names!r}, {text})\n"
        f"    figure.savefig({re.sub(r'[^A-Za-z0-9_.-]', '_', name) + '.png'!r})\n"
    )
