"""Several trainings at once, one process each. Every training is its own run, so nothing is shared but the disk."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from unlazy.runtime import UnlazyError

PR_SET_PDEATHSIG = 1


def sweep(
    function: Callable[..., Any],
    jobs: Sequence[tuple[Any, ...]],
    workers: int,
    on_tick: Callable[[], None] = lambda: None,
    tick_seconds: float = 0.5,
) -> None:
    """Call ``function(*job)`` for every job, ``workers`` at a time; the first error stops the rest and is raised.

    ``on_tick`` is called about every ``tick_seconds`` meanwhile (progress is read from the run folders). When the
    calling process is killed its workers die with it, and their runs can be resumed.
    """
    if workers <= 1 or len(jobs) <= 1:
        for job in jobs:
            function(*job)
            on_tick()
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), context, _die_with_parent) as pool:
        pending = {pool.submit(function, *job) for job in jobs}
        try:
            while pending:
                finished, pending = wait(pending, tick_seconds, FIRST_COMPLETED)
                for future in finished:
                    future.result()
                on_tick()
        except BaseException as error:
            for future in pending:
                future.cancel()
            for process in list((pool._processes or {}).values()):
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise UnlazyError(
                    "a worker was killed, perhaps for lack of memory; the same command goes on where it stopped."
                ) from error
            raise


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:  # it died before we asked to die with it
        os._exit(1)
