"""The memory that this process takes at its peak, as Linux counts it: no thread that watches, nothing missed under load."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

# Freed blocks go back to the system at once, so that the peak is what was held and not what the allocator kept.
ENVIRONMENT = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(Path(__file__).parent)}


def run_code(code: str, *arguments: object) -> str:
    """What Python code prints in a process of its own, where it may import this module."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


class PeakGrowth:
    """``with PeakGrowth() as peak: ...``, then ``peak.bytes``: how far the process grew at most inside the block.

    Freed memory that the allocator kept from before is given back first; otherwise the block could use it unseen.
    """

    bytes: int

    def __enter__(self) -> PeakGrowth:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the highest size so far becomes the present one
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.bytes = max(0, _status("VmHWM") - self._before)


def _status(name: str) -> int:
    with Path("/proc/self/status").open() as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))
