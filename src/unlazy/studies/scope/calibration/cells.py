"""One cell: a network trained, measured as a scope measures, and its linearised twin trained by the same recipe."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.net import GatedNet
from unlazy.runtime import provenance, short_hash, threads
from unlazy.scope.history import History
from unlazy.scope.measures import MOST_ROWS, Instruments
from unlazy.scope.probe import as_probe, with_columns
from unlazy.scope.readings import readings
from unlazy.store import write_file
from unlazy.studies.scope.calibration.data import Task, task
from unlazy.studies.scope.calibration.networks import network
from unlazy.studies.scope.calibration.settings import Cell
from unlazy.training.fit import LOSSES
from unlazy.training.linearised import linearise

MOMENTUM = 0.9
LOOKS = 8
VERSION = 1  # of what a cell's file holds
Function = Callable[[Tensor], Tensor]


def measure_cell(cell: Cell, folder: Path) -> dict[str, Any]:
    """What the scope sees of a cell and the truth about it; read from ``folder`` where it was measured before."""
    path = folder / f"{cell.net}-{cell.data}-{short_hash({'version': VERSION, **cell.to_dict()})}.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    with threads(1):
        result = _measured(cell)
    write_file(path, (json.dumps(result) + "\n").encode())
    return result


def _measured(cell: Cell) -> dict[str, Any]:
    began, work = time.process_time(), task(cell.data)
    model = network(cell, work.outputs)
    start = copy.deepcopy(model)
    scale = 1.0 if cell.alpha is None else cell.alpha
    rate = learning_rate(cell, start, work, scale)
    history = watch(cell, model, start, work, rate, scale)
    twin = linearise(start)
    reached = _train(cell, _groups(cell, twin, rate), _centred(cell, twin, start, work), work, scale)
    x = work.held[0]
    with torch.no_grad():
        before, after, lazy = start(x), model(x), twin(x)
    change = (after - before).norm()
    seen = readings(history)
    return {
        "cell": cell.to_dict(),
        "readings": seen.to_dict(),
        "gap": _number((after - lazy).norm() / change),
        "size": _number((lazy - before).norm() / change),
        "linearised_loss": reached if math.isfinite(reached) else None,
        "learning_rate": rate,
        "seconds": time.process_time() - began,
        "provenance": provenance("float32"),
    }


def learning_rate(cell: Cell, start: nn.Module, work: Task, scale: float) -> float:
    """Gradient descent: ``rate`` over the largest curvature at the start. Adam: ``rate``, divided by the output scale.

    The curvature of the loss over alpha^2 is that of the loss by f: of K / (n o) times 2 for squared errors, at most times
    1/2 for cross-entropy (not divided by o), with K the kernel of one output, taken as an equal share of the trace kernel.
    """
    if cell.optimiser == "adam":
        return cell.rate / scale
    few = work.train[0][:128]
    top = float(torch.linalg.eigvalsh(tangent_kernel(start, few).double())[-1]) / work.outputs / len(few)
    return cell.rate / (top * (2 / work.outputs if work.loss == "squared" else 0.5))


def watch(cell: Cell, model: nn.Module, start: nn.Module, work: Task, rate: float, scale: float) -> History:
    """Train the network, looking at it now and then; its loss is that of what is trained, on the training samples."""
    x, y = work.probe_set()
    probe = as_probe((x, y))
    with torch.no_grad():
        probe = with_columns(probe, model(x))
    every_row = dict.fromkeys(MOST_ROWS)  # however long it takes: numbers must not depend on how busy the machine is
    instruments = Instruments(model, probe, ("paths", "tangents"), rows=every_row)
    for unused in ("paths", "overlap"):
        instruments.looks.pop(unused, None)
    names = {name: inside.nonzero()[:, 0].tolist() for name, inside in probe.groups.items()}
    history = History(groups=names)
    moments = {round(cell.steps ** (number / LOOKS)) for number in range(1, LOOKS + 1)}

    def look(step: int, loss: float) -> None:
        if not math.isfinite(loss):  # training broke down: its loss is all there is to see
            history.add(step, {"loss": loss}, {})
            return
        if step and step not in moments:
            return
        found = instruments.measure(step) if step else instruments.begin()
        scalars = {name: float(value) for name, value in found.items() if value.ndim == 0}
        arrays = {name: value.detach().numpy() for name, value in found.items() if value.ndim > 0}
        history.add(step, scalars | {"loss": loss}, arrays)

    _train(cell, _groups(cell, model, rate), _centred(cell, model, start, work), work, scale, look)
    return history


def _centred(cell: Cell, model: nn.Module, start: nn.Module, work: Task) -> Function:
    """alpha (f - f_0) on the training samples, or f itself where there is no alpha."""
    alpha = cell.alpha
    if alpha is None:
        return model
    with torch.no_grad():
        before = start(work.train[0])
    return lambda x: alpha * (model(x) - before)


def _groups(cell: Cell, model: nn.Module, rate: float) -> list[dict[str, Any]]:
    """Trained parameters with their rates. Under gradient descent all parametrisations have one rate, so has the twin."""
    if isinstance(model, GatedNet):
        return model.parameter_groups(rate, "sgd" if cell.optimiser == "gd" else "adam")
    return [{"params": [p for p in model.parameters() if p.requires_grad], "lr": rate}]


def _train(
    cell: Cell,
    groups: list[dict[str, Any]],
    function: Function,
    work: Task,
    scale: float,
    look: Callable[[int, float], None] | None = None,
) -> float:
    """Full batches; returns the last loss."""
    gd = cell.optimiser == "gd"
    optimiser = torch.optim.SGD(groups, momentum=MOMENTUM) if gd else torch.optim.Adam(groups)
    (x, y), loss_of = work.train, LOSSES[work.loss]
    value = math.nan
    for step in range(cell.steps + 1):
        loss = loss_of(function(x), y)
        value = float(loss.detach())
        if look is not None:
            look(step, value)
        if step == cell.steps or not math.isfinite(value):
            break
        optimiser.zero_grad()
        (loss / scale**2).backward()
        optimiser.step()
    return value


def _number(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
