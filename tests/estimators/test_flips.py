"""The nearest flip, against a fine grid and against every cell in the plane."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_iris, make_moons

import unlazy as ul
from unlazy.estimators.flips import _Cells


def in_the_plane(**settings: Any) -> tuple[Any, Any]:
    x, y = make_moons(150, noise=0.2, random_state=0)
    return ul.HalfSpaceClassifier(members=1, width=6, depth=2, random_state=0, **settings).fit(x * [5, 1], y), x * [
        5,
        1,
    ]


def test_nearest_flip_agrees_with_all_cells() -> None:
    """Cells in the plane are found by points around every crossing of two lines; the distance to each is computed."""
    estimator, x = in_the_plane()
    for row in x[[0, 7, 31, 60]]:
        around = _Cells(estimator.path_sum_, row, estimator._deviations)
        corners = [np.zeros(2), *1e3 * np.stack([np.cos(np.arange(0, 6.3, 0.01)), np.sin(np.arange(0, 6.3, 0.01))], 1)]
        for one, two in itertools.combinations(range(len(around.reach)), 2):
            crossing = np.linalg.solve(around.normals[[one, two]], -around.reach[[one, two]])
            corners += [crossing + 1e-6 * np.array(step) for step in itertools.product((-1, 0.3, 1), repeat=2)]
        cells = np.unique(around.crossed_at(np.array(corners)), axis=0)
        other = cells[around.decide(cells) != around.start]
        brute = min(np.linalg.norm(place) for place in map(around.nearest_point, other) if place is not None)
        found = estimator.nearest_flip(row, cells=20_000)
        assert found.exact
        assert found.distance == pytest.approx(brute, rel=1e-9)
        assert found.lower_bound == pytest.approx(brute, rel=1e-6)


def test_nearest_flip_agrees_with_a_grid_and_changes_the_prediction() -> None:
    estimator, x = in_the_plane()
    side = np.linspace(-2, 2, 801)
    grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    for row in x[[3, 40, 99]]:
        found, before = estimator.nearest_flip(row), estimator.predict(row[None])[0]
        differs = estimator.predict(row + grid * estimator._deviations) != before
        nearest = np.linalg.norm(grid[differs], axis=1).min()
        assert found.distance <= nearest <= found.distance + 0.02
        assert estimator.predict((row + found.change)[None])[0] == found.decision != before
        assert np.linalg.norm(found.change / estimator._deviations) == pytest.approx(found.distance, abs=1e-6)


def test_a_small_budget_gives_an_honest_bound() -> None:
    x, y = load_iris(return_X_y=True)
    estimator = ul.HalfSpaceClassifier(members=2, width=8, epochs=40, random_state=0).fit(x, y)
    for row in x[[0, 60, 140]]:
        short, long = estimator.nearest_flip(row, cells=1), estimator.nearest_flip(row, cells=2000)
        assert short.lower_bound <= long.lower_bound + 1e-12
        assert long.lower_bound <= long.distance <= short.distance + 1e-12
        directions = np.random.default_rng(0).normal(size=(4000, 4))
        directions *= long.lower_bound * 0.999 / np.linalg.norm(directions, axis=1, keepdims=True)
        inside = row + directions * np.random.default_rng(1).uniform(size=(4000, 1)) * estimator._deviations
        assert (estimator.predict(inside) == estimator.predict(row[None])[0]).all()


def test_a_decision_that_never_changes_has_no_flip() -> None:
    x = np.random.default_rng(0).normal(size=(60, 2))
    y = np.r_[np.zeros(59), 1].astype(int)
    estimator = ul.HalfSpaceClassifier(members=1, width=2, depth=1, random_state=0, epochs=1).fit(x, y)
    estimator.path_sum_.intercept[:] = -1e6
    found = estimator.nearest_flip(x[0])
    assert found.change is None
    assert found.decision is None
    assert found.distance == found.lower_bound == float("inf")
    assert found.exact


def test_questions_without_an_answer() -> None:
    estimator, x = in_the_plane(experts="linear", epochs=2)
    with pytest.raises(ValueError, match="experts='constant'"):
        estimator.nearest_flip(x[0])
    regressor = ul.HalfSpaceRegressor(members=1, width=2, epochs=1, random_state=0).fit(x, x[:, 0])
    with pytest.raises(ValueError, match="a regressor makes none"):
        regressor.nearest_flip(x[0])


def test_what_interval_arithmetic_calls_certain_is_certain() -> None:
    """Every setting of some free gates is tried; random weights, so that signs are mixed."""
    estimator, x = in_the_plane(epochs=1)
    model, generator = estimator.path_sum_, np.random.default_rng(0)
    answers = []
    for trial in range(300):
        for array in (model.experts, model.links, model.readout):
            array[:] = generator.normal(size=array.shape)
        model.intercept[:] = generator.normal(scale=4)
        around = _Cells(model, x[trial % len(x)], estimator._deviations)
        free = np.zeros(12, dtype=bool)
        free[generator.choice(12, 4, replace=False)] = True
        settings = np.zeros((16, 12), dtype=bool)
        settings[:, free] = list(itertools.product((False, True), repeat=4))
        answers.append((around._certain(free), bool((around.decide(settings) == around.start).all())))
    assert all(truth for certain, truth in answers if certain)
    assert sum(certain for certain, _ in answers) > 30
