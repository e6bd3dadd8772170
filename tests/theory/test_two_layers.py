"""T of any two-layer module: against the paper's own network, weight gradients, fresh samples; other modules are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from unlazy.data.patterns import Patterns
from unlazy.models.build import ReLUNet
from unlazy.models.truncated import TruncatedNet, mirrored_start
from unlazy.runtime import InputError, Unsupported
from unlazy.theory.emergence import decompose, pattern_components
from unlazy.theory.two_layers import decompose_module

PATTERNS = Patterns(inputs=14, patterns=10, relevant=3, background=0.3)
DATA, M, INSIDE = PATTERNS.dataset(700), PATTERNS.dictionary(), PATTERNS.is_relevant()
X, Y = DATA.x, DATA.y[:, 0]


def as_module(net: TruncatedNet) -> nn.Sequential:
    """The paper's network written with torch's own layers."""
    units, inputs = net.w.shape
    module = nn.Sequential(nn.Linear(inputs, units), nn.Hardtanh(0.0, 1.0), nn.Linear(units, 1, bias=False)).double()
    module[0].weight.data, module[0].bias.data, module[2].weight.data = net.w, net.b, net.a[None]
    return module


def small(activation: nn.Module, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(14, 6), activation, nn.Linear(6, 1)).double()


def squares(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square() / 2


def test_it_is_the_decomposition_of_the_papers_network() -> None:
    net = mirrored_start(14, 5, relevant=3, gamma=PATTERNS.gamma, deviation=PATTERNS.deviation)
    uneven = TruncatedNet(net.w, net.b, net.a * torch.linspace(0.5, 2, 10, dtype=torch.float64))  # not zero everywhere
    for one in (net, uneven):
        short = TruncatedNet(one.w @ M, one.b, one.a)
        wanted = decompose(short, PATTERNS.draw(700), INSIDE)
        found = decompose_module(as_module(one), X, Y, M, INSIDE)
        assert torch.allclose(found.components, wanted.components, atol=1e-13)
        assert torch.allclose(found.errors, wanted.errors, atol=1e-13)
        assert torch.allclose(found.ratio / found.floor, wanted.ratio / wanted.floor)


@pytest.mark.parametrize(
    "activation", [nn.ReLU(), nn.Tanh(), nn.GELU(), nn.LeakyReLU(0.2)], ids=lambda one: type(one).__name__
)
def test_the_weight_gradient_of_any_activation_and_loss_is_its_sum(
    activation: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unlazy.theory.two_layers.AT_ONCE", 128)  # several blocks, the last one shorter
    net = small(activation)
    squares(net(X)[:, 0], Y).mean().backward()
    wanted = pattern_components(net[0].weight.grad, net[2].weight.detach()[0], M)
    net.zero_grad()
    net.train()
    found = decompose_module(net, X, Y, M, INSIDE, squares)
    assert torch.allclose(found.components, wanted, atol=1e-13)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert net.training
    assert not net[0]._forward_hooks


@pytest.mark.parametrize("choices", [{}, {"parametrisation": "ntk"}], ids=str)
def test_our_own_networks_in_any_parametrisation(choices: dict[str, str]) -> None:
    """Against numerical derivatives of the mean loss by the effective weight, which the parametrisation multiplies."""
    net = ReLUNet(14, width=4, depth=1, seed=3, **choices).double()
    layer, readout = net.value_layers[0], net.readout
    found = decompose_module(net, X, Y, M, INSIDE, squares).components
    trained = next(parameter for name, parameter in layer.named_parameters() if name.endswith("weight"))
    factor = float((layer.weight / trained).detach().mean())
    with torch.no_grad():
        for unit, pattern in ((0, 2), (3, 7)):
            losses = []
            for side in (1e-6, -1e-6):
                trained[unit] += side / factor * M[:, pattern]
                losses.append(squares(net(X)[:, 0], Y).mean().item())
                trained[unit] -= side / factor * M[:, pattern]
            slope = (losses[0] - losses[1]) / 2e-6
            assert found[unit, pattern].item() == pytest.approx(-slope / readout.weight[0, unit].item(), rel=1e-6)


def test_stated_errors_are_the_spread_over_fresh_samples() -> None:
    net, rows = small(nn.Tanh()), PATTERNS.dataset(60_000)
    samples = zip(rows.x.split(300), rows.y[:, 0].split(300), strict=True)
    many = [decompose_module(net, x, y, M, INSIDE, squares) for x, y in samples]
    spread = torch.stack([one.components for one in many]).std(0)
    stated = torch.stack([one.errors for one in many]).mean(0)
    assert ((stated / spread - 1).abs() < 0.25).all()


def test_a_plain_network_begins_on_the_sampling_floor() -> None:
    """Every row pulls at the start, by its label: what is not relevant is sampling error. Squares also pull back the output."""
    rows = PATTERNS.dataset(20_000)
    found = decompose_module(small(nn.Tanh()), rows.x, rows.y[:, 0], M, INSIDE)
    back = decompose_module(small(nn.Tanh()), rows.x, rows.y[:, 0], M, INSIDE, squares)
    assert (back.ratio / back.floor).median() > 4
    assert (found.ratio / found.floor).median() < 2
    assert found.signal.min() > 0
    assert found.ratio.max() < 0.2


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(14, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x) + self.first(-x)))


def test_what_is_no_two_layer_network_is_refused_with_the_reason() -> None:
    def refused(model: nn.Module, reason: str, error: type[Exception] = Unsupported, x: Tensor = X) -> None:
        with pytest.raises(error, match=reason):
            decompose_module(model.double(), x, Y[: len(x)], M, INSIDE)

    refused(nn.Sequential(nn.Linear(14, 1)), "it has 1 dense layers")
    refused(nn.Sequential(nn.Linear(14, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 1)), "3 dense layers")
    refused(nn.Sequential(nn.Linear(14, 5), nn.ReLU(), nn.Linear(5, 2)), r"\(5, 14\) and \(2, 5\)")
    refused(nn.Sequential(nn.Linear(14, 5), nn.PReLU(), nn.Linear(5, 1)), "parameters outside")
    refused(Twice(), "called 2 times", InputError)
    net = nn.Sequential(nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 1))
    refused(net, "reads 9 numbers, patterns have 14", InputError, torch.zeros(4, 9, dtype=torch.float64))
    silent = small(nn.ReLU())
    silent[2].weight.data[0, :2] = 0
    refused(silent, "2 of 6 neurons have outer weight 0", InputError)
    with pytest.raises(InputError, match="700 inputs but 3 labels"):
        decompose_module(small(nn.ReLU()), X, Y[:3], M, INSIDE)


def test_single_precision_is_enough_for_ordinary_weights() -> None:
    net = small(nn.Tanh())
    wanted = decompose_module(net, X, Y, M, INSIDE, squares).components
    found = decompose_module(net.float(), X, Y, M, INSIDE, squares).components
    assert torch.allclose(found, wanted, atol=1e-5)
