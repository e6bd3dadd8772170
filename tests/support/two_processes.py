"""One of two processes that train together, for ``test_processes.py``: ``python two_processes.py KIND FOLDER``.

Every process writes ``FOLDER/rank-N.pt``: the parameters it ended with, and what it saw of the scope, by kind of training.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from unlazy.scope import processes
from unlazy.scope.scope import Scope

STEPS, BATCH = 12, 16


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    return x, x[:, :3].argmax(1)


def network() -> nn.Sequential:
    """A network with a block of its own, dropout and buffers."""
    torch.manual_seed(1)
    block = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.1))
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), block, nn.Linear(24, 3))


def train(kind: str, scope_folder: Path | None) -> dict[str, Any]:
    """Train under data parallelism (plain, or by accelerate) or FSDP2.

    Further words of ``kind`` are things that go wrong on the second process.
    """
    rank, (x, y) = dist.get_rank(), data()
    model: nn.Module = network()
    if kind.startswith("fsdp"):
        fully_shard(model[2])  # type: ignore[index]
        fully_shard(model)
    elif kind != "accelerate":
        model = DistributedDataParallel(model)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    backward: Callable[[Tensor], Any] = Tensor.backward
    if kind == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimiser = accelerator.prepare(model, optimiser)
        backward = accelerator.backward
    torch.manual_seed(10 + rank)
    scope: Any = nullcontext()
    if scope_folder is not None:
        strict = "alone" not in kind and "late" not in kind
        scope = Scope(model, (x[:48], y[:48]), scope_folder, budget=float("inf"), strict=strict)
    steps = 0
    with scope:
        for step in range(1, STEPS + 1):
            if "dies" in kind and rank == 1 and step == 7:
                os._exit(3)
            batch = torch.randint(len(x), (BATCH,))
            optimiser.zero_grad()
            backward(cross_entropy(model(x[batch]), y[batch]))
            optimiser.step()
            steps += 1
            if "late" in kind and rank == 1 and step == 7:
                os._exit(3)
            if scope_folder is not None and not ("alone" in kind and rank == 1):
                scope.step(step)
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    found = {"values": [value.detach().clone() for value in (*values, *model.buffers())], "steps": steps}
    found["random"] = torch.get_rng_state()
    if scope_folder is not None:
        found |= {"scalars": scope.history.scalars, "left_out": scope.history.left_out, "said": str(scope.verdict())}
    return found


def main(kind: str, folder: Path) -> None:
    if kind == "together":
        kinds: dict[str, tuple[str, Path | None]] = {name: (name, folder / name) for name in ("ddp", "fsdp")}
        kinds |= {f"{name} without": (name, None) for name in ("ddp", "fsdp")}
    else:
        kinds = {kind: (kind, folder / kind)}
        if kind == "accelerate":
            kinds["accelerate without"] = (kind, None)
    found = {name: train(*what) for name, what in kinds.items()}
    torch.save(found, folder / f"rank-{dist.get_rank()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error" if sys.argv[1] == "together" else "default")
    processes.MEETING_SECONDS = 2.0 if sys.argv[1] != "together" else processes.MEETING_SECONDS
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    main(sys.argv[1], Path(sys.argv[2]))
    dist.destroy_process_group()
