"""Networks of every kind that a scope meets, as data: each gives (module, inputs, class numbers), seeded, in float64."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unlazy import Scope
from unlazy.scope.measurements import Measurements
from unlazy.scope.probe_set import add_target_columns, parse_probe_set
from unlazy.scope.user_model import find_predictions, preserve_state, select_output

N, CLASSES = 30, 3


class Residual(nn.Module):
    """Batch-norm, a skip, average pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norms[0](self.stem(x)))
        return self.head(torch.relu(h + self.norms[1](self.body(h))).mean((2, 3)))


class Words(nn.Module):
    """Tokens through attention; ReLU inside; dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.words(x)).mean(1))


class Places(Words):
    """The same with learned positions, a parameter that no module owns; the answer is wrapped in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(0.1 * torch.randn(5, 8))

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(logits=self.head(self.body(self.words(x) + self.places).mean(1)), cache=None)


class Recurrent(nn.Module):
    """An LSTM; returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.head(self.body(x)[0][:, -1]), None


class TwoInputs(nn.Module):
    """Called with two arguments, or with names; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 7), nn.Linear(4, 7), nn.Linear(7, CLASSES)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.left(a) + self.right(b))
        return {"hidden": hidden, "logits": self.head(hidden)}


def _mlp() -> tuple[nn.Module, Any]:
    layers = [nn.Linear(5, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 10), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(10, CLASSES)), torch.randn(N, 5)


def _shared() -> tuple[nn.Module, Any]:
    """One block under two names."""
    block = nn.Linear(5, 5)
    return nn.Sequential(block, nn.ReLU(), block, nn.ReLU(), nn.Linear(5, CLASSES)), torch.randn(N, 5)


MAKE: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "mlp": _mlp,
    "resnet": lambda: (Residual(), torch.randn(N, 2, 5, 5)),
    "transformer": lambda: (Words(), torch.randint(0, 11, (N, 5))),
    "places": lambda: (Places(), torch.randint(0, 11, (N, 5))),
    "lstm": lambda: (Recurrent(), torch.randn(N, 4, 4)),
    "arguments": lambda: (TwoInputs(), (torch.randn(N, 3), torch.randn(N, 4))),
    "names": lambda: (TwoInputs(), {"b": torch.randn(N, 4), "a": torch.randn(N, 3)}),
    "shared": _shared,
    "gelu": lambda: (nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, CLASSES)), torch.randn(N, 5)),
}
NAMES = list(MAKE)
# gates, path counts and overlap, first-layer neurons
OFFERS = {
    "mlp": (True, True, True),
    "resnet": (True, True, True),
    "transformer": (True, False, False),
    "places": (True, False, False),
    "lstm": (False, False, True),
    "arguments": (False, False, True),
    "names": (False, False, True),
    "shared": (True, True, True),
    "gelu": (False, False, True),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, name)))
        net, x = MAKE[name]()
    x = torch.utils._pytree.tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, x)
    return net.to(dtype), x, torch.arange(N) % CLASSES


def called(net: nn.Module, x: Any) -> Any:
    return net(**x) if isinstance(x, Mapping) else net(*x) if isinstance(x, tuple) else net(x)


def measurements_of(net: nn.Module, x: object, y: Tensor, **options: object) -> Measurements:
    """What a scope would measure on the samples ``x``, set up and not yet run."""
    with preserve_state(net):
        probe = parse_probe_set((x, y), **options)  # type: ignore[arg-type]
        seen = select_output(net, probe, None)
        with torch.no_grad():
            out = find_predictions(called(net, x))
        return Measurements(seen, add_target_columns(probe, out.reshape(len(probe), -1)))


def scores(out: Any) -> Tensor:
    """What the loss is taken of."""
    if isinstance(out, Mapping):
        return out["logits"]
    return out[0] if isinstance(out, tuple) else getattr(out, "logits", out)


def some(x: Any, rows: Tensor) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf[rows], x)


def loop(net: nn.Module, x: Any, y: Tensor, scope: Scope | None, steps: range, pause: float = 0.0) -> None:
    """Full-batch training that somebody may be watching."""
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for step in steps:
        optimiser.zero_grad()
        loss = F.cross_entropy(scores(called(net, x)), y)
        loss.backward()
        optimiser.step()
        time.sleep(pause)
        if scope is not None:
            scope.step(step, batch_loss=loss)


def told(scope: Scope, steps: range, **scalars: float) -> None:
    """Steps without any training."""
    for step in steps:
        scope.step(step, **scalars)
