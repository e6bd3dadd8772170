"""Comparing kernels. All functions broadcast over leading (member) axes: ``[..., n, n]`` in, ``[...]`` out.

Kernels and targets may be numpy arrays, such as those a run keeps; results are tensors. The kernel of a dead network is zero:
normalised it stays zero, its effective rank is 0, and nothing aligns with it (0), so that its distance from any other is 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from unlazy.runtime import InputError, require

Kernel = Float[Tensor, "*members n n"]
Given = Tensor | NDArray[Any]  # checked below, in words
Columns = Float[Tensor, "*members n o"] | Float[Tensor, "n"]


def trace_normalise(kernel: Given) -> Kernel:
    """K n / tr(K): mean diagonal 1, so that only ratios are left."""
    (kernel,) = _as_kernels(kernel)
    trace = kernel.diagonal(dim1=-2, dim2=-1).mean(-1)
    return kernel / _or_one(trace)[..., None, None]


def top_normalise(kernel: Given) -> Kernel:
    """K divided by its largest eigenvalue, as the half-space paper's notebooks do."""
    kernel = _as_symmetric(kernel)
    return kernel / _or_one(torch.linalg.eigvalsh(kernel)[..., -1, None, None])


def kernel_distance(kernel: Given, other: Given) -> Tensor:
    """1 - <K, K′>_F / (‖K‖ ‖K′‖): 0 for proportional kernels (two zero ones too), blind to scale.

    >>> zero, one = torch.zeros(2, 2), torch.eye(2)
    >>> float(kernel_distance(zero, one)), float(kernel_distance(zero, zero))
    (1.0, 0.0)
    """
    kernel, other = _as_kernels(kernel, other)
    both_zero = ~(kernel.any(-1).any(-1) | other.any(-1).any(-1))
    return torch.where(both_zero, 0.0, 1 - _cosine(kernel, other))


def relative_change(kernel: Given, start: Given) -> Tensor:
    """‖K - K_0‖ / ‖K_0‖ (Frobenius) after both are trace-normalised; infinite if only K_0 is zero, 0 if both are."""
    kernel, start = map(trace_normalise, _as_kernels(kernel, start))
    moved = torch.linalg.matrix_norm(kernel - start)
    return torch.where(moved == 0, moved, moved / torch.linalg.matrix_norm(start))


def alignment(kernel: Given, targets: Given) -> Tensor:
    """Kernel-target alignment, uncentred: <K, Y Y^T>_F / (‖K‖ ‖Y Y^T‖).

    >>> y = torch.tensor([[1.0], [-1.0]])
    >>> float(alignment(y @ y.T, y))
    1.0
    """
    kernel, labels = _with_label_kernel(kernel, targets)
    return _cosine(kernel, labels.expand_as(kernel))


def centered_alignment(kernel: Given, targets: Given) -> Tensor:
    """Alignment after centring both kernels, H K H with H = I - 11^T/n."""
    kernel, labels = _with_label_kernel(kernel, targets)
    return _cosine(center(_scale_to_one(kernel)), center(labels).expand_as(kernel))


def label_kernel(
    targets: Columns, kind: str = "targets", *, start: Tensor | None = None
) -> Float[Tensor, "*members n n"]:
    """The kernel of what is to be learned, or of what was; a vector counts as one column.

    ``kind="targets"``: Y Y^T. ``kind="change"``: (f_T - f_0)(f_T - f_0)^T, the adaptive tangent paper's label kernel, from the
    outputs at the end (``targets``) and at the ``start`` of training.

    >>> end, start = torch.tensor([2.0, 5.0]), torch.tensor([1.0, 3.0])
    >>> label_kernel(end, "change", start=start).tolist()
    [[1.0, 2.0], [2.0, 4.0]]
    """
    require(kind in ("targets", "change"), f"kind must be 'targets' or 'change', got {kind!r}.")
    if kind == "targets":
        require(start is None, "start belongs to kind='change'; Y Y^T knows no beginning.")
        columns = targets
    else:
        if start is None:
            raise InputError("kind='change' needs the outputs before training: start=f_0.")
        shapes = f"{tuple(targets.shape)} and {tuple(start.shape)}"
        require(targets.shape == start.shape, f"outputs at the end and at the start must match: {shapes}.")
        columns = targets - start
    columns = columns[:, None] if columns.ndim == 1 else columns
    return columns @ columns.mT


def center(kernel: Given) -> Kernel:
    """H K H with H = I - 11^T/n."""
    (kernel,) = _as_kernels(kernel)
    rows = kernel - kernel.mean(-1, keepdim=True)
    return rows - rows.mean(-2, keepdim=True)


def spectrum(kernel: Given) -> Float[Tensor, "*members n"]:
    """Eigenvalues, largest first; rounding below zero is cut off."""
    return torch.linalg.eigvalsh(_as_symmetric(kernel)).clamp(min=0).flip(-1)


def effective_rank(kernel: Given, kind: str = "entropy") -> Tensor:
    """How many directions carry the spectrum: n for the identity, 1 for rank one, 0 for zero.

    ``entropy``: exp of the entropy of the normalised spectrum (Roy and Vetterli). ``participation``: (sum l)^2 / sum l^2.
    ``stable``: sum l / largest l.
    """
    values = spectrum(kernel)
    require(values.shape[-1] > 0, "a kernel of no samples has no rank.")
    alive = values[..., 0] > 0
    values = values / _or_one(values[..., :1])
    total = values.sum(-1)
    if kind == "entropy":
        return alive * torch.special.entr(values / _or_one(total)[..., None]).sum(-1).exp()
    if kind == "participation":
        return total.square() / _or_one(values.square().sum(-1))
    if kind == "stable":
        return total / _or_one(values[..., 0])
    raise InputError(f"kind must be 'entropy', 'participation' or 'stable', got {kind!r}.")


def kernel_velocity(kernel: Given, later: Given, elapsed: float) -> Tensor:
    """Kernel distance per unit of time between two moments of training (Fort et al. 2020)."""
    require(elapsed > 0, f"the later kernel must come later: elapsed time {elapsed!r}.")
    return kernel_distance(kernel, later) / elapsed


def regression_loss(kernel: Given, targets: Float[Tensor, "n o"], tolerance: float = 1e-9) -> Tensor:
    """Mean squared error left by ridgeless regression of the targets on the kernel, on its own points.

    What remains of the targets outside the kernel's range (eigenvalues above ``tolerance`` times the largest).
    """
    values, vectors = torch.linalg.eigh(_as_symmetric(kernel).double())
    inside = vectors.mT @ targets.double()  # [..., n, o]
    kept = values > tolerance * values[..., -1:].clamp(min=0)
    return (inside.square() * ~kept[..., None]).sum((-2, -1)) / targets.numel()


def _scale_to_one(kernel: Kernel) -> Kernel:
    """Under one factor that makes the largest entry 1, so that squares of path counts stay within any precision."""
    return kernel / _or_one(kernel.abs().amax((-2, -1), keepdim=True))


def _or_one(size: Tensor) -> Tensor:
    """The size to divide by; 1 in place of 0."""
    return torch.where(size == 0, 1, size)


def _cosine(kernel: Kernel, other: Kernel) -> Tensor:
    kernel, other = _scale_to_one(kernel), _scale_to_one(other)
    product = (kernel * other).sum((-2, -1))
    return product / _or_one(torch.linalg.matrix_norm(kernel) * torch.linalg.matrix_norm(other))


def _as_kernels(*given: Given) -> list[Tensor]:
    """Kernels as tensors, square and of one size."""
    kernels = [_in_working_precision(_as_tensor(kernel, "a kernel")) for kernel in given]
    for kernel in kernels:
        shape = tuple(kernel.shape)
        square = len(shape) >= 2 and shape[-1] == shape[-2]
        require(
            square, f"a kernel is a square matrix [..., n, n], got {shape}; all pairs of one set of samples are meant."
        )
    sizes = [kernel.shape[-1] for kernel in kernels]
    require(
        len(set(sizes)) == 1,
        f"kernels to compare must be of the same samples, got {' and '.join(map(str, sizes))} of them.",
    )
    return kernels


def _in_working_precision(kernel: Tensor) -> Tensor:
    """Counts as float64, half precision as float32: neither has eigenvalues."""
    if not kernel.is_floating_point():
        return kernel.double()
    return kernel.float() if kernel.element_size() < 4 else kernel


def _as_symmetric(given: Given) -> Tensor:
    """A kernel of one set with itself; of any other square matrix half would be ignored in silence."""
    (kernel,) = _as_kernels(given)
    apart = (kernel - kernel.mT).abs().amax() if kernel.numel() else 0
    largest = kernel.abs().amax() if kernel.numel() else 0
    require(
        not bool(apart > 1e-3 * largest),
        "the kernel is not symmetric, so it has no spectrum of its own; all pairs of one set of samples are meant.",
    )
    return kernel


def _with_label_kernel(kernel: Given, targets: Given) -> tuple[Tensor, Tensor]:
    (kernel,), columns = _as_kernels(kernel), _as_tensor(targets, "the targets")
    shape = tuple(columns.shape)
    require(
        len(shape) in (1, 2) and shape[0] == kernel.shape[-1],
        f"the kernel is of {kernel.shape[-1]} samples, so targets must be [{kernel.shape[-1]}, outputs]; got {shape}.",
    )
    require(len(shape) == 1 or shape[1] > 0, "the targets have no column.")
    require(columns.is_floating_point(), f"targets are real columns, one-hot for classes; got {columns.dtype}.")
    return kernel, label_kernel(columns)


def _as_tensor(given: Given, what: str) -> Tensor:
    if isinstance(given, np.ndarray) and given.dtype.kind in "biuf":
        given = torch.from_numpy(given)
    kind = f"an array of {given.dtype}" if isinstance(given, np.ndarray) else type(given).__name__
    require(isinstance(given, Tensor), f"{what} is a tensor or a numpy array of real numbers, got {kind}.")
    assert isinstance(given, Tensor)
    require(not given.is_complex(), f"{what} has real numbers, got {given.dtype}.")
    return given
