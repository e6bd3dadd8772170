"""Tracing a forward pass: rules that turn calls of torch functions into operations on numbers of paths.

A rule reads the arguments of one call and adds nodes to the graph. It returns the last node, or ``None`` if it does not cover
this way of calling. The tracer compares the shape of the node with that of the real result, so a misread argument is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unlazy.kernels.capture import Inputs, check_numbers
from unlazy.kernels.gate_calls import per_axis
from unlazy.kernels.paths.operations import (
    Add,
    AxisMap,
    Join,
    Mix,
    Permute,
    Reshape,
    Scale,
    Source,
    Total,
    Unfold,
    Window,
    axis_map,
)
from unlazy.kernels.paths.unit_graph import Rule, Step, TracedGraph, Tracer


def trace(model: nn.Module, x: Inputs, *, given: Sequence[Tensor] = (), given_biased: bool = False) -> TracedGraph:
    """Run the module once and return the graph of its units. Raises ``Unsupported`` for an operation without a rule.

    ``given``: tensors ``[n, ...]`` of zeros and ones that the module multiplies units by, its gates. Paths also begin at gated
    units that do not depend on the input (constant experts); with ``given_biased`` at biases, too.
    """
    check_numbers(model, x)
    with torch.inference_mode(False):  # tensors of that mode do not tell whether they were changed
        own = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, x)
        tracer = Tracer(own, RULES, given, given_biased)
        out = tracer.run(model, tracer.x)
        return tracer.finish(model, out)


# --- weights -------------------------------------------------------------------------------------------------


def _linear_rule(tracer: Tracer, step: Step) -> int | None:
    source, weight, bias = step.only_node(), step.get(1, "weight"), step.get(2, "bias")
    if source is None or weight.ndim != 2:
        return None
    return tracer.add(Mix(len(tracer.node(source).shape) - 1, weight.shape[0], 1, bias is not None), [source])


def _matmul_rule(tracer: Tracer, step: Step) -> int | None:
    source, weight = step.only_node(), step.get(1, "other", "mat2")
    if source is None or weight.ndim != 2:
        return None
    return tracer.add(Mix(len(tracer.node(source).shape) - 1, weight.shape[1], 1, biased=False), [source])


def _addmm_rule(tracer: Tracer, step: Step) -> int | None:
    source, weight = step.node(step.get(1, "mat1")), step.get(2, "mat2")
    if source is None or step.count != 1:
        return None
    return tracer.add(Mix(0, weight.shape[1], 1, biased=True), [source])


def _convolution_rule(tracer: Tracer, step: Step) -> int | None:
    source, weight, bias = step.only_node(), step.get(1, "weight"), step.get(2, "bias")
    if source is None or len(tracer.node(source).shape) != weight.ndim - 1:
        return None
    kernel = weight.shape[2:]
    stride, dilation = (per_axis(step.get(p, n, default=1), len(kernel)) for p, n in ((3, "stride"), (5, "dilation")))
    room = step.get(4, "padding", default=0)
    if room == "same":
        room = [d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)]
    padding = per_axis(0 if room == "valid" else room, len(kernel))
    maps = _window_maps(tracer.node(source).shape[1:], step.result.shape[2:], kernel, stride, padding, dilation)
    seen = tracer.add(Window(maps, pooled=False), [source])
    return tracer.add(Mix(0, weight.shape[0], step.get(6, "groups", default=1), bias is not None), [seen])


def _transposed_convolution_rule(tracer: Tracer, step: Step) -> int | None:
    source, weight, bias = step.only_node(), step.get(1, "weight"), step.get(2, "bias")
    if source is None or len(tracer.node(source).shape) != weight.ndim - 1:
        return None
    kernel, groups = weight.shape[2:], step.get(6, "groups", default=1)
    stride, padding, dilation = (
        per_axis(step.get(p, n, default=d), len(kernel))
        for p, n, d in ((3, "stride", 1), (4, "padding", 0), (7, "dilation", 1))
    )
    maps = []
    for i, k in enumerate(kernel):
        size, out = tracer.node(source).shape[1 + i], step.result.shape[2 + i]
        taps = [
            [(q, p) for p in range(size) if 0 <= (q := p * stride[i] - padding[i] + t * dilation[i]) < out]
            for t in range(k)
        ]
        maps.append(axis_map(1 + i, out, taps))
    seen = tracer.add(Window(tuple(maps), pooled=False), [source])
    return tracer.add(Mix(0, weight.shape[1] * groups, groups, bias is not None), [seen])


def _batch_norm_rule(tracer: Tracer, step: Step) -> int | None:
    source = step.only_node()
    if source is None or step.get(5, "training", default=False):
        return None
    return tracer.add(Scale(biased=True), [source])


def _scale_rule(tracer: Tracer, step: Step) -> int | None:
    """A product with a factor that does not depend on the input, or with a given gate."""
    nodes = [step.node(step.get(0, "input", "self")), step.node(step.get(1, "other"))]
    for gate, other in (nodes, nodes[::-1]):
        if gate is not None and gate in tracer.given:
            if other is None:
                constant = tracer.add(Source(tuple(tracer.given[gate].shape[1:]), raw=True), [])
                other = tracer.add(Scale(tracer.given_biased), [constant])
            return tracer.gate(other, tracer.given[gate])
    divides = step.name.startswith(("div", "true_divide"))
    source = nodes[0] if nodes[0] is not None else nodes[1]
    if step.count != 1 or source is None or (divides and nodes[0] is None) or "rounding_mode" in step.options:
        return None
    return tracer.add(Scale(biased=False), [source])


def _add_rule(tracer: Tracer, step: Step) -> int | None:
    """Two branches meet, or a constant is added."""
    nodes = [step.node(step.get(0, "input", "self")), step.node(step.get(1, "other"))]
    known = [node for node in nodes if node is not None]
    if any(node in tracer.given for node in known):
        return None
    if len(known) == 1:
        return tracer.add(Scale(biased=True), known)
    if len({len(tracer.node(node).shape) for node in known}) > 1:
        return None
    return tracer.add(Add(), known)


# --- windows and pools ---------------------------------------------------------------------------------------


def _window_maps(
    sizes: Sequence[int],
    outs: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[AxisMap, ...]:
    """One map per axis of positions: place q sees q * stride - padding + t * dilation, if that is inside."""
    maps = []
    for i, (size, out) in enumerate(zip(sizes, outs, strict=True)):
        starts = [(q, q * stride[i] - padding[i]) for q in range(out)]
        taps = [
            [(q, p + t * dilation[i]) for q, p in starts if 0 <= p + t * dilation[i] < size] for t in range(kernel[i])
        ]
        maps.append(axis_map(1 + i, out, taps))
    return tuple(maps)


def _pooled_node(tracer: Tracer, step: Step) -> tuple[int | None, int]:
    """The node that a pool reads and its number of axes of positions; no node where channels are missing."""
    source, axes = step.only_node(), int(step.name[-2])  # max_pool2d
    fits = source is not None and len(tracer.node(source).shape) == axes + 1
    return source if fits else None, axes


def _pool_maps(tracer: Tracer, step: Step, source: int, dilation: Any) -> tuple[AxisMap, ...]:
    axes = step.result.ndim - 2
    kernel = per_axis(step.get(1, "kernel_size"), axes)
    stride = per_axis(step.get(2, "stride") or kernel, axes)
    padding = per_axis(step.get(3, "padding", default=0), axes)
    sizes = tracer.node(source).shape[1:]
    return _window_maps(sizes, step.result.shape[2:], kernel, stride, padding, per_axis(dilation, axes))


def _adaptive_maps(tracer: Tracer, step: Step, source: int) -> tuple[AxisMap, ...]:
    maps = []
    for i, (size, out) in enumerate(zip(tracer.node(source).shape[1:], step.result.shape[2:], strict=True)):
        windows = [range(q * size // out, -(-(q + 1) * size // out)) for q in range(out)]
        taps = [
            [(q, window[t]) for q, window in enumerate(windows) if t < len(window)]
            for t in range(max(len(window) for window in windows))
        ]
        maps.append(axis_map(1 + i, out, taps))
    return tuple(maps)


def _average_pool_rule(tracer: Tracer, step: Step) -> int | None:
    source, _ = _pooled_node(tracer, step)
    return None if source is None else tracer.add(Window(_pool_maps(tracer, step, source, 1), pooled=True), [source])


def _adaptive_average_pool_rule(tracer: Tracer, step: Step) -> int | None:
    source, _ = _pooled_node(tracer, step)
    if source is None:
        return None
    maps = _adaptive_maps(tracer, step, source)
    if all(way.size == 1 for way in maps):
        return tracer.add(Total(frozenset(way.axis for way in maps), keep=True), [source])
    return tracer.add(Window(maps, pooled=True), [source])


def _max_pool_rule(tracer: Tracer, step: Step) -> int | None:
    source, axes = _pooled_node(tracer, step)
    if source is None:
        return None
    dilation = step.get(4, "dilation", default=1)
    _, chosen = MAX_POOLS[axes - 1](
        step.get(0, "input"),
        step.get(1, "kernel_size"),
        step.get(2, "stride"),
        step.get(3, "padding", default=0),
        dilation,
        step.get(5, "ceil_mode", default=False),
        return_indices=True,
    )
    return _gate_of_maximum(tracer, source, _pool_maps(tracer, step, source, dilation), chosen)


def _adaptive_max_pool_rule(tracer: Tracer, step: Step) -> int | None:
    source, axes = _pooled_node(tracer, step)
    if source is None:
        return None
    _, chosen = ADAPTIVE_MAX_POOLS[axes - 1](step.get(0, "input"), step.get(1, "output_size"), return_indices=True)
    return _gate_of_maximum(tracer, source, _adaptive_maps(tracer, step, source), chosen)


MAX_POOLS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
ADAPTIVE_MAX_POOLS = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)


def _gate_of_maximum(tracer: Tracer, source: int, maps: tuple[AxisMap, ...], chosen: Tensor) -> int:
    """Max-pooling is a gate on each tap of each window: open where the maximum is and the unit there is open."""
    is_open: Tensor | None = tracer.draft.masks.get(source)
    if is_open is not None:
        source = tracer.node(source).inputs[0]
    unfold = Unfold(maps)
    sizes = tracer.node(source).shape[1:]
    places = torch.arange(1, 1 + torch.Size(sizes).numel(), device=chosen.device).reshape(sizes)  # 0: outside
    seen = unfold.carry([places[None, ..., None, None]], frozenset(), [(1, *sizes)])
    assert seen is not None
    masks = chosen.unsqueeze(1) + 1 == seen[:, 0, ..., 0, 0].unsqueeze(1)  # [n, taps, c, positions]
    if is_open is not None:
        masks &= is_open.flatten(2).gather(2, chosen.flatten(2)).reshape(chosen.shape).unsqueeze(1)
    gated = tracer.gate(tracer.add(unfold, [source]), masks)
    return tracer.add(Total(frozenset({0}), keep=False), [gated])


def _pad_rule(tracer: Tracer, step: Step) -> int | None:
    source, mode = step.only_node(), step.get(2, "mode", default="constant")
    room = list(step.get(1, "pad"))
    if source is None or (mode == "constant" and step.get(3, "value", default=0) != 0):
        return None
    shape = tracer.node(source).shape
    maps = []
    for i, (before, after) in enumerate(zip(room[::2], room[1::2], strict=True)):
        axis = len(shape) - 1 - i
        if axis < 0:
            return None
        size = shape[axis]
        places: Any = range(-before, size + after)
        if mode == "replicate":
            places = [min(max(p, 0), size - 1) for p in places]
        elif mode == "circular":
            places = [p % size for p in places]
        elif mode == "reflect":
            places = [size - 1 - abs(size - 1 - abs(p)) for p in places]
        taps = [[(q, p) for q, p in enumerate(places) if 0 <= p < size]]
        maps.append(axis_map(axis, len(places), taps))
    return tracer.add(Window(tuple(maps), pooled=False), [source])


def _index_rule(tracer: Tracer, step: Step) -> int | None:
    """x[:, 3:, ::2, 0]: slices and numbers on all axes but that of the samples."""
    source, index = step.only_node(), step.arguments[1]
    index = list(index) if isinstance(index, tuple) else [index]
    if source is None or not all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in index):
        return None
    if any(isinstance(part, bool) for part in index):
        return None
    shape = tracer.node(source).shape
    used = sum(part is not None and part is not Ellipsis for part in index)
    if Ellipsis in index:
        middle = index.index(Ellipsis)
        index[middle : middle + 1] = [slice(None)] * (1 + len(shape) - used)
    parts = [part for part in index if part is not None]
    if not parts or parts[0] != slice(None) or index[0] is None:
        return None
    maps = []
    for axis, part in enumerate(parts[1:]):
        places = range(shape[axis])[part] if isinstance(part, slice) else [range(shape[axis])[part]]
        maps.append(axis_map(axis, len(places), [list(enumerate(places))]))
    chosen = tracer.add(Window(tuple(maps), pooled=False), [source])
    return tracer.add(Reshape(tuple(step.result.shape[1:])), [chosen])


def _flip_rule(tracer: Tracer, step: Step) -> int | None:
    source, dims = step.only_node(), _dims(step.get(1, "dims"), step.arguments[1:])
    if source is None:
        return None
    axes = _axes(tracer, source, dims)
    if axes is None:
        return None
    shape = tracer.node(source).shape
    maps = [axis_map(a, shape[a], [[(q, shape[a] - 1 - q) for q in range(shape[a])]]) for a in sorted(axes)]
    return tracer.add(Window(tuple(maps), pooled=False), [source])


# --- axes ----------------------------------------------------------------------------------------------------


def _reshape_rule(tracer: Tracer, step: Step) -> int | None:
    """The same units in the same order under another shape; samples stay first."""
    source, result = step.only_node(), step.result
    if source is None or result.ndim == 0 or result.shape[0] != tracer.n or not result.is_floating_point():
        return None
    return tracer.add(Reshape(tuple(result.shape[1:])), [source])


def _permute_rule(tracer: Tracer, step: Step) -> int | None:
    source, dims = step.only_node(), _dims(step.get(1, "dims"), step.arguments[1:])
    return None if source is None else _permute(tracer, source, dims)


def _transpose_rule(tracer: Tracer, step: Step) -> int | None:
    source = step.only_node()
    if source is None:
        return None
    first, second = step.get(1, "dim0", "axis0"), step.get(2, "dim1", "axis1")
    order = list(range(1 + len(tracer.node(source).shape)))
    order[first], order[second] = order[second], order[first]
    return _permute(tracer, source, order)


def _matrix_transpose_rule(tracer: Tracer, step: Step) -> int | None:
    source = step.only_node()
    if source is None or len(tracer.node(source).shape) < 2:
        return None
    order = list(range(1 + len(tracer.node(source).shape)))
    return _permute(tracer, source, [*order[:-2], order[-1], order[-2]])


def _permute(tracer: Tracer, source: int, dims: Sequence[int]) -> int | None:
    count = 1 + len(tracer.node(source).shape)
    order = [dim % count for dim in dims]
    if order[0] != 0:
        return None
    return tracer.add(Permute(tuple(dim - 1 for dim in order[1:])), [source])


def _total_rule(tracer: Tracer, step: Step) -> int | None:
    """Mean or sum over some axes of each sample."""
    source, dims = step.only_node(), step.get(1, "dim", "axis")
    if source is None or dims is None:
        return None
    axes = _axes(tracer, source, [dims] if isinstance(dims, int) else dims)
    keep = bool(step.get(2, "keepdim", default=False))
    return None if axes is None else tracer.add(Total(axes, keep), [source])


def _concatenate_rule(tracer: Tracer, step: Step) -> int | None:
    tensors, dim = step.get(0, "tensors"), step.get(1, "dim", "axis", default=0)
    if not isinstance(dim, int) or dim % tensors[0].ndim == 0:
        return None
    nodes = []
    for tensor in tensors:
        node = step.node(tensor)
        nodes.append(tracer.add(Source(tuple(tensor.shape[1:]), raw=False), []) if node is None else node)
    return tracer.add(Join(dim % tensors[0].ndim - 1), nodes)


def _copy_rule(tracer: Tracer, step: Step) -> int | None:
    """Functions that keep all units: copies, changes of layout or precision."""
    return step.only_node() if step.result.is_floating_point() else None


def _dropout_rule(tracer: Tracer, step: Step) -> int | None:
    return None if step.get(2, "training", "train", default=True) else step.only_node()


def _axes(tracer: Tracer, source: int, dims: Sequence[int]) -> frozenset[int] | None:
    """Axes of a sample from dimensions of a batch; ``None`` where samples are among them."""
    count = 1 + len(tracer.node(source).shape)
    axes = frozenset(dim % count - 1 for dim in dims)
    return None if -1 in axes or not axes else axes


def _dims(first: Any, rest: tuple[Any, ...]) -> Sequence[int]:
    """Dimensions given as one sequence or one by one."""
    return rest if isinstance(first, int) else first


RULES: dict[str, Rule] = {
    "linear": _linear_rule,
    "addmm": _addmm_rule,
    "batch_norm": _batch_norm_rule,
    "pad": _pad_rule,
    "__getitem__": _index_rule,
    "flip": _flip_rule,
    "permute": _permute_rule,
    "mT.__get__": _matrix_transpose_rule,
    **dict.fromkeys(("matmul", "mm", "spmm", "__matmul__"), _matmul_rule),  # torch.mm calls itself spmm
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution_rule),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution_rule),
    **dict.fromkeys(("mul", "mul_", "multiply", "div", "div_", "true_divide", "neg", "neg_", "__rmul__"), _scale_rule),
    **dict.fromkeys(("add", "add_", "sub", "sub_", "subtract", "rsub", "__rsub__", "__radd__"), _add_rule),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), _average_pool_rule),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"), _adaptive_average_pool_rule),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), _max_pool_rule),
    **dict.fromkeys(("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"), _adaptive_max_pool_rule),
    **dict.fromkeys(("flatten", "reshape", "view", "unflatten", "squeeze", "unsqueeze", "view_as"), _reshape_rule),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose_rule),
    **dict.fromkeys(("mean", "sum"), _total_rule),
    **dict.fromkeys(("cat", "concat", "concatenate"), _concatenate_rule),
    **dict.fromkeys(("contiguous", "clone", "detach", "data.__get__", "to", "float", "double", "type_as"), _copy_rule),
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "dropout_"), _dropout_rule),
    **dict.fromkeys(("feature_alpha_dropout", "feature_dropout"), _dropout_rule),
}
