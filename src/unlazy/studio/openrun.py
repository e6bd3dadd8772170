"""One run as the page sees it: opened safely, read a member at a time, never written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import StoreError
from unlazy.store import Line, Run, read_lines

Stamp = tuple[tuple[int, int] | None, ...]
WATCHED = ("run.json", "status.json", "metrics.jsonl", "verdict.json")
LARGEST_ARRAY = 1 << 29  # bytes of one member's array that the page will read
LONGEST_HEADER = 1 << 12  # bytes
PLAIN_HEADER = re.compile(
    rb"\{'descr': '([<>|](?:b1|[iu][1248]|f[248]))', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]+, )*(?:[0-9]+,?)?)\), \}\s*"
)
SCENE = "scene_"  # arrays of one member at many more steps, as the circle study keeps them


def inside(path: Path, root: Path) -> Path:
    """The same path, once it is certain that no link leads out of ``root``."""
    if not path.resolve().is_relative_to(root):
        raise StoreError(f"{path.name} is a link that leaves the folder of runs; it is not followed.")
    return path


def check_files(folder: Path, root: Path) -> None:
    """The files of a run's head are no links out of ``root``; the walk has followed none to the folder itself."""
    for name in WATCHED:
        if (folder / name).is_symlink():
            inside(folder / name, root)


def stamp_of(folder: Path) -> Stamp:
    """Time and size of the files that say how far a run is: four calls, no reading."""
    return tuple(_stat(folder / name) for name in WATCHED)


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


@dataclass(frozen=True)
class Stored:
    """Where one member's array at one step lies: the file and the place on its first axis."""

    path: Path
    index: int

    def shape(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape (first axis: members) and precision, from the head of the file."""
        with self._opened() as file:
            shape, _, dtype = _npy_header(file, self.path)
        return shape, dtype

    def read(self) -> NDArray[Any]:
        """This member's part; the others are not read."""
        with self._opened() as file:
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
        found = _stat(self.path) or (0, 0)
        return str(self.path), self.index, *found

    def _opened(self) -> Any:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise StoreError(f"{self.path} is missing or cannot be read ({error.strerror}).") from error


def _npy_header(file: Any, path: Path) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and precision from the head of a file of arrays, which is left at its first number."""
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
    """The head as the store writes it, read without Python's parser: two threads in that at once can fail (Python 3.11)."""
    start = file.tell()
    length = int.from_bytes(file.read(length_bytes), "little")
    found = PLAIN_HEADER.fullmatch(file.read(min(length, LONGEST_HEADER)))
    if found is None:
        file.seek(start)
        return None
    precision, fortran, sides = found.groups()
    shape = tuple(int(side) for side in sides.split(b",") if side)
    return shape, fortran == b"True", np.dtype(precision.decode())


class OpenRun:
    """One run with all its measurements: header, status, curves, and arrays by name, step and member."""

    def __init__(self, key: str, folder: Path, root: Path, before: OpenRun | None = None) -> None:
        check_files(folder, root)
        self.key, self.folder, self.root = key, folder, root
        self.run = Run(folder)
        self.header = self.run.header
        self.problems: list[str] = []
        self.memory: dict[Hashable, Any] = {}  # what was worked out about the run as it is now
        lines = self._read_lines(before)
        self.lines = [line for line in lines if _is_whole(line)]
        if len(self.lines) < len(lines):
            self.problems.append(f"{len(lines) - len(self.lines)} measurements are damaged and left out.")
        self.by_step: dict[str, dict[int, str]] = {}
        for line in self.lines:
            for quantity, place in line.arrays.items():
                self.by_step.setdefault(str(quantity), {})[line.step] = str(place)

    @property
    def status(self) -> dict[str, Any]:
        """State, step and error; asked anew until the run has ended, because a writer may die without a word."""
        if "status" not in self.memory:
            try:
                status = self.run.status()
            except StoreError as error:
                self.problems.append(str(error))
                status = {"state": "unknown", "step": self.lines[-1].step if self.lines else 0, "error": str(error)}
            if status["state"] in ("running", "interrupted"):
                return status
            self.memory["status"] = status
        known: dict[str, Any] = self.memory["status"]
        return known

    @property
    def members(self) -> int:
        return max(1, len(self.header["members"])) if isinstance(self.header["members"], list) else 1

    @property
    def finished(self) -> bool:
        return bool(self.status["state"] == "finished")

    def _read_lines(self, before: OpenRun | None) -> list[Line]:
        """All whole measurements; those known from before are not parsed again, a damaged one is named and left out."""
        path = self.folder / "metrics.jsonl"
        if before is not None and before.lines and not before.problems and before.header == self.header:
            grown = _grown(path, before.lines)
            if grown is not None:
                return grown
        try:
            return read_lines(path)
        except StoreError as error:
            self.problems.append(str(error))
        except OSError as error:
            self.problems.append(f"{path.name} cannot be read ({error.strerror}).")
            return []
        return _readable_lines(path.read_bytes(), 0)

    # --- arrays ---

    @cached_property
    def own_member(self) -> int | None:
        """The member whose scenes are kept at many more steps: the one whose stored output is the scene's."""
        common = self.by_step.get("output", {}).keys() & self.by_step.get(f"{SCENE}output", {}).keys()
        try:
            for step in sorted(common)[:1]:
                scene = self._stored(f"{SCENE}output", step, 0).read().ravel()
                everyone = [self._stored("output", step, member).read().ravel() for member in range(self.members)]
                gaps = [float(np.abs(one - scene).max()) for one in everyone]
                return int(np.argmin(np.nan_to_num(gaps, nan=np.inf)))
        except (StoreError, ValueError) as error:
            self.problems.append(f"the scenes of this run cannot be shown: {error}")
        return None

    @cached_property
    def quantities(self) -> list[str]:
        """Names of the arrays, with the scenes folded into the quantities they show."""
        plain = [name for name in self.by_step if not name.startswith(SCENE) or self.own_member is None]
        scenes = [name.removeprefix(SCENE) for name in self.by_step if name not in plain]
        return sorted(set(plain) | set(scenes))

    def steps(self, quantity: str, member: int | None = None) -> list[int]:
        """The steps at which a quantity was stored, for all members or for one."""
        steps = set(self.by_step.get(quantity, {}))
        if member is not None and member == self.own_member:
            steps |= self.by_step.get(f"{SCENE}{quantity}", {}).keys()
        return sorted(steps)

    def source(self, quantity: str, step: int, member: int) -> tuple[str, int]:
        """Under which name, and at which place of the first axis, a member's array is kept."""
        scene = f"{SCENE}{quantity}"
        if member == self.own_member and step in self.by_step.get(scene, {}):
            return scene, 0
        return quantity, member

    def stored(self, quantity: str, step: int, member: int) -> Stored:
        """Where to read a member's array at a step."""
        if not 0 <= member < self.members:
            raise StoreError(f"{self.key} has members 0 to {self.members - 1}; {member} is not one of them.")
        name, index = self.source(quantity, step, member)
        return self._stored(name, step, index)

    def check(self, name: str) -> None:
        """Every stored file of a quantity lies inside the root, for readers that do not ask."""
        for step in self.by_step.get(name, {}):
            self._stored(name, step, 0)

    def _stored(self, name: str, step: int, index: int) -> Stored:
        places = self.by_step.get(name, {})
        if step not in places:
            raise StoreError(f"{self.key} has no {name!r} at step {step}.")
        key = ("path", name, step)
        if key not in self.memory:
            self.memory[key] = inside(self.folder / "arrays" / f"{places[step]}.npy", self.root)
        return Stored(self.memory[key], index)

    @cached_property
    def title(self) -> str:
        """The folder's name without the hash that ends it."""
        return re.sub(r"-[0-9a-f]{12}$", "", self.folder.name)


def open_folder(folder: str | Path) -> OpenRun:
    """One run folder by itself; none of its files may be a link that leaves it."""
    path = Path(folder).resolve()
    return OpenRun(path.name, path, path)


def _is_whole(line: Line) -> bool:
    return type(line.step) is int and isinstance(line.scalars, dict) and isinstance(line.arrays, dict)


def _readable_lines(data: bytes, offset: int) -> list[Line]:
    """Every whole line that parses, whatever stands between them."""
    lines = []
    for raw in data.split(b"\n")[:-1]:
        offset += len(raw) + 1
        try:
            entry = json.loads(raw)
            lines.append(Line(entry["step"], entry["scalars"], entry["arrays"], entry["checkpoint"], offset))
        except (ValueError, KeyError, TypeError):
            continue
    return lines


def _grown(path: Path, known: list[Line]) -> list[Line] | None:
    """The known lines and those behind them; ``None`` if the file is not a longer form of what was read."""
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
