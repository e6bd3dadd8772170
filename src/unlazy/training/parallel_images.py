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
from unlazy.models.build import build
from unlazy.models.gates import SoftGate
from unlazy.models.image_net import GatedImageNet
from unlazy.runtime import StoreError, require
from unlazy.store import Run, Writer
from unlazy.training.batches import DeviceImages
from unlazy.training.fit import Progress
from unlazy.training.images import (
    ImageRecipe,
    accuracy,
    benchmark_convolutions,
    loss_function,
    measure_accuracies,
    put_on_device,
    synchronised_time,
)

CHANNELS_BY = 8
SLOTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Stack:
    """Networks of one kind from several seeds, and the writer of their run folder."""

    name: str
    nets: Sequence[GatedImageNet]
    seeds: Sequence[int]
    writer: Writer | None = None

    def __post_init__(self) -> None:
        require(len(self.nets) == len(self.seeds) > 0, f"{self.name}: as many networks as seeds, and at least one.")


def train_in_parallel(
    stacks: Sequence[Stack],
    train: Images,
    test: Images,
    recipe: ImageRecipe,
    *,
    device: str = "cpu",
    measured_epochs: Sequence[int] = (),
    progress: Progress | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Train all networks in place; per stack and seed a table as that of ``train_images``.

    ``measured_epochs``: epochs after which accuracies are measured and, with a writer, checkpoints written; the first and the
    last state always are. Accuracies before the last epoch are computed in the precision of training and on
    ``recipe.train_probe`` training pictures; the last ones on all of them (and on those few, as ``probe_as_trained``), those on
    test pictures in float32. Seconds are those of all networks together.
    """
    require(
        recipe.optimiser == "adam" and recipe.schedule == "constant",
        "parallel training is by Adam at a constant rate.",
    )
    require(
        not recipe.augment and recipe.distil == 0,
        "parallel training takes pictures as they are, and no teacher.",
    )
    standard = all(net.settings.parametrisation == "standard" for stack in stacks for net in stack.nets)
    require(standard, "parallel training has one rate for all layers: the standard parametrisation.")
    all_train = all(net.settings.train_gates for stack in stacks for net in stack.nets)
    require(all_train, "parallel training moves every parameter; train networks with frozen gates by train_images.")
    require(recipe.batch <= len(train), f"a batch of {recipe.batch} is more than the {len(train)} pictures there are.")
    cuda = torch.device(device).type == "cuda"
    layout = torch.channels_last if cuda else torch.contiguous_format
    data, probe, held_out = put_on_device(
        recipe, train, train.take(slice(recipe.train_probe)), test, device=device, layout=layout
    )
    autocast = cuda and recipe.precision == "bfloat16"
    per_epoch = len(data) // recipe.batch
    with benchmark_convolutions():
        groups = {
            stack.name: [
                _Member(net, data, recipe, seed, autocast) for net, seed in zip(stack.nets, stack.seeds, strict=True)
            ]
            for stack in stacks
        }
    curves = {stack.name: _earlier_measurements(stack) for stack in stacks}
    seconds = max((curve[-1][0]["seconds"] for curve in curves.values() if curve), default=0.0)
    begun = {stack.name: _start_or_resume(stack, groups[stack.name], per_epoch) for stack in stacks}
    for epoch in range(min(begun.values()), recipe.epochs):
        at_work = [stack for stack in stacks if epoch >= begun[stack.name]]
        members = [member for stack in at_work for member in groups[stack.name]]
        started = synchronised_time(cuda)
        for member in members:
            member.start(epoch)
        for _ in range(per_epoch):
            for member in members:
                member.step()
        seconds += synchronised_time(cuda) - started
        last = epoch + 1 == recipe.epochs
        for stack in at_work if last or epoch + 1 in measured_epochs else ():
            numbers = []
            for member in groups[stack.name]:
                loss = float(member.total) / per_epoch
                accuracies = member.measure(data if last else probe, held_out, exact=last)
                if last:  # beside the same pictures as before, so that a curve compares like with like
                    accuracies["probe_as_trained"] = member.measure(probe, held_out, exact=False)["train_as_trained"]
                about = {"epoch": epoch + 1, "seconds": seconds, "loss": loss if np.isfinite(loss) else None}
                numbers.append(about | accuracies)
            curves[stack.name].append(numbers)
            _write_measurement(stack, groups[stack.name], (epoch + 1) * per_epoch, numbers)
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
            _summarise_member([numbers[k] for numbers in curves[stack.name]], net) | shared
            for k, net in enumerate(stack.nets)
        ]
        for stack in stacks
    }


def _summarise_member(measurements: list[dict[str, Any]], net: GatedImageNet) -> dict[str, Any]:
    """The table of one network: its last accuracies, its best ones, and all measurements as a curve."""
    curve = [{name: value for name, value in one.items() if name != "seconds"} for one in measurements]
    best = max(curve, key=lambda one: one["test_as_trained"])
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
        self.wide = widen_with_zeros(net, CHANNELS_BY) if cuda else net
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
        self._capture_graph()

    def start(self, epoch: int) -> None:
        """Set the order of an epoch and go to its first batch."""
        self.order.copy_(self.data.epoch_order(self.seed, epoch))
        self.place.zero_()
        self.total.zero_()
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def step(self) -> None:
        """Train on the next batch of the epoch."""
        if self.graph is None or self.stream is None:
            self._take_step()
            return
        with torch.cuda.stream(self.stream):
            self.graph.replay()

    def measure(self, train: DeviceImages, test: DeviceImages, *, exact: bool) -> dict[str, float]:
        """Accuracies as trained and with hard gates; ``exact``: those on test pictures in float32."""
        if exact:
            found = measure_accuracies(self.wide, train, test, autocast=self.autocast)
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

    def state(self) -> dict[str, Tensor]:
        """model/NAME and optim/NAME/SLOT of the narrow network, and how many steps were done."""
        shapes = {name: parameter.shape for name, parameter in self.net.named_parameters()}
        found = {f"model/{name}": _narrow_corner(wide.detach(), shapes[name]) for name, wide in self.named.items()}
        for name, wide in self.named.items():
            state = self.optimiser.state[wide]
            found |= {f"optim/{name}/{slot}": _narrow_corner(state[slot], shapes[name]) for slot in SLOTS}
            found["optim/steps"] = state["step"]
        return found

    def load(self, numbers: Mapping[str, Tensor]) -> None:
        """The inverse of ``state``."""
        shapes = {name: parameter.shape for name, parameter in self.net.named_parameters()}
        with torch.no_grad():
            for name, wide in self.named.items():
                _narrow_corner(wide, shapes[name]).copy_(numbers[f"model/{name}"])
                state = self.optimiser.state[wide]
                state["step"].copy_(numbers["optim/steps"])
                for slot in SLOTS:
                    _narrow_corner(state[slot], shapes[name]).copy_(numbers[f"optim/{name}/{slot}"])

    def copy_to_net(self) -> None:
        """Copy the trained parameters into the narrow network."""
        with torch.no_grad():
            for name, parameter in self.net.named_parameters():
                parameter.copy_(_narrow_corner(self.named[name].detach(), parameter.shape))

    def _take_step(self) -> None:
        """Pick a batch, and do forward, backward and update."""
        chosen = self.order[self.place + self.offsets]
        x, y = self.data.floats(self.data.pixels[chosen]), self.data.labels[chosen]
        self.wide.zero_grad(set_to_none=True)
        value = self.loss(x, y)
        value.backward()
        self.optimiser.step()
        self.total += value.detach()
        self.place += self.batch

    def _capture_graph(self) -> None:
        """Take trial steps, so that all memory is allocated; capture the graph on a GPU; then restore all numbers."""
        before = [parameter.detach().clone() for parameter in self.named.values()]
        if self.stream is None:
            self._take_step()
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for _ in range(3):
                    self._take_step()
            torch.cuda.synchronize()
            self.wide.zero_grad(set_to_none=True)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self._take_step()
            torch.cuda.synchronize()
        with torch.no_grad():
            for parameter, old in zip(self.named.values(), before, strict=True):
                parameter.copy_(old)
                for value in self.optimiser.state[parameter].values():
                    value.zero_()


def widen_with_zeros(net: GatedImageNet, by: int) -> GatedImageNet:
    """A network that computes the same function with channels in multiples of ``by``; the added channels are zero."""
    spec = net.settings
    require(not spec.blocks and not spec.batch_norm, "only plain networks without batch-norm can be widened by zeros.")
    require(spec.parametrisation == "standard", "multipliers of other parametrisations would change with the width.")
    wide = build(replace(spec, widths=tuple(-(-width // by) * by for width in spec.widths)))
    narrow = dict(net.named_parameters())
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            parameter.zero_()
            _narrow_corner(parameter, narrow[name].shape).copy_(narrow[name])
    return wide


def _narrow_corner(wide: Tensor, shape: Sequence[int]) -> Tensor:
    """The corner of a wide tensor that a narrow one fills."""
    return wide[tuple(slice(size) for size in shape)]


# --- the store -------------------------------------------------------------------------------------


def _start_or_resume(stack: Stack, members: Sequence[_Member], per_epoch: int) -> int:
    """Write the start, or resume from the last checkpoint; returns the number of epochs done."""
    if stack.writer is None:
        return 0
    if stack.writer.resumed is None:
        _write_measurement(stack, members, 0, [{} for _ in members])
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


def _write_measurement(stack: Stack, members: Sequence[_Member], step: int, found: Sequence[Mapping[str, Any]]) -> None:
    """Update the narrow networks and, with a writer, write numbers and a checkpoint."""
    for member in members:
        member.copy_to_net()
    if stack.writer is None:
        return
    scalars = {name: np.array([np.nan if one[name] is None else one[name] for one in found]) for name in found[0]}
    each = [{name: tensor.cpu().numpy() for name, tensor in member.state().items()} for member in members]
    stack.writer.record(step, scalars, checkpoint={name: np.stack([one[name] for one in each]) for name in each[0]})


def _earlier_measurements(stack: Stack) -> list[list[dict[str, Any]]]:
    """Measurements of a resumed run: for each of them one table a seed."""
    if stack.writer is None or stack.writer.resumed is None:
        return []
    found = []
    for line in Run(stack.writer.folder).lines:
        tables = [{name: values[k] for name, values in line.scalars.items()} for k in range(len(stack.nets))]
        if line.scalars:
            found.append([table | {"epoch": int(table["epoch"] or 0)} for table in tables])
    return found
