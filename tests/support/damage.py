"""Damage to the files of a run, as disks, editors and other programs do it; for tests of what users are told."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, [], {}, "", "x", -1, 1e308, True, 10**30, [None], "\0", "\ud800", {"a": [1, {"b": None}]}),
    KeyError,  # the entry is gone
)


def damage(folder: Path, chance: random.Random) -> str:
    """Spoil one file below the folder, most often one entry of a JSON file; says what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    plain = [path for path in files if path.suffix in (".json", ".jsonl")]
    path = chance.choice(plain if chance.random() < 0.8 else files)
    kind = chance.choice(["entry"] * 5 + ["flip", "cut", "empty", "folder", "noise"])
    if kind == "entry" and path in plain:
        return f"{path.name}: {_change_entry(path, chance)}"
    data = bytearray(path.read_bytes())
    if kind == "flip" and data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    elif kind == "cut":
        path.write_bytes(data[: chance.randrange(len(data) + 1)])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "noise":
        path.write_bytes(chance.randbytes(50))
    else:
        path.unlink()
        path.mkdir()
    return f"{path.name}: {kind}"


def _change_entry(path: Path, chance: random.Random) -> str:
    """Replace or remove one entry of a JSON file, or of one line of it."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = chance.randrange(len(lines))
    value = json.loads(lines[number])
    place = chance.choice(list(_places(value)))
    new = chance.choice(ODD if place else ODD[:-1])
    lines[number] = json.dumps(_replaced(value, place, new))
    path.write_text("\n".join(lines) + "\n")
    return f"{'/'.join(map(str, place))} = {new!r}"


def _places(value: Any, begin: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield begin
    inner = value.items() if isinstance(value, dict) else list(enumerate(value))[:3] if isinstance(value, list) else ()
    for key, part in inner:
        yield from _places(part, (*begin, key))


def _replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    value = copy.deepcopy(value)
    holder = value
    for key in place[:-1]:
        holder = holder[key]
    if new is KeyError:
        del holder[place[-1]]
    else:
        holder[place[-1]] = new
    return value
