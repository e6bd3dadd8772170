"""Tangent features layer by layer, as matrices that can be stretched from the left and from the right.

A *row* is one pair of sample and output. A dense layer with a bias takes the bias as one more column (input 1), so its
feature is delta (h, 1)^T, kept as two factors and never multiplied out. Every other parameter is a matrix of its own: its
first axis against all others, a vector as one column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.kernels.capture import Inputs, call_model, evaluation_mode, sample_count
from unlazy.kernels.gated import with_exact_gradients
from unlazy.kernels.jacobian import rows_by_sample
from unlazy.kernels.layer_rules import Factors
from unlazy.kernels.selection import select_parameters
from unlazy.kernels.tangent_engine import RuleMismatch, TangentKernel
from unlazy.runtime import require

Rows = Float[Tensor, "rows"]
Matrix = Float[Tensor, "m d"]


@dataclass(frozen=True)
class Stretch:
    """The transformation I + U diag(values - 1) U^T with orthonormal columns U: it stretches some directions."""

    vectors: Float[Tensor, "size r"]
    values: Float[Tensor, "r"]

    def __call__(self, rows: Float[Tensor, "*many size"]) -> Float[Tensor, "*many size"]:
        return rows + ((rows @ self.vectors) * (self.values - 1)) @ self.vectors.mT

    def matrix(self) -> Float[Tensor, "size size"]:
        """The transformation as a matrix."""
        size = len(self.vectors)
        return self(torch.eye(size, dtype=self.vectors.dtype, device=self.vectors.device))


@dataclass(frozen=True)
class FactoredLayer:
    """Rows delta_r h_r^T, as ``left [rows, m]`` and ``right [rows, d]``."""

    names: tuple[str, ...]
    left: Float[Tensor, "rows m"]
    right: Float[Tensor, "rows d"]

    @property
    def shape(self) -> tuple[int, int]:
        """(m, d) of the layer's weight matrix."""
        return int(self.left.shape[1]), int(self.right.shape[1])

    def stretch(self, left: Stretch | None, right: Stretch | None) -> FactoredLayer:
        """Features of the transformed layer, M_1^T X M_2^T."""
        return FactoredLayer(
            self.names,
            self.left if left is None else left(self.left),
            self.right if right is None else right(self.right),
        )

    def gram(self, other: FactoredLayer) -> Float[Tensor, "rows rows2"]:
        """<X_r, X_s> = (delta_r . delta_s) (h_r . h_s)."""
        return (self.left @ other.left.T).mul_(self.right @ other.right.T)

    def diagonal(self) -> Rows:
        """<X_r, X_r> alone."""
        return self.left.square().sum(1) * self.right.square().sum(1)

    def combine(self, weights: Rows) -> Matrix:
        """sum_r weights_r X_r."""
        return self.left.T @ (weights[:, None] * self.right)

    def apply(self, update: Matrix) -> Rows:
        """<X_r, update> for every row."""
        return ((self.left @ update) * self.right).sum(1)


@dataclass(frozen=True)
class ExplicitLayer:
    """Rows as matrices, ``[rows, m, d]``: for parameters of layers that are not dense."""

    names: tuple[str, ...]
    rows: Float[Tensor, "rows m d"]

    @property
    def shape(self) -> tuple[int, int]:
        """(m, d) of the layer's weight matrix."""
        return int(self.rows.shape[1]), int(self.rows.shape[2])

    def stretch(self, left: Stretch | None, right: Stretch | None) -> ExplicitLayer:
        """Features of the transformed layer, M_1^T X M_2^T."""
        rows = self.rows if right is None else right(self.rows)
        return ExplicitLayer(self.names, rows if left is None else left(rows.mT).mT)

    def gram(self, other: ExplicitLayer) -> Float[Tensor, "rows rows2"]:
        """<X_r, X_s>."""
        return self.rows.flatten(1) @ other.rows.flatten(1).T

    def diagonal(self) -> Rows:
        """<X_r, X_r> alone."""
        return self.rows.square().sum((1, 2))

    def combine(self, weights: Rows) -> Matrix:
        """sum_r weights_r X_r."""
        return torch.tensordot(weights, self.rows, 1)

    def apply(self, update: Matrix) -> Rows:
        """<X_r, update> for every row."""
        return self.rows.flatten(1) @ update.flatten()


Layer = FactoredLayer | ExplicitLayer


def gram_of(layers: Sequence[Layer], others: Sequence[Layer] | None = None) -> Float[Tensor, "rows rows2"]:
    """The tangent kernel of all layers together."""
    require(len(layers) > 0, "there are no layers; tangent_layers(model, x) gives those of a model.")
    pairs = zip(layers, layers if others is None else others, strict=True)
    return torch.stack([one.gram(two) for one, two in pairs]).sum(0)  # type: ignore[arg-type]


def diagonal_of(layers: Sequence[Layer]) -> Rows:
    """The tangent kernel of every row with itself."""
    return torch.stack([layer.diagonal() for layer in layers]).sum(0)


def tangent_layers(model: nn.Module, x: Inputs, *, parameters: str | Sequence[str] = "trainable") -> list[Layer]:
    """The features of every layer of ``model`` at ``x``, rows in the order sample, then output.

    Dense layers cost n (m + d) numbers; any other parameter of size p costs n p, one backward pass per sample and output.
    """
    chosen = select_parameters(model, parameters)
    by_module: dict[str, list[str]] = {}
    for name in chosen:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    layers: list[Layer] = []
    for names in by_module.values():
        factored = _factored_layer(model, x, names)
        layers += [factored] if factored is not None else [_explicit_layer(model, x, name) for name in names]
    return layers


def _factored_layer(model: nn.Module, x: Inputs, names: list[str]) -> FactoredLayer | None:
    """The features of a dense layer as two factors; ``None`` if the kernel engine does not keep them as an outer product."""
    kernel = TangentKernel(model, x, outputs="full", parameters=names)
    try:
        with kernel.ready():
            shares = kernel.features(x)
    except RuleMismatch:
        return None
    if len(shares) != 1 or not isinstance(shares[0], Factors) or not shares[0].weight:
        return None
    share = shares[0]
    outputs = share.g.shape[1]
    right = torch.cat([share.a, torch.ones_like(share.a[:, :1])], 1) if share.bias else share.a
    return FactoredLayer(tuple(names), share.g.flatten(0, 1), right.repeat_interleave(outputs, 0))


def _explicit_layer(model: nn.Module, x: Inputs, name: str) -> ExplicitLayer:
    """The features of one parameter, written out."""
    model = with_exact_gradients(model)
    parameter = model.get_parameter(name)
    with evaluation_mode(model):
        with torch.no_grad():
            outputs = call_model(model, x).shape[1]
        require(parameter.numel() > 0, f"parameter {name} is empty.")
        directions = torch.eye(outputs, dtype=parameter.dtype, device=parameter.device)
        rows = rows_by_sample(model, x, [parameter], directions)  # [n, k, p]
    first = parameter.shape[0] if parameter.ndim > 0 else 1
    return ExplicitLayer((name,), rows.reshape(sample_count(x) * outputs, first, -1))
