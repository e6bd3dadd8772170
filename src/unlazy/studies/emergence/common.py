"""What the studies of the emergence paper share: sizes, the first two steps, and jobs that are computed once and kept."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy import runtime
from unlazy.data.files import state_of
from unlazy.data.patterns import Patterns, PatternSample
from unlazy.models.truncated import Phase, TruncatedNet, in_span, mirrored_start, paper_schedule, train
from unlazy.runtime import provenance, short_hash
from unlazy.store import write_file
from unlazy.studies.results import Progress, common_provenance
from unlazy.studies.settings import at_least_one, plain_settings
from unlazy.training.sweep import sweep

Values = dict[str, Any]
STRUCTURED_GAMMA = 0.25  # what schedules and starts are set for, also where the data have no structure


@dataclass(frozen=True)
class Size:
    """The size of the data and the network; d, D, k, m and the samples."""

    seeds: int
    inputs: int = 500
    patterns: int = 100
    relevant: int = 5
    pairs: int = 300
    samples: int = 50_000
    tests: int = 5_000

    def __post_init__(self) -> None:
        at_least_one(self, *(field.name for field in fields(self) if isinstance(getattr(self, field.name), int)))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return plain_settings(self)

    def data(self, seed: int, structured: bool = True) -> Patterns:
        """The distribution of one seed: its own dictionary and relevant set."""
        make = Patterns if structured else Patterns.unstructured
        return make(self.inputs, self.patterns, self.relevant, seed=seed)

    def start(self, patterns: Patterns, seed: int) -> TruncatedNet:
        """The mirrored start drawn in input space and read in pattern coordinates (which changes nothing)."""
        k, deviation = patterns.relevant, patterns.deviation
        net = mirrored_start(
            patterns.inputs, self.pairs, relevant=k, gamma=STRUCTURED_GAMMA, deviation=deviation, seed=seed
        )
        return in_span(net, patterns.dictionary())

    def schedule(self, patterns: Patterns, **options: Any) -> tuple[Phase, Phase, Phase]:
        """The paper's phases for this data; ``options`` as in ``paper_schedule``."""
        k, deviation = patterns.relevant, patterns.deviation
        return paper_schedule(self.pairs, relevant=k, gamma=STRUCTURED_GAMMA, deviation=deviation, **options)


def left_out(names: Sequence[str], progress: Progress) -> dict[str, str]:
    """Which of these image sets cannot be used here, and why; ``progress`` is told of each."""
    found = {}
    for name in names:
        if (state := state_of(name)) != "present":
            found[name] = f"its files are {state} in the data folder"
            progress(f"leaving out {name}: {found[name]}", 1, 1)
    return found


def first_steps(net: TruncatedNet, schedule: Sequence[Phase], sample: PatternSample) -> list[TruncatedNet]:
    """The network after 0, 1 and 2 full-gradient steps."""
    seen: list[TruncatedNet] = []
    rows = (sample.phi, sample.y, sample.weights)
    train(net, tuple(schedule[:2]), lambda _: rows, lambda _, now: seen.append(now))
    return seen


# --- jobs --------------------------------------------------------------------------------------------


@runtime_checkable
class Plain(Protocol):
    """Settings that can be written down."""

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Job:
    """One measurement: ``measure(settings, **options)`` gives plain values; a file keeps them.

    The file is named by settings, options and the code behind the measurement: other code measures again.
    """

    measure: Callable[..., Values]
    settings: Plain
    options: Mapping[str, Any]
    folder: Path

    @property
    def path(self) -> Path:
        counts = ("seeds", "sets")  # more of them are more files, not other ones
        settings = {key: value for key, value in self.settings.to_dict().items() if not key.endswith(counts)}
        name = "-".join(str(value).replace(" ", "_") for value in self.options.values())
        what = {
            "settings": settings,
            "options": dict(self.options),
            "measure": self.measure.__name__,
            "code": code_behind(self.measure.__module__),
        }
        return self.folder / f"{self.measure.__name__}-{name}-{short_hash(what)}.json"

    def run(self) -> None:
        """Compute and keep, unless it is there."""
        if self.path.exists():
            return
        made_by = provenance("float64")
        values = self.measure(self.settings, **self.options)
        text = json.dumps({"values": values, "provenance": made_by}, allow_nan=False)
        write_file(self.path, (text + "\n").encode())


@cache
def code_behind(module: str) -> str:
    """SHA-256 over a module's source and that of the modules it computes with: those it imports, and those they import.

    Drawing, judging and storing do not count: they change no measured number.
    """
    root, seen, waiting = Path(runtime.__file__).parent, dict[str, bytes](), [module]
    while waiting:
        name = waiting.pop()
        path = root.joinpath(*name.split(".")[1:]).with_suffix(".py")
        if name not in seen and path.is_file():
            seen[name] = path.read_bytes()
            waiting += _computing(seen[name])
    digest = hashlib.sha256()
    for name in sorted(seen):
        digest.update(name.encode() + b"\0" + seen[name] + b"\0")
    return digest.hexdigest()


COMPUTING = ("data", "models", "kernels", "theory", "training", "studies.emergence")


def _computing(source: bytes) -> Iterator[str]:
    """The modules of this package that a module imports and that compute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            inside = node.module.removeprefix("unlazy.")
            if inside != node.module and inside.startswith(COMPUTING):
                yield node.module


def run_jobs(jobs: Sequence[Job], workers: int, progress: Progress) -> tuple[list[Values], dict[str, Any]]:
    """Compute what is missing; returns the values in order of the jobs, and what made them."""

    def tick() -> None:
        progress("measuring", sum(job.path.exists() for job in jobs), len(jobs))

    sweep(Job.run, [(job,) for job in jobs], workers, tick)
    kept = [json.loads(job.path.read_text()) for job in jobs]
    return [entry["values"] for entry in kept], common_provenance([entry["provenance"] for entry in kept])


def column(rows: Sequence[Values], name: str) -> NDArray[np.float64]:
    """One number of every row, as an array."""
    return np.array([row[name] for row in rows], dtype=np.float64)


def accuracy(output: torch.Tensor, y: torch.Tensor) -> float:
    """Share of rows whose sign is right; an output of zero is wrong by half."""
    right = (torch.sign(output) * y).to(torch.float64)
    return float((right + 1).mean() / 2)
