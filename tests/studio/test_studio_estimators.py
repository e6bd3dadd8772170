"""Pages of saved estimators: what they list, the rules of a row, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from sklearn.datasets import load_iris
from starlette.testclient import TestClient

import unlazy as ul
from unlazy.studio.server import Studio, make_app

X, Y = load_iris(return_X_y=True)
WORDS = np.array(["<setosa>", "versicolor", "virginica"])[Y]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    root, outside = tmp_path / "runs", tmp_path / "outside.safetensors"
    (root / "tables").mkdir(parents=True)
    quick = {"members": 2, "width": 4, "epochs": 2, "random_state": 0}
    ul.HalfSpaceClassifier(**quick).fit(X, WORDS).save(root / "tables" / "iris.safetensors")
    ul.HalfSpaceRegressor(**quick, gate="soft").fit(X, X[:, 0]).save(root / "soft.safetensors")
    ul.HalfSpaceRegressor(**quick).fit(X, X[:, :2]).save(outside)
    (root / "link.safetensors").symlink_to(outside)
    save_file({"a": np.zeros(2)}, root / "other.safetensors")
    studio = Studio(root)
    yield TestClient(make_app(studio), base_url="http://127.0.0.1:8123", follow_redirects=False)
    studio.close()


def test_the_list_names_estimators_inside_the_folder_only(client: TestClient) -> None:
    page = client.get("/estimators").text
    assert "tables/iris.safetensors" in page
    assert "soft.safetensors" in page
    assert "link.safetensors" not in page
    assert "other.safetensors" not in page


def test_a_page_explains_a_row_as_the_estimator_does(client: TestClient, tmp_path: Path) -> None:
    loaded = ul.estimators.load_estimator(tmp_path / "runs" / "tables" / "iris.safetensors")
    answer = client.get("/estimators/tables/iris.safetensors", params={"row": ",".join(map(str, X[0]))})
    assert answer.status_code == 200
    assert "<setosa>" not in answer.text
    assert "<script" not in answer.text
    page, explanation = unescape(answer.text), loaded.paths(X[0], top=10)
    assert f"{explanation.score:.6g}" in page
    for words, value in explanation.lines():
        assert f"<td>{value:+.4g}</td><td>{words}</td>" in page
    for column, share in enumerate(loaded.feature_importances_):
        assert f"<td>x{column}</td>" in page
        assert f"<td>{share:.1%}</td>" in page


def test_pages_without_a_row_and_of_soft_gates(client: TestClient) -> None:
    assert "?row=" in client.get("/estimators/tables/iris.safetensors").text
    assert "no half-spaces to show" in client.get("/estimators/soft.safetensors").text


@pytest.mark.parametrize("name", ["link.safetensors", "other.safetensors", "../outside.safetensors", "%2e%2e/x"])
def test_other_files_are_not_served(client: TestClient, name: str) -> None:
    assert client.get(f"/estimators/{name}").status_code == 404


@pytest.mark.parametrize("row", ["1,2,3", "a,b,c,d", "", "nan,1,1,1"])
def test_wrong_rows_are_answered_clearly(client: TestClient, row: str) -> None:
    answer = client.get("/estimators/tables/iris.safetensors", params={"row": row})
    assert answer.status_code == 400
    assert "4 numbers" in answer.json()["error"]
