"""What a scope measures on its probe set, view by view: each quantity is exact, or left out with its reason.

``Measurements(model, probe).measure_start()`` measures the network as the start; ``measure(step)`` measures again and compares.
Nothing here decides when to measure, stores anything, or protects the model: the session does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unlazy.kernels import jacobian
from unlazy.kernels.capture import Inputs, call_model, require_gradients, sample_count, take_samples
from unlazy.kernels.compare import (
    centered_alignment,
    effective_rank,
    kernel_distance,
    relative_change,
)
from unlazy.kernels.gated import Gated, has_hard_gates, with_exact_gradients
from unlazy.kernels.gram import size_text
from unlazy.kernels.overlap import overlap_kernel, path_count
from unlazy.runtime import InputError, UnlazyError, Unsupported, require
from unlazy.scope.blocks import Block, Blocks, find_blocks
from unlazy.scope.gates import first_layer_half_spaces, first_layer_neurons, is_in_plane, open_gates
from unlazy.scope.memory import MemoryLimit, is_out_of_memory
from unlazy.scope.positions import PositionOutputs
from unlazy.scope.probe_set import LossComparison, ProbeSet, correct_samples, probe_losses, sample_losses
from unlazy.scope.tangent import ESTIMATE_SECONDS, NO_JVP, Measured, TangentMeasure, TooSlow
from unlazy.scope.timing import idle_seconds, idle_timer
from unlazy.scope.user_model import SelectedOutput, exchange_values, normalise_by_batch

VIEWS = ("paths", "tangents", "neurons")
KERNELS = ("tangent", "overlap")
# Quantities that a run names otherwise than the measure they come from.
QUANTITIES = {
    "gates": "gate_flips",
    "linear": "linearisation_error",
    "parameters": "parameter_motion",
    "layers": "layer_error",
}
TRAINING_LOSSES = ("loss", "batch_loss", "train_loss")  # names under which loops report their loss
MOST_GROUPS = 64
MOST_PATHS = 1e30  # common paths of two samples that are kept as their number
# The most samples that each costly measure takes; fewer if those would take longer than MEASURE_SECONDS, but LEAST_ROWS.
MOST_ROWS = {"gates": 1024, "paths": 1024, "linear": 1024, "layers": 128, "overlap": 512, "tangent": 512}
MEASURE_SECONDS, LEAST_ROWS, TIMED_ROWS = 0.05, 24, (8, 16)
STILL = 32  # units of rounding: outputs that changed by less have not changed
QUICK = 5.0  # seconds: a first measurement that took less is repeated, to know what the next will take
# About what a costly measure takes of one sample, in forward passes and in the memory of a forward pass. The tangent kernel takes
# as much of every output, up to MOST_OUTPUTS: beyond, some directions of them serve.
PASSES = {"gates": 2.0, "paths": 4.0, "linear": 6.0, "layers": 6.0, "overlap": 4.0, "tangent": 3.0}
PLANNING, SMALLEST_TANGENT = 120.0, 128.0  # of the tangent kernel of random directions, in forward passes of a sample
FIRST_ROWS, MOST_OUTPUTS = 40, 16  # samples that a measure runs in all when it is first used, to choose and check
MOST_TRIES = 3  # of a measure of the start that did not fit the memory
Named = dict[str, Tensor]
MeasureFunction = Callable[[int], Measured]


@dataclass
class Start:
    """The network before training: what every distance refers to."""

    parameters: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    output: Tensor | None = None
    tangent: Tensor | None = None
    tangent_parts: Named = field(default_factory=dict)  # by block
    overlap: Tensor | None = None
    gates: list[Tensor] | None = None


@dataclass
class Measurements:
    """All measures of one model on one probe set.

    ``measures``: functions by name, cheapest first: outputs, parameters, neurons, gates, paths, linear, layers, overlap,
    tangent. Each takes the step and returns several numbers and arrays. ``left_out``: measures that this model does not allow,
    and why; one that fails at the start is not tried again. ``seconds``: how long each took the last time.
    """

    model: nn.Module
    probe: ProbeSet
    views: tuple[str, ...] = VIEWS
    seed: int = 0
    strict: bool = False
    start: Start = field(default_factory=Start)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    measures: dict[str, MeasureFunction] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)  # measures whose values at the start are still to be taken
    newly_failed: dict[str, str] = field(default_factory=dict)  # measures that failed at the last measurement, and why
    notes: list[str] = field(default_factory=list)
    unfrozen_after: dict[str, int] = field(
        default_factory=dict
    )  # steps done when a parameter that was frozen began to train
    limit: MemoryLimit | None = None  # the memory that measures may take; by default a share of what there is
    scalar_names: set[str] = field(default_factory=set)  # of the numbers measured so far
    rows: dict[str, Tensor | None] = field(default_factory=dict)  # by measure, where not all samples are used
    _samples: dict[str, ProbeSet] = field(default_factory=dict)
    _previous: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    _jvp: jacobian.Jvp | None = None
    _size: Tensor | None = None  # |theta_0|
    _blocks: Blocks | None = None
    _sizes: Named = field(default_factory=dict)  # norms of parameters at the start, by name
    _first_loss: float | None = None
    _losses: LossComparison = field(default_factory=LossComparison)
    _noted_chunks: bool = False  # whether a note says that samples pass the model in parts
    _pass_seconds: float | None = None  # of a forward pass of one sample
    _tries: dict[str, int] = field(default_factory=dict)  # by measure, how often its start did not fit the memory
    _forecast: dict[str, float] = field(default_factory=dict)  # by measure that was too slow, the seconds it would take

    def __post_init__(self) -> None:
        unknown = sorted(set(self.views) - set(VIEWS))
        require(not unknown, f"views are among {', '.join(VIEWS)}; got {', '.join(unknown)}.")
        self._dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        self.names = {module: _user_name(self.model, name) for name, module in self.model.named_modules()}
        self.trained = {
            name: p for name, p in self.model.named_parameters() if p.requires_grad and p.is_floating_point()
        }
        self._known = {name for name, _ in self.model.named_parameters()}
        self._frozen = {
            name: (p, p._version)
            for name, p in self.model.named_parameters()
            if name not in self.trained and p.is_floating_point() and not p.is_inference()
        }
        if not self.start.parameters:
            self.start.parameters = {name: p.detach().clone() for name, p in self.trained.items()}
            self.start.buffers = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        self._limit = self.limit or MemoryLimit(None, self.model, self.probe.x)
        self._tangents = TangentMeasure(
            with_exact_gradients(self.model), dict(self.trained), self.names, self.seed, self._limit, self.notes
        )
        measures: dict[str, tuple[str | None, MeasureFunction]] = {
            "outputs": (None, self.outputs),
            "parameters": (None, self.parameters),
            "neurons": ("neurons", self.neurons),
            "gates": ("paths", self.gates),
            "paths": ("paths", self.paths),
            "linear": ("tangents", self.linear),
            "layers": ("tangents", self.layers_alone),
            "overlap": ("paths", self.overlap),
            "tangent": ("tangents", self.tangent),
        }
        self.measures = {name: do for name, (view, do) in measures.items() if view is None or view in self.views}
        self._add_model_notes()
        if len(self.probe.groups) > MOST_GROUPS:
            self.left_out["groups"] = (
                f"{len(self.probe.groups)} groups are more than {MOST_GROUPS}; name some with groups="
            )

    @property
    def groups(self) -> Mapping[str, Tensor]:
        """The groups that are measured one by one: all of them, or none where they are too many."""
        return {} if "groups" in self.left_out else self.probe.groups

    @property
    def layers(self) -> list[str]:
        """Names of the modules that hold trained parameters themselves, in order."""
        owners = [(module, name) for module, name in self.names.items() if _holds_any(module, self.trained.values())]
        return [name for _, name in owners]

    @property
    def blocks(self) -> Blocks:
        """The layers in forward order, several in one block where they are many."""
        if self._blocks is None:
            few = take_samples(self.probe.x, slice(0, 2))
            with require_gradients(list(self.trained.values()), []):
                self._blocks = find_blocks(self.model, few, self.trained, lambda name: _user_name(self.model, name))
            layers = sum(len(block.layers) for block in self._blocks.blocks)
            if layers > len(self._blocks.blocks):
                self.add_note(f"{layers} layers are measured in {len(self._blocks.blocks)} blocks of layers in a row")
        return self._blocks

    def left_out_quantities(self) -> dict[str, str]:
        """What is not measured, by the names that a run uses, and why."""
        return {QUANTITIES.get(name, name): why for name, why in self.left_out.items()}

    def sampled_rows(self) -> dict[str, list[int]]:
        """By measure, the samples it is computed on, where not all."""
        return {name: rows.tolist() for name, rows in self.rows.items() if rows is not None}

    def _add_model_notes(self) -> None:
        """Note what a reader of the numbers has to know about this model."""
        if self.probe.has_one_target:
            self.left_out["alignment"] = "all targets of the probe set are the same"
        if self.probe.loss_name == "binary cross-entropy":
            self.notes.append(
                "the model has one output and targets are 0 and 1: the loss is binary cross-entropy of a logit"
            )
        if isinstance(self.model, PositionOutputs):
            self.notes.extend(self.model.notes())
        if has_hard_gates(self.model):
            self.notes.append("hard gates are locally constant: the tangent kernel is over the value parameters")
        if any(isinstance(m, _BatchNorm) and m.track_running_stats for m in self.model.modules()):
            self.notes.append(
                "batch-norms whose running statistics move normalise by the probe set in linearisation_error, as by a batch of "
                "training; in other measures the network and its start have the same running statistics"
            )

    # --- measuring ---------------------------------------------------------------------------------------------

    def measure_start(self, seconds: float = math.inf) -> Measured:
        """Run every measure for the first time; those that fail are left out from now on.

        The first time also prepares later ones. If it was quick it is repeated, to know what a later measurement will take.
        ``seconds``: how long this may take. What would take longer, or more memory than is allowed before a training step was
        seen, waits for :meth:`measure_waiting`.
        """
        elapsed = idle_timer()
        found: dict[str, Measured] = {}
        for name in list(self.measures):
            if math.isfinite(seconds) and self._should_wait(name, seconds - elapsed()):
                self.waiting.append(name)
            else:
                found[name] = self._measure_first(name)
        self.waiting.sort(key=lambda name: name != "linear")  # verdicts rest on it
        taken = sum(self.seconds.values())
        if taken < QUICK and elapsed() + taken <= seconds:
            for name in [name for name in found if name in self.measures and name not in self.waiting]:
                found[name] = self._measure_first(name)
        return {number: value for measured in found.values() for number, value in measured.items()}

    def measure_waiting(self, name: str | None = None) -> Measured:
        """Run the next measure that waits, or this one, at the parameters and buffers of the start: as if it had not waited."""
        now = dict(self.model.named_buffers())
        values: list[tuple[Tensor, Tensor]] = [(p, self.start.parameters[name]) for name, p in self.trained.items()]
        values += [(now[name], buffer.clone()) for name, buffer in self.start.buffers.items() if name in now]
        with exchange_values(values):
            return self._measure_first(self.waiting.pop(0 if name is None else self.waiting.index(name)))

    def expected_seconds(self, name: str) -> float:
        """About how long the first run of a costly measure takes, from a forward pass of a few samples."""
        if self._pass_seconds is None:
            few = self.probe.subset(torch.arange(min(len(self.probe), TIMED_ROWS[0]), device=self.probe.device))
            self._pass_seconds = idle_seconds(lambda: bool(self.output(few).isfinite().all())) / len(few)
        expected = self._pass_seconds * min(len(self.probe), FIRST_ROWS) * self._passes(name)
        expected *= len(self.blocks.blocks) if name == "layers" else 1
        if name == "tangent":  # it shrinks to the seconds it may take, but not below its smallest form
            smallest = self._pass_seconds * SMALLEST_TANGENT
            expected = min(expected, self._pass_seconds * PLANNING + max(self._tangents.seconds, smallest))
        return max(expected, self._forecast.get(name, 0.0))

    def set_seconds(self, seconds: float, most: float) -> None:
        """Set how long the tangent kernel should take, and at most, if it is not chosen yet."""
        self._tangents.seconds, self._tangents.most_seconds = max(0.0, min(seconds, ESTIMATE_SECONDS)), most

    def leave_out_waiting(self) -> None:
        """Leave out what still waits at the end, with its reason."""
        for name in self.waiting:
            self.left_out[name] = (
                f"its start was not measured: that and the end would take about {2 * self.expected_seconds(name):.2g} s, more "
                "than the time allowed. A longer training or a larger budget= pays for it"
            )
            self.measures.pop(name, None)
        self.waiting.clear()

    def _passes(self, name: str) -> float:
        outputs = 1 if self.start.output is None else self.start.output.shape[1]
        return PASSES[name] * (min(outputs, MOST_OUTPUTS) if name == "tangent" else 1)

    def _should_wait(self, name: str, seconds: float) -> bool:
        """Whether a measure needs more time than these seconds, or more memory than is allowed before the first step."""
        if name not in MOST_ROWS:
            return False
        needed = self._passes(name) * self._limit.sample_bytes * min(len(self.probe), MOST_ROWS[name])
        return (self._limit.is_early and needed > self._limit.allowed()) or self.expected_seconds(name) > seconds

    def _measure_first(self, name: str) -> Measured:
        """Run a measure at the start, on samples chosen for it; if it fails it is left out, for want of memory it waits."""
        try:
            if name in MOST_ROWS and name not in self.rows:
                self.rows[name] = self._choose_rows(name)
            return self._run_measure(name, 0)
        except Exception as error:  # a user's model may raise anything
            if name == "outputs":
                raise
            self.seconds.pop(name, None)
            if isinstance(error, TooSlow):
                self._forecast[name] = error.seconds
                self.waiting.append(name)
                self.rows.pop(name, None)
                return {}
            self._tries[name] = self._tries.get(name, 0) + 1
            if is_out_of_memory(error) and not self.strict and self._tries[name] < MOST_TRIES:
                self.waiting.append(name)
                self.rows.pop(name, None)
            else:
                self.left_out[name] = _describe_failure(name, error)
                del self.measures[name]
        return {}

    def _run_measure(self, name: str, step: int) -> Measured:
        """Run one measure and note its time."""
        began = time.perf_counter()
        try:
            found = self.measures[name](step)
        finally:
            self.seconds[name] = time.perf_counter() - began
        if name == "layers" and step == 0:  # it took the first block alone, to know the time
            self.seconds[name] *= len(self.blocks.blocks)
        self.scalar_names |= {number for number, value in found.items() if value.ndim == 0}
        return found

    def measure(self, step: int, names: Collection[str] | None = None) -> Measured:
        """Run the measures with these names, or all. Outputs that are not finite end it: the others need finite ones."""
        measured: Measured = {}
        wanted = [name for name in self.measures if (names is None or name in names) and name not in self.waiting]
        for name in wanted:
            try:
                measured |= self._run_measure(name, step)
            except Exception as error:  # a user's model may raise anything
                if self.strict or (name == "outputs" and not is_out_of_memory(error)):
                    raise
                if is_out_of_memory(error):  # only now: more may be free later
                    self.add_note(f"{name} is missing at some steps, where it did not fit the memory allowed")
                elif isinstance(error, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
                    # A training that breaks down has infinite kernels before its outputs are infinite.
                    self.add_note(f"{name} is missing at some steps, where its numbers were too large to compute with")
                else:
                    self.newly_failed[name] = self.left_out[name] = _describe_failure(name, error)
                    del self.measures[name]
            if name == "outputs" and "output" not in measured:
                return measured
            if name == "outputs" and not bool(measured["output"].isfinite().all()):
                return measured
        return measured

    @property
    def has_frozen_parameters(self) -> bool:
        """Whether parameters may begin to train later."""
        return bool(self._frozen)

    def add_unfrozen(self, step: int, *, unchanged: bool = False) -> None:
        """Count parameters that begin to train after this step: those that nobody has written to since the scope was made.

        Their value now is that of the start, so that the network linearised at the start includes them as if they had trained
        all along. ``unchanged``: whether it is known that they still have this value.
        """
        new = {
            name: p for name, (p, seen) in self._frozen.items() if p.requires_grad and (unchanged or p._version == seen)
        }
        if not new:
            return
        for name, p in new.items():
            del self._frozen[name]
            self.trained[name], self.start.parameters[name] = p, p.detach().clone()
            self.unfrozen_after[name] = step
        self._size = self._jvp = self.start.gates = self._blocks = (
            None  # gates that could not move before are counted now
        )
        first = _user_name(self.model, next(iter(new)))
        more = f" and {len(new) - 1} more parameters" if len(new) > 1 else ""
        self.notes.append(
            f"{first}{more} train from step {step + 1} on: linearisation_error and parameter_motion count them from there; the "
            "tangent kernel stays that by the parameters that trained at the start"
        )

    def check_parameters(self) -> None:
        """Raise ``InputError`` if the trained parameters are not those of the start."""
        now = dict(self.model.named_parameters())
        added = [name for name in now if name not in self._known]
        require(
            not added,
            f"{self._list_names(added)} joined the model after the scope was made, so the network is another one than its start; "
            "what was measured before stays, and a new scope measures from here.",
        )
        new = [
            name for name, p in now.items() if p.requires_grad and p.is_floating_point() and name not in self.trained
        ]
        require(
            not new,
            f"{self._list_names(new)} did not train when the scope was made and has changed since, so its start is not known; "
            "make a new scope.",
        )
        other = [name for name, p in self.trained.items() if now.get(name) is not p]
        require(
            not other,
            f"parameters were replaced or removed since the scope was made ({self._list_names(other)}); make a new scope.",
        )

    def _list_names(self, names: list[str]) -> str:
        """The first names of parameters, as the user knows them."""
        return ", ".join(_user_name(self.model, name) for name in names[:3]) + (", ..." if len(names) > 3 else "")

    def move_to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move probe set and start to where the model is now."""
        output = self.start.output
        if output is None or (output.device == device and self.probe.device == device and self._dtype == dtype):
            return
        self._dtype = dtype
        self.probe = self.probe.to(device, dtype)
        start = self.start
        for named in (start.parameters, start.buffers):
            for name, tensor in named.items():
                named[name] = tensor.to(device, dtype if tensor.is_floating_point() else None)
        start.output = output.to(device, dtype)
        start.tangent, start.overlap = (None if k is None else k.to(device) for k in (start.tangent, start.overlap))
        start.tangent_parts = {name: part.to(device) for name, part in start.tangent_parts.items()}
        start.gates = None if start.gates is None else [gate.to(device) for gate in start.gates]
        self._previous = {name: (step, kernel.to(device)) for name, (step, kernel) in self._previous.items()}
        self._jvp, self._size, self._samples = None, None, {}
        self._tangents.reset()
        self._limit.profile(self.model, self.probe.x)

    def compare_losses(self, measured: Measured, reported: Mapping[str, Any]) -> None:
        """Note it if the loss that the training reported beside this measurement is far from the loss on the probe set."""
        if "loss" not in measured:
            return
        own = float(measured["loss"])
        self._first_loss = own if self._first_loss is None else self._first_loss
        found = next((reported[name] for name in TRAINING_LOSSES if name in reported), None)
        if not isinstance(found, Tensor | float | int):
            return
        in_training = float(torch.as_tensor(found).detach().double().mean())
        note = self._losses.note(self.probe, own, in_training, self._first_loss)
        if note is not None:
            self.notes.append(note)

    def set_previous_kernel(self, name: str, step: int, kernel: Tensor) -> None:
        """Set the kernel that the next velocity is measured from."""
        self._previous[name] = (step, kernel)

    def set_directions(self, count: int) -> None:
        """Estimate the tangent kernel from so many directions of the outputs, as an earlier run did."""
        self._tangents.count = count

    def output(self, part: ProbeSet | None = None) -> Float[Tensor, "n o"]:
        """Outputs of the model now, on all samples or a part of them."""
        return self._output_of(self.model, part or self.probe)

    def _output_of(self, model: nn.Module, part: ProbeSet) -> Float[Tensor, "n o"]:
        size = self._chunk_size(1.0, len(part))
        with torch.no_grad():
            if size >= len(part):
                return call_model(model, part.x).detach().clone()
            return torch.cat([call_model(model, some) for some in _split_samples(part.x, size)])

    def _chunk_size(self, copies: float, usual: int) -> int:
        """How many samples pass the model at a time: ``usual``, or as many as fit the memory, with a note then."""
        fit = self._limit.rows(copies)
        if fit < min(usual, len(self.probe)) and not self._noted_chunks and not self._limit.is_early:
            self._noted_chunks = True
            allowed = size_text(self._limit.allowed())
            self.notes.append(f"samples pass the model in parts ({fit} at a time), which fit {allowed} of memory")
        return min(usual, fit)

    def samples_of(self, measure: str) -> ProbeSet:
        """The samples that a measure is computed on: all of them, or some if all would take too long."""
        if measure not in self._samples:
            rows = self.rows.get(measure)
            self._samples[measure] = self.probe if rows is None else self.probe.subset(rows.to(self.probe.device))
        return self._samples[measure]

    def _fill_missing_samples(self, measure: str, values: Tensor) -> Tensor:
        """Values of all samples: those of the samples the measure was computed on, NaN for the others."""
        rows = self.rows.get(measure)
        if rows is None:
            return values
        filled = values.new_full((len(self.probe), *values.shape[1:]), float("nan"))
        return filled.index_copy(0, rows.to(values.device), values)

    def _choose_rows(self, measure: str) -> Tensor | None:
        """The samples that a measure uses: as many as fit its time, estimated from a few of them; ``None`` for all."""
        n = len(self.probe)
        most, order = min(n, MOST_ROWS[measure]), self.probe.balanced_order(self.seed)
        if measure == "tangent":
            part = self.probe.subset(order[: TIMED_ROWS[0]].to(self.probe.device)) if n > TIMED_ROWS[1] else self.probe
            most = self._tangents.plan(part, most, LEAST_ROWS)
            if self._tangents.method is not None:  # memory has decided, so time need not
                return None if most >= n else order[:most].sort().values
        if measure == "gates":
            most = self._chunk_size(1.0, most)  # gates of all of them are held
        if n > TIMED_ROWS[1]:
            few = self._time_measure(measure, order[: TIMED_ROWS[0]])
            if few > MEASURE_SECONDS:  # the first time may also prepare something
                few = self._time_measure(measure, order[: TIMED_ROWS[0]])
            if few > MEASURE_SECONDS:
                return order[:LEAST_ROWS].sort().values
            few, more = (min(self._time_measure(measure, order[:size]) for _ in range(2)) for size in TIMED_ROWS)
            growth = 2.0 if measure == "overlap" else 1.0  # time grows with pairs, or with samples
            unit = max(more - few, 1e-9) / (TIMED_ROWS[1] ** growth - TIMED_ROWS[0] ** growth)
            most = min(most, max(LEAST_ROWS, int((MEASURE_SECONDS / unit) ** (1 / growth))))
        return None if most >= n else order[:most].sort().values

    def _time_measure(self, measure: str, rows: Tensor) -> float:
        """Seconds that a measure takes on these samples."""
        part = self.probe.subset(rows.to(self.probe.device))
        return idle_seconds(lambda: self._run_costly_part(measure, part))

    def _run_costly_part(self, measure: str, part: ProbeSet) -> object:
        """The part of a measure that takes the time."""
        if measure == "gates":
            return self._open_gates(part)
        if measure == "paths":
            return self._path_logs(part)
        if measure == "linear":
            return self._linearised_outputs(part)
        if measure == "layers":
            return self._measure_block(self.blocks.blocks[0], part)
        if measure == "overlap":
            return self._overlap_counts(part)
        return self._tangents.by_layer(part)

    def outputs(self, step: int) -> Measured:
        """Outputs, loss and accuracy, on all samples and on each group."""
        if isinstance(self.model, PositionOutputs):
            return self._position_outputs(self.model)
        out = self.output()
        if self.start.output is None:
            self.start.output = out
        whole, by_group = probe_losses(self.probe, out)
        measured = {"output": out, "loss": whole}
        each = sample_losses(self.probe, out)
        if each is not None:
            measured["sample_loss"] = each
        measured |= {f"loss_{group}": value for group, value in by_group.items() if group in self.groups}
        if self.probe.labels is not None:
            measured["accuracy"] = correct_samples(self.probe, out).double().mean()
        if isinstance(self.model, Gated) and self.model.settings.gating != "own":
            measured["loss_hard_gates"] = probe_losses(self.probe, self._output_of(self.model.hard(), self.probe))[0]
        return measured

    def _position_outputs(self, model: PositionOutputs) -> Measured:
        """Outputs, loss and accuracy of a model that answers at every position; groups of positions have a loss as well."""
        found = model.answers(self.probe, self._chunk_size(1.0, len(self.probe)))
        if self.start.output is None:
            self.start.output = found.output
        groups = {**self.groups, **self.probe.position_groups}
        measured = {"output": found.output, "loss": found.loss(), "accuracy": found.accuracy()}
        measured["sample_loss"] = found.sample_losses()
        return measured | {f"loss_{group}": found.loss(inside) for group, inside in groups.items()}

    def parameters(self, step: int) -> Measured:
        """|theta - theta_0| / |theta_0| over the trained parameters."""
        if self._size is None:
            self._size = _joint_norm(self.start.parameters.values())
        require(float(self._size) > 0, "all parameters start at 0, so that motion has no unit")
        norms, measured = [], Measured()
        for block in self.blocks.blocks:
            norm, unit = self._motion_of(block)
            norms.append(norm)
            if float(unit) > 0:
                measured[f"layer_motion@{block.name}"] = norm / unit
            elif float(norm) == 0:
                measured[f"layer_motion@{block.name}"] = torch.zeros_like(norm)
        return {"parameter_motion": torch.stack(norms).norm() / self._size} | measured

    def _motion_of(self, block: Block) -> tuple[Tensor, Tensor]:
        """|theta - theta_0| of a block, and |theta_0| over those entries that moved: others received no gradient.

        Such entries are those of words that no sample has. One tensor at a time is held: they may be as large as the model.
        """
        went, size = [], []
        for name in block.parameters:
            start = self.start.parameters[name]
            move = _at_least_float32(self.trained[name].detach()) - start
            went.append(_joint_norm([move]))
            moved = move != 0
            if bool(moved.all()):
                if name not in self._sizes:
                    self._sizes[name] = _joint_norm([start])
                size.append(self._sizes[name].to(move.device))
            else:
                size.append(_joint_norm([_at_least_float32(start) * moved]))
        return torch.stack(went).norm(), torch.stack(size).norm()

    def neurons(self, step: int) -> Measured:
        """Directions and norms of the first layer's weights; its half-spaces for inputs in the plane or linear gates."""
        measured = first_layer_neurons(self.model)
        if "normals" not in measured and is_in_plane(self.probe.x) and "half_spaces" not in self.left_out:
            try:
                measured |= first_layer_half_spaces(self.model, self.probe.x)
            except Exception as error:  # a user's model may raise anything; its neurons are measured all the same
                self.left_out["half_spaces"] = _describe_failure("half_spaces", error)
                if step > 0:
                    self.newly_failed["half_spaces"] = self.left_out["half_spaces"]
        return measured

    def gates(self, step: int) -> Measured:
        """Share of the gates on the probe set that opened or closed since the start."""
        now = self._open_gates(self.samples_of("gates"))
        if self.start.gates is None or self._buffers_moved():
            self.start.gates = now if step == 0 else self.gates_at_start()
        flips = [(a != b).sum(1) for a, b in zip(now, self.start.gates, strict=True)]
        each = torch.stack(flips).sum(0).double() / sum(gate.shape[1] for gate in now)
        return {"gate_flips": each.mean(), "flips": each} | self._gate_flips_by_block(now, flips)

    def _gate_flips_by_block(self, gates: list[Tensor], flips: list[Tensor]) -> Measured:
        """Share of the gates behind each block that flipped, where it is known which layer ran before a gate."""
        owners = () if isinstance(self.model, Gated) else self.blocks.gate_layers
        if len(owners) != len(gates):
            return {}
        flipped = self.blocks.sum_by_block(
            (owner, each.sum().double()) for owner, each in zip(owners, flips, strict=True)
        )
        sizes = (
            (owner, each.new_tensor(gate.numel(), dtype=torch.float64))
            for owner, gate, each in zip(owners, gates, flips, strict=True)
        )
        counts = self.blocks.sum_by_block(sizes)
        return {f"layer_flips@{name}": flipped[name] / counts[name] for name in flipped}

    def gates_at_start(self) -> list[Tensor]:
        """The gates of the network with the parameters of the start and the buffers of now."""
        with self._at_start():
            return self._open_gates(self.samples_of("gates"))

    def paths(self, step: int) -> Measured:
        """Natural logarithms of 1 + number of active paths, and their means."""
        part = self.samples_of("paths")
        logs = self._path_logs(part)
        logs = torch.logaddexp(logs, torch.zeros_like(logs))
        inside = {group: part.groups[group] for group in self.groups}
        means = {f"paths_{group}": logs[rows].mean() for group, rows in inside.items() if bool(rows.any())}
        return {"paths": logs.mean(), "log_paths": self._fill_missing_samples("paths", logs)} | means

    def linear(self, step: int) -> Measured:
        """Distance of the outputs from those of the network linearised at the start, relative to their change since the start.

        All three have the same buffers, and batch-norms in training normalise by these samples: running statistics that move
        change nothing by themselves. 0 if the outputs changed by no more than rounding: the difference would be noise.
        """
        if has_hard_gates(self.model):
            name = type(self.model).__name__
            raise Unsupported(name, "hard gates have no derivative by their parameters", "Use soft gates.")
        part = self.samples_of("linear")
        before, expected, out = self._linearised_outputs(part)
        went = (out - before).norm()
        moved = step > 0 and float(went) > STILL * torch.finfo(out.dtype).eps * float(before.norm())
        error = (out - expected).norm() / went if moved else torch.zeros_like(went)
        return {"linearisation_error": error, "linear": self._fill_missing_samples("linear", expected)}

    def _linearised_outputs(self, part: ProbeSet) -> tuple[Tensor, Tensor, Tensor]:
        """f_0, f_0 + J_0 (theta - theta_0) and f, all with the buffers of now, in the same batches."""
        start, buffers = self.start, dict(self.model.named_buffers())
        if self._jvp is None:
            self._refuse_randomness(part)
            self._jvp = jacobian.choose_jvp(self.model, start.parameters, buffers, part.x, remedy=NO_JVP)
        moves = {name: p.detach() - start.parameters[name] for name, p in self.trained.items()}
        with self._batch_norms_by_batch(part) as at_once:
            before, change = jacobian.jvp_at(self.model, start.parameters, buffers, moves, part.x, self._jvp, at_once)
            with torch.no_grad():
                out = torch.cat([call_model(self.model, some) for some in _split_samples(part.x, at_once)])
        return before, before + change, out

    def layers_alone(self, step: int) -> Measured:
        """Three numbers of every block, on the samples of this measure; 0 at the start, where one block is tried, to time it.

        With theta_b the parameters of the block now, and all others at the start: ``layer_move``, how far the outputs went,
        relative to those of the whole network; ``layer_error``, their distance from the tangent at the start, relative to how
        far they went. With theta_b at the start, and all others now: ``reset_cost``, by how much the loss is higher.
        """
        part = self.samples_of("layers")
        if step == 0:
            tangent = self._measure_block(self.blocks.blocks[0], part)[1]
            names = ("layer_move", "reset_cost") if tangent is None else ("layer_error", "layer_move", "reset_cost")
            return {f"{name}@{block.name}": torch.zeros(()) for block in self.blocks.blocks for name in names}
        with self._batch_norms_by_batch(part) as at_once:
            now, loss = self._outputs_and_loss(part, at_once)
        measured: Measured = {}
        for block in self.blocks.blocks:
            before, tangent, alone, reset = self._measure_block(block, part)
            went, size = (now - before).norm(), (alone - before).norm()
            rounding = STILL * torch.finfo(now.dtype).eps * float(before.norm())
            if tangent is not None:
                error = (alone - before - tangent).norm() / size if float(size) > rounding else torch.zeros_like(size)
                measured[f"layer_error@{block.name}"] = error
            measured[f"layer_move@{block.name}"] = size / went if float(went) > rounding else torch.zeros_like(size)
            measured[f"reset_cost@{block.name}"] = reset - loss
        return measured

    def _measure_block(self, block: Block, part: ProbeSet) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """f_0; J_0 v for the move v of a block alone (``None`` for hard gates); f with this block alone moved; the loss of the
        network with this block alone at its start.
        """
        start, own = self.start.parameters, set(block.parameters)
        with self._batch_norms_by_batch(part) as at_once:
            tangent = None
            if not has_hard_gates(self.model):
                buffers = dict(self.model.named_buffers())
                if self._jvp is None:
                    self._refuse_randomness(part)
                    self._jvp = jacobian.choose_jvp(self.model, start, buffers, part.x, remedy=NO_JVP)
                values = {name: start[name] for name in block.parameters}
                others = {name: value for name, value in start.items() if name not in own}
                moves = {name: self.trained[name].detach() - start[name] for name in block.parameters}
                at = {**others, **buffers}
                before, tangent = jacobian.jvp_at(self.model, values, at, moves, part.x, self._jvp, at_once)
            else:
                with self._at_start():
                    before = self._outputs_and_loss(part, at_once)[0]
            with exchange_values([(p, start[name]) for name, p in self.trained.items() if name not in own]):
                alone = self._outputs_and_loss(part, at_once)[0]
            with exchange_values([(self.trained[name], start[name]) for name in block.parameters]):
                reset = self._outputs_and_loss(part, at_once)[1]
        return before, tangent, alone, reset

    @contextmanager
    def _batch_norms_by_batch(self, part: ProbeSet) -> Iterator[int]:
        """Inside the block, batch-norms in training normalise by the batch; yields how many samples pass at a time."""
        factor = 3.0 if self._jvp is None else jacobian.jvp_memory_factor(self._jvp)
        at_once = self._chunk_size(factor, jacobian.JVP_SAMPLES)
        at_once = math.ceil(len(part) / math.ceil(len(part) / at_once))  # no small batch at the end
        with normalise_by_batch(self._training_norms() if at_once > 1 else []):
            yield at_once

    def _outputs_and_loss(self, part: ProbeSet, at_once: int) -> tuple[Tensor, Tensor]:
        """Outputs and loss of the model on some samples, with the parameters it has now."""
        if isinstance(self.model, PositionOutputs):
            found = self.model.answers(part, at_once)
            return found.output, found.loss()
        with torch.no_grad():
            out = torch.cat([call_model(self.model, some) for some in _split_samples(part.x, at_once)])
        return out, probe_losses(part, out)[0]

    def _refuse_randomness(self, part: ProbeSet) -> None:
        few = part.subset(torch.arange(min(len(part), TIMED_ROWS[0]), device=part.device))
        out, again = self.output(few), self.output(few)
        if not torch.allclose(out, again, rtol=0, atol=rounding_bound(out), equal_nan=True):
            self.add_note("the model is random in evaluation mode, and so is a part of every number")
            why = "its outputs differ from pass to pass in evaluation mode, as with dropout that is always on"
            raise Unsupported(type(self.model).__name__, why, "Switch the randomness off where self.training is False.")

    def overlap(self, step: int) -> Measured:
        """The overlap kernel of the probe set, its distance and velocity from the start, alignment, rank."""
        part = self.samples_of("overlap")
        kernel, start = self._overlap_counts(part), self.start.overlap
        if start is None:
            start = self.start.overlap = kernel
        elif self._buffers_moved():
            with self._at_start():
                start = self._overlap_counts(part)
        return self._compare_kernel("overlap", step, kernel, start)

    def tangent(self, step: int) -> Measured:
        """The tangent kernel (trace over outputs) with its layers, and the AGOP of the same backward passes.

        If the exact kernel would take too long or too much memory: its estimate, with errors beside the numbers.
        """
        part, start = self.samples_of("tangent"), self.start.tangent
        if start is not None and self._buffers_moved():
            with self._at_start():
                start, self._tangents.start = self._tangents.measure(part)[0], self._tangents.estimate
            self.start.tangent_parts = self._tangent_parts()
        elif start is not None and not self.start.tangent_parts and self.trained.keys() <= self.start.parameters.keys():
            with self._at_start():  # a resumed run keeps the kernel of the start, not its parts
                self._tangents.measure(part)
            self.start.tangent_parts = self._tangent_parts()
        kernel, measured = self._tangents.measure(part)
        parts = self._tangent_parts()
        if start is None:
            start = self.start.tangent = kernel
            self._tangents.start = self._tangents.estimate
            self.start.tangent_parts = parts
        measured |= self._share_kernel(parts, kernel, start)
        measured |= self._tangents.errors(part)
        measured |= self._compare_kernel("tangent", step, kernel, start)
        measured["tangent_change"] = relative_change(kernel, start)
        diagonal = kernel.diagonal()
        for group in self.groups:
            inside = part.groups[group]
            if not bool(inside.any()):
                continue
            measured[f"tangent_mass_{group}"] = diagonal[inside].sum() / diagonal.sum()
            if not bool(inside.all()):
                measured[f"alignment_{group}"] = centered_alignment(kernel, inside.double()[:, None])
        return measured

    def _tangent_parts(self) -> Named:
        """The parts of the last tangent kernel by block; those by layer, which may be many, are let go of."""
        parts, self._tangents.parts = self._tangents.parts, {}
        return self.blocks.sum_by_block(parts.items())

    def _share_kernel(self, parts: Named, kernel: Tensor, start: Tensor) -> Measured:
        """Each block's share of the tangent kernel's trace, and of its change D = K - K_0: <K_b - K_b0, D> / |D|^2.

        The shares of the change add up to 1. They are 0 where nothing changed, and missing in a resumed run that does not know
        the parameters of the start.
        """
        change, trace = kernel - start, kernel.diagonal().sum()
        size, measured = change.square().sum(), Measured()
        for name, part in parts.items():
            measured[f"tangent_share@{name}"] = part.diagonal().sum().double() / trace
            if name in self.start.tangent_parts:
                own = part.double() - self.start.tangent_parts[name].double()
                share = (own * change).sum() / size if float(size) > 0 else torch.zeros_like(size)
                measured[f"tangent_change_share@{name}"] = share
        return measured

    # --- helpers -----------------------------------------------------------------------------------------------

    def _buffers_moved(self) -> bool:
        """Whether buffers that outputs may depend on, such as running statistics, are others than at the start."""
        start = self.start.buffers
        return any(
            name in start and b.is_floating_point() and not torch.equal(b, start[name])
            for name, b in self.model.named_buffers()
        )

    def _training_norms(self) -> list[_BatchNorm]:
        """Batch-norms in training mode: those whose running statistics moved.

        Not synchronised ones, which would wait for other processes.
        """
        start, name_of = self.start.buffers, {module: name for name, module in self.model.named_modules()}
        return [
            module
            for module, name in name_of.items()
            if isinstance(module, _BatchNorm)
            and not isinstance(module, nn.SyncBatchNorm)
            and (mean := module.running_mean) is not None
            and not torch.equal(mean, start.get(f"{name}.running_mean", mean))
        ]

    @contextmanager
    def _at_start(self) -> Iterator[None]:
        """Inside the block the model has the parameters of the start, and the buffers of now.

        The network and its start are compared with one set of buffers: else a batch-norm whose running statistics settle would
        look like a network that learns.
        """
        require(
            self.trained.keys() <= self.start.parameters.keys(),
            "the running statistics moved, and the parameters of the start are not known, so the two cannot be told apart",
        )
        with exchange_values([(p, self.start.parameters[name]) for name, p in self.trained.items()]):
            yield

    def _compare_kernel(self, name: str, step: int, kernel: Tensor, start: Tensor) -> Measured:
        part = self.samples_of(name)
        measured = {
            name: kernel,
            f"{name}_distance": kernel_distance(kernel, start).clamp(min=0),
            f"{name}_rank": effective_rank(kernel),
        }
        if not part.has_one_target:
            assert part.columns is not None
            measured[f"{name}_alignment"] = centered_alignment(kernel, part.columns.double())
        if name in self._previous:
            before, other = self._previous[name]
            elapsed = math.log1p(step) - math.log1p(before)
            if elapsed > 0:
                measured[f"{name}_velocity"] = kernel_distance(kernel, other) / elapsed
        self._previous[name] = (step, kernel)
        return measured

    def _open_gates(self, part: ProbeSet) -> list[Tensor]:
        """Gates that depend on a parameter that trains, or did so earlier."""
        with require_gradients(list(self.trained.values()), []):
            return open_gates(self.model, part.x, self._chunk_size(2.0, len(part)))

    def _path_logs(self, part: ProbeSet) -> Float[Tensor, " n"]:
        size = self._chunk_size(4.0, len(part))
        return torch.cat([path_count(self.model, some, log=True) for some in _split_samples(part.x, size)])

    def add_note(self, note: str) -> None:
        """Add a note for readers of the numbers, once."""
        if note not in self.notes:
            self.notes.append(note)

    def _overlap_counts(self, part: ProbeSet) -> Float[Tensor, "n n"]:
        """Numbers of common paths, divided by their largest if float32, in which a run keeps them, could not hold them."""
        try:
            counts = overlap_kernel(self.model, part.x, memory=self._limit.allowed())
            if float(counts.max()) <= MOST_PATHS:
                return counts
        except InputError:  # even float64 cannot
            pass
        logs = overlap_kernel(self.model, part.x, log=True, memory=self._limit.allowed())
        return (logs - logs.max()).exp()


def _user_name(model: nn.Module, name: str) -> str:
    """The name of a module or parameter in the user's own model."""
    return name.removeprefix("model").removeprefix(".") if isinstance(model, SelectedOutput) else name


def _split_samples(x: Inputs, size: int) -> list[Inputs]:
    n = sample_count(x)
    return [x] if size >= n else [take_samples(x, slice(start, start + size)) for start in range(0, n, size)]


def rounding_bound(out: Tensor) -> float:
    """The largest difference that two ways to compute the same outputs may have."""
    return 1e3 * torch.finfo(out.dtype).eps * float(out.abs().max())


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """The tensor as an array; half precision, which numpy lacks, as float32."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).cpu().numpy()


def _joint_norm(tensors: Iterable[Tensor]) -> Float[Tensor, ""]:
    """The norm of all entries of all tensors together, summed in float64."""
    return torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]).norm()


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if torch.finfo(tensor.dtype).bits < 32 else tensor


def _holds_any(module: nn.Module, trained: Iterable[Tensor]) -> bool:
    known = {id(p) for p in trained}
    return any(id(p) in known for p in module.parameters(recurse=False))


def _describe_failure(name: str, error: Exception) -> str:
    """Why a measure is left out: an error of ours says it itself; another one is named, with the first line of its text."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, UnlazyError):
        return text
    why = "does not fit the memory" if is_out_of_memory(error) else "could not be computed for this model"
    return f"{QUANTITIES.get(name, name)} {why} ({type(error).__name__}: {text})"
