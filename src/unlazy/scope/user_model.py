"""The user's model: checked, unwrap_model, reduced to the output that counts, and left as it was after every measurement."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from unlazy.kernels.capture import Inputs, plain_gradients, predictions, take_samples
from unlazy.kernels.gated import is_stack
from unlazy.models.image_net import GatedImageNet
from unlazy.models.net import GatedNet
from unlazy.runtime import InputError, require
from unlazy.scope.probe_set import ProbeSet, describe_type

OutputChoice = Callable[[Any], Tensor]
FABRIC = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")  # two names of one package
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_model(model: nn.Module) -> None:
    """Raise ``InputError`` if a scope cannot watch the model: it must be one network with whole, real, trainable parameters."""
    require(isinstance(model, nn.Module), f"model must be a torch.nn.Module, got {type(model).__name__}.")
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    require(not lazy, f"{', '.join(lazy)} have no shape yet; call the model once before you make the scope.")
    complex_ones = [name for name, p in model.named_parameters() if p.requires_grad and p.is_complex()]
    require(not complex_ones, f"{', '.join(complex_ones[:3])}: tangents by complex parameters are not defined here.")
    some = any(p.requires_grad and p.is_floating_point() for p in model.parameters())
    require(some, "the model has no trainable parameters, so there is no training to watch.")
    require(not is_stack(model), "a scope watches one network, not a stack; train and watch its members one by one.")


def unwrap_model(model: nn.Module) -> nn.Module:
    """The plain module inside compiled, data-parallel and Fabric wrappers: the same parameters without their side effects."""
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


def device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and precision of a model: those of its first real parameter."""
    first = next(p for p in model.parameters() if p.is_floating_point())
    return first.device, first.dtype


def describe_model(model: nn.Module) -> str:
    """A foreign network as it prints itself; an image network of ours by its spec, which also knows gates and multipliers."""
    return f"GatedImageNet(\n  {model.spec()}\n)" if isinstance(model, GatedImageNet) else str(model)


# --- its output ------------------------------------------------------------------------------------------------


class SelectedOutput(nn.Module):
    """A model that returns only the tensor of its output that counts."""

    def __init__(self, model: nn.Module, choose: Choice) -> None:
        super().__init__()
        self.model, self.choose = model, choose

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        return self.choose(self.model(*arguments, **options))


def find_predictions(out: Any) -> Tensor:
    """The tensor of a dict, a tuple or an output object that holds predictions: ``logits``, or the only candidate."""
    found = predictions(out)
    if found is not None:
        return found
    tensors = _tensor_places(out)
    held = "; ".join(f"{place} {list(tensor.shape)}" for place, tensor in tensors)
    example = tensors[0][0] if tensors else "out.scores"
    raise InputError(
        f"the model returns {describe_type(out)}{f' with the tensors {held}' if held else ''}; say which tensor counts, for "
        f"example output=lambda out: {example}."
    )


def _tensor_places(out: Any) -> list[tuple[str, Tensor]]:
    """The tensors inside nested dicts, tuples and lists, each with the Python text that reaches it, such as ``out[0]['a']``."""
    found = [(f"out{pytree.keystr(path)}", leaf) for path, leaf in pytree.tree_flatten_with_path(out)[0]]
    return [(place, leaf) for place, leaf in found if isinstance(leaf, Tensor) and leaf.ndim >= 1]


def select_output(
    model: nn.Module, probe: ProbeSet, output: OutputChoice | None, at_once: int | None = None
) -> nn.Module:
    """The model as a function to ``[n, outputs]``: itself if it is one already, else reduced to what ``output`` picks.

    ``at_once``: how many samples the model is tried with, if not all of them fit the memory.
    """
    n = min(len(probe), at_once or len(probe))
    x = probe.x if n == len(probe) else take_samples(probe.x, slice(0, n))
    with torch.no_grad():
        try:
            raw = model(**x) if isinstance(x, Mapping) else model(*x) if isinstance(x, tuple | list) else model(x)
        except Exception as error:  # whatever a stranger's model raises
            raise InputError(
                f"the model cannot be called with the probe's x, {_describe_shapes(x)}: {error}. Give x as the model gets "
                "it in training, samples first."
            ) from error
        out = (output or find_predictions)(raw)
    require(isinstance(out, Tensor), f"output= must return a tensor, got {describe_type(out)}.")
    shape = tuple(out.shape)
    require(out.ndim >= 1 and shape[0] == n, f"the model must give one row per sample: {n} samples, output {shape}.")
    if not out.is_floating_point():
        raise InputError(f"the model's output must be real numbers, got {out.dtype}; choose the scores with output=.")
    if (
        out.ndim > 2
        and not probe.y.is_floating_point()
        and (out.ndim > 3 or probe.y.ndim != 2 or probe.y.shape[1] == 1)
    ):
        raise InputError(
            f"the model answers {shape} for {n} samples; give a target for every position, or choose one row of scores per "
            "sample with output=, such as output=lambda out: out[:, -1]."
        )
    if isinstance(model, GatedNet) or (isinstance(raw, Tensor) and output is None):
        return model
    return SelectedOutput(model, output or find_predictions)


def _describe_shapes(x: Inputs) -> str:
    """Shapes and precisions of a model's inputs, as text.

    >>> _describe_shapes({"a": torch.zeros(2, 3)})
    'a torch.float32 [2, 3]'
    """
    if isinstance(x, Tensor):
        return f"{x.dtype} {list(x.shape)}"
    if isinstance(x, Mapping):
        return ", ".join(f"{name} {_describe_shapes(leaf)}" for name, leaf in x.items())
    return ", ".join(map(_describe_shapes, x)) if isinstance(x, tuple | list) else type(x).__name__


# --- its state ------------------------------------------------------------------------------------------------


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Inside the block: evaluation mode, full precision, no compilation. Afterwards: the state from before, whatever happened.

    Restored bit for bit: random streams (torch on every device, numpy, python), ``training`` and ``requires_grad`` flags,
    gradients (also those that are ``None``), buffers, autocast, gradient and inference mode, the fast path of attention.
    Hooks that the block added and did not remove are removed.
    """
    with ExitStack() as stack:
        stack.enter_context(preserve_random_streams())
        stack.enter_context(_disable_fast_attention())
        stack.enter_context(_preserve_module_state(model))
        stack.enter_context(plain_gradients(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in {"cpu", *(parameter.device.type for parameter in model.parameters())} - {"meta"}:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def exchange_values(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside the block the first tensor of each pair has the values of the second; afterwards its own memory again.

    The memory is exchanged, nothing is copied or written, so that counts of updates and everything that holds the tensor stay.
    """
    own = [tensor.data for tensor, _ in pairs]
    try:
        for tensor, values in pairs:
            tensor.data = values
        yield
    finally:
        for (tensor, _), data in zip(pairs, own, strict=True):
            tensor.data = data


@contextmanager
def normalise_by_batch(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Inside the block these batch-norms normalise by the batch at hand, as in training; their running statistics stay."""
    for norm in norms:
        norm.training, norm.track_running_stats = True, False
    try:
        yield
    finally:
        for norm in norms:
            norm.training, norm.track_running_stats = False, True


@contextmanager
def preserve_random_streams() -> Iterator[None]:
    """Restore the random streams of torch (on every device), numpy and python after the block."""
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
def _disable_fast_attention() -> Iterator[None]:
    """The fused layers of evaluation mode hide their gates and have no second derivative."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _preserve_module_state(model: nn.Module) -> Iterator[None]:
    modules = list(model.modules())
    flags = [module.training for module in modules]
    hooks = [{name: dict(getattr(module, name)) for name in HOOKS} for module in modules]
    buffers = [{name: _with_copy(buffer) for name, buffer in module._buffers.items()} for module in modules]
    parameters = [(parameter, parameter.grad, parameter.requires_grad) for parameter in model.parameters()]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, flag, known, held in zip(modules, flags, hooks, buffers, strict=True):
            module.training = flag
            for name, before in known.items():
                _remove_new_hooks(getattr(module, name), before)
            for name, (buffer, copy) in held.items():
                module._buffers[name] = buffer
                if buffer is not None and not _is_same(buffer, copy):
                    with torch.no_grad():
                        buffer.copy_(copy)
        for parameter, gradient, needed in parameters:
            if parameter.grad is not gradient:
                parameter.grad = gradient
            if parameter.requires_grad != needed:
                parameter.requires_grad_(needed)


def _with_copy(buffer: torch.Tensor | None) -> tuple[torch.Tensor | None, Any]:
    return buffer, None if buffer is None else buffer.detach().clone()


def _is_same(buffer: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether all numbers are equal; a NaN equals itself."""
    return bool(torch.equal(buffer, copy)) or bool(((buffer == copy) | ((buffer != buffer) & (copy != copy))).all())


def _remove_new_hooks(hooks: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in [key for key in hooks if key not in before]:
        del hooks[key]
