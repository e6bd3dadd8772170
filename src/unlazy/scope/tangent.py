"""How a scope gets the tangent kernel of its probe set: layer by layer, whole, or estimated, whichever fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.kernels.capture import Inputs, take
from unlazy.kernels.compare import centered_alignment
from unlazy.kernels.engine import RulesBroke
from unlazy.kernels.gram import free_memory
from unlazy.kernels.tangent import tangent_kernel
from unlazy.scope.layers import LayerTangents, Tangents, agop_correlation
from unlazy.scope.linear import Push, how_to_push
from unlazy.scope.probe import Probe
from unlazy.scope.sketch import DIRECTIONS, Sketched, sketched_kernel

EXACT_SECONDS = 30.0  # above that the kernel is estimated
FREE_SHARE = 0.25  # of the free memory, for the features of all layers at once
TIMED_ROWS = 8
Measured = dict[str, Tensor]


@dataclass
class TangentLook:
    """The kernel by the trained parameters, traced over outputs, at whatever values they have now.

    ``names``: what modules are called. ``notes``: where it says what is not exact.
    """

    model: nn.Module
    trained: Mapping[str, nn.Parameter]
    names: dict[nn.Module, str]
    seed: int
    notes: list[str] = field(default_factory=list)
    way: str | None = None  # layers, whole or sketched; chosen at the first look
    _method: str = "auto"
    _kernel: LayerTangents | None = None
    _push: Push | None = None

    def look(self, part: Probe) -> tuple[Float[Tensor, "n n"], Measured]:
        """The kernel, and what comes with it: alignment of every layer and AGOP, or the error of an estimate."""
        try:
            self.way = self.way or self._choose_way(part)
            if self.way == "layers":
                tangents = self.layers(part)
                return tangents.kernel.double(), self._by_layer(tangents, part)
        except RulesBroke:
            self.way, self._method = "whole", "loop"
        if self.way == "sketched":
            found = self._sketched(part.x)
            return found.kernel, {"tangent_error": torch.tensor(found.error, dtype=torch.float64)}
        return tangent_kernel(self.model, part.x, parameters=list(self.trained), method=self._method).double(), {}

    def layers(self, part: Probe) -> Tangents:
        """The exact kernel in its parts."""
        return self._prepared(part).by_layer(part.x, self.names)

    def forget(self) -> None:
        """The model is elsewhere now, or in another precision."""
        self._kernel = self._push = None

    def _prepared(self, part: Probe) -> LayerTangents:
        if self._kernel is None:
            self._kernel = LayerTangents(self.model, part.x, parameters=list(self.trained))
        return self._kernel

    def _choose_way(self, part: Probe) -> str:
        """Layer by layer where that is quick and fits; the whole kernel where only room is short; else an estimate."""
        kernel, few = self._prepared(part), min(len(part), TIMED_ROWS)
        sample = take(part.x, slice(0, few))
        with kernel.ready():
            seconds = idle_seconds(lambda: kernel.features(sample)) * len(part) / few
        if seconds > EXACT_SECONDS:
            self._kernel = None
            self.notes.append(
                f"the exact tangent kernel would take about {seconds:.0f} s; it is estimated from {DIRECTIONS} random directions"
            )
            return "sketched"
        return "layers" if kernel.feature_bytes * len(part) <= FREE_SHARE * free_memory() else "whole"

    def _sketched(self, x: Inputs) -> Sketched:
        buffers = {name: b.detach() for name, b in self.model.named_buffers()}
        now = {name: p.detach() for name, p in self.trained.items()}
        if self._push is None:
            self._push = how_to_push(self.model, now, buffers, x)
        return sketched_kernel(self.model, now, buffers, x, self._push, self.seed)

    def _by_layer(self, tangents: Tangents, part: Probe) -> Measured:
        """Alignment of each layer's part with the targets, and how well the layers' weights match their AGOP."""
        measured: Measured = {}
        if not part.one_target:
            assert part.columns is not None
            columns = part.columns.double()
            for name, share in tangents.parts.items():
                if float(share.abs().max()) > 0:
                    measured[f"alignment@{name}"] = centered_alignment(share.double(), columns)
        modules = {name: module for module, name in self.names.items()}
        hidden = {name: moment for name, moment in tangents.moments.items() if not _identity(moment)}
        found = [agop_correlation(modules[name], moment) for name, moment in hidden.items()]
        known = [value for value in found if not math.isnan(value)]
        if known:
            measured["agop_correlation"] = torch.tensor(sum(known) / len(known), dtype=torch.float64)
        return measured


def idle_seconds(do: Callable[[], object]) -> float:
    """How long it takes on an idle machine: the clock on the wall, or processor time where others delayed us."""
    wall, processor = time.perf_counter(), time.process_time()
    do()
    return min(time.perf_counter() - wall, time.process_time() - processor)


def _identity(moment: Tensor) -> bool:
    """The layer that gives the outputs: its AGOP is W^T W itself, trained or not."""
    return bool(torch.allclose(moment, torch.eye(len(moment), dtype=moment.dtype, device=moment.device)))
