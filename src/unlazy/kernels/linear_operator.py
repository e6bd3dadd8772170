"""A symmetric kernel matrix that is known by its products: conventions of torch and scipy, and what can be asked of it.

:class:`KernelOperator` is the common part of kernels that never exist as a matrix (``operator.TangentOperator``) and of those on
disk (``gram_tiles.GramFile``). The algorithms are in ``krylov``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.kernels.gram import TooLittleMemory, size_text
from unlazy.kernels.krylov import (
    Eigenpairs,
    Multiply,
    Nystrom,
    Samples,
    Solution,
    conjugate_gradients,
    estimate_function,
    estimate_moments,
    largest_eigenpairs,
)
from unlazy.runtime import require, warn

Columns = Tensor | np.ndarray  # [n] or [n, c]
RANK, PROBES, STEPS = 16, 32, 40  # of estimators: sketch, random probes, Lanczos steps
NYSTROM_RANK = 256
KINDS = ("entropy", "participation", "stable")


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error over random probes; an error of 0 marks a number that is exact up to rounding.

    ``truncation``: how much the last quarter of the Lanczos steps changed the value, where steps are taken.
    """

    value: float
    error: float
    probes: int = 0
    truncation: float = 0.0

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.6g} ± {self.error:.2g} ({self.probes} probes)" if self.probes else f"{self.value:.6g}"


@dataclass(frozen=True)
class RidgeFit:
    """Kernel ridge regression: the solution of (K + shift I) dual = y.

    ``shift`` = ridge times the mean diagonal of K. ``residual``: the true relative residual of each column of the system that was
    solved: K + shift on samples (``space="samples"``), or J^T J + shift on parameters. ``weights``: J^T dual, where K = J J^T.
    """

    shift: float
    iterations: int
    residual: Float[Tensor, "c"]
    converged: bool
    space: str
    preconditioner: str
    dual: Tensor | None = None
    weights: Tensor | None = None
    apply: Callable[[Any], Tensor] | None = None

    def predict(self, new: Any) -> Tensor:
        """Predictions at new samples. Of a kernel on disk: ``new`` is the cross kernel, anything with ``new @ dual``."""
        if self.apply is not None:
            return self.apply(new)
        assert self.dual is not None
        if isinstance(new, np.ndarray):
            new = torch.from_numpy(new)
        predicted: Tensor = (new.to(self.dual) if isinstance(new, Tensor) else new) @ self.dual
        return predicted

    def __str__(self) -> str:
        how = "converged" if self.converged else "NOT converged"
        return (
            f"ridge on {self.space}, {self.preconditioner} preconditioner: {how} after {self.iterations} iterations, "
            f"relative residual {float(self.residual.max()):.2g}"
        )


class KernelOperator:
    """A symmetric positive semi-definite matrix ``[n, n]`` known by its products, ``K @ v`` with v of ``[n]`` or ``[n, c]``.

    Subclasses give ``shape``, ``dtype`` (in which products are computed), ``budget`` (bytes of working memory), ``multiply``
    (columns in float64 to columns in float64) and ``diagonal_sum``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    budget: int
    symmetric = True

    def multiply(self, columns: Float[Tensor, "m c"]) -> Float[Tensor, "n c"]:
        """K times columns, in float64."""
        raise NotImplementedError

    def diagonal_sum(self) -> float:
        """The exact trace of K."""
        raise NotImplementedError

    # --- conventions -----------------------------------------------------------------------------------------

    def __matmul__(self, v: Columns) -> Columns:
        """K v for a vector ``[n]`` or columns ``[n, c]``, in the type (torch or numpy) and precision of v."""
        given = torch.from_numpy(v) if isinstance(v, np.ndarray) else v
        require(isinstance(given, Tensor), f"K @ v takes a tensor or a numpy array, got {type(v).__name__}.")
        size = self.shape[-1]
        fits = given.ndim in (1, 2) and len(given) == size
        require(fits, f"the kernel is {self.shape[0]} x {size}, so v must be [{size}] or [{size}, columns]; "
                f"got {tuple(given.shape)}.")  # fmt: skip
        require(given.is_floating_point(), f"v must hold real numbers, got {given.dtype}.")
        columns = given.detach().to(self.device, torch.float64)
        found = self.multiply(columns[:, None] if columns.ndim == 1 else columns)
        found = (found[:, 0] if columns.ndim == 1 else found).to(given.device, given.dtype)
        return found.numpy() if isinstance(v, np.ndarray) else found

    def matvec(self, v: Columns) -> Columns:
        """``K @ v``."""
        return self @ v

    def as_linear_operator(self) -> Any:
        """A ``scipy.sparse.linalg.LinearOperator`` in float64, for ``cg``, ``eigsh`` and other functions of scipy."""
        from scipy.sparse.linalg import LinearOperator

        def product(v: np.ndarray) -> np.ndarray:
            return np.asarray(self @ np.ascontiguousarray(v, dtype=np.float64))

        return LinearOperator(
            self.shape, matvec=product, rmatvec=product, matmat=product, rmatmat=product, dtype=np.float64
        )

    # --- questions -------------------------------------------------------------------------------------------

    def top_eigenpairs(self, count: int, *, tolerance: float | None = None, seed: int = 0) -> Eigenpairs:
        """The ``count`` largest eigenvalues and their vectors, each with its residual |K v - l v|.

        Block Lanczos with full re-orthogonalisation. ``tolerance``: of a residual, relative to its eigenvalue; by default 1e-8
        where products are in float64, else 1e-4.
        """
        self._check_symmetric()
        rows = self._side_size()
        self._require_room(rows, 2 * (3 * count + 64), f"{count} eigenvectors")
        tolerance = (1e-8 if self.dtype == torch.float64 else 1e-4) if tolerance is None else tolerance
        return largest_eigenpairs(
            self._side_product(), rows, count, tolerance=tolerance, rounding=self._rounding(), seed=seed,
            device=self.device,
        )  # fmt: skip

    def fit_ridge(
        self,
        y: Columns,
        ridge: float = 1e-3,
        *,
        tolerance: float = 1e-6,
        steps: int = 1000,
        rank: int | None = None,
        seed: int = 0,
    ) -> RidgeFit:
        """Kernel ridge regression of the columns of ``y`` by preconditioned conjugate gradients, all columns at once.

        ``ridge`` is relative to the mean diagonal of K, as in ``kernel_regression``. ``rank``: of the Nyström preconditioner.
        Warns if ``tolerance``, a relative residual, is not reached within ``steps`` iterations.
        """
        self._check_symmetric()
        columns, shift = self._targets(y), self._shift(ridge)
        chosen = min(rank or NYSTROM_RANK, len(columns))
        self._require_room(len(columns), 3 * chosen + 5 * columns.shape[1], "a Nyström preconditioner")
        precondition = Nystrom(self.multiply, len(columns), chosen, shift, seed=seed, rounding=self._rounding())
        found = conjugate_gradients(
            lambda v: self.multiply(v) + shift * v, columns, precondition=precondition, tolerance=tolerance, steps=steps
        )
        kind = f"Nyström (rank {chosen})"
        return self._report(found, tolerance, shift, "samples", kind, dual=found.columns)

    def trace(self, *, rank: int = RANK, probes: int = PROBES, seed: int = 0) -> Estimate:
        """The trace of K by Hutch++: ``2 rank + probes`` products."""
        return self._estimate(self._moments(rank, probes, seed), lambda sums: sums[0])

    def alignment(self, y: Columns, *, rank: int = RANK, probes: int = PROBES, seed: int = 0) -> Estimate:
        """Kernel-target alignment <K, Y Y^T>_F / (|K| |Y Y^T|), as ``alignment``. Only |K| is estimated."""
        self._check_symmetric()
        columns = self._targets(y)
        known = self._form(columns) / float((columns.mT @ columns).norm())
        return self._estimate(self._moments(rank, probes, seed), lambda sums: known / sums[1].sqrt())

    def effective_rank(
        self,
        kind: str = "entropy",
        *,
        rank: int = RANK,
        probes: int = PROBES,
        steps: int = STEPS,
        seed: int = 0,
    ) -> Estimate:
        """How many directions carry the spectrum; kinds as in ``effective_rank``.

        ``entropy`` takes ``steps`` products for each of ``rank + probes`` columns, the others one or two.
        """
        require(kind in KINDS, f"kind must be one of {', '.join(KINDS)}; got {kind!r}.")
        if kind == "participation":
            return self._estimate(self._moments(rank, probes, seed), lambda sums: sums[0].square() / sums[1])
        if kind == "stable":
            top = float(self.top_eigenpairs(1, seed=seed).values[0])
            return self._estimate(self._moments(rank, probes, seed), lambda sums: sums[0] / top)
        total = self.diagonal_sum()  # exact, so that shares of the spectrum add up to 1
        sums = self._function_sums(lambda values: torch.special.entr(values / total)[None], rank, probes, steps, seed)
        return self._estimate(sums, lambda found: found[0].exp())

    def log_determinant(
        self, ridge: float, *, rank: int = RANK, probes: int = PROBES, steps: int = STEPS, seed: int = 0
    ) -> Estimate:
        """log det(K + shift I) with shift = ridge times the mean diagonal, by stochastic Lanczos quadrature."""
        require(ridge > 0, f"the logarithm needs a positive ridge, got {ridge!r}.")
        shift, size = self._shift(ridge), self._side_size()
        outside = (self.shape[0] - size) * float(np.log(shift))  # eigenvalues 0 that the smaller side lacks
        sums = self._function_sums(lambda values: (values + shift).log()[None], rank, probes, steps, seed)
        return self._estimate(sums, lambda found: found[0] + outside)

    # --- shared parts ----------------------------------------------------------------------------------------

    def _check_symmetric(self) -> None:
        require(
            self.symmetric,
            "this is a kernel between two sets, which has products only; all pairs of one set are meant.",
        )

    def _side_size(self) -> int:
        """Size of the matrix that estimators work on: K, or a smaller one with the same non-zero eigenvalues."""
        return self.shape[0]

    def _side_product(self) -> Multiply:
        return self.multiply

    def _form(self, columns: Tensor) -> float:
        """The trace of Y^T K Y."""
        return float((columns * self.multiply(columns)).sum())

    def _moments(self, rank: int, probes: int, seed: int) -> tuple[Samples, None]:
        """Samples of the traces of K and K^2."""
        size = self._side_size()
        self._require_room(size, 4 * (rank + probes), "the probes")
        return estimate_moments(self._side_product(), size, rank=rank, probes=probes, seed=seed), None

    def _function_sums(
        self, functions: Callable[[Tensor], Tensor], rank: int, probes: int, steps: int, seed: int
    ) -> tuple[Samples, Samples]:
        size = self._side_size()
        self._require_room(size, steps + 4 * (rank + probes), f"{steps} Lanczos vectors and {rank + probes} probes")
        room = self.budget // (8 * size) - 4 * (rank + probes)
        return estimate_function(
            self._side_product(), size, functions, rank=rank, probes=probes, steps=steps,
            at_once=max(1, room // steps), seed=seed,
        )  # fmt: skip

    @staticmethod
    def _estimate(samples: tuple[Samples, Samples | None], function: Callable[[Tensor], Tensor]) -> Estimate:
        value, error = samples[0].combine(function)
        fewer = samples[1].combine(function)[0] if samples[1] is not None else value
        return Estimate(value, error, samples[0].rest.shape[1], abs(value - fewer))

    def _targets(self, y: Columns) -> Float[Tensor, "n c"]:
        given = torch.from_numpy(y) if isinstance(y, np.ndarray) else y
        require(isinstance(given, Tensor), f"targets are a tensor or a numpy array, got {type(y).__name__}.")
        n = self.shape[0]
        require(
            given.ndim in (1, 2) and len(given) == n,
            f"the kernel is of {n} rows, so targets must be [{n}] or [{n}, columns]; got {tuple(given.shape)}.",
        )
        require(given.is_floating_point(), f"targets are real columns, one-hot for classes; got {given.dtype}.")
        columns = given.detach().to(self.device, torch.float64)
        require(bool(columns.isfinite().all()), "targets contain NaN or infinite numbers.")
        return columns[:, None] if columns.ndim == 1 else columns

    def _shift(self, ridge: float) -> float:
        require(ridge > 0, f"ridge must be positive, got {ridge!r}; without one the system has no stable solution.")
        return ridge * self.diagonal_sum() / self.shape[0]

    def _rounding(self) -> float:
        return torch.finfo(self.dtype).eps

    def _require_room(self, rows: int, columns: int, what: str) -> None:
        """Raise ``TooLittleMemory`` if so many float64 vectors exceed the memory given."""
        needed = 8 * rows * columns
        if needed > self.budget:
            raise TooLittleMemory(
                f"{what} of length {rows} take {size_text(needed)}, and {size_text(self.budget)} are allowed. "
                "Give more memory, or ask for less."
            )

    @staticmethod
    def _report(
        found: Solution, tolerance: float, shift: float, space: str, preconditioner: str, **more: Any
    ) -> RidgeFit:
        converged = bool((found.residual <= 1.5 * tolerance).all())
        if not converged:
            worst = float(found.residual.max())
            warn(
                f"conjugate gradients reached a relative residual of {worst:.2g}, not {tolerance:.2g}, in {found.iterations} "
                "iterations; give a larger ridge, more steps, or precision='float64'."
            )
        return RidgeFit(shift, found.iterations, found.residual, converged, space, preconditioner, **more)
