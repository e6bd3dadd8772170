"""What the check of a model's rules found, kept for the next call with the same model and shapes.

The kernels of small problems take less time than the check of their rules. A scope asks for the same kernel hundreds of times,
with other weights each time. Whether a rule fits depends on the structure of a model, not on its weights, so what a check found
may be used again, as long as this holds:

* :func:`structure_key` is the same: types, attributes, hooks and parameters of all modules (shapes, types, ``requires_grad``),
  shapes and types of the inputs, and what is asked for.
* The graph of every forward pass is the same (``graph_facts``): the same operations with the same arguments that are not tensors,
  in the same order, on the same parameters and inputs.
* The output of a sample in a batch of one is what it is in the batch.

All three are compared at every call; if one differs, the whole check runs again. Only descriptions are kept, no tensor and no
module; they go with the model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

KEPT = 8  # checks a model: of a few kinds of kernel and a few shapes
PLAIN = (bool, int, float, str, type(None))
Key = tuple[Hashable, ...]


class StaleCheck(Exception):  # noqa: N818
    """The model no longer does what it did when its rules were checked."""


@dataclass(frozen=True)
class CheckResult:
    """What a check found. ``findings``: attributes of the kernel, modules given by number. ``graphs``: signatures by shapes."""

    findings: dict[str, Any]
    graphs: dict[Hashable, int] = field(default_factory=dict)


_results: WeakKeyDictionary[nn.Module, OrderedDict[Key, CheckResult]] = WeakKeyDictionary()


def recall(model: nn.Module, key: Key) -> CheckResult | None:
    """What the last check under this key found, or ``None``."""
    kept = _results.get(model)
    if kept is None or key not in kept or not kept[key].graphs:
        return None
    kept.move_to_end(key)
    return kept[key]


def remember(model: nn.Module, key: Key, result: CheckResult) -> None:
    """Keep what a check found; of the ``KEPT`` latest keys."""
    kept = _results.setdefault(model, OrderedDict())
    kept[key] = result
    while len(kept) > KEPT:
        kept.popitem(last=False)


def forget(model: nn.Module) -> None:
    """Drop everything kept about a model."""
    _results.pop(model, None)


def structure_key(model: nn.Module, data: Any, *asked: Any) -> Key | None:
    """Everything that a check may depend on but the weights; ``None`` where that cannot be told.

    ``data``: the inputs. ``asked``: what is asked for.
    """
    try:
        shapes = tuple([shape_key(leaf) for leaf in pytree.tree_leaves(data)])
        key = (shapes, asked, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), _modules_key(model))
        hash(key)
    except (TypeError, RuntimeError):  # an argument without a hash, a parameter without a shape
        return None
    return key


def shape_key(leaf: Any) -> Hashable:
    """Shape, type and device of a tensor; another argument itself."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    if isinstance(leaf, PLAIN):
        return leaf
    raise TypeError


def _modules_key(model: nn.Module) -> Hashable:
    found: list[Any] = []
    for module in model.modules():
        found.append(type(module))
        for name, value in vars(module).items():
            if isinstance(value, PLAIN):
                found.append(value)
            elif isinstance(value, dict):
                if value:
                    found.append(_entries_key(name, value))
            else:
                found.append(value if isinstance(value, tuple) else id(value))
    return tuple(found)


def _entries_key(name: str, entries: dict[Any, Any]) -> Hashable:
    if name == "_parameters":
        return tuple(
            [(key, p is not None and (id(p), p.shape, p.dtype, p.requires_grad)) for key, p in entries.items()]
        )
    if name == "_buffers":
        return tuple([(key, b is not None and (b.shape, b.dtype)) for key, b in entries.items()])
    return name, tuple([(key, id(value)) for key, value in entries.items()])


# --- the graph of a forward pass -----------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphFacts:
    """What the graph of a forward pass says.

    ``kinds``: names of operations, without those that made a tap. ``custom``: whether some are written by hand. ``reads``: how
    often each leaf is read, by its ``id``. ``signature``: a hash of all operations and their order.
    """

    kinds: set[str]
    custom: bool
    reads: dict[int, int]
    signature: int


def graph_facts(out: Tensor, leaves: dict[int, int], taps: list[Any]) -> GraphFacts:
    """Walk the graph behind ``out`` once. ``leaves``: numbers of tensors, by ``id``. ``taps``: nodes that belong to layers."""
    numbers: dict[Any, int] = {}
    reads: dict[int, int] = {}
    found: list[tuple[Hashable, ...]] = []
    links: list[Any] = []
    kinds: set[str] = set()
    custom = False
    tapped = set(taps)
    waiting: list[Any] = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in numbers:
            continue
        numbers[node] = len(numbers)
        kind = type(node)
        name = node.name()
        following = node.next_functions
        links.append(following)
        if name == "torch::autograd::AccumulateGrad":
            found.append((leaves.get(id(node.variable)),))
            continue
        if node not in tapped:
            kinds.add(name)
            custom = custom or isinstance(node, torch.autograd.function.BackwardCFunction)
        found.append((name, *[_plain(getattr(node, argument)) for argument in _plain_arguments(node, kind)]))
        for before, _ in following:
            if before is not None:
                waiting.append(before)
    for following in links:
        for before, _ in following:
            if before is not None and before.name() == "torch::autograd::AccumulateGrad":
                read = id(before.variable)
                reads[read] = reads.get(read, 0) + 1
    linked = tuple([tuple([(numbers.get(before), place) for before, place in following]) for following in links])
    layers = tuple([numbers.get(node) for node in taps])
    return GraphFacts(kinds, custom, reads, hash((tuple(found), linked, layers)))


_arguments: dict[type, tuple[str, ...]] = {}


def _plain_arguments(node: Any, kind: type) -> tuple[str, ...]:
    """Names of what an operation keeps of its arguments, but for tensors."""
    known = _arguments.get(kind)
    if known is None:
        names = [name for name in dir(kind) if name.startswith("_saved_")]
        known = _arguments[kind] = tuple([name for name in names if _is_plain(node, name)])
    return known


def _plain(value: Any) -> Hashable:
    return value.shape if isinstance(value, Tensor) else value


def _is_plain(node: Any, name: str) -> bool:
    try:
        value = getattr(node, name)
    except RuntimeError:  # a tensor that is gone
        return False
    return isinstance(value, (*PLAIN, tuple)) and not any(
        isinstance(part, Tensor) for part in pytree.tree_leaves(value)
    )
