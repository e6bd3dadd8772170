"""Members of a stack: networks with their own seeds, learning rates and gate slopes, trained together by one Adam."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unlazy.models.build import build_stack
from unlazy.models.gates import check_beta
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec
from unlazy.runtime import require, stream


@dataclass(frozen=True)
class Member:
    """One training of a stack: its seed (start and batch order), learning rate and gate slope."""

    seed: int
    lr: float
    beta: float | None = None

    def __post_init__(self) -> None:
        require(isinstance(self.seed, int), f"a seed is a whole number, got {self.seed!r}.")
        require(math.isfinite(self.lr) and self.lr > 0, f"the learning rate must be positive, got {self.lr!r}.")
        if self.beta is not None:
            check_beta(self.beta)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as in a run's header."""
        return {"seed": self.seed, "beta": self.beta, "lr": self.lr}


def build_member_stack(spec: NetSpec, members: Sequence[Member], dtype: torch.dtype) -> GatedNet:
    """The stacked network of these members; members without a beta use the spec's."""
    default = spec.gate.beta
    betas = [default if member.beta is None else member.beta for member in members]
    named = [beta for beta in betas if beta is not None]
    require(len(named) in (0, len(betas)), "either every member has a gate slope or none has.")
    return build_stack(spec, [member.seed for member in members], named or None, dtype=dtype)


def batch_order(members: Sequence[Member], epoch: int, n: int) -> Int[Tensor, "members n"]:
    """The order of samples in one epoch: each member has its own, which does not depend on the other members."""
    return torch.stack([torch.randperm(n, generator=stream(m.seed, "order", epoch)) for m in members])


class MemberAdam:
    """Adam (Kingma and Ba, default constants) on a stack, with one learning rate per member.

    All trainable parameters live in one flat ``[S, p]`` tensor of which the network's parameters are views:
    an update is a handful of operations on it, however many layers there are.
    """

    decay, square_decay, epsilon = 0.9, 0.999, 1e-8

    def __init__(self, net: GatedNet, lr: Sequence[float]) -> None:
        members = net.members
        require(members == len(lr), f"need one learning rate per member: {members} members, {len(lr)} rates.")
        self.named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
        self.parameters: list[nn.Parameter] = [p for _, p in self.named]
        self.flat = torch.cat([p.detach().reshape(len(lr), -1) for p in self.parameters], dim=1)
        for parameter, part in zip(self.parameters, self._split_flat(self.flat), strict=True):
            parameter.data = part
        self.mean, self.square = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        rates = net.rate_multipliers("adam")
        by_entry = torch.cat([self.flat.new_full((p[0].numel(),), rates[name]) for name, p in self.named])
        own = torch.tensor(lr, dtype=self.flat.dtype, device=self.flat.device).reshape(-1, 1)
        self.lr = own if bool((by_entry == 1).all()) else own * by_entry  # [S, 1], or [S, p] where layers differ
        self.steps = 0

    def minimise(self, losses: Float[Tensor, " members"]) -> None:
        """One update of every member along the gradient of its own loss."""
        gradients = torch.autograd.grad(losses.sum(), self.parameters)  # members share nothing: the sum separates
        gradient = torch.cat([g.reshape(len(self.lr), -1) for g in gradients], dim=1)
        self.steps += 1
        self.mean.lerp_(gradient, 1 - self.decay)
        self.square.mul_(self.square_decay).addcmul_(gradient, gradient, value=1 - self.square_decay)
        root = self.square.sqrt().div_(math.sqrt(1 - self.square_decay**self.steps)).add_(self.epsilon)
        self.flat.sub_(self.lr / (1 - self.decay**self.steps) * self.mean.div(root))

    def state(self) -> dict[str, Tensor]:
        """``NAME/mean`` and ``NAME/square`` per parameter, in the parameters' own shapes."""
        slots = {"mean": self.mean, "square": self.square}
        return {
            f"{name}/{slot}": part
            for slot, flat in slots.items()
            for (name, _), part in zip(self.named, self._split_flat(flat), strict=True)
        }

    def load(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Restore what ``state()`` returned, after ``steps`` updates."""
        for name, part in self.state().items():
            part.copy_(state[name])
        self.steps = steps

    def _split_flat(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat ``[S, p]`` tensor in the shapes of the parameters."""
        sizes = [parameter[0].numel() for parameter in self.parameters]
        pieces = flat.split(sizes, dim=1)
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self.parameters, strict=True)]
