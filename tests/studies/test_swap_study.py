"""The swap study: what is swapped, what is carried over, when it counts as recovered, and verdicts that flip."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import mechanisms
from unlazy import plots
from unlazy.data.circle import CIRCLE_PRESETS, Circle
from unlazy.runtime import InputError
from unlazy.store import Run
from unlazy.studies.halfspace.circle_checkpoints import first_time
from unlazy.studies.halfspace.swap import (
    DRAWN_STRIDE,
    FROZEN,
    SCALES,
    STUDY,
    SWAPPED_AT,
    TRAINED,
    Settings,
    SwapCase,
    log_ratio_of_paths,
    measure_runs,
    read_curves,
    repeat_members,
    swap_halves,
)
from unlazy.studies.study import Results
from unlazy.studies.table import Table

SMOKE = SCALES["smoke"]


@pytest.mark.parametrize("preset", CIRCLE_PRESETS)
def test_opposite_points_exchange_their_targets(preset: str) -> None:
    circle = CIRCLE_PRESETS[preset]
    data = circle.dataset(torch.float64)
    other = swap_halves(data)
    t = circle.angles()
    for x, y in zip(data.x, other.y, strict=True):
        opposite = (data.x + x).norm(dim=1).argmin()
        assert float((data.x[opposite] + x).norm()) < 1e-9
        assert torch.equal(y, data.y[opposite])
    slow = torch.sin(circle.top * (t - math.pi))
    bottom = data.groups["bottom"]
    torch.testing.assert_close(other.y[bottom, 0], slow[bottom], atol=1e-9, rtol=0)
    assert torch.equal(swap_halves(other).y, data.y)
    with pytest.raises(InputError, match="even"):
        swap_halves(Circle(n=9).dataset())


def test_repeated_members_are_those_that_will_be_swapped() -> None:
    checkpoint = {
        "model/a": np.arange(8).reshape(4, 2),
        "optim/a/mean": np.arange(4),
        "optim/steps": np.array([7]),
        "random/order": np.zeros((4, 2)),
    }
    doubled = repeat_members(checkpoint, 2)
    assert doubled["model/a"].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert doubled["optim/a/mean"].tolist() == [0, 1, 0, 1]
    assert doubled["optim/steps"].tolist() == [7]
    assert "random/order" not in doubled


def test_the_first_time_is_that_of_the_first_true_row() -> None:
    reached = np.array([[False, False, True], [True, False, False], [True, False, True]])
    assert first_time(np.arange(3), reached).tolist() == [1.0, np.inf, 0.0]


# --- the study ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Results:
    results, made = mechanisms.run_smoke(STUDY, tmp_path_factory.mktemp("swap"))
    assert [row["verdict"] for row in made.results["claims"]] == ["cannot tell"]
    return results


def stack(results: Results, arm: str) -> tuple[SwapCase, Run, Run]:
    """A case with its two runs."""
    (case,) = [case for case in results.cases() if case.arm == arm]
    return case, *case.finished_runs(results.work.runs)


def test_results_hold_every_stack(smoke: Results) -> None:
    assert smoke.table.unique("arm") == list(SMOKE.arms)
    assert smoke.table.unique("before") == [str(SMOKE.before)]
    for figure in STUDY.figures:
        assert (smoke.folder / f"{figure.name}.png").is_file()


@pytest.mark.parametrize("arm", SMOKE.arms)
def test_network_and_optimiser_are_carried_over(smoke: Results, arm: str) -> None:
    """The second part begins with the numbers of epoch ``before``; half of it sees the swapped target, half does not."""
    case, one, two = stack(smoke, arm)
    unit, seeds = 16, len(case.seeds)
    checkpoint, begun = one.checkpoint(SMOKE.before * unit), two.checkpoint(0)
    for name in begun.keys() - {"optim/steps", "random/order"}:
        assert np.array_equal(begun[name], np.concatenate([checkpoint[name][:seeds]] * 2)), name
    assert begun["optim/steps"].tolist() == [SMOKE.before * unit]
    loss = read_curves(case, one, two, "loss")
    assert loss["stay"][0] == pytest.approx(loss["before"][-1], rel=1e-5)
    assert (np.abs(loss["swap"][0] - loss["before"][-1]) > 1e-4).all()
    top, bottom = (read_curves(case, one, two, f"loss_{half}") for half in ("top", "bottom"))
    assert top["swap"] == pytest.approx(2 * loss["swap"] - bottom["swap"], rel=1e-4)


def test_paths_do_not_know_of_the_swap_until_training_goes_on(smoke: Results) -> None:
    for arm in SMOKE.arms:
        found = log_ratio_of_paths(*stack(smoke, arm))
        assert np.allclose(found["swap"][0], found["before"][-1])
        if arm == "pwc-frozen":
            assert np.ptp(found["swap"], axis=0) == pytest.approx(0)


def test_recovery_is_the_first_epoch_at_the_old_level(smoke: Results) -> None:
    class Pretend(Run):
        def scalars(self, name: str) -> Any:
            steps, values = super().scalars(name)
            if name == "loss":
                after = np.array([[0.5] * 4, [0.3] * 4, [0.1, 0.3, 0.3, 0.3], [0.2, 0.3, 0.3, 0.3]])
                values = np.full_like(values, 0.1) if "first" in self.folder.name else after
            return steps, values

    case, *runs = stack(smoke, "pwc")
    table = Table.from_rows(measure_runs(case, *(Pretend(run.folder) for run in runs)).entries)
    assert table.select("epochs_to_level", training="swap").tolist() == [2.0, np.inf]
    assert table.select("epochs_to_level", training="scratch").tolist() == [0.0, 0.0]
    assert table.select("level").tolist() == [0.1, 0.1]
    assert table.select("epochs", training="swap").tolist() == [3.0, 3.0]


def test_figures_draw_the_medians(smoke: Results) -> None:
    with plots.style():
        drawn = {figure.name: figure.draw(smoke) for figure in STUDY.figures}
    relu = stack(smoke, "relu")
    lines = {line.get_label(): line for line in drawn["loss"].axes[0].get_lines()}
    wanted = np.median(read_curves(*relu, "loss")["swap"], axis=1)
    assert np.allclose(lines["swapped"].get_ydata(), wanted[::DRAWN_STRIDE])
    lines = {line.get_label(): line for line in drawn["paths"].axes[0].get_lines()}
    assert np.allclose(
        lines["no swap"].get_ydata(), np.median(log_ratio_of_paths(*relu)["stay"], axis=1)[::DRAWN_STRIDE]
    )


# --- verdicts ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paper() -> Results:
    return mechanisms.committed_results(STUDY)


@pytest.fixture(scope="module")
def ideal(paper: Results) -> Table:
    """The committed table, made such that trained gates follow the swap and frozen ones do not."""
    swap = {"training": "swap"}
    table = mechanisms.changed(paper.table, -1.0, quantity="allocation", at="end", **swap)
    table = mechanisms.changed(table, 50.0, quantity="epochs_to_level", arm=TRAINED, **swap)
    return mechanisms.changed(table, np.inf, quantity="epochs_to_level", arm=FROZEN, **swap)


def test_the_verdict_follows_the_numbers(paper: Results, ideal: Table) -> None:
    def verdict(table: Table) -> str:
        return str(mechanisms.judged(STUDY, table, paper.seeds)["verdict"])

    def back(table: Table, arms: tuple[str, ...], epochs: float) -> Table:
        return mechanisms.changed(table, epochs, quantity="epochs_to_level", training="swap", arm=arms)

    turned = mechanisms.changed(ideal, 0.5, quantity="allocation", training="swap", at="end")
    assert verdict(ideal) == "holds"
    for worse in (back(ideal, TRAINED, SWAPPED_AT + 1.0), turned, back(ideal, FROZEN, 30.0)):
        assert verdict(worse) not in ("holds", "fails")
    assert verdict(back(back(turned, TRAINED, np.inf), FROZEN, float(SWAPPED_AT))) == "fails"


def test_recovery_counts_only_after_the_declared_swap(paper: Results, ideal: Table) -> None:
    """Networks that were swapped at another epoch have other times to compare with: those parts are not measured."""
    early = Table.from_rows([{**row, "before": 60} for row in ideal.rows()])
    row = mechanisms.judged(STUDY, early, paper.seeds)
    for part in (*row["parts"], *row["controls"]):
        assert part["verdict"] == ("not measured" if "until the loss" in part["name"] else "holds")


def test_times_not_reached_in_a_short_training_are_censored(paper: Results, ideal: Table) -> None:
    short = mechanisms.changed(ideal, 150.0, quantity="epochs", training="swap")
    row = mechanisms.judged(STUDY, short, paper.seeds)
    verdicts = {part["verdict"] for part in row["parts"] if "frozen" in part["name"]}
    assert verdicts == {"censored"}


def test_every_arm_is_judged() -> None:
    (claim,) = STUDY.claims
    assert set(SCALES["paper"].arms) == {*TRAINED, *FROZEN}
    assert len(claim.parts) == len(claim.controls) == 2 * len(TRAINED) + len(FROZEN)
    assert SCALES["paper"].before == SWAPPED_AT


def test_bad_settings() -> None:
    with pytest.raises(InputError, match="at least 1"):
        Settings(before=0, epochs=4)
    with pytest.raises(InputError, match="as long after"):
        Settings(before=5, epochs=4)
    with pytest.raises(InputError, match="unknown arms"):
        replace(SMOKE, arms=("nobody",))


def test_committed_verdicts_follow_from_the_committed_table(paper: Results, ideal: Table) -> None:
    mechanisms.check_committed(STUDY)
    mechanisms.check_missing_numbers_help_nobody(STUDY, paper.table, paper.seeds)
    mechanisms.check_missing_numbers_help_nobody(STUDY, ideal, paper.seeds)
