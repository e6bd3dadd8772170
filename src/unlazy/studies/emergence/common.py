"""What the studies of the emergence paper share: sizes, the first two steps, and jobs that are computed once and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy.data.patterns import Patterns, PatternSample
from unlazy.models.truncated import Phase, TruncatedNet, in_span, mirrored_start, paper_schedule, train
from unlazy.runtime import provenance, require, short_hash
from unlazy.store import write_file
from unlazy.studies.results import common_provenance
from unlazy.training.sweep import sweep

Progress = Callable[[str, int, int], None]
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
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int):
                require(value >= 1, f"{field.name} must be at least 1, got {value!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

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


def first_steps(net: TruncatedNet, schedule: Sequence[Phase], sample: PatternSample) -> list[TruncatedNet]:
    """The network after 0, 1 and 2 full-gradient steps."""
    seen: list[TruncatedNet] = []
    rows = (sample.phi, sample.y, sample.weights)
    train(net, tuple(schedule[:2]), lambda _: rows, lambda _, now: seen.append(now))
    return seen


# --- jobs --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One measurement: ``measure(settings, **options)`` gives plain values; a file keeps them."""

    measure: Callable[..., Values]
    settings: Size
    options: Mapping[str, Any]
    folder: Path

    @property
    def path(self) -> Path:
        counts = ("seeds", "sets")  # more of them are more files, not other ones
        settings = {key: value for key, value in self.settings.to_dict().items() if not key.endswith(counts)}
        name = "-".join(str(value) for value in self.options.values())
        what = {"settings": settings, "options": dict(self.options), "measure": self.measure.__name__}
        return self.folder / f"{self.measure.__name__}-{name}-{short_hash(what)}.json"

    def run(self) -> None:
        """Compute and keep, unless it is there."""
        if self.path.exists():
            return
        made_by = provenance("float64")
        values = self.measure(self.settings, **self.options)
        text = json.dumps({"values": values, "provenance": made_by}, allow_nan=False)
        write_file(self.path, (text + "\n").encode())


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
