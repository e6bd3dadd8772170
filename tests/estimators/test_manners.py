"""Half-space estimators behave like those of scikit-learn: checks, frames, pipelines, settings, errors."""

from __future__ import annotations

from typing import Any

import joblib
import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.datasets import load_iris, make_moons
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks

import unlazy as ul

SMALL: dict[str, Any] = {"members": 2, "width": 8, "depth": 2, "random_state": 0}
QUICK: dict[str, Any] = {**SMALL, "epochs": 5}


CHECKED: dict[str, Any] = {**SMALL, "epochs": 60, "learning_rate": 0.05}  # quicker; all defaults are checked below


@parametrize_with_checks([ul.HalfSpaceClassifier(**CHECKED), ul.HalfSpaceRegressor(**CHECKED)])
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ul.HalfSpaceClassifier, ul.HalfSpaceRegressor])
def test_scikit_learn_checks_with_default_settings(kind: type) -> None:
    from unittest import SkipTest

    for estimator, check in estimator_checks_generator(kind()):
        try:
            check(estimator)
        except SkipTest:
            continue


def test_equal_seeds_give_equal_bits_and_others_do_not() -> None:
    x, y = make_moons(200, noise=0.2, random_state=0)
    one, two, other = (ul.HalfSpaceClassifier(**{**QUICK, "random_state": seed}).fit(x, y) for seed in (3, 3, 4))
    assert one.decision_function(x).tobytes() == two.decision_function(x).tobytes()
    assert one.decision_function(x).tobytes() != other.decision_function(x).tobytes()


def test_default_settings_fit_a_table_with_raw_columns() -> None:
    x, y = load_iris(return_X_y=True)
    raw = x * np.array([1e3, 1e-3, 1.0, 50.0]) + np.array([1e4, 0.0, -7.0, 3.0])
    fitted = ul.HalfSpaceClassifier(random_state=0).fit(raw, y)
    assert fitted.score(raw, y) > 0.95
    assert np.allclose(fitted.predict_proba(raw).sum(1), 1)
    assert (fitted.predict(raw) == fitted.decision_function(raw).argmax(1)).all()


def test_labels_may_be_words() -> None:
    x, y = make_moons(100, noise=0.1, random_state=0)
    words = np.array(["no", "yes"])[y]
    fitted = ul.HalfSpaceClassifier(**SMALL).fit(x, words)
    assert set(fitted.predict(x)) == {"no", "yes"}
    assert np.array_equal(fitted.predict(x) == "yes", fitted.decision_function(x) > 0)


def test_several_targets_are_those_of_their_own_columns() -> None:
    x = np.random.default_rng(0).normal(size=(150, 3))
    y = np.stack([x[:, 0] > 0, 100 * (x[:, 1] > 0.5)], axis=1).astype(float)
    fitted = ul.HalfSpaceRegressor(random_state=0).fit(x, y)
    assert fitted.predict(x).shape == (150, 2)
    assert fitted.score(x, y) > 0.9


def test_pipelines_grid_search_and_clones() -> None:
    x, y = make_moons(80, noise=0.2, random_state=0)
    pipeline = make_pipeline(PolynomialFeatures(2), ul.HalfSpaceClassifier(**QUICK))
    search = GridSearchCV(pipeline, {"halfspaceclassifier__width": [4, 6]}, cv=2).fit(x, y)
    assert search.best_estimator_[-1].path_sum_.units in (4, 6)
    copy = clone(search.best_estimator_[-1])
    assert not hasattr(copy, "path_sum_")
    assert copy.get_params() == search.best_estimator_[-1].get_params()


def test_frames_give_the_names_of_columns() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = load_iris(return_X_y=True)
    frame = pandas.DataFrame(x, columns=["sl", "sw", "pl", "pw"])
    fitted = ul.HalfSpaceClassifier(**QUICK).fit(frame, y)
    assert fitted.half_spaces_.feature_names == ("sl", "sw", "pl", "pw")
    assert any(name in fitted.rules(frame.iloc[[0]]) for name in ("sl ", "sw ", "pl ", "pw "))
    assert len(fitted.distill(frame, y, keep=0.9, most=5)) <= 5
    assert fitted.nearest_flip(frame.iloc[0], cells=5).distance > 0
    with pytest.raises(ValueError, match="feature names should match"):
        fitted.predict(frame.rename(columns={"sl": "other"}))
    frame.loc[3, "pl"] = np.nan
    with pytest.raises(ValueError, match="NaN in column pl"):
        fitted.fit(frame, y)


@pytest.mark.adapters
def test_polars_frames_give_the_names_of_columns() -> None:
    polars = pytest.importorskip("polars")
    x, y = load_iris(return_X_y=True)
    frame = polars.DataFrame(x, schema=["sl", "sw", "pl", "pw"])
    fitted = ul.HalfSpaceClassifier(**QUICK).fit(frame, y)
    assert fitted.half_spaces_.feature_names == ("sl", "sw", "pl", "pw")
    assert np.array_equal(fitted.predict(frame), ul.HalfSpaceClassifier(**QUICK).fit(x, y).predict(x))


def test_what_cannot_be_fitted_is_refused() -> None:
    x, y = make_moons(40, random_state=0)
    estimator = ul.HalfSpaceClassifier(**QUICK)
    with pytest.raises(TypeError, match=r"Sparse data .* pass X.toarray\(\)"):
        estimator.fit(csr_array(x), y)
    broken = x.copy()
    broken[5, 1] = np.inf
    with pytest.raises(ValueError, match="infinity in column x1"):
        estimator.fit(broken, y)
    with pytest.raises(ValueError, match="two classes"):
        estimator.fit(x, np.zeros(40))
    with pytest.raises(ValueError, match="sample weights must be at least 0"):
        estimator.fit(x, y, sample_weight=-np.ones(40))
    for changed, words in (
        ({"width": 0}, "width"),
        ({"gate": "firm"}, "gate"),
        ({"learning_rate": 0.0}, "learning_rate"),
    ):
        with pytest.raises(ValueError, match=words):
            clone(estimator).set_params(**changed).fit(x, y)


def test_partial_fit_needs_the_classes_once_and_learns() -> None:
    x, y = make_moons(400, noise=0.1, random_state=0)
    estimator = ul.HalfSpaceClassifier(random_state=0)
    with pytest.raises(ValueError, match="needs classes"):
        estimator.partial_fit(x[:100], y[:100])
    for _ in range(15):
        for first in range(0, 400, 100):
            estimator.partial_fit(x[first : first + 100], y[first : first + 100], classes=[0, 1])
    assert estimator.score(x, y) > 0.9
    with pytest.raises(ValueError, match="differs from those of the first call"):
        estimator.partial_fit(x, y, classes=[0, 1, 2])


def test_warm_start_goes_on_and_a_plain_fit_starts_anew() -> None:
    x, y = make_moons(100, noise=0.2, random_state=0)
    warm = ul.HalfSpaceClassifier(**QUICK, warm_start=True).fit(x, y)
    first = warm.decision_function(x)
    assert warm.fit(x, y).n_iter_ == 10
    assert not np.array_equal(first, warm.decision_function(x))
    cold = ul.HalfSpaceClassifier(**QUICK).fit(x, y).fit(x, y)
    assert cold.n_iter_ == 5
    assert np.array_equal(cold.decision_function(x), first)


def test_class_weights_are_sample_weights() -> None:
    x, y = make_moons(100, noise=0.3, random_state=0)
    by_class = ul.HalfSpaceClassifier(**QUICK, class_weight={0: 1.0, 1: 5.0}).fit(x, y)
    by_row = ul.HalfSpaceClassifier(**QUICK).fit(x, y, sample_weight=np.where(y == 1, 5.0, 1.0))
    plain = ul.HalfSpaceClassifier(**QUICK).fit(x, y)
    assert np.array_equal(by_class.decision_function(x), by_row.decision_function(x))
    assert (by_class.predict(x) == 1).sum() > (plain.predict(x) == 1).sum()


def test_early_stopping_keeps_the_best_epoch() -> None:
    x, y = make_moons(200, noise=0.4, random_state=0)
    settings = {**SMALL, "epochs": 200, "learning_rate": 0.2}
    stopped = ul.HalfSpaceClassifier(**settings, early_stopping=True, patience=3).fit(x, y)
    assert stopped.n_iter_ < 200
    best = int(np.argmin(stopped.validation_scores_))
    assert stopped.n_iter_ == best + 1 + 3


def test_joblib_keeps_the_function(tmp_path: Any) -> None:
    x, y = make_moons(60, random_state=0)
    fitted = ul.HalfSpaceClassifier(**QUICK).fit(x, y)
    joblib.dump(fitted, tmp_path / "model.joblib")
    assert np.array_equal(joblib.load(tmp_path / "model.joblib").predict_proba(x), fitted.predict_proba(x))
