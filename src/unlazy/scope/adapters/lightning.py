"""A scope inside Lightning's ``Trainer``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from unlazy.scope.run_origin import add_config
from unlazy.scope.scope import Scope
from unlazy.scope.sinks import MissingFrameworkError

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise MissingFrameworkError("lightning", "lightning", error) from error


class ScopeCallback(Callback):
    """``Trainer(callbacks=[ScopeCallback(probe=(x, y), run="runs/mine")])``; ``callback.scope`` holds the scope afterwards.

    The scope watches the whole ``LightningModule`` through its ``forward``, or the part of it that ``model`` returns:
    ``model=lambda module: module.backbone``. Of several processes the first one measures. Further options go to ``Scope``;
    ``steps`` is ``trainer.estimated_stepping_batches`` unless given, and ``config`` also gets the module's ``hparams``.
    """

    def __init__(
        self,
        probe: Any,
        run: str | Path | None = None,
        model: Callable[[LightningModule], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        self.probe, self.run, self.options = probe, run, options
        self.model = model or (lambda module: module)
        self.scope: Scope | None = None
        self._last_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = trainer.global_step
        steps = trainer.estimated_stepping_batches  # infinite without max_steps and max_epochs
        known = {"steps": int(steps)} if math.isfinite(steps) and steps > 0 else {}
        options = add_config(self.options, dict(pl_module.hparams))
        self.scope = Scope(self.model(pl_module), self.probe, self.run, **{**known, **options})

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (
            self.scope is not None and trainer.global_step > self._last_step
        ):  # a batch that only adds to gradients is no step
            self._last_step = trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            self.scope.step(self._last_step, **({} if loss is None else {"batch_loss": loss}))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.scope is not None:
            self.scope.finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.scope is not None:
            self.scope.__exit__(type(exception), exception, exception.__traceback__)
