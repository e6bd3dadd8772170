"""This project's own gated networks, dense or of images, as kernels see them."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn

from unlazy.kernels.capture import Inputs, evaluation_mode
from unlazy.models.gates import HardGate
from unlazy.models.image_net import GatedImageNet
from unlazy.models.net import GatedNet
from unlazy.runtime import Unsupported

Gated = GatedNet | GatedImageNet


def is_stack(model: nn.Module) -> TypeGuard[GatedNet]:
    """Whether this is a stack: many networks computed at once."""
    return isinstance(model, GatedNet) and model.members is not None


def refuse_stack(model: nn.Module) -> None:
    """Raise ``Unsupported`` if the model is a stack of networks."""
    if is_stack(model):
        raise Unsupported(
            "GatedNet", "a stack is many functions at once", "Take its networks one by one: member(stack, i)."
        )


def has_hard_gates(model: nn.Module) -> TypeGuard[Gated]:
    """Whether this is a gated network of ours with hard gates that depend on parameters of their own."""
    if not isinstance(model, Gated):
        return False
    return isinstance(model.settings.gate, HardGate) and model.settings.gating not in ("own", "open")


def with_exact_gradients(model: nn.Module) -> nn.Module:
    """The network whose autograd is the derivative of its function: hard gates without their soft backward pass."""
    return model if not isinstance(model, Gated) or model.has_exact_gradient() else model.hard()


def net_gates(model: Gated, x: Inputs) -> list[Tensor]:
    """Open or closed for every unit of every layer, in evaluation mode."""
    with evaluation_mode(model), torch.no_grad():
        return model.gates(x).hard()


def has_value_bias(model: Gated) -> bool:
    """Whether paths may begin at biases; the shift of a batch-norm is one."""
    return isinstance(model, GatedImageNet) or model.settings.value_bias
