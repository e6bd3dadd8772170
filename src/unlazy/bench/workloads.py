"""The networks every kernel benchmark uses.

a: dense 784-128x5-10, n=500; b: the same 1024 wide; c: five 3x3 convolutions of 26 filters on 3x32x32, pool, dense 64,
10 outputs, n=200; d: a ResNet-18-like net on 3x32x32, n=32; e: two layers, 500 inputs, 1000 hidden, one output, n=2000.
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
}
