"""``unlazy bench``: what a kernel costs here, beside what others take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from unlazy import runtime
from unlazy.bench.kernels import plan_of, row_names, run_rows, text_of
from unlazy.bench.peers import missing
from unlazy.bench.tables import save_row


def bench_kernels(wanted: Sequence[str], out: Path, *, dry_run: bool) -> None:
    """Time the rows wanted, or only say what they would do; rows of the table that are not wanted stay as they are."""
    rows = row_names(wanted)
    if dry_run:
        for row in rows:
            typer.echo(f"{row}\n{plan_of(row)}\n")
        return
    with runtime.threads(1):
        provenance = runtime.provenance("float32")
    for measured in run_rows(rows):
        typer.echo(text_of(measured))
        save_row(out, measured, provenance, ("workload", "mode"))
    for name, reason in missing().items():
        typer.echo(f"{name}: {reason}")
    typer.echo(f"\nresults: {out}")
