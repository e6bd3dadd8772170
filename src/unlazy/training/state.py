"""The state of one network in training as plain arrays: to a checkpoint, and back from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unlazy.runtime import StoreError
from unlazy.store import Run, Writer

Arrays = dict[str, NDArray[Any]]


def training_state(net: nn.Module, optimiser: torch.optim.Optimizer) -> Arrays:
    """Arrays ``model/NAME``, with batch-norm statistics, and ``optim/NAME/SLOT``; the first axis is the member, of size 1."""
    found = {f"model/{name}": value for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        slots = optimiser.state.get(parameter, {})
        found |= {f"optim/{name}/{slot}": value for slot, value in slots.items() if value is not None}
    return {name: value.detach().cpu().numpy()[None] for name, value in found.items()}


def restore_state(net: nn.Module, optimiser: torch.optim.Optimizer, arrays: Mapping[str, NDArray[Any]]) -> None:
    """The inverse of ``training_state``, in place: numbers keep their device and their order in memory."""
    tensors = {name: torch.as_tensor(array[0]) for name, array in arrays.items()}
    model = {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")}
    try:
        net.load_state_dict(model)
    except RuntimeError as error:
        raise StoreError("the checkpoint belongs to another network; delete the run folder.") from error
    fused = bool(optimiser.defaults.get("fused"))
    for name, parameter in net.named_parameters():
        own = f"optim/{name}/"
        slots = {key.removeprefix(own): value for key, value in tensors.items() if key.startswith(own)}
        if slots:
            optimiser.state[parameter] = {
                slot: _optimiser_slot(parameter, value, fused) for slot, value in slots.items()
            }


def _optimiser_slot(parameter: Tensor, value: Tensor, fused: bool) -> Tensor:
    """A slot of the optimiser in the layout of its parameter; a counter stays on the CPU unless the optimiser is fused."""
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, requires_grad=False).copy_(value)
    return value.to(parameter.device) if fused else value.clone()


def write_measurement(writer: Writer, step: int, numbers: Mapping[str, Any], arrays: Arrays | None) -> None:
    """Write one line of numbers to the run folder, with a checkpoint if its ``arrays`` are given."""
    scalars = {name: np.array([np.nan if value is None else value]) for name, value in numbers.items()}
    writer.record(step, scalars, checkpoint=arrays)


def resume_training(
    writer: Writer | None, net: nn.Module, optimiser: torch.optim.Optimizer
) -> tuple[int, float, list[dict[str, Any]]]:
    """Steps done, seconds they took and measurements so far; network and optimiser are restored to that point.

    Without a writer, or if its folder is new: 0, 0.0 and no measurements.
    """
    if writer is None or writer.resumed is None:
        return 0, 0.0, []
    step, arrays = writer.resumed
    restore_state(net, optimiser, arrays)
    seconds, measurements = 0.0, []
    for line in Run(writer.folder).lines:
        numbers: dict[str, Any] = {name: values[0] for name, values in line.scalars.items()}
        seconds = float(numbers.pop("seconds"))
        if "test_as_trained" in numbers:
            measurements.append(numbers | {"epoch": int(numbers["epoch"])})
    return step, seconds, measurements
