"""How cost and memory of a tangent kernel grow with n, p, outputs and layers: measured, counted, and extrapolated.

``growth.py measure``: the trace kernel of networks like workload c (3 x 3 convolutions on 3 x 32 x 32, pool, dense 64), one thing
varied at a time; processor seconds of one core for the features and for the pairs, beside the counted operations of each.
``growth.py extrapolate``: operations of larger problems, at the rates that were measured at the largest n, and their memory.
Both write results/bench/growth.json.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from large_models import residual
from unlazy import runtime
from unlazy.bench.tables import save_row
from unlazy.kernels.tangent_engine import TangentKernel

FILE = Path("results/bench/growth.json")
IMAGENET = 1_281_167


@dataclass(frozen=True)
class Size:
    """A network like workload c, and the number of samples."""

    n: int = 200
    filters: int = 26
    outputs: int = 10
    layers: int = 5

    def model(self) -> nn.Module:
        """The network."""
        channels = [3, *[self.filters] * self.layers]
        body: list[nn.Module] = []
        for before, after in pairwise(channels):
            body += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        head = (
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(self.filters, 64),
            nn.ReLU(),
            nn.Linear(64, self.outputs),
        )
        return nn.Sequential(*body, *head)


BASE = Size()
VARIED = [
    BASE,
    *(replace(BASE, n=n) for n in (50, 100, 400, 800)),
    *(replace(BASE, filters=filters) for filters in (13, 52)),
    *(replace(BASE, outputs=outputs) for outputs in (1, 5, 20)),
    *(replace(BASE, layers=layers) for layers in (3, 9)),
]


@dataclass(frozen=True)
class Count:
    """Operations: to make the features of one sample, and to pair two samples. Numbers held for a sample."""

    sample: float
    pair: float
    held: float


def count(model: nn.Module, x: Tensor, outputs: int) -> Count:
    """A forward pass, and for every output a backward pass and explicit gradients; pairs of these, or of factors."""
    layers: list[tuple[nn.Module, int]] = []

    def note(module: nn.Module, _: Any, out: Tensor) -> None:
        layers.append((module, out[0].numel() // out.shape[1]))

    handles = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    with torch.no_grad():
        model.eval()(x)
    for handle in handles:
        handle.remove()
    sample = pair = held = 0.0
    for number, (module, positions) in enumerate(layers):
        weight = next(module.parameters())
        m, d = weight.shape[0], weight[0].numel()
        once = 2 * positions * m * d
        sample += once * (1 + (outputs if number else 0))
        if positions > 1:
            sample += outputs * once
            pair += 2 * outputs * m * d
            held += outputs * m * d
        else:
            pair += 2 * (d + outputs * m)
            held += d + outputs * m
    return Count(sample, pair, held)


def measure(size: Size) -> dict[str, Any]:
    """Processor seconds of features and pairs on one core, with their operations and bytes."""
    torch.manual_seed(0)
    model, x = size.model(), torch.randn(size.n, 3, 32, 32)
    kernel, counted = TangentKernel(model, x), count(model, x[:1], size.outputs)
    out = torch.empty(size.n, size.n)
    with kernel.ready():
        kernel.features(x[:24])  # warm
        began = time.process_time()
        features = kernel.features(x)
        made = time.process_time()
        kernel.block(out, features, features, same=True)
        paired = time.process_time()
    row = {**asdict(size), "p": sum(p.numel() for p in model.parameters())}
    row |= {"feature_seconds": round(made - began, 3), "pair_seconds": round(paired - made, 3)}
    row |= {"feature_operations": size.n * counted.sample, "pair_operations": size.n * (size.n + 1) / 2 * counted.pair}
    return row | {"feature_bytes": kernel.feature_bytes, "counted_bytes": 4 * counted.held}


# --- far out -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A network by its counts, the number of samples, the workers and the memory of each."""

    name: str
    n: int
    counted: Count
    workers: int
    gigabytes: float


def extrapolate(problem: Problem, feature_rate: float, pair_rate: float) -> dict[str, Any]:
    """Hours and terabytes, on hosts that share no memory: each makes the features it meets.

    A worker's share of the pairs is a square of side n / sqrt(2 workers). Its features are made once if those of one side fit its
    memory; else those of the other side are made again for every panel.
    """
    bytes_held = 4 * problem.counted.held
    panel = max(1.0, problem.gigabytes * 1e9 / bytes_held)  # samples whose features a worker holds
    side = problem.n / (2 * problem.workers) ** 0.5
    made = problem.workers * side * (1 + max(1.0, side / panel))
    if problem.workers == 1:  # all pairs, so that rows are columns too
        made = problem.n * max(1.0, problem.n / panel / 2)
    times_made = made / problem.n
    feature_operations = problem.n * problem.counted.sample * times_made
    pair_operations = problem.n * (problem.n + 1) / 2 * problem.counted.pair
    seconds = (feature_operations / feature_rate + pair_operations / pair_rate) / problem.workers
    return {
        "problem": problem.name,
        "n": problem.n,
        "workers": problem.workers,
        "gigabytes": problem.gigabytes,
        "feature_operations": feature_operations,
        "times_made": round(times_made, 1),
        "pair_operations": pair_operations,
        "hours": seconds / 3600,
        "matrix_terabytes": 4 * problem.n**2 / 1e12,
        "feature_terabytes": problem.n * bytes_held / 1e12,
    }


def problems() -> list[Problem]:
    """Workload c on CIFAR-10, and ResNet-50 on ImageNet: one output, since a thousand would cost a thousand times as much."""
    small = count(BASE.model(), torch.zeros(1, 3, 32, 32), 10)
    large = count(residual(64, (3, 4, 6, 3), 1000), torch.zeros(1, 3, 224, 224), 1)
    found = [Problem("c, CIFAR-10, trace", 50_000, small, workers, 16) for workers in (1, 100)]
    found += [Problem("c, ImageNet at 32 x 32, trace", IMAGENET, small, 100, 16)]
    return [*found, Problem("ResNet-50, ImageNet, one output", IMAGENET, large, 100, 64)]


def main() -> None:
    """What the first word asks for."""
    provenance = runtime.provenance("float32")
    names = ("kind", "n", "filters", "outputs", "layers", "problem", "workers")
    if sys.argv[1:] == ["measure"]:
        with runtime.threads(1):
            for size in VARIED:
                row = {"kind": "measured", "problem": "", "workers": 1, **measure(size)}
                save_row(FILE, row, provenance, names)
                print(row, flush=True)
        return
    rows = json.loads(FILE.read_text())["rows"]
    wanted = {"kind": "measured", **asdict(BASE)} | {"n": max(size.n for size in VARIED)}
    (base,) = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    rates = [base[f"{what}_operations"] / base[f"{what}_seconds"] for what in ("feature", "pair")]
    for problem in problems():
        row = {
            "kind": "extrapolated",
            "filters": 0,
            "outputs": 0,
            "layers": 0,
            **extrapolate(problem, rates[0], rates[1]),
        }
        save_row(FILE, row, provenance, names)
        print(row, flush=True)


if __name__ == "__main__":
    main()
