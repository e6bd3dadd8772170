"""What a scope has seen so far, in memory: every number, and the arrays of the first and the last measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy.scope.probe import target_columns
from unlazy.store import Run

Array = NDArray[Any]
ROOM = 2**28  # bytes of arrays that are kept in memory


@dataclass
class History:
    """Numbers by name and step; arrays by name and step (only the first and the last, unless ``keep_all``).

    ``groups``: sample numbers of each group. ``layers``: modules with trained parameters. ``left_out``: quantity -> reason.
    ``notes``: what a reader of the numbers has to know. ``rows``: the samples a look was taken on, where not all. ``targets``:
    the probe's, as columns.
    """

    groups: Mapping[str, list[int]] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    left_out: Mapping[str, str] = field(default_factory=dict)
    keep_all: bool = False
    notes: Sequence[str] = ()
    rows: Mapping[str, list[int]] = field(default_factory=dict)
    targets: Array | None = None
    steps: list[int] = field(default_factory=list)
    scalars: dict[str, dict[int, float]] = field(default_factory=dict)
    arrays: dict[str, dict[int, Array]] = field(default_factory=dict)

    def add(self, step: int, scalars: Mapping[str, float], arrays: Mapping[str, Array]) -> None:
        """One measurement; arrays without their member axis."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
        for name, number in scalars.items():
            self.scalars.setdefault(name, {})[step] = float(number)
        for name, array in arrays.items():
            held = self.arrays.setdefault(name, {})
            if not self.keep_all and len(held) > 1:
                del held[max(held)]
            held[step] = array
        if self.keep_all:
            self._thin()

    def _thin(self) -> None:
        """Where arrays outgrow their room, every second one between the first and the last goes."""
        held = [array for by_step in self.arrays.values() for array in by_step.values()]
        if sum(array.nbytes for array in held) > ROOM:
            for by_step in self.arrays.values():
                for step in sorted(by_step)[1:-1:2]:
                    del by_step[step]

    def beginning(self) -> History:
        """The first measurement alone, as the beginning of another history in memory."""
        first = replace(self, keep_all=True, steps=[], scalars={}, arrays={})
        start = self.steps[0]
        numbers = {name: found[start] for name, found in self.scalars.items() if start in found}
        arrays = {name: found[start] for name, found in self.arrays.items() if start in found}
        first.add(start, numbers, arrays)
        return first

    def series(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps and values of one number; empty where it was never measured."""
        found = self.scalars.get(name, {})
        return np.array(list(found), dtype=np.int64), np.array(list(found.values()), dtype=np.float64)

    def first(self, name: str) -> float | None:
        """The earliest value of one number."""
        found = self.scalars.get(name, {})
        return found[min(found)] if found else None

    def last(self, name: str) -> float | None:
        """The latest value of one number."""
        found = self.scalars.get(name, {})
        return found[max(found)] if found else None

    def array(self, name: str, *, first: bool = False) -> Array | None:
        """The latest array of that name, or the earliest."""
        found = self.arrays.get(name, {})
        return None if not found else found[min(found) if first else max(found)]

    @classmethod
    def of_run(cls, run: Run) -> History:
        """The same from a run folder that a scope wrote."""
        about = run.header["recipe"].get("scope", {})
        history = cls(about.get("groups", {}), about.get("layers", []), about.get("left_out", {}))
        history.notes, history.rows = about.get("notes", ()), about.get("rows", {})
        quantities = {name for line in run.lines for name in line.arrays}
        wanted = {name: {run.array_steps(name)[0], run.array_steps(name)[-1]} for name in quantities}
        for line in run.lines:
            scalars = {name: _number(values[0]) for name, values in line.scalars.items()}
            arrays = {name: run.array(name, line.step)[0] for name in line.arrays if line.step in wanted[name]}
            history.add(line.step, scalars, arrays)
        targets, output = history.arrays.pop("probe_y", {}), history.array("output")
        history.arrays.pop("probe_x", None)
        if targets and output is not None:
            history.targets = target_columns(torch.from_numpy(targets[0].copy()), output.shape[1]).numpy()
        return history


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
