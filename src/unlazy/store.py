"""Runs on disk: plain files that stay readable when the writer is killed at any moment.

A run folder holds one training, possibly a stack of members::

    run.json       written once: format, id, kind, study, scale, recipe, members, model, data, provenance
    status.json    replaced: {state: running|finished|failed|interrupted, step, error}
    labels.json    replaced: {tags, notes}, which people may change at any time
    lock           held (flock) by the writer; the kernel frees it when the writer dies
    metrics.jsonl  one line a measurement: {step, time, scalars, arrays, checkpoint, checksum (SHA-256 of the checkpoint)}
    arrays/QUANTITY/STEP8.npy       first axis = member; written once
    checkpoints/STEP8.safetensors   model/NAME, optim/NAME/SLOT, random/STREAM

Readers ignore an array or a checkpoint until a metrics line names it, and a last line without its newline.
Nothing is pickled. The store knows no model: it keeps specs and files.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from unlazy.curves import plot_curves
from unlazy.run_card import describe_run, html_card, read_verdict
from unlazy.run_comparison import RunComparison, compare, last_medians, latest_scalars
from unlazy.runtime import StoreError, canonical_json, require, short_hash, warn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMAT = 1
MOST_BYTES = 2**26  # of run.json and other files that are read whole
Text, Nothing = str, type(None)
HEADER: dict[str, Any] = {  # what run.json holds, and of which kind
    "id": Text,
    "recipe": dict,
    "members": list,
    "study": (Text, Nothing),
    "scale": (Text, Nothing),
    "provenance": dict,
}
MAY_HAVE: dict[str, Any] = {"config": (dict, Nothing), "data": (dict, Nothing), "kind": (Text, Nothing)}
MOST_FOLDERS = 50_000  # searched for runs
FILES = ("metrics.jsonl", "verdict.json", "labels.json", "status.json", "lock", "run.json")
MOST_TAGS, LONGEST_TAG, LONGEST_NOTES = 50, 60, 10_000
INTERRUPTIONS = (KeyboardInterrupt, SystemExit)  # somebody stopped the training; nothing was wrong with it
Tensors = Mapping[str, NDArray[Any]]
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_held_locks: set[int] = set()  # descriptors of the locks of this process


# --- bytes ---------------------------------------------------------------------------------------


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``. Every write of the store goes through here; tests replace it to simulate crashes and full disks."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically: a temporary file in the same folder, flushed to disk, then renamed; then flush the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _make_folder(path.parent)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoreError(
            f"could not write {path}: {error.strerror}. Free some space or choose another folder."
        ) from error


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk: until then a power cut may undo a rename, although the file was flushed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems flush no folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, and flush the names of the new ones."""
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in new:
        flush_folder(one.parent)


def _append_line(path: Path, line: str, *, durable: bool) -> None:
    """Append a line; if that fails, the file ends with its last complete line again. ``durable``: flush to disk."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            length = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, line.encode() + b"\n")
                if durable:
                    os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, length)  # shrinking needs no space
                raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError(
            f"could not write {path}: {error.strerror}. The run is intact; free some space and start it again."
        ) from error


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def read_bytes(path: Path) -> bytes:
    """The bytes of a plain file; raises ``StoreError`` for pipes and devices, which could make the reader wait for ever."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise StoreError(f"{path} cannot be read: it is not a plain file.")
            return file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


def parse_json(raw: bytes) -> Any:
    """The value of JSON; raises ``ValueError`` if it is none, too deep, or holds text that no terminal can show."""
    try:
        value = json.loads(raw)
        if b"\\ud" in raw.lower():  # half of a character, written as an escape
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _read_json(path: Path, most: int = MOST_BYTES) -> Any:
    try:
        raw = read_bytes(path)
        if len(raw) > most:
            raise StoreError(f"{path} has {len(raw)} bytes, more than any such file; the run is damaged.")
        return parse_json(raw)
    except FileNotFoundError:
        raise StoreError(f"{path.parent} is not a run: it has no {path.name}.") from None
    except ValueError as error:
        raise StoreError(f"{path} cannot be read as JSON ({error}); the run is damaged.") from error


# --- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One measurement: the step, its per-member scalars, and the files it names."""

    step: int
    scalars: dict[str, list[float | None]]
    arrays: dict[str, str]
    checkpoint: str | None
    end: int  # offset in metrics.jsonl just behind this line
    checksum: str | None = None  # SHA-256 of the checkpoint; runs of older versions have none


class Run:
    """Reads a run folder; raises ``StoreError`` if the folder is no run."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise StoreError(f"{self.folder} is not a run: there is no such folder. `unlazy runs` lists the runs.")
        self.header: dict[str, Any] = _read_json(self.folder / "run.json")
        if not isinstance(self.header, dict) or self.header.get("format") != FORMAT:
            raise StoreError(f"{self.folder / 'run.json'} is not a run of format {FORMAT}; something else wrote it.")
        missing = HEADER.keys() - self.header.keys()
        if missing:
            raise StoreError(f"{self.folder / 'run.json'} is damaged: it lacks {', '.join(sorted(missing))}.")
        wrong = [name for name, kinds in (HEADER | MAY_HAVE).items() if not isinstance(self.header.get(name), kinds)]
        wrong += [] if wrong or all(isinstance(one, dict) for one in self.header["members"]) else ["members"]
        if wrong:
            raise StoreError(
                f"{self.folder / 'run.json'} is damaged: {', '.join(wrong)} of another kind than expected."
            )

    @property
    def id(self) -> str:
        """12 hex digits of the hash of the recipe."""
        return str(self.header["id"])

    @property
    def members(self) -> list[dict[str, Any]]:
        """Settings of every member, such as ``{seed, lr, beta}``."""
        return list(self.header["members"])

    def status(self) -> dict[str, Any]:
        """``{state, step, error}``; state is running, finished, failed, or interrupted (by Ctrl-C, or its writer died)."""
        path = self.folder / "status.json"
        status: dict[str, Any] = _read_json(path) if path.exists() else {"state": "running", "step": 0, "error": None}
        whole = isinstance(status, dict) and status.keys() == {"state", "step", "error"}
        kinds: dict[str, Any] = {"state": str, "step": int, "error": (str, Nothing)}
        if not whole or not all(isinstance(status[name], kind) for name, kind in kinds.items()):
            raise StoreError(f"{path} is damaged: it should hold state, step and error.")
        if status["state"] == "running" and not _is_locked(self.folder / "lock"):
            status["state"] = "interrupted"
        return status

    @property
    def labels(self) -> dict[str, Any]:
        """``{tags, notes}`` as people last wrote them; no tags and an empty note if labels.json is missing or damaged."""
        try:
            found = _read_json(self.folder / "labels.json")
            return {"tags": parse_tags(found["tags"]), "notes": parse_notes(found["notes"])}
        except (StoreError, ValueError, KeyError, TypeError):
            return {"tags": [], "notes": ""}

    def set_labels(self, *, tags: Iterable[str] | None = None, notes: str | None = None) -> dict[str, Any]:
        """Replace the tags, the notes or both, also while the run is written; returns the labels as they are now."""
        labels = self.labels
        if tags is not None:
            labels["tags"] = parse_tags(tags)
        if notes is not None:
            labels["notes"] = parse_notes(notes)
        write_file(self.folder / "labels.json", _json_bytes(labels))
        return labels

    def delete(self) -> list[Path]:
        """Delete the run; returns what is left of its folder: files that unlazy did not write are kept.

        Raises ``StoreError`` if the run is being written, or if its path leads through a symbolic link.
        """
        real = self.folder.resolve()
        if real != self.folder.absolute():
            raise StoreError(f"{self.folder} leads through a link and is not deleted. The run itself is {real}.")
        lock = _lock_or_raise(self.folder)
        try:
            for name in ("arrays", "checkpoints"):
                if (self.folder / name).is_symlink():
                    (self.folder / name).unlink()
                elif (self.folder / name).exists():
                    shutil.rmtree(self.folder / name)
            hidden = self.folder.glob(".*.tmp")
            for path in [
                *hidden,
                *(self.folder / name for name in FILES),
            ]:  # run.json last: until then it can be repeated
                path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{self.folder} could not be deleted: {error.strerror} ({error.filename}).") from error
        finally:
            _release_lock(lock)
        left = sorted(self.folder.iterdir())
        if not left:
            self.folder.rmdir()
        return left

    @cached_property
    def lines(self) -> list[Line]:
        """All complete measurements, in the order of writing. Read once; open the run again for newer ones."""
        return read_lines(self.folder / "metrics.jsonl")

    def scalars(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps ``[T]`` and values ``[T, members]`` of one scalar, where it was recorded."""
        found = [(line.step, line.scalars[name]) for line in self.lines if name in line.scalars]
        if not found:
            known = sorted({key for line in self.lines for key in line.scalars})
            raise StoreError(f"{self.folder} has no scalar {name!r}; it has: {', '.join(known) or 'none yet'}.")
        steps, values = zip(*found, strict=True)
        return np.array(steps), np.array(values, dtype=np.float64)  # null (not a number) becomes nan

    def curve(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """As ``scalars``, but empty where the number was never recorded."""
        if any(name in line.scalars for line in self.lines):
            return self.scalars(name)
        return np.empty(0, dtype=np.int64), np.empty((0, len(self.members)))

    def plot(self, panel: str | None = None, *, ax: Axes | None = None) -> Figure:
        """A matplotlib figure of the run: loss, gap, kernels and parameters over the steps, with the phases of its verdict.

        ``panel``: only that panel, or the name of any scalar. ``ax``: draw the panel (default: the loss) there.
        """
        phases = (read_verdict(self.folder) or {}).get("phases") or ()
        return plot_curves({"": self.curve}, panel, ax=ax, phases=phases)

    @staticmethod
    def compare(runs: Sequence[Run | str | Path]) -> RunComparison:
        """Runs side by side: verdicts, the settings that differ, last numbers, curves. ``runs``: open runs or folders.

        >>> print(Run.compare(["runs/a", "runs/b"]))  # doctest: +SKIP
        >>> Run.compare(find_runs("runs")[0]).to_frame().sort_values("loss")  # doctest: +SKIP
        """
        return compare([run if isinstance(run, Run) else Run(run) for run in runs])

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}: {self.status()['state']}, {len(self.lines)} measurements)"

    def _repr_html_(self) -> str:
        about, status = describe_run(self, latest_scalars(self)), self.status()
        rows = [("state", f"{status['state']}, step {max([status['step'], *(line.step for line in self.lines)])}")]
        rows += [(name, about[name]) for name in ("model", "gap", "notes") if about[name] not in (None, "")]
        rows += [("tags", ", ".join(about["tags"]))] if about["tags"] else []
        rows += [(name, "-" if value is None else str(value)) for name, value in about["config"].items()]
        rows += [(name, f"{value:.4g}") for name, value in last_medians(self).items() if "@" not in name]
        return html_card(str(self.folder), about["verdict"], rows)

    def array_steps(self, quantity: str) -> list[int]:
        """The steps at which ``quantity`` was stored."""
        return [line.step for line in self.lines if quantity in line.arrays]

    def array(self, quantity: str, step: int) -> NDArray[Any]:
        """One stored array; first axis = member."""
        for line in self.lines:
            if line.step == step and quantity in line.arrays:
                path = self.folder / "arrays" / f"{line.arrays[quantity]}.npy"
                try:
                    with path.open("rb") as file:
                        return np.asarray(np.load(file, allow_pickle=False))
                except (OSError, ValueError, EOFError) as error:
                    raise StoreError(f"{path} is missing or damaged ({error}).") from error
        steps = self.array_steps(quantity)
        if steps:
            raise StoreError(f"{self.folder} has no {quantity!r} at step {step}; steps: {steps}.")
        known = sorted({name for line in self.lines for name in line.arrays})
        raise StoreError(f"{self.folder} has no array {quantity!r}; it has: {', '.join(known) or 'none yet'}.")

    def last_checkpoint(self) -> tuple[int, dict[str, NDArray[Any]]] | None:
        """Step and tensors of the newest checkpoint that is not damaged, or ``None`` if there is none.

        Warns about every newer one that is damaged. Raises ``StoreError`` if all are.
        """
        found = self._last_whole_checkpoint()
        return None if found is None else (found[0].step, found[1])

    def _last_whole_checkpoint(self) -> tuple[Line, dict[str, NDArray[Any]]] | None:
        """The line and the tensors of the newest checkpoint that is not damaged."""
        named = [line for line in self.lines if line.checkpoint is not None]
        for line in reversed(named):
            try:
                tensors = self._load_checkpoint(line)
            except StoreError as error:
                if line is named[0]:
                    raise StoreError(
                        f"{error} No other one is whole: delete {self.folder} to train from the start."
                    ) from error
                warn(f"{error} The one before it is used.")
            else:
                return line, tensors
        return None

    def checkpoint(self, step: int) -> dict[str, NDArray[Any]]:
        """The tensors of the checkpoint at ``step``."""
        checkpoints = {line.step: line for line in self.lines if line.checkpoint is not None}
        if step not in checkpoints:
            raise StoreError(f"{self.folder} has no checkpoint at step {step}; steps: {sorted(checkpoints)}.")
        return self._load_checkpoint(checkpoints[step])

    def _load_checkpoint(self, line: Line) -> dict[str, NDArray[Any]]:
        path = self.folder / "checkpoints" / f"{line.checkpoint}.safetensors"
        try:
            content = path.read_bytes()
            if line.checksum is not None and hashlib.sha256(content).hexdigest() != line.checksum:
                raise StoreError(f"{path} is damaged: its checksum does not match.")
            return dict(safetensors.numpy.load(content))
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{path} is missing or truncated ({error}).") from error


def parse_tags(tags: Iterable[str]) -> list[str]:
    """The tags without spaces around them and without repeats; raises ``InputError`` if they are not a list of short texts."""
    require(not isinstance(tags, str), f"tags must be a list of texts, got the text {tags!r}: write [{tags!r}].")
    kept = list(dict.fromkeys(tag.strip() if isinstance(tag, str) else tag for tag in tags))
    for tag in kept:
        short = isinstance(tag, str) and 0 < len(tag) <= LONGEST_TAG and tag.isprintable()
        require(short, f"a tag must be a text of 1 to {LONGEST_TAG} printable characters, got {tag!r}.")
    require(len(kept) <= MOST_TAGS, f"a run has at most {MOST_TAGS} tags, got {len(kept)}.")
    return kept


def parse_notes(notes: str) -> str:
    """The notes; raises ``InputError`` if they are not a text of at most 10,000 characters."""
    fits = isinstance(notes, str) and len(notes) <= LONGEST_NOTES
    require(fits, f"notes must be a text of at most {LONGEST_NOTES} characters, got {type(notes).__name__}.")
    return notes


def read_lines(path: Path) -> list[Line]:
    """Parse ``metrics.jsonl``; ignores a last line without its newline, which is incomplete."""
    try:
        text = read_bytes(path)
    except FileNotFoundError:
        return []
    lines, offset = [], 0
    for number, raw in enumerate(text.split(b"\n")[:-1], 1):
        offset += len(raw) + 1
        try:
            lines.append(parse_line(raw, offset))
        except ValueError as error:
            raise StoreError(f"{path}, line {number}, is damaged ({error}).") from error
    return lines


def parse_line(raw: bytes, end: int) -> Line:
    """The measurement of one line that ends at this offset; raises ``ValueError`` if it is none."""
    entry = parse_json(raw)
    if not isinstance(entry, dict):
        raise ValueError("it is not a mapping")
    missing = {"step", "scalars", "arrays", "checkpoint"} - entry.keys()
    if missing:
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    step, scalars, arrays, checkpoint = (entry[name] for name in ("step", "scalars", "arrays", "checkpoint"))
    if type(step) is not int or not isinstance(scalars, dict) or not isinstance(arrays, dict):
        raise ValueError("step, scalars or arrays are of another kind")
    for name, values in scalars.items():
        if type(values) is not list or not all(type(value) in (float, int, Nothing) for value in values):
            raise ValueError(f"{name} is not a list of numbers")
    names = [*arrays.values(), *(name for name in (checkpoint, entry.get("checksum")) if name is not None)]
    if not all(isinstance(name, str) and "\0" not in name for name in names):
        raise ValueError("the name of a file is not a text")
    return Line(step, scalars, arrays, checkpoint, end, entry.get("checksum"))


def _is_locked(path: Path) -> bool:
    """Whether a process holds the lock file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)


def _lock_or_raise(folder: Path) -> int:
    """The descriptor of the lock of a run, which nobody else holds; raises ``StoreError`` if a process writes the run."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    for pause in (0.001, 0.01, 0.1, None):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if pause is None:
                os.close(descriptor)
                raise StoreError(
                    f"{folder} is being written by another process. Wait for it, or choose another folder."
                ) from None
            time.sleep(pause)  # a reader that asks for the state holds the lock for a moment
        except OSError as error:
            os.close(descriptor)
            if error.errno in NO_LOCKS:
                raise StoreError(
                    f"the file system of {folder} cannot lock files, so two processes could write one run. Choose another "
                    "folder, on a local disk for example."
                ) from error
            raise
    _held_locks.add(descriptor)
    return descriptor


def _release_lock(descriptor: int) -> None:
    """Close a lock, unless a fork has closed it."""
    if descriptor in _held_locks:
        _held_locks.discard(descriptor)
        os.close(descriptor)


def _drop_locks() -> None:
    """Close the copies of the locks that a fork has made, so that they are free when the writer dies and the child lives on."""
    while _held_locks:
        with suppress(OSError):
            os.close(_held_locks.pop())


os.register_at_fork(after_in_child=_drop_locks)


def run_folders(root: Path) -> Iterator[Path]:
    """Yield every folder below ``root`` that has a run.json; does not follow links or search inside runs."""
    waiting, seen = [root], 0
    while waiting and seen < MOST_FOLDERS:
        folder = waiting.pop()
        seen += 1
        try:
            with os.scandir(folder) as entries:
                below: list[Path] = []
                for entry in entries:
                    if entry.name == "run.json":
                        yield folder
                        below = []
                        break
                    if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                        below.append(Path(entry.path))
        except OSError:
            continue
        waiting += sorted(below, reverse=True)


def find_runs(root: str | Path) -> tuple[list[Run], list[StoreError]]:
    """Every run below ``root``, oldest first, and an error for every run folder that cannot be read."""
    runs, broken = [], []
    for folder in sorted(run_folders(Path(root))):
        try:
            runs.append(Run(folder))
        except StoreError as error:
            broken.append(error)
    return sorted(runs, key=lambda run: (str(run.header["provenance"].get("started", "")), str(run.folder))), broken


# --- writing -------------------------------------------------------------------------------------


class Writer:
    """Writes a run folder: takes its lock, resumes from its last checkpoint, appends measurements.

    Use it as a context manager. An error inside marks the run as failed, Ctrl-C and ``sys.exit`` mark it as interrupted; both can
    be resumed. Call ``finish()`` when the training is done: leaving the context does not do it. ``resumed``: step and tensors of
    the checkpoint, or ``None``.
    """

    def __init__(self, folder: str | Path, header: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        header = {"format": FORMAT, "id": short_hash(header["recipe"]), **header}
        self._take_lock()
        try:
            if (self.folder / "run.json").exists():
                self.resumed = self._resume(header["id"])
            else:
                self._start(header)
                self.resumed = None
            self._step = self.resumed[0] if self.resumed else 0
            self._set_status("running")
        except BaseException:
            _release_lock(self._lock)
            raise

    def record(
        self,
        step: int,
        scalars: Mapping[str, NDArray[Any]],
        arrays: Tensors | None = None,
        checkpoint: Tensors | None = None,
    ) -> None:
        """Append one measurement: first its files, then the line that names them."""
        stem = f"{step:08d}"
        for quantity in arrays or {}:
            parts = str(quantity).split("/")
            if not all(part and part not in (".", "..") for part in parts):
                raise StoreError(f"{quantity!r} cannot name an array: it would lie outside the run folder.")
        for quantity, value in (arrays or {}).items():
            buffer = io.BytesIO()
            np.save(buffer, value, allow_pickle=False)
            write_file(self.folder / "arrays" / quantity / f"{stem}.npy", buffer.getvalue())
        checksum = {}
        if checkpoint is not None:
            content = safetensors.numpy.save({name: np.ascontiguousarray(value) for name, value in checkpoint.items()})
            write_file(self.folder / "checkpoints" / f"{stem}.safetensors", content)
            checksum = {"checksum": hashlib.sha256(content).hexdigest()}
        line = {
            "step": step,
            "time": round(time.time(), 3),
            "scalars": {name: _json_numbers(value) for name, value in scalars.items()},
            "arrays": {quantity: f"{quantity}/{stem}" for quantity in arrays or {}},
            "checkpoint": None if checkpoint is None else stem,
            **checksum,
        }
        _append_line(self.folder / "metrics.jsonl", canonical_json(line), durable=checkpoint is not None)
        self._step = max(self._step, step)
        if checkpoint is not None:
            self._set_status("running")

    def finish(self) -> None:
        """Mark the run finished."""
        self._set_status("finished")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                state = "interrupted" if isinstance(error, INTERRUPTIONS) else "failed"
                self._set_status(state, f"{type(error).__name__}: {error}".rstrip(": "))
        except StoreError:
            pass  # the first error is the one to report
        finally:
            _release_lock(self._lock)

    def _set_status(self, state: str, error: str | None = None) -> None:
        write_file(self.folder / "status.json", _json_bytes({"state": state, "step": self._step, "error": error}))

    def _take_lock(self) -> None:
        try:
            self._refuse_foreign_folder()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock_or_raise(self.folder)
        except OSError as error:
            raise StoreError(f"cannot make a run in {self.folder}: {error.strerror}. Choose another folder.") from error

    def _start(self, header: Mapping[str, Any]) -> None:
        for temporary in self.folder.glob(".run.json.*.tmp"):
            temporary.unlink()
        write_file(self.folder / "run.json", _json_bytes(header))

    def _refuse_foreign_folder(self) -> None:
        """Raise ``StoreError`` if the folder holds anything but a run or the beginning of one."""
        if not self.folder.is_dir():
            return
        if (self.folder / "run.json").exists():
            Run(self.folder)  # raises if it is not one of ours
            return
        for path in sorted(self.folder.iterdir()):
            if path.name != "lock" and not path.name.startswith(".run.json."):
                raise StoreError(
                    f"{self.folder} is not a run and not empty (it holds {path.name}). Choose another folder."
                )

    def _resume(self, wanted: str) -> tuple[int, dict[str, NDArray[Any]]] | None:
        """Truncate the run to its last whole checkpoint; later measurements are taken again. Returns step and tensors."""
        run = Run(self.folder)
        if run.id != wanted:
            raise StoreError(f"{self.folder} holds run {run.id}, not {wanted}: other settings. Choose another folder.")
        if run.status()["state"] == "finished":
            raise StoreError(f"{self.folder} is finished. Read it with Run, or choose another folder for a new run.")
        last, tensors = run._last_whole_checkpoint() or (None, {})
        lines = run.lines[: run.lines.index(last) + 1] if last else []
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists():
            os.truncate(metrics, last.end if last else 0)
        named = {self.folder / "arrays" / f"{name}.npy" for line in lines for name in line.arrays.values()}
        named |= {self.folder / "checkpoints" / f"{line.checkpoint}.safetensors" for line in lines if line.checkpoint}
        self._delete_unnamed_files(named)
        return (last.step, tensors) if last else None

    def _delete_unnamed_files(self, named: set[Path]) -> None:
        """Delete unfinished files, and arrays and checkpoints that no line names."""
        found = [*self.folder.rglob(".*.tmp"), *self.folder.glob("arrays/*/*.npy")]
        for path in [*found, *self.folder.glob("checkpoints/*.safetensors")]:
            ours = path.stem.isdigit() or path.suffix == ".tmp"
            if path not in named and ours and path.parent.resolve().is_relative_to(self.folder.resolve()):
                path.unlink()


def _json_numbers(value: NDArray[Any]) -> list[float | None]:
    """Numbers per member for JSON: the shortest digits that give the same bits, ``None`` for NaN and infinity."""
    return [float(str(number)) if np.isfinite(number) else None for number in np.atleast_1d(np.asarray(value))]
