"""Files of estimators: the same bits after loading, ONNX to 1e-6, clear errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from sklearn.datasets import load_iris

import unlazy as ul
from unlazy.estimators import load_estimator

SMALL: dict[str, Any] = {"members": 2, "width": 6, "epochs": 5, "random_state": 0}
X, Y = load_iris(return_X_y=True)
WORDS = np.array(["setosa", "versicolor", "virginica"])[Y]
FITTED = {
    "words": lambda: ul.HalfSpaceClassifier(**SMALL, class_weight={"setosa": 2.0, "versicolor": 1, "virginica": 1}).fit(
        X, WORDS
    ),
    "binary": lambda: ul.HalfSpaceClassifier(**SMALL, experts="linear").fit(X, Y == 1),
    "soft": lambda: ul.HalfSpaceClassifier(**SMALL, gate="soft", early_stopping=True).fit(X, Y),
    "targets": lambda: ul.HalfSpaceRegressor(**SMALL, depth=1).fit(X, X[:, :2]),
    "target": lambda: ul.HalfSpaceRegressor(**SMALL, experts="linear").fit(X, X[:, 0]),
}


@pytest.mark.parametrize("name", FITTED)
def test_a_saved_estimator_is_the_same(name: str, tmp_path: Path) -> None:
    estimator = FITTED[name]()
    estimator.save(tmp_path / "model.safetensors")
    loaded = load_estimator(tmp_path / "model.safetensors")
    assert type(loaded) is type(estimator)
    assert loaded.get_params() == estimator.get_params()
    assert loaded.predict(X).tolist() == estimator.predict(X).tolist()
    assert loaded.predict(X).dtype == estimator.predict(X).dtype
    if name != "soft":
        output = 1 if name == "targets" else None
        assert loaded.paths(X[0], top=3, output=output) == estimator.paths(X[0], top=3, output=output)
        assert np.array_equal(loaded.feature_importances_, estimator.feature_importances_)
        assert np.array_equal(loaded.regions_.patterns, estimator.regions_.patterns)
    with pytest.raises(ValueError, match="cannot be trained further"):
        loaded.partial_fit(X, Y)


def test_a_saved_estimator_knows_its_columns(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=list("abcd"))
    ul.HalfSpaceClassifier(**SMALL).fit(frame, Y).save(tmp_path / "model.safetensors")
    loaded = load_estimator(tmp_path / "model.safetensors")
    assert loaded.half_spaces_.feature_names == ("a", "b", "c", "d")
    loaded.predict(frame)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        load_estimator(tmp_path / "nothing")
    save_file({"a": np.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="holds no estimator"):
        load_estimator(tmp_path / "other.safetensors")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="is no safetensors file"):
        load_estimator(tmp_path / "text")


@pytest.mark.adapters
@pytest.mark.parametrize("name", FITTED)
def test_onnx_gives_the_same_scores(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    estimator = FITTED[name]()
    estimator.to_onnx(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {"x": X})
    assert np.abs(scores - estimator.path_sum_(X)).max() < 1e-6
