"""A Dask scheduler and workers as on hosts of their own: sockets in common, and no folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from repository import ROOT

BLIND = """
import sys

def refuse(event, arguments):
    if event in ("open", "os.mkdir", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.chdir", "import"):
        if HIDDEN in " ".join(map(str, arguments)):
            raise FileNotFoundError(2, "not on this host")

sys.addaudithook(refuse)
"""


def start_host(folder: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """A process as on a host of its own: folders of its own for work, home and temporary files, nothing of ours on its path."""
    for name in ("work", "home", "temporary"):
        (folder / name).mkdir(parents=True)
    own = {"HOME": folder / "home", "TMPDIR": folder / "temporary", "PYTHONPATH": ROOT / "src", "OMP_NUM_THREADS": 1}
    environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([sys.executable, *words], cwd=folder / "work", env=environment, stderr=log)


def wait_for_address(log: Path) -> str:
    """The address that a scheduler writes to its log."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for line in log.read_text().splitlines():
            if "Scheduler at:" in line:
                return line.split()[-1]
        time.sleep(0.1)
    raise TimeoutError(log.read_text())


@contextmanager
def start_two_hosts(folder: Path, hidden: Path) -> Iterator[str]:
    """The address of a Dask scheduler with two workers, without a common folder; they can open no file below ``hidden``."""
    processes = []
    try:
        quiet = ["--host", "127.0.0.1", "--no-dashboard"]
        words = ["-m", "distributed.cli.dask_scheduler", *quiet, "--port", "0"]
        processes.append(start_host(folder / "s", words))
        address = wait_for_address(folder / "s" / "log")
        for name in ("a", "b"):
            blind = folder / f"{name}.py"
            blind.write_text(BLIND.replace("HIDDEN", repr(str(hidden))))
            words = ["-m", "distributed.cli.dask_worker", address, *quiet, "--nthreads", "1", "--no-nanny"]
            words += ["--preload", str(blind), "--local-directory", "scratch"]
            processes.append(start_host(folder / name, words))
        yield address
    finally:
        for process in processes:
            process.kill()
            process.wait()
