"""Which gates the ReLUs of a non-linear gating network change.

A ReLU behind layer l of the gating network changes what later layers read, not the gates of layer l itself. In a chain the next
layer reads it. In a residual network the inner layer of a block is read by the end of its block alone; the end of a block (and
the first convolution) is the residual stream, which the next inner layer and the end of the next block read. Nothing reads the
last layer.

What is read directly is the smaller count. Every gate after the first ReLU can stop being a half-space, because every layer reads
the one before it; that is the larger count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unlazy.models.image_net import GatedImageNet
from unlazy.models.net import GatedNet
from unlazy.models.spec import ImageSpec, NetSpec


@dataclass(frozen=True)
class GateReach:
    """How many gates there are, how many read a ReLU directly, and how many are no half-spaces any more.

    ``reading`` and ``after``: the layers in question, counted from 1.
    """

    gates: int
    reading: tuple[int, ...]
    reading_gates: int
    after: tuple[int, ...]
    after_gates: int


def layers_read(spec: NetSpec | ImageSpec, layer: int) -> tuple[int, ...]:
    """The layers of the gating network whose states a layer reads, counted from 1; 0 is the input.

    >>> layers_read(ImageSpec((4,), (1,)), 3)
    (2, 1)
    """
    if not isinstance(spec, ImageSpec) or not spec.blocks:
        return (layer - 1,)
    in_blocks = layer <= 1 + 2 * sum(spec.blocks)
    return (layer - 1, layer - 2) if in_blocks and layer >= 3 and layer % 2 == 1 else (layer - 1,)


def gate_reach(net: GatedNet | GatedImageNet, x: Tensor) -> GateReach:
    """How many gates of a network ReLUs of its gating network change, on inputs of the size of ``x``.

    A gate of an image network is one channel at one position.
    """
    spec, mode = net.settings, net.training
    members = net.members if isinstance(net, GatedNet) and net.members is not None else 1
    with torch.no_grad():
        sizes = [int(layer.numel()) // members for layer in net.eval().gates(x[:1])]
    net.train(mode)
    nonlinear = set(spec.nonlinear_gate_layers)
    layers = range(1, spec.gated_layers + 1)
    reading = tuple(layer for layer in layers if nonlinear & set(layers_read(spec, layer)))
    after = tuple(layer for layer in layers if nonlinear and layer > min(nonlinear))
    counts = [sum(sizes[layer - 1] for layer in some) for some in (reading, after)]
    return GateReach(sum(sizes), reading, counts[0], after, counts[1])
