"""When are the gates finished? Copied at seven moments, frozen, fresh experts trained on them (C27).

Each network on the circle is copied at several epochs, at the plateau near loss 0.25, and at the end. The gates of each copy are
frozen, and fresh experts are trained with them. If the gates are finished at the plateau, experts trained with the plateau's
gates reach the same loss as experts trained with the last gates. This is our operational reading of the paper's thesis that
features are learned early; the paper has no such number. On test images: ``kernels-over-time``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.runtime import require, short_hash
from unlazy.studies.halfspace.circle_checkpoints import (
    PAPER_EPOCHS,
    SMALL_STARTS,
    STUDIED,
    CircleNetworks,
    NetworkSettings,
    cases_for_every_network,
    plateau_epochs,
    preset_panels,
    read_curve,
    stack_at,
)
from unlazy.studies.halfspace.circle_networks import ARMS, PRESETS, network_label
from unlazy.studies.study import Figure, Results, Study, Work
from unlazy.studies.table import Rows
from unlazy.studies.trainings import AS_TRAINED, HARD
from unlazy.training.feature_freeze import (
    Retraining,
    find_finish_time,
    kernel_losses,
    retrain_experts,
    summarise_retraining,
    take_evenly,
)

# --- what varies ---------------------------------------------------------------------------------------------

PLATEAU, END = "plateau", "end"
KERNEL_SAMPLES = 256  # of the regressions
MADE_HARD = ("pwc", "dlgn")  # arms whose gates are copied a second time, as half-spaces


@dataclass(frozen=True, kw_only=True)
class Settings(NetworkSettings):
    """One scale of the study. ``copied``: epochs at which gates are copied; ``retrain_epochs``: for fresh experts."""

    retrain_epochs: int
    copied: tuple[int, ...] = PAPER_EPOCHS

    def __post_init__(self) -> None:
        super().__post_init__()
        early = all(epoch < self.epochs for epoch in self.copied)
        require(early, "copied epochs must lie before the last epoch, which is always copied.")


SCALES = {
    # seconds: shows that the study runs; no claim is judged
    "smoke": Settings(
        epochs=4, retrain_epochs=3, copied=(0, 1, 3), width=4, depth=3, presets=("author",), arms=("pwc", "relu")
    ),
    # under two minutes on two cores
    "desk": Settings(epochs=200, retrain_epochs=200, copied=(0, 3, 10, 30, 100), arms=("pwc", "relu")),
    "paper": Settings(epochs=600, retrain_epochs=300),
}


@dataclass(frozen=True, kw_only=True)
class Copies(CircleNetworks):
    """One case: a stack of networks, its copies at several moments, and fresh experts for each copy."""

    copied: tuple[int, ...]
    retrain_epochs: int

    @property
    def moments(self) -> list[str]:
        """Names of the copies, in the order in which they are stacked."""
        return [*(str(epoch) for epoch in self.copied), PLATEAU, END]

    def retraining(self, kind: str) -> Retraining:
        """How fresh experts are trained with gates that were copied as trained or as hard gates."""
        lr = PRESETS[self.preset].lr
        return Retraining(self.retrain_epochs, lr, self.batch, gates=kind, kernel_samples=KERNEL_SAMPLES)

    def experts_folder(self, runs: Path, kind: str) -> Path:
        """The run folder of the fresh experts."""
        copied = self.training()
        networks = copied.recipe.to_dict(copied.data, copied.measures)
        wanted = {"networks": networks, "moments": self.moments, "retraining": asdict(self.retraining(kind))}
        return runs / f"{self.preset}-{self.arm}{'-hard' if kind == HARD else ''}-{short_hash(wanted)}"


def gate_copies(arm: str) -> tuple[str, ...]:
    """How the gates of an arm are copied: with the numbers they had, and for some arms also as half-spaces."""
    return (AS_TRAINED, HARD) if arm in MADE_HARD else (AS_TRAINED,)


# --- how a case is measured ----------------------------------------------------------------------------------


def measure(case: Copies, work: Work) -> Rows:
    """Train the networks, copy them, train fresh experts with the gates of each copy.

    Rows by kind of copied gates and moment: ``retrained``, the final loss of fresh experts; ``epochs_to_learn``, their epochs
    until loss 0.01; ``network``, the loss of the copied network itself; and the losses of regression with the kernels of that
    moment, see :data:`unlazy.training.feature_freeze.KERNELS`. ``epochs_finished``: the copied epoch from which gates are as
    good as the last ones. A seed that never reached the plateau has no numbers at the plateau.
    """
    kinds, count, data = gate_copies(case.arm), len(case.seeds), case.data()
    trained, rows = case.train(work.stage(0, 1 + len(kinds))), Rows()
    last = np.full(count, float(case.epochs))
    epochs = {str(epoch): np.full(count, float(epoch)) for epoch in case.copied}  # by moment, one number per seed
    epochs |= {PLATEAU: plateau_epochs(case, trained), END: last}
    nets = [stack_at(case, trained, epochs[moment]) for moment in case.moments]
    timed = [row for row, moment in enumerate(case.moments) if moment != PLATEAU]
    for number, kind in enumerate(kinds, 1):
        where: dict[str, Any] = {"gates": kind, "seed": case.seeds}
        retraining, progress = case.retraining(kind), work.stage(number, 1 + len(kinds)).progress
        folder = case.experts_folder(work.runs, kind)
        run = retrain_experts(nets, data, retraining, folder, study=work.study, scale=work.scale, progress=progress)
        loss, to_learn = summarise_retraining(run, data, retraining, len(nets))
        learned, few = retraining.learned_loss(data), take_evenly(data, retraining.kernel_samples)
        finished = find_finish_time([*case.copied, case.epochs], loss[timed], retraining.factor, learned)
        rows.add_all({"epochs_finished": finished, "epochs_plateau": epochs[PLATEAU], "epochs": last}, **where)
        rows.add("epochs_retrained", np.full(count, float(case.retrain_epochs)), **where)
        own = read_curve(case, trained, "loss_hard_gates" if kind == HARD else "loss")[1]  # [1 + epochs, seeds]
        for row, (moment, net) in enumerate(zip(case.moments, nets, strict=True)):
            at_moment = np.minimum(epochs[moment], last).astype(int), np.arange(count)
            found = {"retrained": loss[row], "epochs_to_learn": to_learn[row], "network": own[at_moment]}
            for quantity, values in (found | kernel_losses(net, few, retraining)).items():
                rows.add(quantity, np.where(np.isfinite(epochs[moment]), values, np.nan), at=moment, **where)
    return rows


# --- what is claimed -----------------------------------------------------------------------------------------

AS_GOOD = 2.0  # gates are as good as the last ones if experts reach at most twice the loss
SHOWN_RATIOS = (
    ("plateau gates over last gates", "retrained", PLATEAU),
    ("gates of the start over last gates", "retrained", "0"),
    ("regression with the overlap kernel, plateau over end", "overlap", PLATEAU),
    ("regression with the tangent kernel, plateau over end", "tangent", PLATEAU),
)


def loss_ratio(early: NDArray[Any], last: NDArray[Any]) -> NDArray[Any]:
    """Loss with the features of a moment over loss with those of the end; losses below 0.01 (learned) count as 0.01."""
    return np.maximum(early, 0.01) / np.maximum(last, 0.01)


def ratio_to_end(words: str, quantity: str, moment: str, **where: Any) -> dict[str, Any]:
    """Fields of a part or a shown number: the loss at a moment over the loss at the end."""
    losses = Quantity(quantity, moment, **where), Quantity(quantity, END, **where)
    return {"says": f"{copies_label(**where)}: {words}", "of": losses, "by": loss_ratio, "unit": "times"}


def copies_label(preset: str, arm: str, gates: str) -> str:
    """The name of a stack and of how its gates are copied."""
    return network_label(preset, arm) + (", copied as hard gates" if gates == HARD else "")


def parts(preset: str) -> list[Part]:
    """One part for each arm with a small start; gates are copied as trained."""
    what = "loss of fresh experts under plateau gates over that under the last gates"
    ratios = [
        ratio_to_end(what, "retrained", PLATEAU, preset=preset, arm=arm, gates=AS_TRAINED) for arm in SMALL_STARTS
    ]
    return [Part(**ratio, below=AS_GOOD) for ratio in ratios]


def shown_beside_c27() -> Iterator[Shown]:
    """Every network and kind of copied gates: ratios to the end that are not judged, times, losses of fresh experts."""
    for preset, arm, kind in [*product(PRESETS, STUDIED, (AS_TRAINED,)), *product(PRESETS, MADE_HARD, (HARD,))]:
        where, name = {"preset": preset, "arm": arm, "gates": kind}, copies_label(preset, arm, kind)
        is_judged = kind == AS_TRAINED and arm in SMALL_STARTS
        for words, quantity, moment in SHOWN_RATIOS[1:] if is_judged else SHOWN_RATIOS:
            yield Shown(**ratio_to_end(words, quantity, moment, **where))
        yield Shown(f"{name}: gates as good as the last ones from", Quantity("epochs_finished", **where), unit="epochs")
        yield Shown(f"{name}: plateau reached", Quantity("epochs_plateau", **where), unit="epochs")
        for moment in (PLATEAU, END):
            slow, left = Quantity("epochs_to_learn", moment, **where), Quantity("retrained", moment, **where)
            yield Shown(f"{name}: fresh experts to 0.01, gates of the {moment}", slow, unit="epochs")
            yield Shown(f"{name}: fresh experts, gates of the {moment}", left)


CLAIMS = (
    Claim(
        "C27",
        says=(
            "The gates are finished early: copied when the circle loss rests near 0.25, frozen, and given fresh "
            "experts to train, they reach what the gates from the end of training reach."
        ),
        where="thesis, in our operational reading",
        paper="no number; the paper shows that epochs 3 and 200 look alike",
        figure="copies",
        parts=parts("author"),
        controls=parts("pilot"),
        shows=[*shown_beside_c27()],
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------

START = 0.5  # where epoch 0 stands on a logarithmic axis
TICKS, TICK_NAMES = [START, 1, 3, 10, 30, 100, 200, 600], ["0", "1", "3", "10", "30", "100", "", "600"]
LINES: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    ("network", AS_TRAINED, "black", "the network itself, then", {"linestyle": ":"}),
    ("retrained", AS_TRAINED, "blue", "fresh experts under its gates of then", {"marker": "o", "markersize": 3}),
    ("free_paths", AS_TRAINED, "green", "regression on its active paths", {"linestyle": "--"}),
    ("tangent", AS_TRAINED, "orange", "regression on its tangents", {"linestyle": "--"}),
    ("retrained", HARD, "red", "fresh experts, gates made hard", {"marker": "s", "markersize": 3}),
)


def losses_by_copy(results: Results, quantity: str, **where: str) -> NDArray[np.float64]:
    """A loss under the gates of each copied epoch and of the end, ``[copies, seeds]``."""
    moments = (*results.settings.copied, END)
    return np.stack([results.table.select(quantity, at, seeds=results.seeds, **where) for at in moments])


def draw_copies(results: Results) -> plots.Figure:
    """Loss under gates copied at each epoch; median and middle half of the seeds. Grey line: counts as learned."""
    settings: Settings = results.settings
    epochs = np.maximum([*settings.copied, settings.epochs], START)
    labels = {arm: ARMS[arm].label for arm in settings.arms}
    titles = {arm: label.replace(", l", ",\nl") for arm, label in labels.items()}
    figure, axes = preset_panels(results, titles, (2.5, 2.5), "copied at epoch", "mean squared error")
    for (preset, arm), axis in axes.items():
        for quantity, kind, colour, label, style in LINES:
            if kind in gate_copies(arm):
                values = losses_by_copy(results, quantity, preset=preset, arm=arm, gates=kind)
                plots.draw_band(axis, epochs, values, label, colour, **style)
        times = results.table.select("epochs_plateau", preset=preset, arm=arm, gates=AS_TRAINED)
        if np.isfinite(times).any():
            middle = float(np.median(times[np.isfinite(times)]))
            axis.axvline(middle, color=plots.COLOURS["purple"], linewidth=1, label="plateau near 0.25 (median)")
        axis.axhline(0.01, color=plots.COLOURS["grey"], linewidth=0.6)
        axis.set(xscale="log", yscale="log", ylim=(1e-4, 0.7))
    for axis in axes.values():
        _epoch_ticks(axis)
    plots.shared_legend(figure, 2 if len(titles) < 4 else 3)
    return figure


def draw_finished_epochs(results: Results) -> plots.Figure:
    """Per seed: when the loss is down to the plateau, and from which copied epoch gates serve as well as the last ones."""
    settings: Settings = results.settings
    hard = [arm for arm in settings.arms if arm in MADE_HARD]
    stacks = [*product(settings.presets, settings.arms, (AS_TRAINED,)), *product(settings.presets, hard, (HARD,))]
    figure, axes = plots.grid(1, 1, (8.4, 1.2 + 0.28 * len(stacks)))
    axis = axes[0, 0]
    for place, (preset, arm, kind) in enumerate(stacks):
        for name, colour, marker, label in (
            ("epochs_plateau", "black", "|", "loss down to the plateau near 0.25"),
            ("epochs_finished", "blue", "o", "gates as good as the last ones"),
        ):
            times = results.table.select(name, seeds=results.seeds, preset=preset, arm=arm, gates=kind)
            times = np.maximum(np.where(np.isinf(times), np.nan, times), START)
            height = place + np.linspace(-0.25, 0.25, len(times))
            style: dict[str, Any] = {"color": plots.COLOURS[colour], "alpha": 0.5, "markersize": 5}
            axis.plot(times, height, marker, label=label if not place else None, **style)
    axis.set_yticks(range(len(stacks)), [copies_label(*stack) for stack in stacks])
    axis.set(xscale="log", xlabel="epoch, one mark per seed", ylim=(len(stacks) - 0.5, -0.5))
    _epoch_ticks(axis)
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def _epoch_ticks(axis: Any) -> None:
    axis.set_xticks(TICKS, TICK_NAMES)
    axis.minorticks_off()


STUDY = Study(
    name="features-finished",
    paper="half-space",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 10, "paper": 20},
    columns=("preset", "arm"),
    cases=partial(cases_for_every_network, Copies),
    measure=measure,
    claims=CLAIMS,
    figures=(
        Figure("copies", "What the gates of each moment are good for", draw_copies),
        Figure("finished", "When the gates are finished", draw_finished_epochs),
    ),
)
