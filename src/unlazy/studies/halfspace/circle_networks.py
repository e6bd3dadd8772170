"""The networks of the circle study: presets, arms, how a stack of them is trained, and what is measured on its run.

A *preset* is a set-up: the target, the learning rate, biases, and the slope beta of soft gates. ``author`` is the paper's own,
``pilot`` is ours. An *arm* is a kind of network. One case is a stack: all seeds and all betas of one arm under one preset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unlazy.data.circle import CIRCLE_PRESETS, Circle
from unlazy.data.dataset import Dataset
from unlazy.kernels.compare import kernel_distance, relative_change
from unlazy.kernels.overlap import overlap_kernel
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import member
from unlazy.models.gates import HardGate, SoftGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import Init, NetSpec, relu_spec
from unlazy.probes import standard
from unlazy.probes.halfspaces import HalfSpaces, axial_resultant, share_matching_group, share_near_direction
from unlazy.probes.paths import allocation
from unlazy.store import Run
from unlazy.studies.study import Work, require_at_least_one, require_known
from unlazy.studies.table import Rows
from unlazy.studies.trainings import Training
from unlazy.training.ensemble import Member
from unlazy.training.fit import Recipe
from unlazy.training.recorder import FixedSteps, Measure

# --- what varies ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """A set-up of the circle experiment. ``beta``: the slope of its soft gates."""

    circle: Circle
    lr: float
    biases: bool
    beta: float


PRESETS = {
    # The first author's notebooks: 1 and 9 half cycles, Adam 3e-3, biases everywhere, beta 4.
    "author": Preset(CIRCLE_PRESETS["author"], lr=3e-3, biases=True, beta=4.0),
    # Harder target, no biases, nearly hard gates: sin 2t against sin 16t, Adam 1e-3, beta 30.
    "pilot": Preset(CIRCLE_PRESETS["pilot"], lr=1e-3, biases=False, beta=30.0),
}
BETAS = (4.0, 10.0, 30.0)
DEPTH = 5


@dataclass(frozen=True)
class Arm:
    """One kind of network. ``has_beta``: whether its gates have a slope (ReLU and hard gates have none)."""

    label: str
    gating: str = "linear"
    experts: str = "constant"
    rule: str = "soft"
    train_gates: bool = True
    start: str = "torch"
    has_beta: bool = True
    equal_halves: bool = False

    def circle(self, preset: Preset) -> Circle:
        """The preset's circle, or the one whose halves are both as hard as its bottom half."""
        return replace(preset.circle, top=preset.circle.bottom) if self.equal_halves else preset.circle

    def spec(self, preset: Preset, width: int, depth: int) -> NetSpec:
        """The network of this arm under a preset."""
        biases = {"gate_bias": preset.biases, "value_bias": preset.biases}
        choices: dict[str, Any] = {"width": width, "depth": depth, "init": Init(self.start), **biases}
        if self.gating == "own":
            return relu_spec(2, **choices)
        gate = SoftGate() if self.rule == "soft" else HardGate(10.0 if self.train_gates else None)
        return NetSpec(2, experts=self.experts, gate=gate, train_gates=self.train_gates, **choices)


ARMS = {
    "relu": Arm("ReLU net", gating="own", experts="linear", has_beta=False),
    "dlgn": Arm("DLGN, linear experts", experts="linear"),
    "pwc": Arm("DLGN, constant experts"),
    "pwc-frozen": Arm("frozen gates, soft", train_gates=False),
    "pwc-frozen-hard": Arm("frozen gates, hard", rule="hard", train_gates=False, has_beta=False),
    "pwc-hard": Arm("trained hard gates", rule="hard", has_beta=False),
    "pwc-equal": Arm("control: equal halves", equal_halves=True),
    "relu-large": Arm("ReLU net, large start", gating="own", experts="linear", start="he", has_beta=False),
    "pwc-large": Arm("DLGN, large start", start="he"),
    "dlgn-large": Arm("DLGN, linear experts, large start", experts="linear", start="he"),
    "relu-equal": Arm(
        "control: ReLU net, equal halves", gating="own", experts="linear", has_beta=False, equal_halves=True
    ),
}
CIRCLE_ARMS = tuple(arm for arm in ARMS if arm not in ("dlgn-large", "relu-equal"))  # those of the circle study


def preset_beta(preset: str, arm: str) -> float | None:
    """The slope of a preset, at which its arms are judged; ``None`` for arms whose gates have no slope."""
    return PRESETS[preset].beta if ARMS[arm].has_beta else None


def beta_suffix(beta: float | None) -> str:
    """What a slope adds to the name of a network: ``", beta 4"``, or nothing."""
    return "" if beta is None else f", beta {beta:g}"


def network_label(preset: str, arm: str, beta: float | None = None) -> str:
    """The name of an arm under a preset in parts and figures; at the preset's beta unless another one is given.

    >>> network_label("author", "pwc")
    'author, DLGN, constant experts, beta 4'
    """
    return f"{preset}, {ARMS[arm].label}{beta_suffix(preset_beta(preset, arm) if beta is None else beta)}"


@dataclass(frozen=True)
class Settings:
    """One scale of the study. ``all_betas``: arms that are trained at every beta, not only at the preset's."""

    epochs: int
    frozen_epochs: int
    width: int = 16
    depth: int = DEPTH
    betas: tuple[float, ...] = BETAS
    presets: tuple[str, ...] = ("author", "pilot")
    arms: tuple[str, ...] = CIRCLE_ARMS
    all_betas: tuple[str, ...] = ("dlgn", "pwc", "pwc-frozen", "pwc-equal", "pwc-large")
    kernel_stride: int = 5
    scene_frames_per_octave: int = 5
    batch: int = 32

    def __post_init__(self) -> None:
        require_at_least_one(self, "epochs", "frozen_epochs", "kernel_stride")
        require_known("presets", self.presets, PRESETS)
        require_known("arms", self.arms, CIRCLE_ARMS)


SCALES = {
    # seconds: shows that the study runs; no claim is judged
    "smoke": Settings(
        epochs=4,
        frozen_epochs=4,
        width=4,
        depth=3,
        betas=(4.0,),
        presets=("author",),
        arms=("relu", "pwc", "pwc-frozen", "pwc-equal"),
        scene_frames_per_octave=1,
    ),
    # about a minute on two cores; claims that need more epochs are not measured
    "desk": Settings(
        epochs=200,
        frozen_epochs=200,
        arms=tuple(arm for arm in CIRCLE_ARMS if arm not in ("dlgn", "relu-large")),
        all_betas=("pwc", "pwc-frozen"),
    ),
    # the paper's lengths
    "paper": Settings(epochs=600, frozen_epochs=8000),
}


# --- training ------------------------------------------------------------------------------------------------

KERNEL_EPOCHS = (0, 1, 3, 10, 30, 100, 200)
SCENE_ARMS = ("pwc", "relu", "pwc-frozen")


@dataclass(frozen=True)
class Stack:
    """One case: all seeds and betas of one arm under one preset."""

    preset: str
    arm: str
    seeds: tuple[int, ...]
    betas: tuple[float | None, ...]
    epochs: int
    width: int
    depth: int
    batch: int
    kernel_stride: int
    scene_frames_per_octave: int

    @property
    def members(self) -> list[dict[str, Any]]:
        """Seed and beta of every network of the stack, in order."""
        return [{"seed": seed, "beta": beta} for beta in self.betas for seed in self.seeds]

    def circle(self) -> Circle:
        """The points and targets that the stack learns."""
        return ARMS[self.arm].circle(PRESETS[self.preset])

    def steps_per_epoch(self) -> int:
        """Optimiser steps in one epoch."""
        return -(-self.circle().n // self.batch)

    def training(self) -> Training:
        """The training of the stack, with its measures."""
        preset, arm = PRESETS[self.preset], ARMS[self.arm]
        recipe = Recipe(
            arm.spec(preset, self.width, self.depth),
            tuple(Member(one["seed"], preset.lr, one["beta"]) for one in self.members),
            epochs=self.epochs,
            batch=self.batch,
            checkpoint_epochs=50 if arm.train_gates else 250,
        )
        data = self.circle().dataset()
        return Training(f"{self.preset}-{self.arm}", recipe, data, tuple(self.measures(data)))

    def measures(self, data: Dataset) -> list[Measure]:
        """Curves every epoch (every tenth after 600), kernels and half-spaces at the paper's epochs, scenes for the page."""
        unit, stride = self.steps_per_epoch(), self.kernel_stride
        last = self.epochs * unit
        coarse = Dataset("circle", data.x[::stride], data.y[::stride], {k: v[::stride] for k, v in data.groups.items()})
        curves = FixedSteps.thinning(last, dense=600 * unit, stride=10 * unit, unit=unit)
        shown = FixedSteps.at({epoch * unit for epoch in KERNEL_EPOCHS if epoch <= self.epochs} | {last})
        scenes = FixedSteps.growing(last, self.scene_frames_per_octave) if self.arm in SCENE_ARMS else FixedSteps.at(())
        return [
            Measure(standard.curves, curves | scenes),
            Measure(standard.kernels, shown, coarse),
            Measure(standard.portrait, shown),
            Measure(standard.floors, FixedSteps.at({0, last})),
            Measure(_scene_of_member(self.scene_member(), stride), scenes),
        ]

    def scene_member(self) -> int:
        """Index of the member that the page shows: seed 0 at the preset's beta, whatever it looks like."""
        beta = PRESETS[self.preset].beta
        return self.betas.index(beta) * len(self.seeds) if beta in self.betas else 0


def cases(settings: Settings, seeds: Sequence[int]) -> list[Stack]:
    """Every arm under every preset."""
    sizes = (settings.width, settings.depth, settings.batch, settings.kernel_stride, settings.scene_frames_per_octave)
    found = []
    for preset, arm in product(settings.presets, settings.arms):
        betas = settings.betas if arm in settings.all_betas else (preset_beta(preset, arm),)
        epochs = settings.epochs if ARMS[arm].train_gates else settings.frozen_epochs
        found.append(Stack(preset, arm, tuple(seeds), betas, epochs, *sizes))
    return found


def _scene_of_member(index: int, stride: int) -> Callable[[GatedNet, Dataset], dict[str, Tensor]]:
    """A measure of one member: its outputs and half-spaces, and its kernels on every ``stride``-th sample."""

    def scene(model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
        """Arrays of the one member; their first axis has length one."""
        one, coarse = member(model, index), batch.x[::stride]
        arrays = standard.portrait(one, batch)
        arrays |= {"overlap": overlap_kernel(one, coarse).float(), "tangent": tangent_kernel(one, coarse)}
        return {f"scene_{name}": value[None] for name, value in arrays.items()}

    return scene


# --- how a case is measured ----------------------------------------------------------------------------------

LEARNED = 0.01  # the loss that the paper calls learned
PLATEAU = 0.27  # where the top half is fitted and the bottom half is not, the loss rests near 0.25
HALF_FITTED = 0.05  # a half counts as fitted at a tenth of its starting loss
ARTEFACT_HALF_CYCLES = 4  # on the top half, faster oscillations than this are artefacts
FROZEN_EPOCHS = 8000  # how long the paper trains frozen gates
TOP = torch.tensor([0.0, 1.0])


def measure(stack: Stack, work: Work) -> Rows:
    """Train the stack to its end and measure what claims and figures need. A time that was never reached is infinite."""
    run, rows = stack.training().run(work), Rows()
    rows.add("epochs", [float(stack.epochs)] * len(stack.members), members=stack.members)
    _measure_curves(stack, run, rows)
    _measure_kernels(stack, run, rows)
    _measure_half_spaces(stack, run, rows)
    _measure_artefacts(stack, run, rows)
    return rows


def _measure_curves(stack: Stack, run: Run, rows: Rows) -> None:
    """Losses and active paths at named epochs, and the first epoch at which each loss is reached."""
    members, steps = stack.members, run.scalars("loss")[0]
    whole = steps % stack.steps_per_epoch() == 0  # the page also has scenes within an epoch
    epochs = steps[whole] // stack.steps_per_epoch()
    names = ("loss", "loss_top", "loss_bottom", "loss_hard_gates", "paths_top", "paths_bottom")
    loss, top, bottom, hard, *paths = (run.scalars(name)[1][whole] for name in names)
    top_over_bottom = allocation(*map(torch.from_numpy, paths)).numpy()
    plateau = loss <= PLATEAU
    for name, reached in (
        ("epochs_to_reach", loss < LEARNED),
        ("epochs_top", top < HALF_FITTED),
        ("epochs_bottom", bottom < HALF_FITTED),
        ("epochs_plateau", plateau),
    ):
        rows.add(name, np.where(reached.any(0), epochs[reached.argmax(0)], np.inf), members=members)
    at_plateau = top_over_bottom[plateau.argmax(0), range(len(members))]
    rows.add("allocation", np.where(plateau.any(0), at_plateau, np.nan), members=members, at="plateau")
    for row, epoch in enumerate(epochs.tolist()):
        if epoch in KERNEL_EPOCHS:
            rows.add_all({"loss": loss[row], "allocation": top_over_bottom[row]}, members=members, at=epoch)
    ends = {"loss": loss[-1], "loss_hard_gates": hard[-1], "allocation": top_over_bottom[-1]}
    rows.add_all(ends, members=members, at="end")
    for name in ("cells", "cell_floor", "free_paths_loss"):
        rows.add(name, run.scalars(name)[1][[0, -1]], at=(0, "end"), members=members)


def _measure_kernels(stack: Stack, run: Run, rows: Rows) -> None:
    """How alike the overlap kernels of two epochs are, and how far the tangent kernel is from its start."""
    overlap, tangent = (dict(_arrays_by_epoch(stack, run, kernel)) for kernel in ("overlap", "tangent"))
    for first, second in ((0, 3), (3, 200), (0, 200)):
        if first in overlap and second in overlap:
            cosine = 1 - kernel_distance(overlap[first], overlap[second])
            rows.add("overlap_cosine", cosine, members=stack.members, at=f"{first}-{second}")
    for epoch, kernel in tangent.items():
        diagonal = kernel.diagonal(dim1=-2, dim2=-1)
        found = {"tangent_top_share": diagonal[:, : diagonal.shape[1] // 2].sum(1) / diagonal.sum(1)}
        if epoch:
            found["tangent_change"] = relative_change(kernel, tangent[0])
            found["tangent_distance"] = kernel_distance(kernel, tangent[0])
        for at in _table_moments(stack, epoch, tuple(tangent)):
            rows.add_all(found, members=stack.members, at=at)


def _measure_half_spaces(stack: Stack, run: Run, rows: Rows) -> None:
    """Where the half-spaces of each layer point. Networks without half-spaces get no rows."""
    data, offsets = stack.circle().dataset(), dict(_arrays_by_epoch(stack, run, "offsets"))
    for epoch, normals in _arrays_by_epoch(stack, run, "normals"):  # [S, layers, units, 2]
        found = {
            "near_top_30": share_near_direction(normals, TOP, 30),
            "near_top_45": share_near_direction(normals, TOP, 45),
            "like_top_half": share_matching_group(HalfSpaces(normals, offsets[epoch]), data.x, data.groups["top"]),
            "axial": axial_resultant(normals),
        }
        for at in _table_moments(stack, epoch):
            rows.add_all(found, members=stack.members, layer=range(1, normals.shape[1] + 1), at=at)


def _measure_artefacts(stack: Stack, run: Run, rows: Rows) -> None:
    """Root mean square of the part of the top half's residual that oscillates faster than its target."""
    data = stack.circle().dataset()
    top, target = data.groups["top"], data.y[:, 0]
    for epoch, output in _arrays_by_epoch(stack, run, "output"):
        artefact = fast_rms(output[:, top] - target[top], ARTEFACT_HALF_CYCLES)
        for at in _table_moments(stack, epoch, (0, 3, 200, FROZEN_EPOCHS)):
            rows.add("artefact_rms", artefact, members=stack.members, at=at)


def _arrays_by_epoch(stack: Stack, run: Run, quantity: str) -> Iterator[tuple[int, Tensor]]:
    """Epoch and array of every stored measurement of a quantity."""
    for step in run.array_steps(quantity):
        yield step // stack.steps_per_epoch(), torch.from_numpy(run.array(quantity, step)).double()


def _table_moments(stack: Stack, epoch: int, named: Sequence[int] = (0, 3, 200)) -> list[int | str]:
    """The entries of the table's column ``at`` for an epoch: itself if it is a named one, ``end`` if it is the last."""
    found: list[int | str] = [epoch] if epoch in named else []
    return [*found, "end"] if epoch == stack.epochs else found


def fast_rms(signal: Tensor, half_cycles: int) -> Tensor:
    """Root mean square of the cosine components of a ``[..., n]`` signal with more than ``half_cycles`` half cycles.

    The basis cos(pi k (j + 1/2) / n), k = 0..n-1, is orthogonal and counts half cycles over the window; its even
    extension has no jump at the ends, so a slow residual does not leak into the fast part.
    """
    n = signal.shape[-1]
    k = torch.arange(n, dtype=torch.float64)
    basis = torch.cos(math.pi * k[:, None] * (k + 0.5) / n)
    basis = basis / basis.norm(dim=1, keepdim=True)
    fast = (signal.double() @ basis.T)[..., half_cycles + 1 :]
    return (fast.square().sum(-1) / n).sqrt()
