"""Numbers of common active paths of every kind of network, against paths walked one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import cases
import pathnets
from unlazy import InputError
from unlazy.kernels import overlap, reference
from unlazy.kernels.overlap import overlap_kernel, path_count
from unlazy.kernels.paths.walks import active_paths


def check(model: nn.Module, x: Tensor, *, output: int = 0, bias_paths: bool = False) -> Tensor:
    """Counted equals walked, all together, across and one by one."""
    slow = reference.overlap_by_walking(model, x, output=output, bias_paths=bias_paths)
    options: dict[str, Any] = {"output": output, "bias_paths": bias_paths}
    assert torch.equal(overlap_kernel(model, x, **options), slow)
    assert torch.equal(overlap_kernel(model, x[:1], x[1:], **options), slow[:1, 1:])
    assert torch.equal(path_count(model, x, **options), slow.diagonal())
    torch.testing.assert_close(overlap_kernel(model, x, log=True, **options), slow.log(), rtol=1e-12, atol=1e-12)
    return slow


@pytest.mark.parametrize("bias_paths", [False, True])
@pytest.mark.parametrize("name", pathnets.NETS)
def test_counted_paths_are_the_paths_one_can_walk(name: str, bias_paths: bool) -> None:
    model, x = pathnets.build(name)
    slow = check(model, x, bias_paths=bias_paths)
    assert slow.max() > 1
    assert len(slow.unique()) > 1, "all counts equal: this case would not notice much"


@pytest.mark.parametrize("name", pathnets.NETS)
def test_listed_paths_are_as_many_as_counted(name: str) -> None:
    model, x = pathnets.build(name)
    listed = active_paths(model, x[1:2])
    assert len(listed) == path_count(model, x[1:2], output=0)[0]


@pytest.mark.parametrize("name", ["skip_to_the_output", "grouped_outputs"])
def test_outputs_reached_by_different_paths(name: str) -> None:
    if name == "grouped_outputs":
        torch.manual_seed(2)
        model = nn.Sequential(nn.Conv1d(2, 4, 2), nn.ReLU(), nn.Conv1d(4, 2, 3, groups=2), nn.Flatten()).double()
        x = torch.randn(4, 2, 4, dtype=torch.float64)
        with pytest.raises(InputError, match="output=0"):
            overlap_kernel(model, x)
        with pytest.raises(InputError, match="between 0 and 1"):
            overlap_kernel(model, x, output=2)
    else:
        model, x = pathnets.build(name)
    for output in range(2):
        check(model, x, output=output)


LAYERS = st.sampled_from(["conv", "group", "pool", "average", "adaptive", "norm", "skip", "pad", "gate", "join"])


class Random(nn.Module):
    """Layers drawn at random, each with random settings, on one axis of positions."""

    def __init__(self, kinds: list[str], seed: int, channels: int, length: int) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(seed)
        self.kinds, self.layers = kinds, nn.ModuleList()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            x = torch.zeros(2, channels, length)
            for kind in kinds:
                self.layers.append(self.make(kind, x.shape[1]))
                x = self.step(kind, self.layers[-1], x)
            self.last = nn.Linear(x[0].numel(), 1)

    def pick(self, *choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=self.draw))]

    def make(self, kind: str, c: int) -> nn.Module:
        if kind in ("conv", "skip", "join"):
            kernel, dilation = (3, 1) if kind != "conv" else (self.pick(1, 2, 3), self.pick(1, 2))
            stride = self.pick(1, 2) if kind == "conv" else 1
            out = c if kind == "skip" else self.pick(1, 2, 3)
            return nn.Conv1d(
                c, out, kernel, stride, padding=1 if kernel == 3 else 0, dilation=dilation, bias=bool(seed_bit(self))
            )
        if kind == "group":
            return nn.Conv1d(c, 2 * c, self.pick(1, 2), groups=c)
        if kind == "pool":
            return nn.MaxPool1d(2, stride=self.pick(1, 2), padding=self.pick(0, 1))
        if kind == "average":
            return nn.AvgPool1d(2, stride=self.pick(1, 2), padding=self.pick(0, 1))
        if kind == "adaptive":
            return self.pick(nn.AdaptiveAvgPool1d(2), nn.AdaptiveMaxPool1d(2), nn.AdaptiveAvgPool1d(1))
        if kind == "norm":
            return nn.BatchNorm1d(c)
        return nn.ZeroPad1d((1, 0)) if kind == "pad" else nn.ReLU()

    def step(self, kind: str, layer: nn.Module, x: Tensor) -> Tensor:
        made = layer(x)
        if kind == "skip":
            made = torch.relu(made) + x
        if kind == "join":
            made = torch.cat([torch.relu(made), x], 1)
        return torch.relu(made) if kind in ("conv", "group") else made

    def forward(self, x: Tensor) -> Tensor:
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x = self.step(kind, layer, x)
        return self.last(x.flatten(1))


def seed_bit(model: Random) -> int:
    return int(model.pick(0, 1))


NETWORKS = (st.lists(LAYERS, min_size=1, max_size=5), st.integers(0, 10_000), st.integers(1, 2), st.integers(3, 5))


@given(*NETWORKS)
@settings(max_examples=12)
def test_random_networks(kinds: list[str], seed: int, channels: int, length: int) -> None:
    check_random(kinds, seed, channels, length)


@pytest.mark.slow
@given(*NETWORKS)
@settings(max_examples=150)
def test_many_random_networks(kinds: list[str], seed: int, channels: int, length: int) -> None:
    check_random(kinds, seed, channels, length)


def check_random(kinds: list[str], seed: int, channels: int, length: int) -> None:
    try:
        model = Random(kinds, seed, channels, length).double().eval()
    except (RuntimeError, ValueError):
        assume(False)  # an image too small for its layers
    x = torch.randn(3, channels, length, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    assume({"conv", "group", "pool", "skip", "gate", "join"} & set(kinds))
    assume(path_count(model, x, bias_paths=True).max() < 2000)  # to be walked in a moment
    for bias_paths in (False, True):
        check(model, x, bias_paths=bias_paths)


# --- our own networks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias_paths", [False, True])
@pytest.mark.parametrize("name", cases.SPECS)
def test_the_value_branch_followed_is_the_product_over_gates(name: str, bias_paths: bool) -> None:
    """The way of networks with positions, taken by dense ones: given gates are found where units are multiplied by them."""
    net, x = cases.net(name), cases.points(name)
    graph = overlap._trace_gated(net, x[:2]).graph
    kernel = overlap._traced_engine(net, x, graph, log=False, dtype=torch.float64, bias_paths=bias_paths)
    assert torch.equal(overlap._overlap_gram(kernel, x), overlap_kernel(net, x, bias_paths=bias_paths))


@pytest.mark.parametrize("name", ["relu", "dlgn", "pwc-no-bias", "linear"])
@pytest.mark.parametrize("bias_paths", [False, True])
def test_paths_of_our_networks_can_be_listed(name: str, bias_paths: bool) -> None:
    net, x = cases.net(name), cases.points(name)
    found = [set(active_paths(net, x[i : i + 1], bias_paths=bias_paths)) for i in range(len(x))]
    slow = torch.tensor([[float(len(a & b)) for b in found] for a in found], dtype=torch.float64)
    assert torch.equal(overlap_kernel(net, x, bias_paths=bias_paths), slow)
    assert torch.equal(path_count(net, x, bias_paths=bias_paths), slow.diagonal())
    logs = overlap_kernel(net, x, bias_paths=bias_paths, log=True)
    torch.testing.assert_close(logs, slow.log(), rtol=1e-14, atol=1e-14)


def test_listed_paths_name_their_units() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    model[0].weight.data, model[0].bias.data = torch.tensor([[1.0], [-1.0]]), torch.zeros(2)
    model[2].weight.data, model[2].bias.data = torch.eye(2), torch.tensor([-10.0, 0.5])
    assert active_paths(model, torch.tensor([[2.0]])) == [(("0", (0,)), ("2", (1,)), ("4", (0,)))]
    with pytest.raises(InputError, match="one input at a time"):
        active_paths(model, torch.zeros(2, 1))


def test_too_many_paths_are_not_listed() -> None:
    net, x = cases.net("linear"), cases.points("linear")
    with pytest.raises(InputError, match="path_count"):
        active_paths(net, x[:1], limit=26)
    model, x = pathnets.build("residual")
    with pytest.raises(InputError, match="path_count"):
        active_paths(model, x[:1], limit=100)
