"""Neurons of the first layer: directions and norms of their weights."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.models.dense_layers import Affine, ConstantAffine
from unlazy.models.net import GatedNet
from unlazy.runtime import Unsupported

WEIGHTED = (nn.Linear, Affine, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def first_layer(model: nn.Module) -> nn.Module:
    """The first dense, convolutional or recurrent layer, in the order of definition.

    Of a linearly gated network: the first gating layer.
    """
    gates = isinstance(model, GatedNet) and model.settings.gating not in ("own", "open")
    for module in (model.gate_layers if gates else model).modules():  # type: ignore[union-attr]
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise Unsupported("Embedding", "the first layer reads tokens, which have no direction", "Nothing to do.")
        if isinstance(module, (nn.RNNBase, *WEIGHTED)) and not isinstance(module, ConstantAffine):
            return module
    raise Unsupported(type(model).__name__, "it has no dense or convolutional layer", "Nothing to do.")


def first_weights(model: nn.Module) -> Float[Tensor, "units d"]:
    """Incoming weights of the units of the first layer; a filter is flattened."""
    layer = first_layer(model)
    if isinstance(layer, nn.RNNBase):
        return dict(layer.named_parameters())["weight_ih_l0"].detach()
    weights: Tensor = layer.weight  # type: ignore[assignment]
    return weights.detach().flatten(1)


def unit_directions(weights: Float[Tensor, "units d"]) -> tuple[Float[Tensor, "units d"], Float[Tensor, " units"]]:
    """Unit vectors and norms of weights; 0 stays 0."""
    norms = weights.norm(dim=1)
    return weights / norms.clamp(min=torch.finfo(norms.dtype).tiny)[:, None], norms
