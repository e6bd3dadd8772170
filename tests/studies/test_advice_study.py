"""The study behind the advice: its networks, what a turn counts as, known directions, and the committed files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from unlazy.runtime import InputError
from unlazy.scope.advice import FILE, share_interval
from unlazy.studies.engine import reproduce
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.scope import advice
from unlazy.studies.scope.advice import DATA, NETWORKS, PAIRS, RECIPES, TURNS
from unlazy.studies.scope.calibration import WORDS
from unlazy.studies.scope.calibration_cells import NETS, SCORED, Cell, build_network, make_task
from unlazy.studies.table import Table

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "results" / "advice"
CELL = Cell(0, "relu", "parity", "sgd", 0.1, 0.0, 0.0, 64, 40, "scratch", "constant", "advice", 3)


# --- networks ------------------------------------------------------------------------------------------------


def test_judged_networks_and_data_are_not_those_that_recipes_were_chosen_on() -> None:
    assert not set(NETWORKS) & set(SCORED[0])
    assert not set(DATA) & set(SCORED[1])


def test_every_recipe_comes_up_about_equally_often_in_every_seed() -> None:
    for seed in range(3):
        drawn = [advice.recipe_of(*pair, seed) for pair in PAIRS]
        assert {drawn.count(recipe) for recipe in RECIPES} <= {3, 4}
    assert advice.recipe_of(*PAIRS[0], 1) == advice.recipe_of(*PAIRS[0], 1)


@pytest.mark.parametrize("net", NETWORKS)
def test_width_one_is_the_calibrations_network_and_others_have_other_widths(net: str) -> None:
    task = make_task("parity", 3)
    own = build_network(replace(CELL, net=net), task).state_dict()
    built = advice.build_at_width(net, task.outputs, 1, 3).state_dict()
    assert all(torch.equal(a, b) for a, b in zip(own.values(), built.values(), strict=True))
    sizes = [sum(p.numel() for p in advice.build_at_width(net, 1, factor, 3).parameters()) for factor in (0.25, 1, 4)]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("net", NETWORKS)
def test_only_the_readout_or_the_low_rank_additions_are_trained(net: str) -> None:
    model = NETS[net](3)
    frozen = advice.freeze_body(NETS[net](3))
    trained = [p for p in frozen.parameters() if p.requires_grad]
    assert [len(p) for p in trained] == [3, 3]
    x = torch.randn(5, 64)
    adapted = advice.add_low_rank(model, 2, seed=0)
    before = NETS[net](3)
    before.load_state_dict({name.replace(".layer.", "."): p for name, p in adapted.state_dict().items()}, strict=False)
    torch.testing.assert_close(adapted(x), before(x))  # the addition starts at 0
    names = {name.rsplit(".", 1)[1] for name, p in adapted.named_parameters() if p.requires_grad}
    assert names == {"down", "up"}
    assert all(2 in p.shape for p in adapted.parameters() if p.requires_grad)


def test_a_multiple_of_the_outputs_learns_the_same_function_change_only_slower_or_faster() -> None:
    """At a rate in units of the stable step, a linear network's outputs do not depend on the factor of the outputs."""
    task = make_task("parity", 3)
    ends = []
    for factor in (0.25, 4.0):
        torch.manual_seed(0)
        linear = nn.Linear(64, 1)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        model = advice.OutputMultiple(linear, factor)
        ends.append(advice.train(model, replace(CELL, alpha=factor), task, (40,))[40])
    assert ends[0]["held_loss"] == pytest.approx(ends[1]["held_loss"], rel=1e-4)
    assert max(end["gap"] for end in ends) < 1e-4


def test_trainings_differ_in_their_dial_alone() -> None:
    task = make_task("parity", 3)
    made = advice.trainings(CELL, task)
    base, _ = made["base"]
    x = task.held[0][:4]
    torch.testing.assert_close(made["scale-up"][0](x), 4 * base(x))
    assert made["rate-up"][1].rate == pytest.approx(16 * made["rate-down"][1].rate)
    torch.testing.assert_close(made["rate-up"][0](x), base(x))
    halved = made["start-down"][0].state_dict()
    assert all(
        torch.allclose(p, (2 if p.ndim > 1 else 1) * q)
        for p, q in zip(base.state_dict().values(), halved.values(), strict=True)
    )
    needed = {one for turn in TURNS for one in (turn.base, turn.turned) if "relu" in turn.networks} - {"quarter"}
    assert set(made) == needed
    centred = advice.trainings(replace(CELL, alpha=16.0), task)
    assert [centred[name][0].alpha for name in ("scale-down", "base", "scale-up")] == [4, 16, 64]


# --- numbers -------------------------------------------------------------------------------------------------


def test_what_a_turn_counts_as() -> None:
    base = {"learned": 1.0, "gap": 0.1, "held_loss": 2.0}
    found = advice.compare(base, {"learned": 1.0, "gap": 0.2, "held_loss": 1.0})
    assert found == pytest.approx({"gap_change": math.log(2), "loss_change": -math.log(2)})
    assert advice.compare(base, {"learned": 0.0})["gap_change"] == 0  # broke down: not moved
    assert advice.compare(base, {"learned": 0.0})["loss_change"] > 0
    assert advice.compare(base | {"gap": 1e-7}, base | {"gap": 1e-9})["gap_change"] == 0  # both are rounding
    changes = [np.array([change]) for change in (-1.0, -0.1, 0.0, 0.1, 1.0)]
    shares = {aim: float(by(*changes)[0]) for aim, by in advice.SHARES.items()}
    assert shares == pytest.approx({"richer": 0.4, "lazier": 0.4, "same": 0.4})  # 0: it broke down


def test_a_good_twin_counts_among_lazy_networks_only() -> None:
    gaps, losses, twins = [0.01, 0.05, 0.9], [1.0, 1.0, 1.0], [1.04, 1.06, 1.0]
    numbers = [np.array([value]) for value in (*gaps, *losses, *twins)]
    assert advice.share_twin_as_good(*numbers)[0] == pytest.approx(1 / 2)


def test_a_training_that_breaks_down_has_learned_nothing() -> None:
    task = make_task("parity", 3)
    found = advice.train(NETS["relu"](1), replace(CELL, rate=50.0), task, (40,))
    assert found[40] == {"learned": 0.0}


def test_a_larger_output_scale_is_lazier_and_a_frozen_body_has_no_gap() -> None:
    task = make_task("parity", 3)
    made = advice.trainings(replace(CELL, alpha=16.0), task)
    gaps = {name: advice.train(*made[name], task, (40,))[40]["gap"] for name in ("base", "scale-up", "frozen")}
    assert gaps["scale-up"] < gaps["base"]
    assert gaps["frozen"] < 1e-4


@pytest.mark.slow
def test_smoke_runs_end_to_end(tmp_path: Path) -> None:
    before = FILE.read_bytes()
    request = Request("advice", "smoke", tmp_path / "runs", tmp_path / "results")
    made = reproduce(request, ExecutionOptions(), progress=lambda *_: None)
    assert made.failed == {}
    counts = advice.count_turns(Table.read(request.folder / "table.csv"))
    assert set(counts["turns"]) == {turn.name for turn in TURNS}
    assert FILE.read_bytes() == before


# --- the committed files -------------------------------------------------------------------------------------


def test_the_shipped_advice_follows_from_the_committed_table() -> None:
    table = Table.read(COMMITTED / "paper" / "table.csv")
    assert (COMMITTED / "advice.json").read_bytes() == FILE.read_bytes() == advice.advice_text(table)


def test_advice_needs_every_case(tmp_path: Path) -> None:
    folder = tmp_path / "advice" / "paper"
    folder.mkdir(parents=True)
    (folder / "cases.json").write_text("[]")
    with pytest.raises(InputError, match=r"lacks 60, such as relu-digits-0"):
        advice.write_advice(tmp_path)


def test_counts_of_the_committed_table_by_hand() -> None:
    """One turn counted without the study's own functions."""
    counts = json.loads(FILE.read_text())["turns"]["rate-up"]["all"]
    table = Table.read(COMMITTED / "paper" / "table.csv")
    moved = total = 0
    for net, data in PAIRS:
        learned = table.select("learned", net=net, data=data, training="base")
        changes = table.select("gap_change", net=net, data=data, turn="rate-up")
        total += int(learned.sum())
        moved += int((changes[learned > 0] > 0).sum())
    assert (counts["trainings"], counts["moved"]) == (total, moved)


def test_the_page_has_the_shipped_numbers() -> None:
    page = (ROOT / "docs" / "how-to" / "read_a_verdict.md").read_text()
    for name, about in json.loads(FILE.read_text())["turns"].items():
        everything = about["all"]
        low, high = share_interval(everything["moved"], everything["trainings"], everything["pairs"])
        cells = [f"{about[word]['moved']} of {about[word]['trainings']}" if word in about else "–" for word in WORDS]
        (line,) = [line for line in page.splitlines() if f"(`{name}`)" in line]
        assert [cell.strip() for cell in line.split("|")[2:-1]] == [
            about["aim"],
            f"{everything['moved']} of {everything['trainings']} ({100 * low:.0f} to {100 * high:.0f} %)",
            f"{everything['factor']:.2g}",
            f"{everything['fell']} / {everything['rose']}",
            *cells,
        ]
