"""Figures of estimators: what is drawn where, on the axes that were given."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure
from sklearn.datasets import load_digits, make_moons
from sklearn.inspection import DecisionBoundaryDisplay

import unlazy as ul
from unlazy.estimators import CellsDisplay, draw_cells, draw_normals, draw_rules


def test_cells_show_the_score_on_the_axes_given() -> None:
    x, y = make_moons(60, noise=0.1, random_state=0)
    fitted = ul.HalfSpaceClassifier(members=1, width=4, epochs=5, random_state=0).fit(x, y)
    axes = Figure().subplots()
    assert draw_cells(fitted, x, y, ax=axes, resolution=21) is axes
    picture = np.asarray(axes.images[0].get_array())
    low, high = x.min(0) - 0.05 * np.ptp(x, 0), x.max(0) + 0.05 * np.ptp(x, 0)
    assert picture[0, -1] == pytest.approx(fitted.decision_function([[high[0], low[1]]])[0])
    with pytest.raises(ValueError, match="of 2 columns"):
        wide = np.c_[x, x]
        draw_cells(ul.HalfSpaceClassifier(members=1, width=2, epochs=1).fit(wide, y), wide)


def test_normals_are_images() -> None:
    x, y = load_digits(return_X_y=True)
    fitted = ul.HalfSpaceClassifier(members=1, width=5, epochs=1, random_state=0).fit(x[:200], y[:200])
    picture = np.asarray(draw_normals(fitted, (8, 8), layer=1).images[0].get_array())
    spaces = fitted.half_spaces_
    weights = (spaces.normals[0, 1, 3] * spaces.deviations).reshape(8, 8)
    assert picture[9:17, 0:8] == pytest.approx(weights / np.abs(weights).max())
    with pytest.raises(ValueError, match="35 pixels"):
        draw_normals(fitted, (5, 7))


def test_a_card_has_a_bar_for_every_term() -> None:
    x, y = make_moons(60, noise=0.1, random_state=0)
    explanation = ul.HalfSpaceClassifier(members=1, width=4, epochs=5, random_state=0).fit(x, y).paths(x[0], top=3)
    axes = draw_rules(explanation)
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(explanation.score)


def test_cells_have_the_manners_of_scikit_learns_display() -> None:
    """The same grid and the same numbers on it as ``DecisionBoundaryDisplay``; drawn again on other axes."""
    x, y = make_moons(60, noise=0.1, random_state=0)
    fitted = ul.HalfSpaceClassifier(members=1, width=4, epochs=5, random_state=0).fit(x, y)
    theirs = DecisionBoundaryDisplay.from_estimator(
        fitted, x, grid_resolution=15, eps=0.5, response_method="decision_function", ax=Figure().subplots()
    )
    ours = CellsDisplay.from_estimator(fitted, x, grid_resolution=15, eps=0.5, ax=Figure().subplots(), cmap="gray")
    for name in ("xx0", "xx1", "response"):
        assert np.allclose(getattr(ours, name), getattr(theirs, name))
    inside = fitted.path_sum_.gates(np.stack([ours.xx0, ours.xx1], -1).reshape(-1, 2)).transpose(0, 1, 3, 2)
    assert np.array_equal((ours.borders >= 0).reshape(8, -1), inside.reshape(8, -1) > 0)
    assert ours.surface_.get_cmap().name == "gray"
    axes = Figure().subplots()
    assert ours.plot(ax=axes).ax_ is axes
    assert ours.figure_ is axes.figure
