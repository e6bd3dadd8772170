"""The playground's side in the server: one child trains, one waits for its turn, in a folder that goes away with the server."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Lock

from unlazy.runtime import StoreError
from unlazy.studio.shelf import PLAYGROUND
from unlazy.studio.trainer import Play

PATIENCE = 60.0  # seconds until the child must have begun its run
KEPT = 5  # finished plays that can still be looked at


class Playground:
    """Starts, stops and forgets playground trainings."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="unlazy-play-", ignore_cleanup_errors=True)
        self.root = Path(self._place.name).resolve()
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: subprocess.Popen[bytes] | None = None  # has imported everything and knows no settings yet
        self._folder: Path | None = None
        self._errors = self.root / "child.log"
        self._closed = False

    def prepare(self) -> None:
        """Keep one child waiting, so that a start need not wait for its imports; it takes no processor time."""
        with self._lock:
            self._prepare()

    def _prepare(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise StoreError("the playground is closed.")
        waiting = self._waiting
        if waiting is None or waiting.poll() is not None:
            self._dismiss(waiting)
            errors = self.root / f"child-{secrets.token_hex(3)}.log"
            with errors.open("wb") as log:
                waiting = subprocess.Popen(
                    [sys.executable, "-m", "unlazy.studio.trainer"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    cwd=self.root,
                )
            self._waiting, self._errors = waiting, errors
        return waiting

    def start(self, play: Play) -> str:
        """Train ``play`` in a child process, in place of whatever was running; returns the key of its run."""
        with self._lock:
            self._end()
            self._forget()
            process, errors = self._prepare(), self._errors
            folder = self.root / f"{play.model}-{play.data}-{secrets.token_hex(3)}"
            self._process, self._folder, self._waiting = process, folder, None
            assert process.stdin is not None
            with suppress(OSError):  # if it died at once, that is told below
                process.stdin.write(json.dumps({"folder": str(folder), "play": asdict(play)}).encode() + b"\n")
                process.stdin.flush()  # and stays open: its end is the child's end
        begun = time.monotonic()
        while not (folder / "run.json").exists():
            if process.poll() is not None or time.monotonic() - begun > PATIENCE:
                words = errors.read_text(errors="replace").strip().splitlines() if errors.exists() else []
                raise StoreError(f"the playground could not start: {words[-1] if words else 'it was stopped'}.")
            time.sleep(0.01)
        with self._lock:
            if self._process is process:
                self._prepare()  # for the next start
        return f"{PLAYGROUND}/{folder.name}"

    def playing(self) -> str | None:
        """The key of the run that is being trained, if one is."""
        process, folder = self._process, self._folder
        if process is None or folder is None or process.poll() is not None:
            return None
        return f"{PLAYGROUND}/{folder.name}"

    def stop(self) -> None:
        """End the training; its run stays to be looked at."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """End every child and delete everything it made."""
        with self._lock:
            self._closed = True
            self._end()
            self._dismiss(self._waiting)
            self._waiting = None
        self._place.cleanup()

    def _end(self) -> None:
        process, self._process = self._process, None
        self._dismiss(process)

    def _dismiss(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is not None:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                with suppress(OSError):  # a broken pipe: nobody reads it any more
                    process.stdin.close()

    def _forget(self) -> None:
        """Keep the newest few runs only."""
        there = (path for path in self.root.glob("[!.]*") if path.is_dir())
        runs = sorted(there, key=lambda path: path.stat().st_mtime)
        for old in runs[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        logs = sorted(self.root.glob("child-*.log"), key=lambda path: path.stat().st_mtime)
        for log in logs[:-KEPT]:
            log.unlink(missing_ok=True)
            old.with_name(f"{old.name}.log").unlink(missing_ok=True)
