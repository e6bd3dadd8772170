"""How long something takes on an idle machine, and how many samples that leaves time for."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from unlazy.kernels.capture import Inputs, call_model, sample_count, take_samples

TIMED_SAMPLES = (8, 32)
CERTAINLY = 4  # times too long: no larger batch can be so much faster
LEAST_SAMPLES = 32  # of a probe set, however slow the model: fewer give no verdict


def count_affordable(model: nn.Module, x: Inputs, at_once: int, seconds: float) -> int:
    """How many samples pass the model within so many seconds, at least ``LEAST_SAMPLES``; all of them if they do.

    Few samples are timed first. If all of them would take somewhat too long by that, a larger batch is timed: a small one says
    little about a large one on a graphics card.
    """
    n, rate = sample_count(x), 0.0
    for few in TIMED_SAMPLES:
        part = take_samples(x, slice(0, min(few, n, at_once)))
        with torch.no_grad():
            rate = idle_seconds(lambda: bool(call_model(model, part).isfinite().all())) / sample_count(part)  # noqa: B023
        if rate * n <= seconds:
            return n
        if rate * n > CERTAINLY * seconds:
            break
    return min(n, max(LEAST_SAMPLES, int(seconds / rate)))


def idle_seconds(do: Callable[[], object]) -> float:
    """Seconds that a call takes on an idle machine: wall time, or processor time if other processes delayed it."""
    elapsed = idle_timer()
    do()
    return elapsed()


def idle_timer() -> Callable[[], float]:
    """A function that returns the seconds since now, as they would pass on an idle machine (see :func:`idle_seconds`)."""
    wall, processor = time.perf_counter(), time.process_time()
    return lambda: min(time.perf_counter() - wall, time.process_time() - processor)
