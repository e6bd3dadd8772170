"""Layers of image networks: convolutions, the dense layer after pooling, the readout, and the multipliers around them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from unlazy.models.parametrisation import Scaling, scaling_of
from unlazy.models.spec import ImageSpec
from unlazy.runtime import stream

Wrap = Callable[[nn.Module, str], nn.Module]  # (layer, role) -> the layer with the multipliers of its role


class ScaledLayer(nn.Module):
    """h -> after inner(before h): a convolution, dense layer or batch-norm with the multipliers of its parametrisation."""

    def __init__(self, inner: nn.Module, scaling: Scaling) -> None:
        super().__init__()
        self.inner, self.scaling = inner, scaling

    def forward(self, state: Tensor) -> Tensor:
        before, after = self.scaling.before, self.scaling.after
        result: Tensor = self.inner(state if before == 1 else before * state)
        return result if after == 1 else after * result


def with_multipliers(layer: nn.Module, parametrisation: str, role: str) -> nn.Module:
    """The layer with the multipliers of its role (``first``, ``hidden``, ``readout``, ``norm``) around it, unless all are 1."""
    if isinstance(layer, nn.BatchNorm2d):
        scaling = scaling_of(parametrisation, "norm", 1, (1, layer.num_features))
    elif isinstance(layer, nn.Conv2d | nn.Linear):
        fan_in = layer.weight[0].numel()
        scaling = scaling_of(parametrisation, role, fan_in, (int(layer.weight.shape[1]), int(layer.weight.shape[0])))
    else:
        return layer
    return layer if scaling.is_one else ScaledLayer(layer, scaling)


def without_multipliers(layer: nn.Module) -> tuple[nn.Module, Scaling]:
    """The layer inside its multipliers, and the multipliers."""
    return (layer.inner, layer.scaling) if isinstance(layer, ScaledLayer) else (layer, Scaling())


class ConvLayer(nn.Module):
    """norm(conv(state)), plus shortcut(older) at the end of a residual block."""

    def __init__(self, conv: nn.Module, norm: nn.Module, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.conv, self.norm, self.shortcut = conv, norm, shortcut

    def forward(self, state: Tensor, older: Tensor) -> Tensor:
        pre: Tensor = self.norm(self.conv(state))
        return pre if self.shortcut is None else pre + self.shortcut(older)


class PooledLayer(nn.Module):
    """A dense layer on the mean over positions."""

    def __init__(self, inputs: int, outputs: int, wrap: Wrap) -> None:
        super().__init__()
        self.linear = wrap(nn.Linear(inputs, outputs), "hidden")

    def forward(self, state: Tensor, older: Tensor) -> Tensor:
        result: Tensor = self.linear(state.mean((2, 3)))
        return result


class Readout(nn.Module):
    """Mean over positions (unless a dense layer took it), the linear dense layer if there is one, and the output."""

    def __init__(self, inputs: int, dense: int | None, classes: int, wrap: Wrap) -> None:
        super().__init__()
        self.dense = None if dense is None else wrap(nn.Linear(inputs, dense), "hidden")
        self.output = wrap(nn.Linear(inputs if dense is None else dense, classes), "readout")

    def forward(self, state: Tensor) -> Tensor:
        pooled = state.mean((2, 3)) if state.ndim == 4 else state
        result: Tensor = self.output(pooled if self.dense is None else self.dense(pooled))
        return result


# --- making the layers of a spec -----------------------------------------------------------------


def make_image_layers(spec: ImageSpec) -> tuple[nn.ModuleList, nn.ModuleList, Readout]:
    """Gate layers, value layers and readout of an image network, with torch's own starting numbers."""
    gate_layers = _make_branch(spec) if spec.gating == "linear" else nn.ModuleList()
    value_layers = _make_branch(spec, skip_first_norm=spec.experts == "constant")
    dense = None if spec.gated_dense else spec.dense
    last = spec.dense if spec.gated_dense and spec.dense is not None else spec.widths[-1]
    return gate_layers, value_layers, Readout(last, dense, spec.classes, _multiplier_wrap(spec))


def _multiplier_wrap(spec: ImageSpec) -> Wrap:
    return lambda layer, role: with_multipliers(layer, spec.parametrisation, role)


def _make_branch(spec: ImageSpec, *, skip_first_norm: bool = False) -> nn.ModuleList:
    """The layers of one branch. A layer reads the state before it; the second of a block also the state before that."""
    wrap = _multiplier_wrap(spec)

    def make_conv(inputs: int, outputs: int, stride: int = 1, size: int = 3, *, norm: bool) -> nn.Module:
        conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=not norm)
        return wrap(conv, "hidden" if layers else "first")

    def make_norm(outputs: int, *, norm: bool) -> nn.Module:
        return wrap(nn.BatchNorm2d(outputs), "norm") if norm else nn.Identity()

    def make_layer(inputs: int, outputs: int, stride: int = 1, shortcut: nn.Module | None = None) -> ConvLayer:
        norm = spec.batch_norm and not (skip_first_norm and not layers)
        return ConvLayer(make_conv(inputs, outputs, stride, norm=norm), make_norm(outputs, norm=norm), shortcut)

    layers: list[nn.Module] = []
    before = spec.channels
    for width in spec.widths if not spec.blocks else spec.widths[:1]:
        layers.append(make_layer(before, width))
        before = width
    for stage, (width, count) in enumerate(zip(spec.widths, spec.blocks, strict=False)):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            shortcut: nn.Module = nn.Identity()
            if stride != 1 or before != width:
                conv = make_conv(before, width, stride, size=1, norm=spec.batch_norm)
                shortcut = nn.Sequential(conv, make_norm(width, norm=spec.batch_norm))
            layers.append(make_layer(before, width, stride))
            layers.append(make_layer(width, width, shortcut=shortcut))
            before = width
    if spec.gated_dense and spec.dense is not None:
        layers.append(PooledLayer(before, spec.dense, wrap))
    return nn.ModuleList(layers)


def draw_starting_weights(net: nn.Module, spec: ImageSpec, seed: int) -> None:
    """Overwrite weights and biases of an image network with its start, as ``spec.init`` and the parametrisation say.

    Every tensor has its own random stream, named by (seed, parameter name). Scales of batch-norms start at effectively 1.
    """
    init = spec.init
    for name, module in net.named_modules():
        layer, scaling = without_multipliers(module)
        if isinstance(layer, nn.BatchNorm2d) and isinstance(module, ScaledLayer):
            nn.init.constant_(layer.weight, 1 / scaling.after)
        if name.endswith(".inner") or not isinstance(layer, nn.Conv2d | nn.Linear):
            continue
        fan_in = layer.weight[0].numel()
        is_gated = spec.gating != "open" if name.startswith("value_layers.") else _reads_relu(name, spec)
        variance = (2.0 if is_gated else 1.0) / fan_in
        factors = {"weight": scaling.start / (scaling.before * scaling.after), "bias": 1 / scaling.after}
        for part, factor in factors.items():
            values = getattr(layer, part)
            if values is None:
                continue
            random = stream(seed, "start", f"{name}.{part}")
            if init.scheme == "torch":
                drawn = (2 * torch.rand(values.shape, generator=random) - 1) * fan_in**-0.5
            elif part == "weight":
                drawn = torch.randn(values.shape, generator=random) * variance**0.5
            else:
                drawn = torch.zeros(values.shape)
            with torch.no_grad():
                values.copy_(init.scale * factor * drawn)


def _reads_relu(name: str, spec: ImageSpec) -> bool:
    """Whether a layer of the gating network reads a state behind a ReLU; layers count from 1 in the spec."""
    branch, number, *rest = name.split(".")
    if branch != "gate_layers":
        return False
    return int(number) - (1 if "shortcut" in rest else 0) in spec.nonlinear_gate_layers
