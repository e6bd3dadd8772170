"""The state of one network in training as plain arrays: what a run folder keeps of it, and the way back."""

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


def state_of(net: nn.Module, optimiser: torch.optim.Optimizer) -> Arrays:
    """model/NAME, statistics of batch-norms among them, and optim/NAME/SLOT; the first axis is that of the one member."""
    found = {f"model/{name}": value for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        slots = optimiser.state.get(parameter, {})
        found |= {f"optim/{name}/{slot}": value for slot, value in slots.items() if value is not None}
    return {name: value.detach().cpu().numpy()[None] for name, value in found.items()}


def put_back(net: nn.Module, optimiser: torch.optim.Optimizer, arrays: Mapping[str, NDArray[Any]]) -> None:
    """The inverse of ``state_of``, in place: numbers keep their device and their order in memory."""
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
            optimiser.state[parameter] = {slot: _like(parameter, value, fused) for slot, value in slots.items()}


def _like(parameter: Tensor, value: Tensor, fused: bool) -> Tensor:
    """A slot of the optimiser: laid out as its parameter, or a counter, which only fused optimisers want on the device."""
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, requires_grad=False).copy_(value)
    return value.to(parameter.device) if fused else value.clone()


def record_look(writer: Writer, step: int, look: Mapping[str, Any], arrays: Arrays | None) -> None:
    """One line of numbers, with the state where it is given."""
    scalars = {name: np.array([np.nan if value is None else value]) for name, value in look.items()}
    writer.record(step, scalars, checkpoint=arrays)


def resume(
    writer: Writer | None, net: nn.Module, optimiser: torch.optim.Optimizer
) -> tuple[int, float, list[dict[str, Any]]]:
    """Steps done, seconds they took and looks taken, with network and optimiser as they were then; else a fresh start."""
    if writer is None or writer.resumed is None:
        return 0, 0.0, []
    step, arrays = writer.resumed
    put_back(net, optimiser, arrays)
    seconds, looks = 0.0, []
    for line in Run(writer.folder).lines:
        look: dict[str, Any] = {name: values[0] for name, values in line.scalars.items()}
        seconds = float(look.pop("seconds"))
        if "test_as_trained" in look:
            looks.append(look | {"epoch": int(look["epoch"])})
    return step, seconds, looks
