"""Live updates: sends every open page an event when a run changes, by comparing file times twice a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from unlazy.runtime import StoreError
from unlazy.studio.answers import json_answer
from unlazy.studio.run_index import RunIndex
from unlazy.studio.run_reader import Stamp, stamp_of

PAUSE = 0.5  # seconds between two checks of all runs
PLAY_PAUSE = 0.05  # seconds between two checks of the run that the playground trains
QUIET = 15.0  # seconds without events after which a comment keeps the connection open
MOST_READERS = 64

Event = tuple[str, dict[str, Any]]


class Watcher:
    """Checks the runs once for all open pages, and only while a page is open. ``play``: key of the playground's current run."""

    def __init__(self, run_index: RunIndex, play: Callable[[], str | None] = lambda: None) -> None:
        self.run_index, self.play = run_index, play
        self._readers: set[asyncio.Queue[Event]] = set()
        self._task: asyncio.Task[None] | None = None
        self._known: dict[str, tuple[Stamp, str]] = {}
        self._closed = False

    def is_full(self) -> bool:
        """Whether no further page may listen."""
        return len(self._readers) >= MOST_READERS

    async def stream(self, version: str) -> AsyncIterator[bytes]:
        """Yield server-sent events until the page closes the connection."""
        queue: asyncio.Queue[Event] = asyncio.Queue(maxsize=500)
        if self._task is None or self._task.done():
            self._known = await asyncio.to_thread(self._states)
            self._task = asyncio.create_task(self._watch())
        self._readers.add(queue)
        try:
            yield encode_event("hello", {"version": version})
            while not self._closed:
                try:
                    kind, data = await asyncio.wait_for(queue.get(), QUIET)
                except TimeoutError:
                    yield b": still here\n\n"
                else:
                    yield encode_event(kind, data)
        finally:
            self._readers.discard(queue)

    def close(self) -> None:
        """End the stream of every page."""
        self._closed = True
        for queue in self._readers:
            if not queue.full():
                queue.put_nowait(("end", {}))

    async def _watch(self) -> None:
        while not self._closed:
            play = self.play()
            for _ in range(round(PAUSE / PLAY_PAUSE) if play else 0):
                await asyncio.sleep(PLAY_PAUSE)
                self._send(await asyncio.to_thread(self._changes, play))
            if not play:
                await asyncio.sleep(PAUSE)
            if not self._readers:
                self._task = None
                return
            self._send(await asyncio.to_thread(self._changes))

    def _send(self, events: list[Event]) -> None:
        for queue in self._readers:
            for event in events:
                if queue.full():
                    queue.get_nowait()  # a page that does not read loses the oldest events
                queue.put_nowait(event)

    def _states(self, only: str | None = None) -> dict[str, tuple[Stamp, str]]:
        """File stamp and state of every run, or of one."""
        seen = {}
        if only is None:
            self.run_index.cards()  # reads the cards under the same lock as a page that asks for the list
        for key, folder in self.run_index.folders().items():
            if only in (None, key):
                try:
                    seen[key] = (stamp_of(folder), str(self.run_index.card(key, folder)["state"]))
                except StoreError:
                    seen[key] = (stamp_of(folder), "broken")
        return seen

    def _changes(self, only: str | None = None) -> list[Event]:
        """Events since the last check: a changed list, and runs whose files or state changed."""
        before, now = self._known, self._states(only)
        self._known = now if only is None else before | now
        events: list[Event] = []
        if before.keys() != self._known.keys():
            events.append(("runs", {"count": len(self._known)}))
        events += [("run", self._run_event(key, seen[1])) for key, seen in now.items() if before.get(key) != seen]
        return events

    def _run_event(self, key: str, state: str) -> dict[str, Any]:
        try:
            card = self.run_index.card(key)
        except StoreError:
            card = None
        return {"key": key, "state": state, "step": card and card["step"], "live": state == "running", "card": card}


def encode_event(kind: str, data: dict[str, Any]) -> bytes:
    """One server-sent event as bytes."""
    return f"event: {kind}\ndata: ".encode() + json_answer(data).body + b"\n\n"
