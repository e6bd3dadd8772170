"""Per-layer rules: a layer's share of the tangent kernel from its input and the gradient at its output.

Every rule gives one of five *shares*, each a set of per-sample tensors and a way to pair two sets of samples:

* ``Factors``: the gradient of sample i is the outer product g_i a_i^T (dense layers): pairs are
  (a_i . a_j + bias) (g_i . g_j), and the gradient itself is never formed.
* ``Positions``: it is a sum over positions t of g_it a_it^T (convolutions, sequences, reused layers):
  sum over t, s of (a_it . a_js) (g_it . g_js).
* ``Rows``: the gradient itself, flattened.
* ``Products``: as ``Positions``, where ``Rows`` are cheaper to pair; they are written as such.
* ``Windows``: a convolution whose gradient is cheaper to pair as ``Rows``, but may be larger than what it is made of.

``Positions`` becomes ``Products`` or ``Windows`` where that costs fewer operations.
Axes: n samples, k output directions, t positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.kernels.convolution_windows import Convolution, Windows, pad_input, patch_matrix
from unlazy.kernels.weight_uses import WeightUse
from unlazy.models.dense_layers import Affine, ConstantAffine


@dataclass
class Call:
    """One call of a module: what went in (detached) and, per direction, the gradient at what came out ``[n, ...]``."""

    module: nn.Module
    input: Tensor
    gradients: Sequence[Tensor] | Tensor

    @property
    def gradient(self) -> Tensor:
        """All directions at once, ``[k, n, ...]``."""
        if isinstance(self.gradients, Tensor):
            return self.gradients
        return self.gradients[0][None] if len(self.gradients) == 1 else torch.stack(list(self.gradients))


@dataclass(frozen=True)
class Factors:
    """Gradient g_i a_i^T: ``a [n, d]``, ``g [n, k, m]``."""

    a: Float[Tensor, "n d"]
    g: Float[Tensor, "n k m"]
    weight: bool
    bias: bool

    def tensors(self) -> list[Tensor]:
        """The tensors of the share; samples along the first axis."""
        return [self.a, self.g]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Factors:
        """The same share with other tensors."""
        return Factors(tensors[0], tensors[1], self.weight, self.bias)


@dataclass(frozen=True)
class Rows:
    """The gradient itself: ``j [n, k, p]``."""

    j: Float[Tensor, "n k p"]

    def tensors(self) -> list[Tensor]:
        """The tensors of the share; samples along the first axis."""
        return [self.j]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Rows:
        """The same share with other tensors."""
        return Rows(tensors[0])


@dataclass(frozen=True)
class Positions:
    """Gradient sum_t g_it a_it^T: ``a [n, t, d]`` (or token numbers ``[n, t]``), ``g [n, k, t, m]``."""

    a: Tensor
    g: Float[Tensor, "n k t m"]
    weight: bool
    bias: bool
    tokens: int = 0  # size of the table, where ``a`` holds token numbers

    def tensors(self) -> list[Tensor]:
        """The tensors of the share; samples along the first axis."""
        return [self.a, self.g]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Positions:
        """The same share with other tensors."""
        return Positions(tensors[0], tensors[1], self.weight, self.bias, self.tokens)


@dataclass(frozen=True)
class Products:
    """Gradient sum_t g_it a_it^T where pairing it as ``Rows`` is cheaper: ``a [n, t, d]``, and ``[n, t, m]`` per direction.

    Never held: rows are written to where they are held (``write_rows``).
    """

    a: Float[Tensor, "n t d"]
    gradients: tuple[Float[Tensor, "n t m"], ...]

    def tensors(self) -> list[Tensor]:
        """The tensors of the share; samples along the first axis."""
        return [self.a, *self.gradients]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Products:
        """The same share with other tensors."""
        return Products(tensors[0], tuple(tensors[1:]))

    @property
    def row_shape(self) -> tuple[int, int]:
        """Directions, numbers per gradient."""
        return len(self.gradients), self.gradients[0].shape[-1] * self.a.shape[-1]

    def rows(self) -> Float[Tensor, "n k p"]:
        """Explicit gradients."""
        made = self.gradients[0].new_empty(len(self.a), *self.row_shape)
        self.write_rows(made)
        return made

    def write_rows(self, out: Float[Tensor, "n k p"]) -> None:
        """Explicit gradients, direction by direction: their gradients need no copy in another order."""
        a = self.a.to(self.gradients[0].dtype)
        for k, g in enumerate(self.gradients):
            target = out[:, k].unflatten(-1, (g.shape[-1], -1))
            if out.dtype == g.dtype:
                torch.bmm(g.mT, a, out=target)
            else:
                target.copy_(g.mT @ a)


Share = Factors | Rows | Positions | Products | Windows
Rule = Callable[[list[Call], bool, bool], list[Share]]


# --- the rules -------------------------------------------------------------------------------------


def linear_rule(calls: list[Call], weight: bool, bias: bool) -> list[Share]:
    """y = x W^T + b on the last axis; other axes, and further calls of the same layer, are positions."""
    if len(calls) == 1 and calls[0].input.ndim == 2:
        return [Factors(calls[0].input, calls[0].gradient.transpose(0, 1), weight, bias)]
    if not weight:
        sums = [torch.stack([g.flatten(1, -2).sum(1) if g.ndim > 2 else g for g in c.gradients], dim=1) for c in calls]
        return [Rows(sum_tensors(sums))]
    t = sum(call.gradients[0][0, ..., 0].numel() for call in calls)
    k, m, d = len(calls[0].gradients), calls[0].gradients[0].shape[-1], calls[0].input.shape[-1]
    if t == 1 or _positions_are_cheaper(t, k, m, d):
        return _outer_product_share(*_linear_positions(calls), weight, bias)
    share = _products(calls)
    shares: list[Share] = [share]
    return shares + ([Rows(torch.stack([g.sum(1) for g in share.gradients], dim=1))] if bias else [])


def _products(calls: list[Call]) -> Products:
    """Inputs and gradients of all calls, positions one after another."""

    def positions(values: Tensor) -> Tensor:
        return values.flatten(1, -2) if values.ndim > 2 else values[:, None]

    a = _concatenate([positions(call.input) for call in calls], 1)
    by_direction = zip(*[call.gradients for call in calls], strict=True)
    return Products(a, tuple([_concatenate([positions(g) for g in each], 1) for each in by_direction]))


def _linear_positions(calls: list[Call]) -> tuple[Float[Tensor, "n t d"], Float[Tensor, "n k t m"]]:
    a = _concatenate([call.input.flatten(1, -2) if call.input.ndim > 2 else call.input[:, None] for call in calls], 1)
    return a, _concatenate([_directions_second(call.gradient) for call in calls], 2)


def constant_rule(calls: list[Call], weight: bool, bias: bool) -> list[Share]:
    """y = W 1 + b: a dense layer whose input is all ones."""
    (call,) = calls
    gradient = call.gradient
    inputs = next(call.module.parameters()).shape[-1]
    return _outer_product_share(
        gradient.new_ones(gradient.shape[1], 1, inputs), _directions_second(gradient), weight, bias
    )


def convolution_rule(calls: list[Call], weight: bool, bias: bool) -> list[Share]:
    """A convolution is a dense layer at every position of its patches, group by group."""
    module = calls[0].module
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    groups, k = module.groups, len(calls[0].gradients)
    t = sum(math.prod(call.gradients[0].shape[2:]) for call in calls)
    m, d = module.out_channels // groups, module.in_channels // groups * math.prod(module.kernel_size)
    if weight and groups == 1 and _is_pointwise(module):
        return linear_rule([_channels_last_axis(call) for call in calls], weight, bias)
    if weight and not _positions_are_cheaper(t, k, m, d):
        entered = tuple(pad_input(module, call.input) for call in calls)
        shares: list[Share] = [Windows(module, entered, tuple(tuple(call.gradients) for call in calls))]
        return shares + ([Rows(_position_sums(calls))] if bias else [])
    a = torch.cat([patch_matrix(pad_input(module, call.input), module) for call in calls], dim=1)  # [n, t, taps * c_in]
    g = torch.cat([_directions_second(call.gradient.movedim(2, -1)) for call in calls], dim=2)  # [n, k, t, c_out]
    if groups == 1:
        return _outer_product_share(a, g, weight, bias)
    a = a.unflatten(-1, (-1, groups, module.in_channels // groups)).transpose(-2, -3).flatten(-3)  # groups apart
    shares = _shares_by_group(a, g, groups) if weight else []
    return shares + ([Rows(_position_sums(calls))] if bias else [])


def _is_pointwise(module: Convolution) -> bool:
    """Whether the filter sees one position at a time: a dense layer at every position, without windows."""
    return all(size == 1 for size in (*module.kernel_size, *module.stride)) and not any(
        module._reversed_padding_repeated_twice
    )


def _channels_last_axis(call: Call) -> Call:
    """``[n, c, ...]`` as ``[n, t, c]``, views."""
    return Call(call.module, call.input.flatten(2).mT, [g.flatten(2).mT for g in call.gradients])


def _position_sums(calls: list[Call]) -> Float[Tensor, "n k m"]:
    """Gradients of a bias: sums over positions."""
    return sum_tensors([torch.stack([g.flatten(2).sum(-1) for g in call.gradients], dim=1) for call in calls])


def transposed_convolution_rule(calls: list[Call], weight: bool, bias: bool) -> list[Share]:
    """As for a convolution with input and output exchanged: patches of the output's gradient pair with input positions."""
    module = calls[0].module
    assert isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    shares: list[Share] = []
    if weight:
        inputs, found_patches = [], []
        for call in calls:
            k, n = len(call.gradients), len(call.input)
            out = call.gradient.flatten(0, 1)
            room = torch.tensor(module.padding).flip(0).repeat_interleave(2).tolist()
            found = patch_matrix(F.pad(out, room), module)
            size = math.prod(call.input.shape[2:])
            found = found.unflatten(-1, (-1, module.out_channels)).mT.flatten(-2)  # channel-major: groups stay apart
            found_patches.append(found.unflatten(0, (k, n)).movedim(0, 1)[:, :, :size])  # [n, k, t, c_out * taps]
            inputs.append(call.input.flatten(2).mT)  # [n, t, c_in]
        shares += _shares_by_group(torch.cat(inputs, dim=1), torch.cat(found_patches, dim=2), module.groups)
    if bias:
        shares.append(Rows(_position_sums(calls)))
    return shares


def embedding_rule(calls: list[Call], weight: bool, bias: bool) -> list[Share]:
    """Rows of a table: the inputs of two positions have product 1 if their tokens are equal, else 0."""
    module = calls[0].module
    assert isinstance(module, nn.Embedding)
    share = _token_positions(calls, module.num_embeddings, module.padding_idx)
    return [Rows(token_table(share))] if share.a.shape[1] > module.num_embeddings else [share]


def _token_positions(calls: list[Call], table: int, padding: int | None) -> Positions:
    tokens = _concatenate([call.input.reshape(call.input.shape[0], -1) for call in calls], 1)  # [n, t]
    g = _concatenate([_directions_second(call.gradient) for call in calls], 2)
    if padding is not None:
        g = g * (tokens != padding)[:, None, :, None]
    return Positions(tokens.clamp(min=0), g, weight=True, bias=False, tokens=table)


def weight_use_rule(calls: list[Call], weight: bool, bias: bool) -> list[Share]:
    """A weight or a bias that functions read: as a dense layer's, as a table's, or as both, where explicit gradients add up."""
    module = calls[0].module
    assert isinstance(module, WeightUse)
    if module.place is not None:
        return [Rows(sum_tensors([torch.stack([g.flatten(1) for g in call.gradients], dim=1) for call in calls]))]
    products = [call for call in calls if call.input.is_floating_point()]
    tables = [call for call in calls if not call.input.is_floating_point()]
    if not tables:
        return linear_rule(products, weight, bias)
    share = _token_positions(tables, len(module.parameter), -1)
    if not products:
        return [Rows(token_table(share))] if share.a.shape[1] > share.tokens else [share]
    return [Rows(_products(products).rows().add_(token_table(share)))]


def token_table(share: Positions) -> Float[Tensor, "n k p"]:
    """Explicit gradients of an embedding: nonzero in the rows of the table that belong to a sample's tokens."""
    n, k, t, d = share.g.shape
    table = share.g.new_zeros(n, k, share.tokens, d)
    table.scatter_add_(2, share.a[:, None, :, None].expand(n, k, t, d), share.g)
    return table.flatten(2)


def scale_and_shift_rule(calls: list[Call], weight: bool, bias: bool) -> list[Share]:
    """Norm layers: y = w * normalised(x) + b, entry by entry."""
    gradient_of_weight, gradient_of_bias = [], []
    for call in calls:
        normalised, axes = _normalise(call.module, call.input)
        if weight:
            parts = [_sum_other_axes(g * normalised, axes) for g in call.gradients]
            gradient_of_weight.append(torch.stack(parts, dim=1))
        if bias:
            gradient_of_bias.append(torch.stack([_sum_other_axes(g, axes) for g in call.gradients], dim=1))
    return [Rows(torch.cat([sum_tensors(each) for each in (gradient_of_weight, gradient_of_bias) if each], dim=-1))]


NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def rule_for(module: nn.Module) -> Rule | None:
    """The fast rule of a module, or ``None``: then the general path serves. Exact types only: a subclass may differ."""
    kind: Any = type(module)
    if kind is WeightUse:
        return weight_use_rule
    if kind in (nn.Linear, Affine):
        return linear_rule
    if kind is ConstantAffine:
        return constant_rule
    if kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return convolution_rule
    if kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
        return transposed_convolution_rule
    if isinstance(module, nn.Embedding) and kind is nn.Embedding:
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return embedding_rule if plain else None
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
        return None  # without running statistics, samples of a batch depend on each other even in evaluation mode
    return scale_and_shift_rule if kind in NORMS else None


# --- their parts ---------------------------------------------------------------------------------------


def _outer_product_share(
    a: Float[Tensor, "n t d"], g: Float[Tensor, "n k t m"], weight: bool, bias: bool
) -> list[Share]:
    """One position: factors. Several: positions, or rows where pairing rows is cheaper."""
    _, k, t, m = g.shape
    d = a.shape[-1]
    if t == 1:
        return [Factors(a[:, 0], g[:, :, 0], weight, bias)]
    if not weight:
        return [Rows(g.sum(2))]
    if _positions_are_cheaper(t, k, m, d):
        return [Positions(a, g, weight, bias)]
    shares: list[Share] = [Rows(_outer_rows(a, g))]
    return shares + ([Rows(g.sum(2))] if bias else [])


def _outer_rows(a: Float[Tensor, "n t d"], g: Float[Tensor, "n k t m"]) -> Float[Tensor, "n k p"]:
    n, k, t, m = g.shape
    return torch.bmm(g.transpose(2, 3).reshape(n, k * m, t), a).view(n, k, -1)


def _positions_are_cheaper(t: int, k: int, m: int, d: int) -> bool:
    """Operations to pair two samples: position by position, or as explicit gradients."""
    return t * t * (d + k * m) < k * m * d


def _shares_by_group(a: Tensor, g: Tensor, groups: int) -> list[Share]:
    """``a [n, t, groups * d]``, ``g [n, k, t, groups * m]``: each group is a layer of its own, without a bias."""
    shares: list[Share] = []
    for part_a, part_g in zip(a.chunk(groups, dim=-1), g.chunk(groups, dim=-1), strict=True):
        shares += _outer_product_share(part_a, part_g, weight=True, bias=False)
    return shares


def _concatenate(parts: list[Tensor], dim: int) -> Tensor:
    """``torch.cat``, without a copy if there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _directions_second(gradient: Tensor) -> Tensor:
    """``[k, n, ..., m]`` as ``[n, k, t, m]``."""
    moved = gradient.movedim(0, 1)
    return moved.flatten(2, -2) if moved.ndim > 3 else moved[:, :, None]


def _normalise(module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The input after normalisation, before scale and shift, and the axes that scale and shift have."""
    if isinstance(module, nn.LayerNorm):
        axes = tuple(range(x.ndim - len(module.normalized_shape), x.ndim))
        return F.layer_norm(x, module.normalized_shape, eps=module.eps), axes
    if isinstance(module, nn.RMSNorm):
        axes = tuple(range(x.ndim - len(module.normalized_shape), x.ndim))
        return F.rms_norm(x, module.normalized_shape, eps=module.eps), axes
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, eps=module.eps), (1,)
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    return F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps), (1,)


def _sum_other_axes(values: Tensor, axes: tuple[int, ...]) -> Float[Tensor, "n p"]:
    """``[n, ...]`` summed over all axes of a sample but ``axes``."""
    gone = [axis for axis in range(1, values.ndim) if axis not in axes]
    return (values.sum(gone) if gone else values).flatten(1)


def sum_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Elementwise sum of a few tensors."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
