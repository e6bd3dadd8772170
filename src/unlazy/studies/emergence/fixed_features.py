"""A network that learns features beside the best fixed ones (Figure 1, Theorem 2; B7-B10).

The network, its linearisation, random features and kernels learn from the same samples, with and without structure in the inputs.
A second setting measures the least hinge loss of fixed features, at a size where the bound of Theorem 2 is above zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.claims.functions import difference
from unlazy.data.patterns import Patterns, PatternSample, interval_rule, majority_rule
from unlazy.models.truncated import Phase, TruncatedNet, smoothed_slope, train
from unlazy.runtime import stream
from unlazy.studies.emergence.common import (
    Size,
    accuracy,
    networks_of_first_steps,
    patterns_of,
    star_direction,
    start_network,
    training_phases,
)
from unlazy.studies.emergence.fixed_features_methods import (
    Ridge,
    descend_in_function_space,
    descend_linearised,
    infinite_width_kernel,
    least_hinge_in_ball,
    linearised_kernel,
    random_cosines,
    random_neurons,
    ridge_on_features,
    ridge_on_kernel,
    scaled_inputs,
    train_ordinary_network,
)
from unlazy.studies.study import Case, Figure, Results, Study, Work, make_cases
from unlazy.studies.table import Rows
from unlazy.theory.bounds import fixed_feature_bound
from unlazy.training.recursive_features import recursive_features, top_directions

STRUCTURED, UNSTRUCTURED, BOUND = "structured", "unstructured", "bound"
THRESHOLD, INTERVAL = "threshold", "interval"
FEWER_RELEVANT = {"unstructured, 2 relevant": 2, "unstructured, 3 relevant": 3}
"""Kinds of data. *structured*, *unstructured*: parity. *bound*: structured, at a size where the bound of Theorem 2 is above zero.
*threshold*, *interval*: structured, other label rules. The others: unstructured parity of fewer relevant patterns."""


@dataclass(frozen=True)
class Settings(Size):
    """``widths``: numbers of random features, besides the network's number of pairs; ``wide``: the largest number. ``followed``:
    for seeds below it, methods with fixed features are also trained step by step. ``every``: steps between two measurements.
    ``machine_*``: the recursive feature machine. ``plain_steps``: steps of the paper's own third phase. ``bound_*``: the setting
    of Theorem 2."""

    samples: int = 6_000
    validation: int = 2_000
    steps: int = 2_008  # the paper's T = m^(4/3)
    batch: int = 250
    followed: int = 1
    outer_rate: float = 0.1
    linear_rate: float = 0.01
    every: int = 100
    widths: tuple[int, ...] = (2_000,)
    wide: int = 20_000
    machine_samples: int = 3_000
    machine_rounds: int = 3
    plain_steps: int = 2_008
    bound_patterns: int = 176
    bound_relevant: int = 11
    bound_features: int = 600
    bound_norm: float = 10.0
    bound_samples: int = 10_000
    bound_steps: int = 2_008
    bound_outer_rate: float = 0.3


SMALL = {"inputs": 60, "patterns": 20, "relevant": 5, "pairs": 20, "samples": 300, "tests": 200, "validation": 100}
SMALL_BOUND = {"bound_patterns": 40, "bound_relevant": 5, "bound_features": 10, "bound_samples": 300, "bound_steps": 20}
SCALES = {
    "smoke": Settings(
        **SMALL,
        **SMALL_BOUND,
        bound_norm=1.0,
        steps=20,
        plain_steps=10,
        batch=50,
        every=10,
        widths=(50,),
        wide=500,
        machine_samples=200,
        machine_rounds=1,
    ),
    "desk": Settings(
        samples=3_000, steps=800, every=50, wide=8_000, machine_samples=1_500, bound_samples=4_000, bound_steps=800
    ),
    "paper": Settings(followed=5),
}
SEEDS = {"smoke": 2, "desk": 3, "paper": 20}
METHOD_SEEDS, WIDE_SEEDS, FEW_SEEDS = 10, 5, 3
"""The most seeds of a method, of the widest random features, and of the extra trainings. The relevant sets of Theorem 2 take
seconds and get all seeds of the scale."""
CONSTANTS = (
    1,
    10,
    100,
    1000,
)  # by which the rate of the paper's own third phase is multiplied: the paper leaves it open


def cases(settings: Settings, seeds: Sequence[int]) -> list[Case]:
    """Every method on both kinds of data, then the cases of Theorem 2. ``features``: the number of random features."""
    everywhere: list[tuple[str, int | None, int]] = [
        ("network", None, METHOD_SEEDS),
        ("linearised", None, METHOD_SEEDS),
        *(("random", count, METHOD_SEEDS) for count in (settings.pairs, *settings.widths)),
        ("random", settings.wide, WIDE_SEEDS),
        ("infinite", None, METHOD_SEEDS),
        ("machine", None, METHOD_SEEDS),
    ]
    wanted = [(data, *one) for data in (STRUCTURED, UNSTRUCTURED) for one in everywhere]
    wanted += [
        *((rule, *one) for rule in (THRESHOLD, INTERVAL) for one in other_rule_methods(settings)),
        *((data, "ordinary", None, FEW_SEEDS) for data in (STRUCTURED, *FEWER_RELEVANT, UNSTRUCTURED)),
        (BOUND, "neurons", None, len(seeds)),
        (BOUND, "cosines", None, len(seeds)),
        (BOUND, "network", None, FEW_SEEDS),
    ]
    places = [
        {"data": data, "method": method, "features": features, "seed": seed}
        for data, method, features, count in wanted
        for seed in seeds[:count]
    ]
    plain = {"data": STRUCTURED, "method": "plain", "features": None}
    places += [{**plain, "constant": constant, "seed": seed} for constant in CONSTANTS for seed in seeds[:FEW_SEEDS]]
    return make_cases(places, settings, without=("widths", "wide"))


def other_rule_methods(settings: Settings) -> list[tuple[str, int | None, int]]:
    """The methods that are trained on other label rules: name, number of features, most seeds."""
    return [("network", None, FEW_SEEDS), *(("random", count, FEW_SEEDS) for count in settings.widths)]


# --- measuring: networks -----------------------------------------------------------------------------

NEARLY_ALL = 0.99  # B7, and when an ordinary network has learned
ORDINARY_LENGTH = (
    3  # steps of an ordinary network over those of the third phase: 1.5 million samples at the paper's scale
)

Data = tuple[Patterns, PatternSample, PatternSample]  # the distribution, training samples, test samples
Watch = Callable[[int, TruncatedNet], None]
T = TypeVar("T")


def measure(case: Case, work: Work) -> Rows:
    """The rows of one method, data set and seed."""
    rows = Rows()
    METHODS[f"bound {case.method}" if case.data == BOUND else case.method](case, rows)
    return rows


def draw_data(case: Case) -> Data:
    """The distribution, the samples to learn from, and those to test on."""
    patterns = distribution(case)
    return patterns, patterns.draw(case.samples), patterns.draw(case.tests, "test")


def distribution(case: Case) -> Patterns:
    """The data of a case. The interval has neither none nor all relevant patterns in it; A0 sets its share of fair coins."""
    sizes, k = (case.inputs, case.patterns), case.relevant
    if case.data in FEWER_RELEVANT:
        return Patterns.unstructured(*sizes, FEWER_RELEVANT[case.data], seed=case.seed)
    if case.data == THRESHOLD:
        return Patterns(*sizes, k, rule=majority_rule(k), seed=case.seed)
    if case.data == INTERVAL:
        inside = 1 - (k + 2) / 2**k  # of fair coins: 2 to k - 1 of k patterns are present
        return Patterns(*sizes, k, rule=interval_rule(2, k - 1), mixture=0.5 / inside, seed=case.seed)
    return patterns_of(case, case.data == STRUCTURED)


def draw_batch_rows(case: Case, step: int, sample: PatternSample, batch: int) -> Tensor:
    """Row numbers of a batch, drawn with replacement; the same at step t for every method."""
    return torch.randint(0, len(sample), (batch,), generator=stream(case.seed, "batch", step))


def train_third_phase(
    case: Case,
    nets: Sequence[TruncatedNet],
    sample: PatternSample,
    phase: Phase,
    batch: int,
    watch: Watch | None = None,
) -> TruncatedNet:
    """The network after the paper's third phase, on mini-batches in float32.

    ``nets``: the networks after steps 0, 1 and 2 (float64). ``watch(t, net)`` is called after every step, from step 0.
    """
    on_step: Watch = watch or (lambda step, net: None)
    phi, y, weights = sample.phi.float(), sample.y.float(), torch.full((batch,), 1 / batch)

    def batches(step: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = draw_batch_rows(case, step, sample, batch)
        return phi[rows], y[rows], weights

    for step, net in enumerate(nets[:2]):
        on_step(step, net.to(torch.float32))
    return train(nets[2].to(torch.float32), (phase,), batches, lambda t, net: on_step(t + 2, net))


def measure_network(case: Case, rows: Rows) -> None:
    """The network: test accuracy by step, leading direction of its gradients; and the accuracy of counting relevant patterns."""
    patterns, sample, test = draw_data(case)
    phi, y = test.phi.float(), test.y.float()

    def watch(step: int, net: TruncatedNet) -> None:
        if step <= 2 or step % case.every == 0 or step == case.steps + 2:
            rows.add("accuracy", accuracy(net(phi), y), at=step)

    nets = networks_of_first_steps(case.pairs, patterns, sample)
    third = training_phases(case.pairs, patterns, steps=case.steps, outer_rate=case.outer_rate)[2]
    output = add_final_numbers(rows, train_third_phase(case, nets, sample, third, case.batch, watch), test)
    rows.add("accuracy_uniform", accuracy(output[test.uniform], y[test.uniform]), at="end")
    rows.add("counting_accuracy", accuracy(test.phi[:, patterns.is_relevant()].sum(1), test.y))
    if case.data == STRUCTURED:
        cosines = [cosine_to_star(average_gradient_outer_product(net, test.phi), patterns) for net in nets]
        rows.add("gradient_cosine", cosines, at=[0, 1, 2])


def measure_plain_descent(case: Case, rows: Rows) -> None:
    """The network with the paper's own third phase, plain descent of all parameters; its rate has the constant of the case.

    ``accuracy_best``: the best of the steps at which it was measured, since Theorem 1 speaks of some step up to T.
    """
    patterns, sample, test = draw_data(case)
    third = training_phases(case.pairs, patterns, steps=case.plain_steps, rate_factor=case.constant)[2]
    nets = networks_of_first_steps(case.pairs, patterns, sample)
    phi, y, seen = test.phi.float(), test.y.float(), list[float]()

    def watch(step: int, net: TruncatedNet) -> None:
        if step % case.every == 0 or step == case.plain_steps + 2:
            seen.append(accuracy(net(phi), y))

    add_final_numbers(rows, train_third_phase(case, nets, sample, third, case.batch, watch), test)
    rows.add("accuracy_best", max(seen))


def measure_ordinary_network(case: Case, rows: Rows) -> None:
    """An ordinary ReLU network on new samples at every step, until it has learned: its last test accuracy, the samples seen."""
    patterns = distribution(case)
    test = patterns.draw(case.tests, "test")
    steps, reached, needed = ORDINARY_LENGTH * case.steps, 0.0, float("inf")
    for step, net in train_ordinary_network(patterns, 2 * case.pairs, steps, case.batch):
        if step % case.every == 0:
            reached = accuracy(net(scaled_inputs(patterns, test))[:, 0].detach(), test.y)
            if reached > NEARLY_ALL:
                needed = float(step * case.batch)
                break
    rows.add("accuracy", reached, at="end")
    rows.add_all({"samples_to_learn": needed, "samples_offered": float(steps * case.batch)})


def add_final_numbers(rows: Rows, net: TruncatedNet, test: PatternSample) -> Float[Tensor, " n"]:
    """Add the test accuracy and mean hinge loss of a trained network; returns its test outputs."""
    output, y = net(test.phi.float()), test.y.float()
    hinge = (1 - y * output).clamp_min(0).mean()
    rows.add_all({"accuracy": accuracy(output, y), "hinge": hinge}, at="end")
    return output


def average_gradient_outer_product(net: TruncatedNet, phi: Float[Tensor, "n D"]) -> Float[Tensor, "D D"]:
    """The average gradient outer product (AGOP) of the network by its input, over these rows."""
    rows = (smoothed_slope(net.pre_activations(phi), 0.0) * net.a) @ net.w
    return rows.T @ rows / len(phi)


def cosine_to_star(product: Float[Tensor, "D D"], patterns: Patterns) -> float:
    """Absolute cosine of the top eigenvector with the sum of the relevant patterns."""
    return float((top_directions(product.double(), 1)[:, 0] @ star_direction(patterns)).abs())


# --- measuring: fixed features, in float32 -----------------------------------------------------------


def add_ridge(case: Case, rows: Rows, data: Data, method: Ridge, describe: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Add the accuracy of a readout whose ridge is chosen on validation rows.

    ``describe``: the features of inputs, or their kernel with the training samples. Returns these for training, validation and
    test rows.
    """
    patterns, sample, test = data
    held = patterns.draw(case.validation, "validation")
    train, validation, tests = (describe(part.phi) for part in (sample, held, test))
    output, ridge = method(train, validation, tests, sample.y.float(), held.y.float())
    found = {
        "accuracy": accuracy(output, test.y),
        "accuracy_uniform": accuracy(output[test.uniform], test.y[test.uniform]),
        "ridge": ridge,
    }
    rows.add_all(found, fit="ridge", at="end")
    return [train, validation, tests]


def measure_linearised(case: Case, rows: Rows) -> None:
    """The network linearised at its start: ridge regression with its tangent kernel, and descent on the network's batches."""
    patterns, sample, _ = data = draw_data(case)
    start, phi = start_network(case.pairs, patterns).to(torch.float32), sample.phi.float()
    add_ridge(case, rows, data, ridge_on_kernel, lambda points: linearised_kernel(start, points.float(), phi))
    add_descent(case, rows, data, start, outer_only=False)


def measure_random(case: Case, rows: Rows) -> None:
    """Ridge regression on random neurons. If there are as many as the network has pairs, they are its own at the start, and the
    readout is also trained by descent on the network's batches."""
    patterns, _, _ = data = draw_data(case)
    if case.features != case.pairs:
        features = random_neurons(patterns.patterns, case.features, patterns.relevant, case.seed)
        add_ridge(case, rows, data, ridge_on_features, lambda phi: features(phi.float()))
        return
    start = start_network(case.pairs, patterns).to(torch.float32)
    half = slice(case.pairs)  # the mirrored half has the same neurons
    own = TruncatedNet(start.w[half], start.b[half], start.a[half])
    add_ridge(case, rows, data, ridge_on_features, lambda phi: own.neurons(phi.float()))
    add_descent(case, rows, data, start, outer_only=True)


def add_descent(case: Case, rows: Rows, data: Data, start: TruncatedNet, *, outer_only: bool) -> None:
    """Add the test accuracy by step of a linearised network."""
    _, sample, test = data
    phi, y, test_phi = sample.phi.float(), sample.y.float(), test.phi.float()

    def batches(step: int) -> tuple[Tensor, Tensor]:
        chosen = draw_batch_rows(case, step, sample, case.batch)
        return phi[chosen], y[chosen]

    rate = case.outer_rate if outer_only else case.linear_rate
    functions = descend_linearised(start, batches, case.steps, rate, outer_only=outer_only)
    for step, function in every_so_many_steps(case, functions):
        rows.add("accuracy", accuracy(function(test_phi), test.y), fit="descent", at=step)


def every_so_many_steps(case: Case, descent: Iterator[T]) -> Iterator[tuple[int, T]]:
    """Every ``case.every`` steps of a descent, and the last one; nothing for seeds that are not followed."""
    if case.seed < case.followed:
        yield from ((step, now) for step, now in enumerate(descent) if step % case.every == 0 or step == case.steps)


def measure_infinite(case: Case, rows: Rows) -> None:
    """Infinite width: ridge regression with its tangent kernel, and descent on the network's batches."""
    patterns, sample, test = data = draw_data(case)
    kernel, _, across = add_ridge(
        case, rows, data, ridge_on_kernel, lambda phi: infinite_width_kernel(patterns, phi, sample.phi)
    )
    batches = partial(draw_batch_rows, case, sample=sample, batch=case.batch)
    descent = descend_in_function_space(kernel, sample.y.float(), batches, case.steps)
    for step, coefficients in every_so_many_steps(case, descent):
        rows.add("accuracy", accuracy(across @ coefficients, test.y), fit="descent", at=step)


def measure_feature_machine(case: Case, rows: Rows) -> None:
    """The recursive feature machine by round (0: the Laplace kernel): test accuracy, leading direction of its gradients."""
    patterns, sample, test = draw_data(case)
    some = sample.take(slice(case.machine_samples))
    for number, fitted in enumerate(recursive_features(some.phi, some.y[:, None], rounds=case.machine_rounds)):
        rows.add("accuracy", accuracy(fitted(test.phi)[:, 0], test.y), at=number)
        rows.add("gradient_cosine", cosine_to_star(fitted.agop(some.phi), patterns), at=number)


# --- measuring: Theorem 2 ----------------------------------------------------------------------------


def bound_data(case: Case) -> Patterns:
    """Structured data of the size for Theorem 2, with a random relevant set."""
    inputs = max(case.inputs, case.bound_patterns)
    return Patterns(inputs, case.bound_patterns, case.bound_relevant, seed=case.seed)


def measure_readouts_in_ball(case: Case, rows: Rows) -> None:
    """The least hinge loss of readouts in the ball, for one random relevant set; the features are the same for every set."""
    size, k, count, norm = case.bound_patterns, case.bound_relevant, case.bound_features, case.bound_norm
    sample = bound_data(case).draw(case.bound_samples)
    features = random_neurons(size, count, k) if case.method == "neurons" else random_cosines(size, count)
    found = least_hinge_in_ball(features(sample.phi.float()), sample.y.float(), norm, steps=300, smoothing=0.2)
    bound = fixed_feature_bound(features=count, norm=norm, patterns=size, relevant=k)
    rows.add_all({"bound": bound.value, "certified_hinge": found.certified, "reached_hinge": found.reached})


def measure_bound_network(case: Case, rows: Rows) -> None:
    """The trained network's hinge loss on new rows of the same distribution.

    Rows and batches are doubled and the third phase moves only outer weights: with eleven relevant patterns the network has to
    tell twelve counts apart, which needs finer steps than six.
    """
    patterns = bound_data(case)
    sample, test = patterns.draw(2 * case.bound_samples), patterns.draw(case.tests, "test")
    third = Phase(case.bound_steps, 0.0, outer_rate=case.bound_outer_rate)
    nets = networks_of_first_steps(case.pairs, patterns, sample)
    add_final_numbers(rows, train_third_phase(case, nets, sample, third, 2 * case.batch), test)


METHODS = {
    "network": measure_network,
    "plain": measure_plain_descent,
    "ordinary": measure_ordinary_network,
    "linearised": measure_linearised,
    "random": measure_random,
    "infinite": measure_infinite,
    "machine": measure_feature_machine,
    "bound neurons": measure_readouts_in_ball,
    "bound cosines": measure_readouts_in_ball,
    "bound network": measure_bound_network,
}
"""The function that measures a method; ``bound``: on the data of Theorem 2."""


# --- claims ------------------------------------------------------------------------------------------

CLEARLY_BELOW = 0.1  # B8: ten points of test accuracy
NEAR_CHANCE = 0.52  # B9
ROUNDS = 3  # of the recursive feature machine

OWN_METHODS: dict[str, dict[str, Any]] = {
    "linearised network": {"method": "linearised"},
    "300 random features": {"method": "random", "features": 300},
}
"""The fixed features of the paper's figure: name in words, and columns of the table."""
OTHER_METHODS: dict[str, dict[str, Any]] = {
    "2000 random features": {"method": "random", "features": 2000},
    "infinite-width NTK": {"method": "infinite"},
}
WIDE: dict[str, Any] = {"method": "random", "features": 20_000}


def at_end(quantity: str, data: str, method: str = "network", **where: Any) -> Quantity:
    """A number after training; for fixed features, with the best ridge."""
    return Quantity(quantity, "end", data=data, method=method, **where)


def excess_where_it_binds(certified: NDArray[Any], bound: NDArray[Any], binds: float = 0.25) -> NDArray[Any]:
    """How far the certified loss lies above the bound; NaN where the bound is too low to say anything."""
    return np.where(bound >= binds, certified - bound, np.nan)


def least_excess(certified: NDArray[Any], bound: NDArray[Any], binds: float = 0.25) -> NDArray[Any]:
    """The least of these over all relevant sets, one number; NaN while sets are missing and none is below the bound."""
    excess = np.where(bound >= binds, certified - bound, np.nan)
    least = np.fmin.reduce(excess)
    return np.array([least if least <= 0 or not np.isnan(excess).any() else np.nan])


def best_of(*accuracies: NDArray[Any]) -> NDArray[Any]:
    """The best of several accuracies of a seed."""
    return np.max(accuracies, axis=0)


def plain(quantity: str, constant: int, at: str | None = None) -> Quantity:
    """A number of the network with the paper's own third phase."""
    return Quantity(quantity, at, data=STRUCTURED, method="plain", constant=constant)


def other_rule_parts(data: str) -> list[Part]:
    """On data with another label rule, the network is nearly always right (B7)."""
    learned = at_end("accuracy", data)
    return [Part(f"{data} rule, ours: test accuracy", learned, above=NEARLY_ALL, seeds=FEW_SEEDS)]


def network_ahead_elsewhere(data: str) -> Part:
    """The network is clearly better than random features on data with another label rule (B8)."""
    both = at_end("accuracy", data), at_end("accuracy", data, "random", features=2000)
    says = f"{data} rule: network less 2000 random features, tuned ridge"
    return Part(says, both, by=difference, above=CLEARLY_BELOW, unit="accuracy", seeds=FEW_SEEDS)


def ordinary_near_chance(data: str) -> Part:
    """An ordinary network with many more samples stays near chance, too (B9)."""
    words = f"{data}: ordinary ReLU network, up to 1.5 million samples, accuracy"
    return Part(words, at_end("accuracy", data, "ordinary"), below=NEAR_CHANCE, unit="accuracy", seeds=FEW_SEEDS)


def network_ahead_parts(methods: dict[str, dict[str, Any]]) -> list[Part]:
    """The network is clearly better than each of these methods on structured data."""
    learned = at_end("accuracy", STRUCTURED)
    rule: dict[str, Any] = {"by": difference, "above": CLEARLY_BELOW, "unit": "accuracy", "seeds": METHOD_SEEDS}
    return [
        Part(f"network less {name}, tuned ridge", (learned, at_end("accuracy", STRUCTURED, **which)), **rule)
        for name, which in methods.items()
    ]


def near_chance_parts(methods: dict[str, dict[str, Any]]) -> list[Part]:
    """Each of these methods stays near chance on data without structure."""
    rule: dict[str, Any] = {"below": NEAR_CHANCE, "unit": "accuracy", "seeds": METHOD_SEEDS}
    return [
        Part(f"{name}, tuned ridge" if which else name, at_end("accuracy", UNSTRUCTURED, **which), **rule)
        for name, which in methods.items()
    ]


def above_bound_parts(kind: str) -> list[Part]:
    """No readout of random features of this kind has a loss below the bound."""
    certified_and_bound = tuple(Quantity(name, data=BOUND, method=kind) for name in ("certified_hinge", "bound"))
    rule: dict[str, Any] = {"above": 0, "unit": "hinge loss", "identity": True}
    return [
        Part(
            f"random {kind}: certified least loss, less the bound",
            certified_and_bound,
            by=excess_where_it_binds,
            **rule,
        ),
        Part(f"random {kind}: the same, least set", certified_and_bound, by=least_excess, **rule),
    ]


def shown_kernels(data: str) -> list[Shown]:
    """The widest random features, and the feature machine beside the kernel it starts from."""
    machine = f"recursive feature machine, {ROUNDS} rounds, 3000 samples"
    cosine = f"{machine}: cosine of the top eigenvector with the sum of relevant patterns"
    where: dict[str, Any] = {"data": data, "method": "machine"}
    return [
        Shown("20000 random features: accuracy", at_end("accuracy", data, **WIDE)),
        Shown("Laplace kernel (its round 0), 3000 samples: accuracy", Quantity("accuracy", 0, **where)),
        Shown(f"{machine}: accuracy", Quantity("accuracy", ROUNDS, **where)),
        Shown(cosine, Quantity("gradient_cosine", ROUNDS, **where)),
    ]


COUNTING = Quantity("counting_accuracy", data=STRUCTURED, method="network")
STEP_COSINE = "step {}: cosine of the top eigenvector of its gradients (AGOP) with the sum of relevant patterns"

CLAIMS = (
    Claim(
        "B7",
        says="A trained two-layer network reaches nearly 100 % test accuracy on structured parity data.",
        where="Fig. 1",
        paper="near 100 % test",
        figure="accuracy",
        parts=[
            Part(
                "the paper's own third phase, best rate constant of 1, 10, 100, 1000: best test accuracy up to T",
                tuple(plain("accuracy_best", constant) for constant in CONSTANTS),
                by=best_of,
                above=NEARLY_ALL,
                seeds=FEW_SEEDS,
            )
        ],
        controls=[
            Part(
                "third phase with Adam on the outer weights: test accuracy",
                at_end("accuracy", STRUCTURED),
                above=NEARLY_ALL,
                seeds=METHOD_SEEDS,
            ),
            *other_rule_parts(THRESHOLD),
            *other_rule_parts(INTERVAL),
        ],
        shows=[
            Shown("ours: test accuracy on the inputs without structure", at_end("accuracy_uniform", STRUCTURED)),
            Shown("ours: test hinge loss", at_end("hinge", STRUCTURED)),
            Shown("counting relevant patterns, more than half (a linear rule)", COUNTING),
            *(
                Shown(f"the paper's own third phase, rate constant {constant}: {words}", plain(quantity, constant, at))
                for constant in CONSTANTS
                for quantity, at, words in (
                    ("accuracy_best", None, "best accuracy up to T"),
                    ("accuracy", "end", "accuracy at T"),
                    ("hinge", "end", "hinge loss at T"),
                )
            ),
            *(
                Shown(STEP_COSINE.format(step), Quantity("gradient_cosine", step, data=STRUCTURED, method="network"))
                for step in (0, 1, 2)
            ),
        ],
    ),
    Claim(
        "B8",
        says=(
            "On structured parity data the same network linearised at initialisation and random features with a "
            "trained readout stay clearly below the trained network in test accuracy."
        ),
        where="Fig. 1",
        paper="clearly lower; no number",
        figure="accuracy",
        parts=network_ahead_parts(OWN_METHODS),
        controls=[
            *network_ahead_parts(OTHER_METHODS),
            network_ahead_elsewhere(THRESHOLD),
            network_ahead_elsewhere(INTERVAL),
        ],
        shows=[
            *(
                Shown(f"{name}: {what}", at_end(quantity, STRUCTURED, **which))
                for quantity, what in (("accuracy", "accuracy"), ("accuracy_uniform", "on inputs without structure"))
                for name, which in (OWN_METHODS | OTHER_METHODS).items()
            ),
            Shown("counting rule (linear)", COUNTING),
            *shown_kernels(STRUCTURED),
        ],
    ),
    Claim(
        "B9",
        says=(
            "On parity data whose inputs carry no structure, and within the experiment's budget of 6000 samples, "
            "the trained network, its linearisation and random features all stay near chance."
        ),
        where="Fig. 1",
        paper="near 50 % test",
        figure="accuracy",
        parts=near_chance_parts({"network": {}} | OWN_METHODS),
        controls=[
            *near_chance_parts(OTHER_METHODS),
            *(ordinary_near_chance(data) for data in (UNSTRUCTURED, *FEWER_RELEVANT)),
        ],
        shows=[
            *shown_kernels(UNSTRUCTURED),
            *(
                Shown(f"{data}: samples of the ordinary network until 0.99", Quantity("samples_to_learn", **where))
                for data in (STRUCTURED, *FEWER_RELEVANT, UNSTRUCTURED)
                for where in ({"data": data, "method": "ordinary"},)
            ),
        ],
    ),
    Claim(
        "B10",
        says=(
            "Whatever N fixed features with values in [-1, 1] and readout of norm at most B are taken, some "
            "choice of k relevant patterns among D (k odd, 3 < k <= D/16) gives structured parity data on which "
            "the hinge loss is at least p_o (1 - sqrt(2N) B / 2^k), p_o being the share of unstructured inputs."
        ),
        where="Thm 2",
        paper="bound never violated",
        figure="bound",
        parts=[*above_bound_parts("neurons"), *above_bound_parts("cosines")],
        shows=[
            Shown("bound", Quantity("bound", data=BOUND, method="neurons"), unit="hinge loss"),
            *(
                Shown(
                    f"random {kind}: loss reached inside the ball",
                    Quantity("reached_hinge", data=BOUND, method=kind),
                    unit="hinge loss",
                )
                for kind in ("neurons", "cosines")
            ),
            Shown("trained network, test hinge loss", at_end("hinge", BOUND), unit="hinge loss"),
            Shown("trained network, test accuracy", at_end("accuracy", BOUND)),
        ],
    ),
)


# --- figures -----------------------------------------------------------------------------------------


def all_methods_figure(results: Results) -> plots.Figure:
    """Test accuracy, one dot a seed, on inputs with structure and without."""
    table, settings = results.table, results.settings
    lines: list[tuple[str, str, dict[str, Any]]] = [
        ("network", "blue", {"method": "network", "at": "end"}),
        ("recursive feature machine", "green", {"method": "machine", "at": settings.machine_rounds}),
        *(
            (f"{count:,} random features", "orange", {"method": "random", "features": count, "at": "end"})
            for count in (settings.wide, *settings.widths, settings.pairs)
        ),
        ("infinite-width NTK", "orange", {"method": "infinite", "at": "end"}),
        ("linearised network (NTK)", "orange", {"method": "linearised", "at": "end"}),
        ("Laplace kernel", "orange", {"method": "machine", "at": 0}),
    ]
    figure, axes = plots.grid(1, 2, (4.6, 3.2), sharex=True, sharey=True)
    for axis, data in zip(axes[0], (STRUCTURED, UNSTRUCTURED), strict=True):
        for place, (_, colour, which) in enumerate(lines):
            values = table.select("accuracy", data=data, **which)
            spread = np.linspace(-0.15, 0.15, len(values)) if len(values) > 1 else np.zeros(1)
            axis.plot(values, place + spread, "o", color=plots.COLOURS[colour], markersize=3.5, alpha=0.6)
            axis.text(1.045, place, f"{np.median(values):.3f}", va="center", fontsize=8)
        axis.axvline(0.5, color=plots.COLOURS["grey"], linestyle=":")
        axis.set(xlim=(0.45, 1.03), xlabel="test accuracy", title=f"{data} inputs")
    left, red = axes[0, 0], plots.COLOURS["red"]
    counting = float(np.median(table.select("counting_accuracy", data=STRUCTURED)))
    beside = {"xytext": (5, 0), "textcoords": "offset points", "fontsize": 8, "va": "center"}
    left.axvline(counting, color=red, linestyle="--", linewidth=1)
    left.annotate("counting,\na linear rule", (counting, 0.5), color=red, **beside)
    left.set_yticks(range(len(lines)), [label for label, _, _ in lines])
    left.invert_yaxis()
    return figure


def accuracy_figure(results: Results) -> plots.Figure:
    """Test accuracy against steps, median and middle half of the seeds."""
    table, count = results.table, results.settings.wide
    figure, axes = plots.grid(1, 2, (4.6, 3.6), sharey=True)
    for axis, data in zip(axes[0], (STRUCTURED, UNSTRUCTURED), strict=True):
        for method, fit, label, colour in (
            ("network", None, "network, features learned", "blue"),
            ("linearised", "descent", "its linearisation (NTK)", "orange"),
            ("random", "descent", "random features", "green"),
            ("infinite", "descent", "infinite-width NTK", "purple"),
        ):
            plots.draw_band(axis, *table.series("accuracy", data=data, method=method, fit=fit), label, colour)
        wide = float(np.median(table.select("accuracy", "end", data=data, method="random", features=count)))
        label = f"{count} random features, tuned ridge: {wide:.3f}"
        axis.axhline(wide, color=plots.COLOURS["red"], linestyle="--", label=label)
        axis.axhline(0.5, color=plots.COLOURS["grey"], linestyle=":")
        axis.set(xlabel="step", title=f"{data} inputs", ylim=(0.45, 1.02))
        plots.legend_below(axis, 1)
    axes[0, 0].set_ylabel("test accuracy")
    return figure


def bound_figure(results: Results) -> plots.Figure:
    """The least hinge loss of fixed features, certified from below, for random relevant sets, and the bound."""
    table = results.table.where(data=BOUND)
    figure, axes = plots.grid(1, 1, (5.2, 3.4))
    axis, bounds = axes[0, 0], table.select("bound", method="neurons")
    for quantity, method, label, colour, mark, size in (
        ("certified_hinge", "neurons", "random neurons, certified least loss", "green", "o", 4),
        ("certified_hinge", "cosines", "random cosines, certified least loss", "orange", "s", 4),
        ("hinge", "network", "trained network", "blue", "*", 9),
    ):
        values = table.select(quantity, method=method)
        place = np.arange(1, len(values) + 1)
        axis.plot(place, values, mark, color=plots.COLOURS[colour], label=label, markersize=size)
    axis.axhline(bounds[0], color=plots.COLOURS["red"], label=f"Theorem 2: {bounds[0]:.3f}")
    axis.set(xlabel="relevant set", ylabel="hinge loss", ylim=(0, 1.05), xticks=np.arange(1, len(bounds) + 1)[::3])
    axis.set_title("no readout of fixed features falls below the bound")
    plots.legend_below(axis)
    return figure


STUDY = Study(
    name="fixed-features",
    paper="emergence",
    scales=SCALES,
    seeds=SEEDS,
    columns=("data", "method", "features", "constant"),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(
        Figure("glance", "Every method at its best", all_methods_figure),
        Figure("accuracy", "Learned features beside fixed ones (Figure 1)", accuracy_figure),
        Figure("bound", "Where the bound of Theorem 2 binds", bound_figure),
    ),
)
