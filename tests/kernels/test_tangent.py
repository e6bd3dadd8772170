"""The tangent kernel of every layer kind and way of use against one backward pass per sample, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zoo
from unlazy import InputError, Unsupported
from unlazy.kernels.capture import take_samples
from unlazy.kernels.gram import gram, parse_memory, plan_gram
from unlazy.kernels.projection import project_tangents
from unlazy.kernels.tangent import (
    layer_kernels,
    plan_tangent,
    tangent_diagonal,
    tangent_features,
    tangent_kernel,
)
from unlazy.kernels.tangent_engine import TangentKernel
from zoo import slow_kernel


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_kind_of_layer_is_exact(name: str) -> None:
    model, x = zoo.build(name)
    slow = slow_kernel(model, x)
    close(tangent_kernel(model, x, outputs="full"), slow)
    close(tangent_kernel(model, x), slow.diagonal(dim1=2, dim2=3).sum(-1))
    close(tangent_kernel(model, x, outputs="sum"), slow.sum((2, 3)))
    close(tangent_kernel(model, x, outputs=0), slow[..., 0, 0])
    close(tangent_kernel(model, x, take_samples(x, slice(1, 3)), outputs=[0]), slow[:, 1:3, :1, :1])
    close(tangent_diagonal(model, x), slow.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1).sum(-1))
    close(tangent_kernel(model, x, method="loop"), slow.diagonal(dim1=2, dim2=3).sum(-1))


@pytest.mark.parametrize("name", zoo.ZOO)
def test_layers_add_up_and_features_reproduce_the_kernel(name: str) -> None:
    model, x = zoo.build(name)
    whole = tangent_kernel(model, x)
    close(sum(layer_kernels(model, x).values()), whole)
    rows = tangent_features(model, x).flatten(1)
    close(rows @ rows.T, whole)


@pytest.mark.parametrize("name", sorted(zoo.FAST))
def test_known_layers_do_not_need_the_general_path(name: str) -> None:
    """Else the fast path would be tested by nothing: a rule that fails its check falls back and stays exact."""
    model, x = zoo.build(name)
    plan = plan_tangent(model, x)
    assert not [line for line in plan.methods if "per sample" in line and "idle" not in line], plan.methods


@pytest.mark.parametrize("name", ["bare_parameter", "weight_norm", "experts"])
def test_what_no_rule_serves_goes_the_general_way(name: str) -> None:
    assert any("per sample" in line for line in plan_tangent(*zoo.build(name)).methods)


@pytest.mark.parametrize(
    "name", ["shared_token", "experts", "sequence_first", "folded_batch", "position_embedding", "mlp"]
)
def test_cross_kernels_of_one_and_of_unlike_samples(name: str) -> None:
    """Rules are checked on some samples and used on others: a lone sample, or one that takes another way."""
    model, x = zoo.build(name)
    slow = slow_kernel(model, x).diagonal(dim1=2, dim2=3).sum(-1)
    for rows in (slice(0, 1), slice(0, 2), slice(3, 5)):
        close(tangent_kernel(model, take_samples(x, rows), x), slow[rows])
        close(tangent_kernel(model, x, take_samples(x, rows)), slow[:, rows])
    close(tangent_kernel(model, take_samples(x, slice(0, 1))), slow[:1, :1])


def test_features_of_two_sets_share_their_columns() -> None:
    model, x = zoo.build("embedding")
    left, right = (tangent_features(model, x[part]) for part in (slice(0, 2), slice(2, 5)))
    close(torch.einsum("nkp,mkp->nm", left, right), tangent_kernel(model, x[:2], x[2:]))


@pytest.mark.parametrize("name", ["norms", "recurrent", "inplace_mlp", "transformer_layer"])
def test_nothing_is_left_behind(name: str) -> None:
    model, x = zoo.build(name)
    model.train()
    next(iter(model.children())).eval()
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    before = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    tangent_kernel(model, x)
    assert before == ([m.training for m in model.modules()], [p.requires_grad for p in model.parameters()])
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert all(not m._forward_hooks for m in model.modules())


# --- random compositions -----------------------------------------------------------------------------------

MAKERS = {
    "conv": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "grouped": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False),
    "stride": lambda: nn.Conv2d(4, 4, 3, padding=2, stride=2),
    "norm": lambda: nn.BatchNorm2d(4),
    "group-norm": lambda: nn.GroupNorm(2, 4),
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "transposed": lambda: nn.ConvTranspose2d(4, 4, 2),
    "pool": lambda: nn.AvgPool2d(2, ceil_mode=True),
}


def composed(kinds: list[str], seed: int) -> tuple[nn.Module, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [MAKERS[kind]() for kind in kinds]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2)).double().eval()
        return model, torch.randn(3, 4, 5, 5, dtype=torch.float64)


@settings(max_examples=30)
@given(st.lists(st.sampled_from(sorted(MAKERS)), max_size=5), st.integers(0, 10**6))
def test_random_compositions_are_exact(kinds: list[str], seed: int) -> None:
    model, x = composed(kinds, seed)
    close(tangent_kernel(model, x, outputs="full"), slow_kernel(model, x))


# --- tiles, memory, selections -------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.integers(1, 7), st.integers(2, 8), st.sampled_from(["mlp", "conv2d", "embedding"]))
def test_tiles_do_not_matter(tile: int, room: int, name: str) -> None:
    from dataclasses import replace
    from unittest import mock

    model, x = zoo.build(name)
    for outputs in ("trace", "full"):
        whole = tangent_kernel(model, x, outputs=outputs)
        kernel = TangentKernel(model, x, outputs=outputs)
        plan = replace(plan_gram(kernel, zoo.N, None), tile=tile, cached_parts=room)
        with mock.patch("unlazy.kernels.gram.plan_gram", return_value=plan), kernel.ready():
            close(gram(kernel, x), whole)


def test_kernel_is_symmetric_and_positive() -> None:
    model, x = zoo.build("conv2d")
    kernel = tangent_kernel(model, x, outputs="full")
    assert torch.equal(kernel, kernel.permute(1, 0, 3, 2))
    flat = kernel.permute(0, 2, 1, 3).reshape(zoo.N * 3, zoo.N * 3)
    assert torch.linalg.eigvalsh(flat).min() > -1e-9


def test_parameters_by_pattern_add_up() -> None:
    model, x = zoo.build("conv2d")
    weights = tangent_kernel(model, x, parameters="*.weight")
    biases = tangent_kernel(model, x, parameters=["*.bias"])
    close(weights + biases, tangent_kernel(model, x))
    with pytest.raises(Unsupported, match=r"0\.weight"):
        tangent_kernel(model, x, parameters="nothing.*")
    with pytest.raises(InputError, match="wieght"):
        tangent_kernel(model, x, parameters=["0.weight", "2.wieght"])


def test_result_can_be_written_elsewhere() -> None:
    model, x = zoo.build("mlp")
    out = torch.empty(3, 3, zoo.N, zoo.N, dtype=torch.float64)
    tangent_kernel(model, x, outputs="full", out=out)
    close(out.permute(2, 3, 0, 1), tangent_kernel(model, x, outputs="full"))
    with pytest.raises(InputError, match="shape"):
        tangent_kernel(model, x, out=out)


def test_plan_speaks_and_keeps_the_budget() -> None:
    model, x = zoo.build("conv2d")
    plan = plan_tangent(model, x, memory="1GB")
    assert plan.peak_bytes <= 10**9
    assert "Conv2d" in str(plan)
    with pytest.raises(InputError, match="too small"):
        plan_tangent(model, x, memory="1kB")
    assert parse_memory("2GB") == 2 * 10**9
    assert parse_memory("512 MiB") == 2**29
    with pytest.raises(InputError, match="2GB"):
        parse_memory("plenty")


def test_precisions() -> None:
    model, x = zoo.build("mlp")
    exact = tangent_kernel(model, x)
    assert tangent_kernel(model, x, precision="float32").dtype == torch.float32
    assert next(model.parameters()).dtype == torch.float64
    narrow, x32 = model.float(), x.float()
    torch.testing.assert_close(tangent_kernel(narrow, x32).double(), exact, rtol=1e-4, atol=1e-5)
    assert tangent_kernel(narrow, x32, precision="float64").dtype == torch.float64
    assert next(narrow.parameters()).dtype == torch.float32
    rough = tangent_kernel(narrow, x32, precision="bfloat16").double()
    assert float((rough - exact).norm() / exact.norm()) < 1e-2


class Mixing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize(
    ("model", "x", "error", "says"),
    [
        (nn.ReLU(), torch.zeros(3, 2), Unsupported, "no trainable parameters"),
        (Mixing(2, 1), torch.randn(3, 2), Unsupported, "other samples"),
        (nn.Linear(2, 1), torch.zeros(0, 2), InputError, "no samples"),
        (nn.Linear(2, 1), torch.full((2, 2), torch.nan), InputError, "4 of the inputs are NaN"),
        (nn.MultiheadAttention(2, 1, batch_first=True), (torch.zeros(2, 3, 2),) * 3, InputError, "tuple of 2"),
    ],
)
def test_what_cannot_be_computed_says_why(model: nn.Module, x: torch.Tensor, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        tangent_kernel(model, x)


def test_wrong_outputs_are_named() -> None:
    model, x = zoo.build("mlp")
    for outputs in ("some", 7, [0, 9], []):
        with pytest.raises(InputError, match="outputs"):
            tangent_kernel(model, x, outputs=outputs)


# --- projections ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "scalar_output", "embedding"])
def test_projections_estimate_the_kernel_with_the_error_they_state(name: str) -> None:
    """Over many seeds: no bias, and a spread that is the stated standard error."""
    model, x = zoo.build(name)
    exact = tangent_kernel(model, x)
    estimates, errors = [], []
    for seed in range(150):
        projected = project_tangents(model, x, 64, seed=seed)
        estimates.append(projected.kernel())
        errors.append(projected.error())
    found, stated = torch.stack(estimates), torch.stack(errors).mean(0)
    assert ((found.mean(0) - exact).abs() <= 5 * found.std(0) / 150**0.5).all()
    ratio = found.std(0) / stated
    assert float(ratio.min()) > 0.8
    assert float(ratio.max()) < 1.25


def test_projections_are_seeded_and_refuse_no_dimension() -> None:
    model, x = zoo.build("mlp")
    assert torch.equal(project_tangents(model, x, 8).features, project_tangents(model, x, 8).features)
    assert not torch.equal(project_tangents(model, x, 8).features, project_tangents(model, x, 8, seed=1).features)
    with pytest.raises(InputError, match="dimension"):
        project_tangents(model, x, 0)
