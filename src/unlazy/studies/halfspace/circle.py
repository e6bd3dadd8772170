"""Half-spaces turn toward the easy half of a circle (Figures 2-6, 9, 10; claims C7-C15).

A network learns a slow wave on the top half of a circle and a fast wave on the bottom half. The preset ``author`` is the
paper's own set-up; ``pilot`` is ours, a harder target with nearly hard gates. What varies and how it is measured stands in
``circle_networks``; this file has the claims and the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy import plots
from unlazy.claims.claim import Claim, Function, Part, Quantity, Shown
from unlazy.claims.functions import difference, ratio
from unlazy.kernels.compare import trace_normalise
from unlazy.probes.paths import allocation
from unlazy.store import Run
from unlazy.studies.halfspace.circle_networks import (
    ARMS,
    BETAS,
    DEPTH,
    FROZEN_EPOCHS,
    PRESETS,
    SCALES,
    Stack,
    beta_suffix,
    cases,
    measure,
    network_label,
    preset_beta,
)
from unlazy.studies.study import Figure, Results, Study

# --- what is claimed -----------------------------------------------------------------------------------------

LEARNED_WITHIN = 400  # C7, epochs: "about 200", read as: within twice that
FROZEN_AT_LEAST = 2000  # C8, epochs
LOSS_TOLERANCE = 0.05  # C9: a loss of 0.25, give or take
KERNEL_CHANGED = 0.5  # C11: by half its own size
FEW_EPOCHS, MANY_EPOCHS = 10, 100  # C12
VISIBLE_RMS = 0.01  # C13: one hundredth of the target's amplitude
MOST = 0.5  # C14: most units
FIRST, LAST = 1, DEPTH  # layers

TRAINED = ("pwc", "relu")  # arms with trained gates that are judged
Where = dict[str, Any]  # columns of the table that say which networks are meant
PartsByPreset = dict[str, list[Part]]


def at_preset_beta(preset: str, arm: str) -> Where:
    """The networks of an arm at the slope at which it is judged: the preset's, if its gates have one."""
    beta = preset_beta(preset, arm)
    return {"preset": preset, "arm": arm} | ({} if beta is None else {"beta": beta})


def at_every_beta(preset: str, arm: str) -> list[Where]:
    """The networks of an arm at each slope at which any scale trains it."""
    where = {"preset": preset, "arm": arm}
    return [{**where, "beta": beta} for beta in BETAS] if ARMS[arm].has_beta else [where]


def of_networks(quantities: Sequence[Quantity], where: Where) -> tuple[Quantity, ...]:
    """The quantities of these networks; a quantity that names another arm keeps its own."""
    return tuple(Quantity(one.name, one.at, **{**where, **one.where}) for one in quantities)


def parts(
    arms: Sequence[str],
    what: str,
    *quantities: Quantity,
    by: Function | None = None,
    within: Sequence[Quantity] = (),
    **rule: Any,
) -> PartsByPreset:
    """The same part for several arms under every preset; ``by``, ``within`` and ``rule`` as in :class:`Part`."""
    found: PartsByPreset = {preset: [] for preset in PRESETS}
    for preset, arm in product(PRESETS, arms):
        where = at_preset_beta(preset, arm)
        of, rule["within"] = of_networks(quantities, where), of_networks(within, where) or None
        found[preset].append(Part(f"{network_label(**where)}: {what}", of if by else of[0], by, **rule))
    return found


def claim(id: str, judged: Sequence[PartsByPreset], **about: Any) -> Claim:
    """A claim whose parts are judged under the paper's preset; the same parts under our preset are its controls."""
    replication, controls = ([part for each in judged for part in each[preset]] for preset in ("author", "pilot"))
    return Claim(id, parts=replication, controls=controls, **about)


def shown_numbers(
    arms: Sequence[str], what: str, name: str, at: int | str | None = None, unit: str = ""
) -> Iterator[Shown]:
    """One quantity of several arms, under every preset and at every beta."""
    for preset, arm in product(PRESETS, arms):
        for where in at_every_beta(preset, arm):
            yield Shown(f"{network_label(**where)}: {what}", Quantity(name, at, **where), unit=unit)


def shown_beside_c12() -> Iterator[Shown]:
    """How much later the bottom half is fitted than the top half."""
    for where in (at_preset_beta(preset, arm) for preset in PRESETS for arm in (*TRAINED, "pwc-equal")):
        halves = of_networks((TO_BOTTOM, TO_TOP), where)
        yield Shown(f"{network_label(**where)}: bottom / top, same seed", halves, by=ratio, unit="times")
    yield from shown_numbers(("pwc", "dlgn", "pwc-large"), "bottom half to 0.05", "epochs_bottom", unit="epochs")


def shown_beside_c14() -> Iterator[Shown]:
    """Other betas, a large start and hard gates; other angles, and the first layer."""
    for preset, arm in product(PRESETS, ("pwc", "pwc-large", "pwc-hard")):
        judged, networks = at_preset_beta(preset, "pwc"), at_every_beta(preset, arm)
        for where in networks:
            if where != judged:  # the judged ones have this number in the first part
                quantity = Quantity("near_top_30", 200, layer=LAST, **where)
                yield Shown(f"{network_label(**where)}: last layer, within 30 degrees", quantity)
        where = judged if judged in networks else networks[0]
        for name, layer, what in (
            ("near_top_45", LAST, "last layer, within 45 degrees (chance 0.25)"),
            ("like_top_half", LAST, "last layer, open on about the top half"),
            ("near_top_30", FIRST, "first layer, within 30 degrees"),
        ):
            yield Shown(f"{network_label(**where)}: {what}", Quantity(name, 200, layer=layer, **where))


def shown_beside_c15() -> Iterator[Shown]:
    """The axial resultant of every layer before and after, and its change where both halves are equally hard."""
    for preset in PRESETS:
        where = at_preset_beta(preset, "pwc")
        for layer, (at, when) in product(range(1, DEPTH + 1), ((0, "before training"), (200, "at epoch 200"))):
            axial = Quantity("axial", at, layer=layer, **where)
            yield Shown(f"{network_label(**where)}: layer {layer} {when}", axial)
        where = at_preset_beta(preset, "pwc-equal")
        change = of_networks(AXIAL[LAST], where)
        yield Shown(f"{network_label(**where)}: change of the last layer", change, by=difference)


def kept_beyond_start(kept: NDArray[Any], start: NDArray[Any], whole: NDArray[Any]) -> NDArray[Any]:
    """How much more alike the kernels of epochs 3 and 200 are than either is to that of the start, in cosines."""
    return kept - np.maximum(start, whole)


def distance_from_a_quarter(loss: NDArray[Any]) -> NDArray[Any]:
    """How far a loss is from 0.25."""
    return np.abs(loss - 0.25)


def gain_beyond(
    last: NDArray[Any], last_before: NDArray[Any], first: NDArray[Any], first_before: NDArray[Any]
) -> NDArray[Any]:
    """How much more the last layer changed than the first."""
    return (last - last_before) - (first - first_before)


TRAINED_FOR, TO_LEARN = Quantity("epochs"), Quantity("epochs_to_reach")
TO_LEARN_WITH_TRAINED_GATES = Quantity("epochs_to_reach", arm="pwc")
TO_TOP, TO_BOTTOM = Quantity("epochs_top"), Quantity("epochs_bottom")
FAST_RESIDUAL = Quantity("artefact_rms", FROZEN_EPOCHS)
NEAR_TOP = Quantity("near_top_30", 200, layer=LAST)
AXIAL = {layer: tuple(Quantity("axial", at, layer=layer) for at in (200, 0)) for layer in (FIRST, LAST)}
MORE_ON_TOP: dict[str, Any] = {"above": 0, "unit": "log ratio"}

CLAIMS = (
    claim(
        "C7",
        [parts(TRAINED, "to loss 0.01", TO_LEARN, within=[TRAINED_FOR], below=LEARNED_WITHIN, unit="epochs")],
        says=(
            "On the circle target (a slow wave on the top half, a fast wave on the bottom half) a ReLU network "
            "and a DLGN with trained gates both bring the squared loss below 0.01 in about 200 epochs."
        ),
        where="Fig. 2",
        paper="about 200 epochs",
        figure="fig02_loss",
        shows=[
            *shown_numbers(
                ("dlgn", "pwc", "pwc-large", "relu-large"), "to loss 0.01", "epochs_to_reach", unit="epochs"
            ),
            *shown_numbers(("pwc-hard",), "loss at the end", "loss", "end"),
            *shown_numbers(("pwc", "dlgn"), "loss at the end, gates made hard", "loss_hard_gates", "end"),
        ],
    ),
    claim(
        "C8",
        [
            parts(["pwc-frozen"], "to loss 0.01", TO_LEARN, within=[TRAINED_FOR], above=FROZEN_AT_LEAST, unit="epochs"),
            parts(
                ["pwc-frozen"],
                "times slower than trained gates, same seed",
                *(TO_LEARN, TO_LEARN_WITH_TRAINED_GATES),
                by=ratio,
                within=[TRAINED_FOR, TO_LEARN_WITH_TRAINED_GATES],
                above=10,
                unit="times",
            ),
        ],
        says=(
            "On the circle target a DLGN whose random gates are frozen needs more than 2000 epochs to bring the "
            "loss below 0.01, at least ten times as many as with trained gates."
        ),
        where="Fig. 2",
        paper="more than 2000 epochs",
        figure="fig02_loss",
        shows=[
            *shown_numbers(["pwc-frozen"], "to loss 0.01", "epochs_to_reach", unit="epochs"),
            *shown_numbers(["pwc-frozen", "pwc-frozen-hard"], "loss at the end", "loss", "end"),
            *shown_numbers(["pwc-frozen-hard"], "least loss its cells allow", "cell_floor", "end"),
        ],
    ),
    claim(
        "C9",
        [
            parts(TRAINED, "paths top/bottom at epoch 3", Quantity("allocation", 3), **MORE_ON_TOP),
            parts(TRAINED, "paths top/bottom at the 0.25 plateau", Quantity("allocation", "plateau"), **MORE_ON_TOP),
            parts(
                TRAINED,
                "distance of the epoch-3 loss from 0.25",
                Quantity("loss", 3),
                by=distance_from_a_quarter,
                below=LOSS_TOLERANCE,
            ),
        ],
        says=(
            "After three epochs on the circle target the loss has fallen from about 0.5 to about 0.25, and the "
            "ReLU network and the DLGN already have clearly more active paths on the slow top half than on the "
            "fast bottom half."
        ),
        where="Fig. 3",
        paper="loss about 0.25; top / bottom ratio clearly above 1",
        figure="fig03_overlap",
        shows=[
            number
            for arms, what, at in (
                (TRAINED, "before training", 0),
                (["pwc-equal"], "equal halves, at the plateau", "plateau"),
                (["pwc-equal"], "equal halves, epoch 200", 200),
                (["pwc-large", "relu-large"], "large start", "plateau"),
                (["pwc-hard"], "hard gates", "plateau"),
            )
            for number in shown_numbers(arms, what, "allocation", at, unit="log ratio")
        ],
    ),
    claim(
        "C10",
        [
            parts(
                TRAINED,
                "cosine of epochs 3 and 200, less the larger cosine to the start",
                *(Quantity("overlap_cosine", pair) for pair in ("3-200", "0-3", "0-200")),
                by=kept_beyond_start,
                above=0,
            ),
            parts(TRAINED, "paths top/bottom at epoch 200", Quantity("allocation", 200), **MORE_ON_TOP),
        ],
        says=(
            "On the circle target the overlap kernel after three epochs is close to the one after 200 epochs, and "
            "both are far from the overlap kernel at initialisation."
        ),
        where="Fig. 3",
        paper="same structure at epochs 3 and 200; no number",
        figure="fig03_overlap",
        shows=[
            number
            for one, other in ((3, 200), (0, 200), (0, 3))
            for number in shown_numbers(
                TRAINED, f"cosine of epochs {one} and {other}", "overlap_cosine", f"{one}-{other}"
            )
        ],
    ),
    claim(
        "C11",
        [
            parts(TRAINED, f"relative change at epoch {epoch}", Quantity("tangent_change", epoch), above=KERNEL_CHANGED)
            for epoch in (3, 200)
        ],
        says=(
            "During training on the circle target the empirical tangent kernel moves far from its initial value "
            "instead of staying constant, and has done so by epoch 3."
        ),
        where="Fig. 4",
        paper="visibly different by epoch 3; no number",
        figure="fig04_tangent",
        shows=[
            *shown_numbers(TRAINED, "1 - cosine at epoch 3", "tangent_distance", 3),
            *shown_numbers(TRAINED, "1 - cosine at epoch 200", "tangent_distance", 200),
            *shown_numbers(["pwc-frozen", "pwc-large", "relu-large"], "change at epoch 3", "tangent_change", 3),
            *(
                number
                for epoch in (0, 3, 10, 30, 100, 200)
                for number in shown_numbers(
                    TRAINED, f"trace share of the top half, epoch {epoch}", "tangent_top_share", epoch
                )
            ),
        ],
    ),
    claim(
        "C12",
        [
            parts(TRAINED, "top half to 0.05", TO_TOP, within=[TRAINED_FOR], below=FEW_EPOCHS + 1, unit="epochs"),
            parts(TRAINED, "bottom half to 0.05", TO_BOTTOM, within=[TRAINED_FOR], above=MANY_EPOCHS, unit="epochs"),
        ],
        says=(
            "Networks with trained gates fit the slow half of the circle target within a few epochs, while the "
            "fast half needs more than 100 epochs."
        ),
        where="Fig. 5",
        paper="a few epochs against more than 100",
        figure="fig05_functions",
        shows=[*shown_beside_c12()],
    ),
    claim(
        "C13",
        [
            parts(
                ["pwc-frozen"], "fast residual on the top half at the end", FAST_RESIDUAL, above=VISIBLE_RMS, unit="rms"
            ),
            parts(
                ["pwc-frozen"],
                "the same over that of trained gates at epoch 200",
                *(FAST_RESIDUAL, Quantity("artefact_rms", 200, arm="pwc")),
                by=ratio,
                above=1,
                unit="times",
            ),
        ],
        says=(
            "A DLGN with frozen random gates still leaves a high-frequency error on the slow half of the circle "
            "target after 8000 epochs."
        ),
        where="Fig. 5",
        paper="artefacts visible at 8000 epochs; no number",
        figure="fig05_functions",
        shows=[
            *shown_numbers(["pwc-frozen", "pwc-frozen-hard"], "at the end", "artefact_rms", "end", unit="rms"),
            *shown_numbers(["pwc"], "epoch 200", "artefact_rms", 200, unit="rms"),
        ],
    ),
    claim(
        "C14",
        [
            parts(["pwc"], "share of last-layer normals within 30 degrees of the top", NEAR_TOP, above=MOST),
            *(
                parts(["pwc"], what, NEAR_TOP, Quantity("near_top_30", at, layer=layer), by=difference, above=0)
                for what, at, layer in (
                    ("its change from the start", 0, LAST),
                    ("that share, less the first layer's", 200, FIRST),
                )
            ),
        ],
        says=(
            "Training on the circle target turns most last-layer units of a DLGN into half-planes close to the "
            "slow top half, and the share of such units grows with the layer and with training."
        ),
        where="Figs 6, 9, 10",
        paper="3 of the 4 units shown",
        figure="fig06_half_spaces",
        shows=[*shown_beside_c14()],
    ),
    claim(
        "C15",
        [
            parts(["pwc"], "change of the last layer's axial resultant", *AXIAL[LAST], by=difference, above=0),
            parts(["pwc"], "that change, less the first layer's", *AXIAL[LAST], *AXIAL[FIRST], by=gain_beyond, above=0),
        ],
        says=(
            "Training on the circle target makes the half-space normals of a DLGN gather around common "
            "directions, in later layers more than in earlier ones."
        ),
        where="abstract, Fig. 6",
        paper="later layers more clustered; no number",
        figure="fig09_10_layers",
        shows=[*shown_beside_c15()],
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------


class CircleRuns:
    """The stacks of one scale and their runs, by preset and arm; reads curves and arrays from them."""

    def __init__(self, results: Results) -> None:
        self.stacks: dict[tuple[str, str], Stack] = {(one.preset, one.arm): one for one in results.cases()}
        self.runs = {key: Run(stack.training().folder(results.work.runs)) for key, stack in self.stacks.items()}

    def curve(self, preset: str, arm: str, name: str, beta: float | None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Epochs ``[T]`` and values ``[T, seeds]`` of the members with this beta. Epoch 0 becomes 0.5, for logarithmic axes."""
        run = self.runs[preset, arm]
        steps, values = run.scalars(name)
        chosen = [beta is None or member["beta"] == beta for member in run.members]
        return np.maximum(steps / self.stacks[preset, arm].steps_per_epoch(), 0.5), values[:, chosen]

    def array_of_seed_0(self, preset: str, arm: str, quantity: str, epoch: int) -> NDArray[Any]:
        """An array of seed 0 at the preset's beta."""
        stack = self.stacks[preset, arm]
        return self.runs[preset, arm].array(quantity, epoch * stack.steps_per_epoch())[stack.scene_member()]


def draw_loss(results: Results) -> plots.Figure:
    """Loss over training of trained and of frozen gates, one panel per preset."""
    runs, presets = CircleRuns(results), results.settings.presets
    figure, axes = plots.grid(1, len(presets), (5.2, 4.0), sharey=True)
    for axis, preset in zip(axes[0], presets, strict=True):
        frozen = zip(runs.stacks[preset, "pwc-frozen"].betas, ("red", "orange", "purple"), strict=False)
        lines: list[tuple[str, float | None, str]] = [
            ("relu", None, "black"),
            ("pwc", PRESETS[preset].beta, "blue"),
            *(("pwc-frozen", beta, colour) for beta, colour in frozen),
            ("pwc-frozen-hard", None, "green"),
        ]
        for arm, beta, colour in lines:
            if (preset, arm) in runs.stacks:
                curve = runs.curve(preset, arm, "loss", beta)
                plots.draw_band(axis, *curve, ARMS[arm].label + beta_suffix(beta), colour)
        axis.axhline(0.01, color=plots.COLOURS["grey"], linestyle=":")
        axis.set(xscale="log", yscale="log", xlabel="epoch", title=f"{preset} preset")
        plots.legend_below(axis)
    axes[0, 0].set_ylabel("mean squared error")
    return figure


def draw_kernels(quantity: str, results: Results) -> plots.Figure:
    """Trace-normalised kernels of seed 0 at four epochs, one row per preset and network."""
    runs, rows = CircleRuns(results), [(preset, arm) for preset in results.settings.presets for arm in ("relu", "pwc")]
    epochs = [epoch for epoch in (0, 3, 30, 200) if epoch <= results.settings.epochs]
    figure, axes = plots.grid(len(rows), len(epochs), (2.3, 2.4))
    for line, (preset, arm) in zip(axes, rows, strict=True):
        stored = [runs.array_of_seed_0(preset, arm, quantity, epoch) for epoch in epochs]
        kernels = [trace_normalise(torch.from_numpy(kernel).double()).numpy() for kernel in stored]
        top = float(np.quantile([kernel.diagonal() for kernel in kernels], 0.98))  # one scale per row; late spikes clip
        for axis, epoch, kernel in zip(line, epochs, kernels, strict=True):
            image = plots.draw_heat_map(axis, kernel, top)
            axis.set_title(f"epoch {epoch}")
        line[0].set_ylabel(f"{preset}\n{ARMS[arm].label}")
        figure.colorbar(image, ax=line.tolist(), shrink=0.8)
    return figure


def draw_functions(results: Results) -> plots.Figure:
    """Target and output of seed 0 with trained and with frozen gates, early and late."""
    runs, settings = CircleRuns(results), results.settings
    drawn_epochs = {"pwc": (3, 200), "pwc-frozen": (200, settings.frozen_epochs)}
    columns = [
        (arm, epoch)
        for arm, epochs in drawn_epochs.items()
        for epoch in sorted(set(epochs))
        if epoch <= runs.stacks[settings.presets[0], arm].epochs
    ]
    figure, axes = plots.grid(len(settings.presets), len(columns), (3.2, 2.2), sharex=True, sharey=True)
    for line, preset in zip(axes, settings.presets, strict=True):
        circle = runs.stacks[preset, "pwc"].circle()
        angle, target = circle.angles().numpy(), circle.dataset().y[:, 0].numpy()
        for axis, (arm, epoch) in zip(line, columns, strict=True):
            gates, colour = ("trained", "blue") if arm == "pwc" else ("frozen", "red")
            axis.plot(angle, target, color=plots.COLOURS["grey"], linewidth=1)
            output = runs.array_of_seed_0(preset, arm, "output", epoch)
            axis.plot(angle, output, color=plots.COLOURS[colour], linewidth=1.2)
            axis.axvline(np.pi, color=plots.COLOURS["grey"], linewidth=0.5)
            axis.set_title(f"{gates} gates, beta {PRESETS[preset].beta:g}, epoch {epoch}")
            axis.set_ylim(-1.5, 1.5)
        line[0].set_ylabel(preset)
    for axis in axes[-1]:
        axis.set_xticks([0, np.pi, 2 * np.pi], ["0", "π", "2π"])
    return figure


def draw_half_spaces(results: Results) -> plots.Figure:
    """Directions of last-layer normals, all seeds, before and after training; one panel per preset and beta."""
    runs, last = CircleRuns(results), min(200, results.settings.epochs)
    columns = [(preset, beta) for preset in results.settings.presets for beta in runs.stacks[preset, "pwc"].betas]
    figure, axes = plots.grid(1, len(columns), (2.3, 3.0), by_hand=True, subplot_kw={"projection": "polar"})
    edges = np.linspace(-np.pi, np.pi, 25)
    for axis, (preset, beta) in zip(axes[0], columns, strict=True):
        run, unit = runs.runs[preset, "pwc"], runs.stacks[preset, "pwc"].steps_per_epoch()
        chosen = [member["beta"] == beta for member in run.members]
        for epoch, colour, label in ((0, "grey", "start"), (last, "blue", f"epoch {last}")):
            normals = run.array("normals", epoch * unit)[chosen][:, -1].reshape(-1, 2)
            share = np.histogram(np.arctan2(normals[:, 1], normals[:, 0]), edges)[0] / len(normals)
            style: dict[str, Any] = {"color": plots.COLOURS[colour], "alpha": 0.5, "label": label}
            axis.bar(edges[:-1], share, np.diff(edges), align="edge", **style)
        angle = np.linspace(0, 2 * np.pi, 100)
        axis.plot(angle, np.full(100, 1 / 24), "--", color=plots.COLOURS["black"], linewidth=0.7)
        axis.text(0.5, 1.25, f"{preset}, beta {beta:g}", transform=axis.transAxes, ha="center")
        axis.grid(alpha=0.3)
        axis.set(xticks=[0, np.pi / 2, np.pi, 3 * np.pi / 2], xticklabels=["", "easy", "", "hard"], yticklabels=[])
    figure.subplots_adjust(left=0.02, right=0.98, bottom=0.2, top=0.78)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=2)
    return figure


def draw_layers(results: Results) -> plots.Figure:
    """Every half-plane of seed 0, layer by layer, before and after training."""
    runs, settings = CircleRuns(results), results.settings
    figure, axes = plots.grid(2, 1, (0.56 * settings.width + 0.8, 0.56 * settings.depth + 0.3))
    for axis, epoch, colour in zip(axes[:, 0], (0, settings.epochs), ("grey", "blue"), strict=True):
        normals, offsets = (
            runs.array_of_seed_0(settings.presets[0], "pwc", name, epoch) for name in ("normals", "offsets")
        )
        plots.draw_half_planes(axis, normals, offsets, colour)
        axis.set_title(f"epoch {epoch}")
    return figure


ARM_COLOURS = {
    "pwc": "blue",
    "relu": "black",
    "pwc-large": "orange",
    "pwc-hard": "green",
    "pwc-equal": "red",
    "pwc-frozen": "red",
}


def draw_controls(results: Results) -> plots.Figure:
    """Preference for the easy half, tangent trace on it, and losses beside the least loss of the cells."""
    runs, presets = CircleRuns(results), results.settings.presets
    figure, axes = plots.grid(len(presets), 3, (4.2, 3.6))
    for (paths, trace, floors), preset in zip(axes, presets, strict=True):
        trained = [arm for one, arm in runs.stacks if one == preset]
        for arm in (arm for arm in ARM_COLOURS if arm in trained):
            style, beta = (ARMS[arm].label, ARM_COLOURS[arm]), preset_beta(preset, arm)
            if arm != "pwc-frozen":
                epochs, top = runs.curve(preset, arm, "paths_top", beta)
                bottom = runs.curve(preset, arm, "paths_bottom", beta)[1]
                log_ratio = allocation(torch.from_numpy(top), torch.from_numpy(bottom)).numpy()
                plots.draw_band(paths, epochs, log_ratio, *style)
            if arm not in ("pwc-hard", "pwc-equal"):
                epochs, share = results.table.series("tangent_top_share", **at_preset_beta(preset, arm))
                early = epochs <= results.settings.epochs
                plots.draw_band(trace, np.maximum(epochs[early], 0.5), share[early], *style, marker="o", markersize=3)
        for axis, level in ((paths, 0), (trace, 0.5)):
            axis.axhline(level, color=plots.COLOURS["grey"], linewidth=0.7)
            axis.set(xscale="log", xlabel="epoch")
            plots.legend_below(axis)
        paths.set(ylabel="log ratio of active paths", title=f"{preset}: preference for the easy half")
        trace.set(ylim=(0, 1), title="tangent trace on the easy half")
        _draw_floors(results, preset, trained, floors)
    return figure


def _draw_floors(results: Results, preset: str, trained: Sequence[str], axis: Any) -> None:
    """Losses at the end, as trained and with hard gates, beside the least loss that the hard cells allow."""
    arms = [arm for arm in ("pwc", "pwc-hard", "pwc-frozen", "pwc-frozen-hard") if arm in trained]
    for name, colour, marker, label in (
        ("loss", "blue", "o", "as trained"),
        ("loss_hard_gates", "red", "s", "with hard gates"),
        ("cell_floor", "black", "_", "least loss of its hard cells"),
    ):
        style: dict[str, Any] = {"color": plots.COLOURS[colour], "markersize": 4, "alpha": 0.7}
        for place, arm in enumerate(arms):
            values = results.table.select(name, "end", **at_preset_beta(preset, arm))
            axis.plot(place + np.linspace(-0.2, 0.2, len(values)), values, marker, **style)
        axis.plot([], [], marker, label=label, **style)
    axis.set(yscale="log", title="loss at the end, by seed")
    axis.set_xticks(range(len(arms)), [ARMS[arm].label.replace(", ", ",\n") for arm in arms], fontsize=7)
    plots.legend_below(axis, columns=3)


FIGURES = tuple(
    Figure(name, title, draw, caption=caption, from_runs=True)
    for name, title, caption, draw in (
        (
            "fig02_loss",
            "Trained and frozen gates (Figure 2)",
            "Loss over training, median and middle half of the seeds. Dotted: the loss that counts as learned.",
            draw_loss,
        ),
        (
            "fig03_overlap",
            "Which points share paths (Figure 3)",
            "Overlap kernel, trace-normalised, seed 0: common active paths of pairs of points in order of angle, "
            "the easy (top) half first.",
            partial(draw_kernels, "overlap"),
        ),
        (
            "fig04_tangent",
            "The tangent kernel over training (Figure 4)",
            "Tangent kernel, trace-normalised, seed 0: pairs of points in order of angle, the easy (top) half first.",
            partial(draw_kernels, "tangent"),
        ),
        (
            "fig05_functions",
            "What is learned when (Figure 5)",
            "Target (grey) and network, seed 0, for trained and for frozen gates.",
            draw_functions,
        ),
        (
            "fig06_half_spaces",
            "Where last-layer half-spaces point (Figure 6)",
            "Share of last-layer normals per direction, all seeds, before training and after; up is the easy half. "
            "Dashed: no preference.",
            draw_half_spaces,
        ),
        (
            "fig09_10_layers",
            "Every half-space, layer by layer (Figures 9 and 10)",
            "The part of the input disc on which each unit is open, seed 0, before and after training.",
            draw_layers,
        ),
        (
            "controls",
            "What the paper's figures need beside them",
            "Left: preference for the easy half under other starts, hard gates and equal halves. Middle: share of "
            "the tangent kernel's trace on the easy half. Right: losses beside the least loss the hard cells allow.",
            draw_controls,
        ),
    )
)


STUDY = Study(
    name="circle",
    paper="half-space",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 10, "paper": 20},
    columns=("preset", "arm"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=FIGURES,
)
