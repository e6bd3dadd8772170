"""Weights that functions read (attention, recurrent layers, tied weights): exact, and without a backward pass per sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unlazy import plan_tangent, tangent_kernel
from unlazy.kernels.convolution_windows import Windows
from unlazy.kernels.layer_rules import Products
from unlazy.kernels.recurrent_steps import STEPS
from zoo import slow_kernel

N = 5


class Net(nn.Module):
    """A forward pass given as a function of the parts."""

    def __init__(self, way: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.way = way
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *arguments: Any) -> Tensor:
        return self.way(self, *arguments)


def attention(**options: Any) -> tuple[nn.Module, Any]:
    """Tokens of 4 look at tokens of another set."""
    way = lambda net, x, y: net.last(net.attend(x, y, y, need_weights=False)[0].tanh().mean(1))  # noqa: E731
    net = Net(way, attend=nn.MultiheadAttention(4, 2, batch_first=True, **options), last=nn.Linear(4, 2))
    width = options.get("kdim", 4)
    return net, (torch.randn(N, 3, 4), torch.randn(N, 6, width))


def self_attention(tokens: int, *, batch_first: bool) -> tuple[nn.Module, Any]:
    def way(net: Any, x: Tensor) -> Tensor:
        seen = x if batch_first else x.transpose(0, 1)
        return net.last(net.attend(seen, seen, seen, need_weights=True)[0].tanh().mean(1 if batch_first else 0))

    net = Net(way, attend=nn.MultiheadAttention(4, 2, batch_first=batch_first), last=nn.Linear(4, 2))
    return net, torch.randn(N, tokens, 4)


def recurrent(kind: type[nn.RNNBase], last: int = 3, **options: Any) -> tuple[nn.Module, Any]:
    batch_first = options.get("batch_first", False)

    def way(net: Any, x: Tensor) -> Tensor:
        out, state = net.cell(x if batch_first else x.transpose(0, 1))
        seen = out if batch_first else out.transpose(0, 1)
        state = state[0] if isinstance(state, tuple) else state
        return net.last(seen.tanh().mean(1)) + state.sum((0, 2), keepdim=False)[:, None]

    ways = 2 if options.get("bidirectional") else 1
    width = options.get("proj_size", 0) or last
    return Net(way, cell=kind(2, last, **options), last=nn.Linear(ways * width, 2)), torch.randn(N, 4, 2)


def tied(**options: Any) -> tuple[nn.Module, Any]:
    """One table, read by token and as a layer at the end."""
    way = lambda net, x: net.out(torch.tanh(net.table(x)).mean(1))  # noqa: E731
    net = Net(way, table=nn.Embedding(6, 4, **options), out=nn.Linear(4, 6))
    net.out.weight = net.table.weight
    return net, torch.randint(0, 6, (N, 3))


def one_weight_two_biases() -> tuple[nn.Module, Any]:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    net[2].weight = net[0].weight
    return net, torch.randn(N, 4)


def two_tables() -> tuple[nn.Module, Any]:
    way = lambda net, x, y: net.last(torch.tanh(net.one(x).mean(1) * net.two(y).mean(1)))  # noqa: E731
    net = Net(way, one=nn.Embedding(5, 4), two=nn.Embedding(5, 4), last=nn.Linear(4, 2))
    net.two.weight = net.one.weight
    return net, (torch.randint(0, 5, (N, 3)), torch.randint(0, 5, (N, 2)))


def folded(*, positions_first: bool, tokens: int) -> tuple[nn.Module, Any]:
    """A layer that sees samples and positions in one axis."""

    def way(net: Any, x: Tensor) -> Tensor:
        seen = x.transpose(0, 1) if positions_first else x
        out = torch.tanh(net.first(seen.reshape(-1, 4))).view(*seen.shape[:2], 4)
        return net.last((out.transpose(0, 1) if positions_first else out).square().mean(1))

    return Net(way, first=nn.Linear(4, 4), last=nn.Linear(4, 2)), torch.randn(N, tokens, 4)


def vision(tokens: int, way: Callable[[Any, Tensor], Tensor]) -> tuple[nn.Module, Any]:
    """A token and positions of its own, added to the tokens of every sample; ``way`` puts the token before them."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = torch.cat([way(net, x), net.first(x)], dim=1) + net.places[:, : tokens + 1]
        return net.last(net.attend(h, h, h, need_weights=False)[0][:, 0].tanh())

    parts = {"first": nn.Linear(3, 4), "attend": nn.MultiheadAttention(4, 2, batch_first=True), "last": nn.Linear(4, 2)}
    learned = {"token": nn.Parameter(torch.randn(1, 1, 4)), "places": nn.Parameter(torch.randn(1, tokens + 2, 4))}
    return Net(forward, **parts, **learned), torch.randn(N, tokens, 3)


def places(tokens: int, axes: int) -> tuple[nn.Module, Any]:
    """A table of positions, asked once for all samples."""

    def forward(net: Any, x: Tensor) -> Tensor:
        numbers = torch.arange(tokens) if axes == 1 else torch.arange(tokens)[None]
        return net.last(torch.tanh(net.table(x) + net.places(numbers)).mean(1))

    parts = {"table": nn.Embedding(6, 4), "places": nn.Embedding(tokens + 1, 4), "last": nn.Linear(4, 2)}
    return Net(forward, **parts), torch.randint(0, 6, (N, tokens))


CASES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "self-attention": lambda: self_attention(3, batch_first=True),
    "self-attention, positions first": lambda: self_attention(3, batch_first=False),
    "as many tokens as samples": lambda: self_attention(N, batch_first=True),
    "two tokens": lambda: self_attention(2, batch_first=False),
    "one token": lambda: self_attention(1, batch_first=True),
    "attention to others": attention,
    "attention without biases": lambda: attention(bias=False),
    "attention to tokens of another width": lambda: attention(kdim=3, vdim=3),
    "lstm": lambda: recurrent(nn.LSTM, batch_first=True),
    "lstm, two layers, both ways": lambda: recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "lstm with projections": lambda: recurrent(nn.LSTM, proj_size=2, batch_first=True),
    "lstm without biases": lambda: recurrent(nn.LSTM, bias=False),
    "gru": lambda: recurrent(nn.GRU, batch_first=True, num_layers=2),
    "gru, both ways": lambda: recurrent(nn.GRU, bidirectional=True),
    "rnn": lambda: recurrent(nn.RNN, batch_first=True),
    "rnn with relu": lambda: recurrent(nn.RNN, nonlinearity="relu"),
    "tied table": tied,
    "tied table with padding": lambda: tied(padding_idx=2),
    "one weight, two biases": one_weight_two_biases,
    "two tables": two_tables,
    "folded": lambda: folded(positions_first=False, tokens=3),
    "folded, positions first": lambda: folded(positions_first=True, tokens=3),
    "folded, as many positions as samples": lambda: folded(positions_first=True, tokens=N),
    "folded, two positions": lambda: folded(positions_first=True, tokens=2),
    "a token expanded": lambda: vision(3, lambda net, x: net.token.expand(len(x), -1, -1)),
    "as many places as samples": lambda: vision(N - 1, lambda net, x: net.token.expand(len(x), -1, -1)),
    "a token added": lambda: vision(2, lambda net, x: torch.zeros(len(x), 1, 4).to(x) + net.token),
    "table of places": lambda: places(3, 1),
    "table of places, with an axis": lambda: places(3, 2),
    "table of places, as many as samples": lambda: places(N, 1),
    "table of two places": lambda: places(2, 1),
    "functions alone": lambda: (
        Net(
            lambda net, x: F.linear(x, net.w, net.b).tanh(),
            w=nn.Parameter(torch.randn(2, 4)),
            b=nn.Parameter(torch.randn(2)),
        ),
        torch.randn(N, 4),
    ),
}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        yield


def build(name: str) -> tuple[nn.Module, Any]:
    model, x = CASES[name]()
    widen = torch.utils._pytree.tree_map
    return model.double().eval(), widen(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, x)


@pytest.mark.parametrize("name", CASES)
def test_exact_in_all_modes_without_a_pass_per_sample(name: str) -> None:
    model, x = build(name)
    slow = slow_kernel(model, x)
    expected = {"full": slow, "trace": slow.diagonal(dim1=2, dim2=3).sum(-1), "sum": slow.sum((2, 3))}
    for mode, kernel in expected.items():
        for _ in range(2):  # the second call uses the check of the first
            torch.testing.assert_close(tangent_kernel(model, x, outputs=mode), kernel, rtol=1e-10, atol=1e-11)
    assert not [line for line in plan_tangent(model, x).methods if "per sample" in line]


@pytest.mark.parametrize("name", ["self-attention", "lstm", "tied table", "folded, positions first"])
def test_lone_samples_and_selections(name: str) -> None:
    model, x = build(name)
    slow = slow_kernel(model, x).diagonal(dim1=2, dim2=3).sum(-1)
    torch.testing.assert_close(tangent_kernel(model, x[:1], x[1:]), slow[:1, 1:], rtol=1e-10, atol=1e-11)
    parts = [tangent_kernel(model, x, parameters=parameter) for parameter, _ in model.named_parameters()]
    torch.testing.assert_close(sum(parts), slow, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    "way",
    [
        lambda net, x: net.token.repeat(len(x), 1, 1),
        lambda net, x: net.token[0].expand(len(x), 1, 4),
        lambda net, x: net.token.mean(0, keepdim=True).expand(len(x), 1, 4),
        lambda net, x: net.token.view(4).expand(len(x), 1, 4),
        lambda net, x: (net.token / net.token.norm()).expand(len(x), 1, 4),
    ],
)
def test_other_ways_to_share_a_parameter_are_exact(way: Callable[[Any, Tensor], Tensor]) -> None:
    """No view of a sample fits here: these take the general way."""
    model, x = vision(2, way)
    model, x = model.double(), x.double()
    for mode in ("full", "full"):
        found = tangent_kernel(model, x, outputs=mode)
        torch.testing.assert_close(found, slow_kernel(model, x), rtol=1e-10, atol=1e-11)
    assert "token" not in vars(model)
    torch.testing.assert_close(
        tangent_kernel(model, x[:1], x[1:2]), slow_kernel(model, x)[:1, 1:2].diagonal(dim1=2, dim2=3).sum(-1)
    )


def test_packed_sequences_take_the_general_way_and_are_exact() -> None:
    def way(net: Any, x: Tensor, length: Tensor) -> Tensor:
        pack = nn.utils.rnn.pack_padded_sequence(x, length, batch_first=True, enforce_sorted=False)
        return net.last(net.cell(pack)[1][0][-1])

    model = Net(way, cell=nn.LSTM(3, 4), last=nn.Linear(4, 2)).double()
    x = (torch.randn(N, 4, 3, dtype=torch.float64), torch.tensor([4, 2, 3, 1, 4]))
    slow = slow_kernel(model, x).diagonal(dim1=2, dim2=3).sum(-1)
    torch.testing.assert_close(tangent_kernel(model, x), slow, rtol=1e-10, atol=1e-11)


def test_positions_are_told_from_samples_where_gradients_are_nearly_alike() -> None:
    """In float32 the gradients of the biases of attention differ so little that their norms could not tell."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = Net(
        lambda net, x: net.last(net.encoder(net.first(x)).mean(1)),
        first=nn.Linear(8, 16),
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        last=nn.Linear(16, 4),
    ).eval()
    x = torch.randn(12, 32, 8)
    exact = tangent_kernel(model, x, precision="float64")
    for name in ("encoder.layers.0.self_attn.in_proj_bias", "*"):
        found = tangent_kernel(model, x, parameters=name)
        wanted = exact if name == "*" else tangent_kernel(model, x, parameters=name, precision="float64")
        assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-5


def test_a_weight_that_is_also_read_otherwise_is_not_served_by_a_rule() -> None:
    def way(net: Any, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, net.w).tanh(), net.w) @ net.w

    model = Net(way, w=nn.Parameter(torch.randn(4, 4, dtype=torch.float64)))
    x = torch.randn(N, 4, dtype=torch.float64)
    torch.testing.assert_close(tangent_kernel(model, x, outputs="full"), slow_kernel(model, x), rtol=1e-10, atol=1e-11)
    assert any("per sample" in line for line in plan_tangent(model, x).methods)


def test_functions_are_put_back() -> None:
    before = F.linear, F.embedding, torch._VF.lstm, dict(vars(torch._VF))
    model, x = build("lstm")
    tangent_kernel(model, x)
    assert before == (F.linear, F.embedding, torch._VF.lstm, dict(vars(torch._VF)))


@pytest.mark.parametrize("name", STEPS)
def test_steps_equal_the_fused_layer(name: str) -> None:
    kinds = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}
    options = {"nonlinearity": name.removeprefix("rnn_")} if name.startswith("rnn") else {}
    layer = kinds[name](3, 4, num_layers=2, bidirectional=True, **options).double().eval()
    x, start = torch.randn(6, N, 3, dtype=torch.float64), torch.randn(4, N, 4, dtype=torch.float64)
    given = (start, start.cos()) if name == "lstm" else start
    out, state = layer(x, given)
    states = state if isinstance(state, tuple) else (state,)
    found = STEPS[name](F.linear, x, given, layer._flat_weights, True, 2, 0.0, False, True, False)
    assert found is not None
    for mine, fused in zip(found, (out, *states), strict=True):
        torch.testing.assert_close(mine, fused)
    assert STEPS[name](F.linear, x, torch.zeros(1), start, layer._flat_weights, True, 2, 0.0, False, True) is None


def test_products_write_what_they_pair() -> None:
    a, g = torch.randn(4, 3, 5, dtype=torch.float64), [torch.randn(4, 3, 2, dtype=torch.float64) for _ in range(3)]
    share = Products(a, tuple(g))
    expected = torch.einsum("kntm,ntd->nkmd", torch.stack(g), a).flatten(2)
    torch.testing.assert_close(share.rows(), expected)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_filters_give_the_same_rows_in_every_layout(axes: int, groups: int) -> None:
    """Rows of two parts of the data are paired, so their columns must stand in one order."""
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    layer = kind(4, 8, 2, stride=2, dilation=2, groups=groups).double()
    x, g = torch.randn(3, 4, *(7,) * axes).double(), [torch.randn(3, 8, *(3,) * axes).double() for _ in range(2)]
    inner = [values.movedim(1, -1).contiguous().movedim(-1, 1) for values in (x, *g)]  # channels innermost
    plain = Windows(layer, (x,), (tuple(g),)).rows()
    torch.testing.assert_close(plain, Windows(layer, (inner[0],), (tuple(inner[1:]),)).rows())
    out = layer(x)
    for k, weights in enumerate(g):
        for i in range(3):
            (exact,) = torch.autograd.grad(out[i], layer.weight, weights[i], retain_graph=True)
            torch.testing.assert_close(plain[i, k], exact.flatten(2).mT.flatten())
