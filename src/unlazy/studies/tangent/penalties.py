"""The penalties study (Figure 2; claims L4, L11): what adaptation makes of a penalty, for small and for large updates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from unlazy import plots, runtime
from unlazy.claims.verdict import Part, Row, summary
from unlazy.studies.registry import check_scale
from unlazy.studies.results import Progress, conclude, judged_row, table_of
from unlazy.theory.penalties import Penalty, Power, circled_plus, effective_penalty, fitted_exponent, predicted_exponent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STUDY = "penalties"
SQUARE, ABSOLUTE = Power(2), Power(1)
FIGURE_2: dict[str, tuple[Penalty, tuple[float, float, float]]] = {
    "square": (SQUARE, (0.66950, 1.86862, 6.24653)),
    "absolute": (ABSOLUTE, (0.88988, 2.00000, 4.52605)),
    "square (+) absolute": (circled_plus(SQUARE, ABSOLUTE), (0.66900, 1.53938, 3.36743)),
}
"""The three penalties of Figure 2 with their values at v = 1, 2, 5."""
SIZES_READ = (1.0, 2.0, 5.0)
SMALL, LARGE = 1e-2, 1e3
AGREES, LIKE_SQUARE, SLOWER, EXPONENT = 1e-5, 1e-3, 2.0, 5e-3
POWERS = {"smoke": (1.0, 2.0), "desk": (1.0, 1.5, 2.0, 3.0), "paper": (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)}
"""Every penalty with one of these exponents, alone and in pairs, is tried for L11."""


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Write ``results/penalties/SCALE.json`` and Figure 2. Nothing is random and nothing is trained: a case is a penalty."""
    powers = POWERS[check_scale(scale)]
    table = table_of(STUDY, scale, {"powers": list(powers)}, runtime.provenance("float64"))
    progress("penalties", 0, 1)
    table["figure_2"] = {name: _figure_2(penalty, values) for name, (penalty, values) in FIGURE_2.items()}
    pairs = [(a, b) for a in powers for b in powers if a <= b]
    cases = [Power(r) for r in powers] + [circled_plus(Power(a), Power(b)) for a, b in pairs]
    table["exponents"] = [
        {"penalty": case.name, "predicted": predicted_exponent(case), "fitted": fitted_exponent(case)} for case in cases
    ]
    progress("penalties", 1, 1)
    return conclude(table, claims, draw, results, progress)


def _figure_2(penalty: Penalty, published: tuple[float, ...]) -> dict[str, Any]:
    def at(values: Any) -> Any:
        return effective_penalty(penalty, torch.as_tensor(values, dtype=torch.float64))

    curve = np.linspace(0, 5, 101)
    return {
        "v": curve.tolist(),
        "omega": penalty(torch.as_tensor(1 + curve)).tolist(),
        "effective": at(curve).tolist(),
        "read": at(SIZES_READ).tolist(),
        "published": list(published),
        "near_zero": float(at(SMALL)) / SMALL**2,
        "exponent": fitted_exponent(penalty),
        "far": float(at(LARGE)) / LARGE**2,
    }


def claims(table: Mapping[str, Any]) -> list[Row]:
    """L4 and L11, from the table alone; penalties stand where other studies have seeds."""
    shown, cases = list(table["figure_2"].values()), table["exponents"]
    misses = [abs(a - b) for one in shown for a, b in zip(one["read"], one["published"], strict=True)]
    off = np.array([abs(one["fitted"] - one["predicted"]) for one in cases])
    near_zero = np.array([abs(one["near_zero"] - 1) for one in shown])
    fourth = [
        Part(
            "distance from v^2 near zero, relative",
            "<",
            LIKE_SQUARE,
            "",
            near_zero,
        ),
        Part("growth exponent for large v", "<", SLOWER, "", np.array([one["exponent"] for one in shown])),
        Part("distance from the values of Figure 2", "<", AGREES, "", np.array(misses)),
    ]
    return [
        judged_row(
            table,
            "L4",
            fourth,
            why="A transformation is not worth its price for small updates; large ones are cheaper stretched.",
            controls=[summary(f"effective penalty over v^2 at v = {LARGE:g}", [one["far"] for one in shown])],
            figure="figure-2",
        ),
        judged_row(
            table,
            "L11",
            [Part("distance of fitted from predicted exponent", "<", EXPONENT, "", off)],
            why="At a common price every factor takes its share of the stretch, so the reciprocals of the exponents add up.",
            controls=[
                summary(f"{one['penalty']}: fitted, predicted {one['predicted']:.4g}", [one["fitted"]]) for one in cases
            ],
            figure="exponents",
        ),
    ]


LOOKS = (("square", "blue"), ("absolute", "orange"), ("square (+) absolute", "green"))


def draw(table: Mapping[str, Any]) -> dict[str, Figure]:
    """Both figures by file name."""
    return {"figure-2": figure_2(table), "exponents": exponents(table)}


def figure_2(table: Mapping[str, Any]) -> Figure:
    """Penalties on the stretch (left), and what they make of the update's size (right)."""
    figure, axes = plots.grid(1, 2, (3.4, 2.8))
    for name, colour in LOOKS:
        one = table["figure_2"][name]
        v = np.array(one["v"])
        axes[0, 0].plot(1 + v, one["omega"], color=plots.COLOURS[colour], label=name)
        axes[0, 1].plot(v, one["effective"], color=plots.COLOURS[colour], label=name)
        axes[0, 1].plot(SIZES_READ, one["published"], "o", markersize=3.5, color=plots.COLOURS[colour])
    axes[0, 1].plot(v, v**2, "--", color=plots.COLOURS["grey"], linewidth=1, label="v^2: no adaptation")
    axes[0, 0].set(title="penalty on a stretch z", xlabel="z", ylim=(0, 8))
    axes[0, 1].set(title="effective penalty on an update of size v", xlabel="v (dots: published figure)", ylim=(0, 8))
    axes[0, 1].legend()
    return figure


def exponents(table: Mapping[str, Any]) -> Figure:
    """Fitted against predicted growth exponents."""
    figure, axes = plots.grid(1, 1, (3.4, 3.2))
    axis, cases = axes[0, 0], table["exponents"]
    predicted, fitted = ([one[key] for one in cases] for key in ("predicted", "fitted"))
    axis.axline((0.5, 0.5), slope=1, color=plots.COLOURS["grey"], linewidth=0.8)
    axis.plot(predicted, fitted, "o", markersize=4, color=plots.COLOURS["blue"])
    axis.set(title="growth of effective penalties", xlabel="predicted: 1 / (1/2 + sum of 1/r)", ylabel="fitted far out")
    return figure
