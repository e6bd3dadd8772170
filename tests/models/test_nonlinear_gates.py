"""Gating networks with non-linear layers: slow twins, the ReLU network as a special case, what is refused, frozen gates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unlazy.data.circle import Circle
from unlazy.kernels import reference
from unlazy.kernels.overlap import gate_ties, overlap_kernel, path_count
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build, build_stack, member
from unlazy.models.folding import fold_batch_norm, half_space_normals
from unlazy.models.gate_reach import gate_reach, layers_read
from unlazy.models.gates import GateRule, HardGate, SoftGate
from unlazy.models.image_net import GatedImageNet
from unlazy.models.net import GatedNet
from unlazy.models.spec import GatedSpec, ImageSpec, Init, NetSpec, as_spec
from unlazy.probes.halfspaces import half_spaces
from unlazy.probes.paths import count_cells
from unlazy.probes.standard import portrait
from unlazy.runtime import InputError, Unsupported
from unlazy.theory.enumerate import path_gates, paths_of
from unlazy.theory.infinite_width import starting_variances
from unlazy.theory.regions import circle_pieces, gate_functions

DENSE = NetSpec(3, 2, width=4, depth=4)
PLAIN = ImageSpec((3, 4, 3), channels=2, classes=3, dense=5, gated_dense=True)
RESIDUAL = ImageSpec((3, 4), (1, 2), channels=2, classes=3)  # 7 gated layers
SETS = [(), (1,), (2,), (1, 3), (3,), (1, 2, 3, 4)]
RULES = [SoftGate(4.0), HardGate(4.0)]


def random_inputs(n: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def image_net(spec: ImageSpec, seed: int = 0) -> GatedImageNet:
    """A network in float64 and evaluation mode whose batch-norms have seen something."""
    net = build(spec, seed=seed, dtype=torch.float64)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.bias.data.normal_(generator=torch.Generator().manual_seed(3))
    for number in range(3):
        net.train()(random_inputs(8, spec.channels, 6, 6, seed=number))
    return net.eval()


# --- slow twins ------------------------------------------------------------------------------------------------


def dense_twin(net: GatedNet, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Output and gating pre-activations of a dense network, sample by sample and unit by unit."""
    spec, outputs, pre = net.settings, [], []
    weights = {name: value.detach() for name, value in net.state_dict().items()}
    for sample in x:
        state, value, layers = sample.tolist(), sample.tolist(), []
        for layer in range(spec.depth):

            def apply(branch: str, numbers: list[float], layer: int = layer) -> list[float]:
                matrix, bias = (weights[f"{branch}_layers.{layer}.{part}"] for part in ("weight", "bias"))
                return [
                    float(bias[i]) + sum(float(matrix[i, j]) * numbers[j] for j in range(len(numbers)))
                    for i in range(spec.width)
                ]

            q, v = apply("gate", state), apply("value", value)
            layers.append(q)
            state = [max(one, 0.0) for one in q] if layer + 1 in spec.nonlinear_gate_layers else q
            gates = [float(torch.sigmoid(torch.tensor(4.0 * one, dtype=torch.float64))) for one in q]
            if isinstance(spec.gate, HardGate):
                gates = [float(one >= 0) for one in q]
            value = [gate * one for gate, one in zip(gates, v, strict=True)]
        matrix, bias = weights["readout.weight"], weights["readout.bias"]
        outputs.append(matrix @ torch.tensor(value, dtype=torch.float64) + bias)
        pre.append(layers)
    return torch.stack(outputs), [
        torch.tensor([one[layer] for one in pre], dtype=torch.float64) for layer in range(spec.depth)
    ]


@pytest.mark.parametrize("layers", SETS)
@pytest.mark.parametrize("rule", RULES)
def test_a_dense_network_is_its_slow_twin(layers: tuple[int, ...], rule: GateRule) -> None:
    spec, x = replace(DENSE, nonlinear_gate_layers=layers, gate=rule), random_inputs(6, 3)
    stack = build_stack(spec, [0, 5], dtype=torch.float64)
    for row in range(2):
        net = member(stack, row)
        wanted, q = dense_twin(net, x)
        assert torch.allclose(net(x), wanted)
        assert torch.allclose(stack(x)[row], wanted)
        for found, one in zip(net.pre_activations(x), q, strict=True):
            assert torch.allclose(found, one)


def residual_twin(net: GatedImageNet, x: Tensor) -> list[Tensor]:
    """Gating pre-activations of a residual network, with every layer written out."""

    def convolve(prefix: str, state: Tensor, stride: int, padding: int) -> Tensor:
        return F.conv2d(state, numbers[f"{prefix}.weight"], stride=stride, padding=padding)

    def normalise(prefix: str, state: Tensor) -> Tensor:
        own = [numbers[f"{prefix}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        mean, variance, scale, shift = (one[:, None, None] for one in own)
        return (state - mean) / torch.sqrt(variance + 1e-5) * scale + shift

    def rectify(layer: int, q: Tensor) -> Tensor:
        return torch.where(q > 0, q, 0.0) if layer in net.settings.nonlinear_gate_layers else q

    numbers = {name: value for name, value in net.state_dict().items() if name.startswith("gate_layers.")}
    found = [normalise("gate_layers.0.norm", convolve("gate_layers.0.conv", x, 1, 1))]
    stream = rectify(1, found[0])
    for block in range(sum(net.settings.blocks)):
        inner, end = 2 * block + 1, 2 * block + 2  # places in the list of layers; their numbers are one more
        stride = 2 if block == 1 else 1
        found.append(normalise(f"gate_layers.{inner}.norm", convolve(f"gate_layers.{inner}.conv", stream, stride, 1)))
        second = convolve(f"gate_layers.{end}.conv", rectify(inner + 1, found[-1]), 1, 1)
        shortcut = stream
        if block == 1:
            shortcut = normalise(
                f"gate_layers.{end}.shortcut.1", convolve(f"gate_layers.{end}.shortcut.0", stream, 2, 0)
            )
        found.append(normalise(f"gate_layers.{end}.norm", second) + shortcut)
        stream = rectify(end + 1, found[-1])
    return found


@pytest.mark.parametrize("layers", [(), (1,), (2,), (3,), (2, 5), (1, 2, 3, 4, 5, 6, 7)])
def test_a_residual_gating_network_is_its_slow_twin(layers: tuple[int, ...]) -> None:
    net, x = image_net(replace(RESIDUAL, nonlinear_gate_layers=layers)), random_inputs(4, 2, 6, 6)
    for found, wanted in zip(net.pre_activations(x), residual_twin(net, x), strict=True):
        assert torch.allclose(found, wanted)
    gates = [(q >= 0).double() for q in residual_twin(net, x)]
    assert torch.allclose(net.hard()(x), net.value(x, gates))
    soft = [torch.sigmoid(4.0 * q) for q in residual_twin(net, x)]
    assert torch.allclose(net(x), net.value(x, soft))
    assert torch.allclose(fold_batch_norm(net)(x), net(x))


def test_hard_gates_pass_gradients_through_the_sigmoid_and_the_relu() -> None:
    """The gradient of hard gates is that of the soft network at the hard network's values; checked on one hidden unit."""
    spec = NetSpec(1, 1, width=1, depth=2, gate=HardGate(4.0), nonlinear_gate_layers=(1,))
    net, x = build(spec, dtype=torch.float64), torch.tensor([[0.7]], dtype=torch.float64)
    for parameter in net.parameters():
        parameter.data.fill_(0.5)
    net(x).sum().backward()
    q1 = 0.5 * 0.7 + 0.5
    q2 = 0.5 * q1 + 0.5
    v1 = 0.5 * 0.7 + 0.5
    v2 = 0.5 * v1 + 0.5

    def slope(q: float) -> float:
        soft = 1 / (1 + torch.exp(torch.tensor(-4.0 * q, dtype=torch.float64)))
        return float(4.0 * soft * (1 - soft))

    through_second = 0.5 * v2 * slope(q2) * 0.5  # the ReLU is open
    through_first = 0.5 * 0.5 * v1 * slope(q1)
    wanted = (through_second + through_first) * 0.7
    assert float(net.gate_layers[0].weight.grad) == pytest.approx(wanted)


# --- special cases ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [DENSE, replace(DENSE, gating="linear", gate=HardGate(4.0))])
def test_the_last_relu_feeds_nothing_and_none_is_the_linear_network(spec: NetSpec) -> None:
    x = random_inputs(5, 3)
    linear = build(spec, dtype=torch.float64)
    last = build(replace(spec, nonlinear_gate_layers=(4,)), dtype=torch.float64)
    first = build(replace(spec, nonlinear_gate_layers=(1,)), dtype=torch.float64)
    assert torch.equal(linear(x), last(x))
    assert last.settings.has_half_space_gates
    assert not torch.allclose(linear(x), first(x))


def with_value_weights_as_gates(net: GatedNet | GatedImageNet) -> None:
    """Copy the value branch into the gating branch."""
    net.gate_layers.load_state_dict(net.value_layers.state_dict())


def all_layers(spec: GatedSpec) -> tuple[int, ...]:
    return tuple(range(1, spec.gated_layers + 1))


def test_a_relu_network_is_the_case_of_all_layers_with_its_own_weights() -> None:
    """Dense and residual: same gates, function, overlap kernel and path counts; the twin's are traced from its ReLUs."""
    dense = build(replace(DENSE, nonlinear_gate_layers=all_layers(DENSE)), dtype=torch.float64)
    images = image_net(replace(RESIDUAL, nonlinear_gate_layers=all_layers(RESIDUAL)))
    for net, x in ((dense, random_inputs(6, 3)), (images, random_inputs(4, 2, 6, 6))):
        with_value_weights_as_gates(net)
        twin = build(net.settings.relu(), dtype=torch.float64)
        kept = {name: value for name, value in net.state_dict().items() if not name.startswith("gate_layers.")}
        twin.load_state_dict(kept)
        twin.eval()
        hard = net.hard()
        assert torch.allclose(hard(x), twin(x))
        for mine, theirs in zip(hard.gates(x).hard(), twin.gates(x).hard(), strict=True):
            assert torch.equal(mine, theirs)
        assert torch.equal(overlap_kernel(hard, x), overlap_kernel(twin, x))
        assert torch.equal(path_count(hard, x), path_count(twin, x))
        assert all(int(count.sum()) == 0 for count in gate_ties(hard, x).values())


@pytest.mark.parametrize("layers", SETS)
def test_the_overlap_kernel_counts_common_paths(layers: tuple[int, ...]) -> None:
    net, x = build(replace(DENSE, nonlinear_gate_layers=layers), dtype=torch.float64), random_inputs(6, 3)
    gates = [(q >= 0).double() for q in dense_twin(net, x)[1]]
    walked = path_gates(gates, paths_of(net))  # [n, paths]
    assert torch.equal(overlap_kernel(net, x), walked @ walked.T)
    assert torch.equal(path_count(net, x), walked.sum(1))
    patterns = {tuple(int(one) for layer in gates for one in layer[row]) for row in range(len(x))}
    assert count_cells(net.gates(x).hard()) == len(patterns)


@pytest.mark.parametrize("rule", [SoftGate(4.0), HardGate(None)])
def test_the_tangent_kernel_is_that_of_the_slow_twin(rule: GateRule) -> None:
    dense = build(replace(DENSE, nonlinear_gate_layers=(1, 3), gate=rule), dtype=torch.float64)
    images = image_net(replace(RESIDUAL, nonlinear_gate_layers=(2, 3), gate=rule))
    for net, x in ((dense, random_inputs(4, 3)), (images, random_inputs(3, 2, 6, 6))):
        slow = reference.tangent_kernel(net, x)
        assert torch.allclose(tangent_kernel(net, x, outputs="full").reshape(slow.shape), slow)


@pytest.mark.parametrize("layers", SETS)
def test_the_circle_is_cut_where_a_gate_changes(layers: tuple[int, ...]) -> None:
    net = build(NetSpec(2, width=5, depth=4, nonlinear_gate_layers=layers), seed=3, dtype=torch.float64)
    pieces = circle_pieces(net)
    angles = torch.linspace(0, 2 * torch.pi, 20_001, dtype=torch.float64)[:-1]
    hard = net.gates(torch.stack([angles.cos(), angles.sin()], 1)).hard()
    patterns = torch.cat(hard, 1)
    changes = int((patterns != patterns.roll(1, 0)).any(1).sum())
    assert changes == len(pieces.starts)
    middle = (pieces.starts + pieces.ends) / 2
    found = net.gates(torch.stack([middle.cos(), middle.sin()], 1)).hard()
    assert all(torch.equal(one, other) for one, other in zip(found, pieces.gates, strict=True))


# --- the start -------------------------------------------------------------------------------------------------


def test_a_he_start_keeps_the_size_of_rectified_gating_signals() -> None:
    spec = NetSpec(50, width=400, depth=6, init=Init("he"), gate_bias=False)
    for layers in ((), (1, 2, 3, 4, 5)):
        net = build(replace(spec, nonlinear_gate_layers=layers), dtype=torch.float64)
        with torch.no_grad():
            q = net.pre_activations(random_inputs(200, 50))
        assert 0.5 < float(q[-1].square().mean() / q[0].square().mean()) < 2


def test_only_layers_behind_a_relu_start_larger() -> None:
    spec = replace(RESIDUAL, nonlinear_gate_layers=(3,))
    pairs = zip(build(spec).named_parameters(), build(RESIDUAL).named_parameters(), strict=True)
    grown = {name for (name, one), (_, other) in pairs if not torch.equal(one, other)}
    assert grown == {"gate_layers.3.conv.weight", "gate_layers.4.shortcut.0.weight"}


# --- how many gates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [PLAIN, RESIDUAL, ImageSpec((3, 4), (1, 1), channels=2, dense=4, gated_dense=True)])
def test_which_layers_read_which_is_what_the_modules_do(spec: ImageSpec) -> None:
    """Every layer is called on states of its own; the gradient says which of them it reads."""
    net = image_net(spec)
    shapes = [(spec.channels, 6, 6), *(tuple(q.shape[1:]) for q in net.pre_activations(random_inputs(1, 2, 6, 6)))]
    for number, layer in enumerate(net.gate_layers, start=1):
        states = [random_inputs(1, *shape).requires_grad_() for shape in shapes]
        older = states[number - 2] if number > 1 else states[0]
        layer(states[number - 1], older).sum().backward()
        read = {k for k, state in enumerate(states) if state.grad is not None}
        assert set(layers_read(spec, number)) == read


@pytest.mark.parametrize("layers", [(), (1,), (2,), (3,), (4, 6), (7,)])
def test_gates_after_the_first_relu_are_no_half_spaces_and_all_others_are(layers: tuple[int, ...]) -> None:
    """A half-space has an affine pre-activation: its second difference is zero everywhere."""
    net, direction = image_net(replace(RESIDUAL, nonlinear_gate_layers=layers)), random_inputs(32, 2, 6, 6, seed=1)
    x = random_inputs(32, 2, 6, 6)
    left, middle, right = (net.pre_activations(x + shift * direction) for shift in (0.0, 1.0, 2.0))
    bent = [not torch.allclose(a + c, 2 * b) for a, b, c in zip(left, middle, right, strict=True)]
    reach = gate_reach(net, x)
    assert tuple(layer for layer, is_bent in enumerate(bent, start=1) if is_bent) == reach.after
    assert net.settings.has_half_space_gates == (not any(bent))
    sizes = [int(q[0].numel()) for q in left]
    assert reach.gates == sum(sizes)
    assert reach.after_gates == sum(size for size, is_bent in zip(sizes, bent, strict=True) if is_bent)
    assert reach.reading_gates == sum(sizes[layer - 1] for layer in reach.reading)


def test_the_reach_of_the_issue_s_examples() -> None:
    """ResNet-18 has 17 gated layers: 9 is the residual stream, even layers feed their block alone, 17 feeds nothing."""
    spec = ImageSpec((2, 2, 2, 2), (2, 2, 2, 2), channels=1)
    x = torch.zeros(1, 1, 8, 8)

    def reach(*layers: int) -> tuple[tuple[int, ...], int]:
        found = gate_reach(build(replace(spec, nonlinear_gate_layers=layers)), x)
        return found.reading, len(found.after)

    assert spec.gated_layers == 17
    assert reach(9) == ((10, 11), 8)
    assert reach(8) == ((9,), 9)
    assert reach(17) == ((), 0)
    stack = build_stack(replace(DENSE, nonlinear_gate_layers=(2,)), [0, 1, 2])
    assert gate_reach(stack, torch.zeros(1, 3)).after_gates == 8


# --- specs -----------------------------------------------------------------------------------------------------


def test_the_layers_are_stored_with_the_run_and_old_runs_keep_their_ids() -> None:
    for spec in (DENSE, PLAIN, RESIDUAL):
        chosen = replace(spec, nonlinear_gate_layers=(2, 1, 2))
        assert chosen.nonlinear_gate_layers == (1, 2)
        assert as_spec(chosen.to_dict()) == chosen
        assert build(chosen.to_dict()).settings == chosen
        assert "nonlinear_gate_layers" not in spec.to_dict()
        assert chosen.relu() == spec.relu()
    frozen = replace(RESIDUAL, train_gates=False)
    assert as_spec(frozen.to_dict()) == frozen
    assert "train_gates" not in RESIDUAL.to_dict()


@pytest.mark.parametrize(
    ("spec", "choices", "words"),
    [
        (DENSE, {"nonlinear_gate_layers": (5,)}, r"gated layers are 1 to 4, but nonlinear_gate_layers has \[5\]"),
        (DENSE, {"nonlinear_gate_layers": (0,)}, "the first layer is 1"),
        (RESIDUAL, {"nonlinear_gate_layers": (8,)}, "gated layers are 1 to 7"),
        (DENSE.relu(), {"nonlinear_gate_layers": (1,)}, "gating='own' does not have"),
        (DENSE.deep_linear(), {"nonlinear_gate_layers": (1,)}, "gating='open' does not have"),
        (DENSE, {"gating": "quadratic", "nonlinear_gate_layers": (1,)}, "quadratic gates are not built for it"),
        (RESIDUAL.relu(), {"nonlinear_gate_layers": (1,)}, "gating='own' does not have"),
        (RESIDUAL.relu(), {"train_gates": False}, "gates can be frozen only"),
    ],
)
def test_layers_that_make_no_sense_are_refused(spec: GatedSpec, choices: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        replace(spec, **choices)  # type: ignore[type-var]


def test_what_needs_half_spaces_refuses_other_gates() -> None:
    spec = replace(NetSpec(2, width=4, depth=3), nonlinear_gate_layers=(1,))
    net = build(spec)
    for function in (half_spaces, gate_functions):
        with pytest.raises(Unsupported, match="not half-spaces of the input"):
            function(net)
    with pytest.raises(Unsupported, match="no linear gating branch"):
        starting_variances(spec, "gate")
    data = Circle().dataset()
    assert "normals" not in portrait(net, data)
    assert "normals" in portrait(build(replace(spec, nonlinear_gate_layers=(3,))), data)
    images = image_net(replace(RESIDUAL, nonlinear_gate_layers=(3,)))
    half_space_normals(images, 2, [(0, 0, 0)], (6, 6))
    with pytest.raises(Unsupported, match="behind the ReLU of gating layer 3"):
        half_space_normals(images, 3, [(0, 0, 0)], (6, 6))


# --- frozen gates of image networks ----------------------------------------------------------------------------


def test_a_frozen_gating_network_stays_as_it_is() -> None:
    net = image_net(replace(RESIDUAL, nonlinear_gate_layers=(3,), gate=HardGate(4.0), train_gates=False))
    x = random_inputs(8, 2, 6, 6)
    before, statistics = net.pre_activations(x), net.value_layers[0].norm.running_mean.clone()
    optimiser = torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr=0.1)
    net.train()
    for _ in range(3):
        optimiser.zero_grad()
        net(x).square().sum().backward()
        optimiser.step()
    assert all(parameter.grad is None for _, parameter in net.branch("gate"))
    for one, other in zip(before, net.pre_activations(x), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(statistics, net.value_layers[0].norm.running_mean)


# --- tied branches ---------------------------------------------------------------------------------------------


def test_a_relu_image_network_can_pass_the_surrogate_gradient() -> None:
    """On pictures of one pixel it is the dense network of the same weights and rule: outputs and gradients agree."""
    images = build(
        replace(ImageSpec((4, 4), channels=3, classes=2, batch_norm=False).relu(), gate=HardGate(4.0)),
        dtype=torch.float64,
    )
    dense = build(NetSpec(3, 2, width=4, depth=2, gating="own", gate=HardGate(4.0)), dtype=torch.float64)
    with torch.no_grad():
        for mine, theirs in zip(images.value_layers, dense.value_layers, strict=True):
            theirs.weight.copy_(mine.conv.weight[:, :, 1, 1])
            theirs.bias.copy_(mine.conv.bias)
        dense.readout.weight.copy_(images.readout.output.weight)
        dense.readout.bias.copy_(images.readout.output.bias)
    x = random_inputs(5, 3)
    wide, plain = (one.clone().requires_grad_() for one in (x[:, :, None, None], x))
    out, wanted = images(wide), dense(plain)
    assert torch.allclose(out, wanted)
    assert torch.allclose(out, images.hard()(wide))
    out.square().sum().backward()
    wanted.square().sum().backward()
    assert torch.allclose(wide.grad[:, :, 0, 0], plain.grad)
    (without,) = torch.autograd.grad(images.hard()(wide).square().sum(), wide)
    assert not torch.allclose(without, wide.grad)
    with pytest.raises(InputError, match="trains no gate"):
        replace(ImageSpec((4, 4)).deep_linear(), gate=HardGate(4.0))
