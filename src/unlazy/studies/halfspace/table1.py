"""Convolutional networks on CIFAR-10: ReLU, gated, linear, tangent features, costs (Table 1; C20-C23, C25, F5).

The gated networks of the paper have soft gates, so these are judged. The same networks with hard gates, and networks trained with
hard gates, are shown besides. Networks are compared if they share epochs, rate and seed; accuracies are of the last epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.claims.functions import difference, distance, ratio
from unlazy.studies.halfspace.image_networks import (
    COST,
    DECAY,
    KERNELS,
    LINEAR_MODELS,
    MAIN,
    MODELS,
    Network,
    measure,
    network_from,
)
from unlazy.studies.halfspace.image_tables import (
    COLUMNS,
    accuracy_quantity,
    draw_accuracies,
    list_trainings,
    shown_accuracies,
    training_columns,
)
from unlazy.studies.study import Figure, Results, Settings, Study

# --- what varies ---------------------------------------------------------------------------------------------

GATED = ("relu", "dlgn", "pwc")
PAPER_SCALE: dict[str, Any] = {  # the paper's data and layout
    "data": "cifar-10",
    "models": (*GATED, "dln", "tangent", "dlgn-hard", "pwc-hard", "trace"),
    "costed": (*GATED, "dlgn-hard", "relu-wide"),
    "epochs": 100,  # of every model
    "lr": 4e-4,
    "measured_at": (1, 2, 3, 5, 8, 13, 21, 34, 55, 80),
    "long_epochs": 350,  # of a second, longer training of the three compared models; 0: none
    "long_lr": 1e-3,
    "long_measured_at": (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 117, 144, 175, 200, 233, 260, 290, 320),
    "decay_epochs": 20,  # at a tenth of the rate, after the longest training of the three
    "cost_epochs": 3,
    "images": 50_000,
    "test_images": 10_000,
    "batch": 128,
    "width": 1.0,
    "kernel_images": 50,
    "precision": "float32",  # on a GPU; "bfloat16" would halve the memory traffic, which limits such small networks
}
SMALL = PAPER_SCALE | {"long_epochs": 0, "measured_at": (1,), "batch": 32, "cost_epochs": 1}
SCALES = {
    # seconds, on digits: shows that the study runs; no claim is judged
    "smoke": SMALL
    | {"data": "digits", "epochs": 2, "lr": 3e-3, "decay_epochs": 2}
    | {"images": 300, "test_images": 100, "width": 0.25, "kernel_images": 2},
    # minutes on two cores: too few images and epochs to judge anything
    "desk": SMALL
    | {"models": (*GATED, "dln", "trace"), "costed": GATED, "epochs": 3, "lr": 1e-3, "decay_epochs": 0}
    | {"images": 1500, "test_images": 1000, "width": 0.5, "kernel_images": 3},
    "paper": PAPER_SCALE,
}


def cases(settings: Settings, seeds: Sequence[int]) -> list[Network]:
    """Seed by seed: every model, the longer trainings, those with learning-rate decay, and short ones to measure costs."""
    found = []
    for seed in seeds:
        base = network_from(settings, layout="conv", model="relu", seed=seed, decay_epochs=0)
        bare = replace(base, measured_at=(), kernel_images=0)
        main = [replace(base, model=model) for model in settings.models if model not in LINEAR_MODELS]
        compared = [case for case in main if case.model in GATED]
        if settings.long_epochs:
            longer: Any = {"epochs": settings.long_epochs, "lr": settings.long_lr}
            compared = [replace(case, **longer, measured_at=settings.long_measured_at) for case in compared]
            main += compared
        found += main
        found += [replace(bare, model=model, epochs=0, lr=None) for model in settings.models if model in LINEAR_MODELS]
        if settings.decay_epochs:
            decay: Any = {"recipe": DECAY, "decay_epochs": settings.decay_epochs, "kernel_images": 0}
            found += [replace(case, **decay) for case in compared]
        found += [replace(bare, model=model, recipe=COST, epochs=settings.cost_epochs) for model in settings.costed]
    return found


# --- what is claimed -----------------------------------------------------------------------------------------

ABOUT_A_POINT = 1.5  # C20, C22, C25: "about one point", read as up to one and a half
FAR_BEHIND = 10.0  # C21, C23: points; in the paper the deep linear network is 31 behind
FITTED = 90.0  # % of the training images that the ReLU network fits when its training is done; in the paper 96
RISE = 0.5  # points: most that the last third of a training adds to the best accuracy when training is done
RANGE = 1.5  # points: largest difference of accuracies in that third when training is done

# C20, C22 and C25 compare accuracies to about a point, so they are judged only if training is done: if the ReLU network fits its
# training images, or if in every compared network the accuracy neither rises nor fluctuates any more (RISE, RANGE). With a
# constant learning rate this may never happen; then the same networks are compared after learning-rate decay, if the accuracy has
# settled there.
# These conditions were set after runs had ended without meeting them. RANGE and the comparison after decay were added after 350
# epochs at rate 1e-3, in which gated networks fluctuated by up to four points, and before any learning-rate decay was run. After
# five epochs of decay the DLGN still rose by 0.06 points too much; the conditions stayed, and decay now takes twenty epochs.


def cifar_columns(epochs: int, lr: float, recipe: str = MAIN) -> dict[str, Any]:
    """The columns of networks that were trained for this number of epochs at this rate."""
    return {"data": "cifar-10", "layout": "conv", **training_columns((epochs, lr)), "recipe": recipe}


SHORT = cifar_columns(PAPER_SCALE["epochs"], PAPER_SCALE["lr"])
LONG = cifar_columns(PAPER_SCALE["long_epochs"], PAPER_SCALE["long_lr"])
DECAYED = LONG | {"recipe": DECAY}
LINEAR = cifar_columns(0, 0.0)
TIMED = cifar_columns(PAPER_SCALE["cost_epochs"], PAPER_SCALE["lr"], COST)
LONGEST = {model: LONG if model in GATED else LINEAR if model in LINEAR_MODELS else SHORT for model in MODELS}
Vector = NDArray[Any]


def both_stages(models: Sequence[str], images: str) -> tuple[Quantity, ...]:
    """The arguments of ``once_done``: how well ReLU fits; accuracy, rise and range of every model before and after decay."""
    found = [accuracy_quantity("relu", "train", **LONG)]
    for model, where in product(models, (LONG, DECAYED)):
        settled = [Quantity(f"last_third_{name}", model=model, images=images, **where) for name in ("rise", "range")]
        found += [accuracy_quantity(model, images, **where), *settled]
    return tuple(found)


def once_done(relu_fits: Vector, *numbers: Vector) -> Vector:
    """Accuracies ``[models, seeds]`` once training is done: at the constant rate, else after decay; NaN if it is not done."""
    table = np.array(numbers).reshape(-1, 2, 3, len(relu_fits))  # models, stages, (accuracy, rise, range), seeds
    settled = np.all((table[:, :, 1] < RISE) & (table[:, :, 2] < RANGE), axis=0)
    done = (relu_fits >= FITTED) | settled[0]
    known = np.isfinite(table[:, 0]).all((0, 1)) & np.isfinite(relu_fits)
    return np.where(known, np.where(done, table[:, 0, 0], np.where(settled[1], table[:, 1, 0], np.nan)), np.nan)


def largest_difference_once_done(relu_fits: Vector, *numbers: Vector) -> Vector:
    """The largest difference between two of the models."""
    return np.asarray(np.ptp(once_done(relu_fits, *numbers), axis=0))


def first_less_second_once_done(relu_fits: Vector, *numbers: Vector) -> Vector:
    """The first model less the second."""
    found = once_done(relu_fits, *numbers)
    return np.asarray(found[0] - found[1])


def first_from_second_once_done(relu_fits: Vector, *numbers: Vector) -> Vector:
    """How far the first two models are apart."""
    found = once_done(relu_fits, *numbers)
    return np.abs(found[0] - found[1])


def second_from_third_once_done(relu_fits: Vector, *numbers: Vector) -> Vector:
    """How far the second and the third model are apart."""
    found = once_done(relu_fits, *numbers)
    return np.abs(found[1] - found[2])


def difference_at_best_ridge(one: Vector, linear: Vector, ridge: Vector, least_ridge: Vector) -> Vector:
    """One model less a linear model; NaN unless a ridge below the chosen one was tried."""
    return np.where(ridge > least_ridge, one - linear, np.nan)


def above_linear_model(model: str) -> tuple[Quantity, ...]:
    """The arguments of ``difference_at_best_ridge``: a network, the linear model on tangent features, and its ridges."""
    ridges = (Quantity(name, model="tangent", **LINEAR) for name in ("ridge", "least_ridge"))
    return accuracy_quantity(model, **LONG), accuracy_quantity("tangent", **LINEAR), *ridges


def cost_pair(model: str, cost: str) -> tuple[Quantity, Quantity]:
    """A cost of a model and of ReLU, ordered so that the ratio of first over second grows with the cost of the model."""
    pair = (Quantity(cost, model=model, **TIMED), Quantity(cost, model="relu", **TIMED))
    return pair if cost != "images_per_second" else (pair[1], pair[0])


COST_WORDS = {
    "seconds_per_epoch": "training time",
    "peak_megabytes": "training memory",
    "images_per_second": "inference time",
}


def shown_costs() -> list[Shown]:
    """Costs of the other models over those of ReLU, the costs of ReLU, and the numbers of parameters."""
    found = []
    for cost, said in COST_WORDS.items():
        found += [
            Shown(f"{MODELS[model]} over ReLU in {said}", cost_pair(model, cost), by=ratio, unit="times")
            for model in ("pwc", "dlgn-hard", "relu-wide")
        ]
        found.append(Shown(f"ReLU: {cost.replace('_', ' ')}", Quantity(cost, model="relu", **TIMED)))
    return found + [
        Shown(f"{MODELS[model]}: parameters", Quantity("parameters", model=model, **TIMED))
        for model in (*GATED, "relu-wide")
    ]


DECAY_WORDS = f"then {PAPER_SCALE['decay_epochs']} epochs at a tenth of the rate"
FIGURE = "table1_accuracies"
in_points = partial(Part, unit="points")

CLAIMS = (
    Claim(
        "C20",
        says=(
            "Five-layer convolutional networks with ReLU, with linear gating and with linear gating and constant "
            "experts reach test accuracies on CIFAR-10 that lie within about one point of each other."
        ),
        where="Table 1",
        paper="72.2 / 73.2 / 72.2 % test",
        figure=FIGURE,
        parts=[
            in_points(
                "largest difference of the three in test accuracy",
                both_stages(GATED, "test"),
                by=largest_difference_once_done,
                below=ABOUT_A_POINT,
            )
        ],
        shows=[
            *shown_accuracies((*GATED, "dlgn-hard", "pwc-hard"), "", LONGEST),
            *(
                Shown(
                    f"{MODELS[model]}, {DECAY_WORDS}: {images} as trained",
                    accuracy_quantity(model, images, **DECAYED),
                    unit="%",
                )
                for model, images in product(GATED, ("train", "test"))
            ),
        ],
    ),
    Claim(
        "C21",
        says=(
            "A deep linear convolutional network of the same layout stays far behind the three gated ones in test "
            "accuracy on CIFAR-10."
        ),
        where="Table 1",
        paper="40.8 % test",
        figure=FIGURE,
        parts=[
            in_points(
                f"{MODELS[model]} above deep linear in test accuracy",
                (accuracy_quantity(model, **SHORT), accuracy_quantity("dln", **SHORT)),
                by=difference,
                above=FAR_BEHIND,
            )
            for model in GATED
        ],
        shows=shown_accuracies(("dln",), "", LONGEST),
    ),
    Claim(
        "C22",
        says=(
            "On CIFAR-10 the linearly gated convolutional network ends with a lower training accuracy than the "
            "ReLU network although their test accuracies are about equal."
        ),
        where="Table 1",
        paper="85.3 against 96.3 % train",
        figure=FIGURE,
        parts=[
            in_points(
                "ReLU above DLGN in training accuracy",
                both_stages(("relu", "dlgn"), "train"),
                by=first_less_second_once_done,
                above=0,
            ),
            in_points(
                "difference of the two in test accuracy",
                both_stages(("relu", "dlgn"), "test"),
                by=first_from_second_once_done,
                below=ABOUT_A_POINT,
            ),
        ],
        shows=shown_accuracies(GATED, "", LONGEST),
    ),
    Claim(
        "C23",
        says=(
            "A linear model on the tangent features of the untrained convolutional network stays far behind the "
            "ReLU network and both linearly gated networks in test accuracy on CIFAR-10."
        ),
        where="text beside Table 1",
        paper="wide margin; no number",
        figure=FIGURE,
        parts=[
            in_points(
                f"{MODELS[model]} above the linear model in test accuracy",
                above_linear_model(model),
                by=difference_at_best_ridge,
                above=FAR_BEHIND,
            )
            for model in GATED
        ],
        shows=shown_accuracies(LINEAR_MODELS, "", LONGEST),
    ),
    Claim(
        "C25",
        says=(
            "Replacing the linear experts of a DLGN by constant experts changes its test accuracy by less than "
            "about one point."
        ),
        where="text beside Table 1",
        paper="indistinguishable on most data; 73.2 against 72.2 % in Table 1",
        figure=FIGURE,
        parts=[
            in_points(
                "difference in test accuracy",
                both_stages(GATED, "test"),
                by=second_from_third_once_done,
                below=ABOUT_A_POINT,
            )
        ],
        shows=[
            Shown(
                "difference, both trained with hard gates",
                (accuracy_quantity("dlgn-hard", **SHORT), accuracy_quantity("pwc-hard", **SHORT)),
                by=distance,
                unit="points",
            )
        ],
    ),
    Claim(
        "F5",
        says="A DLGN takes more time and memory to train and to run than a ReLU network of the same layout.",
        where="published summary, check 3",
        paper="no number; about twice the parameters by construction",
        figure=FIGURE,
        parts=[
            Part(f"DLGN over ReLU in {said}", cost_pair("dlgn", cost), by=ratio, above=1, unit="times")
            for cost, said in COST_WORDS.items()
        ],
        shows=shown_costs(),
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------

TICK_EPOCHS = (0, 1, 3, 10, 30, 100, 300)
KERNEL_CURVES = {
    "alignment": "centred alignment with labels",
    "distance": "distance from the start",
    "velocity": "velocity, 1 / epoch",
}


def draw_kernels(results: Results) -> plots.Figure:
    """Alignment with the labels, distance from the start and velocity of the overlap and the tangent kernel."""
    from matplotlib.lines import Line2D

    table = results.table.where(quantity=list(KERNEL_CURVES))
    models = [model for model in MODELS if model in table.unique("model")]
    colours = dict(zip(models, (shade for name, shade in plots.COLOURS.items() if name != "grey"), strict=False))
    strokes: dict[Any, Any] = dict(
        zip(list_trainings(table)[::-1], cycle(("-", "--", ":", "-.")))
    )  # the longest as a full line
    last = max([1.0, *(float(at) for at in table.unique("at"))])
    figure, axes = plots.grid(2, 3, (3.2, 2.4))
    for kernel, line in zip(KERNELS, axes, strict=True):
        for (name, title), axis in zip(KERNEL_CURVES.items(), line, strict=True):
            for (training, stroke), (model, colour) in product(strokes.items(), colours.items()):
                epochs, values = table.series(name, kernel=kernel, model=model, **training_columns(training))
                if len(epochs):
                    axis.plot(epochs, values, "o", markersize=2.5, linestyle=stroke, color=colour, linewidth=1.2)
            axis.set(title=title, xscale="symlog", xlabel="epoch" if kernel == "tangent" else "", xlim=(0, 1.1 * last))
            shown = [epoch for epoch in TICK_EPOCHS if epoch <= last]
            axis.set_xticks(shown, [str(epoch) for epoch in shown])
            axis.minorticks_off()
        line[0].set_ylabel(f"{kernel} kernel")
    key = [Line2D([], [], color=colour, label=MODELS[model]) for model, colour in colours.items()]
    for (run_epochs, rate), stroke in strokes.items():
        words = f"{run_epochs:g} epochs, rate {rate:g}"
        key.append(Line2D([], [], color=plots.COLOURS["grey"], linestyle=stroke, label=words))
    figure.legend(handles=key, loc="outside lower center", ncols=4)
    return figure


STUDY = Study(
    name="table1",
    paper="half-space",
    scales=SCALES,
    seeds={"smoke": 1, "desk": 1, "paper": 3},
    cases=cases,
    measure=measure,
    columns=COLUMNS,
    claims=CLAIMS,
    figures=(
        Figure(FIGURE, "Accuracies on CIFAR-10 (Table 1)", draw_accuracies),
        Figure("table1_kernels", "Kernels of fixed images along training", draw_kernels),
    ),
    needs_gpu=("paper",),
)
