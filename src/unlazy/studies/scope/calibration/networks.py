"""Four small networks on 64 inputs, read as a vector, as an 8 x 8 picture or as 8 tokens of 8 numbers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.models.build import build
from unlazy.models.gates import SoftGate
from unlazy.models.spec import Init, NetSpec, relu_spec
from unlazy.runtime import stream
from unlazy.studies.scope.calibration.settings import Cell

INPUTS, SIDE = 64, 8


class ConvNet(nn.Module):
    """Two convolutions with ReLUs, the second one halving the picture, and a linear readout."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, 2 * channels, 3, padding=1, stride=2)
        self.readout = nn.Linear(2 * channels * (SIDE // 2) ** 2, outputs)

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n o"]:
        picture = x.unflatten(1, (1, SIDE, SIDE))
        return self.readout(F.relu(self.second(F.relu(self.first(picture)))).flatten(1))


class Transformer(nn.Module):
    """One block of attention and one of ReLU units on 8 tokens that know their place; the mean token is read out."""

    places: Tensor

    def __init__(self, width: int, outputs: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.register_buffer("places", math.sqrt(SIDE) * torch.eye(SIDE))
        self.embed = nn.Linear(2 * SIDE, width)
        self.before_attention, self.before_units = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.units, self.back = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.readout = nn.Linear(width, outputs)

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n o"]:
        tokens = x.unflatten(1, (SIDE, SIDE))
        h = self.embed(torch.cat([tokens, self.places.expand(len(x), -1, -1)], dim=-1))
        parts = self.mix(self.before_attention(h)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [n, heads, tokens, width / heads]
        weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
        h = h + self.mixed((weights @ value).transpose(1, 2).flatten(2))
        h = h + self.back(F.relu(self.units(self.before_units(h))))
        return self.readout(h.mean(1))


def network(cell: Cell, outputs: int) -> nn.Module:
    """The network of a cell at its start; normal weights that keep signals in size, times ``cell.init``; biases 0."""
    init = Init("he", cell.init)
    if cell.net == "relu":
        width = round(128 * cell.width)
        spec = relu_spec(INPUTS, outputs, width=width, depth=3, init=init, parametrisation=cell.parametrisation)
        return build(spec, seed=cell.seed)
    if cell.net == "dlgn":
        width = round(96 * cell.width)
        gate, scaling = SoftGate(4.0), cell.parametrisation
        spec = NetSpec(INPUTS, outputs, width=width, depth=3, gate=gate, init=init, parametrisation=scaling)
        return build(spec, seed=cell.seed)
    wide = round({"conv": 12, "transformer": 48}[cell.net] * cell.width)
    model = ConvNet(wide, outputs) if cell.net == "conv" else Transformer(wide, outputs)
    _draw(model, cell.seed, cell.init)
    return model


def _draw(model: nn.Module, seed: int, scale: float) -> None:
    """Normal numbers of variance 2 / fan_in before a ReLU, 1 / fan_in elsewhere; norms and biases as torch has them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            gain = 2.0 if name in ("first", "second", "units") else 1.0
            fan_in = module.weight[0].numel()
            drawn = torch.randn(module.weight.shape, generator=stream(seed, "init", name), dtype=torch.float64)
            assert module.bias is not None
            with torch.no_grad():
                module.weight.copy_(scale * math.sqrt(gain / fan_in) * drawn)
                module.bias.zero_()
