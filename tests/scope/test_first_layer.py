"""Half-spaces of a user's own network: what a scope keeps is where its first gates open, or it says why it keeps nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unlazy import DLGN, ReLUNet, Run, Scope
from unlazy.runtime import Unsupported, stream
from unlazy.scope import measurements
from unlazy.scope.gates import first_layer_half_spaces
from unlazy.scope.probe_set import parse_probe_set

ALWAYS = float("inf")
UNITS, N = 24, 60


def points(*shape: int) -> Tensor:
    return torch.randn(N, *(shape or (2,)), generator=stream(3, "points"), dtype=torch.float64)


class Written(nn.Module):
    """Two layers in a block of their own, with whatever stands between, before and behind the first one."""

    def __init__(self, between: Callable[[Tensor], Tensor], before: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"first": nn.Linear(2, UNITS), "last": nn.Linear(UNITS, 2)})
        self.between, self.before = between, before

    def forward(self, x: Tensor) -> Tensor:
        return self.block["last"](self.between(self.block["first"](self.before(x))).flatten(1))


class Backwards(nn.Module):
    """The layer that is defined first comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(UNITS, 2), nn.Linear(2, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


def plain(*middle: nn.Module, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, UNITS, bias=bias), *middle, nn.Linear(UNITS, 2))


HALF_SPACES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "sequential": (lambda: plain(nn.ReLU()), (2,)),
    "no bias": (lambda: plain(nn.ReLU(), bias=False), (2,)),
    "in place": (lambda: plain(nn.ReLU(inplace=True)), (2,)),
    "dropout": (lambda: plain(nn.Dropout(0.4), nn.ReLU()), (2,)),
    "nested": (lambda: nn.Sequential(nn.Sequential(nn.Identity(), nn.Linear(2, UNITS)), plain_tail()), (2,)),
    "flattened": (lambda: nn.Sequential(nn.Flatten(), *plain(nn.ReLU())), (1, 2)),
    "row by row": (lambda: nn.Sequential(nn.Linear(2, UNITS), nn.ReLU(), nn.Flatten(), nn.Linear(UNITS, 2)), (1, 2)),
    "function": (lambda: Written(F.relu), (2,)),
    "clamp": (lambda: Written(lambda h: h.clamp(min=0)), (2,)),
    "beside": (lambda: Written(lambda h: torch.relu(h) + h), (2,)),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, UNITS)), plain_tail()),
        (2,),
    ),
}


def plain_tail() -> nn.Sequential:
    return nn.Sequential(nn.ReLU(), nn.Linear(UNITS, 2))


def heights_by_hook(net: nn.Module, x: Tensor) -> Tensor:
    """What the first layer that is called hands on, caught by a hook."""
    caught: list[Tensor] = []
    layers = [module for module in net.modules() if isinstance(module, nn.Linear)]
    handles = [layer.register_forward_hook(lambda *given: caught.append(given[2].detach().clone())) for layer in layers]
    with torch.no_grad():
        net.eval()(x)
    for handle in handles:
        handle.remove()
    return caught[0].reshape(len(x), -1)


def train(net: nn.Module, x: Tensor, y: Tensor, scope: Scope | None, steps: int = 6) -> None:
    optimiser = torch.optim.SGD(net.parameters(), lr=0.3)
    for step in range(1, steps + 1):
        loss = F.cross_entropy(net.train()(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if scope is not None:
            scope.step(step, batch_loss=loss)


@pytest.mark.parametrize("name", HALF_SPACES)
def test_kept_half_spaces_are_where_the_gates_open(name: str, tmp_path: Path) -> None:
    """At the start and after training, on the samples and everywhere else."""
    make, shape = HALF_SPACES[name]
    torch.manual_seed(4)
    net, x = make().double(), points(*shape)
    y = (x.flatten(1).prod(1) > 0).long()
    early = copy.deepcopy(net)
    with Scope(net, (x, y), tmp_path / "run", views="neurons", budget=ALWAYS, strict=True) as scope:
        train(net, x, y, scope)
    assert "half_spaces" not in scope.history.left_out
    run, elsewhere = Run(tmp_path / "run"), 5 * points(*shape).flip(0)
    for step, at in ((0, early), (6, net)):
        kept = {part: run.array(part, step)[0] for part in ("neurons", "neuron_norms", "neuron_biases")}
        weights = kept["neurons"] * kept["neuron_norms"][:, None]
        assert kept["neuron_biases"].shape == (UNITS,)
        assert np.any(kept["neuron_biases"]) != (name == "no bias")
        for samples in (x, elsewhere):
            heights = heights_by_hook(at, samples).numpy()
            told = samples.flatten(1).numpy() @ weights.T + kept["neuron_biases"]
            assert np.array_equal(told > 0, heights > 0)
            assert np.allclose(told, heights, rtol=0, atol=1e-12)
            assert 0.1 < np.mean(heights > 0) < 0.9


NORMS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: plain(nn.BatchNorm1d(UNITS), nn.ReLU()),
    "no bias": lambda: plain(nn.BatchNorm1d(UNITS), nn.ReLU(inplace=True), bias=False),
    "not affine": lambda: plain(nn.BatchNorm1d(UNITS, affine=False, eps=0.1), nn.ReLU()),
    "dropout": lambda: plain(nn.BatchNorm1d(UNITS), nn.Dropout(0.4), nn.ReLU()),
}


@pytest.mark.parametrize("name", NORMS)
def test_batch_norm_is_folded_into_half_spaces(name: str, tmp_path: Path) -> None:
    """With the running statistics of the moment, and turned around where its factor is negative."""
    torch.manual_seed(6)
    net, x = NORMS[name]().double(), points()
    y = (x.prod(1) > 0).long()
    norm = next(module for module in net.modules() if isinstance(module, nn.BatchNorm1d))
    if norm.affine:
        with torch.no_grad():
            norm.weight.normal_()
            norm.bias.normal_()
    early = copy.deepcopy(net)
    with Scope(net, (x, y), tmp_path / "run", views="neurons", budget=ALWAYS, strict=True) as scope:
        train(net, x, y, scope)
    assert "half_spaces" not in scope.history.left_out
    run, elsewhere = Run(tmp_path / "run"), 5 * points().flip(0)
    assert {"neurons", "neuron_norms"} <= run.lines[0].arrays.keys()
    assert "neuron_biases" not in run.lines[0].arrays
    for step, at in ((0, early), (6, net)):
        normals, offsets = (run.array(part, step)[0] for part in ("normals", "offsets"))
        assert (normals.shape, offsets.shape) == ((1, UNITS, 2), (1, UNITS))
        for samples in (x, elsewhere):
            with torch.no_grad():
                heights = at.eval()[1](at[0](samples)).numpy()
            assert np.allclose(samples.numpy() @ normals[0].T + offsets[0], heights, rtol=0, atol=1e-10)
            assert 0.1 < np.mean(heights > 0) < 0.9


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "tanh": (lambda: plain(nn.Tanh()), (2,), "is tanh, not a ReLU"),
    "gelu": (lambda: plain(nn.GELU()), (2,), "is gelu, not a ReLU"),
    "leaky": (lambda: plain(nn.LeakyReLU(0.1)), (2,), "is leaky_relu, not a ReLU"),
    "bounded": (lambda: plain(nn.Hardtanh(0, 1)), (2,), "is hardtanh, not a ReLU"),
    "later": (lambda: Written(lambda h: h.clamp(min=0.5)), (2,), "is clamp, not a ReLU"),
    "linear": (lambda: plain(nn.Linear(UNITS, UNITS), nn.ReLU()), (2,), "is linear, not a ReLU"),
    "alone": (lambda: nn.Linear(2, 2), (2,), "is nothing, not a ReLU"),
    "by the batch": (
        lambda: plain(nn.BatchNorm1d(UNITS, track_running_stats=False), nn.ReLU()),
        (2,),
        "is batch_norm, not a ReLU",
    ),
    "all as one": (
        lambda: nn.Sequential(nn.Linear(2, UNITS), nn.BatchNorm1d(1), nn.ReLU(), nn.Flatten(), nn.Linear(UNITS, 2)),
        (1, 2),
        "is batch_norm, not a ReLU",
    ),
    "normalised twice": (
        lambda: plain(nn.BatchNorm1d(UNITS), nn.BatchNorm1d(UNITS), nn.ReLU()),
        (2,),
        "is batch_norm, not a ReLU",
    ),
    "normalised tanh": (lambda: plain(nn.BatchNorm1d(UNITS), nn.Tanh()), (2,), "is tanh, not a ReLU"),
    "layer norm": (lambda: plain(nn.LayerNorm(UNITS), nn.ReLU()), (2,), "is layer_norm, not a ReLU"),
    "scaled": (lambda: Written(lambda h: torch.relu(1.0 * h)), (2,), "is mul, not a ReLU"),
    "overwritten": (lambda: Written(lambda h: torch.relu(h.sub_(1))), (2,), "is sub, not a ReLU"),
    "halves": (lambda: Written(lambda h: torch.relu(torch.cat(h.chunk(2, 1), 1))), (2,), "is chunk, not a ReLU"),
    "behind a norm": (lambda: nn.Sequential(nn.BatchNorm1d(2), *plain(nn.ReLU())), (2,), "not given the inputs"),
    "behind a layer norm": (lambda: nn.Sequential(nn.LayerNorm(2), *plain(nn.ReLU())), (2,), "not given the inputs"),
    "behind a bound": (lambda: Written(torch.relu, lambda x: x.clamp(-99, 99)), (2,), "not given the inputs"),
    "swapped": (lambda: Written(torch.relu, lambda x: x.flip(1)), (2,), "not given the inputs"),
    "backwards": (Backwards, (2,), "not given the inputs"),
    "each alone": (
        lambda: nn.Sequential(nn.Linear(1, UNITS), nn.ReLU(), nn.Flatten(), nn.Linear(2 * UNITS, 2)),
        (2, 1),
        "not given the inputs",
    ),
    "windows": (
        lambda: nn.Sequential(nn.Conv1d(1, UNITS, 2), nn.ReLU(), nn.Flatten(), nn.Linear(UNITS, 2)),
        (1, 2),
        "Conv1d: the first layer is not a dense one",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_half_spaces_says_why(name: str, tmp_path: Path) -> None:
    """The rest of the view is there all the same."""
    make, shape, why = REFUSED[name]
    net, x = make().double(), points(*shape)
    with Scope(net, (x, torch.arange(N) % 2), tmp_path / "run", views="neurons", budget=ALWAYS, strict=True) as scope:
        scope.step(1)
    assert why in scope.history.left_out["half_spaces"]
    run = Run(tmp_path / "run")
    assert why in run.header["recipe"]["scope"]["left_out"]["half_spaces"]
    assert {"neurons", "neuron_norms"} <= run.lines[0].arrays.keys()
    assert not {"neuron_biases", "normals", "offsets"} & run.lines[0].arrays.keys()
    assert f"no half_spaces: {run.header['recipe']['scope']['left_out']['half_spaces']}" in scope.report()


def test_networks_of_ours() -> None:
    """The first layer of a ReLU network; a linearly gated one keeps all its half-spaces as it did."""
    x, y = points(), torch.arange(N) % 2
    net = ReLUNet(2, 2, width=6, depth=2, gate_bias=True, value_bias=True, seed=1).double()
    with torch.no_grad():
        for p in net.parameters():
            p += 0.3 * torch.randn(p.shape, generator=stream(5, "p"), dtype=torch.float64)
    first = Scope(net, (x, y), views="neurons").history.arrays
    kept = {name: first[name][0] for name in ("neurons", "neuron_norms", "neuron_biases")}
    told = x.numpy() @ (kept["neurons"] * kept["neuron_norms"][:, None]).T + kept["neuron_biases"]
    assert np.allclose(told, net.pre_activations(x)[0].detach().numpy(), rtol=0, atol=1e-12)
    assert np.any(kept["neuron_biases"])
    linear = Scope(DLGN(2, 2, width=6, depth=2).double(), (x, y), views="neurons").history
    assert {"normals", "offsets"} <= linear.arrays.keys()
    assert "neuron_biases" not in linear.arrays
    assert "half_spaces" not in linear.left_out
    with pytest.raises(Unsupported, match="multipliers scale"):
        first_layer_half_spaces(ReLUNet(2, 2, width=6, depth=2, parametrisation="mup").double(), x)


@pytest.mark.parametrize("x", [points(3), points(2, 2), torch.randint(0, 5, (N, 2))])
def test_away_from_the_plane_nothing_is_kept_or_said(x: Tensor) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), UNITS), nn.ReLU(), nn.Linear(UNITS, 2)).double()
    if not x.is_floating_point():
        net = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, UNITS), nn.ReLU(), nn.Linear(UNITS, 2))
    history = Scope(net, (x, torch.arange(N) % 2), views="neurons").history
    assert "neuron_biases" not in history.arrays
    assert "half_spaces" not in history.left_out


def test_looking_at_half_spaces_changes_no_bit() -> None:
    """Training in the plane, dropout and a gate in place included: parameters, streams and hooks as without a scope."""
    ends = []
    for watched in (False, True):
        torch.manual_seed(11)
        net, x = plain(nn.Dropout(0.3), nn.ReLU(inplace=True)), points().float()
        y = torch.arange(N) % 2
        scope = Scope(net, (x, y), views="neurons", budget=ALWAYS, strict=True) if watched else None
        train(net, x, y, scope, steps=20)
        if scope is not None:
            scope.finish()
            assert len(scope.history.arrays["neuron_biases"]) > 5
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules()]
        ends.append(([p.detach().clone() for p in net.parameters()], torch.get_rng_state(), hooks))
    assert all(torch.equal(a, b) for a, b in zip(ends[0][0], ends[1][0], strict=True))
    assert torch.equal(ends[0][1], ends[1][1])
    assert ends[0][2] == ends[1][2] == [0, 0, 0, 0, 0]


def test_a_record_without_biases_goes_on_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier version kept in the folder opens, stays, and is continued."""
    torch.manual_seed(2)
    net, x, y = plain(nn.ReLU()).double(), points(), torch.arange(N) % 2
    with monkeypatch.context() as before:
        before.setattr(measurements, "is_in_plane", lambda _: False)
        with Scope(net, (x, y), tmp_path / "run", views="neurons", budget=ALWAYS, strict=True) as scope:
            train(net, x, y, scope, steps=2)
    assert Run(tmp_path / "run").array_steps("neuron_biases") == []
    with Scope(net, (x, y), tmp_path / "run", views="neurons", budget=ALWAYS, strict=True) as scope:
        optimiser = torch.optim.SGD(net.parameters(), lr=0.3)
        F.cross_entropy(net(x), y).backward()
        optimiser.step()
        scope.step(3)
    run = Run(tmp_path / "run")
    assert (run.array_steps("neurons")[-1], run.array_steps("neuron_biases")) == (3, [3])
    assert np.array_equal(run.array("neuron_biases", 3)[0], net[0].bias.detach().numpy())


def test_a_gate_that_changes_on_the_way_is_noticed() -> None:
    """From then on there is nothing to draw, the neurons go on, and one warning says so."""
    net, x = Written(torch.relu).double(), points()
    scope = Scope(net, (x, torch.arange(N) % 2), views="neurons", budget=ALWAYS)
    assert "neuron_biases" in scope.history.arrays
    net.between = torch.tanh
    train(net, x, torch.arange(N) % 2, None, steps=1)
    with pytest.warns(UserWarning, match=r"without half_spaces from step 1: .*tanh"):
        scope.step(1)
    assert "tanh" in scope.history.left_out["half_spaces"]


def test_a_pass_of_two_samples_is_all_it_takes() -> None:
    """However many samples the probe has."""
    sizes: list[int] = []

    def relu(h: Tensor) -> Tensor:
        sizes.append(len(h))
        return torch.relu(h)

    net = Written(relu).double()
    found = first_layer_half_spaces(net, parse_probe_set((points(), torch.arange(N))).x)
    assert found.keys() == {"neuron_biases"}
    assert torch.equal(found["neuron_biases"], net.block["first"].bias)
    assert sizes == [2]
