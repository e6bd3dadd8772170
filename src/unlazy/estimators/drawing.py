"""Figures of fitted half-space estimators: decision cells in the plane, normals as images, one prediction as a card."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from unlazy import plots
from unlazy.estimators.explanations import Explanation
from unlazy.estimators.path_sum import Array
from unlazy.runtime import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    return plots.grid(1, 1, size)[1][0, 0] if ax is None else ax


def _require_half_spaces(estimator: Any) -> None:
    kind = type(estimator).__name__
    require(hasattr(estimator, "_check_rows"), f"a HalfSpaceClassifier or HalfSpaceRegressor is meant, got {kind}.")


def draw_cells(estimator: Any, X: Any, y: Any = None, *, ax: Axes | None = None, resolution: int = 200) -> Axes:
    """Draw the score of an estimator of two columns, the borders of its half-spaces, and the rows ``X`` coloured by ``y``.

    The score is that of the target, or of the second of two classes; of more classes the predicted one is shown. Returns the
    axes; :class:`CellsDisplay` keeps the numbers.
    """
    _require_half_spaces(estimator)
    rows = estimator._check_rows(X)
    shown = CellsDisplay.from_estimator(estimator, X, grid_resolution=resolution, ax=_axes(ax, (4.5, 4)))
    if y is not None:
        require(np.shape(y) == (len(rows),), f"y must have one entry a row: {len(rows)} rows, y {np.shape(y)}.")
        labels = np.unique(np.asarray(y), return_inverse=True)[1]
        names = [name for name in plots.COLOURS if name not in ("grey", "black")]
        points = [plots.COLOURS[names[label % len(names)]] for label in labels] if hasattr(estimator, "classes_") else y
        shown.ax_.scatter(rows[:, 0], rows[:, 1], c=points, s=12, edgecolors="white", linewidths=0.4)
    return shown.ax_


class CellsDisplay:
    """The score of an estimator of two columns and the borders of its half-spaces, with the manners of scikit-learn's displays.

    Like ``sklearn.inspection.DecisionBoundaryDisplay``: made by :meth:`from_estimator`, drawn again by :meth:`plot`. ``xx0``,
    ``xx1``, ``response``: the grid and what is shown on it. ``borders [half-spaces, grid, grid]``: at least 0 inside. Drawn:
    ``ax_``, ``figure_``, ``surface_``.
    """

    def __init__(
        self, *, xx0: Array, xx1: Array, response: Array, borders: Array, xlabel: str, ylabel: str, centred: bool
    ) -> None:
        self.xx0, self.xx1, self.response, self.borders = xx0, xx1, response, borders
        self.xlabel, self.ylabel, self.centred = xlabel, ylabel, centred

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,
        *,
        grid_resolution: int = 200,
        eps: float | None = None,
        ax: Axes | None = None,
        **kwargs: Any,
    ) -> CellsDisplay:
        """Evaluate the estimator on a grid around the rows ``X`` and draw it; ``eps``: how far around, by default a twentieth.

        Further arguments go to ``imshow``.
        """
        rows, spaces = estimator._check_rows(X), estimator.half_spaces_
        require(rows.shape[1] == 2, f"cells are drawn in the plane, of 2 columns; this estimator has {rows.shape[1]}.")
        require(grid_resolution >= 2, f"grid_resolution must be at least 2, got {grid_resolution!r}.")
        low, high = rows.min(0), rows.max(0)
        margin = 0.05 * (high - low) if eps is None else eps
        sides = [np.linspace(*ends, grid_resolution) for ends in zip(low - margin, high + margin, strict=True)]
        xx0, xx1 = np.meshgrid(*sides)
        places = np.stack([xx0, xx1], axis=-1).reshape(-1, 2)
        scores = estimator.path_sum_(places)
        response = (scores[:, 0] if scores.shape[1] == 1 else scores.argmax(1)).reshape(xx0.shape)
        borders = estimator.path_sum_.pre_activations(places).transpose(0, 1, 3, 2).reshape(-1, *xx0.shape)
        shown = cls(
            xx0=xx0,
            xx1=xx1,
            response=response,
            borders=borders,
            xlabel=spaces.feature_names[0],
            ylabel=spaces.feature_names[1],
            centred=hasattr(estimator, "classes_") and scores.shape[1] == 1,
        )
        return shown.plot(ax=ax, **kwargs)

    def plot(self, *, ax: Axes | None = None, **kwargs: Any) -> CellsDisplay:
        """Draw on these axes, or on new ones; further arguments go to ``imshow``."""
        axes = _axes(ax, (4.5, 4))
        top = float(np.abs(self.response).max()) or 1.0
        colours: dict[str, Any] = {"cmap": "RdBu", "vmin": -top, "vmax": top} if self.centred else {"cmap": "cividis"}
        extent = (self.xx0[0, 0], self.xx0[0, -1], self.xx1[0, 0], self.xx1[-1, 0])
        settings = {"origin": "lower", "extent": extent, "aspect": "auto", "alpha": 0.7, **colours, **kwargs}
        self.surface_ = axes.imshow(self.response, **settings)
        for border in self.borders:
            if border.min() < 0 < border.max():
                style: dict[str, Any] = {"colors": plots.COLOURS["black"], "linewidths": 0.3, "alpha": 0.3}
                axes.contour(self.xx0, self.xx1, border, levels=[0], **style)
        axes.set(xlabel=self.xlabel, ylabel=self.ylabel)
        self.ax_, self.figure_ = axes, axes.figure
        return self


def draw_normals(
    estimator: Any, shape: tuple[int, int], *, member: int = 0, layer: int = 0, ax: Axes | None = None
) -> Axes:
    """Draw the normals of one layer's half-spaces as images of ``shape``, columns weighed by their deviation."""
    _require_half_spaces(estimator)
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
