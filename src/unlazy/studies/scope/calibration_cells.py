"""The cells of the calibration: networks trained beside their linearised twins, with what a scope could measure of them.

A cell is one training, drawn from families of networks and data sets with a recorded seed. Some families are only fitted on, the
others only scored on: no network and no data set is on both sides. Every cell has twelve moments, spread geometrically over its
steps. At each of them the table has the truth (the gap to the exact twin on held-out inputs) and every cheap measure, so that any
rule can be judged from the table alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unlazy.data.images import load_images
from unlazy.kernels.compare import kernel_distance, relative_change
from unlazy.kernels.jacobian import ModuleJacobian
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build
from unlazy.models.gates import SoftGate
from unlazy.models.spec import NetSpec
from unlazy.runtime import Unsupported, stream
from unlazy.studies.study import Work
from unlazy.studies.table import Rows
from unlazy.training.twin import LinearisedTwin, largest_curvature, linearised_twin, simulate_twin

# --- families ----------------------------------------------------------------------------------------------------------------

FITTED = (
    ("relu", "gelu-layer-norm", "deep-linear", "conv", "attention", "ntk", "residual"),
    ("digits", "teacher", "parity", "regression"),
)
"""The networks and data sets that rules are fitted on."""
SCORED = (
    ("silu", "tanh", "batch-norm", "depthwise", "recurrent", "dlgn", "frozen"),
    ("pixels", "evenness", "text", "waves"),
)
"""The networks and data sets that rules are scored on; nothing of them is used for fitting."""
OPTIMISERS = ("sgd", "momentum", "adam", "adamw")
DRAW_SEED = 19
CELLS = 84  # of each side: every network meets every data set three times
MOMENTS = 12
TRAINED, PROBED, HELD = 256, 128, 256
INPUTS, SIDE = 64, 8
MOMENTUM = 0.9
SMALLEST_MOVE = 1e-6  # relative: outputs that changed by less are rounding


@dataclass(frozen=True)
class Cell:
    """One training.

    ``rate``: for SGD in units of the largest stable step of the linearised network, for Adam the learning rate. ``alpha``: what
    is trained is alpha (f - f_0) under the loss divided by alpha^2 (Adam: rate / alpha); 0: f itself. ``decay``: weight decay of
    AdamW. ``batch``: samples of a step; 0: all. ``start``: "scratch", or "trained" on mirrored inputs before. ``schedule``:
    learning rate over the steps.
    """

    number: int
    net: str
    data: str
    optimiser: str
    rate: float
    alpha: float
    decay: float
    batch: int
    steps: int
    start: str
    schedule: str
    side: str
    seed: int = 0


def draw_cells(count: int = CELLS, seed: int = DRAW_SEED) -> list[Cell]:
    """``count`` cells of each side. Network and data set take turns, so that each comes up equally often."""
    cells = []
    for side, (nets, sets) in (("fit", FITTED), ("score", SCORED)):
        random = np.random.default_rng([seed, side == "score"])
        for number in range(count):
            optimiser = str(random.choice(OPTIMISERS))
            descent = optimiser in ("sgd", "momentum")
            rates = (0.003, 0.02, 0.1, 0.3, 0.6) if descent else (3e-5, 2e-4, 1e-3, 3e-3, 1e-2)
            alpha = float(random.choice([0.0, 0.5, 4.0, 16.0, 64.0, 512.0], p=[0.55, 0.06, 0.09, 0.1, 0.1, 0.1]))
            length = int(round(float(np.exp(random.uniform(math.log(100), math.log(3000)))), -1))
            net = nets[number % len(nets)]
            cells.append(
                Cell(
                    number,
                    net,
                    sets[number // len(nets) % len(sets)],
                    optimiser,
                    float(random.choice(rates, p=[0.15, 0.2, 0.25, 0.2, 0.2])),
                    0.0 if net in ("ntk", "frozen") else alpha,
                    float(random.choice([0.01, 0.1, 1.0])) if optimiser == "adamw" else 0.0,
                    int(random.choice([0, 64, 32])),
                    LONG.get(number, length),
                    "trained" if random.uniform() < 0.2 or net == "frozen" else "scratch",
                    str(random.choice(["constant", "cosine", "warm-up"], p=[0.6, 0.25, 0.15])),
                    side,
                    number,
                )
            )
    return cells


LONG = {14: 8000, 28: 20000, 49: 12000, 72: 6000}
"""Steps of the few long trainings, by number."""

# --- data: 64 inputs, samples to train on, to measure on, and to compare on --------------------------------------------------

Samples = tuple[Tensor, Tensor]
SETS = {
    "digits": ("cross-entropy", 10),
    "pixels": ("cross-entropy", 10),
    "evenness": ("one logit", 1),
    "teacher": ("cross-entropy", 4),
    "parity": ("squared", 1),
    "regression": ("squared", 3),
    "text": ("cross-entropy", 4),
    "waves": ("squared", 2),
}
"""Loss and number of outputs of each data set."""
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": F.cross_entropy,
    "squared": F.mse_loss,
    "one logit": F.binary_cross_entropy_with_logits,
}


@dataclass(frozen=True)
class Task:
    """Samples to ``train`` on, new ones for half of the ``probe`` set, and ``held`` ones on which the gap is measured."""

    train: Samples
    probe: Samples
    held: Samples
    loss: Callable[[Tensor, Tensor], Tensor]
    outputs: int


def make_task(name: str, seed: int) -> Task:
    """The data set of a cell: 256 samples to train on, 64 of them and 64 new ones as probe set, 256 held out."""
    kind, outputs = SETS[name]
    x, y = _samples(name, TRAINED + PROBED // 2 + HELD, seed)
    x = x.float()
    y = y if kind == "cross-entropy" else y.float().reshape(len(y), outputs)
    (x0, x1, x2), (y0, y1, y2) = (part.split((TRAINED, PROBED // 2, HELD)) for part in (x, y))
    probe = (torch.cat([x0[: PROBED // 2], x1]), torch.cat([y0[: PROBED // 2], y1]))
    return Task((x0, y0), probe, (x2, y2), LOSSES[kind], outputs)


def _samples(name: str, count: int, seed: int) -> Samples:
    random = stream(seed, "calibration", name)
    if name in ("digits", "pixels", "evenness"):
        images = load_images("digits")
        chosen = images.take(torch.randperm(len(images), generator=random)[:count])
        x = chosen.flat(standardise=name == "digits")
        classes = chosen.one_hot().argmax(1)
        return x, (classes % 2 if name == "evenness" else classes)
    if name == "text":
        return _text(count, random)
    x = torch.randn(count, INPUTS, generator=random)
    if name == "parity":
        return x, x[:, 0].sign() * x[:, 1].sign()
    first = torch.randn(INPUTS, 32, generator=random) / math.sqrt(INPUTS)
    second = torch.randn(32, SETS[name][1], generator=random) / math.sqrt(32)
    if name == "teacher":
        scores = F.relu(x @ first) @ second
        return x, (scores - scores.mean(0)).argmax(1)
    if name == "regression":
        return x, 20 + 5 * torch.tanh(2 * x @ first) @ second  # a scale and an offset of its own
    return x, torch.sin(3 * x @ first[:, : SETS[name][1]])  # waves


def _text(count: int, random: torch.Generator) -> Samples:
    """Eight of eight letters; does a come before b, and is there a c? Four classes."""
    rows = torch.arange(count)
    letters = torch.randint(2, SIDE, (count, SIDE), generator=random)
    places = torch.rand(count, SIDE, generator=random).argsort(1)
    letters[rows, places[:, 0]], letters[rows, places[:, 1]] = 0, 1
    first, third = (places[:, 0] < places[:, 1]).long(), (letters == 2).any(1).long()
    return F.one_hot(letters, SIDE).float().flatten(1), 2 * first + third


# --- networks on 64 inputs, read as a vector, as an 8 x 8 picture or as 8 tokens of 8 numbers --------------------------------


class Convolutions(nn.Module):
    """Two convolutions, the second one halving the picture, and a linear readout; with batch-norm or depthwise if wanted."""

    def __init__(self, outputs: int, kind: str, channels: int = 8) -> None:
        super().__init__()
        wide = 2 * channels
        if kind == "depthwise":
            self.first = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.SiLU())
            self.second = nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1, stride=2, groups=channels),
                nn.Conv2d(channels, wide, 1),
                nn.SiLU(),
            )
        else:
            norm = nn.BatchNorm2d if kind == "batch-norm" else lambda size: nn.Identity()
            self.first = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), norm(channels), nn.ReLU())
            self.second = nn.Sequential(nn.Conv2d(channels, wide, 3, padding=1, stride=2), norm(wide), nn.ReLU())
        self.readout = nn.Linear(wide * (SIDE // 2) ** 2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.second(self.first(x.unflatten(1, (1, SIDE, SIDE)))).flatten(1))


class Attention(nn.Module):
    """One block of attention and one of GELU units on 8 tokens that know their place; the mean token is read out."""

    places: Tensor

    def __init__(self, outputs: int, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(SIDE, width)
        self.places = nn.Parameter(0.5 * torch.randn(SIDE, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.units = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.readout = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.unflatten(1, (SIDE, SIDE))) + self.places
        parts = self.mix(self.norms[0](h)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [n, heads, tokens, width / heads]
        weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
        h = h + self.mixed((weights @ value).transpose(1, 2).flatten(2))
        return self.readout((h + self.units(self.norms[1](h))).mean(1))


class Recurrent(nn.Module):
    """A gated recurrent unit over 8 tokens; its last state is read out."""

    def __init__(self, outputs: int, width: int = 32) -> None:
        super().__init__()
        self.body, self.readout = nn.GRU(SIDE, width, batch_first=True), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.body(x.unflatten(1, (SIDE, SIDE)))[0][:, -1])


class Residual(nn.Module):
    """Two residual blocks of layer-norm and ReLU units."""

    def __init__(self, outputs: int, width: int = 64) -> None:
        super().__init__()
        self.embed, self.readout = nn.Linear(INPUTS, width), nn.Linear(width, outputs)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.readout(h)


class WideNTK(nn.Module):
    """Two wide layers of ReLUs with standard normal weights, each divided by the root of its fan-in at every pass."""

    def __init__(self, outputs: int, width: int = 512) -> None:
        super().__init__()
        sizes = (INPUTS, width, outputs)
        self.weights = nn.ParameterList(torch.randn(b, a) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.weights[0]) / math.sqrt(INPUTS)
        return F.linear(math.sqrt(2) * F.relu(h), self.weights[1]) / math.sqrt(self.weights[1].shape[1])


class OutputScale(nn.Module):
    """alpha (f - f_0), with f_0 the network at the start."""

    def __init__(self, model: nn.Module, alpha: float) -> None:
        super().__init__()
        self.model, self.start, self.alpha = model, copy.deepcopy(model).requires_grad_(False), alpha

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * (self.model(x) - self.start(x))


def _dense(outputs: int, activation: Callable[[], nn.Module], *, width: int = 96, depth: int = 2) -> nn.Module:
    layers: list[nn.Module] = []
    for number in range(depth):
        layers += [nn.Linear(width if number else INPUTS, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def _layer_norm_net(outputs: int) -> nn.Module:
    return _dense(outputs, lambda: nn.Sequential(nn.LayerNorm(96), nn.GELU()))


def _dlgn(outputs: int) -> nn.Module:
    return build(NetSpec(INPUTS, outputs, width=48, depth=3, gate=SoftGate(4.0)), seed=0)


NETS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda o: _dense(o, nn.ReLU),
    "gelu-layer-norm": _layer_norm_net,
    "deep-linear": lambda o: _dense(o, nn.Identity, width=64, depth=3),
    "conv": lambda o: Convolutions(o, "plain"),
    "attention": Attention,
    "ntk": WideNTK,
    "residual": Residual,
    "silu": lambda o: _dense(o, nn.SiLU),
    "tanh": lambda o: _dense(o, nn.Tanh, width=128),
    "batch-norm": lambda o: Convolutions(o, "batch-norm"),
    "depthwise": lambda o: Convolutions(o, "depthwise"),
    "recurrent": Recurrent,
    "dlgn": _dlgn,
    "frozen": lambda o: _dense(o, nn.ReLU),
}
"""Networks by family, made for a number of outputs; PyTorch's own starts unless said."""


def build_network(cell: Cell, task: Task) -> nn.Module:
    """The network of a cell at its start, drawn from the cell's seed, trained on mirrored inputs where the cell says so."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + cell.seed)
        model = NETS[cell.net](task.outputs)
    if cell.start == "trained":
        optimiser, (x, y) = torch.optim.Adam(model.parameters(), 1e-3), task.train
        for _ in range(150):
            optimiser.zero_grad()
            task.loss(model(x.flip(1)), y).backward()
            optimiser.step()
    if cell.net == "frozen":
        model.requires_grad_(False)
        list(model.children())[-1].requires_grad_(True)
    return OutputScale(model, cell.alpha) if cell.alpha else model


# --- measuring ---------------------------------------------------------------------------------------------------------------


def moments(steps: int) -> list[int]:
    """The steps after which a cell is measured: twelve, spread geometrically, the last one being the end."""
    return sorted({max(1, round(steps ** (number / (MOMENTS - 1)))) for number in range(MOMENTS)})


def rate_at(cell: Cell, step: int) -> float:
    """The learning rate of a step (from 0), relative to the largest."""
    if cell.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * step / cell.steps))
    return min(1.0, (step + 1) / (0.1 * cell.steps)) if cell.schedule == "warm-up" else 1.0


def make_optimiser(cell: Cell, model: nn.Module, task: Task) -> torch.optim.Optimizer:
    """The optimiser of a cell at its largest learning rate."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if cell.optimiser in ("adam", "adamw"):
        rate = cell.rate / (cell.alpha or 1.0)
        if cell.optimiser == "adam":
            return torch.optim.Adam(trained, rate)
        return torch.optim.AdamW(trained, rate, weight_decay=cell.decay)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    few, targets = task.train[0][:128], task.train[1][:128]
    jacobian = ModuleJacobian(model, names)
    for module in jacobian.base.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = module.running_var = None
    largest = 2 / largest_curvature(jacobian, few, targets, task.loss)
    momentum = MOMENTUM if cell.optimiser == "momentum" else 0.0
    return torch.optim.SGD(trained, cell.rate * largest * (1 - momentum), momentum=momentum)


def measure(cell: Cell, work: Work) -> Rows:
    """Train a cell and its twin; at every moment the truth and the cheap measures, column ``step``. NaN: training broke down."""
    rows, task = Rows(), make_task(cell.data, cell.seed)
    model = build_network(cell, task)
    optimiser = make_optimiser(cell, model, task)
    twin = linearised_twin(model, optimiser, task.loss, held=task.held)
    probe = Probe(model, twin, task.probe)
    rows.add_all(probe.first())
    order, when, (x, y) = BatchOrder(cell), set(moments(cell.steps)), task.train
    largest = [group["lr"] for group in optimiser.param_groups]
    simulated = simulate(cell, model, task, optimiser)
    rows.add_all(held_losses(model, twin, task), step=0)
    for step in range(cell.steps):
        taken = order.batch(step)
        for group, rate in zip(optimiser.param_groups, largest, strict=True):
            group["lr"] = rate * rate_at(cell, step)
        optimiser.zero_grad()
        loss = task.loss(model(x[taken]), y[taken])
        loss.backward()
        optimiser.step()
        reached = twin.step(x[taken], y[taken])
        if not (math.isfinite(float(loss.detach())) and math.isfinite(reached)):
            rows.add("gap", math.nan, step=step + 1)
            break
        if step + 1 in when:
            rows.add_all(held_losses(model, twin, task), step=step + 1)
            rows.add_all(probe.measure(), step=step + 1)
            if step + 1 in simulated:
                rows.add_all(compare_simulated(twin, simulated[step + 1]), step=step + 1)
            work.progress(step + 1, cell.steps)
    return rows


def held_losses(model: nn.Module, twin: LinearisedTwin, task: Task) -> dict[str, float]:
    """The truth at a moment: gap, size, held-out losses of network and twin, and their losses on the training samples."""
    point = twin.compare()
    x, y = task.train
    with torch.no_grad():
        trained = task.loss(twin.jacobian.at(dict(model.named_parameters()), ((x,), {})), y)
        linear = task.loss(twin(x), y)
    return {
        "gap": point.gap,
        "size": point.size,
        "held_loss": point.loss,
        "twin_held_loss": point.twin_loss,
        "train_loss": float(trained),
        "twin_train_loss": float(linear),
    }


class BatchOrder:
    """The samples of every step: all, or shuffled batches, each epoch in a new order."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.size = cell, cell.batch or TRAINED

    def batch(self, step: int) -> Tensor:
        """Numbers of the samples of a step."""
        epoch, place = divmod(step * self.size, TRAINED)
        order = torch.randperm(TRAINED, generator=stream(self.cell.seed, "order", epoch))
        return order[place : place + self.size]


class Probe:
    """The cheap measures on the probe set: what a scope can have at any time, from the start and the present parameters."""

    def __init__(self, model: nn.Module, twin: LinearisedTwin, samples: Samples) -> None:
        self.model, self.twin, (self.x, self.y) = model, twin, samples
        self.loss = twin.loss
        self.names = twin.jacobian.names
        self.start = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.before = self._outputs(self.start)
        self.size = math.sqrt(sum(float(self.start[name].square().sum()) for name in self.names))
        self.kernel = self._kernel()

    def first(self) -> dict[str, float]:
        """The probe's loss at the start."""
        return {"start_probe_loss": float(self.loss(self.before, self.y))}

    def measure(self) -> dict[str, float]:
        """All measures now. ``_train`` and ``_new``: on the probe's training samples and on its new ones alone."""
        with torch.no_grad():
            present = {name: p.detach() for name, p in self.model.named_parameters()}
            out, moves = self._outputs(present), {name: present[name] - self.start[name] for name in self.names}
            flat = torch.cat([moves[name].reshape(-1) for name in self.names])
            along = self.twin.jacobian.jvp(flat, ((self.x,), {}))[1]  # J_0 (theta - theta_0)
            went = out - self.before
            missed = went - along
            found = {"linearisation_error": _ratio(missed, went, self.before)}
            found["tangent_size"] = _ratio(along, went, self.before)
            found["tangent_cosine"] = float(F.cosine_similarity(along.flatten(), went.flatten(), dim=0))
            found["tangent_loss"] = float(self.loss(self.before + along, self.y))
            half = PROBED // 2
            for word, part in (("train", slice(0, half)), ("new", slice(half, None))):
                found[f"linearisation_error_{word}"] = _ratio(missed[part], went[part], self.before[part])
            found["parameter_motion"] = float(flat.norm()) / self.size
            found["probe_loss"] = float(self.loss(out, self.y))
            found["output_change"] = float(went.norm() / self.before.norm().clamp(min=1e-12))
        if (found_at_end := self._backward_error(present, flat, went)) is not None:
            found["backward_error"] = found_at_end
        kernel = self._kernel()
        if kernel is None or self.kernel is None:
            return found | self._fixed_statistics(present, moves)
        found["tangent_change"] = float(relative_change(kernel, self.kernel))
        found["tangent_distance"] = float(kernel_distance(kernel, self.kernel).clamp(min=0))
        found["tangent_growth"] = float(kernel.trace() / self.kernel.trace())
        return found | self._fixed_statistics(present, moves)

    def _outputs(self, values: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return self.twin.jacobian.at(values, ((self.x,), {}))

    def _backward_error(self, present: dict[str, Tensor], flat: Tensor, went: Tensor) -> float | None:
        """The error of the tangent at the present parameters, taken back to the start."""
        now = ModuleJacobian(self.twin.jacobian.base, self.names)
        with torch.no_grad():
            for name, value in present.items():
                now.base.get_parameter(name).copy_(value)
            try:
                back = now.jvp(flat, ((self.x,), {}))[1]
            except Unsupported:
                return None
        return _ratio(went - back, went, self.before)

    def _fixed_statistics(self, present: dict[str, Tensor], moves: dict[str, Tensor]) -> dict[str, float]:
        """For batch-norm: the error with the running statistics of the present network on both sides."""
        if not any(isinstance(module, nn.BatchNorm2d) for module in self.model.modules()):
            return {}
        fixed = ModuleJacobian(self.model, self.names)
        with torch.no_grad():
            out = fixed.at(present, ((self.x,), {}))
            for name in self.names:
                fixed.base.get_parameter(name).copy_(self.start[name])
            flat = torch.cat([moves[name].reshape(-1) for name in self.names])
            before, moved = fixed.jvp(flat, ((self.x,), {}))
        return {"linearisation_error_present_statistics": _ratio(out - before - moved, out - before, before)}

    def _kernel(self) -> Tensor | None:
        """The tangent kernel, trace over outputs, of every second sample of the probe set; ``None`` where it is refused.

        Batch-norm under a large output scale: rounding looks as if the samples of a batch met.
        """
        try:
            return tangent_kernel(self.model, self.x[::2], parameters=list(self.names)).double()
        except Unsupported:
            return None


def _ratio(missed: Tensor, went: Tensor, before: Tensor) -> float:
    """|missed| / |went|; 0 where nothing moved beyond rounding."""
    far = float(went.norm())
    return float(missed.norm()) / far if far > SMALLEST_MOVE * float(before.norm()) and far > 0 else 0.0


# --- the simulated twin ------------------------------------------------------------------------------------------------------


def simulate(
    cell: Cell, model: nn.Module, task: Task, optimiser: torch.optim.Optimizer
) -> dict[int, tuple[Tensor, float]]:
    """Outputs on held-out inputs and training loss of the twin in real time from the kernel at the start, by step.

    Only for SGD and momentum, and not with batch-norm.
    """
    if cell.optimiser in ("adam", "adamw") or cell.net == "batch-norm":
        return {}
    group: dict[str, Any] = optimiser.param_groups[0]
    rates = [group["lr"] * rate_at(cell, step) for step in range(cell.steps)]
    try:
        found = simulate_twin(
            model,
            task.train,
            task.loss,
            held=task.held[0],
            rates=rates,
            momentum=group["momentum"],
            record=moments(cell.steps),
        )
    except Unsupported:
        return {}
    return {step: (out, loss) for step, out, loss in zip(found.steps, found.outputs, found.losses, strict=True)}


def compare_simulated(twin: LinearisedTwin, simulated: tuple[Tensor, float]) -> dict[str, float]:
    """The gap by the simulated twin, and the simulated twin's losses."""
    outputs, loss = simulated
    after = twin.jacobian.at(dict(twin.model.named_parameters()), ((twin.held[0],), {})).detach()
    return {
        "simulated_gap": float((after - outputs).norm() / (after - twin.start).norm().clamp(min=1e-30)),
        "simulated_held_loss": twin.held_loss(outputs),
        "simulated_train_loss": loss,
    }
