"""Gated networks: a gating branch opens and closes units, and a value branch is multiplied by its gates.

    q_l = transition_l(gating states)          pre-activation of the gates of layer l
    G_l = rule(q_l)                            in [0, 1]
    h_l = G_l * transition_l(value states)     value branch
    f(x) = readout(value states)

A gating state is q_l, or relu(q_l) in the spec's ``nonlinear_gate_layers``.
With ``gating="own"`` the value branch gates itself (a ReLU net). A *transition* reads the list of all earlier
states, so a dense or convolutional layer takes the last one and a residual layer also takes an older one.

Every tensor may carry a leading *member* axis: a stack of S networks is one ``GatedNet`` whose parameters are
``[S, ...]``; it maps ``[n, d]`` (one batch for all) or ``[S, n, d]`` (one batch each) to ``[S, n, outputs]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from unlazy.models.gates import Gates, HardGate
from unlazy.models.parametrisation import growing_axes, rate_multiplier
from unlazy.models.spec import GatedSpec, NetSpec
from unlazy.runtime import InputError, Unsupported, require

Spec = TypeVar("Spec", bound=GatedSpec)


class GatedModule(nn.Module, Generic[Spec]):
    """What dense and image networks share: their spec, their two branches and their learning rates."""

    gate_layers: nn.ModuleList
    value_layers: nn.ModuleList
    readout: nn.Module

    def __init__(self, spec: Spec, gate_layers: nn.ModuleList, value_layers: nn.ModuleList, readout: nn.Module) -> None:
        super().__init__()
        self._spec = spec
        self.gate_layers, self.value_layers, self.readout = gate_layers, value_layers, readout

    def spec(self) -> dict[str, Any]:
        """The dictionary from which ``build(spec)`` makes this network again."""
        return self._spec.to_dict()

    @property
    def settings(self) -> Spec:
        """The spec as an object."""
        return self._spec

    def branch(self, name: str) -> list[tuple[str, nn.Parameter]]:
        """Named parameters of the ``"gate"`` or the ``"value"`` branch (the readout belongs to the values)."""
        require(name in ("gate", "value"), f"a branch is 'gate' or 'value', got {name!r}.")
        return [
            (key, parameter)
            for key, parameter in self.named_parameters()
            if key.startswith(("gate_layers.", "quadratic.")) == (name == "gate")
        ]

    def rate_multipliers(self, optimiser: str = "sgd") -> dict[str, float]:
        """What the parametrisation makes of the learning rate of each parameter, under ``"sgd"`` or ``"adam"``."""
        kind = self._spec.parametrisation
        return {
            name: rate_multiplier(kind, optimiser, () if kind == "standard" else self._growing_sizes(name, parameter))
            for name, parameter in self.named_parameters()
        }

    def parameter_groups(self, lr: float, optimiser: str = "sgd") -> list[dict[str, Any]]:
        """Trainable parameters with the rates of their parametrisation, as torch's optimisers take them.

        ``torch.optim.Adam(net.parameter_groups(1e-3, "adam"))``: a rate that suits one width then suits them all.
        """
        rates = self.rate_multipliers(optimiser)
        return [
            {"params": [parameter], "lr": lr * rates[name]}
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        ]

    def has_exact_gradient(self) -> bool:
        """Whether autograd through this network is the derivative of its function (false for a soft backward)."""
        return not (isinstance(self._spec.gate, HardGate) and self._spec.gate.beta is not None)

    def _growing_sizes(self, name: str, parameter: nn.Parameter) -> tuple[int, ...]:
        """The sizes of those axes of a parameter that grow with the width."""
        raise NotImplementedError


class GatedNet(GatedModule[NetSpec]):
    """A dense gated network, or a stack of them.

    Built by :func:`unlazy.build`, :func:`unlazy.ReLUNet`, :func:`unlazy.DLGN`, :func:`unlazy.DeepLinearNet`.
    """

    member_beta: Tensor | None  # [S, 1, 1]: the slope of each member's gates, where members differ in it

    def __init__(
        self,
        spec: NetSpec,
        gate_layers: nn.ModuleList,
        value_layers: nn.ModuleList,
        readout: nn.Module,
        quadratic: nn.ModuleList | None = None,
        member_beta: Tensor | None = None,
    ) -> None:
        super().__init__(spec, gate_layers, value_layers, readout)
        self.quadratic = quadratic
        self.register_buffer("member_beta", member_beta, persistent=False)

    @property
    def members(self) -> int | None:
        """How many networks are stacked here; ``None`` for a single one."""
        weight = next(self.readout.parameters())
        return int(weight.shape[0]) if weight.ndim == 3 else None

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*out o"]:
        """f(x) = value(x, gates(x))."""
        self._check_input(x)
        if self._spec.gating == "own":
            return self._self_gated_pass(x)[0]
        return self.value(x, self.gates(x))

    def gates(self, x: Float[Tensor, "*batch d"]) -> Gates:
        """The gates of every layer, as the numbers used in ``forward``; ``.hard()`` gives booleans."""
        self._check_input(x)
        if self._spec.gating == "own":
            return self._self_gated_pass(x)[1]
        if self._spec.gating == "open":
            ones = x.new_ones(*x.shape[:-1], self._spec.width)
            return Gates([ones] * self._spec.depth, [ones] * self._spec.depth, strict=False)
        q = self.pre_activations(x)
        return Gates([self._apply_gate_rule(pre) for pre in q], q, strict=False)

    def value(self, x: Float[Tensor, "*batch d"], gates: Sequence[Tensor]) -> Float[Tensor, "*out o"]:
        """The output of the value branch under the given gates; it is linear in the experts of each layer."""
        require(len(gates) == self._spec.depth, f"need {self._spec.depth} layers of gates, got {len(gates)}.")
        states = [x]
        for transition, gate in zip(self.value_layers, gates, strict=True):
            pre = transition(states)
            states.append(gate.to(pre.dtype) * pre)
        return self.readout(states)

    def pre_activations(self, x: Float[Tensor, "*batch d"]) -> list[Tensor]:
        """q_l(x), the numbers that decide the gates: the unit's own value for a ReLU net, else what the gating network makes.

        Affine in x for linear gating, up to the first of ``nonlinear_gate_layers``.
        """
        if self._spec.gating == "own":
            return self._self_gated_pass(x)[2]
        if self._spec.gating == "open":
            raise Unsupported("GatedNet", "open gates have no pre-activation", "Choose another gating.")
        states, q = [x], []
        for number, transition in enumerate(self.gate_layers, start=1):
            q.append(transition(states))
            states.append(F.relu(q[-1]) if number in self._spec.nonlinear_gate_layers else q[-1])
        if self.quadratic is not None:
            q = [eta + term(x) for eta, term in zip(q, self.quadratic, strict=True)]
        return q

    def hard(self) -> GatedNet:
        """This network with gates that are open or closed (shares all parameters): the half-spaces of the theory.

        With ``nonlinear_gate_layers`` they are regions of another shape.
        """
        spec = replace(self._spec, gate=HardGate(None))
        return GatedNet(spec, self.gate_layers, self.value_layers, self.readout, self.quadratic)

    def _growing_sizes(self, name: str, parameter: nn.Parameter) -> tuple[int, ...]:
        return (self._spec.width,) * growing_axes(name)

    def _apply_gate_rule(self, q: Tensor) -> Tensor:
        return self._spec.gate(q, self.member_beta, strict=self._spec.gating == "own")

    def _self_gated_pass(self, x: Tensor) -> tuple[Tensor, Gates, list[Tensor]]:
        """Output, gates and pre-activations of a network whose units gate themselves."""
        states, values, pre_activations = [x], [], []
        for transition in self.value_layers:
            pre = transition(states)
            values.append(self._apply_gate_rule(pre))
            pre_activations.append(pre)
            states.append(values[-1] * pre)
        return self.readout(states), Gates(values, pre_activations, strict=True), pre_activations

    def _check_input(self, x: Tensor) -> None:
        if x.shape[-1] != self._spec.inputs:
            raise InputError(f"expected inputs with {self._spec.inputs} columns, got shape {tuple(x.shape)}.")
