"""Models and numbers that are legal and rare: every one of them once gave a wrong number or a bare error."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.utils.checkpoint import checkpoint

from unlazy import Run, Scope, overlap_kernel, path_count, tangent_kernel
from unlazy.kernels.averaged_tangents import ParameterPath as Way
from unlazy.kernels.averaged_tangents import averaged_tangents
from unlazy.kernels.compare import alignment, centered_alignment, effective_rank, kernel_distance, relative_change
from unlazy.kernels.flow import kernel_flow
from unlazy.kernels.jacobian import ModuleJacobian
from unlazy.kernels.tangent import tangent_diagonal
from unlazy.runtime import InputError, Unsupported

ALWAYS = float("inf")


def by_jacobians(net: nn.Module, x: Tensor) -> Tensor:
    """The trace kernel by torch.func: slow and obvious."""
    numbers = {name: p.detach() for name, p in net.named_parameters()}
    found = jacrev(lambda p: functional_call(net, p, (x,)))(numbers)
    rows = torch.cat([j.flatten(2) for j in found.values()], 2)
    return torch.einsum("nop,mop->nm", rows, rows)


# --- grouped filters in a scope ----------------------------------------------------------------------

GROUPED = {
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), 2),
    "two groups": (lambda: nn.Conv2d(8, 12, 3, groups=2), 2),
    "depthwise, 1-d": (lambda: nn.Conv1d(8, 16, 3, groups=8), 1),
    "groups, 3-d": (lambda: nn.Conv3d(8, 4, 2, groups=4), 3),
}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_filters_in_a_scope(name: str) -> None:
    make, axes = GROUPED[name]
    torch.manual_seed(3)
    first = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[axes](3, 8, 3, padding=1)
    net = nn.Sequential(first, nn.ReLU(), make(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)).double()
    x = torch.randn(12, 3, *(5,) * axes, dtype=torch.float64)
    net(x)
    expected = by_jacobians(net, x)
    kept = Scope(net, (x, torch.arange(12) % 2), views="tangents").history.array("tangent")
    assert np.allclose(kept, expected.numpy(), rtol=1e-5, atol=1e-6 * float(expected.max()))


# --- more paths than numbers hold --------------------------------------------------------------------


def deep(layers: int, width: int = 16) -> tuple[nn.Module, Tensor]:
    """A network with width ** layers paths or so; half of its gates are open."""
    torch.manual_seed(1)
    blocks: list[nn.Module] = [nn.Linear(4, width), nn.ReLU()]
    for _ in range(layers - 1):
        blocks += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*blocks, nn.Linear(width, 2)).double(), torch.randn(12, 4, dtype=torch.float64)


@pytest.mark.parametrize("layers", [50, 200])
def test_paths_beyond_float32_and_the_square_of_float64(layers: int, tmp_path: Path) -> None:
    net, x = deep(layers)
    y = torch.arange(12) % 2
    logs = overlap_kernel(net, x, log=True)
    assert float(logs.max()) > np.log(3e38)
    wanted = centered_alignment((logs - logs.max()).exp(), F.one_hot(y).double())

    def watch() -> Scope:
        return Scope(net, (x, y), tmp_path / "run", views="paths", budget=ALWAYS)

    with watch() as scope:
        scope.step(1)
    assert scope.history.first("overlap_alignment") == pytest.approx(float(wanted))
    kept = Run(tmp_path / "run").array("overlap", 0)
    assert np.isfinite(kept).all()
    assert kept.max() == 1
    with torch.no_grad():
        for p in net.parameters():
            p += 0.01 * torch.randn_like(p)
    with watch() as scope:  # goes on behind what the folder holds
        scope.step(2)
    moved = overlap_kernel(net, x, log=True)
    distance = kernel_distance((moved - moved.max()).exp(), (logs - logs.max()).exp())
    assert scope.history.last("overlap_distance") == pytest.approx(float(distance), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_comparisons_do_not_depend_on_the_size_of_kernels(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(7, 9, dtype=torch.float64) for _ in range(2))
    first, second, y = a @ a.T, b @ b.T, torch.randn(7, 1, dtype=torch.float64)
    large, other, columns = (size * first).to(dtype), (size * second).to(dtype), y.to(dtype)
    close = {"rel": 1e-4 if dtype == torch.float32 else 1e-10}
    assert float(kernel_distance(large, other)) == pytest.approx(float(kernel_distance(first, second)), **close)
    assert float(kernel_distance(large, large)) == pytest.approx(0, abs=1e-6)
    assert float(relative_change(large, other)) == pytest.approx(float(relative_change(first, second)), **close)
    for measure in (alignment, centered_alignment):
        assert float(measure(large, columns)) == pytest.approx(float(measure(first, y)), **close)
    for kind in ("entropy", "participation", "stable"):
        assert float(effective_rank(large, kind)) == pytest.approx(float(effective_rank(first, kind)), **close)


# --- loops -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 2])
def test_steps_that_begin_anew_every_epoch(batches: int) -> None:
    """Also where an epoch is one batch, so that every step has the same number."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(40, 3)
    y = torch.arange(40) % 2
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    scope = Scope(net, (x, y), views="neurons", budget=ALWAYS)

    def train() -> None:
        for _ in range(10):
            for step, rows in enumerate(torch.arange(40).chunk(batches)):
                optimiser.zero_grad()
                F.cross_entropy(net(x[rows]), y[rows]).backward()
                optimiser.step()
                scope.step(step)
                scope.step(step)  # told twice, done once

    with pytest.warns(UserWarning, match="steps count updates over the whole training"):
        train()
    scope.finish()
    assert scope.history.steps[-1] == 10 * batches
    assert scope.history.last("loss") == pytest.approx(float(F.cross_entropy(net(x), y).detach()), rel=1e-5)


# --- tangent kernels ---------------------------------------------------------------------------------


class Turned(nn.Module):
    """A complex weight between real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.turn.dtype) @ self.turn.T).abs() * self.scale


def test_complex_parameters_keep_their_imaginary_part() -> None:
    torch.manual_seed(2)
    net, x = Turned(), torch.randn(5, 3)
    wide = tangent_kernel(net, x, precision="float64")
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), tangent_kernel(net, x), rtol=1e-4, atol=1e-4)
    assert net.turn.dtype == torch.complex64


class Saving(nn.Module):
    """Computes its first layer again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, x, use_reentrant=False))


def test_gradient_checkpointing_is_no_obstacle() -> None:
    torch.manual_seed(0)
    net, x = Saving().double(), torch.randn(6, 4, dtype=torch.float64)
    expected = tangent_kernel(net, x, method="loop")
    torch.testing.assert_close(tangent_kernel(net, x), expected)
    torch.testing.assert_close(tangent_diagonal(net, x), expected.diagonal())
    history = Scope(net, (x, torch.arange(6) % 2), views="tangents").history
    assert np.allclose(history.array("tangent"), expected.numpy(), rtol=1e-5)


def test_a_kernel_too_large_for_half_precision_is_refused() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)).half(), 100 * torch.randn(4, 3).half()
    for find in (tangent_kernel, tangent_diagonal):
        with pytest.raises(InputError, match="float16"):
            find(net, x)
    assert tangent_kernel(net, x, precision="float32").isfinite().all()


def test_a_weight_with_two_names_moves_once() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    net[2].weight = net[0].weight
    states = []
    for size in (0.0, 0.3, 1.0):
        with torch.no_grad():
            for p in net.parameters():
                p += size * torch.randn_like(p)
        states.append({name: value.clone() for name, value in net.state_dict().items()})
    x = torch.randn(4, 3, dtype=torch.float64)
    lengths = [
        sum(float((b[n] - a[n]).square().sum()) for n, _ in net.named_parameters()) ** 0.5 for a, b in pairwise(states)
    ]
    halves = [averaged_tangents(net, Way(pair, points=4), x).features for pair in (states[:2], states[1:])]
    expected = sum(length * half for length, half in zip(lengths, halves, strict=True)) / sum(lengths)
    torch.testing.assert_close(averaged_tangents(net, Way(states, points=4), x).features, expected)


def test_vectors_flow_as_columns() -> None:
    torch.manual_seed(0)
    a = torch.randn(5, 6, dtype=torch.float64)
    y, start = torch.randn(2, 5, dtype=torch.float64)
    found = kernel_flow(a @ a.T, y, start, [0.0, 0.5])
    assert found.shape == (2, 5, 1)
    torch.testing.assert_close(found, kernel_flow(a @ a.T, y[:, None], start[:, None], [0.0, 0.5]))
    with pytest.raises(InputError, match="alike"):
        kernel_flow(a @ a.T, y[:, None], torch.zeros(5, 2), [1.0])


# --- clear words in place of bare errors -------------------------------------------------------------


class Routed(nn.Module):
    """Takes the samples of its first expert by a slice of indices."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(3, 2), nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(torch.relu(x)).argmax(1)
        out = torch.relu(self.experts[1](x))
        rows = (choice == 0).nonzero()[:, 0]
        return out.index_copy(0, rows, torch.relu(self.experts[0](x[rows])))


def test_routing_says_why_paths_cannot_be_counted() -> None:
    with pytest.raises(Unsupported):
        path_count(Routed(), torch.randn(6, 3))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_that_cannot_be_copied_is_refused_in_words() -> None:
    net = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1))
    net(torch.randn(2, 3)).sum()
    with pytest.raises(Unsupported, match="parametrizations"):
        ModuleJacobian(net, [name for name, _ in net.named_parameters()])
