"""A kernel that several workers of one process compute together: features are made once and shared, tiles are split.

Each worker is a thread with its own copy of the model (parameters are shared, not copied) on its own device. A part of the
samples is cut into as many pieces as there are workers. Every worker makes the features of its piece; a tile is then the blocks
of all pairs of pieces, shared out among the workers. So no feature is made twice, whatever the number of workers.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unlazy import runtime
from unlazy.kernels.capture import Inputs, sample_count, take_samples
from unlazy.kernels.gram import Kernel, parse_memory, ready_context
from unlazy.kernels.tangent_engine import TangentKernel, matmul_precision
from unlazy.runtime import InputError, Unsupported, require

WORTH_SECONDS = 0.5  # of one core: below this a copy of the model and its checks take more than a second worker saves
BYTES_A_SECOND, PRODUCTS_A_SECOND = 1e9, 5e10  # of one core, roughly: activations while features are made, and pairs
Devices = Sequence[str | torch.device] | None
Features = list[Any]  # of a part: those of its pieces, one for each worker


class SplitKernel:
    """A kernel for the Gram engine (:class:`~unlazy.kernels.gram.Kernel`) whose work is split among copies of it."""

    def __init__(self, workers: Sequence[Kernel]) -> None:
        first = workers[0]
        self.workers = list(workers)
        self.tail, self.dtype, self.device = first.tail, first.dtype, first.device
        self.feature_bytes = first.feature_bytes
        on_one_device = {worker.device for worker in workers} == {first.device}
        costs = [worker.work_bytes for worker in workers]
        self.work_bytes = sum(costs) if on_one_device else max(costs)
        self.best_tile = len(workers) * first.best_tile  # a worker's blocks are then as large as without the others
        names = ", ".join(str(worker.device) for worker in workers)
        self.methods = (*first.methods, f"workers: {len(workers)} ({names}), each makes its share of the features")
        self._any_worker = on_one_device
        self._pool: ThreadPoolExecutor | None = None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Context in which features are made and blocks are filled, by threads with one torch thread each."""
        on_cpu = self.device.type == "cpu"
        with ExitStack() as stack:
            for worker in self.workers:  # by this thread: what it sets and restores belongs to the whole process
                stack.enter_context(ready_context(worker))
            stack.enter_context(matmul_precision(any(getattr(worker, "rough", False) for worker in self.workers)))
            if on_cpu:
                stack.enter_context(runtime.threads(1))
            self._pool = stack.enter_context(ThreadPoolExecutor(len(self.workers), "unlazy-kernel"))
            try:
                yield
            finally:
                self._pool = None

    def features(self, x: Inputs) -> Features:
        """Features of every piece, made by the worker of its number."""
        n, count = sample_count(x), len(self.workers)
        cuts = [n * number // count for number in range(count + 1)]

        def make(number: int) -> Any:
            worker = self.workers[number]
            piece = take_samples(x, slice(cuts[number], cuts[number + 1]))
            return worker.features(_move_tensors(piece, worker.device))

        return self._run([partial(make, number) for number in range(count) if cuts[number] < cuts[number + 1]])

    def block(self, out: Tensor, a: Features, b: Features, *, same: bool) -> None:
        """Fill ``out`` with the blocks of all pairs of pieces; ``same``: both are one set, and pairs are computed once."""
        rows, columns = (_piece_slices(side, len(self.workers)) for side in out.shape[-2:])
        pairs = [(i, j) for i in range(len(a)) for j in range(i if same else 0, len(b))]
        pairs.sort(key=lambda pair: same and pair[0] == pair[1])  # the halves on the diagonal last: all end together
        queues = self._queues(pairs, same=same)

        def fill(worker: Kernel, queue: deque[tuple[int, int]]) -> None:
            while True:
                try:
                    i, j = queue.popleft()
                except IndexError:
                    return
                left = _move_features(a[i], worker.device)
                right = left if same and i == j else _move_features(b[j], worker.device)
                target = out[..., rows[i], columns[j]]
                made = target
                if worker.device != out.device:
                    made = torch.empty(target.shape, dtype=self.dtype, device=worker.device)
                worker.block(made, left, right, same=same and i == j)
                if made is not target:
                    target.copy_(made)
                if same and i != j:
                    out[..., columns[j], rows[i]] = target.mT if not self.tail else target.transpose(0, 1).mT

        self._run([partial(fill, worker, queue) for worker, queue in zip(self.workers, queues, strict=True)])

    def _queues(self, pairs: Sequence[tuple[int, int]], *, same: bool) -> list[deque[tuple[int, int]]]:
        """For every worker the pairs of pieces that it takes: any on one device, else those of which it has a piece."""
        if self._any_worker:
            return [deque(pairs)] * len(self.workers)
        owners = [j if same and (i + j) % 2 == 0 else i for i, j in pairs]
        return [
            deque(pair for pair, owner in zip(pairs, owners, strict=True) if owner == number)
            for number in range(len(self.workers))
        ]

    def _run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of all calls; all have ended when the error of one is raised."""
        assert self._pool is not None, "work is split inside ready()"
        futures = [self._pool.submit(call) for call in calls]
        wait(futures)
        return [future.result() for future in futures]


def _piece_slices(length: int, count: int) -> list[slice]:
    """Where the pieces of a part lie, without empty ones."""
    cuts = [length * number // count for number in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(cuts) if start < stop]


def _move_tensors(x: Inputs, device: torch.device) -> Inputs:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, x)


def _move_features(shares: Any, device: torch.device) -> Any:
    """Features on another device; the features themselves if they lie there. Only shares of tangent kernels move."""
    tensors = [tensor for share in shares for tensor in share.tensors()] if isinstance(shares, list) else []
    if all(tensor.device == device for tensor in tensors):
        return shares
    return [share.with_tensors([tensor.to(device) for tensor in share.tensors()]) for share in shares]


# --- who works ---------------------------------------------------------------------------------------------


def split_kernel(
    make: Callable[[nn.Module, Inputs, Inputs | None, str | int | None], Kernel],
    model: nn.Module,
    x: Inputs,
    x2: Inputs | None,
    memory: str | int | None,
    devices: Devices,
) -> Kernel:
    """The kernel that ``make(model, x, x2, memory)`` makes, or one of several workers, each with a copy of the model.

    ``devices``: one for each worker, such as ``["cuda:0", "cuda:1"]`` or ``["cpu", "cpu"]``. ``None``: as many workers as torch
    has threads, where the model is on the CPU, has no hooks, and the matrix takes long enough.
    """
    first = make(model, x, x2, memory)
    if devices is None:
        wanted = [first.device] * torch.get_num_threads()
        if len(wanted) == 1 or not _may_split(first, x, x2):
            return first
    else:
        wanted = [torch.device(device) for device in devices]
        require(len(wanted) >= 1, "devices names at least one device, such as ['cpu', 'cpu'].")
        if wanted == [first.device]:
            return first
    share = parse_memory(memory, first.device) // len(wanted)
    try:
        return SplitKernel(
            [make(_copy_model(model, to), _move_tensors(x, to), _move_tensors(x2, to), share) for to in wanted]
        )
    except (InputError, Unsupported):
        if devices is not None:
            raise
    except Exception as error:  # whatever the user's own classes raise when they are copied
        if devices is not None:
            raise InputError(
                f"the model cannot be copied for {len(wanted)} workers ({error}); give one device."
            ) from error
    return first


def _may_split(kernel: Kernel, x: Inputs, x2: Inputs | None) -> bool:
    """Whether threads see the same function as this thread, and save more time than they cost."""
    if not isinstance(kernel, TangentKernel) or kernel.device.type != "cpu" or kernel.rough:
        return False
    rows, columns = sample_count(x), 0 if x2 is None else sample_count(x2)
    pairs = rows * rows / 2 if x2 is None else rows * columns
    seconds = (rows + columns) * kernel.work / BYTES_A_SECOND + pairs * kernel.feature_bytes / 4 / PRODUCTS_A_SECOND
    hooked = any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        for module in kernel.model.modules()
    )
    modes = torch.is_autocast_enabled("cpu") or torch._C._len_torch_function_stack() > 0
    return seconds > WORTH_SECONDS and not hooked and not modes


def _copy_model(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of the model whose parameters share their memory with the model's, where the device is the same."""
    known = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, known).to(device)
