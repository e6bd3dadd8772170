"""Train a stack of networks by a recipe into a run folder; a killed training resumes from its last checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from unlazy.store import Run, Writer
from unlazy.training.ensemble import Member, MemberAdam, batch_order, build_member_stack
from unlazy.training.recorder import Measure, Recorder

Progress = Callable[[int, int], None]
GATHERED = 64  # batches whose samples are gathered at once


def squared_error(out: Tensor, y: Tensor) -> Float[Tensor, "*members"]:
    """Mean over samples and outputs."""
    return (out - y).square().mean((-2, -1))


def cross_entropy(out: Tensor, y: Tensor) -> Float[Tensor, "*members"]:
    """Softmax cross-entropy in nats, mean over samples; ``y`` holds one-hot rows (or any distribution)."""
    return -(y * out.log_softmax(-1)).sum(-1).mean(-1)


LOSSES = {"squared": squared_error, "cross-entropy": cross_entropy}


@dataclass(frozen=True)
class Recipe:
    """Adam on shuffled batches: what is trained, on which loss, for how long, how precisely, where.

    ``checkpoints_at``: epochs whose networks are kept besides every ``checkpoint_epochs``-th and the last.
    """

    model: NetSpec
    members: tuple[Member, ...]
    epochs: int
    batch: int = 32
    loss: str = "squared"
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    checkpoint_epochs: int = 50
    checkpoints_at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(len(self.members) > 0, "a recipe needs at least one member.")
        for name in ("epochs", "batch", "threads", "checkpoint_epochs"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, f"{name} must be a whole number >= 1, got {value!r}.")
        require(self.dtype in ("float32", "float64"), f"dtype must be float32 or float64, got {self.dtype!r}.")
        require(self.loss in LOSSES, f"loss must be one of {', '.join(LOSSES)}; got {self.loss!r}.")

    def steps_per_epoch(self, n: int) -> int:
        """Batches in an epoch of ``n`` samples; the last one may be smaller."""
        return -(-n // self.batch)

    def to_dict(self, data: Dataset, measures: Sequence[Measure]) -> dict[str, Any]:
        """All that decides the numbers of a run; its hash is the run's id."""
        return {
            "model": self.model.to_dict(),
            "members": [member.to_dict() for member in self.members],
            "epochs": self.epochs,
            "batch": self.batch,
            "loss": self.loss,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "checkpoint_epochs": self.checkpoint_epochs,
            "checkpoints_at": list(self.checkpoints_at),
            "data": data.describe(),
            "measures": [measure.describe() for measure in measures],
        }


def fit(
    recipe: Recipe,
    data: Dataset,
    measures: Sequence[Measure],
    folder: str | Path,
    *,
    start: Mapping[str, np.ndarray] | None = None,
    gates: Sequence[Tensor] | None = None,
    study: str | None = None,
    scale: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Train all members of ``recipe`` on ``data`` into ``folder``; resume if an earlier call was interrupted.

    ``measures``: what to measure, and at which steps. ``start``: numbers to begin with instead of drawn ones, named as in a
    checkpoint; ``model/NAME`` for some or all tensors of the network, and ``optim/NAME/SLOT`` with ``optim/steps`` to resume
    the optimiser too. ``gates``: fixed gates of every sample, ``[members, n, units]`` per layer, from any source; only the
    value branch is then trained.

    The final files are bit for bit those of an uninterrupted call (same thread count). A finished run is returned
    as it is.
    """
    for measure in measures:
        require(
            isinstance(measure, Measure),
            f"measures are a list of Measure(probe, when), got {measure!r}; [] trains without measuring, "
            "Measure(unlazy.probes.standard.tangents, FixedSteps.at((0, 100))) stores two tangent kernels "
            "(Measure and FixedSteps are in unlazy.training.recorder).",
        )
    _check_shapes(recipe, data, gates)
    folder, data = Path(folder), data.to(getattr(torch, recipe.dtype))
    plain = recipe.to_dict(data, measures)
    if start is not None:
        plain["start"] = _fingerprint(start)
    if gates is not None:
        plain["gates"] = _fingerprint({str(layer): gate.cpu().numpy() for layer, gate in enumerate(gates)})
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
            "provenance": runtime.provenance(recipe.dtype, recipe.device),
        }
        with Writer(folder, header) as writer:
            _train(recipe, data, measures, writer, start, gates, progress or (lambda done, total: None))
            writer.finish()
    return Run(folder)


def _check_shapes(recipe: Recipe, data: Dataset, gates: Sequence[Tensor] | None) -> None:
    """Raise ``InputError`` if outputs, targets or gates do not fit: they would broadcast silently to another task."""
    spec, members = recipe.model, len(recipe.members)
    columns, outputs = data.y.shape[-1], spec.outputs
    require(columns == outputs, f"the network has {outputs} outputs, but the data {columns} target columns.")
    own = data.y.ndim < 3 or data.y.shape[0] == members
    require(own, f"targets of their own for {data.y.shape[0]} members, but there are {members}.")
    require(recipe.loss != "cross-entropy" or outputs >= 2, "cross-entropy needs at least two outputs.")
    for gate in gates or ():
        wanted = (members, len(data), spec.width)
        require(tuple(gate.shape) == wanted, f"gates must be [members, n, units] = {wanted}, got {tuple(gate.shape)}.")


def _train(
    recipe: Recipe,
    data: Dataset,
    measures: Sequence[Measure],
    writer: Writer,
    start: Mapping[str, np.ndarray] | None,
    gates: Sequence[Tensor] | None,
    progress: Progress,
) -> None:
    net = build_member_stack(recipe.model, recipe.members, data.x.dtype).to(recipe.device)
    if gates is not None:
        for _, parameter in net.branch("gate"):
            parameter.requires_grad_(False)
    adam = MemberAdam(net, [member.lr for member in recipe.members])
    if start is not None:
        _load_start(start, net, adam)
    data, loss = data.on(recipe.device), LOSSES[recipe.loss]
    there = [replace(measure, batch=measure.batch and measure.batch.on(recipe.device)) for measure in measures]
    recorder = Recorder(net, data, writer, there)
    steps, first, before = recipe.steps_per_epoch(len(data)), 0, adam.steps
    if writer.resumed is not None:
        first = _load_checkpoint(writer.resumed, recipe, net, adam, steps, before)
    else:
        recorder.step(0, checkpoint=partial(_checkpoint_arrays, recipe, net, adam, 0))
    if gates is None and not recipe.model.train_gates:
        with torch.no_grad():
            gates = net.gates(data.x)
    for epoch in range(first, recipe.epochs):
        done = epoch + 1
        saves = done % recipe.checkpoint_epochs == 0 or done == recipe.epochs or done in recipe.checkpoints_at
        for x, y, opened in _batches(recipe, data, gates, epoch):
            adam.minimise(loss(net(x) if opened is None else net.value(x, opened), y))
            step = adam.steps - before
            at_end = saves and step == done * steps
            recorder.step(step, checkpoint=partial(_checkpoint_arrays, recipe, net, adam, done) if at_end else None)
        progress(done, recipe.epochs)


Batch = tuple[Float[Tensor, "members b *d"], Float[Tensor, "members b o"], list[Tensor] | None]


def _batches(recipe: Recipe, data: Dataset, gates: Sequence[Tensor] | None, epoch: int) -> Iterator[Batch]:
    """One epoch, each member in its own order (and on its own targets, if it has any)."""
    order = batch_order(recipe.members, epoch, len(data)).to(recipe.device)  # [S, n]
    own = torch.arange(len(order), device=recipe.device)[:, None]
    for some in order.split(recipe.batch * GATHERED, dim=1):
        x = data.x[some]  # [S, part, ...]
        y = data.y[own, some] if data.y.ndim == 3 else data.y[some]
        opened = None if gates is None else [gate.to(data.x)[own, some] for gate in gates]
        for first in range(0, some.shape[1], recipe.batch):
            part = slice(first, first + recipe.batch)
            yield x[:, part], y[:, part], None if opened is None else [gate[:, part] for gate in opened]


# --- checkpoints ---------------------------------------------------------------------------------


def _checkpoint_arrays(recipe: Recipe, net: GatedNet, adam: MemberAdam, epoch: int) -> dict[str, np.ndarray]:
    """model/NAME, optim/NAME/SLOT, optim/steps, and the keys of the random streams: (seed, epochs drawn) per member."""
    tensors = {f"model/{name}": tensor for name, tensor in net.state_dict().items()}
    tensors |= {f"optim/{name}": tensor for name, tensor in adam.state().items()}
    arrays = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
    return arrays | {"optim/steps": np.array([adam.steps]), "random/order": _order_keys(recipe, epoch)}


def _order_keys(recipe: Recipe, epoch: int) -> np.ndarray:
    return np.array([[member.seed, epoch] for member in recipe.members], dtype=np.int64)


def _load_start(start: Mapping[str, np.ndarray], net: GatedNet, adam: MemberAdam) -> None:
    """Replace drawn numbers by the given ones; the random streams of batch orders begin at epoch 0."""
    given = {name: torch.from_numpy(np.asarray(array)) for name, array in start.items() if name != "random/order"}
    known = net.state_dict()
    for name, tensor in given.items():
        if name.startswith("optim/"):
            continue
        key = name.removeprefix("model/")
        require(key in known, f"start: the network has no {name!r}.")
        require(
            known[key].shape == tensor.shape,
            f"start: {name} must be {tuple(known[key].shape)}, not {tuple(tensor.shape)}.",
        )
        known[key].copy_(tensor)  # in place: parameters stay views of the optimiser's flat tensor
    if "optim/steps" in given:
        adam.load(_optimiser_state(given), int(given["optim/steps"]))


def _load_checkpoint(
    resumed: tuple[int, Mapping[str, np.ndarray]],
    recipe: Recipe,
    net: GatedNet,
    adam: MemberAdam,
    steps: int,
    before: int,
) -> int:
    """Restore network and optimiser from a checkpoint; returns the number of epochs done."""
    step, arrays = resumed
    epoch = step // steps
    wanted = _checkpoint_arrays(recipe, net, adam, epoch)
    if (
        arrays.keys() != wanted.keys()
        or not np.array_equal(arrays["random/order"], wanted["random/order"])
        or int(arrays["optim/steps"][0]) != step + before
    ):
        raise StoreError(f"the checkpoint at step {step} belongs to another training; delete the run folder.")
    _load_start(arrays, net, adam)
    return epoch


def _optimiser_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("optim/"): tensor for name, tensor in tensors.items() if name.startswith("optim/")}


def _fingerprint(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.shape} {array.dtype} ".encode() + array.tobytes())
    return digest.hexdigest()[:16]
