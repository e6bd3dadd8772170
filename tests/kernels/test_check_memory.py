"""A check that is used again: kernels stay exact when a model changes between calls, and the check runs again when it must."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from unlazy import Unsupported, tangent_kernel
from unlazy.kernels import check_memory
from unlazy.kernels.tangent_engine import TangentKernel
from zoo import slow_kernel

MODES = ("full", "trace", "sum")
FLAGS: dict[str, bool] = {"on": False}  # what no attribute of a module shows


class Switched(nn.Module):
    """A network with two ways to compute, chosen by a flag that is not one of its attributes."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor], other: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("shift", torch.randn(4))
        self.ways = (way, other)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.ways[FLAGS["on"]](self, x)


def plain(net: Any, x: Tensor) -> Tensor:
    return net.last(torch.tanh(net.middle(torch.tanh(net.first(x) * net.shift))))


OTHER_WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "skips a layer": lambda net, x: net.last(torch.tanh(torch.tanh(net.first(x) * net.shift))),
    "uses a layer twice": lambda net, x: plain(net, net.middle(x)),
    "reads a weight as a constant": lambda net, x: net.last(
        torch.tanh(net.middle(torch.tanh(net.first(x) * net.middle.weight[0])))
    ),
    "reads a weight directly": lambda net, x: net.last(
        torch.tanh(F.linear(torch.tanh(net.first(x) * net.shift), net.middle.weight, net.middle.bias))
    ),
    "turns samples round": lambda net, x: net.last(
        torch.tanh(net.middle(torch.tanh(net.first(x.flip(0)) * net.shift))).flip(0)
    ),
    "picks samples": lambda net, x: plain(net, x[torch.arange(len(x) - 1, -1, -1)])[torch.arange(len(x) - 1, -1, -1)],
    "depends on a sample": lambda net, x: net.last(
        torch.tanh(net.middle(torch.tanh(net.first(x) * net.shift)) * (1 + (x[:, :1] > 0) * net.middle.weight[0]))
    ),
}
MIXING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "inputs": lambda net, x: plain(net, x - x.mean(0)),
    "inputs, without a trace": lambda net, x: plain(net, (x.detach() - x.detach().mean(0))),
    "a constant": lambda net, x: net.last(
        torch.tanh(net.middle(torch.tanh(net.first(x) * (net.shift + x.detach().mean(0)))))
    ),
    "layers": lambda net, x: net.last(torch.tanh(net.middle(torch.tanh(net.first(x) * net.shift).roll(1, 0)))),
}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    FLAGS["on"] = False
    with torch.random.fork_rng():
        torch.manual_seed(5)
        yield


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every whole check."""
    seen: list[int] = []
    whole = TangentKernel._check

    def counted(self: TangentKernel, *arguments: Any) -> None:
        seen.append(1)
        whole(self, *arguments)

    monkeypatch.setattr(TangentKernel, "_check", counted)
    return seen


def compare(model: nn.Module, x: Any) -> None:
    """All modes against one backward pass a sample."""
    slow = slow_kernel(model, x)
    expected = {"full": slow, "trace": slow.diagonal(dim1=2, dim2=3).sum(-1), "sum": slow.sum((2, 3))}
    for mode in MODES:
        torch.testing.assert_close(tangent_kernel(model, x, outputs=mode), expected[mode], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", ["mlp", "conv2d", "norms", "reused_layer", "embedding", "inplace_mlp", "two_inputs"])
def test_other_weights_need_no_new_check(name: str, checks: list[int]) -> None:
    model, x = zoo.build(name)
    for _ in range(3):
        compare(model, x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
    assert len(checks) == len(MODES)


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_a_flag_that_no_attribute_shows(name: str) -> None:
    model, x = Switched(plain, OTHER_WAYS[name]), torch.randn(6, 4, dtype=torch.float64)
    for on in (False, False, True, True, False, True):
        FLAGS["on"] = on
        compare(model, x)


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_begin_to_mix_are_found(name: str) -> None:
    model, x = Switched(plain, MIXING[name]), torch.randn(6, 4, dtype=torch.float64)
    for mode in MODES:
        FLAGS["on"] = False
        tangent_kernel(model, x, outputs=mode)
        tangent_kernel(model, x, outputs=mode)
        FLAGS["on"] = True
        with pytest.raises(Unsupported, match="other samples"):
            tangent_kernel(model, x, outputs=mode)


def by_tokens(axis: int) -> Callable[[Any, Tensor], Tensor]:
    """Layers see samples first (0), or positions first (1)."""

    def way(net: Any, x: Tensor) -> Tensor:
        seen = x.transpose(0, axis)
        return net.last(torch.tanh(net.middle(torch.tanh(net.first(seen)))).transpose(0, axis).mean(1))

    return way


def test_layers_that_begin_to_see_positions_first() -> None:
    model, x = Switched(by_tokens(0), by_tokens(1)), torch.randn(5, 5, 4, dtype=torch.float64)
    for on in (False, False, True, False):
        FLAGS["on"] = on
        compare(model, x)


def test_branches_on_the_data(checks: list[int]) -> None:
    def branching(net: Any, x: Tensor) -> Tensor:
        return plain(net, x) if float(x.mean()) > 0 else OTHER_WAYS["reads a weight directly"](net, x)

    model, x = Switched(branching, branching), torch.randn(6, 4, dtype=torch.float64)
    for sign in (1, 1, -1, -1, 1):
        compare(model, sign * (x - x.mean() + 0.1).abs())
    assert len(checks) > len(MODES)


def change_forward(model: nn.Sequential, patch: pytest.MonkeyPatch) -> None:
    layer = model[2]
    patch.setattr(layer, "forward", lambda h: F.linear(h, 2 * layer.weight, layer.bias))


def change_class(model: nn.Sequential, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.Linear, "forward", lambda self, h: F.linear(h, 2 * self.weight, self.bias))


def add_hook(model: nn.Sequential, patch: pytest.MonkeyPatch) -> None:
    model[2].register_forward_hook(lambda module, entered, out: out * module.weight[0, 0])


def add_layer(model: nn.Sequential, patch: pytest.MonkeyPatch) -> None:
    model.insert(3, nn.Linear(6, 6).double())


def replace_layer(model: nn.Sequential, patch: pytest.MonkeyPatch) -> None:
    model[2] = nn.Sequential(nn.Linear(5, 6, bias=False), nn.LayerNorm(6)).double()


def tie(model: nn.Sequential, patch: pytest.MonkeyPatch) -> None:
    model.append(nn.Linear(3, 3))
    model.append(nn.Linear(3, 3))
    model[-1].weight = model[-2].weight
    model.double()


def freeze(model: nn.Sequential, patch: pytest.MonkeyPatch) -> None:
    model[0].weight.requires_grad_(False)


CHANGES = (change_forward, change_class, add_hook, add_layer, replace_layer, tie, freeze)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_is_checked_again(
    change: Callable[..., None], checks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = zoo.build("mlp")
    compare(model, x)
    compare(model, x)
    assert len(checks) == len(MODES)
    change(model, monkeypatch)
    compare(model, x)
    assert len(checks) > len(MODES)


def test_types_shapes_modes_and_selections_have_checks_of_their_own(checks: list[int]) -> None:
    model, x = zoo.build("norms")
    questions: list[Callable[[], Any]] = [
        lambda: tangent_kernel(model.eval(), x),
        lambda: tangent_kernel(model.eval(), x[:3]),
        lambda: tangent_kernel(model.train(), x),
        lambda: tangent_kernel(model.eval(), x, x[:2]),
        lambda: tangent_kernel(model.eval(), x, parameters="*.weight"),
        lambda: tangent_kernel(model.eval(), x, memory="1GB"),
    ]
    for number, ask in enumerate(questions, start=1):
        torch.testing.assert_close(ask(), ask())
        assert len(checks) == number
    model.float()
    tangent_kernel(model, x.float())
    assert len(checks) == len(questions) + 1


def test_a_model_that_diverges_is_still_named() -> None:
    model, x = zoo.build("mlp")
    for _ in range(2):
        tangent_kernel(model, x)
    model[2].bias.data[1] = torch.nan
    with pytest.raises(ValueError, match=r"2\.bias"):
        tangent_kernel(model, x)


def test_nothing_keeps_a_model_alive() -> None:
    model, x = zoo.build("mlp")
    for n in range(1, 6):
        for mode in MODES:
            tangent_kernel(model, x[:n], outputs=mode)
    assert len(check_memory._results[model]) == check_memory.KEPT
    gone, before = weakref.ref(model), len(check_memory._results)
    del model
    gc.collect()
    assert gone() is None
    assert len(check_memory._results) < before
