"""Tangent kernels that never exist as a matrix, on one core: ridge regression, eigenvalues and traces beyond a matrix's size.

Data: the 1,437 training digits (8 x 8 pixels), repeated with random shifts of one pixel and noise, memory-mapped. Networks have
two hidden layers and their initial weights. Every case runs in a process of its own, so that peak memory and processor time are
its own. References are dense and in float64. Results go to results/bench/operator.json.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from unlazy import runtime
from unlazy.bench.tables import save_row
from unlazy.data.images import load_images
from unlazy.kernels.jacobian import ModuleJacobian
from unlazy.kernels.operator import tangent_operator
from unlazy.kernels.regression import kernel_regression
from unlazy.kernels.tangent import tangent_kernel

RESULTS = Path("results/bench/operator.json")
Row = dict[str, Any]


def network(width: int, seed: int = 0) -> nn.Module:
    """64 inputs, two hidden layers, 10 outputs."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def digits(n: int, folder: Path, seed: int = 0) -> tuple[np.ndarray, Tensor]:
    """``n`` training digits, each shifted by up to one pixel and with noise: a memory-mapped file and one-hot targets."""
    images = load_images("digits", "train")
    pixels, labels = images.pixels.float().reshape(-1, 8, 8), images.labels
    random = torch.Generator().manual_seed(seed)
    file = np.lib.format.open_memmap(folder / f"digits-{n}-{seed}.npy", "w+", np.float32, (n, 64))
    classes = []
    for start in range(0, n, 10_000):
        size = min(10_000, n - start)
        picked = torch.randint(len(pixels), (size,), generator=random)
        down, right = torch.randint(-1, 2, (2, size), generator=random)
        rows = (torch.arange(8) + down[:, None]) % 8
        columns = (torch.arange(8) + right[:, None]) % 8
        moved = pixels[picked[:, None, None], rows[:, :, None], columns[:, None, :]]
        moved = moved / pixels.std() + 0.3 * torch.randn(moved.shape, generator=random)
        file[start : start + size] = moved.reshape(size, 64).numpy()
        classes.append(labels[picked])
    file.flush()
    return np.load(folder / f"digits-{n}-{seed}.npy", mmap_mode="r"), one_hot(torch.cat(classes).long(), 10).double()


def held_out() -> tuple[Tensor, Tensor]:
    """The 360 test digits as they are, and their classes."""
    train, test = load_images("digits", "train"), load_images("digits", "test")
    return test.pixels.float().reshape(-1, 64) / train.pixels.float().std(), test.labels


def seconds_of(compute: Callable[[], Any]) -> tuple[Any, float]:
    """What ``compute()`` returns, and its processor time."""
    started = time.process_time()
    return compute(), time.process_time() - started


def large_ridge(folder: Path) -> Row:
    """Kernel ridge on 100,000 points with all outputs: a kernel of a million rows, in 4 GB."""
    x, y = digits(100_000, folder)
    net = network(64)
    new, classes = held_out()
    kernel = tangent_operator(net, x, outputs="full", memory="3GB")
    fit, seconds = seconds_of(lambda: kernel.fit_ridge(y, 1e-4, tolerance=1e-4))
    _, product = seconds_of(lambda: kernel @ torch.ones(kernel.shape[0]))
    correct = float((fit.predict(new).argmax(1) == classes).double().mean())
    return {
        "n": len(x), "rows": kernel.shape[0], "p": kernel.features, "seconds": seconds, "iterations": fit.iterations,
        "relative_residual": float(fit.residual.max()), "preconditioner": fit.preconditioner, "ridge": 1e-4,
        "test_accuracy": correct, "seconds_a_product": product,
    }  # fmt: skip


def wide_ridge(folder: Path) -> Row:
    """More parameters than points: ridge regression for samples with a Nyström sketch, against the dense solution."""
    x, y = digits(3000, folder)
    return _compared_ridge(network(512), x, y, digits(10_000, folder, seed=1)[0], ridge=1e-4, rank=128)


def checked_ridge(folder: Path) -> Row:
    """Fewer parameters than points, 5,000 of them: predictions on 10,000 others against the dense solution."""
    x, y = digits(5000, folder)
    return _compared_ridge(network(32), x, y, digits(10_000, folder, seed=1)[0], ridge=1e-4, rank=None)


def _compared_ridge(net: nn.Module, x: np.ndarray, y: Tensor, new: np.ndarray, ridge: float, rank: int | None) -> Row:
    kernel = tangent_operator(net, x, outputs=0, memory="1GB")
    fit, seconds = seconds_of(lambda: kernel.fit_ridge(y, ridge, tolerance=1e-6, rank=rank))
    found = fit.predict(new)
    exact = tangent_operator(net, x, outputs=0, memory="1GB", precision="float64").fit_ridge(
        y, ridge, tolerance=1e-9, rank=rank
    )
    again = exact.predict(new)
    wide, points, others = (
        net.double(),
        torch.from_numpy(np.array(x)).double(),
        torch.from_numpy(np.array(new)).double(),
    )
    cross = tangent_kernel(wide, others, points, outputs=0)
    wanted = kernel_regression(tangent_kernel(wide, points, outputs=0), y, cross, ridge)
    size = float(wanted.abs().max())
    return {
        "n": len(x), "p": kernel.features, "columns": y.shape[1], "seconds": seconds, "iterations": fit.iterations,
        "relative_residual": float(fit.residual.max()), "preconditioner": fit.preconditioner, "ridge": ridge,
        "prediction_error_float32": float((found - wanted).abs().max()) / size,
        "prediction_error_float64": float((again - wanted).abs().max()) / size,
    }  # fmt: skip


def eigenvalues(folder: Path) -> Row:
    """The 50 largest eigenvalues of 20,000 points, in float64, against all eigenvalues of the dense J^T J."""
    x, _ = digits(20_000, folder)
    net = network(64).double()
    kernel = tangent_operator(net, x, outputs=0, memory="1GB")
    found, seconds = seconds_of(lambda: kernel.top_eigenpairs(50))
    total = torch.zeros(kernel.features, kernel.features, dtype=torch.float64)
    jacobian = ModuleJacobian(net, [name for name, _ in net.named_parameters()])
    first = torch.eye(10, dtype=torch.float64)[:1]
    for part in np.array_split(np.array(x), 40):
        for _, rows in jacobian.rows(torch.from_numpy(part).double(), first):
            total.addmm_(rows[:, 0].T, rows[:, 0])
    wanted = torch.linalg.eigvalsh(total).flip(0)[:50]
    return {
        "n": len(x), "p": kernel.features, "count": 50, "seconds": seconds, "products": found.products,
        "largest_relative_error": float((found.values / wanted - 1).abs().max()),
        "largest_relative_residual": float((found.residuals / found.values).max()),
        "smallest_over_largest": float(wanted[-1] / wanted[0]),
    }  # fmt: skip


def traces(folder: Path) -> Row:
    """Trace, alignment, effective rank and log-determinant of 20,000 points, with their errors."""
    x, y = digits(20_000, folder)
    kernel = tangent_operator(network(64), x, outputs=0, memory="1GB")
    found, row = {}, {"n": len(x), "p": kernel.features, "exact_trace": kernel.diagonal_sum()}
    for name, ask in {
        "trace": kernel.trace,
        "alignment": lambda: kernel.alignment(y),
        "participation": lambda: kernel.effective_rank("participation"),
        "log_determinant": lambda: kernel.log_determinant(1e-3),
    }.items():
        estimate, seconds = seconds_of(ask)
        found[name] = {"value": estimate.value, "error": estimate.error, "truncation": estimate.truncation,
                       "probes": estimate.probes, "seconds": round(seconds, 1)}  # fmt: skip
    return {**row, "seconds": sum(each["seconds"] for each in found.values()), "estimates": found}


CASES = {function.__name__: function for function in (large_ridge, checked_ridge, wide_ridge, eigenvalues, traces)}


def main(names: list[str]) -> None:
    """Run cases one after the other, each in a process of its own."""
    for name in names or CASES:
        command = [sys.executable, __file__, "--inside", name]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
        row = json.loads(answer.stdout)
        save_row(RESULTS, {"case": name, **row}, row.pop("provenance"), ("case",))
        print(name, row)


def inside(name: str) -> None:
    """One case: its numbers, its processor time in all and its peak memory, as JSON."""
    torch.set_num_threads(1)
    provenance = runtime.provenance("float32")
    with tempfile.TemporaryDirectory() as folder:
        row = CASES[name](Path(folder))
    row["seconds"] = round(row["seconds"], 1)
    row["process_seconds"] = round(time.process_time(), 1)
    row["peak_megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    print(json.dumps({**row, "provenance": provenance}))


if __name__ == "__main__":
    inside(sys.argv[2]) if sys.argv[1:2] == ["--inside"] else main(sys.argv[1:])
