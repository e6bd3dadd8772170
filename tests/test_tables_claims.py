"""Verdicts on the CIFAR tables, on made cells: what flips them, what leaves them open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unlazy.runtime import InputError
from unlazy.studies.halfspace.tables.claims import claims
from unlazy.studies.halfspace.tables.compare import Table
from unlazy.studies.halfspace.tables.settings import RIDGES, SCALES, cells

MADE_BY = {"started": "2026-01-01T00:00:00+00:00", "device": "made"}


def cell(data: str, layout: str, model: str, test: float, *, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A made cell; accuracies in percent."""
    made = {"data": data, "layout": layout, "model": model, "recipe": "main", "seed": seed, "epochs": 10}
    numbers = {"test_as_trained": test / 100, "test_hard_gates": test / 100 - 0.1, "train_as_trained": test / 100 + 0.1}
    return {**made, **numbers, "best_test": test / 100, "provenance": MADE_BY, "key": str(more), **more}


def first_table(**tests: float) -> dict[str, Any]:
    """A made Table 1 of two seeds that has everything the paper says."""
    accuracy = {"relu": 72.2, "dlgn": 73.2, "pwc": 72.4, "dln": 40.8, "tangent": 50.0} | {
        name.replace("_", "-"): value for name, value in tests.items()
    }
    made = []
    for seed in range(2):
        for model, test in accuracy.items():
            train_share = 0.96 if model == "relu" else 0.85
            made.append(
                cell(
                    *("cifar-10", "conv", model, test),
                    seed=seed,
                    train_as_trained=train_share,
                    epochs=0 if model == "tangent" else 10,
                )
            )
    cost = {"seconds_per_epoch": 1.0, "peak_megabytes": 100.0, "images_per_second": 1e5, "parameters": 100}
    dear = {"seconds_per_epoch": 2.0, "peak_megabytes": 180.0, "images_per_second": 6e4, "parameters": 200}
    made.append(cell("cifar-10", "conv", "relu", 50, recipe="cost", epochs=3, **cost))
    made.append(cell("cifar-10", "conv", "dlgn", 50, recipe="cost", epochs=3, **dear))
    settings = {"data": ["cifar-10"], "images": 50_000, "lr": 4e-4}
    return {"study": "table1", "scale": "paper", "settings": settings, "provenance": MADE_BY, "cells": made}


def second_table(gap: float = 5.5) -> dict[str, Any]:
    made = []
    for data in ("cifar-10", "cifar-100"):
        for layout in ("resnet-34", "resnet-110"):
            made += [cell(data, layout, "relu", 90), cell(data, layout, "dlgn", 90 - gap)]
            made += [cell(data, layout, "dlgn-hard", 87), cell(data, layout, "pwc-hard", 86)]
    settings = {"data": ["cifar-10", "cifar-100"], "images": 50_000, "lr": 0.3}
    return {"study": "table2", "scale": "paper", "settings": settings, "provenance": MADE_BY, "cells": made}


def verdicts(results: dict[str, Any]) -> dict[str, str]:
    return {row["id"]: row["verdict"] for row in claims(results)}


def test_the_papers_numbers_hold() -> None:
    assert verdicts(first_table()) == dict.fromkeys(("C20", "C21", "C22", "C23", "C25", "F5"), "holds")
    assert verdicts(second_table()) == {"C24": "holds"}


@pytest.mark.parametrize(
    ("claim", "changes"),
    [
        ("C20", {"relu": 71.6}),
        ("C20", {"pwc": 70.0}),
        ("C21", {"dln": 64.0}),
        ("C23", {"tangent": 64.0}),
        ("C25", {"pwc": 71.6}),
        ("C25", {"pwc": 74.8}),
    ],
)
def test_other_accuracies_flip_the_verdict(claim: str, changes: dict[str, float]) -> None:
    assert verdicts(first_table(**changes))[claim] == "fails"


def test_what_is_compared_to_a_point_waits_until_training_is_done() -> None:
    results = first_table()
    for made in results["cells"]:
        if made["model"] == "relu":
            made["train_as_trained"] = 0.69
    told = verdicts(results)
    assert {told[claim] for claim in ("C20", "C22", "C25")} == {"cannot tell"}
    assert {told[claim] for claim in ("C21", "C23", "F5")} == {"holds"}


def risen(before: float, after: float, last: float | None = None, epochs: int = 10) -> list[dict[str, float]]:
    """Looks of a training whose accuracies, in percent, were so high by two thirds of it and at the end."""
    looks = ((1, before - 30), (epochs // 2, before), (epochs - 1, after), (epochs, after if last is None else last))
    return [{"epoch": epoch, **dict.fromkeys(("test_as_trained", "train_as_trained"), p / 100)} for epoch, p in looks]


def test_training_is_also_done_when_what_is_compared_stands_still() -> None:
    def made(**curves: list[dict[str, float]]) -> dict[str, Any]:
        results = first_table()
        for one in results["cells"]:
            if one["model"] in curves:
                one["curve"] = curves[one["model"]]
            if one["model"] == "relu":
                one["train_as_trained"] = 0.86
        return results

    def told(**curves: list[dict[str, float]]) -> dict[str, str]:
        return verdicts(made(**curves))

    def reason(**curves: list[dict[str, float]]) -> str:
        return next(row["why"] for row in claims(made(**curves)) if row["id"] == "C22")

    still, rising, shaken = risen(72.0, 72.4, 71.0), risen(72.0, 72.6), risen(72.0, 72.4, 70.8)
    assert {told(relu=still, dlgn=still, pwc=still)[claim] for claim in ("C20", "C22", "C25")} == {"holds"}
    assert told(relu=still, dlgn=still, pwc=rising)["C20"] == "cannot tell"
    assert told(relu=still, dlgn=still, pwc=rising)["C22"] == "holds"  # does not speak of constant experts
    assert told(relu=rising, dlgn=still, pwc=still)["C25"] == "cannot tell"
    assert told(relu=still, dlgn=shaken, pwc=still)["C20"] == "cannot tell"
    assert told(relu=still, dlgn=still)["C20"] == "cannot tell"  # nobody looked on the way
    split = [look | {"train_as_trained": k / 10} for k, look in enumerate(still)]
    assert told(relu=split, dlgn=still, pwc=still)["C20"] == "holds"
    assert told(relu=split, dlgn=still, pwc=still)["C22"] == "partly"  # tests stand still, training does not
    last = [*still[:-1], still[-1] | {"train_as_trained": 0.9, "probe_as_trained": still[-1]["train_as_trained"]}]
    assert told(relu=last, dlgn=last, pwc=last)["C22"] == "holds"  # the last look is also at all training images
    assert reason(relu=split, dlgn=still).endswith("still rises or shakes: ReLU above DLGN in training accuracy.")
    assert "rises or shakes" not in reason(relu=still, dlgn=still)


def cooled(after: dict[str, float], curve: list[dict[str, float]], **more: Any) -> dict[str, Any]:
    """Both seeds of ``first_table`` after five more epochs, with these test accuracies in percent."""
    return {
        "networks": [
            {"model": model, "seed": seed, "epochs_before": 10, "rate_before": 4e-4, "epochs": 5, "curve": curve}
            | {"after": {"test_as_trained": test / 100, "train_as_trained": test / 100}, **more}
            for model, test in after.items()
            for seed in range(2)
        ]
    }


def test_networks_that_never_stand_still_are_judged_once_they_are_cooled() -> None:
    shaken = first_table(dlgn=69.0)  # three points from the others, by the chance of the last epoch
    for made in shaken["cells"]:
        made["train_as_trained"] = 0.8
        made["curve"] = risen(72.0, 72.4, 69.0)
    still = risen(73.0, 73.2, epochs=5)
    near, far = {"relu": 73.0, "dlgn": 72.4, "pwc": 72.0}, {"relu": 73.0, "dlgn": 71.0, "pwc": 72.0}

    def told(table: dict[str, Any] | None) -> dict[str, str]:
        return verdicts(shaken | {"cooled": table})

    assert told(None)["C20"] == "cannot tell"
    assert told(cooled(near, still))["C20"] == told(cooled(near, still))["C25"] == "holds"
    assert told(cooled(far, still))["C20"] == "fails"
    assert told(cooled(near, still))["C22"] == "holds"  # 0.6 points above in training, and as near in tests
    assert told(cooled(near, risen(73.0, 73.2, 71.0, epochs=5)))["C20"] == "cannot tell"  # still shaking
    assert told(cooled({"relu": 73.0, "dlgn": 72.4}, still))["C20"] == "cannot tell"  # one is missing
    assert told(cooled(near, still, epochs_before=9))["C20"] == "cannot tell"  # of another training
    assert told(cooled(near, still, rate_before=1e-3))["C20"] == "cannot tell"
    reason = next(row["why"] for row in claims(shaken | {"cooled": cooled(near, still)}) if row["id"] == "C20")
    assert "none rose by more than 0.20 points (0.5 are allowed)" in reason
    assert "Largest difference of the three in test accuracy: 1.0 points, less than 1.5 counts as about one." in reason
    settled = first_table()  # where a constant rate is enough, it counts
    assert verdicts(settled | {"cooled": cooled(far, still)})["C20"] == "holds"


def test_networks_of_another_rate_are_never_compared() -> None:
    results = second_table()
    place = ("cifar-10", "resnet-110")
    results["cells"].append(cell(*place, "relu", 50, epochs=40, training={"lr": 0.3}))
    results["cells"].append(cell(*place, "dlgn-hard", 87, epochs=40, training={"lr": 0.6}))
    table = Table(results)
    where = dict(zip(("data", "layout"), place, strict=True))
    assert table.percent(("relu", "dlgn-hard"), **where).tolist() == [[90.0], [87.0]]  # of 10 epochs
    results["cells"].append(cell(*place, "relu", 92, epochs=40, training={"lr": 0.6}))
    assert table.percent(("relu", "dlgn-hard"), **where).tolist() == [[92.0], [87.0]]
    assert table.length(("relu", "dlgn-hard"), **where) == "1 seed, 40 epochs, rate 0.6"
    assert "ReLU 92.0 %, DLGN trained hard 87.0 % (1 seed, 40 epochs, rate 0.6)" in claims(results)[0]["why"]
    results["cells"].append(cell(*place, "relu", 93, epochs=40, training={"lr": 0.6}))
    with pytest.raises(InputError, match="two cells"):
        table.percent(("relu",), **where)


def test_the_bar_counts_at_the_length_that_is_compared() -> None:
    results = first_table()
    for made in results["cells"]:
        if made["model"] == "relu":
            made["train_as_trained"] = 0.69
    for seed in range(2):  # the ReLU network alone went on until it fitted
        longer = cell("cifar-10", "conv", "relu", 72.2, seed=seed, epochs=50, train_as_trained=0.96)
        results["cells"].append(longer)
    told = verdicts(results)
    assert {told[claim] for claim in ("C20", "C22", "C25")} == {"cannot tell"}


def test_a_linear_model_that_wanted_a_smaller_ridge_is_not_judged() -> None:
    for ridge, said, verdict in ((1e-8, None, "cannot tell"), (1e-7, None, "holds"), (1e-8, False, "holds")):
        results = first_table()
        for made in results["cells"]:
            if made["model"] == "tangent":
                made |= {"ridge": ridge, "held_out_by_ridge": {"1e-08": 0.55, "1e-07": 0.52}}
                made |= {} if said is None else {"ridge_at_its_least": said}
        assert verdicts(results)["C23"] == verdict


def test_how_far_a_linear_model_is_behind_is_told_for_every_training() -> None:
    results = first_table()
    for made in results["cells"]:
        if made["model"] == "tangent":
            scores = {"1e-11": 0.57, "1e-10": 0.568, "1e-09": 0.561, "1e-08": 0.55}
            made |= {"ridge": 1e-11, "held_out_by_ridge": scores, "ridge_at_its_least": False}
    for seed in range(2):
        for model, test in (("relu", 75.0), ("dlgn", 74.0), ("pwc", 74.0)):
            results["cells"].append(cell("cifar-10", "conv", model, test, seed=seed, epochs=40, training={"lr": 1e-3}))
    why = next(row["why"] for row in claims(results) if row["id"] == "C23")
    assert "22.2 points (2 seeds, 10 epochs), 25.0 points (2 seeds, 40 epochs, rate 0.001)" in why
    assert "no ridge below the chosen one; on held-out images: 56.1 % at 1e-09, 56.8 % at 1e-10, 57.0 % at 1e-11" in why
    assert why.endswith("Judged beside networks of 2 seeds, 40 epochs, rate 0.001.")


def test_linear_models_try_ridges_down_to_rounding() -> None:
    assert max(RIDGES) == pytest.approx(1e-3)
    assert min(RIDGES) <= 1e-12
    one = next(cell for cell in cells(SCALES["paper", 1]) if cell.model == "tangent")
    before = one.key(3, 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unlazy.studies.halfspace.tables.settings.RIDGES", RIDGES[1:])
        assert one.key(3, 10) != before  # other ridges, another number: measured again


def test_training_accuracy_decides_c22() -> None:
    results = first_table()
    for made in results["cells"]:
        if made["model"] == "dlgn":
            made["train_as_trained"] = 0.97
    assert verdicts(results)["C22"] == "partly"  # tests are still equal
    assert verdicts(first_table(dlgn=69.0))["C22"] == "partly"


@pytest.mark.parametrize("name", ["seconds_per_epoch", "peak_megabytes", "images_per_second"])
def test_each_cost_counts_for_f5(name: str) -> None:
    results = first_table()
    dear = next(made for made in results["cells"] if made["recipe"] == "cost" and made["model"] == "dlgn")
    dear[name] = 1e6 if name == "images_per_second" else 0.5
    row = next(row for row in claims(results) if row["id"] == "F5")
    assert row["verdict"] == "partly"
    assert [part["verdict"] for part in row["parts"]].count("fails") == 1


@pytest.mark.parametrize(("gap", "verdict"), [(3.0, "partly"), (4.0, "holds"), (7.0, "holds"), (8.0, "partly")])
def test_gaps_of_residual_networks_on_both_sides(gap: float, verdict: str) -> None:
    row = claims(second_table(gap))[0]
    assert row["verdict"] == verdict
    assert len(row["parts"]) == 8
    failing = [part["rule"] for part in row["parts"] if part["verdict"] == "fails"]
    assert set(failing) == ({"> 3.5"} if gap < 3.5 else {"< 7.5"} if gap > 7.5 else set())


def test_cells_that_were_not_run_leave_claims_open() -> None:
    results = second_table()
    results["cells"] = [
        made for made in results["cells"] if made["layout"] == "resnet-34" and made["data"] == "cifar-10"
    ]
    row = claims(results)[0]
    assert row["verdict"] == "partly"
    assert [part["verdict"] for part in row["parts"]] == ["holds"] * 2 + ["censored"] * 6
    results["cells"] = [made for made in results["cells"] if made["model"] == "relu"]
    assert verdicts(results) == {"C24": "cannot tell"}
    without_tangent = first_table()
    without_tangent["cells"] = [made for made in without_tangent["cells"] if made["model"] != "tangent"]
    assert verdicts(without_tangent)["C23"] == "cannot tell"


def test_small_results_are_not_judged() -> None:
    for key, value in (("images", 4000), ("data", ["digits"])):
        results = first_table()
        results["settings"][key] = value
        assert set(verdicts(results).values()) == {"cannot tell"}
    results = first_table() | {"scale": "desk"}
    assert set(verdicts(results).values()) == {"cannot tell"}


def test_networks_are_compared_at_equal_epochs_and_seeds() -> None:
    results = first_table()
    results["cells"] += [
        cell("cifar-10", "conv", "relu", 99, seed=0, epochs=50),
        cell("cifar-10", "conv", "dlgn", 9, seed=7),
    ]
    table = Table(results)
    np.testing.assert_allclose(table.percent(("relu", "dlgn")), [[72.2, 72.2], [73.2, 73.2]])
    np.testing.assert_allclose(table.percent(("relu",)), [[99]])  # alone: its longest training
    assert np.isnan(table.percent(("relu", "dlgn-hard"))).all()
