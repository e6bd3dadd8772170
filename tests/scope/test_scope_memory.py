"""A scope keeps within the memory it may take: it plans before it allocates, and measures less where less fits."""

from __future__ import annotations

import sys
import time
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import cases
from process_memory import run_code
from unlazy import Scope, tangent_kernel
from unlazy.kernels.gated import net_gates
from unlazy.kernels.gram import TooLittleMemory, free_memory, plan_gram
from unlazy.kernels.tangent_engine import TangentKernel
from unlazy.runtime import InputError
from unlazy.scope.gates import open_gates
from unlazy.scope.layers import LayerTangents
from unlazy.scope.measurements import LEAST_ROWS, Measurements
from unlazy.scope.memory import MemoryLimit
from unlazy.scope.probe_set import add_target_columns, parse_probe_set
from unlazy.scope.tangent import FEWEST_DIRECTIONS, FEWEST_SAMPLES, TangentMeasure
from unlazy.scope.user_model import preserve_state

WATCHED = """
import sys
import torch
from torch import nn
from process_memory import PeakGrowth
from unlazy import Scope

torch.set_num_threads(1)
torch.manual_seed(0)

class Transformer(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(100, width)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.body(self.embedding(x)).mean(1))

def train(net, classes, n, memory):
    x, y = torch.randint(100, (n, 64)), torch.randint(classes, (n,))
    optimiser = torch.optim.SGD(net.parameters(), 0.01)
    scope = Scope(net, probe=(x, y), memory=memory, budget=float("inf"), strict=True)
    for step in range(1, 4):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[:4]), y[:4]).backward()
        optimiser.step()
        scope.step(step)
    scope.finish()
    return scope

train(Transformer(16, 3), 3, 20, None)  # libraries loaded, pools warm
net, budget = Transformer(192, 6000), 64 * 10**6
with PeakGrowth() as peak:
    history = train(net, 6000, 128, budget).history
parameters = 4 * sum(p.numel() for p in net.parameters())
assert all(history.last(name) > 0 for name in ("loss", "linearisation_error", "tangent_error", "tangent_change"))
assert any("random directions of 6000 outputs" in note for note in history.notes), history.notes
print(history.notes)
assert any("samples pass the model in parts" in note for note in history.notes), history.notes
print(peak.bytes, budget, parameters)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_transformer_with_thousands_of_classes_is_watched_within_the_memory_given() -> None:
    """The process grows by at most the memory given and four copies of the parameters: the training's own gradient, the start,
    and two while measuring. All 128 samples at a time would take more, the exact kernel 30 GB for one sample.
    """
    grown, budget, parameters = map(int, run_code(WATCHED).splitlines()[-1].split())
    assert grown < budget + 4 * parameters, (
        f"{grown / 1e6:.0f} MB, {budget / 1e6:.0f} allowed beside {parameters / 1e6:.0f}"
    )


def instruments_of(net: nn.Module, x: Tensor, y: Tensor, memory: int | None) -> Measurements:
    with torch.no_grad():
        probe = add_target_columns(parse_probe_set((x, y)), net(x))
    return Measurements(net, probe, limit=MemoryLimit(memory, net, x))


def dense(outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, outputs)).double()


@pytest.mark.parametrize("make", [TangentKernel, lambda net, x: LayerTangents(net, x, ["weight", "bias"], "1GB")])
def test_too_many_outputs_are_refused_before_anything_large_is_made(make) -> None:
    net, x = nn.Linear(8, 200_000), torch.randn(4, 8)
    began = time.perf_counter()
    with (
        mock.patch(
            "unlazy.kernels.tangent_engine.output_directions", side_effect=AssertionError("160 GB of directions")
        ),
        pytest.raises(TooLittleMemory, match="too small: the gradients of one sample in 200000 directions"),
    ):
        make(net, x)
    assert time.perf_counter() - began < 2


def test_a_plan_that_does_not_fit_says_so_by_its_type() -> None:
    net, x = dense(), torch.randn(50, 6).double()
    kernel = TangentKernel(net, x)
    with pytest.raises(TooLittleMemory, match="is too small: the result alone takes"):
        plan_gram(kernel, 50, None, 30_000)
    assert issubclass(TooLittleMemory, InputError)


@pytest.mark.parametrize(
    "net",
    [
        dense(7),
        nn.Sequential(
            nn.Unflatten(1, (2, 3)), nn.Linear(3, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(10, 7)
        ).double(),
        nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(24, 7)
        ).double(),
    ],
)
def test_planned_features_are_as_large_as_those_that_are_made(net: nn.Module) -> None:
    x = torch.randn(5, 6).double()
    kernel = TangentKernel(net.eval(), x, outputs="full")
    with kernel.ready():
        held = [tensor for share in kernel.features(x) for tensor in share.tensors()]
    assert len(kernel.fast) == sum(bool(list(module.parameters(recurse=False))) for module in net.modules())
    assert sum(tensor.numel() * 8 for tensor in held) == 5 * kernel.feature_bytes


def test_the_default_is_a_share_of_what_there_is_and_of_what_is_free(monkeypatch) -> None:
    limit = MemoryLimit(None, dense(), torch.randn(4, 6).double())
    assert limit.allowed() <= free_memory() / 4 * 1.1
    monkeypatch.setattr("unlazy.scope.memory.free_memory", lambda: 4_000_000)
    assert limit.allowed() == 1_000_000
    monkeypatch.setattr("unlazy.scope.memory.free_memory", lambda: 10**18)
    monkeypatch.setattr("os.sysconf", lambda name: 10**4)
    assert limit.allowed() == 10**7


def test_samples_pass_in_parts_that_fit_and_give_the_same_numbers() -> None:
    net, x, y = dense().eval(), torch.randn(64, 6).double(), torch.arange(64) % 4
    sizes: list[int] = []
    net.register_forward_hook(lambda module, arguments, out: sizes.append(len(arguments[0])))
    with preserve_state(net):
        whole, split = instruments_of(net, x, y, None), instruments_of(net, x, y, 10_000)
        expected = {name: whole.measures[name](0) for name in ("outputs", "gates", "paths", "linear")}
        sizes.clear()
        found = {name: split.measures[name](0) for name in expected}
    sample = split.limit.sample_bytes
    assert sample == 8 * (40 + 40 + 40 + 40 + 4)  # what two ReLUs and three layers make
    assert max(sizes) <= 10_000 / sample < 8
    for measure, measured in found.items():
        for name, value in measured.items():
            assert torch.allclose(value, expected[measure][name], atol=1e-12), name
    assert ["in parts (6 at a time)" in note for note in split.notes] == [True]
    assert not whole.notes


def test_gates_of_our_networks_pass_in_parts_too() -> None:
    name = next(iter(cases.SPECS))
    net, x = cases.net(name), cases.points(name, 10)
    with mock.patch("unlazy.scope.gates.net_gates", side_effect=net_gates) as seen:
        found = open_gates(net, x, 4)
    assert [len(call.args[1]) for call in seen.call_args_list] == [4, 4, 2]
    assert all(torch.equal(a, b) for a, b in zip(found, open_gates(net, x), strict=True))


def test_fewer_samples_before_an_estimate() -> None:
    net, x, y = dense(30).eval(), torch.randn(200, 6).double(), torch.arange(200) % 30
    with preserve_state(net):
        measurements = instruments_of(net, x, y, 3_500_000)
        rows = measurements._choose_rows("tangent")
        assert rows is not None
        assert LEAST_ROWS <= len(rows) < 200
        assert ["the tangent kernel is taken on" in note for note in measurements.notes] == [True]
        measurements.rows["tangent"] = rows
        kernel = measurements.tangent(0)["tangent"]
    assert measurements._tangents.method == "layers"
    assert torch.allclose(kernel, tangent_kernel(net, x[rows]))


def test_an_estimate_where_the_exact_kernel_does_not_fit_and_nothing_of_it_runs() -> None:
    net, x, y = dense(300).eval(), torch.randn(40, 6).double(), torch.arange(40)
    with preserve_state(net), mock.patch.object(TangentMeasure, "by_layer", side_effect=AssertionError("too large")):
        measurements = instruments_of(net, x, y, 1_000_000)
        first = measurements.measure_start()
    assert "tangent" not in measurements.left_out
    assert float(first["tangent_error"]) > 0
    assert len(measurements.samples_of("tangent")) >= LEAST_ROWS
    assert sum("samples: 1 MB is too small" in note for note in measurements.notes) == 1


def test_a_measurement_that_does_not_fit_now_is_left_out_once() -> None:
    net, x, y = dense().eval(), torch.randn(12, 6).double(), torch.arange(12) % 4
    with preserve_state(net):
        measurements = instruments_of(net, x, y, None)
        measurements.measure_start()
        measurements._limit.memory = 20_000
        assert "tangent" not in measurements.measure(1)
        assert any("tangent is missing at some steps" in note for note in measurements.notes)
        measurements._limit.memory = None
        assert "tangent" in measurements.measure(2)


def test_memory_that_is_no_size_is_refused() -> None:
    with pytest.raises(InputError, match="2GB"):
        Scope(dense(), probe=(torch.randn(8, 6), torch.arange(8) % 4), memory="much")


def test_an_estimate_that_would_take_long_uses_fewer_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unlazy.scope.tangent.TangentMeasure.seconds", 0.0)
    monkeypatch.setattr("unlazy.scope.tangent.idle_seconds", lambda do: (do(), 1.0)[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3000))
    x, y = torch.randn(32, 8), torch.randint(0, 3000, (32,))
    measurements = Scope(net, probe=(x, y), memory=2_000_000)._session.measurements  # type: ignore[union-attr]
    assert measurements._tangents.method == "directions"
    assert len(measurements._tangents.directions) == FEWEST_DIRECTIONS
    assert len(measurements.samples_of("tangent")) == FEWEST_SAMPLES
    assert any(
        f"from {FEWEST_DIRECTIONS} random directions of 3000 outputs on {FEWEST_SAMPLES}" in note
        for note in measurements.notes
    )


def test_a_third_of_what_training_takes_once_a_step_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two copies of the parameters; 256 MB in any case, and 32 MB beside copies that take all of it."""
    found = iter([(10**9, 2 * 10**9), (3 * 10**9, 4 * 10**9), (3 * 10**9, 3 * 10**9)])
    monkeypatch.setattr("unlazy.scope.memory.free_memory", lambda: 10**18)
    monkeypatch.setattr("os.sysconf", lambda name: 10**9)
    monkeypatch.setattr("unlazy.scope.memory._resident", lambda: next(found))
    limit = MemoryLimit(None, dense(), torch.randn(4, 6).double(), step_seen=False)
    own = limit.parameters
    limit.begin()
    limit.see_step()
    assert limit.training == 3 * 10**9 + own
    assert limit.allowed() == int((3 * 10**9 + own) / 3 - 2 * own)
    limit.see_step()  # less than before: a training takes what it took at its peak
    assert limit.training == 3 * 10**9 + own
    limit.training = 0
    assert limit.allowed() == 2**28 - 2 * own
    limit.parameters = 2**30
    assert limit.allowed() == 2**25
