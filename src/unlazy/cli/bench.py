"""``unlazy bench``: times kernels on this machine, against other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from unlazy import runtime
from unlazy.bench.kernels import describe_plan, format_row, row_names, run_rows
from unlazy.bench.peers import missing_peers
from unlazy.bench.tables import save_row


def bench_kernels(wanted: Sequence[str], out: Path, *, dry_run: bool) -> None:
    """Time the wanted rows and write them into the table; the other rows stay. ``dry_run``: only print the plans."""
    rows = row_names(wanted)
    if dry_run:
        for row in rows:
            typer.echo(f"{row}\n{describe_plan(row)}\n")
        return
    with runtime.threads(1):
        provenance = runtime.provenance("float32")
    for measured in run_rows(rows):
        typer.echo(format_row(measured))
        save_row(out, measured, provenance, ("workload", "mode"))
    for name, reason in missing_peers().items():
        typer.echo(f"{name}: {reason}")
    typer.echo(f"\nresults: {out}")
