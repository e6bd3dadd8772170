"""Planted features: labels follow from the definition, depend on the hidden directions only, bad settings are refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from unlazy.data.planted import KINDS, Planted, subspace_overlap
from unlazy.runtime import InputError, stream

ZOO = [
    Planted("patterns", 12, 3),
    Planted("parity", 12, 3),
    Planted("staircase", 12, 5),
    Planted("single-index", 12, 1),
    Planted("multi-index", 12, 4),
    Planted("hierarchy", 20, 2, symbols=4),
]
ids = [data.kind for data in ZOO]


def test_every_kind_is_tested() -> None:
    assert tuple(ids) == KINDS


@pytest.mark.parametrize("data", ZOO, ids=ids)
def test_inputs_are_centred_and_labels_are_even(data: Planted) -> None:
    x, y = data.draw(20_000)
    assert set(y.tolist()) == {-1.0, 1.0}
    assert x.shape == (20_000, data.inputs)
    assert y.mean().abs() < 0.04
    assert x.mean(0).abs().max() < 0.04
    assert abs(x.var(0).mean().item() - 1) < 0.05
    again, other = data.draw(50), data.draw(50, "test")
    assert torch.equal(again[0], data.draw(50)[0])
    assert not torch.equal(again[0], other[0])


@pytest.mark.parametrize("data", ZOO, ids=ids)
def test_directions_are_orthonormal_and_another_seed_hides_others(data: Planted) -> None:
    hidden = data.directions()
    size = hidden.shape[1]
    assert torch.allclose(hidden.T @ hidden, torch.eye(size, dtype=torch.float64), atol=1e-12)
    others = [Planted(data.kind, data.inputs, data.order, symbols=data.symbols, seed=seed) for seed in range(1, 6)]
    assert min(subspace_overlap(other.directions(), hidden) for other in others) < 0.999
    assert subspace_overlap(hidden, hidden) == pytest.approx(1)


@pytest.mark.parametrize("data", [data for data in ZOO if data.kind != "patterns"], ids=ids[1:])
def test_labels_depend_on_the_hidden_components_alone(data: Planted) -> None:
    """Inputs with the same hidden components have the same label, whatever the rest; pairs found by brute force or made."""
    x, y = data.draw(4000)
    hidden = data.directions()
    if data.kind in ("single-index", "multi-index"):
        seen = x @ hidden
        rule = {
            "single-index": lambda row: 1.0 if abs(row[0]) > 0.6744897501960817 else -1.0,
            "multi-index": lambda row: 1.0 if row[0] * row[1] + row[2] * row[3] >= 0 else -1.0,
        }[data.kind]
        assert [rule(row) for row in seen.tolist()] == y.tolist()
        return
    labels: dict[tuple[float, ...], set[float]] = {}
    for row, label in zip((x @ hidden).round(decimals=6).tolist(), y.tolist(), strict=True):
        labels.setdefault(tuple(row), set()).add(label)
    assert len(labels) < 2000  # many inputs share their hidden part
    assert all(len(found) == 1 for found in labels.values())


def test_parity_and_staircase_by_hand() -> None:
    for kind, order in (("parity", 3), ("staircase", 3), ("staircase", 5)):
        data = Planted(kind, 8, order, seed=3)
        x, y = data.draw(200)
        for row, label in zip(x.tolist(), y.tolist(), strict=True):
            steps = list(
                itertools.accumulate((row[place] for place in data.relevant_places().tolist()), lambda a, b: a * b)
            )
            total = steps[-1] if kind == "parity" else sum(steps)
            assert label == math.copysign(1, total)


def test_patterns_are_the_pattern_data_stretched() -> None:
    data = Planted("patterns", 12, 3, mixture=0.2)
    x, y = data.draw(300)
    patterns = data.patterns()
    assert patterns.gamma == pytest.approx(0.4)
    assert torch.allclose(x / math.sqrt(12), patterns.dataset(300).x)
    assert torch.equal(y, patterns.draw(300).y)
    count = patterns.draw(300).indicators[:, patterns.is_relevant()].sum(1).to(torch.float64)
    along = x @ data.directions()[:, 0]
    assert torch.allclose((along - along.mean()) / along.std(), (count - count.mean()) / count.std(), atol=1e-9)


def test_a_grammar_is_read_in_one_way_only() -> None:
    """Every pair belongs to exactly one symbol; parsing a sentence bottom up gives its class."""
    data = Planted("hierarchy", 24, 2, symbols=4, seed=5)
    reading = []
    for rule in data.grammar():
        pairs = {tuple(pair): symbol for symbol, versions in enumerate(rule.tolist()) for pair in versions}
        assert len(pairs) == rule.shape[0] * rule.shape[1] == 16
        reading.append(pairs)
    x, y = data.draw(300)
    tokens = x.reshape(300, 6, 4).argmax(2)[:, data.relevant_places()]
    for sentence, label in zip(tokens.tolist(), y.tolist(), strict=True):
        symbols = list(sentence)
        for pairs in reversed(reading):
            symbols = [pairs[symbols[place], symbols[place + 1]] for place in range(0, len(symbols), 2)]
        assert 2 * symbols[0] - 1 == label
    assert data.directions().shape == (24, 12)  # three contrasts for each of four tokens


def test_another_seed_is_another_grammar() -> None:
    grammars = {
        str([rule.tolist() for rule in Planted("hierarchy", 24, 2, symbols=4, seed=seed).grammar()])
        for seed in range(5)
    }
    assert len(grammars) == 5


def test_recovery_of_random_subspaces_is_their_share() -> None:
    values = []
    for number in range(200):
        bases = [
            torch.linalg.qr(torch.randn(20, 4, generator=stream(number, name), dtype=torch.float64)).Q for name in "ab"
        ]
        values.append(subspace_overlap(*bases))
    assert sum(values) / 200 == pytest.approx(4 / 20, abs=0.02)
    with pytest.raises(InputError, match="differ"):
        subspace_overlap(torch.eye(3, dtype=torch.float64)[:, :1], torch.eye(3, dtype=torch.float64)[:, :2])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("circle",), "kind must be one of"),
        (("parity", 10, 0), "at least one direction"),
        (("parity", 4, 5), "exceeds the number of inputs"),
        (("patterns", 10, 4), "k=4 is even"),
        (("patterns", 4, 5), "more relevant patterns than patterns"),
        (("single-index", 10, 2), "a single index is one direction"),
        (("multi-index", 10, 3), "come in pairs"),
        (("staircase", 10, 4), "no sign"),
        (("hierarchy", 30, 2), "whole number of tokens"),
        (("hierarchy", 16, 2), "has 4 tokens, not 2"),
        (("hierarchy", 15, 2, 0.5, 3), "even"),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(settings, reason) -> None:
    with pytest.raises(InputError, match=reason):
        Planted(*settings)


def test_a_sample_has_rows() -> None:
    with pytest.raises(InputError, match="at least one input"):
        Planted("parity").draw(0)
    data = Planted("parity", 10, 3, seed=2).dataset(7)
    assert data.describe()["options"]["seed"] == 2
    assert data.y.shape == (7, 1)
