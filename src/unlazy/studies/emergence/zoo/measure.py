"""One cell of the zoo: four learners on one sample of one kind of data; accuracy, and whether the hidden directions are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.data.planted import Planted, recovered
from unlazy.kernels.agop import agop
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build
from unlazy.models.gates import SoftGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec, relu_spec
from unlazy.runtime import stream
from unlazy.studies.emergence.common import Values, accuracy
from unlazy.studies.settings import at_least_one, plain_settings
from unlazy.training.linearised import linearise
from unlazy.training.recursive_features import recursive_features, top_directions

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Ridges of the linearised network, in units of the mean eigenvalue of its kernel; the best on held rows counts."""
PROBED = 500
"""Rows on which gradients by inputs are averaged."""

ANIMALS: dict[str, Planted] = {
    "structured patterns": Planted("patterns", 20, 5),
    "sparse parity": Planted("parity", 20, 3),
    "staircase": Planted("staircase", 20, 5),
    "single index": Planted("single-index", 20, 1),
    "multi-index": Planted("multi-index", 20, 4),
    "hierarchy of 2 levels": Planted("hierarchy", 32, 2, symbols=4),
    "hierarchy of 3 levels": Planted("hierarchy", 32, 3, symbols=4),
}


@dataclass(frozen=True)
class Settings:
    """One scale. Networks: ``steps`` of AdamW on squared errors from PyTorch's own small start, the same for every kind of data.

    ``hierarchy_seeds``: seeds of the hierarchies beyond ``seeds``, on which no recipe was chosen. ``phase_*``: the phase diagram
    of structured patterns over k, gamma and samples.
    """

    seeds: int
    hierarchy_seeds: int = 0
    sizes: tuple[int, ...] = (250, 500, 1_000, 2_000)
    tests: int = 4_000
    held: int = 1_000
    width: int = 128
    depth: int = 2
    gated_width: int = 64
    gated_depth: int = 3
    steps: int = 1_500
    batch: int = 128
    rate: float = 3e-3
    decay: float = 1.0
    rounds: int = 3
    phase_inputs: int = 20
    phase_orders: tuple[int, ...] = (3, 5, 7)
    phase_gammas: tuple[float, ...] = (0.05, 0.125, 0.25, 0.4)
    phase_sizes: tuple[int, ...] = (250, 500, 1_000)
    phase_seeds: int = 1

    def __post_init__(self) -> None:
        at_least_one(self, "seeds", "tests", "held", "width", "depth", "steps", "batch", "rounds", "phase_seeds")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return plain_settings(self)


SCALES = {
    "smoke": Settings(
        seeds=1,
        sizes=(40, 80),
        tests=100,
        held=50,
        width=16,
        gated_width=8,
        steps=20,
        batch=20,
        rounds=1,
        phase_orders=(3,),
        phase_gammas=(0.25, 0.4),
        phase_sizes=(40, 80),
        phase_seeds=1,
    ),
    "desk": Settings(
        seeds=1,
        sizes=(500, 2_000),
        tests=2_000,
        held=500,
        phase_orders=(3, 5),
        phase_gammas=(0.125, 0.4),
        phase_sizes=(250, 1_000),
        phase_seeds=1,
    ),
    "paper": Settings(seeds=3, hierarchy_seeds=3, phase_seeds=3),
}


# --- a cell ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Rows to learn from, to choose with, and to judge on; float32."""

    x: Float[Tensor, "n d"]
    y: Float[Tensor, " n"]
    held_x: Float[Tensor, "h d"]
    held_y: Float[Tensor, " h"]
    test_x: Float[Tensor, "t d"]
    test_y: Float[Tensor, " t"]

    @classmethod
    def of(cls, data: Planted, n: int, settings: Settings) -> Sample:
        parts = (("train", n), ("held", settings.held), ("test", settings.tests))
        return cls(*(value.float() for part, count in parts for value in data.draw(count, part)))


def animal(settings: Settings, name: str, n: int, seed: int) -> Values:
    """All learners on ``n`` samples of one kind of data."""
    return _learn(settings, with_seed(ANIMALS[name], seed), n, seed, gated=True)


def phase(settings: Settings, order: int, gamma: float, n: int, seed: int) -> Values:
    """The network, its linearisation and the feature machine on structured patterns with this k and gamma."""
    data = Planted("patterns", settings.phase_inputs, order, mixture=1 - 2 * gamma, seed=seed)
    return _learn(settings, data, n, seed, gated=False)


def relevant(settings: Settings, n: int, seed: int) -> Values:
    """Structured patterns: where the network's gradients point, beside the sum of the relevant patterns.

    On inputs of zeros and ones a parity is a product as well as a function of the sum: a network may use all k patterns and
    never turn toward their sum.
    """
    data = with_seed(ANIMALS["structured patterns"], seed)
    sample, patterns = Sample.of(data, n, settings), data.patterns()
    net = trained(
        build(relu_spec(data.inputs, width=settings.width, depth=settings.depth), seed=seed), sample, settings, seed
    )
    product, span = agop(net, sample.x[:PROBED]), patterns.dictionary()[:, patterns.relevant_set()]
    return {
        "network_accuracy": accuracy(_outputs(net, sample.test_x), sample.test_y),
        "network_sum": found_by(product, sample.x, data.directions()),
        "network_span": found_by(product, sample.x, span),
    }


def with_seed(data: Planted, seed: int) -> Planted:
    """The same kind of data with other hidden directions."""
    return Planted(**(asdict(data) | {"seed": seed}))


def _learn(settings: Settings, data: Planted, n: int, seed: int, *, gated: bool) -> Values:
    sample, hidden = Sample.of(data, n, settings), data.directions()
    specs = {"network": relu_spec(data.inputs, width=settings.width, depth=settings.depth)}
    if gated:
        specs["dlgn"] = NetSpec(data.inputs, width=settings.gated_width, depth=settings.gated_depth, gate=SoftGate(4.0))
    values: Values = {}
    for name, spec in specs.items():
        net = trained(build(spec, seed=seed), sample, settings, seed)
        values[f"{name}_accuracy"] = accuracy(_outputs(net, sample.test_x), sample.test_y)
        values[f"{name}_recovered"] = found_by(agop(net, sample.x[:PROBED]), sample.x, hidden)
    values |= _linearised(build(specs["network"], seed=seed), sample, hidden)
    return values | _machines(settings, sample, hidden)


def trained(net: GatedNet, sample: Sample, settings: Settings, seed: int) -> GatedNet:
    """AdamW on the squared error, rows drawn with replacement."""
    optimiser = torch.optim.AdamW(net.parameters(), lr=settings.rate, weight_decay=settings.decay)
    generator = stream(seed, "zoo batches")
    for _ in range(settings.steps):
        rows = torch.randint(0, len(sample.y), (settings.batch,), generator=generator)
        loss = (net(sample.x[rows])[:, 0] - sample.y[rows]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net


def _outputs(model: Callable[[Tensor], Tensor], x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    with torch.no_grad():
        return model(x)[:, 0].float()


def found_by(product: Float[Tensor, "d d"], x: Float[Tensor, "n d"], hidden: Float[Tensor, "d r"]) -> float:
    """How much of the hidden subspace the top directions of an AGOP share; directions in which no input varies do not count.

    The one-hot tokens of a hierarchy add up to a constant: along it a network's gradient is what its start left there.
    """
    centred = x.double() - x.double().mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    varying = vectors[:, values > 1e-9 * values[-1]]
    inside = varying @ (varying.T @ product.double() @ varying) @ varying.T
    return recovered(top_directions(inside, hidden.shape[1]), hidden)


def _linearised(net: GatedNet, sample: Sample, hidden: Float[Tensor, "d r"]) -> Values:
    """Ridge regression on the tangents of the start, its ridge chosen on held rows."""
    kernel, rest = tangent_kernel(net, sample.x), sample.y - _outputs(net, sample.x)
    best, coefficients = -1.0, rest
    held, start = tangent_kernel(net, sample.held_x, sample.x), _outputs(net, sample.held_x)
    for ridge in RIDGES:
        shifted = kernel.double()
        shifted.diagonal().add_(ridge * float(shifted.trace()) / len(rest))
        tried = torch.cholesky_solve(rest.double()[:, None], torch.linalg.cholesky(shifted))[:, 0].float()
        right = accuracy(start + held @ tried, sample.held_y)
        if right > best:
            best, coefficients = right, tried
    line = moved_along(net, sample.x, coefficients)
    return {
        "linearised_accuracy": accuracy(_outputs(line, sample.test_x), sample.test_y),
        "linearised_recovered": found_by(agop(line, sample.x[:PROBED]), sample.x, hidden),
    }


def moved_along(net: GatedNet, x: Float[Tensor, "n d"], coefficients: Float[Tensor, " n"]) -> nn.Module:
    """f_0 + K(., x) coefficients as a module: the linearised network, displaced by J(x)^T coefficients."""
    line, parameters = linearise(net), dict(net.named_parameters())
    chosen = [parameters[name] for name in line.names]
    pulls = torch.autograd.grad((net(x)[:, 0] * coefficients).sum(), chosen)
    with torch.no_grad():
        line.displacement.copy_(torch.cat([pull.flatten() for pull in pulls]))
    return line


def _machines(settings: Settings, sample: Sample, hidden: Float[Tensor, "d r"]) -> Values:
    """The plain Laplace kernel (round 0), and the round of the feature machine that is best on held rows."""
    values: Values = {}
    best = -1.0
    for number, machine in enumerate(recursive_features(sample.x, sample.y[:, None], rounds=settings.rounds)):
        right = accuracy(machine(sample.held_x)[:, 0], sample.held_y)
        test = accuracy(machine(sample.test_x)[:, 0], sample.test_y)
        found = found_by(machine.agop(sample.x[:PROBED]), sample.x, hidden)
        if number == 0:
            values |= {"laplace_accuracy": test, "laplace_recovered": found}
        if right > best:
            best = right
            values |= {"machine_accuracy": test, "machine_recovered": found, "machine_round": number}
    return values
