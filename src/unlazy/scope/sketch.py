"""The tangent kernel of a model too large for the exact one: estimated from random directions of parameter space.

For v drawn from a standard normal, E[(J v) . (J' v)] = trace of J J'^T: the kernel, without bias. Every direction costs one
product with the Jacobian, whatever the number of outputs. The same directions serve at every step, so that what does not
move has distance 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.kernels.capture import Inputs
from unlazy.runtime import stream
from unlazy.scope.linear import Named, Push, push

DIRECTIONS = 64


@dataclass(frozen=True)
class Sketched:
    """An estimate of the kernel and its relative standard error, |K - estimate| / |K| in Frobenius norm, itself estimated."""

    kernel: Float[Tensor, "n n"]
    error: float


def sketched_kernel(
    model: nn.Module, at: Named, buffers: Named, x: Inputs, how: Push, seed: int, count: int = DIRECTIONS
) -> Sketched:
    """From ``count`` directions; the error from the difference of two halves."""
    halves: list[Tensor | float] = [0.0, 0.0]
    for number in range(count):
        random = stream(seed, "sketch", number)
        moves = {name: torch.randn(p.shape, generator=random, dtype=torch.float32).to(p) for name, p in at.items()}
        features = push(model, at, buffers, moves, x, how)[1].double()
        halves[number % 2] = halves[number % 2] + features @ features.T / (count // 2)
    first, second = (torch.as_tensor(half) for half in halves)
    kernel = (first + second) / 2
    return Sketched(kernel, float((first - second).norm() / 2 / kernel.norm()))
