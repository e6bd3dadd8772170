"""A fitted estimator cut down to a few paths: a short list of rules with weights of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.estimators.path_sum import Array, PathSum
from unlazy.runtime import require

SAMPLED_ROWS = 200  # rows whose largest paths become candidates
PATHS_OF_A_ROW = 20  # candidates of each of these rows and outputs
Path = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class DistilledRules:
    """A short list of rules: scores = ``intercept`` + sum of ``weights[i]`` over the paths i whose half-spaces all hold the row.

    ``kept``: the score on the rows it was made from over the estimator's own; ``reached``: whether that is what was asked for.
    ``literals``: the number of half-space conditions of all rules; ``half_spaces``: how many different ones they use.
    """

    estimator: Any
    paths: tuple[Path, ...]
    weights: Array  # [paths, outputs]
    intercept: Array  # [outputs]
    kept: float
    reached: bool

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def literals(self) -> int:
        """Half-space conditions of all rules together; a condition counts as often as it is used."""
        return sum(len(units) for _, units in self.paths)

    @property
    def half_spaces(self) -> int:
        """Different half-spaces among the conditions."""
        return len({(member, layer, unit) for member, units in self.paths for layer, unit in enumerate(units)})

    def scores(self, X: Any) -> Array:
        """The scores of the rules, ``[n, outputs]``."""
        x = self.estimator._check_rows(X)
        return self.intercept + _columns(self.estimator.path_sum_, x, self.paths) @ self.weights

    def predict(self, X: Any) -> NDArray[Any]:
        """The classes or targets that the rules predict."""
        return np.asarray(self.estimator._labels(self.scores(X)))

    def score(self, X: Any, y: Any) -> float:
        """Accuracy, or R2 of a regressor."""
        return _score(self.estimator, np.asarray(y), self.predict(X))

    def __str__(self) -> str:
        spaces, lines = self.estimator.half_spaces_, [f"  {_numbers(self.intercept)}  always"]
        for (member, units), weight in zip(self.paths, self.weights, strict=True):
            words = " and ".join(spaces.in_words(member, layer, unit) for layer, unit in enumerate(units))
            lines.append(f"  {_numbers(weight)}  if {words}")
        return "\n".join([f"{len(self)} rules, {self.literals} conditions, {self.kept:.1%} of the score kept:", *lines])


def distill(estimator: Any, X: Any, y: Any, keep: float, most: int) -> DistilledRules:
    """The rules, by orthogonal matching pursuit: add the path that explains most of what is left, fit all weights, repeat.

    Candidates are the largest paths of up to 200 rows. The weights are those of least squares on the estimator's scores.
    """
    require(0 < keep <= 1, f"keep must lie between 0 and 1, got {keep!r}.")
    require(most >= 1, f"most must be at least 1, got {most!r}.")
    model: PathSum = estimator._explainable()
    x = estimator._check_rows(X)
    scores = model(x)
    targets = np.asarray(estimator._labels(scores) if y is None else y)
    require(len(targets) == len(x), f"{len(x)} rows but {len(targets)} targets.")
    full = _score(estimator, targets, estimator._labels(scores))
    candidates = _candidates(model, x)
    active = _columns(model, x, candidates)
    spread = scores.std(0)
    scale = np.where(spread > 0, spread, 1.0)
    centre = scores.mean(0)
    left = (scores - centre) / scale
    basis = active - active.mean(0)  # orthogonal to the paths chosen so far (and to the intercept)
    lengths = np.square(basis).sum(0)
    chosen: list[int] = []
    kept = _kept(_score(estimator, targets, estimator._labels(np.broadcast_to(centre, scores.shape))), full)
    fitted = np.broadcast_to(centre, scores.shape).copy()
    start = lengths.copy()
    while kept < keep and len(chosen) < min(most, len(candidates)):
        gains = np.square(basis.T @ left).sum(1)
        usable = lengths > 1e-9 * np.maximum(start, 1)
        gains = np.where(usable, gains / np.where(usable, lengths, 1.0), -1.0)
        best = int(gains.argmax())
        if gains[best] <= 1e-14:
            break
        chosen.append(best)
        direction = basis[:, best] / np.sqrt(lengths[best])
        step = direction @ left
        left = left - direction[:, None] * step
        fitted = fitted + direction[:, None] * step * scale
        basis = basis - direction[:, None] * (direction @ basis)
        lengths = np.square(basis).sum(0)
        kept = _kept(_score(estimator, targets, estimator._labels(fitted)), full)
    design = np.concatenate([np.ones((len(x), 1)), active[:, chosen]], axis=1)
    solution = np.linalg.lstsq(design, scores, rcond=None)[0]
    paths = tuple(candidates[number] for number in chosen)
    rules = DistilledRules(estimator, paths, solution[1:], solution[0], 0.0, False)
    kept = _kept(rules.score(X, targets), full)  # X, not x: a frame has names
    return DistilledRules(estimator, paths, solution[1:], solution[0], kept, kept >= keep)


def _kept(score: float, full: float) -> float:
    """The share of the full score; 1 where there is nothing to keep."""
    return score / full if full > 0 else 1.0


def _candidates(model: PathSum, x: Array) -> list[Path]:
    """The largest paths of a sample of rows, each once, in the order in which they were found."""
    rows = np.unique(np.linspace(0, len(x) - 1, min(len(x), SAMPLED_ROWS)).astype(int))
    found: dict[Path, None] = {}
    for row in rows:
        for output in range(len(model.intercept)):
            for path in model.largest_paths(x[row], output, PATHS_OF_A_ROW):
                found[path.member, path.units] = None
    return list(found)


def _columns(model: PathSum, x: Array, paths: tuple[Path, ...] | list[Path]) -> Array:
    """1 where a path is active (times its first linear function, with linear experts), ``[n, paths]``."""
    gates = model.gates(x)
    if not paths:
        return np.zeros((len(x), 0))
    columns = np.stack([model.is_active(member, units, gates) for member, units in paths], axis=1).astype(np.float64)
    if model.expert_normals is not None:
        first = model._first_values(x)
        columns *= np.stack([first[member, :, units[0]] for member, units in paths], axis=1)
    return columns


def _score(estimator: Any, targets: NDArray[Any], predicted: NDArray[Any]) -> float:
    """Accuracy of a classifier, R2 of a regressor."""
    from sklearn.metrics import r2_score

    if hasattr(estimator, "classes_"):
        return float((targets == predicted).mean())
    return float(r2_score(targets, predicted))


def _numbers(values: Array) -> str:
    return " ".join(f"{value:+.3g}" for value in values)
