"""Trains playground networks in child processes: one trains, one waits with everything imported. Runs are temporary."""

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
from unlazy.studio.playground_child import PlaySettings
from unlazy.studio.run_index import PLAYGROUND

START_SECONDS = 60.0  # within which a child must have begun its run
MOST_RUNS = 5  # finished runs that stay on the page


class Playground:
    """Starts and stops playground trainings, and deletes their old runs."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="unlazy-play-", ignore_cleanup_errors=True)
        self.root = Path(self._place.name).resolve()
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: subprocess.Popen[bytes] | None = None  # has imported everything and waits for settings
        self._folder: Path | None = None
        self._errors = self.root / "child.log"
        self._closed = False

    def prepare(self) -> None:
        """Start a child that imports everything and waits, so that the next training starts at once."""
        with self._lock:
            self._waiting_child()

    def _waiting_child(self) -> subprocess.Popen[bytes]:
        """The child that waits for settings; starts one if there is none."""
        if self._closed:
            raise StoreError("the playground is closed.")
        waiting = self._waiting
        if waiting is None or waiting.poll() is not None:
            self._kill(waiting)
            errors = self.root / f"child-{secrets.token_hex(3)}.log"
            with errors.open("wb") as log:
                waiting = subprocess.Popen(
                    [sys.executable, "-m", "unlazy.studio.playground_child"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    cwd=self.root,
                )
            self._waiting, self._errors = waiting, errors
        return waiting

    def start(self, play: PlaySettings) -> str:
        """Train ``play`` in a child process, in place of whatever was running; returns the key of its run."""
        with self._lock:
            self._stop_training()
            self._delete_old()
            process, errors = self._waiting_child(), self._errors
            folder = self.root / f"{play.model}-{play.data}-{secrets.token_hex(3)}"
            self._process, self._folder, self._waiting = process, folder, None
            assert process.stdin is not None
            with suppress(OSError):  # a child that died at once is reported below
                process.stdin.write(json.dumps({"folder": str(folder), "play": asdict(play)}).encode() + b"\n")
                process.stdin.flush()  # and stays open: the child ends when it closes
        begun = time.monotonic()
        while not (folder / "run.json").exists():
            if process.poll() is not None or time.monotonic() - begun > START_SECONDS:
                lines = errors.read_text(errors="replace").strip().splitlines() if errors.exists() else []
                raise StoreError(f"the playground could not start: {lines[-1] if lines else 'it was stopped'}.")
            time.sleep(0.01)
        with self._lock:
            if self._process is process:
                self._waiting_child()  # for the next start
        return f"{PLAYGROUND}/{folder.name}"

    def current_run(self) -> str | None:
        """The key of the run in training; ``None`` if there is none."""
        process, folder = self._process, self._folder
        if process is None or folder is None or process.poll() is not None:
            return None
        return f"{PLAYGROUND}/{folder.name}"

    def stop(self) -> None:
        """Stop the training; its run stays on the page."""
        with self._lock:
            self._stop_training()

    def close(self) -> None:
        """Stop every child and delete all playground runs."""
        with self._lock:
            self._closed = True
            self._stop_training()
            self._kill(self._waiting)
            self._waiting = None
        self._place.cleanup()

    def _stop_training(self) -> None:
        process, self._process = self._process, None
        self._kill(process)

    def _kill(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is not None:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                with suppress(OSError):  # the child has closed its end
                    process.stdin.close()

    def _delete_old(self) -> None:
        """Delete all but the ``MOST_RUNS`` newest runs and logs."""
        there = (path for path in self.root.glob("[!.]*") if path.is_dir())
        runs = sorted(there, key=lambda path: path.stat().st_mtime)
        for old in runs[:-MOST_RUNS]:
            shutil.rmtree(old, ignore_errors=True)
        logs = sorted(self.root.glob("child-*.log"), key=lambda path: path.stat().st_mtime)
        for log in logs[:-MOST_RUNS]:
            log.unlink(missing_ok=True)
