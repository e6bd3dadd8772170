"""Where the verdict's estimate of the gap comes from: networks beside their linearised twins.

Cells, sides, candidate rules, the way one of them is chosen, and the aims were written down before any cell was measured. Rules
are fitted and chosen on the fitted side alone; the scored side has other networks and other data sets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy import plots
from unlazy.plots import COLOURS
from unlazy.runtime import require
from unlazy.scope.lazy_thresholds import FILE, Thresholds
from unlazy.store import write_file
from unlazy.studies.scope.calibration_cells import CELLS, DRAW_SEED, FITTED, SCORED, Cell, draw_cells, measure
from unlazy.studies.study import Figure, Results, Study, require_at_least_one
from unlazy.studies.table import Table

LAZY_GAP = 0.1  # lazy: the linearised network's predictions account for 99 % of the squared change of the function
RICH_GAP = 0.5  # rich: they miss at least a quarter of it; mixed: between the two
WORDS = ("lazy", "mixed", "rich")
LEAST_FALL = 0.05  # a loss on the probe set that falls by less, as a share of its start, has learned nothing
AIMS = {"right": 0.92, "silent": 0.08, "swapped": 0, "inside": 0.85, "when": 0.85}
"""On the scored side: share of right words where one is given, share without one, lazy taken for rich, true gaps inside the
stated range, and crossings within a factor 2."""
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Settings:
    """``cells`` of each side, drawn with ``draw_seed``; no training is longer than ``longest`` steps."""

    cells: int = CELLS
    draw_seed: int = DRAW_SEED
    longest: int = 20000

    def __post_init__(self) -> None:
        require_at_least_one(self, "cells", "longest")


def cases(settings: Settings, seeds: Sequence[int]) -> list[Cell]:
    """The cells of both sides."""
    drawn = draw_cells(settings.cells, settings.draw_seed)
    return [replace(cell, steps=min(cell.steps, settings.longest)) for cell in drawn]


# --- what was measured of a cell ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A measured cell: the true ``gap`` and every measure at each of its ``steps``. ``start``: the probe's loss at the start."""

    cell: Cell
    steps: Vector
    gap: Vector
    measures: Mapping[str, Vector]
    start: float

    @property
    def truth(self) -> str:
        """Lazy, mixed or rich by the gap at the end; "broken" or "untrained" where there is none."""
        if not np.isfinite(self.gap).all() or self.steps[-1] < self.cell.steps:
            return "broken"
        lowest = float(np.min(self.measures["probe_loss"]))
        if lowest > self.start - LEAST_FALL * abs(self.start):
            return "untrained"
        return word_of(float(self.gap[-1]))


def word_of(gap: float) -> str:
    """Lazy, mixed or rich."""
    return "lazy" if gap < LAZY_GAP else "rich" if gap > RICH_GAP else "mixed"


def read_curves(cells: Sequence[Cell], table: Table) -> list[Curve]:
    """The cells that the table has numbers of."""
    numbers: dict[tuple[str, str], dict[tuple[str, int], float]] = {}
    for row in table.rows():
        place = numbers.setdefault((row["side"], row["number"]), {})
        place[row["quantity"], int(row.get("step", 0))] = row["value"]
    found = []
    for cell in cells:
        own = numbers.get((cell.side, str(cell.number)))
        if own is None:
            continue
        steps = sorted({step for quantity, step in own if quantity == "gap" and step > 0})
        names = sorted({quantity for quantity, step in own if step > 0})
        curves = {name: np.array([own.get((name, step), math.nan) for step in steps]) for name in names}
        gap = curves.pop("gap")
        found.append(Curve(cell, np.array(steps, dtype=float), gap, curves, own.get(("start_probe_loss", 0), math.nan)))
    return found


# --- candidate rules ---------------------------------------------------------------------------------------------------------

LEAST, MOST = 1e-3, 2.0  # estimates of the gap end here
Features = Callable[[Curve], list[Vector]]


def _log(values: Vector, low: float = LEAST, high: float = 10.0) -> Vector:
    return np.log(np.clip(values, low, high))


def _measure(curve: Curve, name: str) -> Vector:
    """A measure at every step; NaN where it was not taken."""
    return curve.measures.get(name, np.full_like(curve.steps, np.nan))


def _bent(logs: Vector) -> list[Vector]:
    """A logarithm and its excess over both borders: with a constant, a line with two bends."""
    return [logs, np.maximum(logs - math.log(LAZY_GAP), 0), np.maximum(logs - math.log(RICH_GAP), 0)]


def _tangent(curve: Curve) -> list[Vector]:
    return _bent(_log(curve.measures["linearisation_error"]))


def _direction(curve: Curve) -> list[Vector]:
    """Besides: the sine between the change of the outputs and the change that the tangent at the start gives."""
    sine = np.sqrt(np.clip(1 - curve.measures["tangent_cosine"] ** 2, 0, 1))
    return [*_tangent(curve), *_bent(_log(sine))]


def _corrected(curve: Curve) -> list[Vector]:
    """Besides: the largest value so far, the loss relative to the start, and the growth of the tangent kernel."""
    logs = _log(curve.measures["linearisation_error"])
    left = _log(curve.measures["probe_loss"] / curve.start, 1e-2, 1.0)
    growth = _log(_measure(curve, "tangent_growth"), 0.1, 10.0)
    return [*_direction(curve), np.maximum.accumulate(logs) - logs, left, growth]


def _change(curve: Curve) -> list[Vector]:
    return [*_tangent(curve), *_bent(_log(_measure(curve, "tangent_change")))]


@dataclass(frozen=True)
class Rule:
    """How the gap is estimated from measures: ``features`` enter a linear fit of the log gap.

    ``plain``: no fit; the estimate is ``linearisation_error`` itself. ``simulated``: the simulated twin's gap where there is one.
    """

    name: str
    text: str
    features: Features = _tangent
    plain: bool = False
    simulated: bool = False


RULES = (
    Rule("tangent", "the linearisation error itself", plain=True),
    Rule("mapped", "a fitted line with two bends through the linearisation error"),
    Rule("direction", "the same, and the angle to the tangent's prediction", _direction),
    Rule("kernel", "the same as mapped, and the change of the tangent kernel", _change),
    Rule("corrected", "direction, the largest value so far, the loss and the kernel's growth", _corrected),
    Rule("simulated", "the twin simulated under SGD, else mapped", simulated=True),
)
"""The candidates, the simplest first."""
AS_GOOD = (
    0.02  # the simplest rule is chosen whose share of right words is within this of the best one's, on the fitted side
)
MOST_SILENCE = 0.06  # on the fitted side: share of cells near a border that get no word
RANGE = (0.05, 0.95)  # quantiles of the error that the stated range has
NEIGHBOURS = 60  # errors of so many moments nearest to an estimate give its range
KNOTS = tuple(float(f"{knot:.3g}") for knot in np.geomspace(0.002, 1.5, 10))


@dataclass(frozen=True)
class Fit:
    """A fitted rule: ``weights`` of its features (a constant first), and its errors on networks it was not fitted to.

    ``margin``: estimates this near to a border, in logarithms, get no word. ``low`` and ``high``: the range of log true gap minus
    log estimate at each of :data:`KNOTS`.
    """

    rule: Rule
    weights: Vector = field(default_factory=lambda: np.zeros(0))
    margin: float = 0.0
    low: Vector = field(default_factory=lambda: np.zeros(0))
    high: Vector = field(default_factory=lambda: np.zeros(0))

    def estimate(self, curve: Curve) -> Vector:
        """Logarithms of the estimated gap at every step."""
        if self.rule.plain:
            found = _log(curve.measures["linearisation_error"])
        else:
            found = _columns(self.rule.features(curve)) @ self.weights
            found = np.where(np.isfinite(found), found, _log(curve.measures["linearisation_error"]))
        if self.rule.simulated and "simulated_gap" in curve.measures:
            known = curve.measures["simulated_gap"]
            found = np.where(np.isfinite(known), _log(known), found)
        return np.clip(found, math.log(LEAST), math.log(MOST))

    def span(self, log_gap: float) -> tuple[float, float]:
        """The stated range of the gap."""
        ends = (np.interp(log_gap, np.log(KNOTS), side) for side in (self.low, self.high))
        low, high = (math.exp(log_gap + float(end)) for end in ends)
        return (0.0 if low <= 2 * LEAST else low), high  # nothing is known below the least gap

    def word(self, log_gap: float) -> str:
        """The word, or "cannot tell" near a border."""
        words = {word_of(math.exp(log_gap + off)) for off in (-self.margin, self.margin)}
        return words.pop() if len(words) == 1 else "cannot tell"


def _columns(features: Sequence[Vector]) -> Vector:
    return np.stack([np.ones_like(features[0]), *features], axis=1)


def fit_rule(rule: Rule, curves: Sequence[Curve]) -> Fit:
    """Fit a rule to cells; its errors come from leaving out one family of networks at a time."""
    known = [curve for curve in curves if curve.truth in WORDS]
    require(len(known) >= 4, f"{len(known)} trainings to fit on; at least 4 are needed.")
    left_out: list[tuple[Vector, Vector]] = []
    for net in sorted({curve.cell.net for curve in known}):
        others = [curve for curve in known if curve.cell.net != net]
        part = Fit(rule, _weights(rule, others))
        left_out += [(part.estimate(curve), _log(curve.gap, LEAST, MOST)) for curve in known if curve.cell.net == net]
    ends = np.array([guesses[-1] for guesses, _ in left_out])
    borders = np.abs(ends[:, None] - np.log([LAZY_GAP, RICH_GAP])).min(1)
    guesses, truths = (np.concatenate(part) for part in zip(*left_out, strict=True))
    low, high = _error_range(guesses, truths)
    return Fit(rule, _weights(rule, known), float(np.quantile(borders, MOST_SILENCE)), low, high)


def _weights(rule: Rule, curves: Sequence[Curve]) -> Vector:
    """Least absolute error in the log gap over all moments, by weighted least squares repeated."""
    if rule.plain:
        return np.zeros(0)
    x = np.concatenate([_columns(rule.features(curve)) for curve in curves])
    y = np.concatenate([_log(curve.gap, LEAST, MOST) for curve in curves])
    known = np.isfinite(x).all(1)  # the tangent kernel of a few networks was refused
    x, y = x[known], y[known]
    weight = np.ones(len(y))
    ridge = 1e-3 * len(y) * np.diag([0.0, *np.ones(x.shape[1] - 1)])
    found = np.zeros(x.shape[1])
    for _ in range(30):
        found = np.linalg.solve((x * weight[:, None]).T @ x + ridge, (x * weight[:, None]).T @ y)
        weight = 1 / np.maximum(np.abs(y - x @ found), 0.05)
    return found


def _error_range(guesses: Vector, truths: Vector) -> tuple[Vector, Vector]:
    """Quantiles of the error at every knot, from the moments whose estimates are nearest to it."""
    ends = []
    for knot in KNOTS:
        near = np.argsort(np.abs(guesses - math.log(knot)))[: min(NEIGHBOURS, len(guesses))]
        ends.append(np.quantile((truths - guesses)[near], RANGE))
    low, high = np.array(ends).T
    return low, high


# --- scores ------------------------------------------------------------------------------------------------------------------


def crossing(steps: Vector, log_gap: Vector, border: float = LAZY_GAP) -> float | None:
    """The step at which a curve first passes a border, interpolated in logarithms; ``None``: never."""
    far = log_gap > math.log(border)
    if not far.any():
        return None
    first = int(np.argmax(far))
    if first == 0:
        return float(steps[0])
    (a, b), (u, v) = np.log(steps[first - 1 : first + 1]), log_gap[first - 1 : first + 1]
    return float(np.exp(a + (b - a) * (math.log(border) - u) / (v - u)))


def score(fit: Fit, curves: Sequence[Curve]) -> dict[str, Any]:
    """Scores of a fitted rule on cells, beside those of the best constant of each band."""
    known = [curve for curve in curves if curve.truth in WORDS]
    ends = [float(fit.estimate(curve)[-1]) for curve in known]
    truths, words = [curve.truth for curve in known], [fit.word(end) for end in ends]
    spoken = [(truth, word) for truth, word in zip(truths, words, strict=True) if word != "cannot tell"]
    inside = [fit.span(end)[0] <= curve.gap[-1] <= fit.span(end)[1] for end, curve in zip(ends, known, strict=True)]
    bands = {}
    for band in WORDS:
        errors = [
            abs(end - math.log(max(c.gap[-1], LEAST))) for end, c in zip(ends, known, strict=True) if c.truth == band
        ]
        gaps = np.array([math.log(max(c.gap[-1], LEAST)) for c in known if c.truth == band])
        if len(gaps):
            constant = float(np.exp(np.median(np.abs(gaps - np.median(gaps)))))
            bands[band] = {"cells": len(gaps), "factor": math.exp(float(np.median(errors))), "constant": constant}
    times = [_when_factor(fit, curve) for curve in known if crossing(curve.steps, _log(curve.gap)) is not None]
    confusion = {
        t: {w: list(zip(truths, words, strict=True)).count((t, w)) for w in (*WORDS, "cannot tell")} for t in WORDS
    }
    return {
        "cells": len(known),
        "right": sum(truth == word for truth, word in spoken) / max(1, len(spoken)),
        "silent": 1 - len(spoken) / max(1, len(known)),
        "swapped": sum({truth, word} == {"lazy", "rich"} for truth, word in spoken),
        "inside": sum(inside) / max(1, len(inside)),
        "when": sum(time <= 2 for time in times) / max(1, len(times)),
        "crossings": len(times),
        "bands": bands,
        "confusion": confusion,
    }


def _when_factor(fit: Fit, curve: Curve) -> float:
    """How far the estimated crossing of the lazy border is from the true one, as a factor."""
    true, found = crossing(curve.steps, _log(curve.gap)), crossing(curve.steps, fit.estimate(curve))
    if true is None or found is None:
        return math.inf
    return max(true / found, found / true)


def left_out_share(rule: Rule, curves: Sequence[Curve]) -> float:
    """Share of right words at the end of training, every family of networks judged by a fit to the other families."""
    known = [curve for curve in curves if curve.truth in WORDS]
    right = []
    for net in sorted({curve.cell.net for curve in known}):
        part = Fit(rule, _weights(rule, [curve for curve in known if curve.cell.net != net]))
        right += [word_of(math.exp(part.estimate(c)[-1])) == c.truth for c in known if c.cell.net == net]
    return float(np.mean(right))


def choose_rule(curves: Sequence[Curve]) -> tuple[Rule, dict[str, float]]:
    """The simplest rule that is as good as the best one on the fitted side, with the share of right words of every rule.

    The simulated twin needs the training set, which a scope has not: it is measured, not chosen.
    """
    fitted = [curve for curve in curves if curve.cell.side == "fit"]
    shares = {rule.name: left_out_share(rule, fitted) for rule in RULES}
    best = max(share for name, share in shares.items() if name != "simulated")
    return next(rule for rule in RULES if shares[rule.name] >= best - AS_GOOD), shares


# --- the files ---------------------------------------------------------------------------------------------------------------


def thresholds_of(fit: Fit, unseen: Mapping[str, Any]) -> Thresholds:
    """What the verdict reads: the fitted curve from linearisation error to gap, and its errors. ``unseen``: scores to quote."""
    bends = (LEAST, LAZY_GAP, RICH_GAP, MOST)
    errors = np.array(bends)
    logs = np.log(errors) if fit.rule.plain else _columns(_bent(_log(errors))) @ fit.weights
    nets, sets = len(SCORED[0]), len(SCORED[1])
    text = (
        f"on {unseen['cells']} trainings of {nets} kinds of networks and {sets} data sets that it was not fitted to, the word "
        f"was right in {unseen['right']:.0%} of those it was given for, withheld in {unseen['silent']:.0%}, and the range held "
        f"the true gap in {unseen['inside']:.0%}"
    )
    source = {"study": "calibration", "rule": fit.rule.name, "fitted": list(map(list, FITTED)), "text": text}
    return Thresholds(
        bends,
        _four_digits(np.exp(logs)),
        LAZY_GAP,
        RICH_GAP,
        _four_digits([math.exp(fit.margin)])[0],
        KNOTS,
        _four_digits(np.exp(fit.low)),
        _four_digits(np.exp(fit.high)),
        source,
    )


def _four_digits(values: Any) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in values)


def all_scores(curves: Sequence[Curve]) -> dict[str, Any]:
    """The content of ``scores.json``: the chosen rule, and every rule's scores on both sides and by left-out families."""
    sides = {side: [curve for curve in curves if curve.cell.side == side] for side in ("fit", "score")}
    chosen, shares = choose_rule(curves)
    rules = {
        rule.name: {side: score(fit_rule(rule, sides["fit"]), some) for side, some in sides.items()} for rule in RULES
    }
    turned = score(fit_rule(chosen, sides["score"]), sides["fit"])
    return {
        "chosen": chosen.name,
        "left_out": shares,
        "aims": AIMS,
        "rules": rules,
        "other_way_round": turned,
        "simulated_loss": score_simulation(curves),
    }


def score_simulation(curves: Sequence[Curve]) -> dict[str, Any]:
    """How near the simulated twin's loss on held-out samples is to the trained twin's, at the end of training."""
    known = [curve for curve in curves if curve.truth in WORDS]
    ends = [
        (float(curve.measures["simulated_held_loss"][-1]), float(curve.measures["twin_held_loss"][-1]))
        for curve in known
        if "simulated_held_loss" in curve.measures
    ]
    near = [abs(simulated - trained) <= 0.1 * abs(trained) for simulated, trained in ends]
    return {
        "cells": len(ends),
        "within_10_percent": sum(near) / max(1, len(near)),
        "withheld": 1 - len(ends) / len(known),
    }


def write_thresholds(results_folder: str | Path) -> None:
    """Fit the rules to the paper scale of a results folder; write ``thresholds.json`` and ``paper/scores.json`` there.

    The results folder of a checkout also gives the copy that the verdict reads. Raises unless every cell was measured.

    ``python -c "from unlazy.studies.scope.calibration import write_thresholds; write_thresholds('results')"``
    """
    folder = Path(results_folder) / STUDY.name
    cells = cases(STUDY.settings("paper"), STUDY.seeds_of("paper"))
    measured = {one["id"] for one in json.loads((folder / "paper" / "cases.json").read_text())}
    missing = [STUDY.label(cell) for cell in cells if STUDY.case_id(cell) not in measured]
    require(
        not missing,
        f"thresholds are fitted to every cell of the paper scale; {folder} lacks {len(missing)}, such as "
        f"{', '.join(missing[:3])}; run: unlazy reproduce calibration --scale paper.",
    )
    curves = read_curves(cells, Table.read(folder / "paper" / "table.csv"))
    found = all_scores(curves)
    text = thresholds_text(curves, found)
    write_file(folder / "paper" / "scores.json", (json.dumps(found, indent=1) + "\n").encode())
    write_file(folder / "thresholds.json", text)
    if folder.resolve() == FILE.parents[3] / "results" / STUDY.name:
        write_file(FILE, text)


def thresholds_text(curves: Sequence[Curve], scores: Mapping[str, Any]) -> bytes:
    """The content of the thresholds file."""
    rule = next(rule for rule in RULES if rule.name == scores["chosen"])
    fit = fit_rule(rule, [curve for curve in curves if curve.cell.side == "fit"])
    limits = thresholds_of(fit, scores["rules"][rule.name]["score"])
    return (json.dumps(limits.to_dict(), indent=2) + "\n").encode()


# --- figure ------------------------------------------------------------------------------------------------------------------

SIDES = {"fit": ("fitted networks and data", "blue"), "score": ("unseen networks and data", "red")}
MARKS = {"sgd": "o", "momentum": "s", "adam": "^", "adamw": "v"}


def draw_estimates(results: Results) -> plots.Figure:
    """True gap against the estimate at the end of training, one mark a cell; bars are stated ranges, lines the borders."""
    curves = read_curves(results.cases(), results.table)
    fitted = [curve for curve in curves if curve.cell.side == "fit"]
    fit = fit_rule(choose_rule(curves)[0], fitted)
    figure, axes = plots.grid(1, 2, (4.4, 4.0), sharey=True)
    for panel, (side, (title, colour)) in zip(axes[0], SIDES.items(), strict=True):
        panel.plot([LEAST, MOST], [LEAST, MOST], color=COLOURS["grey"], linewidth=0.8)
        for curve in (curve for curve in curves if curve.cell.side == side and curve.truth in WORDS):
            end = float(fit.estimate(curve)[-1])
            low, high = fit.span(end)
            panel.plot([math.exp(end)] * 2, [max(low, LEAST), high], color=COLOURS[colour], alpha=0.15, linewidth=3)
            gap = max(float(curve.gap[-1]), LEAST)
            panel.plot(math.exp(end), gap, MARKS[curve.cell.optimiser], color=COLOURS[colour], markersize=4)
        for border in (LAZY_GAP, RICH_GAP):
            panel.axhline(border, color=COLOURS["black"], linewidth=0.6)
            panel.axvline(border, color=COLOURS["black"], linewidth=0.6)
        panel.set(xscale="log", yscale="log", title=title, xlabel="estimated gap", xlim=(8e-4, 2.2), ylim=(8e-4, 2.2))
    axes[0, 0].set_ylabel("gap to the trained twin")
    for name, mark in MARKS.items():
        axes[0, 0].plot([], [], mark, color=COLOURS["grey"], label=name)
    plots.shared_legend(figure, columns=4)
    return figure


STUDY = Study(
    name="calibration",
    paper="scope",
    scales={"smoke": Settings(cells=7, longest=12), "desk": Settings(cells=14, longest=300), "paper": Settings()},
    seeds={"smoke": 1, "desk": 1, "paper": 1},
    columns=("side", "number", "net", "data"),
    cases=cases,
    measure=measure,
    figures=(Figure("estimates", "The estimated gap against the gap to the trained twin", draw_estimates),),
)
