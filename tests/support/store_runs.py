"""A tiny run written through the store, for the tests of the run folder."""

import json
from pathlib import Path

import numpy as np

from unlazy.store import Writer


def header(width: int = 3, started: str = "2024-01-01T00:00:00+00:00") -> dict:
    return {
        "kind": "train",
        "study": "tiny",
        "scale": None,
        "recipe": {"width": width},
        "members": [{"seed": 0}, {"seed": 1}],
        "model": None,
        "data": {"name": "none", "options": {}, "fingerprint": "0"},
        "provenance": {"started": started},
    }


def measure(writer: Writer, step: int, *, arrays: bool = False, checkpoint: bool = False) -> None:
    rng = np.random.default_rng(step)
    writer.record(
        step,
        {"loss": rng.random(2, dtype=np.float32)},
        {"a": rng.random((2, 4)), "b": rng.integers(9, size=(2, 3))} if arrays else None,
        {"model/w": rng.random((2, 5), dtype=np.float32), "random/order": np.arange(4)} if checkpoint else None,
    )


def small_run(folder: Path) -> Path:
    """Steps 0..3, arrays at even steps, checkpoints at 0 and 2; not finished."""
    with Writer(folder, header()) as writer:
        for step in range(4):
            measure(writer, step, arrays=step % 2 == 0, checkpoint=step % 2 == 0)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def timeless(metrics: bytes) -> list[dict]:
    """The metrics lines without their times."""
    return [{key: value for key, value in json.loads(line).items() if key != "time"} for line in metrics.splitlines()]
