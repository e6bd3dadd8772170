"""Small foreign modules as data: one per layer kind and way of use. Each returns (module, inputs) in float64, seeded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from unlazy.kernels.capture import call_model, sample_count, take_samples

N = 5
ZOO: dict[str, Callable[[], tuple[nn.Module, Any]]] = {}
FAST = set()  # those no parameter of which should need the general path


def case(fast: bool = True) -> Callable[[Callable[[], tuple[nn.Module, Any]]], Callable[[], tuple[nn.Module, Any]]]:
    def add(make: Callable[[], tuple[nn.Module, Any]]) -> Callable[[], tuple[nn.Module, Any]]:
        name = make.__name__.strip("_")
        ZOO[name] = make
        if fast:
            FAST.add(name)
        return make

    return add


def build(name: str) -> tuple[nn.Module, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, name)))
        module, x = ZOO[name]()
    module = module.double().eval()
    widen = torch.utils._pytree.tree_map
    return module, widen(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, x)


def slow_kernel(model: nn.Module, x: Any) -> Tensor:
    """Every pair of samples and outputs ``[n, n, O, O]``; trusts nothing but autograd on batches of one."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(sample_count(x)):
        for value in call_model(model, take_samples(x, slice(i, i + 1)))[0]:
            found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
            rows.append(
                torch.cat(
                    [
                        (torch.zeros_like(p) if g is None else g).reshape(-1)
                        for p, g in zip(parameters, found, strict=True)
                    ]
                )
            )
    j = torch.stack(rows).reshape(sample_count(x), -1, rows[0].numel())
    return torch.einsum("nap,mbp->nmab", j, j)


def head(width: int, outputs: int = 3) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(width, outputs)]


@case()
def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(N, 4)


@case()
def inplace_mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3, bias=False)), torch.randn(N, 4)


@case()
def late_inplace_mlp():
    """The first layer's output is left alone, the second one's is overwritten."""
    layers = [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)]
    return nn.Sequential(*layers), torch.randn(N, 4)


@case()
def scalar_output():
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).squeeze(-1).tanh()

    return Scalar(), torch.randn(N, 4)


@case()
def sequence_linear():
    return nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2), *head(6)), torch.randn(N, 3, 4)


@case()
def conv2d():
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, stride=2, bias=False), nn.ReLU()]
    return nn.Sequential(*layers, *head(12)), torch.randn(N, 2, 6, 5)


@case()
def conv2d_grouped_dilated():
    layers = [
        nn.Conv2d(4, 8, 3, groups=2, dilation=2, padding="same"),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Tanh(),
    ]
    return nn.Sequential(*layers, *head(8 * 16)), torch.randn(N, 4, 6, 6)


@case()
def conv2d_reflect():
    layers = [
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
        nn.Tanh(),
        nn.Conv2d(3, 2, 2, padding_mode="circular", padding=1),
    ]
    return nn.Sequential(*layers, *head(2 * 36)), torch.randn(N, 2, 5, 5)


@case()
def conv1d():
    return nn.Sequential(nn.Conv1d(2, 3, 4, stride=2), nn.ReLU(), nn.Conv1d(3, 2, 2), *head(6)), torch.randn(N, 2, 10)


@case()
def conv3d():
    return nn.Sequential(nn.Conv3d(1, 2, 2), nn.ReLU(), *head(2 * 8)), torch.randn(N, 1, 3, 3, 3)


@case()
def few_positions():
    """Wide layers on a tiny image: the position form is the cheaper one."""
    return nn.Sequential(nn.Conv2d(24, 24, 2), nn.ReLU(), *head(24)), torch.randn(N, 24, 2, 2).repeat(1, 1, 1, 1)


@case()
def few_positions_many_channels():
    return nn.Sequential(nn.Conv2d(30, 40, 1), nn.Tanh(), nn.AvgPool2d(2), *head(40)), torch.randn(N, 30, 2, 2)


@case()
def transposed():
    layers = [nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1), nn.ReLU()]
    layers += [nn.ConvTranspose2d(4, 2, 2, groups=2, bias=False), nn.Tanh()]
    return nn.Sequential(*layers, *head(2 * 49)), torch.randn(N, 2, 3, 3)


@case()
def transposed_1d_3d():
    return nn.Sequential(nn.ConvTranspose1d(2, 3, 3, dilation=2), nn.Tanh(), *head(3 * 8)), torch.randn(N, 2, 4)


@case()
def norms():
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.LayerNorm(4 * 9)]
    module = nn.Sequential(*layers, nn.RMSNorm(36), nn.Linear(36, 3))
    module[1].running_mean.normal_()
    module[1].running_var.uniform_(0.5, 2)
    for layer in module:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, 0.3, 0.5)
    return module, torch.randn(N, 2, 5, 5)


@case()
def embedding():
    module = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 3), nn.Tanh(), *head(9, 2))
    return module, torch.randint(0, 7, (N, 3))


@case()
def embedding_long():
    return nn.Sequential(nn.Embedding(3, 2), nn.LayerNorm(2), *head(2 * 6, 2)), torch.randint(0, 3, (N, 6))


@case()
def reused_layer():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.middle(torch.tanh(self.middle(x)) + x)))

    return Twice(), torch.randn(N, 4)


@case()
def tied_embedding():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.out.weight = self.table.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(torch.tanh(self.table(tokens).mean(1)))

    return Tied(), torch.randint(0, 6, (N, 3))


@case(fast=False)
def used_outside_its_layer():
    """The weight is also read directly: a rule for the layer alone would be wrong."""

    class Sly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.layer(x)), self.layer.weight) + self.layer.weight.sum()

    return Sly(), torch.randn(N, 4)


@case()
def never_called():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.layer.weight, self.layer.bias).tanh()

    return Functional(), torch.randn(N, 4)


@case(fast=False)
def bare_parameter():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.randn(4)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * self.scale) * self.scale[:3]

    return Bare(), torch.randn(N, 4)


@case(fast=False)
def weight_norm():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 2)), torch.randn(N, 4)


@case()
def attention():
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.attend(x, x, x, need_weights=False)[0].mean(1))

    return Attend(), torch.randn(N, 3, 4)


@case()
def transformer_layer():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    return nn.Sequential(layer, *head(12, 2)), torch.randn(N, 3, 4)


@case()
def recurrent():
    class Recur(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru, self.last = (
                nn.LSTM(3, 4, batch_first=True),
                nn.GRU(4, 3, batch_first=True),
                nn.Linear(3, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.gru(self.lstm(x)[0])[0][:, -1])

    return Recur(), torch.randn(N, 4, 3)


@case()
def two_inputs():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.last = nn.Linear(3, 4), nn.Embedding(5, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, token: Tensor) -> Tensor:
            return self.last(torch.tanh(self.left(x) * self.right(token)))

    return Two(), (torch.randn(N, 3), torch.randint(0, 5, (N,)))


@case()
def keyword_inputs():
    module, (x, token) = ZOO["two_inputs"]()
    return module, {"x": x, "token": token}


@case()
def residual():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + self.b(F.relu(self.a(x))), inplace=True)

    return nn.Sequential(nn.Conv2d(2, 3, 1), Block(), nn.MaxPool2d(2), Block(), *head(12, 2)), torch.randn(N, 2, 4, 4)


@case()
def unused_layer():
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    return Idle(), torch.randn(N, 4)


# --- ways of use that a rule for one layer, or a batch as one sees it, could get wrong ---------------------------


class Shared(nn.Module):
    """A layer applied to a learned token that all samples share, not to the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.layer, self.last = nn.Parameter(torch.randn(1, 4)), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(x * self.layer(self.token)))


class Experts(nn.Module):
    """Each sample goes through one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        right = x[:, 0] > 0
        out = x.new_zeros(len(x), 2)
        if right.any():
            out[right] = self.first(x[right])
        if (~right).any():
            out[~right] = self.second(x[~right]).tanh()
        return out


@case(fast=False)
def shared_token():
    return Shared(), torch.randn(N, 4)


@case(fast=False)
def experts():
    x = torch.randn(N, 4)
    x[:, 0] = torch.tensor([1.0, 2.0, 1.0, -1.0, -2.0])
    return Experts(), x


@case()
def viewed_image():
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(2, 3, 3), nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.conv(x)).view(len(x), -1))

    return View(), torch.randn(N, 2, 4, 4)


@case(fast=False)
def position_embedding():
    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.place, self.last = nn.Embedding(6, 4), nn.Embedding(8, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.token(x) + self.place(torch.arange(x.shape[1]))).mean(1))

    return Positioned(), torch.randint(0, 6, (N, 7))


@case(fast=False)
def sequence_first():
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.layer(x.transpose(0, 1))).mean(0))

    return First(), torch.randn(N, 3, 4)


@case(fast=False)
def folded_batch():
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(4, 3), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.layer(x.reshape(-1, 4))).reshape(len(x), -1))

    return Folded(), torch.randn(N, 2, 4)


@case()
def keyword_call():
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x).tanh()

    return Keyword(), torch.randn(N, 4)
