"""Rare classes: does training that knows its paths lift the classes that have few samples? (X29, X30).

Training sets with a long tail: the most common class has 1500 images, the rarest 15, the others between in a geometric row. Every
seed draws its own order of classes and its own images. Dense DLGNs are trained with the methods of the study ``surgery`` and
judged by the mean test accuracy of their four rarest classes (at most 70 images each). Weights by class, the usual remedy, stand
beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.claims.functions import difference
from unlazy.data.images import Images, load_images
from unlazy.models.gates import SoftGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec
from unlazy.runtime import stream
from unlazy.studies.beyond.surgery import DECAY, DECAY_FROM, LAST_SURGERY
from unlazy.studies.study import Figure, Results, Study, Work, require_at_least_one, require_known
from unlazy.studies.table import Rows
from unlazy.training.ensemble import Member, MemberAdam, batch_order, build_member_stack
from unlazy.training.path_optimiser import PathOptimiser, SurgerySchedule

# --- what varies ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way to train. ``by_class``: samples count inversely to the size of their class."""

    label: str
    aim: str = ""
    weight_power: float = 0.0
    gate_rate: float = 1.0
    longer: float = 1.0
    wider: float = 1.0
    by_class: bool = False


ARMS = {
    "none": Arm("plain Adam"),
    "surgery": Arm("surgery, aimed at the residual", aim="residual"),
    "random": Arm("surgery, random aim", aim="random"),
    "longer": Arm("half as many steps again", longer=1.5),
    "wider": Arm("half as wide again", wider=1.5),
    "weights": Arm("loss weights paths^-1/2", weight_power=0.5),
    "rate-3": Arm("gates learn 3 times as fast", gate_rate=3.0),
    "by-class": Arm("loss weights by class, the usual remedy", by_class=True),
}
SHORT = ("none", "surgery", "random", "weights", "by-class")  # arms on CIFAR-10
DATA = {"fashion-mnist": "Fashion-MNIST", "cifar-10": "CIFAR-10"}
FEW_SEEDS = 5  # on CIFAR-10


@dataclass(frozen=True)
class Settings:
    """One scale. ``most``, ``least``: images of the most common and of the rarest class. ``every``: epochs between surgeries."""

    epochs: int
    most: int = 1500
    least: int = 15
    width: int = 64
    depth: int = 3
    every: int = 2
    data: tuple[str, ...] = ("fashion-mnist", "cifar-10")
    arms: tuple[str, ...] = tuple(ARMS)

    def __post_init__(self) -> None:
        require_at_least_one(self, "epochs", "most", "least", "width", "depth", "every")
        require_known("data", self.data, DATA)
        require_known("arms", self.arms, ARMS)


@dataclass(frozen=True)
class Stack:
    """One case: all seeds of one arm on one data set."""

    data: str
    arm: str
    seeds: tuple[int, ...]
    epochs: int
    width: int
    depth: int
    every: int
    most: int
    least: int


def cases(settings: Settings, seeds: Sequence[int]) -> list[Stack]:
    """Every arm on Fashion-MNIST; some arms, with fewer seeds, on CIFAR-10."""
    found = []
    for data in settings.data:
        for name in settings.arms:
            few = data == "cifar-10"
            if few and name not in SHORT:
                continue
            arm = ARMS[name]
            found.append(
                Stack(
                    data,
                    name,
                    tuple(seeds[:FEW_SEEDS] if few else seeds),
                    epochs=round(settings.epochs * arm.longer),
                    width=round(settings.width * arm.wider),
                    depth=settings.depth,
                    every=settings.every,
                    most=settings.most,
                    least=settings.least,
                )
            )
    return found


SCALES = {
    "smoke": Settings(epochs=4, most=20, least=4, width=6, depth=2, data=("fashion-mnist",), arms=("none", "surgery")),
    # eight minutes on one core
    "desk": Settings(epochs=30),
}

# --- data ----------------------------------------------------------------------------------------------------

CLASSES, RAREST = 10, 4


def class_sizes(most: int, least: int) -> list[int]:
    """Images of each class, from the most common to the rarest: a geometric row.

    >>> class_sizes(1500, 15)
    [1500, 899, 539, 323, 194, 116, 70, 42, 25, 15]
    """
    return [round(most * (least / most) ** (rank / (CLASSES - 1))) for rank in range(CLASSES)]


def long_tail(labels: Int64[Tensor, " n"], seed: int, sizes: Sequence[int]) -> tuple[Int64[Tensor, " k"], list[int]]:
    """Numbers of the images that a seed trains on, and its classes from the most common to the rarest."""
    classes = torch.randperm(CLASSES, generator=stream(seed, "class order")).tolist()
    chosen = []
    for name, size in zip(classes, sizes, strict=True):
        own = (labels == name).nonzero()[:, 0]
        chosen.append(own[torch.randperm(len(own), generator=stream(seed, "images", name))[:size]])
    return torch.cat(chosen), classes


# --- how a case is measured ----------------------------------------------------------------------------------

RATE, BETA, BATCH, GATES = 1e-3, 4.0, 64, 4


def measure(case: Stack, work: Work) -> Rows:
    """Train all seeds. ``accuracy`` on test images: mean over the four ``rare`` classes, the three ``common`` ones, and ``all``.

    Column ``gates``: as trained, or made hard. ``by_rank``: accuracy of every class, from the most common to the rarest.
    """
    arm, seeds = ARMS[case.arm], list(case.seeds)
    train, test = (load_images(case.data, split=split, folder=work.data) for split in ("train", "test"))
    sizes = class_sizes(case.most, case.least)
    picked = [long_tail(train.labels, seed, sizes) for seed in seeds]
    x = torch.stack([train.take(rows).flat(standardise=True) for rows, _ in picked])  # [S, n, d]
    y = torch.stack([train.take(rows).one_hot() for rows, _ in picked])
    members, n = [Member(seed, RATE) for seed in seeds], x.shape[1]
    spec = NetSpec(
        x.shape[2], CLASSES, experts="constant", gate=SoftGate(BETA), width=case.width, depth=case.depth, constant_input="one"
    )  # fmt: skip
    net = build_member_stack(spec, members, torch.float32)
    adam, steps = MemberAdam(net, [RATE] * len(seeds)), -(-n // BATCH)
    last = int(LAST_SURGERY * case.epochs) * steps
    schedule = SurgerySchedule(every=case.every * steps, last=last, gates=GATES, fade=steps, aim=arm.aim or "residual")
    optimiser = PathOptimiser(
        net,
        adam,
        x,
        y,
        loss="cross-entropy",
        surgery=schedule if arm.aim else None,
        weight_power=arm.weight_power,
        gate_rate=arm.gate_rate,
        seeds=seeds,
    )
    by_class = 1 / y.sum(1, keepdim=True) if arm.by_class else torch.ones(len(seeds), 1, CLASSES)
    own = torch.arange(len(seeds))[:, None]
    for epoch in range(case.epochs):
        if epoch == int(DECAY_FROM * case.epochs):
            adam.lr = adam.lr * DECAY
        for some in batch_order(members, epoch, n).split(BATCH, dim=1):
            images, wanted = x[own, some], y[own, some]
            losses = -(wanted * net(images).log_softmax(-1)).sum(-1)
            weights = optimiser.sample_weights(images) * (wanted * by_class).sum(-1)
            optimiser.step((weights * losses).sum(-1) / weights.sum(-1))
        work.progress(epoch + 1, case.epochs)
    rows = Rows()
    for gates, network in (("as trained", net), ("hard", net.hard())):
        right = accuracy_by_class(network, test)  # [S, classes]
        ordered = torch.stack([right[row, torch.tensor(order)] for row, (_, order) in enumerate(picked)])
        shares = {"rare": ordered[:, -RAREST:], "common": ordered[:, :3], "all": ordered}
        for which, values in shares.items():
            rows.add("accuracy", values.mean(1).numpy(), seed=seeds, classes=which, gates=gates)
        if gates == "as trained":
            rows.add("by_rank", ordered.numpy(), seed=seeds, rank=list(range(1, CLASSES + 1)))
    replaced = [
        sum(one.what == "replaced" and one.unit.member == m for one in optimiser.log) for m in range(len(seeds))
    ]
    rows.add("replaced", replaced, seed=seeds)
    rows.add("moved", [max((one.moved for one in optimiser.log), default=0.0)] * len(seeds), seed=seeds)
    return rows


def accuracy_by_class(net: GatedNet, test: Images) -> Float[Tensor, "members classes"]:
    """Share of right answers among the test images of every class."""
    with torch.no_grad():
        parts = [net(part).argmax(-1) for part in test.flat(standardise=True).split(2000)]
    right = (torch.cat(parts, 1) == test.labels).double()
    return torch.stack([right[:, test.labels == name].mean(1) for name in range(CLASSES)], 1)


# --- what is claimed -----------------------------------------------------------------------------------------


def accuracy(arm: str, data: str = "fashion-mnist", classes: str = "rare", gates: str = "as trained") -> Quantity:
    """Test accuracy of some classes."""
    return Quantity("accuracy", arm=arm, data=data, classes=classes, gates=gates)


def lifts(arm: str, other: str, data: str = "fashion-mnist", classes: str = "rare") -> Part:
    """The accuracy of rare classes is higher in the first arm, seed by seed."""
    words = f"{DATA[data]}, {classes} classes: {ARMS[arm].label}, minus {ARMS[other].label}"
    seeds = FEW_SEEDS if data == "cifar-10" else None
    return Part(words, (accuracy(arm, data, classes), accuracy(other, data, classes)), difference, above=0, seeds=seeds)


def shown_accuracies(*arms: str) -> Iterator[Shown]:
    """Accuracies of rare, common and all classes."""
    for data in DATA:
        for arm in arms:
            if data == "cifar-10" and arm not in SHORT:
                continue
            seeds = FEW_SEEDS if data == "cifar-10" else None
            for classes in ("rare", "common", "all"):
                name = f"{DATA[data]}, {ARMS[arm].label}: {classes} classes"
                yield Shown(name, accuracy(arm, data, classes), seeds=seeds)
            hard = accuracy(arm, data, gates="hard")
            yield Shown(f"{DATA[data]}, {ARMS[arm].label}: rare classes, gates made hard", hard, seeds=seeds)


ABOUT: dict[str, Any] = {"where": "open question", "paper": "our question; no number", "figure": "ranks"}
CLAIMS = (
    Claim(
        "X29",
        says="Surgery aimed at the residual lifts the rare classes of a long-tailed Fashion-MNIST.",
        parts=[lifts("surgery", "none"), lifts("surgery", "random")],
        controls=[
            lifts("surgery", "longer"),
            lifts("surgery", "wider"),
            lifts("surgery", "none", classes="all"),
            lifts("surgery", "none", "cifar-10"),
            lifts("surgery", "random", "cifar-10"),
        ],
        shows=[*shown_accuracies("none", "surgery", "random", "longer", "wider", "by-class")],
        **ABOUT,
    ),
    Claim(
        "X30",
        says="Loss weights by paths^-1/2, or faster gates, lift the rare classes of a long-tailed Fashion-MNIST.",
        parts=[lifts("weights", "none"), lifts("rate-3", "none")],
        controls=[lifts("weights", "none", "cifar-10"), lifts("weights", "by-class")],
        shows=[*shown_accuracies("weights", "rate-3")],
        **ABOUT,
    ),
)

# --- what is drawn -------------------------------------------------------------------------------------------


def draw_ranks(results: Results) -> plots.Figure:
    """Test accuracy of classes from the most common (1) to the rarest (10); median and middle half of the seeds."""
    data = results.settings.data
    figure, axes = plots.grid(1, len(data), (4.2, 2.8))
    colours = ("grey", "blue", "orange", "purple", "green", "red")
    for axis, name in zip(axes[0], data, strict=True):
        arms = [arm for arm in results.settings.arms if arm in (*SHORT, "rate-3")]
        for arm, colour in zip(arms, colours, strict=False):
            ranks, values = results.table.series("by_rank", over="rank", arm=arm, data=name)
            if len(ranks):
                plots.draw_band(axis, ranks, np.asarray(values), ARMS[arm].label, colour)
        axis.set_title(DATA[name])
        axis.set_xlabel("rank of the class")
    axes[0, 0].set_ylabel("test accuracy")
    plots.shared_legend(figure, 2)
    return figure


STUDY = Study(
    name="rare-classes",
    paper="beyond",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 10},
    columns=("data", "arm"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("ranks", "Accuracy of common and rare classes", draw_ranks),),
)
