"""Live mode: tells every open page which runs changed, by looking at file times twice a second."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from unlazy.runtime import StoreError
from unlazy.studio.openrun import Stamp, stamp_of
from unlazy.studio.shelf import Shelf

PAUSE = 0.5  # seconds between looks at all runs
PLAYING_PAUSE = 0.05  # and at the playground's own
QUIET = 15.0  # seconds after which a comment keeps the line open
MOST_READERS = 64

Event = tuple[str, dict[str, Any]]


class Watcher:
    """One look at the store serves all open pages; nobody listening, nothing is looked at."""

    def __init__(self, shelf: Shelf, playing: Callable[[], str | None] = lambda: None) -> None:
        self.shelf, self.playing = shelf, playing
        self._readers: set[asyncio.Queue[Event]] = set()
        self._task: asyncio.Task[None] | None = None
        self._seen: dict[str, tuple[Stamp, str]] = {}
        self._closed = False

    def is_full(self) -> bool:
        return len(self._readers) >= MOST_READERS

    async def stream(self, version: str) -> AsyncIterator[bytes]:
        """Server-sent events until the reader goes away."""
        queue: asyncio.Queue[Event] = asyncio.Queue(maxsize=500)
        if self._task is None or self._task.done():
            self._seen = await asyncio.to_thread(self._look)
            self._task = asyncio.create_task(self._watch())
        self._readers.add(queue)
        try:
            yield encode("hello", {"version": version})
            while not self._closed:
                try:
                    kind, data = await asyncio.wait_for(queue.get(), QUIET)
                except TimeoutError:
                    yield b": still here\n\n"
                else:
                    yield encode(kind, data)
        finally:
            self._readers.discard(queue)

    def close(self) -> None:
        """Send every listener away."""
        self._closed = True
        for queue in self._readers:
            if not queue.full():
                queue.put_nowait(("end", {}))

    async def _watch(self) -> None:
        while not self._closed:
            playing = self.playing()
            for _ in range(round(PAUSE / PLAYING_PAUSE) if playing else 0):
                await asyncio.sleep(PLAYING_PAUSE)
                self._tell(await asyncio.to_thread(self._changes, playing))
            if not playing:
                await asyncio.sleep(PAUSE)
            if not self._readers:
                self._task = None
                return
            self._tell(await asyncio.to_thread(self._changes))

    def _tell(self, events: list[Event]) -> None:
        for queue in self._readers:
            for event in events:
                if queue.full():
                    queue.get_nowait()  # a page that sleeps misses old news only
                queue.put_nowait(event)

    def _look(self, only: str | None = None) -> dict[str, tuple[Stamp, str]]:
        seen = {}
        if only is None:
            self.shelf.cards()  # together with a page that asks for the list, not beside it
        for key, folder in self.shelf.folders().items():
            if only in (None, key):
                try:
                    seen[key] = (stamp_of(folder), str(self.shelf.card(key, folder)["state"]))
                except StoreError:
                    seen[key] = (stamp_of(folder), "broken")
        return seen

    def _changes(self, only: str | None = None) -> list[Event]:
        """What is new since the last look: the list itself, and runs whose files or state changed."""
        before, now = self._seen, self._look(only)
        self._seen = now if only is None else before | now
        events: list[Event] = []
        if before.keys() != self._seen.keys():
            events.append(("runs", {"count": len(self._seen)}))
        events += [("run", self._news(key, seen[1])) for key, seen in now.items() if before.get(key) != seen]
        return events

    def _news(self, key: str, state: str) -> dict[str, Any]:
        try:
            step = self.shelf.card(key)["step"]
        except StoreError:
            step = None
        return {"key": key, "state": state, "step": step, "live": state == "running"}


def encode(kind: str, data: dict[str, Any]) -> bytes:
    """One event on the wire."""
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()
