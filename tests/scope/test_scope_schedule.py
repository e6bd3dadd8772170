"""When a scope measures and what measuring costs."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from scope_nets import loop
from unlazy import Scope
from unlazy.scope.schedule import PLANNED_SHARE, Budget, Pace, Planner


def test_gaps_follow_change() -> None:
    def seen(change: float, last: int = 4000) -> list[int]:
        pace, steps = Pace(), []
        for step in range(last):
            if pace.is_due(step):
                steps.append(step)
                pace.note_measured(step, change)
        return steps

    calm, lively, steady = seen(0.0), seen(1.0), seen(0.05)
    assert calm[:6] == lively[:6] == [0, 1, 2, 3, 4, 5]
    assert len(calm) < len(steady) < len(lively)
    assert all(b <= 2 * max(a, 1) + 1 for a, b in itertools.pairwise(calm))  # at least one an octave


@pytest.mark.parametrize("cost", [0.001, 0.05, 0.5, 3.0])
@pytest.mark.parametrize("second_per_step", [0.001, 0.1])
def test_the_planner_keeps_the_budget_at_every_moment(cost: float, second_per_step: float) -> None:
    """A simulated training: what was spent never exceeds what is allowed, and the last measurement still fits.

    The last one is a light one as long as eight full ones would cost more than is allowed.
    """
    budget = Budget(0.05, grace=1.0, costs={"cheap": cost / 50, "dear": cost, "writing": cost / 100})
    planner = Planner(budget, frozenset({"cheap"}))
    planner.note_measured(0, ["cheap", "dear"], 1.0)
    whole, light, full = budget.predict(["cheap", "dear", "writing"]), budget.predict(["cheap", "writing"]), 0
    trained = 0.0
    for step in range(1, round(200 / second_per_step)):
        trained += second_per_step
        names = planner.due(step, ["cheap", "dear"], trained)
        if names:
            budget.spent += budget.predict([*names, "writing"])
            full += "dear" in names
            planner.note_measured(step, names, 0.5)
        allowed = max(1.0, 0.05 * trained)
        assert budget.spent + (whole if 8 * whole <= allowed else light) <= allowed + 1e-9
    possible = int(PLANNED_SHARE * 10 / whole)
    assert full >= min(12, possible - 1)
    if full > 12:
        assert budget.spent > 0.5 * 10 or cost < 0.01  # what there was to spend was spent, unless nothing was due


@pytest.mark.parametrize("steps", [None, 1000])
def test_light_measurements_come_first_where_full_ones_cost_too_much(steps: int | None) -> None:
    """A training of 100 s pays for 4.5 s: not for a kernel of 10 s, but for eight light measurements, over its whole length."""
    budget = Budget(0.05, costs={"linear": 0.4, "tangent": 10.0, "writing": 0.001})
    planner, seen = Planner(budget, frozenset({"linear"}), steps=steps), []
    planner.note_measured(0, ["linear", "tangent"], 1.0)
    for step in range(1, 1001):
        names = planner.due(step, ["linear", "tangent"], 0.1 * step, 0.0 if steps is None else 0.1 * (steps - step))
        if names:
            seen.append(step)
            budget.spent += budget.predict([*names, "writing"])
            planner.note_measured(step, names, 0.5)
            assert names == ["linear"]
    assert len(seen) >= 8
    assert seen[-1] > 400
    assert budget.spent + budget.predict(["linear", "writing"]) <= 0.05 * 100


def simulated(
    steps: int, cost: float, known: bool, per_step: float = 0.001, total: int | None = None
) -> tuple[list[int], float]:
    """The steps of full measurements in a short training that only the grace pays for, and the seconds spent.

    ``steps``: how many are simulated. ``total``: how many the training has, by default the same.
    """
    total = total or steps
    budget = Budget(0.05, costs={"dear": cost})
    planner = Planner(budget, frozenset(), steps=total if known else None)
    planner.spread_grace(cost)
    planner.note_measured(0, ["dear"], 1.0)
    seen = []
    for step in range(1, steps + 1):
        to_come = per_step * (total - step) if known else 0.0
        if planner.due(step, ["dear"], per_step * step, to_come):
            budget.spent += cost
            planner.note_measured(step, ["dear"], 0.5)
            seen.append(step)
    return seen, budget.spent


@pytest.mark.parametrize("steps", [500, 3000])
@pytest.mark.parametrize("cost", [0.048, 0.095, 0.19, 0.3])
def test_a_short_training_of_known_length_is_seen_to_its_end(steps: int, cost: float) -> None:
    """What the grace pays for lies geometrically between the first step and the last: no gap is much wider than it must be."""
    seen, spent = simulated(steps, cost, known=True)
    grace = 0.1 + 0.2 * 0.001 * steps  # seconds: a training of half a second pays 0.2, one of three seconds 0.7
    affordable = max(0, int(grace / cost + 1e-9) - 1)  # one more is kept for the last step
    assert affordable - 1 <= len(seen) <= affordable
    assert not seen or spent + cost <= grace + 1e-9
    if not seen:
        return
    first, spread = (seen[1], len(seen) - 2) if seen[:2] == [1, 2] else (1, len(seen))
    ratio = (steps / first) ** (1 / (spread + 1))
    for before, after in itertools.pairwise([1, *seen, steps]):
        assert after <= 1.2 * max(ratio, 1.25) * before + 1
    assert (seen[:2] == [1, 2]) == (grace > 5 * cost)  # where there are few, even the first steps may have to wait


@pytest.mark.parametrize("cost", [0.01, 0.02, 0.048])
def test_a_short_training_of_unknown_length_keeps_measurements_for_later(cost: float) -> None:
    seen, spent = simulated(3000, cost, known=False)
    assert spent + cost <= 0.1 + 0.2 * 3
    assert (seen[:2] == [1, 2]) == (cost <= 0.1 / 5)
    assert any(10 < step <= 100 for step in seen)
    assert seen[-1] > 1500
    assert len(seen) >= 4


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("cost", [0.003, 0.05, 0.4])
def test_a_training_of_two_seconds_does_not_pay_one(known: bool, cost: float) -> None:
    """At no moment more than a tenth of a second and a fifth of what training took or, if known, will take."""
    spent = [simulated(steps, cost, known, total=2000)[1] for steps in (10, 100, 500, 1000, 2000)]
    lengths = [2.0] * 5 if known else [0.01, 0.1, 0.5, 1.0, 2.0]
    assert all(one + cost <= 0.1 + 0.2 * length + 1e-9 or one == 0 for one, length in zip(spent, lengths, strict=True))
    assert known or cost > 0.1 or spent[-1] > 0.1


def test_what_training_time_pays_for_is_not_spared() -> None:
    """Where the share of training time is more than the grace, measurements come when change asks for them."""
    seen, spent = simulated(2000, 0.05, known=False, per_step=0.1)
    late = [step for step in seen if step > 400]
    assert len(late) > 20
    assert spent < 0.05 * 200


def test_known_steps_allow_an_earlier_look() -> None:
    budget = Budget(0.05, grace=0.0, costs={"dear": 1.0})
    assert not budget.affords(["dear"], 10.0, kept_back=1.0)
    assert budget.affords(["dear"], 10.0, kept_back=1.0, to_come=100.0)


def test_it_says_what_looking_cost(mlp) -> None:
    net, x, y = mlp
    with Scope(net, (x, y), budget=0.05, strict=True) as scope:
        loop(net, x, y, scope, range(1, 126), pause=0.002)
    cost = scope.overhead()
    assert cost["seconds_training"] > 125 * 0.002
    assert cost["seconds_measuring"] > 0
    assert cost["share"] == pytest.approx(cost["seconds_measuring"] / cost["seconds_training"])
    assert cost["seconds_at_construction"] > 0
    assert (
        cost["measurements"] == len(scope.history.scalars["loss"]) >= 2
    )  # the first and the last; others as time allows
    assert scope.history.steps[-1] == 125


def test_numbers_of_the_user_alone_are_no_measurement(mlp) -> None:
    net, x, y = mlp
    log = Scope(net, (x, y), strict=True)._session.log
    assert log.measurements == 1  # at construction
    log.write(1, {}, {"overhead": 0.0}, user={"rate": 0.5})
    assert (log.measurements, log.history.last("rate")) == (1, 0.5)
    log.write(2, {"loss": torch.tensor(2.0)}, {})
    assert log.measurements == 2


def test_paused_time_is_no_training_time(mlp) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), strict=True)
    began = time.perf_counter()
    with scope.paused():
        time.sleep(0.2)
    scope.step(1)
    assert scope.overhead()["seconds_training"] <= time.perf_counter() - began - 0.2


def test_nothing_is_looked_at_when_nothing_is_due(mlp, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), budget=1e-9, strict=True)
    scope._session.budget.grace = 0.0
    scope.step(1)
    seen = len(scope.history.steps)
    monkeypatch.setattr(net, "forward", lambda *_: pytest.fail("the network was called"))
    for step in range(2, 2002):
        scope.step(step, loss=0.0)
    assert len(scope.history.steps) == seen
    monkeypatch.undo()
