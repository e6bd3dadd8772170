"""A scope inside Hugging Face's ``Trainer``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from unlazy.scope.scope import Scope
from unlazy.scope.sinks import MissingFrameworkError

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise MissingFrameworkError("transformers", "transformers", error) from error


class ScopeCallback(TrainerCallback):
    """``Trainer(..., callbacks=[ScopeCallback(probe=(tokens, labels), run="runs/mine")])``.

    The Trainer passes no batch to its callbacks, so the scope looks at its own probe: ``tokens`` is what the model is called
    with, a tensor or a dict such as ``{"input_ids": ..., "attention_mask": ...}``. Only the first process looks.
    Further options go to ``Scope``.
    """

    def __init__(self, probe: Any, run: str | Path | None = None, **options: Any) -> None:
        self.probe, self.run, self.options = probe, run, options
        self.scope: Scope | None = None
        self._logged: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **seen: Any
    ) -> None:
        model: nn.Module = seen["model"]
        if state.is_world_process_zero:
            self.scope = Scope(model, self.probe, self.run, **self.options)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **seen: Any) -> None:
        if self.scope is not None:
            self.scope.step(state.global_step, **self._logged)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **seen: Any) -> None:
        logs = seen.get("logs") or {}
        self._logged = {f"trainer_{name}": logs[name] for name in ("loss", "learning_rate") if name in logs}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **seen: Any) -> None:
        if self.scope is not None:
            self.scope.finish()
