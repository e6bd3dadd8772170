"""What makes a network lazier or richer: trainings beside the same training with one dial turned, each with its exact twin.

Dials, predicted directions, recipes and the rule for advice were written down before any of these networks was trained. Recipes
were chosen from the scored side of the calibration, which shares neither networks nor data sets with this study.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.models.build import build
from unlazy.models.spec import Init, conv_spec, relu_spec
from unlazy.plots import COLOURS
from unlazy.runtime import require, stream
from unlazy.scope.advice import FILE, FORMAT, LEAST_SHARE
from unlazy.store import write_file
from unlazy.studies.scope.calibration import LEAST_FALL, word_of
from unlazy.studies.scope.calibration_cells import (
    INPUTS,
    SETS,
    SIDE,
    Attention,
    BatchOrder,
    Cell,
    Convolutions,
    OutputScale,
    Residual,
    Task,
    build_network,
    held_losses,
    make_optimiser,
    make_task,
)
from unlazy.studies.study import Case, Figure, Results, Study, Work, make_cases
from unlazy.studies.table import Rows, Table
from unlazy.training.twin import linearised_twin

Vector = NDArray[np.float64]

# --- declared before anything was measured -----------------------------------------------------------------------------------

NETWORKS = ("relu", "gelu-layer-norm", "conv", "attention", "residual")
DATA = ("digits", "teacher", "parity", "regression")
PAIRS = tuple((net, data) for net in NETWORKS for data in DATA)
RECIPES = (
    ("sgd", 0.1, 0.0),
    ("adam", 1e-3, 0.0),
    ("sgd", 0.02, 0.0),
    ("adam", 5e-5, 0.0),
    ("sgd", 0.1, 16.0),
    ("adam", 1e-3, 16.0),
)
"""Optimiser, rate and output scale (as in the calibration's cells) of the untouched training; about as many lazy as rich ones."""
DRAW_SEED = 20
BATCH = 64
TURNED = 4.0  # factor of output scale, learning rate, width, steps and rank
START = 2.0  # factor of the weights at the start
RANK = 4
LEAST_GAP = 1e-4  # a smaller gap is rounding: a network that is linear in its parameters has one
SAME = 1.5  # a gap within this factor has not changed
LOSS_MOVES = 0.01  # a held-out loss that changes by less, relative, has not changed
AS_GOOD = 1.05  # a twin whose held-out loss is below this times the network's is as good


@dataclass(frozen=True)
class Turn:
    """One way to turn a dial: from the training ``base`` to the training ``turned``. ``aim``: where theory says the gap goes."""

    name: str
    base: str
    turned: str
    aim: str
    networks: tuple[str, ...] = NETWORKS


LORA_NETWORKS = ("relu", "gelu-layer-norm", "attention", "residual")
SPEC_NETWORKS = ("relu", "conv")
TURNS = (
    Turn("scale-down", "base", "scale-down", "richer"),
    Turn("scale-up", "base", "scale-up", "lazier"),
    Turn("rate-up", "base", "rate-up", "richer"),
    Turn("rate-down", "base", "rate-down", "lazier"),
    Turn("width-down", "base", "width-down", "richer"),
    Turn("width-up", "base", "width-up", "lazier"),
    Turn("start-down", "base", "start-down", "richer"),
    Turn("start-up", "base", "start-up", "lazier"),
    Turn("mup", "standard", "mup", "richer", SPEC_NETWORKS),
    Turn("ntk-width-up", "ntk", "ntk-wide", "lazier", SPEC_NETWORKS),
    Turn("mup-width-up", "mup", "mup-wide", "same", SPEC_NETWORKS),
    Turn("unfreeze", "frozen", "tuned", "richer"),
    Turn("freeze", "tuned", "frozen", "lazier"),
    Turn("rank-down", "rank", "rank-down", "richer", LORA_NETWORKS),
    Turn("rank-up", "rank", "rank-up", "lazier", LORA_NETWORKS),
    Turn("train-longer", "quarter", "base", "richer"),
    Turn("stop-early", "base", "quarter", "lazier"),
)


def recipe_of(net: str, data: str, seed: int) -> tuple[str, float, float]:
    """The recipe of a network: drawn for each seed so that recipes come up equally often."""
    random = np.random.default_rng([DRAW_SEED, seed])
    return RECIPES[int(random.permutation(np.arange(len(PAIRS)) % len(RECIPES))[PAIRS.index((net, data))])]


def cases(settings: Any, seeds: Sequence[int]) -> list[Case]:
    """One case for every network, data set and seed."""
    chosen = [(net, data) for net in settings.networks for data in settings.data]
    places = [{"net": net, "data": data, "seed": seed} for seed in seeds for net, data in chosen]
    return make_cases(places, settings, without=("networks",))


# --- networks ----------------------------------------------------------------------------------------------------------------


class OutputMultiple(nn.Module):
    """The network's outputs times a factor."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.model(x)


class LowRank(nn.Module):
    """A linear layer that stays fixed, plus a product of two trained matrices of low rank that starts at 0 (LoRA)."""

    def __init__(self, layer: nn.Linear, rank: int, random: torch.Generator) -> None:
        super().__init__()
        self.layer, self.scale = layer.requires_grad_(False), 2 * RANK / rank
        self.down = nn.Parameter(torch.randn(rank, layer.in_features, generator=random) / math.sqrt(layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.scale * F.linear(F.linear(x, self.down), self.up)


def build_at_width(net: str, outputs: int, factor: float, seed: int) -> nn.Module:
    """The calibration's network of this name with its width times a factor; with factor 1 it is the calibration's own."""

    def dense(make_gates: Callable[[int], nn.Module]) -> nn.Module:
        width = round(96 * factor)
        layers = [nn.Linear(INPUTS, width), make_gates(width), nn.Linear(width, width), make_gates(width)]
        return nn.Sequential(*layers, nn.Linear(width, outputs))

    makers: dict[str, Callable[[], nn.Module]] = {
        "relu": lambda: dense(lambda width: nn.ReLU()),
        "gelu-layer-norm": lambda: dense(lambda width: nn.Sequential(nn.LayerNorm(width), nn.GELU())),
        "conv": lambda: Convolutions(outputs, "plain", round(8 * factor)),
        "attention": lambda: Attention(outputs, round(32 * factor)),
        "residual": lambda: Residual(outputs, round(64 * factor)),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + seed)
        return makers[net]()


class FromVector(nn.Module):
    """A network on 8 x 8 pictures that takes them as vectors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.unflatten(1, (1, SIDE, SIDE)))


def build_parametrised(net: str, outputs: int, parametrisation: str, factor: float, seed: int) -> nn.Module:
    """A ReLU network, dense or convolutional, in one of the package's parametrisations."""
    if net == "relu":
        width = round(96 * factor)
        choices: dict[str, Any] = {"init": Init("he"), "parametrisation": parametrisation}
        return build(relu_spec(INPUTS, outputs, width=width, depth=2, **choices), seed=seed)
    spec = conv_spec(round(8 * factor), 2, dense=None).relu()
    spec = replace(spec, channels=1, classes=outputs, batch_norm=False, parametrisation=parametrisation)
    return FromVector(build(spec, seed=seed))


def freeze_body(model: nn.Module) -> nn.Module:
    """Only the readout is trained from here on."""
    readout = getattr(model, "readout", None) or list(model.children())[-1]
    model.requires_grad_(False)
    readout.requires_grad_(True)
    return model


def add_low_rank(model: nn.Module, rank: int, seed: int) -> nn.Module:
    """Every linear layer gets a low-rank addition; nothing else is trained."""
    random = stream(seed, "low rank")
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, LowRank(child, rank, random))
    return model


def _scale_start(model: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(factor)
    return model


def trainings(cell: Cell, task: Task) -> dict[str, tuple[nn.Module, Cell]]:
    """The networks of a cell at their start, with their recipes, by the name of the training."""

    def scaled(factor: float) -> tuple[nn.Module, Cell]:
        if cell.alpha:
            turned = replace(cell, alpha=cell.alpha * factor)
            return build_network(turned, task), turned
        return OutputMultiple(build_network(cell, task), factor), replace(cell, alpha=factor)

    def wrapped(model: nn.Module) -> tuple[nn.Module, Cell]:
        return (OutputScale(model, cell.alpha) if cell.alpha else model), cell

    def wide(factor: float) -> tuple[nn.Module, Cell]:
        return wrapped(build_at_width(cell.net, task.outputs, factor, cell.seed))

    def started(factor: float) -> tuple[nn.Module, Cell]:
        return wrapped(_scale_start(build_at_width(cell.net, task.outputs, 1, cell.seed), factor))

    made = {
        "base": (build_network(cell, task), cell),
        "scale-down": scaled(1 / TURNED),
        "scale-up": scaled(TURNED),
        "rate-down": (build_network(cell, task), replace(cell, rate=cell.rate / TURNED)),
        "rate-up": (build_network(cell, task), replace(cell, rate=cell.rate * TURNED)),
        "width-down": wide(1 / TURNED),
        "width-up": wide(TURNED),
        "start-down": started(1 / START),
        "start-up": started(START),
    }
    pretrained = build_network(replace(cell, start="trained", alpha=0.0), task)
    made["tuned"] = wrapped(copy.deepcopy(pretrained))
    made["frozen"] = wrapped(freeze_body(copy.deepcopy(pretrained)))
    if cell.net in LORA_NETWORKS:
        ranks = {"rank-down": round(RANK / TURNED), "rank": RANK, "rank-up": round(RANK * TURNED)}
        for name, rank in ranks.items():
            made[name] = wrapped(add_low_rank(copy.deepcopy(pretrained), rank, cell.seed))
    if cell.net in SPEC_NETWORKS:
        descent = replace(cell, optimiser="sgd", rate=0.1, alpha=0.0)
        places = {"standard": ("standard", 1.0), "ntk": ("ntk", 1.0), "mup": ("mup", 1.0)}
        for name, place in (places | {"ntk-wide": ("ntk", TURNED), "mup-wide": ("mup", TURNED)}).items():
            made[name] = (build_parametrised(cell.net, task.outputs, *place, cell.seed), descent)
    return made


# --- measuring ---------------------------------------------------------------------------------------------------------------


def measure(case: Case, work: Work) -> Rows:
    """Train every network of a cell beside its twin; its numbers by ``training``, and what each turn changed by ``turn``."""
    rows, task = Rows(), make_task(case.data, case.seed)
    optimiser, rate, alpha = recipe_of(case.net, case.data, case.seed)
    cell = Cell(
        0,
        case.net,
        case.data,
        optimiser,
        rate,
        alpha,
        0.0,
        BATCH,
        case.steps,
        "scratch",
        "constant",
        "advice",
        case.seed,
    )
    made = trainings(cell, task)
    quarter = max(1, round(case.steps / TURNED))
    found: dict[str, dict[str, float]] = {}
    for number, (name, (model, recipe)) in enumerate(made.items()):
        ends = train(model, recipe, task, (quarter, case.steps) if name == "base" else (case.steps,))
        found[name] = ends[case.steps]
        if name == "base":
            found["quarter"] = ends[quarter]
        work.progress(number + 1, len(made))
    for name, numbers in found.items():
        rows.add_all(numbers, training=name)
    for turn in TURNS:
        if case.net in turn.networks:
            rows.add_all(compare(found[turn.base], found[turn.turned]), turn=turn.name)
    return rows


def train(model: nn.Module, cell: Cell, task: Task, when: Sequence[int]) -> dict[int, dict[str, float]]:
    """Gap, held-out losses and accuracies of network and twin after each of these steps; ``learned``: 1, or 0 where the
    training loss fell by less than 5 %. Where a training broke down: ``learned`` 0 and nothing else.
    """
    optimiser = make_optimiser(cell, model, task)
    twin = linearised_twin(model, optimiser, task.loss, held=task.held)
    order, (x, y) = BatchOrder(cell), task.train
    start = held_losses(model, twin, task)["train_loss"]
    found: dict[int, dict[str, float]] = {step: {"learned": 0.0} for step in when}
    for step in range(1, cell.steps + 1):
        taken = order.batch(step - 1)
        optimiser.zero_grad()
        task.loss(model(x[taken]), y[taken]).backward()
        optimiser.step()
        twin.step(x[taken], y[taken])
        if step in when:
            numbers = held_losses(model, twin, task)
            if not all(map(math.isfinite, numbers.values())):
                break
            learned = numbers["train_loss"] < start - LEAST_FALL * abs(start)
            found[step] = {"learned": float(learned)} | numbers | accuracies(model, twin, task, cell.data)
    return found


def accuracies(model: nn.Module, twin: Callable[[Tensor], Tensor], task: Task, data: str) -> dict[str, float]:
    """Held-out accuracies of network and twin; none for a regression."""
    x, y = task.held
    kind, outputs = SETS[data]
    if kind == "squared" and outputs > 1:
        return {}
    with torch.no_grad():
        both = {"held_accuracy": model(x), "twin_held_accuracy": twin(x)}
    if outputs == 1:
        return {name: float(((out > 0) == (y > 0)).float().mean()) for name, out in both.items()}
    return {name: float((out.argmax(1) == y).float().mean()) for name, out in both.items()}


def compare(base: Mapping[str, float], turned: Mapping[str, float]) -> dict[str, float]:
    """What a turn changed: logarithms of the factors of gap and held-out loss.

    A turned training that broke down or learned nothing has not moved the gap, and has made the loss worse.
    """
    if "gap" not in base or not turned["learned"]:
        return {"gap_change": 0.0, "loss_change": 1.0}
    gap, held = (
        _log_factor(base[name], turned[name], least) for name, least in (("gap", LEAST_GAP), ("held_loss", 1e-9))
    )
    return {"gap_change": gap, "loss_change": held}


def _log_factor(before: float, after: float, least: float) -> float:
    return math.log(max(after, least) / max(before, least))


# --- claims ------------------------------------------------------------------------------------------------------------------

SHARE = LEAST_SHARE - 1e-6  # at least 8 of 10


def share_richer(*changes: Vector) -> Vector:
    """Share of networks whose gap grew, for each seed."""
    return np.asarray((np.array(changes) > 0).mean(0))


def share_lazier(*changes: Vector) -> Vector:
    """Share of networks whose gap shrank."""
    return np.asarray((np.array(changes) < 0).mean(0))


def share_same(*changes: Vector) -> Vector:
    """Share of networks whose gap stayed within a factor; a change of exactly 0 stands for a training that broke down."""
    sizes = np.abs(np.array(changes))
    return np.asarray(((sizes > 0) & (sizes < np.log(SAME))).mean(0))


def share_helped(*changes: Vector) -> Vector:
    """Share of networks whose held-out loss fell."""
    return np.asarray((np.array(changes) < -LOSS_MOVES).mean(0))


def share_hurt(*changes: Vector) -> Vector:
    """Share of networks whose held-out loss rose."""
    return np.asarray((np.array(changes) > LOSS_MOVES).mean(0))


def share_twin_as_good(*numbers: Vector) -> Vector:
    """Share of lazy networks whose twin's held-out loss is as good as theirs; gaps, losses and losses of twins follow in turn."""
    gaps, losses, twins = np.array(numbers).reshape(3, -1, len(numbers[0]))
    lazy = gaps < 0.1
    return np.asarray((lazy & (twins < AS_GOOD * losses)).sum(0) / np.maximum(lazy.sum(0), 1))


SHARES = {"richer": share_richer, "lazier": share_lazier, "same": share_same}


def _changes(turn: Turn, quantity: str) -> tuple[Quantity, ...]:
    return tuple(Quantity(quantity, turn=turn.name, net=net, data=data) for net in turn.networks for data in DATA)


def _turn_claim(number: int, says: str, where: str, *names: str) -> Claim:
    """A claim about a dial: each of these turns moves the gap where theory says, in at least 8 of 10 networks of every seed."""
    turns = [turn for turn in TURNS if turn.name in names]
    parts = [
        Part(
            f"share of networks {turn.aim} by {turn.name}",
            _changes(turn, "gap_change"),
            by=SHARES[turn.aim],
            above=SHARE,
        )
        for turn in turns
    ]
    shows = [
        Shown(f"share whose held-out loss {word} by {turn.name}", _changes(turn, "loss_change"), by=by)
        for turn in turns
        for word, by in (("fell", share_helped), ("rose", share_hurt))
    ]
    return Claim(f"A{number}", says=says, where=where, paper="direction", parts=parts, shows=shows, figure="turns")


def _base(quantity: str) -> tuple[Quantity, ...]:
    return tuple(Quantity(quantity, training="base", net=net, data=data) for net, data in PAIRS)


CLAIMS = (
    _turn_claim(
        1, "A smaller output scale makes a network richer, a larger one lazier.", "Chizat, Oyallon, Bach 2019",
        "scale-down", "scale-up",
    ),
    _turn_claim(
        2, "A larger learning rate makes a network richer, a smaller one lazier.", "Lewkowycz et al. 2020",
        "rate-up", "rate-down",
    ),
    _turn_claim(
        3, "In the standard parametrisation a narrower network is richer, a wider one lazier.",
        "Jacot, Gabriel, Hongler 2018", "width-down", "width-up",
    ),
    _turn_claim(
        4, "A smaller start makes a network richer, a larger one lazier.", "Woodworth et al. 2020",
        "start-down", "start-up",
    ),
    _turn_claim(
        5, "The maximal-update parametrisation is richer than the standard one and stays so with width; NTK becomes lazier.",
        "Yang, Hu 2021", "mup", "ntk-width-up", "mup-width-up",
    ),
    _turn_claim(
        6, "Training the body of a pretrained network makes it richer than training the readout alone.", "by definition",
        "unfreeze", "freeze",
    ),
    _turn_claim(
        7, "Fine-tuning with a smaller LoRA rank is richer, with a larger one lazier.", "ours", "rank-down", "rank-up"
    ),
    _turn_claim(
        8, "Longer training makes a network richer, a training stopped early is lazier.", "Chizat, Oyallon, Bach 2019",
        "train-longer", "stop-early",
    ),
    Claim(
        "A9",
        says="Where a training is lazy, the twin's held-out loss is within 5 % of the network's.",
        where="ours",
        paper="no number",
        parts=[
            Part(
                "share of lazy trainings whose twin is as good",
                (*_base("gap"), *_base("held_loss"), *_base("twin_held_loss")),
                by=share_twin_as_good,
                above=SHARE,
            )
        ],
    ),
)  # fmt: skip


# --- the file that the verdict reads -----------------------------------------------------------------------------------------


def count_turns(table: Table) -> dict[str, Any]:
    """The content of the advice file: for every turn and word of the untouched training, how many trainings moved and how far.

    Counted are untouched trainings that learned something. ``moved``: how many had their gap changed as predicted. ``factor``:
    the median factor of the gap. ``fell`` and ``rose``: of the held-out loss. ``pairs``: of networks and data sets. Dividing the
    outputs is not counted by word where the recipe had multiplied them: that would only undo what made the training lazy.
    """
    numbers = _by_case(table)
    turns: dict[str, Any] = {}
    for turn in TURNS:
        rows: dict[str, list[tuple[str, float, float]]] = {}
        for (net, data, seed), own in numbers.items():
            if net in turn.networks and own["training", turn.base].get("learned"):
                changes = own["turn", turn.name]
                row = (f"{net}, {data}", changes["gap_change"], changes["loss_change"])
                rows.setdefault("all", []).append(row)
                if turn.name != "scale-down" or not recipe_of(net, data, int(seed))[2]:
                    rows.setdefault(word_of(own["training", turn.base]["gap"]), []).append(row)
        turns[turn.name] = {"aim": turn.aim} | {word: _counts(turn, rows[word]) for word in sorted(rows)}
    return {"format": FORMAT, "study": STUDY.name, "turns": turns, "twin": _count_good_twins(numbers)}


def _by_case(table: Table) -> dict[tuple[str, str, str], dict[tuple[str, str], dict[str, float]]]:
    """The numbers of every case, by training or turn and quantity."""
    found: dict[tuple[str, str, str], dict[tuple[str, str], dict[str, float]]] = {}
    for row in table.rows():
        place = ("turn", row["turn"]) if "turn" in row else ("training", row["training"])
        own = found.setdefault((row["net"], row["data"], row["seed"]), {})
        own.setdefault(place, {})[row["quantity"]] = row["value"]
    return found


def _counts(turn: Turn, rows: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
    gaps, losses = (np.array([row[place] for row in rows]) for place in (1, 2))
    return {
        "trainings": len(rows),
        "pairs": len({row[0] for row in rows}),
        "moved": round(float(SHARES[turn.aim](*gaps[:, None])[0]) * len(rows)),
        "factor": float(f"{math.exp(float(np.median(gaps))):.3g}"),
        "fell": int((losses < -LOSS_MOVES).sum()),
        "rose": int((losses > LOSS_MOVES).sum()),
    }


def _count_good_twins(numbers: Mapping[Any, Mapping[tuple[str, str], Mapping[str, float]]]) -> dict[str, Any]:
    """Of the untouched trainings that learned something, by word: how many have a twin whose held-out loss is as good."""
    rows: dict[str, list[tuple[str, bool]]] = {}
    for (net, data, _), own in numbers.items():
        base = own["training", "base"]
        if base["learned"]:
            good = base["twin_held_loss"] < AS_GOOD * base["held_loss"]
            rows.setdefault(word_of(base["gap"]), []).append((f"{net}, {data}", good))
    return {
        word: {"trainings": len(some), "pairs": len({pair for pair, _ in some}), "moved": sum(good for _, good in some)}
        for word, some in sorted(rows.items())
    }


def advice_text(table: Table) -> bytes:
    """The content of the advice file as text."""
    return (json.dumps(count_turns(table), indent=1) + "\n").encode()


def write_advice(results_folder: str | Path) -> None:
    """Count the paper scale of a results folder; write ``advice.json`` there and, from a checkout's, the copy that verdicts read.

    ``python -c "from unlazy.studies.scope.advice import write_advice; write_advice('results')"``
    """
    folder = Path(results_folder) / STUDY.name
    expected = STUDY.cases(STUDY.settings("paper"), STUDY.seeds_of("paper"))
    measured = {one["id"] for one in json.loads((folder / "paper" / "cases.json").read_text())}
    missing = [STUDY.label(case) for case in expected if STUDY.case_id(case) not in measured]
    require(
        not missing,
        f"advice counts every case of the paper scale; {folder} lacks {len(missing)}, such as {', '.join(missing[:3])}; "
        "run: unlazy reproduce advice --scale paper.",
    )
    text = advice_text(Table.read(folder / "paper" / "table.csv"))
    write_file(folder / "advice.json", text)
    if folder.resolve() == FILE.parents[3] / "results" / STUDY.name:
        write_file(FILE, text)


# --- figure ------------------------------------------------------------------------------------------------------------------


def draw_turns(results: Results) -> plots.Figure:
    """The factor of the gap when a dial is turned, one mark a training (blue: as predicted, red: not); the line is 1."""
    figure, axes = plots.grid(1, 1, (6.4, 5.4))
    panel = axes[0, 0]
    numbers = _by_case(results.table)
    for place, turn in enumerate(TURNS):
        changes = [own["turn", turn.name]["gap_change"] for own in numbers.values() if ("turn", turn.name) in own]
        as_predicted = [bool(SHARES[turn.aim](np.array([change]))[0]) for change in changes]
        shifts = np.linspace(-0.3, 0.3, max(2, len(changes)))
        for shift, change, right in zip(shifts, changes, as_predicted, strict=False):
            panel.plot(math.exp(change), place + shift, "o", color=COLOURS["blue" if right else "red"], markersize=2.5)
    panel.axvline(1, color=COLOURS["black"], linewidth=0.6)
    panel.set(xscale="log", xlabel="gap after the turn / gap before")
    panel.set_yticks(range(len(TURNS)), [f"{turn.name} ({turn.aim})" for turn in TURNS])
    panel.invert_yaxis()
    return figure


STUDY = Study(
    name="advice",
    paper="scope",
    scales={
        "smoke": {"networks": ("relu", "conv"), "data": ("parity",), "steps": 6},
        "desk": {"networks": NETWORKS, "data": DATA, "steps": 30},
        "paper": {"networks": NETWORKS, "data": DATA, "steps": 80},
    },
    seeds={"smoke": 1, "desk": 1, "paper": 3},
    columns=("net", "data"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("turns", "What a turned dial does to the gap", draw_turns),),
)
