"""Digits 2 against 3, a smooth target for each seed, and the networks trained on it and on its signs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unlazy import runtime
from unlazy.models.build import build_stack
from unlazy.models.net import GatedNet
from unlazy.models.spec import Init, NetSpec, relu_spec
from unlazy.runtime import require, short_hash, stream
from unlazy.store import Run, Writer
from unlazy.studies.results import Progress
from unlazy.studies.tangent.images import twos_and_threes
from unlazy.studies.trainings import is_finished
from unlazy.training.ensemble import Member, batch_order

STUDY = "label-alignment"
RATE, MOMENTUM = 0.1, 0.9
TASKS = ("smooth", "sign")
RESUME_EPOCHS = 50  # a training that is cut off goes back by fewer


@dataclass(frozen=True)
class Settings:
    """Images trained on and looked at, hidden width, lengths of both trainings, points on the line of averages.

    ``readout_cycle``: epochs from the largest to the smallest rate while the smooth target is made (it then rises again).
    """

    seeds: int
    data: str = "mnist"
    images: int = 5000
    looked_at: int = 500
    width: int = 256
    epochs: int = 500
    readout_epochs: int = 400
    readout_cycle: int = 100
    batch: int = 100
    points: int = 50
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name not in ("data", "device"):
                require(isinstance(value, int) and value >= 1, f"{name} must be a whole number >= 1, got {value!r}.")
        require(self.looked_at <= self.images, f"{self.looked_at} images looked at, but only {self.images} trained on.")

    def spec(self, inputs: int) -> NetSpec:
        """784-256-256-1 and N(0, 2 / fan_in) weights as in the paper; biases begin at 0 (there: as PyTorch draws them)."""
        return relu_spec(inputs, 1, width=self.width, depth=2, init=Init("he"))

    def recipe(self) -> dict[str, object]:
        """What decides the trained numbers."""
        kept = asdict(self)
        for name in ("looked_at", "points"):
            del kept[name]
        return {"study": STUDY, "rate": RATE, "momentum": MOMENTUM, "trajectory": self.trajectory(), **kept}

    def trajectory(self) -> list[int]:
        """Epochs whose networks are kept, close together at first, where the way bends most: 0, 1, 2, 4, ... and the last."""
        doubling = [2**power for power in range(self.epochs.bit_length()) if 2**power < self.epochs]
        return [0, *doubling, self.epochs]


def train(settings: Settings, runs: Path, scale: str, progress: Progress) -> Run:
    """All seeds and both tasks as one stack, smooth first; a run that was cut off goes on, to the same bits."""
    folder = runs / STUDY / f"networks-{short_hash(settings.recipe())}"
    if is_finished(folder):
        return Run(folder)
    x, labels = (tensor.to(settings.device) for tensor in twos_and_threes(settings.data, settings.images))
    seeds = list(range(settings.seeds))
    header = {
        "kind": "train",
        "study": STUDY,
        "scale": scale,
        "recipe": settings.recipe(),
        "members": [{"seed": seed, "beta": None, "lr": RATE} for _ in TASKS for seed in seeds],
        "model": settings.spec(x.shape[1]).to_dict(),
        "data": {"name": f"{settings.data} 2 against 3", "options": {"images": settings.images}, "fingerprint": None},
        "provenance": runtime.provenance("float32", settings.device),
    }
    with Writer(folder, header) as writer:
        net = build_stack(settings.spec(x.shape[1]), seeds * len(TASKS)).to(settings.device)
        speed = [torch.zeros_like(parameter) for parameter in net.parameters()]
        if writer.resumed is None:
            smooth = smooth_targets(settings, x, labels, seeds)
            writer.record(0, {}, {"smooth": smooth.cpu().numpy()}, _checkpoint(net, speed))
            first = 0
        else:
            first = _load(writer.resumed, net, speed)
            smooth = torch.from_numpy(Run(folder).array("smooth", 0)).to(settings.device)
        targets = torch.cat([smooth, smooth.sign()])  # [tasks * seeds, n, 1]

        def keep(done: int, losses: Callable[[], Tensor]) -> None:
            progress("epochs", done, settings.epochs)
            if done in settings.trajectory() or done % RESUME_EPOCHS == 0:
                writer.record(done, {"loss": losses().cpu().numpy()}, None, _checkpoint(net, speed))

        schedule = Schedule(range(first, settings.epochs), lambda epoch: _cosine(epoch / settings.epochs), keep)
        descend(
            lambda some: net(x[some]),
            list(net.parameters()),
            targets,
            seeds * len(TASKS),
            settings.batch,
            schedule,
            speed,
        )
        writer.finish()
    return Run(folder)


def _cosine(turns: float) -> float:
    """From the full rate (0) to none (1), and back."""
    return RATE * (1 + math.cos(math.pi * turns)) / 2


def smooth_targets(
    settings: Settings, x: Float[Tensor, "n d"], labels: Float[Tensor, "n"], seeds: Sequence[int]
) -> Float[Tensor, "seeds n 1"]:
    """What a linear readout of two random ReLU layers has learned of the labels: no jump between the classes."""
    hidden = x
    for layer in range(2):
        weights = [
            torch.randn(
                settings.width, hidden.shape[-1], generator=stream(seed, "features", layer), dtype=torch.float64
            )
            for seed in seeds
        ]
        matrix = torch.stack(weights).to(x) * math.sqrt(2 / hidden.shape[-1])
        hidden = (hidden @ matrix.mT).relu()  # [seeds, n, width]
    readout = torch.zeros(len(seeds), settings.width, 1, device=x.device, requires_grad=True)
    own = torch.arange(len(seeds), device=x.device)[:, None]

    targets = labels[None, :, None].expand(len(seeds), -1, -1)
    schedule = Schedule(range(settings.readout_epochs), lambda epoch: _cosine(epoch / settings.readout_cycle))
    descend(lambda some: hidden[own, some] @ readout, [readout], targets, seeds, settings.batch, schedule)
    return (hidden @ readout).detach()


@dataclass(frozen=True)
class Schedule:
    """Which epochs, the rate of each, and who is told after each (with a function that gives the members' losses)."""

    epochs: range
    rate: Callable[[int], float]
    after: Callable[[int, Callable[[], Tensor]], None] = lambda done, losses: None


def descend(
    outputs: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    targets: Float[Tensor, "members n 1"],
    seeds: Sequence[int],
    batch: int,
    schedule: Schedule,
    speed: Sequence[Tensor] | None = None,
) -> None:
    """Gradient descent with momentum on the mean squared error, every member in its own order; ``speed`` moves in place."""
    members = [Member(seed, RATE) for seed in seeds]
    own = torch.arange(len(members), device=targets.device)[:, None]
    speed = [torch.zeros_like(parameter) for parameter in parameters] if speed is None else speed

    @torch.no_grad()
    def losses() -> Float[Tensor, "members"]:
        everything = torch.arange(targets.shape[1], device=targets.device).expand(len(members), -1)
        return (outputs(everything) - targets).square().mean((1, 2))

    for epoch in schedule.epochs:
        step = schedule.rate(epoch)
        order = batch_order(members, epoch, targets.shape[1]).to(targets.device)
        for some in order.split(batch, 1):
            missed = (outputs(some) - targets[own, some]).square().mean((1, 2))
            slopes = torch.autograd.grad(missed.sum(), list(parameters))
            with torch.no_grad():
                for parameter, slope, moving in zip(parameters, slopes, speed, strict=True):
                    parameter.sub_(moving.mul_(MOMENTUM).add_(slope), alpha=step)
        schedule.after(epoch + 1, losses)


def _checkpoint(net: GatedNet, speed: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """model/NAME and optim/NAME/speed; the batch orders need no state, they belong to (seed, epoch)."""
    moving = {f"optim/{name}/speed": tensor for (name, _), tensor in zip(net.named_parameters(), speed, strict=True)}
    tensors = {f"model/{name}": tensor for name, tensor in net.state_dict().items()} | moving
    return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}


def _load(resumed: tuple[int, Mapping[str, np.ndarray]], net: GatedNet, speed: Sequence[Tensor]) -> int:
    """Put network and momentum back as they were; returns the number of epochs done."""
    epoch, arrays = resumed
    models = {name.removeprefix("model/"): a for name, a in arrays.items() if name.startswith("model/")}
    net.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in models.items()})
    for (name, _), tensor in zip(net.named_parameters(), speed, strict=True):
        tensor.copy_(torch.from_numpy(np.array(arrays[f"optim/{name}/speed"])))
    return epoch
