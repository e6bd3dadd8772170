"""The label-alignment study end to end: train, measure, judge, draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from unlazy.claims.verdict import Part, Row, summary
from unlazy.studies.registry import settings_of
from unlazy.studies.results import Progress, conclude, judged_row, provenance_of, table_of
from unlazy.studies.tangent.label_alignment.figures import draw
from unlazy.studies.tangent.label_alignment.measure import measure
from unlazy.studies.tangent.label_alignment.train import STUDY, TASKS, Settings, train

HIGHER, PEAKS, FALLS, MUCH_BETTER = 0.0, 1.0, 0.0, 10.0
SCALES = {
    "smoke": Settings(
        seeds=2,
        data="digits",
        images=60,
        looked_at=20,
        width=12,
        epochs=5,
        readout_epochs=4,
        readout_cycle=2,
        batch=20,
        points=5,
    ),
    # the 500 images of the caption, fewer epochs than the script's 500, fewer points on the line
    "desk": Settings(seeds=5, images=500, looked_at=150, epochs=200, readout_epochs=400, points=20),
    "paper": Settings(seeds=5),
}


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Train what is missing under ``runs``, then write ``results/label-alignment/SCALE.json`` and its figures."""
    settings = settings_of(SCALES, scale, seeds)
    run = train(settings, runs, scale, progress)
    table = table_of(STUDY, scale, asdict(settings), provenance_of([run]))
    table["values"], shown = measure(settings, run, progress)
    table["run"] = run.id
    return conclude(table, claims, lambda table: draw(table, shown), results, progress)


def claims(table: Mapping[str, Any]) -> list[Row]:
    """L6, L8 and L9, from the table alone."""
    values = {name: np.array(column, dtype=np.float64) for name, column in table["values"].items()}
    gain = values["similarity_sign"] - values["similarity_smooth"]
    better = [values[f"snr_mean_{task}"] - values[f"snr_best_single_{task}"] for task in TASKS]
    parts = {
        "L6": [Part("similarity for the sign task minus that for the smooth one", ">", HIGHER, "", gain)],
        "L8": [
            Part("diagonal near y = 0 over far from it, sign task", ">", PEAKS, "times", values["near_over_far_sign"]),
            Part(
                "rank correlation of the diagonal with |y|, sign task", "<", FALLS, "", values["rank_correlation_sign"]
            ),
        ],
        "L9": [
            Part(f"mean of the line over its best single point, {task} task", ">", MUCH_BETTER, "dB", column)
            for task, column in zip(TASKS, better, strict=True)
        ],
    }
    shown = {
        "L6": (
            ("similarity", "kernel averaged along the line (paper: 0.17 smooth, 0.40 sign)"),
            ("similarity_centred", "the same, centred"),
            ("similarity_trajectory", "kernel averaged along the real trajectory"),
            ("kernels_agree", "cosine of the two averaged kernels"),
            ("way_over_line", "length of the trajectory over that of the line"),
            ("similarity_start", "tangent kernel at the start"),
            ("similarity_end", "tangent kernel at the end"),
            ("fit", "mean squared error left on the images looked at"),
        ),
        "L8": (
            ("near_over_far", "diagonal near over far, nearest tenth"),
            ("nearest_over_far", "diagonal near over far, nearest fiftieth (paper: peaks about 3 to 5 times for sign)"),
            ("near_over_far_relative", "the same, relative to the start's diagonal"),
            ("near_over_far_trajectory", "kernel averaged along the real trajectory, near over far, nearest tenth"),
            ("near_over_far_start", "the start's own diagonal, near over far"),
        ),
        "L9": (
            ("snr_mean", "signal to noise of the mean, dB"),
            ("snr_best_single", "of the best single point, dB"),
            ("snr_trajectory", "of the integral along the real trajectory, dB"),
        ),
    }
    whys = {
        "L6": "Signs of a smooth target jump where it is zero; learning the jump takes a larger change along what is learned.",
        "L8": "Where the smooth target is near zero the sign task asks for a steep function, and gradients grow there. The "
        "direction is judged; the paper's figure suggests a factor of 3 to 5, and ours is smaller.",
        "L9": "On the line the mean of the tangent features times the step is the change itself; what is left is quadrature.",
    }
    figures = {"L6": "figure-1", "L8": "figure-3", "L9": "linearisation"}
    return [
        judged_row(
            table,
            name,
            judged,
            why=whys[name],
            controls=[
                summary(f"{words}, {task} task", values[f"{key}_{task}"])
                for key, words in shown[name]
                for task in TASKS
                if f"{key}_{task}" in values
            ],
            figure=figures[name],
        )
        for name, judged in parts.items()
    ]
