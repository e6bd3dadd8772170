"""Planted features of six kinds: who finds them, from how many samples? Networks, DLGN, kernels, feature machines.

Every learner gets the same samples. Measured are its test accuracy and the share of the hidden subspace that the top directions
of its gradients contain. The papers have no numbered claim about this, so none is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import comb
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from numpy.typing import NDArray
from torch import Tensor, nn

from unlazy import plots
from unlazy.data.planted import Planted, subspace_overlap
from unlazy.kernels.agop import agop
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build
from unlazy.models.gates import SoftGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec, relu_spec
from unlazy.runtime import stream
from unlazy.studies.emergence.common import accuracy, solve_ridge
from unlazy.studies.study import Case, Figure, Results, Study, Work, make_cases, require_at_least_one
from unlazy.studies.table import Rows, Table
from unlazy.training.linearised import linearise
from unlazy.training.recursive_features import recursive_features, top_directions, typical_distance

PATTERNS = "structured patterns"
KINDS: dict[str, Planted] = {
    PATTERNS: Planted("patterns", 20, 5),
    "sparse parity": Planted("parity", 20, 3),
    "staircase": Planted("staircase", 20, 5),
    "single index": Planted("single-index", 20, 1),
    "multi-index": Planted("multi-index", 20, 4),
    "hierarchy of 2 levels": Planted("hierarchy", 32, 2, symbols=4),
    "hierarchy of 3 levels": Planted("hierarchy", 32, 3, symbols=4),
}


@dataclass(frozen=True)
class Settings:
    """Networks are trained by ``steps`` of AdamW on squared errors from PyTorch's default start, the same for every kind of data.
    ``held``: validation rows, to choose ridges, kernels and rounds on. ``sizes``: training samples. ``phase_*``: the phase
    diagram of structured patterns over k, gamma and samples."""

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
    sizes: tuple[int, ...] = (250, 500, 1_000, 2_000)
    phase_orders: tuple[int, ...] = (3, 5, 7)
    phase_gammas: tuple[float, ...] = (0.05, 0.125, 0.25, 0.4)
    phase_sizes: tuple[int, ...] = (250, 500, 1_000)

    def __post_init__(self) -> None:
        require_at_least_one(self, "tests", "held", "width", "depth", "steps", "batch", "rounds")


SMALL: dict[str, Any] = {"tests": 100, "held": 50, "width": 16, "gated_width": 8, "steps": 20, "batch": 20, "rounds": 1}
SMALL_PHASES: dict[str, Any] = {"phase_orders": (3,), "phase_gammas": (0.25, 0.4), "phase_sizes": (40, 80)}
DESK_PHASES: dict[str, Any] = {"phase_orders": (3, 5), "phase_gammas": (0.125, 0.4), "phase_sizes": (250, 1_000)}
SCALES = {
    "smoke": Settings(sizes=(40, 80), **SMALL, **SMALL_PHASES),
    "desk": Settings(sizes=(500, 2_000), tests=2_000, held=500, **DESK_PHASES),
    "paper": Settings(),
}
SEEDS = {"smoke": 1, "desk": 1, "paper": 6}
USUAL_SEEDS = 3  # at most; hierarchies get all seeds: recipes were chosen on the first three only

LEARNERS, PHASES, SPAN = "learners", "phases", "span"
"""Questions. *learners*: all learners on every kind of data. *phases*: some learners on structured patterns, over their order (k)
and gamma. *span*: which directions the network finds in structured patterns."""
COLUMNS = ("question", "data", "order", "gamma", "samples")


def cases(settings: Settings, seeds: Sequence[int]) -> list[Case]:
    """Every kind of data at every size; the phase diagram; the network's directions at the largest size."""
    orders, gammas, sizes = settings.phase_orders, settings.phase_gammas, settings.phase_sizes
    usual = seeds[:USUAL_SEEDS]
    places = [
        *(
            (LEARNERS, name, None, None, n, seed)
            for name, n in product(KINDS, settings.sizes)
            for seed in (seeds if KINDS[name].kind == "hierarchy" else usual)
        ),
        *((PHASES, PATTERNS, *place) for place in product(orders, gammas, sizes, usual)),
        *((SPAN, PATTERNS, None, None, settings.sizes[-1], seed) for seed in usual),
    ]
    others = ("sizes", "phase_orders", "phase_gammas", "phase_sizes")
    return make_cases([dict(zip((*COLUMNS, "seed"), place, strict=True)) for place in places], settings, without=others)


def planted_data(case: Case) -> Planted:
    """The distribution of a case, with hidden directions of its seed."""
    kind = replace(KINDS[case.data], seed=case.seed)
    return kind if case.order is None else replace(kind, order=case.order, mixture=1 - 2 * case.gamma)


# --- measuring ---------------------------------------------------------------------------------------

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Ridges of the linearised network, in units of the mean eigenvalue of its kernel; the best on validation rows is used."""
GRADIENT_ROWS = 500
"""Rows on which gradients by inputs are averaged."""


@dataclass(frozen=True)
class Sample:
    """Training, validation (``held``) and test rows, in float32; and the hidden directions."""

    x: Float[Tensor, "n d"]
    y: Float[Tensor, " n"]
    held_x: Float[Tensor, "h d"]
    held_y: Float[Tensor, " h"]
    test_x: Float[Tensor, "t d"]
    test_y: Float[Tensor, " t"]
    hidden: Float[Tensor, "d r"]

    @classmethod
    def draw(cls, data: Planted, n: int, held: int, tests: int) -> Sample:
        """So many rows of each kind."""
        parts = (("train", n), ("held", held), ("test", tests))
        rows = [value.float() for part, count in parts for value in data.draw(count, part)]
        return cls(*[*rows, data.directions()])

    def score(self, output: Float[Tensor, " t"], product: Float[Tensor, "d d"]) -> dict[str, float]:
        """Test accuracy, from test outputs, and the share of the hidden subspace found, from the AGOP."""
        return {"accuracy": accuracy(output, self.test_y), "recovered": share_recovered(product, self.x, self.hidden)}


def measure(case: Case, work: Work) -> Rows:
    """Test accuracy and share of the hidden subspace found, for every learner that the question asks for."""
    rows, data = Rows(), planted_data(case)
    sample = Sample.draw(data, case.samples, case.held, case.tests)
    specs = {"network": relu_spec(data.inputs, width=case.width, depth=case.depth)}
    if case.question == LEARNERS:
        specs["dlgn"] = NetSpec(data.inputs, width=case.gated_width, depth=case.gated_depth, gate=SoftGate(4.0))
    for name, spec in specs.items():
        net = train_network(build(spec, seed=case.seed), sample, case)
        product = agop(net, sample.x[:GRADIENT_ROWS])
        rows.add_all(sample.score(outputs_of(net, sample.test_x), product), learner=name)
        if case.question == SPAN:
            patterns = data.patterns()
            span = patterns.dictionary()[:, patterns.relevant_set()]
            rows.add("span_recovered", share_recovered(product, sample.x, span), learner=name)
    if case.question != SPAN:
        measure_linearised(build(specs["network"], seed=case.seed), sample, rows)
        measure_feature_machine(case.rounds, sample, rows)
    if case.question == LEARNERS:
        measure_kernel(sample, rows)
    return rows


def train_network(net: GatedNet, sample: Sample, case: Case) -> GatedNet:
    """AdamW on the squared error, rows drawn with replacement."""
    optimiser = torch.optim.AdamW(net.parameters(), lr=case.rate, weight_decay=case.decay)
    generator = stream(case.seed, "zoo batches")
    for _ in range(case.steps):
        rows = torch.randint(0, len(sample.y), (case.batch,), generator=generator)
        loss = (net(sample.x[rows])[:, 0] - sample.y[rows]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net


def outputs_of(model: Callable[[Tensor], Tensor], x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """The first output of every row, without gradients."""
    with torch.no_grad():
        return model(x)[:, 0].float()


def share_recovered(product: Float[Tensor, "d d"], x: Float[Tensor, "n d"], hidden: Float[Tensor, "d r"]) -> float:
    """The share of the hidden subspace in the top directions of an AGOP. Directions in which no input varies are left out.

    The one-hot tokens of a hierarchy add up to a constant. Along such a direction training does not change the gradient.
    """
    centred = x.double() - x.double().mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    varying = vectors[:, values > 1e-9 * values[-1]]
    inside = varying @ (varying.T @ product.double() @ varying) @ varying.T
    return subspace_overlap(top_directions(inside, hidden.shape[1]), hidden)


def measure_linearised(net: GatedNet, sample: Sample, rows: Rows) -> None:
    """Ridge regression with the tangent kernel of the start; its ridge is chosen on validation rows."""
    kernel = tangent_kernel(net, sample.x).double()
    rest, mean = sample.y - outputs_of(net, sample.x), float(kernel.trace()) / len(sample.y)
    held, start = tangent_kernel(net, sample.held_x, sample.x), outputs_of(net, sample.held_x)
    tried = [solve_ridge(kernel, rest.double(), ridge * mean).float() for ridge in RIDGES]
    best = max(tried, key=lambda coefficients: accuracy(start + held @ coefficients, sample.held_y))
    line = linearised_solution(net, sample.x, best)
    found = sample.score(outputs_of(line, sample.test_x), agop(line, sample.x[:GRADIENT_ROWS]))
    rows.add_all(found, learner="linearised")


def linearised_solution(net: GatedNet, x: Float[Tensor, "n d"], coefficients: Float[Tensor, " n"]) -> nn.Module:
    """The function f_0 + K(., x) coefficients as a module: the linearised network, displaced by J(x)^T coefficients."""
    line, parameters = linearise(net), dict(net.named_parameters())
    chosen = [parameters[name] for name in line.names]
    pulls = torch.autograd.grad((net(x)[:, 0] * coefficients).sum(), chosen)
    with torch.no_grad():
        line.displacement.copy_(torch.cat([pull.flatten() for pull in pulls]))
    return line


def measure_feature_machine(rounds: int, sample: Sample, rows: Rows) -> None:
    """The plain Laplace kernel (round 0), and the feature machine at its best round on validation rows."""
    found, held = [], []
    for machine in recursive_features(sample.x, sample.y[:, None], rounds=rounds):
        found.append(sample.score(machine(sample.test_x)[:, 0], machine.agop(sample.x[:GRADIENT_ROWS])))
        held.append(accuracy(machine(sample.held_x)[:, 0], sample.held_y))
    best = int(np.argmax(held))
    rows.add_all(found[0], learner="laplace")
    rows.add_all(found[best] | {"round": best}, learner="machine")


SHAPES = ("laplace", "gaussian")
WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""In units of the typical distance of two rows."""
KERNEL_RIDGES = (1e-4, 1e-2, 1e-1, 1.0)


def kernel_matrix(
    shape: str, width: float, z: Float64[Tensor, "m d"], x: Float64[Tensor, "n d"]
) -> Float64[Tensor, "n m"]:
    """exp(-|x - z| / width), or exp(-|x - z|^2 / (2 width^2))."""
    distances = torch.cdist(x, z) / width
    return (-distances).exp() if shape == "laplace" else (-distances.square() / 2).exp()


def measure_kernel(sample: Sample, rows: Rows) -> None:
    """Kernel ridge regression with the shape, width and ridge that are best on validation rows."""
    x, y, held, test = (value.double() for value in (sample.x, sample.y, sample.held_x, sample.test_x))
    typical, tried = typical_distance(x), []
    for shape, width in product(SHAPES, WIDTHS):
        kernel = partial(kernel_matrix, shape, width * typical, x)
        gram, across = kernel(x), kernel(held)
        for ridge in KERNEL_RIDGES:
            coefficients = solve_ridge(gram, y, ridge)
            right = accuracy(across @ coefficients, sample.held_y)
            tried.append((right, kernel, coefficients, {"width": width, "ridge": ridge}))
    _, kernel, coefficients, chosen = max(tried, key=itemgetter(0))
    probed = x[:GRADIENT_ROWS].clone().requires_grad_()
    (pulls,) = torch.autograd.grad((kernel(probed) @ coefficients).sum(), probed)
    rows.add_all(sample.score(kernel(test) @ coefficients, pulls.T @ pulls / len(probed)), learner="kernel")
    rows.add_all(chosen, learner="kernel", shape=kernel.args[0])


# --- figures -----------------------------------------------------------------------------------------

LINES = {
    "network": ("ReLU network", "blue", "o-"),
    "dlgn": ("DLGN", "purple", "s-"),
    "machine": ("feature machine (RFM)", "green", "D-"),
    "linearised": ("linearised network", "orange", "^--"),
    "laplace": ("Laplace kernel", "red", "v--"),
    "kernel": ("tuned kernel (Laplace or Gaussian)", "grey", "X--"),
}
"""Name, colour and line of every learner; full lines learn features, broken ones have them fixed."""
COUNT = "count"
PHASE_TITLES = {
    "network": "ReLU network",
    "machine": "feature machine\n(RFM)",
    "linearised": "linearised\nnetwork",
    "laplace": "Laplace kernel",
    COUNT: "best threshold on\nthe count (linear)",
}
ENOUGH = 0.9  # the accuracy whose cost in samples is asked for


def samples_needed(table: Table, data: str, learner: str) -> NDArray[np.float64]:
    """Per seed the least size tried from which on the test accuracy stays at 90 % or more; infinite: none of them."""
    sizes, values = table.series("accuracy", over="samples", question=LEARNERS, data=data, learner=learner)
    stays = np.logical_and.accumulate((values >= ENOUGH)[::-1], axis=0)[::-1]
    return np.where(stays.any(0), sizes[stays.argmax(0)], np.inf)


def accuracy_figure(results: Results) -> plots.Figure:
    """Test accuracy against samples, one panel a kind of data; full lines learn features, broken ones have them fixed."""
    figure, panels = _draw_against_samples(results, "accuracy", "test accuracy", (0.45, 1.02))
    for axis in panels.values():
        axis.axhline(ENOUGH, color=plots.COLOURS["grey"], linestyle=":", linewidth=1)
    return figure


def recovered_figure(results: Results) -> plots.Figure:
    """Share of the hidden subspace that the top directions of the gradients hold, against samples."""
    figure, panels = _draw_against_samples(results, "recovered", "hidden subspace found", (-0.02, 1.04))
    for name, axis in panels.items():
        data = KINDS[name]
        if data.kind == "hierarchy" and 2**data.order == data.tokens:  # inputs vary in the hidden subspace alone
            axis.text(0.5, 0.5, "every input counts:\nnothing to find", ha="center", transform=axis.transAxes)
    return figure


def _draw_against_samples(
    results: Results, quantity: str, label: str, limits: tuple[float, float]
) -> tuple[plots.Figure, dict[str, plots.Axes]]:
    """A quantity against samples, one panel a kind of data: medians, and the range of all seeds as a band."""
    sizes, table = results.settings.sizes, results.table.where(question=LEARNERS)
    figure, axes = plots.grid(2, 4, (2.7, 2.3), sharex=True, sharey=True)
    panels = dict(zip(KINDS, axes.flat, strict=False))
    for name, axis in panels.items():
        for learner, (title, colour, line) in LINES.items():
            _, values = table.series(quantity, over="samples", data=name, learner=learner)
            shade = plots.COLOURS[colour]
            axis.plot(sizes, np.median(values, 1), line, color=shade, label=title, markersize=4, linewidth=1.4)
            axis.fill_between(sizes, values.min(1), values.max(1), color=shade, alpha=0.1, linewidth=0)
        axis.set(title=name, xscale="log")
        axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axis.minorticks_off()
        axis.tick_params(labelbottom=True)
    axes[1, 3].set_axis_off()
    axes[1, 3].legend(*axes[0, 0].get_legend_handles_labels(), loc="center", frameon=False)
    for axis in axes.flat[3:7]:
        axis.set_xlabel("samples")
    for row in axes:
        row[0].set_ylabel(label)
    axes[0, 0].set_ylim(limits)
    return figure, panels


def counting_accuracy(order: int, gamma: float) -> float:
    """The accuracy of the best threshold on the count of relevant patterns, a linear rule, where labels are the count's parity.

    >>> counting_accuracy(5, 0.25) == 27 / 32
    True
    """
    coins = [(1 - 2 * gamma) * comb(order, count) / 2**order for count in range(order + 1)]
    mass = [chance + (gamma if count in (0, order) else 0) for count, chance in enumerate(coins)]
    signed = np.array([chance if count % 2 else -chance for count, chance in enumerate(mass)])
    above = [signed[cut:].sum() - signed[:cut].sum() for cut in range(order + 2)]
    return float((1 + np.abs(above).max()) / 2)


def phases_figure(results: Results) -> plots.Figure:
    """Mean test accuracy; the last row is the best linear rule."""
    settings, table = results.settings, results.table.where(question=PHASES, quantity="accuracy")
    orders, gammas, sizes = settings.phase_orders, settings.phase_gammas, settings.phase_sizes
    figure, axes = plots.grid(len(PHASE_TITLES), len(orders), (2.9, 1.45), sharex=True, sharey=True)
    for line, (learner, title) in zip(axes, PHASE_TITLES.items(), strict=True):
        line[0].set_ylabel(f"{title}\n\ngamma", fontsize=9)
        for axis, order in zip(line, orders, strict=True):
            if learner == COUNT:
                values = np.array([[counting_accuracy(order, gamma)] * len(sizes) for gamma in gammas])
            else:
                here = table.where(order=order, learner=learner)
                values = np.array([[here.where(gamma=g, samples=n).values.mean() for n in sizes] for g in gammas])
            image = axis.imshow(values, vmin=0.5, vmax=1, cmap="cividis", origin="lower", aspect="auto")
            for place, value in np.ndenumerate(values):
                shade = "black" if value > 0.75 else "white"
                axis.text(place[1], place[0], f"{value:.2f}", ha="center", va="center", color=shade, fontsize=8)
            axis.set_xticks(range(len(sizes)), [f"{size:g}" for size in sizes])
            axis.set_yticks(range(len(gammas)), [f"{gamma:g}" for gamma in gammas])
            axis.tick_params(length=0)
    for axis, order in zip(axes[0], orders, strict=True):
        axis.set_title(f"parity of k = {order} patterns")
    for axis in axes[-1]:
        axis.set_xlabel("samples")
    figure.colorbar(image, ax=axes, label="test accuracy", shrink=0.5)
    return figure


STUDY = Study(
    name="zoo",
    paper="emergence",
    scales=SCALES,
    seeds=SEEDS,
    columns=COLUMNS,
    cases=cases,
    measure=measure,
    figures=(
        Figure("zoo", "Accuracy on planted features", accuracy_figure),
        Figure("recovered", "Which hidden directions are found", recovered_figure),
        Figure("phases", "Structured patterns over k, gamma and samples", phases_figure),
    ),
)
