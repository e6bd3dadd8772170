"""The tangent kernel of the probe set: exact and layer by layer, or one output direction at a time, whichever fits.

All outputs at once where that fits memory and time (method ``layers``). Else one direction of the outputs at a time (method
``directions``): each output where they are few, which is exact, or random directions, with the error beside the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.kernels.capture import take_samples
from unlazy.kernels.compare import centered_alignment, kernel_distance, relative_change
from unlazy.kernels.gram import TooLittleMemory, size_text
from unlazy.kernels.tangent_engine import RuleMismatch
from unlazy.runtime import InputError
from unlazy.scope.directions import Directions, DirectionTangents, KernelEstimate
from unlazy.scope.layers import LayerTangents, Tangents, agop_correlation
from unlazy.scope.memory import MemoryLimit
from unlazy.scope.probe_set import ProbeSet
from unlazy.scope.timing import idle_seconds

EXACT_SECONDS = 3.0  # all outputs at once only if that takes no longer
DIRECTIONS, FEWEST_DIRECTIONS = 16, 2  # of the outputs, where these are more; fewer where that would take longer than:
ESTIMATE_SECONDS = 2.0
FEWEST_SAMPLES = 8  # of a kernel of random directions that would take longer with more
TIMED_OUTPUTS = 8
TRIALS, TRIAL_SECONDS = (2, 8), 0.5  # samples and outputs of first trials; what the next one may take
NO_JVP = "The other measures need first derivatives only."  # what to do without a product with the Jacobian
Measured = dict[str, Tensor]


class TooSlow(InputError):  # noqa: N818
    """A measure would take longer than it may, even in its smallest form. ``seconds``: about how long."""

    def __init__(self, seconds: float, most: float) -> None:
        super().__init__(f"it would take about {seconds:.2g} s, and the training pays for {max(0.0, most):.2g} s now")
        self.seconds = seconds


@dataclass
class TangentMeasure:
    """The tangent kernel by the trained parameters, traced over outputs, at their current values.

    ``names``: of modules. ``limit``: the memory it may take. ``notes``: a list that it adds to if the kernel is not exact.
    ``seconds``: about how long a kernel of random directions should take: directions and samples become fewer until it does. If
    the fewest take longer than ``most_seconds``, it is refused. ``count``: of directions, if an earlier run chose it.
    """

    model: nn.Module
    trained: Mapping[str, nn.Parameter]
    names: dict[nn.Module, str]
    seed: int
    limit: MemoryLimit
    notes: list[str] = field(default_factory=list)
    seconds: float = ESTIMATE_SECONDS
    most_seconds: float = math.inf
    count: int | None = None
    method: str | None = None  # layers or directions; chosen before the first measurement
    directions: Directions | None = None  # the same ones at every step
    parts: Measured = field(default_factory=dict)  # of the last kernel, by layer
    estimate: KernelEstimate | None = None  # of the last measurement; None for an exact kernel
    start: KernelEstimate | None = None  # of the kernel that later ones are compared with
    _rules: str = "auto"  # "loop" once the rules of layers have failed
    _kernel: LayerTangents | None = None
    _folded: frozenset[int] | None = None  # the layers that were folded at the first measurement

    def measure(self, part: ProbeSet) -> tuple[Float[Tensor, "n n"], Measured]:
        """The kernel, and numbers beside it: alignment of every layer and AGOP."""
        if self.method is None:
            self.plan(part, len(part), len(part))
            self.method = self.method or "layers"
        try:
            tangents = self._by_method(part)
        except RuleMismatch:  # found out by other samples than those that rules were checked on
            self._rules, self._kernel, self._folded = "loop", None, None
            if self.method == "layers":
                self._plan_directions(part, len(part), len(part), "rules of its layers do not fit all samples")
            tangents = self._by_method(part)
        self.parts = tangents.parts
        return tangents.kernel.double(), self._layer_numbers(tangents, part)

    def plan(self, few: ProbeSet, rows: int, least: int) -> int:
        """Choose the method by memory and time; returns on how many of ``rows`` samples the kernel is computed.

        All outputs at once on as many samples as fit, if ``least`` do and take ``EXACT_SECONDS`` at most; else one direction
        at a time. ``few``: the samples that rules are checked on. Nothing large is made here.
        """
        least, allowed = min(rows, least), self.limit.allowed()
        if self.count is not None:
            return self._plan_directions(few, rows, least, "the earlier run did so")
        try:
            kernel = self._prepare_kernel(few)
            fit = min(rows, kernel.most_rows(allowed))
            seconds = self._exact_seconds(kernel, few) * least / len(few) if fit >= least else 0.0
        except RuleMismatch:
            self._rules = "loop"
            return self._plan_directions(few, rows, least, "rules of its layers do not fit all samples")
        except TooLittleMemory as error:
            return self._plan_directions(few, rows, least, str(error).split(". Give")[0])
        if fit < least:
            return self._plan_directions(few, rows, least, f"{least} samples take more than {size_text(allowed)}")
        if seconds > EXACT_SECONDS:
            return self._plan_directions(few, rows, least, f"{least} samples would take about {seconds:.0f} s")
        if fit < rows:
            self.notes.append(f"the tangent kernel is taken on {fit} samples, which fit {size_text(allowed)} of memory")
        return fit

    def by_layer(self, part: ProbeSet) -> Tangents:
        """The exact kernel as a sum over layers, all outputs at once."""
        kernel = self._prepare_kernel(part)
        kernel.budget = self.limit.allowed()
        if kernel.most_rows(kernel.budget) < len(part):
            raise TooLittleMemory(
                f"{size_text(kernel.budget)} is too small for the tangent kernel of {len(part)} samples."
            )
        return kernel.by_layer(part.x, self.names)

    def errors(self, part: ProbeSet) -> Measured:
        """Errors of what an estimated kernel gives: of the kernel (relative, in Frobenius norm), and of numbers made from it.

        Each is a standard error with the bias of the number in it; nothing for an exact kernel.
        """
        found = self.estimate
        if found is None:
            return {}
        measured = {"tangent_error": torch.tensor(found.error(), dtype=torch.float64)}
        measured["tangent_directions"] = torch.tensor(float(len(found.each)), dtype=torch.float64)
        if not part.has_one_target:
            assert part.columns is not None
            columns = part.columns.double()
            measured["tangent_alignment_error"] = found.error_of(lambda kernel: centered_alignment(kernel, columns))
        if self.start is not None and self.start.each.shape == found.each.shape:
            measured["tangent_distance_error"] = found.error_of(kernel_distance, self.start)
            measured["tangent_change_error"] = found.error_of(relative_change, self.start)
        return measured

    def reset(self) -> None:
        """Prepare the kernel anew at the next use: the model has moved to another device or precision."""
        self._kernel = None
        if self.start is not None:
            device = next(iter(self.trained.values())).device
            self.start = KernelEstimate(self.start.each.to(device), self.start.population)

    def _prepare_kernel(self, part: ProbeSet) -> LayerTangents:
        """The kernel of the method, made at the first use: rules are chosen and checked."""
        if self._kernel is None:
            allowed, needed, names = self.limit.allowed(), self.limit.sample_bytes, list(self.trained)
            if self.method == "directions":
                self._kernel = DirectionTangents(self.model, part.x, names, allowed, needed, self._rules)
            else:
                self._kernel = LayerTangents(self.model, part.x, names, allowed, needed)
        return self._kernel

    def _exact_seconds(self, kernel: LayerTangents, few: ProbeSet) -> float:
        """About how long the kernel of these samples takes with all outputs at once, from some of the outputs."""
        outputs = kernel.directions

        def seconds_of(samples: int, count: int) -> float:
            kernel.directions = outputs[:count]
            part = take_samples(few.x, slice(0, samples))
            return idle_seconds(lambda: kernel.by_layer(part, self.names))

        try:
            seconds_of(min(TRIALS[0], len(few)), TRIALS[0])  # the first one also prepares others
            done, seconds = 0, 0.0
            for size in (*TRIALS, len(few)):  # layers without a rule are slow: a long trial would stall the training
                work = min(size, len(few)) * min(size, TIMED_OUTPUTS, len(outputs))
                if done and seconds * work / done > TRIAL_SECONDS:
                    break
                done, seconds = work, seconds_of(min(size, len(few)), min(size, TIMED_OUTPUTS))
            return seconds * len(few) * len(outputs) / done
        finally:
            kernel.directions = outputs

    def _plan_directions(self, few: ProbeSet, rows: int, least: int, why: str) -> int:
        """Take one direction of the outputs at a time: as many samples and directions as memory and time allow, and a note."""
        self.method, self._kernel = "directions", None
        kernel, allowed = self._prepare_kernel(few), self.limit.allowed()
        assert isinstance(kernel, DirectionTangents)
        count = min(self.count or DIRECTIONS, kernel.outputs)
        rows = kernel.most_samples(rows, min(least, FEWEST_SAMPLES), count, allowed)
        least = min(least, rows)
        if self.count is None:
            trial = Directions(kernel.outputs, 1, self.seed)
            kernel.in_direction(take_samples(few.x, slice(0, 2)), trial, 0, self.names)  # the first one prepares others
            seconds = idle_seconds(lambda: kernel.in_direction(few.x, trial, 0, self.names)) / len(few)
            products = self.seconds / max(seconds, 1e-9)  # of samples and directions
            rows = max(least, min(rows, int(products / count)))
            count = min(count, max(FEWEST_DIRECTIONS, int(products / rows)))
            rows = max(min(rows, FEWEST_SAMPLES), min(rows, int(products / count)))
            if seconds * rows * count > max(self.seconds, self.most_seconds):
                self.method, self._kernel = None, None
                raise TooSlow(seconds * rows * count, self.most_seconds)
            kernel.most_samples(rows, rows, count, allowed)
        self.directions, self._folded = Directions(kernel.outputs, count, self.seed), kernel.folded
        exact = self.directions.are_all and not kernel.folded
        which = (
            f"each of {count} outputs in turn" if exact else f"{count} random directions of {kernel.outputs} outputs"
        )
        self.notes.append(
            f"the tangent kernel is {'exact' if exact else 'estimated'}, from {which} on {rows} samples: {why}"
        )
        return rows

    def _by_method(self, part: ProbeSet) -> Tangents:
        return self.by_layer(part) if self.method == "layers" else self._by_direction(part)

    def _by_direction(self, part: ProbeSet) -> Tangents:
        """The mean over directions; each direction's kernel is kept for the error."""
        kernel, allowed = self._prepare_kernel(part), self.limit.allowed()
        assert isinstance(kernel, DirectionTangents)
        assert self.directions is not None
        kernel.most_samples(len(part), len(part), len(self.directions), allowed, self._folded)
        total, each = Tangents({}, {}), []
        for number in range(len(self.directions)):
            found = kernel.in_direction(part.x, self.directions, number, self.names)
            total = total.plus(found, 1 / len(self.directions))
            each.append(found.kernel.double())
        population = None if kernel.folded else self.directions.population
        exact = population == len(self.directions)
        self.estimate = None if exact else KernelEstimate(torch.stack(each), population)
        return total

    def _layer_numbers(self, tangents: Tangents, part: ProbeSet) -> Measured:
        """Alignment of each layer's part with the targets, and how well the layers' weights match their AGOP."""
        measured: Measured = {}
        if not part.has_one_target:
            assert part.columns is not None
            columns = part.columns.double()
            for name, share in tangents.parts.items():
                if float(share.abs().max()) > 0:
                    measured[f"alignment@{name}"] = centered_alignment(share.double(), columns)
        modules = {name: module for module, name in self.names.items()}
        hidden = {name: moment for name, moment in tangents.moments.items() if not _is_identity(moment)}
        found = [agop_correlation(modules[name], moment) for name, moment in hidden.items()]
        known = [value for value in found if not math.isnan(value)]
        if known:
            measured["agop_correlation"] = torch.tensor(sum(known) / len(known), dtype=torch.float64)
        return measured


def _is_identity(moment: Tensor) -> bool:
    """Whether this is the mean g g^T of the output layer: its AGOP is W^T W itself, trained or not."""
    return bool(torch.allclose(moment, torch.eye(len(moment), dtype=moment.dtype, device=moment.device)))
