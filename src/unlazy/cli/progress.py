"""Progress: bars on a terminal, else a plain line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, int, int], None]
PLAIN_SECONDS = 10.0


@contextmanager
def report_progress() -> Iterator[Report]:
    """Yield a function ``report(what, done, total)``; each new ``what`` gets its own bar."""
    if not sys.stderr.isatty():
        yield _plain_lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        """Shows how many items are done per second."""

        def render(self, task: Task) -> Text:
            """The text of the column; empty until the speed is known."""
            return Text(f"{task.speed:.3g}/s" if task.speed else "")

    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bars: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done)

        yield report


def _plain_lines() -> Report:
    """A report function that prints a line every ``PLAIN_SECONDS``."""
    last: dict[str, tuple[float, int]] = {}

    def report(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        when, before = last.get(what, (-PLAIN_SECONDS, -1))
        if done != before and (done == total or now - when >= PLAIN_SECONDS):
            last[what] = now, done
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)  # noqa: T201

    return report
