"""Timing on one thread: processor time, warm, the best of a few."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def best_seconds(function: Callable[[], Any], patience: float) -> float:
    """Processor time of the best of a few warm runs: other work on the machine counts little. Fewer when one takes long."""
    function()
    best, spent = float("inf"), 0.0
    while spent < patience or best == float("inf"):
        taken = seconds_once(function)
        best, spent = min(best, taken), spent + taken
    return best


def seconds_once(function: Callable[[], Any]) -> float:
    """Processor time of one run."""
    start = time.process_time()
    function()
    return time.process_time() - start


def gemm_rate() -> float:
    """Best float32 matrix-product rate seen, operations a second."""
    best = 0.0
    for size in (512, 1024, 2048):
        a, b = torch.randn(size, size), torch.randn(size, size)
        best = max(best, 2 * size**3 / best_seconds(partial(torch.mm, a, b), 0.5))
    return best
