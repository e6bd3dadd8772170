"""Networks for the width check whose exponents are known: dense, convolutional, a transformer; three parametrisations; SGD, Adam.

``KNOWN`` follows from the formulas in ``unlazy.widths.reading``. It was written before anything was measured, as was ``WITHIN``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unlazy.models.build import build
from unlazy.models.gates import HardGate
from unlazy.models.image_layers import ScaledLayer, with_multipliers, without_multipliers
from unlazy.models.net import GatedModule
from unlazy.models.parametrisation import Scaling, rate_multiplier
from unlazy.models.spec import ImageSpec, Init, relu_spec
from unlazy.runtime import stream
from unlazy.studies.study import Case
from unlazy.studies.table import Rows
from unlazy.widths.check import WidthCheck, width_check
from unlazy.widths.measure import NETWORK

NETWORKS, PARAMETRISATIONS, OPTIMISERS = ("dense", "conv", "transformer"), ("standard", "ntk", "mup"), ("sgd", "adam")
WITHIN = 0.15
SAMPLES, INPUTS, OUTPUTS, TOKENS, POSITIONS, SIDE = 96, 16, 4, 12, 6, 6
RATES = {  # small enough that the first updates are linear in the rate at every width
    ("standard", "sgd"): 1e-5,
    ("standard", "adam"): 1e-6,
    ("ntk", "sgd"): 0.05,
    ("ntk", "adam"): 0.02,
    ("mup", "sgd"): 0.05,
    ("mup", "adam"): 0.02,
}
KNOWN: dict[
    tuple[str, str], dict[str, float]
] = {  # own change after a step by role; output and its change; kernel by role
    ("standard", "sgd"): {"first": -0.5, "hidden": 0.5, "readout": 1, "output": 0, "output_update": 1},
    ("standard", "adam"): {"first": 0, "hidden": 1, "readout": 1, "output": 0, "output_update": 1.5},
    ("ntk", "sgd"): {"first": -0.5, "hidden": -0.5, "readout": 0, "output": 0, "output_update": 0},
    ("ntk", "adam"): {"first": -0.5, "hidden": -0.5, "readout": 0, "output": 0, "output_update": 0},
    ("mup", "sgd"): {"first": 0, "hidden": 0, "readout": 0, "output": -0.5, "output_update": 0},
    ("mup", "adam"): {"first": 0, "hidden": 0, "readout": 0, "output": -0.5, "output_update": 0},
}
KERNELS = {"standard": {"first": 0.0, "hidden": 1.0, "readout": 1.0}, "ntk": {}, "mup": {}}
"""Exponents of a layer's part of the tangent kernel at the start, where not 0."""
READINGS = {"standard": "blowing up", "ntk": "NTK-like", "mup": "maximal-update-like"}


def role_of(layer: str) -> str:
    """The role of a layer of these networks, by its name."""
    name = layer.removesuffix(".inner")
    if name.startswith("readout"):
        return "readout"
    return "first" if name in ("value_layers.0", "value_layers.0.conv", "embedding") else "hidden"


def known_exponent(parametrisation: str, optimiser: str, layer: str, measure: str) -> float | None:
    """The exponent that theory gives at the start or after one step; ``None`` where it is not declared.

    Queries and keys under maximal updates: their gradient comes through <g, v>, a sum of m terms of size 1/m and random sign at
    the start, so that it is smaller by m^-1/2 than that of other layers. Adam does not see this.
    """
    known = KNOWN[parametrisation, optimiser]
    if layer == NETWORK:
        return known.get(measure)
    role = role_of(layer)
    late = parametrisation == "mup" and layer.removesuffix(".inner") in ("query", "key")
    if measure == "activation":
        return known["output"] if role == "readout" else 0.0
    if measure == "own_update":
        return known[role] - (0.5 if late and optimiser == "sgd" else 0)
    if measure == "kernel":
        return KERNELS[parametrisation].get(role, 0.0) - (1.0 if late else 0)
    return None


class Transformer(nn.Module):
    """One block of attention and one of two dense layers, without norms, on tokens; a readout of the mean over positions.

    Attention is scaled by one over the root of the width; by one over the width under ``mup``.
    """

    def __init__(self, width: int, parametrisation: str) -> None:
        super().__init__()

        def dense(inputs: int, outputs: int, role: str = "hidden") -> nn.Module:
            return _start(with_multipliers(nn.Linear(inputs, outputs, bias=False), parametrisation, role))

        table, grown = nn.Embedding(TOKENS, width), math.sqrt(width) if parametrisation == "mup" else 1.0
        nn.init.normal_(table.weight, std=1 / grown)
        self.embedding = ScaledLayer(table, Scaling(after=grown))
        self.query, self.key, self.value, self.mix = (dense(width, width) for _ in range(4))
        self.up, self.down = dense(width, 2 * width), dense(2 * width, width)
        self.readout = dense(width, OUTPUTS, "readout")
        self.scale = 1 / width if parametrisation == "mup" else width**-0.5

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.embedding(tokens)  # [n, positions, width]
        weights = (self.query(state) @ self.key(state).mT * self.scale).softmax(-1)
        state = state + self.mix(weights @ self.value(state))
        state = state + self.down(self.up(state).relu())
        out: Tensor = self.readout(state.mean(1))
        return out


def _start(layer: nn.Module) -> nn.Module:
    """The layer with weights of effective variance 1/fan_in, smaller for a readout whose parametrisation says so."""
    inner, scaling = without_multipliers(layer)
    assert isinstance(inner, nn.Linear)
    nn.init.normal_(inner.weight, std=scaling.start / (scaling.before * scaling.after) / math.sqrt(inner.in_features))
    return layer


def make_factory(network: str, parametrisation: str) -> Callable[[int], nn.Module]:
    """``make_model(width)`` for a network; its start is drawn from torch's random stream."""

    def make_model(width: int) -> nn.Module:
        if network == "transformer":
            return Transformer(width, parametrisation)
        seed, scheme = int(torch.randint(2**31, (1,))), Init("he")
        if network == "dense":
            return build(
                relu_spec(INPUTS, OUTPUTS, width=width, depth=3, init=scheme, parametrisation=parametrisation),
                seed=seed,
            )
        shape: dict[str, Any] = {
            "channels": 1,
            "classes": OUTPUTS,
            "batch_norm": False,
            "gating": "own",
            "gate": HardGate(None),
        }
        return build(ImageSpec((width, width), init=scheme, parametrisation=parametrisation, **shape), seed=seed)

    return make_model


def make_probe(network: str) -> tuple[Tensor, Tensor]:
    """Inputs and real targets: positive functions, since errors whose mean is near zero give noisy first gradients."""
    random = stream(0, "widths", network)
    x = torch.randn(SAMPLES, INPUTS, generator=random)
    y = (x @ torch.randn(INPUTS, OUTPUTS, generator=random) / 2).relu()
    if network == "dense":
        return x, y
    if network == "conv":
        images = torch.randn(SAMPLES, 1, SIDE, SIDE, generator=random)
        return images, (images.flatten(1) @ torch.randn(SIDE**2, OUTPUTS, generator=random) / 3).relu()
    tokens = torch.randint(TOKENS, (SAMPLES, POSITIONS), generator=random)
    return tokens, torch.randn(TOKENS, OUTPUTS, generator=random)[tokens].mean(1).relu() * 2


def make_optimiser(model: nn.Module, width: int, parametrisation: str, optimiser: str) -> torch.optim.Optimizer:
    """The optimiser with the rates that the parametrisation has at this width."""
    rate = RATES[parametrisation, optimiser]
    kind: Any = torch.optim.SGD if optimiser == "sgd" else torch.optim.Adam
    if isinstance(model, GatedModule):
        return kind(model.parameter_groups(rate, optimiser))
    groups = []
    for name, parameter in model.named_parameters():
        axes = (width,) * (1 if role_of(name.rpartition(".")[0]) in ("first", "readout") else 2)
        groups.append({"params": [parameter], "lr": rate * rate_multiplier(parametrisation, optimiser, axes)})
    return kind(groups)


def check_network(
    network: str,
    parametrisation: str,
    optimiser: str,
    widths: tuple[int, ...],
    seeds: int,
    steps: int,
    *,
    kernels: bool = True,
) -> WidthCheck:
    """The width check of one network; convolutions and transformers at half the widths."""
    if network != "dense":
        widths = tuple(width // 2 for width in widths)
    return width_check(
        make_factory(network, parametrisation),
        widths,
        make_probe(network),
        optimiser=lambda model, width: make_optimiser(model, width, parametrisation, optimiser),
        steps=steps,
        seeds=seeds,
        kernels=kernels,
    )


def measure_check(case: Case) -> Rows:
    """Every exponent of the width check of one network, for all seeds, and whether its reading is the known one."""
    found = check_network(
        case.network, case.parametrisation, case.optimiser, tuple(case.widths), case.networks, case.steps
    )
    rows, seeds = Rows(), range(found.seeds)
    for (measure, layer, after), exponent in found.exponents.items():
        if layer in (*found.layers, NETWORK):
            rows.add("exponent", np.array(exponent.by_seed), seed=seeds, measure=measure, layer=layer, after=after)
    rows.add("reading_is_known", float(found.reading == READINGS[case.parametrisation]), seed=0)
    rows.add("deviations", float(len(found.deviations)), seed=0)
    return rows
