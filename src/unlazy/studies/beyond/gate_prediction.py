"""Predicting the gates: do the first gates of a DLGN follow from the data alone? (X27, X28).

A DLGN with constant experts whose gates are near zero has G = 1/2 + beta q / 4, and the paths through a gate carry the same
number A on every input. Under gradient flow on the squared loss the weights w of every first-layer gate then obey

    dw/dt = (beta / 4) C s,      s = (1/n) sum_i r_i x_i,      r = y - f(x),

with one number C a gate, so all of them move along one line, +-s, and f is constant at first: r = y - mean(y). The half-spaces of
later layers are sums of those of the first. Linear experts carry A . x instead, and their gates follow +-M s with
M = (1/n) sum_i r_i x_i x_i^T once the values have learned the linear part along s. The units of a two-layer ReLU net move toward
extremal vectors of D(w) = (1/n) sum_i 1[w . x_i > 0] y_i x_i instead (Maennel et al. 2018; Boursier and Flammarion 2022).
The page docs/explanation/beyond_training.md has the derivation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.claims.functions import difference
from unlazy.data.circle import CIRCLE_PRESETS
from unlazy.data.dataset import Dataset
from unlazy.data.planted import Planted
from unlazy.models.build import build_stack
from unlazy.models.dense_layers import effective_weights
from unlazy.models.gates import SoftGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import Init, NetSpec, relu_spec
from unlazy.probes.halfspaces import half_spaces
from unlazy.runtime import stream
from unlazy.studies.study import Figure, Results, Study, Work, require_at_least_one, require_known
from unlazy.studies.table import Rows
from unlazy.studies.trainings import twos_and_threes

# --- what varies ---------------------------------------------------------------------------------------------

DATA = {"circle": "circle", "staircase": "planted staircase", "digits": "digits 2 and 3"}
NETWORKS = {
    "dlgn": "DLGN, constant experts",
    "dlgn-adam": "DLGN, constant experts, Adam",
    "dlgn-linear": "DLGN, linear experts",
    "relu": "two-layer ReLU net",
}
STARTS = {"small": 0.01, "default": 1.0}


@dataclass(frozen=True)
class Settings:
    """One scale. ``n``: samples of planted data and digits."""

    steps: int
    n: int = 1000
    width: int = 32
    depth: int = 3
    data: tuple[str, ...] = tuple(DATA)
    networks: tuple[str, ...] = tuple(NETWORKS)
    starts: tuple[str, ...] = tuple(STARTS)

    def __post_init__(self) -> None:
        require_at_least_one(self, "steps", "n", "width", "depth")
        require_known("data", self.data, DATA)
        require_known("networks", self.networks, NETWORKS)
        require_known("starts", self.starts, STARTS)


@dataclass(frozen=True)
class Stack:
    """One case: all seeds of one network from one start on one data set."""

    data: str
    network: str
    start: str
    seeds: tuple[int, ...]
    steps: int
    n: int
    width: int
    depth: int


def cases(settings: Settings, seeds: Sequence[int]) -> list[Stack]:
    """Every network from every start on every data set."""
    sizes = settings.steps, settings.n, settings.width, settings.depth
    places = product(settings.data, settings.networks, settings.starts)
    return [Stack(*place, tuple(seeds), *sizes) for place in places]


SCALES = {
    "smoke": Settings(steps=20, n=50, width=4, depth=2, data=("circle", "staircase")),
    # five minutes on one core
    "desk": Settings(steps=2000, n=600),
}

# --- data, networks, predictions -----------------------------------------------------------------------------

BETA = 4.0
RATES = {"dlgn": 0.1, "dlgn-linear": 0.1, "relu": 0.1, "dlgn-adam": 1e-3}
DIGIT_LENGTH = 20**0.5  # of every picture, as that of the planted inputs
SEARCHES, ITERATIONS, FIRST_STEP, SAME = 64, 400, 0.1, 0.99  # of extremal vectors


def load_data(case: Stack, work: Work) -> Dataset:
    """Inputs with mean zero, and targets."""
    if case.data == "circle":
        found = CIRCLE_PRESETS["author"].dataset()
    elif case.data == "staircase":
        found = Planted("staircase", inputs=20, order=3).dataset(case.n)
    else:
        x, y = twos_and_threes("mnist", case.n, folder=work.data)
        found = Dataset("digits", DIGIT_LENGTH * x, y[:, None])
    return Dataset(found.name, found.x - found.x.mean(0), found.y, {}, found.options)


def make_networks(case: Stack, inputs: int) -> GatedNet:
    """The stack of a case; a small start has small gates, or, in a ReLU net, small weights in both layers."""
    scale = STARTS[case.start]
    if case.network == "relu":
        return build_stack(relu_spec(inputs, width=2 * case.width, depth=1, init=Init(scale=scale)), case.seeds)
    experts = "linear" if case.network == "dlgn-linear" else "constant"
    spec = NetSpec(
        inputs, experts=experts, gate=SoftGate(BETA), width=case.width, depth=case.depth, constant_input="one"
    )
    net = build_stack(spec, case.seeds)
    with torch.no_grad():
        for _, parameter in net.branch("gate"):
            parameter.mul_(scale)
    return net


Directions = Float[Tensor, "k d"]


def predictions(data: Dataset, network: str) -> dict[str, Directions]:
    """Directions from inputs and targets alone, each of length 1.

    ``derived``: what the derivation gives for this network. ``mean``: s. ``component``: the first principal component of the
    inputs. ``extremal``: the extremal vectors of D(w), both signs.
    """
    x, y = data.x.double(), data.y[:, 0].double()
    s = x.T @ (y - y.mean()) / len(x)
    component = torch.linalg.eigh(x.T @ x).eigenvectors[:, -1]
    found = {"mean": s[None], "component": component[None]}
    found["extremal"] = torch.cat([extremal_vectors(x, y), extremal_vectors(x, -y)])
    if network == "relu":
        found["derived"] = found["extremal"]
    elif network == "dlgn-linear":
        fit = torch.linalg.lstsq(x, (y - y.mean())[:, None], driver="gelsd").solution[:, 0]
        left = y - y.mean() - x @ fit
        found["derived"] = (x.T @ (left * (x @ s)) / len(x))[None]
    elif network == "dlgn-adam":
        found["derived"] = s.sign()[None]  # a step of Adam is about the sign of the gradient, coordinate by coordinate
    else:
        found["derived"] = found["mean"]
    return {name: rows / rows.norm(dim=1, keepdim=True) for name, rows in found.items()}


def extremal_vectors(x: Float[Tensor, "n d"], y: Float[Tensor, " n"]) -> Directions:
    """Unit vectors at which (1/n) sum_i y_i max(w . x_i, 0) = w . D(w) is positive and largest among their neighbours.

    There D(w) points along w, or jumps past it because some w . x_i is zero. Found by ascent from random starts.
    """
    w = torch.randn(SEARCHES, x.shape[1], generator=stream(0, "extremal"), dtype=torch.float64)
    w = w / w.norm(dim=1, keepdim=True)
    for iteration in range(ITERATIONS):
        pull = ((w @ x.T > 0).double() * y) @ x / len(x)
        pull = pull / pull.norm(dim=1, keepdim=True).clamp_min(1e-12)
        w = w + FIRST_STEP * pull * (1 - iteration / ITERATIONS)
        w = w / w.norm(dim=1, keepdim=True)
    height = (w @ x.T).clamp_min(0) @ y
    chosen: list[Tensor] = []
    for one in w[height > 0] if bool((height > 0).any()) else w[height.argmax()][None]:
        if all(float(one @ other) < SAME for other in chosen):
            chosen.append(one)
    return torch.stack(chosen)


# --- how a case is measured ----------------------------------------------------------------------------------

EARLY = 0.05  # of the targets' variance is explained
MEASURED = 60  # times, evenly spaced in the logarithm of steps
RANDOM_SETS = 50


def measure(case: Stack, work: Work) -> Rows:
    """Train all seeds on all samples at once and compare first-layer gates with predictions.

    ``cosine`` of a prediction: mean over units of |cosine| to the direction nearest to the unit (of a ReLU net: cosine, since a
    unit has a side). ``excess``: (cosine - chance) / (1 - chance), where chance is that of as many random directions. ``of``:
    ``weights``, their ``motion`` since the start, or, of a DLGN, normals of the ``last`` layer. Moments: ``early``, when 5 % of
    the variance is explained for the first time, and ``end``; for the figure ``excess_at`` every so many steps.
    """
    data = load_data(case, work)
    net, chance = make_networks(case, data.x.shape[1]), {}
    rate, seeds = RATES[case.network], list(case.seeds)
    kind = torch.optim.Adam if case.network == "dlgn-adam" else torch.optim.SGD
    optimiser = kind(net.parameters(), rate)
    known = predictions(data, case.network)
    chance = {name: random_cosine(len(rows), data.x.shape[1], case.network) for name, rows in known.items()}
    start, variance, rows = gate_directions(net), float(data.y.var(correction=0)), Rows()
    marks = set(np.unique(np.geomspace(1, case.steps, MEASURED).astype(int)).tolist()) | {0}
    early: dict[int, dict[tuple[str, str], float]] = {}
    for step in range(case.steps + 1):
        losses = (net(data.x) - data.y).square().mean((-2, -1))
        explained = 1 - losses.detach().double().numpy() / variance
        fresh = [member for member in range(len(seeds)) if explained[member] >= EARLY and member not in early]
        if fresh or step in marks:
            found = compare(net, start, known, case.network)
            for member in fresh:
                early[member] = {place: float(values[member]) for place, values in found.items()}
            if step in marks:
                for prediction in known:
                    raw = found["weights", prediction]
                    rows.add("excess_at", excess(raw, chance[prediction]), seed=seeds, prediction=prediction, at=step)
                rows.add("explained", explained, seed=seeds, at=step)
        if step < case.steps:
            optimiser.zero_grad()
            (losses / 2).sum().backward()
            optimiser.step()
            work.progress(step, case.steps)
    for (of, prediction), values in found.items():
        before = np.array([early.get(member, {}).get((of, prediction), np.nan) for member in range(len(seeds))])
        for at, raw in (("early", before), ("end", values)):
            where: dict[str, Any] = {"seed": seeds, "at": at, "of": of, "prediction": prediction}
            rows.add("cosine", raw, **where)
            rows.add("excess", excess(raw, chance[prediction]), **where)
    rows.add("explained", explained, seed=seeds, at="end")
    return rows


def gate_directions(net: GatedNet) -> dict[str, Tensor]:
    """The weights of first-layer gates ``[S, units, d]``; of a DLGN also the normals of its last layer."""
    own = net.settings.gating == "own"
    layer = (net.value_layers if own else net.gate_layers)[0]
    found = {"weights": effective_weights(layer)[0].double().clone()}
    if not own:
        found["last"] = half_spaces(net).normals[:, -1].double()
    return found


def compare(
    net: GatedNet, start: dict[str, Tensor], known: dict[str, Directions], network: str
) -> dict[tuple[str, str], Any]:
    """Mean cosine of every kind of direction with every prediction, one number a member."""
    now = gate_directions(net)
    kinds = {"weights": now["weights"], "motion": now["weights"] - start["weights"]}
    if "last" in now:
        kinds["last"] = now["last"]
    found = {}
    for (of, vectors), (name, rows) in product(kinds.items(), known.items()):
        cosine = vectors @ rows.T / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        found[of, name] = nearest(cosine, network).mean(-1).numpy()
    return found


def nearest(cosine: Float[Tensor, "*any k"], network: str) -> Float[Tensor, "*any"]:
    """The cosine to the nearest of k directions; a DLGN's gates have no sign of their own, a ReLU's units have."""
    return (cosine if network == "relu" else cosine.abs()).amax(-1)


def random_cosine(count: int, dimensions: int, network: str) -> float:
    """What :func:`nearest` gives on average for so many random directions."""
    drawn = torch.randn(RANDOM_SETS, count + 1, dimensions, generator=stream(0, "chance", count), dtype=torch.float64)
    drawn = drawn / drawn.norm(dim=-1, keepdim=True)
    many = torch.randn(200, dimensions, generator=stream(1, "chance", count), dtype=torch.float64)
    many = many / many.norm(dim=-1, keepdim=True)
    return float(nearest(many @ drawn[:, :count].mT, network).mean())


def excess(cosine: Any, chance: float) -> Any:
    """0 at chance, 1 where all units point along a predicted direction."""
    return (cosine - chance) / (1 - chance)


# --- what is claimed -----------------------------------------------------------------------------------------

FOLLOWS, LEANS = 0.9, 0.5  # of the way from chance to a perfect prediction


def predicted(data: str, network: str, start: str, at: str, of: str = "weights", by: str = "derived") -> Quantity:
    """How well the gates of a network are predicted."""
    return Quantity("excess", at, data=data, network=network, start=start, of=of, prediction=by)


def follows(network: str, start: str, at: str, above: float, of: str = "weights") -> Iterator[Part]:
    """Gates point along the derived direction, on every data set."""
    for data, label in DATA.items():
        words = f"{label}, {NETWORKS[network]}, {start} start, {at}: {of} along the derived direction"
        yield Part(f"{words} (0 chance, 1 perfect)", predicted(data, network, start, at, of), above=above)


def beats(network: str, start: str, at: str, other: str) -> Iterator[Part]:
    """The derived direction predicts better than another one."""
    for data, label in DATA.items():
        both = (
            predicted(data, network, start, at),
            predicted(data, network, start, at, by=other),
        )
        words = f"{label}, {NETWORKS[network]}, {start} start, {at}: derived minus {other}"
        yield Part(words, both, difference, above=0)


def shown(network: str) -> Iterator[Shown]:
    """Every prediction at both moments."""
    for data, start, at in product(DATA, STARTS, ("early", "end")):
        name = f"{DATA[data]}, {NETWORKS[network]}, {start} start, {at}"
        for by in ("derived", "mean", "component", "extremal"):
            yield Shown(f"{name}: {by}", predicted(data, network, start, at, by=by))
        if network != "relu":
            yield Shown(f"{name}: last layer, derived", predicted(data, network, start, at, "last"))


ABOUT: dict[str, Any] = {"where": "open question", "paper": "our derivation", "figure": "prediction"}
CLAIMS = (
    Claim(
        "X27",
        says=(
            "From small gates, the first-layer gates of a DLGN with constant experts turn along +-s, the covariance of inputs "
            "and targets, which is known before training."
        ),
        parts=[*follows("dlgn", "small", "early", FOLLOWS), *beats("dlgn", "small", "early", "component")],
        controls=[
            *follows("dlgn", "small", "end", FOLLOWS),
            *follows("dlgn", "default", "early", FOLLOWS, "motion"),
            *follows("dlgn-adam", "small", "early", FOLLOWS),
            *follows("dlgn-linear", "small", "early", FOLLOWS),
        ],
        shows=[*shown("dlgn"), *shown("dlgn-adam"), *shown("dlgn-linear")],
        **ABOUT,
    ),
    Claim(
        "X28",
        says="From a small start, the units of a two-layer ReLU net turn toward extremal vectors of D(w).",
        parts=[*follows("relu", "small", "early", LEANS)],
        controls=[*follows("relu", "default", "early", LEANS), *follows("relu", "small", "end", LEANS)],
        shows=[*shown("relu")],
        **ABOUT,
    ),
)

# --- what is drawn -------------------------------------------------------------------------------------------


def draw_prediction(results: Results) -> plots.Figure:
    """How far first-layer gates lie along each prediction (0 chance, 1 perfect), over training steps; median and middle half."""
    settings = results.settings
    figure, axes = plots.grid(len(settings.data), len(settings.networks), (2.5, 1.9))
    colours = {"derived": "blue", "component": "orange", "extremal": "green"}
    for (row, data), (column, network) in product(enumerate(settings.data), enumerate(settings.networks)):
        axis = axes[row, column]
        for prediction, colour in colours.items():
            where = {"data": data, "network": network, "start": "small", "prediction": prediction}
            steps, values = results.table.series("excess_at", **where)
            if len(steps):
                plots.draw_band(axis, steps + 1, values, prediction, colour)
        axis.set_xscale("log")
        axis.set_ylim(-0.3, 1.05)
        axis.set_title(f"{DATA[data]}, {network}", fontsize=7)
    plots.shared_legend(figure, 3)
    return figure


STUDY = Study(
    name="gate-prediction",
    paper="beyond",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 10},
    columns=("data", "network", "start"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(Figure("prediction", "Gates along predicted directions, from small starts", draw_prediction),),
)
