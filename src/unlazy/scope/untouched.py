"""Looking changes nothing: everything a measurement could disturb is put back, whatever happens inside."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Inside: evaluation mode, full precision, no compilation. Afterwards: as if nothing had happened.

    Put back bit for bit: random streams (torch on every device, numpy, python), ``training`` and ``requires_grad`` flags,
    gradients (also those that are ``None``), buffers, autocast, gradient and inference mode, the fast path of attention.
    Hooks that the block forgets are taken off.
    """
    with ExitStack() as stack:
        stack.enter_context(_random_streams())
        stack.enter_context(_fast_attention_off())
        stack.enter_context(_module_state(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in {"cpu", *(parameter.device.type for parameter in model.parameters())} - {"meta"}:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def _random_streams() -> Iterator[None]:
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    device_states = [torch.cuda.get_rng_state(device) for device in devices]
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)
        for device, state in zip(devices, device_states, strict=True):
            torch.cuda.set_rng_state(state, device)


@contextmanager
def _fast_attention_off() -> Iterator[None]:
    """The fused layers of evaluation mode hide their gates and have no second derivative."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


FABRIC = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")  # two names of one package
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def _module_state(model: nn.Module) -> Iterator[None]:
    modules = list(model.modules())
    flags = [module.training for module in modules]
    hooks = [{name: dict(getattr(module, name)) for name in HOOKS} for module in modules]
    buffers = [{name: _kept(buffer) for name, buffer in module._buffers.items()} for module in modules]
    parameters = [(parameter, parameter.grad, parameter.requires_grad) for parameter in model.parameters()]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, flag, known, held in zip(modules, flags, hooks, buffers, strict=True):
            module.training = flag
            for name, before in known.items():
                _forget_new(getattr(module, name), before)
            for name, (buffer, copy) in held.items():
                module._buffers[name] = buffer
                if buffer is not None and not _same(buffer, copy):
                    with torch.no_grad():
                        buffer.copy_(copy)
        for parameter, gradient, needed in parameters:
            if parameter.grad is not gradient:
                parameter.grad = gradient
            if parameter.requires_grad != needed:
                parameter.requires_grad_(needed)


def _kept(buffer: torch.Tensor | None) -> tuple[torch.Tensor | None, Any]:
    return buffer, None if buffer is None else buffer.detach().clone()


def _same(buffer: torch.Tensor, copy: torch.Tensor) -> bool:
    """Bit for bit: a NaN equals itself."""
    return bool(torch.equal(buffer, copy)) or bool(((buffer == copy) | ((buffer != buffer) & (copy != copy))).all())


def _forget_new(hooks: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in [key for key in hooks if key not in before]:
        del hooks[key]


def unwrapped(model: nn.Module) -> nn.Module:
    """The plain module inside compiled, data-parallel and Fabric's wrappers: the same parameters, without their side effects."""
    while True:
        inner = model
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        elif "torch._dynamo" in sys.modules and isinstance(model, sys.modules["torch._dynamo"].OptimizedModule):
            inner = model._orig_mod
        elif any(name in sys.modules and isinstance(model, sys.modules[name]._FabricModule) for name in FABRIC):
            inner = model.module  # type: ignore[assignment]  # known to Fabric alone
        if inner is model:
            return model
        model = inner
