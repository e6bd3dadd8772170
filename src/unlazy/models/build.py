"""Making networks: from a spec, by their usual names, or many at once as a stack."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from unlazy.models.dense import Draw, ScaledAffine, dense_parts
from unlazy.models.gates import GateRule, SoftGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec, deep_linear_spec, relu_spec
from unlazy.runtime import require

Spec = NetSpec | Mapping[str, Any]


def build(spec: Spec, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> GatedNet:
    """One network from its spec; ``seed`` decides the starting numbers and nothing else."""
    return _assemble(_as_spec(spec), None, seed, None, dtype)


def build_stack(
    spec: Spec, seeds: Sequence[int], betas: Sequence[float] | None = None, *, dtype: torch.dtype = torch.float32
) -> GatedNet:
    """A stack of networks that differ in seed and, if given, in the slope of their gates.

    Member i equals ``build(spec.with_beta(betas[i]), seed=seeds[i])``.
    """
    spec = _as_spec(spec)
    require(len(seeds) > 0, "a stack needs at least one seed.")
    beta = None
    if betas is not None:
        require(len(betas) == len(seeds), f"need one beta per seed: {len(seeds)} seeds, {len(betas)} betas.")
        trained = spec.gate.beta is not None
        require(trained, "this network's gates have no slope, so members cannot differ in it; leave beta out.")
        for value in betas:
            spec.with_beta(value)  # checks the value
        beta = torch.tensor(betas, dtype=dtype).reshape(-1, 1, 1)
    return _assemble(spec, list(seeds), 0, beta, dtype)


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


def in_standard_parametrisation(net: GatedNet) -> GatedNet:
    """A copy that computes the same with effective weights alone, for whatever reads weights off the layers."""
    numbers = {name: tensor for name, tensor in net.state_dict().items() if ".inner." not in name}
    for name, layer in net.named_modules():
        if isinstance(layer, ScaledAffine):
            numbers[f"{name}.weight"] = layer.weight.detach().clone()
            if layer.bias is not None:
                numbers[f"{name}.bias"] = layer.bias.detach().clone()
    spec, beta = replace(net.settings, parametrisation="standard"), net.member_beta
    dtype = next(net.parameters()).dtype
    plain = _assemble(spec, None if net.members is None else [0] * net.members, 0, beta, dtype)
    plain.load_state_dict(numbers)
    return plain


def _as_spec(spec: Spec) -> NetSpec:
    return spec if isinstance(spec, NetSpec) else NetSpec.from_dict(copy.deepcopy(dict(spec)))


def _assemble(
    spec: NetSpec, seeds: list[int] | None, seed: int, beta: torch.Tensor | None, dtype: torch.dtype
) -> GatedNet:
    gate_layers, value_layers, readout, quadratic = dense_parts(spec, Draw(spec, seeds, seed, dtype))
    net = GatedNet(spec, gate_layers, value_layers, readout, quadratic, beta)
    for _, parameter in net.branch("gate"):
        parameter.requires_grad_(spec.train_gates)
    return net


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
