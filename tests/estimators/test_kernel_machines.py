"""Kernel machines as estimators: the checks of scikit-learn, and the numbers of the functions behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from sklearn.datasets import make_moons
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import unlazy as ul
from unlazy.adaptive import AdaptiveTangents, recursive_features
from unlazy.estimators import AdaptiveTangentRegressor, RecursiveFeatureClassifier, RecursiveFeatureMachine
from unlazy.kernels import kernel_regression
from unlazy.theory.adaptive_solutions import AlternatingSearch


def small_net(inputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, 1))


CHECKED = [
    ul.TangentKernelRidge(random_state=0),
    ul.TangentKernelClassifier(random_state=0),
    RecursiveFeatureMachine(),
    RecursiveFeatureClassifier(),
]


@parametrize_with_checks(CHECKED)
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([AdaptiveTangentRegressor(rounds=5, random_state=0)])
def test_scikit_learn_checks_of_adaptive_tangents(estimator: Any, check: Any) -> None:
    check(estimator)


def table(rows: int = 60) -> tuple[Any, Any]:
    x = np.random.default_rng(0).normal(size=(rows, 3)) * [1.0, 20.0, 0.1] + [0.0, 5.0, 0.0]
    return x, np.sin(2 * x[:, 0]) + 0.05 * x[:, 1] + 7


def standardised(x: Any, like: Any) -> torch.Tensor:
    return torch.from_numpy((x - like.mean(0)) / like.std(0))


def test_tangent_ridge_is_kernel_regression_with_the_tangent_kernel() -> None:
    x, y = table()
    net = small_net(3)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    fitted = ul.TangentKernelRidge(net, ridge=0.05).fit(x[:40], y[:40])
    old, new = standardised(x[:40], x[:40]), standardised(x[40:], x[:40])
    wide = small_net(3).double()
    kernel, cross = ul.tangent_kernel(wide, old), ul.tangent_kernel(wide, new, old)
    targets = torch.from_numpy(y[:40, None] - y[:40].mean())
    expected = kernel_regression(kernel, targets, cross, 0.05)[:, 0].numpy() + y[:40].mean()
    assert fitted.predict(x[40:]) == pytest.approx(expected, abs=1e-10)
    assert all(torch.equal(one, two) for one, two in zip(before, net.parameters(), strict=True))


def test_without_a_matrix_the_numbers_are_the_same(tmp_path: Path) -> None:
    x, y = table(80)
    both = np.stack([y, x[:, 0] ** 2], axis=1)
    dense, free = (ul.TangentKernelRidge(small_net, dense_below=size).fit(x, both) for size in (100, 10))
    assert free._rows is None
    assert free.predict(x) == pytest.approx(dense.predict(x), abs=1e-5)
    joblib.dump(free, tmp_path / "free.joblib")
    assert np.array_equal(joblib.load(tmp_path / "free.joblib").predict(x), free.predict(x))


def test_classifiers_learn_and_say_which_columns_matter() -> None:
    x, y = make_moons(150, noise=0.1, random_state=0)
    wide = np.c_[x, np.random.default_rng(0).normal(size=(150, 2))]
    labels = np.array(["down", "up"])[y]
    for estimator in (ul.TangentKernelClassifier(random_state=0), RecursiveFeatureClassifier()):
        fitted = estimator.fit(wide[:100], labels[:100])
        assert fitted.score(wide[100:], labels[100:]) > 0.8
        assert fitted.feature_importances_.sum() == pytest.approx(1)
        assert set(np.argsort(-fitted.feature_importances_)[:2]) == {0, 1}
        assert np.array_equal(fitted.predict(wide) == "up", fitted.decision_function(wide) > 0)


def test_the_recursive_machine_is_that_of_the_last_round() -> None:
    x, y = table()
    fitted = RecursiveFeatureMachine(rounds=2, ridge=0.01).fit(x, y)
    *_, last = recursive_features(standardised(x, x), torch.from_numpy(y[:, None] - y.mean()), rounds=2, ridge=0.01)
    assert fitted.predict(x) == pytest.approx(last(standardised(x, x))[:, 0].numpy() + y.mean(), abs=1e-10)
    metric = last.metric.diagonal().numpy()
    assert fitted.feature_importances_ == pytest.approx(metric / metric.sum())


def test_adaptive_tangents_are_those_of_the_model() -> None:
    x, y = table(30)
    fitted = AdaptiveTangentRegressor(small_net, rounds=3).fit(x, y)
    plain = AdaptiveTangents(small_net(3), ridge=1e-2, search=AlternatingSearch(rounds=3, tolerance=1e-6))
    plain.fit(standardised(x, x), torch.from_numpy((y - y.mean()) / y.std()))
    expected = plain.predict(standardised(x, x))[:, 0].numpy() * y.std() + y.mean()
    assert fitted.predict(x) == pytest.approx(expected, abs=1e-9)
    assert fitted.feature_importances_.shape == (3,)


def test_wrong_models_are_refused() -> None:
    x, y = table(20)
    with pytest.raises(ValueError, match="model must be a torch module"):
        ul.TangentKernelRidge("resnet").fit(x, y)
    with pytest.raises(ValueError, match="ridge must be positive"):
        ul.TangentKernelRidge(ridge=0.0).fit(x, y)
