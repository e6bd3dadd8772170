"""Kernels against their slow twins, closed forms and properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import cases
from unlazy import (
    InputError,
    Unsupported,
    alignment,
    effective_rank,
    kernel_distance,
    overlap_kernel,
    path_count,
    relative_change,
    tangent_kernel,
)
from unlazy.kernels import reference
from unlazy.kernels.compare import (
    centered_alignment,
    kernel_velocity,
    label_kernel,
    regression_loss,
    spectrum,
    top_normalise,
    trace_normalise,
)
from unlazy.kernels.overlap import neural_path_kernel
from unlazy.kernels.regression import kernel_regression
from unlazy.models.build import build_stack, member
from unlazy.models.gates import HardGate
from unlazy.models.spec import NetSpec

EXACT = [name for name, spec in cases.SPECS.items() if spec.gate != cases.SPECS["dlgn-hard"].gate]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", EXACT)
def test_tangent_kernel_equals_one_backward_per_sample(name: str) -> None:
    net, x = cases.net(name), cases.points(name)
    slow = reference.tangent_kernel(net, x)
    close(tangent_kernel(net, x, outputs="full"), slow)
    close(tangent_kernel(net, x), slow.diagonal(dim1=2, dim2=3).sum(-1))


def test_tangent_kernel_of_a_foreign_module() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)).double()
    x = torch.randn(5, 1, 6, dtype=torch.float64)
    close(tangent_kernel(net, x, outputs="full"), reference.tangent_kernel(net, x))


def test_tangent_kernel_of_a_stack_is_that_of_its_members() -> None:
    stack = build_stack(cases.SPECS["pwc"], [0, 1, 2], [4.0, 10.0, 30.0], dtype=torch.float64)
    x = cases.points("pwc")
    kernels = tangent_kernel(stack, x)
    for i in range(3):
        close(kernels[i], tangent_kernel(member(stack, i), x))
    with pytest.raises(InputError, match="no more"):
        tangent_kernel(stack, x, precision="float64")


def test_frozen_parameters_count_only_when_asked_for() -> None:
    net, x = cases.net("dlgn-frozen"), cases.points("dlgn-frozen")
    close(tangent_kernel(net, x), tangent_kernel(net, x, parameters="value"))
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    everything = reference.tangent_kernel(net, x).diagonal(dim1=2, dim2=3).sum(-1)
    for _, parameter in net.branch("gate"):
        parameter.requires_grad_(False)
    close(tangent_kernel(net, x, parameters="all"), everything)


def test_gate_and_value_parts_add_up() -> None:
    net, x = cases.net("dlgn"), cases.points("dlgn")
    parts = tangent_kernel(net, x, parameters="gate") + tangent_kernel(net, x, parameters="value")
    close(parts, tangent_kernel(net, x))


def test_hard_gates_have_the_value_kernel_and_a_labelled_surrogate() -> None:
    net, x = cases.net("dlgn-hard"), cases.points("dlgn-hard")
    exact = tangent_kernel(net, x)
    close(exact, tangent_kernel(net, x, parameters="value"))
    assert not torch.allclose(exact, tangent_kernel(net, x, surrogate=True))
    step = 1e-6  # the exact kernel is that of the function: a finite difference sees no gate gradient
    before = net(x).detach()
    with torch.no_grad():
        net.gate_layers[0].weight += step
    close(net(x).detach(), before)


def test_looking_leaves_nothing_behind() -> None:
    net, x = cases.net("dlgn-frozen"), cases.points("dlgn-frozen")
    net.train()
    flags = [parameter.requires_grad for parameter in net.parameters()]
    state = torch.get_rng_state()
    tangent_kernel(net, x)
    overlap_kernel(net, x)
    assert net.training
    assert flags == [parameter.requires_grad for parameter in net.parameters()]
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", cases.SPECS)
def test_overlap_kernel_counts_common_paths(name: str) -> None:
    net, x = cases.net(name), cases.points(name)
    slow = reference.overlap_kernel(net.gates(x).hard())
    assert torch.equal(overlap_kernel(net, x), slow)
    assert torch.equal(path_count(net, x), slow.diagonal())
    assert torch.equal(overlap_kernel(net, x[:3], x[3:]), slow[:3, 3:])


@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_overlap_kernel_is_positive_and_bounded_by_its_diagonal(seed: int) -> None:
    net, x = cases.net("pwc", seed), cases.points("pwc", seed=seed)
    kernel = overlap_kernel(net, x)
    assert torch.linalg.eigvalsh(kernel).min() > -1e-9
    diagonal = kernel.diagonal()
    assert (kernel <= torch.minimum(diagonal[:, None], diagonal[None, :])).all()


def test_overlap_is_blind_to_the_order_of_units() -> None:
    gates = [
        gate[:, torch.randperm(3, generator=torch.Generator().manual_seed(0))]
        for gate in cases.net("pwc").gates(cases.points("pwc")).hard()
    ]
    assert torch.equal(reference.overlap_kernel(gates), overlap_kernel(cases.net("pwc"), cases.points("pwc")))


def test_unreadable_modules_are_refused() -> None:
    with pytest.raises(Unsupported, match="Linear"):
        overlap_kernel(nn.Linear(2, 1), torch.zeros(1, 2))
    with pytest.raises(Unsupported, match="no trainable parameters"):
        tangent_kernel(nn.ReLU(), torch.zeros(3, 2))
    with pytest.raises(InputError, match="trace"):
        tangent_kernel(cases.net("relu"), cases.points("relu"), outputs="some")


# --- comparing -----------------------------------------------------------------------------------


def random_kernel(seed: int, n: int = 6, rank: int = 4) -> torch.Tensor:
    rows = torch.randn(n, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows @ rows.T


def test_trace_normalised_kernels_have_mean_diagonal_one() -> None:
    kernel = random_kernel(0)
    close(trace_normalise(kernel).diagonal().mean(), torch.tensor(1.0, dtype=torch.float64))
    close(trace_normalise(5 * kernel), trace_normalise(kernel))


def test_distance_and_change_in_closed_form() -> None:
    identity, ones = torch.eye(4, dtype=torch.float64), torch.ones(4, 4, dtype=torch.float64)
    close(kernel_distance(identity, 3 * identity), torch.tensor(0.0, dtype=torch.float64))
    close(kernel_distance(identity, ones), torch.tensor(0.5, dtype=torch.float64))  # cosine 4 / (2 * 4)
    close(relative_change(ones, identity), torch.tensor(12**0.5 / 2, dtype=torch.float64))
    stacked = torch.stack([identity, ones])
    close(kernel_distance(stacked, identity.expand(2, 4, 4))[1], kernel_distance(ones, identity))


def test_alignments_equal_their_definitions() -> None:
    kernel, y = random_kernel(1), torch.randn(6, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    target = y @ y.T
    close(alignment(kernel, y), (kernel * target).sum() / (kernel.norm() * target.norm()))
    h = torch.eye(6, dtype=torch.float64) - 1 / 6
    a, b = h @ kernel @ h, h @ target @ h
    close(centered_alignment(kernel, y), (a * b).sum() / (a.norm() * b.norm()))
    close(centered_alignment(kernel + 3, y), centered_alignment(kernel, y))  # constants do not count


def test_both_label_kernels_are_products_of_columns() -> None:
    end, start = torch.randn(2, 3, 5, 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    single = torch.stack([torch.outer(column, column) for column in end[0].T]).sum(0)
    close(label_kernel(end[0]), single)
    close(label_kernel(end)[0], single)  # a stack of networks at once
    change = end[0] - start[0]
    close(label_kernel(end, "change", start=start)[0], torch.einsum("no,mo->nm", change, change))
    close(label_kernel(end[0], "change", start=torch.zeros_like(end[0])), label_kernel(end[0]))
    close(label_kernel(end[0, :, 0]), torch.outer(end[0, :, 0], end[0, :, 0]))
    close(label_kernel(end[0, :, 0], "change", start=end[0, :, 1]), label_kernel(end[0, :, 0] - end[0, :, 1]))


def test_the_change_of_a_linear_model_lies_along_its_kernel() -> None:
    """One step of gradient descent on y moves the outputs by K (y - f_0): the change kernel is K r r^T K."""
    random = torch.Generator().manual_seed(7)
    model = nn.Linear(3, 1).double()
    x, y = (torch.randn(5, size, generator=random, dtype=torch.float64) for size in (3, 1))
    start, kernel = model(x).detach(), tangent_kernel(model, x)
    (model(x) - y).square().sum().div(2).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
    step = kernel @ (y - start)
    close(label_kernel(model(x).detach(), "change", start=start), step @ step.T)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        (("some",), {}, "'targets' or 'change'"),
        (("change",), {}, "start=f_0"),
        (("targets",), {"start": torch.ones(3, 1)}, "belongs to"),
        (("change",), {"start": torch.ones(2, 1)}, "must match"),
    ],
)
def test_label_kernels_say_what_they_miss(arguments: tuple, options: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        label_kernel(torch.ones(3, 1), *arguments, **options)


def test_effective_rank_of_known_spectra() -> None:
    close(effective_rank(torch.eye(5, dtype=torch.float64)), torch.tensor(5.0, dtype=torch.float64))
    rank_one = torch.ones(5, 5, dtype=torch.float64)
    torch.testing.assert_close(effective_rank(rank_one), torch.tensor(1.0, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_ranks_of_a_known_spectrum() -> None:
    kernel = torch.diag(torch.tensor([4.0, 2.0, 2.0, 0.0], dtype=torch.float64))
    assert spectrum(kernel).tolist() == [4.0, 2.0, 2.0, 0.0]
    assert float(effective_rank(kernel, "participation")) == pytest.approx(64 / 24)
    assert float(effective_rank(kernel, "stable")) == pytest.approx(2.0)
    assert float(effective_rank(kernel)) == pytest.approx(2 ** (0.5 * 1 + 0.25 * 2 * 2))  # entropy 1.5 bits
    close(top_normalise(kernel), kernel / 4)
    with pytest.raises(InputError, match="participation"):
        effective_rank(kernel, "some")


def test_velocity_is_distance_over_time() -> None:
    a, b = random_kernel(1), random_kernel(2)
    close(kernel_velocity(a, b, 4.0), kernel_distance(a, b) / 4)
    with pytest.raises(InputError, match="later"):
        kernel_velocity(a, b, 0.0)


def test_kernel_regression_is_ridge_on_features() -> None:
    random = torch.Generator().manual_seed(5)
    features, new = (torch.randn(n, 4, generator=random, dtype=torch.float64) for n in (9, 3))
    y = torch.randn(9, 2, generator=random, dtype=torch.float64)
    kernel = features @ features.T
    ridge = 0.3 * float(kernel.diagonal().mean())
    weights = torch.linalg.solve(features.T @ features + ridge * torch.eye(4, dtype=torch.float64), features.T @ y)
    close(kernel_regression(kernel, y, new @ features.T, ridge=0.3), new @ weights)
    with pytest.raises(InputError, match="ridge"):
        kernel_regression(torch.ones(3, 3), torch.ones(3, 1), torch.ones(1, 3))


@pytest.mark.parametrize("experts", ["linear", "constant"])
def test_expected_value_kernel_is_the_neural_path_kernel(experts: str) -> None:
    """E[tangent kernel of the value weights | gates] = L s^(2 (L - 1)) H, at any width: over many draws of the values."""
    spec = NetSpec(3, experts=experts, width=4, depth=2, gate_bias=False, value_bias=False, gate=HardGate(None))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stack = build_stack(spec, list(range(6000)), dtype=torch.float64)
    with torch.no_grad():  # the same gates in every member, fresh values of variance s^2
        random = torch.Generator().manual_seed(1)
        for name, parameter in stack.named_parameters():
            if name.startswith("gate_layers"):
                parameter.copy_(parameter[:1].expand_as(parameter).clone())
            else:
                parameter.copy_(0.7 * torch.randn(parameter.shape, generator=random, dtype=torch.float64))
    draws = tangent_kernel(stack, x, parameters="value")
    expected = 3 * 0.7**4 * neural_path_kernel(member(stack, 0), x)
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - expected).abs() <= 5 * error + 1e-12).all()
    assert float(expected.abs().max()) > 20 * float(error.max())  # the test can tell a wrong constant


def test_regression_loss_equals_least_squares() -> None:
    kernel, y = random_kernel(3), torch.randn(6, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    fitted = kernel @ torch.linalg.lstsq(kernel, y, driver="gelsd").solution
    torch.testing.assert_close(regression_loss(kernel, y), (fitted - y).square().mean(), rtol=1e-8, atol=1e-10)
    close(regression_loss(torch.eye(6, dtype=torch.float64), y), torch.tensor(0.0, dtype=torch.float64))
