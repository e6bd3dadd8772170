"""Tangent features projected to a chosen dimension: a kernel of any size in n r numbers, with its error known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.kernels.capture import Inputs
from unlazy.kernels.tangent import tangent_features
from unlazy.runtime import require, stream

COLUMNS = 4096  # how many parameters are projected at once


@dataclass(frozen=True)
class Projected:
    """Features ``[n, outputs, r]`` whose inner products estimate the tangent kernel without bias."""

    features: Float[Tensor, "n o r"]

    def kernel(self) -> Float[Tensor, "n n"]:
        """The estimate of the trace kernel."""
        flat = self.features.flatten(1)
        return flat @ flat.T

    def error(self) -> Float[Tensor, "n n"]:
        """Standard error of each entry, sqrt((sum over outputs of K_aa K_bb + K_ab^2) / r), itself estimated.

        Exact for Gaussian projections of one output; for several, entries of different outputs share the projection and the sum
        runs over pairs of outputs.
        """
        size = self.features.shape[-1]
        full = torch.einsum("nar,mbr->nmab", self.features, self.features)  # [n, n, O, O]
        own = full.diagonal(dim1=0, dim2=1).movedim(-1, 0)  # [n, O, O]
        variance = (own[:, None] * own[None]).sum((-2, -1)) + (full * full.mT).sum((-2, -1))
        return (variance.clamp(min=0) / size).sqrt()


def project_tangents(
    model: nn.Module,
    x: Inputs,
    dimension: int,
    *,
    seed: int = 0,
    parameters: str | Sequence[str] = "trainable",
    method: str = "auto",
) -> Projected:
    """Gaussian random projection of the tangent features, seeded; project sets that are to be compared in one call.

    The projection matrix is never held whole: it is drawn ``COLUMNS`` rows at a time from its own random stream.
    """
    require(isinstance(dimension, int) and dimension >= 1, f"dimension must be a whole number >= 1, got {dimension!r}.")
    rows = tangent_features(model, x, parameters=parameters, method=method)
    result = rows.new_zeros(*rows.shape[:2], dimension)
    for number, part in enumerate(rows.split(COLUMNS, dim=-1)):
        random = stream(seed, "projection", number)
        matrix = torch.randn(part.shape[-1], dimension, generator=random, dtype=torch.float64).to(rows)
        result += part @ (matrix / dimension**0.5)
    return Projected(result)


def fold_columns(rows: Float[Tensor, "n p"], into: Float[Tensor, "n r"], offset: int, random: torch.Generator) -> None:
    """Add columns ``offset, offset + 1, ...`` of a matrix, with random signs, to column number modulo r of ``into``.

    A matrix folded piece by piece with one generator keeps the inner products of its rows without bias. Each entry's variance is
    (K_aa K_bb + K_ab^2) / r at most, about, where no few columns hold most of a row.
    """
    n, size, start = len(rows), into.shape[1], offset % into.shape[1]
    signs = torch.randint(0, 2, (rows.shape[1],), generator=random, dtype=torch.int8).to(rows.device)
    padded = rows.new_zeros(n, -(-(start + rows.shape[1]) // size) * size)
    torch.mul(rows, 1 - 2 * signs.to(rows.dtype), out=padded[:, start : start + rows.shape[1]])
    into += padded.view(n, -1, size).sum(1)
