"""What a scope costs in trainings of large models: ViT-B, ResNet-50 and GPT-2 small, with and without one, in own processes.

    python benchmarks/large_models.py --device cuda --steps 5000
    python benchmarks/large_models.py --device cpu --models transformer --steps 40
    python benchmarks/large_models.py --device cpu --batch 4 --steps 60
    python benchmarks/large_models.py --device cpu --tiny

Random weights, synthetic data, AdamW, bf16 autocast on a card. Each training runs in a process of its own, so that its
peak memory is its own. Writes one JSON file: seconds (wall and processor), peak memory beyond that before, measurements, notes.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))  # where the tests keep their measuring tape
from process_memory import PeakGrowth

RESULTS = Path(__file__).resolve().parents[1] / "results" / "bench" / "large_models.json"


class Encoder(nn.Module):
    """Tokens or patches of images through transformer layers; one output for a sample, or one at every position."""

    def __init__(
        self, entry: nn.Module, length: int, width: int, layers: int, heads: int, outputs: int, *, causal: bool = False
    ) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.entry, self.position = entry, nn.Parameter(0.02 * torch.randn(length, width))
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs, bias=False)
        self.causal = causal
        if isinstance(entry, nn.Embedding) and outputs == entry.num_embeddings:
            nn.init.normal_(entry.weight, std=0.02)
            self.head.weight = entry.weight  # tied, as in GPT-2

    def forward(self, x: Tensor) -> Tensor:
        h = self.entry(x)
        h = h + self.position
        mask = nn.Transformer.generate_square_subsequent_mask(h.shape[1], device=h.device) if self.causal else None
        h = self.norm(self.body(h, mask=mask, is_causal=self.causal))
        return self.head(h if self.causal else h.mean(1))


class Patches(nn.Module):
    """Images as rows of patches."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, size, stride=size)

    def forward(self, x: Tensor) -> Tensor:
        return self.patch(x).flatten(2).mT


class Bottleneck(nn.Module):
    """A residual block of three convolutions."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        same = stride == 1 and before == after
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def residual(width: int, blocks: tuple[int, ...], classes: int) -> nn.Module:
    """A residual network; ResNet-50 with width 64 and blocks (3, 4, 6, 3)."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    before = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            wide = width << stage
            layers.append(Bottleneck(before, wide, 2 if stage and not block else 1))
            before = 4 * wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def make(name: str, tiny: bool, n: int) -> tuple[nn.Module, Tensor, Tensor, int]:
    """A model, inputs, targets, and the size of a batch."""
    if name == "gpt2":
        words, length, width, layers, heads, batch = (50, 8, 16, 1, 2, 4) if tiny else (50_257, 256, 768, 12, 12, 16)
        tokens = torch.randint(words, (n, length + 1))
        net = Encoder(nn.Embedding(words, width), length, width, layers, heads, words, causal=True)
        return net, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), batch
    if name == "transformer":  # small enough for one core
        words, length, width, layers, heads, classes = (50, 8, 16, 1, 2, 5) if tiny else (1000, 64, 512, 6, 8, 11_000)
        net = Encoder(nn.Embedding(words, width), length, width, layers, heads, classes)
        return net, torch.randint(words, (n, length)), torch.randint(classes, (n,)), 4 if tiny else 16
    side, classes, batch = (32, 5, 4) if tiny else (224, 100, 64)
    x, y = torch.randn(n, 3, side, side), torch.randint(classes, (n,))
    if name == "resnet50":
        return residual(4, (1, 1), classes) if tiny else residual(64, (3, 4, 6, 3), classes), x, y, batch
    patch, width, layers, heads = (8, 16, 1, 2) if tiny else (16, 768, 12, 12)
    return Encoder(Patches(patch, width), (side // patch) ** 2, width, layers, heads, classes), x, y, batch


class CardPeak:
    """Like ``PeakGrowth``, of the graphics card."""

    bytes: int

    def __enter__(self) -> CardPeak:
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *error: object) -> None:
        self.bytes = torch.cuda.max_memory_allocated() - self._before


def train(name: str, device: str, steps: int, tiny: bool, watched: bool, batch: int | None = None) -> dict[str, Any]:
    """One training, and what it took."""
    from unlazy.scope.scope import Scope

    torch.manual_seed(0)
    with torch.random.fork_rng():  # libraries are loaded and pools warm before anything is counted
        small, x, y, _ = make(name, True, 16)
        small.to(device)
        with Scope(small, probe=(x.to(device), y.to(device)), budget=1.0) as warm:
            train_step(small, torch.optim.AdamW(small.parameters()), x.to(device), y.to(device))
            warm.step(1)
    net, x, y, usual = make(name, tiny, 32 if tiny else 256)
    batch = batch or usual
    net, x, y = net.to(device), x.to(device), y.to(device)
    probe = 16 if tiny else 128
    with CardPeak() if device == "cuda" else PeakGrowth() as peak:
        wall, processor = time.perf_counter(), time.process_time()
        scope = Scope(net, probe=(x[:probe], y[:probe]), steps=steps) if watched else None
        first = time.process_time() - processor
        optimiser = torch.optim.AdamW(net.parameters(), 1e-4)
        for step in range(1, steps + 1):
            rows = torch.randint(len(x), (batch,), device=device)
            train_step(net, optimiser, x[rows], y[rows])
            if scope is not None:
                scope.step(step)
        if scope is not None:
            scope.finish()
        if device == "cuda":
            torch.cuda.synchronize()
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in net.parameters()),
        "batch": batch,
        "seconds": time.perf_counter() - wall,
        "processor_seconds": time.process_time() - processor,
        "peak_bytes": peak.bytes,
    }
    if scope is not None:
        counts = {
            k: len(v) for k, v in scope.history.scalars.items() if k in ("linearisation_error", "tangent_distance")
        }
        found |= {"construction_processor_seconds": first, "measurements": counts, "overhead": scope.overhead()}
        found |= {"notes": scope.history.notes, "left_out": scope.history.left_out}
        found |= {"verdict": str(scope.verdict())}
    return found


def train_step(net: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimiser.zero_grad()
    with torch.autocast("cuda", torch.bfloat16) if x.is_cuda else nullcontext():
        out = net(x)
        loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
    loss.backward()
    optimiser.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--models", nargs="+", default=["vit_b", "resnet50", "gpt2"], help="also: transformer (25 M)")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, help="samples a step; as many as the model's own recipe without it")
    parser.add_argument("--tiny", action="store_true", help="tiny models, 8 steps: to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", choices=("alone", "scope"), help="run one training here and print its numbers")
    options = parser.parse_args()
    steps = 8 if options.tiny else options.steps
    if options.one:
        torch.set_num_threads(torch.get_num_threads() if options.device == "cuda" else 1)
        watched = options.one == "scope"
        print(json.dumps(train(options.models[0], options.device, steps, options.tiny, watched, options.batch)))
        return
    settings = {
        "device": options.device,
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "steps": steps,
        "tiny": options.tiny,
        "torch": torch.__version__,
    }
    known = json.loads(options.out.read_text())["models"] if options.out.exists() else {}
    for name in options.models:
        found: dict[str, Any] = {"settings": settings}
        for one in ("alone", "scope"):
            command = [sys.executable, __file__, "--device", options.device, "--models", name, "--steps", str(steps)]
            command += ["--one", one, *(["--tiny"] if options.tiny else [])]
            command += ["--batch", str(options.batch)] if options.batch else []
            done = subprocess.run(command, capture_output=True, text=True)
            answer = done.stdout.splitlines()[-1] if done.returncode == 0 else ""
            found[one] = json.loads(answer) if answer else {"error": done.stderr[-2000:]}
            print(name, one, found[one], flush=True)
        known[name] = found
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"models": known}, indent=1) + "\n")


if __name__ == "__main__":
    main()
