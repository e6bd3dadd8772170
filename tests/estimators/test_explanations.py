"""Explanations are exact: against the network in torch, the enumeration of all paths, and rows by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris, make_moons

import unlazy as ul

SMALL: dict[str, Any] = {"members": 2, "width": 5, "depth": 3, "epochs": 30, "random_state": 0}


def fitted(kind: str, experts: str = "constant") -> tuple[Any, Any]:
    """A small estimator and its rows."""
    x, y = load_iris(return_X_y=True)
    x = x * np.array([10.0, 1.0, 0.1, 1.0]) + 3
    if kind == "binary":
        return ul.HalfSpaceClassifier(**SMALL, experts=experts).fit(x, y == 1), x
    if kind == "classes":
        return ul.HalfSpaceClassifier(**SMALL, experts=experts).fit(x, y), x
    targets = np.stack([x[:, 0] * x[:, 1], 5 * y - 2.0], axis=1)
    return ul.HalfSpaceRegressor(**SMALL, experts=experts).fit(x, targets), x


KINDS = list(itertools.product(("binary", "classes", "targets"), ("constant", "linear")))


@pytest.mark.parametrize(("kind", "experts"), KINDS)
def test_predictions_are_those_of_the_trained_network(kind: str, experts: str) -> None:
    estimator, x = fitted(kind, experts)
    scaled = torch.from_numpy((x - estimator._x_mean) / estimator._x_scale)
    with torch.no_grad():
        out = estimator._trainer.net.double()(scaled).mean(0).numpy() * estimator._y_scale + estimator._y_mean
    assert np.abs(estimator.path_sum_(x) - out).max() < 1e-10


@pytest.mark.parametrize(("kind", "experts"), KINDS)
def test_paths_add_up_to_the_score(kind: str, experts: str) -> None:
    estimator, x = fitted(kind, experts)
    scores = estimator.path_sum_(x)
    for row in (0, 75, 149):
        for number in range(scores.shape[1]):
            output = None if kind == "binary" else number
            every, some = estimator.paths(x[row], output=output), estimator.paths(x[row], top=7, output=output)
            sums = [math.fsum([one.intercept, one.rest, *(p.contribution for p in one.paths)]) for one in (every, some)]
            assert np.abs(np.array(sums) - scores[row, number]).max() < 1e-10
            assert every.rest == 0
            assert every.share == pytest.approx(1)
            hidden = math.fsum(path.contribution for path in every.paths[len(some) :])
            assert some.rest == pytest.approx(hidden, abs=1e-10)
            assert len(every) == every.active == some.active


@pytest.mark.parametrize(("kind", "experts"), KINDS)
def test_largest_paths_are_the_head_of_all_paths(kind: str, experts: str) -> None:
    estimator, x = fitted(kind, experts)
    model = estimator.path_sum_
    for row, top in ((0, 1), (60, 4), (149, 25)):
        every, some = model.all_paths(x[row], 0), model.largest_paths(x[row], 0, top)
        assert [(p.member, p.units) for p in some] == [(p.member, p.units) for p in every[:top]]
        assert [p.contribution for p in some] == pytest.approx([p.contribution for p in every[:top]], abs=1e-14)


def test_all_paths_by_the_definition() -> None:
    """Every tuple of units, each condition and each product of weights written out."""
    estimator, x = fitted("classes")
    model, row = estimator.path_sum_, x[20]
    expected = {}
    for member, units in itertools.product(range(2), itertools.product(range(5), repeat=3)):
        inside = all(
            model.normals[member, layer, unit] @ row + model.offsets[member, layer, unit] >= 0
            for layer, unit in enumerate(units)
        )
        if inside:
            a, b, c = units
            links = model.links[member, 0, b, a] * model.links[member, 1, c, b]
            expected[member, units] = model.experts[member, a] * links * model.readout[member, 1, c]
    found = {(path.member, path.units): path.contribution for path in model.all_paths(row, 1)}
    assert found == pytest.approx(expected, abs=1e-14)
    assert len(found) == model.count_active(row[None])[0]
    assert model.absolute_sum(row[None])[0, 1] == pytest.approx(sum(abs(one) for one in found.values()))


@pytest.mark.parametrize("experts", ["constant", "linear"])
def test_unit_contributions_are_sums_of_paths(experts: str) -> None:
    estimator, x = fitted("classes", experts)
    model = estimator.path_sum_
    found = model.unit_contributions(x[:3], 2)
    for row in range(3):
        expected = np.zeros((2, 3, 5))
        for path in model.all_paths(x[row], 2):
            for layer, unit in enumerate(path.units):
                expected[path.member, layer, unit] += path.contribution
        assert np.abs(found[row] - expected).max() < 1e-12


def test_importances_are_mean_contributions_spread_over_columns() -> None:
    estimator, x = fitted("classes")
    model, expected = estimator.path_sum_, np.zeros(4)
    totals = sum(np.abs(model.unit_contributions(x, output)).mean(0) for output in range(3))
    for member, layer, unit in itertools.product(range(2), range(3), range(5)):
        weights = np.abs(model.normals[member, layer, unit]) * x.std(0)
        expected += totals[member, layer, unit] * weights / weights.sum()
    assert estimator.feature_importances_ == pytest.approx(expected / expected.sum())
    assert estimator.feature_importances_.sum() == pytest.approx(1)


def test_importances_find_the_columns_that_matter() -> None:
    x = np.random.default_rng(0).normal(size=(400, 6)) * np.array([1, 100, 1, 1, 0.01, 1])
    y = (x[:, 1] / 100 + x[:, 4] / 0.01 > 0.3).astype(int)
    shares = ul.HalfSpaceClassifier(random_state=0).fit(x, y).feature_importances_
    assert set(np.argsort(-shares)[:2]) == {1, 4}


def test_regions_are_the_cells_of_the_training_rows() -> None:
    estimator, x = fitted("classes")
    regions, gates = estimator.regions_, estimator.path_sum_.gates(x)
    rows = {}
    for row in range(len(x)):
        rows.setdefault(gates[:, :, row].tobytes(), []).append(row)
    assert sorted(regions.counts, reverse=True) == sorted(map(len, rows.values()), reverse=True)
    assert list(regions.counts) == sorted(regions.counts, reverse=True)
    assert (regions.counts @ regions.values) == pytest.approx(estimator.decision_function(x).sum(0))
    bits = np.unpackbits(regions.patterns, axis=1, count=2 * 3 * 5)
    first = gates.transpose(2, 1, 0, 3).reshape(len(x), -1)
    assert {tuple(bit) for bit in bits} == {tuple(row.astype(np.uint8)) for row in first}


def test_half_spaces_in_words() -> None:
    estimator, x = fitted("classes")
    spaces = estimator.half_spaces_
    inside = x @ spaces.normals[1, 2, 3] + spaces.offsets[1, 2, 3] >= 0
    words, bound = spaces.in_words(1, 2, 3, terms=4).split(" >= ")
    weights = np.zeros(4)
    for sign, number, name in zip(*_terms(words), strict=True):
        weights[int(name[1:])] = sign * number
    near = np.abs(x @ weights - float(bound)) < 0.05 * x.std(0).max()  # texts have three digits
    assert ((x @ weights >= float(bound)) == inside)[~near].all()
    assert (~near).mean() > 0.5
    assert "+ 2 smaller terms" in spaces.in_words(0, 0, 0, terms=2)


def _terms(words: str) -> tuple[list[int], list[float], list[str]]:
    """Signs, numbers and names of ``a x0 - b x1 + c x2``."""
    parts = words.replace("- ", "+ -").split(" + ")
    pairs = [part.split() for part in parts]
    return [-1 if n.startswith("-") else 1 for n, _ in pairs], [abs(float(n)) for n, _ in pairs], [n for _, n in pairs]


def test_rules_name_the_prediction_and_their_share() -> None:
    estimator, x = fitted("classes")
    explanation, text = estimator.paths(x[0], top=2), estimator.rules(x[0], top=2)
    assert text.startswith(f"predicted: {estimator.predict(x[:1])[0]}.")
    assert f"{explanation.share:.1%}" in text
    assert text.count("  if ") == 2
    named = ul.HalfSpaceClassifier(**SMALL).fit(x, np.array(["<a>", "b"])[(x[:, 0] > x[:, 0].mean()).astype(int)])
    assert "&lt;a&gt;" in named.paths(x[:1], top=1, output="b").to_html() or "class b" in named.rules(x[0])
    assert "<script" not in named.to_html()


def test_wrong_questions_are_answered_clearly() -> None:
    estimator, x = fitted("classes")
    with pytest.raises(ValueError, match="one row with 4 columns"):
        estimator.paths(x[:2])
    with pytest.raises(ValueError, match=r"one of the classes \[0, 1, 2\]"):
        estimator.paths(x[0], output=7)
    with pytest.raises(ValueError, match="number of a target"):
        fitted("targets")[0].paths(x[0])
    with pytest.raises(ValueError, match="top must be at least 1"):
        estimator.paths(x[0], top=0)
    soft = ul.HalfSpaceClassifier(**SMALL, gate="soft").fit(x, x[:, 0] > x[:, 0].mean())
    assert soft.score(x, x[:, 0] > x[:, 0].mean()) > 0.9
    for question in (lambda: soft.rules(x[0]), lambda: soft.half_spaces_, lambda: soft.distill(x)):
        with pytest.raises(ValueError, match="fit with gate='hard'"):
            question()


@pytest.mark.parametrize("experts", ["constant", "linear"])
def test_distilled_rules_keep_the_accuracy(experts: str) -> None:
    x, y = make_moons(300, noise=0.1, random_state=0)
    estimator = ul.HalfSpaceClassifier(width=16, random_state=0, experts=experts).fit(x, y)
    rules = estimator.distill(x, y, keep=0.97)
    assert rules.reached
    assert rules.score(x, y) >= 0.97 * estimator.score(x, y)
    assert rules.kept == rules.score(x, y) / estimator.score(x, y)
    assert rules.literals == estimator.depth * len(rules) == estimator.depth * len(rules.paths)
    assert 0 < len(rules) < 100
    assert 0 < rules.half_spaces <= rules.literals
    assert len(str(rules).splitlines()) == len(rules) + 2
    shorter = estimator.distill(x, y, keep=1.0, most=1)
    assert len(shorter) == 1
    assert not shorter.reached


def test_distilled_scores_are_sums_over_the_rules() -> None:
    estimator, x = fitted("targets")
    rules = estimator.distill(x, keep=0.9)
    model = estimator.path_sum_
    expected = np.tile(rules.intercept, (len(x), 1))
    for (member, units), weight in zip(rules.paths, rules.weights, strict=True):
        inside = np.ones(len(x), dtype=bool)
        for layer, unit in enumerate(units):
            inside &= x @ model.normals[member, layer, unit] + model.offsets[member, layer, unit] >= 0
        expected += inside[:, None] * weight
    assert np.abs(rules.scores(x) - expected).max() < 1e-10


@pytest.mark.parametrize("columns", [3, 80])
@pytest.mark.parametrize("experts", ["constant", "linear"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("outputs", [1, 4])
def test_fast_predictions_are_sums_over_gates(columns: int, experts: str, depth: int, outputs: int) -> None:
    """The layout of predictions against the plain formula; rows far from 0, columns of very different size."""
    generator = np.random.default_rng(0)
    x = (generator.normal(size=(900, columns)) + 50) * 10.0 ** generator.integers(-3, 4, size=columns)
    y = generator.normal(size=(900, outputs))
    settings = {**SMALL, "epochs": 2, "depth": depth, "experts": experts}
    model = ul.HalfSpaceRegressor(**settings).fit(x, y).path_sum_
    normals, offsets = model.normals.transpose(1, 0, 2, 3), model.offsets.transpose(1, 0, 2)
    gates = (np.einsum("nd,lsud->lsnu", x, normals) + offsets[:, :, None] >= 0).astype(float)
    assert np.array_equal(model.gates(x), gates)
    assert np.abs(model(x) - model._score(gates, x)).max() < 1e-12


def test_wide_rows_next_to_a_border_are_decided_in_float64() -> None:
    """Rows put on both sides of a half-space's border, at distances that float32 cannot tell apart."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(300, 70)) + 5
    model = ul.HalfSpaceRegressor(**{**SMALL, "epochs": 2}).fit(x, x[:, 0] > 5).path_sum_
    own = model._turned
    normal, offset = own.normals[7, :-1], own.normals[7, -1]
    on_border = x - np.outer((x @ normal + offset) / (normal @ normal), normal)
    for step in (1e-9, -1e-9):
        near = on_border + step * normal / np.linalg.norm(normal)
        columns = np.concatenate([near, np.ones((300, 1))], axis=1).T
        assert (own.contains(columns)[7] == (step > 0)).all()
        assert np.array_equal(own.contains(columns), own.normals @ columns >= 0)
