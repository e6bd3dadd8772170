"""The graph of units of one forward pass: which operation feeds which, and which gates are open on every sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from unlazy.kernels.capture import Inputs, sample_count
from unlazy.kernels.gate_calls import (
    NO_HARD_GATE,
    FunctionWatch,
    get_argument,
    is_between,
    linear_range,
    no_gates_error,
    no_hard_gate_error,
)
from unlazy.kernels.paths.operations import Gate, Opaque, Operation, Shape, Source
from unlazy.runtime import Unsupported

OTHERWISE = "layer_overlap treats every layer as dense and asks only for ReLU-like gates."
READS_VALUES = {
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__", "equal",
    "allclose", "is_nonzero",
}  # fmt: skip
ONLY_SHAPES = {
    "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "zeros_like", "ones_like", "empty_like", "full_like",
}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """An operation, the nodes it reads, the shape of one sample and the module it belongs to."""

    operation: Operation
    inputs: tuple[int, ...]
    shape: Shape
    name: str


@dataclass(frozen=True)
class Graph:
    """Nodes in order, each after those it reads; the last one is the output ``[outputs]``."""

    nodes: tuple[Node, ...]

    def gates(self) -> list[int]:
        """Indices of the nodes that are gates."""
        return [index for index, node in enumerate(self.nodes) if isinstance(node.operation, Gate)]


@dataclass(frozen=True)
class TracedGraph:
    """A graph, which units of each of its gates are open ``[n, *shape]``, and the numbers of each input ``[n, *shape]``."""

    graph: Graph
    masks: dict[int, Tensor]
    inputs: dict[int, Tensor]


@dataclass(frozen=True)
class Step:
    """One call of a torch function: its arguments, its result, and the nodes of the tensors it read."""

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    nodes: dict[int, int]  # by identity of the tensor
    count: int  # how many of the arguments depend on the input
    result: Any = None

    def get(self, position: int, *names: str, default: Any = None) -> Any:
        """An argument by position or by one of its names."""
        return get_argument(self.arguments, self.options, position, *names, default=default)

    def node(self, tensor: Any) -> int | None:
        """The node a tensor stands for; ``None`` for a number, or a tensor that does not depend on the input."""
        return self.nodes.get(id(tensor)) if isinstance(tensor, Tensor) else None

    def only_node(self) -> int | None:
        """The node of the first argument, if all other tensors are constants."""
        return self.node(self.get(0, "input", "self")) if self.count == 1 else None


Rule = Callable[["Tracer", Step], int | None]


@dataclass
class _Draft:
    """Nodes in the order of the forward pass, with masks of open units and numbers of the inputs."""

    nodes: list[Node] = field(default_factory=list)
    masks: dict[int, Tensor] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)


class Tracer(FunctionWatch):
    """Follows tensors through a forward pass. ``add`` and ``gate`` are for the rules of ``trace.py``."""

    def __init__(self, x: Inputs, rules: Mapping[str, Rule], given: Sequence[Tensor], given_biased: bool) -> None:
        super().__init__()
        self.x, self.n, self.rules, self.given_biased = x, sample_count(x), rules, given_biased
        self.draft = _Draft()
        self.given: dict[int, Tensor] = {}
        self._known: Any = WeakTensorKeyDictionary()  # tensor -> (node, version)
        self._written: set[int] = set()  # storages of constants that received something of the input
        for leaf in pytree.tree_leaves(x):
            if isinstance(leaf, Tensor):
                node = self.add(Source(tuple(leaf.shape[1:]), raw=True), ())
                self.draft.inputs[node] = leaf.clone()
                self._remember(leaf, node)
        for gate in given:
            node = self.add(Source(tuple(gate.shape[1:]), raw=False), ())
            self.given[node] = gate.bool()
            self._remember(gate, node)

    # --- for the rules ---------------------------------------------------------------------------------------

    def add(self, operation: Operation, inputs: Sequence[int], name: str | None = None) -> int:
        """A new node; its shape follows from the shapes of what it reads."""
        shapes = [self.draft.nodes[i].shape for i in inputs]
        self.draft.nodes.append(Node(operation, tuple(inputs), operation.shape(shapes), name or self.current_module()))
        return len(self.draft.nodes) - 1

    def gate(self, source: int, is_open: Tensor) -> int:
        """A gate ``[n, *shape]`` on a node; a gate on a gate is one gate."""
        if source in self.draft.masks:
            is_open = is_open & self.draft.masks[source]
            source = self.draft.nodes[source].inputs[0]
        node = self.add(Gate(), [source], self.next_name())
        self.draft.masks[node] = is_open
        return node

    def node(self, index: int) -> Node:
        """A node by its index."""
        return self.draft.nodes[index]

    # --- calls -----------------------------------------------------------------------------------------------

    def intercept(self, name: str, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the function and add the node of its result to the graph."""
        tensors = [leaf for leaf in pytree.tree_leaves((arguments, options)) if isinstance(leaf, Tensor)]
        nodes = {id(tensor): node for tensor in tensors if (node := self._look_up(tensor)) is not None}
        if not nodes or name in ONLY_SHAPES:
            return function(*arguments, **options)
        if name in READS_VALUES:
            raise Unsupported(self.current_module(), f"{name} makes the way depend on values", OTHERWISE)
        step = Step(name, arguments, options, nodes, sum(id(tensor) in nodes for tensor in tensors))
        versions = {id(tensor): tensor._version for tensor in tensors}
        found = self._gate(step)  # before a function that works in place destroys what decides
        result = function(*arguments, **options)
        if isinstance(result, Tensor):
            node = self._if_shape_fits(found, result)
            if node is None:
                known = not any(isinstance(self.node(i).operation, Opaque) for i in nodes.values())
                rule = self.rules.get(name) if known else None
                made = None if rule is None else rule(self, replace(step, result=result))
                node = self._if_shape_fits(made, result)
            self._remember(result, self._opaque(step, result) if node is None else node)
        else:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._remember(leaf, self._opaque(step, leaf))
        for tensor in tensors:
            if tensor._version != versions[id(tensor)]:
                if id(tensor) not in nodes:
                    self._written.add(tensor.untyped_storage()._cdata)
                if tensor is not result:
                    self._remember(tensor, self._opaque(step, tensor))
        return result

    def finish(self, model: nn.Module, out: Tensor) -> TracedGraph:
        """The part of the graph that reaches the output, in order."""
        last = self._look_up(out)
        if last is None:
            raise Unsupported(type(model).__name__, "its output was not seen to depend on the input", OTHERWISE)
        used, waiting = {last}, [last]
        while waiting:
            node = self.node(waiting.pop())
            if isinstance(node.operation, Opaque):
                raise Unsupported(node.name, node.operation.why, node.operation.remedy)
            waiting += [i for i in node.inputs if i not in used]
            used |= set(node.inputs)
        place = {old: new for new, old in enumerate(sorted(used))}
        nodes = []
        for old in sorted(used):
            node = self.node(old)
            nodes.append(Node(node.operation, tuple(place[i] for i in node.inputs), node.shape, node.name))
        if not any(isinstance(node.operation, Gate) for node in nodes):
            raise no_gates_error(model)
        masks = {place[old]: mask for old, mask in self.draft.masks.items() if old in used}
        inputs = {place[old]: numbers for old, numbers in self.draft.inputs.items() if old in used}
        return TracedGraph(Graph(tuple(nodes)), masks, inputs)

    def _gate(self, step: Step) -> int | None:
        found = linear_range(step.name, step.arguments, step.options)
        source = step.only_node()
        if found is None or source is None:
            return None
        pre = step.get(0, "input", "self")
        return self.gate(source, is_between(pre, *found))

    def _if_shape_fits(self, node: int | None, result: Tensor) -> int | None:
        """The node, if its shape is that of the tensor; else ``None``."""
        return node if node is not None and (self.n, *self.node(node).shape) == tuple(result.shape) else None

    def _opaque(self, step: Step, result: Tensor) -> int:
        earlier = next((i for i in step.nodes.values() if isinstance(self.node(i).operation, Opaque)), None)
        if earlier is not None:
            return earlier
        why, remedy = f"{step.name} has no rule for numbers of paths here", OTHERWISE
        if step.name in NO_HARD_GATE:
            refused = no_hard_gate_error(self.current_module(), step.name)
            why, remedy = refused.why, refused.remedy
        return self.add(Opaque(tuple(result.shape[1:]), why, remedy), ())

    def _remember(self, tensor: Tensor, node: int) -> None:
        self._known[tensor] = (node, tensor._version)

    def _look_up(self, tensor: Tensor) -> int | None:
        found = self._known.get(tensor)
        if found is not None and found[1] == tensor._version:
            return int(found[0])
        if found is None and tensor.untyped_storage()._cdata not in self._written:
            return None
        why = "a tensor was changed in place through another view of it"
        return self.add(Opaque(tuple(tensor.shape[1:]), why, OTHERWISE), ())
