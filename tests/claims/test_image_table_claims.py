"""Verdicts on the CIFAR tables, on the committed numbers as three equal seeds: what flips them, what leaves them open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from repository import RESULTS
from unlazy.claims.rule import judge_claim
from unlazy.studies.halfspace import table1, table2
from unlazy.studies.halfspace.image_networks import COST, DECAY
from unlazy.studies.halfspace.table1 import difference_at_best_ridge, once_done
from unlazy.studies.table import Table

CLAIMS = {claim.id: claim for study in (table1, table2) for claim in study.CLAIMS}
SEEDS = (0, 1, 2)


def three_seeds(name: str) -> Table:
    """The committed numbers of seed 0, three times: enough seeds to judge."""
    rows = [row for row in Table.read(RESULTS / name / "paper" / "table.csv").rows() if row["seed"] == "0"]
    return Table.from_rows([row | {"seed": seed} for row in rows for seed in SEEDS], digits=17)


FIRST, SECOND = three_seeds("table1"), three_seeds("table2")
TEST = {"quantity": "accuracy", "images": "test", "gates": "as trained", "at": "end"}


def shifted(table: Table, by: float, **where: Any) -> Table:
    """The same numbers but for some, which are greater by so much."""
    chosen = table.where(**where)
    assert len(chosen) > 0
    return Table.from_rows(
        [*table.without(**where).rows(), *(r | {"value": r["value"] + by} for r in chosen.rows())], digits=17
    )


def judged(claim: str, table: Table) -> dict[str, Any]:
    return judge_claim(CLAIMS[claim], table, SEEDS)


def test_one_seed_is_provisional_and_three_like_it_would_decide() -> None:
    found = {name: judged(name, SECOND if name == "C24" else FIRST)["verdict"] for name in CLAIMS}
    assert found == {
        **dict.fromkeys(("C20", "C21", "C23", "C25", "F5"), "holds"),
        "C22": "1 of 2 parts",  # training accuracies are not done
        "C24": "2 of 4 parts",  # CIFAR-100: one gap outside, one training not done
    }
    committed = {name: Table.read(RESULTS / name / "paper" / "table.csv") for name in ("table1", "table2")}
    for name in CLAIMS:
        row = judged(name, committed["table2" if name == "C24" else "table1"])
        assert row["verdict"] in ("provisional", "not measured")


@pytest.mark.parametrize(
    ("claim", "by", "where"),
    [
        ("C20", -2.0, {"model": "pwc", "recipe": DECAY}),
        ("C20", 2.0, {"model": "relu", "recipe": DECAY}),
        ("C21", 25.0, {"model": "dln"}),
        ("C23", 8.0, {"model": "tangent"}),
        ("C25", 3.0, {"model": "dlgn", "recipe": DECAY}),
        ("C25", -3.0, {"model": "dlgn", "recipe": DECAY}),
    ],
)
def test_other_accuracies_flip_the_verdict(claim: str, by: float, where: dict[str, Any]) -> None:
    assert judged(claim, FIRST)["verdict"] == "holds"
    assert judged(claim, shifted(FIRST, by, **TEST, **where))["verdict"] == "fails"


@pytest.mark.parametrize("name", ["seconds_per_epoch", "peak_megabytes", "images_per_second"])
def test_each_cost_counts_for_f5(name: str) -> None:
    by = 1e6 if name == "images_per_second" else -0.9 * float(FIRST.select(name, model="dlgn", recipe=COST)[0])
    row = judged("F5", shifted(FIRST, by, quantity=name, model="dlgn", recipe=COST))
    assert row["verdict"] == "2 of 3 parts"


@pytest.mark.parametrize(("gap", "verdict"), [(3.0, "fails"), (4.0, "holds"), (7.0, "holds"), (8.0, "fails")])
def test_gaps_of_residual_networks_on_both_sides(gap: float, verdict: str) -> None:
    table = shifted(SECOND, 20.0, **TEST | {"images": "train"})  # every training is done
    for claim_part in CLAIMS["C24"].parts:
        relu, dlgn, *_ = claim_part.of  # type: ignore[misc]
        own = float((relu.select(table, SEEDS) - dlgn.select(table, SEEDS))[0])
        table = shifted(table, own - gap, **TEST | dict(dlgn.where))
    row = judged("C24", table)
    assert [part["verdict"] for part in row["parts"]] == [verdict] * 4


def test_residual_networks_are_compared_once_both_are_trained() -> None:
    for model in ("relu", "dlgn"):
        table = shifted(SECOND, -20.0, **TEST | {"images": "train"}, model=model)
        assert judged("C24", table)["verdict"] == "not measured"


def test_networks_that_were_not_run_leave_claims_open() -> None:
    row = judged("C24", SECOND.where(data="cifar-10", layout="resnet-34"))
    assert [part["verdict"] for part in row["parts"]] == ["holds"] + ["not measured"] * 3
    assert judged("C24", SECOND.where(model="relu"))["verdict"] == "not measured"
    assert judged("C23", FIRST.without(model="tangent"))["verdict"] == "not measured"
    assert judged("C20", FIRST.without(recipe=DECAY))["verdict"] == "not measured"
    assert judged("C20", FIRST.without(quantity="last_third_rise"))["verdict"] == "not measured"


def test_networks_of_another_training_are_never_compared() -> None:
    elsewhere = shifted(FIRST, -30.0, **TEST, model="relu", epochs=100)
    assert judged("C20", elsewhere)["parts"] == judged("C20", FIRST)["parts"]
    assert judged("C21", elsewhere)["verdict"] == "2 of 3 parts"
    slower = shifted(SECOND, -30.0, **TEST, model="relu", layout="resnet-110", lr=0.6)
    assert judged("C24", slower)["parts"] == judged("C24", SECOND)["parts"]


# --- is training done? -------------------------------------------------------------------------------

STILL, RISING, JUMPING, UNKNOWN = (0.4, 1.4), (0.6, 0.6), (0.4, 1.6), (np.nan, np.nan)


def done(fits: float, *networks: tuple[float, tuple[float, float], float, tuple[float, float]]) -> list[float]:
    """``once_done`` for networks given as: accuracy and (rise, range) at the constant rate, then the same after decay."""
    numbers = [np.array([x]) for one in networks for x in (one[0], *one[1], one[2], *one[3])]
    return once_done(np.array([fits]), *numbers)[:, 0].tolist()


def test_networks_are_compared_once_their_training_is_done() -> None:
    calm, rising, jumping = (70.0, STILL, 73.0, STILL), (71.0, RISING, 74.0, STILL), (72.0, JUMPING, 75.0, STILL)
    assert done(80, calm, calm) == [70, 70]  # standing still at the constant rate
    assert done(96, calm, rising) == [70, 71]  # the ReLU network fits its training images
    assert done(80, calm, rising) == [73, 74]  # one of them rises: all after decay
    assert done(80, jumping, calm) == [75, 73]
    for never in ((71.0, RISING, 74.0, RISING), (71.0, RISING, 74.0, JUMPING), (71.0, RISING, np.nan, UNKNOWN)):
        assert np.isnan(done(80, calm, never)).all()


def test_unknown_numbers_never_choose_the_other_stage() -> None:
    calm = (70.0, STILL, 73.0, STILL)
    assert np.isnan(done(80, calm, (70.0, UNKNOWN, 73.0, STILL))).all()
    assert np.isnan(done(np.nan, calm, calm)).all()


def test_a_linear_model_that_wanted_a_smaller_ridge_is_not_judged() -> None:
    found = difference_at_best_ridge(*(np.array(x) for x in ([70.0, 70.0], [50.0, 50.0], [1e-8, 1e-7], [1e-8, 1e-8])))
    assert np.isnan(found[0])
    assert found[1] == 20
    least = shifted(FIRST, 1.0, quantity="least_ridge", model="tangent")
    assert judged("C23", least)["verdict"] == "not measured"


def test_training_accuracy_decides_c22() -> None:
    still = FIRST
    for quantity in ("last_third_rise", "last_third_range"):
        still = shifted(still, -100.0, quantity=quantity, images="train", recipe=DECAY)
    assert judged("C22", still)["verdict"] == "holds"
    fits = {"quantity": "accuracy", "images": "train", "gates": "as trained", "at": "end", "model": "dlgn"}
    assert judged("C22", shifted(still, 20.0, **fits, recipe=DECAY))["verdict"] == "1 of 2 parts"
