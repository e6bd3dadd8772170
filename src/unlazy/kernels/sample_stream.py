"""Samples in a fixed order, read batch by batch and as often as needed, from data that need not fit into memory.

A tensor, a tuple of arguments or a mapping of keyword arguments, as ``tangent_kernel`` takes them; numpy arrays in their place,
also memory-mapped ones; a data set; a ``DataLoader`` without shuffling, or any other iterable of batches that can be read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, default_collate
from torch.utils.data import Dataset as TorchDataset

from unlazy.data.dataset import Dataset
from unlazy.kernels.capture import Inputs, check_inputs, sample_count, take_samples
from unlazy.runtime import InputError, require

READ_SAMPLES = 1024  # at once, while samples are counted and checked
PickInputs = Callable[[Any], Inputs]


@dataclass(frozen=True)
class SampleStream:
    """``length`` samples, read by ``parts(most)``: batches in order, as tensors on the CPU or where the data are.

    ``most`` is what a batch should have at most; a loader's batches keep their size.
    """

    length: int
    parts: Callable[[int], Iterator[Inputs]]

    def batches(self, most: int) -> Iterator[tuple[slice, Inputs]]:
        """Batches of at most ``most`` samples, each with its place among all samples."""
        start = 0
        for part in self.parts(most):
            size = sample_count(part)
            for cut in range(0, size, most):
                piece = take_samples(part, slice(cut, cut + most))
                yield slice(start + cut, start + min(cut + most, size)), piece
            start += size
        require(start == self.length, f"the data had {self.length} samples when first read and {start} now.")

    def take(self, wanted: Tensor) -> Inputs:
        """The samples with these numbers, ascending, as one batch."""
        found = []
        for place, part in self.batches(READ_SAMPLES):
            own = wanted[(wanted >= place.start) & (wanted < place.stop)] - place.start
            if len(own):
                found.append(pytree.tree_map(lambda leaf, own=own: leaf[own.to(leaf.device)], part))
        return pytree.tree_map(lambda *leaves: torch.cat(leaves), *found)


def open_stream(data: Any, pick: PickInputs | None = None) -> SampleStream:
    """A stream over ``data``, read once to count the samples. Raises ``InputError`` for NaN, or data that change.

    ``pick``: takes the model's inputs out of a batch of a data set, a loader or an iterable. By default a tensor or a mapping
    counts as it is; of a pair such as (inputs, labels) the first one.
    """
    if isinstance(data, SampleStream):
        return data
    if isinstance(data, Dataset):
        return open_stream(data.x)
    if _is_array_tree(data):
        return _from_arrays(data)
    pick = pick or _first_entry
    if isinstance(data, TorchDataset) and not isinstance(data, IterableDataset):
        return _from_dataset(data, pick)
    return _from_batches(data, pick)


def _is_array_tree(data: Any) -> bool:
    leaves = pytree.tree_leaves(data)
    containers = not isinstance(data, list)  # a list is a list of batches, a tuple holds arguments
    return containers and bool(leaves) and all(isinstance(leaf, Tensor | np.ndarray) for leaf in leaves)


def _from_arrays(data: Any) -> SampleStream:
    lengths = {len(leaf) if leaf.ndim else 0 for leaf in pytree.tree_leaves(data)}
    require(len(lengths) == 1, f"inputs must have equal first axes, got lengths {sorted(lengths)}.")
    (length,) = lengths

    def parts(most: int) -> Iterator[Inputs]:
        for start in range(0, length, most):
            yield pytree.tree_map(lambda leaf, start=start: _as_tensor(leaf[start : start + most]), data)

    return _checked(SampleStream(length, parts))


def _as_tensor(part: Tensor | np.ndarray) -> Tensor:
    """A copy of a part of an array: a memory-mapped file may be read-only, and torch warns of such arrays."""
    return part if isinstance(part, Tensor) else torch.from_numpy(np.array(part))


def _from_dataset(data: Any, pick: PickInputs) -> SampleStream:
    require(hasattr(data, "__len__"), f"{type(data).__name__} has no length; give a DataLoader of it.")
    length = len(data)

    def parts(most: int) -> Iterator[Inputs]:
        for start in range(0, length, most):
            rows = range(start, min(start + most, length))
            yield pick(default_collate([data[i] for i in rows]))

    return _same_every_time(parts, READ_SAMPLES)


def _from_batches(data: Any, pick: PickInputs) -> SampleStream:
    if isinstance(data, DataLoader):
        require(
            not isinstance(data.sampler, RandomSampler),
            "the loader shuffles, so that rows would differ from pass to pass; give a DataLoader with shuffle=False.",
        )
    if not isinstance(data, Iterable):
        raise InputError(
            "data must be a tensor, arrays, a data set, a DataLoader or an iterable of batches; "
            f"got {type(data).__name__}."
        )
    require(
        iter(data) is not data if not isinstance(data, DataLoader) else True,
        f"{type(data).__name__} can be read once only, and every product reads the data twice; give a list of batches, "
        "a DataLoader, or an object whose __iter__ starts again.",
    )

    def parts(most: int) -> Iterator[Inputs]:
        with torch.random.fork_rng(devices=[]):  # a DataLoader draws a seed for its workers from torch's own stream
            batches = iter(data)
        for batch in batches:
            yield pytree.tree_map(lambda leaf: _as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, pick(batch))

    return _same_every_time(parts, 0)


def _first_entry(batch: Any) -> Inputs:
    return batch[0] if isinstance(batch, tuple | list) else batch


def _same_every_time(parts: Callable[[int], Iterator[Inputs]], size: int) -> SampleStream:
    """A stream that compares each batch with the first reading, by sums: shuffling and augmentation would go unnoticed.

    ``size``: batches of that many samples are read; 0 if the source has its own batches.
    """
    marks: list[tuple[Any, ...]] = []

    def compared(most: int) -> Iterator[Inputs]:
        for number, part in enumerate(parts(size or most)):
            require(
                number < len(marks) and _mark(part) == marks[number],
                f"batch {number} is not what it was when the data were first read: they are shuffled or augmented at "
                "random. Fix their order and their numbers.",
            )
            yield part

    length = 0
    for part in parts(size or READ_SAMPLES):
        check_inputs(part)
        marks.append(_mark(part))
        length += sample_count(part)
    require(length > 0, "there are no samples.")
    return SampleStream(length, compared)


def _mark(part: Inputs) -> tuple[Any, ...]:
    """Shape and a sum of every tensor. Samples count with their number in the batch, so that their order matters."""
    leaves = [leaf for leaf in pytree.tree_leaves(part) if isinstance(leaf, Tensor)]
    sums = [leaf.double().reshape(len(leaf), -1).sum(1) for leaf in leaves]
    numbers = [torch.arange(1, 1 + len(each), dtype=torch.float64, device=each.device) for each in sums]
    return tuple(
        (tuple(leaf.shape), float(each @ number)) for leaf, each, number in zip(leaves, sums, numbers, strict=True)
    )


def _checked(stream: SampleStream) -> SampleStream:
    require(stream.length > 0, "there are no samples.")
    for part in stream.parts(READ_SAMPLES):
        check_inputs(part)
    return stream
