"""What a fixed kernel learns: gradient flow over time, and ridge regression where it ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.runtime import require


def kernel_flow(
    kernel: Float[Tensor, "*members n n"],
    y: Float[Tensor, "n o"] | Float[Tensor, "n"],
    start: Float[Tensor, "*members n p"] | Float[Tensor, "n"],
    times: Sequence[float],
) -> Float[Tensor, "times *members n o"]:
    """Outputs at each time of gradient flow on the mean squared error with a kernel that does not move.

    f(t) = y + exp(-2 t K / (n o)) (f_0 - y), by eigen-decomposition in float64: exact at any time, however late. With the
    tangent kernel at the start this is the linearised network under small steps; every output sees the same kernel. A vector
    counts as one column.

    >>> one = torch.ones(1, 1)
    >>> float(kernel_flow(one, one, 0 * one, [0.0, 1.0])[1, 0, 0])  # 1 - exp(-2)
    0.8646647167633873
    """
    require(len(times) > 0 and all(time >= 0 for time in times), "a flow needs times, each at least 0.")
    y, start = (columns[:, None] if columns.ndim == 1 else columns for columns in (y, start))
    shapes = f"{tuple(y.shape)} and {tuple(start.shape)}"
    require(y.shape == start.shape[-2:], f"targets and outputs at the start must be [n, outputs] alike, got {shapes}.")
    values, vectors = torch.linalg.eigh(kernel.double())
    missing = vectors.mT @ (start.double() - y.double())  # [*members, n, o]
    rates = 2 * values.clamp(min=0)[..., None] / y.numel()
    return torch.stack([y.double() + vectors @ (torch.exp(-rates * time) * missing) for time in times])


def ridge_loss(
    kernel: Float[Tensor, "*members n n"], targets: Float[Tensor, "*m n o"], ridge: float
) -> Float[Tensor, "*members"]:
    """Mean squared error left on its own points by ridge regression; ``ridge`` is relative to the mean diagonal.

    Eigendirections far above the ridge are learned, those far below it are not: the same cut that stopping gradient flow after
    a time of about n / ridge (mean diagonal 1) makes. Without it a kernel of full rank would fit anything.
    """
    require(ridge > 0, f"ridge must be positive, got {ridge!r}.")
    wide = kernel.double()
    shift = ridge * wide.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    shifted = wide + shift * torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
    left = shift * torch.cholesky_solve(targets.double().expand(*wide.shape[:-1], -1), torch.linalg.cholesky(shifted))
    return left.square().mean((-2, -1))
