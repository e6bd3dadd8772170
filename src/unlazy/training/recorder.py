"""Named measures of our own training loops: what is measured, on which samples, at which steps, into which run folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn

from unlazy.data.dataset import Dataset
from unlazy.kernels.capture import evaluation_mode
from unlazy.kernels.gated import is_stack
from unlazy.runtime import require, short_hash
from unlazy.store import Tensors, Writer

Probe = Callable[[Any, Dataset], Mapping[str, Tensor]]


@dataclass(frozen=True)
class FixedSteps:
    """The steps at which a measure is taken, decided before training."""

    steps: frozenset[int]

    @classmethod
    def at(cls, steps: Iterable[int]) -> FixedSteps:
        """Exactly these steps."""
        return cls(frozenset(steps))

    @classmethod
    def thinning(cls, last: int, dense: int, stride: int, unit: int = 1) -> FixedSteps:
        """Every ``unit`` steps up to ``dense``, then every ``stride`` steps, and the last one.

        >>> sorted(FixedSteps.thinning(last=10, dense=3, stride=4).steps)
        [0, 1, 2, 3, 4, 8, 10]
        """
        require(unit >= 1 and stride >= 1 and last >= 0, "unit and stride must be at least 1, last at least 0.")
        early, late = range(0, min(dense, last) + 1, unit), range(0, last + 1, stride)
        return cls(frozenset(early) | frozenset(step for step in late if step > dense) | {last})

    @classmethod
    def growing(cls, last: int, per_octave: int = 4, unit: int = 1) -> FixedSteps:
        """0, ``unit``, then ever wider gaps: about ``per_octave`` measurements each time training doubles."""
        require(per_octave >= 1, f"per_octave must be at least 1, got {per_octave!r}.")
        exponent, steps = 0, {0, last}
        while (step := unit * round(2 ** (exponent / per_octave))) <= last:
            steps.add(step)
            exponent += 1
        return cls(frozenset(steps))

    def __or__(self, other: FixedSteps) -> FixedSteps:
        return FixedSteps(self.steps | other.steps)

    def is_due(self, step: int) -> bool:
        """Whether to measure at this step."""
        return step in self.steps

    def describe(self) -> list[Any]:
        """A short plain form for a run's recipe."""
        return sorted(self.steps)


@dataclass(frozen=True)
class Measure:
    """A probe function, the steps at which it runs, and the samples it gets. ``batch=None``: the training data."""

    probe: Probe
    schedule: FixedSteps
    batch: Dataset | None = None

    def describe(self) -> dict[str, Any]:
        """A short plain form for a run's recipe."""
        samples = None if self.batch is None else self.batch.fingerprint
        return {**describe_function(self.probe), "steps": self.schedule.describe(), "batch": samples}


def describe_function(function: Callable[..., Any]) -> dict[str, Any]:
    """The name of a probe and, unless it is one of this package, a hash of what it does: two lambdas have one name."""
    name = getattr(function, "__name__", type(function).__name__)
    if getattr(function, "__module__", "").startswith("unlazy."):
        return {"probe": name}
    return {"probe": name, "code": short_hash(_plain_function(function))}


def _plain_function(function: Any) -> list[Any]:
    """What a function does as plain values: its instructions, constants, defaults, and the values it closes over."""
    if isinstance(function, partial):
        return [_plain_function(function.func), _text(function.args), _text(sorted(function.keywords.items()))]
    if isinstance(function, MethodType):
        return [
            _plain_function(function.__func__),
            _text(getattr(function.__self__, "__dict__", {})),
        ]
    if not isinstance(function, FunctionType):
        kept = _text(getattr(function, "__dict__", {}))
        return [type(function).__qualname__, _plain_function(type(function).__call__), kept]
    held = [cell.cell_contents for cell in function.__closure__ or () if cell.cell_contents is not function]
    closed = [_plain_function(value) if isinstance(value, FunctionType) else _text(value) for value in held]
    return [_plain_code(function.__code__), _text(function.__defaults__), closed]


def _text(value: Any) -> str:
    """A value as text; the same in another process, where objects have other addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _plain_code(code: CodeType) -> list[Any]:
    constants = [_plain_code(one) if isinstance(one, CodeType) else _text(one) for one in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]


class Recorder:
    """Runs the measures of a training when they are due, and writes their numbers into the training's run folder."""

    def __init__(self, model: nn.Module, data: Dataset, writer: Writer, measures: Sequence[Measure]) -> None:
        self.model, self.data, self.writer, self.measures = model, data, writer, list(measures)

    def step(self, step: int, checkpoint: Callable[[], Tensors] | None = None) -> None:
        """Write one line for ``step`` if a measure is due or ``checkpoint``, a function that returns tensors, is given."""
        due = [measure for measure in self.measures if measure.schedule.is_due(step)]
        if not due and checkpoint is None:
            return
        curves: dict[str, np.ndarray] = {}
        arrays: dict[str, np.ndarray] = {}
        for measure in due:
            for name, value in self._run_probe(measure).items():
                (curves if value.ndim == 1 else arrays)[name] = value
        self.writer.record(step, curves, arrays, checkpoint() if checkpoint else None)

    def _run_probe(self, measure: Measure) -> dict[str, np.ndarray]:
        """The numbers of one measure as arrays; the first axis is the member."""
        batch = self.data if measure.batch is None else measure.batch
        with evaluation_mode(self.model):
            found = measure.probe(self.model, batch)
        return {
            name: (value if is_stack(self.model) else value[None]).detach().cpu().numpy()
            for name, value in found.items()
        }
