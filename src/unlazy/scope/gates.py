"""Gates of a watched network: which are open on the probe set, where first-layer neurons point, and their half-spaces."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unlazy.kernels.capture import Inputs, call_model, evaluation_mode, sample_count, take_samples
from unlazy.kernels.gate_calls import FunctionWatch, get_argument, linear_range, record
from unlazy.kernels.gated import Gated, net_gates
from unlazy.models.dense_layers import Affine
from unlazy.models.net import GatedNet
from unlazy.probes.halfspaces import half_spaces
from unlazy.probes.neurons import first_layer, first_weights, unit_directions
from unlazy.runtime import Unsupported, require
from unlazy.scope.tangent import Measured

RECORDED = 64  # samples whose gates are recorded at a time
NEURON_NUMBERS = 2**20  # most weights of a first layer that are kept at every measurement
WATCHED = 2  # samples that are followed into the first layer and out of it


def open_gates(model: nn.Module, x: Inputs, at_once: int | None = None) -> list[Bool[Tensor, "n units"]]:
    """Which gates are open, layer by layer; gates that depend on no trained parameter are left out, because they cannot move.

    ``at_once``: the most samples that pass the model at a time.
    """
    n = sample_count(x)
    if isinstance(model, Gated):
        found = [net_gates(model, part) for part in _split_samples(x, min(n, at_once or n))]
        return [torch.cat([layer.flatten(1) for layer in layers]) for layers in zip(*found, strict=True)]
    size = min(RECORDED, at_once or RECORDED)
    parts = [[gate.open.flatten(1) for gate in record(model, part)] for part in _split_samples(x, size)]
    moved = _TrainedGates().find(model, take_samples(x, slice(0, 2)))
    gates = [torch.cat(layer) for layer, trained in zip(zip(*parts, strict=True), moved, strict=True) if trained]
    if not gates:
        raise Unsupported(type(model).__name__, "none of its gates depends on a trained parameter", "Nothing to do.")
    return gates


def _split_samples(x: Inputs, size: int) -> list[Inputs]:
    return [take_samples(x, slice(start, start + size)) for start in range(0, sample_count(x), size)]


class _TrainedGates(FunctionWatch):
    """Finds for every gate, in the order of ``record``, whether its input depends on a parameter that requires gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def find(self, model: nn.Module, x: Inputs) -> list[bool]:
        with evaluation_mode(model), torch.enable_grad(), self:
            call_model(model, x)
        return self.found

    def intercept(self, name: str, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if linear_range(name, arguments, options) is not None:
            self.found.append(bool(get_argument(arguments, options, 0, "input", "self").requires_grad))
        return function(*arguments, **options)


# --- the first layer --------------------------------------------------------------------------------------------


def first_layer_neurons(model: nn.Module) -> Measured:
    """Directions and norms of the first layer's weights; all half-spaces of a linearly gated network."""
    weights = first_weights(model)
    many = weights.numel()
    require(many <= NEURON_NUMBERS, f"the first layer has {many} weights, more than {NEURON_NUMBERS}")
    measured = dict(zip(("neurons", "neuron_norms"), unit_directions(weights), strict=True))
    if isinstance(model, GatedNet) and model.settings.has_half_space_gates:
        spaces = half_spaces(model)
        measured |= {"normals": spaces.normals, "offsets": spaces.offsets}
    return measured


def is_in_plane(x: Inputs) -> bool:
    """Whether every sample is two real numbers: then a page can draw half-spaces."""
    return isinstance(x, Tensor) and x.is_floating_point() and math.prod(x.shape[1:]) == 2


def first_layer_half_spaces(model: nn.Module, x: Float[Tensor, "n *d"]) -> Measured:
    """The half-spaces on which the neurons of the first layer are open.

    ``neuron_biases`` b, 0 if the layer has none: neuron i with weights w_i is open where w_i . x + b_i > 0. With a batch-norm
    behind the layer, which may flip half-spaces, instead ``normals`` and ``offsets`` with the batch-norm folded in.
    Raises ``Unsupported`` if the neurons are not open on half-spaces of the input: two samples are followed through the model
    to see what the layer reads and what reads the layer.
    """
    layer, weights = first_layer(model), first_weights(model)
    if isinstance(model, GatedNet):
        bias, norm = _bias_of_relu_net(model, layer), None
    else:
        name = type(layer).__name__
        if not isinstance(layer, nn.Linear):
            raise Unsupported(name, "the first layer is not a dense one", "Half-spaces are kept of nn.Linear.")
        watch = _FirstGate(x[:WATCHED], weights)
        watch.run(model, x[:WATCHED])
        bias, norm = watch.bias_and_norm(name)
    offsets = weights.new_zeros(len(weights)) if bias is None else bias.detach().clone()
    if norm is None:
        return {"neuron_biases": offsets}
    factor, shift = norm
    return {"normals": (factor[:, None] * weights)[None], "offsets": (factor * offsets + shift)[None]}


def _bias_of_relu_net(net: GatedNet, layer: nn.Module) -> Tensor | None:
    """The first bias of a ReLU network of ours; raises if its gates are others or its layers have multipliers."""
    if net.settings.gating != "own":
        raise Unsupported(
            f"GatedNet({net.settings.gating_words})",
            "its gates are not half-spaces of the input",
            "Choose gating='own' or 'linear'.",
        )
    if type(layer) is not Affine or layer is not net.value_layers[0]:
        raise Unsupported("GatedNet", "multipliers scale its first layer", "Use the standard parametrisation.")
    return layer.bias


Norm = tuple[Float[Tensor, " units"], Float[Tensor, " units"]]  # what a batch-norm multiplies by, and what it adds


class _FirstGate(FunctionWatch):
    """Follows two samples into the layer with the given weights, and from there, perhaps through a batch-norm, into a ReLU."""

    def __init__(self, x: Tensor, weights: Float[Tensor, "units d"]) -> None:
        super().__init__()
        self.x, self.weights = x, weights
        self.bias: Tensor | None = None
        self.norm: Norm | None = None
        self.outputs: Tensor | None = None
        self.values: Tensor | None = None  # a copy of the outputs: the model may overwrite them
        self.gated, self.takers = False, list[str]()

    def bias_and_norm(self, name: str) -> tuple[Tensor | None, Norm | None]:
        """The bias of the layer and the batch-norm behind it, after the pass; raises if the layer does not feed a ReLU."""
        if self.outputs is None:
            why = "the first layer is not given the inputs themselves but something made of them"
            raise Unsupported(name, why, "Half-spaces are kept where it reads the probe as it is.")
        if not self.gated:
            taker = self.takers[0].strip("_") if self.takers else "nothing"
            why = f"what follows the first layer is {taker}, not a ReLU"
            raise Unsupported(name, why, "Only a ReLU is open on a half-space.")
        return self.bias, self.norm

    def intercept(self, name: str, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        taken = any(self._is_output(leaf) for leaf in pytree.tree_leaves((arguments, options)))
        if taken and _is_relu(name, arguments, options):
            self.gated = True
        norm = self._first_norm(arguments, options) if taken and name == "batch_norm" else None
        result = function(*arguments, **options)
        if norm is not None:
            self.norm, self.outputs, self.values = norm, result, result.clone()
            return result
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if taken and any(not self._is_output(leaf) for leaf in made):
            self.takers.append(name)
        if name == "linear" and self.outputs is None:
            given, weights = get_argument(arguments, options, 0, "input"), get_argument(arguments, options, 1, "weight")
            whole = given.shape[-1] == self.x[0].numel() and _is_same(given, self.x, self.x)
            if whole and torch.equal(weights, self.weights):
                self.outputs, self.values = result, result.clone()
                self.bias = get_argument(arguments, options, 2, "bias")
        return result

    def _first_norm(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Norm | None:
        """The first batch-norm before any gate, neuron by neuron; ``None`` for a later one, or one that uses batch statistics."""
        shape = get_argument(arguments, options, 0, "input").shape
        if self.gated or self.norm is not None or shape[1] != len(self.weights):
            return None
        return _norm_as_affine(arguments, options)

    def _is_output(self, leaf: Any) -> bool:
        if self.outputs is None or self.values is None or not isinstance(leaf, Tensor):
            return False
        return _is_same(leaf, self.outputs, self.values)


def _norm_as_affine(arguments: tuple[Any, ...], options: dict[str, Any]) -> Norm | None:
    """Factor and shift of a batch-norm with running statistics; ``None`` if it uses those of the batch."""
    mean, variance = (
        get_argument(arguments, options, 1, "running_mean"),
        get_argument(arguments, options, 2, "running_var"),
    )
    if mean is None or variance is None or get_argument(arguments, options, 5, "training"):
        return None
    weight, bias = (get_argument(arguments, options, at, name) for at, name in ((3, "weight"), (4, "bias")))
    factor = torch.rsqrt(variance + get_argument(arguments, options, 7, "eps", default=1e-5))
    factor = factor if weight is None else weight.detach() * factor
    return factor, -mean * factor if bias is None else bias.detach() - mean * factor


def _is_relu(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    found = linear_range(name, arguments, options)
    return found is not None and not any(isinstance(end, Tensor) for end in found) and found == (0, math.inf)


def _is_same(tensor: Tensor, kept: Tensor, values: Tensor) -> bool:
    """Whether a tensor shares the memory of ``kept``, in any shape, and still has these values."""
    if tensor.numel() != values.numel() or tensor.data_ptr() != kept.data_ptr():
        return False
    return torch.equal(tensor.reshape(-1), values.reshape(-1))
