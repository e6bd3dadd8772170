"""What a fitted half-space estimator says of itself: half-spaces, active paths, rules in words, cells, importances."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unlazy.estimators.path_sum import ActivePath, Array, PathSum
from unlazy.runtime import InputError, require

if TYPE_CHECKING:
    from unlazy.estimators.distillation import DistilledRules
    from unlazy.estimators.flips import Flip

ROWS_AT_ONCE = 2048  # rows whose unit contributions are held in memory together
SHOWN_TERMS = 3  # columns of a half-space that its text names; the others are counted


@dataclass(frozen=True)
class EstimatorHalfSpaces:
    """The half-spaces of an estimator in the units of the raw columns.

    Unit i of layer l of member s is open where ``normals[s, l, i] . x + offsets[s, l, i] >= 0``. ``deviations``: the standard
    deviation of every column in training, by which texts decide which columns matter most.
    """

    normals: Array  # [members, layers, units, d]
    offsets: Array  # [members, layers, units]
    feature_names: tuple[str, ...]
    deviations: Array  # [d]

    def in_words(self, member: int, layer: int, unit: int, terms: int = SHOWN_TERMS) -> str:
        """One half-space as an inequality, such as ``0.8 width - 0.6 length >= 1.2``.

        The normal has unit length after every column was divided by its deviation. Columns beyond the ``terms`` with the largest
        weights are counted, not written.
        """
        normal, offset = self.normals[member, layer, unit], float(self.offsets[member, layer, unit])
        weights = np.abs(normal) * self.deviations
        length = float(np.linalg.norm(weights))
        if length == 0:
            return "always" if offset >= 0 else "never"
        order = [column for column in np.argsort(-weights, kind="stable") if weights[column] > 0]
        text = ""
        for column in order[:terms]:
            number = normal[column] / length
            sign = ("-" if number < 0 else "") if not text else (" - " if number < 0 else " + ")
            text += f"{sign}{abs(number):.3g} {self.feature_names[column]}"
        left = len(order) - terms
        more = f" + {left} smaller term{'s' if left > 1 else ''}" if left > 0 else ""
        return f"{text}{more} >= {-offset / length:.3g}"


@dataclass(frozen=True)
class Regions:
    """The cells of all half-spaces that hold training rows, fullest first.

    ``patterns [cells, bytes]``: which half-spaces hold the cell, eight to a byte (``numpy.packbits``). ``counts``: training rows
    in it. ``values [cells, outputs]``: the scores there (their mean, with linear experts).
    """

    patterns: NDArray[np.uint8]
    counts: NDArray[np.int64]
    values: Array

    def __len__(self) -> int:
        return len(self.counts)


@dataclass(frozen=True)
class Explanation:
    """One score of one row as a sum: ``intercept`` + contributions of ``paths`` + ``rest`` = ``score``.

    ``paths``: the active paths with the largest contributions. ``rest``: what the ``active`` - ``len(paths)`` paths that are not
    listed add together. ``share``: sizes of the listed contributions over those of all. ``conditions[i]``: the half-spaces of
    path i in words. ``print(explanation)`` shows all of it; a notebook shows it as a card.
    """

    output: str
    prediction: str
    score: float
    intercept: float
    rest: float
    share: float
    active: int
    paths: tuple[ActivePath, ...]
    conditions: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.paths)

    def lines(self) -> list[tuple[str, float]]:
        """Every term of the sum with its words: the intercept, the listed paths, the rest."""
        rules = ["if " + " and ".join(words) for words in self.conditions]
        listed = [(rule, path.contribution) for rule, path in zip(rules, self.paths, strict=True)]
        left = self.active - len(self.paths)
        return [("always", self.intercept), *listed, (f"{left} other active paths", self.rest)]

    def __str__(self) -> str:
        head = f"predicted: {self.prediction}. Score of {self.output}: {self.score:.4g}, the sum of"
        body = [f"  {value:+.4g}  {words}" for words, value in self.lines()]
        foot = f"The listed paths make up {self.share:.1%} of the sum of all |contributions|."
        return "\n".join([head, *body, foot])

    def to_html(self) -> str:
        """The explanation as an HTML table without scripts, for a notebook or a page."""
        largest = max((abs(value) for _, value in self.lines()), default=0.0) or 1.0
        rows = "".join(
            f"<tr><td style='text-align:right'>{value:+.4g}</td><td><div style='width:{round(60 * abs(value) / largest)}px;"
            f"height:9px;background:{'#0072b2' if value >= 0 else '#d55e00'}'></div></td>"
            f"<td style='text-align:left'>{html.escape(words)}</td></tr>"
            for words, value in self.lines()
        )
        return (
            f"<div><p><b>{html.escape(self.prediction)}</b>: score of {html.escape(self.output)} {self.score:.4g}</p>"
            f"<table>{rows}</table><p>The listed paths make up {self.share:.1%} of the sum of all |contributions|.</p></div>"
        )

    def _repr_html_(self) -> str:
        return self.to_html()


class Explained:
    """Explanations of an estimator that holds ``path_sum_``: each is computed from the very numbers that predict."""

    path_sum_: PathSum
    classes_: NDArray[Any]

    # --- of the whole function ------------------------------------------------------------------------------

    @property
    def half_spaces_(self) -> EstimatorHalfSpaces:
        """All half-spaces: normals, offsets, names of columns."""
        model = self._explainable()
        names = tuple(self._column_name(column) for column in range(model.normals.shape[-1]))
        return EstimatorHalfSpaces(model.normals, model.offsets, names, self._deviations)

    @property
    def regions_(self) -> Regions:
        """The cells that held training rows (of the last call, after ``partial_fit``), with counts and scores."""
        self._explainable()
        return self._regions

    @property
    def feature_importances_(self) -> Array:
        """The share of each column in the predictions on the training rows, ``[d]``; adds up to 1.

        For every half-space: the mean over rows of |sum of all active paths through it|, by dynamic programming over the paths.
        That is spread over the columns by |normal| times the column's deviation, and averaged over layers and outputs.
        """
        self._explainable()
        return self._importances

    # --- of one row -----------------------------------------------------------------------------------------

    def paths(self, x: Any, top: int | None = None, output: Any = None) -> Explanation:
        """The active paths of one row, largest in size first; with the intercept and the rest they add up to the score.

        ``x [d]``: one row (or a frame with one row). ``top``: list only so many; without it all of them, if there are not too
        many. ``output``: the class (or the number of the target) whose score is explained; by default the predicted class.
        """
        row = self._one_row(x)
        number = self._output_number(output, row)
        model = self._explainable()
        require(top is None or top >= 1, f"top must be at least 1 or None, got {top!r}.")
        found = model.all_paths(row, number) if top is None else model.largest_paths(row, number, top)
        score, intercept = float(model(row[None])[0, number]), float(model.intercept[number])
        listed = [path.contribution for path in found]
        rest = 0.0 if top is None else score - intercept - math.fsum(listed)
        total = float(model.absolute_sum(row[None])[0, number])
        share = math.fsum(abs(one) for one in listed) / total if total > 0 else 1.0
        spaces = self.half_spaces_
        conditions = tuple(
            tuple(spaces.in_words(path.member, layer, unit) for layer, unit in enumerate(path.units)) for path in found
        )
        active = int(model.count_active(row[None])[0])
        names = self._output_name(number), self._predicted(row)
        return Explanation(*names, score, intercept, rest, min(share, 1.0), active, tuple(found), conditions)

    def rules(self, x: Any, top: int = 5, output: Any = None) -> str:
        """The ``top`` most important active paths of one row as sentences, and the share of the score they cover."""
        return str(self.paths(x, top, output))

    def nearest_flip(self, x: Any, cells: int = 3000) -> Flip:
        """The smallest change of a row that changes the decision of a classifier; see :class:`unlazy.estimators.Flip`.

        Distances are Euclidean after every column was divided by its standard deviation. At most ``cells`` cells are searched;
        ``lower_bound`` is a distance within which, proven, no row is decided otherwise.
        """
        from unlazy.estimators.flips import nearest_flip

        require(hasattr(self, "classes_"), "nearest_flip asks when a decision changes; a regressor makes none.")
        found = nearest_flip(self._explainable(), self._one_row(x), self._deviations, cells)
        label = None if found.decision is None else np.asarray(self.classes_).tolist()[found.decision]
        return replace(found, decision=label)

    # --- smaller models -------------------------------------------------------------------------------------

    def distill(self, X: Any, y: Any = None, keep: float = 0.99, most: int = 300) -> DistilledRules:
        """A small set of paths that keeps the share ``keep`` of the score on ``X``, ``y``; see :class:`DistilledRules`.

        Without ``y`` it keeps the share ``keep`` of the estimator's own predictions. ``most``: the largest number of paths.
        """
        from unlazy.estimators.distillation import distill

        return distill(self, X, y, keep, most)

    def to_html(self) -> str:
        """A card of the fitted estimator: its size and its most important columns, as HTML without scripts."""
        model, shares = self._explainable(), self.feature_importances_
        rows = "".join(
            f"<tr><td style='text-align:left'>{html.escape(self._column_name(int(column)))}</td>"
            f"<td><div style='width:{round(160 * shares[column])}px;height:9px;background:#0072b2'></div></td>"
            f"<td>{shares[column]:.1%}</td></tr>"
            for column in np.argsort(-shares, kind="stable")[:10]
        )
        count = model.members * model.layers * model.units
        return (
            f"<div><p><b>{type(self).__name__}</b>: a sum over paths through {count} half-spaces ({model.members} networks of "
            f"{model.layers} layers of {model.units}); {len(self.regions_)} cells hold training rows.</p>"
            f"<table><tr><th>column</th><th></th><th>importance</th></tr>{rows}</table></div>"
        )

    # --- what the estimator fills in ------------------------------------------------------------------------

    _deviations: Array
    _regions: Regions
    _importances: Array

    def _column_name(self, column: int) -> str:
        raise NotImplementedError

    def _output_name(self, number: int) -> str:
        raise NotImplementedError

    def _output_number(self, output: Any, row: Array) -> int:
        raise NotImplementedError

    def _predicted(self, row: Array) -> str:
        raise NotImplementedError

    def _check_rows(self, X: Any) -> Any:
        raise NotImplementedError

    def _explainable(self) -> PathSum:
        """The sum over paths; raises if the estimator is not fitted or its gates are soft."""
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self, "path_sum_")
        self.path_sum_.require_half_spaces()
        return self.path_sum_

    def _one_row(self, x: Any) -> Array:
        """A row as an array ``[d]``: from a sequence, a one-row table, or a row of a frame."""
        self._explainable()
        if hasattr(x, "columns"):
            rows = self._check_rows(x)
        else:
            array = np.asarray(x, dtype=np.float64)
            rows = array[None] if array.ndim == 1 else array
        size = self.path_sum_.normals.shape[-1]
        if rows.shape != (1, size):
            raise InputError(
                f"one row with {size} columns is expected, got shape {np.shape(x)}; pick one, such as X[0]."
            )
        require(bool(np.isfinite(rows).all()), "the row contains NaN or infinity; fill such values first.")
        return np.asarray(rows[0], dtype=np.float64)

    def _summarise_training_rows(self, x: Array, weights: Array | None) -> None:
        """Keep what explanations need of the training rows: deviations, cells and importances."""
        model = self.path_sum_
        seen = x if weights is None else x[weights > 0]
        deviations = seen.std(0)
        self._deviations = np.where(deviations > 0, deviations, 1.0)
        if model.beta is not None:
            return
        self._regions = _regions(model, seen)
        self._importances = _importances(model, seen, self._deviations)


def _blocks(x: Array) -> list[Array]:
    return [x[first : first + ROWS_AT_ONCE] for first in range(0, len(x), ROWS_AT_ONCE)]


def _regions(model: PathSum, x: Array) -> Regions:
    """The cells of these rows."""
    packed, scores = [], []
    for block in _blocks(x):
        gates = model.gates(block)
        packed.append(np.packbits(gates.transpose(2, 1, 0, 3).reshape(len(block), -1) > 0, axis=1))
        scores.append(model(block))
    patterns, cell, counts = np.unique(np.concatenate(packed), axis=0, return_inverse=True, return_counts=True)
    sums = np.zeros((len(patterns), model.readout.shape[1]))
    np.add.at(sums, cell.reshape(-1), np.concatenate(scores))
    order = np.argsort(-counts, kind="stable")
    return Regions(patterns[order], counts[order].astype(np.int64), (sums / counts[:, None])[order])


def _importances(model: PathSum, x: Array, deviations: Array) -> Array:
    """Shares of the columns; see :attr:`Explained.feature_importances_`."""
    size = model.normals.shape[-1]
    total = np.zeros(model.normals.shape[:3])
    for block in _blocks(x):
        for output in range(model.readout.shape[1]):
            total += np.abs(model.unit_contributions(block, output)).sum(0)
    weights = np.abs(model.normals) * deviations
    lengths = weights.sum(-1, keepdims=True)
    shares = np.divide(weights, lengths, out=np.full_like(weights, 1 / size), where=lengths > 0)
    found: Array = np.einsum("slu,slud->d", total, shares)
    return found / found.sum() if found.sum() > 0 else np.full(size, 1 / size)
