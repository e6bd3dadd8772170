"""Lemmas 5 and 6 on any two-layer network: what each neuron's gradient says of each pattern, with its sampling error.

The emergence paper writes them for its own network and the hinge loss; the decomposition needs neither. With
g(x) = sum_i a_i s(z_i) + c, z_i = <w_i, x> + b_i, any activation s and any loss l(g, y), the gradient of the mean loss by w_i is,
along the patterns,

    -a_i sum_j M_j T_ij,    T_ij = E[-l'(g, y) s'(z_i) phi_j],    phi = M^T x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from unlazy.kernels.capture import call_model, evaluation_mode
from unlazy.models.dense_layers import Affine, ConstantAffine, ScaledAffine
from unlazy.runtime import Unsupported, require
from unlazy.theory.emergence import Decomposition

AT_ONCE = 2048
"""Rows in one backward pass."""
Loss = Callable[[Float[Tensor, " n"], Float[Tensor, " n"]], Float[Tensor, " n"]]


def hinge(output: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """max(1 - y g, 0), row by row."""
    return (1 - y * output).clamp_min(0)


def decompose_module(
    model: nn.Module,
    x: Float[Tensor, "n *shape"],
    y: Float[Tensor, " labels"] | Float[Tensor, "labels columns"],
    dictionary: Float[Tensor, "d D"],
    relevant: Bool[Tensor, " D"],
    loss: Loss = hinge,
) -> Decomposition:
    """T of a module made of two dense layers, an activation between them and one output, at whatever step its training is.

    ``loss(output, y)`` gives one number a row. The rows are a sample, so ``ratio`` stands beside its sampling ``floor``.
    Inputs and labels are taken to the module's precision and device.

    >>> from unlazy.data.patterns import Patterns
    >>> patterns = Patterns(20, 20, 3)
    >>> data = patterns.dataset(4000, dtype=torch.float32)
    >>> net = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> found = decompose_module(net, data.x, data.y[:, 0], patterns.dictionary(), patterns.is_relevant())
    >>> found.components.shape, bool((found.floor > 0).all())
    (torch.Size([8, 20]), True)
    """
    first, second = _two_layers(model)
    outer = _weight(second)[0].detach()
    silent = int((outer == 0).sum())
    require(
        silent == 0,
        f"{silent} of {len(outer)} neurons have outer weight 0 and no gradient to decompose; leave them out.",
    )
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    require(y.ndim == 1, f"labels are one number a row, got {tuple(y.shape)}.")
    require(len(x) == len(y), f"{len(x)} inputs but {len(y)} labels.")
    mean = torch.zeros(len(outer), dictionary.shape[1], dtype=torch.float64)
    square = torch.zeros_like(mean)
    for rows, labels in zip(x.split(AT_ONCE), y.split(AT_ONCE), strict=True):
        read, pulls = _first_layer_gradients(model, first, rows.to(outer), labels.to(outer), loss)
        wide = f"the first layer reads {read.shape[1]} numbers, patterns have {dictionary.shape[0]}."
        require(read.shape[1] == dictionary.shape[0], wide)
        phi, signal = read.double().cpu() @ dictionary.double().cpu(), (-pulls.double() / outer.double()).cpu()
        mean += signal.T @ phi / len(x)
        square += signal.square().T @ phi.square() / len(x)
    errors = ((square - mean.square()).clamp_min(0) / len(x)).sqrt()
    return Decomposition(mean, errors, relevant)


def _first_layer_gradients(
    model: nn.Module, first: nn.Module, x: Float[Tensor, "n *shape"], y: Float[Tensor, " n"], loss: Loss
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n units"]]:
    """What the first layer reads, and the gradient of the summed loss at what it returns, row by row."""
    seen: list[tuple[Tensor, Tensor]] = []

    def cut(_: nn.Module, given: tuple[Any, ...], returned: Tensor) -> Tensor:
        read = given[0] if isinstance(given[0], Tensor) else given[0][-1]
        seen.append((read.detach().flatten(1), returned.detach().requires_grad_()))
        return seen[-1][1]

    hook = first.register_forward_hook(cut)
    try:
        with evaluation_mode(model), torch.enable_grad():
            output = call_model(model, x)
            require(len(seen) == 1, f"the first layer must be called once a pass; it was called {len(seen)} times.")
            require(output.shape[1] == 1, f"the network must return one number a row, got {output.shape[1]}.")
            (pulls,) = torch.autograd.grad(loss(output[:, 0], y).sum(), [seen[0][1]])
    finally:
        hook.remove()
    return seen[0][0], pulls


def _two_layers(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The two dense layers, in the order of the module; refuses whatever else has parameters."""
    scaled = {id(module.inner) for module in model.modules() if isinstance(module, ScaledAffine)}
    dense = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear | Affine | ScaledAffine) and id(module) not in scaled
    ]
    name = type(model).__name__
    remedy = "Give a module of two dense layers with one output, nn.Sequential(Linear, activation, Linear(.., 1)) for example."
    if len(dense) != 2 or any(isinstance(layer, ConstantAffine) for layer in dense):
        raise Unsupported(name, f"it has {len(dense)} dense layers that could read the input or the neurons", remedy)
    if sum(p.numel() for layer in dense for p in layer.parameters()) != sum(p.numel() for p in model.parameters()):
        raise Unsupported(name, "it has parameters outside its two dense layers", remedy)
    shapes = [tuple(_weight(layer).shape) for layer in dense]
    if shapes[1] != (1, shapes[0][0]):
        raise Unsupported(name, f"its layers have weights of shapes {shapes[0]} and {shapes[1]}", remedy)
    return dense[0], dense[1]


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight
