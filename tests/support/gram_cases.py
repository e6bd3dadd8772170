"""A small network and its inputs in float64, for the tests of Gram matrices on disk."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 3)).double()


def data(n: int, seed: int = 1) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
