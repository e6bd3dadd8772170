"""Where a scope writes: a run folder that goes on where an earlier scope stopped, or nowhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from unlazy.runtime import StoreError
from unlazy.store import Run, Writer


class Keeper(Writer):
    """The writer of a scope's folder. A scope has no say in the user's training, so nothing it saw is ever measured again:
    opening the folder once more keeps all complete measurements and goes on behind them, finished or not.
    """

    def _resume(self, wanted: str) -> tuple[int, dict[str, Any]] | None:
        run = Run(self.folder)
        if run.id != wanted:
            raise StoreError(
                f"{self.folder} holds another scope ({run.id}, not {wanted}): another model, probe set or choice of views. "
                "Choose another folder."
            )
        lines = run.lines
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists():
            os.truncate(metrics, lines[-1].end if lines else 0)
        named = {self.folder / "arrays" / f"{name}.npy" for line in lines for name in line.arrays.values()}
        named |= {self.folder / "checkpoints" / f"{line.checkpoint}.safetensors" for line in lines if line.checkpoint}
        self._sweep(named)
        return (lines[-1].step, {}) if lines else None


def earlier(folder: Path, wanted: str) -> Run | None:
    """The run of an earlier scope with the same recipe that got as far as its first measurement, if there is one."""
    if not (folder / "run.json").exists():
        return None
    run = Run(folder)
    return run if run.id == wanted and run.lines else None
