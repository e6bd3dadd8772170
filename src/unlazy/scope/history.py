"""What a scope has measured so far: the history in memory, and the log that also writes run folder and sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy.curves import plot_curves
from unlazy.run_card import html_card
from unlazy.runtime import framework, warn
from unlazy.scope.measurements import KERNELS, Measurements, to_numpy
from unlazy.scope.probe_set import target_columns
from unlazy.scope.run_folder import ScopeWriter
from unlazy.scope.tangent import Measured
from unlazy.store import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[Any]
MOST_ARRAY_BYTES = 2**28  # of arrays in memory
ARRAY_NAMES = {"log_paths": "paths"}  # where the store calls an array by another name


@dataclass(repr=False)
class History:
    """Numbers by name and step; arrays by name and step (only the first and the last, unless ``keep_all``).

    ``groups``: sample numbers of each group. ``layers``: modules with trained parameters. ``left_out``: quantity -> reason.
    ``notes``: what a reader of the numbers has to know. ``rows``: by measure, the samples it was computed on, where not all.
    ``targets``: those of the probe set, as columns.
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
        """Add one measurement; arrays have no member axis."""
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
            self._thin_arrays()

    def _thin_arrays(self) -> None:
        """Drop every second array between the first and the last, if all of them take more memory than allowed."""
        held = [array for by_step in self.arrays.values() for array in by_step.values()]
        if sum(array.nbytes for array in held) > MOST_ARRAY_BYTES:
            for by_step in self.arrays.values():
                for step in sorted(by_step)[1:-1:2]:
                    del by_step[step]

    def only_first(self) -> History:
        """A history in memory that holds the first measurement of this one."""
        first = replace(self, keep_all=True, steps=[], scalars={}, arrays={})
        start = self.steps[0]
        numbers = {name: found[start] for name, found in self.scalars.items() if start in found}
        arrays = {name: found[start] for name, found in self.arrays.items() if start in found}
        first.add(start, numbers, arrays)
        return first

    def series(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps and values of one number; empty if it was never measured."""
        found = self.scalars.get(name, {})
        return np.array(list(found), dtype=np.int64), np.array(list(found.values()), dtype=np.float64)

    def plot(
        self, panel: str | None = None, *, ax: Axes | None = None, phases: Sequence[Mapping[str, Any]] = ()
    ) -> Figure:
        """A matplotlib figure of the numbers; see :meth:`unlazy.Scope.plot`. ``phases``: of a verdict, to colour the steps."""

        def curve(name: str) -> tuple[Array, Array]:
            steps, values = self.series(name)
            return steps, values[:, None]

        return plot_curves({"": curve}, panel, ax=ax, phases=phases)

    def to_frame(self) -> Any:
        """A pandas table: one row a step, one column a number, NaN where it was not measured."""
        steps, columns = self._table()
        pandas = framework("pandas", "pandas")
        return pandas.DataFrame(columns, index=pandas.Index(steps, name="step"))

    def to_polars(self) -> Any:
        """A polars table: a column ``step``, and one a number; null where it was not measured."""
        steps, columns = self._table()
        polars = framework("polars", "polars")
        held = {name: [self.scalars[name].get(step) for step in steps] for name in columns}
        return polars.DataFrame(
            {"step": steps, **held}, schema={"step": polars.Int64} | dict.fromkeys(held, polars.Float64)
        )

    def _table(self) -> tuple[list[int], dict[str, list[float]]]:
        """All steps, and each number at all of them."""
        steps = sorted({step for found in self.scalars.values() for step in found})
        return steps, {name: [found.get(step, float("nan")) for step in steps] for name, found in self.scalars.items()}

    def __repr__(self) -> str:
        span = f"steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "nothing measured yet"
        return f"History({span}, {len(self.steps)} measurements of {len(self.scalars)} numbers)"

    def _repr_html_(self) -> str:
        names = [name for name in self.scalars if "@" not in name]
        rows = [(name, f"{self.first(name):.4g} → {self.last(name):.4g}") for name in names]
        return html_card(f"{len(self.steps)} measurements, first → last", None, rows)

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
    def from_run(cls, run: Run) -> History:
        """The history of a run folder that a scope wrote."""
        about = run.header["recipe"].get("scope", {})
        history = cls(about.get("groups", {}), about.get("layers", []), about.get("left_out", {}))
        history.notes, history.rows = about.get("notes", ()), about.get("rows", {})
        quantities = {name for line in run.lines for name in line.arrays}
        wanted = {name: {run.array_steps(name)[0], run.array_steps(name)[-1]} for name in quantities}
        for line in run.lines:
            scalars = {name: _number_or_nan(values[0]) for name, values in line.scalars.items()}
            arrays = {name: run.array(name, line.step)[0] for name in line.arrays if line.step in wanted[name]}
            history.add(line.step, scalars, arrays)
        targets, output = history.arrays.pop("probe_y", {}), history.array("output")
        for name in ("probe_x", "probe_text"):
            history.arrays.pop(name, None)
        if targets and output is not None:
            history.targets = target_columns(torch.from_numpy(targets[0].copy()), output.shape[1]).numpy()
        return history


def _number_or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def empty_history(measurements: Measurements, *, keep_all: bool) -> History:
    """A history without measurements that knows groups, layers, targets and what is left out. ``keep_all``: all arrays."""
    probe = measurements.probe
    assert probe.columns is not None
    return History(
        probe.group_samples(),
        measurements.layers,
        measurements.left_out_quantities(),
        keep_all=keep_all,
        notes=measurements.notes,
        rows=measurements.sampled_rows(),
        targets=to_numpy(probe.columns),
    )


class MeasurementLog:
    """Passes every measurement to the history, the run folder and the sinks. ``scope_names``: names of the scope's own numbers;
    the object that measures adds to them.
    """

    def __init__(
        self, history: History, scope_writer: ScopeWriter | None, sinks: Iterable[Any], scope_names: set[str]
    ) -> None:
        self.history, self.scope_writer, self.sinks, self.scope_names = history, scope_writer, list(sinks), scope_names
        self.measurements, self._refused, self._measured = 0, set[str](), set[int]()

    def write(
        self,
        step: int,
        measured: Measured,
        about: Mapping[str, float],
        *,
        user: Mapping[str, Any] | None = None,
        probe: Mapping[str, Array] | None = None,
        start: Mapping[str, Array] | None = None,
    ) -> None:
        """Add one measurement: what was measured, the ``user``'s numbers, and numbers ``about`` the measurement itself.

        ``probe`` and ``start`` are arrays that the run folder keeps once: the probe set, and the parameters of the start.
        """
        scalars, arrays = _split_scalars_and_arrays(measured)
        self._add_user_scalars(scalars, user or {})
        scalars |= about
        self.history.add(step, scalars, arrays)
        if scalars.keys() & self.scope_names and step not in self._measured:
            self._measured.add(step)
            self.measurements += 1
        if self.scope_writer is not None:
            curves = {name: np.array([value]) for name, value in scalars.items()}
            stored = {name: array[None] for name, array in {**arrays, **(probe or {})}.items()}
            self.scope_writer.record(step, curves, stored, None if start is None else dict(start))
        for sink in list(self.sinks):
            self._send_to_sink(sink, partial(getattr(sink, "write", None) or sink, step, dict(scalars)))

    def abandon_folder(self) -> None:
        """Close the run folder and leave it as it was found; later measurements stay in memory."""
        assert self.scope_writer is not None
        self.scope_writer.close_unchanged()
        self.scope_writer = None

    def close(self, error: BaseException | None) -> None:
        """Close run folder and sinks; after an error the run is marked failed."""
        if self.scope_writer is not None:
            self.scope_writer.__exit__(None if error is None else type(error), error, None)
        for sink in self.sinks:
            if hasattr(sink, "close"):
                self._send_to_sink(sink, sink.close)

    def _add_user_scalars(self, scalars: dict[str, float], user: Mapping[str, Any]) -> None:
        """Add the user's numbers, as ``train_NAME`` where the scope has a number of that name; warn once of other values."""
        for name, value in user.items():
            known = name in scalars or (name in self.history.scalars and not name.startswith("train_"))
            clash = known and name in self.scope_names
            number = _as_number(value)
            if number is not None:
                scalars[f"train_{name}" if clash else name] = number
            elif name not in self._refused:
                self._refused.add(name)
                warn(f"{name} is not a number but {value!r}, and is not kept.")

    def _send_to_sink(self, sink: Any, do: Callable[[], Any]) -> None:
        """Call a sink; one that fails is dropped with a warning."""
        try:
            do()
        except Exception as error:
            self.sinks = [other for other in self.sinks if other is not sink]
            warn(f"{type(sink).__name__} failed and gets nothing more: {error!r}")


def _split_scalars_and_arrays(measured: Measured) -> tuple[dict[str, float], dict[str, Array]]:
    """Numbers, and arrays under the names of the store; kernels in float32."""
    scalars = {name: float(value) for name, value in measured.items() if value.ndim == 0}
    arrays = {ARRAY_NAMES.get(name, name): to_numpy(value) for name, value in measured.items() if value.ndim > 0}
    return scalars, {name: array.astype(np.float32) if name in KERNELS else array for name, array in arrays.items()}


def _as_number(value: Any) -> float | None:
    """The mean of what the user gave, or ``None`` where it is not numbers."""
    try:
        return float(torch.as_tensor(value).detach().double().mean())
    except (TypeError, ValueError, RuntimeError):
        return None
