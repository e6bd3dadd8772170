"""Figures of fitted half-space estimators: decision cells in the plane, normals as images, one prediction as a card."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from unlazy import plots
from unlazy.estimators.explanations import Explanation
from unlazy.runtime import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    return plots.grid(1, 1, size)[1][0, 0] if ax is None else ax


def draw_cells(estimator: Any, X: Any, y: Any = None, *, ax: Axes | None = None, resolution: int = 200) -> Axes:
    """Draw the score of an estimator of two columns, the borders of its half-spaces, and the rows ``X`` coloured by ``y``.

    The score is that of the target, or of the second of two classes; of more classes the predicted one is shown.
    """
    rows = estimator._check_rows(X)
    spaces = estimator.half_spaces_
    require(rows.shape[1] == 2, f"cells are drawn in the plane, of 2 columns; this estimator has {rows.shape[1]}.")
    axes = _axes(ax, (4.5, 4))
    low, high = rows.min(0), rows.max(0)
    margin = 0.05 * (high - low)
    low, high = low - margin, high + margin
    sides = [np.linspace(low[i], high[i], resolution) for i in (0, 1)]
    places = np.stack(np.meshgrid(*sides), axis=-1).reshape(-1, 2)
    scores = estimator.path_sum_(places)
    shown = scores[:, 0] if scores.shape[1] == 1 else scores.argmax(1)
    extent = (low[0], high[0], low[1], high[1])
    centred = hasattr(estimator, "classes_") and scores.shape[1] == 1
    top = float(np.abs(shown).max()) or 1.0
    colours: dict[str, Any] = {"cmap": "RdBu", "vmin": -top, "vmax": top} if centred else {"cmap": "cividis"}
    picture = shown.reshape(resolution, resolution)
    axes.imshow(picture, origin="lower", extent=extent, aspect="auto", alpha=0.7, **colours)
    pre = estimator.path_sum_.pre_activations(places).transpose(0, 1, 3, 2).reshape(-1, resolution, resolution)
    for q in pre:
        if q.min() < 0 < q.max():
            axes.contour(*sides, q, levels=[0], colors=plots.COLOURS["black"], linewidths=0.3, alpha=0.3)
    if y is not None:
        labels = np.unique(np.asarray(y), return_inverse=True)[1]
        names = [name for name in plots.COLOURS if name not in ("grey", "black")]
        points = [plots.COLOURS[names[label % len(names)]] for label in labels] if hasattr(estimator, "classes_") else y
        axes.scatter(rows[:, 0], rows[:, 1], c=points, s=12, edgecolors="white", linewidths=0.4)
    axes.set(xlabel=spaces.feature_names[0], ylabel=spaces.feature_names[1])
    return axes


def draw_normals(
    estimator: Any, shape: tuple[int, int], *, member: int = 0, layer: int = 0, ax: Axes | None = None
) -> Axes:
    """Draw the normals of one layer's half-spaces as images of ``shape``, columns weighed by their deviation."""
    spaces = estimator.half_spaces_
    normals = spaces.normals[member, layer] * spaces.deviations
    fits = shape[0] * shape[1] == normals.shape[1]
    require(fits, f"images of shape {shape} have {shape[0] * shape[1]} pixels; there are {normals.shape[1]} columns.")
    axes = _axes(ax, (6, 6))
    images = normals / np.maximum(np.abs(normals).max(1, keepdims=True), 1e-300)
    side = int(np.ceil(np.sqrt(len(images))))
    canvas = np.full((side * (shape[0] + 1), side * (shape[1] + 1)), np.nan)
    for number, image in enumerate(images):
        top, left = (number // side) * (shape[0] + 1), (number % side) * (shape[1] + 1)
        canvas[top : top + shape[0], left : left + shape[1]] = image.reshape(shape)
    axes.imshow(canvas, cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
    axes.set(xticks=[], yticks=[], title=f"member {member}, layer {layer + 1}")
    axes.spines[:].set_visible(False)
    return axes


def draw_rules(explanation: Explanation, *, ax: Axes | None = None) -> Axes:
    """Draw one explained score as bars: the intercept, the listed paths with their words, and the rest. Returns the axes."""
    lines = explanation.lines()
    axes = _axes(ax, (9, 0.6 * len(lines) + 1))
    values = [value for _, value in lines]
    colours = [plots.COLOURS["blue" if value >= 0 else "red"] for value in values]
    axes.barh(range(len(lines)), values, color=colours)
    axes.set_yticks(range(len(lines)), [textwrap.fill(words, 70) for words, _ in lines], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(0, color=plots.COLOURS["grey"], linewidth=0.6)
    axes.set(
        title=f"{explanation.prediction}: score of {explanation.output} {explanation.score:.3g}", xlabel="contribution"
    )
    return axes
