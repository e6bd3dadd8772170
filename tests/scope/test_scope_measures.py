"""What a scope measures: every quantity against its own definition, computed another way; what a model lacks is left out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cases
import scope_nets
from scope_nets import measurements_of
from unlazy import (
    DeepLinearNet,
    HardGate,
    InputError,
    Scope,
    SoftGate,
    layer_kernels,
    linearise,
    overlap_kernel,
    path_count,
    record,
    tangent_kernel,
)
from unlazy.kernels.agop import feature_ansatz
from unlazy.kernels.compare import centered_alignment, effective_rank, kernel_distance, relative_change
from unlazy.kernels.reference import tangent_kernel as slow_tangent_kernel
from unlazy.models.build import build
from unlazy.models.spec import ImageSpec
from unlazy.runtime import stream
from unlazy.scope import measurements as measurement_rules
from unlazy.scope import tangent
from unlazy.scope.layers import LayerTangents, agop_correlation
from unlazy.scope.measurements import Measurements
from unlazy.scope.user_model import find_predictions, preserve_state


def moved(net: nn.Module, size: float = 0.05) -> None:
    """Somewhere else in parameter space."""
    random = stream(7, "move")
    with torch.no_grad():
        for p in net.parameters():
            p += size * torch.randn(p.shape, generator=random, dtype=torch.float64).to(p)


# --- numbers against their definitions -----------------------------------------------------------------------


def test_kernels_and_their_comparisons(mlp) -> None:
    net, x, y = mlp
    net.eval()
    measurements = measurements_of(net, x, y)
    first = measurements.measure_start()
    before, overlap = tangent_kernel(net, x), overlap_kernel(net, x)
    moved(net)
    now = measurements.measure(9)
    after = tangent_kernel(net, x)
    one_hot = F.one_hot(y).double()
    assert torch.allclose(first["tangent"], before)
    assert torch.allclose(now["tangent"], after)
    for name, value in {
        "tangent_distance": kernel_distance(after, before),
        "tangent_change": relative_change(after, before),
        "tangent_alignment": centered_alignment(after, one_hot),
        "tangent_rank": effective_rank(after),
        "tangent_velocity": kernel_distance(after, before) / math.log(10),
        "overlap_distance": kernel_distance(overlap_kernel(net, x), overlap),
        "overlap_alignment": centered_alignment(overlap_kernel(net, x), one_hot),
        "tangent_mass_1": after.diagonal()[y == 1].sum() / after.trace(),
        "alignment_1": centered_alignment(after, (y == 1).double()[:, None]),
    }.items():
        assert float(now[name]) == pytest.approx(float(value), rel=1e-9), name
    for name, kernel in layer_kernels(net, x).items():
        assert float(now[f"alignment@{name}"]) == pytest.approx(float(centered_alignment(kernel, one_hot)), rel=1e-9)
    assert float(first["tangent_distance"]) == pytest.approx(0, abs=1e-12)


def test_losses_paths_gates_and_motion(mlp) -> None:
    net, x, y = mlp
    net.eval()
    measurements = measurements_of(net, x, y)
    measurements.measure_start()
    gates = torch.cat([g.open.flatten(1) for g in record(net, x)], 1)
    theta = nn.utils.parameters_to_vector(net.parameters()).detach()
    moved(net)
    now = measurements.measure(3)
    with torch.no_grad():
        out = net(x)
    assert torch.equal(now["output"], out)
    assert float(now["loss"]) == pytest.approx(float(F.cross_entropy(out, y)), rel=1e-12)
    assert float(now["loss_2"]) == pytest.approx(float(F.cross_entropy(out[y == 2], y[y == 2])), rel=1e-12)
    assert float(now["accuracy"]) == float((out.argmax(1) == y).double().mean())
    logs = path_count(net, x).log1p()
    assert torch.allclose(now["log_paths"], logs)
    assert float(now["paths_0"]) == pytest.approx(float(logs[y == 0].mean()))
    flipped = gates != torch.cat([g.open.flatten(1) for g in record(net, x)], 1)
    assert 0 < float(flipped.double().mean()) == pytest.approx(float(now["gate_flips"]))
    later = nn.utils.parameters_to_vector(net.parameters()).detach()
    assert float(now["parameter_motion"]) == pytest.approx(float((later - theta).norm() / theta.norm()), rel=1e-12)


@pytest.mark.parametrize("name", scope_nets.NAMES)
def test_linearisation_is_the_linearised_network(name: str) -> None:
    """f_lin at theta equals the tangent model moved to theta, for forward mode and for double backward."""
    net, x, y = scope_nets.build(name)
    net.eval()
    measurements = measurements_of(net, x, y)
    measurements.measure_start()
    assert "linear" not in measurements.left_out, measurements.left_out
    line = linearise(measurements.model)
    moved(net, 0.01)
    with preserve_state(net):
        now = measurements.measure(1)
    own = dict(measurements.model.named_parameters())
    delta = torch.cat(
        [(own[n] - p).detach().reshape(-1) for n, p in line.jacobian.split(line.jacobian.vector()).items()]
    )
    with torch.no_grad():
        line.displacement.copy_(delta)
        expected = scope_nets.called(line, x).reshape(len(y), -1)
        out, start = (find_predictions(scope_nets.called(m, x)).reshape(len(y), -1) for m in (net, line.jacobian.base))
    assert torch.allclose(now["linear"], expected, atol=1e-9)
    error = (out - expected).norm() / (out - start).norm()
    assert 1e-5 < float(now["linearisation_error"]) == pytest.approx(float(error), rel=1e-6)


def test_a_network_that_did_not_move_is_on_its_tangent() -> None:
    """In single precision: two ways to compute the same outputs differ by rounding, which is no distance at all."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)
    net = nn.Sequential(nn.TransformerEncoder(block, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(256, 5))
    x, y = torch.randn(40, 4, 64), torch.arange(40) % 5
    scope = Scope(net, (x, y), budget=math.inf, views=("tangents",), strict=True)
    scope.step(1)
    with torch.no_grad():
        net[2].bias += 1e-7  # less than the outputs can show
    scope.step(2)
    assert list(scope.history.scalars["linearisation_error"].values()) == [0.0, 0.0, 0.0]
    with torch.no_grad():
        net[2].weight *= 1.01
    scope.step(3)
    assert (
        0 < scope.history.last("linearisation_error") < 1e-2
    )  # the last layer is linear: rounding beside a real distance


def test_a_linear_model_stays_on_its_tangent() -> None:
    net = nn.Linear(3, 2).double()
    measurements = measurements_of(net, torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 2)
    measurements.measure_start()
    moved(net)
    now = measurements.measure(1)
    assert float(now["linearisation_error"]) < 1e-12
    assert float(now["tangent_distance"]) < 1e-12


@pytest.mark.parametrize("name", scope_nets.NAMES)
def test_layers_add_up_and_match_the_general_path(name: str) -> None:
    """Stand-ins for attention, batched gradients for the rest: all agree with one backward pass per sample."""
    net, x, y = scope_nets.build(name)
    net.eval()
    measurements = measurements_of(net, x, y)
    with preserve_state(net):
        kernel = LayerTangents(measurements.model, measurements.probe.x, list(measurements.trained))
        tangents = kernel.by_layer(measurements.probe.x, measurements.names)
        expected = tangent_kernel(measurements.model, measurements.probe.x, method="loop")
        parts = {
            name: tangent_kernel(measurements.model, measurements.probe.x, parameters=names, method="loop")
            for name, names in own_parameters(measurements).items()
        }
    assert torch.allclose(tangents.kernel, expected, rtol=1e-8, atol=1e-10 * float(expected.max()))
    assert tangents.parts.keys() == parts.keys()
    for layer, part in parts.items():
        assert torch.allclose(tangents.parts[layer], part, rtol=1e-7, atol=1e-10 * float(expected.max())), layer


def own_parameters(measurements: Measurements) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    prefix = "model." if type(measurements.model).__name__ == "SelectedOutput" else ""
    for name in measurements.trained:
        found.setdefault(name.removeprefix(prefix).rpartition(".")[0], []).append(name)
    return found


def test_attention_needs_no_backward_pass_per_sample() -> None:
    net, x, _ = scope_nets.build("transformer")
    with preserve_state(net):
        kernel = LayerTangents(net, x, [name for name, _ in net.named_parameters()])
    assert [tuple(p.shape) for p in kernel._rest()] == []
    assert len(kernel._stand_ins) == 4  # two layers, projections in and out


def test_agop_correlation_is_that_of_the_feature_ansatz(mlp) -> None:
    net, x, y = mlp
    net.eval()
    few = x[: measures_samples()]
    found = feature_ansatz(net, few)
    with preserve_state(net):
        kernel = LayerTangents(net, few, [name for name, _ in net.named_parameters()])
        names = {module: name for name, module in net.named_modules()}
        moments = kernel.by_layer(few, names).moments
    modules = dict(net.named_modules())
    for name, ansatz in found.items():
        assert agop_correlation(modules[name], moments[name]) == pytest.approx(ansatz.correlation, abs=1e-9)
    hidden = [ansatz.correlation for name, ansatz in found.items() if name != "6"]
    measurements = measurements_of(net, few, y[: len(few)])
    assert float(measurements.measure_start()["agop_correlation"]) == pytest.approx(np.mean(hidden), abs=1e-9)


def measures_samples() -> int:
    from unlazy.scope.layers import AGOP_SAMPLES

    return AGOP_SAMPLES


def test_a_model_too_slow_for_the_exact_kernel_is_estimated(mlp, monkeypatch) -> None:
    net, x, y = mlp
    monkeypatch.setattr(tangent, "EXACT_SECONDS", 0.0)
    monkeypatch.setattr(tangent, "DIRECTIONS", 2)  # of three outputs
    measurements = measurements_of(net.eval(), x, y)
    first = measurements.measure_start()
    assert 0 < float(first["tangent_error"]) < 0.5
    assert 0 < float(first["tangent_alignment_error"]) < 0.5
    assert any("estimated, from 2 random directions of 3 outputs" in note for note in measurements.notes)
    again = measurements.measure(1)
    for name in ("tangent_distance", "tangent_change", "tangent_distance_error", "tangent_change_error"):
        assert float(again[name]) == pytest.approx(0, abs=1e-7), name  # the same directions again


def test_few_outputs_in_turn_give_the_exact_kernel_and_no_error(mlp, monkeypatch) -> None:
    net, x, y = mlp
    exact = measurements_of(net.eval(), x, y).measure_start()
    monkeypatch.setattr(tangent, "EXACT_SECONDS", 0.0)
    measurements = measurements_of(net, x, y)
    first = measurements.measure_start()
    assert measurements._tangents.method == "directions"
    assert any("exact, from each of 3 outputs in turn" in note for note in measurements.notes)
    assert "tangent_error" not in first
    part = measurements.samples_of("tangent")
    assert torch.allclose(first["tangent"], tangent_kernel(net, part.x), atol=1e-10)
    if len(part) == len(x):
        names = [name for name in first if name.startswith("alignment@") or name == "agop_correlation"]
        assert names
        assert all(float(first[name]) == pytest.approx(float(exact[name]), abs=1e-9) for name in names)


def test_slow_looks_take_a_balanced_part_of_the_samples(mlp, monkeypatch) -> None:
    net, x, y = mlp
    monkeypatch.setattr(measurement_rules, "MEASURE_SECONDS", 0.0)
    monkeypatch.setattr(measurement_rules, "LEAST_ROWS", 9)
    measurements = measurements_of(net.eval(), x, y)
    first = measurements.measure_start()
    rows = measurements.rows["tangent"]
    assert rows is not None
    assert len(rows) == 9
    assert y[rows].bincount().tolist() == [3, 3, 3]
    assert torch.allclose(first["tangent"], tangent_kernel(net, x[rows]))
    assert torch.allclose(first["overlap"], overlap_kernel(net, x[rows]))
    assert first["linear"].shape == first["output"].shape
    assert int(first["linear"].isfinite().all(1).sum()) == 9
    assert len(first["output"]) == len(x)


def test_more_paths_than_float64_holds_are_compared_all_the_same(mlp, monkeypatch) -> None:
    net, x, y = mlp

    def overflows(model: nn.Module, x: Tensor, *, log: bool = False, **options: object) -> Tensor:
        if not log:
            raise InputError("too many")
        return overlap_kernel(model, x, log=True) + 1000

    measurements = measurements_of(net.eval(), x, y)
    exact = measurements.measure_start()
    monkeypatch.setattr(measurement_rules, "overlap_kernel", overflows)
    moved(net, 0.0)
    assert float(measurements.measure(1)["overlap_distance"]) == pytest.approx(0, abs=1e-9)
    assert float(measurements.measure(2)["overlap_rank"]) == pytest.approx(float(exact["overlap_rank"]), rel=1e-9)


# --- what a model offers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", scope_nets.NAMES)
def test_every_kind_of_model_is_seen(name: str) -> None:
    net, x, y = scope_nets.build(name)
    measurements = measurements_of(net, x, y)
    with preserve_state(net):
        measurements.measure_start()
        moved(net, 0.01)
        now = measurements.measure(5)
    scalars = {key for key, value in now.items() if value.ndim == 0}
    assert {"loss", "accuracy", "parameter_motion", "tangent_distance", "linearisation_error", "loss_1"} <= scalars
    assert all(bool(value.isfinite().all()) for value in now.values())
    gates, paths, neurons = scope_nets.OFFERS[name]
    for offered, quantity in (
        (gates, "gate_flips"),
        (paths, "paths"),
        (paths, "overlap_distance"),
        (neurons, "neurons"),
    ):
        assert (quantity in now) == offered, quantity
    reasons = {"gates": gates, "paths": paths, "overlap": paths, "neurons": neurons}
    for measure, offered in reasons.items():
        assert (measure in measurements.left_out) != offered
        assert offered or len(measurements.left_out[measure]) > 10


@pytest.mark.parametrize("name", cases.SPECS)
def test_gated_networks_are_seen(name: str) -> None:
    net, x = cases.net(name), cases.points(name, 12)
    y = (
        torch.arange(12) % 2
        if net.settings.outputs == 2
        else torch.randn(12, generator=stream(1, "y"), dtype=torch.float64)
    )
    measurements = measurements_of(net, x, y)
    with preserve_state(net):
        first = measurements.measure_start()
        moved(net, 0.01)
        now = measurements.measure(5)
    assert "tangent" in first
    if net.settings.gating == "linear":
        assert {"normals", "offsets"} <= now.keys()
    if name == "dlgn-hard":
        assert "hard gates have no derivative" in measurements.left_out["linear"]
        assert any("over the value parameters" in note for note in measurements.notes)
        value = tangent_kernel(net.hard(), x, parameters="value")
        assert torch.allclose(now["tangent"], value, atol=1e-10)


IMAGES = ImageSpec((4, 5), channels=2, classes=2, batch_norm=False)
IMAGE_NETS = {
    "relu": IMAGES.relu(),
    "soft": replace(IMAGES, gate=SoftGate(4.0)),
    "hard": replace(IMAGES, gate=HardGate(4.0)),
    "residual": replace(IMAGES, blocks=(1, 1), batch_norm=True, gate=HardGate(4.0)),
    "mup": replace(IMAGES, parametrisation="mup"),
}


@pytest.mark.parametrize("name", IMAGE_NETS)
def test_gated_networks_on_images_are_seen(name: str) -> None:
    """Their gates count wherever a branch of its own makes them, and no derivative goes through a soft backward pass."""
    net = build(IMAGE_NETS[name], seed=1).double().eval()
    x = torch.randn(10, 2, 5, 5, generator=stream(3, "pictures"), dtype=torch.float64)
    measurements = measurements_of(net, x, torch.arange(10) % 2)
    with preserve_state(net):
        measurements.measure_start()
        before = [gate.flatten(1) for gate in net.gates(x).hard()]
        moved(net, 0.05)
        now = measurements.measure(5)
    after = [gate.flatten(1) for gate in net.gates(x).hard()]
    flips = (torch.cat(before, 1) != torch.cat(after, 1)).double().mean()
    assert 0 < float(now["gate_flips"]) == pytest.approx(float(flips))
    hard = isinstance(net.settings.gate, HardGate) and net.settings.gating == "linear"
    assert ("linearisation_error" in now) != hard
    assert any("over the value parameters" in note for note in measurements.notes) == hard
    exact = slow_tangent_kernel(net.hard() if hard else net, x).diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(now["tangent"], exact, rtol=1e-8, atol=1e-10)
    if net.settings.gating == "linear":
        with torch.no_grad():
            loss = F.cross_entropy(net.hard()(x), torch.arange(10) % 2)
        assert float(now["loss_hard_gates"]) == pytest.approx(float(loss))


def test_a_deep_linear_network_has_a_tangent() -> None:
    """Open gates are no function of parameters: nothing jumps."""
    net = DeepLinearNet(4, 2, width=6, depth=2).double()
    x = torch.randn(20, 4, generator=stream(4, "linear"), dtype=torch.float64)
    measurements = measurements_of(net, x, torch.arange(20) % 2)
    measurements.measure_start()
    moved(net)
    assert 0 < float(measurements.measure(3)["linearisation_error"]) < 1
    assert measurements.notes == []


def test_neurons_are_unit_directions_of_the_first_layer(mlp) -> None:
    net, x, y = mlp
    first = measurements_of(net.eval(), x, y).measure_start()
    weight = net[0].weight.detach()
    assert torch.allclose(first["neurons"] * first["neuron_norms"][:, None], weight)
    assert torch.allclose(first["neurons"].norm(dim=1), torch.ones(len(weight), dtype=torch.float64))


def test_outputs_that_are_not_finite_are_recorded_and_nothing_else_is_tried(mlp) -> None:
    net, x, y = mlp
    measurements = measurements_of(net.eval(), x, y)
    measurements.measure_start()
    with torch.no_grad():
        net[0].weight[0, 0] = float("nan")
    now = measurements.measure(4)
    assert math.isnan(float(now["loss"]))
    assert "tangent" not in now
    assert measurements.left_out == {}  # they come back when the numbers do


def test_a_look_that_fails_later_falls_out_alone(mlp, monkeypatch) -> None:
    net, x, y = mlp
    measurements = measurements_of(net.eval(), x, y)
    measurements.measure_start()
    monkeypatch.setattr(
        measurement_rules, "path_count", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no room\nat all"))
    )
    now = measurements.measure(4)
    assert "paths" not in now
    assert "tangent_distance" in now
    assert measurements.newly_failed == {"paths": "paths could not be computed for this model (RuntimeError: no room)"}
    assert "paths" not in measurements.measures


def test_a_look_that_fails_when_it_is_repeated_is_left_out_too(mlp, monkeypatch) -> None:
    """The first measurement is taken twice: a model that can be looked at only once must not end in an error."""
    net, x, y = mlp
    measurements = measurements_of(net.eval(), x, y)
    monkeypatch.setattr(measurements, "rows", dict.fromkeys(measurement_rules.MOST_ROWS))  # nothing is timed beforehand
    calls: list[int] = []

    def once(*arguments: object, **options: object) -> object:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("only once")
        return path_count(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(measurement_rules, "path_count", once)
    first = measurements.measure_start()
    assert len(calls) == 2
    assert measurements.left_out == {"paths": "paths could not be computed for this model (RuntimeError: only once)"}
    assert "paths" not in first
    assert "tangent_distance" in first
