"""Regression and classification with a given kernel."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.runtime import InputError, require


def kernel_regression(
    kernel: Float[Tensor, "n n"], y: Float[Tensor, "n o"], cross: Float[Tensor, "m n"], ridge: float = 0.0
) -> Float[Tensor, "m o"]:
    """Predictions K(x, X) (K(X, X) + ridge tr(K)/n I)^(-1) y, by Cholesky in float64.

    ``ridge`` is relative to the mean diagonal, so that it means the same for every scale of the kernel. For classes give one-hot
    targets and take the largest prediction.

    >>> float(kernel_regression(torch.eye(2), torch.tensor([[1.0], [2.0]]), torch.eye(2))[1])
    2.0
    """
    require(ridge >= 0, f"ridge must be at least 0, got {ridge!r}.")
    n, shapes = len(kernel), ", ".join(str(tuple(each.shape)) for each in (kernel, y, cross))
    fits = tuple(kernel.shape) == (n, n) and tuple(y.shape[:-1]) == (n,) and cross.ndim == 2 and cross.shape[1] == n
    require(fits, f"a kernel [n, n], targets [n, outputs] and a cross kernel [m, n] are expected, got {shapes}.")
    wide = kernel.double()
    wide = wide + ridge * wide.diagonal().mean() * torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    factor, failed = torch.linalg.cholesky_ex(wide)
    if int(failed):
        raise InputError("the kernel is not positive definite to rounding; give a ridge, 1e-10 or more.")
    return (cross.double() @ torch.cholesky_solve(y.double(), factor)).to(kernel.dtype)
