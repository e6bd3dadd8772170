"""One graphics card: the tangent kernel and the layer overlap of a convolutional net on all 50,000 CIFAR-10 training images.

Run where CUDA is: ``python benchmarks/device.py DATA_FOLDER [OUT.json] [n]``. Each kernel ends in one float32 array on the card.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unlazy import runtime
from unlazy.bench.workloads import convolutional
from unlazy.data.images import load_images
from unlazy.kernels.overlap import layer_overlap
from unlazy.kernels.reference import tangent_kernel as slow_tangent_kernel
from unlazy.kernels.tangent import plan_tangent, tangent_kernel

Row = dict[str, Any]


def seconds(function: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """One call, from an idle card to an idle card."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    made = function()
    torch.cuda.synchronize()
    return time.perf_counter() - start, made


def gemm_rate(dtype: torch.dtype, size: int = 8192) -> float:
    """Operations a second of a large matrix product."""
    a, b = torch.randn(2, size, size, device="cuda").to(dtype).unbind()
    seconds(lambda: a @ b)
    return 2 * size**3 / min(seconds(lambda: a @ b)[0] for _ in range(3))


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "results/bench/device.json")
    n = int(sys.argv[3]) if len(sys.argv) > 3 else 50_000
    torch.manual_seed(0)
    model = convolutional()
    x = load_images("cifar-10", "train", folder).floats(standardise=True)[:n].cuda()
    few, exact_model = x[:24], convolutional().double()
    exact_model.load_state_dict(model.state_dict())
    exact = slow_tangent_kernel(exact_model, few.double().cpu()).diagonal(dim1=2, dim2=3).sum(-1)
    model = model.cuda()
    rates = {"float32": gemm_rate(torch.float32), "bfloat16": gemm_rate(torch.bfloat16)}
    seconds(lambda: tangent_kernel(model, x[:2000]))  # libraries are loaded, plans are made
    rows: list[Row] = []
    parameters = sum(p.numel() for p in model.parameters())
    for precision in (None, "bfloat16"):
        torch.cuda.reset_peak_memory_stats()
        print(plan_tangent(model, x), flush=True)
        took, kernel = seconds(partial(tangent_kernel, model, x, precision=precision))
        pairs = n * (n + 1) / 2 * 2 * 10 * parameters
        error = float((kernel[:24, :24].double().cpu() - exact).norm() / exact.norm())
        rows.append(
            {
                "what": "tangent kernel, trace",
                "products": precision or "float32",
                "n": n,
                "seconds": took,
                "gigabytes": torch.cuda.max_memory_allocated() / 1e9,
                "error": error,
                "pair_operations": pairs,
                "share_of_float32_rate": pairs / took / rates["float32"],
            }
        )
        print(rows[-1], flush=True)
        del kernel
        torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    took, kernel = seconds(lambda: layer_overlap(model, x, dtype=torch.float32))
    units = 5 * 26 * 32 * 32 + 64
    rows.append(
        {
            "what": "layer overlap",
            "n": n,
            "seconds": took,
            "gigabytes": torch.cuda.max_memory_allocated() / 1e9,
            "pair_operations": n * (n + 1) / 2 * 2 * units,
            "symmetric": bool((kernel[:999, :999] == kernel[:999, :999].T).all()),
            "share_of_bfloat16_rate": n * (n + 1) / 2 * 2 * units / took / rates["bfloat16"],
        }
    )
    print(rows[-1], flush=True)
    provenance = runtime.provenance("float32", torch.cuda.get_device_name())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"rows": rows, "gemm_rates": rates, "provenance": provenance}, indent=1) + "\n")


if __name__ == "__main__":
    main()
