"""The structured adaptive solver on one core: to convergence at n=2000, p=250,000, and how a round's cost grows with n and p.

converged: digits 2 against 3 of MNIST, a 784-243-243-1 ReLU network, interpolation, until a round lowers the objective by less
than 1e-10 of it; with one square factor a layer (the duality gap is the proof) and with two. rounds: five rounds at other n and
other p. "operations" are counted by hand for one round (below); "rate" is what they come to a second of processor time. Peak
memory is that of the whole process, data and PyTorch included.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unlazy import runtime
from unlazy.data.images import load_images
from unlazy.models.build import build
from unlazy.models.spec import Init, relu_spec
from unlazy.store import write_file
from unlazy.theory.adaptive_solutions import AlternatingSearch, solve_structured
from unlazy.theory.penalties import Power
from unlazy.theory.tangent_layers import Layer, tangent_layers

Row = dict[str, Any]
SQUARE = Power(2)
CONVERGED = AlternatingSearch(rounds=2000, tolerance=1e-10)
SVD = 22  # operations of a thin singular value decomposition over m d min(m, d), by the usual count


def problem(n: int, width: int) -> tuple[list[Layer], torch.Tensor, int]:
    """Tangent features of a fresh network at the first n twos and threes, and what is left to learn there."""
    images = load_images("mnist")
    images = images.take((images.labels == 2) | (images.labels == 3)).take(slice(n))
    x = images.flat().double()
    x = x - x.mean(1, keepdim=True)
    x = x / x.norm(dim=1, keepdim=True)
    net = build(relu_spec(784, 1, width=width, depth=2, init=Init("he")), seed=0, dtype=torch.float64)
    with torch.no_grad():
        rest = 2.0 * (images.labels == 3) - 1 - net(x)[:, 0]
    return tangent_layers(net, x), rest, sum(parameter.numel() for parameter in net.parameters())


def operations(layers: Sequence[Layer], n: int, sides: int) -> float:
    """Of one round: stretch the features, two products for each layer's kernel, a factorisation, new updates, their SVDs."""
    total = n**3 / 3
    for m, d in (layer.shape for layer in layers):
        rank = min(m, d)
        stretched = m if sides == 1 else m + d
        total += 4 * n * rank * stretched + 2 * n**2 * (m + d) + 2 * n * m * d + SVD * m * d * rank
    return total


def row(name: str, n: int, width: int, sides: int, search: AlternatingSearch) -> Row:
    layers, rest, size = problem(n, width)
    started = time.process_time()
    found = solve_structured(layers, rest, left=SQUARE, right=SQUARE if sides == 2 else None, search=search)
    seconds, rounds = time.process_time() - started, len(found.objectives[0])
    counted = operations(layers, n, sides)
    return {
        "workload": name,
        "n": n,
        "p": size,
        "factors": sides,
        "rounds": rounds,
        "seconds": seconds,
        "seconds_a_round": seconds / (rounds + 2),  # the first solve and the certificates cost about a round each
        "operations_a_round": counted,
        "rate": counted * (rounds + 2) / seconds,
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "features_megabytes": n * size * 8 / 1e6,
        "objective": found.objective,
        "relative_gap": None if found.gap is None else found.gap / found.objective,
        "stationarity": found.stationarity,
        "residual": found.residual,
    }


FEW = AlternatingSearch(rounds=5, tolerance=0.0)
ROWS: dict[str, Callable[[], Row]] = {
    "converged-one": partial(row, "converged", 2000, 243, 1, CONVERGED),
    "converged-two": partial(row, "converged", 2000, 243, 2, CONVERGED),
    **{f"n-{n}": partial(row, "rounds", n, 243, 2, FEW) for n in (250, 500, 1000, 2000)},
    **{f"p-{width}": partial(row, "rounds", 1000, width, 2, FEW) for width in (32, 64, 128, 256, 512)},
}


def main() -> None:
    """All rows, or those named; each in a process of its own, so that peak memory is its own. Rows already there are kept."""
    if sys.argv[1:2] == ["--row"]:
        with runtime.threads(1):
            print(json.dumps(ROWS[sys.argv[2]]()))
        return
    target = Path("results/bench/adaptive.json")
    rows: dict[str, Row] = json.loads(target.read_text())["rows"] if sys.argv[1:] and target.exists() else {}
    with runtime.threads(1):
        provenance = runtime.provenance("float64")
    for entry in sys.argv[1:] or ROWS:
        command = [sys.executable, __file__, "--row", entry]
        done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        rows[entry] = done
        print(
            f"{entry:14} n={done['n']} p={done['p']} {done['rounds']} rounds {done['seconds']:7.1f} s "
            f"{done['peak_megabytes']:6.0f} MB  {done['rate'] / 1e9:5.1f} Gflop/s  gap {done['relative_gap']}",
            flush=True,
        )
        ordered = {name: rows[name] for name in ROWS if name in rows}
        write_file(target, (json.dumps({"rows": ordered, "provenance": provenance}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
