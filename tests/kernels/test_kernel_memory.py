"""The memory given is kept: the peak of a process, watched from inside, against the budget."""

from __future__ import annotations

import sys

import pytest

from process_memory import run_code

WATCHED = """
import sys
import torch
from unlazy import tangent_kernel
from process_memory import PeakGrowth
from unlazy.bench.workloads import convolutional, dense, two_layers

kind, mode, n, budget = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]) * 10**6
torch.set_num_threads(1)
make, shape = {"dense": (lambda: dense(1024), (784,)), "conv": (convolutional, (3, 32, 32)), "two": (two_layers, (500,))}[kind]
model, x = make(), torch.randn(n, *shape)
tangent_kernel(model, x[:4], outputs=mode)  # libraries loaded, pools warm

with PeakGrowth() as peak:
    tangent_kernel(model, x, outputs=mode, memory=budget)
print(peak.bytes / budget)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("kind", "mode", "n", "megabytes"),
    [("dense", "trace", 400, 100), ("conv", "trace", 100, 120), ("conv", "full", 100, 250), ("two", "sum", 2000, 60)],
)
def test_the_budget_is_kept_within_a_tenth(kind: str, mode: str, n: int, megabytes: int) -> None:
    used = float(run_code(WATCHED, kind, mode, n, megabytes))
    assert 0.05 < used < 1.1, f"used {used:.2f} of the budget"
