"""Models and targets as people train them: a scope's numbers are right on them, or it says what it does not know."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.utils.checkpoint import checkpoint

from unlazy import InputError, Scope
from unlazy.kernels.compare import relative_change
from unlazy.kernels.reference import tangent_kernel as slow_tangent_kernel
from unlazy.store import Run

ALWAYS = float("inf")


def steps(net: nn.Module, x: Tensor, y: Tensor, scope: Scope, lr: float, count: int = 8) -> None:
    """Train by SGD on batches of 16 in training mode, and report every step."""
    random, optimiser = torch.Generator().manual_seed(3), torch.optim.SGD(net.parameters(), lr)
    for step in range(1, count + 1):
        batch = torch.randint(len(x), (16,), generator=random)
        optimiser.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimiser.step()
        scope.step(step)
    scope.finish()


# --- batch-norm ----------------------------------------------------------------------------------------------


def normalised_net() -> tuple[nn.Module, Tensor, Tensor]:
    """A convolutional network with batch-norms, and images whose mean and scale are far from 0 and 1."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 2),
    ).double()
    x = 3 * torch.randn(40, 1, 4, 4, dtype=torch.float64) + 2
    return net, x, (x[:, 0, 0, 0] > x[:, 0, 1, 1]).long()


def test_running_statistics_that_settle_are_not_feature_learning() -> None:
    net, x, y = normalised_net()
    first = copy.deepcopy(net)
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    steps(net, x, y, scope, lr=1e-7)
    assert (net[1].running_mean - first[1].running_mean).norm() > 0.3  # type: ignore[operator]
    with torch.no_grad():
        went = (net.eval()(x) - first.eval()(x)).norm() / first(x).norm()
    assert went > 0.1  # the outputs of evaluation mode moved, by the statistics alone
    history = scope.history
    for name in ("linearisation_error", "tangent_change", "tangent_distance", "overlap_distance", "gate_flips"):
        assert history.scalars[name][8] < 1e-3, name


def test_network_and_start_are_compared_with_the_same_statistics() -> None:
    net, x, y = normalised_net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    steps(net, x, y, scope, lr=0.3)
    found = scope.history.scalars
    start = copy.deepcopy(net)  # with the statistics of now
    start.load_state_dict(before, strict=False)
    kernels = [slow_tangent_kernel(each.eval(), x).diagonal(dim1=2, dim2=3).sum(-1) for each in (net, start)]
    assert found["tangent_change"][8] == pytest.approx(float(relative_change(*kernels)), rel=1e-9)
    for norm in (net[1], net[4]):  # in training a batch-norm normalises by the batch at hand: by the probe set here
        norm.running_mean = norm.running_var = None
    moves = {name: p.detach() - before[name] for name, p in net.named_parameters()}
    f_0, change = jvp(lambda at: functional_call(net, at, (x,)), (before,), (moves,))
    with torch.no_grad():
        f_now = net(x)
    error = float((f_now - f_0 - change).norm() / (f_now - f_0).norm())
    assert found["linearisation_error"][8] == pytest.approx(error, rel=1e-9)
    assert error > 0.1


def test_a_frozen_batch_norm_keeps_its_statistics() -> None:
    """Fine-tuning in evaluation mode: nothing normalises by the probe set."""
    net, x, y = normalised_net()
    net.eval()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    steps(net, x, y, scope, lr=0.3)
    moves = {name: p.detach() - before[name] for name, p in net.named_parameters()}
    f_0, change = jvp(lambda at: functional_call(net, at, (x,)), (before,), (moves,))
    with torch.no_grad():
        f_now = net(x)
    error = float((f_now - f_0 - change).norm() / (f_now - f_0).norm())
    assert scope.history.scalars["linearisation_error"][8] == pytest.approx(error, rel=1e-9)


def test_samples_that_meet_in_a_batch_are_linearised_in_the_same_batches(monkeypatch) -> None:
    monkeypatch.setattr("unlazy.kernels.jacobian.JVP_SAMPLES", 8)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Tanh(), nn.Linear(6, 3))
    net.double()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    x, y = torch.randn(25, 4).double(), torch.arange(25) % 3
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True, views=("tangents",))
    steps(net, x, y, scope, lr=0.3)
    moves = {name: p.detach() - before[name] for name, p in net.named_parameters()}
    parts = [jvp(lambda at, b=b: functional_call(net, at, (b,)), (before,), (moves,)) for b in x.split(7)]
    f_0, change = (torch.cat(side) for side in zip(*parts, strict=True))
    f_now = torch.cat([net(b).detach() for b in x.split(7)])  # four batches of about the same size
    error = float((f_now - f_0 - change).norm() / (f_now - f_0).norm())
    assert scope.history.scalars["linearisation_error"][8] == pytest.approx(error, rel=1e-9)


# --- randomness of training ----------------------------------------------------------------------------------


class Dropped(nn.Module):
    """Dropout in two ways; ``always``: also in evaluation mode."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.first, self.drop, self.last, self.always = nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 2), always

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.drop(self.first(x).relu()), 0.5, self.training or self.always))


def test_dropout_is_off_in_all_measures_and_nothing_is_drawn() -> None:
    x, y = torch.randn(40, 4), torch.arange(40) % 2
    found = []
    for watched in (True, False):
        torch.manual_seed(0)
        net = Dropped()
        plain = copy.deepcopy(net).eval()
        scope = Scope(net, (x, y), budget=ALWAYS, strict=True) if watched else None
        assert net.training
        optimiser = torch.optim.SGD(net.parameters(), 1e-3)
        for step in range(1, 4):
            optimiser.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimiser.step()
            if scope is not None:
                scope.step(step)
        found.append(net.last.weight.detach().clone())
        if scope is not None:
            scope.finish()
            assert scope.history.first("loss") == pytest.approx(float(F.cross_entropy(plain(x), y).detach()), rel=1e-6)
            assert scope.history.last("linearisation_error") < 0.01  # type: ignore[operator]
            assert scope.history.last("tangent_change") < 0.01  # type: ignore[operator]
    assert torch.equal(*found)  # the masks of training were those of a training without a scope


def test_randomness_that_evaluation_mode_does_not_end_leaves_the_linearisation_out() -> None:
    scope = Scope(Dropped(always=True), (torch.randn(40, 4), torch.arange(40) % 2))
    assert "differ from pass to pass" in scope.history.left_out["linearisation_error"]


# --- targets and losses --------------------------------------------------------------------------------------


def train_one_logit(y: Tensor, training_loss: Callable[[Tensor, Tensor], Tensor], **options: Any) -> Scope:
    """Train a network with one output on 32 points for 20 steps; the training loss is reported at every step."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(32, 3)
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    with Scope(net, (x, y), budget=ALWAYS, strict=True, **options) as scope:
        for step in range(1, 21):
            value = training_loss(net(x).reshape(y.shape), y.to(torch.float32))
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            scope.step(step, loss=training_loss(net(x).reshape(y.shape), y.to(torch.float32)))
    return scope


@pytest.mark.parametrize("shape", [(32,), (32, 1)])
def test_one_logit_with_targets_0_and_1_has_binary_cross_entropy(shape: tuple[int, ...]) -> None:
    y = (torch.arange(32) % 2).float().reshape(shape)
    scope = train_one_logit(y, F.binary_cross_entropy_with_logits)
    found = scope.history
    assert found.last("loss") == pytest.approx(found.last("train_loss"), rel=1e-5)
    right = (found.array("output")[:, 0] > 0) == (y.flatten().numpy() > 0)  # type: ignore[index]
    assert found.last("accuracy") == pytest.approx(right.mean())
    assert any("binary cross-entropy" in note for note in found.notes)
    assert not any("Possible causes" in note for note in found.notes)


def test_real_targets_of_one_output_keep_their_squared_error() -> None:
    for y in (torch.randn(32, 1), torch.zeros(32, 1), torch.full((32,), 2.0) * (torch.arange(32) % 2)):
        found = train_one_logit(y, F.mse_loss).history
        assert found.last("loss") == pytest.approx(found.last("train_loss"), rel=1e-4)
        assert not any("cross-entropy" in note for note in found.notes)


def test_outputs_that_may_be_probabilities_are_not_taken_for_logits() -> None:
    net, x = nn.Sequential(nn.Linear(3, 1), nn.Sigmoid()), torch.randn(32, 3)
    y = (torch.arange(32) % 2).float()
    found = Scope(net, (x, y), strict=True).history
    assert found.last("loss") == pytest.approx(float((net(x)[:, 0] - y).square().mean().detach()), rel=1e-6)
    assert found.last("accuracy") is None


def test_a_loss_of_ones_own_gets_the_targets_as_they_were_given() -> None:
    y = (torch.arange(32) % 2).float()[:, None]
    found = train_one_logit(y, F.binary_cross_entropy_with_logits, loss=F.binary_cross_entropy_with_logits).history
    assert found.last("loss") == pytest.approx(found.last("train_loss"), rel=1e-5)
    assert found.last("accuracy") is not None


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_a_training_loss_of_another_size_is_noted_once(scale: float) -> None:
    y = scale * (5 + torch.randn(32, 1, generator=torch.Generator().manual_seed(0)))
    same = train_one_logit(y, F.mse_loss).history if scale == 1 else None
    assert same is None or not same.notes
    other = train_one_logit(y, lambda out, y: F.l1_loss(out, y) / 10).history
    (note,) = other.notes
    assert "squared error" in note
    assert "give it to the scope as loss=" in note
    assert not train_one_logit(y, F.l1_loss, loss=F.l1_loss).history.notes


def test_notes_made_during_training_are_in_the_run_folder_and_outlast_a_resume(tmp_path: Path) -> None:
    y = 5 + torch.randn(32, 1, generator=torch.Generator().manual_seed(0))
    scope = train_one_logit(y, lambda out, y: F.l1_loss(out, y) / 10, run=tmp_path)
    (note,) = scope.history.notes
    header = Run(tmp_path).header["recipe"]["scope"]
    assert header["notes"] == [note]
    torch.manual_seed(0)
    nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))  # draws what the training drew before its inputs
    again = Scope(scope.model, (torch.randn(32, 3), y), tmp_path, strict=True)
    assert again.history.notes == [note]
    again.finish()
    assert Run(tmp_path).header["recipe"]["scope"]["notes"] == [note]


# --- what a model returns ------------------------------------------------------------------------------------


class Returns(nn.Module):
    """A network whose scores are wrapped by ``wrap(scores, hidden)``."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.wrap = nn.Linear(4, 16), nn.Linear(16, 3), wrap

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).relu()
        return self.wrap(self.last(hidden), hidden)


CLEAR: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "logits by name": lambda scores, hidden: {"hidden": hidden, "logits": scores},
    "a loss and scores": lambda scores, hidden: (scores.sum(), scores),
    "states after the scores": lambda scores, hidden: (scores, (hidden, hidden)),
}
UNCLEAR: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "scores in a nested pair": (
        lambda scores, hidden: ((scores, scores.sum(0)), hidden),
        r"out\[0\]\[0\] \[12, 3\]; out\[0\]\[1\] \[3\]; out\[1\] \[12, 16\].*output=lambda out: out\[0\]\[0\]\.",
    ),
    "a pair": (lambda scores, hidden: (scores, hidden), r"out\[0\] \[12, 3\]; out\[1\] \[12, 16\]"),
    "names": (lambda scores, hidden: {"a": scores, "b": hidden}, r"out\['a'\] \[12, 3\]; out\['b'\] \[12, 16\]"),
    "all nested": (lambda scores, hidden: {"a": {"b": scores}}, r"output=lambda out: out\['a'\]\['b'\]\."),
}


@pytest.mark.parametrize("name", CLEAR)
def test_scores_are_found_where_only_they_can_be_meant(name: str) -> None:
    scope = Scope(Returns(CLEAR[name]), (torch.randn(12, 4), torch.arange(12) % 3), strict=True)
    assert scope.history.array("output").shape == (12, 3)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", UNCLEAR)
def test_other_outputs_are_refused_with_their_tensors(name: str) -> None:
    wrap, said = UNCLEAR[name]
    with pytest.raises(InputError, match=said):
        Scope(Returns(wrap), (torch.randn(12, 4), torch.arange(12) % 3))


# --- sparse gradients, checkpointing, parameters that come and go --------------------------------------------


class Bag(nn.Module):
    """Mean embeddings of tokens, then two layers."""

    def __init__(self, sparse: bool, kind: type[nn.Module]) -> None:
        super().__init__()
        self.table, self.last = kind(20, 8, sparse=sparse), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.table(x)
        return self.last((found.mean(1) if found.ndim == 3 else found).tanh())


def numbers_of(net: nn.Module, x: Tensor, lr: float = 0.3) -> tuple[dict[str, float], dict[str, str]]:
    """The last values of all numbers of a short training, and what was left out."""
    scope = Scope(net, (x, torch.arange(len(x)) % 3), budget=ALWAYS, strict=True)
    steps(net, x, torch.arange(len(x)) % 3, scope, lr)
    last = {name: float(scope.history.last(name) or 0) for name in scope.history.scalars if name != "overhead"}
    return last, dict(scope.history.left_out)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embeddings_measure_as_dense_ones(kind: type[nn.Module]) -> None:
    x, found = torch.randint(20, (24, 5), generator=torch.Generator().manual_seed(0)), []
    for sparse in (True, False):
        torch.manual_seed(0)
        net = Bag(sparse, kind)
        found.append(numbers_of(net, x))
        assert net.table.sparse is sparse
        assert net.table.weight.grad.is_sparse is sparse  # type: ignore[union-attr]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4, abs=1e-6)
    assert found[0][1] == found[1][1]
    assert "tangent" not in found[0][1]


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward pass; ``reentrant=None``: a plain one."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(4, 16), nn.Linear(16, 3), reentrant
        self.block = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        if self.reentrant is None:
            return self.last(self.block(hidden))
        return self.last(checkpoint(self.block, hidden, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_activations_change_no_number(reentrant: bool) -> None:
    x, found = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), []
    for kind in (reentrant, None):
        torch.manual_seed(0)
        found.append(numbers_of(Checkpointed(kind), x))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4, abs=1e-6)
    assert found[0][1] == found[1][1] == {}


def test_a_layer_that_joins_ends_the_scope_with_what_was_seen(recwarn) -> None:
    torch.manual_seed(0)
    net, x, y = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(24, 4), torch.arange(24) % 3
    scope = Scope(net, (x, y), budget=ALWAYS)
    for step in range(1, 9):
        if step == 5:
            net.append(nn.Linear(3, 3).requires_grad_(False))  # frozen ones change the network as well
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * (0 if p.grad is None else p.grad)
        scope.step(step)
    scope.finish()
    assert [str(w.message) for w in recwarn] == [
        "the scope stopped measuring; training goes on. InputError: 3.weight, 3.bias joined the model after the scope was made, "
        "so the network is another one than its start; what was measured before stays, and a new scope measures from here."
    ]
    assert scope.history.steps == [0, 1, 2, 3, 4]


def test_layers_frozen_during_training_are_measured_on() -> None:
    torch.manual_seed(0)
    net, x, y = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(24, 4), torch.arange(24) % 3
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
    optimiser = torch.optim.SGD(net.parameters(), 0.5)
    for step in range(1, 9):
        net[0].requires_grad_(step < 5)
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()
        scope.step(step)
    scope.finish()
    moves = {name: p.detach() - start[name] for name, p in net.named_parameters()}
    f_0, change = jvp(lambda at: functional_call(net, at, (x,)), (start,), (moves,))
    with torch.no_grad():
        error = float((net(x) - f_0 - change).norm() / (net(x) - f_0).norm())
    assert scope.history.scalars["linearisation_error"][8] == pytest.approx(error, rel=1e-3)
    assert not net[0].weight.requires_grad


def test_a_failed_measure_is_named_before_the_words_of_torch() -> None:
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise RuntimeError("expected scalar type Double but found Float")

    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Rounded.apply(super().forward(x))

    scope = Scope(Broken(4, 3), (torch.randn(24, 4), torch.arange(24) % 3))
    assert scope.history.left_out["tangent"].startswith("tangent could not be computed for this model (RuntimeError: ")
    assert "no forward mode" in scope.history.left_out["linearisation_error"]


def test_a_training_that_breaks_down_warns_of_nothing(recwarn) -> None:
    net, x, y = normalised_net()
    scope = Scope(net, (x, y), budget=ALWAYS)
    for step in range(1, 7):
        with torch.no_grad():
            for p in net.parameters():
                p *= 1e60 if step < 4 else float("nan")
        scope.step(step, loss=float("nan"))
    scope.finish()
    assert [str(w.message) for w in recwarn] == []
    assert "loss" not in scope.history.left_out
