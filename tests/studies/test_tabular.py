"""The study of estimators on tables: ranks, rule counts and the drawn tree, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import rankdata
from sklearn.tree import DecisionTreeClassifier, export_text

from unlazy.studies.estimators import tabular


def test_mean_ranks_are_those_of_scipy() -> None:
    scores = np.random.default_rng(0).integers(0, 4, size=(3, 6, 5)).astype(float)  # data, models, seeds; with ties
    expected = np.mean([rankdata(-scores[data], axis=0) for data in range(3)], axis=0)
    assert tabular.mean_ranks(*scores.reshape(18, 5)) == pytest.approx(expected)
    assert tabular.rank_less_network(*scores.reshape(18, 5)) == pytest.approx(expected[0] - expected[1])


def test_quantities_stand_in_the_order_that_the_functions_read() -> None:
    found = tabular._scores(("iris", "wine"))
    assert [(one.where["data"], one.where["model"]) for one in found[5:8]] == [
        ("iris", "tree"),
        ("wine", "half-space"),
        ("wine", "mlp"),
    ]
    seconds = np.array([[4.0], [2.0], [3.0], [6.0]])
    assert tabular.largest_ratio(*seconds) == pytest.approx([2.0])
    assert tabular.mean_ratio(*seconds) == pytest.approx([1.0])


def test_literals_of_a_tree_are_the_conditions_of_its_rules() -> None:
    x, y = tabular.load_data("iris", 0, 0)
    tree = DecisionTreeClassifier(max_leaf_nodes=6, random_state=0).fit(x, y)
    leaves = [line for line in export_text(tree).splitlines() if "class:" in line]
    assert tabular.count_tree_literals(tree) == sum(line.count("|") - 1 for line in leaves)


def test_the_oblique_tree_is_one() -> None:
    x, y = tabular.draw_oblique_tree(2000, 3, noise=0.0)
    normals = np.random.default_rng(3)
    normals.normal(size=(2000, 8))
    questions = normals.normal(size=(15, 8))
    for row, label in zip(x[:50], y[:50], strict=True):
        node = 0
        for _ in range(4):
            node = 2 * node + (2 if questions[node] @ row >= 0 else 1)
        assert label == (node - 15) % 2
    assert 0.3 < y.mean() < 0.7
    turned = tabular.draw_oblique_tree(2000, 3, noise=0.05)[1]
    assert 0.03 < (turned != y).mean() < 0.07


def test_every_large_data_set_has_a_thousand_training_rows() -> None:
    for name in tabular.LARGE:
        assert len(tabular.load_data(name, tabular.Settings().samples, 0)[0]) * 2 // 3 >= 1000
