"""Training the circle study: every stack into its own run folder, resumable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from unlazy.data.dataset import Dataset
from unlazy.kernels.overlap import overlap_kernel
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import member
from unlazy.models.net import GatedNet
from unlazy.probes import standard
from unlazy.runtime import short_hash
from unlazy.scope.schedule import Fixed
from unlazy.scope.scope import Measure
from unlazy.store import Run
from unlazy.studies.halfspace.circle.settings import PRESETS, Settings, Stack, stacks
from unlazy.studies.trainings import steps_done
from unlazy.training.fit import Progress, fit
from unlazy.training.sweep import sweep

KERNEL_EPOCHS = (0, 1, 3, 10, 30, 100, 200)
SCENE_ARMS = ("pwc", "relu", "pwc-frozen")


@dataclass(frozen=True)
class Job:
    """One stack and the run folder that belongs to its recipe."""

    stack: Stack
    folder: Path

    def train(self, scale: str) -> None:
        """From wherever the run stands to its end."""
        data = self.stack.circle().dataset()
        fit(self.stack.recipe(), data, measures(self.stack, data), self.folder, study="circle", scale=scale)

    def epochs_done(self) -> int:
        return steps_done(self.folder) // self.stack.recipe().steps_per_epoch(self.stack.circle().n)

    def cost(self) -> float:
        """A rough guess of its time: epochs, times a base and a share per member."""
        return self.stack.epochs * (1 + 0.03 * len(self.stack.betas()) * self.stack.settings.seeds)


def jobs(settings: Settings, folder: Path) -> list[Job]:
    """Every stack with its folder, ``PRESET-ARM-ID``: other settings have another id and never collide."""
    found = []
    for stack in stacks(settings):
        data = stack.circle().dataset()
        run_id = short_hash(stack.recipe().to_dict(data, measures(stack, data)))
        found.append(Job(stack, folder / f"{stack.key}-{run_id}"))
    return found


def run(
    settings: Settings, folder: Path, scale: str, *, workers: int = 1, progress: Progress | None = None
) -> dict[str, Run]:
    """Train (or go on training, or just open) every stack; returns the runs by key.

    ``progress(done, total)`` counts epochs over all stacks.
    """
    todo = sorted(jobs(settings, folder), key=Job.cost, reverse=True)  # long ones first: no worker idles at the end
    total = sum(job.stack.epochs for job in todo)

    def tick() -> None:
        if progress is not None:
            progress(sum(job.epochs_done() for job in todo), total)

    sweep(Job.train, [(job, scale) for job in todo], workers, tick)
    return open_runs(settings, folder)


def open_runs(settings: Settings, folder: Path) -> dict[str, Run]:
    """The runs of the study, read-only."""
    return {job.stack.key: Run(job.folder) for job in jobs(settings, folder)}


def measures(stack: Stack, data: Dataset) -> list[Measure]:
    """Curves every epoch (thinned after 600), kernels and half-spaces at the paper's epochs, scenes for the page."""
    unit = stack.recipe().steps_per_epoch(len(data))
    last = stack.epochs * unit
    stride = stack.settings.kernel_stride
    coarse = Dataset("circle", data.x[::stride], data.y[::stride], {k: v[::stride] for k, v in data.groups.items()})
    curves = Fixed.thinning(last, dense=600 * unit, stride=10 * unit, unit=unit)
    shown = Fixed.at({epoch * unit for epoch in KERNEL_EPOCHS if epoch <= stack.epochs} | {last})
    scenes = Fixed.growing(last, stack.settings.scene_frames_per_octave) if stack.arm in SCENE_ARMS else Fixed.at(())
    return [
        Measure(standard.curves, curves | scenes),
        Measure(standard.kernels, shown, coarse),
        Measure(standard.portrait, shown),
        Measure(standard.floors, Fixed.at({0, last})),
        Measure(_scene_probe(scene_member(stack), stride), scenes),
    ]


def scene_member(stack: Stack) -> int:
    """Which member the page shows: seed 0 at the preset's own slope; nobody picked it for its looks."""
    betas = stack.betas()
    beta = PRESETS[stack.preset].beta
    return betas.index(beta) * stack.settings.seeds if beta in betas else 0


def _scene_probe(index: int, stride: int) -> Callable[[GatedNet, Dataset], dict[str, Tensor]]:
    def scene(model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
        """One member at many steps; arrays have a first axis of length one."""
        one, coarse = member(model, index), batch.x[::stride]
        seen = standard.portrait(one, batch)
        seen |= {"overlap": overlap_kernel(one, coarse).float(), "tangent": tangent_kernel(one, coarse)}
        return {f"scene_{name}": value[None] for name, value in seen.items()}

    return scene
