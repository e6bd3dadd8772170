"""Looking changes nothing: every training ends on the same bits with and without a scope, and nothing is left behind.

Python's own random stream is tested on the guard alone: the type checker of these tests draws from it.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scope_nets
from repository import ROOT, SUPPORT
from unlazy import Scope
from unlazy.kernels.capture import call_model
from unlazy.scope import measurements as measurement_rules
from unlazy.scope.user_model import preserve_state, unwrap_model

ALWAYS = float("inf")  # no limit to the budget
OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
}
STEPS = 8


def train(
    name: str,
    *,
    watched: bool,
    optimiser: str = "adam",
    accumulate: int = 1,
    autocast: bool = False,
    wrap: Callable[[nn.Module], nn.Module] = lambda net: net,
    dtype: torch.dtype = torch.float64,
) -> list[Any]:
    """Everything that a training leaves behind: parameters, buffers, gradients, optimiser, random streams, flags, hooks."""
    torch.manual_seed(3)
    np.random.seed(4)  # noqa: NPY002
    net, x, y = scope_nets.build(name, dtype)
    model = wrap(net)
    steps = OPTIMISERS[optimiser](net.parameters())
    scope = Scope(model, (x, y), budget=ALWAYS, strict=True) if watched else None
    traces: list[Any] = []
    for step in range(1, STEPS + 1):
        steps.zero_grad()

        def closure(step: int = step) -> Tensor:
            rows = torch.randint(0, scope_nets.N, (10,))
            rows[1] = int(np.random.randint(scope_nets.N))  # noqa: NPY002
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = scope_nets.scores(scope_nets.called(model, scope_nets.some(x, rows)))
                loss = F.cross_entropy(out.float(), y[rows])
                if scope is not None and autocast:
                    scope.step(step, inside=True)
            loss.backward()
            return loss

        for _ in range(accumulate):
            if optimiser == "lbfgs":
                steps.step(closure)  # type: ignore[arg-type]
            else:
                traces.append(closure().detach())
            if scope is not None and accumulate > 1:
                scope.step(step)
        if optimiser != "lbfgs":
            steps.step()
        if scope is not None:
            scope.step(step)
    if scope is not None:
        seen = len(scope.history.steps)
        scope.finish()
        assert seen >= STEPS - 1, scope.history.steps
        assert scope.history.arrays["output"][0].dtype == (np.float64 if dtype == torch.float64 else np.float32)
    traces += [p.detach().clone() for p in net.parameters()] + [b.clone() for b in net.buffers()]
    traces += [p.grad for p in net.parameters()]
    traces += [value for state in steps.state.values() for value in state.values() if isinstance(value, Tensor)]
    traces += [torch.get_rng_state(), torch.from_numpy(np.random.get_state()[1])]  # type: ignore[arg-type] # noqa: NPY002
    traces += [[m.training for m in net.modules()], [p.requires_grad for p in net.parameters()]]
    traces += [[len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in net.modules()]]
    traces += [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.backends.mha.get_fastpath_enabled()]
    traces += [torch.backends.mkldnn.is_available(), torch.are_deterministic_algorithms_enabled()]
    return traces


def assert_same(a: list[Any], b: list[Any]) -> None:
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("name", scope_nets.NAMES)
def test_training_ends_on_the_same_bits(name: str) -> None:
    blind = train(name, watched=False)
    assert_same(blind, train(name, watched=True))
    assert_same(blind, train(name, watched=False))  # and it is a function of its seeds at all


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_with_every_optimiser(optimiser: str) -> None:
    assert_same(train("mlp", watched=False, optimiser=optimiser), train("mlp", watched=True, optimiser=optimiser))


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_with_accumulated_gradients(name: str) -> None:
    """The scope looks between the backward passes whose gradients are added up."""
    assert_same(train(name, watched=False, accumulate=3), train(name, watched=True, accumulate=3))


@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer"])
def test_under_autocast(name: str) -> None:
    """Also when told inside the autocast region, between forward and backward."""
    options: dict[str, Any] = {"autocast": True, "dtype": torch.float32}
    assert_same(train(name, watched=False, **options), train(name, watched=True, **options))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_of_a_compiled_model(backend: str) -> None:
    """And measuring makes the compiler compile nothing again."""
    compiled: list[int] = []
    results = []
    for watched in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        results.append(train("mlp", watched=watched, wrap=lambda net: torch.compile(net, backend=backend)))
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert_same(*results)
    assert compiled[0] == compiled[1] >= 1


def test_of_a_model_compiled_in_place() -> None:
    def in_place(net: nn.Module) -> nn.Module:
        net.compile(backend="eager")
        return net

    torch._dynamo.reset()
    blind = train("mlp", watched=False, wrap=in_place)
    torch._dynamo.reset()
    assert_same(blind, train("mlp", watched=True, wrap=in_place))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the default compiler of torch.compile needs gcc")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_of_a_model_compiled_by_default() -> None:
    results = []
    for watched in (False, True):
        torch._dynamo.reset()
        results.append(train("mlp", watched=watched, wrap=torch.compile))
    assert_same(*results)


def test_wrappers_are_seen_through() -> None:
    net = nn.Linear(2, 2)
    assert unwrap_model(nn.DataParallel(net)) is net
    assert unwrap_model(torch.compile(nn.DataParallel(net), backend="eager")) is net


# --- what a measurement could leave behind -------------------------------------------------------------------


class Noisy(nn.Module):
    """Draws random numbers and counts its calls even in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.mean()
        np.random.rand()  # noqa: NPY002
        random.random()
        return self.body(x) + 0.1 * torch.randn(len(x), 2)


def test_a_model_that_is_random_in_evaluation_mode() -> None:
    """Its kernels are undefined and left out; its streams and buffers are as they were."""
    torch.manual_seed(0)
    net = Noisy()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[union-attr,index] # noqa: NPY002
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    scope = Scope(net, (x, torch.arange(8) % 2), strict=True)
    scope.step(1)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[union-attr,index] # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert float(net.calls) == 0
    assert net.last is None
    assert "depends on the other samples" in scope.history.left_out["tangent"]
    assert "loss" in scope.history.scalars


def test_random_streams_go_on_as_if_nothing_had_been_drawn() -> None:
    def draws() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()]  # noqa: NPY002

    def seed() -> None:
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        random.seed(1)

    net = nn.Linear(1, 1)
    seed()
    expected = [draws(), draws()]
    seed()
    first, guard = draws(), preserve_state(net)
    state = random.getstate()
    with guard:
        random.setstate(state)  # the type checker may have drawn
        draws()
    assert [first, draws()] == expected


def test_flags_gradients_and_hooks_survive_an_error() -> None:
    net, x, _ = scope_nets.build("resnet")
    net.train()
    net.norms[0].eval()
    net.stem.bias.requires_grad_(False)
    net.head.weight.grad = given = torch.ones_like(net.head.weight)
    kept = net.stem.register_forward_hook(lambda *_: None)
    flags = [m.training for m in net.modules()], [p.requires_grad for p in net.parameters()]
    with pytest.raises(ZeroDivisionError), torch.inference_mode(), preserve_state(net):
        assert not torch.is_inference_mode_enabled()
        assert not any(m.training for m in net.modules())
        net.body.register_forward_hook(lambda *_: None)
        net.head.weight.requires_grad_(False)
        call_model(net, x).sum().backward()
        torch.randn(3)
        raise ZeroDivisionError
    assert flags == ([m.training for m in net.modules()], [p.requires_grad for p in net.parameters()])
    assert net.head.weight.grad is given
    assert net.body.weight.grad is None
    assert [len(m._forward_hooks) for m in net.modules()] == [int(m is net.stem) for m in net.modules()]
    kept.remove()


def test_a_failing_look_leaves_no_hook(monkeypatch) -> None:
    net, x, y = scope_nets.build("mlp")
    scope = Scope(net, (x, y), budget=ALWAYS)

    def fails(*_: Any, **__: Any) -> None:
        net[0].register_forward_hook(lambda *_: None)
        net.eval()
        raise RuntimeError("out of luck")

    monkeypatch.setattr(measurement_rules, "path_count", fails)
    with pytest.warns(UserWarning, match="goes on without paths from step 1: .*out of luck"):
        scope.step(1)
    assert all(m.training and not m._forward_hooks for m in net.modules())


def test_it_can_be_told_without_gradients_and_in_inference_mode() -> None:
    net, x, y = scope_nets.build("mlp")
    with torch.no_grad():
        scope = Scope(net, (x, y), budget=ALWAYS, strict=True)
        scope.step(1)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        scope.step(2)
        assert torch.is_inference_mode_enabled()
    assert list(scope.history.scalars["tangent_distance"]) == [0, 1, 2]


# --- two processes -------------------------------------------------------------------------------------------

DISTRIBUTED = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
import scope_nets
from unlazy import Scope

rank, store, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
net, x, y = scope_nets.build("resnet", torch.float32)
model = torch.nn.parallel.DistributedDataParallel(net)
optimiser = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(rank)
scope = Scope(model, (x, y), None if folder == "-" else folder, budget=float("inf"), strict=True) if folder != "blind" else None
for step in range(1, 6):
    rows = torch.randint(0, scope_nets.N, (8,))
    optimiser.zero_grad()
    F.cross_entropy(model(x[rows]), y[rows]).backward()
    optimiser.step()
    if scope is not None:
        scope.step(step)
if scope is not None:
    scope.finish()
    print(rank, len(scope.history.steps))
print(rank, *[float(p.double().sum()).hex() for p in net.parameters()], float(torch.rand(())).hex())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_only_the_first_of_two_processes_looks(tmp_path: Path) -> None:
    from unlazy import Run

    def both(folder: str, store: str) -> list[list[str]]:
        environment = os.environ | {"PYTHONPATH": f"{SUPPORT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen(
                [sys.executable, "-c", DISTRIBUTED, str(rank), str(tmp_path / store), folder],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(2)
        ]
        answers = [process.communicate(timeout=120)[0].splitlines() for process in running]
        assert all(process.returncode == 0 for process in running)
        return answers

    blind = both("blind", "a")
    watched = both(str(tmp_path / "run"), "b")
    assert [lines[-1] for lines in blind] == [lines[-1] for lines in watched]
    assert watched[0][0] == "0 6"
    assert watched[1][0] == "1 0"
    assert Run(tmp_path / "run").status()["state"] == "finished"
