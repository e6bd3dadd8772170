"""Surgery replaces gates and leaves the function as it was; the optimiser around it keeps its schedule and its log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from unlazy.kernels.overlap import path_count_from_gates
from unlazy.models.build import build, build_stack, member
from unlazy.models.gates import HardGate, SoftGate
from unlazy.models.spec import ImageSpec, Init, NetSpec, relu_spec
from unlazy.probes.halfspaces import half_spaces
from unlazy.runtime import InputError, Unsupported, stream
from unlazy.training.ensemble import Member, MemberAdam, batch_order, build_member_stack
from unlazy.training.path_optimiser import PathOptimiser, SurgerySchedule, gate_likeness, log_paths
from unlazy.training.surgery import (
    Gate,
    Unit,
    aim_gate,
    eligible_layers,
    outgoing_values,
    path_mass,
    replace_gate,
)

PLANE = NetSpec(2, experts="constant", width=8, depth=3, gate_bias=False, value_bias=False, gate=SoftGate(30.0))
NETS: dict[str, Any] = {
    "plane without bias": PLANE,
    "plane with biases": replace(PLANE, gate_bias=True, value_bias=True),
    "more inputs than units": NetSpec(20, 3, width=8, depth=3, gate=SoftGate(4.0)),
    "more inputs, no bias": NetSpec(20, 3, width=8, depth=3, gate_bias=False, value_bias=False),
    "hard gates": NetSpec(5, 2, width=8, depth=4, gate=HardGate(4.0)),
    "relu": relu_spec(5, 2, width=8, depth=3),
    "convolutions": ImageSpec((4, 5), channels=2, classes=3, batch_norm=False, gate=SoftGate(4.0)),
    "convolutions, gated dense": ImageSpec((4, 5), channels=2, classes=3, batch_norm=False, dense=6, gated_dense=True),
    "relu convolutions": ImageSpec((4, 5), channels=2, classes=3, batch_norm=False).relu(),
}


def samples(spec: NetSpec | ImageSpec, n: int = 40) -> Tensor:
    shape = (n, spec.inputs) if isinstance(spec, NetSpec) else (n, spec.channels, 6, 6)
    return torch.randn(shape, generator=stream(0, "samples"), dtype=torch.float64)


def residual_of(net: Any, x: Tensor) -> Tensor:
    outputs = net(x).shape[-1]
    return torch.randn(len(x), outputs, generator=stream(0, "residual"), dtype=torch.float64)


@pytest.mark.parametrize("name", NETS)
def test_path_mass_is_what_the_output_loses_without_the_unit(name: str) -> None:
    net, x = build(NETS[name], dtype=torch.float64), samples(NETS[name])
    masses = path_mass(net, x)
    with torch.no_grad():
        gates = list(net.gates(x))
        whole = net.value(x, gates)
        for layer, mass in enumerate(masses):
            for index in (0, 3):
                without = [gate.clone() for gate in gates]
                without[layer][:, index] = 0
                lost = (whole - net.value(x, without)).square().sum(-1).mean().sqrt()
                assert torch.isclose(mass[index], lost, rtol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("aim", ["residual", "random"])
@pytest.mark.parametrize("name", NETS)
def test_a_replaced_gate_leaves_the_function_as_it_was(name: str, aim: str) -> None:
    """Outputs are the same to rounding on samples and far from them, and the unit has another gate."""
    spec = NETS[name]
    for layer in eligible_layers(build(spec)):
        net, x = build(spec, seed=1, dtype=torch.float64), samples(spec)
        unit, elsewhere = Unit(layer, 3), 3 * samples(spec).flip(0) + 1
        outgoing_values(net, unit).zero_()
        before, far, gates = net(x), net(elsewhere), net.pre_activations(x)
        gate = aim_gate(net, unit, x, residual_of(net, x), stream(5), aim)
        assert replace_gate(net, unit, gate)
        assert torch.allclose(net(x), before, rtol=1e-9, atol=1e-11)
        assert torch.allclose(net(elsewhere), far, rtol=1e-9, atol=1e-11)
        after = net.pre_activations(x)
        changed = [(one - other).abs().amax(tuple(k for k in range(one.ndim) if k != 1)) for one, other in
                   zip(after, gates, strict=True)]  # fmt: skip
        assert changed[layer][3] > 1e-3
        if spec.gating == "linear":  # a ReLU unit is its own gate: what reads it reads zero
            changed[layer][3] = 0
            assert max(float(one.max()) for one in changed) < 1e-9


def test_outgoing_values_must_be_zero_first() -> None:
    net = build(PLANE, dtype=torch.float64)
    with pytest.raises(InputError, match="cannot be replaced without a change of the function"):
        replace_gate(net, Unit(0, 0), Gate(torch.ones(2), 0.0))


def test_a_correction_that_cannot_be_exact_is_refused_and_changes_nothing() -> None:
    net = build(NETS["more inputs than units"], dtype=torch.float64)
    outgoing_values(net, Unit(0, 0)).zero_()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert not replace_gate(net, Unit(0, 0), Gate(torch.randn(20, generator=stream(1), dtype=torch.float64), 0.0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in NETS if "conv" not in name])
def test_the_border_runs_through_the_sample_with_all_the_residual(name: str) -> None:
    net, x = build(NETS[name], dtype=torch.float64), samples(NETS[name])
    residual = 1e-9 * residual_of(net, x)
    residual[17] = 1.0
    for layer in eligible_layers(net):
        unit = Unit(layer, 2)
        gate = aim_gate(net, unit, x, residual, stream(3))
        outgoing_values(net, unit).zero_()
        assert replace_gate(net, unit, gate)
        q = net.pre_activations(x)[layer][:, 2]
        assert abs(q[17]) < 1e-9 * q.abs().max()
        assert q.abs().max() > 1e-6


def test_the_normal_points_to_where_the_residual_grows() -> None:
    """Residual = one coordinate: the gate's normal is that coordinate's axis, to the noise of the samples."""
    net = build(NetSpec(4, width=8, depth=1), dtype=torch.float64)
    x = torch.randn(20000, 4, generator=stream(0), dtype=torch.float64)
    x[0] = 0
    residual = x[:, 2:3].clone()
    residual[0] = 1e6  # surely drawn; the others count along its sign
    normal = aim_gate(net, Unit(0, 0), x, residual, stream(1)).normal
    assert normal[2] / normal.norm() > 0.98


def test_unsupported_networks_are_named() -> None:
    with pytest.raises(Unsupported, match="gating='quadratic'"):
        eligible_layers(build(NetSpec(2, gating="quadratic")))
    with pytest.raises(Unsupported, match="without batch-norm"):
        eligible_layers(build(ImageSpec((4, 4), channels=1)))
    with pytest.raises(Unsupported, match="to_standard_parametrisation"):
        eligible_layers(build(NetSpec(2, parametrisation="mup")))


# --- the optimiser ---------------------------------------------------------------------------------------------


def circle_samples(n: int = 32) -> tuple[Tensor, Tensor]:
    angle = torch.linspace(0, 6.2, n, dtype=torch.float64)
    return torch.stack([angle.cos(), angle.sin()], 1), torch.sin(3 * angle)[:, None]


SCHEDULE = SurgerySchedule(every=10, last=30, gates=2, fade=4)


def test_a_stack_does_to_each_member_what_happens_to_it_alone() -> None:
    x, y = circle_samples()
    seeds = [3, 8]
    members = [Member(seed, 1e-2) for seed in seeds]
    stack = build_member_stack(PLANE, members, torch.float64)
    together = PathOptimiser(stack, MemberAdam(stack, [1e-2] * 2), x, y, surgery=SCHEDULE, seeds=seeds)
    for epoch in range(45):
        some = batch_order(members, epoch, len(x))
        together.step((stack(x[some]) - y[some]).square().mean((-2, -1)))
    for number, seed in enumerate(seeds):
        net = build(PLANE, seed=seed, dtype=torch.float64)
        alone = PathOptimiser(net, torch.optim.Adam(net.parameters(), 1e-2), x, y, surgery=SCHEDULE, seeds=[seed])
        for epoch in range(45):
            some = batch_order(members[number : number + 1], epoch, len(x))[0]
            alone.zero_grad()
            (net(x[some]) - y[some]).square().mean().backward()
            alone.step()
        assert torch.allclose(net(x), member(stack, number)(x), rtol=1e-6, atol=1e-9)
        own = [(one.step, one.what, one.unit.layer, one.unit.index) for one in alone.log]
        theirs = [(o.step, o.what, o.unit.layer, o.unit.index) for o in together.log if o.unit.member == number]
        assert own == theirs


def test_the_log_tells_the_schedule_and_outputs_stay() -> None:
    x, y = circle_samples()
    net = build(PLANE, dtype=torch.float64)
    trained = PathOptimiser(net, torch.optim.Adam(net.parameters(), 1e-2), x, y, surgery=SCHEDULE)
    sizes = []
    for _ in range(50):
        trained.zero_grad()
        (net(x) - y).square().mean().backward()
        trained.step()
        if trained.steps == 13:
            sizes = [float(outgoing_values(net, one.unit).norm()) for one in trained.log]
    assert [(one.step, one.what) for one in trained.log] == [
        entry for at in (10, 20, 30) for entry in [(at, "chosen")] * 2 + [(at + 4, "replaced")] * 2
    ]
    assert all(0.5 < one.likeness <= 1 + 1e-12 for one in trained.log)
    assert max(one.moved for one in trained.log) < 1e-10
    assert all(size > 0 for size in sizes)  # the last step of a fade makes them zero, not an earlier one


@pytest.mark.parametrize("kind", ["torch", "stack"])
def test_the_optimiser_forgets_what_belonged_to_the_old_gate(kind: str) -> None:
    x, y = circle_samples()
    if kind == "torch":
        net: Any = build(PLANE, dtype=torch.float64)
        optimiser: Any = torch.optim.Adam(net.parameters(), 1e-2)
    else:
        net = build_stack(PLANE, [0, 1], dtype=torch.float64)
        optimiser = MemberAdam(net, [1e-2, 1e-2])
    trained = PathOptimiser(net, optimiser, x, y, surgery=SCHEDULE, seeds=[0] if kind == "torch" else [0, 1])
    for _ in range(14):
        losses = (net(x) - y).square().mean((-2, -1))
        if kind == "torch":
            trained.zero_grad()
            losses.backward()
        trained.step(losses if kind == "stack" else None)
    (unit, *_) = [one.unit for one in trained.log if one.what == "replaced"]
    layer, index = unit.layer, unit.index
    gate = net.gate_layers[layer].weight
    reader = net.value_layers[layer + 1].weight if layer < 2 else net.readout.weight
    for parameter, part in ((gate, "row"), (net.value_layers[layer].weight, "row"), (reader, "column")):
        if kind == "torch":
            slots = [optimiser.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")]
        else:
            name = next(key for key, one in net.named_parameters() if one is parameter)
            slots = [optimiser.state()[f"{name}/{slot}"][unit.member] for slot in ("mean", "square")]
        for slot in slots:
            mine = slot[index] if part == "row" else slot[:, index]
            assert not mine.any()
            assert slot.any()  # those of other units stay


def test_sample_weights_favour_few_paths() -> None:
    net = build(replace(PLANE, gate=HardGate(None)), dtype=torch.float64)
    x, y = circle_samples()
    trained = PathOptimiser(net, torch.optim.Adam(net.parameters(), 1e-2), x, y, weight_power=0.5)
    paths = path_count_from_gates(net.gates(x).hard()).clamp_min(1e-6)
    open_everywhere = paths >= 1
    wanted = paths.rsqrt()
    found = trained.sample_weights(x)
    assert found.mean() == pytest.approx(1)
    ratio = (found / wanted)[open_everywhere]
    assert torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-9)
    plain = PathOptimiser(net, torch.optim.Adam(net.parameters(), 1e-2), x, y)
    assert torch.equal(plain.sample_weights(x), torch.ones(len(x), dtype=torch.float64))


def test_images_count_open_paths() -> None:
    spec = NETS["convolutions"]
    net, x = build(spec, dtype=torch.float64), samples(spec, 6)
    from unlazy.kernels.overlap import path_count

    assert torch.allclose(log_paths(net, x), path_count(net, x).clamp_min(1).log())


def test_a_small_convolutional_network_is_trained_with_surgery() -> None:
    spec = NETS["convolutions"]
    net, x = build(spec, dtype=torch.float64), samples(spec, 24)
    y = torch.nn.functional.one_hot(torch.arange(24) % 3, 3).double()
    adam = torch.optim.Adam(net.parameters(), 1e-2)
    trained = PathOptimiser(net, adam, x, y, loss="cross-entropy", surgery=SCHEDULE, weight_power=0.5)
    losses = []
    for _ in range(40):
        trained.zero_grad()
        each = -(y * net(x).log_softmax(-1)).sum(-1)
        (trained.sample_weights(x) * each).mean().backward()
        losses.append(float(each.detach().mean()))
        trained.step()
    replaced = [one for one in trained.log if one.what == "replaced"]
    assert len(replaced) == 6
    assert {one.unit.layer for one in replaced} == {1}
    assert max(one.moved for one in replaced) < 1e-10
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", ["torch", "stack"])
def test_gates_learn_at_their_own_rate(kind: str) -> None:
    """A first step of Adam moves every number by its learning rate."""
    x, y = circle_samples()
    spec = replace(PLANE, init=Init("he"))
    if kind == "torch":
        net: Any = build(spec, dtype=torch.float64)
        optimiser: Any = torch.optim.Adam(net.parameters(), 1e-3)
    else:
        net = build_stack(spec, [0, 1], dtype=torch.float64)
        optimiser = MemberAdam(net, [1e-3, 1e-3])
    trained = PathOptimiser(net, optimiser, x, y, gate_rate=3.0, seeds=[0] if kind == "torch" else [0, 1])
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    losses = (net(x) - y).square().mean((-2, -1))
    if kind == "torch":
        losses.backward()
    trained.step(losses if kind == "stack" else None)
    for name, parameter in net.named_parameters():
        wanted = 3e-3 if name.startswith("gate_layers") else 1e-3
        assert (parameter.detach() - before[name]).abs().median() == pytest.approx(wanted, rel=1e-2)


def test_gates_that_are_alike_have_parallel_pre_activations() -> None:
    net, x = build(PLANE, dtype=torch.float64), circle_samples(360)[0]
    places, likeness = gate_likeness(net, x, [0, 2])
    assert places[9] == (2, 1)
    normals = half_spaces(net).normals[[0, 2]].flatten(0, 1)
    normals = normals / normals.norm(dim=-1, keepdim=True)
    assert torch.allclose(likeness, (normals @ normals.T).abs(), atol=0.02)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"every": 0}, "every must be"), ({"fade": 20}, "longer than"), ({"aim": "up"}, "aim"), ({"spare": "x"}, "spare")],
)
def test_schedules_are_checked(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        SurgerySchedule(**{"every": 10, "last": 30, "fade": 4, **wrong})
