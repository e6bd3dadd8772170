"""The tangent kernel K = J J^T as an operator that never exists as a matrix: ``K @ v`` is one J^T v and one J w over batches.

J has a row for every sample (for ``outputs="full"`` for every output of it). Memory is that of one batch and of the vectors, so
neither the number of samples nor that of parameters is bounded by what a matrix would take. Data may be larger than memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unlazy.kernels.capture import Inputs, check_module, explain_input_errors, output_rows, sample_count, take_samples
from unlazy.kernels.gated import refuse_stack, with_exact_gradients
from unlazy.kernels.gram import USABLE, TooLittleMemory, parse_memory, size_text
from unlazy.kernels.jacobian import ModuleJacobian, coarsest_eps
from unlazy.kernels.krylov import Eigenpairs, Multiply, Nystrom, conjugate_gradients
from unlazy.kernels.linear_operator import NYSTROM_RANK, Columns, KernelOperator, RidgeFit
from unlazy.kernels.sample_stream import PickInputs, SampleStream, open_stream
from unlazy.kernels.selection import Outputs, Parameters, output_directions, select_parameters
from unlazy.kernels.tangent import tangent_diagonal, tangent_kernel
from unlazy.runtime import Unsupported, require, stream

MOST_SAMPLES = 1024  # in one pass
WORK_BYTES, WORK_SHARE = (
    2**28,
    0.5,
)  # for the activations of a batch: enough to fill the cores, and a share of the memory
PASS_FACTOR = 6  # memory of a pass in units of the activations: the graph of a gradient is the largest
OVERSAMPLED = 4  # rows of J in the subsampled J^T J, per column
ROW_BYTES = 2**29  # for explicit rows while J^T J is made: the rows, and a copy in float64


def tangent_operator(
    model: nn.Module,
    data: Any,
    *,
    outputs: Outputs = "trace",
    parameters: Parameters = "trainable",
    memory: str | int | None = None,
    device: str | torch.device | None = None,
    precision: str | None = None,
    pick: PickInputs | None = None,
) -> TangentOperator:
    """The tangent kernel of ``model`` on ``data`` as an operator: ``K @ v``, eigenpairs, ridge regression, traces.

    ``data``: inputs as ``tangent_kernel`` takes them, numpy arrays (also memory-mapped), a data set, a ``DataLoader`` without
    shuffling, or an iterable of batches that can be read again; ``pick(batch)`` takes the inputs out of a batch, by default the
    first entry of a tuple. ``outputs`` and ``parameters`` as in ``tangent_kernel``; ``"full"`` has a row for every output of
    every sample, sample by sample. A product costs as much with ``"full"`` as with one output; ``"trace"`` takes a J^T v and a
    J w for each output.

    The operator is of the model as it is now: it keeps a copy, in evaluation mode, on ``device`` and in ``precision``
    (``"float64"``; default: the model's own). ``memory``: ``"2GB"``, default half of what is free; the vectors that you pass come
    on top.

    >>> net, x = nn.Linear(2, 1, bias=False).double(), torch.tensor([[1.0, 0.0], [1.0, 2.0]]).double()
    >>> K = tangent_operator(net, x, memory="1GB")  # its tangent kernel is x x^T
    >>> (K @ torch.ones(2).double()).tolist()
    [2.0, 6.0]
    """
    return TangentOperator(model, data, outputs, parameters, memory, device, precision, pick)


class TangentOperator(KernelOperator):
    """Made by :func:`tangent_operator`. K = J J^T with J ``[rows, features]``, neither of which is ever held.

    ``samples``, ``directions`` (output combinations, ``[k, outputs]``), ``features`` (length of a row of J: the parameters, times
    the outputs for ``"trace"``), ``at_once`` (samples in one pass), ``columns_at_once`` (vectors that share a pass).
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        outputs: Outputs,
        parameters: Parameters,
        memory: str | int | None,
        device: str | torch.device | None,
        precision: str | None,
        pick: PickInputs | None,
    ) -> None:
        check_module(model)
        refuse_stack(model)
        require(
            precision in (None, "float32", "float64"), f"precision must be 'float32' or 'float64', got {precision!r}."
        )
        chosen = select_parameters(model, parameters)
        if any(parameter.is_complex() for parameter in chosen.values()):
            raise Unsupported(
                type(model).__name__, "it has complex parameters", "Take tangent_kernel, which has no limit here."
            )
        self.device = torch.device(device) if device is not None else next(iter(chosen.values())).device
        self.budget = parse_memory(memory, self.device)
        self._names, self._outputs = list(chosen), outputs
        self.jacobian = ModuleJacobian(_OutputRows(with_exact_gradients(model)), [f"module.{name}" for name in chosen])
        self.jacobian.to(self.device, None if precision is None else getattr(torch, precision))
        self._stream, self._trace = open_stream(data, pick), math.nan
        first = self._prepare(next(iter(self._stream.batches(2)))[1])
        with explain_input_errors(self._module, first):
            out = self.jacobian.outputs(first)
            self._check_first_samples(first)
        self.dtype = out.dtype
        self.directions, pairing = output_directions(outputs, out)
        self._rows_each = len(self.directions) if pairing == "full" else 1
        self._stacks = (
            len(self.directions) if pairing == "trace" else 1
        )  # a row of J holds the gradients of all outputs
        self.samples = self._stream.length
        self.shape = (self.samples * self._rows_each,) * 2
        self.features = self._stacks * sum(parameter.numel() for parameter in chosen.values())
        self._plan_batches(first, out)

    @property
    def _module(self) -> nn.Module:
        """The copy of the model, without the wrapper that shapes its output."""
        found: nn.Module = self.jacobian.base.module  # type: ignore[assignment]
        return found

    def __repr__(self) -> str:
        return (
            f"TangentOperator({self.shape[0]} x {self.shape[0]}, {self.features} features, {str(self.dtype)[6:]}, "
            f"{self.at_once} samples and {self.columns_at_once} columns at once)"
        )

    # --- products --------------------------------------------------------------------------------------------

    def multiply(self, columns: Float[Tensor, "m c"]) -> Float[Tensor, "n c"]:
        """K times columns, in float64. Some at a time: J^T times a column is as long as the parameters."""
        groups = self._column_groups(columns)
        return torch.cat([self.apply(self.apply_transposed(columns[:, group])) for group in groups], dim=1)

    def apply_transposed(self, columns: Float[Tensor, "m c"]) -> Float[Tensor, "p c"]:
        """J^T times columns, ``[features, c]`` in float64: one pass over the data."""
        length = self.features // self._stacks
        result = torch.empty(self._stacks, length, columns.shape[1], dtype=torch.float64, device=self.device)
        for group in self._column_groups(columns):
            total = result.new_zeros(self._stacks * _width(columns, group), length)
            for part, x in self._batches(self._stream):
                own = columns[part.start * self._rows_each : part.stop * self._rows_each, group].to(self.dtype)
                total += self.jacobian.pull(self._spread(own), x)
            result[:, :, group] = total.unflatten(0, (self._stacks, -1)).transpose(1, 2)
        return result.flatten(0, 1)

    def apply(self, weights: Float[Tensor, "p c"], data: Any = None, pick: PickInputs | None = None) -> Tensor:
        """J times weights, ``[rows, c]`` in float64, at the samples of the operator or of other ``data``: one pass."""
        stream = self._stream if data is None else open_stream(data, pick)
        rows = stream.length * self._rows_each
        result = torch.empty(rows, weights.shape[1], dtype=torch.float64, device=self.device)
        for group in self._column_groups(weights):
            own = weights[:, group].to(self.dtype).unflatten(0, (self._stacks, -1)).transpose(1, 2).flatten(0, 1)
            own = own.contiguous()
            for part, x in self._batches(stream):
                place = slice(part.start * self._rows_each, part.stop * self._rows_each)
                result[place, group] = self._gather(self.jacobian.push(own, x)).double()
        return result

    def _spread(self, columns: Float[Tensor, "r c"]) -> Float[Tensor, "d n o"]:
        """Columns of one batch as weights of its outputs; for a trace one copy for each direction."""
        if self._stacks > 1:
            return torch.einsum("nc,ko->kcno", columns, self.directions).flatten(0, 1)
        return torch.einsum("nkc,ko->cno", columns.unflatten(0, (-1, self._rows_each)), self.directions)

    def _gather(self, moved: Float[Tensor, "d n o"]) -> Float[Tensor, "r c"]:
        """The reverse: J w of a batch, by output, as rows of the operator."""
        if self._stacks > 1:
            return torch.einsum("kcno,ko->nc", moved.unflatten(0, (self._stacks, -1)), self.directions)
        return torch.einsum("cno,ko->nkc", moved, self.directions).flatten(0, 1)

    def _column_groups(self, columns: Tensor) -> list[slice]:
        return [
            slice(start, start + self.columns_at_once) for start in range(0, columns.shape[1], self.columns_at_once)
        ]

    def _batches(self, stream: SampleStream) -> Iterator[tuple[slice, Inputs]]:
        for part, x in stream.batches(self.at_once):
            yield part, self._prepare(x)

    def _prepare(self, x: Inputs) -> Inputs:
        """A batch on the device, real numbers in the precision of the model."""
        dtype = self.jacobian.base.get_parameter(self.jacobian.names[0]).dtype

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.to(self.device, dtype if leaf.is_floating_point() else leaf.dtype)

        return pytree.tree_map(move, x)

    # --- plan and checks -------------------------------------------------------------------------------------

    def _plan_batches(self, first: Inputs, out: Tensor) -> None:
        """Samples in one pass and vectors that share one, within the memory."""
        with _CountBytes([*self.jacobian.parameters(), *self.jacobian.buffers()]) as counted:
            self.jacobian.outputs(first)
        sample = PASS_FACTOR * -(-counted.bytes // sample_count(first))
        item = out.element_size()
        fixed = 4 * item * self.features // self._stacks  # a copy of the parameters, a gradient and its graph
        each = 3 * item * self._stacks * out.shape[1]  # weights of the outputs of one sample, for one vector
        vector = (16 + 2 * item) * self.features + each
        free = int(USABLE * self.budget) - fixed
        if free < sample + vector:
            raise TooLittleMemory(
                f"{size_text(self.budget)} is too small: one sample takes {size_text(sample)} and one vector of "
                f"parameters {size_text(vector)}. Give more memory."
            )
        work = max(sample, min(WORK_BYTES, int(WORK_SHARE * free), free - vector))
        self.at_once = max(1, min(MOST_SAMPLES, self.samples, work // max(1, sample)))
        vector += (self.at_once - 1) * each
        self.columns_at_once = max(1, (free - self.at_once * sample) // vector)

    def _check_first_samples(self, first: Inputs) -> None:
        """Compare the product on two samples with ``tangent_kernel``, of the summed output; the latter refuses odd models."""
        expected = tangent_kernel(self._module, first, outputs="sum", parameters=self._names, memory=self.budget)
        out = self.jacobian.outputs(first)
        v = torch.tensor([[1.0, -0.7]], dtype=out.dtype, device=out.device)[:, : len(out)]
        pulled = self.jacobian.pull(v[:, :, None].expand(1, *out.shape), first)
        found = self.jacobian.push(pulled, first).sum(-1)[0]
        eps = max(torch.finfo(out.dtype).eps, coarsest_eps(self.jacobian.parameters()))
        bound = 1e5 * eps * float(expected.abs().max())
        if not torch.allclose(found, (expected @ v[0]).to(found), rtol=0, atol=bound):
            raise Unsupported(
                type(self._module).__name__,
                "products with its Jacobian disagree with the tangent kernel of single samples",
                "Take tangent_kernel with method='loop'.",
            )

    # --- questions -------------------------------------------------------------------------------------------

    def diagonal_sum(self) -> float:
        """The exact trace of K: squared norms of the gradients, from one pass over the data."""
        if math.isnan(self._trace):
            total = 0.0
            for _, x in self._batches(self._stream):
                found = tangent_diagonal(self._module, x, outputs=self._outputs, parameters=self._names).double()
                total += float(found.sum() if found.ndim == 1 else found.diagonal(dim1=1, dim2=2).sum())
            self._trace = total
        return self._trace

    def top_eigenpairs(self, count: int, *, tolerance: float | None = None, seed: int = 0) -> Eigenpairs:
        """The ``count`` largest eigenvalues and their vectors, each with its residual |K v - l v|.

        Block Lanczos with full re-orthogonalisation, on J^T J where that is smaller; residuals are those of K in any case.
        """
        require(
            1 <= count <= min(self.shape[0], self.features), f"K has rank {min(self.shape[0], self.features)} at most."
        )
        found = super().top_eigenpairs(count, tolerance=tolerance, seed=seed)
        if not self._on_parameters:
            return found
        vectors = self.apply(found.vectors)
        vectors = vectors / vectors.norm(dim=0).clamp(min=torch.finfo(torch.float64).tiny)
        residuals = (self.multiply(vectors) - vectors * found.values).norm(dim=0)
        return Eigenpairs(found.values, vectors, residuals, found.products + 2 * count, found.converged)

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

        With ``outputs="full"``, ``y`` is ``[samples, outputs]``. ``ridge`` is relative to the mean diagonal of K. With fewer
        parameters than rows the system is (J^T J + shift) w = J^T y, preconditioned by a Cholesky factor of J^T J on a random
        part of the samples, or by a Nyström sketch of ``rank`` where J^T J does not fit into memory. Otherwise it is
        (K + shift) dual = y with a Nyström sketch. ``predict`` of the result takes any data. Warns if ``tolerance``, a relative
        residual, is not reached within ``steps`` iterations.
        """
        shaped = tuple(y.shape)
        if not self._on_parameters:
            fit = super().fit_ridge(y, ridge, tolerance=tolerance, steps=steps, rank=rank, seed=seed)
            assert fit.dual is not None
            return self._with_predictions(fit, self.apply_transposed(fit.dual), shaped)
        columns, shift = self._targets(y), self._shift(ridge)
        precondition, kind = self._parameter_preconditioner(shift, rank, seed, columns.shape[1])
        normal = self._side_product()
        found = conjugate_gradients(
            lambda v: normal(v) + shift * v,
            self.apply_transposed(columns),
            precondition=precondition,
            tolerance=tolerance,
            steps=steps,
        )
        fit = self._report(found, tolerance, shift, "parameters", kind)
        return self._with_predictions(fit, found.columns, shaped)

    def _with_predictions(self, fit: RidgeFit, weights: Tensor, shaped: tuple[int, ...]) -> RidgeFit:
        def predict(new: Any) -> Tensor:
            found = self.apply(weights, new)
            if self._rows_each > 1 and shaped == (self.samples, self._rows_each):
                return found.reshape(-1, self._rows_each)
            return found[:, 0] if len(shaped) == 1 else found

        return RidgeFit(
            fit.shift,
            fit.iterations,
            fit.residual,
            fit.converged,
            fit.space,
            fit.preconditioner,
            fit.dual,
            weights,
            predict,
        )

    def _parameter_preconditioner(
        self, shift: float, rank: int | None, seed: int, columns: int
    ) -> tuple[Multiply, str]:
        size = self.features
        if rank is None and 16 * size * size + ROW_BYTES <= self.budget:
            taken = min(self.samples, OVERSAMPLED * size)
            factor = self._subsampled_factor(taken, shift, seed)
            return lambda v: torch.cholesky_solve(v, factor), f"Cholesky of J^T J on {taken} samples"
        chosen = min(rank or NYSTROM_RANK, size)
        self._require_room(size, 3 * chosen + 5 * columns, "a Nyström preconditioner")
        sketch = Nystrom(self._side_product(), size, chosen, shift, seed=seed, rounding=self._rounding())
        return sketch, f"Nyström (rank {chosen})"

    def _subsampled_factor(self, taken: int, shift: float, seed: int) -> Float[Tensor, "p p"]:
        """Cholesky factor of J^T J + shift, with J^T J from ``taken`` random samples, scaled to all of them.

        For ``"full"`` each sample gives rows for some of its outputs only, in turn: rows of one sample resemble each other, so
        many samples with one row each say more than few with all.
        """
        count = self._rows_each
        each = min(count, -(-OVERSAMPLED * self.features // taken))  # outputs a sample
        picked = torch.randperm(self.samples, generator=stream(seed, "subsample"))[:taken].sort().values
        few = self._stream.take(picked)
        parts = min(taken, count * -(-taken // (count * self.at_once)))  # a multiple of the outputs: all count alike
        total = torch.zeros(self.features, self.features, dtype=torch.float64, device=self.device)
        for number in range(parts):
            some = self._prepare(take_samples(few, slice(number, None, parts)))
            outputs = (number * each + torch.arange(each)) % count
            directions = self.directions if self._stacks > 1 else self.directions[outputs.to(self.device)]
            for _, rows in self.jacobian.rows(some, directions):
                flat = (rows.flatten(1) if self._stacks > 1 else rows.flatten(0, 1)).double()
                total.addmm_(flat.mT, flat)
        total *= self.samples / taken * count / each
        total.diagonal().add_(shift)
        factor, failed = torch.linalg.cholesky_ex(total)
        while int(failed):
            total.diagonal().add_(shift := 10 * shift)  # only a preconditioner: it need not be exact
            factor, failed = torch.linalg.cholesky_ex(total)
        return factor

    def _targets(self, y: Columns) -> Float[Tensor, "n c"]:
        if self._rows_each > 1 and tuple(y.shape) == (self.samples, self._rows_each):
            y = y.reshape(-1)
        return super()._targets(y)

    @property
    def _on_parameters(self) -> bool:
        return self.features < self.shape[0]

    def _side_size(self) -> int:
        return min(self.features, self.shape[0])

    def _side_product(self) -> Multiply:
        return (lambda v: self.apply_transposed(self.apply(v))) if self._on_parameters else self.multiply

    def _form(self, columns: Tensor) -> float:
        return float(self.apply_transposed(columns).square().sum())


class _OutputRows(nn.Module):
    """A module whose output is shaped ``[n, outputs]``; of several outputs the one that counts."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        return output_rows(self.module(*arguments, **options), sample_count((arguments, options)))


class _CountBytes(TorchDispatchMode):
    """Counts the bytes of what operations in the block allocate; views, and what ``known`` tensors hold, take none."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.bytes, self._seen = 0, {tensor.untyped_storage().data_ptr() for tensor in known}
        self._alive: list[Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self._seen:
                self._seen.add(leaf.untyped_storage().data_ptr())
                self._alive.append(leaf)
                self.bytes += leaf.untyped_storage().nbytes()
        return found


def _width(columns: Tensor, group: slice) -> int:
    return len(range(*group.indices(columns.shape[1])))
