"""Many small image networks at once on one device, every one in a stream of its own, into run folders that can be resumed.

A step of a small network keeps a GPU busy to a fraction: its kernels are short and wait for one another. Here a whole step
(picking the batch, forward, backward, Adam) is one CUDA graph per network, and the graphs of all networks run side by side. On a
CPU the same steps run one after another.

Tensor cores like channels by eights, so on a GPU every network is trained inside a wider one whose further channels are zero:
their gradients are zero too and Adam never moves them, so the function and its training are those of the narrow network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unlazy.data.images import Images
from unlazy.models.conv import GatedImageNet, build_images
from unlazy.models.gates import SoftGate
from unlazy.runtime import StoreError, require
from unlazy.store import Run, Writer
from unlazy.training.batches import DeviceImages
from unlazy.training.fit import Progress
from unlazy.training.images import ImageRecipe, accuracies, accuracy, loss_function, now, on_device, quick_convolutions

CHANNELS_BY = 8
SLOTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Stack:
    """Networks of one kind from several seeds, and where their run is recorded."""

    name: str
    nets: Sequence[GatedImageNet]
    seeds: Sequence[int]
    writer: Writer | None = None

    def __post_init__(self) -> None:
        require(len(self.nets) == len(self.seeds) > 0, f"{self.name}: as many networks as seeds, and at least one.")


def train_together(
    stacks: Sequence[Stack],
    train: Images,
    test: Images,
    recipe: ImageRecipe,
    *,
    device: str = "cpu",
    looks: Sequence[int] = (),
    progress: Progress | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Train all networks in place; per stack and seed a table as that of ``train_images``.

    ``looks``: epochs after which accuracies are measured and, with a writer, networks and optimisers kept; the first and the
    last state always are. Accuracies on the way count in the precision of training and on ``recipe.train_probe`` training
    pictures; the last ones on all of them (and on those few, as ``probe_as_trained``), those on test pictures in float32.
    Seconds are those of all networks together.
    """
    require(recipe.optimiser == "adam" and recipe.schedule == "constant", "together means Adam at a constant rate.")
    require(not recipe.augment and recipe.distil == 0, "together means pictures as they are, and no teacher.")
    standard = all(net.settings.parametrisation == "standard" for stack in stacks for net in stack.nets)
    require(standard, "together means one rate for all layers: the standard parametrisation.")
    require(recipe.batch <= len(train), f"a batch of {recipe.batch} is more than the {len(train)} pictures there are.")
    cuda = torch.device(device).type == "cuda"
    layout = torch.channels_last if cuda else torch.contiguous_format
    data, probe, held_out = on_device(
        recipe, train, train.take(slice(recipe.train_probe)), test, device=device, layout=layout
    )
    autocast = cuda and recipe.precision == "bfloat16"
    per_epoch = len(data) // recipe.batch
    with quick_convolutions():
        groups = {
            stack.name: [
                _Member(net, data, recipe, seed, autocast) for net, seed in zip(stack.nets, stack.seeds, strict=True)
            ]
            for stack in stacks
        }
    curves = {stack.name: _earlier(stack) for stack in stacks}
    seconds = max((curve[-1][0]["seconds"] for curve in curves.values() if curve), default=0.0)
    begun = {stack.name: _begin(stack, groups[stack.name], per_epoch) for stack in stacks}
    for epoch in range(min(begun.values()), recipe.epochs):
        at_work = [stack for stack in stacks if epoch >= begun[stack.name]]
        members = [member for stack in at_work for member in groups[stack.name]]
        started = now(cuda)
        for member in members:
            member.start(epoch)
        for _ in range(per_epoch):
            for member in members:
                member.step()
        seconds += now(cuda) - started
        last = epoch + 1 == recipe.epochs
        for stack in at_work if last or epoch + 1 in looks else ():
            looked = []
            for member in groups[stack.name]:
                loss = float(member.total) / per_epoch
                seen = member.look(data if last else probe, held_out, exact=last)
                if last:  # beside the same pictures as before, so that a curve compares like with like
                    seen["probe_as_trained"] = member.look(probe, held_out, exact=False)["train_as_trained"]
                about = {"epoch": epoch + 1, "seconds": seconds, "loss": loss if np.isfinite(loss) else None}
                looked.append(about | seen)
            curves[stack.name].append(looked)
            _record(stack, groups[stack.name], (epoch + 1) * per_epoch, looked)
        if progress is not None:
            progress(epoch + 1, recipe.epochs)
    shared = {
        "seconds": round(seconds, 3),
        "trained_together": sum(len(members) for members in groups.values()),
        "steps": per_epoch * recipe.epochs,
        "precision": "bfloat16" if autocast else "float32",
        "graphs": cuda,
    }
    return {
        stack.name: [
            _summary([looked[k] for looked in curves[stack.name]], net) | shared for k, net in enumerate(stack.nets)
        ]
        for stack in stacks
    }


def _summary(looks: list[dict[str, Any]], net: GatedImageNet) -> dict[str, Any]:
    curve = [{name: value for name, value in look.items() if name != "seconds"} for look in looks]
    best = max(curve, key=lambda look: look["test_as_trained"])
    return {
        **{name: value for name, value in curve[-1].items() if name != "epoch"},
        "best_test": best["test_as_trained"],
        "best_epoch": best["epoch"],
        "curve": curve,
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
    }


# --- one network -----------------------------------------------------------------------------------


class _Member:
    """One network with its optimiser, its place in the epoch and, on a GPU, its stream and the graph of a step."""

    def __init__(self, net: GatedImageNet, data: DeviceImages, recipe: ImageRecipe, seed: int, autocast: bool) -> None:
        device = data.labels.device
        cuda = device.type == "cuda"
        self.net, self.data, self.batch, self.seed, self.autocast = net, data, recipe.batch, seed, autocast
        self.wide = widened(net, CHANNELS_BY) if cuda else net
        move: Any = self.wide.to  # torch's annotations forget memory_format
        self.wide = move(device, memory_format=data.layout).train()
        self.named = dict(self.wide.named_parameters())
        groups = [
            {"params": [p for name, p in self.named.items() if name.startswith("gate_layers.") == gating], "lr": rate}
            for gating, rate in ((False, recipe.lr), (True, recipe.gate_lr * recipe.lr))
        ]
        groups = [group for group in groups if group["params"]]
        self.optimiser = torch.optim.Adam(
            groups, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=cuda, capturable=cuda
        )
        self.loss = loss_function(self.wide, recipe, None, autocast=autocast)
        self.order = torch.arange(len(data), device=device)
        self.place = torch.zeros((), dtype=torch.int64, device=device)
        self.offsets = torch.arange(recipe.batch, device=device)
        self.total = torch.zeros((), device=device)
        self.stream = torch.cuda.Stream() if cuda else None
        self.graph: torch.cuda.CUDAGraph | None = None  # none on a CPU
        self._prepare()

    def start(self, epoch: int) -> None:
        """Put the epoch's order in place."""
        self.order.copy_(self.data.order(self.seed, epoch))
        self.place.zero_()
        self.total.zero_()
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def step(self) -> None:
        """The next batch of the epoch."""
        if self.graph is None or self.stream is None:
            self._one()
            return
        with torch.cuda.stream(self.stream):
            self.graph.replay()

    def look(self, train: DeviceImages, test: DeviceImages, *, exact: bool) -> dict[str, float]:
        """Accuracies as trained and with hard gates; ``exact``: those on test pictures in float32."""
        if exact:
            found = accuracies(self.wide, train, test, autocast=self.autocast)
        else:
            found = {}
            for gates, model in (("as_trained", self.wide), ("hard_gates", self.wide.hard())):
                for name, pictures in (("train", train), ("test", test)):
                    same = gates == "hard_gates" and not isinstance(self.net.settings.gate, SoftGate)
                    found[f"{name}_{gates}"] = (
                        found[f"{name}_as_trained"] if same else accuracy(model, pictures, autocast=self.autocast)
                    )
        self.wide.train()
        return found

    def numbers(self) -> dict[str, Tensor]:
        """model/NAME and optim/NAME/SLOT of the narrow network, and how many steps were done."""
        shapes = {name: parameter.shape for name, parameter in self.net.named_parameters()}
        found = {f"model/{name}": _inner(wide.detach(), shapes[name]) for name, wide in self.named.items()}
        for name, wide in self.named.items():
            state = self.optimiser.state[wide]
            found |= {f"optim/{name}/{slot}": _inner(state[slot], shapes[name]) for slot in SLOTS}
            found["optim/steps"] = state["step"]
        return found

    def load(self, numbers: Mapping[str, Tensor]) -> None:
        """The inverse of ``numbers``."""
        shapes = {name: parameter.shape for name, parameter in self.net.named_parameters()}
        with torch.no_grad():
            for name, wide in self.named.items():
                _inner(wide, shapes[name]).copy_(numbers[f"model/{name}"])
                state = self.optimiser.state[wide]
                state["step"].copy_(numbers["optim/steps"])
                for slot in SLOTS:
                    _inner(state[slot], shapes[name]).copy_(numbers[f"optim/{name}/{slot}"])

    def finish(self) -> None:
        """Bring what was learned back into the narrow network."""
        with torch.no_grad():
            for name, parameter in self.net.named_parameters():
                parameter.copy_(_inner(self.named[name].detach(), parameter.shape))

    def _one(self) -> None:
        chosen = self.order[self.place + self.offsets]
        x, y = self.data.floats(self.data.pixels[chosen]), self.data.labels[chosen]
        self.wide.zero_grad(set_to_none=True)
        value = self.loss(x, y)
        value.backward()
        self.optimiser.step()
        self.total += value.detach()
        self.place += self.batch

    def _prepare(self) -> None:
        """Trial steps, so that everything is in place; then the graph; then all numbers as they were."""
        before = [parameter.detach().clone() for parameter in self.named.values()]
        if self.stream is None:
            self._one()
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for _ in range(3):
                    self._one()
            torch.cuda.synchronize()
            self.wide.zero_grad(set_to_none=True)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self._one()
            torch.cuda.synchronize()
        with torch.no_grad():
            for parameter, old in zip(self.named.values(), before, strict=True):
                parameter.copy_(old)
                for value in self.optimiser.state[parameter].values():
                    value.zero_()


def widened(net: GatedImageNet, by: int) -> GatedImageNet:
    """The same function as a network whose channels are multiples of ``by``: the further ones are zero."""
    spec = net.settings
    require(not spec.blocks and not spec.batch_norm, "only plain networks without batch-norm can be widened by zeros.")
    require(spec.parametrisation == "standard", "multipliers of other parametrisations would change with the width.")
    wide = build_images(replace(spec, widths=tuple(-(-width // by) * by for width in spec.widths)))
    narrow = dict(net.named_parameters())
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            parameter.zero_()
            _inner(parameter, narrow[name].shape).copy_(narrow[name])
    return wide


def _inner(wide: Tensor, shape: Sequence[int]) -> Tensor:
    """The corner of a wide tensor that a narrow one fills."""
    return wide[tuple(slice(size) for size in shape)]


# --- the store -------------------------------------------------------------------------------------


def _begin(stack: Stack, members: Sequence[_Member], per_epoch: int) -> int:
    """Record the start, or go back to the last state that was kept; returns the number of epochs done."""
    if stack.writer is None:
        return 0
    if stack.writer.resumed is None:
        _record(stack, members, 0, [{} for _ in members])
        return 0
    step, arrays = stack.writer.resumed
    for number, member in enumerate(members):
        try:
            member.load({name: torch.as_tensor(array[number]) for name, array in arrays.items()})
        except (KeyError, RuntimeError, IndexError) as error:
            raise StoreError(
                f"the checkpoint at step {step} belongs to another training; delete the run folder."
            ) from error
    return step // per_epoch


def _record(stack: Stack, members: Sequence[_Member], step: int, found: Sequence[Mapping[str, Any]]) -> None:
    """Bring the networks up to date and, with a writer, keep everything."""
    for member in members:
        member.finish()
    if stack.writer is None:
        return
    scalars = {name: np.array([np.nan if one[name] is None else one[name] for one in found]) for name in found[0]}
    each = [{name: tensor.cpu().numpy() for name, tensor in member.numbers().items()} for member in members]
    stack.writer.record(step, scalars, checkpoint={name: np.stack([one[name] for one in each]) for name in each[0]})


def _earlier(stack: Stack) -> list[list[dict[str, Any]]]:
    """What the run folder says of looks before a resumption: per look one table for each seed."""
    if stack.writer is None or stack.writer.resumed is None:
        return []
    found = []
    for line in Run(stack.writer.folder).lines:
        tables = [{name: values[k] for name, values in line.scalars.items()} for k in range(len(stack.nets))]
        if line.scalars:
            found.append([table | {"epoch": int(table["epoch"] or 0)} for table in tables])
    return found
