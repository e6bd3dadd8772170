"""The accuracy tables as figures: what was measured beside what the paper has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unlazy import plots
from unlazy.studies.halfspace.tables.claims import FIGURE_OF, Table
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
    models = [model for model in MODELS if any(model == own for _, _, own in groups)]
    colours = dict(zip(models, (shade for name, shade in plots.COLOURS.items() if name != "grey"), strict=False))
    runs = sorted({(epochs, rate) for epochs, rate, _ in groups}, reverse=True)  # the longest as a full line
    strokes = dict(zip(runs, ("-", "--", ":", "-."), strict=False))
    last = runs[0][0]
    for (kind, said), line in zip(rows, axes, strict=True):
        for (name, title), axis in zip(columns, line, strict=True):
            for (epochs, rate, model), own in groups.items():
                for net in own:
                    values = [np.nan if value is None else value for value in net[f"{kind}_{name}"]]
                    looks, stroke = net["epochs"][-len(values) :], strokes[epochs, rate]
                    axis.plot(looks, values, "o", linestyle=stroke, markersize=2.5, linewidth=1.2, color=colours[model])
            axis.set(title=title, xscale="symlog", xlabel="epoch" if kind == "tangent" else "", xlim=(0, 1.1 * last))
            shown = [epoch for epoch in EPOCHS if epoch <= last]
            axis.set_xticks(shown, [str(epoch) for epoch in shown])
            axis.minorticks_off()
        line[0].set_ylabel(said)
    figure.legend(handles=_lines(colours, strokes), loc="outside lower center", ncols=4)
    return figure


def _lines(colours: Mapping[str, Any], strokes: Mapping[tuple[float, float], Any]) -> list[Any]:
    """What colours and, where there is more than one, strokes mean."""
    from matplotlib.lines import Line2D

    made = [Line2D([], [], color=colour, label=MODELS[model]) for model, colour in colours.items()]
    grey = plots.COLOURS["grey"]
    runs = [
        Line2D([], [], color=grey, linestyle=stroke, label=f"{epochs:g} epochs, rate {rate:g}")
        for (epochs, rate), stroke in strokes.items()
    ]
    return made + runs if len(runs) > 1 else made


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
    figure.legend(handles=_key(), loc="outside lower center", ncols=4)
    return figure


def _key() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    diamond = Line2D([], [], color=plots.COLOURS["red"], marker="D", markersize=5, linestyle="")
    diamond.set_label("the paper, test")
    return [*(Patch(color=plots.COLOURS[colour], label=said) for _, said, colour in BARS), diamond]


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
        epochs = table.together([model], "epochs", data=data, layout=layout)[0, 0]
        long = f"\n{int(epochs)} epochs" if epochs > 0 else "\nnot run" if np.isnan(epochs) else ""
        names.append(_wrapped(MODELS[model]) + long + ("" if theirs is None else f"\n(paper: {theirs:g})"))
        if theirs is not None:
            axis.plot(place, theirs, "D", color=plots.COLOURS["red"], markersize=6, markeredgecolor="white")
    axis.set_xticks(range(len(models)), names, fontsize=7)
    axis.set(ylim=(0, 104), xlim=(-0.6, len(models) - 0.4), title=f"{data}, {layout}")
    axis.set_yticks(range(0, 101, 20))


def _wrapped(text: str) -> str:
    return text.replace(", ", ",\n").replace("linear model on ", "linear on\n").replace("ridge on the ", "ridge on\n")


def _order(place: tuple[str, str]) -> tuple[int, str, str]:
    data, layout = place
    return len(data), data, {"resnet-34": "a", "resnet-110": "b"}.get(layout, layout)
