"""The gated skeleton against explicit formulas."""

from __future__ import annotations

import math

import pytest
import torch

import cases
from unlazy import DLGN, InputError, ReLUNet, Unsupported, build, half_spaces
from unlazy.models.build import build_stack, member
from unlazy.models.gates import HardGate, SoftGate
from unlazy.models.spec import ImageSpec, Init, NetSpec, deep_linear_spec, relu_spec


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", cases.SPECS)
def test_a_spec_rebuilds_the_network(name: str) -> None:
    net, x = cases.net(name, seed=5), cases.points(name)
    again = build(net.spec(), seed=5, dtype=torch.float64)
    assert again.spec() == net.spec()
    assert torch.equal(again(x), net(x))
    assert not torch.equal(build(net.spec(), seed=6, dtype=torch.float64)(x), net(x))


@pytest.mark.parametrize("name", cases.SPECS)
def test_forward_is_the_value_branch_under_its_own_gates(name: str) -> None:
    net, x = cases.net(name), cases.points(name)
    close(net.value(x, net.gates(x)), net(x))


def test_relu_net_equals_torch_layers() -> None:
    net, x = cases.net("relu"), cases.points("relu")
    close(cases.as_torch(net)(x), net(x))


@pytest.mark.parametrize("name", ["dlgn", "pwc", "pwc-one", "dlgn-hard"])
def test_dlgn_equals_its_definition(name: str) -> None:
    """eta_l = W_l eta_{l-1} + b, h_l = G(eta_l) (U_l h_{l-1} + c), h_0 = x or ones, written out for each sample."""
    net, spec = cases.net(name), cases.SPECS[name]
    for x in cases.points(name):
        first = net.value_layers[0].weight.shape[1]
        eta, h = x, torch.ones(first, dtype=x.dtype) if spec.experts == "constant" else x
        for gate, value in zip(net.gate_layers, net.value_layers, strict=True):
            eta = gate.weight @ eta + gate.bias
            opening = torch.sigmoid(4.0 * eta) if isinstance(spec.gate, SoftGate) else (eta >= 0).double()
            h = opening * (value.weight @ h + value.bias)
        close(net.readout.weight @ h + net.readout.bias, net(x[None])[0])


def test_quadratic_gate_equals_its_definition() -> None:
    net, x = cases.net("quadratic"), cases.points("quadratic")
    for layer, q in enumerate(net.pre_activations(x)):
        term = net.quadratic[layer]
        for i, point in enumerate(x):
            eta = point
            for gate in net.gate_layers[: layer + 1]:
                eta = gate.weight @ eta + gate.bias
            for unit in range(3):
                directions = term.directions.reshape(3, 2, 2)[unit]
                extra = sum(term.strengths[unit, r] * (directions[r] @ point) ** 2 for r in range(2))
                close(q[i, unit], eta[unit] + extra + term.offset[unit])


def test_deep_linear_net_is_the_product_of_its_matrices() -> None:
    net, x = cases.net("linear"), cases.points("linear")
    out = x
    for affine in [*net.value_layers, net.readout]:
        out = out @ affine.weight.T + affine.bias
    close(out, net(x))


@pytest.mark.parametrize("name", [n for n, s in cases.SPECS.items() if s.gating == "linear"])
def test_half_spaces_decide_the_hard_gates(name: str) -> None:
    net, x = cases.net(name), cases.points(name, n=200)
    spaces = half_spaces(net)
    for layer, gate in enumerate(net.gates(x).hard()):
        q = x @ spaces.normals[layer].T + spaces.offsets[layer]
        assert torch.equal(q >= 0, gate)
    product = torch.eye(x.shape[1], dtype=x.dtype)
    for layer, gate_layer in enumerate(net.gate_layers):
        product = gate_layer.weight @ product
        close(spaces.normals[layer], product.detach())


@pytest.mark.parametrize("name", ["relu", "quadratic", "linear"])
def test_other_gates_are_no_half_spaces_and_say_so(name: str) -> None:
    with pytest.raises(Unsupported, match="half-spaces"):
        half_spaces(cases.net(name))


def test_antipodal_law_of_bias_free_gates() -> None:
    """n_l(x) + n_l(-x) = width in every layer; with biases it breaks."""
    net, x = cases.net("pwc-no-bias"), cases.points("pwc-no-bias", n=50)
    for here, there in zip(net.gates(x).hard(), net.gates(-x).hard(), strict=True):
        assert (here.sum(1) + there.sum(1) == 3).all()
    biased = cases.net("pwc")
    counts = [a.sum(1) + b.sum(1) for a, b in zip(biased.gates(x).hard(), biased.gates(-x).hard(), strict=True)]
    assert any((count != 3).any() for count in counts)


def test_hard_gate_is_hard_forward_and_soft_backward() -> None:
    q = torch.tensor([-1.0, 0.0, 0.5], dtype=torch.float64, requires_grad=True)
    hard, soft = HardGate(4.0), SoftGate(4.0)
    assert hard(q).tolist() == [0.0, 1.0, 1.0]
    assert hard(q, strict=True).tolist() == [0.0, 0.0, 1.0]
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    close(*(torch.autograd.grad((rule(q) * weights).sum(), q)[0] for rule in (hard, soft)))
    assert not HardGate(None)(q).requires_grad


def test_hard_network_uses_half_spaces_and_shares_parameters() -> None:
    net, x = cases.net("pwc"), cases.points("pwc")
    hard = net.hard()
    assert all(set(gate.unique().tolist()) <= {0.0, 1.0} for gate in hard.gates(x))
    close(hard(x), net.value(x, net.gates(x).hard()))
    assert next(hard.parameters()) is next(net.parameters())


def test_gates_can_be_replayed_in_another_network() -> None:
    teacher, student, x = cases.net("pwc", seed=1), cases.net("pwc", seed=2), cases.points("pwc")
    stored = [gate.detach().clone() for gate in teacher.gates(x)]
    replayed = student.value(x, stored)
    assert not torch.allclose(replayed, student(x))
    student.load_state_dict(student.state_dict() | {k: v for k, v in teacher.state_dict().items() if "gate" not in k})
    close(student.value(x, stored), teacher(x))


def test_frozen_gates_receive_no_gradient() -> None:
    net = cases.net("dlgn-frozen")
    net(cases.points("dlgn-frozen")).sum().backward()
    assert all(parameter.grad is None for _, parameter in net.branch("gate"))
    assert all(parameter.grad is not None for _, parameter in net.branch("value"))


@pytest.mark.parametrize("name", ["relu", "pwc", "quadratic", "dlgn-hard"])
def test_a_stack_is_its_members(name: str) -> None:
    spec, x = cases.SPECS[name], cases.points(name)
    betas = None if name == "relu" else [2.0, 4.0, 30.0]
    stack = build_stack(spec, [3, 1, 4], betas, dtype=torch.float64)
    per_member = torch.stack([x + i for i in range(3)])
    for i, seed in enumerate([3, 1, 4]):
        alone = build(spec if betas is None else spec.with_beta(betas[i]), seed=seed, dtype=torch.float64)
        close(stack(x)[i], alone(x))
        close(stack(per_member)[i], alone(per_member[i]))
        close(member(stack, i)(x), alone(x))
        assert member(stack, i).spec() == alone.spec()


def test_all_ones_input_makes_adam_take_d_times_the_step() -> None:
    """The trap of constant experts: W ones(d) equals a single column trained with d times the learning rate."""
    d = 7
    ones = build(NetSpec(d, experts="constant", width=3, depth=2), dtype=torch.float64)
    one = build(NetSpec(d, experts="constant", width=3, depth=2, constant_input="one"), dtype=torch.float64)
    state = ones.state_dict()
    state["value_layers.0.weight"] = state["value_layers.0.weight"].sum(1, keepdim=True)
    one.load_state_dict(state)
    trap = torch.optim.Adam(ones.parameters(), 1e-3, eps=1e-16)
    rest = [p for name, p in one.named_parameters() if name != "value_layers.0.weight"]
    groups = [{"params": [one.value_layers[0].weight], "lr": d * 1e-3}, {"params": rest}]
    plain = torch.optim.Adam(groups, 1e-3, eps=1e-16)
    x = torch.randn(20, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(30):
        for net, optimiser in ((ones, trap), (one, plain)):
            optimiser.zero_grad()
            (net(x) - x[:, :1]).square().mean().backward()
            optimiser.step()
    torch.testing.assert_close(ones(x), one(x), rtol=1e-8, atol=1e-10)


def test_initial_sizes_are_the_documented_ones() -> None:
    def spread(scheme: str, branch: str) -> float:
        net = build(NetSpec(50, width=400, depth=2, init=Init(scheme)), dtype=torch.float64)
        return float(getattr(net, branch)[1].weight.detach().var() * 400)

    assert spread("torch", "value_layers") == pytest.approx(1 / 3, rel=0.02)
    assert spread("he", "value_layers") == pytest.approx(2.0, rel=0.02)
    assert spread("he", "gate_layers") == pytest.approx(1.0, rel=0.02)
    double = build(NetSpec(2, init=Init(scale=2.0)), dtype=torch.float64)
    close(double.readout.weight, 2 * build(NetSpec(2), dtype=torch.float64).readout.weight)


def test_precision_does_not_change_the_start() -> None:
    wide, narrow = cases.net("pwc"), build(cases.SPECS["pwc"], dtype=torch.float32)
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(a.float(), b)


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"width": 0}, "width"),
        ({"depth": -1}, "depth"),
        ({"gating": "sideways"}, "own, linear, quadratic, open"),
        ({"experts": "cubic"}, "linear, constant"),
        ({"gating": "own", "experts": "constant"}, "would not see the input"),
        ({"gating": "own", "train_gates": False}, "frozen"),
    ],
)
def test_bad_choices_are_refused(choices: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        NetSpec(2, **choices)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan, math.inf])
def test_bad_slopes_are_refused(beta: float) -> None:
    with pytest.raises(InputError, match="beta"):
        SoftGate(beta)
    with pytest.raises(InputError, match="beta"):
        build_stack(NetSpec(2), [0], [beta])


def test_wrong_input_width_is_named() -> None:
    with pytest.raises(InputError, match="2 columns"):
        DLGN(2)(torch.zeros(4, 3))
    with pytest.raises(InputError, match="unknown"):
        build({"in": 2, "wdth": 3})
    assert ReLUNet(2, width=4)(torch.zeros(4, 2)).shape == (4, 1)


def test_one_build_for_every_shape() -> None:
    """A dictionary names its shape; stored specs of image networks, which have none, are known by their widths."""
    for shape, sizes in (("dense", {"in": 3}), ("conv", {"widths": [2]}), ("resnet", {"widths": [2], "blocks": [1]})):
        net = build({"shape": shape, **sizes})
        assert net.settings.shape == shape
        assert build(net.spec()).settings == net.settings
    assert build(NetSpec(3), dtype=torch.float64)(torch.zeros(1, 3).double()).dtype == torch.float64
    assert build(ImageSpec((2,)), dtype=torch.float64)(torch.zeros(1, 3, 4, 4).double()).dtype == torch.float64
    for wrong, says in (
        ({"shape": "round", "in": 3}, "dense, conv, resnet"),
        ({"shape": "conv", "widths": [2], "blocks": [1]}, "shape 'resnet'"),
        ({"width": 3}, "'in'"),
    ):
        with pytest.raises(InputError, match=says):
            build(wrong)
    with pytest.raises(InputError, match="only dense networks"):
        build_stack({"widths": [2]}, [0])


def test_every_spec_has_its_relu_and_its_deep_linear_network() -> None:
    assert NetSpec(2, experts="constant", train_gates=False).relu() == relu_spec(2)
    assert NetSpec(2).deep_linear() == deep_linear_spec(2)
    assert build(ImageSpec((2,), experts="constant").deep_linear()).settings.gating == "open"
