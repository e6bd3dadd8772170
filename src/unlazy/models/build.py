"""Make networks: from a spec, by their usual names, or many dense ones at once as a stack."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch

from unlazy.models.dense_layers import ScaledAffine, WeightSampler, make_dense_layers
from unlazy.models.gates import GateRule, SoftGate
from unlazy.models.image_layers import ScaledLayer, draw_starting_weights, make_image_layers
from unlazy.models.image_net import GatedImageNet
from unlazy.models.net import GatedNet
from unlazy.models.spec import ImageSpec, NetSpec, as_spec, deep_linear_spec, relu_spec
from unlazy.runtime import InputError, require

Net = TypeVar("Net", GatedNet, GatedImageNet)


@overload
def build(spec: NetSpec, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> GatedNet: ...
@overload
def build(spec: ImageSpec, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> GatedImageNet: ...
@overload
def build(
    spec: Mapping[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> GatedNet | GatedImageNet: ...
def build(
    spec: NetSpec | ImageSpec | Mapping[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> GatedNet | GatedImageNet:
    """One network from its spec, an object or a dictionary; ``seed`` decides the starting numbers and nothing else.

    >>> build({"shape": "dense", "in": 2, "width": 4}).spec()["width"]
    4
    """
    spec = as_spec(spec)
    return (
        _build_dense(spec, None, seed, None, dtype) if isinstance(spec, NetSpec) else _build_images(spec, seed, dtype)
    )


def build_stack(
    spec: NetSpec | Mapping[str, Any],
    seeds: Sequence[int],
    betas: Sequence[float] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> GatedNet:
    """A stack of dense networks that differ in seed and, if given, in the slope of their gates.

    Member i equals ``build(spec.with_beta(betas[i]), seed=seeds[i])``.
    """
    dense = as_spec(spec)
    if not isinstance(dense, NetSpec):
        raise InputError("only dense networks can be stacked; build image networks one by one.")
    require(len(seeds) > 0, "a stack needs at least one seed.")
    beta = None
    if betas is not None:
        require(len(betas) == len(seeds), f"need one beta per seed: {len(seeds)} seeds, {len(betas)} betas.")
        has_slope = dense.gate.beta is not None
        require(has_slope, "this network's gates have no slope, so members cannot differ in it; leave beta out.")
        for value in betas:
            dense.with_beta(value)  # checks the value
        beta = torch.tensor(betas, dtype=dtype).reshape(-1, 1, 1)
    return _build_dense(dense, list(seeds), 0, beta, dtype)


def member(stack: GatedNet, index: int) -> GatedNet:
    """A single network with the parameters of one member of a stack, copied."""
    require(stack.members is not None, "this network is not a stack.")
    spec = stack.settings
    if stack.member_beta is not None:
        spec = spec.with_beta(float(stack.member_beta[index, 0, 0]))
    numbers = {name: tensor[index].clone() for name, tensor in stack.state_dict().items()}
    single = build(spec, dtype=next(iter(numbers.values())).dtype)
    single.load_state_dict(numbers)
    return single


def to_standard_parametrisation(net: Net) -> Net:
    """A copy in the standard parametrisation that computes the same function, for code that reads weights off the layers."""
    spec = replace(net.settings, parametrisation="standard")
    if spec == net.settings:
        return copy.deepcopy(net)
    numbers = dict(net.state_dict())
    for name, module in net.named_modules():
        if not isinstance(module, ScaledAffine | ScaledLayer):
            continue
        scaling = module.scaling  # of a batch-norm, ``before`` is 1
        factors = {"weight": scaling.before * scaling.after, "bias": scaling.after}
        for part in module.inner.state_dict():
            value = numbers.pop(f"{name}.inner.{part}")
            numbers[f"{name}.{part}"] = factors[part] * value if part in factors else value
    some = next(net.parameters())
    if isinstance(net, GatedNet):
        seeds = None if net.members is None else [0] * net.members
        plain = _build_dense(spec, seeds, 0, net.member_beta, some.dtype)
    else:
        plain = _build_images(spec, 0, some.dtype)
    plain.load_state_dict(numbers)
    return plain.to(some.device).train(net.training)


def _build_dense(
    spec: NetSpec, seeds: list[int] | None, seed: int, beta: torch.Tensor | None, dtype: torch.dtype
) -> GatedNet:
    """A dense network (``seeds=None``) or a stack, where ``beta`` gives each member its slope."""
    gate_layers, value_layers, readout, quadratic = make_dense_layers(spec, WeightSampler(spec, seeds, seed, dtype))
    net = GatedNet(spec, gate_layers, value_layers, readout, quadratic, beta)
    for _, parameter in net.branch("gate"):
        parameter.requires_grad_(spec.train_gates)
    return net


def _build_images(spec: ImageSpec, seed: int, dtype: torch.dtype) -> GatedImageNet:
    """An image network; its start is drawn in float32 and then cast."""
    with torch.random.fork_rng(devices=[]):  # torch draws starting numbers of its own, which are overwritten below
        net = GatedImageNet(spec, *make_image_layers(spec))
    draw_starting_weights(net, spec, seed)
    for _, parameter in net.branch("gate"):
        parameter.requires_grad_(spec.train_gates)
    return net.to(dtype).train()


# --- the usual names -----------------------------------------------------------------------------


def ReLUNet(inputs: int, outputs: int = 1, *, seed: int = 0, **choices: Any) -> GatedNet:  # noqa: N802
    """A ReLU network as a gated network whose units gate themselves."""
    return build(relu_spec(inputs, outputs, **choices), seed=seed)


def DLGN(  # noqa: N802
    inputs: int, outputs: int = 1, *, gate: GateRule | None = None, seed: int = 0, **choices: Any
) -> GatedNet:
    """A deep linearly gated network; ``experts="constant"`` is the piecewise-constant DLGN-PWC."""
    return build(NetSpec(inputs, outputs, gate=gate or SoftGate(), **choices), seed=seed)


def DeepLinearNet(inputs: int, outputs: int = 1, *, seed: int = 0, **choices: Any) -> GatedNet:  # noqa: N802
    """A deep linear network: all gates open."""
    return build(deep_linear_spec(inputs, outputs, **choices), seed=seed)
