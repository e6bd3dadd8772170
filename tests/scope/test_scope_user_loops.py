"""Uses a scope meets in the wild: odd loops, odd models, odd numbers. None may break the training or give a wrong number."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.optimizer import _global_optimizer_pre_hooks

from unlazy import InputError, Run, Scope, record
from unlazy.kernels.compare import centered_alignment
from unlazy.scope import history as histories
from unlazy.scope.history import History
from unlazy.scope.schedule import Budget, Pace, Planner
from unlazy.scope.summary import TrainingSummary, summarise
from unlazy.scope.verdict import judge

ALWAYS = float("inf")


def train(net: nn.Module, x: Tensor, y: Tensor, scope: Scope, steps: object, lr: float = 0.3) -> None:
    optimiser = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr)
    for step in steps:  # type: ignore[attr-defined]
        optimiser.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimiser.step()
        scope.step(step, batch_loss=loss)


def jacobian(net: nn.Module, x: Tensor) -> Tensor:
    """Rows of every sample and output by every trained parameter, one gradient at a time."""
    trained = [p for p in net.parameters() if p.requires_grad]
    rows = []
    for one in x:
        for score in net(one[None])[0]:
            found = torch.autograd.grad(score, trained, allow_unused=True, retain_graph=True)
            both = zip(found, trained, strict=True)
            rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in both]))
    return torch.stack(rows).unflatten(0, (len(x), -1))


# --- loops ---------------------------------------------------------------------------------------------------


def test_steps_may_be_any_whole_number(mlp) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    train(net, x, y, scope, [1, np.int64(2), torch.tensor(3), 4.0])
    assert scope.history.steps == [0, 1, 2, 3, 4]
    for wrong in (4.5, "5", None, float("nan"), torch.ones(2)):
        with pytest.raises(InputError, match="number of updates"):
            scope.step(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [0, 1])
def test_steps_that_begin_anew_every_epoch_are_counted_on(mlp, first: int) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    train(net, x, y, scope, range(first, first + 4))
    with pytest.warns(UserWarning, match="count updates over the whole training") as caught:
        train(net, x, y, scope, [*range(first, first + 4), *range(first, first + 4)])
    assert len(caught) == 1
    scope.finish()
    assert scope.history.steps[-1] == 12
    moved = sum(float((p - p0).square().sum()) for p, p0 in pairs(net, scope))
    size = sum(float(p0.square().sum()) for _, p0 in pairs(net, scope))
    assert scope.history.last("parameter_motion") == pytest.approx((moved / size) ** 0.5, rel=1e-9)


def pairs(net: nn.Module, scope: Scope) -> list[tuple[Tensor, Tensor]]:
    assert scope._session is not None
    start = scope._session.measurements.start.parameters
    return [(p.detach(), start[name]) for name, p in net.named_parameters()]


def test_what_is_not_a_number_is_dropped_alone(mlp) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    told = {"rate": None, "name": "sgd", "both": [1, 3], "loss_now": torch.tensor(2.0, requires_grad=True)}
    with pytest.warns(UserWarning, match="is not a number") as caught:
        scope.step(1, **told)
    assert len(caught) == 2
    scope.step(2, **told)
    assert scope.history.last("both") == 2.0
    assert scope.history.last("loss_now") == 2.0
    assert not {"rate", "name"} & scope.history.scalars.keys()


def test_a_loss_does_not_keep_its_graph_alive(mlp) -> None:
    net, x, y = mlp
    scope = Scope(net, (x, y), budget=1e-9)
    scope._session.budget.grace = 0.0  # type: ignore[union-attr]
    train(net, x, y, scope, range(1, 3))
    assert scope._session.pending.scalars["batch_loss"].grad_fn is None  # type: ignore[union-attr,index]


def test_told_by_a_hook_of_the_model_it_does_not_look_while_looking(mlp) -> None:
    net, x, y = mlp
    scope, calls = Scope(net, (x, y), budget=ALWAYS, strict=True), [0]

    def tell(*_: object) -> None:
        calls[0] += 1
        scope.step(calls[0])

    net.register_forward_hook(tell)
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()
    scope.finish()
    assert len(scope.history.steps) == 4
    assert scope.history.left_out == {}


def test_told_during_a_backward_pass_it_leaves_gradients_alone(mlp) -> None:
    net, x, y = mlp
    twin, gradients = copy.deepcopy(net), []
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    net[0].weight.register_post_accumulate_grad_hook(lambda _: scope.step(1))
    for one in (net.eval(), twin.eval()):
        F.cross_entropy(one(x), y).backward()
        gradients.append([p.grad.clone() for p in one.parameters()])
    assert scope.history.steps == [0, 1]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_an_old_error_at_a_prompt_does_not_fail_a_forgotten_scope(mlp, tmp_path: Path, monkeypatch) -> None:
    net, x, y = mlp
    monkeypatch.setattr(sys, "last_value", ValueError("a typo, hours ago"), raising=False)
    scope = Scope(net, (x, y), tmp_path / "run", budget=1e-9)
    scope._session.budget.grace = 0.0  # type: ignore[union-attr]
    train(net, x, y, scope, range(1, 9))
    del scope
    gc.collect()
    run = Run(tmp_path / "run")
    assert run.status()["state"] == "finished"
    assert run.lines[-1].step == 8


def test_copies_hold_what_was_seen_and_write_nothing(mlp, tmp_path: Path) -> None:
    net, x, y = mlp
    net.scope = Scope(net, (x, y), tmp_path / "run", budget=ALWAYS, strict=True)
    train(net, x, y, net.scope, range(1, 5))
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        train(twin, x, y, twin.scope, range(5, 8))
        assert twin.scope.history.steps == [0, 1, 2, 3, 4]
        assert twin.scope.verdict().to_dict() == net.scope.verdict().to_dict()
        assert "does not measure" in repr(twin.scope)
        twin.scope.finish()
    net.scope.finish()
    run = Run(tmp_path / "run")
    assert [line.step for line in run.lines] == [0, 1, 2, 3, 4]
    assert run.status()["state"] == "finished"


# --- models --------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A frozen layer and a low-rank one beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=torch.float64) / 3)
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=torch.float64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def changed(net: nn.Sequential, how: str) -> nn.Sequential:
    torch.manual_seed(0)
    if how == "adapters":
        net[0], net[3], net[6] = (Adapter(net[i]) for i in (0, 3, 6))  # type: ignore[arg-type]
        return net
    wrap = {"weight norm": parametrizations.weight_norm, "spectral norm": parametrizations.spectral_norm}
    wrap |= {"old weight norm": nn.utils.weight_norm, "old spectral norm": nn.utils.spectral_norm}
    for number in (0, 3):
        wrap[how](net[number])
    return net


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("how", ["adapters", "weight norm", "old weight norm", "spectral norm", "old spectral norm"])
def test_rebuilt_layers_have_the_kernel_of_their_own_parameters(mlp, how: str) -> None:
    net, x, y = mlp
    changed(net, how)
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    train(net, x, y, scope, range(1, 3))
    rows = jacobian(net.eval(), x)
    expected = torch.einsum("iop,jop->ij", rows, rows)
    assert torch.allclose(torch.from_numpy(scope.history.array("tangent")).double(), expected, rtol=1e-5)


def test_a_network_whose_head_alone_trains_is_lazy(mlp) -> None:
    """It is linear in what trains, however far that goes."""
    _, x, _ = mlp
    y = x[:, :3].argmax(1)
    wide = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 3)).double()
    wide[0].requires_grad_(False)
    x, y = x.repeat(2, 1), y.repeat(2)
    scope = Scope(wide, (x, y), budget=ALWAYS, strict=True)
    train(wide, x, y, scope, range(1, 60), lr=1.0)
    scope.finish()
    assert scope.history.last("parameter_motion") > 0.5
    assert "none of its gates depends" in scope.history.left_out["gate_flips"]
    assert scope.verdict().label == "lazy"


def test_gates_that_cannot_move_do_not_count(mlp) -> None:
    """A frozen copy beside the network must not halve the share of gates that flipped."""
    net, x, y = mlp

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.body = copy.deepcopy(net).requires_grad_(False), net

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) - self.start(x)

    model = Centred()
    before = [gate.open for gate in record(net, x)]
    scope = Scope(model, (x, y), budget=ALWAYS, strict=True)
    train(model, x, y, scope, range(1, 5))
    flipped = torch.cat([a.open != b for a, b in zip(record(net, x), before, strict=True)], dim=1)
    assert float(flipped.double().mean()) > 0
    assert scope.history.last("gate_flips") == pytest.approx(float(flipped.double().mean()))


def test_parameters_that_begin_to_train_later_are_counted_from_their_start(mlp) -> None:
    """Those that are unfrozen had not moved, so the network linearised at the start is one in all parameters."""
    net, x, y = mlp
    start = copy.deepcopy(net)
    net[0].requires_grad_(False)
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    train(net, x, y, scope, range(1, 3))
    net[0].requires_grad_(True)
    train(net, x, y, scope, range(3, 6))
    start.eval(), net.eval()
    before = {name: p.detach() for name, p in start.named_parameters()}
    moves = {name: p.detach() - before[name] for name, p in net.named_parameters()}
    assert float(moves["0.weight"].abs().max()) > 0
    first, change = torch.func.jvp(lambda values: torch.func.functional_call(start, values, x), (before,), (moves,))
    out = net(x).detach()
    expected = float((out - first - change).norm() / (out - first).norm())
    assert scope.history.last("linearisation_error") == pytest.approx(expected, rel=1e-3)
    sizes = [sum(float(p.double().square().sum()) for p in some.values()) for some in (moves, before)]
    assert scope.history.last("parameter_motion") == pytest.approx((sizes[0] / sizes[1]) ** 0.5, rel=1e-5)
    assert any("0.weight and 1 more parameters train from step 3 on" in note for note in scope.history.notes)
    hooks = len(_global_optimizer_pre_hooks)
    scope.finish()
    assert len(_global_optimizer_pre_hooks) == hooks - 1


def test_parameters_that_changed_while_nobody_saw_end_the_scope(mlp) -> None:
    net, x, y = mlp
    net[0].requires_grad_(False)
    scope = Scope(net, (x, y), budget=ALWAYS)
    train(net, x, y, scope, range(1, 3))
    net[0].requires_grad_(True)
    with torch.no_grad():
        net[0].weight.mul_(2)
    with pytest.warns(UserWarning, match="0.weight did not train when the scope was made and has changed since"):
        train(net, x, y, scope, range(3, 6))
    assert scope.history.steps == [0, 1, 2]


def test_complex_parameters_are_refused() -> None:
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wave, self.bias = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64)), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.wave).abs() + self.bias

    with pytest.raises(InputError, match="wave: tangents by complex parameters"):
        Scope(Wave(), (torch.randn(8, 4), torch.arange(8) % 3))


def test_several_answers_a_sample_may_be_given_as_whole_numbers(mlp) -> None:
    net, x, _ = mlp
    answers = torch.rand(len(x), 3) > 0.5
    losses = [Scope(net, (x, y), strict=True).history.last("loss") for y in (answers, answers.long(), answers.double())]
    assert losses[0] == losses[1] == losses[2]


def test_a_pair_of_tensors_is_asked_about_in_its_own_words() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), x

    with pytest.raises(InputError, match=r"tuple of 2 with .* say which .* out\[0\]"):
        Scope(Pair(3, 2), (torch.randn(6, 3), torch.arange(6) % 2))


# --- how much is kept ----------------------------------------------------------------------------------------


def test_a_noisy_training_is_measured_a_bounded_number_of_times() -> None:
    pace, seen = Pace(), 0
    for step in range(50_000):
        if pace.is_due(step):
            seen += 1
            pace.note_measured(step, change=1.0)
    assert 100 < seen < 500


@pytest.mark.parametrize(("cost", "last"), [(0.001, 60), (0.01, 100), (0.016, 16)])
def test_the_grace_reaches_beyond_the_first_steps(cost: float, last: int) -> None:
    """Training that takes no time: only the tenth of a second pays that every training may spend."""
    planner, spent = Planner(Budget(0.05, costs={"all": cost}), frozenset()), []
    planner.spread_grace(cost)
    planner.note_measured(0, ["all"], 1.0)
    for step in range(1, 2000):
        if planner.due(step, ["all"], trained=1e-6 * step):
            planner.budget.spent += cost
            planner.note_measured(step, ["all"], 0.05)
            spent.append(step)
    assert spent[:2] == [1, 2]
    assert spent[-1] >= last
    assert cost * (len(spent) + 1) <= 0.1 + 0.2 * 0.002


def test_memory_is_thinned_when_it_outgrows_its_room(monkeypatch) -> None:
    monkeypatch.setattr(histories, "MOST_ARRAY_BYTES", 8 * 8 * 100)
    history = History(keep_all=True)
    for step in range(40):
        history.add(step, {"loss": 1.0}, {"output": np.zeros(100)})
    kept = sorted(history.arrays["output"])
    assert kept[0] == 0
    assert kept[-1] == 39
    assert 4 <= len(kept) <= 8
    assert len(history.scalars["loss"]) == 40


# --- summaries -----------------------------------------------------------------------------------------------


def partly_measured(mlp, monkeypatch, tmp_path: Path) -> tuple[Scope, nn.Module, Tensor, Tensor]:
    """Looks that take 12 of 30 samples; groups that are not the classes and do not cover all."""
    net, x, y = mlp
    monkeypatch.setattr("unlazy.scope.measurements.MEASURE_SECONDS", 0.0)
    monkeypatch.setattr("unlazy.scope.measurements.LEAST_ROWS", 12)
    groups = {"some": [0, 1, 2, 3, 4, 5], "more": list(range(4, 20))}
    scope = Scope(net, (x, y), tmp_path / "run", budget=ALWAYS, strict=True, groups=groups)
    train(net, x, y, scope, range(1, 12), lr=1.0)
    scope.finish()
    return scope, net, x, y


def test_summaries_are_of_the_samples_a_measurement_was_taken_on(mlp, monkeypatch, tmp_path: Path) -> None:
    scope, _, _, y = partly_measured(mlp, monkeypatch, tmp_path)
    history = scope.history
    found = summarise(history)
    assert found.interval is not None
    assert found.interval[0] <= found.measures["linearisation_error"] <= found.interval[1]
    rows = history.rows["tangent"]
    assert len(rows) == 12
    targets = F.one_hot(y[rows]).double()
    ends = [
        float(centered_alignment(torch.from_numpy(history.array("tangent", first=first)).double(), targets))
        for first in (True, False)
    ]
    assert found.measures["alignment_gain"] == pytest.approx(ends[1] - ends[0], abs=1e-5)
    again = summarise(History.from_run(Run(tmp_path / "run")))
    assert again.measures == pytest.approx(found.measures)
    assert again.interval == pytest.approx(found.interval)


def test_outputs_seen_later_than_the_linearisation_give_no_interval() -> None:
    history, random = History(), np.random.default_rng(0)
    for step in (0, 5):
        out = random.normal(size=(40, 2))
        linear = out + 0.1 * random.normal(size=(40, 2))
        first = history.array("output", first=True) if history.steps else out
        error = np.linalg.norm(out - linear) / max(np.linalg.norm(out - first), 1e-9)
        history.add(step, {"linearisation_error": error if step else 0.0}, {"output": out, "linear": linear})
    assert summarise(history).interval is not None
    history.add(9, {"loss": 1.0}, {"output": random.normal(size=(40, 2))})
    assert summarise(history).interval is None


def test_groups_may_overlap_and_leave_samples_out(mlp, monkeypatch, tmp_path: Path) -> None:
    scope, _, x, _ = partly_measured(mlp, monkeypatch, tmp_path)
    view, rows = summarise(scope.history).groups, set(scope.history.rows["tangent"])
    assert view["some"]["share"] == 6 / len(x)
    assert view["more"]["share"] == 16 / len(x)
    assert view["more"]["kernel_share"] == len(rows & set(range(4, 20))) / 12
    about = scope.verdict().groups["more"]
    assert about["mass_per_share"] == pytest.approx(about["mass_last"] / about["kernel_share"])


def test_a_constant_kernel_has_no_alignment_and_says_nothing_about_it() -> None:
    net = nn.Sequential(nn.Linear(3, 2)).double()
    net[0].weight.requires_grad_(False)
    x, y = torch.randn(40, 3).double(), torch.arange(40) % 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scope = Scope(net, (x, y), budget=ALWAYS)
        train(net, x, y, scope, range(1, 4))
        scope.finish()
        assert scope.verdict().label in ("lazy", "cannot tell")


# --- the verdict's words -------------------------------------------------------------------------------------


def words(**changes: object) -> TrainingSummary:
    measures = {"linearisation_error": 0.02, "tangent_change": 0.002}
    given: dict[str, object] = {"losses": (2.0, 0.2, 0.2), "samples": 128, "measurements": 9} | changes
    return TrainingSummary(given.pop("measures", measures), **given)  # type: ignore[arg-type]


def test_a_group_that_learns_nothing_is_named() -> None:
    groups = {
        "eights": {"share": 0.5, "loss_first": 2.0, "loss_last": 1.9},
        "sevens": {"share": 0.5, "loss_first": 2.0, "loss_last": 0.1},
    }
    said = str(judge(words(groups=groups)))
    assert "Left behind: eights (loss 2 to 1.9)." in said
    assert "sevens" not in said


def test_a_lazy_network_that_was_elsewhere_in_between_is_not_said_to_have_left() -> None:
    curves = {"linearisation_error": {0: 0.0, 5: 0.4, 50: 0.02}}
    verdict = judge(words(curves=curves))
    assert verdict.label == "lazy"
    assert verdict.when_text().startswith("Mixed until some step between 5 and 50")
    assert verdict.when_text().endswith(", lazy since.")


def test_notes_stand_in_the_verdict() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    x, y = torch.randn(40, 4), torch.arange(40) % 3
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    train(net, x, y, scope, range(1, 4))
    scope.finish()
    verdict = scope.verdict()
    assert any("batch-norm" in note for note in verdict.notes)
    assert "batch-norm" in str(verdict)
    assert "batch-norm" in verdict._repr_html_()


def test_a_loop_that_tells_before_its_update_ends_with_the_network_it_made() -> None:
    """The last measurement belongs to the last update, not to the step told before it; a number told keeps its own step."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(16, 2)
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    scope = Scope(net, (x, x[:, :1]), budget=1e-9, strict=True)
    scope._session.budget.grace = 0.0
    for step in range(4):
        scope.step(step, note=step)
        optimiser.zero_grad()
        (net(x) - x[:, :1]).square().mean().backward()
        optimiser.step()
    scope.finish()
    assert scope.history.steps[-1] == 4
    assert scope.history.scalars["note"][3] == 3
    np.testing.assert_allclose(scope.history.arrays["output"][4], net(x).detach().numpy(), rtol=1e-6)


# --- frameworks that are not there ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapter", "package"), [("lightning", "lightning"), ("huggingface", "transformers"), ("skorch", "skorch")]
)
def test_an_adapter_without_its_framework_says_what_to_install(adapter: str, package: str, monkeypatch) -> None:
    home = f"unlazy.scope.adapters.{adapter}"
    monkeypatch.delitem(sys.modules, home, raising=False)
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=f"`pip install {package}` brings it") as caught:
        importlib.import_module(home)
    assert isinstance(caught.value, ImportError)  # so that `except ImportError` still means what it says
