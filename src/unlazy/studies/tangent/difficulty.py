"""Do wrongly labelled points bend the kernel most? Scored beside loss and gradient norm.

One label in twenty is replaced by another class. Every point gets several scores. Some say how much it bends the kernel: by the
structured solution at the start (no training), or by the tangent features of a training, averaged along the line or along the
real trajectory. The others are its loss and the norm of its loss's gradient, at the end, early, and (gradient) at the start.
Trainings are on the squared error, as in the paper, and on the cross-entropy, until the wrong labels are learned. A score is
judged by the area under the curve: how often a wrong label ranks above a right one. No claim of the paper is judged here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from unlazy import plots
from unlazy.data.dataset import Dataset
from unlazy.data.images import load_images
from unlazy.kernels.averaged_tangents import member_states
from unlazy.kernels.tangent import tangent_diagonal
from unlazy.models.build import build
from unlazy.models.spec import Init, NetSpec, relu_spec
from unlazy.runtime import require, stream
from unlazy.store import Run
from unlazy.studies.study import Case, Figure, Results, Settings, Study, Work, make_cases
from unlazy.studies.table import Rows
from unlazy.studies.trainings import Training, centred_units
from unlazy.theory.adaptive_solutions import AlternatingSearch
from unlazy.theory.difficulty import Difficulty, difficulty
from unlazy.training.ensemble import Member
from unlazy.training.fit import LOSSES as FUNCTIONS
from unlazy.training.fit import Recipe

# --- settings and cases --------------------------------------------------------------------------------------

# data: sets of images; images: how many of each; wrong: share of wrong labels; early: the epoch of early scores;
# points: on each piece of a path; rounds: the most rounds of the structured solver
PAPER = {
    "data": ("digits", "mnist"),
    "images": 200,
    "wrong": 0.05,
    "width": 64,
    "epochs": 200,
    "early": 8,
    "points": 12,
    "rounds": 10,
}
SMOKE = {"data": ("digits",), "images": 40, "width": 32, "epochs": 4, "early": 2, "points": 2, "rounds": 2}
SCALES = {"smoke": PAPER | SMOKE, "desk": PAPER | {"images": 100, "rounds": 5}, "paper": PAPER}
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


def cases(settings: Settings, seeds: Sequence[int]) -> list[Case]:
    """One case a data set. Each seed has its own wrong labels, and networks trained on them with both losses."""
    images, epochs, early = settings.images, settings.epochs, settings.early
    require(0 < early < epochs, f"early scores are taken before the end: {early} of {epochs}.")
    require(0 < wrong_count(settings) < images, f"no label is wrong, or all are: {settings.wrong!r} of {images}.")
    return make_cases([{"data": data, "seeds": tuple(seeds)} for data in settings.data], settings)


def wrong_count(case: Case) -> int:
    """How many labels are wrong."""
    return round(case.wrong * case.images)


def saved_epochs(case: Case) -> tuple[int, ...]:
    """Epochs whose networks are saved for the trajectory and the early scores: 1, 2, 4, ... and the early one."""
    doubling = (2**power for power in range(case.epochs.bit_length()))
    return tuple(sorted({case.early, *(epoch for epoch in doubling if epoch < case.epochs)}))


def load_points(case: Case, work: Work) -> tuple[Float[Tensor, "n d"], Int64[Tensor, "n"], Int64[Tensor, "s n"]]:
    """The first images, each minus its mean and of length 1; their true classes; and the given labels of every seed."""
    found = load_images(case.data, folder=work.data)
    require(case.images <= len(found), f"{case.data} has {len(found)} images, not {case.images}.")
    labels = found.labels[: case.images]
    given = torch.stack([with_wrong_labels(labels, wrong_count(case), seed) for seed in case.seeds])
    return centred_units(found.flat()[: case.images]), labels, given


def with_wrong_labels(labels: Int64[Tensor, "n"], count: int, seed: int) -> Int64[Tensor, "n"]:
    """The labels, with ``count`` of them changed to another class."""
    random = stream(seed, "wrong labels")
    chosen = torch.randperm(len(labels), generator=random)[:count]
    turned = labels.clone()
    turned[chosen] = (labels[chosen] + torch.randint(1, CLASSES, (count,), generator=random)) % CLASSES
    return turned


def spec_of(case: Case, x: Tensor) -> NetSpec:
    """The network of a case."""
    return relu_spec(x.shape[1], CLASSES, width=case.width, depth=2, init=Init("he"))


def make_training(case: Case, loss: str, x: Tensor, given: Tensor) -> Training:
    """The training of all seeds as one stack, each with its own wrong labels, by Adam."""
    recipe = Recipe(
        spec_of(case, x),
        tuple(Member(seed, RATE) for seed in case.seeds),
        case.epochs,
        batch=BATCH,
        loss=loss,
        checkpoint_epochs=case.epochs,
        checkpoints_at=saved_epochs(case),
    )
    data = Dataset(case.data, x, F.one_hot(given, CLASSES).float(), options={"wrong": wrong_count(case)})
    return Training(f"{case.data}-{loss}", recipe, data, ())


# --- measuring -----------------------------------------------------------------------------------------------


def measure(case: Case, work: Work) -> Rows:
    """Areas under the curve by loss and score, and the shares of wrong and of right labels that were learned."""
    rows, (x, labels, given), search = Rows(), load_points(case, work), AlternatingSearch(rounds=case.rounds)
    starts = [build(spec_of(case, x), seed=seed) for seed in case.seeds]
    solutions = [difficulty(net, x, own, search=search) for net, own in zip(starts, given, strict=True)]
    for loss in LOSSES:
        run = make_training(case, loss, x, given).run(work)
        for member, seed in enumerate(case.seeds):
            wrong = given[member] != labels
            scores, right = score_points(case, saved_states(run, member), loss, x, given[member])
            scores |= {"bending_solved": solutions[member].bending, "kernel_start": solutions[member].start}
            for name in SCORES:
                area = area_under_curve(scores[name].double().numpy(), wrong.numpy())
                rows.add("area_under_curve", area, loss=loss, score=name, seed=seed)
            for name, inside in (("wrong", wrong), ("right", ~wrong)):
                rows.add("learned", float(right[inside].double().mean()), loss=loss, labels=name, seed=seed)
    return rows


def saved_states(run: Run, member: int) -> list[dict[str, Tensor]]:
    """A member's networks at the start, at the saved epochs and at the end."""
    return member_states([run.checkpoint(line.step) for line in run.lines if line.checkpoint is not None], member)


def score_points(
    case: Case, states: list[dict[str, Tensor]], loss: str, x: Tensor, given: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """The scores of every point that come from a training; and for which points the trained network outputs the given label."""
    net, scores = build(spec_of(case, x)), {}
    early = states[1 + saved_epochs(case).index(case.early)]
    for when, state in (("start", states[0]), ("early", early), ("end", states[-1])):
        net.load_state_dict(state)
        scores[f"loss_{when}"], scores[f"gradient_{when}"] = losses_and_norms(net, loss, x, given)
    along = bending_along_trajectory(case, states, x, given)
    scores["bending_line"] = difficulty(net, x, given, start=states[0], points=case.points).bending
    scores["bending_trajectory"] = along.bending
    scores["bending_end"] = tangent_diagonal(net, x).double() / along.start
    with torch.no_grad():
        return scores, net(x).argmax(1) == given


def bending_along_trajectory(case: Case, states: list[dict[str, Tensor]], x: Tensor, given: Tensor) -> Difficulty:
    """Kernel bending by tangent features averaged along the real trajectory."""
    net = build(spec_of(case, x))
    net.load_state_dict(states[-1])
    return difficulty(net, x, given, start=states[:-1], points=max(2, case.points // (len(states) - 1)))


def losses_and_norms(net: nn.Module, loss: str, x: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of every point, and the norm of its gradient by all parameters."""
    targets = F.one_hot(given, CLASSES).float()
    numbers = {name: parameter.detach() for name, parameter in net.named_parameters()}

    def loss_of_one(at: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return FUNCTIONS[loss](functional_call(net, at, one[None]), target[None])

    with torch.no_grad():
        losses = vmap(loss_of_one, (None, 0, 0))(numbers, x, targets)
    found = vmap(grad(loss_of_one), (None, 0, 0))(numbers, x, targets)
    return losses, torch.stack([g.flatten(1).square().sum(1) for g in found.values()]).sum(0).sqrt()


def area_under_curve(scores: NDArray[np.float64], wrong: NDArray[np.bool_]) -> float:
    """How often a wrong label has a larger score than a right one, ties counted half."""
    pairs = np.sign(scores[wrong][:, None] - scores[~wrong][None, :])
    return float((pairs.mean() + 1) / 2)


# --- figures -------------------------------------------------------------------------------------------------


def areas_figure(results: Results) -> plots.Figure:
    """Area under the curve of every score, a dot a seed and a bar at the median; 0.5 is chance."""
    table = results.table
    tasks = [(data, loss) for data in table.unique("data") for loss in LOSSES]
    figure, axes = plots.grid(1, len(tasks), (2.6, 3.4), sharey=True)
    names = list(SCORES)[::-1]
    for axis, (data, loss) in zip(axes[0], tasks, strict=True):
        for place, name in enumerate(names):
            colour = plots.COLOURS["blue" if name.startswith("bending") else "grey"]
            values = table.select("area_under_curve", data=data, loss=loss, score=name)
            axis.plot(values, [place] * len(values), "o", markersize=3, color=colour, alpha=0.5)
            axis.plot([np.median(values)] * 2, [place - 0.35, place + 0.35], color=colour, linewidth=2.5)
        axis.axvline(0.5, color=plots.COLOURS["black"], linewidth=0.6)
        axis.set(title=f"{data}, {loss}", xlabel="area under the curve", xlim=(0, 1.03), xticks=(0, 0.5, 1))
    axes[0, 0].set_yticks(range(len(names)), [SCORES[name] for name in names])
    return figure


def hardest_figure(results: Results, count: int = 10) -> plots.Figure:
    """Images in order of kernel bending along the trajectory, first seed; wrong labels in red."""
    tasks = [(case, loss) for case in results.cases() for loss in LOSSES]
    figure, axes = plots.grid(len(tasks), count, (0.85, 1.15))
    for row, (case, loss) in zip(axes, tasks, strict=True):
        x, labels, labelled = load_points(case, results.work)
        run = Run(make_training(case, loss, x, labelled).folder(results.work.runs))
        found = bending_along_trajectory(case, saved_states(run, 0), x, labelled[0])
        side = int(x.shape[1] ** 0.5)
        for axis, point in zip(row, found.hardest(count).tolist(), strict=True):
            axis.imshow(x[point].reshape(side, side).numpy(), cmap="gray_r", interpolation="nearest")
            true, given = int(labels[point]), int(labelled[0, point])
            words = f"{given}, is {true}" if true != given else str(given)
            axis.set_title(words, color=plots.COLOURS["red" if true != given else "black"], fontsize=8)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(f"{case.data}, {loss}", fontsize=7)
    title = "hardest points by kernel bending (label, and what the image is where the label is wrong)"
    figure.suptitle(title, fontsize=9)
    return figure


STUDY = Study(
    name="difficulty",
    paper="tangent",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 5, "paper": 5},
    columns=("data",),
    cases=cases,
    measure=measure,
    figures=(
        Figure("areas", "Which scores find wrong labels", areas_figure),
        Figure("hardest", "The points that bend the kernel most", hardest_figure, from_runs=True),
    ),
)
