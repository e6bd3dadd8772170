"""The linearised twin of a watched network: trained beside it or afterwards, or simulated; what it gives goes to the history."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unlazy.kernels.capture import Inputs
from unlazy.runtime import InputError, require
from unlazy.scope.positions import PositionOutputs
from unlazy.scope.session import Session
from unlazy.scope.summary import TWIN_NUMBERS
from unlazy.scope.user_model import SelectedOutput
from unlazy.training.twin import LinearisedTwin, Loss, TwinPoint, linearised_twin, simulate_twin

Optimiser = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Scheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Held = Inputs | tuple[Inputs, Tensor]


def start_twin(
    session: Session, optimiser: torch.optim.Optimizer, loss: Loss, held: Held | None, options: Any
) -> LinearisedTwin:
    """A twin to be trained beside the network, made before its first step."""
    require(
        session.last_step <= 0,
        "a twin that is trained beside the network is made before the first step; "
        "afterwards give batches= and a function that makes the optimiser.",
    )
    return linearised_twin(_network_of(session), optimiser, loss, held=held_or_probe(session, held), **options)


def train_twin(
    session: Session,
    make_optimiser: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    loss: Loss,
    batches: Iterable[tuple[Inputs, Tensor]],
    held: Held | None,
    scheduler: Scheduler | None,
    say: Callable[[str], None],
    options: Any,
) -> LinearisedTwin:
    """A twin that is trained now, on the batches that the network saw, and compared with the network as it is now."""
    start, seen = start_model(session), list(batches)
    require(bool(seen), "batches= has no batch; give those that the network was trained on, in their order.")
    trained = [p for name, p in start.named_parameters() if name in session.measurements.start.parameters]
    optimiser = make_optimiser(trained)
    twin = linearised_twin(start, optimiser, loss, held=held_or_probe(session, held), **options)
    say(twin.price(*seen[0]).text(len(seen)))
    twin.train(
        seen,
        scheduler=None if scheduler is None else scheduler(optimiser),
        free_after=session.measurements.unfrozen_after,
    )
    twin.compare(_network_of(session))
    return twin


def simulate(
    session: Session,
    train: tuple[Inputs, Tensor],
    loss: Loss,
    rates: Sequence[float],
    held: Held | None,
    options: Any,
) -> TwinPoint:
    """The point that the simulated twin gives at the end of training."""
    start, pair = start_model(session), held_or_probe(session, held)
    inputs, targets = pair if isinstance(pair, tuple) and len(pair) == 2 else (pair, None)
    found = simulate_twin(start, train, loss, held=inputs, rates=rates, **options)
    if not found.defensible:
        raise InputError(
            "the learning rate is beyond the largest stable one of the linearised network, so that a simulation means nothing; "
            "train the twin: scope.twin(...)."
        )
    network = linearised_twin(start, torch.optim.SGD(start.parameters(), 0.0), loss, held=pair)
    after = network.outputs_of(_network_of(session))
    went = float((after - network.start).norm())
    losses = (
        (network.held_loss(after), network.held_loss(found.outputs[-1])) if targets is not None else (float("nan"),) * 2
    )
    gap, size = (
        float(part.norm()) / max(went, 1e-30) for part in (after - found.outputs[-1], found.outputs[-1] - network.start)
    )
    return TwinPoint(len(rates), gap, size, *losses)


def record_point(session: Session, step: int, point: TwinPoint, *, simulated: bool = False) -> None:
    """Write what the twin gave at a step of the network into history and run folder."""
    numbers = {"gap": point.gap, "twin_loss": point.twin_loss, "loss": point.loss, "simulated": float(simulated)}
    session.log.write(step, {}, {TWIN_NUMBERS[name]: value for name, value in numbers.items() if value == value})


def start_model(session: Session) -> nn.Module:
    """A copy of the watched network with the parameters and buffers that it had at the start, in the mode that it trained in."""
    network, start = _network_of(session), session.measurements.start
    model = copy.deepcopy(network)
    with torch.no_grad():
        for name, value in {**start.parameters, **start.buffers}.items():
            _tensor(model, name).copy_(value)
    for own, mine in zip(network.modules(), model.modules(), strict=True):
        mine.training = session.training_modes.get(own, own.training)
    return model


def _network_of(session: Session) -> nn.Module:
    """The watched network as a function of the inputs that its training gives it: all positions of a sequence, if it has some."""
    model = session.model
    return SelectedOutput(model.model, model.choose) if isinstance(model, PositionOutputs) else model


def _tensor(model: nn.Module, name: str) -> Tensor:
    path, _, last = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(path), last)
    return found


def held_or_probe(session: Session, held: Held | None) -> Any:
    """The samples that the user gave, else the probe set."""
    probe = session.measurements.probe
    if held is not None:
        return held
    return (probe.x["x"] if isinstance(session.model, PositionOutputs) else probe.x, probe.y)
