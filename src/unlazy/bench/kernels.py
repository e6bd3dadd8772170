"""Tangent kernels: ours against the peers, on one core, in one run.

A peer that would take too long runs on fewer samples; the ratio always compares equal numbers of samples, both measured.
"limit" = least counted operations over the best matrix-product rate measured in the same run. Both sides are timed with an
allocator that keeps what was freed (the peer gains more from it), and weighed with the allocator as it comes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unlazy import runtime
from unlazy.bench.peers import Peer, hand_written, is_dense_chain, missing_peers, peers
from unlazy.bench.timing import best_seconds, gemm_rate, seconds_once
from unlazy.bench.workloads import WORKLOADS
from unlazy.kernels.tangent import plan_tangent, tangent_kernel
from unlazy.kernels.tangent_engine import TangentKernel
from unlazy.runtime import UnlazyError, require

Row = dict[str, Any]
KEEP_FREED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}  # read by glibc when a process starts


def least_operations(model: nn.Module, shape: tuple[int, ...], n: int, mode: str) -> float:
    """Forward, one backward of inputs per direction, and the cheaper pairing per weight, each pair of samples once.

    Counted are products with weights; norms, activations and what attention pairs are not.
    """
    x = torch.zeros(1, *shape)
    kernel = TangentKernel(model.eval(), x)
    with kernel.ready():
        out, taps = kernel._forward(x)
    outputs = 1 if mode == "sum" else out.shape[1]
    pairs, blocks = n * (n + 1) / 2, outputs if mode == "trace" else outputs**2
    positions: dict[nn.Module, int] = {}
    for tap in taps:
        t = tap.output.numel() // tap.output.shape[1 if tap.output.ndim == 4 else -1]
        positions[tap.module] = positions.get(tap.module, 0) + t
    total = 0.0
    for index, (module, t) in enumerate(positions.items()):
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim < 2:
            continue
        m, d = weight.shape[0], weight[0].numel()
        total += n * 2 * t * m * d * (1 + (outputs if index else 0))
        by_rows = n * outputs * 2 * t * m * d + pairs * 2 * blocks * m * d
        by_positions = pairs * 2 * t * t * (d + blocks * m)
        total += by_positions if t == 1 else min(by_rows, by_positions)
    return total


def measure(name: str, mode: str, rate: float) -> Row:
    """Seconds of ours at full size, and of ours and every peer at an equal number of samples."""
    model, x, few = _build_workload(name, mode)
    row: Row = {"workload": name, "mode": mode, "n": len(x), "gemm_rate": rate}
    row["seconds"] = best_seconds(partial(tangent_kernel, model, x, outputs=mode), 2.0)
    row["error"] = _relative_error(model, x[: min(24, few)], mode)
    by_hand = hand_written if is_dense_chain(model) else None
    row["difference"] = _check_equality(model, x[: min(24, few)], mode, by_hand)
    row["limit_seconds"] = least_operations(model, tuple(x.shape[1:]), len(x), mode) / rate
    row["times_limit"] = row["seconds"] / row["limit_seconds"]
    row |= {"peer_n": few, "peers": {}, "peer_chunks": {}, "missing": missing_peers()}
    ours = best_seconds(partial(tangent_kernel, model, x[:few], outputs=mode), 1.0)
    for label, peer in peers(model, few).items():
        row["peer_chunks"][label] = _best_chunk(peer, model, x[:few], mode, WORKLOADS[name].chunk)
        row["peers"][label] = seconds_once(partial(peer, model, x[:few], mode, row["peer_chunks"][label]))
    row["peer"] = min(row["peers"], key=row["peers"].__getitem__)
    row["peer_seconds"] = row["peers"][row["peer"]]
    row["times_faster"] = row["peer_seconds"] / ours
    if by_hand is not None:
        row["hand_seconds"] = best_seconds(partial(by_hand, model, x, mode, 0), 1.0)
        row["times_hand"] = row["hand_seconds"] / row["seconds"]
    return row


def measure_memory(name: str, mode: str, label: str, chunk: int) -> float:
    """Megabytes by which the process grows for one kernel of ``peer_n`` samples; ``label``: ours, or a peer's name."""
    model, x, few = _build_workload(name, mode)

    def ours(model: nn.Module, x: Tensor, mode: str, _: int) -> Tensor:
        return tangent_kernel(model, x, outputs=mode)

    function = ours if label == "ours" else peers(model, few)[label]
    function(model, x[:2], mode, chunk)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    function(model, x[:few], mode, chunk)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def _build_workload(name: str, mode: str) -> tuple[nn.Module, Tensor, int]:
    work = WORKLOADS[name]
    torch.manual_seed(0)
    return work.make().eval(), torch.randn(work.n, *work.shape), work.peer_n[mode]


def _relative_error(model: nn.Module, x: Tensor, mode: str) -> float:
    exact = tangent_kernel(model, x, outputs=mode, precision="float64")
    return float((tangent_kernel(model, x, outputs=mode).double() - exact).norm() / exact.norm())


def _check_equality(model: nn.Module, x: Tensor, mode: str, by_hand: Peer | None) -> float:
    """Largest relative difference from what the peers compute; raises if it is more than rounding."""
    ours, worst = tangent_kernel(model, x, outputs=mode), 0.0
    others = [*peers(model, len(x)).values(), *([by_hand] if by_hand is not None else [])]
    for peer in others:
        found = peer(model, x, mode, len(x))
        worst = max(worst, float((found - ours).norm() / ours.norm()))
    require(worst < 1e-3, f"the kernels of two programs differ by {worst:.1e} of their size; nothing is timed.")
    return worst


def _best_chunk(peer: Peer, model: nn.Module, x: Tensor, mode: str, chunk: int) -> int:
    """The fastest of three, tried on few samples, which also warms the peer up."""
    some = x[: min(len(x), 4 * chunk)]
    return min(
        (chunk, 2 * chunk, 4 * chunk), key=lambda size: best_seconds(partial(peer, model, some, mode, size), 0.0)
    )


# --- rows ----------------------------------------------------------------------------------------------------


def row_names(wanted: Sequence[str] = ()) -> list[str]:
    """``a:full`` and the like; all of them unless some are named, a letter alone means all its modes."""
    every = [f"{name}:{mode}" for name, work in WORKLOADS.items() for mode in work.peer_n]
    if not wanted:
        return every
    found = [row for name in wanted for row in every if name in (row, row.split(":")[0])]
    unknown = [name for name in wanted if name not in every and name not in WORKLOADS]
    require(not unknown, f"there is no benchmark {', '.join(unknown)}; there are {', '.join(every)}.")
    return found


def describe_plan(row: str) -> str:
    """The plan of a row as text: method per layer, tiles, memory, least operations."""
    name, mode = row.split(":")
    work = WORKLOADS[name]
    model, x = work.make(), torch.zeros(work.n, *work.shape)
    operations = least_operations(model, work.shape, work.n, mode)
    return f"{plan_tangent(model, x, outputs=mode)}\n  least operations: {operations:.3g}"


def run_rows(rows: Sequence[str]) -> Iterator[Row]:
    """Each row in a process of its own, so that peak memory is its own; a chunked peer is weighed in one piece too."""
    for name in rows:
        row: Row = _run_in_subprocess(name, environment=KEEP_FREED)
        row["megabytes"] = _run_in_subprocess(name, "ours", 0)
        row["peer_megabytes"] = _run_in_subprocess(name, row["peer"], row["peer_chunks"][row["peer"]])
        if WORKLOADS[row["workload"]].weigh_unchunked:
            row["peer_megabytes_unchunked"] = _run_in_subprocess(name, row["peer"], row["peer_n"])
        yield row


def _run_in_subprocess(*arguments: str | int, environment: Mapping[str, str] | None = None) -> Any:
    command = [sys.executable, "-m", "unlazy.bench.kernels", *(str(argument) for argument in arguments)]
    around = os.environ | (environment or {})
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=around)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnlazyError(f"benchmark {arguments[0]} failed: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def format_row(row: Row) -> str:
    """One line of text for a row."""
    return (
        f"{row['workload']} {row['mode']:5} {row['seconds']:8.4f} s  error {row['error']:.0e}  "
        f"{row['times_limit']:4.2f} x limit  {row['times_faster']:7.1f} x {row['peer']} "
        f"({row['megabytes']:.0f} MB, peer {row['peer_megabytes']:.0f} MB, n={row['peer_n']})"
    )


if __name__ == "__main__":
    name, mode = sys.argv[1].split(":")
    with runtime.threads(1):
        if sys.argv[2:]:
            answer: Any = measure_memory(name, mode, sys.argv[2], int(sys.argv[3]))
        else:
            answer = measure(name, mode, gemm_rate())
        sys.stdout.write(json.dumps(answer) + "\n")
