"""Small runs for the studio's tests, written through the store or by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unlazy.store import Writer
from unlazy.studio.answers import Answer
from unlazy.studio.api import StudioApi

STEPS = (0, 1, 4, 16, 50)


def header(name: str = "mine", members: int = 2, **more: Any) -> dict[str, Any]:
    recipe = {"name": name, "batch": 4}
    return {
        "kind": "train",
        "study": None,
        "scale": None,
        "recipe": recipe,
        "members": [{"seed": seed, "beta": None, "lr": 0.1} for seed in range(members)],
        "model": None,
        "data": {"name": "mine", "options": {}, "fingerprint": "0"},
        "provenance": {"started": "2026-01-01T00:00:00+00:00"},
    } | more


def kernel(n: int, members: int, step: int, signed: bool = False) -> np.ndarray:
    random = np.random.default_rng(step + 7 * signed)
    factor = random.normal(size=(members, n, 3)) + (0 if signed else 3)
    return ((1 + step) * factor @ factor.swapaxes(1, 2)).astype(np.float32)


def arrays_at(step: int, n: int = 8, members: int = 2, units: int = 4) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1000 + step)
    return {
        "overlap": kernel(n, members, step),
        "tangent": kernel(n, members, step, signed=True),
        "output": random.normal(size=(members, n)).astype(np.float32),
        "paths": random.integers(0, 9, (members, n)).astype(np.float64),
        "normals": random.normal(size=(members, 2, units, 2)).astype(np.float32),
        "offsets": random.normal(size=(members, 2, units)).astype(np.float32),
        "neurons": random.normal(size=(members, 2 * units, 2)).astype(np.float32),
    }


def write_run(
    folder: Path,
    steps: Iterable[int] = STEPS,
    *,
    finish: bool = True,
    once: Mapping[str, np.ndarray] | None = None,
    members: int = 2,
    head: Mapping[str, Any] | None = None,
    **sizes: int,
) -> Path:
    """A run with every kind of array; ``once``: arrays of the first step only."""
    with Writer(folder, head or header(folder.name, members)) as writer:
        for place, step in enumerate(steps):
            scalars = {"loss": np.linspace(1, 2, members) / (1 + step), "loss_top": np.full(members, 0.5)}
            arrays = arrays_at(step, members=members, **sizes) | (dict(once or {}) if place == 0 else {})
            writer.record(step, scalars, arrays)
        if finish:
            writer.finish()
    return folder


def verdict_of(word: str, gap: float = 0.7) -> dict[str, Any]:
    """A verdict as a scope writes it, with phases, layers, samples and advice."""
    return {
        "label": word,
        "gap": gap,
        "reasons": [],
        "evidence": [
            {"measure": "linearisation_error", "value": 0.6, "lazy_below": 0.1, "rich_above": 0.5, "says": "rich"}
        ],
        "phases": [
            {"word": "lazy", "first": 0, "last": 3, "until": 6},
            {"word": word, "first": 10, "last": 30, "until": None},
        ],
        "layers": {
            "lines": [
                {"name": "0", "word": "", "rank": 2, "frozen_cost": 0.1, "says": "rank 2 of 2"},
                {"name": "2", "word": "", "rank": 1, "frozen_cost": 0.4, "says": "rank 1 of 2"},
            ]
        },
        "samples": {"hardest": [{"sample": 3, "value": 2.5}], "easiest": [{"sample": 1, "value": 0.1}]},
        "words": {
            "meaning": "It learned features.",
            "advice": "What to do:\n    Raise the rate.\n    Lower the scale.",
        },
    }


def write_many(root: Path, count: int, lines: int = 50) -> None:
    """Many finished runs, written by hand because nobody needs them to survive."""
    for number in range(count):
        folder = root / f"group-{number % 10}" / f"run-{number:04d}"
        folder.mkdir(parents=True)
        plain = {"format": 1, "id": f"{number:012x}"} | header(f"run {number}")
        (folder / "run.json").write_text(json.dumps(plain))
        (folder / "status.json").write_text('{"state": "finished", "step": 49, "error": null}')
        measured = [
            {"step": step, "time": 0, "scalars": {"loss": [1 / (1 + step), 2.0]}, "arrays": {}, "checkpoint": None}
            for step in range(lines)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in measured))


def files_below(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its time of change and its bytes."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def ask(api: StudioApi, path: str, **parameters: object) -> Answer:
    """The answer at an address."""
    return api.answer(path.split("/"), {name: str(value) for name, value in parameters.items()})


def ask_json(api: StudioApi, path: str, **parameters: object) -> Any:
    """The JSON at an address, parsed."""
    return json.loads(ask(api, path, **parameters).body)


def floats(answer: Answer) -> np.ndarray:
    """An array that came as bytes."""
    return np.frombuffer(answer.body, "<f4").reshape([int(side) for side in answer.headers["X-Shape"].split(",")])
