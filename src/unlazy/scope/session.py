"""One training under observation: what to look at, when, and what it cost."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from unlazy.kernels.capture import call
from unlazy.models.conv import GatedImageNet
from unlazy.models.net import GatedNet
from unlazy.runtime import InputError, StoreError, short_hash
from unlazy.scope.earlier import Earlier, counts_anew, other_training, recognise
from unlazy.scope.folder import KERNELS, Keeper, earlier, place_of, resumed_instruments
from unlazy.scope.history import History
from unlazy.scope.measures import Instruments
from unlazy.scope.probe import Choice, Probe, chosen_output, with_columns
from unlazy.scope.record import Record, basis_of, header_of, history_of, left_out_of, probe_arrays, start_arrays
from unlazy.scope.schedule import Budget, Planner
from unlazy.scope.tangent import Measured
from unlazy.scope.told import detached, whole
from unlazy.scope.untouched import untouched, unwrapped
from unlazy.scope.verdict import judge
from unlazy.scope.watchable import check_model
from unlazy.store import Run

LIGHT_SHARE = 0.1  # looks that cost no more than this share of all of them are light

_open: WeakValueDictionary[str, Session] = WeakValueDictionary()


@dataclass(frozen=True)
class Untaken:
    """What is still to be measured at the last step told: the looks, the user's numbers, and the state of the parameters then."""

    step: int
    looks: list[str]
    scalars: dict[str, Any]
    updates: int


class Session:
    """The working part of a scope, which outlives the handle the user holds just long enough to finish."""

    def __init__(
        self,
        model: nn.Module,
        probe: Probe,
        folder: Path | None,
        *,
        views: tuple[str, ...],
        budget: float,
        output: Choice | None,
        sinks: Iterable[Any],
        steps: int | None,
        seed: int,
        strict: bool,
        overwrite: bool,
    ) -> None:
        began = time.perf_counter()
        self.pid, self.total_steps = os.getpid(), steps
        self.trained, self.shift, self.seen, self.told, self.epochs = 0.0, 0, -1, -1, 0
        self.told_at, self.again = 0, 0  # updates when that was told, and how often that number came again after some
        self.unmeasured: Untaken | None = None
        self.looking = self.finished = False
        self.budget = Budget(budget)
        model = unwrapped(model)
        check_model(model)
        with untouched(model):
            probe = probe.on(*place_of(model))
            self.model = chosen_output(model, probe, output)
            with torch.no_grad():
                probe = with_columns(probe, call(self.model, probe.x))
            spec = model.spec() if isinstance(model, GatedNet) else None
            basis = basis_of(spec or _described(model), probe, views, seed)
            before, finished = (None, False) if folder is None else _take_over(folder, short_hash(basis))
            self.before: Earlier | None = None
            if before is None or overwrite:
                self.instruments = Instruments(self.model, probe, views, seed, strict)
                first = self.instruments.begin()
            else:
                self.instruments = resumed_instruments(before, self.model, probe, views, seed)
                self.instruments.strict = strict
                self.before = recognise(before, finished, self.instruments)
        self._learn_costs(writing=0.0)
        keeper = None
        if folder is not None:
            keeper = Keeper(folder, header_of(basis, self.instruments, budget, spec), overwrite=overwrite)
        history = history_of(self.instruments, keep_all=folder is None)
        self.record = Record(history, keeper, sinks, self.instruments.own_names)
        if folder is not None:
            _open[str(folder.resolve())] = self
        if self.before is None:
            self.record.write(0, first, {}, once=probe_arrays(probe), start=start_arrays(self.instruments.start))
            self.measured = 0
        else:
            self.record.history = History.of_run(self.before.run)
            self.measured = self.seen = self.before.last
            self.shift = int(self.history.last("step_shift") or 0)
        self._plan()
        self.construction = time.perf_counter() - began
        self.budget.spent = 0.0
        self._left = time.perf_counter()

    @property
    def history(self) -> History:
        """What was seen so far."""
        return self.record.history

    @property
    def keeper(self) -> Keeper | None:
        """The writer of the run folder, where there is one."""
        return self.record.keeper

    def _plan(self) -> None:
        """When to look, from the last step measured on."""
        self.planner = Planner(self.budget, self._light(), steps=self.total_steps)
        self.planner.spread_grace(self.budget.predict([*self.instruments.looks, "writing"]))
        self.planner.measured(self.measured, self.instruments.looks, 1.0)

    # --- while training ----------------------------------------------------------------------------------------

    def step(self, step: Any, scalars: Mapping[str, Any]) -> None:
        """``step`` updates are done."""
        self._began = time.perf_counter()
        self.trained += max(0.0, self._began - self._left)
        try:
            self._step(step, scalars)
        finally:
            self._left = time.perf_counter()
            self.budget.spent += self._left - self._began

    def _step(self, step: Any, scalars: Mapping[str, Any]) -> None:
        step = whole(step)
        if self.before is not None and not self.before.met:
            self._meet(step, self.before)
        step = self._counted(step)
        if step == 0 and self.seen < 0 and scalars:
            self._write(0, {}, scalars)
        if step <= max(self.seen, self.measured) and not self._parts_ways(step):
            self.seen = max(self.seen, step)
            return
        self.seen = step
        names = self.planner.due(step, self.instruments.looks, self.trained, self._to_come(step))
        if names:
            self._measure(step, names, scalars)
        else:
            told = {name: detached(value) for name, value in scalars.items()}
            self.unmeasured = Untaken(step, list(self.instruments.looks), told, self._updates())

    def _meet(self, told: int, before: Earlier) -> None:
        """The first step told behind an earlier record: a loop that counts anew must stand where it began, or at its end."""
        before.met = True
        if told > 1 or told > before.last or before.place == 0:
            return
        if before.place == before.last:
            self.told = self.seen - self.shift
            return
        self._leave()
        self.record.history = History()
        raise InputError(counts_anew(before.run, told))

    def _parts_ways(self, step: int) -> bool:
        """Whether a training that began where an earlier one did turns out, at a step seen before, to be another one.

        The record stays as it is. This training is watched in memory, from the start that both have in common.
        """
        before = self.before
        if before is None or not before.asks(step):
            return False
        with self._look():
            out = self.instruments.output()
        if not before.differs(step, out):
            return False
        self._leave()
        self.record.history = self.history.beginning()
        why = other_training(before.run, step)
        if self.instruments.strict:
            raise InputError(why)
        warnings.warn(f"{why} The scope goes on in memory only.", stacklevel=7)
        self.measured = 0
        for name in KERNELS:
            if (start := getattr(self.instruments.start, name)) is not None:
                self.instruments.remember(name, 0, start)
        self._plan()
        return True

    def _leave(self) -> None:
        """Leave the folder as it was found."""
        self.record.leave()
        self.before = None

    def _counted(self, step: int) -> int:
        """Updates since the start, from what the loop calls them: it may tell 0 after its first, or begin anew every epoch."""
        if step == 0 and self.seen < 0 and self._moved():
            self.shift = 1
        missed = self._told_again(step)
        if step < self.told or missed > 0:
            if self.epochs == 0:
                warnings.warn(
                    f"step {step} came after step {self.told}: steps count updates over the whole training. The scope goes on "
                    f"counting from {self.seen + max(missed, 1)}.",
                    stacklevel=7,
                )
            self.epochs = self.seen + max(missed, 1) - self.shift - step
        self.told = step
        return step + self.shift + self.epochs

    def _told_again(self, step: int) -> int:
        """How many updates an epoch of one batch has hidden behind one number; 0 where none.

        One update between two equal numbers may as well lie between a look before it and a look after it.
        """
        updates = self._updates()
        grown, self.told_at = updates > self.told_at, updates
        if step != self.told:
            self.again = 0
        elif grown:
            self.again += 1
        if self.again < 2 or not grown:
            return 0
        return 2 if self.again == 2 else 1

    def away(self, seconds: float) -> None:
        """Seconds since the last step that were no training."""
        self._left += seconds

    def settle(self) -> None:
        """Measure the last step that was seen, if that has not been done."""
        if self.unmeasured is None or self.finished or self.looking or self.pid != os.getpid():
            return
        began = time.perf_counter()
        last, self._began = self.unmeasured, began
        if last.updates == self._updates():
            self._measure(last.step, last.looks, last.scalars)
        else:  # the loop tells before it updates: the network at hand is one step further than the last one told
            if last.scalars:
                self._write(last.step, {}, last.scalars)
            self._measure(last.step + 1, list(self.instruments.looks), {})
        self.budget.spent += time.perf_counter() - began
        self._left = time.perf_counter()

    def _measure(self, step: int, names: list[str], scalars: Mapping[str, Any]) -> None:
        self.instruments.check()
        self._synchronise()
        with self._look():
            measured = self.instruments.measure(step, names)
        for name, why in self.instruments.fallen.items():
            warnings.warn(f"the scope goes on without {name} from step {step}: {why}", stacklevel=7)
        self.instruments.fallen.clear()
        self.history.left_out = left_out_of(self.instruments)
        writing = time.perf_counter()
        change = self._change(measured)
        self._write(step, measured, scalars)
        self._learn_costs(writing=time.perf_counter() - writing, names=names)
        self.planner.measured(step, names, change)
        self.measured = step
        before = self.unmeasured
        pending = before.looks if before is not None and before.step == step else self.instruments.looks
        rest = [name for name in pending if name not in names and name in self.instruments.looks]
        self.unmeasured = Untaken(step, rest, {}, self._updates()) if rest else None

    def _write(self, step: int, measured: Measured, scalars: Mapping[str, Any]) -> None:
        """What was measured and what the user told, with what looking has cost so far."""
        about: dict[str, float] = {}
        if step > 0:
            about["overhead"] = self.budget.spent / self.trained if self.trained > 0 else 0.0
            if self.shift:
                about["step_shift"] = float(self.shift)
        self.record.write(step, measured, about, user=scalars)

    @contextmanager
    def _look(self) -> Iterator[None]:
        """Look at the model where it is now, and leave no trace."""
        parameter = next(iter(self.instruments.trained.values()))
        self.looking = True
        try:
            with untouched(self.model):
                self.instruments.move(parameter.device, parameter.dtype)
                yield
        finally:
            self.looking = False

    def _synchronise(self) -> None:
        """Work that a device still does for the training is not ours."""
        parameter = next(iter(self.instruments.trained.values()))
        if parameter.device.type == "cuda":
            torch.cuda.synchronize(parameter.device)
            now = time.perf_counter()
            self.trained += now - self._began
            self._began = now

    def _updates(self) -> int:
        """Grows whenever a trained parameter is written to."""
        return sum(p._version for p in self.instruments.trained.values() if not p.is_inference())

    def _moved(self) -> bool:
        start = self.instruments.start.parameters
        return any(not torch.equal(p.detach().to(start[n]), start[n]) for n, p in self.instruments.trained.items())

    def _to_come(self, step: int) -> float:
        """Seconds of training that are still to come, where the number of steps is known."""
        if self.total_steps is None or step < 3:
            return 0.0
        return max(0.0, self.trained / step * (self.total_steps - step))

    def _change(self, measured: Measured) -> float:
        """The largest change since the last measurement: of the loss, of the way gone, of the kernels' distances."""
        changes = [0.0]
        for name in ("loss", "parameter_motion", "tangent_distance", "overlap_distance"):
            before, now = self.history.last(name), measured.get(name)
            if before is None or now is None:
                continue
            size = abs(self.history.first("loss") or 1.0) if name == "loss" else 1.0
            changes.append(abs(float(now) - before) / size)
        return max(value if value == value else 1.0 for value in changes)

    # --- the end -----------------------------------------------------------------------------------------------

    def finish(self, error: BaseException | None = None) -> None:
        """Measure the last step, write the verdict, close everything. After an error only the last part."""
        if self.finished or self.pid != os.getpid():
            return
        if error is None:
            self.settle()
            if self.keeper is not None:
                self._write_verdict()
                self.keeper.finish()
        self.finished = True
        self.record.close(error)

    def _write_verdict(self) -> None:
        assert self.keeper is not None
        with suppress(StoreError):  # no thresholds: what was seen is kept, and verdict() says what is missing
            self.keeper.keep(judge(self.history))

    def overhead(self) -> dict[str, Any]:
        """What looking cost."""
        share = self.budget.spent / self.trained if self.trained > 0 else 0.0
        return {
            "seconds_measuring": self.budget.spent,
            "seconds_training": self.trained,
            "share": share,
            "budget": self.budget.share,
            "seconds_always_allowed": self.budget.grace,
            "measurements": self.record.measurements,
            "full_measurements": len(self.history.scalars.get(self._dearest(), {})),
            "skipped": self.planner.skipped,
            "seconds_at_construction": self.construction,
            "seconds_by_look": dict(self.budget.costs),
        }

    # --- costs -------------------------------------------------------------------------------------------------

    def _learn_costs(self, writing: float, names: Iterable[str] | None = None) -> None:
        for name in self.instruments.seconds if names is None else names:
            if name in self.instruments.seconds:
                self.budget.learn(name, self.instruments.seconds[name])
        self.budget.learn("writing", writing)

    def _light(self) -> frozenset[str]:
        costs = {name: self.budget.costs.get(name, 0.0) for name in self.instruments.looks}
        limit = LIGHT_SHARE * sum(costs.values())
        return frozenset(name for name, cost in costs.items() if cost <= limit or name == "outputs")

    def _dearest(self) -> str:
        """A number that only full measurements have."""
        names = {"tangent": "tangent_distance", "overlap": "overlap_distance", "linear": "linearisation_error"}
        return next((number for look, number in names.items() if look in self.instruments.looks), "loss")


def _described(model: nn.Module) -> str:
    """A foreign network as it prints itself; an image network of ours by its spec, which also knows gates and multipliers."""
    return f"GatedImageNet(\n  {model.spec()}\n)" if isinstance(model, GatedImageNet) else str(model)


def _take_over(folder: Path, wanted: str) -> tuple[Run | None, bool]:
    """What an earlier scope left in the folder, and whether it had finished by itself.

    One of this process that is still open there is finished first: a cell of a notebook is run again, perhaps after an error.
    """
    other = _open.pop(str(folder.resolve()), None)
    taken_over = other is not None and not other.finished
    if other is not None:
        other.finish()
    before = earlier(folder, wanted)
    return before, before is not None and not taken_over and before.status()["state"] == "finished"
