"""The tangent kernel of the value weights over fresh draws of them: its mean is the neural path kernel, at any width.

For fixed hard gates and independent value weights of mean 0 and variance s^2 in L = depth + 1 bias-free layers,

    E[ sum over value weights of  df(x)/dw df(x')/dw ]  =  L s^(2 (L - 1)) H(x, x'),     H = neural path kernel

(the derivative by one weight removes it from the product of its paths, and only equal paths survive the mean; Lakshminarayanan
and Singh 2020 prove the limit of large width, but the mean needs none).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.kernels.overlap import neural_path_kernel
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build_stack
from unlazy.models.net import GatedNet
from unlazy.runtime import require, stream


def expected_value_kernel(net: GatedNet, x: Float[Tensor, "n d"], deviation: float) -> Float[Tensor, "n n"]:
    """L s^(2 (L - 1)) H(x, x') for the hard gates of ``net``, s = ``deviation``; exact."""
    _require_linear_gates(net)
    factor = _expected_factor(net.settings.depth + 1, deviation)
    return net.settings.outputs * factor * neural_path_kernel(net, x)


def draw_value_kernels(
    net: GatedNet, x: Float[Tensor, "n d"], deviation: float, draws: int, seed: int = 0, at_once: int = 64
) -> Float[Tensor, "draws n n"]:
    """The kernel of the value weights under the hard gates of ``net``, once for each fresh normal draw of them."""
    _require_linear_gates(net)
    require(draws >= 1, f"draws must be at least 1, got {draws!r}.")
    found = []
    for first in range(0, draws, at_once):
        stack = _with_values(net, deviation, range(first, min(first + at_once, draws)), seed)
        found.append(tangent_kernel(stack, x, parameters="value"))
    return torch.cat(found)


def _expected_factor(matrices: int, deviation: float) -> float:
    return matrices * deviation ** (2 * (matrices - 1))


def _with_values(net: GatedNet, deviation: float, draws: range, seed: int) -> GatedNet:
    """A stack of networks with the gates of ``net`` and values of their own."""
    hard = net.hard()
    stack = build_stack(hard.settings, list(draws), dtype=next(net.parameters()).dtype)
    with torch.no_grad():
        for (_, mine), (_, theirs) in zip(hard.branch("gate"), stack.branch("gate"), strict=True):
            theirs.copy_(mine)
        for name, values in stack.branch("value"):
            for row, draw in enumerate(draws):
                random = stream(seed, "values", draw, name)
                values[row] = deviation * torch.randn(values.shape[1:], generator=random, dtype=torch.float64)
    return stack


def _require_linear_gates(net: GatedNet) -> None:
    require(net.members is None, "one network at a time; take one with member(stack, index).")
    standard = net.settings.parametrisation == "standard"
    require(standard, "the law is that of the standard parametrisation; see to_standard_parametrisation(net).")
    require(
        net.settings.gating == "linear", "only a gating network's gates stay the same when the values are drawn anew."
    )
