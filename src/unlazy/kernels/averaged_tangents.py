"""Tangent features averaged along the way a network went: the features in which its training is linear.

For any path of parameters f_T - f_0 = integral of J(theta_s) dtheta_s. On the straight line from theta_0 to theta_T the step
is constant, so phi(x) = mean of J along the line satisfies f_T(x) - f_0(x) = phi(x) . (theta_T - theta_0) exactly, up to
quadrature (adaptive tangent paper). Along the real trajectory, through saved checkpoints, the mean is by arc length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.kernels.capture import Inputs, call_model, evaluation_mode, sample_count, take_samples
from unlazy.kernels.compare import alignment
from unlazy.kernels.gated import has_hard_gates
from unlazy.kernels.jacobian import choose_jvp, jvp_at
from unlazy.kernels.selection import select_parameters
from unlazy.kernels.tangent import tangent_features
from unlazy.runtime import Unsupported, require

State = Mapping[str, Tensor]
RULES = ("uniform", "gauss")
JVP_SAMPLES = 512  # samples in one product with the Jacobian


@dataclass(frozen=True)
class PathPoint:
    """A point of the path: its parameters, its weight in the mean (all add up to 1), and its share of the whole step."""

    state: dict[str, Tensor]
    weight: float
    step: dict[str, Tensor]


@dataclass(frozen=True)
class ParameterPath:
    """Parameters at two or more moments of a training and how the way between them is sampled.

    ``states``: the beginning and the end (the straight line), or every checkpoint from one to the other (the trajectory,
    straight between checkpoints). ``points`` on each segment; ``rule``: ``"uniform"`` takes equally spaced points with both ends
    and equal weights, as the paper's authors do; ``"gauss"`` takes Gauss-Legendre nodes, exact where the network is smooth.
    """

    states: Sequence[State]
    points: int = 50
    rule: str = "uniform"

    def __post_init__(self) -> None:
        require(len(self.states) >= 2, f"a path needs a beginning and an end, got {len(self.states)} states.")
        names = {name: tensor.shape for name, tensor in self.states[0].items()}
        for state in self.states:
            same = {name: tensor.shape for name, tensor in state.items()} == names
            require(same, "all states of a path must have the same names and shapes.")
        require(self.rule in RULES, f"rule must be one of {', '.join(RULES)}; got {self.rule!r}.")
        require(self.points >= (2 if self.rule == "uniform" else 1), f"too few points on a segment: {self.points}.")

    def nodes(self) -> Iterator[PathPoint]:
        """All quadrature points in order."""
        lengths = [_distance(first, last) for first, last in pairwise(self.states)]
        require(sum(lengths) > 0, "the network has not moved: the path has no length.")
        times, weights = _quadrature(self.points, self.rule)
        for (first, last), length in zip(pairwise(self.states), lengths, strict=True):
            for time, weight in zip(times, weights, strict=True):
                real = [name for name in first if first[name].is_floating_point()]  # a counter of batches stays out
                state = {name: torch.lerp(first[name], last[name], time) for name in real}
                step = {name: weight * (last[name] - first[name]) for name in real}
                yield PathPoint(state, weight * length / sum(lengths), step)


@dataclass(frozen=True)
class AveragedTangents:
    """``features [n, outputs, p]`` averaged along the path, and what training did to the outputs ``[n, outputs]``.

    ``integral``: the sum of J dtheta over the path, which quadrature alone keeps from being ``change`` = f_T - f_0.
    """

    features: Float[Tensor, "n o p"]
    start: Float[Tensor, "n o"]
    end: Float[Tensor, "n o"]
    integral: Float[Tensor, "n o"]

    @property
    def change(self) -> Float[Tensor, "n o"]:
        """f_T - f_0: what training did to the outputs."""
        return self.end - self.start

    def kernel(self) -> Float[Tensor, "n n"]:
        """Gram matrix of the averaged features, summed over outputs."""
        flat = self.features.flatten(1)
        return flat @ flat.T

    def similarity(self) -> float:
        """Uncentred similarity of the kernel to the label kernel of the change."""
        return float(alignment(self.kernel(), self.change))

    def signal_to_noise(self) -> float:
        """Of f_T by the integral, in decibels."""
        return signal_to_noise(self.end, self.start + self.integral)


def signal_to_noise(end: Tensor, predicted: Tensor) -> float:
    """20 log10(||f_T|| / ||f_T - prediction||): how well a linear model of training gives the final function."""
    missed = float((end - predicted).norm().clamp(min=1e-300))
    return 20 * float(np.log10(max(float(end.norm()), 1e-300) / missed))


def averaged_tangents(
    model: nn.Module, path: ParameterPath, x: Inputs, *, parameters: str | Sequence[str] = "trainable"
) -> AveragedTangents:
    """Averaged tangent features of ``model`` along ``path`` at ``x``; the model lends its shape, its numbers do not matter.

    Holds n x outputs x p numbers. Hard gates are refused: the function jumps when a gate moves, no gradient sees it, and the
    integral is not the change.
    """
    worker, chosen = _prepare(model, path, parameters)
    product = _jacobian_product(worker, chosen, x)
    total: Tensor | None = None
    integral: Tensor | None = None
    for node in path.nodes():
        worker.load_state_dict(node.state, strict=False)
        features = tangent_features(worker, x, parameters=chosen, method="auto").mul_(node.weight)
        moved = product(node.step)
        total = features if total is None else total.add_(features)
        integral = moved if integral is None else integral + moved
    assert total is not None
    assert integral is not None
    return AveragedTangents(
        total, _outputs_at(worker, path.states[0], x), _outputs_at(worker, path.states[-1], x), integral
    )


def averaged_diagonal(
    model: nn.Module,
    path: ParameterPath,
    x: Inputs,
    *,
    parameters: str | Sequence[str] = "trainable",
    memory: int = 2**28,
) -> Float[Tensor, "n"]:
    """The averaged kernel of every sample with itself, summed over outputs: ``averaged_tangents`` a few samples at a time.

    ``memory``: bytes of features held at once.
    """
    worker, chosen = _prepare(model, path, parameters)
    nodes = list(path.nodes())
    width = _outputs_at(worker, path.states[0], take_samples(x, slice(0, 1))).shape[1]
    size = sum(worker.get_parameter(name).numel() for name in chosen)
    some = max(1, memory // (8 * width * size))
    found = []
    for first in range(0, sample_count(x), some):
        part, total = take_samples(x, slice(first, first + some)), None
        for node in nodes:
            worker.load_state_dict(node.state, strict=False)
            features = tangent_features(worker, part, parameters=chosen, method="auto").mul_(node.weight)
            total = features if total is None else total.add_(features)
        assert total is not None
        found.append(total.double().square().sum((1, 2)))
    return torch.cat(found)


def linearisation_quality(
    model: nn.Module, path: ParameterPath, x: Inputs, *, parameters: str | Sequence[str] = "trainable"
) -> tuple[list[float], float]:
    """Signal-to-noise ratio of f_T for the tangent features of each single point of a straight line, and for their mean.

    The ratio for one point t takes f_0 + J(theta_t)(theta_T - theta_0). No feature is formed: products only.
    """
    require(len(path.states) == 2, "single points are compared on a straight line: give its beginning and its end.")
    worker, chosen = _prepare(model, path, parameters)
    first, last = path.states
    whole = {name: last[name] - first[name] for name in chosen}
    start, end = _outputs_at(worker, first, x), _outputs_at(worker, last, x)
    product = _jacobian_product(worker, chosen, x)
    single, mean = [], torch.zeros_like(start)
    for node in path.nodes():
        worker.load_state_dict(node.state, strict=False)
        moved = product(whole)
        single.append(signal_to_noise(end, start + moved))
        mean = mean + node.weight * moved
    return single, signal_to_noise(end, start + mean)


def _prepare(model: nn.Module, path: ParameterPath, parameters: str | Sequence[str]) -> tuple[nn.Module, list[str]]:
    """A copy to work on, and the names of the parameters that move."""
    chosen = list(select_parameters(model, parameters))
    first, last = path.states[0], path.states[-1]
    missing = [name for name in chosen if name not in first]
    require(not missing, f"the states lack {', '.join(missing[:3])}; they must hold every chosen parameter.")
    still = [name for name, _ in model.named_parameters() if name in first and name not in chosen]
    moved = [name for name in still if not torch.equal(first[name], last[name])]
    require(not moved, f"{', '.join(moved[:3])} moved but is not among the chosen parameters.")
    kept = [name for name, buffer in model.named_buffers() if name in first and buffer.is_floating_point()]
    moved = [name for name in kept if any(not torch.equal(first[name], state[name]) for state in path.states[1:])]
    require(
        not moved,
        f"{', '.join(moved[:3])} moved but is no parameter, so no gradient accounts for it: give states that agree in buffers, "
        "such as the running statistics of a batch-norm.",
    )
    _refuse_hard_gates(model, path, chosen)
    return copy.deepcopy(model), chosen


def _refuse_hard_gates(model: nn.Module, path: ParameterPath, chosen: Sequence[str]) -> None:
    if not has_hard_gates(model):
        return
    gates = [name for name, _ in model.branch("gate") if name in chosen]
    moving = any(not torch.equal(first[name], last[name]) for first, last in pairwise(path.states) for name in gates)
    if moving:
        raise Unsupported(
            type(model).__name__,
            "hard gates moved: the outputs jump where a gate closes, so no mean of gradients adds up to f_T - f_0",
            "Average a network with soft gates, or one whose gates stay fixed.",
        )


def _jacobian_product(
    model: nn.Module, chosen: Sequence[str], x: Inputs
) -> Callable[[Mapping[str, Tensor]], Float[Tensor, "n o"]]:
    """The function step -> J step, with J at the parameters that the model has when the function is called."""

    def values() -> dict[str, Tensor]:
        return {name: model.get_parameter(name).detach() for name in chosen}

    with evaluation_mode(model):
        remedy = "Replace the operation without a second derivative."
        method = choose_jvp(model, values(), {}, x, remedy=remedy)

    def product(step: Mapping[str, Tensor]) -> Float[Tensor, "n o"]:
        now = values()
        along = {name: step[name].to(now[name]) for name in chosen}
        with evaluation_mode(model):
            return jvp_at(model, now, {}, along, x, method, JVP_SAMPLES)[1]

    return product


def _outputs_at(model: nn.Module, state: State, x: Inputs) -> Float[Tensor, "n o"]:
    model.load_state_dict(dict(state), strict=False)
    with evaluation_mode(model), torch.no_grad():
        return call_model(model, x)


def _distance(first: State, last: State) -> float:
    """Between two states; a weight that has several names counts once."""
    counted: dict[tuple[torch.Size, float], list[str]] = {}  # names by shape and way gone: few are left to compare
    total = 0.0
    for name in [name for name in first if first[name].is_floating_point()]:
        square = float((last[name] - first[name]).double().square().sum())
        alike = counted.setdefault((first[name].shape, square), [])
        if not any(torch.equal(first[name], first[one]) and torch.equal(last[name], last[one]) for one in alike):
            alike.append(name)
            total += square
    return total**0.5


def _quadrature(points: int, rule: str) -> tuple[list[float], list[float]]:
    if rule == "uniform":
        return np.linspace(0, 1, points).tolist(), [1 / points] * points
    nodes, weights = np.polynomial.legendre.leggauss(points)
    return ((nodes + 1) / 2).tolist(), (weights / 2).tolist()


def member_states(checkpoints: Sequence[Mapping[str, Any]], member: int) -> list[dict[str, Tensor]]:
    """Parameters of one member from the checkpoints of a run (``model/NAME`` with a leading member axis)."""
    return [
        {name.removeprefix("model/"): torch.from_numpy(np.array(array[member])) for name, array in one.items()
         if name.startswith("model/")}
        for one in checkpoints
    ]  # fmt: skip
