"""The scope around a training loop: what it keeps, and what it refuses before training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scope_nets
from scope_nets import loop
from unlazy import InputError, Run, Scope, StoreError, kernel_distance, tangent_kernel
from unlazy.data.dataset import Dataset
from unlazy.models.build import build_stack
from unlazy.models.spec import relu_spec
from unlazy.scope.history import History

HERE = Path(__file__).parent
ALWAYS = float("inf")


# --- what is kept --------------------------------------------------------------------------------------------


def test_a_run_holds_what_the_contract_says(mlp, tmp_path: Path) -> None:
    net, x, y = mlp
    with Scope(net, (x, y), tmp_path / "run", budget=ALWAYS, strict=True) as scope:
        loop(net, x, y, scope, range(1, 11))
    run = Run(tmp_path / "run")
    assert run.header["kind"] == "scope"
    assert run.status() == {"state": "finished", "step": 10, "error": None}
    about = run.header["recipe"]["scope"]
    assert about["views"] == ["paths", "tangents", "neurons"]
    assert about["layers"] == ["0", "3", "6"]
    assert about["groups"]["1"] == list(range(1, 30, 3))
    assert about["left_out"] == {}
    assert (about["probe_kind"], about["image_shape"], about["budget"]) == ("vectors", None, None)
    every = {"loss", "accuracy", "parameter_motion", "linearisation_error", "gate_flips", "paths", "agop_correlation"}
    for kernel in ("tangent", "overlap"):
        every |= {f"{kernel}_distance", f"{kernel}_velocity", f"{kernel}_alignment", f"{kernel}_rank"}
    every |= {
        "tangent_change",
        "overhead",
        "batch_loss",
        "loss_0",
        "paths_1",
        "tangent_mass_2",
        "alignment_0",
        "alignment@3",
    }
    last = run.lines[-1]
    assert last.step == 10
    assert every <= last.scalars.keys()
    shapes = {name: run.array(name, 10).shape for name in last.arrays}
    assert shapes["tangent"] == shapes["overlap"] == (1, 30, 30)
    assert shapes["output"] == shapes["linear"] == (1, 30, 3)
    assert (shapes["paths"], shapes["neurons"], shapes["neuron_norms"]) == ((1, 30), (1, 12, 5), (1, 12))
    assert np.array_equal(run.array("probe_x", 0)[0], x.float().numpy())
    assert run.array("probe_y", 0)[0].tolist() == y.tolist()
    assert run.array_steps("probe_x") == [0]
    now = tangent_kernel(net.eval(), x)
    assert np.allclose(run.array("tangent", 10)[0], now.numpy(), rtol=1e-5)
    distance = kernel_distance(now, torch.from_numpy(run.array("tangent", 0)[0]).double())
    assert run.scalars("tangent_distance")[1][-1, 0] == pytest.approx(float(distance), abs=1e-9)
    again = History.from_run(run)
    assert again.scalars.keys() == scope.history.scalars.keys()
    assert again.last("loss") == scope.history.last("loss")


def test_memory_only_keeps_every_array(mlp) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    loop(net, x, y, scope, range(1, 5))
    assert list(scope.history.arrays["tangent"]) == [0, 1, 2, 3, 4]
    assert scope.history.array("tangent", first=True) is scope.history.arrays["tangent"][0]


def test_steps_before_and_after_the_update(mlp, tmp_path: Path) -> None:
    """Loops that tell before their update, after it counting from 1, and after it counting from 0 all mean the same."""
    states = {}
    for style in ("before", "from one", "from zero"):
        net, x, y = scope_nets.build("mlp")
        net.eval()
        scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
        optimiser = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(4):
            if style == "before":
                scope.step(step, note=step)
            optimiser.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimiser.step()
            if style != "before":
                scope.step(step + (style == "from one"), note=step)
        states[style] = scope.history.scalars["loss"]
        steps = [0, 1, 2, 3] if style == "before" else [0, 1, 2, 3, 4]
        assert list(states[style]) == steps, style
        assert list(scope.history.scalars["note"]) == (steps if style == "before" else steps[1:])
    assert states["from one"] == states["from zero"]
    assert states["from one"] | states["before"] == states["from one"]


def test_the_users_numbers_stand_beside_the_scopes(mlp) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    scope.step(1, loss=torch.tensor(7.0, requires_grad=True), rate=3)
    assert scope.history.last("train_loss") == 7.0
    assert scope.history.last("rate") == 3.0
    assert scope.history.last("loss") != 7.0


def test_first_and_last_step_are_always_measured(mlp, tmp_path: Path) -> None:
    net, x, y = mlp
    with Scope(net, (x, y), tmp_path / "run", budget=1e-9, strict=True) as scope:
        scope._session.budget.grace = 0.0
        loop(net, x, y, scope, range(1, 30))
    assert list(scope.history.scalars["tangent_distance"]) == [0, 29]
    assert [line.step for line in Run(tmp_path / "run").lines] == [0, 29]
    assert scope.overhead()["skipped"] >= 1


def test_views_are_chosen(mlp) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), views=("neurons",), strict=True)
    assert {"neurons", "loss"} <= scope.history.arrays.keys() | scope.history.scalars.keys()
    assert not any("tangent" in name or "paths" in name for name in scope.history.scalars)
    assert Scope(net, (x, y), views="neurons").history.scalars.keys() == scope.history.scalars.keys()
    with pytest.raises(InputError, match=r"views are among .*; got dreams"):
        Scope(net, (x, y), views="dreams")


def test_a_data_set_brings_its_groups(tmp_path: Path) -> None:
    x = torch.randn(12, 2)
    data = Dataset("halves", x, x[:, :1], groups={"left": x[:, 0] < 0, "right": x[:, 0] >= 0})
    scope = Scope(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), data, tmp_path / "run", strict=True)
    assert {"loss_left", "paths_right", "tangent_mass_left"} <= scope.history.scalars.keys()
    assert Run(tmp_path / "run").header["recipe"]["scope"]["probe_kind"] == "points2d"


# --- clear words at construction -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda net, x, y: Scope(net, (x, y), budget=0.0), "budget must be a positive share"),
        (lambda net, x, y: Scope(net, (x, y), budget=5.0), "5 times the training time; say 0.05 for 5 %"),
        (lambda net, x, y: Scope(net.requires_grad_(False), (x, y)), "no trainable parameters"),
        (lambda net, x, y: Scope(nn.LazyLinear(3), (x, y)), "call the model once"),
        (lambda net, x, y: Scope(nn.LSTM(5, 3), (x[:, None], y)), "say which tensor counts|one row of scores"),
        (lambda net, x, y: Scope(build_stack(relu_spec(5, 3, width=4, depth=1), [0, 1]), (x, y)), "stack"),
        (lambda net, x, y: Scope(net, (x, y), output=lambda out: 3), "must return a tensor"),
        (lambda net, x, y: Scope(net, (x, y), output=lambda out: out.argmax(1)), "real numbers"),
        (lambda net, x, y: Scope(net, (x, y), output=lambda out: out.mean(0)), "one row per sample"),
        (lambda net, x, y: Scope(net, (x[:, :4], y)), r"x, torch.float64 \[30, 4\]: mat1 and mat2 .*30x4 and 5x12"),
        (lambda net, x, y: Scope(net, ((x, x), y)), r"torch.float64 \[30, 5\], torch.float64 \[30, 5\]: .*argument"),
        (lambda net, x, y: Scope(net, ({"x": x}, y)), r"x torch.float64 \[30, 5\]: .*unexpected keyword argument"),
        (lambda net, x, y: Scope(nn.Embedding(3, 3), (x.abs().long() + 3, y)), r"torch.int64 \[30, 5\]: index out of"),
    ],
)
def test_what_cannot_be_watched_is_refused_before_training(mlp, make, says: str) -> None:
    net, x, y = mlp
    with pytest.raises(InputError, match=says):
        make(net, x, y)


def test_a_folder_of_another_scope_is_refused(mlp, tmp_path: Path) -> None:
    net, x, y = mlp
    Scope(net, (x, y), tmp_path / "run", strict=True).finish()
    with pytest.raises(StoreError, match="another model, probe set or choice of views"):
        Scope(net, (x[:20], y[:20]), tmp_path / "run")
    with pytest.raises(StoreError, match="not a run and not empty"):
        Scope(net, (x, y), HERE)


def test_a_probe_in_another_precision_is_brought_to_the_model(mlp) -> None:
    net, x, y = mlp
    scope = Scope(net, (x.float(), y), strict=True)
    assert scope.history.array("output").dtype == np.float64


def test_a_model_that_moves_is_followed(mlp) -> None:
    """Another precision stands for another device, which not every machine has."""
    net, x, y = mlp
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    loop(net, x, y, scope, range(1, 3))
    net.float()
    scope.step(3)
    assert list(scope.history.scalars["linearisation_error"]) == [0, 1, 2, 3]
    assert scope.history.array("output").dtype == np.float32
    assert scope.history.last("tangent_distance") == pytest.approx(
        scope.history.scalars["tangent_distance"][2], abs=1e-4
    )
