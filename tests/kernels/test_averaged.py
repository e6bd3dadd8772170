"""Path-averaged tangent kernels: the integral is the change, for every path, unless gates are hard."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from unlazy import DLGN, Dataset, HardGate, InputError, Member, Recipe, SoftGate, Unsupported, fit
from unlazy.kernels.averaged_tangents import (
    ParameterPath,
    averaged_tangents,
    linearisation_quality,
    member_states,
    signal_to_noise,
)
from unlazy.kernels.tangent import tangent_features, tangent_kernel
from unlazy.models.build import build
from unlazy.models.spec import relu_spec


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(seed: int, activation: nn.Module, outputs: int = 1) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 8), activation, nn.Linear(8, 8), copy.deepcopy(activation), nn.Linear(8, outputs))
    net = net.double()
    for number, parameter in enumerate(net.parameters()):
        parameter.data = draws(*parameter.shape, seed=100 * seed + number) / 2
    return net


def state(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


X = draws(9, 3, seed=7)
FIRST, LAST, MIDDLE = (network(seed, nn.Tanh(), 2) for seed in (1, 2, 3))


def test_averaged_features_are_the_mean_and_give_the_change() -> None:
    path = ParameterPath([state(FIRST), state(LAST)], points=24, rule="gauss")
    found = averaged_tangents(FIRST, path, X)
    with torch.no_grad():
        change = LAST(X) - FIRST(X)
    assert torch.allclose(found.change, change)
    assert torch.allclose(found.integral, change, atol=1e-8)
    mean: Tensor | float = 0.0
    worker = copy.deepcopy(FIRST)
    for node in path.nodes():
        worker.load_state_dict(node.state)
        mean = mean + node.weight * tangent_features(worker, X)
    assert torch.allclose(found.features, mean, atol=1e-12)
    assert torch.allclose(found.kernel(), torch.einsum("nop,mop->nm", mean, mean))
    cosine = (found.kernel() * (change @ change.T)).sum() / found.kernel().norm() / (change @ change.T).norm()
    assert found.similarity() == pytest.approx(float(cosine))


def test_features_times_the_step_are_the_change_on_a_line() -> None:
    """In parameter order, from gradients one by one: phi . (theta_T - theta_0) = f_T - f_0."""
    path = ParameterPath([state(FIRST), state(LAST)], points=24, rule="gauss")
    step = torch.cat([(b - a).flatten() for a, b in zip(FIRST.parameters(), LAST.parameters(), strict=True)]).detach()
    total = torch.zeros(9, 2, dtype=torch.float64)
    worker = copy.deepcopy(FIRST)
    for node in path.nodes():
        worker.load_state_dict(node.state)
        for i in range(9):
            for o in range(2):
                gradient = torch.autograd.grad(worker(X[i : i + 1])[0, o], list(worker.parameters()))
                total[i, o] += node.weight * torch.cat([g.flatten() for g in gradient]) @ step
    with torch.no_grad():
        assert torch.allclose(total, LAST(X) - FIRST(X), atol=1e-8)


def test_any_path_has_the_same_integral_but_not_the_same_features() -> None:
    line = averaged_tangents(FIRST, ParameterPath([state(FIRST), state(LAST)], 24, "gauss"), X)
    bent_path = ParameterPath([state(FIRST), state(MIDDLE), state(LAST)], 24, "gauss")
    bent = averaged_tangents(FIRST, bent_path, X)
    assert torch.allclose(bent.integral, line.change, atol=1e-7)
    assert not torch.allclose(bent.features, line.features, atol=1e-2)
    assert sum(node.weight for node in bent_path.nodes()) == pytest.approx(1)


def test_uniform_rule_converges_to_the_change() -> None:
    ends = [state(FIRST), state(LAST)]
    errors = []
    for points in (3, 12, 48):
        found = averaged_tangents(FIRST, ParameterPath(ends, points), X)
        errors.append(float((found.integral - found.change).norm()))
    assert errors[2] < 0.25 * errors[1] < 0.1 * errors[0]


def test_mean_explains_training_better_than_any_single_point() -> None:
    first, last = network(1, nn.ReLU()), network(2, nn.ReLU())
    path = ParameterPath([state(first), state(last)], points=50)
    single, mean = linearisation_quality(first, path, X)
    assert len(single) == 50
    assert mean > max(single) + 10
    assert mean == pytest.approx(averaged_tangents(first, path, X).signal_to_noise(), abs=1e-6)
    with torch.no_grad():
        worker = copy.deepcopy(first)
        step = {name: last.state_dict()[name] - tensor for name, tensor in first.state_dict().items()}
        change = torch.func.jvp(lambda at: torch.func.functional_call(worker, at, X), (state(first),), (step,))[1]
        assert single[0] == pytest.approx(signal_to_noise(last(X), first(X) + change))


def test_ends_of_the_path_are_the_ordinary_kernels() -> None:
    near = state(FIRST)
    near["4.bias"] = near["4.bias"] + 1e-9
    found = averaged_tangents(FIRST, ParameterPath([state(FIRST), near], 2), X)
    assert torch.allclose(found.kernel(), tangent_kernel(FIRST, X), rtol=1e-6)


def test_trajectory_of_a_run(tmp_path: object) -> None:
    """Checkpoints of a real training: both paths add up to what it learned."""
    data = Dataset("toy", X, X[:, :1].sin())
    spec = relu_spec(3, 1, width=8, depth=2)
    recipe = Recipe(spec, (Member(3, 0.01), Member(4, 0.01)), epochs=20, batch=9, dtype="float64", checkpoint_epochs=5)
    run = fit(recipe, data, [], f"{tmp_path}/run")
    saved = [line.step for line in run.lines if line.checkpoint is not None]
    states = member_states([run.checkpoint(step) for step in saved], member=1)
    assert len(states) == 5
    net = build(spec, dtype=torch.float64)
    net.load_state_dict(states[-1])
    real = averaged_tangents(net, ParameterPath(states, 12, "gauss"), X)
    line = averaged_tangents(net, ParameterPath([states[0], states[-1]], 48, "gauss"), X)
    with torch.no_grad():
        assert torch.equal(real.end, net(X))
    for found in (real, line):
        assert float((found.integral - found.change).norm() / found.change.norm()) < 0.01


def test_hard_gates_are_refused_and_soft_ones_are_not() -> None:
    start, end = DLGN(3, 1, width=4, depth=2).double(), DLGN(3, 1, width=4, depth=2, seed=1).double()
    ends = [state(start), state(end)]
    assert averaged_tangents(start, ParameterPath(ends, 30, "gauss"), X).signal_to_noise() > 60
    hard = DLGN(3, 1, width=4, depth=2, gate=HardGate()).double()
    with pytest.raises(Unsupported, match="jump"):
        averaged_tangents(hard, ParameterPath(ends), X)
    fixed = [ends[0], {n: ends[0][n] if n.startswith("gate") else t for n, t in ends[1].items()}]
    kept = averaged_tangents(hard, ParameterPath(fixed, 30, "gauss"), X, parameters="value")
    assert kept.signal_to_noise() > 100
    assert isinstance(start.settings.gate, SoftGate)


def test_wrong_paths_are_refused() -> None:
    ends = [state(FIRST), state(LAST)]
    with pytest.raises(InputError, match="beginning and an end"):
        ParameterPath(ends[:1])
    with pytest.raises(InputError, match="rule"):
        ParameterPath(ends, rule="simpson")
    with pytest.raises(InputError, match="not moved"):
        averaged_tangents(FIRST, ParameterPath([ends[0], ends[0]]), X)
    with pytest.raises(InputError, match="same names"):
        ParameterPath([ends[0], {}])
    with pytest.raises(InputError, match="not among the chosen"):
        averaged_tangents(FIRST, ParameterPath(ends), X, parameters="0.weight")
    with pytest.raises(InputError, match="straight line"):
        linearisation_quality(FIRST, ParameterPath([*ends, ends[0]]), X)
