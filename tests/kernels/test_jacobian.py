"""J v, J^T u and rows of J against a Jacobian built row by row from single derivatives, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zoo
from unlazy import Unsupported
from unlazy.kernels.capture import call_model, evaluation_mode
from unlazy.kernels.jacobian import (
    ModuleJacobian,
    choose_jvp,
    double_backward_jvp,
    forward_mode_jvp,
    jvp_at,
    rows_by_sample,
    rows_by_vmap,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_jacobian(model: nn.Module, x, names: list[str]) -> Tensor:
    """``[n, outputs, p]``, one number of one sample's output after another, each by its own backward pass."""
    rows = []
    with evaluation_mode(model):
        for i in range(zoo_samples(x)):
            for o in range(call_model(model, one(x, i)).shape[1]):
                model.zero_grad()
                call_model(model, one(x, i))[0, o].backward()
                own = [model.get_parameter(name) for name in names]
                rows.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in own]))
    model.zero_grad()
    return torch.stack(rows).unflatten(0, (zoo_samples(x), -1)).detach()


def zoo_samples(x) -> int:
    return len(next(iter(x.values())) if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x)


def one(x, i: int):
    if isinstance(x, dict):
        return {name: leaf[i : i + 1] for name, leaf in x.items()}
    return tuple(leaf[i : i + 1] for leaf in x) if isinstance(x, tuple) else x[i : i + 1]


def split(model: nn.Module, names: list[str], vector: Tensor) -> dict[str, Tensor]:
    own = [model.get_parameter(name) for name in names]
    return {n: v.view_as(p) for n, v, p in zip(names, vector.split([p.numel() for p in own]), own, strict=True)}


@pytest.mark.parametrize("name", zoo.ZOO)
def test_products_and_rows_are_those_of_the_slow_jacobian(name: str) -> None:
    model, x = zoo.build(name)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    expected = slow_jacobian(model, x, names)
    jacobian = ModuleJacobian(model, names)
    v, u = drawn(expected.shape[-1]), drawn(*expected.shape[:2], seed=1)
    arguments = ((), dict(x)) if isinstance(x, dict) else (tuple(x) if isinstance(x, tuple) else (x,), {})
    out, moved = jacobian.jvp(v, arguments)
    torch.testing.assert_close(out.reshape(len(u), -1), jacobian.outputs(x))
    torch.testing.assert_close(moved.reshape(len(u), -1), expected @ v)
    torch.testing.assert_close(jacobian.vjp(u, x), torch.einsum("nop,no->p", expected, u))
    torch.testing.assert_close(torch.cat([rows for _, rows in jacobian.rows(x)]), expected)
    chosen, directions = [model.get_parameter(name) for name in names], torch.eye(expected.shape[1]).double()
    with evaluation_mode(model):
        torch.testing.assert_close(rows_by_sample(model, x, chosen, directions), expected)


@pytest.mark.parametrize("name", ["mlp", "conv2d", "attention", "weight_norm", "embedding"])
def test_products_at_other_parameter_values(name: str) -> None:
    """The model's own numbers take no part, whichever way is taken, in chunks or not."""
    model, x = zoo.build(name)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    values = {name: model.get_parameter(name).detach().clone() for name in names}
    expected = slow_jacobian(model, x, names)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    v = drawn(expected.shape[-1])
    with evaluation_mode(model):
        method = choose_jvp(model, values, {}, x, remedy="None.")
        found = [jvp_at(model, values, {}, split(model, names, v), x, method, size)[1] for size in (2, 100)]
    for moved in found:
        torch.testing.assert_close(moved, expected @ v)


@pytest.mark.parametrize("method", [forward_mode_jvp, double_backward_jvp])
def test_both_ways_give_the_same_product(method) -> None:
    model, x = zoo.build("mlp")
    names = [name for name, _ in model.named_parameters()]
    values = {name: p.detach() for name, p in model.named_parameters()}
    expected = slow_jacobian(model, x, names)
    v = drawn(expected.shape[-1])
    out, moved = method(model, values, {}, split(model, names, v), x)
    torch.testing.assert_close(moved, expected @ v)
    torch.testing.assert_close(out, model(x).detach())


def test_rows_by_vmap_take_any_directions() -> None:
    model, x = zoo.build("mlp")
    values = {name: p.detach() for name, p in model.named_parameters()}
    expected = slow_jacobian(model, x, list(values))
    directions = drawn(2, expected.shape[1])
    found = rows_by_vmap(model, values, x, directions)
    torch.testing.assert_close(found, torch.einsum("ko,nop->nkp", directions, expected))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class OnceDifferentiable(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(super().forward(x))


def test_a_module_with_a_gradient_alone_is_refused_by_name() -> None:
    model = OnceDifferentiable(2, 3).double()
    values = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(Unsupported, match=r"OnceDifferentiable.*Use another"):
        choose_jvp(model, values, {}, drawn(3, 2), remedy="Use another.")
