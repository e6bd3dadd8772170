"""The circle study as a page: its scenes, its story, its figures and its scorecard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unlazy.claims.verdict import Row
from unlazy.studies.halfspace.circle.claims import Table
from unlazy.studies.halfspace.circle.figures import FIGURES
from unlazy.studies.halfspace.circle.settings import ARMS, PRESETS, SCALES, Stack
from unlazy.studies.halfspace.circle.train import SCENE_ARMS, Job, jobs, scene_member
from unlazy.studies.registry import settings_of
from unlazy.studio.payload import Payload
from unlazy.studio.report import Picture, Report, Scene, write_report
from unlazy.studio.shelf import Shelf

NOTES = {
    "pwc": "Press play and watch layer 5: its half-spaces turn toward the easy half while the loss falls to 0.25.",
    "relu": "A ReLU net has no fixed half-spaces, but its paths gather on the easy half too.",
    "pwc-frozen": "The control: the same gates, never trained. The paths cannot move and the hard half stays unlearned.",
}


def write_circle_page(path: Path, results_folder: Path, runs_folder: Path, scale: str, seeds: int | None) -> Path:
    """One self-contained page from what ``reproduce`` left in the two folders."""
    settings = settings_of(SCALES, scale, seeds)
    results = json.loads((results_folder / "circle" / f"{scale}.json").read_text())
    pictures = results_folder / "circle" / scale
    report = Report(
        title="What a network learns first",
        lead=(
            "A network learns a slow wave on the top half of a circle and a fast wave on the bottom half. "
            "Scrub through its training and see where its half-spaces turn, and when."
        ),
        scenes=tuple(
            scene(job.stack, job.folder.relative_to(runs_folder).as_posix())
            for job in sorted(jobs(settings, runs_folder / "circle"), key=_order)
            if job.stack.arm in SCENE_ARMS
        ),
        figures=tuple(
            Picture(name, title, caption, (pictures / f"{name}.png").read_bytes())
            for name, (title, caption, _) in FIGURES.items()
        ),
        claims=tuple(results["claims"]),
        story=story(results),
        provenance={**results["provenance"], "scale": results["scale"], "seeds": settings.seeds},
    )
    write_report(Payload(Shelf(runs_folder), results_folder), report, path)
    return path


def _order(job: Job) -> tuple[int, int]:
    arm = SCENE_ARMS.index(job.stack.arm) if job.stack.arm in SCENE_ARMS else len(SCENE_ARMS)
    return job.stack.settings.presets.index(job.stack.preset), arm


def scene(stack: Stack, key: str) -> Scene:
    """Seed 0 at the preset's slope, at the steps the study kept for the page."""
    beta = PRESETS[stack.preset].beta
    label = ARMS[stack.arm].label + (f", beta {beta:g}" if ARMS[stack.arm].gating == "linear" else "")
    return Scene(key, f"{stack.preset}: {label}", NOTES[stack.arm], scene_member(stack))


def story(results: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The study in plain words, every number taken from the results."""
    table, rows = Table(results), {row["id"]: row for row in results["claims"]}
    preset = table.presets[0]
    beta = PRESETS[preset].beta

    def median(arm: str, name: str, slope: float | None = beta) -> float:
        return float(np.median(table.get(preset, arm, name, slope)))

    def has(arm: str, *names: str) -> bool:
        return all(table.has(preset, arm, name) for name in names)

    told = [
        (
            "What is trained",
            f"A network of {results['settings']['depth']} layers of {results['settings']['width']} units sees points on a "
            "circle. In a gated network every unit multiplies its value by a gate, and every gate is a half-space: open on "
            "one side of a line through the input plane, closed on the other. A path visits one unit per layer and is "
            f"active where all its gates are open. Everything is trained with {results['settings']['seeds']} seeds; the "
            "scenes above show seed 0, whatever it looks like.",
        ),
        (
            "The easy half comes first",
            f"Within three epochs the loss falls to {median('pwc', 'loss_3'):.2f}: the slow wave is learned, the fast one "
            f"is not. By then the top half has {np.exp(median('pwc', 'allocation_3')):.1f} times as many active paths "
            f"as the bottom half (before training: {np.exp(median('pwc', 'allocation_0')):.1f} times). "
            + _verdict_words(rows["C9"]),
        ),
    ]
    if has("pwc", "near_top_30_200"):
        share = np.median(table.get(preset, "pwc", "near_top_30_200", beta)[:, -1])
        told.append(
            (
                "Half-spaces turn",
                f"At epoch 200, {share:.0%} of the last layer's half-spaces point within 30 degrees of the top; by chance it "
                "would be 17 %. The first layer hardly turns. " + _verdict_words(rows["C14"]),
            )
        )
    if has("pwc", "tangent_top_share_200"):
        peak = max((1, 3, 10, 30), key=lambda epoch: median("pwc", f"tangent_top_share_{epoch}"))
        told.append(
            (
                "The tangent kernel does not stay",
                "A lazy network would keep its tangent kernel. Here the top half's share of its trace goes from "
                f"{median('pwc', 'tangent_top_share_0'):.2f} at the start to "
                f"{median('pwc', f'tangent_top_share_{peak}'):.2f} at epoch {peak} and "
                f"{median('pwc', 'tangent_top_share_200'):.2f} at epoch 200: to the easy half, then to the hard half. "
                + _verdict_words(rows["C11"]),
            )
        )
    if has("pwc-frozen", "loss_end"):
        told.append(
            (
                "Is it the frozen gates?",
                f"With its gates frozen as drawn, the same network stands at {median('pwc-frozen', 'loss_end'):.2f} after "
                f"{table.horizon(preset, 'pwc-frozen')} epochs. A steeper gate narrows the gap: see the curves for "
                "larger beta in the first figure, and the floor that hard gates cannot pass. "
                + _verdict_words(rows["C8"]),
            )
        )
    told.append(
        (
            "Gates as trained are not yet half-spaces",
            f"The smooth gate used in training is only near a half-space. Evaluated with hard gates the trained network's "
            f"loss is {median('pwc', 'loss_hard_gates_end'):.2g} instead of {median('pwc', 'loss_end'):.2g}. We report both, "
            "side by side, in the results and in the last figure.",
        )
    )
    return tuple(told)


def _verdict_words(row: Row) -> str:
    verdict = "too short to tell here" if row["verdict"] == "cannot tell" else row["verdict"]
    return f"The paper's claim ({row['id']}): {verdict}."
