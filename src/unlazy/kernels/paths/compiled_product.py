"""Products over layers of common open units, by counting bits in compiled code: for numba, where it is installed.

A pair of inputs costs an "and" and a count of bits for every 64 units, and nothing is written but the product. Without numba,
or where there are too few pairs to be worth compiling for, the kernel is that of ``pairs``, with the same numbers.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unlazy.kernels.capture import Inputs, sample_count, take_samples
from unlazy.kernels.paths.count import Program
from unlazy.kernels.paths.overlap_engine import MORE_THAN_HELD, OverlapKernel
from unlazy.runtime import InputError

WORD = 64
WORTH = 2**24  # words of pairs below which compiling would take longer than counting
HEIGHT, WIDTH = 64, 256  # inputs a side of a block: its products and the bits of one layer stay in the cache

Fill = Callable[[Any, Any, Any, Any, bool], None]


def product_kernel(
    program: Program,
    opens: Callable[[Inputs], dict[int, Tensor]],
    pairs: int,
    *,
    log: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> OverlapKernel:
    """The kernel of a chain of dense layers without biases. Compiled code if ``pairs`` of inputs are worth compiling for."""
    words = sum(-(-program.shapes[index][0] // WORD) for index in program.graph.gates())
    plain = log or program.scaled or device.type != "cpu" or pairs * words < WORTH
    kind = OverlapKernel if plain or compile_fill() is None else CompiledProduct
    return kind(program, opens, log=log, dtype=dtype, device=device)


class CompiledProduct(OverlapKernel):
    """Features are the open units of all layers, 64 to a word ``[n, words]``."""

    def __init__(self, program: Program, opens: Callable[[Inputs], dict[int, Tensor]], **options: Any) -> None:
        super().__init__(program, opens, **options)
        self.gates = program.graph.gates()
        self.words = np.array([-(-program.shapes[index][0] // WORD) for index in self.gates], dtype=np.int64)
        self.feature_bytes = 2 * 8 * int(self.words.sum())  # by rows and by columns
        self.methods = (*self.methods, "bits counted by compiled code")

    def features(self, x: Inputs) -> Any:
        """Open units of all layers as 64-bit words, ``[n, words]``."""
        rows = []
        for start in range(0, sample_count(x), self.chunk):
            found = self.opens(take_samples(x, slice(start, start + self.chunk)))
            rows.append(np.concatenate([_pack_words(found[index]) for index in self.gates], axis=1))
        return np.concatenate(rows)

    def block(self, out: Tensor, a: Any, b: Any, *, same: bool) -> None:
        """Fill ``out`` with products over layers of the number of units open on both."""
        fill = compile_fill()
        assert fill is not None
        fill(out.numpy(), a, np.ascontiguousarray(b.T), self.words, same)
        if self.may_overflow and not bool(out.isfinite().all()):
            raise InputError(MORE_THAN_HELD)


def _pack_words(rows: Tensor) -> Any:
    """``[n, units]`` as 64-bit words; what is missing in the last one is closed."""
    filled = np.packbits(F.pad(rows, (0, -rows.shape[1] % WORD)).numpy(), axis=-1)
    return filled.view(np.uint64)


@cache
def compile_fill() -> Fill | None:
    """The compiled function ``fill(out, rows, columns, words, same)``, or ``None`` without numba."""
    try:
        numba = importlib.import_module("numba")
    except ImportError:
        return None
    words = numba.types.uint64

    def native(function: Any) -> Any:
        """Compiled as it is written, without checks of types that may be wrapped around it."""
        return numba.njit(nogil=True)(inspect.unwrap(function))

    def ones(_: Any, word: Any) -> Any:
        """How many bits of a word are set: one instruction of the machine."""

        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.ctpop(arguments[0])

        return words(words), build

    bits = importlib.import_module("numba.extending").intrinsic(ones)

    @native
    def count(counts, rows, columns, i, first, last, left, right):  # type: ignore[no-untyped-def]
        """counts[j] = ones that row i and column left + j have in common in the words of one layer, two words at a time."""
        here, width = counts[: right - left], right - left
        here[:] = np.uint64(0)
        for word in range(first, last - 1, 2):
            mine, others = rows[i, word], columns[word, left:right]
            mine_too, others_too = rows[i, word + 1], columns[word + 1, left:right]
            for j in range(width):
                here[j] += bits(mine & others[j]) + bits(mine_too & others_too[j])
        if (last - first) % 2:
            mine, others = rows[i, last - 1], columns[last - 1, left:right]
            for j in range(width):
                here[j] += bits(mine & others[j])

    @native
    def fill(out, rows, columns, words, same):  # type: ignore[no-untyped-def]
        n, m = out.shape
        products, counts = np.empty((HEIGHT, WIDTH), np.float64), np.empty(WIDTH, np.uint64)
        for left in range(0, m, WIDTH):
            right = min(left + WIDTH, m)
            for top in range(0, min(n, right) if same else n, HEIGHT):
                bottom = min(top + HEIGHT, n)
                products[:] = 1.0
                first = 0
                for layer in range(len(words)):
                    last = first + words[layer]
                    for i in range(top, bottom):
                        count(counts, rows, columns, i, first, last, left, right)
                        line = products[i - top]
                        for j in range(WIDTH):
                            line[j] *= counts[j]
                    first = last
                for i in range(bottom - top):
                    for j in range(right - left):
                        out[top + i, left + j] = products[i, j]
                if same:
                    for j in range(right - left):
                        for i in range(bottom - top):
                            out[left + j, top + i] = products[i, j]

    found, one = np.zeros((1, 1)), np.ones((1, 1), np.uint64)
    try:
        fill(found, one, one, np.array([1]), True)
    except numba.core.errors.NumbaError:
        return None
    return fill if found[0, 0] == 1 else None
