"""Dense layers of the gated skeleton, for one network or a stack of members."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.models.parametrisation import Scaling, scaling_of
from unlazy.models.spec import NetSpec
from unlazy.runtime import require, stream

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
    """The first value layer of constant experts: W times an all-ones vector instead of x."""

    def forward(self, states: States) -> Float[Tensor, "*batch out"]:
        constant = self.weight.sum(-1) if self.bias is None else self.weight.sum(-1) + self.bias
        constant = constant.unsqueeze(-2)  # [*S, 1, out]: the same for every sample
        return constant.expand(*constant.shape[:-2], states[-1].shape[-2], -1)


class ScaledAffine(nn.Module):
    """h -> after (w (before h) + c): an affine layer with the multipliers of its parametrisation around it.

    ``weight`` and ``bias`` are the effective numbers; what is trained are those of ``inner``.
    """

    def __init__(self, inner: Affine, scaling: Scaling) -> None:
        super().__init__()
        self.inner, self.scaling = inner, scaling

    @property
    def weight(self) -> Tensor:
        """W = before after w."""
        return self.scaling.before * self.scaling.after * self.inner.weight

    @property
    def bias(self) -> Tensor | None:
        """b = after c."""
        return None if self.inner.bias is None else self.scaling.after * self.inner.bias

    def forward(self, states: States) -> Float[Tensor, "*batch out"]:
        return self.scaling.after * self.inner([self.scaling.before * states[-1]])


def effective_weights(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias that a dense layer computes with, in any parametrisation, without gradient."""
    require(isinstance(layer, Affine | ScaledAffine), f"{type(layer).__name__} is not a dense layer of ours.")
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    return weight.detach(), bias.detach() if isinstance(bias, Tensor) else None


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


class WeightSampler:
    """Draws the starting numbers of every parameter from a stream named by (seed, parameter name), in float64, then casts.

    So a frozen and a trained network of one seed start from the same gates, in any stack and any precision.
    """

    def __init__(self, spec: NetSpec, seeds: list[int] | None, seed: int, dtype: torch.dtype) -> None:
        self.spec, self.seeds, self.seed, self.dtype = spec, seeds, seed, dtype

    def affine(
        self, name: str, fan_out: int, fan_in: int, *, bias: bool, gated: bool, layer: type[Affine] = Affine
    ) -> Affine | ScaledAffine:
        """A dense layer at its start; ``name`` (``gate.0``, ``readout``) gives its role, ``gated`` doubles the He variance."""
        gain, spec = 2.0 if gated else 1.0, self.spec
        role = "readout" if name == "readout" else ("first" if name.endswith(".0") else "hidden")
        widths = spec.width, spec.width
        scaling = scaling_of(spec.parametrisation, role, fan_in, widths, constant=layer is ConstantAffine)
        by = scaling.start / (scaling.before * scaling.after)
        weight = self.tensor(f"{name}.weight", (fan_out, fan_in), fan_in, gain, by)
        offsets = self.tensor(f"{name}.bias", (fan_out,), fan_in, 0.0, 1 / scaling.after) if bias else None
        inner = layer(weight, offsets)
        return inner if scaling.is_one else ScaledAffine(inner, scaling)

    def tensor(self, name: str, shape: tuple[int, ...], fan_in: int, gain: float, by: float = 1.0) -> Tensor:
        """A parameter at its start, with a leading member axis in a stack; ``by`` multiplies it.

        ``gain``: variance times fan_in under the ``he`` scheme (0 for biases); the ``torch`` scheme ignores it.
        """
        if self.seeds is None:
            return self._draw(self.seed, name, shape, fan_in, gain, by).to(self.dtype)
        return torch.stack([self._draw(seed, name, shape, fan_in, gain, by) for seed in self.seeds]).to(self.dtype)

    def _draw(self, seed: int, name: str, shape: tuple[int, ...], fan_in: int, gain: float, by: float) -> Tensor:
        """The starting numbers of one member."""
        random, init = stream(seed, "init", name), self.spec.init
        if init.scheme == "torch":
            numbers = (2 * torch.rand(shape, generator=random, dtype=torch.float64) - 1) / math.sqrt(fan_in)
        else:
            numbers = torch.randn(shape, generator=random, dtype=torch.float64) * math.sqrt(gain / fan_in)
        return init.scale * by * numbers


def make_dense_layers(
    spec: NetSpec, sampler: WeightSampler
) -> tuple[nn.ModuleList, nn.ModuleList, Affine | ScaledAffine, nn.ModuleList | None]:
    """Gate layers, value layers, readout and quadratic terms of a dense network."""
    gate_layers, value_layers = nn.ModuleList(), nn.ModuleList()
    quadratic = nn.ModuleList() if spec.gating == "quadratic" else None
    gated = spec.gating != "open"
    for layer in range(spec.depth):
        fan_in = spec.inputs if layer == 0 else spec.width
        if spec.gating in ("linear", "quadratic"):
            rectified = layer in spec.nonlinear_gate_layers  # which count from 1: the layer before this one
            gate_layers.append(
                sampler.affine(f"gate.{layer}", spec.width, fan_in, bias=spec.gate_bias, gated=rectified)
            )
        if quadratic is not None:
            quadratic.append(_make_quadratic_term(spec, sampler, layer))
        constant = layer == 0 and spec.experts == "constant"
        value_layers.append(
            sampler.affine(
                f"value.{layer}",
                spec.width,
                1 if constant and spec.constant_input == "one" else fan_in,
                bias=spec.value_bias,
                gated=gated,
                layer=ConstantAffine if constant else Affine,
            )
        )
    readout = sampler.affine("readout", spec.outputs, spec.width, bias=spec.value_bias, gated=gated)
    return gate_layers, value_layers, readout, quadratic


def _make_quadratic_term(spec: NetSpec, sampler: WeightSampler, layer: int) -> QuadraticTerm:
    name, rank = f"quadratic.{layer}", spec.quadratic_rank
    return QuadraticTerm(
        sampler.tensor(f"{name}.directions", (spec.width * rank, spec.inputs), spec.inputs, 1.0),
        sampler.tensor(f"{name}.strengths", (spec.width, rank), rank, 1.0),
        sampler.tensor(f"{name}.offset", (spec.width,), spec.inputs, 0.0),
    )
