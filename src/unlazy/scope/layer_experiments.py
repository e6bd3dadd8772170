"""Two exact experiments by layer: the network trained again with one layer frozen, and with one layer linearised.

All trainings start where the watched network started and take the same optimiser, batches and steps. What they give goes to the
history, from which :mod:`unlazy.scope.layer_table` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unlazy.kernels.capture import Inputs
from unlazy.runtime import Unsupported, require
from unlazy.scope.blocks import Block
from unlazy.scope.twin import Scheduler
from unlazy.training.twin import LinearisedTwin, Loss, linearised_twin

EXPERIMENTS = ("frozen", "linear")


@dataclass(frozen=True)
class LayerTrainings:
    """How to train a network again. ``held``: inputs and targets on which losses are compared.

    ``frozen_from``: the steps after which a frozen layer stands still. ``only``: names of layers, by default all.
    ``experiments``: frozen, linear or both.
    """

    make_optimiser: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    loss: Loss
    batches: Sequence[tuple[Inputs, Tensor]]
    held: Any
    scheduler: Scheduler | None = None
    clip_norm: float | None = None
    only: Sequence[str] | None = None
    frozen_from: int = 0
    experiments: Sequence[str] = EXPERIMENTS

    def __post_init__(self) -> None:
        steps, known = len(self.batches), " and ".join(EXPERIMENTS)
        require(steps > 0, "batches= has no batch; give those that the network was trained on, in their order.")
        inside = 0 <= self.frozen_from < steps
        require(inside, f"frozen_from must be at least 0 and below the {steps} batches, got {self.frozen_from}.")
        fits = len(self.experiments) > 0 and set(self.experiments) <= set(EXPERIMENTS)
        require(fits, f"experiments are {known}; got {list(self.experiments)}.")
        has_targets = isinstance(self.held, tuple) and len(self.held) == 2 and torch.is_tensor(self.held[1])
        require(has_targets, "held= needs inputs and targets, (x, y), since losses are compared.")


def train_by_layer(
    start: nn.Module,
    trained: Collection[str],
    blocks: Sequence[Block],
    how: LayerTrainings,
    say: Callable[[str], None],
) -> dict[str, float]:
    """Losses of the network ``start`` trained again in every way, after saying what that will cost.

    ``trained``: names of its trained parameters. ``layers_start_loss`` and ``layers_plain_loss``: before and after the plain
    training. ``frozen_loss@LAYER`` and ``linear_loss@LAYER``: NaN for layers that were not asked for. ``layers_frozen_loss`` and
    ``layers_linear_loss``: with all layers at once, to which the effects of single ones do not add up.
    """
    trainer, chosen = _Trainer(start, trained, how), _choose_blocks(blocks, how.only)
    whole, has_linear = len(chosen) == len(blocks), "linear" in how.experiments
    if has_linear:
        try:
            trainer.make(chosen[0].parameters)(how.held[0])
        except Unsupported as error:
            say(f"No layer is linearised: {error}")
            has_linear = False
    say(trainer.price_text(chosen, 1 + len(chosen) * ("frozen" in how.experiments), has_linear * (len(chosen) + whole)))
    plain = trainer.make(())
    found = {"layers_frozen_from": float(how.frozen_from), "layers_start_loss": trainer.loss_of(plain)}
    trainer.train(plain, 0, how.frozen_from)
    found["layers_frozen_loss"] = trainer.loss_of(plain)  # all layers stand still from here on
    trainer.train(plain, how.frozen_from, None)
    found["layers_plain_loss"], found["layers_linear_loss"] = trainer.loss_of(plain), math.nan
    for block in blocks:
        inside = block in chosen
        frozen = inside and "frozen" in how.experiments
        found[f"frozen_loss@{block.name}"] = trainer.frozen_loss(block) if frozen else math.nan
        found[f"linear_loss@{block.name}"] = (
            trainer.linear_loss(block.parameters) if inside and has_linear else math.nan
        )
    if has_linear and whole:
        found["layers_linear_loss"] = trainer.linear_loss("trainable")
    return found


def _choose_blocks(blocks: Sequence[Block], only: Sequence[str] | None) -> list[Block]:
    if only is None:
        return list(blocks)
    known = {block.name: block for block in blocks}
    unknown = [name for name in only if name not in known]
    require(not unknown, f"there is no layer {', '.join(map(repr, unknown))}; there are {', '.join(known)}.")
    return [block for name, block in known.items() if name in only]


class _Trainer:
    """Makes and trains networks from one start."""

    def __init__(self, start: nn.Module, trained: Collection[str], how: LayerTrainings) -> None:
        self.how, self.start = how, start
        self.trained = {name: p for name, p in start.named_parameters() if name in trained}
        self._schedulers: dict[int, Any] = {}

    def make(self, linear: str | Sequence[str]) -> LinearisedTwin:
        """A network at the start, with these parameters linearised."""
        how, optimiser = self.how, self.how.make_optimiser(list(self.trained.values()))
        twin = linearised_twin(self.start, optimiser, how.loss, held=how.held, linear=linear, clip_norm=how.clip_norm)
        if how.scheduler is not None:
            self._schedulers[id(twin)] = how.scheduler(optimiser)
        return twin

    def train(self, twin: LinearisedTwin, done: int, until: int | None) -> None:
        """Take the batches from ``done`` to ``until``; ``None``: to the last one."""
        twin.train(self.how.batches[done:until], scheduler=self._schedulers.get(id(twin)))
        if until is None:
            self._schedulers.pop(id(twin), None)

    def frozen_loss(self, block: Block) -> float:
        """The loss at the end with one block frozen on the way."""
        twin, when = self.make(()), self.how.frozen_from
        self.train(twin, 0, when)
        if set(block.parameters) < set(twin.theta):
            twin.freeze(block.parameters)
            self.train(twin, when, None)
        return self.loss_of(twin)  # a network of one layer stands still

    def linear_loss(self, linear: str | Sequence[str]) -> float:
        """The loss at the end with these parameters linearised."""
        twin = self.make(linear)
        self.train(twin, 0, None)
        return self.loss_of(twin)

    @staticmethod
    def loss_of(twin: LinearisedTwin) -> float:
        """The loss on the held samples now."""
        with torch.no_grad():
            return twin.held_loss(twin(twin.held[0]))

    def price_text(self, blocks: Sequence[Block], plain: int, linear: int) -> str:
        """What so many trainings will cost, from a few steps of a plain one and of one with a linearised layer."""
        steps, first = len(self.how.batches), self.how.batches[0]
        one = self.make(()).price(*first).seconds
        other = self.make(blocks[0].parameters).price(*first).seconds if linear else 0.0
        total = steps * (plain * one + linear * other)
        times = total / max(steps * one, 1e-9)
        return f"{plain + linear} trainings of {steps} steps take about {total:.2g} s, {times:.0f} times one training."
