"""Three models from one start, many seeds as one stack: the network, its linearisation, and one with adaptive features.

The linearised network is f_0(x) + J(x) d with a change d of every layer's weights. *Fixed*: d is what is trained. *Adaptive*:
d = M_1 W M_2 for dense layers, and for convolutions one factor each for the output channels, the input channels and the nine
places of the kernel; all factors begin as identities and W at 0, a bias is changed by M_1 b. J d is computed layer by layer
beside the forward pass, with the gates of f_0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from unlazy.runtime import exact_float32, stream

KINDS = ("fixed", "adaptive", "full")
Weights = list[tuple[Tensor, Tensor]]  # weight [S, outputs, inputs, ...] and bias [S, outputs] of every layer


@dataclass(frozen=True)
class Layout:
    """Convolutions of these channels (3 x 3, each with ReLU and a 2 x 2 mean), then dense layers of these widths."""

    shape: tuple[int, int, int]
    channels: tuple[int, ...]
    widths: tuple[int, ...]
    outputs: int = 10

    def weights(self) -> list[tuple[int, ...]]:
        """The shape of every layer's weight: four axes for convolutions, two for dense layers."""
        convolutions = list(zip(self.channels, (self.shape[0], *self.channels), strict=False))
        halved = 2 ** len(self.channels)
        flat = (self.channels or self.shape[:1])[-1] * (self.shape[1] // halved) * (self.shape[2] // halved)
        dense = zip((*self.widths, self.outputs), (flat, *self.widths), strict=True)
        return [(after, before, 3, 3) for after, before in convolutions] + list(dense)


def start(layout: Layout, seeds: Sequence[int], device: str) -> Weights:
    """Weights N(0, 2 / fan-in) and PyTorch's default biases, as the authors' other script; a seed's network is always the same.

    (From PyTorch's default weights the accuracy of the first epochs stands still, and the stopping rule ends all training.)
    """
    found = []
    for place, shape in enumerate(layout.weights()):
        fan_in, random = math.prod(shape[1:]), [stream(seed, "sample-size", place) for seed in seeds]
        weights = torch.stack([torch.randn(shape, generator=draws) for draws in random]) * math.sqrt(2 / fan_in)
        biases = torch.stack([2 * torch.rand(shape[0], generator=draws) - 1 for draws in random]) / math.sqrt(fan_in)
        found.append((weights.to(device), biases.to(device)))
    return found


class Stack:
    """One kind of model for all seeds: what is trained, and the outputs ``[S, n, 10]`` it gives."""

    def __init__(self, kind: str, layout: Layout, seeds: Sequence[int], device: str = "cpu") -> None:
        self.kind, self.base = kind, start(layout, seeds, device)
        self.trained: list[tuple[Tensor, ...]] = [self._first(weight, bias) for weight, bias in self.base]
        for tensor in self.parameters():
            tensor.requires_grad_()

    def _first(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        """(W, b) with, for adaptive features, the factors after them."""
        if self.kind == "full":
            return weight.clone(), bias.clone()
        changes = torch.zeros_like(weight), torch.zeros_like(bias)
        if self.kind == "fixed":
            return changes
        sizes = (*weight.shape[1:3], *([9] if weight.ndim == 5 else []))
        factors = [torch.eye(n, device=weight.device).repeat(len(weight), 1, 1) for n in sizes]
        return (*changes, *factors)

    def parameters(self) -> list[Tensor]:
        return [tensor for layer in self.trained for tensor in layer]

    def __call__(self, x: Float[Tensor, "s n c h w"]) -> Float[Tensor, "s n o"]:
        """Outputs for training: dense factors go to the data, a few rows, and not to each other."""
        if self.kind == "full":
            return run(self.trained, x)
        return run_linearised(self.base, self.trained, x)

    @torch.no_grad()
    def outputs(self, x: Float[Tensor, "n c h w"], at_once: int) -> Float[Tensor, "s n o"]:
        """Outputs for many images that all seeds share: factors are multiplied out first, and convolutions go seed by seed."""
        changes = [change(layer) for layer in self.trained]
        seeds = len(self.base[0][0])
        groups = [slice(one, one + 1) for one in range(seeds)] if self.base[0][0].ndim == 5 else [slice(seeds)]
        with exact_float32():
            return torch.cat(
                [torch.cat([self._shared(changes, own, some) for some in x.split(at_once)], 1) for own in groups]
            )

    def _shared(self, changes: Weights, own: slice, x: Tensor) -> Tensor:
        """Outputs of some seeds for the same images."""
        moved, base = ([(weight[own], bias[own]) for weight, bias in layers] for layers in (changes, self.base))
        shared = x.expand(len(moved[0][0]), *x.shape)
        return run(moved, shared) if self.kind == "full" else run_linearised(base, moved, shared)


def change(layer: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Weight and bias that a layer's factors come to."""
    weight, bias, *factors = layer
    if not factors:
        return weight, bias
    moved_bias = (factors[0] @ bias[..., None])[..., 0]
    if len(factors) == 2:
        return factors[0] @ weight @ factors[1], moved_bias
    places = weight.flatten(3) @ factors[2][:, None]  # [S, outputs, inputs, 9]
    channels = torch.einsum("soi,sipq,spr->sorq", factors[0], places, factors[1])
    return channels.view_as(weight), moved_bias


def run(layers: Sequence[tuple[Tensor, ...]], x: Tensor) -> Tensor:
    """The network itself."""
    h = _enter(x, layers[0][0])
    for place, (weight, bias) in enumerate(layers):
        h = _affine(_rows(h, weight), weight, bias)
        if place + 1 < len(layers):
            h = _pooled(h.relu(), weight)
    return h


def run_linearised(base: Weights, trained: Sequence[tuple[Tensor, ...]], x: Tensor) -> Tensor:
    """f_0 + J d: every layer's own change of what it is given, and what earlier changes have become."""
    h, moved = _enter(x, base[0][0]), None
    for place, ((weight, bias), layer) in enumerate(zip(base, trained, strict=True)):
        h, moved = _rows(h, weight), None if moved is None else _rows(moved, weight)
        own, h_next = _change_and_output(h, layer, weight, bias)
        moved = own if moved is None else own + _affine(moved, weight, None)
        h = h_next
        if place + 1 < len(base):
            open_units = (h > 0).to(h)
            h, moved = _pooled(h * open_units, weight), _pooled(moved * open_units, weight)
    assert moved is not None
    return h + moved


def _change_and_output(h: Tensor, layer: Sequence[Tensor], weight: Tensor, bias: Tensor) -> list[Tensor]:
    """The layer's change applied to its input, and its output; a dense layer's factors one after another, smallest work first."""
    if weight.ndim == 5:
        return _convolved(h, change(layer), (weight, bias))
    changed_weight, changed_bias, *factors = layer
    if not factors:
        return [_affine(h, changed_weight, changed_bias), _affine(h, weight, bias)]
    left, right = factors
    return [_affine(h @ right.mT, changed_weight, changed_bias) @ left.mT, _affine(h, weight, bias)]


def _affine(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Dense ``[S, n, i]``, or a convolution of ``[n, S c, height, width]``."""
    if weight.ndim == 5:
        return _convolved(h, (weight, bias))[0]
    return h @ weight.mT if bias is None else torch.baddbmm(bias[:, None], h, weight.mT)


def _convolved(h: Tensor, *layers: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    """Convolutions of ``[n, S c, height, width]``, every seed a group of channels."""
    if h.is_cuda and len(layers[0][0]) > 1:
        return by_windows(h, *layers)
    return [
        F.conv2d(h, weight.flatten(0, 1), None if bias is None else bias.flatten(), padding=1, groups=len(weight))
        for weight, bias in layers
    ]


def by_windows(h: Tensor, *layers: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    """The same as products of matrices: GPUs are slow at convolutions in groups, CPUs at this."""
    seeds, inputs = layers[0][0].shape[0], layers[0][0].shape[2]
    n, _, height, width = h.shape
    padded = F.pad(h, (1, 1, 1, 1)).unflatten(1, (seeds, inputs))
    windows = padded.unfold(3, 3, 1).unfold(4, 3, 1)  # [n, S, inputs, height, width, 3, 3]
    rows = windows.permute(1, 0, 3, 4, 2, 5, 6).reshape(seeds, n * height * width, inputs * 9)
    products = [_affine(rows, weight.flatten(2), bias) for weight, bias in layers]
    return [
        found.unflatten(1, (n, height, width)).permute(1, 0, 4, 2, 3).reshape(n, -1, height, width)
        for found in products
    ]


def _enter(x: Tensor, weight: Tensor) -> Tensor:
    """Images ``[S, n, c, height, width]`` as the first layer wants them."""
    return x.flatten(2) if weight.ndim == 3 else x.transpose(0, 1).flatten(1, 2)


def _rows(h: Tensor, weight: Tensor) -> Tensor:
    """From the last convolution to the first dense layer."""
    if h.ndim == 4 and weight.ndim == 3:
        return h.reshape(len(h), len(weight), -1).transpose(0, 1)
    return h


def _pooled(h: Tensor, weight: Tensor) -> Tensor:
    return h if weight.ndim == 3 else F.avg_pool2d(h, 2)
