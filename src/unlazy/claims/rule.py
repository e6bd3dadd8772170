"""The rule that judges claims: from the numbers of each seed to verdicts. It is the same for all studies.

A *part* is declared for some seeds. Each seed passes, fails, or is missing: no number, NaN, or a time that was not found because
the training was watched too briefly (*censored*). A part gets a verdict only where no missing number could change it:

* *holds*: at least 90 % of the declared seeds pass (of an identity: all of its random cases);
* *fails*: at least half of the declared seeds fail;
* undecided otherwise: *not measured* or *censored* where missing numbers decide, *cannot tell* where the seeds disagree, and
  *provisional* where fewer than three seeds were measured, whatever the numbers.

A *claim* holds if all its parts hold. If some do, the verdict counts them: *2 of 6 parts*. If none does, it fails as soon as one
part fails, and is undecided otherwise. A part that has failed stays failed when its numbers are lost, so that deleting data never
improves a verdict. *replicates* is the verdict of the parts (the paper's own set-up), *survives* that of the controls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unlazy.claims.claim import Claim, Part, SeedTable, Shown

AGREE_SHARE = 0.9
FEWEST_SEEDS = 3
RESAMPLES = 2000
UNDECIDED = ("not measured", "censored", "provisional", "cannot tell")
NOT_RUN, NO_CONTROLS = "not run yet", "no control"
OUTCOMES = ("fails", "undecided", "part", "holds")
"""From worst to best: removing numbers never moves a claim to a later one."""
LOST = "failed when it was measured; its numbers are missing now"
Row = dict[str, Any]


def judge_part(part: Part, table: SeedTable, seeds: Sequence[int], failed_before: bool = False) -> Row:
    """The verdict and numbers of a part as a plain row. ``failed_before``: it failed under this rule when it had numbers."""
    values = part.values(table, seeds)
    passed, missing, censored = outcomes(part, values, part.horizon(table, seeds))
    verdict = part_verdict(passed, missing, censored, identity=part.identity)
    lost = failed_before and verdict in UNDECIDED and bool(missing.any())
    low, high = interval(values)
    return {
        "name": part.says,
        "verdict": "fails" if lost else verdict,
        "value": plain_number(median_of(values)),
        "interval": [plain_number(low), plain_number(high)],
        "unit": part.unit,
        "seeds": len(values),
        "agree": int(passed.sum()),
        "missing": int(missing.sum()),
        "identity": part.identity,
        "rule": part.rule,
        **({"note": LOST} if lost else {}),
    }


Truths = NDArray[np.bool_]


def outcomes(
    part: Part, values: NDArray[np.float64], watched: NDArray[np.float64] | None
) -> tuple[Truths, Truths, Truths]:
    """Which declared seeds pass, which are missing, and which of those were watched too briefly (censored).

    NaN and infinity never pass. A time that was not found counts as ``watched``, the time for which the seed was watched, if that
    reaches the threshold.
    """
    threshold, above = part.threshold, part.above is not None
    passed = np.isfinite(values) & (values > threshold if above else values < threshold)
    never = np.isposinf(values) if watched is not None else np.zeros(len(values), dtype=bool)
    long_enough = never & (np.isfinite(watched) & (watched >= threshold)) if watched is not None else never
    if above:
        passed |= long_enough
    missing = ~np.isfinite(values) & ~long_enough
    return passed, missing, missing & never


def part_verdict(passed: Truths, missing: Truths, censored: Truths, *, identity: bool) -> str:
    """The verdict of a part, from which of its declared seeds passed, are missing, or are censored."""
    declared, held, unknown = len(passed), int(passed.sum()), int(missing.sum())
    needed = declared if identity else AGREE_SHARE * declared
    gap = "censored" if censored.any() else "not measured"
    if declared == unknown:
        return gap
    if declared - unknown < FEWEST_SEEDS and not identity:
        return "provisional"
    if held >= needed:
        return "holds"
    if held + unknown >= needed:
        return gap
    if identity or declared - held - unknown >= declared / 2:
        return "fails"
    return gap if unknown and held + unknown > declared / 2 >= held else "cannot tell"


def combine(verdicts: Sequence[str]) -> tuple[str, str]:
    """Outcome and verdict text of a claim, from the verdicts of its parts.

    >>> combine(["holds", "fails"]), combine(["fails", "not measured"]), combine(["censored", "cannot tell"])
    (('part', '1 of 2 parts'), ('fails', 'fails'), ('undecided', 'censored'))
    """
    held = sum(verdict == "holds" for verdict in verdicts)
    if held == len(verdicts):
        return "holds", "holds"
    if held:
        return "part", f"{held} of {len(verdicts)} parts"
    if "fails" in verdicts:
        return "fails", "fails"
    return "undecided", next(word for word in UNDECIDED if word in verdicts)


def judge_claim(claim: Claim, table: SeedTable, seeds: Sequence[int], earlier: Mapping[str, Any] | None = None) -> Row:
    """Judge a claim: both verdicts, the headline number, parts, controls and shown numbers, as a plain row.

    ``earlier``: the row of an earlier judgement under the same rule; parts that failed there and have lost numbers stay failed.
    """

    def judge_parts(chosen: Sequence[Part], before: Sequence[Mapping[str, Any]]) -> list[Row]:
        failed = [part["verdict"] == "fails" for part in before] or [False] * len(chosen)
        return [judge_part(part, table, seeds, one) for part, one in zip(chosen, failed, strict=True)]

    parts = judge_parts(claim.parts, earlier["parts"] if earlier else ())
    controls = judge_parts(claim.controls, earlier["controls"] if earlier else ())
    head = parts[0]
    outcome, words = combine([part["verdict"] for part in parts])
    shows = [summary(shown, table, seeds) for shown in claim.shows]
    survives = combine([part["verdict"] for part in controls]) if controls else (NO_CONTROLS, NO_CONTROLS)
    return {
        "id": claim.id,
        "where": claim.where,
        "statement": claim.says,
        "paper_value": claim.paper,
        "verdict": words,
        "outcome": outcome,
        "survives": survives[1],
        "survives_outcome": survives[0],
        **{key: head[key] for key in ("value", "unit", "interval", "seeds", "agree", "identity")},
        "rule": f"{head['name']}: {head['rule']} {head['unit']}".strip(),
        "parts": parts,
        "controls": controls,
        "shows": [row for row in shows if row["seeds"] > 0],
    }


def summary(shown: Shown, table: SeedTable, seeds: Sequence[int]) -> Row:
    """Median, interval and number of seeds of shown numbers, as a plain row without a verdict."""
    values = shown.values(table, seeds)
    low, high = interval(values)
    return {
        "name": shown.says,
        "value": plain_number(median_of(values)),
        "interval": [plain_number(low), plain_number(high)],
        "unit": shown.unit,
        "seeds": int((~np.isnan(values)).sum()),
    }


def interval(values: ArrayLike) -> tuple[float, float]:
    """95 % bootstrap interval of the median (2000 resamples, fixed seed); minimum and maximum for fewer than 5 values."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[~np.isnan(numbers)]
    if len(numbers) == 0:
        return np.nan, np.nan
    if len(numbers) < 5:
        return float(numbers.min()), float(numbers.max())
    return _bootstrap(numbers.tobytes())


@lru_cache(4096)
def _bootstrap(data: bytes) -> tuple[float, float]:
    numbers = np.frombuffer(data)
    picks = np.random.default_rng(0).integers(0, len(numbers), (RESAMPLES, len(numbers)))
    medians = np.sort(_medians(numbers[picks]))
    return float(medians[int(0.025 * RESAMPLES)]), float(medians[int(0.975 * RESAMPLES)])


def median_of(values: NDArray[np.float64]) -> float:
    """Median without NaN; infinity counts as a number."""
    numbers = values[~np.isnan(values)]
    return float(_medians(numbers[None])[0]) if len(numbers) else float("nan")


def _medians(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Median of each row; unlike numpy's, it gives no NaN where infinity is one of the middle two."""
    ordered, length = np.sort(rows, axis=1), rows.shape[1]
    return (ordered[:, (length - 1) // 2] + ordered[:, length // 2]) / 2


def plain_number(number: float) -> float | None:
    """The number with six digits for JSON; ``None`` for NaN and infinity."""
    return float(f"{number:.6g}") if np.isfinite(number) else None
