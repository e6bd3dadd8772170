"""Spectral bias, end to end: the lead of the easy half in the network, in its linearisation, in the flow of its kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.claims.verdict import Part, Row, summary
from unlazy.store import Run
from unlazy.studies.halfspace.circle.measure import HALF_FITTED, PLATEAU
from unlazy.studies.halfspace.moments import ARMS, Nets, Networks, begun, curve, numbers, train_all
from unlazy.studies.halfspace.spectral.figures import draw
from unlazy.studies.halfspace.spectral.linear import FLOW_TIMES, STUDY, flow_curves, linearised_folder, linearised_run
from unlazy.studies.registry import settings_of
from unlazy.studies.results import Progress, conclude, judged_row, plain, provenance_of, table_of
from unlazy.training.sweep import sweep

NOT_THE_SAME = 0.5  # the fixed kernel "does not show the same lead": it shows less than half of it
LEARNERS = {
    "network": "network",
    "linearised": "linearisation trained with the same Adam",
    "flow": "first tangent kernel's flow",
}
LEVELS = tuple(float(level) for level in np.round(np.geomspace(0.5, 0.005, 25), 5))  # of the top half's loss
Values = NDArray[np.float64]
Curves = Mapping[str, Values]


@dataclass(frozen=True)
class Settings(Networks):
    """One scale of the study."""

    arms: tuple[str, ...] = ("pwc", "dlgn", "relu", "pwc-large", "relu-large", "pwc-equal", "relu-equal")


SCALES = {
    # seconds: shapes and plumbing only, no claim is judged from it
    "smoke": Settings(seeds=2, epochs=4, width=4, depth=3, presets=("author",), arms=("pwc", "relu", "pwc-equal")),
    # under two minutes on two cores
    "desk": Settings(seeds=10, epochs=200, arms=("pwc", "relu", "pwc-equal")),
    "paper": Settings(seeds=20, epochs=600),
}


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Train what is missing under ``runs``, then write ``results/spectral-bias/SCALE.json`` and its figures."""
    settings = settings_of(SCALES, scale, seeds)
    todo = settings.networks()
    trained = train_all(todo, runs, scale, workers, progress)
    folders = {nets.key: linearised_folder(nets, runs) for nets in todo}
    jobs = [(nets, runs, scale) for nets in todo]
    sweep(linearised_run, jobs, workers, lambda: progress("linearised networks", begun(folders.values()), len(todo)))
    linear = {key: Run(folder) for key, folder in folders.items()}
    made_by = provenance_of([*trained.values(), *linear.values()])
    table = table_of(STUDY, scale, settings.to_dict(), made_by) | {"levels": list(LEVELS), "networks": {}}
    for number, nets in enumerate(todo, 1):
        table["networks"][nets.key] = measure(nets, trained[nets.key], linear[nets.key])
        progress("measuring", number, len(todo))
    return conclude(table, claims, lambda table: draw(table, todo, trained, linear), results, progress)


# --- measuring -----------------------------------------------------------------------------------


def measure(nets: Nets, network: Run, linearised: Run) -> dict[str, Any]:
    """``{runs, label, preset, arm, seeds, horizons, values}``; values by ``QUANTITY_LEARNER``, one per seed.

    ``time_top``, ``time_bottom``: when a half's loss first falls below 0.05 (epochs; own units for the flow).
    ``head_start``: how much of the bottom half is still to be learned at ``time_top``, see :func:`head_start`.
    ``bottom_share``: the bottom half's share of the loss when the whole loss first reaches the plateau near 0.25.
    ``left_top``, ``left_bottom``: losses at the end. ``bottom_at``: the bottom half's loss when the top half's first
    reaches each of ``LEVELS``.
    """
    seen: dict[str, tuple[Values, Curves]] = {
        "network": _recorded(nets, network),
        "linearised": _recorded(nets, linearised),
        "flow": (FLOW_TIMES, flow_curves(nets)),
    }
    values: dict[str, Values] = {}
    for learner, (times, curves) in seen.items():
        top, bottom = curves["loss_top"], curves["loss_bottom"]
        share = at_first(bottom / (top + bottom), curves["loss"] <= PLATEAU)
        found = {
            "time_top": first_time(times, top < HALF_FITTED),
            "time_bottom": first_time(times, bottom < HALF_FITTED),
            "head_start": head_start(top, bottom),
            "bottom_share": share,
            "left_top": top[-1],
            "left_bottom": bottom[-1],
            "bottom_at": np.stack([at_first(bottom, top <= level) for level in LEVELS], axis=1),
        }
        values |= {f"{name}_{learner}": value for name, value in found.items()}
    return {
        "runs": [network.id, linearised.id],
        "label": nets.label,
        "preset": nets.preset,
        "arm": nets.arm,
        "seeds": nets.seeds,
        "horizons": {learner: float(times[-1]) for learner, (times, _) in seen.items()},
        "values": {name: plain(value) for name, value in values.items()},
    }


def _recorded(nets: Nets, run: Run) -> tuple[Values, Curves]:
    """Epochs, and losses ``[epochs, seeds]``."""
    names = ("loss", "loss_top", "loss_bottom")
    return curve(nets, run, "loss")[0].astype(np.float64), {name: run.scalars(name)[1] for name in names}


def first_time(times: Values, reached: NDArray[np.bool_]) -> Values:
    """The first time at which each column ``[times, seeds]`` is true; infinity if never."""
    return np.where(reached.any(0), times[reached.argmax(0)], np.inf)


def at_first(series: Values, reached: NDArray[np.bool_]) -> Values:
    """Each seed's value at the moment its column of ``reached`` is first true; nan if never."""
    there = series[reached.argmax(0), np.arange(series.shape[1])]
    return np.where(reached.any(0), there, np.nan)


def head_start(top: Values, bottom: Values) -> Values:
    """How far the top half is ahead when it is fitted (loss 0.05): 1 = the bottom half is where it began, 0 = both fitted.

    (bottom - 0.05) / (bottom at the start - 0.05) at that moment; nan if the top half is never fitted.
    """
    there = at_first(bottom, top < HALF_FITTED)
    return (there - HALF_FITTED) / (bottom[0] - HALF_FITTED)


# --- judging -------------------------------------------------------------------------------------


def claims(results: Mapping[str, Any]) -> list[Row]:
    """Claim C29, from the measured table alone."""
    parts: list[Part] = []
    controls: list[Row] = []
    for entry in results["networks"].values():
        arm = ARMS[entry["arm"]]
        if arm.start == "torch" and not arm.equal_halves and results["scale"] != "smoke":
            parts += _parts(entry, "linearised")
            controls += [summary(part.name, part.values, part.unit) for part in _parts(entry, "flow")]
        controls += _controls(entry)
    why = (
        "Spectral bias is enough for the order: when the linearised network has fitted the slow half, the fast half is as "
        "untouched as it is in the network at that moment, and remains so for much longer. What the fixed kernel of a small "
        "start does not explain is that the network then learns the fast half too. With a large start both head starts are "
        "shorter, the kernel's a little more so."
    )
    return [judged_row(results, "C29", parts, why=why, controls=controls, figure="lead")]


def _parts(entry: Mapping[str, Any], learner: str) -> list[Part]:
    """Both readings of "the same lead", as shares of the network's own."""
    name = f"{entry['label']}: {{}} of its {LEARNERS[learner]}, as a share of its own"
    own = lead(entry, "network")
    own = np.where(np.isfinite(own), own, np.nan)  # a network that never fits the bottom half says nothing
    leads = lead(entry, learner) / own
    least = lead(entry, learner, entry["horizons"][learner]) / own  # as far as one has looked
    starts = numbers(entry, f"head_start_{learner}") / numbers(entry, "head_start_network")
    return [
        Part(name.format("head start of the top half"), "<", NOT_THE_SAME, "", starts),
        Part(name.format("lead (log of time to fit bottom / top)"), "<", NOT_THE_SAME, "times", leads, least),
    ]


def lead(entry: Mapping[str, Any], learner: str, latest: float = np.inf) -> Values:
    """log(time to fit the bottom half / the top half); a bottom half not fitted by ``latest`` counts as fitted then, and
    nan stands where not even the top half is fitted."""
    top, bottom = (numbers(entry, f"time_{half}_{learner}") for half in ("top", "bottom"))
    return np.log(np.minimum(bottom, latest) / np.where(np.isfinite(top), top, np.nan))


def _controls(entry: Mapping[str, Any]) -> list[Row]:
    found = []
    for learner, words in LEARNERS.items():
        name = f"{entry['label']}, {words}"
        top, bottom = (numbers(entry, f"time_{half}_{learner}") for half in ("top", "bottom"))
        ratio = bottom / np.where(np.isfinite(top), top, np.nan)
        found.append(summary(f"{name}: head start of the top half", numbers(entry, f"head_start_{learner}")))
        found.append(summary(f"{name}: time to fit bottom / top", ratio, "times"))
        found.append(summary(f"{name}: bottom loss at the end", numbers(entry, f"left_bottom_{learner}")))
    return found
