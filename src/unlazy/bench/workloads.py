"""The networks every kernel benchmark uses.

a: dense 784-128x5-10, n=500; b: the same 1024 wide; c: five 3x3 convolutions of 26 filters on 3x32x32, pool, dense 64,
10 outputs, n=200; d: a ResNet-18-like net on 3x32x32, n=32; e: two layers, 500 inputs, 1000 hidden, one output, n=2000;
f: a transformer of two layers, 64 wide, on 32 tokens, n=200; g: depthwise and pointwise convolutions of 32 channels with group
norms on 3x16x16, n=200; h: an LSTM of 32 units over 50 steps, n=200; s: network a on few samples, n=50.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def dense(width: int) -> nn.Module:
    """A dense network with five hidden layers, 784 inputs and 10 outputs."""
    layers: list[nn.Module] = [nn.Linear(784, width), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def convolutional() -> nn.Module:
    """Five 3x3 convolutions of 26 filters, a pool and two dense layers."""
    layers: list[nn.Module] = []
    for channels in (3, 26, 26, 26, 26):
        layers += [nn.Conv2d(channels, 26, 3, padding=1), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(26, 64), nn.ReLU(), nn.Linear(64, 10)
    )


class Block(nn.Module):
    """Two 3x3 convolutions and a skip connection."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.skip = (
            nn.Conv2d(channels, width, 1, stride, bias=False) if stride > 1 or channels != width else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.skip(x) + self.second(torch.relu(self.first(x))))


def residual() -> nn.Module:
    """A ResNet-18-like network without batch-norm."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.ReLU()]
    channels = 64
    for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(Block(channels, width, stride))
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def two_layers() -> nn.Module:
    """500 inputs, 1000 hidden units, one output."""
    return nn.Sequential(nn.Linear(500, 1000), nn.ReLU(), nn.Linear(1000, 1))


class Transformer(nn.Module):
    """Two encoder layers, 64 wide, four heads, on tokens of 16 numbers; the mean over tokens is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Linear(16, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder, self.last = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.encoder(self.tokens(x)).mean(1))
        return out


class Recurrent(nn.Module):
    """An LSTM of 32 units on steps of 16 numbers; its last state is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.lstm(x)[0][:, -1])
        return out


def depthwise() -> nn.Module:
    """Three blocks of a depthwise and a pointwise convolution, with group norms."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.GELU()]
    for _ in range(3):
        layers += [nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.GroupNorm(8, 32), nn.GELU()]
        layers += [nn.Conv2d(32, 32, 1), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


@dataclass(frozen=True)
class Workload:
    """A network, its inputs, and how many samples the peer is given in each mode."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    n: int
    peer_n: dict[str, int]
    chunk: int
    weigh_unchunked: bool = False  # the peer's memory without chunks as well; more than a machine has for dense nets


WORKLOADS = {
    "a": Workload(lambda: dense(128), (784,), 500, {"full": 500, "trace": 500, "sum": 500}, 50),
    "b": Workload(lambda: dense(1024), (784,), 500, {"full": 16, "trace": 16, "sum": 400}, 8),
    "c": Workload(convolutional, (3, 32, 32), 200, {"full": 200, "trace": 200, "sum": 200}, 20, weigh_unchunked=True),
    "d": Workload(residual, (3, 32, 32), 32, {"full": 8, "trace": 8, "sum": 32}, 4, weigh_unchunked=True),
    "e": Workload(two_layers, (500,), 2000, {"sum": 2000}, 100),
    "f": Workload(Transformer, (32, 16), 200, {"full": 200, "trace": 200, "sum": 200}, 10),
    "g": Workload(depthwise, (3, 16, 16), 200, {"full": 200, "trace": 200, "sum": 200}, 10),
    "h": Workload(Recurrent, (50, 16), 200, {"full": 200, "trace": 200, "sum": 200}, 25),
    "s": Workload(lambda: dense(128), (784,), 50, {"full": 50, "trace": 50, "sum": 50}, 25),
}
