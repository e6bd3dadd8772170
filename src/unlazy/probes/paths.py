"""Active paths, cells, and the least loss that a hard-gated network can reach on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unlazy.models.gates import Gates
from unlazy.runtime import InputError, require

Pattern = Bool[Tensor, "n units"]


def allocation(first: Float[Tensor, "*groups"], second: Float[Tensor, "*groups"]) -> Float[Tensor, "*groups"]:
    """log of (mean active paths on one group / on another): 0 = no preference, > 0 = the first is favoured.

    One is added to both counts: it changes little at their usual size and keeps the result finite if a layer is dead.
    """
    return torch.log1p(first) - torch.log1p(second)


def cell_numbers(gates: Sequence[Tensor]) -> Int[Tensor, " n"]:
    """Number the activation patterns met in a sample: equal number = same open units in every layer.

    ``gates``: booleans ``[n, units]`` per layer, of one network.
    """
    return _activation_patterns(gates).unique(dim=0, return_inverse=True)[1]


def count_cells(gates: Sequence[Tensor]) -> int:
    """How many different activation patterns the sample meets."""
    return int(cell_numbers(gates).max()) + 1


def count_path_regions(gates: Sequence[Tensor], most: int = 2**24) -> int:
    """How many paths are active on at least one sample: a lower bound of the number of non-empty path regions."""
    sizes = [layer.shape[-1] for layer in gates]
    total = 1
    for size in sizes:
        total *= size
    require(total <= most, f"{total} paths are more than {most}; count a narrower or shallower network.")
    patterns = _activation_patterns(gates).unique(dim=0)
    seen = torch.zeros(sizes, dtype=torch.bool)
    for pattern in patterns:
        box = torch.ones([1] * len(sizes), dtype=torch.bool)
        for axis, layer in enumerate(pattern.split(sizes)):
            shape = [1] * len(sizes)
            shape[axis] = -1
            box = box & layer.reshape(shape)
        seen |= box
    return int(seen.sum())


def cell_floor(
    gates: Sequence[Tensor], y: Float[Tensor, "n o"], x: Float[Tensor, "n d"] | None = None
) -> Float[Tensor, ""]:
    """Least mean squared error of any function that is constant on each hard cell of the sample.

    No network with constant experts and these hard gates can do better. With ``x`` the function may be affine
    on each cell instead: the floor for ReLU networks and linear experts.
    """
    index, y = cell_numbers(gates), y.double()
    residual = torch.zeros_like(y)
    for cell in range(int(index.max()) + 1):
        inside = index == cell
        if x is None:
            residual[inside] = y[inside] - y[inside].mean(0)
        else:
            design = torch.cat([x[inside].double(), torch.ones(int(inside.sum()), 1, dtype=torch.float64)], dim=1)
            fit = torch.linalg.lstsq(design, y[inside], driver="gelsd").solution
            residual[inside] = y[inside] - design @ fit
    return residual.square().mean()


def _activation_patterns(gates: Sequence[Tensor]) -> Pattern:
    """The open units of all layers side by side; raises if gates are soft or have a member axis."""
    if isinstance(gates, Gates):
        gates = gates.hard()
    require(len(gates) > 0, "there are no gates: give one tensor [n, units] a layer.")
    if any(layer.ndim != 2 for layer in gates):
        raise InputError("cells are counted for one network at a time: gates must be [n, units] per layer.")
    if any(bool(((layer != 0) & (layer != 1)).any()) for layer in gates):
        raise InputError("cells belong to half-spaces: gates must be open or closed; take net.gates(x).hard().")
    return torch.cat([layer.bool() for layer in gates], dim=1)
