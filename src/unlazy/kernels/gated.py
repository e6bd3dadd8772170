"""This project's own gated networks, dense or of images, as kernels see them."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn

from unlazy.kernels.capture import Inputs, evaluating
from unlazy.models.conv import GatedImageNet
from unlazy.models.gates import HardGate
from unlazy.models.net import GatedNet
from unlazy.runtime import Unsupported

Gated = GatedNet | GatedImageNet


def is_stack(model: nn.Module) -> TypeGuard[GatedNet]:
    """Whether this is many networks at once."""
    return isinstance(model, GatedNet) and model.members is not None


def refuse_stack(model: nn.Module) -> None:
    if is_stack(model):
        raise Unsupported(
            "GatedNet", "a stack is many functions at once", "Take its networks one by one: member(stack, i)."
        )


def has_hard_gates(model: nn.Module) -> TypeGuard[Gated]:
    """Gates of ours that are functions of parameters and jump."""
    if not isinstance(model, Gated):
        return False
    return isinstance(model.settings.gate, HardGate) and model.settings.gating not in ("own", "open")


def exact(model: nn.Module) -> nn.Module:
    """The network whose autograd is the derivative of its function: hard gates without their soft backward pass."""
    return model if not isinstance(model, Gated) or model.exact_gates() else model.hard()


def gates_of(model: Gated, x: Inputs) -> list[Tensor]:
    """Open or closed for every unit of every layer, in evaluation mode."""
    with evaluating(model), torch.no_grad():
        return model.gates(x).hard()


def value_bias(model: Gated) -> bool:
    """Whether paths may begin at biases (those of a batch-norm are some)."""
    return isinstance(model, GatedImageNet) or model.settings.value_bias
