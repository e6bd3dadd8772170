"""Gram matrices of zeros and ones: how many places two rows have in common, exactly, by products of 8-bit integers.

A boolean takes one byte and is already the 8-bit integer 0 or 1, so the fast integer product reads gates as they are held.
Many short rows side by side (the channels at every position of an image) are packed into words instead: an "and", then a
count of bits. Where neither is fast, tiles are made into float32 on the way: 0 and 1 are exact in any precision, and sums
of up to 2^24 ones are exact in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int32, Shaped, UInt8
from torch import Tensor

from unlazy.kernels.tiling import cut_tiles
from unlazy.runtime import require

TILE = 512  # rows of a tile: the counts of one tile stay in the cache
MOST = 2**24  # places that float32 can count
SHORT = 16  # places below which the integer product gains nothing (and torch 2.13's returns rubbish for a single one)


def binary_gram(a: Bool[Tensor, "n k"], b: Bool[Tensor, "m k"] | None = None) -> Int32[Tensor, "n m"]:
    """How many places are true in both rows, for every pair of rows; ``b=None``: of ``a`` with itself, each pair once."""
    require(a.shape[1] <= MOST, f"rows of {a.shape[1]} places are longer than the {MOST} that are counted exactly.")
    other = a if b is None else b
    counts = torch.empty(len(a), len(other), dtype=torch.int32, device=a.device)
    for rows, columns in cut_tiles(len(a), len(other), TILE, TILE, symmetric=b is None):
        counts[rows, columns] = _common_counts(a[rows], other[columns])
        if b is None and columns != rows:
            counts[columns, rows] = counts[rows, columns].T
    return counts


@dataclass(frozen=True)
class Bits:
    """Zeros and ones ``[*p, n, k]``: n rows of k places for every leading index, stored in the form that is counted fastest.

    ``held``: ``[*p, words, n]`` integers of ``k`` bits together where rows are packed, else the booleans themselves.
    """

    held: Tensor
    places: int
    packed: bool

    @staticmethod
    def from_rows(rows: Bool[Tensor, "*p n k"]) -> Bits:
        """Pack booleans, or hold them as they are."""
        places = rows.shape[-1]
        require(places <= MOST, f"rows of {places} places are longer than the {MOST} that are counted exactly.")
        if not Bits.should_pack(places, rows.ndim > 2, rows.device.type):
            return Bits(rows.contiguous(), places, packed=False)
        size, word = (4, torch.int32) if places <= 32 else (8, torch.int64)
        filled = np.packbits(F.pad(rows, (0, -places % (8 * size))).numpy(), axis=-1)
        return Bits(torch.from_numpy(filled).view(word).mT.contiguous(), places, packed=True)

    @staticmethod
    def should_pack(places: int, many: bool, device: str) -> bool:
        """Whether rows are packed: ``many`` short ones side by side, where bits can be counted."""
        return many and places > 1 and device == "cpu"

    @staticmethod
    def row_bytes(leading: int, places: int, many: bool, device: str) -> int:
        """Bytes of one row, for all leading indices together."""
        word = 4 if places <= 32 else 8
        return leading * (-(-places // (8 * word)) * word if Bits.should_pack(places, many, device) else places)

    @staticmethod
    def join(parts: Sequence[Bits]) -> Bits:
        """The rows of all parts, one after the other."""
        first = parts[0]
        held = torch.cat([part.held for part in parts], dim=-1 if first.packed else -2)
        return Bits(held, first.places, first.packed)

    def take_rows(self, rows: slice) -> Bits:
        """Some of the rows."""
        return Bits(self.held[..., rows] if self.packed else self.held[..., rows, :], self.places, self.packed)

    def count_common(self, other: Bits) -> Shaped[Tensor, "*p n m"]:
        """How many places two rows have in common: whole numbers of a type that holds them."""
        a, b = self.held, other.held
        if not self.packed:
            return _common_counts(a, b) if a.ndim == 2 else _common_counts_by_floats(a, b)
        total: Tensor | None = None
        for left, right in zip(a.unbind(-2), b.unbind(-2), strict=True):
            found = _bit_counts(left.unsqueeze(-1) & right.unsqueeze(-2))
            found = found if self.places < 256 else found.int()
            total = found if total is None else total.add_(found)
        assert total is not None
        return total

    def count_open(self) -> Int32[Tensor, "*p n 1"]:
        """How many places of each row are open."""
        if not self.packed:
            return self.held.sum(-1, keepdim=True, dtype=torch.int32)
        return _bit_counts(self.held).sum(-2, dtype=torch.int32).unsqueeze(-1)


def _bit_counts(words: Tensor) -> UInt8[Tensor, "..."]:
    """Ones in each word. (Of signed numbers numpy would count those of the absolute value.)"""
    unsigned = np.uint32 if words.dtype == torch.int32 else np.uint64
    return torch.from_numpy(np.bitwise_count(words.numpy().view(unsigned)))


def _common_counts(a: Bool[Tensor, "n k"], b: Bool[Tensor, "m k"]) -> Shaped[Tensor, "n m"]:
    """One tile, as int32 or float32, whichever the device is faster at."""
    if a.shape[1] < SHORT or not _has_fast_integers(a.device.type):
        return _common_counts_by_floats(a, b)
    if not a.is_cuda:
        return torch._int_mm(a.view(torch.int8), b.view(torch.int8).T)
    try:
        return _aligned_product(a, b)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # some shapes are "not supported" by the library that the integer product calls
        return _common_counts_by_floats(a, b)


def _common_counts_by_floats(a: Bool[Tensor, "*p n k"], b: Bool[Tensor, "*p m k"]) -> Shaped[Tensor, "*p n m"]:
    """By a float32 product; the hardware may use a shorter format, which is exact for zeros and ones."""
    if a.shape[-1] == 1:
        return a.float() * b.float().mT
    with _reduced_precision():
        return a.float() @ b.float().mT


@contextmanager
def _reduced_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@cache
def _has_fast_integers(device: str) -> bool:
    """Whether the device has fast and correct 8-bit products (elsewhere they are a plain loop, or missing)."""
    if device == "cpu":
        known = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    else:
        known = device == "cuda"
    if not known:
        return False
    ones = torch.ones(32, 64, dtype=torch.int8, device=device)
    try:
        return bool((torch._int_mm(ones, ones.T) == 64).all())
    except RuntimeError:
        return False


def _aligned_product(a: Bool[Tensor, "n k"], b: Bool[Tensor, "m k"]) -> Int32[Tensor, "n m"]:
    """CUDA's product wants more than 16 rows, and columns and places in multiples of 8: closed places fill up the rest."""
    n, m = len(a), len(b)
    missing = -a.shape[1] % 8
    left = a if n > 16 and not missing else F.pad(a, (0, missing, 0, max(0, 24 - n)))
    right = b if m % 8 == 0 and not missing else F.pad(b, (0, missing, 0, -m % 8))
    return torch._int_mm(left.view(torch.int8), right.view(torch.int8).T)[:n, :m]
