"""The first layer of a watched network: where its neurons point, and the half-spaces on which they are open."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unlazy.kernels.capture import Inputs
from unlazy.kernels.record import Watch, argument, borders
from unlazy.models.dense import Affine
from unlazy.models.net import GatedNet
from unlazy.probes.halfspaces import half_spaces
from unlazy.probes.neurons import directions, first_layer, first_weights
from unlazy.runtime import Unsupported, require
from unlazy.scope.tangent import Measured

NEURON_NUMBERS = 2**20  # weights of a first layer that are kept at every measurement
WATCHED = 2  # samples whose way into the first layer and out of it is followed


def neurons(model: nn.Module) -> Measured:
    """Directions and norms of the first layer's weights; all half-spaces of a linearly gated network."""
    weights = first_weights(model)
    many = weights.numel()
    require(many <= NEURON_NUMBERS, f"the first layer has {many} weights, more than {NEURON_NUMBERS}")
    measured = dict(zip(("neurons", "neuron_norms"), directions(weights), strict=True))
    if isinstance(model, GatedNet) and model.settings.gating == "linear":
        spaces = half_spaces(model)
        measured |= {"normals": spaces.normals, "offsets": spaces.offsets}
    return measured


def in_plane(x: Inputs) -> bool:
    """Whether every sample is two real numbers: then a page can draw half-spaces."""
    return isinstance(x, Tensor) and x.is_floating_point() and math.prod(x.shape[1:]) == 2


def biases(model: nn.Module, x: Float[Tensor, "n *d"]) -> Float[Tensor, " units"]:
    """Biases b of the first layer, 0 where it has none: neuron i with weights w_i is open where w_i . x + b_i > 0.

    A network in which that is not so raises, with the reason: a short pass shows what the layer reads and what reads it.
    """
    layer, weights = first_layer(model), first_weights(model)
    if isinstance(model, GatedNet):
        bias = _own_bias(model, layer)
    else:
        name = type(layer).__name__
        if not isinstance(layer, nn.Linear):
            raise Unsupported(name, "the first layer is not a dense one", "Half-spaces are kept of nn.Linear.")
        watch = _FirstGate(x[:WATCHED], weights)
        watch.run(model, x[:WATCHED])
        bias = watch.found(name)
    return weights.new_zeros(len(weights)) if bias is None else bias.detach().clone()


def _own_bias(net: GatedNet, layer: nn.Module) -> Tensor | None:
    """Of a ReLU network of ours, where nothing multiplies the layer."""
    if net.settings.gating != "own":
        raise Unsupported(
            f"GatedNet(gating={net.settings.gating!r})",
            "its gates are not half-spaces of the input",
            "Choose gating='own' or 'linear'.",
        )
    if type(layer) is not Affine or layer is not net.value_layers[0]:
        raise Unsupported("GatedNet", "multipliers stand around its first layer", "Use the standard parametrisation.")
    return layer.bias


class _FirstGate(Watch):
    """Follows two samples into the layer with the given weights, and what it makes of them into a ReLU."""

    def __init__(self, x: Tensor, weights: Float[Tensor, "units d"]) -> None:
        super().__init__()
        self.x, self.weights = x, weights
        self.bias: Tensor | None = None
        self.outputs: Tensor | None = None
        self.values: Tensor | None = None  # of the outputs as the layer returned them: they may be overwritten
        self.gated, self.takers = False, list[str]()

    def found(self, name: str) -> Tensor | None:
        """The bias of the layer, once all has been seen."""
        if self.outputs is None:
            why = "the first layer is not given the inputs themselves but something made of them"
            raise Unsupported(name, why, "Half-spaces are kept where it reads the probe as it is.")
        if not self.gated:
            taker = self.takers[0].strip("_") if self.takers else "nothing"
            why = f"what follows the first layer is {taker}, not a ReLU"
            raise Unsupported(name, why, "Only a ReLU is open on a half-space.")
        return self.bias

    def seen(self, name: str, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        taken = any(self._is_output(leaf) for leaf in pytree.tree_leaves((arguments, options)))
        if taken and _is_relu(name, arguments, options):
            self.gated = True
        result = function(*arguments, **options)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if taken and any(not self._is_output(leaf) for leaf in made):
            self.takers.append(name)
        if name == "linear" and self.outputs is None:
            given, weights = argument(arguments, options, 0, "input"), argument(arguments, options, 1, "weight")
            whole = given.shape[-1] == self.x[0].numel() and _is_same(given, self.x, self.x)
            if whole and torch.equal(weights, self.weights):
                self.outputs, self.values = result, result.clone()
                self.bias = argument(arguments, options, 2, "bias")
        return result

    def _is_output(self, leaf: Any) -> bool:
        if self.outputs is None or self.values is None or not isinstance(leaf, Tensor):
            return False
        return _is_same(leaf, self.outputs, self.values)


def _is_relu(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    found = borders(name, arguments, options)
    return found is not None and not any(isinstance(end, Tensor) for end in found) and found == (0, math.inf)


def _is_same(tensor: Tensor, kept: Tensor, values: Tensor) -> bool:
    """Whether a tensor is another one, whatever its shape, and still has these values: not a copy that happens to equal it."""
    if tensor.numel() != values.numel() or tensor.data_ptr() != kept.data_ptr():
        return False
    return torch.equal(tensor.reshape(-1), values.reshape(-1))
