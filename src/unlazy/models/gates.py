"""Gate rules: how a gating pre-activation q becomes the number that multiplies a unit.

A rule knows no model. The half-space of the theory is the *hard* gate 1[q >= 0]; its derivative is zero
almost everywhere, so nothing would train it. Two ways out, both offered, never mixed up:

* ``SoftGate(beta)``: G = sigmoid(beta q) forward and backward. What the published code trains. At beta 4
  it is far from a half-space, so every result of a soft net is also reported with its hard gates.
* ``HardGate(beta)``: G = 1[q >= 0] forward, the derivative of sigmoid(beta q) backward ("straight through").
  ``HardGate(None)`` has no backward at all: the ReLU's own gate, or frozen gates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unlazy.runtime import InputError, require


@dataclass(frozen=True)
class SoftGate:
    """G = sigmoid(beta q), forward and backward."""

    beta: float = 4.0

    def __post_init__(self) -> None:
        check_beta(self.beta)

    def __call__(self, q: Tensor, beta: Tensor | None = None, *, strict: bool = False) -> Tensor:
        return torch.sigmoid((self.beta if beta is None else beta) * q)


@dataclass(frozen=True)
class HardGate:
    """G = 1[q >= 0] forward (``strict``: q > 0), d sigmoid(beta q)/dq backward; ``beta=None``: no backward."""

    beta: float | None = 4.0

    def __post_init__(self) -> None:
        if self.beta is not None:
            check_beta(self.beta)

    def __call__(self, q: Tensor, beta: Tensor | None = None, *, strict: bool = False) -> Tensor:
        hard = (q.detach() > 0 if strict else q.detach() >= 0).to(q.dtype)
        slope = self.beta if beta is None else beta
        if slope is None or not q.requires_grad:
            return hard
        soft = torch.sigmoid(slope * q)
        return soft + (hard - soft).detach()


GateRule = SoftGate | HardGate


def check_beta(beta: float) -> None:
    """Refuse a slope that is not a positive number."""
    require(
        isinstance(beta, int | float) and math.isfinite(beta) and beta > 0,
        f"beta must be a positive number, got {beta!r}; 4 is the published value, 30 is nearly hard.",
    )


def rule_to_spec(rule: GateRule) -> dict[str, Any]:
    """``{rule: soft|hard, beta}``."""
    return {"rule": "soft" if isinstance(rule, SoftGate) else "hard", "beta": rule.beta}


def rule_from_spec(spec: dict[str, Any]) -> GateRule:
    """The inverse of ``rule_to_spec``."""
    kinds: dict[str, type[SoftGate] | type[HardGate]] = {"soft": SoftGate, "hard": HardGate}
    if spec.get("rule") not in kinds:
        raise InputError(f"gate rule must be 'soft' or 'hard', got {spec.get('rule')!r}.")
    return kinds[spec["rule"]](spec["beta"])


class Gates(Sequence[Tensor]):
    """The gates of one forward pass: per gated layer a tensor ``[..., n, units]`` of the numbers used in it.

    Gates can be stored and handed back to ``net.value(x, gates)``: the network is then linear in its experts.
    ``hard()`` gives membership in the half-spaces as booleans.
    """

    def __init__(self, values: Sequence[Tensor], pre: Sequence[Tensor], *, strict: bool) -> None:
        self._values, self._pre, self._strict = list(values), list(pre), strict

    def hard(self) -> list[Tensor]:
        """Open or closed: q > 0 for a ReLU's own pre-activation (``strict``), q >= 0 for a gating network."""
        return [q > 0 if self._strict else q >= 0 for q in self._pre]

    def __getitem__(self, layer: Any) -> Any:
        return self._values[layer]

    def __len__(self) -> int:
        return len(self._values)
