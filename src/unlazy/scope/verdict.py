"""Lazy, rich, mixed, or cannot tell: the verdict on a training run, and what it rests on.

The words are about one number, the *gap*: how far the network's predictions are from those of its *linearised twin* (the network
linearised at its start, trained from there by the same recipe), relative to how far they went. Where the twin was trained, the
verdict quotes it. Else the gap is estimated from ``linearisation_error`` by a curve (``lazy_thresholds.py``) that a study
calibrated on trainings whose twin was trained. The other measures are shown and have no vote.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from unlazy.curves import WORD_COLOURS
from unlazy.scope.advice import advise
from unlazy.scope.history import History
from unlazy.scope.layer_table import LayerTable
from unlazy.scope.lazy_thresholds import WORDS, Thresholds, load_thresholds
from unlazy.scope.samples import Samples
from unlazy.scope.summary import MEASURES, RESTS_ON, TrainingSummary, TwinSummary, summarise
from unlazy.store import Run

LABELS = (*WORDS, "cannot tell")
FEWEST_SAMPLES = 32
LEAST_FALL = 0.05  # a loss that falls by less, as a share of its start, has learned nothing
TANGENT_VIEWS = ("linear", "linearisation_error", "tangent")
GAINS, STARVES = 1.15, 0.85  # kernel mass of a group now, relative to the start
FAR_APART = 4.0  # steps of two measurements: a border in between is not interpolated
BEHIND = 2.0  # loss of a group, relative to that of all samples, where it fell by less than half
MEANINGS = {
    "lazy": "It kept the features it started with: a linear model on them (its linearised twin) would predict nearly the same.",
    "mixed": "It changed its features somewhat: a linear model on those it started with (its linearised twin) comes near.",
    "rich": "It learned features: a linear model on those it started with (its linearised twin) would predict something else.",
    "cannot tell": "The measurements do not decide how near a linear model on its starting features (its linearised twin) comes.",
}


@dataclass(frozen=True)
class Evidence:
    """The measure that a word rests on: its value, interval over probe samples, the borders, and what it says."""

    measure: str
    value: float
    interval: tuple[float, float] | None
    lazy_below: float
    rich_above: float
    says: str
    source: str


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one word: its first and last measured step, and about when it ended (``None``: it lasts)."""

    word: str
    first: int
    last: int
    until: int | None = None


@dataclass(frozen=True)
class Verdict:
    """The word about a training (``label``), the ``gap``, what it rests on (``evidence``), and ``reasons`` for a "cannot tell".

    ``gap_range``: where the true gap lies for such an estimate; ``None`` beside "cannot tell" and where the twin was trained.
    ``twin``: what the twin itself gave (gap by step, losses of both). ``phases``: the words over the training. ``when``: the
    first measured step beyond the lazy border (``"network"``), ``None`` if there is none; ``when_after``: the measured step
    before that one. ``measures``: the other measures at the end; they have no vote.
    ``groups``: shares of samples and of the kernel's trace (``mass``) at the first and last measurement,
    ``mass_per_share`` (1: as much as its share of the samples), ``mass_gain`` since the start, ``paths_gain`` (change of the mean
    log number of active paths, minus that of all samples), a word for each group: ``gains``, ``starved`` or ``keeps``, and
    whether its loss stayed ``behind``. ``notes``: what else changed the numbers, besides learning. ``layers``: one line a layer,
    and ``samples`` that stand out; ``None`` where nothing was measured by layer or sample.
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
    phases: tuple[Phase, ...] = ()
    measures: Mapping[str, float] = field(default_factory=dict)
    twin: TwinSummary | None = None
    layers: LayerTable | None = None
    samples: Samples | None = None

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do: at most three sentences, each with the share of trainings in which it worked (study ``advice``)."""
        return advise(self.label)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ``words`` holds the sentences, so that page and command line say the same."""
        plain = json.loads(json.dumps(asdict(self) | {"words": self.words(), "advice": self.advice}))
        for name in ("loss", "twin_loss"):
            if plain["twin"] is not None and math.isnan(plain["twin"][name]):
                plain["twin"][name] = None
        return dict(plain)

    def words(self) -> dict[str, str]:
        """The sentences by topic: meaning, gap, when, groups, layers, samples, what to do; "" where there is none."""
        return {
            "meaning": MEANINGS[self.label],
            "gap": self.gap_text(),
            "when": self.when_text(),
            "groups": self.groups_text(),
            "layers": "\n".join(self.layer_lines()),
            "samples": self.samples_text(),
            "advice": self.advice_text(),
        }

    def __str__(self) -> str:
        lines = [f"Verdict: {self.label}. {MEANINGS[self.label]}", *self.reasons]
        lines += [text for text in (self.gap_text(), self.when_text(), self.groups_text()) if text]
        lines += self.layer_lines()
        lines += [text for text in (self.samples_text(), self.advice_text()) if text]
        lines += [f"Note: {note}." for note in self.notes]
        return "\n  ".join([*lines, *self.basis()])

    def gap_text(self) -> str:
        """A sentence or two about the gap: measured by the twin with what features bought, or estimated with its range."""
        if self.gap is None or self.label == "cannot tell":
            return ""
        scale = "0: the same predictions, 1: as far apart as the network went"
        if self.twin is None:
            assert self.gap_range is not None
            low, high = self.gap_range
            others = [word for word in map(load_thresholds().word, self.gap_range) if word != self.label]
            doubt = f", so it may be {' or '.join(others)}" if others else ""
            return (
                f"Gap to that linear model ({scale}): about {self.gap:.2g}, estimated; range {low:.2g} to {high:.2g}{doubt}. "
                "scope.twin(...) measures it."
            )
        how = "simulated" if self.twin.simulated else "trained"
        said = f"Gap to that linear model ({scale}): {self.gap:.2g}, measured: that linear model was {how} too."
        if math.isfinite(self.twin.loss) and math.isfinite(self.twin.twin_loss):
            verb = "would be at about" if self.twin.simulated else "is at"
            said += (
                f" Loss on the same samples {self.twin.loss:.3g}; this network linearised at its start, with the same "
            )
            said += f"optimiser, batches and steps, {verb} {self.twin.twin_loss:.3g}."
        return said

    def when_text(self) -> str:
        """A sentence about the phases of the training: "Lazy until about step 20, rich since."."""
        parts = [_until_text(phase, after) for phase, after in pairwise(self.phases)]
        if self.label == "cannot tell":
            return f"{', '.join(parts).capitalize()}." if parts else ""
        if not parts:
            return "It was so from the first measurement on." if self.phases and self.label != "lazy" else ""
        return f"{', '.join(parts).capitalize()}, {self.phases[-1].word} since."

    def basis(self) -> list[str]:
        """Lines about what the word rests on, what else was measured, and where the calibration comes from."""
        lines = []
        for one in self.evidence:
            span = "" if one.interval is None else f" [{one.interval[0]:.2g}, {one.interval[1]:.2g}]"
            borders = f"lazy below {one.lazy_below:.2g}, rich above {one.rich_above:.2g}"
            lines.append(f"Rests on: {one.measure} {one.value:.2g}{span}; {borders}.")
        if self.measures:
            lines.append(f"Also measured: {', '.join(f'{name} {value:.2g}' for name, value in self.measures.items())}.")
        return lines if self.twin is not None else [*lines, f"Calibration: {self.source}."]

    def groups_text(self) -> str:
        """A sentence or two about groups that gained or lost kernel mass, and groups whose loss stayed behind."""
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

    def layer_lines(self) -> list[str]:
        """Lines about layers: few, the rest is counted."""
        return [] if self.layers is None else self.layers.short_text()

    def samples_text(self) -> str:
        """A line about the samples that stand out."""
        return "" if self.samples is None else self.samples.text()

    def advice_text(self) -> str:
        """The sentences of the advice below the words "What to do:", one a line; "" where there is none.

        Who has features seldom wants fewer, so a rich network only gets a hint.
        """
        if self.advice and self.label == "rich":
            hint = "Nothing, to learn features. verdict.advice says how to stay nearer to the linear model."
            return "\n    ".join(("What to do:", hint))
        return "\n    ".join(("What to do:", *self.advice)) if self.advice else ""

    def _repr_html_(self) -> str:
        return _html_card(self)


def judge(
    measured: History | TrainingSummary | Run, calibrated: Thresholds | None = None, *, stopped: str | None = None
) -> Verdict:
    """The verdict on a training: on a scope's history, on a run folder that a scope wrote, or on a summary of either.

    ``calibrated``: other thresholds than the shipped ones. ``stopped``: why nothing was measured after the last measurement.
    """
    if isinstance(measured, Run):
        measured = History.from_run(measured)
    summary = measured if isinstance(measured, TrainingSummary) else summarise(measured)
    limits = load_thresholds() if calibrated is None else calibrated
    reasons = _reasons_for_no_verdict(summary)
    curve, gap = _gap_curve(summary, limits), _final_gap(summary, limits)
    label, span = "cannot tell", None
    if gap is not None and not reasons:
        words = [limits.word(gap)] if summary.twin else limits.words_near(gap, _uncertainty(summary, limits))
        if len(words) > 1:
            reasons.append(f"The estimated gap is too near the border between {' and '.join(words)}.")
        elif stopped is not None:
            reasons.append(f"It was {words[0]} up to step {summary.last_step}; not seen since.")
        else:
            label, span = words[0], None if summary.twin else limits.gap_range(gap)
    if stopped is not None:
        reasons.append(f"The scope stopped measuring: {stopped}")
    source = str(limits.source["text"])
    phases = _find_phases(curve, limits, sure=_has_twin_curve(summary))
    if phases and label != "cannot tell" and phases[-1].word != label:
        curve, phases = {}, ()  # a twin that was compared once, at the end, contradicts the estimated curve
    when, after = _find_crossing(curve, limits)
    return Verdict(
        label,
        gap,
        span,
        _evidence(summary, limits, source),
        when,
        _label_groups(summary),
        tuple(reasons),
        source,
        summary.notes,
        after,
        phases,
        {name: value for name, value in summary.measures.items() if name != RESTS_ON},
        summary.twin,
        summary.layers,
        summary.samples_found,
    )


def _final_gap(summary: TrainingSummary, limits: Thresholds) -> float | None:
    """The gap at the end: of the twin where there is one, else estimated."""
    if summary.twin is not None:
        return summary.twin.gap[max(summary.twin.gap)]
    return limits.gap(summary.measures[RESTS_ON]) if RESTS_ON in summary.measures else None


def _has_twin_curve(summary: TrainingSummary) -> bool:
    """Whether the twin was compared often enough to say when it parted from the network."""
    return summary.twin is not None and len(summary.twin.gap) > 2


def _gap_curve(summary: TrainingSummary, limits: Thresholds) -> dict[int, float]:
    """The gap by step: of the twin, else estimated wherever the linearisation was measured; without the start."""
    if summary.twin is not None and _has_twin_curve(summary):
        return dict(sorted(summary.twin.gap.items()))
    error = sorted(summary.curves.get(RESTS_ON, {}).items())
    return {step: limits.gap(value) for step, value in error if step > 0 and math.isfinite(value)}


def _uncertainty(summary: TrainingSummary, limits: Thresholds) -> float:
    """The factor within which a border silences the verdict: of the calibration, or of the probe's samples if that is larger."""
    if summary.interval is None:
        return limits.margin
    low, high = (limits.gap(end) for end in summary.interval)
    return max(limits.margin, math.sqrt(high / low))


def _reasons_for_no_verdict(summary: TrainingSummary) -> list[str]:
    """Why there is no verdict, whatever the values are: too few samples, nothing measured, nothing learned."""
    reasons = []
    if summary.measurements < 2:
        reasons.append(f"{summary.measurements} measurement: one at the start and one later are needed.")
    if summary.samples < FEWEST_SAMPLES:
        reasons.append(f"A probe of {summary.samples} samples is too small; give at least {FEWEST_SAMPLES}.")
    if RESTS_ON not in summary.measures and summary.twin is None:
        why = "; ".join(f"{name}: {reason}" for name, reason in summary.left_out.items() if name in TANGENT_VIEWS)
        reasons.append(
            f"The network's linearisation could not be measured{f' ({why})' if why else ''}; scope.twin(...) trains it."
        )
    if summary.losses is not None:
        first, lowest, last = summary.losses
        if not math.isfinite(last):
            reasons.append("The loss is not a number: training broke down.")
        elif lowest > first - LEAST_FALL * abs(first):
            if last > first + LEAST_FALL * abs(first):
                reasons.append(
                    f"The loss rose from {first:.3g} to {last:.3g}: training is unstable, or has just begun."
                )
            else:
                reasons.append(
                    f"The loss hardly fell (from {first:.3g} to {lowest:.3g} at best): nothing was learned yet. "
                    "Try more steps or another learning rate."
                )
    return reasons


def _evidence(summary: TrainingSummary, limits: Thresholds, source: str) -> tuple[Evidence, ...]:
    """What the word rests on: the twin's gap, else the linearisation error."""
    if summary.twin is not None:
        gap = summary.twin.gap[max(summary.twin.gap)]
        return (Evidence("twin_gap", gap, None, limits.lazy_gap, limits.rich_gap, limits.word(gap), "the twin itself"),)
    if RESTS_ON not in summary.measures:
        return ()
    value = summary.measures[RESTS_ON]
    says = " or ".join(limits.words_near(limits.gap(value), _uncertainty(summary, limits)))
    borders = (limits.error_at(limits.lazy_gap), limits.error_at(limits.rich_gap))
    return (Evidence(RESTS_ON, value, summary.interval, *borders, says, source),)


def _find_phases(curve: Mapping[int, float], limits: Thresholds, *, sure: bool) -> tuple[Phase, ...]:
    """Stretches with one word. A new one begins where the gap is beyond a border by more than its uncertainty."""
    factor = 1.0 if sure else limits.margin
    phases: list[Phase] = []
    for step, gap in curve.items():
        words = limits.words_near(gap, factor)
        word = (
            words[0]
            if len(words) == 1
            else (phases[-1].word if phases and phases[-1].word in words else limits.word(gap))
        )
        if phases and phases[-1].word == word:
            phases[-1] = Phase(word, phases[-1].first, step)
            continue
        if phases:
            last = phases[-1]
            phases[-1] = Phase(last.word, last.first, last.last, _crossing(curve, last, step, word, limits))
        phases.append(Phase(word, step, step))
    return tuple(phases)


def _until_text(phase: Phase, after: Phase) -> str:
    """When a phase ended: about a step, or between two measurements that are far apart."""
    if after.first > FAR_APART * max(1, phase.last):
        return f"{phase.word} until some step between {phase.last} and {after.first}"
    return f"{phase.word} until about step {phase.until}"


def _crossing(curve: Mapping[int, float], before: Phase, step: int, word: str, limits: Thresholds) -> int:
    """About when the gap passed the border that ended a phase: interpolated in logarithms, two significant digits."""
    border = limits.rich_gap if "rich" in (before.word, word) and "lazy" not in (before.word, word) else limits.lazy_gap
    at = float(step)
    for a, b in pairwise(one for one in curve if before.first <= one <= step):
        low, high = (max(curve[one], 1e-12) for one in (a, b))
        if a > 0 and (low - border) * (high - border) <= 0 and low != high:
            share = (math.log(border) - math.log(low)) / (math.log(high) - math.log(low))
            at = math.exp(math.log(a) + share * (math.log(b) - math.log(a)))
    return int(float(f"{at:.2g}"))


def _find_crossing(
    curve: Mapping[int, float], limits: Thresholds
) -> tuple[dict[str, int | None], dict[str, int | None]]:
    """The first measured step beyond the lazy border, and the measured step before it."""
    if not curve:
        return {}, {}
    first = next((step for step, gap in curve.items() if gap >= limits.lazy_gap), None)
    before = None if first is None else max((step for step in curve if step < first), default=None)
    return {"network": first}, {"network": before}


def _label_groups(summary: TrainingSummary) -> dict[str, dict[str, Any]]:
    """The numbers of each group with a word: does it hold more of the kernel's trace than at the start, or less?"""
    view: dict[str, dict[str, Any]] = {}
    for name, about in summary.groups.items():
        row: dict[str, Any] = dict(about)
        if about.get("mass_first", 0) > 0:
            gain = about["mass_last"] / about["mass_first"]
            row["mass_gain"] = gain
            row["mass_per_share"] = about["mass_last"] / about.get("kernel_share", about["share"])
            row["verdict"] = "gains" if gain > GAINS else "starved" if gain < STARVES else "keeps"
        if "paths_first" in about and "paths_last" in about:
            row["paths_gain"] = about["paths_last"] - about["paths_first"]
        if summary.losses is not None and "loss_last" in about:
            far = about["loss_last"] > BEHIND * summary.losses[2]
            row["behind"] = bool(far and about["loss_last"] > about["loss_first"] / 2)
        view[name] = row
    return view


# --- as a card -------------------------------------------------------------------------------------------------------------


def _html_card(verdict: Verdict) -> str:
    """A small card without style sheets or scripts; its text takes the page's own colours, light or dark."""
    cell = "padding:2px 10px 2px 0;text-align:left;border:0"
    rows = "".join(
        f'<tr title="{html.escape(MEASURES.get(one.measure, ""))}">'
        f'<td style="{cell}">{html.escape(one.measure.replace("_", " "))}</td>'
        f'<td style="{cell}">{one.value:.2g}</td><td style="{cell}">{_position_svg(one)}</td>'
        f'<td style="{cell};color:{WORD_COLOURS.get(one.says, "inherit")}">{html.escape(one.says)}</td></tr>'
        for one in verdict.evidence
    )
    sentences = (
        *verdict.reasons,
        verdict.gap_text(),
        verdict.when_text(),
        verdict.groups_text(),
        verdict.samples_text(),
    )
    sentences += tuple(verdict.advice_text().split("\n"))
    layers = "".join(f'<div style="white-space:pre-wrap">{html.escape(line)}</div>' for line in verdict.layer_lines())
    told = "".join(f"<div>{html.escape(text)}</div>" for text in sentences if text)
    small = [*(f"Note: {note}." for note in verdict.notes), *verdict.basis()]
    said = "".join(f"<div>{html.escape(text)}</div>" for text in small)
    return (
        '<div style="font:13px/1.5 system-ui,sans-serif;color:inherit;border:1px solid rgba(127,127,127,.4);'
        'border-radius:8px;padding:10px 14px;max-width:46em">'
        f'<div style="font-size:16px;font-weight:600;color:{WORD_COLOURS[verdict.label]}">{verdict.label}</div>'
        f"<div>{MEANINGS[verdict.label]}</div>{told}"
        f'<table style="border-collapse:collapse;margin:6px 0;color:inherit;font:inherit">{rows}</table>{layers}'
        f'<div style="opacity:.75">{said}</div></div>'
    )


def _position_svg(one: Evidence) -> str:
    """A drawing of the value on a logarithmic line with the two thresholds."""
    low, high = math.log(one.lazy_below), math.log(one.rich_above)

    def place(value: float) -> float:
        along = (math.log(max(value, 1e-12)) - low) / (high - low)
        return 50 + 50 * min(max(along, -0.9), 1.9)

    ends = one.interval or (one.value, one.value)
    left, right = place(ends[0]), place(ends[1])
    return (
        '<svg width="150" height="12" role="img" aria-hidden="true">'
        f'<rect x="0" y="4" width="50" height="4" fill="{WORD_COLOURS["lazy"]}" opacity=".5"/>'
        f'<rect x="50" y="4" width="50" height="4" fill="{WORD_COLOURS["mixed"]}" opacity=".5"/>'
        f'<rect x="100" y="4" width="50" height="4" fill="{WORD_COLOURS["rich"]}" opacity=".5"/>'
        f'<rect x="{left:.1f}" y="5" width="{max(right - left, 0.5):.1f}" height="2" fill="currentColor"/>'
        f'<circle cx="{place(one.value):.1f}" cy="6" r="4" fill="currentColor"/></svg>'
    )
