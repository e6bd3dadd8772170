"""One run as the page sees it: opened safely, read one member at a time, never written."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import StoreError
from unlazy.store import Line, Run, parse_line, read_bytes, read_lines

Stamp = tuple[tuple[int, int] | None, ...]
WATCHED = ("run.json", "status.json", "metrics.jsonl", "verdict.json", "labels.json")
LARGEST_ARRAY = 1 << 29  # bytes of one member's array that the page will read
LONGEST_HEADER = 1 << 12  # bytes
PLAIN_HEADER = re.compile(
    rb"\{'descr': '([<>|](?:b1|[iu][1248]|f[248]))', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]+, )*(?:[0-9]+,?)?)\), \}\s*"
)
SCENE = "scene_"  # prefix of arrays of one member at more steps, as the circle study stores them
MOST_STEPS = 60  # of a quantity, in what is computed for the page
MOST_LINES = 50_000  # measurements that are all parsed; of a longer file some, and all that name arrays
NO_ARRAYS = re.compile(rb'"arrays": ?\{\}')


def check_inside(path: Path, root: Path) -> Path:
    """Return ``path``; raise ``StoreError`` if a link leads out of ``root``, or if it is a pipe or a device."""
    if not path.resolve().is_relative_to(root):
        raise StoreError(f"{path.name} is a link that leaves the folder of runs; it is not followed.")
    if path.exists() and not path.is_file():
        raise StoreError(f"{path.name} is a folder, a pipe or a device; a file was expected, and it is not opened.")
    return path


def check_files(folder: Path, root: Path) -> None:
    """Raise ``StoreError`` if one of the files that describe a run is no plain file, or a link out of ``root``."""
    for name in (*WATCHED, "lock"):
        try:
            plain = stat.S_ISREG((folder / name).lstat().st_mode)
        except OSError:
            continue  # it is not there, or cannot be looked at; reading it says so
        if not plain:
            check_inside(folder / name, root)


def stamp_of(folder: Path) -> Stamp:
    """Time and size of the files that change while a run goes on; reads none of them."""
    return tuple(_stat(folder / name) for name in WATCHED)


def _stat(path: Path) -> tuple[int, int] | None:
    """Modification time in ns and size of a file; ``None`` if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


@dataclass(frozen=True)
class StoredArray:
    """One member's array at one step: its file, and the member's index on the first axis of that file."""

    path: Path
    index: int

    def shape(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape (first axis: members) and dtype, from the header of the file."""
        with self._open() as file:
            shape, _, dtype = _npy_header(file, self.path)
        return shape, dtype

    def read(self) -> NDArray[Any]:
        """Read this member's array; skips the other members."""
        with self._open() as file:
            shape, fortran, dtype = _npy_header(file, self.path)
            if not shape:
                raise StoreError(f"{self.path} holds a single number, not one array a member.")
            index = self.index if shape[0] > 1 else 0
            if index >= shape[0]:
                raise StoreError(f"{self.path.name} has {shape[0]} members; member {index} is not there.")
            length = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
            if length > LARGEST_ARRAY:
                raise StoreError(
                    f"{self.path} has {length / 1e6:,.0f} MB a member, too much for the page; use unlazy.Run."
                )
            if fortran:
                file.seek(0)
                return np.asarray(np.load(file, allow_pickle=False))[index]
            file.seek(index * length, os.SEEK_CUR)
            data = file.read(length)
        if len(data) < length:
            raise StoreError(f"{self.path} is truncated.")
        return np.frombuffer(data, dtype).reshape(shape[1:])

    def stamp(self) -> tuple[str, int, int, int]:
        """Path, index, time and size: changes when the file does."""
        found = _stat(self.path) or (0, 0)
        return str(self.path), self.index, *found

    def _open(self) -> Any:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise StoreError(f"{self.path} is missing or cannot be read ({error.strerror}).") from error


def _npy_header(file: Any, path: Path) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, Fortran order and dtype from the header of a .npy file; leaves the file at its first number."""
    try:
        version = np.lib.format.read_magic(file)
        plain = _plain_header(file, 2 if version == (1, 0) else 4)
        if plain is not None:
            return plain
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = reader(file)
    except (ValueError, EOFError, OSError) as error:
        raise StoreError(f"{path} is not an array ({error}).") from error
    if dtype.kind not in "biuf":
        raise StoreError(f"{path} holds {dtype}, not numbers.")
    return tuple(shape), bool(fortran), dtype


def _plain_header(file: Any, length_bytes: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]] | None:
    """Parse a header as the store writes it; ``None`` for any other.

    This avoids numpy's parser, which may fail in two threads at once (Python 3.11).
    """
    start = file.tell()
    length = int.from_bytes(file.read(length_bytes), "little")
    found = PLAIN_HEADER.fullmatch(file.read(min(length, LONGEST_HEADER)))
    if found is None:
        file.seek(start)
        return None
    precision, fortran, sides = found.groups()
    shape = tuple(int(side) for side in sides.split(b",") if side)
    return shape, fortran == b"True", np.dtype(precision.decode())


class RunReader:
    """One run with all its measurements: header, status, curves, and arrays by name, step and member."""

    def __init__(self, key: str, folder: Path, root: Path, before: RunReader | None = None) -> None:
        check_files(folder, root)
        self.key, self.folder, self.root = key, folder, root
        self.run = Run(folder)
        self.header = self.run.header
        self.problems: list[str] = []
        self.cache: dict[Hashable, Any] = {}  # results computed from the run as it is now
        lines, left_out = self._read_lines(before)
        self.lines = lines
        self.measurements = len(self.lines) + left_out  # of a long run, ``lines`` holds some only
        self.by_step: dict[str, dict[int, str]] = {}
        for line in self.lines:
            for quantity, place in line.arrays.items():
                self.by_step.setdefault(str(quantity), {})[line.step] = str(place)

    @property
    def status(self) -> dict[str, Any]:
        """State, step and error; read again until the run has ended, because a killed writer leaves no message."""
        if "status" not in self.cache:
            try:
                status = self.run.status()
            except StoreError as error:
                self.problems.append(str(error))
                status = {"state": "unknown", "step": self.lines[-1].step if self.lines else 0, "error": str(error)}
            if status["state"] in ("running", "interrupted"):
                return status
            self.cache["status"] = status
        known: dict[str, Any] = self.cache["status"]
        return known

    @property
    def members(self) -> int:
        """Number of members, at least 1."""
        return max(1, len(self.header["members"])) if isinstance(self.header["members"], list) else 1

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended normally."""
        return bool(self.status["state"] == "finished")

    def _read_lines(self, before: RunReader | None) -> tuple[list[Line], int]:
        """Complete measurements, and how many of a long file were left out.

        Those of ``before`` are not parsed again; damaged ones go to ``problems``.
        """
        path = self.folder / "metrics.jsonl"
        if before is not None and before.lines and not before.problems and before.header == self.header:
            grown = _append_new_lines(path, before.lines) if len(before.lines) <= 2 * MOST_LINES else None
            if grown is not None:
                return grown, before.measurements - len(before.lines)
        try:
            count = _count_lines(path)
            return (read_lines(path), 0) if count <= MOST_LINES else self._read_some_lines(path, count)
        except StoreError as error:
            self.problems.append(str(error))
        except OSError as error:
            self.problems.append(f"{path.name} cannot be read ({error.strerror}).")
            return [], 0
        try:
            return _readable_lines(read_bytes(path), 0), 0
        except (StoreError, OSError):
            return [], 0

    def _read_some_lines(self, path: Path, count: int) -> tuple[list[Line], int]:
        """Evenly chosen measurements of a long file, all that name arrays, and the last two; and the number of the others."""
        stride, lines, damaged, offset = -(-count // MOST_LINES), [], 0, 0
        with path.open("rb") as file:
            for number, raw in zip(range(count), file, strict=False):
                if number % stride == 0 or number >= count - 2 or not NO_ARRAYS.search(raw):
                    found = _readable_lines(raw, offset)
                    damaged += not found
                    lines += found
                offset += len(raw)
        if damaged:
            self.problems.append(f"{damaged} measurements are damaged and left out.")
        return lines, count - len(lines)

    # --- arrays ---

    @cached_property
    def scene_member(self) -> int | None:
        """The member whose ``scene_`` arrays are stored at more steps: the one with the same output; ``None`` without scenes."""
        common = self.by_step.get("output", {}).keys() & self.by_step.get(f"{SCENE}output", {}).keys()
        try:
            for step in sorted(common)[:1]:
                scene = self._find_stored(f"{SCENE}output", step, 0).read().ravel()
                everyone = [self._find_stored("output", step, member).read().ravel() for member in range(self.members)]
                gaps = [float(np.abs(one - scene).max()) for one in everyone]
                return int(np.argmin(np.nan_to_num(gaps, nan=np.inf)))
        except (StoreError, ValueError) as error:
            self.problems.append(f"the scenes of this run cannot be shown: {error}")
        return None

    @cached_property
    def quantities(self) -> list[str]:
        """Names of the arrays; ``scene_overlap`` counts as ``overlap``."""
        plain = [name for name in self.by_step if not name.startswith(SCENE) or self.scene_member is None]
        scenes = [name.removeprefix(SCENE) for name in self.by_step if name not in plain]
        return sorted(set(plain) | set(scenes))

    def steps(self, quantity: str, member: int | None = None) -> list[int]:
        """The steps at which a quantity was stored, for all members or for one."""
        steps = set(self.by_step.get(quantity, {}))
        if member is not None and member == self.scene_member:
            steps |= self.by_step.get(f"{SCENE}{quantity}", {}).keys()
        return sorted(steps)

    def locate(self, quantity: str, step: int, member: int) -> tuple[str, int]:
        """The stored name (a ``scene_`` array where there is one) and the index on the first axis of a member's array."""
        scene = f"{SCENE}{quantity}"
        if member == self.scene_member and step in self.by_step.get(scene, {}):
            return scene, 0
        return quantity, member

    def thin_steps(self, quantity: str, member: int, most: int = MOST_STEPS) -> list[int]:
        """At most ``most`` of the steps at which a quantity was stored, first and last among them."""
        every = self.steps(quantity, member)
        if not every:
            raise StoreError(f"{self.key} has no {quantity!r}.")
        return [every[place] for place in even_indices(len(every), most)]

    def find_array(self, quantity: str, step: int, member: int) -> StoredArray:
        """A member's array at a step, not read yet; raises ``StoreError`` if it was not stored."""
        if not 0 <= member < self.members:
            raise StoreError(f"{self.key} has members 0 to {self.members - 1}; {member} is not one of them.")
        name, index = self.locate(quantity, step, member)
        return self._find_stored(name, step, index)

    def check_links(self, name: str) -> None:
        """Raise ``StoreError`` if a file of a quantity is a link out of the root; for code that reads with ``Run``."""
        for step in self.by_step.get(name, {}):
            self._find_stored(name, step, 0)

    def _find_stored(self, name: str, step: int, index: int) -> StoredArray:
        places = self.by_step.get(name, {})
        if step not in places:
            raise StoreError(f"{self.key} has no {name!r} at step {step}.")
        key = ("path", name, step)
        if key not in self.cache:
            self.cache[key] = check_inside(self.folder / "arrays" / f"{places[step]}.npy", self.root)
        return StoredArray(self.cache[key], index)

    @cached_property
    def title(self) -> str:
        """The folder's name without the run id at its end."""
        return re.sub(r"-[0-9a-f]{12}$", "", self.folder.name)


def even_indices(count: int, most: int) -> NDArray[np.int64]:
    """At most ``most`` of the indices 0 to ``count - 1``, spread evenly, first and last among them."""
    return np.unique(np.rint(np.linspace(0, count - 1, min(count, most))).astype(np.int64))


def open_run_folder(folder: str | Path) -> RunReader:
    """Open one run folder; raises ``StoreError`` for files that are links out of it."""
    path = Path(folder).resolve()
    return RunReader(path.name, path, path)


def _readable_lines(data: bytes, offset: int) -> list[Line]:
    """Every complete line that parses; skips damaged ones. ``offset``: where ``data`` begins in the file."""
    lines = []
    for raw in data.split(b"\n")[:-1]:
        offset += len(raw) + 1
        with suppress(ValueError):
            lines.append(parse_line(raw, offset))
    return lines


def _count_lines(path: Path) -> int:
    """The number of complete lines of a file; 0 if there is none."""
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except FileNotFoundError:
        return 0


def _append_new_lines(path: Path, known: list[Line]) -> list[Line] | None:
    """The known lines and the new ones after them; ``None`` if the file no longer begins with the known lines."""
    start = known[-2].end if len(known) > 1 else 0
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except OSError:
        return None
    again = _readable_lines(data, start)
    if data.count(b"\n") != len(again) or not again or again[0] != known[-1]:
        return None
    return known + again[1:]
