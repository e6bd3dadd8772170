"""Small networks as data: a new kind joins every suite by adding a line here. float64, seeded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unlazy.models.build import build
from unlazy.models.gates import HardGate, SoftGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import Init, NetSpec, deep_linear_spec, relu_spec

SMALL = {"width": 3, "depth": 3}

SPECS = {
    "relu": relu_spec(2, 2, **SMALL),
    "relu-no-bias": relu_spec(2, 1, gate_bias=False, value_bias=False, **SMALL),
    "swish": NetSpec(2, 1, gating="own", gate=SoftGate(1.0), **SMALL),
    "dlgn": NetSpec(2, 2, gate=SoftGate(4.0), **SMALL),
    "dlgn-hard": NetSpec(2, 1, gate=HardGate(4.0), **SMALL),
    "dlgn-frozen": NetSpec(2, 1, train_gates=False, **SMALL),
    "pwc": NetSpec(2, 1, experts="constant", **SMALL),
    "pwc-no-bias": NetSpec(2, 1, experts="constant", gate_bias=False, value_bias=False, **SMALL),
    "pwc-one": NetSpec(2, 1, experts="constant", constant_input="one", **SMALL),
    "pwc-frozen-hard": NetSpec(2, 1, experts="constant", gate=HardGate(None), train_gates=False, **SMALL),
    "quadratic": NetSpec(2, 2, gating="quadratic", quadratic_rank=2, **SMALL),
    "linear": deep_linear_spec(2, 2, **SMALL),
    "he": NetSpec(3, 1, init=Init("he"), width=4, depth=2),
    "one-layer": NetSpec(2, 1, width=5, depth=1),
}


def net(name: str, seed: int = 0) -> GatedNet:
    return build(SPECS[name], seed=seed, dtype=torch.float64)


def as_torch(relu_net: GatedNet) -> nn.Module:
    """The same ReLU network made of torch's own layers."""
    layers: list[nn.Module] = []
    for affine in [*relu_net.value_layers, relu_net.readout]:
        linear = nn.Linear(*affine.weight.shape[::-1]).double()
        linear.load_state_dict({"weight": affine.weight, "bias": affine.bias})
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def points(name: str, n: int = 7, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, SPECS[name].inputs, generator=generator, dtype=torch.float64)
