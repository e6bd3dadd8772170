"""A tangent kernel whose features do not all fit into memory, on one core: panels of rows against a row of tiles at a time.

A ReLU ResNet-20 on 400 random images of 32 x 32. All features at hand (the least work there is); 1 GB, as planned; the same tiles
with room for one row and one column, so that columns are made again for every row. Seconds are processor time, ratios of one run.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from unlazy import runtime
from unlazy.bench.tables import save_row
from unlazy.kernels import gram as engine
from unlazy.kernels.gram import Plan
from unlazy.kernels.tangent_engine import TangentKernel
from unlazy.models.build import build
from unlazy.models.spec import ImageSpec

SAMPLES, MEMORY = 400, "1GB"


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


def main() -> None:
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
