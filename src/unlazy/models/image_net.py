"""Gated networks on images: plain convolutions or residual blocks, with the same choices as dense networks.

    q_l = transition_l(gating states)          one network of the same layout makes all gates, linear but for the
                                               ReLUs behind the spec's ``nonlinear_gate_layers``
    h_l = rule(q_l) * transition_l(value states)
    f(x) = readout(mean of the last h over positions)

A *transition* is convolution, then batch-norm if asked for, plus a shortcut at the end of a residual block. In evaluation mode
batch-norm is affine, so q_l of a linear gating network is affine in x and every gate is a half-space of image space; in training
mode it depends on the batch. A frozen gating network (``train_gates=False``) stays in evaluation mode. Nothing pools by maximum.
With ``gating="own"`` the value branch gates itself: an ordinary ReLU network.

The value branch of constant experts reads an all-ones image. Its first batch-norm would see no variance over the batch, so
that one is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from unlazy.models.gate_product import divide_by_channel_size, multiply_by_gate
from unlazy.models.gates import Gates, HardGate
from unlazy.models.net import GatedModule
from unlazy.models.spec import ImageSpec
from unlazy.runtime import InputError, require

Activation = Callable[[int, Tensor], Tensor]  # (layer, pre-activation) -> state


class GatedImageNet(GatedModule[ImageSpec]):
    """A gated network that maps images ``[n, channels, height, width]`` to ``[n, classes]``; built by :func:`unlazy.build`."""

    @property
    def depth(self) -> int:
        """How many gated layers there are."""
        return len(self.value_layers)

    def train(self, mode: bool = True) -> GatedImageNet:
        """Set training mode, in which batch-norms use the batch; a frozen gating network stays in evaluation mode."""
        super().train(mode)
        if not self._spec.train_gates:
            self.gate_layers.eval()
        return self

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n o"]:
        """f(x) = value(x, gates(x))."""
        self._check_input(x)
        if self._spec.gating == "own":
            if self._spec.gate.beta is None:
                return self._value_pass(x, lambda _, pre: F.relu(pre))
            return self._value_pass(x, lambda _, pre: multiply_by_gate(self._spec.gate, pre, pre))
        if self._spec.gating == "open":
            return self._value_pass(x, lambda _, pre: pre)
        q = self.pre_activations(x)
        if self._spec.even_gates and self.training:
            q = [divide_by_channel_size(pre) for pre in q]
        quick = self.training and x.is_cuda
        return self._value_pass(x, lambda layer, pre: multiply_by_gate(self._spec.gate, q[layer], pre, quick=quick))

    def gates(self, x: Float[Tensor, "n c h w"]) -> Gates:
        """The gates of every layer, ``[n, channels, height, width]``; ``.hard()`` gives booleans."""
        own = self._spec.gating == "own"
        q = self.pre_activations(x)
        if self._spec.gating == "open":
            q = [torch.ones_like(pre) for pre in q]
        return Gates([self._spec.gate(pre, strict=own) for pre in q], q, strict=own)

    def value(self, x: Float[Tensor, "n c h w"], gates: Sequence[Tensor]) -> Float[Tensor, "n o"]:
        """The output of the value branch under the given gates; it is linear in the experts of each layer."""
        self._check_input(x)
        require(len(gates) == self.depth, f"need {self.depth} layers of gates, got {len(gates)}.")
        return self._value_pass(x, lambda layer, pre: gates[layer].to(pre.dtype) * pre)

    def pre_activations(self, x: Float[Tensor, "n c h w"]) -> list[Tensor]:
        """q_l(x), the numbers that decide the gates; the unit's own value where there is no gating branch."""
        self._check_input(x)
        q: list[Tensor] = []
        own, nonlinear = self._spec.gating == "own", self._spec.nonlinear_gate_layers

        def collect(number: int, pre: Tensor) -> Tensor:
            q.append(pre)
            return F.relu(pre) if own or number + 1 in nonlinear else pre

        _last_state(self.gate_layers if self._spec.gating == "linear" else self.value_layers, x, collect)
        return q

    def hard(self) -> GatedImageNet:
        """This network with gates that are open or closed (shares all parameters): the half-spaces of the theory.

        With ``nonlinear_gate_layers`` they are regions of another shape.
        """
        spec = replace(self._spec, gate=HardGate(None))
        return GatedImageNet(spec, self.gate_layers, self.value_layers, self.readout).train(self.training)

    def _growing_sizes(self, name: str, parameter: nn.Parameter) -> tuple[int, ...]:
        """The number of channels it makes, unless they are the outputs, and reads, unless they are those of the image."""
        shape = parameter.shape
        makes = () if name.startswith("readout.output.") else tuple(shape[:1])
        reads = () if name.startswith(("gate_layers.0.", "value_layers.0.")) else tuple(shape[1:2])
        return makes + reads

    def _value_pass(self, x: Tensor, act: Activation) -> Tensor:
        """The output of the value branch, which reads an all-ones image if the experts are constant."""
        start = x.new_ones(1, *x.shape[1:]) if self._spec.experts == "constant" else x
        result: Tensor = self.readout(_last_state(self.value_layers, start, act))
        return result

    def _check_input(self, x: Tensor) -> None:
        if x.ndim != 4 or x.shape[1] != self._spec.channels:
            raise InputError(f"expected images [n, {self._spec.channels}, height, width], got shape {tuple(x.shape)}.")


def _last_state(layers: nn.ModuleList, x: Tensor, act: Activation) -> Tensor:
    """The last state of a branch; ``act`` turns the pre-activation of a layer into its state."""
    older, state = x, x
    for number, layer in enumerate(layers):
        older, state = state, act(number, layer(state, older))
    return state
