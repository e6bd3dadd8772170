"""Every model on every size of training set, until its test accuracy has not risen for a while.

On a GPU a step (picking the batches, forward, backward, update) is captured once as a CUDA graph and replayed: such small
networks are bound by launching kernels. On a CPU the same step runs plainly.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from unlazy import runtime
from unlazy.data.images import Images, load_images
from unlazy.runtime import require, short_hash, stream
from unlazy.store import Run, Writer
from unlazy.studies.results import Progress
from unlazy.studies.tangent.sample_size.networks import KINDS, Layout, Stack
from unlazy.studies.trainings import is_finished
from unlazy.training.ensemble import Member, batch_order
from unlazy.training.sweep import sweep

STUDY = "sample-size"
PATIENCE = 20
RATES = {"sgd": 0.01, "adam": 1e-3}
MOMENTUM = 0.9
AT_ONCE, CONVOLVED_AT_ONCE = 2000, 250  # test images
SMALL_BATCH, BATCH = 25, 50  # up to 125 images, and above


@dataclass(frozen=True)
class Task:
    """A data set, its network, its optimiser, and the sizes of training sets; ``tested``: how many test images.

    ``seeds``: at most so many, where a task is dearer than the others.
    """

    data: str
    layout: Layout
    optimiser: str
    sizes: tuple[int, ...]
    tested: int
    seeds: int | None = None

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

    @property
    def batch(self) -> int:
        return min(self.size, SMALL_BATCH if self.size <= 125 else BATCH)

    def recipe(self) -> dict[str, object]:
        """What decides the numbers but the machine, so that runs made on another one are found."""
        task = {name: value for name, value in asdict(self.task).items() if name not in ("sizes", "seeds")}
        own = {name: value for name, value in asdict(self).items() if name != "device"}
        rates = {"rate": RATES[self.task.optimiser], "momentum": MOMENTUM, "patience": PATIENCE}
        return {"study": STUDY, **own, "task": task, **rates}

    def folder(self, runs: Path) -> Path:
        return runs / STUDY / f"{self.task.name}-{self.size}-{self.kind}-{short_hash(self.recipe())}"


def jobs(settings: Settings, device: str = "cpu") -> list[Job]:
    """All of them, small training sets first."""
    found = [
        Job(task, kind, size, min(settings.seeds, task.seeds or settings.seeds), settings.epochs, device)
        for task in settings.tasks
        for size in task.sizes
        for kind in KINDS
    ]
    return sorted(found, key=lambda job: job.size)


def key(task: str, size: int, kind: str) -> str:
    return f"{task}-{size}-{kind}"


def matches(job: Job, only: str) -> bool:
    """Whether every word (commas between; bars for alternatives) is the job's task, size or kind."""
    parts = (job.task.name, str(job.size), job.kind)
    return all(any(one in parts for one in word.split("|")) for word in only.split(",") if word)


def train_all(
    settings: Settings,
    runs: Path,
    scale: str,
    workers: int,
    progress: Progress,
    *,
    device: str = "cpu",
    data: Path | None = None,
    only: str = "",
) -> dict[str, Run]:
    """Train what is not finished; returns the runs by :func:`key`. ``data``: the folder of the data sets."""
    todo = [job for job in jobs(settings, device) if matches(job, only)]
    require(len(todo) > 0, f"no training matches {only!r}.")

    def tick() -> None:
        progress("trainings", sum(is_finished(job.folder(runs)) for job in todo), len(todo))

    sweep(train, [(job, runs, scale, data) for job in todo], workers, tick)
    return {key(job.task.name, job.size, job.kind): Run(job.folder(runs)) for job in todo}


def train(job: Job, runs: Path, scale: str, data: Path | None = None) -> None:
    """Into the job's folder: ``errors [S, epochs, 2]`` on either half of the test images; a training begun is begun anew."""
    folder = job.folder(runs)
    if is_finished(folder):
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
            "provenance": _made_by(job.device),
        }
        with Writer(folder, header) as writer:
            errors = descend(job, data)
            writer.record(errors.shape[1], {}, {"errors": errors}, None)
            writer.finish()


def _made_by(device: str) -> dict[str, object]:
    cuda = torch.device(device).type == "cuda"
    return runtime.provenance("float32", torch.cuda.get_device_name() if cuda else device)


def descend(job: Job, data: Path | None = None) -> NDArray[np.float64]:
    """``[S, epochs, 2]``: the share of wrong answers after every epoch, until every seed has lost its patience."""
    task, seeds = job.task, list(range(job.seeds))
    images = load_images(task.data, "train", data)
    test = load_images(task.data, "test", data).take(slice(task.tested))
    require(job.size <= len(images), f"{task.data} has {len(images)} images, not {job.size}.")
    x, labels = (tensor.to(job.device) for tensor in subsets(images, job.size, seeds))
    test_x, test_labels = test.floats().to(job.device), test.labels.to(job.device)
    model = Stack(job.kind, task.layout, seeds, job.device)
    descent = Descent(model, task.optimiser, x, labels, job.batch)
    members = [Member(seed, RATES[task.optimiser]) for seed in seeds]
    at_once = CONVOLVED_AT_ONCE if task.layout.channels else AT_ONCE
    history: list[Tensor] = []
    for epoch in range(job.epochs):
        descent.epoch(batch_order(members, epoch, job.size))
        wrong = (model.outputs(test_x, at_once).argmax(-1) != test_labels).double()  # [S, tests]
        history.append(torch.stack([half.mean(1) for half in wrong.tensor_split(2, 1)], 1).cpu())
        errors = torch.stack(history, 1).numpy()
        if all(patience_lost(errors[seed]) for seed in range(job.seeds)):
            break
    return errors


class Descent:
    """A model with its optimiser and its training images ``[S, n, ...]``, taken through them epoch by epoch."""

    def __init__(self, model: Stack, optimiser: str, x: Tensor, labels: Tensor, batch: int) -> None:
        self.model, self.x, self.labels, self.batch = model, x, labels, batch
        self.optimiser = _optimiser(optimiser, model.parameters(), x.is_cuda)
        self.own = torch.arange(len(x), device=x.device)[:, None]
        self.order = torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)
        self.place = torch.zeros((), dtype=torch.int64, device=x.device)
        self.graph: torch.cuda.CUDAGraph | None = None  # none on a CPU
        self._prepare()

    def epoch(self, order: Int[Tensor, "s n"]) -> None:
        """All batches of an epoch in this order; the last may be smaller."""
        self.order.copy_(order)
        self.place.zero_()
        whole, rest = divmod(order.shape[1], self.batch)
        for _ in range(whole):
            if self.graph is None:
                self._step(self.batch)
            else:
                self.graph.replay()
        if rest:
            self._step(rest)

    def _step(self, batch: int) -> None:
        some = self.order[:, self.place + torch.arange(batch, device=self.order.device)]
        out = self.model(self.x[self.own, some])
        loss = F.cross_entropy(out.flatten(0, 1), self.labels[self.own, some].flatten(), reduction="sum") / batch
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.place += batch

    def _prepare(self) -> None:
        """Trial steps, so that everything is in place; on a GPU the graph of a step; then all numbers as they were."""
        before = [tensor.detach().clone() for tensor in self.model.parameters()]
        if self.x.is_cuda:
            self._capture()
        else:
            self._step(self.batch)
        with torch.no_grad():
            for tensor, old in zip(self.model.parameters(), before, strict=True):
                tensor.copy_(old)
                for value in self.optimiser.state[tensor].values():
                    value.zero_()

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.place.zero_()
                self._step(self.batch)
        torch.cuda.synchronize()
        self.optimiser.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step(self.batch)
        torch.cuda.synchronize()


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


def _optimiser(name: str, parameters: list[Tensor], cuda: bool) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr=RATES[name], capturable=cuda)
    return torch.optim.SGD(parameters, lr=RATES[name], momentum=MOMENTUM)
