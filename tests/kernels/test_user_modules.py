"""Kernels of modules as users write them: order of samples, sizes, precisions and wrappers that no rule expects."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unlazy import (
    InputError,
    Unsupported,
    effective_rank,
    layer_kernels,
    overlap_kernel,
    path_count,
    plan_tangent,
    tangent_kernel,
)
from unlazy.kernels.agop import agop, layer_agops
from unlazy.kernels.averaged_tangents import ParameterPath, averaged_tangents
from unlazy.kernels.capture import call_model, sample_count, take_samples
from unlazy.kernels.gate_calls import record
from unlazy.kernels.overlap import layer_overlap
from unlazy.kernels.paths.walks import active_paths
from unlazy.kernels.tangent import tangent_diagonal, tangent_features


class Written(nn.Module):
    """A module with a forward pass given as a function."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.way = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *arguments: Any) -> Any:
        return self.way(self, *arguments)


def slow_rows(model: nn.Module, x: Any) -> Tensor:
    """One backward pass per sample and output; complex gradients as two real numbers."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(sample_count(x)):
        for value in call_model(model, take_samples(x, slice(i, i + 1)))[0]:
            found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
            pieces = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
            real = [torch.view_as_real(piece) if piece.is_complex() else piece for piece in pieces]
            rows.append(torch.cat([piece.reshape(-1).double() for piece in real]))
    return torch.stack(rows).unflatten(0, (sample_count(x), -1))


def check(model: nn.Module, x: Any, x2: Any = None, tolerance: float = 1e-10) -> None:
    """All ways to ask for the kernel, against the slow twin."""
    left = slow_rows(model, x)
    right = left if x2 is None else slow_rows(model, x2)
    full = torch.einsum("nap,mbp->nmab", left, right)
    trace = full.diagonal(dim1=2, dim2=3).sum(-1)
    cases = [(tangent_kernel(model, x, x2), trace), (tangent_kernel(model, x, x2, outputs="full"), full)]
    cases.append((tangent_kernel(model, x, x2, outputs="sum"), full.sum((2, 3))))
    if x2 is None:
        rows = tangent_features(model, x).double()
        cases += [(torch.einsum("nap,mbp->nmab", rows, rows), full), (tangent_diagonal(model, x), trace.diagonal())]
        cases.append((torch.stack(list(layer_kernels(model, x).values())).sum(0), trace))
    for found, expected in cases:
        assert found.shape == expected.shape
        assert float((found.double() - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.fixture(autouse=True)
def seeded() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        yield
    torch.set_default_dtype(before)


# --- which entry belongs to which sample -----------------------------------------------------------------------


def by_length(self: Any, x: Tensor, length: Tensor) -> Tensor:
    order = torch.argsort(length, descending=True)
    return self.last(torch.relu(self.first(x[order])))[torch.argsort(order)]


def by_expert(self: Any, x: Tensor, route: Tensor) -> Tensor:
    """Every token of a sequence goes to the layer its route names."""
    tokens, routes = x.flatten(0, 1), route.flatten()
    out = torch.zeros_like(tokens)
    for number, expert in enumerate((self.one, self.two)):
        out[routes == number] = expert(tokens[routes == number])
    return self.last(torch.relu(out.reshape(len(x), -1)))


def packed(self: Any, x: Tensor, length: Tensor) -> Tensor:
    pack = nn.utils.rnn.pack_padded_sequence(x, length, batch_first=True, enforce_sorted=False)
    seen = pack._replace(data=torch.relu(self.first(pack.data)))
    filled, _ = nn.utils.rnn.pad_packed_sequence(seen, batch_first=True, total_length=x.shape[1])
    return self.last(filled.sum(1))


def test_layers_that_see_samples_in_another_order_are_exact() -> None:
    """The first and the last sample stand in order, those between do not."""
    model = Written(by_length, first=nn.Linear(4, 5), last=nn.Linear(5, 2))
    check(model, (torch.randn(6, 4), torch.tensor([9, 1, 5, 3, 7, 2])))


def test_experts_that_get_as_many_tokens_as_there_are_samples_are_exact() -> None:
    model = Written(by_expert, one=nn.Linear(4, 4), two=nn.Linear(4, 4), last=nn.Linear(8, 2))
    check(model, (torch.randn(4, 2, 4), torch.tensor([[0, 1], [0, 0], [1, 1], [0, 1]])))


def test_packed_sequences_are_exact() -> None:
    model = Written(packed, first=nn.Linear(4, 5), last=nn.Linear(5, 2))
    for length in ([4, 2, 3, 1, 4, 2], [1, 1, 1, 1, 1, 1]):
        check(model, (torch.randn(6, 4, 4), torch.tensor(length)))


def test_picking_a_position_of_every_sample_keeps_the_fast_way() -> None:
    def last_token(self: Any, x: Tensor, length: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))[torch.arange(len(x)), length])

    model = Written(last_token, first=nn.Linear(4, 5), last=nn.Linear(5, 2))
    x = (torch.randn(6, 3, 4), torch.tensor([2, 0, 1, 1, 2, 0]))
    check(model, x)
    assert "one backward pass per sample" not in str(plan_tangent(model, x))


# --- weights used beside the module ----------------------------------------------------------------------------


def test_a_weight_used_elsewhere_counts_even_where_the_ends_of_the_data_do_not_feel_it() -> None:
    def gated(self: Any, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return self.last(h) + torch.relu(x[:, :1]) * F.linear(h, self.last.weight)

    x = torch.randn(6, 4)
    x[[0, -1], 0] = -1.0
    check(Written(gated, first=nn.Linear(4, 5), last=nn.Linear(5, 2)), x)

    def tied(self: Any, x: Tensor) -> Tensor:
        return F.linear(torch.relu(self.first(x)), self.first.weight.T)

    x = torch.randn(6, 4)
    x[[0, -1]] = 0.0
    check(Written(tied, first=nn.Linear(4, 6, bias=False)), x)


def test_a_weight_read_only_for_samples_that_the_check_does_not_see() -> None:
    """Every batch counts the reads of a weight, so that a branch on the data cannot hide one."""

    def branching(self: Any, x: Tensor) -> Tensor:
        h, picked = torch.relu(self.first(x)), (x[:, :1] > 0).to(x)
        out = self.last(h)
        return out + picked * (h @ self.last.weight.T) if bool(picked.any()) else out

    x = torch.randn(6, 4)
    x[[0, -1], 0] = -1.0
    x[2, 0] = 1.0
    model = Written(branching, first=nn.Linear(4, 5), last=nn.Linear(5, 2))
    check(model, x)
    check(model, x)


def test_a_shared_parameter_counts_once_among_the_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6))
    model[4].weight = model[0].weight
    x = torch.randn(5, 4)
    check(model, x)
    assert set(layer_kernels(model, x)) == {"0", "2", "4"}


# --- samples of two sizes --------------------------------------------------------------------------------------


def pooled(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3))


SIZES: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "plain": lambda: (
        pooled(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), width=8),
        torch.randn(3, 3, 8, 8),
        torch.randn(5, 3, 12, 12),
    ),
    "pointwise": lambda: (
        pooled(nn.Conv2d(30, 40, 1), nn.Tanh(), width=40),
        torch.randn(3, 30, 2, 2),
        torch.randn(4, 30, 9, 9),
    ),
    "grouped": lambda: (
        pooled(nn.Conv2d(4, 16, 3, padding=1, groups=2), nn.Tanh(), nn.Conv2d(16, 8, 1, groups=4), width=8),
        torch.randn(4, 4, 2, 2),
        torch.randn(6, 4, 11, 11),
    ),
    "transposed": lambda: (
        pooled(nn.ConvTranspose2d(4, 8, 3, groups=2), nn.Tanh(), width=8),
        torch.randn(4, 4, 1, 1),
        torch.randn(3, 4, 7, 7),
    ),
    "tokens": lambda: (
        Written(lambda s, x: s.last(s.table(x).mean(1)), table=nn.Embedding(5, 4), last=nn.Linear(4, 2)),
        torch.randint(0, 5, (4, 3)),
        torch.randint(0, 5, (5, 17)),
    ),
    "sequences": lambda: (
        Written(lambda s, x: s.last(torch.tanh(s.first(x)).mean(1)), first=nn.Linear(40, 40), last=nn.Linear(40, 2)),
        torch.randn(4, 1, 40),
        torch.randn(5, 70, 40),
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_cross_kernels_of_samples_of_two_sizes(name: str) -> None:
    """The cheapest form of a layer depends on its number of positions; both sides need the same one."""
    model, x, x2 = SIZES[name]()
    check(model, x, x2)
    check(model, x2, x)


# --- kinds of numbers, of outputs, of wrappers -----------------------------------------------------------------


def test_complex_parameters_are_pairs_of_real_ones() -> None:
    weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
    check(Written(lambda s, x: (x.to(s.w) @ s.w).abs(), w=weight), torch.randn(5, 4))
    layer = nn.Linear(4, 3, dtype=torch.complex128)
    check(Written(lambda s, x: s.layer(x.to(s.layer.weight)).abs(), layer=layer), torch.randn(5, 4))
    with pytest.raises(Unsupported, match="view_as_real"):
        tangent_kernel(Written(lambda s, x: s.layer(x.to(s.layer.weight)), layer=layer), torch.randn(5, 4))


@pytest.mark.parametrize(("inner", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_layers_less_precise_than_the_output(inner: torch.dtype, tolerance: float) -> None:
    model = Written(
        lambda s, x: s.last(torch.relu(s.first(x)).double()), first=nn.Linear(4, 6).to(inner), last=nn.Linear(6, 3)
    )
    check(model, torch.randn(5, 4).to(inner), tolerance=tolerance)


def test_encoders_with_padding_masks_are_exact() -> None:
    """Torch's fused way would make nested tensors of them, which have no gradient."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = Written(
        lambda s, x, mask: s.last(s.encoder(x, src_key_padding_mask=mask)[:, 0]),
        encoder=nn.TransformerEncoder(layer, 2),
        last=nn.Linear(8, 2),
    )
    mask = torch.tensor([[False, False, True], [False, True, True], [False, False, False], [False, False, True]])
    check(model, (torch.randn(4, 3, 8), mask))
    assert torch.backends.mha.get_fastpath_enabled()


def test_an_output_object_with_one_tensor_is_read() -> None:
    @dataclass
    class Scores:
        scores: Tensor
        loss: float | None = None

    line, x = nn.Linear(4, 3), torch.randn(5, 4)
    assert torch.equal(tangent_kernel(Written(lambda s, x: Scores(s.line(x)), line=line), x), tangent_kernel(line, x))


def test_compiled_modules_are_read_as_they_were_written() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    wrapped = torch.compile(model, backend="eager")
    for kernel in (tangent_kernel, overlap_kernel, layer_overlap, path_count):
        assert torch.equal(kernel(wrapped, x), kernel(model, x))
    assert "one backward pass per sample" not in str(plan_tangent(wrapped, x))


def test_kernels_inside_inference_mode() -> None:
    model, x = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)), torch.randn(3, 1, 4, 4)
    for kernel in (tangent_kernel, overlap_kernel, layer_overlap, path_count):
        with torch.inference_mode():
            inside = kernel(model, x + 0)
        assert torch.equal(inside.clone(), kernel(model, x))


def test_outputs_parameters_and_targets_in_other_words() -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(5, 4)
    assert torch.equal(tangent_kernel(model, x, parameters=None), tangent_kernel(model, x))
    elsewhere = torch.zeros(5, 5, dtype=torch.float32)
    conv = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.Flatten(), model[2])
    tangent_kernel(conv, x, out=elsewhere)
    torch.testing.assert_close(elsewhere, tangent_kernel(conv, x).float())


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "classes": (
        lambda: tangent_kernel(Written(lambda s, x: s.line(x).argmax(1), line=nn.Linear(4, 3)), torch.randn(5, 4)),
        Unsupported,
        "int64",
    ),
    "nothing": (
        lambda: tangent_kernel(Written(lambda s, x: s.line(x)[:, :0], line=nn.Linear(4, 3)), torch.randn(5, 4)),
        InputError,
        "no outputs",
    ),
    "detached": (
        lambda: tangent_kernel(Written(lambda s, x: s.line(x).detach(), line=nn.Linear(4, 3)), torch.randn(5, 4)),
        Unsupported,
        "no gradient by any parameter",
    ),
    "detached, one by one": (
        lambda: tangent_kernel(
            Written(lambda s, x: s.line(x).detach(), line=nn.Linear(4, 3)), torch.randn(5, 4), method="loop"
        ),
        Unsupported,
        "no gradient by any parameter",
    ),
    "half a number": (
        lambda: tangent_kernel(nn.Linear(4, 3), torch.randn(5, 4), memory="1..5GB"),
        InputError,
        "memory is a number",
    ),
    "cross kernel": (lambda: effective_rank(torch.randn(5, 5)), InputError, "not symmetric"),
    "output of a list of paths": (
        lambda: active_paths(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(1, 4), output=3),
        InputError,
        "between 0 and 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_kernel_says_why(name: str) -> None:
    make, error, says = REFUSED[name]
    with pytest.raises(error, match=says):
        make()


def test_unused_parameters_have_a_kernel_of_zeros() -> None:
    model = Written(lambda s, x: s.used(x), used=nn.Linear(4, 3), unused=nn.Linear(4, 3))
    assert float(tangent_kernel(model, torch.randn(5, 4), parameters="unused.*").abs().max()) == 0.0


# --- gates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_gates_without_samples_on_the_first_axis_are_refused(n: int) -> None:
    """Also where there are as many positions as samples (2 or 4), which no single batch could tell."""
    flat = Written(
        lambda s, x: s.last(torch.relu(s.first(x.flatten(0, 1))).reshape(len(x), -1)),
        first=nn.Linear(3, 4),
        last=nn.Linear(8, 2),
    )
    with pytest.raises(Unsupported, match="rows for"):
        layer_overlap(flat, torch.randn(n, 2, 3))
    for length in (2, 4):
        first = Written(
            lambda s, x: s.last(torch.relu(s.first(x.transpose(0, 1))).sum(0)),
            first=nn.Linear(3, 4),
            last=nn.Linear(4, 2),
        )
        with pytest.raises(Unsupported, match="rows for"):
            layer_overlap(first, torch.randn(n, length, 3))


BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda h: torch.max(h, torch.zeros_like(h)),
    "where": lambda h: torch.where(h > 0, h, 0.0),
    "mask": lambda h: h * (h > 0),
    "step": lambda h: h * torch.heaviside(h, torch.zeros(())),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_gates_written_by_hand_are_not_missed(name: str) -> None:
    model = Written(
        lambda s, x: s.last(BY_HAND[name](s.middle(torch.relu(s.first(x))))),
        first=nn.Linear(3, 4),
        middle=nn.Linear(4, 4),
        last=nn.Linear(4, 2),
    )
    with pytest.raises(Unsupported, match="by hand"):
        layer_overlap(model, torch.randn(5, 3))


def test_masks_of_tokens_and_pruned_weights_are_no_gates() -> None:
    def masked(self: Any, x: Tensor) -> Tensor:
        kept = self.first.weight * (self.first.weight > -10)
        seen = torch.where((x > 0).all(1, keepdim=True), F.linear(self.table(x).sum(1), kept), 0.0)
        return self.last(torch.relu(seen))

    model = Written(masked, table=nn.Embedding(5, 3), first=nn.Linear(3, 5), last=nn.Linear(5, 2))
    assert [gate.open.shape for gate in record(model, torch.randint(1, 5, (5, 4)))] == [(5, 5)]


@pytest.mark.parametrize(
    "measure", [tangent_kernel, tangent_diagonal, layer_overlap, overlap_kernel, path_count, agop, layer_agops, record]
)
@pytest.mark.parametrize("spoilt", ["3.weight", "1.running_var"])
def test_a_network_that_has_diverged_is_named(measure: Callable[..., Any], spoilt: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()
    x = torch.randn(6, 4)
    measure(model, x)
    model.state_dict()[spoilt].flatten()[1] = float("inf")
    with pytest.raises(
        InputError, match=rf"1 of the \d+ numbers in {spoilt} are NaN or infinite: training has diverged"
    ):
        measure(model, x)


def test_a_mask_that_is_infinite_on_purpose_is_no_divergence() -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
            self.register_buffer("few", torch.zeros(4).to(torch.float8_e5m2))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.layer(x))
            return (torch.softmax(h @ h.mT + self.mask, -1) @ h).mean(1)

    model = Causal()
    model.layer.double()
    check(model, torch.randn(5, 3, 4, dtype=torch.float64))


def test_layers_that_do_not_know_their_size_yet_are_named_by_torch() -> None:
    model, x = nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(2)), torch.randn(5, 4)
    with pytest.raises(ValueError, match="uninitialized parameter"):
        tangent_kernel(model, x)
    model(x)
    check(model.double(), x.double())


def test_large_numbers_are_numbers() -> None:
    """Their sum overflows, they do not."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.full((1, 2), 3e38)
    assert bool(tangent_kernel(model, torch.ones(2, 2)).isfinite().all())


# --- ways of training ------------------------------------------------------------------------------------------


def test_averages_along_a_way_with_batch_norms() -> None:
    """A counter of batches is no number to average; running statistics that moved would break the integral."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    start = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    end, x = copy.deepcopy(model.state_dict()), torch.randn(5, 4)
    end["1.num_batches_tracked"] += 7
    found = averaged_tangents(model, ParameterPath([start, end], points=20, rule="gauss"), x)
    torch.testing.assert_close(found.integral, found.change)
    end["1.running_mean"] = end["1.running_mean"] + 1
    with pytest.raises(InputError, match=r"1\.running_mean moved"):
        averaged_tangents(model, ParameterPath([start, end]), x)
