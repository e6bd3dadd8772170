"""Tiny networks as data, one per way a path can go. Each returns (module, inputs) in float64, seeded."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NETS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {}
N = 4


def net(make: Callable[[], tuple[nn.Module, Tensor]]) -> Callable[[], tuple[nn.Module, Tensor]]:
    NETS[make.__name__] = make
    return make


def build(name: str) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(len(name) + 1)
        module, x = NETS[name]()
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.data.abs_()  # biases that keep most units open
    return module.double().eval(), x.double()


def sequence(*layers: nn.Module, size: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*layers), torch.randn(N, *size)


@net
def dense():
    return sequence(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2), size=(3,))


@net
def dense_sequence():
    layers = [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 2)]
    return sequence(*layers, size=(3, 3))


@net
def deep_linear_between():
    return sequence(
        nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.Linear(3, 4), nn.ReLU6(), nn.Linear(4, 1), size=(3,)
    )


@net
def conv1d():
    layers = [nn.Conv1d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv1d(3, 2, 2, stride=2), nn.ReLU()]
    return sequence(*layers, nn.Flatten(), nn.Linear(6, 2), size=(2, 6))


@net
def conv1d_dilated():
    layers = [nn.Conv1d(1, 2, 3, dilation=2, padding=2), nn.ReLU(), nn.Conv1d(2, 2, 3, dilation=3, padding="same")]
    return sequence(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(12, 1), size=(1, 6))


@net
def conv2d():
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 2, stride=(1, 2)), nn.ReLU()]
    return sequence(*layers, nn.Flatten(), nn.Linear(12, 1), size=(2, 4, 4))


@net
def conv2d_far_padding():
    """Corner units see nothing but padding: no path begins there."""
    layers = [nn.Conv2d(1, 2, 1, padding=1), nn.ReLU(), nn.Conv2d(2, 1, 2), nn.ReLU()]
    return sequence(*layers, nn.Flatten(), nn.Linear(9, 1), size=(1, 2, 2))


@net
def conv3d():
    layers = [nn.Conv3d(1, 2, 2, padding=(1, 0, 0)), nn.ReLU(), nn.Flatten(), nn.Linear(6, 1)]
    return sequence(*layers, size=(1, 2, 2, 2))


@net
def grouped():
    layers = [nn.Conv1d(4, 4, 2, groups=2), nn.ReLU(), nn.Conv1d(4, 6, 2, groups=2), nn.ReLU()]
    layers += [nn.Conv1d(6, 6, 1, groups=6), nn.ReLU()]
    return sequence(*layers, nn.Flatten(), nn.Linear(18, 1), size=(4, 5))


@net
def transposed():
    layers = [nn.ConvTranspose1d(2, 2, 3, stride=2, padding=1, output_padding=1), nn.ReLU()]
    layers += [nn.ConvTranspose1d(2, 4, 2, groups=2, dilation=2), nn.ReLU(), nn.AvgPool1d(2)]
    return sequence(*layers, nn.Flatten(), nn.Linear(16, 1), size=(2, 3))


@net
def max_pool():
    layers = [nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 2, 1), nn.ReLU(), nn.Flatten()]
    return sequence(*layers, nn.Linear(8, 1), size=(1, 5, 5))


@net
def max_pool_overlapping():
    layers = [nn.Conv1d(1, 2, 2), nn.MaxPool1d(3, stride=2, padding=1), nn.ReLU(), nn.Conv1d(2, 3, 2), nn.ReLU()]
    return sequence(*layers, nn.Flatten(), nn.Linear(9, 1), size=(1, 8))


@net
def max_pool_ceil_dilated():
    layers = [nn.Conv1d(1, 2, 2), nn.ReLU(), nn.MaxPool1d(2, stride=3, dilation=2, ceil_mode=True)]
    return sequence(*layers, nn.Flatten(), nn.Linear(6, 1), size=(1, 9))


@net
def max_pool_first():
    return sequence(nn.MaxPool1d(2), nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 1), size=(2, 6))


@net
def gate_first():
    return sequence(nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1), size=(4,))


@net
def gates_in_a_row():
    layers = [nn.Linear(3, 6), nn.ReLU(), nn.Hardtanh(-1.0, 0.6), nn.Linear(6, 5), nn.ReLU6(), nn.Dropout(), nn.ReLU()]
    return sequence(*layers, nn.Linear(5, 1), size=(3,))


@net
def average_pool():
    layers = [nn.AvgPool2d(2, stride=1), nn.Conv2d(1, 2, 2), nn.ReLU(), nn.AvgPool2d(2, stride=1, padding=1)]
    return sequence(*layers, nn.Conv2d(2, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1), size=(1, 4, 4))


@net
def adaptive_pools():
    layers = [nn.Conv1d(1, 2, 2), nn.ReLU(), nn.AdaptiveAvgPool1d(3), nn.Conv1d(2, 2, 1), nn.ReLU()]
    return sequence(*layers, nn.AdaptiveMaxPool1d(2), nn.Flatten(), nn.Linear(4, 2), size=(1, 6))


@net
def global_pool():
    layers = [nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return sequence(*layers, nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1), size=(1, 4, 4))


@net
def normalised():
    layers = [nn.BatchNorm1d(2), nn.Conv1d(2, 3, 2, bias=False), nn.BatchNorm1d(3), nn.ReLU(), nn.Dropout(0.5)]
    return sequence(*layers, nn.Conv1d(3, 2, 2), nn.Hardtanh(), nn.Flatten(), nn.Linear(6, 1), size=(2, 5))


@net
def padded():
    layers = [nn.Conv1d(1, 2, 3, padding=1, padding_mode="reflect"), nn.ReLU()]
    layers += [nn.Conv1d(2, 2, 3, padding=2, padding_mode="circular"), nn.ReLU(), nn.ZeroPad1d((1, -1))]
    layers += [nn.Conv1d(2, 1, 2, padding=1, padding_mode="replicate"), nn.ReLU()]
    return sequence(*layers, nn.Flatten(), nn.Linear(7, 1), size=(1, 4))


class Block(nn.Module):
    """A residual block; the skip is the identity, or a projection."""

    def __init__(self, channels: int, width: int, stride: int = 1, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.skip = nn.Conv2d(channels, width, 1, stride) if stride > 1 or channels != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.second(F.relu(self.first(x), inplace=True)))
        out += self.skip(x)
        return F.relu(out)


@net
def residual():
    return sequence(nn.Conv2d(1, 2, 1), nn.ReLU(), Block(2, 2), nn.Flatten(), nn.Linear(8, 1), size=(1, 2, 2))


@net
def residual_from_the_input():
    return sequence(Block(2, 2), nn.Flatten(), nn.Linear(8, 2), size=(2, 2, 2))


@net
def residual_projected():
    layers = [nn.Conv2d(1, 2, 1), nn.ReLU(), Block(2, 2, norm=True), Block(2, 1, stride=2)]
    return sequence(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2), size=(1, 2, 2))


@net
def sliced_skip():
    """Every second position and more channels of zeros: a skip without weights."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 4, 3, 2, 1), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            skip = F.pad(h[:, :, ::2], (0, 0, 1, 1))
            return self.c((self.b(h) + skip).relu().flatten(1))

    return Net(), torch.randn(N, 1, 4)


@net
def concatenated():
    """Every layer reads all earlier ones, the input too."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(3, 2, 3, padding=1), nn.Conv1d(5, 1, 1)
            self.last = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.a, self.b):
                x = torch.cat([x, F.relu(layer(x))], 1)
            return self.last(torch.relu(self.c(x)).squeeze(1))

    return Net(), torch.randn(N, 1, 3)


@net
def skip_to_the_output():
    """A linear connection from input to output is one path; so is the input itself."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.last, self.straight = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.straight(x) - self.last(self.hidden(x).clamp(min=0))

    return Net(), torch.randn(N, 3)


@net
def summed_with_itself():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            h = h + h.flip(1) + h
            return self.b(torch.relu(h - 0.5) * 2.0)

    return Net(), torch.randn(N, 3)


@net
def by_hand():
    """Products with bare matrices, axes moved about, a mean in the place of a pool, a constant token joined."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.shift = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(3))
            self.token, self.b, self.last = nn.Parameter(torch.randn(1, 1, 3)), nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(x.transpose(1, 2) @ self.a + self.shift)  # [n, 4, 3]
            h = torch.cat([h, self.token.expand(len(x), -1, -1)], dim=1)
            h = torch.relu(self.b(h)).permute(0, 2, 1).reshape(len(x), 2, 5)[:, :, 1:]
            return self.last(h.mean(1, keepdim=True).view(len(x), -1))

    return Net(), torch.randn(N, 2, 4)


@net
def average_then_residual():
    """A branch that meets another one under a pool, and a broadcast sum."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv1d(1, 2, 2), nn.Conv1d(2, 2, 1), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            h = torch.relu(self.b(h) + h.mean(-1, keepdim=True))
            return self.c(F.adaptive_avg_pool1d(h, 1).squeeze(-1))

    return Net(), torch.randn(N, 1, 4)


@net
def bare_products():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.randn(size)) for size in ((3, 4), (4, 3), (3, 1)))
            self.shift = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.addmm(self.shift, torch.relu(torch.mm(x, self.a)), self.b)
            return torch.relu_(h) @ self.c

    return Net(), torch.randn(N, 3)
