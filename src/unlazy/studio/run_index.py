"""Finds all runs below a folder, lists them, and opens them by key. Writes nothing.

The key of a run is its path below the root. Keys are compared with the folders that a search has found, so that no path is
built from a request. Links out of the root are refused.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unlazy.run_card import describe_run
from unlazy.runtime import StoreError
from unlazy.store import Run, run_folders
from unlazy.studio.run_reader import RunReader, Stamp, check_files, stamp_of

PLAYGROUND = "~play"  # first part of the keys of playground runs
MOST_OPEN = 32


def newest_scalars(path: Path, window: int = 1 << 12) -> tuple[int, dict[str, list[float | None]]]:
    """Last step and newest value of every scalar, from the last ``window`` bytes of metrics.jsonl (more if needed)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = max(0, size - window)
            file.seek(start)
            pieces = file.read(size - start).split(b"\n")[:-1]  # a line without its newline is incomplete
    except FileNotFoundError:
        return 0, {}
    whole = pieces[1:] if start else pieces
    if not whole and start:
        return newest_scalars(path, 8 * window)
    step = 0
    latest: dict[str, list[float | None]] = {}
    try:
        for entry in json.loads(b"[%b]" % b",".join(whole)):  # one call for all lines: half the time of a long list
            step, latest = entry["step"], latest | entry["scalars"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path}: a measurement is damaged ({error!r}).") from error
    return step, latest


class RunIndex:
    """All runs below a folder and those of the playground; searched again at most once a second. ``only``: just these folders."""

    def __init__(self, root: str | Path, playground: Path | None = None, *, only: Sequence[Path] | None = None) -> None:
        self.root = Path(root).resolve()
        self._only = only
        self.playground = playground.resolve() if playground else None
        self._lock, self._listing = threading.Lock(), threading.Lock()
        self._folders: dict[str, Path] = {}
        self._walked = float("-inf")
        self._cards: dict[str, tuple[Stamp, dict[str, Any] | StoreError]] = {}
        self._open: dict[str, tuple[Stamp, RunReader]] = {}

    def folders(self) -> dict[str, Path]:
        """Key and folder of every run."""
        with self._lock:
            if time.monotonic() - self._walked > 1:
                there = run_folders(self.root) if self._only is None else self._only
                found = {self._key(folder): folder for folder in there}
                if self.playground:
                    played = {folder.relative_to(self.playground): folder for folder in run_folders(self.playground)}
                    found |= {f"{PLAYGROUND}/{key.as_posix()}": folder for key, folder in played.items()}
                self._folders = found
                self._walked = time.monotonic()
            return self._folders

    def _key(self, folder: Path) -> str:
        """The path of a run below the root; the name of the root, if the root is the run."""
        return self.root.name if folder == self.root else folder.relative_to(self.root).as_posix()

    def folder(self, key: str) -> Path:
        """The folder of a key; searches again for a playground run that has just begun."""
        found = self._folders.get(key) or self.folders().get(key)
        if found is None and key.startswith(f"{PLAYGROUND}/"):
            self._walked = float("-inf")
            found = self.folders().get(key)
        if found is None:
            raise StoreError(f"there is no run {key!r} here.")
        return found

    def allowed_root(self, key: str) -> Path:
        """The folder that no file of the run may link out of."""
        return self.playground if self.playground and key.startswith(f"{PLAYGROUND}/") else self.root

    def cards(self) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
        """One card per run, newest first, and the folders that cannot be read, with the reason."""
        cards, broken = [], []
        with self._listing:  # a second caller waits and finds the cards ready
            for key, folder in self.folders().items():
                try:
                    cards.append(self.card(key, folder))
                except StoreError as error:
                    broken.append({"folder": key, "error": str(error)})
        gone = self._cards.keys() - self._folders.keys()
        for key in gone:
            self._cards.pop(key, None)
        return sorted(cards, key=lambda card: (card["started"] or "", card["key"]), reverse=True), broken

    def card(self, key: str, folder: Path | None = None) -> dict[str, Any]:
        """The row of one run in the list; read again only when one of its files has changed."""
        folder = folder or self.folder(key)
        stamp, known = stamp_of(folder), self._cards.get(key)
        if known is None or known[0] != stamp:
            try:
                known = (stamp, _make_card(key, folder, self.allowed_root(key)))
            except StoreError as error:
                known = (stamp, error)
            except Exception as error:  # a damaged file may raise anything; the other runs must still be listed
                known = (stamp, StoreError(f"{key} is damaged ({error!r})."))
            self._cards[key] = known
        if isinstance(known[1], StoreError):
            raise known[1]
        if known[1]["state"] in ("running", "interrupted"):
            return known[1] | {"state": Run(folder).status()["state"]}  # a killed writer leaves no message
        return known[1]

    def open(self, key: str) -> RunReader:
        """The run of a key, with all its measurements; opened again when one of its files has changed."""
        folder = self.folder(key)
        stamp = stamp_of(folder)
        with self._lock:
            known = self._open.pop(key, None)
        if known is None or known[0] != stamp:
            known = (stamp, RunReader(key, folder, self.allowed_root(key), None if known is None else known[1]))
        with self._lock:
            self._open[key] = known
            while len(self._open) > MOST_OPEN:
                self._open.pop(next(iter(self._open)))
        return known[1]


def _make_card(key: str, folder: Path, root: Path) -> dict[str, Any]:
    check_files(folder, root)
    run = Run(folder)
    status, (step, latest) = run.status(), newest_scalars(folder / "metrics.jsonl")
    provenance = run.header["provenance"]
    return {
        "key": key,
        "id": run.id,
        "kind": str(run.header.get("kind") or "train"),
        "study": _text_or_none(run.header["study"]),
        "scale": _text_or_none(run.header["scale"]),
        "state": status["state"],
        "step": max(status["step"], step),
        "error": status["error"],
        "started": _text_or_none(provenance.get("started")) if isinstance(provenance, Mapping) else None,
        "members": len(run.members),
        "data": _data_words(run.header),
        "last": {name: _first_number(values) for name, values in latest.items()},
        **describe_run(run, latest),
    }


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)


def _first_number(values: Any) -> float | None:
    value = values[0] if isinstance(values, list) and values else values
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else None


def _data_words(header: Mapping[str, Any]) -> str:
    """The name of the data in a header."""
    data = header.get("data")
    return str(data.get("name", "unknown")) if isinstance(data, Mapping) else "unknown"
