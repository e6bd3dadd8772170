"""What a scope measures on its probe set, view by view: each quantity is exact, or left out with its reason.

``Instruments(model, probe)`` looks once at the network as it is and takes that as the start; ``take(step)`` looks again and
compares. Nothing here decides when to look, stores anything, or protects the model: that is the scope's part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.kernels.capture import call
from unlazy.kernels.compare import (
    centered_alignment,
    effective_rank,
    kernel_distance,
    relative_change,
)
from unlazy.kernels.gated import Gated, exact, has_hard_gates
from unlazy.kernels.overlap import overlap_kernel, path_count
from unlazy.runtime import InputError, Unsupported, require
from unlazy.scope import first_layer, linear
from unlazy.scope.gates import open_gates
from unlazy.scope.probe import Chosen, Probe, losses, right
from unlazy.scope.tangent import Measured, TangentLook, idle_seconds

VIEWS = ("paths", "tangents", "neurons")
MOST_GROUPS = 64
# The most samples that each expensive look takes; fewer where those would take longer than LOOK_SECONDS, but LEAST_ROWS.
MOST_PATHS = 1e30  # common paths of two samples that are kept as their number
MOST_ROWS = {"gates": 1024, "paths": 1024, "linear": 1024, "overlap": 512, "tangent": 512}
LOOK_SECONDS, LEAST_ROWS, TIMED_ROWS, TOO_LONG = 0.05, 24, (8, 16), 40
STILL = 32  # units of rounding: outputs that moved less have not moved
QUICK = 5.0  # seconds of a first measurement that is worth repeating, to know what the next will take
Named = dict[str, Tensor]
Look = Callable[[int], Measured]


@dataclass
class Start:
    """The network before training: what every distance refers to."""

    parameters: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    output: Tensor | None = None
    tangent: Tensor | None = None
    overlap: Tensor | None = None
    gates: list[Tensor] | None = None


@dataclass
class Instruments:
    """All looks at one model on one probe set. ``left_out``: what this model cannot offer, and why.

    ``looks``: by name, cheapest first: outputs, parameters, neurons, gates, paths, linear, overlap, tangent. A look that fails
    at the start for a reason of the model's is left out from then on. ``seconds``: how long each took the last time.
    """

    model: nn.Module
    probe: Probe
    views: tuple[str, ...] = VIEWS
    seed: int = 0
    strict: bool = False
    start: Start = field(default_factory=Start)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    looks: dict[str, Look] = field(default_factory=dict)
    fallen: dict[str, str] = field(default_factory=dict)  # looks that failed in the last measurement, and why
    notes: list[str] = field(default_factory=list)
    own_names: set[str] = field(default_factory=set)  # of the numbers measured so far
    rows: dict[str, Tensor | None] = field(default_factory=dict)  # by look, where not all samples are taken
    _parts: dict[str, Probe] = field(default_factory=dict)
    _previous: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    _push: linear.Push | None = None
    _size: Tensor | None = None  # |theta_0|

    def __post_init__(self) -> None:
        unknown = sorted(set(self.views) - set(VIEWS))
        require(not unknown, f"views are among {', '.join(VIEWS)}; got {', '.join(unknown)}.")
        self._dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        self.names = {module: _clean(self.model, name) for name, module in self.model.named_modules()}
        self.trained = {
            name: p for name, p in self.model.named_parameters() if p.requires_grad and p.is_floating_point()
        }
        if not self.start.parameters:
            self.start.parameters = {name: p.detach().clone() for name, p in self.trained.items()}
            self.start.buffers = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        self._tangents = TangentLook(exact(self.model), self.trained, self.names, self.seed, self.notes)
        looks: dict[str, tuple[str | None, Look]] = {
            "outputs": (None, self.outputs),
            "parameters": (None, self.parameters),
            "neurons": ("neurons", self.neurons),
            "gates": ("paths", self.gates),
            "paths": ("paths", self.paths),
            "linear": ("tangents", self.linear),
            "overlap": ("paths", self.overlap),
            "tangent": ("tangents", self.tangent),
        }
        self.looks = {name: look for name, (view, look) in looks.items() if view is None or view in self.views}
        self._note()
        if len(self.probe.groups) > MOST_GROUPS:
            self.left_out["groups"] = (
                f"{len(self.probe.groups)} groups are more than {MOST_GROUPS}; name some with groups="
            )

    @property
    def groups(self) -> Mapping[str, Tensor]:
        return {} if "groups" in self.left_out else self.probe.groups

    @property
    def layers(self) -> list[str]:
        """Modules that hold trained parameters themselves, in order."""
        owners = [(module, name) for module, name in self.names.items() if _own(module, self.trained.values())]
        return [name for _, name in owners]

    def _note(self) -> None:
        """What a reader of the numbers has to know about this model."""
        if self.probe.one_target:
            self.left_out["alignment"] = "all targets of the probe set are the same"
        if has_hard_gates(self.model):
            self.notes.append("hard gates are locally constant: the tangent kernel is over the value parameters")
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats for m in self.model.modules()):
            self.notes.append("batch-norms are in evaluation mode: their running statistics are part of what changed")

    # --- looking -----------------------------------------------------------------------------------------------

    def begin(self) -> Measured:
        """Look at everything for the first time; what the model cannot offer is left out from now on.

        The first look also prepares later ones. Where that was quick it is done twice, to know what a later one will take.
        """
        found: dict[str, Measured] = {}
        for again in (False, True):
            if again and sum(self.seconds.values()) >= QUICK:
                break
            for name in list(self.looks):
                try:
                    if name in MOST_ROWS and name not in self.rows:
                        self.rows[name] = self._affordable(name)
                    found[name] = self.take(name, 0)
                except Exception as error:  # whatever a stranger's model raises
                    if name == "outputs":
                        raise
                    self.left_out[name] = _reason(error)
                    del self.looks[name]
                    self.seconds.pop(name, None)
                    found.pop(name, None)
        return {number: value for measured in found.values() for number, value in measured.items()}

    def take(self, name: str, step: int) -> Measured:
        """One look, timed."""
        began = time.perf_counter()
        try:
            found = self.looks[name](step)
        finally:
            self.seconds[name] = time.perf_counter() - began
        self.own_names |= {number for number, value in found.items() if value.ndim == 0}
        return found

    def measure(self, step: int, names: Collection[str] | None = None) -> Measured:
        """Several looks. Where outputs are not finite the rest needs finite numbers and is not taken."""
        measured: Measured = {}
        for name in [name for name in self.looks if names is None or name in names]:
            try:
                measured |= self.take(name, step)
            except Exception as error:  # whatever a stranger's model raises
                if name == "outputs" or self.strict:
                    raise
                self.fallen[name] = self.left_out[name] = _reason(error)
                del self.looks[name]
            if name == "outputs" and not bool(measured["output"].isfinite().all()):
                return measured
        return measured

    def check(self) -> None:
        """Refuse a model whose trained parameters are others than at the start."""
        now = dict(self.model.named_parameters())
        new = [
            name for name, p in now.items() if p.requires_grad and p.is_floating_point() and name not in self.trained
        ]
        require(
            not new,
            f"{', '.join(_clean(self.model, name) for name in new[:3])} did not train when the scope was made, so nobody knows "
            "where it started; make a new scope.",
        )
        other = [name for name, p in self.trained.items() if now.get(name) is not p]
        known = ", ".join(_clean(self.model, name) for name in other[:3])
        require(not other, f"parameters were replaced since the scope was made ({known}); make a new scope.")

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Follow a model that was moved."""
        output = self.start.output
        if output is None or (output.device == device and self.probe.device == device and self._dtype == dtype):
            return
        self._dtype = dtype
        self.probe = self.probe.on(device, dtype)
        start = self.start
        for named in (start.parameters, start.buffers):
            for name, tensor in named.items():
                named[name] = tensor.to(device, dtype if tensor.is_floating_point() else None)
        start.output = output.to(device, dtype)
        start.tangent, start.overlap = (None if k is None else k.to(device) for k in (start.tangent, start.overlap))
        start.gates = None if start.gates is None else [gate.to(device) for gate in start.gates]
        self._previous = {name: (step, kernel.to(device)) for name, (step, kernel) in self._previous.items()}
        self._push, self._size, self._parts = None, None, {}
        self._tangents.forget()

    def remember(self, name: str, step: int, kernel: Tensor) -> None:
        """The kernel that the next velocity refers to."""
        self._previous[name] = (step, kernel)

    def output(self, part: Probe | None = None) -> Float[Tensor, "n o"]:
        """What the model answers now, on all samples or a part of them."""
        return _output(self.model, part or self.probe)

    def part(self, look: str) -> Probe:
        """The samples that a look is taken on: all of them, or some where all would take too long."""
        if look not in self._parts:
            rows = self.rows.get(look)
            self._parts[look] = self.probe if rows is None else self.probe.some(rows.to(self.probe.device))
        return self._parts[look]

    def _spread(self, look: str, values: Tensor) -> Tensor:
        """Values of a look's samples as values of all samples, NaN where it was not taken."""
        rows = self.rows.get(look)
        if rows is None:
            return values
        spread = values.new_full((len(self.probe), *values.shape[1:]), float("nan"))
        return spread.index_copy(0, rows.to(values.device), values)

    def _affordable(self, look: str) -> Tensor | None:
        """Which samples a look may take: as many as fit its seconds, known from a few of them; ``None`` for all."""
        n = len(self.probe)
        most, order = min(n, MOST_ROWS[look]), self.probe.order(self.seed)
        if n > TIMED_ROWS[1]:
            few = self._timed(look, order[: TIMED_ROWS[0]])
            if few > TOO_LONG * LOOK_SECONDS:
                return order[:LEAST_ROWS].sort().values
            few, more = (min(self._timed(look, order[:size]) for _ in range(2)) for size in TIMED_ROWS)
            growth = 2.0 if look == "overlap" else 1.0  # pairs, or samples; what does not grow cannot be helped
            unit = max(more - few, 1e-9) / (TIMED_ROWS[1] ** growth - TIMED_ROWS[0] ** growth)
            most = min(most, max(LEAST_ROWS, int((LOOK_SECONDS / unit) ** (1 / growth))))
        return None if most >= n else order[:most].sort().values

    def _timed(self, look: str, rows: Tensor) -> float:
        part = self.probe.some(rows.to(self.probe.device))
        return idle_seconds(lambda: self._raw(look, part))

    def _raw(self, look: str, part: Probe) -> object:
        """The expensive piece of a look alone."""
        if look == "gates":
            return open_gates(self.model, part.x)
        if look == "paths":
            return path_count(self.model, part.x, log=True)
        if look == "linear":
            return self._linearised(part)
        if look == "overlap":
            return self._overlap(part)
        return self._tangents.layers(part)

    def outputs(self, step: int) -> Measured:
        """Outputs, loss and accuracy, on all samples and on each group."""
        out = self.output()
        if self.start.output is None:
            self.start.output = out
        whole, by_group = losses(self.probe, out)
        measured = {"output": out, "loss": whole}
        measured |= {f"loss_{group}": value for group, value in by_group.items() if group in self.groups}
        if self.probe.labels is not None:
            measured["accuracy"] = right(self.probe, out).double().mean()
        if isinstance(self.model, Gated) and self.model.settings.gating != "own":
            measured["loss_hard_gates"] = losses(self.probe, _output(self.model.hard(), self.probe))[0]
        return measured

    def parameters(self, step: int) -> Measured:
        """|theta - theta_0| / |theta_0| over the trained parameters."""
        if self._size is None:
            self._size = _joint_norm(self.start.parameters.values())
        require(float(self._size) > 0, "all parameters start at 0, so that motion has no unit")
        moves = (_at_least_single(p.detach()) - self.start.parameters[name] for name, p in self.trained.items())
        return {"parameter_motion": _joint_norm(moves) / self._size}

    def neurons(self, step: int) -> Measured:
        """Directions and norms of the first layer's weights; half-spaces, where they are of the plane or of linear gates."""
        measured = first_layer.neurons(self.model)
        if "normals" not in measured and first_layer.in_plane(self.probe.x) and "half_spaces" not in self.left_out:
            try:
                measured |= first_layer.open_where(self.model, self.probe.x)
            except Exception as error:  # whatever a stranger's model raises; its neurons are seen all the same
                self.left_out["half_spaces"] = _reason(error)
                if step > 0:
                    self.fallen["half_spaces"] = self.left_out["half_spaces"]
        return measured

    def gates(self, step: int) -> Measured:
        """Share of the gates of the probe set that are open where they were closed at the start, or the other way."""
        now = open_gates(self.model, self.part("gates").x)
        if self.start.gates is None:
            self.start.gates = now
        flipped = torch.cat([a != b for a, b in zip(now, self.start.gates, strict=True)], dim=1)
        each = flipped.double().mean(1)
        return {"gate_flips": each.mean(), "flips": each}

    def paths(self, step: int) -> Measured:
        """Natural logarithms of 1 + number of active paths, and their means."""
        part = self.part("paths")
        logs = path_count(self.model, part.x, log=True)
        logs = torch.logaddexp(logs, torch.zeros_like(logs))
        inside = {group: part.groups[group] for group in self.groups}
        means = {f"paths_{group}": logs[rows].mean() for group, rows in inside.items() if bool(rows.any())}
        return {"paths": logs.mean(), "log_paths": self._spread("paths", logs)} | means

    def linear(self, step: int) -> Measured:
        """How far the outputs are from those of the network's tangent at the start, relative to how far they went.

        0 where they went no further than rounding: the two are computed in two ways, and their difference would be noise.
        """
        if has_hard_gates(self.model):
            name = type(self.model).__name__
            raise Unsupported(name, "hard gates have no derivative by their parameters", "Use soft gates.")
        part = self.part("linear")
        before, expected = self._linearised(part)
        out = self.output(part)
        if step == 0 and not torch.allclose(out, before, rtol=0, atol=rounding(out)):
            why = (
                "its outputs differ from pass to pass: it is random in evaluation mode, or the samples of a batch meet"
            )
            raise Unsupported(type(self.model).__name__, why, "Take that layer out.")
        went = (out - before).norm()
        moved = step > 0 and float(went) > STILL * torch.finfo(out.dtype).eps * float(before.norm())
        error = (out - expected).norm() / went if moved else torch.zeros_like(went)
        return {"linearisation_error": error, "linear": self._spread("linear", expected)}

    def _linearised(self, part: Probe) -> tuple[Tensor, Tensor]:
        """f_0 and f_0 + J_0 (theta - theta_0), both with the buffers of the start."""
        start = self.start
        if self._push is None:
            self._push = linear.how_to_push(self.model, start.parameters, start.buffers, part.x)
        moves = {name: p.detach() - start.parameters[name] for name, p in self.trained.items()}
        before, change = linear.push(self.model, start.parameters, start.buffers, moves, part.x, self._push)
        return before, before + change

    def overlap(self, step: int) -> Measured:
        """The overlap kernel of the probe set, its distance and velocity from the start, alignment, rank."""
        kernel = self._overlap(self.part("overlap"))
        if self.start.overlap is None:
            self.start.overlap = kernel
        return self._compared("overlap", step, kernel, self.start.overlap)

    def tangent(self, step: int) -> Measured:
        """The tangent kernel (trace over outputs) with its layers, and the AGOP of the same backward passes.

        Where the exact kernel would take too long or too much room, its estimate, with ``tangent_error`` beside it.
        """
        part = self.part("tangent")
        kernel, measured = self._tangents.look(part)
        if self.start.tangent is None:
            self.start.tangent = kernel
        measured |= self._compared("tangent", step, kernel, self.start.tangent)
        measured["tangent_change"] = relative_change(kernel, self.start.tangent)
        diagonal = kernel.diagonal()
        for group in self.groups:
            inside = part.groups[group]
            if not bool(inside.any()):
                continue
            measured[f"tangent_mass_{group}"] = diagonal[inside].sum() / diagonal.sum()
            if not bool(inside.all()):
                measured[f"alignment_{group}"] = centered_alignment(kernel, inside.double()[:, None])
        return measured

    # --- their parts -------------------------------------------------------------------------------------------

    def _compared(self, name: str, step: int, kernel: Tensor, start: Tensor) -> Measured:
        part = self.part(name)
        measured = {
            name: kernel,
            f"{name}_distance": kernel_distance(kernel, start).clamp(min=0),
            f"{name}_rank": effective_rank(kernel),
        }
        if not part.one_target:
            assert part.columns is not None
            measured[f"{name}_alignment"] = centered_alignment(kernel, part.columns.double())
        if name in self._previous:
            before, other = self._previous[name]
            elapsed = math.log1p(step) - math.log1p(before)
            if elapsed > 0:
                measured[f"{name}_velocity"] = kernel_distance(kernel, other) / elapsed
        self._previous[name] = (step, kernel)
        return measured

    def _overlap(self, part: Probe) -> Float[Tensor, "n n"]:
        """Numbers of common paths; under one common factor where a run, which keeps float32, could not hold them."""
        try:
            counts = overlap_kernel(self.model, part.x)
            if float(counts.max()) <= MOST_PATHS:
                return counts
        except InputError:  # even float64 cannot
            pass
        logs = overlap_kernel(self.model, part.x, log=True)
        return (logs - logs.max()).exp()


def _clean(model: nn.Module, name: str) -> str:
    return name.removeprefix("model").removeprefix(".") if isinstance(model, Chosen) else name


def _output(model: nn.Module, part: Probe) -> Float[Tensor, "n o"]:
    with torch.no_grad():
        return call(model, part.x).detach().clone()


def rounding(out: Tensor) -> float:
    """How far two ways to compute the same outputs may be apart."""
    return 1e3 * torch.finfo(out.dtype).eps * float(out.abs().max())


def _joint_norm(tensors: Iterable[Tensor]) -> Float[Tensor, ""]:
    """Of all entries of all tensors, summed in float64."""
    return torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]).norm()


def _at_least_single(tensor: Tensor) -> Tensor:
    return tensor.float() if torch.finfo(tensor.dtype).bits < 32 else tensor


def _own(module: nn.Module, trained: Iterable[Tensor]) -> bool:
    known = {id(p) for p in trained}
    return any(id(p) in known for p in module.parameters(recurse=False))


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
