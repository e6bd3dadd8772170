"""A model of any module's tangent features that adapt: fit, predict, and the adapted kernel."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unlazy.kernels.capture import Inputs, call_model, evaluation_mode, sample_count, take_samples
from unlazy.runtime import InputError, require
from unlazy.theory.adaptive_solutions import (
    AlternatingSearch,
    StructuredSolution,
    UnstructuredSolution,
    solve_structured,
    solve_unstructured,
)
from unlazy.theory.penalties import Penalty, Power
from unlazy.theory.tangent_layers import Layer, diagonal_of, gram_of, tangent_layers

BATCH = 512  # samples predicted at a time


class AdaptiveTangents:
    """f_0 plus a linear model on the tangent features of ``model``, which are transformed while it is fitted.

    ``structure="layers"``: a left and a right transformation for each layer, with penalties ``left`` and ``right`` (``None``
    keeps that side fixed; both ``None``: the plain linearised network). ``structure="free"``: one unrestricted transformation
    with penalty ``left``. ``ridge=0`` interpolates. Everything runs in float64 on a copy; ``model`` itself is not changed.

    >>> fixed = AdaptiveTangents(nn.Linear(2, 1), left=None, right=None)
    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0], [3.0]])
    >>> fixed.fit(x, y).predict(x).round(decimals=6).flatten().tolist()
    [1.0, 3.0]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        structure: str = "layers",
        left: Penalty | None = Power(2),  # noqa: B008  (frozen)
        right: Penalty | None = Power(2),  # noqa: B008
        ridge: float = 0.0,
        parameters: str | Sequence[str] = "trainable",
        search: AlternatingSearch | None = None,
    ) -> None:
        require(structure in ("layers", "free"), f"structure must be 'layers' or 'free', got {structure!r}.")
        if structure == "free" and left is None:
            raise InputError("structure='free' needs its penalty: left=Power(2).")
        self.model = copy.deepcopy(model).double()
        self.structure, self.left, self.right, self.ridge = structure, left, right, ridge
        self.parameters, self.search = parameters, search
        self.solution: StructuredSolution | UnstructuredSolution | None = None
        self._fitted_layers: list[Layer] = []

    def fit(self, x: Inputs, y: Float[Tensor, "n o"] | Float[Tensor, " n"]) -> AdaptiveTangents:
        """Solve for targets ``y [n, outputs]``, or ``[n]`` for one output; the solution stays in ``solution``."""
        x = _to_float64(x)
        start = self._start_outputs(x)
        y = y[:, None] if y.ndim == 1 and start.shape[1] == 1 else y
        require(
            y.shape == start.shape, f"targets {tuple(y.shape)} do not fit the model's outputs {tuple(start.shape)}."
        )
        rest = (y.double() - start).flatten()
        layers = tangent_layers(self.model, x, parameters=self.parameters)
        if self.structure == "free":
            self.solution, self._fitted_layers = (
                solve_unstructured(gram_of(layers), rest, self.left, self.ridge),
                layers,
            )
        else:
            self.solution = solve_structured(
                layers, rest, left=self.left, right=self.right, ridge=self.ridge, search=self.search
            )
        return self

    def predict(self, x: Inputs) -> Float[Tensor, "n o"]:
        """f_0 plus the fitted change."""
        wide = _to_float64(x)
        parts = [take_samples(wide, slice(first, first + BATCH)) for first in range(0, sample_count(wide), BATCH)]
        starts = [self._start_outputs(part) for part in parts]
        return torch.cat(
            [start + self._fitted_change(part).view_as(start) for start, part in zip(starts, parts, strict=True)]
        )

    def kernel(self, x: Inputs, x2: Inputs | None = None) -> Float[Tensor, "rows rows2"]:
        """The adapted kernel over rows (sample, output)."""
        first, second = self._layers(x), None if x2 is None else self._layers(x2)
        solution = self._require_fitted()
        if isinstance(solution, StructuredSolution):
            return solution.kernel(first, second)
        changes = [solution.predict(gram_of(some, self._fitted_layers)) for some in (first, second) if some is not None]
        return solution.kernel(gram_of(first, second), changes[0], changes[-1])

    def diagonals(self, x: Inputs) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        """Each sample's own kernel value summed over outputs, original and adapted; nothing n x n is formed."""
        solution, layers = self._require_fitted(), self._layers(x)
        original = diagonal_of(layers)
        if isinstance(solution, StructuredSolution):
            adapted = diagonal_of(solution.adapt_features(layers))
        else:
            adapted = original + solution.diagonal_gain(solution.predict(gram_of(layers, self._fitted_layers)))
        n = sample_count(x)
        return original.reshape(n, -1).sum(1), adapted.reshape(n, -1).sum(1)

    def bending(self, x: Inputs) -> Float[Tensor, "n"]:
        """Each sample's own kernel value after adaptation over the original one, both summed over outputs."""
        original, adapted = self.diagonals(x)
        return adapted / original

    def _require_fitted(self) -> StructuredSolution | UnstructuredSolution:
        if self.solution is None:
            raise InputError("not fitted yet: call fit(x, y) first.")
        return self.solution

    def _layers(self, x: Inputs) -> list[Layer]:
        return tangent_layers(self.model, _to_float64(x), parameters=self.parameters)

    def _fitted_change(self, x: Inputs) -> Tensor:
        """f - f_0 at the rows of x."""
        solution, layers = self._require_fitted(), self._layers(x)
        if isinstance(solution, StructuredSolution):
            return solution.predict(layers)
        return solution.predict(gram_of(layers, self._fitted_layers))

    def _start_outputs(self, x: Inputs) -> Tensor:
        """f_0(x)."""
        with evaluation_mode(self.model), torch.no_grad():
            return call_model(self.model, x)


def _to_float64(x: Inputs) -> Inputs:
    """All floating-point tensors of an input in float64."""
    return pytree.tree_map(
        lambda leaf: leaf.double() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf, x
    )
