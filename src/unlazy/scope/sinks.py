"""Where a scope's numbers go besides its run folder: TensorBoard, Weights & Biases, MLflow.

A sink is anything with ``write(step, scalars)`` and ``close()``. Each of these imports its framework when it is made, not
before. Sinks are copies: the run folder holds everything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from unlazy.runtime import MissingFrameworkError as MissingFrameworkError
from unlazy.runtime import framework as framework

PREFIX = "unlazy/"


class Sink(Protocol):
    """What a scope asks of a place to write to."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Scalars into an event folder that `tensorboard --logdir` reads."""

    def __init__(self, folder: str | Path) -> None:
        framework("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(PREFIX + name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Scalars into a Weights & Biases run: the one given, the one that is active, or a new one made with ``options``.

    The scope's step is logged as ``unlazy/step`` and is the x axis of its curves, so that it need not agree with the steps
    a training loop logs by itself. A run that was there before stays open.
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        wandb = framework("wandb", "wandb")
        given = run if run is not None else wandb.run
        self._own = given is None
        self._run = wandb.init(**options) if given is None else given
        self._run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({f"{PREFIX}step": step} | {PREFIX + name: value for name, value in scalars.items()})

    def close(self) -> None:
        if self._own:
            self._run.finish()


class MLflowSink:
    """Scalars into an MLflow run: the one with ``run_id``, the one that is active, or a new one. Only a new one is ended here."""

    def __init__(self, run_id: str | None = None) -> None:
        self._mlflow = framework("mlflow", "mlflow-skinny")
        active = self._mlflow.active_run()
        self._own = run_id is None and active is None
        started = self._mlflow.start_run() if self._own else active
        self._run_id: str = run_id if run_id is not None else started.info.run_id

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        metrics = {_mlflow_name(name): value for name, value in scalars.items() if math.isfinite(value)}
        self._mlflow.log_metrics(metrics, step=step, run_id=self._run_id)

    def close(self) -> None:
        if self._own:
            self._mlflow.end_run()


def _mlflow_name(name: str) -> str:
    """MLflow allows letters, digits and ``_-. /`` in names.

    >>> _mlflow_name("alignment@body.0")
    'unlazy/alignment/body.0'
    """
    return PREFIX + re.sub(r"[^\w\-. /]", "/", name)
