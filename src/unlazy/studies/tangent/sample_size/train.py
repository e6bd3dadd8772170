"""Every model on every size of training set, until its test accuracy has not risen for a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from unlazy import runtime
from unlazy.data.images import Images, load_images
from unlazy.runtime import require, short_hash, stream
from unlazy.store import Run, Writer
from unlazy.studies.tangent.sample_size.networks import KINDS, Layout, Stack
from unlazy.training.ensemble import Member, batch_order
from unlazy.training.sweep import sweep

STUDY = "sample-size"
PATIENCE = 20
RATES = {"sgd": 0.01, "adam": 1e-3}
MOMENTUM = 0.9
SMALL_BATCH, BATCH = 25, 50  # up to 125 images, and above
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Task:
    """A data set, its network, its optimiser, and the sizes of training sets; ``tested``: how many test images."""

    data: str
    layout: Layout
    optimiser: str
    sizes: tuple[int, ...]
    tested: int

    @property
    def name(self) -> str:
        return f"{self.data}-{self.optimiser}"

    def __post_init__(self) -> None:
        require(self.optimiser in RATES, f"optimiser must be one of {', '.join(RATES)}; got {self.optimiser!r}.")
        require(self.tested >= 2, f"at least two test images are needed, got {self.tested}.")
        require(len(self.sizes) > 0 and min(self.sizes) >= 1, "sizes of training sets must be at least 1.")


@dataclass(frozen=True)
class Settings:
    """Tasks, seeds, and epochs at most."""

    tasks: tuple[Task, ...]
    seeds: int
    epochs: int = 1000
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("seeds", "epochs"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, f"{name} must be a whole number >= 1, got {value!r}.")


@dataclass(frozen=True)
class Job:
    """One kind of model on one size of training set, all seeds together."""

    task: Task
    kind: str
    size: int
    seeds: int
    epochs: int
    device: str

    def recipe(self) -> dict[str, object]:
        """What decides the numbers."""
        task = {name: value for name, value in asdict(self.task).items() if name != "sizes"}
        rates = {"rate": RATES[self.task.optimiser], "momentum": MOMENTUM, "patience": PATIENCE}
        return {"study": STUDY, **asdict(self), "task": task, **rates}

    def folder(self, runs: Path) -> Path:
        return runs / STUDY / f"{self.task.name}-{self.size}-{self.kind}-{short_hash(self.recipe())}"


def jobs(settings: Settings) -> list[Job]:
    """All of them, small training sets first."""
    found = [
        Job(task, kind, size, settings.seeds, settings.epochs, settings.device)
        for task in settings.tasks
        for size in task.sizes
        for kind in KINDS
    ]
    return sorted(found, key=lambda job: job.size)


def key(task: str, size: int, kind: str) -> str:
    return f"{task}-{size}-{kind}"


def train_all(settings: Settings, runs: Path, scale: str, workers: int, progress: Progress) -> dict[str, Run]:
    """Train what is not finished; returns the runs by :func:`key`."""
    todo = jobs(settings)

    def tick() -> None:
        progress("trainings", sum(_finished(job.folder(runs)) for job in todo), len(todo))

    sweep(train, [(job, runs, scale) for job in todo], workers, tick)
    return {key(job.task.name, job.size, job.kind): Run(job.folder(runs)) for job in todo}


def _finished(folder: Path) -> bool:
    return (folder / "status.json").exists() and Run(folder).status()["state"] == "finished"


def train(job: Job, runs: Path, scale: str) -> None:
    """Into the job's folder: ``errors [S, epochs, 2]`` on either half of the test images; a training begun is begun anew."""
    folder = job.folder(runs)
    if _finished(folder):
        return
    with runtime.threads(1):
        header = {
            "kind": "train",
            "study": STUDY,
            "scale": scale,
            "recipe": job.recipe(),
            "members": [{"seed": seed, "beta": None, "lr": RATES[job.task.optimiser]} for seed in range(job.seeds)],
            "model": asdict(job.task.layout),
            "data": {"name": job.task.data, "options": {"images": job.size}, "fingerprint": None},
            "provenance": runtime.provenance("float32", job.device),
        }
        with Writer(folder, header) as writer:
            errors = descend(job)
            writer.record(errors.shape[1], {}, {"errors": errors}, None)
            writer.finish()


def descend(job: Job) -> NDArray[np.float64]:
    """``[S, epochs, 2]``: the share of wrong answers after every epoch, until every seed has lost its patience."""
    task, seeds = job.task, list(range(job.seeds))
    images, test = load_images(task.data), load_images(task.data, "test").take(slice(task.tested))
    require(job.size <= len(images), f"{task.data} has {len(images)} images, not {job.size}.")
    x, labels = (tensor.to(job.device) for tensor in subsets(images, job.size, seeds))
    test_x, test_labels = test.floats().to(job.device), test.labels.to(job.device)
    model = Stack(job.kind, task.layout, seeds, job.device)
    optimiser = _optimiser(task.optimiser, model.parameters())
    members = [Member(seed, RATES[task.optimiser]) for seed in seeds]
    own = torch.arange(job.seeds, device=job.device)[:, None]
    at_once = 2000 if len(task.layout.channels) == 0 else 500
    history: list[Tensor] = []
    for epoch in range(job.epochs):
        order = batch_order(members, epoch, job.size).to(job.device)
        for some in order.split(SMALL_BATCH if job.size <= 125 else BATCH, 1):
            out = model(x[own, some])
            loss = F.cross_entropy(out.flatten(0, 1), labels[own, some].flatten(), reduction="sum") / some.shape[1]
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        wrong = (model.outputs(test_x, at_once).argmax(-1) != test_labels).double()  # [S, tests]
        history.append(torch.stack([half.mean(1) for half in wrong.tensor_split(2, 1)], 1).cpu())
        errors = torch.stack(history, 1).numpy()
        if all(patience_lost(errors[seed]) for seed in range(job.seeds)):
            break
    return errors


def subsets(images: Images, size: int, seeds: list[int]) -> tuple[Float[Tensor, "s n c h w"], Tensor]:
    """Every seed's own training images; a larger set of the same seed holds the smaller one."""
    chosen = [torch.randperm(len(images), generator=stream(seed, "subset"))[:size] for seed in seeds]
    return torch.stack([images.take(rows).floats() for rows in chosen]), torch.stack([images.labels[r] for r in chosen])


def patience_lost(errors: NDArray[np.float64]) -> bool:
    """Whether training may stop, by all test images and by their first half (``errors [epochs, 2]``)."""
    return all(best_epoch(series)[1] for series in (errors.mean(1), errors[:, 0]))


def best_epoch(errors: NDArray[np.float64]) -> tuple[int, bool]:
    """The best epoch before the first 20 epochs without a better one, and whether such 20 epochs were seen."""
    best = 0
    for epoch in range(len(errors)):
        if errors[epoch] < errors[best]:
            best = epoch
        if epoch - best >= PATIENCE:
            return best, True
    return best, False


def _optimiser(name: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr=RATES[name])
    return torch.optim.SGD(parameters, lr=RATES[name], momentum=MOMENTUM)
