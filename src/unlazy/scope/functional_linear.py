"""Dense layers that are no modules: weights a model hands to ``torch.nn.functional.linear`` itself, as attention does.

A stand-in is an ``nn.Linear`` that holds the same parameters and is never called: the rules for dense layers then serve it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unlazy.kernels.capture import Inputs, Tap, call_model, sample_count, take_samples

Note = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """Where the samples are: along an axis, or in the rows, before (``"outer"``) or behind (``"inner"``) the positions."""

    kind: str
    axis: int = 0

    def samples_first(self, given: Tensor, n: int) -> Tensor:
        if self.kind == "axis":
            return given.movedim(self.axis, 0)
        return given.unflatten(0, (n, -1)) if self.kind == "outer" else given.unflatten(0, (-1, n)).transpose(0, 1)

    def back(self, ordered: Tensor) -> Tensor:
        if self.kind == "axis":
            return ordered.movedim(0, self.axis)
        return ordered.flatten(0, 1) if self.kind == "outer" else ordered.transpose(0, 1).flatten(0, 1)


@dataclass(frozen=True)
class StandIn:
    """A dense layer that is no module, and where what it reads has the samples."""

    layer: nn.Linear
    layout: Layout


def stand_ins(model: nn.Module, x: Inputs, parameters: Iterable[nn.Parameter]) -> dict[int, StandIn]:
    """By the id of its weight, a stand-in for every dense layer made of the given parameters without a module of its own.

    The samples are where two of them change places when they do so in the batch: attention may put positions first.
    """
    unserved = {id(p): p for p in parameters}
    if not unserved or sample_count(x) < 2:
        return {}
    there, biases = _entered(model, take_samples(x, slice(0, 2)), unserved)
    turned = pytree.tree_map(lambda leaf: leaf[:2].flip(0) if isinstance(leaf, Tensor) else leaf, x)
    back, _ = _entered(model, turned, unserved)
    found = {}
    for weight in there.keys() & back.keys():
        layout = _layout(there[weight], back[weight])
        bias = biases[weight]
        if layout is not None:
            own = bias if isinstance(bias, nn.Parameter) and id(bias) in unserved else None
            found[weight] = StandIn(_stand_in(unserved[weight], own), layout)
    return found


@contextmanager
def tapped(known: dict[int, StandIn], n: int) -> Iterator[list[Tap]]:
    """Every call inside the block that a stand-in stands for, samples first, as taps connected by autograd."""
    taps: list[Tap] = []

    def note(entered: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        if id(weight) not in known:
            return out
        if not out.requires_grad:
            out.requires_grad_(True)
        layout = known[id(weight)].layout
        ordered = layout.samples_first(out, n)
        reads = layout.samples_first(entered.detach(), n)
        taps.append(Tap(known[id(weight)].layer, reads, ordered, ordered._version))
        return layout.back(ordered)

    with _seeing_linear(note):
        yield taps


def _entered(
    model: nn.Module, x: Inputs, unserved: dict[int, nn.Parameter]
) -> tuple[dict[int, Tensor], dict[int, Tensor | None]]:
    """What each of these weights reads, and the bias beside it."""
    reads, biases = dict[int, Tensor](), dict[int, Tensor | None]()

    def note(entered: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        if id(weight) in unserved:
            reads[id(weight)], biases[id(weight)] = entered.clone(), bias
        return out

    with torch.no_grad(), _seeing_linear(note):
        call_model(model, x)
    return reads, biases


def _layout(there: Tensor, back: Tensor) -> Layout | None:
    """The one way to see the samples in which both orders of two samples agree."""
    if there.shape != back.shape:
        return None
    known = [Layout("axis", axis) for axis in range(there.ndim - 1) if there.shape[axis] == 2]
    if there.ndim == 2 and there.shape[0] % 2 == 0:
        known += [Layout("outer"), Layout("inner")]
    bound = 1e3 * torch.finfo(there.dtype).eps * float(there.abs().max())
    for layout in known:
        swapped = layout.samples_first(back, 2).flip(0)
        if torch.allclose(layout.samples_first(there, 2), swapped, rtol=0, atol=bound):
            return layout
    return None


def _stand_in(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = weight
    made.bias = bias  # type: ignore[assignment]
    return made


@contextmanager
def _seeing_linear(note: Note) -> Iterator[None]:
    """``note(input, weight, bias, result)`` gives the result of every call of ``F.linear`` inside the block."""
    plain = F.linear

    def seen(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return note(input, weight, bias, plain(input, weight, bias))

    F.linear = seen
    try:
        yield
    finally:
        F.linear = plain
