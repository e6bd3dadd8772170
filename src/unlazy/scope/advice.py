"""What to do about a verdict: sentences whose confidence was measured, read from ``advice.json``.

The study ``advice`` turned one dial of a training at a time and counted how often the gap went where theory says; it writes that
file, and nobody edits it. A dial that moved fewer than 8 of 10 trainings with the same word gets no sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from unlazy.runtime import StoreError, require

FILE = Path(__file__).with_name("advice.json")
FORMAT = 1
LEAST_SHARE = 0.8  # of the trainings with a word, those that a turn must move as predicted before it is advised
FEWEST_TRAININGS = 10
MOST_SENTENCES = 3
UNKNOWN = "We do not know what would help."
AIMS = {"lazy": ("richer", "richer"), "mixed": ("richer", "lazier"), "rich": ("lazier", "lazier")}
"""What a reader of each word may want: features, or to be nearer to a linear model. The best turn for each gets a sentence."""
PURPOSES = {"richer": "To learn more features", "lazier": "To stay nearer to the linear model"}
ACTIONS = {
    "scale-down": "divide the outputs by 4 (raise the learning rate with it: SGD 16 times, Adam 4 times)",
    "scale-up": "multiply the outputs by 4 (lower the learning rate with it: SGD 16 times, Adam 4 times)",
    "rate-up": "raise the learning rate 4 times",
    "rate-down": "lower the learning rate 4 times",
    "width-down": "make the layers 4 times narrower",
    "width-up": "make the layers 4 times wider",
    "start-down": "halve the weights at the start",
    "start-up": "double the weights at the start",
    "train-longer": "train 4 times as long",
    "stop-early": "stop after a quarter of the steps",
}
"""What the verdict may advise, by the name of the turn. Others depend on what a scope does not know, such as frozen layers."""


@cache
def load_counts() -> Mapping[str, Any]:
    """The counts of the study, as shipped."""
    try:
        counts: dict[str, Any] = json.loads(FILE.read_text())
        require(counts.get("format") == FORMAT, f"advice of format {FORMAT} expected, got {counts.get('format')!r}.")
    except (OSError, ValueError) as error:
        raise StoreError(f"{FILE.name} is missing or damaged ({error}); install unlazy again.") from error
    return counts


def advise(label: str, counts: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """At most three sentences on what to do about a training with this word; none for "cannot tell", whose reasons say it.

    ``counts``: other counts than the shipped ones.
    """
    if label not in AIMS:
        return ()
    counts = load_counts() if counts is None else counts
    found = {name: about[label] | {"aim": about["aim"]} for name, about in counts["turns"].items() if label in about}
    known = {name: about for name, about in found.items() if name in ACTIONS and about["trainings"] >= FEWEST_TRAININGS}
    chosen: list[str] = []
    for aim in AIMS[label]:
        moving = [name for name in known if known[name]["aim"] == aim and _share(known[name], "moved") >= LEAST_SHARE]
        chosen += sorted(set(moving) - set(chosen), key=lambda name: _rank(known[name]))[:1]
    sentences = [_gap_sentence(name, known[name], label) for name in chosen]
    helping = [name for name in known if _share(known[name], "fell") >= LEAST_SHARE and name not in chosen]
    if helping:
        best = min(helping, key=lambda name: (-_share(known[name], "fell"), name))
        sentences.append(_loss_sentence(best, known[best], label))
    twin = counts["twin"].get(label)
    if label == "lazy" and twin and twin["trainings"] >= FEWEST_TRAININGS and _share(twin, "moved") >= LEAST_SHARE:
        sentences.append(
            "If its loss is good enough, a linear model on its starting features would do: held-out loss of the linearised twin "
            f"at most 5 % above the network's in {_counted(twin, 'moved', label)}."
        )
    return tuple(sentences[:MOST_SENTENCES]) or (UNKNOWN,)


def share_interval(passed: int, trainings: int, pairs: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, as if each pair of network and data set had been trained once.

    Seeds of the same pair are not independent; counting them as one makes the interval wider.

    >>> low, high = share_interval(9, 10, 10)
    >>> round(low, 2), round(high, 2)
    (0.6, 0.98)
    """
    share, z = passed / trainings, 1.96
    middle = (share + z**2 / (2 * pairs)) / (1 + z**2 / pairs)
    half = z * math.sqrt(share * (1 - share) / pairs + z**2 / (4 * pairs**2)) / (1 + z**2 / pairs)
    return max(0.0, middle - half), min(1.0, middle + half)


def _share(about: Mapping[str, Any], what: str) -> float:
    return float(about[what] / about["trainings"])


def _rank(about: Mapping[str, Any]) -> tuple[float, float]:
    """The surest turn first; among equally sure ones, that with the largest factor."""
    return -_share(about, "moved"), -abs(math.log(about["factor"]))


def _counted(about: Mapping[str, Any], what: str, label: str) -> str:
    """ "19 of 20 lazy trainings (interval 76 to 99 %)"."""
    low, high = share_interval(about[what], about["trainings"], about["pairs"])
    return f"{about[what]} of {about['trainings']} {label} trainings (interval {100 * low:.0f} to {100 * high:.0f} %)"


def _gap_sentence(name: str, about: Mapping[str, Any], label: str) -> str:
    went = "grew" if about["aim"] == "richer" else "shrank"
    return (
        f"{PURPOSES[about['aim']]}: {ACTIONS[name]}. The gap {went} in {_counted(about, 'moved', label)}, "
        f"to {about['factor']:.2g} times at the median; the held-out loss fell in {about['fell']} and rose in {about['rose']}."
    )


def _loss_sentence(name: str, about: Mapping[str, Any], label: str) -> str:
    return f"To lower the held-out loss: {ACTIONS[name]}. It fell in {_counted(about, 'fell', label)}."
