"""Panels as figures for print, and as the Python that makes them.

The code that a reader gets is the source of the function that drew the figure, so the two cannot differ.
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
from unlazy.studio import drawings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = {"png": "image/png", "svg": "image/svg+xml", "pdf": "application/pdf"}


@dataclass(frozen=True)
class Request:
    """A panel in terms of the run folder: what to draw, of which quantities, when, of which member, and what else it needs."""

    kind: str
    names: tuple[str, ...]
    step: int
    member: int
    more: Mapping[str, int | str] = field(default_factory=dict)


def kind_of(quantity: str, shape: tuple[int, ...]) -> str:
    """How an array of one member is drawn."""
    name = quantity.removeprefix("scene_")
    if name == "normals" and len(shape) == 3 and shape[-1] == 2:
        return "half_spaces"
    if name in ("neurons", "normals"):
        return "neurons"
    if len(shape) == 2 and shape[0] == shape[1]:
        return "heat_map"
    return "along" if len(shape) == 1 or (len(shape) == 2 and shape[1] <= 10) else "table"


MAKERS: dict[str, Callable[..., Any]] = {
    maker.__name__: maker
    for maker in (
        drawings.curves,
        drawings.heat_map,
        drawings.spectrum,
        drawings.alignment,
        drawings.half_spaces,
        drawings.inputs,
        drawings.pictures,
        drawings.along,
        drawings.strips,
        drawings.margins,
        drawings.against,
        drawings.neurons,
        drawings.table,
        drawings.verdict,
        drawings.difference,
        drawings.two_curves,
        drawings.two_along,
        drawings.two_margins,
        drawings.unit,
        drawings.unit_curves,
    )
}
OF_FOLDERS = {"curves", "heat_map", "along", "table"}  # read the run folder by its own names and places


def draw(run: Run, request: Request) -> Figure:
    """The figure of a panel."""
    with plots.style():
        figure: Figure = MAKERS[request.kind](run, request.names, request.step, request.member, **request.more)
    return figure


def render(figure: Figure, form: str) -> bytes:
    """The figure as PNG, SVG or PDF, the same bytes every time."""
    import matplotlib

    nothing = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    metadata = nothing.get(form, {"CreationDate": None, "Producer": None, "Creator": None})
    buffer = io.BytesIO()
    with plots.style(), matplotlib.rc_context({"svg.hashsalt": "unlazy", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=form, metadata=metadata)
    return buffer.getvalue()


def code(folder: Path, request: Request) -> str:
    """Python that draws the panel from the run folder and writes it beside the caller; runs as it is."""
    maker = MAKERS[request.kind]
    source = re.sub(r"\) -> Figure:", "):", inspect.getsource(maker), count=1)
    name = f"{request.names[0] if len(request.names) == 1 else request.kind}-{request.step}"
    given = {"step": request.step, "member": request.member, **request.more}
    words = ", ".join(f"{key}={value!r}" for key, value in given.items())
    return (
        "import numpy as np\n\nfrom unlazy import plots\nfrom unlazy.store import Run\n\n\n"
        f"{source}\n\n"
        f"run = Run({str(folder)!r})\n"
        "with plots.style():\n"
        f"    figure = {maker.__name__}(run, {request.names!r}, {words})\n"
        f"    figure.savefig({re.sub(r'[^A-Za-z0-9_.-]', '_', name) + '.png'!r})\n"
    )
