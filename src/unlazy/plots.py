"""Drawing functions that all figures share: bands, heat maps of kernels, half-planes, legends. Uses no pyplot."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unlazy.curves import COLOURS as COLOURS
from unlazy.curves import STYLE as STYLE
from unlazy.curves import draw_band as draw_band
from unlazy.curves import style as style
from unlazy.store import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure


def grid(
    rows: int, columns: int, size: tuple[float, float], *, by_hand: bool = False, **options: Any
) -> tuple[Figure, NDArray[Any]]:
    """A new figure and its axes ``[rows, columns]``; ``size``: width and height of one panel in inches.

    ``by_hand``: no automatic layout, which leaves polar axes too little room.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout=None if by_hand else "constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def save_figure(figure: Figure, stem: Path) -> None:
    """Write ``stem.png`` and ``stem.pdf``, equal figures give equal bytes."""
    with style():
        png, pdf = io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", metadata={"Software": None})
        figure.savefig(pdf, format="pdf", metadata={"CreationDate": None, "Producer": None, "Creator": None})
    write_file(stem.with_suffix(".png"), png.getvalue())
    write_file(stem.with_suffix(".pdf"), pdf.getvalue())


def legend_below(axes: Axes, columns: int = 2) -> None:
    """Put the legend of one axis below its label, where it covers nothing."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=columns)


def shared_legend(figure: Figure, columns: int) -> None:
    """Put one legend below all panels, with every label once."""
    drawn: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        drawn |= dict(zip(labels, handles, strict=True))
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=columns)


def draw_heat_map(axes: Axes, values: NDArray[Any], top: float, colours: str = "cividis") -> Any:
    """Draw a kernel of the circle data as a heat map: samples by angle, so that the top half comes first."""
    image = axes.imshow(values, vmin=0, vmax=top, cmap=colours, interpolation="nearest")
    half = values.shape[0] / 2 - 0.5
    axes.axhline(half, color="white", linewidth=0.5, alpha=0.6)
    axes.axvline(half, color="white", linewidth=0.5, alpha=0.6)
    axes.set_xticks([half / 2, 1.5 * half], ["top", "bottom"])
    axes.set_yticks([half / 2, 1.5 * half], ["top", "bottom"], rotation=90, va="center")
    axes.tick_params(length=0)
    return image


def draw_half_planes(axes: Axes, normals: NDArray[Any], offsets: NDArray[Any], colour: str = "blue") -> None:
    """Draw one disc per unit, one row per layer, filled where normal . x + offset >= 0."""
    from matplotlib.collections import PolyCollection

    layers, units = offsets.shape
    centres = np.array([[(2.3 * unit, -2.3 * layer) for unit in range(units)] for layer in range(layers)])
    parts = [
        _clipped_disc(normals[layer, unit].astype(float), float(offsets[layer, unit])) + centres[layer, unit]
        for layer in range(layers)
        for unit in range(units)
    ]
    rims = [_arc(0, np.pi, 61) + centre for centre in centres.reshape(-1, 2)]
    axes.add_collection(PolyCollection(rims, facecolors="none", edgecolors=COLOURS["grey"], linewidths=0.6))
    axes.add_collection(PolyCollection([p for p in parts if len(p)], facecolors=COLOURS[colour], alpha=0.55))
    axes.set(xlim=(-1.3, 2.3 * units - 1), ylim=(1 - 2.3 * layers, 1.3), aspect="equal", xticks=[])
    axes.set_yticks(centres[:, 0, 1], [f"layer {layer + 1}" for layer in range(layers)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _clipped_disc(normal: NDArray[np.float64], offset: float, corners: int = 91) -> NDArray[np.float64]:
    """Corners of {|x| <= 1, normal . x + offset >= 0}: an arc of the circle, closed by its chord."""
    length = float(np.hypot(*normal))
    if length == 0:
        return _arc(0, np.pi, corners) if offset >= 0 else np.empty((0, 2))
    cosine = np.clip(-offset / length, -1, 1)  # cosine of half the opening angle
    if cosine >= 1:
        return np.empty((0, 2))
    return _arc(float(np.arctan2(normal[1], normal[0])), float(np.arccos(cosine)), corners)


def _arc(centre: float, half_width: float, corners: int) -> NDArray[np.float64]:
    angle = centre + np.linspace(-half_width, half_width, corners)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


VERDICT_COLOURS = {"holds": "green", "undecided": "grey", "fails": "red"}


def draw_scorecard(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A figure with one bar per claim, which shows the verdicts of its parts, and its statement."""
    with style():
        figure, axes = grid(1, 1, (11, 0.24 * len(rows) + 0.8))
        axis = axes[0, 0]
        for place, row in enumerate(rows):
            start = 0.0
            verdicts = [part["verdict"] if part["verdict"] in VERDICT_COLOURS else "undecided" for part in row["parts"]]
            for verdict, colour in VERDICT_COLOURS.items():
                share = verdicts.count(verdict) / max(1, len(verdicts))
                axis.barh(place, share, left=start, height=0.72, color=COLOURS[colour])
                start += share
            axis.barh(place, 1, height=0.72, facecolor="none", edgecolor=COLOURS["grey"], linewidth=0.6)
            words = (
                row["statement"] if len(row["statement"]) < 105 else row["statement"][:102].rsplit(" ", 1)[0] + " ..."
            )
            axis.text(1.03, place, words, va="center", fontsize=7.5, color=COLOURS["black"])
        axis.set_yticks(range(len(rows)), [f"{row['id']}  {row['verdict']}" for row in rows], fontsize=7.5)
        axis.set_xlim(0, 5.6)
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.set_xticks([])
        axis.tick_params(length=0)
        for side in axis.spines.values():
            side.set_visible(False)
        handles = [axis.barh(-9, 0, color=COLOURS[colour], label=name) for name, colour in VERDICT_COLOURS.items()]
        handles[1].set_label("are undecided")
        axis.legend(
            handles=handles,
            ncols=4,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            title="parts of the claim that",
            fontsize=8,
        )
        return figure
