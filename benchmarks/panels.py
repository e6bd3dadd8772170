"""How a tangent kernel is cut: panels of rows where features do not fit into memory, and pieces for several workers.

``panels.py`` (panels.json): a ReLU ResNet-20 on 400 random images of 32 x 32. All features at hand (the least work there is);
1 GB, as planned; the same tiles with room for one row and one column, so that columns are made again for every row. Seconds are
processor time, ratios of one run.

``panels.py workers N memory|disk [DESIGN...] [seconds=S]`` (workers.json): workload c, trace, on one core (*one*) and on two:
*shared* (threads that share features, what ``devices=["cpu", "cpu"]`` does), *torch* (one worker, torch's own two threads) and
*apart* (two processes that each make all features they meet, as workers of a cluster do). Seconds are wall time, each in a fresh
process; ``others`` is the share of the machine that other processes took meanwhile. Aim, set before measuring: shared at least
1.7 times one core at n = 4,000, in memory and on disk, with others below 0.05.

Where others are above that, wall time says little. ``critical_seconds`` is what a quiet machine takes at least: the processor
time of the slowest worker of every step, added to that of the calling thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from unlazy import runtime
from unlazy.bench.kernels import KEEP_FREED
from unlazy.bench.tables import save_row
from unlazy.bench.workloads import WORKLOADS
from unlazy.kernels import gram as engine
from unlazy.kernels.gram import Plan
from unlazy.kernels.gram_on_disk import gram_file
from unlazy.kernels.gram_workers import SplitKernel
from unlazy.kernels.tangent import tangent_kernel
from unlazy.kernels.tangent_engine import TangentKernel
from unlazy.models.build import build
from unlazy.models.spec import ImageSpec

SAMPLES, MEMORY = 400, "1GB"
MOST_OTHERS = 0.05
WORKERS_FILE = Path("results/bench/workers.json")


def measured(kernel: TangentKernel, x: Tensor, plan: Plan) -> tuple[float, int, Tensor]:
    """Seconds, how many tiles' features were made, and the kernel, by a plan of our own."""
    made = mock.Mock(side_effect=kernel.features)
    with (
        mock.patch.object(engine, "plan_gram", return_value=plan),
        mock.patch.object(kernel, "features", made),
        kernel.ready(),
    ):
        started = time.process_time()
        result = engine.gram(kernel, x)
        return time.process_time() - started, made.call_count, result


def busy_seconds() -> float:
    """Processor time that all processes of this machine have used since it started."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


class CriticalPath:
    """Adds up, for every step that workers share, the processor time of the slowest one, and all that the calling thread does."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, time.thread_time()
        self._run = SplitKernel._run

    def __enter__(self) -> CriticalPath:
        def timed(call: Any) -> tuple[Any, float]:
            began = time.thread_time()
            return call(), time.thread_time() - began

        def run(kernel: SplitKernel, calls: Any) -> list[Any]:
            done = self._run(kernel, [partial(timed, call) for call in calls])
            self.seconds += max(seconds for _, seconds in done)
            return [result for result, _ in done]

        self._patch = mock.patch.object(SplitKernel, "_run", run)
        self._patch.start()
        self._began = time.thread_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds += time.thread_time() - self._began
        self._patch.stop()


def time_kernel(design: str, n: int, where: str) -> dict[str, Any]:
    """Seconds of the trace kernel of workload c, in this process; ``one``: by one worker with one thread."""
    torch.set_num_threads(2 if design == "torch" else 1)
    torch.manual_seed(0)
    model, x = WORKLOADS["c"].make(), torch.randn(n, *WORKLOADS["c"].shape)
    devices = ["cpu", "cpu"] if design == "shared" else ["cpu"]
    tangent_kernel(model, x[:48], devices=devices)  # warm
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.zarr"
        others, own, began = busy_seconds(), sum(os.times()[:4]), time.perf_counter()
        with CriticalPath() as critical:
            if design == "apart":
                _compute_apart(path, model, x)
                result = None
            elif where == "disk":
                result = gram_file(path, model, x, devices=devices).array()
            else:
                result = tangent_kernel(model, x, devices=devices)
        seconds, used = time.perf_counter() - began, sum(os.times()[:4]) - own
        others = busy_seconds() - others - used
        last = None if result is None else float(result[n // 3, n // 2])
    share = max(0.0, others) / seconds / (os.cpu_count() or 1)
    found = {
        "seconds": round(seconds, 2),
        "processor_seconds": round(used, 2),
        "others": round(share, 3),
        "entry": last,
    }
    return found | ({"critical_seconds": round(critical.seconds, 2)} if design in ("one", "shared") else {})


def _compute_apart(path: Path, model: torch.nn.Module, x: Tensor) -> None:
    """Two processes, each with half of the tiles and all the features these need."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as workers,
        Client(workers) as client,
    ):
        gram_file(path, model, x, client=client)


def measure_workers(n: int, where: str, designs: list[str], patience: float) -> None:
    """Each design in a fresh process, in turn for ``patience`` seconds; the quickest of each counts, as the least disturbed.

    Into results/bench/workers.json; ``one`` is one core, with which others are compared.
    """
    provenance, names = runtime.provenance("float32"), ("workload", "n", "where", "design")
    best: dict[str, dict[str, Any]] = {}
    began, round_seconds = time.monotonic(), 0.0
    while not best or time.monotonic() - began + round_seconds < patience:
        started = time.monotonic()
        for design in designs:
            words = [sys.executable, __file__, "time", design, str(n), where]
            done = subprocess.run(words, env=os.environ | KEEP_FREED, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            print(design, found, flush=True)
            tries = best.get(design, {}).get("tries", 0) + 1
            best[design] = min(best.get(design, found), found, key=lambda one: one["seconds"]) | {"tries": tries}
        round_seconds = time.monotonic() - started
    for design, found in best.items():
        row = {"workload": "c trace", "n": n, "where": where, "design": design, **found}
        row["quiet"] = row["others"] < MOST_OTHERS
        known = json.loads(WORKERS_FILE.read_text())["rows"] if WORKERS_FILE.exists() else []
        for one in known:
            if (one["n"], one["where"], one["design"]) == (n, where, "one") and design != "one":
                row["times_faster"] = round(one["seconds"] / row["seconds"], 2)
                if design == "shared":
                    row["times_faster_by_processor_time"] = round(one["critical_seconds"] / row["critical_seconds"], 2)
        save_row(WORKERS_FILE, row, provenance, names)
        print(row, flush=True)


def main() -> None:
    """What the first word on the command line asks for."""
    words = sys.argv[1:] or ["panels"]
    if words[0] == "panels":
        measure_panels()
    elif words[0] == "workers":
        designs = [word for word in words[3:] if not word.startswith("seconds=")] or ["one", "shared"]
        patience = [float(word.removeprefix("seconds=")) for word in words[3:] if word.startswith("seconds=")]
        measure_workers(int(words[1]), words[2], designs, *(patience or [0.0]))
    else:
        print(json.dumps(time_kernel(words[1], int(words[2]), words[3])))


def measure_panels() -> None:
    """All three in one run, into results/bench/panels.json."""
    net = build(ImageSpec((16, 32, 64), (3, 3, 3)).relu()).eval()
    x = torch.rand(SAMPLES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with runtime.threads(1):
        provenance = runtime.provenance("float32")
        kernel = TangentKernel(net, x, memory=MEMORY)
        planned = engine.plan_gram(kernel, SAMPLES, None, MEMORY)
        plans = {
            "all features": engine.plan_gram(kernel, SAMPLES, None, "16GB"),
            "panels": planned,
            "a row at a time": replace(planned, cached_parts=2),
        }
        found = {name: measured(kernel, x, plan) for name, plan in plans.items()}
    exact = found["all features"][-1]
    row = {
        "workload": "ResNet-20",
        "n": SAMPLES,
        "memory": MEMORY,
        "tile": planned.tile,
        "room": planned.cached_parts,
        "seconds": {name: round(seconds, 2) for name, (seconds, _, _) in found.items()},
        "tiles_of_features": {name: made for name, (_, made, _) in found.items()},
        "times_faster": round(found["a row at a time"][0] / found["panels"][0], 2),
        "largest_relative_difference": max(float((result / exact - 1).abs().max()) for _, _, result in found.values()),
    }
    save_row(Path("results/bench/panels.json"), row, provenance, ("workload",))
    print(row)


if __name__ == "__main__":
    main()
