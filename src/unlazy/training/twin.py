"""The linearised twin: the network linearised at its start, trained with the same optimiser, batches and steps.

* :func:`linearised_twin` makes a twin that is trained beside a network or afterwards. It is exact for every optimiser.
* :func:`simulate_twin` computes the twin's outputs from the tangent kernel at the start, without training it: exact for SGD and
  momentum where the batches are known, and nearly so for small steps where they are not.

The *gap* is |f_T - f_lin,T| / |f_T - f_0| on held-out inputs: 0 where the twin predicts the same as the network.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from unlazy.kernels.capture import Inputs
from unlazy.kernels.gated import has_hard_gates, refuse_stack
from unlazy.kernels.jacobian import ModuleJacobian, as_call
from unlazy.kernels.selection import Parameters, select_parameters
from unlazy.runtime import Unsupported, require
from unlazy.training.linearised import output_kernel

Loss = Callable[[Tensor, Tensor], Tensor]
TIMED_STEPS = 3
FLOW_ERROR, FLOW_STEPS = (
    1e-3,
    16,
)  # of a simulated gradient flow: error of a step, relative to the change so far; first steps


@dataclass(frozen=True)
class TwinPoint:
    """Network and twin after ``step`` steps, on held-out inputs.

    ``gap``: their distance, relative to how far the network went. ``size``: how far the twin went, in the same unit. ``loss`` and
    ``twin_loss``: of network and twin on the held-out targets; NaN where there are none.
    """

    step: int
    gap: float
    size: float
    loss: float
    twin_loss: float


@dataclass(frozen=True)
class TwinPrice:
    """What a step of the twin costs on this machine: ``seconds``, and how many ``times`` a step of plain training."""

    seconds: float
    times: float

    def text(self, steps: int) -> str:
        """A sentence about the price of so many steps."""
        total = self.seconds * steps
        return f"{steps} steps of the twin take about {total:.2g} s, {self.times:.1f} times as long as plain training."


class LinearisedTwin:
    """Made by :func:`linearised_twin`. ``curve``: what every call of :meth:`compare` found. ``steps``: steps taken so far."""

    def __init__(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        loss: Loss,
        held: tuple[Inputs, Tensor | None],
        linear: Parameters,
        clip_norm: float | None,
    ) -> None:
        refuse_stack(model)
        is_plain = linear is not None and len(linear) == 0
        if has_hard_gates(model) and not is_plain:
            raise Unsupported(
                type(model).__name__, "hard gates have no derivative by their parameters", "Use soft gates."
            )
        if isinstance(optimiser, torch.optim.LBFGS):
            raise Unsupported("LBFGS", "it evaluates the loss several times a step", "Use another optimiser.")
        names = {id(p): name for name, p in model.named_parameters()}
        trained = [p for group in optimiser.param_groups for p in group["params"]]
        require(
            all(id(p) in names for p in trained),
            "the optimiser has parameters that the model does not; make the twin from the model that the optimiser trains.",
        )
        moving = {names[id(p)] for p in trained}  # frozen ones too: they may be set free later
        chosen = []
        if linear == "trainable":
            chosen = [name for name in names.values() if name in moving]
        elif not is_plain:
            chosen = [name for name in select_parameters(model, linear) if name in moving]
        require(bool(chosen) or is_plain, f"the optimiser trains none of the parameters {linear!r}.")
        self.model, self.optimiser, self.loss, self.held, self.clip_norm = model, optimiser, loss, held, clip_norm
        self.jacobian = ModuleJacobian(model, chosen)
        self.notes = _use_batch_statistics(model, self.jacobian.base)
        self.theta = {
            name: nn.Parameter(p.detach().clone(), p.requires_grad)
            for name, p in model.named_parameters()
            if name in moving
        }
        self._free = {name: p.requires_grad for name, p in model.named_parameters() if name in moving}
        # The copy of an optimiser whose parameters count as copied already trains the twin's, with all state and settings.
        known: dict[int, Any] = {id(p): self.theta.get(name, p) for name, p in model.named_parameters()}
        self.twin_optimiser = copy.deepcopy(optimiser, known)
        self.steps, self.curve = 0, list[TwinPoint]()
        self.start = self._network_outputs({})

    def __call__(self, x: Inputs) -> Tensor:
        """The twin's outputs at ``x``."""
        if not self.jacobian.names:
            return self.jacobian.at(self.theta, as_call(x))
        linear = torch.cat([self.theta[name].reshape(-1) for name in self.jacobian.names]) - self.jacobian.vector()
        others = {name: p for name, p in self.theta.items() if name not in self.jacobian.names}
        start, moved = self.jacobian.jvp(linear, as_call(x), others)
        return start + moved

    def freeze(self, names: Iterable[str]) -> None:
        """Fix these parameters of the twin at their present values: optimisers pass over parameters without a gradient."""
        for name in set(names) & set(self.theta):
            self.theta[name].requires_grad_(False)
            self.theta[name].grad = None

    def release(self, names: Iterable[str]) -> None:
        """Let these parameters of the twin train from now on."""
        for name in set(names) & set(self.theta):
            self.theta[name].requires_grad_(True)

    def step(self, x: Inputs, y: Tensor) -> float:
        """One step of the twin on a batch, with the learning rate (and all settings) that the network's optimiser has now.

        Call it beside ``optimiser.step()``, before the scheduler's step. Returns the twin's loss on the batch. Parameters that
        were frozen or set free in the network since the last step are so in the twin, too.
        """
        self._follow_freezing()
        require(
            len(self.optimiser.param_groups) == len(self.twin_optimiser.param_groups),
            "the optimiser got new groups of parameters after the twin was made. Give it all parameters at the start, those that "
            "train later with requires_grad=False.",
        )
        for group, mine in zip(self.optimiser.param_groups, self.twin_optimiser.param_groups, strict=True):
            mine.update({name: setting for name, setting in group.items() if name != "params"})
        value = self._gradient(x, y)
        self.twin_optimiser.step()
        self.steps += 1
        return value

    def train(
        self,
        batches: Iterable[tuple[Inputs, Tensor]],
        *,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        free_after: Mapping[str, int] | None = None,
    ) -> list[float]:
        """Train the twin afterwards, on the batches that the network saw; the loss of each step.

        ``scheduler``: one made for the optimiser that the twin was made from; it is moved after every step. ``free_after``: by
        name of a parameter, the number of steps for which it stays frozen.
        """
        losses, later = [], dict(free_after or {})
        self.freeze(name for name, steps in later.items() if steps > self.steps)
        for x, y in batches:
            self.release(name for name, steps in later.items() if steps == self.steps)
            losses.append(self.step(x, y))
            if scheduler is not None:
                self.optimiser._opt_called = True  # type: ignore[attr-defined]  # no warning: the twin's optimiser stepped
                scheduler.step()
        return losses

    def compare(self, model: nn.Module | None = None) -> TwinPoint:
        """The gap on the held-out inputs now, added to ``curve``. ``model``: the trained network, if not the one given first."""
        after = self.outputs_of(model or self.model)
        with torch.no_grad():
            mine = self(self.held[0])
        went = float((after - self.start).norm())
        gap, size = (float(part.norm()) / went if went > 0 else 0.0 for part in (after - mine, mine - self.start))
        point = TwinPoint(self.steps, gap, size, self.held_loss(after), self.held_loss(mine))
        self.curve.append(point)
        return point

    def outputs_of(self, model: nn.Module) -> Tensor:
        """The outputs of a network with this architecture on the held-out inputs, with the buffers and modes of the twin."""
        return self._network_outputs({name: p.detach() for name, p in model.named_parameters()})

    def held_loss(self, outputs: Tensor) -> float:
        """The loss of these outputs on the held-out targets; NaN where there are none."""
        if self.held[1] is None:
            return float("nan")
        with torch.no_grad():
            return float(self.loss(outputs, self.held[1]))

    def price(self, x: Inputs, y: Tensor) -> TwinPrice:
        """Measure what a step costs on a batch of this size. Nothing is trained."""
        saved = {name: p.detach().clone() for name, p in self.theta.items()}
        self._gradient(x, y)  # the first pass finds out whether the model has forward mode
        began = time.perf_counter()
        for _ in range(TIMED_STEPS):
            self._gradient(x, y)
        mine = (time.perf_counter() - began) / TIMED_STEPS
        began = time.perf_counter()
        for _ in range(TIMED_STEPS):
            leaves = {name: p.requires_grad_(True) for name, p in saved.items() if self.theta[name].requires_grad}
            torch.autograd.grad(
                self.loss(self.jacobian.at(leaves, as_call(x)), y), list(leaves.values()), allow_unused=True
            )
        plain = (time.perf_counter() - began) / TIMED_STEPS
        return TwinPrice(mine, mine / max(plain, 1e-9))

    def _follow_freezing(self) -> None:
        """Freeze and release what was frozen and set free in the network since the last step."""
        now = {name: p.requires_grad for name, p in self.model.named_parameters() if name in self.theta}
        self.release(name for name, free in now.items() if free and not self._free[name])
        self.freeze(name for name, free in now.items() if not free and self._free[name])
        self._free = now

    def _gradient(self, x: Inputs, y: Tensor) -> float:
        """Put the gradient of the loss on a batch into the twin's parameters; the loss."""
        self.twin_optimiser.zero_grad()
        loss = self.loss(self(x), y)
        loss.backward()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_([p for p in self.theta.values() if p.grad is not None], self.clip_norm)
        return float(loss.detach())

    def _network_outputs(self, values: Mapping[str, Tensor]) -> Tensor:
        """The network's outputs on the held-out inputs with these parameters, in the mode and with the buffers of the twin."""
        with torch.no_grad():
            return self.jacobian.at(values, as_call(self.held[0]))


def linearised_twin(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    loss: Loss,
    *,
    held: Inputs | tuple[Inputs, Tensor],
    linear: Parameters = "trainable",
    clip_norm: float | None = None,
) -> LinearisedTwin:
    """The network linearised at its present parameters, to be trained as the network is: same optimiser, batches and steps.

    Call it before training starts; model and optimiser are copied and left alone. ``loss(outputs, targets)``: the training loss.
    ``held``: held-out inputs, or inputs and targets, on which network and twin are compared. ``linear``: the parameters that are
    linearised (as in ``tangent_kernel``), ``()`` for none; the others train as they do in the network. ``clip_norm``: the norm
    to which training clips gradients.

    The twin has no dropout. Batch-norm in training mode normalises by the batch at hand, in the twin and where the network is
    compared with it; in evaluation mode it keeps its statistics.

    >>> model, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(64, 2)
    >>> y, loss = x[:, :1] * x[:, 1:], nn.functional.mse_loss
    >>> optimiser = torch.optim.Adam(model.parameters())
    >>> twin = linearised_twin(model, optimiser, loss, held=(x, y))
    >>> for _ in range(3):
    ...     optimiser.zero_grad()
    ...     loss(model(x), y).backward()
    ...     optimiser.step()
    ...     reached = twin.step(x, y)
    >>> twin.compare().gap < 0.1
    True
    """
    pair = held if isinstance(held, tuple) and len(held) == 2 and torch.is_tensor(held[1]) else (held, None)
    return LinearisedTwin(model, optimiser, loss, pair, linear, clip_norm)


def _use_batch_statistics(model: nn.Module, twin: nn.Module) -> tuple[str, ...]:
    """Let batch-norm layers that are in training mode normalise by the batch at hand in the twin; what to say about it."""
    found, notes = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training], []
    for module, mine in zip(model.modules(), twin.modules(), strict=True):
        if isinstance(mine, _NormBase) and module.training:
            mine.running_mean = mine.running_var = None
            mine.track_running_stats = mine.track_running_stats and not isinstance(mine, _InstanceNorm)
    if found:
        notes.append("batch-norm normalises by the batch at hand, in the twin and in the network compared with it")
    if any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules()):
        notes.append("the twin was trained without dropout")
    return tuple(notes)


# --- without training it ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SimulatedTwin:
    """Outputs of the twin on held-out inputs at the recorded ``steps``, and its training ``losses`` there.

    ``start``: the network's outputs at the start. ``defensible``: the batches were known, so that every step was taken as in
    training, or every learning rate was below the largest stable one on the way.
    """

    steps: tuple[int, ...]
    outputs: Float[Tensor, "t m o"]
    losses: tuple[float, ...]
    start: Float[Tensor, "m o"]
    defensible: bool


def simulate_twin(
    model: nn.Module,
    train: tuple[Inputs, Tensor],
    loss: Loss,
    *,
    held: Inputs,
    rates: Sequence[float],
    momentum: float = 0.0,
    decay: float = 0.0,
    batches: Sequence[Tensor] | None = None,
    record: Sequence[int] | None = None,
    parameters: Parameters = "trainable",
    memory: str | int | None = None,
) -> SimulatedTwin:
    """The twin under SGD, computed from the tangent kernel of the model at its start (its present parameters).

    With K = J_0 J_0^T: f_lin = f_0 + K(., train) a, and a step changes a by the gradient of the loss by the outputs. ``rates``:
    the learning rate of every step. ``decay``: weight decay of ``torch.optim.SGD``. ``batches``: the training samples of every
    step; the result is then that of the trained twin, up to rounding. Without them the twin follows the gradient on all training
    samples in real time, sum of rates / (1 - momentum): right for steps well below the largest stable one. ``record``: steps
    after which outputs are kept, by default the last. The loss must be a mean over samples. Layers in evaluation mode; not for
    batch-norm in training mode, nor for Adam, whose step depends on the parameters.
    """
    require(0 <= momentum < 1, f"momentum must be at least 0 and below 1, got {momentum!r}.")
    require(all(rate >= 0 for rate in rates), "learning rates must be at least 0.")
    require(batches is None or len(batches) == len(rates), "there must be one batch for every learning rate.")
    if any(isinstance(module, _BatchNorm) and module.training for module in model.modules()):
        raise Unsupported("batch-norm", "its outputs depend on the batch", "Train the twin: linearised_twin(...).")
    refuse_stack(model)
    jacobian = ModuleJacobian(model, list(select_parameters(model, parameters)))
    x, y = train
    kept = sorted({*(record if record is not None else (len(rates),))})
    start, other_start = jacobian.outputs(x), jacobian.outputs(held)
    kernel = output_kernel(jacobian, x, memory=memory).to(start)
    other_kernel = output_kernel(jacobian, held, x, memory=memory).to(start)
    shrink, other_shrink = (_along_parameters(jacobian, one) if decay > 0 else None for one in (x, held))
    learner = _KernelLearner(kernel, start, y, loss, shrink, momentum, decay)
    outputs, losses, past = [], [], 0
    for step in kept:
        if batches is not None:
            for number in range(past, step):
                learner.step(rates[number], batches[number])
        else:
            learner.flow(sum(rates[past:step]) / (1 - momentum))
        past = step
        change = (other_kernel @ learner.moved.flatten()).view_as(other_start)
        if other_shrink is not None:
            change = change + learner.shrunk * other_shrink
        outputs.append(other_start + change)
        losses.append(float(loss(learner.outputs(), y)))
    stable = max(rates, default=0.0) * learner.top < 2 * (1 + momentum)
    defensible = bool(torch.stack(outputs).isfinite().all()) and (batches is not None or stable)
    return SimulatedTwin(tuple(kept), torch.stack(outputs), tuple(losses), other_start, defensible)


@dataclass
class _KernelLearner:
    """theta - theta_0 = J_0^T ``moved`` + ``shrunk`` theta_0: all that SGD with weight decay reaches in a linearised network."""

    kernel: Float[Tensor, "k k"]
    start: Float[Tensor, "n o"]
    targets: Tensor
    loss: Loss
    shrink: Float[Tensor, "n o"] | None  # J_0 theta_0
    momentum: float
    decay: float

    def __post_init__(self) -> None:
        self.moved, self.shrunk = torch.zeros_like(self.start), 0.0
        self._speed, self._shrink_speed = torch.zeros_like(self.start), 0.0
        self.top = self.largest_curvature()  # seen so far

    def outputs(self, rows: Tensor | slice = slice(None)) -> Float[Tensor, "b o"]:
        """The outputs on training samples now."""
        width = self.start.shape[1]
        kernel = self.kernel.unflatten(0, (-1, width))[rows].flatten(0, 1)
        out = self.start[rows] + (kernel @ self.moved.flatten()).view(-1, width)
        return out if self.shrink is None else out + self.shrunk * self.shrink[rows]

    def step(self, rate: float, rows: Tensor | slice = slice(None)) -> None:
        """A step of SGD with momentum on some of the samples."""
        slope = self.decay * self.moved
        slope[rows] = slope[rows] + self._slope(rows)
        self._speed = self.momentum * self._speed + slope
        self._shrink_speed = self.momentum * self._shrink_speed + self.decay * (1 + self.shrunk)
        self.moved = self.moved - rate * self._speed
        self.shrunk -= rate * self._shrink_speed

    def flow(self, duration: float) -> None:
        """Gradient flow for some time, by Heun's rule with steps whose error in the outputs stays below ``FLOW_ERROR``."""
        left, length, taken = duration, duration / FLOW_STEPS, 0
        while left > 1e-9 * duration:
            length = min(length, left)
            before = self.moved, self.shrunk
            slope, shrinking = self._velocity()
            self.moved, self.shrunk = before[0] + length * slope, before[1] + length * shrinking
            later, shrinking_later = self._velocity()
            change = length / 2 * (later - slope)
            self.moved = self.moved + change
            self.shrunk += length / 2 * (shrinking_later - shrinking)
            size = max(float(self._moved_outputs(self.moved).norm()), 1e-30)
            error = float(self._moved_outputs(change).norm()) / (size * FLOW_ERROR)
            if error > 1 and length > 1e-9 * duration:
                self.moved, self.shrunk = before
            else:
                left, taken = left - length, taken + 1
                if taken % FLOW_STEPS == 0:
                    self.top = max(self.top, self.largest_curvature())
            length *= min(2.0, max(0.2, 0.9 / max(error, 1e-9) ** 0.5))
        self.top = max(self.top, self.largest_curvature())

    def _velocity(self) -> tuple[Tensor, float]:
        """How fast ``moved`` and ``shrunk`` change under gradient flow."""
        return -(self._slope(slice(None)) + self.decay * self.moved), -self.decay * (1 + self.shrunk)

    def _moved_outputs(self, moved: Float[Tensor, "n o"]) -> Float[Tensor, "n o"]:
        return (self.kernel @ moved.flatten()).view_as(moved)

    def largest_curvature(self, iterations: int = 20) -> float:
        """The largest eigenvalue of K times the loss's second derivative by the outputs of now, by power iteration."""
        random, now = torch.Generator().manual_seed(0), self.outputs()
        v = torch.randn(self.start.shape, generator=random).to(self.start)
        size = 0.0
        for _ in range(iterations):
            v = v / v.norm().clamp(min=1e-30)
            v = self._moved_outputs(second_derivative(self.loss, now, self.targets, v))
            size = float(v.norm())
        return size

    def _slope(self, rows: Tensor | slice) -> Float[Tensor, "b o"]:
        out = self.outputs(rows).requires_grad_(True)
        (found,) = torch.autograd.grad(self.loss(out, self.targets[rows]), out)
        return found


def largest_curvature(jacobian: ModuleJacobian, x: Inputs, y: Tensor, loss: Loss, iterations: int = 12) -> float:
    """The largest eigenvalue of J^T H J, the Gauss-Newton part of the loss's curvature, by power iteration.

    Gradient descent on the linearised network is stable for learning rates below 2 over this number.
    """
    called, random = as_call(x), torch.Generator().manual_seed(0)
    with torch.no_grad():
        out = jacobian.at({}, called)
    v = torch.randn(len(jacobian.vector()), generator=random).to(out)
    size = 0.0
    for _ in range(iterations):
        v = v / v.norm()
        with torch.no_grad():
            moved = jacobian.jvp(v, called)[1]
        v = jacobian.vjp(second_derivative(loss, out, y, moved), x)
        size = float(v.norm())
    return size


def second_derivative(loss: Loss, out: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """The second derivative of the loss by the outputs, times ``v``."""
    leaf = out.detach().requires_grad_(True)
    (slope,) = torch.autograd.grad(loss(leaf, y), leaf, create_graph=True)
    if not slope.requires_grad:
        return torch.zeros_like(v)  # the loss is piecewise linear
    (found,) = torch.autograd.grad(slope, leaf, v, allow_unused=True, materialize_grads=True)
    return found


def _along_parameters(jacobian: ModuleJacobian, x: Inputs) -> Float[Tensor, "n o"]:
    """J_0 theta_0."""
    with torch.no_grad():
        return jacobian.jvp(jacobian.vector(), as_call(x))[1]
