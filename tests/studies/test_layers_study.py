"""The study of which layers could be frozen: its rule follows from the table, and only the fitted side chooses it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from unlazy.scope.layer_table import FILE
from unlazy.studies.scope import layers
from unlazy.studies.scope.layers import FITTED, SCORED, Trained, all_scores, choose, read_trained, rule_text
from unlazy.studies.study import Work
from unlazy.studies.table import Table

RESULTS = Path(__file__).parents[2] / "results" / "layers"


def case(network: str, side: str, reset: tuple[float, float], frozen: tuple[float, float]) -> Trained:
    measures = {
        name: {"reset_cost": 0.5 * value, "layer_motion": 1 - value, "tangent_share": 1 - value, "layer_error": value}
        for name, value in zip("ab", reset, strict=True)
    }
    costs = dict(zip("ab", frozen, strict=True))
    return Trained(side, network, "0", 0.5, measures, costs, costs)


def test_the_rule_is_chosen_on_the_fitted_side_alone() -> None:
    fitted = [case(str(number), "fit", (0.9, 0.01), (0.8, 0.01)) for number in range(4)]
    other = [case(str(number), "score", (0.01, 0.9), (0.8, 0.9)) for number in range(4)]
    chosen = choose(fitted)
    assert chosen["rule"] == "reset_cost"
    assert chosen["factor"] == 0.1  # the floor holds for the one layer that is called
    assert choose([*fitted, *other]) == chosen
    scores = all_scores([*fitted, *other])["rules"]["reset_cost"]
    assert (scores["fit"]["held"], scores["fit"]["top"]) == (4, 4)
    assert (scores["score"]["called"], scores["score"]["held"], scores["score"]["top"]) == (4, 0, 4)


def test_no_network_and_no_data_set_is_on_both_sides_but_for_other_settings() -> None:
    assert len(FITTED) == len(SCORED) == 10
    assert not set(FITTED) & set(SCORED)
    assert not {recipe[1] for recipe in FITTED.values()} & {recipe[1] for recipe in SCORED.values()}


def test_a_small_case_has_both_costs_and_the_cheap_measures_of_every_layer(tmp_path: Path) -> None:
    settings = layers.STUDY.settings("smoke", {"steps": 6})
    one = next(c for c in layers.cases(settings, [0]) if c.side == "fit")
    table = Table.from_rows(layers.measure(one, Work("layers", "smoke", tmp_path)).entries)
    for layer in ("0", "2", "4"):
        for name in ("frozen_loss", "linear_loss", "reset_cost", "layer_motion", "tangent_share", "layer_error"):
            assert len(table.where(quantity=name, layer=layer)) == 1


def test_the_shipped_rule_follows_from_the_committed_table() -> None:
    scores = all_scores(read_trained(Table.read(RESULTS / "paper" / "table.csv")))
    assert json.loads((RESULTS / "paper" / "scores.json").read_text()) == json.loads(json.dumps(scores))
    assert FILE.read_bytes() == (RESULTS / "rule.json").read_bytes() == rule_text(scores)


def test_a_layer_is_called_freezable_only_below_the_border() -> None:
    one = case("x", "fit", (0.9, 0.04), (0.8, 0.03))
    assert one.calls("reset_cost", 1.0) == {"b": True}
    assert dataclasses.replace(one, frozen={"a": 0.8, "b": 0.045}).calls("reset_cost", 1.0) == {"b": False}
    assert one.calls("reset_cost", 2.0) == {}
    assert one.values("reset_cost")["b"] == pytest.approx(0.04)
