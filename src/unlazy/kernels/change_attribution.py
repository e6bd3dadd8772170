"""Gates of one moment with weights of another: what moved the tangent kernel, the gates or the weights on the paths?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.kernels.compare import Kernel, relative_change, trace_normalise
from unlazy.models.dense_layers import Affine, ConstantAffine
from unlazy.models.net import GatedNet
from unlazy.runtime import Unsupported, require


def gated_value_kernel(
    net: GatedNet, gates: Sequence[Tensor], x: Float[Tensor, "n d"], *, biases: bool = True
) -> Float[Tensor, "*members n n"]:
    """Tangent kernel over the value parameters of ``net.value(x, gates)``, whoever made the gates; summed over outputs.

    K(x, x') = sum over value layers of (h . h' + 1 if biased) (d . d'), h the layer's input and d the output's
    derivative by its pre-activation, both under the given gates. With the network's own gates this is
    ``tangent_kernel(net, x, parameters="value")``. ``biases=False`` leaves the bias parameters out.
    """
    layers = [layer for layer in (*net.value_layers, net.readout) if isinstance(layer, Affine)]
    if len(layers) != net.settings.depth + 1:
        raise Unsupported(
            "GatedNet",
            "its value layers are not plain dense ones",
            "Gates are replayed in dense networks in the standard parametrisation only.",
        )
    require(len(gates) == net.settings.depth, f"need {net.settings.depth} layers of gates, got {len(gates)}.")
    with torch.no_grad():
        opened = [gate.to(x.dtype) for gate in gates]
        inputs = _inputs(layers, opened, x, biases)
        kernel = inputs[-1] * net.settings.outputs
        sensitivity = layers[-1].weight.unsqueeze(-3)  # [*S, 1 or n, o, width]: derivative by the layer's output
        for layer, gate, seen in zip(layers[-2::-1], opened[::-1], inputs[-2::-1], strict=True):
            sensitivity = sensitivity * gate.unsqueeze(-2)  # by its pre-activation
            rows = sensitivity.flatten(-2)
            kernel = kernel + seen * (rows @ rows.mT)
            sensitivity = sensitivity @ layer.weight.unsqueeze(-3)
    return kernel


def _inputs(layers: Sequence[Affine], gates: Sequence[Tensor], x: Tensor, biases: bool) -> list[Tensor]:
    """Inner products of every value layer's inputs, plus one where the layer has a bias that counts."""
    products, state = [], x
    for layer, gate in zip(layers, [*gates, None], strict=True):
        if isinstance(layer, ConstantAffine):
            product = torch.full((len(x), len(x)), float(layer.weight.shape[-1]), dtype=x.dtype, device=x.device)
        else:
            product = state @ state.mT
        products.append(product + 1 if biases and layer.bias is not None else product)
        if gate is not None:
            state = gate * layer([state])
    return products


@dataclass(frozen=True)
class ChangeShares:
    """How much of a kernel's change D = K(t, t) - K(0, 0) gates and weights account for; kernels are trace-normalised.

    K(a, b) has the gates of moment a and the weights of moment b. A part P of the change has the *share* <P, D> / <D, D>: its
    component along the change. Shares add up to one and may be negative (a part that pulls the kernel elsewhere).

    ``gates`` + ``weights`` = 1: each moved before and after the other, averaged (the symmetric split).
    ``gates_alone`` + ``weights_alone`` + ``interaction`` = 1: each moved from the start with the other at rest, and the
    rest of the change, which needs both.
    ``size_*``: lengths ‖P‖ / ‖D‖ of these three parts. They need not add up to one: parts that point elsewhere cancel.
    ``change``: ‖D‖ / ‖K(0, 0)‖.
    """

    gates: Tensor
    weights: Tensor
    gates_alone: Tensor
    weights_alone: Tensor
    interaction: Tensor
    size_gates: Tensor
    size_weights: Tensor
    size_interaction: Tensor
    change: Tensor


def change_shares(start: Kernel, new_gates: Kernel, new_weights: Kernel, end: Kernel) -> ChangeShares:
    """The shares from the four kernels K(0, 0), K(t, 0), K(0, t), K(t, t); broadcasts over members."""
    k00, kt0, k0t, ktt = (trace_normalise(kernel.double()) for kernel in (start, new_gates, new_weights, end))
    whole = ktt - k00
    length = torch.linalg.matrix_norm(whole)

    def share(part: Tensor) -> Tensor:
        return (part * whole).sum((-2, -1)) / length.square()

    alone = {"gates": kt0 - k00, "weights": k0t - k00, "interaction": ktt - kt0 - k0t + k00}
    return ChangeShares(
        gates=share(kt0 - k00 + ktt - k0t) / 2,
        weights=share(k0t - k00 + ktt - kt0) / 2,
        gates_alone=share(alone["gates"]),
        weights_alone=share(alone["weights"]),
        interaction=share(alone["interaction"]),
        **{f"size_{name}": torch.linalg.matrix_norm(part) / length for name, part in alone.items()},
        change=relative_change(end.double(), start.double()),
    )


def attribute_change(
    before: GatedNet, after: GatedNet, x: Tensor, *, hard: bool = False, biases: bool = True
) -> ChangeShares:
    """Why the value-parameter tangent kernel changed from ``before`` to ``after``: gates replayed under the other's weights.

    Networks (or stacks) of one shape. Gates are the numbers used in ``forward``, or half-spaces with ``hard=True``.
    """
    with torch.no_grad():
        old, new = (list(net.gates(x).hard() if hard else net.gates(x)) for net in (before, after))
    kernels = [gated_value_kernel(net, gates, x, biases=biases) for net in (before, after) for gates in (old, new)]
    return change_shares(kernels[0], kernels[1], kernels[2], kernels[3])
