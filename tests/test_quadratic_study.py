"""Quadratic against linear gates: sizes match, kernels are the kernels, and falsified tables flip the verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unlazy import plots
from unlazy.data.dataset import Dataset
from unlazy.kernels.compare import kernel_distance, relative_change
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build, build_stack
from unlazy.models.spec import NetSpec
from unlazy.runtime import InputError
from unlazy.store import Run
from unlazy.studies.halfspace.quadratic import figures
from unlazy.studies.halfspace.quadratic import measure as study
from unlazy.studies.halfspace.quadratic.claims import claims, gain, pairs
from unlazy.studies.halfspace.quadratic.measure import kernels_one_by_one, key, left_out, trainings
from unlazy.studies.halfspace.quadratic.settings import (
    GATINGS,
    MISMATCH,
    RULES,
    SCALES,
    Circles,
    Pictures,
    Settings,
    circle_recipe,
    matched,
    parameters,
    picture_recipe,
)
from unlazy.studies.halfspace.quadratic.study import reproduce, settings_for

PAPER = SCALES["paper"]


def count(spec: NetSpec) -> int:
    """By the formula: matrices, biases, and rank-one squares with strength and offset for every unit."""
    m, d, biases = spec.width, spec.inputs, int(spec.gate_bias)
    between = (spec.depth - 1) * m * m
    gates = m * d + between + biases * spec.depth * m
    start = {"ones": d, "one": 1}[spec.constant_input] if spec.experts == "constant" else d
    values = m * start + between + biases * spec.depth * m + spec.outputs * (m + biases)
    squares = spec.depth * m * spec.quadratic_rank * (d + 1) + spec.depth * m if spec.gating == "quadratic" else 0
    return gates + values + squares


@pytest.mark.parametrize("rule", RULES)
def test_sizes_match_within_two_percent(rule: str) -> None:
    specs = [[circle_recipe(PAPER.circles, preset, rule, g).model for g in GATINGS] for preset in ("author", "pilot")]
    specs += [[picture_recipe(PAPER.pictures, inputs, 10, rule, g).model for g in GATINGS] for inputs in (64, 784)]
    for linear, quadratic in specs:
        assert (linear.gating, quadratic.gating) == GATINGS
        assert abs(count(quadratic) / count(linear) - 1) <= MISMATCH
        assert (parameters(linear), parameters(quadratic)) == (count(linear), count(quadratic))
        same = replace(quadratic, gating="linear", width=linear.width)
        assert same == linear  # nothing else differs


def test_the_nearest_size_is_taken() -> None:
    both = matched(NetSpec(64, 10, width=64, depth=3, experts="constant", constant_input="one"))
    linear, quadratic = both["linear"], both["quadratic"]
    off = [abs(count(replace(quadratic, width=w)) - count(linear)) for w in range(1, 65)]
    assert off[quadratic.width - 1] == min(off)


def test_sizes_that_cannot_match_are_refused() -> None:
    with pytest.raises(InputError, match="larger width"):
        matched(NetSpec(784, 10, width=2, depth=3, experts="constant"))


def test_quadratic_gates_are_not_half_spaces() -> None:
    """Along a line through the origin a rank-one quadratic gate may open, close and open again; a linear one may not."""
    linear, quadratic = (circle_recipe(PAPER.circles, "pilot", "hard", gating).model for gating in GATINGS)
    t = torch.linspace(-40, 40, 801)[:, None]
    changes = {}
    for spec in (linear, quadratic):
        most = 0
        for seed in range(5):
            x = t * torch.tensor([[0.6, 0.8]])
            gates = torch.cat(build(spec, seed=seed).gates(x).hard(), dim=-1)
            most = max(most, int((gates[1:] != gates[:-1]).sum(0).max()))
        changes[spec.gating] = most
    assert changes["linear"] <= 1
    assert changes["quadratic"] == 2


def test_kernels_of_members_are_those_of_the_stack() -> None:
    net = build_stack(NetSpec(3, 2, gating="quadratic", width=4, depth=2), [0, 1, 2], dtype=torch.float64)
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = kernels_one_by_one(net, Dataset("mine", x, torch.zeros(6, 2, dtype=torch.float64)))
    torch.testing.assert_close(found["tangent"], tangent_kernel(net, x), rtol=1e-9, atol=1e-12)
    assert found["overlap"].shape == (3, 6, 6)


def test_missing_images_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNLAZY_DATA", str(tmp_path))
    tasks = (("relabelled-fashion", 100),)
    settings = Settings(replace(SCALES["smoke"].circles), replace(SCALES["smoke"].pictures, tasks=tasks))
    assert list(left_out(settings)) == ["relabelled-fashion"]
    assert {plan.data.name for plan in trainings(settings)} == {"circle"}


def test_relabelled_images_keep_easy_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    from unlazy.data.images import load_images

    monkeypatch.setitem(study.IMAGE_TASKS, "relabelled-fashion", "digits")
    data, tests = study.image_data("relabelled-fashion", 400, 100)
    plain, unseen = (load_images("digits", split).labels[:n] for split, n in (("train", 400), ("test", 100)))
    for made, labels in ((data, plain), (tests, unseen)):
        new, easy = made.y.argmax(1), labels < 5
        assert torch.equal(new[easy], labels[easy])
        assert (new[~easy] >= 5).all()
        assert (new[~easy] != labels[~easy]).float().mean() > 0.3


# --- verdicts ----------------------------------------------------------------------------------------


def table(loss: float = 0.01, accuracy: float = 0.9, other_loss: float = 0.002, other: float = 0.95) -> dict[str, Any]:
    """Made by hand: quadratic gates with ``other_loss`` and accuracy ``other``."""
    spread = np.linspace(0.99, 1.01, 10)
    made: dict[str, Any] = {
        "scale": "paper",
        "settings": PAPER.to_dict(),
        "provenance": {},
        "left_out": {},
        "stacks": {},
    }
    for task, rule in pairs(made):
        for gating in GATINGS:
            level, right = (loss, accuracy) if gating == "linear" else (other_loss, other)
            values = (
                {name: (level * spread).tolist() for name in ("loss", "loss_hard_gates", "cell_floor", "allocation")}
                if task in ("author", "pilot")
                else {
                    f"{split}_{how}": (right * spread).tolist()
                    for split in ("train", "test")
                    for how in ("as_trained", "hard_gates")
                }
            )
            moved = {f"{kernel}_{how}": [[0.0] * 10, [0.5] * 10] for kernel in ("overlap", "tangent") for how in HOW}
            made["stacks"][key(task, rule, gating)] = {
                "width": 16,
                "parameters": 100,
                "values": values,
                "dynamics": moved,
            }
    return made


HOW = ("distance", "change")


def test_the_verdict_follows_the_numbers() -> None:
    assert claims(table())[0]["verdict"] == "holds"
    assert claims(table(other_loss=0.02, other=0.85))[0]["verdict"] == "fails"
    assert claims(table(other_loss=0.02, other=0.95))[0]["verdict"] == "partly"
    assert claims(table(other_loss=0.01, other=0.9))[0]["verdict"] == "fails"  # equal is not higher
    assert claims(table() | {"scale": "smoke"})[0]["verdict"] == "cannot tell"


def test_gates_made_hard_do_not_judge() -> None:
    made = table()
    for stack in made["stacks"].values():
        for name in ("loss_hard_gates", "test_hard_gates"):
            if name in stack["values"]:
                stack["values"][name] = [0.5] * 10
    assert claims(made)[0]["verdict"] == "holds"


def test_gain_is_decades_of_loss_or_accuracy() -> None:
    made = table(loss=0.1, other_loss=0.001, accuracy=0.8, other=0.9)
    circle, images = ([made["stacks"][key(task, "soft", g)] for g in GATINGS] for task in ("author", "digits"))
    assert gain(*circle) == pytest.approx(np.full(10, 2.0))
    assert float(np.median(gain(*images))) == pytest.approx(0.1)


def test_left_out_tasks_are_not_judged() -> None:
    made = table()
    full = len(claims(made)[0]["parts"])
    made["left_out"] = {"relabelled-fashion": "missing"}
    assert len(claims(made)[0]["parts"]) == full - 2


# --- the study ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("quadratic")
    return folder, reproduce("smoke", runs=folder / "runs", results=folder, progress=lambda *_: None)


def test_results_hold_every_stack(smoke) -> None:
    folder, made = smoke
    assert json.loads((folder / "quadratic" / "smoke.json").read_text()) == made
    assert set(made["stacks"]) == {key(task, rule, g) for task, rule in pairs(made) for g in GATINGS}
    assert made["claims"][0]["verdict"] == "cannot tell"
    for name in figures.FIGURES:
        assert (folder / "quadratic" / "smoke" / f"{name}.png").is_file()


@pytest.mark.parametrize("task", ["pilot", "digits"])
def test_dynamics_are_distances_from_the_start(smoke, task: str) -> None:
    folder, made = smoke
    plan = next(plan for plan in trainings(SCALES["smoke"]) if plan.key == key(task, "soft", "quadratic"))
    run = Run(plan.folder(folder / "runs" / "quadratic"))
    moved = made["stacks"][plan.key]["dynamics"]
    steps = run.array_steps("tangent")
    assert moved["epochs"] == [step // plan.recipe.steps_per_epoch(len(plan.data)) for step in steps]
    first, last = (torch.from_numpy(run.array("tangent", step)).double() for step in (steps[0], steps[-1]))
    assert moved["tangent_distance"][0] == pytest.approx([0, 0], abs=1e-6)
    assert moved["tangent_distance"][-1] == pytest.approx(kernel_distance(last, first).tolist(), rel=1e-3, abs=1e-6)
    assert moved["tangent_change"][-1] == pytest.approx(relative_change(last, first).tolist(), rel=1e-3)


def test_figures_draw_what_was_measured(smoke) -> None:
    _, made = smoke
    with plots.style():
        drawn = {name: maker(made) for name, maker in figures.FIGURES.items()}
    dots = [line for line in drawn["gain"].axes[0].get_lines() if line.get_marker() == "o"]
    wanted = gain(*(made["stacks"][key("pilot", "soft", g)] for g in GATINGS))
    assert np.allclose(dots[0].get_ydata(), wanted)
    lines = {line.get_label(): line for line in drawn["learning"].axes[1].get_lines()}
    curve = made["stacks"][key("digits", "hard", "quadratic")]["curve"]
    assert np.allclose(lines["quadratic, hard gates"].get_ydata(), np.median(curve["values"], axis=1))


def test_seeds_and_bad_settings() -> None:
    other = settings_for("smoke", 3)
    assert (other.circles.seeds, other.pictures.seeds) == (3, 3)
    with pytest.raises(InputError, match="seeds"):
        settings_for("smoke", 0)
    with pytest.raises(InputError, match="digits"):
        Pictures(seeds=1, epochs=1, tasks=(("cats", 3),))
    with pytest.raises(InputError, match="at least 1"):
        Settings(Circles(seeds=0, epochs=1), SCALES["smoke"].pictures)


def test_committed_rows_follow_from_the_committed_table() -> None:
    made = json.loads((Path(__file__).parent.parent / "results" / "quadratic" / "paper.json").read_text())
    assert claims(made) == made["claims"]
    assert made["left_out"] == {}
