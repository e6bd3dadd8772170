"""Half-space networks as scikit-learn estimators: every prediction is an exact sum over polyhedra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state, compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted

from unlazy.estimators.explanations import Explained
from unlazy.estimators.path_sum import Array, PathSum
from unlazy.estimators.rows import NamedColumns
from unlazy.estimators.trainer import Trainer, named_settings
from unlazy.runtime import require


class _HalfSpaceEstimator(NamedColumns, Explained, BaseEstimator):
    """What classifier and regressor share: their settings, fitting, and the sum over paths they end in."""

    def __init__(
        self,
        width: int = 16,
        depth: int = 2,
        *,
        members: int = 8,
        gate: str = "hard",
        beta: float = 8.0,
        experts: str = "constant",
        learning_rate: float = 0.03,
        weight_decay: float = 0.1,
        batch_size: int = 128,
        epochs: int | None = None,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 10,
        scale: bool = True,
        warm_start: bool = False,
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        self.width = width
        self.depth = depth
        self.members = members
        self.gate = gate
        self.beta = beta
        self.experts = experts
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.epochs = epochs
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.scale = scale
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device

    # --- fitting -------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Fit the network to rows ``X`` and targets ``y``; with ``warm_start`` go on from the last fit."""
        goes_on = self.warm_start and self._can_go_on()
        x, targets, weights = self._check_training_data(X, y, sample_weight, reset=not goes_on)
        if not goes_on:
            self._begin(x, targets, weights)
        self._train(x, targets, weights, epochs=self._trainer.settings.epochs_for(len(x)), decay=True)
        return self

    def _partial_fit(self, X: Any, y: Any, sample_weight: Any) -> Any:
        begins = not self._can_go_on()
        x, targets, weights = self._check_training_data(X, y, sample_weight, reset=begins)
        if begins:
            self._begin(x, targets, weights)
        require(
            not self.early_stopping,
            "partial_fit sees one batch at a time and cannot hold samples out; early_stopping=False.",
        )
        self._train(x, targets, weights, epochs=1, decay=False)
        return self

    def _can_go_on(self) -> bool:
        """Whether there is a training to go on with; raises for an estimator that was loaded without one."""
        trained = hasattr(self, "_trainer")
        whole = trained or not hasattr(self, "path_sum_")
        require(
            whole,
            "an estimator loaded from a safetensors file cannot be trained further; fit it anew, or keep it with joblib.",
        )
        return trained

    def _begin(self, x: Array, targets: Array, weights: Array | None) -> None:
        """Fix the scaling of columns and targets, and start the network."""
        settings = named_settings(self)
        size = x.shape[1]
        if self.scale:
            scaler = StandardScaler().fit(x, sample_weight=weights)
            self._x_mean, self._x_scale = scaler.mean_, scaler.scale_
        else:
            self._x_mean, self._x_scale = np.zeros(size), np.ones(size)
        self._y_mean, self._y_scale = self._target_scaling(targets, weights)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self._trainer = Trainer(settings, size, targets.shape[1], self._loss_name, seed, len(x))

    def _train(self, x: Array, targets: Array, weights: Array | None, *, epochs: int, decay: bool) -> None:
        scaled = (x - self._x_mean) / self._x_scale, (targets - self._y_mean) / self._y_scale
        self._trainer.train(*scaled, weights, epochs=epochs, decay=decay)
        self.path_sum_ = self._trainer.path_sum(self._x_mean, self._x_scale, self._y_mean, self._y_scale)
        self.n_iter_ = self._trainer.epochs_done
        self.loss_curve_ = list(self._trainer.curve)
        self.validation_scores_ = list(self._trainer.validation_scores)
        self._summarise_training_rows(x, weights)

    _loss_name = "squared"

    def _target_scaling(self, targets: Array, weights: Array | None) -> tuple[Array, Array]:
        """What is subtracted from the targets, and what they are divided by."""
        return np.zeros(targets.shape[1]), np.ones(targets.shape[1])

    def _check_training_data(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        *,
        reset: bool,
    ) -> tuple[Array, Array, Array | None]:
        """Rows, target columns and weights as arrays; raises ``ValueError`` for anything a network cannot be fitted to."""
        raise NotImplementedError

    def _row_scores(self, row: Array) -> Array:
        """The scores of one checked row, ``[outputs]``."""
        return np.asarray(self.path_sum_(row[None])[0])

    def _scores(self, X: Any) -> Array:
        """The sum over paths of every row, ``[n, outputs]``."""
        if not hasattr(self, "path_sum_"):  # check_is_fitted takes a tenth of a short prediction's time
            check_is_fitted(self, "path_sum_")
        model: PathSum = self.path_sum_
        return model(self._check_rows(X))

    # --- storing -------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the fitted estimator as one safetensors file (no pickle); ``load_estimator(path)`` reads it."""
        from unlazy.estimators.exports import save_estimator

        save_estimator(self, path)

    def to_onnx(self, path: str | Path) -> None:
        """Write the scores as an ONNX model in float64: input ``x [n, d]``, output ``scores [n, outputs]``."""
        from unlazy.estimators.exports import write_onnx

        check_is_fitted(self, "path_sum_")
        write_onnx(self.path_sum_, path)


class HalfSpaceClassifier(ClassifierMixin, _HalfSpaceEstimator):
    """A classifier whose scores are exact sums over polyhedra (paths of half-spaces), trained by gradient descent.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> classifier = HalfSpaceClassifier(random_state=0).fit(X, y)
    >>> bool(classifier.score(X, y) > 0.9)
    True

    ``members`` networks of ``depth`` gated layers of ``width`` units each are trained side by side and averaged; the average is
    again one network of half-spaces. ``gate``: ``"hard"`` (open inside a half-space, closed outside; its gradient is that of a
    sigmoid of slope ``beta``) or ``"soft"`` (a sigmoid, for comparison: it cannot be explained). ``experts``: what a path adds
    where it is open, a ``"constant"`` or a ``"linear"`` function of the row. ``epochs=None``: 50 passes, and at least 200 steps.
    The learning rate falls to 0 along a half cosine. ``early_stopping`` holds ``validation_fraction`` of the rows out and
    stops after ``patience`` epochs without a lower loss on them. ``scale``: standardise the columns inside, so that raw
    columns work; explanations are in raw units. ``class_weight``: a dictionary, ``"balanced"`` or ``None``.

    Fitted: ``classes_``, ``half_spaces_``, ``feature_importances_``, ``regions_``, ``path_sum_`` (the function in plain NumPy),
    ``loss_curve_``, ``n_iter_``. Explanations: :meth:`paths`, :meth:`rules`, :meth:`nearest_flip`, :meth:`distill`.
    """

    _loss_name = "cross-entropy"

    def __init__(
        self,
        width: int = 16,
        depth: int = 2,
        *,
        members: int = 8,
        gate: str = "hard",
        beta: float = 8.0,
        experts: str = "constant",
        learning_rate: float = 0.03,
        weight_decay: float = 0.1,
        batch_size: int = 128,
        epochs: int | None = None,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 10,
        scale: bool = True,
        class_weight: Any = None,
        warm_start: bool = False,
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        super().__init__(
            width,
            depth,
            members=members,
            gate=gate,
            beta=beta,
            experts=experts,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            batch_size=batch_size,
            epochs=epochs,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            patience=patience,
            scale=scale,
            warm_start=warm_start,
            random_state=random_state,
            device=device,
        )
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> HalfSpaceClassifier:
        """Fit to rows ``X [n, d]`` and class labels ``y [n]``."""
        if not (self.warm_start and self._can_go_on()):
            self._asked_classes: NDArray[Any] | None = None
        return super().fit(X, y, sample_weight)

    def partial_fit(
        self,
        X: Any,
        y: Any,
        classes: Any = None,
        sample_weight: Any = None,
    ) -> HalfSpaceClassifier:
        """One pass over some rows at the full learning rate. The first call fixes the scaling and needs all ``classes``."""
        if not self._can_go_on():
            if classes is None:
                raise ValueError("the first call of partial_fit needs classes, the labels that will ever come.")
            self._asked_classes = np.unique(np.asarray(classes))
        elif classes is not None and not np.array_equal(np.unique(np.asarray(classes)), self.classes_):
            raise ValueError(f"classes={classes!r} differs from those of the first call, {self.classes_!r}.")
        return self._partial_fit(X, y, sample_weight)

    def predict(self, X: Any) -> NDArray[Any]:
        """The class with the largest score, for each row."""
        return self._labels(self._scores(X))

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes ``[n, classes]``: softmax (two classes: sigmoid) of the scores."""
        scores = self._scores(X)
        if scores.shape[1] == 1:
            scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
        powers = np.exp(scores - scores.max(1, keepdims=True))
        shares: Array = powers / powers.sum(1, keepdims=True)
        return shares

    def decision_function(self, X: Any) -> Array:
        """The scores: ``[n]`` for two classes (positive: the second), else ``[n, classes]``."""
        scores = self._scores(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def _output_name(self, number: int) -> str:
        classes = np.asarray(self.classes_).tolist()
        return f"class {classes[1] if len(classes) == 2 else classes[number]}"

    def _output_number(self, output: Any, row: Array) -> int:
        classes = np.asarray(self.classes_).tolist()
        if len(classes) == 2:
            known = output is None or output == classes[1]
            require(known, f"two classes share one score, positive for {classes[1]!r}; output must be that or None.")
            return 0
        if output is None:
            return int(self._row_scores(row).argmax())
        require(output in classes, f"output must be one of the classes {classes}, got {output!r}.")
        return int(classes.index(output))

    def _predicted(self, row: Array) -> str:
        return str(self._labels(self._row_scores(row)[None]).tolist()[0])

    def _labels(self, scores: Array) -> NDArray[Any]:
        """The classes of these scores."""
        chosen = (scores[:, 0] > 0).astype(int) if scores.shape[1] == 1 else scores.argmax(1)
        return np.asarray(self.classes_)[chosen]

    def _check_training_data(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        *,
        reset: bool,
    ) -> tuple[Array, Array, Array | None]:
        x, labels = self._check_rows(X, y, reset=reset, multi_output=False)
        check_classification_targets(labels)
        if reset:
            self.classes_ = np.unique(labels) if self._asked_classes is None else self._asked_classes
        classes = np.asarray(self.classes_)
        if len(classes) < 2:
            raise ValueError(f"a classifier needs at least two classes; the targets have one class, {classes[0]!r}.")
        unknown = np.setdiff1d(labels, classes)
        if len(unknown):
            raise ValueError(f"labels {unknown.tolist()} are not among the classes {classes.tolist()}.")
        numbers = np.searchsorted(classes, labels)
        targets = numbers[:, None].astype(np.float64) if len(classes) == 2 else np.eye(len(classes))[numbers]
        weights = None if sample_weight is None else _check_sample_weight(sample_weight, x, dtype=np.float64)
        if self.class_weight is not None:
            own = compute_sample_weight(self.class_weight, labels)
            weights = own if weights is None else own * weights
        return x, targets, _check_weights(weights)


class HalfSpaceRegressor(RegressorMixin, _HalfSpaceEstimator):
    """A regressor whose predictions are exact sums over polyhedra; one or several targets.

    >>> X = np.linspace(-1, 1, 200)[:, None]
    >>> regressor = HalfSpaceRegressor(random_state=0).fit(X, np.sin(4 * X[:, 0]))
    >>> bool(regressor.score(X, np.sin(4 * X[:, 0])) > 0.9)
    True

    The settings are those of :class:`HalfSpaceClassifier`. With constant experts (the default) the prediction is constant on
    every cell of the half-spaces; with ``experts="linear"`` it is linear there.
    """

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> HalfSpaceRegressor:
        """One pass over some rows at the full learning rate. The first call fixes the scaling of columns and targets."""
        return self._partial_fit(X, y, sample_weight)

    def predict(self, X: Any) -> Array:
        """The predicted targets, ``[n]`` or ``[n, targets]`` as in ``fit``."""
        return self._labels(self._scores(X))

    def _labels(self, scores: Array) -> Array:
        return scores if self._several_targets else scores[:, 0]

    def _output_name(self, number: int) -> str:
        return f"target {number}" if self._several_targets else "the target"

    def _output_number(self, output: Any, row: Array) -> int:
        count = len(self.path_sum_.intercept)
        if output is None and count == 1:
            return 0
        require(output in range(count), f"output must be the number of a target, 0 to {count - 1}; got {output!r}.")
        return int(output)

    def _predicted(self, row: Array) -> str:
        return ", ".join(f"{value:.4g}" for value in self._row_scores(row))

    def _target_scaling(self, targets: Array, weights: Array | None) -> tuple[Array, Array]:
        scaler = StandardScaler().fit(targets, sample_weight=weights)
        return scaler.mean_, scaler.scale_

    def _check_training_data(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        *,
        reset: bool,
    ) -> tuple[Array, Array, Array | None]:
        x, targets = self._check_rows(X, y, reset=reset, multi_output=True, y_numeric=True)
        if reset:
            self._several_targets = targets.ndim == 2
        targets = targets.astype(np.float64).reshape(len(x), -1)
        if not np.isfinite(targets).all():
            raise ValueError("Input y contains NaN or infinity; drop those rows first.")
        weights = None if sample_weight is None else _check_sample_weight(sample_weight, x, dtype=np.float64)
        return x, targets, _check_weights(weights)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def load_estimator(path: str | Path) -> Any:
    """The estimator that ``save`` wrote: predicts and explains with the same bits. It can be fitted anew, not trained further."""
    from unlazy.estimators.exports import read_estimator

    return read_estimator(path, {kind.__name__: kind for kind in (HalfSpaceClassifier, HalfSpaceRegressor)})


def _check_weights(weights: Array | None) -> Array | None:
    """The weights, if there are any; raises unless they are at least 0 and not all 0."""
    if weights is not None and (bool((weights < 0).any()) or weights.sum() <= 0):
        raise ValueError("sample weights must be at least 0, and one of them positive.")
    return weights
