"""One seed of the fixed-features study: settings, and the measurements its jobs make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.data.patterns import Patterns, PatternSample
from unlazy.models.truncated import Phase, TruncatedNet, smoothed_slope, train
from unlazy.runtime import stream
from unlazy.studies.emergence.common import Size, Values, accuracy, first_steps
from unlazy.studies.emergence.fixed_features.methods import (
    Split,
    descend_in_function_space,
    descend_linearised,
    infinite_kernel,
    least_hinge_in_ball,
    linearised_kernel,
    random_cosines,
    random_neurons,
    ridge_on_features,
    ridge_on_kernel,
)
from unlazy.theory.bounds import fixed_feature_bound
from unlazy.training.recursive_features import recursive_features, top_directions

KINDS = ("structured", "unstructured")


@dataclass(frozen=True)
class Settings(Size):
    """One scale. ``blind_seeds``: seeds on unstructured data; ``followed``: seeds whose fixed methods are followed step by
    step; ``wide``: the most random features; ``machine_*``: the recursive feature machine; ``bound_*``: the setting in which
    Theorem 2 binds."""

    samples: int = 6_000
    validation: int = 2_000
    steps: int = 2_008  # the paper's T = m^(4/3)
    batch: int = 250
    blind_seeds: int = 10
    followed: int = 1
    outer_rate: float = 0.1
    linear_rate: float = 0.01
    every: int = 100
    widths: tuple[int, ...] = (2_000,)
    wide: int = 20_000
    wide_seeds: int = 5
    machine_samples: int = 3_000
    machine_rounds: int = 3
    plain_seeds: int = 3
    plain_steps: int = 2_008
    bound_patterns: int = 176
    bound_relevant: int = 11
    bound_features: int = 600
    bound_norm: float = 10.0
    bound_samples: int = 10_000
    bound_sets: int = 20
    bound_network_seeds: int = 3
    bound_steps: int = 2_008
    bound_outer_rate: float = 0.3


SCALES = {
    "smoke": Settings(
        seeds=2,
        inputs=60,
        patterns=20,
        relevant=3,
        pairs=20,
        samples=300,
        tests=200,
        validation=100,
        steps=20,
        batch=50,
        every=10,
        blind_seeds=2,
        widths=(50,),
        wide=500,
        wide_seeds=1,
        machine_samples=200,
        machine_rounds=1,
        plain_seeds=1,
        plain_steps=10,
        bound_patterns=40,
        bound_relevant=5,
        bound_features=10,
        bound_norm=1.0,
        bound_samples=300,
        bound_sets=2,
        bound_network_seeds=1,
        bound_steps=20,
    ),
    "desk": Settings(
        seeds=3,
        samples=3_000,
        steps=800,
        every=50,
        blind_seeds=1,
        wide=8_000,
        wide_seeds=1,
        machine_samples=1_500,
        plain_seeds=1,
        bound_sets=5,
        bound_samples=4_000,
        bound_network_seeds=1,
        bound_steps=800,
    ),
    "paper": Settings(seeds=10, followed=5),
}


def _samples(settings: Settings, kind: str, seed: int) -> tuple[Patterns, PatternSample, PatternSample]:
    patterns = settings.data(seed, kind == "structured")
    return patterns, patterns.draw(settings.samples), patterns.draw(settings.tests, "test")


def _float32_batches(sample: PatternSample, batch: int, seed: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Rows drawn with replacement, the same at step t for every method."""
    phi, y = sample.phi.float(), sample.y.float()

    def rows(step: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(0, len(sample), (batch,), generator=stream(seed, "batch", step))
        return phi[chosen], y[chosen]

    return rows


def _train_on(
    settings: Settings,
    patterns: Patterns,
    sample: PatternSample,
    seed: int,
    phase: Phase,
    watch: Callable[[int, TruncatedNet], None],
) -> TruncatedNet:
    """Two full-gradient steps in float64, then a third phase on mini-batches in float32."""
    two = first_steps(settings.start(patterns, seed), settings.schedule(patterns), sample)
    for number, net in enumerate(two[:2]):
        watch(number, net.to(torch.float32))
    batches = _float32_batches(sample, settings.batch, seed)
    weights = torch.full((settings.batch,), 1 / settings.batch)
    return train(
        two[2].to(torch.float32), (phase,), lambda step: (*batches(step), weights), lambda t, net: watch(t + 2, net)
    )


def network(settings: Settings, kind: str, seed: int) -> Values:
    """The network, and its linearisation and random features trained on the same batches: test accuracy against steps."""
    patterns, sample, test = _samples(settings, kind, seed)
    phi, y = test.phi.float(), test.y.float()
    third = settings.schedule(patterns, steps=settings.steps, outer_rate=settings.outer_rate)[2]
    curves: dict[str, list[list[float]]] = {"network": [], "linearised": [], "random": []}

    def watch(step: int, net: TruncatedNet) -> None:
        if step <= 2 or step % settings.every == 0 or step == settings.steps + 2:
            curves["network"].append([step, accuracy(net(phi), y)])

    net = _train_on(settings, patterns, sample, seed, third, watch)
    start = settings.start(patterns, seed).to(torch.float32)
    for name, outer_only, rate in (("linearised", False, settings.linear_rate), ("random", True, settings.outer_rate)):
        if seed >= settings.followed:
            continue

        def look(step: int, function: Callable[[Tensor], Tensor], name: str = name) -> None:
            if step % settings.every == 0 or step == settings.steps:
                curves[name].append([step, accuracy(function(phi), y)])

        batches = _float32_batches(sample, settings.batch, seed)
        descend_linearised(start, batches, settings.steps, rate, look, outer_only=outer_only)
    output = net(phi)
    uniform = test.uniform
    return {
        "curves": curves,
        "accuracy": accuracy(output, y),
        "accuracy_uniform": accuracy(output[uniform], y[uniform]),
        "hinge": float((1 - y * output).clamp_min(0).mean()),
        "counting": accuracy(test.phi[:, patterns.is_relevant()].sum(1), test.y),
    }


def gradient_product(net: TruncatedNet, phi: Float[Tensor, "n D"]) -> Float[Tensor, "D D"]:
    """The average gradient outer product of g by its input, over these rows."""
    rows = (smoothed_slope(net.before(phi), 0.0) * net.a) @ net.w
    return rows.T @ rows / len(phi)


def _star_cosine(product: Float[Tensor, "D D"], patterns: Patterns) -> float:
    """Size of the cosine between the top eigenvector and the sum of the relevant patterns."""
    star = patterns.is_relevant().to(torch.float64) / patterns.relevant**0.5
    return float((top_directions(product.double(), 1)[:, 0] @ star).abs())


def infinite(settings: Settings, kind: str, seed: int) -> Values:
    """Unboundedly many neurons: tuned ridge with their kernel, and for followed seeds descent on the network's batches."""
    patterns, sample, test = _samples(settings, kind, seed)
    held = patterns.draw(settings.validation, "validation")
    y = Split(sample.y.float(), held.y.float(), test.y.float())
    kernel, across_held, across = (infinite_kernel(patterns, part.phi, sample.phi) for part in (sample, held, test))
    fit = ridge_on_kernel(kernel, across_held, across, y)
    uniform, curve = test.uniform, list[list[float]]()

    def look(step: int, coefficients: Tensor) -> None:
        if step % settings.every == 0 or step == settings.steps:
            curve.append([step, accuracy(across @ coefficients, y.test)])

    def rows(step: int) -> Tensor:
        return torch.randint(0, len(sample), (settings.batch,), generator=stream(seed, "batch", step))

    if seed < settings.followed:
        descend_in_function_space(kernel, y.train, rows, settings.steps, look)
    return {
        "infinite": fit.test,
        "infinite_ridge": fit.ridge,
        "infinite_uniform": accuracy(fit.output[uniform], y.test[uniform]),
        "curve": curve,
    }


def gradients_of_network(settings: Settings, kind: str, seed: int) -> Values:
    """Where the top eigenvector of the network's own gradients points at steps 0, 1 and 2."""
    patterns, sample, test = _samples(settings, kind, seed)
    nets = first_steps(settings.start(patterns, seed), settings.schedule(patterns), sample)
    return {"cosines": [_star_cosine(gradient_product(net, test.phi), patterns) for net in nets]}


def fixed(settings: Settings, kind: str, seed: int) -> Values:
    """Ridge readouts of the linearised network, of its neurons at the start, and of more random neurons, in float32."""
    patterns, sample, test = _samples(settings, kind, seed)
    held = patterns.draw(settings.validation, "validation")
    y = Split(sample.y.float(), held.y.float(), test.y.float())
    parts = [part.phi.float() for part in (sample, held, test)]
    start = settings.start(patterns, seed).to(torch.float32)
    kernels = [linearised_kernel(start, part, parts[0]) for part in parts]
    fits = {"linearised": ridge_on_kernel(kernels[0], kernels[1], kernels[2], y)}
    half = settings.pairs  # the other half says the same
    frozen = TruncatedNet(start.w[:half], start.b[:half], start.a[:half])
    features: dict[str, Callable[[Tensor], Tensor]] = {"random": lambda phi: frozen.neurons(phi)}
    for width in settings.widths:
        features[f"random_{width}"] = random_neurons(patterns.patterns, width, patterns.relevant, seed)
    for name, function in features.items():
        seen = [function(part) for part in parts]
        fits[name] = ridge_on_features(seen[0], seen[1], seen[2], y)
    values: Values = {name: fit.test for name, fit in fits.items()}
    values |= {f"{name}_ridge": fit.ridge for name, fit in fits.items()}
    uniform = test.uniform
    return values | {f"{name}_uniform": accuracy(fit.output[uniform], y.test[uniform]) for name, fit in fits.items()}


def wide(settings: Settings, kind: str, seed: int) -> Values:
    """Ridge on the most random neurons, in float32."""
    patterns, sample, test = _samples(settings, kind, seed)
    held = patterns.draw(settings.validation, "validation")
    features = random_neurons(patterns.patterns, settings.wide, patterns.relevant, seed)
    parts = [features(part.phi.float()) for part in (sample, held, test)]
    fit = ridge_on_features(parts[0], parts[1], parts[2], Split(sample.y.float(), held.y.float(), test.y.float()))
    return {"wide": fit.test, "wide_ridge": fit.ridge}


def machine(settings: Settings, kind: str, seed: int) -> Values:
    """The recursive feature machine, round by round: test accuracy, and where the top eigenvector of its gradients points."""
    patterns, sample, test = _samples(settings, kind, seed)
    some = sample.take(slice(settings.machine_samples))
    accuracies, cosines = [], []
    for fitted in recursive_features(some.phi, some.y[:, None], rounds=settings.machine_rounds):
        accuracies.append(accuracy(fitted(test.phi)[:, 0], test.y))
        cosines.append(_star_cosine(fitted.agop(some.phi), patterns))
    return {
        "rounds": accuracies,
        "cosines": cosines,
        "laplace": accuracies[0],
        "machine": accuracies[-1],
        "machine_cosine": cosines[-1],
        "laplace_cosine": cosines[0],
    }


def plain(settings: Settings, kind: str, seed: int) -> Values:
    """The paper's own third phase, constants taken as one: plain descent of all parameters."""
    patterns, sample, test = _samples(settings, kind, seed)
    third = settings.schedule(patterns, steps=settings.plain_steps)[2]
    net = _train_on(settings, patterns, sample, seed, third, lambda step, net: None)
    output, y = net(test.phi.float()), test.y.float()
    return {"plain": accuracy(output, y), "plain_hinge": float((1 - y * output).clamp_min(0).mean())}


# --- where Theorem 2 binds ---------------------------------------------------------------------------


def _bound_data(settings: Settings, seed: int) -> Patterns:
    inputs = max(settings.inputs, settings.bound_patterns)
    return Patterns(inputs, settings.bound_patterns, settings.bound_relevant, seed=seed)


def ball(settings: Settings, seed: int) -> Values:
    """The least hinge loss over the ball for one random relevant set; the features are the same for every set."""
    size, k = settings.bound_patterns, settings.bound_relevant
    sample = _bound_data(settings, seed).draw(settings.bound_samples)
    values: Values = {
        "bound": fixed_feature_bound(
            features=settings.bound_features, norm=settings.bound_norm, patterns=size, relevant=k
        ).value
    }
    kinds = {
        "neurons": random_neurons(size, settings.bound_features, k),
        "cosines": random_cosines(size, settings.bound_features),
    }
    for name, features in kinds.items():
        found = least_hinge_in_ball(
            features(sample.phi.float()), sample.y.float(), settings.bound_norm, steps=300, smoothing=0.2
        )
        values |= {f"certified_{name}": found.certified, f"reached_{name}": found.reached}
    return values


def bound_network(settings: Settings, seed: int) -> Values:
    """The trained network's hinge loss on fresh rows of the same distribution.

    Twice the rows and batches, and a third phase that moves outer weights only: twelve counts need finer steps than six.
    """
    patterns, doubled = _bound_data(settings, seed), replace(settings, batch=2 * settings.batch)
    sample, test = patterns.draw(2 * settings.bound_samples), patterns.draw(settings.tests, "test")
    third = Phase(settings.bound_steps, 0.0, outer_rate=settings.bound_outer_rate)
    net = _train_on(doubled, patterns, sample, seed, third, lambda step, net: None)
    output, y = net(test.phi.float()), test.y.float()
    return {"network_hinge": float((1 - y * output).clamp_min(0).mean()), "network_accuracy": accuracy(output, y)}
