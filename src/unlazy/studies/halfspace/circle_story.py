"""The words of the circle study's page: its title, which runs it shows with which note, and its story in paragraphs.

They say what is shown and fill in numbers. What was found stands in the findings beside the table, and changes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unlazy.studies.halfspace.circle_networks import PRESETS, SCENE_ARMS, Stack
from unlazy.studies.table import Table

TITLE = "What a network learns first"
LEAD = (
    "A network learns a slow wave on the top half of a circle and a fast wave on the bottom half. "
    "Scrub through its training and see where its half-spaces turn, and when."
)

NAMES = {"pwc": "Gated network", "relu": "ReLU network", "pwc-frozen": "Gates never trained"}

MEANINGS = {
    "pwc": "Every unit has a gate that is open on one side of a line through the inputs. What a path adds to the output is one "
    "trained number: a constant.",
    "relu": "The usual network: whether a unit is on depends on the layers before it.",
    "pwc-frozen": "The same network as the gated one, but its gates stay as they were drawn at random; only what the paths "
    "add up is trained.",
}

SETTINGS = {
    "author": ("", "Trained with the settings of the paper's authors."),
    "pilot": (", second setting", "Trained with settings of our own, as a check (smaller learning rate, no biases)."),
}

NOTES = {
    "pwc": "Press play and watch layer 5: do its half-spaces turn toward the easy half while the loss falls to 0.25?",
    "relu": "A ReLU net has no fixed half-spaces. Watch where its paths are.",
    "pwc-frozen": "The control: the same gates, never trained. The paths cannot move.",
}


def scenes(stacks: Sequence[Stack], runs: Path) -> list[tuple[Path, str, str, str, int]]:
    """Run folder, title, meaning, note and member of every network that the page shows.

    The member is that of seed 0 at the preset's slope beta, for which the study stores arrays at many steps.
    """
    shown = [stack for stack in stacks if stack.arm in SCENE_ARMS]
    shown.sort(key=lambda stack: (list(PRESETS).index(stack.preset), SCENE_ARMS.index(stack.arm)))
    return [(stack.training().folder(runs), *_words(stack), NOTES[stack.arm], stack.scene_member()) for stack in shown]


def _words(stack: Stack) -> tuple[str, str]:
    """A plain name and a meaning in a few sentences, for readers who know no word of the study."""
    suffix, whose = SETTINGS[stack.preset]
    return NAMES[stack.arm] + suffix, f"{MEANINGS[stack.arm]} {whose}"


def story(results: dict[str, Any], table: Table) -> tuple[tuple[str, str], ...]:
    """Title and text of every paragraph; the numbers come from ``results`` and ``table``."""
    rows = {row["id"]: row for row in results["claims"]}
    preset = results["settings"]["presets"][0]
    beta = PRESETS[preset].beta

    def median(arm: str, name: str, at: int | str | None = None, **where: Any) -> float:
        """Median over seeds of a quantity of an arm at the preset's beta; NaN if it was not measured."""
        found = table.select(name, at, preset=preset, arm=arm, beta=beta, **where)
        return float(np.median(found)) if len(found) else float("nan")

    paragraphs = [
        (
            "What is trained",
            f"A network of {results['settings']['depth']} layers of {results['settings']['width']} units sees points on a "
            "circle. In a gated network every unit multiplies its value by a gate, and every gate is a half-space: open on "
            "one side of a line through the input plane, closed on the other. A path visits one unit per layer and is "
            f"active where all its gates are open. Everything is trained with {len(results['seeds'])} seeds; the "
            "scenes above show seed 0, whatever it looks like.",
        ),
        (
            "Does the easy half come first?",
            f"After three epochs the loss is {median('pwc', 'loss', 3):.2f}; near 0.25 one of the two waves is learned. "
            f"By then the top half has {np.exp(median('pwc', 'allocation', 3)):.1f} times as many active paths "
            f"as the bottom half (before training: {np.exp(median('pwc', 'allocation', 0)):.1f} times). "
            + _verdict_sentence(rows["C9"]),
        ),
    ]
    first, share = (median("pwc", "near_top_30", 200, layer=one) for one in (1, results["settings"]["depth"]))
    if np.isfinite(share):
        paragraphs.append(
            (
                "Do half-spaces turn?",
                f"At epoch 200, {share:.0%} of the last layer's half-spaces point within 30 degrees of the top; by chance it "
                f"would be 17 %. In the first layer it is {first:.0%}. " + _verdict_sentence(rows["C14"]),
            )
        )
    if np.isfinite(median("pwc", "tangent_top_share", 200)):
        peak = max((1, 3, 10, 30), key=lambda epoch: median("pwc", "tangent_top_share", epoch))
        paragraphs.append(
            (
                "Does the tangent kernel stay?",
                "A lazy network would keep its tangent kernel. Here the top half's share of its trace goes from "
                f"{median('pwc', 'tangent_top_share', 0):.2f} at the start to "
                f"{median('pwc', 'tangent_top_share', peak):.2f} at epoch {peak} and "
                f"{median('pwc', 'tangent_top_share', 200):.2f} at epoch 200. " + _verdict_sentence(rows["C11"]),
            )
        )
    if np.isfinite(median("pwc-frozen", "loss", "end")):
        paragraphs.append(
            (
                "Is it the frozen gates?",
                f"With its gates frozen as drawn, the same network has a loss of {median('pwc-frozen', 'loss', 'end'):.2f} after "
                f"{median('pwc-frozen', 'epochs'):.0f} epochs. The first figure has the curves for "
                "larger beta, too, and the floor that hard gates cannot pass. " + _verdict_sentence(rows["C8"]),
            )
        )
    paragraphs.append(
        (
            "Gates as trained are not yet half-spaces",
            f"The smooth gate used in training is only near a half-space. Evaluated with hard gates the trained network's "
            f"loss is {median('pwc', 'loss_hard_gates', 'end'):.2g} instead of {median('pwc', 'loss', 'end'):.2g}. "
            "We report both, side by side, in the results and in the last figure.",
        )
    )
    return tuple(paragraphs)


def _verdict_sentence(row: dict[str, Any]) -> str:
    """The verdict of a judged claim."""
    return f"The paper's claim ({row['id']}): {row['verdict']}."
