"""Tables 1 and 2: what is declared, linear models against slow twins, trainings at smoke scale."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from repository import RESULTS
from unlazy.data.images import load_images
from unlazy.models.build import build
from unlazy.models.spec import ImageSpec
from unlazy.runtime import InputError
from unlazy.store import Run
from unlazy.studies.engine import Reproduction, reproduce
from unlazy.studies.halfspace import hard_gate_search, image_linear_models, image_networks, table1, table2
from unlazy.studies.halfspace.image_linear_models import RIDGES
from unlazy.studies.halfspace.image_networks import (
    DECAY,
    HELD_OUT,
    MODELS,
    Network,
    count_parameters,
    measure,
    model_spec,
    relu_of_equal_size,
)
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.study import Work
from unlazy.studies.table import Rows, Table, as_text
from unlazy.studies.trainings import HARD
from unlazy.training.batches import DeviceImages

STUDIES = {module.STUDY.name: module.STUDY for module in (table1, table2, hard_gate_search)}


# --- cases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STUDIES)
def test_every_committed_number_belongs_to_a_declared_network(name: str) -> None:
    study, folder = STUDIES[name], RESULTS / name / "paper"
    declared = {study.case_id(case): case for case in study.cases(study.settings("paper"), study.seeds_of("paper"))}
    labels = [study.label(case) for case in declared.values()]
    assert len(set(labels)) == len(labels)
    cases = json.loads((folder / "cases.json").read_text())
    assert {one["id"] for one in cases} <= set(declared)
    table = Table.read(folder / "table.csv")
    assert sum(len(table.where(**one["columns"])) for one in cases) == len(table)


def test_other_settings_are_other_cases() -> None:
    study = table2.STUDY
    case = study.cases(study.settings("paper"), (0,))[0]
    for change in ({"epochs": 30}, {"lr": 0.1}, {"seed": 5}, {"hard_beta": 2.0}, {"images": 100}):
        assert study.case_id(replace(case, **change)) != study.case_id(case)
    with pytest.raises(InputError, match="unknown layout"):
        replace(case, layout="vgg")
    with pytest.raises(InputError, match="test_images must be at least 1"):
        study.cases(study.settings("paper", {"test_images": 0}), (0,))


def test_models_of_a_layout() -> None:
    base = ImageSpec((4, 4), channels=1)
    gatings = {model: model_spec(base, model, 4.0).gating for model in MODELS}
    assert gatings == {
        **dict.fromkeys(("relu", "relu-wide", "tangent", "trace"), "own"),
        "dln": "open",
        **dict.fromkeys(("dlgn", "pwc", "dlgn-hard", "pwc-hard"), "linear"),
    }
    assert model_spec(base, "pwc-hard", 4.0).experts == model_spec(base, "pwc", 4.0).experts == "constant"
    conv = Network("cifar-10", "conv", "dlgn", 100, 4e-4, 0).spec(3, 10)
    assert count_parameters(relu_of_equal_size(conv)) == pytest.approx(count_parameters(conv), rel=0.03)
    assert count_parameters(conv.relu()) == 27_546


def test_recipes_of_the_tables() -> None:
    first = table1.cases(table1.STUDY.settings("paper"), (0,))
    one = first[0].training()
    assert (one.optimiser, one.schedule, one.augment, one.standardise, one.smoothing) == (
        *("adam", "constant"),
        *(False, False, 0.0),
    )
    assert {case.model for case in first if case.recipe == "cost"} == {"relu", "dlgn", "pwc", "dlgn-hard", "relu-wide"}
    second = table2.cases(table2.STUDY.settings("paper"), (0,))
    by_recipe = {case.recipe: case.training() for case in second}
    assert by_recipe["main"].augment
    assert not by_recipe["plain"].augment
    assert replace(by_recipe["main"], augment=False, smoothing=0.0, epochs=12) == by_recipe["plain"]
    hard = next(case for case in second if case.model == "dlgn-hard").spec(3, 10)
    assert hard.even_gates
    assert hard.to_dict()["gate"]["beta"] == 1.0


def test_claims_compare_networks_that_were_trained_alike() -> None:
    assert table2.longest_training("cifar-10", "resnet-110", ("relu", "dlgn"))["epochs"] == 25
    longest = table2.longest_training("cifar-10", "resnet-110", ("relu", "dlgn-hard"))
    assert (longest["epochs"], longest["lr"]) == (30, 0.6)
    for study in (table1.STUDY, table2.STUDY):
        columns = [study.case_columns(case) for case in study.cases(study.settings("paper"), (0,))]
        for claim in study.claims:
            for one in claim.quantities():  # every quantity that decides a claim is one of a declared network
                wanted = {name: value for name, value in one.where.items() if name in study.columns}
                assert any(all(own[k] == as_text(v) for k, v in wanted.items()) for own in columns), one


def test_measuring_needs_neither_drawing_nor_command_line_packages() -> None:
    script = (
        "import sys\n"
        "for name in ('matplotlib', 'typer', 'rich', 'scipy', 'sklearn'): sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "from unlazy.studies.request import Request\n"
        "for name in ('table1', 'table2', 'hard-gate-search'):\n"
        "    assert len(Request(name, 'paper', Path('x'), Path('x')).cases) > 0\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# --- linear models -----------------------------------------------------------------------------------


def small_digits(n: int, split: str = "train") -> Any:
    return load_images("digits", split).take(slice(n))


def test_tangent_model_is_ridge_least_squares_on_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_linear_models, "BATCH_IMAGES", 7)  # several parts, the last one short
    net = build(ImageSpec((2, 2), channels=1, batch_norm=False).relu()).double()
    images = small_digits(15)
    data = DeviceImages.from_images(images, "cpu", standardise=False)
    data = replace(data, low=data.low.double(), range=data.range.double())
    x, rows, rest = data.floats(data.pixels), [], []
    for i in range(15):
        outputs = net(x[i : i + 1])[0]
        for k in range(10):
            gradients = torch.autograd.grad(outputs[k], list(net.parameters()), retain_graph=True)
            rows.append(torch.cat([g.flatten() for g in gradients]))
            rest.append(float(k == int(images.labels[i])) - float(outputs[k].detach()))
    jacobian, residual = torch.stack(rows), torch.tensor(rest, dtype=torch.float64)
    gram, target = image_linear_models.normal_equations(net, data, range(15))
    # the columns may come in another order: compare what does not depend on it
    torch.testing.assert_close(torch.linalg.eigvalsh(gram), torch.linalg.eigvalsh(jacobian.T @ jacobian))
    torch.testing.assert_close(target.sort()[0], (jacobian.T @ residual).sort()[0])
    ridge = 1e-3
    theta = image_linear_models.solve_ridge(gram, target, ridge)
    assert theta is not None
    shift = ridge * float((jacobian**2).sum()) / jacobian.shape[1]
    slow = torch.linalg.solve(jacobian.T @ jacobian + shift * torch.eye(jacobian.shape[1]), jacobian.T @ residual)
    predicted = net(x).detach().flatten() + jacobian @ slow
    right = (predicted.reshape(15, 10).argmax(1) == images.labels).double().mean()
    assert image_linear_models.linear_accuracies(net, data, range(15), theta[:, None]) == [pytest.approx(float(right))]


def test_solve_says_where_it_breaks_down() -> None:
    broken = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)
    assert image_linear_models.solve_ridge(broken, torch.ones(2, dtype=torch.float64), 0.0) is None
    whole = image_linear_models.solve_ridge(broken + 3 * torch.eye(2), torch.eye(2, dtype=torch.float64), 0.0)
    torch.testing.assert_close(whole, torch.linalg.inv(broken + 3 * torch.eye(2)))


def test_linear_models_beat_chance_on_digits() -> None:
    assert max(RIDGES) == pytest.approx(1e-3)
    assert min(RIDGES) <= 1e-12
    net = build(ImageSpec((8, 8, 8), channels=1, batch_norm=False).relu())
    for model in (image_linear_models.fit_tangent_model, image_linear_models.fit_trace_kernel_model):
        found = model(net, small_digits(200), small_digits(100, "test"), "cpu")
        assert found["test_as_trained"] > 0.3
        assert found["train_as_trained"] >= found["test_as_trained"]
        assert found["ridge"] in found["held_out_by_ridge"]


# --- end to end --------------------------------------------------------------------------------------


def smoke(name: str, folder: Path, only: str = "") -> Reproduction:
    request = Request(name, "smoke", folder / "runs", folder / "results")
    return reproduce(request, ExecutionOptions(only=only), progress=lambda *_: None)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reproduction]:
    folder = tmp_path_factory.mktemp("table1")
    return folder, smoke("table1", folder)


def test_smoke_of_table1_judges_nothing_and_draws(first) -> None:
    folder, made = first
    assert (made.failed, made.not_drawn) == ({}, {})
    assert made.results["measured_cases"] == made.results["declared_cases"] == 16
    assert {row["verdict"] for row in made.results["claims"]} == {"cannot tell"}
    for figure in ("table1_accuracies", "table1_kernels"):
        assert (made.folder / f"{figure}.png").stat().st_size > 10_000
    table = Table.read(made.folder / "table.csv")
    assert set(table.unique("model")) == set(MODELS)
    assert {Run(path.parent).status()["state"] for path in (folder / "runs").rglob("run.json")} == {"finished"}


def test_smoke_of_table2_and_of_the_search(tmp_path: Path) -> None:
    made = smoke("table2", tmp_path, "relu,*")
    assert made.failed == {}
    assert made.results["measured_cases"] == 1
    made = smoke("hard-gate-search", tmp_path, "*patches,*")
    table = Table.read(made.folder / "table.csv")
    (row,) = table.where(quantity="mirrored_accuracy").rows()
    assert row["judged_on"] == "test images"
    assert len(list((tmp_path / "runs" / "hard-gate-search").glob("digits-tiny-*"))) == 2  # the network and its teacher


def test_kernels_follow_the_run_folders(first) -> None:
    table = Table.read(first[1].folder / "table.csv")
    trained = [model for model in MODELS if model not in ("relu-wide", "tangent", "trace")]
    assert table.unique("model", quantity="alignment") == [m for m in table.unique("model") if m in trained]
    for model in trained:
        own = table.where(model=model, recipe="main")
        epochs, distance = own.series("distance", kernel="tangent")
        assert epochs.tolist() == [0, 1, 2]
        assert distance[0] == pytest.approx(0, abs=1e-6)
        assert own.select("velocity", 1, kernel="tangent") == pytest.approx(distance[1], rel=1e-4, abs=1e-8)
        assert len(own.where(quantity="log10_paths")) == 3 * 10
    constant = table.select("alignment", 1, model="dln", kernel="overlap")
    assert (constant == 0).all()  # every path is open on every image, and nothing aligns with that


def test_decay_goes_on_from_the_last_state_at_a_tenth_of_the_rate(first, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, made = first
    case = next(one for one in table1.cases(table1.STUDY.settings("smoke"), (0,)) if one.recipe == DECAY)
    seen: list[Any] = []
    real = image_networks.train_in_parallel

    def watched(stacks: Any, train: Any, test: Any, recipe: Any, **options: Any) -> Any:
        seen.append((recipe, [parameter.clone() for parameter in stacks[0].nets[0].parameters()]))
        return real(stacks, train, test, recipe, **options)

    monkeypatch.setattr(image_networks, "train_in_parallel", watched)
    again = measure(case, Work("table1", "smoke", folder / "runs" / "table1"))
    ((recipe, weights),) = seen  # the training before it was finished, and is not done again
    assert recipe.lr == pytest.approx(0.1 * case.lr)
    assert recipe.epochs == case.decay_epochs
    (path,) = (folder / "runs" / "table1").glob(f"{case.model}-????????????")
    loaded = image_networks.load_network(Run(path))
    assert all(torch.equal(a, b) for a, b in zip(weights, loaded.parameters(), strict=True))
    table = Table.read(made.folder / "table.csv").where(recipe=DECAY, model=case.model, quantity="loss")
    losses = [row["value"] for row in again.entries if row["quantity"] == "loss"]
    assert losses == pytest.approx(table.values.tolist(), rel=1e-5)


def test_a_killed_training_goes_on_from_its_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_networks, "CHECKPOINT_EPOCHS", 1)
    case = next(one for one in table2.cases(table2.STUDY.settings("smoke"), (0,)) if one.model == "dlgn-hard")
    alone = measure(case, Work("table2", "smoke", tmp_path / "alone"))
    epochs: list[int] = []

    def killed(done: int, _: int) -> None:
        epochs.append(done)
        if len(epochs) == 1:
            raise KeyboardInterrupt

    work = Work("table2", "smoke", tmp_path / "runs", progress=killed)
    with pytest.raises(KeyboardInterrupt):
        measure(case, work)
    found = measure(case, work)
    assert epochs == [1, 2]  # the first epoch was not trained again
    assert numbers(found) == numbers(alone)
    assert numbers(measure(case, work)) == numbers(alone)  # a finished run is read, not trained
    assert epochs == [1, 2]


def numbers(rows: Rows) -> list[dict[str, Any]]:
    return [row for row in rows.entries if not row["quantity"].startswith("seconds")]


def test_variants_are_judged_without_test_images(tmp_path: Path) -> None:
    settings = hard_gate_search.STUDY.settings("smoke")
    work = Work("hard-gate-search", "smoke", tmp_path)
    cases = {case.variant: case for case in hard_gate_search.cases(settings, (0,))}
    train, held_out = image_networks.load_splits(cases["base: beta 4"], work)
    assert (len(train), len(held_out), held_out.split) == (108, 12, "train")
    assert {case.judged_on for name, case in cases.items() if not name.startswith("tiny")} == {HELD_OUT}
    frozen = image_networks.build_network(cases["no gate bias"], train)
    still = {name for name, parameter in frozen.named_parameters() if not parameter.requires_grad}
    assert still
    assert all(name.startswith("gate_layers.") and name.endswith("bias") for name in still)
    wide = cases["tiny, teacher, patches"]
    assert (wide.normalised_gates, wide.mixed, wide.distil) == (True, 0.5, 1.0)


def test_the_chosen_gates_are_the_best_in_the_mean_over_layouts() -> None:
    part = Table.read(RESULTS / "hard-gate-search" / "paper" / "table.csv").where(
        quantity="accuracy", at="end", images="test", gates=HARD, judged_on=HELD_OUT
    )
    layouts = part.unique("layout", variant=list(hard_gate_search.GATES))
    means = {}
    for name in hard_gate_search.GATES:
        scores = [part.select("accuracy", variant=name, layout=layout) for layout in layouts]
        if all(len(score) for score in scores):
            means[name] = float(np.mean(scores))
    assert len(means) > 1
    assert max(means, key=lambda name: means[name]) == hard_gate_search.CHOSEN
