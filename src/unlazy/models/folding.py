"""Fold batch-norm into convolutions, and show the half-spaces of convolutional gates as images.

In evaluation mode batch-norm is g (h - m) / sqrt(v + eps) + b with fixed numbers, so it joins the convolution before it exactly.
After folding, the gating branch is a stack of affine maps: every gate (channel, row, column) is a half-space
{x : <normal, x> + offset >= 0} of image space.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.models.build import to_standard_parametrisation
from unlazy.models.image_layers import ConvLayer
from unlazy.models.image_net import GatedImageNet
from unlazy.runtime import Unsupported, require

Unit = tuple[int, ...]


def fold_batch_norm(net: GatedImageNet) -> GatedImageNet:
    """A copy in evaluation mode that computes the same function, with the batch-norms of both branches in its convolutions."""
    folded = to_standard_parametrisation(net).eval()
    for layer in folded.modules():
        if not isinstance(layer, ConvLayer):
            continue
        layer.conv, layer.norm = _fold_into_conv(layer.conv, layer.norm), nn.Identity()
        if isinstance(layer.shortcut, nn.Sequential):
            conv, norm = layer.shortcut
            layer.shortcut = _fold_into_conv(conv, norm)
    return folded


def half_space_normals(
    net: GatedImageNet, layer: int, units: Sequence[Unit], size: tuple[int, int] = (32, 32)
) -> tuple[Float[Tensor, "k c h w"], Float[Tensor, "k"]]:
    """Normals as images, and offsets, of gates of one layer on images of ``size``, in evaluation mode.

    Unit ``(channel, row, column)`` is open where <normal, x> + offset >= 0.
    """
    require(0 <= layer < net.depth, f"there are gated layers 0 to {net.depth - 1}, got {layer}.")
    _require_half_spaces(net, layer)
    require(len(units) > 0, "give at least one unit.")
    folded = fold_batch_norm(net)
    some = next(folded.gate_layers.parameters())
    start = torch.zeros(len(units), net.settings.channels, *size, dtype=some.dtype, device=some.device)
    start.requires_grad_()
    q = folded.pre_activations(start)[layer]
    shape = tuple(q.shape[1:])
    for unit in units:
        inside = len(unit) == len(shape) and all(0 <= i < n for i, n in zip(unit, shape, strict=True))
        require(inside, f"layer {layer} has units of shape {shape}, got {unit}.")
    # Each unit reads its own copy of the zero image, so one backward pass gives every normal.
    offsets = torch.stack([q[(row, *unit)] for row, unit in enumerate(units)])
    (normals,) = torch.autograd.grad(offsets.sum(), start)
    return normals, offsets.detach()


def _require_half_spaces(net: GatedImageNet, layer: int) -> None:
    """Raise ``Unsupported`` if the gates of a layer are not half-spaces of image space."""
    if net.settings.gating != "linear":
        raise Unsupported(
            "GatedImageNet", f"gates of kind {net.settings.gating!r} are no half-spaces", "Use gating='linear'."
        )
    first = min(net.settings.nonlinear_gate_layers, default=net.depth)
    if layer >= first:
        raise Unsupported(
            "GatedImageNet",
            f"its gates behind the ReLU of gating layer {first} are no half-spaces",
            f"Take one of the layers 0 to {first - 1}.",
        )


def _fold_into_conv(conv: nn.Module, norm: nn.Module) -> nn.Conv2d:
    """One convolution that computes norm(conv(x)) of evaluation mode."""
    assert isinstance(conv, nn.Conv2d)
    if not isinstance(norm, nn.BatchNorm2d):
        return conv
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    shift = norm.bias - norm.running_mean * scale
    with torch.no_grad():
        conv.weight.mul_(scale[:, None, None, None])
        conv.bias = nn.Parameter((shift if conv.bias is None else shift + conv.bias * scale).detach())
    return conv
