"""The tangent kernel from a few directions of the outputs: unbiased, with an error that holds, within the memory planned."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from process_memory import run_code
from unlazy import tangent_kernel
from unlazy.kernels.compare import centered_alignment, kernel_distance, relative_change
from unlazy.kernels.gram import TooLittleMemory
from unlazy.kernels.projection import fold_columns
from unlazy.runtime import stream
from unlazy.scope import directions as module
from unlazy.scope.directions import REST, Directions, DirectionTangents, KernelEstimate

PLENTY = 2 * 10**9


class Tied(nn.Module):
    """A small transformer whose head is its embedding, with a parameter of positions that no rule serves."""

    def __init__(self, words: int = 40, width: int = 8, length: int = 5, each: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(0.1 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.each = each

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(self.body(self.words(x) + self.places))
        return out if self.each else out[:, -1]


class Untied(Tied):
    def __init__(self, words: int = 40, width: int = 8, length: int = 5) -> None:
        super().__init__(words, width, length)
        self.head = nn.Linear(width, words)


def dense() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 30)), torch.randn(9, 6)


def convolutional() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(54, 20)), torch.randn(7, 2, 8, 8)


def tied() -> tuple[nn.Module, Tensor]:
    return Tied(), torch.randint(0, 40, (8, 5))


def untied() -> tuple[nn.Module, Tensor]:
    return Untied(), torch.randint(0, 40, (8, 5))


def each_position() -> tuple[nn.Module, Tensor]:
    return Tied(12, each=True), torch.randint(0, 12, (6, 5))


CASES = [dense, convolutional, tied, untied, each_position]


def prepared(make, dtype=torch.float64) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net, x = make()
    return net.to(dtype).eval(), x.to(dtype) if x.is_floating_point() else x


def kernel_of(net: nn.Module, x: Tensor, budget: int = PLENTY, count: int = 16, **options) -> DirectionTangents:
    found = DirectionTangents(net, x, [name for name, _ in net.named_parameters()], budget, **options)
    assert found.arrange(len(x), count, budget)
    return found


def estimate(kernel: DirectionTangents, x: Tensor, count: int, seed: int) -> KernelEstimate:
    chosen = Directions(kernel.outputs, count, seed)
    names = {part: name for name, part in kernel.model.named_modules()}
    each = [kernel.in_direction(x, chosen, number, names).kernel.double() for number in range(len(chosen))]
    return KernelEstimate(torch.stack(each), None if kernel.folded else chosen.population)


@pytest.mark.parametrize("outputs", [2, 7, 30])
def test_all_rows_of_signs_together_are_the_identity(outputs: int) -> None:
    chosen = Directions(outputs, outputs - 1, 3)
    with mock.patch.object(Directions, "are_all", False):
        rows = torch.cat([chosen.row(number, torch.zeros(0).double()) for number in range(chosen.population)])
    assert rows.abs().eq(1).all()
    assert torch.equal(rows.T @ rows / chosen.population, torch.eye(outputs).double())
    several = torch.cat([Directions(outputs, outputs, 3).row(n, torch.zeros(0).double()) for n in range(outputs)])
    assert torch.allclose(several.T @ several / outputs, torch.eye(outputs).double())


def test_signs_do_not_depend_on_how_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIGN_PIECE", 64)
    row = Directions(1000, 4, 0).row(2, torch.zeros(0))[0]
    other = Directions(1000, 8, 0).row(2, torch.zeros(0))[0]
    assert torch.equal(row, other)  # more directions keep the first ones
    assert abs(float(row.mean())) < 0.15


@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize("chunk", [3, 100])
def test_one_direction_gives_the_kernel_of_that_combination_of_outputs(make, chunk: int) -> None:
    net, x = prepared(make)
    kernel = kernel_of(net, x)
    kernel.chunk, kernel._pair_bytes, kernel._rest_samples = chunk, 500, 2
    chosen = Directions(kernel.outputs, 4, 1)
    row = chosen.row(2, torch.zeros(0).double())[0]

    class Combined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return (self.net(x).flatten(1) @ row)[:, None]

    found = kernel.in_direction(x, chosen, 2, {part: name for name, part in net.named_modules()})
    expected = tangent_kernel(Combined(), x, method="loop")
    torch.testing.assert_close(found.kernel, expected, rtol=1e-9, atol=1e-9)
    held = dict(net.named_modules())
    assert all(list(held[name].parameters(recurse=False)) or "attn" in name for name in found.parts)


@pytest.mark.parametrize("make", CASES)
def test_every_output_in_turn_is_exact(make) -> None:
    net, x = prepared(make)
    kernel = kernel_of(net, x)
    found = estimate(kernel, x, kernel.outputs, 0)
    assert found.error() == 0
    torch.testing.assert_close(found.kernel, tangent_kernel(net, x, method="loop"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [dense, tied])
def test_without_rules_the_kernel_is_the_same(make) -> None:
    net, x = prepared(make)
    plain, loop = kernel_of(net, x), kernel_of(net, x, method="loop")
    assert not loop.fast
    torch.testing.assert_close(estimate(plain, x, 3, 0).each, estimate(loop, x, 3, 0).each, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "width"), [(dense, 61), (convolutional, 61), (tied, 61), (untied, 31)])
def test_folded_layers_leave_the_kernel_unbiased_with_a_true_error(make, width: int, monkeypatch) -> None:
    """Over many draws: the mean is the exact kernel within its own error, and the spread is the one that is stated."""
    monkeypatch.setattr(module, "FOLDED", width)
    net, x = prepared(make)
    kernel, exact = kernel_of(net, x), tangent_kernel(net, x)
    kernel.folded = frozenset(kernel.layer_bytes)
    found = [estimate(kernel, x, 8, seed) for seed in range(25)]
    misses = torch.stack([one.kernel - exact for one in found])
    spread = float(misses.square().mean(0).sum().sqrt() / exact.norm())
    assert float(misses.mean(0).norm() / exact.norm()) < 2.5 * spread / math.sqrt(len(found))
    stated = math.sqrt(sum(one.error() ** 2 for one in found) / len(found))
    assert stated == pytest.approx(spread, rel=0.35)


@pytest.mark.slow
@pytest.mark.parametrize("make", CASES)
def test_entries_are_within_the_stated_error_in_95_of_100(make) -> None:
    """The share of entries is averaged over draws: entries of one draw share their noise."""
    net, x = prepared(make)
    kernel, exact, count = kernel_of(net, x), tangent_kernel(net, x), 16
    shares = []
    for seed in range(20):
        found = estimate(kernel, x, count, seed)
        shares.append(float(((found.kernel - exact).abs() <= found.entry_bounds()).double().mean()))
    assert sum(shares) / len(shares) >= 0.95, shares


@pytest.mark.slow
def test_numbers_of_an_estimate_carry_an_error_that_covers_their_miss() -> None:
    """Distance, change and alignment between two networks, from the same directions, over draws: two errors cover most."""
    net, x = prepared(untied)
    columns = F.one_hot(torch.arange(len(x)) % 2).double()
    numbers = {
        "distance": lambda now, start: kernel_distance(now, start),
        "change": lambda now, start: relative_change(now, start),
        "alignment": lambda now, start: centered_alignment(now, columns),
    }
    exact_start, before = tangent_kernel(net, x), {}
    for seed in range(12):
        before[seed] = estimate(kernel_of(net, x), x, 16, seed)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.2 * torch.randn_like(p))
    exact = tangent_kernel(net, x)
    for name, number in numbers.items():
        true, inside, errors = float(number(exact, exact_start)), 0, []
        for seed, start in before.items():
            found = estimate(kernel_of(net, x), x, 16, seed)
            error = float(found.error_of(number, start))
            errors.append(error)
            inside += abs(float(number(found.kernel, start.kernel)) - true) <= 2 * error
        assert inside >= 10, name
        assert max(errors) < 0.5 * true, name


def test_common_directions_make_a_smaller_distance_than_others_do() -> None:
    """Two kernels of one network, each from its own directions, seem to differ; from common ones they do not."""
    net, x = prepared(tied)
    kernel = kernel_of(net, x)
    one, same, other = (estimate(kernel, x, 4, seed) for seed in (0, 0, 1))
    assert float(kernel_distance(one.kernel, same.kernel)) == pytest.approx(0, abs=1e-12)
    assert float(kernel_distance(one.kernel, other.kernel)) > 1e-4


def test_folding_is_a_signed_sum_over_columns_of_equal_remainder() -> None:
    rows = torch.randn(3, 23).double()
    found = torch.zeros(3, 7).double()
    random = stream(0, "fold")
    for start in (0, 10, 20):
        fold_columns(rows[:, start : start + 10], found, start, random)
    random, expected = stream(0, "fold"), torch.zeros(3, 7).double()
    for start in (0, 10, 20):
        some = rows[:, start : start + 10]
        signs = 1 - 2 * torch.randint(0, 2, (some.shape[1],), generator=random, dtype=torch.int8).double()
        for column in range(some.shape[1]):
            expected[:, (start + column) % 7] += signs[column] * some[:, column]
    torch.testing.assert_close(found, expected)


# --- memory ----------------------------------------------------------------------------------------------------


def test_large_layers_are_folded_before_samples_are_dropped_and_the_same_ones_later() -> None:
    torch.manual_seed(0)
    net, x = Tied(3000, 48, 16).eval(), torch.randint(0, 3000, (24, 16))
    kernel = kernel_of(net, x, 200 * 10**6)
    assert not kernel.folded
    assert kernel.most_samples(24, 24, 16, 14 * 10**6) == 24
    assert kernel.folded == {REST}  # the shared table
    chosen = kernel.folded
    kernel.most_samples(24, 24, 16, 200 * 10**6, chosen)
    assert kernel.folded == chosen
    with pytest.raises(TooLittleMemory, match="too small for the tangent kernel of 24 samples"):
        kernel.most_samples(24, 24, 16, 10**6)


PEAK = """
import sys
import torch
from torch import nn
sys.path[:0] = {paths!r}
from process_memory import PeakGrowth
from test_directions import Tied, Untied, estimate
from unlazy.scope.directions import DirectionTangents
from unlazy.scope.memory import MemoryLimit

torch.set_num_threads(1)

def run(net, x, budget):
    names = [name for name, _ in net.named_parameters()]
    kernel = DirectionTangents(net, x[:8], names, budget, MemoryLimit(budget, net, x).sample_bytes)
    assert kernel.most_samples(len(x), len(x), 4, budget) == len(x)
    return kernel, estimate(kernel, x, 4, 0)

kind = {kind}
run(kind(64, 16, 8).eval(), torch.randint(0, 64, (8, 8)), 10**9)  # libraries loaded
net, x = {net}
net.eval()
with PeakGrowth() as peak:
    kernel, _ = run(net, x, {budget})
print(peak.bytes, {budget}, 4 * sum(p.numel() for p in net.parameters()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("kind", "net", "budget"),
    [
        ("Untied", "Untied(20_000, 128, 64), torch.randint(0, 20_000, (48, 64))", 120 * 10**6),
        ("Tied", "Tied(20_000, 64, 32), torch.randint(0, 20_000, (48, 32))", 60 * 10**6),
        ("Tied", "Tied(4_000, 64, 32, True), torch.randint(0, 4_000, (24, 32))", 60 * 10**6),
    ],
)
def test_measured_peaks_keep_the_plan(kind: str, net: str, budget: int) -> None:
    """The process grows by at most the memory given and three copies of the parameters, with thousands of outputs."""
    code = PEAK.format(paths=[str(Path(__file__).parent)], kind=kind, net=net, budget=budget)
    grown, allowed, parameters = map(int, run_code(code).split())
    assert grown < allowed + 3 * parameters, f"{grown / 1e6:.0f} MB, {allowed / 1e6:.0f} + 3 x {parameters / 1e6:.0f}"
