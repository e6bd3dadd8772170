"""Active paths of one input, listed one by one: slow and simple, for small networks and for tests.

Every number of the forward pass carries the list of paths that end in it. Which numbers feed which is found by calling the
torch functions again, with one unit at a time and every weight replaced by one. So no rule for strides or groups is needed.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from unlazy.kernels.capture import Inputs, check_numbers, sample_count
from unlazy.kernels.gate_calls import (
    NO_HARD_GATE,
    FunctionWatch,
    get_argument,
    is_between,
    linear_range,
    no_hard_gate_error,
)
from unlazy.kernels.gated import is_stack, net_gates
from unlazy.kernels.paths.count import check_output
from unlazy.kernels.paths.trace import trace
from unlazy.models.image_net import GatedImageNet
from unlazy.models.net import GatedNet
from unlazy.runtime import Unsupported, require

Unit = tuple[str, tuple[int, ...]]  # layer, index in it
Label = tuple[str, int]  # operation, flat index
Path = tuple[Label, ...]
BARE = {"matmul", "mm", "spmm", "__matmul__"}  # weights without a bias
CONVOLUTIONS = {f"conv{kind}{axes}d" for kind in ("", "_transpose") for axes in (1, 2, 3)}
WEIGHTED = {"linear", "addmm"} | BARE | CONVOLUTIONS
CONSTANT = {"add", "add_", "sub", "sub_", "__rsub__"}


def active_paths(
    model: nn.Module, x: Inputs, *, output: int = 0, bias_paths: bool = False, limit: int = 100_000
) -> list[tuple[Unit, ...]]:
    """The active paths of one input to one output, each as the units it visits: ``(layer, index)``, the output unit last.

    The same paths that :func:`~unlazy.kernels.overlap.path_count` counts; a unit is listed for every layer with weights. Two
    edges between the same units (two taps of a filter that see the same padded unit) are two paths. For small networks:
    refuses to list more than ``limit``.
    """
    require(sample_count(x) == 1, f"paths are listed for one input at a time, got {sample_count(x)}; give x[i:i+1].")
    if isinstance(model, GatedImageNet) and model.settings.gating != "own":
        raise Unsupported(
            "GatedImageNet", "listing knows only dense gated networks", "Count its paths with path_count."
        )
    if isinstance(model, GatedNet):
        return _dense_paths(model, x, output, bias_paths, limit)
    graph = trace(model, x).graph  # refuses what has no rule
    check_output(output, graph.nodes[-1].shape[0])
    walker = walk(model, x, bias_paths=bias_paths, limit=limit)
    found = walker.output_paths[output]
    return [tuple(walker.units[label] for label in path if label in walker.units) for path in found]


def walk(
    model: nn.Module, x: Inputs, *, bias_paths: bool = False, inputs: bool = False, limit: int = 100_000
) -> Walker:
    """All active paths of one input, in ``output_paths`` of the walker. ``inputs``: paths begin at input nodes."""
    check_numbers(model, x)
    own = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, x)
    walker = Walker(own, bias_paths=bias_paths, inputs=inputs, limit=limit)
    walker.collect_paths(walker.run(model, own))
    return walker


def _dense_paths(model: GatedNet, x: Tensor, output: int, bias_paths: bool, limit: int) -> list[tuple[Unit, ...]]:
    """One open unit of every layer; with biases, also the ends of paths that begin later."""
    if is_stack(model):
        raise Unsupported("GatedNet", "a stack has one set of paths per member", "Pick one with member(net, index).")
    gates = net_gates(model, x)
    if any(layer.ndim != 2 for layer in gates):
        raise Unsupported("GatedNet", "listing knows only dense gated networks", "Count its paths with path_count.")
    check_output(output, model.settings.outputs)
    layers = [layer[0].nonzero()[:, 0].tolist() for layer in gates]
    units = [[(f"layer {i + 1}", (unit,)) for unit in layer] for i, layer in enumerate(layers)]
    units.append([("output", (output,))])
    firsts = range(len(units)) if bias_paths and model.settings.value_bias else [0]
    total = sum(math.prod(len(layer) for layer in units[first:]) for first in firsts)
    _check_limit(total, limit)
    found: list[tuple[Unit, ...]] = list(itertools.product(*units))
    for first in firsts if len(firsts) > 1 else []:
        found += [(("bias", (first,)), *path) for path in itertools.product(*units[first:])]
    return found


def _check_limit(count: int, limit: int) -> None:
    require(count <= limit, f"more than {limit} paths (at least {count}): count them with path_count, or raise limit.")


@dataclass
class Ends:
    """For every number of a tensor: the paths that end there, and whether it is the input itself."""

    paths: list[list[Path]]
    raw: list[bool]


@dataclass(frozen=True)
class Call:
    """A call of a torch function that can be repeated: ``numbers`` are those of its arguments that carry paths."""

    function: Any
    leaves: list[Any]
    structure: Any
    numbers: dict[int, Tensor]

    def call_again(self, numbers: dict[int, Tensor], *, weights_one: bool) -> Tensor:
        """The result for other numbers; all constants may be replaced by ones."""
        new = list(self.leaves)
        for i, leaf in enumerate(self.leaves):
            if i in numbers:
                new[i] = numbers[i].clone()
            elif weights_one and isinstance(leaf, Tensor) and leaf.is_floating_point():
                new[i] = torch.ones_like(leaf)
        arguments, options = pytree.tree_unflatten(new, self.structure)
        return self.function(*arguments, **options)

    def edges(self) -> list[Tensor]:
        """For every argument, which of its numbers feed which numbers of the result: booleans ``[from, to]``."""
        zero = {i: torch.zeros_like(value) for i, value in self.numbers.items()}
        still = self.call_again(zero, weights_one=True)
        found = []
        for i, value in self.numbers.items():
            units = torch.eye(value.numel(), dtype=value.dtype).unflatten(1, value.shape)
            answers = [self.call_again(zero | {i: unit}, weights_one=True) - still for unit in units]
            found.append(torch.stack(answers).flatten(1) != 0)
        return found

    def edges_to_maxima(self) -> Tensor:
        """For a maximum: which numbers of the argument were the maximum of which number of the result, ``[from, to]``."""
        ((i, value),) = self.numbers.items()
        jacobian = torch.autograd.functional.jacobian(lambda v: self.call_again({i: v}, weights_one=False), value)
        return jacobian.reshape(-1, value.numel()).T != 0


class Walker(FunctionWatch):
    """Carries the paths of one sample through a forward pass."""

    def __init__(self, x: Inputs, *, bias_paths: bool, inputs: bool, limit: int) -> None:
        super().__init__()
        self.bias_paths, self.limit = bias_paths, limit
        self.units: dict[Label, Unit] = {}
        self.output_paths: list[list[Path]] = []
        self._ends: Any = WeakTensorKeyDictionary()
        self._calls = itertools.count()
        for number, leaf in enumerate(pytree.tree_leaves(x)):
            size = leaf.numel()
            begun: list[list[Path]] = [[((f"input {number}", i),)] if inputs else [] for i in range(size)]
            self._ends[leaf] = Ends(begun, [not inputs] * size)

    def collect_paths(self, out: Tensor) -> None:
        """Set ``output_paths``: for every output the paths that end there."""
        ends = self._ends.get(out)
        if ends is None:
            raise Unsupported("the model", "its output was not seen to depend on the input", "Check its forward.")
        self.output_paths = [
            paths + [(("input", i),)] * is_raw
            for i, (paths, is_raw) in enumerate(zip(ends.paths, ends.raw, strict=True))
        ]

    def intercept(self, name: str, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the function and carry the paths of its arguments to its result."""
        leaves, structure = pytree.tree_flatten((arguments, options))
        known = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf in self._ends]
        if not known:
            return function(*arguments, **options)
        if name in NO_HARD_GATE:
            raise no_hard_gate_error(self.current_module(), name)
        call = Call(function, leaves, structure, {i: leaves[i].clone() for i in known})
        entered = [self._ends[leaves[i]] for i in known]
        result = function(*arguments, **options)
        if not isinstance(result, Tensor):
            return result
        label = f"{name} {next(self._calls)}"
        gate = linear_range(name, arguments, options)
        if gate is not None:
            self._ends[result] = self._apply_gate(label, entered[0], is_between(call.numbers[known[0]], *gate))
        elif "max_pool" in name:
            units = self._apply_gate(label, entered[0], None)
            self._ends[result] = self._linear(label, [(units, call.edges_to_maxima())], None, biased=False)
        else:
            shape = tuple(result.shape[1:]) if name in WEIGHTED else None
            biased = self.bias_paths and _adds_constant(name, arguments, options, len(known))
            branches = list(zip(entered, call.edges(), strict=True))
            self._ends[result] = self._linear(label, branches, shape, biased=biased)
        return result

    def _apply_gate(self, label: str, ends: Ends, is_open: Tensor | None) -> Ends:
        """The paths that end in open units. A gate on the input makes the inputs units."""
        flat = [True] * len(ends.raw) if is_open is None else is_open.flatten().tolist()
        kept: list[list[Path]] = []
        for i, (paths, raw, unit_open) in enumerate(zip(ends.paths, ends.raw, flat, strict=True)):
            own: list[Path] = [((label, i),)] if raw else []
            if raw:
                self.units[(label, i)] = (self.current_module(), (i,))
            kept.append([*paths, *own] if unit_open else [])
        return Ends(kept, [False] * len(kept))

    def _linear(self, label: str, branches: list[tuple[Ends, Tensor]], shape: Any, *, biased: bool = False) -> Ends:
        """Paths along edges ``[from, to]``. ``shape``: of new units, where there are weights; there paths begin."""
        size = branches[0][1].shape[1]
        paths: list[list[Path]] = [[] for _ in range(size)]
        raw = [False] * size
        for number, (ends, edges) in enumerate(branches):
            for source, target in edges.nonzero().tolist():
                mark = (f"{label} from {number}", source * size + target)
                paths[target] += [(*path, mark) for path in ends.paths[source]]
                raw[target] = raw[target] or ends.raw[source]
        _check_limit(sum(map(len, paths)), self.limit)
        fed = torch.stack([edges.any(0) for _, edges in branches]).any(0).tolist()
        for target in range(size):
            if biased or (self.bias_paths and not fed[target] and label.startswith("cat")):  # a constant joined
                paths[target].append(((f"{label} bias", target),))
            if shape is not None:
                if raw[target]:
                    paths[target].append(((f"{label} begins", target),))
                raw[target] = False
                place = tuple(int(i) for i in torch.unravel_index(torch.tensor(target), shape))
                self.units[(label, target)] = (self.current_module(), place)
                paths[target] = [(*path, (label, target)) for path in paths[target]]
        return Ends(paths, raw)


def _adds_constant(name: str, arguments: tuple[Any, ...], options: dict[str, Any], known: int) -> bool:
    """Whether a call has a constant node of its own: a bias, the shift of a batch-norm, a constant added."""
    if name in WEIGHTED - BARE:
        return name == "addmm" or get_argument(arguments, options, 2, "bias") is not None
    return name == "batch_norm" or (name in CONSTANT and known == 1)
