"""Linearised modules against explicit Jacobians, finite differences, long gradient descent and small Euler steps, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import cases
import zoo
from unlazy import InputError, Unsupported, tangent_kernel
from unlazy.kernels.capture import call_model
from unlazy.kernels.jacobian import rows_by_sample
from unlazy.models.build import build, build_stack
from unlazy.models.gates import HardGate
from unlazy.models.spec import NetSpec
from unlazy.training.linearised import Linearised, linearise


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def jacobian(model: nn.Module, x, names: tuple[str, ...]) -> Tensor:
    """``[n, outputs, p]``: one backward pass per sample and output, in the order of the names."""
    with torch.no_grad():
        size = call_model(model, x).shape[1]
    parameters = [model.get_parameter(name) for name in names]
    return rows_by_sample(model, x, parameters, torch.eye(size, dtype=torch.float64))


def on(linear: Linearised, x) -> Tensor:
    return call_model(linear, x)


def moved(linear: Linearised, displacement: Tensor) -> Linearised:
    with torch.no_grad():
        linear.displacement.copy_(displacement)
    return linear


# --- the module ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_module_moves_along_its_jacobian(name: str) -> None:
    model, x = zoo.build(name)
    linear = linearise(model)
    rows, start = jacobian(model, x, linear.names), call_model(model, x).detach()
    close(on(linear, x).detach(), start)
    moved(linear, drawn(*linear.displacement.shape))
    close(on(linear, x).detach(), start + rows @ linear.displacement.detach())


@pytest.mark.parametrize("name", zoo.ZOO)
def test_gradients_by_the_displacement_are_the_jacobian(name: str) -> None:
    """J^T of any cotangent, and nothing is left on the copy."""
    model, x = zoo.build(name)
    linear = moved(linearise(model), drawn(*linearise(model).displacement.shape))
    rows = jacobian(model, x, linear.names)
    weights = drawn(*rows.shape[:2], seed=1)
    (on(linear, x) * weights).sum().backward()
    close(linear.displacement.grad, torch.einsum("nop,no->p", rows, weights))
    assert [p for p in linear.parameters() if p.requires_grad] == [linear.displacement]
    assert all(p.grad is None for p in linear.jacobian.parameters())


@pytest.mark.parametrize(
    "name", ["scalar_output", "reused_layer", "weight_norm", "attention", "recurrent", "embedding"]
)
def test_what_is_left_out_is_of_second_order(name: str) -> None:
    """|f(theta_0 + h d) - f_lin| / h^2 is the same for every small h: with half the step a quarter is left."""
    model, x = zoo.build(name)
    linear = linearise(model)
    d, start = drawn(*linear.displacement.shape), linear.jacobian.vector()
    if name == "embedding":
        d[:4] = 0  # the padding row has no gradient
    errors = []
    for step in (1e-3, 5e-4):
        moved(linear, step * d)
        with torch.no_grad():
            for key, value in linear.theta().items():
                model.get_parameter(key).copy_(value)
            errors.append(float((call_model(model, x) - on(linear, x)).norm()))
    close(linear.jacobian.vector(), start)
    assert errors[0] > 1e-9
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.02)


def test_a_model_linear_in_its_parameters_is_its_own_linearisation() -> None:
    random_features = cases.net("relu"), "readout.*"
    for model, parameters in [(nn.Linear(2, 3).double(), "all"), random_features]:
        x, linear = drawn(7, 2), linearise(model, parameters=parameters)
        moved(linear, drawn(*linear.displacement.shape, seed=5))
        with torch.no_grad():
            for name, value in linear.theta().items():
                model.get_parameter(name).copy_(value)
        close(on(linear, x).detach(), model(x).detach(), 1e-12)


def test_padding_met_only_later_does_not_move() -> None:
    """Forward mode would move the padding row; the samples that the first call is checked on hold none."""
    model, _ = zoo.build("embedding")
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 1, 0]])
    linear = moved(linearise(model), drawn(*linearise(model).displacement.shape))
    expected = model(tokens) + jacobian(model, tokens, linear.names) @ linear.displacement
    close(on(linear, tokens).detach(), expected.detach())


@pytest.mark.parametrize(
    ("name", "forward_mode"), [("mlp", True), ("conv2d", True), ("attention", True), ("weight_norm", False)]
)
def test_which_way_is_taken(name: str, forward_mode: bool) -> None:
    model, x = zoo.build(name)
    linear = linearise(model)
    on(linear, x)
    assert linear.jacobian._forward_mode == forward_mode


def test_single_precision_recurrence() -> None:
    model, x = zoo.build("recurrent")
    linear = linearise(model.float())
    moved(linear, drawn(*linear.displacement.shape).float())
    exact, wide = linearise(model.double()), x
    moved(exact, drawn(*exact.displacement.shape))
    torch.testing.assert_close(on(linear, x.float()).double(), on(exact, wide), rtol=1e-4, atol=1e-4)


class Lying(torch.autograd.Function):
    """x^2 with the right gradient and the wrong forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**2

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient

    @staticmethod
    def jvp(ctx, tangent: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] * tangent


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Lying.apply(x)


def test_a_forward_mode_that_disagrees_with_the_gradient_is_not_taken() -> None:
    model, x = nn.Sequential(nn.Linear(2, 3), Square()).double(), drawn(4, 2)
    linear = moved(linearise(model), drawn(9))
    close((on(linear, x) - model(x)).detach(), jacobian(model, x, linear.names) @ drawn(9))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class OnceDifferentiable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(x)


def test_what_has_only_a_gradient_is_named_and_still_solved() -> None:
    model = nn.Sequential(nn.Linear(2, 3), OnceDifferentiable(), nn.Linear(3, 1)).double()
    x, y = drawn(5, 2), drawn(5, 1, seed=1)
    linear = linearise(model)
    with pytest.raises(Unsupported, match=r"OnceDifferentiable.*flow"):
        linear(x)
    close(linear.flow(x, y).outputs([math.inf])[0], y, 1e-6)


# --- what it leaves alone ------------------------------------------------------------------------------------


def test_the_model_and_the_start_keep_apart() -> None:
    model, x = zoo.build("norms")
    model.train()
    state, random = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
    linear = linearise(model).train()
    before = on(linear, x).detach()
    close(before, zoo.build("norms")[0](x).detach())  # in evaluation mode, whatever the flag says
    optimiser = torch.optim.SGD(linear.parameters(), lr=0.1)
    (on(linear, x) - 1).square().mean().backward()
    optimiser.step()
    assert model.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        linear.displacement.zero_()
    close(on(linear, x).detach(), before)  # still the tangent at the old place


def test_frozen_parameters_stay_unless_named() -> None:
    model, x = zoo.build("mlp")
    model[0].weight.requires_grad_(False)
    assert linearise(model).names == ("0.bias", "2.weight", "2.bias", "4.weight", "4.bias")
    assert linearise(model, parameters=["*.bias"]).names == ("0.bias", "2.bias", "4.bias")
    linear = linearise(model, parameters="0.weight")
    moved(linear, drawn(20))
    rows = jacobian(model, x, ("0.weight",))
    close((on(linear, x) - model(x)).detach(), rows @ drawn(20))
    assert not model[0].weight.requires_grad


# --- least squares -------------------------------------------------------------------------------------------


def explicit(model: nn.Module, x, names: tuple[str, ...], y: Tensor, ridge: float) -> Tensor:
    rows = jacobian(model, x, names).flatten(0, 1)
    residual = (y - call_model(model, x).detach()).flatten()
    if ridge == 0:
        return torch.linalg.lstsq(rows, residual, driver="gelsd", rcond=1e-7).solution
    shift = ridge * rows.square().sum() / len(rows)
    return torch.linalg.solve(rows.T @ rows + shift * torch.eye(rows.shape[1], dtype=rows.dtype), rows.T @ residual)


@pytest.mark.parametrize("ridge", [0.0, 0.01])
@pytest.mark.parametrize("route", ["kernel", "parameters"])
@pytest.mark.parametrize(
    "name", ["mlp", "conv2d", "conv2d_grouped_dilated", "recurrent", "experts", "embedding", "two_inputs"]
)
def test_solution_equals_explicit_least_squares(name: str, route: str, ridge: float) -> None:
    """Both routes, with more parameters than outputs and with fewer."""
    model, x = zoo.build(name)
    every = linearise(model).names
    for names in (every, [every[-1]]):
        linear = linearise(model, parameters=list(names))
        y = drawn(*call_model(model, x).shape, seed=2)
        expected = explicit(model, x, linear.names, y, ridge)
        assert linear.solve(x, y, ridge=ridge, route=route) is linear
        close(linear.displacement.detach(), expected, 1e-6)
        start, rows = call_model(model, x).detach(), jacobian(model, x, linear.names)
        close(on(linear, x).detach(), start + rows @ expected, 1e-6)
    sizes = [sum(model.get_parameter(key).numel() for key in names) for names in (every, [every[-1]])]
    assert sizes[0] > y.numel() > sizes[1]


def test_the_smaller_side_is_taken() -> None:
    model, x = zoo.build("mlp")
    y = drawn(5, 3)
    assert linearise(model).flow(x, y).problem.kernel
    assert not linearise(model, parameters="4.bias").flow(x, y).problem.kernel


@pytest.mark.parametrize(("parameters", "width", "n"), [("trainable", 16, 4), ("2.weight", 4, 9)])
def test_solution_is_where_long_gradient_descent_ends(parameters: str, width: int, n: int) -> None:
    """With more parameters than outputs, and with fewer: from theta_0 descent finds the solution of least norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).double()
    x, y = drawn(n, 3), drawn(n, 2, seed=1)
    trained, solved = (linearise(model, parameters=parameters) for _ in range(2))
    curvature = float(solved.solve(x, y).flow(x, y).values[-1])
    optimiser = torch.optim.SGD(trained.parameters(), lr=1 / curvature, momentum=0.9)
    for _ in range(600):
        optimiser.zero_grad()
        ((trained(x) - y).square().sum() / 2).backward()
        optimiser.step()
    close(trained.displacement.detach(), solved.displacement.detach(), 1e-6)


def test_any_loss_and_optimiser() -> None:
    """Adam on cross-entropy, step by step as on an explicit linear model."""
    model, x = zoo.build("mlp")
    labels, linear = torch.tensor([0, 2, 1, 1, 0]), linearise(model)
    rows, start = jacobian(model, x, linear.names), model(x).detach()
    plain = torch.zeros(rows.shape[-1], dtype=torch.float64, requires_grad=True)
    optimisers = [torch.optim.Adam([vector], lr=0.02) for vector in (linear.displacement, plain)]
    losses = []
    for _ in range(60):
        for optimiser, output in zip(optimisers, (linear(x), start + rows @ plain), strict=True):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(output, labels)
            loss.backward()
            optimiser.step()
        losses.append(float(loss.detach()))
    close(linear.displacement.detach(), plain.detach())
    assert losses[-1] < losses[0] / 3


def test_single_precision_models_are_solved_in_double() -> None:
    """Their kernel in float32 would lose its small eigenvalues: the same numbers in both precisions give the same solution."""
    model, x = zoo.build("conv2d")
    narrow, small, y = model.float(), x.float(), drawn(5, 3)
    linear = linearise(narrow).solve(small, y.float())
    assert linear.displacement.dtype == next(narrow.parameters()).dtype == torch.float32
    expected = explicit(narrow.double(), small.double(), linear.names, y.float().double(), 0.0)
    torch.testing.assert_close(linear.displacement.detach().double(), expected, rtol=1e-5, atol=1e-6)
    assert linearise(narrow.float()).flow(small, y.float()).outputs([1.0], small).dtype == torch.float64


# --- gradient flow -------------------------------------------------------------------------------------------


def euler(linear: Linearised, x: Tensor, y: Tensor, time: float, steps: int) -> Tensor:
    optimiser = torch.optim.SGD(linear.parameters(), lr=time / steps)
    for _ in range(steps):
        optimiser.zero_grad()
        (linear(x) - y).square().mean().backward()
        optimiser.step()
    return linear.displacement.detach()


@pytest.mark.parametrize("parameters", ["trainable", "*.bias"])
def test_flow_is_the_limit_of_small_steps(parameters: str) -> None:
    """Euler's error is of first order: half the step, half the error; extrapolated, a thousandth is left."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x, y, time = drawn(6, 2), drawn(6, 2, seed=3), 1.5
    exact = linearise(model, parameters=parameters).flow(x, y).displacement([time])[0]
    coarse, fine = (euler(linearise(model, parameters=parameters), x, y, time, steps) for steps in (100, 200))
    errors = [float((found - exact).norm()) for found in (coarse, fine)]
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.05)
    assert float((2 * fine - coarse - exact).norm()) < 0.01 * errors[1]


@pytest.mark.parametrize("route", ["kernel", "parameters"])
def test_trajectories_at_many_times_and_new_points(route: str) -> None:
    model, x = zoo.build("conv2d")
    y, new = drawn(5, 3, seed=4), drawn(3, 2, 6, 5, seed=5)
    linear = linearise(model)
    flow, times = linear.flow(x, y, route=route), [0.0, 0.03, 1.0, 30.0, math.inf]
    path, at_new, at_own = flow.displacement(times), flow.outputs(times, new), flow.outputs(times)
    for displacement, new_outputs, own_outputs in zip(path, at_new, at_own, strict=True):
        moved(linear, displacement)
        close(on(linear, new).detach(), new_outputs, 1e-7)
        close(on(linear, x).detach(), own_outputs, 1e-7)
    close(path[0], torch.zeros_like(path[0]))
    close(path[-1], linear.solve(x, y).displacement.detach(), 1e-7)
    losses = (at_own - y).square().mean((1, 2))
    assert (losses.diff() < 0).all()
    close(flow.outputs(torch.tensor([1.0]), new)[0], at_new[2])


def test_flow_on_training_points_is_the_matrix_exponential() -> None:
    model, x = zoo.build("mlp")
    y, start = drawn(5, 3, seed=6), model(x).detach()
    kernel = tangent_kernel(model, x, outputs="full").permute(0, 2, 1, 3).reshape(15, 15)
    decay = torch.linalg.matrix_exp(-2 / 15 * 0.7 * kernel)
    expected = y.flatten() + decay @ (start - y).flatten()
    close(linearise(model).flow(x, y).outputs([0.7])[0].flatten(), expected)


# --- gated networks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.SPECS)
def test_our_networks(name: str) -> None:
    net, x = cases.net(name), cases.points(name)
    linear = linearise(net, parameters="all")
    moved(linear, drawn(*linear.displacement.shape))
    exact = net if net.has_exact_gradient() else net.hard()
    rows = jacobian(exact, x, linear.names)
    close(on(linear, x).detach(), net(x).detach() + rows @ linear.displacement.detach())
    close(rows.flatten(1) @ rows.flatten(1).T, tangent_kernel(net, x, parameters="all"))
    y = drawn(*net(x).shape, seed=1)
    for route in ("kernel", "parameters"):
        close(linear.solve(x, y, route=route).displacement.detach(), explicit(exact, x, linear.names, y, 0.0), 1e-5)


@pytest.mark.parametrize("gate", [HardGate(4.0), HardGate(None)])
def test_hard_gates_move_values_only(gate: HardGate) -> None:
    net = build(NetSpec(2, width=3, depth=2, gate=gate), dtype=torch.float64)
    assert linearise(net).names == tuple(name for name, _ in net.branch("value"))
    with pytest.raises(Unsupported, match="locally constant"):
        linearise(net, parameters="gate")


def test_a_soft_backward_is_no_derivative() -> None:
    """A ReLU network with a soft backward is the same function: its tangent is that of a plain one."""
    x, results = drawn(6, 2), []
    for gate in (HardGate(4.0), HardGate(None)):
        net = build(NetSpec(2, gating="own", gate=gate, width=4, depth=2), dtype=torch.float64)
        linear = linearise(net)
        results.append(on(moved(linear, drawn(*linear.displacement.shape)), x).detach())
    close(*results)


# --- what is refused -----------------------------------------------------------------------------------------


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


def test_what_cannot_be_computed_says_why() -> None:
    model, x = zoo.build("mlp")
    linear, y = linearise(model), drawn(5, 3)
    with pytest.raises(InputError, match=r"targets must be \(5, 3\)"):
        linear.solve(x, drawn(5, 2))
    with pytest.raises(InputError, match="ridge"):
        linear.solve(x, y, ridge=-1.0)
    with pytest.raises(InputError, match="larger ridge"):
        linear.solve(torch.cat([x, x]), torch.cat([y, y]), ridge=1e-20, route="kernel")
    with pytest.raises(InputError, match="route"):
        linear.solve(x, y, route="some")
    with pytest.raises(InputError, match="optimiser"):
        linear.solve(x, y, memory=1000)
    with pytest.raises(InputError, match="times"):
        linear.flow(x, y).outputs([-1.0])
    with pytest.raises(InputError, match="no samples"):
        linear.solve(x[:0], y[:0])
    with pytest.raises(Unsupported, match="no trainable parameters"):
        linearise(nn.ReLU())
    with pytest.raises(InputError, match="one tensor"):
        linearise(Pair(4, 2).double())(x)
    with pytest.raises(Unsupported, match="member"):
        linearise(build_stack(cases.SPECS["relu"], [0, 1]))


def test_columns_of_one_output_may_be_a_vector() -> None:
    model, x = zoo.build("scalar_output")
    y = drawn(5, seed=8)
    a, b = linearise(model).solve(x, y), linearise(model).solve(x, y[:, None])
    close(a.displacement.detach(), b.displacement.detach())
    assert a(x).shape == model(x).shape == (5,)
