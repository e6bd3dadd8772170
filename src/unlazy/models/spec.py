"""Plain descriptions of gated networks: what every one has, and the sizes of dense and of image networks.

A spec has a ``shape``: ``dense`` (:class:`NetSpec`), ``conv`` or ``resnet`` (both :class:`ImageSpec`). Every spec goes into
:func:`unlazy.build`, as an object or as the dictionary of ``spec.to_dict()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from unlazy.models.gates import GateRule, HardGate, SoftGate, rule_from_spec, rule_to_spec
from unlazy.models.parametrisation import canonical_parametrisation
from unlazy.runtime import InputError, require

SHAPES = ("dense", "conv", "resnet")
EXPERTS = ("linear", "constant")
SCHEMES = ("torch", "he")
CONSTANT_INPUTS = ("ones", "one")
Spec = TypeVar("Spec", bound="GatedSpec")


@dataclass(frozen=True)
class Init:
    """How weights are drawn at the start.

    ``torch``: U(-1/sqrt(fan_in), 1/sqrt(fan_in)), PyTorch's default for linear layers: signals shrink layer
    by layer (the "small", rich start). ``he``: normal with the variance that keeps the signal's size in each
    branch, 2/fan_in where units are gated and 1/fan_in in the linear gating network (the "large" start); biases 0.
    ``scale`` multiplies every weight and bias.
    """

    scheme: str = "torch"
    scale: float = 1.0

    def __post_init__(self) -> None:
        _require_one_of("init scheme", self.scheme, SCHEMES)
        require(self.scale > 0, f"init scale must be positive, got {self.scale!r}.")


@dataclass(frozen=True, kw_only=True)
class GatedSpec:
    """The settings that dense and image networks share, with their checks; use :class:`NetSpec` or :class:`ImageSpec`.

    ``gating``: what decides the gates. ``own``: each unit's own pre-activation (a ReLU network). ``linear``: a linear network
    beside the value branch (a DLGN). ``quadratic``: that network plus squares of the input (dense only). ``open``: every gate
    is open (a deep linear network).

    ``experts``: ``linear`` (the value branch reads the input) or ``constant`` (it reads a constant).

    ``gate``: the rule that turns a gating pre-activation into a gate, :class:`~unlazy.SoftGate` or :class:`~unlazy.HardGate`.

    ``parametrisation``: how layers scale with their widths, ``standard``, ``ntk`` or ``mup`` (also called ``mean-field``); see
    :mod:`unlazy.models.parametrisation`.

    ``nonlinear_gate_layers``: layers, counted from 1, whose pre-activation passes a ReLU on its way to the later layers of the
    gating network. Empty: every gate is a half-space of the input. The gate of a layer itself is decided by the number before
    the ReLU, so the last layer's ReLU changes nothing.

    ``train_gates=False`` freezes the gating network at its start.
    """

    GATINGS: ClassVar[tuple[str, ...]]
    KEYS: ClassVar[tuple[str, ...]]
    """Entries of the dictionary, in the order of the runs on disk."""
    RENAMED: ClassVar[Mapping[str, str]] = {}
    """Settings whose entry in the dictionary has another name."""
    LEFT_OUT: ClassVar[Mapping[str, Any]] = {"parametrisation": "standard", "nonlinear_gate_layers": ()}
    """Settings that are no entry of the dictionary where they have these values."""
    WITHOUT_GATING_NETWORK: ClassVar[Mapping[str, Any]] = {"nonlinear_gate_layers": (), "train_gates": True}
    """Settings that need a gating network, with the values they have where there is none."""

    gating: str = "linear"
    experts: str = "linear"
    gate: GateRule = field(default_factory=SoftGate)
    init: Init = field(default_factory=Init)
    parametrisation: str = "standard"
    nonlinear_gate_layers: tuple[int, ...] = ()
    train_gates: bool = True

    def __post_init__(self) -> None:
        _require_one_of("gating", self.gating, self.GATINGS)
        _require_one_of("experts", self.experts, EXPERTS)
        require(
            not (self.gating in ("own", "open") and self.experts == "constant"),
            f"constant experts with {self.gating} gates would not see the input at all; "
            "use gating='linear' or experts='linear'.",
        )
        object.__setattr__(self, "parametrisation", canonical_parametrisation(self.parametrisation))
        object.__setattr__(self, "nonlinear_gate_layers", self._check_nonlinear_gate_layers())
        require(
            self.train_gates or self.gating in ("linear", "quadratic"),
            f"gates can be frozen only where a gating network makes them, not with gating={self.gating!r}.",
        )

    @property
    def gated_layers(self) -> int:
        """How many gated layers there are."""
        raise NotImplementedError

    @property
    def has_half_space_gates(self) -> bool:
        """Whether every gate is a half-space of the input: a linear gating network without a ReLU that a later layer reads."""
        return self.gating == "linear" and all(layer == self.gated_layers for layer in self.nonlinear_gate_layers)

    @property
    def gating_words(self) -> str:
        """The gating as a reader writes it, with the non-linear layers if there are some; for error messages."""
        layers = f", nonlinear_gate_layers={self.nonlinear_gate_layers}" if self.nonlinear_gate_layers else ""
        return f"gating={self.gating!r}{layers}"

    def _check_nonlinear_gate_layers(self) -> tuple[int, ...]:
        """The layers in order, each once; raise ``InputError`` where they make no sense."""
        given: Any = self.nonlinear_gate_layers
        whole = not isinstance(given, str | int) and all(isinstance(one, int) and one is not True for one in given)
        require(
            whole, f"nonlinear_gate_layers are the numbers of layers, such as (1, 2); the first is 1. Got {given!r}."
        )
        require(
            len(given) == 0 or self.gating == "linear",
            f"nonlinear_gate_layers are layers of a gating network, which gating={self.gating!r} does not have "
            "(quadratic gates are not built for it); use gating='linear', or leave nonlinear_gate_layers empty.",
        )
        wrong = [layer for layer in given if not 1 <= layer <= self.gated_layers]
        require(
            not wrong,
            f"the gated layers are 1 to {self.gated_layers}, but nonlinear_gate_layers has {wrong}; the first layer is 1.",
        )
        return tuple(sorted(set(given)))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the inverse of ``from_dict``.

        Entries of ``LEFT_OUT`` that have their usual values are left out, so that older runs keep their ids.
        """
        values = asdict(self) | {"gate": rule_to_spec(self.gate)}
        left_out = {name for name, usual in self.LEFT_OUT.items() if values[name] == usual}
        values = {self.RENAMED.get(name, name): _as_json(value) for name, value in values.items()}
        return {key: values[key] for key in self.KEYS if key not in left_out}

    @classmethod
    def from_dict(cls: type[Spec], plain: Mapping[str, Any]) -> Spec:
        """The spec of a dictionary that ``to_dict`` wrote; entries left out take their defaults."""
        settings = {key: name for name, key in cls.RENAMED.items()}
        values = {settings.get(key, key): value for key, value in plain.items()}
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        require(not unknown, f"unknown entries of a model spec: {', '.join(unknown)}.")
        if "gate" in values:
            values["gate"] = rule_from_spec(values["gate"])
        if "init" in values:
            values["init"] = Init(**values["init"])
        if "nonlinear_gate_layers" in values:
            values["nonlinear_gate_layers"] = tuple(values["nonlinear_gate_layers"])
        return cls(**values)

    def with_beta(self: Spec, beta: float) -> Spec:
        """The same network with another gate slope."""
        return replace(self, gate=type(self.gate)(beta))

    def relu(self: Spec) -> Spec:
        """The ReLU network of the same sizes: every unit gates itself, with no gradient through the gate."""
        return self._without_gating_network("own")

    def deep_linear(self: Spec) -> Spec:
        """The deep linear network of the same sizes: every gate is open."""
        return self._without_gating_network("open")

    def _without_gating_network(self: Spec, gating: str) -> Spec:
        return replace(self, gating=gating, experts="linear", gate=HardGate(None), **self.WITHOUT_GATING_NETWORK)


@dataclass(frozen=True)
class NetSpec(GatedSpec):
    """Everything needed to rebuild a dense :class:`~unlazy.GatedNet` except its numbers; see :class:`GatedSpec` for the rest.

    ``depth`` counts gated layers: the papers' L counts weight matrices, so ``depth = L - 1``. ``quadratic_rank``: how many
    squares each quadratic gate adds.

    ``constant_input`` says what a constant-expert network feeds its value branch. ``ones`` is the paper's
    all-ones vector of the input's size: all columns of the first value matrix then receive the same gradient,
    so their sum, the only thing that matters, moves ``inputs`` times faster under Adam (784 times on
    Fashion-MNIST). ``one`` feeds a single constant 1: the same functions, the same starting distribution of
    that sum (variance 1/3 under ``torch``), and an ordinary step.

    >>> NetSpec(2, width=16, depth=5, experts="constant").to_dict()["in"]
    2
    """

    GATINGS: ClassVar[tuple[str, ...]] = ("own", "linear", "quadratic", "open")
    KEYS: ClassVar[tuple[str, ...]] = (
        "width", "depth", "gating", "experts", "gate", "gate_bias", "value_bias", "init", "train_gates", "constant_input",
        "quadratic_rank", "shape", "parametrisation", "nonlinear_gate_layers", "in", "out",
    )  # fmt: skip
    RENAMED: ClassVar[Mapping[str, str]] = {"inputs": "in", "outputs": "out"}

    inputs: int
    outputs: int = 1
    width: int = 16
    depth: int = 5
    gate_bias: bool = True
    value_bias: bool = True
    constant_input: str = "ones"
    quadratic_rank: int = 1
    shape: str = "dense"

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "width", "depth", "quadratic_rank"):
            value = getattr(self, name)
            require(
                isinstance(value, int) and not isinstance(value, bool) and value >= 1,
                f"{name} must be a whole number of at least 1, got {value!r}.",
            )
        _require_one_of("shape", self.shape, ("dense",))
        _require_one_of("constant_input", self.constant_input, CONSTANT_INPUTS)
        super().__post_init__()
        require(
            self.parametrisation == "standard" or self.gating != "quadratic",
            f"quadratic gates have no {self.parametrisation} parametrisation; use parametrisation='standard'.",
        )

    @property
    def gated_layers(self) -> int:
        """How many gated layers there are: ``depth``."""
        return self.depth

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> NetSpec:
        """The spec of a dictionary that ``to_dict`` wrote; entries left out take their defaults."""
        if "in" not in plain:
            raise InputError("a model spec needs 'in', the number of inputs.")
        return super().from_dict(plain)


@dataclass(frozen=True)
class ImageSpec(GatedSpec):
    """Everything needed to rebuild a :class:`~unlazy.GatedImageNet` except its numbers; see :class:`GatedSpec` for the rest.

    ``blocks`` empty: a plain network, one gated convolution for every entry of ``widths``. Otherwise a residual network: after a
    first convolution, ``blocks[i]`` blocks of two convolutions with ``widths[i]`` channels; each stage but the first halves the
    image. ``dense``: a layer of that many units between pooling and output, linear unless ``gated_dense``.
    ``even_gates``: in training, the slope of hard gates' backward pass counts in units of each channel's own size. The
    half-spaces are the same; residual gates, which grow with depth, all stay within reach of the gradient.
    """

    GATINGS: ClassVar[tuple[str, ...]] = ("own", "linear", "open")
    KEYS: ClassVar[tuple[str, ...]] = (
        "widths", "blocks", "channels", "classes", "dense", "gated_dense", "batch_norm", "gating", "experts", "gate",
        "even_gates", "init", "parametrisation", "nonlinear_gate_layers", "train_gates",
    )  # fmt: skip
    LEFT_OUT: ClassVar[Mapping[str, Any]] = {**GatedSpec.LEFT_OUT, "train_gates": True}
    WITHOUT_GATING_NETWORK: ClassVar[Mapping[str, Any]] = {**GatedSpec.WITHOUT_GATING_NETWORK, "even_gates": False}

    widths: tuple[int, ...]
    blocks: tuple[int, ...] = ()
    channels: int = 3
    classes: int = 10
    dense: int | None = None
    gated_dense: bool = False
    batch_norm: bool = True
    even_gates: bool = False
    init: Init = field(default_factory=lambda: Init("he"), kw_only=True)

    def __post_init__(self) -> None:
        sizes = (*self.widths, *self.blocks, self.channels, self.classes, 1 if self.dense is None else self.dense)
        require(all(isinstance(size, int) and size >= 1 for size in sizes), f"sizes must be at least 1, got {sizes}.")
        require(len(self.widths) > 0, "an image network needs at least one layer: give widths.")
        require(
            len(self.blocks) in (0, len(self.widths)),
            f"a residual network needs as many entries in blocks as in widths, got {self.blocks} and {self.widths}.",
        )
        super().__post_init__()
        require(
            self.gating == "linear"
            or (isinstance(self.gate, HardGate) and (self.gating == "own" or self.gate.beta is None)),
            f"gating={self.gating!r} trains no gate: give gate=HardGate(None)"
            + (", or a slope with which a unit's own gate passes gradients." if self.gating == "own" else "."),
        )
        require(
            not self.even_gates or isinstance(self.gate, HardGate),
            "even_gates is for hard gates: dividing the argument of a soft gate would change the network.",
        )
        require(not self.gated_dense or self.dense is not None, "gated_dense needs a dense layer: give dense.")

    @property
    def gated_layers(self) -> int:
        """How many gated layers there are: convolutions on the main way, and the dense layer if it is gated."""
        convolutions = 1 + 2 * sum(self.blocks) if self.blocks else len(self.widths)
        return convolutions + int(self.gated_dense)

    @property
    def shape(self) -> str:
        """``resnet`` where there are residual blocks, ``conv`` otherwise."""
        return "resnet" if self.blocks else "conv"

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ImageSpec:
        """The spec of a dictionary; its ``shape`` may be left out, since ``blocks`` decide it."""
        values = dict(plain)
        shape = values.pop("shape", None)
        for name in ("widths", "blocks"):
            if name in values:
                values[name] = tuple(values[name])
        spec = super().from_dict(values)
        require(
            shape in (None, spec.shape),
            f"blocks {list(spec.blocks)} make a network of shape {spec.shape!r}, but the spec says {shape!r}.",
        )
        return spec


def as_spec(spec: GatedSpec | Mapping[str, Any]) -> NetSpec | ImageSpec:
    """A spec from itself or from its dictionary.

    The entry ``shape`` of a dictionary decides the kind. Without it a dictionary with ``widths`` is an image network, because
    stored specs of image networks have no ``shape``; any other is dense.
    """
    if isinstance(spec, NetSpec | ImageSpec):
        return spec
    if not isinstance(spec, Mapping):
        raise InputError(f"a model spec is a NetSpec, an ImageSpec or a dictionary, got {type(spec).__name__}.")
    shape = spec.get("shape", "conv" if "widths" in spec else "dense")
    _require_one_of("shape", shape, SHAPES)
    return NetSpec.from_dict(spec) if shape == "dense" else ImageSpec.from_dict(spec)


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    require(value in allowed, f"{name} must be one of {', '.join(allowed)}; got {value!r}.")


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# --- the papers' networks ------------------------------------------------------------------------


def relu_spec(inputs: int, outputs: int = 1, **choices: Any) -> NetSpec:
    """A dense ReLU network: every unit gates itself, with no gradient through the gate."""
    return NetSpec(inputs, outputs, gating="own", gate=HardGate(None), **choices)


def deep_linear_spec(inputs: int, outputs: int = 1, **choices: Any) -> NetSpec:
    """A dense deep linear network: every gate is open."""
    return NetSpec(inputs, outputs, gating="open", gate=HardGate(None), **choices)


def conv_spec(width: int = 26, depth: int = 5, *, dense: int | None = 64, **choices: Any) -> ImageSpec:
    """The half-space paper's network for its first table: 5 convolutions of 26 filters, then 64 linear units; no batch-norm."""
    return ImageSpec((width,) * depth, dense=dense, batch_norm=False, init=Init("torch"), **choices)


def resnet34_spec(classes: int = 10, *, width: float = 1.0, **choices: Any) -> ImageSpec:
    """ResNet-34 for images of 32 x 32: 3, 4, 6, 3 blocks of 64, 128, 256, 512 channels; ``width`` multiplies the channels.

    Nothing pools before the end. Shortcuts that change the shape are 1 x 1 convolutions.
    """
    return ImageSpec(_scale_widths((64, 128, 256, 512), width), (3, 4, 6, 3), classes=classes, **choices)


def resnet110_spec(classes: int = 10, *, width: float = 1.0, **choices: Any) -> ImageSpec:
    """ResNet-110 for images of 32 x 32: three times 18 blocks of 16, 32, 64 channels; ``width`` multiplies the channels.

    Nothing pools before the end. Shortcuts that change the shape are 1 x 1 convolutions.
    """
    return ImageSpec(_scale_widths((16, 32, 64), width), (18, 18, 18), classes=classes, **choices)


def _scale_widths(widths: tuple[int, ...], factor: float) -> tuple[int, ...]:
    require(factor > 0, f"a width factor must be positive, got {factor!r}.")
    return tuple(max(1, round(width * factor)) for width in widths)
