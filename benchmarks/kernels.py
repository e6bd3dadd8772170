"""Tangent kernels: ours against the two torch.func recipes, on one core, in one run.

Workloads: a dense 784-128x5-10, n=500; b the same 1024 wide; c five 3x3 convolutions of 26 filters on 3x32x32, pool, dense 64,
10 outputs, n=200; d a ResNet-18-like net on 3x32x32, n=32; e two layers, 500 inputs, 1000 hidden, one output, n=2000.
A peer that would take too long runs on fewer samples; the ratio always compares equal numbers of samples, both measured.
"limit" = least counted operations over the best matrix-product rate measured in the same run.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vjp, vmap

from unlazy import runtime
from unlazy.kernels.tangent import tangent_kernel
from unlazy.store import write_file


def dense(width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(784, width), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (3, 26, 26, 26, 26):
        layers += [nn.Conv2d(channels, 26, 3, padding=1), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(26, 64), nn.ReLU(), nn.Linear(64, 10)
    )


class Block(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.skip = (
            nn.Conv2d(channels, width, 1, stride, bias=False) if stride > 1 or channels != width else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.skip(x) + self.second(torch.relu(self.first(x))))


def residual() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.ReLU()]
    channels = 64
    for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(Block(channels, width, stride))
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(500, 1000), nn.ReLU(), nn.Linear(1000, 1))


@dataclass(frozen=True)
class Workload:
    """A network, its inputs, and how many samples the peer is given in each mode."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    n: int
    peer_n: dict[str, int]
    chunk: int


WORKLOADS = {
    "a": Workload(lambda: dense(128), (784,), 500, {"full": 150, "trace": 300, "sum": 500}, 50),
    "b": Workload(lambda: dense(1024), (784,), 500, {"full": 8, "trace": 8, "sum": 60}, 8),
    "c": Workload(convolutional, (3, 32, 32), 200, {"full": 100, "trace": 100, "sum": 200}, 20),
    "d": Workload(residual, (3, 32, 32), 32, {"full": 4, "trace": 4, "sum": 16}, 4),
    "e": Workload(two_layers, (500,), 2000, {"sum": 300}, 100),
}


# --- the peers -----------------------------------------------------------------------------------------------


def jacobian_contraction(model: nn.Module, x: Tensor, mode: str, chunk: int) -> Tensor:
    """torch.func's first recipe: per-sample Jacobians by vmap(jacrev), then their inner products."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def single(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        out = functional_call(model, values, (sample[None],))[0]
        return out.sum()[None] if mode == "sum" else out

    rows = vmap(jacrev(single), (None, 0), chunk_size=chunk)(parameters, x)
    equation = "nap,mbp->nmab" if mode == "full" else "nap,map->nm"
    return sum(torch.einsum(equation, j.flatten(2), j.flatten(2)) for j in rows.values())  # type: ignore[return-value]


def vector_products(model: nn.Module, x: Tensor, mode: str, chunk: int) -> Tensor:
    """torch.func's second recipe: tangent kernels as vjp followed by jvp, pair by pair, no Jacobian kept."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def at(sample: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
        def function(values: dict[str, Tensor]) -> Tensor:
            out = functional_call(model, values, (sample[None],))[0]
            return out.sum()[None] if mode == "sum" else out

        return function

    def pair(first: Tensor, second: Tensor) -> Tensor:
        out, pull, *_ = vjp(at(first), parameters)
        identity = torch.eye(out.numel(), dtype=out.dtype)
        block = vmap(lambda v: jvp(at(second), (parameters,), pull(v))[1])(identity)  # [a, b]
        return block if mode == "full" else block.diagonal().sum()

    return vmap(lambda a: vmap(lambda b: pair(a, b))(x), chunk_size=1)(x)


# --- measuring -----------------------------------------------------------------------------------------------


def best_seconds(function: Callable[[], Any], patience: float) -> float:
    """Best of a few warm runs; fewer when one takes long."""
    function()
    best, spent = float("inf"), 0.0
    while spent < patience or best == float("inf"):
        start = time.perf_counter()
        function()
        taken = time.perf_counter() - start
        best, spent = min(best, taken), spent + taken
    return best


def gemm_rate() -> float:
    """Best float32 matrix-product rate seen, operations a second."""
    best = 0.0
    for size in (512, 1024, 2048):
        a, b = torch.randn(size, size), torch.randn(size, size)
        best = max(best, 2 * size**3 / best_seconds(partial(torch.mm, a, b), 0.5))
    return best


def least_operations(model: nn.Module, shape: tuple[int, ...], n: int, mode: str) -> float:
    """Forward, one backward of inputs per direction, and the cheaper pairing per layer, each pair of samples once."""
    outputs = 10 if mode != "sum" and model(torch.zeros(1, *shape)).shape[1] > 1 else 1
    pairs = n * (n + 1) / 2
    total = 0.0
    layers: list[tuple[nn.Module, int]] = []

    def note(module: nn.Module, _: Any, out: Tensor) -> None:
        layers.append((module, out[0].numel() // out.shape[1] if out.ndim > 2 else 1))

    handles = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    model(torch.zeros(1, *shape))
    for handle in handles:
        handle.remove()
    blocks = outputs if mode == "trace" else outputs**2
    for index, (module, t) in enumerate(layers):
        weight = next(module.parameters())
        m, d = weight.shape[0], weight[0].numel()
        forward = 2 * t * m * d
        total += n * forward * (1 + (outputs if index else 0))
        if t == 1:
            total += pairs * 2 * (d + blocks * m)
        else:
            by_rows = n * outputs * 2 * t * m * d + pairs * 2 * blocks * m * d
            by_positions = pairs * 2 * t * t * (d + blocks * m)
            total += min(by_rows, by_positions)
    return total


def measure(name: str, mode: str, rate: float) -> dict[str, Any]:
    work = WORKLOADS[name]
    torch.manual_seed(0)
    model, x = work.make(), torch.randn(work.n, *work.shape)
    few = work.peer_n[mode]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row: dict[str, Any] = {"workload": name, "mode": mode, "n": work.n, "gemm_rate": rate}
    row["seconds"] = best_seconds(partial(tangent_kernel, model, x, outputs=mode), 2.0)
    row["megabytes"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    small = min(24, few)
    exact = tangent_kernel(model, x[:small], outputs=mode, precision="float64")
    row["error"] = float((tangent_kernel(model, x[:small], outputs=mode).double() - exact).norm() / exact.norm())
    row["limit_seconds"] = least_operations(model, work.shape, work.n, mode) / rate
    row["times_limit"] = row["seconds"] / row["limit_seconds"]
    ours = best_seconds(partial(tangent_kernel, model, x[:few], outputs=mode), 1.0)
    recipes = {"jacobian contraction": jacobian_contraction}
    if few <= 20:
        recipes["vector products"] = vector_products
    row["peer_n"] = few
    timed = {
        label: min(best_seconds(partial(f, model, x[:few], mode, c), 0.0) for c in (work.chunk, 2 * work.chunk))
        for label, f in recipes.items()
    }
    row["peer"] = min(timed, key=timed.__getitem__)
    row["peer_seconds"] = timed[row["peer"]]
    row["times_faster"] = row["peer_seconds"] / ours
    return row


def run_one(entry: str) -> dict[str, Any]:
    """One workload and mode, in this process."""
    name, mode = entry.split(":")
    with runtime.threads(1):
        return measure(name, mode, gemm_rate())


def main() -> None:
    """All rows, or those named (``kernels.py a:full c:sum``); each in a process of its own, so that peak memory is its own."""
    if sys.argv[1:2] == ["--row"]:
        print(json.dumps(run_one(sys.argv[2])))
        return
    wanted = sys.argv[1:] or [f"{name}:{mode}" for name, work in WORKLOADS.items() for mode in work.peer_n]
    rows: list[dict[str, Any]] = []
    with runtime.threads(1):
        provenance = runtime.provenance("float32")
    for entry in wanted:
        command = [sys.executable, __file__, "--row", entry]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        rows.append(row)
        print(
            f"{row['workload']} {row['mode']:5} {row['seconds']:8.4f} s {row['megabytes']:6.0f} MB  error {row['error']:.0e}  "
            f"{row['times_limit']:4.1f} x limit  {row['times_faster']:7.1f} x {row['peer']} (n={row['peer_n']})",
            flush=True,
        )
        text = json.dumps({"rows": rows, "provenance": provenance}, indent=1) + "\n"
        write_file(Path("results/bench/kernels.json"), text.encode())


if __name__ == "__main__":
    main()
