"""Which layers learn: one line a layer, from what was measured and, where the network was trained again by layer, from that.

The words are about two experiments. *Frozen*: the layer stands still from step t on, everything else trains. *Linear*: the
network is linearised in this layer alone. A layer ``could be frozen`` if freezing it costs at most 5 % of the fall of the loss;
else it ``only rescales`` if linearising it does; else it ``learns features``. Without the experiments, a rule that the study
``layers`` chose (``layer_rule.json``) ranks the layers by a cheap measure; it gives a word only where the study's aims were met.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from unlazy.runtime import StoreError
from unlazy.scope.history import History

FILE = Path(__file__).with_name("layer_rule.json")
CHEAP = {  # a layer costs little if the loss rises by no more than this share of its fall over the training
    "frozen": 0.05,
    "linear": 0.05,
}
WORDS = ("could be frozen", "only rescales", "learns features")
MEASURES = {
    "reset_cost": "rise of the loss with this layer put back to its start",
    "layer_move": "how far this layer's move alone takes the outputs, relative to the network",
    "layer_error": "error of the tangent with only this layer moved",
    "layer_motion": "distance of its parameters from their start, relative to their size there",
    "layer_flips": "share of the gates behind it that opened or closed",
    "tangent_share": "its share of the tangent kernel's trace",
    "tangent_change_share": "its share of the tangent kernel's change",
}
"""Cheap measures by layer, as they stand in a history before the ``@``."""
MOST_LINES = 8  # of a verdict


@dataclass(frozen=True)
class LayerRule:
    """How layers are ranked without training them again, and which words the study supports.

    ``measure``: the cheap measure; a larger value ranks higher. ``factor``: the stated cost of freezing, as a share of the
    loss's fall, is factor times the measure (for ``reset_cost``: as a share, too), at least ``floor``. ``error``: a
    ``layer_error`` above it counts as learning features. ``says_freeze`` and ``says_features``: whether the study's aims for
    these words were met. ``ranks``: whether the aim for the top-ranked layer was met.
    """

    measure: str
    factor: float
    floor: float
    error: float
    says_freeze: bool
    says_features: bool
    ranks: bool
    text: str

    def stated_share(self, value: float, fall: float) -> float:
        """The stated cost of freezing, as a share of the fall of the loss, for a value of the rule's measure."""
        value = value / fall if self.measure == "reset_cost" else value
        return max(self.floor, self.factor * value)


@cache
def load_rule() -> LayerRule | None:
    """The rule that the study chose, as shipped; ``None`` if there is none."""
    if not FILE.exists():
        return None
    try:
        return LayerRule(**json.loads(FILE.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{FILE.name} is damaged ({error}); install unlazy again.") from error


@dataclass(frozen=True)
class LayerLine:
    """One layer. ``word``: one of :data:`WORDS`, "" where nothing supports one. ``rank``: 1 for the layer whose freezing should
    cost, or did cost, most. ``frozen_cost``: rise of the loss with the layer frozen; ``linear_cost``: with it linearised.
    ``trained``: whether these were measured by training; else the first one is what the rule expects. ``measures``: cheap ones.
    """

    name: str
    word: str
    rank: int
    frozen_cost: float | None
    linear_cost: float | None
    trained: bool
    measures: Mapping[str, float] = field(default_factory=dict)
    says: str = ""


@dataclass(frozen=True)
class LayerTable:
    """All layers in forward order. ``fall``: of the loss over the training. ``frozen_from``: the step of freezing.

    Where all layers were trained again: ``frozen_remainder`` is the rise of the loss with all layers frozen minus the sum of the
    single rises, ``linear_remainder`` likewise: effects do not add up. ``source``: what the words rest on.
    """

    lines: tuple[LayerLine, ...]
    fall: float | None = None
    frozen_from: int = 0
    frozen_remainder: float | None = None
    linear_remainder: float | None = None
    source: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(json.loads(json.dumps(asdict(self))))

    def text(self, most: int | None = None) -> list[str]:
        """One line of text a layer in forward order, at most so many: then the highest-ranked ones are shown."""
        shown = self.lines
        if most is not None and len(shown) > most:
            shown = tuple(line for line in shown if line.rank <= most)
        width = max((len(line.name) for line in shown), default=0)
        said = [f"{line.name:<{width}}  {line.says}" for line in shown]
        if len(shown) < len(self.lines):
            said.append(f"{len(self.lines) - len(shown)} more layers: scope.layers()")
        return said

    def short_text(self, most: int = MOST_LINES) -> list[str]:
        """What a verdict says: a line a layer if there are words, else one line with the ranking, at most ``most`` layers."""
        if len(self.lines) < 2:
            return []
        if any(line.word or line.trained for line in self.lines):
            return ["Layers, in forward order:", *(f"  {line}" for line in self.text(most))]
        first = [line.name for line in sorted(self.lines, key=lambda line: line.rank)]
        more = f"; {len(first) - most} more layers: scope.layers()" if len(first) > most else ""
        return [f"Layers by expected cost of freezing them, the highest first: {', '.join(first[:most])}{more}."]

    def remainder_text(self) -> str:
        """A sentence about how far single effects are from the whole; "" where that was not measured."""
        parts = []
        for word, rest in (("frozen", self.frozen_remainder), ("linearised", self.linear_remainder)):
            if rest is not None:
                parts.append(f"all layers {word} at once cost {rest:+.2g} beyond the sum of the single costs")
        return f"Effects do not add up: {'; '.join(parts)}." if parts else ""

    def __str__(self) -> str:
        if not self.lines:
            return "No layer was measured yet."
        said = [f"Layers, in forward order{self._rank_text()}:", *(f"  {line}" for line in self.text())]
        said += [line for line in (self.remainder_text(), self.source) if line]
        names = [name for name in MEASURES if any(name in line.measures for line in self.lines)]
        width = max(len(line.name) for line in self.lines)
        said.append(f"  {'':<{width}}  " + "  ".join(f"{name:>{len(name)}}" for name in names))
        for line in self.lines:
            cells = (f"{line.measures[name]:.2g}" if name in line.measures else "" for name in names)
            said.append(
                f"  {line.name:<{width}}  " + "  ".join(f"{c:>{len(n)}}" for c, n in zip(cells, names, strict=True))
            )
        return "\n".join(said)

    def _rank_text(self) -> str:
        return "" if all(line.trained for line in self.lines) else " (rank 1: freezing it should cost most)"

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        """A table without style sheets or scripts."""
        cell = "padding:2px 10px 2px 0;text-align:left;border:0"
        rows = "".join(
            f'<tr><td style="{cell}">{html.escape(line.name)}</td><td style="{cell}">{html.escape(line.says)}</td></tr>'
            for line in self.lines
        )
        said = "".join(f"<div>{html.escape(text)}</div>" for text in (self.remainder_text(), self.source) if text)
        return f'<table style="border-collapse:collapse;margin:6px 0;color:inherit;font:inherit">{rows}</table>{said}'


def layer_table(history: History, rule: LayerRule | None = None) -> LayerTable | None:
    """The table of a history; ``None`` where nothing was measured by layer. ``rule``: another than the shipped one."""
    rule = rule or load_rule()
    measures = {name: _last_by_layer(history, name) for name in MEASURES}
    frozen, linear = (_last_by_layer(history, f"{word}_loss") for word in ("frozen", "linear"))
    layers = list(measures["layer_motion"]) or list(measures["reset_cost"]) or list(frozen or linear)
    if not layers or not (frozen or linear or measures["reset_cost"]):
        return None
    plain, start = history.last("layers_plain_loss"), history.last("layers_start_loss")
    fall = start - plain if plain is not None and start is not None else _fall(history)
    by_layer = {layer: {name: found[layer] for name, found in measures.items() if layer in found} for layer in layers}
    costs: dict[str, tuple[float | None, float | None, bool]] = {}
    for layer, own in by_layer.items():
        if plain is not None and (layer in frozen or layer in linear):
            both = (found[layer] - plain if layer in found else None for found in (frozen, linear))
            costs[layer] = (*both, True)  # type: ignore[assignment]
        else:
            costs[layer] = (_expected_cost(own, fall, rule), None, False)
    ranks = _rank(by_layer, costs, rule)
    since = int(history.last("layers_frozen_from") or 0)
    lines = []
    for layer, own in by_layer.items():
        cost, other, trained = costs[layer]
        word = _word(own, cost, other, trained, fall, rule)
        says = _says(word, ranks[layer], len(layers), cost, other, trained, since if trained else 0)
        lines.append(LayerLine(layer, word, ranks[layer], cost, other, trained, own, says))
    everything = all(trained for _, _, trained in costs.values())
    rests = (
        _remainder(found, plain, history.last(f"layers_{word}_loss"), len(found) == len(layers))
        for word, found in (("frozen", frozen), ("linear", linear))
    )
    source = (
        "Measured by training the network again with each of these layers frozen or linearised."
        if everything
        else ("" if rule is None else rule.text)
    )
    return LayerTable(tuple(lines), fall, since, next(rests), next(rests), source)


def _last_by_layer(history: History, name: str) -> dict[str, float]:
    """The last value of a number of every layer."""
    found = {key.partition("@")[2]: key for key in history.scalars if key.partition("@")[0] == name and "@" in key}
    values = {layer: history.last(key) for layer, key in found.items()}
    return {layer: value for layer, value in values.items() if value is not None and math.isfinite(value)}


def _fall(history: History) -> float | None:
    """How far the loss on the probe set fell; ``None`` if it did not."""
    first, last = history.first("loss"), history.last("loss")
    return first - last if first is not None and last is not None and first > last else None


def _expected_cost(own: Mapping[str, float], fall: float | None, rule: LayerRule | None) -> float | None:
    """What the rule expects freezing to cost."""
    if rule is None or fall is None or rule.measure not in own:
        return None
    return fall * rule.stated_share(own[rule.measure], fall)


def _rank(
    by_layer: Mapping[str, Mapping[str, float]], costs: Mapping[str, Any], rule: LayerRule | None
) -> dict[str, int]:
    """1 for the layer whose freezing cost most, if all were trained again, else by the rule's measure."""
    measure = "reset_cost" if rule is None else rule.measure
    known = all(trained and cost is not None for cost, _, trained in costs.values())

    def size(layer: str) -> float:
        return float(costs[layer][0] if known else by_layer[layer].get(measure, -math.inf))

    order = sorted(by_layer, key=size, reverse=True)
    return {layer: number for number, layer in enumerate(order, 1)}


def _word(
    own: Mapping[str, float],
    frozen: float | None,
    linear: float | None,
    trained: bool,
    fall: float | None,
    rule: LayerRule | None,
) -> str:
    if fall is None or fall <= 0 or (rule is None and not trained):
        return ""
    if trained:
        if frozen is not None and frozen <= CHEAP["frozen"] * fall:
            return WORDS[0]
        return "" if linear is None else WORDS[1] if linear <= CHEAP["linear"] * fall else WORDS[2]
    assert rule is not None
    if rule.says_freeze and frozen is not None and frozen <= CHEAP["frozen"] * fall:
        return WORDS[0]
    if not rule.says_features or "layer_error" not in own:
        return ""
    return WORDS[2] if own["layer_error"] > rule.error else WORDS[1]


def _says(
    word: str, rank: int, count: int, frozen: float | None, linear: float | None, trained: bool, since: int
) -> str:
    """A short sentence about a layer."""
    if not trained:
        if word == WORDS[0]:
            word = f"could be frozen from step 0 (expected loss {frozen:+.2g} at most)"
        return f"{word}; rank {rank} of {count}" if word else f"rank {rank} of {count}"
    parts = []
    if frozen is not None:
        parts.append(f"frozen from step {since}: loss {frozen:+.2g}")
    if linear is not None:
        parts.append(f"linear: loss {linear:+.2g}")
    head = f"could be frozen from step {since}" if word == WORDS[0] else word
    return f"{head} ({'; '.join(parts)})" if head else "; ".join(parts)


def _remainder(
    single: Mapping[str, float], plain: float | None, together: float | None, everything: bool
) -> float | None:
    """The rise of the loss with all layers at once, minus the sum of single rises."""
    if plain is None or together is None or not everything or not math.isfinite(together):
        return None
    return (together - plain) - sum(loss - plain for loss in single.values())
