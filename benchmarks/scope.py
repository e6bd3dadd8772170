"""What looking costs: a training with and without a scope, side by side in one process, and whether both end on the same bits.

Blocks of steps of the two trainings take turns, so that both meet the same machine. Three networks, all views, 128
probe samples, the default budget. ``python benchmarks/scope.py [mlp] [resnet] [transformer]`` runs some of them and keeps
the other rows. ``--device cuda`` trains on a GPU, with deterministic algorithms and for about ``--seconds``, and asks one thing
more: does a scope that was made before the model moved there see what one made after it sees?
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unlazy import runtime
from unlazy.scope.measurements import LEAST_ROWS
from unlazy.scope.scope import Scope
from unlazy.store import write_file

PROBE, BLOCK, BUDGET = 128, 10, 0.05
MOVED_STEPS, GENEROUS = 200, 1.0
Make = Callable[[], tuple[nn.Module, Tensor, Tensor]]


class Block(nn.Module):
    """Two convolutions with batch-norms and a skip."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])
        plain = stride == 1 and channels_in == channels
        self.skip = nn.Identity() if plain else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(h)) + self.skip(x))


class Words(nn.Module):
    """A small transformer that puts a sequence of tokens into one of four classes."""

    places: Tensor

    def __init__(self, width: int = 64, layers: int = 2, words: int = 64, length: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        angles = torch.arange(length)[:, None] * 10_000 ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("places", torch.cat([angles.sin(), angles.cos()], dim=1))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.words(x) + self.places).mean(1))


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    net = nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    return net, *_clouds((784,), 10_000)


def resnet() -> tuple[nn.Module, Tensor, Tensor]:
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    body = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    net = nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return net, *_clouds((3, 16, 16), 5_000)


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    """The class is the sum of two of the tokens, modulo four."""
    x = torch.randint(0, 64, (10_000, 16))
    return Words(), x, (x[:, 3] + x[:, 11]) % 4


def _clouds(shape: tuple[int, ...], n: int) -> tuple[Tensor, Tensor]:
    """Ten classes, each around a few centres: easy to begin with, with a tail."""
    y = torch.arange(n) % 10
    centres = torch.randn(30, *shape)
    which = y + 10 * torch.randint(0, 3, (n,))
    return 0.15 * centres[which] + torch.randn(n, *shape), y


@dataclass(frozen=True)
class Case:
    """A network, how it is trained, and for how long."""

    make: Make
    optimiser: Callable[[Any], torch.optim.Optimizer]
    batch: int
    steps: int


CASES = {
    "mlp": Case(mlp, lambda p: torch.optim.Adam(p, 3e-4), 128, 6000),
    "resnet": Case(resnet, lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=5e-4), 128, 3000),
    "transformer": Case(transformer, lambda p: torch.optim.AdamW(p, 1e-3), 64, 3000),
}


class Training:
    """One training with its own random stream, advanced a block at a time; clocks run only inside it."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(0)
        self.net, self.x, self.y = case.make()
        self.optimiser = case.optimiser(self.net.parameters())
        self.case, self.done, self.wall, self.cpu = case, 0, 0.0, 0.0
        self.random = _streams()
        self.scope: Scope | None = None
        self.scope_cpu = 0.0
        self.move(device)

    def move(self, device: str) -> None:
        self.net.to(device)
        self.x, self.y = self.x.to(device), self.y.to(device)

    def watch(self, folder: Path, probe: int = PROBE, budget: float = BUDGET) -> Scope:
        rows = torch.linspace(0, len(self.x) - 1, probe, device=self.x.device).long()
        self.scope = Scope(self.net, (self.x[rows], self.y[rows]), folder, budget=budget, strict=True)
        return self.scope

    def advance(self, steps: int) -> None:
        for put, state in zip((torch.set_rng_state, torch.cuda.set_rng_state), self.random, strict=False):
            put(state)
        self._settle()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            batch = torch.randint(0, len(self.x), (self.case.batch,)).to(self.x.device)
            self.optimiser.zero_grad()
            F.cross_entropy(self.net(self.x[batch]), self.y[batch]).backward()
            self.optimiser.step()
            self.done += 1
            if self.scope is not None:
                before = time.process_time()
                self.scope.step(self.done)
                self.scope_cpu += time.process_time() - before
        self._settle()
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu
        self.random = _streams()

    def _settle(self) -> None:
        if self.x.is_cuda:
            torch.cuda.synchronize()


def _streams() -> list[Tensor]:
    """Random states of the processor and, where there is one, the device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


def compare(case: Case, device: str = "cpu") -> dict[str, Any]:
    """Both trainings to the end, block by block in turn."""
    blind, watched = Training(case, device), Training(case, device)
    with tempfile.TemporaryDirectory() as folder:
        scope = watched.watch(Path(folder) / "run")
        for block in range(case.steps // BLOCK):
            order = (blind, watched) if block % 2 else (watched, blind)
            for training in order:
                if training is blind:
                    with scope.paused():
                        blind.advance(BLOCK)
                else:
                    watched.advance(BLOCK)
        wall, cpu = time.perf_counter(), time.process_time()
        scope.finish()
        watched.wall += time.perf_counter() - wall
        watched.cpu += time.process_time() - cpu
        watched.scope_cpu += time.process_time() - cpu
    cost = scope.overhead()
    return {
        "parameters": sum(p.numel() for p in watched.net.parameters()),
        "steps": case.steps,
        "probe": PROBE,
        "training_seconds": round(blind.wall, 2),
        "measurements": cost["measurements"],
        "full_measurements": cost["full_measurements"],
        "first_and_last": scope.history.steps[0] == 0 and scope.history.steps[-1] == case.steps,
        "left_out": dict(scope.history.left_out),
        "overhead_reported": round(cost["share"], 4),
        "overhead_processor_time": round(watched.scope_cpu / (watched.cpu - watched.scope_cpu), 4),
        "overhead_side_by_side": round(watched.wall / blind.wall - 1, 4),
        "overhead_side_by_side_processor_time": round(watched.cpu / blind.cpu - 1, 4),
        "seconds_at_construction": round(cost["seconds_at_construction"], 3),
        "seconds_by_measure": {name: round(seconds, 4) for name, seconds in cost["seconds_by_measure"].items()},
        "bit_identical": _same(blind, watched),
    }


def moved_after(case: Case, device: str) -> dict[str, Any]:
    """A scope made while the model was on the CPU, beside one made on the device: what both saw last, and the bits."""
    blind, here, moved = Training(case, device), Training(case, device), Training(case, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        one, other = (  # so few samples that the clock does not choose among them
            training.watch(Path(folder) / str(k), LEAST_ROWS, GENEROUS) for k, training in enumerate((here, moved))
        )
        moved.move(device)
        for training in (blind, here, moved):
            training.advance(MOVED_STEPS)
        one.finish()
        other.finish()
    names = [
        name for name in one.history.scalars if name != "overhead" and "velocity" not in name
    ]  # those go by clocks
    apart = {name: _apart(one.history.last(name), other.history.last(name)) for name in names}
    worst = max(apart, key=lambda name: apart[name])
    return {
        "steps": MOVED_STEPS,
        "last_measured": other.history.steps[-1],
        "numbers": len(apart),
        "largest_relative_difference": apart[worst],
        "of": worst,
        "left_out_alike": dict(one.history.left_out) == dict(other.history.left_out),
        "bit_identical": _same(blind, moved) and _same(blind, here),
    }


def _apart(first: float | None, second: float | None) -> float:
    """Relative difference; infinite where only one was measured."""
    if first is None or second is None:
        return math.inf
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    return abs(first - second) / max(abs(first), abs(second))


def _same(first: Training, second: Training) -> bool:
    """Every bit of parameters, buffers and random streams."""
    states = [[*training.net.state_dict().values(), *training.random] for training in (first, second)]
    return all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def lasting(case: Case, device: str, seconds: float) -> Case:
    """The case with as many steps as take about this long."""
    trial = Training(case, device)
    trial.advance(2 * BLOCK)
    trial.wall = 0.0
    trial.advance(5 * BLOCK)
    return replace(case, steps=max(1, int(seconds / trial.wall * 5)) * BLOCK)


def keep(path: Path, name: str, row: dict[str, Any], device: str) -> None:
    """The row into the file beside the others, whoever else adds some."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        known = json.loads(path.read_text())["rows"] if path.exists() else {}
        made_by = runtime.provenance("float32", torch.cuda.get_device_name() if device == "cuda" else device)
        result = {"budget": BUDGET, "rows": known | {name: row}, "provenance": made_by}
        write_file(path, (json.dumps(result, indent=1) + "\n").encode())
    finally:
        os.close(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="network", help=", ".join(CASES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=None, help="about how long to train; on a GPU 25 unless told")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="folder of the results")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    cuda = chosen.device == "cuda"
    if cuda:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    seconds = 25.0 if cuda and chosen.seconds is None else chosen.seconds
    for name in chosen.names:
        case = CASES[name] if seconds is None else lasting(CASES[name], chosen.device, seconds)
        row = compare(case, chosen.device)
        if cuda:
            row |= {"deterministic_algorithms": True, "moved_after": moved_after(case, chosen.device)}
        keep(chosen.out / ("scope-cuda.json" if cuda else "scope.json"), name, row, chosen.device)
        print(name, json.dumps(row, indent=1), flush=True)


if __name__ == "__main__":
    main()
