"""The empirical tangent kernel of any module: inner products of parameter gradients, exact to float precision.

Known layers have a rule (``layer_rules``) that pairs their inputs and output gradients (``tangent_blocks``) without forming a
Jacobian where that costs less. Weights that functions read (attention, recurrent layers, tied weights) have the rule of a dense
layer or of a table (``weight_uses``). All other parameters take one backward pass a sample (``jacobian.rows_by_sample``).

Every rule is checked against the backward pass of single samples, on the first and the last sample. A layer fails the check if
its calls do not have one entry a sample in the order of the samples; such a layer takes the backward pass a sample. Every batch
counts how often each weight is read: if the model reads one otherwise than by calls that were seen, the rule does not hold. Where
a model picks entries by index or mask (sorted samples, experts), every batch is checked.

What a check found is kept for the next call with the same model and shapes (``check_memory`` says what is compared each time).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unlazy.kernels.capture import Inputs, check_module, explain_input_errors, sample_count, take_samples
from unlazy.kernels.check_memory import StaleCheck, forget
from unlazy.kernels.gated import is_stack
from unlazy.kernels.gram import Plan, Progress, gram, plan_gram, ready_context
from unlazy.kernels.gram_workers import Devices, split_kernel
from unlazy.kernels.layer_rules import sum_tensors
from unlazy.kernels.selection import Outputs, Parameters, trainable_by_module
from unlazy.kernels.stacks import stack_tangent_kernel
from unlazy.kernels.tangent_blocks import diagonal_blocks, explicit_rows
from unlazy.kernels.tangent_engine import RuleMismatch, TangentKernel
from unlazy.runtime import InputError, require

Result = TypeVar("Result")
PRECISIONS = ("float32", "float64", "bfloat16")


def tangent_kernel(
    model: nn.Module,
    x: Inputs,
    x2: Inputs | None = None,
    *,
    outputs: Outputs = "trace",
    parameters: Parameters = "trainable",
    memory: str | int | None = None,
    method: str = "auto",
    precision: str | None = None,
    out: Any = None,
    surrogate: bool = False,
    progress: Progress | None = None,
    devices: Devices = None,
) -> Tensor | Any:
    """Theta(x, x') = <grad f(x), grad f(x')>, ``[n, m]`` or ``[n, m, k, k]``.

    ``outputs``: ``"trace"`` (summed over outputs), ``"full"`` (every pair of outputs), ``"sum"`` (of the summed output: the
    one direction softmax cross-entropy ignores; for scalar models and benchmarks), one output's index, or a list of them
    (every pair of those). ``parameters``: ``"trainable"`` (or ``None``), ``"all"``, ``"gate"`` / ``"value"`` of a
    :class:`GatedNet`, or names and patterns such as ``"features.*.weight"``. ``x``: a tensor, a tuple of arguments or a mapping
    of keyword arguments; samples of ``x2`` may have another size, where the model takes both.

    f(x) means the module on a batch of one, in evaluation mode. ``memory``: ``"2GB"``, default half of what is free.
    ``out``: where to put the result, ``[n, m]`` or ``[k, k, n, m]``, anything that takes slices; ``progress(done, tiles)``.
    ``method="loop"`` forces the general path. ``precision="bfloat16"`` rounds inside the Gram products only (relative error
    about 1e-3); ``"float32"`` and ``"float64"`` compute a copy of the model in that precision; default: the model's own.
    ``devices``: one for each worker of this process, such as ``["cuda:0", "cuda:1"]``; features are made once and shared.
    Default: where the matrix takes long, as many workers on the CPU as torch has threads.

    With hard gates the exact kernel is over the value parameters (gates are locally constant); ``surrogate=True`` asks for
    gradients through the soft backward instead, which is *not* the Jacobian of the function. A stack of networks gives a
    leading member axis (``"trace"`` and ``"full"`` only).
    """
    if is_stack(model):
        plain = x2 is None and out is None and memory is None and precision is None and method == "auto"
        require(
            plain and outputs in ("trace", "full"), "a stack offers outputs 'trace' and 'full' on one set, and no more."
        )
        with explain_input_errors(model, x):
            return stack_tangent_kernel(model, x, str(outputs), parameters, surrogate)
    check_module(model)
    model, x, x2 = _convert_precision(model, x, x2, precision)

    def compute(way: str) -> Tensor | Any:
        def make(network: nn.Module, a: Inputs, b: Inputs | None, budget: str | int | None) -> TangentKernel:
            options: Any = {"outputs": outputs, "parameters": parameters, "method": way, "surrogate": surrogate}
            made = TangentKernel(network, a, b, memory=budget, reuse_check=True, **options)
            made.rough = precision == "bfloat16"
            return made

        kernel = split_kernel(make, model, x, x2, memory, devices)
        with ready_context(kernel):
            return gram(kernel, x, x2, memory=memory, out=out, progress=progress)

    with explain_input_errors(model, x, x2):
        return _check_float16_range(_with_fallback(model, compute, method))


def _check_float16_range(kernel: Result) -> Result:
    """Raise ``InputError`` if a float16 kernel has overflowed."""
    if isinstance(kernel, Tensor) and kernel.dtype == torch.float16 and not bool(kernel.isfinite().all()):
        raise InputError(
            "the kernel exceeds what float16 holds, 65504; convert the model, or give precision='float32'."
        )
    return kernel


def _with_fallback(model: nn.Module, compute: Callable[[str], Result], method: str) -> Result:
    """``compute(method)``; if a layer's rule turns out not to fit the samples, ``compute("loop")``.

    A model that no longer does what it did when its rules were checked is checked again.
    """
    try:
        try:
            return compute(method)
        except StaleCheck:
            forget(model)
            return compute(method)
    except RuleMismatch:
        return compute("loop")


def tangent_diagonal(
    model: nn.Module,
    x: Inputs,
    *,
    outputs: Outputs = "trace",
    parameters: Parameters = "trainable",
    method: str = "auto",
) -> Tensor:
    """The diagonal of the kernel, ``[n]`` (or ``[n, k, k]``): squared gradient norms. No pairs are computed."""

    def compute(way: str) -> Tensor:
        kernel = TangentKernel(model, x, outputs=outputs, parameters=parameters, method=way, reuse_check=True)
        with kernel.ready():
            parts = [
                take_samples(x, slice(start, start + kernel.chunk)) for start in range(0, sample_count(x), kernel.chunk)
            ]
            blocks = torch.cat(
                [sum_tensors([diagonal_blocks(share) for share in kernel.features(part)]) for part in parts]
            )
        return blocks if kernel.tail else blocks.diagonal(dim1=1, dim2=2).sum(-1)

    with explain_input_errors(model, x):
        return _check_float16_range(_with_fallback(model, compute, method))


def layer_kernels(
    model: nn.Module, x: Inputs, *, outputs: Outputs = "trace", method: str = "auto"
) -> dict[str, Tensor]:
    """The kernel of the trainable parameters of each module, by module name. The sum of them is the tangent kernel.

    A parameter that several modules share counts once, with the first of them.
    """
    check_module(model)
    return {
        name: tangent_kernel(model, x, outputs=outputs, parameters=names, method=method)
        for name, names in sorted(trainable_by_module(model).items())
    }


def plan_tangent(
    model: nn.Module,
    x: Inputs,
    x2: Inputs | None = None,
    *,
    outputs: Outputs = "trace",
    parameters: Parameters = "trainable",
    memory: str | int | None = None,
    method: str = "auto",
    held: bool = True,
    devices: Devices = None,
) -> Plan:
    """What ``tangent_kernel`` with the same arguments would do: method per layer, tiles, memory. Computes no kernel.

    ``held=False``: the result goes to ``out`` and takes no memory.
    """

    def compute(way: str) -> Plan:
        def make(network: nn.Module, a: Inputs, b: Inputs | None, budget: str | int | None) -> TangentKernel:
            return TangentKernel(network, a, b, outputs=outputs, parameters=parameters, method=way, memory=budget)

        kernel = split_kernel(make, model, x, x2, memory, devices)
        return plan_gram(kernel, sample_count(x), None if x2 is None else sample_count(x2), memory, held=held)

    with explain_input_errors(model, x, x2):
        return _with_fallback(model, compute, method)


def tangent_features(
    model: nn.Module, x: Inputs, *, parameters: Parameters = "trainable", method: str = "auto"
) -> Float[Tensor, "n o p"]:
    """grad f_o(x_i) over the chosen parameters as rows ``[n, outputs, p]`` (grouped by layer, not in parameter order)."""

    def compute(way: str) -> Tensor:
        kernel = TangentKernel(model, x, outputs="full", parameters=parameters, method=way, reuse_check=True)
        with kernel.ready():
            return torch.cat(explicit_rows(kernel.features(x)), dim=-1)

    with explain_input_errors(model, x):
        return _with_fallback(model, compute, method)


# --- precision -----------------------------------------------------------------------------------------------


def _convert_precision(
    model: nn.Module, x: Inputs, x2: Inputs | None, precision: str | None
) -> tuple[nn.Module, Inputs, Inputs | None]:
    """Model and inputs in ``precision``: a copy of the model if its parameters have another type."""
    require(precision is None or precision in PRECISIONS, f"precision must be one of {', '.join(PRECISIONS)}.")
    if precision not in ("float32", "float64"):
        return model, x, x2
    dtype = getattr(torch, precision)

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        return leaf.to(dtype.to_complex() if leaf.is_complex() else dtype)

    if any(convert(p).dtype != p.dtype for p in model.parameters()):
        model = copy.deepcopy(model)._apply(convert)  # Module.to would take the real part of complex parameters
    return model, pytree.tree_map(convert, x), None if x2 is None else pytree.tree_map(convert, x2)
