"""The loop: a stack is its members, looking changes nothing, the schedule is kept."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import cases
from unlazy import Circle, Dataset, InputError, Member, Recipe, Run, Scope, build, fit, tangent_kernel
from unlazy.models.gates import HardGate
from unlazy.models.spec import NetSpec, relu_spec
from unlazy.probes import standard
from unlazy.runtime import StoreError, stream
from unlazy.training.ensemble import batch_order, build_member_stack
from unlazy.training.recorder import FixedSteps, Measure

CIRCLE = Circle(n=80, bottom=5.0)
KINDS = {
    "relu": relu_spec(2, width=6, depth=3),
    "dlgn": NetSpec(2, width=6, depth=3),
    "pwc": NetSpec(2, experts="constant", width=6, depth=3),
    "pwc-frozen": NetSpec(2, experts="constant", train_gates=False, width=6, depth=3),
    "pwc-hard": NetSpec(2, experts="constant", gate=HardGate(10.0), width=6, depth=3),
    "quadratic": NetSpec(2, gating="quadratic", width=6, depth=3),
}


def recipe(spec: NetSpec, epochs: int = 20) -> Recipe:
    slopes = [None] * 3 if spec.gating == "own" else [4.0, 10.0, 30.0]
    members = tuple(
        Member(seed, lr, beta) for seed, lr, beta in zip((5, 5, 9), (3e-3, 1e-2, 1e-3), slopes, strict=True)
    )
    return Recipe(spec, members, epochs=epochs, batch=8, dtype="float64", checkpoint_epochs=7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_trains_like_its_members_one_by_one(kind: str, tmp_path: Path) -> None:
    """200 steps in float64 against PyTorch's own Adam on a plain network: 1e-10."""
    plan, data = recipe(KINDS[kind]), CIRCLE.dataset(torch.float64)
    run = fit(plan, data, [Measure(standard.portrait, FixedSteps.at([200]))], tmp_path / "run")
    for index, member in enumerate(plan.members):
        spec = KINDS[kind] if member.beta is None else KINDS[kind].with_beta(member.beta)
        net = build(spec, seed=member.seed, dtype=torch.float64)
        adam = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], member.lr)
        for epoch in range(20):
            order = torch.randperm(80, generator=stream(member.seed, "order", epoch))
            for batch in order.split(8):
                adam.zero_grad()
                (net(data.x[batch]) - data.y[batch]).square().mean().backward()
                adam.step()
        alone = net(data.x)[:, 0].detach().numpy()
        together = run.array("output", 200)[index]
        assert np.abs(together - alone).max() < 1e-10
        assert (
            np.abs(alone - build(spec, seed=member.seed, dtype=torch.float64)(data.x)[:, 0].detach().numpy()).max()
            > 0.01
        )


def test_looking_changes_nothing(tmp_path: Path) -> None:
    plan, data = recipe(KINDS["pwc"], epochs=5), CIRCLE.dataset(torch.float64)
    always = FixedSteps.at(range(51))
    looks = [
        Measure(probe, always) for probe in (standard.curves, standard.kernels, standard.portrait, standard.floors)
    ]
    blind, watched = fit(plan, data, [], tmp_path / "blind"), fit(plan, data, looks, tmp_path / "watched")
    (step, a), (other, b) = blind.last_checkpoint() or (0, {}), watched.last_checkpoint() or (1, {})
    assert step == other == 50
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_frozen_gates_do_not_move(tmp_path: Path) -> None:
    plan, data = recipe(KINDS["pwc-frozen"], epochs=5), CIRCLE.dataset(torch.float64)
    run = fit(plan, data, [Measure(standard.portrait, FixedSteps.at([0, 50]))], tmp_path / "run")
    assert np.array_equal(run.array("normals", 0), run.array("normals", 50))
    assert not np.array_equal(run.array("output", 0), run.array("output", 50))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    members = [Member(seed, 1e-3) for seed in (1, 2)]
    order = batch_order(members, 3, 10)
    assert torch.equal(order[1], batch_order(members[1:], 3, 10)[0])
    assert not torch.equal(order[0], batch_order(members, 4, 10)[0])
    assert sorted(order[0].tolist()) == list(range(10))


def test_measures_are_taken_when_due(tmp_path: Path) -> None:
    plan, data = recipe(KINDS["pwc"], epochs=4), CIRCLE.dataset(torch.float64)
    run = fit(plan, data, [Measure(standard.curves, FixedSteps.at([0, 7, 20]))], tmp_path / "run")
    steps, loss = run.scalars("loss")
    assert steps.tolist() == [0, 7, 20]
    assert loss.shape == (3, 3)
    assert run.status()["state"] == "finished"


def test_measures_are_known_by_what_they_do(tmp_path: Path) -> None:
    """Two lambdas have one name; a run with one of them is not taken for a run with the other."""
    plan, data, steps = recipe(KINDS["pwc"], epochs=2), CIRCLE.dataset(torch.float64), FixedSteps.at([0, 20])

    def measure(power: int) -> list[Measure]:
        return [Measure(lambda net, data: {"size": net(data.x).abs().pow(power).mean((1, 2))}, steps)]

    first = fit(plan, data, measure(1), tmp_path / "run")
    assert fit(plan, data, measure(1), tmp_path / "run").id == first.id
    with pytest.raises(StoreError, match="another"):
        fit(plan, data, measure(2), tmp_path / "run")


def test_a_finished_run_is_returned_untouched(tmp_path: Path) -> None:
    plan, data = recipe(KINDS["pwc"], epochs=2), CIRCLE.dataset(torch.float64)
    first = fit(plan, data, [], tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    fit(plan, data, [], tmp_path / "run")
    assert before == {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}


def test_schedules() -> None:
    assert sorted(FixedSteps.growing(20, per_octave=1).steps) == [0, 1, 2, 4, 8, 16, 20]
    assert sorted(FixedSteps.thinning(10, dense=4, stride=5, unit=2).steps) == [0, 2, 4, 5, 10]
    assert (FixedSteps.at([1]) | FixedSteps.at([2])).steps == {1, 2}


def test_scope_of_a_plain_module(tmp_path: Path) -> None:
    """Three lines around one's own loop, for any module."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    data = CIRCLE.dataset()
    net.train()
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    with Scope(net, probe=(data.x[::8], data.y[::8]), run=tmp_path / "mine", budget=math.inf) as scope:
        for step in range(5):
            scope.step(step, note=step)
            optimiser.zero_grad()
            (net(data.x) - data.y).square().mean().backward()
            optimiser.step()
    assert net.training
    run = Run(tmp_path / "mine")
    assert run.status()["state"] == "finished"
    assert run.scalars("loss")[0].tolist() == [0, 1, 2, 3, 4]
    assert run.scalars("note")[1].ravel().tolist() == [0, 1, 2, 3, 4]
    last = run.array("tangent", 4)
    assert last.shape == (1, 10, 10)
    assert not np.allclose(last[0], tangent_kernel(net, data.x[::8]).numpy())  # one more update was done since


def test_scope_of_a_gated_network_sees_paths(tmp_path: Path) -> None:
    net, data = cases.net("pwc"), CIRCLE.dataset(torch.float64)
    with Scope(net, probe=data, run=tmp_path / "mine") as scope:
        scope.step(0)
    run = Run(tmp_path / "mine")
    assert {"overlap", "tangent", "normals"} <= set(run.lines[0].arrays)
    assert {"loss_top", "paths_bottom", "loss_hard_gates"} <= set(run.lines[0].scalars)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Member(0, -1.0), "learning rate"),
        (lambda: Recipe(KINDS["pwc"], (), epochs=1), "at least one member"),
        (lambda: Recipe(KINDS["pwc"], (Member(0, 1e-3),), epochs=0), "epochs"),
        (lambda: Recipe(KINDS["pwc"], (Member(0, 1e-3),), epochs=1, dtype="float16"), "dtype"),
        (lambda: Circle(n=1), "at least 2"),
        (lambda: Circle(top=float("nan")), "half cycles"),
        (lambda: FixedSteps.growing(3, per_octave=0), "per_octave"),
    ],
)
def test_bad_recipes_are_refused(make, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()


def test_classes_and_targets_of_their_own(tmp_path: Path) -> None:
    """Cross-entropy with other labels for every member equals PyTorch's, member by member."""
    spec, x = NetSpec(2, 3, width=6, depth=2), CIRCLE.dataset(torch.float64).x
    labels = torch.stack([torch.randint(0, 3, (80,), generator=stream(k, "labels")) for k in range(2)])
    data = Dataset("labels", x, torch.nn.functional.one_hot(labels, 3).double())
    plan = Recipe(spec, (Member(1, 1e-2), Member(2, 1e-2)), epochs=3, batch=16, dtype="float64", loss="cross-entropy")
    steps, kept = fit(plan, data, [], tmp_path / "run").last_checkpoint() or (0, {})
    assert steps == 15
    for index, seed in enumerate((1, 2)):
        net = build(spec, seed=seed, dtype=torch.float64)
        adam = torch.optim.Adam(net.parameters(), 1e-2)
        for epoch in range(3):
            for batch in torch.randperm(80, generator=stream(seed, "order", epoch)).split(16):
                adam.zero_grad()
                nn.functional.cross_entropy(net(x[batch]), labels[index, batch]).backward()
                adam.step()
        for name, parameter in net.named_parameters():
            assert np.abs(kept[f"model/{name}"][index] - parameter.detach().numpy()).max() < 1e-10


def test_a_training_goes_on_from_the_checkpoint_of_another(tmp_path: Path) -> None:
    """Kept epochs exist; begun from the first checkpoint a training repeats itself; network and optimiser are carried over."""
    data = CIRCLE.dataset(torch.float64)
    long = fit(replace(recipe(KINDS["pwc"], 10), checkpoints_at=(4,)), data, [], tmp_path / "long")
    start = long.checkpoint(40)
    again = fit(recipe(KINDS["pwc"], 4), data, [], tmp_path / "again", start=long.checkpoint(0))
    assert all(np.array_equal(start[name], value) for name, value in again.checkpoint(40).items())
    on = fit(recipe(KINDS["pwc"], 6), data, [], tmp_path / "on", start=start)
    assert int(on.checkpoint(60)["optim/steps"][0]) == 100
    fresh = fit(recipe(KINDS["pwc"], 6), data, [], tmp_path / "fresh", start=gate_numbers(start))
    assert on.id != fresh.id
    first = fresh.checkpoint(0)
    assert np.array_equal(first["model/gate_layers.0.weight"], start["model/gate_layers.0.weight"])
    assert not np.array_equal(first["model/readout.weight"], start["model/readout.weight"])
    with pytest.raises(InputError, match="no 'model/nonsense'"):
        fit(recipe(KINDS["pwc"], 6), data, [], tmp_path / "bad", start={"model/nonsense": np.zeros(1)})


def gate_numbers(checkpoint: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value for name, value in checkpoint.items() if name.startswith("model/gate_layers")}


def test_replayed_gates_are_frozen_gates(tmp_path: Path) -> None:
    """Gates handed over as numbers train the experts exactly as the frozen gating network that made them."""
    data, plan = CIRCLE.dataset(torch.float64), recipe(KINDS["pwc-frozen"], 5)
    frozen = fit(plan, data, [], tmp_path / "frozen")
    made = build_member_stack(plan.model, plan.members, torch.float64).gates(data.x)
    open_spec = replace(plan, model=replace(plan.model, train_gates=True))
    replayed = fit(open_spec, data, [], tmp_path / "replayed", gates=[gate.detach() for gate in made])
    for name, value in frozen.checkpoint(50).items():
        assert np.array_equal(value, replayed.checkpoint(50)[name])
