"""The overlap kernel: how many paths are active on both of two inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.models.net import GatedNet
from unlazy.runtime import Unsupported


def overlap_kernel(model: nn.Module, x: Tensor, x2: Tensor | None = None) -> Float[Tensor, "*members n m"]:
    """Lambda(x, x') = number of paths active on both = prod over layers of the units open on both.

    Hard gates always, whatever rule the network is trained with. float64: counts are exact below 2^53.
    (Half-space paper, Section 3.2.)
    """
    gates = hard_gates(model, x)
    return overlap_from_gates(gates, gates if x2 is None else hard_gates(model, x2))


def overlap_from_gates(gates: Sequence[Tensor], gates2: Sequence[Tensor]) -> Float[Tensor, "*members n m"]:
    """The same from gates already at hand, ``[..., n, units]`` per layer; also soft ones, if that is wanted."""
    product: Tensor | None = None
    for layer, layer2 in zip(gates, gates2, strict=True):
        common = layer.double() @ layer2.double().mT
        product = common if product is None else product * common
    assert product is not None
    return product


def free_path_kernel(gates: Sequence[Tensor], start: Tensor, biases: bool) -> Float[Tensor, "*members n n"]:
    """Kernel of the model with a free value on every path: what the experts could do if they were not products.

    ``start`` is the kernel of the inputs a path may begin with: 1 for constant experts (then, without biases, this
    is the overlap kernel), x . x' for linear ones. With ``biases`` a path may also begin at the constant node below any
    layer, and a constant is added at the end.
    """
    kernel = start
    for layer in gates:
        common = layer.double() @ layer.double().mT
        kernel = common * (kernel + 1 if biases else kernel)
    return kernel + 1 if biases else kernel


def path_count(model: nn.Module, x: Tensor) -> Float[Tensor, "*members n"]:
    """Number of active paths of each input: the diagonal of the overlap kernel, prod of open units per layer."""
    return path_count_from_gates(hard_gates(model, x))


def path_count_from_gates(gates: Sequence[Tensor]) -> Float[Tensor, "*members n"]:
    """prod over layers of the number of open units."""
    return torch.stack([layer.sum(-1, dtype=torch.float64) for layer in gates]).prod(0)


def hard_gates(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Open or closed for every unit and input; raises for a module whose gates we cannot read."""
    if not isinstance(model, GatedNet):
        raise Unsupported(
            type(model).__name__, "its gates cannot be read yet", "Use a GatedNet (ReLUNet, DLGN, DeepLinearNet)."
        )
    with torch.no_grad():
        return model.gates(x).hard()
