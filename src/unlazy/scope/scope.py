"""Scope, first form: ``step()`` and a fixed schedule. Our own training loop uses it too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unlazy.data.dataset import Dataset
from unlazy.kernels.capture import evaluating
from unlazy.models.net import GatedNet
from unlazy.probes import standard
from unlazy.runtime import provenance, require
from unlazy.scope.schedule import Fixed
from unlazy.store import Tensors, Writer

Probe = Callable[[Any, Dataset], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Measure:
    """What to look at, on which samples, and when. ``batch=None``: the scope's own probe set."""

    probe: Probe
    schedule: Fixed
    batch: Dataset | None = None

    def describe(self) -> dict[str, Any]:
        samples = None if self.batch is None else self.batch.fingerprint
        return {"probe": self.probe.__name__, "steps": self.schedule.describe(), "batch": samples}


class Scope(AbstractContextManager["Scope"]):
    """Looks at a network while it trains and writes what it sees to a run folder.

    ``scope.step(step)`` runs the measures that are due. Looking changes nothing: no gradient is left, no random
    number drawn, ``training`` flags are restored.

    By default, for any module: the loss and the tangent kernel on the probe set; for our gated networks also
    path counts and the overlap kernel; at steps 0, 1, 2, 3, ... growing by about a quarter each time.
    """

    def __init__(
        self,
        model: nn.Module,
        probe: Dataset | tuple[Tensor, Tensor],
        run: str | Path | Writer,
        measures: Sequence[Measure] | None = None,
    ) -> None:
        self.model, self.probe = model, _as_dataset(probe)
        self.measures = default_measures(model) if measures is None else list(measures)
        self._owns_writer = not isinstance(run, Writer)
        self.writer = run if isinstance(run, Writer) else Writer(run, self._header())

    def step(self, step: int, checkpoint: Callable[[], Tensors] | None = None, **scalars: Any) -> None:
        """Tell the scope that ``step`` updates are done; ``scalars`` are kept beside whatever is due.

        ``checkpoint`` (a function that returns tensors) is written with the same line, due or not.
        """
        due = [measure for measure in self.measures if measure.schedule.due(step)]
        if not due and checkpoint is None:
            return
        curves = {name: np.atleast_1d(np.asarray(torch.as_tensor(value).detach())) for name, value in scalars.items()}
        arrays: dict[str, np.ndarray] = {}
        for measure in due:
            for name, value in self._look(measure).items():
                (curves if value.ndim == 1 else arrays)[name] = value
        self.writer.record(step, curves, arrays, checkpoint() if checkpoint else None)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._owns_writer:
            if error is None:
                self.writer.finish()
            self.writer.__exit__(kind, error, trace)

    def __enter__(self) -> Scope:
        return self

    def _look(self, measure: Measure) -> dict[str, np.ndarray]:
        batch = self.probe if measure.batch is None else measure.batch
        with evaluating(self.model):
            seen = measure.probe(self.model, batch)
        stacked = isinstance(self.model, GatedNet) and self.model.members is not None
        return {name: (value if stacked else value[None]).detach().cpu().numpy() for name, value in seen.items()}

    def _header(self) -> dict[str, Any]:
        spec = self.model.spec() if isinstance(self.model, GatedNet) else None
        recipe = {"model": spec or str(self.model), "data": self.probe.describe()}
        dtype = str(self.probe.x.dtype).removeprefix("torch.")
        return {
            "kind": "scope",
            "study": None,
            "scale": None,
            "recipe": recipe,
            "members": [{}],
            "model": spec,
            "data": self.probe.describe(),
            "provenance": provenance(dtype),
        }


def default_measures(model: nn.Module) -> list[Measure]:
    """What a scope looks at when nobody says otherwise."""
    schedule = Fixed.growing(last=10**7)
    looks: list[Probe] = [standard.losses, standard.tangents]
    if isinstance(model, GatedNet):
        require(model.members is None, "a scope of a stack needs its measures named.")
        looks = [standard.curves, standard.kernels, standard.portrait]
    return [Measure(look, schedule) for look in looks]


def _as_dataset(probe: Dataset | tuple[Tensor, Tensor]) -> Dataset:
    if isinstance(probe, Dataset):
        return probe
    x, y = probe
    return Dataset("probe", x, y[:, None] if y.ndim == 1 else y)
