"""Three pictures: the alpha sweep, every measure against the truth, and kernel movement against width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from unlazy import plots
from unlazy.plots import COLOURS

NET_COLOURS = {"relu": "blue", "dlgn": "red", "conv": "green", "transformer": "purple"}
NET_NAMES = {"relu": "ReLU net", "dlgn": "DLGN", "conv": "convolutions", "transformer": "transformer"}
MARKS = {"lazy": "v", "mixed": "s", "rich": "^", "cannot tell": "x"}
BANDS = {"lazy": "sky", "mixed": "orange", "rich": "green"}
FLOOR, CEILING = 0.003, 3.0


def figures(table: Mapping[str, Any]) -> dict[str, Any]:
    """By file name."""
    found = {"widths": widths(table)}
    if table["thresholds"] is not None:
        found |= {"alpha": alpha(table), "measures": measures(table)}
    return found


def alpha(table: Mapping[str, Any]) -> Any:
    """The gap to the linearised twin against the output scale, one panel a data set; markers are verdicts."""
    sets = list(dict.fromkeys(sweep["data"] for sweep in table["alpha_sweep"]))
    with plots.style():
        figure, axes = plots.grid(1, len(sets), (3.1, 3.6), sharey=True)
        for panel, data in zip(axes[0], sets, strict=True):
            _bands(panel, table)
            for sweep in [one for one in table["alpha_sweep"] if one["data"] == data]:
                colour = COLOURS[NET_COLOURS[sweep["net"]]]
                gaps = np.clip(np.array(sweep["gaps"], dtype=float), FLOOR, CEILING)
                style = {"score": "-", "fit": ":", "between": "--"}[sweep["role"]]
                panel.plot(sweep["alphas"], gaps, style, color=colour, linewidth=1.2)
                for x, y, label in zip(sweep["alphas"], gaps, sweep["labels"], strict=True):
                    face = colour if label != "cannot tell" else COLOURS["black"]
                    panel.plot([x], [y], MARKS[label], color=face, markersize=6 if label != "cannot tell" else 5)
            panel.set(xscale="log", yscale="log", title=data, xlabel="output scale α", ylim=(FLOOR, CEILING))
        axes[0, 0].set_ylabel("gap to the linearised twin")
        handles = [
            axes[0, 0].plot([], [], color=COLOURS[colour], label=NET_NAMES[net])[0]
            for net, colour in NET_COLOURS.items()
        ]
        handles += [
            axes[0, 0].plot([], [], mark, color=COLOURS["grey"], label=f"verdict: {label}")[0]
            for label, mark in MARKS.items()
        ]
        lines = {"unseen net and data": "-", "one of the two unseen": "--", "fitted": ":"}
        handles += [axes[0, 0].plot([], [], style, color="k", label=label)[0] for label, style in lines.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=6)
        return figure


def measures(table: Mapping[str, Any]) -> Any:
    """Every cell: a measure against the gap it is to stand for; lines are the thresholds."""
    limits = table["thresholds"]["measures"]
    with plots.style():
        columns = 3
        figure, axes = plots.grid(-(-len(limits) // columns), columns, (3.6, 3.0), sharey=True)
        for panel in axes.flat[len(limits) :]:
            panel.set_axis_off()
        for panel, (name, limit) in zip(axes.flat, limits.items(), strict=False):
            _bands(panel, table)
            for role, style in (("fit", "o"), ("score", "D")):
                for row in table["rows"]:
                    found = row["readings"]["measures"].get(name)
                    if row["role"] != role or found is None or row["gap"] is None or found[0] <= 0:
                        continue
                    colour = COLOURS[NET_COLOURS[row["cell"]["net"]]]
                    face = colour if role == "score" else "none"
                    gap = float(np.clip(row["gap"], FLOOR, CEILING))
                    panel.plot([found[0]], [gap], style, color=colour, markerfacecolor=face, markersize=4)
            for value in (limit["lazy_below"], limit["rich_above"]):
                panel.axvline(value, color=COLOURS["black"], linewidth=0.8)
            title = f"{name.replace('_', ' ')} (off by a factor {np.exp(limit['spread']):.2g})"
            panel.set(xscale="log", yscale="log", title=title, ylim=(FLOOR, CEILING))
        for panel in axes[:, 0]:
            panel.set_ylabel("gap to the twin")
        handles = [
            axes[0, 0].plot([], [], "o", color=COLOURS[colour], label=NET_NAMES[net])[0]
            for net, colour in NET_COLOURS.items()
        ]
        handles.append(axes[0, 0].plot([], [], "ok", markerfacecolor="none", label="fitted")[0])
        handles.append(axes[0, 0].plot([], [], "Dk", label="scored (both unseen)")[0])
        figure.legend(handles=handles, loc="outside lower center", ncols=6)
        return figure


def widths(table: Mapping[str, Any]) -> Any:
    """Relative change of the tangent kernel against width, with fitted exponents."""
    found = table["widths"]
    with plots.style():
        figure, axes = plots.grid(1, 1, (4.6, 3.4))
        panel = axes[0, 0]
        for name, words, colour in (("ntk", "NTK", "blue"), ("mup", "maximal update", "red")):
            fit = found["exponents"][name]["change"]
            low, high = fit["interval"]
            label = f"{words}: exponent {fit['median']:.2f} [{low:.2f}, {high:.2f}]"
            plots.band(panel, found["widths"], np.array(found[name]["change"]), label, colour, marker="o", markersize=4)
        panel.set(xscale="log", yscale="log", xlabel="width", ylabel="relative change of the tangent kernel")
        panel.set_xticks(found["widths"], [str(width) for width in found["widths"]])
        panel.minorticks_off()
        plots.legend_below(panel, columns=1)
        return figure


def _bands(panel: Any, table: Mapping[str, Any]) -> None:
    """Light stripes for the three words."""
    edges = (FLOOR, table["words"]["lazy_gap"], table["words"]["rich_gap"], CEILING)
    for word, low, high in zip(BANDS, edges, edges[1:], strict=False):
        panel.axhspan(low, high, color=COLOURS[BANDS[word]], alpha=0.1, linewidth=0)
