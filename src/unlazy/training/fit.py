"""The training loop. A recipe says everything; a run folder receives everything; a killed run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unlazy import runtime
from unlazy.data.dataset import Dataset
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec
from unlazy.runtime import StoreError, require
from unlazy.scope.scope import Measure, Scope
from unlazy.store import Run, Writer
from unlazy.training.ensemble import Member, MemberAdam, batch_order, stack_of

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Recipe:
    """Mean squared error, Adam, shuffled batches: what is trained, for how long, how precisely."""

    model: NetSpec
    members: tuple[Member, ...]
    epochs: int
    batch: int = 32
    dtype: str = "float32"
    threads: int = 1
    checkpoint_epochs: int = 50

    def __post_init__(self) -> None:
        require(len(self.members) > 0, "a recipe needs at least one member.")
        for name in ("epochs", "batch", "threads", "checkpoint_epochs"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, f"{name} must be a whole number >= 1, got {value!r}.")
        require(self.dtype in ("float32", "float64"), f"dtype must be float32 or float64, got {self.dtype!r}.")

    def steps_per_epoch(self, n: int) -> int:
        return -(-n // self.batch)

    def to_dict(self, data: Dataset, measures: Sequence[Measure]) -> dict[str, Any]:
        """All that decides the numbers of a run; its hash is the run's id."""
        return {
            "model": self.model.to_dict(),
            "members": [member.to_dict() for member in self.members],
            "epochs": self.epochs,
            "batch": self.batch,
            "dtype": self.dtype,
            "threads": self.threads,
            "checkpoint_epochs": self.checkpoint_epochs,
            "data": data.describe(),
            "measures": [measure.describe() for measure in measures],
        }


def fit(
    recipe: Recipe,
    data: Dataset,
    measures: Sequence[Measure],
    folder: str | Path,
    *,
    study: str | None = None,
    scale: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Train all members of ``recipe`` on ``data`` into ``folder``; go on where an earlier call was cut off.

    The final files are bit for bit those of an uninterrupted call (same thread count). A finished run is returned
    as it is.
    """
    folder, data = Path(folder), data.to(getattr(torch, recipe.dtype))
    plain = recipe.to_dict(data, measures)
    if (folder / "status.json").exists():
        done = Run(folder)
        if done.id == runtime.short_hash(plain) and done.status()["state"] == "finished":
            return done
    with runtime.threads(recipe.threads):
        header = {
            "kind": "train",
            "study": study,
            "scale": scale,
            "recipe": plain,
            "members": plain["members"],
            "model": plain["model"],
            "data": plain["data"],
            "provenance": runtime.provenance(recipe.dtype),
        }
        with Writer(folder, header) as writer:
            _train(recipe, data, measures, writer, progress or (lambda done, total: None))
            writer.finish()
    return Run(folder)


def _train(recipe: Recipe, data: Dataset, measures: Sequence[Measure], writer: Writer, progress: Progress) -> None:
    net = stack_of(recipe.model, recipe.members, data.x.dtype)
    adam = MemberAdam(net, [member.lr for member in recipe.members])
    scope = Scope(net, data, writer, measures)
    steps, first = recipe.steps_per_epoch(len(data)), 0
    if writer.resumed is not None:
        first = _load(writer.resumed, recipe, net, adam, steps)
    else:
        scope.step(0, checkpoint=partial(_checkpoint, recipe, net, adam, 0))
    for epoch in range(first, recipe.epochs):
        saves = (epoch + 1) % recipe.checkpoint_epochs == 0 or epoch + 1 == recipe.epochs
        for x, y, gates in _batches(recipe, data, net, epoch):
            out = net(x) if gates is None else net.value(x, gates)
            adam.minimise((out - y).square().mean((-2, -1)))
            at_end = saves and adam.steps == (epoch + 1) * steps
            scope.step(adam.steps, checkpoint=partial(_checkpoint, recipe, net, adam, epoch + 1) if at_end else None)
        progress(epoch + 1, recipe.epochs)


Batch = tuple[Float[Tensor, "members b d"], Float[Tensor, "members b o"], list[Tensor] | None]


def _batches(recipe: Recipe, data: Dataset, net: GatedNet, epoch: int) -> Iterator[Batch]:
    """One epoch, each member in its own order. Frozen gates are computed once an epoch instead of every step."""
    order = batch_order(recipe.members, epoch, len(data))
    x, y = data.x[order], data.y[order]  # [S, n, ...]
    gates = None
    if not recipe.model.train_gates:
        with torch.no_grad():
            gates = net.gates(x)
    for start in range(0, len(data), recipe.batch):
        part = slice(start, start + recipe.batch)
        yield x[:, part], y[:, part], None if gates is None else [gate[:, part] for gate in gates]


# --- checkpoints ---------------------------------------------------------------------------------


def _checkpoint(recipe: Recipe, net: GatedNet, adam: MemberAdam, epoch: int) -> dict[str, np.ndarray]:
    """model/NAME, optim/NAME/SLOT, and the keys of the random streams: (seed, epochs drawn) per member."""
    tensors = {f"model/{name}": tensor for name, tensor in net.state_dict().items()}
    tensors |= {f"optim/{name}": tensor for name, tensor in adam.state().items()}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return arrays | {"random/order": _order_keys(recipe, epoch)}


def _order_keys(recipe: Recipe, epoch: int) -> np.ndarray:
    return np.array([[member.seed, epoch] for member in recipe.members], dtype=np.int64)


def _load(
    resumed: tuple[int, Mapping[str, np.ndarray]], recipe: Recipe, net: GatedNet, adam: MemberAdam, steps: int
) -> int:
    """Put everything back as it was at a checkpoint; returns the number of epochs done."""
    step, arrays = resumed
    epoch = step // steps
    wanted = _checkpoint(recipe, net, adam, epoch)
    if arrays.keys() != wanted.keys() or not np.array_equal(arrays["random/order"], wanted["random/order"]):
        raise StoreError(f"the checkpoint at step {step} belongs to another training; delete the run folder.")
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    current = net.state_dict()
    for name, tensor in current.items():
        tensor.copy_(tensors[f"model/{name}"])  # in place: parameters stay views of the optimiser's flat tensor
    adam.load({name.removeprefix("optim/"): t for name, t in tensors.items() if name.startswith("optim/")}, step)
    return epoch
