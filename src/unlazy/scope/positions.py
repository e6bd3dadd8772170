"""Models that answer at every position of a sequence, ``[n, positions, classes]``, with targets ``[n, positions]``.

Loss and accuracy count every position whose target is not ``IGNORED``. All other measures read a part of the answers, so that no
array is as large as a vocabulary: ``MOST_OUTPUTS`` numbers a sequence, from positions spread evenly over those with targets.
More classes than ``MOST_CLASSES`` are read through as many fixed random combinations c = B^T logits with E[B B^T] = 1, which keep
inner products, and so kernels and distances, on average.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from unlazy.kernels.capture import Inputs, sample_count, take_samples
from unlazy.runtime import require, stream
from unlazy.scope.probe_set import ProbeSet
from unlazy.scope.user_model import SelectedOutput, find_predictions

IGNORED = -100  # the target of positions that do not count, as in torch.nn.functional.cross_entropy
MOST_OUTPUTS, MOST_CLASSES = 128, 32


@dataclass(frozen=True)
class PositionAnswers:
    """What a model answers on the probe set: the outputs that are measured, and losses and hits at all positions that count."""

    output: Float[Tensor, "n o"]
    losses: Float[Tensor, "n positions"]
    hits: Bool[Tensor, "n positions"]
    counted: Bool[Tensor, "n positions"]

    def loss(self, inside: Tensor | None = None) -> Tensor:
        """The mean loss of the counted positions: all, or those of a group of samples ``[n]`` or positions ``[n, positions]``."""
        counted = self.counted if inside is None else self.counted & (inside[:, None] if inside.ndim == 1 else inside)
        return self.losses[counted].mean()

    def sample_losses(self) -> Float[Tensor, " n"]:
        """The mean loss of the counted positions of each sample; NaN where none counts."""
        return (self.losses * self.counted).sum(1) / self.counted.sum(1)

    def accuracy(self) -> Tensor:
        """The share of counted positions at which the target has the largest logit."""
        return self.hits[self.counted].double().mean()


class PositionOutputs(SelectedOutput):
    """A model as a function to ``[n, outputs]``: logits at some positions, 0 where the target is ignored, of classes or of random
    combinations of them. ``x`` holds the inputs of the model and ``counted``, which says where targets are.
    """

    def __init__(self, model: nn.Module, choose: Any, counted: Bool[Tensor, "n t"], classes: int, seed: int) -> None:
        super().__init__(model, choose)
        self.classes, self.length = classes, counted.shape[1]
        self.combinations: Tensor | None = None
        width = min(classes, MOST_CLASSES)
        if classes * self.length > MOST_OUTPUTS and classes > MOST_CLASSES:
            drawn = torch.randn(classes, width, generator=stream(seed, "classes"))
            self.combinations = (drawn / math.sqrt(width)).to(counted.device)
        else:
            width = classes
        present = counted.any(0).nonzero()[:, 0].cpu()
        most = min(len(present), max(1, MOST_OUTPUTS // width))
        self.positions: list[int] = present[torch.linspace(0, len(present) - 1, most).round().long()].tolist()

    def forward(self, x: Inputs, counted: Tensor) -> Tensor:
        return self.reduce(self.logits(x), counted)

    def logits(self, x: Inputs) -> Tensor:
        """What the model itself answers, ``[n, positions, classes]``."""
        raw = (
            self.model(**x)
            if isinstance(x, Mapping)
            else self.model(*x)
            if isinstance(x, tuple | list)
            else self.model(x)
        )
        return self.choose(raw)

    def reduce(self, logits: Tensor, counted: Tensor) -> Tensor:
        """The outputs that are measured."""
        some = logits[:, self.positions].masked_fill(~counted[:, self.positions, None], 0.0)
        return (some if self.combinations is None else some @ self.combinations.to(some)).flatten(1)

    def target_columns(self, y: Int[Tensor, "n t"]) -> Float[Tensor, "n o"]:
        """One-hot targets, reduced like the logits."""
        some, counted = y[:, self.positions].clamp(min=0), (y != IGNORED)[:, self.positions, None]
        hot = F.one_hot(some, self.classes).float() if self.combinations is None else self.combinations[some]
        return hot.masked_fill(~counted, 0.0).flatten(1)

    def answers(self, probe: ProbeSet, at_once: int) -> PositionAnswers:
        """Outputs, losses and hits on the probe set, ``at_once`` samples at a time: logits of all of them are never held."""
        found = [self._answers(part, y) for part, y in _parts(probe, at_once)]
        output, losses, hits = (torch.cat(parts) for parts in zip(*found, strict=True))
        return PositionAnswers(output, losses, hits, probe.y != IGNORED)

    @torch.no_grad()
    def _answers(self, part: Mapping[str, Any], y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.logits(part["x"])
        losses = F.cross_entropy(logits.transpose(1, 2), y, ignore_index=IGNORED, reduction="none")
        return self.reduce(logits, part["counted"]).detach().clone(), losses, logits.argmax(2) == y

    def notes(self) -> list[str]:
        """What a reader of the numbers has to know: which part of the answers is measured."""
        said = []
        if len(self.positions) < self.length:
            said.append(
                f"loss and accuracy count all positions; other measures read {len(self.positions)} of {self.length} positions"
            )
        if self.combinations is not None:
            said.append(
                f"{self.classes} classes are measured through {self.combinations.shape[1]} random combinations of them"
            )
        return said


def read_positions(model: nn.Module, probe: ProbeSet, seed: int) -> tuple[nn.Module, ProbeSet]:
    """Model and probe set as they are, or, if the targets are class numbers at every position, made ready to be measured so."""
    y = probe.y
    if y.is_floating_point() or y.ndim != 2 or y.shape[1] == 1:
        return model, probe
    inner, choose = (model.model, model.choose) if isinstance(model, SelectedOutput) else (model, find_predictions)
    y = y.long()
    counted = y != IGNORED
    made = PositionOutputs(inner, choose, counted, 1, seed)
    with torch.no_grad():
        logits = made.logits(take_samples(probe.x, slice(0, 2)))
    if logits.ndim != 3:
        return model, probe  # several answers a sample, each yes or no
    n, length, classes = len(y), *logits.shape[1:]
    require(
        y.shape == (n, length),
        f"the model answers at {length} positions of {classes} classes, the targets are {tuple(y.shape)}; give a class number "
        f"for every position, {IGNORED} where none counts, or choose one position with output=.",
    )
    require(bool(counted.any()), f"all targets of the probe set are {IGNORED}, so none counts.")
    low, high = int(y[counted].min()), int(y[counted].max())
    require(
        low >= 0 and high < classes,
        f"class numbers run from {low} to {high}, but the model has {classes} classes: 0 to {classes - 1}, {IGNORED} for none.",
    )
    require(
        probe.loss is None, "loss= works on one answer a sample; choose one position with output=, or leave loss= out."
    )
    for name, inside in {**probe.groups, **probe.position_groups}.items():
        some = counted & (inside[:, None] if inside.ndim == 1 else inside)
        require(bool(some.any()), f"group {name!r} holds no position with a target.")
    made = PositionOutputs(inner, choose, counted, classes, seed)
    columns = made.target_columns(y).to(logits.dtype)
    return made, replace(probe, x={"x": probe.x, "counted": counted}, y=y, columns=columns)


def _parts(probe: ProbeSet, at_once: int) -> Iterator[tuple[Mapping[str, Any], Tensor]]:
    for begin in range(0, sample_count(probe.x), at_once):
        rows = slice(begin, begin + at_once)
        yield take_samples(probe.x, rows), probe.y[rows]
