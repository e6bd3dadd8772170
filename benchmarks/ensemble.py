"""How much faster a stack trains than its members one by one. Ratios within one run; best of several rounds.

One by one: a plain network and PyTorch's fused Adam. Together: `MemberAdam` on a stack, what `fit` uses.
The 5 x 16 network of the circle study, constant experts, batch 32.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from unlazy import runtime
from unlazy.data.circle import CIRCLE_PRESETS
from unlazy.models.build import build
from unlazy.models.spec import NetSpec
from unlazy.store import write_file
from unlazy.training.ensemble import Member, MemberAdam, build_member_stack

SPEC = NetSpec(2, experts="constant", width=16, depth=5)
DATA = CIRCLE_PRESETS["author"].dataset()
BATCH, STEPS, ROUNDS = 32, 100, 7


def alone() -> Callable[[], None]:
    net = build(SPEC)
    adam = torch.optim.Adam(net.parameters(), 3e-3, fused=True)

    def step() -> None:
        batch = torch.randint(len(DATA), (BATCH,))
        adam.zero_grad()
        (net(DATA.x[batch]) - DATA.y[batch]).square().mean().backward()
        adam.step()

    return step


def together(size: int) -> Callable[[], None]:
    members = [Member(seed, 3e-3, 4.0) for seed in range(size)]
    net = build_member_stack(SPEC, members, torch.float32)
    adam = MemberAdam(net, [member.lr for member in members])

    def step() -> None:
        batch = torch.randint(len(DATA), (size, BATCH))
        adam.minimise((net(DATA.x[batch]) - DATA.y[batch]).square().mean((-2, -1)))

    return step


def seconds_per_step(step: Callable[[], None]) -> float:
    for _ in range(10):
        step()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - start) / STEPS


def main() -> None:
    sizes = (1, 10, 50, 200)
    contestants = {0: alone()} | {size: together(size) for size in sizes}
    best = dict.fromkeys(contestants, float("inf"))
    with runtime.threads(1):
        for _ in range(ROUNDS):  # in turns, so that a busy moment of the machine hits all alike
            for size, step in contestants.items():
                best[size] = min(best[size], seconds_per_step(step))
        table = {
            "one_by_one_ms": 1000 * best[0],
            "stacks": [
                {"members": size, "ms": 1000 * best[size], "times_faster": best[0] * size / best[size]}
                for size in sizes
            ],
            "provenance": runtime.provenance("float32"),
        }
    print(f"one by one: {table['one_by_one_ms']:.2f} ms a step and member")
    for size in sizes:
        print(f"{size:4d} members: {1000 * best[size]:6.2f} ms a step, {best[0] * size / best[size]:5.1f} times faster")
    path = Path("results/bench/ensemble.json")
    write_file(path, (json.dumps(table, indent=1) + "\n").encode())
    print(path)


if __name__ == "__main__":
    main()
