"""The memory given is kept: the peak of a process, watched from inside, against the budget."""

from __future__ import annotations

import subprocess
import sys

import pytest

WATCHED = """
import sys, threading, time
import torch
from unlazy import tangent_kernel
from unlazy.bench.workloads import convolutional, dense, two_layers

kind, mode, n, budget = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]) * 10**6
torch.set_num_threads(1)
make, shape = {"dense": (lambda: dense(1024), (784,)), "conv": (convolutional, (3, 32, 32)), "two": (two_layers, (500,))}[kind]
model, x = make(), torch.randn(n, *shape)
tangent_kernel(model, x[:4], outputs=mode)  # libraries loaded, pools warm

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

before = peak = resident()
over = False

def watch():
    global peak
    while not over:
        peak = max(peak, resident())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
tangent_kernel(model, x, outputs=mode, memory=budget)
over = True
watcher.join()
print((peak - before) / budget)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("kind", "mode", "n", "megabytes"),
    [("dense", "trace", 400, 100), ("conv", "trace", 100, 120), ("conv", "full", 100, 250), ("two", "sum", 2000, 60)],
)
def test_the_budget_is_kept_within_a_tenth(kind: str, mode: str, n: int, megabytes: int) -> None:
    command = [sys.executable, "-c", WATCHED, kind, mode, str(n), str(megabytes)]
    used = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 0.05 < used < 1.1, f"used {used:.2f} of the budget"
