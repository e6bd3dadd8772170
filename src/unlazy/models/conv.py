"""Gated networks on images: plain convolutions or residual blocks, with the same four choices as dense networks.

    q_l = transition_l(gating states)          one linear network of the same layout makes all gates
    h_l = rule(q_l) * transition_l(value states)
    f(x) = readout(mean of the last h over positions)

A *transition* is convolution, then batch-norm if asked for, plus a shortcut at the end of a residual block. In evaluation mode
batch-norm is affine, so q_l is affine in x and every gate is a half-space of image space; in training mode it depends on
the batch. Nothing pools by maximum. With ``gating="own"`` the value branch gates itself: an ordinary ReLU network.

The value branch of constant experts reads an all-ones image. Its first batch-norm would see no variance over the batch, so
that one is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from unlazy.models.conv_layers import ConvLayer, PooledLayer, Readout, ScaledLayer, bare, scaled
from unlazy.models.fused import QUICK_TYPES, gate_kernels, plain_backward, plain_forward
from unlazy.models.gates import GateRule, Gates, HardGate, SoftGate, rule_from_spec, rule_to_spec
from unlazy.models.parametrisation import groups_with_rates, known_parametrisation, rate_multiplier
from unlazy.models.spec import EXPERTS, Init
from unlazy.runtime import InputError, Unsupported, require, stream

GATINGS = ("own", "linear", "open")
TINY = 1e-6


@dataclass(frozen=True)
class ImageSpec:
    """Everything needed to rebuild a :class:`GatedImageNet` but its numbers.

    ``blocks`` empty: a plain network, one gated convolution for every entry of ``widths``. Otherwise a residual network: after a
    first convolution, ``blocks[i]`` blocks of two convolutions with ``widths[i]`` channels; each stage but the first halves the
    picture. ``dense``: a layer of that many units between pooling and output, linear unless ``gated_dense``.
    ``even_gates``: in training, the slope of hard gates' backward pass counts in units of each channel's own size. The
    half-spaces are the same; residual gates, which grow with depth, all stay within reach of the gradient.
    ``parametrisation``: how layers scale with their widths, ``standard``, ``ntk`` or ``mup`` (also called ``mean-field``); see
    :mod:`unlazy.models.parametrisation`. A stored spec names it only where it is not the standard one.
    """

    widths: tuple[int, ...]
    blocks: tuple[int, ...] = ()
    channels: int = 3
    classes: int = 10
    dense: int | None = None
    gated_dense: bool = False
    batch_norm: bool = True
    gating: str = "linear"
    experts: str = "linear"
    gate: GateRule = field(default_factory=SoftGate)
    even_gates: bool = False
    init: Init = field(default_factory=lambda: Init("he"))
    parametrisation: str = "standard"

    def __post_init__(self) -> None:
        sizes = (*self.widths, *self.blocks, self.channels, self.classes, 1 if self.dense is None else self.dense)
        require(all(isinstance(size, int) and size >= 1 for size in sizes), f"sizes must be at least 1, got {sizes}.")
        require(len(self.widths) > 0, "an image network needs at least one layer: give widths.")
        require(
            len(self.blocks) in (0, len(self.widths)),
            f"a residual network needs as many entries in blocks as in widths, got {self.blocks} and {self.widths}.",
        )
        require(self.gating in GATINGS, f"gating must be one of {', '.join(GATINGS)}; got {self.gating!r}.")
        require(self.experts in EXPERTS, f"experts must be one of {', '.join(EXPERTS)}; got {self.experts!r}.")
        require(
            self.gating == "linear" or self.experts == "linear",
            f"constant experts with {self.gating} gates would not see the image at all; use gating='linear'.",
        )
        require(
            self.gating == "linear" or self.gate == HardGate(None),
            f"gating={self.gating!r} trains no gate: give gate=HardGate(None).",
        )
        require(
            not self.even_gates or isinstance(self.gate, HardGate),
            "even_gates is for hard gates: dividing the argument of a soft gate would change the network.",
        )
        require(not self.gated_dense or self.dense is not None, "gated_dense needs a dense layer: give dense.")
        object.__setattr__(self, "parametrisation", known_parametrisation(self.parametrisation))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the inverse of ``from_dict``."""
        plain = asdict(self) | {"gate": rule_to_spec(self.gate)}
        if self.parametrisation == "standard":
            del plain["parametrisation"]  # runs made before there was a choice keep their ids
        return plain | {"widths": list(self.widths), "blocks": list(self.blocks)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ImageSpec:
        values = dict(plain)
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        require(not unknown, f"unknown entries of an image spec: {', '.join(unknown)}.")
        for name, made in (("widths", tuple), ("blocks", tuple), ("gate", rule_from_spec)):
            if name in values:
                values[name] = made(values[name])
        if "init" in values:
            values["init"] = Init(**values["init"])
        return cls(**values)

    def relu(self) -> ImageSpec:
        """The ReLU network of the same layout."""
        return replace(self, gating="own", experts="linear", gate=HardGate(None), even_gates=False)

    def deep_linear(self) -> ImageSpec:
        """The deep linear network of the same layout: every gate open."""
        return replace(self, gating="open", experts="linear", gate=HardGate(None), even_gates=False)


def conv_spec(width: int = 26, depth: int = 5, *, dense: int | None = 64, **choices: Any) -> ImageSpec:
    """The half-space paper's network for its first table: 5 convolutions of 26 filters, then 64 linear units; no batch-norm."""
    return ImageSpec((width,) * depth, dense=dense, batch_norm=False, init=Init("torch"), **choices)


# --- layers --------------------------------------------------------------------------------------


def _wrap(spec: ImageSpec) -> Callable[[nn.Module, str], nn.Module]:
    return lambda layer, role: scaled(layer, spec.parametrisation, role)


def _layers(spec: ImageSpec, *, skip_first_norm: bool = False) -> nn.ModuleList:
    """One branch. A transition reads the state before it; the second of a block also the one before that."""

    def conv(inputs: int, outputs: int, stride: int = 1, size: int = 3, *, norm: bool) -> nn.Module:
        role = "hidden" if made else "first"
        return scaled(
            nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=not norm), spec.parametrisation, role
        )

    def normed(outputs: int, *, norm: bool) -> nn.Module:
        return scaled(nn.BatchNorm2d(outputs), spec.parametrisation, "norm") if norm else nn.Identity()

    def layer(inputs: int, outputs: int, stride: int = 1, shortcut: nn.Module | None = None) -> ConvLayer:
        norm = spec.batch_norm and not (skip_first_norm and not made)
        return ConvLayer(conv(inputs, outputs, stride, norm=norm), normed(outputs, norm=norm), shortcut)

    made: list[nn.Module] = []
    before = spec.channels
    for width in spec.widths if not spec.blocks else spec.widths[:1]:
        made.append(layer(before, width))
        before = width
    for stage, (width, count) in enumerate(zip(spec.widths, spec.blocks, strict=False)):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            shortcut: nn.Module = nn.Identity()
            if stride != 1 or before != width:
                projected = conv(before, width, stride, size=1, norm=spec.batch_norm)
                shortcut = nn.Sequential(projected, normed(width, norm=spec.batch_norm))
            made.append(layer(before, width, stride))
            made.append(layer(width, width, shortcut=shortcut))
            before = width
    if spec.gated_dense and spec.dense is not None:
        made.append(PooledLayer(before, spec.dense, _wrap(spec)))
    return nn.ModuleList(made)


# --- the gates' product --------------------------------------------------------------------------


class _Gate(torch.autograd.Function):
    """rule(q) v forward; backward through sigmoid(beta q) for q. In one piece it keeps q and v and nothing else."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, v: Tensor, beta: float, soft: bool, quick: bool) -> Tensor:
        ctx.save_for_backward(q, v)
        ctx.beta, ctx.soft = beta, soft
        ctx.kernels = gate_kernels(beta, soft=soft) if quick and q.dtype == v.dtype in QUICK_TYPES else None
        return ctx.kernels[0](q, v) if ctx.kernels else plain_forward(q, v, beta, soft=soft)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (grad,), (q, v) = grads, ctx.saved_tensors
        if ctx.kernels and grad.dtype == q.dtype:
            to_gate, to_value = ctx.kernels[1](grad, q, v)
        else:
            to_gate, to_value = plain_backward(grad, q, v, ctx.beta, soft=ctx.soft)
        return to_gate, to_value, None, None, None  # autograd sums broadcast axes


def gated(rule: GateRule, q: Tensor, v: Tensor, *, quick: bool = False) -> Tensor:
    """rule(q) * v, with fewer passes over memory; ``quick``: single GPU kernels if there are any."""
    soft = isinstance(rule, SoftGate)
    if rule.beta is not None and q.requires_grad and (quick or not soft):
        result: Tensor = _Gate.apply(q, v, rule.beta, soft, quick)
        return result
    return rule(q).to(v.dtype) * v if isinstance(rule, SoftGate) else torch.where(q >= 0, v, 0)


def of_unit_size(q: Float[Tensor, "n *rest"]) -> Float[Tensor, "n *rest"]:
    """Every channel divided by its root mean square over batch and positions, taken as a constant: the same half-spaces."""
    over = tuple(axis for axis in range(q.ndim) if axis != 1)
    with torch.autocast(q.device.type, enabled=False):  # it would copy q to float32 first
        wide = torch.promote_types(q.dtype, torch.float32)
        norm = torch.linalg.vector_norm(q.detach(), dim=over, keepdim=True, dtype=wide)
    size = norm / (q.numel() / q.shape[1]) ** 0.5
    return q / (size + TINY).to(q.dtype)


# --- the network ---------------------------------------------------------------------------------

Act = Callable[[int, Tensor], Tensor]


class GatedImageNet(nn.Module):
    """Built by :func:`build_images`. Maps images ``[n, channels, height, width]`` to ``[n, classes]``."""

    def __init__(
        self, spec: ImageSpec, gate_layers: nn.ModuleList, value_layers: nn.ModuleList, readout: nn.Module
    ) -> None:
        super().__init__()
        self._spec = spec
        self.gate_layers, self.value_layers, self.readout = gate_layers, value_layers, readout

    def spec(self) -> dict[str, Any]:
        """The plain spec that rebuilds this network."""
        return self._spec.to_dict()

    @property
    def settings(self) -> ImageSpec:
        return self._spec

    @property
    def depth(self) -> int:
        """How many gated layers there are."""
        return len(self.value_layers)

    def branch(self, name: str) -> list[tuple[str, nn.Parameter]]:
        """Named parameters of the ``"gate"`` or the ``"value"`` branch (the readout belongs to the values)."""
        require(name in ("gate", "value"), f"a branch is 'gate' or 'value', got {name!r}.")
        return [pair for pair in self.named_parameters() if pair[0].startswith("gate_layers.") == (name == "gate")]

    def rate_multipliers(self, optimiser: str = "sgd") -> dict[str, float]:
        """What the parametrisation makes of the learning rate of each parameter, under ``"sgd"`` or ``"adam"``."""
        return {
            name: rate_multiplier(self._spec.parametrisation, optimiser, _grown(name, parameter.shape))
            for name, parameter in self.named_parameters()
        }

    def parameter_groups(self, lr: float, optimiser: str = "sgd") -> list[dict[str, Any]]:
        """Trainable parameters with the rates of their parametrisation, as torch's optimisers take them."""
        return groups_with_rates(self, self.rate_multipliers(optimiser), lr)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n o"]:
        """f(x) = value(x, gates(x))."""
        self._check(x)
        if self._spec.gating == "own":
            return self._value_pass(x, lambda _, pre: F.relu(pre))
        if self._spec.gating == "open":
            return self._value_pass(x, lambda _, pre: pre)
        q = self.pre_activations(x)
        if self._spec.even_gates and self.training:
            q = [of_unit_size(pre) for pre in q]
        quick = self.training and x.is_cuda
        return self._value_pass(x, lambda layer, pre: gated(self._spec.gate, q[layer], pre, quick=quick))

    def gates(self, x: Float[Tensor, "n c h w"]) -> Gates:
        """The gates of every layer, ``[n, channels, height, width]``; ``.hard()`` gives booleans."""
        own = self._spec.gating == "own"
        q = self.pre_activations(x)
        if self._spec.gating == "open":
            q = [torch.ones_like(pre) for pre in q]
        return Gates([self._spec.gate(pre, strict=own) for pre in q], q, strict=own)

    def value(self, x: Float[Tensor, "n c h w"], gates: Sequence[Tensor]) -> Float[Tensor, "n o"]:
        """The value branch under given gates: linear in each layer's experts, whoever made the gates."""
        self._check(x)
        require(len(gates) == self.depth, f"need {self.depth} layers of gates, got {len(gates)}.")
        return self._value_pass(x, lambda layer, pre: gates[layer].to(pre.dtype) * pre)

    def pre_activations(self, x: Float[Tensor, "n c h w"]) -> list[Tensor]:
        """q_l(x), what decides each gate; the unit's own value where there is no gating branch."""
        self._check(x)
        kept: list[Tensor] = []

        def keep(_: int, pre: Tensor) -> Tensor:
            kept.append(pre)
            return F.relu(pre) if self._spec.gating == "own" else pre

        _through(self.gate_layers if self._spec.gating == "linear" else self.value_layers, x, keep)
        return kept

    def hard(self) -> GatedImageNet:
        """This network with its gates made into the half-spaces of the theory (shares all parameters)."""
        spec = replace(self._spec, gate=HardGate(None))
        return GatedImageNet(spec, self.gate_layers, self.value_layers, self.readout).train(self.training)

    def exact_gates(self) -> bool:
        """Whether autograd through this network is the derivative of its function (false for a soft backward)."""
        return not (isinstance(self._spec.gate, HardGate) and self._spec.gate.beta is not None)

    def _value_pass(self, x: Tensor, act: Act) -> Tensor:
        start = x.new_ones(1, *x.shape[1:]) if self._spec.experts == "constant" else x
        result: Tensor = self.readout(_through(self.value_layers, start, act))
        return result

    def _check(self, x: Tensor) -> None:
        if x.ndim != 4 or x.shape[1] != self._spec.channels:
            raise InputError(f"expected images [n, {self._spec.channels}, height, width], got shape {tuple(x.shape)}.")


def _through(layers: nn.ModuleList, x: Tensor, act: Act) -> Tensor:
    """The last state of a branch; ``act`` turns the pre-activation of a layer into its state."""
    older, state = x, x
    for number, layer in enumerate(layers):
        older, state = state, act(number, layer(state, older))
    return state


def _grown(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The sizes of the axes of a parameter that are widths: what it makes, unless outputs, and reads, unless pictures."""
    makes = () if name.startswith("readout.output.") else tuple(shape[:1])
    reads = () if name.startswith(("gate_layers.0.", "value_layers.0.")) else tuple(shape[1:2])
    return makes + reads


def build_images(spec: ImageSpec | Mapping[str, Any], *, seed: int = 0) -> GatedImageNet:
    """One network from its spec; every starting number belongs to (seed, parameter name)."""
    spec = spec if isinstance(spec, ImageSpec) else ImageSpec.from_dict(spec)
    with torch.random.fork_rng(devices=[]):  # torch's own starting numbers are overwritten below
        linear = spec.gating == "linear"
        gate_layers = _layers(spec) if linear else nn.ModuleList()
        value_layers = _layers(spec, skip_first_norm=spec.experts == "constant")
        inputs, dense = spec.widths[-1], None if spec.gated_dense else spec.dense
        last = spec.dense if spec.gated_dense and spec.dense is not None else inputs
        net = GatedImageNet(spec, gate_layers, value_layers, Readout(last, dense, spec.classes, _wrap(spec)))
    _start(net, seed)
    return net


def _start(net: GatedImageNet, seed: int) -> None:
    """Draw weights and biases of every convolution and linear layer, as :class:`Init` and the parametrisation say."""
    init = net.settings.init
    for name, module in net.named_modules():
        layer, scaling = bare(module)
        if isinstance(layer, nn.BatchNorm2d) and isinstance(module, ScaledLayer):
            nn.init.constant_(layer.weight, 1 / scaling.after)
        if name.endswith(".inner") or not isinstance(layer, nn.Conv2d | nn.Linear):
            continue
        fan_in = layer.weight[0].numel()
        bends = name.startswith("value_layers.") and net.settings.gating != "open"
        spread = (2.0 if bends else 1.0) / fan_in
        by = {"weight": scaling.start / (scaling.before * scaling.after), "bias": 1 / scaling.after}
        for part in ("weight", "bias"):
            values = getattr(layer, part)
            if values is None:
                continue
            random = stream(seed, "start", f"{name}.{part}")
            if init.scheme == "torch":
                drawn = (2 * torch.rand(values.shape, generator=random) - 1) * fan_in**-0.5
            elif part == "weight":
                drawn = torch.randn(values.shape, generator=random) * spread**0.5
            else:
                drawn = torch.zeros(values.shape)
            with torch.no_grad():
                values.copy_(init.scale * by[part] * drawn)


def with_effective_weights(net: GatedImageNet) -> GatedImageNet:
    """A copy in the standard parametrisation that computes the same, for whatever reads weights off the layers."""
    if net.settings.parametrisation == "standard":
        return copy.deepcopy(net)
    numbers = dict(net.state_dict())
    for name, module in net.named_modules():
        if not isinstance(module, ScaledLayer):
            continue
        scaling = module.scaling  # of a batch-norm, ``before`` is 1
        by = {"weight": scaling.before * scaling.after, "bias": scaling.after}
        for part in module.inner.state_dict():
            value = numbers.pop(f"{name}.inner.{part}")
            numbers[f"{name}.{part}"] = by[part] * value if part in by else value
    plain = build_images(replace(net.settings, parametrisation="standard"))
    some = next(net.parameters())
    plain = plain.to(some.device, some.dtype).train(net.training)
    plain.load_state_dict(numbers)
    return plain


def require_linear_gates(net: GatedImageNet) -> None:
    """Refuse networks whose gates are no half-spaces of image space."""
    if net.settings.gating != "linear":
        raise Unsupported(
            "GatedImageNet", f"gates of kind {net.settings.gating!r} are no half-spaces", "Use gating='linear'."
        )
