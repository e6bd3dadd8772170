"""A scope inside Hugging Face's ``Trainer``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unlazy.scope.positions import IGNORED
from unlazy.scope.run_origin import add_config, changed_fields
from unlazy.scope.scope import Scope
from unlazy.scope.sinks import MissingFrameworkError

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise MissingFrameworkError("transformers", "transformers", error) from error

ALWAYS_KEPT = (  # settings of the Trainer that a run keeps even where they are the default
    "learning_rate",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "weight_decay",
    "lr_scheduler_type",
    "seed",
)


def next_token_probe(batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """The probe set of a causal language model from a batch as the Trainer's collator makes it.

    Such models shift ``labels`` themselves: the target at a position is the label of the next one; the last position has none.
    Labels of -100 stay ignored.

    >>> tokens = torch.tensor([[5, 6, 7]])
    >>> next_token_probe({"input_ids": tokens, "labels": tokens})[1]
    tensor([[   6,    7, -100]])
    """
    labels = batch["labels"]
    targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
    return {name: leaf for name, leaf in batch.items() if name != "labels"}, targets


def decode_texts(probe: Any, tokenizer: Any) -> list[str]:
    """The texts of the token ids of a probe set; none without a tokenizer or where the inputs are no token ids."""
    tokens = probe[0] if isinstance(probe, tuple | list) and probe else None
    tokens = tokens.get("input_ids") if isinstance(tokens, Mapping) else tokens
    whole = isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.is_floating_point()
    if not whole or not hasattr(tokenizer, "batch_decode"):
        return []
    return [str(text) for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]


class ScopeCallback(TrainerCallback):
    """``Trainer(..., callbacks=[ScopeCallback(probe=(tokens, labels), run="runs/mine")])``.

    The Trainer passes no batch to its callbacks, so the scope measures on its own probe set: ``tokens`` is what the model is
    called with, a tensor or a dict such as ``{"input_ids": ..., "attention_mask": ...}``. Of several processes the first one
    measures. Further options go to ``Scope``; ``steps`` is ``state.max_steps`` unless given, ``config`` also gets the
    TrainingArguments that differ from their defaults, and ``texts`` are decoded by the Trainer's tokenizer, if it has one.
    """

    def __init__(self, probe: Any, run: str | Path | None = None, **options: Any) -> None:
        self.probe, self.run, self.options = probe, run, options
        self.scope: Scope | None = None
        self._logged: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        model: nn.Module = more["model"]
        known = {"steps": state.max_steps} if state.max_steps > 0 else {}
        options = add_config(self.options, changed_fields(args, ALWAYS_KEPT))
        texts = decode_texts(self.probe, more.get("processing_class") or more.get("tokenizer"))
        self.scope = Scope(model, self.probe, self.run, **{**known, "texts": texts, **options})

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if self.scope is not None:
            self.scope.step(state.global_step, **self._logged)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        logs = more.get("logs") or {}
        self._logged = {f"trainer_{name}": logs[name] for name in ("loss", "learning_rate") if name in logs}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if self.scope is not None:
            self.scope.finish()
