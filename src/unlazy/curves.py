"""Curves of runs as matplotlib figures: one panel a kind of number, one line a run. Uses no pyplot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unlazy.runtime import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinct under the common kinds of colour blindness
COLOURS = {
    "blue": "#0072b2",
    "orange": "#e69f00",
    "green": "#009e73",
    "red": "#d55e00",
    "purple": "#cc79a7",
    "sky": "#56b4e9",
    "grey": "#7f7f7f",
    "black": "#222222",
}
WORD_COLOURS = {"lazy": "#3a86cc", "mixed": "#9a6bc9", "rich": "#cc6a22", "cannot tell": "#7f7f7f"}  # as on the page
STYLE: Any = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "savefig.dpi": 150.0,
    "pdf.fonttype": 42,
}
PANELS = {  # the numbers of each panel, and what its axis says
    "loss": (("loss",), "loss on the probe set"),
    "gap": (("linearisation_error",), "linearisation error"),
    "kernels": (("tangent_distance", "overlap_distance"), "kernel distance from start"),
    "parameters": (("parameter_motion",), "parameter motion"),
}
MOST_NAMED = 12  # lines in a legend; beyond that lines are grey and have no names

Series = Callable[
    [str], tuple[NDArray[Any], NDArray[Any]]
]  # steps [T] and values [T, members] of a number; empty: none


@contextmanager
def style() -> Iterator[None]:
    """Use the package's matplotlib style inside the block."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def draw_band(axes: Axes, x: ArrayLike, values: NDArray[Any], label: str, colour: str, **line: Any) -> None:
    """Draw the median over members (columns of ``values [T, S]``) as a line, and their middle half as a band."""
    finite = np.where(np.isfinite(values), values, np.nan)
    low, middle, high = np.nanquantile(finite, [0.25, 0.5, 0.75], axis=1)
    axes.plot(x, middle, label=label, color=COLOURS[colour], **line)
    axes.fill_between(np.asarray(x), low, high, color=COLOURS[colour], alpha=0.15, linewidth=0)


def plot_curves(
    runs: Mapping[str, Series],
    panel: str | None = None,
    *,
    ax: Axes | None = None,
    phases: Sequence[Mapping[str, Any]] = (),
) -> Figure:
    """The figure of one or more runs. ``runs``: by label, the function that returns a number's curve.

    ``panel``: loss, gap, kernels, parameters, or the name of any number; default: all four that were measured. ``ax``: draw that
    one panel (default: the loss) there instead of in a new figure. ``phases``: of a verdict, drawn as coloured stretches.
    """
    chosen = panel or ("loss" if ax is not None else None)
    names = [chosen] if chosen is not None else [name for name in PANELS if _has_any(runs, PANELS[name][0])]
    require(
        bool(names) and all(_has_any(runs, _numbers_of(name)) for name in names),
        f"there is no {chosen or 'number'} to draw; panels are {', '.join(PANELS)}, or the name of a number that was measured.",
    )
    with style():
        if ax is not None:
            _draw_panel(ax, names[0], runs, phases)
            figure = ax.figure
        else:
            from matplotlib.figure import Figure

            rows = -(-len(names) // 2)
            figure = Figure(figsize=(4.2 * min(2, len(names)), 2.8 * rows), layout="constrained")
            panels = figure.subplots(rows, min(2, len(names)), squeeze=False).flatten()
            for axes, name in zip(panels, names, strict=False):
                _draw_panel(axes, name, runs, phases)
            for axes in panels[len(names) :]:
                axes.set_visible(False)
    return figure  # type: ignore[return-value]


def _numbers_of(panel: str) -> tuple[str, ...]:
    return PANELS[panel][0] if panel in PANELS else (panel,)


def _has_any(runs: Mapping[str, Series], names: Sequence[str]) -> bool:
    return any(len(series(name)[0]) for series in runs.values() for name in names)


def _draw_panel(axes: Axes, panel: str, runs: Mapping[str, Series], phases: Sequence[Mapping[str, Any]]) -> None:
    palette = [name for name in COLOURS if name not in ("grey", "black")]
    dashes = ["-", "--", ":", "-."]
    for place, (label, series) in enumerate(runs.items()):
        for number, name in enumerate(_numbers_of(panel)):
            steps, values = series(name)
            if not len(steps):
                continue
            words = label if len(_numbers_of(panel)) == 1 else " ".join(filter(None, (label, name.replace("_", " "))))
            colour = palette[place % len(palette)] if len(runs) <= MOST_NAMED else "grey"
            line = dashes[(number + place // len(palette)) % len(dashes)]
            draw_band(axes, steps, values, words, colour, linestyle=line, linewidth=1.4)
    ended = None
    for phase in phases:
        first = phase["first"] if ended is None else ended  # a phase begins where the one before ended
        last = phase["until"] if phase.get("until") is not None else phase["last"]
        axes.axvspan(first, last, color=WORD_COLOURS.get(phase["word"], COLOURS["grey"]), alpha=0.08, linewidth=0)
        ended = phase.get("until")
    axes.set(xlabel="step", ylabel=PANELS[panel][1] if panel in PANELS else panel.replace("_", " "))
    labelled = [label for label in axes.get_legend_handles_labels()[1] if label and not label.startswith("_")]
    if labelled and len(runs) <= MOST_NAMED:
        axes.legend()
