"""The calibration: a fair truth, thresholds that see one side only, and committed files that follow from each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unlazy.runtime import InputError
from unlazy.scope.readings import Readings
from unlazy.scope.thresholds import FILE, Thresholds
from unlazy.scope.verdict import judge
from unlazy.studies.scope.calibration import cells, study, widths
from unlazy.studies.scope.calibration.data import task
from unlazy.studies.scope.calibration.fitting import fit_thresholds, score, truth
from unlazy.studies.scope.calibration.networks import network
from unlazy.studies.scope.calibration.settings import (
    DATA,
    FITTED,
    NETS,
    SCALES,
    SCORED,
    Cell,
    Settings,
)
from unlazy.training.fit import LOSSES
from unlazy.training.linearised import linearise

RESULTS = Path(__file__).parent.parent / "results" / "calibration"


def test_the_two_sides_share_nothing() -> None:
    for fitted, scored, everything in zip(FITTED, SCORED, (NETS, DATA), strict=True):
        assert not set(fitted) & set(scored)
        assert set(fitted) | set(scored) == set(everything)
    paper = SCALES["paper"]
    assert len(paper.nets) >= 4
    assert len(paper.data) >= 3
    assert len(paper.alphas) >= 7
    made = list(paper.cells())
    assert len(set(made)) == len(made)
    for role, (nets, sets) in (("fit", FITTED), ("score", SCORED)):
        assert {(c.net, c.data) for c in made if c.role == role} == {(net, data) for net in nets for data in sets}


@pytest.mark.parametrize("name", DATA)
def test_data_sets_have_one_size_and_no_sample_twice(name: str) -> None:
    work = task(name)
    x = torch.cat([work.train[0], work.probe[0], work.held[0]])
    assert x.shape == (576, 64)
    assert float(x.square().mean()) == pytest.approx(1, rel=1e-4)
    assert len(x.unique(dim=0)) == len(x)
    probe, targets = work.probe_set()
    assert len(probe) == len(targets) == 128
    assert work.outputs == (1 if work.loss == "squared" else work.train[1].shape[1])


@pytest.mark.parametrize("net", NETS)
def test_networks_start_alike_for_a_seed_and_scale_with_width(net: str) -> None:
    x = task("text").train[0][:4]
    cell = Cell(net, "text")
    assert torch.equal(network(cell, 4)(x), network(cell, 4)(x))
    assert not torch.equal(network(cell, 4)(x), network(replace(cell, seed=1), 4)(x))
    sizes = [sum(p.numel() for p in network(replace(cell, width=w), 4).parameters()) for w in (0.5, 1.0)]
    assert sizes[1] > 1.5 * sizes[0]


@pytest.mark.parametrize(("net", "data"), [("relu", "patterns"), ("transformer", "text")])
def test_the_twin_is_gradient_descent_with_the_kernel_at_the_start(net: str, data: str) -> None:
    """Training by forward mode against u <- u - rate K dL/du with momentum, K the full tangent kernel, in float64."""
    cell, work = Cell(net, data, alpha=3.0, steps=6), task(data)
    few = tuple(part[:10].double() for part in work.train)
    small = replace(work, train=few)
    start = network(cell, work.outputs).double()
    twin, rate = linearise(start), 1e-3
    groups = [{"params": list(twin.parameters()), "lr": rate}]
    cells._train(cell, groups, cells._centred(cell, twin, start, small), small, 3.0)

    kernel = linearise(start).tangents.kernel(few[0])
    moved = torch.zeros(10, work.outputs, dtype=torch.float64)  # f_lin - f_0 on the training samples
    speed = torch.zeros_like(moved)
    for _ in range(cell.steps):
        u = (3.0 * moved).requires_grad_(True)
        (slope,) = torch.autograd.grad(LOSSES[work.loss](u, few[1]), u)
        speed = cells.MOMENTUM * speed + (kernel @ slope.flatten()).view_as(moved) * 3.0 / 9.0
        moved = moved - rate * speed
    with torch.no_grad():
        found = twin(few[0]) - start(few[0])
    torch.testing.assert_close(found, moved, rtol=1e-8, atol=1e-10)


def test_a_large_output_scale_closes_the_gap(tmp_path: Path) -> None:
    made = [cells.measure_cell(Cell("relu", "patterns", alpha, steps=25, rate=1.0), tmp_path) for alpha in (0.1, 512.0)]
    rich, lazy = made
    assert rich["gap"] > 5 * lazy["gap"]
    for measure in ("linearisation_error", "tangent_distance", "gate_flips", "parameter_motion"):
        assert rich["readings"]["measures"][measure][0] > 5 * lazy["readings"]["measures"][measure][0]
    assert lazy["size"] == pytest.approx(1, abs=0.1)
    labels = [judge(Readings.from_dict(one["readings"])).label for one in made]
    assert labels[1] == "lazy"
    assert labels[0] != "lazy"
    again = cells.measure_cell(Cell("relu", "patterns", 0.1, steps=25, rate=1.0), tmp_path)
    assert again == rich  # read from its file
    assert len(list(tmp_path.iterdir())) == 2


def test_a_busy_machine_measures_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scope takes fewer samples where looking is slow; a study must not."""
    cell = Cell("relu", "patterns", 1.0, steps=5, rate=1.0)
    quick = cells.measure_cell(cell, tmp_path / "quick")
    monkeypatch.setattr("unlazy.scope.measures.LOOK_SECONDS", 1e-9)
    slow = cells.measure_cell(cell, tmp_path / "slow")
    changing = {"provenance", "seconds"}
    assert {k: v for k, v in slow.items() if k not in changing} == {k: v for k, v in quick.items() if k not in changing}


# --- fitting -------------------------------------------------------------------------------------------------


def made_rows(seed: int = 0, bias: float = 1.0) -> list[dict[str, Any]]:
    """Cells whose measures follow the gap by a known law: error = gap / 2, change = gap^2, with a little noise."""
    random, rows = np.random.default_rng(seed), []
    for role in ("fit", "score"):
        for gap in np.geomspace(0.01, 1.5, 60):
            noise = np.exp(0.05 * random.normal(size=2))
            factor = bias if role == "score" else 1.0
            values = {
                "linearisation_error": gap / 2 * noise[0] * factor,
                "tangent_change": gap**2 * noise[1] * factor**2,
            }
            taken = {name: [float(value), [0.98 * float(value), 1.02 * float(value)]] for name, value in values.items()}
            kept = {"measures": taken, "losses": [1.0, 0.1, 0.1], "samples": 128, "measurements": 9}
            kept |= {"curves": {}, "groups": {}, "left_out": {}}
            rows.append({"gap": float(gap), "role": role, "readings": kept, "cell": {}})
    return rows


def test_fitting_finds_a_known_law() -> None:
    limits = fit_thresholds(made_rows(), "made")
    assert limits.measures["linearisation_error"].lazy_below == pytest.approx(0.05, rel=0.1)
    assert limits.measures["linearisation_error"].rich_above == pytest.approx(0.25, rel=0.1)
    assert limits.measures["tangent_change"].lazy_below == pytest.approx(0.01, rel=0.15)
    result = score([row for row in made_rows(1) if row["role"] == "score"], limits)
    assert result["accuracy"] > 0.93
    assert result["silent_share"] < 0.2
    assert result["lazy_for_rich"] == 0


def test_thresholds_never_see_the_scored_side() -> None:
    rows = made_rows()
    falsified = [row if row["role"] == "fit" else {**row, "gap": 0.3} for row in rows]
    assert fit_thresholds(rows, "made") == fit_thresholds(falsified, "made")
    other = [row if row["role"] == "score" else {**row, "gap": 3 * row["gap"]} for row in rows]
    assert fit_thresholds(rows, "made") != fit_thresholds(other, "made")
    with pytest.raises(InputError, match="0 cells to fit"):
        fit_thresholds([row for row in rows if row["role"] == "score"], "made")


def test_a_falsified_truth_costs_accuracy() -> None:
    rows, limits = made_rows(), fit_thresholds(made_rows(), "made")
    scored = [row for row in rows if row["role"] == "score"]
    lied = [{**row, "gap": 1.0 if row["gap"] < 0.05 else row["gap"]} for row in scored]
    assert score(scored, limits)["accuracy"] > score(lied, limits)["accuracy"] + 0.2
    assert score(lied, limits)["lazy_for_rich"] > 10
    shifted = [row for row in made_rows(bias=3.0) if row["role"] == "score"]  # measures that mislead
    assert score(shifted, limits)["accuracy"] < 0.7
    assert score(shifted, limits)["silent_share"] < 0.2


def test_the_confusion_table_counts_every_cell() -> None:
    rows, limits = made_rows(), fit_thresholds(made_rows(), "made")
    quiet = {**rows[-1], "readings": {**rows[-1]["readings"], "losses": [1.0, 0.99, 0.99]}}
    broken = {**rows[-1], "gap": None}
    result = score([*rows, quiet, broken], limits)
    assert truth(quiet) == "untrained"
    assert truth(broken) == "broken"
    assert sum(sum(line.values()) for line in result["confusion"].values()) == len(rows) + 2
    assert result["confusion"]["untrained"]["cannot tell"] == 1
    assert sum(result["confusion"]["broken"].values()) == 1
    assert result["cells"] == len(rows)


def test_a_sweep_that_turns_back_is_seen() -> None:
    limits = fit_thresholds(made_rows(), "made")
    by_gap = {gap: min(made_rows(), key=lambda row: abs(row["gap"] - gap)) for gap in (0.01, 0.22, 1.5)}

    def sweep(gaps: list[float]) -> dict[str, Any]:
        cell = {"net": "relu", "data": "digits", "seed": 0}
        rows = [{**by_gap[gap], "cell": {**cell, "alpha": float(place)}} for place, gap in enumerate(gaps)]
        (found,) = study.alpha_sweep(rows, limits)
        return found

    there, back = sweep([1.5, 0.22, 0.01]), sweep([1.5, 0.01, 0.22])
    assert there["labels"] == ["rich", "mixed", "lazy"]
    assert there["monotone"] and there["rich_to_lazy"]  # noqa: PT018
    assert not back["monotone"]


# --- widths --------------------------------------------------------------------------------------------------


def test_exponents_of_power_laws() -> None:
    sizes = np.array([16.0, 64.0, 256.0])
    found = widths.exponents(sizes, np.stack([3 * sizes**-0.5, 7 * sizes**-0.5, sizes**-0.5], axis=1))
    assert found["median"] == pytest.approx(-0.5)
    np.testing.assert_allclose(found["each"], -0.5)


@pytest.mark.slow
def test_kernels_stand_still_with_width_under_ntk_and_not_under_mup(tmp_path: Path) -> None:
    small = Settings(widths=(32, 128, 512), width_seeds=4, width_steps=60)
    found = widths.measure_widths(small, tmp_path)
    slopes = study.fitted_exponents(found)["exponents"]
    assert -1.1 < slopes["ntk"]["change"]["median"] < -0.35
    assert abs(slopes["mup"]["change"]["median"]) < 0.2


# --- the study -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smoke_runs_end_to_end(tmp_path: Path) -> None:
    said: list[str] = []
    table = study.reproduce(
        "smoke",
        runs=tmp_path / "runs",
        results=tmp_path / "results",
        progress=lambda what, done, total: said.append(what),
    )
    folder = tmp_path / "results" / "calibration"
    assert json.loads((folder / "smoke.json").read_text())["rows"] == json.loads(json.dumps(table["rows"]))
    assert (folder / "smoke" / "widths.png").exists()
    assert table["claims"] == []
    assert len(said) > 2
    before = sorted((tmp_path / "runs").rglob("*.json"))
    study.reproduce("smoke", runs=tmp_path / "runs", results=tmp_path / "results", progress=lambda *_: None)
    assert sorted((tmp_path / "runs").rglob("*.json")) == before


def committed() -> dict[str, Any]:
    return dict(json.loads((RESULTS / "paper.json").read_text()))


def test_the_thresholds_file_follows_from_the_committed_cells() -> None:
    table = committed()
    limits = fit_thresholds(table["rows"], "paper")
    assert json.loads(FILE.read_text()) == json.loads(json.dumps(limits.to_dict()))
    assert (RESULTS / "thresholds.json").read_bytes() == FILE.read_bytes() == study.thresholds_text(table)


def test_committed_scores_follow_from_the_committed_cells() -> None:
    table = committed()
    limits = Thresholds.from_dict(table["thresholds"])
    for role, given in table["scores"].items():
        found = score([row for row in table["rows"] if row["role"] == role], limits)
        assert json.loads(json.dumps(found)) == given
    assert json.loads(json.dumps(study.alpha_sweep(table["rows"], limits))) == table["alpha_sweep"]
    roles = {(row["cell"]["net"], row["cell"]["data"]): row["role"] for row in table["rows"]}
    assert all(role == Cell(*pair).role for pair, role in roles.items())
