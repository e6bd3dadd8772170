"""Layers of convolutional branches: transitions, the dense layer behind pooling, the readout, and multipliers around them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from unlazy.models.parametrisation import Scaling, scaling_of

Wrap = Callable[[nn.Module, str], nn.Module]  # a layer in the multipliers of its role


class ScaledLayer(nn.Module):
    """h -> after inner(before h): a convolution, dense layer or batch-norm with the multipliers of its parametrisation."""

    def __init__(self, inner: nn.Module, scaling: Scaling) -> None:
        super().__init__()
        self.inner, self.scaling = inner, scaling

    def forward(self, state: Tensor) -> Tensor:
        before, after = self.scaling.before, self.scaling.after
        result: Tensor = self.inner(state if before == 1 else before * state)
        return result if after == 1 else after * result


def scaled(layer: nn.Module, parametrisation: str, role: str) -> nn.Module:
    """The layer in the multipliers of its role (``first``, ``hidden``, ``readout``, ``norm``); itself where there are none."""
    if isinstance(layer, nn.BatchNorm2d):
        scaling = scaling_of(parametrisation, "norm", 1, (1, layer.num_features))
    elif isinstance(layer, nn.Conv2d | nn.Linear):
        fan_in = layer.weight[0].numel()
        scaling = scaling_of(parametrisation, role, fan_in, (int(layer.weight.shape[1]), int(layer.weight.shape[0])))
    else:
        return layer
    return layer if scaling.plain else ScaledLayer(layer, scaling)


def bare(layer: nn.Module) -> tuple[nn.Module, Scaling]:
    """A layer without its multipliers, and the multipliers."""
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
