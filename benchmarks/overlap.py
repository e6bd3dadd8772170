"""Overlap kernels on one core: ours against one float32 product per layer, in one run.

product: five dense layers of 128 units, n=5000, gates at hand, result in float64 (exact) and in float32 (as the plain product
gives it); layer: five layers of 26 x 32 x 32 units, n=5000, the plain product on fewer samples, ratio at equal numbers; both in
plain torch and, where numba is installed, compiled;
paths: exact numbers of common paths of five 3x3 convolutions of 26 filters on 32 x 32 images, n=500, the peer doing the same
recursion pair by pair with torch's own convolution. "limit" = least counted operations (each pair once) over the best float32
product rate measured in the same run; 8-bit products go below it. Seconds are processor time of the one thread, so that other
work on the machine counts little.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from unlazy import runtime
from unlazy.bench.tables import save_row
from unlazy.bench.timing import best_seconds, gemm_rate
from unlazy.bench.workloads import convolutional
from unlazy.kernels.gate_calls import record
from unlazy.kernels.overlap import overlap_from_gates, overlap_kernel
from unlazy.kernels.paths import compiled_product

Row = dict[str, Any]


def coins(n: int, units: int, layers: int) -> list[Tensor]:
    """Gates that are open half of the time."""
    random = torch.Generator().manual_seed(0)
    return [torch.randint(0, 2, (n, units), generator=random, dtype=torch.uint8).bool() for _ in range(layers)]


def plain_products(gates: Sequence[Tensor]) -> Tensor:
    """The peer: one full float32 product per layer."""
    product: Tensor | None = None
    for layer in gates:
        numbers = layer.float()
        common = numbers @ numbers.T
        product = common if product is None else product.mul_(common)
    assert product is not None
    return product


def plain_recursion(gates: Sequence[Tensor]) -> Tensor:
    """The peer: sum of S over the 3x3 window of every position times the channels open on both, row by row of pairs."""
    window, n = torch.ones(1, 1, 3, 3, dtype=torch.float64), len(gates[0])
    rows = []
    for i in range(n):
        state = torch.ones(n, 1, 32, 32, dtype=torch.float64)
        for index, layer in enumerate(gates[:-1]):
            state = state if index == 0 else F.conv2d(state, window, padding=1)
            state = state * (layer[i] & layer).sum(1, keepdim=True)
        rows.append(state.sum((1, 2, 3)) * (gates[-1][i] & gates[-1]).sum(1))
    return torch.stack(rows)


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(row: Row, ours: Callable[[], Any], operations: float, rate: float, patience: float) -> Row:
    before = peak_megabytes()
    row["seconds"] = best_seconds(ours, patience)
    row["megabytes"] = peak_megabytes() - before
    row |= {"operations": operations, "gemm_rate": rate, "limit_seconds": operations / rate}
    return row | {"times_limit": row["seconds"] / row["limit_seconds"]}


def compared(row: Row, n: int, ours: Callable[[], Any], peer: Callable[[], Any], patience: float) -> Row:
    """Both on ``n`` samples."""
    row |= {"peer_n": n, "peer_seconds": best_seconds(peer, patience), "ours_at_peer_n": best_seconds(ours, patience)}
    return row | {"times_faster": row["peer_seconds"] / row["ours_at_peer_n"]}


def gram_operations(n: int, units: int) -> float:
    return n * (n + 1) / 2 * 2 * units


def product_row(dtype: torch.dtype, rate: float, *, with_numba: bool = False) -> Row:
    n, gates = 5000, coins(5000, 128, 5)
    ours = partial(overlap_from_gates, gates, gates, dtype=dtype)
    name = f"product {dtype}{' compiled' * with_numba}".replace("torch.", "")
    row: Row = {"workload": name, "n": n, "peer": "float32 products"}
    row = timed(row, ours, gram_operations(n, 5 * 128), rate, 2.0)
    row = compared(row, n, ours, partial(plain_products, gates), 2.0)
    return row | {"error": error_of(ours()[:40], gates)}


def layer_row(rate: float, *, with_numba: bool = False) -> Row:
    n, few, units = 5000, 2000, 26 * 32 * 32
    gates = coins(n, units, 5)
    some = [layer[:few] for layer in gates]
    ours = partial(overlap_from_gates, some, some)
    row: Row = {"workload": f"layer{' compiled' * with_numba}", "n": n, "peer": "float32 products"}
    row = timed(row, partial(overlap_from_gates, gates, gates), gram_operations(n, 5 * units), rate, 0.0)
    row = compared(row, few, ours, partial(plain_products, some), 5.0)
    return row | {"error": error_of(ours()[:40], some)}


def error_of(kernel: Tensor, gates: Sequence[Tensor]) -> float:
    """Largest error of the first rows, relative to the largest number, against whole numbers."""
    whole = torch.ones_like(kernel, dtype=torch.float64)
    for layer in gates:
        whole *= layer[: len(kernel)].double() @ layer.double().T
    return float((kernel.double() - whole).abs().max() / whole.max())


def paths_row(rate: float) -> Row:
    n, few = 500, 60
    torch.manual_seed(0)
    model, x = convolutional(), torch.randn(500, 3, 32, 32)
    ours, peer = partial(overlap_kernel, model, x[:few]), partial(_recursion_of, model, x[:few])
    pairs, positions = n * (n + 1) / 2, 32 * 32
    per_pair = 5 * positions * 2 * 26 + 4 * positions * 9 + 2 * 64  # open channels, windows of nine, the dense layer
    row: Row = {"workload": "paths", "n": n, "peer": "torch's convolution, row by row"}
    row = timed(row, partial(overlap_kernel, model, x), pairs * per_pair, rate, 3.0)
    row = compared(row, few, ours, peer, 1.0)
    return row | {"error": float((ours() - peer()).abs().max() / peer().max())}


def _recursion_of(model: torch.nn.Module, x: Tensor) -> Tensor:
    return plain_recursion([call.open for call in record(model, x)])


ROWS: dict[str, Callable[[float], Row]] = {
    "product-float64": partial(product_row, torch.float64),
    "product-float32": partial(product_row, torch.float32),
    "layer": layer_row,
    "paths": paths_row,
}
COMPILED: dict[str, Callable[[float], Row]] = {
    "product-float64-compiled": partial(product_row, torch.float64, with_numba=True),
    "product-float32-compiled": partial(product_row, torch.float32, with_numba=True),
    "layer-compiled": partial(layer_row, with_numba=True),
}


@contextmanager
def plain_torch() -> Iterator[None]:
    """As if numba were not there."""
    with mock.patch.object(compiled_product, "compile_fill", return_value=None):
        yield


def main() -> None:
    """All rows, or those named (``overlap.py layer paths``; others stay); each in its own process, for its own peak memory."""
    if sys.argv[1:2] == ["--row"]:
        with runtime.threads(1), nullcontext() if sys.argv[2] in COMPILED else plain_torch():
            print(json.dumps((ROWS | COMPILED)[sys.argv[2]](gemm_rate())))
        return
    with runtime.threads(1):
        provenance = runtime.provenance("float64")
    installed = compiled_product.compile_fill() is not None
    if not installed:
        print("numba: not installed, so no rows of compiled code")
    for entry in sys.argv[1:] or (ROWS | COMPILED if installed else ROWS):
        command = [sys.executable, __file__, "--row", entry]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        print(
            f"{row['workload']:24} n={row['n']} {row['seconds']:8.3f} s {row['megabytes']:6.0f} MB  error {row['error']:.0e}  "
            f"{row['times_limit']:4.2f} x limit  {row['times_faster']:6.1f} x {row['peer']} (n={row['peer_n']})",
            flush=True,
        )
        save_row(Path("results/bench/overlap.json"), row, provenance, ("workload",))


if __name__ == "__main__":
    main()
