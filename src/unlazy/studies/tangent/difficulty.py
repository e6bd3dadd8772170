"""The difficulty study: some labels are wrong; do points with wrong labels bend the kernel most?

One label in twenty is replaced by another class. Every point gets scores: how much it bends the kernel, by the structured
solution at the start (no training), and by the tangent features of a training averaged along the line and along the real
trajectory; and, beside these, its loss and the norm of its loss's gradient, at the end, early, and (gradient) at the start.
Trainings are on the squared error, as in the paper, and on the cross-entropy, until the wrong labels are learned. Scored
by the area under the curve: how often a wrong label ranks above a right one. No claim of the paper is judged here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from unlazy import plots
from unlazy.claims.verdict import Row, summary
from unlazy.data.dataset import Dataset
from unlazy.data.images import load_images
from unlazy.kernels.averaged import states_of
from unlazy.kernels.tangent import tangent_diagonal
from unlazy.models.build import build
from unlazy.models.spec import Init, NetSpec, relu_spec
from unlazy.runtime import require, short_hash, stream
from unlazy.store import Run
from unlazy.studies.registry import settings_of
from unlazy.studies.results import Progress, conclude, provenance_of, table_of
from unlazy.studies.tangent.images import centred_units
from unlazy.theory.adaptive import Alternating
from unlazy.theory.difficulty import Difficulty, difficulty
from unlazy.training.ensemble import Member
from unlazy.training.fit import LOSSES as FUNCTIONS
from unlazy.training.fit import Recipe, fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STUDY = "difficulty"
CLASSES = 10
RATE, BATCH = 1e-3, 32
LOSSES = ("squared", "cross-entropy")
SCORES = {
    "bending_solved": "kernel bending, solved at the start (no training)",
    "bending_line": "kernel bending, averaged along the line",
    "bending_trajectory": "kernel bending, averaged along the trajectory",
    "bending_end": "tangent kernel at the end over the start",
    "kernel_start": "tangent kernel at the start",
    "gradient_start": "gradient norm at the start",
    "loss_early": "loss, early",
    "gradient_early": "gradient norm, early",
    "loss_end": "loss at the end",
    "gradient_end": "gradient norm at the end",
}


@dataclass(frozen=True)
class Settings:
    """Data sets, images of each, the share of wrong labels, the network, its training, points on each piece of a way.

    ``early``: the epoch at which early scores are taken; ``rounds``: of the structured solver, at most.
    """

    seeds: int
    data: tuple[str, ...] = ("digits", "mnist")
    images: int = 200
    wrong: float = 0.05
    width: int = 64
    epochs: int = 200
    early: int = 8
    points: int = 12
    rounds: int = 10

    def __post_init__(self) -> None:
        for name in ("seeds", "images", "width", "epochs", "early", "points", "rounds"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, f"{name} must be a whole number >= 1, got {value!r}.")
        require(self.early < self.epochs, f"early scores are taken before the end: {self.early} of {self.epochs}.")
        require(0 < self.wrong < 1 and self.flips() >= 1, f"no label is wrong: {self.wrong!r} of {self.images}.")

    def flips(self) -> int:
        return round(self.wrong * self.images)

    def kept(self) -> tuple[int, ...]:
        """Epochs whose networks are kept for the trajectory and the early scores."""
        doubling = (2**power for power in range(self.epochs.bit_length()))
        return tuple(sorted({self.early, *(epoch for epoch in doubling if epoch < self.epochs)}))

    def spec(self, inputs: int) -> NetSpec:
        return relu_spec(inputs, CLASSES, width=self.width, depth=2, init=Init("he"))


SCALES = {
    "smoke": Settings(seeds=2, data=("digits",), images=40, width=32, epochs=4, early=2, points=2, rounds=2),
    "desk": Settings(seeds=5, images=100, rounds=5),
    "paper": Settings(seeds=5),
}


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Train what is missing under ``runs``, then write ``results/difficulty/SCALE.json`` and its figures."""
    settings = settings_of(SCALES, scale, seeds)
    found, trained, shown = {}, [], {}
    total = len(settings.data) * settings.seeds
    for place, data in enumerate(settings.data):
        x, labels = images(settings, data)
        tables = []
        for seed in range(settings.seeds):
            tables.append(solved(settings, x, labels, seed))
            progress("solutions", place * settings.seeds + seed + 1, total)
        for loss in LOSSES:
            run = train(settings, data, loss, x, labels, runs, scale)
            trained.append(run)
            found[f"{data}, {loss}"], shown[f"{data}, {loss}"] = measure(settings, run, loss, x, labels, tables)
            progress(f"{loss} trainings", place + 1, len(settings.data))
    table = table_of(STUDY, scale, asdict(settings), provenance_of(trained))
    table["areas"] = found
    table["summaries"] = {
        task: {name: summary(words, columns[name]) for name, words in SCORES.items()} for task, columns in found.items()
    }
    return conclude(table, claims, lambda table: {"areas": areas(table), "hardest": hardest(shown)}, results, progress)


def images(settings: Settings, data: str) -> tuple[Float[Tensor, "n d"], Int64[Tensor, "n"]]:
    """The first images, each minus its mean and of length 1, and their true classes."""
    found = load_images(data)
    require(settings.images <= len(found), f"{data} has {len(found)} images, not {settings.images}.")
    return centred_units(found.flat()[: settings.images]), found.labels[: settings.images]


def flipped(labels: Int64[Tensor, "n"], count: int, seed: int) -> tuple[Int64[Tensor, "n"], Int64[Tensor, "k"]]:
    """Labels of which ``count`` are another class, and which."""
    random = stream(seed, "wrong labels")
    chosen = torch.randperm(len(labels), generator=random)[:count]
    turned = labels.clone()
    turned[chosen] = (labels[chosen] + torch.randint(1, CLASSES, (count,), generator=random)) % CLASSES
    return turned, chosen


def train(settings: Settings, data: str, loss: str, x: Tensor, labels: Tensor, runs: Path, scale: str) -> Run:
    """All seeds as one stack, each with its own wrong labels, by Adam."""
    given = torch.stack([flipped(labels, settings.flips(), seed)[0] for seed in range(settings.seeds)])
    members = tuple(Member(seed, RATE) for seed in range(settings.seeds))
    recipe = Recipe(
        settings.spec(x.shape[1]),
        members,
        settings.epochs,
        batch=BATCH,
        loss=loss,
        checkpoint_epochs=settings.epochs,
        checkpoints_at=settings.kept(),
    )
    named = Dataset(data, x, F.one_hot(given, CLASSES).float(), options={"wrong": settings.flips()})
    folder = runs / STUDY / f"{data}-{loss}-{short_hash(recipe.to_dict(named, []))}"
    return fit(recipe, named, [], folder, study=STUDY, scale=scale)


def solved(settings: Settings, x: Tensor, labels: Tensor, seed: int) -> Difficulty:
    """Without any training: the structured solution for the given labels, at the seed's start."""
    net = build(settings.spec(x.shape[1]), seed=seed)
    given = flipped(labels, settings.flips(), seed)[0]
    return difficulty(net, x, given, search=Alternating(rounds=settings.rounds))


def measure(
    settings: Settings, run: Run, loss: str, x: Tensor, labels: Tensor, solutions: list[Difficulty]
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Areas under the curve by score, one a seed; and for the figure the first seed's table."""
    saved = [run.checkpoint(line.step) for line in run.lines if line.checkpoint is not None]
    early = 1 + settings.kept().index(settings.early)
    columns: dict[str, list[float]] = {name: [] for name in (*SCORES, "fitted_wrong", "fitted_right")}
    shown: dict[str, Any] = {}
    for seed, solution in enumerate(solutions):
        given, chosen = flipped(labels, settings.flips(), seed)
        net, wrong = build(settings.spec(x.shape[1])), torch.zeros(len(x), dtype=torch.bool)
        wrong[chosen] = True
        scores, table, right = scores_of(settings, net, states_of(saved, seed), early, loss, x, given)
        scores |= {"bending_solved": solution.bending, "kernel_start": solution.start}
        for name, values in scores.items():
            columns[name].append(area_under_curve(values.double().numpy(), wrong.numpy()))
        for name, inside in (("fitted_wrong", wrong), ("fitted_right", ~wrong)):
            columns[name].append(float(right[inside].double().mean()))
        if seed == 0:
            shown = {"table": table, "x": x, "given": given, "labels": labels}
    return columns, shown


def scores_of(
    settings: Settings,
    net: nn.Module,
    states: list[dict[str, Tensor]],
    early: int,
    loss: str,
    x: Tensor,
    given: Tensor,
) -> tuple[dict[str, Tensor], Difficulty, Tensor]:
    """Every score of every point; the trajectory's table; and which points the trained network gives their label."""
    scores = {}
    for when, state in (("start", states[0]), ("early", states[early]), ("end", states[-1])):
        net.load_state_dict(state)
        scores[f"loss_{when}"], scores[f"gradient_{when}"] = losses_and_norms(net, loss, x, given)
    del scores["loss_start"]
    scores["bending_line"] = difficulty(net, x, given, start=states[0], points=settings.points).bending
    pieces = max(2, settings.points // (len(states) - 1))
    along = difficulty(net, x, given, start=states[:-1], points=pieces)
    scores["bending_trajectory"] = along.bending
    scores["bending_end"] = tangent_diagonal(net, x).double() / along.start
    with torch.no_grad():
        right = net(x).argmax(1) == given
    return scores, along, right


def losses_and_norms(net: nn.Module, loss: str, x: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of every point, and the norm of its gradient by all parameters."""
    targets = F.one_hot(given, CLASSES).float()
    numbers = {name: parameter.detach() for name, parameter in net.named_parameters()}

    def of_one(at: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return FUNCTIONS[loss](functional_call(net, at, one[None]), target[None])

    with torch.no_grad():
        losses = vmap(of_one, (None, 0, 0))(numbers, x, targets)
    found = vmap(grad(of_one), (None, 0, 0))(numbers, x, targets)
    return losses, torch.stack([g.flatten(1).square().sum(1) for g in found.values()]).sum(0).sqrt()


def area_under_curve(scores: NDArray[np.float64], wrong: NDArray[np.bool_]) -> float:
    """How often a wrong label has a larger score than a right one, ties counted half."""
    pairs = np.sign(scores[wrong][:, None] - scores[~wrong][None, :])
    return float((pairs.mean() + 1) / 2)


def claims(table: Mapping[str, Any]) -> list[Row]:
    """None: the paper makes no claim about wrong labels."""
    return []


# --- drawing ---------------------------------------------------------------------------------------


def areas(table: Mapping[str, Any]) -> Figure:
    """One dot a seed, a bar at the median, a row a score."""
    found = table["areas"]
    figure, axes = plots.grid(1, len(found), (2.6, 3.4), sharey=True)
    names = list(SCORES)[::-1]
    for axis, (task, columns) in zip(axes[0], found.items(), strict=True):
        for place, name in enumerate(names):
            colour = plots.COLOURS["blue" if name.startswith("bending") else "grey"]
            axis.plot(columns[name], [place] * len(columns[name]), "o", markersize=3, color=colour, alpha=0.5)
            axis.plot([np.median(columns[name])] * 2, [place - 0.35, place + 0.35], color=colour, linewidth=2.5)
        axis.axvline(0.5, color=plots.COLOURS["black"], linewidth=0.6)
        axis.set(title=task, xlabel="area under the curve", xlim=(0, 1.03), xticks=(0, 0.5, 1))
    axes[0, 0].set_yticks(range(len(names)), [SCORES[name] for name in names])
    return figure


def hardest(shown: Mapping[str, Any], count: int = 10) -> Figure:
    """The images that bend the kernel most (trajectory, first seed); wrong labels in red."""
    figure, axes = plots.grid(len(shown), count, (0.85, 1.15))
    for row, (task, one) in zip(axes, shown.items(), strict=True):
        side = int(one["x"].shape[1] ** 0.5)
        for axis, point in zip(row, one["table"].hardest(count).tolist(), strict=True):
            axis.imshow(one["x"][point].reshape(side, side).numpy(), cmap="gray_r", interpolation="nearest")
            true, given = int(one["labels"][point]), int(one["given"][point])
            words = f"{given}, is {true}" if true != given else str(given)
            axis.set_title(words, color=plots.COLOURS["red" if true != given else "black"], fontsize=8)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(task, fontsize=7)
    figure.suptitle(
        "hardest points by kernel bending (label, and what the image is where the label is wrong)", fontsize=9
    )
    return figure
