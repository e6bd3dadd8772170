"""The loss gradient of a stack of half-space networks, written out: a step takes a third of autograd's time.

The gating branch is linear in the row, so its layers are first multiplied out on their own (a few small products). One product
with the rows then gives all pre-activations of all layers and members. Everything is laid out ``[members, units, rows]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unlazy.models.dense_layers import Affine
from unlazy.models.gates import HardGate
from unlazy.models.net import GatedNet
from unlazy.runtime import require


class StackGradient:
    """Forward and backward pass of a stack with linear gating and no biases in its value branch, in the standard parametrisation.

    ``numbers``: all parameters of the network in one vector; the network's own parameters are views of it, so that it follows.
    ``gradient``: the vector that :meth:`backward` fills; every parameter's ``grad`` is a view of it.
    """

    def __init__(self, net: GatedNet) -> None:
        spec, parameters = net.settings, list(net.parameters())
        require(spec.has_half_space_gates, f"gates of {spec.gating_words} cannot be multiplied out; use autograd.")
        self.hard, beta = isinstance(spec.gate, HardGate), spec.gate.beta
        assert beta is not None
        self.beta, self.linear = float(beta), spec.experts == "linear"
        self.numbers = torch.cat([one.detach().reshape(-1) for one in parameters])
        self.gradient = torch.zeros_like(self.numbers)
        sizes = [one.numel() for one in parameters]
        pairs = zip(parameters, self.numbers.split(sizes), self.gradient.split(sizes), strict=True)
        for one, numbers, gradient in pairs:
            one.data, one.grad = numbers.view_as(one), gradient.view_as(one)
        self.gate = [_pair(layer) for layer in net.gate_layers]
        self.gate_bias = [_pair(layer, "bias") for layer in net.gate_layers]
        self.value = [_pair(layer) for layer in net.value_layers]
        self.readout = _pair(net.readout)
        members, outputs, width = self.readout[0].shape
        self.shape, self.outputs = (spec.depth, members, width), outputs
        # the layers of the gating branch multiplied out: normals and, in the last column, offsets
        self.maps = self.numbers.new_empty(*self.shape, spec.inputs + 1)
        self.map_gradients = torch.empty_like(self.maps)
        self._buffers: dict[int, dict[str, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[members, outputs, n]`` of a batch ``x [d + 1, n]``, one column a row of the table, with 1 as last entry.

        They are overwritten by the next call.
        """
        depth, rows = self.shape[0], x.shape[1]
        own = self._buffer(rows)
        pre, soft, values, reach = own["pre"], own["soft"], own["values"], own["reach"]
        self._multiply_gate_layers()
        torch.mm(self.maps.view(-1, len(x)), x, out=pre.view(-1, rows))
        torch.mul(pre, self.beta, out=soft)
        soft.sigmoid_()
        gates = torch.ge(pre, 0, out=pre) if self.hard else pre.copy_(soft)
        torch.addcmul(soft, soft, soft, value=-1, out=soft)  # the derivative of the sigmoid
        first = self.value[0][0]
        if self.linear:
            torch.mm(first.reshape(-1, first.shape[-1]), x[:-1], out=reach[0].view(-1, rows))
        else:
            reach[0].copy_(first)
        torch.mul(gates[0], reach[0], out=values[0])
        for layer in range(1, depth):
            torch.bmm(self.value[layer][0], values[layer - 1], out=reach[layer])
            torch.mul(gates[layer], reach[layer], out=values[layer])
        return torch.bmm(self.readout[0], values[-1], out=own["out"])

    def backward(self, x: Tensor, slopes: Tensor) -> None:
        """Fill ``gradient``, given the derivatives of the loss by the outputs of the last forward pass, of the same ``x``."""
        depth, rows = self.shape[0], x.shape[1]
        own = self._buffer(rows)
        gates, derivative, values, reach, back = own["pre"], own["soft"], own["values"], own["reach"], own["back"]
        torch.bmm(slopes, values[-1].mT, out=self.readout[1])
        torch.bmm(self.readout[0].mT, slopes, out=back)
        for layer in reversed(range(depth)):
            reach[layer].mul_(back)  # the derivative by the gate
            back.mul_(gates[layer])
            if layer:
                torch.bmm(back, values[layer - 1].mT, out=self.value[layer][1])
                back = torch.bmm(
                    self.value[layer][0].mT, back, out=values[layer]
                )  # whose values are not needed any more
        weight, gradient = self.value[0]
        if self.linear:
            torch.mm(back.view(-1, rows), x[:-1].T, out=gradient.view(-1, weight.shape[-1]))
        else:
            torch.sum(back, -1, keepdim=True, out=gradient)
        reach.mul_(derivative)
        turned = torch.mm(x, reach.view(-1, rows).T)  # three times as fast as the product in the other order
        torch.mul(turned.view(len(x), *self.shape).permute(1, 2, 3, 0), self.beta, out=self.map_gradients)
        self._spread_gate_gradients()

    def _multiply_gate_layers(self) -> None:
        """The normals and offsets of all layers from the weights of the gating branch."""
        maps = self.maps
        maps[0, :, :, :-1].copy_(self.gate[0][0])
        maps[0, :, :, -1].copy_(self.gate_bias[0][0])
        for layer in range(1, len(self.gate)):
            torch.bmm(self.gate[layer][0], maps[layer - 1], out=maps[layer])
            maps[layer, :, :, -1].add_(self.gate_bias[layer][0])

    def _spread_gate_gradients(self) -> None:
        """From the gradients by the multiplied maps to those by the layers."""
        slopes = self.map_gradients
        for layer in reversed(range(1, len(self.gate))):
            torch.bmm(slopes[layer], self.maps[layer - 1].mT, out=self.gate[layer][1])
            self.gate_bias[layer][1].copy_(slopes[layer, :, :, -1])
            slopes[layer - 1].baddbmm_(self.gate[layer][0].mT, slopes[layer])
        self.gate[0][1].copy_(slopes[0, :, :, :-1])
        self.gate_bias[0][1].copy_(slopes[0, :, :, -1])

    def _buffer(self, rows: int) -> dict[str, Tensor]:
        """Memory for a batch of so many rows."""
        if rows not in self._buffers:
            new = self.numbers.new_empty
            own = {name: new(*self.shape, rows) for name in ("pre", "soft", "values", "reach")}
            own["back"], own["out"] = new(*self.shape[1:], rows), new(self.shape[1], self.outputs, rows)
            self._buffers[rows] = own
        return self._buffers[rows]


def _pair(layer: torch.nn.Module, name: str = "weight") -> tuple[Tensor, Tensor]:
    """A parameter's numbers and its gradient."""
    assert isinstance(layer, Affine)
    parameter = getattr(layer, name)
    return parameter.data, parameter.grad
