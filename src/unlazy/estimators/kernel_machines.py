"""Kernel machines of networks as scikit-learn estimators: tangent kernels, adaptive tangents, recursive features.

    f(x) = mean of y + K(x, X) (K(X, X) + ridge * mean diagonal * I)^(-1) (y - mean of y)

``TangentKernelRidge`` is what a network would predict if it stayed lazy; the others learn features.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from unlazy.estimators.path_sum import Array
from unlazy.estimators.rows import NamedColumns
from unlazy.kernels.operator import tangent_operator
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import ReLUNet
from unlazy.runtime import InputError, require
from unlazy.theory.adaptive_model import AdaptiveTangents
from unlazy.theory.adaptive_solutions import AlternatingSearch
from unlazy.training.recursive_features import FeatureMachine, recursive_features

WIDTH, DEPTH = 256, 2  # of the ReLU network that is taken where no model is given
ADAPTIVE_WIDTH = 32  # likewise; adapting costs more than one regression
TOLERANCE = 1e-8  # relative residual of the matrix-free solution
SEARCH_TOLERANCE = 1e-6  # a round that lowers the objective by a smaller share is the last
SHOWN_ROWS = 200  # training rows on which importances are measured
STEP = 0.05  # how far a column is moved for them, in standard deviations


class _KernelMachine(NamedColumns, BaseEstimator):
    """Fitting and predicting around the two functions that differ: ``_solve`` and ``_evaluate``, on scaled rows."""

    scale: bool
    _least_rows = 1

    def _solve(self, x: Tensor, targets: Tensor) -> None:
        """Fit to scaled rows ``[n, d]`` and centred targets ``[n, outputs]``."""
        raise NotImplementedError

    def _evaluate(self, x: Tensor) -> Tensor:
        """Predictions of the centred targets."""
        raise NotImplementedError

    def _fit_columns(self, x: Array, targets: Array) -> None:
        """Scale the rows, centre the targets, and solve."""
        deviation = x.std(0)
        self._x_scale = np.where(deviation > 0, deviation, 1.0) if self.scale else np.ones(x.shape[1])
        self._x_mean = x.mean(0) if self.scale else np.zeros(x.shape[1])
        self._y_mean = targets.mean(0)
        rows = self._scaled(x)
        self._shown = rows[np.unique(np.linspace(0, len(x) - 1, min(len(x), SHOWN_ROWS)).astype(int))]
        self._solve(rows, torch.from_numpy(targets - self._y_mean))
        self.fitted_ = True

    def _scaled(self, x: Array) -> Tensor:
        return torch.from_numpy((x - self._x_mean) / self._x_scale)

    def _scores(self, X: Any) -> Array:
        """Predicted target columns, ``[n, outputs]``."""
        check_is_fitted(self, "fitted_")
        found: Array = self._evaluate(self._scaled(self._check_rows(X))).numpy()
        return found + self._y_mean

    @property
    def feature_importances_(self) -> Array:
        """The share of each column, ``[d]``: how much the prediction changes when the column moves a little.

        Mean |change| over up to 200 training rows and all outputs, by central differences; adds up to 1.
        """
        check_is_fitted(self, "fitted_")
        changes = np.empty(self._shown.shape[1])
        for column in range(len(changes)):
            step = torch.zeros(len(changes), dtype=self._shown.dtype)
            step[column] = STEP
            change = self._evaluate(self._shown + step) - self._evaluate(self._shown - step)
            changes[column] = float(change.abs().mean())
        total = changes.sum()
        return changes / total if total > 0 else np.full(len(changes), 1 / len(changes))


class _KernelRegressor(RegressorMixin, _KernelMachine):
    """Targets as they are."""

    def fit(self, X: Any, y: Any) -> Any:
        """Fit to rows ``X [n, d]`` and targets ``y``, ``[n]`` or ``[n, targets]``."""
        x, targets = self._check_rows(
            X, y, reset=True, ensure_min_samples=self._least_rows, multi_output=True, y_numeric=True
        )
        if not np.isfinite(targets).all():
            raise ValueError("Input y contains NaN or infinity; drop those rows first.")
        self._several_targets = targets.ndim == 2
        self._fit_columns(x, targets.astype(np.float64).reshape(len(x), -1))
        return self

    def predict(self, X: Any) -> Array:
        """The predicted targets, ``[n]`` or ``[n, targets]`` as in ``fit``."""
        scores = self._scores(X)
        return scores if self._several_targets else scores[:, 0]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class _KernelClassifier(ClassifierMixin, _KernelMachine):
    """Targets +1 for a row's class and -1 for the others; two classes have one column."""

    def fit(self, X: Any, y: Any) -> Any:
        """Fit to rows ``X [n, d]`` and class labels ``y [n]``."""
        x, labels = self._check_rows(X, y, reset=True, ensure_min_samples=self._least_rows, multi_output=False)
        check_classification_targets(labels)
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"a classifier needs at least two classes; there is one class, {self.classes_[0]!r}.")
        signs = 2.0 * np.eye(len(self.classes_))[numbers] - 1
        self._fit_columns(x, signs[:, 1:] if len(self.classes_) == 2 else signs)
        return self

    def decision_function(self, X: Any) -> Array:
        """The scores: ``[n]`` for two classes (positive: the second), else ``[n, classes]``."""
        scores = self._scores(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> NDArray[Any]:
        """The class with the largest score, for each row."""
        scores = self._scores(X)
        chosen = (scores[:, 0] > 0).astype(int) if scores.shape[1] == 1 else scores.argmax(1)
        return np.asarray(self.classes_)[chosen]


def _own_model(given: Any, inputs: int, outputs: int, width: int, random_state: Any) -> nn.Module:
    """A float64 copy of the given module, of ``given(inputs)``, or of a random ReLU network."""
    if given is None:
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        return ReLUNet(inputs, outputs, width=width, depth=DEPTH, seed=seed).double()
    found = given if isinstance(given, nn.Module) else given(inputs) if callable(given) else None
    if not isinstance(found, nn.Module):
        raise InputError(f"model must be a torch module, a function of the number of columns, or None; got {given!r}.")
    return copy.deepcopy(found).double()


class _TangentKernel(_KernelMachine):
    """Ridge regression with a tangent kernel, dense or matrix-free."""

    def __init__(
        self,
        model: Any = None,
        *,
        ridge: float = 1e-2,
        dense_below: int = 3000,
        scale: bool = True,
        random_state: Any = None,
    ) -> None:
        self.model = model
        self.ridge = ridge
        self.dense_below = dense_below
        self.scale = scale
        self.random_state = random_state

    def _solve(self, x: Tensor, targets: Tensor) -> None:
        require(self.ridge > 0, f"ridge must be positive, got {self.ridge!r}.")
        self.model_ = _own_model(self.model, x.shape[1], 1, WIDTH, self.random_state)
        self._rows: Any = None
        self._dual: Any = None
        self._weights: Any = None
        if len(x) > self.dense_below:
            fit = tangent_operator(self.model_, x).fit_ridge(targets, self.ridge, tolerance=TOLERANCE)
            self._weights = fit.weights
            return
        kernel = tangent_kernel(self.model_, x)
        shift = self.ridge * float(kernel.diagonal().mean())
        kernel.diagonal().add_(shift if shift > 0 else 1.0)
        self._rows, self._dual = x, torch.cholesky_solve(targets, torch.linalg.cholesky(kernel))

    def _evaluate(self, x: Tensor) -> Tensor:
        if self._weights is not None:
            return tangent_operator(self.model_, x).apply(self._weights)
        cross: Tensor = tangent_kernel(self.model_, x, self._rows)
        return cross @ self._dual


class TangentKernelRidge(_KernelRegressor, _TangentKernel):
    """Kernel ridge regression with the tangent kernel of any torch module: what it would learn if it stayed lazy.

    >>> X = np.linspace(-1, 1, 50)[:, None]
    >>> bool(TangentKernelRidge(random_state=0).fit(X, X[:, 0] ** 2).score(X, X[:, 0] ** 2) > 0.9)
    True

    ``model``: a module that takes ``[n, columns]``, a function that makes one from the number of columns, or ``None`` for a
    random ReLU network. A copy in float64 is used, and the module itself stays as it is. ``ridge`` is relative to the mean
    diagonal of the kernel. Up to ``dense_below`` rows the kernel is held as a matrix; beyond, :func:`unlazy.tangent_operator`
    solves without one. ``scale``: standardise the columns inside.
    """


class TangentKernelClassifier(_KernelClassifier, _TangentKernel):
    """Classification by kernel ridge regression on labels of +1 and -1; the settings are those of :class:`TangentKernelRidge`.

    >>> X = np.linspace(-1, 1, 50)[:, None]
    >>> TangentKernelClassifier(random_state=0).fit(X, X[:, 0] > 0).predict([[-0.9], [0.9]]).tolist()
    [False, True]
    """


class _RecursiveFeatures(_KernelMachine):
    """A Laplace kernel whose metric is learned."""

    _least_rows = 2

    def __init__(self, *, rounds: int = 5, width: float | None = None, ridge: float = 1e-3, scale: bool = True) -> None:
        self.rounds = rounds
        self.width = width
        self.ridge = ridge
        self.scale = scale

    def _solve(self, x: Tensor, targets: Tensor) -> None:
        *_, last = self._machines(x, targets)
        self.machine_: FeatureMachine = last

    def _machines(self, x: Tensor, targets: Tensor) -> list[FeatureMachine]:
        """The machines of all rounds; where there is nothing to learn, the first alone."""
        constant = bool((targets == 0).all()) or bool((x == x[0]).all())
        width = self.width if not constant or self.width is not None else 1.0
        rounds = 0 if constant else self.rounds
        return list(recursive_features(x, targets, rounds=rounds, width=width, ridge=self.ridge))

    def _evaluate(self, x: Tensor) -> Tensor:
        return self.machine_(x)

    @property
    def feature_importances_(self) -> Array:
        """The diagonal of the learned metric (the average gradient outer product), as shares that add up to 1."""
        check_is_fitted(self, "fitted_")
        diagonal: Array = self.machine_.metric.diagonal().numpy()
        return diagonal / diagonal.sum()


class RecursiveFeatureMachine(_KernelRegressor, _RecursiveFeatures):
    """Kernel ridge regression whose metric learns from the function it fitted; see ``unlazy.adaptive.recursive_features``.

    ``rounds``: how often the metric is learned; 0 is a plain Laplace kernel. ``width``: of the kernel, by default the typical
    distance of two rows. ``machine_.metric`` is the learned metric, in units of the columns' deviations.
    """


class RecursiveFeatureClassifier(_KernelClassifier, _RecursiveFeatures):
    """Classification by :class:`RecursiveFeatureMachine` on labels of +1 and -1."""


class AdaptiveTangentRegressor(_KernelRegressor):
    """The linear model on a network's tangent features that adapt while it is fitted; see ``unlazy.adaptive.AdaptiveTangents``.

    ``model``: as in :class:`unlazy.TangentKernelRidge`, with one output for every target. ``ridge``, ``structure``: those of
    ``AdaptiveTangents``, for targets of unit deviation. ``rounds``: at most so many rounds of its search. Meant for some hundred
    rows: it works with all tangent features at once. ``machine_`` is the fitted model.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        structure: str = "layers",
        ridge: float = 1e-2,
        rounds: int = 50,
        scale: bool = True,
        random_state: Any = None,
    ) -> None:
        self.model = model
        self.structure = structure
        self.rounds = rounds
        self.ridge = ridge
        self.scale = scale
        self.random_state = random_state

    def _solve(self, x: Tensor, targets: Tensor) -> None:
        net = _own_model(self.model, x.shape[1], targets.shape[1], ADAPTIVE_WIDTH, self.random_state)
        spread = targets.std(0, correction=0)
        self._y_scale = torch.where(
            spread > 0, spread, torch.ones_like(spread)
        )  # the ridge is not relative to the targets
        search = AlternatingSearch(rounds=self.rounds, tolerance=SEARCH_TOLERANCE)
        adaptive = AdaptiveTangents(net, structure=self.structure, ridge=self.ridge, search=search)
        self.machine_ = adaptive.fit(x, targets / self._y_scale)

    def _evaluate(self, x: Tensor) -> Tensor:
        return self.machine_.predict(x) * self._y_scale
