"""What a classifier does class by class: accuracy, active paths, class-averaged kernels.

The classes are the groups of the batch, in their order; targets may differ from member to member, classes do not. Every result
has a last axis (kernels: two) over classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.data.dataset import Dataset
from unlazy.kernels.overlap import hard_gates, overlap_from_gates, path_count_from_gates
from unlazy.models.dense_layers import Affine, ConstantAffine, States
from unlazy.models.net import GatedNet
from unlazy.runtime import Unsupported, require

Measured = dict[str, Tensor]
CHUNK = 4096  # samples that pass the stack at a time: it holds all its layers for each


def class_curves(model: GatedNet, batch: Dataset) -> Measured:
    """Per class: ``accuracy`` as trained, ``accuracy_hard_gates``, mean active ``paths``, mean ``log_paths`` (of 1 + paths)."""
    share, sums = _class_averages(batch), dict[str, Tensor]()
    with torch.no_grad():
        for first in range(0, len(batch), CHUNK):
            rows = slice(first, first + CHUNK)
            for name, values in _by_sample(model, batch.x[rows], batch.y[..., rows, :]).items():
                sums[name] = sums.get(name, 0) + values.double() @ share[rows]
    return sums


def _by_sample(model: GatedNet, x: Tensor, y: Tensor) -> Measured:
    """Accuracies and path counts of each sample."""
    gates, wanted = model.gates(x), y.argmax(-1)
    hard = gates.hard()
    paths = path_count_from_gates(hard)
    return {
        "accuracy": model.value(x, gates).argmax(-1) == wanted,
        "accuracy_hard_gates": model.value(x, hard).argmax(-1) == wanted,
        "paths": paths,
        "log_paths": paths.log1p(),
    }


def class_kernels(model: GatedNet, batch: Dataset) -> Measured:
    """Overlap and tangent kernel, each averaged over the pairs of two classes, and the mean tangent diagonal of each class.

    The tangent kernel is summed over outputs and taken over all trained parameters.
    """
    share = _class_averages(batch)  # [n, classes]
    gates, tangent = hard_gates(model, batch.x), dense_tangent_kernel(model, batch.x).double()
    overlap = overlap_from_gates(gates, gates)
    return {
        "overlap": share.mT @ overlap @ share,
        "tangent": share.mT @ tangent @ share,
        "tangent_diagonal": tangent.diagonal(dim1=-2, dim2=-1) @ share,
    }


def dense_tangent_kernel(model: GatedNet, x: Float[Tensor, "n d"]) -> Float[Tensor, "*members n n"]:
    """The tangent kernel of a dense gated network or a whole stack at once, summed over outputs.

    A layer h -> h W^T + b adds (h . h' + 1) times the sum over outputs of <d, d'>, d the output's gradient at the layer: what
    ``tangent_kernel`` gives, member by member, at a small part of its cost for a stack.
    """
    if model.quadratic is not None or not model.has_exact_gradient():
        raise Unsupported(
            "GatedNet",
            "quadratic or straight-through gates are no dense layers",
            "Use tangent_kernel(member(net, i), x).",
        )
    with torch.enable_grad(), _record_calls(model) as calls:
        out = model(x)  # [*S, n, outputs]
        after = [call[2] for call in calls]
        found = [torch.autograd.grad(one.sum(), after, retain_graph=True) for one in out.unbind(-1)]
    kernel = out.new_zeros(())
    for (layer, before, _), by_output in zip(calls, zip(*found, strict=True), strict=True):
        gradients = torch.cat(by_output, dim=-1)  # [*S, n, outputs * units]
        kernel = kernel + _input_products(layer, before) * (gradients @ gradients.mT)
    return kernel.detach()


def _input_products(layer: Affine, before: Tensor) -> Tensor:
    """h . h' of the layer's inputs, plus 1 if it has a bias."""
    constant = isinstance(layer, ConstantAffine)
    inner = before.new_full((), layer.weight.shape[-1]) if constant else (before @ before.mT).detach()
    return inner if layer.bias is None else inner + 1


@contextmanager
def _record_calls(model: GatedNet) -> Iterator[list[tuple[Affine, Tensor, Tensor]]]:
    """Record the calls of trained dense layers inside the block, as ``(layer, its input, its output)``."""
    calls: list[tuple[Affine, Tensor, Tensor]] = []

    def add_call(layer: Affine, given: tuple[States], out: Tensor) -> None:
        calls.append((layer, given[0][-1], out))

    trained = [m for m in model.modules() if isinstance(m, Affine) and m.weight.requires_grad]
    hooks = [layer.register_forward_hook(add_call) for layer in trained]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _class_averages(batch: Dataset) -> Float[Tensor, "n classes"]:
    """The matrix that averages over classes: one column a class, 1 / its size on its samples and 0 elsewhere."""
    require(len(batch.groups) > 0, "classes are the groups of a batch, and this one has none.")
    inside = torch.stack(list(batch.groups.values()), dim=1).double()
    empty = [name for name, size in zip(batch.groups, inside.sum(0), strict=True) if size == 0]
    require(not empty, f"no sample of class {', '.join(empty)} in the batch.")
    return inside / inside.sum(0)
