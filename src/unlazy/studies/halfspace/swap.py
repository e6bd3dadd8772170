"""The halves of the circle change places in mid-training: who follows? (F6).

Networks are trained on the circle target, then on the same points with the halves of the target swapped. Two controls: the same
continuation without the swap, and networks that see the swapped target from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.data.dataset import Dataset
from unlazy.probes.paths import allocation
from unlazy.runtime import require
from unlazy.store import Run
from unlazy.studies.halfspace.circle_checkpoints import (
    CircleNetworks,
    NetworkSettings,
    cases_for_every_network,
    first_time,
    preset_panels,
)
from unlazy.studies.halfspace.circle_networks import ARMS, PRESETS, network_label
from unlazy.studies.study import Figure, Results, Study, Work, require_at_least_one
from unlazy.studies.table import Rows
from unlazy.studies.trainings import Training, stack_targets

Array = NDArray[np.float64]

# --- what varies ---------------------------------------------------------------------------------------------

TRAINED = ("relu", "pwc", "dlgn", "pwc-hard")
FROZEN = ("pwc-frozen", "pwc-frozen-hard")


@dataclass(frozen=True, kw_only=True)
class Settings(NetworkSettings):
    """One scale: ``before`` epochs on the target, then ``epochs`` on the swapped target."""

    before: int
    arms: tuple[str, ...] = TRAINED + FROZEN

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least_one(self, "before")
        long_enough = self.epochs >= self.before
        require(long_enough, "train at least as long after the swap as before it; otherwise no claim can be judged.")


SCALES = {
    # seconds: shows that the study runs; no claim is judged
    "smoke": Settings(before=2, epochs=3, width=4, depth=2, presets=("pilot",), arms=("relu", "pwc", "pwc-frozen")),
    # under two minutes on two cores; the swap comes too early for the parts about times
    "desk": Settings(before=60, epochs=120, presets=("author",), arms=("relu", "pwc", *FROZEN)),
    "paper": Settings(before=200, epochs=300),
}


def swap_halves(data: Dataset) -> Dataset:
    """The same points with the targets of opposite points exchanged: each half gets the function of the other."""
    half, rest = divmod(len(data), 2)
    require(rest == 0, f"halves of {len(data)} points cannot be swapped; take an even number.")
    return replace(data, y=data.y.roll(half, dims=0), options={**data.options, "swapped": True})


@dataclass(frozen=True, kw_only=True)
class SwapCase(CircleNetworks):
    """One case: two trainings of a stack, before and after the swap; every seed has one member for each target."""

    before: int

    def first_training(self) -> Training:
        """From the start: members on the target, which will be swapped; then members on the swapped target, a control."""
        return self._two_targets("first", self.data(), swap_halves(self.data()))

    def second_training(self, first: Run) -> Training:
        """From epoch ``before`` of the first training, with its optimiser state: swapped members, then a control without swap."""
        start = repeat_members(first.checkpoint(self.before * self.steps_per_epoch()), len(self.seeds))
        return self._two_targets("second", swap_halves(self.data()), self.data(), start=start, after=first.id)

    def _two_targets(self, name: str, one: Dataset, other: Dataset, **start: Any) -> Training:
        """All seeds on one data set and all seeds on the other, as one stack; ``start`` as in :class:`Training`."""
        alone, seeds = self.training(), len(self.seeds)
        recipe = replace(alone.recipe, members=alone.recipe.members * 2, checkpoints_at=(self.before,))
        both = stack_targets([one] * seeds + [other] * seeds)
        return Training(f"{name}-{alone.key}", recipe, both, alone.measures, **start)

    def finished_runs(self, root: Path) -> tuple[Run, Run]:
        """The runs of both trainings below a folder."""
        first = Run(self.first_training().folder(root))
        return first, Run(self.second_training(first).folder(root))


def repeat_members(checkpoint: Mapping[str, NDArray[Any]], seeds: int) -> dict[str, NDArray[Any]]:
    """A checkpoint with its first ``seeds`` members twice; the number of updates is the same for all members."""
    shared = {"optim/steps", "random/order"}
    doubled = {name: np.concatenate([a[:seeds]] * 2) for name, a in checkpoint.items() if name not in shared}
    return doubled | {"optim/steps": checkpoint["optim/steps"]}


# --- how a case is measured ----------------------------------------------------------------------------------

LEVEL_EPOCHS = 10  # the level before the swap is the median loss of the last ten epochs
LEVELS = (0.05, 0.01)  # a tenth of the loss before training, and the loss that the paper calls learned
HALVES = {"new slow half": "loss_bottom", "new fast half": "loss_top"}  # after the swap
# the column `training`: up to the swap; after it; continued without it; on the swapped target from the start
BEFORE, SWAP, STAY, SCRATCH = "before", "swap", "stay", "scratch"


def measure(case: SwapCase, work: Work) -> Rows:
    """Train, swap, train on; then measure losses, active paths, and how long each took to follow the target.

    Times are in epochs after the swap, or after the start; infinity if not within ``epochs``. ``epochs_to_level``: until the loss
    is back at its ``level`` before the swap. ``epochs_to_reach``: until the loss of a ``part`` of the circle is below a level.
    ``epochs_paths_turn``: until the new slow half has more active paths.
    """
    first = case.first_training().run(work.stage(0, 2))
    return measure_runs(case, first, case.second_training(first).run(work.stage(1, 2)))


def measure_runs(case: SwapCase, first: Run, second: Run) -> Rows:
    """The rows of both trainings."""
    rows, loss, paths = Rows(), read_curves(case, first, second, "loss"), log_ratio_of_paths(case, first, second)
    level, epochs = level_before(loss[BEFORE]), np.arange(case.epochs + 1)
    add, first_epoch = partial(rows.add, seed=case.seeds), partial(first_time, epochs)
    add("level", level, training=BEFORE)
    add("loss", loss[SWAP][0], training=SWAP, at=0)
    for training in (SWAP, STAY, SCRATCH):
        add("epochs", [float(case.epochs)] * len(case.seeds), training=training)
        add("loss", loss[training][-1], training=training, at="end")
    for training in (BEFORE, SWAP, STAY, SCRATCH):
        add("allocation", paths[training][-1], training=training, at="end")
    for training in (SWAP, SCRATCH):
        add("epochs_to_level", first_epoch(loss[training] <= level), training=training)
        for reached in LEVELS:
            add("epochs_to_reach", first_epoch(loss[training] < reached), training=training, part="all", level=reached)
    for part, name in HALVES.items():
        times = first_epoch(read_curves(case, first, second, name)[SWAP] < LEVELS[0])
        add("epochs_to_reach", times, training=SWAP, part=part, level=LEVELS[0])
    add("epochs_paths_turn", first_epoch(paths[SWAP] < 0), training=SWAP)
    return rows


def read_curves(case: SwapCase, first: Run, second: Run, name: str) -> dict[str, Array]:
    """A scalar by epoch and seed, ``[epochs + 1, seeds]``: before the swap, after it, and for both controls."""
    seeds = len(case.seeds)
    one, two = (run.scalars(name)[1] for run in (first, second))
    early = one[: case.before + 1, :seeds]
    return {BEFORE: early, SCRATCH: one[:, seeds:], SWAP: two[:, :seeds], STAY: two[:, seeds:]}


def log_ratio_of_paths(case: SwapCase, first: Run, second: Run) -> dict[str, Array]:
    """log(active paths on the top half / on the bottom half), by epoch and seed. The swap makes the bottom half the slow one."""
    top, bottom = (read_curves(case, first, second, f"paths_{half}") for half in ("top", "bottom"))
    return {name: allocation(torch.from_numpy(top[name]), torch.from_numpy(bottom[name])).numpy() for name in top}


def level_before(loss: Array) -> Array:
    """The loss of each seed before the swap: the median over its last epochs, because single epochs fluctuate."""
    return np.asarray(np.median(loss[-LEVEL_EPOCHS:], axis=0))


# --- what is claimed -----------------------------------------------------------------------------------------

SWAPPED_AT = 200  # "recover": within as many epochs as came before the swap
FROM_START = "swapped target from the start"
SHOWN = {
    "loss before the swap": Quantity("level", training=BEFORE),
    "loss at the end, swapped": Quantity("loss", "end", training=SWAP),
    "loss at the end of the same continuation without the swap": Quantity("loss", "end", training=STAY),
    f"loss at the end, {FROM_START}": Quantity("loss", "end", training=SCRATCH),
    f"{FROM_START}, until that same level": Quantity("epochs_to_level", training=SCRATCH),
    **{
        f"until the {part} is below {LEVELS[0]:g}": Quantity("epochs_to_reach", training=SWAP, part=part)
        for part in HALVES
    },
    **{
        f"until the loss is below {level:g}, {words}": Quantity(
            "epochs_to_reach", training=training, part="all", level=level
        )
        for training, words in ((SWAP, "swapped"), (SCRATCH, FROM_START))
        for level in LEVELS
    },
}
SHOWN_OF_PATHS = {
    "until the new slow half has more active paths": Quantity("epochs_paths_turn", training=SWAP),
    "log ratio of active paths top/bottom before the swap": Quantity("allocation", "end", training=BEFORE),
    "the same at the end without the swap": Quantity("allocation", "end", training=STAY),
    f"the same at the end, {FROM_START}": Quantity("allocation", "end", training=SCRATCH),
}
UNITS = {"level": "", "loss": "", "allocation": "log ratio"}  # all other quantities are in epochs


def bottom_over_top(favour: NDArray[Any]) -> NDArray[Any]:
    """The log ratio of bottom over top from that of top over bottom; after the swap the bottom half is the slow one."""
    return -favour


def parts(preset: str) -> list[Part]:
    """Trained gates: more active paths on the new slow half at the end, and the loss back at its level before the swap within
    as many epochs as came before the swap. Frozen gates, whose paths cannot move: the loss is not back within that time.
    """
    found = []
    for arm in TRAINED + FROZEN:
        where, name = {"preset": preset, "arm": arm, "training": SWAP}, network_label(preset, arm)
        if arm in TRAINED:
            words = f"{name}: log ratio of active paths, new slow half / new fast half, at the end"
            paths = Quantity("allocation", "end", **where)
            found.append(Part(words, paths, by=bottom_over_top, above=0, unit="log ratio"))
        back = Quantity("epochs_to_level", before=SWAPPED_AT, **where)
        watched = Quantity("epochs", before=SWAPPED_AT, **where)
        rule: dict[str, Any] = {"below": SWAPPED_AT + 1} if arm in TRAINED else {"above": SWAPPED_AT}
        words = f"{name}: until the loss is back at its level before the swap"
        found.append(Part(words, back, within=watched, unit="epochs", **rule))
    return found


def shown_beside_f6() -> Iterator[Shown]:
    """Losses, times and path ratios of every stack and of both controls."""
    for preset, arm in product(PRESETS, TRAINED + FROZEN):
        for words, one in (SHOWN | (SHOWN_OF_PATHS if arm in TRAINED else {})).items():
            found = Quantity(one.name, one.at, preset=preset, arm=arm, **one.where)
            yield Shown(f"{network_label(preset, arm)}: {words}", found, unit=UNITS.get(one.name, "epochs"))


CLAIMS = (
    Claim(
        "F6",
        says=(
            "When the slow and the fast half of the circle target are swapped in mid-training, networks with "
            "trained gates move their active paths to the new slow half and recover their loss, and a network "
            "with frozen gates does not."
        ),
        where="published summary, check 1",
        paper="check proposed; no number",
        figure="paths",
        parts=parts("author"),
        controls=parts("pilot"),
        shows=[*shown_beside_f6()],
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------

DRAWN_STRIDE = 2  # epochs between drawn points
LINES = {
    BEFORE: ("black", "before"),
    STAY: ("grey", "no swap"),
    SCRATCH: ("orange", "swapped target from the start"),
    SWAP: ("blue", "swapped"),
}


def draw_loss(results: Results) -> plots.Figure:
    """Loss before and after the swap, beside the same continuation without it and training on the swapped target."""
    read = partial(read_curves, name="loss")
    figure, panels = _draw_panels(results, results.settings.arms, 2.5, "mean squared error", read)
    for axis, loss in panels:
        level = np.median(level_before(loss[BEFORE]))
        axis.axhline(level, color=plots.COLOURS["black"], linewidth=0.7, linestyle=":", label="its level before")
        axis.set_yscale("log")
    plots.shared_legend(figure, 5)
    return figure


def draw_paths(results: Results) -> plots.Figure:
    """Log ratio of active paths, top over bottom half; the swap makes the bottom half the slow one."""
    arms = [arm for arm in results.settings.arms if arm in TRAINED]
    figure, panels = _draw_panels(results, arms, 2.9, "log ratio of paths, top / bottom", log_ratio_of_paths)
    for axis, _ in panels:
        axis.axhline(0, color=plots.COLOURS["grey"], linewidth=0.7)
    plots.shared_legend(figure, 5)
    return figure


def _draw_panels(
    results: Results,
    arms: Sequence[str],
    width: float,
    ylabel: str,
    read: Callable[[SwapCase, Run, Run], dict[str, Array]],
) -> tuple[plots.Figure, list[tuple[plots.Axes, dict[str, Array]]]]:
    """One panel per preset and arm with the curves that ``read`` returns; epoch 0 is the swap, or the start of a control."""
    titles = {arm: ARMS[arm].label for arm in arms}
    figure, axes = preset_panels(results, titles, (width, 2.6), "epochs after the swap", ylabel, sharey="row")
    panels = []
    for case in results.cases():
        if case.arm in titles:
            axis, found = axes[case.preset, case.arm], read(case, *case.finished_runs(results.work.runs))
            for name, (colour, label) in LINES.items():
                epochs = np.arange(len(found[name])) - (case.before if name == BEFORE else 0)
                plots.draw_band(axis, epochs[::DRAWN_STRIDE], found[name][::DRAWN_STRIDE], label, colour, linewidth=1)
            axis.axvline(0, color=plots.COLOURS["red"], linewidth=0.7)
            axis.set_title(titles[case.arm])
            panels.append((axis, found))
    return figure, panels


STUDY = Study(
    name="swap",
    paper="half-space",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 10, "paper": 10},
    columns=("preset", "arm", "before"),
    cases=partial(cases_for_every_network, SwapCase),
    measure=measure,
    claims=CLAIMS,
    figures=(
        Figure("loss", "The loss around the swap", draw_loss, from_runs=True),
        Figure("paths", "The paths stay where they were", draw_paths, from_runs=True),
    ),
)
