"""Dense layers of the gated skeleton, for one network or a stack of members."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.models.spec import NetSpec
from unlazy.runtime import stream

States = list[Tensor]


class Affine(nn.Module):
    """h -> h W^T + b on the last state; ``weight [*S, out, in]``, ``bias [*S, out]``."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, states: States) -> Float[Tensor, "*batch out"]:
        h = states[-1]
        if self.bias is None:
            return torch.matmul(h, self.weight.mT)
        if h.ndim == self.weight.ndim == 3:
            return torch.baddbmm(self.bias.unsqueeze(-2), h, self.weight.mT)  # one kernel for a stack
        return torch.matmul(h, self.weight.mT) + self.bias.unsqueeze(-2)


class ConstantAffine(Affine):
    """The first value layer of constant experts: W times an all-ones input, whatever x is."""

    def forward(self, states: States) -> Float[Tensor, "*batch out"]:
        constant = self.weight.sum(-1) if self.bias is None else self.weight.sum(-1) + self.bias
        constant = constant.unsqueeze(-2)  # [*S, 1, out]: the same for every sample
        return constant.expand(*constant.shape[:-2], states[-1].shape[-2], -1)


class QuadraticTerm(nn.Module):
    """sum_r s_{i,r} (a_{i,r} . x)^2 + c_i, added to a linear gate's pre-activation."""

    def __init__(self, directions: Tensor, strengths: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.directions = nn.Parameter(directions)  # [*S, width * rank, in]
        self.strengths = nn.Parameter(strengths)  # [*S, width, rank]
        self.offset = nn.Parameter(offset)  # [*S, width]

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*out width"]:
        squares = torch.matmul(x, self.directions.mT).square()
        squares = squares.unflatten(-1, self.strengths.shape[-2:])  # [..., n, width, rank]
        return (squares * self.strengths.unsqueeze(-3)).sum(-1) + self.offset.unsqueeze(-2)


class Draw:
    """Starting numbers of every parameter: each belongs to (seed, parameter name), drawn in float64 and then cast.

    So a frozen and a trained network of one seed start from the same gates, in any stack and any precision.
    """

    def __init__(self, spec: NetSpec, seeds: list[int] | None, seed: int, dtype: torch.dtype) -> None:
        self.spec, self.seeds, self.seed, self.dtype = spec, seeds, seed, dtype

    def affine(
        self, name: str, fan_out: int, fan_in: int, *, bias: bool, gated: bool, layer: type[Affine] = Affine
    ) -> Affine:
        gain = 2.0 if gated else 1.0
        weight = self.tensor(f"{name}.weight", (fan_out, fan_in), fan_in, gain)
        return layer(weight, self.tensor(f"{name}.bias", (fan_out,), fan_in, 0.0) if bias else None)

    def tensor(self, name: str, shape: tuple[int, ...], fan_in: int, gain: float) -> Tensor:
        """``gain``: variance times fan_in under the ``he`` scheme (0 for biases); ``torch`` ignores it."""
        if self.seeds is None:
            return self._one(self.seed, name, shape, fan_in, gain).to(self.dtype)
        return torch.stack([self._one(seed, name, shape, fan_in, gain) for seed in self.seeds]).to(self.dtype)

    def _one(self, seed: int, name: str, shape: tuple[int, ...], fan_in: int, gain: float) -> Tensor:
        random, init = stream(seed, "init", name), self.spec.init
        if init.scheme == "torch":
            numbers = (2 * torch.rand(shape, generator=random, dtype=torch.float64) - 1) / math.sqrt(fan_in)
        else:
            numbers = torch.randn(shape, generator=random, dtype=torch.float64) * math.sqrt(gain / fan_in)
        return init.scale * numbers


def dense_parts(spec: NetSpec, draw: Draw) -> tuple[nn.ModuleList, nn.ModuleList, Affine, nn.ModuleList | None]:
    """Gate layers, value layers, readout and quadratic terms of a dense network."""
    gate_layers, value_layers = nn.ModuleList(), nn.ModuleList()
    quadratic = nn.ModuleList() if spec.gating == "quadratic" else None
    gated = spec.gating != "open"
    for layer in range(spec.depth):
        fan_in = spec.inputs if layer == 0 else spec.width
        if spec.gating in ("linear", "quadratic"):
            gate_layers.append(draw.affine(f"gate.{layer}", spec.width, fan_in, bias=spec.gate_bias, gated=False))
        if quadratic is not None:
            quadratic.append(_quadratic_term(spec, draw, layer))
        constant = layer == 0 and spec.experts == "constant"
        value_layers.append(
            draw.affine(
                f"value.{layer}",
                spec.width,
                1 if constant and spec.constant_input == "one" else fan_in,
                bias=spec.value_bias,
                gated=gated,
                layer=ConstantAffine if constant else Affine,
            )
        )
    readout = draw.affine("readout", spec.outputs, spec.width, bias=spec.value_bias, gated=gated)
    return gate_layers, value_layers, readout, quadratic


def _quadratic_term(spec: NetSpec, draw: Draw, layer: int) -> QuadraticTerm:
    name, rank = f"quadratic.{layer}", spec.quadratic_rank
    return QuadraticTerm(
        draw.tensor(f"{name}.directions", (spec.width * rank, spec.inputs), spec.inputs, 1.0),
        draw.tensor(f"{name}.strengths", (spec.width, rank), rank, 1.0),
        draw.tensor(f"{name}.offset", (spec.width,), spec.inputs, 0.0),
    )
