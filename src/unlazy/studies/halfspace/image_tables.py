"""What the two accuracy tables share: how claims ask for accuracies, the paper's numbers, and the figure of all accuracies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unlazy import plots
from unlazy.claims.claim import Quantity, Shown
from unlazy.studies.halfspace.image_networks import DECAY, MAIN, MODELS
from unlazy.studies.study import Results
from unlazy.studies.table import Table
from unlazy.studies.trainings import AS_TRAINED, HARD

COLUMNS = ("data", "layout", "model", "recipe", "epochs", "lr")
Training = tuple[int, float]  # epochs and learning rate; zeros for linear models


def accuracy_quantity(
    model: str, images: str = "test", gates: str = AS_TRAINED, at: str = "end", **where: Any
) -> Quantity:
    """An accuracy of a network in percent, as claims ask for it."""
    return Quantity("accuracy", at, model=model, images=images, gates=gates, **where)


def shown_accuracies(models: Sequence[str], words: str, where: Mapping[str, Mapping[str, Any]]) -> list[Shown]:
    """Accuracies of models as shown numbers, as trained and with hard gates; ``where``: the columns of each model."""
    kinds: dict[str, dict[str, str]] = {
        "test as trained": {},
        "test with hard gates": {"gates": HARD},
        "train as trained": {"images": "train"},
        "test at its best epoch": {"at": "best epoch"},
    }
    return [
        Shown(f"{MODELS[model]}{words}: {said}", accuracy_quantity(model, **kind, **where[model]), unit="%")
        for model in models
        for said, kind in kinds.items()
    ]


def list_trainings(table: Table, **where: Any) -> list[Training]:
    """Epochs and rates with which the networks of a table were trained, shortest first."""
    rows = table.where(**where).rows()
    return sorted({(int(row["epochs"]), float(row.get("lr", 0))) for row in rows})


def training_columns(training: Training) -> dict[str, Any]:
    """The columns of the table that select a training."""
    return {"epochs": training[0], "lr": training[1] or None}


def end_accuracies(
    table: Table, training: Training, images: str = "test", gates: str = AS_TRAINED, **where: Any
) -> Any:
    """Accuracies at the end of a training, one number per seed."""
    return table.select("accuracy", "end", images=images, gates=gates, **training_columns(training), **where)


PAPER_ACCURACIES = {  # test accuracies in percent by data and layout; the paper's gated networks are soft
    ("cifar-10", "conv"): {"relu": 72.17, "dlgn": 73.2, "pwc": 72.2, "dln": 40.79},
    ("cifar-10", "resnet-34"): {"relu": 91.0, "dlgn": 86.0},
    ("cifar-10", "resnet-110"): {"relu": 94.0, "dlgn": 89.0},
    ("cifar-100", "resnet-34"): {"relu": 56.68, "dlgn": 51.6},
    ("cifar-100", "resnet-110"): {"relu": 73.0, "dlgn": 67.0},
}
BARS = (
    ("train", AS_TRAINED, "train", "grey"),
    ("test", AS_TRAINED, "test, as trained", "blue"),
    ("test", HARD, "test, hard gates", "orange"),
)
DECAYED: dict[str, Any] = {"color": plots.COLOURS["black"], "marker": "_", "markersize": 13, "markeredgewidth": 2}
PUBLISHED: dict[str, Any] = {"color": plots.COLOURS["red"], "marker": "D", "markersize": 6, "markeredgecolor": "white"}


def draw_accuracies(results: Results) -> plots.Figure:
    """Training and test accuracies, as trained and with hard gates, beside the paper's."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    table = results.table.where(recipe=[MAIN, DECAY])
    places = [(data, layout) for data in table.unique("data") for layout in table.unique("layout", data=data)]
    places.sort(key=lambda place: (len(place[0]), place[0], place[1].rjust(12)))
    models = [model for model in MODELS if model in table.unique("model") and model != "relu-wide"]
    columns = min(2, len(places))
    figure, axes = plots.grid(-(-len(places) // columns), columns, (max(4.6, 1.0 * len(models)), 3.1), sharey=True)
    for axis, (data, layout) in zip(axes.flat, places, strict=False):
        own, published = table.where(data=data, layout=layout), PAPER_ACCURACIES.get((data, layout), {})
        names = [
            _draw_model(axis, spot, model, own, published.get(model), results.settings.lr)
            for spot, model in enumerate(models)
        ]
        axis.set_xticks(range(len(models)), names, fontsize=7)
        axis.set(ylim=(0, 104), xlim=(-0.6, len(models) - 0.4), title=f"{data}, {layout}", yticks=range(0, 101, 20))
    for axis in axes.flat[len(places) :]:
        axis.set_axis_off()
    for row in axes:
        row[0].set_ylabel("accuracy, %")
    key: list[Any] = [Patch(color=plots.COLOURS[colour], label=said) for *_, said, colour in BARS]
    if DECAY in table.unique("recipe"):
        key.append(Line2D([], [], linestyle="", label="test, after rate decay", **DECAYED))
    key.append(Line2D([], [], linestyle="", label="the paper, test", **PUBLISHED))
    figure.legend(handles=key, loc="outside lower center", ncols=5)
    return figure


def _draw_model(axis: Any, spot: int, model: str, table: Table, published: float | None, usual_rate: float) -> str:
    """Draw the bars of a model after its longest training: medians over seeds, a dot per seed. Returns its tick label."""
    words = MODELS[model].replace(", ", ",\n").replace("linear model on ", "linear on\n")
    words = words.replace("ridge on the ", "ridge on\n")
    theirs = "" if published is None else f"\n(paper: {published:g})"
    if published is not None:
        axis.plot(spot, published, **PUBLISHED)
    own = table.where(model=model, recipe=MAIN)
    if not len(own):
        return f"{words}\nnot run{theirs}"
    epochs, rate = training = max(list_trainings(own))
    for shift, (images, gates, _, colour) in zip((-0.27, 0.0, 0.27), BARS, strict=True):
        values = end_accuracies(own, training, images, gates)
        if not len(values) or (gates == HARD and model not in ("dlgn", "pwc")):
            continue  # the same number twice
        middle = float(np.median(values))
        shade = "orange" if model.endswith("hard") and images == "test" else colour
        axis.bar(spot + shift, middle, 0.25, color=plots.COLOURS[shade])
        if len(values) > 1:
            axis.plot([spot + shift] * len(values), values, "o", markersize=2, color=plots.COLOURS["black"])
        ink = "black" if shade == "orange" else "white"
        axis.text(spot + shift, 2, f"{middle:.1f}", ha="center", va="bottom", fontsize=7, rotation=90, color=ink)
    for value in end_accuracies(table.where(model=model, recipe=DECAY), training):
        axis.plot(spot, value, **DECAYED)
    unusual = "" if rate == usual_rate else f",\nrate {rate:g}"
    return f"{words}\n" + (f"{epochs} epochs{unusual}" if epochs else "") + theirs
