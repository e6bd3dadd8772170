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


def open_where(model: nn.Module, x: Float[Tensor, "n *d"]) -> Measured:
    """Where the neurons of the first layer are open.

    ``neuron_biases`` b, 0 where the layer has none: neuron i with weights w_i is open where w_i . x + b_i > 0. Behind a
    batch-norm, which may turn half-spaces around, ``normals`` and ``offsets`` of one layer of gates, batch-norm folded in.
    A network in which its neurons are open elsewhere raises, with the reason: a short pass shows what the layer reads and
    what reads it.
    """
    layer, weights = first_layer(model), first_weights(model)
    if isinstance(model, GatedNet):
        bias, norm = _own_bias(model, layer), None
    else:
        name = type(layer).__name__
        if not isinstance(layer, nn.Linear):
            raise Unsupported(name, "the first layer is not a dense one", "Half-spaces are kept of nn.Linear.")
        watch = _FirstGate(x[:WATCHED], weights)
        watch.run(model, x[:WATCHED])
        bias, norm = watch.found(name)
    offsets = weights.new_zeros(len(weights)) if bias is None else bias.detach().clone()
    if norm is None:
        return {"neuron_biases": offsets}
    factor, shift = norm
    return {"normals": (factor[:, None] * weights)[None], "offsets": (factor * offsets + shift)[None]}


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


Norm = tuple[Float[Tensor, " units"], Float[Tensor, " units"]]  # what a batch-norm multiplies by, and what it adds


class _FirstGate(Watch):
    """Follows two samples into the layer with the given weights, and from there, perhaps through a batch-norm, into a ReLU."""

    def __init__(self, x: Tensor, weights: Float[Tensor, "units d"]) -> None:
        super().__init__()
        self.x, self.weights = x, weights
        self.bias: Tensor | None = None
        self.norm: Norm | None = None
        self.outputs: Tensor | None = None
        self.values: Tensor | None = None  # of the outputs as they were returned: they may be overwritten
        self.gated, self.takers = False, list[str]()

    def found(self, name: str) -> tuple[Tensor | None, Norm | None]:
        """The bias of the layer and the batch-norm behind it, once all has been seen."""
        if self.outputs is None:
            why = "the first layer is not given the inputs themselves but something made of them"
            raise Unsupported(name, why, "Half-spaces are kept where it reads the probe as it is.")
        if not self.gated:
            taker = self.takers[0].strip("_") if self.takers else "nothing"
            why = f"what follows the first layer is {taker}, not a ReLU"
            raise Unsupported(name, why, "Only a ReLU is open on a half-space.")
        return self.bias, self.norm

    def seen(self, name: str, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        taken = any(self._is_output(leaf) for leaf in pytree.tree_leaves((arguments, options)))
        if taken and _is_relu(name, arguments, options):
            self.gated = True
        norm = self._norm(arguments, options) if taken and name == "batch_norm" else None
        result = function(*arguments, **options)
        if norm is not None:
            self.norm, self.outputs, self.values = norm, result, result.clone()
            return result
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

    def _norm(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Norm | None:
        """The first batch-norm before any gate, neuron by neuron; none where it is another, or goes by the batch."""
        shape = argument(arguments, options, 0, "input").shape
        if self.gated or self.norm is not None or shape[1] != len(self.weights):
            return None
        return _batch_norm(arguments, options)

    def _is_output(self, leaf: Any) -> bool:
        if self.outputs is None or self.values is None or not isinstance(leaf, Tensor):
            return False
        return _is_same(leaf, self.outputs, self.values)


def _batch_norm(arguments: tuple[Any, ...], options: dict[str, Any]) -> Norm | None:
    """What a batch-norm does with its running statistics; none where it takes those of the batch."""
    mean, variance = argument(arguments, options, 1, "running_mean"), argument(arguments, options, 2, "running_var")
    if mean is None or variance is None or argument(arguments, options, 5, "training"):
        return None
    weight, bias = (argument(arguments, options, at, name) for at, name in ((3, "weight"), (4, "bias")))
    factor = torch.rsqrt(variance + argument(arguments, options, 7, "eps", default=1e-5))
    factor = factor if weight is None else weight.detach() * factor
    return factor, -mean * factor if bias is None else bias.detach() - mean * factor


def _is_relu(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    found = borders(name, arguments, options)
    return found is not None and not any(isinstance(end, Tensor) for end in found) and found == (0, math.inf)


def _is_same(tensor: Tensor, kept: Tensor, values: Tensor) -> bool:
    """Whether a tensor is another one, whatever its shape, and still has these values: not a copy that happens to equal it."""
    if tensor.numel() != values.numel() or tensor.data_ptr() != kept.data_ptr():
        return False
    return torch.equal(tensor.reshape(-1), values.reshape(-1))
