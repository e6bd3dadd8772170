"""Networks as sums over paths, by walking every path: the slow, obvious twins of the path theorems.

    f(x) = sum over paths pi of  f_pi(x) g_pi(x)

A path visits one unit of every gated layer. Its gate f_pi is the product of the gates it passes, its expert g_pi the
product of the value weights on it, times the input (half-space paper, Theorems 1 and 2). Biases are the edges of a constant
node below every layer: a *bias path* begins at one of these nodes instead of the input, and is walked from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from unlazy.models.dense_layers import effective_weights
from unlazy.models.net import GatedNet
from unlazy.runtime import InputError, require

CONSTANT = -1  # in a bias path: a layer below the one it enters
MOST_PATHS = 2**16
Paths = Int[Tensor, "paths length"]


def paths_of(net: GatedNet, *, length: int | None = None, most: int = MOST_PATHS) -> Paths:
    """Every path, one row each: the unit visited in layers 1, 2, ...; ``width ** depth`` of them.

    ``length``: partial paths through the first layers only.
    """
    length = _path_length(net, length)
    return _rows(net.settings.width, [length], length, most)


def bias_paths_of(
    net: GatedNet, *, length: int | None = None, most: int = MOST_PATHS
) -> tuple[Int[Tensor, "paths length"], Int[Tensor, " paths"]]:
    """Every path that begins at a constant node, and the layer 1, 2, ... it enters from there.

    ``CONSTANT`` stands in the layers below that. The last row enters the layer after the last one: its bias alone.
    """
    length = _path_length(net, length)
    rows = _rows(net.settings.width, range(length, -1, -1), length, most)
    return rows, 1 + (rows == CONSTANT).sum(1)


def _path_length(net: GatedNet, length: int | None) -> int:
    if net.members is not None:
        raise InputError("paths are walked for one network at a time; take one with member(stack, index).")
    depth = net.settings.depth
    require(length is None or 1 <= length <= depth, f"a path visits 1 to {depth} layers, not {length}.")
    return depth if length is None else length


def _rows(width: int, visits: Sequence[int], length: int, most: int) -> Paths:
    total = sum(width**count for count in visits)
    require(
        total <= most,
        f"{total} paths are too many to walk one by one (at most {most}); take a narrower or shallower network, "
        "or give some of the paths yourself.",
    )
    units = [(length - count, walk) for count in visits for walk in itertools.product(range(width), repeat=count)]
    return torch.tensor([(CONSTANT,) * missing + walk for missing, walk in units], dtype=torch.int64)


def _check_paths(paths: Paths, layers: int) -> None:
    fits = len(paths) > 0 and paths.ndim == 2 and 1 <= paths.shape[1] <= layers
    require(
        fits, f"paths are [paths, layers] with one unit in each of at most {layers} layers, got {tuple(paths.shape)}."
    )


def path_gates(gates: Sequence[Tensor], paths: Paths) -> Float[Tensor, "n paths"]:
    """f_pi(x): the product of the gates on each path; ``gates`` per layer ``[n, units]``, soft or hard."""
    _check_paths(paths, len(gates))
    dtype = gates[0].dtype if gates[0].is_floating_point() else torch.float64
    constant = torch.ones(len(gates[0]), 1, dtype=dtype)
    product = torch.ones(len(gates[0]), len(paths), dtype=dtype)
    for layer, units in enumerate(paths.T):
        product *= torch.cat([gates[layer], constant], dim=1)[:, units]  # unit CONSTANT = -1 is the last column
    return product


def path_experts(
    net: GatedNet, x: Float[Tensor, "n d"], paths: Paths, enters: Int[Tensor, " paths"] | None = None
) -> Float[Tensor, "n paths o"]:
    """g_pi(x): the product of the value weights on each path up to the output, times the input (or ones, or a bias).

    ``enters``: for bias paths, the layers at which they leave the constant node.
    """
    require(net.members is None, "path_experts reads one network; take member(stack, index).")
    _check_paths(paths, net.settings.depth)
    require(
        paths.shape[1] == net.settings.depth,
        f"a path has a unit in each of {net.settings.depth} layers, got {paths.shape[1]}.",
    )
    entered = [0] * len(paths) if enters is None else enters.tolist()
    after = net.settings.depth + 1
    experts = [
        _step(path_value(net, x, path, enter), after, enter, path, net.readout)
        for path, enter in zip(paths.tolist(), entered, strict=True)
    ]
    return torch.stack(experts, dim=1)


def path_sum(net: GatedNet, x: Float[Tensor, "n d"], *, most: int = MOST_PATHS) -> Float[Tensor, "n o"]:
    """sum over all paths of gate times expert: equals ``net(x)``, whatever the gating, the experts and the gate rule."""
    with torch.no_grad():
        gates = list(net.gates(x))
        paths = paths_of(net, most=most)
        found = torch.einsum("np,npo->no", path_gates(gates, paths), path_experts(net, x, paths))
        if net.settings.value_bias:
            paths, enters = bias_paths_of(net, most=most)
            found += torch.einsum("np,npo->no", path_gates(gates, paths), path_experts(net, x, paths, enters))
        return found


def hidden_sum(
    net: GatedNet, x: Float[Tensor, "n d"], layer: int, *, most: int = MOST_PATHS
) -> Float[Tensor, "n units"]:
    """h_{l,i}(x) as the sum over partial paths that end in unit i of layer l = 1, 2, ... (the layer-wise lemma)."""
    with torch.no_grad():
        walks = [(path, 0) for path in paths_of(net, length=layer, most=most).tolist()]
        if net.settings.value_bias:
            paths, enters = bias_paths_of(net, length=layer, most=most)
            walks += zip(paths[:-1].tolist(), enters[:-1].tolist(), strict=True)  # the last visits no unit
        opened = path_gates(list(net.gates(x)), torch.tensor([path for path, _ in walks]))
        hidden = x.new_zeros(len(x), net.settings.width)
        for column, (path, enter) in enumerate(walks):
            hidden[:, path[-1]] += opened[:, column] * path_value(net, x, path, enter)[:, 0]
        return hidden


def active_paths(net: GatedNet, x: Float[Tensor, "n d"], paths: Paths) -> Bool[Tensor, "n paths"]:
    """Which paths are open where, with hard gates: row i is A(x_i), column pi is A_pi seen by the sample."""
    with torch.no_grad():
        return path_gates(net.gates(x).hard(), paths) > 0


def fit_free_experts(
    features: Float[Tensor, "n paths"],
    y: Float[Tensor, "n o"],
    new_features: Float[Tensor, "m paths"],
    ridge: float = 0.0,
) -> Float[Tensor, "m o"]:
    """Predictions of least squares with one free constant per path; ``features`` are the gates of the paths.

    Without a ridge the constants of least norm. ``ridge`` is relative to the mean number of active paths, as in
    ``kernel_regression``, whose predictions with the overlap kernel are the same; here no kernel is ever formed.
    """
    require(ridge >= 0, f"ridge must be at least 0, got {ridge!r}.")
    if ridge:
        strength = (ridge * features.square().sum(1).mean()).sqrt()
        features = torch.cat([features, strength * torch.eye(features.shape[1], dtype=features.dtype)])
        y = torch.cat([y, y.new_zeros(features.shape[1], y.shape[1])])
    return new_features @ torch.linalg.lstsq(features, y, driver="gelsd").solution


def path_value(
    net: GatedNet, x: Float[Tensor, "n d"], path: Sequence[int], enter: int = 0
) -> Float[Tensor, "n before"]:
    """The product of the value weights on a path up to its last unit, times its beginning; gates left aside.

    ``[n, 1]``, once it has visited a unit. ``enter``: the layer at which it leaves the constant node; 0 = it begins at the input.
    """
    constant = net.settings.experts == "constant"
    signal = x.new_ones(len(x), _weight_and_bias(net.value_layers[0])[0].shape[1]) if constant and enter == 0 else x
    for layer, unit in enumerate(path, 1):
        if unit != CONSTANT:
            signal = _step(signal, layer, enter, path, net.value_layers[layer - 1])[:, unit : unit + 1]
    return signal


def _step(
    signal: Float[Tensor, "n before"], layer: int, enter: int, path: Sequence[int], affine: nn.Module
) -> Float[Tensor, "n after"]:
    """One step of a path, into every unit of a layer: from the constant node, from the input, or from the unit before."""
    weight, bias = _weight_and_bias(affine)
    if layer == enter:
        return bias.expand(len(signal), -1)
    if layer == 1:
        return signal @ weight.T
    return signal * weight[:, path[layer - 2]]


def _weight_and_bias(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias of a layer; no bias is a bias of zero."""
    weight, bias = effective_weights(layer)
    return weight, weight.new_zeros(weight.shape[0]) if bias is None else bias
