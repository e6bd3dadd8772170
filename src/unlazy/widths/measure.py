"""One network, trained for a few steps: sizes of every layer's output, of its change, and of its part of the tangent kernel.

The output of a layer is what its module returns, times the constant factor that the modules around it may put on it (a
multiplier of a parametrisation): as long as a module returns a constant multiple of the layer's output, the factor is part of the
layer. A factor that is applied before something is added to it cannot be seen.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from unlazy.kernels.capture import call_model, evaluation_mode, take_samples
from unlazy.kernels.selection import trainable_by_module
from unlazy.kernels.tangent import layer_kernels
from unlazy.runtime import UnlazyError, require
from unlazy.scope.probe_set import ProbeSet, add_target_columns, probe_losses
from unlazy.scope.user_model import (
    OutputChoice,
    SelectedOutput,
    check_model,
    device_and_dtype,
    exchange_values,
    normalise_by_batch,
    select_output,
    unwrap_model,
)

MakeModel = Callable[[int], nn.Module]
MakeOptimiser = Callable[[nn.Module, int], torch.optim.Optimizer]
KERNEL_SAMPLES, KERNEL_OUTPUTS = 16, 16
ROUNDING = 2.0  # changes below so many units of precision, relative to the output, count as none
PROPORTIONAL = 1e-3  # relative deviation below which one output is a constant multiple of another
ROOT, NETWORK = "(model)", "(network)"
"""Names of the layer whose parameters the model holds itself, and of what belongs to no layer: output, loss, whole kernel."""


@dataclass(frozen=True)
class Task:
    """What every network is trained on, and how: samples, output, optimiser, steps. ``kernels``: whether to measure them."""

    probe: ProbeSet
    optimiser: MakeOptimiser
    steps: int
    output: OutputChoice | None = None
    kernels: bool = True


@dataclass
class Sizes:
    """What was measured of one network. Keys of ``values``: (quantity, layer or parameter, updates done).

    ``layers``: names in the order of their first call. ``entering``, ``leaving``: how many numbers a sample enter and leave each
    layer, to see which of them grow with the width. ``shapes``: of the trainable parameters. ``layer_of``: the layer of each.
    """

    values: dict[tuple[str, str, int], float] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    entering: dict[str, int] = field(default_factory=dict)
    leaving: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    layer_of: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class LayerCall:
    """One call of a layer: its arguments and what it returned, copied."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    output: Tensor


Calls = dict[str, list[LayerCall]]


def make_network(make_model: MakeModel, width: int, seed: int) -> nn.Module:
    """The model of a width, its start drawn with this seed."""
    _seed_streams(seed)
    model = make_model(width)
    check_model(model)
    return unwrap_model(model)


def _seed_streams(seed: int) -> None:
    """Seed torch, numpy and python; whoever calls this restores the streams (``preserve_random_streams``)."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def measure_network(make_model: MakeModel, width: int, seed: int, task: Task) -> Sizes:
    """Build, train and measure one network: at its start, after one update and after ``task.steps`` updates.

    Quantities: ``activation`` (rms of a layer's output), ``update`` (rms of its change since the start), ``own_update`` (rms of
    the change that the layer's own parameters make at the start's input; also by parameter), ``gain`` (output over input),
    ``kernel`` (mean of the diagonal of the layer's part of the tangent kernel), ``kernel_change`` (|K - K_0| / |K_0|), and for
    the network ``output``, ``output_update`` and ``loss``.
    """
    model = make_network(make_model, width, seed)
    probe = task.probe.to(*device_and_dtype(model))
    with _measuring(model):
        model = select_output(model, probe, task.output)
    by_layer = trainable_by_module(model)
    found, modules = Sizes(), dict(model.named_modules())
    found.shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    found.layer_of = {name: layer or ROOT for layer, names in by_layer.items() for name in names}
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    with _measuring(model):
        first, out = record_layers(model, probe.x, [modules[layer] for layer in by_layer], list(by_layer))
        around = {layer: _surroundings(model, probe.x, layer, calls) for layer, calls in first.items()}
    offset = None
    if task.probe.loss is None:
        offset = out.reshape(len(out), -1)
        probe = add_target_columns(probe, offset)
    found.layers = [layer or ROOT for layer in first]
    uncalled = sorted(layer for layer in by_layer if layer not in first)
    if uncalled:
        found.notes.append(f"not called as modules, so only their kernels are measured: {', '.join(uncalled)}.")
    _note_start(found, first, around, out)
    kernels_start = _kernels(model, probe, task, found)
    _note_kernels(found, kernels_start, kernels_start, 0)
    optimiser = task.optimiser(model, width)
    _seed_streams(seed)  # of dropout
    for step in range(1, task.steps + 1):
        loss = take_step(model, optimiser, probe, offset)
        if step == 1:
            found.values["loss", NETWORK, 0] = loss
        if step in (1, task.steps):
            _note_step(found, model, probe, step, start, (first, around, out), by_layer)
            if kernels_start:
                now = _kernels(model, probe, task, found)
                _note_kernels(found, now, _start_kernels(model, probe, task, start, kernels_start), step)
    return _named_as_by_user(found) if isinstance(model, SelectedOutput) else found


def _named_as_by_user(found: Sizes) -> Sizes:
    """The same sizes with the names of the user's model, which was wrapped to select its output."""

    def plain(name: str) -> str:
        return ROOT if name == "model" else name.removeprefix("model.")

    found.values = {(what, plain(name), step): value for (what, name, step), value in found.values.items()}
    found.layers = [plain(name) for name in found.layers]
    found.entering = {plain(name): value for name, value in found.entering.items()}
    found.leaving = {plain(name): value for name, value in found.leaving.items()}
    found.shapes = {plain(name): value for name, value in found.shapes.items()}
    found.layer_of = {plain(name): plain(layer) for name, layer in found.layer_of.items()}
    return found


def take_step(
    model: nn.Module, optimiser: torch.optim.Optimizer, probe: ProbeSet, offset: Tensor | None, scale: float = 1.0
) -> float:
    """One update on the whole probe set, with ``scale`` times the loss; returns the loss before it.

    ``offset``: the outputs of the start, subtracted from the outputs before the default losses: so the first errors are the
    same for all widths and seeds. Otherwise random outputs of the start, of another size at every width, would be fitted too,
    and blur the exponents. The user's own loss gets the outputs as they are.
    """
    losses: list[float] = []

    def closure() -> Tensor:
        optimiser.zero_grad()
        if probe.loss is not None:
            loss = probe.loss(_raw(model, probe.x), probe.y).mean()
        else:
            out = call_model(model, probe.x)
            loss = probe_losses(probe, out if offset is None else out - offset)[0]
        losses.append(float(loss.detach()))
        (scale * loss).backward()
        return loss

    optimiser.step(closure)  # type: ignore[arg-type]
    return losses[0]


def gradient_powers(make_model: MakeModel, width: int, task: Task) -> dict[str, float]:
    """By which power of the gradient's size the first update of each parameter grows: 1 for SGD, 0 for Adam.

    Measured with the loss and with a quarter of it. NaN for a parameter that does not move.
    """
    moved: list[dict[str, float]] = []
    for scale in (1.0, 0.25):
        model = make_network(make_model, width, 0)
        probe = task.probe.to(*device_and_dtype(model))
        with _measuring(model):
            model = select_output(model, probe, task.output)
        offset = None
        if probe.loss is None:
            with _measuring(model):
                offset = call_model(model, probe.x)
            probe = add_target_columns(probe, offset)
        before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        _seed_streams(0)
        take_step(model, task.optimiser(model, width), probe, offset, scale)
        moved.append({name: _rms(p.detach() - before[name]) for name, p in model.named_parameters() if name in before})
    return {
        name: math.log(size / moved[1][name]) / math.log(4) if size > 0 and moved[1][name] > 0 else math.nan
        for name, size in moved[0].items()
    }


# --- layers ----------------------------------------------------------------------------------------------------


@contextmanager
def _measuring(model: nn.Module) -> Iterator[None]:
    """Inside the block: evaluation mode without gradients, batch-norms by the batch at hand, as in training."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model))
        stack.enter_context(normalise_by_batch(norms))
        stack.enter_context(torch.no_grad())
        yield


def record_layers(model: nn.Module, x: Any, watched: list[nn.Module], names: list[str]) -> tuple[Calls, Tensor]:
    """The calls of the watched modules by name, in the order of their first call, and the model's output, copied."""
    calls: Calls = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            tensor = _first_real(output)
            if tensor is not None:
                call = LayerCall(_copy(arguments), _copy(options), _copy(tensor))
                calls.setdefault(name, []).append(call)

        return hook

    handles = [m.register_forward_hook(note(name), with_kwargs=True) for m, name in zip(watched, names, strict=True)]
    try:
        out = _copy(_raw(model, x))
    finally:
        for handle in handles:
            handle.remove()
    return calls, out


@dataclass
class Surroundings:
    """The constant factor on a layer's output, and what enters the layer, before a constant factor on its input."""

    factor: float
    entering: Tensor | None


def _surroundings(model: nn.Module, x: Any, layer: str, calls: list[LayerCall]) -> Surroundings:
    """Look at the modules around a layer, as far out as they return a constant multiple of the layer's output.

    A layer that is called several times has factor 1. What enters is that of the outermost such module without other parameters.
    """
    inner, modules = calls[0].output, dict(model.named_modules())
    found, own = Surroundings(1.0, _entering(calls[0])), len(list(modules[layer].parameters()))
    while layer and len(calls) == 1:
        layer = layer.rpartition(".")[0]
        if isinstance(modules[layer], nn.ModuleList | nn.ModuleDict):
            continue  # never called
        around = record_layers(model, x, [modules[layer]], [layer])[0].get(layer, [])
        if len(around) != 1 or around[0].output.numel() != inner.numel():
            break
        a, b = inner.double().flatten(), around[0].output.double().flatten()
        ratio = float(a @ b / (a @ a)) if bool(a.any()) else 1.0
        if not math.isfinite(ratio) or float((b - ratio * a).norm()) > PROPORTIONAL * float(b.norm()):
            break
        found.factor = ratio
        if len(list(modules[layer].parameters())) == own:
            found.entering = _entering(around[0])
    return found


def _note_start(found: Sizes, first: Calls, around: Mapping[str, Surroundings], out: Tensor) -> None:
    found.values["output", NETWORK, 0] = _rms(out)
    for layer, calls in first.items():
        name, n = layer or ROOT, len(out)
        entered = around[layer].entering
        found.entering[name] = 0 if entered is None else entered.numel() // n
        found.leaving[name] = calls[0].output.numel() // n
        found.values["activation", name, 0] = size = abs(around[layer].factor) * _rms(*(call.output for call in calls))
        into = _rms(entered) if entered is not None else 1.0
        found.values["gain", name, 0] = size / into if into > 0 else math.nan


def _note_step(
    found: Sizes,
    model: nn.Module,
    probe: ProbeSet,
    step: int,
    start: Mapping[str, Tensor],
    before: tuple[Calls, Mapping[str, Surroundings], Tensor],
    by_layer: Mapping[str, list[str]],
) -> None:
    """Add what a network is after ``step`` updates: outputs, their changes, and the changes by each layer's own parameters."""
    first, around, out = before
    modules, now = dict(model.named_modules()), dict(model.named_parameters())
    with _measuring(model):
        calls, new = record_layers(model, probe.x, [modules[layer] for layer in first], list(first))
        found.values["output", NETWORK, step] = _rms(new)
        found.values["output_update", NETWORK, step] = _rms(new - out)
        for layer, old in first.items():
            name, factor = layer or ROOT, abs(around[layer].factor)
            same = len(calls.get(layer, [])) == len(old)
            require(same, f"layer {name} is called {len(calls.get(layer, []))} times now and {len(old)} times before.")
            pairs = list(zip(calls[layer], old, strict=True))
            found.values["activation", name, step] = factor * _rms(*(call.output for call, _ in pairs))
            found.values["update", name, step] = factor * _rms(*(call.output - was.output for call, was in pairs))
            own = by_layer[layer]
            found.values["own_update", name, step] = factor * _own_update(model, modules[layer], old, start, now, own)
            for parameter in own:
                size = factor * _own_update(model, modules[layer], old, start, now, [parameter])
                found.values["own_update", parameter, step] = size


def _own_update(
    model: nn.Module,
    module: nn.Module,
    calls: list[LayerCall],
    start: Mapping[str, Tensor],
    now: Mapping[str, nn.Parameter],
    moved: list[str],
) -> float:
    """Rms change of a layer's output at its inputs of the start, if only the parameters ``moved`` have their new values."""
    back = [(now[name], start[name]) for name in start if name not in moved]
    with exchange_values(back):
        new = [_first_real(module(*_copy(call.arguments), **_copy(call.options))) for call in calls]
    changes = [(value - call.output, call.output) for value, call in zip(new, calls, strict=True) if value is not None]
    size, before = _rms(*(change for change, _ in changes)), _rms(*(output for _, output in changes))
    return size if size > ROUNDING * torch.finfo(calls[0].output.dtype).eps * before else 0.0


# --- kernels ---------------------------------------------------------------------------------------------------


def _kernels(model: nn.Module, probe: ProbeSet, task: Task, found: Sizes) -> dict[str, Tensor]:
    """The tangent kernel of each layer on the first samples, summed over outputs; empty where there is none."""
    if not task.kernels:
        return {}
    x = take_samples(probe.x, slice(0, KERNEL_SAMPLES))
    try:
        with torch.no_grad(), evaluation_mode(model):
            width = call_model(model, x).shape[1]
        if not all(bool(p.isfinite().all()) for p in model.parameters()):
            return {layer: torch.full((1, 1), math.inf) for layer in found.layers}
        if width <= KERNEL_OUTPUTS:
            return {layer or ROOT: kernel.double() for layer, kernel in layer_kernels(model, x).items()}
        blocks = layer_kernels(model, x, outputs=list(range(KERNEL_OUTPUTS)))
        return {layer or ROOT: block.diagonal(dim1=2, dim2=3).sum(-1).double() for layer, block in blocks.items()}
    except UnlazyError as error:
        found.notes.append(f"no kernels: {error}")
        return {}


def _start_kernels(
    model: nn.Module, probe: ProbeSet, task: Task, start: Mapping[str, Tensor], known: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The kernels of the start; with the running statistics of now, if the model has batch-norms."""
    if not any(isinstance(m, _BatchNorm) and m.running_mean is not None for m in model.modules()):
        return known
    now = dict(model.named_parameters())
    with exchange_values([(now[name], value) for name, value in start.items()]):
        return _kernels(model, probe, task, Sizes())


def _note_kernels(found: Sizes, now: dict[str, Tensor], start: dict[str, Tensor], step: int) -> None:
    for layer, kernel in now.items():
        found.values["kernel", layer, step] = float(kernel.diagonal().mean())
        if step:
            found.values["kernel_change", layer, step] = _relative(kernel, start[layer])
    if now and step:
        total, before = (sum(parts.values(), torch.zeros(())) for parts in (now, start))
        found.values["kernel_change", NETWORK, step] = _relative(total, before)


def _relative(now: Tensor, start: Tensor) -> float:
    if not bool(now.isfinite().all()):
        return math.inf
    size = float(start.norm())
    return float((now - start).norm()) / size if size > 0 else math.nan


# --- tensors ---------------------------------------------------------------------------------------------------


def _raw(model: nn.Module, x: Any) -> Tensor:
    out: Tensor = model(**x) if isinstance(x, Mapping) else model(*x) if isinstance(x, tuple | list) else model(x)
    return out


def _first_real(value: Any) -> Tensor | None:
    """The first tensor of real numbers in nested tuples, lists and dicts."""
    leaves = pytree.tree_leaves(value)
    return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)


def _entering(call: LayerCall) -> Tensor | None:
    """The real numbers that enter a layer: its first argument, of a list of states the last one."""
    first = call.arguments[0] if call.arguments else next(iter(call.options.values()), None)
    return _first_real(first[-1] if isinstance(first, list) else first)


def _copy(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def _rms(*parts: Tensor) -> float:
    """Root of the mean square over all numbers of all tensors; infinity if one of them is not a number."""
    squares = sum(float(part.double().square().sum()) for part in parts)
    return math.sqrt(squares / sum(part.numel() for part in parts)) if math.isfinite(squares) else math.inf
