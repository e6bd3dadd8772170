"""The calibration: its cells, its measures against the scope's own, rules that find a known law, and the committed files."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from unlazy import plots
from unlazy.runtime import InputError
from unlazy.scope.history import History
from unlazy.scope.lazy_thresholds import FILE, Thresholds
from unlazy.scope.scope import Scope
from unlazy.scope.summary import TrainingSummary
from unlazy.scope.verdict import judge
from unlazy.studies.engine import reproduce
from unlazy.studies.registry import load_study
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.scope import widths
from unlazy.studies.scope.calibration import (
    AIMS,
    LAZY_GAP,
    RICH_GAP,
    RULES,
    STUDY,
    WORDS,
    Curve,
    all_scores,
    cases,
    choose_rule,
    crossing,
    fit_rule,
    read_curves,
    score,
    thresholds_of,
    thresholds_text,
    word_of,
    write_thresholds,
)
from unlazy.studies.scope.calibration_cells import (
    FITTED,
    NETS,
    SCORED,
    SETS,
    BatchOrder,
    Cell,
    Probe,
    build_network,
    draw_cells,
    make_optimiser,
    make_task,
    measure,
    moments,
    rate_at,
)
from unlazy.studies.study import Work
from unlazy.studies.table import Table
from unlazy.training.twin import linearised_twin

COMMITTED = Path(__file__).parents[2] / "results" / "calibration"
CELL = Cell(0, "relu", "parity", "sgd", 0.3, 0.0, 0.0, 64, 12, "scratch", "constant", "fit")


def work(tmp_path: Path) -> Work:
    return Work("calibration", "smoke", tmp_path)


# --- cells ---------------------------------------------------------------------------------------------------


def test_the_two_sides_share_no_family_and_cells_are_drawn_again_alike() -> None:
    for fitted, scored, everything in zip(FITTED, SCORED, (NETS, SETS), strict=True):
        assert not set(fitted) & set(scored)
        assert set(fitted) | set(scored) == set(everything)
    cells = draw_cells()
    assert cells == draw_cells()
    assert cells != draw_cells(seed=20)
    for side, (nets, sets) in (("fit", FITTED), ("score", SCORED)):
        met = [(cell.net, cell.data) for cell in cells if cell.side == side]
        assert {met.count((net, data)) for net in nets for data in sets} == {3}
    assert {cell.optimiser for cell in cells} == {"sgd", "momentum", "adam", "adamw"}
    assert max(cell.steps for cell in cells) == 20000
    assert min(cell.steps for cell in cells) >= 100


@pytest.mark.parametrize("name", SETS)
def test_data_sets_have_one_size_and_held_out_samples_are_new(name: str) -> None:
    task = make_task(name, 3)
    trained, held = ({tuple(row) for row in part[0].tolist()} for part in (task.train, task.held))
    assert not trained & held
    assert (len(task.train[0]), len(task.probe[0]), len(task.held[0])) == (256, 128, 256)
    assert task.train[0].shape[1] == 64
    out = torch.zeros(256, task.outputs)
    assert math.isfinite(float(task.loss(out, task.train[1])))
    assert torch.equal(make_task(name, 3).held[0], task.held[0])
    if name in ("pixels", "evenness"):
        assert float(task.train[0].min()) == 0
        assert float(task.train[0].max()) == 1


@pytest.mark.parametrize("net", NETS)
def test_networks_start_alike_for_a_seed(net: str) -> None:
    task, cell = make_task("teacher", 0), replace(CELL, net=net, data="teacher")
    x = task.train[0][:8]
    torch.testing.assert_close(build_network(cell, task).eval()(x), build_network(cell, task).eval()(x))
    scaled = build_network(replace(cell, alpha=4.0), task)
    assert float(scaled.eval()(x).detach().abs().max()) == 0  # alpha (f - f_0) begins at 0
    trained = [p for p in build_network(cell, task).parameters() if p.requires_grad]
    assert len(trained) == (2 if net == "frozen" else len(list(build_network(cell, task).parameters())))


def test_moments_rates_and_batches() -> None:
    assert moments(100)[0] == 1
    assert moments(100)[-1] == 100
    assert len(moments(3000)) == 12
    assert rate_at(replace(CELL, schedule="cosine"), 6) == pytest.approx(0.5)
    assert rate_at(replace(CELL, schedule="warm-up", steps=100), 4) == pytest.approx(0.5)
    epoch = torch.cat([BatchOrder(CELL).batch(step) for step in range(4)])
    assert sorted(epoch.tolist()) == list(range(256))
    assert not torch.equal(BatchOrder(CELL).batch(0), BatchOrder(CELL).batch(4))


def test_the_cheap_measures_are_those_of_a_scope() -> None:
    """The study computes them without a scope, so that its numbers do not change when a scope's schedule does."""
    task = make_task("teacher", 0)
    cell = replace(CELL, data="teacher")
    model = build_network(cell, task)
    optimiser = make_optimiser(cell, model, task)
    probe = Probe(model, linearised_twin(model, optimiser, task.loss, held=task.held), task.probe)
    scope = Scope(model, task.probe, budget=math.inf, strict=True)
    for step in range(1, 6):
        optimiser.zero_grad()
        task.loss(model(task.train[0]), task.train[1]).backward()
        optimiser.step()
        scope.step(step)
    found = probe.measure()
    for name, other in (("linearisation_error", None), ("parameter_motion", None), ("probe_loss", "loss")):
        assert found[name] == pytest.approx(scope.history.last(other or name), rel=1e-3), name


@pytest.mark.parametrize("cell", [CELL, replace(CELL, net="batch-norm", data="evenness", optimiser="adamw", rate=1e-3)])
def test_a_cell_has_truth_and_measures_at_every_moment(cell: Cell, tmp_path: Path) -> None:
    rows = measure(cell, work(tmp_path)).entries
    table = Table.from_rows([{**STUDY.case_columns(cell), **row} for row in rows])
    (curve,) = read_curves([cell], table)
    assert list(curve.steps) == moments(12)
    assert np.isfinite(curve.gap).all()
    assert curve.gap[-1] > curve.gap[0]
    assert (curve.measures["linearisation_error"] >= 0).all()
    assert ("simulated_gap" in curve.measures) == (cell.optimiser == "sgd")


def test_a_frozen_body_has_no_gap_and_a_large_output_scale_a_small_one(tmp_path: Path) -> None:
    def gap(cell: Cell) -> float:
        rows = measure(cell, work(tmp_path)).entries
        return [row["value"] for row in rows if row["quantity"] == "gap"][-1]

    assert gap(replace(CELL, net="frozen")) < 1e-4
    assert gap(replace(CELL, alpha=512.0)) < 0.2 * gap(CELL)


# --- rules ---------------------------------------------------------------------------------------------------


def made_curves(bias: float = 1.0, noise: float = 0.05, seed: int = 0) -> list[Curve]:
    """Trainings whose linearisation error is the gap to the power 1.2, times a bias on the scored side."""
    random, found = np.random.default_rng(seed), []
    steps = np.array([1.0, 10.0, 100.0])
    for side, nets in (("fit", FITTED[0]), ("score", SCORED[0])):
        for number, end in enumerate(np.geomspace(0.01, 1.5, 63)):
            gap = end * np.array([0.05, 0.3, 1.0])
            error = gap**1.2 * np.exp(noise * random.normal(size=3)) * (bias if side == "score" else 1.0)
            others = {"tangent_cosine": np.zeros(3), "probe_loss": np.array([0.9, 0.5, 0.2])}
            others |= {"tangent_change": error, "tangent_growth": np.ones(3)}
            cell = replace(CELL, side=side, net=nets[number % len(nets)], number=number, steps=100)
            found.append(Curve(cell, steps, gap, {"linearisation_error": error} | others, 1.0))
    return found


def side(curves: Sequence[Curve], name: str) -> list[Curve]:
    return [curve for curve in curves if curve.cell.side == name]


def test_a_fitted_rule_finds_a_known_law_and_its_range_holds() -> None:
    curves = made_curves()
    mapped = fit_rule(RULES[1], side(curves, "fit"))
    found = score(mapped, side(curves, "score"))
    assert found["right"] > 0.95
    assert found["swapped"] == 0
    assert 0.8 < found["inside"] <= 1
    assert found["when"] > 0.95
    assert all(band["factor"] < band["constant"] for band in found["bands"].values())
    plain = score(fit_rule(RULES[0], side(curves, "fit")), side(curves, "score"))
    assert plain["right"] < found["right"]
    chosen, _ = choose_rule(curves)
    assert chosen.name == "mapped"


def test_where_the_simplest_rule_is_as_good_it_is_chosen() -> None:
    curves = [replace(c, measures=dict(c.measures) | {"linearisation_error": c.gap}) for c in made_curves()]
    assert choose_rule(curves)[0].name == "tangent"


def test_rules_never_see_the_scored_side() -> None:
    curves = made_curves()
    lied = [replace(c, gap=c.gap * 0 + 0.3) if c.cell.side == "score" else c for c in curves]
    honest, other = all_scores(curves), all_scores(lied)
    assert honest["chosen"] == other["chosen"]
    assert honest["left_out"] == other["left_out"]
    assert honest["rules"]["mapped"]["fit"] == other["rules"]["mapped"]["fit"]
    assert honest["rules"]["mapped"]["score"] != other["rules"]["mapped"]["score"]
    misled = score(fit_rule(RULES[1], side(curves, "fit")), side(made_curves(bias=3.0), "score"))
    assert misled["right"] < 0.8


def test_words_crossings_and_truths() -> None:
    assert [word_of(gap) for gap in (0.09, 0.3, 0.6)] == list(WORDS)
    steps = np.array([1.0, 10.0, 100.0])
    assert crossing(steps, np.log([0.01, 0.05, 0.2])) == pytest.approx(10 * 10**0.5)
    assert crossing(steps, np.log([0.2, 0.3, 0.4])) == 1
    assert crossing(steps, np.log([0.01, 0.02, 0.03])) is None
    one = made_curves()[-1]
    assert replace(one, gap=one.gap * np.nan).truth == "broken"
    assert replace(one, measures=dict(one.measures) | {"probe_loss": np.ones(3)}).truth == "untrained"


def test_the_verdict_says_what_the_rule_says() -> None:
    """The file that is written for the verdict, read back, gives the words and ranges of the fitted rule."""
    curves = made_curves()
    fit = fit_rule(RULES[1], side(curves, "fit"))
    limits = Thresholds.from_dict(json.loads(json.dumps(thresholds_of(fit, score(fit, curves)).to_dict())))
    for curve in curves:
        end, error = float(fit.estimate(curve)[-1]), float(curve.measures["linearisation_error"][-1])
        verdict = judge(TrainingSummary({"linearisation_error": error}, (1.0, 0.1, 0.1), 128, 9), limits)
        assert verdict.gap == pytest.approx(math.exp(end), rel=0.01)
        border = min(abs(end - math.log(one) + sign * fit.margin) for one in (LAZY_GAP, RICH_GAP) for sign in (-1, 1))
        if border > 0.01:
            assert verdict.label == fit.word(end)
        if verdict.gap_range is not None:
            assert verdict.gap_range == pytest.approx(fit.span(end), rel=0.05)


# --- the committed files -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def committed() -> list[Curve]:
    return read_curves(cases(STUDY.settings("paper"), (0,)), Table.read(COMMITTED / "paper" / "table.csv"))


def test_the_committed_scores_and_thresholds_follow_from_the_committed_cells(committed: list[Curve]) -> None:
    found = all_scores(committed)
    assert len(committed) == 168
    written = json.loads((COMMITTED / "paper" / "scores.json").read_text())
    assert _close(found, written)
    assert (COMMITTED / "thresholds.json").read_bytes() == FILE.read_bytes() == thresholds_text(committed, found)


def _close(found: object, written: object) -> bool:
    """Nested values that agree up to rounding."""
    if isinstance(found, dict) and isinstance(written, dict):
        return found.keys() == written.keys() and all(_close(found[name], written[name]) for name in found)
    if isinstance(found, float) or isinstance(written, float):
        return math.isclose(float(str(found)), float(str(written)), rel_tol=1e-6, abs_tol=1e-9)
    return found == written


def test_every_band_of_truth_has_enough_cells(committed: list[Curve]) -> None:
    truths = [curve.truth for curve in committed]
    assert all(truths.count(word) >= 20 for word in WORDS)
    assert set(AIMS) == {"right", "silent", "swapped", "inside", "when"}


def test_thresholds_need_every_cell(tmp_path: Path) -> None:
    before, folder = FILE.read_bytes(), tmp_path / "calibration"
    (folder / "paper").mkdir(parents=True)
    for name in ("table.csv", "cases.json"):
        shutil.copy(COMMITTED / "paper" / name, folder / "paper" / name)
    measured = json.loads((folder / "paper" / "cases.json").read_text())
    measured[0]["id"] = "of other settings"
    (folder / "paper" / "cases.json").write_text(json.dumps(measured))
    with pytest.raises(InputError, match=r"every cell .* lacks 1, such as fit-0-relu-digits"):
        write_thresholds(tmp_path)
    assert not (folder / "thresholds.json").exists()
    assert FILE.read_bytes() == before


def test_the_figure_shows_the_committed_table(tmp_path: Path) -> None:
    request = Request("calibration", "paper", tmp_path / "runs", tmp_path / "results")
    with plots.style():
        drawn = STUDY.figures[0].draw(request.with_table(Table.read(COMMITTED / "paper" / "table.csv")))
    assert [axis.get_title(loc="left") for axis in drawn.axes] == [
        "fitted networks and data",
        "unseen networks and data",
    ]


# --- the studies ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smoke_runs_end_to_end(tmp_path: Path) -> None:
    before = FILE.read_bytes()
    request = Request("calibration", "smoke", tmp_path / "runs", tmp_path / "results")
    made = reproduce(request, ExecutionOptions(), progress=lambda *_: None)
    assert made.failed == {}
    assert set(Table.read(request.folder / "table.csv").unique("side")) == {"fit", "score"}
    assert FILE.read_bytes() == before


def test_exponents_of_power_laws() -> None:
    sizes = np.array([16.0, 64.0, 256.0])
    found = widths.width_exponents(sizes, np.stack([3 * sizes**-0.5, 7 * sizes**-0.5, sizes**-0.5], axis=1))
    np.testing.assert_allclose(found, [-0.5, -0.5, -0.5])


@pytest.mark.slow
def test_kernels_stand_still_with_width_under_ntk_and_not_under_mup(tmp_path: Path) -> None:
    study, slopes = load_study("widths"), {}
    settings = study.settings("paper", {"widths": (32, 128, 512), "networks": 4, "steps": 60, "check_networks": ()})
    for case in study.cases(settings, (0,)):
        table = Table.from_rows(study.measure(case, work(tmp_path)).entries)
        movement = widths.width_exponents(*table.series("kernel_change", over="units"))
        slopes[case.parametrisation] = float(np.median(movement))
    assert -1.1 < slopes["ntk"] < -0.35
    assert abs(slopes["mup"]) < 0.2


def test_a_history_of_a_scope_is_judged_with_the_shipped_thresholds() -> None:
    history = History()
    for step, value in ((0, 0.0), (10, 0.01), (100, 0.9)):
        out = np.full((64, 1), float(step))
        history.add(step, {"linearisation_error": value, "loss": 1 / (1 + step)}, {"output": out})
    assert judge(history).label == "rich"
