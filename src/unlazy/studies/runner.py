"""Runs the cases of a study: one after the other, in several processes, or on a Dask cluster; with retries and a time limit."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from unlazy.runtime import InputError, UnlazyError

PR_SET_PDEATHSIG = 1
REPORT_SECONDS = 0.5  # between two progress reports


@dataclass(frozen=True)
class Task:
    """One call of the function given to :func:`run_tasks`. ``seconds``: how long it took before, if that is known."""

    name: str
    arguments: tuple[Any, ...]
    seconds: float | None = None


@dataclass
class Outcome:
    """The results and errors of the tasks by name, and the tasks that were not started for lack of time."""

    done: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, Exception] = field(default_factory=dict)
    not_started: list[str] = field(default_factory=list)


def run_tasks(
    function: Callable[..., Any],
    tasks: Sequence[Task],
    *,
    workers: int = 1,
    cluster: str | None = None,
    retries: int = 0,
    seconds: float | None = None,
    on_report: Callable[[Outcome], None] = lambda outcome: None,
    on_done: Callable[[str, Any], None] = lambda name, result: None,
) -> Outcome:
    """Call ``function(*task.arguments)`` for every task. An error ends its task (after ``retries`` more tries), not the others.

    ``seconds``: no task starts that would end later than this. ``on_report``: called now and then with what is done so far.
    ``on_done``: called with the name and result of every task that succeeds. If the calling process is killed, its workers die.
    """
    outcome, began = Outcome(), time.monotonic()
    tries = {task.name: 1 + retries for task in tasks}
    waiting = sorted(
        tasks, key=lambda task: -(task.seconds or 0)
    )  # long tasks first, so that no worker idles at the end

    def may_start(task: Task) -> bool:
        """Whether a task would end in time; one that would not counts as not started."""
        in_time = seconds is None or time.monotonic() - began + (task.seconds or 0) <= seconds
        if not in_time:
            outcome.not_started.append(task.name)
        return in_time

    def take_result(task: Task, result: Callable[[], Any]) -> None:
        """Store the result or error of a task; a failed task that has tries left goes to the end of the queue."""
        tries[task.name] -= 1
        try:
            outcome.done[task.name] = result()
        except Exception as error:
            if tries[task.name] > 0:
                waiting.append(task)
            else:
                outcome.failed[task.name] = KILLED if isinstance(error, BrokenProcessPool) else error
        else:
            on_done(task.name, outcome.done[task.name])

    if cluster is None and (workers <= 1 or len(tasks) <= 1):
        while waiting:
            task = waiting.pop(0)
            if may_start(task):
                take_result(task, partial(function, *task.arguments))
            on_report(outcome)
        return outcome
    while waiting:
        with _open_pool(cluster, min(workers, len(tasks))) as pool:
            running: dict[Any, Task] = {}
            while (waiting or running) and not pool.is_broken():
                while waiting and len(running) < pool.at_once:
                    if may_start(waiting[0]):
                        running[pool.submit(function, *waiting[0].arguments)] = waiting[0]
                    del waiting[0]
                for future in pool.wait_some(list(running)):
                    take_result(running.pop(future), future.result)
                on_report(outcome)
            for future, task in running.items():  # left over where a worker was killed
                take_result(task, future.result)
    return outcome


KILLED = UnlazyError("a worker was killed, perhaps for lack of memory; the same command goes on where it stopped.")


@dataclass(frozen=True)
class Pool:
    """Workers, local or on a cluster.

    ``submit``: starts a call. ``at_once``: how many calls run at the same time. ``wait_some``: waits briefly and returns the
    calls that have ended. ``is_broken``: whether a worker was killed.
    """

    submit: Callable[..., Any]
    at_once: int
    wait_some: Callable[[list[Any]], list[Any]]
    is_broken: Callable[[], bool] = lambda: False


@contextmanager
def _open_pool(cluster: str | None, workers: int) -> Iterator[Pool]:
    """Processes of this machine, or a Dask cluster."""
    if cluster is not None:
        from distributed import Client
        from distributed import wait as wait_dask

        try:
            client = Client(cluster)
        except (OSError, ValueError) as error:
            raise InputError(
                f"no Dask scheduler answers at {cluster} ({error}); start one with `dask scheduler`."
            ) from error
        with client:

            def wait_cluster(running: list[Any]) -> list[Any]:
                try:
                    return list(wait_dask(running, timeout=REPORT_SECONDS, return_when="FIRST_COMPLETED").done)
                except TimeoutError:
                    return []

            yield Pool(partial(client.submit, pure=False), max(1, sum(client.nthreads().values())), wait_cluster)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _die_with_parent) as pool:

        def wait_local(running: list[Any]) -> list[Any]:
            return list(wait(running, REPORT_SECONDS, FIRST_COMPLETED).done)

        try:
            yield Pool(pool.submit, workers, wait_local, lambda: bool(pool._broken))
        except BaseException:
            for process in list((pool._processes or {}).values()):
                process.terminate()
            pool.shutdown(cancel_futures=True)
            raise


def _die_with_parent() -> None:
    """Runs first in every worker process: when the parent is killed, the kernel kills the worker too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:  # the parent died before this worker could ask for that
        os._exit(1)
