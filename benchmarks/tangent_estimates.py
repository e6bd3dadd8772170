"""Error against cost of three ways to estimate a tangent kernel, on networks whose exact kernel fits.

outputs: random sign directions of the outputs, as a scope uses them. parameters: products of the Jacobian with random normal
directions of the parameters. folded: the gradients of random output directions, a few samples at a time, folded to 8191
numbers. All in float32, against the exact kernel; each over seeds; at random weights and after training on random labels.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import large_models
from unlazy import runtime
from unlazy.kernels.compare import kernel_distance, relative_change
from unlazy.kernels.jacobian import choose_jvp, jvp_at, rows_by_vmap
from unlazy.runtime import stream
from unlazy.scope.directions import Directions, DirectionTangents, KernelEstimate
from unlazy.store import write_file

SAMPLES, SEEDS, STEPS = 24, 10, 60
MEMORY = 10**9
EXACT_OUTPUTS = 8  # whose gradients are held at once
Estimate = Callable[[nn.Module, Tensor, int, int], KernelEstimate]


class Words(nn.Module):
    """A transformer that predicts the next of 2,000 words; its head is its embedding."""

    def __init__(self, words: int = 2000, width: int = 48, length: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        nn.init.normal_(self.words.weight, std=0.1)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.words(x) + self.places))[:, -1])


def mlp() -> tuple[nn.Module, Tensor, int]:
    layers = [nn.Linear(100, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 100)]
    return nn.Sequential(*layers), torch.randn(SAMPLES, 100), 100


def cnn() -> tuple[nn.Module, Tensor, int]:
    layers: list[nn.Module] = []
    for channels_in, channels, stride in ((3, 16, 1), (16, 32, 2), (32, 32, 2)):
        layers += [nn.Conv2d(channels_in, channels, 3, stride, 1), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 100)]
    return nn.Sequential(*layers, *head), torch.randn(SAMPLES, 3, 16, 16), 100


def transformer() -> tuple[nn.Module, Tensor, int]:
    return Words(), torch.randint(0, 2000, (SAMPLES, 16)), 2000


def narrow(name: str) -> tuple[nn.Module, Tensor, int]:
    """A narrower twin of a model of ``large_models.py``: as deep, whose exact kernel fits."""
    if name == "resnet50":
        return large_models.residual(4, (3, 4, 6, 3), 100), torch.randn(SAMPLES, 3, 64, 64), 100
    if name == "vit_b":
        net = large_models.Encoder(large_models.Patches(8, 48), 64, 48, 12, 4, 100)
        return net, torch.randn(SAMPLES, 3, 64, 64), 100
    words, length, width = 500, 16, 32
    body = large_models.Encoder(nn.Embedding(words, width), length, width, 12, 4, words, causal=True)
    return nn.Sequential(body, LastPlace()), torch.randint(words, (SAMPLES, length)), words


class LastPlace(nn.Module):
    """The outputs at the last position."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


NETWORKS = {"mlp": mlp, "cnn": cnn, "transformer": transformer} | {
    name: partial(narrow, name) for name in ("vit_b", "resnet50", "gpt2")
}


def by_outputs(net: nn.Module, x: Tensor, count: int, seed: int, folded: bool = False) -> KernelEstimate:
    """Random sign directions of the outputs."""
    kernel = DirectionTangents(net, x, [name for name, _ in net.named_parameters()], MEMORY)
    kernel.arrange(len(x), count, MEMORY, frozenset(kernel.layer_bytes) if folded else None)
    chosen, names = Directions(kernel.outputs, count, seed), {part: name for name, part in net.named_modules()}
    each = [kernel.in_direction(x, chosen, number, names).kernel.double() for number in range(len(chosen))]
    return KernelEstimate(torch.stack(each), None if folded else chosen.population)


def by_folding(net: nn.Module, x: Tensor, count: int, seed: int) -> KernelEstimate:
    """The same with every gradient folded."""
    return by_outputs(net, x, count, seed, folded=True)


def by_parameters(net: nn.Module, x: Tensor, count: int, seed: int) -> KernelEstimate:
    """Products of the Jacobian with random normal directions of the parameters."""
    at = {name: p.detach() for name, p in net.named_parameters()}
    buffers = {name: b.detach() for name, b in net.named_buffers()}
    method, each = choose_jvp(net, at, buffers, x, remedy=""), []
    for number in range(count):
        random = stream(seed, "parameters", number)
        moves = {name: torch.randn(p.shape, generator=random) for name, p in at.items()}
        features = jvp_at(net, at, buffers, moves, x, method)[1].double()
        each.append(features @ features.T)
    return KernelEstimate(torch.stack(each))


WAYS: dict[str, tuple[Estimate, tuple[int, ...]]] = {
    "outputs": (by_outputs, (4, 8, 16)),
    "parameters": (by_parameters, (16, 64)),
    "folded": (by_folding, (16,)),
}


def exact_kernel(net: nn.Module, x: Tensor, outputs: int) -> Tensor:
    """The kernel from explicit gradients, a few outputs at a time; shares no code with the estimates."""
    values, total = {name: p.detach() for name, p in net.named_parameters()}, torch.zeros(len(x), len(x)).double()
    for some in torch.eye(outputs).split(EXACT_OUTPUTS):
        rows = rows_by_vmap(net, values, x, some).flatten(1)
        total += (rows @ rows.T).double()
    return total


def train(net: nn.Module, x: Tensor, classes: int) -> None:
    """Sixty steps of Adam on random labels."""
    y, optimiser = torch.randint(0, classes, (len(x),)), torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(STEPS):
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()


def peak_bytes(do: Callable[[], object]) -> int:
    """The most bytes of tensors that were held at once during a call, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        do()
    held = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def compare(make: Callable[[], tuple[nn.Module, Tensor, int]], seeds: int) -> dict[str, Any]:
    """For every way and number of directions: errors over seeds, what was stated, and the cost."""
    torch.manual_seed(0)
    net, x, classes = make()
    net.eval()
    exact: dict[str, Tensor] = {}
    rows: dict[str, dict[str, Any]] = {}
    found: dict[tuple[str, int, str], list[KernelEstimate]] = {}
    for phase in ("start", "trained"):
        if phase == "trained":
            train(net, x, classes)
        exact[phase] = exact_kernel(net, x, classes)
        for way, (estimate, counts) in WAYS.items():
            for count in counts:
                estimate(net, x, 2, 0)
                began = time.process_time()
                ours = found[way, count, phase] = [estimate(net, x, count, seed) for seed in range(seeds)]
                seconds = (time.process_time() - began) / seeds
                rows[f"{phase}, {way}, {count}"] = errors_of(ours, exact[phase]) | {
                    "seconds": round(seconds, 4),
                    "megabytes": round(peak_bytes(lambda: estimate(net, x, count, 0)) / 1e6, 2),  # noqa: B023
                }
    for number, name in ((kernel_distance, "distance"), (relative_change, "change")):
        true = float(number(exact["trained"], exact["start"]))
        for way, (_, counts) in WAYS.items():
            for count in counts:
                pairs = list(zip(found[way, count, "trained"], found[way, count, "start"], strict=True))
                same = [float(number(now.kernel, start.kernel)) for now, start in pairs]
                stated = [float(now.error_of(number, start)) for now, start in pairs]
                others = [float(number(pairs[k][0].kernel, pairs[k - 1][1].kernel)) for k in range(len(pairs))]
                rows[f"trained, {way}, {count}"][name] = {
                    "exact": round(true, 5),
                    "mean_same_directions": round(statistics.mean(same), 5),
                    "mean_other_directions": round(statistics.mean(others), 5),
                    "error": round(math.sqrt(statistics.mean((value - true) ** 2 for value in same)), 5),
                    "stated_error": round(statistics.mean(stated), 5),
                }
    size = sum(p.numel() for p in net.parameters())
    return {"parameters": size, "outputs": classes, "seeds": seeds, "rows": rows}


def errors_of(found: list[KernelEstimate], exact: Tensor) -> dict[str, float]:
    """Relative error in Frobenius norm, what was stated, and the share of entries within the stated bounds."""
    misses = [float((one.kernel - exact).norm() / exact.norm()) for one in found]
    inside = [float(((one.kernel - exact).abs() <= one.entry_bounds()).double().mean()) for one in found]
    return {
        "error": round(statistics.mean(misses), 4),
        "worst_error": round(max(misses), 4),
        "stated_error": round(statistics.mean(one.error() for one in found), 4),
        "entries_inside": round(statistics.mean(inside), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(NETWORKS), metavar="network", help=", ".join(NETWORKS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="folder of the results")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    path = chosen.out / "tangent_estimates.json"
    known = json.loads(path.read_text())["networks"] if path.exists() else {}
    for name in chosen.names:
        known[name] = compare(NETWORKS[name], chosen.seeds)
        result = {
            "samples": SAMPLES,
            "networks": known,
            "provenance": runtime.provenance("float32"),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, (json.dumps(result, indent=1) + "\n").encode())
        print(name, json.dumps(known[name], indent=1), flush=True)


if __name__ == "__main__":
    main()
