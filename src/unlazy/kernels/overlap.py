"""The overlap kernel: how many paths are active on both of two inputs. Always with hard gates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.kernels.record import Recording
from unlazy.models.net import GatedNet
from unlazy.runtime import Unsupported

TILE = 1024


def overlap_kernel(model: nn.Module, x: Tensor, x2: Tensor | None = None) -> Float[Tensor, "*members n m"]:
    """Lambda(x, x') = number of paths active on both = prod over layers of the units open on both.

    A path visits one unit of every gated layer. float64: counts are exact below 2^53. (Half-space paper, Section 3.2.)
    For our networks, and for foreign ones that are plain dense chains (linear layers and ReLU-like gates). Where layers branch,
    share weights over positions or are pooled, the product is not the number of paths: raises; see :func:`layer_overlap`.
    """
    gates = hard_gates(model, x)
    return overlap_from_gates(gates, gates if x2 is None else hard_gates(model, x2))


def neural_path_kernel(model: GatedNet, x: Tensor) -> Float[Tensor, "*members n n"]:
    """H(x, x') = <x, x'> Lambda(x, x') for linear experts, d Lambda(x, x') for constant ones (d input nodes).

    For bias-free dense networks with fixed gates and independent value weights of mean 0 and variance s^2 the expected tangent
    kernel of the value weights is L s^(2 (L - 1)) H, L = depth + 1 weight matrices (Lakshminarayanan and Singh 2020).
    """
    settings = model.settings
    if settings.value_bias:
        raise Unsupported(
            "GatedNet", "paths that begin at a bias are no paths of the input", "Build it with value_bias=False."
        )
    if settings.experts == "linear":
        return overlap_kernel(model, x) * (x @ x.mT).double()
    return overlap_kernel(model, x) * next(model.value_layers[0].parameters()).shape[-1]


def layer_overlap(model: nn.Module, x: Tensor, x2: Tensor | None = None) -> Float[Tensor, "*members n m"]:
    """prod over layers of the number of units open on both: the paper's formula for any network with ReLU-like gates.

    Equals the overlap kernel for dense chains; treats every other layer as if it were dense.
    """
    gates = _any_gates(model, x)
    return overlap_from_gates(gates, gates if x2 is None else _any_gates(model, x2))


def path_count(model: nn.Module, x: Tensor) -> Float[Tensor, "*members n"]:
    """Number of active paths of each input: the diagonal of the overlap kernel, prod of open units per layer."""
    return path_count_from_gates(hard_gates(model, x))


def hard_gates(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Open or closed for every unit ``[..., n, units]`` of a dense chain; raises where paths are not a plain product."""
    if isinstance(model, GatedNet):
        with torch.no_grad():
            return model.gates(x).hard()
    recording = Recording(model, x)
    wide = next((gate.name for gate in recording.calls if gate.open.ndim != 2), None)
    if wide is not None or recording.others:
        why = f"gate {wide} has positions" if wide else f"it uses {sorted(recording.others)[0]}"
        raise Unsupported(
            type(model).__name__,
            f"its paths are not one unit per layer ({why})",
            "layer_overlap treats every layer as dense; exact counts exist for dense chains.",
        )
    return [gate.open for gate in recording.calls]


def overlap_from_gates(gates: Sequence[Tensor], gates2: Sequence[Tensor]) -> Float[Tensor, "*members n m"]:
    """The same from gates at hand, ``[..., n, units]`` per layer; also soft ones, if that is wanted."""
    if gates is gates2 and gates[0].ndim == 2 and gates[0].dtype == torch.bool:
        return _symmetric_overlap(gates)
    product: Tensor | None = None
    for layer, layer2 in zip(gates, gates2, strict=True):
        common = layer.double() @ layer2.double().mT
        product = common if product is None else product.mul_(common)
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


def path_count_from_gates(gates: Sequence[Tensor]) -> Float[Tensor, "*members n"]:
    """prod over layers of the number of open units."""
    return torch.stack([layer.sum(-1, dtype=torch.float64) for layer in gates]).prod(0)


def _symmetric_overlap(gates: Sequence[Tensor]) -> Float[Tensor, "n n"]:
    """Tiles of the upper half, mirrored. Counts are whole numbers: 0 and 1 are exact in bfloat16 and sums in float32,
    so the fast product loses nothing (a layer has far fewer than 2^24 units)."""
    n = len(gates[0])
    layers = [layer.float() for layer in gates]
    product = torch.empty(n, n, dtype=torch.float64, device=gates[0].device)
    with _fast_products():
        for top in range(0, n, TILE):
            for left in range(top, n, TILE):
                rows, columns = slice(top, top + TILE), slice(left, left + TILE)
                tile = product[rows, columns]
                for index, layer in enumerate(layers):
                    common = layer[rows] @ layer[columns].T
                    tile.copy_(common) if index == 0 else tile.mul_(common)
                if left > top:
                    product[columns, rows] = tile.T
    return product


@contextmanager
def _fast_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _any_gates(model: nn.Module, x: Tensor) -> list[Tensor]:
    if isinstance(model, GatedNet):
        return hard_gates(model, x)
    return [gate.open.flatten(1) for gate in Recording(model, x).calls]
