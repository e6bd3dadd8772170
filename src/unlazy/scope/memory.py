"""How much memory a scope may take, and how many samples fit into that at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unlazy.kernels.capture import Inputs, sample_count, take_samples
from unlazy.kernels.gram import USABLE, TooLittleMemory, free_memory, parse_memory
from unlazy.kernels.jacobian import elementary_layers

TOTAL_SHARE, FREE_SHARE = 0.1, 0.25  # of the card or the machine, and of what is free on it
TRAINING_SHARE = (
    1 / 3
)  # of what training itself takes, with copies of the parameters, but EARLY_BYTES with them in any case
OWN_COPIES = 2  # of the parameters: the start, and how far they moved
LEAST_BYTES = 2**25  # beside copies of the parameters
EARLY_BYTES = 2**28  # before a training step was seen: this much, or the size of the parameters if that is more
PROFILED_SAMPLES = 2


class MemoryLimit:
    """The bytes a scope may take beside copies of the parameters, read anew at every use: free memory shrinks.

    ``memory``: a number of bytes or a text such as ``"2GB"``; ``None``: at most 10 % of the card (or of the machine's memory),
    at most a quarter of what is free on it now, and with two copies of the parameters at most a third of what training itself
    takes, where that is known (:meth:`see_step`) and more than ``EARLY_BYTES``. As long as ``step_seen`` is false, nobody knows
    what training will take. Then it is at most the size of the parameters, which their gradients will take anyway, or
    ``EARLY_BYTES``.
    """

    def __init__(self, memory: str | int | None, model: nn.Module, x: Inputs, *, step_seen: bool = True) -> None:
        self.memory, self.step_seen = None if memory is None else parse_memory(memory), step_seen
        self.parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        self.early = max(EARLY_BYTES, self.parameters)
        self.training: int | None = None  # bytes that training itself takes, its parameters included
        self._before = (0, 0)
        self.profile(model, x)

    def begin(self) -> None:
        """The scope is made: what the process takes from now on, until it measures again, training takes."""
        self._before = _resident()

    def see_step(self) -> None:
        """A training step is done and nothing was measured since :meth:`begin`: find out what training takes."""
        self.step_seen = True
        if self.device.type == "cuda":
            found = torch.cuda.max_memory_allocated(self.device) - self.parameters  # less the copy that we keep
        elif self._before[0] and (now := _resident())[0]:
            highest = now[1] if now[1] > self._before[1] else now[0]  # a peak from before says nothing
            found = self.parameters + max(0, highest - self._before[0])
        else:
            return
        self.training = max(found, self.training or 0)

    def profile(self, model: nn.Module, x: Inputs) -> None:
        """Run two samples and add up what every operation allocates: more than is ever held at once without gradients."""
        self.device = next(model.parameters()).device
        few = take_samples(x, slice(0, PROFILED_SAMPLES))
        counter, began = _AllocationCounter(), time.process_time()
        try:
            with torch.no_grad(), elementary_layers(model), counter:
                _ = (
                    model(**few)
                    if isinstance(few, Mapping)
                    else model(*few)
                    if isinstance(few, tuple | list)
                    else model(few)
                )
        except Exception:  # whatever a stranger's model raises, it raises again where somebody explains it
            counter.bytes = 0
        self.sample_bytes = counter.bytes // sample_count(few)
        self.sample_seconds = (time.process_time() - began) / sample_count(few)  # at most: it was the first call

    def allowed(self) -> int:
        """Bytes that may be taken now."""
        return min(self._usual(), self.early) if self.is_early else self._usual()

    @property
    def is_early(self) -> bool:
        """Whether less is allowed than after the first training step."""
        return self.memory is None and not self.step_seen and self.early < self._usual()

    def _usual(self) -> int:
        """Bytes that may be taken once a training step was seen."""
        if self.memory is not None:
            return self.memory
        if self.device.type == "cuda":  # what training holds or keeps for its next step is not free
            free, total = torch.cuda.mem_get_info(self.device)
        else:
            free, total = free_memory(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        shares = [TOTAL_SHARE * total, FREE_SHARE * free]
        if self.training is not None:
            whole = max(EARLY_BYTES, TRAINING_SHARE * self.training)
            shares.append(max(LEAST_BYTES, whole - OWN_COPIES * self.parameters))
        return int(min(shares))

    def rows(self, copies: float = 1.0) -> int:
        """How many samples may pass the model at a time, where each holds ``copies`` of what one forward pass allocates."""
        return max(1, int(USABLE * self.allowed() / max(1.0, copies * self.sample_bytes)))


def _resident() -> tuple[int, int]:
    """Bytes of memory that this process takes now, and the most it ever took; zeros where the system does not say."""
    try:
        with Path("/proc/self/status").open() as file:
            found = dict(line.split(":", 1) for line in file if line.startswith(("VmRSS", "VmHWM")))
        return int(found["VmRSS"].split()[0]) * 1024, int(found["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0, 0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice: planned too small, or refused by the card or the machine."""
    kinds = (TooLittleMemory, MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and "not enough memory" in str(error))


@contextmanager
def private_pool(device: torch.device) -> Iterator[None]:
    """On a graphics card, allocate from a pool of our own in the block and give it back: training's own pool does not grow.

    Backward passes run in this thread, because a pool serves one thread only. Elsewhere the block does nothing.
    """
    if device.type != "cuda" or not hasattr(torch.cuda, "use_mem_pool"):
        yield
        return
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, device), torch.autograd.set_multithreading_enabled(False):
        yield


class _AllocationCounter(TorchDispatchMode):
    """Adds up the bytes of all tensors that operations return; views are free."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            made = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in made)
        return found
