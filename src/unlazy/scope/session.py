"""One training under observation: when to measure, what the loop's step numbers mean, what measuring cost."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from unlazy.kernels.capture import call_model, take_samples
from unlazy.models.net import GatedNet
from unlazy.runtime import InputError, StoreError, require, short_hash, warn
from unlazy.scope.history import History, MeasurementLog, empty_history
from unlazy.scope.measurements import KERNELS, Measurements
from unlazy.scope.memory import MemoryLimit, private_pool
from unlazy.scope.positions import read_positions
from unlazy.scope.probe_set import ProbeSet, add_target_columns
from unlazy.scope.processes import ShardedModel
from unlazy.scope.resume import (
    EarlierRun,
    find_earlier_run,
    match_earlier_run,
    other_training_text,
    restore_measurements,
    samples_of_run,
    step_mismatch_text,
)
from unlazy.scope.run_folder import ScopeWriter, probe_arrays, run_header, scope_identity, start_arrays
from unlazy.scope.run_origin import flatten_config
from unlazy.scope.schedule import FULL_MEASUREMENTS, Budget, Planner
from unlazy.scope.tangent import Measured
from unlazy.scope.timing import count_affordable
from unlazy.scope.user_model import (
    OutputChoice,
    check_model,
    describe_model,
    device_and_dtype,
    preserve_state,
    select_output,
    unwrap_model,
)
from unlazy.scope.verdict import judge
from unlazy.store import INTERRUPTIONS, Run, parse_notes, parse_tags

TRIED_SAMPLES = 4  # with which a slow model is called first
START_PASSES = 2  # of the probe set through the model before the first step, whatever else waits
FIRST_SECONDS = 3.0  # of the first measurement before the first step; the rest of it follows during the first steps
END_SECONDS = 3.0  # of the last measurement if the budget leaves less; light measures are taken whatever they cost
VERDICT_SECONDS = 10.0  # between two verdicts on a training that goes on; one takes some milliseconds
KNOWN_STEPS = 3  # after so many steps their time is known
LIGHT_SHARE = 0.05  # measures that cost no more than this share of all of them are light
ALWAYS = ("outputs", "parameters", "linear")  # light whatever they cost: verdicts rest on them

_open_sessions: WeakValueDictionary[str, Session] = WeakValueDictionary()


@dataclass(frozen=True)
class Pending:
    """What is not yet measured at the last step that the loop reported. ``updates``: of the parameters at that time."""

    step: int
    measures: list[str]
    scalars: dict[str, Any]
    updates: int


class Session:
    """The working part of a scope. It outlives the ``Scope`` object that the user holds just long enough to finish."""

    def __init__(
        self,
        model: nn.Module,
        probe: ProbeSet,
        folder: Path | None,
        *,
        views: tuple[str, ...],
        budget: float,
        output: OutputChoice | None,
        sinks: Iterable[Any],
        steps: int | None,
        seed: int,
        strict: bool,
        overwrite: bool,
        memory: str | int | None = None,
        shards: ShardedModel | None = None,
        config: Any = None,
        tags: Iterable[str] = (),
        notes: str = "",
    ) -> None:
        """``shards``: the sharded model whose whole copy is measured in place of ``model``."""
        began = time.perf_counter()
        settings, tags, notes = flatten_config(config), parse_tags(tags), parse_notes(notes)
        self.pid, self.total_steps = os.getpid(), steps
        self.training_seconds = 0.0
        self.last_step = self.last_reported = -1  # updates done, and what the loop called that step
        self.shift = self.offset = 0  # last_step = last_reported + shift + offset
        self.last_updates, self.repeats = (
            0,
            0,
        )  # updates at the last report, and how often its number was repeated after updates
        self.pending: Pending | None = None
        self.measuring = self.finished = False
        self.budget = Budget(budget)
        self.shards = shards
        model = unwrap_model(model) if shards is None or shards.copy is None else shards.copy
        check_model(model)
        with preserve_state(model):
            probe = probe.to(*device_and_dtype(model))
            limit = MemoryLimit(memory, model, probe.x, step_seen=False)
            slow = limit.sample_seconds * len(probe) > FIRST_SECONDS
            chosen = select_output(model, probe, output, min(limit.rows(), TRIED_SAMPLES) if slow else limit.rows())
            self.model, probe = read_positions(chosen, probe, seed)
            seconds = FIRST_SECONDS / START_PASSES if math.isfinite(budget) else math.inf
            affordable = count_affordable(self.model, probe.x, limit.rows(), seconds)
            with torch.no_grad():
                shown = limit.rows() if affordable == len(probe) else TRIED_SAMPLES
                out = call_model(self.model, take_samples(probe.x, slice(0, min(limit.rows(), shown))))
                probe = add_target_columns(probe, out if len(out) == len(probe) else out[:1].expand(len(probe), -1))
            spec = model.spec() if isinstance(model, GatedNet) else None
            identity = None if folder is None else scope_identity(spec or describe_model(model), probe, views, seed)
            before, finished = None, False
            if folder is not None:
                before, finished = _close_and_find_run(folder, short_hash(identity))
            self.earlier: EarlierRun | None = None
            before, given = None if overwrite else before, len(probe)
            probe = probe.few(affordable if before is None else samples_of_run(before, given), seed)
            if before is None:
                self.measurements = Measurements(self.model, probe, views, seed, strict, limit=limit)
                if len(probe) < given:
                    self.measurements.add_note(
                        f"{len(probe)} of the probe's {given} samples are measured, and numbered from 0: all of them would take "
                        f"more than {FIRST_SECONDS:g} s"
                    )
                with private_pool(limit.device):
                    first = self.measurements.measure_start(FIRST_SECONDS)
            else:
                self.measurements = restore_measurements(before, self.model, probe, views, seed, limit)
                self.measurements.strict = strict
                self.earlier = match_earlier_run(before, finished, self.measurements)
        self._learn_costs(writing=0.0)
        scope_writer = None
        if folder is not None and identity is not None:
            header = run_header(identity, self.measurements, budget, spec, model, settings)
            scope_writer = ScopeWriter(folder, header, overwrite=overwrite, tags=tags, notes=notes)
            _open_sessions[str(folder.resolve())] = self
        history = empty_history(self.measurements, keep_all=folder is None)
        self.log = MeasurementLog(history, scope_writer, sinks, self.measurements.scalar_names)
        if self.earlier is not None:
            self.log.history = History.from_run(self.earlier.run)
            self.log.history.notes = self.measurements.notes  # those of the earlier run, and what is noted from now on
            self.last_measured = self.last_step = self.earlier.last_step
            self.shift = int(self.history.last("step_shift") or 0)
        elif scope_writer is None:
            self.log.write(0, first, {})
            self.last_measured = 0
        else:
            self.log.write(0, first, {}, probe=probe_arrays(probe), start=start_arrays(self.measurements.start))
            self.last_measured = 0
        self._plan()
        self._watch_unfreezing()
        self._norms = [module for module in self.model.modules() if isinstance(module, _NormBase)]
        self.training_modes: dict[
            nn.Module, bool
        ] = {}  # of norms that behave otherwise in training, when a step was reported
        self._judged = time.perf_counter()
        self.construction_seconds = time.perf_counter() - began
        limit.begin()
        self.budget.spent = 0.0
        self._left = time.perf_counter()

    @property
    def history(self) -> History:
        """All measurements so far."""
        return self.log.history

    @property
    def scope_writer(self) -> ScopeWriter | None:
        """The writer of the run folder, if there is one."""
        return self.log.scope_writer

    def _watch_unfreezing(self) -> None:
        """See parameters that begin to train before their first update: after it, their start would be lost."""
        self._unfreezing: RemovableHandle | None = None
        if self.shards is not None:
            self.shards.before_update = partial(_add_unfrozen, ref(self), unchanged=True)
        elif self.measurements.has_frozen_parameters:
            self._unfreezing = register_optimizer_step_pre_hook(partial(_add_unfrozen, ref(self)))

    def _plan(self) -> None:
        """Plan when to measure, from the last measured step on."""
        self.planner = Planner(self.budget, self._light_measures(), steps=self.total_steps)
        self.planner.spread_grace(self.budget.predict([*self.measurements.measures, "writing"]))
        self.planner.note_measured(self.last_measured, self.measurements.measures, 1.0)

    # --- while training ----------------------------------------------------------------------------------------

    def step(self, step: Any, scalars: Mapping[str, Any]) -> None:
        """The loop reports that ``step`` updates are done; measure if it is time."""
        self._began = time.perf_counter()
        self.training_seconds += max(0.0, self._began - self._left)
        try:
            self._step(step, scalars)
        finally:
            self._left = time.perf_counter()
            self.budget.spent += self._left - self._began

    def _step(self, step: Any, scalars: Mapping[str, Any]) -> None:
        step = parse_step(step)
        if self.earlier is not None and not self.earlier.began:
            self._check_first_step(step, self.earlier)
        step = self._count_updates(step)
        self.training_modes = {norm: norm.training for norm in self._norms}
        if step == 0 and self.last_step < 0 and scalars:
            self._write(0, {}, scalars)
        if step <= max(self.last_step, self.last_measured) and not self._differs_from_earlier_run(step):
            self.last_step = max(self.last_step, step)
            return
        self.last_step = step
        self._continue_start(step)
        names: list[str] = []
        if self._is_current():
            to_come = self._seconds_to_come(step)
            names = self.planner.due(step, self._known_measures(), self.training_seconds, to_come)
        if names:
            self._measure(step, names, scalars)
        else:
            detached = {name: v.detach() if isinstance(v, Tensor) else v for name, v in scalars.items()}
            self.pending = Pending(step, list(self.measurements.measures), detached, self._updates())

    def _check_first_step(self, reported: int, earlier: EarlierRun) -> None:
        """Raise if a loop that resumes an earlier run counts from 0 again, unless its network is at the run's start or end."""
        earlier.began = True
        if reported > 1 or reported > earlier.last_step or earlier.current_step == 0:
            return
        if earlier.current_step == earlier.last_step:
            self.last_reported = self.last_step - self.shift
            return
        self._abandon_folder()
        self.log.history = History()
        raise InputError(step_mismatch_text(earlier.run, reported))

    def _differs_from_earlier_run(self, step: int) -> bool:
        """Whether a training that began where an earlier run did differs from it at a step that the run has measured.

        If so, the run folder stays as it is, and this training is measured in memory, from the common start.
        """
        earlier = self.earlier
        if earlier is None or not self._is_current() or not earlier.needs_check(step):
            return False
        with self._measuring():
            out = self.measurements.output()
        if not earlier.differs(step, out):
            return False
        self._abandon_folder()
        self.log.history = self.history.only_first()
        why = other_training_text(earlier.run, step)
        if self.measurements.strict:
            raise InputError(why)
        warn(f"{why} The scope goes on in memory only.")
        self.last_measured = 0
        for name in KERNELS:
            if (start := getattr(self.measurements.start, name)) is not None:
                self.measurements.set_previous_kernel(name, 0, start)
        self._plan()
        return True

    def _abandon_folder(self) -> None:
        """Leave the run folder as it was found."""
        self.log.abandon_folder()
        self.earlier = None

    def _count_updates(self, step: int) -> int:
        """Updates since the start, from the step number that the loop reported.

        A loop may report 0 after its first update, or begin at 0 again every epoch.
        """
        if step == 0 and self.last_step < 0 and self._has_moved():
            self.shift = 1
        missed = self._count_repeated_steps(step)
        if step < self.last_reported or missed > 0:
            if self.offset == 0:
                warn(
                    f"step {step} came after step {self.last_reported}: steps count updates over the whole training. The scope "
                    f"goes on counting from {self.last_step + max(missed, 1)}."
                )
            self.offset = self.last_step + max(missed, 1) - self.shift - step
        self.last_reported = step
        return step + self.shift + self.offset

    def _count_repeated_steps(self, step: int) -> int:
        """Steps taken since the loop last reported a new step number; 0 if it reports a new one now.

        A loop whose epochs have one batch reports the same number after every update. One repeat may also come from a loop that
        reports before and after an update, so only the second repeat counts, as two steps.
        """
        updates = self._updates()
        grown, self.last_updates = updates > self.last_updates, updates
        if step != self.last_reported:
            self.repeats = 0
        elif grown:
            self.repeats += 1
        if self.repeats < 2 or not grown:
            return 0
        return 2 if self.repeats == 2 else 1

    def exclude_seconds(self, seconds: float) -> None:
        """Do not count these seconds since the last step as training time."""
        self._left += seconds

    def measure_pending(self) -> None:
        """Measure the last reported step, if that has not been done."""
        if self.pending is None or self.finished or self.measuring or self.pid != os.getpid() or not self._is_current():
            return
        began = time.perf_counter()
        allowed = self.budget.seconds_allowed(self.training_seconds) - self.budget.spent
        until = began + max(END_SECONDS, allowed)
        self._end_start(until)
        last, self._began = self.pending, began
        if last.updates == self._updates():
            self._measure(last.step, self._fit_end(last.measures, until), last.scalars)
        else:  # the loop reports before it updates: the network is one step further than the last reported one
            if last.scalars:
                self._write(last.step, {}, last.scalars)
            self._measure(last.step + 1, self._fit_end(self.measurements.measures, until), {})
        self.budget.spent += time.perf_counter() - began
        self._left = time.perf_counter()

    def _end_start(self, until: float) -> None:
        """Take the measures of the start that wait, as far as they and their repetition at the end fit the time.

        The linearised network is compared in any case: verdicts rest on it.
        """
        for name in list(self.measurements.waiting):
            left = until - time.perf_counter()
            self.measurements.set_seconds(left / 4, left / 3)
            with self._measuring():
                fits = 2 * self.measurements.expected_seconds(name) <= left
            if fits or name in ALWAYS:
                self._measure_waiting(name)

    def _fit_end(self, names: Iterable[str], until: float) -> list[str]:
        """Those of the measures that fit the time until then, light ones in any case; a note names the others."""
        left, taken = until - time.perf_counter(), []
        for name in [name for name in names if name not in self.measurements.waiting]:
            cost = self.budget.costs.get(name, 0.0)
            if name in self.planner.light or name in ALWAYS or cost <= left:
                taken.append(name)
                left -= cost
            else:
                takes = f"it takes {cost:.2g} s, more than the time allowed" if cost >= 0.01 else "no time was left"
                self.measurements.add_note(f"the end has no {name}: {takes}")
        return taken

    def _known_measures(self) -> list[str]:
        """The measures whose values at the start are known: only these may be taken."""
        return [name for name in self.measurements.measures if name not in self.measurements.waiting]

    def _continue_start(self, step: int) -> None:
        """Take one of the measures of the start that wait, once a step was seen and if the time allowed pays for it."""
        waiting, limit = self.measurements.waiting, self.measurements.limit
        if step <= 0 or limit is None:
            return
        limit.step_seen = True
        if self.planner.light_done == 0 and step <= KNOWN_STEPS:  # no measurement of ours in between
            limit.see_step()
        if not waiting or (self.total_steps is not None and step < min(KNOWN_STEPS, self.total_steps)):
            return
        allowed = self.budget.seconds_allowed(self.training_seconds, self._seconds_to_come(step))
        left = allowed - self.budget.spent
        # The kernel shrinks so that several measurements fit; if nobody knows how many, the start and the end have to.
        share = left / 2 if self.total_steps is None else allowed / FULL_MEASUREMENTS
        self.measurements.set_seconds(share, share)
        with self._measuring():
            expected = self.measurements.expected_seconds(waiting[0])
        if expected <= left:
            self._measure_waiting(waiting[0])

    def _measure_waiting(self, name: str) -> None:
        """Take a measure of the start that waits, and write it beside the others of step 0."""
        self.measurements.add_unfrozen(max(0, self.last_step))
        self.measurements.check_parameters()
        self._synchronise()
        with self._measuring():
            measured = self.measurements.measure_waiting(name)
        self.history.left_out, self.history.rows = (
            self.measurements.left_out_quantities(),
            self.measurements.sampled_rows(),
        )
        if measured:
            self.log.write(0, measured, {})
        if self.scope_writer is not None:
            self.scope_writer.update_header(self.measurements)
        self._learn_costs(writing=self.budget.costs.get("writing", 0.0))
        if not self.measurements.waiting:
            self.planner.light = self._light_measures()
            self.planner.spread_grace(self.budget.predict([*self.measurements.measures, "writing"]))

    def _measure(self, step: int, names: list[str], scalars: Mapping[str, Any]) -> None:
        self.measurements.add_unfrozen(step)
        self.measurements.check_parameters()
        self._synchronise()
        with self._measuring():
            measured = self.measurements.measure(step, names)
        for name, why in self.measurements.newly_failed.items():
            warn(f"the scope goes on without {name} from step {step}: {why}")
        self.measurements.newly_failed.clear()
        self.history.left_out = self.measurements.left_out_quantities()
        writing = time.perf_counter()
        change = self._largest_change(measured)
        self._write(step, measured, scalars)
        self._learn_costs(writing=time.perf_counter() - writing, names=names)
        if self.scope_writer is not None and time.perf_counter() - self._judged > VERDICT_SECONDS:
            self._write_verdict()  # so that lists show the verdict while the network trains, and if the process is killed
        self.planner.note_measured(step, names, change)
        self.last_measured = step
        before, known = self.pending, self.measurements.measures
        wanted = before.measures if before is not None and before.step == step else known
        rest = [name for name in wanted if name not in names and name in known]
        self.pending = Pending(step, rest, {}, self._updates()) if rest else None

    def _write(self, step: int, measured: Measured, scalars: Mapping[str, Any]) -> None:
        """Write what was measured, the user's numbers, and what measuring has cost so far."""
        about: dict[str, float] = {}
        if step > 0:
            about["overhead"] = self.budget.spent / self.training_seconds if self.training_seconds > 0 else 0.0
            if self.shift:
                about["step_shift"] = float(self.shift)
        self.log.write(step, measured, about, user=scalars)
        self.measurements.compare_losses(measured, scalars)

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """A block that measures the model on its current device and leaves its state as it was."""
        parameter = next(iter(self.measurements.trained.values()))
        self.measuring = True
        try:
            with preserve_state(self.model):
                self.measurements.move_to(parameter.device, parameter.dtype)
                with private_pool(parameter.device):
                    yield
        finally:
            self.measuring = False

    def _synchronise(self) -> None:
        """Wait for work that the device still does for the training, and count it as training time."""
        parameter = next(iter(self.measurements.trained.values()))
        if parameter.device.type == "cuda":
            torch.cuda.synchronize(parameter.device)
            now = time.perf_counter()
            self.training_seconds += now - self._began
            self._began = now

    def _updates(self) -> int:
        """A number that grows whenever a trained parameter is written to."""
        if self.shards is not None:
            return self.shards.updates()
        return sum(p._version for p in self.measurements.trained.values() if not p.is_inference())

    def _has_moved(self) -> bool:
        """Whether any trained parameter differs from the start."""
        start = self.measurements.start.parameters
        return any(
            not torch.equal(p.detach().to(start[n]), start[n])
            for n, p in self.measurements.trained.items()
            if n in start
        )

    def _is_current(self) -> bool:
        """Whether the measured model has the parameters of now; the copy of a sharded one may be older."""
        return self.shards is None or self.shards.is_current

    def next_meeting(self) -> int:
        """The step at which a sharded model should be gathered next: when a measurement may be due, and not at every step."""
        due = min(self.planner.full.due_at, self.planner.quick.due_at)
        if self.last_step < 0:
            return 0  # the first step tells how the loop counts
        nearest = self.last_step + max(1, round(self.planner.full.finest * self.last_step))
        return max(due, nearest) - self.shift - self.offset

    def _seconds_to_come(self, step: int) -> float:
        """Seconds of training still to come, estimated if the number of steps is known, else 0."""
        if self.total_steps is None or step < 3:
            return 0.0
        return max(0.0, self.training_seconds / step * (self.total_steps - step))

    def _largest_change(self, measured: Measured) -> float:
        """The largest change since the last measurement: of the loss, the parameter motion, the kernels' distances."""
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
        """Measure the last step, write the verdict, close everything; after an error only close.

        Ctrl-C is no error: what was measured is judged, and the last step is measured if the network still is where it was then.
        """
        if self.finished or self.pid != os.getpid():
            return
        if error is None:
            self.measure_pending()
            self._conclude()
            if self.scope_writer is not None:
                self.scope_writer.finish()
        elif isinstance(error, INTERRUPTIONS):
            with suppress(Exception, KeyboardInterrupt):  # a second Ctrl-C ends it at once
                if self.pending is not None and self.pending.updates == self._updates():
                    self.measure_pending()
                self._conclude()
        self.finished, self._updates_at_end = True, self._updates()
        if self._unfreezing is not None:
            self._unfreezing.remove()
        self.log.close(error)

    def _conclude(self) -> None:
        """Note what was not measured, and write the verdict on what was."""
        self.measurements.leave_out_waiting()
        self.history.left_out = self.measurements.left_out_quantities()
        self._note_few_measurements()
        if self.scope_writer is not None:
            self.scope_writer.update_header(self.measurements)
            self._write_verdict()

    @contextmanager
    def reopened(self) -> Iterator[None]:
        """A block that may add numbers about the last step to a finished run; its verdict is written anew afterwards."""
        if not self.finished:
            yield
            return
        require(
            self._updates() == self._updates_at_end,
            "the network was trained on after the scope had finished, so its last step cannot be compared any more. "
            "Train the twin before that.",
        )
        before, sinks = self.log.scope_writer, self.log.sinks
        self.log.sinks = []
        if before is not None:
            self.log.scope_writer = ScopeWriter(before.folder, Run(before.folder).header)
        try:
            yield
        finally:
            self.log.sinks = sinks
            if self.scope_writer is not None:
                self._write_verdict()
                self.scope_writer.close_unchanged()  # interrupted stays interrupted

    def _note_few_measurements(self) -> None:
        """Note it if the budget did not pay for enough full measurements."""
        full, cost = self.overhead()["full_measurements"], self.budget.predict([*self.measurements.measures, "writing"])
        allowed = self.budget.seconds_allowed(self.training_seconds)
        if full >= FULL_MEASUREMENTS or self.last_step < FULL_MEASUREMENTS or FULL_MEASUREMENTS * cost <= allowed:
            return
        many = "" if full == 1 else "s"
        self.measurements.add_note(
            f"{full} full measurement{many}: each takes {cost:.2g} s, and this training paid for {allowed:.2g} s in all"
        )

    def _write_verdict(self) -> None:
        assert self.scope_writer is not None
        self._judged = time.perf_counter()
        with suppress(StoreError):  # without thresholds the measurements are kept, and verdict() says what is missing
            self.scope_writer.write_verdict(judge(self.history).to_dict())

    def overhead(self) -> dict[str, Any]:
        """What measuring cost."""
        share = self.budget.spent / self.training_seconds if self.training_seconds > 0 else 0.0
        return {
            "seconds_measuring": self.budget.spent,
            "seconds_training": self.training_seconds,
            "share": share,
            "budget": self.budget.share,
            "seconds_always_allowed": self.budget.grace_of(self.training_seconds),
            "measurements": self.log.measurements,
            "full_measurements": len(self.history.scalars.get(self._costliest_number(), {})),
            "skipped": self.planner.skipped,
            "seconds_at_construction": self.construction_seconds,
            "seconds_by_measure": dict(self.budget.costs),
        }

    # --- costs -------------------------------------------------------------------------------------------------

    def _learn_costs(self, writing: float, names: Iterable[str] | None = None) -> None:
        """Tell the budget what these measures, or all, and writing took."""
        for name in self.measurements.seconds if names is None else names:
            if name in self.measurements.seconds:
                self.budget.learn(name, self.measurements.seconds[name])
        self.budget.learn("writing", writing)

    def _light_measures(self) -> frozenset[str]:
        """Measures that cost little: they may be taken between full measurements."""
        costs = {name: self.budget.costs.get(name, 0.0) for name in self._known_measures()}
        limit = LIGHT_SHARE * sum(costs.values())
        light = frozenset(name for name, cost in costs.items() if cost <= limit or name in ALWAYS)
        return light if len(light) < len(costs) else frozenset()  # else every measurement is a full one

    def _costliest_number(self) -> str:
        """The name of a number that only full measurements have."""
        names = {"tangent": "tangent_distance", "overlap": "overlap_distance", "linear": "linearisation_error"}
        return next((number for measure, number in names.items() if measure in self.measurements.measures), "loss")


def _add_unfrozen(session: ReferenceType[Session], *_: Any, unchanged: bool = False) -> None:
    found = session()
    if found is not None and not found.finished:
        found.measurements.add_unfrozen(max(0, found.last_step), unchanged=unchanged)


def parse_step(step: Any) -> int:
    """The number of updates as an int; raises ``InputError`` if it is not a whole number >= 0, of any numeric type."""
    try:
        number = -1.0 if isinstance(step, str) else float(step)
    except (TypeError, ValueError, RuntimeError):
        number = -1.0
    require(number >= 0 and number.is_integer(), f"step is the number of updates done, got {step!r}.")
    return int(number)


def _close_and_find_run(folder: Path, wanted: str) -> tuple[Run | None, bool]:
    """The run of an earlier scope in the folder, and whether it had finished by itself.

    A session of this process that still writes there is finished first: a notebook cell may be run again after an error.
    """
    other = _open_sessions.pop(str(folder.resolve()), None)
    interrupted = other is not None and not other.finished
    if other is not None:
        other.finish()
    before = find_earlier_run(folder, wanted)
    return before, before is not None and not interrupted and before.status()["state"] == "finished"
