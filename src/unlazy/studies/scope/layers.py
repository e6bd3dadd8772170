"""Which layers could be frozen: cheap measures by layer against networks trained again with one layer frozen or linearised.

Networks, sides, candidate rules, the way one of them is chosen, and the aims were written down before any case was measured. The
rule and its thresholds are chosen on the fitted networks alone; the scored side has other networks and other data sets.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from unlazy import plots
from unlazy.models.build import build
from unlazy.models.spec import Init, relu_spec
from unlazy.plots import COLOURS
from unlazy.runtime import require
from unlazy.scope.layer_experiments import LayerTrainings, train_by_layer
from unlazy.scope.layer_table import CHEAP, FILE, MEASURES, LayerRule
from unlazy.scope.measurements import MOST_ROWS, Measurements
from unlazy.scope.probe_set import add_target_columns, parse_probe_set
from unlazy.store import write_file
from unlazy.studies.scope.calibration_cells import INPUTS, NETS, BatchOrder, Cell, make_optimiser, make_task
from unlazy.studies.study import Figure, Results, Study, Work, make_cases
from unlazy.studies.table import Rows, Table

# --- networks ----------------------------------------------------------------------------------------------------------------


def _dense(outputs: int, width: int, depth: int) -> nn.Module:
    sizes, layers = [INPUTS, *[width] * depth], list[nn.Module]()
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def _ntk(outputs: int) -> nn.Module:
    return build(relu_spec(INPUTS, outputs, width=256, depth=2, init=Init("he"), parametrisation="ntk"), seed=0)


MORE_NETS: dict[str, Callable[[int], nn.Module]] = {
    "deep-relu": lambda outputs: _dense(outputs, 48, 6),
    "ntk-dense": _ntk,
}
# name: network, data set, optimiser, learning rate (SGD: in units of the largest stable one), start
Recipe = tuple[str, str, str, float, str]
FITTED: dict[str, Recipe] = {
    "relu": ("relu", "digits", "momentum", 0.3, "scratch"),
    "relu-parity": ("relu", "parity", "adam", 3e-3, "scratch"),
    "gelu-norm": ("gelu-layer-norm", "teacher", "adam", 1e-3, "scratch"),
    "gelu-norm-sgd": ("gelu-layer-norm", "digits", "sgd", 0.3, "scratch"),
    "conv": ("conv", "digits", "adam", 3e-3, "scratch"),
    "conv-regression": ("conv", "regression", "momentum", 0.3, "scratch"),
    "attention": ("attention", "digits", "adam", 3e-3, "scratch"),
    "residual": ("residual", "teacher", "momentum", 0.3, "scratch"),
    "deep-linear": ("deep-linear", "regression", "adam", 1e-3, "scratch"),
    "ntk": ("ntk-dense", "digits", "sgd", 0.6, "scratch"),
}
SCORED: dict[str, Recipe] = {
    "tanh": ("tanh", "pixels", "momentum", 0.6, "scratch"),
    "silu-waves": ("silu", "waves", "adam", 3e-3, "scratch"),
    "batch-norm": ("batch-norm", "pixels", "adam", 3e-3, "scratch"),
    "depthwise": ("depthwise", "evenness", "adam", 3e-3, "scratch"),
    "recurrent": ("recurrent", "text", "adam", 1e-2, "scratch"),
    "dlgn": ("dlgn", "evenness", "adam", 3e-3, "scratch"),
    "deep-relu": ("deep-relu", "pixels", "adam", 3e-3, "scratch"),
    "fine-tuned": ("silu", "pixels", "adam", 1e-3, "trained"),
    "attention-text": ("attention", "text", "adam", 3e-3, "scratch"),
    "wide-ntk": ("ntk-dense", "waves", "sgd", 0.6, "scratch"),
}
SIDES = {"fit": FITTED, "score": SCORED}
BATCH, LEAST_FALL = 64, 0.05  # a loss that falls by less, as a share of its start, has learned nothing

# --- rules and aims, before any data -------------------------------------------------------------------------------------------

RULES = ("layer_motion", "tangent_share", "reset_cost")
"""The candidate measures, the simplest first; a larger value means that freezing should cost more."""
AS_GOOD = (
    0.05  # the simplest rule whose share of right top layers on the fitted side is this near to the best is chosen
)
FACTORS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
FLOOR = 0.02  # of the fall of the loss: no smaller cost of freezing is stated
HELD = 0.9  # the smallest factor is chosen with which so many layers called freezable on the fitted side cost what is stated
ERRORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
AIMS = {"freeze": 0.8, "top": 0.7, "called": 5, "features": 0.8}
"""On the scored side. ``freeze``: share of the networks with a layer called freezable in which, in all seeds, freezing any of
them cost at most what was stated; at least ``called`` networks must have one. ``top``: share of the networks in which, in most
seeds, the top-ranked layer was the one whose freezing cost most. ``features``: share of layers whose ``layer_error`` says rightly
whether linearising them costs more than 5 % of the fall; and it must be more than the best constant has."""


def cases(settings: Any, seeds: Sequence[int]) -> list[Any]:
    """Every network of both sides with every seed."""
    chosen = [(side, name) for side, nets in SIDES.items() for name in list(nets)[: settings.networks]]
    places = [{"side": side, "network": name, "seed": seed} for side, name in chosen for seed in seeds]
    return make_cases(places, settings, without=("networks",))


def measure(case: Any, work: Work) -> Rows:
    """Costs of freezing and of linearising each layer on the probe set, and the cheap measures at the end of plain training."""
    net, data, optimiser, rate, start = SIDES[case.side][case.network]
    cell = Cell(0, net, data, optimiser, rate, 0.0, 0.0, BATCH, case.steps, start, "constant", case.side, case.seed)
    task = make_task(data, case.seed)
    model = _build(cell, task)
    first, trainer = copy.deepcopy(model), make_optimiser(cell, model, task)
    probe = parse_probe_set(task.probe, None, task.loss)
    with torch.no_grad():
        probe = add_target_columns(probe, model(probe.x))
    rows_of = dict.fromkeys(MOST_ROWS)  # all samples, whatever the machine does beside
    watched = Measurements(model, probe, ("tangents", "paths"), case.seed, rows=rows_of)
    model.eval()
    watched.measure_start()
    model.train()
    order, (x, y) = BatchOrder(cell), task.train
    batches = [(x[taken], y[taken]) for taken in map(order.batch, range(case.steps))]
    settings = {name: value for name, value in trainer.param_groups[0].items() if name in ("lr", "momentum")}
    kind = type(trainer)
    for some, targets in batches:
        trainer.zero_grad()
        task.loss(model(some), targets).backward()
        trainer.step()
    model.eval()
    measured = watched.measure(case.steps)
    how = LayerTrainings(lambda ps: kind(ps, **settings), task.loss, batches, task.probe)
    found = train_by_layer(first, watched.start.parameters, watched.blocks.blocks, how, lambda text: None)
    rows = Rows()
    rows.add_all({name: value for name, value in found.items() if "@" not in name})
    for number, block in enumerate(watched.blocks.blocks):
        own = {name: float(measured[f"{name}@{block.name}"]) for name in MEASURES if f"{name}@{block.name}" in measured}
        own |= {name: found[f"{name}@{block.name}"] for name in ("frozen_loss", "linear_loss")}
        rows.add_all({name: value for name, value in own.items() if np.isfinite(value)}, layer=block.name, place=number)
    return rows


def _build(cell: Cell, task: Any) -> nn.Module:
    """The network of a cell at its start; a fine-tuned one was trained on mirrored inputs before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + cell.seed)
        model = {**NETS, **MORE_NETS}[cell.net](task.outputs)
    if cell.start == "trained":
        optimiser, (x, y) = torch.optim.Adam(model.parameters(), 1e-3), task.train
        for _ in range(150):
            optimiser.zero_grad()
            task.loss(model(x.flip(1)), y).backward()
            optimiser.step()
    return model


# --- what was measured ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A network and a seed. By layer: the cheap ``measures``, and costs as shares of the loss's fall; ``linear`` may lack."""

    side: str
    network: str
    seed: str
    fall: float
    measures: Mapping[str, Mapping[str, float]]
    frozen: Mapping[str, float]
    linear: Mapping[str, float]

    def values(self, rule: str) -> dict[str, float]:
        """A rule's measure by layer, ``reset_cost`` as a share of the fall."""
        unit = self.fall if rule == "reset_cost" else 1.0
        return {layer: own.get(rule, 0.0) / unit for layer, own in self.measures.items()}

    def is_top_right(self, rule: str) -> bool:
        """Whether the layer with the largest value is the one whose freezing cost most."""
        values = self.values(rule)
        return max(values, key=lambda layer: values[layer]) == max(self.frozen, key=lambda layer: self.frozen[layer])

    def calls(self, rule: str, factor: float) -> dict[str, bool]:
        """The layers called freezable, and whether freezing them cost at most what was stated."""
        stated = {layer: max(FLOOR, factor * value) for layer, value in self.values(rule).items()}
        return {layer: self.frozen[layer] <= cost for layer, cost in stated.items() if cost <= CHEAP["frozen"]}


def read_trained(table: Table) -> list[Trained]:
    """Every case of the table whose loss fell."""
    numbers: dict[tuple[str, str, str], dict[str, dict[str, float]]] = {}
    for row in table.rows():
        place = numbers.setdefault((row["side"], row["network"], str(row["seed"])), {})
        place.setdefault(str(row.get("layer", "")), {})[row["quantity"]] = float(row["value"])
    found = []
    for (side, network, seed), by_layer in numbers.items():
        whole = by_layer.pop("")
        plain, start = whole["layers_plain_loss"], whole["layers_start_loss"]
        fall = start - plain
        if not fall > LEAST_FALL * abs(start):
            continue
        measures = {layer: {n: v for n, v in own.items() if n in MEASURES} for layer, own in by_layer.items()}
        costs = [
            {layer: (own[name] - plain) / fall for layer, own in by_layer.items() if name in own}
            for name in ("frozen_loss", "linear_loss")
        ]
        found.append(Trained(side, network, seed, fall, measures, *costs))
    return found


# --- choosing and scoring ------------------------------------------------------------------------------------------------------


def choose(trained: Sequence[Trained]) -> dict[str, Any]:
    """The rule, its factor and the border of ``layer_error``, from the fitted side."""
    some = [one for one in trained if one.side == "fit"]
    require(len(some) > 0, "no training of the fitted side learned anything.")
    top = {rule: float(np.mean([one.is_top_right(rule) for one in some])) for rule in RULES}
    rule = next(rule for rule in RULES if top[rule] >= max(top.values()) - AS_GOOD)
    held = {}
    for factor in FACTORS:
        called = [fits for one in some for fits in one.calls(rule, factor).values()]
        held[factor] = float(np.mean(called)) if called else 1.0
    factor = next((factor for factor in FACTORS if held[factor] >= HELD), FACTORS[-1])
    shares = {border: _features_share(some, border) for border in ERRORS}
    error = max(ERRORS, key=lambda border: shares[border])
    return {
        "rule": rule,
        "top": top,
        "factor": factor,
        "held": {str(f): share for f, share in held.items()},
        "error": error,
    }


def _features(trained: Sequence[Trained]) -> list[tuple[float, bool]]:
    """Of every layer: its ``layer_error``, and whether linearising it costs more than is cheap."""
    return [
        (own["layer_error"], one.linear[layer] > CHEAP["linear"])
        for one in trained
        for layer, own in one.measures.items()
        if layer in one.linear and "layer_error" in own
    ]


def _features_share(trained: Sequence[Trained], border: float) -> float:
    pairs = _features(trained)
    return float(np.mean([(error > border) == truth for error, truth in pairs])) if pairs else 0.0


def score(trained: Sequence[Trained], side: str, rule: str, factor: float, error: float) -> dict[str, Any]:
    """Scores of a rule on one side, network by network."""
    some = [one for one in trained if one.side == side]
    networks = sorted({one.network for one in some})
    calls = {
        net: [fits for one in some if one.network == net for fits in one.calls(rule, factor).values()]
        for net in networks
    }
    called = [net for net in networks if calls[net]]
    held = [net for net in called if all(calls[net])]
    top = [net for net in networks if np.mean([one.is_top_right(rule) for one in some if one.network == net]) > 0.5]
    truths = [truth for _, truth in _features(some)]
    return {
        "networks": len(networks),
        "trainings": len(some),
        "called": len(called),
        "held": len(held),
        "failed": sorted(set(called) - set(held)),
        "layers_called": sum(len(one) for one in calls.values()),
        "layers_held": sum(sum(one) for one in calls.values()),
        "layers": sum(len(one.frozen) for one in some),
        "cheap_layers": sum(cost <= CHEAP["frozen"] for one in some for cost in one.frozen.values()),
        "top": len(top),
        "top_trainings": sum(one.is_top_right(rule) for one in some),
        "top_failed": sorted(set(networks) - set(top)),
        "features": _features_share(some, error),
        "features_constant": max(float(np.mean(truths)), 1 - float(np.mean(truths))) if truths else 1.0,
        "features_layers": len(truths),
    }


def all_scores(trained: Sequence[Trained]) -> dict[str, Any]:
    """The content of ``scores.json``: what was chosen, scores of every rule on both sides, and which aims were met."""
    chosen = choose(trained)
    rules = {
        rule: {side: score(trained, side, rule, chosen["factor"], chosen["error"]) for side in SIDES} for rule in RULES
    }
    own = rules[chosen["rule"]]["score"]
    met = {
        "freeze": own["called"] >= AIMS["called"] and own["held"] >= AIMS["freeze"] * own["called"],
        "top": own["top"] >= AIMS["top"] * own["networks"],
        "features": own["features"] >= AIMS["features"] and own["features"] > own["features_constant"],
    }
    return {"chosen": chosen, "aims": AIMS, "met": met, "rules": rules}


def rule_of(scores: Mapping[str, Any]) -> LayerRule:
    """What the verdict reads."""
    chosen, met = scores["chosen"], scores["met"]
    own = scores["rules"][chosen["rule"]]["score"]
    text = (
        f"Ranked by {chosen['rule']}: in {own['top']} of {own['networks']} networks that the rule was not chosen on, the first "
        "layer was the one whose freezing cost most"
    )
    if met["freeze"]:
        text += f"; layers called freezable cost at most what was stated in {own['held']} of {own['called']}"
    return LayerRule(
        chosen["rule"], chosen["factor"], FLOOR, chosen["error"], met["freeze"], met["features"], met["top"], f"{text}."
    )


def write_rule(results_folder: str | Path) -> None:
    """Choose the rule from the paper scale of a results folder; write ``rule.json`` and ``paper/scores.json`` there.

    The results folder of a checkout also gives the copy that the verdict reads.

    ``python -c "from unlazy.studies.scope.layers import write_rule; write_rule('results')"``
    """
    folder = Path(results_folder) / STUDY.name
    found = all_scores(read_trained(Table.read(folder / "paper" / "table.csv")))
    text = rule_text(found)
    write_file(folder / "paper" / "scores.json", (json.dumps(found, indent=1) + "\n").encode())
    write_file(folder / "rule.json", text)
    if folder.resolve() == FILE.parents[3] / "results" / STUDY.name:
        write_file(FILE, text)


def rule_text(scores: Mapping[str, Any]) -> bytes:
    """The content of the rule's file."""
    return (json.dumps(asdict(rule_of(scores)), indent=2) + "\n").encode()


# --- figure --------------------------------------------------------------------------------------------------------------------


def draw_costs(results: Results) -> plots.Figure:
    """Cost of freezing a layer against what the chosen rule states, both as shares of the fall of the loss; one mark a layer."""
    trained = read_trained(results.table)
    chosen = choose(trained)
    figure, axes = plots.grid(1, 2, (4.2, 3.8), sharey=True)
    for panel, (side, title) in zip(axes[0], (("fit", "fitted networks"), ("score", "unseen networks")), strict=True):
        pairs = [
            (max(FLOOR, chosen["factor"] * value), one.frozen[layer])
            for one in trained
            if one.side == side
            for layer, value in one.values(chosen["rule"]).items()
        ]
        if pairs:
            stated, cost = np.array(pairs).T
            panel.plot(stated, np.clip(cost, 1e-3, None), ".", color=COLOURS["blue"], markersize=4)
        panel.plot([1e-3, 10], [1e-3, 10], color=COLOURS["grey"], linewidth=0.8)
        panel.axvline(CHEAP["frozen"], color=COLOURS["black"], linewidth=0.6)
        panel.set(xscale="log", yscale="log", title=title, xlabel="stated cost of freezing", ylim=(8e-4, 10))
    axes[0, 0].set_ylabel("cost of freezing (at least 0.001)")
    return figure


STUDY = Study(
    name="layers",
    paper="scope",
    scales={"smoke": {"steps": 12, "networks": 1}, "paper": {"steps": 150, "networks": 10}},
    seeds={"smoke": 1, "paper": 3},
    columns=("side", "network"),
    cases=cases,
    measure=measure,
    figures=(Figure("costs", "What freezing a layer costs, against what the rule states", draw_costs),),
)
