"""The swap study: what is swapped, what is carried over, when it counts as recovered, and verdicts that flip."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unlazy import plots
from unlazy.data.synthetic import CIRCLE_PRESETS, Circle
from unlazy.runtime import InputError
from unlazy.store import Run
from unlazy.studies.halfspace.swap import figures
from unlazy.studies.halfspace.swap.claims import claims
from unlazy.studies.halfspace.swap.measure import (
    curves,
    favour,
    first_epoch,
    first_trainings,
    key,
    measure,
    second_trainings,
    twice,
)
from unlazy.studies.halfspace.swap.settings import FROZEN, SCALES, TRAINED, Settings, swapped
from unlazy.studies.halfspace.swap.study import reproduce
from unlazy.studies.registry import settings_of

SMOKE, PAPER = SCALES["smoke"], SCALES["paper"]


@pytest.mark.parametrize("preset", CIRCLE_PRESETS)
def test_opposite_points_exchange_their_targets(preset: str) -> None:
    circle = CIRCLE_PRESETS[preset]
    data = circle.dataset(torch.float64)
    other = swapped(data)
    t = circle.angles()
    for x, y in zip(data.x, other.y, strict=True):
        opposite = (data.x + x).norm(dim=1).argmin()
        assert float((data.x[opposite] + x).norm()) < 1e-9
        assert torch.equal(y, data.y[opposite])
    slow = torch.sin(circle.top * (t - math.pi))
    bottom = data.groups["bottom"]
    torch.testing.assert_close(other.y[bottom, 0], slow[bottom], atol=1e-9, rtol=0)
    assert torch.equal(swapped(other).y, data.y)
    with pytest.raises(InputError, match="even"):
        swapped(Circle(n=9).dataset())


def test_twice_takes_the_members_that_will_be_swapped() -> None:
    kept = {
        "model/a": np.arange(8).reshape(4, 2),
        "optim/a/mean": np.arange(4),
        "optim/steps": np.array([7]),
        "random/order": np.zeros((4, 2)),
    }
    doubled = twice(kept, 2)
    assert doubled["model/a"].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert doubled["optim/a/mean"].tolist() == [0, 1, 0, 1]
    assert doubled["optim/steps"].tolist() == [7]
    assert "random/order" not in doubled


def test_first_epoch() -> None:
    reached = np.array([[False, False, True], [True, False, False], [True, False, True]])
    assert first_epoch(reached).tolist() == [1.0, np.inf, 0.0]


# --- the study ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Run], dict[str, Run]]:
    folder = tmp_path_factory.mktemp("swap")
    made = reproduce("smoke", runs=folder / "runs", results=folder, progress=lambda *_: None)
    root = folder / "runs" / "swap"
    first = {plan.key: Run(plan.folder(root)) for plan in first_trainings(SMOKE)}
    second = {plan.key: Run(plan.folder(root)) for plan in second_trainings(SMOKE, first)}
    return folder, made, first, second


def test_results_hold_every_stack(smoke) -> None:
    folder, made, _, _ = smoke
    assert json.loads((folder / "swap" / "smoke.json").read_text()) == made
    assert set(made["stacks"]) == {key("pilot", arm) for arm in SMOKE.arms}
    assert made["claims"][0]["verdict"] == "cannot tell"
    for name in figures.FIGURES:
        assert (folder / "swap" / "smoke" / f"{name}.png").is_file()


@pytest.mark.parametrize("arm", SMOKE.arms)
def test_network_and_optimiser_are_carried_over(smoke, arm: str) -> None:
    """The second part begins with the numbers of epoch ``before``; half of it sees the swapped target, half does not."""
    _, _, first, second = smoke
    one, two = first[f"first-pilot-{arm}"], second[f"second-pilot-{arm}"]
    unit, seeds = 16, SMOKE.seeds
    kept, begun = one.checkpoint(SMOKE.before * unit), two.checkpoint(0)
    for name in begun.keys() - {"optim/steps", "random/order"}:
        assert np.array_equal(begun[name], np.concatenate([kept[name][:seeds]] * 2)), name
    assert begun["optim/steps"].tolist() == [SMOKE.before * unit]
    loss = curves(SMOKE, one, two, "loss")
    assert loss["stay"][0] == pytest.approx(loss["before"][-1], rel=1e-5)
    assert (np.abs(loss["swap"][0] - loss["before"][-1]) > 1e-4).all()
    top, bottom = (curves(SMOKE, one, two, f"loss_{half}") for half in ("top", "bottom"))
    assert top["swap"] == pytest.approx(2 * loss["swap"] - bottom["swap"], rel=1e-4)


def test_paths_do_not_know_of_the_swap_until_training_goes_on(smoke) -> None:
    _, _, first, second = smoke
    for arm in SMOKE.arms:
        found = favour(SMOKE, first[f"first-pilot-{arm}"], second[f"second-pilot-{arm}"])
        assert np.allclose(found["swap"][0], found["before"][-1])
        if arm == "pwc-frozen":
            assert np.ptp(found["swap"], axis=0) == pytest.approx(0)


def test_recovery_is_the_first_epoch_at_the_old_level(smoke) -> None:
    _, _, first, second = smoke

    class Pretend(Run):
        def scalars(self, name):
            steps, values = super().scalars(name)
            if name == "loss":
                after = np.array([[0.5] * 4, [0.3] * 4, [0.1, 0.3, 0.3, 0.3], [0.2, 0.3, 0.3, 0.3]])
                values = np.full_like(values, 0.1) if "first" in self.folder.name else after
            return steps, values

    runs = [Pretend(run.folder) for run in (first["first-pilot-pwc"], second["second-pilot-pwc"])]
    values = measure(SMOKE, *runs)["values"]
    assert values["epochs_recover"] == [2.0, None]
    assert values["epochs_level_scratch"] == [0.0, 0.0]
    assert values["level"] == [0.1, 0.1]


def test_figures_draw_the_medians(smoke) -> None:
    _, _, first, second = smoke
    with plots.style():
        drawn = {name: maker(SMOKE, first, second) for name, maker in figures.FIGURES.items()}
    pair = first["first-pilot-relu"], second["second-pilot-relu"]
    lines = {line.get_label(): line for line in drawn["loss"].axes[0].get_lines()}
    wanted = np.median(curves(SMOKE, *pair, "loss")["swap"], axis=1)
    assert np.allclose(lines["swapped"].get_ydata(), wanted[:: figures.THINNED])
    lines = {line.get_label(): line for line in drawn["paths"].axes[0].get_lines()}
    assert np.allclose(
        lines["no swap"].get_ydata(), np.median(favour(SMOKE, *pair)["stay"], axis=1)[:: figures.THINNED]
    )


# --- verdicts ----------------------------------------------------------------------------------------


def table(**changes: Any) -> dict[str, Any]:
    """Made by hand: trained gates follow the swap, frozen ones do not; ``changes`` by value name and kind of arm."""
    made: dict[str, Any] = {"scale": "paper", "settings": PAPER.to_dict(), "provenance": {}, "stacks": {}}
    names = [
        *("level", "loss_end", "loss_end_stay", "loss_end_scratch", "epochs_level_scratch", "epochs_new_slow_half"),
        *("epochs_new_fast_half", "epochs_paths_turn", "allocation_before", "allocation_end_stay"),
        *("allocation_end_scratch", "epochs_swap_0.05", "epochs_swap_0.01", "epochs_scratch_0.05"),
        "epochs_scratch_0.01",
    ]
    for preset in PAPER.presets:
        for arm in PAPER.arms:
            kind = "frozen" if arm in FROZEN else "trained"
            values = dict.fromkeys(names, 1.0) | {
                "epochs_recover": None if kind == "frozen" else 50.0,
                "allocation_end": -1.0,
            }
            values |= {name: value for (name, who), value in changes.get("to", {}).items() if who == kind}
            made["stacks"][key(preset, arm)] = {"values": {name: [value] * 10 for name, value in values.items()}}
    return made


def verdict(**changes: Any) -> str:
    return claims(table(**changes))[0]["verdict"]


def test_the_verdict_follows_the_numbers() -> None:
    assert verdict() == "holds"
    late = PAPER.before + 1.0
    assert verdict(to={("epochs_recover", "trained"): late}) == "partly"
    assert verdict(to={("allocation_end", "trained"): 0.5}) == "partly"
    assert verdict(to={("epochs_recover", "frozen"): 30.0}) == "partly"
    wrong = {
        ("epochs_recover", "trained"): None,
        ("allocation_end", "trained"): 0.5,
        ("epochs_recover", "frozen"): float(PAPER.before),
    }
    assert verdict(to=wrong) == "fails"
    assert claims(table() | {"scale": "smoke"})[0]["verdict"] == "cannot tell"


def test_every_arm_is_judged_or_refused() -> None:
    assert set(PAPER.arms) == {*TRAINED, *FROZEN}
    assert len(claims(table())[0]["parts"]) == 2 * (2 * len(TRAINED) + len(FROZEN))


def test_seeds_and_bad_settings() -> None:
    assert settings_of(SCALES, "smoke", 3).seeds == 3
    with pytest.raises(InputError, match="seeds"):
        settings_of(SCALES, "smoke", 0)
    with pytest.raises(InputError, match="as long after"):
        Settings(seeds=1, before=5, after=4)
    with pytest.raises(InputError, match="unknown arms"):
        replace(SMOKE, arms=("nobody",))


def test_committed_rows_follow_from_the_committed_table() -> None:
    made = json.loads((Path(__file__).parent.parent / "results" / "swap" / "paper.json").read_text())
    assert claims(made) == made["claims"]
