"""Training that knows its paths: gate surgery on a schedule, loss weights by active paths, a learning rate for gates.

optimiser = PathOptimiser(net, torch.optim.Adam(net.parameters(), 1e-3), x, y, surgery=SurgerySchedule(every=160, last=3200))
for batch, target in loader:
    optimiser.zero_grad()
    (optimiser.sample_weights(batch) * (net(batch) - target).square().mean(-1)).mean().backward()
    optimiser.step()
optimiser.log        # what was done, when, and how much the outputs moved
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.kernels.overlap import path_count
from unlazy.models.image_net import GatedImageNet
from unlazy.models.net import GatedNet
from unlazy.runtime import require, stream
from unlazy.training.ensemble import MemberAdam
from unlazy.training.fit import LOSSES
from unlazy.training.surgery import (
    AIMS,
    Net,
    Unit,
    aim_gate,
    eligible_layers,
    outgoing_values,
    path_mass,
    replace_gate,
    unit_tensors,
)

SPARES = ("lesser", "both")


@dataclass(frozen=True)
class SurgerySchedule:
    """When gates are replaced, how many, which ones, and where the new ones aim.

    Every ``every`` steps up to step ``last``, ``gates`` gates of each network are chosen among those most like another gate:
    their pre-activations over the samples have the largest |cosine|. ``spare``: of two gates that are alike, the ``lesser`` one
    is chosen, through which less flows, or ``both``. Over the next ``fade`` steps the outgoing values of a chosen unit go down to
    zero while training goes on; then its gate is replaced, which does not change the function. ``aim``: see :func:`aim_gate`.
    """

    every: int
    last: int
    gates: int = 2
    fade: int = 16
    aim: str = "residual"
    spare: str = "lesser"

    def __post_init__(self) -> None:
        for name in ("every", "last", "gates", "fade"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, f"{name} must be a whole number >= 1, got {value!r}.")
        require(
            self.fade <= self.every, f"a fade of {self.fade} steps is longer than the {self.every} between surgeries."
        )
        require(self.aim in AIMS, f"aim must be one of {', '.join(AIMS)}; got {self.aim!r}.")
        require(self.spare in SPARES, f"spare must be one of {', '.join(SPARES)}; got {self.spare!r}.")


@dataclass(frozen=True)
class Operation:
    """One entry of the log: at ``step`` a unit was ``chosen``, ``replaced`` or ``refused`` (its old gate came back into use).

    ``likeness``: |cosine| to the gate most like it when it was chosen. ``mass``: root mean square of what flowed through it then.
    ``moved``: largest change of an output by the replacement of all gates at this step.
    """

    step: int
    what: str
    unit: Unit
    likeness: float
    mass: float
    moved: float = 0.0


class PathOptimiser:
    """Wraps an optimiser of a gated network, ``torch.optim`` or :class:`~unlazy.training.ensemble.MemberAdam` for a stack.

    ``x``, ``y``: the samples on which gates are compared and residuals are measured, -dloss/doutput of ``loss`` (``squared`` or
    ``cross-entropy``). ``weight_power``: samples count paths^-power in :meth:`sample_weights`; 1/2 favours samples with few
    active paths. ``gate_rate`` multiplies the learning rate of the gating branch. ``seeds``: what the drawn samples depend on,
    one for every member of a stack.
    """

    def __init__(
        self,
        net: Net,
        optimiser: torch.optim.Optimizer | MemberAdam,
        x: Tensor,
        y: Tensor,
        *,
        loss: str = "squared",
        surgery: SurgerySchedule | None = None,
        weight_power: float = 0.0,
        gate_rate: float = 1.0,
        seeds: Sequence[int] = (0,),
    ) -> None:
        require(loss in LOSSES, f"loss must be one of {', '.join(LOSSES)}; got {loss!r}.")
        require(gate_rate > 0, f"gate_rate must be positive, got {gate_rate!r}.")
        self.members: list[int | None] = [None] if _members(net) is None else list(range(_members(net) or 0))
        require(len(seeds) == len(self.members), f"need a seed per network: {len(self.members)}, got {len(seeds)}.")
        self.layers = eligible_layers(net) if surgery is not None else []
        self.net, self.optimiser, self.x, self.y = net, optimiser, x, y
        self.loss, self.surgery, self.weight_power, self.seeds = LOSSES[loss], surgery, weight_power, list(seeds)
        self.log: list[Operation] = []
        self.steps = 0
        self._fading: list[Operation] = []
        if gate_rate != 1:
            _scale_gate_rate(net, optimiser, gate_rate)

    def zero_grad(self) -> None:
        """Reset the gradients of a ``torch.optim`` optimiser."""
        assert isinstance(self.optimiser, torch.optim.Optimizer)
        self.optimiser.zero_grad()

    def sample_weights(self, x: Tensor) -> Float[Tensor, "*members n"]:
        """Weights of samples, mean 1: the number of their active paths to the power ``-weight_power``."""
        if self.weight_power == 0:
            return x.new_ones(x.shape[:-1] if isinstance(self.net, GatedNet) else x.shape[:1])
        weights = (-self.weight_power * log_paths(self.net, x)).softmax(-1)
        return weights * weights.shape[-1]

    def step(self, losses: Float[Tensor, " members"] | None = None) -> None:
        """One update, then the surgery that is due. A :class:`MemberAdam` takes the losses of its members."""
        if isinstance(self.optimiser, MemberAdam):
            assert losses is not None
            self.optimiser.minimise(losses)
        else:
            self.optimiser.step()
        self.steps += 1
        if self.surgery is None:
            return
        since = (self.steps - 1) % self.surgery.every + 1
        if self._fading:
            left = self.surgery.fade - since + 1
            for operation in self._fading:
                outgoing_values(self.net, operation.unit).mul_((left - 1) / left)
            if left == 1:
                self._replace()
        if since == self.surgery.every and self.steps <= self.surgery.last:
            self._choose()

    def _choose(self) -> None:
        """Choose the units whose gates will be replaced; their outgoing values begin to fade."""
        assert self.surgery is not None
        places, likeness = gate_likeness(self.net, self.x, self.layers)
        masses = path_mass(self.net, self.x)
        mass = torch.cat([masses[layer] for layer in self.layers], -1)
        for member in self.members:
            alike, weight = (likeness, mass) if member is None else (likeness[member], mass[member])
            for index, cosine in _spare_gates(alike, weight, self.surgery.gates, self.surgery.spare):
                unit = Unit(*places[index], member)
                self._fading.append(Operation(self.steps, "chosen", unit, cosine, float(weight[index])))
        self.log += self._fading

    def _replace(self) -> None:
        """Replace the gates of the chosen units, whose outgoing values are zero now, and forget their optimiser state."""
        assert self.surgery is not None
        before, residual = self._outputs_and_residual()
        done = []
        for one in self._fading:
            unit = one.unit
            random = stream(self.seeds[unit.member or 0], "surgery", self.steps, unit.layer, unit.index)
            own = residual if unit.member is None else residual[unit.member]
            gate = aim_gate(self.net, unit, self.x, own, random, self.surgery.aim)
            if replace_gate(self.net, unit, gate):
                self._forget(unit)
                done.append((one, "replaced"))
            else:
                done.append((one, "refused"))
        with torch.no_grad():
            moved = float((self.net(self.x) - before).abs().max())
        self.log += [Operation(self.steps, what, one.unit, one.likeness, one.mass, moved) for one, what in done]
        self._fading = []

    def _outputs_and_residual(self) -> tuple[Tensor, Tensor]:
        """Outputs, and the negative derivative of the loss by them for every sample."""
        with torch.enable_grad():
            out = self.net(self.x).detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.loss(out, self.y).sum(), out)
        return out.detach(), -out.shape[-2] * gradient

    def _forget(self, unit: Unit) -> None:
        """Zero the optimiser's running means of all numbers that belong to a unit: they are those of its old gate."""
        for parameter, part in unit_tensors(self.net, unit):
            for slot in _slots(self.optimiser, parameter):
                part(slot).zero_()


def log_paths(net: Net, x: Tensor) -> Float[Tensor, "*members n"]:
    """Logarithm of the number of active paths of every sample, without gradient.

    Dense networks count soft gates as they are: the product over layers of the sum of gates. Image networks count open paths.
    """
    with torch.no_grad():
        if isinstance(net, GatedImageNet):
            return path_count(net, x).to(x).clamp_min(1).log()
        return torch.stack([gate.sum(-1).clamp_min(1e-6).log() for gate in net.gates(x)]).sum(0)


def gate_likeness(net: Net, x: Tensor, layers: Sequence[int]) -> tuple[list[tuple[int, int]], Tensor]:
    """Layer and index of the units of these layers, and |cosine| of the pre-activations of every two of them, [*S, units, units].

    Of image networks, gates of different layers have other positions and count as unlike.
    """
    with torch.no_grad():
        q = net.pre_activations(x)
    chosen = [q[layer] for layer in layers]
    if isinstance(net, GatedImageNet):
        chosen = [pre.transpose(0, 1).flatten(1).mT for pre in chosen]  # [n positions, units]
    places = [(layer, i) for layer, pre in zip(layers, chosen, strict=True) for i in range(pre.shape[-1])]
    unit = [pre / pre.norm(dim=-2, keepdim=True).clamp_min(1e-300) for pre in (pre.double() for pre in chosen)]
    if isinstance(net, GatedImageNet):
        return places, torch.block_diag(*((one.mT @ one).abs() for one in unit))
    together = torch.cat(unit, -1)
    return places, (together.mT @ together).abs()


def _spare_gates(likeness: Tensor, mass: Tensor, count: int, spare: str) -> Iterator[tuple[int, float]]:
    """Index and likeness of the gates to replace, most redundant first."""
    likeness = likeness.clone()
    likeness.fill_diagonal_(-1)
    if spare == "both":
        most = likeness.max(-1).values
        yield from ((index, float(most[index])) for index in most.argsort(descending=True)[:count].tolist())
        return
    for _ in range(min(count, len(likeness) - 1)):
        one, other = divmod(int(likeness.argmax()), len(likeness))
        index = one if mass[one] < mass[other] else other
        yield index, float(likeness[one, other])
        likeness[index] = likeness[:, index] = -1


def _members(net: Net) -> int | None:
    return net.members if isinstance(net, GatedNet) else None


def _slots(optimiser: torch.optim.Optimizer | MemberAdam, parameter: nn.Parameter) -> list[Tensor]:
    """The optimiser's tensors of a parameter's own shape: views."""
    if isinstance(optimiser, MemberAdam):
        names = [f"{name}/" for name, one in optimiser.named if one is parameter]
        return [part for key, part in optimiser.state().items() if key.startswith(tuple(names))] if names else []
    state: dict[str, Any] = optimiser.state.get(parameter, {})
    return [slot for slot in state.values() if isinstance(slot, Tensor) and slot.shape == parameter.shape]


def _scale_gate_rate(net: Net, optimiser: torch.optim.Optimizer | MemberAdam, factor: float) -> None:
    """Multiply the learning rate of the gating branch."""
    gates = {id(parameter) for _, parameter in net.branch("gate")}
    require(bool(gates), "this network has no gating branch whose rate could differ; leave gate_rate out.")
    if isinstance(optimiser, MemberAdam):
        by_entry = [
            optimiser.flat.new_full((p[0].numel(),), factor if id(p) in gates else 1.0) for p in optimiser.parameters
        ]
        optimiser.lr = optimiser.lr * torch.cat(by_entry)
        return
    for group in list(optimiser.param_groups):
        mine = [parameter for parameter in group["params"] if id(parameter) in gates]
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in gates]
        if mine:
            others = {key: value for key, value in group.items() if key != "params"}
            optimiser.add_param_group({**others, "params": mine, "lr": factor * group["lr"]})
