"""The accuracy tables as figures: what was measured beside what the paper has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from unlazy import plots
from unlazy.studies.halfspace.tables.claims import FIGURE_OF
from unlazy.studies.halfspace.tables.compare import UNTRAINED, Cell, Table, Training
from unlazy.studies.halfspace.tables.dynamics import alike
from unlazy.studies.halfspace.tables.settings import MODELS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = {  # test accuracy in percent by (data, layout, model); the paper's gated networks are soft
    ("cifar-10", "conv", "relu"): 72.17,
    ("cifar-10", "conv", "dlgn"): 73.2,
    ("cifar-10", "conv", "pwc"): 72.2,
    ("cifar-10", "conv", "dln"): 40.79,
    ("cifar-10", "resnet-34", "relu"): 91.0,
    ("cifar-10", "resnet-34", "dlgn"): 86.0,
    ("cifar-10", "resnet-110", "relu"): 94.0,
    ("cifar-10", "resnet-110", "dlgn"): 89.0,
    ("cifar-100", "resnet-34", "relu"): 56.68,
    ("cifar-100", "resnet-34", "dlgn"): 51.6,
    ("cifar-100", "resnet-110", "relu"): 73.0,
    ("cifar-100", "resnet-110", "dlgn"): 67.0,
}
EPOCHS = (0, 1, 3, 10, 30, 100, 300)  # named on the axis of kernels along training
BARS = (
    ("train_as_trained", "train", "grey"),
    ("test_as_trained", "test, as trained", "blue"),
    ("test_hard_gates", "test, hard gates", "orange"),
)


COOLED: dict[str, Any] = {"color": plots.COLOURS["black"], "marker": "_", "markersize": 13, "markeredgewidth": 2}
PUBLISHED: dict[str, Any] = {"color": plots.COLOURS["red"], "marker": "D", "markersize": 6, "markeredgecolor": "white"}


def draw(results: Mapping[str, Any]) -> dict[str, Figure]:
    """The figure of a table by file name."""
    places = sorted({(cell["data"], cell["layout"]) for cell in results["cells"]}, key=_order)
    with plots.style():
        made = {FIGURE_OF[results["study"]]: accuracies(results, places)}
        if results.get("dynamics"):
            made["table1_kernels"] = kernels(results["dynamics"])
        return made


def kernels(dynamics: Mapping[str, Any]) -> Figure:
    """How the kernels of fixed images move: towards the labels, away from their start, and how fast; one line per network."""
    rows = (("overlap", "overlap kernel"), ("tangent", "tangent kernel"))
    columns = (
        ("alignment", "centred alignment with labels"),
        ("distance", "distance from the start"),
        ("velocity", "velocity, 1 / epoch"),
    )
    figure, axes = plots.grid(2, 3, (3.2, 2.4))
    groups = alike(dynamics["networks"])
    models = [model for model in MODELS if any(model == own for _, own in groups)]
    colours = dict(zip(models, (shade for name, shade in plots.COLOURS.items() if name != "grey"), strict=False))
    runs = sorted({training for training, _ in groups}, reverse=True)  # the longest as a full line
    strokes = dict(zip(runs, cycle(("-", "--", ":", "-."))))
    last = max(1.0, *(net["epochs"][-1] for net in dynamics["networks"]))
    for (kind, said), line in zip(rows, axes, strict=True):
        for (name, title), axis in zip(columns, line, strict=True):
            for (training, model), own in groups.items():
                drawn = {"linestyle": strokes[training], "color": colours[model]}
                for net in own:
                    values = [np.nan if value is None else value for value in net[f"{kind}_{name}"]]
                    first = len(net["epochs"]) - len(values)  # a velocity belongs to the later of two looks
                    axis.plot(net["epochs"][first:], values, "o", markersize=2.5, linewidth=1.2, **drawn)
            axis.set(title=title, xscale="symlog", xlabel="epoch" if kind == "tangent" else "", xlim=(0, 1.1 * last))
            shown = [epoch for epoch in EPOCHS if epoch <= last]
            axis.set_xticks(shown, [str(epoch) for epoch in shown])
            axis.minorticks_off()
        line[0].set_ylabel(said)
    figure.legend(handles=_lines(colours, strokes), loc="outside lower center", ncols=4)
    return figure


def _lines(colours: Mapping[str, Any], strokes: Mapping[Training, Any]) -> list[Any]:
    """What colours and strokes mean."""
    from matplotlib.lines import Line2D

    made = [Line2D([], [], color=colour, label=MODELS[model]) for model, colour in colours.items()]
    grey = plots.COLOURS["grey"]
    runs = [
        Line2D([], [], color=grey, linestyle=stroke, label=f"{epochs:g} epochs, rate {rate:g}")
        for (epochs, rate), stroke in strokes.items()
    ]
    return made + runs


def normals(pictures: Mapping[str, Any]) -> Figure:
    """Half-spaces of a trained gating branch as pictures: one row a layer, one column a channel, grey for zero."""
    layers = sorted(int(name.removeprefix("layer_")) for name in pictures)
    count = len(pictures[f"layer_{layers[0]}"])
    with plots.style():
        figure, axes = plots.grid(len(layers), count, (1.0, 1.0))
        for layer, line in zip(layers, axes, strict=True):
            for axis, normal in zip(line, pictures[f"layer_{layer}"], strict=True):
                normal = np.asarray(normal, dtype=np.float64)
                axis.imshow(
                    0.5 + 0.5 * normal.transpose(1, 2, 0) / (np.abs(normal).max() or 1), interpolation="nearest"
                )
                axis.set_xticks([])
                axis.set_yticks([])
            line[0].set_ylabel(f"layer {layer + 1}", fontsize=8)
        return figure


def accuracies(results: Mapping[str, Any], places: Sequence[tuple[str, str]]) -> Figure:
    """One panel for each data set and layout, bars for models, a diamond where the paper has a number."""
    shown = {cell["model"] for cell in results["cells"] if cell["recipe"] == "main"}
    models = [model for model in MODELS if model in shown and model != "relu-wide"]
    columns = min(2, len(places))
    figure, axes = plots.grid(-(-len(places) // columns), columns, (max(4.6, 1.0 * len(models)), 3.1), sharey=True)
    for axis, (data, layout) in zip(axes.flat, places, strict=False):
        _panel(axis, Table(results), data, layout, models)
    for axis in axes.flat[len(places) :]:
        axis.set_axis_off()
    for row in axes:
        row[0].set_ylabel("accuracy, %")
    figure.legend(handles=_key(cooled=bool(results.get("cooled"))), loc="outside lower center", ncols=5)
    return figure


def _key(*, cooled: bool) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    made: list[Any] = [Patch(color=plots.COLOURS[colour], label=said) for _, said, colour in BARS]
    if cooled:
        made.append(Line2D([], [], linestyle="", label="test, cooled", **COOLED))
    return [*made, Line2D([], [], linestyle="", label="the paper, test", **PUBLISHED)]


def _panel(axis: Any, table: Table, data: str, layout: str, models: Sequence[str]) -> None:
    """Bars are medians over seeds, each seed a dot; their numbers stand at their feet, epochs and the paper's under the names."""
    for shift, (name, _, colour) in zip((-0.27, 0.0, 0.27), BARS, strict=True):
        for place, model in enumerate(models):
            if name == "test_hard_gates" and model not in ("dlgn", "pwc"):
                continue  # the same number twice
            values = table.percent([model], name, data=data, layout=layout)[0]
            if np.isnan(values).all():
                continue
            middle = float(np.median(values))
            half_spaces = model.endswith("hard") and name == "test_as_trained"
            shade = "orange" if half_spaces else colour
            axis.bar(place + shift, middle, 0.25, color=plots.COLOURS[shade])
            if len(values) > 1:
                axis.plot([place + shift] * len(values), values, "o", markersize=2, color=plots.COLOURS["black"])
            text = axis.text(place + shift, 2, f"{middle:.1f}", ha="center", va="bottom", fontsize=7, rotation=90)
            text.set_color("black" if shade == "orange" else "white")
    names = []
    for place, model in enumerate(models):
        theirs = PAPER.get((data, layout, model))
        cells = table.compared([model], data=data, layout=layout, recipe="main")
        published = "" if theirs is None else f"\n(paper: {theirs:g})"
        names.append(f"{_wrapped(MODELS[model])}\n{_trained(table, cells)}{published}")
        if theirs is not None:
            axis.plot(place, theirs, **PUBLISHED)
        for (net,) in table.cooled(cells):
            axis.plot(place, 100 * net["after"]["test_as_trained"], **COOLED)
    axis.set_xticks(range(len(models)), names, fontsize=7)
    axis.set(ylim=(0, 104), xlim=(-0.6, len(models) - 0.4), title=f"{data}, {layout}")
    axis.set_yticks(range(0, 101, 20))


def _trained(table: Table, cells: Sequence[Sequence[Cell]]) -> str:
    """Epochs, and the rate where it is unusual."""
    if not cells:
        return "not run"
    epochs, rate = table.training_of(cells[0][0])
    if (epochs, rate) == UNTRAINED:
        return ""
    return f"{epochs} epochs" + ("" if rate == table.results["settings"]["lr"] else f",\nrate {rate:g}")


def _wrapped(text: str) -> str:
    return text.replace(", ", ",\n").replace("linear model on ", "linear on\n").replace("ridge on the ", "ridge on\n")


def _order(place: tuple[str, str]) -> tuple[int, str, str]:
    data, layout = place
    return len(data), data, {"resnet-34": "a", "resnet-110": "b"}.get(layout, layout)
