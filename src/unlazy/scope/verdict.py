"""Lazy, rich, mixed, or cannot tell: the verdict on a training run, with its evidence.

The words are about one number, the *gap*: how far the network's predictions end from those of a linearised network trained
from the same start by the same recipe, relative to how far they went. Nobody trains the twin in practice; the verdict
estimates the gap from what a scope measures, by thresholds that a study calibrated on networks where the twin was trained.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from unlazy.scope.history import History
from unlazy.scope.readings import MEASURES, Reading, Readings, readings
from unlazy.scope.thresholds import Threshold, Thresholds, thresholds
from unlazy.store import Run

LABELS = ("lazy", "mixed", "rich", "cannot tell")
FEWEST_SAMPLES = 32
LEAST_FALL = 0.05  # share of the loss at the start
NEEDED = ("linearisation_error", "tangent_distance", "tangent_change")  # one of these must be there
TANGENT_VIEWS = ("linear", "linearisation_error", "tangent")
GAINS, STARVES = 1.15, 0.85  # kernel mass of a group now, relative to the start
BEHIND = 2.0  # loss of a group, relative to that of all samples, where it fell by less than half
OWN_TANGENT = 1e-4  # a network this near to its own tangent is linear in the parameters that train
MEANINGS = {
    "lazy": "It kept the features it started with: a linear model on them (its linearised twin) would predict nearly the same.",
    "mixed": "It changed its features somewhat: a linear model on those it started with (its linearised twin) comes near.",
    "rich": "It learned features: a linear model on those it started with (its linearised twin) would predict something else.",
    "cannot tell": "The measurements do not decide how near a linear model on its starting features (its linearised twin) comes.",
}


@dataclass(frozen=True)
class Evidence:
    """One measure: its value, interval over probe samples, thresholds, and what it says by itself."""

    measure: str
    value: float
    interval: tuple[float, float] | None
    lazy_below: float
    rich_above: float
    says: str
    source: str


@dataclass(frozen=True)
class Verdict:
    """``label``, the estimated ``gap``, ``evidence`` and, where the label is "cannot tell", ``reasons``.

    ``gap_range``: the estimate give or take its typical error, in calibration and over probe samples.

    ``when``: the first measured step at which each measure, and all together ("network"), passed its lazy threshold; ``None``
    where it never did. ``when_after``: the last step measured before that one, so that the crossing lies between the two.
    ``groups``: shares of samples and of the kernel's trace (``mass``) at the first and last measurement,
    ``mass_per_share`` (1: as much as its samples' share), ``mass_gain`` since the start, ``paths_gain`` (change of the mean log
    number of active paths, against that of all samples), what became of each group: ``gains``, ``starved`` or ``keeps``, and
    whether its loss stayed ``behind``. ``notes``: what the numbers contain besides learning.
    """

    label: str
    gap: float | None
    gap_range: tuple[float, float] | None
    evidence: tuple[Evidence, ...]
    when: Mapping[str, int | None]
    groups: Mapping[str, Mapping[str, Any]]
    reasons: tuple[str, ...]
    source: str
    notes: tuple[str, ...] = ()
    when_after: Mapping[str, int | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ``words`` holds the sentences, so that whoever draws the verdict says the same."""
        return dict(json.loads(json.dumps(asdict(self) | {"words": self.words()})))

    def words(self) -> dict[str, str]:
        """The sentences: what the label means, the gap, when, and the groups; empty where there is nothing to say."""
        return {
            "meaning": MEANINGS[self.label],
            "gap": self.gap_text(),
            "when": self.when_text(),
            "groups": self.groups_text(),
        }

    def __str__(self) -> str:
        lines = [f"Verdict: {self.label}. {MEANINGS[self.label]}"]
        lines += [f"  {reason}" for reason in self.reasons]
        lines += [self.gap_text()] if self.gap_text() else []
        lines += _table(self.evidence)
        lines += [f"  {line}" for line in self.remarks()]
        return "\n".join(lines)

    def gap_text(self) -> str:
        """The estimate and how far it is typically off, in a sentence."""
        if self.gap is None or self.gap_range is None:
            return ""
        low, high = self.gap_range
        scale = "0: none, 1: as far as the network went"
        return f"Estimated gap to its linearised twin ({scale}): {self.gap:.2g}, typically {low:.2g} to {high:.2g}."

    def remarks(self) -> list[str]:
        """When, on which groups, what else to know, and where the thresholds come from."""
        said = (self.when_text(), self.groups_text(), *(f"Note: {note}." for note in self.notes))
        return [line for line in (*said, f"Thresholds: {self.source}.") if line]

    def when_text(self) -> str:
        """When the network left the lazy regime, as closely as it was looked at, in a sentence."""
        if "network" not in self.when:
            return ""
        step, after = self.when["network"], self.when_after.get("network")
        if step is None:
            return "" if self.label == "cannot tell" else "It never left the lazy regime."
        if self.label == "lazy":
            return f"The estimate was beyond the lazy border at step {step}, but came back."
        known = f"by step {step}" if after is None else f"between step {after} and step {step}"
        known = f"at step {step}" if after == step - 1 else known
        if self.label == "cannot tell":
            return f"The estimate passed the lazy border {known}."
        return f"It left the lazy regime {known}."

    def groups_text(self) -> str:
        """Who gained kernel mass, who was starved and who stayed behind, in a sentence or two."""
        moves, parts = [], []
        for word, verb in (("gains", "grew"), ("starved", "shrank")):
            found = [(name, about) for name, about in self.groups.items() if about.get("verdict") == word]
            if found:
                names = ", ".join(f"{name} ({about['mass_gain']:.2g} times)" for name, about in found)
                moves.append(f"{verb} for {names}")
        if moves:
            parts.append(f"Share of the tangent kernel (how strongly training acts on a group): {'; '.join(moves)}.")
        behind = [(name, about) for name, about in self.groups.items() if about.get("behind")]
        if behind:
            names = ", ".join(
                f"{n} (loss {about['loss_first']:.2g} to {about['loss_last']:.2g})" for n, about in behind
            )
            parts.append(f"Left behind: {names}.")
        return " ".join(parts)

    def _repr_html_(self) -> str:
        return _as_html(self)


def judge(measured: History | Readings | Run, calibrated: Thresholds | None = None) -> Verdict:
    """The verdict on what a scope measured: its history, a run folder it wrote, or readings taken from either."""
    if isinstance(measured, Run):
        measured = History.of_run(measured)
    seen = measured if isinstance(measured, Readings) else readings(measured)
    limits = thresholds() if calibrated is None else calibrated
    known = {name: reading for name, reading in seen.measures.items() if name in limits.measures}
    source = str(limits.source["text"])
    evidence = tuple(_evidence(name, reading, limits.measures[name], source) for name, reading in known.items())
    reasons = _too_little(seen)
    gap, span = None, None
    label = "cannot tell"
    if known:
        pooled = _telling(known)
        log_gap, scatter = limits.pooled({name: reading.value for name, reading in pooled.items()})
        sampling = _sampling_error(pooled, limits)
        off, wide = math.hypot(limits.margin, sampling), math.hypot(limits.spread, sampling)
        gap, span = math.exp(log_gap), (math.exp(log_gap - wide), math.exp(log_gap + wide))
        words = [limits.word(log_gap - off), limits.word(log_gap + off)]
        if not reasons and scatter > limits.disagreement:
            reasons.append(
                f"The measures disagree: their estimates of the gap scatter by a factor of {math.exp(scatter):.2g}."
            )
        if not reasons and words[0] != words[1]:
            reasons.append(f"The estimated gap is too near the border between {words[0]} and {words[1]}.")
        if not reasons:
            label = words[0]
    when, after = _when(seen, limits)
    return Verdict(label, gap, span, evidence, when, _groups(seen), tuple(reasons), source, seen.notes, after)


def _telling(known: Mapping[str, Reading]) -> Mapping[str, Reading]:
    """All measures; but where the network is linear in what trains, how far parameters went says nothing about features."""
    own = [known[name].value for name in ("linearisation_error", "tangent_change") if name in known]
    if len(own) < 2 or max(own) > OWN_TANGENT:
        return known
    return {name: reading for name, reading in known.items() if name != "parameter_motion"}


def _too_little(seen: Readings) -> list[str]:
    """Why nothing can be told, whatever the measures say."""
    reasons = []
    if seen.measurements < 2:
        reasons.append(f"{seen.measurements} measurement: one at the start and one later are needed.")
    if seen.samples < FEWEST_SAMPLES:
        reasons.append(f"A probe of {seen.samples} samples is too small; give at least {FEWEST_SAMPLES}.")
    if not any(name in seen.measures for name in NEEDED):
        why = "; ".join(f"{name}: {reason}" for name, reason in seen.left_out.items() if name in TANGENT_VIEWS)
        reasons.append(f"Neither tangent kernel nor linearisation could be measured{f' ({why})' if why else ''}.")
    if seen.losses is not None:
        first, lowest, last = seen.losses
        if not math.isfinite(last):
            reasons.append("The loss is not a number: training broke down.")
        elif lowest > first - LEAST_FALL * abs(first):
            reasons.append(
                f"The loss did not fall (from {first:.3g} to {lowest:.3g} at best): nothing was learned yet."
            )
    return reasons


def _evidence(name: str, reading: Reading, limit: Threshold, source: str) -> Evidence:
    low, high = reading.interval or (reading.value, reading.value)
    words = ["lazy" if end < limit.lazy_below else "rich" if end > limit.rich_above else "mixed" for end in (low, high)]
    says = words[0] if words[0] == words[1] else f"{words[0]} or {words[1]}"
    return Evidence(name, reading.value, reading.interval, limit.lazy_below, limit.rich_above, says, source)


def _sampling_error(known: Mapping[str, Reading], limits: Thresholds) -> float:
    """Half the width of the pooled estimate's interval over probe samples: all measures at one end against the other."""
    ends = [
        limits.pooled(
            {
                name: reading.value if reading.interval is None else reading.interval[end]
                for name, reading in known.items()
            }
        )[0]
        for end in (0, 1)
    ]
    return abs(ends[1] - ends[0]) / 2


def _when(seen: Readings, limits: Thresholds) -> tuple[dict[str, int | None], dict[str, int | None]]:
    """First measured steps beyond the lazy thresholds, and the last ones measured before them."""
    curves = {name: curve for name, curve in seen.curves.items() if name in limits.measures}
    beyond: dict[str, dict[int, bool]] = {}
    if curves:
        border = math.log(limits.lazy_gap)
        beyond["network"] = {}
        for step in sorted({step for curve in curves.values() for step in curve}):
            values = {name: curve[step] for name, curve in curves.items() if math.isfinite(curve.get(step, math.nan))}
            if values:
                beyond["network"][step] = limits.pooled(values)[0] > border
    for name, curve in curves.items():
        beyond[name] = {step: value > limits.measures[name].lazy_below for step, value in sorted(curve.items())}
    passed = {name: next((step for step, far in steps.items() if far), None) for name, steps in beyond.items()}
    return passed, {name: _before(passed[name], beyond[name]) for name in beyond}


def _before(step: int | None, measured: Iterable[int]) -> int | None:
    """The last of the measured steps before this one."""
    return None if step is None else max((one for one in measured if one < step), default=None)


def _groups(seen: Readings) -> dict[str, dict[str, Any]]:
    """The group view with a word: has a group more of the kernel's trace than at the start, or less?"""
    view: dict[str, dict[str, Any]] = {}
    for name, about in seen.groups.items():
        row: dict[str, Any] = dict(about)
        if about.get("mass_first", 0) > 0:
            gain = about["mass_last"] / about["mass_first"]
            row["mass_gain"] = gain
            row["mass_per_share"] = about["mass_last"] / about.get("kernel_share", about["share"])
            row["verdict"] = "gains" if gain > GAINS else "starved" if gain < STARVES else "keeps"
        if "paths_first" in about and "paths_last" in about:
            row["paths_gain"] = about["paths_last"] - about["paths_first"]
        if seen.losses is not None and "loss_last" in about:
            far = about["loss_last"] > BEHIND * seen.losses[2]
            row["behind"] = bool(far and about["loss_last"] > about["loss_first"] / 2)
        view[name] = row
    return view


# --- drawing -------------------------------------------------------------------------------------------------


def _table(evidence: Sequence[Evidence]) -> list[str]:
    """The measures in columns."""
    if not evidence:
        return []
    rows = [("measure", "value [95 %]", "lazy below", "rich above", "says")]
    for one in evidence:
        span = "" if one.interval is None else f" [{one.interval[0]:.2g}, {one.interval[1]:.2g}]"
        limits = (f"{one.lazy_below:.2g}", f"{one.rich_above:.2g}")
        rows.append((one.measure, f"{one.value:.2g}{span}", *limits, one.says))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


COLOURS = {"lazy": "#2b8ccf", "mixed": "#b8860b", "rich": "#0f9d70", "cannot tell": "#7f7f7f"}


def _as_html(verdict: Verdict) -> str:
    """A small card that needs nothing else; its text takes the page's own colours, light or dark."""
    cell = "padding:2px 10px 2px 0;text-align:left;border:0"
    rows = "".join(
        f'<tr title="{html.escape(MEASURES.get(one.measure, ""))}">'
        f'<td style="{cell}">{html.escape(one.measure.replace("_", " "))}</td>'
        f'<td style="{cell}">{one.value:.2g}</td><td style="{cell}">{_scale_svg(one)}</td>'
        f'<td style="{cell};color:{COLOURS.get(one.says, "inherit")}">{html.escape(one.says)}</td></tr>'
        for one in verdict.evidence
    )
    gap = f"<div>{html.escape(verdict.gap_text())}</div>" if verdict.gap_text() else ""
    notes = [*verdict.reasons, *verdict.remarks()]
    said = "".join(f"<div>{html.escape(note)}</div>" for note in notes)
    return (
        '<div style="font:13px/1.5 system-ui,sans-serif;color:inherit;border:1px solid rgba(127,127,127,.4);'
        'border-radius:8px;padding:10px 14px;max-width:46em">'
        f'<div style="font-size:16px;font-weight:600;color:{COLOURS[verdict.label]}">{verdict.label}</div>'
        f"<div>{MEANINGS[verdict.label]}</div>{gap}"
        f'<table style="border-collapse:collapse;margin:6px 0;color:inherit;font:inherit">{rows}</table>'
        f'<div style="opacity:.75">{said}</div></div>'
    )


def _scale_svg(one: Evidence) -> str:
    """The value on a logarithmic line between the two thresholds."""
    low, high = math.log(one.lazy_below), math.log(one.rich_above)

    def place(value: float) -> float:
        along = (math.log(max(value, 1e-12)) - low) / (high - low)
        return 50 + 50 * min(max(along, -0.9), 1.9)

    ends = one.interval or (one.value, one.value)
    left, right = place(ends[0]), place(ends[1])
    return (
        '<svg width="150" height="12" role="img" aria-hidden="true">'
        f'<rect x="0" y="4" width="50" height="4" fill="{COLOURS["lazy"]}" opacity=".5"/>'
        f'<rect x="50" y="4" width="50" height="4" fill="{COLOURS["mixed"]}" opacity=".5"/>'
        f'<rect x="100" y="4" width="50" height="4" fill="{COLOURS["rich"]}" opacity=".5"/>'
        f'<rect x="{left:.1f}" y="5" width="{max(right - left, 0.5):.1f}" height="2" fill="currentColor"/>'
        f'<circle cx="{place(one.value):.1f}" cy="6" r="4" fill="currentColor"/></svg>'
    )
