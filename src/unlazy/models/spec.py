"""The plain description of a gated network: four independent choices and a few sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from unlazy.models.gates import GateRule, HardGate, SoftGate, rule_from_spec, rule_to_spec
from unlazy.models.parametrisation import known_parametrisation
from unlazy.runtime import InputError, require

SHAPES = ("dense",)
GATINGS = ("own", "linear", "quadratic", "open")
EXPERTS = ("linear", "constant")
SCHEMES = ("torch", "he")
CONSTANT_INPUTS = ("ones", "one")


@dataclass(frozen=True)
class Init:
    """Where weights start.

    ``torch``: U(-1/sqrt(fan_in), 1/sqrt(fan_in)), PyTorch's default for linear layers: signals shrink layer
    by layer (the "small", rich start). ``he``: normal with the variance that keeps the signal's size in each
    branch, 2/fan_in where units are gated and 1/fan_in in the linear gating network (the "large" start); biases 0.
    ``scale`` multiplies every weight and bias.
    """

    scheme: str = "torch"
    scale: float = 1.0

    def __post_init__(self) -> None:
        _one_of("init scheme", self.scheme, SCHEMES)
        require(self.scale > 0, f"init scale must be positive, got {self.scale!r}.")


@dataclass(frozen=True)
class NetSpec:
    """Everything needed to rebuild a :class:`~unlazy.models.net.GatedNet` but its numbers.

    ``depth`` counts gated layers: the papers' L counts weight matrices, so ``depth = L - 1``.

    ``constant_input`` says what a constant-expert network feeds its value branch. ``ones`` is the paper's
    all-ones vector of the input's size: all columns of the first value matrix then receive the same gradient,
    so their sum, the only thing that matters, moves ``inputs`` times faster under Adam (784 times on
    Fashion-MNIST). ``one`` feeds a single constant 1: the same functions, the same starting distribution of
    that sum (variance 1/3 under ``torch``), and an ordinary step.

    ``parametrisation``: how layers scale with the width, ``standard``, ``ntk`` or ``mup`` (also called ``mean-field``); see
    :mod:`unlazy.models.parametrisation`. A stored spec names it only where it is not the standard one.
    """

    inputs: int
    outputs: int = 1
    width: int = 16
    depth: int = 5
    gating: str = "linear"
    experts: str = "linear"
    gate: GateRule = field(default_factory=SoftGate)
    gate_bias: bool = True
    value_bias: bool = True
    init: Init = field(default_factory=Init)
    train_gates: bool = True
    constant_input: str = "ones"
    quadratic_rank: int = 1
    shape: str = "dense"
    parametrisation: str = "standard"

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "width", "depth", "quadratic_rank"):
            value = getattr(self, name)
            require(
                isinstance(value, int) and not isinstance(value, bool) and value >= 1,
                f"{name} must be a whole number of at least 1, got {value!r}.",
            )
        _one_of("shape", self.shape, SHAPES)
        _one_of("gating", self.gating, GATINGS)
        _one_of("experts", self.experts, EXPERTS)
        _one_of("constant_input", self.constant_input, CONSTANT_INPUTS)
        object.__setattr__(self, "parametrisation", known_parametrisation(self.parametrisation))
        require(
            self.parametrisation == "standard" or self.gating != "quadratic",
            f"quadratic gates have no {self.parametrisation} parametrisation; use parametrisation='standard'.",
        )
        require(
            not (self.gating in ("own", "open") and self.experts == "constant"),
            f"constant experts with {self.gating} gates would not see the input at all; "
            "use gating='linear' or experts='linear'.",
        )
        require(
            self.train_gates or self.gating in ("linear", "quadratic"),
            f"gates can be frozen only where a gating network makes them, not with gating={self.gating!r}.",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the inverse of ``from_dict``."""
        plain = asdict(self) | {"gate": rule_to_spec(self.gate)}
        plain["in"], plain["out"] = plain.pop("inputs"), plain.pop("outputs")
        if self.parametrisation == "standard":
            del plain["parametrisation"]  # runs made before there was a choice keep their ids
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> NetSpec:
        values = dict(plain)
        if "in" not in values:
            raise InputError("a model spec needs 'in', the number of inputs.")
        values["inputs"] = values.pop("in")
        if "out" in values:
            values["outputs"] = values.pop("out")
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        require(not unknown, f"unknown model spec entries: {', '.join(unknown)}.")
        if "gate" in values:
            values["gate"] = rule_from_spec(values["gate"])
        if "init" in values:
            values["init"] = Init(**values["init"])
        return cls(**values)

    def with_beta(self, beta: float) -> NetSpec:
        """The same network with another gate slope."""
        return replace(self, gate=type(self.gate)(beta))


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    require(value in allowed, f"{name} must be one of {', '.join(allowed)}; got {value!r}.")


def relu_spec(inputs: int, outputs: int = 1, **choices: Any) -> NetSpec:
    """A ReLU network: every unit gates itself, with no gradient through the gate."""
    return NetSpec(inputs, outputs, gating="own", gate=HardGate(None), **choices)


def deep_linear_spec(inputs: int, outputs: int = 1, **choices: Any) -> NetSpec:
    """A deep linear network: every gate open."""
    return NetSpec(inputs, outputs, gating="open", gate=HardGate(None), **choices)
