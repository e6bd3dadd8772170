"""Tables 1 and 2: cells at smoke scale, linear models against slow twins, figures."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from test_tables_claims import MADE_BY, first_table, second_table
from unlazy.data.images import load_images
from unlazy.models.conv import ImageSpec, build_images
from unlazy.runtime import InputError
from unlazy.store import Run
from unlazy.studies.halfspace.tables import claims as judging
from unlazy.studies.halfspace.tables import measure, study, table1, table2, train
from unlazy.studies.halfspace.tables.figures import PAPER, draw
from unlazy.studies.halfspace.tables.settings import (
    MODELS,
    SCALES,
    Cell,
    available,
    cells,
    matched_relu,
    model_spec,
    parameters,
    planned_seconds,
)
from unlazy.training.batches import DeviceImages

NO_STEPS = lambda *_: None  # noqa: E731


# --- cells -----------------------------------------------------------------------------------------


def test_every_cell_of_the_paper_once_and_one_seed_of_all_first() -> None:
    second = cells(SCALES["paper", 2])
    names = [train.name_of(cell.__dict__) for cell in second]
    assert len(set(names)) == len(names) == 2 * 2 * 4 * 3 + 2 * 2 * 4  # three seeds, and one without augmentation
    places = [(cell.data, cell.layout) for cell in second[:16]]
    assert places[::4] == [
        ("cifar-10", "resnet-34"),
        ("cifar-10", "resnet-110"),
        ("cifar-100", "resnet-34"),
        ("cifar-100", "resnet-110"),
    ]
    assert all(cell.seed == 0 and cell.recipe == "main" for cell in second[:16])
    first = cells(SCALES["paper", 1])
    assert [cell.model for cell in first[:4]] == ["relu", "dlgn", "pwc", "dln"]
    assert {cell.model for cell in first if cell.recipe == "cost"} == {"relu", "dlgn", "pwc", "dlgn-hard", "relu-wide"}


def test_keys_tell_cells_apart() -> None:
    keys = [cell.key(3, 10) for table in (1, 2) for cell in cells(SCALES["paper", table])]
    assert len(set(keys)) == len(keys)
    cell = cells(SCALES["paper", 2])[0]
    longer = replace(cell, settings=replace(cell.settings, epochs={"resnet-34": 30, "resnet-110": 30}))
    assert longer.key(3, 10) != cell.key(3, 10)
    more_seeds = replace(cell, settings=replace(cell.settings, seeds=9))
    assert more_seeds.key(3, 10) == cell.key(3, 10)


def test_models_of_a_layout() -> None:
    base = ImageSpec((4, 4), channels=1)
    gatings = {model: model_spec(base, model, 4.0).gating for model in MODELS}
    assert gatings == {
        **dict.fromkeys(("relu", "relu-wide", "tangent", "trace"), "own"),
        "dln": "open",
        **dict.fromkeys(("dlgn", "pwc", "dlgn-hard", "pwc-hard"), "linear"),
    }
    assert model_spec(base, "pwc-hard", 4.0).experts == model_spec(base, "pwc", 4.0).experts == "constant"
    wide = matched_relu(study_base())
    assert parameters(wide) == pytest.approx(parameters(study_base()), rel=0.03)
    assert parameters(study_base().relu()) == 27_546


def study_base() -> ImageSpec:
    cell = next(cell for cell in cells(SCALES["paper", 1]) if cell.model == "dlgn")
    return cell.spec(3, 10)


def test_recipes_of_the_tables() -> None:
    one = cells(SCALES["paper", 1])[0].training()
    assert (one.optimiser, one.schedule, one.augment, one.standardise, one.smoothing) == (
        *("adam", "constant"),
        *(False, False, 0.0),
    )
    by_recipe = {cell.recipe: cell.training() for cell in cells(SCALES["paper", 2])}
    assert by_recipe["main"].augment
    assert not by_recipe["plain"].augment
    assert replace(by_recipe["main"], augment=False, smoothing=0.0) == by_recipe["plain"]
    places = {(cell.data, cell.layout) for cell in cells(SCALES["paper", 2]) if cell.recipe == "plain"}
    assert places == {(data, layout) for data in ("cifar-10", "cifar-100") for layout in ("resnet-34", "resnet-110")}


def test_digits_stand_in_for_missing_pictures(tmp_path: Path) -> None:
    found = available(SCALES["desk", 1], tmp_path)
    assert found.data == ("digits",)
    assert len(load_images("digits")) >= found.images


# --- linear models ---------------------------------------------------------------------------------


def small_digits(n: int, split: str = "train") -> Any:
    return load_images("digits", split).take(slice(n))


def test_tangent_model_is_ridge_least_squares_on_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "AT_ONCE", 7)  # several parts, the last one short
    net = build_images(ImageSpec((2, 2), channels=1, batch_norm=False).relu()).double()
    images = small_digits(15)
    data = DeviceImages.put(images, "cpu", standardise=False)
    data = replace(data, low=data.low.double(), range=data.range.double())
    x, rows, rest = data.floats(data.pixels), [], []
    for i in range(15):
        outputs = net(x[i : i + 1])[0]
        for k in range(10):
            gradients = torch.autograd.grad(outputs[k], list(net.parameters()), retain_graph=True)
            rows.append(torch.cat([g.flatten() for g in gradients]))
            rest.append(float(k == int(images.labels[i])) - float(outputs[k].detach()))
    jacobian, residual = torch.stack(rows), torch.tensor(rest, dtype=torch.float64)
    gram, target = measure.normal_equations(net, data, range(15))
    # the columns may come in another order: compare what does not depend on it
    torch.testing.assert_close(torch.linalg.eigvalsh(gram), torch.linalg.eigvalsh(jacobian.T @ jacobian))
    torch.testing.assert_close(target.sort()[0], (jacobian.T @ residual).sort()[0])
    ridge = 1e-3
    theta = measure.solve(gram, target, ridge)
    assert theta is not None
    shift = ridge * float((jacobian**2).sum()) / jacobian.shape[1]
    slow = torch.linalg.solve(jacobian.T @ jacobian + shift * torch.eye(jacobian.shape[1]), jacobian.T @ residual)
    predicted = net(x).detach().flatten() + jacobian @ slow
    right = (predicted.reshape(15, 10).argmax(1) == images.labels).double().mean()
    assert measure.linear_accuracies(net, data, range(15), theta[:, None]) == [pytest.approx(float(right))]


def test_solve_says_where_it_breaks_down() -> None:
    broken = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)
    assert measure.solve(broken, torch.ones(2, dtype=torch.float64), 0.0) is None
    whole = measure.solve(broken + 3 * torch.eye(2), torch.eye(2, dtype=torch.float64), 0.0)
    torch.testing.assert_close(whole, torch.linalg.inv(broken + 3 * torch.eye(2)))


def test_linear_models_beat_chance_on_digits() -> None:
    net = build_images(ImageSpec((8, 8, 8), channels=1, batch_norm=False).relu())
    for model in (measure.tangent_model, measure.trace_model):
        found = model(net, small_digits(200), small_digits(100, "test"), "cpu")
        assert found["test_as_trained"] > 0.3
        assert found["train_as_trained"] >= found["test_as_trained"]
        assert f"{found['ridge']:g}" in found["held_out_by_ridge"]


# --- end to end ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "module"), [(1, table1), (2, table2)])
def test_smoke_runs_judges_nothing_and_draws(number: int, module: Any, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    made = module.reproduce(
        "smoke", runs=tmp_path / "runs", results=tmp_path / "results", progress=lambda *step: steps.append(step)
    )
    wanted = cells(SCALES["smoke", number])
    assert {train.name_of(found) for found in made["cells"]} == {train.name_of(one.__dict__) for one in wanted}
    assert ("networks", len(wanted), len(wanted)) in steps
    assert {row["verdict"] for row in made["claims"]} == {"cannot tell"}
    written = json.loads((tmp_path / "results" / f"table{number}" / "smoke.json").read_text())
    assert written["cells"] == made["cells"]
    assert written["provenance"]["data_sha256"]
    picture = tmp_path / "results" / f"table{number}" / "smoke" / f"{judging.FIGURE_OF[f'table{number}']}.png"
    assert picture.stat().st_size > 10_000


def test_finished_cells_are_skipped_and_budgets_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, path, told = SCALES["smoke", 2], tmp_path / "kept.json", list[str]()
    found = train.run(settings, path, "smoke", only="relu,main", tell=told.append)
    assert [one["model"] for one in found] == ["relu"]
    ran: list[str] = []

    def stand_in(cell: Cell, *_: Any, **__: Any) -> dict[str, Any]:
        ran.append(cell.model)
        pictures = train.Pictures(settings)
        numbers = {"test_as_trained": 0.5, "seconds_in_all": 1.0, "provenance": MADE_BY}
        return {"key": train.cell_key(cell, pictures), **cell.describe(), **numbers}

    monkeypatch.setattr(train, "run_cell", stand_in)
    train.run(settings, path, "smoke", seconds=0.0, tell=told.append)
    assert ran == []
    assert sum(line.startswith("left out") for line in told) == 3
    train.run(settings, path, "smoke", tell=told.append)
    assert ran == ["dlgn-hard", "dlgn", "pwc-hard"]  # not the ReLU network again
    assert len(train.load(path)["cells"]) == 4
    with pytest.raises(InputError, match="no cell"):
        train.run(settings, path, "smoke", only="vgg")


def test_plans_follow_what_was_measured() -> None:
    one = cells(SCALES["paper", 2])[0]
    known = one.describe() | {"seconds_in_all": 30.0, "epochs": 10}
    assert train.expected_seconds(one, []) == planned_seconds(one)
    assert train.expected_seconds(one, [known]) == pytest.approx(3.0 * one.epochs)
    assert train.expected_seconds(one, [known | {"data": "cifar-100"}]) == pytest.approx(3.0 * one.epochs)
    for other in ({"recipe": "cost"}, {"model": "dlgn"}, {"layout": "resnet-110"}):
        assert train.expected_seconds(one, [known | other]) == planned_seconds(one)


def test_a_cell_that_fails_is_told_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, told = train.run_cell, list[str]()

    def broken(cell: Cell, *given: Any, **options: Any) -> dict[str, Any]:
        if cell.model == "dlgn-hard":
            raise RuntimeError("out of memory")
        return whole(cell, *given, **options)

    monkeypatch.setattr(train, "run_cell", broken)
    found = train.run(SCALES["smoke", 2], tmp_path / "kept.json", "smoke", tell=told.append)
    assert [one["model"] for one in found] == ["relu", "dlgn", "pwc-hard"]
    assert any(line.startswith("failed digits/resnet-34/dlgn-hard") and "out of memory" in line for line in told)


def test_a_killed_cell_goes_on_from_its_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "KEEP_EVERY", 1)
    settings, whole, epochs = SCALES["smoke", 2], train.train_images, list[int]()
    one = next(cell for cell in cells(settings) if cell.model == "dlgn-hard")
    alone = train.run_cell(one, train.Pictures(settings), "cpu")

    def killed(*given: Any, **options: Any) -> dict[str, Any]:
        def after_one(done: int, _: int) -> None:
            epochs.append(done)
            if len(epochs) == 1:
                raise KeyboardInterrupt

        return whole(*given, **(options | {"progress": after_one}))

    monkeypatch.setattr(train, "train_images", killed)
    options: dict[str, Any] = {"only": "dlgn-hard,main", "runs": tmp_path / "runs"}
    with pytest.raises(KeyboardInterrupt):
        train.run(settings, tmp_path / "kept.json", "smoke", **options)
    (found,) = train.run(settings, tmp_path / "kept.json", "smoke", **options)
    assert epochs == [1, 2]  # the first epoch was not trained again
    different = {"seconds", "seconds_per_epoch", "seconds_in_all", "provenance"}
    assert {k: v for k, v in found.items() if k not in different} == {
        k: v for k, v in alone.items() if k not in different
    }
    assert found["training"]["epochs"] == 2
    assert found["spec"] == one.spec(1, 10).to_dict()
    (folder,) = (tmp_path / "runs").iterdir()
    assert Run(folder).status()["state"] == "finished"
    (tmp_path / "kept.json").unlink()
    (again,) = train.run(settings, tmp_path / "kept.json", "smoke", **options)
    assert again["test_as_trained"] == found["test_as_trained"]


def test_the_command_fails_where_a_cell_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--table", "2", "--scale", "smoke", "--results", str(tmp_path), "--only", "relu|dlgn"]
    study.main([*given, "--device", "cpu"])
    assert "digits/resnet-34/relu/main/0: epoch 1 of 2" in capsys.readouterr().out
    (tmp_path / "table2" / "smoke-measured.json").unlink()
    whole = train.run_cell

    def broken(cell: Cell, *options: Any, **more: Any) -> dict[str, Any]:
        if cell.model == "dlgn":
            raise RuntimeError("out of memory")
        return whole(cell, *options, **more)

    monkeypatch.setattr(train, "run_cell", broken)
    with pytest.raises(SystemExit, match="not kept: digits/resnet-34/dlgn/main/0"):
        study.main([*given, "--device", "cpu"])
    study.main([*given, "--device", "cpu", "--seconds", "100"])  # with a limit, cells may be missing


def test_settings_of_a_call_may_differ_and_are_kept_with_the_cell(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(json.dumps({"lr": 0.002, "looks": [2], "precision": "bfloat16"}))
    given = ["--table", "1", "--scale", "smoke", "--device", "cpu", "--results", str(tmp_path), "--only", "main,relu"]
    study.main(given)
    study.main([*given, "--settings", str(tmp_path / "own.json")])
    usual, own = train.load(tmp_path / "table1" / "smoke-measured.json")["cells"]
    assert (usual["training"]["lr"], usual["training"]["precision"]) == (SCALES["smoke", 1].lr, "float32")
    assert (own["training"]["lr"], own["training"]["precision"]) == (0.002, "bfloat16")
    assert [look["epoch"] for look in own["curve"]] == [2]
    (tmp_path / "own.json").write_text('{"learning_rate": 1}')
    with pytest.raises(InputError, match="unknown settings: learning_rate"):
        study.main([*given, "--settings", str(tmp_path / "own.json")])


def test_long_trainings_say_how_far_they_are() -> None:
    said: list[str] = []
    follow = train.tenths(said.append, "x")
    for done in range(1, 76):
        follow(done, 75)
    assert said == [f"x: epoch {done} of 75" for done in (8, 15, 23, 30, 38, 45, 53, 60, 68, 75)]


def test_networks_trained_together_say_how_far_they_are(tmp_path: Path) -> None:
    said: list[str] = []
    train.run(SCALES["smoke", 1], tmp_path / "kept.json", "smoke", only="main,relu|dln,0", follow=said.append)
    assert said == [f"2 networks together: epoch {done} of 2" for done in (1, 2)]


def test_merging_keeps_every_cell_and_the_newer_of_two() -> None:
    first = {"study": "table2", "cells": [{"key": "a", "test": 1}, {"key": "b", "test": 2}]}
    second = {"study": "table2", "cells": [{"key": "b", "test": 3}, {"key": "c", "test": 4}]}
    assert [one["test"] for one in train.merge(first, second)["cells"]] == [1, 3, 4]
    with pytest.raises(InputError, match="do not mix"):
        train.merge(first, second | {"study": "table1"})


def test_paper_scale_judges_the_measured_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    where: dict[str, Any] = {"runs": tmp_path, "results": tmp_path, "progress": NO_STEPS}
    with pytest.raises(InputError, match="wants a GPU"):
        table2.reproduce("paper", **where)
    path = study.measured_file(tmp_path, 2, "paper")
    train.save(path, SCALES["paper", 2], "paper", second_table()["cells"])
    assert table2.reproduce("paper", **where)["claims"][0]["verdict"] == "holds"


def test_the_gpu_side_needs_neither_drawing_nor_command_line_packages(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('matplotlib', 'typer', 'rich', 'scipy', 'sklearn'): sys.modules[name] = None\n"
        "from unlazy.studies.halfspace.tables import study\n"
        "study.main(['--table', '2', '--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--seconds" in done.stdout


# --- figures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("results", [first_table(dlgn_hard=71.0, pwc_hard=70.0), second_table()], ids=["1", "2"])
def test_figures_show_measured_bars_and_the_papers_diamonds(results: dict[str, Any]) -> None:
    before = copy.deepcopy(results)
    (figure,) = draw(results).values()
    assert results == before
    panels = [axis for axis in figure.axes if axis.get_title(loc="left")]
    places = {(made["data"], made["layout"]) for made in results["cells"]}
    assert {tuple(axis.get_title(loc="left").split(", ")) for axis in panels} == places
    for axis in panels:
        data, layout = axis.get_title(loc="left").split(", ")
        heights = {round(float(bar.get_height()), 1) for bar in axis.patches}
        shown = [made for made in results["cells"] if (made["data"], made["layout"]) == (data, layout)]
        wanted = {round(100 * made["test_as_trained"], 1) for made in shown if made["recipe"] == "main"}
        assert wanted <= heights
        diamonds = [
            float(line.get_ydata()[0]) for line in axis.lines if line.get_marker() == "D" and len(line.get_ydata())
        ]
        assert sorted(diamonds) == sorted(value for place, value in PAPER.items() if place[:2] == (data, layout))
